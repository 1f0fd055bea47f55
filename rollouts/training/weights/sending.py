"""Sends new weights to engines that have a copy of them: as tensors, as a folder, or over a process group.

Each sync has four parts: begin (announce the tensors), send, commit, probe. In the probe, engine and trainer must
compute the same numbers for the same tokens, scored and sampled, before anything else is sampled. See
docs/weight-sync.md. Not here: how an engine loads weights.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import trio

from rollouts.doors import open_module
from rollouts.errors import InferenceError
from rollouts.inference.base import InferenceBackend, Probe, WeightUpdate, members_of
from rollouts.models.folders import Kind
from rollouts.training.batches import TrainingBackend
from rollouts.training.weights import files, probe

_NOTHING = probe.Memory()
REMEMBERED = 8  # the numbers of this many versions are kept


@dataclass
class Sender:
    """Sends weights to engines that have a copy of them, and remembers earlier syncs. See `WeightSyncManager`."""

    temperature: float
    tolerance: float | None
    memory: probe.Memory = _NOTHING

    async def send(self, backend: TrainingBackend, owners: Sequence[InferenceBackend]) -> dict[str, float]:
        """Make all these engines serve the backend's weights. Returns metrics. Raises InferenceError."""
        version = backend.version
        servers = [engine for engine in owners if engine.capabilities.weights_as != "tensors"]
        proof, bound = await self._begin(backend, owners, servers)
        sent = [await _prepare(proof, route, owners) for route in dict.fromkeys(map(_route_of, owners))]
        await proof.look_before(servers)
        sends = [send for each in sent for send in each.sends(backend.device)]
        labels, calls = zip(*sends, strict=True)
        before = f" after version {self.memory.version}" if self.memory.version >= 0 else ""
        results = await probe.gather(lambda call: call(), calls)
        raise_first(f"take the weights of version {version}{before}", labels, results, is_final=True)
        apart = [await probe.probe_parity(backend, each, bound) for each in owners if each not in servers]
        apart += [each for engine in servers for each in await proof.prove(engine)]
        assert backend.version == version, f"the trainer went from {version} to {backend.version} during a sync"
        self.memory = _remembered(proof, sent) if servers else self.memory
        return {"sync/bytes": float(sum(each.bytes for each in sent)), "sync/probe": max(apart)}

    async def _begin(
        self, backend: TrainingBackend, owners: Sequence[InferenceBackend], servers: Sequence[InferenceBackend]
    ) -> tuple[probe.Proof, float]:
        """The weights, the trainer's numbers for the fixed sequence, and the tolerance for engines that get tensors."""
        # Submit all work before awaiting anything, so that no other work comes between the weights and their numbers.
        kinds = dict.fromkeys(engine.capabilities.weights_kind for engine in owners)
        wanted = {kind: backend.get_weights(kind) for kind in kinds}
        sequences, numbers = probe.Sequences([], [], [], 0), list[float]()
        if servers:
            members = [member for engine in servers for member in members_of(engine)] or servers
            context_tokens = min(member.context_tokens_max for member in members)
            vocabulary_size = min(member.vocabulary_size or probe.COPY_TOKENS for member in members)
            sequences = probe.probe_sequences(context_tokens, vocabulary_size)
            numbers = await probe.trainer_logprobs(backend, sequences.scored)
        weights: dict[Kind, Mapping[str, Any]] = {kind: await future for kind, future in wanted.items()}
        given = self.tolerance
        if given is None:
            given = max(engine.capabilities.tolerance for engine in owners) or None
        every = {name: tensor for of_kind in weights.values() for name, tensor in of_kind.items()}
        own, bound = (
            probe.parity_tolerance(every, backend.compute_dtype, full=full) if given is None else given
            for full in (probe.TOLERANCE_SERVER, probe.TOLERANCE)
        )
        memory, temperature = self.memory, self.temperature
        return probe.Proof(backend, backend.version, weights, sequences, numbers, own, temperature, memory), bound


class _Route(NamedTuple):
    """The kind of weights, how they are sent, and the folder."""

    kind: Kind
    form: Literal["tensors", "folder", "group"]
    folder: str


class _Sent(NamedTuple):
    """Weights for the engines of one route: the update, its size, and the tensors that are broadcast."""

    route: _Route
    engines: Sequence[InferenceBackend]
    update: WeightUpdate
    bytes: int
    tensors: Mapping[str, Any] = {}

    def sends(self, device: str) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
        """Names of receivers, each with the call that sends to it. Engines that receive over a group share one call."""
        if self.route.form != "group":
            return [
                (probe.engine_label(each), functools.partial(each.update_weights, self.update)) for each in self.engines
            ]
        send_over_group = open_module("rollouts_servers.broadcast").send_over_group
        send = functools.partial(send_over_group, self.engines, self.update, self.tensors, device=device)
        return [(" and ".join(map(probe.engine_label, self.engines)), send)]


def _route_of(engine: InferenceBackend) -> _Route:
    own = engine.capabilities
    folder = own.weights_folder if own.weights_as == "folder" else ""
    assert folder or own.weights_as != "folder", f"{engine!r} needs a folder and has none"
    return _Route(own.weights_kind, own.weights_as, folder)


async def _prepare(proof: probe.Proof, route: _Route, owners: Sequence[InferenceBackend]) -> _Sent:
    """Make the manifest. If engines need a folder, write it once for all of them, and check it."""
    weights, engines = proof.weights[route.kind], [engine for engine in owners if _route_of(engine) == route]
    if route.form == "tensors":
        update = WeightUpdate(proof.version, route.kind, weights=weights)
        return _Sent(route, engines, update, sum(each.nbytes for each in weights.values()))
    beside: files.ModelFiles | None = proof.backend.model_files
    if beside is None:
        name = f"the training backend {type(proof.backend).__name__}"
        raise InferenceError(
            f"{name} does not say how its weights are written for a server: it has no model_files "
            "(docs/weight-sync.md); type --training torch or fsdp, or --inference hf",
            is_transient=False,
        )

    def make() -> _Sent:
        tensors = files.file_tensors(weights, route.kind, beside.causal)
        manifest = files.manifest_of(tensors)
        path = None
        if route.form == "folder":
            like = proof.memory.folders.get(route.kind)
            path = str(files.write_folder(route.folder, proof.version, route.kind, weights, beside, like=like))
            files.check_weights_folder(path, manifest, proof.version)
        scored = Probe(proof.sequences.scored, proof.numbers, proof.tolerance)
        update = WeightUpdate(proof.version, route.kind, path, manifest=manifest, probe=scored)
        size = sum(each.nbytes for each in tensors.values())
        return _Sent(route, engines, update, size, tensors if route.form == "group" else {})

    return await trio.to_thread.run_sync(make)


def raise_first(task: str, labels: Sequence[str], results: Sequence[object], *, is_final: bool = False) -> None:
    """Raise InferenceError for the first engine that failed at a task; the message has the number of failures. Errors
    other than InferenceError are raised unchanged. `is_final`: the task cannot be retried.
    """
    failed = [(label, each) for label, each in zip(labels, results, strict=True) if isinstance(each, Exception)]
    for label, error in sorted(failed, key=lambda pair: isinstance(pair[1], InferenceError)):
        if not isinstance(error, InferenceError):
            raise error
        others = f" ({len(failed)} of {len(labels)} engines failed)" if len(labels) > 1 else ""
        is_transient = error.is_transient and not is_final
        raise InferenceError(f"{label} did not {task}{others}: {error}", is_transient=is_transient) from error


def _remembered(proof: probe.Proof, sent: Sequence[_Sent]) -> probe.Memory:
    """Remember a successful sync, and remove folders that no server needs."""
    versions = [version for version in proof.known if version != proof.version] + [proof.version]
    # The first weights of an adapter are usually those of the model without it.
    kept = dict.fromkeys(versions[:1] + versions[-REMEMBERED:])
    numbers = {version: {**proof.known, proof.version: proof.numbers}[version] for version in kept}
    folders = {}
    for (kind, _, folder), _, update, _, _ in sent:
        if update.path is not None:
            # Unfinished replies may use the adapter before, which a server may load again from its folder.
            files.prune_folders(folder, {proof.version, proof.memory.version if kind == "adapter" else proof.version})
            folders[kind] = update.path
    return probe.Memory(proof.sequences.scored, numbers, folders)
