"""Write errors.log in a run's folder: the tracebacks of errors that an author's code raised.

    with ErrorLog(folder / ERRORS, note=print):
        why = report(error, "the reward brevity")

The first error of each line of code is written, with one note for the user. Later errors of the same line are counted,
and the counts are written at the end. An error that ends a command before its run has a folder is not written: its
message names the line (`rollouts.errors.words_of`).
"""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple, Self

from rollouts.author_code import authors_code, place_of
from rollouts.errors import RemoteError, words_of

ERRORS = "errors.log"
PLACES_MAX = 100  # lines of code whose errors are written; errors of other lines are counted together
NOTES_MAX = 10  # the largest number of notes of one log
TRACEBACK_CHARACTERS_MAX = 20_000


class Fault(NamedTuple):
    """An error as plain text, which can be sent to another process: its words, its place and its traceback."""

    words: str
    place: str
    traceback: str


def fault_of(error: BaseException) -> Fault:
    """The error as text."""
    if isinstance(error, RemoteError):
        return Fault(error.words, error.place, error.traceback)
    words = words_of(error)
    try:
        with authors_code():
            text = "".join(traceback.format_exception(error))
    except Exception:  # an author's exception may not be printable
        text = words
    if len(text) > TRACEBACK_CHARACTERS_MAX:
        text = (
            f"[the first {len(text) - TRACEBACK_CHARACTERS_MAX} characters are left out]\n"
            + text[-TRACEBACK_CHARACTERS_MAX:]
        )
    return Fault(words, f"{type(error).__name__} {place_of(error) or ''}", text.encode(errors="replace").decode())


class ErrorLog:
    """Records the errors of one run inside its `with` block. Any thread may report an error.

    `note` receives one line for the user. `shown` is the name of the file in this line (None: its path). The file is
    created at the first error. An existing file of an earlier process is appended to.
    """

    def __init__(self, path: Path, note: Callable[[str], None], shown: Path | None = None) -> None:
        self.path, self.shown = path, shown or path
        self._note = note
        self._counts: Counter[tuple[str, str]] = Counter()
        self._notes = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        _open.append(self)
        self._outer = _current.get()
        _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _open.remove(self)
        _current.set(self._outer)
        repeated = [f"{count:8} x {label}: {place}" for (label, place), count in self._counts.items() if count > 1]
        if repeated:
            self._write("=== counts of repeated errors\n" + "\n".join(repeated) + "\n")

    @property
    def has_errors(self) -> bool:
        """Whether anything was recorded."""
        return bool(self._counts)

    def record(self, fault: Fault, label: str, *, is_noted: bool = True) -> None:
        """Write an error and its note, unless the same line of code already raised one."""
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
        except OSError as error:  # for example, the disk is full; the episodes' own records still have the errors
            self._note(f"{self.shown} cannot be written: {error.strerror}")


_open: list[ErrorLog] = []
_current: ContextVar[ErrorLog | None] = ContextVar("error_log", default=None)  # several runs may share a process


def _log() -> ErrorLog | None:
    """The log of the run that this code belongs to; in a thread that serves several runs, the log opened last."""
    own = _current.get()
    return own if own in _open else _open[-1] if _open else None


def is_logging() -> bool:
    """Whether a run with an error log is running."""
    return bool(_open)


def report(error: BaseException, label: str, *, is_noted: bool = True) -> str:
    """Write the error to the error log of its run, and return its description with the author's line (`words_of`).

    `label` names the component, such as `the reward brevity`. With `is_noted=False`, no note is shown, because the
    caller shows the error.
    """
    if not _open:
        return words_of(error)
    fault = fault_of(error)
    report_fault(fault, label, is_noted=is_noted)
    return fault.words


def report_fault(fault: Fault, label: str, *, is_noted: bool = True) -> None:
    """Write an error that is already text to the error log."""
    log = _log()
    if log is not None:
        log.record(fault, label, is_noted=is_noted)
