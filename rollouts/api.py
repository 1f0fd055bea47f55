"""The one-liner: `rollouts.run(env="calculator", loss="grpo", steps=20)` does what the command does, in silence.

It only delegates: settings go through the same resolving as a file's, so every key of `rollouts config` may be given,
and component settings as nested dicts.
"""

from __future__ import annotations

from typing import Any

__all__ = ["run"]


def run(file: str | None = None, **settings: Any) -> dict[str, Any]:
    """Compose and run; returns what `summary.json` holds.

    `file` is a settings file; `settings` override it: `run(env={"name": "calculator", "digits": 3}, steps=20)`. Must
    not be called inside a running trio loop.

    Raises:
        UserError: something in the settings cannot work; nothing was written.
        RunError: the run failed; its folder says how far it came.
    """
    from rollouts.compose import run_resolved
    from rollouts.config import load_file, merge, resolve

    if file is None:
        return run_resolved(resolve(settings))
    tree, source = load_file(file)
    return run_resolved(resolve(merge(tree, settings), source=source))
