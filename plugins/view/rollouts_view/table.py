"""The trajectories of one step as a table: a row for each line, read by a thread while the first rows are shown.

Numbers are kept as arrays and texts are shared, so a million rows take about 130 MB. Not here: messages and tokens of a
row (`rollout`).
"""

from __future__ import annotations

import threading
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollouts.author_code import printable
from rollouts.errors import ConfigError, suggestion
from rollouts.runs.times import open_lines
from rollouts.types import Task
from rollouts_view.filters import Column, choose

TASK_CHARACTERS = 100
TEXT_CHARACTERS = 300
PROBLEMS_MAX = 100
BLOCK = 500  # lines; then other threads have a turn
PARTS_MAX = 64
MISSING = float("nan")
COUNTS = ("tool_calls", "tool_failures")


class _Segment(msgspec.Struct):
    loss_mask: list[float]
    versions: list[int] = []


class _Line(msgspec.Struct):
    """What a table shows of a line. The messages are skipped."""

    group: int
    rollout: int
    task: Task
    status: str
    reward: float | None
    parts: dict[str, float | None] = {}
    why: str = ""
    advantage: float | None = None
    dropped: str | None = None
    metrics: dict[str, float | None] = {}
    segments: list[_Segment] = []
    error: str | None = None
    role: str = ""
    temperature: float | None = None
    staleness: int | None = None


_DECODER = msgspec.json.Decoder(_Line)


class Stamp(NamedTuple):
    """What changes if a file is written again."""

    size: int
    mtime_ns: int


def stamp_of(file: Path) -> Stamp:
    """The stamp of a file. Raises ConfigError if it cannot be read."""
    try:
        stat = file.stat()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    return Stamp(stat.st_size, stat.st_mtime_ns)


class View(NamedTuple):
    """The rows that an expression keeps, in an order: `rows` are numbers of rows."""

    rows: Sequence[int]
    scanned: int


class Table:
    """The rows of one file. Reading begins at once, in a thread of its own; `wait` waits for it."""

    def __init__(self, file: Path) -> None:
        self.file, self.stamp = file, stamp_of(file)
        self.lines = open_lines(file)
        self.numbers: dict[str, array[Any]] = {}
        self.texts: dict[str, list[str]] = {}
        self.line: array[int] = array("I")  # the number of each row's line: damaged lines have no row
        self.keys: array[int] = array("q")  # the same for rows of one task
        self.problems: list[tuple[int, str]] = []
        self.damaged = 0
        self.scanned = 0  # lines
        self.count = 0  # rows that every column has
        self._shared: dict[str, str] = {}
        self._views: dict[tuple[str, str, bool], View] = {}
        self._summary: dict[str, Any] = {}
        self._done, self._closed, self._lock = threading.Event(), False, threading.Lock()
        threading.Thread(target=self._scan, daemon=True, name=f"reading {file.name}").start()

    @property
    def is_done(self) -> bool:
        """Whether all lines were read."""
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait until all lines were read, at most so long. Returns whether they were."""
        return self._done.wait(seconds)

    def close(self) -> None:
        """Stop reading."""
        self._closed = True

    def _scan(self) -> None:
        try:
            with open(self.file, "rb") as opened:
                for number, raw in enumerate(opened):
                    try:
                        self._add(number, _DECODER.decode(raw))
                    except (msgspec.DecodeError, UnicodeDecodeError) as error:
                        self._refuse(number, str(error))
                    self.scanned = number + 1
                    if self._closed:
                        return
                    if not self.scanned % BLOCK:
                        self._done.wait(0.0005)  # a pause: this thread would hold Python's lock else
        except OSError as error:
            self._refuse(self.scanned, f"{self.file} cannot be read: {error.strerror or error}")
        finally:
            self._done.set()

    def _refuse(self, number: int, why: str) -> None:
        self.damaged += 1
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append((number, why))

    def _add(self, number: int, line: _Line) -> None:
        self.line.append(number)
        self.keys.append(hash((line.task.env, line.task.key, line.role)))
        self._numbers(
            group=line.group,
            rollout=line.rollout,
            reward=line.reward,
            advantage=line.advantage,
            turns=line.metrics.get("turns"),
            tokens=sum(len(segment.loss_mask) for segment in line.segments),
            sampled=sum(len(segment.loss_mask) - segment.loss_mask.count(0) for segment in line.segments),
        )
        self._sparse_numbers(line)
        self._text("task", line.task.id or _beginning(line.task), always=True)
        self._text("status", line.status, always=True)
        for name in ("dropped", "role", "error", "why"):
            self._text(name, getattr(line, name) or "")
        self._text("env", line.task.env)
        self.count += 1

    def _sparse_numbers(self, line: _Line) -> None:
        found: dict[str, float | None] = {name: line.metrics[name] for name in COUNTS if name in line.metrics}

        versions = [version for segment in line.segments for version in segment.versions if version >= 0]
        if versions:
            found["oldest_version"], found["newest_version"] = min(versions), max(versions)
        if line.staleness is not None:
            found["staleness"] = line.staleness
        if line.temperature is not None:
            found["temperature"] = line.temperature
        found |= {f"part.{name}": value for name, value in line.parts.items()}
        found |= {f"metric.{name[7:]}": each for name, each in line.metrics.items() if name.startswith("metric/")}
        for name in [each for each in found if each not in self.numbers][: PARTS_MAX - len(self.numbers)]:
            self.numbers[name] = array("d", [MISSING]) * self.count
        for name, values in self.numbers.items():
            if len(values) == self.count:
                value = found.get(name)
                values.append(MISSING if value is None else value)

    def _numbers(self, **values: float | None) -> None:
        for name, value in values.items():
            self.numbers.setdefault(name, array("d")).append(MISSING if value is None else value)

    def _text(self, name: str, value: str, *, always: bool = False) -> None:
        column = self.texts.get(name)
        if column is None:
            if not value and not always:
                return
            column = self.texts[name] = [""] * self.count
        value = value[:TEXT_CHARACTERS]
        column.append(self._shared.setdefault(value, value))

    def columns(self) -> dict[str, Column]:
        """The columns that have a value in any row, by name."""
        found: dict[str, Column] = {"line": Column("number", self.line)}
        found |= {name: Column("number", values) for name, values in dict(self.numbers).items()}
        found |= {name: Column("text", values) for name, values in dict(self.texts).items()}
        return found

    def view(self, where: str, sort: str = "", *, descending: bool = False) -> View:
        """The rows that the expression `where` keeps, sorted by a column; missing values come last. Raises
        ConfigError.
        """
        with self._lock:
            known = self._views.get((where, sort, descending))
            is_done, scanned, count = self.is_done, self.scanned, self.count
            if known is not None and known.scanned == scanned:
                return known
            columns = self.columns()
            if sort and sort not in columns:
                hint = suggestion(sort, columns) or f"columns: {', '.join(columns)}"
                raise ConfigError(f"there is no column {sort!r} to sort by; {hint}")
            rows = choose(where, columns, count)
            if sort:
                rows = _sorted(rows, columns[sort], descending)
            found = View(rows if isinstance(rows, range) else array("I", rows), scanned)
            if is_done:
                self._views = dict(list(self._views.items())[-7:]) | {(where, sort, descending): found}
            return found

    def row(self, index: int) -> dict[str, Any]:
        """The values of a row by column; missing ones are left out."""
        found: dict[str, Any] = {"line": self.line[index]}
        for name, values in self.numbers.items():
            value = values[index]
            if value == value:
                found[name] = int(value) if value.is_integer() else value
        return found | {name: printable(values[index]) for name, values in self.texts.items() if values[index]}

    def summary(self) -> dict[str, Any]:
        """Counts of all rows: by status, by the reason for which their group was dropped; the mean reward. Empty until
        all lines were read.
        """
        if self.is_done and not self._summary:
            self._summary = self._counted()
        return self._summary

    def _counted(self) -> dict[str, Any]:
        rewards = [reward for reward in self.numbers.get("reward", ())[: self.count] if reward == reward]
        counts: dict[str, Mapping[str, int]] = {
            name: Counter(value for value in self.texts[name][: self.count] if value)
            for name in ("status", "dropped")
            if name in self.texts
        }
        return {"reward": sum(rewards) / len(rewards) if rewards else None, "judged": len(rewards), **counts}


def _beginning(task: Task) -> str:
    """The beginning of a task's own words: those of the last message of the user."""
    said = [message.text for message in task.messages if message.role == "user"] or [""]
    return " ".join(said[-1][: 4 * TASK_CHARACTERS].split())[:TASK_CHARACTERS]


def _sorted(rows: Sequence[int], column: Column, descending: bool) -> list[int]:
    values = column.values
    if column.kind == "text":
        return sorted(rows, key=values.__getitem__, reverse=descending)
    known = [row for row in rows if values[row] == values[row]]
    missing = [row for row in rows if values[row] != values[row]]
    return sorted(known, key=values.__getitem__, reverse=descending) + missing
