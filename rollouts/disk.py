"""Write files and folders so that they survive a crash: write them under another name, sync them to the disk, then
rename them. Read the files of a folder that anybody may fill.

    write_whole(path, data)               a file
    with new_folder(path) as folder: ...  a folder, with the files that the block writes into it
    read_regular(path)                    the content of a file; never waits, as reading a named pipe does

The operating system keeps written data in memory for a while. If a program is killed, this data is still written. If
the machine crashes, files and names that were not synced are lost. This module uses only the standard library.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

MANIFEST = "manifest.json"
HIDDEN_NAME = re.compile(r"\.(?P<name>.+)\.(?P<what>writing|old|removed)-(?P<pid>\d+)")
"""The temporary name of a folder that process `pid` is writing, replacing or removing."""


def partial_name(name: str) -> str:
    """The name of a file while it is being written."""
    return f".{name}.partial"


def write_whole(path: Path, data: bytes, *, synced: bool = True) -> None:
    """Write a file under a temporary name, then rename it. If the process is killed, either the old or the new file
    exists.

    Without `synced`, a crash of the machine may leave an empty file, so sync it later. Raises OSError.
    """
    temporary = path.with_name(partial_name(path.name))
    temporary.write_bytes(data)
    if synced:
        sync_file(temporary)
    os.replace(temporary, path)
    if synced:
        sync_folder(path.parent)


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it. Raises OSError, also for what is no regular file: a named pipe would wait for a writer
    without end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # so that a named pipe opens at once
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(descriptor, "rb")


def read_regular(path: Path) -> bytes:
    """The content of a file. Raises OSError as `open_regular` does."""
    with open_regular(path) as file:
        return file.read()


@contextlib.contextmanager
def new_folder(target: Path, *, replaces: bool = True) -> Iterator[Path]:
    """Give the block an empty folder, and rename it to `target` when the block ends and its files are on the disk.

    An existing folder `target` is replaced; with `replaces=False` it is kept, and FileExistsError is raised. If the
    block raises, the new folder is removed. If the process is killed, `target` is complete or does not exist; temporary
    folders that remain match `HIDDEN_NAME`. Raises OSError.
    """
    temporary, old = _beside(target, "writing"), _beside(target, "old")
    made = [parent for parent in target.absolute().parents if not parent.exists()]
    try:
        if target.exists() and not target.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "a file of this name exists")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        _settle(temporary)
        has_old = target.exists()
        if has_old and not replaces:
            raise FileExistsError(errno.EEXIST, "a folder of this name exists")
        if has_old:
            _discard(old)
            os.replace(target, old)
        try:
            os.replace(temporary, target)
        except BaseException:
            if has_old:
                os.replace(old, target)
            raise
    except BaseException:
        _discard(temporary)
        for parent in made:
            with contextlib.suppress(OSError):  # another program has written something there
                parent.rmdir()
        raise
    sync_folder(target.parent)
    _discard(old)


def remove_folder(path: Path) -> None:
    """Remove a folder. If the process is killed meanwhile, the folder is complete or has a hidden name. Raises OSError
    if it cannot be renamed.
    """
    hidden = path
    if not HIDDEN_NAME.fullmatch(path.name):
        hidden = _beside(path, "removed")
        _discard(hidden)
        os.replace(path, hidden)
    _discard(hidden)


def sync_file(path: Path) -> None:
    """Sync a file's content to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Sync the file names of a folder to the disk. Does nothing on some network file systems, which cannot sync
    folders. Raises OSError.
    """
    try:
        sync_file(path)
    except PermissionError:
        return  # we may write into this folder, but not list it
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def _settle(folder: Path) -> None:
    """Sync everything in the folder to the disk. Files get the permissions of the folder, since safetensors writes
    files that only their owner can read.
    """
    mode = stat.S_IMODE(folder.stat().st_mode) & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            with contextlib.suppress(PermissionError):  # a shared file system may not support modes
                path.chmod(mode)
            sync_file(path)
        else:
            sync_folder(path)
    sync_folder(folder)


def _beside(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{what}-{os.getpid()}")


def _discard(folder: Path) -> None:
    """Remove a folder with a hidden name. Its manifest is removed first, so that the rest does not look complete if the
    process is killed.
    """
    try:
        (folder / MANIFEST).unlink(missing_ok=True)
    except OSError:
        return  # the whole folder stays until the next start; nothing reads a hidden name
    shutil.rmtree(folder, ignore_errors=True)
