"""What is told to whoever watches a run, as it happens. The command line's progress is one watcher; silence another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rollouts.compose.plan import Plan
from rollouts.plugins.manager import PluginFault
from rollouts.training.rollout_gen.groups import Group

__all__ = ["Silence", "Watcher"]


class Watcher(Protocol):
    """Called in the run's own thread; it may not raise, and should not take long."""

    def begin(self, plan: Plan, folder: Path, notes: Sequence[str]) -> None:
        """The model is loaded; `notes` are words about what the model and its template cannot do."""
        ...

    def evaluation(self, when: str, evaluation: dict[str, Any]) -> None:
        """An evaluation is done; `when` is "before", "after" or "step N"."""
        ...

    def step(self, step: int, metrics: dict[str, float], groups: Sequence[Group]) -> None:
        """A step (0-based) is done."""
        ...

    def note(self, words: str) -> None:
        """A warning; the run goes on."""
        ...

    def faults(self, faults: Sequence[PluginFault]) -> None:
        """Hooks that failed; the run goes on."""
        ...

    def end(self, summary: dict[str, Any]) -> None:
        """The run is over, one way or another; `summary` is what summary.json holds."""
        ...


class Silence:
    """The watcher that says nothing: for the Python interface and for tests."""

    def begin(self, plan: Plan, folder: Path, notes: Sequence[str]) -> None:
        """Nothing."""

    def evaluation(self, when: str, evaluation: dict[str, Any]) -> None:
        """Nothing."""

    def step(self, step: int, metrics: dict[str, float], groups: Sequence[Group]) -> None:
        """Nothing."""

    def note(self, words: str) -> None:
        """Nothing."""

    def faults(self, faults: Sequence[PluginFault]) -> None:
        """Nothing."""

    def end(self, summary: dict[str, Any]) -> None:
        """Nothing."""
