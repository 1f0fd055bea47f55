"""The form of messages that one chat template reads: converts a `Message` to a dict for the template.

Templates agree on the OpenAI shape but differ in details. Most read a call's arguments as a dict; DeepSeek's read a
string. Some show a call only if the content is None. Some ignore reasoning. `probe_template_style` tries the variants,
and `TemplateStyle` records which one works. How the template then renders a conversation is in `preflight`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rollouts.errors import ModelError
from rollouts.types import Message, ToolCall

Tools = Sequence[dict[str, Any]]
# (messages as template dicts, tools, generation_prompt) -> text; may raise any exception of the template
Render = Callable[[list[dict[str, Any]], Tools, bool], str]

# Nine letters and digits, as Mistral's templates require for a call's id.
PROBE_ID = "probe0001"
USER = Message("user", "hello")
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


class TemplateStyle(NamedTuple):
    """A template's variant: arguments as text; None for empty content beside a call; reasoning inside the content."""

    arguments_as_text: bool = False
    empty_content_none: bool = False
    inline_reasoning: bool = False


def template_message(message: Message, style: TemplateStyle) -> dict[str, Any]:
    """The dict that the template reads for a message.

    A message with a malformed call has the model's whole text as its content, so its calls are left out. Parts of text
    are one text, because many templates print a list as Python does. Raises ModelError for a part that is not text.
    """
    for part in message.content if isinstance(message.content, list) else ():
        if part.get("type") != "text" or not isinstance(part.get("text", ""), str):
            kind, role = part.get("type"), message.role
            raise ModelError(f"a message of the role {role} has a part of type {kind!r}, and the model reads text only")
    shown: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.reasoning:
        if style.inline_reasoning:
            shown["content"] = f"<think>\n{message.reasoning}\n</think>\n\n{message.text}"
        else:
            shown["reasoning_content"] = message.reasoning
    if message.tool_calls and not any(call.error for call in message.tool_calls):
        shown["tool_calls"] = [_template_call(call, style.arguments_as_text) for call in message.tool_calls]
        if style.empty_content_none and not shown["content"]:
            shown["content"] = None
    # Empty keys are left out, because templates test `'tool_calls' in message`.
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        shown["name"] = message.name
    return shown


def _template_call(call: ToolCall, as_text: bool) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False) if as_text else call.arguments
    shown: dict[str, Any] = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    return {"id": call.id, **shown} if call.id else shown


def probe_call(content: str = "", reasoning: str | None = None) -> Message:
    """An assistant message with one call whose parts are easy to find in a rendered text."""
    call = ToolCall(PROBE_NAME, {"word": PROBE_VALUE}, PROBE_ID)
    return Message("assistant", content, [call], reasoning=reasoning)


def tool_reply() -> Message:
    """The tool's answer to `probe_call`."""
    return Message("tool", PROBE_RESULT, tool_call_id=PROBE_ID, name=PROBE_NAME)


class Prober:
    """Renders test conversations in one style. If the template raises, returns None and sets `error`."""

    def __init__(self, render: Render, style: TemplateStyle) -> None:
        self._render, self.style, self.error = render, style, ""

    def __call__(self, *messages: Message, tools: bool = False, prompt: bool = False) -> str | None:
        """The rendered text, or None if the template raises."""
        shown = [template_message(message, self.style) for message in messages]
        try:
            return self._render(shown, [PROBE_TOOL] if tools else [], prompt)
        except Exception as error:  # a template may raise anything
            self.error = str(error)
            return None


def probe_template_style(render: Render, template_text: str) -> tuple[Prober, str]:
    """A prober in the first style that renders a whole tool conversation, and "" or the reason why there is none."""
    reason = ""
    found = TemplateStyle()
    for style in (TemplateStyle(), TemplateStyle(True), TemplateStyle(False, True), TemplateStyle(True, True)):
        probe = Prober(render, style)
        text = probe(USER, probe_call(), tool_reply(), tools=True, prompt=True)
        # The tool's name may appear in the instructions; the value and the result appear nowhere else.
        if text is not None and all(part in text for part in (PROBE_NAME, PROBE_VALUE, PROBE_RESULT)):
            found, reason = style, ""
            break
        left_out = "it leaves the tool call or the tool's answer out of the text"
        reason = reason or (left_out if text is not None else f"it refuses a tool conversation: {probe.error}")
    # A template without thinking would drop a thought, so the thought stays in the content.
    alone = Prober(render, TemplateStyle())(USER, Message("assistant", "yes", reasoning="probethought"))
    is_inline = "</think>" not in template_text and alone is not None and "probethought" not in alone
    return Prober(render, found._replace(inline_reasoning=is_inline)), reason
