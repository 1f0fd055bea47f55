"""Conversations as rows of tokens for supervised training: which turns are trained, and what is cut.

    rows, cut = supervised_rows(read_conversation(row), chat, ChatOptions(turns="last", max_length=2048))

Tokens and masks are those of `rollouts.chat.masks`. Not here: many conversations, and their files (`prepared`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from rollouts.chat.format import ChatFormat
from rollouts.chat.masks import SupervisedRow, tokenize_supervised
from rollouts.data.conversations import BadRowError, Conversation
from rollouts.types import Message

_THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)


class ChatOptions(NamedTuple):
    """How conversations become rows; the settings of `--data` have the same names. `tools` are those of conversations
    without tools of their own, and `system` is the system prompt of those without one.
    """

    turns: Literal["all", "last"] = "all"
    thinking: Literal["keep", "drop"] = "keep"
    max_length: int | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    system: str = ""


_USUAL = ChatOptions()


class Cut(NamedTuple):
    """What `max_length` cut off: rows that became shorter, rows that were left out, and the tokens of both."""

    rows: int = 0
    left_out: int = 0
    tokens: int = 0


def supervised_rows(
    conversation: Conversation, chat: ChatFormat, options: ChatOptions = _USUAL
) -> tuple[list[SupervisedRow], Cut]:
    """The rows of a conversation with their weights [L], and what was cut. The list is empty if all was cut.

    A turn has the weight of its message, else 1. With `turns="last"`, all turns but the last have weight 0. A row that
    is too long ends with its last whole turn. If no turn fits, a turn of text alone is cut inside; one with a tool call
    never is, so such a row is left out.

    Raises BadRowError for a conversation without a trained turn, and ModelError if the template refuses it.
    """
    messages = conversation.messages
    weights: Sequence[float | None] = conversation.weights
    if options.system and messages[0].role != "system":
        messages, weights = [Message("system", options.system), *messages], [None, *weights]
    if options.thinking == "drop":
        messages = [_without_thinking(message) for message in messages]
    spoken = [place for place, message in enumerate(messages) if message.role == "assistant"]
    trained = spoken[-1:] if options.turns == "last" else spoken
    # Each turn is tokenized with its number as its weight, so that the mask says where a turn begins and ends.
    weight_of: dict[float, float] = dict.fromkeys((0, *(place + 1 for place in spoken)), 0.0)
    weight_of |= {float(place + 1): 1.0 if (weight := weights[place]) is None else weight for place in trained}
    if not any(weight_of.values()):
        raise BadRowError("no turn of the assistant is trained" if spoken else "no message is of the role assistant")
    if any(message.tool_calls for message in messages) and not (chat.report.tools or chat.report.calls_as_text):
        raise BadRowError(
            f"the chat template cannot show its tool calls ({'; '.join(chat.report.refusals) or 'it leaves them out'})"
        )
    tools = conversation.tools or [dict(tool) for tool in options.tools]
    rows, cut = [], Cut()
    for tokens, turns in tokenize_supervised(messages, tools, chat, [float(n + 1) for n in range(len(messages))]):
        kept = _kept_length(turns, messages, options.max_length)
        row = SupervisedRow(tokens[:kept], list(map(weight_of.__getitem__, turns[:kept])))
        is_left_out = kept == 0 or (kept < len(tokens) and not any(row.loss_mask))
        cut = Cut(
            cut.rows + (kept < len(tokens) and not is_left_out),
            cut.left_out + is_left_out,
            cut.tokens + len(tokens) - (0 if is_left_out else kept),
        )
        if not is_left_out and any(row.loss_mask):  # a segment of turns that are not trained teaches nothing
            rows.append(row)
    return rows, cut


def _kept_length(turns: Sequence[float], messages: Sequence[Message], max_length: int | None) -> int:
    """How many tokens of a row to keep. `turns` has the number of the message of each token, from 1; 0: not a turn."""
    if max_length is None or len(turns) <= max_length:
        return len(turns)
    for end in range(max_length, 0, -1):
        if turns[end - 1] and turns[end] != turns[end - 1]:
            return end
    number = int(turns[max_length - 1])
    return max_length if number and not messages[number - 1].tool_calls else 0


def _without_thinking(message: Message) -> Message:
    if message.role != "assistant":
        return message
    content = _THOUGHT.sub("", message.content, count=1) if isinstance(message.content, str) else message.content
    return msgspec.structs.replace(message, reasoning=None, content=content)
