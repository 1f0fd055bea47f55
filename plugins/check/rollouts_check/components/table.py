"""The checks of each kind, in their order. `environments` has a table of its own."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

from rollouts.errors import counted
from rollouts.plugins.index import HOOKS, KIND_WORDS
from rollouts.training.algorithms.algorithm import Algorithm, function_label
from rollouts_check.components import (
    common,
    datasets,
    engines,
    filters,
    groups,
    loggers,
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
from rollouts_check.components.common import Function, Subject, Trial, make_subject
from rollouts_check.environments import table as environments
from rollouts_check.packages import Found
from rollouts_check.report import FailedError, SkippedError
from rollouts_check.runner import Check, run_checks

PACKAGED = (Check(common.imports), Check(common.wheel, ("imports",)))
"""The checks of every kind."""

SIGNED = (Check(common.definition), Check(common.settings, ("definition",)))
"""The checks of every kind with settings: all but commands and hook plugins."""

ALSO_NEEDS = {groups.better: ("order",), engines.replies: ("absent",)}
"""Further checks that a check needs: the results of rollouts whose order matters cannot be compared."""


class Family(NamedTuple):
    """The checks of a kind. `trial` is for the checks that several kinds of functions share."""

    checks: tuple[Check, ...]
    trial: Trial | None = None


def _family(module: ModuleType, names: str, early: str = "", trial: Trial | None = None) -> Family:
    """The checks of these names in a module. All need the first one, which says whether the component works at all.
    `early` are checks after the first one, in the module or in `common`, which the others need too.
    """
    first, *others = names.split()
    needs = ["definition"]
    checks: list[Check] = []
    for group in ([first], early.split(), others):
        functions = [getattr(module, name, None) or getattr(common, name) for name in group]
        added = [Check(each, (*needs, *ALSO_NEEDS.get(each, ()))) for each in functions]
        checks, needs = checks + added, needs + [check.name for check in added]
    return Family((*PACKAGED, *SIGNED, *checks), trial)


def _unsigned(first: Function, *others: Function) -> Family:
    """A family of components without settings."""
    check = Check(first)
    return Family((*PACKAGED, check, *(Check(each, (check.name,)) for each in others)))


def parts(subject: Subject) -> str:
    """The other parts of an algorithm keep the contracts of their kinds: advantage, aggregation, KL, correction, ..."""
    if not isinstance(subject.registered, Algorithm):
        raise SkippedError("it is a function, and has no other parts")
    found = list(_parts_of(subject.registered))
    for kind, function in found:
        label = f"{KIND_WORDS[kind]} {function_label(function)}"
        checks, trial = FAMILIES[kind]
        part = make_subject(Found(label, "<part>", kind=kind), {}, subject.scratch, trial, function, subject.seed)
        for result in run_checks(checks, part, skip=("imports", "wheel")):
            if result.status == "failed":
                raise FailedError(f"the {label}, check {result.name}: {result.tried}", result.seen, result.change)
    return counted(len(found), "part")


def _parts_of(algorithm: Algorithm) -> Iterator[tuple[str, Function]]:
    own = {
        "advantages": None if algorithm.pairs else algorithm.advantage,
        "kl": algorithm.kl.function if algorithm.kl else None,
        "corrections": algorithm.correction,
        "mixers": algorithm.mix,
        "selectors": algorithm.select,
        "pairings": algorithm.pairs,
    }
    yield from ((kind, function) for kind, function in own.items() if function is not None)
    if callable(algorithm.aggregation):
        yield "aggregations", algorithm.aggregation
    yield from (("shapings", function) for function in algorithm.shaping)
    yield from (("filters", function) for function in algorithm.filters)


_FUNCTION = "unchanged repeatable"
_OF_GROUPS = "values one_rollout equal_rewards finite order"
_COMPARED = _family(groups, f"{_OF_GROUPS} better", _FUNCTION, groups.trial)
_LOSS = _family(tokens, "values gradient masked rows finite", _FUNCTION, tokens.trial)
_STEPS = "steps descends learning_rates gradients restored"
_SANDBOX = "protocol commands files outside apart late limits closed time_to_live"

FAMILIES: dict[str, Family] = {
    "rewards": _family(rewards, "values any_reply", _FUNCTION, rewards.trial),
    "filters": _family(filters, "values any_group order", _FUNCTION, filters.trial),
    "losses": _LOSS._replace(checks=(*_LOSS.checks, Check(parts, _LOSS.checks[-1].needs))),
    "kl": _family(tokens, "values gradient masked rows finite equal", _FUNCTION, tokens.trial),
    "corrections": _family(tokens, "values masked rows finite agreement", _FUNCTION, tokens.trial),
    "advantages": _family(groups, f"{_OF_GROUPS} better masked", _FUNCTION, groups.trial),
    "mixers": _COMPARED,
    "shapings": _COMPARED,
    "selectors": _family(groups, _OF_GROUPS, _FUNCTION, groups.trial),
    "pairings": _COMPARED,
    "aggregations": _family(weights, "values masked nothing_live order", _FUNCTION, weights.trial),
    "curricula": _family(samplers, "values", "repeatable", samplers.curriculum_trial),
    "datasets": _family(datasets, "rows usable streaming no_source", "repeatable", datasets.trial),
    "samplers": _family(samplers, "chooses any_outcome restored other_tasks", "repeatable", samplers.trial),
    "references": _family(updates, "updates policy_unchanged precisions", "repeatable", updates.reference_trial),
    "optimizers": _family(updates, _STEPS, "repeatable", updates.optimizer_trial),
    "loggers": _family(loggers, "opens any_metric metrics_unchanged samples quick closes resumed", "logs"),
    "tools": _family(tools, "tool_definition tool_schemas tool_results tool_arguments event_loop"),
    "tool_parsers": _family(tools, "plain_text any_text quick", f"round_trip {_FUNCTION}", tools.parser_trial),
    "sandboxes": _family(sandboxes, _SANDBOX),
    "inference": _family(engines, "protocol scores sessions", "absent replies"),
    "training": _family(trainers, "protocol forward step nothing_live weights checkpoint closes"),
    "workers": _family(workers, "connects leaves_nothing plays"),
    "commands": _unsigned(programs.command, programs.help_text, programs.wrong_usage),
    HOOKS: _unsigned(programs.hooks, programs.events, programs.components),
}
"""The checks of every kind but environments."""


def checks_of(kind: str) -> tuple[Check, ...]:
    """The checks of a kind, each with the checks that it needs. A component of an unknown kind has only `imports`."""
    if kind == "environments":
        return environments.CHECKS
    return FAMILIES[kind].checks if kind in FAMILIES else PACKAGED[:1]
