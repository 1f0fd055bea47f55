"""`run_sft_training`: the supervised loop for samples with lists or tensors, with printed lines and checkpoints."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rollouts.errors import ConfigError
from rollouts.loggers.base import MetricsLogger
from rollouts.training.loops import sft
from rollouts.training.samples import with_lists
from rollouts.types import Sample
from rollouts_notes.configs import SFTTrainingConfig, as_config
from rollouts_notes.progress import StepLines, set_learning_rate, short_names


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
    set_learning_rate(backend, config.learning_rate)
    progress = StepLines(config, backend)
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
