"""`RolloutConfig` and `AsyncRolloutManager` that also take an endpoint and an environment.

    config = RolloutConfig(batch_size=8, endpoint=Endpoint(), environment=CalculatorEnvironment())
    manager = AsyncRolloutManager(rollout_config=config, over_sampling_factor=1.5, filter_fn=check_any_success)
    batches = await manager.generate_batches()

The episodes are those of `rollouts run`: see `rollouts.agent.episode`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rollouts.agent.episode import run_episode
from rollouts.env.checks import check_environment
from rollouts.env.mixing import env_term
from rollouts.errors import ConfigError
from rollouts.inference.suspend import SuspendableEngine
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.rollout_gen import manager, steps
from rollouts.training.rollout_gen.pool import Job
from rollouts.training.rollout_gen.steps import RolloutStep
from rollouts.training.simple.endpoint import Endpoint
from rollouts.training.simple.samples import with_grade
from rollouts.types import Episode, Sample, Task


@dataclass(frozen=True)
class RolloutConfig(steps.RolloutConfig):
    """`rollouts.training.rollout_gen.steps.RolloutConfig`, with an endpoint and an environment in place of a
    `generate_fn`.

    Args:
        endpoint: the model that plays
        environment: an environment, as an object or a class
    """

    endpoint: Endpoint | None = None
    environment: Any = None


class AsyncRolloutManager(manager.AsyncRolloutManager):
    """`rollouts.training.rollout_gen.manager.AsyncRolloutManager` for any RolloutConfig.

    With an endpoint and an environment in the configuration, it plays episodes of the environment, whose rewards judge
    them. `run_rl_training` connects it with the trainer's weights. Raises ConfigError if the configuration does not
    fit, and EnvironmentDefinitionError for an object that is no environment.

    Args:
        data_buffer: None: the training tasks of the environment
        config: the configuration; `rollout_config` is another name for it
        over_sampling_factor: replaces the configuration's
        filter_fn: replaces the configuration's
        options: those of the other manager
    """

    def __init__(
        self,
        data_buffer: DataBuffer | None = None,
        config: Any = None,
        *,
        rollout_config: Any = None,
        over_sampling_factor: float | None = None,
        filter_fn: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        config = config or rollout_config
        if config is None:
            raise ConfigError("AsyncRolloutManager needs a configuration: rollout_config=RolloutConfig(...)")
        changes = {"over_sampling_factor": over_sampling_factor, "filter_fn": filter_fn}
        config = dataclasses.replace(config, **{name: each for name, each in changes.items() if each is not None})
        self.own_buffer = data_buffer
        self._endpoint, self._environment = getattr(config, "endpoint", None), getattr(config, "environment", None)
        if (self._endpoint is None) != (self._environment is None):
            raise ConfigError("RolloutConfig: endpoint and environment belong together; give both, or a generate_fn")
        if self._environment is not None:
            check_environment(self._environment)
            options["play"] = self._play_episode
            data_buffer = data_buffer or DataBuffer(self._tasks)
        if config.reward_fn is not None:
            config = dataclasses.replace(config, reward_fn=graded(config.reward_fn))
        super().__init__(data_buffer or DataBuffer(_no_tasks), config, **options)
        self._chat: Any = None
        self._opened = contextlib.AsyncExitStack()

    @property
    def is_open(self) -> bool:
        """Whether the manager is inside `async with`."""
        return self._pool is not None

    def connect(self, backend: Any = None) -> None:
        """Make the engine of the endpoint, unless there is one: with the trainer's weights, or with its own.

        Raises ConfigError, ModelError.
        """
        if self._endpoint is not None and self.inference is None:
            self.inference, self._chat = self._endpoint.connect(backend, self.config.concurrency)

    async def __aenter__(self) -> AsyncRolloutManager:
        self.connect()
        async with contextlib.AsyncExitStack() as opened:
            if self._endpoint is not None and self.inference is not None:
                opened.callback(setattr, self, "inference", None)  # an engine is entered once
                await opened.enter_async_context(self.inference)
            await super().__aenter__()
            self._opened = opened.pop_all()
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        async with self._opened:
            await super().__aexit__(kind, error, traceback)

    async def generate_batches(self, count: int = 1) -> list[RolloutStep]:
        """The next `count` batches, with the rewards and the errors of `generate_batch`."""
        async with contextlib.nullcontext() if self.is_open else self:
            return [await self.generate_batch(wanted=count - place) for place in range(count)]

    def _tasks(self, epoch: int) -> Iterator[Any]:
        environment = self._new_environment()
        yield from environment.tasks("train", random.Random(f"{self._seed}/train/{epoch}"))

    @property
    def _seed(self) -> int:
        return self._endpoint.seed if self._endpoint is not None else 0

    def _new_environment(self) -> Any:
        given = self._environment
        return given() if inspect.isclass(given) else copy.deepcopy(given)

    async def _play_episode(self, job: Job, session: str, inference: SuspendableEngine) -> Episode:
        assert self._endpoint is not None, "checked when the manager was made"
        return await run_episode(
            job.task,
            make_env=self._new_environment,
            chat=self._chat,
            inference=inference,
            limits=self._endpoint.limits,
            rewards=[env_term()],
            session=session,
            order=job.order,
            seed=self._seed,
        )


def _no_tasks(epoch: int) -> list[Task]:
    raise ConfigError("this manager has no prompts: give data_buffer=DataBuffer(prompts=[...])")


def graded(reward_fn: Callable[[Sample], Any]) -> Callable[[Sample], Any]:
    """The function, for samples whose metadata has `correct` (`with_grade`)."""
    return lambda sample: reward_fn(with_grade(sample))


def task_of(sample: Sample) -> Task:
    """The task of a sample: its prompt, and its metadata as `answer`, `id` and `info`."""
    rest = dict(sample.metadata)
    answer, identity = rest.pop("answer", None), rest.pop("id", None)
    return Task(sample.prompt, answer, rest, identity)
