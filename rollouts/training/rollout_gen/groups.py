"""Groups: all rollouts of one prompt, on the way from episodes to samples.

A group gets the rewards that see all of its rollouts (`group_scorer`), passes the filters (`filter_group`), and becomes
samples that are numbered for the batch (`group_samples`). Left out: the rewards of one rollout, which are asked while
its environment still lives (`rollouts.agent.episode`), and what is counted (`metrics`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple

import trio

from rollouts.author_code import authors_code, printable, shown
from rollouts.env import calls
from rollouts.env.mixing import InvalidPolicy, RewardTerm, Verdict, mix, read_verdict
from rollouts.error_log import report
from rollouts.errors import RewardError, RolloutsError, RunError, words_of
from rollouts.plugins.signature import bind, call_with
from rollouts.training.samples import episode_samples
from rollouts.types import Episode, Sample, Status, Task


class Group(NamedTuple):
    """All rollouts of one prompt. `number` is unique in the run; `dropped` says why a filter took the group out of
    training; `samples` are its rows [G] where a `generate_fn` made them, and empty where they are the episodes'.
    """

    number: int
    task: Task
    episodes: tuple[Episode, ...]
    dropped: str | None = None
    samples: tuple[Sample, ...] = ()

    @property
    def rewards(self) -> list[float | None]:
        """One reward a rollout [G]; None where it failed or could not be judged."""
        return [episode.score.value for episode in self.episodes]

    @property
    def lengths(self) -> list[int]:
        """How many tokens of each rollout were sampled [G]; of a `generate_fn`'s samples those that it marked."""
        if self.samples:
            return [sum(weight > 0 for weight in sample.loss_mask) for sample in self.samples]
        return [sum(trajectory.sampled_count for trajectory in episode.trajectories) for episode in self.episodes]


def group_samples(groups: Sequence[Group]) -> list[Sample]:
    """All rows of these groups, numbered 0..N-1 by rollout in the order of groups and rollouts."""
    samples: list[Sample] = []
    rollout_index = 0
    for group_index, group in enumerate(groups):
        for index, episode in enumerate(group.episodes):
            if group.samples:
                samples.append(_numbered(group.samples[index], episode, group_index, rollout_index))
            else:
                samples.extend(episode_samples(episode, group_index, rollout_index))
            rollout_index += 1
    return samples


def _numbered(sample: Sample, episode: Episode, group_index: int, rollout_index: int) -> Sample:
    """A sample that a function made, with its score and its place; its mask is zero where it may not be trained on."""
    reward = None if episode.status.is_infrastructure else episode.score.value
    is_live = episode.status is Status.COMPLETED and reward is not None
    return dataclasses.replace(
        sample,
        loss_mask=sample.loss_mask if is_live else [0.0] * len(sample.tokens),
        reward=reward,
        status=episode.status,
        parts=dict(episode.score.parts),
        group_index=group_index,
        rollout_index=rollout_index,
    )


def check_judged(episodes: Sequence[Episode], what: str) -> None:
    """Raise RunError, with the commonest reasons, where not one of these episodes could be judged."""
    if not episodes or any(episode.score.value is not None for episode in episodes):
        return
    reasons = Counter(
        f"{episode.status.value}: {episode.trajectory.error or episode.score.why or 'its reward is None'}"
        for episode in episodes
    )
    tally = "\n".join(f"  {count} x {reason}" for reason, count in reasons.most_common(3))
    raise RunError(f"not one of the {len(episodes)} rollouts of {what} could be judged:\n{tally}")


# --- filters ----------------------------------------------------------------------------------------------------------


class Filter(NamedTuple):
    """A named group filter and its settings. It gives True to keep, False or a reason to drop."""

    name: str
    function: object
    settings: dict[str, object]


class _Lazy(dict[str, Any]):
    """What a filter may name; each value is computed when a filter names it. Samples copy every token."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)()


def filter_group(
    group: Group, filters: Sequence[Filter], *, step: int, see: Callable[[Group, int], list[float | None]] | None = None
) -> Group:
    """The group, with `dropped` set by the first filter that refuses it. A group that no reward could judge is
    dropped too. `see` gives the rewards [G] that the advantage will see, of a group and a step; None: the group's own.
    """
    if all(reward is None for reward in group.rewards):
        return group._replace(dropped="no_reward")
    if not filters:
        return group
    rewards = group.rewards if see is None else see(group, step)

    @functools.cache
    def samples() -> list[Sample]:
        return [
            dataclasses.replace(each, reward=None if each.reward is None else rewards[each.rollout_index or 0])
            for each in group_samples([group])
        ]

    available = _Lazy(
        rewards=lambda: rewards,
        scores=lambda: group.rewards,
        parts=lambda: [episode.score.parts for episode in group.episodes],
        samples=samples,
        trajectories=lambda: [episode.trajectory for episode in group.episodes],
        step=lambda: step,
    )
    for name, function, settings in filters:
        try:
            reason = drop_reason(name, call_with(function, available, settings))
        except RolloutsError:
            raise
        except Exception as error:  # the author's code may raise anything
            raise RunError(f"the filter {name} raised {words_of(error)}") from error
        if reason is not None:
            return group._replace(dropped=reason)
    return group


def drop_reason(name: str, returned: Any) -> str | None:
    """Why the filter, which returned this, drops the group; None: it is kept. Raises RunError for what is no bool."""
    if isinstance(returned, str):
        return printable(returned) or name
    try:
        with authors_code():
            return None if returned else name
    except Exception as error:  # an array of several numbers is neither true nor false
        raise RunError(f"the filter {name} returned {shown(returned)}, which is no bool: {words_of(error)}") from error


# --- rewards of a whole group: `def f(tasks, trajectories) -> [one number a rollout]` ---------------------------------

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

    async def score(episodes: Sequence[Episode]) -> list[Episode]:
        played = [episode for episode in episodes if not episode.status.is_infrastructure]
        columns = [await _ask_group(term, played, timeout_seconds) for term in own] if played else []
        scores = iter([mix(row, on_invalid, base=e.score) for e, *row in zip(played, *columns, strict=True)])
        return [e if e.status.is_infrastructure else e._replace(score=next(scores)) for e in episodes]

    return score if own else None


async def _ask_group(term: RewardTerm, episodes: Sequence[Episode], seconds: float) -> list[Verdict]:
    """One verdict a rollout. A reward that raises, or takes too long, could not judge any of them."""
    assert term.function is not None, f"group reward {term.alias} has no function"
    available = {"tasks": [e.task for e in episodes], "trajectories": [e.trajectory for e in episodes]}
    function = bind(term.function, term.settings)
    arguments = [available[name] for name in term.requests]

    def read(returned: Any) -> list[Verdict]:
        values = _one_each(term.alias, returned, len(episodes))
        return [read_verdict(term.alias, term.weight, value) for value in values]

    try:
        verdicts: list[Verdict] = await calls.call(function, *arguments, timeout_seconds=seconds, convert=read)
        return verdicts
    except trio.TooSlowError:
        why = f"it took longer than {seconds:g} seconds"
    except RolloutsError:
        raise
    except Exception as error:  # the author's code may raise anything; the policy decides what follows
        why = report(error, f"the group reward {term.alias}")
    return [Verdict(term.alias, term.weight, None, {}, why, term.alias)] * len(episodes)


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
        given = f"the group reward {alias!r} returned {shown(returned)} for {count} rollouts"
        raise RewardError(f"{given}; expected a list of one number (or None) for each")
    return values
