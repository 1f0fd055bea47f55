"""AsyncRolloutManager: one step's groups of rollouts, while those of the next may be under way already.

    async with AsyncRolloutManager(buffer, RolloutConfig(8, 8, over_sampling_factor=1.5), play=..., inference=...) as m:
        step = await m.generate_batch()

A step ends when enough groups are complete. What is still being played then is stopped in mid-reply, waits in memory
with its environment, conversation and deadlines, and goes on in the next step, under the weights of then. Every group
that was begun is at every moment exactly one of kept, dropped, carried or in flight (`statistics`).

With an `over_sampling_factor` of 1 a step waits for everything that it began, nothing is carried over, and one seed is
one result. Above 1 it is a race: which groups are complete first depends on the clock. With a `staleness` above 0 so
many steps are played while earlier ones are trained on (`ahead`); whoever changes the weights then does it in `hold`.
Left out: the playing itself (`pool`, `rollouts.agent`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple, cast

import trio

from rollouts.agent import Episode
from rollouts.env import calls
from rollouts.errors import ConfigError, RolloutsError, RunError, words_of
from rollouts.inference.base import InferenceBackend
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.rollout_gen.ahead import Ahead
from rollouts.training.rollout_gen.failures import Failures
from rollouts.training.rollout_gen.group_rewards import GroupScorer
from rollouts.training.rollout_gen.groups import Filter, Group, check_judged, filter_group, group_samples
from rollouts.training.rollout_gen.live import LiveGroup, begin_group, group_state, restore_groups
from rollouts.training.rollout_gen.pool import EpisodePool, Job, Play
from rollouts.training.rollout_gen.rollout_generation import (
    bare_prompt,
    check_samples,
    filter_verdict,
    name_of,
    sample_episode,
    score_of,
    stamp_version,
    unjudged,
)
from rollouts.training.rollout_gen.steps import RolloutConfig, RolloutStatistics, RolloutStep
from rollouts.training.samples import episode_samples
from rollouts.types import Sample, Score, Status

__all__ = ["AsyncRolloutManager", "RolloutConfig", "RolloutStatistics", "RolloutStep"]

RewardFn = Callable[[Sample], Any]


class _Played(NamedTuple):
    """A step that was played, and its groups as a checkpoint keeps them."""

    step: RolloutStep
    groups: list[LiveGroup]


class AsyncRolloutManager:
    """Plays groups side by side and hands them out a step at a time.

    `play` runs one episode on `inference`, `score_group` adds the rewards that see a whole group (None where the run
    has none); or the configuration has a `generate_fn`, and neither is needed. `failures` as in the pool.

    Inside of `async with` it carries episodes over from step to step. Outside, each `generate_batch` ends with what it
    did not need cancelled; the next one plays those groups again from their first turn (or from where they waited, in
    an environment that can be restored), with the same numbers and seeds. Leaving does the same.

    `policy_version` is that of the weights that are served, where it is known: `run_rl_training` sets it. Samples of a
    `generate_fn` with logprobs and without versions are of the one that was served when the function was called.
    """

    def __init__(
        self,
        data_buffer: DataBuffer,
        config: RolloutConfig,
        *,
        play: Play | None = None,
        inference: InferenceBackend | None = None,
        filters: Sequence[Filter] = (),
        see_rewards: Callable[[Group, int], list[float | None]] | None = None,
        score_group: GroupScorer | None = None,
        failures: Failures | None = None,
    ) -> None:
        if (play is None) == (config.generate_fn is None):
            given = "both" if play is not None else "neither"
            raise ConfigError(
                f"rollouts are made either by `play` or by the configuration's generate_fn; {given} is given"
            )
        self.data_buffer = data_buffer
        self.config = config
        self.policy_version: int | None = None
        self._play = play or self._generate
        self._inference = inference or cast(InferenceBackend, _NoEngine())
        self._filters = tuple(filters)
        self._see_rewards = see_rewards
        self._score_group = score_group
        self._failures = failures
        self._jobs_per_group = 1 if play is None else config.n_samples_per_prompt
        self._begun = self._kept = self._dropped = self._steps = 0
        self._live: dict[int, LiveGroup] = {}
        self._to_restore: list[dict[str, Any]] = []
        self._pool: EpisodePool | None = None
        self._ahead: Ahead[_Played] | None = None
        self._reward_fn: RewardFn | None = None  # of the steps that are played ahead
        self._is_playing = self._is_held = False
        self._changed = trio.Event()

    async def __aenter__(self) -> AsyncRolloutManager:
        assert self._pool is None, "the manager is entered already"
        pool = EpisodePool(
            self._play,
            self._inference,
            concurrency=self.config.concurrency,
            on_end=self._end_episode,
            failures=self._failures,
        )
        await pool.__aenter__()
        pool.add(job for group in self._live.values() for job in group.jobs)
        self._pool = pool
        if self.config.staleness:
            self._ahead = Ahead(lambda: self._play_step(pool, self._reward_fn), self.config.staleness)
            pool.beside(self._ahead.run)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        pool, self._pool = self._pool, None
        assert pool is not None, "the manager was entered"
        for (number, index), held in pool.held.items():
            self._live[number].held[index] = held
        if self._ahead is not None:
            self._take_back(self._ahead)
            self._ahead = None
        return await pool.__aexit__(kind, error, traceback)

    async def generate_batch(self, reward_fn: RewardFn | None = None, *, wanted: int | None = None) -> RolloutStep:
        """The next step's groups: `batch_size` that no filter dropped, and the dropped ones; fewer where none are left
        in flight and no more may be begun. `reward_fn` stands in for the configuration's (with a `staleness`: in steps
        that are not begun yet). `wanted` steps are still to come, this one included; nothing is played ahead of them.

        A cancelled call loses nothing: its groups are in the next one's.

        Raises:
            RunError: not one of the step's rollouts could be judged, or a filter or generate_fn cannot be used.
            RewardError: a reward is none.
        """
        self._reward_fn = reward_fn
        if self._ahead is not None:
            return (await self._ahead.take(wanted)).step
        if self._pool is not None:
            return (await self._play_step(self._pool, reward_fn)).step
        step: RolloutStep | None = None
        async with self:
            step = await self.generate_batch(reward_fn, wanted=1)
        assert step is not None, "what is raised in the block goes through it"
        return step

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """In here nobody speaks: replies that are under way have come back as far as they were, and go on afterwards.
        It is where weights change, and where `state_dict` tells all. Without a `staleness` nothing is under way anyway.
        """
        if self._pool is None or self._ahead is None:
            yield
            return
        assert not self._is_held, "it is held already"
        self._is_held = True
        try:
            await self._pool.pause()
            yield
        finally:
            self._is_held = False
            if self._is_playing:
                self._pool.open()

    @property
    def statistics(self) -> RolloutStatistics:
        """A frozen count of what became of every group so far."""
        live = len(self._live) + len(self._to_restore)
        carried, in_flight = (0, live) if self._is_playing else (live, 0)
        return RolloutStatistics(self._begun, self._kept, self._dropped, carried, in_flight)

    @property
    def partial_samples(self) -> list[Sample]:
        """The samples of those carried groups' rollouts that are over."""
        outcomes = [outcome for group in self._live.values() for _, outcome in sorted(group.outcomes.items())]
        samples = [episode_samples(each, 0, 0) if isinstance(each, Episode) else list(each) for each in outcomes]
        return [sample for some in samples for sample in some]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep of the manager: plain data. Between two steps; with a `staleness` in `hold`."""
        held: dict[int, dict[int, Any]] = {}
        for (number, index), each in (self._pool.held if self._pool is not None else {}).items():
            held.setdefault(number, {})[index] = each
        ready = list(self._ahead.ready) if self._ahead is not None else []
        waiting = [group for played in ready for group in played.groups]
        live = sorted([*waiting, *self._live.values()], key=lambda group: group.number)
        return {
            "begun": self._begun,
            "kept": self._kept - sum(_is_kept(group) for group in waiting),
            "dropped": self._dropped - sum(not _is_kept(group) for group in waiting),
            "steps": self._steps - len(ready),
            "live": self._to_restore + [group_state(group, held.get(group.number, {})) for group in live],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; the buffer is told by itself where it stood. Before the first step."""
        assert not self._live, f"{len(self._live)} groups are being played"
        self._begun, self._dropped = state["begun"], state["dropped"]
        self._to_restore = list(state.get("live", []))
        self._kept = state.get("kept", self._begun - self._dropped)
        self._steps = state.get("steps", self._begun // self.config.batch_size)

    # --- one step -----------------------------------------------------------------------------------------------------

    async def _play_step(self, pool: EpisodePool, reward_fn: RewardFn | None) -> _Played:
        start = time.perf_counter()
        size = self.config.batch_size
        self._restore(pool)
        self._begin(pool, self.config.ahead(size) - len(self._live))
        refills = refilled = 0
        self._is_playing = True
        if not self._is_held:
            pool.open()
        try:
            while True:
                self._changed = trio.Event()
                missing, playing = await self._judge_complete(reward_fn or self.config.reward_fn)
                more = self.config.ahead(missing) - playing
                if missing == 0:
                    break
                if playing < missing and self.config.refill and refills < self.config.refills_max:
                    refills, refilled = refills + 1, refilled + more
                    self._begin(pool, more)
                elif playing == 0:
                    break
                await self._changed.wait()
            await pool.pause()
        finally:
            pool.shut()
            self._is_playing = False
        return self._hand_out(start, refilled)

    def _restore(self, pool: EpisodePool) -> None:
        """Take up what a checkpoint says was being played."""
        groups = restore_groups(self._to_restore, self.data_buffer, self._jobs_per_group)
        self._to_restore = []
        for group in groups:
            self._live[group.number] = group
            pool.add(group.jobs)

    def _begin(self, pool: EpisodePool, count: int) -> None:
        """Begin so many groups, in one go: their sessions are open before any of them plays."""
        jobs: list[Job] = []
        for _ in range(count):
            group = begin_group(self.data_buffer, self._begun, self._jobs_per_group, self._steps)
            self._live[group.number] = group
            self._begun += 1
            jobs += group.jobs
        pool.add(jobs)

    def _end_episode(self, job: Job, outcome: Any) -> None:
        number, index = job.order
        self._live[number].outcomes[index] = outcome
        if self._live[number].is_complete:
            self._changed.set()

    async def _judge_complete(self, reward_fn: RewardFn | None) -> tuple[int, int]:
        """Judge groups that are complete while any are wanted; how many are still missing, and how many unjudged."""
        unjudged_groups = [group for group in self._live.values() if group.judged is None]
        ready = sorted((group for group in unjudged_groups if group.is_complete), key=lambda group: group.number)
        if self.config.in_rounds and len(ready) < len(unjudged_groups):
            ready = []
        missing = self.config.batch_size - sum(_is_kept(group) for group in self._live.values())
        for group in ready:
            if missing == 0:
                break
            group.judged = await self._judge(group, reward_fn)
            missing -= _is_kept(group)
        return missing, sum(group.judged is None for group in self._live.values())

    async def _judge(self, live: LiveGroup, reward_fn: RewardFn | None) -> Group:
        """Rewards that see the whole group, then the filters."""
        group = self._as_group(live)
        if reward_fn is not None:
            group = await _rewarded(group, reward_fn)
        if self._score_group is not None:
            group = group._replace(episodes=tuple(await self._score_group(group.episodes)))
        group = filter_group(group, self._filters, step=self._steps, see=self._see_rewards)
        if group.dropped is None and self.config.filter_fn is not None:
            name = name_of(self.config.filter_fn)
            group = group._replace(dropped=filter_verdict(name, await _ask_filter(self.config.filter_fn, name, group)))
        return group

    def _as_group(self, live: LiveGroup) -> Group:
        outcomes = [live.outcomes[index] for index in range(live.size)]
        if self.config.generate_fn is None:
            return Group(live.number, live.task, tuple(outcomes))
        (samples,) = outcomes
        episodes = tuple(sample_episode(s, live.task, (live.number, index)) for index, s in enumerate(samples))
        return Group(live.number, live.task, episodes, samples=tuple(samples))

    def _take_back(self, ahead: Ahead[_Played]) -> None:
        """What was played and not asked for belongs to the next steps again."""
        for _, groups in ahead.ready:
            self._steps -= 1
            for group in groups:
                self._kept -= _is_kept(group)
                self._dropped -= not _is_kept(group)
                group.judged = None
                self._live[group.number] = group
        ahead.ready.clear()

    def _hand_out(self, start: float, refilled: int) -> _Played:
        judged = sorted((live for live in self._live.values() if live.judged is not None), key=lambda live: live.number)
        groups = [live.judged for live in judged if live.judged is not None]
        for live in judged:
            del self._live[live.number]
        step, self._steps = self._steps, self._steps + 1
        self._dropped += sum(group.dropped is not None for group in groups)
        self._kept += sum(group.dropped is None for group in groups)
        check_judged([episode for group in groups for episode in group.episodes], f"step {step + 1}")
        metrics: dict[str, float] = {}
        if not self.config.in_rounds:
            metrics["rollout/carried_frac"] = sum(live.step < step for live in judged) / max(len(judged), 1)
            metrics["group/over_sampled"] = float(len(self._live))
        if self.config.refill:
            metrics["group/refilled"] = float(refilled)
        seconds = time.perf_counter() - start
        played = RolloutStep(groups, seconds, metrics=metrics, epoch_id=self.data_buffer.epoch_id, step_id=step)
        return _Played(played, judged)

    async def _generate(self, job: Job, session: str, inference: InferenceBackend) -> list[Sample]:
        """One group by the user's function. Where that raises or takes too long, its samples have failed."""
        count, seconds = self.config.n_samples_per_prompt, self.config.generate_seconds
        assert self.config.generate_fn is not None, "checked when the manager was made"
        prompts = [bare_prompt(job.task) for _ in range(count)]
        served = self.policy_version
        try:
            returned = await calls.call(functools.partial(self.config.generate_fn, prompts), timeout_seconds=seconds)
        except trio.TooSlowError:
            status, why = Status.TIMEOUT, f"generate_fn took longer than {seconds:g} seconds"
        except RolloutsError:
            raise
        except Exception as error:  # the author's code may raise anything
            status, why = Status.ENVIRONMENT_ERROR, f"generate_fn: {words_of(error)}"
        else:
            return stamp_version(check_samples(returned, count), served)
        failed = Sample(job.task.prompt, reward=None, status=status, metadata={"error": why})
        return [replace(failed) for _ in range(count)]


class _NoEngine:
    """Stands where a `generate_fn` brings its own engine."""

    def open_session(self, order: tuple[int, ...]) -> str:
        return ".".join(map(str, order))

    def close_session(self, session: str) -> None:
        return None


def _is_kept(group: LiveGroup) -> bool:
    return group.judged is not None and group.judged.dropped is None


async def _rewarded(group: Group, reward_fn: RewardFn) -> Group:
    """The group with the scores that `reward_fn` gives; rollouts that the infrastructure failed keep theirs (None)."""
    episodes = []
    for index, episode in enumerate(group.episodes):
        shown = [group.samples[index]] if group.samples else episode_samples(episode, 0, 0)
        if episode.status.is_infrastructure or not shown:
            episodes.append(episode)
            continue
        episodes.append(episode._replace(score=await _ask_reward(reward_fn, shown[-1])))
    return group._replace(episodes=tuple(episodes))


async def _ask_reward(reward_fn: RewardFn, sample: Sample) -> Score:
    try:
        score: Score = await calls.call(reward_fn, sample, convert=score_of)
        return score
    except Exception as error:  # the author's code may raise anything
        return unjudged(error)


async def _ask_filter(filter_fn: Callable[..., Any], name: str, group: Group) -> Any:
    try:
        return await calls.call(filter_fn, group_samples([group]))
    except RolloutsError:
        raise
    except Exception as error:  # the author's code may raise anything
        raise RunError(f"the filter {name} raised {words_of(error)}") from error
