"""The run's side: the workers of one environment, their requests and their heartbeat.

Workers start when they are needed. An episode goes to the worker with the fewest. If a worker cannot be started, one
request fails and says why; the others go to workers that run, and it is tried again after a while. A worker that dies
is started again at the next request; what it was doing fails with a WorkerError, and its other environment objects are
lost. If workers die again and again before they answer a request of an environment object, every further request fails
with WorkersLostError.

All of this runs in one trio loop of the process, in a thread of its own (`WorkerLoop`), because composing a run is
synchronous, and a run has its own trio loop: both use the same workers. A caller in any thread hands in a `Call` and
gets its events back. Not here: the class that a run sees (`proxy`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import queue
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import trio

from rollouts.author_code import message_of, printable, shown
from rollouts.config.workers import WorkerSettings
from rollouts.env.workers import protocol
from rollouts.env.workers.channel import ChannelClosedError, Connection, Connector
from rollouts.error_log import report_fault
from rollouts.errors import RunError, WorkerError, WorkersLostError
from rollouts.types import Task
from rollouts.version import __version__

START_SECONDS = 120.0  # how long a worker may take to say hello
MARGIN_SECONDS = 10.0  # how much later than its deadline a request may be answered
GRACE_SECONDS = 10.0  # how long a cancelled request may take to end
IDLE_SECONDS = 600.0  # a worker without environment objects and requests ends after this time
IDLE, CLOSED = "had nothing to do", "was closed"
CLEANUP_SECONDS = 12.0  # how long a worker that is closed may clean up
BEATS = 4  # pings within the time of silence that a worker is allowed
LAST_LINES, LAST_CHARACTERS = 8, 2_000  # of a dead worker's log, in error messages
KEPT_BYTES_MAX = 1 << 20  # of a log that has no file yet

_Ended = protocol.Answer | protocol.Failure | RunError
"""How a call ends: with an answer, or because its worker was lost."""


@dataclass(eq=False)
class Call:
    """A request, and where its events go. `deliver` may be called in another thread than the caller's. `session` 0: of
    no environment object.
    """

    method: str
    arguments: msgspec.Raw
    seconds: float
    deliver: Callable[[_Ended | protocol.Ask | protocol.Cancel | protocol.Report], None]
    session: int = 0
    number: int = 0
    overdue: float = math.inf
    is_cancelled: bool = False


class WorkerLog:
    """What the environment's code printed in a worker. It is kept until there is a file."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._kept = bytearray()
        self._last: deque[bytes] = deque(maxlen=LAST_LINES)
        self._line = b""

    def begin(self) -> None:
        """A new worker has no last words yet."""
        self._last.clear()
        self._line = b""

    def write(self, chunk: bytes) -> None:
        """Add text."""
        *lines, self._line = (self._line + chunk).split(b"\n")
        self._last.extend(line[-LAST_CHARACTERS:] for line in lines if line.strip())
        self._kept += chunk[: max(0, KEPT_BYTES_MAX - len(self._kept))]
        self._flush()

    def write_to(self, path: Path) -> None:
        """Write to this file from now on, also what was printed before. It is made when there is something to write."""
        self._path = path
        self._flush()

    @property
    def last_words(self) -> str:
        """The last lines; empty if nothing was printed."""
        lines = [*self._last, self._line] if self._line.strip() else self._last
        text = "\n".join(printable(line.decode(errors="replace")) for line in lines)
        return text[-LAST_CHARACTERS:]

    def _flush(self) -> None:
        if self._path is None or not self._kept:
            return
        with contextlib.suppress(OSError):  # the run's folder was removed, or its disk is full
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write(self._kept)
        self._kept.clear()


class WorkerLoop:
    """The trio loop of this process's workers, in a daemon thread. It starts at the first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None

    def soon(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function in the loop. Any thread may do this."""
        with self._lock:
            if self._token is None:
                began = threading.Event()
                threading.Thread(target=trio.run, args=(self._run, began), name="rollouts-workers", daemon=True).start()
                began.wait()
        assert self._token is not None, "the loop runs"
        self._token.run_sync_soon(function, *args)

    def start(self, function: Callable[..., Awaitable[object]], *args: Any) -> None:
        """Start a task. Only in the loop."""
        assert self._nursery is not None, "the loop runs"
        self._nursery.start_soon(function, *args)

    async def _run(self, began: threading.Event) -> None:
        async with trio.open_nursery() as self._nursery:
            self._token = trio.lowlevel.current_trio_token()
            began.set()
            await trio.sleep_forever()


background = WorkerLoop()


class Worker:
    """A connected worker. `sessions` are the environment objects that it has. `reason` says why it was ended, and
    `lost` is the error that its calls have failed with.
    """

    def __init__(self, name: str, connection: Connection, log: WorkerLog, silent_seconds: float) -> None:
        self.name, self.sessions, self.reason = name, set[int](), ""
        self.lost: WorkerError | None = None
        self._connection, self._log, self._silent = connection, log, silent_seconds
        self._calls: dict[int, Call] = {}
        self._number = 0
        self._scope = trio.CancelScope()
        self._heard = trio.current_time()
        self._outgoing, self._to_send = trio.open_memory_channel[Any](math.inf)

    def begin(self, call: Call) -> None:
        """Send a request."""
        self._number += 1
        call.number = self._number
        call.overdue = trio.current_time() + call.seconds + MARGIN_SECONDS
        self._calls[call.number] = call
        seconds = None if math.isinf(call.seconds) else call.seconds
        self.send(protocol.Request(call.number, call.method, call.session, call.arguments, seconds))

    def cancel(self, call: Call) -> None:
        """Ask for the early end of a request. If it does not come, the worker is killed."""
        if call.number in self._calls and not call.is_cancelled:
            call.is_cancelled = True
            call.overdue = trio.current_time() + GRACE_SECONDS
            self.send(protocol.Cancel(call.number))

    def send(self, message: Any) -> None:
        """Send a message after those that are waiting."""
        with contextlib.suppress(trio.BrokenResourceError):  # the worker has ended
            self._outgoing.send_nowait(message)

    def kill(self, reason: str) -> None:
        """End the worker, for this reason."""
        self.reason = self.reason or reason
        self._scope.cancel()

    async def run(self) -> WorkerError:
        """Run until the worker ends. Its calls fail. Returns the error that they fail with."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                nursery.start_soon(self._beat)
                await self._read()
        self._to_send.close()
        how = await self._connection.end(CLEANUP_SECONDS if self.reason in (IDLE, CLOSED) else 0.0)
        self.lost = WorkerError(_in_words(self.name, self.reason or f"ended ({how})", self._log))
        for call in self._calls.values():
            call.deliver(self.lost)
        self._calls.clear()
        return self.lost

    async def _write(self) -> None:
        try:
            async for message in self._to_send:
                await self._connection.channel.send(msgspec.json.encode(message))
        except ChannelClosedError:
            self.kill("")

    async def _read(self) -> None:
        while True:
            try:
                message = protocol.read_from_worker(await self._connection.channel.receive())
            except ChannelClosedError:
                return self.kill("")
            except protocol.ProtocolError as error:
                return self.kill(f"sent something that is no message: {message_of(error)}")
            self._heard = trio.current_time()
            self._take(message)

    def _take(self, message: Any) -> None:
        if isinstance(message, protocol.Answer | protocol.Failure):
            if (call := self._calls.pop(message.number, None)) is not None:
                call.deliver(message)
        elif isinstance(message, protocol.Ask | protocol.Report) and message.request in self._calls:
            self._calls[message.request].deliver(message)
        elif isinstance(message, protocol.Cancel):
            for call in self._calls.values():
                call.deliver(message)  # only one of them has asked
        elif isinstance(message, protocol.Report):
            report_fault(message.fault, message.label, is_noted=message.is_noted)
        elif isinstance(message, protocol.Log):
            self._log.write(message.text.encode())

    async def _beat(self) -> None:
        """Kill the worker if it is silent, or if a request is overdue. End it if it has nothing to do for long."""
        number, idle_since = 0, trio.current_time()
        while True:
            await trio.sleep(min(self._silent / BEATS, 1.0))
            now, number = trio.current_time(), number + 1
            idle_since = now if self._calls or self.sessions else idle_since
            if now - idle_since > IDLE_SECONDS:
                self.kill(IDLE)
            self.send(protocol.Ping(number))
            if now - self._heard > self._silent:
                why = await self._connection.words_of_silence()
                self.kill(f"was silent for {self._silent:g} seconds (worker.silent_seconds): {why}")
            for call in self._calls.values():
                if now > call.overdue:
                    late = (
                        "did not end a cancelled"
                        if call.is_cancelled
                        else f"did not answer within {call.seconds:g} s a"
                    )
                    self.kill(f"{late} request ({call.method})")


async def connect(name: str, connector: Connector, log: WorkerLog, silent_seconds: float) -> Worker:
    """Start a worker, and wait until it says hello. Raises WorkerError, which says why there is none."""
    connection = await connector.open(log.write)
    problem = f"said nothing for {START_SECONDS:g} seconds"
    with trio.move_on_after(START_SECONDS):
        try:
            hello = protocol.read_from_worker(await connection.channel.receive())
            if isinstance(hello, protocol.Hello) and hello.protocol == protocol.VERSION:
                return Worker(name, connection, log, silent_seconds)
            problem = f"begins with {shown(type(hello).__name__)} instead of hello"
            if isinstance(hello, protocol.Hello):
                problem = (
                    f"has rollouts {hello.rollouts}, whose protocol has the version {hello.protocol}; this is "
                    f"{__version__} with version {protocol.VERSION}: install one version of rollouts in both places"
                )
        except ChannelClosedError:
            problem = ""
        except protocol.ProtocolError as error:
            problem = f"is no worker of rollouts: it said {message_of(error)}"
    how = await connection.end()
    raise WorkerError(_in_words(name, problem or f"ended before it said hello ({how})", log))


def _in_words(name: str, reason: str, log: WorkerLog) -> str:
    last = "\n  ".join(log.last_words.splitlines())
    return f"the worker {name} {reason}" + (f"; its last words:\n  {last}" if last else "")


# --- callers ----------------------------------------------------------------------------------------------------------

ServeAsks = Callable[[protocol.Ask], Awaitable[Any]]
"""Answers an ask of a worker."""


async def _wait(events: trio.MemoryReceiveChannel[Any], asks: _Asks) -> _Ended:
    """The end of the call."""
    while not isinstance(event := await events.receive(), _Ended):
        _note(event)
        asks.take(event)
    return event


@dataclass(eq=False)
class _Asks:
    """What a worker asks while it handles one request. Without `serve`, it asks nothing."""

    lease: WorkerLease | None
    serve: ServeAsks | None
    nursery: trio.Nursery | None
    failed: dict[int, Exception] = field(default_factory=dict)
    scopes: dict[int, trio.CancelScope] = field(default_factory=dict)

    def take(self, event: Any) -> None:
        if isinstance(event, protocol.Ask) and self.nursery is not None:
            self.scopes[event.number] = trio.CancelScope()
            self.nursery.start_soon(self._answer, event)
        elif isinstance(event, protocol.Cancel) and event.number in self.scopes:
            self.scopes[event.number].cancel()

    async def _answer(self, ask: protocol.Ask) -> None:
        assert self.serve is not None, "the request has somebody who answers"
        answer: protocol.Answer | protocol.Failure = protocol.Failure(ask.number, protocol.Error("cancelled"))
        try:
            with self.scopes[ask.number]:
                value = protocol.encode_value(await self.serve(ask), f"the answer of model.{ask.method}")
                answer = protocol.Answer(ask.number, value)
        except Exception as error:  # the rollout ends with it, and then the caller of the request gets it
            self.failed[ask.number] = error
            refused = protocol.Error("ours", type(error).__name__, message_of(error))
            answer = protocol.Failure(ask.number, refused)
        finally:
            background.soon(_send, self.lease, answer)


def _note(event: Any) -> None:
    """Write an error that failed nothing to the errors.log of the caller's run."""
    if isinstance(event, protocol.Report):
        report_fault(event.fault, event.label, is_noted=event.is_noted)


def _result(ended: _Ended, method: str, worker: str, failed: dict[int, Exception]) -> Any:
    if isinstance(ended, RunError):
        raise type(ended)(str(ended))  # several calls fail with it
    if isinstance(ended, protocol.Answer):
        return protocol.decode_value(ended.value, protocol.REQUESTS[method][1])
    asked = [failed[number] for number in ended.error.asks if number in failed]
    if ended.error.kind == "asks" and asked:
        raise asked[0] if len(asked) == 1 else ExceptionGroup("several calls of the model failed", asked)
    raise protocol.error_received(ended.error, f"the worker {worker}")


# --- the workers of one environment -----------------------------------------------------------------------------------


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
        tries = 2 if method in REPEATED else 1
        while True:
            tries -= 1
            try:
                return self._request(lease, _call(method, arguments))
            except WorkerError:
                if not tries:
                    raise

    def _request(self, lease: WorkerLease | None, call: Call) -> Any:
        """Make a call, and wait for its result. Ctrl-C cancels it. Raises its error."""
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        call.deliver = events.put
        background.soon(self._begin, lease, call)
        try:
            while not isinstance(event := events.get(), _Ended):
                _note(event)
        except KeyboardInterrupt:
            background.soon(self._cancel, lease, call)
            raise
        return _result(event, call.method, self.name, {})

    async def call_async(
        self,
        method: str,
        arguments: Any = None,
        *,
        lease: WorkerLease | None = None,
        seconds: float = math.inf,
        serve: ServeAsks | None = None,
    ) -> Any:
        """Like `call`, from a trio task. `seconds` is a deadline, and `serve` answers what the worker asks, in the
        nursery of this task. A cancellation cancels the call, and waits until the worker has ended it or was killed.
        Raises CallTimeoutError too.
        """
        call, token = _call(method, arguments, seconds), trio.lowlevel.current_trio_token()
        to_here, events = trio.open_memory_channel[Any](math.inf)

        def deliver(event: Any) -> None:
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(to_here.send_nowait, event)

        call.deliver = deliver
        background.soon(self._begin, lease, call)
        async with contextlib.nullcontext() if serve is None else trio.open_nursery() as nursery:
            asks = _Asks(lease, serve, nursery)
            try:
                ended = await _wait(events, asks)
            except trio.Cancelled:
                background.soon(self._cancel, lease, call)
                with trio.CancelScope(shield=True):
                    await _wait(events, asks)
                raise
            if nursery is not None:
                nursery.cancel_scope.cancel()
        return _result(ended, method, self.name, asks.failed)

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
        if isinstance(event, protocol.Answer):
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
                call.deliver(protocol.Failure(0, protocol.Error("cancelled")))
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
    return Call(method, protocol.encode_value(arguments, whose), seconds, lambda _: None, session)


def _send(lease: WorkerLease | None, message: Any) -> None:
    if lease is not None and lease.worker is not None:
        lease.worker.send(message)
