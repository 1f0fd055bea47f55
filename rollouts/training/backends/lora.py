"""Low-rank adapters through peft: inject them, read their weights, merge a copy.

The causal LM keeps its class. Adapters are injected into its linear layers, so generation and training use one model.
Only the adapters are trained. Not here: adapters with dropout (ratios would not be 1), several adapters at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rollouts.errors import ConfigError
from rollouts.training.models import no_peft_warnings, one_at_a_time, tied_with_adapter

Whole = Callable[[Iterable[tuple[str, Tensor]]], dict[str, Tensor]]
"""Makes CPU copies by name. Joins sharded tensors. Returns an empty dict on ranks above 0."""

ADAPTER = "default"


def add_lora(causal: Any, *, rank: int, alpha: float | None, targets: str, seed: int) -> Any:
    """Make a PeftModel of the causal LM, which changes in place. `alpha` None: 2 * rank.

    `targets` is "all-linear", or names of layers, separated by commas. Raises ConfigError if no layer matches, or if
    the weight of a layer is tied to another one.
    """
    from peft import LoraConfig

    if rank < 1:
        raise ConfigError(f"lora_rank is {rank}; give 1 or more, or 0 to train all weights")
    modules: Any = targets if targets == "all-linear" else [name.strip() for name in targets.split(",") if name.strip()]
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        target_modules=modules,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    with one_at_a_time(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            wrapped = wrap_in_adapter(causal, config)
        except ValueError as error:
            raise ConfigError(
                f"lora_targets {targets!r} match no layer of {type(causal).__name__}; "
                f'give "all-linear" or some of: {", ".join(_layer_names(causal))}'
            ) from error
    tied = tied_with_adapter(causal)
    if tied is not None:
        raise ConfigError(
            f"lora_targets {targets!r}: the model ties the weight of {tied[0]} to {tied[1]}, and an adapter on one of "
            f"them cannot be merged into the weight of both; leave {tied[0].rpartition('.')[2]} out of "
            "--training.lora-targets"
        )
    return wrapped


@one_at_a_time()
def wrap_in_adapter(causal: Any, config: Any) -> Any:
    """Make a PeftModel of the causal LM, which changes in place, from peft's configuration. Raises ValueError."""
    from peft import get_peft_model

    with no_peft_warnings():
        return get_peft_model(causal, config)


def read_adapter_weights(peft_model: Any, whole: Whole) -> dict[str, Tensor]:
    """A CPU copy of the adapter's weights, under the names of peft's files."""
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(peft_model, adapter_name=ADAPTER, save_embedding_layers=False)
    return whole(state.items())


def adapter_parameters(peft_model: Any) -> dict[str, Tensor]:
    """The adapter's own parameters, under the names of peft's files."""
    from peft import get_peft_model_state_dict

    named = dict(peft_model.named_parameters())
    found: dict[str, Tensor] = {}
    for name in get_peft_model_state_dict(peft_model, adapter_name=ADAPTER, save_embedding_layers=False):
        stem, _, last = name.rpartition(".")  # names in peft's files do not contain the adapter's name
        own = next(each for each in (name, f"{stem}.{ADAPTER}.{last}", f"{name}.{ADAPTER}") if each in named)
        found[name] = named[own]
    return found


def merged_weights(causal: Any, whole: Whole) -> dict[str, Tensor]:
    """A CPU copy of the model's weights with the adapters merged, under the names of the model without adapters.

    W + scaling * B A, computed in float32 (Hu et al. 2021). Empty if `whole` returns nothing, as on ranks above 0.
    """
    modules = dict(causal.named_modules())
    merged: dict[str, Tensor] = {}
    for name, value in causal.state_dict().items():
        if ".lora_" in name:
            continue
        layer = modules[name.removesuffix(".base_layer.weight")] if name.endswith(".base_layer.weight") else None
        tensors = {"base": value}
        is_embedding = layer is not None and ADAPTER in layer.lora_embedding_A
        if layer is not None and is_embedding:
            tensors |= {"a": layer.lora_embedding_A[ADAPTER], "b": layer.lora_embedding_B[ADAPTER]}
        elif layer is not None and ADAPTER in layer.lora_A:
            tensors |= {"a": layer.lora_A[ADAPTER].weight, "b": layer.lora_B[ADAPTER].weight}
        found = whole(tensors.items())
        if not found:
            continue
        base = found["base"]
        if "a" in found:
            assert layer is not None, "the name of an adapter's layer"
            delta = (found["b"].float() @ found["a"].float()) * layer.scaling[ADAPTER]
            turned = is_embedding or layer.fan_in_fan_out
            base = (base.float() + (delta.T if turned else delta)).to(base.dtype)
        merged[name.replace(".base_layer.", ".")] = base
    return merged


def _layer_names(causal: Any) -> list[str]:
    names = {
        name.rpartition(".")[2]
        for name, module in causal.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding) or "Conv1D" in type(module).__name__
    }
    return sorted(names) or ["(this model has no such layers)"]
