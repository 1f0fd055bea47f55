"""`rollouts run` and `rollouts sft`: flags, a file and defaults arrive as one Resolved."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollouts.cli import main
from rollouts.config.resolving import resolve
from rollouts.config.settings import FILE_ONLY, setting_infos

CONFIGS = Path(__file__).parents[2] / "configs"


def test_the_bare_command(composed):
    assert main(["run", "--env", "calculator", "--loss", "grpo"]) == 0
    assert composed == [(resolve({"env": "calculator"}), False)]


def test_every_setting_is_a_flag_with_its_documentation(capsys):
    assert main(["run", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for info in setting_infos():
        assert f"{info.flag} " in out or f"{FILE_ONLY[info.name]} " in out
        assert " ".join(info.doc.split()) in out
        assert f"[default: {info.default_text}]" in out
    assert "--template.ARGUMENT" in out
    assert "--loss.clip-high 0.28" in out


@pytest.mark.parametrize("suffix", ["toml", "json", "py"])
def test_a_file_without_a_command_is_run(tmp_path, composed, suffix):
    """Also with dotted flags in front of it."""
    file = tmp_path / f"a.{suffix}"
    file.write_text('{"env": "calculator", "steps": 3}' if suffix == "json" else 'env = "calculator"\nsteps = 3\n')
    for command in ([], ["run"]):
        assert main(["--env.digits", "1", *command, str(file), "--steps", "4"]) == 0
    assert composed[0] == composed[1] and composed[0][0].settings.steps == 4


def test_precedence(tmp_path, composed):
    file = tmp_path / "a.toml"
    file.write_text('steps = 3\nseed = 4\n[env]\nname = "e"\ndigits = 3\nother = 4\n')
    argv = [
        "--env.digits",
        "5",
        "run",
        str(file),
        "--steps",
        "6",
        "--dry-run",
        "--samples_per_prompt",
        "2",
        "--env.new",
        "x",
    ]
    assert main(argv) == 0
    resolved, dry_run = composed[0]
    assert dry_run
    settings = resolved.settings
    assert (settings.steps, settings.seed, settings.samples_per_prompt, settings.max_turns) == (6, 4, 2, 8)
    given = resolved.components["env"][0].settings
    assert given["other"] == 4
    assert {key: given[key].value for key in ("digits", "new")} == {"digits": 5, "new": "x"}
    assert resolved.source.path == str(file)


def test_a_name_that_is_typed_replaces_the_table_of_a_file(tmp_path, composed):
    file = tmp_path / "a.toml"
    file.write_text('[loss]\nname = "grpo"\nclip_high = 0.3\n[inference]\nname = "vllm"\nservers = 2\n')
    assert main(["run", str(file), "--loss", "dapo", "--inference", "vllm"]) == 0
    components = composed[0][0].components
    assert (components["loss"][0].name, components["loss"][0].settings) == ("dapo", {})
    assert (components["inference"][0].name, components["inference"][0].settings) == ("vllm", {"servers": 2})


def test_the_parts_of_an_algorithm_are_flags(composed):
    line = (
        "run --env calculator --loss gspo --advantage rloo --aggregation rollout_mean --kl rk3_loss --kl.coef 0.02 "
        "--reference ema --reference.decay 0.9 --correction truncated --correction.cap 3 --shaping overlong "
        "--shaping.overlong.buffer 32 --mix lexicographic --select reward_at_least --select.threshold 1 "
        "--pairs best_worst --critic head --critic-lr 1e-4 --teacher tiny --teacher-top-k 8 --minibatches 2 "
        "--loss.entropy-coef 0.001 --filter none"
    )
    assert main(line.split()) == 0
    ((resolved, _),) = composed
    settings = resolved.settings
    chosen = {key: [each.name for each in several] for key, several in resolved.components.items()}
    defaults = ("env", "reward", "inference", "training", "logger", "sampler", "tool_parser", "sandbox")
    assert {key: names for key, names in chosen.items() if names and key not in defaults} == {
        "mix": ["lexicographic"],
        "shaping": ["overlong"],
        "loss": ["gspo"],
        "advantage": ["rloo"],
        "aggregation": ["rollout_mean"],
        "kl": ["rk3_loss"],
        "reference": ["ema"],
        "correction": ["truncated"],
        "select": ["reward_at_least"],
        "pairs": ["best_worst"],
    }
    assert chosen["filter"] == []
    assert resolved.components["kl"][0].settings["coef"].value == 0.02
    assert resolved.components["shaping"][0].settings["buffer"].value == 32
    assert (settings.critic, settings.critic_lr, settings.teacher, settings.teacher_top_k) == ("head", 1e-4, "tiny", 8)
    assert settings.minibatches == 2


@pytest.mark.parametrize("argv", [["--schedule", "50"], ["--schedule.loss", "cispo"], ["--schedule.step=50"]])
def test_a_schedule_is_written_in_a_file(argv, composed, capsys):
    assert main(["run", "--env", "calculator", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --schedule") and '[[schedule]]\nstep = 50\nloss = "cispo"' in error
    assert composed == []


@pytest.mark.parametrize(("flag", "value"), [("minibatches", "0"), ("teacher-top-k", "0"), ("critic-lr", "0")])
def test_numbers_of_an_algorithm_have_bounds(flag, value, composed, capsys):
    assert main(["run", "--env", "calculator", f"--{flag}", value]) == 2
    assert f"error: --{flag}: must be " in capsys.readouterr().err


def test_repeated_flags_are_lists(composed):
    argv = ["run", "--reward", "env:1", "--reward", "acme/brevity:-0.1", "--filter", "nonzero_std", "--logger", "none"]
    assert main(argv) == 0
    settings = composed[0][0].settings
    assert settings.reward == ("env:1", "acme/brevity:-0.1")
    assert settings.filter == ("nonzero_std",)
    assert settings.logger == ()


def test_data_is_named_once(composed, capsys):
    """Of other flags the last value counts. Here it would leave out rows in silence."""
    assert main(["sft", "--data", "a.jsonl", "--data", "b.jsonl"]) == 2 and composed == []
    assert "--data is given 2 times: a.jsonl, b.jsonl\nto mix files, type: --env a=prompts" in capsys.readouterr().err


def test_text_stays_text(composed):
    assert main(["run", "--system", "007", "--model", "3.10", "--env", "5", "--out", "true"]) == 0
    settings = composed[0][0].settings
    assert (settings.system, settings.model, settings.env, settings.out) == ("007", "3.10", "5", "true")


def test_sft_is_run_in_its_mode(composed, capsys):
    assert main(["sft", str(CONFIGS / "calculator_tiny.toml"), "--steps", "2"]) == 0
    assert composed[0][0].settings.mode == "sft"
    assert main(["sft", "--mode", "rl"]) == 2
    assert "has no option --mode" in capsys.readouterr().err
