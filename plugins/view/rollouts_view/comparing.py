"""What differs between runs: their settings, which of them have the same held-out tasks, and which tasks each solved,
with the lines to read.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rollouts.errors import ConfigError, UserError, first_line
from rollouts.reducers import Reducer, stderr
from rollouts.runs.comparing import RunEvaluation, evaluations_of, paired_difference
from rollouts.runs.folder import read_config

if TYPE_CHECKING:
    from rollouts_view.catalog import Catalog

TASKS_MAX = 1000
WAIT_SECONDS = 20.0
_OWN_TO_A_RUN = ("out",)


def differing_settings(folders: Sequence[Path]) -> dict[str, list[Any]]:
    """The settings that are not the same in all runs, each with its value in every run; None where a run has no such
    setting. The names are those of flags, such as `env.digits`. Raises ConfigError.

    Modes have different settings. So if the modes differ, a setting counts only if runs that have it differ in it.
    """
    flat = [dict(_flat(read_config(folder)[0])) for folder in folders]
    is_one_mode = len({settings.get("mode") for settings in flat}) == 1
    names = dict.fromkeys(name for settings in flat for name in settings if name not in _OWN_TO_A_RUN)
    found = {}
    for name in names:
        row = [settings.get(name) for settings in flat]
        compared = row if is_one_mode else [value for value in row if value is not None]
        if any(value != compared[0] for value in compared):
            found[name] = row
    return found


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The settings in nested tables, by dotted names. The name of a component is the setting of its kind."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            is_component = key == "name" and name
            yield from _flat(inner, name if is_component else f"{name}.{key}" if name else key)
    elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        for index, each in enumerate(value):
            yield from _flat(each, f"{name}[{index}]")
    else:
        yield name.replace("_", "-"), value


def reduced_evaluations(
    evaluations: Sequence[RunEvaluation], rewards: Mapping[str, float], reducer: Reducer
) -> list[RunEvaluation]:
    """A run's evaluations, the last one with the mean of these rewards of its tasks, which `reducer` has reduced."""
    if not evaluations or not rewards:
        return list(evaluations)
    values = list(rewards.values())
    last = evaluations[-1]._replace(reward=statistics.fmean(values), stderr=stderr(values), reduce=reducer.how)
    return [*evaluations[:-1], last]


def opponents_of(rewards: Sequence[Mapping[str, float]]) -> list[int | None]:
    """For each run, by its rewards of tasks: the first other run that was judged on two or more of the same tasks. So
    evaluations of several environments are compared within each of them. None for a run that is the first one of its
    tasks, or the only one.

    >>> opponents_of([{"a": 1, "b": 0}, {"c": 1, "d": 1}, {"a": 0, "b": 0}, {"c": 0, "d": 1}, {}])
    [None, None, 0, 1, None]
    """
    found: list[int | None] = []
    for place, own in enumerate(rewards):
        earlier = range(place)
        found.append(next((each for each in earlier if len(own.keys() & rewards[each].keys()) >= 2), None))
    return found


class _Task(NamedTuple):
    """A task in one run: its name, its mean reward, and the line of one of its rollouts."""

    name: str
    reward: float
    line: int


def compare(catalog: Catalog, runs: list[str]) -> dict[str, Any]:
    """What differs between runs, and each of them against the first one, task by task. Raises UserError."""
    folders = [catalog.folder(run) for run in runs]
    notes = []
    try:
        settings = differing_settings(folders)
    except ConfigError as error:
        settings, notes = {}, [first_line(error)]
    files = [_last_evaluation(catalog, run) for run in runs]
    first, *rest = (_tasks(catalog, run, file) if file else {} for run, file in zip(runs, files, strict=True))
    others = []
    for run, file, own in zip(runs[1:], files[1:], rest, strict=True):
        pairs = [(first[key], own[key]) for key in first.keys() & own.keys()]
        pairs.sort(key=lambda pair: (pair[1].reward - pair[0].reward, pair[0].name))
        paired = None
        try:
            found = paired_difference(_rewards(first), _rewards(own))
            paired = None if found is None else found.as_json()
        except UserError as error:
            notes = list(dict.fromkeys([*notes, str(error)]))
        shown = pairs if len(pairs) <= TASKS_MAX else pairs[: TASKS_MAX // 2] + pairs[-TASKS_MAX // 2 :]
        sides = [[{"reward": each.reward, "line": each.line} for each in pair] for pair in shown]
        tasks = [
            {"task": one.name, "first": first_side, "second": second_side}
            for (one, _), (first_side, second_side) in zip(shown, sides, strict=True)
        ]
        others.append({"run": run, "file": file, "paired": paired, "tasks": tasks, "total": len(pairs)})
    return {
        "runs": runs,
        "settings": settings,
        "evaluations": [[each._asdict() for each in evaluations_of(folder)] for folder in folders],
        "first": {"run": runs[0], "file": files[0]},
        "others": others,
        "notes": notes,
    }


def _last_evaluation(catalog: Catalog, run: str) -> str:
    names = [each["name"] for each in catalog.files(run) if each["kind"] == "evaluation"]
    return str(names[-1]) if names else ""


def _rewards(tasks: dict[int, _Task]) -> dict[str, float]:
    return {str(key): task.reward for key, task in tasks.items()}


def _tasks(catalog: Catalog, run: str, file: str) -> dict[int, _Task]:
    """The tasks of an evaluation, sampled and not greedy, by their key."""
    table = catalog.table(run, file)
    if not table.wait(WAIT_SECONDS):
        raise UserError(f"{run} {file} is still being read: {table.scanned} of {table.lines.total} lines; try again")
    rewards: defaultdict[int, list[float]] = defaultdict(list)
    first: dict[int, int] = {}
    temperatures = table.numbers.get("temperature")
    for row in range(table.count):
        reward = table.numbers["reward"][row]
        if reward == reward and not (temperatures and temperatures[row] == 0):
            rewards[table.keys[row]].append(reward)
            first.setdefault(table.keys[row], row)
    names = table.texts["task"] if table.count else []
    means = {key: statistics.fmean(each) for key, each in rewards.items()}
    return {key: _Task(names[first[key]], mean, table.line[first[key]]) for key, mean in means.items()}
