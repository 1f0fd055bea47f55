"""A checkpoint folder: weights that transformers (or peft) load, the trainer's state, and a manifest that is written
last.

The folder appears under its name in one rename, whole, or not at all. `trainer.pt` holds only tensors, numbers and
text, and is read with `weights_only=True`.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollouts.errors import ConfigError, ModelError
from rollouts.training.models import load_hf_model, load_tokenizer, no_progress_bars

__all__ = ["MANIFEST", "check_folder", "model_fingerprint", "read_trainer_state", "read_weights", "write_checkpoint"]

MANIFEST = "manifest.json"
_TRAINER = "trainer.pt"


def write_checkpoint(
    path: str, *, model: Any, kind: str, trainer_state: dict[str, Any], fingerprint: str, source: str | None = None
) -> None:
    """Write the folder `path`. `model` has save_pretrained; `source` is where a tokenizer can be copied from, if
    anywhere.

    A checkpoint that is there already under this name is replaced. Raises ConfigError where nothing can be written.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.writing-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        with no_progress_bars():
            model.save_pretrained(str(temporary))
        _copy_tokenizer(source, temporary)
        torch.save(trainer_state, temporary / _TRAINER)
        manifest = {
            "format": 1,
            "kind": kind,
            "model": fingerprint,
            "version": trainer_state["version"],
            "files": {file.name: _settled_size(file) for file in sorted(temporary.iterdir()) if file.is_file()},
        }
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        _settled_size(temporary / MANIFEST)
        _sync_folder(temporary)
        _replace(temporary, target)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise ConfigError(f"the checkpoint {path} cannot be written: {error}") from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def check_folder(path: str, *, kind: str, fingerprint: str) -> None:
    """Refuse a folder that is missing, unfinished, truncated (ConfigError) or of another model (ModelError)."""
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(
            f"there is no checkpoint {path}; give a folder that a run wrote, such as checkpoints/step_000010"
        )
    if not (folder / MANIFEST).is_file():
        raise ConfigError(f"the checkpoint {path} has no {MANIFEST}, so writing it did not finish; give an earlier one")
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files, found_kind, found_model = dict(manifest["files"]), str(manifest["kind"]), str(manifest["model"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"the {MANIFEST} of the checkpoint {path} cannot be read: {error}; give an earlier one"
        ) from error
    for name, size in files.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes and not the {size} that were written"
            raise ConfigError(f"the checkpoint {path} is damaged: {name} {what}; give an earlier one")
    if found_kind != kind:
        words = {"full": "all weights", "adapter": "a LoRA adapter"}
        raise ModelError(
            f"the checkpoint {path} holds {words.get(found_kind, found_kind)}, but this run trains {words[kind]}; "
            "give the same lora_rank as the run that wrote it"
        )
    if found_model != fingerprint:
        raise ModelError(
            f"the checkpoint {path} was written by another model (its names and shapes of weights differ); "
            "give the model and lora_rank of the run that wrote it"
        )


def read_trainer_state(path: str) -> dict[str, Any]:
    """The optimizer and the counters. Raises ConfigError for a file that is damaged."""
    try:
        state: dict[str, Any] = torch.load(Path(path) / _TRAINER, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise ConfigError(
            f"{_TRAINER} of the checkpoint {path} cannot be read: {error}; give an earlier one"
        ) from error
    return state


def read_weights(path: str, *, kind: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights by name, on the CPU: of the model, or of the adapter. Raises ModelError or ConfigError."""
    from safetensors import SafetensorError

    try:
        if kind == "adapter":
            from peft.utils.save_and_load import load_peft_weights

            weights: dict[str, Tensor] = load_peft_weights(path, device="cpu")
            return weights
        return dict(load_hf_model(path, dtype=str(dtype).removeprefix("torch."), device="cpu").state_dict())
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"the weights of the checkpoint {path} cannot be read: {error}; give an earlier one"
        ) from error


def model_fingerprint(named: dict[str, Tensor]) -> str:
    """A hash of the names and shapes of weights: tells one architecture from another, not one state from another."""
    lines = [f"{name} {tuple(value.shape)}" for name, value in sorted(named.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _copy_tokenizer(source: str | None, folder: Path) -> None:
    """Put the tokenizer and its chat template beside the weights, so that the folder can be given as a model."""
    if source is None:
        return
    try:
        tokenizer = load_tokenizer(source)
    except ModelError:
        return  # a model without a tokenizer of its own; a run that needed one refused it when it was composed
    tokenizer.save_pretrained(str(folder))


def _settled_size(file: Path) -> int:
    """The file's size in bytes, once it is on the disk."""
    with file.open("rb+") as handle:
        os.fsync(handle.fileno())
    return file.stat().st_size


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":
        return  # folders cannot be opened there
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(temporary: Path, target: Path) -> None:
    """Give the finished folder its name; an old folder of that name goes away only once the new one is there."""
    old = target.with_name(f".{target.name}.old-{os.getpid()}")
    if target.exists():
        os.replace(target, old)
    os.replace(temporary, target)
    _sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)
