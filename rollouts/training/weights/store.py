"""The checkpoints of a run as folders: written completely, checked, found and removed.

    with new_checkpoint("checkpoints/step_000010") as folder:   # an empty folder beside that name
        ...                                                     # write weights and tensors into it
        finish_checkpoint(folder, kind="full", ..., state={})   # writes state.json and manifest.json
                                                                # the end of the block renames it

A folder with a manifest is a complete checkpoint. The manifest has the format, kind, model, size and crc32 of every
file. Every error says what to type next. Not here: the files (`checkpoint`, `files`). This module works without torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from rollouts import disk
from rollouts.disk import HIDDEN_NAME, MANIFEST
from rollouts.errors import CheckpointError, ConfigError, DamagedCheckpointError, ModelError, first_line
from rollouts.models.folders import all_checkpoints, complete_checkpoints, step_of

FORMAT = 2
STATE = "state.json"
TRAINER = "trainer"
RANKED = "metric.json"

_CHUNK_BYTES = 1 << 22
_OF_A_RUN = "give a folder that a run wrote, such as checkpoints/step_000010"
_KINDS = {"full": "all weights", "adapter": "a LoRA adapter"}
_FULL_DISK = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


class _File(msgspec.Struct):
    bytes: int
    crc32: str


class _Manifest(msgspec.Struct):
    kind: str
    model: str
    files: dict[str, _File]


# --- writing ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def new_checkpoint(path: str | Path) -> Iterator[Path]:
    """Make an empty folder for a checkpoint. Call `finish_checkpoint` at the end of the block; it is then renamed to
    `path`, and replaces an older checkpoint of that name.

    If the block raises, the folder is removed, and an older checkpoint stays. Raises CheckpointError.
    """
    try:
        with disk.new_folder(Path(path)) as folder:
            yield folder
            assert (folder / MANIFEST).is_file(), f"{folder} is not finished"
    except OSError as error:
        raise cannot_write(path, error) from error


def finish_checkpoint(
    folder: Path, *, kind: str, fingerprint: str, version: int, world_size: int, state: dict[str, Any]
) -> None:
    """Write `state`, and the manifest of all files in the folder. `state` is plain data, as in JSON: keys are text, and
    a tuple becomes a list. Raises CheckpointError, OSError.
    """
    try:
        text = json.dumps(state)
    except (TypeError, ValueError, RecursionError) as error:
        what = f"the checkpoint {_visible(folder)} cannot be written: the state of the run is not plain data ({error})"
        plain = "what an environment's state() gives must be numbers, text, lists and dicts"
        raise CheckpointError(f"{what}; {plain}") from error
    (folder / STATE).write_text(text + "\n", encoding="utf-8")
    written = sorted(each for each in folder.rglob("*") if each.is_file())
    files = {each.relative_to(folder).as_posix(): msgspec.to_builtins(_describe(each)) for each in written}
    manifest: dict[str, Any] = {"format": FORMAT, "kind": kind, "model": fingerprint}
    manifest |= {"version": version, "world_size": world_size, "files": files}
    manifest["crc32"] = manifest_crc(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def manifest_crc(manifest: dict[str, Any]) -> str:
    """The crc32 of the manifest without this field."""
    rest = {key: value for key, value in manifest.items() if key != "crc32"}
    return f"{zlib.crc32(json.dumps(rest, sort_keys=True).encode()):08x}"


def cannot_write(path: str | Path, error: BaseException, *, where: str = "") -> CheckpointError:
    """The error for a checkpoint that cannot be written. `path` may be the folder of `new_checkpoint`."""
    reason = getattr(error, "strerror", None) or first_line(error)
    # Errors of Rust libraries have no error number; only their text names the cause.
    is_full = getattr(error, "errno", None) in _FULL_DISK or any(os.strerror(n) in str(error) for n in _FULL_DISK)
    hint = "free some space, or keep fewer (--keep-checkpoints)" if is_full else "see who may write there"
    what = f"the checkpoint {_visible(Path(path))} cannot be written{where}: {reason}"
    return CheckpointError(f"{what}; {hint}. The checkpoints before it are as they were", is_full=is_full)


def _visible(path: Path) -> Path:
    """The final path for a folder of `new_checkpoint`."""
    hidden = HIDDEN_NAME.fullmatch(path.name)
    return path.with_name(hidden["name"]) if hidden else path


def crc32_of(data: BinaryIO, size: int) -> int:
    """Read the next `size` bytes in pieces. Raises OSError, also if there are fewer."""
    crc = 0
    while size:
        chunk = data.read(min(size, _CHUNK_BYTES))
        if not chunk:
            raise OSError(errno.EIO, "it ends too early")
        crc, size = zlib.crc32(chunk, crc), size - len(chunk)
    return crc


def _describe(file: Path) -> _File:
    with disk.open_regular(file) as data:
        size = os.fstat(data.fileno()).st_size
        return _File(size, f"{crc32_of(data, size):08x}")


# --- reading ----------------------------------------------------------------------------------------------------------


def check_folder(path: str | Path, *, kind: str | None = None, fingerprint: str | None = None) -> None:
    """Check a checkpoint, and every byte of it.

    Raises ConfigError if it does not exist, or is not a checkpoint of this format; DamagedCheckpointError if it is
    unfinished or damaged; ModelError if its kind or model differs from `kind` or `fingerprint`.
    """
    manifest = _read_manifest(Path(path))
    if kind is not None and manifest.kind != kind:
        held, trained = (_KINDS.get(each, each) for each in (manifest.kind, kind))
        what = f"the checkpoint {path} holds {held}, but this run trains {trained}"
        raise ModelError(f"{what}; give the same lora_rank as the run that wrote it")
    if fingerprint is not None and manifest.model != fingerprint:
        what = f"the checkpoint {path} was written by another model (its names and shapes of weights differ)"
        raise ModelError(f"{what}; give the model and lora_rank of the run that wrote it")
    for name, wanted in manifest.files.items():
        if damage := _damage(Path(path) / name, wanted):
            raise damaged(path, f"the checkpoint {path} is damaged: {name} {damage}")


def read_state(path: str | Path) -> dict[str, Any]:
    """The `state` of `finish_checkpoint`. Raises DamagedCheckpointError."""
    try:
        state = json.loads(disk.read_regular(Path(path) / STATE))
        if not isinstance(state, dict):
            raise ValueError(f"it holds a {type(state).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, f"the {STATE} of the checkpoint {path} cannot be read: {error}") from error
    return state


def damaged(path: str | Path, what: str) -> DamagedCheckpointError:
    """The error for an unusable checkpoint. It says what is wrong (`what`), and which checkpoint to use instead."""
    own = step_of(Path(path)) or 0
    before = [each for each in complete_checkpoints(Path(path).parent) if (step_of(each) or 0) < own]
    such = f", such as {before[-1]}" if before else ""
    return DamagedCheckpointError(f"{what}; give an earlier one{such}")


def _damage(file: Path, wanted: _File) -> str:
    """Describe what is wrong with a file; empty if nothing is."""
    if not file.is_file():
        return "is missing"
    try:
        size = file.stat().st_size
        if size != wanted.bytes:
            return f"has {size} bytes and not the {wanted.bytes} that were written"
        return "" if _describe(file) == wanted else "is not what was written (its checksum differs)"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"


def _read_manifest(folder: Path) -> _Manifest:
    """Raise ConfigError if a folder is not a finished checkpoint of this format."""
    if not folder.is_dir():
        what = f"the checkpoint {folder} is a file" if folder.exists() else f"there is no checkpoint {folder}"
        raise ConfigError(f"{what}; {_OF_A_RUN}")
    if not (folder / MANIFEST).is_file():
        raise _without_manifest(folder)
    unreadable = f"the {MANIFEST} of the checkpoint {folder} cannot be read"
    try:
        found = json.loads(disk.read_regular(folder / MANIFEST))
    except (OSError, ValueError) as error:
        raise damaged(folder, f"{unreadable}: {error}") from error
    if not isinstance(found, dict) or not {"format", "files"} & set(found):
        raise _no_checkpoint(folder)  # a run's folder has a manifest.json too, but of another kind
    number = found.get("format")
    if not isinstance(number, int):
        raise damaged(folder, f"{unreadable}: its format is {number!r}")
    if number != FORMAT:
        raise _other_format(folder, number, found.get("kind"))
    if found.get("crc32") != manifest_crc(found):
        raise damaged(folder, f"{unreadable}: its checksum differs")
    try:
        return msgspec.convert(found, _Manifest)
    except msgspec.ValidationError as error:
        raise damaged(folder, f"{unreadable}: {error}") from error


def _without_manifest(folder: Path) -> ConfigError:
    began = step_of(folder) is not None or HIDDEN_NAME.fullmatch(folder.name)
    if not began and not (folder / STATE).exists() and not (folder / TRAINER).exists():
        return _no_checkpoint(folder)
    return damaged(folder, f"the checkpoint {folder} has no {MANIFEST}, so it was lost, or writing it did not finish")


def _no_checkpoint(folder: Path) -> ConfigError:
    inside = last_checkpoint(folder / "checkpoints") or last_checkpoint(folder)
    if inside is not None:
        hint = f"did you mean {inside}?"
    elif (folder / "config.json").is_file():
        hint = f"it holds a model: type --model {folder} to begin a new run from it"
    else:
        hint = _OF_A_RUN
    return ConfigError(f"the folder {folder} is no checkpoint; {hint}")


def _other_format(folder: Path, number: int, kind: Any) -> ConfigError:
    hint = "type `pip install --upgrade rollouts-rl`"
    if number < FORMAT:
        begin = f", or type --model {folder} to begin a new run from its weights" if kind == "full" else ""
        hint = f"continue with the version that wrote it (0.1.0){begin}"
    return ConfigError(f"the checkpoint {folder} has format {number}, and this version reads {FORMAT}; {hint}")


# --- all checkpoints of a run -----------------------------------------------------------------------------------------


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run's `checkpoints/`, or None."""
    return next(reversed(complete_checkpoints(folder)), None)


def newest_checkpoint(folder: Path) -> Path | None:
    """Like `latest_checkpoint`, but raises DamagedCheckpointError if a newer one has no manifest. A checkpoint without
    a manifest was complete once, because a folder only gets this name when it is complete.
    """
    found = all_checkpoints(folder)
    if found and not (found[-1] / MANIFEST).is_file():
        raise _without_manifest(found[-1])
    return found[-1] if found else None


def prune_checkpoints(folder: Path, keep: int, pending: Path | None = None) -> list[Path]:
    """Remove all checkpoints but the last `keep`, the best one, and one whose metric is `pending`. Returns those that
    were removed. 0 keeps all.

    Raises CheckpointError if one cannot be removed.
    """
    removed = [path for path in checkpoints_to_prune(folder, keep) if path != pending]
    for path in removed:
        remove_checkpoint(path)
    return removed


class Best(NamedTuple):
    """The best checkpoint of a run: the value of the metric that ranks it, as the metric was when it was saved."""

    checkpoint: Path
    metric: str
    value: float


def best_checkpoint(folder: Path) -> Best | None:
    """The complete checkpoint with the best metric in its state; None if none has one.

    Only metrics with the name of the newest metric are compared; of equal ones, the newest is the best.
    """
    metrics = [(metric, path) for path in reversed(complete_checkpoints(folder)) if (metric := _metric(path))]
    ranked = [(metric, path) for metric, path in metrics if metric["name"] == metrics[0][0]["name"]]
    if not ranked:
        return None
    sign = 1 if ranked[0][0]["higher_is_better"] else -1
    metric, path = max(ranked, key=lambda pair: sign * pair[0]["value"])
    return Best(path, metric["name"], metric["value"])


def checkpoints_to_prune(folder: Path, keep: int) -> list[Path]:
    """All complete checkpoints but the last `keep` and the best one. 0 keeps all."""
    found = complete_checkpoints(folder)
    if keep <= 0 or len(found) <= keep:
        return []
    best = best_checkpoint(folder)
    return [path for path in found[:-keep] if best is None or path != best.checkpoint]


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint. If the process is killed meanwhile, the folder is complete, or has a hidden name. Raises
    CheckpointError.
    """
    try:
        disk.remove_folder(path)
    except OSError as error:
        what = f"the checkpoint {path} cannot be removed: {error.strerror or error}"
        raise CheckpointError(f"{what}; see who owns it, or keep all of them (--keep-checkpoints 0)") from error


def remove_leftovers(folder: Path) -> None:
    """Remove the remains of killed processes from a run's `checkpoints/`. If a process was killed while it replaced a
    checkpoint, only the old checkpoint may be left, under a hidden name; then it gets its name back.

    Files of running processes stay. Call this before this process writes anything: files with its process id are then
    those of an earlier process with the same id, which is common in containers. Raises CheckpointError.
    """
    if not folder.is_dir():
        return
    found = [(hidden, path) for path in folder.iterdir() if (hidden := HIDDEN_NAME.fullmatch(path.name))]
    ended = [(hidden, path) for hidden, path in found if path.is_dir() and not _is_alive(int(hidden["pid"]))]
    for hidden, path in sorted(ended, key=lambda pair: pair[1].stat().st_mtime, reverse=True):
        target = path.with_name(hidden["name"])
        if hidden["what"] != "old" or target.exists() or not (path / MANIFEST).is_file():
            disk.remove_folder(path)
            continue
        try:
            os.replace(path, target)
        except OSError as error:
            what = f"{path} cannot be renamed to {target.name}: {error.strerror or error}"
            raise CheckpointError(f"{what}; rename it yourself") from error


def write_metric(path: Path, metric: Mapping[str, Any]) -> None:
    """Add the metric that ranks a checkpoint, which was not known yet when it was saved. Raises CheckpointError."""
    try:
        disk.write_whole(path / RANKED, json.dumps(metric).encode())
    except OSError as error:
        raise CheckpointError(f"{path / RANKED} cannot be written: {error.strerror or error}") from error


def _metric(path: Path) -> dict[str, Any] | None:
    """The metric in a checkpoint's state, or the one that was added later: `name`, `value` and `higher_is_better`."""
    try:
        added = path / RANKED
        metric = json.loads(disk.read_regular(added)) if added.exists() else read_state(path)["run"]["metric"]
        value, higher = float(metric["value"]), bool(metric["higher_is_better"])
        found = {"name": str(metric["name"]), "value": value, "higher_is_better": higher}
        return found if math.isfinite(value) else None
    except (ConfigError, KeyError, OSError, TypeError, ValueError):
        return None  # it has no metric, or an unreadable state, so it cannot be the best


def _is_alive(pid: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError) as error:
        return isinstance(error, PermissionError)
    return True
