"""Conversations as rows of tokens for supervised training: which turns are trained, and what is cut.

    rows, cut, lost = supervised_rows(read_conversation(row), chat, ChatOptions(turns="last", max_length=2048))

For many conversations: `plan_rows` of each, one `encode_rows` of all their texts, and `cut_rows` of each. Tokens and
masks are those of `rollouts.chat.masks`. Not here: files of prepared conversations (`prepared`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from rollouts.chat import masks
from rollouts.chat.format import ChatFormat
from rollouts.chat.masks import RowText, SupervisedRow, TurnsRow
from rollouts.data.conversations import THOUGHT, BadRowError, WeightedConversation
from rollouts.errors import ModelError
from rollouts.types import Message


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

    def plus(self, other: Cut) -> Cut:
        """Both together."""
        return Cut(*map(sum, zip(self, other, strict=True)))


class Planned(NamedTuple):
    """A conversation before it is encoded: its messages, the weight of each, its tools, and the texts of its rows."""

    messages: list[Message]
    weights: list[float]
    tools: list[dict[str, Any]]
    texts: list[RowText]

    def check(self, rows: Sequence[TurnsRow], chat: ChatFormat) -> list[str]:
        """The fields that are in none of the encoded rows. Raises ModelError if the masks are not shown to be right."""
        trained = masks.trained_turns(self.messages, self.weights)
        return masks.check_masks(self.messages, self.tools, chat, trained, self.texts, rows)


def supervised_rows(
    conversation: WeightedConversation, chat: ChatFormat, options: ChatOptions = _USUAL
) -> tuple[list[SupervisedRow], Cut, list[str]]:
    """The rows of a conversation with their weights [L], what was cut, and the fields of messages that are in no row.
    The list of rows is empty if all was cut.

    A turn has the weight of its message, else 1. With `turns="last"`, all turns but the last have weight 0. A reply
    before all other messages answers nothing: it is context. A row that is too long ends with its last whole turn. If
    no turn fits, a turn of text alone is cut inside; one with a tool call never is, so such a row is left out.

    Raises BadRowError for a conversation without a trained turn, and ModelError if the template refuses it.
    """
    planned = plan_rows(conversation, chat, options)
    encoded = masks.encode_rows(planned.texts, chat)
    lost = planned.check(encoded, chat)
    rows, cut = cut_rows(planned, encoded, options.max_length)
    return [row.masked(planned.weights) for row in rows], cut, lost


def plan_rows(conversation: WeightedConversation, chat: ChatFormat, options: ChatOptions = _USUAL) -> Planned:
    """The texts of a conversation's rows, and the weights of its messages. Raises as `supervised_rows` does."""
    messages, given = conversation.messages, conversation.weights
    if options.system and messages[0].role != "system":
        messages, given = [Message("system", options.system), *messages], [None, *given]
    if options.thinking == "drop":
        messages = [_without_thinking(message) for message in messages]
    messages = masks.thoughts_apart(messages, chat)
    spoken = [place for place, message in enumerate(messages) if message.role == "assistant"]
    begun = next((place for place, message in enumerate(messages) if message.role != "assistant"), len(messages))
    weights = [0.0] * len(messages)
    answers = spoken[begun:]
    for place in answers[-1:] if options.turns == "last" else answers:
        weight = given[place]
        weights[place] = 1.0 if weight is None else weight
    if not any(weights):
        if not spoken:
            raise BadRowError("no message is of the role assistant")
        marked = "marks of the turns or of the row say so, or they belong to a prompt"
        why = marked if answers else "the conversation begins with the assistant, and has no later turn of it"
        raise BadRowError(f"no turn of the assistant is trained: {why}")
    if any(message.tool_calls for message in messages) and not (chat.report.tools or chat.report.calls_as_text):
        raise BadRowError(
            f"the chat template cannot show its tool calls ({'; '.join(chat.report.refusals) or 'it leaves them out'})"
        )
    tools = conversation.tools or [dict(tool) for tool in options.tools]
    try:
        texts = masks.supervised_texts(messages, tools, chat, masks.trained_turns(messages, weights))
    except ModelError as error:
        if any(message.role != "system" for message in messages[: spoken[0]]):
            raise
        raise ModelError(f"the conversation begins with the assistant: {error}") from error
    return Planned(messages, weights, tools, texts)


def cut_rows(planned: Planned, rows: Sequence[TurnsRow], max_length: int | None) -> tuple[list[TurnsRow], Cut]:
    """The encoded rows of a conversation that train something, none longer than `max_length`, and what was cut."""
    found, cut = [], Cut()
    for row in rows:
        size, kept = len(row.tokens), _kept_length(row, planned.messages, max_length)
        if kept < size:
            turns = [(start, min(end, kept), place) for start, end, place in row.turns if start < kept]
            row = TurnsRow(row.tokens[:kept], turns)
        trains = any(planned.weights[place] for _, _, place in row.turns)
        if kept < size:
            cut = cut.plus(Cut(trains, not trains, size - kept * trains))
        if trains:  # a segment of turns that are not trained teaches nothing
            found.append(row)
    return found, cut


def _kept_length(row: TurnsRow, messages: Sequence[Message], max_length: int | None) -> int:
    """How many tokens of a row to keep."""
    if max_length is None or len(row.tokens) <= max_length:
        return len(row.tokens)
    whole = [end for _, end, _ in row.turns if end <= max_length]
    if whole:
        return whole[-1]
    can_cut = any(start < max_length and not messages[place].tool_calls for start, _, place in row.turns)
    return max_length if can_cut else 0


def _without_thinking(message: Message) -> Message:
    if message.role != "assistant":
        return message
    content = THOUGHT.sub("", message.content, count=1) if isinstance(message.content, str) else message.content
    return msgspec.structs.replace(message, reasoning=None, content=content)
