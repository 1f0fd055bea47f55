"""AsyncRolloutManager: groups of episodes, or of your own `generate_fn`, as batches for your own loop.

    async with AsyncRolloutManager(buffer, RolloutConfig(8, 8, generate_fn=my_fn, reward_fn=my_reward)) as manager:
        batch = await manager.generate_batch()

It is the manager of `rollouts run` (`rollouts.training.rollout_gen.manager`) with the functions of a RolloutConfig,
which `user_functions` describes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, Self, cast

from rollouts.errors import ConfigError
from rollouts.inference.base import Capabilities, GenerateRequest, Generation, InferenceBackend
from rollouts.inference.suspend import SuspendableEngine
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.rollout_gen.groups import (
    Group,
    GroupRules,
    GroupScorer,
    LiveGroup,
    NamedFilter,
    SeeRewards,
    group_samples,
)
from rollouts.training.rollout_gen.manager import GroupManager
from rollouts.training.rollout_gen.pool import Failures, Job, Play
from rollouts.training.rollout_gen.steps import RolloutStep
from rollouts.training.samples import episode_samples
from rollouts.types import Episode, Sample, Status, Task
from rollouts_notes.rows import RolloutBatch, RolloutConfig, convert_to_batch
from rollouts_notes.user_functions import filter_group_by, generate_group, graded, reward_group, sample_group

RewardFn = Callable[[Sample], Any]


class GroupBatch(RolloutStep, RolloutBatch):
    """The groups of one step, and the rows of the kept ones: the fields of RolloutBatch, computed on first use."""

    def __init__(self, step: RolloutStep) -> None:
        vars(self).update(vars(step))

    def __getattr__(self, name: str) -> Any:
        if name not in RolloutBatch.__dataclass_fields__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        vars(self).update(vars(convert_to_batch(group_samples(self.kept), self.epoch_id, self.step_id)))
        return vars(self)[name]


NO_ENGINE = cast(
    InferenceBackend,
    SimpleNamespace(
        capabilities=Capabilities(),
        open_session=lambda order: ".".join(map(str, order)),
        close_session=lambda session: None,
    ),
)
"""A placeholder for an engine. A `generate_fn` has its own engine, but the pool opens and closes sessions."""


class _UserRules(NamedTuple):
    """What happens to finished groups: the `reward_fn`, the rules of a manager, then the `filter_fn`."""

    rules: GroupRules
    reward_fn: RewardFn | None
    filter_fn: Callable[..., Any] | None

    async def judge(self, groups: Sequence[Group], step: int) -> list[Group]:
        """As in GroupRules."""
        if self.reward_fn is not None:
            groups = [await reward_group(group, self.reward_fn) for group in groups]
        judged = await self.rules.judge(groups, step)
        if self.filter_fn is None:
            return judged
        return [g if g.dropped is not None else await filter_group_by(self.filter_fn, g) for g in judged]


def _no_tasks(epoch: int) -> list[Task]:
    raise ConfigError("this manager has no prompts: give data_buffer=DataBuffer(prompts=[...])")


class AsyncRolloutManager(GroupManager):
    """Generates groups concurrently, and returns them step by step.

    Give either `play`, or a configuration with a `generate_fn`, or one with an `endpoint` and its `environment`. Inside
    `async with`, unfinished episodes continue in the next step. Outside of a block, each `generate_batch` cancels them
    at its end; leaving the block cancels them too. The next call plays the unfinished groups again, with the same
    numbers and seeds: from the suspended turn if the environment can be restored, else from the first turn.

    `policy_version` is the version that the engines serve, or None; `run_rl_training` sets it. If samples of a
    `generate_fn` have logprobs but no versions, their version is `policy_version` at the time of the call. `reward_fn`
    judges the samples of a step for which `generate_batch` gets none.

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
        self._rules, self.reward_fn = GroupRules(filters, see_rewards, score_groups), config.reward_fn
        rules = _UserRules(self._rules, config.reward_fn, config.filter_fn)
        engine = cast(InferenceBackend, inference)  # without one, it is connected when the manager is entered
        super().__init__(data_buffer or DataBuffer(tasks), config, play or self._generate, engine, rules, failures)
        self._opened = contextlib.AsyncExitStack()

    @property
    def jobs_per_group(self) -> int:
        """A `generate_fn` makes all rollouts of a group at once."""
        return 1 if self.config.generate_fn is not None else self.config.n_samples_per_prompt

    def connect(self, backend: Any = None) -> None:
        """Make the engine of the endpoint, unless there is one: with the trainer's weights, or with its own.

        Raises ConfigError, ModelError.
        """
        if self._player is not None and self.inference is None:
            self.inference = self._player.connect(backend, self.config.concurrency)

    async def __aenter__(self) -> Self:
        assert self._pool is None, "the manager is entered already"
        self.connect()
        async with contextlib.AsyncExitStack() as opened:
            if self._player is not None or self.inference is None:
                opened.callback(setattr, self, "inference", None)  # an engine is entered once
            if self.inference is None:
                self.inference = NO_ENGINE
            elif self._player is not None:
                await opened.enter_async_context(self.inference)
            await super().__aenter__()
            self._opened = opened.pop_all()
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        async with self._opened:
            await super().__aexit__(kind, error, traceback)

    async def generate_batch(self, reward_fn: RewardFn | None = None, *, wanted: int | None = None) -> GroupBatch:
        """The groups of the next step, and their rows. Outside of `async with`, unfinished episodes are cancelled.

        Args:
            reward_fn: replaces the configuration's; with a `staleness` above 0, only for steps that have not begun
            wanted: how many steps will still be taken, including this one; limits prefetching

        Raises:
            RunError: no rollout of the step could be judged, or a filter or generate_fn failed.
            RewardError: a reward returned an invalid value.
        """
        self.rules = _UserRules(self._rules, reward_fn or self.reward_fn, self.config.filter_fn)
        wanted = wanted if self.is_open else 1  # a manager that is entered here plays this step alone
        async with contextlib.nullcontext() if self.is_open else self:
            return GroupBatch(await super().generate_batch(wanted=wanted))

    async def generate_batches(self, count: int = 1) -> list[GroupBatch]:
        """The next `count` batches, with the rewards and the errors of `generate_batch`."""
        async with contextlib.nullcontext() if self.is_open else self:
            return [await self.generate_batch(wanted=count - place) for place in range(count)]

    @property
    def partial_samples(self) -> list[Sample]:
        """What the next step continues: the samples of finished rollouts in unfinished groups, and replies that were
        suspended (pending, with their tokens so far and without a reward).
        """
        outcomes = [outcome for group in self._live.values() for _, outcome in sorted(group.outcomes.items())]
        samples = [episode_samples(each, 0, 0) if isinstance(each, Episode) else list(each) for each in outcomes]
        waiting = self._pool.waiting if self._pool is not None else {}
        tasks = {order: self._live[order[0]].task for order in sorted(waiting)}
        pending = [_pending_sample(task.prompt, *waiting[order]) for order, task in tasks.items()]
        return [*(sample for some in samples for sample in some), *pending]

    def _generate(self, job: Job, session: str, inference: SuspendableEngine) -> Awaitable[list[Sample]]:
        """A group of the configuration's `generate_fn`."""
        return generate_group(self.config, job.task, self.policy_version)

    def group_of(self, live: LiveGroup) -> Group:
        """A complete group: of the samples of a `generate_fn`, or of episodes."""
        if self.config.generate_fn is None:
            return super().group_of(live)
        return sample_group(live.number, live.task, live.outcomes[0])


def _pending_sample(prompt: Any, request: GenerateRequest, reply: Generation) -> Sample:
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
