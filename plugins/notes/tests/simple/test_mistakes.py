"""Mistakes in samples, functions and configs: one clear error that says what to give."""

from __future__ import annotations

import json

import pytest
import torch
import trio
from rollouts_notes.loops import RLTrainingConfig, SFTTrainingConfig, run_rl_training, run_sft_training
from rollouts_notes.manager import AsyncRolloutManager
from rollouts_notes.rows import RolloutConfig
from rollouts_notes.supervised import load_sft_dataset, tokenize_conversation

from rollouts.errors import ConfigError, RunError, TrainingError
from rollouts.primitives import load_tokenizer
from rollouts.training import DataBuffer
from rollouts.types import Sample

CONVERSATION = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def generated(backend, generate_fn):
    manager = AsyncRolloutManager(DataBuffer(["a", "b"]), RolloutConfig(2, 1, generate_fn=generate_fn))
    return trio.run(run_rl_training, backend, None, manager, [], RLTrainingConfig(1))


def test_the_error_of_a_generate_fn_is_shown(backend_of):
    def generate(prompts):
        raise ValueError("no such server")

    with pytest.raises(RunError, match=r"2 x environment_error: generate_fn: .*no such server"):
        generated(backend_of(), generate)


def test_samples_without_tokens_are_refused(backend_of):
    with pytest.raises(TrainingError, match="no sample of the batch has tokens"):
        generated(backend_of(), lambda prompts: [Sample(prompt, response="5", reward=1.0) for prompt in prompts])


def test_tokens_may_be_a_tensor(backend_of):
    samples = [Sample(tokens=torch.tensor([5, 6, 7]), loss_mask=torch.tensor([0, 1, 1]), reward=1.0)]
    config = RLTrainingConfig(1)
    (metrics,) = trio.run(lambda: run_rl_training(backend_of(), samples=samples, config=config))
    assert metrics["mean_reward"] == 1.0


def test_no_samples(backend_of):
    with pytest.raises(ConfigError, match="samples is empty"):
        trio.run(run_sft_training, backend_of(), [], SFTTrainingConfig(1, batch_size=1))


@pytest.mark.parametrize("name", ["num_steps", "batch_size", "sync_every", "minibatches", "staleness"])
def test_a_number_out_of_range_is_named(name):
    with pytest.raises(ConfigError, match=f"RLTrainingConfig: {name} is -1; expected"):
        RLTrainingConfig(**({"num_steps": 1} | {name: -1}))


@pytest.mark.parametrize("settings", [{"num_samples": -1}, {"max_length": -1}])
def test_a_limit_below_0_cuts_nothing_off_in_silence(tmp_path, settings):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": CONVERSATION}))
    with pytest.raises(ConfigError, match="is -1; expected"):
        load_sft_dataset(path, load_tokenizer("tiny"), **settings)


def test_a_row_with_an_empty_reply_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": 3, "response": ""}))
    with pytest.raises(ConfigError, match="line 1: the column response is empty"):
        load_sft_dataset(path, load_tokenizer("tiny"))


def test_a_new_chat_template_is_used():
    tokenizer = load_tokenizer("tiny")
    before, _ = tokenize_conversation(CONVERSATION, tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_start|>", "<|im_start|>the ")
    assert len(tokenize_conversation(CONVERSATION, tokenizer)[0]) > len(before)
