"""The schedule: which parts of the algorithm change at which step. `[[schedule]]` tables of a file.

A table holds `step` and keys of SCHEDULED. It is merged over what is in force before it, by the rules that a file
follows over the defaults: naming another component drops the old settings, naming the same one keeps them. Settings of
the algorithm's own parts are dropped with their algorithm. Left out: what the names mean (rollouts.runs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollouts.config.convert import plain
from rollouts.config.files import NOWHERE, Source, refusal, unknown_key
from rollouts.config.flags import Tree
from rollouts.config.merging import Component, component_tables, components_of, merge
from rollouts.config.settings import MULTIPLE, OWN, OWN_KEYS, SCHEDULED
from rollouts.errors import ConfigError

Path = tuple[str, ...]

_HOW = 'a schedule is in a file, as tables such as\n[[schedule]]\nstep = 50\nloss = "cispo"'


class ScheduledParts(NamedTuple):
    """What is in force from `step` on: the components of the keys in SCHEDULED.

    `given` are the keys that its table names; `places` says where each key was given last, for messages.
    """

    step: int
    given: tuple[str, ...]
    components: dict[str, list[Component]]
    places: dict[str, Path]


def check_schedule(value: Any, source: Source = NOWHERE) -> tuple[dict[str, Any], ...]:
    """The tables of a schedule as plain data: each with its step, and nothing in it that cannot change.

    Raises ConfigError, with the line where there is a file.
    """
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(table, dict) for table in value):
        raise refusal(("schedule",), value, source, f"expected a list of tables; {_HOW}")
    steps: list[Any] = []
    for number, table in enumerate(value):
        path = (f"schedule[{number}]",)
        for key in (key for key in table if key != "step" and key not in SCHEDULED):
            listing = f"a [[schedule]] table holds: step, {', '.join(SCHEDULED)}"
            problem = "this cannot change at a step"
            raise unknown_key((*path, key), table[key], source, problem, ("step", *SCHEDULED), listing)
        step = table.get("step")
        if step is None:
            raise refusal(path, table, source, "it says no step; write `step = 50` into it")
        if isinstance(step, bool) or not isinstance(step, int) or step <= 0:
            wrong = f"expected a whole number, 1 or more; got {step!r}"
            itself = "what is in force from the beginning is in the settings themselves"
            raise refusal((*path, "step"), step, source, wrong, itself)
        if step in steps:
            twice = f"two tables begin at step {step}; write what changes there into one of them"
            raise refusal((*path, "step"), step, source, twice)
        steps.append(step)
    return tuple(plain(table) for table in value)


def scheduled_parts(
    components: Mapping[str, list[Component]], schedule: Sequence[Mapping[str, Any]], source: Source = NOWHERE
) -> tuple[ScheduledParts, ...]:
    """The run's own `components` (step 0) and what each table of the schedule makes of them, sorted by step.

    Raises ConfigError where a table names what cannot be a component.
    """
    own = {key: components[key] for key in SCHEDULED}
    parts = [ScheduledParts(0, SCHEDULED, own, {key: (key,) for key in SCHEDULED})]
    for step, number in sorted((table["step"], number) for number, table in enumerate(schedule)):
        before, place = parts[-1], f"schedule[{number}]"
        given = {key: schedule[number][key] for key in SCHEDULED if key in schedule[number]}
        try:
            merged = _merged(component_tables(before.components), given)
        except ConfigError as error:
            raise refusal((place,), None, source, str(error)) from error
        chosen = components_of(merged, SCHEDULED, source, (place,))
        places = before.places | {key: (place, key) for key in given}
        parts.append(ScheduledParts(step, tuple(given), chosen, places))
    return tuple(parts)


def scheduled_table(step: int, given: Sequence[str], components: Mapping[str, list[Component]]) -> dict[str, Any]:
    """The table of a schedule that says the same, with every setting of what it names written down."""
    tables = component_tables(components)
    return {"step": step, **{key: tables[key] or [] for key in given}}


def _merged(before: Tree, given: Tree) -> Tree:
    """What is given over what was in force."""
    merged = merge(before, given)
    if merged["loss"].get("name") == before["loss"].get("name"):
        return merged
    return merge(_without_own_settings(before), given)


def _without_own_settings(trees: Tree) -> Tree:
    """Without the settings of the parts that belong to an algorithm: it is no longer in force."""
    kept: Tree = {}
    for key, table in trees.items():
        if key in OWN_KEYS and not table["name"]:
            kept[key] = {"name": ""}
        elif key in MULTIPLE:
            kept[key] = {alias: {"name": OWN} if each["name"] == OWN else each for alias, each in table.items()}
        else:
            kept[key] = table
    return kept
