"""`rollouts plugins list | show NAME | doctor`: what is installed, what it does, what it takes.

`list` imports no plugin: it reads the description of a component from the source of its module.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from rollouts.author_code import unwrapped
from rollouts.cli.app import NamedGroup
from rollouts.config.settings import COMPONENT_KINDS, MULTIPLE, REQUIRED
from rollouts.errors import counted
from rollouts.terminal_text import aligned, aligned_table
from rollouts_check.descriptions import description, find_definition, first_sentence, known_faults

if TYPE_CHECKING:
    from rollouts.plugins.signature import Signature
    from rollouts.training.algorithms.algorithm import Algorithm

_LEGEND = (
    "(pi is the policy, r = pi / pi_old its ratio, A the advantage, R the reward; [T] is one value for each token)"
)


@click.group("plugins", cls=NamedGroup, no_args_is_help=True)
def plugins() -> None:
    """List, show and check installed plugins."""


@plugins.command("list")
@click.option("--kind", metavar="KIND", help="Only components of this kind: environments, rewards, losses, ...")
@click.option("--all", "with_hooks", is_flag=True, help="Also load the hook plugins, and list what they offer.")
def _list(kind: str | None, with_hooks: bool) -> int:
    """List the installed components, without importing them.

    The description of a component is the first sentence of its docstring. In a terminal it is cut to the width.
    """
    from rollouts.plugins.manager import PluginManager

    manager = PluginManager()
    refs = manager.list(kind, hooks=with_hooks)
    if not refs:
        click.echo(f"no component is installed{f' of the kind {kind}' if kind else ''}")
    else:
        faults = [f"broken: {fault}" if fault else "" for fault in known_faults(refs)]
        about = [fault or description(ref) for ref, fault in zip(refs, faults, strict=True)]
        rows = [
            (ref.kind, ref.name, ref.distribution, ref.version, text) for ref, text in zip(refs, about, strict=True)
        ]
        click.echo(aligned_table(("kind", "name", "distribution", "version", "description"), rows))
        click.echo("nothing was imported; to check all, type: rollouts plugins doctor")
    for fault in manager.faults:
        click.echo(f"fault: {fault}", err=True)
    return 0


@plugins.command("show")
@click.argument("name")
@click.option("--kind", metavar="KIND", help="The kind, if components of several kinds have this name.")
def _show(name: str, kind: str | None) -> int:
    """Import one component. Show what it does, what it receives, its settings, and where its code is.

    For an algorithm, also show its formula and parts; for an environment, its tools, rewards and metrics.
    """
    from rollouts.plugins.index import KIND_WORDS
    from rollouts.plugins.loading import stated_version
    from rollouts.plugins.manager import PluginManager
    from rollouts.runs.components import signed
    from rollouts.training.algorithms.algorithm import Algorithm
    from rollouts_check.any_kind import find_of_any_kind

    manager = PluginManager()
    ref = find_of_any_kind(manager, kind, name, "rollouts plugins show")
    component = manager.load(ref)
    place = find_definition(ref)
    label = f"{KIND_WORDS[ref.kind]} {ref.name}"
    facts = {
        "distribution": f"{ref.distribution} {ref.version}    (also: {ref.qualified})" if ref.distribution else "",
        "contract": (stated_version(ref.distribution) or "") if ref.distribution else "",
        "object": ref.value,
        "code": f"{place.file}, line {place.line}" if place else "",
    }
    is_code = inspect.isclass(component) or inspect.isroutine(component)
    doc = inspect.getdoc(component) if is_code else component.__doc__
    if not is_code and doc == type(component).__doc__:  # a value: its documentation follows its assignment
        doc = place.doc if place else ""
    lines = [label, *aligned([(word, fact) for word, fact in facts.items() if fact], "  ")]
    lines += ["", *(f"  {line}".rstrip() for line in inspect.cleandoc(doc).splitlines() if line != "\b")] if doc else []
    lines += _algorithm_lines(component) if isinstance(component, Algorithm) else []
    lines += _environment_lines(component) if ref.kind == "environments" else []
    if ref.kind != "commands":
        lines += _signature_lines(ref.kind, name, signed(component, ref.kind, label)[1])
    click.echo("\n".join(lines))
    return 0


@plugins.command("doctor")
def _doctor() -> int:
    """Import all installed components and report problems. The exit code is 1 if there are problems.

    Environments whose packages clash are problems too. Not a problem, but listed: a component that needs an extra that
    is not installed, and a clash of an environment that has a virtual environment of its own.
    """
    from rollouts.plugins.manager import PluginManager
    from rollouts_check.clashes import find_clashes

    manager = PluginManager()
    faults, lacking = manager.doctor()
    clashes = find_clashes()
    faults += clashes.faults
    for line in (*faults, *clashes.remarks):
        click.echo(line)
    for (package, hint), names in lacking.items():
        click.echo(f"{package} is not installed; only these need it: {', '.join(names)}\n{hint}")
    refs = manager.list()
    distributions = {ref.distribution for ref in refs}
    verdict = counted(len(faults), "fault") if faults else "all well"
    click.echo(f"{counted(len(refs), 'component')} of {counted(len(distributions), 'distribution')}: {verdict}")
    return 1 if faults else 0


def _algorithm_lines(algorithm: Algorithm) -> list[str]:
    """The formula of an algorithm, and what each of its parts is: the first sentence of the part's docstring."""
    from rollouts.runs.dry_run import objective_words
    from rollouts.training.algorithms.aggregation import aggregation_function
    from rollouts.training.algorithms.algorithm import KL, function_label

    kl = algorithm.kl.function if isinstance(algorithm.kl, KL) else None
    parts = [
        *(("term", term.function, f" * {term.coefficient:g}") for term in algorithm.terms),
        ("advantage", None if algorithm.pairs else algorithm.advantage, ""),  # with pairs, there is no advantage
        ("aggregation", aggregation_function(algorithm.aggregation), ""),
        ("kl", kl, ""),
        ("correction", algorithm.correction, ""),
        ("mix", algorithm.mix, ""),
        *(("shaping", function, "") for function in algorithm.shaping),
        ("select", algorithm.select, ""),
        ("pairs", algorithm.pairs, ""),
        *(("filter", function, "") for function in algorithm.filters),
    ]
    found = [(word, function, factor) for word, function, factor in parts if function is not None]
    rows = [(word, function_label(function) + factor, _sentence(function)) for word, function, factor in found]
    return ["", "formula", f"  {objective_words(algorithm)}", f"  {_LEGEND}", *_section("parts", rows)]


def _environment_lines(environment: Any) -> list[str]:
    """The roles of an environment, its tools with their arguments (optional ones in brackets), its rewards and its
    metrics.
    """
    from rollouts.env.authoring import metrics_of, rewards_of, roles_of, tools_of
    from rollouts.env.schema import schema_of, tool_label

    tools = [(tool_label(schema_of(tool)), tool.role, tool.function) for tool in tools_of(environment)]
    if (chooses := getattr(environment, "tools", None)) is not None:
        tools.append(("tools(task): the tools of each task", None, chooses))
    rewards = [
        (each.name if each.weight == 1 else f"{each.name} × {each.weight:g}", each.role, each.function)
        for each in rewards_of(environment)
    ]
    metrics = [(each.name, each.role, each.function) for each in metrics_of(environment)]
    lines = _section("roles", [(role.name, role.system.partition("\n")[0]) for role in roles_of(environment)])
    for title, found in (("tools", tools), ("rewards", rewards), ("metrics", metrics)):
        rows = [(f"{label} ({role})" if role else label, _sentence(function)) for label, role, function in found]
        lines += _section(title, rows)
    return lines


def _sentence(function: Any) -> str:
    return first_sentence(inspect.getdoc(unwrapped(function)) or "")


def _signature_lines(kind: str, name: str, signature: Signature) -> list[str]:
    from rollouts.config.convert import default_text, describe_type, toml_value
    from rollouts.config.flags import flag_name
    from rollouts.plugins.vocabulary import VOCABULARY

    words = VOCABULARY.get(kind, {})
    lines = _section("receives", [(name, words.get(name, "")) for name in signature.requests])
    key = next((key for key, each in COMPONENT_KINDS.items() if each == kind), None)
    prefix = () if key is None else (key, "ALIAS") if key in MULTIPLE else (key,)
    names = [flag_name((*prefix, each.name)) if prefix else each.name for each in signature.settings]
    facts = [(describe_type(each.type), default_text(each), each.doc) for each in signature.settings]
    rows = [(name, *fact) for name, fact in zip(names, facts, strict=True)]
    lines += _section("settings", rows) or ["", "settings", "  none"]
    if rows and "ALIAS" in prefix:
        alias, setting = re.split("[:/]", name)[-1], signature.settings[0]
        value = "VALUE" if setting.default in (REQUIRED, None) else toml_value(setting.default)
        own, mine = (f"{flag_name((str(key), each, setting.name))} {value}" for each in (alias, "mine"))
        lines.append(f"  ALIAS is its name, {alias}: --{key} {name} {own}")
        lines.append(f"  or a name that you choose: --{key} mine={name} {mine}")
    return lines


def _section(title: str, rows: Sequence[Sequence[str]]) -> list[str]:
    return ["", title, *aligned(rows, "  ")] if rows else []
