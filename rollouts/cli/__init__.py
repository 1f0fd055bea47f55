"""The command line: `rollouts`.

    app.py         the group of commands, found lazily; errors and exit codes
    options.py     every core setting as a flag; flags, a file and defaults into one Resolved
    run.py sft.py config.py plugins.py    one module a command, imported when it is called
    components.py  the signature of a component that was named
    reference.py   all help as markdown, for docs/cli.md

`rollouts --help` imports click and nothing else that is heavy.
Exit codes: 0 done, 2 the user's mistake, 1 the run failed, 130 interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command with the given arguments (those of the process by default) and return its exit code.

    No traceback is shown for the user's mistakes and for runs that failed, unless ROLLOUTS_TRACEBACK=1.
    """
    from rollouts.cli.app import run_app

    return run_app(argv)
