"""Run a tool call. A failure becomes text for the model, not an exception.

`rollouts.chat` parses the calls in a reply, and `rollouts.agent.model` puts the results into the conversation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

from rollouts.author_code import shown, unwrapped
from rollouts.env import calls
from rollouts.env.authoring import ToolMethod
from rollouts.env.results import ToolOutcome, result_text, shortened
from rollouts.env.schema import read_arguments
from rollouts.error_log import report
from rollouts.errors import EnvironmentDefinitionError, ProcessError, SandboxError, ServiceLostError, named, near_misses
from rollouts.types import ToolCall


async def run_tool(
    tools: Mapping[str, ToolMethod], tool_call: ToolCall, *, characters_max: int = 16_000, seconds_max: float = math.inf
) -> ToolOutcome:
    """Run one call. The result is text: text unchanged, None as "", and anything else as JSON, cut to `characters_max`.

    The deadline is the tool's own, but at most `seconds_max`. Raises AbandonedCallsError if too many tools hang,
    ProcessError if no process could start, SandboxError if the tool's sandbox was lost, ServiceLostError if the tool
    raised it, and EnvironmentDefinitionError if the tool's code is not valid.
    """
    if tool_call.error is not None:
        return ToolOutcome(shortened(f"Error: {tool_call.error}", characters_max), "malformed")
    tool = tools.get(tool_call.name)
    if tool is None:
        return ToolOutcome(_unknown(tool_call.name, tools), "unknown_tool")
    if isinstance(tool.function, calls.RemoteTool):
        return await tool.function.run(tool_call, characters_max, seconds_max)
    arguments = read_arguments(tool, tool_call.arguments)
    if isinstance(arguments, str):
        return ToolOutcome(shortened(f"Error: {arguments}", characters_max), "bad_arguments")
    seconds = min(tool.timeout_seconds, seconds_max)
    try:
        if tool.isolate is not None:
            from rollouts.env.processes import call_isolated

            return await call_isolated(
                unwrapped(tool.function),
                # As JSON; the tool's process converts them again. A tool that the run adds has its settings too.
                {**tool_call.arguments, **getattr(tool.function, "keywords", {})},
                label=tool.name,
                timeout_seconds=seconds,
                characters_max=characters_max,
            )
        function = functools.partial(tool.function, **arguments)
        text = await calls.call(function, timeout_seconds=seconds, convert=result_text)
        return ToolOutcome(shortened(text, characters_max))
    except calls.CallTimeoutError:
        return ToolOutcome(f"Error: {tool.name} took longer than {seconds:g} seconds", "timeout")
    except (calls.AbandonedCallsError, EnvironmentDefinitionError, ProcessError, SandboxError, ServiceLostError):
        raise
    except Exception as error:  # whatever a tool raises is for the model to read
        # A ValueError is how a tool refuses a call of the model, so it is in errors.log without a note.
        words = report(error, f"the tool {tool.name}", is_noted=not isinstance(error, ValueError))
        return ToolOutcome(shortened(f"Error: {named(error)}", characters_max), "exception", words)


def _unknown(name: str, tools: Mapping[str, Any]) -> str:
    if not tools:
        return f"Error: there is no tool {shown(name)}; there are no tools here"
    near = near_misses(name, tools)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"Error: there is no tool {shown(name)}{hint} The tools are: {', '.join(tools)}"
