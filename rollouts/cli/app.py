"""The group of commands: each imported only when it is called, each mistake told in one message.

Installed packages add commands through the entry-point group `rollouts.commands`; they are looked up when a command is
not one of the core's, and are therefore listed by `rollouts plugins list`, not by `--help`.
"""

from __future__ import annotations

import errno
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from rollouts.author_code import message_of
from rollouts.cli.ending import interrupted_by_signals, silent_when_closed
from rollouts.errors import RolloutsError, UserError, leaves_of, near_misses
from rollouts.version import __version__

COMMANDS = {
    "run": ("rollouts.cli.run:run", "Train a model by reinforcement in an environment."),
    "sft": ("rollouts.cli.run:sft", "Train a model on the demonstrations of an environment."),
    "eval": ("rollouts.cli.run:evaluate", "Evaluate a model on held-out tasks of an environment."),
    "resume": ("rollouts.cli.run:resume", "Resume a run, or make it longer."),
    "export": ("rollouts.cli.export:export", "Export a run's model for transformers, vLLM and SGLang."),
    "chat": ("rollouts.cli.chat:chat", "Talk to a run's model, with the tools of its environment."),
    "serve": ("rollouts.cli.serve:serve", "Serve a run's model at an address that speaks OpenAI's API."),
    "config": ("rollouts.cli.config:config", "Print a complete settings file."),
    "plugins": ("rollouts.cli.plugins:plugins", "List, show and check installed plugins."),
}
"""The core's commands: where each is, and its line in the help (which imports none of them)."""

INTERRUPTED = 130
"""The exit code after Ctrl-C, 128 + SIGINT, as in a shell."""

SIGNALS = "rollouts.signals"
"""The key in a context's `meta` of the list that holds the signal which ended the command, if one did."""

TAKES_SETTINGS = ("run", "sft", "eval", "config", "resume", "chat", "serve")
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
        from rollouts.plugins.index import find_component
        from rollouts.plugins.loading import load_component

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


app = RolloutsGroup(
    "rollouts",
    help="Train language-model agents in environments that are plugins.\n\n"
    "Start with: rollouts run --env calculator --loss grpo",
    epilog="See `rollouts COMMAND --help`. Exit codes: 0 done, 1 the run failed, 2 a mistake in a command or a file, "
    "130 interrupted (143 by SIGTERM, 129 by SIGHUP).",
    no_args_is_help=True,
    context_settings={
        "token_normalize_func": lambda token: token.replace("_", "-"),
        "max_content_width": 120,
        "help_option_names": ["-h", "--help"],
    },
)
click.version_option(__version__, message="rollouts %(version)s")(app)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command with the given arguments and return its exit code.

    Without arguments it is the process's own command: what a run has excluded from garbage collection stays excluded,
    since to collect it as the process ends takes a second. No traceback is shown for the user's mistakes and for runs
    that failed, unless ROLLOUTS_TRACEBACK=1; an error that is neither is raised.
    """
    arguments, dotted = list(sys.argv[1:] if argv is None else argv), dict[str, Any]()
    with silent_when_closed("stderr"), interrupted_by_signals() as signals:
        try:
            if any(argument.startswith("--") and "." in argument.partition("=")[0] for argument in arguments):
                from rollouts.config.flags import take_dotted_flags

                arguments, dotted = take_dotted_flags(arguments)
            with app.make_context("rollouts", arguments, obj=dotted) as context:
                context.meta[SIGNALS] = signals
                result = app.invoke(context)
            if sys.stdout is not None:  # here, so that a closed pipe is met while it can still be reported
                sys.stdout.flush()
            return result if isinstance(result, int) else 0
        except (Exception, KeyboardInterrupt, BaseExceptionGroup) as error:
            known = _known_error(error)
            if known is None:
                raise
            if os.environ.get("ROLLOUTS_TRACEBACK") == "1":
                import traceback

                traceback.print_exception(error)
            code = _report(known)
            return 128 + signals[0] if signals and code == INTERRUPTED else code
        finally:
            if argv is not None:
                gc.unfreeze()


_KNOWN = (RolloutsError, click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError, KeyboardInterrupt)


def _known_error(error: BaseException) -> BaseException | None:
    """The error that we can report without a traceback; it may be wrapped in groups by nurseries."""
    leaves = list(leaves_of(error))
    # Ctrl-C beside anything else is Ctrl-C; an unknown error beside a known one is a bug, and shown.
    interrupts = [leaf for leaf in leaves if isinstance(leaf, KeyboardInterrupt)]
    if interrupts or all(isinstance(leaf, _KNOWN) or _is_full_output(leaf) for leaf in leaves):
        return (interrupts or leaves)[0]
    return None


def _is_full_output(error: BaseException) -> bool:
    """Whether standard output could not be written: errors of files have their names."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
    return isinstance(error, OSError) and error.errno in full and error.filename is None


def _report(error: BaseException) -> int:
    """Say what happened on stderr; returns the exit code."""
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, BrokenPipeError) or _is_full_output(error):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing more may be written to it at exit
        if not isinstance(error, BrokenPipeError):  # the reader of our output has left
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
    from rollouts.config.foreign import foreign_hint
    from rollouts.config.settings import EVAL, setting_infos

    context = getattr(error, "ctx", None)
    command = context.command_path if context else "rollouts"
    if isinstance(error, click.NoSuchOption):
        known = [name for p in context.command.params for name in (*p.opts, *p.secondary_opts)] if context else []
        near = near_misses(error.option_name.replace("_", "-"), [name for name in known if name.startswith("--")])
        message = f"`{command}` has no option {error.option_name}"
        given = error.option_name.lstrip("-").replace("-", "_")
        if context and context.info_name == "eval" and given in {info.name for info in setting_infos()} - set(EVAL):
            near = []
            message += ": an evaluation trains nothing, and this is a setting of training; leave it out"
        if hint := foreign_hint(given, known) if context and context.info_name in TAKES_SETTINGS else "":
            message += f"\n{hint}"
        elif near:
            message += f"\ndid you mean: {', '.join(near)}?"
        if context and context.info_name in TAKES_SETTINGS:
            message += "\na component's settings are dotted: --env.digits 3, --loss.clip-high 0.28"
    else:
        message = error.format_message().rstrip(".")
        message = message[:1].lower() + message[1:]
    return f"{message}\ntype: {command} --help"
