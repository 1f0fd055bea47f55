"""Rows as conversations: the forms in which data sets hold them, recognized by their columns.

| form | columns |
|---|---|
| messages | `messages`: a list of {"role", "content"}, as the API of OpenAI has them; `tools` |
| ShareGPT | `conversations`: a list of {"from", "value"}; `system`, `tools` |
| Alpaca | `instruction`, `input`, `output`; `system`, `history` |
| prompt and response | `prompt` (or `question`) and `response` (or `completion`), each text or messages |

Pure functions. Not here: which tokens are trained (`rollouts.chat.masks`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from rollouts.bounds import excess
from rollouts.errors import counted
from rollouts.types import Message, ToolCall

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function_response": "tool",
}
"""The roles of data sets, and the role of each in a Message."""

FORMS = "messages; conversations (ShareGPT); instruction and output (Alpaca); prompt and response"
_THINKING = ("reasoning", "reasoning_content", "thinking")
_CALLS = ("function_call", "tool_call")
_TABLE = (dict, Mapping)  # `dict` first, because checking `Mapping` is slow


class BadRowError(ValueError):
    """A row that is no conversation. The message says why."""


class Conversation(NamedTuple):
    """A row as messages. `weights` has the weight of each message, None for one without; `form` says in words from
    which columns it was read.
    """

    messages: list[Message]
    tools: list[dict[str, Any]]
    weights: list[float | None]
    form: str


def read_conversation(row: Any) -> Conversation:
    """The conversation of a row. Raises BadRowError.

    >>> found = read_conversation({"instruction": "Add.", "input": "2 + 2", "output": "4"})
    >>> [(message.role, message.text) for message in found.messages], found.form
    ([('user', 'Add.\\n\\n2 + 2'), ('assistant', '4')], 'instruction, input and output (Alpaca)')
    """
    if not isinstance(row, _TABLE):
        raise BadRowError(f"a row is a table of columns, got {type(row).__name__}")
    given, form = _turns(row)
    messages, weights = [], []
    for number, turn in enumerate(given, start=1):
        try:
            messages.append(_message(turn))
            weights.append(_weight(turn))
        except BadRowError as error:
            raise BadRowError(f"message {number}: {error}") from error
    if row.get("system") and (not messages or messages[0].role != "system"):
        messages.insert(0, Message("system", _text(row["system"])))
        weights.insert(0, None)
    if not messages:
        raise BadRowError("the conversation has no messages")
    _match_results(messages)
    return Conversation(messages, _tools(row.get("tools")), weights, form)


def described(forms: Mapping[str, int], count: int) -> str:
    """What was taken for what, in one line.

    >>> described({"messages": 3, "prompt and response": 1}, 4)
    '4 conversations: 3 from messages, 1 from prompt and response'
    """
    if len(forms) == 1:
        return f"{counted(count, 'conversation')} from {next(iter(forms))}"
    return f"{counted(count, 'conversation')}: {', '.join(f'{number} from {form}' for form, number in forms.items())}"


def _turns(row: Mapping[str, Any]) -> tuple[list[Any], str]:
    """The messages as the row writes them, and the form."""
    for column, words in (("messages", "messages"), ("conversations", "conversations (ShareGPT)")):
        if row.get(column) is not None:
            return _list(row[column], column), words
    if row.get("instruction") is not None and "output" in row:
        asked = _said(row["instruction"], "instruction")
        more = _said(row["input"], "input") if row.get("input") not in (None, "") else ""
        history = [turn for pair in row.get("history") or () for turn in zip(("user", "assistant"), pair, strict=False)]
        reply = _said(row["output"], "output")
        turns = [*history, ("user", f"{asked}\n\n{more}" if more else asked), ("assistant", reply)]
        words = "instruction, input and output (Alpaca)" if "input" in row else "instruction and output (Alpaca)"
        return [{"role": role, "content": content} for role, content in turns], words
    asked_in, replied_in = _column(row, "prompt", "question"), _column(row, "response", "completion")
    if asked_in and replied_in:
        before, after = (
            _list(row[column], column)
            if isinstance(row[column], list | tuple)
            else [{"role": role, "content": _said(row[column], column)}]
            for role, column in (("user", asked_in), ("assistant", replied_in))
        )
        return [*before, *after], f"{asked_in} and {replied_in}"
    columns = ", ".join(map(str, row)) or "none"
    raise BadRowError(f"no conversation in the columns {columns}; expected {FORMS}")


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
        value = _json(value, f"the column {column}")
    if not isinstance(value, list | tuple):
        raise BadRowError(f"the column {column} is no list of messages, got {type(value).__name__}")
    return list(value)


def _message(turn: Any) -> Message:
    if isinstance(turn, Message):
        if problem := excess(turn.tool_calls):
            raise BadRowError(f"its tool calls are {problem}")
        return turn
    if not isinstance(turn, _TABLE):
        raise BadRowError(f"expected {{'role', 'content'}}, got {type(turn).__name__}")
    given = turn.get("role", turn.get("from"))
    if not isinstance(given, str) or not given:
        raise BadRowError("it has no role")
    role = ROLES.get(given.lower())
    if role is None:
        raise BadRowError(f"unknown role {given!r}; expected one of {', '.join(sorted(ROLES))}")
    content = turn.get("content", turn.get("value"))
    if given.lower() == "function_call":
        return Message("assistant", "", [_call(each) for each in _calls(content)])
    calls = [_call(each) for each in _calls(turn.get("tool_calls"))]
    calls += [_call(turn[key]) for key in _CALLS if turn.get(key)]
    if calls and role != "assistant":
        raise BadRowError(f"a message of the role {given} has tool calls")
    if content is None and not calls and role != "assistant":
        raise BadRowError("it has no content")
    reasoning = next((turn[key] for key in _THINKING if turn.get(key)), None)
    return Message(
        role,
        _content(content),
        calls,
        tool_call_id=turn.get("tool_call_id"),
        name=turn.get("name"),
        reasoning=None if reasoning is None else _text(reasoning),
    )


def _content(value: Any) -> str | list[dict[str, Any]]:
    """Text, or parts. Data that is neither, as of a tool's result, becomes JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list) and value and all(isinstance(each, _TABLE) and "type" in each for each in value):
        return [dict(each) for each in value]
    return msgspec.json.encode(value).decode()


def _calls(value: Any) -> Iterable[Any]:
    if isinstance(value, str):
        value = _json(value, "the tool calls") if value.strip() else []
    return [value] if isinstance(value, _TABLE) else value or []


def _call(value: Any) -> ToolCall:
    if isinstance(value, ToolCall):
        return value
    if isinstance(value, str):
        value = _json(value, "a tool call")
    if not isinstance(value, _TABLE):
        raise BadRowError(f"a tool call is a table, got {type(value).__name__}")
    function = value.get("function") or value
    if not isinstance(function, _TABLE) or not isinstance(function.get("name"), str):
        raise BadRowError("a tool call has no name")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        arguments = _json(arguments, f"the arguments of {function['name']}") if arguments.strip() else {}
    if arguments is not None and not isinstance(arguments, _TABLE):
        raise BadRowError(f"the arguments of {function['name']} are no table, got {type(arguments).__name__}")
    if problem := excess(arguments):
        raise BadRowError(f"the arguments of {function['name']}: they are {problem}")
    return ToolCall(function["name"], dict(arguments or {}), str(value.get("id") or ""))


def _match_results(messages: Sequence[Message]) -> None:
    """Raise BadRowError for a result without its call."""
    open_calls: list[str] = []
    for number, message in enumerate(messages, start=1):
        if message.role == "assistant":
            open_calls = [call.id for call in message.tool_calls]
        elif message.role == "tool":
            wanted = message.tool_call_id or ""
            if not open_calls or (wanted and any(open_calls) and wanted not in open_calls):
                named = f" {wanted!r}" if wanted else ""
                raise BadRowError(f"message {number}: a tool result{named} without its call")
            open_calls.remove(wanted if wanted in open_calls else open_calls[0])


def _tools(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str):
        value = _json(value, "the column tools") if value.strip() else []
    found = []
    for tool in value or ():
        if isinstance(tool, str):
            tool = _json(tool, "a tool")
        if not isinstance(tool, _TABLE):
            raise BadRowError(f"a tool is a JSON schema, got {type(tool).__name__}")
        found.append(dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)})
    return found


def _weight(turn: Any) -> float | None:
    weight = turn.get("weight") if isinstance(turn, _TABLE) else None
    if weight is None:
        return None
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
        raise BadRowError(f"its weight is {weight!r}; expected a number from 0 on")
    return float(weight)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise BadRowError(f"expected text, got {type(value).__name__}")
    return value


def _json(text: str, what: str) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadRowError(f"{what}: no JSON: {error.msg}: {text[:80]!r}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or lists inside lists
        raise BadRowError(f"{what}: {error}: {text[:80]!r}") from error
    if problem := excess(value):
        raise BadRowError(f"{what}: it is {problem}: {text[:80]!r}")
    return value
