"""Weights as a folder that servers load, and as a manifest that says what must lie in it.

    v000012/   of all weights: config.json, generation_config.json, the tokenizer's files, model.safetensors
               of an adapter: adapter_config.json, adapter_model.safetensors

Names are those of transformers' and peft's own files; a weight that the model ties to another one is not written. A
folder appears under its name in one rename, and `check_folder` reads every byte of it back. Files are written and read
here, tensor by tensor, since safetensors' own functions hold the interpreter while they work. Left out: sending
(`weight_sync`), and checkpoints (`backends.checkpoint`).
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from rollouts.errors import CheckpointError, ConfigError, InferenceError
from rollouts.inference.base import TensorInfo

__all__ = [
    "ModelFiles",
    "WritesFiles",
    "check_folder",
    "file_tensors",
    "find_faults",
    "manifest_of",
    "prune_folders",
    "read_manifest",
    "read_tensors",
    "version_folder",
    "write_folder",
]

Kind = Literal["full", "adapter"]

WEIGHTS: Mapping[Kind, str] = {"full": "model.safetensors", "adapter": "adapter_model.safetensors"}
CONFIGS: Mapping[Kind, str] = {"full": "config.json", "adapter": "adapter_config.json"}
_INDEX = "model.safetensors.index.json"
_VERSIONED = re.compile(r"v(\d{6,})")
_TEMPORARY = re.compile(r"\.(v\d{6,})\.(writing|old)-\d+")
_HEADER_BYTES_MAX = 100_000_000  # what safetensors itself allows
_CHUNK_BYTES = 2**24
# As safetensors calls types, and as torch does.
_CODES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "I64": "int64",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
_CODE_OF = {name: code for code, name in _CODES.items()}


class ModelFiles(NamedTuple):
    """What a folder holds beside the tensors: of `causal` only the class, the config and which weights are tied are
    used; `adapter_config` is peft's (None: all weights are trained); `source` is where the tokenizer lies, if anywhere.
    """

    causal: Any
    adapter_config: Any = None
    source: str | None = None


@runtime_checkable
class WritesFiles(Protocol):
    """A training backend whose weights can be written as a folder."""

    @property
    def model_files(self) -> ModelFiles:
        """What is written beside them."""
        ...


# --- the manifest -----------------------------------------------------------------------------------------------------


def file_tensors(weights: Mapping[str, Any], kind: Kind, causal: Any) -> dict[str, Any]:
    """The tensors that a folder holds, by the names of transformers' or peft's files; of tied ones the first only.

    `weights` are a training backend's (`get_weights`). Raises InferenceError where weights that the model ties differ,
    as those of an adapter on the output layer do: no server could load them.
    """
    if kind == "adapter":
        return dict(weights)
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    tensors = dict(weights)
    for name, source in (getattr(causal, "all_tied_weights_keys", None) or {}).items():
        if name not in tensors or source not in tensors:
            continue
        if not torch.equal(tensors[name], tensors[source]):
            raise InferenceError(
                f"the model ties {name} to {source}, but here they differ, so a server cannot load them; leave the "
                "output layer out of --training.lora-targets, or take an engine that shares the trainer's weights "
                "(--inference hf)",
                is_transient=False,
            )
        del tensors[name]
    for pattern in getattr(causal, "_keys_to_ignore_on_save", None) or ():
        tensors = {name: tensor for name, tensor in tensors.items() if not re.search(pattern, name)}
    return dict(revert_weight_conversion(causal, tensors))


def manifest_of(tensors: Mapping[str, Any]) -> tuple[TensorInfo, ...]:
    """Name, shape, type and crc32 of each CPU tensor, in their order."""
    return tuple(
        TensorInfo(name, tuple(tensor.shape), _dtype_of(tensor), _crc_of(_bytes_of(tensor)))
        for name, tensor in tensors.items()
    )


def find_faults(wanted: Sequence[TensorInfo], found: Sequence[TensorInfo]) -> list[str]:
    """What `found` has otherwise than `wanted`, a tensor a line."""
    there = {each.name: each for each in found}
    faults = []
    for each in wanted:
        other = there.pop(each.name, None)
        if other is None:
            faults.append(f"{each.name} {list(each.shape)} is missing")
        elif (other.shape, other.dtype) != (each.shape, each.dtype):
            faults.append(
                f"{each.name} is {other.dtype} {list(other.shape)}, and must be {each.dtype} {list(each.shape)}"
            )
        elif other.crc32 != each.crc32:
            faults.append(f"{each.name} has other bytes (crc32 {other.crc32:08x}, and must be {each.crc32:08x})")
    return faults + [f"{name} does not belong there" for name in there]


# --- writing ----------------------------------------------------------------------------------------------------------


def version_folder(parent: str | Path, version: int) -> Path:
    """Where the weights of a version lie."""
    return Path(parent) / f"v{version:06d}"


def write_folder(
    parent: str | Path,
    version: int,
    kind: Kind,
    tensors: Mapping[str, Any],
    files: ModelFiles,
    *,
    like: str | Path | None = None,
) -> Path:
    """Write `parent`/v000012 (one that is there is replaced) in one rename, and give its path. `like` is an earlier
    folder of the same run, whose other files are taken over.

    Raises InferenceError where it cannot be written; nothing stays then.
    """
    folder = version_folder(parent, version)
    temporary = folder.with_name(f".{folder.name}.writing-{os.getpid()}")
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        if like is not None and (Path(like) / CONFIGS[kind]).is_file():
            _take_over(Path(like), temporary)
        else:
            _write_beside(temporary, kind, files)
        _write_tensors(temporary / WEIGHTS[kind], version, tensors)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        temporary.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, CheckpointError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        size = sum(tensor.nbytes for tensor in tensors.values()) / 2**30
        raise InferenceError(
            f"the weights of version {version} ({size:.2g} GiB) cannot be written to {folder}: "
            f"{reason}; make room for two such folders there, or choose another place with "
            "--inference.weights-folder",
            is_transient=False,
        ) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder


def prune_folders(parent: str | Path, keep: Collection[int]) -> None:
    """Remove the folders of all versions but these, and what a process that was killed has left there."""
    kept = {version_folder(parent, version).name for version in keep}
    for entry in Path(parent).iterdir():
        found = _VERSIONED.fullmatch(entry.name) or _TEMPORARY.fullmatch(entry.name)
        if found is not None and entry.name not in kept and entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)  # what stays is removed the next time


def _take_over(like: Path, folder: Path) -> None:
    for entry in like.iterdir():
        if entry.is_file() and entry.suffix != ".safetensors":
            try:
                os.link(entry, folder / entry.name)
            except OSError:  # a file system without links
                shutil.copyfile(entry, folder / entry.name)


def _write_beside(folder: Path, kind: Kind, files: ModelFiles) -> None:
    if kind == "adapter":
        assert files.adapter_config is not None, "a backend that gives an adapter's weights has its configuration"
        config = copy.copy(files.adapter_config)
        config.inference_mode = True  # as peft writes it: who loads it wants to use it
        config.save_pretrained(str(folder))
        return
    config = copy.deepcopy(files.causal.config)
    config.dtype = str(files.causal.dtype).removeprefix("torch.")
    config.architectures = [type(files.causal).__name__.removeprefix("FSDP")]
    config.save_pretrained(str(folder))
    if getattr(files.causal, "generation_config", None) is not None:
        files.causal.generation_config.save_pretrained(str(folder))
    from rollouts.training.backends.checkpoint import copy_tokenizer

    copy_tokenizer(files.source, folder)


def _write_tensors(path: Path, version: int, tensors: Mapping[str, Any]) -> None:
    """One file as safetensors defines it: the header's length, the header, the tensors (wide types first, so that each
    begins where its type may), brought to the disk.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "policy_version": str(version)}}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        code = _CODE_OF[_dtype_of(tensor)]
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(_bytes_of(tensors[name]))
        file.flush()
        os.fsync(file.fileno())


# --- reading back -----------------------------------------------------------------------------------------------------


def check_folder(path: str | Path, manifest: Sequence[TensorInfo], version: int) -> None:
    """Read what was written, and compare it with the manifest. Raises InferenceError, which names the tensors."""
    try:
        faults = find_faults(manifest, read_manifest(path))
    except ConfigError as error:
        faults = [str(error)]
    if faults:
        more = f" ({len(faults)} such faults among {len(manifest)} tensors)" if len(faults) > 1 else ""
        raise InferenceError(
            f"the weights of version {version} in {path} are not the trainer's: {faults[0]}{more}. No engine was "
            "asked to load them; see whether the disk is sound, and whether something else writes there",
            is_transient=False,
        )


def read_manifest(path: str | Path) -> tuple[TensorInfo, ...]:
    """What lies in a folder: of a model (one file, or several with an index) or of an adapter. Every byte is read.

    Raises ConfigError for a folder that is not there, not whole, or no model.
    """
    return tuple(each for file in _weight_files(Path(path)) for each in _read_file(file))


def read_tensors(path: str | Path) -> dict[str, Any]:
    """The tensors of such a folder by name. Raises ConfigError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return {name: tensor for file in _weight_files(Path(path)) for name, tensor in load_file(file).items()}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"the weights in {path} cannot be read: {error}") from error


def _weight_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; give one with a model's weights, or with an adapter's")
    if (folder / _INDEX).is_file():
        try:
            names = set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{folder / _INDEX} cannot be read: {error!r}") from error
        missing = sorted(name for name in names if not (folder / name).is_file())
        if missing:
            raise ConfigError(f"the folder {folder} lacks {missing[0]}, which {_INDEX} names ({len(missing)} such)")
        files = [folder / name for name in sorted(names)]
    else:
        files = [folder / name for name in WEIGHTS.values() if (folder / name).is_file()][:1]
    if not files:
        raise ConfigError(f"the folder {folder} holds no {' and no '.join(WEIGHTS.values())}")
    config = CONFIGS["adapter" if files[0].name == WEIGHTS["adapter"] else "full"]
    if not (folder / config).is_file():
        raise ConfigError(f"the folder {folder} holds no {config}")
    return files


def _read_file(path: Path) -> list[TensorInfo]:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 0 < length <= min(size - 8, _HEADER_BYTES_MAX):
                raise ConfigError(f"{path} is no safetensors file, or cut off")
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            places = [(*each["data_offsets"], name, each["shape"], each["dtype"]) for name, each in header.items()]
            ends = max((end for _, end, *_ in places), default=0)
            if size != 8 + length + ends:
                raise ConfigError(
                    f"{path} has {size} bytes, and its header speaks of {8 + length + ends}: it is cut off"
                )
            found = []
            for begin, end, name, shape, code in sorted(places):
                file.seek(8 + length + begin)
                crc = _crc_of_file(file, end - begin)
                found.append(TensorInfo(name, tuple(shape), _CODES.get(code, code), crc))
            return found
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"the header of {path} cannot be read: {error!r}") from error


def _crc_of_file(file: Any, length: int) -> int:
    crc = 0
    while length > 0:
        chunk = file.read(min(length, _CHUNK_BYTES))
        if not chunk:
            raise ConfigError(f"{file.name} is cut off")
        crc, length = zlib.crc32(chunk, crc), length - len(chunk)
    return crc


def _bytes_of(tensor: Any) -> memoryview:
    """A CPU tensor's bytes in C order, without a copy where it lies so."""
    import torch

    assert tensor.device.type == "cpu", tensor.device
    if tensor.numel() == 0:
        return memoryview(b"")
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def _crc_of(data: memoryview) -> int:
    return zlib.crc32(data)


def _dtype_of(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
