"""The group of commands. A command is imported when it is called. A mistake of the user gives one message.

Installed packages add commands through the entry-point group `rollouts.commands`. These are searched if a command is
not in COMMANDS. `--help` reads no metadata, so it does not list them: `rollouts plugins list --kind commands`
does.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import inspect
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import Any

import click

from rollouts.author_code import innermost_place, message_of, place_of
from rollouts.cli.ending import interrupted_by_signals, stray_errors_in_words
from rollouts.doors import MissingPackageError, open_module
from rollouts.errors import RolloutsError, UserError, in_lines, leaves_of, suggestion, words_of
from rollouts.runs.streams import silent_when_closed
from rollouts.version import __version__

COMMANDS = {
    "run": ("rollouts.cli.run:run", "Train a model by reinforcement in an environment."),
    "sft": ("rollouts.cli.run:sft", "Train a model on the demonstrations of an environment."),
    "eval": ("rollouts.cli.run:evaluate", "Evaluate a model on held-out tasks of an environment."),
    "resume": ("rollouts.cli.run:resume", "Resume a run, or make it longer."),
    "rescore": ("rollouts.cli.rescore:rescore", "Judge the saved trajectories of a run again."),
    "runs": ("rollouts_view.runs_command:runs", "List, compare, label and clean the runs on the disk."),
    "view": ("rollouts_view.command:view", "Look at runs in a browser, from a curve down to one token."),
    "data": ("rollouts.cli.data:data", "Look at training data: tokens, masks and lengths."),
    "export": ("rollouts.cli.export:export_command", "Export a run's model for transformers, vLLM and SGLang."),
    "chat": ("rollouts.cli.chat:chat", "Talk to a run's model, with the tools of its environment."),
    "play": ("rollouts.cli.play:play", "Take the model's place in an environment."),
    "serve": ("rollouts.cli.serve:serve", "Serve a run's model at an address that speaks OpenAI's API."),
    "check": ("rollouts_check.command:check", "Check whether a component keeps the contract of its kind."),
    "config": ("rollouts.cli.config:config", "Print a complete settings file."),
    "env": ("rollouts.cli.env:env", "Install environments in virtual environments of their own."),
    "new": ("rollouts_check.command:new", "Make a package, ready to publish: an environment, a reward, a loss, ..."),
    "plugins": ("rollouts_check.plugins_command:plugins", "List, show and check installed plugins."),
}
"""The commands of this distribution: where each is defined, and its line in the help. The help imports no command."""

INTERRUPTED = 130
"""The exit code after Ctrl-C, 128 + SIGINT, as in a shell."""

SIGNALS = "rollouts.signals"
"""A key in a context's `meta`. The value is a list with the signal that ended the command, or an empty list."""

TAKES_SETTINGS = ("run", "sft", "eval", "config", "resume", "rescore", "chat", "play", "serve", "check", "data", "view")
"""The commands that take dotted flags. A command of a plugin receives them in `ctx.obj`."""


class NamedCommand(click.Command):
    """A command whose name is in every error of its options; click forgets it where a value is missing. Without `help`,
    the docstring of the callback is the help.
    """

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **{"help": inspect.getdoc(settings.get("callback")), **settings})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise


class NamedGroup(click.Group):
    """A group of commands. Its error for an unknown command suggests similar commands and lists all commands."""

    command_class = NamedCommand

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve like click, but with the error of rollouts for an unknown command."""
        name, path, known = args[0], ctx.command_path, self.list_commands(ctx)
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            from rollouts.config.foreign import command_hint

            hint = command_hint(name) or suggestion(name, known, f"{path} {{}}".format)
            raise UserError(in_lines(f"`{path}` has no command {name!r}", hint, f"commands: {', '.join(known)}"))
        return super().resolve_command(ctx, args)


class RolloutsGroup(NamedGroup):
    """Commands by name, imported on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands of this distribution in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command of this distribution, else find and import one of an installed package."""
        if cmd_name in COMMANDS:
            module, _, attribute = COMMANDS[cmd_name][0].partition(":")
            try:
                command = getattr(open_module(module), attribute)
            except MissingPackageError as error:
                raise UserError(f"`rollouts {cmd_name}`: {error}") from None
            assert isinstance(command, click.Command), f"{cmd_name} is a {type(command).__name__}"
            return command
        from rollouts.plugins.index import find_component, installed_components

        if not any(ref.name == cmd_name for ref in installed_components("commands")):
            return None
        from rollouts.plugins.loading import load_component

        ref = find_component("commands", cmd_name)
        command = load_component(ref)
        if not isinstance(command, click.Command):
            raise UserError(f"{ref.qualified}: a command must be a click.Command; it is a {type(command).__name__}")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a settings file as `run FILE`. Raise an error for dotted flags of a command without settings."""
        name = args[0]
        if name.endswith((".toml", ".json", ".py")) and self.get_command(ctx, name) is None:
            args, name = ["run", *args], "run"
        if ctx.obj and name in COMMANDS and name not in TAKES_SETTINGS and args[:2] != ["env", "serve"]:
            raise UserError(f"`rollouts {name}` takes no settings, and dotted flags are settings: {', '.join(ctx.obj)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands of this distribution without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(
    "rollouts",
    cls=RolloutsGroup,
    epilog="Help of a command: rollouts COMMAND --help\n\n"
    "Commands of installed plugins: rollouts plugins list --kind commands\n\n"
    "Exit codes: 0 done, 1 the run failed, 2 a mistake in a command or a file, 130 interrupted (143 by SIGTERM, 129 by "
    "SIGHUP).",
    no_args_is_help=True,
    context_settings={
        "token_normalize_func": lambda token: token.replace("_", "-"),
        "max_content_width": 120,
        "help_option_names": ["-h", "--help"],
    },
)
@click.version_option(__version__, message="rollouts %(version)s")
def app() -> None:
    """Train language-model agents in environments that are plugins.

    Start with: rollouts run --env calculator --loss grpo
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command with the given arguments and return its exit code.

    Without `argv`, it runs the command line of the process. In this case, objects that a run excluded from garbage
    collection stay excluded, because collecting them at exit takes a second. Mistakes of the user and failed runs show
    a traceback only with ROLLOUTS_TRACEBACK=1. Any other error is a bug in rollouts: without `argv`, it is one message
    and exit code 1; with `argv`, it is raised.
    """
    arguments, dotted = list(sys.argv[1:] if argv is None else argv), dict[str, Any]()
    stray = stray_errors_in_words() if argv is None else contextlib.nullcontext()
    with silent_when_closed("stderr"), stray, interrupted_by_signals() as signals:
        try:
            _refuse_deleted_folder()
            if any(argument.startswith("--") and "." in argument.partition("=")[0] for argument in arguments):
                from rollouts.config.flags import take_dotted_flags

                arguments, dotted = take_dotted_flags(arguments)
            with app.make_context("rollouts", arguments, obj=dotted) as context:
                context.meta[SIGNALS] = signals
                result = app.invoke(context)
            if sys.stdout is not None:  # flush here, because a closed pipe can still be reported here
                sys.stdout.flush()
            return result if isinstance(result, int) else 0
        except (Exception, KeyboardInterrupt, BaseExceptionGroup) as error:
            known = _known_error(error)
            if known is None and argv is not None:
                raise
            if os.environ.get("ROLLOUTS_TRACEBACK") == "1":
                import traceback

                traceback.print_exception(error)
            if argv is None and isinstance(known, KeyboardInterrupt):
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # another Ctrl-C would change the exit code
            code = _report(known or error)
            return 128 + signals[0] if signals and code == INTERRUPTED else code
        finally:
            if argv is not None:
                gc.unfreeze()


def _refuse_deleted_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the working directory does not exist any more\ntype: cd FOLDER") from None


_KNOWN = (RolloutsError, click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError)


def _known_error(error: BaseException) -> BaseException | None:
    """The error to report without a traceback, taken out of exception groups; None for an unknown error, which is a
    bug.
    """
    leaves = list(leaves_of(error))
    for leaf in leaves:  # Ctrl-C together with other errors counts as Ctrl-C
        if isinstance(leaf, KeyboardInterrupt):
            return _with_message(leaf)
    return leaves[0] if all(isinstance(leaf, _KNOWN) or _is_full_output(leaf) for leaf in leaves) else None


def _with_message(interrupt: BaseException) -> BaseException:
    """The interrupt that says how far the run came: an earlier one, if another Ctrl-C came as it was raised."""
    earlier = interrupt.__context__
    return _with_message(earlier) if not interrupt.args and isinstance(earlier, KeyboardInterrupt) else interrupt


def _is_full_output(error: BaseException) -> bool:
    """Whether standard output could not be written. An error of a file has a file name."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
    return isinstance(error, OSError) and error.errno in full and error.filename is None


def _report(error: BaseException) -> int:
    """Print an error to stderr, and return the exit code. An unknown error is reported as a bug."""
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, BrokenPipeError) or _is_full_output(error):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that Python does not write to it at exit
        if not isinstance(error, BrokenPipeError):  # not a closed pipe
            click.echo(f"error: the output cannot be written: {getattr(error, 'strerror', error)}", err=True)
        return 1
    if isinstance(error, KeyboardInterrupt | click.Abort):
        click.echo(f"\n{str(error) or 'interrupted'}", err=True)
        return INTERRUPTED
    if type(error).__name__ == "NoArgsIsHelpError":  # new versions of click raise it; old ones print the help
        click.echo(str(error))
        return 0
    if isinstance(error, RolloutsError):
        click.echo(f"error: {message_of(error)}", err=True)
        return error.exit_code
    if isinstance(error, click.ClickException):
        click.echo(f"error: {_usage_message(error)}", err=True)
        return 2
    notes = "\n".join(getattr(error, "__notes__", ["with ROLLOUTS_TRACEBACK=1 its traceback is shown"]))
    words = words_of(error, lambda each: place_of(each) or innermost_place(each))
    click.echo(f"error: {words}\nthis is a mistake in rollouts or in a plugin, please report it; {notes}", err=True)
    return 1


def _usage_message(error: click.ClickException) -> str:
    """An error of click in the form of rollouts: what was given, similar names, and what to type."""
    context: click.Context | None = getattr(error, "ctx", None)
    command = context.command_path if context else "rollouts"
    if isinstance(error, click.BadOptionUsage) and context:
        option = next(each for each in context.command.params if error.option_name in each.opts)
        value = option.metavar or "|".join(getattr(option.type, "choices", ())) or "VALUE"
        return f"{error.option_name} needs a value\ntype: {error.option_name} {value}"
    if isinstance(error, click.NoSuchOption):
        message = f"`{command}` has no option {error.option_name}{_why_no_option(error.option_name, context)}"
    else:
        message = error.format_message().rstrip(".")
        message = message[:1].lower() + message[1:]
        if settings := re.findall(r"[( ]([a-z_.]+)=(\S*?)[ )]", message):
            flags = (f"--{name.replace('_', '-')} {value}" for name, value in settings)
            message += f"\na setting is a flag: {' '.join(flags)}"
    return f"{message}\ntype: {command} --help"


_NOT_HERE = {
    "eval": "an evaluation trains nothing, and this is a setting of training; leave it out",
    "resume": "only --stop-when, --max-hours, --steps and the settings of components can change here",
    "sft": "it has only one mode; type rollouts run --mode MODE",
}
"""Why a command lacks an option of `rollouts run`."""


def _why_no_option(option: str, context: click.Context | None) -> str:
    """What follows the name of an unknown option: why this command has none, and what to type instead."""
    from rollouts.config.foreign import foreign_hint
    from rollouts.config.settings import EVAL, setting_infos

    name, given = (context.info_name if context else "") or "", option.lstrip("-").replace("-", "_")
    known = [each for p in context.command.params for each in (*p.opts, *p.secondary_opts)] if context else []
    takes_settings = name in TAKES_SETTINGS
    dotted = "a component's settings are dotted: --env.digits 3, --loss.clip-high 0.28" if takes_settings else ""
    core = {info.name for info in setting_infos()}
    missing = {"eval": core - set(EVAL), "resume": core, "sft": {"mode"}}
    if given in missing.get(name, ()):
        is_in_file = name == "resume" and given not in ("out", "resume")
        file = f"; or write {given} = VALUE into the config.toml of the run" if is_in_file else ""
        return in_lines(f": {_NOT_HERE[name]}{file}", dotted)
    hint = foreign_hint(given, known) if takes_settings else ""
    flags = [each for each in known if each.startswith("--")]
    return "\n".join(["", *filter(None, (hint or suggestion(option.replace("_", "-"), flags), dotted))])
