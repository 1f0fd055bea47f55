"""Reports errors and warnings that no command catches: from threads, from destructors, from `warnings.warn`.

Each becomes one line with the author's place: a note while a run is open, otherwise a line on stderr. The traceback
goes to errors.log in the run folder (`rollouts.error_log`).
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any, TextIO

from rollouts.author_code import Place, shown
from rollouts.error_log import is_logging, report


@contextlib.contextmanager
def stray_errors_in_words() -> Iterator[None]:
    """Replace Python's hooks for these errors and warnings within the block. They print one line, and no traceback."""
    before = threading.excepthook, sys.unraisablehook, warnings.showwarning
    shown_before = before[2]

    def show(
        message: Any, category: Any, filename: str, lineno: int, file: TextIO | None = None, line: Any = None
    ) -> None:
        if file is None and category.__module__.partition(".")[0] == "rollouts":
            _say(f"{message} ({Place(filename, lineno, '')})" if lineno else str(message))
        else:
            shown_before(message, category, filename, lineno, file, line)

    threading.excepthook, sys.unraisablehook, warnings.showwarning = _of_a_thread, _of_a_destructor, show
    try:
        yield
    finally:
        threading.excepthook, sys.unraisablehook, warnings.showwarning = before


def _of_a_thread(error: threading.ExceptHookArgs) -> None:
    if error.exc_value is not None and not isinstance(error.exc_value, SystemExit):
        _tell(error.exc_value, "a thread")


def _of_a_destructor(error: Any) -> None:
    if error.exc_value is not None:
        _tell(error.exc_value, f"code that Python called by itself, {shown(error.object)},")


def _tell(error: BaseException, label: str) -> None:
    """Report the error to the open run, which shows one note for each line of code. Without a run, print it."""
    words = report(error, label)
    if not is_logging():
        _say(f"{label} failed: {words}")


def _say(words: str) -> None:
    if sys.stderr is not None:
        print(f"warning: {words}", file=sys.stderr, flush=True)
