"""An unfinished group (it has begun, but no step has returned it), and its state in a checkpoint.

The state is the group's number and step, the place of its task in the data buffer, its finished episodes, and the
suspended episodes whose environment has `state()` and `restore()`. Other episodes restart from their first turn, with
the same number and seed. Not here: when they are played (`manager`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rollouts.inference.base import GenerateRequest, Generation
from rollouts.inference.suspend import SuspendedEpisode
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.rollout_gen.groups import Group
from rollouts.training.rollout_gen.pool import Job
from rollouts.types import Episode, Sample, Status, Task

_NO_TASK = Task("")  # replaces the task in a checkpoint; the buffer yields the task again


@dataclass
class LiveGroup:
    """An unfinished group.

    Attributes:
        size: how many jobs it has
        step: the step in which the task was drawn
        position: the task's place in the data buffer
        is_reported: whether the task sampler has seen the rewards
        outcomes: the results of finished jobs, by rollout
        judged: the group of each role, or the only one, with rewards and filters applied; empty until then
    """

    number: int
    task: Task
    size: int
    step: int
    position: dict[str, Any]
    outcomes: dict[int, Any] = field(default_factory=dict)
    suspended: dict[int, SuspendedEpisode] = field(default_factory=dict)
    judged: tuple[Group, ...] = ()
    is_reported: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether all jobs of the group are finished."""
        return len(self.outcomes) == self.size

    @property
    def is_kept(self) -> bool:
        """Whether the group is judged, and at least one role of it is trained."""
        return any(group.dropped is None for group in self.judged)

    @property
    def spread(self) -> float:
        """The standard deviation of the rewards; of several roles, the largest one."""
        rewards = [[reward for reward in group.rewards if reward is not None] for group in self.judged]
        return max((statistics.pstdev(known) for known in rewards if known), default=0.0)

    @property
    def jobs(self) -> list[Job]:
        """The unfinished jobs."""
        left = (index for index in range(self.size) if index not in self.outcomes)
        return [Job(self.task, (self.number, index), self.suspended.get(index)) for index in left]


def begin_group(data_buffer: DataBuffer, number: int, size: int, step: int) -> LiveGroup:
    """Begin a group with the buffer's next task."""
    task, position = data_buffer.draw(step)
    return LiveGroup(number, task, size, step, position)


def pending_sample(prompt: Any, request: GenerateRequest, reply: Generation) -> Sample:
    """The sample of a reply that is not finished: no reward could judge it yet."""
    context = len(request.tokens)
    return Sample(
        prompt,
        tokens=[*request.tokens, *reply.tokens],
        loss_mask=[0.0] * context + [1.0] * len(reply.tokens),
        reward=None,
        rollout_log_probs=[0.0] * context + list(reply.logprobs),
        status=Status.PENDING,
        policy_versions=[-1] * context + reply.versions,
        prompt_length=context,
    )


def drop_all_but_best(groups: Sequence[LiveGroup], count: int) -> None:
    """Drop the kept groups beyond `count`: those whose rewards differ least, and of equal ones the last."""
    kept = sorted((group for group in groups if group.is_kept), key=lambda group: (-group.spread, group.number))
    for group in kept[count:]:
        group.judged = tuple(each._replace(dropped=each.dropped or "not_best") for each in group.judged)


def group_state(group: LiveGroup, suspended: Mapping[tuple[int, ...], SuspendedEpisode]) -> dict[str, Any]:
    """The group as plain data. `suspended` are episodes that can be restored, by (group, rollout)."""
    over = {
        index: with_task(episode, _NO_TASK)
        for index, episode in group.outcomes.items()
        if isinstance(episode, Episode) and all(each.task == episode.task for each in episode.trajectories)
    }
    waiting = {order[1]: each for order, each in suspended.items() if order[0] == group.number}
    return {
        "number": group.number,
        "step": group.step,
        "position": group.position,
        "reported": group.is_reported,
        "episodes": _plain(over),
        "held": _plain({**group.suspended, **waiting}),
    }


def restore_groups(states: list[dict[str, Any]], data_buffer: DataBuffer, size: int) -> list[LiveGroup]:
    """Restore the groups of a checkpoint, with their tasks. The buffer's own state does not change."""
    states = sorted(states, key=lambda each: each["number"])
    tasks = data_buffer.tasks_at([(state["position"], state["step"]) for state in states])
    groups = []
    for task, state in zip(tasks, states, strict=True):
        group = LiveGroup(state["number"], task, size, state["step"], state["position"])
        group.is_reported = state.get("reported", False)
        episodes = {index: msgspec.convert(episode, Episode) for index, episode in state["episodes"]}
        group.outcomes = {index: with_task(each, task) for index, each in episodes.items() if index < size}
        group.suspended = {index: msgspec.convert(held, SuspendedEpisode) for index, held in state["held"]}
        groups.append(group)
    return groups


def _plain(values: Mapping[int, Any]) -> list[list[Any]]:
    """Pairs of number and plain data. A value that cannot be encoded is left out; its episode is played again."""
    pairs = []
    for index, value in values.items():
        try:
            pairs.append([index, msgspec.json.decode(msgspec.json.encode(value))])
        except (TypeError, ValueError, RecursionError):  # an environment's own object in a message or a metric
            continue
    return pairs


def with_task(episode: Episode, task: Task) -> Episode:
    """The episode with another task."""
    trajectories = [msgspec.structs.replace(each, task=task) for each in episode.trajectories]
    return episode._replace(task=task, trajectories=trajectories)
