"""A group that has begun and was not handed out yet, and what a checkpoint keeps of it.

Kept are its number and step, where the data buffer stood before its task was taken, the episodes that are over, and
those that wait in mid-reply in an environment with `state()` and `restore()`. The others are played again from their
first turn, with the same number and seed. Left out: when they are played (`manager`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from rollouts.agent import Episode
from rollouts.inference.carried import HeldEpisode
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.rollout_gen.groups import Group
from rollouts.training.rollout_gen.pool import Job
from rollouts.types import Task

__all__ = ["LiveGroup", "begin_group", "group_state", "restore_groups"]

Value = TypeVar("Value")
_NO_TASK = Task("")  # stands for the group's, which comes out of the buffer again


@dataclass
class LiveGroup:
    """A group on its way. `outcomes` are what its `size` jobs came to, by rollout; `position` is the buffer's state
    before the task was taken, in `step`; `judged` is the group once its rewards and filters were asked.
    """

    number: int
    task: Task
    size: int
    step: int
    position: dict[str, Any]
    outcomes: dict[int, Any] = field(default_factory=dict)
    held: dict[int, HeldEpisode] = field(default_factory=dict)
    judged: Group | None = None

    @property
    def is_complete(self) -> bool:
        """Whether nothing of it is left to play."""
        return len(self.outcomes) == self.size

    @property
    def jobs(self) -> list[Job]:
        """What is left to play."""
        left = (index for index in range(self.size) if index not in self.outcomes)
        return [Job(self.task, (self.number, index), self.held.get(index)) for index in left]


def begin_group(data_buffer: DataBuffer, number: int, size: int, step: int) -> LiveGroup:
    """A new group over the buffer's next task."""
    position = data_buffer.state_dict()
    (task,) = data_buffer.get_prompts(1, step=step)
    return LiveGroup(number, task, size, step, position)


def group_state(group: LiveGroup, held: Mapping[int, HeldEpisode]) -> dict[str, Any]:
    """The group as plain data; `held` are those of its episodes that wait in mid-reply and can be restored."""
    over = {i: _without_task(e) for i, e in group.outcomes.items() if isinstance(e, Episode)}
    return {
        "number": group.number,
        "step": group.step,
        "position": group.position,
        "episodes": _plain({i: episode for i, episode in over.items() if episode is not None}),
        "held": _plain({**group.held, **held}),
    }


def restore_groups(states: list[dict[str, Any]], data_buffer: DataBuffer, size: int) -> list[LiveGroup]:
    """The groups of a checkpoint, each with its task; the buffer stands afterwards where it stood before."""
    here = data_buffer.state_dict()
    groups = []
    for state in sorted(states, key=lambda each: each["number"]):
        if data_buffer.state_dict() != state["position"]:
            data_buffer.load_state_dict(state["position"])
        group = begin_group(data_buffer, state["number"], size, state["step"])
        episodes = _restored(state["episodes"], Episode)
        group.outcomes = {i: _with_task(each, group.task) for i, each in episodes.items() if i < size}
        group.held = _restored(state["held"], HeldEpisode)
        groups.append(group)
    if states:
        data_buffer.load_state_dict(here)
    return groups


def _plain(values: Mapping[int, Any]) -> list[list[Any]]:
    """Pairs of number and plain data. What cannot be written down is left out: it will be played again."""
    pairs = []
    for index, value in values.items():
        try:
            pairs.append([index, msgspec.json.decode(msgspec.json.encode(value))])
        except (TypeError, ValueError, RecursionError):  # an object of the environment's own in a message or a metric
            continue
    return pairs


def _restored(pairs: list[list[Any]], kind: type[Value]) -> dict[int, Value]:
    return {index: msgspec.convert(value, kind) for index, value in pairs}


def _without_task(episode: Episode) -> Episode | None:
    """The episode with nothing in place of the group's task; None where it was played for another one."""
    if any(trajectory.task != episode.task for trajectory in episode.trajectories):
        return None
    trajectories = [msgspec.structs.replace(each, task=_NO_TASK) for each in episode.trajectories]
    return episode._replace(task=_NO_TASK, trajectories=trajectories)


def _with_task(episode: Episode, task: Task) -> Episode:
    trajectories = [msgspec.structs.replace(each, task=task) for each in episode.trajectories]
    return episode._replace(task=task, trajectories=trajectories)
