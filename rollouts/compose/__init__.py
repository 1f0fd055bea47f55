"""Names become functions, only here: a resolved configuration becomes a plan, and a plan a run.

plan.py        every component found, imported, checked and told its settings; no model is loaded
choosing.py    one component: found, and told its settings
algorithms.py  the chosen ones as Algorithms, a stage each, and every check of them
describe.py    a plan in words: what `--dry-run` prints
parts.py       the stateful parts of a run: model, engine, folder, loggers
launch.py      the loop runs, the folder is written
manifest.py    what the run was made of
watch.py       what is told to whoever watches
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollouts.compose.plan import Plan
    from rollouts.config import Resolved

__all__ = ["make_plan", "run_command", "run_resolved"]


def make_plan(resolved: Resolved) -> Plan:
    """See `rollouts.compose.plan.make_plan`."""
    from rollouts.compose.plan import make_plan

    return make_plan(resolved)


def run_resolved(resolved: Resolved) -> dict[str, Any]:
    """Compose and run in silence; returns what summary.json holds. Raises UserError, RunError."""
    from rollouts.compose.launch import launch
    from rollouts.compose.watch import Silence

    return launch(make_plan(resolved), Silence(), time.perf_counter())


def run_command(resolved: Resolved, dry_run: bool) -> int:
    """What `rollouts run` and `rollouts sft` do; returns the exit code. Raises UserError, RunError,
    KeyboardInterrupt.
    """
    started = time.perf_counter()
    plan = make_plan(resolved)
    if dry_run:
        from rollouts.compose.describe import describe

        print(describe(plan))
        return 0
    from rollouts.cli.progress import Progress
    from rollouts.compose.launch import launch

    launch(plan, Progress(), started)
    return 0
