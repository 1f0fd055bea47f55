"""`rollouts config`: the file it prints can be run."""

from __future__ import annotations

import tomllib

from rollouts.cli import main
from rollouts.config.resolving import resolve


def printed(capsys, *argv):
    assert main(["config", *argv]) == 0
    return capsys.readouterr().out


def test_the_default_file_is_the_defaults(capsys):
    assert resolve(tomllib.loads(printed(capsys))) == resolve({})


def test_named_components_are_explained(capsys, acme):
    out = printed(
        capsys, "--env", "acme_env", "--env.digits", "3", "--reward", "env:1", "--reward", "b=acme-parts/brevity:-0.1"
    )
    assert '[env]\nname = "acme_env"\n# How many digits. (a whole number; default 2)\ndigits = 3\n' in out
    assert 'operators = ["+", "*"]' in out
    assert "# (a whole number; default 200)\ntarget_tokens = 200\n# (anything; no default)\n# scale =\n" in out
    result = resolve(tomllib.loads(out))
    assert result.settings.reward == ("env:1", "b=acme-parts/brevity:-0.1")
    assert result.components["env"][0].settings == {"digits": 3, "operators": ["+", "*"]}
    assert "# for its settings, type: rollouts plugins show hf" in out


def test_the_parts_of_an_algorithm_are_explained(capsys):
    out = printed(
        capsys,
        *("--loss", "grpo", "--loss.entropy-coef", "0.001", "--kl", "rk3_loss", "--kl.coef", "0.02"),
        *("--shaping", "overlong", "--reference", "ema", "--correction", "none"),
    )
    assert "# the coefficient of the entropy term (a number; default 0.0)\nentropy_coef = 0.001\n" in out
    assert "# weight of the KL (a number; default 0.01)\ncoef = 0.02\n" in out
    assert '[shaping.overlong]\nname = "overlong"\n' in out and '[reference]\nname = "ema"\n' in out
    result = resolve(tomllib.loads(out))
    assert (result.settings.correction, result.settings.filter) == ("", ("algorithm",))
    assert result.settings.schedule == ()


def test_a_wrong_component_setting_is_told_with_file_and_line(capsys, acme, tmp_path):
    file = tmp_path / "a.toml"
    file.write_text('seed = 1\n[env]\nname = "acme_env"\ndigit = 3\n')
    assert main(["config", str(file)]) == 2
    err = capsys.readouterr().err
    assert (
        f"error: {file}, line 4: env.digit: environment acme_env has no setting 'digit'\ndid you mean: digits?" in err
    )
    assert main(["config", "--env", "acme_env", "--env.digits", "many"]) == 2
    assert 'error: --env.digits: expected a whole number; got "many"' in capsys.readouterr().err


def test_an_unknown_component_is_told(capsys, acme):
    assert main(["config", "--env", "acme_nev"]) == 2
    assert "did you mean: acme_env?" in capsys.readouterr().err
