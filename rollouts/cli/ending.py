"""Signals end a command: SIGTERM and SIGHUP as Ctrl-C does, with a summary. Errors and warnings that no command catches
(from threads, from destructors, from `warnings.warn`) become one line with the author's place: a note while a run is
open, otherwise a line on stderr, with the traceback in errors.log (`rollouts.error_log`). Not here: the files of an
interrupted run (`runs.session`), and an output that can no longer be written (`runs.streams`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any, TextIO

from rollouts.author_code import Place, shown
from rollouts.error_log import is_logging, report

SIGNALS = [each for each in signal.Signals if each.name in ("SIGTERM", "SIGHUP")]


@contextlib.contextmanager
def interrupted_by_signals() -> Iterator[list[int]]:
    """Within the block, the first SIGTERM or SIGHUP acts as Ctrl-C. Later ones do nothing, because some programs send
    several. Yields a list that will contain the signal, if one arrives.

    A signal that is ignored (`nohup`) or that already has a handler is not changed. A forked child ends at these
    signals as usual. Does nothing outside the main thread, because only that thread can have handlers.
    """
    received: list[int] = []
    owner = os.getpid()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        handler = signal.getsignal(signal.SIGINT)  # trio's handler in trio.run; SIG_IGN while a run ends
        if callable(handler) and not received:
            received.append(number)
            handler(signal.SIGINT, frame)

    with contextlib.ExitStack() as before:
        if threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
                before.enter_context(_deaf_to_interrupts())
            for number in SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, interrupt)
                    before.callback(signal.signal, number, signal.SIG_DFL)
        yield received


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Block SIGINT instead of ignoring it, so that trio installs the handler that `interrupt` calls. A shell makes
    the background commands of a script ignore SIGINT.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # this also drops a pending SIGINT
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


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
