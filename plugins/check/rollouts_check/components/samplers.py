"""Checks of what chooses tasks: samplers, on draws among invented tasks, whose groups earn all, some or nothing; and
curricula, which weigh an environment at each step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rollouts.author_code import shown
from rollouts.errors import counted
from rollouts.plugins.signature import call_with
from rollouts.training.datasets.samplers import SampledTasks
from rollouts.types import Task
from rollouts_check.components.common import Function, Subject

TASKS = [Task(f"task {number}", id=f"task-{number}") for number in range(12)]
DRAWS, PER_STEP = 120, 4
STEPS = (0, 1, 2, 10, 99, 100, 101, 1_000, 100_000, 10_000_000)
STRANGE: dict[str, list[float | None]] = {
    "a group that no reward could judge": [None, None],
    "a group of one rollout": [0.5],
    "a negative and a large reward": [-3.0, 1e9],
}


def trial(subject: Subject, function: Function) -> Any:
    """The tasks of the first draws."""
    return _draws(_made(subject, function), 0, DRAWS)


def chooses(subject: Subject) -> str:
    """It chooses a task at every draw, and sees what the groups earned.

    Advice: return the key of a task, or None for the next one in order
    """
    with subject.trying(f"draw {DRAWS} of {len(TASKS)} tasks"):
        drawn = _draws(_made(subject, subject.function), 0, DRAWS)
    different = counted(len(set(drawn) - {None}), "different task")
    return f"draws {different}, and {drawn.count(None)} times the next one in order"


def any_outcome(subject: Subject) -> None:
    """It accepts every outcome: groups without a judged rollout, of one rollout, and with any rewards.

    Advice: accept any list of floats and None
    """
    for words, rewards in STRANGE.items():
        with subject.trying(f"report {words}: {shown(rewards)}"):
            sampling = _made(subject, subject.function)
            sampling.finished(TASKS[0], rewards, 0)
            _draws(sampling, 1, PER_STEP)
            sampling.metrics()


def restored(subject: Subject) -> None:
    """A checkpoint can hold its state, and a sampler that is restored draws the same tasks.

    Advice: return everything from `state` that later draws depend on, and set it in `restore`
    """
    with subject.trying(f"save the state after {DRAWS // 2} draws, and restore it") as attempt:
        sampling, again = _made(subject, subject.function), _made(subject, subject.function)
        _draws(sampling, 0, DRAWS // 2)
        again.load_state_dict(sampling.state_dict())
        before, after = (_draws(each, DRAWS // 2, DRAWS) for each in (sampling, again))
    for number, (one, other) in enumerate(zip(before, after, strict=True), start=DRAWS // 2):
        attempt.require(one == other, f"draw {number} was {one}, and is {other} now")


def other_tasks(subject: Subject) -> None:
    """A state of other tasks can be restored: some are gone, and others are new.

    Advice: leave out tasks that are gone, and add those that are new
    """
    with subject.trying("restore the state of other tasks"):
        sampling, other = (_made(subject, subject.function, tasks) for tasks in (TASKS[:-2], TASKS[2:]))
        _draws(sampling, 0, DRAWS // 2)
        other.load_state_dict(sampling.state_dict())
        _draws(other, DRAWS // 2, DRAWS)


def _made(subject: Subject, function: Function, tasks: Sequence[Task] = TASKS) -> SampledTasks:
    return SampledTasks(function, lambda: tasks, subject.seed)


def _draws(sampling: SampledTasks, first: int, end: int) -> list[str | None]:
    """The keys of the tasks that are drawn, None for the next one in order. A third of the tasks earns all, a third
    nothing, and a third some.
    """
    drawn: list[str | None] = []
    for number in range(first, end):
        step = number // PER_STEP
        task = sampling.choose(step)
        drawn.append(None if task is None else task.key)
        kind = (number if task is None else TASKS.index(task)) % 3
        sampling.finished(task or TASKS[number % len(TASKS)], [float(kind > 0), float(kind > 1)], step)
        sampling.metrics()
    return drawn


# --- curricula --------------------------------------------------------------------------------------------------------


def curriculum_trial(subject: Subject, function: Function) -> Any:
    """The weights of the first steps."""
    return [call_with(function, {"step": step}) for step in STEPS]


def values(subject: Subject) -> str:
    """It returns a finite weight of 0 or more for every step, and more than 0 for some.

    Advice: return a number of 0 or more: the weight among all environments
    """
    found = []
    for step in STEPS:
        with subject.trying(f"call it at step {step:,}") as attempt:
            found.append(weight := call_with(subject.function, {"step": step}))
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        attempt.require(is_number and math.isfinite(weight) and weight >= 0, f"it returned {shown(weight)}")
    attempt = subject.attempt(f"call it at steps 0 to {STEPS[-1]:,}", "return a weight above 0 at some steps")
    attempt.require(any(found), "the weight is 0 at all of them")
    return f"{found[0]:g} at first, {found[-1]:g} at last"
