"""The marks of an environment author, `@tool` `@reward` `@metric`, and how they are collected from a class.

A decorator only marks the function. The method stays an ordinary method that you can call and test. Not here: schemas
(`schema.py`), running (`calls.py`), mixing rewards (`mixing.py`).

    class Calculator:
        def tasks(self, split, rng): ...

        @tool(timeout_seconds=5)
        def calculator(self, expression: str) -> str: ...

        @reward
        def correct(self, task, trajectory): ...

Methods may be plain, trio or asyncio functions (`calls.py` has the rules). Plain functions run in worker threads, one
at a time for each environment object, but not always in the same thread.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, overload

from rollouts.author_code import shown
from rollouts.errors import EnvironmentDefinitionError, near_misses

if TYPE_CHECKING:
    from rollouts.types import Role

F = TypeVar("F", bound=Callable[..., Any])
M = TypeVar("M", "ToolMethod", "JudgeMethod")

Isolation = Literal["process"]
Per = Literal["rollout", "turn"]

TIMEOUT_SECONDS = 30.0  # the deadline of a tool that sets none

TOOL_MARK = "__rollouts_tool__"
REWARD_MARK = "__rollouts_reward__"
METRIC_MARK = "__rollouts_metric__"
WORDS = {TOOL_MARK: "tool", REWARD_MARK: "reward", METRIC_MARK: "metric"}


class ToolMethod(NamedTuple):
    """A tool of an environment, or one that a run adds to it. `function` is bound if the environment is an object and
    the tool does not run in another process (`isolate`). Only `role` is offered the tool; None: every role.
    `parameters` is the tool's own JSON schema (None: the schema is read from the function), and `description` belongs
    to it.
    """

    name: str
    function: Callable[..., Any]
    timeout_seconds: float
    isolate: Isolation | None = None
    role: str | None = None
    description: str = ""
    parameters: dict[str, Any] | None = None


class JudgeMethod(NamedTuple):
    """A reward or metric of an environment. `function` is bound if the environment is an object. It judges `role`;
    None: every role. A reward `per` turn gives each turn of the model its own number.
    """

    name: str
    function: Callable[..., Any]
    weight: float
    role: str | None = None
    per: Per = "rollout"


class WorkerEnvironment:
    """The base class of environments whose code runs in another process. They say themselves what they have."""

    remote_tools: Callable[[], list[ToolMethod]]
    remote_rewards: Callable[[Any], list[JudgeMethod]]
    """The rewards of an argument that is this class or an object of it."""
    remote_metrics: Callable[[Any], list[JudgeMethod]]
    remote_check: Callable[[], None]
    """Raise the error of `check_environment` in the other process."""
    remote_check_data: Callable[[], None]
    """Raise ConfigError if the environment reads rows that are not there."""
    remote_warnings: Callable[[], list[tuple[str, int, str]]]
    """The warnings of `advice` in the other process: file, line, words."""
    remote_lease: Callable[[Any], Any]
    """The sandbox of an episode in the other process, with the methods of `rollouts.sandboxes.base.Lease`; None if
    `setup` names none. The argument is what the run has for this environment.
    """


def _remote_class(env: Any) -> type[WorkerEnvironment] | None:
    owner = env if inspect.isclass(env) else type(env)
    return owner if issubclass(owner, WorkerEnvironment) else None


@overload
def tool(fn: F) -> F: ...


@overload
def tool(
    *, timeout_seconds: float = ..., name: str | None = ..., isolate: Isolation | None = ..., role: str | None = ...
) -> Callable[[F], F]: ...


def tool(
    fn: F | None = None,
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    name: str | None = None,
    isolate: Isolation | None = None,
    role: str | None = None,
) -> F | Callable[[F], F]:
    """Offer a method to the model as a tool. The schema comes from its type hints and docstring. `name` is the name
    that the model sees (None: the method's). `role` is the one role that has the tool (None: every role).

    `isolate="process"` runs the tool in another process, which is killed at the deadline. The tool must be a plain
    function without `self`.

    Raises EnvironmentDefinitionError if the deadline is not a positive number of seconds, or if the function cannot run
    in another process.
    """
    if isolate not in (None, "process"):
        raise EnvironmentDefinitionError(f"@tool(isolate={isolate!r}): it may be 'process', or be left out")
    if not isinstance(timeout_seconds, int | float) or not timeout_seconds > 0:
        raise EnvironmentDefinitionError(
            f"@tool(timeout_seconds={timeout_seconds!r}): a deadline is a positive number of seconds, such as 30.0"
        )

    def mark(function: F) -> F:
        _check_marked("tool", function, 'such as @tool(timeout_seconds=5) or @tool(name="calc")')
        if isolate is not None:
            check_isolated(function)
        _mark(function, TOOL_MARK, (name, float(timeout_seconds), isolate, role))
        return function

    return mark if fn is None else mark(fn)


@overload
def reward(fn: F) -> F: ...


@overload
def reward(*, weight: float = ..., role: str | None = ..., per: Per = ...) -> Callable[[F], F]: ...


def reward(
    fn: F | None = None, *, weight: float = 1.0, role: str | None = None, per: Per = "rollout"
) -> F | Callable[[F], F]:
    """Judge the rollout with this method. Its parameters may be `task`, `trajectory` and `env`. It returns a float, a
    Score, or None if it cannot judge. The rewards of an environment are summed by their weights. `role` is the one role
    that it judges (None: every role, each with its own trajectory).

    With `per="turn"`, each turn of the model has its own reward. If the method names `turn` (a `Turn`), it is called
    once for each turn; otherwise it is called once, and returns a list with one number for each turn.

    Raises EnvironmentDefinitionError if the weight is not a finite number, or if `per` is another word.
    """

    if not isinstance(weight, int | float) or not math.isfinite(weight):
        raise EnvironmentDefinitionError(f"@reward(weight={weight!r}): a weight is a finite number, such as 0.5")
    if per not in ("rollout", "turn"):
        raise EnvironmentDefinitionError(f"@reward(per={shown(per)}): it may be 'turn', or be left out")

    def mark(function: F) -> F:
        weight_words = f"{function:g}" if isinstance(function, int | float) else "0.5"
        hint = (
            f"such as @reward(weight={weight_words}); `--reward env:0.5` weighs all rewards of the environment together"
        )
        _check_marked("reward", function, hint)
        _mark(function, REWARD_MARK, (float(weight), role, per))
        return function

    return mark if fn is None else mark(fn)


@overload
def metric(fn: F) -> F: ...


@overload
def metric(*, role: str | None = ...) -> Callable[[F], F]: ...


def metric(fn: F | None = None, *, role: str | None = None) -> F | Callable[[F], F]:
    """Log the number that this method returns. Metrics do not affect training. The method's parameters may be `task`,
    `trajectory` and `env`. `role` is the one role that it measures (None: every role).
    """

    def mark(function: F) -> F:
        _check_marked(
            "metric", function, 'such as @metric(role="seller"); the name of the metric is the name of its method'
        )
        _mark(function, METRIC_MARK, (0.0, role))  # a metric has no weight
        return function

    return mark if fn is None else mark(fn)


def environment_name(env: Any) -> str:
    """The name of the environment's class. `env` is a class or an object."""
    return env.__name__ if inspect.isclass(env) else type(env).__name__


def tools_of(env: Any) -> list[ToolMethod]:
    """The tools of an environment (object or class), in definition order, inherited ones first.

    The most derived definition of a method counts: a method without `@tool` that overrides a tool removes it. Raises
    EnvironmentDefinitionError if two tools have one name, or if another process could not find an isolated tool.
    """
    if isinstance(env, WorkerEnvironment):
        return env.remote_tools()
    tools: dict[str, ToolMethod] = {}
    for attribute, function, (name, timeout_seconds, isolate, role) in _marked(env, TOOL_MARK):
        chosen = name or attribute
        if chosen in tools:
            raise EnvironmentDefinitionError(
                f"{environment_name(env)} has two tools named {chosen!r}; give one of them another: @tool(name=...)"
            )
        if isolate is not None:
            function = check_reference(inspect.getattr_static(env, attribute))
        tools[chosen] = ToolMethod(chosen, function, timeout_seconds, isolate, role)
    return list(tools.values())


def rewards_of(env: Any) -> list[JudgeMethod]:
    """The `@reward` methods of an environment (object or class), in definition order, inherited ones first."""
    if remote := _remote_class(env):
        return remote.remote_rewards(env)
    return [JudgeMethod(name, function, *mark) for name, function, mark in _marked(env, REWARD_MARK)]


def metrics_of(env: Any) -> list[JudgeMethod]:
    """The `@metric` methods of an environment (object or class), in definition order, inherited ones first."""
    if remote := _remote_class(env):
        return remote.remote_metrics(env)
    return [JudgeMethod(name, function, *mark) for name, function, mark in _marked(env, METRIC_MARK)]


def roles_of(env: Any) -> tuple[Role, ...]:
    """The roles of an environment (object or class). Empty: it has one agent, or it is a class whose `roles` is a
    property, which only an object has.
    """
    given = getattr(env, "roles", ())
    return () if isinstance(given, property) else tuple(given)


def of_role(methods: Iterable[M], role: str) -> list[M]:
    """The tools, rewards or metrics that this role has."""
    return [method for method in methods if method.role in (None, role)]


def _check_marked(word: str, marked: Any, named_settings: str) -> None:
    """Raise EnvironmentDefinitionError if `@word` marks something that is not a function. `named_settings` says how to
    write the mark's settings.
    """
    if inspect.isclass(marked):
        raise EnvironmentDefinitionError(
            f"@{word} is on the class {marked.__name__}; it marks one method: write it above a `def` in the class"
        )
    if not callable(marked) and not isinstance(marked, staticmethod | classmethod):
        given = f"@{word}({shown(marked)})"
        if isinstance(marked, property):
            raise EnvironmentDefinitionError(f"@{word} is on a property; it marks a method: remove @property")
        raise EnvironmentDefinitionError(f"{given}: settings of a mark are given by name, {named_settings}")


def _mark(function: Callable[..., Any], mark: str, value: Any) -> None:
    """Put the mark on the function. Raises EnvironmentDefinitionError if the function already has a mark that
    contradicts it.
    """
    label, word = getattr(function, "__qualname__", shown(function)), WORDS[mark]
    earlier = mark_of(function, mark)
    if earlier is not None and earlier != value:
        raise EnvironmentDefinitionError(
            f"{label} is marked twice, by @{word}, with different settings; remove one of the two"
        )
    other = next((WORDS[each] for each in WORDS if each != mark and mark_of(function, each) is not None), None)
    if other is not None and "tool" in (word, other):
        raise EnvironmentDefinitionError(
            f"{label} is marked as @{word} and as @{other}; the model calls a tool, and a tool judges nothing: "
            "write two methods"
        )
    try:
        setattr(function, mark, value)
    except (AttributeError, TypeError) as error:
        raise EnvironmentDefinitionError(
            f"@{word} cannot mark {label}, a {type(function).__name__}; write a method that calls it, and mark that"
        ) from error
    _scans.clear()  # the function may be in a scanned class


def marked_in(cls: type, mark: str) -> Iterator[tuple[str, Any]]:
    """(name, attribute as in the class's `__dict__`) of each method that has the mark."""
    for name, _ in _marks_of(cls)[mark]:
        yield name, inspect.getattr_static(cls, name)


def _marked(env: Any, mark: str) -> Iterator[tuple[str, Callable[..., Any], Any]]:
    """(attribute, function, mark) of each marked method. Properties and other descriptors are never evaluated."""
    for name, value in _marks_of(env if inspect.isclass(env) else type(env))[mark]:
        yield name, getattr(env, name), value


Marks = dict[str, list[tuple[str, Any]]]  # for each mark: the methods that have it, with the mark's value
SCANS_MAX = 64  # the largest number of cached scans; a scan keeps its class alive, also a class made for one episode
# By the identity of a class (it may have no hash): the class, the attributes of it and its bases, and their marks.
_scans: dict[int, tuple[type, list[Any], Marks]] = {}


def _marks_of(owner: type) -> Marks:
    """For each mark: (attribute, mark) of the class's methods. The class is scanned again only if it has changed."""
    attributes = [value for cls in owner.__mro__[:-1] for value in cls.__dict__.values()]  # `object` never changes
    _, known, marks = _scans.get(id(owner), (owner, [], {}))
    if marks and len(known) == len(attributes) and all(map(operator.is_, known, attributes)):
        return marks
    members: dict[str, Any] = {}  # a name keeps its first position, and gets the most derived definition
    for cls in reversed(owner.__mro__):
        members.update(vars(cls))
    marks = {TOOL_MARK: [], REWARD_MARK: [], METRIC_MARK: []}
    for name, raw in members.items():
        for mark, found in marks.items():
            value = mark_of(raw, mark)
            if value is not None and not inspect.isclass(raw):
                found.append((name, value))
    if len(_scans) >= SCANS_MAX:
        _scans.clear()
    _scans[id(owner)] = (owner, attributes, marks)
    return marks


def mark_of(raw: Any, mark: str) -> Any:
    """The mark on a class attribute, or on the function inside a staticmethod or classmethod. None if there is no
    mark.
    """
    while True:
        value = getattr(raw, "__dict__", {}).get(mark)  # not getattr: some objects have every attribute
        if value is not None or not isinstance(raw, staticmethod | classmethod):
            return value
        raw = raw.__func__


def no_role(name: Any, known: Collection[str]) -> EnvironmentDefinitionError:
    """The error for a role that the environment does not have."""
    near = "".join(f"; did you mean {each!r}?" for each in near_misses(str(name), known)[:1])
    has = f"the roles are {', '.join(known)}" if known else "the environment has no roles"
    return EnvironmentDefinitionError(f"model.role({shown(name)}): {has}{near}")


# --- tools that run in another process --------------------------------------------------------------------------------


MAIN = "__rollouts_main__"  # the module name of the running script in another process
INSTEAD = 'without `self`, with what it needs as arguments:\n    @staticmethod\n    @tool(isolate="process")\n    '


class ToolReference(NamedTuple):
    """How another process finds a function. `file` is the file of its module, whose name may not be importable."""

    module: str
    name: str
    file: str = ""


def check_isolated(function: Any) -> None:
    """Raise EnvironmentDefinitionError if the function needs `self` or is async, because it cannot run in another
    process.

    This runs when the decorator is applied. `check_reference` checks the rest once the class exists.
    """
    plain = _unwrapped(function)
    label = getattr(plain, "__qualname__", repr(plain))
    if inspect.iscoroutinefunction(plain) or inspect.isasyncgenfunction(plain):
        raise _not_isolated(label, 'is async, and isolate="process" needs a plain `def`; remove one of the two')
    if not inspect.isfunction(plain):
        kind = type(plain).__name__
        raise _not_isolated(label, f'is {kind}, and isolate="process" is for functions written with `def`')
    parameters = list(inspect.signature(plain).parameters.values())
    if parameters and (isinstance(function, classmethod) or parameters[0].name in ("self", "cls")):
        line = f"def {plain.__name__}({', '.join(map(str, parameters[1:]))})"
        name = parameters[0].name
        raise _not_isolated(label, f"names {name!r}, but its process has no such object; write it {INSTEAD}{line}: ...")


def check_reference(function: Any) -> Callable[..., Any]:
    """The plain function. Raises EnvironmentDefinitionError if another process would not find it by its name."""
    plain: Callable[..., Any] = _unwrapped(function)
    reference_of(plain)
    return plain


@functools.lru_cache(maxsize=1024)
def reference_of(function: Callable[..., Any]) -> ToolReference:
    """How another process finds the function. Raises EnvironmentDefinitionError if it could not find the function."""
    label = function.__qualname__
    if "<locals>" in label or "<lambda>" in label:
        why = "is defined inside a function, where another process does not find it"
        raise _not_isolated(label, f"{why}; write it at the top of its module, or in a class there")
    module = sys.modules.get(function.__module__)
    found = None
    with contextlib.suppress(AttributeError):
        found = operator.attrgetter(label)(module)
    if module is None or found is not function:
        why = f"is not what another process finds as {function.__module__}.{label}"
        raise _not_isolated(label, f"{why}; give it the name under which its module or class holds it")
    file = getattr(module, "__file__", None) or ""
    if module.__name__ != "__main__":
        return ToolReference(module.__name__, label, file)
    if not file:
        raise _not_isolated(label, 'was typed at a prompt; isolate="process" needs a file')
    spec = getattr(module, "__spec__", None)  # a module that runs as `python -m package.module` has a spec
    return ToolReference(spec.name if spec is not None else MAIN, label, file)


def _not_isolated(label: str, why: str) -> EnvironmentDefinitionError:
    return EnvironmentDefinitionError(f"the tool {label} {why}")


def _unwrapped(function: Any) -> Any:
    while isinstance(function, staticmethod | classmethod):
        function = function.__func__
    return function
