"""LoRA adapters on disk: what they were trained on, and merging one into that model as peft does.

A folder with an adapter_config.json is an adapter: one of our checkpoints, or what peft, TRL and others write. Left
out: loading the model beneath (`rollouts.training.models`), and training adapters (`rollouts.training.backends.lora`).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from rollouts.errors import ModelError

__all__ = ["ADAPTER_CONFIG", "base_of", "has_tokenizer", "is_adapter", "merge_adapter", "read_adapter_config"]

ADAPTER_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)


def is_adapter(folder: str | Path) -> bool:
    """Whether the folder holds an adapter and no whole model."""
    path = Path(folder).expanduser()
    return (path / ADAPTER_CONFIG).is_file() and not (path / "config.json").is_file()


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a tokenizer lies in the folder, beside the adapter or model."""
    return any((Path(folder) / name).is_file() for name in _TOKENIZER)


def read_adapter_config(folder: str | Path) -> dict[str, Any]:
    """adapter_config.json as plain data. Raises ModelError."""
    try:
        config = json.loads((Path(folder) / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"the {ADAPTER_CONFIG} in {folder} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"the {ADAPTER_CONFIG} in {folder} holds {type(config).__name__}, and must hold an object")
    return config


def base_of(folder: str | Path) -> str:
    """The model that the adapter was trained on: `tiny`, a folder that exists, or a hub name.

    The embedded model is found wherever the package is now, and within a run of mode sft+rl that was moved the
    checkpoint of its first phase. Raises ModelError, with what to write.
    """
    given = read_adapter_config(folder).get("base_model_name_or_path")
    if not given or not isinstance(given, str):
        raise ModelError(f"the adapter in {folder} does not say on which model it was trained; {_how_to_say(folder)}")
    path = Path(given).expanduser()
    if path.is_dir():
        return str(path)
    parts = PurePosixPath(given.replace("\\", "/")).parts
    if given == "tiny" or parts[-2:] == ("rollouts", "tiny"):
        return "tiny"
    moved = _moved_with(Path(folder).absolute(), parts)
    if moved is not None:
        return str(moved)
    if path.is_absolute() or len(parts) > 2 or given.startswith((".", "~")) or "\\" in given:
        raise ModelError(
            f"the adapter in {folder} was trained on the model in {given}, and there is no such folder here; "
            f"put the model there, or {_how_to_say(folder)}"
        )
    return given


def merge_adapter(causal: Any, folder: str | Path) -> Any:
    """The causal LM with the adapter added to its weights; plain again, every weight trainable. `causal` is used up.

    Raises ModelError for files that cannot be read, and for an adapter of another model.
    """
    from safetensors import SafetensorError

    _check_files(folder)
    names = read_adapter_config(folder).get("base_model_name_or_path")
    try:
        with warnings.catch_warnings():
            # GPT-2 keeps its linear layers transposed; peft sets fan_in_fan_out itself and warns that it did.
            warnings.filterwarnings("ignore", message=".*fan_in_fan_out.*")
            # peft reads a property of the model that newer transformers have renamed.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
            # Refused below, as an error.
            warnings.filterwarnings("ignore", message=".*missing adapter keys.*")
            merged = _merged(causal, folder, names)
    except (OSError, SafetensorError, EOFError) as error:
        raise ModelError(f"the adapter in {folder} cannot be read: {_first_line(error)}") from error
    except (ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:  # peft has no errors of its own
        raise _misfit(folder, names, _first_line(error)) from error
    for parameter in merged.parameters():
        parameter.requires_grad_(True)  # peft froze them
    merged.name_or_path = merged.config._name_or_path = str(Path(folder).absolute())
    return merged.eval()


def _merged(causal: Any, folder: str | Path, names: Any) -> Any:
    from peft import PeftModel, get_peft_model_state_dict
    from peft.utils.save_and_load import load_peft_weights

    if read_adapter_config(folder).get("megatron_config"):
        # peft would import the module that the file names.
        raise ModelError(f"the adapter in {folder} is one of Megatron's, which is not supported; give another adapter")
    peft_model = PeftModel.from_pretrained(causal, str(folder))
    if not hasattr(peft_model, "merge_and_unload"):
        kind = read_adapter_config(folder).get("peft_type")
        raise ModelError(f"the adapter in {folder} is of the kind {kind}, which cannot be merged into weights")
    # peft passes over layers that only one of the two has.
    own = set(get_peft_model_state_dict(peft_model, save_embedding_layers=False))
    stored = set(load_peft_weights(str(folder), device="cpu"))
    strange = sorted(own - stored) or sorted(name for name in stored - own if "lora_" in name)
    if strange:
        raise _misfit(folder, names, f"one of them has {strange[0]}, and the other does not")
    return peft_model.merge_and_unload(safe_merge=True)


def _check_files(folder: str | Path) -> None:
    if not any((Path(folder) / name).is_file() for name in _WEIGHTS):
        raise ModelError(f"the adapter in {folder} has no {_WEIGHTS[0]}, so it cannot be loaded; give another folder")


def _moved_with(folder: Path, parts: Iterable[str]) -> Path | None:
    """`OUT/sft/checkpoints/X` beside an adapter in `OUT/rl/checkpoints/Y`: the run's own layout."""
    if len(folder.parents) < 3 or folder.parent.name != "checkpoints" or folder.parents[1].name != "rl":
        return None
    tail = tuple(parts)[-3:]
    if tail[:2] != ("sft", "checkpoints"):
        return None
    found = folder.parents[2].joinpath(*tail)
    return found if found.is_dir() else None


def _how_to_say(folder: str | Path) -> str:
    return f'write its folder or hub name into {Path(folder) / ADAPTER_CONFIG}, as "base_model_name_or_path"'


def _misfit(folder: str | Path, base: Any, detail: str) -> ModelError:
    return ModelError(
        f"the adapter in {folder} does not fit the model that it names, {base}: {detail}\n"
        f"if another model is meant, {_how_to_say(folder)}"
    )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if len(lines) > 1 and lines[0].startswith("Error(s) in loading"):  # the first line says no more than that
        return lines[1]
    return lines[0] if lines else type(error).__name__
