"""What folders hold: adapters, a tokenizer, files of weights, checkpoints.

Not here: loading (`loading`), and writing (`rollouts.training.weights`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from rollouts.disk import MANIFEST
from rollouts.errors import ConfigError, ModelError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTERS = "adapters"  # in a checkpoint: a folder with the adapter of each role

Kind = Literal["full", "adapter"]

WEIGHTS: Mapping[Kind, str] = {"full": "model.safetensors", "adapter": "adapter_model.safetensors"}
_INDEX = "model.safetensors.index.json"
_TOKENIZERS = "tokenizer.json tokenizer_config.json tokenizer.model spiece.model tekken.json vocab.json vocab.txt"


def is_adapter(folder: str | Path) -> bool:
    """Whether the folder has an adapter and no whole model."""
    path = Path(folder).expanduser()
    return (path / ADAPTER_CONFIG).is_file() and not (path / "config.json").is_file()


def role_adapters(folder: str | Path) -> dict[str, Path]:
    """The folders with the adapters of a checkpoint, by role; empty if the roles have no adapters of their own."""
    found = sorted((Path(folder).expanduser() / ADAPTERS).glob(f"*/{ADAPTER_CONFIG}"))
    return {file.parent.name: file.parent for file in found}


def has_tokenizer(folder: str | Path) -> bool:
    """Whether the folder has a tokenizer."""
    return any((Path(folder) / name).is_file() for name in _TOKENIZERS.split())


def read_adapter_config(folder: str | Path) -> dict[str, Any]:
    """adapter_config.json as plain data. Raises ModelError."""
    try:
        config = json.loads((Path(folder) / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"it holds {type(config).__name__}, and must hold an object")
    except (OSError, ValueError) as error:
        raise ModelError(f"the {ADAPTER_CONFIG} in {folder} cannot be read: {error}") from error
    return config


# --- files of weights -------------------------------------------------------------------------------------------------


def read_tensors(path: str | Path) -> dict[str, Any]:
    """The tensors of a folder with a model or an adapter, by name, memory-mapped: bytes are read when they are used.
    Raises ConfigError.
    """
    from safetensors.torch import load_file

    return dict(read_files(path, lambda file: load_file(file).items()))


def read_files(path: str | Path, read: Callable[[Path], Iterable[Any]]) -> Iterator[Any]:
    """Call `read` for each file of weights, one after the other. Raises ConfigError."""
    from safetensors import SafetensorError

    for file in _weight_files(Path(path)):
        try:
            yield from read(file)
        except SafetensorError as error:
            raise ConfigError(f"{file} is no safetensors file, or cut off: {error}") from error
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error


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
    config = ADAPTER_CONFIG if files[0].name == WEIGHTS["adapter"] else "config.json"
    if not (folder / config).is_file():
        raise ConfigError(f"the folder {folder} holds no {config}")
    return files


# --- checkpoints ------------------------------------------------------------------------------------------------------


def step_of(path: Path) -> int | None:
    """The number in `step_000010`; None for other names."""
    head, _, digits = path.name.partition("step_")
    return int(digits) if not head and digits.isdecimal() else None


def all_checkpoints(folder: Path) -> list[Path]:
    """The `step_*` folders of a run's `checkpoints/`, complete or not, sorted by number."""
    if not folder.is_dir():
        return []
    found = [each for each in folder.iterdir() if step_of(each) is not None and each.is_dir()]
    return sorted(found, key=lambda each: (step_of(each), each.name))


def complete_checkpoints(folder: Path) -> list[Path]:
    """The folders of `all_checkpoints` that have a manifest."""
    return [each for each in all_checkpoints(folder) if (each / MANIFEST).is_file()]


def nearest_checkpoints(missing: Path) -> str:
    """The complete checkpoints before and after one that does not exist, as words for its error; empty if its folder
    has none.
    """
    found, number = complete_checkpoints(missing.parent), step_of(missing)
    later = [each for each in found if number is not None and (step_of(each) or 0) > number]
    near = [*found[: len(found) - len(later)][-1:], *later[:1]]
    return f"the nearest checkpoints: {', '.join(map(str, near))}" if near else ""
