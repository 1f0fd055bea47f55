"""Tiny models with random weights, made in process, and shorthand to run the embedded engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

VOCABULARY = 67


def _qwen3(**settings: Any) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, **shape | heads | settings))


def _qwen3_eager() -> Any:
    return _qwen3(attn_implementation="eager")


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=256, **shape))


def _gpt_neox() -> Any:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    return GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=VOCABULARY, max_position_embeddings=256, **shape))


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=256, n_embd=64, n_layer=2, n_head=2))


def _gemma3() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    return Gemma3ForCausalLM(Gemma3TextConfig(vocab_size=VOCABULARY, **shape | heads | layers))


def _mamba() -> Any:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=8))


MAKERS: dict[str, Callable[[], Any]] = {
    "qwen3": _qwen3,
    "qwen3_eager": _qwen3_eager,
    "llama": _llama,
    "gpt_neox": _gpt_neox,
    "gpt2": _gpt2,
    "gemma3": _gemma3,
    "mamba": _mamba,
}


@pytest.fixture(scope="session")
def make_model() -> Callable[[str], Any]:
    """A model by name, with weights large enough that a wrong mask or position shows in the logprobs."""

    def make(name: str) -> Any:
        import torch

        torch.manual_seed(0)
        model = MAKERS[name]().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(4.0)
        return model

    return make


@pytest.fixture(scope="session")
def models(make_model: Callable[[str], Any]) -> Callable[[str], Any]:
    """The same, one object a name for all tests: none of them changes it."""
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        return made.setdefault(name, None) or made.update({name: make_model(name)}) or made[name]

    return get
