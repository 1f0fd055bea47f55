"""Who is still there: every rank says every second what it does, and rank 0 judges from it who died or hangs.

A rank that waits for another one inside a collective cannot tell why. So each rank has a second thread that goes on
beating while the first is stuck: it tells the command under way and the line of Python that it is at. Rank 0 reads the
beats, sees processes end that it started, and gives one verdict: which rank, at which command, and where.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rollouts.errors import RankError
from rollouts.training.backends.messages import Channel

__all__ = ["Beating", "Doing", "Watch"]

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 30.0  # a rank that was not heard of for so long is gone: beats need no collective and no model


class Doing(msgspec.Struct):
    """What a rank does: its command and which one it is, whether that is `done`, and where it is in Python; `meets`
    while it is inside torch's collectives, where it may wait for others.
    """

    command: str = "starting"
    number: int = 0
    done: bool = False
    place: str = ""
    meets: bool = False
    beat: int = 0

    def words(self) -> str:
        """For a message."""
        count = f", command {self.number}" if self.number else ""
        return f"{self.command}{count}{' (done)' if self.done else ''}"


class Beating:
    """This rank's beats, from a thread of their own. `doing` is changed by whoever works."""

    def __init__(self, channel: Channel, rank: int, *, on_silence: Callable[[], None] | None = None) -> None:
        """`on_silence` is called when rank 0 was not heard of, or the store is gone: for the ranks above it."""
        self.doing = Doing()
        self._channel = channel
        self._rank = rank
        self._on_silence = on_silence
        self._worker = threading.get_ident()
        self._ended = threading.Event()
        self._heard = time.monotonic()
        self._last: bytes | None = None
        self._thread = threading.Thread(target=self._run, name="rollouts-beat", daemon=True)
        self._thread.start()

    def works_in_this_thread(self) -> None:
        """From now on the place is that of the calling thread."""
        self._worker = threading.get_ident()

    def end(self) -> None:
        """No more beats."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            doing = self.doing
            doing.beat += 1
            doing.place, doing.meets = _place_of(self._worker)
            try:
                self._channel.post(f"beat/{self._rank}", msgspec.msgpack.encode(doing))
                if self._on_silence is not None:
                    self._listen()
            except Exception:  # the store is gone, and with it rank 0
                if self._on_silence is not None and not self._ended.is_set():
                    self._on_silence()
                return

    def _listen(self) -> None:
        last = self._channel.read("beat/0")
        if last != self._last:
            self._last, self._heard = last, time.monotonic()
        is_over = self._channel.read("over") is not None
        assert self._on_silence is not None, "only ranks above 0 listen"
        if is_over or time.monotonic() - self._heard > SILENCE_SECONDS:
            self._on_silence()


class Watch:
    """Rank 0's judge. `verdict` is the RankError, once there is one; then `on_verdict` was called with it."""

    def __init__(
        self,
        channel: Channel,
        world_size: int,
        processes: Mapping[int, subprocess.Popen[bytes]],
        last: Doing,
        on_verdict: Callable[[RankError], None],
    ) -> None:
        """`last` is what rank 0 does: the last command that it gave."""
        self.verdict: RankError | None = None
        self._channel = channel
        self._last = last
        self._world_size = world_size
        self._processes = dict(processes)
        self._on_verdict = on_verdict
        self._ended = threading.Event()
        self._judged = threading.Event()
        self._doing: dict[int, Doing] = {rank: Doing() for rank in range(world_size)}
        self._raw: dict[int, bytes] = {}
        self._heard = {rank: time.monotonic() for rank in range(world_size)}
        self._thread = threading.Thread(target=self._run, name="rollouts-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """No more judging: what ends now was told to."""
        self._ended.set()
        self._thread.join(5 * BEAT_SECONDS)

    def wait(self, seconds: float) -> None:
        """Give the judge so long to find a fault."""
        self._judged.wait(seconds)

    def judge(self, error: BaseException, seconds: float = 10.0) -> RankError:
        """Why a collective failed on rank 0: another rank's fault if one shows in time, else whoever is not where the
        others wait.
        """
        self._judged.wait(seconds)
        if self.verdict is None:
            self._declare(self._from_places(error))
        assert self.verdict is not None, "declared"
        return self.verdict

    def late(self, rank: int, seconds: float) -> RankError:
        """A rank that did not answer although rank 0 is done."""
        if self.verdict is None:
            last = self._last.words()
            self._declare(f"rank {rank} did not finish {last} within {seconds:g} s of rank 0{self._at(rank)}")
        assert self.verdict is not None, "declared"
        return self.verdict

    def _run(self) -> None:
        while not self._ended.wait(BEAT_SECONDS / 2):
            try:
                fault = self._look()
            except Exception as error:  # the store is this process's own, or the launcher's
                fault = f"the ranks' store cannot be reached any more: {error}"
            if fault and not self._ended.is_set():
                self._declare(fault)
                return

    def _look(self) -> str:
        """What is wrong, in words; empty while all is well."""
        now = time.monotonic()
        for rank in range(1, self._world_size):
            told = self._channel.read(f"failed/{rank}")
            if told is not None:
                return f"rank {rank} failed in {told.decode()}"
            raw = self._channel.read(f"beat/{rank}")
            if raw is not None and raw != self._raw.get(rank):
                self._raw[rank], self._heard[rank] = raw, now
                self._doing[rank] = msgspec.msgpack.decode(raw, type=Doing)
        for rank, process in self._processes.items():
            code = process.poll()
            if code is not None:
                told = self._channel.read(f"failed/{rank}")
                if told is not None:
                    return f"rank {rank} failed in {told.decode()}"
                return f"rank {rank} died ({_words_of_exit(code)}); its last command: {self._last.words()}"
        for rank in range(1, self._world_size):
            silent = now - self._heard[rank]
            if rank in self._raw and silent > SILENCE_SECONDS:
                last = self._last.words()
                return f"rank {rank} was not heard of for {silent:.0f} s; its last command: {last}{self._at(rank)}"
        return ""

    def _from_places(self, error: BaseException) -> str:
        apart = [rank for rank in range(1, self._world_size) if not self._doing[rank].meets]
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if apart:
            places = "; ".join(f"rank {rank}: {self._doing[rank].words()}{self._at(rank)}" for rank in apart)
            return f"the other ranks waited in vain for rank {apart[0]} at {self._last.words()} ({places}): {first}"
        return f"the ranks lost each other at {self._last.words()}: {first}"

    def _at(self, rank: int) -> str:
        place = self._doing[rank].place
        return f"; it is at {place}" if place else ""

    def _declare(self, fault: str) -> None:
        self.verdict = self.verdict or RankError(fault)
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()  # a stopped one too; whoever waits for it in a collective is woken
        self._judged.set()
        self._on_verdict(self.verdict)


def _place_of(thread: int) -> tuple[str, bool]:
    """The innermost line of Python outside torch, and whether the thread is inside torch's collectives."""
    frame: Any = sys._current_frames().get(thread)
    meets = frame is not None and f"torch{os.sep}distributed" in frame.f_code.co_filename
    while frame is not None and f"{os.sep}torch{os.sep}" in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return "", meets
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}, in {frame.f_code.co_name}", meets


def _words_of_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
