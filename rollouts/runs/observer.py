"""Who watches a run. The command line's progress is one observer; an observer that shows nothing another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rollouts.plugins.manager import PluginFault
from rollouts.training.rollout_gen.groups import Group


class Observer(Protocol):
    """Called in the run's own thread; it may not raise, and should not take long."""

    def begin(self, title: str, total: int, folder: Path, notes: Sequence[str]) -> None:
        """The model is loaded. `total` counts the steps, or the episodes of an evaluation; `notes` say what is unusual.

        A run of mode sft+rl begins twice.
        """

    def evaluation(self, when: str, evaluation: dict[str, Any]) -> None:
        """A training run has evaluated; `when` is "before", "after" or "step N"."""

    def step(self, step: int, metrics: dict[str, float], groups: Sequence[Group]) -> None:
        """A step (0-based) is done."""

    def episode(self, done: int, reward_mean: float | None) -> None:
        """One more episode of an evaluation is done; the mean is of those that are judged so far."""

    def note(self, words: str) -> None:
        """A warning; the run goes on."""

    def faults(self, faults: Sequence[PluginFault]) -> None:
        """Hooks that failed; the run goes on."""

    def end(self, summary: dict[str, Any]) -> None:
        """The run is over, one way or another; `summary` is what summary.json holds."""

    def finished(self, words: str) -> None:
        """Nothing is left to do in this folder."""


class NullObserver:
    """Shows nothing: for the Python interface and for tests."""

    def _nothing(self, *arguments: Any) -> None:
        pass

    begin = evaluation = step = episode = note = faults = end = finished = _nothing
