"""Low-rank adapters through peft: inject them, choose the one of a role, read their weights, merge a copy.

The causal LM keeps its class. Adapters are injected into its linear layers, so generation and training use one model.
Only the adapters are trained. A model has one adapter, or one for each role, of which one is in use at a time; names of
weights then begin with the role, as in `buyer/base_model...`. Not here: adapters with dropout (ratios would not be 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollouts.errors import ConfigError, ModelError
from rollouts.models.folders import read_tensors
from rollouts.models.loading import no_peft_warnings, one_at_a_time, tied_with_adapter

Whole = Callable[[Iterable[tuple[str, Tensor]]], dict[str, Tensor]]
"""Makes CPU copies by name. Joins sharded tensors. Returns an empty dict on ranks above 0."""

ADAPTER = "default"
_OF_ROLE = "role_"  # so that no role has a name that peft or torch refuses


def add_lora(causal: Any, *, rank: int, alpha: float | None, targets: str, seed: int, roles: Sequence[str] = ()) -> Any:
    """Make a PeftModel of the causal LM, which changes in place. `alpha` None: 2 * rank. `roles`: those with an adapter
    of their own; empty: one adapter.

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
        revision=getattr(causal, "hub_commit", None),
    )
    with one_at_a_time(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            wrapped = wrap_in_adapter(causal, config, roles)
        except ValueError as error:
            raise ConfigError(
                f"lora_targets {targets!r} match no layer of {type(causal).__name__}; "
                f'give "all-linear" or some of: {", ".join(_layer_names(causal))}'
            ) from error
    tied = tied_with_adapter(causal)
    if tied is not None:
        what = f"lora_targets {targets!r}: the model ties the weight of {tied[0]} to {tied[1]}"
        why = "an adapter on one of them cannot be merged into the weight of both"
        hint = f"leave {tied[0].rpartition('.')[2]} out of --training.lora-targets"
        raise ConfigError(f"{what}, and {why}; {hint}")
    return wrapped


@one_at_a_time()
def wrap_in_adapter(causal: Any, config: Any, roles: Sequence[str] = ()) -> Any:
    """Make a PeftModel of the causal LM, which changes in place, from peft's configuration. Raises ValueError."""
    from peft import get_peft_model

    with no_peft_warnings():
        first, *others = [_OF_ROLE + role for role in roles] or [ADAPTER]
        wrapped = get_peft_model(causal, config, adapter_name=first)
        for name in others:
            wrapped.add_adapter(name, config)
    for role in reversed(roles):
        use_adapter(causal, role)
    return wrapped


def load_role_adapters(causal: Any, folders: Mapping[str, Path]) -> None:
    """Add the adapters in these folders, by role. The causal LM changes in place. Raises ModelError."""
    from peft import LoraConfig

    first = next(iter(folders.values()))
    try:
        own = adapter_parameters(wrap_in_adapter(causal, LoraConfig.from_pretrained(str(first)), tuple(folders)))
        for role, folder in folders.items():
            for name, tensor in read_tensors(folder).items():
                own[f"{role}/{name}"].data.copy_(tensor)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:  # peft and torch have no errors of their own
        what = f"the adapters in {first.parent} do not fit {causal.name_or_path}: {error}"
        raise ModelError(f"{what}; give another checkpoint") from error


def adapter_roles(peft_model: Any) -> tuple[str, ...]:
    """The roles with an adapter of their own; empty for one adapter, and for None."""
    names = [] if peft_model is None else peft_model.peft_config
    return tuple(name.removeprefix(_OF_ROLE) for name in names if name != ADAPTER)


def trained_sets(peft_model: Any) -> list[list[Any]]:
    """The parameters of each role's adapter, in the order of `adapter_roles`."""
    own = adapter_parameters(peft_model) if peft_model is not None else {}
    return [[each for name, each in own.items() if name.startswith(f"{role}/")] for role in adapter_roles(peft_model)]


def use_adapter(causal: Any, role: str) -> None:
    """From now on, the causal LM computes with the adapter of this role. The others stay trainable."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    name = _OF_ROLE + role
    for module in causal.modules():
        if isinstance(module, BaseTunerLayer) and module.active_adapters != [name]:
            module.set_adapter(name)  # freezes the others
            for layers in module.adapter_layer_names:
                getattr(module, layers).requires_grad_(True)


def read_adapter_weights(peft_model: Any, whole: Whole) -> dict[str, Tensor]:
    """A CPU copy of the adapters' weights, under the names of peft's files."""
    return whole((prefix + name, tensor) for _, prefix, name, tensor in _states(peft_model))


def adapter_parameters(peft_model: Any) -> dict[str, Tensor]:
    """The adapters' own parameters, under the names of peft's files."""
    named = dict(peft_model.named_parameters())
    found: dict[str, Tensor] = {}
    for adapter, prefix, name, _ in _states(peft_model):
        stem, _, last = name.rpartition(".")  # names in peft's files do not contain the adapter's name
        own = next(each for each in (name, f"{stem}.{adapter}.{last}", f"{name}.{adapter}") if each in named)
        found[prefix + name] = named[own]
    return found


def _states(peft_model: Any) -> Iterator[tuple[str, str, str, Tensor]]:
    """Of each weight: its adapter, the prefix of its role, its name in peft's files, and its values."""
    from peft import get_peft_model_state_dict

    for adapter in peft_model.peft_config:
        prefix = "" if adapter == ADAPTER else adapter.removeprefix(_OF_ROLE) + "/"
        state = get_peft_model_state_dict(peft_model, adapter_name=adapter, save_embedding_layers=False)
        yield from ((adapter, prefix, name, tensor) for name, tensor in state.items())


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
