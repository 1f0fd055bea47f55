"""Datasets and conversations as samples, and samples as padded tensors, for your own training loop.

    samples = load_sft_dataset("conversations.jsonl", tokenizer, max_length=2048)

    tokens, user_spans = tokenize_conversation(messages, tokenizer)
    loss_mask = compute_loss_mask(tokens, user_spans)

The tokens and the mask are those of `rollouts sft`. `run_sft_training` makes its own batches, without padding. Not
here: reading a dataset piece by piece.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollouts.chat import SupervisedRow
from rollouts.chat.format import chat_format
from rollouts.data.conversations import BadRowError, read_conversation
from rollouts.data.loaders import OF_FILES, NotARow
from rollouts.data.source import open_rows
from rollouts.errors import ConfigError, ModelError, TrainingError
from rollouts.training.datasets.chat_rows import supervised_rows
from rollouts.training.loops.sft import take_batch
from rollouts.types import Sample

if TYPE_CHECKING:
    from torch import Tensor

TokenSpan = tuple[int, int]
"""Positions from the first number on, up to but without the second."""

DATASET_KEYS = ("dataset_id", "split", "num_samples")
"""The keys of a dataset that is given as a dict or an object."""


# --- batches ----------------------------------------------------------------------------------------------------------


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
    input_ids, loss_mask = torch.zeros(len(samples), width, dtype=torch.int64), torch.zeros(len(samples), width)
    for row, sample in enumerate(samples):
        input_ids[row, : len(sample.tokens)] = torch.as_tensor(sample.tokens)
        loss_mask[row, : len(sample.tokens)] = torch.as_tensor(sample.loss_mask)
    return {"input_ids": input_ids, "labels": input_ids.clone(), "loss_mask": loss_mask}


def compute_advantages(rewards: Sequence[float], baseline: float = 0.0) -> list[float]:
    """Each reward minus the baseline. `rollouts.training.algorithms.advantages` has advantages that compare groups.

    >>> compute_advantages([1.0, 0.0], baseline=0.5)
    [0.5, -0.5]
    """
    return [reward - baseline for reward in rewards]


# --- conversations ----------------------------------------------------------------------------------------------------


def tokenize_conversation(
    messages: Sequence[Any], tokenizer: Any, max_length: int | None = None, tools: Sequence[dict[str, Any]] = ()
) -> tuple[list[int], list[TokenSpan]]:
    """The tokens [L] of a conversation, and the spans that are not trained: all that the assistant did not write.

    Messages are `rollouts.Message` or dicts with `role` and `content`. `max_length` cuts the tokens off.

    Raises ModelError if the chat template rewrites earlier turns, so that the conversation is no single sequence;
    ConfigError if the messages have no assistant turn, or are no messages; TrainingError if no trained token is left.
    """
    rows = _rows_of({"messages": list(messages), "tools": list(tools)}, tokenizer, "the conversation")
    if len(rows) > 1:
        raise ModelError(
            f"the chat template rewrites earlier turns, so this conversation is {len(rows)} rows; use "
            "load_sft_dataset or rollouts.chat.tokenize_supervised, which return all of them"
        )
    tokens, mask = _cut(rows[0], max_length, "the conversation")
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


def _rows_of(row: Mapping[str, Any], tokenizer: Any, place: str) -> list[SupervisedRow]:
    """The rows of `rollouts sft`, at least one. Raises ConfigError, ModelError."""
    try:
        return supervised_rows(read_conversation(row), chat_format(tokenizer))[0]
    except BadRowError as error:
        raise ConfigError(f"{place}: {error}") from error


def _cut(row: SupervisedRow, max_length: int | None, place: str) -> SupervisedRow:
    """The first `max_length` tokens. Raises TrainingError if none of them is trained."""
    if max_length is not None and max_length < 1:
        raise ConfigError(f"max_length is {max_length}; expected 1 or more, or None")
    cut = SupervisedRow(row.tokens[:max_length], row.loss_mask[:max_length])
    if not any(cut.loss_mask):
        within = "" if max_length is None else f" within max_length {max_length}; give a larger one, or leave it out"
        raise TrainingError(f"{place} has no trained token{within}")
    return cut


# --- datasets ---------------------------------------------------------------------------------------------------------


def load_dataset(dataset: Any, *, split: str = "train", num_samples: int | None = None) -> list[Sample]:
    """The rows of a dataset as samples with a prompt and a response; other keys of a row become metadata.

    A row's prompt is `prompt`, `question` or `messages`; its response is `response` or `completion`.

    Raises ConfigError, with the row.

    Args:
        dataset: a file or a folder that `--data` reads (.jsonl, .json, .csv, .parquet, ...); the name of a dataset on
            the hub, as `name` or `name:config`; or a dict or an object with `dataset_id`, and optionally `split` and
            `num_samples`
        split: of a dataset on the hub, or of a folder
        num_samples: at most so many rows, from the first on
    """
    samples = []
    for place, row in load_rows(dataset, split=split, num_samples=num_samples):
        key = next((key for key in ("prompt", "question", "messages") if key in row), None)
        if key is None:
            given = ", ".join(sorted(row)) or "none"
            raise ConfigError(f"{place}: a row has `prompt`, `question` or `messages`; got {given}")
        reply = next((key for key in ("response", "completion") if isinstance(row.get(key), str)), None)
        rest = {name: value for name, value in row.items() if name not in (key, reply)}
        samples.append(Sample(row[key], "" if reply is None else row[reply], metadata=rest))
    return samples


def load_sft_dataset(
    dataset: Any,
    tokenizer: Any = None,
    *,
    split: str = "train",
    num_samples: int | None = None,
    max_length: int | None = None,
) -> list[Sample]:
    """The rows of a dataset as samples with tokens and a loss mask. `dataset` is that of `load_dataset`.

    A row is a conversation in any form that `rollouts sft` reads, such as `messages`, or `prompt` and `response`; or
    tokens: `input_ids` with `labels` or `loss_mask`. Tokens need no `tokenizer`. `max_length` cuts samples off. Rows of
    one conversation share their `rollout_index`. Raises ConfigError, ModelError, and TrainingError if a sample has no
    trained token; with the row.
    """
    samples = []
    for number, (place, row) in enumerate(load_rows(dataset, split=split, num_samples=num_samples)):
        if "input_ids" in row:
            given = Sample(input_ids=row["input_ids"], labels=row.get("labels"), loss_mask=row.get("loss_mask"))
            rows = [SupervisedRow(given.tokens, [float(weight) for weight in given.loss_mask])]
        elif tokenizer is None:
            raise ConfigError(f"{place}: the row has text, so give a tokenizer: load_sft_dataset(dataset, tokenizer)")
        else:
            rows = _rows_of(row, tokenizer, place)
        prompt = row.get("messages") or row.get("prompt") or ""
        for tokens, mask in (_cut(each, max_length, place) for each in rows):
            samples.append(Sample(prompt, tokens=tokens, loss_mask=mask, rollout_index=number))
    return samples


def load_sft_samples(path: str | Path, tokenizer: Any = None, *, max_length: int | None = None) -> list[Sample]:
    """`load_sft_dataset` of a file."""
    return load_sft_dataset(path, tokenizer, max_length=max_length)


def load_rows(
    dataset: Any, *, split: str = "train", num_samples: int | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a dataset as dicts, each with its place in words. Raises ConfigError."""
    if not isinstance(dataset, str | Path):
        given = dataset if isinstance(dataset, Mapping) else {key: getattr(dataset, key, None) for key in DATASET_KEYS}
        if not given.get("dataset_id") or not set(given) <= set(DATASET_KEYS):
            expected = f"give a file, a name, or a dict with {', '.join(DATASET_KEYS)}"
            raise ConfigError(f"{dataset!r} is no dataset: {expected}")
        dataset, split = given["dataset_id"], given.get("split") or split
        num_samples = given.get("num_samples") or num_samples
    if num_samples is not None and num_samples < 0:
        raise ConfigError(f"num_samples is {num_samples}; expected 0 or more, or None for all rows")
    name, endings = str(dataset), {f".{loader.__name__}" for loader in OF_FILES} | {".gz", ".ndjson"}
    source: dict[str, Any] = {"name": name} if split == "train" else {"name": name, "split": split}
    if Path(name).suffix.lower() not in endings and not Path(name).exists():  # a name of the hub
        repository, _, config = name.partition(":")
        source |= {"name": f"hub:{repository}", "config": config}
    for place, row in itertools.islice(open_rows(source), num_samples):
        if isinstance(row, NotARow):
            raise ConfigError(f"{place}: {row.why}")
        if not isinstance(row, dict):
            raise ConfigError(f"{place}: a row is a table of keys and values, got {type(row).__name__}")
        yield place, row
