"""Signals end a command: SIGTERM and SIGHUP as Ctrl-C does, with a summary. Not here: the files of an interrupted run
(`runs.session`), and an output that can no longer be written (`runs.streams`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

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
