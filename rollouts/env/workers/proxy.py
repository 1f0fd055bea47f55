"""The run's side: a class that behaves as the environment's class, whose code runs in workers.

It is made from the description of a worker. An object of it has the methods that the environment has, and no others.
`tasks` and `demonstrations` are plain, and the other methods are called through `rollouts.env.calls`. If a worker dies
while tasks are read, they are read on in another one, from the same random numbers. The sandboxes of its episodes are
in the workers too.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, cast, overload

import msgspec

from rollouts.config.files import Source
from rollouts.config.workers import VENV
from rollouts.env import calls
from rollouts.env.authoring import JudgeMethod, ToolMethod, WorkerEnvironment
from rollouts.env.results import ToolOutcome
from rollouts.env.workers import protocol
from rollouts.env.workers.library import settings_as_sent
from rollouts.env.workers.pool import DEATHS_MAX, WorkerLease, WorkerPool
from rollouts.errors import ConfigError, UnknownComponentError, WorkerError, WorkersLostError, in_lines, said_of
from rollouts.gateway.exchange import APIError
from rollouts.types import Message, Role, Task, ToolCall, Trajectory

FIRST_BATCH = 8  # a short first batch: most callers want a few tasks


def remote_class(pool: WorkerPool, name: str) -> type[RemoteEnvironment]:
    """The class of the environment of this name. Raises PluginError as without a worker, and ConfigError if no worker
    starts.
    """
    about: protocol.Description = _asked(pool, "describe", {"name": name})
    content = {"__doc__": about.doc, "pool": pool, "_name": name, "description": about, "_shapes": {}}
    made = type(about.class_name, (RemoteEnvironment,), content)
    made.__module__ = __name__
    return made


def configured(
    pool: WorkerPool, name: str, given: Mapping[str, Any], source: Source, path: Sequence[str]
) -> dict[str, Any]:
    """All settings of the environment, checked and converted by its worker, as plain data. Raises ConfigError as
    without a worker.
    """
    try:
        sent = settings_as_sent(given)
    except TypeError as error:
        raise ConfigError(
            f"the environment {name} runs in a worker, so its settings must be plain data: {error}"
        ) from error
    asked = {"name": name, "given": protocol.Given(sent, list(path), source.path, source.text)}
    settings: dict[str, Any] = _asked(pool, "configure", asked)
    return settings


def _asked(pool: WorkerPool, method: str, arguments: Any) -> Any:
    try:
        return pool.call(method, arguments)
    except WorkerError as error:
        raise ConfigError(f"--worker {pool.settings.kind}: {error}") from error


class RemoteEnvironment(WorkerEnvironment):
    """The base class. `description` is what the worker said; a subclass has its own."""

    description: protocol.Description
    pool: WorkerPool
    _name: str
    _shapes: dict[bytes, protocol.ObjectShape]

    def __init__(self, **settings: Any) -> None:
        self._begin(settings, is_episode=False)
        self._keep(self.pool.call("make", self._make_request(), lease=self._lease))

    @classmethod
    def maker(cls, settings: Mapping[str, Any]) -> calls.RemoteCall:
        """A function that makes an object in a trio task, for an episode."""
        return _Call(functools.partial(cls._made, settings))

    @classmethod
    async def _made(cls, settings: Mapping[str, Any], *, seconds: float) -> RemoteEnvironment:
        env = cls.__new__(cls)
        env._begin(settings, is_episode=True)
        env._keep(await env.call("make", env._make_request(), seconds=seconds))
        return env

    def _begin(self, settings: Mapping[str, Any], *, is_episode: bool) -> None:
        self._given, self._settings = settings, settings_as_sent(settings)
        self._key = msgspec.json.encode(self._settings)
        self._lease = WorkerLease(is_episode)
        weakref.finalize(self, self.pool.forget, self._lease).atexit = False

    def _make_request(self) -> dict[str, Any]:
        return {"name": self._name, "settings": self._settings, "with_shape": self._key not in self._shapes}

    def _keep(self, shape: protocol.ObjectShape | None) -> None:
        if shape is not None:
            self._shapes[self._key] = shape

    @property
    def _shape(self) -> protocol.ObjectShape:
        return self._shapes[self._key]

    # --- what the environment has -----------------------------------------------------------------------------------

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles of the environment."""
        return tuple(self._shape.roles)

    def remote_tools(self) -> list[ToolMethod]:
        """The marked tools."""
        self.remote_check()
        return [_tool_method(self, sent) for sent in self._shape.tools]

    @classmethod
    def remote_rewards(cls, env: Any) -> list[JudgeMethod]:
        """The rewards."""
        return [_judge_method(env, "reward", each) for each in cls.description.rewards]

    @classmethod
    def remote_metrics(cls, env: Any) -> list[JudgeMethod]:
        """The metrics."""
        return [_judge_method(env, "metric", each) for each in cls.description.metrics]

    def remote_check(self) -> None:
        """Raise the environment's first mistake."""
        self._raise(self._shape.error)

    def remote_check_data(self) -> None:
        """Raise ConfigError if the environment reads rows that are not there."""
        self._raise(self._shape.data_error)

    def _raise(self, error: protocol.Error | None) -> None:
        if error is not None:
            raise protocol.error_received(error, self.pool.name)

    def remote_warnings(self) -> list[tuple[str, int, str]]:
        """The warnings for its author."""
        return self._shape.warnings

    @property
    def has_sandbox(self) -> bool:
        """Whether `setup` names a sandbox."""
        return self._shape.has_sandbox

    def remote_lease(self, sandboxes: Any) -> RemoteLease | None:
        """The sandbox of an episode; None if `setup` names none."""
        if not self.has_sandbox:
            return None
        assert isinstance(sandboxes, RemoteSandboxes), f"no sandboxes were given for {self._name}"
        return RemoteLease(self, sandboxes)

    # --- what a run calls -------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        shape = self.__dict__.get("_key") and self._shapes.get(self._key)
        if name in _METHODS and shape and name in shape.methods:
            return _METHODS[name](self, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @property
    def close(self) -> calls.RemoteCall:
        """Close the environment object, which the worker then forgets."""
        return _Close(self, "close")

    async def call(self, method: str, arguments: Any = None, **how: Any) -> Any:
        """A request of this object; see `WorkerPool.call_async`."""
        return await self.pool.call_async(method, arguments, lease=self._lease, **how)


class _Call(calls.RemoteCall):
    def __init__(self, function: Callable[..., Awaitable[Any]]) -> None:
        self._function = function

    async def call(self, *args: Any, seconds: float = math.inf) -> Any:
        return await self._function(*args, seconds=seconds)


class _Method(calls.RemoteCall):
    """A method of an object. Two of one method are equal, as bound methods are."""

    def __init__(self, env: RemoteEnvironment, name: str) -> None:
        self._env, self._name = env, name

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and (self._env, self._name) == (other._env, other._name)

    def __hash__(self) -> int:
        return hash((id(self._env), self._name))

    async def call(self, *args: Any, seconds: float = math.inf) -> Any:
        return await self._env.call(self._name, *args, seconds=seconds)


class _Tools(_Method):
    async def call(self, *args: Any, seconds: float = math.inf) -> list[ToolMethod]:
        return [_tool_method(self._env, each) for each in await super().call(*args, seconds=seconds)]


class _Close(_Method):
    async def call(self, *args: Any, seconds: float = math.inf) -> None:
        with contextlib.suppress(WorkerError, WorkersLostError):  # everything that it held has ended with the worker
            await super().call(seconds=seconds)


class _Rollout(_Method):
    async def call(self, *args: Any, seconds: float = math.inf) -> Trajectory | None:
        task, model = args
        models = {"": _state_of(model), **{name: _state_of(each) for name, each in model.roles.items()}}

        async def serve(ask: protocol.Ask) -> protocol.ModelAnswer | protocol.ClientAnswer:
            if ask.method == "answer":
                return await _answer_client(model, protocol.decode_value(ask.arguments, protocol.ClientAsked))
            asked: protocol.ModelAsked = protocol.decode_value(ask.arguments, protocol.ModelAsked)
            of_role = model.role(asked.role) if asked.role else model
            if ask.method == "chat":
                messages = [await of_role.chat(asked.messages, asked.tools)]
            elif ask.method == "say":
                messages = [await of_role.say(asked.messages)]
            elif ask.method == "release":
                of_role.release()
                messages = []
            else:
                messages = await of_role.call_tools(asked.messages[0])
            return protocol.ModelAnswer(messages, _state_of(of_role))

        request = protocol.RolloutRequest(task, models)
        done: protocol.RolloutDone = await self._env.call("rollout", request, seconds=seconds, serve=serve)

        def trajectory(role: str, place: int) -> Trajectory:
            known: list[Trajectory] = (model.role(role) if role else model).trajectories
            return known[place]

        for role, place, info in done.infos:
            trajectory(role, place).info = info
        return None if done.chosen is None else trajectory(*done.chosen)


class _Judge(_Method):
    """A reward or a metric of an object, or of the class, which cannot be called."""

    requests = ("trajectory",)

    def __init__(self, env: Any, word: str, name: str) -> None:
        super().__init__(env, name)
        self._word = word

    async def call(self, *args: Any, seconds: float = math.inf) -> Any:
        return await self._env.call(self._word, protocol.JudgeRequest(self._name, *args), seconds=seconds)


def _judge_method(env: Any, word: str, sent: protocol.JudgeSent) -> JudgeMethod:
    return JudgeMethod(sent.name, cast(Any, _Judge(env, word, sent.name)), sent.weight, sent.role)


class _Tool(calls.RemoteTool):
    def __init__(self, env: RemoteEnvironment, schema: dict[str, Any]) -> None:
        self._env, self.remote_schema = env, schema

    async def run(self, tool_call: ToolCall, characters_max: int, seconds_max: float) -> ToolOutcome:
        most = None if math.isinf(seconds_max) else seconds_max
        request = protocol.ToolRequest(tool_call, characters_max, most)
        outcome: ToolOutcome = await self._env.call("tool", request)
        return outcome


def _tool_method(env: RemoteEnvironment, sent: protocol.ToolSent) -> ToolMethod:
    return ToolMethod(sent.name, cast(Any, _Tool(env, sent.schema)), sent.timeout_seconds, None, sent.role)


async def _answer_client(model: Any, client: protocol.ClientAsked) -> protocol.ClientAnswer:
    """The model's answer to a client in the worker."""
    of_role = model.role(client.role) if client.role else model
    try:
        answered = await of_role.answer(client.asked)
    except APIError as error:
        refused = protocol.Refused(error.status, str(error), error.parameter, error.code)
        return protocol.ClientAnswer(_state_of(of_role), refused=refused)
    return protocol.ClientAnswer(_state_of(of_role), answered)


def _state_of(model: Any) -> protocol.ModelState:
    trajectory = model.trajectory
    place = next((place for place, each in enumerate(model.trajectories) if each is trajectory), None)
    return protocol.ModelState(model.tokens_left, model.turns_left, model.messages, place, trajectory, model.answer_as)


# --- sandboxes ------------------------------------------------------------------------------------------------------


class RemoteSandboxes:
    """Sandboxes in the workers of one environment, made by the component that is installed there. `words` and
    `not_stopped` are those of `Sandboxes`.

    Raises UserError if the workers cannot open one.
    """

    def __init__(self, pool: WorkerPool, sent: protocol.SandboxSent) -> None:
        self.sent, self._pool = sent, pool
        try:
            shown: protocol.SandboxShown = self._ask("show_sandbox")
        except UnknownComponentError as error:
            hint = f"type: rollouts env install PACKAGE --with PACKAGE-OF-{sent.name}"
            raise UnknownComponentError(in_lines(str(error), hint if pool.settings.kind == VENV else "")) from error
        self.words, self.not_stopped = shown.words, shown.not_stopped

    def try_one(self) -> None:
        """Open one for a moment. Raises ConfigError."""
        self._ask("try_sandbox")

    def _ask(self, method: str) -> Any:
        with said_of(f"the worker {self._pool.name}"):
            try:
                return self._pool.call(method, self.sent)
            except WorkerError as error:
                raise ConfigError(str(error)) from error


class RemoteLease:
    """The sandbox of one episode, in the worker that has its environment object; see `rollouts.sandboxes.base`."""

    def __init__(self, env: RemoteEnvironment, sandboxes: RemoteSandboxes) -> None:
        self.lost = ""
        self._env = env
        self.open, self.close = _Call(functools.partial(env.call, "open_sandbox", sandboxes.sent)), _Call(self._close)

    async def _close(self, *, seconds: float) -> None:
        with contextlib.suppress(WorkerError, WorkersLostError):  # it has ended with its worker
            self.lost = await self._env.call("close_sandbox", seconds=seconds)


# --- tasks and demonstrations ---------------------------------------------------------------------------------------


class _Stream:
    """A call of `tasks` or `demonstrations`."""

    def __init__(self, env: RemoteEnvironment, method: str) -> None:
        self._env, self._method = env, method

    def __call__(self, split: str, rng: random.Random) -> Any:
        env = self._env
        name = f"{env._name}.{self._method}({split!r}, rng)"
        asked = protocol.StreamRequest(self._method, split, list(rng.getstate()), name)
        start = _start(env, asked)
        if start.kind == "sequence":
            return _RemoteSequence(env, asked, start.count)
        values = _values(env, asked, start.count if start.kind == "list" else None)
        return list(values) if start.kind == "list" else values


def _start(env: RemoteEnvironment, asked: protocol.StreamRequest) -> protocol.StreamStart:
    start: protocol.StreamStart = env.pool.call("stream", asked, lease=env._lease)
    return start


def _batch(
    env: RemoteEnvironment, asked: protocol.StreamRequest, first: int, count: int
) -> tuple[RemoteEnvironment, protocol.Batch]:
    """Some values, and the environment object that has given them. If its worker died, another object reads on."""
    for _ in range(DEATHS_MAX):
        try:
            more = {"method": asked.method, "first": first, "count": count}
            sent = env.pool.call("more", more, lease=env._lease)
            return env, msgspec.json.decode(sent, type=protocol.Batch)
        except WorkerError as error:
            lost = error
            with contextlib.suppress(WorkerError):
                env = type(env)(**env._given)
                _start(env, asked)
    raise lost


def _values(env: RemoteEnvironment, asked: protocol.StreamRequest, count: int | None) -> Iterator[Any]:
    drawn, size = 0, FIRST_BATCH
    kind = Task if asked.method == "tasks" else list[Message]
    while count is None or drawn < count:
        env, batch = _batch(env, asked, drawn, size if count is None else min(protocol.BATCH_MAX, count - drawn))
        for item in batch.items:
            drawn += 1
            yield protocol.decode_value(item, kind)
        if batch.error is not None:
            raise protocol.error_received(batch.error, env.pool.name)
        if batch.over:
            return
        size = min(protocol.BATCH_MAX, size * 2)


class _RemoteSequence(Sequence[Any]):
    """A sequence in a worker, of which values are drawn when they are asked for."""

    def __init__(self, env: RemoteEnvironment, asked: protocol.StreamRequest, count: int) -> None:
        self._env, self._asked, self._count = env, asked, count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> list[Any]: ...
    def __getitem__(self, place: int | slice) -> Any:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(self._count))]
        place = place + self._count if place < 0 else place
        if not 0 <= place < self._count:
            raise IndexError(place)
        self._env, batch = _batch(self._env, self._asked, place, 1)
        if batch.error is not None:
            raise protocol.error_received(batch.error, self._env.pool.name)
        return protocol.decode_value(batch.items[0], Task if self._asked.method == "tasks" else list[Message])


_METHODS: Mapping[str, Any] = {
    "tasks": _Stream,
    "demonstrations": _Stream,
    "setup": _Method,
    "tools": _Tools,
    "reply": _Method,
    "rollout": _Rollout,
    "state": _Method,
    "restore": _Method,
}
