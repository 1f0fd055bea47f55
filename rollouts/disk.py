"""Files that survive a crash of the machine: written whole, and brought to the disk with the folders that name them.

The system keeps what a program writes in memory for a while. A program that is killed loses nothing of it; a machine
that crashes loses what was not synced, names included. Only the standard library is used.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ["partial_name", "sync_file", "sync_folder", "write_whole"]


def partial_name(name: str) -> str:
    """The name of a file that is not whole yet."""
    return f".{name}.partial"


def write_whole(path: Path, data: bytes, *, synced: bool = True) -> None:
    """Write a file under a temporary name, then rename it: a kill leaves the old file or the new one.

    Without `synced`, a crash of the machine may leave an empty file; sync it later. Raises OSError.
    """
    temporary = path.with_name(partial_name(path.name))
    temporary.write_bytes(data)
    if synced:
        sync_file(temporary)
    os.replace(temporary, path)
    if synced:
        sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Bring a file's bytes to the disk. Raises OSError."""
    _sync(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)  # Windows syncs only what may be written


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk, where its file system can: on Windows, and on some network file
    systems, folders cannot be synced. Raises OSError.
    """
    if os.name == "nt":
        return
    try:
        _sync(path, os.O_RDONLY)
    except PermissionError:
        return  # one may write into it, but not list it
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
