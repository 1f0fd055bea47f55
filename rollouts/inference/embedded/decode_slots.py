"""Rows decoded side by side, in one of two ways, and the probe that finds out which of them a model takes.

`CachedSlots` is the fast way, for models with plain full attention: one preallocated buffer (`cache.py`). Equal prompts
of a wave (a group's members) are prefilled once; a session's next turn prefills only what is new; finished rows leave
by moving the last lane into the gap; rows still queued join as soon as enough slots are free; nothing is concatenated
or masked anew beyond one comparison a step.

`PlainSlots` is the slower way, over whatever cache the model makes by itself: sliding windows, linear attention and
other state. Whole contexts are computed anew each turn. Attention-only models take contexts of mixed lengths, padded on
the left; models with recurrent state take contexts of one length at a time, so that padding can never enter a state.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from rollouts.errors import ModelError
from rollouts.inference.embedded.cache import KVShape, SavedCache, SessionCaches, SlotCache
from rollouts.inference.embedded.scheduler import InferenceStatistics

PADDING_MAX = 512  # padding worth one more pass instead: about what a pass costs besides its tokens


@dataclass(eq=False)
class Row:
    """One request while it is decoded, by the `numbers` of its own random stream. `abandoned`, set from any thread,
    makes the row leave at the next step.
    """

    tokens: list[int]
    max_tokens: int
    stop_ids: frozenset[int]
    temperature: float
    numbers: Iterator[float]
    session: str | None = None
    pending: Any = None  # the `PendingRequest` that it answers
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    saved: SavedCache | None = None
    cached: int = 0  # leading tokens of `tokens` whose keys and values come from `saved`
    abandoned: bool = False

    @property
    def length(self) -> int:
        """Tokens whose keys and values exist while the row decodes: all but the one sampled last."""
        return len(self.tokens) + len(self.sampled) - 1

    @property
    def width_max(self) -> int:
        """Columns it may come to need."""
        return len(self.tokens) + self.max_tokens

    @property
    def finish(self) -> Literal["stop", "length"] | None:
        """Why it is over, or None."""
        if self.sampled and self.sampled[-1] in self.stop_ids:
            return "stop"
        return "length" if len(self.sampled) >= self.max_tokens else None


class Network:
    """A causal LM of transformers, seen as a function from ids to the logits of each row's last position [n, V].

    `forward` takes the model's own keyword arguments; only the last position goes through the LM head.
    """

    def __init__(self, model: Any, statistics: InferenceStatistics) -> None:
        # LoRA layers live inside the base model, so peft's wrapper adds nothing but time to each pass.
        promptless = not any(c.is_prompt_learning for c in getattr(model, "peft_config", {}).values())
        unwrap = getattr(model, "get_base_model", None)
        self.model = unwrap() if unwrap is not None and promptless else model
        parameters = inspect.signature(self.model.forward).parameters
        self.cache_name = "cache_params" if "cache_params" in parameters else "past_key_values"
        self._options = {"use_cache": True} | ({"logits_to_keep": 1} if "logits_to_keep" in parameters else {})
        self.statistics = statistics

    @property
    def device(self) -> torch.device:
        """Where ids go: the device of the embedding."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    def forward(self, ids: Tensor, **arguments: Any) -> tuple[Tensor, Any]:
        """Last logits [n, V] and the cache that the model used, for ids [n, S]."""
        self.statistics.passes += 1
        output = self.model(input_ids=ids, **self._options, **arguments)
        return output.logits[:, -1], getattr(output, self.cache_name, None)


# The loop owns the rows that decode side by side; slots own their caches, in the same order. The loop asks them to
# `take` rows off its queue, to `admit` them behind those that decode, for a `step` of all, and to `release` those that
# finished.
@dataclass
class CachedSlots:
    """Lane i is slot i of the cache, which is widened to `columns_max` at most. What sessions keep is of weights
    `version`.
    """

    network: Network
    cache: SlotCache
    sessions: SessionCaches
    version: int
    count: int
    columns_max: int
    prefill_tokens_max: int

    def take(self, active: int, queue: list[Row]) -> list[Row]:
        """Take off the queue the rows that join `active` others now, perhaps none: they join when no lane is busy or a
        quarter is free, for a pass for one row costs much the same as for ten.
        """
        free = min(self.count - active, len(queue))
        if active and free < min(len(queue), max(1, self.count // 4)):
            return []
        joining = queue[:free]
        del queue[:free]
        return joining

    def admit(self, rows: list[Row], active: int) -> tuple[list[Row], Tensor]:
        """Prefill behind the active rows: equal new contexts once, continued sessions from their cache. Gives the rows
        in lane order, with their logits [m, V].
        """
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
        mask = real = None
        if any(pads):
            steps = torch.arange(longest, device=inputs.device)
            real = steps >= torch.tensor(pads, device=inputs.device).unsqueeze(1)
        if real is None and not any(begin for _, begin in contexts):
            self.cache.point_causal(first, positions)
        else:
            mask = self.cache.point(first, positions, real, max(len(tokens) for tokens, _ in contexts))
        return self.network.forward(inputs, position_ids=positions, attention_mask=mask, past_key_values=self.cache)[0]

    def step(self, rows: list[Row]) -> Tensor:
        """Feed each row its token sampled last; gives logits [n, V]."""
        lengths = [row.length for row in rows]
        width = max(lengths) + 1
        self.cache.reserve(width, self.columns_max)
        last = [row.sampled[-1] for row in rows]
        inputs, positions = torch.tensor([last, lengths], device=self.cache.shape.device).unsqueeze_(2)
        mask = self.cache.point(0, positions, None, width)
        return self.network.forward(inputs, position_ids=positions, attention_mask=mask, past_key_values=self.cache)[0]

    def release(self, rows: list[Row], finished: list[int]) -> list[Row]:
        """Copy out what sessions keep, then close each gap with a lane from the end. Gives the rows that remain, in
        their new lane order.
        """
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


@dataclass
class PlainSlots:
    """DecodeSlots over the model's own cache. `padded`: contexts of different lengths may share a batch."""

    network: Network
    count: int
    padded: bool
    _cache: Any = None
    _mask: Tensor | None = None

    def take(self, active: int, queue: list[Row]) -> list[Row]:
        """A batch at a time; without padding, the leading contexts of one length."""
        if active:
            return []
        size = min(self.count, len(queue))
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


DecodeSlots = CachedSlots | PlainSlots

# --- which of the two -----------------------------------------------------------------------------------------------

LENGTHS = (7, 4, 7)  # short contexts: two equal ones, and one that must be padded


class CacheSupport(NamedTuple):
    """`shape` is set where the fast way works, else `reason` says why not; `padded`: left padding does no harm."""

    shape: KVShape | None
    padded: bool
    reason: str


def detect_cache_support(network: Network) -> CacheSupport:
    """Try the model; call it in the torch thread, in eval mode without gradients. A handful of short forward passes.

    It takes the fast way only if its own cache is plain full attention in every layer, and the logits that it gives
    with a cache, masks and positions of ours, padded and continued, are those of a plain forward pass.
    """
    model = network.model
    attention = getattr(model.config, "_attn_implementation", None)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    contexts = [[(7 * row + 3 * i + 1) % vocabulary for i in range(n)] for row, n in enumerate(LENGTHS)]
    _, cache = network.forward(torch.tensor([contexts[0]], device=network.device))
    layers = list(getattr(cache, "layers", []))
    is_stateful = bool(getattr(model, "_is_stateful", False))
    is_linear = any("Linear" in base.__name__ for layer in layers for base in type(layer).__mro__)
    is_padded = bool(layers) and all(isinstance(layer, DynamicLayer) for layer in layers)
    shape, reason = _shape(model, [] if is_stateful else layers)
    if shape is not None and attention not in ("sdpa", "eager"):
        shape, reason = None, f"its attention is {attention}, which takes no mask of ours"
    if shape is not None:
        reason = _try(network, shape, contexts)
    return CacheSupport(None if reason else shape, is_padded and not is_stateful and not is_linear, reason)


def _shape(model: Any, layers: list[Any]) -> tuple[KVShape | None, str]:
    """The shape that all layers share, or None and why there is none."""
    config = model.config.get_text_config(decoder=True)
    kinds = sorted(set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"})
    if kinds:
        return None, f"it has layers of type {', '.join(kinds)}"
    if not layers:
        return None, "it keeps a state of its own instead of keys and values"
    odd = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if odd:
        return None, f"its cache has layers of type {', '.join(odd)}"
    if any(layer.keys is None or layer.keys.ndim != 4 for layer in layers):
        return None, "some of its layers keep no keys"
    shapes = {
        KVShape(len(layers), k.shape[1], k.shape[3], v.shape[3], k.dtype, k.device)
        for k, v in ((layer.keys, layer.values) for layer in layers)
    }
    if len(shapes) > 1:
        return None, "its layers differ in shape or device"
    return shapes.pop(), ""


def _try(network: Network, shape: KVShape, contexts: list[list[int]]) -> str:
    """Prefill padded, continue two tokens, step once, all in slots; compare with plain passes. Empty if they agree."""
    cache = SlotCache(shape, len(contexts), max(map(len, contexts)) + 4)
    slots = CachedSlots(network, cache, SessionCaches(0), 0, len(contexts), cache.columns, prefill_tokens_max=1 << 20)
    rows = [Row(context, 9, frozenset(), 1.0, iter(())) for context in contexts]
    try:
        rows, first = slots.admit(rows, 0)
        longer = [[*row.tokens, 1, 2] for row in rows]
        second = slots.prefill(0, [(tokens, len(row.tokens)) for tokens, row in zip(longer, rows, strict=True)])
        for row, tokens in zip(rows, longer, strict=True):
            row.tokens, row.sampled = tokens, [3]
        third = slots.step(rows)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        return f"it does not take a cache of ours ({type(error).__name__}: {error})"
    for index, row in enumerate(rows):
        for logits, tokens in ((first, row.tokens[:-2]), (second, row.tokens), (third, [*row.tokens, 3])):
            (plain,), _ = network.forward(torch.tensor([tokens], device=network.device))
            gap = (logits[index].float() - plain.float()).abs().max().item()
            tolerance = 1e-3 if plain.dtype in (torch.float32, torch.float64) else 5e-2
            if not gap <= tolerance * (1 + plain.float().abs().max().item()):
                return f"its logits with a cache of ours differ by {gap:.3g} from those of a plain pass"
    return ""
