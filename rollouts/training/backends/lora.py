"""Low-rank adapters through peft: put them in, read them out, merge a copy.

The causal LM keeps its class: adapters are injected into its linear layers, so generation and training see one model.
Only the adapters are trained. Left out: adapters with dropout (ratios would not be 1), several adapters at once.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from rollouts.errors import ConfigError, TrainingError

__all__ = ["ADAPTER", "AdapterFolder", "add_lora", "load_adapter_weights", "merged_weights", "read_adapter_weights"]

ADAPTER = "default"


def add_lora(causal: Any, *, rank: int, alpha: float | None, targets: str, seed: int) -> Any:
    """A PeftModel around the causal LM (which is changed in place). `alpha` None is 2 * rank.

    `targets` is "all-linear" or names of layers with commas between them. Raises ConfigError where they match nothing.
    """
    from peft import LoraConfig, get_peft_model

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
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(seed)
        # GPT-2 keeps its linear layers transposed; peft sets fan_in_fan_out itself and warns that it did.
        warnings.filterwarnings("ignore", message=".*fan_in_fan_out.*")
        # peft reads a property of the model that newer transformers have renamed.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        try:
            return get_peft_model(causal, config)
        except ValueError as error:
            raise ConfigError(
                f"lora_targets {targets!r} match no layer of {type(causal).__name__}; "
                f'give "all-linear" or some of: {", ".join(_layer_names(causal))}'
            ) from error


class AdapterFolder:
    """Writes an adapter in peft's format. It asks no hub whether the vocabulary grew, as peft does by itself."""

    def __init__(self, peft_model: Any) -> None:
        self._peft_model = peft_model

    def save_pretrained(self, path: str) -> None:
        """Write adapter_config.json and adapter_model.safetensors into the folder."""
        self._peft_model.save_pretrained(path, save_embedding_layers=False)


def read_adapter_weights(peft_model: Any) -> dict[str, Tensor]:
    """A CPU copy of the adapter's weights, under the names of peft's files."""
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(peft_model, adapter_name=ADAPTER)
    return {name: value.detach().cpu().clone() for name, value in state.items()}


def load_adapter_weights(peft_model: Any, weights: dict[str, Tensor]) -> None:
    """Replace the adapter's weights. Raises TrainingError for names or shapes that are not this adapter's."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    own = get_peft_model_state_dict(peft_model, adapter_name=ADAPTER)
    wrong = sorted(set(own) ^ set(weights))
    wrong += sorted(name for name in set(own) & set(weights) if own[name].shape != weights[name].shape)
    if wrong:
        raise TrainingError(f"these are not this adapter's weights: {len(wrong)} of them differ, first {wrong[0]}")
    set_peft_model_state_dict(peft_model, weights, adapter_name=ADAPTER)


def merged_weights(causal: Any) -> dict[str, Tensor]:
    """A CPU copy of the model's weights with the adapters added in, under the names of the model without adapters."""
    deltas: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, module in causal.named_modules():
            if hasattr(module, "get_delta_weight") and ADAPTER in getattr(module, "lora_A", {}):
                deltas[f"{name}.weight"] = module.get_delta_weight(ADAPTER)
    merged: dict[str, Tensor] = {}
    for name, value in causal.state_dict().items():
        if ".lora_" in name:
            continue
        plain = name.replace(".base_layer.", ".")
        copied = value.detach().clone()
        if plain in deltas:
            copied += deltas[plain].to(copied.dtype)
        merged[plain] = copied.cpu()
    return merged


def _layer_names(causal: Any) -> list[str]:
    names = {
        name.rpartition(".")[2]
        for name, module in causal.named_modules()
        if isinstance(module, nn.Linear) or "Conv1D" in type(module).__name__
    }
    return sorted(names) or ["(this model has no linear layers)"]
