"""Every core setting as a flag, and the way from flags, a file and defaults to one Resolved.

click sees text only: what a value means, and every message about it, is the business of rollouts.config, so that a
mistake reads the same whether it was typed or written in a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from rollouts.config.settings import COMPONENT_KINDS, FILE_ONLY, REPEATED, SettingInfo, setting_infos
from rollouts.errors import ConfigError

if TYPE_CHECKING:
    from rollouts.config.flags import Tree
    from rollouts.config.resolving import Resolved

__all__ = ["SettingsCommand", "read_settings", "setting_options"]

DOTTED_FLAGS = """\
A component's own settings are dotted flags, anywhere on the line: --env.digits 3 --loss.clip-high 0.28. Where several
can be chosen, the alias comes between: --reward short=pkg/brevity:-0.1 --reward.short.target-tokens 50. A value is read
as in TOML (3, 0.5, true, [1, 2]), else as text; `none` is None. `rollouts plugins show NAME` lists a component's
settings, `rollouts config` the whole file. Flags come before the file, the file before the defaults."""

_METAVARS = {bool: "true|false", int: "N", float: "X", str: "TEXT"}


class SettingsCommand(click.Command):
    """A command that takes settings: its help shows them by group, each with its default. `infos` are those that it
    takes, where they are not all.
    """

    def __init__(self, name: str, *, infos: Sequence[SettingInfo] | None = None, **given: Any) -> None:
        super().__init__(name, **given)
        self.infos = tuple(infos) if infos is not None else setting_infos()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's; a missing value is told with this command's name."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options that are settings by their groups, then the command's own."""
        options = [parameter for parameter in self.get_params(ctx) if isinstance(parameter, click.Option)]
        records = {option.name: option.get_help_record(ctx) for option in options}
        infos = [info for info in self.infos if records.get(info.name) or info.name in FILE_ONLY]
        for group in dict.fromkeys(info.group for info in infos):
            rows = []
            for info in infos:
                if info.group == group:
                    record = records.pop(info.name, None)
                    rows.append(record or (FILE_ONLY[info.name], f"{info.doc}  [default: {info.default_text}]"))
            with formatter.section(group):
                formatter.write_dl(rows)
        own = [record for record in records.values() if record]
        with formatter.section("Options"):
            formatter.write_dl(own)


def setting_options(leave_out: Iterable[str] = (), infos: Iterable[SettingInfo] | None = None) -> list[click.Parameter]:
    """An argument for the file and an option for every core setting (or those of `infos`) but those of FILE_ONLY.

    `--schedule` is hidden: whoever types it is told what to write in the file.
    """
    options: list[click.Parameter] = [click.Argument(["file"], required=False, metavar="[FILE]")]
    for info in setting_infos() if infos is None else infos:
        if info.name == "template" or info.name in leave_out:
            continue
        options.append(
            click.Option(
                [info.flag, info.name],
                multiple=info.name in REPEATED,
                metavar=_metavar(info),
                hidden=info.name in FILE_ONLY,
                help=f"{info.doc}  [default: {info.default_text}]",
            )
        )
    return options


def _metavar(info: SettingInfo) -> str:
    if info.choices:
        return "|".join(info.choices)
    if info.name in COMPONENT_KINDS:
        return "NAME"
    return "X" if info.default is None else _METAVARS.get(type(info.default), "VALUE")


def read_settings(
    ctx: click.Context, file: str | None, options: dict[str, Any], forced: Tree | None = None
) -> tuple[Resolved, Tree]:
    """Resolve the flags over the file over the defaults; returns also the tree of what was given.

    `forced` is what the command itself decides. Raises ConfigError.
    """
    from rollouts.config.files import NOWHERE, load_file
    from rollouts.config.merging import merge
    from rollouts.config.resolving import resolve

    flags = _flags(options)
    tree, source = load_file(file) if file else ({}, NOWHERE)
    given = merge(tree, flags, ctx.obj or {}, forced or {})
    return resolve(given, source), given


def _flags(options: dict[str, Any]) -> Tree:
    """The options that were given, as flags of a tree."""
    from rollouts.config.flags import flag_name, read_flag

    tree: Tree = {}
    for name, value in options.items():
        if value is None or value == ():
            continue
        for text in value if isinstance(value, tuple) else (value,):
            if text.startswith("--"):
                flag = flag_name((name,))
                raise ConfigError(f"{flag} needs a value, and {text} follows it\ntype: {flag} VALUE")
        tree[name] = [read_flag(text) for text in value] if isinstance(value, tuple) else read_flag(value)
    return tree
