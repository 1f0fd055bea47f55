"""`pattern` and `tags`: the form of a reply."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from rollouts import Score, Trajectory
from rollouts.errors import ConfigError
from rollouts.plugins.checks import checked_by
from rollouts_text_rewards.answers import check_tag
from rollouts_text_rewards.processes import stopped_at


def is_match(regex: str, text: str, whole: bool) -> dict[str, bool]:
    """Whether a regular expression matches a text, or a part of it."""
    compiled = re.compile(regex, re.DOTALL)
    return {"found": (compiled.fullmatch(text) if whole else compiled.search(text)) is not None}


def check_regex(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for an empty or invalid regular expression."""
    regex = values["regex"]
    if not regex:
        raise ConfigError("the reward pattern needs a regular expression; type --reward.pattern.regex 'Answer: \\d+'")
    try:
        re.compile(regex)
    except re.error as error:
        raise ConfigError(f"--reward.pattern.regex {regex!r}: {error}") from error


@checked_by(check_regex)
async def pattern(
    trajectory: Trajectory,
    *,
    regex: str = "",
    match: Literal["whole", "anywhere"] = "whole",
    seconds: Annotated[float, Meta(gt=0)] = 2.0,
) -> float | Score:
    """1 if the reply matches a regular expression of Python, else 0; None if that takes too long.

    Args:
        regex: the regular expression; a dot matches line ends too
        match: the whole reply has to match, without the space around it, or any part of it
        seconds: the time for one reply
    """
    check_regex({"regex": regex})
    text = trajectory.last_text.strip()
    outcome = await stopped_at(seconds, is_match, regex=regex, text=text, whole=match == "whole")
    return Score(None, why=outcome.why) if outcome.why else float(outcome.value)


def check_names(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for tags that are no different names."""
    names = values["names"]
    for name in names:
        check_tag({"tag": name})
    if not names or len(set(names)) < len(names):
        raise ConfigError(f'the setting names is {names}: expected different names, such as \'["think", "answer"]\'')


@checked_by(check_names)
def tags(trajectory: Trajectory, *, names: tuple[str, ...] = ("think", "answer"), nothing_else: bool = True) -> float:
    """1 if the reply has these tags, each once, in this order, one after another; else 0.

    Args:
        names: the names of the tags, without brackets
        nothing_else: there is only space outside of the tags
    """
    rest, outside = trajectory.last_text, ""
    for name in names:
        before, opening, after = rest.partition(f"<{name}>")
        _, closing, rest = after.partition(f"</{name}>")
        outside += before
        if not (opening and closing):
            return 0.0
    outside += rest
    counts = [trajectory.last_text.count(mark) for name in names for mark in (f"<{name}>", f"</{name}>")]
    return float(set(counts) == {1} and not (nothing_else and outside.strip()))
