"""New weights for the engines, and the proof that they arrived.

    metrics = await sync_weights(backend, engines)               once
    syncing = WeightSyncManager(engines, temperature=0.7)        again and again: it also sees what did not move
    metrics = await syncing.sync(backend)

An engine that samples with the trainer's own parameters is given the version only. One that holds weights of its own
(`owns_weights`) is sent them: as tensors, as a folder that it loads, or over a process group. Each sync goes
begin (what the tensors are) -> send -> commit -> probe: engine and trainer must give the same numbers for the same
tokens, scored and sampled, before anything else is sampled. docs/weight-sync.md says it for users.

For a loop that is written by hand with a checkpoint of its own there is a shorter way, without the proof. The folder is
read whole before a server is asked, since some die of one that is not:

    engines = [SGLangEngine(base_url="http://localhost:30000")]
    results = await sync_weights_to_engines(engines, "checkpoints/step_000010")

Left out: how an engine takes weights in.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import trio

from rollouts.errors import ConfigError, InferenceError
from rollouts.inference.base import InferenceBackend, Probe, WeightUpdate, members_of
from rollouts.inference.servers.dialect import Dialect
from rollouts.inference.servers.http import PlainClient
from rollouts.inference.servers.sglang import SGLang
from rollouts.inference.servers.vllm import VLLM
from rollouts.training.types import TrainingBackend
from rollouts.training.weights import files, groups, probe

REMEMBERED = 8  # versions whose numbers are kept
KEEP_BYTES_MAX = 2 * 2**30  # of weights that lie in no folder


class WeightSyncManager:
    """The engines of a run, and what is remembered from one sync to the next. `temperature` is the run's: what is
    sampled is probed at it and at 1. `version` is what all engines were last seen to serve; -1 before the first sync.

    `tolerance` is how far, in nats, an engine's log-probability of a token may be from the trainer's; None is what
    engines say (their own `tolerance`, where it is above 0), or else goes by the type of the weights.
    """

    def __init__(
        self, engines: Sequence[InferenceBackend], *, temperature: float = 1.0, tolerance: float | None = None
    ) -> None:
        self.engines = tuple(engines)
        self.version = -1
        self._temperature, self._tolerance = temperature, tolerance
        self._memory = probe.Memory()

    async def sync(self, backend: TrainingBackend) -> dict[str, float]:
        """Make every engine serve the backend's weights; gives `sync/` metrics. Where the trainer's numbers have moved
        since the last sync, the engines' must have too.

        Raises InferenceError where an engine does not serve the weights, and says which engine, which versions, and
        what it looks like. After an error the engines' weights are unknown.
        """
        start, version = time.perf_counter(), backend.version
        owners = [engine for engine in self.engines if engine.capabilities.owns_weights]
        for engine in self.engines:
            if engine not in owners:
                await engine.update_weights(WeightUpdate(version))
        metrics = {"sync/version": float(version)}
        if owners:
            servers = [engine for engine in owners if engine.capabilities.weights_as != "tensors"]
            proof, bound = await self._begin(backend, owners, servers)
            sent = [await _prepare(proof, way, owners) for way in dict.fromkeys(map(_way_of, owners))]
            await proof.look_before(servers)
            sends = [send for each in sent for send in each.sends(backend.device)]
            labels, calls = zip(*sends, strict=True)
            before = f" after version {self._memory.version}" if self._memory.version >= 0 else ""
            results = await probe.gather(lambda call: call(), calls)
            _raise_first(f"take the weights of version {version}{before}", labels, results, is_final=True)
            apart = [await probe.probe_parity(backend, each, bound) for each in owners if each not in servers]
            apart += [each for engine in servers for each in await proof.prove(engine)]
            assert backend.version == version, f"the trainer went from {version} to {backend.version} during a sync"
            metrics |= {"sync/bytes": float(sum(each.bytes for each in sent)), "sync/probe": max(apart)}
            self._memory = _remembered(proof, sent) if servers else self._memory
        self.version = version
        return metrics | {"sync/seconds": time.perf_counter() - start}

    async def _begin(
        self, backend: TrainingBackend, owners: Sequence[InferenceBackend], servers: Sequence[InferenceBackend]
    ) -> tuple[probe.Proof, float]:
        """The weights, and what the trainer makes of the fixed sequence with them; and the bound of engines that are
        given tensors.
        """
        # All of it is asked for before any of it is awaited: nothing comes between the weights and their numbers.
        kinds = dict.fromkeys(engine.capabilities.weights_kind for engine in owners)
        wanted = {kind: backend.get_weights(kind) for kind in kinds}
        sequences, numbers = probe.Sequences([], [], [], 0), list[float]()
        if servers:
            members = [member for engine in servers for member in members_of(engine)] or servers
            sequences = probe.probe_sequences(
                min(member.context_tokens_max for member in members),
                min(member.vocabulary_size or probe.COPY_TOKENS for member in members),
            )
            numbers = await probe.trainer_logprobs(backend, sequences.scored)
        weights: dict[files.Kind, Mapping[str, Any]] = {kind: await future for kind, future in wanted.items()}
        given = self._tolerance
        if given is None:
            given = max(engine.capabilities.tolerance for engine in owners) or None
        every = {name: tensor for of_kind in weights.values() for name, tensor in of_kind.items()}
        own, bound = (
            probe.parity_tolerance(every, backend.compute_dtype, full=full) if given is None else given
            for full in (probe.TOLERANCE_SERVER, probe.TOLERANCE)
        )
        memory, temperature = self._memory, self._temperature
        return probe.Proof(backend, backend.version, weights, sequences, numbers, own, temperature, memory), bound


async def sync_weights(
    backend: TrainingBackend,
    engines: Sequence[InferenceBackend],
    *,
    tolerance: float | None = None,
    temperature: float = 1.0,
) -> dict[str, float]:
    """One `WeightSyncManager.sync`, with nothing to compare with."""
    return await WeightSyncManager(engines, temperature=temperature, tolerance=tolerance).sync(backend)


# --- sending ----------------------------------------------------------------------------------------------------------


class _Way(NamedTuple):
    """What is sent, how, and into which folder."""

    kind: files.Kind
    form: Literal["tensors", "folder", "group"]
    folder: str


class _Sent(NamedTuple):
    """What goes one way: the update that these engines are given, how much it moves, and the tensors that are
    broadcast.
    """

    way: _Way
    engines: Sequence[InferenceBackend]
    update: WeightUpdate
    bytes: int
    tensors: Mapping[str, Any] = {}

    def sends(self, device: str) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
        """Whom to send to, in words, and the call that does it; engines that receive over a group do so together."""
        if self.way.form != "group":
            return [
                (probe.label_of(each), functools.partial(each.update_weights, self.update)) for each in self.engines
            ]
        send = functools.partial(groups.send_over_group, self.engines, self.update, self.tensors, device=device)
        return [(" and ".join(map(probe.label_of, self.engines)), send)]


def _way_of(engine: InferenceBackend) -> _Way:
    own = engine.capabilities
    folder = own.weights_folder if own.weights_as == "folder" else ""
    assert folder or own.weights_as != "folder", f"{engine!r} wants a folder and does not say where"
    return _Way(own.weights_kind, own.weights_as, folder)


async def _prepare(proof: probe.Proof, way: _Way, owners: Sequence[InferenceBackend]) -> _Sent:
    """The manifest, and where engines want a folder, the folder: written once for all of them, and read back."""
    weights, engines = proof.weights[way.kind], [engine for engine in owners if _way_of(engine) == way]
    if way.form == "tensors":
        update = WeightUpdate(proof.version, way.kind, weights=weights)
        return _Sent(way, engines, update, sum(each.nbytes for each in weights.values()))
    beside: files.ModelFiles | None = proof.backend.model_files
    if beside is None:
        name = f"the training backend {type(proof.backend).__name__}"
        raise InferenceError(
            f"{name} does not say how its weights are written for a server: it has no model_files "
            "(docs/weight-sync.md); take --training torch or fsdp, or --inference hf",
            is_transient=False,
        )

    def make() -> _Sent:
        tensors = files.file_tensors(weights, way.kind, beside.causal)
        manifest = files.manifest_of(tensors)
        path = None
        if way.form == "folder":
            like = proof.memory.folders.get(way.kind)
            path = str(files.write_folder(way.folder, proof.version, way.kind, weights, beside, like=like))
            files.check_folder(path, manifest, proof.version)
        scored = Probe(proof.sequences.scored, proof.numbers, proof.tolerance)
        update = WeightUpdate(proof.version, way.kind, path, manifest=manifest, probe=scored)
        size = sum(each.nbytes for each in tensors.values())
        return _Sent(way, engines, update, size, tensors if way.form == "group" else {})

    return await trio.to_thread.run_sync(make)


def _raise_first(task: str, labels: Sequence[str], results: Sequence[object], *, is_final: bool = False) -> None:
    """Raise InferenceError for the first of these engines that failed at a task, and say how many of them did. An
    error that is no InferenceError is raised as it is. `is_final`: the same cannot be tried again.
    """
    failed = [(label, each) for label, each in zip(labels, results, strict=True) if isinstance(each, Exception)]
    for label, error in sorted(failed, key=lambda pair: isinstance(pair[1], InferenceError)):
        if not isinstance(error, InferenceError):
            raise error
        others = f" ({len(failed)} of {len(labels)} engines failed)" if len(labels) > 1 else ""
        is_transient = error.is_transient and not is_final
        raise InferenceError(f"{label} did not {task}{others}: {error}", is_transient=is_transient) from error


def _remembered(proof: probe.Proof, sent: Sequence[_Sent]) -> probe.Memory:
    """After a sync that succeeded; folders that no server needs any more are removed."""
    versions = [version for version in proof.known if version != proof.version] + [proof.version]
    # The first of an adapter is most often the model without it.
    kept = dict.fromkeys(versions[:1] + versions[-REMEMBERED:])
    numbers = {version: {**proof.known, proof.version: proof.numbers}[version] for version in kept}
    weights, folders = {}, {}
    for (kind, form, folder), _, update, size, _ in sent:
        if update.path is not None:
            # Replies under way may end with the adapter before, which a server may take up again from its folder.
            files.prune_folders(folder, {proof.version, proof.memory.version if kind == "adapter" else proof.version})
            folders[kind] = update.path
        elif form == "group" and size <= KEEP_BYTES_MAX:
            weights[kind] = proof.weights[kind]
    return probe.Memory(proof.sequences.scored, numbers, weights, folders)


# --- servers that load a checkpoint -----------------------------------------------------------------------------------


class InferenceEngine(Protocol):
    """A server that loads checkpoints."""

    async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
        """Serve the weights in a folder, as transformers writes them, from now on; gives the server's answer. Raises
        InferenceError.
        """


class _Server:
    """A server at an address, which reads the folder itself: on another machine it needs the same disk."""

    dialect: Callable[[], Dialect]

    def __init__(self, base_url: str, *, api_key: str = "", timeout_seconds: float = 600.0) -> None:
        self.base_url = base_url
        self._api_key, self._timeout_seconds = api_key, timeout_seconds

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base_url!r})"

    async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
        """Load it while requests wait, and forget cached prompts, which vLLM would keep; gives `success` and `message`.
        Raises InferenceError, ConfigError.
        """
        await trio.to_thread.run_sync(_check_model, checkpoint_path)
        update = WeightUpdate(0, path=str(Path(checkpoint_path).absolute()))  # noqa: ASYNC240 - it asks no disk
        dialect = self.dialect()
        async with PlainClient(self.base_url, api_key=self._api_key, timeout_seconds=self._timeout_seconds) as client:
            await dialect.load_full(client, update)
        return {"success": True, "message": f"{dialect.software} at {client.url} loaded {checkpoint_path}"}


class SGLangEngine(_Server):
    """An SGLang server (POST /update_weights_from_disk)."""

    dialect = SGLang


class VLLMEngine(_Server):
    """A vLLM server in development mode (POST /collective_rpc, reload_weights)."""

    dialect = VLLM


async def sync_weights_to_engines(engines: Sequence[InferenceEngine], checkpoint_path: str) -> list[dict[str, Any]]:
    """Every engine loads the checkpoint, all at once; gives their answers in order.

    All are let finish. Raises ConfigError for a folder that is no whole checkpoint, InferenceError naming the first
    engine that failed.
    """
    await trio.to_thread.run_sync(_check_model, checkpoint_path)
    found = await probe.gather(lambda engine: engine.update_weights_from_checkpoint(checkpoint_path), engines)
    _raise_first(f"load {checkpoint_path}", [repr(engine) for engine in engines], found)
    return [each for each in found if not isinstance(each, Exception)]


def _check_model(path: str) -> None:
    files.read_manifest(path)
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"{path} holds an adapter; give the folder of a whole model")
