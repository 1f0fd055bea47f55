"""The reinforcement loop: generate, train, sync; read from top to bottom in one sitting.

`run_rl_training` is a pure function over stateful parts: it keeps nothing, mutates none of its arguments, and returns
the metrics. What becomes of a batch before it is trained on stands in rl_batch.py. Left out: sampling ahead of the
weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from rollouts.inference.base import InferenceBackend, WeightUpdate
from rollouts.loggers.base import MetricsLogger
from rollouts.training.algorithms.algorithm import KL, Algorithm
from rollouts.training.algorithms.kl import steer_coefficient
from rollouts.training.algorithms.schedule import Stage, stage_at
from rollouts.training.batching import part_batch
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.loops.rl_batch import (
    PreparedBatch,
    RLTrainingConfig,
    complete_batch,
    prepare_rl_batch,
    rollout_advantages,
)
from rollouts.training.rollout_gen.groups import Group, rollout_metrics
from rollouts.training.rollout_gen.manager import AsyncRolloutManager
from rollouts.training.types import StepResult, TrainBatch, TrainingBackend
from rollouts.types import Sample

__all__ = ["PreparedBatch", "RLTrainingConfig", "StepReport", "prepare_rl_batch", "run_rl_training", "sync_weights"]


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
    schedule: Sequence[Stage] = (),
    on_samples: Callable[[list[Sample], int], None] | None = None,
    on_step: OnStep | None = None,
) -> list[dict[str, float]]:
    """Train for `config.num_steps` steps; returns one dict of metrics a step.

    `algorithm` is the one that `backend` was composed with under the name "main"; a `schedule` says which one holds
    from which step on, the first included. Cancellation between two awaits leaves whole steps: the weights are those of
    the last finished one.

    Raises:
        RewardError: a reward returned something that is not a reward.
        TrainingError: a loss or advantage did.
        InferenceError: an engine does not serve the weights it was given.
    """
    stages = tuple(schedule) or (Stage(0, "main", algorithm),)
    coefficients: dict[KL, float] = {}  # of the KL terms that are steered
    history: list[dict[str, float]] = []
    for step in range(config.num_steps):
        start = time.perf_counter()
        stage = stage_at(stages, step)
        rollouts = await rollout_manager.generate_batch()
        prepared = prepare_rl_batch(rollouts.kept, stage.algorithm, config, step, name=stage.name)
        kl = stage.algorithm.kl
        prepared.batch.kl_coefficient = None if kl is None else coefficients.get(kl)
        if on_samples is not None:
            on_samples(prepared.samples, step)
        trained = await _train(backend, prepared.batch, stage.algorithm, config)
        coefficients |= _steered(kl, coefficients, trained)
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
        advantages = rollout_advantages(prepared.batch, len(prepared.advantages))
        if on_step is not None:
            metrics |= await on_step(StepReport(step, metrics, rollouts.groups, advantages))
        if metrics_logger is not None:
            metrics_logger.log(metrics, step)
        history.append(metrics)
    return history


async def sync_weights(engines: Sequence[InferenceBackend], version: int) -> dict[str, float]:
    """Make every engine serve `version`, one after another. Raises InferenceError where one cannot."""
    start = time.perf_counter()
    for engine in engines:
        await engine.update_weights(WeightUpdate(version))
    return {"sync/version": float(version), "sync/seconds": time.perf_counter() - start}


async def _train(
    backend: TrainingBackend, batch: TrainBatch, algorithm: Algorithm, config: RLTrainingConfig
) -> dict[str, float]:
    """What the loss needs, then one optimizer step a minibatch; both calls are submitted before either is awaited.

    Of several minibatches the means of what they report are given, the largest of what is a maximum.
    """
    start = time.perf_counter()
    await complete_batch(backend, batch, algorithm, minibatches=config.minibatches)
    parts = part_batch(batch, config.minibatches, algorithm.aggregation, config.response_tokens_max)
    reports: list[dict[str, float]] = []
    for part in parts:
        forward_backward = backend.forward_backward(part)
        optim_step = backend.optim_step()
        metrics = dict(await forward_backward)
        result: StepResult = await optim_step
        reports.append(metrics | result.metrics)
    seconds = time.perf_counter() - start
    tokens = sum(len(row.tokens) for row in batch.rows)
    metrics = reports[0] if len(reports) == 1 else _joined(reports)
    metrics |= {"time/forward_backward": seconds, "perf/train_tok_s": tokens / max(seconds, 1e-9)}
    if algorithm.kl is not None:
        kept = batch.kl_coefficient
        metrics["policy/kl_coef"] = algorithm.kl.coefficient if kept is None else kept
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def _joined(reports: Sequence[dict[str, float]]) -> dict[str, float]:
    """The metrics of several optimizer steps of one batch as one.

    Means, or the largest of what is a maximum, over the steps that were not skipped. How far sampler and trainer are
    apart is what the first one saw: later ones see a policy that has moved.
    """
    done = [report for report in reports if not report.get("optim/skipped")] or list(reports)
    joined = {}
    for name in dict.fromkeys(name for report in done for name in report):
        values = [report[name] for report in done if name in report]
        if name.startswith("mismatch/"):
            joined[name] = values[0]
        else:
            joined[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
    joined["optim/skipped"] = sum(report.get("optim/skipped", 0.0) for report in reports) / len(reports)
    return joined


def _steered(kl: KL | None, coefficients: dict[KL, float], metrics: dict[str, float]) -> dict[KL, float]:
    """The next coefficient of this KL term, where it has a target and a KL was measured. A later stage with the same
    term goes on from there.
    """
    if kl is None or kl.target is None or "policy/kl_ref" not in metrics:
        return {}
    current = coefficients.get(kl, kl.coefficient)
    return {kl: steer_coefficient(current, metrics["policy/kl_ref"], kl.target, kl.horizon)}
