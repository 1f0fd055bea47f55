"""The messages between a run and a worker, version 3.

Each message is one line of JSON, an object with a `type`. A worker begins with `hello`. Then the run sends requests,
and the worker answers each with `answer` or `failure`, in any order. While a worker handles a request it may `ask`: it
calls a function of the run, and the run answers in the same way. `cancel` asks for an early end; what was cancelled is
still answered. `ping` is answered by `pong` at once.

    {"type": "request", "number": 7, "session": 2, "method": "setup", "arguments": {"task": ...}, "seconds": 300.0}
    {"type": "answer", "number": 7, "value": null}

Values are plain JSON data: a tuple comes back as a list, and the keys of a dict as text. Numbers keep their exact
value. JSON has no NaN and no infinities, so these are written as `{"$float": "nan"}`. Code is never sent. The table
`REQUESTS` has the methods, with the types of their arguments and results. Not here: what the methods do (`server`,
`sessions`), and what carries the messages (`channel`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from rollouts import errors
from rollouts.author_code import message_of, shown
from rollouts.encoding import plain_json
from rollouts.env.calls import AbandonedCallsError, CallTimeoutError
from rollouts.env.results import AnswerAs, ToolOutcome
from rollouts.error_log import Fault, fault_of
from rollouts.errors import (
    EnvironmentDefinitionError,
    ProcessError,
    RemoteError,
    RewardError,
    RolloutsError,
    RunError,
    WorkerError,
    leaves_of,
)
from rollouts.gateway.exchange import Answered, Asked
from rollouts.plugins.index import ComponentRef
from rollouts.types import Message, Role, Score, Task, ToolCall, Trajectory

VERSION = 3
"""The version of the protocol. A run refuses a worker that speaks another one."""

BATCH_MAX = 256
"""The values of a stream that are sent together."""

FLOAT = "$float"
NULL = msgspec.Raw(b"null")


class ProtocolError(Exception):
    """The other side sent something that is not a message of this protocol."""


class CancelledCallError(Exception):
    """A request or an ask was cancelled by the side that made it."""


class Error(msgspec.Struct, omit_defaults=True):
    """Why a request failed.

    `kind`: `timeout` (the deadline of the request), `cancelled`, `author` (the environment's code raised; `fault`
    describes it, and `hint` says what to install), `ours` (an error class `name` of rollouts with its `message`;
    `fault` is its cause), `asks` (the functions of the run with these numbers failed), `bug` (an error of the worker).
    """

    kind: Literal["timeout", "cancelled", "author", "ours", "asks", "bug"]
    name: str = ""
    message: str = ""
    fault: Fault | None = None
    hint: str = ""
    asks: list[int] = []


class Hello(msgspec.Struct, tag_field="type", tag="hello"):
    """The first message of a worker. `rollouts` and `python` are versions, for people."""

    protocol: int
    rollouts: str = ""
    python: str = ""


class Request(msgspec.Struct, tag_field="type", tag="request", omit_defaults=True):
    """A request of the run. `session` is the environment object, 0 for none. `seconds` None: no deadline."""

    number: int
    method: str
    session: int = 0
    arguments: msgspec.Raw = NULL
    seconds: float | None = None


class Ask(msgspec.Struct, tag_field="type", tag="ask"):
    """A call of a function of the run, while the worker handles `request`."""

    number: int
    request: int
    method: str
    arguments: msgspec.Raw = NULL


class Answer(msgspec.Struct, tag_field="type", tag="answer"):
    """The result of a request or an ask."""

    number: int
    value: msgspec.Raw = NULL


class Failure(msgspec.Struct, tag_field="type", tag="failure"):
    """The error of a request or an ask."""

    number: int
    error: Error


class Cancel(msgspec.Struct, tag_field="type", tag="cancel"):
    """End this request or ask early. It is answered all the same."""

    number: int


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    """Asks for a pong."""

    number: int


class Pong(msgspec.Struct, tag_field="type", tag="pong"):
    """The answer to a ping."""

    number: int


class Report(msgspec.Struct, tag_field="type", tag="report"):
    """An error for the run's errors.log that failed no request, such as that of a tool. `request` 0: of none."""

    request: int
    fault: Fault
    label: str
    is_noted: bool = True


class Log(msgspec.Struct, tag_field="type", tag="log"):
    """Text that the environment's code has printed, for channels that carry nothing else."""

    text: str


FromRun = Request | Answer | Failure | Cancel | Ping
FromWorker = Hello | Answer | Failure | Ask | Cancel | Pong | Report | Log

_from_run = msgspec.json.Decoder(FromRun)
_from_worker = msgspec.json.Decoder(FromWorker)


def read_from_run(line: bytes) -> FromRun:
    """A message of a run. Raises ProtocolError."""
    message: FromRun = _read(_from_run, line)
    return message


def read_from_worker(line: bytes) -> FromWorker:
    """A message of a worker. Raises ProtocolError."""
    message: FromWorker = _read(_from_worker, line)
    return message


def _read(decoder: msgspec.json.Decoder[Any], line: bytes) -> Any:
    try:
        return decoder.decode(line)
    except (ValueError, RecursionError) as error:  # also msgspec's errors
        raise ProtocolError(f"{shown(line[:200].decode(errors='replace'))} ({error})") from error


# --- requests ---------------------------------------------------------------------------------------------------------


class JudgeSent(NamedTuple):
    """A reward of an environment, or a metric, whose weight is 0."""

    name: str
    weight: float
    role: str | None = None


class Description(msgspec.Struct):
    """What a run knows of an environment before it has an object: the name of its class, where it comes from, the names
    of its settings, its rewards and metrics.
    """

    class_name: str
    doc: str
    ref: ComponentRef
    settings: list[str]
    rewards: list[JudgeSent]
    metrics: list[JudgeSent]


class Given(msgspec.Struct):
    """The settings that were given for the environment, the path of their table, and the file that they are in."""

    settings: Any
    path: list[str] = []
    file: str = ""
    text: str = ""


class SandboxSent(msgspec.Struct, frozen=True):
    """The sandbox that a run chose: its name, all its settings as `settings_as_sent` writes them, and how many
    episodes run at the same time.
    """

    name: str
    settings: dict[str, Any]
    concurrency: int = 1


class SandboxShown(msgspec.Struct):
    """What a sandbox is, and what it does not stop."""

    words: str
    not_stopped: list[str]


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


class ToolSent(NamedTuple):
    """A tool of an environment, with its schema."""

    name: str
    timeout_seconds: float
    schema: dict[str, Any]
    role: str | None = None


class ObjectShape(msgspec.Struct):
    """What an environment object has: the methods that rollouts calls, its tools and roles, and warnings for its author
    (file, line, words). `error` is its first mistake, if it has one; then there are no tools. `has_sandbox`: its
    `setup` names one. `data_error`: why the rows that it reads are not there.
    """

    methods: list[str]
    tools: list[ToolSent] = []
    roles: list[Role] = []
    warnings: list[tuple[str, int, str]] = []
    error: Error | None = None
    has_sandbox: bool = False
    data_error: Error | None = None


class StreamRequest(msgspec.Struct):
    """Arguments of `stream`: `tasks` or `demonstrations`, and the state of the random numbers (`random.getstate`).
    `label` names the call in messages.
    """

    method: str
    split: str
    rng: list[Any]
    label: str


class StreamStart(msgspec.Struct):
    """The kind of what `tasks` or `demonstrations` returned: `list`, another `sequence`, or an `iterator`. `count` is
    the length of a sequence.
    """

    kind: str
    count: int = 0


class Batch(msgspec.Struct):
    """Some values of a stream. `over`: there are no more. `error`: the author's code raised after these values."""

    items: list[msgspec.Raw]
    over: bool = False
    error: Error | None = None


class ToolRequest(msgspec.Struct):
    """Arguments of `tool`. `seconds_max` None: no other deadline than the tool's own."""

    call: ToolCall
    characters_max: int
    seconds_max: float | None = None


class JudgeRequest(msgspec.Struct):
    """Arguments of `reward` and `metric`."""

    name: str
    trajectory: Trajectory


# --- what a rollout asks the run --------------------------------------------------------------------------------------


class ModelState(msgspec.Struct):
    """What a model says of itself, or the model of a role. `place` is the index of the conversation with the last reply
    among its own, and `trajectory` that conversation. `messages` are those of a conversation that has not begun.
    `answer_as` is the role of the messages that answer calls.
    """

    tokens_left: int
    turns_left: int
    messages: list[Message] = []
    place: int | None = None
    trajectory: Trajectory | None = None
    answer_as: AnswerAs = "tool"


class ModelAnswer(msgspec.Struct):
    """The messages that a method of the model returns, and its state after it."""

    messages: list[Message]
    state: ModelState


class ModelAsked(msgspec.Struct):
    """Arguments of `chat`, `say` and `call_tools`. `role` is the name of the model's role. `tools` None: those
    of the environment.
    """

    role: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


class ClientAsked(msgspec.Struct):
    """Arguments of `answer`: a request of a client that speaks to the model of this role."""

    role: str
    asked: Asked


class Refused(msgspec.Struct, frozen=True):
    """The error that a client gets instead of a reply (`APIError`)."""

    status: int
    words: str
    parameter: str | None = None
    code: str | None = None


class ClientAnswer(msgspec.Struct):
    """The answer to a client, or the error that it gets, and the model's state after it."""

    state: ModelState
    answered: Answered | None = None
    refused: Refused | None = None


class RolloutRequest(msgspec.Struct):
    """Arguments of `rollout`: the task, and what the model and its roles say of themselves before the first reply."""

    task: Task
    models: dict[str, ModelState]


class RolloutDone(msgspec.Struct):
    """What `rollout` returned: the role and the place of a trajectory, None for anything else. `infos` are the `info`
    of the trajectories, each with its role and place.
    """

    chosen: tuple[str, int] | None
    infos: list[tuple[str, int, dict[str, Any]]]


REQUESTS: Mapping[str, tuple[Any, Any]] = {
    # of no environment object
    "describe": (Named, Description),
    "configure": (Configured, dict[str, Any]),
    "show_sandbox": (SandboxSent, SandboxShown),
    "try_sandbox": (SandboxSent, None),
    # of an environment object
    "make": (Make, ObjectShape | None),
    "open_sandbox": (SandboxSent, None),
    "close_sandbox": (None, str),
    "stream": (StreamRequest, StreamStart),
    "more": (More, msgspec.Raw),  # a Batch, whose items are decoded one by one
    "setup": (Task, None),
    "tools": (Task, list[ToolSent]),
    "tool": (ToolRequest, ToolOutcome),
    "reply": (Trajectory, list[Message]),
    "rollout": (RolloutRequest, RolloutDone),
    "reward": (JudgeRequest, Score),
    "metric": (JudgeRequest, float),
    "state": (None, Any),
    "restore": (Any, None),
    "close": (None, None),
    "forget": (None, Any),
}
"""The methods of a worker, with the types of their arguments and of their results."""


# --- values -----------------------------------------------------------------------------------------------------------


def encode_value(value: Any, whose: str = "a value") -> msgspec.Raw:
    """The value as JSON. Raises EnvironmentDefinitionError, which begins with `whose`, if JSON cannot represent it.

    >>> bytes(encode_value({"limit": math.inf, "of": (1, 2.5)}))
    b'{"limit":{"$float":"inf"},"of":[1,2.5]}'
    """
    try:
        data = msgspec.json.encode(value)
        if b"null" in data and _is_special(value):  # msgspec writes these numbers as null
            data = msgspec.json.encode(_marked(msgspec.to_builtins(value)))
    except UnicodeEncodeError:  # half of a surrogate pair
        return msgspec.Raw(msgspec.json.encode(plain_json(value)))
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentDefinitionError(
            f"{whose} cannot be sent between a run and a worker ({error}); use plain data: numbers, text, lists, "
            "dicts, or type: --worker inline"
        ) from error
    return msgspec.Raw(data)


@functools.lru_cache(maxsize=256)
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def decode_value(data: msgspec.Raw, kind: Any = Any) -> Any:
    """The value that `encode_value` wrote, as this type; as `msgspec.Raw`, not decoded. Raises ProtocolError.

    >>> decode_value(encode_value([math.inf, 1e22, 10**30]))
    [inf, 1e+22, 1000000000000000000000000000000]
    """
    if kind is msgspec.Raw:
        return data
    try:
        if FLOAT.encode() in bytes(data):
            return msgspec.convert(_unmarked(msgspec.json.decode(data)), kind)
        return _decoder(kind).decode(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{shown(bytes(data)[:200].decode(errors='replace'))} ({error})") from error


def _is_special(value: Any) -> bool:
    """Whether a number at any depth is not finite. The tokens of a segment always are."""
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(map(_is_special, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(_is_special, value))
    if isinstance(value, msgspec.Struct) and type(value).__name__ != "Segment":
        return any(_is_special(getattr(value, name)) for name in value.__struct_fields__)
    return False


def _marked(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT: str(value)}
    if isinstance(value, dict):
        return {key: _marked(each) for key, each in value.items()}
    return [_marked(each) for each in value] if isinstance(value, list | tuple) else value


def _unmarked(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {FLOAT} and value[FLOAT] in ("nan", "inf", "-inf"):
            return float(value[FLOAT])
        return {key: _unmarked(each) for key, each in value.items()}
    return [_unmarked(each) for each in value] if isinstance(value, list) else value


# --- errors -----------------------------------------------------------------------------------------------------------


def _own_errors() -> dict[str, type[RolloutsError]]:
    """The error classes that are sent by their names."""
    known = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, RolloutsError)]
    return {each.__name__: each for each in (*known, AbandonedCallsError, ProcessError)}


def error_as_sent(
    error: BaseException, words: Callable[[BaseException], str] = message_of, hint: Callable[[Any], str] = lambda _: ""
) -> Error:
    """An error that the environment's code or rollouts raised, as it is sent. `words` describes an error of rollouts,
    and `hint` says what to install.

    An error of a group that ends the run is sent instead of the group, as `rollouts.agent.episode.outcome_of` chooses.
    """
    leaves = list(leaves_of(error))
    for leaf in leaves:
        if isinstance(leaf, RewardError | EnvironmentDefinitionError):
            return Error("ours", type(leaf).__name__, message_of(leaf), _cause(leaf))
    if isinstance(error, CallTimeoutError):
        return Error("timeout")
    if isinstance(error, RolloutsError):
        name = next((each.__name__ for each in type(error).__mro__ if each.__name__ in _own_errors()), "RunError")
        return Error("ours", name, words(error), _cause(error))
    return Error("author", fault=fault_of(error), hint=hint(error))


def _cause(error: BaseException) -> Fault | None:
    """The first error in the chain of causes that is not one of rollouts."""
    cause: BaseException | None = error
    while isinstance(cause, RolloutsError):
        cause = cause.__cause__
    return None if cause is None else fault_of(cause)


def error_received(error: Error, worker: str) -> Exception:
    """The exception of an error that the worker of this name sent; of `asks`, only the caller knows it."""
    cause = None if error.fault is None else RemoteError(*error.fault, hint=error.hint)
    if error.kind == "timeout":
        return CallTimeoutError()
    if error.kind == "cancelled":
        return CancelledCallError()
    if error.kind == "author" and cause is not None:
        return cause
    if error.kind == "ours":
        raised = _own_errors().get(error.name, RunError)(error.message)
        raised.__cause__ = cause
        return raised
    return WorkerError(f"{worker} failed: {error.message or error.kind}")
