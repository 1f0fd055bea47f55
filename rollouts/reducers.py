"""How the rewards of several samples of one task become one number: `rollouts eval --reduce`.

Pure functions. Not here: which samples belong together (`rollouts.evaluate`).
"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Reducer(NamedTuple):
    """How to reduce: to the `mean` of the samples, the `best`, the `worst` (with rewards of 0 and 1: whether all are
    right), or the reward of the `majority`.

    `pattern` says what an answer is: the last match of this regular expression in the last text of the model, or of its
    first group if it has one. Without a pattern, the answer is the whole text, without spaces around it.
    """

    how: str = "mean"
    pattern: str = ""

    def answer(self, text: str) -> str:
        """The final answer in the last text of the model; empty if there is none.

        >>> Reducer().answer(" 42\\n"), Reducer(pattern=r"-?\\d+").answer("6 * 7 = 42.")
        ('42', '42')
        """
        if not self.pattern:
            return text.strip()
        found = None
        for found in re.finditer(self.pattern, text):  # noqa: B007 - the last one counts
            pass
        return "" if found is None else (found[min(1, found.re.groups)] or "").strip()

    def reduce(self, rewards: Sequence[float], texts: Sequence[str]) -> float:
        """One number for the samples of a task, in their order: their rewards, and the last texts of the model."""
        if self.how == "majority":
            return majority(rewards, [self.answer(text) for text in texts])
        return _OF_REWARDS[self.how](rewards)


_OF_REWARDS: dict[str, Callable[[Sequence[float]], float]] = {"mean": statistics.fmean, "best": max, "worst": min}

MEAN = Reducer()
"""The mean of the samples."""


def majority(rewards: Sequence[float], answers: Sequence[str]) -> float:
    """The reward of the most common answer: the mean over the samples that gave it (self-consistency, Wang et al. 2022,
    https://arxiv.org/abs/2203.11171).

    Of equally common answers, the one that was given first counts. An empty answer has no vote, unless all are empty.

    >>> majority([0.0, 1.0, 1.0], ["6", "7", "7"]), majority([0.0, 1.0], ["6", "7"]), majority([0.0, 1.0], ["", "7"])
    (1.0, 0.0, 1.0)
    """
    assert len(rewards) == len(answers) > 0, (rewards, answers)
    votes: defaultdict[str, list[float]] = defaultdict(list)
    for reward, answer in zip(rewards, answers, strict=True):
        votes[answer].append(reward)
    given = [each for answer, each in votes.items() if answer] or list(votes.values())
    winner: list[float] = max(given, key=len)
    return statistics.fmean(winner)


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """An unbiased estimate of the probability that at least one of `k` samples passes, from `samples` samples of which
    `passed` passed (Chen et al. 2021, https://arxiv.org/abs/2107.03374, equation 1).

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 4), pass_at_k(4, 1, 2)
    (0.25, 1.0, 0.5)
    """
    return 1.0 - pass_hat_k(samples, samples - passed, k)


def pass_hat_k(samples: int, passed: int, k: int) -> float:
    """An unbiased estimate of the probability that all of `k` samples pass, written pass^k (Yao et al. 2024,
    https://arxiv.org/abs/2406.12045, section 3).

    >>> pass_hat_k(4, 3, 1), pass_hat_k(4, 3, 4), pass_hat_k(4, 3, 2)
    (0.75, 0.0, 0.5)
    """
    assert 0 <= passed <= samples and 1 <= k <= samples, (samples, passed, k)
    return math.comb(passed, k) / math.comb(samples, k)


def stderr(values: Sequence[float]) -> float | None:
    """The standard error of the mean; None for fewer than two values."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
