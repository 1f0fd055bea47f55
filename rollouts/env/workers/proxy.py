"""The run's side: a class that behaves as the environment's class, whose code runs in workers.

It is made from the description of a worker. An object of it has the methods that the environment has, and no others.
`tasks` and `demonstrations` are plain, and the other methods are called through `rollouts.env.calls`. If a worker dies
while tasks are read, they are read on in another one, from the same random numbers.
"""

from __future__ import annotations

import contextlib
import math
import random
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import msgspec

from rollouts.config.files import Source
from rollouts.env import calls
from rollouts.env.authoring import JudgeMethod, Remote, ToolMethod
from rollouts.env.results import ToolOutcome
from rollouts.env.workers.describe import Description, Given, JudgeSent, settings_as_sent
from rollouts.env.workers.model import ClientAnswer, ClientAsked, ModelAnswer, ModelAsked, ModelState, Refused
from rollouts.env.workers.pool import DEATHS_MAX, WorkerLease, WorkerPool
from rollouts.env.workers.protocol import Ask, Error, decode_value, error_received
from rollouts.env.workers.remote_sandboxes import RemoteLease, RemoteSandboxes
from rollouts.env.workers.sessions import (
    BATCH_MAX,
    Batch,
    JudgeRequest,
    RolloutDone,
    RolloutRequest,
    Shape,
    StreamRequest,
    StreamStart,
    ToolRequest,
    ToolSent,
)
from rollouts.errors import ConfigError, WorkerError, WorkersLostError
from rollouts.gateway.exchange import APIError
from rollouts.types import Message, Role, Score, Task, ToolCall, Trajectory

STREAMS = ("tasks", "demonstrations")
FIRST_BATCH = 8  # a short first batch: most callers want a few tasks


def remote_class(pool: WorkerPool, name: str) -> type[RemoteEnvironment]:
    """The class of the environment of this name. Raises PluginError as without a worker, and ConfigError if no worker
    starts.
    """
    about: Description = _asked(pool, "describe", {"name": name}, Description)
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
    asked = {"name": name, "given": Given(sent, list(path), source.path, source.text)}
    settings: dict[str, Any] = _asked(pool, "configure", asked, dict[str, Any])
    return settings


def _asked(pool: WorkerPool, method: str, arguments: Any, kind: Any) -> Any:
    try:
        return pool.call(method, arguments, kind=kind)
    except WorkerError as error:
        raise ConfigError(f"--worker {pool.settings.kind}: {error}") from error


class RemoteEnvironment(Remote):
    """The base class. `description` is what the worker said; a subclass has its own."""

    description: Description
    pool: WorkerPool
    _name: str
    _shapes: dict[bytes, Shape]

    def __init__(self, **settings: Any) -> None:
        self._begin(settings, is_episode=False)
        shape = self.pool.call("make", self._make_request(), kind=Shape | None, lease=self._lease)
        self._keep(shape)

    @classmethod
    def maker(cls, settings: Mapping[str, Any]) -> calls.RemoteCall:
        """A function that makes an object in a trio task, for an episode."""
        return _Make(cls, settings)

    def _begin(self, settings: Mapping[str, Any], *, is_episode: bool) -> None:
        self._given, self._settings = settings, settings_as_sent(settings)
        self._key = msgspec.json.encode(self._settings)
        self._lease = WorkerLease(is_episode)
        weakref.finalize(self, self.pool.forget, self._lease).atexit = False

    def _make_request(self) -> dict[str, Any]:
        return {"name": self._name, "settings": self._settings, "with_shape": self._key not in self._shapes}

    def _keep(self, shape: Shape | None) -> None:
        if shape is not None:
            self._shapes[self._key] = shape

    @property
    def _shape(self) -> Shape:
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
        return cls._judges(env, "reward", cls.description.rewards)

    @classmethod
    def remote_metrics(cls, env: Any) -> list[JudgeMethod]:
        """The metrics."""
        return cls._judges(env, "metric", cls.description.metrics)

    @staticmethod
    def _judges(env: Any, word: str, sent: Sequence[JudgeSent]) -> list[JudgeMethod]:
        return [
            JudgeMethod(each.name, _as_function(_Judge(env, word, each.name)), each.weight, each.role) for each in sent
        ]

    def remote_check(self) -> None:
        """Raise the environment's first mistake."""
        self._raise(self._shape.error)

    def remote_check_data(self) -> None:
        """Raise ConfigError if the environment reads rows that are not there."""
        self._raise(self._shape.data_error)

    def _raise(self, error: Error | None) -> None:
        if error is not None:
            raise error_received(error, self.pool.name)

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
        return RemoteLease(self.call, sandboxes)

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


class _Remote(calls.RemoteCall):
    """A method of an object. Two of one method are equal, as bound methods are."""

    def __init__(self, env: RemoteEnvironment, name: str) -> None:
        self._env, self._name = env, name

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and (self._env, self._name) == (other._env, other._name)

    def __hash__(self) -> int:
        return hash((id(self._env), self._name))


class _Make(calls.RemoteCall):
    def __init__(self, cls: type[RemoteEnvironment], settings: Mapping[str, Any]) -> None:
        self._cls, self._settings = cls, settings

    async def call(self, *args: Any, seconds: float = math.inf) -> RemoteEnvironment:
        env = self._cls.__new__(self._cls)
        env._begin(self._settings, is_episode=True)
        env._keep(await env.call("make", env._make_request(), kind=Shape | None, seconds=seconds))
        return env


class _Setup(_Remote):
    async def call(self, *args: Any, seconds: float = math.inf) -> None:
        (task,) = args
        await self._env.call("setup", task, seconds=seconds, whose="the task")


class _Tools(_Remote):
    async def call(self, *args: Any, seconds: float = math.inf) -> list[ToolMethod]:
        sent = await self._env.call("tools", *args, kind=list[ToolSent], seconds=seconds)
        return [_tool_method(self._env, each) for each in sent]


class _Reply(_Remote):
    async def call(self, *args: Any, seconds: float = math.inf) -> list[Message]:
        messages: list[Message] = await self._env.call("reply", *args, kind=list[Message], seconds=seconds)
        return messages


class _State(_Remote):
    async def call(self, *args: Any, seconds: float = math.inf) -> Any:
        return await self._env.call(self._name, *args, seconds=seconds)


class _Close(_Remote):
    async def call(self, *args: Any, seconds: float = math.inf) -> None:
        with contextlib.suppress(WorkerError, WorkersLostError):  # everything that it held has ended with the worker
            await self._env.call("close", seconds=seconds)


class _Rollout(_Remote):
    async def call(self, *args: Any, seconds: float = math.inf) -> Trajectory | None:
        task, model = args
        models = {"": _state_of(model), **{name: _state_of(each) for name, each in model.roles.items()}}

        async def serve(ask: Ask) -> ModelAnswer | ClientAnswer:
            if ask.method == "answer":
                return await _answer_client(model, decode_value(ask.arguments, ClientAsked))
            asked: ModelAsked = decode_value(ask.arguments, ModelAsked)
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
            return ModelAnswer(messages, _state_of(of_role))

        request = RolloutRequest(task, models)
        done: RolloutDone = await self._env.call("rollout", request, kind=RolloutDone, seconds=seconds, serve=serve)

        def trajectory(role: str, place: int) -> Trajectory:
            known: list[Trajectory] = (model.role(role) if role else model).trajectories
            return known[place]

        for role, place, info in done.infos:
            trajectory(role, place).info = info
        return None if done.chosen is None else trajectory(*done.chosen)


class _Judge(_Remote):
    """A reward or a metric of an object, or of the class, which cannot be called."""

    requests = ("trajectory",)

    def __init__(self, env: Any, word: str, name: str) -> None:
        super().__init__(env, name)
        self._word = word

    async def call(self, *args: Any, seconds: float = math.inf) -> Score | float:
        request, kind = JudgeRequest(self._name, *args), Score if self._word == "reward" else float
        judged: Score | float = await self._env.call(self._word, request, kind=kind, seconds=seconds)
        return judged


class _Tool(calls.RemoteTool):
    def __init__(self, env: RemoteEnvironment, schema: dict[str, Any]) -> None:
        self._env, self.remote_schema = env, schema

    async def run(self, tool_call: ToolCall, characters_max: int, seconds_max: float) -> ToolOutcome:
        most = None if math.isinf(seconds_max) else seconds_max
        request = ToolRequest(tool_call, characters_max, most)
        outcome: ToolOutcome = await self._env.call("tool", request, kind=ToolOutcome)
        return outcome


def _tool_method(env: RemoteEnvironment, sent: ToolSent) -> ToolMethod:
    return ToolMethod(sent.name, _as_function(_Tool(env, sent.schema)), sent.timeout_seconds, None, sent.role)


def _as_function(remote: calls.RemoteCall) -> Any:
    """`rollouts.env.calls` and `rollouts.env.tools` call it in place of a function."""
    return remote


async def _answer_client(model: Any, client: ClientAsked) -> ClientAnswer:
    """The model's answer to a client in the worker."""
    of_role = model.role(client.role) if client.role else model
    try:
        answered = await of_role.answer(client.asked)
    except APIError as error:
        refused = Refused(error.status, str(error), error.parameter, error.code)
        return ClientAnswer(_state_of(of_role), refused=refused)
    return ClientAnswer(_state_of(of_role), answered)


def _state_of(model: Any) -> ModelState:
    trajectory = model.trajectory
    place = next((place for place, each in enumerate(model.trajectories) if each is trajectory), None)
    return ModelState(model.tokens_left, model.turns_left, model.messages, place, trajectory, model.answer_as)


# --- tasks and demonstrations ---------------------------------------------------------------------------------------


class _Stream:
    """A call of `tasks` or `demonstrations`."""

    def __init__(self, env: RemoteEnvironment, method: str) -> None:
        self._env, self._method = env, method

    def __call__(self, split: str, rng: random.Random) -> Any:
        env = self._env
        name = f"{env._name}.{self._method}({split!r}, rng)"
        asked = StreamRequest(self._method, split, list(rng.getstate()), name)
        start = _start(env, asked)
        if start.kind == "sequence":
            return _RemoteSequence(env, asked, start.count)
        values = _values(env, asked, start.count if start.kind == "list" else None)
        return list(values) if start.kind == "list" else values


def _start(env: RemoteEnvironment, asked: StreamRequest) -> StreamStart:
    start: StreamStart = env.pool.call("stream", asked, kind=StreamStart, lease=env._lease)
    return start


def _batch(env: RemoteEnvironment, asked: StreamRequest, first: int, count: int) -> tuple[RemoteEnvironment, Batch]:
    """Some values, and the environment object that has given them. If its worker died, another object reads on."""
    for _ in range(DEATHS_MAX):
        try:
            more = {"method": asked.method, "first": first, "count": count}
            sent = env.pool.call("more", more, kind=msgspec.Raw, lease=env._lease)
            return env, msgspec.json.decode(sent, type=Batch)  # its items are decoded one by one
        except WorkerError as error:
            lost = error
            with contextlib.suppress(WorkerError):
                env = type(env)(**env._given)
                _start(env, asked)
    raise lost


def _values(env: RemoteEnvironment, asked: StreamRequest, count: int | None) -> Iterator[Any]:
    drawn, size = 0, FIRST_BATCH
    kind = Task if asked.method == "tasks" else list[Message]
    while count is None or drawn < count:
        env, batch = _batch(env, asked, drawn, size if count is None else min(BATCH_MAX, count - drawn))
        for item in batch.items:
            drawn += 1
            yield decode_value(item, kind)
        if batch.error is not None:
            raise error_received(batch.error, env.pool.name)
        if batch.over:
            return
        size = min(BATCH_MAX, size * 2)


class _RemoteSequence(Sequence[Any]):
    """A sequence in a worker, of which values are drawn when they are asked for."""

    def __init__(self, env: RemoteEnvironment, asked: StreamRequest, count: int) -> None:
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
            raise error_received(batch.error, self._env.pool.name)
        return decode_value(batch.items[0], Task if self._asked.method == "tasks" else list[Message])


_METHODS: Mapping[str, Any] = {
    "tasks": _Stream,
    "demonstrations": _Stream,
    "setup": _Setup,
    "tools": _Tools,
    "reply": _Reply,
    "rollout": _Rollout,
    "state": _State,
    "restore": _State,
}
