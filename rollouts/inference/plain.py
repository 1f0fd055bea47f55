"""Lanes over whatever cache the model makes by itself: slower, for sliding windows, linear attention and other state.

Whole contexts are computed anew each turn. Attention-only models take contexts of mixed lengths, padded on the left;
models with recurrent state take contexts of one length at a time, so that padding can never enter a state. Equal
contexts are still computed once, and finished rows still leave at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rollouts.errors import ModelError
from rollouts.inference.decode import Network, Row

__all__ = ["PlainLanes"]


class PlainLanes:
    """Implements `decode.Lanes`. `padded`: contexts of different lengths may share a batch."""

    def __init__(self, network: Network, *, slots: int, padded: bool) -> None:
        self.network, self.slots, self.padded = network, slots, padded
        self._cache: Any = None
        self._mask: Tensor | None = None

    def take(self, active: int, queue: list[Row]) -> list[Row]:
        """A batch at a time; without padding, the leading contexts of one length."""
        if active:
            return []
        size = min(self.slots, len(queue))
        if not self.padded:
            length = len(queue[0].tokens)
            size = next((n for n in range(size) if len(queue[n].tokens) != length), size)
        joining = queue[:size]
        del queue[:size]
        return joining

    def admit(self, rows: list[Row], active: int) -> tuple[list[Row], Tensor]:
        """Compute each different context once, then give every row its own copy of the cache."""
        assert active == 0, f"{active} rows are still decoding"
        contexts = list(dict.fromkeys(tuple(row.tokens) for row in rows))
        longest = max(map(len, contexts))
        pads = [longest - len(context) for context in contexts]
        assert self.padded or not any(pads), f"contexts of lengths {sorted(set(map(len, contexts)))} in one batch"
        device = self.network.device
        ids = torch.tensor([[0] * pad + list(c) for pad, c in zip(pads, contexts, strict=True)], device=device)
        arguments: dict[str, Any] = {}
        if self.padded:
            steps = torch.arange(longest, device=device)
            padding = torch.tensor(pads, device=device).unsqueeze(1)
            self._mask = (steps >= padding).long()
            arguments = {"attention_mask": self._mask, "position_ids": (steps - padding).clamp_min_(0)}
        self.network.statistics.prefilled += sum(map(len, contexts))
        logits, self._cache = self.network.forward(ids, **arguments)
        if not hasattr(self._cache, "reorder_cache"):
            name = type(self.network.model).__name__
            raise ModelError(f"{name} keeps no cache that transformers can reorder, so it cannot be sampled here")
        if len(contexts) < len(rows):
            rank = {context: index for index, context in enumerate(contexts)}
            logits = logits.index_select(0, self._select([rank[tuple(row.tokens)] for row in rows]))
        return rows, logits

    def step(self, rows: list[Row]) -> Tensor:
        """One token for every row."""
        arguments: dict[str, Any] = {self.network.cache_name: self._cache}
        inputs = torch.tensor([[row.sampled[-1], row.length] for row in rows], device=self.network.device)
        if self._mask is not None:
            self._mask = torch.cat((self._mask, self._mask.new_ones(len(rows), 1)), dim=1)
            arguments |= {"attention_mask": self._mask, "position_ids": inputs[:, 1:]}
        logits, self._cache = self.network.forward(inputs[:, :1], **arguments)
        return logits

    def release(self, rows: list[Row], finished: list[int]) -> list[Row]:
        """Keep the other rows, in order."""
        leaving = set(finished)
        kept = [index for index in range(len(rows)) if index not in leaving]
        if kept:
            self._select(kept)
        else:
            self._cache = self._mask = None
        return [rows[index] for index in kept]

    def _select(self, rows: list[int]) -> Tensor:
        index = torch.tensor(rows, device=self.network.device)
        self._cache.reorder_cache(index)
        if self._mask is not None:
            self._mask = self._mask.index_select(0, index)
        return index
