"""The worker's side: answers the requests of one run, until the channel closes.

Requests are handled at the same time, each in a task of its own. All code of the environment runs through
`rollouts.env.calls`, under the request's deadline. Errors that fail no request, such as those of tools, are sent to the
run's errors.log. It needs neither torch nor a model. Not here: what carries the messages, and how the process starts.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import platform
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec
import outcome
import trio

from rollouts.config.importing import ImportProgress
from rollouts.env.workers import sessions
from rollouts.env.workers.channel import Channel, ChannelClosedError
from rollouts.env.workers.describe import Description, Given, Library, Loaded, SandboxSent, settings_as_sent
from rollouts.env.workers.protocol import (
    VERSION,
    Answer,
    Ask,
    Cancel,
    Error,
    Failure,
    Hello,
    Ping,
    Pong,
    ProtocolError,
    Report,
    Request,
    decode_value,
    encode_value,
    error_as_sent,
    read_from_run,
)
from rollouts.env.workers.sandboxing import OpenSandboxes
from rollouts.env.workers.sessions import EnvironmentSession
from rollouts.error_log import ErrorLog, Fault
from rollouts.errors import BrokenPluginError, leaves_of, words_of
from rollouts.types import Task, Trajectory
from rollouts.version import __version__

CLOSE_SECONDS = 10.0  # for environment objects that a run has left

_request: ContextVar[int] = ContextVar("rollouts-worker-request", default=0)


class AskFailedError(Exception):
    """A function of the run failed. The environment's code should not catch this exception."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


class Named(msgspec.Struct):
    """Arguments of `describe`: the name of an environment."""

    name: str


class Configured(msgspec.Struct):
    """Arguments of `configure`: the name of an environment, and the settings that were given for it."""

    name: str
    given: Given


class Make(msgspec.Struct):
    """Arguments of `make`: the name of an environment, and its settings as `configure` returned them."""

    name: str
    settings: Any
    with_shape: bool = False


class More(msgspec.Struct):
    """Arguments of `more`."""

    method: str
    first: int
    count: int


async def serve(channel: Channel, library: Library | None = None, sandboxes: OpenSandboxes | None = None) -> None:
    """Say hello, and answer requests until the run closes the channel. Environment objects that are left then are
    closed.
    """
    server = _Server(channel, library or Library(), sandboxes or OpenSandboxes())
    with server.reporting():
        with contextlib.suppress(ChannelClosedError):
            await server.run()
        await server.close_sessions()


async def _cancel_if_stalled(scope: trio.CancelScope, progress: ImportProgress) -> None:
    """Cancel the scope when the import in it makes no progress."""
    for _ in iter(progress.has_stalled, True):
        await trio.sleep(progress.pause)
    scope.cancel()


class _Server:
    def __init__(self, channel: Channel, library: Library, sandboxes: OpenSandboxes) -> None:
        self._channel, self._library, self._sandboxes = channel, library, sandboxes
        self._sessions: dict[int, EnvironmentSession] = {}
        self._scopes: dict[int, trio.CancelScope] = {}
        self._asked: dict[int, tuple[trio.Event, list[Answer | Failure]]] = {}
        self._numbers = itertools.count(1)
        self._outgoing: trio.MemorySendChannel[Any]
        self._outgoing, self._to_send = trio.open_memory_channel(math.inf)
        self._process = os.getpid()

    async def run(self) -> None:
        self.send(Hello(VERSION, __version__, platform.python_version()))
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                try:
                    await self._read(nursery)
                finally:
                    nursery.cancel_scope.cancel()
        except* ChannelClosedError:
            pass

    async def close_sessions(self) -> None:
        """Close the environment objects that are left, and their sandboxes. Their errors are printed, because the run
        is gone.
        """
        async with trio.open_nursery() as nursery:
            for session in self._sessions.values():
                nursery.start_soon(_close, session)
        await self._sandboxes.close_all(CLOSE_SECONDS)

    def send(self, message: Any) -> None:
        """Send a message after those that are waiting."""
        if os.getpid() != self._process:  # a child that the author's code forked: only its parent answers
            os._exit(0)
        self._outgoing.send_nowait(message)

    async def _write(self) -> None:
        async for message in self._to_send:
            await self._channel.send(msgspec.json.encode(message))

    async def _read(self, nursery: trio.Nursery) -> None:
        while True:
            message = read_from_run(await self._channel.receive())
            if isinstance(message, Request):
                nursery.start_soon(self._handle, message)
            elif isinstance(message, Cancel):
                if message.number in self._scopes:
                    self._scopes[message.number].cancel()
            elif isinstance(message, Ping):
                self.send(Pong(message.number))
            elif message.number in self._asked:
                event, answers = self._asked[message.number]
                answers.append(message)
                event.set()

    # --- requests ---------------------------------------------------------------------------------------------------

    async def _handle(self, request: Request) -> None:
        _request.set(request.number)
        session = self._sessions.get(request.session)
        with trio.CancelScope() as scope:
            self._scopes[request.number] = scope
            try:
                value = encode_value(await self._result(request), f"the result of {request.method}")
                self.send(Answer(request.number, value))
            except Exception as error:  # the author's code, or a bug here
                self.send(Failure(request.number, self._failure(error, session)))
        del self._scopes[request.number]
        if scope.cancelled_caught:
            self.send(Failure(request.number, Error("cancelled")))

    def _failure(self, error: Exception, session: EnvironmentSession | None) -> Error:
        ours = traceback.extract_tb(error.__traceback__)[-1].filename
        if isinstance(error, ProtocolError | KeyError) and Path(ours).parent == Path(__file__).parent:
            return Error("bug", message=f"the worker does not understand a request: {error!r}")
        asked = [leaf for leaf in leaves_of(error) if isinstance(leaf, AskFailedError)]
        sent = error_as_sent(error, words_of if session else str, session.hint if session else lambda _: "")
        is_final = sent.kind == "ours" and sent.name in ("RewardError", "EnvironmentDefinitionError")
        return Error("asks", asks=[leaf.number for leaf in asked]) if asked and not is_final else sent

    async def _result(self, request: Request) -> Any:
        """Do what a request asks for."""
        method, arguments = request.method, request.arguments
        seconds = math.inf if request.seconds is None else request.seconds
        if method == "describe":
            return await self._describe(decode_value(arguments, Named).name)
        if method == "configure":
            asked = decode_value(arguments, Configured)
            loaded = await trio.to_thread.run_sync(self._library.load, asked.name)
            return settings_as_sent(loaded.configure(asked.given))
        if method == "make":
            return await self._make(request.session, decode_value(arguments, Make), seconds)
        if method in ("show_sandbox", "try_sandbox", "open_sandbox", "close_sandbox"):
            return await self._of_sandbox(request, seconds)
        if method == "forget":
            self._sessions.pop(request.session, None)
            return await self._sandboxes.close(request.session)
        if method == "close":
            session = self._sessions.pop(request.session, None)
            return await session.close(seconds) if session is not None else None
        session = self._sessions[request.session]
        if method == "setup":
            return await session.setup(decode_value(arguments, Task), seconds, self._sandboxes.inputs(request.session))
        if method == "stream":
            return await session.stream(decode_value(arguments, sessions.StreamRequest))
        if method == "more":
            return await session.more(*msgspec.structs.astuple(decode_value(arguments, More)))
        if method == "rollout":
            asked_of_rollout = decode_value(arguments, sessions.RolloutRequest)
            return await session.rollout(asked_of_rollout, _Asking(self, request.number))
        if method == "state":
            return await session.state(seconds)
        kind, function = self._calls(session)[method]
        return await function(decode_value(arguments, kind), seconds)

    def _calls(self, session: EnvironmentSession) -> dict[str, tuple[Any, Callable[[Any, float], Awaitable[Any]]]]:
        """The requests with one argument: its type, and the method of the session."""
        return {
            "tools": (Task, session.tools),
            "tool": (sessions.ToolRequest, session.tool),
            "reply": (Trajectory, session.reply),
            "reward": (sessions.JudgeRequest, session.reward),
            "metric": (sessions.JudgeRequest, session.metric),
            "restore": (Any, session.restore),
        }

    async def _of_sandbox(self, request: Request, seconds: float) -> Any:
        """Do what a request about a sandbox asks for."""
        if request.method == "close_sandbox":
            return await self._sandboxes.close(request.session, seconds)
        sent = decode_value(request.arguments, SandboxSent)
        if request.method == "show_sandbox":
            return await self._sandboxes.show(sent)
        if request.method == "try_sandbox":
            return await self._sandboxes.try_one(sent)
        return await self._sandboxes.open(request.session, sent, seconds)

    async def _describe(self, name: str) -> Description:
        found, progress = list[outcome.Outcome[Loaded]](), ImportProgress()
        async with trio.open_nursery() as nursery:  # an import may take long, or not return
            nursery.start_soon(_cancel_if_stalled, nursery.cancel_scope, progress)
            found.append(
                await trio.to_thread.run_sync(outcome.capture, self._library.load, name, abandon_on_cancel=True)
            )
            nursery.cancel_scope.cancel()
        if not found:
            raise BrokenPluginError(f"the environment {name} does not import\n{progress}")
        return found[0].unwrap().describe()

    async def _make(self, number: int, asked: Make, seconds: float) -> Any:
        loaded = await trio.to_thread.run_sync(self._library.load, asked.name)
        session = EnvironmentSession(loaded, self._library.settings(asked.name, asked.settings))
        await session.make(seconds)
        self._sessions[number] = session
        return session.shape() if asked.with_shape else None

    # --- what the run is asked and sent -----------------------------------------------------------------------------

    async def ask(self, request: int, method: str, arguments: Any, kind: Any) -> Any:
        """Call a function of the run. Raises AskFailedError."""
        number, event, answers = next(self._numbers), trio.Event(), list[Answer | Failure]()
        self._asked[number] = event, answers
        self.send(Ask(number, request, method, encode_value(arguments, f"the arguments of model.{method}")))
        try:
            await event.wait()
        except trio.Cancelled:
            self.send(Cancel(number))
            with trio.CancelScope(shield=True):
                await event.wait()
            raise
        finally:
            del self._asked[number]
        (answer,) = answers
        if isinstance(answer, Answer):
            return decode_value(answer.value, kind)
        raise AskFailedError(number, answer.error.message)

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Send the errors that are reported inside the block to the run."""
        with _Reports(self, trio.lowlevel.current_trio_token()):
            yield


async def _close(session: EnvironmentSession) -> None:
    try:
        await session.close(CLOSE_SECONDS)
    except Exception as error:  # the author's code may raise anything
        traceback.print_exception(error)


class _Asking:
    """The run, as one request may ask it."""

    def __init__(self, server: _Server, request: int) -> None:
        self._server, self._request = server, request

    async def ask(self, method: str, arguments: Any, kind: Any) -> Any:
        return await self._server.ask(self._request, method, arguments, kind)


class _Reports(ErrorLog):
    """The error log of a worker: it sends each error to the run."""

    def __init__(self, server: _Server, token: trio.lowlevel.TrioToken) -> None:
        super().__init__(Path(os.devnull), note=lambda line: None)
        self._server, self._token = server, token

    def record(self, fault: Fault, label: str, *, is_noted: bool = True) -> None:
        """Send the error. Any thread may call this."""
        message = Report(_request.get(), fault, label, is_noted)
        if trio.lowlevel.in_trio_run():
            self._server.send(message)
        else:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._server.send, message)
