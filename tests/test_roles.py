"""Several agents in one episode: each role has its own conversations, tokens, tools, limits, rewards and status."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from rollouts import Role, metric, reward, tool
from rollouts.agent.model import ChatModel
from rollouts.env.checks import reward_term
from rollouts.env.mixing import env_term
from rollouts.errors import EnvironmentDefinitionError
from rollouts.inference.base import Generation, VersionSpan
from rollouts.training.samples import episode_samples
from rollouts.types import Episode, Message, Status, Task, Trajectory

sys.path.insert(0, str(Path(__file__).parent))
from agent_fakes import FakeEngine, Quiz, check_exact, play


class Market(Quiz):
    """A seller, who sees the price of the lamp, and a buyer."""

    roles = (Role("seller", system="You sell a lamp."), Role("buyer"))

    async def rollout(self, task: Task, model: ChatModel) -> None:
        seller, buyer = model.role("seller"), model.role("buyer")
        offer = await seller.say("A buyer is here.")
        answer = await buyer.say(["A lamp is for sale.", offer.text])
        await seller.say(answer.text)

    @tool(role="seller")
    def price(self) -> int:
        """The lowest price."""
        return 7

    @reward
    def right(self, task: Task, trajectory: Trajectory) -> float:
        return float(len(trajectory.last_text))

    @reward(role="buyer", weight=10.0)
    def cheap(self, trajectory: Trajectory) -> float:
        return 1.0

    @metric(role="seller")
    def offers(self, trajectory: Trajectory) -> float:
        return float(trajectory.turns)


def texts(trajectory: Trajectory) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in trajectory.messages]


def sampled(trajectory: Trajectory) -> str:
    """The text of the live tokens; 2_000_000 is the end of a message."""
    live = [
        token
        for segment in trajectory.segments
        for token, weight in zip(segment.tokens, segment.loss_mask, strict=True)
        if weight > 0
    ]
    return "".join("|" if token == 2_000_000 else chr(token) for token in live)


def test_each_role_has_its_own_conversation_tokens_score_and_metrics() -> None:
    engine = FakeEngine("[price {}]", "nine!", "seven?", "ok")
    episode = play(Market, engine)
    check_exact(episode, engine)
    seller, buyer = episode.by_role
    assert [each.role for each in (episode, seller, buyer)] == ["", "seller", "buyer"]
    assert texts(seller.trajectory) == [
        ("system", "You sell a lamp."),
        ("user", "A buyer is here."),
        ("assistant", ""),
        ("tool", "7"),
        ("assistant", "nine!"),
        ("user", "seven?"),
        ("assistant", "ok"),
    ]
    assert texts(buyer.trajectory) == [("user", "A lamp is for sale."), ("user", "nine!"), ("assistant", "seven?")]
    # A role's live tokens are its own replies. The other's words are context.
    assert sampled(seller.trajectory) == "[price {}]|nine!|ok|" and sampled(buyer.trajectory) == "seven?|"
    assert [each["function"]["name"] for each in seller.trajectory.tools] == ["double", "price"]
    assert [each["function"]["name"] for each in buyer.trajectory.tools] == ["double"]
    assert (seller.score.value, seller.score.parts) == (2.0, {"right": 2.0})
    assert (buyer.score.value, buyer.score.parts) == (16.0, {"right": 6.0, "cheap": 1.0})
    assert episode.score.value == 9.0
    assert (seller.metrics["metric/offers"], seller.metrics["turns"], seller.metrics["tool_calls"]) == (3.0, 3.0, 1.0)
    assert "metric/offers" not in buyer.metrics and buyer.metrics["turns"] == 1.0
    assert episode.metrics["turns"] == 4.0
    rows = [episode_samples(each, index, index) for index, each in enumerate((seller, buyer))]
    assert [[sample.reward for sample in own] for own in rows] == [[2.0], [16.0]]


class Game(Quiz):
    roles = (Role("a", system="You are a."), Role("b"), Role("c", system="You are c."))
    script: tuple[tuple[int, str], ...] = ()

    async def rollout(self, task: Task, model: ChatModel) -> None:
        for place, words in self.script:
            await model.role("abc"[place]).say(words)


turns = st.lists(st.tuples(st.integers(0, 2), st.text("xyz", max_size=3), st.text("pqr", max_size=4)), max_size=12)


@given(turns)
def test_in_any_order_of_turns_each_token_is_live_in_its_own_role_alone(turns: list[tuple[int, str, str]]) -> None:
    class Played(Game):
        script = tuple((place, words) for place, words, _ in turns)

    engine = FakeEngine(*(reply for _, _, reply in turns))
    episode = play(Played, engine, max_turns=20)
    check_exact(episode, engine)
    for place, own in enumerate(episode.by_role):
        assert sampled(own.trajectory) == "".join(f"{reply}|" for at, _, reply in turns if at == place)
        assert {each.role for each in own.trajectories} == {"abc"[place]}


def test_the_seeds_of_a_role_do_not_depend_on_the_turns_of_the_others() -> None:
    def seeds(script: str) -> dict[str, list[int]]:
        class Played(Game):
            pass

        Played.script = tuple(("abc".index(name), "go on") for name in script)
        engine = FakeEngine()
        play(Played, engine)
        found = {
            name: [r.seed for (r, _), at in zip(engine.turns, script, strict=True) if at == name] for name in "abc"
        }
        assert len({seed for own in found.values() for seed in own}) == len(script)
        return found

    assert seeds("abab") == seeds("aabb") and seeds("ab")["b"] == seeds("abc")["b"]


def test_limits_are_those_of_a_role_and_its_end_is_no_end_of_the_others() -> None:
    class Talk(Game):
        script = ((0, "?"), (1, "?"), (0, "?"), (1, "?"))

    used = play(Talk, FakeEngine(), max_turns=1)
    assert [each.status for each in used.by_role] == [Status.COMPLETED] * 3
    assert [each.metrics["turns"] for each in used.by_role] == [1.0, 1.0, 0.0]
    assert used.by_role[2].trajectory.messages == [Message("system", "You are c.")]
    cut = play(Talk, FakeEngine("a" * 50, "b"), max_tokens=8)
    a, b, _ = cut.by_role
    assert (a.status, b.status) == (Status.TRUNCATED, Status.COMPLETED)
    assert "cut off after 8 tokens" in (a.trajectory.error or "") and b.trajectory.error is None
    assert a.score.value is not None, "a truncated rollout stays in the baseline"
    (row,) = episode_samples(b, 0, 0)
    assert any(row.loss_mask) and not any(episode_samples(a, 0, 0)[0].loss_mask)


def test_a_failure_fails_every_role() -> None:
    class Broken(Game):
        async def rollout(self, task: Task, model: ChatModel) -> None:
            await model.role("a").say("?")
            raise ValueError("no market today")

    class Caught(Game):
        async def rollout(self, task: Task, model: ChatModel) -> None:
            await model.role("a").say("?")
            try:
                await model.role("b").say("?")
            except Exception:
                await model.role("a").say("!")

    aborted = Generation([65], [-1.0], "abort", [VersionSpan(0, 0, 1)])
    for env, engine, status in (
        (Broken, FakeEngine(), Status.ENVIRONMENT_ERROR),
        (Caught, FakeEngine("a", aborted), Status.ABORTED),
    ):
        episode = play(env, engine)
        assert [each.status for each in episode.by_role] == [status] * 3
        assert [each.score.value for each in (episode, *episode.by_role)] == [None] * 4
        assert not any(any(row.loss_mask) for each in episode.by_role for row in episode_samples(each, 0, 0))


def test_a_returned_conversation_is_judged_for_its_role() -> None:
    class Planner(Game):
        async def rollout(self, task: Task, model: ChatModel) -> Any:
            plan = model.role("a")
            await plan.say("plan")
            first = plan.trajectory
            await plan.chat("was it good?", tools=[])
            await model.role("b").say("go")
            return first

        @reward
        def right(self, task: Task, trajectory: Trajectory) -> float:
            return float(len(trajectory.last_text))

    a, b, _ = play(Planner, FakeEngine("four", "yes", "b")).by_role
    assert [len(each.trajectories) for each in (a, b)] == [2, 1]
    assert (a.judged, a.score.value, b.score.value) == (0, 4.0, 1.0)


def test_rewards_of_other_packages_judge_each_role_and_a_role_without_rewards_is_not_trained() -> None:
    class Fixed(Market):
        cheap = None  # type: ignore[assignment]

        @reward(role="seller")
        def right(self, task: Task, trajectory: Trajectory) -> float:
            return 1.0

    def role_length(trajectory: Trajectory) -> float:
        return float(len(trajectory.role))

    seller, buyer = play(Fixed, rewards=[env_term()], on_invalid_reward="raise").by_role
    assert seller.score.value == 1.0
    assert buyer.score.value is None and buyer.score.why == "no reward judges the role buyer"
    seller, buyer = play(Fixed, rewards=[env_term(), reward_term("length", role_length)]).by_role
    assert (seller.score.value, buyer.score.value) == (7.0, 5.0)


@pytest.mark.parametrize(
    ("words", "ask"),
    [
        ("the roles are a, b, c", lambda model: model.role("nope")),
        ("write model.role('a').chat", lambda model: model.chat("?")),
        ("write model.role('a').chat", lambda model: model.say("?")),
    ],
)
def test_a_wrong_role_ends_the_run_even_if_the_rollout_catches_it(words: str, ask: Any) -> None:
    class Wrong(Game):
        async def rollout(self, task: Task, model: ChatModel) -> None:
            try:
                await ask(model)
            except Exception:
                pass

    with pytest.raises(EnvironmentDefinitionError) as refused:
        play(Wrong)
    assert words in str(refused.value)


def test_without_roles_there_is_no_role() -> None:
    class Wrong(Quiz):
        async def rollout(self, task: Task, model: ChatModel) -> None:
            model.role("a")

    with pytest.raises(EnvironmentDefinitionError, match="the environment has no roles"):
        play(Wrong)


def test_two_roles_cannot_speak_at_once() -> None:
    class Crowd(Game):
        async def rollout(self, task: Task, model: ChatModel) -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(model.role("a").say, "?")
                nursery.start_soon(model.role("b").say, "?")

    with pytest.raises(EnvironmentDefinitionError, match="one at a time"):
        play(Crowd)


def test_say_is_a_conversation_without_roles_too() -> None:
    class Sure(Quiz):
        async def rollout(self, task: Task, model: ChatModel) -> None:
            assert model.messages == []
            await model.say(task.prompt)
            await model.say([Message("user", "Are you sure?"), "Answer."])

    engine = FakeEngine('[double {"n": 21}]', "41", "42")
    episode = play(Sure, engine)
    check_exact(episode, engine)
    assert [each.role for each in episode.trajectory.messages] == [
        *("user", "assistant", "tool", "assistant"),
        *("user", "user", "assistant"),
    ]
    assert episode.score.value == 1.0 and episode.by_role == [episode] and len(episode.trajectories) == 1


def test_a_reply_that_is_cut_off_in_a_call_runs_no_tool() -> None:
    class Cut(Quiz):
        async def rollout(self, task: Task, model: ChatModel) -> None:
            await model.say("?")

    episode = play(Cut, FakeEngine('[double {"n": 21}] and then some'), max_tokens=18)
    assert episode.status is Status.TRUNCATED and episode.metrics["tool_calls"] == 0


def test_an_episode_with_roles_survives_a_checkpoint() -> None:
    import msgspec

    episode = play(Market, FakeEngine("a", "b", "c"))
    again = msgspec.convert(msgspec.json.decode(msgspec.json.encode(episode)), Episode)
    assert again == episode and again.by_role == episode.by_role
