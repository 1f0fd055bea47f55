"""Lanes over one preallocated key-value buffer: the fast way, for models with plain full attention.

What makes it fast: equal prompts of a wave (a group's members) are prefilled once; a session's next turn prefills only
what is new; finished rows leave by moving the last lane into the gap; rows still queued join as soon as enough lanes
are free; nothing is concatenated or masked anew beyond one comparison a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollouts.inference.decode import Network, Row, SavedCache, SessionCaches
from rollouts.inference.kv_cache import SlotCache

__all__ = ["SlotLanes"]

PADDING_MAX = 512  # padding worth one more pass instead: about what a pass costs besides its tokens


class SlotLanes:
    """Implements `decode.Lanes`: lane i is slot i of the cache, which is widened to `columns_max` at most."""

    def __init__(
        self,
        network: Network,
        cache: SlotCache,
        sessions: SessionCaches,
        version: int,
        *,
        slots: int,
        columns_max: int,
        prefill_tokens_max: int,
    ) -> None:
        assert 1 <= slots <= cache.slots, f"{slots} lanes over {cache.slots} slots"
        self.network, self.cache, self.sessions, self.version = network, cache, sessions, version
        self.slots, self.columns_max, self.prefill_tokens_max = slots, columns_max, prefill_tokens_max

    def take(self, active: int, queue: list[Row]) -> list[Row]:
        """Rows join when no lane is busy or a quarter is free: a pass for one row costs much the same as for ten."""
        free = min(self.slots - active, len(queue))
        if active and free < min(len(queue), max(1, self.slots // 4)):
            return []
        joining = queue[:free]
        del queue[:free]
        return joining

    def admit(self, rows: list[Row], active: int) -> tuple[list[Row], Tensor]:
        """Prefill: equal new contexts once, continued sessions from their cache."""
        fresh = [row for row in rows if not row.cached]
        continued = sorted((row for row in rows if row.cached), key=lambda row: len(row.tokens) - row.cached)
        self.cache.reserve(max(len(row.tokens) for row in rows) + 1, self.columns_max)
        logits = []
        if fresh:
            fresh, fresh_logits = self._admit_fresh(fresh, active)
            logits.append(fresh_logits)
        if continued:
            first = active + len(fresh)
            for slot, row in enumerate(continued, first):
                assert row.saved is not None, "a row with cached tokens has a saved cache"
                self.cache.write(slot, row.cached, row.saved.keys, row.saved.values)
                row.saved = None
            logits.append(self.prefill(first, [(row.tokens, row.cached) for row in continued]))
            self.network.statistics.reused += sum(row.cached for row in continued)
        return fresh + continued, logits[0] if len(logits) == 1 else torch.cat(logits)

    def _admit_fresh(self, rows: list[Row], first: int) -> tuple[list[Row], Tensor]:
        members: dict[tuple[int, ...], list[Row]] = {}
        for row in rows:
            members.setdefault(tuple(row.tokens), []).append(row)
        logits = self.prefill(first, [(group[0].tokens, 0) for group in members.values()])
        if len(members) == len(rows):
            return rows, logits
        ordered = [row for group in members.values() for row in group]
        owners = [index for index, group in enumerate(members.values()) for _ in group]
        width = max(len(row.tokens) for row in rows)
        slots = range(first, first + len(rows))
        self.cache.copy_slots([first + owner for owner in owners], list(slots), width)
        return ordered, logits.index_select(0, torch.tensor(owners, device=logits.device))

    def prefill(self, first: int, contexts: list[tuple[list[int], int]]) -> Tensor:
        """Logits [m, V] after each context, of which the first `begin` tokens lie in its slot already."""
        logits, start = [], 0
        while start < len(contexts):
            stop, longest, real = start, 0, 0
            while stop < len(contexts):
                tokens, begin = contexts[stop]
                size = len(tokens) - begin
                padded = max(longest, size) * (stop + 1 - start)
                if stop > start and (padded > self.prefill_tokens_max or padded - real - size > PADDING_MAX):
                    break
                stop, longest, real = stop + 1, max(longest, size), real + size
            logits.append(self._prefill_pass(first + start, contexts[start:stop]))
            start = stop
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _prefill_pass(self, first: int, contexts: list[tuple[list[int], int]]) -> Tensor:
        sizes = [len(tokens) - begin for tokens, begin in contexts]
        longest = max(sizes)
        assert min(sizes) > 0, f"every row needs at least one new token, got {sizes}"
        self.network.statistics.prefilled += sum(sizes)
        # New tokens are padded on the left, so that the last position of every row is its last token.
        pads = [longest - size for size in sizes]
        ids = [[0] * pad + tokens[begin:] for pad, (tokens, begin) in zip(pads, contexts, strict=True)]
        places = [[0] * pad + list(range(b, len(t))) for pad, (t, b) in zip(pads, contexts, strict=True)]
        inputs, positions = torch.tensor([ids, places], device=self.cache.shape.device).unbind(0)
        if not any(pads) and not any(begin for _, begin in contexts):
            self.cache.point_causal(first, positions)
            mask = None
        else:
            real = None
            if any(pads):
                steps = torch.arange(longest, device=inputs.device)
                real = steps >= torch.tensor(pads, device=inputs.device).unsqueeze(1)
            mask = self.cache.point(first, positions, real, max(len(tokens) for tokens, _ in contexts))
        return self._forward(inputs, positions, mask)

    def step(self, rows: list[Row]) -> Tensor:
        """One token for every lane."""
        lengths = [row.length for row in rows]
        width = max(lengths) + 1
        self.cache.reserve(width, self.columns_max)
        inputs, positions = torch.tensor(
            [[row.sampled[-1] for row in rows], lengths], device=self.cache.shape.device
        ).unsqueeze_(2)
        return self._forward(inputs, positions, self.cache.point(0, positions, None, width))

    def _forward(self, inputs: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        logits, _ = self.network.forward(
            inputs, position_ids=positions, attention_mask=mask, past_key_values=self.cache
        )
        return logits

    def release(self, rows: list[Row], finished: list[int]) -> list[Row]:
        """Copy out what sessions keep, then close each gap with a lane from the end."""
        for slot in finished:
            row = rows[slot]
            if row.session is None or row.abandoned:
                continue
            if self.sessions.has_room(row.session, row.length * self.cache.shape.token_bytes):
                tokens = (row.tokens + row.sampled)[: row.length]
                self.sessions.store(row.session, SavedCache(self.version, tokens, *self.cache.read(slot, row.length)))
        leaving = set(finished)
        remaining = len(rows) - len(finished)
        gaps = [slot for slot in finished if slot < remaining]
        movers = [slot for slot in range(remaining, len(rows)) if slot not in leaving]
        if gaps:
            self.cache.copy_slots(movers, gaps, max(rows[slot].length for slot in movers))
        kept = rows[:remaining]
        for gap, mover in zip(gaps, movers, strict=True):
            kept[gap] = rows[mover]
        return kept
