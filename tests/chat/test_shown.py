"""Masks of conversations are shown to be right, and a wrong one is caught."""

from __future__ import annotations

import contextlib
import itertools
import sys
from pathlib import Path

import pytest
from tokenizers import normalizers

from rollouts.chat import ChatFormat, load_chat_format, tokenize_supervised
from rollouts.chat.masks import TurnsRow, check_masks, encode_rows, supervised_texts, trained_turns
from rollouts.chat.shown import Unshown, check_extension
from rollouts.errors import ModelError
from rollouts.models.loading import load_tokenizer
from rollouts.types import Message, ToolCall

sys.path.insert(0, str(Path(__file__).parent))
from tokenizers_for_tests import by_bytes, chat_for, make_tokenizer

PARAMETERS = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Find a word.", "parameters": PARAMETERS}}
TALK = [
    Message("system", "Be brief."),
    Message("user", "Name a river."),
    Message("assistant", "The Rhine."),
    Message("user", "Another?"),
    Message("assistant", "The Po."),
]
CALLED = [
    Message("user", "What is a fjord?"),
    Message("assistant", "", [ToolCall("look_up", {"word": "fjord"}, "abcdefg01")]),
    Message("tool", "a long inlet", tool_call_id="abcdefg01"),
    Message("assistant", "A long inlet."),
]
THOUGHT = [Message("user", "2 + 2?"), Message("assistant", "4", reasoning="Two and two.")]
CHATML = "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endfor -%}"
OPEN = "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>\n' -}}{%- endif -%}"
SWITCH = (
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>\n' "
    "+ ('\n</think>\n\n' if enable_thinking is defined and not enable_thinking else '') -}}{%- endif -%}"
)
# As Mistral-Nemo: the system text is in the last user message, if that is the last of all.
SYSTEM_MOVES = """
{%- set rule = messages[0].content if messages[0].role == 'system' else '' -%}
{%- for m in messages if m.role != 'system' -%}
{%- if m.role == 'user' -%}
{{- '<|im_start|>' + (rule + '\n\n' if rule and loop.last else '') + m.content + '<|endoftext|>' -}}
{%- else -%}{{- m.content + '<|im_end|>' -}}{%- endif -%}
{%- endfor -%}"""
# As Hermes: a tool message has one line break more if another message follows.
TOOL_TURN_CHANGES = """
{%- for t in tools or [] -%}{{- t | tojson + '\n' -}}{%- endfor -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' + m.content -}}
{%- if m.tool_calls -%}{{- '<tool_call>\n{"name": "' + m.tool_calls[0].function.name + '", "arguments": '
+ (m.tool_calls[0].function.arguments | tojson) + '}\n</tool_call>' -}}{%- endif -%}
{{- ('\n' if m.role == 'tool' and not loop.last else '') + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""
# As GLM: a turn ends with the token of the next role.
NEXT_ROLE = """
{%- for m in messages -%}
{{- ('<|im_start|>' if m.role == 'user' else '<|endoftext|>') + '\n' + m.content -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|endoftext|>\n' -}}{%- endif -%}"""


def chat_with(template: str, **arguments: object):
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = template
    return load_chat_format(tokenizer, arguments)


def parts(chat, row) -> list[str]:
    """The text of a row, split where training begins or ends. The first part is context."""
    groups = itertools.groupby(zip(row.tokens, row.loss_mask, strict=True), key=lambda pair: pair[1])
    return [chat.decode([token for token, _ in group]) for _, group in groups]


def asked(text: str, opened: str = "") -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n{opened}"


@pytest.mark.parametrize(
    ("template", "messages", "tools", "expected"),
    [
        (
            SYSTEM_MOVES,
            TALK,
            [],
            [
                ["<|im_start|>Be brief.\n\nName a river.<|endoftext|>", "The Rhine.<|im_end|>"],
                [
                    "<|im_start|>Name a river.<|endoftext|>The Rhine.<|im_end|><|im_start|>Be brief.\n\nAnother?"
                    "<|endoftext|>",
                    "The Po.<|im_end|>",
                ],
            ],
        ),
        (
            NEXT_ROLE,
            TALK[1:],
            [],
            [
                [
                    "<|im_start|>\nName a river.<|endoftext|>\n",
                    "The Rhine.<|im_start|>",
                    "\nAnother?<|endoftext|>\n",
                    "The Po.<|im_start|>",
                ]
            ],
        ),
        # The prompt asks for a thought, and the template drops all thoughts.
        (CHATML + OPEN, THOUGHT, [], [[asked("2 + 2?", "<think>\n"), "Two and two.\n</think>\n\n4<|im_end|>"]]),
        # A reply without a thought: the template's own mode without thoughts closes it, or the prompt ends before it.
        (CHATML + SWITCH, TALK[1:3], [], [[asked("Name a river.", "<think>\n"), "\n</think>\n\nThe Rhine.<|im_end|>"]]),
        (CHATML + OPEN, TALK[1:3], [], [[asked("Name a river."), "The Rhine.<|im_end|>"]]),
    ],
    ids=["system-moves", "next-role", "thought-dropped", "thought-closed", "thought-cut"],
)
def test_what_is_trained_and_in_which_context(template, messages, tools, expected) -> None:
    chat = chat_with(template)
    assert [parts(chat, row) for row in tokenize_supervised(messages, tools, chat)] == expected


def test_the_answer_after_a_changed_tool_turn_is_trained() -> None:
    chat = chat_with(TOOL_TURN_CHANGES)
    (row,) = tokenize_supervised(CALLED, [TOOL], chat)
    trained = parts(chat, row)[1::2]
    assert trained == [
        '<tool_call>\n{"name": "look_up", "arguments": {"word": "fjord"}}\n</tool_call><|im_end|>',
        "A long inlet.<|im_end|>",
    ]
    assert parts(chat, row)[2].endswith("a long inlet<|im_end|>\n<|im_start|>assistant\n")


def test_one_reply_has_one_form_whether_a_turn_follows_or_not() -> None:
    """Qwen3 writes an empty thought before the last reply, and leaves it out of the history."""
    chat = chat_for("qwen3")
    (alone,) = tokenize_supervised(TALK[:3], [], chat)
    first, second = tokenize_supervised(TALK, [], chat)
    assert first == alone and "<think>" in parts(chat, alone)[1]
    assert parts(chat, second)[1].endswith("</think>\n\nThe Po.<|im_end|>") and "The Rhine." in parts(chat, second)[0]


def test_a_turn_of_weight_0_is_context() -> None:
    chat = chat_for("qwen2_5")
    (row,) = tokenize_supervised(TALK, [], chat, [1, 1, 0, 1, 2])
    context, trained = parts(chat, row)
    assert "The Rhine." in context and trained == "The Po.<|im_end|>" and max(row.loss_mask) == 2


def checked(chat, messages, tools, change) -> None:
    """Check the masks of a conversation after `change` has changed its rows."""
    trained = trained_turns(messages)
    texts = supervised_texts(messages, tools, chat, trained)
    rows = encode_rows(texts, chat)
    check_masks(messages, tools, chat, trained, texts, change(rows))


def moved(start: int, end: int):
    def change(rows: list[TurnsRow]) -> list[TurnsRow]:
        (a, b, place), *others = rows[0].turns
        return [rows[0]._replace(turns=[(a + start, b + end, place), *others]), *rows[1:]]

    return change


def stop_inside(rows: list[TurnsRow]) -> list[TurnsRow]:
    (a, b, place), *_ = rows[0].turns
    tokens = [*rows[0].tokens[: b - 1], rows[0].tokens[b - 1], *rows[0].tokens[b - 1 : b]]
    return [TurnsRow(tokens, [(a, b + 1, place)]), *rows[1:]]


def first_only(rows: list[TurnsRow]) -> list[TurnsRow]:
    return [rows[0]._replace(turns=rows[0].turns[:1])]


@pytest.mark.parametrize(
    "change",
    [
        moved(-3, 0),
        moved(1, 0),
        moved(0, -1),
        moved(0, 2),
        stop_inside,
        lambda rows: rows[1:],
        lambda rows: [*rows, rows[0]],
        lambda rows: [rows[0]._replace(tokens=[5, *rows[0].tokens[1:]]), *rows[1:]],
        lambda rows: [rows[0]._replace(turns=[(a, b, 4) for a, b, _ in rows[0].turns]), *rows[1:]],
    ],
    ids=["begins early", "begins late", "no end", "ends late", "two ends", "left out", "twice", "context", "message"],
)
@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "mistral"])
def test_a_wrong_mask_is_caught(name: str, change) -> None:
    """The negative control: what is right passes, and each change of it does not. Each chat checks its first row."""
    messages = TALK if name != "mistral" else TALK[1:]
    messages = [each for each in messages if each.role != "system"]
    chat = load_chat_format(chat_for(name).tokenizer)
    with pytest.raises(Unshown):
        checked(chat, messages, [], change)
    checked(chat, messages, [], lambda rows: rows)


def test_a_changed_row_of_a_known_shape_is_caught_too() -> None:
    chat = load_chat_format(chat_for("qwen2_5").tokenizer)
    checked(chat, TALK, [], lambda rows: rows)
    for change in (moved(1, 0), moved(-3, 0), moved(0, -1), stop_inside, first_only):
        with pytest.raises(Unshown):
            checked(chat, TALK, [], change)


def test_a_reply_that_is_read_as_another_message_is_refused() -> None:
    """The text of a call in a reply without calls cannot be told from a call."""
    said = '<tool_call>\n{"name": "look_up", "arguments": {"word": "x"}}\n</tool_call>'
    with pytest.raises(ModelError, match="message 2 cannot be trained: its reply is read as look_up"):
        tokenize_supervised([Message("user", "x"), Message("assistant", said)], [TOOL], chat_for("qwen2_5"))


@pytest.mark.parametrize(("said", "meant", "is_same"), [(1.0, 1, True), (0.5, -0.5, False), (1e-05, 1e5, False)])
def test_numbers_in_a_call_are_compared_by_value(said: float, meant: float, is_same: bool) -> None:
    chat = load_chat_format(load_tokenizer("tiny"))
    talk, other = (
        [Message("user", "x"), Message("assistant", "", [ToolCall("f", {"n": number}, "abcdefg01")])]
        for number in (said, meant)
    )
    texts = supervised_texts(talk, [], chat)
    with contextlib.nullcontext() if is_same else pytest.raises(Unshown, match="its reply is read as f"):
        check_masks(other, [], chat, [1], texts, encode_rows(texts, chat))


@pytest.mark.parametrize("thought", ["Two and two.", ""])
@pytest.mark.parametrize("after", [[], [Message("user", "3 + 3?"), Message("assistant", "6")]])
def test_a_thought_in_the_text_is_trained_as_in_its_field(thought: str, after: list[Message]) -> None:
    """Qwen 3.8 shows the text of a message as it is; the templates before it take the thought out."""
    text = Message("assistant", f"<think>\n{thought}\n</think>\n\n4")
    field = Message("assistant", "4", reasoning=thought or None)
    for name in ("qwen3_8", "qwen3_6"):
        chat = chat_for(name)
        rows = [tokenize_supervised([Message("user", "2 + 2?"), each, *after], [], chat) for each in (text, field)]
        assert rows[0] == rows[1]
    assert chat_for("qwen3_6").thoughts.is_split and not chat_for("qwen3_8").thoughts.is_split


@pytest.mark.parametrize("said", ["<think>a</think>b<think>c</think>d", "<think><think>a</think>b", "<think>a"])
def test_a_text_whose_thought_is_not_certain_is_refused(said: str) -> None:
    with pytest.raises(ModelError, match="message 2 cannot be trained"):
        tokenize_supervised([Message("user", "x"), Message("assistant", said)], [], chat_for("qwen3_8"))


def called_with(value, *schemas):
    """Supervised rows of one call for each schema of its argument, with one format: its shapes become known."""
    chat = load_chat_format(make_tokenizer("qwen3_5_think"))
    for schema in schemas:
        function = {"name": "f", "description": "F.", "parameters": {"type": "object", "properties": {"n": schema}}}
        call = Message("assistant", "", [ToolCall("f", {"n": value}, "abcdefg01")])
        tools = [{"type": "function", "function": function}] if schema is not None else []
        tokenize_supervised([Message("user", "x"), call], tools, chat)


@pytest.mark.parametrize("kind", ["integer", "number", "boolean", "string"])
def test_null_in_a_call_is_trained_where_the_schema_allows_it(kind: str) -> None:
    allowed = {"type": [kind, "null"]}
    called_with(None, allowed, {"anyOf": [{"type": kind}, {"type": "null"}]}, {}, None)
    with pytest.raises(ModelError, match=r"read as f.*None.*but the message has f.*null"):
        called_with(None, allowed, {"type": kind})
    with pytest.raises(ModelError, match=r"read as f.*None.*but the message has f.*null"):
        called_with(None, {"type": kind})


def test_true_in_a_call_is_trained_where_the_schema_allows_it() -> None:
    called_with(True, {"type": "boolean"}, {}, None)
    with pytest.raises(ModelError, match=r"read as f.*True.*but the message has f.*true"):
        called_with(True, {"type": "boolean"}, {"type": "integer"})


def test_fields_in_no_row_are_named_and_counted() -> None:
    template = CHATML.replace("m.content +", "(m.content if m.role != 'system' else '') +")
    prompt = "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
    chat = chat_with(template + prompt)

    def lost(messages: list[Message]) -> list[str]:
        trained = trained_turns(messages)
        texts = supervised_texts(messages, [], chat, trained)
        return check_masks(messages, [], chat, trained, texts, encode_rows(texts, chat))

    assert lost(TALK) == lost(TALK) == ["a system message"] and lost(TALK[1:]) == []
    cut = chat_with(CHATML + OPEN)
    texts = supervised_texts(TALK[1:3], [], cut, [1])
    found = check_masks(TALK[1:3], [], cut, [1], texts, encode_rows(texts, cut))
    assert found == ["the opening tag of a thought in the prompt"]


def test_a_sampled_turn_has_its_prompt_before_it() -> None:
    chat = chat_for("qwen2_5")
    reply = [*chat.encode("The  Rhine."), chat.stop_ids[0]]  # other tokens than the template would give
    rest = chat.extend(TALK[:2], chat.parse(reply, []), TALK[3:4], [], reply)
    assert rest is not None
    more = [Message("assistant", "The  Rhine."), TALK[3]]
    check_extension(TALK[:2], more, [], reply, rest, chat)
    for said, tokens in ((reply, rest[:-1]), (reply[:-1], rest), (reply, [*rest, *rest]), (reply[2:], rest)):
        with pytest.raises(Unshown):
            check_extension(TALK[:2], more, [], said, tokens, chat)
    with pytest.raises(Unshown, match="as another message"):
        check_extension(TALK[:2], [Message("assistant", "The Po."), TALK[3]], [], reply, rest, chat)


def composing_chat() -> ChatFormat:
    """A tokenizer that composes characters, as the published one of Qwen does."""
    tokenizer = make_tokenizer("qwen2_5")
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return load_chat_format(tokenizer)


def test_a_tokenizer_that_normalizes_its_text_refuses_no_row_and_no_turn() -> None:
    chat, said = composing_chat(), "cafe\u0301"
    talk = [Message("user", "q"), Message("assistant", said), Message("user", said)]
    (row,) = tokenize_supervised([*talk, Message("assistant", said)], [], chat)
    assert parts(chat, row)[1] == "caf\u00e9<|im_end|>"
    reply = [*by_bytes(chat.tokenizer, said), chat.stop_ids[0]]
    rest = chat.extend(talk[:1], chat.parse(reply, []), talk[2:], [], reply)
    assert rest is not None and chat.decode(reply).startswith(said)
    check_extension(talk[:1], talk[1:], [], reply, rest, chat)


@pytest.mark.parametrize("first", ["hmm", ""])
def test_a_row_of_known_shapes_is_read_back_too(first: str) -> None:
    chat = load_chat_format(make_tokenizer("qwen3"))
    tokenize_supervised([Message("user", "q"), Message("assistant", "yes", reasoning=first or "so")], [], chat)
    thought = "I see </think> here"
    with pytest.raises(ModelError, match="its thought is read as 'I see'"):
        tokenize_supervised([Message("user", "q"), Message("assistant", "yes", reasoning=thought)], [], chat)
    said = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    tokenize_supervised([Message("user", "q"), Message("assistant", "a text")], [TOOL], chat)
    with pytest.raises(ModelError, match="is read as f"):
        tokenize_supervised([Message("user", "q"), Message("assistant", said)], [TOOL], chat)


def test_what_is_lost_is_counted_for_each_conversation() -> None:
    """Llama 3.1 shows no thought before a call."""
    chat = load_chat_format(make_tokenizer("llama3_1"))

    def lost(calls: int) -> int:
        call = [
            Message("assistant", "", CALLED[1].tool_calls, reasoning="so"),
            Message("tool", "1", tool_call_id="abcdefg01"),
        ]
        talk = [CALLED[0], *call * calls, CALLED[3]]
        trained = trained_turns(talk)
        texts = supervised_texts(talk, [TOOL], chat, trained)
        return check_masks(talk, [TOOL], chat, trained, texts, encode_rows(texts, chat)).count("the thought")

    assert [lost(count) for count in (4, 16, 4)] == [4, 16, 4]


def test_odd_tools_are_no_crash() -> None:
    for tool in ({"function": None}, {"function": "f"}, {"function": {"name": ["f"]}}):
        with contextlib.suppress(ModelError):
            tokenize_supervised([*TALK[1:3]], [{"type": "function", **tool}], chat_for("qwen2_5"))
