"""New weights for the engines, and the proof that they arrived.

    metrics = await sync_weights(backend, engines)               once
    syncing = WeightSyncManager(engines, temperature=0.7)        again and again: it also sees what did not move
    metrics = await syncing.sync(backend)

An engine that samples with the trainer's own parameters is told the version only. One that holds weights of its own
(`owns_weights`) is sent them: as tensors, as a folder that it loads, or over a process group. Each sync goes
begin (what the tensors are) -> send -> commit -> probe: engine and trainer must give the same numbers for the same
tokens, scored and sampled, before anything else is sampled. docs/weight-sync.md says it for users. Left out: how an
engine takes weights in.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import trio

from rollouts.errors import InferenceError
from rollouts.inference.base import (
    GenerateRequest,
    Generation,
    InferenceBackend,
    ManyEngines,
    Probe,
    WeightUpdate,
    members_of,
)
from rollouts.inference.http.failures import HTTPFailure
from rollouts.training.types import TrainingBackend
from rollouts.training.weight_engines import InferenceEngine, SGLangEngine, VLLMEngine, sync_weights_to_engines
from rollouts.training.weight_files import (
    WritesFiles,
    check_folder,
    file_tensors,
    manifest_of,
    prune_folders,
    read_tensors,
    write_folder,
)
from rollouts.training.weight_groups import send_over_group
from rollouts.training.weight_probe import (
    TOLERANCE,
    TOLERANCE_SERVER,
    Sequences,
    agree,
    find_tensors,
    furthest_apart,
    has_not_moved,
    parity_tolerance,
    probe_sequences,
    trainer_logprobs,
)

__all__ = [
    "InferenceEngine",
    "SGLangEngine",
    "VLLMEngine",
    "WeightSyncManager",
    "parity_tolerance",
    "probe_parity",
    "sync_weights",
    "sync_weights_to_engines",
]

T = TypeVar("T")
_Kind = Literal["full", "adapter"]
_Form = Literal["tensors", "folder", "group"]
_Way = tuple[_Kind, _Form, str]  # what is sent, how, and into which folder

PROBE_TOKENS = 32
REMEMBERED = 8  # versions whose numbers are kept
KEEP_BYTES_MAX = 2 * 2**30  # of weights that lie in no folder


class Memory(NamedTuple):
    """What the next sync compares with: the trainer's `numbers` for `tokens` by version, the last weights where they
    lie in no folder, and the last folder by where folders go.
    """

    tokens: tuple[int, ...] = ()
    numbers: Mapping[int, list[float]] = {}
    weights: Mapping[_Kind, Mapping[str, Any]] = {}
    folders: Mapping[_Way, str] = {}

    @property
    def version(self) -> int:
        """That servers were last seen to serve; -1 before the first sync."""
        return next(reversed(list(self.numbers)), -1)


class WeightSyncManager:
    """The engines of a run, and what is remembered from one sync to the next. `temperature` is the run's: what is
    sampled is probed at it and at 1. `version` is what all engines were last seen to serve; -1 before the first sync.
    """

    def __init__(
        self, engines: Sequence[InferenceBackend], *, temperature: float = 1.0, tolerance: float | None = None
    ) -> None:
        self.engines = tuple(engines)
        self.version = -1
        self._temperature, self._tolerance = temperature, tolerance
        self._memory = Memory()

    async def sync(self, backend: TrainingBackend) -> dict[str, float]:
        """As `sync_weights`, and also: where the trainer's numbers have moved since the last sync, the engines' must
        have too. After an error the engines' weights are unknown.
        """
        metrics, self._memory = await _sync(backend, self.engines, self._temperature, self._tolerance, self._memory)
        self.version = int(metrics["sync/version"])
        return metrics


async def sync_weights(
    backend: TrainingBackend,
    engines: Sequence[InferenceBackend],
    *,
    tolerance: float | None = None,
    temperature: float = 1.0,
) -> dict[str, float]:
    """Make every engine serve the backend's weights; gives `sync/` metrics.

    `tolerance` is how far, in nats, an engine's log-probability of a token may be from the trainer's; None is what
    engines say (their own `tolerance`, where it is above 0), or else goes by the type of the weights. `temperature` is
    what the run samples at. Raises InferenceError where an engine does not serve the weights, and says which engine,
    which versions, and what it looks like.
    """
    metrics, _ = await _sync(backend, engines, temperature, tolerance, Memory())
    return metrics


async def probe_parity(backend: TrainingBackend, engine: InferenceBackend, tolerance: float = TOLERANCE) -> float:
    """How far engine and trainer are apart, at most, in the log-probability (temperature 1) of a token of one fixed
    sequence, in nats. Raises InferenceError, with both numbers, where that is more than `tolerance`.
    """
    length = min(PROBE_TOKENS, engine.context_tokens_max)
    tokens = [index % getattr(engine, "vocabulary_size", PROBE_TOKENS) for index in range(length)]
    (ours,) = await trainer_logprobs(backend, [tokens])
    worst = furthest_apart(ours, await engine.score(tokens, 1.0), tolerance)
    if not worst.agrees:
        raise InferenceError(
            f"{_label(engine)} does not serve the weights of version {backend.version} that it was given: "
            f"{worst.words('a test sequence')}; see whether both have the same model and precision"
        )
    return worst.apart


# --- one sync ---------------------------------------------------------------------------------------------------------


class _Round(NamedTuple):
    """One sync: the `weights` by kind, the trainer's `numbers` for the scored sequence, and the bound that servers are
    held to. `before` is what each server scored before the update, by its name.
    """

    backend: TrainingBackend
    version: int
    weights: Mapping[_Kind, Mapping[str, Any]]
    sequences: Sequences
    numbers: list[float]
    tolerance: float
    temperature: float
    memory: Memory
    before: dict[str, list[float]]


class _Sent(NamedTuple):
    """What one way of sending made: the update that engines are told, how much it moves, and the tensors that are
    broadcast.
    """

    update: WeightUpdate
    bytes: int
    tensors: Mapping[str, Any] = {}


async def _sync(
    backend: TrainingBackend,
    engines: Sequence[InferenceBackend],
    temperature: float,
    tolerance: float | None,
    memory: Memory,
) -> tuple[dict[str, float], Memory]:
    start, version = time.perf_counter(), backend.version
    owners = [engine for engine in engines if getattr(engine, "owns_weights", False)]
    for engine in engines:
        if engine not in owners:
            await engine.update_weights(WeightUpdate(version))
    metrics = {"sync/version": float(version)}
    if owners:
        if tolerance is None:
            tolerance = max(getattr(engine, "tolerance", 0.0) for engine in owners) or None
        copies = [engine for engine in owners if _form_of(engine) == "tensors"]
        servers = [engine for engine in owners if engine not in copies]
        around = await _begin(backend, owners, servers, temperature, tolerance, memory)
        sent = {way: await _prepare(around, way) for way in dict.fromkeys(map(_way_of, owners))}
        await _look_before(around, servers)
        await _send(around, owners, sent)
        bound = _bound(around, TOLERANCE) if tolerance is None else tolerance
        apart = [await probe_parity(backend, engine, bound) for engine in copies]
        apart += [each for engine in servers for each in await _prove(around, engine)]
        assert backend.version == version, f"the trainer went from {version} to {backend.version} during a sync"
        metrics |= {"sync/bytes": float(sum(each.bytes for each in sent.values())), "sync/probe": max(apart)}
        memory = _remembered(around, sent) if servers else memory
    return metrics | {"sync/seconds": time.perf_counter() - start}, memory


async def _begin(
    backend: TrainingBackend,
    owners: Sequence[InferenceBackend],
    servers: Sequence[InferenceBackend],
    temperature: float,
    tolerance: float | None,
    memory: Memory,
) -> _Round:
    """The weights, and what the trainer makes of the fixed sequence with them."""
    # All of it is asked for before any of it is awaited: nothing comes between the weights and their numbers.
    wanted = {kind: backend.get_weights(kind) for kind in dict.fromkeys(map(_kind_of, owners))}
    sequences, numbers = Sequences([], [], [], 0), [list[float]()]
    if servers:
        sequences = _sequences_for(servers)
        numbers = await trainer_logprobs(backend, [sequences.scored])
    weights: dict[_Kind, Mapping[str, Any]] = {kind: await future for kind, future in wanted.items()}
    around = _Round(
        backend, backend.version, weights, sequences, numbers[0], tolerance or 0.0, temperature, memory, before={}
    )
    return around if tolerance is not None else around._replace(tolerance=_bound(around, TOLERANCE_SERVER))


def _bound(around: _Round, full: float) -> float:
    told = {f"{kind}/{name}": each for kind, named in around.weights.items() for name, each in named.items()}
    return parity_tolerance(told, getattr(around.backend, "compute_dtype", ""), full=full)


# --- sending ----------------------------------------------------------------------------------------------------------


async def _prepare(around: _Round, way: _Way) -> _Sent:
    """The manifest, and where engines want a folder, the folder: written once for all of them, and read back."""
    kind, form, parent = way
    weights = around.weights[kind]
    if form == "tensors":
        update = WeightUpdate(around.version, kind, weights=weights)
        return _Sent(update, sum(each.nbytes for each in weights.values()))
    backend = around.backend
    if not isinstance(backend, WritesFiles):
        raise InferenceError(
            f"the training backend {type(backend).__name__} does not say how its weights are written for a server: it "
            "has no model_files (docs/weight-sync.md); take --training torch or fsdp, or --inference hf",
            is_transient=False,
        )
    files = backend.model_files
    probe = Probe(around.sequences.scored, around.numbers, around.tolerance)

    def make() -> tuple[WeightUpdate, int, Mapping[str, Any]]:
        tensors = file_tensors(weights, kind, files.causal)
        manifest = manifest_of(tensors)
        path = None
        if form == "folder":
            like = around.memory.folders.get(way)
            path = str(write_folder(parent, around.version, kind, tensors, files, like=like))
            check_folder(path, manifest, around.version)
        size = sum(each.nbytes for each in tensors.values())
        update = WeightUpdate(around.version, kind, path, manifest=manifest, probe=probe)
        return update, size, tensors if form == "group" else {}

    return _Sent(*await trio.to_thread.run_sync(make))


async def _send(around: _Round, owners: Sequence[InferenceBackend], sent: Mapping[_Way, _Sent]) -> None:
    """Commit, on all engines at once. Raises InferenceError, naming the first that failed."""
    together = [engine for engine in owners if _form_of(engine) == "group"]
    alone = [engine for engine in owners if engine not in together]
    tasks = [functools.partial(engine.update_weights, sent[_way_of(engine)].update) for engine in alone]
    labels = [_label(engine) for engine in alone]
    if together:
        one = sent[_way_of(together[0])]
        device = str(getattr(around.backend, "device", "cpu"))
        tasks.append(functools.partial(send_over_group, together, one.update, one.tensors, device=device))
        labels.append(" and ".join(map(_label, together)))
    results = await _gather(tasks)
    failed = [(label, each) for label, each in zip(labels, results, strict=True) if isinstance(each, Exception)]
    for _, error in failed:
        if not isinstance(error, InferenceError):
            raise error
    if failed:
        label, first = failed[0]
        others = f" ({len(failed)} of {len(labels)} engines failed)" if len(labels) > 1 else ""
        before = f" after version {around.memory.version}" if around.memory.version >= 0 else ""
        raise InferenceError(
            f"{label} did not take the weights of version {around.version}{before}: {first}{others}",
            is_transient=False,
        ) from first


def _remembered(around: _Round, sent: Mapping[_Way, _Sent]) -> Memory:
    """After a sync that succeeded; folders that no server needs any more are removed."""
    numbers: dict[int, list[float]] = {}
    if around.memory.tokens == tuple(around.sequences.scored):
        numbers |= {v: each for v, each in around.memory.numbers.items() if v != around.version}
    numbers[around.version] = around.numbers
    first = dict(list(numbers.items())[:1])  # of an adapter: most often the model without it
    kept = first | dict(list(numbers.items())[-REMEMBERED:])
    folders = {way: each.update.path for way, each in sent.items() if each.update.path is not None}
    for way, path in folders.items():
        # Replies under way may end with the adapter before, which a server may take up again from its folder.
        keep = {around.version, around.memory.version} if way[0] == "adapter" else {around.version}
        prune_folders(Path(path).parent, keep)
    loose = {way[0] for way, each in sent.items() if way[1] == "group" and each.bytes <= KEEP_BYTES_MAX}
    weights = {kind: around.weights[kind] for kind in loose}
    return Memory(tuple(around.sequences.scored), kept, weights, folders)


# --- the proof --------------------------------------------------------------------------------------------------------


async def _look_before(around: _Round, servers: Sequence[InferenceBackend]) -> None:
    """What each server gives before the update, to compare with; and the prompt is in its cache then, if it keeps one:
    a cache that outlives the old weights is seen.
    """
    sequences = around.sequences

    async def look(member: InferenceBackend) -> None:
        around.before[_label(member)] = await member.score(sequences.scored, 1.0)
        await member.generate(GenerateRequest(sequences.prompt, 1, (), 0))

    members = [member for engine in servers for member in members_of(engine)]
    for error in await _gather([functools.partial(look, member) for member in members]):
        # Whether it can serve is for the update to say: it may be a server that has just been started again.
        if error is not None and not isinstance(error, InferenceError):
            raise error


async def _prove(around: _Round, engine: InferenceBackend) -> list[float]:
    """How far each server of an engine is from the trainer. Raises InferenceError where one does not serve the weights.
    One that dies meanwhile, while others of its pool live, is left to the pool.
    """
    members = members_of(engine)
    results = await _gather([functools.partial(_prove_one, around, member) for member in members])
    found = []
    for member, each in zip(members, results, strict=True):
        if not isinstance(each, Exception):
            found.append(each)
        elif not isinstance(each, HTTPFailure):
            raise each
        elif not isinstance(engine, ManyEngines) or not await _is_given_up(engine, member):
            raise InferenceError(
                f"{_label(member)} was given the weights of version {around.version}, and cannot be asked whether it "
                f"serves them: {each}"
            ) from each
    if not found:
        raise InferenceError(f"no server of {_label(engine)} is left to serve version {around.version}")
    return found


async def _is_given_up(engine: Any, member: InferenceBackend) -> bool:
    await engine.health()  # a pool asks each of its servers, and leaves out those that are dead
    return member not in members_of(engine)


async def _prove_one(around: _Round, member: InferenceBackend) -> float:
    scored = await member.score(around.sequences.scored, 1.0)
    worst = furthest_apart(around.numbers, scored, around.tolerance)
    label = _label(member)
    if not worst.agrees:
        why = await _diagnose(around, member, scored)
        raise _not_served(around, member, f"{worst.words('a test sequence')}; {why}")
    last, before = around.memory.numbers.get(around.memory.version), around.before.get(label)
    known = before is not None and last is not None and around.memory.tokens == tuple(around.sequences.scored)
    if known and agree(last or [], before or [], around.tolerance):
        assert last is not None and before is not None
        if has_not_moved((last, around.numbers), (before, scored), around.tolerance):
            raise _not_served(
                around,
                member,
                f"the trainer's log-probabilities of a test sequence have moved since version {around.memory.version}, "
                f"and the server's have not; it still serves version {around.memory.version}",
            )
    temperatures = dict.fromkeys([1.0, around.temperature or 1.0])
    return max([worst.apart, *[await _prove_sampling(around, member, each) for each in temperatures]])


async def _prove_sampling(around: _Round, member: InferenceBackend, temperature: float) -> float:
    prompt = around.sequences.prompt
    reply, ours, theirs = await _sample(around, member, prompt, temperature)
    worst = furthest_apart(ours, theirs, around.tolerance, first=len(prompt))
    if not worst.agrees:
        place = worst._replace(place=worst.place - len(prompt))
        why = await _diagnose_sampling(around, member, reply, theirs, temperature)
        raise _not_served(
            around,
            member,
            f"{place.words(f'a reply sampled at temperature {temperature:g}')}, though it scores right; {why}",
        )
    wrong = sorted(set(reply.versions) - {around.version})
    if wrong:
        raise _not_served(around, member, f"it says that it samples with version {wrong[0]}")
    return worst.apart


async def _sample(
    around: _Round, member: InferenceBackend, prompt: list[int], temperature: float
) -> tuple[Generation, list[float], list[float]]:
    """A reply, and the trainer's and the server's numbers for prompt and reply (0.0 for the server's prompt)."""
    request = GenerateRequest(prompt, around.sequences.sampled, (), around.version, temperature=temperature)
    reply = await member.generate(request)
    if not reply.tokens:
        raise _not_served(around, member, f"a test prompt of {len(prompt)} tokens was answered with none")
    (ours,) = await trainer_logprobs(around.backend, [prompt + reply.tokens], temperature)
    return reply, ours, [0.0] * len(prompt) + reply.logprobs


def _not_served(around: _Round, member: InferenceBackend, what: str) -> InferenceError:
    return InferenceError(
        f"{_label(member)} does not serve the weights of version {around.version} that it was given: {what}",
        is_transient=False,
    )


# --- what a fault looks like ------------------------------------------------------------------------------------------


async def _diagnose(around: _Round, member: InferenceBackend, scored: list[float]) -> str:
    """What wrong scores look like."""
    if any(value != value for value in scored):
        return "some of its numbers are NaN: it has weights that nothing was written into"
    memory, tolerance = around.memory, around.tolerance
    kind = _kind_of(member)
    before = around.before.get(_label(member))
    versions = memory.numbers if memory.tokens == tuple(around.sequences.scored) else {}
    last = versions.get(memory.version)
    if before is not None and agree(before, scored, tolerance):
        told = f"version {memory.version}" if last and agree(last, scored, tolerance) else "what it served before"
        words = f"its numbers are those of before: it still serves {told}"
        if kind == "full":
            return words
        base = "" if versions else ", or the model beneath it is not the one that is trained (is it another run's?)"
        return f"{words}, so the adapter was not loaded, or requests do not name it{base}"
    old = [version for version, numbers in versions.items() if agree(numbers, scored, tolerance)]
    if old:
        base = " (the model without an adapter, if the run began there)" if kind == "adapter" and min(old) == 0 else ""
        return f"its numbers are those of version {max(old)}{base}: it serves an older version"
    names = await _find_tensors(around, member, scored)
    if names:
        more = f" (or {', '.join(names[1:3])})" if names[1:] else ""
        return (
            f"its numbers are those of version {around.version} with {names[0]}{more} of version {memory.version}: "
            "that tensor did not arrive"
        )
    return (
        "they are no earlier version's either: some tensor did not arrive whole, or it has another model or precision "
        "than the trainer (see the server's own --dtype)"
    )


async def _find_tensors(around: _Round, member: InferenceBackend, scored: list[float]) -> list[str]:
    kind, backend = _kind_of(member), around.backend
    old = around.memory.weights.get(kind)
    path = around.memory.folders.get(_way_of_member(around, member))
    if old is None and path is not None:
        old = await trio.to_thread.run_sync(read_tensors, path)
        if isinstance(backend, WritesFiles) and kind == "full":
            tied = getattr(backend.model_files.causal, "all_tied_weights_keys", None) or {}
            old |= {name: old[source] for name, source in tied.items() if source in old}
    if old is None:
        return []
    return await find_tensors(backend, old, around.weights[kind], around.sequences.scored, scored, around.tolerance)


def _way_of_member(around: _Round, member: InferenceBackend) -> _Way:
    """Members of a pool need not say where folders go: then it is the only place of their kind."""
    kind = _kind_of(member)
    places = [way for way in around.memory.folders if way[0] == kind]
    own = str(getattr(member, "weights_folder", ""))
    return next((way for way in places if way[2] == own), places[0] if places else (kind, "folder", own))


async def _diagnose_sampling(
    around: _Round, member: InferenceBackend, reply: Generation, theirs: list[float], temperature: float
) -> str:
    """What wrong log-probabilities of sampled tokens look like, where scores are right."""
    prompt, tolerance = around.sequences.prompt, around.tolerance
    if temperature != 1.0:
        (ours,) = await trainer_logprobs(around.backend, [prompt + reply.tokens], 1.0)
        if furthest_apart(ours, theirs, tolerance, first=len(prompt)).agrees:
            return (
                "they are those of temperature 1: start the server so that it gives the log-probabilities of what it "
                "samples from (vLLM: --logprobs-mode processed_logprobs), or type --temperature 1"
            )
    other = around.sequences.other
    _, ours, theirs = await _sample(around, member, other, temperature)
    if furthest_apart(ours, theirs, tolerance, first=len(other)).agrees:
        before = f"of version {around.memory.version}" if around.memory.version >= 0 else "of the weights before"
        return (
            f"with a prompt that it had not seen before it is right, so its prefix cache still holds what is {before}: "
            "the cache was not flushed"
        )
    return "see which log-probabilities the server returns, and whether it samples with the model that it scores with"


def _kind_of(engine: InferenceBackend) -> _Kind:
    kind: _Kind = getattr(engine, "weights_kind", "full")
    return kind


def _form_of(engine: InferenceBackend) -> _Form:
    form: _Form = getattr(engine, "weights_as", "tensors")
    return form


def _way_of(engine: InferenceBackend) -> _Way:
    form = _form_of(engine)
    folder = str(getattr(engine, "weights_folder", "")) if form == "folder" else ""
    assert folder or form != "folder", f"{engine!r} wants a folder and does not say where: it has no weights_folder"
    return _kind_of(engine), form, folder


def _label(engine: InferenceBackend) -> str:
    own = type(engine).__repr__ is not object.__repr__
    return repr(engine) if own else f"the engine ({type(engine).__name__})"


def _sequences_for(servers: Sequence[InferenceBackend]) -> Sequences:
    members = [member for engine in servers for member in members_of(engine)] or list(servers)
    context = min(member.context_tokens_max for member in members)
    return probe_sequences(context, min(getattr(member, "vocabulary_size", PROBE_TOKENS) for member in members))


async def _gather(tasks: Sequence[Callable[[], Awaitable[T]]]) -> list[T | Exception]:
    """What each gave or raised, all of them run at once."""
    found: dict[int, T | Exception] = {}

    async def run(index: int, task: Callable[[], Awaitable[T]]) -> None:
        try:
            found[index] = await task()
        except Exception as error:  # whoever asked tells it, with the engine's name
            found[index] = error

    async with trio.open_nursery() as nursery:
        for index, task in enumerate(tasks):
            nursery.start_soon(run, index, task)
    return [found[index] for index in range(len(tasks))]
