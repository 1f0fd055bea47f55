"""A group that has begun and was not handed out yet, and what a checkpoint keeps of it.

Kept are its number and step, the data buffer's state before its task was taken, the episodes that are over, and
those that wait in mid-reply in an environment with `state()` and `restore()`. The others are played again from their
first turn, with the same number and seed. Left out: when they are played (`manager`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rollouts.inference.suspend import SuspendedEpisode
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.rollout_gen.groups import Group
from rollouts.training.rollout_gen.pool import Job
from rollouts.types import Episode, Task

_NO_TASK = Task("")  # in place of the group's, which comes out of the buffer again


@dataclass
class LiveGroup:
    """A group on its way. `outcomes` are the results of its `size` jobs, by rollout; `position` is the buffer's state
    before the task was taken, in `step`; `judged` is the group once its rewards and filters were asked.
    """

    number: int
    task: Task
    size: int
    step: int
    position: dict[str, Any]
    outcomes: dict[int, Any] = field(default_factory=dict)
    suspended: dict[int, SuspendedEpisode] = field(default_factory=dict)
    judged: Group | None = None

    @property
    def is_complete(self) -> bool:
        """Whether nothing of it is left to play."""
        return len(self.outcomes) == self.size

    @property
    def is_kept(self) -> bool:
        """Whether it was judged, and no filter dropped it."""
        return self.judged is not None and self.judged.dropped is None

    @property
    def jobs(self) -> list[Job]:
        """What is left to play."""
        left = (index for index in range(self.size) if index not in self.outcomes)
        return [Job(self.task, (self.number, index), self.suspended.get(index)) for index in left]


def begin_group(data_buffer: DataBuffer, number: int, size: int, step: int) -> LiveGroup:
    """A new group over the buffer's next task."""
    position = data_buffer.state_dict()
    (task,) = data_buffer.get_prompts(1, step=step)
    return LiveGroup(number, task, size, step, position)


def group_state(group: LiveGroup, suspended: Mapping[tuple[int, ...], SuspendedEpisode]) -> dict[str, Any]:
    """The group as plain data. `suspended` maps orders to episodes that wait in mid-reply and can be restored."""
    over = {
        index: _with_task(episode, _NO_TASK)
        for index, episode in group.outcomes.items()
        if isinstance(episode, Episode) and all(each.task == episode.task for each in episode.trajectories)
    }
    waiting = {order[1]: each for order, each in suspended.items() if order[0] == group.number}
    return {
        "number": group.number,
        "step": group.step,
        "position": group.position,
        "episodes": _plain(over),
        "held": _plain({**group.suspended, **waiting}),
    }


def restore_groups(states: list[dict[str, Any]], data_buffer: DataBuffer, size: int) -> list[LiveGroup]:
    """The groups of a checkpoint, each with its task; the buffer is left in the state that it was in."""
    here = data_buffer.state_dict()
    groups = []
    for state in sorted(states, key=lambda each: each["number"]):
        if data_buffer.state_dict() != state["position"]:
            data_buffer.load_state_dict(state["position"])
        group = begin_group(data_buffer, state["number"], size, state["step"])
        episodes = {index: msgspec.convert(episode, Episode) for index, episode in state["episodes"]}
        group.outcomes = {index: _with_task(each, group.task) for index, each in episodes.items() if index < size}
        group.suspended = {index: msgspec.convert(held, SuspendedEpisode) for index, held in state["held"]}
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


def _with_task(episode: Episode, task: Task) -> Episode:
    """The episode, as if it had been played for this task."""
    trajectories = [msgspec.structs.replace(each, task=task) for each in episode.trajectories]
    return episode._replace(task=task, trajectories=trajectories)
