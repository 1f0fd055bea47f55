"""New weights for the engines, and the proof that they arrived: pure functions over a training backend and engines.

An engine that samples with the trainer's own parameters is told the version only. One that holds weights of its own
(`owns_weights`) is given them, and is then asked for the log-probabilities of a short sequence, which the trainer
computes too: weights that went astray are seen before anything is sampled with them. Left out: how an engine takes
weights in.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rollouts.errors import InferenceError
from rollouts.inference.base import InferenceBackend, WeightUpdate
from rollouts.training.types import Row, TrainBatch, TrainingBackend

__all__ = ["parity_tolerance", "probe_parity", "sync_weights"]

_Kind = Literal["full", "adapter"]

PROBE_TOKENS = 32
TOLERANCE = 1e-3  # nats a token, of float32 and wider
TOLERANCE_HALF = 5e-2  # of weights of 16 bits and fewer


async def sync_weights(
    backend: TrainingBackend, engines: Sequence[InferenceBackend], *, tolerance: float | None = None
) -> dict[str, float]:
    """Make every engine serve the backend's weights, one after another; gives `sync/` metrics.

    `tolerance` is how far, in nats, an engine's log-probability of a token may be from the trainer's; None goes by the
    type of the weights. Raises InferenceError where an engine does not serve them.
    """
    start = time.perf_counter()
    version = backend.version
    owners = [engine for engine in engines if getattr(engine, "owns_weights", False)]
    weights: dict[_Kind, dict[str, Any]] = {}
    for kind in {_kind_of(engine) for engine in owners}:
        weights[kind] = await backend.get_weights(kind)
    for engine in engines:
        if engine not in owners:
            await engine.update_weights(WeightUpdate(version))
            continue
        kind = _kind_of(engine)
        await engine.update_weights(WeightUpdate(version, kind, weights=weights[kind]))
    metrics = {"sync/version": float(version)}
    tensors = {f"{kind}/{name}": each for kind, named in weights.items() for name, each in named.items()}
    if tensors:
        metrics["sync/bytes"] = float(sum(each.nbytes for each in tensors.values()))
        allowed = parity_tolerance(tensors, getattr(backend, "compute_dtype", "")) if tolerance is None else tolerance
        metrics["sync/probe"] = max([await probe_parity(backend, engine, allowed) for engine in owners])
    return metrics | {"sync/seconds": time.perf_counter() - start}


def _kind_of(engine: InferenceBackend) -> _Kind:
    kind: _Kind = getattr(engine, "weights_kind", "full")
    return kind


async def probe_parity(backend: TrainingBackend, engine: InferenceBackend, tolerance: float = TOLERANCE) -> float:
    """How far engine and trainer are apart, at most, in the log-probability (temperature 1) of a token of one fixed
    sequence, in nats. Raises InferenceError, with both numbers, where that is more than `tolerance`.
    """
    length = min(PROBE_TOKENS, engine.context_tokens_max)
    tokens = [index % getattr(engine, "vocabulary_size", PROBE_TOKENS) for index in range(length)]
    zeros = [0.0] * len(tokens)
    row = Row(tokens, list(zeros), list(zeros), list(zeros), list(zeros), rollout_index=0, group_index=0)
    batch = TrainBatch([row], denominator=1.0, rewards=[0.0], step=0)
    output = await backend.forward(batch, ("logprobs",))
    assert output.logprobs is not None, "logprobs were asked for"
    ours, theirs = output.logprobs[0], await engine.score(tokens, 1.0)
    assert len(ours) == len(theirs) == len(tokens), f"{len(ours)=} {len(theirs)=} {len(tokens)=}"
    apart = [abs(one - other) for one, other in zip(ours, theirs, strict=True)]
    # In 16 bits the logarithm of a small probability is as inexact as it is large.
    is_half = tolerance >= TOLERANCE_HALF
    scales = [max(1.0, abs(value)) if is_half else 1.0 for value in ours]
    place = max(range(1, len(tokens)), key=lambda index: (apart[index] != apart[index], apart[index] / scales[index]))
    allowed = tolerance * scales[place]
    if not apart[place] <= allowed:  # a NaN is no agreement
        raise InferenceError(
            f"the engine does not serve the weights of version {backend.version} that it was given: token {place} of a "
            f"test sequence has the log-probability {theirs[place]:.6g} there and {ours[place]:.6g} in the trainer, "
            f"{apart[place]:.2g} apart (at most {allowed:g}); see whether both have the same model and precision"
        )
    return apart[place]


def parity_tolerance(weights: Mapping[str, Any], compute_dtype: str = "") -> float:
    """How far apart, in nats a token, two computations with weights of these types may be; `compute_dtype` is what
    layers compute in, where that is not the type of the weights.
    """
    if compute_dtype in ("bfloat16", "float16"):
        return TOLERANCE_HALF
    halves = (each for each in weights.values() if each.is_floating_point() and each.itemsize < 4)
    return TOLERANCE if next(halves, None) is None else TOLERANCE_HALF
