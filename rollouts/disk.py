"""Files and folders that survive a crash: written whole, brought to the disk, and named by one rename.

    write_whole(path, data)               a file
    with new_folder(path) as folder: ...  a folder with whatever is written into it

The system keeps what a program writes in memory for a while. A program that is killed loses nothing of it; a machine
that crashes loses what was not synced, names included. Only the standard library is used.
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

MANIFEST = "manifest.json"
HIDDEN_NAME = re.compile(r"\.(?P<name>.+)\.(?P<what>writing|old|removed)-(?P<pid>\d+)")
"""What a folder is called while process `pid` is writing it, has an old one beside it, or is removing it."""


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


@contextlib.contextmanager
def new_folder(target: Path, *, replaces: bool = True) -> Iterator[Path]:
    """An empty folder beside `target`, which gets that name in one rename once all that is in it is on the disk.

    A folder that has the name already goes away then, or stays and is an error where `replaces` is False. Where the
    block raises, nothing of the new one stays. A kill leaves what has a name whole; `HIDDEN_NAME` finds the rest.
    Raises OSError.
    """
    temporary, old = _beside(target, "writing"), _beside(target, "old")
    made = [parent for parent in target.absolute().parents if not parent.exists()]
    try:
        if target.exists() and not target.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "there is a file of this name")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        _settle(temporary)
        has_old = target.exists()
        if has_old and not replaces:
            raise FileExistsError(errno.EEXIST, "there is a folder of this name by now")
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
            with contextlib.suppress(OSError):  # something else has been written there meanwhile
                parent.rmdir()
        raise
    sync_folder(target.parent)
    _discard(old)


def remove_folder(path: Path) -> None:
    """Remove a folder; a kill leaves it whole, or under a hidden name. Raises OSError where it cannot be renamed."""
    hidden = path
    if not HIDDEN_NAME.fullmatch(path.name):
        hidden = _beside(path, "removed")
        _discard(hidden)
        os.replace(path, hidden)
    _discard(hidden)


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


def _settle(folder: Path) -> None:
    """Bring all that is below the folder to the disk. Files may be read and written by those who may the folder:
    safetensors writes for the owner only.
    """
    mode = stat.S_IMODE(folder.stat().st_mode) & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            with contextlib.suppress(PermissionError):  # a shared file system may have no modes of its own
                path.chmod(mode)
            sync_file(path)
        else:
            sync_folder(path)
    sync_folder(folder)


def _beside(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{what}-{os.getpid()}")


def _discard(folder: Path) -> None:
    """Remove a folder with a hidden name, its manifest first: what a kill leaves of it does not look whole."""
    try:
        (folder / MANIFEST).unlink(missing_ok=True)
    except OSError:
        return  # it stays whole, under a name that nothing reads, until the next start
    shutil.rmtree(folder, ignore_errors=True)
