"""Rewards that see all rollouts of a prompt at once: `def f(tasks, trajectories) -> [one number a rollout]`.

They are asked when the whole group is played, and mixed into the scores that its rollouts have already. Left out:
rewards of one rollout, which are asked while its environment still lives (`rollouts.agent`).
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import trio

from rollouts.agent import Episode
from rollouts.author_code import authors_code, shown
from rollouts.env import calls
from rollouts.env.mixing import InvalidPolicy, RewardTerm, Verdict, mix, read_verdict
from rollouts.errors import RewardError, RolloutsError, named, words_of

__all__ = ["GroupScorer", "group_scorer"]

GroupScorer = Callable[[Sequence[Episode]], Awaitable[list[Episode]]]
"""Gives the episodes of one group back with the group rewards mixed into their scores."""


def group_scorer(
    terms: Sequence[RewardTerm], on_invalid: InvalidPolicy, *, timeout_seconds: float
) -> GroupScorer | None:
    """The scorer of those `terms` that are group rewards; None where there are none.

    Rollouts that the infrastructure failed are not shown to the rewards, and keep their score (None). The scorer
    raises RewardError for what is no reward, or under the policy `raise`.
    """
    own = [term for term in terms if term.is_group]
    if not own:
        return None

    async def score(episodes: Sequence[Episode]) -> list[Episode]:
        played = [episode for episode in episodes if not episode.status.is_infrastructure]
        if not played:
            return list(episodes)
        columns = [await _judge_group(term, played, timeout_seconds) for term in own]
        scores = iter(
            mix([column[i] for column in columns], on_invalid, base=episode.score) for i, episode in enumerate(played)
        )
        return [e if e.status.is_infrastructure else e._replace(score=next(scores)) for e in episodes]

    return score


async def _judge_group(term: RewardTerm, episodes: Sequence[Episode], seconds: float) -> list[Verdict]:
    """One verdict a rollout. A reward that raises, or takes too long, could not judge any of them."""
    assert term.function is not None, f"group reward {term.alias} has no function"
    available = {
        "tasks": [episode.task for episode in episodes],
        "trajectories": [episode.trajectory for episode in episodes],
    }
    function = functools.partial(term.function, **term.settings)
    arguments = [available[name] for name in term.requests]

    def read(returned: Any) -> list[Verdict]:
        values = _one_each(term.alias, returned, len(episodes))
        return [read_verdict(term.alias, term.weight, value) for value in values]

    try:
        verdicts: list[Verdict] = await calls.call(function, *arguments, timeout_seconds=seconds, convert=read)
    except trio.TooSlowError:
        return [_no_verdict(term, f"it took longer than {seconds:g} seconds")] * len(episodes)
    except RolloutsError:
        raise
    except Exception as error:  # a stranger's reward may raise anything; the policy says what follows
        return [_no_verdict(term, named(error))] * len(episodes)
    return verdicts


def _no_verdict(term: RewardTerm, why: str) -> Verdict:
    return Verdict(term.alias, term.weight, None, {}, why, term.alias)


def _one_each(alias: str, returned: Any, count: int) -> list[Any]:
    """None judges no rollout; otherwise there has to be one value for each."""
    if returned is None:
        return [None] * count
    try:
        with authors_code():
            values = list(returned) if isinstance(returned, Iterable) and not isinstance(returned, str) else None
    except Exception as error:  # a generator runs only here
        raise RewardError(f"the group reward {alias!r} raised {words_of(error)}") from error
    if values is None or len(values) != count:
        raise RewardError(
            f"the group reward {alias!r} returned {shown(returned)} for {count} rollouts; it has to return a list with "
            "one number (or None) for each"
        )
    return values
