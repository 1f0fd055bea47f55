"""What an environment changes around its objects: attributes of its classes and modules, and the state of the process.

Class attributes, module variables and what `shared` returned are compared by what they hold: text, numbers, lists,
mappings, and the attributes of objects in them, down to a depth. Functions and modules are left out.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import os
import random
import signal
import sys
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from rollouts.author_code import shown
from rollouts_check.environments.agents import watched
from rollouts_check.environments.subject import Subject

DEPTH = 4  # attributes of attributes that are compared
ITEMS_MAX = 500  # items of a container that are compared
SIGNALS = ("SIGINT", "SIGTERM", "SIGALRM", "SIGCHLD", "SIGHUP", "SIGUSR1", "SIGUSR2")
OWN_VARIABLES = ("TMPDIR", "COLUMNS", "LINES", "PYTEST_CURRENT_TEST")
"""Environment variables that the checks, the terminal and pytest set."""

CONTAINERS = (list, dict, set, collections.deque)
SKIPPED = (ModuleType, FunctionType, property, staticmethod, classmethod)


class Kept(NamedTuple):
    """What a class attribute or a module variable holds: a digest, how many items, and a text for a message."""

    digest: str
    size: int | None
    text: str


def kept_by_author(subject: Subject) -> dict[str, Kept]:
    """What the class attributes and module variables of the environment's package hold, by name, and what `shared`
    returned.
    """
    found: dict[str, Kept] = {}
    classes = [each for each in getattr(watched(subject.component), "__mro__", ()) if _is_authors(each)]
    names = list(dict.fromkeys(each.__module__ for each in classes))
    for name in names:
        for variable, value in list(vars(sys.modules.get(name, ModuleType(name))).items()):
            if isinstance(value, type):
                classes += [value] if value.__module__ == name and value not in classes else []
            elif _is_state(variable, value):
                found[f"the module variable {variable}"] = _kept(value)
    for each in classes:
        for attribute, value in list(vars(each).items()):
            if isinstance(value, FunctionType) and (kept := list(filter(_is_container, value.__defaults__ or ()))):
                found[f"a default of {each.__name__}.{attribute}"] = _kept(kept)
            if _is_state(attribute, value):
                found[f"the class attribute {each.__name__}.{attribute}"] = _kept(value)
    if subject.has("shared") and subject.environment.remote is None:
        found["the value of `shared`"] = _kept(subject.environment.shared().get_now())
    return found


def changes(before: Mapping[str, Kept], after: Mapping[str, Kept]) -> list[str]:
    """The names whose value is another one afterwards, each with both values."""
    names = [name for name in after if name not in before or before[name].digest != after[name].digest]
    return [
        f"{name} was {before[name].text}, then {after[name].text}" if name in before else f"{name} is new"
        for name in names
    ]


def grown(states: list[dict[str, Kept]]) -> list[str]:
    """The names of lists, mappings and sets with more items each time."""
    found = []
    for name, last in states[-1].items():
        sizes = [each[name].size for each in states if name in each]
        known = [size for size in sizes if size is not None]
        if len(known) == len(states) and all(one < two for one, two in itertools.pairwise(known)):
            found.append(f"{name} had {', '.join(map(str, known[:-1]))} and then {known[-1]} items: {last.text}")
    return found


def _is_container(value: Any) -> bool:
    return isinstance(value, CONTAINERS)


def _is_authors(value: Any) -> bool:
    module = getattr(value, "__module__", "builtins") or "builtins"
    top = module.partition(".")[0]
    return top not in ("builtins", "typing", "abc", "rollouts") and top not in sys.stdlib_module_names


def _is_state(name: str, value: Any) -> bool:
    if name.startswith("__") or isinstance(value, SKIPPED) or (callable(value) and not hasattr(value, "__dict__")):
        return False
    return name not in ("_abc_impl", "__warningregistry__")


def _kept(value: Any) -> Kept:
    digest = hashlib.sha256()
    for part in _parts(value, 0, set()):
        digest.update(part.encode(errors="replace"))
    size = _size(value, 0, set())
    return Kept(digest.hexdigest(), size, shown(value))


def _size(value: Any, depth: int, seen: set[int]) -> int | None:
    """How many items all containers in a value have; None if there is none."""
    if depth > DEPTH or id(value) in seen:
        return None
    seen.add(id(value))
    if isinstance(value, CONTAINERS):
        items = list(value.values() if isinstance(value, dict) else value)[:ITEMS_MAX]
        return len(value) + sum(_size(each, depth + 1, seen) or 0 for each in items)
    own = [_size(each, depth + 1, seen) for each in _attributes(value).values()]
    known = [each for each in own if each is not None]
    return sum(known) if known else None


def _parts(value: Any, depth: int, seen: set[int]) -> Iterator[str]:
    """Texts that are equal if two values hold the same."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        yield repr(value)[:1000]
        return
    yield type(value).__name__
    if depth > DEPTH or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, random.Random):
        yield str(hash(value.getstate()))
    elif isinstance(value, dict):
        yield str(len(value))
        for key, each in list(value.items())[:ITEMS_MAX]:
            yield from _parts(key, depth + 1, seen)
            yield from _parts(each, depth + 1, seen)
    elif isinstance(value, set | frozenset):
        yield str(len(value))
        yield from sorted("".join(_parts(each, depth + 1, seen)) for each in list(value)[:ITEMS_MAX])
    elif isinstance(value, list | tuple | collections.deque):
        yield str(len(value))
        for each in list(value)[:ITEMS_MAX]:
            yield from _parts(each, depth + 1, seen)
    elif type(value).__module__ == "itertools":
        yield repr(value)
    else:
        yield from _parts(_attributes(value), depth + 1, seen)


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an author's object; empty for others, such as a lock or a class."""
    if isinstance(value, type) or isinstance(value, SKIPPED) or not _is_authors(type(value)):
        return {}
    found = getattr(value, "__dict__", None)
    return dict(found) if isinstance(found, dict) else {}


# --- the process ------------------------------------------------------------------------------------------------------


def state_of_process() -> dict[str, Any]:
    """The working directory, the handlers of signals, and the environment variables, with words for each."""
    try:
        folder = os.getcwd()
    except OSError:
        folder = "a folder that does not exist"
    found: dict[str, Any] = {"the working directory": folder}
    found |= {f"the handler of {name}": signal.getsignal(each) for name, each in _signals()}
    found["sys.path"] = list(sys.path)
    return found | {
        f"the environment variable {name}": value for name, value in os.environ.items() if name not in OWN_VARIABLES
    }


def process_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What another process state has that the first has not."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return [f"{name} was {shown(before.get(name))}, then {shown(after.get(name))}" for name in names]


def restore_process(before: Mapping[str, Any]) -> None:
    """Set the working directory and the environment variables as they were."""
    os.chdir(before["the working directory"])
    prefix = "the environment variable "
    known = {name.removeprefix(prefix): value for name, value in before.items() if name.startswith(prefix)}
    for name in [each for each in os.environ if each not in known and each not in OWN_VARIABLES]:
        del os.environ[name]
    os.environ.update(known)


def _signals() -> Iterator[tuple[str, signal.Signals]]:
    for name in SIGNALS:
        if hasattr(signal, name):
            yield name, getattr(signal, name)
