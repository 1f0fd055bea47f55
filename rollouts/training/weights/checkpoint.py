"""The trainer's part of a checkpoint folder, format 2:

    config.json, model*.safetensors, tokenizer   in the format of transformers; with LoRA adapter_config.json and
                                                 adapter_model.safetensors, in the format of peft (`files`)
    trainer/                                     torch.distributed.checkpoint: tensors of the optimizer, a critic and
                                                 a reference; sharded ones can be loaded into any number of ranks
    state.json                                   plain data: counters, random states, the run's own state (`store`)
    manifest.json                                written last: format, kind, model, size and crc32 of every file

This module has the tensors of trainer/ and the random states. Reading a checkpoint never runs code from it. The index
of trainer/ is a pickle by torch. It may only contain the few classes that torch uses for an index; any other class is
refused. Tensors are read by `torch.load` with `weights_only`, which restricts classes too.
"""

from __future__ import annotations

import base64
import contextlib
import enum
import hashlib
import pickle
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from rollouts.errors import ConfigError
from rollouts.training.weights.store import TRAINER, cannot_write, damaged

_INDEX = ".metadata"
_INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
        "TensorStorageMetadata _MEM_FORMAT_ENCODING"
    ).split(),
    "torch.distributed.checkpoint.filesystem": ["_StorageInfo"],
    "torch": ["Size"],
}
_UNTRUSTED = "Do not resume from this checkpoint; to use its weights, give the folder as --model"
_PATHS = ("PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath")


# --- tensors ----------------------------------------------------------------------------------------------------------


def write_tensors(folder: Path, tensors: dict[str, Any], *, group: Any = None, alone: bool = False) -> None:
    """Write a nested dict of tensors below `folder`, and flush it to disk. Every rank calls this. An empty dict writes
    nothing.

    Each rank writes its shards of a DTensor. A plain tensor must be the same on every rank, and is written once. If a
    rank cannot write, all ranks raise CheckpointError.

    Args:
        group: the process group of the ranks; None: the default one
        alone: only this process writes, even if it is a rank of a process group
    """
    if not flat(tensors):
        return
    from torch.distributed.checkpoint.state_dict_saver import save

    with _failures(lambda error, where: cannot_write(folder, error, where=where)):
        writer = _Writer(folder / TRAINER, sync_files=True)
        save(tensors, storage_writer=writer, process_group=group, no_dist=alone)


def check_tensors(path: str | Path, template: dict[str, Any]) -> None:
    """Raise ConfigError if the checkpoint lacks a tensor of `template`, or has it with another shape."""
    wanted = flat(template)
    saved = saved_tensors(path) if wanted else {}
    missing = sorted(set(wanted) - set(saved))
    settings = "give the settings of the run that wrote it: --training.optimizer, --lora-rank, --critic, --reference"
    if missing:
        number = f"{len(missing)} of {len(wanted)} are missing"
        raise ConfigError(f"the checkpoint {path} has no tensor {missing[0]} ({number}); {settings}")
    for name, tensor in wanted.items():
        if saved[name].shape != tensor.shape:
            shapes = f"the shape {tuple(saved[name].shape)}, and here it has {tuple(tensor.shape)}"
            raise ConfigError(f"the checkpoint {path} has {name} with {shapes}; {settings}")


def read_trainer_tensors(path: str | Path, template: dict[str, Any], *, group: Any = None, alone: bool = False) -> None:
    """Read the tensors of `template` in place (names and shapes as in `write_tensors`). Every rank calls this.

    Tensors may be plain or DTensors, with any number of ranks. Other tensors of the checkpoint are ignored. Raises
    ConfigError if one is missing, has another shape, or cannot be read.
    """
    check_tensors(path, template)
    if not flat(template):
        return
    from torch.distributed.checkpoint.state_dict_loader import load

    what = f"{TRAINER}/ of the checkpoint {path} cannot be read"
    with _failures(lambda error, where: damaged(path, f"{what}{where}: {error}")):
        load(template, storage_reader=_Reader(Path(path) / TRAINER), process_group=group, no_dist=alone)


def flat(tensors: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Flatten a nested dict of tensors, with the names of torch.distributed.checkpoint."""
    found: dict[str, Tensor] = {}
    for key, value in tensors.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= flat(value, f"{name}.")
        else:
            assert isinstance(value, Tensor), f"{name} is a {type(value).__name__}; numbers and text go in the state"
            found[name] = value
    return found


def saved_tensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors in a checkpoint by name, as meta tensors: only shape and dtype are read. Raises ConfigError."""
    folder = Path(path) / TRAINER
    if not folder.is_dir():
        return {}
    try:
        found = _Reader(folder).read_metadata().state_dict_metadata
        return {
            name: torch.empty(each.size, dtype=each.properties.dtype, device="meta")
            for name, each in found.items()
            if hasattr(each, "size")
        }
    except ConfigError:
        raise  # not damaged but refused, as an earlier checkpoint would be
    except Exception as error:  # a damaged pickle can raise anything
        raise damaged(path, f"the index of {TRAINER}/ of the checkpoint {path} cannot be read: {error}") from error


@contextlib.contextmanager
def _failures(refuse: Callable[[Exception, str], Exception]) -> Iterator[None]:
    """Raise the error that `refuse` makes from the first failed rank's error and a text for that rank."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            # It warns if there is no process group, which is correct here.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if not isinstance(cause, Exception):
            raise cause from error  # an interrupt is not a failure to write
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        raise refuse(cause, f" by rank {rank}" if several else "") from error
    except OSError as error:
        raise refuse(error, "") from error


class _Writer(FileSystemWriter):
    """torch's writer of trainer/, with errors that say why a file could not be written."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # If torch.save cannot finish a file, its error does not say why. The error's cause would be lost on the
            # way to rank 0.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            raise type(cause)(*cause.args) from error


class _Reader(FileSystemReader):
    """torch's reader of trainer/. Its index cannot run code, or refer to files outside the folder."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """Read the index. Raises ConfigError for a class that an index does not use, and any exception for a damaged
        pickle.
        """
        path = Path(self.path) / _INDEX
        with path.open("rb") as file:
            metadata = _IndexUnpickler(file, path).load()
        for info in metadata.storage_data.values():
            if Path(info.relative_path).name != info.relative_path:
                elsewhere = f"{path} names the file {info.relative_path!r}, which is not in its folder"
                raise ConfigError(f"{elsewhere}; the checkpoint is refused")
        return metadata


def _member(owner: Any, name: str) -> Any:
    """An enumeration member of the index, by name. Raises ConfigError for anything else."""
    if not (isinstance(owner, enum.EnumType) and name in owner.__members__):
        raise ConfigError(
            f"a checkpoint's index asks for {name!r} of {owner!r}; the checkpoint is refused. {_UNTRUSTED}"
        )
    return owner[name]


class _IndexUnpickler(pickle.Unpickler):
    """Loads only the classes that torch uses for an index, and dtypes of tensors. `path` is for the error."""

    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """Raise ConfigError for any other class."""
        if name in _INDEX_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("builtins", "__builtin__") and name == "getattr":
            return _member  # Python 3.11.0 to 3.11.3 write enumeration members this way
        if (module, name) == ("torch.serialization", "_get_layout"):
            return {"torch.strided": torch.strided}.__getitem__
        if module.partition(".")[0] == "pathlib" and name in _PATHS:
            return PurePosixPath  # the path of the written folder; unused, and perhaps of another system
        asks = f"{self._path} asks for `{module}.{name}`, which is no part of a checkpoint's index"
        raise ConfigError(f"{asks}; loading it could run code, so it is refused. {_UNTRUSTED}")


# --- the model, and the random generators -----------------------------------------------------------------------------


def model_fingerprint(named: Mapping[str, Tensor]) -> str:
    """A hash of the names and shapes of weights. Models of one architecture have the same hash, whatever their weights
    and number of ranks are.
    """
    lines = [f"{name} {tuple(value.shape)}" for name, value in sorted(named.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def generator_states() -> dict[str, Any]:
    """The states of this process's random generators as plain data: of python, numpy, torch, and of the GPUs that it
    has used.
    """
    import numpy as np

    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(numbers), gauss], "torch": _as_text(torch.get_rng_state())}
    found: Any = np.random.get_state(legacy=False)
    if found["bit_generator"] == "MT19937":  # numpy's only generator that `seed` accepts
        key = base64.b64encode(found["state"]["key"].astype("<u4").tobytes()).decode()
        state["numpy"] = [key, int(found["state"]["pos"]), int(found["has_gauss"]), float(found["gauss"])]
    cuda: Any = torch.cuda
    if cuda.is_available() and cuda.is_initialized():
        state["cuda"] = [_as_text(each) for each in cuda.get_rng_state_all()]
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore `generator_states`: of the first GPUs, if there are fewer than before. Raises ConfigError."""
    import numpy as np

    try:
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers), gauss))
        torch.set_rng_state(_as_bytes(state["torch"]))
        if "numpy" in state:
            key, position, has_gauss, cached = state["numpy"]
            words = np.frombuffer(base64.b64decode(key), dtype="<u4")
            np.random.set_state(("MT19937", words.astype(np.uint32), position, has_gauss, cached))
        if "cuda" in state and torch.cuda.is_available():
            for index, each in enumerate(state["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(_as_bytes(each), index)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        versions = "the versions of python, numpy and torch that wrote it (manifest.json of the run says which)"
        what = f"the random states of the checkpoint cannot be set here: {error!r}"
        raise ConfigError(f"{what}; continue with {versions}") from error


def _as_text(state: Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _as_bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
