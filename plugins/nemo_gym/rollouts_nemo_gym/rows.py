"""The rows of a data set of NeMo Gym: the parameters of a request to OpenAI's Responses, and more for the server.

Parameters of sampling are not read: those of the run hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollouts import Message
from rollouts.bounds import call_arguments
from rollouts.errors import ConfigError
from rollouts.types import ToolCall

KEY = "responses_create_params"
RESERVED = ("verify", "seed_session", "close_session", "aggregate_metrics", "sandbox_access", "mcp")
ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
TEXTS = ("input_text", "output_text", "text")


class Row(NamedTuple):
    """A task. `whole` is the row as it is, `where` is its file and line."""

    id: str
    whole: dict[str, Any]
    messages: list[Message]
    tools: list[dict[str, Any]]
    where: str


def read_rows(flag: str, path: str) -> list[Row]:
    """The rows of a file. Raises ConfigError, which names the line."""
    found = list[Row]()
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{flag} {path}, line {number}"
            try:
                whole = msgspec.json.decode(line)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{where}: this is no JSON: {error}") from error
            found.append(_row(whole, where, f"{Path(path).stem}/{number}"))
    if not found:
        raise ConfigError(f"{flag} {path}: the file has no row")
    return found


def _row(whole: Any, where: str, name: str) -> Row:
    given = whole.get(KEY) if isinstance(whole, dict) else None
    if not isinstance(given, dict) or not given.get("input"):
        raise ConfigError(f"{where}: expected an object with {KEY}, which has an input")
    tools = given.get("tools") or []
    for each in tools:
        if each.get("type") != "function" or not isinstance(each.get("name"), str):
            raise ConfigError(f"{where}: the tool {json.dumps(each)[:80]} is no function, and cannot be served")
        if each["name"] in RESERVED or "/" in each["name"]:
            raise ConfigError(f"{where}: the model may not call {each['name']}, which is a request of the server's own")
    begin = [Message("system", given["instructions"])] if given.get("instructions") else []
    return Row(name, whole, [*begin, *_messages(given["input"], where)], tools, where)


def _messages(given: Any, where: str) -> Iterator[Message]:
    """The messages of an input: a text, or a list of items. Calls in a row belong to one message."""
    calls = dict[str, str]()
    waiting: Message | None = None
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        kind = item.get("type", "message") if isinstance(item, Mapping) else ""
        if kind == "function_call":
            call = _call(item, where)
            calls[call.id] = call.name
            waiting = waiting or Message("assistant")
            waiting = msgspec.structs.replace(waiting, tool_calls=[*waiting.tool_calls, call])
            continue
        message = _message(item, kind, calls, where)
        if waiting is not None:
            yield waiting
        waiting = message if message is not None and message.role == "assistant" else None
        if message is not None and waiting is None:
            yield message
    if waiting is not None:
        yield waiting


def _call(item: Mapping[str, Any], where: str) -> ToolCall:
    arguments = call_arguments(item.get("arguments"))
    if isinstance(arguments, str):
        raise ConfigError(f"{where}: the arguments of a function_call are no JSON object")
    return ToolCall(str(item.get("name")), arguments, id=str(item.get("call_id")))


def _message(item: Any, kind: str, calls: Mapping[str, str], where: str) -> Message | None:
    """A message of an item; None for one that the model does not read."""
    if kind == "reasoning":
        return None
    if kind == "function_call_output":
        identifier = str(item.get("call_id"))
        return Message("tool", _text(item.get("output"), where), tool_call_id=identifier, name=calls.get(identifier))
    if kind != "message" or item.get("role") not in ROLES:
        raise ConfigError(f"{where}: the input has {json.dumps(item)[:80]}, which cannot be served")
    return Message(ROLES[item["role"]], _text(item.get("content"), where))


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") not in TEXTS:
            raise ConfigError(f"{where}: the input has {json.dumps(part)[:80]}, and the model reads text only")
    return "\n".join(part["text"] for part in parts)
