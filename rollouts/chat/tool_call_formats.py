"""Tool-call formats: parse the text of a reply into a Message. Parsing never raises.

A format's reader finds the calls in a text. A malformed call has an error that explains it; all text outside the calls
is content. Arguments that were written as text get the types of the tool's schema. A tokenizer that brings a
`response_template` of its own is read by transformers' `parse_response` first. Arguments are checked against a tool's
schema elsewhere (`rollouts.env.schema`), and thoughts are read in `thoughts`.

Formats: `hermes` (`<tool_call>{json}</tool_call>`), `xml` (the same tags around `<function=name>`), `mistral`
(`[TOOL_CALLS][{json}]`), `llama3` (`{"name":…, "parameters":…}`, optionally after `<|python_tag|>`), `json` (the same
with `arguments`, without tags).
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import GenericAlias, MappingProxyType, NoneType
from typing import Any, Literal, NamedTuple, Union

import msgspec

from rollouts.bounds import CALL_JSON, call_arguments
from rollouts.chat.thoughts import THINK_TAGS, ThoughtForm
from rollouts.types import Message, ToolCall

Tools = Sequence[Mapping[str, Any]]


class FoundCalls(NamedTuple):
    """Calls at [start, end) of a text. `is_plain`: a template writes them so too, except for white space."""

    start: int
    end: int
    calls: list[ToolCall]
    is_plain: bool = True


class ToolCallFormat(NamedTuple):
    """One tool-call format: a function that finds its calls in a text, in order, an example, and the control tokens
    that the model writes around its calls.
    """

    name: str
    find_calls: Callable[[str, Tools], list[FoundCalls]]
    example: str
    tokens: str
    needs_tools: bool = False  # a call looks like plain text, so calls are read only if tools were offered
    words: Mapping[str, bool | None] = MappingProxyType({})  # texts of arguments that stand for a value


class Parsed(NamedTuple):
    """A message, and whether a template renders it to the same content in the same order (only spelling may differ)."""

    message: Message
    faithful: bool


UNREADABLE, EXAMPLE = "The tool call could not be read: ", ". Write it like this:"
"""The words around the reason, in the text for a model whose call is malformed. An example follows."""

_NAME = re.compile(r'"name"\s*:\s*"([^"\\]*)"')
_CALL_KEYS = {"name", "arguments", "parameters", "id", "type", "function"}
_SPACE = re.compile(r"\s*")
_JSON_CALLS = re.compile(r"\s*(?:\{|\[\s*(?:[{\]]|\Z))")
_SEPARATORS = re.compile(r"[\s;,]*")  # between calls: Llama 3 writes `;`


def _strict_call(raw: Any) -> ToolCall | str:
    """One parsed JSON value as a call; else a text for the model that says what is wrong."""
    if not isinstance(raw, dict):
        return f"expected a JSON object with a name and arguments, got {json.dumps(raw)[:80]}"
    function = raw.get("function", raw)
    if not isinstance(function, dict):
        return '"function" must be an object with a name and arguments'
    name = function.get("name")
    if not isinstance(name, str) or not name:
        return '"name" is missing or is not text'
    arguments = call_arguments(function.get("arguments", function.get("parameters")))
    if isinstance(arguments, str):
        return arguments
    try:  # JSON can contain half of a surrogate pair, but tokenizers cannot encode it
        (name + json.dumps(arguments, ensure_ascii=False, allow_nan=False)).encode()
    except UnicodeEncodeError:
        return "the call contains an incomplete \\u escape"
    except (ValueError, RecursionError):
        return "a number that JSON does not have (NaN or Infinity), or nesting that is too deep"
    return ToolCall(name, arguments, _text(raw.get("id")))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def read_call(raw: Any) -> ToolCall:
    """A call from JSON, as a chat API or a model writes it. A malformed call has `error`.

    >>> read_call({"id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}})
    ToolCall(name='add', arguments={'a': 1}, id='c1', error=None)
    >>> read_call({"id": "c1", "function": {"name": "stop", "arguments": None}}).arguments
    {}
    >>> read_call({"id": "c1", "function": {"name": "add", "arguments": "a=1"}}).id
    'c1'
    """
    call = _strict_call(raw)
    if isinstance(call, ToolCall):
        return call
    raw = raw if isinstance(raw, dict) else {}
    function = raw.get("function", raw)
    name = function.get("name") if isinstance(function, dict) else ""
    return ToolCall(_text(name), id=_text(raw.get("id")), error=call)


def _plainly_spelt(raw: Any) -> bool:
    """False if the model wrote extra keys or string arguments, which a rendered call would lose."""
    if not isinstance(raw, dict) or not set(raw) <= _CALL_KEYS:
        return False
    function = raw.get("function", raw)
    return set(function) <= _CALL_KEYS and not isinstance(function.get("arguments", function.get("parameters")), str)


def _json_call(body: str) -> ToolCall:
    """The call of a text that is not valid JSON, or has more than JSON, with its `error`."""
    try:
        CALL_JSON.decode(body)
        error = "not valid JSON"
    except (ValueError, RecursionError) as reason:
        error = f"not valid JSON: {reason}"
    guess = _NAME.search(body)
    return ToolCall(guess.group(1) if guess else "", error=error)


def _values(text: str, at: int) -> tuple[list[Any], int]:
    """The JSON objects and lists from `at` on, the items of a list one by one, and where they end. Raises ValueError or
    RecursionError at one that is not valid. JSON decides where a value ends: a tag inside a string belongs to it.
    """
    found, place = list[Any](), at
    while True:
        start = _SEPARATORS.match(text, place).end()  # type: ignore[union-attr]
        if place > at and text[start : start + 1] not in ("{", "["):
            return found, place
        value, size = CALL_JSON.raw_decode(text[start:])  # a copy, because an error counts all lines before it
        found += value if isinstance(value, list) else [value]
        place = start + size


# --- calls in tags ----------------------------------------------------------------------------------------------------

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_LINE_END = re.compile(r"[ \t]*(?:\n|\Z)")
_TAG_END = re.compile(r"\s*(?:</tool_call>|(?=<tool_call>)|\Z)")
_XML_OPEN = re.compile(r"\s*<function=([^>\n]+)>")
_XML_KEY = re.compile(r"<parameter=([^>\n]+)>")
_XML_END = re.compile(r"\s*</function>\s*(?:</tool_call>|(?=<tool_call>)|\Z)")
_XML_LAST = re.compile(rf"</parameter>(?={_XML_END.pattern})")  # the end tag of a call's last argument


def _find_tagged(text: str, read: Callable[[str, int, int], FoundCalls]) -> list[FoundCalls]:
    """The calls in tags. `read` gets the places of an opening tag and of its body."""
    found, at = list[FoundCalls](), 0
    while (start := text.find(_OPEN, at)) >= 0:
        at = start + len(_OPEN)
        body = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        if text.startswith(("{", "[", "<function="), body) or _is_closed(text, start):
            found.append(read(text, start, at))
            at = found[-1].end
    return found


def _is_closed(text: str, start: int) -> bool:
    """Whether an opening tag with another body opens a call, because the tags begin or end a line. A sentence that
    mentions them has words on both sides.
    """
    close, end = _body_end(text, start + len(_OPEN))
    begins_line = start == 0 or text[start - 1] == "\n" or text.endswith(_CLOSE, 0, start)
    return close < end and (begins_line or _LINE_END.match(text, end) is not None)


def _body_end(text: str, at: int) -> tuple[int, int]:
    """Where the body of a malformed call ends, and where its closing tag ends."""
    following = text.find(_OPEN, at)
    end = following if following >= 0 else len(text)
    close = text.find(_CLOSE, at, end)
    return (close, close + len(_CLOSE)) if close >= 0 else (end, end)


def _hermes_call(text: str, start: int, at: int) -> FoundCalls:
    """The call, or the calls, in a tag."""
    with contextlib.suppress(ValueError, RecursionError):  # explained below
        values, place = _values(text, at)
        if (end := _TAG_END.match(text, place)) is not None:
            is_plain = len(values) == 1 and _plainly_spelt(values[0])
            return FoundCalls(start, end.end(), [read_call(value) for value in values], is_plain)
    close, end_of_call = _body_end(text, at)
    return FoundCalls(start, end_of_call, [_json_call(text[at:close])])


def _xml_call(text: str, start: int, at: int) -> FoundCalls:
    opened, close = _XML_OPEN.match(text, at), _body_end(text, at)
    if opened is None:
        return FoundCalls(start, close[1], [ToolCall("", error="no <function=name>…</function> in the call")])
    name = opened.group(1).strip()
    arguments, place = _xml_arguments(text, opened.end())
    end = _XML_END.match(text, place)
    if isinstance(arguments, dict) and end is not None:
        return FoundCalls(start, end.end(), [ToolCall(name, arguments)])
    if isinstance(arguments, dict):
        got = text[place : max(place, close[0])].strip()[:60]
        arguments = f"expected <parameter=key>…</parameter> or </function>, got {got!r}"
    return FoundCalls(start, close[1], [ToolCall(name, error=arguments)])


def _xml_arguments(text: str, at: int) -> tuple[dict[str, Any] | str, int]:
    """The arguments from `at` on, as text, and where they end; or the reason why they cannot be read. Each ends at the
    last end tag before the next one, or before the end of the call.
    """
    arguments = dict[str, Any]()
    while (key := _XML_KEY.match(text, _SPACE.match(text, at).end())) is not None:  # type: ignore[union-attr]
        following = _XML_KEY.search(text, key.end())
        edge = following.start() if following is not None else len(text)
        last = _XML_LAST.search(text, key.end(), edge)
        if last is not None and _XML_END.match(text, last.end()) is not None:
            edge = last.end()
        value, tag, rest = text[key.end() : edge].rpartition("</parameter>")
        if not tag or rest.strip():
            return f"the parameter {key.group(1)!r} has no end tag </parameter>", at
        if key.group(1) in arguments:
            return f"the parameter {key.group(1)!r} is there twice", at
        arguments[key.group(1)] = value.removeprefix("\n").removesuffix("\n")
        at = edge - len(rest)
    return arguments, at


# --- other calls ------------------------------------------------------------------------------------------------------


def _find_mistral(text: str, tools: Tools) -> list[FoundCalls]:
    tag, found, at = "[TOOL_CALLS]", list[FoundCalls](), 0
    while (start := text.find(tag, at)) >= 0:
        at = start + len(tag)
        if _JSON_CALLS.match(text, at) is None:
            continue  # a sentence that mentions the tag
        try:
            values, end = _values(text, at)
            found.append(
                FoundCalls(start, end, [read_call(value) for value in values], all(map(_plainly_spelt, values)))
            )
        except (ValueError, RecursionError):
            following = text.find(tag, at)
            end = following if following >= 0 else len(text)
            found.append(FoundCalls(start, end, [_json_call(text[at:end])]))
        at = end
    return found


def _find_bare(text: str, tools: Tools) -> list[FoundCalls]:
    """Calls at the start of the reply; later in the text, JSON is prose about JSON. A JSON answer is no call: a call
    has a name and arguments, or is of a tool that takes none.
    """
    found, start = list[FoundCalls](), re.match(r"\s*(?:<\|python_tag\|>\s*)?", text).end()  # type: ignore[union-attr]
    at = start
    while text.startswith(("{", "["), at):
        try:
            raw, place = CALL_JSON.raw_decode(text, at)
        except (ValueError, RecursionError):
            if _means_call(text[at:], tools):
                found.append(FoundCalls(at, len(text), [_json_call(text[at:])]))
            break
        values = raw if isinstance(raw, list) else [raw]
        if not values or not all(_is_call(value, tools) for value in values):
            break
        place = _SEPARATORS.match(text, place).end()  # type: ignore[union-attr]
        found.append(FoundCalls(at, place, [read_call(value) for value in values], all(map(_plainly_spelt, values))))
        at = place
    return [found[0]._replace(start=0), *found[1:]] if found else []


def _is_call(value: Any, tools: Tools) -> bool:
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict):
        return False
    name = function.get("name")
    has_arguments = not function.keys().isdisjoint(("arguments", "parameters"))
    return isinstance(name, str) and name != "" and (has_arguments or name in _without_parameters(tools))


def _means_call(broken: str, tools: Tools) -> bool:
    """Whether a text that is not valid JSON is an attempt to call a tool."""
    name = _NAME.search(broken)
    is_offered = name is not None and any(name.group(1) == _function(tool).get("name") for tool in tools)
    return is_offered or (name is not None and re.search(r'"(?:arguments|parameters)"\s*:', broken) is not None)


def _without_parameters(tools: Tools) -> set[str]:
    functions = list(map(_function, tools))
    return {str(each["name"]) for each in functions if "name" in each and not _properties(each.get("parameters"))}


def _properties(schema: Any) -> Any:
    return schema.get("properties") if isinstance(schema, Mapping) else None


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, Mapping) else {}


_EXAMPLE = '{"name": "tool_name", "%s": {"key": "value"}}'
_FORMATS = (
    ToolCallFormat(
        "hermes",
        lambda text, tools: _find_tagged(text, _hermes_call),
        f"<tool_call>\n{_EXAMPLE % 'arguments'}\n</tool_call>",
        _OPEN + _CLOSE,
    ),
    ToolCallFormat(
        "xml",
        lambda text, tools: _find_tagged(text, _xml_call),
        "<tool_call>\n<function=tool_name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>",
        _OPEN + _CLOSE,
        # Templates write values as JSON does, or as Python does.
        words=MappingProxyType(
            {"null": None, "true": True, "false": False, "None": None, "True": True, "False": False}
        ),
    ),
    ToolCallFormat("mistral", _find_mistral, f"[TOOL_CALLS][{_EXAMPLE % 'arguments'}]", "[TOOL_CALLS]"),
    ToolCallFormat("llama3", _find_bare, _EXAMPLE % "parameters", "<|python_tag|>", needs_tools=True),
    ToolCallFormat("json", _find_bare, _EXAMPLE % "arguments", "<|python_tag|>", needs_tools=True),
)
TOOL_CALL_FORMATS: dict[str, ToolCallFormat] = {call_format.name: call_format for call_format in _FORMATS}


def detect_tool_call_format(rendered_call: str, template_text: str) -> str:
    """The name of the format, from a rendered call, or from the template's text if it renders no calls."""
    text = rendered_call or template_text
    if "<tool_call>" in text:
        return "xml" if "<function=" in text else "hermes"
    if "[TOOL_CALLS]" in text:
        return "mistral"
    return "llama3" if "<|python_tag|>" in text or '"parameters"' in rendered_call else "json"


def parse_reply(
    text: str,
    call_format: ToolCallFormat,
    tools: Tools,
    *,
    parse_response: Callable[..., Any] | None = None,
    response_template: Any = None,
    prefix: str = "",
    thoughts: ThoughtForm = THINK_TAGS,
) -> Parsed:
    """Read one reply. Never raises.

    Args:
        text: the sampled text, without the stop token.
        call_format: the model's tool-call format.
        tools: the offered tools. Without tools, a format that has no tags reads no calls.
        parse_response: the tokenizer's method, for `response_template`.
        response_template: the tokenizer's own template, which is tried first; None if it has none.
        prefix: the generation prompt, for `response_template`.
        thoughts: how the template writes thoughts.
    """
    visible, reasoning = thoughts.split(text)
    found = call_format.find_calls(visible, tools) if tools or not call_format.needs_tools else []
    if parse_response is not None and response_template is not None:
        read = None
        # `parse_response` may raise any exception on a sampled text. Then the text is read below.
        with contextlib.suppress(Exception):
            read = parse_response(text, response_template, prefix=prefix, tools=list(tools) or None)
        if (parsed := _from_response(read, visible, found, tools)) is not None:
            return parsed
    calls = [call for each in found for call in each.calls]
    if found and not calls:
        calls = [ToolCall("", error="the call is empty")]
    calls = typed(with_ids(calls, visible), tools, call_format.words)
    # A text without a call keeps its white space. A text with a malformed one stays as the model wrote it.
    if not calls or any(call.error for call in calls):
        calls = [_explained(call, call_format.example) for call in calls]
        return Parsed(Message("assistant", visible, calls, reasoning=reasoning or None), True)
    edges = [0, *(edge for each in found for edge in each[:2]), len(visible)]
    beside = [visible[a:b].strip() for a, b in zip(edges[::2], edges[1::2], strict=True)]
    content = "\n".join(filter(None, beside))
    message = Message("assistant", content, calls, reasoning=reasoning or None)
    # Templates render all text before the first call.
    return Parsed(message, content == beside[0] and all(each.is_plain for each in found))


def _from_response(parsed: Any, visible: str, found: Sequence[FoundCalls], tools: Tools) -> Parsed | None:
    """The dict of transformers as a Message; None if a call is malformed or missing."""
    if not isinstance(parsed, dict):
        return None
    raw_calls = parsed.get("tool_calls") or []
    raw_calls = [raw_calls] if isinstance(raw_calls, dict) else raw_calls
    calls = [call for call in map(_strict_call, raw_calls) if isinstance(call, ToolCall)]
    if len(calls) < max(len(raw_calls), sum(len(each.calls) for each in found)):
        return None
    content = parsed.get("content") or ""
    reasoning = next((parsed[key] for key in ("reasoning_content", "thinking", "reasoning") if parsed.get(key)), None)
    if not isinstance(content, str) or not isinstance(reasoning, str | None):
        return None
    in_order = not found or visible[: found[0].start].rstrip().endswith(content.strip())
    content = content.strip() if calls else content
    message = Message("assistant", content, typed(with_ids(calls, visible), tools), reasoning=reasoning)
    return Parsed(message, in_order and all(map(_plainly_spelt, raw_calls)))


def typed(
    calls: Sequence[ToolCall], tools: Tools, words: Mapping[str, bool | None] = MappingProxyType({})
) -> list[ToolCall]:
    """The calls, whose arguments that are text have the types of the tools' schemas: XML has only text, and some
    `words` stand for values.

    >>> parameters = {"properties": {"a": {"type": "integer"}}}
    >>> typed([ToolCall("add", {"a": "3"})], [{"function": {"name": "add", "parameters": parameters}}])[0].arguments
    {'a': 3}
    """
    schemas = {str(each.get("name")): each.get("parameters") for each in map(_function, tools)}
    return [
        msgspec.structs.replace(call, arguments=typed_arguments(schemas.get(call.name), call.arguments, words))
        if any(isinstance(value, str) for value in call.arguments.values())
        else call
        for call in calls
    ]


def _explained(call: ToolCall, example: str) -> ToolCall:
    if call.error is None:
        return call
    return msgspec.structs.replace(call, error=f"{UNREADABLE}{call.error}{EXAMPLE}\n{example}")


def with_ids(calls: list[ToolCall], text: str) -> list[ToolCall]:
    """Calls with ids: the model's own, or nine letters and digits (Mistral's rule) computed from the text."""
    seed = zlib.crc32(text.encode("utf-8", "replace"))
    return [
        call if call.id else msgspec.structs.replace(call, id=f"c{(seed + index) & 0xFFFFFFFF:08x}")
        for index, call in enumerate(calls)
    ]


# --- arguments --------------------------------------------------------------------------------------------------------


def typed_arguments(
    schema: Any, arguments: Mapping[str, Any], words: Mapping[str, bool | None] = MappingProxyType({})
) -> dict[str, Any]:
    """The arguments, in which a text has the type that a tool's JSON schema gives it. A text that the schema allows, or
    that does not fit, stays as it is. `words` are texts that stand for a value, if the schema allows this value.

    >>> typed_arguments({"properties": {"a": {"type": "integer"}}}, {"a": "3", "b": "3"})
    {'a': 3, 'b': '3'}
    """
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return dict(arguments)
    return {
        key: _typed(value, properties[key], words) if isinstance(value, str) and key in properties else value
        for key, value in arguments.items()
    }


def _typed(text: str, schema: Any, words: Mapping[str, bool | None]) -> Any:
    try:
        hint = _encoded_hint(msgspec.json.encode(schema))
        if text in words:
            with contextlib.suppress(msgspec.ValidationError):
                return msgspec.convert(words[text], hint)
        with contextlib.suppress(msgspec.ValidationError):
            return msgspec.convert(text, hint)
        value = converted_argument(text, hint)
        return text if isinstance(value, float) and not math.isfinite(value) else value  # JSON has no such number
    except (ValueError, TypeError, RecursionError):  # it does not fit, or a client's schema is none
        return text


@functools.lru_cache(maxsize=1024)
def _encoded_hint(schema: bytes) -> Any:
    return hint_of_schema(msgspec.json.decode(schema))


def converted_argument(value: Any, hint: Any) -> Any:
    """The value as its type. A text that does not fit may be a list or an object as JSON, or a template's None: XML
    formats of calls have only text.
    """
    try:
        return msgspec.convert(value, hint, strict=False)
    except msgspec.ValidationError:
        if value == "None":
            return msgspec.convert(None, hint)
        if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
            raise
        try:
            data = msgspec.json.decode(value)
        except msgspec.DecodeError:
            data = value
        return msgspec.convert(data, hint, strict=False)


def hint_of_schema(schema: Any) -> Any:
    """The type of the values that a JSON schema describes, as far as it is simple. Any: it is not checked."""
    if not isinstance(schema, dict) or "$ref" in schema or "allOf" in schema:
        return Any
    choices, kinds = schema.get("enum"), schema.get("type")
    options = schema.get("anyOf") or schema.get("oneOf")
    found: list[Any]
    if isinstance(choices, list) and choices:
        found = [Literal[tuple(choices)] if {type(each) for each in choices} <= {str, int, NoneType} else Any]
    elif isinstance(options, list):
        found = [hint_of_schema(option) for option in options]
    elif kinds == "array":
        found = [GenericAlias(list, (hint_of_schema(schema.get("items")),))]
    else:
        found = [_SIMPLE.get(str(kind), Any) for kind in (kinds if isinstance(kinds, list) else [kinds])]
    if Any in found or not found:
        return Any
    hint: Any = Union[tuple([*found, None] if schema.get("nullable") else found)]  # noqa: UP007
    try:
        msgspec.json.Decoder(hint)
    except TypeError:  # such as a union of two lists
        return Any
    return hint


_SIMPLE: Mapping[str, Any] = {
    "string": str, "integer": int, "number": int | float, "boolean": bool, "null": None, "array": list, "object": dict,
}  # fmt: skip
