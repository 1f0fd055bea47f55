"""Python objects in settings: a function or a class in the place of a component's name.

`rollouts.run(reward=my_reward)` and a settings file in Python may hold objects. Settings are plain text, so each object
gets a name. An object that another program can import is `module:name`, or `file.py:name`. Any other object has a name
in angle brackets, such as `<my_reward>`: no other program can find it, so it travels beside the settings, in `Objects`.
Prompts become the rows of a file: texts, lists of messages, Tasks, or rows (dicts).
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import math
import numbers
import re
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import msgspec

from rollouts.author_code import authors_code, place_of_function, shown, unwrapped, why_no_list
from rollouts.config.flags import Flag, Tree
from rollouts.config.names import GIVEN_ROWS, HELD
from rollouts.config.settings import COMPONENT_KINDS, MULTIPLE, WEIGHTED
from rollouts.errors import ConfigError, RolloutsError, words_of
from rollouts.types import Message, Task

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Objects(NamedTuple):
    """What Python code gave that settings cannot hold.

    `components` holds the objects with names in angle brackets, by these names. `on_step` are the functions to call
    after each step. `rows` are the prompts, as JSON lines, by the value of the setting `data`.
    """

    components: Mapping[str, Any] = _NOTHING
    on_step: tuple[Callable[..., Any], ...] = ()
    rows: Mapping[str, bytes] = _NOTHING


NO_OBJECTS = Objects()


def take_objects(tree: Tree, file: Mapping[str, Any] = _NOTHING, before: Objects = NO_OBJECTS) -> tuple[Tree, Objects]:
    """The tree with names in place of its objects; and the objects, added to those `before`.

    `file` is the tree over which this one will be merged. If it names an object that it no longer has, an object of
    that name takes its place there: the settings beside it stay. Raises ConfigError for a value that cannot be a
    component.
    """
    names = _Names(before.components, file)
    plain = {key: value for key, value in tree.items() if key not in ("on_step", "prompts")}
    plain = names.in_tree(plain)
    on_step = _callbacks(tree["on_step"]) if tree.get("on_step") is not None else before.on_step
    rows = before.rows
    if tree.get("prompts") is not None:
        data, content = _rows_of(tree["prompts"])
        rows = {**rows, data: content}
        plain |= _settings_of_prompts(plain, data)
    return plain, Objects(MappingProxyType(names.known), on_step, MappingProxyType(dict(rows)))


def _settings_of_prompts(given: Tree, data: str) -> Tree:
    """The settings that choose the environment of these prompts. Raises ConfigError if another one is given too."""
    env = given.get("env")
    is_prompts = env == "prompts" or (isinstance(env, Mapping) and env.get("name", "prompts") == "prompts")
    other = "data" if given.get("data") is not None else "" if env is None or is_prompts else "env"
    if other:
        why = "both give the tasks of the run\nleave one of them out: with `prompts` the environment is `prompts`"
        raise ConfigError(f"prompts and {other}: {why}")
    return {"data": data, "env": env or "prompts"}


def _callbacks(value: Any) -> tuple[Callable[..., Any], ...]:
    """The functions of `on_step`. Raises ConfigError if one cannot be called with one argument."""
    functions = tuple(value) if isinstance(value, list | tuple) else (value,)
    for function in functions:
        try:
            inspect.signature(function).bind(None)
        except (TypeError, ValueError) as error:
            place = place_of_function(function) if callable(function) else None
            given = f"{_described(function)}{f' ({place})' if place else ''}"
            again = "write `def on_step(report)`: it has report.step, report.metrics and report.groups"
            raise ConfigError(f"on_step: expected a function of one argument, got {given}\n{again}") from error
    return functions


class _Names:
    """Gives names to objects. `known` are those with names in angle brackets."""

    def __init__(self, known: Mapping[str, Any], file: Mapping[str, Any]) -> None:
        self.known = dict(known)
        self._lost = {key: [name for name in names if name not in known] for key, names in held_names(file).items()}

    def in_tree(self, tree: Tree, *, is_merged: bool = True) -> Tree:
        """A copy of the tree with names in place of objects. `is_merged` False: it replaces the tables of the file."""
        named: Tree = {}
        for key, value in tree.items():
            if key == "sft" and isinstance(value, Mapping):
                value = self.in_tree(dict(value))
            elif key == "schedule" and isinstance(value, list | tuple):
                value = [self.in_tree(dict(t), is_merged=False) if isinstance(t, Mapping) else t for t in value]
            elif key in COMPONENT_KINDS:
                if is_merged and self._has_found_again(key, value):
                    continue
                value = self._in_component(key, value)
            named[key] = value
        return named

    def _has_found_again(self, key: str, value: Any) -> bool:
        """Whether the value consists of objects that the file names and has no longer. They take their places."""
        found: dict[str, Any] = {}
        for each in value if isinstance(value, list | tuple) else [value]:
            if not is_object(each):
                return False
            like = re.compile(f"<{re.escape(label_of(each))}(_[0-9]+)?>")
            names = (name for name in self._lost.get(key, ()) if like.fullmatch(name) and name not in found)
            name = next((name for name in names if self.known.get(name, each) is each), None)
            if name is None:
                return False
            found[name] = each
        self.known |= found
        return bool(found)

    def _in_component(self, key: str, value: Any) -> Any:
        if key != "env" and key not in MULTIPLE:
            return self._table(key, value, key) if isinstance(value, Mapping) else self._name(key, value, key)
        if isinstance(value, Mapping):
            if isinstance(value.get("name"), str) or is_object(value.get("name")):
                table = self._table(key, value, key)
                return [table] if key in MULTIPLE else table
            listed = (str, tuple) if key in MULTIPLE else ()
            if any(is_object(each) or isinstance(each, listed) or _is_pair(each) for each in value.values()):
                return [self._entry(key, each, f"{key}.{alias}", alias) for alias, each in value.items()]
            return {alias: self._table(key, each, f"{key}.{alias}") for alias, each in value.items()}
        if _is_weighted(value):
            return [self._entry(key, value, key)]
        if isinstance(value, list | tuple):
            return [self._entry(key, each, f"{key}[{number}]") for number, each in enumerate(value)]
        return [self._entry(key, value, key)] if is_object(value) else self._name(key, value, key)

    def _entry(self, key: str, value: Any, path: str, alias: str = "") -> Any:
        """One of several components: a text, or a table."""
        value, weight = _weighted(key, value, path) if isinstance(value, tuple) else (value, None)
        own = {"alias": alias} if alias else {}
        if weight is not None:
            own["weight"] = weight if not is_object(weight) else self._of(weight)
        if isinstance(value, Mapping):
            return {**self._table(key, value, path), **own}
        if is_object(value) or (weight is not None and not isinstance(weight, float)):
            return {**self._table(key, {"name": value}, path), **own}
        if isinstance(value, str) and own:
            return f"{f'{alias}=' if alias else ''}{value}{f':{weight!r}' if weight is not None else ''}"
        return self._name(key, value, path)

    def _table(self, key: str, value: Any, path: str) -> Any:
        """A component's table. The keywords of a `functools.partial` of an environment are settings too."""
        if not isinstance(value, Mapping):
            return value
        table = dict(value)
        chosen = table.get("name")
        if key == "env" and isinstance(chosen, functools.partial) and not chosen.args:
            table = {**chosen.keywords, **table, "name": chosen.func}
        if "name" in table:
            table["name"] = self._name(key, table["name"], path)
        if key == "env" and is_object(table.get("weight")):
            table["weight"] = self._of(table["weight"])
        return table

    def _name(self, key: str, value: Any, path: str) -> Any:
        if value is None or isinstance(value, str | Flag):
            return value
        if fault := _fault_of(key, value):
            raise ConfigError(f"{path}: {fault}")
        return self._of(value)

    def _of(self, value: Any) -> str:
        """The name of an object. Two different objects with one label get different names."""
        if name := import_name(value):
            return name
        label = label_of(value)
        names = itertools.chain([f"<{label}>"], (f"<{label}_{number}>" for number in itertools.count(2)))
        return next(name for name in names if self.known.setdefault(name, value) is value)


def held_names(tree: Mapping[str, Any]) -> dict[str, list[str]]:
    """The names in angle brackets in a tree of settings, by the key of their component, each once."""
    found: dict[str, list[str]] = {}

    def search(key: str, value: Any) -> None:
        if isinstance(value, str) and HELD.fullmatch(value):
            found.setdefault(key, []).append(value)
        elif isinstance(value, Mapping) and "name" in value:  # its other values are settings, except for a curriculum
            search(key, value["name"])
            search(key, value.get("weight"))
        elif isinstance(value, Mapping):
            for inner in value.values():
                search(key, inner if isinstance(inner, Mapping) else None)
        elif isinstance(value, list | tuple):
            for inner in value:
                search(key, inner)

    schedule = tree.get("schedule")
    for own in (tree, tree.get("sft"), *(schedule if isinstance(schedule, list | tuple) else ())):
        for key in COMPONENT_KINDS if isinstance(own, Mapping) else ():
            search(key, own.get(key))
    return {key: list(dict.fromkeys(names)) for key, names in found.items()}


def is_object(value: Any) -> bool:
    """Whether a value is an object that can be a component: a function, a class, an object that can be called, or an
    algorithm.
    """
    return callable(value) or (isinstance(getattr(value, "terms", None), tuple) and not isinstance(value, Mapping))


def label_of(value: Any) -> str:
    """A short name for an object.

    >>> label_of(print), label_of(lambda: 0), label_of(functools.partial(print, 1))
    ('print', 'lambda', 'print')
    """
    inner = unwrapped(value)
    name = getattr(inner, "__name__", None)
    return re.sub(r"\W", "", name) if isinstance(name, str) else type(inner).__name__


def origin_of(value: Any) -> str:
    """Where an object in memory comes from: its kind, its name, and its file and line if it has a file."""
    inner = unwrapped(value)
    kind = "a class" if inspect.isclass(inner) else "a function" if hasattr(inner, "__qualname__") else "an object"
    owner = inner if hasattr(inner, "__qualname__") else type(inner)
    try:
        place = f", in {inspect.getsourcefile(owner)}, line {inspect.getsourcelines(owner)[1]}"
    except (OSError, TypeError):
        place = ""
    return f"{kind} in memory: {owner.__module__}:{owner.__qualname__}{place}"


def import_name(value: Any) -> str:
    """The name under which another program can import an object; empty if there is none."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    qualname = getattr(value, "__qualname__", None)
    if module is None or not isinstance(qualname, str) or module.__name__ in ("__main__", "__mp_main__"):
        return ""
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if found is not value or getattr(module, "__spec__", None) is None:
        return ""
    file = str(module.__spec__.origin if module.__spec__ else "")
    if module.__name__.startswith("rollouts_file_"):
        return f"{file if '/' in file else f'./{file}'}:{qualname}"
    return f"{module.__name__}:{qualname}" if _can_be_found(module) else ""


def _can_be_found(module: ModuleType) -> bool:
    """Whether a new process finds the package of a module."""
    package = module.__name__.partition(".")[0]
    finders = [finder.find_spec for finder in sys.meta_path if hasattr(finder, "find_spec")]
    return any(find(package, None) is not None for find in finders)


def _is_pair(value: Any) -> bool:
    """Whether a value is a pair of an object and its weight."""
    return isinstance(value, tuple) and len(value) == 2 and is_object(value[0])


def _is_weighted(value: Any) -> bool:
    """Whether a value is a pair of a component and a weight, not a list of components."""
    return isinstance(value, tuple) and len(value) == 2 and _is_number(value[1])


def _weighted(key: str, pair: tuple[Any, ...], path: str) -> tuple[Any, Any]:
    """The component and the weight of a pair. Raises ConfigError."""
    given = f"({', '.join(map(_described, pair))})"
    if key not in WEIGHTED:
        raise ConfigError(f"{path}: a {key} has no weight; got {given}\ngive the component without a weight")
    if len(pair) == 2:
        component, weight = pair
        if key == "env" and (isinstance(weight, str | list | Mapping) or is_object(weight)):
            return component, weight  # a curriculum, or points
        if _is_number(weight) and math.isfinite(weight):
            return component, float(weight)
    example = f"({_described(pair[0]) if pair else f'my_{key}'}, 0.5)"
    expected = "expected a pair (component, weight), and a finite number as the weight"
    raise ConfigError(f"{path}: {expected}; got {given}\nwrite {example}")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _fault_of(key: str, value: Any) -> str:
    """Why a value cannot be a component; empty if it can."""
    kind = type(value).__name__
    if inspect.iscoroutine(value) or inspect.isgenerator(value):
        value.close()
        return f"got a {kind}, the result of calling {value.__name__}\ngive the function itself: {key}={value.__name__}"
    if key == "env" and isinstance(value, functools.partial) and value.args:
        return f"the settings of an environment have names\nwrite functools.partial({_described(value)}, name=value)"
    made = ("tasks",) if key == "env" else () if is_object(value) else _OF_OBJECTS
    if any(hasattr(value, name) for name in made) and not inspect.isclass(value):
        return f"got an object of {kind}, but a run makes its objects\ngive the class, or a function: {key}={kind}"
    expected = "expected the name of a component, as text, or a function or a class of Python"
    return "" if is_object(value) else f"{expected}; got {shown(value)}\n`rollouts plugins list` shows the names"


_OF_OBJECTS = ("log", "generate", "optim_step")
"""What a made logger, engine or training backend has."""


def _described(value: Any) -> str:
    """A value for an error: the name of an object, else its text."""
    return label_of(value) if is_object(value) else shown(value)


# --- prompts ----------------------------------------------------------------------------------------------------------

_ROW_KEYS = ("prompt", "answer", "id")
"""The keys of a row that do not become the task's `info`."""

_A_PROMPT = "a prompt is a text, a list of messages, a Task, or a row such as {'prompt': 'What is 2+2?', 'answer': 4}"


def _rows_of(prompts: Any) -> tuple[str, bytes]:
    """The prompts as JSON lines, and the name of their file in the folder of a run. Raises ConfigError.

    >>> _rows_of(["What is 2+2?"])
    ('code/prompts_d842d630.jsonl', b'{"prompt":"What is 2+2?"}\\n')
    """
    if why_no_list(prompts):
        file = "\nto read a file of rows: data='rows.jsonl'" if isinstance(prompts, str) else ""
        raise ConfigError(f"prompts: expected a list of prompts; got {shown(prompts)}\n{_A_PROMPT}{file}")
    try:
        with authors_code():
            given = list(prompts)
    except RolloutsError:
        raise
    except Exception as error:  # a generator may raise anything
        raise ConfigError(f"prompts: they cannot be read to the end: {words_of(error)}") from error
    if not given:
        raise ConfigError(f"prompts: got an empty list, so the run has no task\n{_A_PROMPT}")
    lines = [_line(f"prompts[{number}]", prompt) for number, prompt in enumerate(given)]
    content = b"".join(line + b"\n" for line in lines)
    return f"{GIVEN_ROWS}{hashlib.sha256(content).hexdigest()[:8]}.jsonl", content


def _line(where: str, prompt: Any) -> bytes:
    """One prompt as a row. Raises ConfigError."""
    try:
        return msgspec.json.encode(_row(where, prompt), enc_hook=_as_plain)
    except (TypeError, ValueError, RecursionError) as error:
        why = f"a run keeps its prompts as JSON, and this one cannot be written: {error}"
        raise ConfigError(f"{where}: {why}\ngive text, numbers, lists and dicts") from error


def _as_plain(value: Any) -> Any:
    """The number or the list in a number or an array of numpy or torch. Called by msgspec."""
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    raise TypeError(f"{shown(value)} is of the type {type(value).__name__}")


def _row(where: str, prompt: Any) -> dict[str, Any]:
    if isinstance(prompt, str | list | tuple):
        row: dict[str, Any] = {"prompt": prompt}
    elif isinstance(prompt, Task):
        for key in (key for key in _ROW_KEYS if key in prompt.info):
            taken = f"the info of the task has the key {key!r}, which is a field of a Task"
            raise ConfigError(f"{where}: {taken}\nrename the key")
        fields = {"answer": prompt.answer, "id": prompt.id}
        row = {"prompt": prompt.prompt, **{k: v for k, v in fields.items() if v is not None}, **prompt.info}
    elif isinstance(prompt, Mapping) and "prompt" in prompt:
        row = dict(prompt)
    else:
        is_message = isinstance(prompt, Message) or (isinstance(prompt, Mapping) and "role" in prompt)
        hint = "\nfor one prompt of several messages, write prompts=[[message, message]]" if is_message else ""
        raise ConfigError(f"{where}: got {shown(prompt)}\n{_A_PROMPT}{hint}")
    messages = row["prompt"]
    try:
        if not isinstance(messages, str):
            msgspec.convert(msgspec.to_builtins(messages), list[Message])
    except (msgspec.ValidationError, TypeError) as error:
        raise ConfigError(f"{where}: its prompt is no text and no list of messages: {error}\n{_A_PROMPT}") from error
    if not messages:
        raise ConfigError(f"{where}: the prompt is empty")
    return row
