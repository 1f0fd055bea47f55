"""Checks of every kind: the package, the signature and the settings. For functions: inputs that stay as they are, and
results that can be repeated.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rollouts.author_code import message_of, place_of_parameter, shown
from rollouts.config.convert import toml_value
from rollouts.config.settings import is_secret
from rollouts.errors import ConfigError, counted
from rollouts.plugins.signature import converted
from rollouts_check.components.subject import Subject, at
from rollouts_check.environments.package import check_import, import_in
from rollouts_check.environments.traces import random_calls
from rollouts_check.report import FailedError, SkippedError

WITH_TORCH = frozenset(
    "advantages corrections kl losses mixers optimizers pairings references selectors shapings training".split()
)
"""The kinds that are only used where torch is installed."""


def imports(subject: Subject) -> str:
    """The import is fast and opens no connection. If the kind needs no torch, the import does not load it."""
    if not subject.found.is_importable:
        raise SkippedError(f"the {subject.word} has no name that another process can import")
    first = ["torch"] if subject.kind in WITH_TORCH else []
    change = f"import it inside the function that needs it: a {subject.word} may be used where it is not installed"
    return check_import(subject.found, subject.scratch, change, first=first)


def wheel(subject: Subject) -> str:
    """The package builds, installs into a new virtual environment, and can be imported there."""
    package = subject.found.its_package()
    installed = package.installed()
    name = package.qualified(subject.found.label)
    request = {"kind": subject.kind, "name": name, "first": [], "forbidden": []}
    request["answer"] = str(subject.scratch / "wheel.json")
    installed.check_module(import_in([str(installed.python), "-P"], request, None)["file"])
    return f"{installed.remark}{package.stale(subject.kind)}"


def definition(subject: Subject) -> str:
    """The signature is one that a run accepts: it names known inputs, and every setting has a name and a type."""
    if subject.fault is not None:
        raise FailedError("read the signature", message_of(subject.fault), "correct the signature")
    names = subject.signature.requests
    return f"names {', '.join(names)}" if names else "names no inputs"


def settings(subject: Subject) -> str:
    """The settings can be written to a settings file and read back."""
    for name, value in subject.settings.items():
        if is_secret(name):
            continue
        place = place_of_parameter(subject.component, name)
        where = f" ({place})" if place else ""
        tried = f"write the setting {name} to a TOML file, as a run does, and read it back"
        change = f"give the setting {name} a type hint and a default that TOML can hold"
        try:
            back = _read_back(subject, name, value)
        except (TypeError, ConfigError) as error:
            raise FailedError(tried, f"{message_of(error)}{where}", change) from error
        is_same = list(back) == list(value) if isinstance(value, tuple) and isinstance(back, list) else back == value
        if not is_same:
            raise FailedError(tried, f"it was {shown(value)} and is {shown(back)} afterwards{where}", change)
    return counted(len(subject.settings), "setting")


def _read_back(subject: Subject, name: str, value: Any) -> Any:
    from rollouts.config.files import Source

    read = tomllib.loads(f"x = {toml_value(value)}")["x"]
    known = {**subject.settings, name: read}
    return converted(subject.signature, known, subject.found.label, Source(), ())[name]


# --- functions --------------------------------------------------------------------------------------------------------


def unchanged(subject: Subject) -> str:
    """A call changes none of its inputs: other functions get the same objects."""
    for function in subject.functions:
        inputs: list[tuple[str, Any, str]] = []
        subject.try_out(_recorded(function, inputs))
        for name, value, before in inputs:
            if (now := snapshot(value)) != before:
                was, other = _beginning_of_difference(before, now)
                seen = f"it was {was} and is {other}{at(function)}"
                change = f"change a copy of {name}: methods of tensors whose names end in _ change them in place"
                raise FailedError(f"compare {name} before and after a call", seen, change)
    return ""


def _recorded(function: Callable[..., Any], inputs: list[tuple[str, Any, str]]) -> Callable[..., Any]:
    """The function, which adds each of its inputs to `inputs`: its name, the object, and what it was."""
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        inputs.extend((name, value, snapshot(value)) for name, value in zip(names, args, strict=False))
        return function(*args, **kwargs)

    return call


def _beginning_of_difference(one: str, other: str) -> tuple[str, str]:
    """Both texts from a little before their first difference."""
    place = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    first = max(0, place - 20)
    short = [f"{'...' if first else ''}{text[first : first + 60]}" for text in (one, other)]
    return short[0], short[1]


def repeatable(subject: Subject) -> str:
    """The same inputs give the same result, and no global random generator is used."""
    for function in subject.functions:
        with random_calls() as calls, _torch_random() as torch_calls:
            first, second = (snapshot(subject.try_out(function)) for _ in range(2))
        if first != second:
            was, other = _beginning_of_difference(first, second)
            seen = f"it was {was}, and then {other}{at(function)}"
            change = "compute the result from the inputs alone: keep no state, and draw no random numbers"
            raise FailedError("call it twice with the same inputs", seen, change)
        if found := [*calls, *torch_calls]:
            change = "draw from a generator of your own with a fixed seed: a run's seed must give one result"
            raise FailedError("watch the global random generators", "; ".join(found) + at(function), change)
    return ""


@contextlib.contextmanager
def _torch_random() -> Iterator[list[str]]:
    """A list that has, after the block, a text if the block used torch's global random generator."""
    found: list[str] = []
    before = _torch_state()
    yield found
    if before is not None and _torch_state() != before:
        found.append("the state of the global generator of torch changed")


def _torch_state() -> bytes | None:
    torch = sys.modules.get("torch")
    return None if torch is None else bytes(torch.get_rng_state().tolist())


def snapshot(value: Any) -> str:
    """A text that is equal for equal values: of tensors, numbers, texts, lists, tables, and structs of these.

    >>> snapshot({"a": (1, 2.0)}), snapshot([float("nan")])
    ("{'a': (1, 2.0)}", '[nan]')
    """
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')}{value.tolist()}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {snapshot(each)}" for key, each in value.items()) + "}"
    if isinstance(value, tuple) and type(value) is tuple:
        return "(" + ", ".join(map(snapshot, value)) + ")"
    if isinstance(value, list):
        return "[" + ", ".join(map(snapshot, value)) + "]"
    return repr(value)
