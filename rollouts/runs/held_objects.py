"""Python objects of a run that no name finds again: which they are, who has to give them again, and what to type.

`config.objects` gives such objects their names, `manifest` keeps their source.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from rollouts.config.merging import component_tables
from rollouts.config.names import GIVEN_ROWS
from rollouts.config.objects import held_names
from rollouts.config.resolving import Resolved
from rollouts.config.settings import COMPONENT_KINDS
from rollouts.errors import ConfigError
from rollouts.models.loading import resolve_device
from rollouts.plugins.index import KIND_WORDS
from rollouts.plugins.manager import PluginManager
from rollouts.plugins.signature import check_signature
from rollouts.runs.components import Chosen
from rollouts.runs.folder import CONFIG
from rollouts.runs.manifest import source_of
from rollouts.runs.resume import resume_command


def held_by(resolved: Resolved, keys: Iterable[str] = tuple(COMPONENT_KINDS)) -> dict[str, list[str]]:
    """The names in angle brackets among the components of these keys, of the schedule and of `sft`."""
    wanted = set(keys)
    tree = component_tables({key: each for key, each in resolved.components.items() if key in wanted})
    later = {"schedule": resolved.settings.schedule, "sft": resolved.settings.sft} if "loss" in wanted else {}
    return held_names({**tree, **later})


def refuse_lost(resolved: Resolved, keys: Iterable[str]) -> None:
    """Raise ConfigError if a component of these keys is an object that this program does not have."""
    held = held_by(resolved, keys).items()
    known = resolved.source.objects.components
    lost = {key: missing for key, names in held if (missing := [name for name in names if name not in known])}
    if not lost:
        return
    words = [f"{KIND_WORDS[COMPONENT_KINDS[key]]} {name[1:-1]}" for key, names in lost.items() for name in names]
    file = resolved.source.path
    is_run = Path(file).name == CONFIG
    begun = f"the run in {Path(file).parent} was begun" if is_run else f"{file or 'this run'} was written"
    raise ConfigError(
        f"{begun} by a Python program, and these objects of it are not in its files: {', '.join(words)}\n"
        f"give them again, in Python: {_call(resolved, lost)}"
    )


def _call(resolved: Resolved, held: Mapping[str, list[str]]) -> str:
    """The call that gives these objects again."""
    settings, file = resolved.settings, Path(os.path.relpath(resolved.source.path or os.curdir))
    out = Path(settings.out or os.devnull).absolute()
    if settings.mode == "eval":
        model = file.parent if file.name == CONFIG else settings.model
        return f'rollouts.run("{file}", mode="eval", model="{model}", {_arguments(held)})'
    if file.parent.absolute() in (out, out.parent):
        return f'rollouts.resume("{file.parent}", {_arguments(held)})'
    return f'rollouts.run("{file}", {_arguments(held)})'


def _arguments(held: Mapping[str, list[str]]) -> str:
    """The objects as the arguments of a call."""
    arguments = []
    for key, names in held.items():
        labels = ["lambda ..." if name.startswith("<lambda") else name[1:-1] for name in names]
        arguments.append(f"{key}={labels[0]}" if len(labels) == 1 else f"{key}=[{', '.join(labels)}]")
    return ", ".join(arguments)


def again_command(resolved: Resolved, folder: Path) -> str:
    """What to type to resume the run in this folder: the command; or a call in Python, if the run has objects that no
    command finds.
    """
    held = held_by(resolved)
    if not held:
        return resume_command(folder)
    return f'rollouts.resume("{folder}", {_arguments(held)}) in Python'


def unread_notes(resolved: Resolved) -> tuple[str, ...]:
    """A note for each object whose source cannot be read, so that the run keeps no copy of it."""
    objects = resolved.source.objects
    held = [name for names in held_by(resolved).values() for name in names]
    named = {name: objects.components[name] for name in held if name in objects.components}
    unread = [name for name, value in named.items() if source_of(value) is None]
    unread += ["on_step" for value in objects.on_step if source_of(value) is None]
    return tuple(f"the source of {name} cannot be read, so the run keeps no copy of it" for name in unread)


# --- prompts --------------------------------------------------------------------------------------------------------


def with_rows(resolved: Resolved) -> Resolved:
    """The configuration with the rows of its own prompts: those that Python code gave, or the copy that the run has
    kept.
    """
    data, source = resolved.settings.data, resolved.source
    rows = {data: source.objects.rows[data]} if data in source.objects.rows else {}
    if data.startswith(GIVEN_ROWS) and source.path and not rows:
        folder = Path(source.path).parent
        kept = [folder / data, *sorted(folder.glob(f"*/{data}"))]  # in mode sft+rl, each phase has its own copy
        copy = next((file for file in kept if file.is_file()), None)
        rows = {} if copy is None else {data: copy.read_bytes()}
    return resolved._replace(source=source.with_objects(source.objects._replace(rows=rows)))


def manager_for(resolved: Resolved, keys: Iterable[str]) -> PluginManager:
    """A manager that knows the objects of the run. The environment `prompts` reads the rows that `with_rows` has found.
    Raises ConfigError if a component of these keys is lost.
    """
    refuse_lost(resolved, keys)
    objects = resolved.source.objects
    manager = PluginManager(objects.components)
    if objects.rows:
        from rollouts.env.prompts import given_prompts

        manager.replace(manager.find("environments", "prompts"), given_prompts(dict(objects.rows)))
    return manager


# --- ranks ----------------------------------------------------------------------------------------------------------


def ranks_of(training: Chosen) -> int:
    """The number of ranks: as started by a launcher; else the setting `processes`, where 0 means one per GPU."""
    import torch

    launched = os.environ.get("WORLD_SIZE", "")
    if launched.isdigit():
        return max(1, int(launched))
    gpus = torch.cuda.device_count() if resolve_device(str(training.settings.get("device", "auto"))) != "cpu" else 0
    return int(training.settings.get("processes", 0)) or max(1, gpus)


def refuse_ranks(resolved: Resolved, training: Chosen) -> None:
    """Raise ConfigError if the backend starts ranks, and a component is an object that they cannot import. A launcher
    runs the whole program on each rank, so there each has the object.
    """
    held = held_by(resolved)
    if not held or "WORLD_SIZE" in os.environ:
        return
    starts_ranks = "config" in check_signature(training.component, "training", "").requests
    if starts_ranks and (count := ranks_of(training)) > 1:
        names = ", ".join(name[1:-1] for names in held.values() for name in names)
        raise ConfigError(
            f"--training {training.name} starts {count} ranks, and each imports the components of the run by their "
            f"names; these have none that another process finds: {names}\nwrite them at the top of a module, such as "
            "my_rewards.py, and import them from there; or start the program with torchrun"
        )
