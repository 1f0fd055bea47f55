"""The failure detector of rank 0, without ranks: a dictionary is the store, and the test sets the clock."""

from __future__ import annotations

import threading

import msgspec
import pytest
from rollouts_fsdp import heartbeats
from rollouts_fsdp.heartbeats import FailureDetector, RankStatus


class Clock:
    """`time`, as the judge sees it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Store:
    """A channel whose other end is the test. `looks` counts how often the judge has read it all."""

    def __init__(self) -> None:
        self.said: dict[str, bytes] = {}
        self.looked = threading.Semaphore(0)

    def read(self, name: str) -> bytes | None:
        if name == "beat/2":  # the last that it reads of the last rank
            self.looked.release()
        return self.said.get(name)

    def beat(self, rank: int, number: int) -> None:
        self.said[f"beat/{rank}"] = msgspec.msgpack.encode(RankStatus(beat=number))

    def wait(self) -> None:
        """Until the judge has looked twice: what came before this call was judged."""
        while self.looked.acquire(blocking=False):
            pass
        assert self.looked.acquire(timeout=5) and self.looked.acquire(timeout=5), "the judge looks no more"


@pytest.fixture
def judged(monkeypatch):
    """A clock, a store, the verdict when there is one, and a judge of three ranks that may take 100 s to start."""
    clock, store, verdicts = Clock(), Store(), list[str]()
    monkeypatch.setattr(heartbeats, "time", clock)
    monkeypatch.setattr(heartbeats, "BEAT_SECONDS", 0.01)
    heard = threading.Event()

    def keep(error):
        verdicts.append(str(error))
        heard.set()

    watch = FailureDetector(store, 3, {}, RankStatus(), 100.0, on_fault=keep)  # type: ignore[arg-type]
    yield clock, store, verdicts, heard
    watch.end()


def test_a_rank_that_never_beats_is_declared_silent(judged):
    clock, store, verdicts, heard = judged
    store.beat(1, 1)
    store.wait()
    for number in range(2, 6):  # rank 1 beats on, for 100 s
        clock.now += 25.0
        store.beat(1, number)
        store.wait()
    assert verdicts == []
    clock.now += 1.0
    assert heard.wait(5)
    assert "rank 2 did not start within 100 s" in verdicts[0] and "--training.start-seconds" in verdicts[0]


def test_a_rank_that_has_begun_may_be_silent_for_less_long(judged):
    clock, store, verdicts, heard = judged
    store.beat(1, 1)
    store.beat(2, 1)
    store.wait()
    clock.now += 20.0
    store.beat(1, 2)
    store.wait()
    assert verdicts == []
    clock.now += 11.0
    assert heard.wait(5)
    assert "rank 2 sent no heartbeat for 31 s" in verdicts[0]
