"""Settings: the core's own, and those of components, from flags, a file and defaults, in that order of precedence.

    settings.py   the core's settings, each with its documentation, default and bounds
    hints.py      type hints and documentation of parameters, each read by itself
    flags.py      dotted flags off the command line; a flag's text as a value
    files.py      .toml, .json and .py files; the line of a setting
    convert.py    values into types; a component's settings by its signature; values and types in words
    merging.py    what names components: flags over a file over defaults
    schedule.py   what changes at a step
    secrets.py    components' secrets, which are written nowhere
    resolving.py  checking: a tree into `Resolved`
    render.py     `Resolved` back into a file that repeats the run

A name becomes a component elsewhere (rollouts.runs); nothing here imports one.
"""
