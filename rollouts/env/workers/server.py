"""The worker's side: answers the requests of one run, until the channel closes.

Requests are handled at the same time, each in a task of its own. All code of the environment runs through
`rollouts.env.calls`, under the request's deadline. Errors that fail no request, such as those of tools, are sent to the
run's errors.log. It needs neither torch nor a model. Not here: what carries the messages, and how the process starts.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import platform
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec
import outcome
import trio

from rollouts.config.importing import ImportProgress
from rollouts.env.workers import protocol
from rollouts.env.workers.channel import ChannelClosedError, MessageChannel
from rollouts.env.workers.library import Library, Loaded, OpenSandboxes, settings_as_sent
from rollouts.env.workers.sessions import EnvironmentSession
from rollouts.error_log import ErrorLog, Fault
from rollouts.errors import BrokenPluginError, leaves_of, words_of
from rollouts.version import __version__

CLOSE_SECONDS = 10.0  # for environment objects that a run has left

_request: ContextVar[int] = ContextVar("rollouts-worker-request", default=0)


class AskFailedError(Exception):
    """A function of the run failed. The environment's code should not catch this exception."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


async def serve(
    channel: MessageChannel, library: Library | None = None, sandboxes: OpenSandboxes | None = None
) -> None:
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
    def __init__(self, channel: MessageChannel, library: Library, sandboxes: OpenSandboxes) -> None:
        self._channel, self._library, self._sandboxes = channel, library, sandboxes
        self._sessions: dict[int, EnvironmentSession] = {}
        self._scopes: dict[int, trio.CancelScope] = {}
        self._asked: dict[int, tuple[trio.Event, list[protocol.Answer | protocol.Failure]]] = {}
        self._numbers = itertools.count(1)
        self._outgoing: trio.MemorySendChannel[Any]
        self._outgoing, self._to_send = trio.open_memory_channel(math.inf)
        self._process = os.getpid()

    async def run(self) -> None:
        self.send(protocol.Hello(protocol.VERSION, __version__, platform.python_version()))
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
            message = protocol.read_from_run(await self._channel.receive())
            if isinstance(message, protocol.Request):
                nursery.start_soon(self._handle, message)
            elif isinstance(message, protocol.Cancel):
                if message.number in self._scopes:
                    self._scopes[message.number].cancel()
            elif isinstance(message, protocol.Ping):
                self.send(protocol.Pong(message.number))
            elif message.number in self._asked:
                event, answers = self._asked[message.number]
                answers.append(message)
                event.set()

    # --- requests ---------------------------------------------------------------------------------------------------

    async def _handle(self, request: protocol.Request) -> None:
        _request.set(request.number)
        session = self._sessions.get(request.session)
        with trio.CancelScope() as scope:
            self._scopes[request.number] = scope
            try:
                value = protocol.encode_value(await self._result(request), f"the result of {request.method}")
                self.send(protocol.Answer(request.number, value))
            except Exception as error:  # the author's code, or a bug here
                self.send(protocol.Failure(request.number, self._failure(error, session)))
        del self._scopes[request.number]
        if scope.cancelled_caught:
            self.send(protocol.Failure(request.number, protocol.Error("cancelled")))

    def _failure(self, error: Exception, session: EnvironmentSession | None) -> protocol.Error:
        ours = traceback.extract_tb(error.__traceback__)[-1].filename
        if isinstance(error, protocol.ProtocolError | KeyError) and Path(ours).parent == Path(__file__).parent:
            return protocol.Error("bug", message=f"the worker does not understand a request: {error!r}")
        asked = [leaf for leaf in leaves_of(error) if isinstance(leaf, AskFailedError)]
        sent = protocol.error_as_sent(error, words_of if session else str, session.hint if session else lambda _: "")
        is_final = sent.kind == "ours" and sent.name in ("RewardError", "EnvironmentDefinitionError")
        return protocol.Error("asks", asks=[leaf.number for leaf in asked]) if asked and not is_final else sent

    async def _result(self, request: protocol.Request) -> Any:
        """Do what a request asks for: those that are not listed here are methods of the environment object."""
        method, number = request.method, request.session
        seconds = math.inf if request.seconds is None else request.seconds
        asked = protocol.decode_value(request.arguments, protocol.REQUESTS[method][0])
        if method == "describe":
            return await self._describe(asked.name)
        if method == "configure":
            loaded = await trio.to_thread.run_sync(self._library.load, asked.name)
            return settings_as_sent(loaded.configure(asked.given))
        if method == "make":
            return await self._make(number, asked, seconds)
        if method == "show_sandbox":
            return await self._sandboxes.show(asked)
        if method == "try_sandbox":
            return await self._sandboxes.try_one(asked)
        if method == "open_sandbox":
            return await self._sandboxes.open(number, asked, seconds)
        if method == "close_sandbox":
            return await self._sandboxes.close(number, seconds)
        if method == "forget":
            self._sessions.pop(number, None)
            return await self._sandboxes.close(number)
        if method == "close":
            session = self._sessions.pop(number, None)
            return await session.close(seconds) if session is not None else None
        session = self._sessions[number]
        if method == "setup":
            return await session.setup(asked, seconds, self._sandboxes.inputs(number))
        if method == "rollout":
            return await session.rollout(asked, functools.partial(self.ask, request.number))
        return await getattr(session, method)(asked, seconds)

    async def _describe(self, name: str) -> protocol.Description:
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

    async def _make(self, number: int, asked: protocol.Make, seconds: float) -> Any:
        loaded = await trio.to_thread.run_sync(self._library.load, asked.name)
        session = EnvironmentSession(loaded, self._library.settings(asked.name, asked.settings))
        await session.make(seconds)
        self._sessions[number] = session
        return session.shape() if asked.with_shape else None

    # --- what the run is asked and sent -----------------------------------------------------------------------------

    async def ask(self, request: int, method: str, arguments: Any, kind: Any) -> Any:
        """Call a function of the run. Raises AskFailedError."""
        number, event, answers = next(self._numbers), trio.Event(), list[protocol.Answer | protocol.Failure]()
        self._asked[number] = event, answers
        self.send(
            protocol.Ask(number, request, method, protocol.encode_value(arguments, f"the arguments of model.{method}"))
        )
        try:
            await event.wait()
        except trio.Cancelled:
            self.send(protocol.Cancel(number))
            with trio.CancelScope(shield=True):
                await event.wait()
            raise
        finally:
            del self._asked[number]
        (answer,) = answers
        if isinstance(answer, protocol.Answer):
            return protocol.decode_value(answer.value, kind)
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


class _Reports(ErrorLog):
    """The error log of a worker: it sends each error to the run."""

    def __init__(self, server: _Server, token: trio.lowlevel.TrioToken) -> None:
        super().__init__(Path(os.devnull), note=lambda line: None)
        self._server, self._token = server, token

    def record(self, fault: Fault, label: str, *, is_noted: bool = True) -> None:
        """Send the error. Any thread may call this."""
        message = protocol.Report(_request.get(), fault, label, is_noted)
        if trio.lowlevel.in_trio_run():
            self._server.send(message)
        else:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._server.send, message)
