"""What a chat template does to a conversation, found out once by rendering a few small ones.

`inspect_template` renders probes and returns a `TemplateReport`; `report.words()` says it to people. Left out: any
decision per conversation. `ChatFormat.extend` checks each real turn by itself, so that a template that surprises these
probes still cannot make the ids differ from what the model saw.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from rollouts.chat.dialect import (
    PROBE_NAME,
    PROBE_RESULT,
    PROBE_TOOL,
    PROBE_VALUE,
    Dialect,
    Render,
    probe_call,
    template_message,
    tool_reply,
)
from rollouts.types import Message, ToolCall

__all__ = ["Prober", "TemplateReport", "find_closers", "inspect_template"]

_TEXT = "probetext4096"
_THOUGHT = "probethought2048"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Tokens that end a turn in some templates, though eos and the plain close are others (Llama's eom, harmony's call).
_CALL_CLOSERS = ("<|eom_id|>", "<|eot_id|>", "<|im_end|>", "<|call|>", "</s>")
_USER = Message("user", "hello")


class TemplateReport(msgspec.Struct, frozen=True):
    """What a template does.

    `append_only`: earlier turns never change, whatever follows. `adds_thinking`: a reply without
    a thought is shown with an empty one. `tool_after_text`: a tool message may follow an
    assistant message without a call (how a malformed call is answered); where False, answer it as the user. `plain`: it
    shows text messages at all. `closes_turn`: one special
    token ends an assistant turn. `refusals`: what it cannot show, in words.
    """

    append_only: bool
    rewrites_on_user_turn: bool
    rewrites_on_tool_turn: bool
    drops_thinking: bool
    adds_thinking: bool
    plain: bool
    tools: bool
    tool_after_text: bool
    parallel_calls: bool
    system: bool
    generation_masks: bool
    closes_turn: bool
    refusals: list[str] = []

    def words(self) -> list[str]:
        """One sentence for each thing that a person should know."""
        lines = []
        if self.append_only:
            lines.append("The template is append-only: one rollout is one segment.")
        if not self.closes_turn:
            lines.append("No single token ends an assistant turn in the template: every turn opens a new segment.")
        if self.rewrites_on_user_turn:
            lines.append("The template rewrites history at the next user turn: a new segment begins there.")
        if self.rewrites_on_tool_turn:
            lines.append("The template rewrites history after a tool call: a new segment begins there.")
        if self.drops_thinking:
            lines.append("The template drops the thinking of earlier turns: a turn that thinks ends its segment.")
        if self.adds_thinking:
            lines.append("The template adds an empty thought to a turn without one: such a turn ends its segment.")
        lines += [f"The template cannot show everything: {reason}." for reason in self.refusals]
        if self.tools and not self.tool_after_text:
            lines.append("A malformed call is answered by a user message: a tool message must follow a call here.")
        if self.tools and not self.parallel_calls:
            lines.append("The template shows one tool call a turn; further calls are refused with a message.")
        if self.generation_masks:
            lines.append("The template marks the assistant's tokens itself; loss masks do not need it.")
        return lines


class Prober:
    """Renders probes in one dialect; a refusal is None with its reason kept in `error`."""

    def __init__(self, render: Render, dialect: Dialect) -> None:
        self._render = render
        self._dialect = dialect
        self.error = ""

    def __call__(self, *messages: Message, tools: bool = False, prompt: bool = False) -> str | None:
        """The rendered text, or None where the template refuses."""
        shown = [template_message(message, self._dialect) for message in messages]
        try:
            return self._render(shown, [PROBE_TOOL] if tools else [], prompt)
        except Exception as error:  # a stranger's program: whatever it raises is its refusal
            self.error = str(error)
            return None


def find_closers(probe: Prober, added_tokens: Mapping[str, int], eos: str | None) -> dict[str, int]:
    """The special tokens that end an assistant turn in this template, text to id; empty where there is none.

    A token counts only if it stands right behind the reply both when the reply is last and when a user turn follows:
    otherwise it belongs to the next turn, or disappears from history.
    """
    closers: dict[str, int] = {}
    reply = Message("assistant", _TEXT)
    last, followed = probe(_USER, reply), probe(_USER, reply, _USER)
    behind = [_token_behind(text, _TEXT, added_tokens) for text in (last, followed) if text is not None]
    if behind and behind[0] is not None and len(set(behind)) == 1:
        closers[behind[0]] = added_tokens[behind[0]]
    text = probe(_USER, probe_call(), tool_reply(), tools=True, prompt=True)
    if text is not None and PROBE_VALUE in text and PROBE_RESULT in text.rpartition(PROBE_VALUE)[2]:
        stretch = text.rpartition(PROBE_VALUE)[2].partition(PROBE_RESULT)[0]
        known = {*closers, *((eos,) if eos else ()), *_CALL_CLOSERS}
        places = {token: stretch.find(token) for token in known if token in added_tokens and token in stretch}
        if places:
            first = min(places, key=lambda token: places[token])
            closers[first] = added_tokens[first]
    return closers


def _token_behind(text: str, mark: str, added_tokens: Mapping[str, int]) -> str | None:
    rest = text.rpartition(mark)[2].lstrip()
    return max((token for token in added_tokens if token and rest.startswith(token)), key=len, default=None)


def inspect_template(
    probe: Prober, template_text: str, closers: Mapping[str, int], tool_refusal: str
) -> TemplateReport:
    """Render the probes; `tool_refusal` says why a tool conversation cannot be shown ("": it can)."""
    refusals = []
    reply = Message("assistant", _TEXT)
    plain = probe(Message("user", _TEXT), prompt=True)
    if plain is None:
        refusals.append(f"it refuses a plain user message: {probe.error}")
    elif _TEXT not in plain:
        refusals.append("it leaves the text of a plain user message out (it may want content in parts, as with images)")
    system = probe(Message("system", "be brief"), _USER, prompt=True)
    if system is None:
        refusals.append(f"it refuses a system message: {probe.error}")
    tools = not tool_refusal
    if tool_refusal:
        refusals.append(tool_refusal)
    user_turn = probe(_USER, reply, _USER, prompt=True)
    if user_turn is None:
        refusals.append(f"it refuses a second user turn: {probe.error}")
    rewrites_user = user_turn is not None and not _appends(probe(_USER, prompt=True), user_turn, closers, _TEXT)
    rewrites_tool = drops = tool_after_text = parallel = False
    if tools:
        prompt = probe(_USER, tools=True, prompt=True)
        after = probe(_USER, probe_call(), tool_reply(), tools=True, prompt=True)
        rewrites_tool = not _appends(prompt, after, closers, PROBE_VALUE)
        both = [probe(_USER, probe_call(), tool_reply(), reply, _USER, tools=True, prompt=True), after]
        # The tool turn must also stay as it was once the user speaks again.
        rewrites_user = rewrites_user or (both[0] is not None and not _starts_like(both[0], after))
        thinking = probe(_USER, probe_call(reasoning=_THOUGHT), tool_reply(), tools=True, prompt=True)
        drops = thinking is not None and _THOUGHT not in thinking
        answered = probe(_USER, reply, tool_reply(), tools=True, prompt=True)
        tool_after_text = answered is not None and _TEXT in answered and PROBE_RESULT in answered
        parallel = _shows_two_calls(probe)
    thought = probe(_USER, Message("assistant", _TEXT, reasoning=_THOUGHT), _USER, prompt=True)
    drops = drops or (thought is not None and _THOUGHT not in thought)
    return TemplateReport(
        append_only=not (rewrites_user or rewrites_tool or drops) and bool(closers),
        rewrites_on_user_turn=rewrites_user,
        rewrites_on_tool_turn=rewrites_tool,
        drops_thinking=drops,
        adds_thinking=_adds_thinking(probe(_USER, prompt=True), user_turn),
        plain=plain is not None and _TEXT in plain,
        tools=tools,
        tool_after_text=tool_after_text,
        parallel_calls=parallel,
        system=system is not None,
        generation_masks=_GENERATION.search(template_text) is not None,
        closes_turn=bool(closers),
        refusals=refusals,
    )


def _appends(prompt: str | None, after: str | None, closers: Mapping[str, int], mark: str) -> bool:
    """Whether `after` is the prompt, a reply with the mark in it, a closing token and more."""
    if prompt is None or after is None or not after.startswith(prompt):
        return False
    rest = after[len(prompt) :].partition(mark)
    return bool(rest[1]) and any(token in rest[2] for token in closers)


def _adds_thinking(prompt: str | None, after: str | None) -> bool:
    """Whether a reply without a thought is shown with an empty one in history."""
    if prompt is None or after is None or not after.startswith(prompt):
        return False
    return "</think>" in after[len(prompt) :].partition(_TEXT)[0]


def _starts_like(longer: str, shorter: str | None) -> bool:
    """Whether the shorter conversation's text up to the tool's answer is where it was."""
    if shorter is None:
        return False
    head = shorter.rpartition(PROBE_RESULT)[0]
    return longer.startswith(head)


def _shows_two_calls(probe: Prober) -> bool:
    first = probe_call().tool_calls[0]
    second = ToolCall(PROBE_NAME, {"word": "second6173"}, "probe0002")
    answers = (tool_reply(), Message("tool", "another", tool_call_id="probe0002", name=PROBE_NAME))
    text = probe(_USER, Message("assistant", "", [first, second]), *answers, tools=True, prompt=True)
    return text is not None and PROBE_VALUE in text and "second6173" in text
