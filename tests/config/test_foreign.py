"""Names of settings from other libraries: each is answered with what to type here, and that can be typed."""

from __future__ import annotations

import shlex

import pytest

from rollouts.cli import main
from rollouts.config.flags import take_dotted_flags
from rollouts.config.foreign import ours_by_name
from rollouts.config.resolving import resolve
from rollouts.config.settings import COMPONENT_KINDS, setting_infos
from rollouts.errors import ConfigError
from rollouts.plugins import find_component, load_component
from rollouts.runs.components import signed

FOREIGN = ours_by_name("settings")


@pytest.mark.parametrize("flag", ["--num-generations", "--learning_rate", "--max-completion-length", "--batch-size"])
def test_a_flag_from_elsewhere_is_answered_with_ours(flag, capsys):
    assert main(["run", "--env", "calculator", flag, "3"]) == 2
    said = capsys.readouterr().err
    ours = FOREIGN[flag[2:].replace("-", "_")]
    assert f"has no option {flag.replace('_', '-')}\nin rollouts this is: {ours}\n" in said
    assert "did you mean" not in said and "Traceback" not in said


def test_so_is_a_key_in_a_file():
    with pytest.raises(ConfigError, match=r"there is no setting 'num_generations'\nin rollouts this is: --samples-per"):
        resolve({"env": "calculator", "num_generations": 8})


@pytest.mark.parametrize("words", [["eval", "--learning-rate", "1"], ["resume", "runs/x", "--learning-rate", "1"]])
def test_a_command_without_that_setting_does_not_offer_it(words, capsys):
    assert main(words) == 2
    assert "in rollouts" not in capsys.readouterr().err


def test_other_commands_and_our_own_names_have_no_such_hint(capsys):
    assert main(["plugins", "list", "--max-steps", "3"]) == 2
    assert "in rollouts" not in capsys.readouterr().err
    assert not FOREIGN.keys() & {info.name for info in setting_infos()}


def test_what_is_answered_can_be_typed():
    """Each flag is one of a run, each name that of a component, and each dotted flag one of its settings."""
    named = {"training": "torch", "inference": "vllm", "loss": "grpo"}
    typed: dict[str, set[str]] = {}
    for ours in {each for each in FOREIGN.values() if each.startswith("--")}:
        words = shlex.split(ours.replace("NAME:WEIGHT", "env"))
        rest, dotted = take_dotted_flags(words if len(words) > 1 else [*words, "VALUE"])
        for flag, value in zip(rest[::2], rest[1::2], strict=True):
            info = next(info for info in setting_infos() if info.flag == flag)
            if value not in ("VALUE", "env") and info.name in COMPONENT_KINDS:
                named.setdefault(info.name, value)
                assert info.name == "logger" or find_component(COMPONENT_KINDS[info.name], value)
        for key, settings in dotted.items():
            typed.setdefault(key, set()).update(settings)
    for key, settings in typed.items():
        component = load_component(find_component(COMPONENT_KINDS[key], named[key]))
        known = {setting.name for setting in signed(component, COMPONENT_KINDS[key], key)[1].settings}
        assert settings <= known, key


def test_rows_alone_are_the_environment_prompts(tmp_path):
    assert resolve({"data": "rows.jsonl"}).settings.env == "prompts"
    assert resolve({"data": "rows.jsonl", "env": "calculator"}).settings.env == "calculator"
    assert resolve({}).settings.env == ""


@pytest.mark.parametrize("words", [["-h"], ["run", "-h"], ["plugins", "show", "-h"]])
def test_h_is_help(words, capsys):
    assert main(words) == 0
    assert "Usage: " in capsys.readouterr().out
