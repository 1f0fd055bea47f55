"""The health of a run: where its time goes, what its engine served, and why rollouts failed or were not trained."""

from __future__ import annotations

import re
import time
from typing import Any

from rollouts.errors import ConfigError, UserError
from rollouts.runs.folder import read_config
from rollouts.runs.times import read_times, times_of
from rollouts_view.catalog import Catalog
from rollouts_view.table import Table

FILES_MAX = 20
SECONDS = 1.0  # for all files together
CAUSES_MAX = 50
ERROR_CHARACTERS = 160
EPISODES_MAX = 1000  # of one timeline
SHOWN = ("sync/", "mismatch/", "perf/", "rollout/latency", "rollout/retried", "staleness/", "time/")


def health(catalog: Catalog, run: str) -> dict[str, Any]:
    """The engine with its settings, the machine, the files that have a timeline, and the spread of each metric of
    time, of the engine and of its weights. Raises UserError.
    """
    try:
        settings = read_config(catalog.folder(run))[0]
    except ConfigError:
        settings = {}
    spreads = catalog.spreads(run)
    return {
        "engine": settings.get("inference", {}),
        "training": settings.get("training", {}),
        "hardware": catalog.manifest(run).get("hardware", {}),
        "times": [each["name"] for each in catalog.files(run) if each["times"]],
        "metrics": {name: each._asdict() for name, each in spreads.items() if name.startswith(SHOWN)},
    }


def timeline(catalog: Catalog, run: str, name: str) -> dict[str, Any]:
    """When the phases and the first episodes of a file were, in seconds. Raises UserError."""
    file = times_of(catalog.file(run, name))
    if not file.exists():
        raise UserError(f"{run} has no times of {name}: it was made by an earlier version of rollouts")
    found = read_times(file)
    return {"phases": found.phases, "episodes": found.episodes[:EPISODES_MAX], "total": len(found.episodes)}


def causes(catalog: Catalog, run: str) -> dict[str, Any]:
    """The causes in the newest files of a run, the most frequent first. Causes that differ in numbers alone are one.
    `rollouts` counts all rollouts that were read. Raises UserError.
    """
    names = [each["name"] for each in reversed(catalog.files(run))]
    found: dict[tuple[str, str], dict[str, Any]] = {}
    rollouts, read, until = 0, list[str](), time.monotonic() + SECONDS
    for name in names[:FILES_MAX]:
        table = catalog.table(run, name)
        is_whole = table.wait(max(0.0, until - time.monotonic()))
        rollouts += table.count
        read.append(name)
        for row in range(table.count):
            for what, why in _causes_of(table, row):
                like = re.sub(r"\d+", "…", why)
                cause = found.setdefault((what, like), {"what": what, "why": why, "count": 0, "file": name})
                cause["count"] += 1
                if cause["why"] != why:
                    cause["why"] = like
                cause.setdefault("line", table.line[row])
        if not is_whole:
            break
    ordered = sorted(found.values(), key=lambda each: -each["count"])
    return {"causes": ordered[:CAUSES_MAX], "files": len(read), "of": len(names), "rollouts": rollouts}


def _causes_of(table: Table, row: int) -> list[tuple[str, str]]:
    """What happened to one rollout and why, as (what, why)."""
    values = {name: column[row] for name, column in table.texts.items() if len(column) > row}
    error = (values.get("error") or "").partition("\n")[0][:ERROR_CHARACTERS]
    found = [(values["status"], error)] if values["status"] != "completed" or error else []
    if values.get("dropped"):
        found.append(("not trained", values["dropped"]))
    if table.numbers["reward"][row] != table.numbers["reward"][row] and values["status"] in ("completed", "truncated"):
        found.append(("not judged", (values.get("why") or "").partition("\n")[0][:ERROR_CHARACTERS]))
    return found
