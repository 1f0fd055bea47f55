"""The group of commands: each imported only when it is called, each mistake told in one message.

Installed packages add commands through the entry-point group `rollouts.commands`; they are looked up when a command is
not one of the core's, and are therefore listed by `rollouts plugins list`, not by `--help`.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from rollouts.author_code import message_of
from rollouts.cli.ending import interrupted_by_signals, silent_when_closed
from rollouts.errors import RolloutsError, UserError, near_misses

__all__ = ["COMMANDS", "NamedGroup", "RolloutsGroup", "app", "run_app"]

COMMANDS = {
    "run": ("rollouts.cli.run:run", "Train a model by reinforcement in an environment."),
    "sft": ("rollouts.cli.sft:sft", "Train a model on demonstrations."),
    "eval": ("rollouts.cli.eval:evaluate", "Evaluate a model in an environment."),
    "resume": ("rollouts.cli.resume:resume", "Go on with a run, or make it longer."),
    "export": ("rollouts.cli.export:export", "Write a run's model as a folder that others load."),
    "config": ("rollouts.cli.config:config", "Print a whole settings file, with comments."),
    "plugins": ("rollouts.cli.plugins:plugins", "List, show and examine what is installed."),
}
"""The core's commands: where each is, and its line in the help (which imports none of them)."""

INTERRUPTED = 130
"""The exit code after Ctrl-C, 128 + SIGINT, as in a shell."""

TAKES_SETTINGS = ("run", "sft", "eval", "config", "resume")
"""The commands that take dotted flags. A plugin's command gets them in `ctx.obj` and judges for itself."""


class NamedGroup(click.Group):
    """A group that answers a command it does not have with near misses and the list of those it has."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, with our words for a command that does not exist."""
        name, path, known = args[0], ctx.command_path, self.list_commands(ctx)
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            near = near_misses(name, known)
            hint = "did you mean: " + ", ".join(f"{path} {each}" for each in near) + "?\n" if near else ""
            if name.endswith((".toml", ".json", ".py")):
                hint = f"to run a settings file, type: rollouts run {name}\n"
            raise UserError(f"`{path}` has no command {name!r}\n{hint}commands: {', '.join(known)}")
        return super().resolve_command(ctx, args)


class RolloutsGroup(NamedGroup):
    """Commands by name, imported on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The core's commands in the order in which one meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module; a name that is not the core's is looked up among the installed packages."""
        if cmd_name in COMMANDS:
            module, _, attribute = COMMANDS[cmd_name][0].partition(":")
            command = getattr(importlib.import_module(module), attribute)
            assert isinstance(command, click.Command), f"{cmd_name} is a {type(command).__name__}"
            return command
        from rollouts.plugins.index import installed_components

        if not any(ref.name == cmd_name for ref in installed_components("commands")):
            return None
        from rollouts.plugins.index import find_component, load_component

        ref = find_component("commands", cmd_name)
        command = load_component(ref)
        if not isinstance(command, click.Command):
            raise UserError(f"{ref.qualified}: a command must be a click.Command; it is a {type(command).__name__}")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As above; a command that takes no settings refuses dotted flags."""
        name = args[0]
        if ctx.obj and name in COMMANDS and name not in TAKES_SETTINGS:
            raise UserError(f"`rollouts {name}` takes no settings, and dotted flags are settings: {', '.join(ctx.obj)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


def _show_version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from rollouts import __version__

        click.echo(f"rollouts {__version__}")
        ctx.exit()


app = RolloutsGroup(
    "rollouts",
    help="Train language-model agents in environments that are plugins.\n\n"
    "Begin with: rollouts run --env calculator --loss grpo",
    epilog="`rollouts COMMAND --help` says more. Exit codes: 0 done, 2 a mistake in what was typed or written, "
    "1 the run failed, 130 interrupted (143 by SIGTERM, 129 by SIGHUP).",
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            expose_value=False,
            is_eager=True,
            callback=_show_version,
            help="Show the version and exit.",
        )
    ],
    no_args_is_help=True,
    context_settings={"token_normalize_func": lambda token: token.replace("_", "-"), "max_content_width": 120},
)


def run_app(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. An error that is neither a mistake nor a failed run is raised."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    with silent_when_closed("stderr"), interrupted_by_signals() as signals:
        try:
            return _invoke(arguments)
        except (Exception, KeyboardInterrupt, BaseExceptionGroup) as error:
            known = _known_error(error)
            if known is None:
                raise
            if os.environ.get("ROLLOUTS_TRACEBACK") == "1":
                import traceback

                traceback.print_exception(error)
            code = _report(known)
            return 128 + signals[0] if signals and code == INTERRUPTED else code


def _invoke(arguments: list[str]) -> int:
    dotted: dict[str, Any] = {}
    if any(argument.startswith("--") and "." in argument.partition("=")[0] for argument in arguments):
        from rollouts.config.flags import take_dotted_flags

        arguments, dotted = take_dotted_flags(arguments)
    with app.make_context("rollouts", arguments, obj=dotted) as context:
        result = app.invoke(context)
    if sys.stdout is not None:  # here, so that a closed pipe is met while it can still be reported
        sys.stdout.flush()
    return result if isinstance(result, int) else 0


_KNOWN = (RolloutsError, click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError, KeyboardInterrupt)


def _known_error(error: BaseException) -> BaseException | None:
    """The error that we can report without a traceback; it may be wrapped in groups by nurseries."""
    if isinstance(error, _KNOWN) or _is_full_output(error):
        return error
    if isinstance(error, BaseExceptionGroup):
        found = [_known_error(inner) for inner in error.exceptions]
        known = [inner for inner in found if inner is not None]
        # Ctrl-C beside anything else is Ctrl-C; an unknown error beside a known one is a bug, and shown.
        interrupts = [inner for inner in known if isinstance(inner, KeyboardInterrupt)]
        if interrupts or len(known) == len(found):
            return (interrupts or known)[0]
    return None


def _is_full_output(error: BaseException) -> bool:
    """Whether standard output could not be written: errors of files have their names."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
    return isinstance(error, OSError) and error.errno in full and error.filename is None


def _report(error: BaseException) -> int:
    """Say what happened on stderr; returns the exit code."""
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, BrokenPipeError):
        # Whoever read our output has left; nothing more may be written to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if _is_full_output(error):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        click.echo(f"error: the output cannot be written: {getattr(error, 'strerror', error)}", err=True)
        return 1
    if isinstance(error, KeyboardInterrupt | click.Abort):
        click.echo(f"\n{str(error) or 'interrupted'}", err=True)
        return INTERRUPTED
    if type(error).__name__ == "NoArgsIsHelpError":  # newer versions of click raise it where older ones print
        click.echo(str(error))
        return 0
    if isinstance(error, RolloutsError):
        click.echo(f"error: {message_of(error)}", err=True)
        return error.exit_code
    assert isinstance(error, click.ClickException), f"{error!r} is not one of {_KNOWN}"
    click.echo(f"error: {_usage_message(error)}", err=True)
    return 2


def _usage_message(error: click.ClickException) -> str:
    """click's errors in our form: what was given, near misses, what to type."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "rollouts"
    if isinstance(error, click.NoSuchOption):
        known = [name for p in context.command.params for name in (*p.opts, *p.secondary_opts)] if context else []
        near = near_misses(error.option_name.replace("_", "-"), [name for name in known if name.startswith("--")])
        message = f"`{command}` has no option {error.option_name}"
        if context and context.info_name == "eval" and _is_of_training(error.option_name):
            near = []
            message += ": an evaluation trains nothing, and this is a setting of training; leave it out"
        if near:
            message += f"\ndid you mean: {', '.join(near)}?"
        if context and context.info_name in TAKES_SETTINGS:
            message += "\na component's settings are dotted: --env.digits 3, --loss.clip-high 0.28"
    else:
        message = error.format_message().rstrip(".")
        message = message[:1].lower() + message[1:]
    return f"{message}\ntype: {command} --help"


def _is_of_training(option: str) -> bool:
    """Whether an option is a setting that no evaluation has."""
    from rollouts.config.settings import EVAL, setting_infos

    return option.lstrip("-").replace("-", "_") in {info.name for info in setting_infos()} - set(EVAL)
