"""The thread that runs an author's plain code: what a wait that ended early leaves."""

from __future__ import annotations

import signal
import threading

import pytest

from rollouts.env.threads import AuthorThread


def test_no_call_gets_the_result_of_one_that_ctrl_c_ended() -> None:
    thread, release = AuthorThread(), threading.Event()
    timer = threading.Timer(0.1, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))

    def first() -> str:
        timer.start()
        release.wait(5)
        return "first"

    with pytest.raises(KeyboardInterrupt):
        thread.call(first, 5.0)
    release.set()
    with pytest.raises(AssertionError, match="an earlier call"):
        thread.call(lambda: "second", 5.0)
