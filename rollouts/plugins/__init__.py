"""Plugins: finding components, loading them, and reading their inputs and settings.

- `index.py`: finds components by kind and name in the metadata of installed packages, without importing them
- `loading.py`: imports a component from its entry point or from `./file.py:Name`; the version of the contract that a
  package states
- `hookspecs.py`, `manager.py`: hooks (pluggy), for components that have no entry point and for events of a run
- `families.py`: the hooks of a package that offers environments whose names are not fixed
- `signature.py`, `vocabulary.py`: the inputs and the settings of a component
- `checks.py`: a component's own check of its settings
- `protocols.py`: typed Protocols for editors and type checkers

Importing this package imports none of its modules (PEP 562).
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
