"""Checks of filters, on invented groups."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from rollouts.author_code import shown
from rollouts.errors import counted
from rollouts.training.rollout_gen.groups import Group, NamedFilter, filter_group
from rollouts.types import Episode, Score
from rollouts_check.components.common import Function, Subject
from rollouts_check.components.rewards import TASK, invented_trajectory

GROUPS: dict[str, tuple[float | None, ...]] = {
    "rewards that differ": (1.0, 0.0, 0.5, 0.25),
    "two rollouts": (0.0, 1.0),
    "equal rewards": (1.0, 1.0, 1.0),
    "rewards of 0": (0.0, 0.0),
    "one rollout": (1.0,),
    "a rollout that was not judged": (1.0, None, 0.0),
    "one rollout that was judged": (None, 0.5, None),
}
"""Groups by what is special about them. A run drops a group of which no rollout was judged."""

USUAL = 4  # the first groups, whose rollouts are all judged


def trial(subject: Subject, function: Function) -> Any:
    """The verdicts on the first groups."""
    return [_filtered(subject, function, _group(rewards)) for rewards in list(GROUPS.values())[:USUAL]]


def values(subject: Subject) -> str:
    """It returns True to keep a group, and False or a reason as text to drop it.

    Advice: return True to keep the group; False, or a short text that says why, to drop it
    """
    kept = 0
    for rewards in list(GROUPS.values())[:USUAL]:
        with subject.trying("call it on groups of rollouts") as attempt:
            returned = _filtered(subject, subject.function, _group(rewards))
        is_verdict = returned.strip() if isinstance(returned, str) else type(returned).__name__ in ("bool", "bool_")
        attempt.require(is_verdict, f"it returned {shown(returned)} ({type(returned).__name__})")
        kept += returned is True
    return f"keeps {kept} of {USUAL} groups"


def any_group(subject: Subject) -> str:
    """It accepts rollouts that no reward could judge (None), groups of one rollout, and empty replies.

    Advice: leave out None: [r for r in rewards if r is not None]
    """
    for words, rewards in GROUPS.items():
        with subject.trying(f"call it on a group with {words}"):
            _filtered(subject, subject.function, _group(rewards))
    with subject.trying("call it on a group whose replies are empty"):
        _filtered(subject, subject.function, _group((1.0, 0.0), live=0, reply=""))
    return counted(len(GROUPS) + 1, "group")


def order(subject: Subject) -> None:
    """The order of the rollouts has no effect.

    Advice: compute the verdict from all rollouts, not from their positions
    """
    for words, rewards in list(GROUPS.items())[:USUAL]:
        one, other = (_filtered(subject, subject.function, _group(each)) for each in (rewards, rewards[::-1]))
        attempt = subject.attempt(f"call it on a group with {words}, and in the other order")
        attempt.require(one == other, f"it returned {shown(one)}, then {shown(other)}")


def _group(rewards: Sequence[float | None], *, live: int = 3, reply: str = "") -> Group:
    """A group with these rewards. Replies and lengths depend on the reward alone."""
    episodes = []
    for number, reward in enumerate(rewards):
        size = live and live + int(4 * (reward or 0.0))
        trajectory = invented_trajectory(TASK, reply or f"It is {reward}.", live=size)
        parts: dict[str, float | None] = {"correct": reward, "short": 0.5}
        score = Score(reward, parts, "", {"correct": 1.0})
        episodes.append(Episode((0, number), TASK, [trajectory], score, {}))
    return Group(0, TASK, tuple(episodes))


def _filtered(subject: Subject, function: Function, group: Group) -> Any:
    """What the filter returns for the group. Raises what it raises, as a run does."""
    returned: list[Any] = []

    @functools.wraps(function)
    def keep(*args: Any, **kwargs: Any) -> Any:
        returned.append(function(*args, **kwargs))
        return returned[-1]

    filter_group(group, [NamedFilter(subject.found.label, keep, {})], step=3)
    assert returned, "the group has rewards, so the filter was called"
    return returned[-1]
