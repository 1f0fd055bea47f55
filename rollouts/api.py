"""Start and resume runs from Python.

    rollouts.run(env="calculator", loss="grpo", steps=20)
    rollouts.run(env=MyEnv, reward=my_reward, steps=20)
    rollouts.resume("runs/mine")

The functions take the settings of the command. Settings of a component are a nested dict. In place of the name of a
component, you can give a class or a function. docs/python-functions.md has examples.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rollouts.runs.observer import Observer
    from rollouts.runs.progress import Display

OnStep = Callable[[Any], Any]


def run(
    file: str | None = None,
    *,
    prompts: Iterable[Any] | None = None,
    on_step: OnStep | Sequence[OnStep] | None = None,
    quiet: bool = False,
    display: Display = "auto",
    **settings: Any,
) -> dict[str, Any]:
    """Start a run, wait for its end, and return the content of its `summary.json`.

    Do not call this inside a running trio loop.

    Args:
        file: a settings file (.toml, .json or .py). `settings` override it
        prompts: the tasks of the environment `prompts`: texts, lists of messages, Tasks, or rows such as
            `{"prompt": "What is 2+2?", "answer": 4}`
        on_step: a function, or a list of functions, to call after each step with `report.step`, `report.metrics` and
            `report.groups`. It may be async. The run logs the metrics of the dict that it returns
        quiet: show nothing; the same as `display="none"`
        display: what standard error shows: `live` is a view that is redrawn, `lines` are plain lines, `auto` is the
            live view in a terminal or a notebook, else lines. In a notebook, the output is that of the cell
        settings: the settings of the command. A component is a name, a class or a function:
            `env=MyEnv`, `reward=["env:1", my_reward, (other_reward, 0.5)]`. Its settings are a table:
            `loss={"name": my_loss, "clip": 0.3}`

    Raises:
        UserError: a setting is wrong. Nothing was written.
        RunError: the run failed. Its folder holds its results so far.
    """
    from rollouts.config.files import NOWHERE, check_tree, load_file
    from rollouts.config.objects import take_objects
    from rollouts.config.resolving import merge_over_file, resolve
    from rollouts.errors import ConfigError
    from rollouts.runs import run as run_resolved

    given = _given(settings, prompts=prompts, on_step=on_step)
    check_tree(given)
    tree, source = load_file(file) if file is not None else ({}, NOWHERE)
    given, objects = take_objects(given, tree, source.objects)
    source = source.with_objects(objects)
    resolved = resolve(merge_over_file(tree, given, source=source), source)
    if on_step is not None and resolved.settings.mode == "eval":
        raise ConfigError("on_step: an evaluation has no steps; leave it out, or choose another mode")
    with _shown(quiet, display) as observer:
        return run_resolved(resolved, observer)


def resume(
    folder: str,
    *,
    checkpoint: str = "",
    on_step: OnStep | Sequence[OnStep] | None = None,
    quiet: bool = False,
    display: Display = "auto",
    **settings: Any,
) -> dict[str, Any]:
    """Resume the run in `folder` from its last complete checkpoint, and return the content of its `summary.json`.

    A finished run is not changed. Do not call this inside a running trio loop.

    Args:
        checkpoint: an earlier checkpoint to resume from
        on_step: as in `run`. A run does not keep the functions that it was begun with
        quiet: as in `run`
        display: as in `run`
        settings: override the run's config.toml: `resume("runs/mine", steps=200)` makes the run longer. Give the
            functions and classes again that no name can find, such as those of a notebook:
            `resume("runs/mine", reward=my_reward)`. Their settings and weights stay as they are in config.toml

    Raises:
        UserError: there is no such run, or it cannot be resumed. Nothing was changed.
        RunError: the run failed. Its folder holds its results so far.
    """
    from rollouts.config.files import check_tree
    from rollouts.runs import resume_run

    given = _given(settings, on_step=on_step)
    check_tree(given)
    with _shown(quiet, display) as observer:
        return resume_run(folder, given, observer, checkpoint=checkpoint)


def _given(settings: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    """The settings, with the arguments that are not None."""
    return settings | {name: value for name, value in arguments.items() if value is not None}


@contextlib.contextmanager
def _shown(quiet: bool, display: Display) -> Iterator[Observer | None]:
    """The observer of a run, on standard error. Afterwards, loaded objects are garbage-collected again."""
    from rollouts.runs.progress import shown_progress

    try:
        with shown_progress("stderr", "none" if quiet else display) as observer:
            yield observer
    finally:
        gc.unfreeze()  # a run excludes loaded objects from garbage collection
