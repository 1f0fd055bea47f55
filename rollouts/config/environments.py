"""The key `env`: one environment, or several with aliases and weights. `[[env]]` tables, `--env easy=calculator:2`.

One alone is a table with `name` and its settings, and has no alias; several are tables by alias. Which of the two a
table is can be seen: in the second there is no `name`, but in the tables inside it. Left out: everything that lists of
components have in common (`merging`), and what a weight means (`rollouts.compose.environments`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from rollouts.config.convert import plain
from rollouts.config.files import NOWHERE, Source, where
from rollouts.config.flags import Tree, flag_name
from rollouts.errors import ConfigError

__all__ = ["EnvWeight", "check_weights", "env_weight", "holds_several", "of_which", "written_weight"]

EnvWeight = float | dict[str, Any] | list[list[float]]
"""A number; a curriculum: its table with `name`; or the points (step, weight) that it goes through."""


def holds_several(table: Tree) -> bool:
    """Whether this is a table of environments by alias, not the settings of one.

    >>> holds_several({"easy": {"name": "calculator"}}), holds_several({"name": "calculator", "digits": 3})
    (True, False)
    """
    return "name" not in table and any(isinstance(inner, dict) and "name" in inner for inner in table.values())


def of_which(name: str, value: Any, aliases: Sequence[str], source: Source = NOWHERE) -> ConfigError:
    """The error for a setting that does not say which of several environments it is for."""
    return ConfigError(
        f"{where(('env', name), value, source)}: there are several environments, and this does not say for which of "
        f"them it is\ntype: {' or '.join(flag_name(('env', alias, name)) for alias in aliases)}"
    )


def env_weight(value: Any, path: Sequence[str], source: Source) -> EnvWeight:
    """The weight of one of several environments, checked as far as it can be without importing anything."""
    given = plain(value)
    place = where(path, value, source)
    if isinstance(given, str):
        given = {"name": given}
    if isinstance(given, dict) and isinstance(given.get("name"), str):
        return given
    if isinstance(given, list):
        if len(given) < 2 or not all(isinstance(each, list | tuple) and len(each) == 2 for each in given):
            raise ConfigError(
                f"{place}: a weight that changes goes through two points (step, weight) or more, such as "
                f"[[0, 0.0], [100, 1.0]]; got {given!r}"
            )
        points = [[_number(step, place), _number(weight, place)] for step, weight in given]
        if any(after[0] <= before[0] for before, after in itertools.pairwise(points)):
            raise ConfigError(f"{place}: the steps of the points must rise; got {[each[0] for each in points]}")
        return points
    return float(_number(given, place))


def _number(value: Any, place: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if is_number and value >= 0:
        number: float = value
        return number
    raise ConfigError(
        f"{place}: the weight of an environment is a number that is 0 or more, points such as [[0, 0.0], [100, 1.0]], "
        f"or the name of a curriculum, such as ./curriculum.py:harder; got {value!r}"
    )


def check_weights(weights: dict[str, EnvWeight], source: Source, place: Sequence[str] = ()) -> None:
    """Raise ConfigError where nothing could ever be drawn: all weights are the number 0."""
    if all(weight == 0 for weight in weights.values()):
        raise ConfigError(
            f"{where((*place, 'env'), None, source)}: the weights of {' and '.join(weights)} sum to 0, so no "
            f"task could be drawn\ntype: {flag_name(('env', next(iter(weights)), 'weight'))} 1"
        )


def written_weight(weight: EnvWeight) -> Any:
    """The weight as a file holds it: a curriculum without settings is its name alone."""
    return weight["name"] if isinstance(weight, dict) and len(weight) == 1 else weight
