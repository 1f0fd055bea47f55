"""Loops that are written for asyncio: turns, the end at a limit, errors, and the answers to calls."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rollouts.agent.on_asyncio import AsyncioModel, ModelEndedError, play_on_asyncio
from rollouts.errors import InferenceError
from rollouts.types import Message, Status, Task

sys.path.insert(0, str(Path(__file__).parent))
from agent_fakes import FakeChat, FakeEngine, Quiz, check_exact, play


def environment(loop: Any) -> type[Quiz]:
    """An environment whose loop is this function of an asyncio model, and which keeps what it returned in `seen`."""

    class OnAsyncio(Quiz):
        seen: ClassVar[list[Any]] = []

        async def rollout(self, task: Task, model: Any) -> None:
            self.seen.append(await play_on_asyncio(model, loop))

    return OnAsyncio


def ask(text: str) -> list[Message]:
    return [Message("user", text)]


def test_turns_and_their_tokens():
    async def loop(model: AsyncioModel) -> list[int]:
        first = await model.chat(ask("double 21"), [])
        await asyncio.sleep(0)
        second = await model.chat([*ask("double 21"), first.message, *ask("again")], [])
        assert (first.message.text, second.message.text, first.is_cut) == ("41", "42", False)
        return [first.tokens, second.tokens]

    engine, env = FakeEngine("41", "42"), environment(loop)
    episode = play(env, engine)
    assert (episode.status, episode.score.value) == (Status.COMPLETED, 1.0)
    assert env.seen == [[3, 3]] and len(episode.trajectories) == 1
    check_exact(episode, engine)


def test_tasks_that_ask_at_the_same_time_are_answered_in_order():
    async def loop(model: AsyncioModel) -> list[str]:
        turns = await asyncio.gather(*(model.chat(ask(f"say {n}"), []) for n in range(4)))
        return [turn.message.text for turn in turns]

    env = environment(loop)
    episode = play(env, FakeEngine("a", "b", "c", "d"))
    assert env.seen == [["a", "b", "c", "d"]]
    assert [each.messages[0].text for each in episode.trajectories] == [f"say {n}" for n in range(4)]


def test_a_limit_ends_the_loop_which_may_finish():
    finished: list[str] = []

    async def loop(model: AsyncioModel) -> None:
        messages = ask("double 21")
        with pytest.raises(ModelEndedError, match="all 2 turns are used"):
            while True:
                messages = [*messages, (await model.chat(messages, [])).message, *ask("go on")]
        with pytest.raises(ModelEndedError):
            await model.chat(ask("another"), [])
        await asyncio.sleep(0.01)
        finished.append("scored")

    episode = play(environment(loop), FakeEngine(), max_turns=2)
    assert (episode.status, episode.metrics["turn_limit"], finished) == (Status.COMPLETED, 1.0, ["scored"])


def test_a_reply_that_is_cut_off_says_so():
    async def loop(model: AsyncioModel) -> bool:
        return (await model.chat(ask("double 21"), [])).is_cut

    env = environment(loop)
    assert play(env, FakeEngine("much too long"), max_tokens=4).status is Status.TRUNCATED
    assert env.seen == [True]


def test_an_error_of_the_engine_is_that_of_the_episode():
    async def loop(model: AsyncioModel) -> None:
        with pytest.raises(ModelEndedError):
            await model.chat(ask("double 21"), [])
        raise ValueError("because of it")

    episode = play(environment(loop), FakeEngine(InferenceError("the engine is gone")))
    assert episode.status is Status.INFERENCE_ERROR and "the engine is gone" in str(episode.trajectory.error)


def test_an_error_of_the_loop_is_that_of_the_environment():
    async def loop(model: AsyncioModel) -> None:
        await model.chat(ask("double 21"), [])
        raise ValueError("a mistake")

    episode = play(environment(loop), FakeEngine())
    assert episode.status is Status.ENVIRONMENT_ERROR and "ValueError: a mistake" in str(episode.trajectory.error)


def test_the_deadline_cancels_the_loop():
    cancelled: list[bool] = []

    async def loop(model: AsyncioModel) -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    assert play(environment(loop), FakeEngine(), episode_seconds=0.2).status is Status.TIMEOUT
    assert cancelled == [True]


@pytest.mark.parametrize(
    ("tool_after_text", "said", "role"), [(True, "[double x]", "tool"), (False, "[double x]", "user")]
)
def test_answers_to_a_call_that_the_template_does_not_show(tool_after_text, said, role):
    async def loop(model: AsyncioModel) -> None:
        turn = await model.chat(ask("double 21"))
        answers = model.answers(turn.message, ["Error: write JSON"])
        assert [(each.role, each.text) for each in answers] == [(role, "Error: write JSON")]
        await model.chat([*ask("double 21"), turn.message, *answers])

    episode = play(environment(loop), FakeEngine(said, "42"), FakeChat(tool_after_text=tool_after_text))
    assert (episode.status, episode.score.value) == (Status.COMPLETED, 1.0)
