"""Another algorithm from some step on: which one is in force is a pure function of the step.

A stage names an algorithm under which a backend was given it, so that batches carry the name only. Left out: how
stages are written in a file (rollouts.config), and what happens to a KL coefficient that was steered (the loop).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rollouts.training.algorithms.algorithm import Algorithm

__all__ = ["FIRST", "Stage", "stage_at", "stage_name"]

FIRST = "main"
"""The name of the stage that a run begins with."""


class Stage(NamedTuple):
    """The `algorithm` that is in force from `step` on (0-based), and its name with the backend.

    `correction_auto`: nobody asked for its off-policy correction, so it is for tokens of other engines or weights.
    """

    step: int
    name: str
    algorithm: Algorithm
    correction_auto: bool = False

    def inside(self) -> Stage:
        """The stage for a sampler that is the trainer as it is: there is nothing to correct unless somebody asked."""
        return self._replace(algorithm=self.algorithm._replace(correction=None)) if self.correction_auto else self


def stage_name(step: int) -> str:
    """The name of the stage that begins at this step.

    >>> stage_name(0), stage_name(50)
    ('main', 'from_step_50')
    """
    return f"from_step_{step}" if step else FIRST


def stage_at(stages: Sequence[Stage], step: int) -> Stage:
    """The stage in force at `step`: the last one that has begun. `stages` are sorted, and the first begins at 0."""
    steps = [stage.step for stage in stages]
    assert steps and steps[0] == 0 and steps == sorted(set(steps)), f"stages begin at {steps}; they start at 0, sorted"
    assert step >= 0, f"there is no step {step}"
    return next(stage for stage in reversed(stages) if stage.step <= step)
