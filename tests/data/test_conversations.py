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


def part(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, **more}


def said(*parts: Any, role: str = "assistant") -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (said(part("input_text", text="1 +"), part("text", text=" 1?"), role="user"), TALK[0]),
        (said({"text": "1 + 1?"}, role="user"), TALK[0]),  # Gemini
        (said("1 + ", part("text", text="1?"), role="user"), TALK[0]),  # LangChain
        (said(part("output_text", text="2", annotations=[])), TALK[1]),
        (said(part("refusal", refusal="2")), TALK[1]),
        ({"role": "assistant", "content": None, "refusal": "2"}, TALK[1]),
        (said(part("thinking", thinking="so", signature="x"), part("text", text="2")),
         Message("assistant", "2", reasoning="so")),
        (said(part("thinking", thinking=[part("text", text="so")]), part("text", text="2")),  # Mistral
         Message("assistant", "2", reasoning="so")),
        ({**said(part("reasoning", text="so"), part("text", text="2")), "reasoning_content": "so"},
         Message("assistant", "2", reasoning="so")),
        (said(part("text", text="I add."), part("tool_use", id="c1", name="add", input={"a": 1})),
         Message("assistant", "I add.", [ToolCall("add", {"a": 1}, "c1")])),
        ({"role": "tool_call", "content": '{"name": "add", "arguments": ""}'},  # ms-swift
         Message("assistant", "", [ToolCall("add")])),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": None}}]},
         Message("assistant", "", [ToolCall("add")])),
    ],
)  # fmt: skip
def test_parts_of_other_apis(turn: dict[str, Any], message: Message) -> None:
    assert read_conversation({"messages": [turn]}).messages == [message]
    assert read_conversation({"messages": [message]}).messages == [message], "a loader may give messages"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([part("text", text="2"), part("input_text", text="3")], "23"),
        ([part("flight", price=3)], '[{"type":"flight","price":3}]'),
        ([], "[]"),
        ({"a": 1}, '{"a":1}'),
    ],
)
def test_a_result_is_text_or_data(content: Any, text: str) -> None:
    found = read_conversation({"messages": [*WITH_CALL[:2], {"role": "tool", "content": content}]})
    assert found.messages[2].content == text


def test_what_a_row_or_a_turn_says_of_its_training_acts() -> None:
    def weights(*replies: dict[str, Any], **row: Any) -> list[float | None]:
        turns = [each for reply in replies for each in (ASKED, {**REPLIED, **reply})]
        return read_conversation({"messages": turns, **row}).weights[1::2]

    assert weights({"train": False}, {"train": True}, {}) == [0.0, 1.0, None]
    assert weights({"loss": False}, {"training": 0}, {"loss": None}) == [0.0, 0.0, None]
    assert weights({"weight": 0.5}, {"loss_scale": 2, "loss": True}, {"weight": 3, "train": 0}) == [0.5, 2.0, 0.0]
    assert weights({"weight": 0.5}, {}, weight=2) == [1.0, 2.0]
    assert weights({}, {"train": True}, train=False) == [0.0, 0.0]


def test_replies_before_the_completion_are_context() -> None:
    earlier = [ASKED, REPLIED, ASKED, {**REPLIED, "weight": 0.5}, ASKED]
    found = read_conversation({"prompt": earlier, "completion": [REPLIED, ASKED, REPLIED]})
    assert found.weights == [None, 0.0, None, 0.5, None, None, None, None]
    for row in ({"instruction": "b", "output": "c"}, {"prompt": "b", "response": "c"}):
        found = read_conversation({**row, "history": json.dumps([["hi", "hello"]])})
        assert [each.text for each in found.messages] == ["hi", "hello", "b", "c"]
        assert found.weights == [None, 0.0, None, None]


def test_columns_that_are_not_read_are_named() -> None:
    turns = [{**ASKED, "weight": 1, "id": 7}, {**REPLIED, "train_detail": [], "weight": 1, "id": None}]
    found = read_conversation({"messages": turns, "system": "Add.", "prompt": "x", "source": "y", "text": None})
    assert found.unread == {"prompt", "source", "messages[].id", "messages[].train_detail", "messages[].weight"}
    assert not read_conversation({"prompt": [ASKED], "completion": [REPLIED], "history": None}).unread
    for said_first, unread in (("Add.", set()), ("Multiply.", {"system"})):
        turns = [{"role": "system", "content": said_first}, ASKED, REPLIED]
        assert read_conversation({"messages": turns, "system": "Add."}).unread == unread


TEXT_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD, RESULT = ToolCall("add", {"a": 1}), {"from": "tool", "value": "<tool_response>\n2\n</tool_response>"}


@pytest.mark.parametrize(
    ("reply", "more", "content", "calls"),
    [
        (TEXT_CALL, [RESULT], "", [ADD]),
        (f"I add.\n{TEXT_CALL}", [{**RESULT, "from": "human"}], "I add.", [ADD]),
        (f"{TEXT_CALL}\n{TEXT_CALL}\n", [{**RESULT, "value": RESULT["value"] * 2}], "", [ADD, ADD]),
        ("<tool_call>\n{'arguments': {'a': True, 'b': (1, None)}, 'name': 'add'}\n</tool_call>", [], "",
         [ToolCall("add", {"a": True, "b": [1, None]})]),
        ('<tool_call>{"name": "add", "arguments": {"a": "</tool_call>"}}</tool_call>', [], "",
         [ToolCall("add", {"a": "</tool_call>"})]),
        (f"<think>\nso\n</think>\n\n{TEXT_CALL}", [], "<think>\nso\n</think>", [ADD]),
        (f"Write it like this: {TEXT_CALL} and wait.", [], None, []),
        (f"Write it like this: {TEXT_CALL}", [], None, []),
        ("The tag <tool_call> opens a call.", [], None, []),
    ],
)  # fmt: skip
def test_calls_in_the_text(reply: str, more: list[Any], content: str | None, calls: list[ToolCall]) -> None:
    turns = [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": reply}, *more]
    found = read_conversation({"conversations": turns}).messages
    assert found[1] == Message("assistant", reply if content is None else content, calls)
    assert found[2:] == [Message("tool", "2")] * (len(calls) if more else 0)


def test_a_row_with_tools_has_calls_in_its_text() -> None:
    row = {"messages": [ASKED, {**REPLIED, "content": f"I add. {TEXT_CALL}"}], "tools": [{"name": "add"}]}
    assert read_conversation(row).messages[1] == Message("assistant", "I add.", [ADD])


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
        ({"messages": [ASKED, {"role": "model", "parts": []}]}, "it has no content; its keys are role, parts"),
        ({"messages": [ASKED, said()]}, "message 2: it has no content"),
        ({"messages": [said(part("image", image="cat.png"), role="user")]}, "message 1: a part of type 'image'"),
        ({"messages": [said(part("document", text="x"), role="user")]}, "message 1: a part of type 'document'"),
        ({"messages": [said(part("tool_result", content="x"), role="user")]}, "'tool_result' .*of the role tool"),
        ({"messages": [said(part("thinking", thinking="x"), role="user")]}, "message 1: a part of type 'thinking'"),
        ({"messages": [said(part("redacted_thinking", data="x"))]}, "message 1: a part of type 'redacted_thinking'"),
        ({"messages": [said(part("text"))]}, "message 1: a part of type 'text' has no text"),
        ({"messages": [said(3)]}, "message 1: a part of type 'text' has no text"),
        ({"messages": [said({"image": "x"})]}, "message 1: a part of type '' is not text"),
        ({"messages": [said(part("text", text="x"), part("thinking", thinking="x"))]}, "'thinking' too late"),
        ({"messages": [said(part("tool_use", name="add", input={}), part("text", text="x"))]}, "'text' too late"),
        ({"messages": [said(part("tool_use", name="add", input=[1]))]}, '"arguments" must be a JSON object'),
        ({"messages": [{**said(part("tool_use", name="add")), "tool_calls": [CALL]}]}, "it has tool calls twice"),
        ({"messages": [{**said(part("thinking", thinking="x")), "reasoning": "y"}]}, "it has thinking twice"),
        ({"messages": [{**ASKED, "content": {"text": "x"}}]}, "message 1: its content is a dict; expected text, or"),
        ({"messages": [*WITH_CALL[:2], said(part("image"), part("text", text="x"), role="tool")]}, "type 'image' is"),
        ({"messages": [ASKED, REPLIED], "images": ["cat.png"]}, "its column images is not text"),
        ({"messages": [ASKED, {**REPLIED, "train": "no"}]}, "message 2: its train is 'no'; expected true or false"),
        ({"messages": [ASKED, {**REPLIED, "loss": 0.3}]}, "message 2: its loss is 0.3; expected true or false"),
        ({"messages": [ASKED, REPLIED], "loss": 2.3}, "the column loss is 2.3; expected true or false"),
        ({"messages": [ASKED, REPLIED], "weight": float("nan")}, "the column weight is nan; expected a number"),
        ({"prompt": "a", "response": "b", "history": ["x"]}, "the column history is no list of pairs"),
        ({"messages": [ASKED, {**REPLIED, "content": "<tool_call>\n{'a\n</tool_call>"}]},
         r'message 2: the tool call in its text cannot be read: not JSON: .*; give it as "tool_calls": \[{"name"'),
        ({"messages": [ASKED, {**REPLIED, "content": f"{TEXT_CALL} now"}]}, "message 2: .*there is text behind it"),
        ({"messages": [ASKED, {**REPLIED, "content": "<tool_call>" + "[" * 9999}]}, "message 2: the tool call in"),
        ({"messages": [ASKED, {**REPLIED, "content": TEXT_CALL[:-12]}]}, "no end tag"),
        ({"messages": [ASKED, {**REPLIED, "content": '<tool_call>{"name": "a", "b": 1}</tool_call>'}]}, "other keys"),
        ({"messages": [ASKED, REPLIED, {"role": "tool", "content": "2"}]},
         "message 3: a tool result without its call; if the call is in the text of a reply, give it as"),
        ({"messages": [ASKED, {"role": "tool", "content": "2"}]}, "message 2: a tool result without its call"),
        (
            {"messages": [ASKED, {"role": "assistant", "tool_calls": [CALL]},
                          {"role": "tool", "content": "2", "tool_call_id": "c2"}]},
            "message 3: a tool result 'c2' without its call",
        ),
        (
            {"messages": [ASKED, {"role": "assistant", "tool_calls": [{"name": "add", "arguments": "{a"}]}]},
            'message 2: the arguments of add: "arguments" is not a JSON object: Expecting',
        ),
        ({"messages": [ASKED, {"role": "assistant", "tool_calls": [{}]}]}, "message 2: a tool call has no name"),
        ({"messages": [ASKED, {**REPLIED, "weight": -1}]}, "message 2: its weight is -1"),
        ({"messages": [{**ASKED, "tool_calls": [CALL]}]}, "message 1: a message of the role user has tool calls"),
    ],
)  # fmt: skip
def test_bad_rows(row: Any, words: str) -> None:
    with pytest.raises(BadRowError, match=words):
        read_conversation(row)
