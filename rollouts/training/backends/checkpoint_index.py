"""The index of a checkpoint's trainer/, read without running code.

torch.distributed.checkpoint pickles its index (`.metadata`), and a pickle may call any function. Only the classes that
an index consists of are loaded here; anything else is refused. The tensors themselves are read by `torch.load` with
`weights_only`, which does the same.
"""

from __future__ import annotations

import pickle
from pathlib import Path, PurePosixPath
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader

from rollouts.errors import ConfigError

__all__ = ["IndexReader"]

_INDEX = ".metadata"
_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size",),
}
_PATHS = ("PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath")


class _IndexUnpickler(pickle.Unpickler):
    """Loads the classes of an index and the types of tensors, and nothing else. `path` is for the error."""

    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """Raises ConfigError for a name that is no part of an index."""
        import torch

        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if module.partition(".")[0] == "pathlib" and name in _PATHS:
            return PurePosixPath  # where the checkpoint was written: not used, and perhaps of another system
        raise ConfigError(
            f"{self._path} asks for `{module}.{name}`, which is no part of a checkpoint's index; loading it could run "
            "code, so it is refused. Do not resume from this checkpoint; to use its weights, give the folder as --model"
        )


class IndexReader(FileSystemReader):
    """torch's reader of trainer/, with an index that cannot run code and files that lie in that folder."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """The index. Raises ConfigError where it asks for what no index holds, and whatever a damaged pickle raises."""
        path = Path(self.path) / _INDEX
        with path.open("rb") as file:
            metadata = _IndexUnpickler(file, path).load()
        for info in metadata.storage_data.values():
            if Path(info.relative_path).name != info.relative_path:
                raise ConfigError(
                    f"{path} names the file {info.relative_path!r}, which is not in its folder; the checkpoint is "
                    "refused"
                )
        return metadata


def _layout(name: str) -> Any:
    import torch

    return {"torch.strided": torch.strided}[name]
