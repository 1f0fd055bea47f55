"""Many votes as one reward."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from rollouts import Score
from rollouts_judge.prompts import Verdict
from rollouts_judge.settings import JudgeSettings


class Vote(NamedTuple):
    """One vote. `verdict` None: there is none, and `why` says why. `tokens` and `dollars`: what it cost now."""

    verdict: Verdict | None = None
    cached: bool = False
    tokens: int = 0
    dollars: float = 0.0
    why: str = ""


def score_of(votes: Sequence[Vote], settings: JudgeSettings) -> Score:
    """The reward, from 0 to 1. Its value is None if too few votes are valid, or if a majority is tied."""
    lowest, highest = settings.bounds
    valid = [(float(vote.verdict.verdict) - lowest) / (highest - lowest) for vote in votes if vote.verdict is not None]
    parts: dict[str, float | None] = {
        "judge_tokens": float(sum(vote.tokens for vote in votes)),
        "judge_dollars": sum(vote.dollars for vote in votes),
        "judge_cache_hits": sum(vote.cached for vote in votes) / len(votes),
        "judge_votes": float(len(valid)),
    }
    if len(valid) > 1:
        parts["judge_agreement"] = agreement(valid)
    value, why = None, ""
    if not valid or len(valid) < settings.quorum * len(votes):
        reasons = list(dict.fromkeys(vote.why for vote in votes if vote.why))
        why = f"{len(valid)} of {len(votes)} votes are valid: {'; '.join(reasons)}"
    else:
        value = combined(valid, settings.combine)
        why = next(vote.verdict.reasoning for vote in votes if vote.verdict is not None)
        why = "the votes are tied" if value is None else why
    return Score(value, parts, why)


def combined(values: Sequence[float], how: str) -> float | None:
    """One value of several; None if a majority is tied.

    >>> combined([0.0, 1.0, 1.0], "majority"), combined([0.0, 1.0], "majority"), combined([0.0, 1.0, 0.5], "median")
    (1.0, None, 0.5)
    """
    if how == "mean":
        return statistics.fmean(values)
    if how == "median":
        return statistics.median(values)
    (first, count), *others = Counter(values).most_common()
    return None if others and others[0][1] == count else first


def agreement(values: Sequence[float]) -> float:
    """1 minus the mean distance between two votes.

    >>> agreement([1.0, 1.0]), agreement([0.0, 1.0])
    (1.0, 0.0)
    """
    return 1.0 - statistics.fmean(abs(one - other) for one, other in itertools.combinations(values, 2))
