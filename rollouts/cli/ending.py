"""Signals end a command. An output that can no longer be written does not.

SIGTERM and SIGHUP end a command as Ctrl-C does, with a summary. If standard output is closed (`| head -3`) or its disk
is full, the run continues and shows nothing more. Not here: the files of an interrupted run (`runs.session`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Literal, TextIO

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
def silent_when_closed(name: Literal["stdout", "stderr"]) -> Iterator[None]:
    """Within the block, no write to `sys.stdout` (or `sys.stderr`) raises."""
    before: TextIO | None = getattr(sys, name)
    if before is None:  # the stream was closed before this process began
        yield
        return
    stream = _SilentWhenClosed(before)
    setattr(sys, name, stream)
    try:
        yield
    finally:
        stream.flush()
        if getattr(sys, name) is stream:
            setattr(sys, name, before)


class _SilentWhenClosed:
    """A text stream whose writes do not fail. After the first failure, its file descriptor is /dev/null, so other
    writers to this descriptor do not fail either, and buffers can be flushed at exit. All other attributes are those of
    the stream.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write to the stream. Characters that its encoding lacks are escaped."""
        try:
            try:
                return self._stream.write(text)
            except UnicodeEncodeError as error:
                escaped = text.encode(error.encoding, "backslashreplace").decode(error.encoding)
                return self._stream.write(escaped)
        except (OSError, ValueError):  # a ValueError: the file object was closed
            self._fall_silent()
            return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each of the lines."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the stream."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._fall_silent()

    def _fall_silent(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, self._stream.fileno())
            finally:
                os.close(nowhere)
            self._stream.flush()
