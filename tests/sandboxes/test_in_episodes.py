"""The sandbox of an episode: when it is opened and closed, and that a lost one never becomes a reward of 0."""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from agent_fakes import TASK, FakeEngine, Quiz, play

from rollouts.env import reward, tool
from rollouts.env.checks import check_environment
from rollouts.errors import EnvironmentDefinitionError, SandboxError
from rollouts.sandboxes import Result, SandboxLimits, SubprocessSandboxes
from rollouts.types import Status

RUN = '[run {"code": "echo $((6 * 7))"}]'


class Recorded:
    """Opens sandboxes that only write down what happens."""

    words, not_stopped = "nothing", ()

    def __init__(self, events):
        self.events = events
        self.lost = ""

    def check(self): ...

    def open(self):
        self.events.append("open")
        return self

    def exec(self, command, **settings):
        self.events.append(f"exec {command}")
        return Result(0, "42", "")

    def close(self):
        self.events.append("close the sandbox")


class Shell(Quiz):
    """Runs what the model writes."""

    def setup(self, task, sandbox):
        self.sandbox = sandbox

    @tool
    def run(self, code: str) -> str:
        """Run a command."""
        return self.sandbox.exec(code).text


def test_a_real_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    episode = play(Shell, FakeEngine(RUN, "42"), sandboxes=SubprocessSandboxes())
    assert [message.text for message in episode.trajectory.messages] == [TASK.prompt, RUN[:0], "42", "42"]
    assert episode.score.value == 1.0
    assert list(tmp_path.iterdir()) == []


def test_it_is_opened_before_setup_and_closed_after_close():
    events: list[str] = []

    class Judged(Shell):
        def setup(self, task, sandbox):
            events.append("setup")
            super().setup(task, sandbox)

        @reward
        def right(self, task):
            return float(self.sandbox.exec("judge").stdout == str(task.answer))

        def close(self):
            events.append("close")

    assert play(Judged, FakeEngine(RUN, "?"), sandboxes=Recorded(events)).score.value == 1.0
    assert events == ["open", "setup", "exec echo $((6 * 7))", "exec judge", "close", "close the sandbox"]


def test_an_environment_that_does_not_ask_gets_none():
    events: list[str] = []

    class Alone(Quiz):
        def setup(self, task):
            events.append("setup")

    play(Alone, FakeEngine("42"), sandboxes=Recorded(events))
    assert events == ["setup"]


@pytest.mark.parametrize(
    "asks", ["self, task, sandbox", "self, sandbox, task", "self, task, *, sandbox", "self, task, box"]
)
def test_it_is_asked_for_by_name(asks):
    class Asks(Quiz):
        exec(f"def setup({asks}): ...")

    if "sandbox" in asks:
        check_environment(Asks)
    else:
        with pytest.raises(EnvironmentDefinitionError, match=r"Asks\.setup\(self, .* does not fit how it is called"):
            check_environment(Asks)


def test_it_is_closed_when_the_episode_is_cancelled():
    events: list[str] = []
    engine = FakeEngine(RUN)
    engine.blocks = True
    episode = play(Shell, engine, sandboxes=Recorded(events), episode_seconds=0.2)
    assert episode.status is Status.TIMEOUT and episode.score.value is None
    assert events == ["open", "close the sandbox"]


def test_one_that_cannot_be_opened_fails_the_episode_and_not_the_run():
    class Full(Recorded):
        def open(self):
            raise SandboxError("no room for another one")

    episode = play(Shell, FakeEngine(RUN, "42"), sandboxes=Full([]))
    assert (episode.status, episode.score.value, episode.may_retry) == (Status.ENVIRONMENT_ERROR, None, True)
    assert episode.trajectory.error.startswith("opening a sandbox: no room for another one")


# --- loss -------------------------------------------------------------------------------------------------------------


class Lossy(Shell):
    """Its first command kills the keeper."""

    @tool
    def run(self, code: str) -> str:
        """Run a command."""
        return self.sandbox.exec("kill -9 $PPID; sleep 60").text


class Hides(Lossy):
    """Its author hides every failure: the model reads a text, and the reward is 0."""

    @tool
    def run(self, code: str) -> str:
        """Run a command."""
        try:
            return super().run(code)
        except Exception:
            return "it failed"


class LosesInReward(Shell):
    @reward
    def right(self):
        try:
            return float(self.sandbox.exec("kill -9 $PPID; sleep 60").exit_code == 0)
        except Exception:
            return 0.0


@pytest.mark.skipif(sys.platform != "linux", reason="the supervisor kills daemons on Linux only")
@pytest.mark.parametrize("env", [Lossy, Hides, LosesInReward])
def test_a_lost_sandbox_is_no_reward_of_0(env):
    episode = play(env, FakeEngine(RUN, "41"), sandboxes=SubprocessSandboxes())
    assert (episode.status, episode.score.value, episode.may_retry) == (Status.ENVIRONMENT_ERROR, None, True)
    assert "the sandbox was lost" in episode.trajectory.error
    control = play(Shell, FakeEngine(RUN, "41"), sandboxes=SubprocessSandboxes())
    assert (control.status, control.score.value) == (Status.COMPLETED, 0.0)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")
def test_a_time_to_live_that_is_over_says_what_to_type():
    class Late(Shell):
        @tool
        def run(self, code: str) -> str:
            """Run a command."""
            return self.sandbox.exec("sleep 60", seconds=60).text

    episode = play(Late, FakeEngine(RUN, "41"), sandboxes=SubprocessSandboxes(limits=SandboxLimits(ttl_seconds=0.5)))
    assert episode.score.value is None and "raise --sandbox.ttl-seconds" in episode.trajectory.error


def test_one_that_opens_after_the_deadline_of_setup_is_closed():
    events: list[str] = []
    may_open, is_closed = threading.Event(), threading.Event()

    class Slow(Recorded):
        def open(self):
            may_open.wait(30)
            return super().open()

        def close(self):
            super().close()
            is_closed.set()

    episode = play(Shell, FakeEngine("42"), sandboxes=Slow(events), setup_seconds=0.05)
    assert episode.status is Status.TIMEOUT
    assert "opening a sandbox took longer than 0.05 seconds" in episode.trajectory.error
    may_open.set()
    assert is_closed.wait(30) and events == ["open", "close the sandbox"]
