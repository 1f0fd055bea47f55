"""Which runs there are, and what their folders say. What was read is kept until its files change."""

from __future__ import annotations

import contextlib
import re
import threading
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from rollouts.config.flags import Tree
from rollouts.disk import open_regular
from rollouts.errors import ConfigError, UserError, in_lines, suggestion
from rollouts.runs.folder import CONFIG, METRICS, REMOVED_BY, SUMMARY, TOKENS, phases_of, read_json, removed_steps
from rollouts.runs.manifest import MANIFEST
from rollouts.runs.times import Lines, open_lines, times_of
from rollouts_view.listing import LABELS, RunInfo, find_runs, read_run
from rollouts_view.table import Stamp, Table, stamp_of

TABLE_ROWS_MAX = 1_200_000  # rows of all tables that are kept
METRICS_KEPT = 32  # runs whose metrics are kept
POINTS_MAX = 1000  # of a curve
_NAME = re.compile(r"(?:(step|eval)_(\d{6,})|eval)")
_ENDED = ("done", "failed", "interrupted")

Curve = list[tuple[float, float]]


class Spread(NamedTuple):
    """All values of one metric: how many steps have one, their mean, the least, the greatest and the last."""

    steps: int
    mean: float
    least: float
    most: float
    last: float


class _Metrics(NamedTuple):
    """The metrics of a run by name."""

    curves: dict[str, Curve]
    spreads: dict[str, Spread]


class Catalog:
    """The runs in some directories. Several threads may use it. `data` has the files of training data that the page
    shows besides, by name, each with the settings that decide its tokens.
    """

    def __init__(self, places: Sequence[Path], data: Mapping[str, Tree] = MappingProxyType({})) -> None:
        self.places, self.data = list(places), data
        self._lock = threading.RLock()
        self._folders: dict[str, Path] = {}
        self._infos: dict[str, tuple[list[Stamp | None], RunInfo]] = {}
        self._tables: dict[Path, Table] = {}
        self._metrics: dict[Path, tuple[Stamp, _Metrics]] = {}

    def runs(self) -> list[RunInfo]:
        """All runs, the newest first. A place that was removed meanwhile has none."""
        with self._lock:
            self._find()
            found = [self._info(name, folder) for name, folder in self._folders.items()]
        return sorted(found, key=lambda run: (run.started, run.name), reverse=True)

    def _find(self) -> None:
        found = [each for place in self.places if place.is_dir() for each in find_runs(place)]
        self._folders = {str(folder): folder for folder in found}

    def folder(self, run: str) -> Path:
        """The folder of a run. Raises UserError if none of the directories has it."""
        with self._lock:
            if run not in self._folders or not self._folders[run].is_dir():
                self._find()
            if run not in self._folders:
                hint = suggestion(run, self._folders) or f"there are: {', '.join(sorted(self._folders)[:10]) or 'none'}"
                raise UserError(in_lines(f"there is no run {run}", hint))
            return self._folders[run]

    def info(self, run: str) -> RunInfo:
        """One run. Raises UserError if there is none."""
        folder = self.folder(run)
        with self._lock:
            return self._info(run, folder)

    def _info(self, run: str, folder: Path) -> RunInfo:
        """What `rollouts runs list` says of it; of a run that has ended, read once."""
        names = (CONFIG, SUMMARY, LABELS, MANIFEST, METRICS)
        stamps = [_stamp(each / name) for each in (folder, *phases_of(folder)) for name in names]
        kept = self._infos.get(run)
        if kept is not None and kept[0] == stamps and kept[1].state in _ENDED:
            return kept[1]
        found = read_run(folder)
        self._infos[run] = (stamps, found)
        return found

    def files(self, run: str) -> list[dict[str, Any]]:
        """The files of trajectories of a run, in the order of steps; an evaluation follows the step before it."""
        found = []
        for file in _trajectories(self.folder(run)).glob("*.jsonl"):
            name = _NAME.fullmatch(file.stem)
            if name is None or not file.is_file():
                continue
            stamp = _stamp(file)
            found.append(
                {
                    "name": file.stem,
                    "kind": "step" if name[1] == "step" else "evaluation",
                    "step": None if name[2] is None else int(name[2]),
                    "bytes": stamp.size if stamp else 0,
                    "tokens": file.with_suffix(TOKENS).exists(),
                    "times": times_of(file).exists(),
                }
            )
        return sorted(found, key=lambda each: (each["step"] or 0, each["kind"] == "step"))

    def notes(self, run: str) -> list[str]:
        """What a reader should know of the trajectories of a run."""
        folder = phases_of(self.folder(run))[-1]
        removed = removed_steps(folder)
        return [f"the trajectories of the first {removed} steps were removed by {REMOVED_BY}"] if removed else []

    def file(self, run: str, name: str) -> Path:
        """A file of trajectories. Raises UserError if the run has none of that name."""
        file = _trajectories(self.folder(run)) / f"{name}.jsonl"
        if _NAME.fullmatch(name) is None or not file.is_file():
            names = [each["name"] for each in self.files(run)]
            hint = suggestion(name, names) or (f"it has {names[0]} to {names[-1]}" if names else "it has none")
            raise UserError(in_lines(f"{run} has no trajectories {name}", hint))
        return file

    def lines(self, run: str, name: str) -> Lines:
        """The lines of a file. Raises UserError."""
        return open_lines(self.file(run, name))

    def table(self, run: str, name: str) -> Table:
        """The table of a file, as the file is now. Raises UserError."""
        file = self.file(run, name)
        with self._lock:
            table = self._tables.pop(file, None)
            if table is None or table.stamp != stamp_of(file):
                if table is not None:
                    table.close()
                table = Table(file)
            self._tables[file] = table  # the last one was used last
            total = sum(each.lines.total for each in self._tables.values())
            for other in list(self._tables)[:-1]:
                if total > TABLE_ROWS_MAX:
                    total -= self._tables[other].lines.total
                    self._tables.pop(other).close()
            return table

    def metrics(self, run: str) -> dict[str, Curve]:
        """All metrics of a run as (step, value). Lines that are damaged or not yet complete are left out."""
        return self._read(run).curves

    def spreads(self, run: str) -> dict[str, Spread]:
        """The spread of each metric of a run, over all of its steps."""
        return self._read(run).spreads

    def _read(self, run: str) -> _Metrics:
        file = phases_of(self.folder(run))[-1] / METRICS
        stamp = _stamp(file)
        if stamp is None:
            return _Metrics({}, {})
        with self._lock:
            kept = self._metrics.pop(file, None)
            if kept is None or kept[0] != stamp:
                kept = (stamp, _read_metrics(file))
            self._metrics[file] = kept
            for oldest in list(self._metrics)[:-METRICS_KEPT]:
                del self._metrics[oldest]
            return kept[1]

    def manifest(self, run: str) -> dict[str, Any]:
        """The manifest of a run; empty if it has none."""
        return read_json(phases_of(self.folder(run))[-1] / MANIFEST)

    def summary(self, run: str) -> dict[str, Any]:
        """The summary of a run; empty if it has not ended."""
        return read_json(self.folder(run) / SUMMARY)


def _trajectories(folder: Path) -> Path:
    return phases_of(folder)[-1] / "trajectories"


def _stamp(file: Path) -> Stamp | None:
    try:
        return stamp_of(file)
    except ConfigError:
        return None


def _read_metrics(file: Path) -> _Metrics:
    steps: dict[str, array[float]] = {}
    values: dict[str, array[float]] = {}
    decoder = msgspec.json.Decoder(dict[str, Any])
    with contextlib.suppress(OSError), open_regular(file) as opened:  # the rest of the run can be shown
        for raw in opened:
            try:
                line = decoder.decode(raw)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            step = line.pop("step", None)
            for name, value in line.items():
                if isinstance(step, int) and isinstance(value, int | float):
                    steps.setdefault(name, array("d")).append(step)
                    values.setdefault(name, array("d")).append(value)
    known = sorted(values.items())
    spreads = {name: Spread(len(each), _mean(each), min(each), max(each), each[-1]) for name, each in known}
    return _Metrics({name: thinned(steps[name], values[name]) for name in spreads}, spreads)


def thinned(steps: Sequence[float], values: Sequence[float]) -> Curve:
    """At most POINTS_MAX points of a curve. Of neighbors that become one point, it has their mean and the last step."""
    width = -(-len(values) // POINTS_MAX)
    if width <= 1:
        return list(zip(steps, values, strict=True))
    starts = range(0, len(values), width)
    return [(steps[min(at + width, len(steps)) - 1], _mean(values[at : at + width])) for at in starts]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
