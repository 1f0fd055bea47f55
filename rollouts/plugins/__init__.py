"""Plugging in: names from installed metadata, hooks for what cannot be listed there, and what a component receives.

- `index.py`: components by kind and name, out of `importlib.metadata`; nothing is imported until one is chosen
- `files.py`: `./file.py:Name`, a component that is not installed
- `hookspecs.py`, `manager.py`: pluggy hooks, loaded one by one; what fails is named and stops nothing else
- `signature.py`: "settings are the keyword-only parameters", "a component receives what it names"
- `protocols.py`: typed Protocols for editors and type checkers

This face is lazy (PEP 562): importing it imports none of the rooms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face

if TYPE_CHECKING:
    from rollouts.plugins.hookspecs import hookimpl, hookspec
    from rollouts.plugins.index import KINDS, ComponentRef, find_component, installed_components, load_component
    from rollouts.plugins.manager import PluginFault, PluginManager
    from rollouts.plugins.signature import (
        REQUIRED,
        VOCABULARY,
        Setting,
        Signature,
        call_with,
        check_signature,
        read_signature,
    )

__all__ = [
    "KINDS",
    "REQUIRED",
    "VOCABULARY",
    "ComponentRef",
    "PluginFault",
    "PluginManager",
    "Setting",
    "Signature",
    "call_with",
    "check_signature",
    "find_component",
    "hookimpl",
    "hookspec",
    "installed_components",
    "load_component",
    "read_signature",
]

_HOMES = {
    "KINDS": "index",
    "REQUIRED": "signature",
    "VOCABULARY": "signature",
    "ComponentRef": "index",
    "PluginFault": "manager",
    "PluginManager": "manager",
    "Setting": "signature",
    "Signature": "signature",
    "call_with": "signature",
    "check_signature": "signature",
    "find_component": "index",
    "hookimpl": "hookspecs",
    "hookspec": "hookspecs",
    "installed_components": "index",
    "load_component": "index",
    "read_signature": "signature",
}

__getattr__, __dir__ = lazy_face(__name__, _HOMES)
