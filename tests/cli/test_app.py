"""The group of commands: what is told, where, and with which exit code."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

import rollouts
from rollouts.cli import main
from rollouts.errors import ConfigError, RewardError


def raising(monkeypatch, error):
    def run(resolved, observer):
        raise error

    monkeypatch.setattr(sys.modules["rollouts.runs"], "run", run)


def test_help_lists_the_commands(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in ("run", "sft", "resume", "export", "config", "plugins"):
        assert f"\n  {name} " in out


def test_nothing_typed_is_help(capsys):
    assert main([]) == 0
    assert "Commands:" in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rollouts {rollouts.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["rum"],
            "error: `rollouts` has no command 'rum'\ndid you mean: rollouts run, rollouts resume?\n"
            "commands: run, sft, eval, resume, ",
        ),
        (["configs/a.toml"], "error: configs/a.toml: there is no such settings file"),
        (
            ["run", "--prompt-per-step", "3"],
            "error: `rollouts run` has no option --prompt-per-step\ndid you mean: --prompts-per-step",
        ),
        (["run", "--prompt_per_step", "3"], "did you mean: --prompts-per-step"),
        (["run", "--clip-high", "3"], "a component's settings are dotted: --env.digits 3"),
        (["run", "--env"], "error: --env needs a value\ntype: --env NAME"),
        (["run", "--env", "--steps", "3"], "error: --env needs a value, and --steps follows it"),
        (["run", "--env.digits"], "error: --env.digits needs a value"),
        (["run", "a.toml", "b.toml"], "unexpected extra argument"),
        (["run", "calculator"], "type `--env calculator`"),
        (["run", "calulator"], "did you mean: --env calculator?"),
        (["run", "till"], "no environment named till is installed; to see which are, type: rollouts plugins list"),
        (["run", "--steps", "many"], 'error: --steps: expected a whole number; got "many"\nfor example: --steps 3'),
        (["run", "--mode", "lr"], 'error: --mode: expected one of: rl, sft, sft+rl, eval; got "lr"'),
        (["run", "--lr", "-1"], "error: --lr: must be more than 0; got -1"),
        (["plugins", "lst"], "error: `rollouts plugins` has no command 'lst'\ndid you mean: rollouts plugins list?\n"),
        (["plugins", "list", "--env.digits", "3"], "error: `rollouts plugins` takes no settings"),
    ],
)
def test_a_mistake_is_one_message_on_stderr_and_code_2(argv, words, capsys, composed):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert words in err
    assert "Traceback" not in err
    assert composed == []


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ConfigError("what was typed"), 2, "error: what was typed\n"),
        (RewardError("step 3: NaN"), 1, "error: step 3: NaN\n"),
        (KeyboardInterrupt("stopped at step 3"), 130, "\nstopped at step 3\n"),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
        (ExceptionGroup("nursery", [ExceptionGroup("inner", [RewardError("NaN")])]), 1, "error: NaN\n"),
        (BaseExceptionGroup("nursery", [KeyboardInterrupt(), ValueError()]), 130, "\ninterrupted\n"),
    ],
)
def test_errors_of_a_run_have_their_exit_code(error, code, words, monkeypatch, capsys, composed):
    raising(monkeypatch, error)
    assert main(["run"]) == code
    assert capsys.readouterr().err == words
    monkeypatch.setenv("ROLLOUTS_TRACEBACK", "1")
    assert main(["run"]) == code
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith(words)


@pytest.mark.parametrize("error", [ZeroDivisionError("ours"), ExceptionGroup("n", [RewardError("a"), ValueError("b")])])
def test_a_bug_is_not_hidden(error, monkeypatch, composed):
    raising(monkeypatch, error)
    with pytest.raises(type(error)):
        main(["run"])


def test_the_command_decides_the_exit_code(monkeypatch):
    monkeypatch.setattr("rollouts.cli.run.run.callback", lambda **options: 3)
    assert main(["run"]) == 3


def test_a_command_of_an_installed_package(acme, capsys):
    assert main(["acme", "--env.digits", "3"]) == 7
    assert capsys.readouterr().out == "acme says ['env']\n"


def test_a_reader_that_leaves_is_no_error():
    command = f"{sys.executable} -m rollouts config | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


def test_ctrl_c_of_a_real_process_is_130(tmp_path):
    (tmp_path / "slow.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(30)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "rollouts", "run", str(tmp_path / "slow.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == 130
    assert err.strip() == "interrupted"
