"""What is in a checkpoint folder, format 2:

    config.json, model*.safetensors, tokenizer   as transformers loads them; with LoRA adapter_config.json and
                                                 adapter_model.safetensors, as peft loads them
    trainer/                                     torch.distributed.checkpoint: the optimizer's tensors, and a critic's
                                                 and a reference's; sharded ones load into any number of ranks
    state.json                                   plain data: counters, random states, the run's own state
    manifest.json                                written last: format, kind, model, size and crc32 of every file

The order of calls is `begin_checkpoint` (rank 0), `write_tensors` (every rank), `write_weights` and
`finish_checkpoint` (rank 0); or `abandon_checkpoint`. To read: `check_folder`, `read_state`, `read_weights`, and
`read_tensors` on every rank. What `checkpoint_files` and `checkpoint_writing` offer is here too; they need no torch.

Reading a checkpoint runs no code from it: the index of trainer/ is a pickle of torch's, of which only the classes of an
index are loaded (`checkpoint_index`).
"""

from __future__ import annotations

import base64
import contextlib
import copy
import hashlib
import random
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollouts.errors import ConfigError, DamagedCheckpointError, ModelError
from rollouts.training.backends.checkpoint_files import (
    FORMAT,
    MANIFEST,
    STATE,
    TRAINER,
    best_checkpoint,
    check_folder,
    complete_checkpoints,
    earlier_checkpoint,
    last_checkpoint,
    prune_checkpoints,
    read_state,
    remove_leftovers,
)
from rollouts.training.backends.checkpoint_writing import (
    abandon_checkpoint,
    begin_checkpoint,
    cannot_write,
    finish_checkpoint,
)
from rollouts.training.models import load_hf_model, load_tokenizer, no_progress_bars

__all__ = [
    "FORMAT",
    "MANIFEST",
    "STATE",
    "TRAINER",
    "abandon_checkpoint",
    "begin_checkpoint",
    "best_checkpoint",
    "check_folder",
    "check_tensors",
    "complete_checkpoints",
    "copy_tokenizer",
    "finish_checkpoint",
    "last_checkpoint",
    "model_fingerprint",
    "prune_checkpoints",
    "random_state",
    "read_state",
    "read_tensors",
    "read_weights",
    "remove_leftovers",
    "saved_keys",
    "set_random_state",
    "write_tensors",
    "write_weights",
]

_ADAPTER_FILE = "adapter_model.safetensors"


def write_tensors(folder: Path, tensors: dict[str, Any], *, group: Any = None, alone: bool = False) -> None:
    """Every rank: write a nested dict of tensors below `folder`, and bring it to the disk. Nothing for an empty one.
    `group` is the process group whose ranks they are (None: all). `alone`: this process does it by itself, though it
    may be a rank of something else.

    A DTensor is written in its shards, each rank its own; a plain tensor must be the same on every rank, and is written
    once. Raises CheckpointError, on every rank where one cannot write; rank 0 then calls `abandon_checkpoint`.
    """
    if not _flat(tensors):
        return
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        with _without_warnings():
            save(tensors, storage_writer=_make_writer(folder / TRAINER), process_group=group, no_dist=alone)
    except CheckpointException as error:
        rank, cause = _first_failure(error)
        raise cannot_write(folder, cause, where=rank) from error
    except OSError as error:
        raise cannot_write(folder, error) from error


def check_tensors(path: str | Path, template: dict[str, Any]) -> None:
    """Raises ConfigError where a tensor of `template` is not in the checkpoint, or has another shape there."""
    wanted = _flat(template)
    saved = _saved_shapes(path) if wanted else {}
    missing = sorted(set(wanted) - set(saved))
    if missing:
        raise ConfigError(
            f"the checkpoint {path} has no tensor {missing[0]} ({len(missing)} of {len(wanted)} are missing); give the "
            "settings of the run that wrote it: --training.optimizer, --lora-rank, --critic, --reference"
        )
    for name, tensor in wanted.items():
        shape = tuple(tensor.shape)
        if saved[name] != shape:
            raise ConfigError(
                f"the checkpoint {path} has {name} with the shape {saved[name]}, and here it has {shape}; "
                "give the settings of the run that wrote it"
            )


def read_tensors(path: str | Path, template: dict[str, Any], *, group: Any = None, alone: bool = False) -> None:
    """Every rank: fill the tensors of `template` (names and shapes as in `write_tensors`; plain or DTensor, of any
    number of ranks) in place. What is in the folder beyond them is left alone.

    Raises ConfigError where one is missing, has another shape, or cannot be read.
    """
    check_tensors(path, template)
    if not _flat(template):
        return
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    from rollouts.training.backends.checkpoint_index import IndexReader

    try:
        with _without_warnings():
            load(template, storage_reader=IndexReader(Path(path) / TRAINER), process_group=group, no_dist=alone)
    except CheckpointException as error:
        rank, cause = _first_failure(error)
        raise DamagedCheckpointError(
            f"{TRAINER}/ of the checkpoint {path} cannot be read{rank}: {cause}; {earlier_checkpoint(path)}"
        ) from error


def saved_keys(path: str | Path) -> set[str]:
    """The names of the tensors of `write_tensors`, as "optimizer.causal.lm_head.weight.exp_avg". Raises ConfigError."""
    return set(_saved_shapes(path))


def write_weights(
    folder: Path, weights: Mapping[str, Tensor], *, causal: Any, adapter: Any = None, source: str | None = None
) -> None:
    """Rank 0: write weights as transformers loads them, or with `adapter` (a PeftModel) as peft loads them.

    `weights` is the full state on the CPU by the names of the causal LM, or of peft's files (`read_adapter_weights`).
    It alone is written: of `causal` only the class, the config and which weights are tied are used, so its own
    parameters may be sharded or on the meta device. `source` is where the tokenizer is copied from, if anywhere.
    Raises CheckpointError.
    """
    from safetensors import SafetensorError

    try:
        if adapter is None:
            with no_progress_bars():
                causal.save_pretrained(str(folder), state_dict=_tied_once(weights, causal))
        else:
            _write_adapter(folder, weights, adapter)
        copy_tokenizer(source, folder)
    except (OSError, SafetensorError) as error:
        raise cannot_write(folder, error) from error


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
        raise DamagedCheckpointError(
            f"the weights of the checkpoint {path} cannot be read: {error}; {earlier_checkpoint(path)}"
        ) from error


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
        raise ConfigError(
            f"the random states of the checkpoint cannot be set here: {error!r}; go on with the versions of python, "
            "numpy and torch that wrote it (manifest.json of the run says which)"
        ) from error


def _as_text(state: Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _as_bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _flat(tensors: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """By the names that torch.distributed.checkpoint gives them."""
    found: dict[str, Tensor] = {}
    for key, value in tensors.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= _flat(value, f"{name}.")
        else:
            assert isinstance(value, Tensor), f"{name} is a {type(value).__name__}; numbers and text go in the state"
            found[name] = value
    return found


def _saved_shapes(path: str | Path) -> dict[str, tuple[int, ...] | None]:
    """Name -> shape; None for what is no tensor, which we never write. Raises ConfigError."""
    folder = Path(path) / TRAINER
    if not folder.is_dir():
        return {}
    from rollouts.training.backends.checkpoint_index import IndexReader

    try:
        found = IndexReader(folder).read_metadata().state_dict_metadata
        sizes = {name: getattr(each, "size", None) for name, each in found.items()}
        return {name: None if size is None else tuple(size) for name, size in sizes.items()}
    except ConfigError:
        raise  # refused, not damaged: an earlier checkpoint from the same place is no better
    except Exception as error:  # a damaged pickle can raise anything
        raise DamagedCheckpointError(
            f"the index of {TRAINER}/ of the checkpoint {path} cannot be read: {error}; {earlier_checkpoint(path)}"
        ) from error


def _make_writer(folder: Path) -> Any:
    """Writes each rank's file and brings it to the disk."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    class Writer(FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            try:
                return super().write_data(plan, planner)
            except RuntimeError as error:
                # torch.save ends a file that it could not write with an error that does not say why; what it came
                # from would be lost on the way to rank 0.
                cause: BaseException | None = error
                while cause is not None and not isinstance(cause, OSError):
                    cause = cause.__cause__ or cause.__context__
                if cause is None:
                    raise
                raise type(cause)(*cause.args) from error

    return Writer(folder, sync_files=True)


def _first_failure(error: Any) -> tuple[str, Exception]:
    """Of what torch.distributed.checkpoint gathered: which rank, in words, and why."""
    rank, (cause, _) = min(error.failures.items())
    if not isinstance(cause, Exception):
        raise cause  # an interrupt is not a failure to write
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    return (f" by rank {rank}" if several else ""), cause


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """torch.distributed.checkpoint warns where there is no process group; that is as it should be here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _tied_once(weights: Mapping[str, Tensor], causal: Any) -> dict[str, Tensor]:
    """The same weights; those that the model ties, and that are equal, are one tensor, which transformers then writes
    once. A full state that was gathered from shards has two.
    """
    once = dict(weights)
    for name, source in (getattr(causal, "all_tied_weights_keys", None) or {}).items():
        if name in once and source in once and torch.equal(once[name], once[source]):
            once[name] = once[source]
    return once


def _write_adapter(folder: Path, weights: Mapping[str, Tensor], adapter: Any) -> None:
    from safetensors.torch import save_file

    from rollouts.training.backends.lora import ADAPTER

    config = copy.copy(adapter.peft_config[ADAPTER])
    config.inference_mode = True  # as peft writes it: who loads it by default wants to use it
    config.save_pretrained(str(folder))
    contiguous = {name: value.detach().contiguous() for name, value in weights.items()}
    save_file(contiguous, str(folder / _ADAPTER_FILE), metadata={"format": "pt"})


def copy_tokenizer(source: str | None, folder: Path) -> None:
    """Put the tokenizer and its chat template beside the weights, so that the folder can be given as a model.

    Nothing where `source` is None or has none. Raises CheckpointError.
    """
    if source is None:
        return
    try:
        tokenizer = load_tokenizer(source)
    except ModelError:
        return  # a model without a tokenizer of its own; a run that needed one refused it when it was composed
    try:
        tokenizer.save_pretrained(str(folder))
    except Exception as error:  # tokenizers has no error of its own for a disk that is full
        raise cannot_write(folder, error) from error
