"""Runs rows through the policy, the critic and the teacher; makes tensors of the rows' fields; finds flat rows.

If all rollouts of a group have the same reward, their advantages are 0, and most policy losses have no gradient at
them. These *flat* rows then need no backward pass. Whether a gradient exists is measured: the terms are computed as
usual, on logprobs that are leaves of a separate graph (`cut_off`). So the metrics stay the same, and rows with a
gradient, from a term that does not depend on advantages, are trained in full. Not here: losses and gradients
(`trainer`), running a single model (`transformer`).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollouts.training.algorithms.algorithm import Algorithm, active_terms, is_reward_placed, requests
from rollouts.training.algorithms.logprobs import logprobs_with_alternatives, token_logprobs
from rollouts.training.backends.auxiliary import Critic, Teacher
from rollouts.training.backends.transformer import ModelPaths, RowInputs, Work, make_inputs, run_features
from rollouts.training.batches import Row, live_count

_OPTIONAL = ("old_logprobs", "ref_logprobs", "teacher_logprobs", "old_values", "returns")
_INDICES = ("rollout_index", "group_index", "pair_index")


class Scored(NamedTuple):
    """The outputs for T tokens, and the `work` of the policy for them."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None
    work: Work
    extra: dict[str, Tensor]


class Models(NamedTuple):
    """The policy (`paths`), critic and teacher. `share`: tokens that several rows begin with run once."""

    paths: ModelPaths
    critic: Critic | None
    teacher: Teacher | None
    share: bool = True

    @contextlib.contextmanager
    def attending(self) -> Iterator[None]:
        """The trained models can run forests inside this block, and compute activations again."""
        scorer = self.critic and self.critic.scorer
        with self.paths.attending(), scorer.paths.attending() if scorer else contextlib.nullcontext():
            yield

    def inputs(self, rows: Sequence[Row], *, only_live: bool = True) -> RowInputs | None:
        """The rows, and their tokens to compute: the live ones, or all but the first. None if there are none."""
        masks = [np.asarray(row.loss_mask) > 0 if only_live else np.ones(len(row.tokens), dtype=bool) for row in rows]
        wanted = [np.flatnonzero(mask[1:]) + 1 for mask in masks]
        return make_inputs([row.tokens for row in rows], wanted, share=self.share) if any(map(len, wanted)) else None

    def predict(self, inputs: RowInputs, temperature: float, needs: Sequence[str]) -> dict[str, Tensor]:
        """Compute each of `needs` [T] with the policy, the critic or the teacher."""
        features, _ = run_features(self.paths, inputs)
        targets = torch.from_numpy(inputs.targets).to(features.device)
        tensors: dict[str, Tensor] = {}
        if {"logprobs", "entropy"} & set(needs):
            tensors["logprobs"], tensors["entropy"] = self.paths.logprobs_and_entropy(features, targets, temperature)
        if self.critic is not None and "values" in needs:
            tensors["values"] = self.critic.values(inputs, features)
        if self.teacher is not None and "teacher_logprobs" in needs:
            tensors["teacher_logprobs"] = self.teacher.logprobs(inputs, targets, temperature)
        return {name: inputs.of_tokens(tensors[name]) for name in needs}

    def score(self, inputs: RowInputs, temperature: float, requested: frozenset[str]) -> Scored:
        """Run the rows with gradient. `extra` has the requested outputs beside logprobs, entropy and values: logits, or
        the teacher's most likely tokens.
        """
        features, work = run_features(self.paths, inputs)
        targets = torch.from_numpy(inputs.targets).to(features.device)
        extra: dict[str, Tensor] = {}
        if requested & {"topk_logprobs", "teacher_topk_ids", "teacher_topk_logprobs"}:
            assert self.teacher is not None, "check_needs saw to it"
            ids, theirs = self.teacher.top(inputs, temperature)
            extra = {"teacher_topk_ids": ids, "teacher_topk_logprobs": theirs}
        if "logits" in requested:
            logits = self.paths.head(features)
            logits = logits if logits.dtype == torch.float64 else logits.float()
            logits = extra["logits"] = logits / temperature
            logprobs, entropy = token_logprobs(logits, targets)
            if "topk_logprobs" in requested:
                extra["topk_logprobs"] = torch.log_softmax(logits, -1).gather(-1, extra["teacher_topk_ids"])
        elif "topk_logprobs" in requested:
            head, ids, size = self.paths.head, extra["teacher_topk_ids"], self.paths.vocabulary_size
            logprobs, entropy, extra["topk_logprobs"] = logprobs_with_alternatives(
                head, features, targets, ids, vocabulary_size=size, temperature=temperature
            )
        else:
            logprobs, entropy = self.paths.logprobs_and_entropy(features, targets, temperature)
        values = None
        if self.critic is not None and "values" in requested:
            values = inputs.of_tokens(self.critic.values(inputs, features))
        extra = {name: inputs.of_tokens(tensor) for name, tensor in extra.items()}
        return Scored(inputs.of_tokens(logprobs), inputs.of_tokens(entropy), values, work, extra)


# --- the fields of rows, as tensors -----------------------------------------------------------------------------------


class RowFields:
    """The fields of all live tokens of a batch, as tensors on the device; they are converted and moved once.

    `is_known` says whether the sampler's logprobs are known; if not, `rollout_logprobs` is 0.0. `returns` are the
    rollout's reward if the rows have values and no returns.
    """

    def __init__(self, rows: Sequence[Row], rewards: Sequence[float], device: torch.device) -> None:
        counts = [live_count(row) for row in rows]
        ends = np.cumsum([0, *counts])
        self._spans = {id(row): (ends[number], ends[number + 1]) for number, row in enumerate(rows)}
        live = np.fromiter((weight > 0 for row in rows for weight in row.loss_mask), dtype=bool)
        names = [name for name in _OPTIONAL if rows and getattr(rows[0], name) is not None]
        streams = {
            name: [getattr(row, name) for row in rows] for name in ("loss_mask", "weights", "advantages", *names)
        }
        streams["rollout_logprobs"] = [row.rollout_logprobs or [0.0] * len(row.tokens) for row in rows]
        floats = {name: _joined(values)[live] for name, values in streams.items()}
        whole = {name: [getattr(row, name) for row in rows] for name in _INDICES}
        whole |= {"segments": [row.segment for row in rows]}
        whole |= {"is_known": [int(row.rollout_logprobs is not None) for row in rows]}
        numbers = {name: np.repeat(np.array(values, dtype=np.int64), counts) for name, values in whole.items()}
        if "old_values" in floats and "returns" not in floats:
            floats["returns"] = np.asarray(rewards, dtype=np.float32)[numbers["rollout_index"]]
        floats["mask"] = floats.pop("loss_mask")
        self._floats, self._numbers = list(floats), list(numbers)
        self._table = torch.from_numpy(np.stack(list(floats.values()))).to(device)
        self._whole = torch.from_numpy(np.stack(list(numbers.values()))).to(device)

    def of_rows(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """The fields [T] of these rows, by name: row by row, by ascending positions."""
        index = np.concatenate([np.arange(*self._spans[id(row)]) for row in rows])
        chosen = torch.from_numpy(index).to(self._table.device)
        floats, numbers = self._table.index_select(1, chosen), self._whole.index_select(1, chosen)
        return dict(zip(self._floats, floats, strict=True)) | dict(zip(self._numbers, numbers, strict=True))


def _joined(streams: Sequence[Sequence[float]]) -> np.ndarray:
    """One array of all values. numpy converts lists of numbers several times faster than torch."""
    return np.fromiter(itertools.chain.from_iterable(streams), dtype=np.float32)


def unit_weights(tensors: dict[str, Tensor], unit: str) -> Tensor:
    """u of every value: [T], or one per rollout or pair [U] in the order of their numbers."""
    if unit == "token":
        return tensors["weights"]
    numbers, place = torch.unique(tensors[f"{unit}_index"], return_inverse=True)
    return tensors["weights"].new_zeros(len(numbers)).scatter_reduce(0, place, tensors["weights"], "amax")


# --- flat rows --------------------------------------------------------------------------------------------------------


def may_be_flat(algorithm: Algorithm) -> bool:
    """Whether flat rows may have no gradient: every term names the advantages, and no term is a KL."""
    kl = algorithm.kl
    if kl is not None and not is_reward_placed(kl.function):
        return False
    return all("advantages" in requests(term.function) for term in active_terms(algorithm))


def is_flat(rows: Sequence[Row]) -> bool:
    """Whether all advantages of these rows are 0. False for no rows."""
    return bool(rows) and not any(any(row.advantages) for row in rows)


def cut_off(scored: Scored) -> tuple[Scored, list[Tensor]]:
    """The same numbers as leaves of a new graph, and a list of these leaves."""
    ends: list[Tensor] = []

    def end(tensor: Tensor) -> Tensor:
        ends.append(tensor.detach().requires_grad_())
        return ends[-1].clone()  # a loss may change it in place

    extra = {name: end(tensor) if tensor.is_floating_point() else tensor for name, tensor in scored.extra.items()}
    values = None if scored.values is None else end(scored.values)
    return scored._replace(logprobs=end(scored.logprobs), entropy=end(scored.entropy), values=values, extra=extra), ends


def gradient_size(objective: Tensor, ends: Sequence[Tensor]) -> float:
    """The largest gradient at the leaves. NaN if one is NaN, or if the objective depends on none of them."""
    if not objective.requires_grad:
        return math.nan
    gradients = torch.autograd.grad(objective, ends, allow_unused=True)
    sizes = [each.abs().amax().double() for each in gradients if each is not None]
    return float(torch.stack(sizes).amax()) if sizes else math.nan
