"""The reinforcement loop: generate, train, sync; read from top to bottom in one sitting.

`run_rl_training` is a pure function over stateful parts: it keeps nothing, mutates none of its arguments, and returns
the metrics. One optimizer step a batch; the anchor of the ratio is the sampler's own logprob. Left out: sampling
ahead of the weights, several optimizer steps a batch, a reference model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rollouts.inference.base import InferenceBackend, WeightUpdate
from rollouts.loggers.base import MetricsLogger
from rollouts.training.algorithms.advantages import group_advantages
from rollouts.training.algorithms.algorithm import Algorithm
from rollouts.training.batching import make_batch
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.rollout_gen.groups import Group, group_samples, rollout_metrics
from rollouts.training.rollout_gen.manager import AsyncRolloutManager
from rollouts.training.types import StepResult, TrainBatch, TrainingBackend
from rollouts.types import Sample

__all__ = ["PreparedBatch", "RLTrainingConfig", "StepReport", "prepare_rl_batch", "run_rl_training", "sync_weights"]


@dataclass(frozen=True)
class RLTrainingConfig:
    """How many steps, how often the engines get the weights, and the temperature that the rollouts were sampled at."""

    num_steps: int
    sync_every: int = 1
    temperature: float = 1.0
    response_tokens_max: int | None = None  # L_max of the aggregation dr_grpo

    def __post_init__(self) -> None:
        assert self.num_steps >= 0, f"num_steps must be >= 0, got {self.num_steps}"
        assert self.sync_every > 0, f"sync_every must be > 0, got {self.sync_every}"
        assert self.temperature > 0, f"temperature must be > 0, got {self.temperature}"


class PreparedBatch(NamedTuple):
    """What a step trains on: the samples of the kept groups, their advantages [N] by `rollout_index`, and the batch."""

    samples: list[Sample]
    advantages: list[float]
    batch: TrainBatch


class StepReport(NamedTuple):
    """What whoever watches is told after each step (0-based). `advantages` [N] are those of the kept groups'
    rollouts.
    """

    step: int
    metrics: dict[str, float]
    groups: list[Group]
    advantages: list[float]


OnStep = Callable[[StepReport], Awaitable[dict[str, float]]]
"""Called after each step's training; the metrics that it returns (an evaluation, say) are logged with the step's."""


async def run_rl_training(
    backend: TrainingBackend,
    data_buffer: DataBuffer,
    rollout_manager: AsyncRolloutManager,
    inference_engines: Sequence[InferenceBackend],
    config: RLTrainingConfig,
    metrics_logger: MetricsLogger | None = None,
    *,
    algorithm: Algorithm,
    on_samples: Callable[[list[Sample], int], None] | None = None,
    on_step: OnStep | None = None,
) -> list[dict[str, float]]:
    """Train for `config.num_steps` steps; returns one dict of metrics a step.

    `algorithm` is the one that `backend` was composed with under the name "main"; here it says the advantage and the
    aggregation. Cancellation between two awaits leaves whole steps: the weights are those of the last finished one.

    Raises:
        RewardError: a reward returned something that is not a reward.
        TrainingError: a loss or advantage did.
        InferenceError: an engine does not serve the weights it was given.
    """
    history: list[dict[str, float]] = []
    for step in range(config.num_steps):
        start = time.perf_counter()
        rollouts = await rollout_manager.generate_batch()
        prepared = prepare_rl_batch(rollouts.kept, algorithm, config, step)
        if on_samples is not None:
            on_samples(prepared.samples, step)
        trained = await _train(backend, prepared.batch)
        if (step + 1) % config.sync_every == 0:
            trained |= await sync_weights(inference_engines, backend.version)
        sampled = sum(t.sampled_count for g in rollouts.groups for e in g.episodes for t in e.trajectories)
        metrics = {
            **rollout_metrics(rollouts.groups),
            **trained,
            "data/epoch": float(data_buffer.epoch_id),
            "perf/gen_tok_s": sampled / max(rollouts.seconds, 1e-9),
            "time/generate": rollouts.seconds,
            "time/step": time.perf_counter() - start,
        }
        if on_step is not None:
            metrics |= await on_step(StepReport(step, metrics, rollouts.groups, prepared.advantages))
        if metrics_logger is not None:
            metrics_logger.log(metrics, step)
        history.append(metrics)
    return history


def prepare_rl_batch(
    groups: Sequence[Group], algorithm: Algorithm, config: RLTrainingConfig, step: int
) -> PreparedBatch:
    """Samples, advantages and the batch of these groups. Raises TrainingError where the advantage is at fault."""
    samples = group_samples(groups)
    advantages: list[float] = []
    for group in groups:
        lengths = [sum(t.sampled_count for t in episode.trajectories) for episode in group.episodes]
        advantages += group_advantages(algorithm.advantage, group.rewards, lengths=lengths)
    batch = make_batch(
        samples,
        advantages,
        aggregation=algorithm.aggregation,
        step=step,
        temperature=config.temperature,
        l_max=config.response_tokens_max,
    )
    return PreparedBatch(samples, advantages, batch)


async def sync_weights(engines: Sequence[InferenceBackend], version: int) -> dict[str, float]:
    """Make every engine serve `version`, one after another. Raises InferenceError where one cannot."""
    start = time.perf_counter()
    for engine in engines:
        await engine.update_weights(WeightUpdate(version))
    return {"sync/version": float(version), "sync/seconds": time.perf_counter() - start}


async def _train(backend: TrainingBackend, batch: TrainBatch) -> dict[str, float]:
    """One batch, one optimizer step: both are submitted before either is awaited."""
    start = time.perf_counter()
    forward_backward = backend.forward_backward(batch)
    optim_step = backend.optim_step()
    metrics = dict(await forward_backward)
    result: StepResult = await optim_step
    seconds = time.perf_counter() - start
    tokens = sum(len(row.tokens) for row in batch.rows)
    metrics |= result.metrics
    metrics |= {"time/forward_backward": seconds, "perf/train_tok_s": tokens / max(seconds, 1e-9)}
    return {name: value for name, value in metrics.items() if not math.isnan(value)}
