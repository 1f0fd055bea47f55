"""The reinforcement loop: generate, train, sync; read from top to bottom in one sitting.

`run_rl_training` is a pure function over stateful parts: it keeps nothing, mutates none of its arguments, and returns
the metrics. rl_batch.py makes a batch of rollouts. Where the manager prefetches steps, sampling continues
beside training, and pauses only while the weights change and what is done between two steps is done. Left out: how that
comes about (`rollout_gen.manager`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from rollouts.errors import ConfigError
from rollouts.inference.base import InferenceBackend
from rollouts.loggers.base import MetricsLogger
from rollouts.training.algorithms.algorithm import KL, Algorithm, Stage, stage_at
from rollouts.training.algorithms.kl import steer_coefficient
from rollouts.training.batching import part_batch
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.loops.rl_batch import RLTrainingConfig, complete_batch, prepare_rl_batch, rollout_advantages
from rollouts.training.rollout_gen.groups import Group
from rollouts.training.rollout_gen.manager import AsyncRolloutManager
from rollouts.training.rollout_gen.metrics import rollout_metrics
from rollouts.training.rollout_gen.steps import RolloutStep
from rollouts.training.types import TrainBatch, TrainingBackend
from rollouts.training.weights.sync import WeightSyncManager
from rollouts.types import Sample

VERSIONS_KEPT = 64  # beyond what is trained on: how old tokens are that are dropped, or carried over without a bound


class LoopState(NamedTuple):
    """The progress of the loop: `step` steps are done. `kl_coefficients` are those of steered KL terms, by the names of
    the stages that have one. `start_versions` are the versions of the policy with which the last steps began, as many
    as the age of a token that may be trained on depends on.
    """

    step: int = 0
    kl_coefficients: Mapping[str, float] = {}
    start_versions: Sequence[int] = ()


class StepReport(NamedTuple):
    """What an observer is given after each step (0-based). `advantages` [N] are those of the kept groups' rollouts;
    with `state` the loop can be started again after this step.
    """

    step: int
    metrics: dict[str, float]
    groups: list[Group]
    advantages: list[float]
    state: LoopState


BEGINNING = LoopState()

OnStep = Callable[[StepReport], Awaitable[dict[str, float]]]
"""Called after each step's training; the metrics that it returns (an evaluation, say) are logged with the step's."""

OnLogged = Callable[[StepReport], Awaitable[None]]
"""Called once the step is logged, with all of its metrics: what is saved here is never ahead of the logs."""


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

    A `start` other than the beginning continues after the step whose report had that state; backend, buffer and manager
    must be as they were then, and the engines must serve the backend's weights. `algorithm` is the one that `backend`
    was composed with under the name "main"; a `schedule` says which one holds from which step on, the first included.
    `syncing` is over these engines, and remembers what they were sent before this call.

    The manager must have the staleness of `config`. With one, sampling continues while a step is trained on; between
    steps, weights are changed, logged, evaluated and saved while the manager holds. Cancellation between two awaits
    leaves whole steps: the weights are those of the last finished one.

    Raises ConfigError where loop and manager differ in staleness, RewardError or TrainingError for what a reward, loss
    or advantage returned, and InferenceError where an engine does not serve the weights that it was given.
    """
    _check_staleness(rollout_manager.config.staleness, config.staleness)
    stages = tuple(schedule) or (Stage(0, "main", algorithm),)
    coefficients = _coefficients(stages, start)
    start_versions = tuple(start.start_versions)
    syncing = syncing or WeightSyncManager(inference_engines, temperature=config.temperature)
    rollout_manager.policy_version = backend.version
    history: list[dict[str, float]] = []
    for step in range(start.step, config.num_steps):
        began = time.perf_counter()
        _, name, algorithm, _ = stage_at(stages, step)
        rollouts = await rollout_manager.generate_batch(wanted=config.num_steps - step)
        generated = time.perf_counter()
        start_versions = (*start_versions, backend.version)[-VERSIONS_KEPT - (config.lag_max or 0) :]
        samples, advantages, batch, metrics = prepare_rl_batch(
            rollouts.kept, algorithm, config, step, name=name, start_versions=start_versions
        )
        batch.kl_coefficient = coefficients.get(algorithm.kl)
        if on_samples is not None:
            on_samples(samples, step)
        prepared = time.perf_counter()
        await complete_batch(backend, batch, algorithm, minibatches=config.minibatches)
        reports = []
        for part in part_batch(batch, config.minibatches, algorithm.aggregation, config.response_tokens_max):
            forward_backward, optim_step = backend.forward_backward(part), backend.optim_step()
            report = dict(await forward_backward)
            reports.append(report | (await optim_step).metrics)
        metrics |= _training_metrics(reports, batch, algorithm.kl, time.perf_counter() - prepared)
        coefficients |= _steered(algorithm.kl, batch.kl_coefficient, metrics)
        async with rollout_manager.pause():
            if (step + 1) % config.sync_every == 0:
                metrics |= await syncing.sync(backend)
                rollout_manager.policy_version = backend.version
            metrics |= _sampling_metrics(rollouts, data_buffer.epoch_id)
            metrics |= {"time/wait": generated - began, "time/step": time.perf_counter() - began}
            state = LoopState(step + 1, _by_stage(stages, coefficients), start_versions)
            mean_advantages = rollout_advantages(batch, len(advantages))
            finished = StepReport(step, metrics, rollouts.groups, mean_advantages, state)
            history.append(await _observed(finished, on_step, metrics_logger, on_logged))
    return history


def _check_staleness(of_manager: int, of_loop: int) -> None:
    if of_manager != of_loop:
        differ = f"the manager's RolloutConfig has a staleness of {of_manager} and the loop one of {of_loop}"
        result = "tokens would be older than the loop allows, or nothing would be sampled ahead"
        raise ConfigError(f"{differ}: {result}; give both the same")


def _coefficients(stages: Sequence[Stage], start: LoopState) -> dict[KL | None, float]:
    """The coefficients that were steered so far, by their KL terms, which stages may share."""
    kept = start.kl_coefficients
    return {stage.algorithm.kl: kept[stage.name] for stage in stages if stage.algorithm.kl and stage.name in kept}


def _by_stage(stages: Sequence[Stage], coefficients: Mapping[KL | None, float]) -> dict[str, float]:
    """The same by the stages' names: a function cannot be written down."""
    return {stage.name: coefficients[kl] for stage in stages if (kl := stage.algorithm.kl) in coefficients}


def _steered(kl: KL | None, coefficient: float | None, metrics: Mapping[str, float]) -> dict[KL | None, float]:
    """The next coefficient of this KL term, where it has a target and a KL was measured. A later stage with the same
    term continues from there.
    """
    if kl is None or kl.target is None or "policy/kl_ref" not in metrics:
        return {}
    current = kl.coefficient if coefficient is None else coefficient
    return {kl: steer_coefficient(current, metrics["policy/kl_ref"], kl.target, kl.horizon)}


def _training_metrics(
    reports: Sequence[dict[str, float]], batch: TrainBatch, kl: KL | None, seconds: float
) -> dict[str, float]:
    """What the optimizer steps of a batch reported, and how fast they were. A NaN says nothing, and is no JSON."""
    tokens = sum(len(row.tokens) for row in batch.rows)
    metrics = _joined(reports) | {"time/forward_backward": seconds, "perf/train_tok_s": tokens / max(seconds, 1e-9)}
    if kl is not None:
        metrics["policy/kl_coef"] = kl.coefficient if batch.kl_coefficient is None else batch.kl_coefficient
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def _joined(reports: Sequence[dict[str, float]]) -> dict[str, float]:
    """The metrics of the optimizer steps of one batch as one.

    Means, or the largest of what is a maximum, over the steps that were not skipped. How far sampler and trainer are
    apart is what the first one saw: later ones see a policy that has moved.
    """
    if len(reports) == 1:
        return reports[0]
    done = [report for report in reports if not report.get("optim/skipped")] or reports
    joined = {}
    for name in dict.fromkeys(name for report in done for name in report):
        values = [report[name] for report in done if name in report]
        if name.startswith("mismatch/"):
            joined[name] = values[0]
        else:
            joined[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
    joined["optim/skipped"] = sum(report.get("optim/skipped", 0.0) for report in reports) / len(reports)
    return joined


def _sampling_metrics(rollouts: RolloutStep, epoch: int) -> dict[str, float]:
    """What the rollouts of a step were like, and how fast they were sampled."""
    sampled = sum(sum(group.lengths) for group in rollouts.groups)
    return {
        **rollout_metrics(rollouts.groups),
        **rollouts.metrics,
        "data/epoch": float(epoch),
        "perf/gen_tok_s": sampled / max(rollouts.seconds, 1e-9),
        "time/generate": rollouts.seconds,
    }


async def _observed(
    report: StepReport, on_step: OnStep | None, metrics_logger: MetricsLogger | None, on_logged: OnLogged | None
) -> dict[str, float]:
    """All metrics of the step, once its observers have been called."""
    if on_step is not None:
        report = report._replace(metrics=report.metrics | await on_step(report))
    if metrics_logger is not None:
        metrics_logger.log(report.metrics, report.step)
    if on_logged is not None:
        await on_logged(report)
    return report.metrics
