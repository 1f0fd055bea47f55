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

__all__ = ["Beating", "Doing", "Failure", "Watch"]

BEAT_SECONDS = 1.0
SYMPTOM_SECONDS = 3.0  # a failed collective is a symptom: so long its cause has to show, before places decide
SILENCE_SECONDS = 30.0  # a rank that was not heard of for so long is gone: beats need no collective and no model


class Doing(msgspec.Struct):
    """What a rank does: its command and which one it is, whether that is `done`, and where it is in Python; `meets`
    while it is inside torch's collectives, where it may wait for others. `progress` counts microbatches.
    """

    command: str = "starting"
    number: int = 0
    done: bool = False
    progress: int = 0
    place: str = ""
    meets: bool = False
    beat: int = 0

    def words(self) -> str:
        """For a message."""
        count = f", command {self.number}" if self.number else ""
        return f"{self.command}{count}{' (done)' if self.done else ''}"


class Failure(msgspec.Struct):
    """Why a rank above 0 ends. A `symptom` is that others did not meet it: somebody else is to blame. What is `known`
    is an error of rollouts, which rank 0 most likely raises too.
    """

    words: str
    symptom: bool = False
    known: bool = False


class Beating:
    """This rank's beats, from a thread of their own. `doing` is changed by whoever works."""

    def __init__(
        self, channel: Channel, rank: int, *, start_seconds: float, on_silence: Callable[[], None] | None = None
    ) -> None:
        """`on_silence` is called when rank 0 is not heard of any more, was not heard of for `start_seconds`, or the
        store is gone: for the ranks above it.
        """
        self.doing = Doing()
        self._channel = channel
        self._rank = rank
        self._on_silence = on_silence
        self._start_seconds = start_seconds
        self._worker = threading.get_ident()
        self._ended = threading.Event()
        self._heard = time.monotonic()
        self._last: bytes | None = None
        self._thread = threading.Thread(target=self._run, name="rollouts-beat", daemon=True)
        self._thread.start()

    def works_in_this_thread(self) -> None:
        """From now on the place is that of the calling thread."""
        self._worker = threading.get_ident()

    def progressed(self) -> None:
        """One more microbatch."""
        self.doing.progress += 1

    def end(self) -> None:
        """No more beats, and nothing happens on silence."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            doing = self.doing
            doing.beat += 1
            doing.place, doing.meets = _place_of(self._worker)
            try:
                self._channel.post(f"beat/{self._rank}", msgspec.msgpack.encode(doing))
                is_silent = self._on_silence is not None and self._is_silent()
            except Exception:  # the store is gone, and with it rank 0
                is_silent = True
            if is_silent:
                if self._on_silence is not None and not self._ended.is_set():
                    self._on_silence()
                return

    def _is_silent(self) -> bool:
        last = self._channel.read("beat/0")
        if last != self._last:
            self._last, self._heard = last, time.monotonic()
        limit = self._start_seconds if last is None else SILENCE_SECONDS
        return self._channel.read("over") is not None or time.monotonic() - self._heard > limit


class Watch:
    """Rank 0's judge. `verdict` is the RankError, once there is one; then `on_verdict` was called with it."""

    def __init__(
        self,
        channel: Channel,
        world_size: int,
        processes: Mapping[int, subprocess.Popen[bytes]],
        own: Doing,
        on_verdict: Callable[[RankError], None],
        *,
        start_seconds: float,
        stall_seconds: float | None = None,
    ) -> None:
        """`own` is what rank 0 does: the last command that it gave. A rank may take `start_seconds` from now until its
        first beat. With `stall_seconds` no rank may pass so long without progress in a command that computes: for
        devices whose collectives raise no error in time.
        """
        self.verdict: RankError | None = None
        self._channel = channel
        self._own = own
        self._world_size = world_size
        self._processes = dict(processes)
        self._on_verdict = on_verdict
        self._start_seconds = start_seconds
        self._stall_seconds = stall_seconds
        self._ended = threading.Event()
        self._judged = threading.Event()
        start = time.monotonic()
        self._doing: dict[int, Doing] = {rank: Doing() for rank in range(world_size)}
        self._doing[0] = own
        self._raw: dict[int, bytes] = {}
        self._heard = dict.fromkeys(range(world_size), start)
        self._failures: dict[int, tuple[Failure, float]] = {}
        self._first_waited = False  # rank 0 was where the others should have met it
        self._moved: tuple[Any, float] = (None, start)
        self._thread = threading.Thread(target=self._run, name="rollouts-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """No more judging: what ends now was told to."""
        self._ended.set()
        self._thread.join(5 * BEAT_SECONDS)

    def judge(self, error: BaseException) -> RankError:
        """Why a collective failed on rank 0: another rank's fault if one shows in time, else whoever is not where the
        others wait.
        """
        self._first_waited = True
        self._judged.wait(3 * SYMPTOM_SECONDS)
        if self.verdict is None:
            self._declare(self._from_places(_first_line(error)))
        assert self.verdict is not None, "declared"
        return self.verdict

    def late(self, rank: int, seconds: float) -> RankError:
        """A rank that did not answer although rank 0 is done."""
        if self.verdict is None:
            last = self._own.words()
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
        """What is wrong, in words; empty while all is well. Causes come before symptoms, whoever is heard first."""
        now = time.monotonic()
        self._listen(now)
        for rank, (failure, when) in self._failures.items():
            # Rank 0 raises what all ranks raise, and its own error says it best.
            if not failure.symptom and (not failure.known or now - when > SYMPTOM_SECONDS):
                return f"rank {rank} failed in {failure.words}"
        for rank, process in self._processes.items():
            code = process.poll()
            if code is not None and rank not in self._failures:
                self._listen(now)  # it may have told why after the first look
                if rank not in self._failures:
                    return f"rank {rank} died ({_words_of_exit(code)}); its last command: {self._own.words()}"
        for rank in range(1, self._world_size):
            silent = now - self._heard[rank]
            if rank in self._failures:
                continue
            if rank not in self._raw and silent > self._start_seconds:
                return (
                    f"rank {rank} did not start within {self._start_seconds:g} s; look at what it wrote, or give it "
                    "more time with --training.start-seconds"
                )
            if rank in self._raw and silent > SILENCE_SECONDS:
                last = self._own.words()
                return f"rank {rank} was not heard of for {silent:.0f} s; its last command: {last}{self._at(rank)}"
        symptoms = [(when, failure) for failure, when in self._failures.values() if failure.symptom]
        if symptoms and now - min(when for when, _ in symptoms) > 2 * SYMPTOM_SECONDS:
            return self._from_places(symptoms[0][1].words)
        return self._stall(now)

    def _listen(self, now: float) -> None:
        for rank in range(1, self._world_size):
            told = self._channel.read(f"failed/{rank}") if rank not in self._failures else None
            if told is not None:
                self._failures[rank] = msgspec.msgpack.decode(told, type=Failure), now
            raw = self._channel.read(f"beat/{rank}")
            if raw is not None and raw != self._raw.get(rank):
                self._raw[rank], self._heard[rank] = raw, now
                self._doing[rank] = msgspec.msgpack.decode(raw, type=Doing)

    def _stall(self, now: float) -> str:
        progress = (self._own.number, self._own.done, [doing.progress for doing in self._doing.values()])
        if progress != self._moved[0]:
            self._moved = progress, now
        computes = self._own.command in ("forward", "forward_backward", "optim_step") and not self._own.done
        if self._stall_seconds is None or not computes or now - self._moved[1] <= self._stall_seconds:
            return ""
        return self._from_places(f"no rank got on for {self._stall_seconds:g} s")

    def _from_places(self, reason: str) -> str:
        """Who keeps the others waiting: a rank that beats no more, else those that are not inside a collective."""
        now, last = time.monotonic(), self._own.words()
        quiet = [
            rank
            for rank in range(1, self._world_size)
            if rank not in self._failures and now - self._heard[rank] > 3 * BEAT_SECONDS
        ]
        if quiet:
            return f"rank {quiet[0]} is gone; its last command: {last}{self._at(quiet[0])} ({reason})"
        first = 1 if self._first_waited else 0
        apart = [r for r in range(first, self._world_size) if r not in self._failures and not self._doing[r].meets]
        if apart:
            places = "; ".join(f"rank {rank}: {self._doing[rank].words()}{self._at(rank)}" for rank in apart)
            return f"the other ranks waited in vain for rank {apart[0]} at {last} ({places}): {reason}"
        return f"the ranks lost each other at {last}: {reason}"

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


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


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
