"""Finds the rank that failed. Every rank sends heartbeats, and a failure detector on rank 0 reads them.

A rank that waits in a collective does not know why: torch reports a timeout or a closed connection, but not which rank
caused it. Therefore each rank has a second thread for its heartbeat, which continues while the first thread is stuck. A
heartbeat has the rank's current command and its line of Python code. Rank 0 reads the heartbeats, notices the end of
processes that it started, and reports one fault: which rank, at which command, and where. (docs/distributed.md says
what torch's own tools do not show.)
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from rollouts.errors import RankError, first_line, words_of_exit
from rollouts_fsdp.rendezvous import RankChannel

BEAT_SECONDS = 1.0
SYMPTOM_SECONDS = 3.0  # a failed collective is a symptom; wait this long for its cause, then compare lines of code
SILENCE_SECONDS = 30.0  # a rank without a heartbeat for this long is gone; heartbeats need no collective and no model


class RankStatus(msgspec.Struct):
    """What a rank is doing.

    Attributes:
        command: its current or last command
        number: the command's number
        done: whether the command is finished
        place: its line of Python code
        meets: whether it is inside a collective of torch, where it may wait for other ranks
        progress: a counter of microbatches
    """

    command: str = "starting"
    number: int = 0
    done: bool = False
    progress: int = 0
    place: str = ""
    meets: bool = False
    beat: int = 0

    def begin(self, command: str, number: int) -> None:
        """Begin another command."""
        self.command, self.number, self.done = command, number, False

    def where(self) -> str:
        """The place, for a message."""
        return f"; it is at {self.place}" if self.place else ""

    def words(self) -> str:
        """The command, for a message."""
        count = f", command {self.number}" if self.number else ""
        return f"{self.command}{count}{' (done)' if self.done else ''}"


class RankFailure(msgspec.Struct):
    """Why a rank above 0 ends.

    `symptom`: another rank failed, and this one could not meet it. `known`: the error is a RolloutsError, which rank 0
    probably raises too.
    """

    words: str
    symptom: bool = False
    known: bool = False


@dataclass(eq=False)
class Heartbeat:
    """This rank's heartbeat, in a thread of its own. The thread that does torch work changes `status`.

    On ranks above 0, `on_silence` is called if rank 0 sends no heartbeat, did not start within `start_seconds`, or the
    store is gone.
    """

    channel: RankChannel
    rank: int
    start_seconds: float
    on_silence: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.status = RankStatus()
        self._worker = threading.get_ident()
        self._ended = threading.Event()
        self._heard = time.monotonic()
        self._last: bytes | None = None
        self._thread = threading.Thread(target=self._run, name="rollouts-heartbeat", daemon=True)
        self._thread.start()

    def works_in_this_thread(self) -> None:
        """Report the place of the calling thread from now on."""
        self._worker = threading.get_ident()

    def progressed(self) -> None:
        """Count a microbatch."""
        self.status.progress += 1

    def end(self) -> None:
        """Stop the heartbeat. Waits for its thread, because a thread that is inside a call of torch when Python ends
        would abort the process.
        """
        self._ended.set()
        self._thread.join(5 * BEAT_SECONDS)

    def _run(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            self.status.beat += 1
            self.status.place, self.status.meets = _place_of(self._worker)
            try:
                self.channel.post(f"beat/{self.rank}", msgspec.msgpack.encode(self.status))
                is_silent = self.on_silence is not None and self._is_silent()
            except Exception:  # the store is gone, and rank 0 with it
                is_silent = True
            if is_silent:
                if self.on_silence is not None and not self._ended.is_set():
                    self.on_silence()
                return

    def _is_silent(self) -> bool:
        last = self.channel.read("beat/0")
        if last != self._last:
            self._last, self._heard = last, time.monotonic()
        limit = self.start_seconds if last is None else SILENCE_SECONDS
        return self.channel.read("over") is not None or time.monotonic() - self._heard > limit


class _Heard(msgspec.Struct):
    """The last heartbeat of a rank above 0, and its time."""

    at: float
    status: RankStatus = msgspec.field(default_factory=RankStatus)
    beat: bytes | None = None
    failure: RankFailure | None = None
    failed_at: float = 0.0


@dataclass(eq=False)
class FailureDetector:
    """The failure detector of rank 0, in a thread that starts at once.

    When it finds a fault, it sets `fault`, a RankError, and calls `on_fault` with it.

    `own` is the status of rank 0, with its last command. A rank may take `start_seconds` until its first heartbeat.
    With `stall_seconds`, it is a fault if no rank makes progress for that long; for devices whose collectives raise no
    error in time.
    """

    channel: RankChannel
    world_size: int
    processes: Mapping[int, subprocess.Popen[bytes]]
    own: RankStatus
    start_seconds: float
    stall_seconds: float | None = None
    on_fault: Callable[[RankError], None] = lambda error: None  # called in the detector's thread
    fault: RankError | None = None

    def __post_init__(self) -> None:
        self._ended = threading.Event()
        self._declared = threading.Event()
        start = time.monotonic()
        self._heard = {rank: _Heard(start) for rank in range(1, self.world_size)}
        self._first_waited = False  # whether rank 0 waited for the others
        self._moved: tuple[Any, float] = (None, start)
        self._thread = threading.Thread(target=self._run, name="rollouts-failures", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop. A rank that ends later is no fault."""
        self._ended.set()
        self._thread.join(5 * BEAT_SECONDS)

    def why(self, error: BaseException) -> RankError:
        """Why a collective failed on rank 0. Waits some seconds for the detector to find a fault. If it finds none,
        blames the rank without a heartbeat, or the rank that is not inside the collective.
        """
        self._first_waited = True
        self._declared.wait(3 * SYMPTOM_SECONDS)
        return self.fault or self._declare(self._from_places(first_line(error)))

    def late(self, rank: int, seconds: float) -> RankError:
        """The error for a rank that did not finish after rank 0."""
        words = f"rank {rank} did not finish {self.own.words()} within {seconds:g} s of rank 0"
        return self.fault or self._declare(words + self._heard[rank].status.where())

    def _run(self) -> None:
        while not self._ended.wait(BEAT_SECONDS / 2):
            try:
                fault = self._look()
            except Exception as error:  # the store of this process, or of the launcher
                fault = f"the ranks' store cannot be reached any more: {error}"
            if fault and not self._ended.is_set():
                self._declare(fault)
                return

    def _look(self) -> str:
        """Describe the fault; empty if there is none. Reports causes before symptoms, even if a symptom came first."""
        now = time.monotonic()
        self._listen(now)
        for rank, heard in self._heard.items():
            failure = heard.failure
            # All ranks raise the same error, and that of rank 0 is the most helpful.
            if failure and not failure.symptom and (not failure.known or now - heard.failed_at > SYMPTOM_SECONDS):
                return f"rank {rank} failed in {failure.words}"
        for rank, process in self.processes.items():
            code = process.poll()
            if code is not None:
                self._listen(now)  # its report may have arrived since
                if self._heard[rank].failure is None:
                    how = f"killed by {words_of_exit(code)}" if code < 0 else words_of_exit(code)
                    return f"rank {rank} died ({how}); its last command: {self.own.words()}"
        for rank, heard in self._heard.items():
            silent = now - heard.at
            if heard.failure is not None:
                continue
            if heard.beat is None and silent > self.start_seconds:
                late = f"rank {rank} did not start within {self.start_seconds:g} s; look at its output"
                return f"{late}, or give it more time with --training.start-seconds"
            if heard.beat is not None and silent > SILENCE_SECONDS:
                last = self.own.words() + heard.status.where()
                return f"rank {rank} sent no heartbeat for {silent:.0f} s; its last command: {last}"
        symptoms = [(each.failed_at, rank, each.failure.words) for rank, each in self._heard.items() if each.failure]
        if symptoms and now - min(symptoms)[0] > 2 * SYMPTOM_SECONDS:
            return self._from_places(min(symptoms)[2])
        return self._stall(now)

    def _listen(self, now: float) -> None:
        for rank, heard in self._heard.items():
            failure = self.channel.read(f"failed/{rank}") if heard.failure is None else None
            if failure is not None:
                heard.failure, heard.failed_at = msgspec.msgpack.decode(failure, type=RankFailure), now
            beat = self.channel.read(f"beat/{rank}")
            if beat is not None and beat != heard.beat:
                heard.beat, heard.at, heard.status = beat, now, msgspec.msgpack.decode(beat, type=RankStatus)

    def _stall(self, now: float) -> str:
        own = self.own
        progress = (own.number, own.done, own.progress, [heard.status.progress for heard in self._heard.values()])
        if progress != self._moved[0]:
            self._moved = progress, now
        computes = own.command in ("forward", "forward_backward", "optim_step") and not own.done
        if self.stall_seconds is None or not computes or now - self._moved[1] <= self.stall_seconds:
            return ""
        return self._from_places(f"no rank made progress for {self.stall_seconds:g} s")

    def _from_places(self, reason: str) -> str:
        """Name the rank that the others wait for: a rank without a heartbeat, else the ranks that are not in a
        collective.
        """
        now, last = time.monotonic(), self.own.words()
        alive = {rank: heard for rank, heard in self._heard.items() if heard.failure is None}
        quiet = next((rank for rank, heard in alive.items() if now - heard.at > 3 * BEAT_SECONDS), None)
        if quiet is not None:
            return f"rank {quiet} is gone; its last command: {last}{alive[quiet].status.where()} ({reason})"
        first = {} if self._first_waited else {0: self.own}
        apart = first | {rank: heard.status for rank, heard in alive.items()}
        apart = {rank: status for rank, status in apart.items() if not status.meets}
        if apart:
            places = "; ".join(f"rank {rank}: {status.words()}{status.where()}" for rank, status in apart.items())
            return f"the other ranks waited in vain for rank {min(apart)} at {last} ({places}): {reason}"
        return f"the ranks lost each other at {last}: {reason}"

    def _declare(self, fault: str) -> RankError:
        self.fault = self.fault or RankError(fault)
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()  # also a stopped one; ranks that wait for it in a collective then continue
        self._declared.set()
        self.on_fault(self.fault)
        return self.fault


def _place_of(thread: int) -> tuple[str, bool]:
    """The innermost line of Python outside torch, and whether the thread is in a collective of torch."""
    frame: Any = sys._current_frames().get(thread)
    meets = frame is not None and f"torch{os.sep}distributed" in frame.f_code.co_filename
    while frame is not None and f"{os.sep}torch{os.sep}" in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return "", meets
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}, in {frame.f_code.co_name}", meets
