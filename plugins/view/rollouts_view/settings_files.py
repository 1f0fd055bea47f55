"""Settings files below the folders that the viewer has opened: which there are, and how the form writes one.

The viewer writes nowhere else. A name that leads out of its folder is refused, and so are links, the folders of runs
and names that are not those of settings files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rollouts.disk import partial_name, write_whole
from rollouts.errors import ConfigError, OutputError
from rollouts.runs.folder import holds_run

SUFFIX = ".toml"
DEPTH_MAX = 2  # folders below an opened one that are searched
ENTRIES_MAX = 5_000  # that are looked at
SHOWN_MAX = 100
OTHERS = ("pyproject.toml", "Cargo.toml")
"""The TOML files of other programs."""


class WouldReplaceError(ConfigError):
    """The file exists already. `tag` is that of its content."""

    def __init__(self, message: str, tag: str) -> None:
        super().__init__(message)
        self.tag = tag


class SettingsFiles:
    """The settings files below the opened folders. A folder that is a run itself has none."""

    def __init__(self, places: Sequence[Path]) -> None:
        self.roots = {str(place): place for place in places if place.is_dir() and not holds_run(place)}

    def listed(self) -> list[dict[str, str]]:
        """The settings files that there are: the folder, and the name below it."""
        found = [
            {"root": root, "name": file.relative_to(folder).as_posix()}
            for root, folder in self.roots.items()
            for file in _files_below(folder)
        ]
        return found[:SHOWN_MAX]

    def path(self, root: str, name: str) -> Path:
        """The file of this name below an opened folder. Raises ConfigError for a name that is refused."""
        if root not in self.roots:
            has = f"there are: {', '.join(self.roots)}" if self.roots else _NO_FOLDER
            raise ConfigError(f"{root or 'no folder'} is not opened; {has}")
        path = self.roots[root]
        if fault := _fault_of_name(name):
            raise ConfigError(f"{name!r} cannot be written: {fault}")
        *folders, file = name.split("/")
        for part in folders:
            path = path / part
            if path.is_symlink() or not path.is_dir():
                what = "is a link" if path.is_symlink() else "is no folder"
                raise ConfigError(f"{path} {what}; name a file in a folder that is there")
            if holds_run(path):
                raise ConfigError(f"{path} is the folder of a run, in which no settings are written; name another")
        target = path / file
        for each in (target, target.with_name(partial_name(file))):
            if each.is_symlink() or (each.exists() and not each.is_file()):
                raise ConfigError(f"{each} is {'a link' if each.is_symlink() else 'no file'}; name another")
        return target

    def write(self, root: str, name: str, text: str, replaced: str = "") -> str:
        """Write a file, and return its name. One that exists is replaced only if `replaced` is the tag of its content.

        Raises WouldReplaceError, ConfigError for a name that is refused, and OutputError.
        """
        target = self.path(root, name)
        try:
            tag = tag_of(target.read_bytes()) if target.exists() else ""
            if tag not in ("", replaced):
                raise WouldReplaceError(f"{target} exists already; its settings and comments would be replaced", tag)
            write_whole(target, text.encode())
        except OSError as error:
            raise OutputError(f"{target} cannot be written: {error.strerror or error}; name another") from error
        return str(target)


_NO_FOLDER = "this viewer has opened runs alone; to write settings, open a folder: rollouts view --new FOLDER"


def tag_of(content: bytes) -> str:
    """What identifies the content of a file."""
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def _fault_of_name(name: str) -> str:
    """Why a file below a folder cannot have this name; empty if it can."""
    parts = name.split("/")
    if name.startswith(("/", "~")) or "\\" in name or ":" in name or ".." in parts:
        return "expected a name below the opened folder, such as my_run.toml"
    if not all(parts) or not name.isprintable() or any(part != part.strip() for part in parts):
        return "expected a name such as my_run.toml"
    if any(part.startswith(".") for part in parts):
        return "a name that begins with a dot is hidden"
    if not name.endswith(SUFFIX):
        return f"a settings file ends in {SUFFIX}, such as {parts[-1].partition('.')[0]}{SUFFIX}"
    if parts[-1] in OTHERS:
        return "it is a file of another program"
    return "the name is too long" if len(name) > 200 else ""


def _files_below(folder: Path) -> Iterator[Path]:
    """The settings files in a folder and a few levels below it, but for runs, links and hidden names."""
    waiting, seen = [(folder, 0)], 0
    while waiting:
        current, depth = waiting.pop(0)
        try:
            entries = sorted(os.scandir(current), key=lambda entry: entry.name)
        except OSError:  # a folder that cannot be read
            continue
        for entry in entries:
            seen += 1
            if seen > ENTRIES_MAX:
                return
            if entry.name.startswith(".") or entry.is_symlink():
                continue
            if entry.is_file() and not _fault_of_name(entry.name):
                yield Path(entry.path)
            elif entry.is_dir() and depth < DEPTH_MAX and not holds_run(Path(entry.path)):
                waiting.append((Path(entry.path), depth + 1))
