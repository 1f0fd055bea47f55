"""The one-liners: `rollouts.run(env="calculator", loss="grpo", steps=20)` does what the command does, in silence, and
`rollouts.resume("runs/mine")` resumes a run.

They only delegate: settings go through the same resolving as a file's, so every key of `rollouts config` may be given,
and component settings as nested dicts.
"""

from __future__ import annotations

import gc
from typing import Any


def run(file: str | None = None, **settings: Any) -> dict[str, Any]:
    """Compose and run; returns what `summary.json` holds.

    `file` is a settings file; `settings` override it: `run(env={"name": "calculator", "digits": 3}, steps=20)`. Must
    not be called inside a running trio loop.

    Raises:
        UserError: something in the settings cannot work; nothing was written.
        RunError: the run failed; its folder says how far it came.
    """
    from rollouts.config.files import NOWHERE, check_tree, load_file
    from rollouts.config.merging import merge
    from rollouts.config.resolving import resolve
    from rollouts.runs import run as run_resolved

    check_tree(settings)
    tree, source = load_file(file) if file is not None else ({}, NOWHERE)
    try:
        return run_resolved(resolve(merge(tree, settings), source))
    finally:
        gc.unfreeze()  # a run excludes loaded objects from garbage collection


def resume(folder: str, *, checkpoint: str = "", **settings: Any) -> dict[str, Any]:
    """Go on with the run in `folder`, from its last complete checkpoint; returns what `summary.json` holds.

    `settings` override those of its config.toml: `resume("runs/mine", steps=200)` makes it longer. `checkpoint` goes
    back to an earlier one. A finished run is left as it is. Must not be called inside a running trio loop.

    Raises:
        UserError: there is no such run, or it cannot be resumed; it was left as it was.
        RunError: the run failed; its folder says how far it came.
    """
    from rollouts.config.files import check_tree
    from rollouts.runs import resume_run

    check_tree(settings)
    try:
        return resume_run(folder, settings, checkpoint=checkpoint)
    finally:
        gc.unfreeze()
