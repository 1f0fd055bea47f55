"""Read the tool calls in a reply, and run them.

A *tool parser* takes the text of a reply and returns tool calls, or tool calls and the remaining text. A call that
cannot be read has an `error`, which is a text for the model. `parse_tools` reads every format that the engine knows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from rollouts.author_code import shown
from rollouts.chat.tool_call_formats import TOOL_CALL_FORMATS, detect_tool_call_format, parse_reply
from rollouts.env.authoring import TOOL_MARK, ToolMethod, mark_of
from rollouts.env.tools import run_tool
from rollouts.errors import ConfigError
from rollouts.types import Message, ToolCall
from rollouts_notes.primitives.calls import call_given
from rollouts_notes.primitives.generation import ANY_TOOL, ToolParser, parse_calls, run_sync, tool_name
from rollouts_notes.primitives.types import Generation

Tools = Sequence[Callable[..., Any] | dict[str, Any]]


def parse_tools(text: str) -> list[ToolCall]:
    """The tool calls in a text, in any format: `<tool_call>` tags, `[TOOL_CALLS]`, or a bare JSON object.

    >>> parse_tools('Let me see. <tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>')[0].arguments
    {'a': 2}
    >>> parse_tools("5")
    []
    """
    return _parse(text, detect_tool_call_format(text, ""))


def parse_xml_tools(text: str) -> list[ToolCall]:
    """The tool calls between `<tool_call>` tags, as JSON or as `<function=name>`; other text is no call.

    >>> parse_xml_tools("<tool_call><function=add><parameter=a>2</parameter></function></tool_call>")[0].name
    'add'
    """
    return _parse(text, "xml" if "<function=" in text else "hermes")


def parse_functions(text: str) -> list[ToolCall]:
    """The tool calls in a reply that is JSON: `{"name": ..., "arguments": {...}}`, also with `parameters`.

    >>> [call.name for call in parse_functions('{"name": "add", "parameters": {"a": 2}}')]
    ['add']
    """
    return _parse(text, "json")


def _parse(text: str, name: str) -> list[ToolCall]:
    return parse_reply(text, TOOL_CALL_FORMATS[name], ANY_TOOL).message.tool_calls


def extract_tool_calls(generation: Generation | str, *, tool_parser: ToolParser | None = None) -> list[ToolCall]:
    """The tool calls of a reply. `tool_parser(text)` replaces `parse_tools`, and may also return the remaining text.

    Raises ConfigError if the parser returns anything but tool calls.

    >>> extract_tool_calls("add(2, 3)", tool_parser=lambda text: [ToolCall(text.partition("(")[0])])[0].name
    'add'
    """
    return parse_calls(tool_parser or parse_tools, generation if isinstance(generation, str) else generation.text)


def execute_functions(tool_calls: Sequence[ToolCall], tools: Tools) -> list[str]:
    """Run each call with the function that has its name, in order. Returns a text for each call.

    Arguments are checked against the function's type hints. A failure becomes a text for the model. Functions may be
    async; `@tool(timeout_seconds=5)` gives one a deadline (30 s without it).

    >>> def add(a: int, b: int) -> int:
    ...     "Add two numbers."
    ...     return a + b
    >>> execute_functions([ToolCall("add", {"a": 2, "b": 3}), ToolCall("sub")], [add])
    ['5', "Error: there is no tool 'sub'. The tools are: add"]
    """
    return [run_sync(functools.partial(run_tool, _methods(tools), each)).text for each in tool_calls]


def execute_tools(
    tool_calls: Sequence[ToolCall],
    tools: Tools = (),
    *,
    tool_executor: Callable[[Sequence[ToolCall], Tools], Sequence[Message | str]] | None = None,
) -> list[Message]:
    """Run the calls, and return one message with the role `tool` for each.

    Raises ConfigError if the executor does not return one result per call.

    >>> execute_tools([ToolCall("add")], tool_executor=lambda calls, tools: ["5"])[0].content
    '5'

    Args:
        tools: the functions that the calls may name
        tool_executor: `tool_executor(tool_calls, tools)` replaces `execute_functions`; it returns texts or messages
    """
    results = call_given("tool_executor(tool_calls, tools)", tool_executor or execute_functions, tool_calls, tools)
    if isinstance(results, str) or not isinstance(results, Sequence) or len(results) != len(tool_calls):
        expected = f"a list of {len(tool_calls)} texts or messages, one per call"
        raise ConfigError(f"the tool_executor returned {shown(results)}; expected {expected}")
    return [_message(*each) for each in zip(results, tool_calls, strict=True)]


def _message(result: Message | str, tool_call: ToolCall) -> Message:
    if isinstance(result, Message):
        return result
    return Message("tool", str(result), tool_call_id=tool_call.id or None, name=tool_call.name)


def _methods(tools: Tools) -> dict[str, ToolMethod]:
    methods = {}
    for function in tools:
        if isinstance(function, dict):
            continue  # a schema has no function, so its call becomes "there is no tool"
        _, timeout_seconds, isolate, _ = mark_of(function, TOOL_MARK) or ("", 30.0, None, None)
        name = tool_name(function)
        methods[name] = ToolMethod(name, function, timeout_seconds, isolate)
    return methods
