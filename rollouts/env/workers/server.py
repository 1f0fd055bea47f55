"""The worker's side: answers the requests of one run, until the channel closes.

Requests are handled at the same time, each in a task of its own. The methods of `EnvironmentSession` have the names of
the requests that they handle. The environment's code runs as in a run without a worker, by the same functions, under
the request's deadline, so that its results, messages and deadlines are the same. Errors that fail no request, such as
those of tools, are sent to the run's errors.log. It needs neither torch nor a model. Not here: what carries the
messages, and how the process starts.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import os
import platform
import random
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec
import outcome
import trio

from rollouts.author_code import with_place
from rollouts.config.importing import ImportProgress
from rollouts.env import calls
from rollouts.env.advice import CONTRACT, warnings_about
from rollouts.env.authoring import JudgeMethod, ToolMethod, environment_name, metrics_of, rewards_of, roles_of, tools_of
from rollouts.env.checks import check_environment, check_source, line_of, requests_of
from rollouts.env.methods import (
    as_conversation,
    as_task,
    finite_metric,
    names_input,
    plain_state,
    reply_messages,
    with_inputs,
)
from rollouts.env.mixing import ask, with_reason
from rollouts.env.prompts import Prompts
from rollouts.env.results import ToolOutcome
from rollouts.env.schema import schema_of
from rollouts.env.shared import shared_value
from rollouts.env.task_tools import read_tools
from rollouts.env.threads import AuthorThread
from rollouts.env.tools import run_tool
from rollouts.env.workers import protocol
from rollouts.env.workers.channel import ChannelClosedError, MessageChannel
from rollouts.env.workers.library import Library, Loaded, OpenSandboxes, settings_as_sent
from rollouts.env.workers.model import AskRun, RemoteModel
from rollouts.error_log import ErrorLog, Fault
from rollouts.errors import BrokenPluginError, ConfigError, RewardError, leaves_of, words_of
from rollouts.plugins.loading import install_hint
from rollouts.sandboxes.base import Sandbox
from rollouts.types import Message, Score, Task, Trajectory
from rollouts.version import __version__

BATCH_SECONDS = 0.05  # tasks that come within this time are sent together


class EnvironmentSession:
    """One environment object. `seconds` is the deadline of a request."""

    def __init__(self, loaded: Loaded, settings: Mapping[str, Any]) -> None:
        self._loaded, self._settings = loaded, settings
        self._env: Any = None
        self._task: Task | None = None
        self._tools: dict[str, ToolMethod] | None = None
        self._streams: dict[str, _Stream] = {}

    def hint(self, error: BaseException) -> str:
        """What to install, if the environment's code did not find a module."""
        return install_hint(error, self._loaded.ref)

    async def make(self, seconds: float) -> None:
        """Build the environment object."""
        self._env = await calls.call(self._new, timeout_seconds=seconds)

    def _new(self) -> Any:
        return self._loaded.component(**copy.deepcopy(dict(self._settings)))

    async def _inputs_of(self, method: str, seconds: float = math.inf) -> dict[str, Any]:
        """What a method of the environment names besides its arguments."""
        if not names_input(self._env, method, "shared"):
            return {}
        return {"shared": await shared_value(self._loaded.component, self._settings, self._new).get(seconds)}

    def shape(self) -> protocol.ObjectShape:
        """What the object has. Its mistake is data here: the run raises it when it checks its environments."""
        methods = [name for name in CONTRACT if hasattr(self._env, name)]
        try:
            check_environment(self._env)
            return protocol.ObjectShape(
                methods,
                _as_sent(tools_of(self._env)),
                list(roles_of(self._env)),
                warnings_about(self._env),
                has_sandbox=names_input(self._env, "setup", "sandbox"),
                data_error=self._data_error(),
            )
        except Exception as error:  # a descriptor of the author's class may raise anything
            return protocol.ObjectShape(methods, error=protocol.error_as_sent(error, hint=self.hint))

    def _data_error(self) -> protocol.Error | None:
        try:
            if isinstance(self._env, Prompts):
                self._env.check_data()
        except ConfigError as error:
            return protocol.error_as_sent(error)
        return None

    async def setup(self, task: Task, seconds: float, sandbox: dict[str, Sandbox]) -> None:
        """Run `setup` for the task of the episode. `sandbox` is the input of this name, if `setup` names it."""
        self._task = task
        inputs = await self._inputs_of("setup", seconds) | sandbox
        await calls.call(*with_inputs(self._env.setup, [task], inputs), timeout_seconds=seconds)

    async def tools(self, task: Task, seconds: float) -> list[protocol.ToolSent]:
        """The tools that the environment's `tools` returns for a task."""
        with line_of(self._env.tools):
            read = functools.partial(read_tools, self._env)
            found = await calls.call(self._env.tools, task, timeout_seconds=seconds, convert=read)
        self._tools = {tool.name: tool for tool in found}
        return _as_sent(found)

    async def tool(self, asked: protocol.ToolRequest, seconds: float) -> ToolOutcome:
        """Run a tool call of the model."""
        if self._tools is None:
            self._tools = {tool.name: tool for tool in tools_of(self._env)}
        most = math.inf if asked.seconds_max is None else asked.seconds_max
        return await run_tool(self._tools, asked.call, characters_max=asked.characters_max, seconds_max=most)

    async def reply(self, trajectory: Trajectory, seconds: float) -> list[Message]:
        """The environment's answer to a reply without tool calls."""
        returned = await calls.call(self._env.reply, trajectory, timeout_seconds=seconds)
        return reply_messages(self._env, returned)

    async def rollout(self, asked: protocol.RolloutRequest, run: AskRun) -> protocol.RolloutDone:
        """Run the environment's own `rollout`."""
        model = RemoteModel(run, asked.models)
        returned = await calls.call(self._env.rollout, asked.task, model, async_library="trio")
        return protocol.RolloutDone(model.place_of(returned), model.infos)

    async def reward(self, asked: protocol.JudgeRequest, seconds: float) -> Score:
        """The verdict of one of the environment's rewards, with the reason if there is one."""
        method = _named(rewards_of(self._env), asked.name)
        try:
            requests, available = requests_of(method.function), self._available(asked.trajectory)
            verdict = await ask(method.function, requests, available, name=method.name, seconds=seconds)
        except RewardError as error:
            raise RewardError(with_place(error, method.function)) from error
        verdict = with_reason(verdict, method.function)
        return Score(verdict.value, dict(verdict.parts), verdict.why, {}, list(verdict.turns))

    async def metric(self, asked: protocol.JudgeRequest, seconds: float) -> float:
        """The number of one of the environment's metrics."""
        method = _named(metrics_of(self._env), asked.name)
        read = functools.partial(finite_metric, method)
        available = self._available(asked.trajectory)
        inputs = [available[name] for name in requests_of(method.function)]
        value: float = await calls.call(method.function, *inputs, timeout_seconds=seconds, convert=read)
        return value

    def _available(self, trajectory: Trajectory) -> dict[str, Any]:
        return {"task": trajectory.task, "trajectory": trajectory, "env": self._env}

    async def state(self, asked: None, seconds: float) -> Any:
        """The environment's state, as JSON data."""
        return plain_state(environment_name(self._env), await calls.call(self._env.state, timeout_seconds=seconds))

    async def restore(self, state: Any, seconds: float) -> None:
        """Give a state back to the environment."""
        await calls.call(self._env.restore, state, timeout_seconds=seconds)

    async def close(self, seconds: float) -> None:
        """Run `close`, if the environment has one."""
        if hasattr(self._env, "close"):
            # A separate limiter, so that `close` does not wait for other episodes' tools.
            limiter = trio.CapacityLimiter(1)
            await calls.call(self._env.close, timeout_seconds=seconds, limiter=limiter)

    # --- tasks and demonstrations -----------------------------------------------------------------------------------

    async def stream(self, asked: protocol.StreamRequest, seconds: float) -> protocol.StreamStart:
        """Begin to read `tasks` or `demonstrations`. One object has at most one stream of each."""
        version, numbers, gauss = asked.rng
        rng = random.Random()
        rng.setstate((version, tuple(numbers), gauss))
        inputs = await self._inputs_of(asked.method)
        method, *arguments = with_inputs(getattr(self._env, asked.method), [asked.split, rng], inputs)
        stream = _Stream(functools.partial(method, *arguments), asked, self.hint)
        self._streams[asked.method] = stream
        return await stream.begin()

    async def more(self, asked: protocol.More, seconds: float) -> protocol.Batch:
        """The values of a stream from `first` on, at most `count`. Those of an iterator before them are skipped."""
        return await self._streams[asked.method].more(asked.first, asked.count)


def _as_sent(tools: Sequence[ToolMethod]) -> list[protocol.ToolSent]:
    return [protocol.ToolSent(tool.name, tool.timeout_seconds, schema_of(tool), tool.role) for tool in tools]


def _named(methods: Sequence[JudgeMethod], name: str) -> JudgeMethod:
    return next(each for each in methods if each.name == name)


class _Stream:
    """The values of `tasks` or `demonstrations`, read in a thread of their own."""

    def __init__(
        self, method: Callable[..., Any], asked: protocol.StreamRequest, hint: Callable[[BaseException], str]
    ) -> None:
        self._method, self._asked, self._hint = method, asked, hint
        self._thread = AuthorThread()
        self._values: Any = None
        self._iterator: Iterator[Any] = iter(())
        self._drawn = 0

    async def begin(self) -> protocol.StreamStart:
        """Call the method, and look at what it returns."""
        label, is_tasks = self._asked.label, self._asked.method == "tasks"
        values = await self._in_thread(self._method)
        check_source(values, label, "Task" if is_tasks else "lists of Message")
        self._values = values
        if isinstance(values, Sequence):
            kind = "list" if isinstance(values, list | tuple) else "sequence"
            return protocol.StreamStart(kind, await self._in_thread(lambda: len(values)))
        self._iterator = await self._in_thread(lambda: iter(values))
        return protocol.StreamStart("iterator")

    async def more(self, first: int, count: int) -> protocol.Batch:
        """At most `count` values. It stops earlier if they come slowly."""
        batch: protocol.Batch = await self._in_thread(
            functools.partial(self._draw, first, min(count, protocol.BATCH_MAX))
        )
        return batch

    def _draw(self, first: int, count: int) -> protocol.Batch:
        items: list[msgspec.Raw] = []
        begun, values = time.monotonic(), self._iterator
        if isinstance(self._values, Sequence):
            values = (self._values[place] for place in range(first, first + count))
        try:
            while not isinstance(self._values, Sequence) and self._drawn < first:
                next(values)
                self._drawn += 1
            for value in itertools.islice(values, count):
                self._drawn += 1
                items.append(self._as_sent(value))
                if time.monotonic() - begun > BATCH_SECONDS:
                    return protocol.Batch(items)
        except StopIteration:  # it ended earlier than before
            return protocol.Batch(items, over=True)
        except Exception as error:  # the author's code may raise anything; the values before it count
            return protocol.Batch(items, error=protocol.error_as_sent(error, hint=self._hint))
        return protocol.Batch(items, over=len(items) < count)

    def _as_sent(self, value: Any) -> msgspec.Raw:
        label = self._asked.label
        if self._asked.method == "tasks":
            task = as_task(value)
            return protocol.encode_value(task, f"{label} gave a task that")
        return protocol.encode_value(as_conversation(value, label), f"{label} gave a demonstration that")

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        """Call it in the stream's thread. The run stops waiting at its own deadline."""
        call = functools.partial(self._thread.call, function, math.inf)
        return await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1))


# --- the requests of one run ------------------------------------------------------------------------------------------


CLOSE_SECONDS = 10.0  # for environment objects that a run has left

_request: ContextVar[int] = ContextVar("rollouts-worker-request", default=0)


class AskFailedError(Exception):
    """A function of the run failed. The environment's code should not catch this exception."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


async def serve_worker(
    channel: MessageChannel, library: Library | None = None, sandboxes: OpenSandboxes | None = None
) -> None:
    """Say hello, and answer requests until the run closes the channel. Environment objects that are left then are
    closed.
    """
    server = _Server(channel, library or Library(), sandboxes or OpenSandboxes())
    with _Reports(server, trio.lowlevel.current_trio_token()):
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
