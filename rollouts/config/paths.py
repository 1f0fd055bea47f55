"""Paths in a settings file are the file's: a relative one begins at the folder of the file.

    base = file_base("configs/run.toml", home)    # /project/configs
    Move(base, home).tree(tree)                   # ./judge.py:short becomes configs/judge.py:short

The paths in the `config.toml` of a run begin at the directory where the run was begun. Flags are not moved: their paths
begin at the working directory. Not here: the reading of the file (`files`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from rollouts.config.flags import Tree
from rollouts.config.names import GIVEN_ROWS, names_file
from rollouts.config.settings import COMPONENT_KINDS, is_secret
from rollouts.disk import read_regular

CONFIG = "config.toml"
_MANIFESTS = ("manifest.json", "rl/manifest.json", "sft/manifest.json")  # a run of mode sft+rl has one for each phase

_MODELS = ("model", "critic", "teacher")
_WORDS = ("tiny", "head")  # the models that are no folders; a folder of this name is ./tiny
_ROWS = ("data", "eval_data")
_EXPLICIT = re.compile(r"\.\.?/.")
_LIKE_A_PATH = re.compile(r"[^\n]*[^\n/]/[^\n/][^\n]*|[^\s/]*\w\.\w+")
_ODD = re.compile(r"^[~-]|[=:@]")
_OF_FILE = re.compile(r"(?P<alias>(?:[A-Za-z_][\w-]*=)?)(?P<file>[^\n]*?\.py)(?P<rest>(?::[^\n]*)?)")
_FILE_OF_ROWS = re.compile(r".*\.(jsonl?|ndjson|csv|parquet)(\.gz)?")


def file_base(file: str | os.PathLike[str], home: str) -> str:
    """The folder where the relative paths in a settings file begin: that of the file; for the `config.toml` of a run,
    the directory where the run was begun. `home` is the working directory.

    It is `home` if that directory does not exist on this machine, and if `home` is a copy of that directory, with the
    run at the same place: then the run's files were copied too.
    """
    folder = os.path.realpath(os.path.dirname(os.path.abspath(file)))
    if os.path.basename(file) != CONFIG:
        return folder
    for name in _MANIFESTS:
        path = os.path.join(folder, name)
        if os.path.exists(path):
            manifest, home = _read(path), os.path.realpath(home)
            if manifest is None:
                return home
            if "rollouts" not in manifest:  # of another program
                continue
            begun = os.path.realpath(str(manifest.get("directory") or home))
            return home if not os.path.isdir(begun) or _is_copy(os.path.dirname(path), manifest, begun, home) else begun
    return folder


def _read(manifest: str) -> dict[str, Any] | None:
    """The content of a manifest; None if it cannot be read, about which others inform."""
    try:
        found = json.loads(read_regular(Path(manifest)))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else {}


def _is_copy(run: str, manifest: Mapping[str, Any], begun: str, home: str) -> bool:
    """Whether a run that began in `begun` was copied to `home`, together with what is around it."""
    written = manifest.get("folder")
    if not isinstance(written, str):  # of an earlier version
        return _is_below(run, home) and not _is_below(run, begun)
    return run != written and os.path.relpath(run, home) == os.path.relpath(written, begun)


def _is_below(path: str, folder: str) -> bool:
    return os.path.commonpath([path, folder]) == folder


class Move(NamedTuple):
    """Writes relative paths that begin at `base` as paths that begin at `home`. Both are absolute.

    A path of which there is nothing at `base` stays as it is if there is something at `home`.
    """

    base: str
    home: str

    def tree(self, tree: Mapping[str, Any]) -> Tree:
        """A tree of settings."""
        return {key: self.value((key,), value) for key, value in tree.items()}

    def flat(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """Settings by their dotted names."""
        return {name: self.value(tuple(name.split(".")), value) for name, value in flat.items()}

    def value(self, path: tuple[str, ...], value: Any) -> Any:
        """The value of the setting at this path, and all that is inside it."""
        if isinstance(value, str):
            return self._text(path, value)
        if isinstance(value, PurePath):
            return type(value)(self._path(str(value)))
        if isinstance(value, Mapping):
            return {key: self.value((*path, str(key)), inner) for key, inner in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.value(path, inner) for inner in value)
        return value

    def _text(self, path: tuple[str, ...], text: str) -> str:
        while path[0] in ("sft", "schedule") and len(path) > 1:  # tables of such settings
            path = path[1:]
        if path[0] == "role" and len(path) == 3 and path[2] not in ("model", "inference"):
            path = ("inference", path[2])  # the other settings of a role are those of its engine
        elif path[0] == "role":
            path = path[2:] or path
        key, last = path[0], path[-1]
        if key == "out":
            return self._path(text, is_at_home=False)
        if key == "from_run":
            return self._path(text)
        if key in _MODELS:
            is_folder = os.path.isdir(os.path.join(self.base, text)) and text not in _WORDS
            return self._path(text) if is_folder or _EXPLICIT.match(text) else text
        if key not in (*COMPONENT_KINDS, "worker") or is_secret(last):
            return text
        if last in _ROWS or (last == "name" and path[-2] in _ROWS):
            return self._rows(text)
        is_name = key != "worker" and (len(path) == 1 or last in ("name", "weight"))
        if is_name:
            return self._component(text) if names_file(text) else text
        return text if key == "logger" else self._setting(text)  # a logger writes into the run's folder

    def _component(self, text: str) -> str:
        """The name of a component in a file: `[alias=]path/file.py:name[:weight]`."""
        found = _OF_FILE.fullmatch(text)
        if not found:
            return text
        file = self._path(found["file"])
        return f"{found['alias']}{file if '/' in file or file == found['file'] else f'./{file}'}{found['rest']}"

    def _rows(self, text: str) -> str:
        """A value of `data`: a file, a folder, `LOADER:SOURCE` or `./loader.py:name:SOURCE`."""
        if text.startswith(GIVEN_ROWS):  # they are in the run's folder
            return text
        loader, colon, source = text.partition(":")
        if found := re.fullmatch(r"(.*\.py)(:\w+)(?:(:)(.*))?", text):
            file, name, colon, source = found.groups("")
            return f"{self._path(file)}{name}{colon}{self._setting(source)}"
        if colon and (source := self._setting(source)) != text.partition(":")[2]:
            return f"{loader}:{source}"
        is_there = os.path.exists(os.path.join(self.base, text))
        return self._path(text) if is_there or names_file(text) or _FILE_OF_ROWS.fullmatch(text) else text

    def _setting(self, text: str) -> str:
        """A text among the settings of a component. It is a path if it begins with `./` or `../`, or if it looks like a
        file or like a path with a folder, and is there.
        """
        found = _OF_FILE.fullmatch(text)
        file = found["file"] if found else text
        if not (_EXPLICIT.match(file) or (_LIKE_A_PATH.fullmatch(file) and os.path.exists(self._at_base(file)))):
            return text
        return self._component(text) if found else self._path(text)

    def _path(self, text: str, is_at_home: bool | None = None) -> str:
        """A path. `is_at_home`: whether it is meant at `home`, if there is nothing at `base`."""
        if not text or "://" in text or text.startswith("~") or os.path.isabs(text):
            return text
        if is_at_home is None:
            is_at_home = os.path.exists(os.path.join(self.home, text))
        if is_at_home and not os.path.exists(self._at_base(text)):
            return text
        there = os.path.relpath(self._at_base(text), self.home)
        # Without ./, it might be the name of something, an alias or a loader.
        return f"./{there}" if there in _WORDS or _ODD.search(there) else there

    def _at_base(self, text: str) -> str:
        return os.path.join(self.base, text)
