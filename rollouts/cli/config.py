"""`rollouts config [FILE]`: print a whole settings file, with comments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from rollouts.cli.options import SettingsCommand, read_settings
from rollouts.config.settings import AUTO, COMPONENT_KINDS, OWN

if TYPE_CHECKING:
    from rollouts.config.flags import Tree
    from rollouts.config.resolving import Resolved
    from rollouts.config.settings import Setting

_WORDS = {"reward": "env", "correction": AUTO, "tool_parser": AUTO, "shaping": OWN, "filter": OWN}
"""Names that are not components, because the environment's or the algorithm's own parts have no entry point."""


def _config(file: str | None, **options: Any) -> int:
    """Print a complete settings file. Comments explain each setting and give its default.

    The settings of components that you name, here or in FILE, are included.

    \b
    Example:
      rollouts config --env calculator --loss grpo > my.toml
    """
    from rollouts.config.render import to_toml

    resolved, given = read_settings(click.get_current_context(), file, options)
    resolved, signatures = _explain_components(resolved, given)
    click.echo(to_toml(resolved.without_secrets(), commented=True, signatures=signatures), nl=False)
    return 0


def _explain_components(resolved: Resolved, given: Tree) -> tuple[Resolved, dict[tuple[str, ...], tuple[Setting, ...]]]:
    """Fill in the settings of the given components. Also returns the descriptions of their settings, by path.

    Default components are not imported. A setting without a default may be missing here.
    """
    from rollouts.config.merging import settings_path
    from rollouts.config.settings import REQUIRED
    from rollouts.plugins.manager import PluginManager
    from rollouts.plugins.signature import Signature, complete_settings, convert_settings

    manager = PluginManager(resolved.source.objects.components)
    signatures: dict[tuple[str, ...], tuple[Setting, ...]] = {}
    components = {key: list(chosen) for key, chosen in resolved.components.items()}
    for key in COMPONENT_KINDS:
        for index, component in enumerate(components[key] if key in given else ()):
            if not component.name or component.name == _WORDS.get(key):
                continue
            # imported here, because a file of defaults needs no component
            from rollouts.runs.components import read_component

            path = settings_path(key, component)
            _, signature, _, label = read_component(manager, key, component, None, resolved.source, path)
            signatures[path] = signature.settings
            fillable = Signature(
                signature.requests,
                tuple(s for s in signature.settings if s.default is not REQUIRED or s.name in component.settings),
            )
            converted = convert_settings(fillable, component.settings, label, resolved.source, path)
            components[key][index] = component._replace(settings=complete_settings(fillable, converted))
    return resolved._replace(components=components), signatures


config = SettingsCommand("config", callback=_config)
