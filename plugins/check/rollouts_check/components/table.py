"""The checks of each kind, in their order. `environments` has a table of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollouts.plugins.index import HOOKS
from rollouts_check.components import (
    datasets,
    engines,
    filters,
    groups,
    loggers,
    parts,
    programs,
    rewards,
    samplers,
    sandboxes,
    tokens,
    tools,
    trainers,
    updates,
    weights,
    workers,
)
from rollouts_check.components.common import definition, imports, repeatable, settings, unchanged, wheel
from rollouts_check.components.subject import Family, Trial
from rollouts_check.environments import table as environments
from rollouts_check.report import Passed
from rollouts_check.runner import Check

PACKAGED = (Check(imports), Check(wheel, ("imports",)))
"""The checks of every kind."""

SIGNED = (Check(definition), Check(settings, ("definition",)))
"""The checks of every kind with settings: all but commands and hook plugins."""

CALLED = (unchanged, repeatable)
"""The checks of most kinds of functions: after the first one of the kind, and before the others, which need them."""

Function = Callable[[Any], str | Passed]

ALSO_NEEDS: dict[Function, tuple[str, ...]] = {groups.better: ("order",)}
"""Further checks that a check needs: the results of rollouts whose order matters cannot be compared."""


def _family(first: Function, *others: Function, then: tuple[Function, ...] = (), trial: Trial | None = None) -> Family:
    """A family whose checks need the first one, which says whether the component works at all, and those of `then`."""
    check = Check(first, ("definition",))
    early = [Check(each, ("definition", check.name)) for each in then]
    needs = ("definition", check.name, *(each.name for each in early))
    later = (Check(each, (*needs, *ALSO_NEEDS.get(each, ()))) for each in others)
    return Family((*PACKAGED, *SIGNED, check, *early, *later), trial)


def _function(trial: Trial, first: Function, *others: Function) -> Family:
    return _family(first, *others, then=CALLED, trial=trial)


def _unsigned(first: Function, *others: Function) -> Family:
    """A family of components without settings."""
    check = Check(first)
    return Family((*PACKAGED, check, *(Check(each, (check.name,)) for each in others)))


_OF_TOKENS = (tokens.masked, tokens.rows, tokens.finite)
_OF_GROUPS = (groups.values, groups.one_rollout, groups.equal_rewards, groups.finite, groups.order)
_COMPARED = _function(groups.trial, *_OF_GROUPS, groups.better)

FAMILIES: dict[str, Family] = {
    "rewards": _function(rewards.trial, rewards.values, rewards.any_reply),
    "filters": _function(filters.trial, filters.values, filters.any_group, filters.order),
    "losses": _function(tokens.trial, tokens.values, tokens.gradient, *_OF_TOKENS, parts.parts),
    "kl": _function(tokens.trial, tokens.values, tokens.gradient, *_OF_TOKENS, tokens.equal),
    "corrections": _function(tokens.trial, tokens.values, *_OF_TOKENS, tokens.agreement),
    "advantages": _function(groups.trial, *_OF_GROUPS, groups.better, groups.masked),
    "mixers": _COMPARED,
    "shapings": _COMPARED,
    "selectors": _function(groups.trial, *_OF_GROUPS),
    "pairings": _COMPARED,
    "aggregations": _function(weights.trial, weights.values, weights.masked, weights.nothing_live, weights.order),
    "curricula": _family(samplers.values, then=(repeatable,), trial=samplers.curriculum_trial),
    "datasets": _family(
        datasets.rows, datasets.usable, datasets.streaming, datasets.no_source, then=(repeatable,), trial=datasets.trial
    ),
    "samplers": _family(
        samplers.chooses,
        samplers.any_outcome,
        samplers.restored,
        samplers.other_tasks,
        then=(repeatable,),
        trial=samplers.trial,
    ),
    "references": _family(
        updates.updates,
        updates.policy_unchanged,
        updates.precisions,
        then=(repeatable,),
        trial=updates.reference_trial,
    ),
    "optimizers": _family(
        updates.steps,
        updates.descends,
        updates.learning_rates,
        updates.gradients,
        updates.restored,
        then=(repeatable,),
        trial=updates.optimizer_trial,
    ),
    "loggers": _family(
        loggers.opens,
        loggers.any_metric,
        loggers.metrics_unchanged,
        loggers.samples,
        loggers.quick,
        loggers.closes,
        loggers.resumed,
        then=(loggers.logs,),
    ),
    "tools": _family(
        tools.tool_definition, tools.tool_schemas, tools.tool_results, tools.tool_arguments, tools.event_loop
    ),
    "tool_parsers": _family(
        tools.plain_text, tools.any_text, tools.quick, then=(tools.round_trip, *CALLED), trial=tools.parser_trial
    ),
    "sandboxes": _family(
        sandboxes.protocol,
        sandboxes.commands,
        sandboxes.files,
        sandboxes.outside,
        sandboxes.apart,
        sandboxes.late,
        sandboxes.limits,
        sandboxes.closed,
        sandboxes.time_to_live,
    ),
    "inference": _family(engines.protocol, engines.scores, engines.sessions, then=(engines.absent, engines.replies)),
    "training": _family(
        trainers.protocol,
        trainers.forward,
        trainers.step,
        trainers.nothing_live,
        trainers.weights,
        trainers.checkpoint,
        trainers.closes,
    ),
    "workers": _family(workers.connects, workers.leaves_nothing, workers.plays),
    "commands": _unsigned(programs.command, programs.help_text, programs.wrong_usage),
    HOOKS: _unsigned(programs.hooks, programs.events, programs.components),
}
"""The checks of every kind but environments."""


def checks_of(kind: str) -> tuple[Check, ...]:
    """The checks of a kind, each with the checks that it needs. A component of an unknown kind has only `imports`."""
    if kind == "environments":
        return environments.CHECKS
    return FAMILIES[kind].checks if kind in FAMILIES else (Check(imports),)
