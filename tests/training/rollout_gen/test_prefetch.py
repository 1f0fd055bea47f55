"""Prefetched steps: never more than allowed, nothing lost or played twice, weights change only in a pause."""

from __future__ import annotations

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

from rollouts.errors import RewardError
from rollouts.training.algorithms.algorithm import Stage
from rollouts.training.batches import StepResult
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.loops.rl import Callbacks, train_rl
from rollouts.training.loops.rl_batch import RLSettings
from rollouts.training.rollout_gen.manager import Prefetch
from rollouts.training.weights.sync import WeightSyncManager

sys.path.insert(0, str(Path(__file__).parents[2]))
from pipelines import GRPO, LateBackend, Plain, TokenEngine, live_versions, player, under_trio


@given(count=st.integers(1, 3), wanted=st.integers(1, 6), train=st.integers(0, 3), play=st.integers(1, 3))
def test_no_step_is_begun_too_early_none_is_left_out_and_none_is_too_many(count, wanted, train, play):
    async def main():
        begun: list[tuple[int, int]] = []  # (step, the step that was trained on or asked for then)
        training = -1

        async def play_one():
            number = len(begun)
            begun.append((number, training))
            await trio.sleep(play)
            return number

        ahead: Prefetch[int] = Prefetch(play_one, count)
        taken = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ahead.run)
            await trio.sleep(10)
            assert not begun, "nothing is played before anything is asked for"
            for step in range(wanted):
                training = step
                taken.append(await ahead.take(wanted - step))
                assert len(ahead.ready) <= count
                await trio.sleep(train)
            await trio.sleep(100)
            nursery.cancel_scope.cancel()
        assert taken == list(range(wanted)) == [number for number, _ in begun]
        assert all(number - at <= count for number, at in begun if at >= 0)

    under_trio(main)


def test_a_take_that_is_cancelled_takes_nothing():
    async def main():
        async def play_one():
            await trio.sleep(5)
            return trio.current_time()

        ahead: Prefetch[float] = Prefetch(play_one, 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ahead.run)
            with trio.move_on_after(2):
                await ahead.take()
            first, second = await ahead.take(), await ahead.take()
            assert second - first == 5
            nursery.cancel_scope.cancel()

    under_trio(main)


def train(
    staleness: int = 0, *, steps: int = 6, train_seconds: float = 30.0, factor: float = 1.0, lengths: Any = None, **loop
) -> Any:
    """The real loop and manager over a slow engine and a slow trainer, in time that is not real."""

    async def main():
        engine = TokenEngine(lengths or (lambda order: 20))
        backend = LateBackend(train_seconds)
        buffer = DataBuffer([f"task {n}" for n in range(1000)], seed=3)
        config = RolloutConfig(2, 2, factor, staleness=staleness)
        own = AsyncRolloutManager(buffer, config, play=player(), inference=engine)
        batches: list[Any] = []
        async with own:
            history = await train_rl(
                backend,
                own,
                RLSettings(steps, staleness=staleness),
                stages=[Stage(0, "main", GRPO)],
                syncing=WeightSyncManager([engine]),
                callbacks=Callbacks(lambda samples, step: batches.append(samples), **loop),
            )
        assert Plain.open == 0 and not engine.sessions
        return history, batches, trio.current_time(), engine

    return under_trio(main)


def test_a_step_takes_the_longer_of_sampling_and_training_instead_of_their_sum():
    """20 seconds of sampling a step; the first step has nothing to be sampled beside."""
    for training, expected in ((30.0, 30.0), (10.0, 20.0)):
        times = {}
        for staleness in (0, 1):
            *_, times[staleness], _ = train(staleness, train_seconds=training, steps=10)
        assert times[0] == pytest.approx(10 * (20 + training))
        assert times[1] <= 20 + training + 9 * expected * 1.06, times


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_tokens_are_as_old_as_they_may_be_and_no_older(staleness):
    history, batches, _, engine = train(staleness, steps=9)
    lags = [step - version for step, samples in enumerate(batches) for version in live_versions(samples)]
    assert 0 < max(lags) <= staleness and min(lags) >= 0
    assert max(line["staleness/max"] for line in history) == max(lags)
    assert [line["staleness/dropped"] for line in history] == [0.0] * 9
    assert all(line["staleness/mean"] <= line["staleness/max"] <= staleness for line in history)
    groups = [sample.prompt for samples in batches for sample in samples[::2]]
    assert len(groups) == 18, "every prompt once"
    assert len({request.order[:2] for request in engine.requests}) == 36, "nothing is begun beyond the last step"
    assert engine.most <= 4


def test_a_reply_that_weights_changed_under_has_the_versions_of_both():
    """Replies of 50 seconds beside steps of 30: each update meets some in the middle."""
    _, batches, _, _ = train(1, steps=6, lengths=lambda order: 50)
    both = [versions for samples in batches for versions in (set(live_versions([s])) for s in samples)]
    assert any(len(versions) == 2 for versions in both)


def test_what_is_older_than_the_bound_is_not_trained_on_and_is_counted():
    """Long-tailed lengths and over-sampling carry some replies over many steps."""
    slow = lambda order: 200 if order[0] % 5 == 0 else 10  # noqa: E731
    history, batches, _, _ = train(1, steps=14, factor=2.0, lengths=slow, train_seconds=15)
    dropped = sum(line["staleness/dropped"] for line in history)
    assert dropped > 0
    lags = [step - version for step, samples in enumerate(batches) for version in live_versions(samples)]
    assert max(lags) == 1
    free, *_ = train(0, steps=14, factor=2.0, lengths=slow, train_seconds=15)
    assert sum(line["staleness/dropped"] for line in free) == 0
    assert max(line["staleness/max"] for line in free) > 1, "without a bound they are trained on"


def test_weights_change_only_while_nobody_speaks():
    """Also an evaluation and a checkpoint, between two steps, meet an engine that does nothing else."""
    engines: list[TokenEngine] = []
    update = TokenEngine.update_weights

    async def seen(self, weights):
        engines.append(self)
        assert not self.stops, "a reply is under way"
        await trio.sleep(7)
        assert not self.stops, "a reply began"
        await update(self, weights)

    async def on_logged(report):
        (engine,) = set(engines)
        await trio.sleep(3)
        assert not engine.stops

    TokenEngine.update_weights = seen
    try:
        train(2, steps=5, on_logged=on_logged)
    finally:
        TokenEngine.update_weights = update
    assert len(engines) == 5


def test_a_checkpoint_in_between_keeps_every_prompt(tmp_path):
    """Taken in `pause` at every step: what waits, what plays and what was played but not asked for is there again."""
    states: list[Any] = []
    handed: list[list[int]] = []

    async def main(upto: int, state: Any = None) -> Any:
        engine = TokenEngine(lambda order: 8 + 7 * (order[0] % 3))
        buffer = DataBuffer([f"task {n}" for n in range(1000)], seed=3)
        own = AsyncRolloutManager(buffer, RolloutConfig(2, 2, 1.5, staleness=2), play=player(), inference=engine)
        if state is not None:
            buffer.load_state_dict(state["buffer"])
            own.load_state_dict(state["manager"])
        numbers = []
        async with own:
            for step in range(upto):
                played = await own.generate_batch()
                numbers.append([group.number for group in played.groups])
                await trio.sleep(9)
                async with own.pause():
                    engine.version = step
                    if state is None:
                        kept = {"buffer": buffer.state_dict(), "manager": own.state_dict()}
                        states.append(msgspec.json.decode(msgspec.json.encode(kept)))
        assert Plain.open == 0
        return numbers

    handed = under_trio(lambda: main(6))
    assert any(state["manager"]["steps"] < 6 for state in states)
    for done, state in enumerate(states, 1):
        before = [number for numbers in handed[:done] for number in numbers]
        after = under_trio(lambda state=state: main(10, state))
        numbers = before + [number for each in after for number in each]
        assert len(numbers) == len(set(numbers)), "none twice"
        most = max(numbers)
        assert len(set(range(most)) - set(numbers)) <= 9, "those under way at the end, and none else"
        assert set(range(max(before) + 1)) <= set(numbers), "what was under way comes out"


def test_leaving_gives_back_what_was_played_ahead():
    async def main():
        engine = TokenEngine(lambda order: 5)
        buffer = DataBuffer([f"task {n}" for n in range(50)], seed=3)
        own = AsyncRolloutManager(buffer, RolloutConfig(2, 2, staleness=2), play=player(), inference=engine)
        async with own:
            first = await own.generate_batch()
            await trio.sleep(1000)
        assert own.statistics.kept == 2 and own.statistics.carried == 4
        asked = len(engine.requests)
        own.config = RolloutConfig(2, 2)
        later = [await own.generate_batch() for _ in range(2)]
        assert len(engine.requests) == asked, "they are played already"
        numbers = [g.number for step in (first, *later) for g in step.groups]
        assert numbers == [0, 1, 2, 3, 4, 5]

    under_trio(main)


def test_leaving_with_a_step_that_was_ready_raises_nothing():
    async def main():
        engine = TokenEngine(lambda order: 5)
        buffer = DataBuffer([f"task {n}" for n in range(50)], seed=3)
        own = AsyncRolloutManager(buffer, RolloutConfig(2, 2, staleness=1), play=player(), inference=engine)
        async with own:
            await own.generate_batch()
            await trio.sleep(1000)
            await own.generate_batch()  # without a checkpoint: the next step begins as the manager is left
        begun, kept, dropped, carried, in_flight = own.statistics
        assert (begun, dropped, in_flight) == (kept + carried, 0, 0) and kept == 4
        own.config = RolloutConfig(2, 2)
        assert [group.number for group in (await own.generate_batch()).groups] == [4, 5]

    under_trio(main)


def test_what_a_step_that_is_played_ahead_raises_is_raised():
    async def main():
        engine = TokenEngine(lambda order: 5)
        buffer = DataBuffer(["task"], seed=3)
        calls = 0

        async def score_groups(groups):
            nonlocal calls
            calls += 1
            if calls > 1:
                raise RewardError("a NaN")
            return [list(episodes) for episodes in groups]

        config = RolloutConfig(2, 2, staleness=1)
        own = AsyncRolloutManager(buffer, config, play=player(), inference=engine, score_groups=score_groups)
        async with own:
            await own.generate_batch()
            await own.generate_batch()

    with pytest.raises(RewardError, match="a NaN"):
        under_trio(main)
    assert Plain.open == 0


def test_the_fake_trainer_is_one():
    async def main():
        backend = LateBackend(4.0)
        result = await backend.optim_step()
        assert isinstance(result, StepResult) and trio.current_time() == 4.0

    under_trio(main)
