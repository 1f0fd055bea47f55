"""Tool parsers: functions that read tool calls out of a reply's text. A run may choose one (`--tool-parser`).

A parser names `text`, and may name `tools`. It returns the calls and the remaining text. The core's own parsers read
the formats of `tool_call_formats`. Not here: the choice of a format by the chat template, the default (`format`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from rollouts.author_code import authors_code, shown
from rollouts.bounds import bounded_call
from rollouts.chat.template_style import PROBE_TOOL, probe_call
from rollouts.chat.thoughts import ThoughtForm
from rollouts.chat.tool_call_formats import (
    TOOL_CALL_FORMATS,
    UNREADABLE,
    Parsed,
    parse_reply,
    read_call,
    typed,
    with_ids,
)
from rollouts.error_log import report
from rollouts.errors import ConfigError, ModelError, RolloutsError, named, words_of
from rollouts.plugins.signature import call_with
from rollouts.types import Message, ToolCall

ParsedCalls = tuple[list[ToolCall], str]
"""The calls of a reply, and its remaining text."""


class ChosenParser(NamedTuple):
    """A chosen parser with its settings. `write`, if the parser has it, is a function of calls that returns the text
    that the parser reads: it shows calls that the model did not write, such as those of demonstrations.
    """

    name: str
    function: Callable[..., Any]
    settings: Mapping[str, Any]

    @property
    def write(self) -> Callable[[Sequence[ToolCall]], str] | None:
        """The parser's `write`, or None."""
        found: Callable[[Sequence[ToolCall]], str] | None = getattr(self.function, "write", None)
        return found

    def calls(self, text: str, tools: Sequence[dict[str, Any]]) -> ParsedCalls:
        """The calls in a text, and the remaining text. Raises what the parser raises, and TypeError for a result that
        is not a list of calls and a text.
        """
        returned = call_with(self.function, {"text": text, "tools": list(tools)}, self.settings)
        if not isinstance(returned, tuple | list) or len(returned) != 2 or not isinstance(returned[1], str):
            raise TypeError(f"it returned {shown(returned)}, expected (calls, text): a list of ToolCall, and a text")
        calls, rest = returned
        if not isinstance(calls, list | tuple) or not all(isinstance(each, ToolCall | Mapping) for each in calls):
            raise TypeError(f"it returned the calls {shown(calls)}, expected a list of ToolCall")
        return [bounded_call(each) if isinstance(each, ToolCall) else read_call(dict(each)) for each in calls], rest

    def parse(self, text: str, tools: Sequence[dict[str, Any]], thoughts: ThoughtForm, *, keeps_text: bool) -> Parsed:
        """Read one reply. Never raises: if the parser raises, the result is a malformed call with a text for the model.
        The parser reads nothing if no tools are offered. With `keeps_text`, the content is the whole text.
        """
        visible, reasoning = thoughts.split(text)
        calls, rest = list[ToolCall](), visible
        if tools:
            try:
                calls, rest = self.calls(visible, tools)
            except Exception as error:
                report(error, f"the tool parser {self.name}")
                calls = [ToolCall("", error=f"{UNREADABLE}{named(error)}")]
        is_raw = keeps_text or not calls or any(call.error for call in calls)
        content = visible if is_raw else rest.strip()
        calls = typed(_numbered(calls, visible) if keeps_text else with_ids(calls, visible), tools)
        return Parsed(Message("assistant", content, calls, reasoning=reasoning or None), is_raw)

    def as_text(self, message: Message) -> Message:
        """The message with its calls as text in the parser's format. Raises ModelError if there is no `write`."""
        if not message.tool_calls or any(call.error for call in message.tool_calls):
            return message
        content = message.text
        if list(message.tool_calls) != _numbered(message.tool_calls, content):  # the model did not write them here
            if self.write is None:
                raise ModelError(
                    f"the tool parser {self.name} reads another format than the chat template writes, so a call of "
                    f"{message.tool_calls[0].name} cannot be shown\n"
                    "give the parser a function `write`, which returns the text of a list of calls"
                )
            content += self.write(message.tool_calls)
        return msgspec.structs.replace(message, content=content, tool_calls=[])

    def check(self) -> None:
        """Raise ConfigError if the parser fails at a text without calls, or does not read what its `write` returns."""
        try:
            calls, _ = self.calls("A text without calls.", [PROBE_TOOL])
        except RolloutsError:
            raise
        except Exception as error:
            raise ConfigError(f"the tool parser {self.name} fails at plain text: {words_of(error)}") from error
        if calls:
            raise ConfigError(f"the tool parser {self.name} reads {shown(calls)} in plain text")
        if self.write is not None and self._reads(probe_call().tool_calls) != _meaning(probe_call().tool_calls):
            raise ConfigError(f"the tool parser {self.name} does not read the call that its own `write` returns")

    def _reads(self, calls: Sequence[ToolCall]) -> list[tuple[str, dict[str, Any]]]:
        """What the parser reads in the text that `write` returns for these calls."""
        assert self.write is not None, "checked by the caller"
        try:
            with authors_code():
                text = self.write(calls)
            return _meaning(self.calls(text, [PROBE_TOOL])[0])
        except Exception as error:
            raise ConfigError(f"the `write` of the tool parser {self.name} fails: {words_of(error)}") from error


def _meaning(calls: Sequence[ToolCall]) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, call.arguments) for call in calls]


def _numbered(calls: Sequence[ToolCall], text: str) -> list[ToolCall]:
    """The calls with ids that are computed from the text, so that `as_text` knows which text contains them."""
    return with_ids([msgspec.structs.replace(call, id="") for call in calls], text)


# --- the core's own ---------------------------------------------------------------------------------------------------


def hermes(text: str, tools: list[dict[str, Any]]) -> ParsedCalls:
    """Calls as JSON between the tags tool_call, as Hermes and Qwen write them."""
    return _read("hermes", text, tools)


def xml(text: str, tools: list[dict[str, Any]]) -> ParsedCalls:
    """Calls between the tags tool_call, function and parameter, as Qwen3-Coder writes them."""
    return _read("xml", text, tools)


def mistral(text: str, tools: list[dict[str, Any]]) -> ParsedCalls:
    """Calls as a JSON list behind [TOOL_CALLS], as Mistral writes them."""
    return _read("mistral", text, tools)


def llama3(text: str, tools: list[dict[str, Any]]) -> ParsedCalls:
    """Calls as JSON with a name and parameters, as Llama 3 writes them."""
    return _read("llama3", text, tools)


def json(text: str, tools: list[dict[str, Any]]) -> ParsedCalls:
    """Calls as JSON with a name and arguments, without tags."""
    return _read("json", text, tools)


def _read(name: str, text: str, tools: list[dict[str, Any]]) -> ParsedCalls:
    message = parse_reply(text, TOOL_CALL_FORMATS[name], tools).message
    return list(message.tool_calls), message.text
