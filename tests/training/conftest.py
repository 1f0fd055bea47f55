"""Tiny random models and samples for the tests of the training rooms; made in process, nothing is downloaded."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from rollouts.training.batches import TrainBatch
from rollouts.types import Sample

sys.path.insert(0, str(Path(__file__).parent))
from tiny_qwen3 import qwen3


def llama(seed: int = 0):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def gpt2(seed: int = 0, *, positions: int = 64):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=61,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=positions,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).eval()  # it has dropout 0.1 by default


def gemma2(seed: int = 0):
    """Soft-capped logits, and a sliding window in every other layer."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(seed)
    config = Gemma2Config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=8,
        final_logit_softcapping=2.0,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    config._attn_implementation = "eager"
    return Gemma2ForCausalLM(config).eval()


def mistral(seed: int = 0):
    """A sliding window in every layer."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(seed)
    return MistralForCausalLM(MistralConfig(**_SMALL, sliding_window=8)).eval()


def gemma3(seed: int = 0):
    """A sliding window in the first layer, and scaled embeddings."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(seed)
    layers = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**_SMALL, sliding_window=8, layer_types=layers)).eval()


_SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}


def make_samples(
    groups: int = 3, rollouts: int = 4, *, seed: int = 0, vocab: int = 61, prompt: tuple[int, int] = (12, 20)
) -> list[Sample]:
    """Groups that share their prompt; replies of 3 to 12 tokens, some with tool text in the middle."""
    generator = random.Random(seed)
    samples = []
    for group in range(groups):
        length = generator.randint(*prompt)
        shared = [generator.randrange(vocab) for _ in range(length)]
        for _ in range(rollouts):
            reply = generator.randint(3, 12)
            tokens = shared + [generator.randrange(vocab) for _ in range(reply)]
            mask = [0.0] * length + [1.0] * reply
            if reply > 6:
                mask[length + 2 : length + 4] = [0.0, 0.0]
            samples.append(
                Sample(
                    tokens=tokens,
                    loss_mask=mask,
                    reward=float(generator.random() < 0.5),
                    group_index=group,
                    rollout_index=len(samples),
                    rollout_log_probs=[-generator.random() * 5 if weight else 0.0 for weight in mask],
                    policy_versions=[0 if weight else -1 for weight in mask],
                    prompt_length=length,
                )
            )
    return samples


def split_batch(batch: TrainBatch, parts: int) -> list[TrainBatch]:
    """The batch in `parts` batches for as many `forward_backward` calls before one `optim_step`.

    u was stamped for the whole, so only the sum of the shares of D matters; they are shared out by live tokens.
    """
    assert parts >= 1, f"a batch cannot be split in {parts}"
    size = math.ceil(len(batch.rows) / parts)
    chunks = [batch.rows[start : start + size] for start in range(0, len(batch.rows), max(1, size))]
    live = [sum(weight > 0 for row in chunk for weight in row.loss_mask) for chunk in chunks]
    total = sum(live)
    shares = [batch.denominator * count / total if total else 0.0 for count in live]
    return [
        msgspec.structs.replace(batch, rows=chunk, denominator=share)
        for chunk, share in zip(chunks, shares, strict=True)
    ]


@pytest.fixture
def tiny() -> SimpleNamespace:
    """The makers of models and samples, by name."""
    makers = (qwen3, llama, gpt2, gemma2, gemma3, mistral, make_samples, split_batch)
    return SimpleNamespace(**{maker.__name__: maker for maker in makers})
