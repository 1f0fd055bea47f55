"""AsyncRolloutManager: asks the data buffer for tasks and the episodes' player for groups of rollouts.

Its state is the number of groups begun (a group's index seeds its random numbers) and what became of them. Left out:
over-sampling and carrying unfinished rollouts over to the next step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rollouts.agent import Episode
from rollouts.inference.base import InferenceBackend
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.rollout_gen.episodes import Job, Play, run_episodes
from rollouts.training.rollout_gen.group_rewards import GroupScorer
from rollouts.training.rollout_gen.groups import Filter, Group, check_judged, filter_group

__all__ = ["AsyncRolloutManager", "RolloutConfig", "RolloutStatistics", "RolloutStep"]


@dataclass(frozen=True)
class RolloutConfig:
    """How many prompts a step, how many rollouts each, and how many episodes may live at once."""

    batch_size: int
    n_samples_per_prompt: int = 1
    concurrency: int = 256

    def __post_init__(self) -> None:
        for name in ("batch_size", "n_samples_per_prompt", "concurrency"):
            assert getattr(self, name) > 0, f"{name} must be > 0, got {getattr(self, name)}"


class RolloutStep(NamedTuple):
    """One step's groups, dropped ones included, and the seconds that it took to play them."""

    groups: list[Group]
    seconds: float

    @property
    def kept(self) -> list[Group]:
        """The groups that no filter dropped."""
        return [group for group in self.groups if group.dropped is None]


class RolloutStatistics(NamedTuple):
    """What became of every group begun so far: begun = kept + dropped."""

    begun: int
    kept: int
    dropped: int


class AsyncRolloutManager:
    """Plays one step's groups at a time, all their episodes side by side.

    `play` runs one episode, `score_group` adds the rewards that see a whole group (None where the run has none).
    """

    def __init__(
        self,
        data_buffer: DataBuffer,
        config: RolloutConfig,
        *,
        play: Play,
        inference: InferenceBackend,
        filters: Sequence[Filter] = (),
        score_group: GroupScorer | None = None,
    ) -> None:
        self.data_buffer = data_buffer
        self.config = config
        self._play = play
        self._inference = inference
        self._filters = tuple(filters)
        self._score_group = score_group
        self._begun = 0
        self._dropped = 0

    async def generate_batch(self) -> RolloutStep:
        """Play `batch_size` groups. A cancelled call leaves the buffer ahead by the tasks that it took."""
        start = time.perf_counter()
        size = self.config.n_samples_per_prompt
        tasks = self.data_buffer.get_prompts(self.config.batch_size)
        first = self._begun
        step = first // self.config.batch_size
        jobs = [Job(task, (first + i, j)) for i, task in enumerate(tasks) for j in range(size)]
        episodes = await run_episodes(jobs, self._play, self._inference, concurrency=self.config.concurrency)
        groups = []
        for i, task in enumerate(tasks):
            members: Sequence[Episode] = episodes[i * size : (i + 1) * size]
            if self._score_group is not None:
                members = await self._score_group(members)
            groups.append(filter_group(Group(first + i, task, tuple(members)), self._filters, step=step))
        check_judged([episode for group in groups for episode in group.episodes], f"step {step + 1}")
        self._begun += len(tasks)
        self._dropped += sum(group.dropped is not None for group in groups)
        return RolloutStep(groups, time.perf_counter() - start)

    @property
    def statistics(self) -> RolloutStatistics:
        """A frozen count of what happened so far."""
        return RolloutStatistics(self._begun, self._begun - self._dropped, self._dropped)

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint must keep of the manager."""
        return {"begun": self._begun, "dropped": self._dropped}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue the numbering of groups from a checkpoint."""
        self._begun, self._dropped = state["begun"], state["dropped"]
