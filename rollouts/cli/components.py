"""What a component that was named can be told: it is found, imported and its signature read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.config.convert import complete_settings, convert_settings
from rollouts.config.resolving import Resolved, settings_path
from rollouts.config.settings import COMPONENT_KINDS

if TYPE_CHECKING:
    from rollouts.config.flags import Tree
    from rollouts.plugins.signature import Setting

__all__ = ["explain_components"]


def explain_components(resolved: Resolved, given: Tree) -> tuple[Resolved, dict[tuple[str, ...], tuple[Setting, ...]]]:
    """Fill in the settings of the components that were given, and say what their settings are, by path.

    Those that are only defaults are not imported. A setting that has no default may be missing here.
    """
    from rollouts.plugins.index import KIND_WORDS
    from rollouts.plugins.manager import PluginManager
    from rollouts.plugins.signature import REQUIRED, Signature, check_signature

    manager = PluginManager()
    signatures: dict[tuple[str, ...], tuple[Setting, ...]] = {}
    components = {key: list(chosen) for key, chosen in resolved.components.items()}
    for key, kind in COMPONENT_KINDS.items():
        for index, component in enumerate(components[key] if key in given else ()):
            # The environment's own rewards, and an algorithm's own advantage, have no entry point.
            if not component.name or (key == "reward" and component.name == "env"):
                continue
            label = f"{KIND_WORDS[kind]} {component.name}"
            signature = check_signature(manager.load(manager.find(kind, component.name)), kind, label)
            path = settings_path(key, component)
            signatures[path] = signature.settings
            fillable = Signature(
                signature.requests,
                tuple(s for s in signature.settings if s.default is not REQUIRED or s.name in component.settings),
            )
            converted = convert_settings(fillable, component.settings, label, resolved.source, path)
            components[key][index] = component._replace(settings=complete_settings(fillable, converted))
    return resolved._replace(components=components), signatures
