"""SavedGroups: gives the training loop finished groups that were saved, in place of the manager that samples them.

Each epoch visits every group once, in an order of the seed. A step takes groups until enough of them are trained on: a
group that a filter drops, or of which the selector or the pair selector leaves nothing, is passed over, and counted. A
step visits each group at most once. Nothing is sampled, so the versions of tokens are those of another run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

from rollouts.errors import ConfigError, RunError, counted
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.rollout_gen.groups import NO_RULES, Group, GroupRules
from rollouts.training.rollout_gen.steps import RolloutStep, StepSettings
from rollouts.types import Task


def positions_buffer(count: int, seed: int) -> DataBuffer:
    """A buffer over the positions of `count` saved groups: each task's id is a position."""
    return DataBuffer([Task("", id=str(place)) for place in range(count)], seed=seed)


@dataclass
class SavedGroups:
    """Groups from files, step by step.

    Args:
        buffer: the positions of the groups, in the order in which they are trained
        count: the number of groups
        read: returns the group at a position
        config: `batch_size` is the number of groups of a step
        why_untrained: why nothing of a group is trained in a step; None: something is
        rules: its filters apply; the groups have their rewards
    """

    buffer: DataBuffer
    count: int
    read: Callable[[int], Group]
    config: StepSettings
    _: KW_ONLY
    why_untrained: Callable[[Group, int], str | None]
    rules: GroupRules = NO_RULES

    def __post_init__(self) -> None:
        self.policy_version: int | None = None
        self._steps = self._begun = 0

    async def __aenter__(self) -> SavedGroups:
        return self

    async def __aexit__(self, *error: object) -> None:
        """Nothing is open."""

    @asynccontextmanager
    async def pause(self) -> AsyncIterator[None]:
        """Nothing is sampled at any time."""
        yield

    async def generate_batch(self, *, wanted: int | None = None) -> RolloutStep:
        """The groups of the next step, with those that were passed over.

        Raises RunError, which says what dropped how many groups, if nothing is left to train on.
        """
        began, groups = time.perf_counter(), list[Group]()
        kept = 0
        while kept < self.config.batch_size and len(groups) < self.count:
            group = self._next()
            kept += group.dropped is None
            groups.append(group)
        if not kept:
            raise RunError(_nothing_left(groups))
        number, self._steps = self._steps, self._steps + 1
        return RolloutStep(groups, time.perf_counter() - began, epoch_id=self.buffer.epoch_id, step_id=number)

    def _next(self) -> Group:
        """The next group, with a number of its own: groups of several runs, or of several epochs, have the same one."""
        (task,) = self.buffer.get_prompts(1)
        assert task.id is not None, "the id is the position"
        group = self.read(int(task.id))
        group = self.rules.filtered(group, self._steps)
        if group.dropped is None:
            group = group._replace(dropped=self.why_untrained(group, self._steps))
        number, self._begun = self._begun, self._begun + 1
        episodes = tuple(each._replace(order=(number, each.order[1])) for each in group.episodes)
        return group._replace(number=number, episodes=episodes)

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, beside that of the buffer."""
        return {"steps": self._steps, "begun": self._begun, "saved_groups": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint. Raises ConfigError if there were other groups."""
        before = state.get("saved_groups")
        if before != self.count:
            there = f"{counted(self.count, 'group')} to train on now, and the checkpoint was made with {before}"
            raise ConfigError(f"--from: there are {there}; give the same runs again, or begin a new run")
        self._steps, self._begun = state["steps"], state["begun"]


def _nothing_left(groups: Sequence[Group]) -> str:
    reasons = Counter(group.dropped for group in groups)
    tally = "\n".join(f"  {count} x {reason}" for reason, count in reasons.most_common())
    judged = [reward for group in groups for reward in group.rewards if reward is not None]
    rewards = f"; their rewards are from {min(judged):g} to {max(judged):g}" if judged else ""
    return f"nothing is left to train on of {counted(len(groups), 'saved group')}{rewards}:\n{tally}"
