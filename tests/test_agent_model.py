"""Exact tokens: an environment's own loops, and random conversations with templates that rewrite history."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from rollouts.agent.episode import ChatModel, EpisodeOver
from rollouts.agent.records import turn_seed
from rollouts.errors import EnvironmentDefinitionError, InferenceError
from rollouts.inference.base import Generation, VersionSpan
from rollouts.types import Episode, Message, Status, Task

sys.path.insert(0, str(Path(__file__).parent))
from agent_fakes import FakeChat, FakeEngine, Quiz, check_exact, play

# --- an environment's own loop --------------------------------------------------------------------------------------


def test_own_rollout_with_several_conversations() -> None:
    class Team(Quiz):
        async def rollout(self, task: Task, model: ChatModel) -> Any:
            plan = await model.chat([Message("system", "plan"), *task.messages], tools=[])
            history: list[Any] = [{"role": "user", "content": plan.text}]
            reply = await model.chat(history)
            while reply.tool_calls:
                history += [reply, *await model.call_tools(reply)]
                reply = await model.chat(history)
            worker = model.trajectory
            await model.chat("well done?", tools=[])
            return worker

    engine = FakeEngine("use the tool", '[double {"n": 21}]', "42", "yes")
    episode = play(Team, engine)
    assert len(episode.trajectories) == 3 and episode.judged == 1 and episode.score.value == 1.0
    assert [t.status for t in episode.trajectories] == [Status.COMPLETED] * 3
    assert [len(t.tools) for t in episode.trajectories] == [0, 1, 0]
    assert episode.metrics["turns"] == 4.0 and episode.metrics["tool_calls"] == 1.0
    assert len({request.seed for request, _ in engine.turns}) == 4
    check_exact(episode, engine)


def test_own_rollout_out_of_turns_ends_normally_even_inside_a_nursery() -> None:
    class Forever(Quiz):
        async def rollout(self, task: Task, model: ChatModel) -> None:
            async def speak() -> None:
                history = task.messages
                while True:
                    history += [await model.chat(history), Message("user", "go on")]

            async with trio.open_nursery() as nursery:
                nursery.start_soon(speak)

    episode = play(Forever, FakeEngine(), max_turns=3)
    assert episode.status is Status.COMPLETED and len(episode.trajectory.segments) == 1
    assert episode.metrics["turns"] == 3.0


def test_a_changed_history_or_other_tools_are_recorded_exactly() -> None:
    class Rewriter(Quiz):
        async def rollout(self, task: Task, model: ChatModel) -> None:
            history = task.messages
            reply = await model.chat(history)
            reply.content = "changed"  # the record keeps what was sampled
            await model.chat([*history, reply, Message("user", "b")])
            first = model.trajectories[0].messages
            await model.chat([*first, Message("user", "c")], tools=[])
            with pytest.raises(EpisodeOver):
                await model.chat(history)

    engine = FakeEngine("one", "two", "three")
    episode = play(Rewriter, engine, max_turns=3)
    assert [len(t.segments) for t in episode.trajectories] == [2, 1], "a conversation that never began is not judged"
    assert episode.metrics["turn_limit"] == 1.0
    assert episode.trajectories[0].messages[1].text == "one"
    check_exact(episode, engine)


def test_an_engines_failure_can_be_retried_by_an_own_rollout() -> None:
    class Stubborn(Quiz):
        async def rollout(self, task: Task, model: ChatModel) -> None:
            history = [*task.messages, await model.chat(task.messages), Message("user", "go on")]
            with pytest.raises(InferenceError):
                await model.chat(history)
            await model.chat(history)

    engine = FakeEngine("a", InferenceError("busy"), "42")
    episode = play(Stubborn, engine)
    assert episode.status is Status.COMPLETED and len(episode.trajectories) == 1
    check_exact(episode, engine)


def test_an_error_of_an_own_rollout_is_an_environment_error() -> None:
    class Wrong(Quiz):
        async def rollout(self, task: Task, model: ChatModel) -> None:
            async with trio.open_nursery():
                raise ValueError("inside")

    assert "running rollout: ValueError: inside" in (play(Wrong).trajectory.error or "")


@pytest.mark.parametrize("way", ["plain", "nursery", "catches", "replaces"])
def test_a_mistake_of_the_core_ends_the_run_whatever_an_own_rollout_makes_of_it(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(Quiz):
        async def rollout(self, task: Task, model: ChatModel) -> None:
            if way == "plain":
                await model.chat("a")
            async with trio.open_nursery() as nursery:
                if way == "nursery":
                    nursery.start_soon(model.chat, "a")
            try:
                await model.chat("a")
            except AssertionError as error:
                if way == "replaces":
                    raise ValueError("the author's") from error

    def fail(self: ChatModel, *args: Any) -> None:
        raise AssertionError("ours")

    monkeypatch.setattr(ChatModel, "_record", fail)
    with pytest.raises(AssertionError, match="ours"):
        play(Own)


def test_an_own_assertion_is_the_environments() -> None:
    class Own(Quiz):
        async def rollout(self, task: Task, model: ChatModel) -> None:
            await model.chat("a")
            assert not model.trajectories, "the author's"

    episode = play(Own)
    assert episode.status is Status.ENVIRONMENT_ERROR
    assert "running rollout: AssertionError: the author's" in (episode.trajectory.error or "")


@pytest.mark.parametrize("catches", [False, True])
def test_asking_from_several_tasks_at_once_ends_the_run(catches: bool) -> None:
    """Whichever of them trio runs first, and however fast the engine answers."""

    class Fast(FakeEngine):
        async def generate(self, request: Any) -> Generation:
            return Generation([65], [-0.5], "stop", [VersionSpan(0, 0, 1)])

    class Own(Quiz):
        async def rollout(self, task: Task, model: ChatModel) -> None:
            async def ask(words: str) -> None:
                try:
                    await model.chat(words)
                except EnvironmentDefinitionError:
                    if not catches:
                        raise

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, "a")
                nursery.start_soon(ask, "b")

    for engine in (FakeEngine(), Fast()):
        with pytest.raises(
            EnvironmentDefinitionError, match=r"model\.chat is already waiting for a reply: call it one at a time"
        ):
            play(Own, engine)


def test_a_cancelled_turn_may_be_asked_for_again() -> None:
    class Own(Quiz):
        async def rollout(self, task: Task, model: ChatModel) -> None:
            engine.blocks = True
            with trio.move_on_after(0.02):
                await model.chat("a")
            engine.blocks = False
            await model.chat("a")

    engine = FakeEngine()
    assert play(Own, engine).status is Status.COMPLETED and len(engine.turns) == 1


# --- properties -----------------------------------------------------------------------------------------------------

REPLIES = st.one_of(
    st.text("ab[]{}é\U0001f600 ", max_size=12),
    st.integers(-9, 9).map(lambda n: f'x[double {{"n": {n}}}]'),
    st.just('[double {"n": 1}][nope {}][double {oops]'),
)


@given(
    script=st.lists(REPLIES, min_size=1, max_size=6),
    rewrites=st.sets(st.integers(0, 6)),
    talk=st.lists(st.text("xyé", max_size=5), max_size=4),
    max_tokens=st.integers(1, 80),
    max_turns=st.integers(1, 7),
    context=st.integers(5, 200),
    tool_after_text=st.booleans(),
)
def test_recorded_tokens_are_the_sampled_ones_exactly_once(
    script: list[str],
    rewrites: set[int],
    talk: list[str],
    max_tokens: int,
    max_turns: int,
    context: int,
    tool_after_text: bool,
) -> None:
    class Talker(Quiz):
        def setup(self, task: Task) -> None:
            self.left = list(talk)

        async def reply(self, trajectory: Any) -> str | None:
            return self.left.pop(0) if self.left else None

    def go() -> tuple[Episode, FakeEngine]:
        engine = FakeEngine(*script, context=context)
        chat = FakeChat(sorted(rewrites), tool_after_text)
        return play(Talker, engine, chat, max_tokens=max_tokens, max_turns=max_turns), engine

    episode, engine = go()
    check_exact(episode, engine)
    assert episode.status in (Status.COMPLETED, Status.TRUNCATED)
    assert sum(t.sampled_count for t in episode.trajectories) <= max_tokens
    assert len(engine.turns) <= max_turns
    assert all(len(s.tokens) <= context for t in episode.trajectories for s in t.segments)
    again, _ = go()
    assert again.trajectories == episode.trajectories, "one seed, one result"


@pytest.mark.slow
def test_a_real_template_and_any_sampled_ids() -> None:
    """The embedded model's own template; the engine says ids that no encoder would write."""
    transformers = pytest.importorskip("transformers")
    from rollouts.chat.format import load_chat_format

    folder = Path(__file__).parents[1] / "rollouts" / "tiny"
    chat = load_chat_format(transformers.AutoTokenizer.from_pretrained(folder))
    call = chat.encode('<tool_call>\n{"name": "double", "arguments": {"n": 2}}\n</tool_call>')
    letters = st.integers(3, len(chat.tokenizer) - 1)
    reply = st.one_of(
        st.just(call), st.lists(letters, max_size=8), st.lists(letters, max_size=3).map(lambda x: x + call)
    )

    class Talker(Quiz):
        def setup(self, task: Task) -> None:
            self.left = ["go on", None]

        def reply(self, trajectory: Any) -> str | None:
            return self.left.pop(0) if self.left else None

    @given(st.lists(reply, min_size=1, max_size=4))
    def check(replies: list[list[int]]) -> None:
        script = [
            Generation([*ids, chat.stop_ids[0]], [-0.5] * (len(ids) + 1), "stop", [VersionSpan(0, 0, len(ids) + 1)])
            for ids in replies
        ]
        last = Generation([chat.stop_ids[0]], [-0.5], "stop", [VersionSpan(0, 0, 1)])
        engine = FakeEngine(*script, last, last, last)
        check_exact(play(Talker, engine, chat), engine)

    check()


def test_the_exactness_check_can_fail() -> None:
    engine = FakeEngine("42")
    episode = play(engine=engine)
    episode.trajectory.segments[0].tokens[-2] += 1
    with pytest.raises(AssertionError):
        check_exact(episode, engine)


def test_turn_seeds_are_stable_and_distinct() -> None:
    seeds = {
        turn_seed(s, g, r, t, u)
        for s in range(2)
        for g in range(3)
        for r in range(3)
        for t in range(2)
        for u in range(3)
    }
    assert len(seeds) == 108 and all(0 <= seed < 2**63 for seed in seeds)
    assert turn_seed(0, 0, 0, 0, 0) == 4405455499342369029


def test_half_characters_anywhere_in_a_part_are_escaped() -> None:
    image = object()

    class Parts(Quiz):
        async def rollout(self, task: Task, model: ChatModel) -> None:
            inner: list[Any] = ["\ud800", {"\ud801": ("\ud802",)}]
            inner.append(inner)
            await model.chat([Message("user", [{"type": "text", "text": "go", "\ud803": inner, "image": image}])])

    content = play(Parts, FakeEngine("yes")).trajectory.messages[0].content
    assert isinstance(content, list) and content[0]["image"] is image
    assert content[0]["\\ud803"][:2] == ["\\ud800", {"\\ud801": ["\\ud802"]}]
    str(content).encode()
