"""The check of the other parts of an algorithm, by the tables of their kinds."""

from __future__ import annotations

from collections.abc import Iterator

from rollouts.errors import counted
from rollouts.plugins.index import KIND_WORDS
from rollouts.training.algorithms.algorithm import Algorithm, function_label
from rollouts_check.components.subject import Function, Subject, make_subject
from rollouts_check.packages import Found
from rollouts_check.report import FailedError, SkippedError
from rollouts_check.runner import run_checks

OF_PACKAGE = ("imports", "wheel")


def parts(subject: Subject) -> str:
    """The other parts of an algorithm keep the contracts of their kinds: advantage, aggregation, KL, correction, ..."""
    if not isinstance(subject.registered, Algorithm):
        raise SkippedError("it is a function, and has no other parts")
    count = 0
    for kind, function in _parts_of(subject.registered):
        count += 1
        label = f"{KIND_WORDS[kind]} {function_label(function)}"
        found = Found(label, "<part>", kind=kind)
        families = subject.families
        part = make_subject(found, {}, subject.scratch, families=families, component=function, seed=subject.seed)
        for result in run_checks(families[kind].checks, part, skip=OF_PACKAGE):
            if result.status == "failed":
                raise FailedError(f"the {label}, check {result.name}: {result.tried}", result.seen, result.change)
    return counted(count, "part")


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
