"""Gives engines new weights, and tests that they arrived.

    metrics = await sync_weights(backend, engines)               once
    syncing = WeightSyncManager(engines, temperature=0.7)        repeatedly: also detects engines that keep old weights
    metrics = await syncing.sync(backend)

An engine that uses the trainer's own parameters only gets the version. An engine with its own weights (`owns_weights`)
gets them from `sending`. See docs/weight-sync.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from rollouts.inference.base import InferenceBackend, WeightUpdate
from rollouts.training.batches import TrainingBackend

if TYPE_CHECKING:
    from rollouts.training.weights.sending import Sender


class WeightSync(Protocol):
    """Gives engines the weights of a backend."""

    async def sync(self, backend: TrainingBackend) -> dict[str, float]:
        """Make every engine serve the backend's weights. Returns metrics. Raises InferenceError."""


class WeightSyncManager:
    """Syncs a run's engines, and remembers earlier syncs. `version` is the last version that all engines were seen to
    serve; -1 before the first sync.

    Args:
        engines: all engines of the run
        temperature: the run's sampling temperature; sampled tokens are probed at this temperature and at 1
        tolerance: the allowed difference between an engine's and the trainer's log-probability of a token, in nats.
            None: the engine's own `tolerance` if it is above 0, else a number that depends on the dtype of the weights
        on_send: called before weights are sent to engines that have a copy of them
    """

    def __init__(
        self,
        engines: Sequence[InferenceBackend],
        *,
        temperature: float = 1.0,
        tolerance: float | None = None,
        on_send: Callable[[], None] = lambda: None,
    ) -> None:
        self.engines, self._on_send = tuple(engines), on_send
        self.version = -1
        self._temperature, self._tolerance = temperature, tolerance
        self._sender: Sender | None = None

    async def sync(self, backend: TrainingBackend) -> dict[str, float]:
        """Make every engine serve the backend's weights. Returns `sync/` metrics.

        If the trainer's numbers have moved since the last sync, the engines' numbers must have moved too. Raises
        InferenceError if an engine does not serve the weights; it names the engine, the versions and a likely cause.
        After an error, the engines' weights are unknown.
        """
        start, version = time.perf_counter(), backend.version
        owners = [engine for engine in self.engines if engine.capabilities.owns_weights]
        for engine in self.engines:
            if engine not in owners:
                await engine.update_weights(WeightUpdate(version))
        metrics = {"sync/version": float(version)}
        if owners:
            from rollouts.training.weights.sending import Sender

            self._on_send()
            self._sender = self._sender or Sender(self._temperature, self._tolerance)
            metrics |= await self._sender.send(backend, owners)
        self.version = version
        return metrics | {"sync/seconds": time.perf_counter() - start}


async def sync_weights(
    backend: TrainingBackend,
    engines: Sequence[InferenceBackend],
    *,
    tolerance: float | None = None,
    temperature: float = 1.0,
) -> dict[str, float]:
    """A single sync by a new `WeightSyncManager`, without comparison with earlier syncs."""
    return await WeightSyncManager(engines, temperature=temperature, tolerance=tolerance).sync(backend)
