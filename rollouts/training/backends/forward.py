"""Runs rows through the policy, the critic and the teacher; makes tensors of the rows' fields; finds flat rows.

If all rollouts of a group have the same reward, their advantages are 0, and most policy losses have no gradient at
them. These *flat* rows then need no backward pass. Whether a gradient exists is measured: the terms are computed as
usual, on logprobs that are leaves of a separate graph (`cut_off`). So the metrics stay the same, and rows with a
gradient, from a term that does not depend on advantages, are trained in full. Not here: losses and gradients
(`trainer`), running a single model (`transformer`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from rollouts.training.algorithms.algorithm import Algorithm, active_terms, is_reward_placed, requests
from rollouts.training.algorithms.logprobs import logprobs_with_alternatives, token_logprobs
from rollouts.training.backends.auxiliary import Critic, RowPositions, Teacher
from rollouts.training.backends.transformer import ModelPaths, Selection, run_features
from rollouts.training.batches import Row

_T = TypeVar("_T")
_OPTIONAL = ("old_logprobs", "ref_logprobs", "teacher_logprobs", "old_values", "returns")


class Scored(NamedTuple):
    """The outputs for T selected tokens. `tokens` is a pair of counts: the tokens of the rows that were run, without
    and with padding.
    """

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None
    selection: Selection
    tokens: tuple[int, int]
    extra: dict[str, Tensor]


class Models(NamedTuple):
    """The policy (`paths`), critic and teacher."""

    paths: ModelPaths
    critic: Critic | None
    teacher: Teacher | None

    def predict(
        self, inputs: RowPositions, temperature: float, needs: Sequence[str]
    ) -> tuple[dict[str, Tensor], Selection]:
        """Compute each of `needs` [T] with the policy, the critic or the teacher."""
        features, selection, _ = run_features(self.paths, *inputs)
        targets = _targets(inputs[0], selection, features.device)
        tensors: dict[str, Tensor] = {}
        if {"logprobs", "entropy"} & set(needs):
            tensors["logprobs"], tensors["entropy"] = self.paths.logprobs_and_entropy(features, targets, temperature)
        if self.critic is not None and "values" in needs:
            tensors["values"] = self.critic.values(inputs, selection, features)
        if self.teacher is not None and "teacher_logprobs" in needs:
            tensors["teacher_logprobs"] = self.teacher.logprobs(inputs, selection, targets, temperature)
        return {name: tensors[name] for name in needs}, selection

    def score(self, inputs: RowPositions, temperature: float, requested: frozenset[str]) -> Scored:
        """Run the rows with gradient. `extra` has the requested outputs beside logprobs, entropy and values: logits, or
        the teacher's most likely tokens.
        """
        features, selection, tokens = run_features(self.paths, *inputs)
        targets = _targets(inputs[0], selection, features.device)
        extra: dict[str, Tensor] = {}
        if requested & {"topk_logprobs", "teacher_topk_ids", "teacher_topk_logprobs"}:
            assert self.teacher is not None, "check_needs saw to it"
            ids, theirs = self.teacher.top(inputs, selection, temperature)
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
            values = self.critic.values(inputs, selection, features)
        return Scored(logprobs, entropy, values, selection, tokens, extra)


# --- the fields of rows, as tensors [T] in the order of the selected tokens ------------------------------------------


def make_streams(
    rows: list[Row], selection: Selection, rewards: list[float], device: torch.device
) -> dict[str, Tensor]:
    """The fields of the rows, and their rollout, group, pair and segment numbers, as tensors [T].

    `is_known` says whether the sampler's logprobs are known; if not, `rollout_logprobs` is 0.0. `returns` are the
    rollout's reward if the rows have values and no returns.
    """
    chosen = [(rows[row], positions) for row, positions in zip(selection.rows, selection.positions, strict=True)]
    names = ["loss_mask", "weights", "advantages"]
    names += [name for name in _OPTIONAL if getattr(rows[0], name) is not None]
    floats = {
        name: [value for row, positions in chosen for value in _take(getattr(row, name), positions)] for name in names
    }
    known = [(row.rollout_logprobs or [0.0] * len(row.tokens), positions) for row, positions in chosen]
    floats["rollout_logprobs"] = [value for stream, positions in known for value in _take(stream, positions)]
    if "old_values" in floats and "returns" not in floats:
        floats["returns"] = [rewards[row.rollout_index] for row, positions in chosen for _ in positions]
    floats["mask"] = floats.pop("loss_mask")
    counts = [len(positions) for _, positions in chosen]
    indices = ("rollout_index", "group_index", "pair_index")
    numbers = {name: [getattr(row, name) for row, _ in chosen] for name in indices}
    numbers["segments"] = [row.segment for row, _ in chosen]
    numbers["is_known"] = [int(row.rollout_logprobs is not None) for row, _ in chosen]
    # numpy converts lists of numbers several times faster than torch.
    table = torch.from_numpy(np.array(list(floats.values()), dtype=np.float32)).to(device)
    repeated = np.repeat(np.array(list(numbers.values()), dtype=np.int64), counts, axis=1)
    whole = torch.from_numpy(repeated).to(device)
    return dict(zip(floats, table, strict=True)) | dict(zip(numbers, whole, strict=True))


def unit_weights(tensors: dict[str, Tensor], unit: str) -> Tensor:
    """u of every value: [T], or one per rollout or pair [U] in the order of their numbers."""
    if unit == "token":
        return tensors["weights"]
    numbers, place = torch.unique(tensors[f"{unit}_index"], return_inverse=True)
    return tensors["weights"].new_zeros(len(numbers)).scatter_reduce(0, place, tensors["weights"], "amax")


def _take(stream: Sequence[_T], positions: Sequence[int]) -> Sequence[_T]:
    """The values at these ascending positions; a slice if the positions are contiguous."""
    if positions and positions[-1] - positions[0] == len(positions) - 1:
        return stream[positions[0] : positions[-1] + 1]
    return [stream[t] for t in positions]


def _targets(rows: Sequence[Row], selection: Selection, device: torch.device) -> Tensor:
    """The ids [T] of the selected tokens."""
    chosen = zip(selection.rows, selection.positions, strict=True)
    ids = [token for row, positions in chosen for token in _take(rows[row].tokens, positions)]
    return torch.from_numpy(np.array(ids, dtype=np.int64)).to(device)


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
