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
from rollouts_check.components.common import Subject, snapshot, trying
from rollouts_check.report import FailedError, SkippedError, at

EVENT_SECONDS = 1.0  # a run waits for each call


# --- commands ---------------------------------------------------------------------------------------------------------


def command(subject: Subject) -> str:
    """It is a click.Command, with a name that is not one of the core's commands."""
    found = subject.component
    if not isinstance(found, click.Command):
        seen = f"it is a {type(found).__name__}{at(found)}"
        raise FailedError("look at the object", seen, "decorate the function with @click.command()")
    name = subject.found.label.rpartition("/")[2]
    if name in COMMANDS and app.get_command(click.Context(app), name) is not found:
        seen = f"`rollouts {subject.found.label}` is a command of rollouts"
        raise FailedError("look for its name", seen, "give the entry point another name")
    return counted(len(found.params), "parameter")


def help_text(subject: Subject) -> str:
    """`--help` works, and says what the command and each of its options do."""
    result = _invoke(subject, "--help")
    if result.exit_code != 0:
        seen = f"it ended with exit code {result.exit_code}: {shown(result.output, 120)}"
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            seen = words_of(result.exception)
        raise FailedError("call it with --help", seen, "correct the error")
    found: click.Command = subject.component
    if not (found.help or "").strip():
        raise FailedError("read its help", f"it has no help{at(found.callback)}", "write a docstring")
    for option in found.params:
        if isinstance(option, click.Option) and not (option.help or "").strip() and not option.hidden:
            seen = f"{option.opts[0]} has no help{at(found.callback)}"
            raise FailedError("read its help", seen, f'write click.option("{option.opts[0]}", help="...")')
    return found.get_short_help_str(60)


def wrong_usage(subject: Subject) -> None:
    """Wrong usage is one clear error with exit code 2: an unknown option, and a path that does not exist."""
    wanted = [each for each in subject.component.params if isinstance(each, click.Argument) and each.required]
    paths = [each for each in wanted if isinstance(each.type, click.Path | click.File)]
    no_path = [["/no/such/folder/of/rollouts"] * len(paths)] if paths == wanted and wanted else []
    for arguments in (["--no-such-option-of-rollouts"], *no_path):
        result = _invoke(subject, *arguments)
        tried = f"call it with {' '.join(arguments)}"
        if result.exception is not None and not isinstance(result.exception, SystemExit | RolloutsError):
            change = "raise rollouts.errors.UserError with what was given, what was expected, and what to type"
            raise FailedError(tried, words_of(result.exception), change)
        if result.exit_code == 0 and arguments not in no_path:
            raise FailedError(tried, "it ended with exit code 0", "do not ignore unknown options")


def _invoke(subject: Subject, *arguments: str) -> Result:
    with authors_code():
        return CliRunner().invoke(subject.component, list(arguments))


# --- hooks ------------------------------------------------------------------------------------------------------------


def hooks(subject: Subject) -> str:
    """Its functions are hooks that a run calls: marked with @hookimpl, with known names and arguments, not async."""
    manager, tried = PluginManager(installed=False), "register its functions"
    faults = [*manager.register(subject.component, distribution=subject.found.label), *manager.remarks]
    if faults:
        change = "correct the function: rollouts.plugins.hookspecs has the hooks and their arguments"
        raise FailedError(tried, str(faults[0]), change)
    if not manager.hooks:
        change = "write @hookimpl above a function such as `def rollouts_step_end(metrics, step)`"
        raise FailedError(tried, "it has no hook", change)
    return ", ".join(manager.hooks)


def events(subject: Subject) -> str:
    """It receives the events of a run without an exception, soon, and changes nothing that it receives."""
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
        for is_wrong, seen, change in (
            (faults, str(next(iter(faults), "")), "correct the line that raised the error"),
            (snapshot(values) != before, "it changed what it received", "change a copy"),
            (seconds > EVENT_SECONDS, f"it took {seconds:.1f} seconds", "do the work in a thread"),
        ):
            if is_wrong:
                raise FailedError(f"call {name}", f"{seen}{at(getattr(subject.component, name, None))}", change)
    return ", ".join(events_of_run)


def components(subject: Subject) -> str:
    """Every component that it lists can be found, and an unknown name is None."""
    manager = _registered(subject)
    if "rollouts_find_component" not in manager.hooks:
        if "rollouts_list_components" in manager.hooks:
            seen = "it lists components, and has no rollouts_find_component"
            raise FailedError("read its hooks", seen, "write `def rollouts_find_component(kind, name)`")
        raise SkippedError("it offers no components")
    count = 0
    for kind in KINDS:
        if _found(subject, kind, "no_such_component_of_rollouts") is not None:
            seen = f"it returned something{at(subject.component.rollouts_find_component)}"
            raise FailedError(f"find an unknown name of the kind {kind}", seen, "return None for other names")
        for ref in manager.list(kind, hooks=True):
            if ref.value:
                continue  # it is in the metadata of a package
            count += 1
            if _found(subject, kind, ref.name) is None:
                seen = f"it returned None{at(subject.component.rollouts_find_component)}"
                change = "return the component of each name that rollouts_list_components returns"
                raise FailedError(f"find the {kind} {ref.name}, which it lists", seen, change)
    return counted(count, "listed component")


def _found(subject: Subject, kind: str, name: str) -> Any:
    function = subject.component.rollouts_find_component
    given = {"kind": kind, "name": name}
    with trying(f"find {name} of the kind {kind}"):
        return function(**{key: given[key] for key in inspect.signature(function).parameters})


def _registered(subject: Subject) -> PluginManager:
    manager = PluginManager(installed=False)
    manager.register(subject.component, distribution=subject.found.label)
    return manager
