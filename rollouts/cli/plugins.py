"""`rollouts plugins list | show NAME | doctor`: what is installed, what it can be told, what is wrong with it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from rollouts.cli.app import NamedGroup
from rollouts.config.settings import COMPONENT_KINDS, MULTIPLE
from rollouts.errors import UnknownComponentError, UserError, near_misses

if TYPE_CHECKING:
    from rollouts.plugins.index import ComponentRef
    from rollouts.plugins.manager import PluginManager
    from rollouts.plugins.signature import Signature


@click.group("plugins", cls=NamedGroup, no_args_is_help=True)
def plugins() -> None:
    """List, show and check installed plugins."""


@plugins.command("list")
@click.option("--kind", metavar="KIND", help="Only components of this kind: environments, rewards, losses, ...")
@click.option("--all", "with_hooks", is_flag=True, help="Also load the hook plugins, and list what they offer.")
def list_(kind: str | None, with_hooks: bool) -> int:
    """List the installed components, without importing them."""
    from rollouts.plugins.manager import PluginManager

    manager = PluginManager()
    refs = manager.list(kind, hooks=with_hooks)
    if not refs:
        click.echo(f"no component is installed{f' of the kind {kind}' if kind else ''}")
    else:
        rows = [(ref.kind, ref.name, ref.distribution, ref.version) for ref in refs]
        click.echo(_table(("kind", "name", "distribution", "version"), rows))
    for fault in manager.faults:
        click.echo(f"fault: {fault}", err=True)
    return 0


@plugins.command()
@click.argument("name")
@click.option("--kind", metavar="KIND", help="The kind, if components of several kinds have this name.")
def show(name: str, kind: str | None) -> int:
    """Import one component, and show what it receives and its settings."""
    from rollouts.plugins.index import KIND_WORDS
    from rollouts.plugins.manager import PluginManager
    from rollouts.runs.components import signed

    manager = PluginManager()
    ref = _find(manager, kind, name)
    component = manager.load(ref)
    label = f"{KIND_WORDS[ref.kind]} {ref.name}"
    lines = [label]
    if ref.distribution:
        lines.append(f"  distribution  {ref.distribution} {ref.version}    (also: {ref.qualified})")
    if ref.value:
        lines.append(f"  object        {ref.value}")
    own = inspect.getdoc(component) if inspect.isclass(component) or inspect.isroutine(component) else component.__doc__
    if own and own != type(component).__doc__:
        lines += ["", *(f"  {line}".rstrip() for line in inspect.cleandoc(own).splitlines())]
    if ref.kind != "commands":
        lines += _signature_lines(ref.kind, signed(component, ref.kind, label)[1])
    click.echo("\n".join(lines))
    return 0


@plugins.command()
def doctor() -> int:
    """Import all installed components and report problems. The exit code is 1 if there are any."""
    from rollouts.plugins.manager import PluginManager

    manager = PluginManager()
    faults = manager.doctor()
    for fault in faults:
        click.echo(fault)
    refs = manager.list()
    distributions = {ref.distribution for ref in refs}
    verdict = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}" if faults else "all well"
    click.echo(f"{len(refs)} components of {len(distributions)} distributions: {verdict}")
    return 1 if faults else 0


def _find(manager: PluginManager, kind: str | None, name: str) -> ComponentRef:
    """The one component of that name, of any kind if none is given."""
    from rollouts.plugins.index import KINDS, names_file

    if kind is not None:
        return manager.find(COMPONENT_KINDS.get(kind, kind), name)  # `reward` means `rewards`
    if names_file(name):
        kinds = ", ".join(KINDS)
        raise UserError(f"{name}: a file does not say what kind of component it holds\ntype: --kind KIND ({kinds})")
    found: list[ComponentRef] = []
    for each in KINDS:
        try:
            found.append(manager.find(each, name))
        except UnknownComponentError:
            continue
    if len(found) > 1:
        typed = "\n".join(f"  rollouts plugins show {name} --kind {ref.kind}" for ref in found)
        raise UserError(f"{name} is the name of several components\ntype one of:\n{typed}")
    if not found:
        known = [ref.name for ref in manager.list(hooks=True)]
        near = near_misses(name.rpartition("/")[2], known)
        hint = f"did you mean: {', '.join(near)}?\n" if near else ""
        raise UnknownComponentError(f"no component of any kind is named {name!r}\n{hint}type: rollouts plugins list")
    return found[0]


def _signature_lines(kind: str, signature: Signature) -> list[str]:
    from rollouts.config.convert import default_text, describe_type
    from rollouts.config.flags import flag_name
    from rollouts.plugins.vocabulary import VOCABULARY

    lines: list[str] = []
    if signature.requests:
        words = VOCABULARY.get(kind, {})
        lines += ["", "receives", *_indent([(name, words.get(name, "")) for name in signature.requests])]
    key = next((key for key, each in COMPONENT_KINDS.items() if each == kind), None)
    prefix = () if key is None else (key, "ALIAS") if key in MULTIPLE else (key,)
    rows = [
        (
            flag_name((*prefix, setting.name)) if prefix else setting.name,
            describe_type(setting.type),
            default_text(setting),
            setting.doc,
        )
        for setting in signature.settings
    ]
    return [*lines, "", "settings", *(_indent(rows) if rows else ["  none"])]


def _indent(rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"  {line}" for line in _align(rows)]


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(_align([head, ["-" * len(word) for word in head], *rows]))
