"""GroupManager: plays the groups of one training step, and may prefetch the groups of later steps.

    async with GroupManager(buffer, StepSettings(8, 8, over_sampling_factor=1.5), play, engine) as manager:
        step = await manager.generate_batch()

A step ends when enough groups are complete. Episodes that still run are then suspended in mid-reply. They stay in
memory, with environment, conversation and deadlines, and continue in the next step, under new weights. At every moment,
each group is exactly one of kept, dropped, carried or in flight (`statistics`). Here a group is all rollouts of a
prompt, whatever roles they have: it is kept if at least one of its roles is trained.

With an `over_sampling_factor` of 1, or with `keep="best"`, a step waits for all of its groups, nothing is carried over,
and a seed determines the result. Otherwise, the set of groups in a step depends on which groups are complete first.
With a `staleness` above 0, that many steps are prefetched while earlier ones are trained; change weights only inside
`pause`. Not here: playing episodes (`pool`, `rollouts.agent.episode`), and groups of a user's own function (the
AsyncRolloutManager of `rollouts_notes`).
"""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

import trio

from rollouts.inference.base import InferenceBackend
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.rollout_gen.groups import (
    NO_RULES,
    Group,
    JudgesGroups,
    LiveGroup,
    check_judged,
    drop_all_but_best,
    group_state,
    restore_groups,
    role_groups,
)
from rollouts.training.rollout_gen.pool import EpisodePool, FailurePolicy, Failures, Job, Play
from rollouts.training.rollout_gen.steps import RolloutStatistics, RolloutStep, StepSettings

Step = TypeVar("Step")


class Prefetch(Generic[Step]):
    """Plays steps in advance. `run` plays them in a task of its own, one after another; `take` returns the next one.

    While step s is trained, steps up to s + `count` may be played, and no later ones. So a step begins at most `count`
    steps before it is trained.
    """

    def __init__(self, play: Callable[[], Awaitable[Step]], count: int) -> None:
        assert count > 0, count
        self.ready: deque[Step] = deque()
        self._play = play
        self._count = count
        self._asked = self._begun = 0
        self._end: float = math.inf  # the total number of steps that `take` will return
        self._moved = trio.Event()

    async def run(self) -> None:
        """Play steps until cancelled. Raises what `play` raises."""
        while True:
            while self._asked == 0 or self._begun >= min(self._asked + self._count, self._end):
                await self._moved.wait()
            self._begun += 1
            self.ready.append(await self._play())
            self._notify()

    async def take(self, wanted: int | None = None) -> Step:
        """Wait for the next step. A cancelled call takes nothing.

        `wanted` is the number of steps that will still be taken, including this one. None: unknown.
        """
        self._end = math.inf if wanted is None else self._asked + wanted
        self._asked += 1
        self._notify()
        try:
            while not self.ready:
                await self._moved.wait()
        except BaseException:
            self._asked -= 1
            raise
        return self.ready.popleft()

    def _notify(self) -> None:
        """Wake `run` and `take`."""
        self._moved.set()
        self._moved = trio.Event()


@dataclass(eq=False, repr=False)
class GroupManager:
    """Plays groups concurrently, and returns them step by step. Use it inside `async with`.

    Leaving the block cancels unfinished episodes. If the manager is entered again, it plays the unfinished groups
    again, with the same numbers and seeds: from the suspended turn if the environment can be restored, else from the
    first turn.

    Args:
        data_buffer: the tasks
        config: the number of groups, of rollouts, and of concurrent episodes
        play: plays one episode on `inference`
        inference: the engine
        rules: group rewards and filters
        failures: decides about retries; None: an episode is never retried, and failures do not end the run
        policy_version: the version that the engines serve, or None; the training loop sets it
    """

    data_buffer: DataBuffer
    config: StepSettings
    play: Play
    inference: InferenceBackend
    rules: JudgesGroups = NO_RULES
    failures: Failures | None = None
    policy_version: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._begun = self._kept = self._dropped = self._steps = 0  # prefetched steps included
        self._live: dict[int, LiveGroup] = {}  # groups of prefetched steps excluded
        self._to_restore: list[dict[str, Any]] = []
        self._pool: EpisodePool | None = None
        self._prefetch: Prefetch[RolloutStep] | None = None
        self._is_playing = self._is_paused = False
        self._changed = trio.Event()

    @property
    def is_open(self) -> bool:
        """Whether the manager is inside `async with`."""
        return self._pool is not None

    @property
    def jobs_per_group(self) -> int:
        """How many jobs the pool plays for a group: one for each rollout."""
        return self.config.n_samples_per_prompt

    def group_of(self, live: LiveGroup) -> Group:
        """A complete group, with all roles of its episodes."""
        return Group(live.number, live.task, tuple(live.outcomes[index] for index in range(live.size)))

    async def __aenter__(self) -> Self:
        assert self._pool is None, "the manager is entered already"
        failures = self.failures or Failures(FailurePolicy(retries=0))
        pool = EpisodePool(self.play, self.inference, self.config.concurrency, self._end_episode, failures)
        await pool.__aenter__()
        pool.add(job for group in self._live.values() for job in group.jobs)
        self._pool = pool
        if self.config.staleness:
            self._prefetch = Prefetch(functools.partial(self._play_step, pool), self.config.staleness)
            pool.nursery.start_soon(self._prefetch.run)
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        pool, self._pool = self._pool, None
        assert pool is not None, "the manager was entered"
        for (number, index), suspended in pool.suspended.items():
            self._live[number].suspended[index] = suspended
        _, self._kept, self._dropped, *_ = self.statistics
        self._steps -= len(self._ready)
        for group in self._prefetched:  # later steps will judge these groups again
            group.judged = ()
            self._live[group.number] = group
        self._prefetch = None
        await pool.__aexit__(kind, error, traceback)

    async def generate_batch(self, *, wanted: int | None = None) -> RolloutStep:
        """The groups of the next step.

        Returns `batch_size` groups that no filter dropped, and the dropped ones. It returns fewer kept groups if no
        group is in flight and no more may begin. If the call is cancelled, the next call returns its groups.

        Args:
            wanted: how many steps will still be taken, including this one; limits prefetching

        Raises:
            RunError: no rollout of the step could be judged, or a filter failed.
            RewardError: a reward returned an invalid value.
        """
        assert self._pool is not None, "enter the manager first: async with manager"
        if self._prefetch is not None:
            return await self._prefetch.take(wanted)
        return await self._play_step(self._pool)

    @asynccontextmanager
    async def pause(self) -> AsyncIterator[None]:
        """Nothing is sampled inside this block. Unfinished replies keep their tokens and continue later.

        Change weights and call `state_dict` here. With a `staleness` of 0 nothing runs between steps, so this does
        nothing.
        """
        pool = self._pool
        if pool is None or self._prefetch is None:
            yield
            return
        assert not self._is_paused, "it is paused already"
        self._is_paused = True
        try:
            await pool.pause()
            yield
        finally:
            self._is_paused = False
            if self._is_playing:
                pool.open()

    @property
    def statistics(self) -> RolloutStatistics:
        """How many groups have begun, and how many of them are kept, dropped, carried and in flight."""
        waiting = self._prefetched
        kept = sum(group.is_kept for group in waiting)
        dropped = len(waiting) - kept
        in_flight = len(self._live) if self._is_playing else 0
        carried = len(self._live) + len(waiting) + len(self._to_restore) - in_flight
        return RolloutStatistics(self._begun, self._kept - kept, self._dropped - dropped, carried, in_flight)

    def state_dict(self) -> dict[str, Any]:
        """The manager's state for a checkpoint, as plain data. Call it between steps, in `pause`."""
        counts = self.statistics
        suspended = self._pool.suspended if self._pool is not None else {}
        live = sorted([*self._prefetched, *self._live.values()], key=lambda group: group.number)
        return {
            "begun": counts.begun,
            "kept": counts.kept,
            "dropped": counts.dropped,
            "steps": self._steps - len(self._ready),
            "live": self._to_restore + [group_state(group, suspended) for group in live],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint. Call it before the first step. It does not restore the data buffer."""
        assert not self._live, f"{len(self._live)} groups are being played"
        self._begun, self._dropped = state["begun"], state["dropped"]
        self._to_restore = list(state.get("live", []))
        self._kept = state.get("kept", self._begun - self._dropped)
        self._steps = state.get("steps", self._begun // self.config.batch_size)

    # --- one step -----------------------------------------------------------------------------------------------------

    @property
    def _ready(self) -> Sequence[RolloutStep]:
        """Prefetched steps that are finished."""
        return self._prefetch.ready if self._prefetch else ()

    @property
    def _prefetched(self) -> list[LiveGroup]:
        """The groups of `_ready`."""
        return [group for step in self._ready for group in step.live]

    async def _play_step(self, pool: EpisodePool) -> RolloutStep:
        start, config, rules = time.perf_counter(), self.config, self.rules
        for group in restore_groups(self._to_restore, self.data_buffer, self.jobs_per_group):
            self._live[group.number] = group
            pool.add(group.jobs)
        self._to_restore = []
        self._begin(pool, config.in_flight(config.batch_size) - len(self._live))
        refills = refilled = 0
        self._is_playing = True
        if not self._is_paused:
            pool.open()
        try:
            while True:
                self._changed = trio.Event()
                missing = await self._judge_complete(rules)
                playing = sum(not group.judged for group in self._live.values())
                if missing == 0:
                    break
                if playing < missing and config.refill and refills < config.refills_max:
                    more = config.in_flight(missing) - playing
                    refills, refilled = refills + 1, refilled + more
                    self._begin(pool, more)
                elif playing == 0:
                    break
                await self._changed.wait()
            await pool.pause()
        finally:
            pool.is_closed = True
            self._is_playing = False
        return self._finish(time.perf_counter() - start, refilled)

    def _begin(self, pool: EpisodePool, count: int) -> None:
        """Begin `count` groups. All of their sessions are open before any episode starts."""
        jobs: list[Job] = []
        for _ in range(count):
            task, position = self.data_buffer.draw(self._steps)
            group = LiveGroup(self._begun, task, self.jobs_per_group, self._steps, position)
            self._live[group.number] = group
            self._begun += 1
            jobs += group.jobs
        pool.add(jobs)

    def _end_episode(self, job: Job, outcome: Any) -> None:
        number, index = job.order
        self._live[number].outcomes[index] = outcome
        if self._live[number].is_complete:
            self._changed.set()

    async def _judge_complete(self, rules: JudgesGroups) -> int:
        """Judge complete groups until the step has enough. Returns how many kept groups are missing."""
        unjudged = [group for group in self._live.values() if not group.judged]
        ready = sorted((group for group in unjudged if group.is_complete), key=lambda group: group.number)
        if self.config.in_rounds and len(ready) < len(unjudged):
            ready = []
        missing = max(0, self.config.batch_size - sum(group.is_kept for group in self._live.values()))
        while missing and ready:
            count = len(ready) if self.config.keep == "best" else missing
            chosen, ready = ready[:count], ready[count:]
            for group, judged in zip(chosen, await self._judge(chosen, rules), strict=True):
                group.judged = tuple(judged)
                self._report(group)
                missing = max(0, missing - group.is_kept)
        return missing

    def _report(self, group: LiveGroup) -> None:
        """Report a judged group to the task sampler, once: a prefetched group is judged again after a resume."""
        if not group.is_reported:
            rewards = [reward for each in group.judged for reward in each.rewards]
            self.data_buffer.finished(group.position, group.task, rewards, self._steps)
            group.is_reported = True

    async def _judge(self, live: Sequence[LiveGroup], rules: JudgesGroups) -> list[list[Group]]:
        """The groups of these prompts, one for each role: with their group rewards, and filtered."""
        split = [role_groups(self.group_of(each)) for each in live]
        judged = iter(await rules.judge([group for own in split for group in own], self._steps))
        return [[next(judged) for _ in own] for own in split]

    def _finish(self, seconds: float, refilled: int) -> RolloutStep:
        """Return the judged groups as a step, and forget them. Raises RunError if no rollout could be judged."""
        judged = sorted((group for group in self._live.values() if group.judged), key=lambda group: group.number)
        for group in judged:
            del self._live[group.number]
        drop_all_but_best(judged, self.config.batch_size)
        kept = sum(group.is_kept for group in judged)
        number, self._steps = self._steps, self._steps + 1
        self._kept += kept
        self._dropped += len(judged) - kept
        groups = [each for group in judged for each in group.judged]
        check_judged([episode for group in groups for episode in group.episodes], f"step {self._steps}")
        metrics: dict[str, float] = {}
        if not self.config.in_rounds:
            metrics["rollout/carried_frac"] = sum(group.step < number for group in judged) / max(len(judged), 1)
            metrics["group/over_sampled"] = float(len(self._live))
        if self.config.refill:
            metrics["group/refilled"] = float(refilled)
        return RolloutStep(groups, seconds, metrics, self.data_buffer.epoch_id, number, judged)
