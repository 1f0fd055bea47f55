"""Metrics of one `forward_backward`: added up on the device, read once at the end, joined over ranks.

Every `.item()` waits for the device, so there is a single `.tolist()` for each batch and rank. If a batch's `record` is
set, the values of each trained token are recorded, as they were used. They too stay on the device until the end. Not
here: the values that the rows have already, such as advantages, and the file (`rollouts.runs.token_files`).
"""

from __future__ import annotations

import functools
import itertools
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from rollouts.errors import TrainingError
from rollouts.training.algorithms.losses import log_ratio
from rollouts.training.algorithms.objective import MetricSum, Objective
from rollouts.training.backends.transformer import Work
from rollouts.training.batches import Row, live_count

_NAN, _BAD_MODEL = "nan: ", "the model's logprobs"
_RUNS_OWN = {
    *("data", "env", "eval", "group", "metric", "optim", "perf", "reward", "reward_part", "rollout", "sampler"),
    *("staleness", "sync", "time"),
}
"""Prefixes of a run's other metrics. A loss cannot use them for its own metrics."""

_SAMPLED, _ANCHORED = "sampler/sampled", "sampler/anchored"

_EXTREMES: dict[str, Callable[[float, float], float]] = {"max": max, "min": min}


class Microbatch(NamedTuple):
    """The measurements of one microbatch.

    Attributes:
        tensors: [T] by their names in the loss's vocabulary. `importance` are the weights of a correction. `sampled`:
            the tokens whose sampler logprobs are known; `anchored`: those whose ratio compares with something
            else than the current policy
        objective: sum(u * loss)
        evaluation: the values and metrics of the terms
        clip: the clip range of a token's ratio, or None
        work: what was computed
        rows: the rows of the tokens, in the order of the tensors
    """

    tensors: Mapping[str, Tensor]
    objective: Tensor
    evaluation: Objective
    clip: tuple[float, float] | None
    work: Work
    rows: Sequence[Row] = ()


class Reading(msgspec.Struct):
    """The sums of one rank.

    Attributes:
        sums: (value, number, kind) by name. NaN checks are stored as extremes
        count: live tokens
        work: what was computed with a backward pass
        forward_work: what was computed without one
        submitted: the fraction of the time after which the device had all of its work
        learned: whether a loss had a gradient; None if there were no microbatches
        recorded: the values of each token, if they are recorded
    """

    sums: dict[str, tuple[float, float, str]] = {}
    count: int = 0
    work: Work = Work()
    forward_work: Work = Work()
    submitted: float = 1.0
    learned: bool | None = None
    recorded: dict[str, bytes] = {}


class MetricSums:
    """Sums and extremes by name over live tokens. A float mask does not weigh metrics. `record` gets each microbatch
    too.
    """

    def __init__(self, record: TokenRecord | None = None) -> None:
        self._record = record
        self._metrics: dict[str, MetricSum] = {}
        self._count = 0
        self.work = self.forward_work = Work()

    def add(self, part: Microbatch, *, is_forward: bool = False) -> None:
        """Add one microbatch. `is_forward`: it had no backward pass."""
        tensors = part.tensors
        logprobs = tensors["logprobs"]
        self._count += logprobs.shape[0]
        if self._record is not None:
            self._record.add(part.rows, tensors, part.clip)
        if is_forward:
            self.forward_work = sum_work([self.forward_work, part.work])
        else:
            self.work = sum_work([self.work, part.work])
        means = {**_policy_metrics(tensors, part.clip), **_value_metrics(tensors)}
        mismatch = _mismatch_metrics(tensors)
        maxima = {
            "policy/ratio_max": means["policy/ratio_mean"],
            "mismatch/abs_logp_max": (_trainer(tensors) - tensors["rollout_logprobs"]).abs() * tensors["sampled"],
        }
        for name, value in means.items():
            self._add(name, MetricSum(value.sum(), torch.ones_like(value).sum(), "mean"))
        sampled, anchored = tensors["sampled"].float().sum(), tensors["anchored"].float().sum()
        for name, value in mismatch.items():
            self._add(name, MetricSum(torch.where(tensors["sampled"], value, 0.0).sum(), sampled, "mean"))
        for name, value in maxima.items():
            self._add(name, MetricSum(value.max(), value.new_tensor(1.0), "max"))
        self._add(_SAMPLED, MetricSum(sampled, sampled, "sum"))
        self._add(_ANCHORED, MetricSum(anchored, anchored, "sum"))
        self._add("policy/loss", MetricSum(part.objective.detach(), part.objective.new_tensor(1.0), "sum"))
        for name, metric in part.evaluation.metrics.items():
            placed = name if "/" in name else f"policy/{name}"
            is_taken = placed == "policy/loss" or placed in {**means, **mismatch, **maxima}
            is_taken |= placed.partition("/")[0] in _RUNS_OWN
            self._add(f"policy/reported/{name}" if is_taken else placed, metric)
        for label, broken in {**part.evaluation.nan, _BAD_MODEL: logprobs.isnan().any()}.items():
            self._add(_NAN + label, MetricSum(broken.float(), broken.float(), "max"))

    def read(self) -> Reading:
        """Read the sums as plain numbers. Waits for the device once."""
        if not self._count:
            return Reading()
        pairs = [(metric.value.float(), metric.number.float()) for metric in self._metrics.values()]
        read = torch.stack([tensor for pair in pairs for tensor in pair]).reshape(-1, 2).tolist()
        sums = {name: (*pair, self._metrics[name].kind) for name, pair in zip(self._metrics, read, strict=True)}
        recorded = {} if self._record is None else self._record.read()
        return Reading(sums, self._count, self.work, self.forward_work, recorded=recorded)

    def _add(self, name: str, new: MetricSum) -> None:
        have = self._metrics.get(name)
        pick = {"max": torch.maximum, "min": torch.minimum}.get(new.kind, torch.add)
        if have is not None:
            number = have.number if new.kind in _EXTREMES else have.number + new.number
            new = MetricSum(pick(have.value, new.value), number, new.kind)
        self._metrics[name] = new


def batch_metrics(readings: Sequence[Reading], denominator: float) -> dict[str, float]:
    """The metrics of a batch from the sums of its ranks: means over live tokens, and the terms' own metrics.

    `policy/loss` is divided by the batch's D. Raises TrainingError if a loss returned NaN; the message names the loss.
    """
    total = functools.reduce(_joined_readings, readings)
    if not total.count:
        return {"policy/loss": 0.0}
    broken = [name.removeprefix(_NAN) for name, (value, *_) in total.sums.items() if name.startswith(_NAN) and value]
    if broken and _BAD_MODEL not in broken:  # a broken model makes every loss NaN; the optimizer will skip the step
        what = f"the loss {broken[0]} returned NaN at a trained token although the model's logprobs are numbers"
        raise TrainingError(f"{what}; look for 0 / 0, inf - inf, or the logarithm of a negative number")
    found = {
        name: value / number if kind == "mean" and number else value
        for name, (value, number, kind) in total.sums.items()
        if not name.startswith(_NAN)
    }
    found["policy/loss"] = found["policy/loss"] / denominator if denominator > 0 else 0.0
    unknown = [] if found.pop(_SAMPLED) else ["mismatch/"]  # supervised rows have no sampler
    unknown += [] if found.pop(_ANCHORED) else ["policy/ratio", "policy/kl_old"]
    found = {name: value for name, value in found.items() if not name.startswith(tuple(unknown))}
    _finish(found)
    work = sum_work([total.work, total.forward_work])
    found["perf/pad_frac"] = 1 - work.tokens / work.padded if work.padded else 0.0
    return found


def _joined_readings(one: Reading, other: Reading) -> Reading:
    sums = dict(one.sums)
    for name, (value, number, kind) in other.sums.items():
        have, counted, _ = sums.get(name, (None, 0.0, kind))
        if have is not None:
            value = _EXTREMES[kind](have, value) if kind in _EXTREMES else have + value
        sums[name] = (value, number if kind in _EXTREMES else counted + number, kind)
    work, forward_work = sum_work([one.work, other.work]), sum_work([one.forward_work, other.forward_work])
    return Reading(sums, one.count + other.count, work, forward_work)


def sum_work(parts: Sequence[Work]) -> Work:
    """The sum of what passes compute."""
    return Work(*map(sum, zip(*parts, strict=True))) if parts else Work()


def _policy_metrics(tensors: Mapping[str, Tensor], clip: tuple[float, float] | None) -> dict[str, Tensor]:
    logprobs = tensors["logprobs"]
    moved = log_ratio(logprobs, tensors["old_logprobs"])
    ratio = moved.exp()
    means = {"policy/entropy": tensors["entropy"], "policy/ratio_mean": ratio, "policy/kl_old": _k3(moved)}
    if clip is not None:
        means["policy/clip_low"], means["policy/clip_high"] = clipped(tensors, clip)
    if "ref_logprobs" in tensors:
        means["policy/kl_ref"] = _k3(log_ratio(tensors["ref_logprobs"], logprobs))
    return means


def _k3(apart: Tensor) -> Tensor:
    """Estimate KL(p || q) at tokens that p sampled, from `apart` = log(q / p): q/p - 1 - log(q/p). This is k3 of
    Schulman 2020, which is never negative and has little noise.
    """
    return apart.expm1() - apart  # expm1 is exact if the policies are close


def _mismatch_metrics(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The difference between the sampler and the trainer before the step."""
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
    """The trainer's own logprobs: the anchor, unless the anchor is the sampler."""
    return tensors["old_logprobs"] if "importance" in tensors else tensors["logprobs"]


def _value_metrics(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
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


def _finish(found: dict[str, float]) -> None:
    """Compute the metrics that combine several means."""
    if "mismatch/weight_square_mean" in found:  # Kish's effective sample size, as a fraction of the tokens
        square = found.pop("mismatch/weight_square_mean")
        found["mismatch/ess"] = found["mismatch/weight_mean"] ** 2 / square if square > 0 else 0.0
    if "value/return_square" in found:
        spread = found.pop("value/return_square") - found["value/return_mean"] ** 2
        left = found.pop("value/error_square") - found.pop("value/error_mean") ** 2
        if spread > 1e-12:
            found["value/explained_var"] = 1 - left / spread


# --- memory ----------------------------------------------------------------------------------------------------------


def peak_gib(device: torch.device | str) -> float:
    """The largest memory of tensors on the device, in GiB. On a CPU: the process's largest resident size."""
    place = torch.device(device)
    most = torch.cuda.max_memory_allocated(place) if place.type == "cuda" else peak_resident_bytes()
    return most / 2**30


def peak_resident_bytes() -> int:
    """The largest resident size of this process so far."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # bytes on macOS, KiB elsewhere


# --- the record of each token -----------------------------------------------------------------------------------------


CHANNELS = {"logprobs": "logprob", "entropy": "entropy", "importance": "weight"}
"""The tensors of a microbatch that are recorded, and their names in a record."""


class TokenRecord:
    """Values [T] by name, of the T live tokens of these rows: row by row, and by position within a row."""

    def __init__(self, rows: Sequence[Row]) -> None:
        ends = list(itertools.accumulate(map(live_count, rows)))
        self._count = ends[-1] if ends else 0
        self._starts = {id(row): end - live_count(row) for row, end in zip(rows, ends, strict=True)}
        self._places: list[np.ndarray] = []
        self._values: dict[str, list[Tensor]] = {}

    def add(self, rows: Sequence[Row], tensors: Mapping[str, Tensor], clip: tuple[float, float] | None) -> None:
        """Add the tensors [t] of a microbatch. `rows` are those of its live tokens, in the order of the tensors."""
        places = [np.arange(start, start + live_count(row)) for row in rows for start in (self._starts[id(row)],)]
        self._places.append(np.concatenate(places) if places else np.arange(0))
        for name, shown in CHANNELS.items():
            if name in tensors:
                self._values.setdefault(shown, []).append(tensors[name].detach())
        if clip is not None:
            self._values.setdefault("clipped", []).append(torch.maximum(*clipped(tensors, clip)))

    def read(self) -> dict[str, bytes]:
        """The values [T] as float32, in the byte order of this machine. Waits for the device."""
        if not self._places:
            return {}
        places, found = np.concatenate(self._places), {}
        for name, pieces in self._values.items():
            values = np.zeros(self._count, dtype=np.float32)
            values[places] = torch.cat(pieces).detach().float().cpu().numpy()
            found[name] = values.tobytes()
        return found


def clipped(tensors: Mapping[str, Tensor], clip: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """1.0 at tokens [T] whose ratio the clip range holds from below, and from above: they have no gradient."""
    ratio, advantages = log_ratio(tensors["logprobs"], tensors["old_logprobs"]).exp(), tensors["advantages"]
    low = ((ratio < 1 - clip[0]) & (advantages < 0)).float()
    return low, ((ratio > 1 + clip[1]) & (advantages > 0)).float()


def join_records(
    rows: Sequence[Row], places: Sequence[Sequence[int]], records: Sequence[Mapping[str, bytes]]
) -> dict[str, bytes]:
    """The records of all ranks, in the order of the batch's `rows`. `places` are the rows of each rank."""
    if len(records) == 1:
        return dict(records[0])
    counts = list(map(live_count, rows))
    starts = [end - count for end, count in zip(itertools.accumulate(counts), counts, strict=True)]
    found: dict[str, np.ndarray] = {}
    for own, record in zip(places, records, strict=True):
        index = [np.arange(starts[row], starts[row] + counts[row]) for row in own]
        for name, data in record.items():
            values = found.setdefault(name, np.zeros(sum(counts), dtype=np.float32))
            values[np.concatenate(index)] = np.frombuffer(data, dtype=np.float32)
    return {name: values.tobytes() for name, values in found.items()}
