"""A person's conversation is an episode's: the same tools and tokens, and limits for each message."""

from __future__ import annotations

import pytest
import trio
from agent_fakes import TASK, FakeChat, FakeEngine, Quiz, check_segments

from rollouts.agent.conversation import ChatSession
from rollouts.agent.episode import EpisodeRun
from rollouts.agent.model import EpisodeLimits
from rollouts.env.mixing import env_term
from rollouts.errors import ConfigError, InferenceError, RunError
from rollouts.inference.suspend import SuspendableEngine
from rollouts.types import Message


def talk(engine, steps, *, env=Quiz, task=None, system=(), **limits):
    """Run `steps(conversation)` in an open conversation; gives what it returned and what was shown."""
    shown: list[Message] = []

    async def main():
        suspendable = SuspendableEngine(engine, None, (0, 0), "s")
        suspendable.clock.begin()
        run = EpisodeRun(suspendable, task or TASK, env, FakeChat(), EpisodeLimits()._replace(**limits), 5)
        conversation = ChatSession(run, shown.append, list(system))
        try:
            await conversation.open(for_task=task is not None)
            return await steps(conversation)
        finally:
            await conversation.aclose()

    return trio.run(main), [f"{m.role}: {m.text}" for m in shown]


def test_each_message_continues_the_conversation_with_tools():
    engine = FakeEngine("hello", '[double {"n": 4}]', "8")

    async def steps(conversation):
        notes = [await conversation.say("hi"), await conversation.say("double 4")]
        check_segments(conversation.run.model.trajectory)
        return notes, conversation.messages

    (notes, messages), shown = talk(engine, steps, system=[Message("system", "Be brief.")])
    assert notes == ["", ""]
    assert shown == ["assistant: hello", "assistant: ", "tool: 8", "assistant: 8"]
    assert [m.role for m in messages] == ["system", "user", "assistant", "user", "assistant", "tool", "assistant"]
    # What was sampled is context as it was sampled, in one segment.
    (_, first), (second, _) = engine.turns[0], engine.turns[1]
    assert second.tokens[: len(engine.turns[0][0].tokens) + len(first.tokens)] == (
        engine.turns[0][0].tokens + first.tokens
    )
    assert engine.closed == ["s"]


def test_each_message_has_all_limits_again():
    async def steps(conversation):
        return [await conversation.say("1"), await conversation.say("2"), await conversation.say("3")]

    notes, shown = talk(FakeEngine(rest="abcdef"), steps, max_tokens=7, max_turns=1)
    assert notes == ["", "", ""]
    assert shown == ["assistant: abcdef"] * 3


def test_a_reply_that_is_cut_off_is_kept_and_the_conversation_goes_on():
    engine = FakeEngine("a long answer", "short")

    async def steps(conversation):
        return [await conversation.say("1"), await conversation.say("2")], conversation.messages

    (notes, messages), shown = talk(engine, steps, max_tokens=6)
    assert notes == ["the reply was cut off after 6 tokens", ""]
    assert shown == ["assistant: a long", "assistant: short"]
    assert [m.text for m in messages] == ["1", "a long", "2", "short"]


def test_calls_without_end_stop_at_the_limit_of_turns():
    async def steps(conversation):
        return await conversation.say("1"), len(conversation.messages), await conversation.say("2")

    (note, count, after), _ = talk(FakeEngine(*['[double {"n": 1}]'] * 3), steps, max_turns=3)
    assert note == "all 3 turns are used"
    assert count == 7
    assert after == ""


def test_a_message_that_does_not_fit_is_dropped():
    async def steps(conversation):
        first = await conversation.say("hi")
        long = await conversation.say("word " * 100)
        return first, long, await conversation.say("hi again"), [m.text for m in conversation.messages]

    (first, note, again, texts), _ = talk(FakeEngine(rest="ok", context=60), steps)
    assert (first, again) == ("", "")
    assert "the model's context holds 60; your message is not part of the conversation" in note
    assert texts == ["hi", "ok", "hi again", "ok"]


def test_a_cancelled_message_leaves_the_conversation_as_it_was():
    engine = FakeEngine("one")

    async def steps(conversation):
        await conversation.say("1")
        engine.blocks = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(conversation.say, "2")
            await engine.blocked.wait()
            nursery.cancel_scope.cancel()
        engine.blocks = False
        return await conversation.say("3"), [m.text for m in conversation.messages]

    assert talk(engine, steps)[0] == ("", ["1", "one", "3", "done"])


def test_an_engine_that_fails_raises_and_the_message_is_dropped():
    async def steps(conversation):
        with pytest.raises(InferenceError, match="it burns"):
            await conversation.say("1")
        return await conversation.say("2"), [m.text for m in conversation.messages]

    assert talk(FakeEngine(InferenceError("it burns")), steps)[0] == ("", ["2", "done"])


class Guided(Quiz):
    """Is set up for its task, answers once, and must be closed."""

    closed = 0

    def setup(self, task):
        self.answer = task.answer

    def reply(self, trajectory):
        return "try again" if trajectory.turns == 1 else None

    def close(self):
        type(self).closed += 1


def test_a_task_opens_the_conversation_and_is_judged():
    before = Guided.closed

    async def steps(conversation):
        note = await conversation.play_task()
        score = await conversation.judge([env_term()])
        await conversation.say("thanks")  # the environment does not reply to a person
        return note, score, await conversation.judge([env_term()])

    (note, score, later), shown = talk(FakeEngine("41", "42", "bye"), steps, env=Guided, task=TASK)
    assert note == ""
    assert shown == ["assistant: 41", "user: try again", "assistant: 42", "assistant: bye"]
    assert (score.value, score.parts, later.value) == (1.0, {"right": 1.0}, 0.0)
    assert Guided.closed == before + 1


def test_setup_runs_for_a_task_only():
    async def steps(conversation):
        return hasattr(conversation.run.env, "answer")

    assert not talk(FakeEngine(), steps, env=Guided)[0]
    assert talk(FakeEngine(), steps, env=Guided, task=TASK)[0]


def test_an_environment_that_cannot_be_set_up_is_closed_and_says_why():
    class Broken(Guided):
        def setup(self, task):
            raise KeyError("board")

    with pytest.raises(RunError, match="running setup: KeyError: 'board'"):
        talk(FakeEngine(), None, env=Broken, task=TASK)
    assert Broken.closed == Guided.closed + 1


def test_a_loop_of_the_environments_own_cannot_be_opened_by_a_task():
    class Loop(Quiz):
        async def rollout(self, task, model):
            await model.chat(task.messages)

    with pytest.raises(ConfigError, match="leave out --task"):
        talk(FakeEngine(), None, env=Loop, task=TASK)
