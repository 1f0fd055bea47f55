"""What the runs in a directory are, for `rollouts runs list`: read from their folders. No component is imported.

A listing is quick however long the runs were: of `metrics.jsonl` it reads a few lines, evenly spread over the file. Not
here: the trajectories of a run (`saved`), and what differs between runs (`comparing`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from rollouts.disk import open_regular, read_regular, write_whole
from rollouts.encoding import encode_indented
from rollouts.errors import ConfigError, OutputError, UserError, in_lines, suggestion
from rollouts.runs.folder import CONFIG, METRICS, SUMMARY, holds_run, phases_of, read_config, read_json, writer_of
from rollouts.runs.manifest import MANIFEST

LABELS = "labels.json"
REWARD, LOSS = "reward/mean", "policy/loss"
POINTS = 48  # so many lines of a metrics file are read
_TAIL = 1 << 16  # bytes in which the last line is searched
_DEPTH_MAX = 3  # runs/ has the folders of several seeds, and those have runs

State = Literal["running", "done", "failed", "interrupted", "killed", "damaged"]
"""`killed`: it has not ended, and no process writes to it."""


class Labels(msgspec.Struct, frozen=True):
    """What a user says of a run: the content of `labels.json` in its folder."""

    tags: list[str] = []
    note: str = ""


class RunInfo(msgspec.Struct, frozen=True):
    """One run. `name` is its path as it was found, `steps` counts the finished steps, and `steps_asked` all of them; of
    mode sft+rl, both count the steps of both phases. `curve` has a few values of `metric` from the first step to the
    last, of the last phase that has begun. `reward` is the last mean reward, of an evaluation its own. `bytes` are
    those of all files. `problem` says why a run is damaged or failed.
    """

    name: str
    state: State
    problem: str = ""
    mode: str = ""
    environment: str = ""
    model: str = ""
    loss: str = ""
    steps: int | None = None
    steps_asked: int | None = None
    reward: float | None = None
    metric: str = ""
    curve: list[float] = []
    bytes: int = 0
    started: str = ""
    tags: list[str] = []
    note: str = ""


def find_runs(directory: Path) -> list[Path]:
    """The folders of runs in a directory and up to three levels below it, sorted. The directory may be a run itself.

    Raises UserError if there is no such directory.
    """
    if not directory.is_dir():
        raise UserError(f"there is no directory {directory}; name the one that has the runs: rollouts runs list DIR")
    return sorted(_runs_below(directory, _DEPTH_MAX))


def _runs_below(directory: Path, depth: int) -> Iterator[Path]:
    if any((directory / name).is_file() for name in (CONFIG, MANIFEST, SUMMARY)):
        yield directory
    elif depth:
        with os.scandir(directory) as entries:
            below = [Path(entry) for entry in entries if not entry.name.startswith(".") and _is_folder(entry)]
        for folder in below:
            yield from _runs_below(folder, depth - 1)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def require_run(run: str) -> Path:
    """The folder of a run that the user named. Raises UserError if it holds none."""
    folder = Path(run)
    if holds_run(folder):
        return folder
    near = [str(each) for each in find_runs(folder.parent)] if folder.parent.is_dir() else []
    hint = suggestion(run, near) or "`rollouts runs list` lists the runs in `runs`"
    raise UserError(in_lines(f"{run} holds no run: it has no {CONFIG}", hint))


def read_run(folder: Path) -> RunInfo:
    """One run. A file that is missing or cannot be read leaves out what it says; without its settings a run is
    damaged.
    """
    labels, summary, phases = read_labels(folder), read_json(folder / SUMMARY), phases_of(folder)
    started = str(read_json(phases[-1] / MANIFEST).get("started", ""))
    size = sum(size_of(folder))
    run = RunInfo(str(folder), "damaged", bytes=size, started=started, tags=labels.tags, note=labels.note)
    try:
        settings = read_config(folder)[0]
    except ConfigError as error:
        return msgspec.structs.replace(run, problem=str(error))
    state, problem = _state(folder, summary)
    logged = [sampled_lines(each / METRICS) for each in phases]
    steps = [_finished_steps(*each) for each in zip(phases, logged, strict=True)]
    asked, lines = [settings.get("steps"), settings.get("sft", {}).get("steps")], logged[-1]
    metric = REWARD if any(REWARD in line for line in lines) else LOSS
    curve = numbers_of(lines, metric)
    return msgspec.structs.replace(
        run,
        state=state,
        problem=problem,
        mode=str(settings.get("mode", "rl")),
        environment=_named(settings, "env"),
        model=str(settings.get("model", "")),
        loss=_named(settings, "loss"),
        steps=_total(steps),
        steps_asked=_total(asked),
        reward=summary.get("reward_mean", curve[-1] if curve and metric == REWARD else None),
        metric=metric if curve else "",
        curve=curve,
    )


def _finished_steps(phase: Path, lines: Sequence[Mapping[str, Any]]) -> int | None:
    """How many steps a run or a phase has finished: its summary says so, or else its metrics do. None if neither."""
    steps = read_json(phase / SUMMARY).get("steps")
    return int(steps) if steps is not None else lines[-1]["step"] + 1 if lines else None


def _total(counts: Sequence[int | None]) -> int | None:
    """The sum of those that are known; None if none is."""
    known = [count for count in counts if isinstance(count, int)]
    return sum(known) if known else None


def _state(folder: Path, summary: Mapping[str, Any]) -> tuple[State, str]:
    if any(writer_of(each) for each in {folder, *phases_of(folder)}):
        return "running", ""
    if not summary:
        is_cut = (folder / SUMMARY).exists()
        return ("damaged", f"{folder / SUMMARY} cannot be read") if is_cut else ("killed", "")
    status = summary.get("status")
    if status not in ("done", "failed", "interrupted"):
        return "damaged", f"{folder / SUMMARY} has the status {status!r}"
    return status, str(summary.get("error") or "")


def _named(settings: Mapping[str, Any], kind: str) -> str:
    """The names of the components of a kind, as the user typed them."""
    given = settings.get(kind, "")
    each = given if isinstance(given, list) else [given]
    return " + ".join(str(one.get("name", "")) if isinstance(one, dict) else str(one) for one in each)


def sampled_lines(path: Path, count: int = POINTS) -> list[dict[str, Any]]:
    """About `count` lines of a metrics file, evenly spread over it, with the first and the last; all of a short one.
    Incomplete lines are left out. Empty if the file cannot be read.
    """
    found: dict[int, dict[str, Any]] = {}
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            for place in sorted({size * index // count for index in range(count)}):
                file.seek(max(place - 1, 0))
                if place:
                    file.readline()  # the rest of a line
                found |= _metrics_in(file.readline())
            file.seek(max(size - _TAIL, 0))
            for line in reversed(file.read(_TAIL).splitlines(keepends=True)):
                if last := _metrics_in(line):
                    found |= last
                    break
    except OSError:
        return []
    return [found[step] for step in sorted(found)]


def _metrics_in(line: bytes) -> dict[int, dict[str, Any]]:
    try:
        metrics = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError:
        return {}
    step = metrics.get("step")
    return {step: metrics} if isinstance(step, int) and line.endswith(b"\n") else {}


def numbers_of(lines: Iterable[Mapping[str, Any]], metric: str) -> list[float]:
    """The values of a metric, without the lines that lack it."""
    return [float(line[metric]) for line in lines if isinstance(line.get(metric), int | float)]


def size_of(folder: Path) -> Iterator[int]:
    """The size of each file in a folder, in bytes. Files that are removed meanwhile are left out."""
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                yield os.lstat(os.path.join(where, name)).st_size
            except OSError:
                continue


def read_labels(folder: Path) -> Labels:
    """The tags and the note of a run; none if the file is missing or cannot be read."""
    try:
        return msgspec.json.decode(read_regular(folder / LABELS), type=Labels)
    except (OSError, msgspec.DecodeError):
        return Labels()


def check_tags(tags: Sequence[str]) -> None:
    """Raise ConfigError for a tag that is not one word."""
    for tag in tags:
        if not tag.strip() or any(char.isspace() for char in tag):
            raise ConfigError(f"{tag!r} is no tag; a tag is one word, such as best or ablation-2")


def write_labels(folder: Path, labels: Labels) -> None:
    """Replace the tags and the note of a run. Raises OutputError if the disk refuses."""
    try:
        write_whole(folder / LABELS, encode_indented(labels).encode())
    except OSError as error:
        raise OutputError(f"{folder / LABELS} cannot be written: {error.strerror or error}") from error
