"""`similar` and `novelty`: the similarity of texts, with rapidfuzz."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Annotated, Literal

from msgspec import Meta
from rapidfuzz import fuzz

from rollouts import Score, Task, Trajectory
from rollouts.plugins.checks import checked_by
from rollouts_text_rewards.answers import NO_ANSWER, Where, accepted, answer_in, check_tag, normalized

Measure = Literal["characters", "words", "word_set"]

MEASURES: dict[str, Callable[[str, str], float]] = {
    "characters": fuzz.ratio,
    "words": fuzz.token_sort_ratio,
    "word_set": fuzz.token_set_ratio,
}


@checked_by(check_tag)
def similar(
    task: Task,
    trajectory: Trajectory,
    *,
    measure: Measure = "characters",
    at_least: Annotated[float, Meta(ge=0, le=1)] = 0.0,
    where: Where = "reply",
    tag: str = "answer",
    characters_max: Annotated[int, Meta(ge=1)] = 4000,
) -> float | Score:
    """How similar the answer in the reply is to that of the task, from 0 to 1; None if the task has none.

    Of a list of accepted answers, the most similar one counts.

    Args:
        measure: rapidfuzz's ratio, its token_sort_ratio (words in any order), or its token_set_ratio (words at all)
        at_least: a smaller similarity counts as 0
        where: the answer is the whole reply, its last line, or between tags
        tag: the name of the tags
        characters_max: only the beginning of longer texts is compared
    """
    wanted = accepted(task)
    if not wanted:
        return NO_ANSWER
    given = answer_in(trajectory.last_text, where, tag)
    if not given:
        return 0.0
    texts = (normalized(each[:characters_max]) for each in wanted)
    found = max(MEASURES[measure](normalized(given[:characters_max]), each) for each in texts) / 100
    return found if found >= at_least else 0.0


def novelty(
    trajectories: list[Trajectory], *, measure: Measure = "words", characters_max: Annotated[int, Meta(ge=1)] = 2000
) -> list[float]:
    """1 minus the mean similarity to the other replies of the group. A reply without others is new: 1.

    Args:
        measure: rapidfuzz's ratio, its token_sort_ratio (words in any order), or its token_set_ratio (words at all)
        characters_max: only the beginning of longer replies is compared
    """
    texts = [normalized(each.last_text[:characters_max]) for each in trajectories]
    ratio = MEASURES[measure]
    others = [[*texts[:place], *texts[place + 1 :]] for place in range(len(texts))]
    return [
        1.0 - statistics.fmean(ratio(text, each) for each in rest) / 100 if rest else 1.0
        for text, rest in zip(texts, others, strict=True)
    ]
