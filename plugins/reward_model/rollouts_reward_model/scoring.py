"""Conversations to scores: the tokenizer's own chat template, batches by length, one forward pass for each batch."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rollouts.errors import ModelError, RewardError
from rollouts.types import Message, Trajectory
from rollouts_reward_model.loading import RewardModel


class Scored(NamedTuple):
    """The score of a conversation, and how many tokens of its beginning were left out. None: the chat template cannot
    show it, and `why` says so.
    """

    value: float | None
    cut: int = 0
    why: str = ""


def score_conversations(
    reward_model: RewardModel,
    conversations: Sequence[Sequence[Message]],
    *,
    tokens_per_batch: int = 2048,
    max_tokens: int | None = None,
    between: Callable[[], object] = lambda: None,
) -> list[Scored]:
    """The scores of these conversations, in their order. Raises RewardError if a score is not finite.

    Conversations of similar length share a forward pass, which has at most `tokens_per_batch` tokens, with padding; a
    longer conversation has one of its own. `between` is called before each pass; what it raises ends the scoring. The
    first conversation that is cut gives a warning; `reward_model` counts them.
    """
    limit = min((each for each in (reward_model.most_tokens, max_tokens) if each), default=None)
    with reward_model.lock:  # the chat format has a cache, and the model one padding id
        rows = [_row(reward_model, each, limit) for each in conversations]
        _count(reward_model, rows, limit)
    values: dict[int, float] = {}
    for chosen in _batches([len(row.ids) for row in rows], tokens_per_batch):
        between()
        with reward_model.lock:
            found = _forward(reward_model, [rows[place].ids for place in chosen])
        values |= dict(zip(chosen, found, strict=True))
    return [Scored(values.get(place), row.cut, row.why) for place, row in enumerate(rows)]


def compute_reward_model_score(reward_model: RewardModel, rollout: Any) -> float | None:
    """The score of one rollout: a `Trajectory`, a `Rollout` of `rollouts.primitives`, or a list of messages.

    None if the chat template cannot show the conversation. Raises RewardError if the score is not finite, or if
    `rollout` is none of these.
    """
    return score_conversations(reward_model, [_messages(rollout)])[0].value


def _batches(lengths: Sequence[int], tokens_max: int) -> list[list[int]]:
    """The places of rows that share a forward pass: rows of similar length, the longest first. Empty rows are in none.

    >>> _batches([3, 9, 4, 0, 4], 12)
    [[1], [2, 4, 0]]
    """
    batches: list[list[int]] = []
    for place in sorted((place for place, length in enumerate(lengths) if length), key=lambda place: -lengths[place]):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= tokens_max:
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches


class _Row(NamedTuple):
    ids: list[int]
    cut: int = 0
    why: str = ""


def _messages(rollout: Any) -> list[Message]:
    if isinstance(rollout, Trajectory):
        return rollout.messages
    if hasattr(rollout, "generation"):
        if rollout.conversation is not None:
            return list(rollout.conversation.messages)
        prompt = [Message("user", rollout.prompt)] if isinstance(rollout.prompt, str) else list(rollout.prompt)
        return [*prompt, Message("assistant", rollout.generation.text)]
    if isinstance(rollout, Sequence) and rollout and all(isinstance(each, Message) for each in rollout):
        return list(rollout)
    raise RewardError(
        f"a reward model scores a Trajectory, a Rollout or a list of Message, not {type(rollout).__name__}"
    )


def _row(reward_model: RewardModel, messages: Sequence[Message], limit: int | None) -> _Row:
    """The ids of a conversation, without its beginning if it is too long. A first token of the tokenizer stays."""
    chat = reward_model.chat
    try:
        ids = chat.encode_marked(chat.render_marked(list(messages), [], False))
    except ModelError as error:
        return _Row([], 0, f"the chat template of the reward model refuses it: {error}")
    if not ids:
        return _Row([], 0, "the chat template of the reward model shows nothing of it")
    if limit is None or len(ids) <= limit:
        return _Row(ids)
    firsts = (chat.tokenizer.bos_token_id, chat.tokenizer.cls_token_id)
    head = ids[:1] if limit > 1 and ids[0] in [each for each in firsts if each is not None] else []
    kept = [*head, *ids[len(ids) - limit + len(head) :]]
    return _Row(kept, len(ids) - len(kept))


def _forward(reward_model: RewardModel, rows: Sequence[Sequence[int]]) -> list[float]:
    """The scores of these ids, padded on the right and in one pass."""
    import torch

    model = reward_model.model
    config = model.config.get_text_config()
    given = config.pad_token_id
    pad = given if given is not None else _unused(rows)
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows], device=model.device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=model.device)
    config.pad_token_id = pad  # transformers finds a row's last token by it
    try:
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask).logits.float()
    finally:
        config.pad_token_id = given
    if reward_model.probability:
        logits = logits.sigmoid() if logits.shape[1] == 1 else logits.softmax(1)
    scores: list[float] = logits[:, reward_model.label].tolist()
    if not all(map(math.isfinite, scores)):
        words = f"the reward model {reward_model.name} gave a score that is not finite"
        raise RewardError(f"{words}; type --reward.reward_model.dtype float32")
    return scores


def _unused(rows: Sequence[Sequence[int]]) -> int:
    """An id that no row has, for a model without a padding token: no text can end with it."""
    present = {each for row in rows for each in row}
    return next(each for each in itertools.count() if each not in present)


def _count(reward_model: RewardModel, rows: Sequence[_Row], limit: int | None) -> None:
    cut = [row.cut for row in rows if row.cut]
    if cut and limit is not None and not reward_model.cut_count:
        warnings.warn(
            f"the reward model {reward_model.name} reads {limit} tokens, and a conversation has {limit + max(cut)}: "
            "the beginnings of longer ones are left out (reward_part/cut counts them)",
            stacklevel=3,
        )
    reward_model.cut_count += len(cut)
    reward_model.scored_count += len(rows)
