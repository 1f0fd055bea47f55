"""Carry out the tool calls of a reply: what went wrong becomes text for the model, never an exception.

Calls run one after another, in the order in which the model wrote them. What is left out: reading calls out of a reply
(`rollouts.chat`), and where the results go in the conversation (`rollouts.agent.model`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

from rollouts.author_code import shown
from rollouts.env import calls
from rollouts.env.authoring import ToolMethod
from rollouts.env.processes import ProcessError, call_isolated
from rollouts.env.results import ToolOutcome, result_text, shortened
from rollouts.env.schema import validate_arguments
from rollouts.error_log import report
from rollouts.errors import EnvironmentDefinitionError, named, near_misses
from rollouts.types import ToolCall


async def run_tool(
    tools: Mapping[str, ToolMethod],
    tool_call: ToolCall,
    *,
    characters_max: int = 16_000,
    seconds_max: float = math.inf,
) -> ToolOutcome:
    """One call. Text comes back as it is, None as nothing, anything else as JSON; more than `characters_max` is cut.
    Its deadline is the tool's own, `seconds_max` at most.

    Raises AbandonedCallsError (too many tools hang), ProcessError (none could be started), EnvironmentDefinitionError
    (a tool that cannot be run as it is written); cancellation passes through.
    """
    if tool_call.error is not None:
        return ToolOutcome(shortened(f"Error: {tool_call.error}", characters_max), "malformed")
    tool = tools.get(tool_call.name)
    if tool is None:
        return ToolOutcome(_unknown(tool_call.name, tools), "unknown_tool")
    arguments = validate_arguments(tool.function, tool_call.arguments, tool.name)
    if isinstance(arguments, str):
        return ToolOutcome(shortened(f"Error: {arguments}", characters_max), "bad_arguments")
    seconds = min(tool.timeout_seconds, seconds_max)
    try:
        if tool.isolate is not None:
            return await call_isolated(
                tool.function,
                tool_call.arguments,  # as JSON: they are converted once more where they are used
                label=tool.name,
                timeout_seconds=seconds,
                characters_max=characters_max,
            )
        function = functools.partial(tool.function, **arguments)
        text = await calls.call(function, timeout_seconds=seconds, convert=result_text)
        return ToolOutcome(shortened(text, characters_max))
    except calls.CallTimeoutError:
        return ToolOutcome(f"Error: {tool.name} took longer than {seconds:g} seconds", "timeout")
    except (calls.AbandonedCallsError, EnvironmentDefinitionError, ProcessError):
        raise
    except Exception as error:  # whatever a tool raises is for the model to read
        words = report(error, f"the tool {tool.name}", is_noted=False)
        return ToolOutcome(shortened(f"Error: {named(error)}", characters_max), "exception", words)


def _unknown(name: str, tools: Mapping[str, Any]) -> str:
    if not tools:
        return f"Error: there is no tool {shown(name)}; there are no tools here"
    near = near_misses(name, tools)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"Error: there is no tool {shown(name)}{hint} The tools are: {', '.join(tools)}"
