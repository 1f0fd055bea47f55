"""Tool-call formats: from the text of a reply to a Message, never raising.

`transformers`' `parse_response` reads a reply first, with the response template that the tokenizer carries or the one
of its family here. It gives up (raises) on the first thing it cannot read and then says nothing of the rest, so a reply
with a malformed call, and Llama's several calls in one line, are read by the small parsers below, which keep the good
calls and say what is wrong with each bad one. Left out: checking arguments against a tool's schema
(`rollouts.env.schema`).

Families: `hermes` (`<tool_call>{json}</tool_call>`), `xml` (the same tags around `<function=name>`), `mistral`
(`[TOOL_CALLS][{json}]`), `llama3` (`{"name":…, "parameters":…}`, perhaps after `<|python_tag|>`), `json` (the same with
`arguments`, no tags at all).
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rollouts.types import Message, ToolCall

__all__ = ["FAMILIES", "Family", "Parsed", "detect_family", "parse_reply", "read_call"]


class Family(NamedTuple):
    """One tool-call format: response template, what opens a call, our own reader of calls, an example."""

    name: str
    response_template: dict[str, Any]
    opener: re.Pattern[str]
    read_calls: Callable[[str], list[ToolCall]]
    example: str
    needs_tools: bool = False  # a call looks like plain text: read it as one only where tools were offered
    casts: bool = False  # arguments are written without types: cast them by the tool's schema


class Parsed(NamedTuple):
    """A message, and whether rendering it again says the same in the same order (only the spelling may differ)."""

    message: Message
    faithful: bool


class _Unreadable(ValueError):
    """A call that cannot be read; the text says why."""


_THINK = re.compile(r"\s*<think>(.*?)(?:</think>\s*|\Z)", re.DOTALL)
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]*)"')
_CALL_KEYS = {"name", "arguments", "parameters", "id", "type", "function"}


def _response_template(calls: dict[str, Any]) -> dict[str, Any]:
    return {
        # Never found: the prefix that we pass begins inside the assistant's turn already.
        "start_anchor_pattern": r"(?!)",
        "defaults": {"role": "assistant"},
        "fields": {
            "reasoning_content": {"open_pattern": r"\A\s*<think>", "close_pattern": r"</think>\s*", "content": "text"},
            "tool_calls": calls,
            # Without `join`, text after a call would replace the text before it.
            "content": {"content": "text", "content_args": {"strip": False}, "repeats": True, "join": ""},
        },
    }


def _guess_name(text: str) -> str:
    found = _NAME.search(text)
    return found.group(1) if found else ""


def _strict_call(raw: Any) -> ToolCall:
    """One parsed JSON value as a call. Raises _Unreadable, in words for the model."""
    if not isinstance(raw, dict):
        raise _Unreadable(f"expected a JSON object with a name and arguments, got {json.dumps(raw)[:80]}")
    function = raw.get("function", raw)
    if not isinstance(function, dict):
        raise _Unreadable('"function" must be an object with a name and arguments')
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise _Unreadable('"name" is missing or is not text')
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise _Unreadable(f'"arguments" is not a JSON object: {error}') from None
    if not isinstance(arguments, dict):
        raise _Unreadable('"arguments" must be a JSON object')
    try:  # half of a surrogate pair can be spelt in JSON, but no tokenizer can encode it
        (name + json.dumps(arguments, ensure_ascii=False, allow_nan=False)).encode()
    except UnicodeEncodeError:
        raise _Unreadable("the call contains an incomplete \\u escape") from None
    except (ValueError, RecursionError):
        raise _Unreadable("a number that JSON does not have (NaN or Infinity), or too deep a nesting") from None
    identifier = raw.get("id")
    return ToolCall(name, arguments, identifier if isinstance(identifier, str) else "")


def read_call(raw: Any) -> ToolCall:
    """A call as a chat API gives it, its arguments JSON in a string; a malformed one carries its error.

    >>> read_call({"id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}})
    ToolCall(name='add', arguments={'a': 1}, id='c1')
    >>> read_call({"id": "c1", "function": {"name": "add", "arguments": "a=1"}}).id
    'c1'
    """
    try:
        return _strict_call(raw)
    except _Unreadable as error:
        raw = raw if isinstance(raw, dict) else {}
        function = raw.get("function")
        name, identifier = function.get("name") if isinstance(function, dict) else None, raw.get("id")
        return ToolCall(
            name if isinstance(name, str) else "",
            id=identifier if isinstance(identifier, str) else "",
            error=str(error),
        )


def _plainly_spelt(raw: Any) -> bool:
    """False where the model wrote more than a call's own keys, which rendering the call again would lose."""
    if not isinstance(raw, dict) or not set(raw) <= _CALL_KEYS:
        return False
    function = raw.get("function", raw)
    return set(function) <= _CALL_KEYS and not isinstance(function.get("arguments", function.get("parameters")), str)


def _json_call(body: str) -> ToolCall:
    """One call out of its JSON text; malformed ones carry their error."""
    try:
        return _strict_call(json.loads(body))
    except _Unreadable as error:
        return ToolCall(_guess_name(body), error=str(error))
    except (ValueError, RecursionError) as error:
        return ToolCall(_guess_name(body), error=f"not valid JSON: {error}")


def _tagged_bodies(text: str) -> list[str]:
    return re.findall(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", text, re.DOTALL)


def _read_hermes(text: str) -> list[ToolCall]:
    return [_json_call(body) for body in _tagged_bodies(text)]


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
            raw = json.loads(body)
        except (ValueError, RecursionError) as error:
            calls.append(ToolCall(_guess_name(body), error=f"not valid JSON: {error}"))
            continue
        calls.extend(_json_call(json.dumps(item)) for item in (raw if isinstance(raw, list) else [raw]))
    return calls


def _read_bare(text: str) -> list[ToolCall]:
    """Calls that stand one after another with `;`, a comma or white space between them (Llama 3 writes `;`)."""
    text = text.strip().removeprefix("<|python_tag|>").strip()
    calls: list[ToolCall] = []
    decoder = json.JSONDecoder()
    while text:
        try:
            raw, end = decoder.raw_decode(text)
        except (ValueError, RecursionError) as error:
            calls.append(ToolCall(_guess_name(text), error=f"not valid JSON: {error}"))
            break
        calls.extend(_json_call(json.dumps(item)) for item in (raw if isinstance(raw, list) else [raw]))
        text = text[end:].lstrip(" \t\r\n;,")
    return calls


# A bare object is a call only at the very start of the reply: further on it is prose about JSON.
_BARE_OPEN = r'\A\s*(?:<\|python_tag\|>\s*)?(?=\[?\s*\{\s*"(?:name|type|function|parameters|arguments)"\s*:)'
_JSON_EXAMPLE = '{"name": "tool_name", "%s": {"key": "value"}}'


def _bare(name: str, key: str) -> Family:
    template = _response_template({"open_pattern": _BARE_OPEN, "close_pattern": r"\Z", "content": "json"})
    opener = re.compile(_BARE_OPEN)
    return Family(name, template, opener, _read_bare, _JSON_EXAMPLE % key, needs_tools=True)


FAMILIES: dict[str, Family] = {
    "hermes": Family(
        "hermes",
        _response_template(
            {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json"}
        ),
        re.compile("<tool_call>"),
        _read_hermes,
        f"<tool_call>\n{_JSON_EXAMPLE % 'arguments'}\n</tool_call>",
    ),
    "xml": Family(
        "xml",
        _response_template(
            {
                "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                "close_pattern": r"</function>\s*</tool_call>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
                "transform": {"name": "{name}", "arguments": "{content}"},
            }
        ),
        re.compile("<tool_call>"),
        _read_xml,
        "<tool_call>\n<function=tool_name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>",
        casts=True,
    ),
    "mistral": Family(
        "mistral",
        _response_template({"open_pattern": r"\s*\[TOOL_CALLS\]", "close_pattern": r"\Z", "content": "json"}),
        re.compile(r"\[TOOL_CALLS\]"),
        _read_mistral,
        f"[TOOL_CALLS][{_JSON_EXAMPLE % 'arguments'}]",
    ),
    "llama3": _bare("llama3", "parameters"),
    "json": _bare("json", "arguments"),
}


def detect_family(rendered_call: str, template_text: str) -> str:
    """The name of the family: by how the template renders a call, else (it renders none) by its text."""
    for text in filter(None, (rendered_call, template_text)):
        if "<tool_call>" in text:
            return "xml" if "<function=" in text else "hermes"
        if "[TOOL_CALLS]" in text:
            return "mistral"
        if "<|python_tag|>" in text or ('"parameters"' in text and text is rendered_call):
            return "llama3"
        if text is rendered_call:
            return "json"
    return "json"


def parse_reply(
    text: str,
    family: Family,
    tools: Sequence[dict[str, Any]],
    *,
    parse_response: Callable[..., Any] | None = None,
    response_template: dict[str, Any] | None = None,
    prefix: str = "",
    thinking_prefix: str = "",
) -> Parsed:
    """Read one reply. Never raises.

    Args:
        text: what was sampled, without the stop token.
        family: its tool-call format.
        tools: the offered tools; without any, a family that has no marker of its own reads no calls.
        parse_response: the tokenizer's method; absent (an older or foreign tokenizer), our own parsers read everything.
        response_template: the tokenizer's own one, used in place of the family's with `prefix`, the generation prompt.
        thinking_prefix: what the generation prompt wrote of the thinking (`<think>\\n`), "" for nothing.
    """
    reasoning, visible = _split_thinking(thinking_prefix + text)
    # Most replies call nothing: they need no parser, and keep their white space.
    calls_possible = bool(tools) or not family.needs_tools
    opened = family.opener.search(visible) if calls_possible else None
    if opened is None and response_template is None:
        return Parsed(Message("assistant", visible, reasoning=reasoning or None), True)
    parsed = None
    if parse_response is not None:
        template = response_template or family.response_template
        lead = prefix if response_template else thinking_prefix
        casts = list(tools) if tools and (family.casts or response_template) else None
        try:
            parsed = parse_response(text, template, prefix=lead, tools=casts)
        # It raises ValueError, KeyError and others, by what a sampled text happens to contain; our own parser says why.
        except Exception:
            parsed = None
    if isinstance(parsed, dict):
        message = _from_response(parsed, text, family, opened is not None)
        if message is not None:
            return message
    if opened is None:
        return Parsed(Message("assistant", visible, reasoning=reasoning or None), True)
    return _own_reading(visible, reasoning, opened, family)


def _split_thinking(text: str) -> tuple[str, str]:
    found = _THINK.match(text)
    return (found.group(1).strip(), text[found.end() :]) if found else ("", text)


def _from_response(parsed: dict[str, Any], text: str, family: Family, expected: bool) -> Parsed | None:
    """transformers' dict as a Message; None where it holds something that is no call, or missed the calls."""
    raw_calls = parsed.get("tool_calls") or []
    if isinstance(raw_calls, dict):
        raw_calls = [raw_calls]
    if expected and not raw_calls:
        return None
    try:
        calls = [_strict_call(raw) for raw in raw_calls]
    except _Unreadable:
        return None
    if family.casts and text.count("</function>") < len(calls):
        return None  # cut off in the middle of its arguments; nothing else of this format would show it
    content = parsed.get("content") or ""
    reasoning = next((parsed[key] for key in ("reasoning_content", "thinking", "reasoning") if parsed.get(key)), None)
    if not isinstance(content, str) or not isinstance(reasoning, str | None):
        return None
    if calls and family.opener.search(content):
        return None  # an opening tag was left over in the text: a second call that was not read
    faithful = all(_plainly_spelt(raw) for raw in raw_calls) and _in_order(text, content, calls, family)
    content = content.strip() if calls else content
    return Parsed(Message("assistant", content, _with_ids(calls, text), reasoning=reasoning), faithful)


def _in_order(text: str, content: str, calls: list[ToolCall], family: Family) -> bool:
    """Whether all text stands before the first call, as templates render it."""
    opened = family.opener.search(text) if calls else None
    return opened is None or text[: opened.start()].rstrip().endswith(content.strip())


def _own_reading(visible: str, reasoning: str, opened: re.Match[str], family: Family) -> Parsed:
    calls = family.read_calls(visible[opened.start() :])
    calls = calls or [ToolCall("", error="the call is empty")]
    content = visible[: opened.start()].strip()
    malformed = any(call.error for call in calls)
    if malformed:
        # The raw text stays, so that the model is shown what it really wrote.
        content = visible
        calls = [call if call.error is None else _explained(call, family) for call in calls]
    message = Message("assistant", content, _with_ids(calls, visible), reasoning=reasoning or None)
    # Our parsers do not tell extra keys or text between calls apart; only the raw text is sure to be the same again.
    return Parsed(message, malformed)


def _explained(call: ToolCall, family: Family) -> ToolCall:
    words = f"The tool call could not be read: {call.error}. Write it like this:\n{family.example}"
    return ToolCall(call.name, {}, call.id, words)


def _with_ids(calls: list[ToolCall], text: str) -> list[ToolCall]:
    """Every call has an id: the model's own, else nine letters and digits (Mistral's rule) made from what was said."""
    seed = zlib.crc32(text.encode("utf-8", "replace"))
    made = [f"c{(seed + index) & 0xFFFFFFFF:08x}" for index in range(len(calls))]
    return [
        call if call.id else ToolCall(call.name, call.arguments, made[i], call.error) for i, call in enumerate(calls)
    ]
