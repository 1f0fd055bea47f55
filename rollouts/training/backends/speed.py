"""How fast a `forward_backward` was: operations a second, and their share of what the device can do."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollouts.training.backends.profiling import peak_gib
from rollouts.training.backends.shares import Share
from rollouts.training.backends.sums import Reading
from rollouts.training.estimates import ModelSize, peak_flops, train_flops
from rollouts.training.types import Row

__all__ = ["training_speed"]


def training_speed(
    size: ModelSize,
    shares: Sequence[Share],
    readings: Sequence[Reading],
    seconds: float,
    *,
    device: torch.device,
    dtype: str,
    lora: bool,
) -> dict[str, float]:
    """`perf/tflops` a rank, `perf/mfu` where the device's peak is known, and this rank's `perf/peak_gib`."""
    found = {"perf/peak_gib": peak_gib(device)}
    trained: list[Row] = []
    forward_only: list[Row] = []
    for share, reading in zip(shares, readings, strict=True):
        for number, part in enumerate(share.microbatches()):
            (forward_only if number in reading.forward_only else trained).extend(part)
    # Of the three passes of full training, two are the backward's.
    flops = _flops(size, trained, lora=lora) + _flops(size, forward_only, lora=False) / 3
    if not flops:
        return found
    rate = flops / max(seconds, 1e-9) / len(shares)
    found["perf/tflops"] = rate / 1e12
    peak = peak_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None
    return found if peak is None else found | {"perf/mfu": rate / peak}


def _flops(size: ModelSize, rows: Sequence[Row], *, lora: bool) -> float:
    lengths = [len(row.tokens) for row in rows]
    tokens = sum(lengths)
    if not tokens:
        return 0.0
    scored = sum(weight > 0 for row in rows for weight in row.loss_mask)
    return train_flops(size, tokens, sum(length**2 for length in lengths) / tokens, lora=lora, scored=scored)
