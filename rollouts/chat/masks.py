"""Loss masks for supervised conversations: the assistant's tokens are trained, and nothing else.

Rows are built as a rollout's are: the prompt is encoded, the assistant's text (its closing token included) is encoded
by itself, as a model would have sampled it, and what follows is appended as ids of its own. So no template needs
generation marks. Where the template rewrites history, a new row begins, and each turn is trained in one row only. Left
out: batching.
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
    messages: list[Message], tools: Sequence[dict[str, Any]], chat: ChatFormat
) -> list[SupervisedRow]:
    """The rows of one conversation: one where the template is append-only, else one a segment; none without a reply.

    Messages after the last assistant turn are left out: nothing there is trained. Raises ModelError where the template
    refuses the conversation or does not show a reply.
    """
    turns = [place for place, message in enumerate(messages) if message.role == "assistant"]
    rows: list[SupervisedRow] = []
    open_row: SupervisedRow | None = None
    for place, next_place in zip(turns, [*turns[1:], None], strict=False):
        before, reply = messages[:place], messages[place]
        turn, missing = _turn_alone(before, reply, tools, chat)
        following = chat.find_turn(before, reply, messages[place + 1 : next_place], tools) if next_place else None
        if following is not None and not chat.same_message(plain(following.reply), plain(turn.reply), tools):
            following = None  # history shows it without its thinking, say: train it whole here, then begin anew
        if following is not None:
            turn, missing = following, 0
        if open_row is None or missing:
            prompt = chat.render_marked(before, tools, True)
            tokens = chat.encode_marked(prompt[: len(prompt) - missing])
            open_row = SupervisedRow(tokens, [0.0] * len(tokens))
            rows.append(open_row)
        rest = chat.encode_marked(turn.rest)
        _append(open_row, [*chat.encode_marked(turn.reply), rest[0]], 1.0)
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
    """The reply as the last message, which is how the model must write it, and how many characters of the prompt that
    came before it are not shown then.
    """
    prompt, whole = chat.render_pair(before, [reply], tools, False)
    # Where the generation prompt opens a thought, and this reply has none (DeepSeek), it begins where the two part.
    same = prompt if whole.startswith(prompt) else os.path.commonprefix([prompt, whole])  # noqa: RUF071
    turn = chat.split_turn(same, whole)
    if turn is None:
        raise ModelError(
            "the chat template ends an assistant turn with no special token, so that nothing could teach the model to "
            "stop; use a chat template that closes each turn (as `<|im_end|>` does)."
        )
    return turn, len(prompt) - len(same)
