"""Upstream's data sets: their names, their configs, and their entries by seed and index.

Generating an entry needs nothing but the data set, its config, the seed and the index. Some data sets use Python's or
numpy's global generator for it. So entries are generated one at a time, and the global generators are seeded for each
and put back.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import inspect
import json
import os
import random
import threading
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from rollouts.errors import ConfigError, in_lines, suggestion

HASHED = {"codeio", "isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
"""Data sets whose entries depend on the order of a set of texts, so on Python's hash seed."""

ORACLES = {"graph_color": "possible_answer", "propositional_logic": "example_answer"}
ORACLES |= {"rubiks_cube": "example_correct_answer"}
"""Data sets whose entries have no `answer`, but have one in this place of their metadata."""

UNSOLVED = {"boxnet", "rush_hour"}
"""Data sets that have no answer of their own, so no demonstrations."""

OWN_SETTINGS = {"seed": "--env.seed", "size": "--env.size"}


def factory() -> Any:
    """Upstream's module with the registry of data sets, after all of them have registered."""
    importlib.import_module("reasoning_gym.composite")
    return importlib.import_module("reasoning_gym.factory")


def data_set_names() -> list[str]:
    """The names of all data sets, sorted."""
    return sorted(factory().DATASETS)


def about(name: str) -> str:
    """What upstream's docstring says about a data set, in one line."""
    data_set_class, _ = factory().DATASETS[name]
    said = inspect.cleandoc(data_set_class.__doc__ or "").partition("\n\n")[0]
    return " ".join(said.split()).rstrip(".") or name


def abouts() -> dict[str, str]:
    """The names of all data sets, with what they are."""
    return {name: about(name) for name in data_set_names()}


def config_of(name: str, given: Mapping[str, Any], level: int | None, place: str = "--env.config") -> Any:
    """Upstream's config of a data set, checked. Raises ConfigError."""
    _, config_class = factory().DATASETS[name]
    hints = typing.get_type_hints(config_class)
    fields = {field.name: field for field in dataclasses.fields(config_class) if field.name not in OWN_SETTINGS}
    values = {key: _checked(key, value, fields, hints, f"{place}.{key}", name) for key, value in given.items()}
    _check_parts(values.get("datasets", []) if name == "composite" else [], place)
    try:
        config = config_class(**values) if level is None else _at_level(name, level, values)
        if hasattr(config, "validate"):
            config.validate()
    except (AssertionError, TypeError, ValueError) as exc:
        raise ConfigError(f"reasoning_gym/{name} refuses its config {dict(given)}: {exc}") from exc
    return config


def _checked(key: str, value: Any, fields: Mapping[str, Any], hints: Mapping[str, Any], place: str, name: str) -> Any:
    """One value of a config as the type that the field's hint says. A hint that excludes the default is ignored."""
    if key in OWN_SETTINGS:
        raise ConfigError(f"{place} {value!r}: type {OWN_SETTINGS[key]} {value!r}")
    if key not in fields:
        known = f"fields of reasoning_gym/{name}: {', '.join(fields)}"
        raise ConfigError(in_lines(f"there is no setting {place}", suggestion(key, fields), known))
    field = fields[key]
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    with contextlib.suppress(msgspec.ValidationError):
        if default is not None:
            msgspec.convert(json.loads(msgspec.json.encode(default)), hints[key])
        try:
            return msgspec.convert(value, hints[key])
        except msgspec.ValidationError as exc:
            raise ConfigError(f"{place} {value!r}: {exc}; the default is {default!r}") from exc
    return value


def _check_parts(parts: list[Any], place: str) -> None:
    """Check the data sets of a `composite`."""
    known = data_set_names()
    for number, part in enumerate(parts):
        if part.name not in known or part.name == "composite":
            where = f"{place}.datasets[{number}].name {part.name!r}: expected the name of a data set"
            raise ConfigError(in_lines(where, suggestion(part.name, known)))
        config_of(part.name, part.config, None, f"{place}.datasets[{number}].config")


def _at_level(name: str, level: int, values: Mapping[str, Any]) -> Any:
    """The config of one level of the data set's curriculum, with these values instead of those of the level."""
    if not factory().has_curriculum(name):
        raise ConfigError(f"--env.level {level}: reasoning_gym/{name} has no curriculum; leave the setting out")
    if level < 0:
        raise ConfigError(f"--env.level {level}: expected 0 or more")
    curriculum = factory().create_curriculum(name)
    curriculum.set_global_level(level)
    return dataclasses.replace(curriculum.generate_configuration(), **values)


def check_hash_seed(name: str, config: Any) -> None:
    """Raise ConfigError if one seed would not give the same entries in every process."""
    parts = [part.name for part in config.datasets] if name == "composite" else [name]
    hashed = sorted(HASHED.intersection(parts))
    if hashed and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise ConfigError(
            f"reasoning_gym/{hashed[0]}: its entries depend on Python's hash seed, so without one a seed gives other "
            "tasks in each process\ntype PYTHONHASHSEED=0 before the command"
        )


def oracle_of(entry: Mapping[str, Any]) -> str | None:
    """Upstream's own answer of an entry; None if it has none."""
    answer = entry["answer"]
    if answer is None:
        answer = entry["metadata"].get(ORACLES.get(entry["metadata"]["source_dataset"], ""))
    return answer if answer is None or isinstance(answer, str) else json.dumps(answer)


class Entries:
    """The entries of a data set by seed and index. Threads may share it."""

    def __init__(self, name: str, config: Any, size: int) -> None:
        self._name, self._config, self._size = name, config, size
        self._lock = threading.Lock()
        self._data_set = functools.lru_cache(maxsize=8)(self._create)
        self._generated = functools.lru_cache(maxsize=512)(self._generate)

    def data_set(self, seed: int) -> Any:
        """Upstream's data set of this seed."""
        with self._lock:
            return self._data_set(seed)

    def entry(self, seed: int, index: int) -> dict[str, Any]:
        """A copy of an entry."""
        with self._lock:
            return copy.deepcopy(self._generated(seed, index))

    def _create(self, seed: int) -> Any:
        data_set_class, _ = factory().DATASETS[self._name]
        return data_set_class(config=dataclasses.replace(self._config, seed=seed, size=self._size))

    def _generate(self, seed: int, index: int) -> dict[str, Any]:
        data_set = self._data_set(seed)
        with _seeded(seed + index):
            entry: dict[str, Any] = data_set[index]
        return entry


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global generator of Python, and put it back, and that of numpy, which upstream seeds itself."""
    import numpy

    state, numpy_state = random.getstate(), numpy.random.get_state()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
        numpy.random.set_state(numpy_state)
