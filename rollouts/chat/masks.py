"""Loss masks for supervised conversations: only the assistant's tokens are trained.

Rows are built like those of a rollout. The prompt is encoded. The assistant's text, with its closing token, is encoded
separately, as a model would sample it. The text after the closing token is encoded and appended. So templates need no
generation marks. If the template rewrites history, a new row starts. Each turn is trained in one row only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from rollouts.chat.control_tokens import plain
from rollouts.chat.format import ChatFormat, RenderedTurn
from rollouts.errors import ModelError
from rollouts.types import Message


class SupervisedRow(NamedTuple):
    """One row: `tokens` [L] and `loss_mask` [L], 1.0 on the assistant's tokens and their closing tokens, else 0.0."""

    tokens: list[int]
    loss_mask: list[float]


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
    turns = [place for place, message in enumerate(messages) if message.role == "assistant"]
    rows: list[SupervisedRow] = []
    open_row: SupervisedRow | None = None
    for place, next_place in zip(turns, [*turns[1:], None], strict=False):
        before, reply = messages[:place], messages[place]
        turn, missing = _turn_alone(before, reply, tools, chat)
        following = chat.find_turn(before, reply, messages[place + 1 : next_place], tools) if next_place else None
        if following is not None and not chat.same_message(plain(following.reply), plain(turn.reply), tools):
            following = None  # the history changes this turn (drops its thinking, for example), so its row ends here
        if following is not None:
            turn, missing = following, 0
        if open_row is None or missing:
            prompt = chat.render_marked(before, tools, True)
            tokens = chat.encode_marked(prompt[: len(prompt) - missing])
            open_row = SupervisedRow(tokens, [0.0] * len(tokens))
            rows.append(open_row)
        rest = chat.encode_marked(turn.rest)
        _append(open_row, [*chat.encode_marked(turn.reply), rest[0]], 1.0 if weights is None else weights[place])
        if following is None:
            open_row = None
        else:
            _append(open_row, rest[1:], 0.0)
    return rows


def _append(row: SupervisedRow, tokens: list[int], weight: float) -> None:
    row.tokens.extend(tokens)
    row.loss_mask.extend([weight] * len(tokens))


def _turn_alone(
    before: list[Message], reply: Message, tools: Sequence[dict[str, Any]], chat: ChatFormat
) -> tuple[RenderedTurn, int]:
    """The reply as the last message, which is the form that the model must write, and the number of characters of the
    prompt that this form drops.
    """
    prompt, whole = chat.render_pair(before, [reply], tools, False)
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
