"""Show that a row's mask is right, independently of the code that made the row.

The rule. For each trained turn i, let P be the prompt that the model would be given there: `encode_prompt` of the
messages before it. One row has a span [a, b) for which three things hold. `row[:a]` is P; only earlier replies of the
row may be spelled otherwise, as in a rollout. `row[a:b]` ends with one stop id and has none before. Read as a reply,
`row[a:b]` gives message i in every field. In words: a model that had sampled these ids after P would have been recorded
as this message.

`check_rows` shows this for the rows of a conversation, and `check_extension` shows its first part for a sampled turn.
Both cost as much as the rows, so this is done once for each shape: `shapes` says which messages a template cannot tell
apart, and `sentinels` makes a conversation of the same shapes with unmistakable texts. Further messages are read back
if they have texts that could be taken for a call or a thought. Not here: how rows are made (`masks`).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from rollouts.chat.format import ChatFormat
from rollouts.errors import ModelError, counted
from rollouts.types import Message, ToolCall

Row = tuple[list[int], list[tuple[int, int, int]]]
"""Tokens [L], and the trained turns, each as its start, its end and the number of the message."""

Shape = tuple[Any, ...]

THOUGHT, TEXT, CUT_PROMPT = "the thought", "the text", "the opening tag of a thought in the prompt"
SHAPES_MAX = 4096
"""How many shapes of messages are remembered. Messages of further shapes are checked in full each time."""

_WHOLE = re.compile(r"\.0(?!\d)")  # some templates write 1.0 as 1
_NO_TEXT = re.compile(r"\.0(?!\d)|\de|null|true|false")  # in XML, the tool's schema decides how these are read
_BLANKS = re.compile(r"\A(\s*)\S(?:.*\S)?(\s*)\Z", re.DOTALL)  # a text that is not blank, and the blanks around it


class Field(NamedTuple):
    """A field of a message: the number of the message, and the field in words."""

    place: int
    name: str


class Unshown(ModelError):
    """The mask of a conversation cannot be shown to be right. The message says why."""


def check_rows(
    rows: Sequence[Row],
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    trained: Collection[int],
    chat: ChatFormat,
    suspects: Collection[int] | None = None,
    replies: Mapping[int, str] | None = None,
) -> list[Field]:
    """The fields of trained turns that are in no row, such as a thought that the template drops. `trained` are the
    numbers of the messages to train. Raises Unshown.

    `suspects` are the turns that are checked in full; None: all. The others have known shapes, and are read back only
    if their texts could be taken for something else. `replies` are their texts.
    """
    places = sorted([place for _, turns in rows for _, _, place in turns])
    if places != sorted(trained):
        raise Unshown(f"the messages {_numbers(trained)} are to be trained, the rows train {_numbers(places)}")
    lost = list[Field]()
    for tokens, turns in rows:
        for number, (start, end, place) in enumerate(turns):
            try:
                if not 0 < start < end <= len(tokens):
                    raise Unshown(f"its reply is at [{start}, {end}) of {len(tokens)} tokens")
                if suspects is None or place in suspects:
                    if number:
                        begun, ended, last = turns[number - 1]
                        sampled, rest = tokens[begun:ended], tokens[ended:start]
                        check_extension(messages[:last], messages[last:place], tools, sampled, rest, chat)
                    elif _check_prompt(tokens[:start], messages[:place], tools, chat):
                        if messages[place].reasoning:
                            raise Unshown("its prompt opens a thought, which the row leaves out")
                        lost.append(Field(place, CUT_PROMPT))
                elif replies and _is_plain(tokens, start, end, messages[place], replies[place], chat):
                    continue
                unread = _unread(tokens[start:end], tokens[:start], messages[place], tools, chat)
                lost += [Field(place, name) for name in unread]
            except Unshown as error:
                raise Unshown(f"message {place + 1} cannot be trained: {error}") from error
    return lost


def _is_plain(tokens: Sequence[int], start: int, end: int, message: Message, reply: str, chat: ChatFormat) -> bool:
    """Whether a reply of a known shape begins as its text, ends with its only stop id, has the message's text and
    calls, and has no text that could be taken for a call or a thought.
    """
    text = message.text.strip()
    said, arguments = text, ""
    if message.tool_calls:
        try:
            arguments = msgspec.json.encode([call.arguments for call in message.tool_calls]).decode()
        except (OverflowError, UnicodeEncodeError):  # of a number of many digits, or of half a surrogate pair
            return False
        said += arguments
    if message.reasoning:
        said += message.reasoning
    if (_NO_TEXT if chat.tool_call_format == "xml" else _WHOLE).search(arguments):
        return False
    if text.startswith(("{", "[")) or any(map(said.__contains__, chat.marks)):
        return False
    if tokens[end - 1] not in chat.stops or not chat.stops.isdisjoint(tokens[start : end - 1]):
        return False
    begin = chat.text_of(tokens[start]).strip(" \n\ufffd") if start < end - 1 else ""
    if text not in reply or not reply.lstrip().startswith(begin):
        return False
    return not arguments or all(call.name in reply for call in message.tool_calls)


def _check_prompt(
    tokens: list[int], before: Sequence[Message], tools: Sequence[dict[str, Any]], chat: ChatFormat
) -> bool:
    """Check that these tokens are the prompt of a reply to the messages `before`. Returns whether they leave out the
    end of the prompt that opens a thought. Raises Unshown.
    """
    prompt = chat.encode_prompt(list(before), tools)
    if tokens == prompt:
        return False
    wanted = chat.decode(prompt)
    opened = chat.thoughts.opened_by(wanted)
    if opened and chat.decode(tokens) + opened == wanted:
        return True
    raise Unshown("the tokens before its reply are not the prompt that the model would be given")


def check_extension(
    before: Sequence[Message],
    more: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    sampled: Sequence[int],
    rest: Sequence[int],
    chat: ChatFormat,
) -> None:
    """Check that a prompt, `sampled` and `rest` are the prompt of a reply to `before` and `more`. `more` begins with
    the message that was sampled. It may be spelled otherwise in the prompt; all other text must be the prompt's. Raises
    Unshown.
    """
    # Texts are compared as the tokenizer has them, because it may normalize them.
    begin, whole = (_said(chat.render(list(each), tools, True), chat) for each in (before, [*before, *more]))
    ended = len(sampled) - (bool(sampled) and sampled[-1] in chat.stop_ids)
    behind = chat.decode([*sampled[ended:], *rest])
    if not (whole.startswith(begin) and whole.endswith(behind) and len(begin) + len(behind) <= len(whole)):
        raise Unshown("the text around the reply before it is not that of its prompt")
    shown, said = whole[len(begin) : len(whole) - len(behind)], chat.decode(sampled[:ended])
    if shown != said and not chat.shows(shown, _said(said, chat), tools):
        raise Unshown("its prompt shows an earlier reply of its row as another message")


def _said(text: str, chat: ChatFormat) -> str:
    """The text as the tokenizer has it: it may compose characters, or write some in another way."""
    return chat.decode(chat.encode(text))


def _unread(
    reply: Sequence[int], context: Sequence[int], message: Message, tools: Sequence[dict[str, Any]], chat: ChatFormat
) -> list[str]:
    """The fields of the message that the reply does not show. Raises Unshown if it shows another message."""
    stops = sum(map(chat.stop_ids.__contains__, reply))
    if stops != 1 or reply[-1] not in chat.stop_ids:
        raise Unshown(f"its reply must end with its only stop token, but has {stops} of them in {len(reply)} tokens")
    text, thought = message.text, message.reasoning or ""
    if not thought:  # it may be a part of the text
        text, thought = chat.thoughts._replace(prompt="").split(text)
    if message.tool_calls and not chat.report.reads_calls:
        return _unfound(chat.decode(reply[:-1]), text, thought, message.tool_calls)

    def differs(one: str, other: str) -> bool:
        return one.strip() != other.strip() and one.strip() != _said(other, chat).strip()

    read = chat.parse(reply, [*tools, *_unnamed(message.tool_calls, tools)], context)
    wrong = next((call.error for call in read.tool_calls if call.error), None)
    if wrong is not None and not any(call.error for call in message.tool_calls):
        raise Unshown(f"its reply cannot be read back: {wrong.splitlines()[0]}")
    found, wanted = (list(map(_call_meaning, each.tool_calls)) for each in (read, message))
    if found != wanted and differs(json.dumps(found, ensure_ascii=False), json.dumps(wanted, ensure_ascii=False)):
        raise Unshown(
            f"its reply is read as {_calls_in_words(read.tool_calls)}, "
            f"but the message has {_calls_in_words(message.tool_calls)}"
        )
    lost = []
    if differs(read.reasoning or "", thought):
        if read.reasoning:
            raise Unshown(f"its thought is read as {_short(read.reasoning)}")
        lost.append(THOUGHT)
    is_text = chat.report.calls_as_text and bool(message.tool_calls)  # then the calls are a part of the text read
    if differs(read.text, text) and not (is_text and read.text.startswith(text.strip())):
        if read.text.strip() or not message.tool_calls:
            raise Unshown(f"its text is read as {_short(read.text)}, but the message has {_short(text)}")
        lost.append(TEXT)
    return lost


def _unfound(reply: str, text: str, thought: str, calls: Sequence[ToolCall]) -> list[str]:
    """`_unread` of a reply whose calls cannot be read, which should show them in any format."""
    for call in calls:
        for value in (call.name, *_leaves(call.arguments)):
            spellings = {str(value), json.dumps(value)} if isinstance(value, bool | None) else {str(value)}
            if str(value).isalnum() and not any(each in reply for each in spellings):
                raise Unshown(f"its reply does not show {_short(str(value))} of the call {call.name}")
    return [field for field, each in ((THOUGHT, thought), (TEXT, text)) if each.strip() not in reply]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for each in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _leaves(each)
    else:
        yield value


def _unnamed(calls: Sequence[ToolCall], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Schemas for called tools that were not offered. Some formats read no call of an unknown tool."""
    functions = [tool.get("function", tool) for tool in tools] if calls else []
    offered = [each.get("name") for each in functions if isinstance(each, Mapping)]
    named: dict[str, Any] = {call.name: {"properties": {key: {} for key in call.arguments}} for call in calls}
    return [
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name, parameters in named.items()
        if name not in offered
    ]


def _call_meaning(call: ToolCall) -> tuple[str, str]:
    """A call without its spelling. Some formats write all arguments as text, and 1.0 as 1."""
    said: dict[str, str] = {}
    for key, value in call.arguments.items():
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        said[key] = whole if isinstance(whole, str) else json.dumps(whole)
    return call.name, json.dumps(said, sort_keys=True, ensure_ascii=False)


def _calls_in_words(calls: Sequence[ToolCall]) -> str:
    return ", ".join(f"{call.name}({_short(json.dumps(call.arguments))})" for call in calls) or "no call"


def _short(text: str) -> str:
    return repr(text if len(text) < 60 else f"{text[:57]}...")


def _numbers(places: Collection[int]) -> str:
    return ", ".join(str(place + 1) for place in sorted(places)) or "none"


# --- shapes -----------------------------------------------------------------------------------------------------------


def shapes(
    messages: Sequence[Message], tools: Sequence[Any], chat: ChatFormat, trained: Collection[int] = ()
) -> list[Shape]:
    """What a template can see of each message beside its words: the kinds of the message and its neighbors."""
    found = [(_kind(message, chat.literals), place in trained) for place, message in enumerate(messages)]
    if len(chat.kinds) > SHAPES_MAX:  # the numbers begin anew, so what was shown with them is forgotten
        for known in (chat.kinds, chat.shapes, chat.sampled_shapes):
            known.clear()
    numbers = [chat.kinds.setdefault(kind, len(chat.kinds)) for kind in found]
    return list(zip(itertools.repeat(bool(tools)), [-1, *numbers], numbers, [*numbers[1:], -1], strict=False))


def _kind(message: Message, literals: Sequence[str]) -> tuple[Any, ...]:
    text = message.text
    said = text + message.reasoning if message.reasoning else text
    found = tuple(filter(said.__contains__, literals))
    usual = (message.role, type(message.content), bool(text), message.name is None)
    if not (found or message.reasoning or message.tool_calls):
        return usual
    edges = tuple((said.startswith(literal), said.endswith(literal)) for literal in found)
    calls = tuple((len(call.arguments), *map(type, call.arguments.values())) for call in message.tool_calls)
    return usual, bool(message.reasoning), calls, found, edges


def sentinels(messages: Sequence[Message], literals: Sequence[str]) -> tuple[list[Message], dict[str, Field]]:
    """A conversation of the same shape whose texts are words that occur once, and the field in which each word is."""
    numbers, fields, made = itertools.count(), dict[str, Field](), list[Message]()

    def word(field: str) -> str:
        fields[found := f"sentinel{next(numbers)}word"] = Field(len(made), field)
        return found

    def text(given: str, field: str) -> str:
        parts = pattern.split(given)
        parts[::2] = [_BLANKS.sub(lambda found: found[1] + word(field) + found[2], part) for part in parts[::2]]
        return "".join(parts)

    pattern = re.compile(f"({'|'.join(map(re.escape, sorted(literals, key=len, reverse=True)))})")
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


def lost_fields(rows: Sequence[Row], fields: Mapping[str, Field], chat: ChatFormat) -> list[Field]:
    """The fields of a conversation of sentinels that are in no row, but for replies (`check_rows`)."""
    text = "".join(chat.decode(tokens) for tokens, _ in rows)
    return [field for word, field in fields.items() if word not in text and field.name not in (THOUGHT, TEXT)]


def lost_words(lost: Mapping[str, int]) -> str:
    """What is in no row, in words; "" if nothing is lost.

    >>> lost_words({"the thought": 3})
    'the chat template leaves out: the thought (3 times)'
    """
    fields = ", ".join(f"{field} ({counted(count, 'time')})" for field, count in sorted(lost.items()))
    return f"the chat template leaves out: {fields}" if fields else ""
