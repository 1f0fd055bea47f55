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
from rollouts.config.render import to_toml
from rollouts.errors import ConfigError, RunError
from rollouts.runs import several as module
from rollouts.runs.comparing import interval_of
from rollouts.runs.resume import finished
from rollouts.runs.several import read_seeds, table_of

SHORT = "run --env calculator --env.digits 1 --steps 2 --prompts-per-step 2 --samples-per-prompt 4 --eval-tasks 4"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def inside(monkeypatch):
    return stay_inside(monkeypatch)


def stay_inside(monkeypatch):
    """Each run in this process, which saves its imports; gives the command lines."""
    played = []

    def run_child(arguments, variables):
        played.append(arguments)
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            return main(arguments)

    monkeypatch.setattr(module, "run_child", run_child)
    return played


@pytest.fixture
def recorded(inside, monkeypatch):
    """The command lines of the runs, which only write what a run that is done leaves: its settings and its summary. The
    run of seed 1 fails as long as there is a file `fail`.
    """

    def run(resolved, observer=None, *, folder=None, checkpoint=""):
        settings = resolved.settings
        folder = folder or Path(settings.out)
        if finished(folder, settings.steps, settings.stop_when):
            return
        folder.mkdir(parents=True, exist_ok=True)
        begun = {"rollouts": "0", "directory": os.getcwd(), "folder": os.path.realpath(folder)}
        if not (folder / "manifest.json").exists():
            (folder / "manifest.json").write_text(json.dumps(begun))
        (folder / "config.toml").write_text(to_toml(resolved.without_secrets()))
        fails = settings.seed == 1 and Path("fail").exists()
        evaluation = {"after": {"reward_mean": settings.seed / 2}}
        summary = {"status": "failed" if fails else "done", "steps": settings.steps, "evaluation": evaluation}
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "metrics.jsonl").write_text('{"step": 0, "policy/loss": 0.5}\n')
        if fails:
            raise RunError("disk full")

    monkeypatch.setattr("rollouts.runs.run", run)
    return inside


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
    assert interval_of([2.0]) == {"n": 1, "mean": 2.0, "low": None, "high": None}
    n, mean, low, high = interval_of([0.80, 0.84, 0.82, 0.86, 0.78]).values()
    half = 2.7764451 * 0.0316227766 / 5**0.5  # t of 4 degrees; the deviation of the five
    assert (n, mean) == (5, pytest.approx(0.82))
    assert (low, high) == (pytest.approx(0.82 - half), pytest.approx(0.82 + half))
    table = table_of({"0": {"m": 1.0}, "1": {"m": 3.0, "k": 5.0}})
    assert table["m"]["mean"] == 2.0 and table["k"] == {"values": {"0": None, "1": 5.0}, **interval_of([5.0])}


@pytest.mark.slow
def test_each_is_a_single_run(inside, capsys):
    """The only one of these tests that trains."""
    short = [*SHORT.replace("--steps 2", "--steps 1").split(), "--max-tokens", "8"]
    assert main([*short, "--seeds", "0-1", "--out", "m"]) == 0
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
    Path("m").rename("elsewhere")
    assert main(["resume", "elsewhere", "--steps", "2"]) == 0
    assert [run["steps"] for run in written("elsewhere")["runs"].values()] == [2, 2]


def test_the_same_again_leaves_what_is_finished(recorded, capsys):
    assert main([*SHORT.split(), "--seeds", "0-1", "--out", "m"]) == 0
    assert main([*SHORT.split(), "--seeds", "0-2", "--out", "m"]) == 0, "one more seed"
    assert [line[-3] for line in recorded] == ["--seed=0", "--seed=1", "--seed=2"], "those that are finished are left"
    assert "--- seed 0 (1 of 3): m/seed_0 is finished" in capsys.readouterr().out
    assert main(["resume", "m"]) == 0 and len(recorded) == 3
    assert main(["resume", "m", "--steps", "3"]) == 0
    assert [run["steps"] for run in written()["runs"].values()] == [3, 3, 3]
    assert len(recorded) == 6 and recorded[-1] == ["resume", "m/seed_2", "--steps=3"]
    assert main([*SHORT.split(), "--steps", "9", "--seeds", "0-1", "--out", "m"]) == 2
    error = capsys.readouterr().err
    assert "m has the runs of another command: rollouts run" in error and "rollouts resume m" in error


def test_other_rules_replace_those_of_the_command(recorded):
    rules = ["--stop-when", "policy/loss > -9", "--stop-when", "policy/loss < -99"]
    assert main([*SHORT.split(), *rules, "--seeds", "0-1", "--out", "m"]) == 0
    assert main(["resume", "m", "--stop-when", "none", "--steps", "4"]) == 0
    assert recorded[-1] == ["resume", "m/seed_1", "--stop-when=none", "--steps=4"]
    assert "--stop-when=none" in written()["command"] and "policy/loss" not in str(written()["command"])


def test_one_that_fails_keeps_no_other_from_running(recorded, capsys):
    Path("fail").touch()
    line = [*SHORT.split(), "--seeds", "0-2", "--out", "m"]
    assert main(line) == 1
    captured = capsys.readouterr()
    assert "these did not end as they should: seed 1; try them again with: rollouts resume m" in captured.err
    assert "2 of 3 seeds" in captured.out
    assert [run["status"] for run in written()["runs"].values()] == ["done", "failed", "done"]
    assert written()["metrics"]["after/reward_mean"]["n"] == 2
    Path("fail").unlink()
    assert main(line) == 0
    assert [line[-3] for line in recorded] == ["--seed=0", "--seed=1", "--seed=2", "--seed=1"]


def test_a_refused_seed_names_the_others_and_what_to_type(monkeypatch, capsys):
    ended = {0: 0, 3: 1, 5: 2}

    def run_child(arguments, variables):
        seed = int(next(each for each in arguments if each.startswith("--seed=")).partition("=")[2])
        if ended[seed] != 2:  # a run that is refused leaves no folder
            Path("m", f"seed_{seed}").mkdir()
        return ended[seed]

    monkeypatch.setattr(module, "run_child", run_child)
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
    assert not Path("m").exists()


def test_sft_from_a_file_with_dotted_flags(recorded, capsys):
    Path("a.toml").write_text('env = "calculator"\nseed = 7\nsteps = 5\neval_tasks = 0\nprompts_per_step = 2\n')
    line = ["sft", "a.toml", "--env.digits", "1", "--steps", "1", "--seeds", "3,5", "--out", "m"]
    assert main([*line, "--logger.jsonl.file", "other.jsonl"]) == 0
    assert recorded[0] == ["sft", "a.toml", "--steps=1", "--env.digits=1", "--logger.jsonl.file=other.jsonl",
                           "--seed=3", "--out=m/seed_3", "--resume=auto"]  # fmt: skip
    assert 'mode = "sft"' in Path("m/seed_5/config.toml").read_text()


def test_secrets_are_not_written(recorded):
    secret = ["--logger", "f=./parts.py:Logger", "--logger.f.api-token", "sk-1"]
    assert main([*SHORT.split(), *secret, "--seeds", "0-1", "--out", "m"]) == 0
    assert "--logger.f.api-token=sk-1" in recorded[1]
    assert not [file for file in Path("m").rglob("*.*") if file.is_file() and b"sk-1" in file.read_bytes()]
    assert main(["resume", "m", "--steps", "3"]) == 2, "the secret has to be given again"
    assert main(["resume", "m", "--steps", "3", "--logger.f.api-token", "sk-1"]) == 0


@pytest.mark.parametrize("begun", [1, 0], ids=["one has begun", "none has begun"])
def test_resumed_from_elsewhere_and_after_a_move(begun, recorded, here, monkeypatch):
    """The settings of a run are complete in its folder, so the others need neither the file nor the directory."""
    Path("configs").mkdir()
    Path("configs/a.toml").write_text('env = "./my_env.py:Env"\nsteps = 2\n')
    Path("configs/my_env.py").write_text("class Env: ...\n")
    assert main(["run", "configs/a.toml", "--lr", "0.5", "--seeds", "0-1", "--out", "m"]) == 0
    for seed in range(begun, 2):
        shutil.rmtree(f"m/seed_{seed}")
    (here / "other").mkdir()
    if begun:
        Path("m").rename("other/moved")
        monkeypatch.chdir("other")
        Path("../configs/a.toml").unlink()
    recorded.clear()
    folder = "moved" if begun else "m"
    assert main(["resume", folder, "--steps", "4"]) == 0
    first = ["resume", "moved/seed_0", "--steps=4"]
    if not begun:
        first = ["run", "configs/a.toml", "--lr=0.5", "--steps=4", "--seed=0", "--out=m/seed_0", "--resume=auto"]
    second = ["run", f"{folder}/seed_0/config.toml", "--steps=4", "--seed=1", f"--out={folder}/seed_1", "--resume=auto"]
    assert recorded == [first, second]
    configs = [Path(folder, f"seed_{seed}", "config.toml").read_text() for seed in (0, 1)]
    assert "lr = 0.5" in configs[1] and "configs/my_env.py:Env" in configs[1]


def test_objects_of_a_python_file_come_from_the_command(recorded):
    Path("a.py").write_text("env = 'calculator'\nsteps = 2\nreward = lambda trajectory: 1.0\n")
    assert main(["run", "a.py", "--seeds", "0-1", "--out", "m"]) == 0
    assert main(["resume", "m", "--steps", "4"]) == 0
    assert recorded[-1] == ["run", "a.py", "--steps=4", "--seed=1", "--out=m/seed_1", "--resume=auto"]
    assert [run["steps"] for run in written()["runs"].values()] == [4, 4]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--seeds 0-1 --seed 3", "--seeds 0-1 and --seed 3 contradict each other"),
        ("--seeds 0-1 --mode eval", "mode eval trains nothing"),
        ("--seeds 0-1 --lr x", "--lr: expected a number"),
        ("--seeds 0-1 --out full", "full exists already"),
        ("--seeds", "--seeds needs a value"),
    ],
)
def test_mistakes(arguments, words, recorded, capsys):
    Path("full").mkdir()
    Path("full/file").touch()
    assert main(["run", "--env", "calculator", *arguments.split()]) == 2
    assert words in capsys.readouterr().err
    assert not Path("runs").exists() and os.listdir("full") == ["file"], "nothing is left"


def test_a_dry_run(recorded, capsys, monkeypatch):
    monkeypatch.setattr("rollouts.runs.dry_run.dry_run", lambda resolved, same: f"{resolved.settings.seed}\n{same}")
    assert main([*SHORT.split(), "--seeds", "4,6", "--out", "m", "--dry-run"]) == 0
    assert not Path("m").exists() and not recorded
    assert capsys.readouterr().out == "4\nthe same for 2 seeds: m/seed_4, m/seed_6\n"


def test_resume_one_of_them_for_a_checkpoint(recorded, capsys):
    assert main([*SHORT.split(), "--seeds", "0-1", "--out", "m"]) == 0
    assert main(["resume", "m", "--checkpoint", "step_000002"]) == 2
    assert "rollouts resume m/seed_0 --checkpoint step_000002" in capsys.readouterr().err
    for text in ("{", '{"command": [], "seeds": [1]}'):
        Path("m/seeds.json").write_text(text)
        assert main(["resume", "m"]) == 2
        error = capsys.readouterr().err
        assert "m/seeds.json cannot be read" in error and "type: rollouts resume m/NAME" in error


IN_FORKS = """
import os, runpy, sys
from types import SimpleNamespace
from rollouts.runs import several

class Fork:  # what `rollouts run --seeds` uses of a subprocess.Popen; the imports are those of this process
    def __init__(self, command, *, stdin, env, process_group, preexec_fn):
        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, process_group)
            preexec_fn()
            os.environ.update(env)
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

several.subprocess = SimpleNamespace(Popen=Fork, DEVNULL=None)
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
        assert "interrupted in seed 0; continue with: rollouts resume m" in error
        assert written()["runs"]["0"]["status"] == "interrupted"
    steps = 1 + max(int(path.name[-6:]) for path in Path("m/seed_0/checkpoints").glob("step_??????"))
    if number != signal.SIGKILL:
        stay_inside(monkeypatch)
    assert main(["resume", "m", "--steps", str(steps)]) == 0
    assert [run["steps"] for run in written()["runs"].values()] == [steps, steps]
    assert "resumed_from" in json.loads(Path("m/seed_0/summary.json").read_text())
