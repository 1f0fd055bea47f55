"""Rows as conversations: the forms in which data sets hold them, recognized by their columns.

| form | columns |
|---|---|
| messages | `messages`: a list of {"role", "content"}, as the API of OpenAI has them |
| ShareGPT | `conversations`: a list of {"from", "value"} |
| Alpaca | `instruction`, `input`, `output`, `history` |
| prompt and response | `prompt` (or `question`) and `response` (or `completion`), each text or messages; `history` |

All have `system`, `tools`, and marks that say what is trained (`MARKS`). Pure functions. Not here: one message
(`messages`), and which tokens are trained (`rollouts.chat.masks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rollouts.data.messages import (
    KEYS,
    TABLE,
    calls_from_text,
    decode_json,
    match_results,
    read_message,
    results_from_text,
    tools_of_row,
)
from rollouts.data.messages import BadRowError as BadRowError
from rollouts.errors import counted
from rollouts.types import Message

FORMS = "messages; conversations (ShareGPT); instruction and output (Alpaca); prompt and response"

FLAGS, WEIGHTS = ("train", "training", "loss"), ("weight", "loss_scale")
MARKS = (*FLAGS, *WEIGHTS)
"""The keys of a turn, and the columns of a row, that say whether it is trained, and with which weight."""

UNREAD_MAX = 40  # names of columns that are kept for a data set; a row may make names up
_COMMON = frozenset(("system", "tools", *MARKS))
_NAMES = frozenset(MARKS)
_READ = KEYS | _NAMES
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")


class Conversation(NamedTuple):
    """A row as messages. `weights` has the weight of each message: the product of its marks and those of the row, 0 for
    context that is not trained, None without any. `form` says in words from which columns it was read. `unread` names
    columns of the row, and keys of its turns (`messages[].id`), that were not read.
    """

    messages: list[Message]
    tools: list[dict[str, Any]]
    weights: list[float | None]
    form: str
    unread: frozenset[str] = frozenset()


class _Given(NamedTuple):
    """What a row has: the form, the columns that it reads, and turns with their column and whether they are context."""

    form: str
    columns: tuple[str, ...]
    turns: list[tuple[Any, str, bool]]


def read_conversation(row: Any, *, keeps_parts: bool = False) -> Conversation:
    """The conversation of a row. With `keeps_parts`, images and other parts that are not text stay in the messages.
    Raises BadRowError.

    >>> found = read_conversation({"instruction": "Add.", "input": "2 + 2", "output": "4"})
    >>> [(message.role, message.text) for message in found.messages], found.form
    ([('user', 'Add.\\n\\n2 + 2'), ('assistant', '4')], 'instruction, input and output (Alpaca)')
    """
    if not isinstance(row, TABLE):
        raise BadRowError(f"a row is a table of columns, got {type(row).__name__}")
    media = next((column for column in _MEDIA if row.get(column)), None)
    if media and not keeps_parts:
        raise BadRowError(f"its column {media} is not text, and the model reads and writes text only")
    given = _given(row)
    unread = {column for column in row.keys() - _COMMON - set(given.columns) if row[column] is not None}
    of_row = _mark(row, "the column ")
    messages: list[Message] = []
    weights: list[float | None] = []
    for number, (turn, column, is_context) in enumerate(given.turns, start=1):
        try:
            messages.append(read_message(turn, keeps_parts=keeps_parts))
            mark = None if isinstance(turn, Message) else _mark(turn, "its ")
        except BadRowError as error:
            raise BadRowError(f"message {number}: {error}") from error
        is_reply = messages[-1].role == "assistant"
        mark = 0.0 if mark is None and is_reply and is_context else mark
        weights.append(mark if of_row is None else of_row * (1.0 if mark is None else mark))
        read = KEYS if mark and not is_reply else _READ  # only replies are trained
        if not isinstance(turn, Message) and not turn.keys() <= read:
            unread |= {f"{column}[].{key}" for key in turn.keys() - read if turn[key] is not None}
    tools = tools_of_row(row.get("tools"))
    messages, weights = _with_calls(messages, weights, bool(tools))
    match_results(messages)
    if not messages:
        raise BadRowError("the conversation has no messages")
    if row.get("system"):
        system = read_message({"role": "system", "content": row["system"]}, keeps_parts=keeps_parts)
        if messages[0].role != "system":
            messages, weights = [system, *messages], [None, *weights]
        elif messages[0] != system:
            unread.add("system")
    return Conversation(messages, tools, weights, given.form, frozenset(unread))


def described(forms: Mapping[str, int], count: int) -> str:
    """What was taken for what, in one line.

    >>> described({"messages": 3, "prompt and response": 1}, 4)
    '4 conversations: 3 from messages, 1 from prompt and response'
    """
    if len(forms) == 1:
        return f"{counted(count, 'conversation')} from {next(iter(forms))}"
    return f"{counted(count, 'conversation')}: {', '.join(f'{number} from {form}' for form, number in forms.items())}"


def add_unread(names: set[str], more: Iterable[str]) -> None:
    """Add names of columns that were not read, of which at most `UNREAD_MAX` are kept."""
    names.update(sorted(set(more) - names)[: max(0, UNREAD_MAX - len(names))])


def unread_words(names: Iterable[str]) -> str:
    """The columns that were not read, in one line; "" if all were.

    >>> unread_words({"id", "messages[].source"})
    'not read: id, messages[].source'
    """
    found = sorted(names)
    return f"not read: {', '.join(found)}{' and more' if len(found) >= UNREAD_MAX else ''}" if found else ""


def _given(row: Mapping[str, Any]) -> _Given:
    """The turns as the row writes them."""
    for column, words in (("messages", "messages"), ("conversations", "conversations (ShareGPT)")):
        if row.get(column) is not None:
            turns = [(turn, column, False) for turn in _list(row[column], column)]
            return _Given(words, (column,), turns)
    if row.get("instruction") is not None and "output" in row:
        asked = _said(row["instruction"], "instruction")
        more = _said(row["input"], "input") if row.get("input") not in (None, "") else ""
        before: list[Any] = [{"role": "user", "content": f"{asked}\n\n{more}" if more else asked}]
        after: list[Any] = [{"role": "assistant", "content": _said(row["output"], "output")}]
        words = "instruction, input and output (Alpaca)" if "input" in row else "instruction and output (Alpaca)"
        columns: tuple[str, ...] = ("instruction", "input", "output")
    else:
        columns = _column(row, "prompt", "question"), _column(row, "response", "completion")
        if not all(columns):
            found = ", ".join(map(str, row)) or "none"
            raise BadRowError(f"no conversation in the columns {found}; expected {FORMS}")
        before, after = (
            _list(row[column], column)
            if isinstance(row[column], list | tuple)
            else [{"role": role, "content": _said(row[column], column)}]
            for role, column in zip(("user", "assistant"), columns, strict=True)
        )
        words = " and ".join(columns)
    context = [(turn, columns[0], True) for turn in [*_history(row.get("history")), *before]]
    return _Given(words, (*columns, "history"), [*context, *((turn, columns[-1], False) for turn in after)])


def _history(value: Any) -> list[dict[str, Any]]:
    """The turns of a column `history`: pairs of a question and its reply."""
    pairs = _list(value, "history") if value else []
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise BadRowError("the column history is no list of pairs: [[question, reply], ...]")
    both = ("user", "assistant")
    return [
        {"role": role, "content": _said(said, "history")}
        for pair in pairs
        for role, said in zip(both, pair, strict=True)
    ]


def _column(row: Mapping[str, Any], *columns: str) -> str:
    """The first of these columns that is not empty, else the first that the row has, else ""."""
    found = [column for column in columns if column in row]
    return next((column for column in found if row[column] not in (None, "")), found[0] if found else "")


def _said(value: Any, column: str) -> str:
    """The text of a column. A table of text, such as CSV, gives numbers for text of digits."""
    if value is None or value == "":
        raise BadRowError(f"the column {column} is empty")
    if not isinstance(value, str | int | float):
        raise BadRowError(f"the column {column} is no text, got {type(value).__name__}")
    return str(value)


def _list(value: Any, column: str) -> list[Any]:
    """The messages of a column, which may be JSON text."""
    if isinstance(value, str):
        value = decode_json(value, f"the column {column}")
    if not isinstance(value, list | tuple):
        raise BadRowError(f"the column {column} is no list of messages, got {type(value).__name__}")
    return list(value)


def _mark(table: Mapping[str, Any], whose: str) -> float | None:
    """The product of the marks of a turn or a row; None without any."""
    found = None
    for key in () if _NAMES.isdisjoint(table) else MARKS:
        value = table.get(key)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and 0 <= value < float("inf")
        if not is_number or (key in FLAGS and value not in (0, 1)):
            kind = "true or false" if key in FLAGS else "a number from 0 on"
            raise BadRowError(f"{whose}{key} is {value!r}; expected {kind}, which says how it is trained")
        found = float(value) if found is None else found * float(value)
    return found


def _with_calls(
    messages: list[Message], weights: list[float | None], has_tools: bool
) -> tuple[list[Message], list[float | None]]:
    """The messages with the calls that are in their text, and with the results of such calls, and their weights."""
    if not any("<tool_call>" in each.text for each in messages if each.role == "assistant"):
        return messages, weights
    found: list[Message] = []
    kept: list[float | None] = []
    was_read = False  # whether the calls of the last reply were in its text
    for place, (message, weight) in enumerate(zip(messages, weights, strict=True)):
        same = [message]
        if message.role == "assistant":
            after = messages[place + 1 : place + 2]
            is_answered = any(each.role == "tool" or results_from_text(each) for each in after)
            try:
                read = calls_from_text(message, is_answered=is_answered, has_tools=has_tools)
            except BadRowError as error:
                raise BadRowError(f"message {place + 1}: {error}") from error
            was_read = read is not None
            same = [read or message]
        elif was_read:
            same = results_from_text(message) or same
        found += same
        kept += [weight] * len(same)
    return found, kept
