"""Writing a checkpoint folder: it appears under its name in one rename, whole, or not at all.

    begin_checkpoint     an empty folder beside the name: .step_000010.writing-<pid>
    ...                  weights and tensors are written into it (`checkpoint`)
    finish_checkpoint    state.json, every file on the disk, manifest.json last, the rename
    abandon_checkpoint   it goes away instead

A kill at any instant leaves the folders that have a name whole. Only the standard library is used.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

from rollouts.disk import sync_file, sync_folder
from rollouts.errors import CheckpointError
from rollouts.training.backends.checkpoint_files import (
    FORMAT,
    MANIFEST,
    STATE,
    beside,
    manifest_crc,
    remove_hidden,
    size_and_crc,
    visible_name,
)

__all__ = ["abandon_checkpoint", "begin_checkpoint", "cannot_write", "finish_checkpoint", "open_as_its_folder"]

_FULL_DISK = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


def begin_checkpoint(path: str) -> Path:
    """An empty folder beside `path`, to write a checkpoint into. Raises CheckpointError."""
    target = Path(path)
    temporary = beside(target, "writing")
    try:
        if target.exists() and not target.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "there is a file of this name")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    except OSError as error:
        raise cannot_write(path, error) from error
    return temporary


def finish_checkpoint(
    temporary: Path,
    path: str,
    *,
    kind: str,
    fingerprint: str,
    version: int,
    world_size: int,
    state: dict[str, Any],
) -> None:
    """Give the folder `temporary`, into which everything else was written, the name `path`.

    `state` is plain data as JSON has it: keys are text, and a tuple comes back as a list. A checkpoint that is there
    already under this name goes away once the new one has it. Raises CheckpointError; `temporary` is removed then, and
    what was under the name is there still.
    """
    target = Path(path)
    try:
        try:
            text = json.dumps(state)
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"the checkpoint {path} cannot be written: the state of the run is not plain data ({error}); what an "
                "environment's state() gives must be numbers, text, lists and dicts"
            ) from error
        (temporary / STATE).write_text(text + "\n", encoding="utf-8")
        manifest = {
            "format": FORMAT,
            "kind": kind,
            "model": fingerprint,
            "version": version,
            "world_size": world_size,
            "files": _settle(temporary),
        }
        manifest["crc32"] = manifest_crc(manifest)
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        _settle_file(temporary / MANIFEST)
        sync_folder(temporary)
        _give_name(temporary, target)
    except OSError as error:
        abandon_checkpoint(temporary)
        raise cannot_write(path, error) from error
    except BaseException:
        abandon_checkpoint(temporary)
        raise


def abandon_checkpoint(temporary: Path) -> None:
    """Remove a folder of `begin_checkpoint`; one that is not there any more is no mistake."""
    remove_hidden(temporary)


def cannot_write(path: str | Path, error: BaseException, *, where: str = "") -> CheckpointError:
    """The error for a checkpoint that cannot be written. `path` may be the folder of `begin_checkpoint`."""
    shown = visible_name(Path(path)) or path
    reason = getattr(error, "strerror", None) or (str(error).strip().splitlines() or [type(error).__name__])[0]
    hint = "free some space, or keep fewer (--keep-checkpoints)" if _is_full(error) else "see who may write there"
    words = f"the checkpoint {shown} cannot be written{where}: {reason}; {hint}"
    return CheckpointError(f"{words}. The checkpoints before it are as they were", is_full=_is_full(error))


def _is_full(error: BaseException) -> bool:
    return getattr(error, "errno", None) in _FULL_DISK or any(
        os.strerror(number) in str(error)
        for number in _FULL_DISK  # errors of Rust say it in words only
    )


def _settle(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and checksum of every file below the folder, once all of them are on the disk."""
    entries = sorted(folder.rglob("*"))
    files = {}
    for file in (entry for entry in entries if entry.is_file()):
        open_as_its_folder(file)
        size, crc = _settle_file(file)
        files[file.relative_to(folder).as_posix()] = {"bytes": size, "crc32": crc}
    for inner in (entry for entry in entries if entry.is_dir()):
        sync_folder(inner)
    return files


def open_as_its_folder(file: Path) -> None:
    """Let those read and write the file who may the folder: safetensors writes for the owner only."""
    file.chmod(stat.S_IMODE(file.parent.stat().st_mode) & 0o666)


def _settle_file(file: Path) -> tuple[int, str]:
    sync_file(file)
    return size_and_crc(file)


def _give_name(temporary: Path, target: Path) -> None:
    """Rename the finished folder; an old folder of that name goes away only once the new one is there."""
    old = beside(target, "old")
    replaces = target.exists()
    if replaces:
        remove_hidden(old)
        os.replace(target, old)
    try:
        os.replace(temporary, target)
    except BaseException:
        if replaces:
            os.replace(old, target)
        raise
    sync_folder(target.parent)
    remove_hidden(old)
