"""The checkpoint folders on the disk: which ones a run has, whether one is whole and can be gone on with, which are
kept, and what a process that was killed left lying.

A folder is whole if it has its manifest, which is written last. Every refusal is a sentence with what to type instead.
Left out: how they are written (`checkpoint_writing`), and what is in the tensors (`checkpoint`). Only the standard
library is used, so that a run can be looked at without torch.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from rollouts.errors import CheckpointError, ConfigError, DamagedCheckpointError, ModelError

__all__ = [
    "FORMAT",
    "MANIFEST",
    "STATE",
    "TRAINER",
    "all_checkpoints",
    "beside",
    "best_checkpoint",
    "check_folder",
    "complete_checkpoints",
    "earlier_checkpoint",
    "last_checkpoint",
    "manifest_crc",
    "prune_checkpoints",
    "read_state",
    "remove_checkpoint",
    "remove_hidden",
    "remove_leftovers",
    "size_and_crc",
    "step_of",
    "visible_name",
]

FORMAT = 2
MANIFEST = "manifest.json"
STATE = "state.json"
TRAINER = "trainer"

_NAME = re.compile(r"step_(\d+)")
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<what>writing|old|removed)-(?P<pid>\d+)")
_CHUNK = 1 << 22
_KINDS = {"full": "all weights", "adapter": "a LoRA adapter"}


class _Manifest(NamedTuple):
    kind: str
    model: str
    files: dict[str, tuple[int, str]]


def check_folder(path: str, *, kind: str | None = None, fingerprint: str | None = None) -> None:
    """Refuse a folder that is not there, no checkpoint or of another format (ConfigError), unfinished or damaged
    (DamagedCheckpointError), or of another kind or model than the given one (ModelError). Every byte is read.
    """
    manifest = _read_manifest(Path(path))
    if kind is not None and manifest.kind != kind:
        raise ModelError(
            f"the checkpoint {path} holds {_KINDS.get(manifest.kind, manifest.kind)}, but this run trains "
            f"{_KINDS.get(kind, kind)}; give the same lora_rank as the run that wrote it"
        )
    if fingerprint is not None and manifest.model != fingerprint:
        raise ModelError(
            f"the checkpoint {path} was written by another model (its names and shapes of weights differ); "
            "give the model and lora_rank of the run that wrote it"
        )
    for name, (size, crc) in manifest.files.items():
        damage = _damage(Path(path) / name, size, crc)
        if damage:
            raise DamagedCheckpointError(
                f"the checkpoint {path} is damaged: {name} {damage}; {earlier_checkpoint(path)}"
            )


def read_state(path: str | Path) -> dict[str, Any]:
    """What `finish_checkpoint` was given as `state`. Raises DamagedCheckpointError."""
    try:
        state = json.loads((Path(path) / STATE).read_text(encoding="utf-8"))
        if not isinstance(state, dict):
            raise ValueError(f"it holds a {type(state).__name__}")
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(
            f"the {STATE} of the checkpoint {path} cannot be read: {error}; {earlier_checkpoint(path)}"
        ) from error
    return state


def earlier_checkpoint(path: str | Path) -> str:
    """What to type instead of a checkpoint that cannot be used, in words."""
    own = step_of(Path(path))
    found = complete_checkpoints(Path(path).parent)
    before = [each for each in found if own is not None and (step_of(each) or 0) < own]
    return f"give an earlier one, such as {before[-1]}" if before else "give an earlier one"


# The checkpoints of a run.


def step_of(path: Path) -> int | None:
    """The number in `step_000010`; None for another name."""
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else None


def visible_name(path: Path) -> Path | None:
    """What a folder is to be, or was, called, if it has a name of `beside`."""
    found = _LEFTOVER.fullmatch(path.name)
    return path.with_name(found["name"]) if found else None


def all_checkpoints(folder: Path) -> list[Path]:
    """The `step_*` folders of a run's `checkpoints/`, by number, the newest last; whole or not."""
    if not folder.is_dir():
        return []
    found = [each for each in folder.iterdir() if step_of(each) is not None and each.is_dir()]
    return sorted(found, key=lambda each: (step_of(each), each.name))


def complete_checkpoints(folder: Path) -> list[Path]:
    """Those of `all_checkpoints` that have their manifest."""
    return [each for each in all_checkpoints(folder) if (each / MANIFEST).is_file()]


def last_checkpoint(folder: Path) -> Path | None:
    """The newest one of a run's `checkpoints/`, if there is any. Raises DamagedCheckpointError where it has no
    manifest: a checkpoint gets its name once it is whole, so something has been lost.
    """
    found = all_checkpoints(folder)
    if found and not (found[-1] / MANIFEST).is_file():
        raise _without_manifest(found[-1])
    return found[-1] if found else None


def best_checkpoint(folder: Path) -> Path | None:
    """The one with the best metric in its state, among those with a metric of the name of the newest such; the newest
    of equals. None where none has a metric.
    """
    ranked: list[tuple[float, Path]] = []
    name = None
    for path in reversed(complete_checkpoints(folder)):
        metric = _metric(path)
        if metric is None or (name is not None and metric[0] != name):
            continue
        name = metric[0]
        ranked.append((metric[1], path))
    return max(ranked, key=lambda pair: pair[0])[1] if ranked else None


def prune_checkpoints(folder: Path, keep: int) -> list[Path]:
    """Remove all but the last `keep` and the best one; gives what was removed. `keep` 0 keeps all.

    Raises CheckpointError where one cannot be removed.
    """
    found = complete_checkpoints(folder)
    if keep <= 0 or len(found) <= keep:
        return []
    best = best_checkpoint(folder)
    removed = [path for path in found[:-keep] if path != best]
    for path in removed:
        remove_checkpoint(path)
    return removed


def remove_checkpoint(path: Path) -> None:
    """Remove it; a kill leaves it whole, or under a hidden name. Raises CheckpointError."""
    hidden = beside(path, "removed")
    remove_hidden(hidden)
    try:
        os.replace(path, hidden)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {path} cannot be removed: {error.strerror or error}; see who owns it, "
            "or keep all of them (--keep-checkpoints 0)"
        ) from error
    remove_hidden(hidden)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left in a run's `checkpoints/`. A kill in the middle of replacing a checkpoint may
    have left only the old one, under a hidden name: it gets its name back.

    What a living process writes stays. To be called before this process writes: what bears its number was left by an
    earlier process of the same number, as they are common in containers. Raises CheckpointError.
    """
    if not folder.is_dir():
        return
    found = [(match, path) for path in folder.iterdir() if (match := _LEFTOVER.fullmatch(path.name))]
    gone = [(match, path) for match, path in found if path.is_dir() and not _is_alive(int(match["pid"]))]
    for match, path in sorted(gone, key=lambda pair: pair[1].stat().st_mtime, reverse=True):
        target = path.with_name(match["name"])
        if match["what"] == "old" and not target.exists() and (path / MANIFEST).is_file():
            try:
                os.replace(path, target)
            except OSError as error:
                raise CheckpointError(
                    f"{path} cannot be renamed to {target.name}: {error.strerror or error}; rename it yourself"
                ) from error
            continue
        remove_hidden(path)


def beside(target: Path, what: str) -> Path:
    """The hidden name that a checkpoint has while this process is `writing` it, or while it is an `old` one that is
    replaced, or is `removed`.
    """
    return target.with_name(f".{target.name}.{what}-{os.getpid()}")


def size_and_crc(file: Path) -> tuple[int, str]:
    """Its bytes, and their crc32 as 8 hexadecimal digits."""
    size, crc = 0, 0
    with file.open("rb") as handle:
        while chunk := handle.read(_CHUNK):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return size, f"{crc:08x}"


def manifest_crc(manifest: dict[str, Any]) -> str:
    """The manifest's own crc32: of all of it but this."""
    rest = {key: value for key, value in manifest.items() if key != "crc32"}
    return f"{zlib.crc32(json.dumps(rest, sort_keys=True).encode()):08x}"


def remove_hidden(folder: Path) -> None:
    """Remove a folder with a hidden name, its manifest first: what a kill leaves of it looks like no checkpoint."""
    try:
        (folder / MANIFEST).unlink(missing_ok=True)
    except OSError:
        return  # it stays whole, under a name that nothing reads, until the next start
    shutil.rmtree(folder, ignore_errors=True)


def _damage(file: Path, size: int, crc: str) -> str:
    """What is wrong with the file, if anything."""
    if not file.is_file():
        return "is missing"
    try:
        found = file.stat().st_size
        if found != size:
            return f"has {found} bytes and not the {size} that were written"
        return "" if size_and_crc(file)[1] == crc else "is not what was written (its checksum differs)"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"


def _read_manifest(folder: Path) -> _Manifest:
    """Raises ConfigError for whatever is no finished checkpoint of this format."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"the checkpoint {folder} is a file; give the folder, such as checkpoints/step_000010")
    if not folder.exists():
        raise ConfigError(
            f"there is no checkpoint {folder}; give a folder that a run wrote, such as checkpoints/step_000010"
        )
    if not (folder / MANIFEST).is_file():
        raise _without_manifest(folder)
    unreadable = f"the {MANIFEST} of the checkpoint {folder} cannot be read"
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(f"{unreadable}: {error}; {earlier_checkpoint(folder)}") from error
    if not isinstance(found, dict) or not {"format", "files"} & set(found):
        raise _no_checkpoint(folder)  # a run's folder has a manifest.json too, another one
    if found.get("format") != FORMAT:
        raise _other_format(folder, found)
    if found.get("crc32") != manifest_crc(found):
        raise DamagedCheckpointError(f"{unreadable}: its checksum differs; {earlier_checkpoint(folder)}")
    try:
        files = {str(name): (int(entry["bytes"]), str(entry["crc32"])) for name, entry in found["files"].items()}
        return _Manifest(str(found["kind"]), str(found["model"]), files)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"{unreadable}: {error!r}; {earlier_checkpoint(folder)}") from error


def _without_manifest(folder: Path) -> ConfigError:
    began = step_of(folder) is not None or visible_name(folder) is not None
    if began or (folder / STATE).exists() or (folder / TRAINER).exists():
        return DamagedCheckpointError(
            f"the checkpoint {folder} has no {MANIFEST}, so it is not whole; {earlier_checkpoint(folder)}"
        )
    return _no_checkpoint(folder)


def _no_checkpoint(folder: Path) -> ConfigError:
    inside = complete_checkpoints(folder / "checkpoints") or complete_checkpoints(folder)
    if inside:
        hint = f"did you mean {inside[-1]}?"
    elif (folder / "config.json").is_file():
        hint = f"it holds a model: type --model {folder} to begin a new run from it"
    else:
        hint = "give a folder that a run wrote, such as checkpoints/step_000010"
    return ConfigError(f"the folder {folder} is no checkpoint; {hint}")


def _other_format(folder: Path, found: dict[str, Any]) -> ConfigError:
    number = found.get("format")
    if not isinstance(number, int):
        return DamagedCheckpointError(
            f"the {MANIFEST} of the checkpoint {folder} cannot be read: its format is {number!r}; "
            f"{earlier_checkpoint(folder)}"
        )
    if number > FORMAT:
        return ConfigError(
            f"the checkpoint {folder} was written by a newer rollouts (format {number}, this one reads {FORMAT}); "
            "type `pip install --upgrade rollouts-rl`"
        )
    begin = f", or type --model {folder} to begin a new run from its weights" if found.get("kind") == "full" else ""
    return ConfigError(
        f"the checkpoint {folder} was written by an older rollouts (format {number}, this one reads {FORMAT}); "
        f"go on with the version that wrote it (0.1.0){begin}"
    )


def _metric(path: Path) -> tuple[str, float] | None:
    """The metric's name, and its value with the sign that makes more better."""
    try:
        metric = read_state(path)["run"]["metric"]
        value = float(metric["value"])
        signed = value if metric["higher_is_better"] else -value
        return (str(metric["name"]), signed) if math.isfinite(value) else None
    except (ConfigError, KeyError, TypeError, ValueError):
        return None  # no metric, or a state that cannot be read: neither can be the best


def _is_alive(pid: int) -> bool:
    if pid == os.getpid():
        return False
    if os.name == "nt":
        return True  # asking would end it there
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
