"""The command line: `rollouts`.

    app.py         the group of commands, found lazily; errors and exit codes
    options.py     every core setting as a flag; flags, a file and defaults into one Resolved
    run.py sft.py config.py plugins.py    one module a command, imported when it is called
    components.py  the signature of a component that was named
    ending.py      signals, and an output that was closed
    reference.py   all help as markdown, for docs/cli.md

`rollouts --help` imports click and nothing else that is heavy.
Exit codes: 0 done, 2 the user's mistake, 1 the run failed, 130 interrupted (143 by SIGTERM, 129 by SIGHUP).
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command with the given arguments and return its exit code.

    Without arguments it is the process's own command: what a run has excluded from garbage collection stays excluded,
    since to collect it as the process ends takes a second. No traceback is shown for the user's mistakes and for runs
    that failed, unless ROLLOUTS_TRACEBACK=1.
    """
    from rollouts.cli.app import run_app

    try:
        return run_app(argv)
    finally:
        if argv is not None:
            import gc

            gc.unfreeze()
