"""AsyncRolloutManager: groups in order, numbered through the run, filtered, counted."""

from __future__ import annotations

import pytest
import trio
from rollouts_notes.manager import AsyncRolloutManager
from rollouts_notes.rows import RolloutConfig

from rollouts.inference.base import Capabilities
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.rollout_gen.groups import NamedFilter
from rollouts.training.rollout_gen.steps import RolloutStatistics
from rollouts.types import Episode, Score, Status, Trajectory


class Engine:
    capabilities = Capabilities()
    context_tokens_max = vocabulary_size = version = 0

    def open_session(self, order):
        return str(order)

    def close_session(self, session):
        pass


async def play(job, session, inference):
    await trio.lowlevel.checkpoint()
    trajectory = Trajectory(job.task, job.task.messages, status=Status.COMPLETED)
    return Episode(job.order, job.task, [trajectory], Score(float(job.order[1])), {})


def manager(**changed):
    buffer = DataBuffer(["a", "b", "c"], shuffle=False)
    return AsyncRolloutManager(buffer, RolloutConfig(2, 3), play=play, inference=Engine(), **changed)


def test_groups_in_order():
    own = manager()
    first, second = (trio.run(own.generate_batch) for _ in range(2))
    assert [(g.number, g.task.prompt, [e.order for e in g.episodes]) for g in first.groups + second.groups] == [
        (number, prompt, [(number, 0), (number, 1), (number, 2)]) for number, prompt in enumerate("abca")
    ]
    assert first.kept == first.groups and first.seconds >= 0
    assert own.statistics == RolloutStatistics(4, 4, 0)


def test_filters_and_statistics():
    seen = []

    def odd(trajectories, step):
        seen.append(step)
        return trajectories[0].task.prompt != "b"

    own = manager(filters=[NamedFilter("odd", odd, {})])
    step = trio.run(own.generate_batch)
    assert [group.dropped for group in step.groups] == [None, "odd"]
    assert step.kept == step.groups[:1]
    trio.run(own.generate_batch)
    assert own.statistics == RolloutStatistics(4, 3, 1)
    assert seen == [0, 0, 1, 1]


def test_group_rewards_come_before_filters():
    async def score(groups):
        assert [len(episodes) for episodes in groups] == [3, 3], "all groups of the step in one call"
        return [[episode._replace(score=Score(7.0)) for episode in episodes] for episodes in groups]

    def sevens(rewards):
        return rewards == [7.0] * 3

    step = trio.run(manager(score_groups=score, filters=[NamedFilter("sevens", sevens, {})]).generate_batch)
    assert len(step.kept) == 2


def test_numbering_continues_from_a_checkpoint():
    old, new = manager(), manager()
    trio.run(old.generate_batch)
    new.load_state_dict(old.state_dict())
    new.data_buffer.load_state_dict(old.data_buffer.state_dict())
    expected, found = (trio.run(each.generate_batch) for each in (old, new))
    assert [(g.number, g.task) for g in found.groups] == [(g.number, g.task) for g in expected.groups]
    assert new.statistics == old.statistics


@pytest.mark.parametrize(
    "sizes", [{"batch_size": 0}, {"batch_size": 1, "n_samples_per_prompt": 0}, {"batch_size": 1, "concurrency": 0}]
)
def test_sizes_are_positive(sizes):
    with pytest.raises(AssertionError, match="must be > 0"):
        RolloutConfig(**sizes)
