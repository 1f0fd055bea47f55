"""The reinforcement loop: generate, train, sync; read from top to bottom in one sitting.

`run_rl_training` is a pure function over stateful parts: it keeps nothing, mutates none of its arguments, and returns
the metrics. What becomes of a batch before it is trained on stands in rl_batch.py. Where the manager plays steps ahead,
generating goes on beside training, and stands still only while the weights change and what is done between two steps is
done. Left out: how that comes about (`rollout_gen.manager`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from rollouts.errors import ConfigError
from rollouts.inference.base import InferenceBackend
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
from rollouts.training.rollout_gen.manager import AsyncRolloutManager, RolloutStep
from rollouts.training.types import StepResult, TrainBatch, TrainingBackend
from rollouts.training.weight_sync import WeightSyncManager
from rollouts.types import Sample

__all__ = ["LoopState", "PreparedBatch", "RLTrainingConfig", "StepReport", "prepare_rl_batch", "run_rl_training"]


class LoopState(NamedTuple):
    """Where the loop stands: `step` steps are done. `kl_coefficients` are those of steered KL terms, by the names of
    the stages that have one. `begun_with` are the versions of the policy with which the last steps began, as many as
    tell how old a token is that may be trained on.
    """

    step: int = 0
    kl_coefficients: Mapping[str, float] = {}
    begun_with: Sequence[int] = ()


class StepReport(NamedTuple):
    """What whoever watches is told after each step (0-based). `advantages` [N] are those of the kept groups' rollouts;
    with `state` the loop can be started again after this step.
    """

    step: int
    metrics: dict[str, float]
    groups: list[Group]
    advantages: list[float]
    state: LoopState


BEGINNING = LoopState()

_VERSIONS_KEPT = 64  # beyond what is trained on: how old tokens are that are dropped, or carried over without a bound

OnStep = Callable[[StepReport], Awaitable[dict[str, float]]]
"""Called after each step's training; the metrics that it returns (an evaluation, say) are logged with the step's."""

OnLogged = Callable[[StepReport], Awaitable[None]]
"""Called once the step is logged, with all of its metrics. What is saved here tells of nothing that a logger lacks."""


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
    on_logged: OnLogged | None = None,
    syncing: WeightSyncManager | None = None,
    start: LoopState = BEGINNING,
) -> list[dict[str, float]]:
    """Train until `config.num_steps` steps are done; returns one dict of metrics a step that this call took.

    A `start` other than the beginning goes on after the step whose report had that state; the backend, the buffer and
    the manager must stand where they stood then, and the engines must serve the backend's weights.

    `algorithm` is the one that `backend` was composed with under the name "main"; a `schedule` says which one holds
    from which step on, the first included. Cancellation between two awaits leaves whole steps: the weights are those of
    the last finished one.

    `syncing` is over these engines, and remembers what they were sent before this call.

    With a `config.staleness` the manager's must be the same. Sampling goes on while a step is trained on; in between,
    weights are changed, logged, evaluated and saved while the manager holds.

    Raises:
        ConfigError: loop and manager do not have the same staleness.
        RewardError: a reward returned something that is not a reward.
        TrainingError: a loss or advantage did.
        InferenceError: an engine does not serve the weights it was given.
    """
    ahead = rollout_manager.config.staleness
    if ahead != config.staleness:
        raise ConfigError(
            f"the manager's RolloutConfig has a staleness of {ahead} and the loop one of {config.staleness}: tokens "
            "would be older than the loop allows, or nothing would be sampled ahead; give both the same"
        )
    stages = tuple(schedule) or (Stage(0, "main", algorithm),)
    coefficients = _coefficients(stages, start)
    begun_with = tuple(start.begun_with)
    syncing = syncing or WeightSyncManager(inference_engines, temperature=config.temperature)
    rollout_manager.policy_version = backend.version
    history: list[dict[str, float]] = []
    for step in range(start.step, config.num_steps):
        began = time.perf_counter()
        stage = stage_at(stages, step)
        rollouts = await rollout_manager.generate_batch(wanted=config.num_steps - step)
        waited = time.perf_counter() - began
        begun_with = (*begun_with, backend.version)[-_VERSIONS_KEPT - (config.lag_max or 0) :]
        prepared = prepare_rl_batch(
            rollouts.kept, stage.algorithm, config, step, name=stage.name, begun_with=begun_with
        )
        kl = stage.algorithm.kl
        prepared.batch.kl_coefficient = None if kl is None else coefficients.get(kl)
        if on_samples is not None:
            on_samples(prepared.samples, step)
        trained = await _train(backend, prepared.batch, stage.algorithm, config)
        coefficients |= _steered(kl, coefficients, trained)
        async with rollout_manager.hold():
            if (step + 1) % config.sync_every == 0:
                trained |= await syncing.sync(backend)
                rollout_manager.policy_version = backend.version
            metrics = _step_metrics(rollouts, prepared.metrics | trained, data_buffer)
            metrics |= {"time/wait": waited, "time/step": time.perf_counter() - began}
            advantages = rollout_advantages(prepared.batch, len(prepared.advantages))
            state = LoopState(step + 1, _by_stage(stages, coefficients), begun_with)
            report = StepReport(step, metrics, rollouts.groups, advantages, state)
            if on_step is not None:
                metrics |= await on_step(report)
            if metrics_logger is not None:
                metrics_logger.log(metrics, step)
            if on_logged is not None:
                await on_logged(report)
        history.append(metrics)
    return history


def _step_metrics(rollouts: RolloutStep, trained: dict[str, float], data_buffer: DataBuffer) -> dict[str, float]:
    """What is told of a step: its rollouts, its training, and how fast it was sampled."""
    sampled = sum(sum(group.lengths) for group in rollouts.groups)
    return {
        **trained,
        **rollout_metrics(rollouts.groups),
        **rollouts.metrics,
        "data/epoch": float(data_buffer.epoch_id),
        "perf/gen_tok_s": sampled / max(rollouts.seconds, 1e-9),
        "time/generate": rollouts.seconds,
    }


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


def _coefficients(stages: Sequence[Stage], start: LoopState) -> dict[KL, float]:
    """The coefficients that were steered so far, by their KL terms, which stages may share."""
    kept = start.kl_coefficients
    return {s.algorithm.kl: kept[s.name] for s in stages if s.algorithm.kl is not None and s.name in kept}


def _by_stage(stages: Sequence[Stage], coefficients: Mapping[KL, float]) -> dict[str, float]:
    """The same by the stages' names: a function cannot be written down."""
    named = [(stage.name, stage.algorithm.kl) for stage in stages]
    return {name: coefficients[kl] for name, kl in named if kl is not None and kl in coefficients}


def _steered(kl: KL | None, coefficients: dict[KL, float], metrics: dict[str, float]) -> dict[KL, float]:
    """The next coefficient of this KL term, where it has a target and a KL was measured. A later stage with the same
    term goes on from there.
    """
    if kl is None or kl.target is None or "policy/kl_ref" not in metrics:
        return {}
    current = coefficients.get(kl, kl.coefficient)
    return {kl: steer_coefficient(current, metrics["policy/kl_ref"], kl.target, kl.horizon)}
