"""Weights as folders for transformers, peft and servers, and a manifest with the expected content of a folder.

    v000012/   of all weights: config.json, generation_config.json, the tokenizer's files, model.safetensors
               of an adapter: adapter_config.json, adapter_model.safetensors

Checkpoints have the same files (`write_weights`, `read_weights`); if each role has an adapter, in a folder
`adapters/<role>`. Names of tensors are those of transformers' and peft's files. Of tied weights, only the first is
written. A folder for servers gets its name when it is complete, and `check_weights_folder` reads every byte of it. Not
here: sending (`sync`), and other parts of a checkpoint (`checkpoint`).
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import shutil
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollouts.disk import HIDDEN_NAME, new_folder
from rollouts.errors import ConfigError, InferenceError, ModelError
from rollouts.inference.base import TensorInfo
from rollouts.models.folders import ADAPTERS, WEIGHTS, Kind, read_files, read_tensors, role_adapters
from rollouts.models.loading import load_hf_model, load_tokenizer, no_progress_bars
from rollouts.training.weights.store import crc32_of, damaged

_HEADER_BYTES_MAX = 100_000_000  # the limit of safetensors
_VERSIONED = re.compile(r"v(\d{6,})")


class ModelFiles(NamedTuple):
    """What a folder has beside the tensors.

    Attributes:
        causal: the model; only its class, config and tied names are used, so its parameters may be sharded or on the
            meta device
        adapter_config: peft's configuration; None: all weights are trained
        source: the folder or name with the tokenizer, or None
        roles: the roles with an adapter of their own, with whose names those of the weights begin (`buyer/...`)
    """

    causal: Any
    adapter_config: Any = None
    source: str | None = None
    roles: tuple[str, ...] = ()


# --- in a checkpoint --------------------------------------------------------------------------------------------------


def write_weights(folder: Path, kind: Kind, weights: Mapping[str, Any], files: ModelFiles) -> bool:
    """Write weights in the format of transformers, or of peft for an adapter, and the tokenizer. Returns whether there
    is a tokenizer. `weights` are complete and on the CPU, by the names of the causal LM or of peft's files. Raises
    OSError.
    """
    if kind == "full":
        with no_progress_bars(), _os_errors():
            files.causal.save_pretrained(str(folder), state_dict=_without_tied(weights, files.causal))
    else:
        assert files.adapter_config is not None, "a backend with an adapter has its configuration"
        config = copy.copy(files.adapter_config)
        config.inference_mode = True  # as peft writes it, because adapters are usually loaded for inference
        parts = {folder / ADAPTERS / role: f"{role}/" for role in files.roles} or {folder: ""}
        for place, prefix in parts.items():
            own = {name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)}
            config.save_pretrained(str(place))
            save_tensors(place / WEIGHTS["adapter"], own)
    return copy_tokenizer(files.source, folder)


def read_weights(path: str, *, kind: str, dtype: Any) -> dict[str, Any]:
    """Read the weights by name, on the CPU: of a model in torch's `dtype`, or of an adapter. Raises ModelError or
    ConfigError.
    """
    try:
        if kind == "adapter":
            parts = {f"{role}/": folder for role, folder in role_adapters(path).items()} or {"": Path(path)}
            return {prefix + name: t for prefix, place in parts.items() for name, t in read_tensors(place).items()}
        return dict(load_hf_model(path, dtype=str(dtype).removeprefix("torch."), device="cpu").state_dict())
    except (OSError, ConfigError) as error:
        raise damaged(path, f"the weights of the checkpoint {path} cannot be read: {error}") from error


def copy_tokenizer(source: str | None, folder: Path) -> bool:
    """Write the tokenizer and its chat template beside the weights, so that the folder is a complete model. Returns
    False if `source` is None or has no tokenizer. Raises OSError.
    """
    if source is None:
        return False
    try:
        tokenizer = load_tokenizer(source)
    except ModelError:
        return False  # a model without a tokenizer; a run that needs a tokenizer has failed earlier
    with _os_errors(Exception):  # tokenizers has no class for errors of a full disk
        tokenizer.save_pretrained(str(folder))
    return True


def save_tensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write CPU tensors as one safetensors file. Raises OSError."""
    from safetensors.torch import save_file

    with _os_errors():
        save_file({name: each.detach().contiguous() for name, each in tensors.items()}, path, {"format": "pt"})


@contextlib.contextmanager
def _os_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Convert disk errors of Rust libraries, of safetensors and of these `kinds`, to OSError."""
    from safetensors import SafetensorError

    caught: tuple[type[Exception], ...] = (SafetensorError, *kinds)
    try:
        yield
    except OSError:
        raise
    except caught as error:
        raise OSError(str(error)) from error


# --- the manifest -----------------------------------------------------------------------------------------------------


def file_tensors(weights: Mapping[str, Any], kind: Kind, causal: Any) -> dict[str, Any]:
    """The tensors of a folder, by the names in transformers' or peft's files; of tied ones, only the first.

    `weights` come from a training backend (`get_weights`). Raises InferenceError if tied weights differ, for example
    because of an adapter on the output layer. No server could load them.
    """
    if kind == "adapter":
        return dict(weights)
    from transformers.core_model_loading import revert_weight_conversion

    tensors = _without_tied(weights, causal)
    for name, source in (getattr(causal, "all_tied_weights_keys", None) or {}).items():
        if name in tensors and source in tensors:
            what = f"the model ties {name} to {source}, but here they differ, so a server cannot load them"
            own = "take an engine that shares the trainer's weights (--inference hf)"
            hint = f"leave the output layer out of --training.lora-targets, or {own}"
            raise InferenceError(f"{what}; {hint}", is_transient=False)
    for pattern in getattr(causal, "_keys_to_ignore_on_save", None) or ():
        tensors = {name: tensor for name, tensor in tensors.items() if not re.search(pattern, name)}
    return dict(revert_weight_conversion(causal, tensors))


def manifest_of(tensors: Mapping[str, Any]) -> tuple[TensorInfo, ...]:
    """Name, shape, type and crc32 (of the bytes in C order) of each CPU tensor, in order."""
    import torch

    found = []
    for name, tensor in tensors.items():
        assert tensor.device.type == "cpu", tensor.device
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        found.append(_info(name, tensor, zlib.crc32(data)))
    return tuple(found)


def _info(name: str, tensor: Any, crc32: int) -> TensorInfo:
    return TensorInfo(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), crc32)


def find_faults(wanted: Sequence[TensorInfo], found: Sequence[TensorInfo]) -> list[str]:
    """Describe how `found` differs from `wanted`, one line per tensor."""
    there = {each.name: each for each in found}
    faults = []
    for each in wanted:
        other = there.pop(each.name, None)
        if other is None:
            faults.append(f"{each.name} {list(each.shape)} is missing")
        elif (other.shape, other.dtype) != (each.shape, each.dtype):
            given, wanted_one = (f"{info.dtype} {list(info.shape)}" for info in (other, each))
            faults.append(f"{each.name} is {given}, and must be {wanted_one}")
        elif other.crc32 != each.crc32:
            faults.append(f"{each.name} has other bytes (crc32 {other.crc32:08x}, and must be {each.crc32:08x})")
    return faults + [f"{name} does not belong there" for name in there]


def _without_tied(weights: Mapping[str, Any], causal: Any) -> dict[str, Any]:
    """The weights without those that are tied to another one and equal to it."""
    import torch

    tied: Mapping[str, str] = getattr(causal, "all_tied_weights_keys", None) or {}
    return {
        name: value
        for name, value in weights.items()
        if not (name in tied and tied[name] in weights and torch.equal(value, weights[tied[name]]))
    }


# --- a folder for servers ---------------------------------------------------------------------------------------------


def version_folder(parent: str | Path, version: int) -> Path:
    """The path of a version's folder."""
    return Path(parent) / f"v{version:06d}"


def write_folder(
    parent: str, version: int, kind: Kind, weights: Mapping[str, Any], files: ModelFiles, *, like: str | None = None
) -> Path:
    """Write `parent`/v000012, which replaces an older folder, with one rename. Returns its path. Files other than
    weights that are missing, such as the tokenizer, come from `like`, an earlier folder of the same run.

    Raises InferenceError if the folder cannot be written; then an incomplete folder is removed.
    """
    folder = version_folder(parent, version)
    try:
        with new_folder(folder) as inside:
            earlier = [] if like is None or not Path(like).is_dir() else [*Path(like).iterdir()]
            needs_tokenizer = kind == "full" and not earlier
            write_weights(inside, kind, weights, files if needs_tokenizer else files._replace(source=None))
            for entry in earlier:
                target = inside / entry.name
                if entry.is_file() and not target.exists():
                    with contextlib.suppress(OSError):  # a file system without links
                        target.hardlink_to(entry)
                        continue
                    shutil.copyfile(entry, target)
    except OSError as error:
        size = sum(tensor.nbytes for tensor in weights.values()) / 2**30
        what = f"the weights of version {version} ({size:.2g} GiB) cannot be written to {folder}"
        hint = "make room for two such folders there, or choose another place with --inference.weights-folder"
        raise InferenceError(f"{what}: {error.strerror or error}; {hint}", is_transient=False) from error
    return folder


def prune_folders(parent: str | Path, keep: Collection[int]) -> None:
    """Remove the folders of other versions, and the remains of killed processes."""
    kept = {version_folder(parent, version).name for version in keep}
    for entry in Path(parent).iterdir():
        hidden = HIDDEN_NAME.fullmatch(entry.name)
        is_version = _VERSIONED.fullmatch(hidden["name"] if hidden else entry.name) is not None
        if is_version and entry.name not in kept and entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)  # the next call removes what is left


def check_weights_folder(path: str | Path, manifest: Sequence[TensorInfo], version: int) -> None:
    """Read a written folder, and compare it with the manifest. Raises InferenceError, which names the tensors."""
    try:
        faults = find_faults(manifest, read_manifest(path))
    except ConfigError as error:
        faults = [str(error)]
    if faults:
        more = f" ({len(faults)} such faults among {len(manifest)} tensors)" if len(faults) > 1 else ""
        what = f"the weights of version {version} in {path} are not the trainer's: {faults[0]}{more}"
        hint = "see whether the disk is sound, and whether something else writes there"
        raise InferenceError(f"{what}. No engine was asked to load them; {hint}", is_transient=False)


def read_manifest(path: str | Path) -> tuple[TensorInfo, ...]:
    """The manifest of a folder with a model (one file, or several with an index) or an adapter. Reads every byte.

    Raises ConfigError if the folder does not exist, is incomplete, or is not a model.
    """
    return tuple(read_files(path, _infos_of))


def _infos_of(file: Path) -> Iterator[TensorInfo]:
    """The tensors of a file, read in pieces instead of memory-mapped. If the disk fails or the file is truncated,
    reading raises OSError, whereas access to a mapped byte would end the process.
    """
    from safetensors import safe_open

    with file.open("rb") as data:
        header = data.read(min(int.from_bytes(data.read(8), "little"), _HEADER_BYTES_MAX))
        with safe_open(file, "pt") as checked:
            start, places = data.tell(), json.loads(header)
            for name in checked.keys():
                tensor = checked.get_tensor(name)  # for its type and shape
                data.seek(start + places[name]["data_offsets"][0])
                yield _info(name, tensor, crc32_of(data, tensor.nbytes))
