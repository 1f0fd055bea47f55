"""The component that is checked, with its settings, and the checks of every kind: the package, the signature and the
settings. For functions: inputs that stay as they are, and results that can be repeated.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from random import Random
from typing import Any

from rollouts.author_code import message_of, shown
from rollouts.config.convert import toml_value
from rollouts.config.files import Source
from rollouts.config.flags import Flag
from rollouts.config.settings import COMPONENT_KINDS, MULTIPLE, is_secret
from rollouts.data.source import COLUMNS, RowSettings
from rollouts.errors import ConfigError, SignatureError, UserError, counted
from rollouts.plugins.index import HOOKS, KIND_WORDS
from rollouts.plugins.manager import PluginManager
from rollouts.plugins.signature import Signature, bind, converted
from rollouts.runs.components import signed
from rollouts.training.algorithms.algorithm import Algorithm, active_terms, bind_algorithm
from rollouts.training.algorithms.kl import make_kl
from rollouts_check.environments.definition import at_setting, check_import, import_in
from rollouts_check.environments.traces import random_calls
from rollouts_check.finding import find_ref, load
from rollouts_check.packages import Found
from rollouts_check.report import Attempt, FailedError, UntestedError, at, trying

WITH_TORCH = frozenset(
    "advantages corrections kl losses mixers optimizers pairings references selectors shapings training".split()
)
"""The kinds that are only used where torch is installed."""


def imports(subject: Subject) -> str:
    """The import is fast and opens no connection. If the kind needs no torch, the import does not load it.

    Advice: import it inside the function that needs it: this kind may be used where it is not installed
    """
    return check_import(subject.found, first=["torch"] if subject.kind in WITH_TORCH else [])


def wheel(subject: Subject) -> str:
    """The package builds, installs into a new virtual environment, and can be imported there."""
    package = subject.found.its_package()
    installed = package.installed()
    name = package.qualified(subject.found.label)
    installed.check_module(import_in([str(installed.python), "-P"], subject.kind, name)["file"])
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
        where = at_setting(subject.component, name)
        tried = f"write the setting {name} to a TOML file, as a run does, and read it back"
        change = f"give the setting {name} a type hint and a default that TOML can hold"
        try:
            read = tomllib.loads(f"x = {toml_value(value)}")["x"]
            known = {**subject.settings, name: read}
            back = converted(subject.signature, known, subject.found.label, Source(), ())[name]
        except (TypeError, ConfigError) as error:
            raise FailedError(tried, f"{message_of(error)}{where}", change) from error
        if back != (list(value) if isinstance(value, tuple) and isinstance(back, list) else value):
            raise FailedError(tried, f"it was {shown(value)} and is {shown(back)} afterwards{where}", change)
    return counted(len(subject.settings), "setting")


# --- functions --------------------------------------------------------------------------------------------------------


def unchanged(subject: Subject) -> None:
    """A call changes none of its inputs: other functions get the same objects."""
    for function in subject.functions:
        names = list(inspect.signature(function).parameters)
        inputs: list[tuple[str, Any, str]] = []  # the name of each input, the object, and what it was

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            inputs.extend((name, value, snapshot(value)) for name, value in zip(names, args, strict=False))  # noqa: B023
            return function(*args, **kwargs)  # noqa: B023

        subject.try_out(call)
        for name, value, before in inputs:
            change = f"change a copy of {name}: methods of tensors whose names end in _ change them in place"
            attempt = Attempt(f"compare {name} before and after a call", function, change=change)
            attempt.require((now := snapshot(value)) == before, _difference(before, now))


def _difference(one: str, other: str) -> str:
    """Both texts from a little before their first difference."""
    place = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    first = max(0, place - 20)
    texts = [f"{'...' if first else ''}{text[first : first + 60]}" for text in (one, other)]
    return f"it was {texts[0]}, then {texts[1]}"


def repeatable(subject: Subject) -> None:
    """The same inputs give the same result, and no global random generator is used.

    Advice: compute the result from the inputs alone: keep no state, and draw no random numbers
    """
    for function in subject.functions:
        state = _torch_state()
        with random_calls() as calls:
            first, second = (snapshot(subject.try_out(function)) for _ in range(2))
        if first != second:
            raise FailedError("call it twice with the same inputs", f"{_difference(first, second)}{at(function)}")
        if state is not None and _torch_state() != state:
            calls.append("the state of the global generator of torch changed")
        if calls:
            change = "draw from a generator of your own with a fixed seed: a run's seed must give one result"
            raise FailedError("watch the global random generators", "; ".join(calls) + at(function), change)


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


# --- the component that is checked ------------------------------------------------------------------------------------


Function = Callable[..., Any]
WORDS = {**KIND_WORDS, HOOKS: "hook plugin"}
"""The name of one component of each kind."""

KEYS = {kind: key for key, kind in reversed(COMPONENT_KINDS.items())} | {"curricula": "curriculum", "workers": "worker"}
"""The first part of the flags of a kind's settings: `--loss.clip-high`."""

NO_SIGNATURE = Signature((), ())
UNSIGNED = ("commands", HOOKS)
"""The kinds without settings of rollouts."""

Trial = Callable[["Subject", Function], Any]
"""Calls one function of a component with usual inputs, and returns the results."""


@dataclass(eq=False)
class Subject:
    """A component with its settings, and how it is checked.

    `component` is the component as a run uses it: a loss is an Algorithm. `registered` is what its name means. `trial`
    calls it as the checks do that several kinds share. `fault` is the error of its signature, or None; without a valid
    signature it has no settings. `given` are the settings that the user gave, of all components.
    """

    found: Found
    registered: Any
    component: Any
    scratch: Path
    trial: Trial | None = None
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    signature: Signature = NO_SIGNATURE
    fault: SignatureError | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    kept: dict[Any, Any] = field(default_factory=dict)  # what a check computes for others

    @property
    def kind(self) -> str:
        """The kind: `losses`, `hooks`, ..."""
        return self.found.kind

    @property
    def word(self) -> str:
        """The name of one component of this kind."""
        return WORDS[self.kind]

    @property
    def functions(self) -> list[Function]:
        """The functions that a run calls, with their settings: one, or each term of a loss."""
        if isinstance(self.component, Algorithm):
            return [term.function for term in active_terms(bind_algorithm(self.component, self.settings))]
        if self.kind == "kl":
            return [make_kl(self.component, self.settings).function]
        return [bind(self.component, self.settings)]

    @property
    def function(self) -> Function:
        """The only function, or the first term of a loss."""
        return self.functions[0]

    def random(self, purpose: str = "") -> Random:
        """Random numbers that depend on `--seed` and the purpose alone."""
        return Random(f"{self.seed}/{purpose}")

    def attempt(self, tried: str, change: str = "") -> Attempt:
        """What a check tries. Its failures have the line where the component is defined."""
        return Attempt(tried, self.component, change=change)

    def trying(self, tried: str, change: str = "") -> contextlib.AbstractContextManager[Attempt]:
        """Run the component's code: see `report.trying`."""
        return trying(tried, self.component, change=change)

    def skipped(self, reason: str, enable: str = "do what the reason says") -> UntestedError:
        """The error that skips a check which cannot run here. If several checks are skipped for one reason, only the
        first one says it.
        """
        is_known = reason in self.kept.setdefault("reasons", [])
        self.kept["reasons"].append(reason)
        return UntestedError("for the same reason" if is_known else reason, enable)

    @contextlib.contextmanager
    def making(self, tried: str = "make it") -> Iterator[None]:
        """Make the component. If a setting, a library or an account is missing, the check is skipped."""
        try:
            with trying(tried):
                yield
        except FailedError as error:
            if isinstance(error.__cause__, UserError):
                reason = " ".join(message_of(error.__cause__).split())
                raise self.skipped(f"it cannot be made with these settings: {reason}") from error
            raise

    def try_out(self, function: Function) -> Any:
        """What a function returns for usual inputs."""
        assert self.trial is not None, f"the table has no trial for {self.kind}"
        return self.trial(self, function)


def make_subject(
    found: Found,
    given: Mapping[str, Any],
    scratch: Path,
    trial: Trial | None = None,
    component: Any = None,
    seed: int = 0,
) -> Subject:
    """Import the component, and read its settings out of the table of its kind: `{"loss": {"clip_high": 0.3}}`.

    `component` is the object, if it is given and not found. Raises UserError if it cannot be imported, or if a setting
    is wrong.
    """
    found.use_path()
    if component is None:
        manager = PluginManager()
        component = load(manager, find_ref(manager, found.kind, found.name))
    subject = Subject(found, component, component, scratch, trial, seed, given=given)
    if found.kind in UNSIGNED:
        return subject
    label = f"{subject.word} {found.label}"
    try:
        subject.component, subject.signature = signed(component, found.kind, label)
    except SignatureError as error:
        subject.fault = error
        return subject
    key, alias = KEYS[found.kind], alias_of(found.label)
    own: Any = given.get(key, {})
    path: tuple[str, ...] = (key,)
    if key in MULTIPLE and isinstance(own, Mapping) and isinstance(own.get(alias), Mapping):
        own, path = own[alias], (key, alias)  # a run names one of several by its alias
    own = dict(own) if isinstance(own, Mapping) else {}
    source = own.pop("source", "") if found.kind == "datasets" else ""
    subject.settings = converted(subject.signature, own, label, Source(), path)
    if found.kind == "datasets":  # `source` is what a loader reads; columns are renamed as those of all data
        subject.kept["source"] = source.text if isinstance(source, Flag) else str(source)
        subject.kept["columns"] = {name: subject.settings[name] for name in COLUMNS if subject.settings[name]}
        common = {each.name for each in fields(RowSettings)}
        subject.settings = {name: value for name, value in subject.settings.items() if name not in common}
    return subject


def alias_of(label: str) -> str:
    """The name that a run gives one of several components: the last part of `pack/name` and of `./file.py:name`."""
    return re.split("[:/]", label)[-1]
