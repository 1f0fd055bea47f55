"""How one template wants its messages: our `Message` as the dict that a chat template reads.

Templates agree on the OpenAI shape, but not on its details: most want a call's arguments as a dict, DeepSeek's want a
string; some show a call only where the content is None; some know nothing of reasoning. `probe_dialect` tries, and
`Dialect` records what worked. Left out: what the template then does with a conversation (`preflight`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rollouts.types import Message, ToolCall

__all__ = [
    "PROBE_NAME",
    "PROBE_RESULT",
    "PROBE_TOOL",
    "PROBE_VALUE",
    "Dialect",
    "Render",
    "probe_call",
    "probe_dialect",
    "template_message",
    "tool_reply",
]

# (messages as template dicts, tools, generation_prompt) -> text; raises whatever the template raises
Render = Callable[[list[dict[str, Any]], Sequence[dict[str, Any]], bool], str]

# Nine letters and digits: what Mistral's templates demand of a call's id.
PROBE_ID = "probe0001"
PROBE_NAME = "probe_tool"
PROBE_VALUE = "probevalue7341"
PROBE_RESULT = "proberesult5820"
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": PROBE_NAME,
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


class Dialect(NamedTuple):
    """What a template wants: arguments as text, None for empty content beside a call, reasoning in the content."""

    arguments_as_text: bool = False
    empty_content_none: bool = False
    inline_reasoning: bool = False


def template_message(message: Message, dialect: Dialect) -> dict[str, Any]:
    """The dict that the template reads for a message.

    A message with a malformed call is shown as its raw text alone: its content is all that the model wrote, so that
    showing the calls as well would say them twice.
    """
    shown: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        if dialect.inline_reasoning:
            shown["content"] = f"<think>\n{message.reasoning}\n</think>\n\n{message.text}"
        else:
            shown["reasoning_content"] = message.reasoning
    if message.tool_calls and not any(call.error for call in message.tool_calls):
        shown["tool_calls"] = [_template_call(call, dialect) for call in message.tool_calls]
        if dialect.empty_content_none and not shown["content"]:
            shown["content"] = None
    # Keys are present only where there is something: templates ask `'tool_calls' in message`.
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        shown["name"] = message.name
    return shown


def _template_call(call: ToolCall, dialect: Dialect) -> dict[str, Any]:
    arguments: Any = call.arguments
    if dialect.arguments_as_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    shown: dict[str, Any] = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    return {"id": call.id, **shown} if call.id else shown


def probe_call(content: str = "", reasoning: str | None = None) -> Message:
    """An assistant message with one call, whose parts are easy to find in a rendered text."""
    call = ToolCall(PROBE_NAME, {"word": PROBE_VALUE}, PROBE_ID)
    return Message("assistant", content, [call], reasoning=reasoning)


def tool_reply() -> Message:
    """The tool's answer to `probe_call`."""
    return Message("tool", PROBE_RESULT, tool_call_id=PROBE_ID, name=PROBE_NAME)


def probe_dialect(render: Render, template_text: str) -> tuple[Dialect, str]:
    """The first dialect in which the template shows a whole tool conversation, and "" or why there is none."""
    reason = ""
    found = Dialect()
    shown_parts = (PROBE_NAME, PROBE_VALUE, PROBE_RESULT)
    for dialect in (Dialect(), Dialect(True), Dialect(False, True), Dialect(True, True)):
        messages = [Message("user", "hello"), probe_call(), tool_reply()]
        try:
            text = render([template_message(m, dialect) for m in messages], [PROBE_TOOL], True)
        # A template is a stranger's program: whatever it raises means that it refuses these messages.
        except Exception as error:
            reason = reason or f"it refuses a tool conversation: {error}"
            continue
        # The instructions may repeat the tool's name; the value and the result stand nowhere else.
        if all(part in text for part in shown_parts):
            found, reason = dialect, ""
            break
        reason = reason or "it leaves the tool call or the tool's answer out of the text"
    return found._replace(inline_reasoning=_wants_inline_reasoning(render, template_text)), reason


def _wants_inline_reasoning(render: Render, template_text: str) -> bool:
    """True where the template knows nothing of thinking, so that it would be lost unless it stays in the content."""
    if "</think>" in template_text:
        return False
    probe = Message("assistant", "yes", reasoning="probethought")
    try:
        text = render([{"role": "user", "content": "hello"}, template_message(probe, Dialect())], [], False)
    except Exception:  # refused either way: nothing to decide
        return False
    return "probethought" not in text
