"""What ends a command from outside, and what must not: signals, and an output that cannot be written any more.

SIGTERM and SIGHUP end a command as Ctrl-C does, with a summary. A standard output that was closed (`| head -3`), or
whose disk is full, ends no run: the display falls silent. Left out: what an interrupted run leaves behind
(`runs.session`).
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
    """Within the block the first SIGTERM or SIGHUP does what Ctrl-C does, and later ones do nothing: what sends them
    often sends several. Gives a list of the signal that came.

    A signal that is ignored (`nohup`) or that has a handler already is left as it is. In a child that was forked the
    signals end it, as they do elsewhere. Does nothing outside the main thread, which alone can have handlers.
    """
    received: list[int] = []
    owner = os.getpid()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        handler = signal.getsignal(signal.SIGINT)  # trio's own within trio.run; ignored where a run is ending already
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
    """SIGINT is blocked instead of ignored, so that trio installs the handler that `interrupt` calls. Shells ignore it
    for what a script starts in the background.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # which also drops one that is waiting
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


@contextlib.contextmanager
def silent_when_closed(name: Literal["stdout", "stderr"]) -> Iterator[None]:
    """Within the block, no write to `sys.stdout` (or `sys.stderr`) raises."""
    before: TextIO | None = getattr(sys, name)
    if before is None:  # closed before this process began; Python writes nowhere then
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
    """A text stream whose writes do not fail. After the first failure its file is /dev/null, so that no other writer
    to it fails, and what is left in its buffers can be flushed at exit. Everything else is the stream's own.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As the stream's; characters that its encoding lacks are escaped."""
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
        """As the stream's."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """As the stream's."""
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
