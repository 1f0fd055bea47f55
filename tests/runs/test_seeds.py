"""`--seeds`: a run each, a table at the end; what fails, what is interrupted, and what is typed again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import forks
import pytest

from rollouts.cli import main
from rollouts.errors import ConfigError
from rollouts.runs import seeds as module
from rollouts.runs.seeds import interval_of, read_seeds, table_of

SHORT = "run --env calculator --env.digits 1 --steps 2 --prompts-per-step 2 --samples-per-prompt 4 --eval-tasks 4"
PARTS = '''\
import json
from pathlib import Path


class Fails:
    """A logger that fails for seed 1 as long as there is a file `fail`."""

    in_step = True

    def __init__(self, folder, settings, *, api_token: str = ""):
        self.fails = settings["seed"] == 1 and Path("fail").exists()

    def log(self, metrics, step):
        if self.fails:
            raise OSError("disk full")

    def close(self):
        pass
'''


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts.py").write_text(PARTS)
    return tmp_path


@pytest.fixture
def inside(monkeypatch):
    return stay_inside(monkeypatch)


def stay_inside(monkeypatch):
    """Each run in this process, which saves its imports; gives the command lines."""
    played = []

    def run_command(arguments, variables):
        played.append(arguments)
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            return main(arguments)

    monkeypatch.setattr(module, "run_command", run_command)
    return played


def written(folder="m"):
    return json.loads(Path(folder, "seeds.json").read_text())


@pytest.mark.parametrize(
    ("text", "seeds"), [("0-4", [0, 1, 2, 3, 4]), ("0,3,7", [0, 3, 7]), ("5-6, 1", [5, 6, 1]), ("0-1,1-2", [0, 1, 2])]
)
def test_lists_of_seeds(text, seeds):
    assert read_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "4-0", "a", "-1", "1-", "0;1", "1.5", "0-4000", "0,,1", "١"])
def test_what_is_no_list(text):
    with pytest.raises(ConfigError, match=r"numbers and ranges .*, such as 0-4 or 0,3,7"):
        read_seeds(text)


@pytest.mark.parametrize(("text", "words"), [("5", "--seed 5, or --seeds 0-4 for"), ("0", "--seed 0, or --seeds 0-4")])
def test_one_number_may_mean_a_count(text, words):
    with pytest.raises(ConfigError, match=words):
        read_seeds(text)


def test_the_interval():
    assert interval_of([2.0]) == (1, 2.0, None, None)
    n, mean, low, high = interval_of([0.80, 0.84, 0.82, 0.86, 0.78])
    half = 2.7764451 * 0.0316227766 / 5**0.5  # t of 4 degrees; the deviation of the five
    assert (n, mean) == (5, pytest.approx(0.82))
    assert (low, high) == (pytest.approx(0.82 - half), pytest.approx(0.82 + half))
    table = table_of({0: {"m": 1.0}, 1: {"m": 3.0, "k": 5.0}})
    assert table["m"]["mean"] == 2.0 and table["k"] == {"values": {"0": None, "1": 5.0}, **interval_of([5.0])._asdict()}


@pytest.mark.slow
def test_a_folder_each_a_table_and_the_same_again(inside, capsys):
    assert main([*SHORT.split(), "--seeds", "0-1", "--out", "m"]) == 0
    out = capsys.readouterr().out
    assert "--- seed 0 (1 of 2): m/seed_0\n" in out and "2 of 2 seeds; 95 % t-interval" in out
    rewards = [json.loads(Path(f"m/seed_{seed}/summary.json").read_text())["evaluation"]["after"]["reward_mean"]
               for seed in (0, 1)]  # fmt: skip
    row = written()["metrics"]["after/reward_mean"]
    assert list(row["values"].values()) == rewards and row["mean"] == sum(rewards) / 2
    assert {run["status"] for run in written()["runs"].values()} == {"done"}
    assert "policy/loss" in written()["metrics"]
    configs = [Path(f"m/seed_{seed}/config.toml").read_text() for seed in (0, 1)]
    assert configs[0].replace("seed = 0", "seed = 1") == configs[1], "nothing else differs"

    assert main([*SHORT.split(), "--seeds", "0-2", "--out", "m"]) == 0, "one more seed"
    assert [line[-3] for line in inside] == ["--seed=0", "--seed=1", "--seed=2"], "those that are finished are left"
    assert "--- seed 0 (1 of 3): m/seed_0 is finished" in capsys.readouterr().out

    assert main(["resume", "m", "--steps", "3"]) == 0
    assert [run["steps"] for run in written()["runs"].values()] == [3, 3, 3]
    assert len(inside) == 6 and inside[-1][-4] == "--steps=3"

    assert main([*SHORT.split(), "--steps", "9", "--seeds", "0-1", "--out", "m"]) == 2
    error = capsys.readouterr().err
    assert "m has the seeds of another command: rollouts run" in error and "rollouts resume m" in error


@pytest.mark.slow
def test_other_rules_replace_those_of_the_command(inside):
    assert (
        main([*SHORT.split(), "--steps", "5", "--stop-when", "policy/loss > -9", "--seeds", "0-1", "--out", "m"]) == 0
    )
    assert [run["steps"] for run in written()["runs"].values()] == [1, 1]
    assert main(["resume", "m", "--stop-when", "none", "--steps", "2"]) == 0
    assert [run["steps"] for run in written()["runs"].values()] == [2, 2]
    assert "--stop-when=none" in written()["command"] and "--stop-when=policy/loss > -9" not in written()["command"]


@pytest.mark.slow
def test_one_that_fails_keeps_no_other_from_running(inside, capsys):
    Path("fail").touch()
    line = [*SHORT.split(), "--logger", "./parts.py:Fails", "--logger", "jsonl", "--seeds", "0-2", "--out", "m"]
    assert main(line) == 1
    captured = capsys.readouterr()
    assert "the runs of these seeds failed: 1; try them again with: rollouts resume m" in captured.err
    assert "2 of 3 seeds" in captured.out
    assert [run["status"] for run in written()["runs"].values()] == ["done", "failed", "done"]
    assert written()["metrics"]["after/reward_mean"]["n"] == 2
    Path("fail").unlink()
    assert main(line) == 0
    assert [line[-3] for line in inside] == ["--seed=0", "--seed=1", "--seed=2", "--seed=1"]


def test_a_refused_seed_names_the_others_and_what_to_type(monkeypatch, capsys):
    ended = {0: 0, 3: 1, 5: 2}

    def run_command(arguments, variables):
        seed = int(next(each for each in arguments if each.startswith("--seed=")).partition("=")[2])
        if ended[seed] != 2:  # a run that is refused leaves no folder
            Path("m", f"seed_{seed}").mkdir()
        return ended[seed]

    monkeypatch.setattr(module, "run_command", run_command)
    line = [*SHORT.split(), "--out", "m", "--seeds"]
    assert main([*line, "0,3,5,7"]) == 2
    assert capsys.readouterr().err == (
        "error: seed 5 was refused, and its error is above (finished: 0; failed: 3; not started: 7)\n"
        "correct the cause, then type: rollouts resume m\n"
    )
    shutil.rmtree("m")
    assert main([*line, "5,7"]) == 2
    assert capsys.readouterr().err == (
        "error: seed 5 was refused, and its error is above (not started: 7)\n"
        "correct the cause, then type: the same command again\n"
    )


def test_sft_from_a_file_with_dotted_flags(inside, capsys):
    Path("a.toml").write_text('env = "calculator"\nseed = 7\nsteps = 5\neval_tasks = 0\nprompts_per_step = 2\n')
    line = ["sft", "a.toml", "--env.digits", "1", "--steps", "1", "--seeds", "3,5", "--out", "m"]
    assert main([*line, "--logger.jsonl.file", "other.jsonl"]) == 0
    assert inside[0] == ["sft", "a.toml", "--steps=1", "--env.digits=1", "--logger.jsonl.file=other.jsonl",
                         "--seed=3", "--out=m/seed_3", "--resume=auto"]  # fmt: skip
    assert Path("m/seed_5/other.jsonl").exists() and main(["resume", "m"]) == 0 and len(inside) == 2


@pytest.mark.slow
def test_secrets_are_not_written(inside):
    line = [*SHORT.split(), "--logger", "f=./parts.py:Fails", "--logger.f.api-token", "sk-1", "--seeds", "0-1"]
    assert main([*line, "--out", "m"]) == 0
    assert "--logger.f.api-token=sk-1" in inside[1]
    assert not [file for file in Path("m").rglob("*.*") if file.is_file() and b"sk-1" in file.read_bytes()]
    assert main(["resume", "m", "--steps", "3"]) == 2, "the secret has to be given again"
    assert main(["resume", "m", "--steps", "3", "--logger.f.api-token", "sk-1"]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--seeds 0-1 --seed 3", "--seeds 0-1 and --seed 3 contradict each other"),
        ("--seeds 1", "this is one seed; type --seed 1"),
        ("--seeds x", "expected numbers and ranges"),
        ("--seeds 0-1 --mode eval", "mode eval trains nothing"),
        ("--seeds 0-1 --step 3", "--steps"),
        ("--seeds 0-1 --lr x", "--lr: expected a number"),
        ("--seeds 0-1 --out full", "full exists already"),
        ("--seeds 0-1 --env.digit 3", "digits"),
        ("--seeds", "--seeds needs a value"),
    ],
)
def test_mistakes(arguments, words, inside, capsys):
    Path("full").mkdir()
    Path("full/file").touch()
    assert main(["run", "--env", "calculator", *arguments.split()]) == 2
    assert words in capsys.readouterr().err
    assert not Path("runs").exists() and os.listdir("full") == ["file"], "nothing is left"


def test_a_dry_run(inside, capsys):
    assert main([*SHORT.split(), "--seeds", "4,6", "--out", "m", "--dry-run"]) == 0
    assert not Path("m").exists()
    *_, same, _, verdict = capsys.readouterr().out.splitlines()
    assert same == "the same for 2 seeds: m/seed_4, m/seed_6" and verdict.startswith("ok: ")


def test_resume_one_of_them_for_a_checkpoint(inside, capsys):
    assert main([*SHORT.split(), "--seeds", "0-1", "--out", "m"]) == 0
    assert main(["resume", "m", "--checkpoint", "step_000002"]) == 2
    assert "rollouts resume m/seed_0 --checkpoint step_000002" in capsys.readouterr().err
    Path("m/seeds.json").write_text("{")
    assert main(["resume", "m"]) == 2
    assert "m/seeds.json cannot be read" in capsys.readouterr().err


IN_FORKS = """
import os, runpy, sys
from types import SimpleNamespace
from rollouts.runs import seeds

class Fork:  # what `rollouts run --seeds` uses of a subprocess.Popen; the imports are those of this process
    def __init__(self, command, *, stdin, process_group, preexec_fn):
        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, process_group)
            preexec_fn()
            sys.argv = command[2:]
            code = 1
            try:
                runpy.run_module(command[2], run_name="__main__", alter_sys=True)
            except SystemExit as end:
                code = end.code
            finally:
                sys.stderr.flush()
                os._exit(code or 0)

    def wait(self):
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def send_signal(self, number):
        os.kill(self.pid, number)

seeds.subprocess = SimpleNamespace(Popen=Fork, DEVNULL=None)
runpy.run_module("rollouts", run_name="__main__", alter_sys=True)
"""


def begin(*more):
    line = [*SHORT.split(), "--steps", "500", "--checkpoint-every", "1", *more]
    command = [sys.executable, "-c", IN_FORKS, *line]
    return forks.popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.nightly),
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.nightly),
    ],
)
def test_ended_from_outside_and_continued(number, code, monkeypatch):
    """Real processes: the run of the moment ends with the command, in order where it can, and no other one begins. Once
    it continues in new interpreters, as it does for a user.
    """
    process = begin("--seeds", "0-1", "--out", "m")
    until(lambda: any(Path("m/seed_0/checkpoints").glob("step_*")) if Path("m/seed_0/checkpoints").exists() else False)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == code and not Path("m/seed_1").exists()
    if code > 0:
        assert "interrupted in seed 0; continue all seeds with: rollouts resume m" in error
        assert written()["runs"]["0"]["status"] == "interrupted"
    steps = 1 + max(int(path.name[-6:]) for path in Path("m/seed_0/checkpoints").glob("step_??????"))
    if number != signal.SIGKILL:
        stay_inside(monkeypatch)
    assert main(["resume", "m", "--steps", str(steps)]) == 0
    assert [run["steps"] for run in written()["runs"].values()] == [steps, steps]
    assert "resumed_from" in json.loads(Path("m/seed_0/summary.json").read_text())
