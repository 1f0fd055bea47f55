"""The reinforcement learning loop. Read it from top to bottom. A step of `train_rl`:

1. takes the groups of the step from their source, which plays them now or has prefetched them
2. makes a batch of the kept groups (`rl_batch`): masks stale tokens, mixes and shapes rewards, computes advantages
3. computes what the loss needs beside the policy: logprobs of a reference or a teacher, values
4. runs `forward_backward` and `optim_step` for each minibatch
5. pauses the source, and gives the engines the new weights
6. calls the observers, which evaluate, log and save

It leaves out: training of two steps at the same time; recovery from an error, which ends the loop; and evaluations and
checkpoints, which observers do inside the step, so that a checkpoint is never newer than the logs.

`train_rl` returns the metrics. Of its arguments, it changes only the weights of the backend and the `policy_version` of
the source. Not here: how rollouts are played and prefetched (`rollout_gen.manager`), losses and gradients (the
backend), when to evaluate and to save (`rollouts.runs.jobs`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol

from rollouts.errors import ConfigError
from rollouts.loggers.base import MetricsLogger
from rollouts.training.algorithms.algorithm import KL, Stage, stage_at
from rollouts.training.batches import TrainBatch, TrainingBackend, step_metrics
from rollouts.training.batching import part_batch
from rollouts.training.loops.rl_batch import RLSettings, complete_batch, prepare_rl_batch, rollout_advantages
from rollouts.training.rollout_gen.groups import Group
from rollouts.training.rollout_gen.steps import RolloutStep, StepSettings, rollout_metrics
from rollouts.training.weights.sync import WeightSync
from rollouts.types import Sample

VERSIONS_KEPT = 64  # start versions beyond the staleness limit: the lag metrics of older tokens need them


class LoopState(NamedTuple):
    """The progress of the loop.

    Attributes:
        step: the number of finished steps
        kl_coefficients: of adaptive KL terms, by the names of their stages
        start_versions: the policy's versions at the beginning of recent steps. They determine the age of tokens
    """

    step: int = 0
    kl_coefficients: Mapping[str, float] = {}
    start_versions: Sequence[int] = ()


class GroupSource(Protocol):
    """Where the loop gets its groups: GroupManager samples them, SavedGroups reads them."""

    policy_version: int | None

    @property
    def config(self) -> StepSettings:
        """`staleness` is how many steps the source may be ahead."""

    async def generate_batch(self, *, wanted: int | None = None) -> RolloutStep:
        """The groups of the next step. `wanted` steps will still be taken, including this one."""

    def pause(self) -> AbstractAsyncContextManager[None]:
        """A block in which nothing is sampled, so that weights may change."""


class StepReport(NamedTuple):
    """A finished step (0-based), for observers.

    `advantages` [N] are those of the kept groups' rollouts. A loop that starts with `state` continues after this step.
    `batches` are those of the optimizer steps, if the loop records tokens; else there are none. `phases` are what the
    loop did, as (name, begin, end), in the seconds of `time.perf_counter`.
    """

    step: int
    metrics: dict[str, float]
    groups: list[Group]
    advantages: list[float]
    state: LoopState
    batches: Sequence[TrainBatch] = ()
    phases: Sequence[tuple[str, float, float]] = ()


BEGINNING = LoopState()

OnStep = Callable[[StepReport], Awaitable[dict[str, float]]]
"""Called after the training of each step. The loop logs the returned metrics, for example of an evaluation."""

OnLogged = Callable[[StepReport], Awaitable[None]]
"""Called after a step is logged, with all metrics. Save here: a checkpoint is then never newer than the logs."""


class Callbacks(NamedTuple):
    """What the loop calls.

    Attributes:
        on_samples: with the samples of each step, and the step, before they are trained
        on_step: after the training of each step
        on_logged: after a step is logged
        should_stop: after that; the loop ends if it returns True
    """

    on_samples: Callable[[list[Sample], int], None] = lambda samples, step: None
    on_step: OnStep | None = None
    on_logged: OnLogged | None = None
    should_stop: Callable[[], bool] = lambda: False


NO_CALLBACKS = Callbacks()


async def train_rl(
    backend: TrainingBackend,
    source: GroupSource,
    config: RLSettings,
    *,
    stages: Sequence[Stage],
    syncing: WeightSync,
    metrics_logger: MetricsLogger | None = None,
    callbacks: Callbacks = NO_CALLBACKS,
    start: LoopState = BEGINNING,
) -> list[dict[str, float]]:
    """Train until `config.num_steps` steps are done. Returns the metrics of each step of this call.

    With a `staleness` above 0, sampling continues while a step trains. A cancelled call leaves the weights of the last
    complete step. Raises ConfigError if the source has another staleness; RewardError or TrainingError for a bad
    reward, loss or advantage; InferenceError if an engine does not serve the weights that it received.

    Args:
        stages: which algorithm applies from which step on, including step 0. `backend` knows them by their names
        syncing: sends weights to the engines
        start: an earlier `StepReport.state`. Backend and source must have their states of that time
    """
    _check_staleness(source.config.staleness, config.staleness)
    coefficients, start_versions = _coefficients(stages, start), tuple(start.start_versions)
    source.policy_version = backend.version
    history: list[dict[str, float]] = []
    for step in range(start.step, config.num_steps):
        began, (_, name, algorithm, _) = time.perf_counter(), stage_at(stages, step)
        rollouts = await source.generate_batch(wanted=config.num_steps - step)
        generated = time.perf_counter()
        start_versions = (*start_versions, backend.version)[-VERSIONS_KEPT - (config.lag_max or 0) :]
        samples, advantages, batch, metrics = prepare_rl_batch(
            rollouts.kept, algorithm, config, step, name=name, start_versions=start_versions
        )
        batch.kl_coefficient = coefficients.get(algorithm.kl)
        callbacks.on_samples(samples, step)
        prepared = time.perf_counter()
        await complete_batch(backend, batch, algorithm, minibatches=config.minibatches)
        batch.record, reports = config.record, []
        for part in (parts := part_batch(batch, config.minibatches, algorithm.aggregation, config.response_tokens_max)):
            # Both are queued before either is awaited, so that the trainer does not wait between them. If the first
            # fails, there are no gradients, and the second changes nothing.
            forward_backward, optim_step = backend.forward_backward(part), backend.optim_step()
            reports.append(dict(await forward_backward) | step_metrics(await optim_step))
        metrics |= _training_metrics(reports, batch, algorithm.kl, (trained := time.perf_counter()) - prepared)
        coefficients |= _steered(algorithm.kl, batch.kl_coefficient, metrics)
        async with source.pause():
            if (step + 1) % config.sync_every == 0:
                metrics |= await syncing.sync(backend)
                source.policy_version = backend.version
            phases = _phases(began, generated, prepared, trained, time.perf_counter())
            metrics |= _rollout_metrics(rollouts, samples=config.samples) | _seconds(phases)
            state = LoopState(step + 1, _by_stage(stages, coefficients), start_versions)
            means, kept = rollout_advantages(batch, len(advantages)), parts if config.record else ()
            finished = StepReport(step, metrics, rollouts.groups, means, state, kept, phases)
            history.append(await _observed(finished, metrics_logger, callbacks))
        if callbacks.should_stop():
            break
    return history


def _check_staleness(of_manager: int, of_loop: int) -> None:
    if of_manager != of_loop:
        differ = f"the manager's RolloutConfig has a staleness of {of_manager} and the loop one of {of_loop}"
        result = "tokens would be older than the loop allows, or nothing would be prefetched"
        raise ConfigError(f"{differ}: {result}; give both the same")


def _coefficients(stages: Sequence[Stage], start: LoopState) -> dict[KL | None, float]:
    """The saved coefficients of adaptive KL terms. Stages may share a term."""
    kept = start.kl_coefficients
    return {stage.algorithm.kl: kept[stage.name] for stage in stages if stage.algorithm.kl and stage.name in kept}


def _by_stage(stages: Sequence[Stage], coefficients: Mapping[KL | None, float]) -> dict[str, float]:
    """The coefficients by the names of stages, because a checkpoint cannot store functions."""
    return {stage.name: coefficients[kl] for stage in stages if (kl := stage.algorithm.kl) in coefficients}


def _steered(kl: KL | None, coefficient: float | None, metrics: Mapping[str, float]) -> dict[KL | None, float]:
    """The next coefficient of an adaptive KL term, if a KL was measured. Later stages with this term continue from
    there.
    """
    if kl is None or kl.target is None or "policy/kl_ref" not in metrics:
        return {}
    from rollouts.training.algorithms.kl import steer_coefficient

    current = kl.coefficient if coefficient is None else coefficient
    return {kl: steer_coefficient(current, metrics["policy/kl_ref"], kl.target, kl.horizon)}


def _phases(*times: float) -> list[tuple[str, float, float]]:
    """A step's phases, each as (name, begin, end): wait for its rollouts, make the batch, train, sync the weights."""
    return list(zip(("wait", "prepare", "train", "sync"), times, times[1:], strict=False))


def _seconds(phases: Sequence[tuple[str, float, float]]) -> dict[str, float]:
    """How long a step waited for its rollouts, and how long it took."""
    (_, began, generated), *_, (_, _, ended) = phases
    return {"time/wait": generated - began, "time/step": ended - began}


def _training_metrics(
    reports: Sequence[dict[str, float]], batch: TrainBatch, kl: KL | None, seconds: float
) -> dict[str, float]:
    """The metrics and the speed of a batch's optimizer steps. NaN values are left out: JSON has none."""
    tokens = sum(len(row.tokens) for row in batch.rows)
    speed = tokens / max(seconds, 1e-9)
    metrics = _joined_metrics(reports) | {"time/forward_backward": seconds, "perf/train_tok_s": speed}
    if kl is not None:
        metrics["policy/kl_coef"] = kl.coefficient if batch.kl_coefficient is None else batch.kl_coefficient
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def _joined_metrics(reports: Sequence[dict[str, float]]) -> dict[str, float]:
    """Join the metrics of a batch's optimizer steps.

    Takes the mean over steps that were not skipped; of metrics that are maxima, the largest value. The difference
    between sampler and trainer is that of the first step, because the policy has moved in later ones.
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


def _rollout_metrics(rollouts: RolloutStep, *, samples: bool) -> dict[str, float]:
    """Metrics of a step's rollouts; if they were sampled, also the speed of sampling."""
    metrics = {**rollout_metrics(rollouts.groups), **rollouts.metrics, "data/epoch": float(rollouts.epoch_id)}
    if not samples:
        return {name: value for name, value in metrics.items() if not name.startswith("rollout/latency")}
    sampled = sum(sum(group.lengths) for group in rollouts.groups)
    speed = sampled / max(rollouts.seconds, 1e-9)
    return metrics | {"perf/gen_tok_s": speed, "time/generate": rollouts.seconds}


async def _observed(report: StepReport, metrics_logger: MetricsLogger | None, callbacks: Callbacks) -> dict[str, float]:
    """Call the observers of a step. Returns all of its metrics."""
    if callbacks.on_step is not None:
        report = report._replace(metrics=report.metrics | await callbacks.on_step(report))
    if metrics_logger is not None:
        metrics_logger.log(report.metrics, report.step)
    if callbacks.on_logged is not None:
        await callbacks.on_logged(report)
    return report.metrics
