"""What can be removed from runs to free disk space, for `rollouts runs clean`.

A run that a process writes to is left alone, and so is one with the tag `keep`, the newest and the best checkpoint of
each run, and what the settings of another run name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollouts.disk import HIDDEN_NAME, remove_folder
from rollouts.errors import ConfigError, OutputError
from rollouts.models.folders import all_checkpoints
from rollouts.runs.folder import (
    RunFolder,
    holds_run,
    note_removed,
    phases_of,
    read_config,
    removed_steps,
    step_of_file,
    writer_of,
)
from rollouts.training.weights.store import checkpoints_to_prune
from rollouts_view.listing import read_labels, size_of

KEEP = "keep"
WHAT = ("empty", "trajectories", "checkpoints")


class Removal(NamedTuple):
    """What one run would lose: a word for it, the files and folders, and their bytes."""

    run: Path
    what: str
    paths: list[Path]
    bytes: int


def removals(runs: Sequence[Path], what: Iterable[str]) -> list[Removal]:
    """What would be removed of these runs: their leftovers, which a killed process left half-written, and of `what`:

    - `empty`: runs that have neither a checkpoint nor a trajectory,
    - `trajectories`: the trajectories of training,
    - `checkpoints`: all but the newest and the best.
    """
    chosen = set(what)
    assert chosen <= set(WHAT), chosen
    found = []
    named = set(_named_elsewhere(runs))

    def add(run: Path, what: str, paths: list[Path]) -> None:
        if paths:
            sizes = (sum(size_of(each)) if each.is_dir() else each.stat().st_size for each in paths)
            found.append(Removal(run, what, paths, sum(sizes)))

    for run in runs:
        if not holds_run(run) or KEEP in read_labels(run).tags or any(map(writer_of, {run, *phases_of(run)})):
            continue
        if "empty" in chosen and _is_empty(run) and run.resolve() not in named:
            add(run, "the whole run", [run])
            continue
        add(run, "leftovers", list(_leftovers(run)))
        for phase in phases_of(run):
            if "trajectories" in chosen:
                files = (phase / "trajectories").glob("*")
                add(run, "trajectories", [each for each in files if step_of_file(each) is not None])
            if "checkpoints" in chosen:
                old = checkpoints_to_prune(phase / "checkpoints", 1)
                add(run, "checkpoints", [each for each in old if each.resolve() not in named])
    return found


def remove(removal: Removal) -> None:
    """Remove it, with the run locked. Raises OutputError if a process writes to the run, or if the disk refuses."""
    folder = RunFolder.reopen(removal.run, parts=())
    try:
        if removal.what == "trajectories":
            _note_steps(removal.paths)
        for path in removal.paths:
            remove_folder(path) if path.is_dir() else path.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{removal.run}: {error.strerror or error}: {error.filename}") from error
    finally:
        folder.close()


def _note_steps(files: Sequence[Path]) -> None:
    """Write down, in the folder of each phase, that the trajectories of its steps are missing on purpose."""
    for phase in {file.parent.parent for file in files}:
        steps = [step for file in files if file.parent.parent == phase and (step := step_of_file(file)) is not None]
        note_removed(phase, max([removed_steps(phase), *(step + 1 for step in steps)]))


def _is_empty(run: Path) -> bool:
    """Whether a run has neither a checkpoint nor a trajectory."""
    phases = phases_of(run)
    return not any(all_checkpoints(each / "checkpoints") or any((each / "trajectories").glob("*")) for each in phases)


def _leftovers(run: Path) -> Iterator[Path]:
    """What processes that were killed have left half-written or half-removed."""
    for phase in {run, *phases_of(run)}:
        for folder in (phase, phase / "trajectories", phase / "checkpoints"):
            for each in folder.iterdir() if folder.is_dir() else ():
                if each.suffix == ".partial" or HIDDEN_NAME.fullmatch(each.name):
                    yield each


def _named_elsewhere(runs: Iterable[Path]) -> Iterator[Path]:
    """The runs and checkpoints that the settings of these runs name, such as `model` and `teacher`."""
    for run in runs:
        try:
            settings = read_config(run)[0]
        except ConfigError:
            continue  # a damaged run names nothing
        for text in _texts(settings):
            path = Path(text).absolute()
            if "/" in text and any(holds_run(each) for each in (path, *list(path.parents)[:3])):
                yield path.resolve()


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)
