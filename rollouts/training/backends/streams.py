"""What is stamped on rows as tensors [T], in the order in which a microbatch was run. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from rollouts.training.backends.transformer import Selection
from rollouts.training.types import Row

__all__ = ["make_streams", "targets_of", "temperatures_of", "unit_weights"]

_T = TypeVar("_T")
_OPTIONAL = ("old_logprobs", "ref_logprobs", "teacher_logprobs", "old_values", "returns")


def make_streams(
    rows: list[Row], selection: Selection, rewards: list[float], device: torch.device
) -> dict[str, Tensor]:
    """Every stream of the rows that is there, and the numbers of rollout, group, pair and segment. `sampled` is whether
    the sampler's logprobs are known; where they are not, `rollout_logprobs` holds 0.0.

    `returns` falls back to the rollout's reward where there are values but no estimator gave returns.
    """
    chosen = [(rows[row], positions) for row, positions in zip(selection.rows, selection.positions, strict=True)]
    names = ["loss_mask", "weights", "advantages"]
    names += [name for name in _OPTIONAL if getattr(rows[0], name) is not None]
    floats = {
        name: [value for row, positions in chosen for value in _take(getattr(row, name), positions)] for name in names
    }
    floats["rollout_logprobs"] = [
        value
        for row, positions in chosen
        for value in (_take(row.rollout_logprobs, positions) if row.rollout_logprobs else [0.0] * len(positions))
    ]
    if "old_values" in floats and "returns" not in floats:
        floats["returns"] = [rewards[row.rollout_index] for row, positions in chosen for _ in positions]
    floats["mask"] = floats.pop("loss_mask")
    counts = [len(positions) for _, positions in chosen]
    numbers = {
        "rollout_index": [row.rollout_index for row, _ in chosen],
        "group_index": [row.group_index for row, _ in chosen],
        "pair_index": [row.pair_index for row, _ in chosen],
        "segments": [row.segment for row, _ in chosen],
        "sampled": [int(row.rollout_logprobs is not None) for row, _ in chosen],
    }
    # numpy reads lists of numbers several times faster than torch
    table = torch.from_numpy(np.array(list(floats.values()), dtype=np.float32)).to(device)
    repeated = np.repeat(np.array(list(numbers.values()), dtype=np.int64), counts, axis=1)
    indices = torch.from_numpy(repeated).to(device)
    return dict(zip(floats, table, strict=True)) | dict(zip(numbers, indices, strict=True))


def targets_of(rows: list[Row], selection: Selection, device: torch.device) -> Tensor:
    """The ids [T] of the selected tokens."""
    chosen = zip(selection.rows, selection.positions, strict=True)
    ids = [token for row, positions in chosen for token in _take(rows[row].tokens, positions)]
    return torch.from_numpy(np.array(ids, dtype=np.int64)).to(device)


def temperatures_of(rows: list[Row], selection: Selection, default: float, device: torch.device) -> float | Tensor:
    """One temperature where all rows have the same, else one a token [T]."""
    own = [default if row.temperature is None else row.temperature for row in rows]
    if len(set(own)) == 1:
        return own[0]
    chosen = zip(selection.rows, selection.positions, strict=True)
    values = [own[row] for row, positions in chosen for _ in positions]
    return torch.tensor(values, dtype=torch.float32, device=device)


def unit_weights(tensors: dict[str, Tensor], unit: str) -> Tensor:
    """u of every value: [T], or one a rollout or pair [U] in the order of their numbers."""
    if unit == "token":
        return tensors["weights"]
    numbers, place = torch.unique(tensors[f"{unit}_index"], return_inverse=True)
    return tensors["weights"].new_zeros(len(numbers)).scatter_reduce(0, place, tensors["weights"], "amax")


def _take(stream: Sequence[_T], positions: Sequence[int]) -> Sequence[_T]:
    """The stream at these ascending positions; at once where none is left out between them."""
    if positions and positions[-1] - positions[0] == len(positions) - 1:
        return stream[positions[0] : positions[-1] + 1]
    return [stream[t] for t in positions]
