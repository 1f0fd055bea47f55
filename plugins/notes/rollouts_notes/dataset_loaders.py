"""Datasets as samples, for your own training loop.

    samples = load_sft_dataset("conversations.jsonl", tokenizer, max_length=2048)

The tokens and the mask are those of `rollouts sft`. Not here: reading a dataset piece by piece.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollouts.chat import SupervisedRow
from rollouts.chat.format import chat_format
from rollouts.data.loaders import OF_FILES, NotARow
from rollouts.data.source import open_rows
from rollouts.errors import ConfigError
from rollouts.types import Sample
from rollouts_notes.supervised import cut_row, supervised_rows_of

DATASET_KEYS = ("dataset_id", "split", "num_samples")
"""The keys of a dataset that is given as a dict or an object."""


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
            raise ConfigError(f"{place}: a row has `prompt`, `question` or `messages`; got {_keys(row)}")
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
            rows = supervised_rows_of(row, chat_format(tokenizer), place)
        for each in rows:
            tokens, mask = cut_row(each, max_length, place)
            prompt = row.get("messages") or row.get("prompt") or ""
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
            raise ConfigError(
                f"{dataset!r} is no dataset: give a file, a name, or a dict with {', '.join(DATASET_KEYS)}"
            )
        dataset, split = given["dataset_id"], given.get("split") or split
        num_samples = given.get("num_samples") or num_samples
    if num_samples is not None and num_samples < 0:
        raise ConfigError(f"num_samples is {num_samples}; expected 0 or more, or None for all rows")
    for place, row in itertools.islice(open_rows(_source_of(str(dataset), split)), num_samples):
        if isinstance(row, NotARow):
            raise ConfigError(f"{place}: {row.why}")
        if not isinstance(row, dict):
            raise ConfigError(f"{place}: a row is a table of keys and values, got {type(row).__name__}")
        yield place, row


def _source_of(name: str, split: str) -> dict[str, Any]:
    """What `--data` takes for this dataset. A name without the ending of a file is one of the hub."""
    endings = {f".{loader.__name__}" for loader in OF_FILES} | {".gz", ".ndjson"}
    table = {"name": name} if split == "train" else {"name": name, "split": split}
    if Path(name).suffix.lower() in endings or Path(name).exists():
        return table
    repository, _, config = name.partition(":")
    return {**table, "name": f"hub:{repository}", "config": config}


def _keys(row: Mapping[str, Any]) -> str:
    return ", ".join(sorted(row)) or "none"
