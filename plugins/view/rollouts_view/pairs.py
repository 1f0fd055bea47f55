"""Two runs on the same held-out tasks: which tasks each solved, with the lines to read."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any, NamedTuple

from rollouts.errors import ConfigError, UserError, first_line
from rollouts.runs.comparing import Evaluation, Paired, evaluations_of, paired_difference
from rollouts_view.catalog import Catalog
from rollouts_view.comparing import differing_settings

TASKS_MAX = 1000
WAIT_SECONDS = 20.0


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
    tasks = [_tasks(catalog, run, file) if file else {} for run, file in zip(runs, files, strict=True)]
    others = []
    for run, file, own in zip(runs[1:], files[1:], tasks[1:], strict=True):
        pairs = [(tasks[0][key], own[key]) for key in tasks[0].keys() & own.keys()]
        pairs.sort(key=lambda pair: (pair[1].reward - pair[0].reward, pair[0].name))
        found = None
        try:
            found = paired_difference(_rewards(tasks[0]), _rewards(own))
        except UserError as error:
            notes = list(dict.fromkeys([*notes, str(error)]))
        shown = pairs if len(pairs) <= TASKS_MAX else pairs[: TASKS_MAX // 2] + pairs[-TASKS_MAX // 2 :]
        others.append({"run": run, "file": file, "paired": _words(found), "tasks": _plain(shown), "total": len(pairs)})
    return {
        "runs": runs,
        "settings": settings,
        "evaluations": [[_named(each) for each in evaluations_of(folder)] for folder in folders],
        "first": {"run": runs[0], "file": files[0]},
        "others": others,
        "notes": notes,
    }


def _named(evaluation: Evaluation) -> dict[str, Any]:
    return evaluation._asdict()


def _words(found: Paired | None) -> dict[str, Any] | None:
    return None if found is None else found.as_json()


def _plain(pairs: list[tuple[_Task, _Task]]) -> list[dict[str, Any]]:
    return [{"task": one.name, "first": _side(one), "second": _side(other)} for one, other in pairs]


def _side(task: _Task) -> dict[str, Any]:
    return {"reward": task.reward, "line": task.line}


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
    return {
        key: _Task(names[first[key]], statistics.fmean(each), table.line[first[key]]) for key, each in rewards.items()
    }
