"""Import modules and files of authors. Here are the names of files as modules, and protection against modules that
do not return from their import: one that waits without end, and one that ends the process.

    with authors_code(), import_returns():
        module = importlib.import_module(name)

Only the main thread can be interrupted, so an import in another thread has no deadline. Code that holds Python's lock
all the time cannot be interrupted either.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from rollouts.author_code import shown
from rollouts.errors import ConfigError

SECONDS = 60.0  # how long an import may take without progress: it imports no module, and does not compute
COMPUTING = 0.1  # the share of one core from which the process computes; a loop that waits for something uses less
COMPUTED_MAX = 10.0  # how many times SECONDS of CPU time an import may take without importing a module
LOOKS = 12  # so often in this time. A library that takes long to load holds Python's lock, and counts as one look.
VARIABLE = "ROLLOUTS_IMPORT_SECONDS"
"""The environment variable that gives another time than SECONDS."""

_own = threading.local()  # `process`: the process in which this thread imports; a forked child may end
_lock = threading.Lock()
_importing: list[int] = []  # the thread of each import in progress
_leave = os._exit


class ImportProgress:
    """Whether an import makes progress. Call `has_stalled` every `pause` seconds. Raises ConfigError if the environment
    variable has no time.
    """

    def __init__(self) -> None:
        self._seconds = _seconds()
        self.pause = self._seconds / LOOKS
        self._known, self._looks = -1, 0
        self._begun = self._computed = time.process_time()

    def has_stalled(self) -> bool:
        """Whether the process neither imported a module nor computed at the last looks, or computed for too long since
        the last module.
        """
        known, self._known = self._known, len(sys.modules)
        computed, self._computed = self._computed, time.process_time()
        if self._known != known:
            self._begun = self._computed
        has_progress = self._known != known or self._computed - computed >= COMPUTING * self.pause
        self._looks = 0 if has_progress else self._looks + 1
        return self._looks >= LOOKS or self._has_computed_too_long

    @property
    def _has_computed_too_long(self) -> bool:
        return self._computed - self._begun >= COMPUTED_MAX * self._seconds

    def __str__(self) -> str:
        after = f"{self._seconds:g} s"
        if self._has_computed_too_long:
            after = f"{COMPUTED_MAX * self._seconds:g} s of CPU time"
        more = f"if it only needs longer, type before the command: {VARIABLE}={10 * self._seconds:g}"
        return f"it was still being imported after {after}; {more}"


class _Stopped(BaseException):
    """The import has to stop, because of `error`. A module does not catch this with `except Exception`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def import_returns() -> Iterator[None]:
    """Within the block, `os._exit` in this thread raises RuntimeError, and an import without progress TimeoutError.
    Raises ConfigError as Progress does.
    """
    progress, before = ImportProgress(), getattr(_own, "process", 0)
    with _lock:
        _importing.append(threading.get_ident())
        os._exit = _exit
    _own.process = os.getpid()
    try:
        with _deadline(progress):
            yield
    except _Stopped as stopped:
        raise stopped.error.with_traceback(stopped.__traceback__) from None
    finally:
        _own.process = before
        with _lock:
            _importing.pop()
            if not _importing:
                os._exit = _leave


def _exit(status: int) -> NoReturn:
    """In place of `os._exit`."""
    if getattr(_own, "process", 0) == os.getpid():
        raise _Stopped(RuntimeError(f"it called os._exit({shown(status)})"))
    _leave(status)


def _seconds() -> float:
    given = os.environ.get(VARIABLE, str(SECONDS))
    with contextlib.suppress(ValueError):
        if 0 < float(given) < threading.TIMEOUT_MAX:
            return float(given)
    raise ConfigError(f"{VARIABLE}={given}: expected a number of seconds above 0, such as {VARIABLE}=600")


@contextlib.contextmanager
def _deadline(progress: ImportProgress) -> Iterator[None]:
    """Raise _Stopped in the block if the import stalls. Does nothing while the timer of the process is in use, for
    example by the import around this one.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return

    def look(*_: Any) -> None:
        if progress.has_stalled():
            raise _Stopped(TimeoutError(str(progress)))

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, progress.pause, progress.pause)
    try:
        yield
    finally:
        if signal.getitimer(signal.ITIMER_REAL)[1]:  # else the module has set the timer
            signal.setitimer(signal.ITIMER_REAL, 0)
        if signal.getsignal(signal.SIGALRM) is look:  # else the handler is the module's
            signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)


# --- files ------------------------------------------------------------------------------------------------------------


def module_name(path: Path, content: bytes) -> str:
    """The name of the module of a file, which depends on the full path and the content of the file."""
    import hashlib

    digest = hashlib.sha256(str(path).encode() + b"\0" + content).hexdigest()[:12]
    stem = re.sub(r"\W", "_", path.stem)
    return f"rollouts_file_{stem}_{digest}"


def beside(path: Path) -> None:
    """Let a file import the files beside it: add its folder at the end of `sys.path`."""
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
