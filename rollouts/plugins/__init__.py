"""Plugging in: names from installed metadata, hooks for what cannot be listed there, and what a component receives.

- `index.py`: components by kind and name, out of `importlib.metadata`; nothing is imported until one is chosen
- `loading.py`: imports the chosen one, an entry point's or that of `./file.py:Name`
- `hookspecs.py`, `manager.py`: pluggy hooks, loaded one by one; what fails is named and stops nothing else
- `signature.py`, `vocabulary.py`: "settings are the keyword-only parameters", "a component receives what it names"
- `checks.py`: a component's own check of its settings
- `protocols.py`: typed Protocols for editors and type checkers

This face is lazy (PEP 562): importing it imports none of the rooms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face

if TYPE_CHECKING:
    from rollouts.config.settings import REQUIRED as REQUIRED
    from rollouts.config.settings import Setting as Setting
    from rollouts.plugins.hookspecs import hookimpl as hookimpl
    from rollouts.plugins.hookspecs import hookspec as hookspec
    from rollouts.plugins.index import KINDS as KINDS
    from rollouts.plugins.index import ComponentRef as ComponentRef
    from rollouts.plugins.index import find_component as find_component
    from rollouts.plugins.index import installed_components as installed_components
    from rollouts.plugins.loading import load_component as load_component
    from rollouts.plugins.manager import PluginFault as PluginFault
    from rollouts.plugins.manager import PluginManager as PluginManager
    from rollouts.plugins.signature import Signature as Signature
    from rollouts.plugins.signature import call_with as call_with
    from rollouts.plugins.signature import check_signature as check_signature
    from rollouts.plugins.signature import read_signature as read_signature
    from rollouts.plugins.vocabulary import VOCABULARY as VOCABULARY

__getattr__, __dir__ = lazy_face(__name__)
