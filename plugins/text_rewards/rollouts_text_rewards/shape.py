"""`length` and `repetition`: the size of a reply, and how often it repeats itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from rollouts import Trajectory
from rollouts.errors import ConfigError
from rollouts.plugins.checks import checked_by


def check_bounds(values: Mapping[str, Any]) -> None:
    """Raise ConfigError if the smallest length is larger than the largest one."""
    if values["least"] > values["most"]:
        raise ConfigError(f"the reward length: least is {values['least']}, more than most, which is {values['most']}")


@checked_by(check_bounds)
def length(
    trajectory: Trajectory,
    *,
    unit: Literal["words", "characters", "tokens"] = "words",
    least: Annotated[int, Meta(ge=0)] = 1,
    most: Annotated[int, Meta(ge=0)] = 200,
    margin: Annotated[int, Meta(ge=1)] = 100,
) -> float:
    """1 if the length is within bounds; outside it falls to 0 within a margin.

    Args:
        unit: words or characters of the last reply, or sampled tokens of the episode
        least: the smallest length that gives 1
        most: the largest length that gives 1
        margin: this much beyond a bound, the value is 0
    """
    text = trajectory.last_text
    counts = {"words": len(text.split()), "characters": len(text), "tokens": trajectory.sampled_count}
    beyond = max(least - counts[unit], counts[unit] - most, 0)
    return max(1.0 - beyond / margin, 0.0)


def repetition(trajectory: Trajectory, *, words: Annotated[int, Meta(ge=1)] = 3) -> float:
    """The share of word sequences that were there before, from 0 to 1. Give it a negative weight.

    Args:
        words: the length of a sequence
    """
    found = trajectory.last_text.casefold().split()
    sequences = [tuple(found[place : place + words]) for place in range(len(found) - words + 1)]
    return 1.0 - len(set(sequences)) / len(sequences) if sequences else 0.0
