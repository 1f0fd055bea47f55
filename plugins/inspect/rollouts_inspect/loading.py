"""From a name to upstream's task with its samples and their prompts, and why a task cannot be served."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

from rollouts import Message
from rollouts.errors import ConfigError, check_known, named

PACKAGED = re.compile(r"[\w.-]+/[\w.-]+")
GRADED = ("model_graded_qa", "model_graded_fact")
TEXTS = 200  # how much of an error is shown


class Loaded(NamedTuple):
    """A task that can be served: `prompts` are those that its solver makes of the samples."""

    name: str
    task: Any
    samples: list[Any]
    prompts: list[list[Message]]


def is_name(spec: str) -> bool:
    """Whether this is the name of a task: `package/task`, or `file.py@task`."""
    return ".py@" in spec or bool(PACKAGED.fullmatch(spec))


def names() -> list[str]:
    """The tasks of installed packages, sorted. Packages with an entry point of Inspect are imported."""
    from inspect_ai._util.registry import registry_find, registry_info

    for point in entry_points(group="inspect_ai"):
        point.load()
    found = registry_find(lambda info: info.type == "task")
    return sorted({registry_info(each).name for each in found if "/" in registry_info(each).name})


@functools.lru_cache(maxsize=64)
def load(spec: str, args: str) -> Loaded:
    """The task of a name, with JSON of its arguments. Raises ConfigError."""
    name, task = f"inspect/{spec}", _made(spec, args)
    for reason in _reasons(task):
        raise ConfigError(f"{name} cannot be served: {reason}")
    samples = list(task.dataset)
    if not samples:
        raise ConfigError(f"{name} has no samples")
    return Loaded(name, task, samples, _prompts(name, task, samples))


def _made(spec: str, args: str) -> Any:
    from inspect_ai._eval.loader import load_tasks

    name, given = f"inspect/{spec}", json.loads(args)
    file = spec.partition("@")[0]
    if file.endswith(".py") and not Path(file).is_file():
        raise ConfigError(f"{name}: there is no file {file}")
    try:
        found = load_tasks([spec], given)
    except Exception as error:  # the author's code may raise anything
        raise ConfigError(f"{name} is no task that can be loaded: {named(error)[:TEXTS]}") from error
    if len(found) != 1:
        raise ConfigError(f"{name} names {len(found)} tasks\ntype: --env inspect/{file}@NAME-OF-ITS-FUNCTION")
    _check_arguments(name, found[0], given)
    return found[0]


def _check_arguments(name: str, task: Any, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument that the task's function does not take. Upstream only warns."""
    from inspect_ai._util.registry import registry_info, registry_lookup

    known = list(inspect.signature(registry_lookup("task", registry_info(task).name)).parameters)
    check_known(given, known, f"{name} has no argument --env.args.", "it takes")


def _reasons(task: Any) -> Iterator[str]:
    """Why a task cannot be served, before its solver is tried."""
    from inspect_ai._util.registry import is_registry_object, registry_info

    if task.sample_source is not None:
        yield "its samples are made while it runs"
    if not task.scorer:
        yield "it has no scorer"
    for scorer in task.scorer or []:
        name = registry_info(scorer).name.rpartition("/")[2] if is_registry_object(scorer) else ""
        if name in GRADED:
            yield f"its scorer {name} asks a model\nto judge with a model, see docs/judge.md"
    if task.sandbox is not None or any(sample.sandbox is not None for sample in task.dataset):
        yield "it has a sandbox"
    if any(sample.files or sample.setup for sample in task.dataset):
        yield "its samples have files or a setup, which need a sandbox"
    if task.approval or task.sentinel:
        yield "its tools need approval"


def _prompts(name: str, task: Any, samples: list[Any]) -> list[list[Message]]:
    from rollouts_inspect.playing import check_once, prompt_of

    async def all_of_them() -> list[list[Message]]:
        await check_once(name, task, samples[0], 0)
        return [await prompt_of(name, task, sample, index) for index, sample in enumerate(samples)]

    return asyncio.run(all_of_them())
