"""Resume: what is gone on with is the run that was never interrupted, to the bit; and what is refused, and how."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import forks
import pytest
import trio

import rollouts
from rollouts.cli import main
from rollouts.config.resolving import resolve
from rollouts.errors import ConfigError, OutputError
from rollouts.models.loading import TINY_PATH
from rollouts.runs import resume as resuming
from rollouts.runs.folder import RunFolder
from rollouts.runs.jobs.train import Training
from rollouts.runs.loggers import Loggers
from rollouts.runs.plan import make_plan
from rollouts.runs.resume import finished
from rollouts.training.backends.torch import TorchBackend

PARTS = '''\
import os
import signal
from collections import Counter
from itertools import islice
from pathlib import Path

from rollouts.errors import ConfigError
from rollouts_calculator import Calculator


class Stop:
    """Fails at the step in the file `stop`, if there is one, or types Ctrl-C there."""

    in_step = True

    def __init__(self, folder, *, error: str = "OSError"):
        if error == "refuse":
            raise ConfigError("--logger: no key")
        if error == "kill":
            Path(folder, "id.txt").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.error = error

    def log(self, metrics, step):
        if Path("stop").exists() and int(Path("stop").read_text()) == step:
            if self.error != "KeyboardInterrupt":
                raise OSError("disk full")
            signal.raise_signal(signal.SIGINT)

    def close(self):
        pass


class Few(Calculator):
    """Few tasks."""

    def tasks(self, split, rng):
        return list(islice(super().tasks(split, rng), 6))


class Unprofiled:
    """Everything of a training backend but profiling."""

    world_size, can_profile = 1, False

    def __init__(self, model, seed, steps, lr, lora_rank, tokens_per_microbatch, algorithms, auxiliary_models):
        pass

    def close(self):
        Path("closed").touch()
'''

TIMED = ("time/", "perf/", "sync/seconds", "rollout/latency")
SMALL = ["--env", "calculator", "--steps", "4", "--prompts-per-step", "2", "--samples-per-prompt", "2",
         "--eval-tasks", "2", "--max-tokens", "16", "--checkpoint-every", "1",
         "--logger", "jsonl", "--logger", "./parts.py:Stop"]  # fmt: skip
SUPERVISED = ["--mode", "sft", "--eval-tasks", "0"]  # the fastest run there is
TWO_RANKS = ["--training", "fsdp", "--training.processes", "2"]
SCHEDULE = """\
[[schedule]]
step = 1
loss = "cispo"
[[schedule]]
step = 3
loss = "reinforce"
"""
KINDS = {
    "rl": [],
    "sft": ["--mode", "sft"],
    "lora": ["--lora-rank", "2", "--eval-every", "1"],
    "steered KL": ["--kl", "rk3_loss", "--kl.target", "0.0001", "--reference", "ema", "--minibatches", "2"],
    "schedule": ["schedule.toml", "--training.lr-schedule", "cosine", "--kl", "k2_loss", "--kl.target", "0.01"],
    "critic": ["--loss", "ppo", "--critic", "head"],
    "critic and steered KL": [
        *["--loss", "ppo", "--critic", "head", "--kl", "rk3_loss", "--kl.target", "0.0001", "--reference", "ema"],
        *["--minibatches", "2"],
    ],
    "refill and sampler": [
        *["--loss", "dapo", "--refill", "1", "--env", "few=./parts.py:Few", "--env.few.weight", "3"],
        *["--sampler", "difficulty", "--sampler.after", "1"],
    ],
}


pytestmark = pytest.mark.usefixtures("forked_ranks")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """The parts lie beside the run."""
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "schedule.toml").write_text(SCHEDULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def begin(made_run):
    """Makes the run that a test goes on with, or compares with; it stopped as the step `stop` was logged."""

    def make(out, *arguments, stop=None):
        if stop is not None:
            Path("stop").write_text(str(stop))
        made_run(["run", *SMALL, *arguments], out, code=0 if stop is None else 1)
        Path("stop").unlink(missing_ok=True)

    return make


def run(out, *arguments, code=0, stop=None, resume=False):
    """A run, or the resume of one, that ends with this exit code; it stops as the step `stop` is logged."""
    if stop is not None:
        Path("stop").write_text(str(stop))
    words = ["resume", out, *arguments] if resume else ["run", *SMALL, "--out", out, *arguments]
    assert main(words) == code
    Path("stop").unlink(missing_ok=True)


def lines_of(folder):
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(TIMED)} for line in lines]


def files_of(folder, pattern):
    found = Path(folder).glob(pattern)
    return {str(path.relative_to(folder)): path.read_bytes() for path in found if path.is_file()}


def summary_of(folder):
    return json.loads((Path(folder) / "summary.json").read_text())


def state_of(folder, checkpoint):
    return json.loads((Path(folder) / "checkpoints" / checkpoint / "state.json").read_text())


def steps_of(folder):
    return sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())


def assert_same(folder, whole):
    """What both runs have left is the same, but for times."""
    assert lines_of(folder) == lines_of(whole)
    assert files_of(folder, "trajectories/[!.]*") == files_of(whole, "trajectories/[!.]*")
    last = max(steps_of(whole))
    for name in ("*.safetensors", "trainer/*.distcp"):
        weights = files_of(whole, f"checkpoints/{last}/{name}")
        assert weights and files_of(folder, f"checkpoints/{last}/{name}") == weights
    for key in ("status", "steps", "evaluation", "checkpoint"):
        assert summary_of(folder)[key] == summary_of(whole)[key]
    states = [state_of(each, last) for each in (folder, whole)]
    assert states[0]["run"] == states[1]["run"]
    assert states[0]["backend"]["version"] == states[1]["backend"]["version"]


# --- the same run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        "rl",
        *(pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS if kind != "rl"),
    ],
)
def test_a_resumed_run_is_the_unbroken_one(kind, capsys, begin):
    begin("whole", *KINDS[kind])
    run("broken", *KINDS[kind], code=1, stop=2)
    assert steps_of("broken") == ["step_000001", "step_000002"], "the third step is not saved, and logged by one logger"
    assert len(lines_of("broken")) == 3 and (Path("broken") / "trajectories").exists()
    assert "go on with: rollouts resume broken" in capsys.readouterr().err
    before = summary_of("broken")["evaluation"]["before"]
    run("broken", resume=True)
    said = capsys.readouterr().out
    assert "note: going on after step 2 of 4, from step_000002\n" in said and "held-out, before" not in said
    assert_same("broken", "whole")
    summary = summary_of("broken")
    assert summary["resumed_from"] == 2 and summary["evaluation"]["before"] == before
    (resumed,) = json.loads(Path("broken/manifest.json").read_text())["resumed"]
    assert resumed["step"] == 2 and resumed["checkpoint"].endswith("step_000002") and resumed["distributions"]["torch"]


@pytest.mark.nightly
def test_the_steered_coefficient_moves(begin):
    """The control: what goes on is something."""
    begin("out", *KINDS["critic and steered KL"])
    assert len({line["policy/kl_coef"] for line in lines_of("out")}) == 4
    assert len({line["policy/loss"] for line in lines_of("out")} - {0.0}) >= 3


def test_control_c_and_again(capsys, begin):
    begin("whole", *SUPERVISED)
    for resume, stop in ((False, 1), (True, 3)):
        arguments = [] if resume else [*SUPERVISED, "--logger.Stop.error", "KeyboardInterrupt"]
        run("out", *arguments, code=130, stop=stop, resume=resume)
        assert capsys.readouterr().err.endswith("of 4 steps; go on with: rollouts resume out\n")
    run("out", resume=True)
    assert lines_of("out") == lines_of("whole") and summary_of("out")["resumed_from"] == 4
    steps = [each["step"] for each in json.loads(Path("out/manifest.json").read_text())["resumed"]]
    assert steps == [2, 4], "each resumes after the step in which Ctrl-C came"


@pytest.mark.parametrize(("place", "name"), [(Loggers, "close"), (TorchBackend, "close")])
def test_control_c_twice(place, name, monkeypatch, capsys):
    """The second one, as the run ends, changes nothing."""
    plain, handler = getattr(place, name), signal.getsignal(signal.SIGINT)

    def interrupted(self, *arguments):
        signal.raise_signal(signal.SIGINT)
        plain(self, *arguments)

    monkeypatch.setattr(place, name, interrupted)
    run("out", *SUPERVISED, "--logger.Stop.error", "KeyboardInterrupt", code=130, stop=1)
    assert capsys.readouterr().err.endswith("interrupted after 2 of 4 steps; go on with: rollouts resume out\n")
    assert summary_of("out")["status"] == "interrupted" and signal.getsignal(signal.SIGINT) is handler


def test_without_a_checkpoint_it_begins_again(capsys, begin):
    begin("whole", *SUPERVISED, "--checkpoint-every", "0")
    begin("out", *SUPERVISED, "--checkpoint-every", "0", stop=2)
    run("out", resume=True)
    assert "the run has no checkpoint yet: it begins again" in capsys.readouterr().out
    assert_same("out", "whole")


def test_a_finished_run_says_so_and_can_be_made_longer(capsys, begin):
    warm = ["--training.warmup-steps", "1"]  # the default is never more than the run has
    begin("whole", "--steps", "3", *warm)
    begin("out", "--steps", "2", *warm)
    stamps = files_of("out", "**/*")
    capsys.readouterr()
    run("out", resume=True)
    assert capsys.readouterr().out == (
        "out is finished: all of its 2 steps are done\nto make it longer, type: rollouts resume out --steps 4\n"
    )
    run("out", "--resume", "auto", "--steps", "2", *warm)
    assert capsys.readouterr().out.startswith("out is finished")
    assert rollouts.resume("out", quiet=True) == summary_of("out")
    assert files_of("out", "**/*") == stamps, "nothing was written"
    assert "out has finished 2 steps, and --steps is 1\ngo back with --checkpoint NAME, or" in refuse(
        capsys, "out", "--steps", "1"
    )
    run("out", "--steps", "3", resume=True)
    assert "note: steps: 2 -> 3\n" in capsys.readouterr().out
    made_longer = lines_of("out")
    at_the_end_of_two = {name for name in made_longer[1] if name.startswith("eval/")}
    made_longer[1] = {name: value for name, value in made_longer[1].items() if name not in at_the_end_of_two}
    assert at_the_end_of_two and made_longer == lines_of("whole")
    assert "steps = 3" in Path("out/config.toml").read_text()
    run("out", resume=True)
    assert "all of its 3 steps" in capsys.readouterr().out


def test_a_run_that_died_between_its_last_checkpoint_and_its_summary(capsys, begin):
    begin("out", "--mode", "sft")
    before = summary_of("out")
    Path("out/summary.json").unlink()
    capsys.readouterr()
    run("out", resume=True)
    assert "held-out" not in capsys.readouterr().out.replace("held-out tasks", ""), "nothing is played again"
    after = summary_of("out")
    assert {**after, "wall_seconds": 0, "cpu_seconds": 0} == {
        **before, "wall_seconds": 0, "cpu_seconds": 0, "resumed_from": 4}  # fmt: skip


def test_back_to_an_earlier_checkpoint(capsys, begin):
    begin("whole")
    shutil.copytree("whole", "out")
    capsys.readouterr()
    for name, moved in (
        ("step_000002", "step_000003.aside, step_000004.aside"),
        ("out/checkpoints/step_000001", "step_000002.aside, step_000003.aside-2, step_000004.aside-2"),
    ):
        run("out", "--checkpoint", name, resume=True)
        said = capsys.readouterr().out
        assert f"from {Path(name).name}\n" in said and f"note: set aside in out/checkpoints: {moved}\n" in said
        assert_same("out", "whole")
        assert set(moved.split(", ")) <= set(steps_of("out"))
    assert len(steps_of("out")) == 9, "nothing is thrown away"
    assert "from" not in json.loads(Path("out/manifest.json").read_text())["resumed"][-1]


def test_another_runs_checkpoint_is_the_runs_own_from_then_on(begin):
    begin("whole", *SUPERVISED)
    begin("out", *SUPERVISED, stop=0)
    shutil.rmtree("out/checkpoints")
    run("out", "--checkpoint", "whole/checkpoints/step_000002", resume=True, code=1, stop=2)
    assert steps_of("out") == ["step_000002"]
    run("out", resume=True)
    assert lines_of("out") == [line for line in lines_of("whole") if line["step"] != 1], "it had taken the first itself"


def test_another_runs_checkpoint_replaces_none_of_the_runs_own(capsys, here, begin):
    begin("out", *SUPERVISED)
    begin("other", *SUPERVISED, "--lr", "0.01")
    kept = files_of("out/checkpoints/step_000002", "**/*")
    capsys.readouterr()
    run("out", "--checkpoint", "other/checkpoints/step_000002", resume=True)
    said = capsys.readouterr().out
    assert "note: going on after step 2 of 4, from other/checkpoints/step_000002\n" in said
    assert "note: metrics.jsonl and trajectories/ tell of the steps before as this run took them" in said
    assert "set aside in out/checkpoints: step_000002.aside, step_000003.aside, step_000004.aside\n" in said
    assert files_of("out/checkpoints/step_000002.aside", "**/*") == kept
    assert state_of("out", "step_000002")["run"] == state_of("other", "step_000002")["run"]
    (resumed,) = json.loads(Path("out/manifest.json").read_text())["resumed"]
    assert resumed["from"] == str(here / "other/checkpoints/step_000002") and resumed["step"] == 2


def test_a_checkpoint_that_was_set_aside_is_gone_on_with(capsys, begin):
    """What has happened since is another history, and that is told."""
    begin("out", *SUPERVISED)
    before = lines_of("out")
    run("out", "--checkpoint", "step_000001", resume=True)
    kept = files_of("out/checkpoints/step_000003.aside", "**/*")
    capsys.readouterr()
    run("out", "--checkpoint", "step_000003.aside", resume=True)
    said = capsys.readouterr().out
    assert "note: going on after step 3 of 4, from step_000003.aside\n" in said
    assert "as this run took them; step_000003.aside has not come from them\n" in said
    assert lines_of("out") == before and files_of("out/checkpoints/step_000003.aside", "**/*") == kept
    assert {"step_000003", "step_000003.aside-2", "step_000004.aside-2"} <= set(steps_of("out"))
    assert json.loads(Path("out/manifest.json").read_text())["resumed"][-1]["from"].endswith("step_000003.aside")
    damage("step_000003.aside")
    assert "go on from step_000002 with: " in refuse(capsys, "out", "--checkpoint", "step_000003.aside")


class Killed(BaseException):
    """Nothing in the program knows it."""


GOING_BACK = [
    (Loggers, "open"),
    (RunFolder, "forget_end"),
    (Path, "rename"),
    (TorchBackend, "save"),
    (resuming, "resumed_manifest"),
    (RunFolder, "write_config"),
    (RunFolder, "forget_steps"),
    (Training, "run"),
]


def killed_at(monkeypatch, place, name, number, *arguments):
    """A resume that dies as it calls this for the n-th time; whether it came to that."""
    plain, seen = getattr(place, name), []

    def dies(*given, **named):
        seen.append(name)
        if len(seen) == number:
            raise Killed
        return plain(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(place, name, dies)
        try:
            rollouts.resume("out", **dict(arguments))
        except Killed:
            return True
    return False


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [[], SUPERVISED], ids=["rl", "sft"])
def test_a_kill_as_it_goes_back(kind, monkeypatch, begin):
    """At each step of it: what is gone on with then is a whole run, and the same one."""
    begin("whole", *kind)
    came = set()
    for place, name in GOING_BACK:
        for number in (1, 2) if name in ("rename", "open") else (1,):
            shutil.copytree("whole", "out")
            if killed_at(monkeypatch, place, name, number, ("checkpoint", "step_000002")):
                came.add(name)
                assert finished(Path("out"), 4) is None or name in ("forget_end", "open")
            run("out", resume=True)
            assert_same("out", "whole")
            shutil.rmtree("out")
    assert len(came) == len(GOING_BACK), "the save is that of the next step"


@pytest.mark.nightly
def test_a_kill_as_it_takes_another_runs_checkpoint(monkeypatch, begin):
    """What is gone on with is the run as it was, or with the other's weights; nothing in between."""
    begin("own", *SUPERVISED)
    begin("other", *SUPERVISED, "--lr", "0.01")
    shutil.copytree("own", "out")
    wanted = "other/checkpoints/step_000002"
    run("out", "--checkpoint", wanted, resume=True)
    ends = [lines_of("own"), lines_of("out")]
    assert ends[0] != ends[1]
    found = []
    for place, name in GOING_BACK:
        shutil.rmtree("out")
        shutil.copytree("own", "out")
        assert killed_at(monkeypatch, place, name, 2 if name == "rename" else 1, ("checkpoint", wanted))
        run("out", resume=True)
        found.append(ends.index(lines_of("out")))
        assert summary_of("out")["status"] == "done" and state_of("out", "step_000004")["run"]["step"] == 4
    assert found == sorted(found) and set(found) == {0, 1}, "no later than at the save"


def test_a_resume_that_a_logger_refuses_changes_nothing(capsys, begin):
    begin("out", *SUPERVISED)
    before = files_of("out", "**/*")
    again = ["--checkpoint", "step_000002", "--steps", "5", "--logger.Stop.error", "refuse"]
    assert main(["resume", "out", *again]) == 2
    assert "--logger: no key" in capsys.readouterr().err
    assert files_of("out", "**/*") == before | {".lock": Path("out/.lock").read_bytes()}


def test_from_python(here, begin):
    begin("out", *SUPERVISED)
    summary = rollouts.resume("out", checkpoint="step_000003", steps=5)
    assert (summary["resumed_from"], summary["steps"]) == (3, 5)
    with pytest.raises(ConfigError, match="out: a run that is resumed stays in its folder"):
        rollouts.resume("out", out="other")


@pytest.mark.parametrize("keep", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_the_last_and_the_best_checkpoints_are_kept(keep, begin):
    begin("out", "--keep-checkpoints", str(keep), "--mode", "sft")
    states = {name: state_of("out", name)["run"] for name in steps_of("out")}
    losses = [line["policy/loss"] for line in lines_of("out")]
    best = losses.index(min(losses)) + 1
    assert {state["step"] for state in states.values()} == {*range(5 - keep, 5), best}
    for state in states.values():
        value = losses[state["step"] - 1]
        assert state["metric"] == {"name": "policy/loss", "value": value, "higher_is_better": False}


def test_a_metric_of_ones_own_makes_a_checkpoint_the_best(capsys):
    run("out", "--keep-checkpoints", "1", "--keep-best", "min:rollout/tokens", "--eval-tasks", "0")
    tokens = [line["rollout/tokens"] for line in lines_of("out")]
    best = max(step for step, value in enumerate(tokens, start=1) if value == min(tokens))
    assert {state_of("out", name)["run"]["step"] for name in steps_of("out")} == {4, best}
    expected = {"checkpoint": f"checkpoints/step_{best:06d}", "metric": "rollout/tokens", "value": min(tokens)}
    assert summary_of("out")["best"] == expected
    assert f"the best checkpoint, with rollout/tokens {min(tokens):.3g}: checkpoints/step_" in capsys.readouterr().out


def test_a_metric_that_no_step_has_is_said(capsys):
    run("out", "--keep-checkpoints", "2", "--keep-best", "rollout/token", "--eval-tasks", "0", "--steps", "2")
    captured = capsys.readouterr()
    assert (
        "--keep-best rollout/token: this step has no such metric; did you mean: rollout/tokens"
        in captured.out + captured.err
    )
    assert "best" not in summary_of("out") and len(steps_of("out")) == 2


def test_what_the_best_checkpoint_is_known_by(begin):
    begin("out", "--eval-every", "2")
    metrics = [state_of("out", name)["run"]["metric"] for name in steps_of("out")]
    assert metrics[0] is metrics[2] is None, "no evaluation came before them"
    assert metrics[1]["value"] == lines_of("out")[1]["eval/reward_mean"] and metrics[1]["higher_is_better"]
    assert metrics[3]["value"] == summary_of("out")["evaluation"]["after"]["reward_mean"]


# --- automatically --------------------------------------------------------------------------------------------------


def test_resume_auto_begins_goes_on_and_says_what_changed(capsys, begin):
    begin("whole", *SUPERVISED)
    run("out", *SUPERVISED, "--resume", "auto", code=1, stop=2)
    assert 'resume = "never"' in Path("out/config.toml").read_text()
    with Path("out/config.toml").open("a") as config:
        config.write("# mine\n")
    run("out", *SUPERVISED, "--resume", "auto", "--max-turns", "9")
    said = capsys.readouterr().out
    assert "note: max_turns: 8 -> 9\n" in said and said.count(" -> ") == 1
    assert lines_of("out") == lines_of("whole")
    assert "max_turns = 9" in Path("out/config.toml").read_text()


def test_resume_auto_begins_again_after_a_kill_as_a_logger_opens():
    words = [sys.executable, "-m", "rollouts", "run", *SUPERVISED, "--out", "out", "--resume", "auto"]
    done = forks.run([*words, *SMALL, "--logger.Stop.error", "kill"], timeout=120)
    assert done.returncode == -9, done.stderr
    run("out", *SUPERVISED, "--resume", "auto", "--logger.Stop.error", "OSError")
    assert summary_of("out")["steps"] == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--mode", "sft"], "They are shuffled now"), (["--loss", "rloo"], "has rollout_sum now")],
    ids=["sft", "rloo"],
)
def test_what_the_same_settings_mean_since_is_noted_once(arguments, words, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("rollouts.runs.jobs.train.REVISION", 0, raising=False)
        run("out", *arguments, "--eval-tasks", "0", "--steps", "1")
    run("out", "--steps", "2", resume=True)
    assert words in capsys.readouterr().out.replace("\n", " ")
    run("out", "--steps", "3", resume=True)
    assert "an earlier version" not in capsys.readouterr().out


def test_a_manifest_that_cannot_be_read_is_kept(capsys, here, begin):
    begin("out", *SUPERVISED, "--steps", "1")
    manifest = here / "out/manifest.json"
    torn = manifest.read_bytes()[:-20]
    manifest.write_bytes(torn)
    run("out", "--steps", "2", resume=True)
    assert manifest.read_bytes() == torn and Path("out/checkpoints/step_000002").is_dir()
    assert "out/manifest.json cannot be read" in capsys.readouterr().out.replace("\n", " ")


def test_resume_auto_needs_a_folder(capsys):
    assert main(["run", "--env", "calculator", "--resume", "auto"]) == 2
    error = capsys.readouterr().err
    assert "type: rollouts run --env calculator --out runs/NAME --resume auto" in error


def test_a_dry_run_of_it_writes_nothing(capsys, begin):
    for code in (1, 0):
        kept = files_of("out", "**/*")
        assert main(["run", *SMALL, "--out", "out", "--resume", "auto", "--dry-run"]) == 0
        assert "ok: everything was checked; no model was loaded, " in capsys.readouterr().out
        assert files_of("out", "**/*") == kept
        if code:
            begin("out", stop=0)


def damage(name):
    (weights,) = (Path("out/checkpoints") / name).glob("model*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])


def test_a_damaged_checkpoint_is_named_with_the_one_before(capsys, begin):
    begin("whole", *SUPERVISED)
    begin("out", *SUPERVISED, stop=3)
    damage("step_000003")
    kept = files_of("out", "**/*")
    run("out", resume=True, code=2)
    error = capsys.readouterr().err
    assert "step_000003 is damaged" in error
    assert "go on from step_000002 with: rollouts resume out --checkpoint step_000002" in error
    assert files_of("out", "**/*") == kept, "the run is as it was"
    run("out", "--checkpoint", "step_000002", resume=True)
    assert lines_of("out") == lines_of("whole") and "step_000003.aside" in steps_of("out")


def test_resume_auto_falls_back_by_itself(capsys, begin):
    begin("whole", *SUPERVISED)
    begin("out", *SUPERVISED, stop=3)
    damage("step_000003")
    run("out", *SUPERVISED, "--resume", "auto")
    said = capsys.readouterr().out
    assert "note: the checkpoint out/checkpoints/step_000003 is damaged" in said
    assert "continuing from step_000002 instead" in said
    assert lines_of("out") == lines_of("whole")


def test_an_earlier_checkpoint_is_no_help_against_another_optimizer(capsys, monkeypatch, begin):
    """What is refused for its settings is not called damage, nor are all the others tried."""
    begin("out", *SUPERVISED, stop=3)
    kept = files_of("out", "**/*")
    loaded, load = [], TorchBackend.load
    monkeypatch.setattr(TorchBackend, "load", lambda self, path: loaded.append(path) or load(self, path))
    sgd = ["--training.optimizer", "sgd"]
    for arguments, resume in ((sgd, True), ([*SUPERVISED, "--resume", "auto", *sgd], False)):
        capsys.readouterr()
        run("out", *arguments, resume=resume, code=2)
        error = capsys.readouterr().err
        wrote = "the checkpoint out/checkpoints/step_000003 has the state of the optimizer AdamW"
        assert f"{wrote}, and this run uses SGD; give the --optimizer or --training.optimizer of the run" in error
        assert "go on from" not in error and "begin again" not in error and "instead" not in error
    assert len(loaded) == 2 and files_of("out", "**/*") == kept


def test_a_damaged_checkpoint_that_was_named_is_not_replaced_by_another(capsys, begin):
    """Also where the config says `resume = "auto"`."""
    begin("out", *SUPERVISED, stop=3)
    damage("step_000002")
    path = Path("out/config.toml")
    path.write_text(path.read_text().replace('resume = "never"', 'resume = "auto"'))
    assert "go on from step_000001 with: " in refuse(capsys, "out", "--checkpoint", "step_000002")
    assert steps_of("out") == ["step_000001", "step_000002", "step_000003"]


def test_when_every_checkpoint_is_damaged_nothing_is_thrown_away(capsys, begin):
    begin("out", *SUPERVISED, stop=1)
    damage("step_000001")
    for arguments, resume in (((), True), ((*SUPERVISED, "--resume", "auto"), False)):
        run("out", *arguments, resume=resume, code=2)
        assert "begin again with: rollouts run out/config.toml --out FOLDER" in capsys.readouterr().err
    assert len(lines_of("out")) == 2


# --- bad input ------------------------------------------------------------------------------------------------------


def refuse(capsys, *arguments):
    assert main(["resume", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "Traceback" not in error
    return error


def test_a_folder_that_holds_no_run(capsys, here):
    assert "nowhere holds no run" in refuse(capsys, "nowhere")
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/config.toml").touch()
    assert "did you mean: runs/a?" in refuse(capsys, "runs")
    Path("runs/a/checkpoints/step_000002").mkdir(parents=True)
    said = refuse(capsys, "runs/a/checkpoints/step_000002")
    assert "type: rollouts resume runs/a --checkpoint step_000002" in said
    assert sorted(path.name for path in here.iterdir()) == ["parts.py", "runs", "schedule.toml"]


def test_what_cannot_be_gone_on_with(capsys, begin):
    begin("out", "--steps", "2", "--eval-tasks", "0")
    kept = files_of("out", "**/*")
    assert "checkpoints: step_000001, step_000002" in refuse(capsys, "out", "--checkpoint", "step_7")
    Path("out/summary.json").rename("summary.json")
    error = refuse(capsys, "out", "--steps", "1")
    assert "was written after 2 steps" in error and "rollouts resume out --steps 2" in error
    assert "--steps: " in refuse(capsys, "out", "--steps", "many")
    for old, new, words in (
        ("seed = 0", "seed = 1", "seed was 0 and is 1 now"),
        ("lora_rank = 0", "lora_rank = 2", "lora_rank"),
        ('mode = "rl"', 'mode = "sft"\nloss = "sft"', "was written in mode rl"),
        ("steps = 2", "stepz = 2", "line "),
    ):
        text = kept["config.toml"].decode()
        assert old in text
        if "loss" in new:
            text = text.replace('name = "grpo"', 'name = "sft"')
            text, new = text[: text.index("clip_low")] + text[text.index("[correction]") :], 'mode = "sft"'
        Path("out/config.toml").write_text(text.replace(old, new))
        assert words in refuse(capsys, "out")
    Path("out/config.toml").write_bytes(kept["config.toml"])
    Path("summary.json").rename("out/summary.json")
    assert files_of("out", "**/*") == kept, "the run is as it was"


def edit(old, new):
    path = Path("out/config.toml")
    text = path.read_text()
    assert text.count(f"\n{old}\n") == 1
    path.write_text(text.replace(f"\n{old}\n", f"\n{new}\n"))


@pytest.mark.parametrize("setting", ["seed", pytest.param("prompts_per_step", marks=pytest.mark.nightly)])
def test_demonstrations_in_another_order(setting, capsys, begin):
    begin("out", *SUPERVISED, stop=1)
    old = {"seed": 0, "prompts_per_step": 2}[setting]
    edit(f"{setting} = {old}", f"{setting} = 3")
    error = refuse(capsys, "out")
    assert f"{setting} was {old} and is 3 now" in error and f"{old} again, or begin a new run" in error
    edit(f"{setting} = 3", f"{setting} = {old}")
    run("out", resume=True)


def test_tasks_that_may_have_been_trained_on_are_not_held_out_later(capsys, begin):
    begin("out", stop=1)
    edit("eval_tasks = 2", "eval_tasks = 5")
    error = refuse(capsys, "out")
    assert "eval_tasks was 2 and is 5 now" in error and "give 2 again, or begin a new run" in error


@pytest.mark.slow
@pytest.mark.parametrize(
    "adapter", [[], pytest.param(["--lora-rank", "2"], marks=pytest.mark.nightly)], ids=["full", "lora"]
)
def test_another_model_of_the_same_shape(adapter, capsys, here):
    """It is told by its name, which goes with a folder that is moved."""
    for name in ("base", "rival", "a/checkpoints/step_000001", "b/checkpoints/step_000001"):
        shutil.copytree(TINY_PATH, name)
    run("out", *SUPERVISED, *adapter, "--model", "base", code=1, stop=1)
    kept = files_of("out/checkpoints", "**/*")
    edit('model = "base"', 'model = "rival"')
    error = refuse(capsys, "out")
    assert "was written by a run of the model base, and this one has the model rival; give --model base" in error
    assert f"--mode sft --model {Path('out/checkpoints/step_000001')}" in error
    shutil.rmtree("base")
    assert "was written by a run of the model base" in refuse(capsys, "out"), "its name is another one still"
    assert files_of("out/checkpoints", "**/*") == kept
    shutil.copytree("rival", "moved/base")
    edit('model = "rival"', f'model = "{here / "moved/base"}"')
    run("out", resume=True)
    assert 'note: model: "base" -> ' in capsys.readouterr().out
    shutil.rmtree("out")
    run("out", *SUPERVISED, *adapter, "--model", "a/checkpoints/step_000001", code=1, stop=1)
    shutil.rmtree("a")
    edit('model = "a/checkpoints/step_000001"', 'model = "b/checkpoints/step_000001"')
    assert "was written by a run of the model a/checkpoints/step_000001" in refuse(capsys, "out")


def test_the_learning_rate_that_holds_is_compared(capsys):
    """It need not have been given."""
    run("out", *SUPERVISED, "--resume", "auto", code=1, stop=1)
    assert state_of("out", "step_000001")["run"]["settings"]["lr"] == 3e-4
    run("out", *SUPERVISED, "--resume", "auto", "--lr", "0.0003", code=1, stop=1)
    assert "note: lr" not in capsys.readouterr().out
    run("out", *SUPERVISED, "--resume", "auto", "--lr", "0.001")
    assert "note: lr: 0.0003 -> 0.001\n" in capsys.readouterr().out
    critic = {"env": "calculator", "loss": "ppo", "critic": "head"}
    assert make_plan(resolve(critic)).flat["critic_lr"] == pytest.approx(3e-3)
    assert make_plan(resolve({"env": "calculator"})).flat["critic_lr"] is None


def test_an_edited_config_is_told(capsys, begin):
    begin("out", stop=2)
    path = Path("out/config.toml")
    path.write_text("# mine\n" + path.read_text().replace("temperature = 1.0", "temperature = 0.9"))
    run("out", resume=True)
    assert "note: temperature: 1.0 -> 0.9\n" in capsys.readouterr().out
    assert path.read_text().startswith("# mine\n"), "whoever edited it keeps their comments"


def test_weights_that_somebody_saved_are_no_run(capsys, begin):
    from rollouts.training.algorithms.recipes import GRPO
    from rollouts.training.backends.torch import create_torch_backend

    begin("out", stop=0)
    backend = create_torch_backend("tiny", 0, 4, 1e-3, 0, 4096, {"main": GRPO}, None)
    backend.save("step_000003").wait()
    backend.close()
    error = refuse(capsys, "out", "--checkpoint", "step_000003")
    assert "does not say how far its run was" in error and "--model step_000003" in error


def test_two_processes_on_one_folder(capsys, begin):
    begin("out", *SUPERVISED, stop=1)
    other = RunFolder.reopen(Path("out"))
    try:
        assert "out is being written to by another process" in refuse(capsys, "out")
        with pytest.raises(OutputError, match="another process"):
            rollouts.resume("out")
    finally:
        other.close()
    run("out", resume=True)


def test_a_backend_that_cannot_be_profiled(capsys):
    assert main(["run", *SMALL, "--out", "out", "--profile", "2", "--training", "./parts.py:Unprofiled"]) == 2
    assert "--profile 2: the training backend ./parts.py:Unprofiled cannot be profiled" in capsys.readouterr().err
    assert Path("closed").exists() and not Path("out").exists()


def test_the_steps_that_are_profiled(monkeypatch):
    from rollouts.training.backends.torch import TorchBackend

    seen = []
    for name in ("start_profile", "stop_profile", "optim_step"):
        method = getattr(TorchBackend, name)

        def told(self, *arguments, _name=name, _method=method):
            seen.append(_name)
            return _method(self, *arguments)

        monkeypatch.setattr(TorchBackend, name, told)
    run("out", *SUPERVISED, "--profile", "2")
    step = "optim_step"
    assert seen == [step, "start_profile", step, step, "stop_profile", step]
    assert files_of("out/profile", "*")


# --- killed ---------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [[], TWO_RANKS], ids=["single", "two ranks"])
def test_kills_at_random_moments(ranks, here, begin):
    """As Slurm does it: the same command again and again, until it is done. benchmarks/kill_and_resume.py does more.
    Here ranks are new interpreters, in the runs that are killed.
    """
    begin("whole", *ranks)
    words = [sys.executable, "-m", "rollouts", "run", *SMALL, *ranks, "--out", "out", "--resume", "auto"]
    chance = random.Random(0)
    for attempt in range(20):
        process = forks.popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        if attempt < 2:
            wait_for_a_sign(process)
            time.sleep(chance.random() / 2)  # four steps take less than a second
            process.kill()
        said, _ = process.communicate(timeout=120)
        if process.returncode == 0:
            break
        assert process.returncode == -9, said.decode()
    assert attempt >= 1 and process.returncode == 0
    assert_same("out", "whole")


def wait_for_a_sign(process):
    """Until the run has said something: its model is loaded."""
    assert process.stdout.readline() or process.wait() == 0


@pytest.mark.slow
def test_a_rank_that_dies_in_a_run(capfd, here):
    """One error that names it, exit code 1; and the run goes on, on one rank more, to the end."""
    (here / "dying.py").write_text(
        "import os, signal\n"
        "def loss(logprobs, advantages, step):\n"
        "    if step == 2 and os.environ.get('RANK') == '1' and os.path.exists('die'):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return -(logprobs * advantages)\n"
    )
    (here / "die").touch()
    chosen = ["--loss", "./dying.py:loss"]
    run("out", *TWO_RANKS, *chosen, code=1)
    said = capfd.readouterr().err
    assert said.count("error: ") == 1 and "Traceback" not in said
    assert "error: rank 1 died (killed by SIGKILL); its last command: forward_backward, command " in said
    assert "the run failed after 2 of 4 steps; out keeps what was done; correct the cause, then go on with: " in said
    (here / "die").unlink()
    run("out", "--training.processes", "3", resume=True)
    assert summary_of("out")["resumed_from"] == 2 and len(lines_of("out")) == 4
    run("whole", *chosen)
    for one, other in zip(lines_of("out"), lines_of("whole"), strict=True):
        assert one["policy/loss"] == pytest.approx(other["policy/loss"], abs=1e-4)


def test_a_launcher_needs_a_backend_of_several_processes(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    run("wrong", code=2)
    assert not Path("wrong").exists()
    expected = "a launcher started 2 processes (WORLD_SIZE), but --training torch trains in one; type"
    assert expected in capsys.readouterr().err


@pytest.mark.nightly
def test_under_a_launcher():
    """torchrun's ranks are new interpreters: the same run as processes of our own."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "rollouts",
    ]
    words = [*launcher, "run", *SMALL, "--training", "fsdp", "--out", "launched"]
    done = forks.run(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=120)
    assert done.returncode == 0, done.stderr
    run("own", *TWO_RANKS)
    assert lines_of("launched") == lines_of("own")


class Interrupt(trio.abc.Instrument):
    """Ctrl-C at the n-th time that a task is about to run."""

    def __init__(self, number):
        self.number = number
        self.seen = 0

    def before_task_step(self, task):
        self.seen += 1
        if self.seen == self.number:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("stride", [120, pytest.param(17, marks=pytest.mark.nightly)])
def test_an_end_at_any_await_point(monkeypatch, here, stride):
    """Numerics 20: interrupted between any two steps of trio's tasks, a run goes on to the same end: the same prompts,
    once each, and losses equal to the bit. One in `stride` of these moments is tried.
    """
    small = ["--steps", "2"]
    plain = trio.run

    def with_instrument(instrument):
        monkeypatch.setattr(trio, "run", lambda *args, **settings: plain(*args, **settings, instruments=[instrument]))

    counter = Interrupt(-1)
    with_instrument(counter)
    run("whole", *small)
    expected = lines_of("whole"), prompts_of("whole")
    tried = 0
    for number in range(3, counter.seen, stride):
        out = f"out-{number}"
        with_instrument(Interrupt(number))
        code = main(["run", *SMALL, *small, "--out", out])
        monkeypatch.setattr(trio, "run", plain)
        assert code in (0, 130)  # the last moments are those of a run that is over
        if code:
            tried += 1
            run(out, resume=True)
        assert (lines_of(out), prompts_of(out)) == expected
        shutil.rmtree(out)
    assert tried >= 170 // stride, f"{tried} of {counter.seen} moments"


def prompts_of(folder):
    """Every prompt that was trained on, as often as it was."""
    files = sorted(Path(folder, "trajectories").glob("step_*"))
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    return Counter(line["task"]["prompt"] for line in lines)


def test_what_was_sampled_ahead_is_in_the_checkpoint(here, begin):
    """The run stops after a step while the next ones are under way or wait; resumed, it plays none twice."""
    ahead = ["--staleness", "2", "--samples-per-prompt", "4"]
    begin("out", *ahead, stop=1)
    state = state_of("out", "step_000001")["run"]
    assert 0 < len(state["rollouts"]["live"]) <= 4 and state["rollouts"]["steps"] == 1
    assert state["loop"]["start_versions"] == [0]
    run("out", resume=True)
    lines = lines_of("out")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(line["staleness/max"] <= 2 and line["staleness/dropped"] == 0 for line in lines)
    assert all("mismatch/weight_mean" in line for line in lines), "earlier weights may have sampled some of it"
    written = [
        line for path in sorted(Path("out/trajectories").glob("step_*")) for line in path.read_text().splitlines()
    ]
    groups = Counter(json.loads(line)["group"] for line in written)
    assert groups == {number: 4 for number in range(8)}, "four rollouts of each of eight groups, none twice"


def test_groups_that_are_carried_over_are_in_the_checkpoint(here, capsys, begin):
    """Which groups are first is a race, so no two runs are the same; but every group is played to its end once."""
    over = ["--over-sampling", "1.5", "--samples-per-prompt", "4"]
    begin("out", *over, stop=1)
    carried = state_of("out", "step_000001")["run"]["rollouts"]["live"]
    assert len(carried) == 1, "three groups are under way for two"
    run("out", resume=True)
    assert [line["step"] for line in lines_of("out")] == [0, 1, 2, 3]
    assert all("rollout/carried_frac" in line for line in lines_of("out"))
    assert all("mismatch/weight_mean" in line for line in lines_of("out")), "earlier weights sampled some of it"
    lines = [line for path in sorted(Path("out/trajectories").glob("step_*")) for line in path.read_text().splitlines()]
    records = [json.loads(line) for line in lines]
    groups = Counter(record["group"] for record in records)
    assert set(groups.values()) == {4} and len(groups) == 8, "four rollouts of each of eight groups, none twice"
    begin("plain")
    assert not any("mismatch/weight_mean" in line for line in lines_of("plain")), "nothing to correct"
    assert {line["staleness/max"] for line in lines_of("plain")} == {0.0}
    run("never", "--over-sampling", "0.5", code=2)
    assert "--over-sampling: must be at least 1; got 0.5" in capsys.readouterr().err


def test_a_run_of_one_step_is_named_in_the_singular(here):
    summary = {"status": "done", "steps": 1}
    Path("out").mkdir()
    Path("out", "summary.json").write_text(json.dumps(summary))
    with pytest.raises(ConfigError, match=r"^out has finished 1 step, and --steps is 0"):
        resuming.check_steps(Path("out"), 0)
    assert resuming.finished_words(Path("out"), summary, 1).startswith("out is finished\nto make it longer")
