"""The run's side: the workers of one environment.

Workers start when they are needed. An episode goes to the worker with the fewest. If a worker cannot be started, one
request fails and says why; the others go to workers that run, and it is tried again after a while. A worker that dies
is started again at the next request; what it was doing fails with a WorkerError, and its other environment objects are
lost. If workers die again and again before they answer a request of an environment object, every further request fails
with WorkersLostError. Not here: the messages of one worker (`client`), and the class that a run sees (`proxy`).
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from rollouts.config.workers import WorkerSettings
from rollouts.env.workers.channel import Connector
from rollouts.env.workers.client import (
    CLOSED,
    IDLE,
    Call,
    Line,
    Serve,
    Worker,
    WorkerLog,
    background,
    connect,
    request,
    request_async,
)
from rollouts.env.workers.protocol import REQUESTS, Answer, Error, Failure, decode_value, encode_value
from rollouts.errors import RunError, WorkerError, WorkersLostError
from rollouts.types import Task

DEATHS_MAX = 10  # workers that die one after another, without an answer of an environment object in between
CLOSE_SECONDS = 25.0
REST_SECONDS = 60.0  # after a worker could not be started, while others run
# Requests while a run is composed, which are repeated if the worker dies.
REPEATED = ("describe", "configure", "make", "show_sandbox", "try_sandbox")


@dataclass(eq=False)
class WorkerLease:
    """An environment object in a worker. `worker` is None until one has it."""

    is_episode: bool
    session: int = 0
    worker: Worker | None = None
    is_closed: bool = False


@dataclass(eq=False)
class _Slot:
    """The place of one worker: the worker, or the calls that wait for it to start."""

    number: int
    log: WorkerLog = field(default_factory=WorkerLog)
    worker: Worker | None = None
    queued: list[tuple[Call, WorkerLease | None]] = field(default_factory=list)
    is_starting: bool = False
    rests_until: float = -math.inf

    @property
    def episodes(self) -> int:
        return (len(self.worker.sessions) if self.worker is not None else 0) + len(self.queued)


class WorkerPool:
    """The workers of one environment. Its public methods may be called in any thread; `name` is for messages."""

    def __init__(self, name: str, connector: Connector, settings: WorkerSettings) -> None:
        self.name, self.settings = name, settings
        self.deaths = 0  # of all workers so far, and how many of them were reported
        self._reported = 0
        self.lock: Path | None = None  # the versions in the virtual environment of the workers
        self._connector = connector
        self._slots = [_Slot(number) for number in range(settings.count)]
        self._waiting: deque[tuple[Call, WorkerLease]] = deque()
        self._sessions = itertools.count(1)
        self._in_a_row = 0
        self._last: RunError | None = None
        self._open = 0  # slots with a task
        self._all_closed: list[threading.Event] = []

    def call(self, method: str, arguments: Any = None, *, lease: WorkerLease | None = None) -> Any:
        """Make a request and wait for its result. Do not call it in a trio task.

        `lease` None: a request of no environment object. Raises WorkerError, WorkersLostError, and what the worker
        raised.
        """
        for is_last in (method not in REPEATED, True):
            try:
                answer = request(self._line(lease), _call(method, arguments))
            except WorkerError:
                if is_last:
                    raise
            else:
                break
        return decode_value(answer, REQUESTS[method][1])

    async def call_async(
        self,
        method: str,
        arguments: Any = None,
        *,
        lease: WorkerLease | None = None,
        seconds: float = math.inf,
        serve: Serve | None = None,
    ) -> Any:
        """Like `call`, from a trio task. `seconds` is a deadline, and `serve` answers what the worker asks. Raises
        CallTimeoutError too.
        """
        answer = await request_async(self._line(lease), _call(method, arguments, seconds), serve)
        return decode_value(answer, REQUESTS[method][1])

    def _line(self, lease: WorkerLease | None) -> Line:
        begin, cancel = functools.partial(self._begin, lease), functools.partial(self._cancel, lease)
        return Line(self.name, begin, cancel, functools.partial(_send, lease))

    def new_deaths(self) -> int:
        """How many workers have died since the last call of this method."""
        before, self._reported = self._reported, self.deaths
        return self._reported - before

    def forget(self, lease: WorkerLease) -> None:
        """Drop the environment object of a lease, without its `close`. Does not wait."""
        if not lease.is_closed:
            background.soon(self._forget, lease)

    def log_to(self, folder: Path, name: str) -> None:
        """Write what the environment's code prints to files of this folder: NAME-1.log, and so on."""
        background.soon(self._log_to, folder, name)

    def close(self) -> None:
        """End all workers, and wait until they have ended. A later request starts new ones."""
        closed = threading.Event()
        background.soon(self._close, closed)
        closed.wait(CLOSE_SECONDS)

    # --- in the loop of the workers -----------------------------------------------------------------------------------

    def _begin(self, lease: WorkerLease | None, call: Call) -> None:
        if self._in_a_row >= DEATHS_MAX:
            call.deliver(self._lost())
        elif lease is None:
            slot = next((slot for slot in self._slots if slot.worker is not None), self._slots[0])
            self._give(slot, call, None)
        elif call.method == "make":
            lease.session = call.session = next(self._sessions)
            self._place(call, lease)
        else:
            call.session = lease.session
            worker = lease.worker
            assert worker is not None, "the object was made"
            if worker.lost is not None:
                call.deliver(worker.lost)
                return
            if call.method in ("close", "forget"):
                self._release(lease)
            call.deliver = functools.partial(self._deliver, call.deliver)
            worker.begin(call)

    def _deliver(self, deliver: Callable[[Any], None], event: Any) -> None:
        """Deliver an event of a request of an environment object. An answer shows that workers do their work."""
        if isinstance(event, Answer):
            self._in_a_row = 0
        deliver(event)

    def _place(self, call: Call, lease: WorkerLease) -> None:
        """Give a new environment object to the worker with the fewest. An episode waits if all have too many."""
        now = trio.current_time()
        slot = min(self._slots, key=lambda slot: (now < slot.rests_until, slot.episodes))
        if lease.is_episode and slot.episodes >= self.settings.episodes:
            self._waiting.append((call, lease))
        else:
            self._give(slot, call, lease)

    def _give(self, slot: _Slot, call: Call, lease: WorkerLease | None) -> None:
        if slot.worker is None:
            slot.queued.append((call, lease))
            if not slot.is_starting:
                slot.is_starting = True
                self._open += 1
                background.start(self._run, slot)
            return
        if lease is not None:
            lease.worker = slot.worker
            slot.worker.sessions.add(lease.session)
        slot.worker.begin(call)

    def _release(self, lease: WorkerLease) -> None:
        lease.is_closed = True
        if lease.worker is not None:
            lease.worker.sessions.discard(lease.session)
        self._admit()

    def _admit(self) -> None:
        """Give the episodes that wait to workers, as far as there is room."""
        for _ in range(len(self._waiting)):
            self._place(*self._waiting.popleft())

    async def _run(self, slot: _Slot) -> None:
        """Start the worker of a slot, and run it until it ends."""
        name = f"{self.name} #{slot.number + 1}" if len(self._slots) > 1 else self.name
        slot.log.begin()
        try:
            worker = await connect(name, self._connector, slot.log, self.settings.silent_seconds)
        except WorkerError as error:
            slot.is_starting = False
            queued, slot.queued = slot.queued, []
            self._count_death(error)
            slot.rests_until = trio.current_time() + REST_SECONDS
            others = [each for each in self._slots if each.worker is not None]
            for place, (call, lease) in enumerate(queued):
                if place and others:
                    self._give(min(others, key=lambda slot: slot.episodes), call, lease)
                else:
                    call.deliver(error)
            self._ended()
            return
        slot.worker, slot.is_starting = worker, False
        queued, slot.queued = slot.queued, []
        for call, lease in queued:
            self._give(slot, call, lease)
        lost = await worker.run()
        slot.worker = None
        if worker.reason not in (CLOSED, IDLE):
            self._count_death(lost)
        self._ended()
        self._admit()

    def _count_death(self, error: RunError) -> None:
        self.deaths += 1
        self._in_a_row += 1
        self._last = error

    def _lost(self) -> WorkersLostError:
        return WorkersLostError(
            f"{DEATHS_MAX} workers of {self.name} died one after another, before they answered anything; the last "
            f"one: {self._last}\ntype --worker inline to run the environment in this process, where its error is shown"
        )

    def _ended(self) -> None:
        self._open -= 1
        if self._open == 0:
            for event in self._all_closed:
                event.set()
            self._all_closed.clear()

    def _cancel(self, lease: WorkerLease | None, call: Call) -> None:
        places: list[Any] = [self._waiting, *(slot.queued for slot in self._slots)]
        for place in places:
            for entry in [entry for entry in place if entry[0] is call]:
                place.remove(entry)
                call.deliver(Failure(0, Error("cancelled")))
        workers = [slot.worker for slot in self._slots] if lease is None else [lease.worker]
        for worker in workers:
            if worker is not None:
                worker.cancel(call)

    def _forget(self, lease: WorkerLease) -> None:
        if lease.worker is not None and lease.worker.lost is None and not lease.is_closed:
            lease.worker.begin(_call("forget", session=lease.session))
        self._release(lease)

    def _log_to(self, folder: Path, name: str) -> None:
        for slot in self._slots:
            slot.log.write_to(folder / f"{name}-{slot.number + 1}.log")

    def _close(self, closed: threading.Event) -> None:
        self._all_closed.append(closed)
        for slot in self._slots:
            if slot.worker is not None:
                slot.worker.kill(CLOSED)
        self._open += 1
        self._ended()


def _call(method: str, arguments: Any = None, seconds: float = math.inf, session: int = 0) -> Call:
    whose = "the task" if isinstance(arguments, Task) else f"the arguments of {method}"
    return Call(method, encode_value(arguments, whose), seconds, lambda _: None, session)


def _send(lease: WorkerLease | None, message: Any) -> None:
    if lease is not None and lease.worker is not None:
        lease.worker.send(message)
