"""The torch side of the embedded engine: it samples a batch of requests, and scores given sequences.

Each request has its own random numbers, which depend only on its seed, and uses one of them per token. Sampling inverts
the cumulative distribution at this number. So neither the size of a batch nor the order of its rows changes a sample.
The decode slots (`decode_slots.py`) hold the caches and compute the logits. A finished row leaves its slot at once, and
a queued row takes the slot. Everything here runs in the torch thread. The same rows in the same order give the same
operations; nothing depends on time. The caller passes the version of the weights.

top-p, top-k and min-p are not supported, because the trainer would have to reproduce them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollouts.errors import InferenceError
from rollouts.inference.embedded.cache import SessionCaches, SlotCache, whole_columns
from rollouts.inference.embedded.decode_slots import (
    CachedSlots,
    CacheSupport,
    DecodeRow,
    DecodeSlots,
    Network,
    PlainSlots,
    detect_cache_support,
)
from rollouts.inference.embedded.scheduler import InferenceStatistics
from rollouts.models.lora import use_adapter

BLOCK = 64  # random numbers per draw
GROWTH = 64  # columns reserved for replies at first; longer replies grow the buffer
WIDE = 2048  # rows wider than this do not share a batch with rows half as wide: attention would be mostly padding
SCORE_ROWS = 1024  # positions whose float32 log-probabilities are in memory at the same time


class Decoder:
    """Decodes rows with a transformers causal LM, with or without peft. Call it in one thread only.

    A batch is split into parts whose keys and values fit into `cache_bytes`. Each row starts from the cache of its
    session, if the session has one. `prefill_tokens_max` limits the context tokens of one forward pass.
    """

    def __init__(self, model: Any, *, rows_max: int, cache_bytes: int, prefill_tokens_max: int) -> None:
        self.model = model
        self.statistics = InferenceStatistics()
        self.network = Network(model, self.statistics)
        self.sessions = SessionCaches(cache_bytes)
        self.rows_max, self.cache_bytes, self.prefill_tokens_max = rows_max, cache_bytes, prefill_tokens_max
        self._cache: SlotCache | None = None

    @functools.cached_property
    def cache_support(self) -> CacheSupport:
        """How this model is decoded. The first call tests the model."""
        with evaluating(self.model):
            return detect_cache_support(self.network)

    def run(self, rows: list[DecodeRow], version: int, deliver: Callable[[list[DecodeRow]], None]) -> None:
        """Sample every row with weights `version`, one role after another. `deliver` is called with rows as soon as
        they finish.

        Raises InferenceError if the model's logits are not finite.
        """
        self.statistics.batches += 1
        with evaluating(self.model):
            for queue, count in self._parts(rows, version):
                slots = self._slots(queue, count, version)
                active: list[DecodeRow] = []
                while queue or active:
                    if any(row.abandoned for row in queue):
                        deliver([row for row in queue if row.abandoned])
                        queue[:] = [row for row in queue if not row.abandoned]
                        continue
                    joining = slots.take(len(active), queue)
                    if joining:
                        drawing, logits = slots.admit(joining, len(active))
                        active += drawing
                    else:
                        drawing, logits = active, slots.step(active)
                    self._draw(drawing, logits)
                    finished = [index for index, row in enumerate(active) if row.abandoned or row.finish is not None]
                    if finished:
                        done = [active[index] for index in finished]
                        active = slots.release(active, finished)
                        deliver(done)
                del slots  # frees its buffer before the next one is allocated

    def _parts(self, rows: list[DecodeRow], version: int) -> Iterator[tuple[list[DecodeRow], int]]:
        """The parts of a batch, each with its number of decode slots. In turn, the adapter of each role becomes active,
        and its rows get the caches of their sessions.
        """
        for role in dict.fromkeys(row.role for row in rows):
            if role:
                use_adapter(self.model, role)
            own = [row for row in rows if row.role == role]
            for row in own:
                saved = None if row.session is None else self.sessions.take(row.session, version, role)
                if saved is not None:
                    # The common prefix is reused; the last token is always computed.
                    row.cached = common_prefix(saved.tokens, row.tokens[:-1])
                    row.saved = saved if row.cached else None
            shape = self.cache_support.shape
            if shape is None:
                yield sorted(own, key=lambda row: len(row.tokens)), self.rows_max
            else:
                yield from split_batch(own, self.rows_max, max(1, self.cache_bytes // shape.token_bytes))

    def _draw(self, rows: list[DecodeRow], logits: Tensor) -> None:
        """Sample one token for each row."""
        ids, logprobs = sample(logits, [next(row.numbers) for row in rows], [row.temperature for row in rows])
        if not all(map(math.isfinite, logprobs)):
            raise InferenceError(
                "the model's logits are not finite, so nothing can be sampled. Its weights have diverged: "
                "use an earlier checkpoint or a smaller --lr"
            )
        self.statistics.sampled += len(rows)
        for row, token, logprob in zip(rows, ids, logprobs, strict=True):
            row.sampled.append(token)
            row.logprobs.append(logprob)

    def release_buffer(self) -> None:
        """Free the buffer between phases of generation. Sessions keep their caches."""
        self._cache = None

    def score(self, tokens: list[int], temperature: float, role: str = "") -> list[float]:
        """The logprob of each token [L] given the tokens before it, in float32; the first is 0.0."""
        if role:
            use_adapter(self.model, role)
        with evaluating(self.model):
            ids = torch.tensor([tokens], device=self.network.device)
            logits = self.network.model(input_ids=ids, use_cache=False).logits[0, :-1]
            scores = [0.0]
            for start in range(0, len(tokens) - 1, SCORE_ROWS):
                part = torch.log_softmax(logits[start : start + SCORE_ROWS].float() / (temperature or 1.0), dim=-1)
                targets = ids[0, start + 1 : start + 1 + part.shape[0]].unsqueeze(1)
                scores += part.gather(1, targets).squeeze(1).tolist()
        return scores

    def _slots(self, batch: list[DecodeRow], slots: int, version: int) -> DecodeSlots:
        shape = self.cache_support.shape
        if shape is None:
            return PlainSlots(self.network, slots, self.cache_support.padded)
        longest = max(row.width_max for row in batch)
        columns = min(longest, max(len(row.tokens) for row in batch) + GROWTH)
        cache = self._cache
        # A buffer of many short rows would grow in all its slots.
        if (
            cache is None
            or cache.slots < slots
            or cache.columns < columns
            or (cache.slots + 1) * max(cache.columns, whole_columns(longest)) * shape.token_bytes > self.cache_bytes
        ):
            self._cache = cache = None  # free the old one first
            self._cache = cache = SlotCache(shape, slots, columns)
        return CachedSlots(self.network, cache, self.sessions, version, slots, longest, self.prefill_tokens_max)


def split_batch(rows: list[DecodeRow], rows_max: int, tokens_max: int) -> list[tuple[list[DecodeRow], int]]:
    """Split a batch by length into parts, each with its number of decode slots.

    Within a part, rows are sorted from short to long contexts; rows of one length keep their order. A `SlotCache`
    allocates (slots + 1) x columns tokens, which stay within `tokens_max` unless a single row needs more. One part is
    fastest if it fits, because more slots cost less than more passes. If it does not fit, or if attention to padding
    would cost more than passes, then rows of half the length form another part.
    """
    batches = []
    rest = sorted(rows, key=lambda row: row.width_max)
    while rest:
        width = rest[-1].width_max
        slots = max(1, min(rows_max, tokens_max // whole_columns(width) - 1))
        fits = slots >= min(rows_max, len(rest)) and width <= WIDE
        first = 0 if fits else next(i for i, row in enumerate(rest) if 2 * row.width_max > width)
        # The sort is stable, so a group's equal prompts stay adjacent and are prefilled once.
        batch = sorted(rest[first:], key=lambda row: len(row.tokens))
        batches.append((batch, min(slots, len(batch))))
        del rest[first:]
    return batches


def common_prefix(left: list[int], right: list[int]) -> int:
    """The length of the common prefix of two lists.

    >>> common_prefix([1, 2, 3], [1, 2, 4, 5])
    2
    """
    size = min(len(left), len(right))
    if left[:size] == right[:size]:
        return size
    return next(index for index in range(size) if left[index] != right[index])


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Disable gradients and put every module in eval mode. After the block, modules that were in training mode are in
    training mode again.
    """
    # Not inference_mode: tensors that a module caches (rotary tables) are used in training too.
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


# --- sampling --------------------------------------------------------------------------------------------------------


def uniforms(seed: int, offset: int = 0) -> Iterator[float]:
    """Uniform float32 numbers in [0, 1 - 2**-24] that depend on the seed alone, without the first `offset` numbers.

    >>> first, second = uniforms(7), uniforms(7, offset=1)
    >>> [next(first), next(first)][1] == next(second)
    True
    """
    generator = np.random.Generator(np.random.Philox(key=seed % 2**128))
    generator.random(offset, dtype=np.float32)
    while True:
        yield from generator.random(BLOCK, dtype=np.float32).tolist()


def sample(logits: Tensor, uniforms: list[float], temperatures: list[float]) -> tuple[list[int], list[float]]:
    """Sample one id for each row; returns ids and logprobs.

    `logits` is [n, V] in any float dtype, `uniforms` is [n] in [0, 1), and `temperatures` is [n]. Temperature 0 gives
    the most likely id, with its logprob at temperature 1. Logprobs are natural logarithms, computed in float32, and at
    most 0. An id of probability 0 is never sampled. A row whose logits are not finite gets a NaN logprob.
    """
    assert logits.shape[0] == len(uniforms) == len(temperatures), (logits.shape, len(uniforms), len(temperatures))
    scores = logits.float()
    if any(t not in (0.0, 1.0) for t in temperatures):
        divisors = torch.tensor([t or 1.0 for t in temperatures], device=logits.device)
        scores = scores / divisors.unsqueeze(1)
    logprobs = torch.log_softmax(scores, dim=-1)
    ids = _invert(logprobs, torch.tensor(uniforms, device=logits.device))
    if 0.0 in temperatures:
        greedy = torch.tensor([t == 0.0 for t in temperatures], device=logits.device)
        ids = torch.where(greedy, logprobs.argmax(dim=-1), ids)
    chosen = logprobs.gather(1, ids.unsqueeze(1)).squeeze(1)
    # One transfer instead of two: each transfer from an accelerator waits for the device.
    packed = torch.stack((ids.int(), chosen.view(torch.int32))).cpu().numpy()
    drawn, values = packed[0].tolist(), packed[1].view(np.float32).tolist()
    for row, value in enumerate(values):
        if value == -np.inf:
            drawn[row], values[row] = _draw_exactly(logprobs[row], uniforms[row])
    return drawn, values


def _invert(logprobs: Tensor, uniforms: Tensor) -> Tensor:
    """The first id [n] whose cumulative probability exceeds the number. `right` skips ids of probability 0."""
    cumulative = logprobs.exp().cumsum(dim=-1)
    thresholds = uniforms.unsqueeze(1) * cumulative[:, -1:]  # below the total, since numbers are at most 1 - 2**-24
    ids = torch.searchsorted(cumulative, thresholds, right=True).squeeze(1)
    return ids.clamp_max_(logprobs.shape[1] - 1)  # changes rows with NaN only


def _draw_exactly(logprobs: Tensor, uniform: float) -> tuple[int, float]:
    """Sample in float64 on the host: a parallel sum on an accelerator may not be monotone to the last bit."""
    probabilities = logprobs.double().exp().cpu().numpy()
    cumulative = np.cumsum(probabilities)
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return index, float(logprobs[index])
