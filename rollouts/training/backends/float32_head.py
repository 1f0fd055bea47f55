"""An output head that computes in float32, in a model whose weights are bfloat16 or float16.

Logits rounded to bfloat16 have 8 bits: two engines that round differently then disagree about a token's probability by
percents, and the ratio of a policy to itself is not 1. The head's weight becomes float32, and so does an input
embedding that is the same weight; hooks on these two modules keep everything between them as it was, so whoever calls
the model (training, transformers' `generate`, the embedded engine) gets the same head.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from rollouts.errors import ConfigError

__all__ = ["use_float32_head"]


def use_float32_head(causal: Any) -> None:
    """Make the output head of this causal LM compute in float32, in place. Adapters may be injected before or after.

    Nothing changes where it does already. Raises ConfigError for a model that does not show its head.
    """
    outer = causal.get_output_embeddings()
    if outer is None:
        raise ConfigError(
            f"the float32 head: {type(causal).__name__} does not show its output embeddings; leave the setting out, or "
            "load the whole model with --training.dtype float32"
        )
    head, embedding = _base_layer(outer), _base_layer(causal.get_input_embeddings())
    assert isinstance(head.weight, Tensor), f"the head {head} has no weight"
    dtype = head.weight.dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return
    tied = head.weight is embedding.weight
    for parameter in head.parameters(recurse=False):
        parameter.data = parameter.data.float()  # the same Parameter, so what is tied stays tied
    head.register_forward_pre_hook(_input_to_float32)
    if tied:
        embedding.register_forward_hook(functools.partial(_output_to, dtype))


def _base_layer(module: Any) -> nn.Module:
    """The model's own layer beneath a LoRA layer: it stays when adapters are merged or removed."""
    layer: nn.Module = module.get_base_layer() if hasattr(module, "get_base_layer") else module
    return layer


def _input_to_float32(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (inputs[0].float(), *inputs[1:])


def _output_to(dtype: torch.dtype, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output.to(dtype)
