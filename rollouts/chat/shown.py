"""Show that a row's mask is right, independently of the code that made the row.

The rule. For each trained turn i, let P be the prompt that the model would be given there: `encode_prompt` of the
messages before it. One row has a span [a, b) for which three things hold. `row[:a]` is P; only earlier replies of the
row may be spelled otherwise, as in a rollout. `row[a:b]` ends with one stop id and has none before. Read as a reply,
`row[a:b]` gives message i in every field. In words: a model that had sampled these ids after P would have been recorded
as this message.

`check_rows` shows this for the rows of a conversation, and `check_context` shows its first part for a sampled turn.
Both cost as much as the rows. So `shape` says which conversations a template cannot tell apart, `sentinels` makes one
of the same shape with unmistakable texts, and `is_plausible` is a cheap test for each further row. Not here: how rows
are made (`masks`).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from rollouts.chat.format import ChatFormat
from rollouts.errors import ModelError, counted
from rollouts.types import Message, ToolCall

Row = tuple[list[int], list[tuple[int, int, int]]]
"""Tokens [L], and the trained turns, each as its start, its end and the number of the message."""

THOUGHT, TEXT, CUT_PROMPT = "the thought", "the text", "the opening tag of a thought in the prompt"
SHAPES_MAX = 4096
"""How many shapes of conversations are remembered. Conversations of further shapes are checked in full each time."""

_BEGIN = 4  # tokens of a reply
_BLANKS = re.compile(r"\A(\s*)\S(?:.*\S)?(\s*)\Z", re.DOTALL)  # a text that is not blank, and the blanks around it


class Unshown(ModelError):
    """The mask of a conversation cannot be shown to be right. The message says why."""


def check_rows(
    rows: Sequence[Row],
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    trained: Collection[int],
    chat: ChatFormat,
) -> list[str]:
    """The fields of trained turns that are in no row, such as a thought that the template drops; a turn may name one
    more than once. `trained` are the numbers of the messages to train. Raises Unshown.
    """
    places = sorted(place for _, turns in rows for *_, place in turns)
    if places != sorted(trained):
        raise Unshown(f"the messages {_numbers(trained)} are to be trained, the rows train {_numbers(places)}")
    lost = []
    for tokens, turns in rows:
        for number, (start, end, place) in enumerate(turns):
            earlier = [turn[:2] for turn in turns[:number]]
            try:
                if not 0 < start < end <= len(tokens):
                    raise Unshown(f"its reply is at [{start}, {end}) of {len(tokens)} tokens")
                cut = check_context(tokens[:start], earlier, messages[:place], tools, chat)
                if cut and messages[place].reasoning:
                    raise Unshown("its prompt opens a thought, which the row leaves out")
                lost += [CUT_PROMPT] * cut + _unread(tokens[start:end], tokens[:start], messages[place], tools, chat)
            except Unshown as error:
                raise Unshown(f"message {place + 1} cannot be trained: {error}") from error
    return lost


def check_context(
    tokens: list[int],
    earlier: Sequence[tuple[int, int]],
    before: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    chat: ChatFormat,
) -> bool:
    """Check that these tokens are the prompt of a reply to the messages `before`. `earlier` are the replies in the
    tokens, each with its start and its end. Returns whether the tokens leave out the end of the prompt that opens a
    thought. Raises Unshown.
    """
    prompt = chat.encode_prompt(list(before), tools)
    if tokens == prompt:
        return False
    text, wanted = chat.decode(tokens), chat.decode(prompt)
    if text == wanted and earlier:  # encoded in other pieces
        return False
    if not earlier:
        opened = chat.thoughts.opened_by(wanted)
        if opened and text + opened == wanted:
            return True
        raise Unshown("the tokens before its reply are not the prompt that the model would be given")
    # Earlier replies may be spelled otherwise, but must be the same messages. All other text must be the prompt's.
    starts = [chat.decode(tokens[:start]) for start, _ in earlier]
    ends = [chat.decode(tokens[: end - (tokens[end - 1] in chat.stop_ids)]) for _, end in earlier]
    at = len(starts[0])
    if wanted[:at] != starts[0]:
        raise Unshown("the beginning of its row is not that of its prompt")
    for number, (start, end, following) in enumerate(zip(starts, ends, [*starts[1:], text], strict=True), 1):
        piece = following[len(end) :]  # from the stop token of this reply to the next reply
        found = wanted.find(piece, at) if number < len(starts) else max(at, len(wanted) - len(piece))
        if found < 0 or wanted[found : found + len(piece)] != piece:
            raise Unshown("the text between two replies of its row is not that of its prompt")
        if not chat.shows(wanted[at:found], end[len(start) :], tools):
            raise Unshown("its prompt shows an earlier reply of its row as another message")
        at = found + len(piece)
    return False


def _unread(
    reply: Sequence[int],
    context: Sequence[int],
    message: Message,
    tools: Sequence[dict[str, Any]],
    chat: ChatFormat,
) -> list[str]:
    """The fields of the message that the reply does not show. Raises Unshown if it shows another message."""
    stops = [index for index, token in enumerate(reply) if token in chat.stop_ids]
    if stops != [len(reply) - 1]:
        raise Unshown(
            f"its reply must end with its only stop token, but has {len(stops)} of them in {len(reply)} tokens"
        )
    text, thought = message.text, message.reasoning or ""
    if not thought:  # it may be a part of the text
        text, thought = chat.thoughts._replace(prompt="").split(text)
    if message.tool_calls and not chat.report.reads_calls:
        return _unfound(chat.decode(reply[:-1]), text, thought, message.tool_calls)
    read = chat.parse(reply, [*tools, *_unnamed(message.tool_calls, tools)], context)
    wrong = next((call.error for call in read.tool_calls if call.error), None)
    if wrong is not None and not any(call.error for call in message.tool_calls):
        raise Unshown(f"its reply cannot be read back: {wrong.splitlines()[0]}")
    if list(map(_call_meaning, read.tool_calls)) != list(map(_call_meaning, message.tool_calls)):
        raise Unshown(
            f"its reply is read as {_calls_in_words(read.tool_calls)}, "
            f"but the message has {_calls_in_words(message.tool_calls)}"
        )
    lost = []
    if (read.reasoning or "").strip() != thought.strip():
        if read.reasoning:
            raise Unshown(f"its thought is read as {_short(read.reasoning)}")
        lost.append(THOUGHT)
    is_text = chat.report.calls_as_text and bool(message.tool_calls)  # then the calls are a part of the text read
    if read.text.strip() != text.strip() and not (is_text and read.text.startswith(text.strip())):
        if read.text.strip() or not message.tool_calls:
            raise Unshown(f"its text is read as {_short(read.text)}, but the message has {_short(text)}")
        lost.append(TEXT)
    return lost


def _unfound(reply: str, text: str, thought: str, calls: Sequence[ToolCall]) -> list[str]:
    """`_unread` of a reply whose calls cannot be read, which should show them in any format."""
    for call in calls:
        values = [call.name, *(each for each in _leaves(call.arguments) if each.isalnum())]
        if missing := [each for each in values if each not in reply]:
            raise Unshown(f"its reply does not show {_short(missing[0])} of the call {call.name}")
    return [field for field, each in ((THOUGHT, thought), (TEXT, text)) if each.strip() not in reply]


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for each in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _leaves(each)
    else:
        yield value if isinstance(value, str) else json.dumps(value)


def _unnamed(calls: Sequence[ToolCall], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Schemas for called tools that were not offered. Some formats read no call of an unknown tool."""
    offered = {tool.get("function", tool).get("name") for tool in tools}
    named: dict[str, Any] = {call.name: {"properties": {key: {} for key in call.arguments}} for call in calls}
    return [
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name, parameters in named.items()
        if name not in offered
    ]


def _call_meaning(call: ToolCall) -> tuple[str, str]:
    """A call without its spelling. Some formats write all arguments as text."""
    as_text = {key: each if isinstance(each, str) else json.dumps(each) for key, each in call.arguments.items()}
    return call.name, json.dumps(as_text, sort_keys=True)


def _calls_in_words(calls: Sequence[ToolCall]) -> str:
    return ", ".join(f"{call.name}({_short(json.dumps(call.arguments))})" for call in calls) or "no call"


def _short(text: str) -> str:
    return repr(text if len(text) < 60 else f"{text[:57]}...")


def _numbers(places: Collection[int]) -> str:
    return ", ".join(str(place + 1) for place in sorted(places)) or "none"


# --- shapes -----------------------------------------------------------------------------------------------------------


def shape(messages: Sequence[Message], tools: Sequence[Any], literals: Sequence[str], trained: Collection[int]) -> Any:
    """What a template can see of a conversation beside its words: the kinds of neighboring messages."""
    kinds = [(*_kind(message, literals), place in trained) for place, message in enumerate(messages)]
    return bool(tools), frozenset(itertools.pairwise([None, *kinds, None])), tuple(kinds[:3])


def _kind(message: Message, literals: Sequence[str]) -> tuple[Any, ...]:
    text = message.text
    calls = tuple((len(call.arguments), *map(type, call.arguments.values())) for call in message.tool_calls)
    found = tuple(literal for literal in literals if literal in text)
    edges = tuple((text.startswith(literal), text.endswith(literal)) for literal in found)
    fields = (type(message.content), bool(text), bool(message.reasoning), message.name is None)
    return message.role, *fields, calls, found, edges


def sentinels(messages: Sequence[Message], literals: Sequence[str]) -> tuple[list[Message], dict[str, str]]:
    """A conversation of the same shape whose texts are words that occur once, and the field in which each word is."""
    numbers, fields = itertools.count(), dict[str, str]()

    def word(field: str) -> str:
        fields[found := f"sentinel{next(numbers)}word"] = field
        return found

    def text(given: str, field: str) -> str:
        parts = pattern.split(given)
        parts[::2] = [_BLANKS.sub(lambda found: found[1] + word(field) + found[2], part) for part in parts[::2]]
        return "".join(parts)

    pattern = re.compile(f"({'|'.join(map(re.escape, sorted(literals, key=len, reverse=True)))})")
    made = []
    for message in messages:
        what = {"assistant": TEXT, "tool": "a tool's result"}.get(message.role, f"a {message.role} message")
        content: Any = message.content
        if isinstance(content, str):
            content = text(content, what)
        else:
            content = [{**part, "text": text(part["text"], what)} if part.get("text") else part for part in content]
        calls = [
            ToolCall(call.name, _replaced(call.arguments, lambda given: text(given, "an argument of a call")), call.id)
            for call in message.tool_calls
        ]
        reasoning = message.reasoning and text(message.reasoning, THOUGHT)
        made.append(msgspec.structs.replace(message, content=content, tool_calls=calls, reasoning=reasoning))
    return made, fields


def _replaced(value: Any, text: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        return {key: _replaced(each, text) for key, each in value.items()}
    return [_replaced(each, text) for each in value] if isinstance(value, list) else value


def lost_fields(rows: Sequence[Row], fields: Mapping[str, str], chat: ChatFormat) -> list[str]:
    """The fields of a conversation of sentinels that are in no row, but for replies (`check_rows`)."""
    text = "".join(chat.decode(tokens) for tokens, _ in rows)
    return [field for word, field in fields.items() if word not in text and field not in (THOUGHT, TEXT)]


def is_plausible(row: Row, replies: Iterator[str], messages: Sequence[Message], chat: ChatFormat) -> bool:
    """Whether a row of a known shape looks right: each trained turn begins as its reply, ends with its only stop id and
    has the message's text and calls. `replies` are the texts of the turns. False: check it in full.
    """
    tokens, turns = row
    stops = frozenset(chat.stop_ids)
    for start, end, place in turns:
        message, reply = messages[place], next(replies)
        if end > len(tokens) or tokens[end - 1] not in stops or not stops.isdisjoint(tokens[start : end - 1]):
            return False
        begin = chat.decode(tokens[start : min(start + _BEGIN, end - 1)]).rstrip("\ufffd")
        if not reply.startswith(begin) or message.text.strip() not in reply:
            return False
        if not all(call.name in reply for call in message.tool_calls):
            return False
    return True


def lost_words(lost: Mapping[str, int]) -> str:
    """What is in no row, in words; "" if nothing is lost.

    >>> lost_words({"the thought": 3})
    'the chat template leaves out: the thought (3 times)'
    """
    fields = ", ".join(f"{field} ({counted(count, 'time')})" for field, count in sorted(lost.items()))
    return f"the chat template leaves out: {fields}" if fields else ""
