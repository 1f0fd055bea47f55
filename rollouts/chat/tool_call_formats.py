"""Tool-call formats: parse the text of a reply into a Message. Parsing never raises.

`parse_response` of transformers is tried first, with the tokenizer's own response template, or with that of a format
below. It raises an exception at the first part that it cannot read. So the small parsers below read replies with a
malformed call, and several calls in one line (Llama): they keep the valid calls and explain each malformed one.
Arguments are checked against a tool's schema elsewhere (`rollouts.env.schema`).

Formats: `hermes` (`<tool_call>{json}</tool_call>`), `xml` (the same tags around `<function=name>`), `mistral`
(`[TOOL_CALLS][{json}]`), `llama3` (`{"name":…, "parameters":…}`, optionally after `<|python_tag|>`), `json` (the same
with `arguments`, without tags).
"""

from __future__ import annotations

import contextlib
import json
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from rollouts.bounds import excess
from rollouts.types import Message, ToolCall


class ToolCallFormat(NamedTuple):
    """One tool-call format: its response template, the pattern that opens a call, our own parser, and an example."""

    name: str
    response_template: dict[str, Any]
    opener: re.Pattern[str]
    read_calls: Callable[[str], list[ToolCall]]
    example: str
    needs_tools: bool = False  # a call looks like plain text, so calls are read only if tools were offered
    casts: bool = False  # the format writes arguments without types; they come from the tool's schema


class Parsed(NamedTuple):
    """A message, and whether a template renders it to the same content in the same order (only spelling may differ)."""

    message: Message
    faithful: bool


UNREADABLE, EXAMPLE = "The tool call could not be read: ", ". Write it like this:"
"""The words around the reason, in the text for a model whose call is malformed. An example follows."""

_THINK = re.compile(r"\s*<think>(.*?)(?:</think>\s*|\Z)", re.DOTALL)
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]*)"')
_CALL_KEYS = {"name", "arguments", "parameters", "id", "type", "function"}


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
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return f'"arguments" is not a JSON object: {error}'
    if not isinstance(arguments, dict):
        return '"arguments" must be a JSON object'
    if problem := excess(arguments):
        return f'"arguments" is {problem}'
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
    """A call from a chat API, with its arguments as a JSON string. A malformed call has `error`.

    >>> read_call({"id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}})
    ToolCall(name='add', arguments={'a': 1}, id='c1', error=None)
    >>> read_call({"id": "c1", "function": {"name": "add", "arguments": "a=1"}}).id
    'c1'
    """
    call = _strict_call(raw)
    if isinstance(call, ToolCall):
        return call
    raw = raw if isinstance(raw, dict) else {}
    function = raw.get("function")
    name = function.get("name") if isinstance(function, dict) else ""
    return ToolCall(_text(name), id=_text(raw.get("id")), error=call)


def _plainly_spelt(raw: Any) -> bool:
    """False if the model wrote extra keys or string arguments, which a rendered call would lose."""
    if not isinstance(raw, dict) or not set(raw) <= _CALL_KEYS:
        return False
    function = raw.get("function", raw)
    return set(function) <= _CALL_KEYS and not isinstance(function.get("arguments", function.get("parameters")), str)


def _json_call(body: str) -> ToolCall:
    """One call from its JSON text. A malformed call has `error`."""
    try:
        call = _strict_call(json.loads(body))
    except (ValueError, RecursionError) as error:
        call = f"not valid JSON: {error}"
    if isinstance(call, ToolCall):
        return call
    guess = _NAME.search(body)
    return ToolCall(guess.group(1) if guess else "", error=call)


def _listed(raw: Any) -> list[ToolCall]:
    return [_json_call(json.dumps(item)) for item in (raw if isinstance(raw, list) else [raw])]


def _tagged_bodies(text: str) -> list[str]:
    return re.findall(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", text, re.DOTALL)


def _read_xml(text: str) -> list[ToolCall]:
    calls = []
    for body in _tagged_bodies(text):
        function = re.fullmatch(r"\s*<function=([^>\n]+)>(.*)</function>\s*", body, re.DOTALL)
        if function is None:
            guess = re.search(r"<function=([^>\n]+)", body)
            calls.append(ToolCall(guess.group(1) if guess else "", error="no <function=name>…</function> in the call"))
            continue
        pairs = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", function.group(2), re.DOTALL)
        calls.append(ToolCall(function.group(1).strip(), dict(pairs)))
    return calls


def _read_mistral(text: str) -> list[ToolCall]:
    calls: list[ToolCall] = []
    for body in text.split("[TOOL_CALLS]")[1:]:
        try:
            calls += _listed(json.loads(body))
        except (ValueError, RecursionError):
            calls.append(_json_call(body))  # a call with its `error`
    return calls


def _read_bare(text: str) -> list[ToolCall]:
    """Calls separated by `;`, commas or white space (Llama 3 writes `;`)."""
    text = text.strip().removeprefix("<|python_tag|>").strip()
    calls: list[ToolCall] = []
    while text:
        try:
            raw, end = json.JSONDecoder().raw_decode(text)
            calls += _listed(raw)
        except (ValueError, RecursionError):
            return [*calls, _json_call(text)]
        text = text[end:].lstrip(" \t\r\n;,")
    return calls


# A bare object is a call only at the start of the reply. Later in the text it is prose about JSON.
_BARE_OPEN = r'\A\s*(?:<\|python_tag\|>\s*)?(?=\[?\s*\{\s*"(?:name|type|function|parameters|arguments)"\s*:)'
_JSON_EXAMPLE = '{"name": "tool_name", "%s": {"key": "value"}}'


def _format(name: str, opener: str, calls: dict[str, Any], *reader: Any, **is_so: Any) -> ToolCallFormat:
    fields = {
        "reasoning_content": {"open_pattern": r"\A\s*<think>", "close_pattern": r"</think>\s*", "content": "text"},
        "tool_calls": calls,
        # Without `join`, the text after a call would replace the text before it.
        "content": {"content": "text", "content_args": {"strip": False}, "repeats": True, "join": ""},
    }
    # This start never matches, because `prefix` begins inside the assistant's turn.
    template = {"start_anchor_pattern": r"(?!)", "defaults": {"role": "assistant"}, "fields": fields}
    return ToolCallFormat(name, template, re.compile(opener), *reader, **is_so)


_BARE_CALLS = {"open_pattern": _BARE_OPEN, "close_pattern": r"\Z", "content": "json"}
_XML_CALLS = {
    "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    "close_pattern": r"</function>\s*</tool_call>",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
    "transform": {"name": "{name}", "arguments": "{content}"},
}
_FORMATS = (
    _format(
        "hermes",
        "<tool_call>",
        {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json"},
        lambda text: [_json_call(body) for body in _tagged_bodies(text)],
        f"<tool_call>\n{_JSON_EXAMPLE % 'arguments'}\n</tool_call>",
    ),
    _format(
        "xml",
        "<tool_call>",
        _XML_CALLS,
        _read_xml,
        "<tool_call>\n<function=tool_name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>",
        casts=True,
    ),
    _format(
        "mistral",
        r"\[TOOL_CALLS\]",
        {"open_pattern": r"\s*\[TOOL_CALLS\]", "close_pattern": r"\Z", "content": "json"},
        _read_mistral,
        f"[TOOL_CALLS][{_JSON_EXAMPLE % 'arguments'}]",
    ),
    _format("llama3", _BARE_OPEN, _BARE_CALLS, _read_bare, _JSON_EXAMPLE % "parameters", needs_tools=True),
    _format("json", _BARE_OPEN, _BARE_CALLS, _read_bare, _JSON_EXAMPLE % "arguments", needs_tools=True),
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


def split_thinking(text: str) -> tuple[str, str]:
    """The text behind the thinking, and the thinking.

    >>> split_thinking("<think>\\nTwo.\\n</think>\\n\\n2")
    ('2', 'Two.')
    """
    thought = _THINK.match(text)
    return (text, "") if thought is None else (text[thought.end() :], thought.group(1).strip())


def parse_reply(
    text: str,
    call_format: ToolCallFormat,
    tools: Sequence[dict[str, Any]],
    *,
    parse_response: Callable[..., Any] | None = None,
    response_template: dict[str, Any] | None = None,
    prefix: str = "",
    thinking_prefix: str = "",
) -> Parsed:
    """Read one reply. Never raises.

    Args:
        text: the sampled text, without the stop token.
        call_format: the model's tool-call format.
        tools: the offered tools. Without tools, a format that has no tags reads no calls.
        parse_response: the tokenizer's method. None (an older or foreign tokenizer): only our parsers are used.
        response_template: the tokenizer's own template. It replaces the format's template.
        prefix: the generation prompt, for `response_template`.
        thinking_prefix: the part of the generation prompt that opens the thinking (`<think>\\n`), or "".
    """
    visible, reasoning = split_thinking(thinking_prefix + text)
    # Most replies have no call. They need no parser and keep their white space.
    opened = call_format.opener.search(visible) if tools or not call_format.needs_tools else None
    if parse_response is not None and (opened or response_template):
        template, lead = call_format.response_template, thinking_prefix
        if response_template:
            template, lead = response_template, prefix
        casts = list(tools) if tools and (call_format.casts or response_template) else None
        # `parse_response` may raise any exception on a sampled text. The parser of this module then explains the
        # problem.
        read = None
        with contextlib.suppress(Exception):
            read = parse_response(text, template, prefix=lead, tools=casts)
        if (parsed := _from_response(read, text, call_format, opened is not None)) is not None:
            return parsed
    if opened is None:
        return Parsed(Message("assistant", visible, reasoning=reasoning or None), True)
    return _own_reading(visible, reasoning, opened, call_format)


def _from_response(parsed: Any, text: str, call_format: ToolCallFormat, expected: bool) -> Parsed | None:
    """The dict of transformers as a Message; None if a call is malformed or missing."""
    if not isinstance(parsed, dict):
        return None
    raw_calls = parsed.get("tool_calls") or []
    raw_calls = [raw_calls] if isinstance(raw_calls, dict) else raw_calls
    calls = [call for call in map(_strict_call, raw_calls) if isinstance(call, ToolCall)]
    if len(calls) < len(raw_calls) or (expected and not calls):
        return None
    if call_format.casts and text.count("</function>") < len(calls):
        return None  # a call was cut off inside its arguments, which only this count shows
    content = parsed.get("content") or ""
    reasoning = next((parsed[key] for key in ("reasoning_content", "thinking", "reasoning") if parsed.get(key)), None)
    if not isinstance(content, str) or not isinstance(reasoning, str | None):
        return None
    if calls and call_format.opener.search(content):
        return None  # an opening tag in the text: a second call was missed
    opened = call_format.opener.search(text) if calls else None
    # Templates render all text before the first call.
    in_order = opened is None or text[: opened.start()].rstrip().endswith(content.strip())
    content = content.strip() if calls else content
    message = Message("assistant", content, with_ids(calls, text), reasoning=reasoning)
    return Parsed(message, in_order and all(map(_plainly_spelt, raw_calls)))


def _own_reading(visible: str, reasoning: str, opened: re.Match[str], call_format: ToolCallFormat) -> Parsed:
    calls = call_format.read_calls(visible[opened.start() :]) or [ToolCall("", error="the call is empty")]
    content = visible[: opened.start()].strip()
    malformed = any(call.error for call in calls)
    if malformed:
        content = visible  # the model will read its own text unchanged
        calls = [_explained(call, call_format.example) if call.error else call for call in calls]
    message = Message("assistant", content, with_ids(calls, visible), reasoning=reasoning or None)
    # The parsers ignore extra keys and text between calls, so only raw text has all that the model wrote.
    return Parsed(message, malformed)


def _explained(call: ToolCall, example: str) -> ToolCall:
    return msgspec.structs.replace(call, error=f"{UNREADABLE}{call.error}{EXAMPLE}\n{example}")


def with_ids(calls: list[ToolCall], text: str) -> list[ToolCall]:
    """Calls with ids: the model's own, or nine letters and digits (Mistral's rule) computed from the text."""
    seed = zlib.crc32(text.encode("utf-8", "replace"))
    return [
        call if call.id else msgspec.structs.replace(call, id=f"c{(seed + index) & 0xFFFFFFFF:08x}")
        for index, call in enumerate(calls)
    ]
