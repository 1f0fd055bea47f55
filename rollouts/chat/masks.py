"""Loss masks for supervised conversations: only the assistant's tokens are trained.

Rows are built like those of a rollout. The prompt is encoded. The assistant's text, with its closing token, is encoded
separately, as a model would sample it. The text after the closing token is encoded and appended. So templates need no
generation marks. If the template rewrites history, a new row starts. Each turn is trained in one row only.

`supervised_texts` finds the texts of the rows, and `encode_rows` encodes those of many conversations at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple

from rollouts.chat.control_tokens import plain
from rollouts.chat.format import ChatFormat, RenderedTurn
from rollouts.errors import ModelError
from rollouts.types import Message

if TYPE_CHECKING:
    from rollouts.chat.incremental import Prefixes


class SupervisedRow(NamedTuple):
    """One row: `tokens` [L] and `loss_mask` [L], 1.0 on the assistant's tokens and their closing tokens, else 0.0."""

    tokens: list[int]
    loss_mask: list[float]


class TurnText(NamedTuple):
    """One turn of a row: the reply, the text from its closing token to the next turn, the id of the closing token, and
    the number of the message. Texts are marked (`ChatFormat.render_marked`).
    """

    reply: str
    rest: str
    closer: int
    place: int


class RowText(NamedTuple):
    """The texts of one row, marked: the beginning that other conversations may share, the rest of the prompt, and the
    turns. The row ends with the closing token of its last turn.
    """

    head: str
    prompt: str
    turns: list[TurnText]


class TurnsRow(NamedTuple):
    """One row: `tokens` [L], and the assistant's turns, each as its start, its end and the number of the message."""

    tokens: list[int]
    turns: list[tuple[int, int, int]]

    def masked(self, weights: Sequence[float] | None = None) -> SupervisedRow:
        """The row with its loss mask. `weights` has the weight of each message; None: each turn has 1.0."""
        mask = [0.0] * len(self.tokens)
        for start, end, place in self.turns:
            mask[start:end] = [1.0 if weights is None else weights[place]] * (end - start)
        return SupervisedRow(self.tokens, mask)


def tokenize_supervised(
    messages: list[Message],
    tools: Sequence[dict[str, Any]],
    chat: ChatFormat,
    weights: Sequence[float] | None = None,
) -> list[SupervisedRow]:
    """The rows of one conversation: one row if the template is append-only, else one per segment. `weights` has the
    weight of each message in place of 1.0; only those of the assistant count.

    Messages after the last assistant turn are left out. A conversation without an assistant turn has no rows. Raises
    ModelError if the template refuses the conversation or does not show a reply.
    """
    return [row.masked(weights) for row in encode_rows(supervised_texts(messages, tools, chat), chat)]


def supervised_texts(messages: list[Message], tools: Sequence[dict[str, Any]], chat: ChatFormat) -> list[RowText]:
    """The texts of the rows of one conversation, as `tokenize_supervised` has them. Raises ModelError as it does."""
    turns = [place for place, message in enumerate(messages) if message.role == "assistant"]
    if not turns:
        return []
    messages = messages[: turns[-1] + 1]
    asked = [each for place in turns for each in ((place, True), (place + 1, False))]
    texts = chat.prefixes(messages, tools, asked) or _Apart(messages, tools, chat)
    is_shared = bool(tools) or messages[0].role == "system"
    rows: list[RowText] = []
    is_open = False
    for place, next_place in zip(turns, [*turns[1:], None], strict=True):
        turn, missing = _turn_alone(texts, place, chat)
        following = chat.split_turn(*texts.pair(place, next_place, True)) if next_place else None
        if following is not None and following.reply != turn.reply:
            # The history may change this turn (drop its thinking, for example). Then its row ends here.
            is_same = chat.same_message(plain(following.reply), plain(turn.reply), tools)
            following = following if is_same else None
        if following is not None:
            turn, missing = following, 0
        if not is_open or missing:
            prompt = texts.text(place, True)
            prompt = prompt[: len(prompt) - missing]
            rows.append(RowText(*(chat.split_head(prompt) if is_shared else ("", prompt)), []))
        rows[-1].turns.append(TurnText(*turn, place))
        is_open = following is not None
    return rows


def encode_rows(rows: Sequence[RowText], chat: ChatFormat) -> list[TurnsRow]:
    """The rows as tokens, in one call of the tokenizer."""
    texts: list[str] = []
    cuts = frozenset(chat.cuts.values())
    for row in rows:
        texts.append(row.prompt)
        for turn in row.turns:
            texts += (turn.reply + turn.rest,) if turn.closer in cuts else (turn.reply, turn.rest)
    encoded = iter(chat.encode_all(texts))
    return [_encoded_row(row, encoded, cuts, chat) for row in rows]


def _encoded_row(row: RowText, encoded: Iterator[list[int]], cuts: Set[int], chat: ChatFormat) -> TurnsRow:
    tokens = [*chat.encode_head(row.head), *next(encoded)] if row.head else next(encoded)
    turns = []
    for turn in row.turns:
        ids = next(encoded)
        if turn.closer in cuts:
            size = ids.index(turn.closer) + 1
        else:
            size = len(ids) + 1
            ids += next(encoded)
        turns.append((len(tokens), len(tokens) + size, turn.place))
        tokens += ids if turn is not row.turns[-1] else ids[:size]
    return TurnsRow(tokens, turns)


class _Apart(NamedTuple):
    """`Prefixes` of a conversation for which each text has to be rendered."""

    messages: list[Message]
    tools: Sequence[dict[str, Any]]
    chat: ChatFormat

    def text(self, count: int, generation_prompt: bool) -> str:
        return self.chat.render_marked(self.messages[:count], self.tools, generation_prompt)

    def pair(self, before: int, count: int, generation_prompt: bool) -> tuple[str, str]:
        return self.chat.render_pair(self.messages[:before], self.messages[before:count], self.tools, generation_prompt)


def _turn_alone(texts: Prefixes | _Apart, place: int, chat: ChatFormat) -> tuple[RenderedTurn, int]:
    """The reply as the last message, which is the form that the model must write, and the number of characters of the
    prompt that this form drops.
    """
    prompt, whole = texts.pair(place, place + 1, False)
    # DeepSeek: the generation prompt opens a thought. A reply without a thought starts at the first difference of the
    # two texts.
    same = prompt if whole.startswith(prompt) else _common_start(prompt, whole, chat)
    turn = chat.split_turn(same, whole)
    if turn is None:
        raise ModelError(
            "the chat template does not end an assistant turn with a special token, so the model could not learn to "
            "stop; use a chat template that closes each turn (as `<|im_end|>` does)."
        )
    return turn, len(prompt) - len(same)


def _common_start(prompt: str, whole: str, chat: ChatFormat) -> str:
    """The common start of two texts, which does not end within a token of either: `<think>` and `<|call|>` both begin
    with `<`.
    """
    same = os.path.commonprefix([prompt, whole])  # noqa: RUF071
    tokens = [str(token) for token in chat.tokenizer.added_tokens_decoder.values()]
    before = -1
    while before != len(same):
        before = len(same)
        for token in tokens:
            for start in range(max(0, len(same) - len(token) + 1), len(same)):
                if prompt.startswith(token, start) or whole.startswith(token, start):
                    same = same[:start]
                    break
    return same
