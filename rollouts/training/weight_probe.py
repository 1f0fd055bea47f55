"""What engine and trainer make of the same tokens: fixed sequences, how far apart is too far, and what a fault looks
like.

Two computations of the same weights agree within rounding, whatever the engine. Where they do not, the numbers often
say why: they are those of an earlier version, or those of the new weights with one tensor of the old ones. Left out:
when engines are probed (`weight_sync`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import trio

from rollouts.errors import TrainingError
from rollouts.training.types import Row, TrainBatch, TrainingBackend

__all__ = [
    "TOLERANCE",
    "TOLERANCE_HALF",
    "TOLERANCE_SERVER",
    "Apart",
    "Sequences",
    "agree",
    "find_tensors",
    "furthest_apart",
    "has_not_moved",
    "parity_tolerance",
    "probe_sequences",
    "trainer_logprobs",
]

Kind = Literal["full", "adapter"]

SCORED_TOKENS = 128
PROMPT_TOKENS = 160  # fills a block of every server's cache: the largest holds 128
SAMPLED_TOKENS = 12
TOLERANCE = 1e-3  # nats a token, of float32 and wider, of engines that compute as the trainer does
TOLERANCE_SERVER = 1e-4  # of servers in float32: seen are 7e-6
TOLERANCE_HALF = 5e-2  # of weights of 16 bits and fewer
NOISE_SHARE = 0.1  # of the tolerance: what two computations of the same weights differ by
MOVED_NOISES = 20.0  # a trainer that moved so many times the noise is seen to have moved
FIND_SECONDS = 60.0


class Sequences(NamedTuple):
    """Fixed ids, all over the vocabulary: what engines score, what they continue, and a prompt for those that want
    another than before; at most `sampled` ids are asked for.
    """

    scored: list[int]
    prompt: list[int]
    other: list[int]
    sampled: int


class Apart(NamedTuple):
    """Where two computations differ most: the token's place, both numbers, how far apart, how far they may be."""

    place: int
    ours: float
    theirs: float
    apart: float
    allowed: float

    @property
    def agrees(self) -> bool:
        """A NaN is no agreement."""
        return self.apart <= self.allowed

    def words(self, what: str) -> str:
        """`what` is the sequence, for a person."""
        return (
            f"token {self.place} of {what} has the log-probability {self.theirs:.6g} there and {self.ours:.6g} in the "
            f"trainer, {self.apart:.2g} apart (at most {self.allowed:g})"
        )


def probe_sequences(context_tokens: int, vocabulary_size: int) -> Sequences:
    """The sequences for engines with contexts so long and so many ids."""
    assert context_tokens >= 4 and vocabulary_size >= 1, (context_tokens, vocabulary_size)
    sampled = min(SAMPLED_TOKENS, context_tokens // 4)
    prompt = min(PROMPT_TOKENS, context_tokens - sampled - 1)
    scored = min(SCORED_TOKENS, context_tokens - 1)
    # The last ids of a vocabulary are often placeholders, which some servers do not take.
    ids = max(1, vocabulary_size - vocabulary_size // 8)
    return Sequences(_spread(scored, ids, 1), _spread(prompt, ids, 2), _spread(prompt, ids, 3), sampled)


def _spread(length: int, ids: int, seed: int) -> list[int]:
    """Ids as random as they have to be, the same everywhere (a generator of Lehmer's)."""
    state, found = 48271 * seed, []
    for _ in range(length):
        state = state * 48271 % 2147483647
        found.append(state % ids)
    return found


def parity_tolerance(weights: Mapping[str, Any], compute_dtype: str = "", *, full: float = TOLERANCE) -> float:
    """How far apart, in nats a token, two computations with weights of these types may be; `compute_dtype` is what
    layers compute in, where that is not the type of the weights; `full` is the bound of float32.
    """
    if compute_dtype in ("bfloat16", "float16"):
        return TOLERANCE_HALF
    halves = (each for each in weights.values() if each.is_floating_point() and each.itemsize < 4)
    return full if next(halves, None) is None else TOLERANCE_HALF


async def trainer_logprobs(
    backend: TrainingBackend, sequences: Sequence[list[int]], temperature: float = 1.0
) -> list[list[float]]:
    """The trainer's logprob of each token of each sequence [L], the first 0.0."""
    rows = []
    for index, tokens in enumerate(sequences):
        zeros = [0.0] * len(tokens)
        rows.append(Row(tokens, list(zeros), list(zeros), list(zeros), list(zeros), index, index))
    batch = TrainBatch(rows, denominator=1.0, rewards=[0.0] * len(rows), step=0, temperature=temperature)
    output = await backend.forward(batch, ("logprobs",))
    assert output.logprobs is not None, "logprobs were asked for"
    return output.logprobs


def furthest_apart(ours: Sequence[float], theirs: Sequence[float], tolerance: float, *, first: int = 1) -> Apart:
    """Where they differ most, from place `first` on."""
    assert len(ours) == len(theirs) > first, f"{len(ours)=} {len(theirs)=} {first=}"
    # In 16 bits the logarithm of a small probability is as inexact as it is large.
    is_half = tolerance >= TOLERANCE_HALF
    scales = [max(1.0, abs(value)) if is_half else 1.0 for value in ours]
    apart = [abs(one - other) for one, other in zip(ours, theirs, strict=True)]
    place = max(range(first, len(ours)), key=lambda index: (math.isnan(apart[index]), apart[index] / scales[index]))
    return Apart(place, ours[place], theirs[place], apart[place], tolerance * scales[place])


def agree(ours: Sequence[float], theirs: Sequence[float], tolerance: float) -> bool:
    """Whether no token is too far apart."""
    return furthest_apart(ours, theirs, tolerance).agrees


def has_not_moved(
    ours: tuple[Sequence[float], Sequence[float]], theirs: tuple[Sequence[float], Sequence[float]], tolerance: float
) -> bool:
    """Of (before, after) of the trainer and of an engine that agreed before: whether the trainer moved more than noise,
    and the engine not along with it. Sees steps that are smaller than the tolerance, since it looks at all tokens; in
    16 bits, where noise is as large as they are, only an engine whose numbers are the same to the last bit.
    """
    trainer = [after - before for before, after in zip(*ours, strict=True)]
    squared = sum(step * step for step in trainer)
    if math.sqrt(squared) < MOVED_NOISES * NOISE_SHARE * tolerance:
        return False
    if tolerance >= TOLERANCE_HALF:
        return list(theirs[0]) == list(theirs[1])
    engine = [after - before for before, after in zip(*theirs, strict=True)]
    along = sum(one * other for one, other in zip(trainer, engine, strict=True)) / squared
    return not along > 0.5  # 1 where it moved as the trainer did


async def find_tensors(
    backend: TrainingBackend,
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    tokens: list[int],
    theirs: Sequence[float],
    tolerance: float,
) -> list[str]:
    """The tensors that an engine seems to have kept from `old`: with one of them (and those tied to it) put back, the
    trainer gives the engine's numbers. Empty where none does, or it cannot be found out in a minute.

    The trainer's weights are tried out and put back; they are whole in the end.
    """
    if old.keys() != new.keys() or any(old[name].shape != new[name].shape for name in new):
        return []
    found: list[tuple[float, str]] = []
    try:
        with trio.move_on_after(FIND_SECONDS):
            for names in _changed(old, new):
                await backend.load_weights({**new, **{name: old[name] for name in names}})
                (ours,) = await trainer_logprobs(backend, [tokens])
                apart = furthest_apart(ours, theirs, tolerance)
                if apart.agrees:
                    found.append((apart.apart, names[0]))
    except TrainingError:
        return []  # it trains an adapter, and these are its merged weights: nothing was loaded
    finally:
        with trio.CancelScope(shield=True):
            await _restore(backend, new)
    return [name for _, name in sorted(found)]


async def _restore(backend: TrainingBackend, weights: Mapping[str, Any]) -> None:
    try:
        await backend.load_weights(dict(weights))
    except TrainingError:
        return  # as above: they were never taken


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[list[str]]:
    """Names of tensors that changed, those that are tied (equal before and after) together."""
    import torch

    groups: list[list[str]] = []
    for name in new:
        if torch.equal(old[name], new[name]):
            continue
        for group in groups:
            first = group[0]
            alike = new[first].shape == new[name].shape and torch.equal(new[first], new[name])
            if alike and torch.equal(old[first], old[name]):
                group.append(name)
                break
        else:
            groups.append([name])
    return groups
