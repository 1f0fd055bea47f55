"""Settings: the core's own, and those of components, from flags, a file and defaults, in that order of precedence.

    settings.py   the core's settings, each with its documentation, default and bounds
    flags.py      dotted flags off the command line; a flag's text as a value
    files.py      .toml, .json and .py files; the line on which a setting stands
    values.py     values and types in words
    convert.py    values into types; a component's settings by its signature
    resolving.py  merging, checking: a tree into `Resolved`
    render.py     `Resolved` back into a file that repeats the run

A name becomes a component elsewhere (rollouts.compose); nothing here imports one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face

if TYPE_CHECKING:
    from rollouts.config.convert import complete_settings, convert_settings, convert_value
    from rollouts.config.files import Source, load_file, where
    from rollouts.config.flags import Flag, Tree, read_flag, take_dotted_flags
    from rollouts.config.render import to_toml
    from rollouts.config.resolving import Component, Resolved, merge, resolve, settings_path
    from rollouts.config.settings import COMPONENT_KINDS, MULTIPLE, SINGLE, Settings, setting_infos

__all__ = [
    "COMPONENT_KINDS",
    "MULTIPLE",
    "SINGLE",
    "Component",
    "Flag",
    "Resolved",
    "Settings",
    "Source",
    "Tree",
    "complete_settings",
    "convert_settings",
    "convert_value",
    "load_file",
    "merge",
    "read_flag",
    "resolve",
    "setting_infos",
    "settings_path",
    "take_dotted_flags",
    "to_toml",
    "where",
]

_HOMES = {
    "COMPONENT_KINDS": "settings",
    "MULTIPLE": "settings",
    "SINGLE": "settings",
    "Component": "resolving",
    "Flag": "flags",
    "Resolved": "resolving",
    "Settings": "settings",
    "Source": "files",
    "Tree": "flags",
    "complete_settings": "convert",
    "convert_settings": "convert",
    "convert_value": "convert",
    "load_file": "files",
    "merge": "resolving",
    "read_flag": "flags",
    "resolve": "resolving",
    "setting_infos": "settings",
    "settings_path": "resolving",
    "take_dotted_flags": "flags",
    "to_toml": "render",
    "where": "files",
}

__getattr__, __dir__ = lazy_face(__name__, _HOMES)
