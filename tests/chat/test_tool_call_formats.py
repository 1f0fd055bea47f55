"""Replies of each family, well written and badly."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.chat.thoughts import THINK_TAGS
from rollouts.chat.tool_call_formats import TOOL_CALL_FORMATS, detect_tool_call_format, parse_reply
from rollouts.types import Message, ToolCall

sys.path.insert(0, str(Path(__file__).parent))
from tokenizers_for_tests import chat_for, make_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
PARSE = make_tokenizer("qwen3").parse_response
CALL = '{"name": "add", "arguments": {"a": 1}}'
LLAMA = '{"name": "add", "parameters": {"a": 1}}'
XML = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


def read(family: str, text: str, tools=TOOLS, **more) -> Message:
    return parse_reply(text, TOOL_CALL_FORMATS[family], tools, **more).message


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
def test_calls(family: str, text: str, content: str, count: int) -> None:
    message = read(family, text)
    assert message.text == content
    assert [(call.name, call.error) for call in message.tool_calls] == [("add", None)] * count
    assert [call.arguments["a"] for call in message.tool_calls] == [1] * count, "text has the type of the schema"
    ids = [call.id for call in message.tool_calls]
    assert len(set(ids)) == count and all(len(i) == 9 and i.isalnum() for i in ids)
    assert read(family, text) == message


@pytest.mark.parametrize(
    ("family", "text", "name", "word"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": }}\n</tool_call>', "add", "not valid JSON"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "add", "must be a JSON object"),
        ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>', "", '"name" is missing'),
        ("hermes", "<tool_call>7</tool_call>", "", "expected a JSON object"),
        ("hermes", "I add: <tool_call>add(1)</tool_call>\n", "", "not valid JSON"),
        ("hermes", "<tool_call></tool_call>", "", "not valid JSON"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>', "add", "not valid Unicode"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "add", "NaN"),
        ("hermes", '<tool_call>{"name": "add", "arguments": ' + '{"a":' * 100_000, "add", ""),
        (
            "xml",
            "<tool_call><function=add>1</tool_call>",
            "add",
            "<parameter=key>…</parameter> or </function>, got '1'",
        ),
        ("xml", "<tool_call>add</tool_call>", "", "no <function=name>"),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {', "add", "not valid JSON"),
        ("llama3", '{"name": "add", "parameters": {"a": 1}', "add", "not valid JSON"),
        ("json", '{"name": "add", "arguments": 3}', "add", "must be a JSON object"),
    ],
)
def test_malformed_calls_say_what_is_wrong(family: str, text: str, name: str, word: str) -> None:
    message = read(family, text)
    (call,) = message.tool_calls
    assert (call.name, call.arguments) == (name, {})
    assert word in (call.error or "") and TOOL_CALL_FORMATS[family].example in (call.error or "")
    assert message.text == text, "the raw text stays"


def test_a_bad_call_does_not_take_the_good_one_with_it() -> None:
    text = f"<tool_call>{CALL}</tool_call><tool_call>{{oops}}</tool_call>"
    good, bad = read("hermes", text).tool_calls
    assert (good.arguments, good.error) == ({"a": 1}, None)
    assert bad.error


def test_thinking() -> None:
    message = read("hermes", f"<think>\nwhy <tool_call>\n</think>\n\nSo.<tool_call>{CALL}</tool_call>")
    assert message.reasoning == "why <tool_call>"
    assert message.text == "So." and len(message.tool_calls) == 1
    message = read("hermes", f"why</think>\n{XML}", thoughts=THINK_TAGS._replace(prompt="<think>\n"))
    assert message.reasoning == "why" and message.tool_calls[0].error
    assert read("hermes", f"<think>never ends <tool_call>{CALL}</tool_call>").tool_calls == []


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("json", f"As JSON: {CALL}"),
        ("json", '{"answer": 3}'),
        ("json", '{"name": "Anna", "age": 30}'),
        ("json", '[{"name": "Anna"}, {"name": "Bob"}]'),
        ("json", '{"name": "add", "age": 30}'),
        ("json", '{"name": "Anna", "age": 30'),
        ("json", "[]"),
        ("llama3", '{"type": "circle", "radius": 2}'),
        ("llama3", '{"function": "sin", "parameters": [0, 1]}'),
        ("hermes", "  I would.\n "),
        ("hermes", "The tag <tool_call> opens a call."),
        ("hermes", "The tag <tool_call> opens a call, and </tool_call> closes it."),
        ("xml", "Write <tool_call> before a call and </tool_call> behind it."),
        ("mistral", "The word [TOOL_CALLS] comes first."),
    ],
)
def test_text_that_only_looks_like_a_call(family: str, text: str) -> None:
    message = read(family, text)
    assert (message.tool_calls, message.content) == ([], text)


def test_without_tools_a_bare_call_is_text_and_a_tool_without_parameters_needs_no_arguments() -> None:
    assert read("json", CALL, tools=[]).tool_calls == []
    (call,) = read("json", '{"name": "stop"}', tools=[{"function": {"name": "stop"}}]).tool_calls
    assert (call.name, call.arguments, call.error) == ("stop", {}, None)
    assert read("json", '{"name": "add", "argu').tool_calls[0].error, "a call of an offered tool that was cut off"


@pytest.mark.parametrize(
    ("family", "text", "content", "values"),
    [
        ("hermes", f"<tool_call>\n{CALL}\n{CALL}\n</tool_call>", "", [1, 1]),
        ("hermes", f"<tool_call>[{CALL}, {CALL}]</tool_call>", "", [1, 1]),
        ("hermes", f"I add.\n<tool_call>{CALL}</tool_call>\nThen I say it.", "I add.\nThen I say it.", [1]),
        ("hermes", CALL.replace("1", '"</tool_call>"').join(["<tool_call>", "</tool_call>"]), "", ["</tool_call>"]),
        ("mistral", f"[TOOL_CALLS] [{CALL}] Wait for it.", "Wait for it.", [1]),
        ("llama3", f"{LLAMA}\nI add.", "I add.", [1]),
        ("xml", f"{XML}\nDone.", "Done.", [1]),
        ("xml", XML.replace("1", "</parameter> is an end"), "", ["</parameter> is an end"]),
        ("xml", XML.replace("1", "</tool_call> is an end"), "", ["</tool_call> is an end"]),
    ],
)
def test_where_a_call_ends_and_what_is_beside_it(family: str, text: str, content: str, values: list) -> None:
    message = read(family, text)
    assert message.text == content
    assert [(call.arguments["a"], call.error) for call in message.tool_calls] == [(each, None) for each in values]


@pytest.mark.parametrize(
    ("inside", "why"),
    [
        ("<parameter=a>\n1\n", "the parameter 'a' has no end tag </parameter>"),
        ("<parameter=a>\n1\n<parameter=b>\n2\n</parameter>\n", "the parameter 'a' has no end tag </parameter>"),
        ("<parameter=a>1</parameter><parameter=a>2</parameter>", "the parameter 'a' is there twice"),
        ("a = 1\n<parameter=b>2</parameter>", "expected <parameter=key>…</parameter> or </function>, got 'a = 1"),
    ],
)
def test_an_xml_argument_is_never_dropped(inside: str, why: str) -> None:
    text = f"<tool_call>\n<function=add>\n{inside}</function>\n</tool_call>"
    bad, good = read("xml", f"{text}\n{XML}").tool_calls
    assert (bad.name, bad.arguments, good.arguments, good.error) == ("add", {}, {"a": 1}, None)
    assert why in str(bad.error)


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": ["string", "null"]}, "None", None),
        ({"type": "string"}, "None", "None"),
        ({"type": ["string", "null"]}, "true", "true"),
        ({"enum": ["None", "x"]}, "None", "None"),
        ({}, "null", None),
        ({}, "False", False),
        ({}, "none", "none"),
    ],
)
def test_a_word_in_xml_is_a_value_if_the_schema_allows_it(schema: object, written: str, value: object) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": schema}}}}]
    assert read("xml", XML.replace("1", written), tools=tools).tool_calls[0].arguments == {"a": value}
    as_json = CALL.replace("1", json.dumps(written))
    (call,) = read("hermes", f"<tool_call>{as_json}</tool_call>", tools=tools).tool_calls
    assert call.arguments == {"a": written}, "JSON has values of its own"


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "integer"}, "3", 3),
        ({"type": "number"}, "2.5", 2.5),
        ({"type": "boolean"}, "true", True),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": "integer", "nullable": True}, "None", None),
        ({"type": "integer"}, "None", "None"),
        ({"type": "number"}, "nan", "nan"),
        ({"type": "array", "items": {"type": "integer"}}, "[1, 2]", [1, 2]),
        ({"type": "object"}, '{"x": [1]}', {"x": [1]}),
        ({"type": "string"}, "3", "3"),
        ({"type": ["string", "integer"]}, "3", "3"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"type": "integer"}, "three", "three"),
        ({}, "3", "3"),
        ({"type": {"of": 1}}, "3", "3"),
        ("no schema", "3", "3"),
    ],
)
def test_text_has_the_type_of_the_schema(schema: object, written: str, value: object) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": schema}}}}]
    as_json = CALL.replace("1", json.dumps(written))
    for family, text in (("xml", XML.replace("1", written)), ("hermes", f"<tool_call>{as_json}</tool_call>")):
        (call,) = read(family, text, tools=tools).tool_calls
        assert (call.arguments, type(call.arguments["a"])) == ({"a": value}, type(value))


def test_the_tokenizers_own_response_template_comes_first() -> None:
    template = {
        "start_anchor": "<bot>",
        "fields": {
            "tool_calls": {"open": "<<", "close": ">>", "repeats": True, "content": "json"},
            "content": {"content": "text"},
        },
    }
    message = read("json", f"hm <<{CALL}>>", response_template=template, parse_response=PARSE, prefix="x<bot>")
    assert message.text == "hm" and message.tool_calls[0].arguments == {"a": 1}
    assert (
        read("json", "hm <<{oops>>", response_template=template, parse_response=PARSE, prefix="x<bot>").text
        == "hm <<{oops>>"
    )


@settings(derandomize=True)
@given(
    family=st.sampled_from(sorted(TOOL_CALL_FORMATS)),
    pieces=st.lists(
        st.sampled_from("<tool_call> </tool_call> <think> </think> [TOOL_CALLS] [ { } ; <|python_tag|>".split())
        | st.sampled_from(["<function=add>", CALL, LLAMA, "\ud800", '{"name": null}', '"name": "', "\n"]),
        max_size=8,
    ),
)
def test_never_raises_and_is_plain_data(family: str, pieces: list[str]) -> None:
    message = read(family, "".join(pieces))
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


TEXTS = [
    "plain",
    "a call ends with </tool_call> here",
    "<tool_call>",
    "</function>",
    "[TOOL_CALLS] [1]",
    '{"name": "add"}',
    "<think>",
    "</think>",
    " two\nlines\n",
    'a "quote" \\ and é',
]


@settings(derandomize=True)
@given(
    name=st.sampled_from(["qwen2_5", "qwen3_5_think", "mistral", "llama3_1", "glm4moe"]),
    arguments=st.lists(
        st.dictionaries(st.sampled_from("ab"), st.sampled_from(TEXTS) | st.integers() | st.booleans(), min_size=1),
        min_size=1,
        max_size=2,
    ),
)
def test_what_a_template_writes_is_read_back(name: str, arguments: list[dict]) -> None:
    chat, kinds = chat_for(name), {str: "string", int: "integer", bool: "boolean"}
    if not chat.report.reads_calls:
        return
    arguments = arguments if chat.report.parallel_calls else arguments[:1]
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"tool_{number}",
                "description": "One.",
                "parameters": {
                    "type": "object",
                    "properties": {key: {"type": kinds[type(value)]} for key, value in each.items()},
                },
            },
        }
        for number, each in enumerate(arguments)
    ]
    if chat.tool_call_format == "xml":  # it has no way to write its own tags in a value
        arguments = [{key: "x" if value in TEXTS[3:4] else value for key, value in each.items()} for each in arguments]
    calls = [ToolCall(f"tool_{number}", each, f"c0000000{number}") for number, each in enumerate(arguments)]
    user, reply = Message("user", "Go."), Message("assistant", "", calls)
    prompt, whole = chat.render([user], tools, True), chat.render([user, reply], tools, False)
    text = whole[len(prompt) :] if whole.startswith(prompt) else whole.rpartition("assistant\n")[2]
    text = text.rstrip("\n").removesuffix(next(iter(chat.closers)))
    read = chat.parse(chat.encode(text), tools)
    assert [(call.name, call.arguments, call.error) for call in read.tool_calls] == [
        (call.name, call.arguments, None) for call in calls
    ], text
    assert read.text.strip() == ""
