"""The command line: `rollouts`.

    app.py        the group of commands, each imported when it is used; errors and exit codes
    options.py    every core setting as a flag; flags, a file and defaults into one Resolved
    run.py        `run`, `sft`, `eval` and `resume`
    several.py    the same with several seeds or models
    ending.py     signals, and a closed output

Every other module is one command, such as export.py. `check`, `new`, `plugins`, `runs` and `view` are in packages of
their own beside the core. The display while a command runs is `rollouts.runs.progress`.

A command's module is imported when it is called: `rollouts --help` imports no large package but click. Exit codes: 0
done, 2 the user's mistake, 1 the run failed, 130 interrupted (143 by SIGTERM, 129 by SIGHUP).
"""

from rollouts.cli.app import main

__all__ = ["main"]
