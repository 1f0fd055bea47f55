"""ChatFormat goes around some of transformers' preparations: what comes out is the same, whatever others do."""

from __future__ import annotations

import random

import pytest

from rollouts.chat.format import _compiled, load_chat_format
from rollouts.chat.tool_call_formats import TOOL_CALL_FORMATS, parse_reply
from rollouts.training.models import load_tokenizer

PIECES = [
    "<|im_start|>",
    "<|im_end|>",
    "\n",
    " ",
    "  ",
    "user",
    "What is 12 * 34?",
    "<tool_call>",
    "\t",
    "é",
    "漢字",
    "\u200b",
]


def test_ids_are_those_of_the_tokenizer():
    tokenizer = load_tokenizer("tiny")
    chat = load_chat_format(tokenizer)
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choices(PIECES, k=rng.randrange(12)))
        assert chat.encode(text) == tokenizer.encode(text, add_special_tokens=False)


def test_what_others_do_with_the_tokenizer_changes_nothing():
    tokenizer = load_tokenizer("tiny")
    chat = load_chat_format(tokenizer)
    text = "<|im_start|>user\nWhat is 12 * 34?<|im_end|>\n"
    expected = chat.encode(text)
    tokenizer([text], truncation=True, max_length=3)
    assert chat.encode(text) == expected
    tokenizer([text], padding="max_length", max_length=100)
    assert chat.encode(text) == expected
    tokenizer([text], split_special_tokens=True)
    assert chat.encode(text) == expected


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}
SAID = [
    "<tool_call>", "</tool_call>", "\n", '{"name": "f", "arguments": {"a": 1}}', '{"bad":', "text ", "<think>",
    "</think>", "[TOOL_CALLS]", '[{"name": "f", "arguments": {}}]', "<|python_tag|>",
    '{"name": "f", "parameters": {"b": "x"}}', ";", "<function=f>", "<parameter=a>\n3\n</parameter>", "</function>",
]  # fmt: skip


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_a_compiled_response_template_reads_alike(name):
    tokenizer, family, rng = load_tokenizer("tiny"), TOOL_CALL_FORMATS[name], random.Random(1)
    compiled = _compiled(tokenizer, family.response_template, family.example)
    assert compiled is not family.response_template, "this version of transformers is known to compile it"
    for _ in range(150):
        text, tools = "".join(rng.choices(SAID, k=rng.randrange(9))), rng.choice([[], [TOOL]])
        given = {"parse_response": tokenizer.parse_response, "thinking_prefix": rng.choice(["", "<think>\n"])}
        read = parse_reply(text, family._replace(response_template=compiled), tools, **given)
        assert read == parse_reply(text, family, tools, **given), text


def test_a_template_that_cannot_be_compiled_stays_as_it_is():
    tokenizer = load_tokenizer("tiny")
    for template in (None, {"fields": 3}, "text"):
        assert _compiled(tokenizer, template, "x") is template
