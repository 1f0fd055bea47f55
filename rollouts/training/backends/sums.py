"""Metrics of one `forward_backward`: added up on the device over microbatches, read once at the end.

Every `.item()` waits for the device; here there is one `.tolist()` a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollouts.errors import TrainingError
from rollouts.training.algorithms.algorithm import Evaluation

__all__ = ["Sums"]

_BAD_MODEL = "the model's logprobs"


class Sums:
    """Sums and maxima by name over live tokens, counted plainly (a float mask does not weigh a metric)."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._nan: dict[str, Tensor] = {}
        self._count = 0
        self._tokens = [0, 0]

    def add(
        self,
        objective: Tensor,
        logprobs: Tensor,
        entropy: Tensor,
        streams: dict[str, Tensor],
        evaluation: Evaluation,
        clip: tuple[float | None, float | None],
        tokens: tuple[int, int],
    ) -> None:
        """Take in one microbatch; `logprobs` and the streams are [T], `tokens` is (run, run with padding)."""
        self._count += logprobs.shape[0]
        self._tokens = [have + new for have, new in zip(self._tokens, tokens, strict=True)]
        advantages, sampler = streams["advantages"], streams["rollout_logprobs"]
        ratio = (logprobs - streams["old_logprobs"]).exp()
        apart = logprobs - sampler
        sums = {
            "policy/loss": objective.detach(),
            "policy/entropy": entropy.sum(),
            "policy/ratio_mean": ratio.sum(),
            "mismatch/abs_logp_mean": apart.abs().sum(),
            "mismatch/k3": (apart.exp() - 1 - apart).sum(),
        }
        low, high = clip
        if low is not None:
            sums["policy/clip_low"] = ((ratio < 1 - low) & (advantages < 0)).sum()
        if high is not None:
            sums["policy/clip_high"] = ((ratio > 1 + high) & (advantages > 0)).sum()
        sums |= {name if "/" in name else f"policy/{name}": value for name, value in evaluation.metrics.items()}
        for name, value in sums.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        maxima = {
            "policy/ratio_max": ratio.max(),
            "mismatch/abs_logp_max": apart.abs().max(),
            "sampler/abs_max": sampler.abs().max(),
        }
        for name, value in maxima.items():
            self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value
        for label, value in {**evaluation.nan, _BAD_MODEL: logprobs.isnan().any()}.items():
            self._nan[label] = self._nan[label] | value if label in self._nan else value

    def metrics(self, denominator: float) -> dict[str, float]:
        """Means over live tokens; `policy/loss` is divided by the batch's D. Raises TrainingError, naming a loss
        that gave NaN.
        """
        if not self._count:
            return {"policy/loss": 0.0}
        tensors = {**self._sums, **self._maxima, **self._nan}
        read = dict(zip(tensors, torch.stack([t.float() for t in tensors.values()]).tolist(), strict=True))
        if not read[_BAD_MODEL]:  # a model that is broken itself makes every loss NaN; the optimizer skips that step
            for label in self._nan:
                if read[label]:
                    raise TrainingError(
                        f"the loss {label} returned NaN at a trained token although the model's logprobs are numbers; "
                        "look for 0 / 0, inf - inf, or the logarithm of a negative number"
                    )
        found = {name: read[name] / self._count for name in self._sums}
        found["policy/loss"] = read["policy/loss"] / denominator if denominator > 0 else 0.0
        found |= {name: read[name] for name in self._maxima}
        if found.pop("sampler/abs_max") == 0.0:  # supervised rows: nobody sampled them
            found = {name: value for name, value in found.items() if not name.startswith(("mismatch/", "policy/ratio"))}
        real, padded = self._tokens
        found["perf/pad_frac"] = 1 - real / padded if padded else 0.0
        return found
