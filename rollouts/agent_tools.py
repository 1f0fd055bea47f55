"""Carry out the tool calls of a reply: what went wrong becomes text for the model, never an exception.

Calls run one after another, in the order in which the model wrote them. What is left out: reading calls out of a reply
(`rollouts.chat`), and where the results go in the conversation (`rollouts.agent_model`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec
import trio

from rollouts.env import calls
from rollouts.env.authoring import ToolMethod
from rollouts.env.schema import validate_arguments
from rollouts.errors import EnvironmentDefinitionError, near_misses
from rollouts.types import ToolCall

__all__ = ["Failure", "ToolOutcome", "run_tool"]

Failure = Literal["malformed", "unknown_tool", "bad_arguments", "timeout", "exception"]


class ToolOutcome(NamedTuple):
    """What the model is told, and why the call failed (None: it did not)."""

    text: str
    failure: Failure | None = None


async def run_tool(
    tools: Mapping[str, ToolMethod], tool_call: ToolCall, *, characters_max: int = 16_000
) -> ToolOutcome:
    """One call. Text comes back as it is, None as nothing, anything else as JSON; more than `characters_max` is cut.

    Raises AbandonedCallsError (too many tools hang), EnvironmentDefinitionError (a tool that cannot be run as it is
    written); cancellation passes through.
    """
    outcome = await _attempt(tools, tool_call)
    if len(outcome.text) <= characters_max:
        return outcome
    note = f"\n[cut: the first {characters_max} of {len(outcome.text)} characters]"
    return outcome._replace(text=outcome.text[:characters_max] + note)


async def _attempt(tools: Mapping[str, ToolMethod], tool_call: ToolCall) -> ToolOutcome:
    if tool_call.error is not None:
        return ToolOutcome(f"Error: {tool_call.error}", "malformed")
    tool = tools.get(tool_call.name)
    if tool is None:
        return ToolOutcome(_unknown(tool_call.name, tools), "unknown_tool")
    arguments = validate_arguments(tool.function, tool_call.arguments, tool.name)
    if isinstance(arguments, str):
        return ToolOutcome(f"Error: {arguments}", "bad_arguments")
    try:
        returned = await calls.call(functools.partial(tool.function, **arguments), timeout_seconds=tool.timeout_seconds)
        return ToolOutcome(_as_text(returned))
    except trio.TooSlowError:
        return ToolOutcome(f"Error: {tool.name} took longer than {tool.timeout_seconds:g} seconds", "timeout")
    except (calls.AbandonedCallsError, EnvironmentDefinitionError):
        raise
    except Exception as error:  # whatever a stranger's tool raises is the model's to read
        return ToolOutcome(f"Error: {_words(error)}", "exception")


def _unknown(name: str, tools: Mapping[str, Any]) -> str:
    if not tools:
        return f"Error: there is no tool {name!r}; there are no tools here"
    near = near_misses(name, tools)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"Error: there is no tool {name!r}{hint} The tools are: {', '.join(tools)}"


def _words(error: BaseException) -> str:
    """Type and message, without a traceback; of a group, its first member."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    message = str(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _as_text(returned: Any) -> str:
    if isinstance(returned, str):
        return returned
    if returned is None:
        return ""
    try:
        return msgspec.json.encode(returned).decode()
    except TypeError:
        return str(returned)  # no JSON for it, such as an array's number; what it prints is all there is
