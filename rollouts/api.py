"""The one-liners: `rollouts.run(env="calculator", loss="grpo", steps=20)` does what the command does, in silence, and
`rollouts.resume("runs/mine")` goes on with a run.

They only delegate: settings go through the same resolving as a file's, so every key of `rollouts config` may be given,
and component settings as nested dicts.
"""

from __future__ import annotations

from typing import Any

__all__ = ["resume", "run"]


def run(file: str | None = None, **settings: Any) -> dict[str, Any]:
    """Compose and run; returns what `summary.json` holds.

    `file` is a settings file; `settings` override it: `run(env={"name": "calculator", "digits": 3}, steps=20)`. Must
    not be called inside a running trio loop.

    Raises:
        UserError: something in the settings cannot work; nothing was written.
        RunError: the run failed; its folder says how far it came.
    """
    from rollouts.compose import run_resolved
    from rollouts.config import check_tree, load_file, merge, resolve

    check_tree(settings)
    if file is None:
        return run_resolved(resolve(settings))
    tree, source = load_file(file)
    return run_resolved(resolve(merge(tree, settings), source=source))


def resume(folder: str, *, checkpoint: str = "", **settings: Any) -> dict[str, Any]:
    """Go on with the run in `folder`, from its last complete checkpoint; returns what `summary.json` holds.

    `settings` override those of its config.toml: `resume("runs/mine", steps=200)` makes it longer. `checkpoint` goes
    back to an earlier one. A finished run is left as it is. Must not be called inside a running trio loop.

    Raises:
        UserError: there is no such run, or it cannot be gone on with; it was left as it was.
        RunError: the run failed; its folder says how far it came.
    """
    from rollouts.compose import resume_resolved
    from rollouts.config import check_tree

    check_tree(settings)
    return resume_resolved(folder, settings, checkpoint)
