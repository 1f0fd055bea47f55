"""Replies of each family, well written and badly."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.chat.tool_call_formats import TOOL_CALL_FORMATS, detect_tool_call_format, parse_reply
from rollouts.types import Message

sys.path.insert(0, str(Path(__file__).parent))
from tokenizers_for_tests import chat_for, make_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
PARSE = make_tokenizer("qwen3").parse_response
CALL = '{"name": "add", "arguments": {"a": 1}}'
LLAMA = '{"name": "add", "parameters": {"a": 1}}'
XML = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
READERS = pytest.mark.parametrize("parse_response", [PARSE, None], ids=["transformers", "own"])


def read(family: str, text: str, parse_response=PARSE, tools=TOOLS, **more) -> Message:
    return parse_reply(text, TOOL_CALL_FORMATS[family], tools, parse_response=parse_response, **more).message


@READERS
@pytest.mark.parametrize(
    ("family", "text", "content", "count"),
    [
        ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", 1),
        ("hermes", f"Let me see. \n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "Let me see.", 2),
        ("hermes", f"<tool_call>\n{CALL}", "", 1),
        ("hermes", f"<tool_call>{LLAMA}</tool_call>", "", 1),
        ("xml", f"So: {XML}\n{XML}", "So:", 2),
        ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", "", 2),
        ("mistral", f"[TOOL_CALLS]{CALL}", "", 1),
        ("llama3", LLAMA, "", 1),
        ("llama3", f"<|python_tag|>{LLAMA}", "", 1),
        ("llama3", f"{LLAMA}; {LLAMA}", "", 2),
        ("json", f"\n{CALL}\n", "", 1),
        ("json", f"[{CALL}, {CALL}]", "", 2),
    ],
)
def test_calls(family: str, text: str, content: str, count: int, parse_response) -> None:
    message = read(family, text, parse_response)
    values = {"xml": ("1", 1)}.get(family, (1,))  # our own parser does not cast what was written without a type
    assert message.text == content
    assert [(call.name, call.error) for call in message.tool_calls] == [("add", None)] * count
    assert all(call.arguments["a"] in values for call in message.tool_calls)
    ids = [call.id for call in message.tool_calls]
    assert len(set(ids)) == count and all(len(i) == 9 and i.isalnum() for i in ids)
    assert read(family, text, parse_response) == message


@READERS
@pytest.mark.parametrize(
    ("family", "text", "name", "word"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": }}\n</tool_call>', "add", "not valid JSON"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "add", "must be a JSON object"),
        ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>', "", '"name" is missing'),
        ("hermes", "<tool_call>7</tool_call>", "", "expected a JSON object"),
        ("hermes", "<tool_call></tool_call>", "", "not valid JSON"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>', "add", "incomplete"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "add", "NaN"),
        ("hermes", '<tool_call>{"name": "add", "arguments": ' + '{"a":' * 100_000, "add", ""),
        ("xml", "<tool_call><function=add>1</tool_call>", "add", "<function=name>"),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {', "add", "not valid JSON"),
        ("llama3", '{"name": "add", "parameters": {"a": 1}', "add", "not valid JSON"),
        ("json", '{"name": "add", "arguments": 3}', "add", "must be a JSON object"),
    ],
)
def test_malformed_calls_say_what_is_wrong(family: str, text: str, name: str, word: str, parse_response) -> None:
    message = read(family, text, parse_response)
    (call,) = message.tool_calls
    assert (call.name, call.arguments) == (name, {})
    assert word in (call.error or "") and TOOL_CALL_FORMATS[family].example in (call.error or "")
    assert message.text == text, "the raw text stays"


@READERS
def test_a_bad_call_does_not_take_the_good_one_with_it(parse_response) -> None:
    text = f"<tool_call>{CALL}</tool_call><tool_call>{{oops}}</tool_call>"
    good, bad = read("hermes", text, parse_response).tool_calls
    assert (good.arguments, good.error) == ({"a": 1}, None)
    assert bad.error


@READERS
def test_thinking(parse_response) -> None:
    message = read("hermes", f"<think>\nwhy <tool_call>\n</think>\n\nSo.<tool_call>{CALL}</tool_call>", parse_response)
    assert message.reasoning == "why <tool_call>"
    assert message.text == "So." and len(message.tool_calls) == 1
    message = read("hermes", f"why</think>\n{XML}", parse_response, thinking_prefix="<think>\n")
    assert message.reasoning == "why" and message.tool_calls[0].error
    assert read("hermes", f"<think>never ends <tool_call>{CALL}</tool_call>", parse_response).tool_calls == []


def test_text_that_only_looks_like_a_call() -> None:
    assert read("json", CALL, tools=[]).tool_calls == []
    assert read("json", f"As JSON: {CALL}").tool_calls == []
    assert read("json", '{"answer": 3}').tool_calls == []
    assert read("hermes", "  I would.\n ").content == "  I would.\n "


def test_the_tokenizers_own_response_template_comes_first() -> None:
    template = {
        "start_anchor": "<bot>",
        "fields": {
            "tool_calls": {"open": "<<", "close": ">>", "repeats": True, "content": "json"},
            "content": {"content": "text"},
        },
    }
    message = read("json", f"hm <<{CALL}>>", response_template=template, prefix="x<bot>")
    assert message.text == "hm" and message.tool_calls[0].arguments == {"a": 1}
    assert read("json", "hm <<{oops>>", response_template=template, prefix="x<bot>").text == "hm <<{oops>>"


@READERS
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    family=st.sampled_from(sorted(TOOL_CALL_FORMATS)),
    pieces=st.lists(
        st.sampled_from("<tool_call> </tool_call> <think> </think> [TOOL_CALLS] [ { } ; <|python_tag|>".split())
        | st.sampled_from(["<function=add>", CALL, LLAMA, "\ud800", '{"name": null}', '"name": "', "\n"]),
        max_size=8,
    ),
)
def test_never_raises_and_is_plain_data(family: str, pieces: list[str], parse_response) -> None:
    message = read(family, "".join(pieces), parse_response)
    json.dumps([call.arguments for call in message.tool_calls])
    assert all(call.error is None or call.arguments == {} for call in message.tool_calls)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("qwen2_5", "hermes"),
        ("qwen3", "hermes"),
        ("llama3_1", "llama3"),
        ("llama3_2", "llama3"),
        ("mistral", "mistral"),
        ("qwen3_5_think", "xml"),
        ("gemma3", "json"),
        ("phi3", "json"),
    ],
)
def test_families_are_found_by_how_a_call_is_rendered(name: str, family: str) -> None:
    assert chat_for(name).tool_call_format == family


def test_a_family_by_the_template_text_alone() -> None:
    assert detect_tool_call_format("", "… <tool_call> …") == "hermes"
    assert detect_tool_call_format("", "… [TOOL_CALLS] …") == "mistral"
    assert detect_tool_call_format("", "nothing") == "json"
