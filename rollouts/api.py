"""Start and resume runs from Python.

    rollouts.run(env="calculator", loss="grpo", steps=20)
    rollouts.resume("runs/mine")

The functions take the settings of the command, and print nothing. Settings of a component are a nested dict.
"""

from __future__ import annotations

import gc
from typing import Any


def run(file: str | None = None, **settings: Any) -> dict[str, Any]:
    """Start a run, wait for its end, and return the content of its `summary.json`.

    `file` is a settings file. `settings` override it: `run(env={"name": "calculator", "digits": 3}, steps=20)`. Do not
    call this inside a running trio loop.

    Raises:
        UserError: a setting is wrong. Nothing was written.
        RunError: the run failed. Its folder holds its results so far.
    """
    from rollouts.config.files import NOWHERE, check_tree, load_file
    from rollouts.config.resolving import merge_over_file, resolve
    from rollouts.runs import run as run_resolved

    check_tree(settings)
    tree, source = load_file(file) if file is not None else ({}, NOWHERE)
    try:
        return run_resolved(resolve(merge_over_file(tree, settings, source=source), source))
    finally:
        gc.unfreeze()  # a run excludes loaded objects from garbage collection


def resume(folder: str, *, checkpoint: str = "", **settings: Any) -> dict[str, Any]:
    """Resume the run in `folder` from its last complete checkpoint, and return the content of its `summary.json`.

    `settings` override the run's config.toml: `resume("runs/mine", steps=200)` makes the run longer. `checkpoint` names
    an earlier checkpoint to resume from. A finished run is not changed. Do not call this inside a running trio loop.

    Raises:
        UserError: there is no such run, or it cannot be resumed. Nothing was changed.
        RunError: the run failed. Its folder holds its results so far.
    """
    from rollouts.config.files import check_tree
    from rollouts.runs import resume_run

    check_tree(settings)
    try:
        return resume_run(folder, settings, checkpoint=checkpoint)
    finally:
        gc.unfreeze()
