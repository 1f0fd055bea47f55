"""Loggers whose service fails, hangs or is slow: what a run loses, how long it waits, and what it says."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from rollouts.errors import ConfigError, RunError
from rollouts.loggers import background
from rollouts.runs import loggers as loggers_of_a_run
from rollouts.runs.loggers import Loggers


class Service:
    """Records calls; `fails` says which attempt of a call, from 0, raises."""

    def __init__(self, fails=lambda step, attempt: False):
        self.steps: list[int] = []
        self.threads = {threading.current_thread()}
        self._fails, self._attempts = fails, dict[int, int]()
        self.is_closed = False

    def log(self, metrics, step):
        self.threads.add(threading.current_thread())
        attempt = self._attempts[step] = self._attempts.get(step, -1) + 1
        if self._fails(step, attempt):
            raise ConnectionError(f"no route for step {step}")
        self.steps.append(step)

    def close(self):
        self.threads.add(threading.current_thread())
        self.is_closed = True


def opened(tmp_path, make, notes=None, in_step=False):
    """Loggers with one of this kind, called `far`."""
    chosen = SimpleNamespace(name="far", alias="far", component=lambda: make(), settings={})
    chosen.component.in_step = in_step
    loggers = Loggers(notes.append if notes is not None else print)
    loggers.open([chosen], tmp_path, {}, 0)
    return loggers, loggers._loggers["far"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(background, "PAUSES_SECONDS", (0.001, 0.001, 0.001))
    monkeypatch.setattr(loggers_of_a_run, "SAID_SECONDS", 0.05)


def until(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_one_thread_makes_calls_and_closes_it(tmp_path):
    loggers, service = opened(tmp_path, Service)
    for step in range(5):
        loggers.log({"a": 1.0}, step)
    loggers.close()
    assert service.steps == [0, 1, 2, 3, 4] and service.is_closed and not loggers.faults and not loggers.lost
    (thread,) = service.threads
    assert thread is not threading.current_thread() and not thread.is_alive()


def test_a_call_that_fails_is_repeated_before_later_ones_and_noted_once(tmp_path):
    notes = []
    loggers, service = opened(tmp_path, lambda: Service(lambda step, attempt: attempt < 3), notes)
    loggers.log({}, 0)
    until(lambda: service.steps == [0])
    for step in (1, 2, 3):
        loggers.log({}, step)
    until(lambda: service.steps == [0, 1, 2, 3])
    loggers.close()
    (note,) = notes
    assert note.startswith("warning: the logger far failed: ConnectionError: no route for step 0 (")
    assert note.endswith("; the run goes on and tries it again")
    assert not loggers.lost and not loggers.faults


def test_a_call_that_always_fails_is_lost_and_no_other(tmp_path):
    loggers, service = opened(tmp_path, lambda: Service(lambda step, attempt: step == 1))
    for step in range(4):
        loggers.log({}, step)
    loggers.close()
    assert service.steps == [0, 2, 3] and service.is_closed
    assert loggers.lost == {"far": 1}
    (fault,) = loggers.faults
    assert "logger far: lost 1 of its 4 calls: ConnectionError: no route for step 1" in str(fault)


def test_an_outage_is_bounded_in_memory_and_keeps_the_newest(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "CALLS_MAX", 3)
    works, in_log = threading.Event(), threading.Event()

    class Slow(Service):
        def log(self, metrics, step):
            in_log.set()
            works.wait(5)
            super().log(metrics, step)

    loggers, service = opened(tmp_path, Slow)
    loggers.log({}, 0)
    in_log.wait(5)
    for step in range(1, 10):
        loggers.log({}, step)
    works.set()
    loggers.close()
    assert service.steps == [0, 7, 8, 9] and loggers.lost == {"far": 6}


@pytest.mark.parametrize("method", ["log", "close"])
def test_one_that_hangs_delays_neither_a_step_nor_the_end(tmp_path, method):
    hangs, notes = threading.Event(), []

    class Hangs(Service):
        def log(self, metrics, step):
            hangs.wait(20) if method == "log" else super().log(metrics, step)

        def close(self):
            hangs.wait(20)

    loggers, _ = opened(tmp_path, Hangs, notes)
    began = time.monotonic()
    for step in range(3):
        loggers.log({}, step)
    loggers.close(0.2)
    assert time.monotonic() - began < 5
    (note,), (fault,) = notes, loggers.faults
    assert note.startswith("waiting for the logger far, at most") and "it did not end in time" in str(fault)
    assert loggers.lost == ({"far": 3} if method == "log" else {})
    hangs.set()


def test_ctrl_c_ends_the_wait_for_all_of_them(tmp_path, monkeypatch):
    hangs = threading.Event()

    class Hangs(Service):
        def close(self):
            hangs.wait(20)

    loggers, _ = opened(tmp_path, Hangs)

    def wait(self, seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(background.BackgroundLogger, "wait", wait)
    loggers.close(20)
    hangs.set()
    assert "did not end in time" in str(loggers.faults[0])


def test_one_that_cannot_be_made_is_an_error_where_it_is_opened(tmp_path):
    def refuses():
        raise ConfigError("no key; type `login`")

    with pytest.raises(ConfigError, match="no key"):
        opened(tmp_path, refuses)


def test_one_that_cannot_be_made_may_be_left_out(tmp_path):
    """When a run is resumed, for example, during an outage. It is tried once."""
    made, notes = [], []

    def refuses():
        made.append(1)
        raise ConfigError("no answer")

    chosen = SimpleNamespace(name="far", alias="far", component=refuses, settings={})
    loggers = Loggers(notes.append)
    loggers.open([chosen], tmp_path, {}, 3, may_fail=True)
    loggers.open([chosen], tmp_path, {}, 3)
    loggers.log({}, 3)
    loggers.close()
    (note,), (fault,) = notes, loggers.faults
    assert note.startswith("warning: the logger far cannot be made, so the run goes on without it: ")
    assert "no answer" in note and "no answer" in str(fault) and len(made) == 1


def test_one_that_hangs_while_it_is_made_may_be_left_out(tmp_path, monkeypatch):
    """It is closed when it is made at last."""
    monkeypatch.setattr(loggers_of_a_run, "MADE_SECONDS", 0.05)
    answers, service, notes = threading.Event(), Service(), []

    def hangs():
        answers.wait()
        return service

    chosen = SimpleNamespace(name="far", alias="far", component=hangs, settings={})
    loggers = Loggers(notes.append)
    loggers.open([chosen], tmp_path, {}, 3, may_fail=True)
    loggers.log({}, 3)
    loggers.close()
    assert notes == [
        "warning: the logger far cannot be made, so the run goes on without it: it was not made within 0.05 s"
    ]
    assert not service.is_closed
    answers.set()
    until(lambda: service.is_closed)
    assert service.steps == []


def test_one_in_the_step_is_called_at_once_and_ends_the_run(tmp_path):
    loggers, service = opened(tmp_path, lambda: Service(lambda step, attempt: step == 1), in_step=True)
    loggers.log({}, 0)
    assert service.steps == [0] and service.threads == {threading.current_thread()}
    with pytest.raises(RunError, match="the logger far failed: ConnectionError: no route for step 1"):
        loggers.log({}, 1)
