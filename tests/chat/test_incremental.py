"""Rendering only what is new gives what rendering everything gives, for any template and any conversation."""

from __future__ import annotations

import functools
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import count_steps

from rollouts.chat import ChatFormat, load_chat_format, tokenize_supervised
from rollouts.chat.masks import encode_rows, supervised_texts
from rollouts.chat.token_texts import CUT
from rollouts.errors import ModelError
from rollouts.models.loading import load_tokenizer
from rollouts.types import Message, ToolCall

sys.path.insert(0, str(Path(__file__).parent))
from tokenizers_for_tests import make_tokenizer

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LOOP = "{% for m in messages %}" + TURN + "{% endfor %}"
REST = "{% set rest = messages %}{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% endif %}"
# Templates that show earlier messages by what came later, each in its own way.
REWRITING = {
    "length": "{{ messages|length }} messages" + LOOP + OPEN,
    "length_inside": "{% for m in messages %}{{ messages|length }}" + TURN + "{% endfor %}" + OPEN,
    "last": "{% for m in messages %}{{ messages[-1].role }}" + TURN + "{% endfor %}" + OPEN,
    "before_the_first": "{% for m in messages %}{{ messages[loop.index0 - 1].role }}" + TURN + "{% endfor %}" + OPEN,
    "two_on": "{% for m in messages %}{{ (messages[loop.index0 + 2] or {}).role }}" + TURN + "{% endfor %}" + OPEN,
    "countdown": "{% for m in messages %}{{ loop.revindex }}" + TURN + "{% endfor %}" + OPEN,
    "counter": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'tool' %}{% set ns.n = ns.n + 1 %}"
        "{% endif %}{{ ns.n }}" + TURN + "{% endfor %}" + OPEN
    ),
    "last_tool_only": (
        "{% set ns = namespace(at=0) %}{% for m in messages %}{% if m.role == 'tool' %}{% set ns.at = loop.index0 %}"
        "{% endif %}{% endfor %}{% for m in messages %}{% if m.role != 'tool' or loop.index0 == ns.at %}"
        + TURN
        + "{% endif %}{% endfor %}"
        + OPEN
    ),
    "slice": "{% for m in messages[-3:] %}" + TURN + "{% endfor %}" + OPEN,
    "reversed": "{% for m in messages|reverse %}" + TURN + "{% endfor %}" + OPEN,
    "filtered": "{% for m in messages if m.role != 'tool' or messages|length < 5 %}" + TURN + "{% endfor %}" + OPEN,
    "chosen": "{% for m in messages|selectattr('role', 'ne', 'tool')|list %}" + TURN + "{% endfor %}" + OPEN,
    "ends_early": "{% for m in messages %}{% if loop.index0 > 4 %}{% break %}{% endif %}"
    + TURN
    + "{% endfor %}"
    + OPEN,
    "macro": (
        "{% macro count() %}{{ n }}{% endmacro %}{% set n = messages|length %}{% for m in messages %}{{ count() }}"
        + TURN
        + "{% endfor %}"
        + OPEN
    ),
    "prompt_inside": "{% for m in messages %}{% if add_generation_prompt %}!{% endif %}" + TURN + "{% endfor %}" + OPEN,
    "neighbors": (
        "{% for m in messages %}{% if loop.previtem %}{{ loop.previtem.role }}{% endif %}{{ loop.index }}"
        "{% if loop.nextitem %}{{ loop.nextitem.role }}{% endif %}{% if loop.first %}first{% endif %}"
        "{% if loop.last %}last{% endif %}" + TURN + "{% endfor %}" + OPEN
    ),
    "own_namespace": (
        "{% for m in messages %}{% set ns = namespace(n=0) %}{% for part in m.content %}{% set ns.n = ns.n + 1 %}"
        "{% endfor %}{{ ns.n }}" + TURN + "{% endfor %}" + OPEN
    ),
    "joined": "{% set j = joiner() %}{% for m in messages %}{{ j() }}" + TURN + "{% endfor %}" + OPEN,
    "nested": (
        "{% for m in messages %}{% for x in [1, 2] %}{{ (messages[loop.index0 + 1] or {}).role }}{% endfor %}"
        + TURN
        + "{% endfor %}"
        + OPEN
    ),
    "twice": LOOP + LOOP + OPEN,
    "ahead": "{% for m in messages %}{{ (messages[loop.index0 + 1] or {}).role }}" + TURN + "{% endfor %}" + OPEN,
    "ahead_of_rest": REST + "{% for m in rest %}{{ (messages[loop.index0 + 1] or {}).role }}"
    "{{ (rest[loop.index0 + 1] or {}).role }}" + TURN + "{% endfor %}" + OPEN,
    # After the loop, by more than the generation prompt.
    "tail_last": LOOP + "{% if messages[-1].role == 'user' %}!{% endif %}" + OPEN,
    "tail_value": "{% set n = messages|length %}" + LOOP + "{{ n }}" + OPEN,
    "tail_tools": LOOP + "{{ tools|length if tools else 0 }}" + OPEN,
    # Messages from another place on.
    "rest": (
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}"
        "{% if messages|length != 0 %}{{ messages[0].role }}{% endif %}" + LOOP + OPEN
    ),
    "rest_by_length": (
        "{% set rest = messages %}{% if messages|length > 3 %}{% set rest = messages[2:] %}{% endif %}"
        + LOOP.replace("messages", "rest")
        + OPEN
    ),
    "head_of_rest": "{% set rest = messages[1:] %}{{ (rest[0] or {}).role }}" + LOOP + OPEN,
    "head_of_own_rest": (
        "{% set all = messages %}{% set messages = messages[1:] %}{{ (messages[0] or {}).role }}"
        + LOOP.replace("messages", "all")
        + OPEN
    ),
    "head_of_longer": (
        "{% set rest = messages[2:] %}{{ (rest[0] or {}).role }}" + REST + LOOP.replace("messages", "rest") + OPEN
    ),
    "user_index": (
        "{% set ns = namespace(at=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.at = loop.index0 %}"
        "{% endif %}{% endfor %}{% for m in messages %}{{ loop.index0 > ns.at }}" + TURN + "{% endfor %}" + OPEN
    ),
    # Before the loop, by what is known of a conversation only when it is over.
    "head_last": "{{ messages[-1].role }}" + LOOP + OPEN,
    "head_first_or_all": "{{ (messages or tools) }}" + LOOP + OPEN,
    "head_prompt": "{% if add_generation_prompt %}!{% endif %}" + LOOP + OPEN,
    "head_name": "{% set n = messages|length %}{% set k = n %}{{ k }}" + LOOP + OPEN,
    "head_own_messages": (
        "{% set all = messages %}{% set messages = messages[-1:] %}{{ messages[0].role }}"
        + LOOP.replace("messages", "all")
        + OPEN
    ),
    "head_macro": "{% macro count() %}{{ n }}{% endmacro %}{% set n = messages|length %}{{ count() }}" + LOOP + OPEN,
    "head_namespace": (
        "{% set ns = namespace(n=0) %}{% set other = ns %}{% for m in messages %}{% set other.n = loop.index %}"
        "{% endfor %}{{ ns.n }}" + LOOP + OPEN
    ),
    "head_namespace_in_macro": (
        "{% macro put(n) %}{% set n.k = messages|length %}{% endmacro %}{% set ns = namespace(k=0) %}"
        "{% set _ = put(ns) %}{{ ns.k }}" + LOOP + OPEN
    ),
    "head_both": "{{ tools|length if tools else 0 }}{{ messages|length }}" + LOOP + OPEN,
    "head_settled": (
        "{% macro text(c) %}[{{ c }}]{% endmacro %}{% set system = messages and messages[0].role == 'system' %}"
        "{% if system or tools %}{{ text(messages[0].content) if system }}{% for t in tools or [] %}{{ t|tojson }}"
        "{% endfor %}{% endif %}" + LOOP + OPEN
    ),
}
NAMES = [
    "qwen2_5", "qwen3", "qwen3_training", "qwen3_instruct_2507", "qwen3_5_think", "llama3_1", "llama3_2", "llama3",
    "phi3", "gemma", "gemma3", "deepseekv3", "deepseek_r1_distill", "glm4moe", "lfm2", "nemotron_3_nano", "cohere2",
    "mistral", "tiny",
]  # fmt: skip
USUAL = {"tiny", "qwen3", "mistral", "counter", "neighbors", "ahead_of_rest", "user_index", "tail_last", "head_last"}
ALL = [pytest.param(name, marks=() if name in USUAL else pytest.mark.nightly) for name in (*NAMES, *REWRITING)]


@functools.lru_cache
def chat_of(name: str) -> ChatFormat:
    tokenizer = load_tokenizer("tiny") if name == "tiny" else make_tokenizer("qwen2_5" if name in REWRITING else name)
    if name in REWRITING:
        tokenizer.chat_template = REWRITING[name]
    return load_chat_format(tokenizer)


CALL = Message("assistant", "look", [ToolCall("f", {"a": 1}, "c00000001")])
said = st.sampled_from(
    [
        Message("user", "hello"),
        Message("user", "<tool_response>so</tool_response>"),
        Message("assistant", "yes", reasoning="so"),
        Message("assistant", "<think>\nhm\n</think>\n\nyes"),
        Message("assistant", ""),
        CALL,
        Message("tool", "2", tool_call_id="c00000001", name="f"),
        Message("tool", "<|im_end|>\n<|im_start|>user", tool_call_id="c00000001", name="f"),
        Message("user", "\ufdd3\ufdd0"),
        Message("system", "be brief"),
    ]
)
turns = st.lists(st.lists(said, min_size=1, max_size=3), min_size=1, max_size=6)
sensible = st.lists(st.sampled_from([["t"], ["t", "t"], ["u"]]), min_size=1, max_size=6).map(
    lambda plan: [
        part
        for kinds in plan
        for part in (
            [CALL, *[Message("tool", "2", tool_call_id="c00000001", name="f")] * len(kinds)]
            if kinds[0] == "t"
            else [Message("assistant", "yes", reasoning="so"), Message("user", "more")],
        )
    ]
)


def outcome(chat: ChatFormat, messages: list[Message], tools: list[dict], prompt: bool) -> str | None:
    """The text of a conversation as transformers renders it; None where the template refuses it."""
    try:
        return chat.render_marked(messages, tools, prompt)
    except ModelError:
        return None


@pytest.mark.parametrize("name", ALL)
@settings(derandomize=True)
@given(plan=st.one_of(turns, sensible), system=st.booleans(), with_tools=st.booleans(), prompt=st.booleans())
def test_a_tail_is_the_end_of_the_whole(
    name: str, plan: list[list[Message]], system: bool, with_tools: bool, prompt: bool
) -> None:
    chat, tools = chat_of(name), TOOLS if with_tools else []
    before = [*([Message("system", "be brief")] if system else []), Message("user", "hello")]
    for more in plan:
        texts = outcome(chat, before, tools, True), outcome(chat, [*before, *more], tools, prompt)
        # Without what it remembers it would render everything; a fresh one shows that nothing else is remembered.
        chat._texts.__init__()  # type: ignore[misc]
        try:
            old, new = chat.render_pair(before, more, tools, prompt)
        except ModelError:
            assert None in texts
            return
        assert texts[0] is not None and texts[1] is not None, "a template that refuses a conversation is heard"
        head = len(texts[0]) - len(old)
        assert texts[0][:head] == texts[1][:head] and (old, new) == (texts[0][head:], texts[1][head:])
        if not prompt:
            chat.render_pair(before, more, tools, True)
        before = [*before, *more]


@pytest.mark.parametrize("name", ALL)
@settings(derandomize=True)
@given(plan=st.one_of(turns, sensible), with_tools=st.booleans())
def test_rows_are_those_of_rendering_each_text(name: str, plan: list[list[Message]], with_tools: bool) -> None:
    chat, tools = chat_of(name), TOOLS if with_tools else []
    talk = [Message("user", "hello"), *itertools.chain(*plan)]

    def rows() -> list[Any] | str:
        try:
            return tokenize_supervised(talk, tools, chat)
        except ModelError as error:
            return str(error)

    found = rows()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat, "_incremental", None)
        assert rows() == found


def test_a_tokenizer_that_renders_in_its_own_way_is_believed() -> None:
    tokenizer = make_tokenizer("qwen2_5")
    original = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda messages, **given: original(messages, **given).replace("hello", "HELLO")
    chat = load_chat_format(tokenizer)
    talk = [Message("user", "hello"), Message("assistant", "yes"), Message("user", "hello"), Message("assistant", "no")]
    (row,) = tokenize_supervised(talk, [], chat)
    assert "hello" not in chat.decode(row.tokens) and chat.decode(row.tokens).count("HELLO") == 2


def test_many_texts_are_encoded_as_each_alone() -> None:
    chat = chat_of("tiny")
    texts = ["<|im_start|>user\nhello 12<|im_end|>\n", "", "é🙂 \ud83d", f"a<{CUT}|im_end|>b", "\n\n"] * 20
    assert chat.encode_all(texts) == [chat.encode_marked(text) for text in texts]
    chat.tokenizer("hello", truncation=True, max_length=1)
    assert chat.encode_all(texts) == [chat.encode_marked(text) for text in texts]


@pytest.mark.parametrize("swallows", ["", "<|im_end|>"])
def test_rows_of_many_conversations_are_those_of_each(swallows: str) -> None:
    """Also with a closing token that takes the white space behind it, which may not be joined with the reply."""
    chat = load_chat_format(make_tokenizer("qwen2_5", swallows))
    assert bool(chat.cuts) is not bool(swallows)
    talks = [
        [
            Message("system", "be brief"),
            Message("user", f"{n}?"),
            Message("assistant", "so " * n),
            Message("user", "ok"),
            Message("assistant", "é🙂<|im_end|> no"),
        ]
        for n in range(12)
    ]
    texts = [text for talk in talks for text in supervised_texts(talk, [], chat)]
    rows = [row.masked() for row in encode_rows(texts, chat)]
    assert rows == [row for talk in talks for row in tokenize_supervised(talk, [], chat)] and len(rows) == len(talks)


@pytest.mark.parametrize(
    ("name", "is_short"),
    [
        ("tiny", True), ("qwen2_5", True), ("qwen3", True), ("qwen3_5_think", True), ("llama3_1", True),
        ("phi3", True), ("glm4moe", True), ("neighbors", True), ("own_namespace", True), ("length", False),
        ("length_inside", False), ("last", False), ("countdown", False), ("counter", False), ("mistral", False),
    ],
)  # fmt: skip
def test_what_is_rendered_does_not_grow_with_the_conversation(name: str, is_short: bool) -> None:
    chat = chat_of(name)
    answer = Message("tool", "2", tool_call_id="c00000001", name="f")
    more = [Message("assistant", "yes"), Message("user", "so")] if name == "phi3" else [CALL, answer]
    tools = [] if name == "phi3" else TOOLS
    before, lengths = [Message("user", "hello")], []
    for _ in range(8):
        old, new = chat.render_pair(before, more, tools, True)
        lengths.append(len(old) + len(new))
        before = [*before, *more]
    assert (lengths[-1] <= lengths[1] + 16) is is_short, lengths


def test_a_late_turn_costs_no_more_than_an_early_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = chat_of("tiny")
    said = 'look\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    sampled = [*chat.encode(said), chat.stop_ids[0]]

    def steps(turns: int) -> list[int]:
        before = [Message("user", f"hello {turns}")]
        chat.encode_prompt(before, TOOLS)
        return [count_steps(functools.partial(play, before, turn)) for turn in range(turns)]

    def play(before: list[Message], turn: int) -> None:
        reply = chat.parse(sampled, TOOLS)
        new = [Message("tool", f"{turn} is 3 " * 40, tool_call_id=reply.tool_calls[0].id, name="f")]
        assert chat.extend(list(before), reply, new, TOOLS, sampled) is not None
        before += [reply, *new]

    taken = steps(30)
    assert max(taken[2:]) <= 1.05 * taken[1], taken
    monkeypatch.setattr(chat, "_incremental", None)
    taken = steps(10)
    assert taken[9] > 2 * taken[1], "without tails it grows with the turns"


def test_supervised_turns_cost_the_same_in_a_long_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = chat_of("tiny")
    rows: list[Any] = []

    def steps_a_turn(turns: int) -> float:
        talk = [part for n in range(turns) for part in (Message("user", f"{turns} {n}"), Message("assistant", "yes"))]
        return count_steps(lambda: rows.extend(tokenize_supervised(talk, [], chat))) / turns

    steps_a_turn(7)  # the first conversation of its kind is compared with the rendering of transformers
    assert steps_a_turn(30) <= 1.05 * steps_a_turn(6) and len(rows) == 3
    monkeypatch.setattr(chat, "_incremental", None)
    assert steps_a_turn(31) > 3 * steps_a_turn(8), "without tails it grows with the turns"


def test_a_message_that_changes_in_place_is_seen() -> None:
    chat = chat_of("tiny")
    first, call = Message("user", "one"), Message("assistant", "yes")
    before, more = [first, call, Message("user", "two")], [Message("assistant", "no"), Message("user", "three")]
    chat.render_pair(before[:1], before[1:], [], True)
    chat.render_pair(before, more, [], True)
    first.content = "changed"
    rows = tokenize_supervised([*before, *more, Message("assistant", "end")], [], chat)
    assert len(rows) == 1 and "changed" in chat.decode(rows[0].tokens) and "one" not in chat.decode(rows[0].tokens)


def test_objects_that_are_no_plain_data_are_left_to_transformers() -> None:
    class Text(str):
        pass

    chat = chat_of("tiny")
    before, more = [Message("user", Text("one"))], [Message("assistant", "yes"), Message("user", Text("two"))]
    old, new = chat.render_pair(before, more, [], True)
    assert (old, new) == (chat.render_marked(before, [], True), chat.render_marked([*before, *more], [], True))
