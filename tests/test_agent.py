"""The agent loop with a small chat format and a scripted engine: every ending, every failure, every verdict."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from rollouts.agent.episode import ChatModel, run_episode
from rollouts.agent.model import EpisodeLimits
from rollouts.agent.records import turn_seed
from rollouts.env import metric, reward, tool
from rollouts.env.checks import reward_term
from rollouts.env.mixing import env_term
from rollouts.errors import EnvironmentDefinitionError, InferenceError, RewardError
from rollouts.inference.base import Generation, VersionSpan
from rollouts.training.samples import episode_samples
from rollouts.types import Message, Score, Status, Task

sys.path.insert(0, str(Path(__file__).parent))
from agent_fakes import TASK, FakeChat, FakeEngine, Quiz, check_exact, play


@dataclass
class Lost:
    n: int

    def __post_init__(self) -> None:
        raise KeyError("lost")


# --- the standard loop ----------------------------------------------------------------------------------------------


def test_a_tool_call_is_carried_out_and_answered() -> None:
    engine = FakeEngine('thinking[double {"n": 21}]', "42")
    episode = play(engine=engine)
    trajectory = episode.trajectory
    assert [m.role for m in trajectory.messages] == ["user", "assistant", "tool", "assistant"]
    assert trajectory.messages[2] == Message("tool", "42", tool_call_id="call_0", name="double")
    assert (episode.status, episode.score) == (Status.COMPLETED, Score(1.0, {"right": 1.0}, "", {"right": 1.0}))
    assert (episode.metrics["turns"], episode.metrics["tool_calls"]) == (2.0, 1.0)
    assert episode.metrics["tool_failures"] == 0 and episode.metrics["latency_seconds"] >= 0
    assert len(trajectory.segments) == 1 and trajectory.turns == 2
    assert trajectory.tools[0]["function"]["name"] == "double"
    assert engine.closed and set(engine.closed) == {"s"}
    assert [request.order for request, _ in engine.turns] == [(3, 1, 0), (3, 1, 1)]
    assert [request.seed for request, _ in engine.turns] == [turn_seed(5, 3, 1, 0, 0), turn_seed(5, 3, 1, 0, 1)]
    check_exact(episode, engine)


def test_a_template_that_rewrites_history_opens_a_segment() -> None:
    engine = FakeEngine('[double {"n": 1}]', '[double {"n": 2}]', "4")
    episode = play(engine=engine, chat=FakeChat(rewrites=[1]))
    assert len(episode.trajectories) == 1
    assert [s.sampled_count for s in episode.trajectory.segments] == [
        sum(len(g.tokens) for _, g in engine.turns[:2]),
        len(engine.turns[2][1].tokens),
    ]
    check_exact(episode, engine)


def test_calls_of_one_reply_run_in_order_one_after_another() -> None:
    seen: list[str] = []

    class Slow(Quiz):
        @tool
        async def note(self, word: str) -> None:
            seen.append(f"+{word}")
            await trio.sleep(0.01)
            seen.append(f"-{word}")

    engine = FakeEngine('[note {"word": "a"}][note {"word": "b"}]', "x")
    episode = play(Slow, engine)
    assert seen == ["+a", "-a", "+b", "-b"]
    assert [m.text for m in episode.trajectory.messages if m.role == "tool"] == ["", ""]


@pytest.mark.parametrize(
    ("said", "reason", "words"),
    [
        ("[double {not json]", "malformed", "not JSON"),
        ('[duble {"n": 1}]', "unknown_tool", "did you mean 'double'?"),
        ("[x {}]", "unknown_tool", "The tools are: double"),
        ('[double {"n": "two"}]', "bad_arguments", "argument 'n' of double must be integer"),
        ('[double {"m": 2}]', "bad_arguments", "no argument 'm'"),
        ("[double {}]", "bad_arguments", "needs the argument 'n' (integer)"),
        ("[fail {}]", "exception", "Error: ValueError: no such thing"),
        ("[leave {}]", "exception", "sys.exit(3)"),
        ("[hang {}]", "timeout", "took longer than 0.05 seconds"),
        ("[sleep {}]", "timeout", "took longer than 0.05 seconds"),
    ],
)
def test_tool_failures_are_told_to_the_model_and_counted(said: str, reason: str, words: str) -> None:
    released, finished = threading.Event(), []

    class Bad(Quiz):
        @tool
        def fail(self) -> None:
            raise ValueError("no such thing")

        @tool
        def leave(self) -> None:
            raise SystemExit(3)

        @tool(timeout_seconds=0.05)
        def hang(self) -> None:
            released.wait(60)
            finished.append("hang")

        @tool(timeout_seconds=0.05)
        async def sleep(self) -> None:
            await trio.sleep(60)
            finished.append("sleep")

    episode = play(Bad, FakeEngine(said, "42"))
    assert not finished, "it was waited for"
    released.set()
    answer = episode.trajectory.messages[2]
    assert answer.role == "tool" and answer.text.startswith("Error: ") and words in answer.text
    assert "Traceback" not in answer.text
    assert episode.metrics["tool_failures"] == episode.metrics[f"tool_failure/{reason}"] == 1.0
    assert episode.status is Status.COMPLETED and episode.score.value == 1.0


def test_a_malformed_call_is_answered_by_the_user_where_the_template_wants_it() -> None:
    chat = FakeChat(tool_after_text=False)
    answer = play(chat=chat, engine=FakeEngine("[double {oops][double {]", "x")).trajectory.messages[2]
    assert answer.role == "user" and answer.text.count("not JSON") == 2
    mixed = play(chat=chat, engine=FakeEngine('[double {oops][double {"n": 1}]', "x")).trajectory.messages
    assert [m.role for m in mixed] == ["user", "assistant", "tool", "tool", "assistant"]


@pytest.mark.parametrize(
    ("value", "text"),
    [("é", "é"), (None, ""), ({"a": [1, None]}, '{"a":[1,null]}'), (2.5, "2.5"), (True, "true"), (1j, "1j")],
)
def test_what_a_tool_returns_becomes_text(value: Any, text: str) -> None:
    class Returns(Quiz):
        @tool
        def get(self) -> Any:
            return value

    assert play(Returns, FakeEngine("[get {}]", "x")).trajectory.messages[2].text == text


def test_long_tool_output_is_cut_with_a_note() -> None:
    class Long(Quiz):
        @tool
        def get(self) -> str:
            return "a" * 500

    episode = play(Long, FakeEngine("[get {}]", "x"), tool_output_characters_max=100)
    assert episode.trajectory.messages[2].text == "a" * 100 + "\n[cut: the first 100 of 500 characters]"


def test_reply_continues_the_conversation() -> None:
    class Game(Quiz):
        def setup(self, task: Task) -> None:
            self.left: list[Any] = ["again", Message("user", "and again"), [Message("user", "a"), "b"], None]

        async def reply(self, trajectory: Any) -> Any:
            return self.left.pop(0)

    engine = FakeEngine("1", "2", "3", "42")
    episode = play(Game, engine)
    assert [m.text for m in episode.trajectory.messages] == [
        "double 21",
        "1",
        "again",
        "2",
        "and again",
        "3",
        "a",
        "b",
        "42",
    ]
    assert episode.status is Status.COMPLETED and episode.score.value == 1.0
    check_exact(episode, engine)


# --- endings --------------------------------------------------------------------------------------------------------


def test_the_turn_limit_ends_an_episode_normally_after_the_last_tool_ran() -> None:
    engine = FakeEngine(rest='[double {"n": 21}]')
    episode = play(engine=engine, max_turns=2)
    assert episode.status is Status.COMPLETED and "2 turns" in (episode.trajectory.error or "")
    assert episode.metrics["turn_limit"] == 1.0
    (sample,) = episode_samples(episode, 0, 0)
    assert sample.loss_mask == episode.trajectory.segments[0].loss_mask and 1.0 in sample.loss_mask, "it is trained"
    assert [m.role for m in episode.trajectory.messages] == ["user", "assistant", "tool", "assistant", "tool"]
    assert episode.score.value == 0.0
    check_exact(episode, engine)


def test_the_last_turn_may_complete() -> None:
    assert play(engine=FakeEngine("42"), max_turns=1).status is Status.COMPLETED


def test_the_token_budget_is_the_whole_episodes() -> None:
    engine = FakeEngine('[double {"n": 21}]', "a long answer")
    episode = play(engine=engine, max_tokens=25)
    assert episode.status is Status.TRUNCATED and "cut off" in (episode.trajectory.error or "")
    assert episode.trajectory.sampled_count == 25
    check_exact(episode, engine)
    first = len(engine.turns[0][1].tokens)
    exact = play(engine=FakeEngine('[double {"n": 21}]', "x"), max_tokens=first)
    assert exact.status is Status.TRUNCATED and exact.trajectory.messages[-1].role == "tool"


def test_the_context_truncates_too() -> None:
    engine = FakeEngine("a long answer", context=16)
    episode = play(engine=engine)
    assert episode.status is Status.TRUNCATED
    assert len(episode.trajectory.segments[0].tokens) == 16
    too_long = play(engine=FakeEngine(context=3))
    assert too_long.status is Status.TRUNCATED and too_long.trajectory.segments == []
    assert "context holds 3" in (too_long.trajectory.error or "")


def test_an_aborted_turn_keeps_its_tokens() -> None:
    part = Generation([65, 66], [-0.5, -0.25], "abort", [VersionSpan(0, 0, 1), VersionSpan(1, 1, 2)])
    engine = FakeEngine(part)
    episode = play(engine=engine)
    assert episode.status is Status.ABORTED and episode.score.value is None
    assert episode.trajectory.segments[0].versions[-2:] == [0, 1]
    check_exact(episode, engine)


@pytest.mark.parametrize(
    "broken",
    [
        InferenceError("the engine is gone"),
        Generation([65], [], "stop", [VersionSpan(0, 0, 1)]),
        Generation([65], [math.nan], "stop", [VersionSpan(0, 0, 1)]),
        Generation([65], [0.5], "stop", [VersionSpan(0, 0, 1)]),
        Generation([65], [-0.5], "stop", []),
        Generation([65] * 9, [-0.5] * 9, "stop", [VersionSpan(0, 0, 9)]),
    ],
)
def test_an_engine_that_fails_is_an_inference_error(broken: Any) -> None:
    episode = play(engine=FakeEngine(broken), max_tokens=8)
    assert episode.status is Status.INFERENCE_ERROR and episode.score.value is None
    assert episode.trajectory.error and episode.trajectory.sampled_count == 0


def test_a_failure_keeps_what_was_played_before() -> None:
    engine = FakeEngine('[double {"n": 21}]', InferenceError("gone"))
    episode = play(engine=engine)
    assert episode.status is Status.INFERENCE_ERROR
    assert episode.trajectory.sampled_count == len(engine.turns[0][1].tokens)
    check_exact(episode, engine)


def test_a_conversation_that_the_template_refuses_is_an_environment_error() -> None:
    episode = play(task=Task("forbidden"))
    assert episode.status is Status.ENVIRONMENT_ERROR and "refuses" in (episode.trajectory.error or "")


@pytest.mark.parametrize("error", [AssertionError("ours"), KeyError("ours")])
@pytest.mark.parametrize("where", ["_record", "_prepare"])
def test_a_mistake_of_the_core_ends_the_run(error: Exception, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    def fail(self: Any, *args: Any) -> None:
        raise error

    monkeypatch.setattr(ChatModel, where, fail)
    with pytest.raises(type(error), match="ours"):
        play(closing(closed))
    assert closed == ["closed"]


def test_a_message_that_no_template_can_read_is_an_environment_error() -> None:
    for wrong in (Message("user", 3), Message("user", ["text"]), Message(None, "text")):  # type: ignore[arg-type]
        env = type("Wrong", (Quiz,), {"reply": lambda self, trajectory, wrong=wrong: wrong})
        episode = play(env)
        assert episode.status is Status.ENVIRONMENT_ERROR, episode.trajectory.error
        assert "a message's role must be text" in (episode.trajectory.error or "")


def test_a_type_that_raises_while_it_is_made_is_told_to_the_model() -> None:
    class Picky(Quiz):
        @tool
        def take(self, what: Lost) -> None: ...

    episode = play(Picky, FakeEngine('[take {"what": {"n": 1}}]', "42"))
    assert episode.metrics["tool_failure/bad_arguments"] == 1.0 and episode.status is Status.COMPLETED


@pytest.mark.parametrize("method", ["setup", "reply", "close"])
def test_an_environment_that_raises_is_an_environment_error(method: str) -> None:
    def fail(self: Any, *args: Any) -> None:
        raise KeyError("lost")

    env = type("Broken", (Quiz,), {method: fail})
    episode = play(env, FakeEngine("42"))
    assert episode.status is Status.ENVIRONMENT_ERROR and episode.score.value is None
    assert f"{method}: KeyError: 'lost'" in (episode.trajectory.error or "")
    assert episode.score.why.startswith("environment_error: ")


def test_make_env_that_raises_and_reply_of_a_wrong_type() -> None:
    def fail() -> None:
        raise OSError("no disk")

    assert "OSError: no disk" in (play(fail).trajectory.error or "")

    class Wrong(Quiz):
        def reply(self, trajectory: Any) -> int:
            return 3

    assert "returned int, expected text" in (play(Wrong).trajectory.error or "")


class Closing(Quiz):
    closed: list[str]

    async def close(self) -> None:
        await trio.sleep(0.01)  # a checkpoint: without the shield, cancellation would end it here
        self.closed.append("closed")


def closing(closed: list[str]) -> Callable[[], Any]:
    def make() -> Any:
        env = Closing()
        env.closed = closed
        return env

    return make


def test_the_episodes_deadline() -> None:
    engine, closed = FakeEngine(), []
    engine.blocks = True
    episode = play(closing(closed), engine, episode_seconds=3.0, clock=trio.testing.MockClock(autojump_threshold=0.05))
    assert episode.status is Status.TIMEOUT and closed == ["closed"]
    assert "deadline of 3 seconds passed while waiting for the model" in (episode.trajectory.error or "")
    assert episode.score.value is None


def test_a_setup_that_blocks_its_thread_times_out() -> None:
    released, finished = threading.Event(), []

    class Blocked(Quiz):
        def setup(self, task: Task) -> None:
            released.wait(60)
            finished.append(task)

    episode = play(Blocked, episode_seconds=0.1)
    assert not finished, "it was waited for"
    released.set()
    assert episode.status is Status.TIMEOUT and "running setup" in (episode.trajectory.error or "")


def test_cancellation_closes_the_environment_and_the_session() -> None:
    engine, closed = FakeEngine(), []
    engine.blocks = True

    async def main() -> bool:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                functools.partial(
                    run_episode,
                    TASK,
                    make_env=closing(closed),
                    chat=FakeChat(),
                    inference=engine,
                    limits=EpisodeLimits(),
                    rewards=[env_term()],
                    session="s",
                    order=(0, 0),
                    seed=0,
                )
            )
            await engine.blocked.wait()
            nursery.cancel_scope.cancel()
        return nursery.cancel_scope.cancelled_caught

    assert trio.run(main)
    assert closed == ["closed"] and engine.closed == ["s"]


def test_close_has_a_deadline() -> None:
    class Stuck(Quiz):
        async def close(self) -> None:
            await trio.sleep_forever()

    episode = play(Stuck, FakeEngine("42"), cleanup_seconds=0.05)
    assert episode.status is Status.ENVIRONMENT_ERROR
    assert "close took longer than 0.05 seconds" in (episode.trajectory.error or "")


def test_the_session_is_closed_before_rewards_run() -> None:
    engine = FakeEngine("42")

    class Looks(Quiz):
        @reward
        def closed(self) -> float:
            return float(engine.closed == ["s"])

    assert play(Looks, engine).score.parts == {"right": 1.0, "closed": 1.0}


def test_an_undescribable_tool_ends_the_run() -> None:
    class Untyped(Quiz):
        @tool
        def guess(self, x):
            return x

    with pytest.raises(EnvironmentDefinitionError, match="'guess', parameter 'x' has no type hint"):
        play(Untyped)


# --- judging --------------------------------------------------------------------------------------------------------


def test_rewards_of_several_kinds_are_mixed() -> None:
    class Judged(Quiz):
        @reward(weight=0.5)
        async def polite(self, trajectory: Any, env: Any) -> Score:
            assert env is self
            return Score(2.0, {"please": 1.0}, "it said please")

        @metric
        def length(self, trajectory: Any) -> int:
            return len(trajectory.last_text)

        @metric
        def broken(self) -> float:
            raise RuntimeError("no")

        @metric
        def turns(self) -> float:
            return 7.0

    def brevity(trajectory: Any, *, target: int = 1) -> float:
        return len(trajectory.last_text) / target

    def group(tasks: Any, trajectories: Any) -> list[float]:
        raise AssertionError("group rewards are not asked here")

    terms = [env_term(2.0), reward_term("short", brevity, -0.1, {"target": 2}), reward_term("g", group)]
    episode = play(Judged, FakeEngine("42"), rewards=terms)
    assert episode.score.value == pytest.approx(2 * (1 + 0.5 * 2) - 0.1)
    assert episode.score.parts == {"right": 1.0, "polite": 2.0, "short": 1.0, "please": 1.0}
    assert episode.score.why == "polite: it said please"
    assert (episode.metrics["metric/length"], episode.metrics["metric_failures"]) == (2.0, 1.0)
    assert (episode.metrics["turns"], episode.metrics["metric/turns"]) == (1.0, 7.0)


def test_a_reward_that_cannot_judge_is_never_zero() -> None:
    def broken(trajectory: Any) -> float:
        raise ValueError("no idea")

    terms = [env_term(), reward_term("broken", broken)]
    dropped = play(engine=FakeEngine("42"), rewards=terms)
    assert dropped.status is Status.COMPLETED and dropped.score.value is None
    assert dropped.score.parts == {"right": 1.0, "broken": None} and "ValueError: no idea" in dropped.score.why
    assert dropped.metrics["reward_failures"] == 1.0
    assert play(engine=FakeEngine("42"), rewards=terms, on_invalid_reward="zero").score.value == 1.0
    with pytest.raises(RewardError, match="'broken' could not judge"):
        play(engine=FakeEngine("42"), rewards=terms, on_invalid_reward="raise")


def test_a_slow_reward_cannot_judge() -> None:
    async def slow(trajectory: Any) -> float:
        await trio.sleep(5)
        return 1.0

    episode = play(rewards=[reward_term("slow", slow)], reward_seconds=0.05)
    assert episode.score.value is None and "longer than 0.05 seconds" in episode.score.why


def test_a_nan_ends_the_run_and_the_environment_is_closed() -> None:
    closed: list[str] = []
    with pytest.raises(RewardError, match="'nan' returned nan"):
        play(closing(closed), rewards=[reward_term("nan", lambda task: math.nan)])
    assert closed == ["closed"]


# --- deadlines, and what may be played again ------------------------------------------------------------------------


@pytest.mark.parametrize("slow", ["build", "setup", "async setup"])
def test_building_and_setup_have_a_deadline(slow: str) -> None:
    class Slow(Quiz):
        def __init__(self) -> None:
            if slow == "build":
                time.sleep(0.3)

        def setup(self, task: Task) -> None:
            if slow == "setup":
                time.sleep(0.3)

    class SlowAsync(Quiz):
        async def setup(self, task: Task) -> None:
            await trio.sleep_forever()

    episode = play(SlowAsync if slow == "async setup" else Slow, setup_seconds=0.05)
    stage = "building the environment" if slow == "build" else "running setup"
    assert episode.status is Status.TIMEOUT and not episode.may_retry
    assert episode.trajectory.error == f"{stage} took longer than 0.05 seconds"


def test_a_deadline_of_the_environments_own_is_its_error() -> None:
    class Own(Quiz):
        async def setup(self, task: Task) -> None:
            with trio.fail_after(0.01):
                await trio.sleep_forever()

    assert play(Own).status is Status.ENVIRONMENT_ERROR


def test_a_turn_has_a_deadline() -> None:
    engine, closed = FakeEngine(), []
    engine.blocks = True
    episode = play(closing(closed), engine, turn_seconds=2.0, clock=trio.testing.MockClock(autojump_threshold=0.05))
    assert episode.status is Status.TIMEOUT and closed == ["closed"] and not episode.may_retry
    assert episode.trajectory.error == "the model took longer than 2 seconds for one turn"


def test_a_loop_of_ones_own_that_catches_a_late_turn_is_not_judged() -> None:
    class Loop(Quiz):
        async def rollout(self, task: Task, model: ChatModel) -> None:
            with contextlib.suppress(Exception):
                await model.chat("hello")

    engine = FakeEngine()
    engine.blocks = True
    episode = play(Loop, engine, turn_seconds=0.05)
    assert episode.status is Status.TIMEOUT and episode.score.value is None


def test_a_cap_on_the_deadlines_of_tools() -> None:
    class Slow(Quiz):
        @tool(timeout_seconds=60)
        async def wait(self) -> None:
            await trio.sleep_forever()

    episode = play(Slow, FakeEngine("[wait {}]"), tool_seconds=0.05)
    assert episode.trajectory.metrics["tool_failure/timeout"] == 1.0
    assert "wait took longer than 0.05 seconds" in episode.trajectory.messages[-2].text


def test_what_may_be_played_again() -> None:
    class Setup(Quiz):
        def setup(self, task: Task) -> None:
            raise OSError("no container")

    class Reply(Quiz):
        def reply(self, trajectory: Any) -> str:
            raise OSError("no container")

    def again(env: Any, *script: Any) -> bool:
        return play(env, FakeEngine(*script)).may_retry

    assert again(lambda: Lost(1)) and again(Setup)
    assert again(Quiz, InferenceError("the connection was reset"))
    assert not again(Quiz, InferenceError("the prompt is too long", is_transient=False))
    assert not again(Reply) and not again(Quiz) and not again(Quiz, Generation([], [], "abort", []))


# --- objects of an author's own -------------------------------------------------------------------------------------


class SlowToRead:
    """An object whose conversion takes longer than any deadline here."""

    def __str__(self) -> str:
        time.sleep(0.6)
        return "slow"

    def __float__(self) -> float:
        time.sleep(0.6)
        return 1.0


@pytest.mark.parametrize("kind", ["plain", "trio", "asyncio"])
def test_converting_what_an_author_returned_is_part_of_the_call_and_its_deadline(kind: str) -> None:
    def plain() -> SlowToRead:
        return SlowToRead()

    async def under_trio() -> SlowToRead:
        await trio.lowlevel.checkpoint()
        return SlowToRead()

    async def on_asyncio() -> SlowToRead:
        await asyncio.sleep(0)
        return SlowToRead()

    method: Any = {"plain": plain, "trio": under_trio, "asyncio": on_asyncio}[kind]

    class Objects(Quiz):
        slow = staticmethod(tool(functools.partial(method)))
        judged = staticmethod(reward(functools.partial(method)))
        measured = staticmethod(metric(functools.partial(method)))

    episode = play(Objects, FakeEngine("[slow {}]"), tool_seconds=0.1, reward_seconds=0.1)
    assert "slow took longer than 0.1 seconds" in episode.trajectory.messages[-2].text
    assert "judged could not judge: it took longer than 0.1 seconds" in episode.score.why
    assert episode.metrics["tool_failure/timeout"] == episode.metrics["metric_failures"] == 1.0
