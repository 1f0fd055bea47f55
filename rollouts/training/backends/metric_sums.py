"""Metrics of one `forward_backward`: added up on the device over microbatches, read once at the end, joined over ranks.

Every `.item()` waits for the device; here there is one `.tolist()` a batch and rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from rollouts.errors import TrainingError
from rollouts.training.algorithms.evaluate import Evaluation, Metric
from rollouts.training.algorithms.losses import log_ratio

_NAN, _BAD_MODEL = "nan: ", "the model's logprobs"
_RUNS_OWN = {
    *("data", "env", "eval", "group", "metric", "optim", "perf", "reward", "reward_part", "rollout", "sampler"),
    *("staleness", "sync", "time"),
}
"""What a run logs besides training: no loss reports under these names."""

_SAMPLED, _ANCHORED = "sampler/sampled", "sampler/anchored"

_EXTREMES: dict[str, Callable[[float, float], float]] = {"max": max, "min": min}


class Microbatch(NamedTuple):
    """What there is to measure of one: `tensors` [T] by the names of the loss's vocabulary (and `weights` of a
    correction, if any, as `importance`), the objective, what the terms report, and (tokens, tokens with padding).
    `sampled` [T] of the tensors says whose sampler's logprobs are known, `anchored` [T] who has an anchor besides the
    policy as it is.

    `clip` are the bounds of a token's ratio, or None.
    """

    tensors: Mapping[str, Tensor]
    objective: Tensor
    evaluation: Evaluation
    clip: tuple[float, float] | None
    tokens: tuple[int, int]


class Reading(msgspec.Struct):
    """What one rank added up: `sums` by name as (value, number, kind), live tokens, and (tokens, tokens with padding)
    that were run. Which of the losses gave NaN is an extreme among the sums.

    `learned` is False where there were microbatches and no loss in them carried a gradient; None where there were
    none. `forward_only` are the numbers of microbatches whose gradient is 0, so that they had no backward.
    """

    sums: dict[str, tuple[float, float, str]] = {}
    count: int = 0
    tokens: tuple[int, int] = (0, 0)
    learned: bool | None = None
    forward_only: list[int] = []


class MetricSums:
    """Sums and extremes by name over live tokens, counted plainly (a float mask does not weigh a metric)."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}
        self._count = 0
        self._tokens = (0, 0)

    def add(self, part: Microbatch) -> None:
        """Take in one microbatch."""
        tensors = part.tensors
        logprobs = tensors["logprobs"]
        self._count += logprobs.shape[0]
        self._tokens = (self._tokens[0] + part.tokens[0], self._tokens[1] + part.tokens[1])
        means, maxima = {**_policy(tensors, part.clip), **_value(tensors)}, _maxima(tensors)
        mismatch = _mismatch(tensors)
        for name, value in means.items():
            self._add(name, Metric(value.sum(), torch.ones_like(value).sum(), "mean"))
        sampled, anchored = tensors["sampled"].float().sum(), tensors["anchored"].float().sum()
        for name, value in mismatch.items():
            self._add(name, Metric(torch.where(tensors["sampled"], value, 0.0).sum(), sampled, "mean"))
        for name, value in maxima.items():
            self._add(name, Metric(value.max(), value.new_tensor(1.0), "max"))
        self._add(_SAMPLED, Metric(sampled, sampled, "sum"))
        self._add(_ANCHORED, Metric(anchored, anchored, "sum"))
        self._add("policy/loss", Metric(part.objective.detach(), part.objective.new_tensor(1.0), "sum"))
        for name, metric in part.evaluation.metrics.items():
            placed = name if "/" in name else f"policy/{name}"
            is_taken = placed == "policy/loss" or placed in {**means, **mismatch, **maxima}
            is_taken |= placed.partition("/")[0] in _RUNS_OWN
            self._add(f"policy/reported/{name}" if is_taken else placed, metric)
        for label, broken in {**part.evaluation.nan, _BAD_MODEL: logprobs.isnan().any()}.items():
            self._add(_NAN + label, Metric(broken.float(), broken.float(), "max"))

    def read(self) -> Reading:
        """What was added up, as plain numbers: the device is waited for once."""
        if not self._count:
            return Reading()
        pairs = [(metric.value.float(), metric.number.float()) for metric in self._metrics.values()]
        read = torch.stack([tensor for pair in pairs for tensor in pair]).reshape(-1, 2).tolist()
        sums = {name: (*pair, self._metrics[name].kind) for name, pair in zip(self._metrics, read, strict=True)}
        return Reading(sums, self._count, self._tokens)

    def _add(self, name: str, new: Metric) -> None:
        have = self._metrics.get(name)
        pick = {"max": torch.maximum, "min": torch.minimum}.get(new.kind, torch.add)
        if have is not None:
            number = have.number if new.kind in _EXTREMES else have.number + new.number
            new = Metric(pick(have.value, new.value), number, new.kind)
        self._metrics[name] = new


def metrics_of(readings: Sequence[Reading], denominator: float) -> dict[str, float]:
    """Metrics of a batch from what its ranks read: means over live tokens, and what terms report by its kind;
    `policy/loss` is divided by the batch's D.

    Raises TrainingError, naming a loss that gave NaN.
    """
    total = functools.reduce(_joined, readings)
    if not total.count:
        return {"policy/loss": 0.0}
    broken = {name.removeprefix(_NAN): bool(value) for name, (value, *_) in total.sums.items() if name.startswith(_NAN)}
    _check_nan(broken)
    found = {
        name: value / number if kind == "mean" and number else value
        for name, (value, number, kind) in total.sums.items()
        if not name.startswith(_NAN)
    }
    found["policy/loss"] = found["policy/loss"] / denominator if denominator > 0 else 0.0
    unknown = [] if found.pop(_SAMPLED) else ["mismatch/"]  # as of supervised rows
    unknown += [] if found.pop(_ANCHORED) else ["policy/ratio", "policy/kl_old"]
    found = {name: value for name, value in found.items() if not name.startswith(tuple(unknown))}
    _finish(found)
    real, padded = total.tokens
    found["perf/pad_frac"] = 1 - real / padded if padded else 0.0
    return found


def _joined(one: Reading, other: Reading) -> Reading:
    sums = dict(one.sums)
    for name, (value, number, kind) in other.sums.items():
        have, counted, _ = sums.get(name, (None, 0.0, kind))
        if have is not None:
            value = _EXTREMES[kind](have, value) if kind in _EXTREMES else have + value
        sums[name] = (value, number if kind in _EXTREMES else counted + number, kind)
    tokens = (one.tokens[0] + other.tokens[0], one.tokens[1] + other.tokens[1])
    return Reading(sums, one.count + other.count, tokens)


def _check_nan(broken: dict[str, bool]) -> None:
    if broken.pop(_BAD_MODEL):  # a broken model makes every loss NaN; the optimizer skips that step
        return
    for label, flag in broken.items():
        if flag:
            raise TrainingError(
                f"the loss {label} returned NaN at a trained token although the model's logprobs are numbers; "
                "look for 0 / 0, inf - inf, or the logarithm of a negative number"
            )


def _policy(tensors: Mapping[str, Tensor], clip: tuple[float, float] | None) -> dict[str, Tensor]:
    logprobs, advantages = tensors["logprobs"], tensors["advantages"]
    moved = log_ratio(logprobs, tensors["old_logprobs"])
    ratio = moved.exp()
    means = {"policy/entropy": tensors["entropy"], "policy/ratio_mean": ratio, "policy/kl_old": _k3(moved)}
    if clip is not None:
        means["policy/clip_low"] = ((ratio < 1 - clip[0]) & (advantages < 0)).float()
        means["policy/clip_high"] = ((ratio > 1 + clip[1]) & (advantages > 0)).float()
    if "ref_logprobs" in tensors:
        means["policy/kl_ref"] = _k3(log_ratio(tensors["ref_logprobs"], logprobs))
    return means


def _k3(apart: Tensor) -> Tensor:
    """An estimate of KL(p || q) at tokens that p sampled, of `apart` = log(q / p): q/p - 1 - log(q/p) (k3 of Schulman
    2020), never negative, with little noise.
    """
    return apart.expm1() - apart  # expm1: both are tiny where the policies are close


def _mismatch(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """How far the trainer before the step is from the sampler."""
    apart = log_ratio(_trainer(tensors), tensors["rollout_logprobs"])
    means = {"mismatch/abs_logp_mean": apart.abs(), "mismatch/k3": _k3(apart)}
    if "importance" in tensors:
        weights = tensors["importance"]
        means |= {
            "mismatch/weight_mean": weights,
            "mismatch/weight_square_mean": weights**2,
            "mismatch/rejected_frac": (weights == 0).float(),
        }
    return means


def _trainer(tensors: Mapping[str, Tensor]) -> Tensor:
    """The trainer's own logprobs: the anchor, unless that is the sampler's."""
    return tensors["old_logprobs"] if "importance" in tensors else tensors["logprobs"]


def _value(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if "values" not in tensors or "returns" not in tensors:
        return {}
    values, returns = tensors["values"], tensors["returns"]
    error = returns - values
    return {
        "value/loss": 0.5 * error**2,
        "value/mean": values,
        "value/error_mean": error,
        "value/error_square": error**2,
        "value/return_mean": returns,
        "value/return_square": returns**2,
    }


def _maxima(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        "policy/ratio_max": log_ratio(tensors["logprobs"], tensors["old_logprobs"]).exp(),
        "mismatch/abs_logp_max": (_trainer(tensors) - tensors["rollout_logprobs"]).abs() * tensors["sampled"],
    }


def _finish(found: dict[str, float]) -> None:
    """Put what is made of several means in their place."""
    if "mismatch/weight_square_mean" in found:  # Kish's effective sample size, as a share of the tokens
        square = found.pop("mismatch/weight_square_mean")
        found["mismatch/ess"] = found["mismatch/weight_mean"] ** 2 / square if square > 0 else 0.0
    if "value/return_square" in found:
        spread = found.pop("value/return_square") - found["value/return_mean"] ** 2
        left = found.pop("value/error_square") - found.pop("value/error_mean") ** 2
        if spread > 1e-12:
            found["value/explained_var"] = 1 - left / spread
