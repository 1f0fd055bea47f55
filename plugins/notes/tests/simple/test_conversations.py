"""Conversations and datasets as samples: the tokens and masks are those of `rollouts sft`."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from rollouts.chat import load_chat_format, tokenize_supervised
from rollouts.errors import ConfigError, TrainingError
from rollouts.models.loading import load_tokenizer
from rollouts.training import (
    DataConfig,
    Sample,
    compute_loss_mask,
    load_dataset,
    load_sft_dataset,
    load_sft_samples,
    tokenize_conversation,
)
from rollouts.types import Message

TALK = [
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": "4."},
    {"role": "user", "content": "And 3?"},
    {"role": "assistant", "content": "No."},
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny")


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_tokens_and_mask_are_those_of_rollouts_sft(tokenizer):
    (row,) = tokenize_supervised([Message(**each) for each in TALK], [], load_chat_format(tokenizer))
    tokens, user_spans = tokenize_conversation(TALK, tokenizer)
    assert tokens == row.tokens and compute_loss_mask(tokens, user_spans) == row.loss_mask
    assert len(user_spans) == 2 and user_spans[0][0] == 0
    trained = [token for token, weight in zip(tokens, row.loss_mask, strict=True) if weight]
    assert tokenizer.decode(trained).startswith("4.") and "What" not in tokenizer.decode(trained)
    assert tokenize_conversation([Message(**each) for each in TALK], tokenizer) == (tokens, user_spans)


def test_max_length(tokenizer):
    tokens, spans = tokenize_conversation(TALK, tokenizer)
    length = spans[1][0] + 1  # one token of the second question
    cut, cut_spans = tokenize_conversation(TALK, tokenizer, max_length=length)
    assert (cut, cut_spans) == (tokens[:length], [spans[0], (length - 1, length)])
    with pytest.raises(TrainingError, match=r"no trained token within max_length 3; give a larger one"):
        tokenize_conversation(TALK, tokenizer, max_length=3)


@pytest.mark.parametrize("span", [(0, 4), (-1, 2), (2, 1)])
def test_a_span_outside_of_the_tokens(span):
    with pytest.raises(TrainingError, match="is not inside of 3 tokens"):
        compute_loss_mask([1, 2, 3], [span])


@pytest.mark.parametrize(
    ("messages", "words"),
    [(TALK[:1], "no message is of the role assistant"), (["hello"], "expected {'role', 'content'}, got str")],
)
def test_messages_that_teach_nothing(tokenizer, messages, words):
    with pytest.raises(ConfigError, match=words):
        tokenize_conversation(messages, tokenizer)


@pytest.mark.parametrize("ending", ["parquet", "csv", "json"])
def test_every_file_that_a_run_reads(tokenizer, tmp_path, ending):
    import datasets

    rows = datasets.Dataset.from_list([{"prompt": "What is 2+2?", "response": "Four."}] * 3)
    path = tmp_path / f"rows.{ending}"
    getattr(rows, f"to_{ending}")(path, **({"lines": False} if ending == "json" else {}))
    answer = {"role": "assistant", "content": "Four."}
    expected = tokenize_conversation([TALK[0], answer], tokenizer)[0]
    for given in (path, str(path), {"dataset_id": str(path)}, DataConfig(str(path))):
        assert [each.tokens for each in load_sft_dataset(given, tokenizer)] == [expected] * 3
    with pytest.raises(ConfigError, match="split"):
        load_sft_dataset(path, tokenizer, split="test")
    with pytest.raises(ConfigError, match=f"missing.{ending} cannot be read"):
        load_sft_dataset(tmp_path / f"missing.{ending}", tokenizer)


def test_rows_of_every_kind(tokenizer, tmp_path):
    path = write(
        tmp_path / "rows.jsonl",
        {"messages": TALK},
        {"prompt": "What is 2+2?", "response": "4."},
        {"prompt": TALK[:1], "completion": TALK[1:2]},
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
    )
    samples = load_sft_dataset(path, tokenizer)
    assert samples[0].tokens == tokenize_conversation(TALK, tokenizer)[0]
    assert samples[1].tokens == samples[2].tokens == tokenize_conversation(TALK[:2], tokenizer)[0]
    assert samples[1].loss_mask == samples[2].loss_mask and isinstance(samples[0], Sample)
    assert (samples[3].tokens, samples[3].loss_mask) == ([5, 6, 7], [0.0, 1.0, 1.0])
    assert [sample.rollout_index for sample in samples] == [0, 1, 2, 3]
    assert torch.stack([samples[3].input_ids, samples[3].labels]).tolist() == [[5, 6, 7]] * 2
    assert len(load_sft_dataset({"dataset_id": path, "num_samples": 2}, tokenizer)) == 2
    tokens = write(tmp_path / "tokens.jsonl", {"input_ids": [5, 6, 7]})
    assert load_sft_samples(tokens, max_length=2)[0].tokens == [5, 6]


def test_prompts_with_answers(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"question": "2 + 2?", "answer": "4"}, {"prompt": "1?", "response": "2", "id": "b"}]))
    first, second = load_dataset(DataConfig(str(path)))
    assert (first.prompt, first.response, first.metadata) == ("2 + 2?", "", {"answer": "4"})
    assert (second.prompt, second.response, second.metadata) == ("1?", "2", {"id": "b"})
    assert len(load_dataset(path, num_samples=1)) == 1


def test_a_dataset_of_the_hub(monkeypatch):
    asked = []

    class Library:
        @staticmethod
        def load_dataset(name, config, *, split, streaming):
            asked.append((name, config, split))
            if name == "missing":
                raise RuntimeError("no such dataset\nlong text")
            return [{"question": "q", "answer": "a"}] * 3

    monkeypatch.setitem(sys.modules, "datasets", Library)
    found = load_dataset({"dataset_id": "openai/gsm8k:main", "split": "test", "num_samples": 2})
    assert [sample.prompt for sample in found] == ["q", "q"] and asked == [("openai/gsm8k", "main", "test")]
    with pytest.raises(ConfigError, match=r"missing \(split train\) cannot be loaded: no such dataset\ntype a file"):
        load_dataset("missing")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install .*data"):
        load_dataset("openai/gsm8k")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "hello"}, "line 1: no conversation in the columns text; expected messages"),
        ([1], "line 1: a row is a table of keys and values, got list"),
        ({"input_ids": [1], "loss_mask": [0]}, "line 1 has no trained token"),
    ],
)
def test_rows_that_are_wrong(tokenizer, tmp_path, row, words):
    with pytest.raises((ConfigError, TrainingError), match=words):
        load_sft_samples(write(tmp_path / "rows.jsonl", row), tokenizer)


def test_datasets_that_are_wrong(tmp_path):
    text = write(tmp_path / "rows.jsonl", {"messages": TALK})
    for wrong, words in (
        (lambda: load_sft_samples(text), "line 1: the row has text, so give a tokenizer"),
        (lambda: load_dataset({"name": "x"}), "is no dataset: give a file, a name, or a dict with dataset_id"),
        (lambda: load_dataset(tmp_path / "none.jsonl"), "cannot be read: No such file"),
        (lambda: load_dataset(write(tmp_path / "a.jsonl", {"text": "x"})), "`prompt`, `question` or `messages`; got"),
    ):
        with pytest.raises(ConfigError, match=words):
            wrong()
