"""Each kind of component that raises: the message has the error, the file, the line and its text, and no traceback."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest
import trio
from rollouts_notes.rows import RolloutConfig
from rollouts_notes.user_functions import generate_group, reward_group, sample_group

from rollouts.cli import main
from rollouts.error_log import ErrorLog
from rollouts.errors import InferenceError
from rollouts.plugins import hookimpl
from rollouts.plugins.loading import import_file
from rollouts.plugins.manager import PluginManager
from rollouts.types import Sample, Status, Task

sys.path.insert(0, str(Path(__file__).parent))
from agent_fakes import FakeEngine, play

BROKEN = """
import asyncio
import os
import threading

from rollouts import Task, hookimpl, reward, tool
from rollouts.env import metric

empty = {}


class Base:
    def tasks(self, split, rng):
        return [Task(f"{split} {number}") for number in range(4)]

    @reward
    def right(self, trajectory):
        return float(len(trajectory.last_text) % 3)


class Tasks(Base):
    def tasks(self, split, rng):
        yield Task(empty["tasks"])


class Later(Base):
    def tasks(self, split, rng):
        yield Task(split)
        yield empty["later"]


class Built(Base):
    def __init__(self):
        self.board = empty["built"]


class Setup(Base):
    def setup(self, task):
        return empty["setup"]


class Close(Base):
    def close(self):
        return empty["close"]


class Reply(Base):
    async def reply(self, trajectory):
        await asyncio.sleep(0)
        return empty["reply"]


class Rollout(Base):
    async def rollout(self, task, model):
        return empty["rollout"]


class Rewarded(Base):
    @reward
    def few(self, trajectory):
        return empty["few"]


class Measured(Base):
    @metric
    def many(self, trajectory):
        return empty["many"]


class Alone(Base):
    async def reply(self, trajectory):
        async def alone():
            return empty["alone"]

        self.task = asyncio.ensure_future(alone())
        await asyncio.sleep(0.01)
        self.task = None


def judge(task, trajectory): return empty["judge"]
def group(tasks, trajectories): return empty["group"]
def keep(rewards): return empty["keep"]
def loss(logprobs, advantages): return empty["loss"]
def advantage(rewards): return empty["advantage"]
def kl(logprobs, ref_logprobs): return empty["kl"]
def aggregation(masks): return empty["aggregation"]
def mixer(parts, weights): return empty["mixer"]
def shaping(rewards): return empty["shaping"]
def selector(rewards): return empty["selector"]
def pairing(rewards): return empty["pairing"]
def correction(old_logprobs, rollout_logprobs): return empty["correction"]
def reference(reference, policy): return empty["reference"]
def engine(model): return empty["engine"]
def training(model): return empty["training"]
def curriculum(step): return empty["curriculum"]


class Logger:
    in_step = True
    def __init__(self, folder): pass
    def log(self, metrics, step): return empty["log"]
    def close(self): pass


class NoLogger:
    def __init__(self, folder): empty["no logger"]


def generate_fn(prompts): return empty["generate"]
def reward_fn(sample): return empty["reward_fn"]
@hookimpl
def rollouts_run_start(folder): return empty["hook"]
"""

SMALL = ["--steps", "1", "--prompts-per-step", "1", "--samples-per-prompt", "2", "--max-tokens", "8", "--out", "out"]


@pytest.fixture(autouse=True)
def broken(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def of(key, error="KeyError"):
    """What a message has to have of the error that reading `key` raises."""
    (number,) = [number for number, line in enumerate(BROKEN.splitlines(), start=1) if f'empty["{key}"]' in line]
    text = BROKEN.splitlines()[number - 1].strip()
    return f"{error}: {key!r} (broken.py, line {number}: {text})"


KINDS = [
    ("tasks", 2, ["--env", "./broken.py:Tasks"]),
    ("later", 2, ["--env", "./broken.py:Later", "--eval-tasks", "2"]),
    ("built", 2, ["--env", "./broken.py:Built"]),
    ("setup", 1, ["--env", "./broken.py:Setup"]),
    ("close", 1, ["--env", "./broken.py:Close"]),
    ("reply", 1, ["--env", "./broken.py:Reply"]),
    ("rollout", 1, ["--env", "./broken.py:Rollout"]),
    ("few", 1, ["--env", "./broken.py:Rewarded"]),
    ("many", 0, ["--env", "./broken.py:Measured"]),
    ("alone", 0, ["--env", "./broken.py:Alone"]),
    ("judge", 1, ["--reward", "./broken.py:judge"]),
    ("group", 1, ["--reward", "./broken.py:group"]),
    ("keep", 1, ["--filter", "./broken.py:keep"]),
    ("loss", None, ["--loss", "./broken.py:loss"]),
    ("advantage", None, ["--advantage", "./broken.py:advantage"]),
    ("kl", None, ["--kl", "./broken.py:kl"]),
    ("aggregation", None, ["--aggregation", "./broken.py:aggregation"]),
    ("mixer", None, ["--mix", "./broken.py:mixer"]),
    ("shaping", None, ["--shaping", "./broken.py:shaping"]),
    ("selector", None, ["--select", "./broken.py:selector"]),
    ("pairing", None, ["--loss", "dpo", "--pairs", "./broken.py:pairing"]),
    ("correction", None, ["--correction", "./broken.py:correction"]),
    ("reference", None, ["--kl", "k3_loss", "--reference", "./broken.py:reference"]),
    ("engine", 2, ["--inference", "./broken.py:engine"]),
    ("training", 2, ["--training", "./broken.py:training"]),
    ("no logger", 2, ["--logger", "./broken.py:NoLogger"]),
    ("log", 1, ["--logger", "./broken.py:Logger"]),
    ("curriculum", 2, ["curriculum.toml"]),
]


OTHERS_OF_THE_ALGORITHM = ("kl", "aggregation", "shaping", "selector", "pairing", "correction")


@pytest.mark.parametrize(
    ("key", "code", "arguments"),
    [
        pytest.param(*row, id=row[0], marks=[pytest.mark.nightly] if row[0] in OTHERS_OF_THE_ALGORITHM else [])
        for row in KINDS
    ],
)
def test_the_message_has_the_line(key, code, arguments, broken, capsys):
    envs = "\n".join(f'[[env]]\nalias = "{alias}"\nname = "./broken.py:Base"' for alias in "ab")
    (broken / "curriculum.toml").write_text(f'{envs}\nweight = {{ name = "./broken.py:curriculum" }}\n')
    env = [] if "--env" in arguments or "curriculum.toml" in arguments else ["--env", "./broken.py:Base"]
    count = [] if "--eval-tasks" in arguments else ["--eval-tasks", "0"]
    found = main(["run", *arguments, *env, *count, *SMALL])
    out, err = capsys.readouterr()
    said = err if found else out
    assert found == code or (code is None and found in (1, 2)), said
    assert of(key) in said, said
    assert "Traceback" not in out + err and err.startswith("error: " if found else "")
    log = broken / "out" / "errors.log"
    assert log.exists() == (found != 2 and key != "reference"), "only a run that has begun has a folder"
    if log.exists():
        assert log.read_text().count("Traceback") >= 1 and f'empty["{key}"]' in log.read_text()
        assert "errors.log" in said


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "s.py",
            "steps = 1\nlr = {}['lr']\n",
            "s.py: the settings file raised KeyError: 'lr' (s.py, line 2: lr = {}['lr'])",
        ),
        ("m.py", "import zz_none\n", "ModuleNotFoundError: No module named 'zz_none' (m.py, line 1: import zz_none)"),
    ],
)
def test_a_file_that_raises_has_the_line(name, text, words, broken, capsys):
    (broken / name).write_text(text)
    assert main(["run", *([name] if name == "s.py" else ["--env", f"./{name}:E"]), *SMALL]) == 2
    assert words in capsys.readouterr().err


def test_a_mark_that_raises_at_import_has_its_own_words_and_the_line(broken, capsys):
    (broken / "w.py").write_text("from rollouts import reward\n\nclass E:\n    @reward(0.5)\n    def f(self): ...\n")
    assert main(["run", "--env", "./w.py:E", *SMALL]) == 2
    error = capsys.readouterr().err
    assert "\n@reward(0.5): settings of a mark are given by name" in error
    assert "(w.py, line 4: @reward(0.5))" in error


UNFIT = """
from broken import Base, Task, reward, tool


class Tasks:
    def tasks(split, rng): ...


class Tool(Base):
    @tool
    def double(self, x): ...


class Asks(Base):
    @reward
    def judge(self, tsk): ...


class Returns(Base):
    @reward
    def judge(self): return "yes"


def group(tasks, trajectories): return ["yes", "no"]
"""


@pytest.mark.parametrize(
    ("code", "arguments", "line"),
    [
        (2, ["--env", "./unfit.py:Tasks"], "line 6: def tasks(split, rng): ..."),
        (2, ["--env", "./unfit.py:Tool"], "line 11: def double(self, x): ..."),
        (2, ["--env", "./unfit.py:Asks"], "line 16: def judge(self, tsk): ..."),
        (1, ["--env", "./unfit.py:Returns"], 'line 21: def judge(self): return "yes"'),
        (1, ["--env", "./broken.py:Base", "--reward", "./unfit.py:group"], "line 24: def group(tasks, trajectories)"),
    ],
)
def test_what_is_written_or_returned_wrongly_has_the_line_of_its_def(code, arguments, line, broken, capsys):
    (broken / "unfit.py").write_text(UNFIT)
    assert main(["run", *arguments, "--eval-tasks", "0", *SMALL]) == code
    assert f"\n  unfit.py, {line}" in capsys.readouterr().err


def test_functions_of_a_rollout_config_and_hooks_have_the_line(broken):
    module = import_file("zz_broken", str(broken / "broken.py"))
    config = RolloutConfig(batch_size=1, n_samples_per_prompt=1, generate_fn=module.generate_fn)
    (sample,) = trio.run(generate_group, config, Task("x"), None)
    assert sample.status is Status.ENVIRONMENT_ERROR and of("generate") in sample.metadata["error"]
    group = trio.run(reward_group, sample_group(0, Task("x"), [Sample("x", "y")]), module.reward_fn)
    assert of("reward_fn") in group.episodes[0].score.why
    manager = PluginManager()
    hooks = types.SimpleNamespace(rollouts_run_start=module.rollouts_run_start)
    manager.register(hooks, distribution="acme")
    (fault,) = [
        each for each in manager.call_event("rollouts_run_start", settings={}, folder="") if each.distribution == "acme"
    ]
    assert of("hook") in str(fault) and hookimpl is not None


def test_a_third_party_engine_that_raises_is_an_inference_error_with_the_line(broken):
    class Engine(FakeEngine):
        async def generate(self, request):
            return {}["no such token"]

    notes = []
    with ErrorLog(broken / "errors.log", notes.append):
        episode = play(engine=Engine("x"))
    assert episode.status is Status.INFERENCE_ERROR
    assert "Engine raised KeyError: 'no such token' (" in episode.trajectory.error and notes
    assert re.search(r'line \d+: return \{\}\["no such token"\]\)', episode.trajectory.error)

    class Known(FakeEngine):
        async def generate(self, request):
            raise InferenceError("the server is away")

    assert play(engine=Known("x")).trajectory.error == "the server is away"
