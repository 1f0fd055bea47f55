"""Checks of commands and of hook plugins."""

from __future__ import annotations

import inspect
import time
from typing import Any

import click
from click.testing import CliRunner, Result

from rollouts.author_code import authors_code, shown
from rollouts.cli.app import COMMANDS, app
from rollouts.errors import RolloutsError, counted, words_of
from rollouts.plugins.hookspecs import EVENTS
from rollouts.plugins.index import KINDS
from rollouts.plugins.manager import PluginManager
from rollouts.types import Sample
from rollouts_check.components.common import Subject, snapshot
from rollouts_check.report import Attempt, SkippedError, trying

EVENT_SECONDS = 1.0  # a run waits for each call


# --- commands ---------------------------------------------------------------------------------------------------------


def command(subject: Subject) -> str:
    """It is a click.Command, with a name that is not one of the core's commands.

    Advice: decorate the function with @click.command()
    """
    found = subject.component
    attempt = subject.attempt("look at the object and its name")
    attempt.require(isinstance(found, click.Command), f"it is a {type(found).__name__}")
    name = subject.found.label.rpartition("/")[2]
    if name in COMMANDS and app.get_command(click.Context(app), name) is not found:
        raise attempt.failed(f"`rollouts {name}` is a command of rollouts", "give the entry point another name")
    return counted(len(found.params), "parameter")


def help_text(subject: Subject) -> str:
    """`--help` works, and says what the command and each of its options do.

    Advice: correct the error
    """
    result = _invoke(subject, "--help")
    seen = f"it ended with exit code {result.exit_code}: {shown(result.output, 120)}"
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        seen = words_of(result.exception)
    Attempt("call it with --help").require(result.exit_code == 0, seen)
    found: click.Command = subject.component
    attempt = Attempt("read its help", found.callback, change="write a docstring")
    attempt.require((found.help or "").strip(), "it has no help")
    for option in found.params:
        if isinstance(option, click.Option) and not (option.help or "").strip() and not option.hidden:
            name = option.opts[0]
            raise attempt.failed(f"{name} has no help", f'write click.option("{name}", help="...")')
    return found.get_short_help_str(60)


def wrong_usage(subject: Subject) -> None:
    """Wrong usage is one clear error with exit code 2: an unknown option, and a path that does not exist.

    Advice: raise rollouts.errors.UserError with what was given, what was expected, and what to type
    """
    wanted = [each for each in subject.component.params if isinstance(each, click.Argument) and each.required]
    paths = [each for each in wanted if isinstance(each.type, click.Path | click.File)]
    no_path = [["/no/such/folder/of/rollouts"] * len(paths)] if paths == wanted and wanted else []
    for arguments in (["--no-such-option-of-rollouts"], *no_path):
        result = _invoke(subject, *arguments)
        attempt = Attempt(f"call it with {' '.join(arguments)}")
        if result.exception is not None and not isinstance(result.exception, SystemExit | RolloutsError):
            raise attempt.failed(words_of(result.exception))
        is_refused = result.exit_code != 0 or arguments in no_path
        attempt.require(is_refused, "it ended with exit code 0", "do not ignore unknown options")


def _invoke(subject: Subject, *arguments: str) -> Result:
    with authors_code():
        return CliRunner().invoke(subject.component, list(arguments))


# --- hooks ------------------------------------------------------------------------------------------------------------


def hooks(subject: Subject) -> str:
    """Its functions are hooks that a run calls: marked with @hookimpl, with known names and arguments, not async.

    Advice: correct the function: rollouts.plugins.hookspecs has the hooks and their arguments
    """
    manager = PluginManager(installed=False)
    attempt = Attempt("register its functions")
    for fault in (*manager.register(subject.component, distribution=subject.found.label), *manager.remarks):
        raise attempt.failed(str(fault))
    change = "write @hookimpl above a function such as `def rollouts_step_end(metrics, step)`"
    attempt.require(manager.hooks, "it has no hook", change)
    return ", ".join(manager.hooks)


def events(subject: Subject) -> str:
    """It receives the events of a run without an exception, soon, and changes nothing that it receives.

    Advice: correct the line that raised the error
    """
    manager = _registered(subject)
    events_of_run = [name for name in EVENTS if name in manager.hooks]
    if not events_of_run:
        raise SkippedError("it has no hook of a run")
    folder = subject.scratch / "run"
    folder.mkdir(exist_ok=True)
    metrics = {"reward/mean": 0.5, "policy/loss": float("nan")}
    sample = Sample(tokens=[1, 2], loss_mask=[0.0, 1.0], reward=1.0)
    given: dict[str, dict[str, Any]] = {
        "rollouts_run_start": {"settings": {"env": {"name": "calculator"}, "seed": 0}, "folder": str(folder)},
        "rollouts_samples": {"samples": [sample], "step": 0},
        "rollouts_step_end": {"metrics": metrics, "step": 0},
        "rollouts_run_end": {"summary": {"status": "done", "steps": 1}},
    }
    for name in EVENTS:
        values = given[name]
        before, begun = snapshot(values), time.perf_counter()
        faults = manager.call_event(name, **values)
        seconds = time.perf_counter() - begun
        function = getattr(subject.component, name, None)
        attempt = Attempt(f"call {name}", function)
        attempt.require(not faults, str(next(iter(faults), "")))
        attempt.require(snapshot(values) == before, "it changed what it received", "change a copy")
        attempt.require(seconds <= EVENT_SECONDS, f"it took {seconds:.1f} seconds", "do the work in a thread")
    return ", ".join(events_of_run)


def components(subject: Subject) -> str:
    """Every component that it lists can be found, and an unknown name is None.

    Advice: return the component of each name that rollouts_list_components returns, and None for other names
    """
    manager = _registered(subject)
    if not {"rollouts_find_component", "rollouts_list_components"} & set(manager.hooks):
        raise SkippedError("it offers no components")
    is_there = "rollouts_find_component" in manager.hooks
    attempt = Attempt("read its hooks", change="write `def rollouts_find_component(kind, name)`")
    attempt.require(is_there, "it lists components, and has no rollouts_find_component")
    function = subject.component.rollouts_find_component
    count = 0
    for kind in KINDS:
        listed = [ref.name for ref in manager.list(kind, hooks=True) if not ref.value]  # others are in metadata
        for name in ("no_such_component_of_rollouts", *listed):
            given = {"kind": kind, "name": name}
            with trying(f"find {name} of the kind {kind}", function) as attempt:
                found = function(**{key: given[key] for key in inspect.signature(function).parameters})
            attempt.require((found is not None) == (name in listed), f"it returned {shown(found)}")
        count += len(listed)
    return counted(count, "listed component")


def _registered(subject: Subject) -> PluginManager:
    manager = PluginManager(installed=False)
    manager.register(subject.component, distribution=subject.found.label)
    return manager
