"""Decode slots for rows that decode side by side, with our own cache or the model's.

`CachedSlots` is the fast way, for models with plain full attention. It uses one preallocated buffer (`cache.py`). Equal
prompts of a batch (the rollouts of a group) are prefilled once. A session's next turn prefills only its new tokens.
When a row finishes, the last row moves into its slot. Queued rows join as soon as enough slots are free. A step
computes one comparison for its mask and concatenates nothing.

`PlainSlots` is the slower way, over the model's own cache, for models with sliding windows, linear attention or other
state. It computes whole contexts anew each turn. Attention-only models take contexts of mixed lengths, padded on the
left. Models with recurrent state take contexts of one length at a time, so that padding never enters a state.
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

PADDING_MAX = 512  # more padding than this costs more than one more pass


@dataclass(eq=False)
class DecodeRow:
    """One request while it decodes. `numbers` are its own random numbers. Any thread may set `abandoned`, which removes
    the row from the batch at the next step.
    """

    tokens: list[int]
    max_tokens: int
    stop_ids: frozenset[int]
    temperature: float
    numbers: Iterator[float]
    session: str | None = None
    role: str = ""  # whose adapter decodes it; empty: the model has no adapters by role
    pending: Any = None  # the `PendingRequest` that the row answers
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    saved: SavedCache | None = None
    cached: int = 0  # leading tokens of `tokens` whose keys and values come from `saved`
    abandoned: bool = False

    @property
    def length(self) -> int:
        """The number of tokens with keys and values while the row decodes: all but the last sampled one."""
        return len(self.tokens) + len(self.sampled) - 1

    @property
    def width_max(self) -> int:
        """The largest number of columns that the row may need."""
        return len(self.tokens) + self.max_tokens

    @property
    def finish(self) -> Literal["stop", "length"] | None:
        """Why the row is finished; None while it decodes."""
        if self.sampled and self.sampled[-1] in self.stop_ids:
            return "stop"
        return "length" if len(self.sampled) >= self.max_tokens else None


class Network:
    """A causal LM of transformers, as a function from ids to the logits of each row's last position [n, V].

    `forward` takes the model's own keyword arguments. Only the last position goes through the LM head.
    """

    def __init__(self, model: Any, statistics: InferenceStatistics) -> None:
        # LoRA layers are inside the base model, so peft's wrapper only costs time.
        promptless = not any(c.is_prompt_learning for c in getattr(model, "peft_config", {}).values())
        unwrap = getattr(model, "get_base_model", None)
        self.model = unwrap() if unwrap is not None and promptless else model
        parameters = inspect.signature(self.model.forward).parameters
        self.cache_name = "cache_params" if "cache_params" in parameters else "past_key_values"
        self._options = {"use_cache": True} | ({"logits_to_keep": 1} if "logits_to_keep" in parameters else {})
        self.statistics = statistics

    @property
    def device(self) -> torch.device:
        """The device of the embedding, which ids are moved to."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    def forward(self, ids: Tensor, **arguments: Any) -> tuple[Tensor, Any]:
        """The last logits [n, V] and the model's cache, for ids [n, S]."""
        self.statistics.passes += 1
        output = self.model(input_ids=ids, **self._options, **arguments)
        return output.logits[:, -1], getattr(output, self.cache_name, None)


# The loop in `Decoder.run` owns the active rows; the slots own their caches, in the same order. The loop calls `take`
# to get rows from its queue, `admit` to prefill them behind the active rows, `step` to compute logits for all rows, and
# `release` to remove finished rows.
@dataclass
class CachedSlots:
    """Row i decodes in slot i of the cache, which grows to `columns_max` at most. A session's saved cache is only used
    if weights `version` computed it.
    """

    network: Network
    cache: SlotCache
    sessions: SessionCaches
    version: int
    count: int
    columns_max: int
    prefill_tokens_max: int

    def take(self, active: int, queue: list[DecodeRow]) -> list[DecodeRow]:
        """Remove and return the rows of the queue that join the `active` ones now, perhaps none.

        Rows join when no slot is busy or a quarter of the slots is free, because a pass for one row costs about the
        same as a pass for ten.
        """
        free = min(self.count - active, len(queue))
        if active and free < min(len(queue), max(1, self.count // 4)):
            return []
        joining = queue[:free]
        del queue[:free]
        return joining

    def admit(self, rows: list[DecodeRow], active: int) -> tuple[list[DecodeRow], Tensor]:
        """Prefill behind the active rows: equal new contexts once, continued sessions from their cache. Returns the
        rows in slot order, with their logits [m, V].
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

    def _admit_fresh(self, rows: list[DecodeRow], first: int) -> tuple[list[DecodeRow], Tensor]:
        members: dict[tuple[int, ...], list[DecodeRow]] = {}
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
        """Logits [m, V] after each context. A context is (tokens, begin): the first `begin` tokens are in its slot
        already.
        """
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
        # Padding is on the left, so the last position of every row is its last token.
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

    def step(self, rows: list[DecodeRow]) -> Tensor:
        """Process the last sampled token of each row; returns logits [n, V]."""
        lengths = [row.length for row in rows]
        width = max(lengths) + 1
        self.cache.reserve(width, self.columns_max)
        last = [row.sampled[-1] for row in rows]
        inputs, positions = torch.tensor([last, lengths], device=self.cache.shape.device).unsqueeze_(2)
        mask = self.cache.point(0, positions, None, width)
        return self.network.forward(inputs, position_ids=positions, attention_mask=mask, past_key_values=self.cache)[0]

    def release(self, rows: list[DecodeRow], finished: list[int]) -> list[DecodeRow]:
        """Save the caches of sessions, then fill each gap with a row from the end. Returns the remaining rows in their
        new slot order.
        """
        for slot in finished:
            row = rows[slot]
            if row.session is None or row.abandoned:
                continue
            if self.sessions.has_room(row.session, row.length * self.cache.shape.token_bytes):
                tokens = (row.tokens + row.sampled)[: row.length]
                self.sessions.store(
                    row.session, SavedCache(self.version, tokens, *self.cache.read(slot, row.length), row.role)
                )
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
    """DecodeSlots over the model's own cache. If `padded`, contexts of different lengths may share a batch."""

    network: Network
    count: int
    padded: bool
    _cache: Any = None
    _mask: Tensor | None = None

    def take(self, active: int, queue: list[DecodeRow]) -> list[DecodeRow]:
        """Remove and return the next batch, if no row is active. Without padding, a batch has contexts of one
        length.
        """
        if active:
            return []
        size = min(self.count, len(queue))
        if not self.padded:
            length = len(queue[0].tokens)
            size = next((n for n in range(size) if len(queue[n].tokens) != length), size)
        joining = queue[:size]
        del queue[:size]
        return joining

    def admit(self, rows: list[DecodeRow], active: int) -> tuple[list[DecodeRow], Tensor]:
        """Compute each distinct context once, then give every row its own copy of the cache."""
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
            raise ModelError(f"{name} has no cache that transformers can reorder, so it cannot be sampled here")
        if len(contexts) < len(rows):
            rank = {context: index for index, context in enumerate(contexts)}
            logits = logits.index_select(0, self._select([rank[tuple(row.tokens)] for row in rows]))
        return rows, logits

    def step(self, rows: list[DecodeRow]) -> Tensor:
        """Process the last sampled token of each row; returns logits [n, V]."""
        arguments: dict[str, Any] = {self.network.cache_name: self._cache}
        inputs = torch.tensor([[row.sampled[-1], row.length] for row in rows], device=self.network.device)
        if self._mask is not None:
            self._mask = torch.cat((self._mask, self._mask.new_ones(len(rows), 1)), dim=1)
            arguments |= {"attention_mask": self._mask, "position_ids": inputs[:, 1:]}
        logits, self._cache = self.network.forward(inputs[:, :1], **arguments)
        return logits

    def release(self, rows: list[DecodeRow], finished: list[int]) -> list[DecodeRow]:
        """Remove the finished rows; returns the remaining rows, in order."""
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

# --- which way a model supports -------------------------------------------------------------------------------------

LENGTHS = (7, 4, 7)  # test contexts: two of one length, and one that needs padding


class CacheSupport(NamedTuple):
    """`shape` is set if `CachedSlots` works; else `reason` says why not. `padded`: whether left padding leaves the
    logits unchanged.
    """

    shape: KVShape | None
    padded: bool
    reason: str


def detect_cache_support(network: Network) -> CacheSupport:
    """Test the model with a few short forward passes. Call it in the torch thread, in eval mode without gradients.

    `CachedSlots` needs a model whose own cache is plain full attention in every layer. Also, its logits with our cache,
    masks and positions, padded and continued, must equal those of a plain forward pass.
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
        shape, reason = None, f"its attention is {attention}, which does not accept our masks"
    if shape is not None:
        reason = _try(network, shape, contexts)
    return CacheSupport(None if reason else shape, is_padded and not is_stateful and not is_linear, reason)


def _shape(model: Any, layers: list[Any]) -> tuple[KVShape | None, str]:
    """The shape that all layers share; else None and the reason."""
    config = model.config.get_text_config(decoder=True)
    kinds = sorted(set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"})
    if kinds:
        return None, f"it has layers of type {', '.join(kinds)}"
    if not layers:
        return None, "it keeps its own state instead of keys and values"
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
    """Prefill padded contexts, continue by two tokens, step once, and compare with plain passes. "" if they agree."""
    cache = SlotCache(shape, len(contexts), max(map(len, contexts)) + 4)
    slots = CachedSlots(network, cache, SessionCaches(0), 0, len(contexts), cache.columns, prefill_tokens_max=1 << 20)
    rows = [DecodeRow(context, 9, frozenset(), 1.0, iter(())) for context in contexts]
    try:
        rows, first = slots.admit(rows, 0)
        longer = [[*row.tokens, 1, 2] for row in rows]
        second = slots.prefill(0, [(tokens, len(row.tokens)) for tokens, row in zip(longer, rows, strict=True)])
        for row, tokens in zip(rows, longer, strict=True):
            row.tokens, row.sampled = tokens, [3]
        third = slots.step(rows)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        return f"it does not accept our cache ({type(error).__name__}: {error})"
    for index, row in enumerate(rows):
        for logits, tokens in ((first, row.tokens[:-2]), (second, row.tokens), (third, [*row.tokens, 3])):
            (plain,), _ = network.forward(torch.tensor([tokens], device=network.device))
            gap = (logits[index].float() - plain.float()).abs().max().item()
            tolerance = 1e-3 if plain.dtype in (torch.float32, torch.float64) else 5e-2
            if not gap <= tolerance * (1 + plain.float().abs().max().item()):
                return f"its logits with our cache differ by {gap:.3g} from those of a plain pass"
    return ""
