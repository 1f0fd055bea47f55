"""Groups that are incomplete at the end of a step are suspended, carried over and continued; none is ever lost."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from rollouts_notes.manager import AsyncRolloutManager
from rollouts_notes.rows import RolloutConfig

from rollouts.env import reward, tool
from rollouts.errors import ConfigError, RewardError
from rollouts.inference.base import GenerateRequest, Generation, VersionSpan
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.rollout_gen.groups import NamedFilter
from rollouts.types import Episode, Sample, Score, Status, Task, Trajectory

sys.path.insert(0, str(Path(__file__).parents[2]))
from agent_fakes import END
from pipelines import LONG, Plain, TokenEngine, player, under_trio


def lengths(order: tuple[int, ...]) -> int:
    """Long-tailed: every sixth group has a slow member."""
    return 60 if order[0] % 6 == 0 and order[1] == 0 else 5 + order[1]


def manager(engine: Any, factor: float = 1.5, *, size: int = 2, members: int = 2, play: Any = None, **more: Any) -> Any:
    keywords = {key: more.pop(key) for key in ("filters", "score_groups") if key in more}
    config = RolloutConfig(size, members, factor, **more)
    buffer = DataBuffer([f"task {n}" for n in range(50)], seed=3)
    return AsyncRolloutManager(buffer, config, play=play or player(), inference=engine, **keywords)


def episodes_of(steps: Any) -> dict[tuple[int, int], Episode]:
    return {e.order: e for step in steps for group in step.groups for e in group.episodes}


def check_books(own: AsyncRolloutManager) -> None:
    counts = own.statistics
    assert counts.begun == counts.kept + counts.dropped + counts.carried + counts.in_flight
    assert min(counts) >= 0


def test_a_step_does_not_wait_for_the_slowest_and_streams_are_those_of_an_unbroken_reply():
    async def carried():
        engine = TokenEngine(lengths)
        took = 0.0
        async with manager(engine, 2.0) as own:
            steps = []
            for number in range(10):
                engine.version = number
                began = trio.current_time()
                steps.append(await own.generate_batch())
                took += trio.current_time() - began
                assert not engine.stops and not engine.sessions, "nothing decodes between steps"
                check_books(own)
                assert own.statistics.carried == 2
                await trio.sleep(5000)  # training; no deadline passes meanwhile
        return steps, took

    async def unbroken():
        engine = TokenEngine(lengths)
        began = trio.current_time()
        own = manager(engine, 1.0)
        return [await own.generate_batch() for _ in range(12)], trio.current_time() - began

    steps, took = under_trio(carried)
    waited_for, patient = under_trio(unbroken)
    assert [len(step.kept) for step in steps] == [2] * 10
    assert took < patient * 10 / 12 / 2, "half as long as those who wait for the slowest"
    assert steps[0].metrics == {"rollout/carried_frac": 0.0, "group/over_sampled": 2.0}
    assert steps[1].metrics["rollout/carried_frac"] > 0
    whole = episodes_of(waited_for)
    spans = 0
    for order, episode in episodes_of(steps).items():
        (segment,) = episode.trajectory.segments
        (expected,) = whole[order].trajectory.segments
        assert (segment.tokens, segment.loss_mask, segment.logprobs) == (
            expected.tokens, expected.loss_mask, expected.logprobs
        )  # fmt: skip
        assert episode.status is Status.COMPLETED and episode.score == whole[order].score
        live = [v for v, m in zip(segment.versions, segment.loss_mask, strict=True) if m > 0]
        assert live == sorted(live), "versions only grow"
        spans = max(spans, len(set(live)))
        assert episode.metrics["latency_seconds"] < 500, "the time at the gate is not the episode's"
    assert spans > 1, "one reply was sampled by several versions"
    assert Plain.open == 0


def test_the_budget_goes_on_where_it_was():
    async def main():
        engine = TokenEngine(lambda order: 1000 if order[0] == 0 else 8)
        limits = LONG._replace(max_tokens=30)
        async with manager(engine, 2.0, size=1, members=1, play=player(limits=limits)) as own:
            steps = [await own.generate_batch() for _ in range(5)]
        return engine, steps

    engine, steps = under_trio(main)
    episode = episodes_of(steps)[(0, 0)]
    assert episode.status is Status.TRUNCATED and episode.trajectory.sampled_count == 30
    asked = [r for r in engine.requests if r.order[:2] == (0, 0)]
    assert len(asked) > 1 and len({r.seed for r in asked}) == 1
    assert all(r.offset + r.max_tokens == 30 and len(r.tokens) == len(asked[0].tokens) + r.offset for r in asked)


def test_at_factor_one_nothing_is_carried_and_the_order_is_the_old_one():
    async def main():
        engine = TokenEngine(lengths)
        async with manager(engine, 1.0, size=3, members=3) as own:
            steps = [await own.generate_batch() for _ in range(2)]
            assert own.statistics == (6, 6, 0, 0, 0)
        return engine, steps

    engine, steps = under_trio(main)
    assert [e.order for s in steps for g in s.groups for e in g.episodes] == [
        (g, m) for g in range(6) for m in range(3)
    ]
    assert all(r.offset == 0 for r in engine.requests) and len(engine.requests) == 18
    assert steps[0].metrics == {}


@pytest.mark.parametrize("concurrency", [1, 2, 5])
def test_concurrency_bounds_those_that_play_not_those_that_wait(concurrency):
    async def main():
        engine = TokenEngine(lengths)
        async with manager(engine, 2.0, size=2, members=2, concurrency=concurrency) as own:
            for _ in range(6):
                assert len((await own.generate_batch()).kept) == 2
                check_books(own)
        assert engine.most <= concurrency + 1
        return engine

    assert not under_trio(main).sessions


def test_leaving_cancels_what_plays_and_what_waits():
    async def main():
        engine = TokenEngine(lambda order: 5 if order[0] % 2 else 10_000)
        async with manager(engine, 3.0) as own:
            await own.generate_batch()
            assert Plain.open > 0
        assert Plain.open == 0 and not engine.sessions and not engine.stops
        assert len(trio.lowlevel.current_task().child_nurseries) == 0
        check_books(own)
        before = own.statistics
        assert before.carried > 0
        async with own:  # they are played again, with their numbers
            step = await own.generate_batch()
        assert own.statistics.begun == before.begun + 6 - before.carried
        assert {g.number for g in step.groups}.isdisjoint({1, 3}) and len(step.kept) == 2

    under_trio(main)


def test_who_was_let_in_and_shut_out_again_at_once_stays_silent():
    """A step that finds its groups complete already opens the gate and shuts it before those behind it have run."""

    async def main():
        engine = TokenEngine(lambda order: 5 if order[0] < 2 else 200)
        async with manager(engine, 3.0, size=1, members=1) as own:
            for _ in range(2):
                await own.generate_batch()
                await trio.sleep(50)
                assert not engine.stops, "a reply goes on between two steps"
                held = {group["number"]: group["held"] for group in own.state_dict()["live"]}
                assert set(held) == set(range(min(held), min(held) + len(held)))

    under_trio(main)


def test_outside_of_a_with_block_each_call_leaves_nothing_behind():
    async def main():
        engine = TokenEngine(lengths)
        own = manager(engine, 1.5)
        numbers = []
        for _ in range(4):
            numbers += [g.number for g in (await own.generate_batch()).groups]
            assert not engine.sessions and Plain.open == 0
            check_books(own)
        assert len(set(numbers)) == 8

    under_trio(main)


def test_a_cancelled_call_loses_nothing():
    async def main():
        engine = TokenEngine(lengths)
        async with manager(engine, 1.5) as own:
            with trio.move_on_after(3):
                await own.generate_batch()
            check_books(own)
            assert own.statistics.carried == 3
            step = await own.generate_batch()
            assert own.statistics.begun == 3 and len(step.kept) == 2

    under_trio(main)


def test_an_error_of_a_carried_episode_ends_the_run_and_is_the_error_itself():
    class Wrong(Plain):
        @reward
        async def said(self, trajectory: Any) -> float:
            return float("nan") if len(trajectory.last_text) > 50 else 1.0

    async def main():
        async with manager(TokenEngine(lengths), play=player(Wrong)) as own:
            for _ in range(9):
                await own.generate_batch()

    with pytest.raises(RewardError, match="nan"):
        under_trio(main)
    assert Plain.open == 0


def test_an_error_in_the_block_is_raised_as_it_is():
    async def main():
        async with manager(TokenEngine(lengths)) as own:
            await own.generate_batch()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        under_trio(main)
    assert Plain.open == 0


def test_an_engine_that_cannot_abort_is_waited_for_until_its_replies_are_whole():
    class Deaf(TokenEngine):
        capabilities = TokenEngine.capabilities._replace(aborts=False)

        async def abort(self, session):
            raise AssertionError("it cannot abort")

    async def main():
        engine = Deaf(lengths)
        async with manager(engine) as own:
            first = await own.generate_batch()
            assert not engine.stops, "nothing is under way when weights change"
            second = await own.generate_batch()
        return first, second

    first, second = under_trio(main)
    assert len(first.kept) == len(second.kept) == 2


# --- filters and refilling ------------------------------------------------------------------------------------------


def odd(trajectories: Any) -> bool | str:
    return True if int(trajectories[0].task.prompt.split()[1]) % 2 else "even"


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_dropped_groups_are_replaced_and_counted(factor):
    async def main():
        filters = [NamedFilter("odd", odd, {})]
        async with manager(TokenEngine(lengths), factor, size=4, filters=filters, refill=True) as own:
            steps = []
            for _ in range(4):
                steps.append(await own.generate_batch())
                check_books(own)
            return steps, own.statistics

    steps, counts = under_trio(main)
    assert all(len(step.kept) == 4 for step in steps) and counts.kept == 16
    dropped = [g for s in steps for g in s.groups if g.dropped]
    assert counts.dropped == len(dropped) > 0 and {g.dropped for g in dropped} == {"even"}
    assert sum(step.metrics["group/refilled"] for step in steps) > 0
    assert len({g.number for s in steps for g in s.groups}) == counts.kept + counts.dropped


def test_refilling_ends():
    async def main():
        nothing = [NamedFilter("nothing", lambda rewards: False, {})]
        own = manager(TokenEngine(lengths), 1.0, size=3, filters=nothing, refill=True, refills_max=2)
        step = await own.generate_batch()
        assert not step.kept and len(step.groups) == 9 and step.metrics["group/refilled"] == 6

    under_trio(main)


def test_refilling_at_factor_one_is_one_result():
    async def main():
        own = manager(TokenEngine(lengths), 1.0, size=4, filters=[NamedFilter("odd", odd, {})], refill=True)
        return [[(g.number, g.dropped) for g in (await own.generate_batch()).groups] for _ in range(3)]

    assert under_trio(main) == under_trio(main)


# --- checkpoints ----------------------------------------------------------------------------------------------------


class Counting(Plain):
    """A tool that counts; it can be restored."""

    restored = 0

    def __init__(self):
        self.count = 0

    @tool
    async def bump(self) -> str:
        """Count."""
        self.count += 1
        return f"{self.count}"

    async def state(self):
        return {"count": self.count}

    async def restore(self, state):
        type(self).restored += 1
        self.count = state["count"]


class TwoTurns(TokenEngine):
    """The first reply calls the tool; the second one is text."""

    async def generate(self, request):
        if request.order[2] == 0:
            await trio.sleep(1)
            tokens = [*map(ord, "[bump {}]"), END]
            return Generation(tokens, [-0.1] * len(tokens), "stop", [VersionSpan(self.version, 0, len(tokens))])
        return await super().generate(request)


def resumed(env: Any) -> tuple[Any, Any, TwoTurns]:
    """Two steps without a break; and with a kill and a resume between them."""

    async def main(is_broken: bool):
        engine = TwoTurns(lengths)
        own = manager(engine, 1.5, play=player(env))
        steps, state = [], None
        async with own:
            steps.append(await own.generate_batch())
            state = msgspec.json.encode([own.state_dict(), own.data_buffer.state_dict()])
            if not is_broken:
                steps += [await own.generate_batch() for _ in range(4)]
                return steps, engine
        manager_state, buffer_state = msgspec.json.decode(state)
        engine = TwoTurns(lengths)
        new = manager(engine, 1.5, play=player(env))
        new.load_state_dict(manager_state)
        new.data_buffer.load_state_dict(buffer_state)
        check_books(new)
        async with new:
            steps += [await new.generate_batch() for _ in range(4)]
            check_books(new)
        return steps, engine

    whole, _ = under_trio(lambda: main(is_broken=False))
    return whole, *under_trio(lambda: main(is_broken=True))


@pytest.mark.parametrize("can_restore", [True, False])
def test_a_resume_plays_every_group_once(can_restore):
    class Env(Counting):
        restored = 0
        if not can_restore:
            state = property()  # hides it: hasattr is False

    whole, broken, engine = resumed(Env)
    found, expected = episodes_of(broken), episodes_of(whole)
    numbers = [g.number for s in broken for g in s.groups]
    assert len(numbers) == len(set(numbers)) == 10
    for order in set(found) & set(expected):
        assert found[order].task == expected[order].task
        assert [s.tokens for s in found[order].trajectory.segments] == [
            s.tokens for s in expected[order].trajectory.segments
        ]
        assert found[order].trajectory.messages == expected[order].trajectory.messages
        assert found[order].trajectory.turns == 2 and found[order].metrics["tool_calls"] == 1
    carried = [r for r in engine.requests if r.order[0] == 0]
    assert (Env.restored > 0) == can_restore
    assert (carried[0].offset > 0) == can_restore, "the reply goes on in mid-sentence, or the episode begins again"


def test_state_must_be_plain_data():
    class Bad(Counting):
        async def state(self):
            return object()

    from rollouts.errors import EnvironmentDefinitionError

    async def main():
        async with manager(TokenEngine(lengths), play=player(Bad)) as own:
            await own.generate_batch()
            await own.generate_batch()

    with pytest.raises(
        EnvironmentDefinitionError, match=r"Bad.state\(\) returned a value that a checkpoint cannot store"
    ):
        under_trio(main)


# --- properties -----------------------------------------------------------------------------------------------------


@given(
    chance=st.integers(0, 10**6),
    size=st.integers(1, 4),
    members=st.integers(1, 3),
    factor=st.sampled_from([1.0, 1.25, 1.5, 3.0]),
    concurrency=st.integers(1, 12),
    refill=st.booleans(),
    cuts=st.lists(st.sampled_from(["step", "leave", "resume", "cancel"]), min_size=1, max_size=6),
)
def test_every_prompt_is_exactly_one_of_the_states(chance, size, members, factor, concurrency, refill, cuts):
    generator = random.Random(chance)
    seen: dict[int, str] = {}
    tasks: dict[int, str] = {}

    async def play(job, session, inference):
        assert tasks.setdefault(job.order[0], job.task.prompt) == job.task.prompt, "a number keeps its prompt"
        await trio.sleep(generator.random() * 10)
        request = GenerateRequest([1], 50, (END,), job.order[0], order=(*job.order, 0), session=session)
        reply = await inference.generate(request)
        status = Status.COMPLETED if reply.finish == "stop" else Status.ABORTED
        inference.close_session(session)
        await trio.sleep(generator.random() * 3)
        return Episode(job.order, job.task, [Trajectory(job.task, [], status=status)], Score(generator.random()), {})

    def some(rewards):
        return True if rewards[0] > 0.3 else "unlucky"

    def make():
        engine = TokenEngine(lambda order: random.Random(f"{chance}/{order}").choice([1, 2, 30]))
        return manager(
            engine, factor, size=size, members=members, play=play, filters=[NamedFilter("some", some, {})],
            concurrency=concurrency, refill=refill,
        )  # fmt: skip

    def take(own, step):
        for group in step.groups:
            assert group.number not in seen, "handed out once"
            seen[group.number] = group.dropped or "kept"
            assert len(group.episodes) == members
            assert all(e.status is Status.COMPLETED for e in group.episodes)
        check_books(own)
        counts = own.statistics
        assert (counts.kept, counts.dropped) == (
            sum(v == "kept" for v in seen.values()), sum(v != "kept" for v in seen.values())
        )  # fmt: skip
        if refill is False and factor == 1.0:
            assert len(step.groups) == size

    async def main():
        own = make()
        for cut in cuts:
            async with own:
                if cut == "cancel":
                    with trio.move_on_after(generator.random() * 10):
                        take(own, await own.generate_batch())
                    check_books(own)
                take(own, await own.generate_batch())
                if cut == "step":
                    take(own, await own.generate_batch())
                state = own.state_dict(), own.data_buffer.state_dict()
                engine = own.inference
            assert not engine.sessions and not engine.stops
            if cut == "resume":
                own = make()
                own.load_state_dict(state[0])
                own.data_buffer.load_state_dict(state[1])
                check_books(own)
        counts = own.statistics
        assert counts.begun == len(seen) + counts.carried
        assert set(seen) <= set(range(counts.begun))

    under_trio(main)


@pytest.mark.parametrize("factor", [0.5, 0, -1, float("inf"), float("nan")])
def test_a_factor_below_one_is_refused(factor):
    with pytest.raises(ConfigError, match="over_sampling_factor"):
        RolloutConfig(2, 2, factor)


def test_what_is_carried_can_be_seen():
    async def main():
        engine = TokenEngine(lengths)
        async with manager(engine, 2.0) as own:
            assert own.partial_samples == []
            await own.generate_batch()
            return own.partial_samples, own.statistics.carried

    partial, carried = under_trio(main)
    assert carried == 2 and len(partial) >= 1
    pending = [sample for sample in partial if sample.status is Status.PENDING]
    assert pending, "the reply of the slow member, in the middle"
    for sample in pending:
        assert sample.reward is None and sample.prompt.startswith("task ") and sum(sample.loss_mask) > 0
        sample.check()


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ([[0, 0], [0, 1], [1, 1], [0, 0.5], [0, 0.9], [1, 0]], [1, 5]),
        ([[0, 1]] * 6, [0, 1]),
        ([[1], [2], [3], [4], [5], [6]], [0, 1]),
    ],
    ids=["the largest spread", "of equal ones the first", "single rollouts have none"],
)
def test_the_best_groups_are_kept_and_the_others_dropped(rewards, kept):
    """Best: the rewards of a group differ most. The step waits for all groups, so nothing is carried over."""

    def generate(prompts):
        number = int(prompts[0].split()[1])
        return [
            Sample(prompt, tokens=[1], loss_mask=[1.0], reward=reward)
            for prompt, reward in zip(prompts, rewards[number], strict=True)
        ]

    members = len(rewards[0])
    config = RolloutConfig(2, members, 3.0, generate_fn=generate, keep="best")
    own = AsyncRolloutManager(DataBuffer(tasks_in_order), config)
    step = trio.run(own.generate_batch)  # plain functions run in threads, which a mock clock would not wait for
    assert [int(group.task.prompt.split()[1]) for group in step.kept] == kept
    assert sorted({group.dropped for group in step.groups} - {None}) == ["not_best"]
    assert own.statistics == (6, 2, 4, 0, 0)


def tasks_in_order(epoch):
    yield from (Task(f"task {number}") for number in range(6))


@pytest.mark.parametrize(
    ("factor", "keep", "words"),
    [
        (1.5, "last", 'keep is \'last\'; expected "first" or "best"'),
        (1.0, "best", "give over_sampling_factor=1.5"),
    ],
)
def test_what_to_keep_is_checked(factor, keep, words):
    with pytest.raises(ConfigError, match=words):
        RolloutConfig(2, 2, factor, keep=keep)
