"""Rows as conversations: every form, with tool calls and results; bad rows with their reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollouts.data.conversations import BadRowError, read_conversation
from rollouts.types import Message, ToolCall

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ASKED, REPLIED = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}
TALK = [Message("user", "1 + 1?"), Message("assistant", "2")]
WITH_CALL = [
    Message("user", "1 + 1?"),
    Message("assistant", "", [ToolCall("add", {"a": 1}, "c1")]),
    Message("tool", "2", tool_call_id="c1"),
    Message("assistant", "2"),
]


@pytest.mark.parametrize(
    ("row", "messages", "form"),
    [
        ({"messages": [ASKED, REPLIED]}, TALK, "messages"),
        ({"messages": json.dumps([ASKED, REPLIED])}, TALK, "messages"),
        (
            {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                          {"role": "tool", "content": 2, "tool_call_id": "c1"}, REPLIED]},
            WITH_CALL,
            "messages",
        ),
        (
            {"conversations": [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}], "system": "Add."},
            [Message("system", "Add."), *TALK],
            "conversations (ShareGPT)",
        ),
        (
            {"conversations": [{"from": "human", "value": "1 + 1?"},
                               {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                               {"from": "observation", "value": "2"}, {"from": "gpt", "value": "2"}]},
            [WITH_CALL[0], Message("assistant", "", [ToolCall("add", {"a": 1})]), Message("tool", "2"), WITH_CALL[3]],
            "conversations (ShareGPT)",
        ),
        (
            {"instruction": "Add.", "input": "", "output": "2", "history": [["hi", "hello"]]},
            [Message("user", "hi"), Message("assistant", "hello"), Message("user", "Add."), Message("assistant", "2")],
            "instruction, input and output (Alpaca)",
        ),
        ({"instruction": "Add.", "output": "2"}, [Message("user", "Add."), Message("assistant", "2")],
         "instruction and output (Alpaca)"),
        ({"prompt": "1 + 1?", "response": "2"}, TALK, "prompt and response"),
        ({"question": "1 + 1?", "completion": [REPLIED]}, TALK, "question and completion"),
        ({"prompt": [ASKED], "completion": "2"}, TALK, "prompt and completion"),
        ({"prompt": "1 + 1?", "response": 2}, TALK, "prompt and response"),  # of a table: CSV, pandas
        ({"question": 0, "completion": 0.5}, [Message("user", "0"), Message("assistant", "0.5")],
         "question and completion"),
        ({"prompt": None, "question": "1 + 1?", "response": "", "completion": "2"}, TALK, "question and completion"),
        ({"instruction": "1 + 1?", "input": None, "output": 2}, TALK, "instruction, input and output (Alpaca)"),
    ],
)  # fmt: skip
def test_every_form(row: dict[str, Any], messages: list[Message], form: str) -> None:
    found = read_conversation(row)
    assert found.messages == messages and found.form == form and len(found.weights) == len(messages)


def test_thinking_weights_and_tools() -> None:
    tool = {"name": "add", "parameters": {}}
    replies = [{**REPLIED, "reasoning_content": "one and one", "weight": 0}, ASKED, {**REPLIED, "weight": 0.5}]
    found = read_conversation({"messages": [ASKED, *replies], "tools": json.dumps([tool])})
    assert found.weights == [None, 0.0, None, 0.5] and found.messages[1].reasoning == "one and one"
    assert found.tools == [{"type": "function", "function": tool}]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([1], "a row is a table of columns, got list"),
        ({"text": "a"}, "no conversation in the columns text; expected messages"),
        ({"messages": []}, "no messages"),
        ({"prompt": "a", "response": ""}, "the column response is empty"),
        ({"prompt": None, "response": "a"}, "the column prompt is empty"),
        ({"prompt": "a", "completion": {"a": 1}}, "the column completion is no text, got dict"),
        ({"instruction": "a", "output": None}, "the column output is empty"),
        ({"messages": "[{"}, "the column messages: no JSON"),
        ({"messages": [{"content": "a"}]}, "message 1: it has no role"),
        ({"messages": [{"role": "usr", "content": "a"}]}, "message 1: unknown role 'usr'"),
        ({"messages": [ASKED, {"role": "user"}]}, "message 2: it has no content"),
        ({"messages": [ASKED, {"role": "tool", "content": "2"}]}, "message 2: a tool result without its call"),
        (
            {"messages": [ASKED, {"role": "assistant", "tool_calls": [CALL]},
                          {"role": "tool", "content": "2", "tool_call_id": "c2"}]},
            "message 3: a tool result 'c2' without its call",
        ),
        (
            {"messages": [ASKED, {"role": "assistant", "tool_calls": [{"name": "add", "arguments": "{a"}]}]},
            "message 2: the arguments of add: no JSON: .* '{a'",
        ),
        ({"messages": [ASKED, {"role": "assistant", "tool_calls": [{}]}]}, "message 2: a tool call has no name"),
        ({"messages": [ASKED, {**REPLIED, "weight": -1}]}, "message 2: its weight is -1"),
        ({"messages": [{**ASKED, "tool_calls": [CALL]}]}, "message 1: a message of the role user has tool calls"),
    ],
)  # fmt: skip
def test_bad_rows(row: Any, words: str) -> None:
    with pytest.raises(BadRowError, match=words):
        read_conversation(row)
