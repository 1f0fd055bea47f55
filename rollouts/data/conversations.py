"""Rows as conversations, and their messages in the words of any API: role, text, thinking, calls and results.

The forms in which data sets hold conversations are recognized by their columns:

| form | columns |
|---|---|
| messages | `messages`: a list of {"role", "content"}, as the API of OpenAI has them |
| ShareGPT | `conversations`: a list of {"from", "value"} |
| Alpaca | `instruction`, `input`, `output`, `history` |
| prompt and response | `prompt` (or `question`) and `response` (or `completion`), each text or messages; `history` |

All have `system`, `tools`, and marks that say what is trained (`MARKS`). What cannot be read without a loss makes its
row a bad row. Pure functions. Not here: which tokens are trained (`rollouts.chat.masks`).
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from rollouts.bounds import call_arguments, excess
from rollouts.errors import counted
from rollouts.types import Message, ToolCall

_NAMES_OF_ROLES = {
    "system": "system developer",
    "user": "user human",
    "assistant": "assistant gpt chatgpt model bot function_call tool_call",
    "tool": "tool function ipython observation tool_response function_response",
}
ROLES = {name: role for role, names in _NAMES_OF_ROLES.items() for name in names.split()}
"""The roles of data sets, and the role of each in a Message."""

TABLE = (dict, Mapping)  # `dict` first, because checking `Mapping` is slow
_THINKING = ("reasoning", "reasoning_content", "thinking")
_CALLS = ("function_call", "tool_call")  # keys of a message; as roles, the content is the call
_RARE = frozenset(("refusal", "tool_calls", "tool_call_id", "name", *_THINKING, *_CALLS))
KEYS = _RARE.union(("role", "from", "content", "value"))
"""The keys of a message that are read."""

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_THINKING_PARTS = ("thinking", "reasoning", "reasoning_text")
_ORDER = {**dict.fromkeys(_THINKING_PARTS, 0), **dict.fromkeys(_TEXT_PARTS, 1), "tool_use": 2}
_MEDIA = re.compile(r"(input_)?(image|audio|video|file|document)")

_OPENED, _CLOSED = re.compile(r"\s*<tool_call>\s*"), re.compile(r"\s*</tool_call>\s*")
_RESULT = re.compile(r"\s*<tool_response>\n?(.*?)\n?</tool_response>\s*", re.DOTALL)
THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)
"""Thinking in the text of a message."""
AS_CALLS = 'give it as "tool_calls": [{"name": "...", "arguments": {...}}]'


class BadRowError(ValueError):
    """A row that is no conversation. The message says why."""


def read_message(turn: Any, *, keeps_parts: bool = False) -> Message:
    """The message that a turn of a row is. With `keeps_parts`, parts that are not text are kept in the content, for
    engines that take messages. Raises BadRowError.

    >>> read_message({"role": "assistant", "content": [{"type": "output_text", "text": "The Rhine."}]}).content
    'The Rhine.'
    """
    if isinstance(turn, Message):
        turn = msgspec.structs.asdict(turn)
    if not isinstance(turn, TABLE):
        raise BadRowError(f"expected {{'role', 'content'}}, got {type(turn).__name__}")
    given = turn.get("role") or turn.get("from")
    if not isinstance(given, str) or not given:
        raise BadRowError("it has no role")
    role = ROLES.get(given.lower())
    if role is None:
        raise BadRowError(f"unknown role {given!r}; expected one of {', '.join(sorted(ROLES))}")
    content = turn.get("content")
    content = turn.get("value") if content is None else content
    if given.lower() in _CALLS:
        return Message("assistant", "", [_call(each) for each in _calls(content)])
    if isinstance(content, str) and _RARE.isdisjoint(turn):
        return Message(role, content)
    if content is None and role == "assistant":
        content = turn.get("refusal")
    text, thought, calls = _content(content, role, keeps_parts)
    listed = [_call(each) for each in _calls(turn.get("tool_calls"))]
    listed += [_call(turn[key]) for key in _CALLS if turn.get(key)]
    if listed and role != "assistant":
        raise BadRowError(f"a message of the role {given} has tool calls")
    if listed and calls:
        raise BadRowError("it has tool calls twice: in its content and beside it; leave one out")
    reasoning = next((_text(turn[key]) for key in _THINKING if turn.get(key)), None)
    if reasoning and thought not in ("", reasoning):
        raise BadRowError("it has thinking twice: in its content and beside it; leave one out")
    reasoning, calls = reasoning or thought or None, listed or calls
    is_missing = content is None or (content == [] and role != "tool")
    if is_missing and not calls and not reasoning:
        raise BadRowError(f"it has no content; its keys are {', '.join(map(str, turn))}")
    answered = turn.get("tool_call_id")
    return Message(role, text, calls, None if answered is None else str(answered), turn.get("name"), reasoning)


def _content(value: Any, role: str, keeps_parts: bool) -> tuple[str | list[dict[str, Any]], str, list[ToolCall]]:
    """The text of a content, its thinking, and its calls. A tool's result that is neither text nor parts is data, and
    becomes JSON.
    """
    if value is None or isinstance(value, str):
        return value or "", "", []
    if not (_are_parts(value) if role == "tool" else isinstance(value, list | tuple)):
        if isinstance(value, TABLE) and role != "tool":
            raise BadRowError(f"its content is a {type(value).__name__}; expected text, or a list of parts")
        return msgspec.json.encode(value).decode(), "", []
    kinds = [_kind(part) for part in value]
    if keeps_parts and not set(kinds) <= set(_ORDER):
        return [dict(part) if isinstance(part, TABLE) else {"type": "text", "text": part} for part in value], "", []
    texts, thoughts, calls = list[str](), list[str](), list[ToolCall]()
    last = 0
    for part, kind in zip(value, kinds, strict=True):
        order = _ORDER.get(kind, -1)
        if order < 0 or (order != 1 and role != "assistant"):
            more = "; write a tool's result as a message of the role tool" if kind == "tool_result" else ""
            raise BadRowError(f"a part of type {kind!r} is not text, and the model reads and writes text only{more}")
        if order < last:
            raise BadRowError(f"a part of type {kind!r} too late; the order is thinking, text, tool calls")
        if order == 2:
            calls.append(_call({"name": part.get("name"), "arguments": part.get("input"), "id": part.get("id")}))
        else:
            (texts if order else thoughts).append(text := _text_of(part, kind))
        last = order if order == 2 or text else last
    return "".join(texts), "".join(thoughts), calls


def _are_parts(value: Any) -> bool:
    """Whether the result of a tool is a list of parts. Data may have a `type` of its own."""
    if not isinstance(value, list) or not all(isinstance(part, TABLE) and "type" in part for part in value):
        return False
    return any(kind in _TEXT_PARTS or _MEDIA.match(kind) for kind in map(_kind, value))


def _kind(part: Any) -> str:
    """The type of a part. Gemini's parts of text have none, and LangChain's may be the text itself."""
    if not isinstance(part, TABLE):
        return "text"
    return str(part["type"]) if part.get("type") is not None else "text" if "text" in part else ""


def _text_of(part: Any, kind: str) -> str:
    """The text of a part, which may be a list of parts (Mistral's thinking)."""
    value = part
    if isinstance(part, TABLE):
        value = part.get(kind) if part.get(kind) is not None else part.get("text")
    if isinstance(value, list):
        return "".join(_text_of(each, "text") for each in value)
    if not isinstance(value, str):
        raise BadRowError(f"a part of type {kind!r} has no text")
    return value


def _calls(value: Any) -> Iterable[Any]:
    value = _decoded(value, "the tool calls")
    return [value] if isinstance(value, TABLE) else value or []


def _decoded(value: Any, what: str) -> Any:
    """The value of a JSON text; any other value is returned unchanged."""
    if not isinstance(value, str):
        return value
    return read_json_text(value, what) if value.strip() else []


def _call(value: Any) -> ToolCall:
    if isinstance(value, ToolCall):
        if problem := excess(value.arguments):
            raise BadRowError(f"the arguments of {value.name} are {problem}")
        return value
    if isinstance(value, str):
        value = read_json_text(value, "a tool call")
    if not isinstance(value, TABLE):
        raise BadRowError(f"a tool call is a table, got {type(value).__name__}")
    function = value.get("function") or value
    if not isinstance(function, TABLE) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRowError("a tool call has no name")
    arguments = call_arguments(function.get("arguments", function.get("parameters")))
    if isinstance(arguments, str):
        raise BadRowError(f"the arguments of {function['name']}: {arguments}")
    return ToolCall(function["name"], arguments, str(value.get("id") or ""))


def tools_of_row(value: Any) -> list[dict[str, Any]]:
    """The tools of a row as schemas. Raises BadRowError."""
    found = []
    for tool in _decoded(value, "the column tools") or ():
        tool = read_json_text(tool, "a tool") if isinstance(tool, str) else tool
        if not isinstance(tool, TABLE):
            raise BadRowError(f"a tool is a JSON schema, got {type(tool).__name__}")
        tool = dict(tool)
        if tool.get("function") is None:  # the schema alone, as a table of both forms may have it
            tool.pop("function", None)
            tool = {"type": "function", "function": tool}
        function = tool["function"]
        if not isinstance(function, TABLE) or not isinstance(function.get("name"), str):
            raise BadRowError("a tool has no name")
        found.append(tool)
    return found


def calls_from_text(message: Message, *, is_answered: bool, has_tools: bool) -> Message | None:
    """The message with the calls that its text ends with, as `<tool_call>{...}</tool_call>`; None if its text has none.

    In a conversation with tools, any such text is read; else only a text that is nothing but calls, or that a tool
    answers. Only a reading without a loss counts. Raises BadRowError if there must be a call that cannot be read.
    """
    text = message.content
    if not isinstance(text, str) or (at := text.find("<tool_call>")) < 0 or message.tool_calls:
        return None
    is_certain = is_answered or not THOUGHT.sub("", text[:at], count=1).strip()
    try:
        calls = _tagged_calls(text[at:])
    except ValueError as error:
        if not is_certain:
            return None  # a sentence that mentions the tag
        raise BadRowError(f"the tool call in its text cannot be read: {error}; {AS_CALLS}") from error
    is_read = is_certain or has_tools
    return msgspec.structs.replace(message, content=text[:at].strip(), tool_calls=calls) if is_read else None


def _tagged_calls(text: str) -> list[ToolCall]:
    """The calls of a text that is nothing but calls in tags. Raises ValueError."""
    calls, place = [], 0
    while place < len(text):
        if (opened := _OPENED.match(text, place)) is None:
            raise ValueError("there is text behind it")
        value, place = _value(text, opened.end())
        if (closed := _CLOSED.match(text, place)) is None:
            raise ValueError("there is more than one value in its tags, or no end tag")
        place = closed.end()
        if isinstance(value, dict) and not set(value) <= {"name", "arguments"}:
            raise ValueError("it has other keys than name and arguments")
        calls.append(_call(value))
    return calls


def _value(text: str, start: int) -> tuple[Any, int]:
    """The value that starts there, as JSON or as a literal of Python, and its end. Raises ValueError."""
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        end = text.find("</tool_call>", start)
        try:  # the data set hermes-function-calling-v1 writes dicts of Python
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                value = ast.literal_eval(text[start:end].strip())
            return json.loads(json.dumps(value, allow_nan=False)), end
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            raise ValueError(f"not JSON: {error}") from None


def results_from_text(message: Message) -> list[Message]:
    """The results of a message that is nothing but `<tool_response>...</tool_response>`, else an empty list."""
    text, place, results = message.text, 0, []
    while place < len(text):
        if (found := _RESULT.match(text, place)) is None:
            return []
        results.append(Message("tool", found[1]))
        place = found.end()
    return results


def match_results(messages: Sequence[Message]) -> None:
    """Raise BadRowError for a result without its call."""
    open_calls: list[str] = []
    more = ""
    for number, message in enumerate(messages, start=1):
        if message.role == "assistant":
            more = "" if message.tool_calls else f"; if the call is in the text of a reply, {AS_CALLS}"
            open_calls = [call.id for call in message.tool_calls]
        elif message.role == "tool":
            wanted = message.tool_call_id or ""
            if not open_calls or (wanted and any(open_calls) and wanted not in open_calls):
                named = f" {wanted!r}" if wanted else ""
                raise BadRowError(f"message {number}: a tool result{named} without its call{more}")
            open_calls.remove(wanted if wanted in open_calls else open_calls[0])


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise BadRowError(f"expected text, got {type(value).__name__}")
    return value


def read_json_text(text: str, what: str) -> Any:
    """The value of a text. Raises BadRowError, which begins with `what`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise BadRowError(f"{what}: no JSON: {getattr(error, 'msg', error)}: {text[:80]!r}") from error
    if problem := excess(value):
        raise BadRowError(f"{what}: it is {problem}")
    return value


# --- rows -------------------------------------------------------------------------------------------------------------


FORMS = "messages; conversations (ShareGPT); instruction and output (Alpaca); prompt and response"

FLAGS, WEIGHTS = ("train", "training", "loss"), ("weight", "loss_scale")
MARKS = (*FLAGS, *WEIGHTS)
"""The keys of a turn, and the columns of a row, that say whether it is trained, and with which weight."""

UNREAD_MAX = 40  # names of columns that are kept for a data set; a row may make names up
_COMMON = frozenset(("system", "tools", *MARKS))
_NAMES = frozenset(MARKS)
_READ = KEYS | _NAMES
_MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")


class WeightedConversation(NamedTuple):
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


def read_conversation(row: Any, *, keeps_parts: bool = False) -> WeightedConversation:
    """The conversation of a row. With `keeps_parts`, images and other parts that are not text stay in the messages.
    Raises BadRowError.

    >>> found = read_conversation({"instruction": "Add.", "input": "2 + 2", "output": "4"})
    >>> [(message.role, message.text) for message in found.messages], found.form
    ([('user', 'Add.\\n\\n2 + 2'), ('assistant', '4')], 'instruction, input and output (Alpaca)')
    """
    if not isinstance(row, TABLE):
        raise BadRowError(f"a row is a table of columns, got {type(row).__name__}")
    media = next((column for column in _MEDIA_COLUMNS if row.get(column)), None)
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
    return WeightedConversation(messages, tools, weights, given.form, frozenset(unread))


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
        value = read_json_text(value, f"the column {column}")
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
