"""Why rollouts of a run failed, were cut off or were not trained: each cause once, with an example to open."""

from __future__ import annotations

import time
from typing import Any

from rollouts.view.catalog import Catalog
from rollouts.view.table import Table

FILES_MAX = 20
SECONDS = 1.0  # for all files together
CAUSES_MAX = 50
ERROR_CHARACTERS = 160


def causes(catalog: Catalog, run: str) -> dict[str, Any]:
    """The causes in the newest files of a run, the most frequent first. `rollouts` counts all rollouts that were read.
    Raises UserError.
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
            for key in _causes_of(table, row):
                cause = found.setdefault(key, {"what": key[0], "why": key[1], "count": 0, "file": name})
                cause["count"] += 1
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
