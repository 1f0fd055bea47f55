"""Run a table of checks. A check that needs a failed one is skipped, so that one mistake is reported once.

A failure that does not say what to change gets the advice of the docstring.

CHECKS = (Check(definition), Check(tasks, needs=("definition",)))
results = run_checks(CHECKS, subject, only=("tasks",))
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

from rollouts.errors import ConfigError, MissingExtraError, in_lines, leaves_of, suggestion
from rollouts_check.report import FailedError, Passed, Result, SkippedError, UntestedError, words_of_author

S = TypeVar("S")
T = TypeVar("T")


class Check(NamedTuple):
    """One check: a function of a subject, and the names of checks. If one of these fails, this check is skipped."""

    function: Callable[[Any], str | Passed | None]
    needs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name for `--only` and `--skip`: the name of the function with dashes."""
        return self.function.__name__.replace("_", "-")

    @property
    def doc(self) -> str:
        """What the check finds out: the first paragraph of the docstring, in one line."""
        return " ".join((self.function.__doc__ or "").partition("\n\n")[0].split())

    @property
    def advice(self) -> str:
        """What to change if a failure does not say it: what the docstring has after `Advice:`."""
        advice = " ".join((self.function.__doc__ or "").partition("Advice:")[2].split())
        return advice or "correct the line that raised the error"


def once(function: Callable[[S], T]) -> Callable[[S], T]:
    """What several checks need of a subject: the function is called for each subject once."""

    @functools.wraps(function)
    def call(subject: Any) -> T:
        if function not in subject.kept:
            subject.kept[function] = function(subject)
        found: T = subject.kept[function]
        return found

    return call


def select(checks: Sequence[Check], only: Collection[str] = (), skip: Collection[str] = ()) -> list[Check]:
    """The checks to report. Raises ConfigError for a name that no check has."""
    known = [check.name for check in checks]
    for flag, names in (("--only", only), ("--skip", skip)):
        for name in names:
            if name not in known:
                near, listed = suggestion(name, known), f"checks: {', '.join(known)}"
                raise ConfigError(in_lines(f"{flag} {name}: there is no check of this name", near, listed))
    return [check for check in checks if (not only or check.name in only) and check.name not in skip]


def run_checks(
    checks: Sequence[Check],
    subject: Any,
    *,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    observe: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """The results of the chosen checks, in the order of the table. `observe` receives each one when it is known.

    A check that another one needs runs too, also if it was not chosen. Raises ConfigError for an unknown name.
    """
    by_name, results = {check.name: check for check in checks}, dict[str, Result]()

    def result_of(check: Check) -> Result:
        if check.name not in results:
            lacking = [name for name in check.needs if result_of(by_name[name]).status == "failed"]
            lacks = f"it needs {', '.join(lacking)}, which failed"
            results[check.name] = Result(check.name, "skipped", lacks) if lacking else _run(check, subject)
        return results[check.name]

    found = []
    for check in select(checks, only, skip):
        found.append(result_of(check))
        observe(found[-1])
    return found


def run_within(words: str, checks: Sequence[Check], subject: Any, **chosen: Collection[str]) -> list[Result]:
    """Run checks as a part of another check. Raises FailedError for the first failure; `words` say of what it is."""
    results = run_checks(checks, subject, **chosen)  # type: ignore[arg-type]
    for result in results:
        if result.status == "failed":
            raise FailedError(f"{words}, check {result.name}: {result.tried}", result.seen, result.change)
    return results


def _lacks_torch(error: BaseException) -> bool:
    """Whether a check could not run, because torch is not installed."""
    leaves = list(leaves_of(error))
    absent = [leaf.name for leaf in leaves if isinstance(leaf, ModuleNotFoundError)]
    absent += [leaf.package for leaf in leaves if isinstance(leaf, MissingExtraError)]
    return "torch" in absent and find_spec("torch") is None


def _run(check: Check, subject: Any) -> Result:
    begun = time.perf_counter()

    def result(**fields: Any) -> Result:
        return Result(check.name, seconds=round(time.perf_counter() - begun, 3), **fields)

    def skipped(reason: SkippedError) -> Result:
        enable = reason.enable if isinstance(reason, UntestedError) else ""
        return result(status="skipped", remark=str(reason), enable=enable)

    without_torch = UntestedError("torch is not installed", "type: pip install 'rollouts-rl[train]'")
    try:
        passed = check.function(subject)
        remark, notes = passed if isinstance(passed, Passed) else (passed or "", ())
        return result(status="passed", remark=remark, notes=list(notes))
    except SkippedError as reason:
        return skipped(reason)
    except FailedError as failure:
        if failure.__cause__ is not None and _lacks_torch(failure.__cause__):
            return skipped(without_torch)
        change = failure.change or check.advice
        return result(status="failed", tried=failure.tried, seen=failure.seen, change=change)
    except Exception as error:  # the author's code may raise anything
        if _lacks_torch(error):
            return skipped(without_torch)
        if not (seen := words_of_author(error)):
            error.add_note(f"the check {check.name} raised this")
            raise
        return result(status="failed", tried=check.doc, seen=seen, change="correct the line that raised the error")
