"""errors.log in a run's folder: the traceback of each error that an author's code raised.

    with ErrorLog(folder / ERRORS, note=print):
        why = report(error, "the reward brevity")

The first error from a line is written. Later errors from the same line are counted, and the counts are written at the
end. The user gets one note for each line. Left out: errors that end a command before it has a folder. Their message has
the line (`rollouts.errors.words_of`), and their traceback is not kept.
"""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self

from rollouts.author_code import authors_code, place_of
from rollouts.errors import words_of

ERRORS = "errors.log"
PLACES_MAX = 100  # lines whose errors are written; errors from further lines are only counted
NOTES_MAX = 10  # notes of one log
TRACEBACK_CHARACTERS_MAX = 20_000


class Fault(NamedTuple):
    """An error as plain text, which can go to another process: in words, its place, and its traceback."""

    words: str
    place: str
    traceback: str


def fault_of(error: BaseException) -> Fault:
    """The error as text."""
    words = words_of(error)
    try:
        with authors_code():
            text = "".join(traceback.format_exception(error))
    except Exception:  # a class of the author may refuse to be printed
        text = words
    if len(text) > TRACEBACK_CHARACTERS_MAX:
        text = (
            f"[the first {len(text) - TRACEBACK_CHARACTERS_MAX} characters are left out]\n"
            + text[-TRACEBACK_CHARACTERS_MAX:]
        )
    return Fault(words, f"{type(error).__name__} {place_of(error) or ''}", text.encode(errors="replace").decode())


class ErrorLog:
    """The errors of one run, from the start of the `with` block to its end. Any thread may report to it.

    `note` is called with one line for the user, in which the file is named `shown` (None: `path`). The first error
    creates the file. If the file exists, new errors are appended.
    """

    def __init__(self, path: Path, note: Callable[[str], None], shown: Path | None = None) -> None:
        self.path, self.shown = path, shown or path
        self._note = note
        self._counts: Counter[tuple[str, str]] = Counter()
        self._notes = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        _open.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _open.remove(self)
        repeated = [f"{count:8} x {label}: {place}" for (label, place), count in self._counts.items() if count > 1]
        if repeated:
            self._write("=== how often each error came\n" + "\n".join(repeated) + "\n")

    @property
    def has_errors(self) -> bool:
        """Whether anything was recorded."""
        return bool(self._counts)

    def record(self, fault: Fault, label: str, *, is_noted: bool = True) -> None:
        """Write and note an error, unless one came from the same line before."""
        with self._lock:
            key = (label, fault.place)
            if key not in self._counts and len(self._counts) >= PLACES_MAX:
                key = ("other errors", "not written")
            self._counts[key] += 1
            if self._counts[key] > 1:
                return
            self._write(f"=== {label}: {fault.words}\n{fault.traceback.rstrip()}\n\n")
            if is_noted and self._notes < NOTES_MAX:
                self._notes += 1
                self._note(f"{label} failed: {fault.words}; its traceback is in {self.shown}")

    def _write(self, text: str) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:  # the disk is full, say: the errors themselves are in the episodes
            self._note(f"{self.shown} cannot be written: {error.strerror}")


_open: list[ErrorLog] = []


def is_logging() -> bool:
    """Whether an error log is open."""
    return bool(_open)


def report(error: BaseException, label: str, *, is_noted: bool = True) -> str:
    """The error in words, with the author's line (`words_of`). Its traceback goes to the error log that this process
    opened last, if one is open.

    `label` names the component, such as `the reward brevity`. With `is_noted` False the user gets no note: the caller
    shows the error itself, or the model reads it.
    """
    if not _open:
        return words_of(error)
    fault = fault_of(error)
    report_fault(fault, label, is_noted=is_noted)
    return fault.words


def report_fault(fault: Fault, label: str, *, is_noted: bool = False) -> None:
    """Log an error that is text already, such as one of another process."""
    if _open:
        _open[-1].record(fault, label, is_noted=is_noted)
