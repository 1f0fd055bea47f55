"""Settings of the core and of components. Flags override a settings file, and the file overrides the defaults.

    settings.py   the core's settings, with their documentation, defaults and bounds
    hints.py      type hints and documentation of parameters
    names.py      the grammar of the names of components
    importing.py  imports authors' files
    flags.py      parses dotted flags of the command line
    files.py      reads .toml, .json and .py files; finds the line of a setting, and words errors about it
    objects.py    gives names to Python objects in settings
    foreign.py    what other programs call settings and commands
    convert.py    converts values to types, and a component's settings by its signature
    merging.py    merges the settings that name components
    schedule.py   changes at a step
    secrets.py    keeps the secrets of components out of files
    resolving.py  checks a tree of settings, and makes a `Resolved` of it
    render.py     writes a `Resolved` as a settings file

This package imports no component: `rollouts.runs` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face, moved_modules

if TYPE_CHECKING:
    from rollouts_notes.sections import Config as Config
    from rollouts_notes.sections import DataConfig as DataConfig
    from rollouts_notes.sections import DeploymentConfig as DeploymentConfig
    from rollouts_notes.sections import GPUConfig as GPUConfig
    from rollouts_notes.sections import ModelConfig as ModelConfig
    from rollouts_notes.sections import OutputConfig as OutputConfig
    from rollouts_notes.sections import RLConfig as RLConfig
    from rollouts_notes.sections import SFTConfig as SFTConfig
    from rollouts_notes.sections import TrainingConfig as TrainingConfig

__getattr__, __dir__ = lazy_face(__name__)
moved_modules({f"{__name__}.sections": "rollouts_notes.sections"})
