"""The protocol of observers, which show how a run progresses. `rollouts.runs.progress` is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from rollouts.inference.base import EngineState
from rollouts.plugins.manager import PluginFault
from rollouts.training.rollout_gen.groups import Group
from rollouts.types import Episode

GENERATING, TRAINING, SYNCING, SAVING = "generating", "training", "sending weights", "saving a checkpoint"
PLAYING, JUDGING = "playing episodes", "judging rollouts"
STEP_PHASES = (GENERATING, TRAINING, SYNCING, SAVING, PLAYING, JUDGING)
"""What a step or an evaluation consists of, as names of phases. Other phases come before, such as "loading tiny"."""


class Observer(Protocol):
    """A run calls these methods in its own thread. They must not raise, and should return quickly."""

    def begin(self, title: str, total: int, folder: Path, notes: Sequence[str]) -> None:
        """Called when the model is loaded and the run begins. A run of mode sft+rl begins twice.

        Args:
            title: the run in one line
            total: the number of steps, or of episodes in an evaluation
            folder: the folder of the run, as messages show it
            notes: warnings about the settings, one sentence each
        """

    def phase(self, name: str, done: int = 0, total: int = 0) -> None:
        """Called when the run begins something that takes time, and again when `done` of it is done; the phase before
        is over. `total` is 0 if it is not known. The phases before the first step also come before `begin`.
        """

    def engines(self, look: Callable[[], Sequence[EngineState]]) -> None:
        """Called when the engines serve. `look` returns their states; call it in the run's thread."""

    def rollout(self, episode: Episode) -> None:
        """Called after each rollout of a training step or of `rollouts eval`, also a failed one."""

    def evaluation(self, when: str, evaluation: dict[str, Any]) -> None:
        """Called after an evaluation of a training run. `when` is "before", "after" or "step N"."""

    def evaluating(self, when: str, done: int, total: int) -> None:
        """Called when an evaluation of a training run begins, and after each of its episodes: `done` of `total` are
        finished.
        """

    def step(self, step: int, metrics: dict[str, float], groups: Sequence[Group]) -> None:
        """Called after each step (0-based)."""

    def episode(self, done: int, reward_mean: float | None) -> None:
        """Called after each episode of `rollouts eval`. `reward_mean` is the mean of the rewards so far."""

    def note(self, words: str) -> None:
        """Called with a warning. The run continues."""

    def faults(self, faults: Sequence[PluginFault]) -> None:
        """Called with hooks that failed. The run continues."""

    def end(self, summary: dict[str, Any]) -> None:
        """Called when the run has ended: done, failed or interrupted. `summary` is the content of summary.json.

        In a phase of sft+rl it also has `whole`, the folder of the whole run. `checkpoint` is None at the end of the
        first phase. In the second phase, `before_sft` is the first evaluation of the first phase (None: not
        comparable).
        """

    def finished(self, words: str) -> None:
        """Called instead of all others if the run in the folder is already finished. `words` is a message that
        says so.
        """


class NullObserver:
    """An observer that shows nothing, for the Python interface and for tests."""

    def _nothing(self, *arguments: Any) -> None:
        pass

    begin = phase = engines = rollout = evaluation = evaluating = step = episode = note = faults = end = finished = (
        _nothing
    )
