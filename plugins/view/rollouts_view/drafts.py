"""Settings as the form in the page holds them: text as it was typed, checked as the command line checks its flags.

    form = check(Draft({"steps": "40"}, {"env": [Part("calculator", settings={"digits": "3"})]}), reader)
    form.faults   # what is wrong, and at which field
    form.text     # the settings file; only what differs from the defaults

Not here: the components (`component_reader`), and files (`settings_files`).
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollouts.config.convert import toml_value, unflagged
from rollouts.config.files import NOWHERE, Source, check_tree
from rollouts.config.flags import Tree, flag_name, read_flag
from rollouts.config.merging import Component, components_of, merge, parse_component, settings_path
from rollouts.config.paths import Move
from rollouts.config.render import to_toml
from rollouts.config.resolving import Resolved, moved, resolve
from rollouts.config.secrets import leaves_out
from rollouts.config.settings import (
    COMPONENT_KINDS,
    EVAL,
    MULTIPLE,
    WEIGHTED,
    Setting,
    Settings,
    is_secret,
    setting_infos,
    without_secrets,
)
from rollouts.errors import ConfigError, UserError
from rollouts.plugins.signature import Signature, complete_settings, convert_settings
from rollouts_view.component_reader import ComponentReader, ReadComponent, chosen_alone, is_own

TABLES = ("worker", "template", "role", "sft", "schedule")
"""The core settings that are tables. The form has one text for them, in TOML."""

BASIS = ("mode", "model", "data", "from_run")
"""The settings that decide the defaults of others."""

At = tuple[str | int, ...]
"""A field of the form: ("values", "steps"), ("components", "reward", 0, "settings", "target"), ("tables",), or ()."""

FAULTS_MAX = 20


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """A component that the form names, with its settings as text."""

    name: str = ""
    alias: str = ""
    weight: str = ""
    settings: dict[str, str] = {}


class Draft(msgspec.Struct, forbid_unknown_fields=True):
    """What the form holds. A setting that is missing has its default; a list has one text for each of its elements."""

    values: dict[str, str | list[str]] = {}
    components: dict[str, list[Part]] = {}
    tables: str = ""


class Fault(NamedTuple):
    """What is wrong, in the words of the command line, and the field."""

    at: At
    words: str


class Checked(NamedTuple):
    """What a check found. `text` has what differs from the defaults, `whole` all settings with comments; both are empty
    if there is a fault.
    """

    faults: list[Fault]
    notes: list[str]
    text: str = ""
    whole: str = ""
    mode: str = "rl"


def text_of(value: Any) -> str:
    """The text that the form shows for a value, and that is read as this value again.

    >>> text_of("calculator"), text_of("3"), text_of(None), text_of([1, 2])
    ('calculator', '"3"', 'none', '[1, 2]')
    """
    if value is None:
        return "none"
    if isinstance(value, str):
        return value if value.lower() == "none" or read_flag(value).value == value else toml_value(value)
    return toml_value(value)


# --- from a file ----------------------------------------------------------------------------------------------------


def draft_of(tree: Tree, source: Source = NOWHERE) -> tuple[Draft, list[str]]:
    """The settings of a file as a draft, and notes on what it does not hold. Raises ConfigError."""
    check_tree(tree, source)
    draft, notes, has_tables = Draft(), list[str](), False
    infos = {info.name: info for info in setting_infos()}
    for key, value in tree.items():
        if key in COMPONENT_KINDS:
            chosen = components_of(merge({key: value}, source=source), [key], source)[key]
            parts = [_part(key, each, notes) for each in chosen]
            if parts or infos[key].default:  # an empty list is given only if the default is none
                draft.components[key] = parts
        elif key in TABLES:
            has_tables = has_tables or bool(value)
        elif isinstance(value, list):
            if value:
                draft.values[key] = [text_of(each) for each in value]
        elif key not in infos or text_of(value) != text_of(infos[key].default):
            draft.values[key] = text_of(value)
    if has_tables:
        draft.tables = _text_of_tables(resolve(tree, source, allow_left_out=True).without_secrets())
    return draft, notes


def _text_of_tables(resolved: Resolved) -> str:
    none = {name: getattr(Settings(), name) for name in TABLES}
    return to_toml(resolved, differing_from=resolved._replace(settings=dataclasses.replace(resolved.settings, **none)))


def _part(key: str, component: Component, notes: list[str]) -> Part:
    settings = {}
    for name, value in component.settings.items():
        shown = without_secrets(value, name)
        if shown != value or leaves_out(value):
            notes.append(f"a secret is left out: {_by_command(settings_path(key, component), name)}")
        if not is_secret(name):
            settings[name] = text_of(shown)
    usual = parse_component("filter", component.name).alias if component.name else ""
    alias = component.alias if component.alias != usual else ""
    weight = text_of(_weight(component)) if component.alias and key in WEIGHTED else ""
    return Part(component.name, alias, weight, settings)


def _by_command(path: tuple[str, ...], name: str) -> str:
    return f"give it with the command, as {flag_name((*path, name))} VALUE"


def _weight(component: Component) -> Any:
    weight = component.weight
    return int(weight) if isinstance(weight, float) and weight.is_integer() else weight


# --- to settings ----------------------------------------------------------------------------------------------------


def check(draft: Draft, reader: ComponentReader, folder: Path | None = None) -> Checked:
    """Check every field as the command line would, and write the text of a file in `folder` (None: the working
    directory). The paths in the draft begin at the working directory.
    """
    draft, notes = _of_mode(draft)
    resolved, draft, faults = _resolved(draft)
    if resolved is None:
        return Checked(faults, notes)
    parts = _Parts(reader, resolved)
    whole = {key: list(chosen) for key, chosen in resolved.components.items()}
    brief = {key: list(chosen) for key, chosen in resolved.components.items()}
    for key, index, at in _places(draft):
        if index < len(whole[key]):  # the word `none` is no component
            whole[key][index], brief[key][index] = parts.converted(key, whole[key][index], at)
    faults, notes, mode = faults + parts.faults, notes + parts.notes, resolved.settings.mode
    if faults:
        return Checked(faults, notes, mode=mode)
    try:
        move = Move(os.getcwd(), os.path.realpath(folder or os.getcwd()))
        all_of_it, differing = (resolved._replace(components=each).without_secrets() for each in (whole, brief))
        if move.home != move.base:
            all_of_it, differing = moved(all_of_it, move), moved(differing, move)
        text = to_toml(differing, differing_from=_basis(draft))
        return Checked([], notes, text, to_toml(all_of_it, True, parts.signatures), mode)
    except ConfigError as error:  # a value that TOML cannot hold
        return Checked([Fault((), str(error))], notes, mode=mode)


def _of_mode(draft: Draft) -> tuple[Draft, list[str]]:
    """The draft without settings of training if its mode is eval, and a note that names them."""
    if draft.values.get("mode") != "eval":
        return draft, []
    left_out = [name for name in (*draft.values, *draft.components) if name not in EVAL]
    values = {name: text for name, text in draft.values.items() if name in EVAL}
    components = {key: parts for key, parts in draft.components.items() if key in EVAL}
    words = f"an evaluation has no use for these settings, so they are left out: {', '.join(left_out)}"
    return Draft(values, components, draft.tables), [words] if left_out else []


def _basis(draft: Draft) -> Resolved:
    """The settings to which the file would be compared: those of a run of the same mode, model and data."""
    alone = Draft(
        {name: draft.values[name] for name in BASIS if name in draft.values},
        {name: [Part(each.name) for each in draft.components[name]] for name in BASIS if name in draft.components},
    )
    basis = resolve(_tree(alone), allow_left_out=True)
    given = {name: getattr(Settings, name) for name in BASIS if name not in COMPONENT_KINDS}
    settings = dataclasses.replace(basis.settings, **given)
    return basis._replace(settings=settings, components=basis.components | {"data": []})


def _tree(draft: Draft) -> Tree:
    """The draft as settings. Raises ConfigError for tables that are no TOML."""
    tree: Tree = _tables(draft.tables)
    for name, text in draft.values.items():
        lines = [each for each in text if each.strip()] if isinstance(text, list) else text
        tree[name] = [read_flag(each) for each in lines] if isinstance(lines, list) else read_flag(lines)
    for key, parts in draft.components.items():
        tables = [_table(part) for part in parts if part.name or part.settings]
        is_single = key not in MULTIPLE and len(tables) == 1 and not {"alias", "weight"} & tables[0].keys()
        tree[key] = tables[0] if is_single else tables
    return tree


def _table(part: Part) -> Tree:
    own: Tree = {"name": part.name} if part.name else {}
    own |= {"alias": part.alias} if part.alias else {}
    own |= {"weight": read_flag(part.weight)} if part.weight else {}
    return {name: read_flag(text) for name, text in part.settings.items()} | own


def _tables(text: str) -> Tree:
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, or lists inside lists
        raise ConfigError(f"this is not TOML: {error}") from error
    if wrong := [key for key in tree if key not in TABLES]:
        raise ConfigError(f"{wrong[0]!r} has no place here; these have: {', '.join(TABLES)}")
    return tree


def _resolved(draft: Draft) -> tuple[Resolved | None, Draft, list[Fault]]:
    """The settings and the draft without the fields that are wrong, and a fault for each of these. The settings are
    None if no field is the cause.
    """
    faults: list[Fault] = []
    for _ in range(FAULTS_MAX):
        found, words = _try(draft)
        if found is not None:
            return found, draft, faults
        at, draft = _cause(draft, words)
        faults.append(Fault(at, words))
        if not at:
            break
    return None, draft, faults


def _try(draft: Draft) -> tuple[Resolved | None, str]:
    try:
        tree = _tree(draft)
        return resolve(tree, allow_left_out=True), ""
    except UserError as error:
        return None, str(error)


def _cause(draft: Draft, words: str) -> tuple[At, Draft]:
    """The field without which this error is gone, and the draft without it."""
    # first the one that the message names: another one may decide whether this check is made at all
    named = sorted(_fields(draft), key=lambda at: at[0] != "values" or not words.startswith(flag_name((str(at[1]),))))
    others: list[tuple[At, Draft]] = []
    for at in named:
        less = _without(draft, at)
        found, still = _try(less)
        if found is not None:
            return at, less
        if still != words:
            others.append((at, less))
    return others[0] if others else ((), draft)


def _fields(draft: Draft) -> Iterator[At]:
    """The fields that are not at their defaults, the smallest first."""
    for key, parts in draft.components.items():
        for index, part in enumerate(parts):
            yield from (("components", key, index, name) for name in ("weight", "alias") if getattr(part, name))
            yield from (("components", key, index, "settings", name) for name in part.settings)
    yield from (("values", name) for name in draft.values)
    yield from (("components", key, index) for key, parts in draft.components.items() for index in range(len(parts)))
    yield from (("components", key) for key, parts in draft.components.items() if not parts)
    if draft.tables.strip():
        yield ("tables",)


def _without(draft: Draft, at: At) -> Draft:
    """A copy of the draft without a field."""
    less = msgspec.convert(msgspec.to_builtins(draft), Draft)
    match at:
        case ("values", str(name)):
            del less.values[name]
        case ("components", str(key)):
            del less.components[key]
        case ("components", str(key), int(index)):
            less.components[key][index] = Part()  # the others keep their numbers
        case ("components", str(key), int(index), str(name)):
            setattr(less.components[key][index], name, "")
        case ("components", str(key), int(index), "settings", str(name)):
            del less.components[key][index].settings[name]
        case _:
            less.tables = ""
    return less


# --- components -----------------------------------------------------------------------------------------------------


def _places(draft: Draft) -> Iterator[tuple[str, int, At]]:
    """The components of the draft: the key, the number among those of that key, and the field."""
    for key, parts in draft.components.items():
        given = [index for index, part in enumerate(parts) if part.name or part.settings]
        yield from ((key, number, ("components", key, index)) for number, index in enumerate(given))


class _Parts:
    """Converts the settings of components, and collects what is wrong."""

    def __init__(self, reader: ComponentReader, resolved: Resolved) -> None:
        self.faults: list[Fault] = []
        self.notes: list[str] = []
        self.signatures: dict[tuple[str, ...], tuple[Setting, ...]] = {}
        self._reader, self._has_workers = reader, bool(resolved.settings.worker)
        self._loss = next((each.name for each in resolved.components["loss"]), "")

    def converted(self, key: str, component: Component, at: At) -> tuple[Component, Component]:
        """The component with all its settings, and with those alone that differ from their defaults. Of one that is not
        read, the settings are as they were typed.
        """
        found = self._reader.read(key, component.name, self._loss)
        if found.state != "read":
            is_elsewhere = key == "env" and self._has_workers
            if found.state == "unknown" and not is_elsewhere:
                self.faults.append(Fault(at, found.words))
            else:
                name = component.name or key
                self.notes.append(f"the settings of {name} are not checked: {found.words}")
            as_typed = component._replace(settings=unflagged(component.settings))
            return as_typed, as_typed
        path, known = settings_path(key, component), {each.name: each for each in found.signature.settings}
        self.signatures[path] = found.signature.settings
        before = len(self.faults)
        settings = self._settings(component, found, path, at)
        if len(self.faults) == before and settings.keys() >= {each.name for each in known.values() if each.is_required}:
            self._whole(key, component, at)
        complete = complete_settings(found.signature, settings)
        differing = {name: value for name, value in settings.items() if not _is_default(known[name], value)}
        return component._replace(settings=complete), component._replace(settings=differing)

    def _settings(self, component: Component, found: ReadComponent, path: tuple[str, ...], at: At) -> dict[str, Any]:
        """The settings that can be converted, each by itself."""
        settings: dict[str, Any] = {}
        for name, value in component.settings.items():
            # the others without a default are another fault
            alone = tuple(each for each in found.signature.settings if each.name == name or not each.is_required)
            try:
                settings |= convert_settings(Signature((), alone), {name: value}, found.label, NOWHERE, path)
            except ConfigError as error:
                self.faults.append(Fault((*at, "settings", name), str(error)))
        for each in found.signature.settings:
            if not each.is_required or each.name in component.settings:
                continue
            if is_secret(each.name):
                self.notes.append(f"a secret is needed: {_by_command(path, each.name)}")
                continue
            try:
                convert_settings(Signature((), (each,)), {}, found.label, NOWHERE, path)
            except ConfigError as error:
                self.faults.append(Fault((*at, "settings", each.name), str(error)))
        return settings

    def _whole(self, key: str, component: Component, at: At) -> None:
        """Check what no setting alone decides, such as the values of a dataclass together."""
        try:
            if key == "loss" or not is_own(key, component.name):
                chosen_alone(key, component)
            else:
                chosen_alone(key, component, self._loss)
        except UserError as error:
            self.faults.append(Fault(at, str(error)))


def _is_default(setting: Setting, value: Any) -> bool:
    try:
        return toml_value(value) == toml_value(setting.default)
    except TypeError:  # a default that TOML cannot hold; the typed value came from text
        return False
