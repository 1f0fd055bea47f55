"""Loading a causal language model or a tokenizer by name, with errors that say what to type.

A name is `tiny` (the model that comes with rollouts), a folder, or a repository of the Hugging Face hub. A folder may
hold a LoRA adapter: the model that it was trained on is loaded, and the adapter merged into it.

A model may bring Python code of its own. It is refused, without a question at the terminal, outside of
`remote_code(True)`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollouts.errors import ConfigError, ModelError
from rollouts.training.adapters import base_of, has_tokenizer, is_adapter, merge_adapter

__all__ = [
    "TINY_PATH",
    "adapters_beneath",
    "build_hf_model",
    "is_remote_code_allowed",
    "load_config",
    "load_hf_model",
    "load_tokenizer",
    "no_progress_bars",
    "prepare_gradient_checkpointing",
    "remote_code",
    "resolve_device",
    "resolve_model_name",
]

TINY_PATH = Path(__file__).resolve().parent.parent / "tiny"

_DTYPES = ("bfloat16", "float16", "float32", "float64")
_remote_code_allowed = False  # of the process: models are loaded in several threads


@contextlib.contextmanager
def remote_code(allowed: bool) -> Iterator[None]:
    """Whether models and tokenizers that are loaded inside, in any thread, may run Python code that comes with them."""
    global _remote_code_allowed
    before, _remote_code_allowed = _remote_code_allowed, allowed
    try:
        yield
    finally:
        _remote_code_allowed = before


def is_remote_code_allowed() -> bool:
    """Whether this is inside `remote_code(True)`."""
    return _remote_code_allowed


def resolve_model_name(name: str) -> str:
    """The absolute path of `tiny`, or of a folder that exists and holds a model or an adapter; else a hub name. Raises
    ModelError.
    """
    if name == "tiny":
        return str(TINY_PATH)
    if not name:
        raise ModelError("no model was given; give a folder, a hub name, or `--model tiny`")
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file() and not is_adapter(path):
            hint = _checkpoint_hint(path)
            raise ModelError(f"the folder {name} holds no config.json, so it is no transformers model{hint}")
        return str(path.absolute())  # it is read again at every save, whatever the working directory is then
    if path.exists():
        raise ModelError(f"the model {name} is a file; give the folder that holds config.json and the weights")
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        raise ModelError(f"there is no folder {name}; give a folder that exists, a hub name, or `--model tiny`")
    return name


def adapters_beneath(name: str) -> tuple[str, tuple[str, ...]]:
    """The whole model beneath a name, as transformers is to be given it, and the folders of the adapters to merge into
    it, the first trained first (none where the name is a whole model's). Raises ModelError.
    """
    folders: list[str] = []
    resolved = resolve_model_name(name)
    while is_adapter(resolved):
        if resolved in folders:
            raise ModelError(f"the adapter in {resolved} was trained on itself, if its adapter_config.json is right")
        folders.append(resolved)
        try:
            resolved = resolve_model_name(base_of(resolved))
        except ModelError as error:
            raise _of_adapter(folders[-1], error) from error
    return resolved, tuple(reversed(folders))


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
    """A causal LM in evaluation mode on `device`, adapters merged in. `attention` is an implementation of
    transformers' (auto: its own choice). Raises ModelError, ConfigError.
    """
    import torch

    if dtype not in _DTYPES:
        raise ModelError(f"unknown dtype {dtype!r} (choices: {', '.join(_DTYPES)})")
    place = resolve_device(device)  # before the weights are read
    chosen = {} if attention == "auto" else {"attn_implementation": attention}
    whole, adapters = adapters_beneath(name)
    try:
        if not adapters:
            model = _load_causal(whole, dtype=getattr(torch, dtype), **chosen)
        else:
            model = _load_merged(whole, adapters, getattr(torch, dtype), chosen)
    except ModelError as error:
        raise (_of_adapter(adapters[0], error) if adapters else error) from error
    model.eval()
    return model.to(place)


def build_hf_model(name: str, *, dtype: str = "float32", attention: str = "auto") -> Any:
    """What `load_hf_model` gives on the CPU, with weights that nobody has written, and so without memory of its own:
    for a rank that gets its share of them from another. Raises ModelError.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    whole, _ = adapters_beneath(name)
    chosen: dict[str, Any] = {} if attention == "auto" else {"attn_implementation": attention}
    chosen["trust_remote_code"] = _remote_code_allowed
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(load_config(whole), dtype=getattr(torch, dtype), **chosen)
    model.tie_weights()
    return model.eval()


def load_tokenizer(name: str) -> Any:
    """The model's tokenizer; an adapter's own where it has one, else that of the model beneath. Raises ModelError."""
    from transformers import AutoTokenizer

    whole, adapters = adapters_beneath(name)
    own = [folder for folder in adapters if has_tokenizer(folder)]
    return _load(AutoTokenizer, own[-1] if own else whole, "tokenizer")


def load_config(whole: str, **settings: Any) -> Any:
    """transformers' configuration of a whole model, a folder or a hub name. Raises ModelError."""
    from transformers import AutoConfig

    return _load(AutoConfig, whole, "configuration", **settings)


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


def _load_merged(whole: str, adapters: tuple[str, ...], dtype: Any, chosen: dict[str, str]) -> Any:
    """The model with the adapters merged in one after the other: in float32 where `dtype` is half precision, so that
    what is rounded is their sum, once.
    """
    import torch

    is_half = dtype in (torch.bfloat16, torch.float16)
    model = _load_causal(whole, dtype=torch.float32) if is_half else _load_causal(whole, dtype=dtype, **chosen)
    for folder in adapters:
        model = merge_adapter(model, folder)
    if not is_half:
        return model
    # Some tensors of a half-precision model stay in float32; transformers knows which, and copying keeps their types.
    half = _load_causal(whole, dtype=dtype, **chosen)
    half.load_state_dict(model.state_dict())
    half.name_or_path = half.config._name_or_path = model.name_or_path
    return half


def _load_causal(resolved: str, **settings: Any) -> Any:
    """A whole model, which remembers where it lies wherever it is asked from: adapters write that down."""
    from transformers import AutoModelForCausalLM

    model = _load(AutoModelForCausalLM, resolved, "model", **settings)
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ModelError(
            f"the model {resolved!r} of the hub is a LoRA adapter; download it (`hf download {resolved} --local-dir "
            "adapter`) and give its folder"
        )
    if Path(resolved).is_dir():
        model.name_or_path = model.config._name_or_path = str(Path(resolved).absolute())
    return model


def _load(loader: Any, resolved: str, what: str, **settings: Any) -> Any:
    from safetensors import SafetensorError

    try:
        with no_progress_bars():
            return loader.from_pretrained(resolved, trust_remote_code=_remote_code_allowed, **settings)
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        raise ModelError(_explain(resolved, what, error)) from error


def _explain(resolved: str, what: str, error: Exception) -> str:
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if "trust_remote_code" in str(error):
        return (
            f"the {what} of {resolved} is Python code that comes with the model, and would run on this machine; read "
            "it, then type --trust-remote-code true, or give another model"
        )
    if Path(resolved).is_dir():
        return f"the {what} in {resolved} could not be loaded: {first_line}"
    return (
        f"the {what} {resolved!r} is no folder here and could not be loaded from the hub: {first_line} "
        "Check the spelling and the connection, give a folder with the model, or try `--model tiny`, "
        "which needs neither"
    )


def _of_adapter(folder: str, error: ModelError) -> ModelError:
    """The same mistake, told with the adapter because of which the model is wanted."""
    words = str(error)
    return error if folder in words else ModelError(f"the adapter in {folder} needs its model: {words}")


def _checkpoint_hint(path: Path) -> str:
    found = [*path.glob("*/config.json"), *path.glob("*/adapter_config.json")]
    inside = sorted(entry.parent.name for entry in found)
    return f"; did you mean {path / inside[-1]}?" if inside else ""
