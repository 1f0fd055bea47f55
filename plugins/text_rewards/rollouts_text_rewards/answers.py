"""The answer in a reply, and `exact_match`."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any, Literal

from rollouts import Score, Task, Trajectory
from rollouts.errors import ConfigError
from rollouts.plugins.checks import checked_by

Where = Literal["reply", "last_line", "tags"]

NO_ANSWER = Score(None, why="the task has no answer")


def answer_in(text: str, where: Where, tag: str = "answer") -> str | None:
    """The answer in a reply: all of it, its last line that is not empty, or the text between the last tags. None if
    there is none.

    >>> answer_in("I add. <answer> 84 </answer>", "tags"), answer_in("I add.\\n84\\n", "last_line")
    ('84', '84')
    """
    if where == "reply":
        return text.strip()
    if where == "last_line":
        lines = text.strip().splitlines()
        return lines[-1].strip() if lines else None
    before, closing, _ = text.rpartition(f"</{tag}>")
    _, opening, answer = before.rpartition(f"<{tag}>")
    return answer.strip() if opening and closing else None


def accepted(task: Task) -> list[str]:
    """The accepted answers of a task as texts: its answer, or each of a list. Empty if it has none."""
    found = task.answer if isinstance(task.answer, list) else [task.answer]
    return [each if isinstance(each, str) else str(each) for each in found if each is not None]


def normalized(text: str, *, case: bool = False, punctuation: bool = True) -> str:
    """Text in Unicode's form NFKC, with single spaces; by default in lower case.

    >>> normalized("  The\\n ANSWER, is 84. "), normalized("84.", punctuation=False)
    ('the answer, is 84.', '84')
    """
    text = unicodedata.normalize("NFKC", text)
    text = text if case else text.casefold()
    if not punctuation:
        text = "".join(" " if unicodedata.category(each).startswith("P") else each for each in text)
    return " ".join(text.split())


def check_tag(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for a tag that is no name."""
    tag = values["tag"]
    if not tag.replace("_", "").replace("-", "").isalnum():
        raise ConfigError(f"the setting tag is {tag!r}: expected a name without brackets, such as answer")


@checked_by(check_tag)
def exact_match(
    task: Task,
    trajectory: Trajectory,
    *,
    where: Where = "reply",
    tag: str = "answer",
    case: bool = False,
    punctuation: bool = True,
) -> float | Score:
    """1 if the answer in the reply is that of the task, as text; None if the task has none.

    Both are compared in Unicode's form NFKC and with single spaces. A task may have a list of accepted answers.

    Args:
        where: the answer is the whole reply, its last line, or between tags
        tag: the name of the tags
        case: upper and lower case differ
        punctuation: punctuation counts
    """
    wanted = accepted(task)
    if not wanted:
        return NO_ANSWER
    given = answer_in(trajectory.last_text, where, tag)
    if given is None:
        return 0.0
    return float(
        normalized(given, case=case, punctuation=punctuation)
        in [normalized(each, case=case, punctuation=punctuation) for each in wanted]
    )
