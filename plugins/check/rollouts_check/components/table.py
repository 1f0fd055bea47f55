"""The checks of each kind, in their order. `environments` has a table of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import NamedTuple

from rollouts.errors import counted
from rollouts.plugins.index import HOOKS, KIND_WORDS
from rollouts.training.algorithms.algorithm import Algorithm, function_label
from rollouts_check.components import common
from rollouts_check.components.common import Function, Subject, Trial, make_subject
from rollouts_check.environments import table as environments
from rollouts_check.packages import Found
from rollouts_check.report import SkippedError
from rollouts_check.runner import Check, run_within

PACKAGED = (Check(common.imports), Check(common.wheel, ("imports",)))
"""The checks of every kind."""

SIGNED = (Check(common.definition), Check(common.settings, ("definition",)))
"""The checks of every kind with settings: all but commands and hook plugins."""

ALSO_NEEDS = {"better": ("order",), "replies": ("absent",)}
"""Further checks that a check needs: the results of rollouts whose order matters cannot be compared."""


class Family(NamedTuple):
    """The checks of a kind. `trial` is for the checks that several kinds of functions share."""

    checks: tuple[Check, ...]
    trial: Trial | None = None


def _family(
    module: str, names: str, early: str = "", trial: str = "", *, before: Sequence[Check] = (*PACKAGED, *SIGNED)
) -> Family:
    """The checks of these names in a module. All need the first one, which says whether the component works at all.
    `early` are checks after the first one, in the module or in `common`, which the others need too.
    """
    home = import_module(f"rollouts_check.components.{module}")
    first, *others = names.split()
    needs = ["definition"] if before != PACKAGED else []
    checks = list(before)
    for group in ([first], early.split(), others):
        functions = [(name, getattr(home, name, None) or getattr(common, name)) for name in group]
        added = [Check(function, (*needs, *ALSO_NEEDS.get(name, ()))) for name, function in functions]
        checks, needs = checks + added, needs + [check.name for check in added]
    return Family(tuple(checks), getattr(home, trial) if trial else None)


def parts(subject: Subject) -> str:
    """The other parts of an algorithm keep the contracts of their kinds: advantage, aggregation, KL, correction, ..."""
    if not isinstance(subject.registered, Algorithm):
        raise SkippedError("it is a function, and has no other parts")
    found = list(_parts_of(subject.registered))
    for kind, function in found:
        label = f"{KIND_WORDS[kind]} {function_label(function)}"
        checks, trial = FAMILIES[kind]
        part = make_subject(Found(label, "<part>", kind=kind), {}, subject.scratch, trial, function, subject.seed)
        run_within(f"the {label}", checks, part, skip=("imports", "wheel"))
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
_COMPARED = _family("groups", f"{_OF_GROUPS} better", _FUNCTION, "trial")
_LOSS = _family("tokens", "values gradient masked rows finite", _FUNCTION, "trial")
_STEPS = "steps descends learning_rates gradients restored"
_SANDBOX = "protocol commands files outside apart late limits closed time_to_live"

FAMILIES: dict[str, Family] = {
    "rewards": _family("rewards", "values any_reply", _FUNCTION, "trial"),
    "filters": _family("filters", "values any_group order", _FUNCTION, "trial"),
    "losses": _LOSS._replace(checks=(*_LOSS.checks, Check(parts, _LOSS.checks[-1].needs))),
    "kl": _family("tokens", "values gradient masked rows finite equal", _FUNCTION, "trial"),
    "corrections": _family("tokens", "values masked rows finite agreement", _FUNCTION, "trial"),
    "advantages": _family("groups", f"{_OF_GROUPS} better masked", _FUNCTION, "trial"),
    "mixers": _COMPARED,
    "shapings": _COMPARED,
    "selectors": _family("groups", _OF_GROUPS, _FUNCTION, "trial"),
    "pairings": _COMPARED,
    "aggregations": _family("weights", "values masked nothing_live order", _FUNCTION, "trial"),
    "curricula": _family("samplers", "values", "repeatable", "curriculum_trial"),
    "datasets": _family("datasets", "rows usable streaming no_source", "repeatable", "trial"),
    "samplers": _family("samplers", "chooses any_outcome restored other_tasks", "repeatable", "trial"),
    "references": _family("updates", "updates policy_unchanged precisions", "repeatable", "reference_trial"),
    "optimizers": _family("updates", _STEPS, "repeatable", "optimizer_trial"),
    "loggers": _family("loggers", "opens any_metric metrics_unchanged samples quick closes resumed", "logs"),
    "tools": _family("tools", "tool_definition tool_schemas tool_results tool_arguments event_loop"),
    "tool_parsers": _family("tools", "plain_text any_text quick", f"round_trip {_FUNCTION}", "parser_trial"),
    "sandboxes": _family("sandboxes", _SANDBOX),
    "inference": _family("engines", "protocol scores sessions", "absent replies"),
    "training": _family("trainers", "protocol forward step nothing_live weights checkpoint closes"),
    "workers": _family("workers", "connects leaves_nothing plays"),
    "commands": _family("programs", "command help_text wrong_usage", before=PACKAGED),
    HOOKS: _family("programs", "hooks events components", before=PACKAGED),
}
"""The checks of every kind but environments."""


def checks_of(kind: str) -> tuple[Check, ...]:
    """The checks of a kind, each with the checks that it needs. A component of an unknown kind has only `imports`."""
    if kind == "environments":
        return environments.CHECKS
    return FAMILIES[kind].checks if kind in FAMILIES else PACKAGED[:1]
