"""Conversations as tokens and masks, and supervised samples as padded tensors, for your own training loop.

    tokens, user_spans = tokenize_conversation(messages, tokenizer)
    loss_mask = compute_loss_mask(tokens, user_spans)

Not here: reading files and hubs. `run_sft_training` makes its own batches, without padding.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollouts.chat import ChatFormat, SupervisedRow
from rollouts.chat.format import chat_format
from rollouts.data.conversations import BadRowError, read_conversation
from rollouts.errors import ConfigError, ModelError, TrainingError
from rollouts.training.datasets.chat_rows import supervised_rows
from rollouts.training.loops.sft import take_batch
from rollouts.types import Sample

if TYPE_CHECKING:
    from torch import Tensor


TokenSpan = tuple[int, int]
"""Positions from the first number on, up to but without the second."""


def collate_batch(samples: Sequence[Sample], batch_size: int, step: int) -> dict[str, Tensor]:
    """Make the batch of a step with `prepare_sft_batch`, from the next `batch_size` samples.

    Raises TrainingError if there are no samples.
    """
    if not samples or batch_size < 1:
        what = f"a batch of {batch_size} cannot be taken from {len(samples)} samples"
        raise TrainingError(f"{what}; give 1 or more of each")
    return prepare_sft_batch(take_batch(samples, batch_size, step))


def prepare_sft_batch(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """`input_ids` and `labels` [B, L] int64 and `loss_mask` [B, L] float32, padded with 0 on the right.

    Labels are the token ids, not shifted, as transformers expects them. The mask is 0 on padding, so a loss needs no
    other mask. Raises TrainingError for a sample whose mask and tokens differ in length.

    >>> prepare_sft_batch([Sample(tokens=[5, 6, 7], loss_mask=[0, 1, 1]), Sample(tokens=[5], loss_mask=[0])])["labels"]
    tensor([[5, 6, 7],
            [5, 0, 0]])
    """
    import torch

    for number, sample in enumerate(samples):
        if len(sample.tokens) != len(sample.loss_mask):
            lengths = f"{len(sample.tokens)} tokens and {len(sample.loss_mask)} mask entries"
            raise TrainingError(f"sample {number} has {lengths}; it needs one for each")
    width = max((len(sample.tokens) for sample in samples), default=0)
    input_ids = torch.zeros(len(samples), width, dtype=torch.int64)
    loss_mask = torch.zeros(len(samples), width)
    for row, sample in enumerate(samples):
        input_ids[row, : len(sample.tokens)] = torch.tensor(sample.tokens, dtype=torch.int64)
        loss_mask[row, : len(sample.tokens)] = torch.as_tensor(sample.loss_mask, dtype=torch.float32)
    return {"input_ids": input_ids, "labels": input_ids.clone(), "loss_mask": loss_mask}


def tokenize_conversation(
    messages: Sequence[Any],
    tokenizer: Any,
    max_length: int | None = None,
    tools: Sequence[dict[str, Any]] = (),
) -> tuple[list[int], list[TokenSpan]]:
    """The tokens [L] of a conversation, and the spans that are not trained: all that the assistant did not write.

    Messages are `rollouts.Message` or dicts with `role` and `content`. `max_length` cuts the tokens off.

    Raises ModelError if the chat template rewrites earlier turns, so that the conversation is no single sequence;
    ConfigError if the messages have no assistant turn, or are no messages; TrainingError if no trained token is left.
    """
    rows = supervised_rows_of(
        {"messages": list(messages), "tools": list(tools)}, chat_format(tokenizer), "the conversation"
    )
    if len(rows) > 1:
        raise ModelError(
            f"the chat template rewrites earlier turns, so this conversation is {len(rows)} rows; use "
            "load_sft_dataset or rollouts.chat.tokenize_supervised, which return all of them"
        )
    tokens, mask = cut_row(rows[0], max_length, "the conversation")
    edges = [0, *(at for at in range(1, len(mask)) if (mask[at] > 0) != (mask[at - 1] > 0)), len(mask)]
    return tokens, [(start, end) for start, end in itertools.pairwise(edges) if mask[start] == 0]


def compute_loss_mask(tokens: Sequence[int], user_spans: Iterable[TokenSpan]) -> list[float]:
    """0.0 inside of the spans, 1.0 elsewhere [L]. Raises TrainingError for a span outside of the tokens.

    >>> compute_loss_mask([5, 6, 7, 8], [(0, 2), (3, 4)])
    [0.0, 0.0, 1.0, 0.0]
    """
    mask = [1.0] * len(tokens)
    for start, end in user_spans:
        if not 0 <= start <= end <= len(tokens):
            raise TrainingError(f"the span {(start, end)} is not inside of {len(tokens)} tokens")
        mask[start:end] = [0.0] * (end - start)
    return mask


def supervised_rows_of(row: Mapping[str, Any], chat: ChatFormat, place: str) -> list[SupervisedRow]:
    """The rows of `rollouts sft`, at least one. Raises ConfigError, ModelError."""
    try:
        return supervised_rows(read_conversation(row), chat)[0]
    except BadRowError as error:
        raise ConfigError(f"{place}: {error}") from error


def cut_row(row: SupervisedRow, max_length: int | None, place: str) -> SupervisedRow:
    """The first `max_length` tokens. Raises TrainingError if none of them is trained."""
    if max_length is not None and max_length < 1:
        raise ConfigError(f"max_length is {max_length}; expected 1 or more, or None")
    tokens, mask = row.tokens[:max_length], row.loss_mask[:max_length]
    if not any(mask):
        cut = "" if max_length is None else f" within max_length {max_length}; give a larger one, or leave it out"
        raise TrainingError(f"{place} has no trained token{cut}")
    return SupervisedRow(tokens, mask)
