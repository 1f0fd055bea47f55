"""Loading a causal language model or a tokenizer by name, with errors that say what to type.

A name is `tiny` (the model that comes with rollouts), a folder, or a repository of the Hugging Face hub.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollouts.errors import ConfigError, ModelError

__all__ = [
    "TINY_PATH",
    "load_hf_model",
    "load_tokenizer",
    "no_progress_bars",
    "prepare_gradient_checkpointing",
    "resolve_device",
    "resolve_model_name",
]

TINY_PATH = Path(__file__).resolve().parent.parent / "tiny"

_DTYPES = ("bfloat16", "float16", "float32", "float64")


def resolve_model_name(name: str) -> str:
    """What transformers is to be given: the folder of `tiny`, a folder that exists, or a hub name. Raises
    ModelError.
    """
    if name == "tiny":
        return str(TINY_PATH)
    if not name:
        raise ModelError("no model was given; give a folder, a hub name, or `--model tiny`")
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            hint = _checkpoint_hint(path)
            raise ModelError(f"the folder {name} holds no config.json, so it is no transformers model{hint}")
        return str(path)
    if path.exists():
        raise ModelError(f"the model {name} is a file; give the folder that holds config.json and the weights")
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        raise ModelError(f"there is no folder {name}; give a folder that exists, a hub name, or `--model tiny`")
    return name


def resolve_device(device: str) -> str:
    """`auto` becomes cuda where there is one, else cpu. Raises ConfigError for a device that is not here."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch has no error of its own for it
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"the device {device!r} cannot be used here: {first}; type auto, cpu, cuda or cuda:1"
        ) from error
    return device


def load_hf_model(name: str, *, dtype: str = "float32", device: str = "auto", attention: str = "auto") -> Any:
    """A causal LM in evaluation mode on `device`. `attention` is an implementation of transformers' (auto: its own
    choice). Raises ModelError, ConfigError.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if dtype not in _DTYPES:
        raise ModelError(f"unknown dtype {dtype!r} (choices: {', '.join(_DTYPES)})")
    place = resolve_device(device)  # before the weights are read
    chosen = {} if attention == "auto" else {"attn_implementation": attention}
    model = _load(AutoModelForCausalLM, name, "model", dtype=getattr(torch, dtype), **chosen)
    model.eval()
    return model.to(place)


def load_tokenizer(name: str) -> Any:
    """The model's tokenizer. Raises ModelError."""
    from transformers import AutoTokenizer

    return _load(AutoTokenizer, name, "tokenizer")


def prepare_gradient_checkpointing(causal: Any) -> None:
    """Turn it on, and every dropout off, for it works in training mode only."""
    from torch import nn

    for module in causal.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    if hasattr(causal, "activation_checkpointing_enable"):  # the newer name; the older one warns where both are there
        causal.activation_checkpointing_enable({"use_reentrant": False})
    else:
        causal.gradient_checkpointing_enable({"use_reentrant": False})


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """transformers draws bars for shards of weights; they would be drawn across our own progress."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            logging.enable_progress_bar()


def _load(loader: Any, name: str, what: str, **settings: Any) -> Any:
    from safetensors import SafetensorError

    resolved = resolve_model_name(name)
    try:
        with no_progress_bars():
            return loader.from_pretrained(resolved, **settings)
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        raise ModelError(_explain(name, resolved, what, error)) from error


def _explain(name: str, resolved: str, what: str, error: Exception) -> str:
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if Path(resolved).is_dir():
        return f"the {what} in {resolved} could not be loaded: {first_line}"
    return (
        f"the {what} {name!r} is no folder here and could not be loaded from the hub: {first_line} "
        "Check the spelling and the connection, give a folder with the model, or try `--model tiny`, "
        "which needs neither"
    )


def _checkpoint_hint(path: Path) -> str:
    if (path / "adapter_config.json").is_file():
        return "; it holds a LoRA adapter: give the model that it was trained on"
    inside = sorted(entry.parent.name for entry in path.glob("*/config.json"))
    return f"; did you mean {path / inside[-1]}?" if inside else ""
