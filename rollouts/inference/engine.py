"""The torch side of the embedded engine: runs a wave of rows, and scores sequences. All of it in the torch thread.

It chooses the way a model is decoded (`probe.py`), splits a wave in batches that fit the memory allowed for keys and
values, and starts each row from what its session kept. Versions of weights are told to it; it never looks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rollouts.inference.decode import (
    Lanes,
    Network,
    Row,
    SessionCaches,
    Statistics,
    common_prefix,
    decode,
    evaluating,
)
from rollouts.inference.kv_cache import KVShape, SlotCache, whole_columns
from rollouts.inference.lanes import SlotLanes
from rollouts.inference.plain import PlainLanes
from rollouts.inference.probe import Verdict, probe

__all__ = ["HFEngine", "plan_batches"]

GROWTH = 64  # columns made ready for replies at first; longer replies grow the buffer
WIDE = 2048  # rows this wide share no batch with those half as wide: attention would be mostly padding
SCORE_ROWS = 1024  # positions whose float32 log-probabilities are held at a time


class HFEngine:
    """Decodes rows with a transformers causal LM, wrapped by peft or not. Call it in one thread only."""

    def __init__(self, model: Any, *, rows_max: int, cache_bytes: int, prefill_tokens_max: int) -> None:
        self.model = model
        self.statistics = Statistics()
        self.network = Network(model, self.statistics)
        self.sessions = SessionCaches(cache_bytes)
        self.rows_max, self.cache_bytes, self.prefill_tokens_max = rows_max, cache_bytes, prefill_tokens_max
        self._verdict: Verdict | None = None
        self._cache: SlotCache | None = None

    @property
    def verdict(self) -> Verdict:
        """How this model is decoded; found out at the first call."""
        if self._verdict is None:
            with evaluating(self.model):
                self._verdict = probe(self.network)
        return self._verdict

    def run(self, rows: list[Row], version: int, deliver: Callable[[list[Row]], None]) -> None:
        """Sample every row by weights `version`; `deliver` gets rows as they finish. Raises InferenceError."""
        self.statistics.waves += 1
        with evaluating(self.model):
            verdict = self.verdict
            for row in rows:
                self._resume(row, version)
            for batch, slots in self._plan(rows, verdict):
                decode(self._lanes(batch, slots, version, verdict), batch, deliver, self.statistics)

    def rest(self) -> None:
        """Give back the buffer between phases of generation; sessions keep what they have."""
        self._cache = None

    def score(self, tokens: list[int], temperature: float) -> list[float]:
        """Logprob of each token [L] given those before it, in float32; the first is 0.0."""
        with evaluating(self.model):
            ids = torch.tensor([tokens], device=self.network.device)
            logits = self.network.model(input_ids=ids, use_cache=False).logits[0, :-1]
            scores = [0.0]
            for start in range(0, len(tokens) - 1, SCORE_ROWS):
                part = torch.log_softmax(logits[start : start + SCORE_ROWS].float() / (temperature or 1.0), dim=-1)
                targets = ids[0, start + 1 : start + 1 + part.shape[0]].unsqueeze(1)
                scores += part.gather(1, targets).squeeze(1).tolist()
        return scores

    def _resume(self, row: Row, version: int) -> None:
        """Start the row from its session's cache as far as the contexts agree; the last token is always computed."""
        saved = None if row.session is None else self.sessions.take(row.session, version)
        if saved is not None:
            row.cached = common_prefix(saved.tokens, row.tokens[:-1])
            row.saved = saved if row.cached else None

    def _plan(self, rows: list[Row], verdict: Verdict) -> list[tuple[list[Row], int]]:
        if verdict.shape is None:
            return [(sorted(rows, key=lambda row: len(row.tokens)), self.rows_max)]
        return plan_batches(rows, self.rows_max, self._tokens_max(verdict.shape))

    def _lanes(self, batch: list[Row], slots: int, version: int, verdict: Verdict) -> Lanes:
        if verdict.shape is None:
            return PlainLanes(self.network, slots=slots, padded=verdict.padded)
        longest = max(row.width_max for row in batch)
        columns = min(longest, max(len(row.tokens) for row in batch) + GROWTH)
        cache = self._cache
        # A buffer left from many short rows would be widened for all its slots.
        if (
            cache is None
            or cache.slots < slots
            or cache.columns < columns
            or (cache.slots + 1) * max(cache.columns, whole_columns(longest)) > self._tokens_max(verdict.shape)
        ):
            self._cache = cache = None  # free the old one first
            self._cache = cache = SlotCache(verdict.shape, slots, columns)
        return SlotLanes(
            self.network,
            cache,
            self.sessions,
            version,
            slots=slots,
            columns_max=longest,
            prefill_tokens_max=self.prefill_tokens_max,
        )

    def _tokens_max(self, shape: KVShape) -> int:
        """Tokens whose keys and values the buffer may hold."""
        return max(1, self.cache_bytes // shape.token_bytes)


def plan_batches(rows: list[Row], rows_max: int, tokens_max: int) -> list[tuple[list[Row], int]]:
    """Split a wave in batches by length, each with the number of lanes that may decode at once.

    Rows in a batch run from short to long contexts (equal lengths in the given order); (lanes + 1) x columns, which is
    what a `SlotCache` takes, stay within `tokens_max`, unless a single row needs more. One batch is best while it
    fits: lanes cost less than passes. Where it does not, or where contexts are so long that attention to padding would
    cost more than passes, rows half as long form their own.
    """
    batches = []
    rest = sorted(rows, key=lambda row: row.width_max)
    while rest:
        width = rest[-1].width_max
        slots = max(1, min(rows_max, tokens_max // whole_columns(width) - 1))
        fits = slots >= min(rows_max, len(rest)) and width <= WIDE
        first = 0 if fits else next(i for i, row in enumerate(rest) if 2 * row.width_max > width)
        # The sort is stable: a group's equal prompts stay side by side, to be prefilled once.
        batch = sorted(rest[first:], key=lambda row: len(row.tokens))
        batches.append((batch, min(slots, len(batch))))
        del rest[first:]
    return batches
