"""A Qwen3 with random weights for the benchmarks. Speed and memory do not depend on the values of weights."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from rollouts.models.loading import TINY_PATH

__all__ = ["save_random_qwen3"]


def save_random_qwen3(folder: Path, *, tiny_shape: bool = False, vocabulary: int = 0) -> str:
    """Write a model of about 58 M parameters, or with the shape of `tiny`, to `folder`, with the tokenizer and chat
    template of tiny.

    `vocabulary` is the number of rows of the tied head; 0 means the size of the tokenizer's vocabulary.
    """
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TINY_PATH)
    config = Qwen3Config(
        vocab_size=vocabulary or len(tokenizer),
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=6,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    if tiny_shape:
        config = Qwen3Config.from_pretrained(TINY_PATH, vocab_size=vocabulary or len(tokenizer))
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
