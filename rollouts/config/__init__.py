"""Settings: the core's own, and those of components, from flags, a file and defaults, in that order of precedence.

    settings.py   the core's settings, each with its documentation, default and bounds
    flags.py      dotted flags off the command line; a flag's text as a value
    files.py      .toml, .json and .py files; the line on which a setting stands
    values.py     values and types in words
    convert.py    values into types; a component's settings by its signature
    environments.py  one environment or several, and their weights
    merging.py    what names components: flags over a file over defaults
    schedule.py   what changes at a step
    of_run.py     what an evaluation takes from the run that it evaluates
    secrets.py    components' secrets, which are written nowhere
    secret_names.py  which names are those of secrets
    resolving.py  checking: a tree into `Resolved`
    render.py     `Resolved` back into a file that repeats the run

A name becomes a component elsewhere (rollouts.compose); nothing here imports one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face

if TYPE_CHECKING:
    from rollouts.config.convert import complete_settings, convert_settings, convert_value
    from rollouts.config.files import Source, check_tree, load_file, where
    from rollouts.config.flags import Flag, Tree, read_flag, take_dotted_flags
    from rollouts.config.merging import Component, merge, settings_path
    from rollouts.config.render import to_toml
    from rollouts.config.resolving import Resolved, resolve
    from rollouts.config.schedule import ScheduledParts, scheduled_parts, scheduled_table
    from rollouts.config.settings import (
        AUTO,
        COMPONENT_KINDS,
        MULTIPLE,
        OWN,
        SCHEDULED,
        SINGLE,
        Settings,
        setting_infos,
    )

__all__ = [
    "AUTO",
    "COMPONENT_KINDS",
    "MULTIPLE",
    "OWN",
    "SCHEDULED",
    "SINGLE",
    "Component",
    "Flag",
    "Resolved",
    "ScheduledParts",
    "Settings",
    "Source",
    "Tree",
    "check_tree",
    "complete_settings",
    "convert_settings",
    "convert_value",
    "load_file",
    "merge",
    "read_flag",
    "resolve",
    "scheduled_parts",
    "scheduled_table",
    "setting_infos",
    "settings_path",
    "take_dotted_flags",
    "to_toml",
    "where",
]

_HOMES = {
    "AUTO": "settings",
    "COMPONENT_KINDS": "settings",
    "MULTIPLE": "settings",
    "OWN": "settings",
    "SCHEDULED": "settings",
    "SINGLE": "settings",
    "Component": "merging",
    "Flag": "flags",
    "Resolved": "resolving",
    "ScheduledParts": "schedule",
    "Settings": "settings",
    "Source": "files",
    "Tree": "flags",
    "check_tree": "files",
    "complete_settings": "convert",
    "convert_settings": "convert",
    "convert_value": "convert",
    "load_file": "files",
    "merge": "merging",
    "read_flag": "flags",
    "resolve": "resolving",
    "scheduled_parts": "schedule",
    "scheduled_table": "schedule",
    "setting_infos": "settings",
    "settings_path": "merging",
    "take_dotted_flags": "flags",
    "to_toml": "render",
    "where": "files",
}

__getattr__, __dir__ = lazy_face(__name__, _HOMES)
