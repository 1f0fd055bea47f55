"""What a component that was named can be told: it is found, imported and its signature read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.config.convert import complete_settings, convert_settings
from rollouts.config.merging import settings_path
from rollouts.config.resolving import Resolved
from rollouts.config.settings import AUTO, COMPONENT_KINDS, OWN

if TYPE_CHECKING:
    from rollouts.config.flags import Tree
    from rollouts.plugins.manager import PluginManager
    from rollouts.plugins.signature import Setting, Signature

__all__ = ["explain_components"]

_WORDS = {"reward": "env", "correction": AUTO, "shaping": OWN, "filter": OWN}
"""Names that are no components: the environment's or the algorithm's own have no entry point."""


def explain_components(resolved: Resolved, given: Tree) -> tuple[Resolved, dict[tuple[str, ...], tuple[Setting, ...]]]:
    """Fill in the settings of the components that were given, and say what their settings are, by path.

    Those that are only defaults are not imported. A setting that has no default may be missing here.
    """
    from rollouts.plugins.index import KIND_WORDS
    from rollouts.plugins.manager import PluginManager
    from rollouts.plugins.signature import REQUIRED, Signature

    manager = PluginManager()
    signatures: dict[tuple[str, ...], tuple[Setting, ...]] = {}
    components = {key: list(chosen) for key, chosen in resolved.components.items()}
    for key, kind in COMPONENT_KINDS.items():
        for index, component in enumerate(components[key] if key in given else ()):
            if not component.name or component.name == _WORDS.get(key):
                continue
            label = f"{KIND_WORDS[kind]} {component.name}"
            signature = _signature(manager, kind, component.name, label)
            path = settings_path(key, component)
            signatures[path] = signature.settings
            fillable = Signature(
                signature.requests,
                tuple(s for s in signature.settings if s.default is not REQUIRED or s.name in component.settings),
            )
            converted = convert_settings(fillable, component.settings, label, resolved.source, path)
            components[key][index] = component._replace(settings=complete_settings(fillable, converted))
    return resolved._replace(components=components), signatures


def _signature(manager: PluginManager, kind: str, name: str, label: str) -> Signature:
    """All that the component can be told. Imported late: a file of defaults needs no component."""
    from rollouts.compose.choosing import signed

    return signed(manager.load(manager.find(kind, name)), kind, label)[1]
