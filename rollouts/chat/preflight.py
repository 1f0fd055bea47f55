"""Test what a chat template does to conversations, by rendering a few small ones.

`inspect_template` renders test conversations and returns a `TemplateReport`. `report.words()` describes it for people.
The report does not control how real conversations are rendered. `ChatFormat.extend` checks each real turn itself, so
the ids always match what the model saw, even if a template treats a real conversation differently.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from rollouts.chat.template_style import PROBE_NAME, PROBE_RESULT, PROBE_VALUE, USER, Prober, probe_call, tool_reply
from rollouts.chat.template_style import PROBE_TEXT as _TEXT
from rollouts.chat.template_style import PROBE_THOUGHT as _THOUGHT
from rollouts.chat.thoughts import ThoughtForm
from rollouts.types import Message, ToolCall

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Tokens that end a turn with a call in some templates (Llama's eom, harmony's call).
_CALL_CLOSERS = ("<|eom_id|>", "<|eot_id|>", "<|im_end|>", "<|call|>", "</s>")
_REPLY = Message("assistant", _TEXT)


class TemplateReport(msgspec.Struct, frozen=True):
    """What a template does.

    `append_only`: the text of earlier turns never changes. `adds_thinking`: a reply without a thought is shown with an
    empty one. `reads_thoughts`, `reads_calls`: what the template shows can be read out of a reply.
    `tool_after_text`: a tool message may follow an assistant message without a call; if not, a malformed call is
    answered by a user message. `plain`: the template shows text messages. `closes_turn`: one special token ends an
    assistant turn. `refusals`: sentences about what the template cannot show. `calls_as_text`: a chosen tool parser
    reads another format than the template writes, so calls stay text.
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
    reads_thoughts: bool = True
    reads_calls: bool = True
    refusals: list[str] = []
    calls_as_text: bool = False

    def words(self) -> list[str]:
        """One sentence for each relevant fact."""
        lines = []
        if self.append_only:
            lines.append("The template is append-only: one rollout is one segment.")
        if not self.closes_turn:
            lines.append("No single token ends an assistant turn in the template: every turn opens a new segment.")
        if self.rewrites_on_user_turn:
            lines.append("The template rewrites history at the next user turn: a new segment starts there.")
        if self.rewrites_on_tool_turn:
            lines.append("The template rewrites history after a tool call: a new segment starts there.")
        if self.drops_thinking:
            lines.append("The template drops the thinking of earlier turns: a turn that thinks ends its segment.")
        if self.adds_thinking:
            lines.append("The template adds an empty thought to a turn without one: such a turn ends its segment.")
        if not self.reads_thoughts:
            lines.append("The thoughts of this template are not read: they stay in the text of a reply.")
        lines += [f"The template cannot show everything: {reason}." for reason in self.refusals]
        if self.calls_as_text:
            lines.append("The tool parser reads another format than the template writes: a call is shown as text.")
        elif self.tools and not self.tool_after_text:
            lines.append("A malformed call is answered by a user message: a tool message must follow a call here.")
        if self.tools and not self.parallel_calls:
            lines.append("The template shows one tool call per turn; further calls are refused with a message.")
        if self.generation_masks:
            lines.append("The template marks the assistant's tokens; loss masks do not need these marks.")
        return lines


class Ends(NamedTuple):
    """The tokens that end an assistant turn. `after_text` and `after_call` are the usual ends of a reply that is the
    last message, if the template does not write them there: "" if it does, or if there is none.
    """

    tokens: list[str]
    after_text: str = ""
    after_call: str = ""


def find_ends(probe: Prober, added_tokens: Mapping[str, bool], eos: str | None) -> Ends:
    """The special tokens that end an assistant turn in this template. `added_tokens` says which of them are special.

    If the last message shows no end, the token behind it in the history ends it: the next role's token (GLM), or an end
    that only the history shows.
    """
    alone, before_user = probe(USER, _REPLY) or "", probe(USER, _REPLY, USER) or ""
    end = _token_behind(alone or before_user, _TEXT, added_tokens)
    after_text = "" if end or _TEXT not in alone else _token_behind(before_user, _TEXT, added_tokens)
    tokens = [token for token in (end or after_text,) if token]
    alone = probe(USER, probe_call(), tools=True) or ""
    text = probe(USER, probe_call(), tool_reply(), tools=True, prompt=True) or ""
    if PROBE_VALUE not in text or PROBE_RESULT not in text.rpartition(PROBE_VALUE)[2]:
        return Ends(tokens, after_text)
    known = {*tokens, *((eos,) if eos else ()), *_CALL_CLOSERS} & set(added_tokens)
    special = [token for token, is_special in added_tokens.items() if is_special]
    behind, shown = text.rpartition(PROBE_VALUE)[2], alone.rpartition(PROBE_VALUE)[2].rstrip()
    end = _first(known, shown) or ("" if after_text else _token_at_end(shown, special))
    implied = "" if end or not behind.startswith(shown) else _token_at_start(behind[len(shown) :], added_tokens)
    implied = implied or ("" if end else _first(known, behind.partition(PROBE_RESULT)[0]))
    tokens += [token for token in (end or implied,) if token and token not in tokens]
    return Ends(tokens, after_text, implied if PROBE_VALUE in alone else "")


def _token_at_end(text: str, tokens: Iterable[str]) -> str:
    """The token with which a text ends, or ""."""
    return max((token for token in tokens if token and text.rstrip().endswith(token)), key=len, default="")


def _first(tokens: Iterable[str], text: str) -> str:
    """The token that comes first in a text, or ""."""
    return min((token for token in tokens if token in text), key=text.find, default="")


def _token_behind(text: str, mark: str, added_tokens: Iterable[str]) -> str:
    """The added token that directly follows the last mark, or ""."""
    return _token_at_start(text.rpartition(mark)[2], added_tokens) if mark in text else ""


def _token_at_start(text: str, tokens: Iterable[str]) -> str:
    """The token with which a text begins, or ""."""
    return max((token for token in tokens if token and text.lstrip().startswith(token)), key=len, default="")


def inspect_template(
    probe: Prober, template_text: str, closers: Mapping[str, int], tool_refusal: str, thoughts: ThoughtForm
) -> TemplateReport:
    """Test the template. `tool_refusal` says why the template cannot show a tool conversation ("": it can)."""
    refusals = []

    def needed(what: str, *messages: Message) -> str | None:
        text = probe(*messages, prompt=True)
        if text is None:
            refusals.append(f"it refuses {what}: {probe.error}")
        return text

    plain = needed("a plain user message", Message("user", _TEXT))
    if plain is not None and _TEXT not in plain:
        refusals.append("it leaves out the text of a plain user message (it may need content in parts, as with images)")
    system = needed("a system message", Message("system", "be brief"), USER)
    if tool_refusal:
        refusals.append(tool_refusal)
    if probe.needs_tools:
        refusals.append("it refuses a conversation without tools")
    user_turn = needed("a second user turn", USER, _REPLY, USER)
    behind = _behind(probe(USER, prompt=True), user_turn)
    rewrites_user = user_turn is not None and not _is_closed(behind, closers, _TEXT)
    rewrites_tool = drops = tool_after_text = parallel = False
    if not tool_refusal:
        called = USER, probe_call(), tool_reply()
        after = probe(*called, tools=True, prompt=True)
        rewrites_tool = not _is_closed(_behind(probe(USER, tools=True, prompt=True), after), closers, PROBE_VALUE)
        both = probe(*called, _REPLY, USER, tools=True, prompt=True)
        # The tool turn, up to the tool's answer, must not change at the next user turn.
        stays = both is None or (after is not None and both.startswith(after.rpartition(PROBE_RESULT)[0]))
        rewrites_user = rewrites_user or not stays
        thinking = probe(USER, probe_call(reasoning=_THOUGHT), tool_reply(), tools=True, prompt=True)
        drops = thinking is not None and _THOUGHT not in thinking
        answered = probe(USER, _REPLY, tool_reply(), tools=True, prompt=True) or ""
        tool_after_text = _TEXT in answered and PROBE_RESULT in answered
        parallel = _shows_two_calls(probe)
    thought = probe(USER, Message("assistant", _TEXT, reasoning=_THOUGHT), USER, prompt=True)
    drops = drops or (thought is not None and _THOUGHT not in thought)
    return TemplateReport(
        append_only=not (rewrites_user or rewrites_tool or drops) and bool(closers),
        rewrites_on_user_turn=rewrites_user,
        rewrites_on_tool_turn=rewrites_tool,
        drops_thinking=drops,
        adds_thinking=thoughts.closes in behind.partition(_TEXT)[0],
        plain=plain is not None and _TEXT in plain,
        tools=not tool_refusal,
        tool_after_text=tool_after_text,
        parallel_calls=parallel,
        system=system is not None,
        generation_masks=_GENERATION.search(template_text) is not None,
        closes_turn=bool(closers),
        reads_thoughts=thoughts.is_read,
        refusals=refusals,
    )


def _behind(prompt: str | None, after: str | None) -> str:
    """The text after the prompt; "" if the conversation does not start with the prompt."""
    return after[len(prompt) :] if prompt is not None and after is not None and after.startswith(prompt) else ""


def _is_closed(text: str, closers: Mapping[str, int], mark: str) -> bool:
    """Whether a closing token follows the mark."""
    return any(token in text.partition(mark)[2] for token in closers)


def _shows_two_calls(probe: Prober) -> bool:
    second = ToolCall(PROBE_NAME, {"word": "second6173"}, "probe0002")
    answers = (tool_reply(), Message("tool", "another", tool_call_id=second.id, name=PROBE_NAME))
    both = Message("assistant", "", [*probe_call().tool_calls, second])
    text = probe(USER, both, *answers, tools=True, prompt=True) or ""
    return PROBE_VALUE in text and "second6173" in text
