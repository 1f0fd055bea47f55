"""AsyncRolloutManager: generates the groups of one training step, and may prefetch the groups of later steps.

    async with AsyncRolloutManager(buffer, RolloutConfig(8, 8, over_sampling_factor=1.5), play=..., inference=...) as m:
        step = await m.generate_batch()

A step ends when enough groups are complete. Episodes that still run are then suspended in mid-reply. They stay in
memory, with environment, conversation and deadlines, and continue in the next step, under new weights. At every moment,
each group is exactly one of kept, dropped, carried or in flight (`statistics`). Here a group is all rollouts of a
prompt, whatever roles they have: it is kept if at least one of its roles is trained.

With an `over_sampling_factor` of 1, or with `keep="best"`, a step waits for all of its groups, nothing is carried over,
and a seed determines the result. Otherwise, the set of groups in a step depends on which groups are complete first.
With a `staleness` above 0, that many steps are prefetched while earlier ones are trained; change weights only inside
`pause`. Not here: playing episodes (`pool`, `rollouts.agent.episode`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Generic, TypeVar, cast

import trio

from rollouts.errors import ConfigError
from rollouts.inference.base import Capabilities, InferenceBackend
from rollouts.inference.suspend import SuspendableEngine
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.rollout_gen.groups import (
    Group,
    GroupScorer,
    LiveGroup,
    NamedFilter,
    SeeRewards,
    check_judged,
    drop_all_but_best,
    filter_group,
    group_state,
    pending_sample,
    restore_groups,
    role_groups,
)
from rollouts.training.rollout_gen.pool import EpisodePool, FailurePolicy, Failures, Job, Play
from rollouts.training.rollout_gen.steps import RolloutConfig, RolloutStatistics, RolloutStep
from rollouts.training.samples import episode_samples
from rollouts.types import Episode, Sample, Task

RewardFn = Callable[[Sample], Any]
Step = TypeVar("Step")


NO_ENGINE = cast(
    InferenceBackend,
    SimpleNamespace(
        capabilities=Capabilities(),
        open_session=lambda order: ".".join(map(str, order)),
        close_session=lambda session: None,
    ),
)
"""A placeholder for an engine. A `generate_fn` has its own engine, but the pool opens and closes sessions."""


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


def _no_tasks(epoch: int) -> list[Task]:
    raise ConfigError("this manager has no prompts: give data_buffer=DataBuffer(prompts=[...])")


class _PlayedStep(RolloutStep):
    """A step, with its groups as a checkpoint stores them while the step is prefetched."""

    live: list[LiveGroup]


@dataclass(init=False, eq=False, repr=False)
class AsyncRolloutManager:
    """Generates groups concurrently, and returns them step by step.

    Give either `play`, or a configuration with a `generate_fn`, or one with an `endpoint` and its `environment`. Inside
    `async with`, unfinished episodes continue in the next step. Outside of a block, each `generate_batch` cancels them
    at its end; leaving the block cancels them too. The next call plays the unfinished groups again, with the same
    numbers and seeds: from the suspended turn if the environment can be restored, else from the first turn.

    `policy_version` is the version that the engines serve, or None; `run_rl_training` sets it. If samples of a
    `generate_fn` have logprobs but no versions, their version is `policy_version` at the time of the call.

    Args:
        data_buffer: the tasks; None: the training tasks of the environment
        config: the number of groups, of rollouts, and of concurrent episodes; `rollout_config` is another name for it
        over_sampling_factor: replaces the configuration's
        filter_fn: replaces the configuration's
        play: plays one episode on `inference`
        inference: the engine; None: that of the endpoint, if there is one
        filters: group filters, applied in order
        see_rewards: computes the rewards that filters get, from a group and a step; None: the group's own
        score_groups: adds group rewards; None if there are none
        failures: decides about retries; None: an episode is never retried, and failures do not end the run
    """

    data_buffer: DataBuffer
    config: RolloutConfig

    def __init__(
        self,
        data_buffer: DataBuffer | None = None,
        config: RolloutConfig | None = None,
        *,
        rollout_config: RolloutConfig | None = None,
        over_sampling_factor: float | None = None,
        filter_fn: Callable[..., Any] | None = None,
        play: Play | None = None,
        inference: InferenceBackend | None = None,
        filters: Sequence[NamedFilter] = (),
        see_rewards: SeeRewards | None = None,
        score_groups: GroupScorer | None = None,
        failures: Failures | None = None,
    ) -> None:
        config = config or rollout_config
        if config is None:
            raise ConfigError("AsyncRolloutManager needs a configuration: rollout_config=RolloutConfig(...)")
        changes: dict[str, Any] = {"over_sampling_factor": over_sampling_factor, "filter_fn": filter_fn}
        if config.reward_fn is not None:
            from rollouts.training.rollout_gen.user_functions import graded

            changes["reward_fn"] = graded(config.reward_fn)
        config = dataclasses.replace(config, **{name: each for name, each in changes.items() if each is not None})
        self._player = None if config.endpoint is None else config.endpoint.player(config.environment)
        if self._player is not None:
            play = play or self._player.play
        if (play is None) == (config.generate_fn is None):
            given = "both" if play is not None else "neither"
            raise ConfigError(f"give either `play` or a generate_fn in the configuration; {given} is given")
        self.own_buffer = data_buffer
        tasks = _no_tasks if self._player is None else self._player.tasks
        self.data_buffer = data_buffer or DataBuffer(tasks)
        self.config, self.inference, self.filters, self.see_rewards = config, inference, filters, see_rewards
        self.score_groups, self.failures = score_groups, failures
        self.policy_version: int | None = None
        self._play = play or self._generate
        self._jobs_per_group = 1 if play is None else config.n_samples_per_prompt
        self._begun = self._kept = self._dropped = self._steps = 0  # prefetched steps included
        self._live: dict[int, LiveGroup] = {}  # groups of prefetched steps excluded
        self._to_restore: list[dict[str, Any]] = []
        self._pool: EpisodePool | None = None
        self._prefetch: Prefetch[_PlayedStep] | None = None
        self._reward_fn: RewardFn | None = None  # for steps that begin from now on
        self._is_playing = self._is_paused = False
        self._changed = trio.Event()
        self._opened = contextlib.AsyncExitStack()

    @property
    def is_open(self) -> bool:
        """Whether the manager is inside `async with`."""
        return self._pool is not None

    def connect(self, backend: Any = None) -> None:
        """Make the engine of the endpoint, unless there is one: with the trainer's weights, or with its own.

        Raises ConfigError, ModelError.
        """
        if self._player is not None and self.inference is None:
            self.inference = self._player.connect(backend, self.config.concurrency)

    async def __aenter__(self) -> AsyncRolloutManager:
        assert self._pool is None, "the manager is entered already"
        self.connect()
        async with contextlib.AsyncExitStack() as opened:
            if self._player is not None and self.inference is not None:
                opened.callback(setattr, self, "inference", None)  # an engine is entered once
                await opened.enter_async_context(self.inference)
            await self._open_pool()
            self._opened = opened.pop_all()
        return self

    async def _open_pool(self) -> None:
        failures = self.failures or Failures(FailurePolicy(retries=0))
        inference, concurrency = self.inference or NO_ENGINE, self.config.concurrency
        pool = EpisodePool(self._play, inference, concurrency, self._end_episode, failures)
        await pool.__aenter__()
        pool.add(job for group in self._live.values() for job in group.jobs)
        self._pool = pool
        if self.config.staleness:
            self._prefetch = Prefetch(functools.partial(self._play_step, pool), self.config.staleness)
            pool.nursery.start_soon(self._prefetch.run)

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        async with self._opened:
            await self._close_pool(kind, error, traceback)

    async def _close_pool(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
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

    def generate_batch(
        self, reward_fn: RewardFn | None = None, *, wanted: int | None = None
    ) -> Coroutine[Any, Any, RolloutStep]:
        """Await the result: the groups of the next step.

        Returns `batch_size` groups that no filter dropped, and the dropped ones. It returns fewer kept groups if no
        group is in flight and no more may begin. If the call is cancelled, the next call returns its groups.

        Args:
            reward_fn: replaces the configuration's; with a `staleness` above 0, only for steps that have not begun
            wanted: how many steps will still be taken, including this one; limits prefetching

        Raises:
            RunError: no rollout of the step could be judged, or a filter or generate_fn failed.
            RewardError: a reward returned an invalid value.
        """
        self._reward_fn = reward_fn
        if self._pool is None:
            return self._generate_alone(reward_fn)
        return self._play_step(self._pool) if self._prefetch is None else self._prefetch.take(wanted)

    async def generate_batches(self, count: int = 1) -> list[RolloutStep]:
        """The next `count` batches, with the rewards and the errors of `generate_batch`."""
        async with contextlib.nullcontext() if self.is_open else self:
            return [await self.generate_batch(wanted=count - place) for place in range(count)]

    async def _generate_alone(self, reward_fn: RewardFn | None) -> RolloutStep:
        async with self:
            return await self.generate_batch(reward_fn, wanted=1)

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

    @property
    def partial_samples(self) -> list[Sample]:
        """What the next step continues: the samples of finished rollouts in unfinished groups, and replies that were
        suspended (pending, with their tokens so far and without a reward).
        """
        outcomes = [outcome for group in self._live.values() for _, outcome in sorted(group.outcomes.items())]
        samples = [episode_samples(each, 0, 0) if isinstance(each, Episode) else list(each) for each in outcomes]
        waiting = self._pool.waiting if self._pool is not None else {}
        tasks = {order: self._live[order[0]].task for order in sorted(waiting)}
        pending = [pending_sample(task.prompt, *waiting[order]) for order, task in tasks.items()]
        return [*(sample for some in samples for sample in some), *pending]

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
    def _ready(self) -> Sequence[_PlayedStep]:
        """Prefetched steps that are finished."""
        return self._prefetch.ready if self._prefetch else ()

    @property
    def _prefetched(self) -> list[LiveGroup]:
        """The groups of `_ready`."""
        return [group for step in self._ready for group in step.live]

    async def _play_step(self, pool: EpisodePool) -> _PlayedStep:
        start, config = time.perf_counter(), self.config
        reward_fn = self._reward_fn or config.reward_fn
        for group in restore_groups(self._to_restore, self.data_buffer, self._jobs_per_group):
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
                missing = await self._judge_complete(reward_fn)
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
            group = LiveGroup(self._begun, task, self._jobs_per_group, self._steps, position)
            self._live[group.number] = group
            self._begun += 1
            jobs += group.jobs
        pool.add(jobs)

    def _end_episode(self, job: Job, outcome: Any) -> None:
        number, index = job.order
        self._live[number].outcomes[index] = outcome
        if self._live[number].is_complete:
            self._changed.set()

    async def _judge_complete(self, reward_fn: RewardFn | None) -> int:
        """Judge complete groups until the step has enough. Returns how many kept groups are missing."""
        unjudged = [group for group in self._live.values() if not group.judged]
        ready = sorted((group for group in unjudged if group.is_complete), key=lambda group: group.number)
        if self.config.in_rounds and len(ready) < len(unjudged):
            ready = []
        missing = max(0, self.config.batch_size - sum(group.is_kept for group in self._live.values()))
        while missing and ready:
            count = len(ready) if self.config.keep == "best" else missing
            chosen, ready = ready[:count], ready[count:]
            for group, judged in zip(chosen, await self._judge(chosen, reward_fn), strict=True):
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

    def _generate(self, job: Job, session: str, inference: SuspendableEngine) -> Awaitable[list[Sample]]:
        """A group of the configuration's `generate_fn`."""
        from rollouts.training.rollout_gen.user_functions import generate_group

        return generate_group(self.config, job.task, self.policy_version)

    def _played(self, live: LiveGroup) -> Group:
        """A complete group, with all roles of its episodes."""
        if self.config.generate_fn is not None:
            from rollouts.training.rollout_gen.user_functions import sample_group

            return sample_group(live.number, live.task, live.outcomes[0])
        return Group(live.number, live.task, tuple(live.outcomes[index] for index in range(live.size)))

    async def _judge(self, live: Sequence[LiveGroup], reward_fn: RewardFn | None) -> list[list[Group]]:
        """The groups of these prompts, one for each role: with their group rewards, and filtered."""
        split = [role_groups(self._played(each)) for each in live]
        groups = [group for own in split for group in own]
        if reward_fn is not None:
            from rollouts.training.rollout_gen.user_functions import reward_group

            groups = [await reward_group(group, reward_fn) for group in groups]
        if self.score_groups is not None:
            scored = await self.score_groups([group.episodes for group in groups])
            groups = [group._replace(episodes=tuple(own)) for group, own in zip(groups, scored, strict=True)]
        filtered = iter([await self._filter(group) for group in groups])
        return [[next(filtered) for _ in own] for own in split]

    async def _filter(self, group: Group) -> Group:
        """The group, with `dropped` set if a filter drops it."""
        group = filter_group(group, self.filters, step=self._steps, see=self.see_rewards)
        if group.dropped is None and self.config.filter_fn is not None:
            from rollouts.training.rollout_gen.user_functions import filter_group_by

            group = await filter_group_by(self.config.filter_fn, group)
        return group

    def _finish(self, seconds: float, refilled: int) -> _PlayedStep:
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
        step = _PlayedStep(groups, seconds, metrics=metrics, epoch_id=self.data_buffer.epoch_id, step_id=number)
        step.live = judged
        return step
