"""Flags for all core settings, and the step from flags, a file and defaults to one Resolved.

click handles text only. `rollouts.config` reads the values and writes the errors, so a mistake has the same message on
the command line and in a file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from rollouts.cli.app import NamedCommand
from rollouts.config.settings import COMPONENT_KINDS, FILE_ONLY, REPEATED, Setting, setting_infos
from rollouts.errors import ConfigError

if TYPE_CHECKING:
    from rollouts.config.flags import Tree
    from rollouts.config.resolving import Resolved

DOTTED_FLAGS = """\
A component's own settings are dotted flags, anywhere on the line: --env.digits 3 --loss.clip-high 0.28. Where several
can be chosen, the alias comes between: --reward short=pkg/brevity:-0.1 --reward.short.target-tokens 50. A value is read
as in TOML (3, 0.5, true, [1, 2]), else as text; `none` is None. `rollouts plugins show NAME` lists a component's
settings, `rollouts config` the whole file. Flags come before the file, the file before the defaults."""

DISPLAY = click.Option(
    ["--display"],
    type=click.Choice(["auto", "live", "lines", "none"]),
    default="auto",
    help="What to show while it runs: a live view, plain lines, or nothing but errors. `auto`: the live view in a "
    "terminal, else lines.  [default: auto]",
)
"""The option of commands that show a run. It is no setting: the run does not depend on it."""

_METAVARS = {bool: "true|false", int: "N", float: "X", str: "TEXT"}


class SettingsCommand(NamedCommand):
    """A command with a file (or another `argument`), settings (those of `infos`, or all), and its `own` parameters. Its
    help shows settings by group, each with its default.
    """

    def __init__(
        self,
        name: str,
        *,
        infos: Iterable[Setting] | None = None,
        own: Sequence[click.Parameter] = (),
        argument: click.Argument | None = None,
        repeated: Collection[str] = (),
        **given: Any,
    ) -> None:
        self.infos = tuple(setting_infos() if infos is None else infos)
        argument = argument or click.Argument(["file"], required=False, metavar="[FILE]")
        repeated = (*REPEATED, *repeated)
        options = (_option(info, info.name in repeated) for info in self.infos if info.name != "template")
        super().__init__(name, params=[argument, *options, *own], epilog=DOTTED_FLAGS, **given)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the settings by group, then the other options of the command."""
        options = [parameter for parameter in self.get_params(ctx) if isinstance(parameter, click.Option)]
        records = {option.name: record for option in options if (record := option.get_help_record(ctx))}
        groups: dict[str, list[tuple[str, str]]] = {}
        for info in self.infos:
            record = records.pop(info.name, None) or (FILE_ONLY[info.name], _help(info))
            groups.setdefault(info.group, []).append(record)
        for group, rows in (groups | {"Options": list(records.values())}).items():
            with formatter.section(group):
                formatter.write_dl(rows)


def chosen_infos(
    names: Collection[str], docs: Mapping[str, str] = MappingProxyType({}), shown: str = ""
) -> list[Setting]:
    """These settings for a command, with its own help for some of them. `shown` is their default in the help."""
    infos = (info._replace(doc=docs.get(info.name, info.doc)) for info in setting_infos() if info.name in names)
    return [info._replace(shown=shown) if shown else info for info in infos]


def _option(info: Setting, is_repeated: bool) -> click.Option:
    """A setting as an option. A setting that only a file can have is a hidden option; using it is an error that says
    what to write in the file.
    """
    is_data = info.name == "data"
    return click.Option(
        [info.flag, info.name],
        metavar=_metavar(info),
        hidden=info.name in FILE_ONLY,
        help=_help(info),
        multiple=is_repeated or is_data,
        callback=_only_one if is_data else None,
    )


def _only_one(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> str | None:
    """The value of `--data`. Of other flags the last value counts, but here it would drop rows in silence."""
    if len(values) > 1:
        raise ConfigError(
            f"--data is given {len(values)} times: {', '.join(values)}\n"
            "to mix files, type: --env a=prompts:2 --env.a.data FILE --env b=prompts:1 --env.b.data FILE"
        )
    return values[0] if values else None


def _help(info: Setting) -> str:
    return f"{info.doc}  [default: {info.default_text}]"


def _metavar(info: Setting) -> str:
    named = "KIND" if info.name == "worker" else "NAME" if info.name in COMPONENT_KINDS else ""
    by_type = "X" if info.default is None else _METAVARS.get(type(info.default), "VALUE")
    return "|".join(info.choices) or named or by_type


def read_settings(
    ctx: click.Context, file: str | None, options: dict[str, Any], forced: Tree | None = None
) -> tuple[Resolved, Tree]:
    """Resolve flags, file and defaults, in this order of precedence. Returns also the tree of the given settings.

    `forced` are settings that the command sets itself. Raises ConfigError.
    """
    from rollouts.config.files import NOWHERE, load_file
    from rollouts.config.resolving import merge_over_file, resolve

    flags = given_flags(options)
    tree, source = load_file(file) if file else ({}, NOWHERE)
    given = merge_over_file(tree, flags, ctx.obj or {}, forced or {}, source=source)
    return resolve(given, source), given


def given_flags(options: dict[str, Any]) -> Tree:
    """The given options as a tree of flags. Raises ConfigError for an option without a value, or with a value that is
    not a rule.
    """
    from rollouts.config.flags import flag_name, read_flag
    from rollouts.config.stopping import read_rule

    tree: Tree = {}
    for name, value in options.items():
        if value is None or value == ():
            continue
        for text in value if isinstance(value, tuple) else (value,):
            if text.startswith("--"):
                flag = flag_name((name,))
                raise ConfigError(f"{flag} needs a value, and {text} follows it\ntype: {flag} VALUE")
            if name == "stop_when" and text.lower() != "none":
                read_rule(text)  # before FILE is read: without quotes, the shell reads `> 0.9` as a redirection
        tree[name] = [read_flag(text) for text in value] if isinstance(value, tuple) else read_flag(value)
    return tree


def given_settings(options: dict[str, Any]) -> Tree:
    """The given options of the current command and its dotted flags. Raises ConfigError as `given_flags`."""
    from rollouts.config.merging import merge

    return merge(given_flags(options), click.get_current_context().obj or {})
