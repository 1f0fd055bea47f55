"""`run_sft_training` and `run_rl_training`: the loops as plain calls, with printed lines and checkpoints.

    metrics = await run_sft_training(backend, samples, SFTTrainingConfig(num_steps=1000, batch_size=4))
    metrics = await run_rl_training(backend, buffer, manager, [SGLangEngine(base_url=...)], RLTrainingConfig(1000))
    metrics = await run_rl_training(backend=backend, samples=samples, config=config, reward_fn=my_reward)

They take any backend, manager and engine of this package, fill in what the loops need (`rollouts.training.loops`), and
call them. For a loop that you write by hand:

    rewards = [compute_reward(sample) for sample in batch.samples]
    metrics = await backend.forward_backward(prepare_grpo_batch(batch, rewards, config)).result()
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollouts.errors import ConfigError, TrainingError
from rollouts.loggers.base import MetricsLogger
from rollouts.plugins.signature import bind
from rollouts.training.algorithms.advantages import baseline
from rollouts.training.algorithms.algorithm import FIRST, Algorithm, Stage
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.loops import rl, sft
from rollouts.training.loops.rl_batch import RLSettings
from rollouts.training.rollout_gen.groups import group_samples
from rollouts.training.weights.sync import WeightSyncManager
from rollouts.types import Sample, Task
from rollouts_notes.checkpoint_servers import sync_weights_to_engines
from rollouts_notes.manager import NO_ENGINE, AsyncRolloutManager, RewardFn
from rollouts_notes.rows import RolloutBatch, RolloutConfig, with_lists
from rollouts_notes.supervised import compute_advantages, prepare_sft_batch
from rollouts_notes.user_functions import graded

if TYPE_CHECKING:
    from torch import Tensor


# --- settings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SFTTrainingConfig:
    """The settings of `run_sft_training`. Every number of steps must be 0 or more.

    Args:
        num_steps: optimizer steps
        batch_size: samples of a step
        log_every: print a line every so many steps; 0: print nothing
        checkpoint_every: save the backend every so many steps; 0: never
        aggregation: how token losses become one number; a PyTorchTrainingBackend does not use it
        learning_rate: replaces the learning rate of a PyTorchTrainingBackend
        checkpoint_dir: where a backend without a `checkpoint_dir` of its own saves
    """

    num_steps: int
    batch_size: int
    log_every: int = 0
    checkpoint_every: int = 0
    aggregation: str | Callable[..., Any] = "token_mean"
    learning_rate: float | None = None
    checkpoint_dir: str = "checkpoints"

    def __post_init__(self) -> None:
        _check_numbers(self)


@dataclass(frozen=True)
class RLTrainingConfig:
    """The settings of `run_rl_training`.

    Args:
        num_steps: steps of the whole training
        sync_every: the engines get new weights after this many steps
        baseline: the advantage of a rollout is its reward minus this. None: the advantage of the backend's algorithm;
            0.0 for a PyTorchTrainingBackend, which has none
        log_every: print a line every so many steps; 0: print nothing
        checkpoint_every: save the backend every so many steps; 0: never
        batch_size: rollouts of an optimizer step, in whole groups. None: all rollouts of a step. For training on
            samples without a manager: the samples of a step
        temperature: the sampling temperature of the rollouts. None: the endpoint's, or 1 without one
        response_tokens_max: L_max of the aggregation dr_grpo and of overlong shaping
        minibatches: optimizer steps for each batch
        staleness: how many steps sampling may be ahead of training; the manager has the same
        learning_rate: replaces the learning rate of a PyTorchTrainingBackend
        checkpoint_dir: where a backend without a `checkpoint_dir` of its own saves
    """

    num_steps: int
    sync_every: int = 1
    baseline: float | None = None
    log_every: int = 0
    checkpoint_every: int = 0
    batch_size: int | None = None
    temperature: float | None = None
    response_tokens_max: int | None = None
    minibatches: int = 1
    staleness: int = 0
    learning_rate: float | None = None
    checkpoint_dir: str = "checkpoints"

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.temperature is not None and not 0 < self.temperature < math.inf:
            raise ConfigError(f"RLTrainingConfig: temperature is {self.temperature}; expected a number above 0")


def _check_numbers(config: Any) -> None:
    """Raise ConfigError for a number that is out of its range."""
    at_least_one = ("batch_size", "sync_every", "minibatches")
    for name in (*at_least_one, "num_steps", "log_every", "checkpoint_every", "learning_rate", "staleness"):
        value, least = getattr(config, name, None), int(name in at_least_one)
        if value is not None and value < least:
            raise ConfigError(f"{type(config).__name__}: {name} is {value}; expected {least} or more")


def as_config(kind: type[Any], given: Any) -> Any:
    """`given` as a config of `kind`: its own fields, with the defaults of the others. Raises ConfigError for anything
    without these fields.
    """
    if isinstance(given, kind):
        return given
    names = [field.name for field in dataclasses.fields(kind) if hasattr(given, field.name)]
    if "num_steps" not in names:
        raise ConfigError(f"config is {given!r}; expected config={kind.__name__}(num_steps=...)")
    return kind(**{name: getattr(given, name) for name in names})


# --- supervised -------------------------------------------------------------------------------------------------------


async def run_sft_training(
    backend: Any,
    samples: Sequence[Sample],
    config: Any,
    metrics_logger: MetricsLogger | None = None,
    *,
    on_step: Callable[[int, dict[str, float]], Awaitable[dict[str, float]]] | None = None,
    on_logged: Callable[[int, dict[str, float]], Awaitable[None]] | None = None,
    **options: Any,
) -> list[dict[str, float]]:
    """Train on `samples`, `config.batch_size` at a time, for `config.num_steps` steps. Returns each step's metrics.

    Metrics have `step`, and the short names `loss`, `grad_norm` and `lr`. `rollouts.training.loops.sft` has the loop
    itself, its other `options`, and what it raises. Also raises ConfigError if the config does not fit.

    Args:
        backend: a PyTorchTrainingBackend, or a backend of `create_pytorch_backend`
        config: an SFTTrainingConfig or a TrainingConfig
    """
    config = as_config(SFTTrainingConfig, config)
    if not samples:
        raise ConfigError("run_sft_training needs samples to train on; samples is empty")
    _set_learning_rate(backend, config.learning_rate)
    progress = Progress(config, backend)
    progress.begin("SFT", samples=len(samples), steps=config.num_steps, batch_size=config.batch_size)

    async def after(step: int, metrics: dict[str, float]) -> dict[str, float]:
        added = short_names(metrics)
        return added | (await on_step(step, metrics | added) if on_step is not None else {})

    async def logged(step: int, metrics: dict[str, float]) -> None:
        await progress.step(step, metrics)
        if on_logged is not None:
            await on_logged(step, metrics)

    rows = [with_lists(sample) for sample in samples]
    settings = sft.SFTSettings(config.num_steps, config.batch_size, config.aggregation)
    history = await sft.train_sft(backend, rows, settings, metrics_logger, on_step=after, on_logged=logged, **options)
    progress.say("Training complete!")
    return [metrics | {"step": step} for step, metrics in enumerate(history, options.get("first_step", 0))]


# --- reinforcement learning -------------------------------------------------------------------------------------------


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
    `rollouts.training.loops.rl` has the loop itself, and what it raises. Also raises ConfigError if the arguments do
    not fit together. Other `options` are `schedule` (the stages), `syncing`, `start`, `on_samples` and `should_stop`.

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
    _set_learning_rate(backend, config.learning_rate)
    manager = _manager_of(rollout_manager, data_buffer, samples, config)
    manager.connect(backend)
    if inference_engines is None:
        inference_engines = [] if manager.inference in (None, NO_ENGINE) else [manager.inference]
    progress = Progress(config, backend, _servers_of(inference_engines))
    if progress.servers and options.get("syncing") is None:
        options["syncing"] = progress

    async def after(report: rl.StepReport) -> dict[str, float]:
        rewards = [each.reward for each in group_samples(report.groups) if each.reward is not None]
        extremes = {"max_reward": max(rewards), "min_reward": min(rewards)} if rewards else {}
        added = short_names(report.metrics) | extremes
        return added | (await on_step(report._replace(metrics=report.metrics | added)) if on_step is not None else {})

    async def logged(report: rl.StepReport) -> None:
        await progress.step(report.step, report.metrics)
        if on_logged is not None:
            await on_logged(report)

    progress.begin("RL", steps=config.num_steps, weight_sync_every=f"{config.sync_every} steps")
    settings, of_config = _settings_of(config, manager.config), manager.reward_fn
    stages = tuple(options.pop("schedule", ())) or (Stage(0, FIRST, algorithm or _algorithm_of(backend, config)),)
    syncing = options.pop("syncing", None) or WeightSyncManager(inference_engines, temperature=settings.temperature)
    start = options.pop("start", rl.BEGINNING)
    given: dict[str, Any] = {"stages": stages, "syncing": syncing, "metrics_logger": metrics_logger, "start": start}
    given["callbacks"] = rl.Callbacks(on_step=after, on_logged=logged, **options)
    manager.reward_fn = _reward_of(reward_fn, manager.config) or of_config
    try:
        async with contextlib.nullcontext() if manager.is_open else manager:
            history = await rl.train_rl(backend, manager, settings, **given)
    finally:
        manager.reward_fn = of_config
    progress.say("RL training complete!")
    return [metrics | {"step": step} for step, metrics in enumerate(history, start.step)]


def _servers_of(engines: Sequence[Any]) -> list[Any]:
    """The servers that load checkpoints; all or none of the engines. Raises ConfigError."""
    servers = [engine for engine in engines if hasattr(engine, "update_weights_from_checkpoint")]
    if servers and len(servers) < len(engines):
        raise ConfigError("inference_engines mixes servers that load checkpoints with other engines; give one kind")
    return servers


def _algorithm_of(backend: Any, config: RLTrainingConfig) -> Algorithm:
    """The backend's main algorithm, or one without terms for a backend with a loss function of its own."""
    known: Algorithm | None = getattr(backend, "algorithms", {}).get(FIRST)
    if known is not None and config.baseline is None:
        return known
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
    minibatches, temperature = config.minibatches, config.temperature
    if config.batch_size is not None:
        minibatches = math.ceil(rollouts.batch_size * rollouts.n_samples_per_prompt / config.batch_size)
    if rollouts.endpoint is not None:
        sampled = rollouts.endpoint.temperature
        what = f"the Endpoint samples at temperature {sampled:g}"
        if temperature is not None and sampled != temperature:
            advice = "leave temperature out of RLTrainingConfig, or give both the same"
            raise ConfigError(f"{what} and RLTrainingConfig has {temperature:g}; {advice}")
        if sampled <= 0:
            advice = "Endpoint(temperature=1.0), or another number above 0"
            raise ConfigError(f"{what}, and greedy replies cannot be trained; give {advice}")
        temperature = sampled
    own = {name: getattr(config, name) for name in ("num_steps", "sync_every", "response_tokens_max", "staleness")}
    return RLSettings(temperature=1.0 if temperature is None else temperature, minibatches=minibatches, **own)


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
    rollouts = RolloutConfig(wanted, sizes[0], generate_fn=lambda prompts: numbered[prompts[0]])
    return AsyncRolloutManager(DataBuffer(list(numbered), seed=0), rollouts)


def compute_reward(sample: Sample) -> float:
    """1.0 if the sample's metadata has a true `correct`, else 0.0.

    >>> compute_reward(Sample(metadata={"correct": True})), compute_reward(Sample())
    (1.0, 0.0)
    """
    return 1.0 if sample.metadata.get("correct", False) else 0.0


def prepare_grpo_batch(batch: RolloutBatch, rewards: Sequence[float], config: Any) -> dict[str, Tensor]:
    """`prepare_sft_batch` of the batch's samples, and `advantages` [B] from `config.baseline`.

    Raises TrainingError if the number of rewards is not that of the samples.
    """
    import torch

    if len(rewards) != len(batch.samples):
        raise TrainingError(f"{len(rewards)} rewards for {len(batch.samples)} samples; give one for each")
    advantages = compute_advantages(rewards, config.baseline or 0.0)
    return {**prepare_sft_batch(batch.samples), "advantages": torch.tensor(advantages, dtype=torch.float32)}


# --- lines, checkpoints, weights --------------------------------------------------------------------------------------


_SHOWN = {
    "mean_reward": ("reward/mean", "reward={:.2f}"),
    "loss": ("policy/loss", "loss={:.4f}"),
    "grad_norm": ("optim/grad_norm", "grad_norm={:.4f}"),
    "lr": ("optim/lr", "lr={:.4e}"),
}
"""The short names of metrics: the names that the loops give them, and what is printed of them."""


class Progress:
    """Prints lines and saves checkpoints by `log_every` and `checkpoint_every` of a config. Gives `servers` new weights
    through a checkpoint, as `WeightSyncManager` does through an engine's own ways.
    """

    def __init__(self, config: Any, backend: Any, servers: Sequence[Any] = ()) -> None:
        self._config, self._backend, self.servers = config, backend, servers
        self._folder, self._saved = Path(config.checkpoint_dir), (-1, Path())

    def begin(self, kind: str, **numbers: object) -> None:
        """Print the head: one line for each number."""
        self.say(f"Starting {kind} training...")
        for name, value in numbers.items():
            self.say(f"  {name.replace('_', ' ').capitalize()}: {value}")

    async def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print and save after a step (0-based), if it is time."""
        log_every, save_every = self._config.log_every, self._config.checkpoint_every
        if log_every > 0 and step % log_every == 0:
            shown = [words.format(metrics[name]) for name, (_, words) in _SHOWN.items() if name in metrics]
            self.say(f"Step {step}: {', '.join(shown)}")
        if save_every and (step + 1) % save_every == 0:
            self.say(f"  Saved checkpoint to {await self._save(step + 1, metrics)}")

    def say(self, line: str) -> None:
        """Print a line if the config asks for lines."""
        if self._config.log_every > 0:
            print(line)

    async def sync(self, backend: Any) -> dict[str, float]:
        """Save the backend, and make every server load the folder. Raises InferenceError, CheckpointError."""
        await sync_weights_to_engines(self.servers, str(await self._save(backend.version, {})))
        self.say(f"  Synced weights to {len(self.servers)} engines")
        return {"sync/version": float(backend.version)}

    async def _save(self, step: int, metrics: Mapping[str, float]) -> Path:
        """Save the backend as `step_000010`, once for each step: with its `save_checkpoint`, else with `save` into the
        config's folder. Raises CheckpointError.
        """
        if self._saved[0] != step:
            if hasattr(self._backend, "save_checkpoint"):
                path = Path(await self._backend.save_checkpoint(step, metrics))
            else:
                path = self._folder.absolute() / f"step_{step:06d}"
                await self._backend.save(str(path), {"step": step, "metrics": dict(metrics)})
            self._saved = (step, path)
        return self._saved[1]


def short_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that have a short name, under it; those that already have it are left out.

    >>> short_names({"reward/mean": 0.5, "optim/lr": 1e-3, "time/step": 2.0})
    {'mean_reward': 0.5, 'lr': 0.001}
    """
    return {short: metrics[name] for short, (name, _) in _SHOWN.items() if name in metrics and short not in metrics}


def _set_learning_rate(backend: Any, learning_rate: float | None) -> None:
    """Set the learning rate of a backend with an `optimizer`. Raises ConfigError for any other backend that was made
    with another rate, and if a scheduler sets the rate.
    """
    made_with = getattr(backend, "lr", None)
    if learning_rate is None or learning_rate == made_with:
        return
    if not hasattr(backend, "optimizer") or getattr(backend, "scheduler", None) is not None:
        reason = "a scheduler sets its learning rate" if made_with is None else f"it was made with lr={made_with:g}"
        what = f"the config's learning_rate is {learning_rate:g}, and the {type(backend).__name__} does not take it"
        raise ConfigError(f"{what}: {reason}; make the backend with this rate, or leave learning_rate out")
    for group in backend.optimizer.param_groups:
        group["lr"] = learning_rate
