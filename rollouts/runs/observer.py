"""The protocol of observers, which show how a run progresses. The command line's `Progress` is one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rollouts.plugins.manager import PluginFault
from rollouts.training.rollout_gen.groups import Group


class Observer(Protocol):
    """A run calls these methods in its own thread. They must not raise, and should return quickly."""

    def begin(self, title: str, total: int, folder: Path, notes: Sequence[str]) -> None:
        """The model is loaded, and the run begins. A run of mode sft+rl begins twice.

        Args:
            title: the run in one line
            total: the number of steps, or of episodes in an evaluation
            folder: the folder of the run, as messages show it
            notes: warnings about the settings, one sentence each
        """

    def evaluation(self, when: str, evaluation: dict[str, Any]) -> None:
        """An evaluation of a training run is done. `when` is "before", "after" or "step N"."""

    def evaluating(self, when: str, done: int, total: int) -> None:
        """Another episode of such an evaluation is done, of `total`."""

    def step(self, step: int, metrics: dict[str, float], groups: Sequence[Group]) -> None:
        """A step (0-based) is done."""

    def episode(self, done: int, reward_mean: float | None) -> None:
        """Another episode of an evaluation is done. `reward_mean` is over the episodes with a reward so far."""

    def note(self, words: str) -> None:
        """A warning. The run continues."""

    def faults(self, faults: Sequence[PluginFault]) -> None:
        """Hooks that failed. The run continues."""

    def end(self, summary: dict[str, Any]) -> None:
        """The run is over: done, failed or interrupted. `summary` is the content of summary.json."""

    def finished(self, words: str) -> None:
        """The run in this folder was finished before, and nothing is done. `words` say so."""


class NullObserver:
    """An observer that shows nothing, for the Python interface and for tests."""

    def _nothing(self, *arguments: Any) -> None:
        pass

    begin = evaluation = evaluating = step = episode = note = faults = end = finished = _nothing
