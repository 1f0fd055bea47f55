"""What an observer sees of the episodes and engines of a run, and of its training backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollouts.inference.base import InferenceBackend
from rollouts.inference.servers.server import Server
from rollouts.inference.servers.server_pool import ServerPool
from rollouts.runs.observer import EngineState, Observer
from rollouts.training.batches import TrainingBackend
from rollouts.types import Episode


@dataclass
class Watching:
    """Counts the episodes that play. `name` is that of the engine. `noted` notes of the training backend are shown."""

    observer: Observer
    name: str
    inference: InferenceBackend
    noted: int
    playing: int = 0

    def begin(self) -> None:
        """An episode begins."""
        self.playing += 1

    def end(self, episode: Episode) -> None:
        """An episode ended; it may be tried again."""
        self.playing -= 1
        self.observer.rollout(episode)

    def notes(self, backend: TrainingBackend) -> None:
        """Show the notes that the backend has added since the last call."""
        for note in backend.notes[self.noted :]:
            self.observer.note(note)
        self.noted = len(backend.notes)

    def engines(self) -> Sequence[EngineState]:
        """The engines now: each server with its requests; another engine with the episodes that play."""
        engine = self.inference
        if not isinstance(engine, Server | ServerPool):
            return [EngineState(self.name, engine.version, self.playing)]
        servers = engine.statistics().servers if isinstance(engine, ServerPool) else [engine.statistics()]
        return [
            EngineState(each.name, each.version, each.in_flight, "" if each.state == "ready" else each.state)
            for each in servers
        ]
