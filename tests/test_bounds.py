"""What others write is bounded where it is read: calls of a model, rows, messages, tools' results and checkpoints."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
import trio
from agent_fakes import FakeEngine, Quiz, play

from rollouts import tool
from rollouts.bounds import ROW_CHARACTERS_MAX, excess
from rollouts.chat.format import ChatFormat, load_chat_format
from rollouts.chat.token_texts import densities, least_tokens
from rollouts.chat.tool_call_formats import TOOL_CALL_FORMATS, parse_reply
from rollouts.chat.tool_parsers import ChosenParser
from rollouts.data.conversations import BadRowError, read_conversation
from rollouts.data.loaders import NotARow
from rollouts.data.source import open_rows
from rollouts.env.checks import check_text
from rollouts.env.prompts import Prompts
from rollouts.errors import ConfigError, EnvironmentDefinitionError
from rollouts.gateway.anthropic_messages import MESSAGES
from rollouts.gateway.chat_completions import CHAT_COMPLETIONS
from rollouts.gateway.responses import Responses
from rollouts.inference.base import Generation, VersionSpan
from rollouts.inference.suspend import EMPTY, SuspendableEngine, SuspendedEpisode
from rollouts.models.loading import load_tokenizer
from rollouts.types import Message, Segment, Status, Task, ToolCall, Trajectory

LEVELS = (65, 500, 900, 5000)
TOOL = {"type": "function", "function": {"name": "double", "parameters": {"type": "object", "properties": {"n": {}}}}}


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def text_of_call(levels: int) -> str:
    return '{"name": "double", "arguments": {"n": ' + "[" * levels + "1" + "]" * levels + "}}"


class Script(FakeEngine):
    """Says what the script says, in the ids of the tiny model."""

    def __init__(self, chat: ChatFormat, *script: str) -> None:
        super().__init__(*script, context=20_000)
        self.chat = chat

    async def generate(self, request: Any) -> Generation:
        await trio.lowlevel.checkpoint()
        text = self.script.pop(0) if self.script else "42"
        ids = [*self.chat.encode_marked(text), self.chat.stop_ids[0]]
        self.turns.append((request, EMPTY))
        return Generation(ids, [-1.0] * len(ids), "stop", [VersionSpan(0, 0, len(ids))])


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return load_chat_format(load_tokenizer("tiny"))


# --- depth ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", LEVELS)
def test_a_call_nested_too_deep_is_an_error_for_the_model_and_the_episode_goes_on(
    chat: ChatFormat, levels: int
) -> None:
    engine = Script(chat, f"<tool_call>\n{text_of_call(levels)}\n</tool_call>")
    episode = play(Quiz, engine, chat, max_tokens=100_000)
    _, call, answer, last = episode.trajectory.messages
    assert answer.text.startswith("Error: The tool call could not be read")
    assert "nest" in answer.text or "recursion" in answer.text
    assert (call.tool_calls[0].arguments, last.text, episode.status) == ({}, "42", Status.COMPLETED)
    assert episode.metrics["tool_failure/malformed"] == 1


def test_sixty_levels_are_a_call(chat: ChatFormat) -> None:
    engine = Script(chat, f"<tool_call>\n{text_of_call(60)}\n</tool_call>")
    episode = play(Quiz, engine, chat, max_tokens=100_000)
    assert episode.trajectory.messages[1].tool_calls[0].arguments == {"n": nested(60)}
    assert "must be integer" in episode.trajectory.messages[2].text


@pytest.mark.parametrize("name", sorted(TOOL_CALL_FORMATS))
def test_every_format_bounds_its_calls(name: str) -> None:
    body = text_of_call(500)
    text = {"mistral": f"[TOOL_CALLS][{body}]", "hermes": f"<tool_call>{body}</tool_call>"}.get(name, body)
    if name == "xml":
        value = "[" * 500 + "]" * 500
        text = f"<tool_call><function=double><parameter=n>{value}</parameter></function></tool_call>"
    for call in parse_reply(text, TOOL_CALL_FORMATS[name], [TOOL]).message.tool_calls:
        assert call.error is not None or call.arguments == {"n": "[" * 500 + "]" * 500}


DEEP = "nested more than 64 levels deep"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([[] for _ in range(100)], ""),
        ([{"a": 1} for _ in range(100)], ""),
        (['[{"\\' * 100, {'"[[': "]"}] * 100, ""),
        ([nested(63), {"a": nested(62)}] * 10, ""),
        ([*([[]] * 100), nested(64)], DEEP),
        ([{"a": {"]": nested(63)}}, *([{}] * 100)], DEEP),
        ([2**70, nested(64)], DEEP),
    ],
)
def test_levels_are_counted_of_wide_data_too(value: Any, problem: str) -> None:
    assert excess(value) == problem


def test_a_call_of_a_tool_parser_is_bounded() -> None:
    def parser(text: str, tools: list[Any]) -> tuple[list[Any], str]:
        call = {"n": nested(500)}
        return [ToolCall("double", call), {"name": "double", "arguments": call}], text

    calls, _ = ChosenParser("parser", parser, {}).calls("x", [TOOL])
    assert [bool(call.error) for call in calls] == [True, True]


def test_a_message_of_an_author_with_a_deep_call_is_refused_by_name() -> None:
    messages = [Message("user", "x"), Message("assistant", "", [ToolCall("f", {"n": nested(500)})])]
    with pytest.raises(EnvironmentDefinitionError, match="a demonstration: message 2 has tool calls that are nested"):
        check_text(messages, "a demonstration")


def test_a_checkpoint_with_a_call_nested_too_deep_is_resumed(chat: ChatFormat) -> None:
    class Kept(Quiz):
        def state(self) -> Any:
            return 0

        def restore(self, state: Any) -> None:
            pass

    call = ToolCall("double", {"n": nested(700)}, "c1")
    messages = [Message("user", "x"), Message("assistant", "", [call])]
    asked = [*messages, Message("tool", "Error", tool_call_id="c1")]
    ids = [5, 6, chat.stop_ids[0]]
    trajectory = Trajectory(Task(""), messages, [Segment(ids, [1.0] * 3, [-1.0] * 3, [0] * 3)], tools=[TOOL])
    state = {
        "conversations": [{"trajectory": msgspec.to_builtins(trajectory), "sampled": ids, "turns": 1}],
        "current": 0,
        "asked": msgspec.to_builtins(asked),
        "sampled_count": 3,
        "turns": 1,
    }
    held = SuspendedEpisode(0, state, 0, 0, EMPTY)
    engine = SuspendableEngine(Script(chat), None, (3, 1), "s", held)
    episode = play(Kept, engine, chat, max_tokens=100_000)  # type: ignore[arg-type]
    assert episode.status is Status.COMPLETED and episode.trajectory.last_text == "42"


# --- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "x", "info": nested(500)}, "nested more than 64 levels deep"),
        ({"prompt": "\n" * (ROW_CHARACTERS_MAX + 1)}, f"longer than {ROW_CHARACTERS_MAX} characters"),
        ({"prompt": "x", "info": ["\ud800"]}, "not valid Unicode: it has half of a surrogate pair"),
    ],
)
def test_a_row_beyond_the_bounds_is_a_bad_row(tmp_path: Any, row: Any, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "good"}) + "\n" + json.dumps(row) + "\n")
    good, bad = open_rows(str(path))
    assert good.value == {"prompt": "good"} and isinstance(bad.value, NotARow) and words in bad.value.why
    with pytest.raises(ConfigError, match=f"rows.jsonl, line 2: the row is {words}"):
        Prompts(str(path)).tasks("train", None)  # type: ignore[arg-type]


@pytest.mark.parametrize("levels", LEVELS)
def test_a_row_with_the_text_of_a_deep_call_is_a_bad_row(levels: int) -> None:
    call = {"function": {"name": "f", "arguments": '{"n": ' + "[" * levels + "]" * levels + "}"}}
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    with pytest.raises(BadRowError, match=r"the arguments of f: .*(nested|recursion)"):
        read_conversation({"messages": turns})


@pytest.mark.parametrize(
    "reply",
    [
        Message("assistant", "", [ToolCall("f", {"n": nested(500)})]),
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"n": nested(500)}}]},
    ],
)
def test_a_demonstration_with_a_deep_call_is_a_bad_row(reply: Any) -> None:
    with pytest.raises(BadRowError, match=r"message 2: .* nested more than 64 levels deep"):
        read_conversation({"messages": [{"role": "user", "content": "x"}, reply]})


# --- size -----------------------------------------------------------------------------------------------------------


def test_a_tools_result_of_eight_megabytes_of_newlines_is_cut(chat: ChatFormat) -> None:
    class Endless(Quiz):
        @tool
        def double(self, n: int) -> str:
            """Double a number."""
            return "\n" * 8_000_000

    engine = Script(chat, '<tool_call>\n{"name": "double", "arguments": {"n": 1}}\n</tool_call>')
    episode = play(Endless, engine, chat, max_tokens=100_000)
    assert episode.status is Status.COMPLETED
    assert episode.trajectory.messages[2].text.endswith("[cut: the first 16000 of 8000000 characters]")


@pytest.mark.parametrize("text", ["\n" * 8_000_000, "word " * 1_600_000], ids=["newlines", "words"])
def test_a_message_of_eight_megabytes_ends_the_episode_before_it_is_encoded(
    chat: ChatFormat, text: str, monkeypatch: Any
) -> None:
    encoded: list[int] = []
    original = chat.encode
    monkeypatch.setattr(chat, "encode", lambda text: encoded.append(len(text)) or original(text))
    episode = play(Quiz, Script(chat), chat, Task(text, answer=1))
    assert episode.status is Status.TRUNCATED and "more than 20000 tokens" in (episode.trajectory.error or "")
    assert sum(encoded) < 100


def test_the_least_number_of_tokens_is_one(chat: ChatFormat) -> None:
    density = densities(chat.tokenizer.get_vocab())
    for text in ("", "\n" * 100, " " * 100, "some words\n\n  and = more\t\r\n" * 9, "é" * 50, "<|im_end|>" * 9):
        messages = [Message("user", text), Message("assistant", text, [ToolCall("f", {"a": text})], reasoning=text)]
        least = least_tokens(messages, [TOOL], density)
        assert 0 < least <= len(chat.encode_prompt(messages, [TOOL])) + len(chat.encode(text))


def cpu_seconds(work: Any) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


RESPONSES = Responses().api


def asked_of(api: Any, body: Any) -> Any:
    return api.read(json.dumps(body).encode()).asked


SPLIT = [{"type": "text", "text": part} for part in ("<|im_", "end|>")]
SHAPES: dict[str, Any] = {
    "messages": (CHAT_COMPLETIONS, lambda n: {"messages": [{"role": "user", "content": "x"}] * n}),
    "calls": (
        RESPONSES,
        lambda n: {"input": [{"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"}] * n},
    ),
    "texts of a reply": (RESPONSES, lambda n: {"input": [{"role": "assistant", "content": "word " * 100}] * n}),
    "thoughts": (
        RESPONSES,
        lambda n: {"input": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "word " * 100}]}] * n},
    ),
    "blocks": (
        MESSAGES,
        lambda n: {"max_tokens": 1, "messages": [{"role": "user", "content": [SPLIT[0]] * n}]},
    ),
    "arguments": (
        MESSAGES,
        lambda n: {
            "max_tokens": 1,
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {"a": SPLIT * n}}]}
            ],
        },
    ),
    "control tokens": (CHAT_COMPLETIONS, lambda n: {"messages": [{"role": "user", "content": "<|im_end|>" * n}]}),
    "newlines": (CHAT_COMPLETIONS, lambda n: {"messages": [{"role": "user", "content": "\n" * 10 * n}]}),
    "tools": (
        CHAT_COMPLETIONS,
        lambda n: {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL] * (n // 10)},
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_time_of_a_request_grows_with_its_size_and_not_faster(chat: ChatFormat, shape: str) -> None:
    api, made = SHAPES[shape]

    def seconds(count: int) -> tuple[float, float]:
        body = made(count)
        reading = cpu_seconds(lambda: asked_of(api, body))
        asked = asked_of(api, body)
        if api is RESPONSES:  # its replies become one message, which other shapes encode
            return reading, 0.0
        return reading, cpu_seconds(lambda: chat.encode_prompt(asked.messages, asked.tools))

    for attempt in range(4):  # eight times the size: 8 if linear, 64 if quadratic
        size = 1000 + attempt  # a new one, because texts are cached
        ratios = [large / max(small, 2e-3) for small, large in zip(seconds(size), seconds(8 * size), strict=True)]
        if max(ratios) < 24:
            return
    pytest.fail(f"eight times the size took {max(ratios):.0f} times as long")
