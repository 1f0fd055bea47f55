"""The result of a check, and the report on all checks of one component: for a person, as JSON, as a badge.

A check returns nothing or a short remark if the component passes, or `Passed` with notes for its author. It raises
`FailedError` or `SkippedError` otherwise.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from rollouts.author_code import place_of_function, printable
from rollouts.errors import counted
from rollouts.version import __version__

WIDTH = 100  # characters of a line that explains a failure
BADGE_URL = "https://img.shields.io/badge"

Status = Literal["passed", "failed", "skipped"]


class FailedError(Exception):
    """The component breaks the contract: what was tried, what was seen (with the author's line), what to change."""

    def __init__(self, tried: str, seen: str, change: str) -> None:
        super().__init__(f"{tried}: {seen}")
        self.tried, self.seen, self.change = tried, seen, change


class SkippedError(Exception):
    """The check does not apply to this component, or cannot run here. The message says why."""


class UntestedError(SkippedError):
    """The check applies to this component, but something is missing to run it. `enable` says what to do."""

    def __init__(self, why: str, enable: str) -> None:
        super().__init__(why)
        self.enable = enable


def at(*functions: Any) -> str:
    """The line of the first of these functions whose definition is known, in parentheses; empty if there is none."""
    places = [place_of_function(each) for each in functions if each is not None]
    return next((f" ({place})" for place in places if place is not None), "")


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
