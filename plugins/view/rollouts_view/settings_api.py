"""The paths of the API for the form of a new run: what can be set, a check as you type, and the file.

Nothing is started, and nothing is written but the file that the user names.
"""

from __future__ import annotations

import functools
import shlex
from typing import Any

import msgspec

from rollouts.config.convert import choices_of, describe_type, union_members
from rollouts.config.files import load_file
from rollouts.config.settings import COMPONENT_KINDS, EVAL, MULTIPLE, WEIGHTED, Setting, is_secret, setting_infos
from rollouts.errors import ConfigError
from rollouts.plugins.index import KIND_WORDS
from rollouts.runs.folder import CONFIG
from rollouts_view.catalog import Catalog
from rollouts_view.component_reader import ComponentReader, names_of
from rollouts_view.drafts import TABLES, Checked, Draft, Part, check, draft_of, text_of
from rollouts_view.settings_files import SettingsFiles, WouldReplaceError, tag_of

OF_THAT_RUN = ("out", "resume")
"""The settings of a run that another run cannot have too."""


class _Write(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request that writes a file. `whole`: with every setting. `replaced` is the tag of an old file."""

    draft: Draft
    root: str
    name: str
    whole: bool = False
    replaced: str = ""


class _RunFile(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request that lets the file of a component be run."""

    name: str


class SettingsAPI:
    """What the form asks. Several threads may ask."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._files = SettingsFiles(catalog.places)
        self._reader = ComponentReader([place for place in catalog.places if place.is_dir()])

    def form(self) -> dict[str, Any]:
        """All settings of the core, and the names of the components that they can name."""
        return {
            "groups": _groups(),
            "kinds": {key: _kind(key) | {"names": names_of(key)} for key in COMPONENT_KINDS},
            "tables": {info.name: info.doc for info in setting_infos() if info.name in TABLES},
            "roots": list(self._files.roots),
            "files": self._files.listed(),
        }

    def component(self, key: str, name: str, loss: str) -> dict[str, Any]:
        """A component and its settings, or why it has none."""
        if key not in COMPONENT_KINDS:
            raise ConfigError(f"{key!r} names no component; these settings do: {', '.join(COMPONENT_KINDS)}")
        found = self._reader.read(key, name, loss)
        fields = [field_of(setting) for setting in found.signature.settings]
        return {"state": found.state, "words": found.words, "fields": fields}

    def draft(self, run: str, root: str, file: str) -> dict[str, Any]:
        """The settings of a run, or of a file below an opened folder, as a draft."""
        path = self._catalog.folder(run) / CONFIG if run else self._files.path(root, file)
        tree, source = load_file(path)
        if run:
            tree = {name: value for name, value in tree.items() if name not in OF_THAT_RUN}
        draft, notes = draft_of(tree, source)
        return {"draft": draft, "notes": notes, "tag": "" if run else tag_of(path.read_bytes())}

    def check(self, body: bytes) -> dict[str, Any]:
        """What is wrong with a draft, and the text of its file."""
        found = check(_decoded(body, Draft), self._reader)
        faults = [fault._asdict() for fault in found.faults]
        texts = {"text": found.text, "whole": found.whole, "command": _command(found, "FILE")}
        return {"faults": faults, "notes": found.notes, **texts}

    def run_file(self, body: bytes) -> dict[str, Any]:
        """Let the file of a component be run, to read its settings."""
        self._reader.allow(_decoded(body, _RunFile).name)
        return {}

    def write(self, body: bytes) -> dict[str, Any]:
        """Write a settings file; or say that it exists, with the tag that a request to replace it has to name."""
        given = _decoded(body, _Write)
        found = check(given.draft, self._reader, self._files.path(given.root, given.name).parent)
        if found.faults:
            raise ConfigError(f"nothing was written: {found.faults[0].words}")
        text = found.whole if given.whole else found.text
        try:
            file = self._files.write(given.root, given.name, text, given.replaced)
        except WouldReplaceError as error:
            return {"asks": str(error), "tag": error.tag}
        command = _command(found, shlex.quote(file))
        return {"file": file, "tag": tag_of(text.encode()), "command": command, "dry": f"{command} --dry-run"}


def _command(found: Checked, file: str) -> str:
    return f"rollouts {'eval' if found.mode == 'eval' else 'run'} {file}"


def _decoded(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the request cannot be read: {error}") from error


@functools.cache
def _groups() -> list[dict[str, Any]]:
    """The settings of the core by group, but for those that are tables."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for info in setting_infos():
        if info.name in TABLES:
            continue
        more = {"shown": info.default_text, "of_eval": info.name in EVAL, "is_component": info.name in COMPONENT_KINDS}
        groups.setdefault(info.group, []).append(field_of(info) | more)
    return [{"name": name, "fields": fields} for name, fields in groups.items()]


@functools.cache
def _kind(key: str) -> dict[str, Any]:
    """How many components a setting can name, and which it names by default."""
    default = next(info.default for info in setting_infos() if info.name == key)
    listed = default if isinstance(default, tuple) else [default] if default else []
    return {
        "word": KIND_WORDS[COMPONENT_KINDS[key]],
        "is_multiple": key in MULTIPLE or key == "env",
        "is_weighted": key in WEIGHTED,
        "default": [Part(text.partition(":")[0], weight=text.partition(":")[2]) for text in listed],
    }


def field_of(setting: Setting) -> dict[str, Any]:
    """A setting as the form shows it. `default` is None if there is none, or if no text can give it."""
    default = _default(setting)
    return {
        "name": setting.name,
        "type": describe_type(setting.type),
        "choices": _choices(setting.type),
        "is_list": isinstance(setting.default, tuple) and not setting.choices,
        "default": default,
        "shown": "" if setting.is_required else repr(setting.default) if default is None else default,
        "is_required": setting.is_required,
        "is_secret": is_secret(setting.name),
        "doc": " ".join(setting.doc.split()),
    }


def _default(setting: Setting) -> str | None:
    if setting.is_required or is_secret(setting.name):
        return None
    try:
        return text_of(setting.default)
    except TypeError:  # TOML cannot hold it
        return None


def _choices(hint: Any) -> list[str]:
    """The words that a setting can have; empty if it can have others."""
    members = set(union_members(hint)) if all(isinstance(each, type) for each in union_members(hint)) else set()
    if bool in members and members <= {bool, type(None)}:
        return ["true", "false", *(["none"] if type(None) in members else [])]
    found = [text_of(choice) for choice in choices_of(hint)]
    return found + (["none"] if found and type(None) in union_members(hint) else [])
