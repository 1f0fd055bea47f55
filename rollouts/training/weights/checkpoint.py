"""What the trainer keeps in a checkpoint folder, format 2:

    config.json, model*.safetensors, tokenizer   as transformers loads them; with LoRA adapter_config.json and
                                                 adapter_model.safetensors, as peft loads them (`files`)
    trainer/                                     torch.distributed.checkpoint: the optimizer's tensors, and a critic's
                                                 and a reference's; sharded ones load into any number of ranks
    state.json                                   plain data: counters, random states, the run's own state (`store`)
    manifest.json                                written last: format, kind, model, size and crc32 of every file

Here are the tensors of trainer/ and the random states. Reading a checkpoint runs no code from it: the index of trainer/
is a pickle of torch's, of which only the classes of an index are loaded. The tensors themselves are read by
`torch.load` with `weights_only`, which does the same.
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
    """Every rank: write a nested dict of tensors below `folder`, and bring it to the disk. Nothing for an empty one.
    `group` is the process group whose ranks they are (None: all). `alone`: this process does it by itself, though it
    may be a rank of something else.

    A DTensor is written in its shards, each rank its own; a plain tensor must be the same on every rank, and is written
    once. Raises CheckpointError, on every rank where one cannot write.
    """
    if not flat(tensors):
        return
    from torch.distributed.checkpoint.state_dict_saver import save

    with _failures(lambda error, where: cannot_write(folder, error, where=where)):
        writer = _Writer(folder / TRAINER, sync_files=True)
        save(tensors, storage_writer=writer, process_group=group, no_dist=alone)


def check_tensors(path: str | Path, template: dict[str, Any]) -> None:
    """Raises ConfigError where a tensor of `template` is not in the checkpoint, or has another shape there."""
    wanted = flat(template)
    saved = _saved_shapes(path) if wanted else {}
    missing = sorted(set(wanted) - set(saved))
    settings = "give the settings of the run that wrote it: --training.optimizer, --lora-rank, --critic, --reference"
    if missing:
        number = f"{len(missing)} of {len(wanted)} are missing"
        raise ConfigError(f"the checkpoint {path} has no tensor {missing[0]} ({number}); {settings}")
    for name, tensor in wanted.items():
        if saved[name] != tuple(tensor.shape):
            shapes = f"the shape {saved[name]}, and here it has {tuple(tensor.shape)}"
            raise ConfigError(f"the checkpoint {path} has {name} with {shapes}; {settings}")


def read_tensors(path: str | Path, template: dict[str, Any], *, group: Any = None, alone: bool = False) -> None:
    """Every rank: fill the tensors of `template` (names and shapes as in `write_tensors`; plain or DTensor, of any
    number of ranks) in place. What is in the folder beyond them is left alone.

    Raises ConfigError where one is missing, has another shape, or cannot be read.
    """
    check_tensors(path, template)
    if not flat(template):
        return
    from torch.distributed.checkpoint.state_dict_loader import load

    what = f"{TRAINER}/ of the checkpoint {path} cannot be read"
    with _failures(lambda error, where: damaged(path, f"{what}{where}: {error}")):
        load(template, storage_reader=_Reader(Path(path) / TRAINER), process_group=group, no_dist=alone)


def saved_keys(path: str | Path) -> set[str]:
    """The names of the tensors of `write_tensors`, as "optimizer.causal.lm_head.weight.exp_avg". Raises ConfigError."""
    return set(_saved_shapes(path))


def flat(tensors: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """A nested dict of tensors by the names that torch.distributed.checkpoint gives them."""
    found: dict[str, Tensor] = {}
    for key, value in tensors.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= flat(value, f"{name}.")
        else:
            assert isinstance(value, Tensor), f"{name} is a {type(value).__name__}; numbers and text go in the state"
            found[name] = value
    return found


def _saved_shapes(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape, of what is a tensor. Raises ConfigError."""
    folder = Path(path) / TRAINER
    if not folder.is_dir():
        return {}
    try:
        found = _Reader(folder).read_metadata().state_dict_metadata
        return {name: tuple(each.size) for name, each in found.items() if hasattr(each, "size")}
    except ConfigError:
        raise  # refused, not damaged: an earlier checkpoint from the same place is no better
    except Exception as error:  # a damaged pickle can raise anything
        raise damaged(path, f"the index of {TRAINER}/ of the checkpoint {path} cannot be read: {error}") from error


@contextlib.contextmanager
def _failures(refuse: Callable[[Exception, str], Exception]) -> Iterator[None]:
    """Raise what `refuse` makes of the first rank's failure, and of where it was, in words."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            # It warns where there is no process group; that is as it should be here.
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
    """torch's writer of trainer/, whose errors say why a file could not be written."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch.save ends a file that it could not write with an error that does not say why; what it came from
            # would be lost on the way to rank 0.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            raise type(cause)(*cause.args) from error


class _Reader(FileSystemReader):
    """torch's reader of trainer/, with an index that cannot run code and files that lie in that folder."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """The index. Raises ConfigError where it asks for what no index holds, and whatever a damaged pickle raises."""
        path = Path(self.path) / _INDEX
        with path.open("rb") as file:
            metadata = _IndexUnpickler(file, path).load()
        for info in metadata.storage_data.values():
            if Path(info.relative_path).name != info.relative_path:
                elsewhere = f"{path} names the file {info.relative_path!r}, which is not in its folder"
                raise ConfigError(f"{elsewhere}; the checkpoint is refused")
        return metadata


def _member(owner: Any, name: str) -> Any:
    """A member of an enumeration of the index, by its name. Raises ConfigError for anything else."""
    if not (isinstance(owner, enum.EnumType) and name in owner.__members__):
        raise ConfigError(
            f"a checkpoint's index asks for {name!r} of {owner!r}; the checkpoint is refused. {_UNTRUSTED}"
        )
    return owner[name]


class _IndexUnpickler(pickle.Unpickler):
    """Loads the classes of an index and the types of tensors, and nothing else. `path` is for the error."""

    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """Raises ConfigError for a name that is no part of an index."""
        if name in _INDEX_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("builtins", "__builtin__") and name == "getattr":
            return _member  # so Python 3.11.0 to 3.11.3 write the member of an enumeration
        if (module, name) == ("torch.serialization", "_get_layout"):
            return {"torch.strided": torch.strided}.__getitem__
        if module.partition(".")[0] == "pathlib" and name in _PATHS:
            return PurePosixPath  # where the checkpoint was written: not used, and perhaps of another system
        asks = f"{self._path} asks for `{module}.{name}`, which is no part of a checkpoint's index"
        raise ConfigError(f"{asks}; loading it could run code, so it is refused. {_UNTRUSTED}")


# --- the model, and the random generators -----------------------------------------------------------------------------


def model_fingerprint(named: Mapping[str, Tensor]) -> str:
    """A hash of the names and shapes of weights: tells one architecture from another, not one state from another, nor
    on how many ranks they lie.
    """
    lines = [f"{name} {tuple(value.shape)}" for name, value in sorted(named.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def random_state() -> dict[str, Any]:
    """The random generators of this process, as plain data: python's, numpy's, torch's, and those of its GPUs where it
    has used them.
    """
    import numpy as np

    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(numbers), gauss], "torch": _as_text(torch.get_rng_state())}
    found: Any = np.random.get_state(legacy=False)
    if found["bit_generator"] == "MT19937":  # the only kind that seeds can make
        key = base64.b64encode(found["state"]["key"].astype("<u4").tobytes()).decode()
        state["numpy"] = [key, int(found["state"]["pos"]), int(found["has_gauss"]), float(found["gauss"])]
    cuda: Any = torch.cuda
    if cuda.is_available() and cuda.is_initialized():
        state["cuda"] = [_as_text(each) for each in cuda.get_rng_state_all()]
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore `random_state`. Where there are fewer GPUs now, the first ones' are set. Raises ConfigError."""
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
        raise ConfigError(f"{what}; go on with {versions}") from error


def _as_text(state: Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _as_bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
