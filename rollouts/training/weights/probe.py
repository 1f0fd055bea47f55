"""Tests that an engine serves the trainer's weights: both must compute the same numbers for the same tokens.

Two computations with the same weights agree up to rounding, in any engine. If they differ, the numbers often show why:
the engine's numbers are those of an earlier version. Not here: how weights are sent, and when engines are tested
(`sync`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import trio

from rollouts.errors import EngineRequestError, InferenceError
from rollouts.inference.base import (
    TOLERANCE_HALF,
    Apart,
    GenerateRequest,
    Generation,
    InferenceBackend,
    furthest_apart,
    members_of,
)
from rollouts.models.folders import Kind
from rollouts.training.batches import Row, TrainBatch, TrainingBackend

E = TypeVar("E")
T = TypeVar("T")

SCORED_TOKENS = 128
PROMPT_TOKENS = 160  # fills a block of every server's cache; the largest has 128 tokens
SAMPLED_TOKENS = 12
TOLERANCE = 1e-3  # nats per token, in float32 and float64, for engines that compute like the trainer
TOLERANCE_SERVER = 1e-4  # for servers in float32; measured: 7e-6
NOISE_SHARE = 0.1  # fraction of the tolerance by which two computations with the same weights differ
MOVED_NOISES = 20.0  # if the trainer's numbers moved by this many times the noise, its weights have changed
COPY_TOKENS = 32  # the length of the sequence for engines in this process


# --- numbers ----------------------------------------------------------------------------------------------------------


class Sequences(NamedTuple):
    """Fixed token ids from the whole vocabulary: a sequence to score, a prompt to continue, and a prompt for engines
    that need a new one. At most `sampled` ids are sampled.
    """

    scored: list[int]
    prompt: list[int]
    other: list[int]
    sampled: int


def probe_sequences(context_tokens: int, vocabulary_size: int) -> Sequences:
    """Make the sequences for engines with this context length and number of ids."""
    assert context_tokens >= 4 and vocabulary_size >= 1, (context_tokens, vocabulary_size)
    sampled = min(SAMPLED_TOKENS, context_tokens // 4)
    prompt = min(PROMPT_TOKENS, context_tokens - sampled - 1)
    scored = min(SCORED_TOKENS, context_tokens - 1)
    # The last ids of a vocabulary are often placeholders, which some servers refuse.
    ids = max(1, vocabulary_size - vocabulary_size // 8)
    return Sequences(_spread(scored, ids, 1), _spread(prompt, ids, 2), _spread(prompt, ids, 3), sampled)


def _spread(length: int, ids: int, seed: int) -> list[int]:
    """Pseudo-random ids, the same on every machine (a Lehmer generator)."""
    state, found = 48271 * seed, []
    for _ in range(length):
        state = state * 48271 % 2147483647
        found.append(state % ids)
    return found


def parity_tolerance(weights: Mapping[str, Any], compute_dtype: str = "", *, full: float = TOLERANCE) -> float:
    """The allowed difference in nats per token between two computations with weights of these types.

    `compute_dtype` is that of the layers' computations, if it differs from the weights. `full` is the limit for
    float32.
    """
    if compute_dtype in ("bfloat16", "float16"):
        return TOLERANCE_HALF
    halves = (each for each in weights.values() if each.is_floating_point() and each.itemsize < 4)
    return full if next(halves, None) is None else TOLERANCE_HALF


async def trainer_logprobs(backend: TrainingBackend, tokens: list[int], temperature: float = 1.0) -> list[float]:
    """The trainer's logprob of each token [L]; 0.0 for the first."""
    zeros = [0.0] * len(tokens)
    row = Row(tokens, [*zeros], [*zeros], [*zeros], [*zeros], 0, 0)
    batch = TrainBatch([row], denominator=1.0, rewards=[0.0], step=0, temperature=temperature)
    output = await backend.forward(batch, ("logprobs",))
    assert output.logprobs is not None, "logprobs were requested"
    return output.logprobs[0]


def logprobs_agree(ours: Sequence[float], theirs: Sequence[float], tolerance: float) -> bool:
    """Whether all tokens agree."""
    return furthest_apart(ours, theirs, tolerance).agrees


def has_not_moved(
    ours: tuple[Sequence[float], Sequence[float]], theirs: tuple[Sequence[float], Sequence[float]], tolerance: float
) -> bool:
    """Whether the trainer's numbers moved by more than noise, and the engine's did not move with them.

    Each pair is (before, after) the update; before it, trainer and engine agreed. All tokens count together, so this
    also detects steps smaller than the tolerance. In 16 bits, where noise is as large as such steps, it only detects an
    engine whose numbers are exactly the same as before.
    """
    trainer = [after - before for before, after in zip(*ours, strict=True)]
    squared = sum(step * step for step in trainer)
    if math.sqrt(squared) < MOVED_NOISES * NOISE_SHARE * tolerance:
        return False
    if tolerance >= TOLERANCE_HALF:
        return list(theirs[0]) == list(theirs[1])
    engine = [after - before for before, after in zip(*theirs, strict=True)]
    along = sum(one * other for one, other in zip(trainer, engine, strict=True)) / squared
    return not along > 0.5  # 1 if it moved like the trainer


# --- the test ---------------------------------------------------------------------------------------------------------


class Memory(NamedTuple):
    """The results of earlier syncs, with which the next sync compares.

    `numbers` are the trainer's logprobs of `tokens`, by version. `folders` have the last weights of a kind, if
    they were sent in a folder.
    """

    tokens: Sequence[int] = ()
    numbers: Mapping[int, list[float]] = {}
    folders: Mapping[Kind, str] = {}

    @property
    def version(self) -> int:
        """The last version that servers were seen to serve; -1 before the first sync."""
        return next(reversed([*self.numbers]), -1)


@dataclasses.dataclass
class Proof:
    """The test of one sync: the `weights` by kind, and the trainer's `numbers` for the scored sequence.

    `known` are the numbers of earlier versions for that sequence. `before` are each server's numbers before the update,
    by its repr.
    """

    backend: TrainingBackend
    version: int
    weights: Mapping[Kind, Mapping[str, Any]]
    sequences: Sequences
    numbers: list[float]
    tolerance: float
    temperature: float
    memory: Memory

    def __post_init__(self) -> None:
        self.known = self.memory.numbers if self.memory.tokens == self.sequences.scored else {}
        self.before: dict[str, list[float]] = {}

    async def look_before(self, servers: Sequence[InferenceBackend]) -> None:
        """Score with each server before the update, for comparison. This also puts the prompt into a server's cache, so
        that a cache that is not flushed is detected.
        """

        async def look(member: InferenceBackend) -> None:
            self.before[repr(member)] = await member.score(self.sequences.scored, 1.0)
            await member.generate(GenerateRequest(self.sequences.prompt, 1, (), 0))

        for each in await gather(look, [member for engine in servers for member in members_of(engine)]):
            # The update will show whether the server works; it may have just been restarted.
            if isinstance(each, Exception) and not isinstance(each, InferenceError):
                raise each

    async def prove(self, engine: InferenceBackend) -> list[float]:
        """The difference between each server of an engine and the trainer. Raises InferenceError if a server does not
        serve the weights. If a server of a pool dies while others live, the pool leaves it out.
        """
        members = members_of(engine)
        found = []
        for member, each in zip(members, await gather(self._prove, members), strict=True):
            if not isinstance(each, Exception):
                found.append(each)
                continue
            if not isinstance(each, EngineRequestError):
                raise each
            if engine.capabilities.is_pool:
                await engine.health()  # a pool checks each of its servers, and leaves out dead ones
            if member in members_of(engine):
                given = f"{engine_label(member)} was given the weights of version {self.version}"
                raise InferenceError(f"{given}, and cannot be asked whether it serves them: {each}") from each
        if not found:
            raise InferenceError(f"no server of {engine_label(engine)} is left to serve version {self.version}")
        return found

    async def _prove(self, member: InferenceBackend) -> float:
        scored = await member.score(self.sequences.scored, 1.0)
        worst = furthest_apart(self.numbers, scored, self.tolerance)
        if not worst.agrees:
            why = self._diagnose(member, scored)
            raise _not_served(member, self.version, f"{worst.words('a test sequence')}; {why}")
        served = self.memory.version
        last, before = self.known.get(served, []), self.before.get(repr(member), [])
        agreed = bool(last and before) and logprobs_agree(last, before, self.tolerance)
        if agreed and has_not_moved((last, self.numbers), (before, scored), self.tolerance):
            moved = f"the trainer's log-probabilities of a test sequence have moved since version {served}"
            still = f"{moved}, and the server's have not; it still serves version {served}"
            raise _not_served(member, self.version, still)
        temperatures = dict.fromkeys([1.0, self.temperature or 1.0])
        return max([worst.apart, *[await self._prove_sampling(member, each) for each in temperatures]])

    async def _prove_sampling(self, member: InferenceBackend, temperature: float) -> float:
        prompt = self.sequences.prompt
        reply, worst = await self._sample(member, prompt, temperature)
        if not worst.agrees:
            why = await self._diagnose_sampling(member, reply, temperature)
            words = worst.words(f"a reply sampled at temperature {temperature:g}")
            raise _not_served(member, self.version, f"{words}, though it scores right; {why}")
        wrong = sorted(set(reply.versions) - {self.version})
        if wrong:
            raise _not_served(member, self.version, f"it says that it samples with version {wrong[0]}")
        return worst.apart

    async def _sample(
        self, member: InferenceBackend, prompt: list[int], temperature: float
    ) -> tuple[Generation, Apart]:
        """Sample a reply. Returns it with the largest difference of its log-probabilities from the trainer's."""
        request = GenerateRequest(prompt, self.sequences.sampled, (), self.version, temperature=temperature)
        reply = await member.generate(request)
        if not reply.tokens:
            raise _not_served(member, self.version, "its reply to a test prompt is empty; read its log, and restart it")
        return reply, await self._apart(prompt, reply, temperature)

    async def _apart(self, prompt: list[int], reply: Generation, temperature: float) -> Apart:
        ours = await trainer_logprobs(self.backend, prompt + reply.tokens, temperature)
        return furthest_apart(ours[len(prompt) :], reply.logprobs, self.tolerance, first=0)

    def _diagnose(self, member: InferenceBackend, scored: list[float]) -> str:
        """Guess the cause of wrong scores, as text."""
        if any(map(math.isnan, scored)):
            return "some of its numbers are NaN: it has weights that nothing was written into"
        kind, last = member.capabilities.weights_kind, self.memory.version
        old = [version for version, numbers in self.known.items() if logprobs_agree(numbers, scored, self.tolerance)]
        before = self.before.get(repr(member))
        if before is not None and logprobs_agree(before, scored, self.tolerance):
            served = f"version {last}" if last in old else "what it served before"
            words = f"its numbers are those of before: it still serves {served}"
            if kind == "full":
                return words
            other = ", or the model beneath it is not the one that is trained (is it another run's?)"
            return f"{words}, so the adapter was not loaded, or requests do not name it{'' if self.known else other}"
        if old:
            bare = kind == "adapter" and not min(old)
            base = " (the model without an adapter, if the run began there)" if bare else ""
            return f"its numbers are those of version {max(old)}{base}: it serves an older version"
        what = "they are no earlier version's either: some tensor did not arrive whole"
        return f"{what}, or it has another model or precision than the trainer (see the server's own --dtype)"

    async def _diagnose_sampling(self, member: InferenceBackend, reply: Generation, temperature: float) -> str:
        """Guess the cause of wrong log-probabilities of sampled tokens, if the scores are right."""
        if temperature != 1.0 and (await self._apart(self.sequences.prompt, reply, 1.0)).agrees:
            how = "so that it gives the log-probabilities of what it samples from"
            vllm = "vLLM: --logprobs-mode processed_logprobs"
            return f"they are those of temperature 1: start the server {how} ({vllm}), or type --temperature 1"
        _, other = await self._sample(member, self.sequences.other, temperature)
        if other.agrees:
            before = f"of version {self.memory.version}" if self.memory.version >= 0 else "of the weights before"
            right = "with a prompt that it had not seen before it is right"
            return f"{right}, so its prefix cache still holds what is {before}: the cache was not flushed"
        return "see which log-probabilities the server returns, and whether it samples and scores with the same model"


async def probe_parity(backend: TrainingBackend, engine: InferenceBackend, tolerance: float = TOLERANCE) -> float:
    """The largest difference between engine and trainer in the log-probability (temperature 1) of a token of one fixed
    sequence, in nats. Raises InferenceError, with both numbers, if it is above `tolerance`.
    """
    length = min(COPY_TOKENS, engine.context_tokens_max)
    tokens = [index % (engine.vocabulary_size or COPY_TOKENS) for index in range(length)]
    ours = await trainer_logprobs(backend, tokens)
    worst = furthest_apart(ours, await engine.score(tokens, 1.0), tolerance)
    if not worst.agrees:
        words = f"{worst.words('a test sequence')}; see whether both have the same model and precision"
        raise _not_served(engine, backend.version, words)
    return worst.apart


def _not_served(engine: InferenceBackend, version: int, what: str) -> InferenceError:
    given = f"{engine_label(engine)} does not serve the weights of version {version} that it was given"
    return InferenceError(f"{given}: {what}", is_transient=False)


def engine_label(engine: InferenceBackend) -> str:
    """An engine's name in errors: its repr, or its class if the repr is an address in memory."""
    has_own = type(engine).__repr__ is not object.__repr__
    return repr(engine) if has_own else f"the engine ({type(engine).__name__})"


async def gather(ask: Callable[[E], Awaitable[T]], asked: Sequence[E]) -> list[T | Exception]:
    """Call all of them at once. Returns each result or exception."""
    found: dict[int, T | Exception] = {}

    async def attempt(index: int) -> None:
        try:
            found[index] = await ask(asked[index])
        except Exception as error:  # must not cancel the others
            found[index] = error

    async with trio.open_nursery() as nursery:
        for index in range(len(asked)):
            nursery.start_soon(attempt, index)
    return [found[index] for index in range(len(asked))]
