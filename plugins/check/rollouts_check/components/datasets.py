"""Checks of dataset loaders: their first rows, of the source that `--data.source` names."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from rollouts.author_code import shown, why_no_list
from rollouts.data.conversations import FORMS, BadRowError, described, read_conversation
from rollouts.data.loaders import NotARow
from rollouts.data.source import renamed
from rollouts.errors import ConfigError, counted, first_line
from rollouts.plugins.signature import call_with
from rollouts_check.components.common import Function, Subject, snapshot
from rollouts_check.report import FailedError, Passed, SkippedError, at

ROWS = 200  # of the first rows; a loader may be endless
_KNOWN_PROMPT = ("prompt", "messages")


def trial(subject: Subject, function: Function) -> Any:
    """The first rows."""
    rows(subject)  # skips the check if the loader needs a source
    return _rows(subject, function)


def rows(subject: Subject) -> str:
    """It returns rows: dicts with names of columns as their keys, and values that JSON can hold.

    Advice: return an iterable of dicts, whose keys are the names of the columns
    """
    source = subject.kept["source"]
    tried = f"read the first {ROWS} rows" + (f" of {source}" if source else "")
    try:
        with subject.trying(tried) as attempt:
            found = _rows(subject, subject.function)
    except FailedError as error:
        if _takes_source(subject) and not source:
            reason = f"without a source, its error was: {first_line(error.__cause__ or error)}"
            raise subject.skipped(reason, "name one that it can read: --data.source FILE") from error
        raise
    attempt.require(found, "there is none", "return at least one row")
    known = [(number, row) for number, row in enumerate(found, start=1) if not isinstance(row, NotARow)]
    for number, row in known:
        is_row = isinstance(row, dict) and all(isinstance(column, str) for column in row)
        attempt.require(is_row, f"row {number} is {shown(row)}")
        try:
            msgspec.json.encode(row)
        except (TypeError, ValueError, OverflowError) as error:
            change = "return text, numbers, lists and dicts: JSON has to hold a row"
            raise attempt.failed(f"row {number} is {shown(row)}: {error}", change) from error
    columns = dict.fromkeys(column for _, row in known for column in row)
    return f"{counted(len(found), 'row')} with the columns {', '.join(columns)}"


def usable(subject: Subject) -> str | Passed:
    """A run can use the rows: each has a prompt, or is a conversation. `--data.prompt` and the like name columns."""
    found, columns = trial(subject, subject.function), subject.kept["columns"]
    forms: dict[str, int] = {}
    notes: list[str] = []
    prompts = 0
    for number, row in enumerate(found, start=1):
        try:
            if isinstance(row, NotARow):
                raise BadRowError(row.why or "a blank line")
            named = renamed(row, columns, f"row {number}")
        except (BadRowError, ConfigError) as error:
            notes.append(f"row {number} cannot be used: {error}")
            continue
        is_prompt = any(named.get(column) for column in _KNOWN_PROMPT)
        prompts += is_prompt
        try:
            form = read_conversation(named).form
            forms[form] = forms.get(form, 0) + 1
        except BadRowError as error:
            if not is_prompt:
                notes.append(f"row {number} cannot be used: {error}; or a prompt: --data.prompt COLUMN")
    change = f"name the columns prompt and answer, or those of a conversation: {FORMS}"
    attempt = subject.attempt("read the rows as prompts, and as conversations", change)
    attempt.require(len(notes) < len(found), notes[0] if notes else "")
    said = [f"{counted(prompts, 'prompt')} for rollouts run"] if prompts else []
    said += [f"{described(forms, sum(forms.values()))} for rollouts sft"] if forms else []
    return Passed("; ".join(said), notes[:3])


def streaming(subject: Subject) -> str:
    """The rows are the same whether they are read at the start or while the run goes on.

    Advice: return the same rows in the same order
    """
    if "streaming" not in subject.signature.requests:
        return "it does not ask"
    rows(subject)
    both = (map(snapshot, _rows(subject, subject.function, streams=each)) for each in (False, True))
    attempt = subject.attempt("read the rows with `streaming`, and without")
    for number, (one, other) in enumerate(itertools.zip_longest(*both), start=1):
        attempt.require(one == other, f"row {number} differs")
    return ""


def no_source(subject: Subject) -> str | Passed:
    """A source that does not exist is an error that names it.

    Advice: name the source in the error: the user may have mistyped it
    """
    if not _takes_source(subject):
        raise SkippedError("it takes no source")
    rows(subject)
    missing = str(subject.scratch / "missing.rows")
    try:
        found = _rows(subject, subject.function, source=missing)
    except Exception as error:  # an author's code may raise anything
        if "missing.rows" in str(error):
            return ""
        attempt = subject.attempt(f"read {missing}, which does not exist")
        raise attempt.failed(f"the error was {type(error).__name__}: {first_line(error)}") from error
    many = f"for the source {missing}, which does not exist, it returned {counted(len(found), 'row')}"
    return Passed("", [f"{many}; a loader that takes no source should not name `source`{at(subject.function)}"])


def _rows(
    subject: Subject, function: Function, *, source: str | None = None, streams: bool = False
) -> list[dict[str, Any] | NotARow]:
    """The first rows, without blank lines. Raises what the loader raises."""
    available = {"source": subject.kept["source"] if source is None else source, "streaming": streams}
    found = call_with(function, available)
    if reason := why_no_list(found):
        raise ConfigError(f"it returned {type(found).__name__}, {reason}; expected an iterable of rows")
    return [row for row in itertools.islice(found, ROWS) if row != NotARow("")]


def _takes_source(subject: Subject) -> bool:
    return "source" in subject.signature.requests
