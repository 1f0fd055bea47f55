"""Names become functions, only here: a resolved configuration becomes a plan, and a plan a run.

plan.py        every component found, imported, checked and told its settings; no model is loaded
choosing.py    one component: found, and told its settings
environments.py  the chosen environments: tasks, shares
demonstrations.py  which demonstrations are trained on, and in which order
algorithms.py  the chosen ones as Algorithms, a stage each, and every check of them
describe.py    a plan in words: what `--dry-run` prints
memory.py      what a plan will take
parts.py       the stateful parts of a run: model, engine, loggers
evaluation_plan.py, evaluation.py  the same for a run that only evaluates: its plan, its course
launch.py      the parts are put together, the run begins and ends
course.py      what happens in between: evaluate, train, save
resume.py      which checkpoint a run goes on from, and what is taken back
phases.py      one run after another: demonstrations, then reinforcement
manifest.py    what the run was made of
watch.py       what is told to whoever watches
rank.py        a rank above 0 of a distributed backend
export.py      a checkpoint becomes a model
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollouts.compose.evaluation import EvaluationWatcher
    from rollouts.compose.plan import Plan
    from rollouts.compose.watch import Watcher
    from rollouts.config import Resolved, Tree

__all__ = ["make_plan", "resume_command", "resume_resolved", "run_command", "run_resolved"]


def make_plan(resolved: Resolved) -> Plan:
    """See `rollouts.compose.plan.make_plan`."""
    from rollouts.compose.plan import make_plan

    return make_plan(resolved)


def run_resolved(resolved: Resolved) -> dict[str, Any]:
    """Compose and run in silence; returns what summary.json holds. Raises UserError, RunError."""
    from rollouts.compose.resume import finished, run_to_resume
    from rollouts.compose.watch import Silence

    started = time.perf_counter()
    with _collecting_again():
        if resolved.settings.mode == "eval":
            return _evaluate(resolved, None, started)
        folder = run_to_resume(resolved)
        done = folder and finished(folder, resolved.settings.steps)
        return done or _start(resolved, Silence(), started, folder)


def resume_resolved(folder: str, given: Tree, checkpoint: str = "") -> dict[str, Any]:
    """Go on with the run in `folder` in silence, with the `given` settings over its own; returns what summary.json
    holds. Raises UserError, RunError.
    """
    from rollouts.compose.resume import finished, read_run
    from rollouts.compose.watch import Silence

    started = time.perf_counter()
    resolved = read_run(Path(folder), given)
    done = None if checkpoint else finished(Path(folder), resolved.settings.steps)
    with _collecting_again():
        return done or _start(resolved, Silence(), started, Path(folder), checkpoint)


@contextlib.contextmanager
def _collecting_again() -> Iterator[None]:
    """A run excludes loaded objects from garbage collection; for a program that goes on after it they come back."""
    try:
        yield
    finally:
        gc.unfreeze()


def run_command(resolved: Resolved, dry_run: bool) -> int:
    """What `rollouts run` and `rollouts sft` do; returns the exit code. Raises UserError, RunError,
    KeyboardInterrupt.
    """
    started = time.perf_counter()
    if dry_run:
        print(_described(resolved))
        return 0
    from rollouts.cli.ending import silent_when_closed

    with silent_when_closed("stdout"):
        if resolved.settings.mode == "eval":
            from rollouts.cli.evaluation_progress import EvaluationProgress

            _evaluate(resolved, EvaluationProgress(), started)
            return 0
        from rollouts.compose.resume import run_to_resume

        return _tell_or_start(resolved, started, run_to_resume(resolved), "")


def resume_command(folder: str, given: Tree, checkpoint: str) -> int:
    """What `rollouts resume` does; returns the exit code. Raises UserError, RunError, KeyboardInterrupt."""
    started = time.perf_counter()
    from rollouts.cli.ending import silent_when_closed
    from rollouts.compose.resume import read_run

    with silent_when_closed("stdout"):
        return _tell_or_start(read_run(Path(folder), given), started, Path(folder), checkpoint)


def _described(resolved: Resolved) -> str:
    """What `--dry-run` prints."""
    from rollouts.training.models import remote_code

    with remote_code(resolved.settings.trust_remote_code):
        return _description(resolved)


def _description(resolved: Resolved) -> str:
    if resolved.settings.mode == "sft+rl":
        from rollouts.compose.phases import describe_phases

        return describe_phases(resolved)
    if resolved.settings.mode == "eval":
        from rollouts.compose.describe import describe_evaluation
        from rollouts.compose.evaluation_plan import make_evaluation_plan

        return describe_evaluation(make_evaluation_plan(resolved))
    from rollouts.compose.describe import describe

    return describe(make_plan(resolved))


def _tell_or_start(resolved: Resolved, started: float, folder: Path | None, checkpoint: str) -> int:
    """A run that is finished says so; every other one is run, or gone on with."""
    from rollouts.cli.progress import Progress
    from rollouts.compose.resume import finished, finished_words

    done = finished(folder, resolved.settings.steps) if folder is not None and not checkpoint else None
    if folder is not None and done is not None:
        if os.environ.get("RANK", "0") == "0":  # under a launcher one rank is enough to say it
            print(finished_words(folder, done))
        return 0
    _start(resolved, Progress(), started, folder, checkpoint)
    return 0


def _evaluate(resolved: Resolved, watcher: EvaluationWatcher | None, started: float) -> dict[str, Any]:
    from rollouts.compose.evaluation import EvaluationSilence, launch_evaluation
    from rollouts.compose.evaluation_plan import make_evaluation_plan
    from rollouts.training.models import remote_code

    home = Path.cwd()  # where relative paths begin; an author's code may go elsewhere
    with remote_code(resolved.settings.trust_remote_code):
        return launch_evaluation(make_evaluation_plan(resolved), watcher or EvaluationSilence(), started, home)


def _start(
    resolved: Resolved, watcher: Watcher, started: float, folder: Path | None, checkpoint: str = ""
) -> dict[str, Any]:
    """Compose, and run in a new folder (None), or go on in one."""
    from rollouts.training.models import remote_code

    home = Path.cwd()  # where relative paths begin; an author's code may go elsewhere
    with remote_code(resolved.settings.trust_remote_code):
        if resolved.settings.mode == "sft+rl":
            from rollouts.compose.phases import launch_phases

            return launch_phases(resolved, watcher, started, resume=folder, checkpoint=checkpoint, home=home)
        from rollouts.compose.launch import launch

        return launch(make_plan(resolved), watcher, started, resume=folder, checkpoint=checkpoint, home=home)
