"""The component that is checked, with its settings; what the checks of several kinds share."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from rollouts.author_code import authors_code, message_of, place_of, place_of_function
from rollouts.config.files import Source
from rollouts.config.flags import Flag
from rollouts.config.settings import COMPONENT_KINDS, MULTIPLE
from rollouts.data.source import COLUMNS, RowSettings
from rollouts.errors import RolloutsError, SignatureError, leaves_of, words_of
from rollouts.plugins.index import HOOKS, KIND_WORDS
from rollouts.plugins.manager import PluginManager
from rollouts.plugins.signature import Signature, bind, converted
from rollouts.runs.components import signed
from rollouts.training.algorithms.algorithm import Algorithm, active_terms, bind_algorithm
from rollouts.training.algorithms.kl import make_kl
from rollouts_check.finding import find_ref, load
from rollouts_check.packages import Found
from rollouts_check.report import FailedError, SkippedError, UntestedError
from rollouts_check.runner import Check

Function = Callable[..., Any]
WORDS = {**KIND_WORDS, HOOKS: "hook plugin"}
"""The name of one component of each kind."""

KEYS = {kind: key for key, kind in reversed(COMPONENT_KINDS.items())} | {"curricula": "curriculum", "workers": "worker"}
"""The first part of the flags of a kind's settings: `--loss.clip-high`."""

NO_SIGNATURE = Signature((), ())

DATASETS = "datasets"
UNSIGNED = ("commands", HOOKS)
"""The kinds without settings of rollouts."""


Trial = Callable[["Subject", Function], Any]
"""Calls one function of a component with usual inputs, and returns the results."""


class Family(NamedTuple):
    """The checks of a kind. `trial` is for the checks that several kinds of functions share."""

    checks: tuple[Check, ...]
    trial: Trial | None = None


@dataclass(eq=False)
class Subject:
    """A component with its settings, and how it is checked.

    `component` is the component as a run uses it: a loss is an Algorithm. `registered` is what its name means. `fault`
    is the error of its signature, or None; without a valid signature it has no settings. `given` are the settings that
    the user gave, of all components. `families` has the tables of all kinds.
    """

    found: Found
    registered: Any
    component: Any
    scratch: Path
    families: Mapping[str, Family] = field(default_factory=dict)
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    signature: Signature = NO_SIGNATURE
    fault: SignatureError | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)  # what a check computes for others

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
            bound = bind_algorithm(self.component, self.settings)
            return [term.function for term in active_terms(bound)]
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

    def skipped(self, reason: str, enable: str = "do what the reason says") -> UntestedError:
        """The error that skips a check which cannot run here. If several checks are skipped for one reason, only the
        first one says it.
        """
        is_known = reason in self.kept.setdefault("reasons", [])
        self.kept["reasons"].append(reason)
        return UntestedError("for the same reason" if is_known else reason, enable)

    def try_out(self, function: Function) -> Any:
        """What a function returns for usual inputs."""
        trial = self.families[self.kind].trial
        assert trial is not None, f"the table has no trial for {self.kind}"
        return trial(self, function)


def make_subject(
    found: Found,
    given: Mapping[str, Any],
    scratch: Path,
    *,
    families: Mapping[str, Family],
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
    subject = Subject(found, component, component, scratch, families, seed, given=given)
    if found.kind in UNSIGNED:
        return subject
    label = f"{subject.word} {found.label}"
    try:
        subject.component, subject.signature = signed(component, found.kind, label)
    except SignatureError as error:
        subject.fault = error
        return subject
    key = KEYS[found.kind]
    own: Any = given.get(key, {})
    path: tuple[str, ...] = (key,)
    alias = alias_of(found.label)
    if key in MULTIPLE and isinstance(own, Mapping) and isinstance(own.get(alias), Mapping):
        own, path = own[alias], (key, alias)  # a run names one of several by its alias
    own = own if isinstance(own, Mapping) else {}
    if found.kind == DATASETS:
        return _of_loader(subject, own, label)
    subject.settings = converted(subject.signature, own, label, Source(), path)
    return subject


def _of_loader(subject: Subject, given: Mapping[str, Any], label: str) -> Subject:
    """The subject of a dataset loader: `source` is what it reads, and columns are renamed as those of all data."""
    own = {key: value for key, value in given.items() if key != "source"}
    settings = converted(subject.signature, own, label, Source(), ("data",))
    common = {each.name for each in fields(RowSettings)}
    subject.settings = {name: value for name, value in settings.items() if name not in common}
    source = given.get("source", "")
    subject.kept["source"] = source.text if isinstance(source, Flag) else str(source)
    subject.kept["columns"] = {column: settings[column] for column in COLUMNS if settings[column]}
    return subject


def alias_of(label: str) -> str:
    """The name that a run gives one of several components: the last part of `pack/name` and of `./file.py:name`."""
    return re.split("[:/]", label)[-1]


def at(function: Any) -> str:
    """The line of a function's definition in parentheses; empty if it is unknown."""
    place = None if function is None else place_of_function(function)
    return f" ({place})" if place else ""


@contextlib.contextmanager
def trying(tried: str, change: str = "correct the line that raised the error", function: Any = None) -> Iterator[None]:
    """Run an author's code. An error of it becomes a FailedError that says what was tried. If the error has no line of
    a file, it gets that of `function`.
    """
    try:
        with authors_code():
            yield
    except (FailedError, SkippedError):
        raise
    except Exception as error:  # the author's code may raise anything
        leaf = next(leaves_of(error))
        if not isinstance(leaf, RolloutsError) and place_of(leaf) is None:
            raise  # a mistake of the check
        seen = message_of(leaf) if isinstance(leaf, RolloutsError) else words_of(error)
        raise FailedError(tried, seen if ", line " in seen else f"{seen}{at(function)}", change) from error
