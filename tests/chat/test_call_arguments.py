"""Arguments that are null, "" or absent mean {} wherever a call is read; anything but a table has a reason."""

from __future__ import annotations

import json

import pytest

from rollouts.bounds import call_arguments
from rollouts.chat.tool_call_formats import TOOL_CALL_FORMATS, parse_reply, read_call
from rollouts.cli.play import typed_reply
from rollouts.gateway.anthropic_messages import MESSAGES
from rollouts.gateway.chat_completions import CHAT_COMPLETIONS
from rollouts.gateway.responses import Responses
from rollouts.inference.chatting import ChatRequest
from rollouts.types import ToolCall

TOOLS = [{"type": "function", "function": {"name": "stop", "description": "Stop.", "parameters": {"type": "object"}}}]
EMPTY = pytest.mark.parametrize("given", [{}, {"arguments": None}, {"arguments": ""}, {"arguments": " "}])


@EMPTY
def test_empty_arguments_are_no_arguments_in_every_layer(given: dict) -> None:
    function = {"name": "stop", **given}
    assert read_call({"id": "c1", "function": function}) == ToolCall("stop", {}, "c1")
    for family, text in (("hermes", f"<tool_call>{json.dumps(function)}</tool_call>"), ("json", json.dumps(function))):
        (call,) = parse_reply(text, TOOL_CALL_FORMATS[family], TOOLS).message.tool_calls
        assert (call.name, call.arguments, call.error) == ("stop", {}, None)
    (call,) = typed_reply("/call " + json.dumps(function), ChatRequest([], TOOLS, 0, 0)).tool_calls
    assert call.arguments == {}


@EMPTY
def test_empty_arguments_in_a_history_that_a_client_sends(given: dict) -> None:
    asked, result = {"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "c1", "content": "y"}
    call = {"id": "c1", "type": "function", "function": {"name": "stop", **given}}
    body = {"messages": [asked, {"role": "assistant", "content": None, "tool_calls": [call]}, result]}
    item = {"type": "function_call", "call_id": "c1", "name": "stop", **given}
    blocks = [{"type": "tool_use", "id": "c1", "name": "stop", **({"input": given["arguments"]} if given else {})}]
    said = {"messages": [asked, {"role": "assistant", "content": blocks}], "max_tokens": 5, "model": "m"}
    for read in (
        CHAT_COMPLETIONS.read(json.dumps(body).encode()),
        Responses().api.read(json.dumps({"input": [asked, item]}).encode()),
        MESSAGES.read(json.dumps(said).encode()),
    ):
        assert read.asked.messages[1].tool_calls == [ToolCall("stop", {}, "c1")]


@pytest.mark.parametrize("given", ["[1]", "3", "{", '{}""', [1], 3, True])
def test_arguments_that_are_no_table_have_a_reason(given: object) -> None:
    assert "JSON object" in call_arguments(given)
    assert "JSON object" in read_call({"id": "c", "function": {"name": "stop", "arguments": given}}).error


@pytest.mark.parametrize("family", ["hermes", "mistral", "llama3", "json"])
def test_a_key_that_is_there_twice_is_refused(family: str) -> None:
    """In the arguments, and in an object within them. JSON parsers would keep the last one, and it would be trained."""
    for arguments in ('{"a": 1, "a": 2}', '{"b": {"a": 1, "a": 2}}'):
        call = f'{{"name": "stop", "arguments": {arguments}}}'
        text = {"hermes": f"<tool_call>{call}</tool_call>", "mistral": f"[TOOL_CALLS][{call}]"}.get(family, call)
        (read,) = parse_reply(text, TOOL_CALL_FORMATS[family], TOOLS).message.tool_calls
        assert read.name == "stop" and "the key 'a' is there twice" in read.error
        assert "the key 'a' is there twice" in call_arguments(arguments)
