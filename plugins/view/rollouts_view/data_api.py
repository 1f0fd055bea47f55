"""The paths of the API for training data: rows as tokens with their masks, and what is counted over them.

Only the files of the command line can be read, and the files that the runs of the catalog were trained on.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollouts.config.flags import Flag, Tree, flag_name, read_flag
from rollouts.config.merging import merge
from rollouts.config.names import normalize
from rollouts.config.settings import setting_infos
from rollouts.data.source import find_loader, loader_signature
from rollouts.errors import ConfigError, UserError, in_lines, suggestion
from rollouts.plugins.loading import CORE
from rollouts.plugins.manager import PluginManager
from rollouts.runs.folder import phases_of, read_config
from rollouts.runs.inspecting import OF_SFT
from rollouts_view.catalog import Catalog
from rollouts_view.data_rows import NOT_SHOWN, OpenData
from rollouts_view.drafts import text_of
from rollouts_view.settings_api import field_of

OF_MODEL = ("model", "system")
"""The settings of the core that decide the tokens, besides those of the data."""

FIRST, FIRST_MAX = 1_000, 10_000_000  # rows that are counted
COUNT_MAX = 50  # rows of one answer
KEPT = 4  # data with settings that stay open


class DataAPI:
    """Answers what the page of data asks. `files` has the settings of each file of the command line."""

    def __init__(self, catalog: Catalog, files: Mapping[str, Tree]) -> None:
        self._catalog, self._files = catalog, dict(files)
        self._lock = threading.Lock()
        self._open: dict[tuple[Any, ...], OpenData] = {}

    def rows(self, file: str, run: str, settings: str, start: str, count: str) -> dict[str, Any]:
        """Rows from a number on, and the settings that decide their tokens."""
        tree, given = self._tree(file, run), _given(settings)
        found = self._opened(tree, given)
        begin = _number("from", start, 0, 10**12)
        rows = found.page(begin, _number("count", count, 10, COUNT_MAX))
        total, fields = found.rows.total(), _fields(found)
        default = {field["name"]: field["default"] for field in fields if not field["is_secret"]}
        texts = {name: text for name, text in _texts(merge(tree, given)).items() if name in default}
        return {
            "name": found.loader.name,
            "from": begin,
            "rows": rows,
            "total": total.rows,
            "whole": total.is_whole,
            "growing": total.is_growing,
            "ready": found.is_ready(),
            "note": found.note,
            "fields": fields,
            "given": {name: text for name, text in texts.items() if text != default[name]},
        }

    def summary(self, file: str, run: str, settings: str, first: str) -> dict[str, Any]:
        """What is counted over the first rows."""
        found = self._opened(self._tree(file, run), _given(settings))
        return found.summary(_number("first", first, FIRST, FIRST_MAX))

    def _opened(self, tree: Tree, given: Tree) -> OpenData:
        merged = merge(tree, given)
        file = Path(str(merged["data"]["name"]).rpartition(":")[2])
        stamp = (file.stat().st_mtime_ns, file.stat().st_size) if file.is_file() else (0, 0)
        key = (msgspec.json.encode(_texts(merged)), str(merged["data"]["name"]), *stamp)
        with self._lock:
            found = self._open.pop(key, None) or OpenData(merged, FIRST)
            self._open[key] = found  # the last one was used last
            for oldest in list(self._open)[:-KEPT]:
                self._open.pop(oldest).close()
        return found

    def _tree(self, file: str, run: str) -> Tree:
        """The settings of some data. Raises UserError if it may not be read."""
        if run:
            return data_of_run(self._catalog.folder(run), run)
        if file not in self._files:
            has = f"there are: {', '.join(self._files)}" if self._files else "to open one: rollouts view FILE"
            raise UserError(in_lines(f"{file or 'no file'} is not opened; {has}", suggestion(file, self._files)))
        return self._files[file]


def data_of_run(folder: Path, run: str) -> Tree:
    """The settings of the data that a run of mode sft was trained on. A run may be from somebody else: no code that it
    names is run, and its data must be a local file that a loader of the core reads. Raises UserError.
    """
    tree = read_config(phases_of(folder)[0])[0]
    if tree.get("mode") != "sft" or not tree.get("data"):
        raise UserError(f"{run} was not trained on rows of --data; its trajectories are in its steps")
    kept = merge({name: tree[name] for name in OF_SFT if name in tree and name != "trust_remote_code"})
    name = str(kept["data"].get("name"))
    again = f"type: rollouts data inspect {run}"
    ref, source = find_loader(PluginManager(), name)  # which imports nothing
    if not ref.distribution:
        raise UserError(f"the data of {run} comes from the code {name}, which the page does not run; {again}")
    if normalize(ref.distribution) != CORE or ref.name == "hub" or not source:
        raise UserError(f"the data of {run} is {name}; the page reads local files alone; {again}")
    return kept


def _fields(data: OpenData) -> list[dict[str, Any]]:
    """The settings that decide the tokens of some data."""
    known = {info.name: info for info in setting_infos()}
    infos = [field_of(known[name]) for name in OF_MODEL]
    signature = loader_signature(data.loader.component, f"data {data.loader.name}")
    own = [field_of(setting) for setting in signature.settings if setting.name not in NOT_SHOWN]
    return infos + [field | {"name": f"data.{field['name']}", "label": field["name"]} for field in own]


def _given(settings: str) -> Tree:
    """The settings that the page gives, as flags: {"model": "tiny", "data.turns": "last"}. Raises ConfigError."""
    try:
        texts = msgspec.json.decode(settings or "{}", type=dict[str, str])
    except msgspec.DecodeError as error:
        raise ConfigError(f'settings={settings!r}: {error}; expected {{"data.turns": "last"}}') from error
    tree: Tree = {}
    for name, text in texts.items():
        table, dot, own = name.partition(".")
        if dot and table == "data" and own != "name":
            tree.setdefault("data", {})[own] = read_flag(text)
        elif name in OF_MODEL:
            tree[name] = read_flag(text)
        else:
            known = f"there are: {', '.join(OF_MODEL)}, and settings of data such as --data.turns"
            raise ConfigError(f"{flag_name((name,))} decides no tokens; {known}")
    return tree


def _texts(tree: Tree) -> dict[str, str]:
    """The settings as the page gives them, without the name of the data."""
    found = {name: tree[name] for name in tree if name != "data"}
    found |= {f"data.{name}": value for name, value in tree["data"].items() if name != "name"}
    return {name: value.text if isinstance(value, Flag) else text_of(value) for name, value in found.items()}


def _number(name: str, text: str, default: int, most: int) -> int:
    if text and not (text.isascii() and text.isdigit() and len(text) < 16):
        raise ConfigError(f"{name}={text!r} is no number; type one from 0 on")
    return min(int(text), most) if text else default
