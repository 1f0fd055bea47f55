"""A tiny random model for the tests of the training rooms; made in process, nothing is downloaded."""

from __future__ import annotations

import torch


def qwen3(seed: int = 0, *, tied: bool = True, vocab: int = 61, layers: int = 2):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=tied,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    return Qwen3ForCausalLM(config).eval()
