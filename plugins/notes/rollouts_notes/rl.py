"""`run_rl_training`: the reinforcement learning loop as a plain call, for any backend, manager and engine of this room.

    metrics = await run_rl_training(backend, buffer, manager, [SGLangEngine(base_url=...)], RLTrainingConfig(1000))
    metrics = await run_rl_training(backend=backend, samples=samples, config=config, reward_fn=my_reward)

It fills in what the loop needs (`rollouts.training.loops.rl`), and calls it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

from rollouts.errors import ConfigError
from rollouts.loggers.base import MetricsLogger
from rollouts.plugins.signature import bind
from rollouts.training.algorithms.advantages import baseline
from rollouts.training.algorithms.algorithm import FIRST, Algorithm
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.loops import rl
from rollouts.training.loops.rl_batch import RLSettings
from rollouts.training.rollout_gen.groups import group_samples
from rollouts.training.rollout_gen.manager import AsyncRolloutManager, RewardFn
from rollouts.training.rollout_gen.steps import RolloutConfig
from rollouts.training.rollout_gen.user_functions import graded
from rollouts.training.samples import with_lists
from rollouts.types import Sample, Task
from rollouts_notes.batches import compute_reward
from rollouts_notes.configs import RLTrainingConfig, as_config
from rollouts_notes.progress import CheckpointSync, StepLines, set_learning_rate, short_names


async def run_rl_training(
    backend: Any,
    data_buffer: DataBuffer | None = None,
    rollout_manager: Any = None,
    inference_engines: Sequence[Any] | None = None,
    config: Any = None,
    metrics_logger: MetricsLogger | None = None,
    *,
    samples: Sequence[Sample] | None = None,
    reward_fn: RewardFn | None = None,
    algorithm: Algorithm | None = None,
    on_step: rl.OnStep | None = None,
    on_logged: rl.OnLogged | None = None,
    **options: Any,
) -> list[dict[str, float]]:
    """Generate, train and sync, for `config.num_steps` steps. Returns each step's metrics.

    Metrics have `step`, and the short names `mean_reward`, `max_reward`, `min_reward`, `loss`, `grad_norm` and `lr`.
    `rollouts.training.loops.rl` has the loop itself, its other `options`, and what it raises. Also raises ConfigError
    if the arguments do not fit together.

    Args:
        backend: a PyTorchTrainingBackend, or a backend of `create_pytorch_backend`
        data_buffer: the manager's buffer; None: take it from the manager
        rollout_manager: an AsyncRolloutManager. None: train on `samples`, which have tokens and rewards already
        inference_engines: engines that get new weights, or servers that load checkpoints (SGLangEngine, VLLMEngine).
            None: the manager's own engine
        config: an RLTrainingConfig
        samples: with a manager that has no buffer: its prompts. Without a manager: the rollouts to train on
        reward_fn: the reward of a sample; its metadata has `correct`. None: that of the manager, else the
            environment's; for a `generate_fn`, `compute_reward` of samples with `correct`, and the sample's own reward
        algorithm: None: the backend's own, with `config.baseline` if it is given
    """
    config = as_config(RLTrainingConfig, config)
    set_learning_rate(backend, config.learning_rate)
    manager = _manager_of(rollout_manager, data_buffer, samples, config)
    manager.connect(backend)
    if inference_engines is None:
        inference_engines = [] if manager.inference is None else [manager.inference]
    progress = StepLines(config, backend)
    if options.get("syncing") is None and (servers := _checkpoint_servers(inference_engines)):
        options["syncing"] = CheckpointSync(servers, progress.checkpoints, prints=progress.prints)

    after, logged = _observers(progress, on_step, on_logged)
    progress.begin("RL", steps=config.num_steps, weight_sync_every=f"{config.sync_every} steps")
    async with contextlib.nullcontext() if manager.is_open else manager:
        history = await rl.train_rl(
            backend,
            manager.data_buffer,
            manager,
            inference_engines,
            _settings_of(config, manager.config),
            metrics_logger,
            algorithm=algorithm or _algorithm_of(backend, config),
            reward_fn=_reward_of(reward_fn, manager.config),
            on_step=after,
            on_logged=logged,
            **options,
        )
    progress.say("RL training complete!")
    first = options["start"].step if "start" in options else 0
    return [metrics | {"step": step} for step, metrics in enumerate(history, first)]


def _observers(
    progress: StepLines, on_step: rl.OnStep | None, on_logged: rl.OnLogged | None
) -> tuple[rl.OnStep, rl.OnLogged]:
    """The caller's observers, with the short names of metrics, printed lines and checkpoints."""

    async def after(report: rl.StepReport) -> dict[str, float]:
        rewards = [each.reward for each in group_samples(report.groups) if each.reward is not None]
        added = {"max_reward": max(rewards), "min_reward": min(rewards)} if rewards else {}
        added = short_names(report.metrics) | added
        if on_step is not None:
            added |= await on_step(report._replace(metrics=report.metrics | added))
        return added

    async def logged(report: rl.StepReport) -> None:
        await progress.step(report.step, report.metrics)
        if on_logged is not None:
            await on_logged(report)

    return after, logged


def _algorithm_of(backend: Any, config: RLTrainingConfig) -> Algorithm:
    """The backend's main algorithm, or one without terms for a backend with a loss function of its own."""
    known = getattr(backend, "algorithms", {}).get(FIRST)
    if known is not None and config.baseline is None:
        return known  # type: ignore[no-any-return]
    advantage = bind(baseline, {"value": config.baseline or 0.0})
    return Algorithm(advantage, "token_mean", ()) if known is None else known._replace(advantage=advantage)


def _reward_of(reward_fn: RewardFn | None, config: Any) -> RewardFn | None:
    if reward_fn is not None:
        return graded(reward_fn)
    if config.reward_fn is not None or config.generate_fn is None:
        return None
    return lambda sample: compute_reward(sample) if "correct" in sample.metadata else sample.reward


def _settings_of(config: RLTrainingConfig, rollouts: Any) -> RLSettings:
    """The settings of the loop. Raises ConfigError if the rollouts are sampled at another temperature."""
    endpoint, minibatches, temperature = rollouts.endpoint, config.minibatches, config.temperature
    if config.batch_size is not None:
        minibatches = math.ceil(rollouts.batch_size * rollouts.n_samples_per_prompt / config.batch_size)
    if temperature is None:
        temperature = 1.0 if endpoint is None else endpoint.temperature
    elif endpoint is not None and endpoint.temperature != temperature:
        differ = (
            f"the Endpoint samples at temperature {endpoint.temperature:g} and RLTrainingConfig has {temperature:g}"
        )
        raise ConfigError(f"{differ}; leave temperature out of RLTrainingConfig, or give both the same")
    if temperature <= 0:
        raise ConfigError(
            f"the Endpoint samples at temperature {temperature:g}, and greedy replies cannot be trained; give "
            "Endpoint(temperature=1.0), or another number above 0"
        )
    return RLSettings(
        config.num_steps, config.sync_every, temperature, config.response_tokens_max, minibatches, config.staleness
    )


def _checkpoint_servers(engines: Sequence[Any]) -> list[Any]:
    """The servers that load checkpoints; all or none of the engines."""
    servers = [engine for engine in engines if hasattr(engine, "update_weights_from_checkpoint")]
    if servers and len(servers) < len(engines):
        raise ConfigError("inference_engines mixes servers that load checkpoints with other engines; give one kind")
    return servers


# --- samples instead of a manager or a buffer -------------------------------------------------------------------------


def _manager_of(manager: Any, buffer: Any, samples: Sequence[Sample] | None, config: RLTrainingConfig) -> Any:
    """The manager, with a buffer. Raises ConfigError."""
    if manager is None:
        if not samples:
            raise ConfigError("run_rl_training needs a rollout_manager, or samples to train on; both are missing")
        return _replay(samples, config)
    own = manager.own_buffer
    if buffer is not None and own is not None and buffer is not own:
        raise ConfigError("data_buffer is not the manager's own buffer; give the same one, or leave it out")
    if samples is not None:
        if buffer is not None or own is not None:
            raise ConfigError("the prompts come from data_buffer and from samples; give one of the two")
        buffer = DataBuffer([_task_of(sample) for sample in samples])
    if buffer is not None:
        manager.data_buffer = buffer
    return manager


def _task_of(sample: Sample) -> Task:
    """The task of a sample: its prompt, and its metadata as `answer`, `id` and `info`."""
    rest = dict(sample.metadata)
    answer, identity = rest.pop("answer", None), rest.pop("id", None)
    return Task(sample.prompt, answer, rest, identity)


def _replay(samples: Sequence[Sample], config: RLTrainingConfig) -> AsyncRolloutManager:
    """A manager whose `generate_fn` gives these samples, group by group. Raises ConfigError."""
    groups: dict[object, list[Sample]] = {}
    for place, sample in enumerate(map(with_lists, samples)):
        if not sample.tokens:
            raise ConfigError(f"sample {place} has no tokens: give a rollout_manager to sample replies, or its tokens")
        key = ("single", place) if sample.group_index is None else sample.group_index
        groups.setdefault(key, []).append(sample)
    sizes = sorted({len(group) for group in groups.values()})
    if len(sizes) > 1:
        raise ConfigError(f"the groups (group_index) have {sizes[0]} to {sizes[-1]} samples; give each the same number")
    numbered = {str(number): group for number, group in enumerate(groups.values())}
    wanted = max(1, (config.batch_size or len(samples)) // sizes[0])
    return AsyncRolloutManager(
        DataBuffer(list(numbered), seed=0),
        RolloutConfig(wanted, sizes[0], generate_fn=lambda prompts: numbered[prompts[0]]),
    )
