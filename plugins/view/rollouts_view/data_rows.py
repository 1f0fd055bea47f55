"""Training data for the page: the rows that are shown, and what is counted over the first thousand.

Only the rows of a page are read. Of a JSONL file the place of each line is found in the background, so any of a million
rows is read at once; other formats are read from their begin. No model and no row is loaded from elsewhere, and no code
that comes with them is run.
"""

from __future__ import annotations

import itertools
import json
import statistics
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rollouts.author_code import printable
from rollouts.chat.token_texts import token_texts
from rollouts.config.convert import unflagged
from rollouts.config.flags import Tree
from rollouts.config.settings import Settings
from rollouts.data.conversations import BadRowError
from rollouts.data.loaders import NotARow, bounded_row, json_lines
from rollouts.data.source import COLUMNS, DataRow, Loader, choose_loader, open_rows, renamed, split_is_lines
from rollouts.errors import ConfigError, UserError, first_line, words_of
from rollouts.plugins.manager import PluginManager
from rollouts.runs.inspecting import Inspection, ReadRow, RowReader, bins_of, conversation_of, sample_of
from rollouts.training.datasets.chat_rows import Cut

ROW_BYTES_MAX = 8 << 20  # of one line that is shown
BAD_MAX = 50  # rows that cannot be used, of which the reason is kept
WAIT_SECONDS = 0.4  # how long an answer waits for the tokenizer
BLOCK = 1 << 20
NOT_SHOWN = ("limit", "seed", "streaming", "bad_rows", "held_out", "patience", "processes", "id", "answer")
"""The settings of rows that decide nothing on the page, which shows all rows of a file in their order."""


class Total(NamedTuple):
    """How many rows are known, whether these are all, and whether more are being found."""

    rows: int
    is_whole: bool
    is_growing: bool


class LineRows:
    """The lines of a JSONL file. Their places are found by a thread."""

    def __init__(self, file: Path, columns: dict[str, str]) -> None:
        self._file, self._columns = file, columns
        self._offsets = array("Q", [0])
        self._is_done = False
        threading.Thread(target=self._scan, daemon=True, name=f"scans {file}").start()

    def _scan(self) -> None:
        place = 0
        try:
            with self._file.open("rb") as opened:
                while block := opened.read(BLOCK):
                    found, at = array("Q"), block.find(b"\n")
                    while at >= 0:
                        found.append(place + at + 1)
                        at = block.find(b"\n", at + 1)
                    self._offsets.extend(found)
                    place += len(block)
            if self._offsets[-1] != place:  # the last line has no newline
                self._offsets.append(place)
        except OSError:  # a disk that went away: what was found so far is shown
            pass
        finally:
            self._is_done = True

    def total(self) -> Total:
        """How many rows there are, as far as it is known."""
        is_done = self._is_done
        return Total(len(self._offsets) - 1, is_done, not is_done)

    def read(self, start: int, count: int) -> list[tuple[int, DataRow]]:
        """Rows with their numbers from 0. A blank line is no row."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not self._is_done and self.total().rows < start + count and time.monotonic() < deadline:
            time.sleep(0.01)
        end = min(start + count, self.total().rows)
        found: list[tuple[int, DataRow]] = []
        try:
            with self._file.open("rb") as opened:
                for number in range(start, end):
                    begin, length = self._offsets[number], self._offsets[number + 1] - self._offsets[number]
                    opened.seek(begin)
                    place = f"{self._file}, line {number + 1}"
                    value = self._value(opened.read(min(length, ROW_BYTES_MAX)), length, place, is_first=number == 0)
                    if value != NotARow(""):
                        found.append((number, DataRow(place, value)))
        except OSError as error:
            raise ConfigError(f"{self._file} cannot be read: {error.strerror or error}") from error
        return found

    def _value(self, line: bytes, length: int, place: str, *, is_first: bool) -> Any:
        if length > ROW_BYTES_MAX:
            return NotARow(f"it has {length:,} bytes; the page shows rows of {ROW_BYTES_MAX >> 20} MiB at most")
        try:
            (value,) = json_lines([line.decode("utf-8-sig" if is_first else "utf-8")])
            return renamed(bounded_row(value), self._columns, place)
        except UnicodeDecodeError as error:
            return NotARow(f"it is not text in UTF-8: {error}")
        except ConfigError as error:  # a column that it lacks
            return NotARow(first_line(error))


class SequentialRows:
    """The rows of another format, read one after the other. An earlier one is read from the begin again."""

    def __init__(self, opener: Callable[[], Iterator[DataRow]]) -> None:
        self._opener, self._lock = opener, threading.Lock()
        self._rows: Iterator[DataRow] = iter(())
        self._at = 0
        self._is_open = self._is_done = False

    def total(self) -> Total:
        """How many rows were read so far."""
        return Total(self._at, self._is_done, False)

    def read(self, start: int, count: int) -> list[tuple[int, DataRow]]:
        """Rows with their numbers from 0. A blank line is no row."""
        with self._lock:
            if not self._is_open or start < self._at:
                self._rows, self._at, self._is_open, self._is_done = self._opener(), 0, True, False
            for _ in itertools.islice(self._rows, max(0, start - self._at)):
                self._at += 1
            found = [(start + place, row) for place, row in enumerate(itertools.islice(self._rows, count))]
            self._at += len(found)
            self._is_done = self._is_done or len(found) < count
            return found


def open_rows_of(loader: Loader, data: Tree) -> LineRows | SequentialRows:
    """The rows of some data in the order of the file. Raises UserError."""
    columns = {column: value for column in COLUMNS if (value := getattr(loader.rows, column))}
    file = Path(loader.source)
    if split_is_lines(loader) and file.suffix != ".gz":
        if not file.is_file():
            raise ConfigError(f"{file} cannot be read: there is no such file")
        return LineRows(file, columns)
    return SequentialRows(lambda: open_rows(data | {"bad_rows": "skip"}))


class OpenData:
    """Some data with settings, as the page shows it. Several threads may ask. `tree` has settings of a run, and `first`
    is the number of rows that are counted.

    Raises UserError if no loader reads the data.
    """

    def __init__(self, tree: Tree, first: int) -> None:
        self.loader = choose_loader(PluginManager(), tree["data"])
        data = {name: value for name, value in tree["data"].items() if name not in NOT_SHOWN}
        self._tree = tree | {"data": data}
        self._model = str(unflagged(tree.get("model", Settings.model)))
        self.rows = open_rows_of(self.loader, data)
        self.note = ""
        self._reader: RowReader | None = None
        self._lock, self._ready = threading.Lock(), threading.Event()  # a tokenizer is not safe in two threads
        self._more = threading.Condition()
        self._first, self._counted, self._is_closed, self._is_done, self._problem = first, 0, False, False, ""
        self._inspection = Inspection()
        threading.Thread(target=self._work, daemon=True, name="counts rows").start()

    def close(self) -> None:
        """End the thread that counts."""
        with self._more:
            self._is_closed = True
            self._more.notify_all()

    def page(self, start: int, count: int) -> list[dict[str, Any]]:
        """The rows from `start` on, with their tokens as soon as the tokenizer is loaded."""
        self._ready.wait(WAIT_SECONDS)
        return [self._shown(number, row) for number, row in self.rows.read(start, count)]

    def is_ready(self) -> bool:
        """Whether rows have their tokens, or are known to have none."""
        return self._ready.is_set()

    def summary(self, first: int) -> dict[str, Any]:
        """What is counted so far. Counts up to `first` rows, if that is more than before."""
        with self._more:
            self._first = max(self._first, first)
            self._more.notify_all()
            found = self._inspection
            return {
                "rows": self._counted,
                "first": self._first,
                "done": self._is_done or self._counted >= self._first,
                "problem": self._problem,
                "words": found.words(self.loader.name, self._model),
                "bins": bins_of(found.lengths) if found.lengths else [],
                "median": statistics.median(found.lengths) if found.lengths else None,
                "longest": max(found.lengths, default=0),
                "tokens": sum(found.lengths),
                "trained": sum(found.trained),
                "cut": found.cut._asdict(),
                "unusable": found.unusable,
                "bad": [{"place": place, "why": why, "sample": sample} for place, why, sample in found.bad],
            }

    def _work(self) -> None:
        try:
            self._reader = RowReader(self._tree, local_files_only=True)
        except UserError as error:
            self.note = f"tokens are not shown: {error}"
        except Exception as error:  # a damaged tokenizer; the library raises anything
            self.note = f"tokens are not shown: the tokenizer cannot be loaded: {words_of(error)}"
        self._ready.set()
        try:
            for place, value in open_rows(self._tree["data"] | {"bad_rows": "skip"}):
                with self._more:
                    while self._counted >= self._first and not self._is_closed:
                        self._more.wait()
                    if self._is_closed:
                        return
                read = self._read(value)
                with self._more:
                    self._inspection.add_row(place, read, bad=BAD_MAX)
                    self._counted += 1
        except UserError as error:
            self._problem = str(error)
        except Exception as error:  # a tokenizer or a chat template; the libraries raise anything
            self._problem = f"counting ended: {words_of(error)}"
        with self._more:
            self._is_done = True

    def _read(self, value: Any) -> ReadRow:
        if self._reader is not None:
            with self._lock:
                return self._reader.read(value)
        try:
            return ReadRow(conversation_of(value), [], Cut())
        except BadRowError as error:
            return ReadRow(None, [], Cut(), str(error), sample_of(value))

    def _shown(self, number: int, row: DataRow) -> dict[str, Any]:
        read = self._read(row.value)
        shown: dict[str, Any] = {"number": number, "place": row.place, "bad": read.bad, "sample": read.sample}
        if read.conversation is None:
            return shown
        with self._lock:
            texts = [self._texts(each.tokens) for each in read.rows]
        pairs = zip(read.rows, texts, strict=True)
        sequences = [{"tokens": each.tokens, "texts": own, "mask": each.loss_mask} for each, own in pairs]
        found = read.conversation
        return shown | {
            "form": found.form,
            "messages": found.messages,
            "tools": [json.dumps(tool) for tool in found.tools],
            "sequences": sequences,
            "cut": read.cut._asdict(),
        }

    def _texts(self, tokens: list[int]) -> list[str]:
        assert self._reader is not None, "a sequence has tokens, so there is a tokenizer"
        return [printable(text) for text in token_texts(tokens, self._reader.chat.tokenizer)]
