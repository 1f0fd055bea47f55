"""Settings of the core and of components. Flags override a settings file, and the file overrides the defaults.

    settings.py   the core's settings, with their documentation, defaults and bounds
    hints.py      type hints and documentation of parameters
    flags.py      parses dotted flags of the command line
    files.py      reads .toml, .json and .py files; finds the line of a setting
    convert.py    converts values to types, and a component's settings by its signature
    merging.py    merges the settings that name components
    schedule.py   changes at a step
    secrets.py    keeps the secrets of components out of files
    resolving.py  checks a tree of settings, and makes a `Resolved` of it
    render.py     writes a `Resolved` as a settings file

This package imports no component: `rollouts.runs` does.
"""
