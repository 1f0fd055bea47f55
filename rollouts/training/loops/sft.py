"""The supervised loop: take the next batch of samples, do one optimizer step, repeat.

`train_sft` is a function over a backend and a list of samples. Not here: curricula.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollouts.loggers.base import MetricsLogger
from rollouts.training.algorithms.algorithm import Stage, stage_at
from rollouts.training.batches import TrainingBackend, step_metrics
from rollouts.training.batching import make_batch
from rollouts.types import Sample


@dataclass(frozen=True)
class SFTSettings:
    """The number of optimizer steps, and the number of samples for each."""

    num_steps: int
    batch_size: int
    aggregation: str | Callable[..., Any] = "token_mean"

    def __post_init__(self) -> None:
        assert self.num_steps >= 0, f"num_steps must be >= 0, got {self.num_steps}"
        assert self.batch_size > 0, f"batch_size must be > 0, got {self.batch_size}"


async def train_sft(
    backend: TrainingBackend | Any,
    samples: Sequence[Sample],
    config: SFTSettings,
    metrics_logger: MetricsLogger | None = None,
    *,
    schedule: Sequence[Stage] = (),
    on_step: Callable[[int, dict[str, float]], Awaitable[dict[str, float]]] | None = None,
    on_logged: Callable[[int, dict[str, float]], Awaitable[None]] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    first_step: int = 0,
) -> list[dict[str, float]]:
    """Train on `samples`, `batch_size` at a time, until `config.num_steps` steps are done.

    Starts over at the end of the list. Returns the metrics of each step of this call.

    Raises TrainingError if there are no samples, or if a loss fails.

    Args:
        backend: its algorithm "main" must need no rewards (`sft`). A PyTorchTrainingBackend uses its own loss function
        schedule: which algorithm applies from which step on, including step 0
        on_step: called with the step and its metrics after the step's training; the loop logs what it returns
        on_logged: called with the step and all of its metrics after they are logged
        should_stop: called after each step is logged; the loop ends if it returns True
        first_step: the number of steps that are already done
    """
    assert samples, "there are no samples to train on"
    history: list[dict[str, float]] = []
    for step in range(first_step, config.num_steps):
        start = time.perf_counter()
        batch_samples = _renumbered(take_batch(samples, config.batch_size, step))
        stage = stage_at(schedule, step) if schedule else None
        aggregation = stage.algorithm.aggregation if stage else config.aggregation
        name, advantages = stage.name if stage else "main", [0.0] * len(batch_samples)
        batch = make_batch(batch_samples, advantages, aggregation=aggregation, step=step, algorithm=name)
        forward_backward, optim_step = backend.forward_backward(batch), backend.optim_step()
        metrics = dict(await forward_backward)
        metrics |= step_metrics(await optim_step)
        seconds = time.perf_counter() - start
        tokens = sum(len(sample.tokens) for sample in batch_samples)
        metrics |= {"time/step": seconds, "perf/train_tok_s": tokens / seconds}
        if on_step is not None:
            metrics |= await on_step(step, metrics)
        if metrics_logger is not None:
            metrics_logger.log(metrics, step)
        if on_logged is not None:
            await on_logged(step, metrics)
        history.append(metrics)
        if should_stop():
            break
    return history


def take_batch(samples: Sequence[Sample], batch_size: int, step: int) -> list[Sample]:
    """The samples of a step, each as a rollout of its own. After the last sample, the first one follows.

    >>> [sample.prompt for sample in take_batch([Sample("a"), Sample("b"), Sample("c")], 2, 1)]
    ['c', 'a']
    """
    start = step * batch_size
    return [samples[(start + offset) % len(samples)] for offset in range(batch_size)]


def _renumbered(samples: Sequence[Sample]) -> list[Sample]:
    """Copies of the samples whose `rollout_index` counts conversations from 0. The rows of a conversation share it; a
    sample without one is a conversation of its own.
    """
    numbers: dict[object, int] = {}
    renumbered = []
    for place, sample in enumerate(samples):
        key = ("single", place) if sample.rollout_index is None else sample.rollout_index
        renumbered.append(replace(sample, rollout_index=numbers.setdefault(key, len(numbers))))
    return renumbered
