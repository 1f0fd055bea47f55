"""The form of messages that one chat template reads: converts a `Message` to a dict for the template.

Templates agree on the OpenAI shape but differ in details. Most read a call's arguments as a dict; DeepSeek's read a
string. Some show a call only if the content is None. Some read a thought as a part of the content, or ignore it.
`probe_template_style` tries the variants, and `TemplateStyle` records which one works. How the template then renders a
conversation is in `preflight`, and what surrounds a thought in `thoughts`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from rollouts.errors import ModelError
from rollouts.types import Message, ToolCall

Tools = Sequence[dict[str, Any]]
ThoughtPlace = Literal["key", "part", "inline"]
# (messages as template dicts, tools, generation_prompt) -> text; may raise any exception of the template
Render = Callable[[list[dict[str, Any]], Tools, bool], str]

# Nine letters and digits, as Mistral's templates require for a call's id.
PROBE_ID = "probe0001"
USER = Message("user", "hello")
PROBE_NAME = "probe_tool"
PROBE_VALUE = "probevalue7341"
PROBE_RESULT = "proberesult5820"
PROBE_TEXT = "probetext4096"
PROBE_THOUGHT = "probethought2048"
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": PROBE_NAME,
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}

_QUOTED = r"""('(?:[^'\\\n]|\\.)+'|"(?:[^"\\\n]|\\.)+")"""
_COMPARED = re.compile(
    rf"(?:startswith|endswith|split|find|replace|partition|strip)\(\s*{_QUOTED}|{_QUOTED}\s+(?:not\s+)?in\s"
)


class TemplateStyle(NamedTuple):
    """A template's variant: arguments as text; None for empty content beside a call; where it reads a thought (in
    `reasoning_content`, in a part of the content, or inline between `tags` in the content's text).
    """

    arguments_as_text: bool = False
    empty_content_none: bool = False
    thought: ThoughtPlace = "key"
    tags: tuple[str, str] = ("<think>", "</think>")


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
        opens, closes = style.tags
        if style.thought == "key":
            shown["reasoning_content"] = message.reasoning
        elif style.thought == "part":
            text = [{"type": "text", "text": message.text}] if message.text else []
            shown["content"] = [{"type": "thinking", "thinking": message.reasoning}, *text]
        else:
            shown["content"] = f"{opens}\n{message.reasoning}\n{closes}\n\n{message.text}"
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
    """Renders test conversations in one style. If the template raises, returns None and sets `error`. A template that
    cannot show the simplest conversation without tools always gets them.
    """

    def __init__(self, render: Render, style: TemplateStyle) -> None:
        self._render, self.style, self.error, self.needs_tools = render, style, "", False
        self.needs_tools = self(USER) is None and self(USER, tools=True) is not None

    def __call__(self, *messages: Message, tools: bool = False, prompt: bool = False) -> str | None:
        """The rendered text, or None if the template raises."""
        shown = [template_message(message, self.style) for message in messages]
        try:
            return self._render(shown, [PROBE_TOOL] if tools or self.needs_tools else [], prompt)
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
    return Prober(render, _with_thoughts(found, render, template_text)), reason


_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_CLOSING_TAG = re.compile(r"([<\[])/([\w:]*think\w*)([>\]])", re.IGNORECASE)


def _with_thoughts(style: TemplateStyle, render: Render, template_text: str) -> TemplateStyle:
    """The style in which the template shows a thought. A template that never shows one would drop it, so it is inline
    in the family's tags, unless the template drops it there too.
    """
    code = _COMMENT.sub("", template_text)
    tag = _CLOSING_TAG.search(code)
    if tag is not None and "</think>" not in code:
        style = style._replace(tags=("".join(tag.groups()), tag.group()))
    # A template that reads the key may show it under a condition only, such as an argument of the template.
    variants: tuple[ThoughtPlace, ...] = ("key",) if "reasoning_content" in code else ("key", "part", "inline")
    return next((each for place in variants if _shows(Prober(render, each := style._replace(thought=place)))), style)


def _shows(probe: Prober) -> bool:
    """Whether the template shows a thought in this style, once and not as JSON."""
    thinking = Message("assistant", PROBE_TEXT, reasoning=PROBE_THOUGHT)
    texts = (
        probe(USER, thinking),
        probe(USER, probe_call(reasoning=PROBE_THOUGHT), tool_reply(), tools=True),
        probe(USER, thinking, USER),
    )
    if probe.style.thought == "inline":  # in a mode without thinking, the template writes an empty thought itself
        closes, asked, reply = probe.style.tags[1], probe(USER) or "", texts[0] or ""
        return PROBE_THOUGHT in reply and reply.count(closes) == asked.count(closes) + 1
    shown = [text for text in texts if text is not None and PROBE_THOUGHT in text]
    return any(probe.style.thought == "key" or re.search(r"""['"]thinking['"]""", text) is None for text in shown)


def compared_literals(template: str) -> tuple[str, ...]:
    """The texts that a template looks for in messages.

    >>> compared_literals("{% if '</think>' in m.content and m.content.startswith('<tool') %}")
    ('</think>', '<tool')
    """
    found = {ast.literal_eval(one or other) for one, other in _COMPARED.findall(template)}
    return tuple(sorted(text for text in found if text.strip()))
