"""Schedules: `[[schedule]]` tables of a file, which change parts of the algorithm at a step.

A table holds `step` and keys of SCHEDULED. It is merged over the parts before it, like a file over the defaults: if it
names another component, the earlier settings are dropped; if it names the same one, they are kept. If it names another
algorithm, the settings for the components of the earlier algorithm are dropped. `rollouts.runs` loads the components.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollouts.config.convert import unflagged
from rollouts.config.files import NOWHERE, Source, refused, unknown_key
from rollouts.config.flags import Tree
from rollouts.config.merging import Component, component_tables, components_of, merge
from rollouts.config.settings import MULTIPLE, OWN, OWN_KEYS, SCHEDULED
from rollouts.errors import ConfigError

Path = tuple[str, ...]

_HOW = 'write it in a file, as tables such as\n[[schedule]]\nstep = 50\nloss = "cispo"'


class ScheduledParts(NamedTuple):
    """The components of the keys in SCHEDULED from `step` on.

    `given` holds the keys of its table. `places` holds the path where each key was given last, for error messages.
    """

    step: int
    given: tuple[str, ...]
    components: dict[str, list[Component]]
    places: dict[str, Path]


def check_schedule(value: Any, source: Source = NOWHERE) -> tuple[dict[str, Any], ...]:
    """The tables of a schedule, checked, as plain data.

    Raises ConfigError for a table without a valid step, two tables with the same step, and a key that cannot change.
    """
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(table, dict) for table in value):
        raise refused(("schedule",), value, source, f"expected a list of tables; {_HOW}")
    steps: list[Any] = []
    for number, table in enumerate(value):
        path = (f"schedule[{number}]",)
        for key in (key for key in table if key != "step" and key not in SCHEDULED):
            listing = f"a [[schedule]] table holds: step, {', '.join(SCHEDULED)}"
            problem = "this setting cannot change at a step"
            raise unknown_key((*path, key), table[key], source, problem, ("step", *SCHEDULED), listing)
        step = table.get("step")
        if step is None:
            raise refused(path, table, source, "the table has no step; write `step = 50` into it")
        if isinstance(step, bool) or not isinstance(step, int) or step <= 0:
            wrong = f"expected a whole number, 1 or more; got {step!r}"
            itself = "for step 0, write the settings outside of the schedule"
            raise refused((*path, "step"), step, source, wrong, itself)
        if step in steps:
            twice = f"two tables have step {step}; write their settings into one table"
            raise refused((*path, "step"), step, source, twice)
        steps.append(step)
    return tuple(unflagged(table) for table in value)


def scheduled_parts(
    components: Mapping[str, list[Component]], schedule: Sequence[Mapping[str, Any]], source: Source = NOWHERE
) -> tuple[ScheduledParts, ...]:
    """The parts of the run for step 0 and for each table of the schedule, sorted by step. `components` are those of
    the run's own settings.

    Raises ConfigError for a table with an invalid component.
    """
    own = {key: components[key] for key in SCHEDULED}
    parts = [ScheduledParts(0, SCHEDULED, own, {key: (key,) for key in SCHEDULED})]
    for step, number in sorted((table["step"], number) for number, table in enumerate(schedule)):
        before, place = parts[-1], f"schedule[{number}]"
        given = {key: schedule[number][key] for key in SCHEDULED if key in schedule[number]}
        try:
            merged = _merged(component_tables(before.components), given)
        except ConfigError as error:
            raise refused((place,), None, source, str(error)) from error
        chosen = components_of(merged, SCHEDULED, source, (place,))
        places = before.places | {key: (place, key) for key in given}
        parts.append(ScheduledParts(step, tuple(given), chosen, places))
    return tuple(parts)


def scheduled_table(step: int, given: Sequence[str], components: Mapping[str, list[Component]]) -> dict[str, Any]:
    """A schedule table for these components, with all their settings."""
    tables = component_tables(components)
    return {"step": step, **{key: tables[key] or [] for key in given}}


def _merged(before: Tree, given: Tree) -> Tree:
    """Merge the keys of a table over the parts before it."""
    merged = merge(before, given)
    if merged["loss"].get("name") == before["loss"].get("name"):
        return merged
    return merge(_without_own_settings(before), given)


def _without_own_settings(trees: Tree) -> Tree:
    """The parts without settings for the components of the earlier algorithm."""
    kept: Tree = {}
    for key, table in trees.items():
        if key in OWN_KEYS and not table["name"]:
            kept[key] = {"name": ""}
        elif key in MULTIPLE:
            kept[key] = {alias: {"name": OWN} if each["name"] == OWN else each for alias, each in table.items()}
        else:
            kept[key] = table
    return kept
