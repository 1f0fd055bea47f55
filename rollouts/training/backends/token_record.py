"""The values of each trained token, as a `forward_backward` used them, for a batch whose `record` is set.

The values stay on the device until the end, so recording waits for the device once. Not here: the values that the rows
have already, such as advantages, and the file (`rollouts.runs.token_files`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rollouts.training.algorithms.losses import log_ratio
from rollouts.training.batches import Row, live_count

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
