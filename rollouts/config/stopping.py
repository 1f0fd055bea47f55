"""What users say of metrics: the rules of `--stop-when`, and the ranking of `--keep-best`.

rule = read_rule("eval/reward_mean >= 0.95")
rule.holds({"eval/reward_mean": 0.96})
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from rollouts.errors import ConfigError

OPERATORS = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
LOGGED = tuple(
    """
    eval/reward_mean eval/greedy_mean reward/mean reward/std policy/loss policy/entropy policy/kl_old optim/lr
    optim/grad_norm
    """.split()
)
"""Metrics that every run of mode rl with evaluations logs."""

EXAMPLE = "'eval/reward_mean >= 0.95'"

_RULE = re.compile(r"\s*(?P<metric>[^\s<>=!]+)\s*(?P<sign>[<>=!]+)\s*(?P<number>[^\s<>=!]+)\s*")


class StopRule(NamedTuple):
    """A rule: the run ends after a step if `metric sign number` is true."""

    metric: str
    sign: str
    number: float

    def __str__(self) -> str:
        return f"{self.metric} {self.sign} {self.number:g}"

    def holds(self, metrics: Mapping[str, float]) -> bool:
        """Whether these metrics end the run. A missing metric or a NaN does not."""
        value = metrics.get(self.metric, math.nan)
        return not math.isnan(value) and OPERATORS[self.sign](value, self.number)


def read_rule(text: str) -> StopRule:
    """Parse a rule. Raises ConfigError, which says what is wrong and shows a valid rule.

    >>> read_rule("reward/mean>.9")
    StopRule(metric='reward/mean', sign='>', number=0.9)
    """
    found = _RULE.fullmatch(text)
    if found is None:
        several = re.search(r"\b(and|or|&&|\|\|)\b|,", text)
        hint = "; give each rule its own --stop-when (the run ends when one of them holds)" if several else ""
        problem = f"{text!r} is no rule: expected METRIC OPERATOR NUMBER in quotes{hint}"
    elif found["sign"] not in OPERATORS:
        meant = {"=": "==", "=>": ">=", "=<": "<=", "<>": "!="}.get(found["sign"])
        problem = f"{text!r}: there is no operator {found['sign']}"
        problem += f"; did you mean {meant}?" if meant else f"; there are {' '.join(OPERATORS)}"
    elif math.isnan(number := _number(found["number"])):
        problem = f"{text!r}: {found['number']} is no number"
    else:
        return StopRule(found["metric"], found["sign"], number)
    raise ConfigError(f"{problem}\nfor example: --stop-when {EXAMPLE}")


class Ranking(NamedTuple):
    """How checkpoints are ranked: by the value of a metric when each was saved."""

    metric: str
    higher_is_better: bool

    def value(self, metrics: Mapping[str, float]) -> dict[str, Any] | None:
        """The value as a checkpoint keeps it; None if the metric is missing or not finite."""
        value = metrics.get(self.metric)
        if value is None or not math.isfinite(value):
            return None
        return {"name": self.metric, "value": value, "higher_is_better": self.higher_is_better}


def read_ranking(text: str) -> Ranking:
    """Parse the value of `--keep-best`. Raises ConfigError.

    >>> read_ranking("eval/greedy_mean"), read_ranking("min:policy/kl_ref")
    (Ranking(metric='eval/greedy_mean', higher_is_better=True), Ranking(metric='policy/kl_ref', higher_is_better=False))
    """
    found = re.fullmatch(r"(?:(min|max):)?([^\s<>=!:]+)", text.strip())
    if found is None:
        examples = "--keep-best eval/greedy_mean, or --keep-best min:policy/kl_ref"
        raise ConfigError(f"{text!r} is no metric\nfor example: {examples}")
    return Ranking(found[2], found[1] != "min")


def misspelled(metric: str) -> str:
    """The metric in LOGGED that this name means: they differ only in `/_.-`, or by one or two letters; empty if none.

    >>> misspelled("reward_mean"), misspelled("eval/reward_meen"), misspelled("policy/my_loss")
    ('reward/mean', 'eval/reward_mean', '')
    """
    import difflib

    def letters(name: str) -> str:
        return re.sub(r"[/_.-]", "", name.lower())

    same = [name for name in LOGGED if letters(name) == letters(metric)]
    if not same and metric.count("/") == 1 and metric.startswith(("eval/", "reward/")):
        same = difflib.get_close_matches(metric, LOGGED, n=1, cutoff=0.9)
    return same[0] if same and metric not in LOGGED else ""


def _number(text: str) -> float:
    """The number; NaN for a text that is no finite number."""
    try:
        return number if math.isfinite(number := float(text)) else math.nan
    except ValueError:
        return math.nan
