"""A function of a package or a file as a tool, which a run adds to those of its environments (`--tool`)."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rollouts.env.authoring import TIMEOUT_SECONDS, TOOL_MARK, ToolMethod, mark_of
from rollouts.env.isolated import check_reference
from rollouts.plugins.signature import keywords_of


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
