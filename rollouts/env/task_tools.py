"""Functions as tools: what an environment's `tools(self, task)` may return; `Tool`, which has a schema of its own; and
what a run adds to the tools of its environments (`--tool`).

Not here: the tools that an environment marks (`authoring`), schemas that are read from a function (`schema`), classes
of tools (`toolsets`).
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from rollouts.author_code import shown, why_no_list
from rollouts.env.authoring import (
    TIMEOUT_SECONDS,
    TOOL_MARK,
    ToolMethod,
    WorkerEnvironment,
    check_reference,
    environment_name,
    mark_of,
    roles_of,
    tools_of,
)
from rollouts.env.schema import check_tool, plain_parameters
from rollouts.errors import EnvironmentDefinitionError, near_misses
from rollouts.plugins.signature import keywords_of

EXPECTED = "a list of marked methods (self.search), functions marked with @tool, names of marked methods, or Tool(...)"


class Tool(msgspec.Struct, frozen=True):
    """A tool with a JSON schema of its own, for `tools(self, task)`.

    `function` is a plain, trio or asyncio function. It gets the model's arguments by keyword. `parameters` is a JSON
    schema of an object, which the model sees as it is. Before a call, the arguments are checked: unknown and missing
    ones, and simple types. Without `parameters`, the tool has no arguments. Only `role` gets the tool (None: every
    role).

    Raises EnvironmentDefinitionError if a field cannot be used, or if `function` does not take the arguments that
    `parameters` describe.

    >>> def find(query, limit=3): ...
    >>> text, number = {"type": "string"}, {"type": "integer"}
    >>> tool = Tool("find", find, "Search.", {"properties": {"query": text, "limit": number}, "required": ["query"]})
    """

    name: str
    function: Callable[..., Any]
    description: str = ""
    parameters: Mapping[str, Any] = {}
    timeout_seconds: float = TIMEOUT_SECONDS
    role: str | None = None

    def __post_init__(self) -> None:
        label, seconds = f"Tool({shown(self.name)})", self.timeout_seconds
        if not isinstance(self.name, str) or not self.name:
            raise EnvironmentDefinitionError(f"{label}: the name that the model sees is a text, such as 'search'")
        if not callable(self.function):
            raise EnvironmentDefinitionError(f"{label}: its function is {shown(self.function)}; give one to call")
        if not isinstance(self.description, str):
            raise EnvironmentDefinitionError(f"{label}: its description is {shown(self.description)}, expected text")
        if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
            raise EnvironmentDefinitionError(
                f"{label}: timeout_seconds is {seconds!r}; a deadline is a positive number of seconds, such as 30.0"
            )
        known = plain_parameters(self.parameters, label)
        _check_takes(self.function, known["properties"], known["required"], label)

    @property
    def method(self) -> ToolMethod:
        """The tool as the agent loop calls it."""
        seconds, parameters = float(self.timeout_seconds), plain_parameters(self.parameters, self.name)
        return ToolMethod(self.name, self.function, seconds, None, self.role, self.description, parameters)


def read_tools(env: Any, returned: Any) -> list[ToolMethod]:
    """What the `tools` of an environment object returned, as tools. Raises EnvironmentDefinitionError for a value that
    is no tool, and if two tools have one name.
    """
    if isinstance(env, WorkerEnvironment):  # the process that runs its code has read them
        return list(returned)
    label = f"{environment_name(env)}.tools(task)"
    if inspect.iscoroutine(returned):
        returned.close()
    if why_no_list(returned):
        raise EnvironmentDefinitionError(f"{label} returned {shown(returned)}; expected {EXPECTED}")
    marked = {tool.name: tool for tool in tools_of(env)}
    roles = [role.name for role in roles_of(env)]
    tools: dict[str, ToolMethod] = {}
    for value in returned:
        tool = _read_tool(env, value, marked, label)
        if tool.name in tools:
            raise EnvironmentDefinitionError(
                f"{label} returned two tools named {tool.name!r}; leave one out, or give it another name"
            )
        if tool.role is not None and tool.role not in roles:
            has = f"the roles are {', '.join(roles)}" if roles else "the environment has no `roles`"
            raise EnvironmentDefinitionError(
                f"{label} returned the tool {tool.name!r} for the role {shown(tool.role)}; {has}"
            )
        tools[tool.name] = tool
    return list(tools.values())


def _read_tool(env: Any, value: Any, marked: Mapping[str, ToolMethod], label: str) -> ToolMethod:
    if isinstance(value, Tool):
        return value.method
    if isinstance(value, str):
        if value in marked:
            return marked[value]
        near = near_misses(value, marked)
        hint = f"; did you mean {near[0]!r}?" if near else f"; its marked tools are: {', '.join(marked) or 'none'}"
        raise EnvironmentDefinitionError(f"{label} named the tool {shown(value)}, which the class does not mark{hint}")
    mark = mark_of(value, TOOL_MARK) if callable(value) else None
    if mark is None:
        hint = "; write @tool above its `def`, or wrap it: Tool(name, function, ...)" if callable(value) else ""
        raise EnvironmentDefinitionError(f"{label} returned {shown(value)} among its tools{hint}; expected {EXPECTED}")
    own = next((tool for tool in marked.values() if _same(tool.function, value)), None)
    if own is not None:
        return own
    found = added_tool(mark[0] or value.__name__, value, {})
    check_tool(found)
    return found


def _same(marked: Any, value: Any) -> bool:
    """Whether both are the same method, of the same object if it is bound."""
    return marked is value or (inspect.ismethod(marked) and bool(marked == value))


def _check_takes(function: Callable[..., Any], names: Iterable[str], required: Iterable[str], label: str) -> None:
    """Raise EnvironmentDefinitionError if the function cannot be called with all these arguments, or with the required
    ones alone.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # no readable signature, as in compiled code
    for given in (names, required):
        arguments = dict.fromkeys(given)
        try:
            signature.bind(**arguments)
        except TypeError as error:
            raise EnvironmentDefinitionError(
                f"{label}: its function {signature} cannot be called with the arguments "
                f"{', '.join(arguments) or '(none)'} ({error}); change `parameters`, or take **arguments"
            ) from error


def added_tool(name: str, function: Callable[..., Any], settings: Mapping[str, Any]) -> ToolMethod:
    """A function as a tool of this name, for any environment. Its keyword-only parameters are `settings`, which the
    model does not see. The function may be marked by `@tool`, for its deadline and its isolation.

    >>> def search(query: str, *, top_k: int = 3) -> str: ...
    >>> list(inspect.signature(added_tool("find", search, {"top_k": 5}).function).parameters)
    ['query']
    """
    is_plain = inspect.isroutine(function) or isinstance(function, functools.partial)
    plain: Callable[..., Any] = function if is_plain else operator.attrgetter("__call__")(function)
    _, timeout_seconds, isolate, role = mark_of(function, TOOL_MARK) or (None, TIMEOUT_SECONDS, None, None)
    keywords = keywords_of(function, settings)
    if isolate is not None:
        keywords = msgspec.to_builtins(keywords)  # they are sent to the tool's process as JSON
        check_reference(plain)
    bound = functools.update_wrapper(functools.partial(plain, **keywords), plain)
    signature = inspect.signature(plain)
    offered = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    vars(bound)["__signature__"] = signature.replace(parameters=offered)
    return ToolMethod(name, bound, timeout_seconds, isolate, role)
