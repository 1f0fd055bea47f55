"""The result of a check, and the report on all checks of one component: for a person, as JSON, as a badge.

A check returns nothing or a short remark if the component passes, or `Passed` with notes for its author. It raises
`FailedError` or `SkippedError` otherwise. A check that makes several demands of one call makes an `Attempt`:

with trying("call it on two rollouts", function) as attempt:
    found = function(rewards)
attempt.require(len(found) == 2, f"it returned {found}", "return one number for each rollout")

If a failure does not say what to change, it is the advice of its check: a paragraph of the docstring.
"""

from __future__ import annotations

import contextlib
import linecache
import textwrap
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, Literal, NamedTuple

import msgspec

from rollouts import author_code
from rollouts.author_code import Place, authors_code, message_of, place_of, place_of_function, printable
from rollouts.errors import RolloutsError, counted, leaves_of, words_of
from rollouts.version import __version__

WIDTH = 100  # characters of a line that explains a failure
BADGE_URL = "https://img.shields.io/badge"

Status = Literal["passed", "failed", "skipped"]


class FailedError(Exception):
    """The component breaks the contract: what was tried, what was seen (with the author's line), what to change. If
    `change` is empty, it is the advice of the check.
    """

    def __init__(self, tried: str, seen: str, change: str = "") -> None:
        super().__init__(f"{tried}: {seen}")
        self.tried, self.seen, self.change = tried, seen, change


class SkippedError(Exception):
    """The check does not apply to this component, or cannot run here. The message says why."""


class UntestedError(SkippedError):
    """The check applies to this component, but something is missing to run it. `enable` says what to do."""

    def __init__(self, why: str, enable: str) -> None:
        super().__init__(why)
        self.enable = enable


def place_of_frame(frame: FrameType | None, *, is_own: bool = False, until: str = "\0") -> Place | None:
    """The innermost line of an author's code, from this frame outwards. None if there is none, or if a file whose name
    begins with `until` comes first. `is_own`: installed packages do not count.
    """
    while frame is not None and not (file := frame.f_code.co_filename).startswith(until):
        is_ours = file.startswith((*author_code.CORE, author_code.STANDARD_LIBRARY))
        is_installed = is_own and any(part in file for part in author_code.INSTALLED)
        if author_code.is_file(file) and not is_ours and not is_installed:
            return Place(file, frame.f_lineno, linecache.getline(file, frame.f_lineno).strip())
        frame = frame.f_back
    return None


def at(*functions: Any) -> str:
    """The line of the first of these functions whose definition is known, in parentheses; empty if there is none."""
    places = [place_of_function(each) for each in functions if each is not None]
    return next((f" ({place})" for place in places if place is not None), "")


class Attempt:
    """What a check tries, and what to change if it goes wrong. A failure has the line of the first of `functions`."""

    def __init__(self, tried: str, *functions: Any, change: str = "") -> None:
        self.tried, self.functions, self.change = tried, functions, change

    def failed(self, seen: str, change: str = "") -> FailedError:
        """The failure of this attempt."""
        return FailedError(self.tried, f"{seen}{at(*self.functions)}", change or self.change)

    def require(self, is_right: object, seen: str, change: str = "") -> None:
        """Raise FailedError with what was seen, unless it is right."""
        if not is_right:
            raise self.failed(seen, change)


@contextlib.contextmanager
def trying(tried: str, *functions: Any, change: str = "") -> Iterator[Attempt]:
    """Run an author's code. Its error becomes a FailedError with the line that raised it, or else that of a function.
    An error of the check itself passes.
    """
    attempt = Attempt(tried, *functions, change=change)
    try:
        with authors_code():
            yield attempt
    except (FailedError, SkippedError):
        raise
    except Exception as error:  # the author's code may raise anything
        if not (seen := words_of_author(error)):
            raise
        raise (FailedError(tried, seen, attempt.change) if ", line " in seen else attempt.failed(seen)) from error


def words_of_author(error: BaseException) -> str:
    """Describe an error that an author's code raised, or the core because of it; "" for a bug of a check."""
    leaves = list(leaves_of(error))
    if not all(isinstance(leaf, RolloutsError) or place_of(leaf) is not None for leaf in leaves):
        return ""
    return message_of(leaves[0]) if isinstance(leaves[0], RolloutsError) else words_of(error)


class Passed(NamedTuple):
    """A component passes a check, and its author should read the notes: what the contract allows, but is probably a
    mistake.
    """

    remark: str
    notes: Sequence[str] = ()


class Result(msgspec.Struct, frozen=True):
    """The result of one check. `remark` is a short text: what was checked, or why the check was skipped. `notes` are
    for the author of a component that passes. `enable` says how to run a check that was skipped although it applies.
    `tried`, `seen` and `change` explain a failure.
    """

    name: str
    status: Status
    remark: str = ""
    notes: list[str] = []
    enable: str = ""
    tried: str = ""
    seen: str = ""
    change: str = ""
    seconds: float = 0.0

    def lines(self) -> Iterator[str]:
        """One line; one more paragraph for each note, and three for a failure."""
        word = "FAILED" if self.status == "failed" else self.status
        yield f"{self.name:<20} {word}{f'  {printable(self.remark)}' if self.remark else ''}"
        notes = [("note", note) for note in self.notes]
        for label, text in (*notes, ("tried", self.tried), ("seen", self.seen), ("change", self.change)):
            if text:
                yield from _paragraph(label, printable(text))


class Report(msgspec.Struct):
    """The results of all checks of one component. `kind` is the word for its kind, such as `environment`."""

    kind: str
    name: str
    results: list[Result] = []

    @property
    def failed(self) -> list[Result]:
        """The failed checks."""
        return [result for result in self.results if result.status == "failed"]

    @property
    def has_passed(self) -> bool:
        """Whether no check failed."""
        return not self.failed

    def counts(self) -> str:
        """The numbers of passed, failed and skipped checks, in words."""
        numbers = {word: sum(r.status == word for r in self.results) for word in ("passed", "failed", "skipped")}
        words = [f"{number} {word}" for word, number in numbers.items() if number or word == "passed"]
        notes = sum(len(result.notes) for result in self.results)
        return ", ".join([*words, counted(notes, "note")] if notes else words)

    def verdict(self) -> str:
        """The end of the report: whether the component keeps the contract, and what was not tested."""
        untested = dict[str, list[str]]()
        for result in self.results:
            if result.enable:
                untested.setdefault(result.enable, []).append(result.name)
        end = "keeps the contract" + (", as far as it was tested" if untested else "")
        if not self.has_passed:
            end = f"breaks the contract in {counted(len(self.failed), 'check')}"
        lines = [f"the {self.kind} {self.name} {end}: {self.counts()}"]
        lines += [f"not tested: {', '.join(names)}; {enable}" for enable, names in untested.items()]
        return "\n".join(lines)

    def badge(self) -> str:
        """A line of Markdown for a README: a picture that says how many checks passed, with this version."""
        passed = sum(result.status == "passed" for result in self.results)
        word = f"{passed} checks passed" if self.has_passed else f"{counted(len(self.failed), 'check')} failed"
        color = "brightgreen" if self.has_passed else "red"
        parts = (f"rollouts check {__version__}", word, color)
        text = "-".join(part.replace("-", "--").replace("_", "__").replace(" ", "_") for part in parts)
        return f"![{parts[0]}: {word}]({BADGE_URL}/{text})"

    def as_json(self) -> dict[str, object]:
        """The report as plain data."""
        found: dict[str, object] = msgspec.to_builtins(self)
        return {"version": __version__, "passed": self.has_passed, **found}


def failure_text(results: Sequence[Result]) -> str:
    """The failed checks with their explanations, as one text."""
    return "\n".join(line for result in results if result.status == "failed" for line in result.lines())


def _paragraph(label: str, text: str) -> Iterator[str]:
    first, rest = f"    {label:<7} ", " " * 12
    for number, line in enumerate(text.splitlines()):
        wrapper = textwrap.TextWrapper(WIDTH, rest if number else first, rest, break_long_words=False)
        wrapper.break_on_hyphens = False
        yield from wrapper.wrap(line) or [rest]
