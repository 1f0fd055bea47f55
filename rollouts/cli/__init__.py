"""The command line: `rollouts`.

    app.py        the group of commands, each imported when it is used; errors and exit codes
    options.py    every core setting as a flag; flags, a file and defaults into one Resolved
    run.py        `run`, `sft`, `eval` and `resume`
    config.py plugins.py env.py export.py chat.py serve.py    the other commands
    progress.py   the display while a command runs
    ending.py     signals, and a closed output

A command's module is imported when it is called: `rollouts --help` imports no large package but click. Exit codes: 0
done, 2 the user's mistake, 1 the run failed, 130 interrupted (143 by SIGTERM, 129 by SIGHUP).
"""

from rollouts.cli.app import main

__all__ = ["main"]
