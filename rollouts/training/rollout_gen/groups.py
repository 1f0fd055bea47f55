"""Groups: all rollouts of one prompt, from episodes to samples.

In an environment with roles, each role of a prompt is a group of its own (`role_groups`): what a role earns is compared
with what the same role earned in the other episodes. Then come the rewards that see the whole group (`group_scorer`),
the filters (`filter_group`), and numbered samples for the batch (`group_samples`). Not here: rewards of single
rollouts, which run while the environment is open (`rollouts.agent.episode`), and metrics (`steps`).

A `LiveGroup` has begun, but no step has returned it. Its state in a checkpoint is the group's number and step, the
place of its task in the data buffer, its finished episodes, and the suspended episodes whose environment has `state()`
and `restore()`. Other episodes restart from their first turn, with the same number and seed. Not here: when they are
played (`manager`).
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec
import trio

from rollouts.author_code import authors_code, printable, shown, why_no_list, with_place
from rollouts.env import calls, mixing
from rollouts.env.mixing import InvalidPolicy, RewardTerm, Verdict, turn_rewards
from rollouts.error_log import report
from rollouts.errors import RewardError, RolloutsError, RunError, words_of
from rollouts.inference.suspend import SuspendedEpisode
from rollouts.lazy import LazyValues
from rollouts.plugins.signature import bind, call_with
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.rollout_gen.pool import Job
from rollouts.training.samples import episode_samples
from rollouts.types import Episode, Sample, Score, Status, Task


class Group(NamedTuple):
    """All rollouts of one prompt, or those of one role.

    Attributes:
        number: of the prompt; unique in the run, but the roles of a prompt share it
        dropped: why a filter dropped the group; None if it is kept
        samples: the rows [G] of a `generate_fn`; empty if the rows come from the episodes
        role: the role of all rollouts; empty without roles
    """

    number: int
    task: Task
    episodes: tuple[Episode, ...]
    dropped: str | None = None
    samples: tuple[Sample, ...] = ()
    role: str = ""

    @property
    def rewards(self) -> list[float | None]:
        """The reward of each rollout [G]; None if it failed or could not be judged."""
        return [episode.score.value for episode in self.episodes]

    def turn_rewards(self, rewards: Sequence[float | None]) -> list[list[float]]:
        """The reward of each turn of each rollout [G]; they add up to `rewards`. Empty for a rollout without one."""
        return [
            [] if reward is None else turn_rewards(reward, episode.score.turns, episode.trajectory.turns)
            for reward, episode in zip(rewards, self.episodes, strict=True)
        ]

    @property
    def lengths(self) -> list[int]:
        """The number of sampled tokens of each rollout [G]; for a `generate_fn`, the tokens with a mask above 0."""
        if self.samples:
            return [sum(weight > 0 for weight in sample.loss_mask) for sample in self.samples]
        return [sum(trajectory.sampled_count for trajectory in episode.trajectories) for episode in self.episodes]


def role_groups(group: Group) -> list[Group]:
    """One group for each role of these episodes; without roles the group itself. An episode that failed before it had
    roles is in each group.
    """
    split = [episode.by_role for episode in group.episodes]
    roles = dict.fromkeys(each.role for own in split for each in own if each.role)
    found = []
    for role in roles:
        episodes = [each._replace(role=role) for own in split for each in own if each.role in (role, "")]
        found.append(group._replace(episodes=tuple(episodes), role=role))
    return found or [group]


def group_samples(groups: Sequence[Group]) -> list[Sample]:
    """All rows of these groups. `rollout_index` counts from 0, in the order of groups and rollouts."""
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
    """A `generate_fn`'s sample with its score and indices. The mask is 0 if the sample must not be trained."""
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
    """Raise RunError, with the most common reasons, if no episode could be judged. It is a RewardError if a reward
    returned None.
    """
    if not episodes or any(episode.score.value is not None for episode in episodes):
        return
    whys = [episode.trajectory.error or episode.score.why or "its reward is None" for episode in episodes]
    reasons = Counter(f"{episode.status.value}: {why}" for episode, why in zip(episodes, whys, strict=True))
    tally = "\n".join(f"  {count} x {reason}" for reason, count in reasons.most_common(3))
    none = f"not one of the {len(episodes)} rollouts of {what} could be judged:\n{tally}"
    if len(episodes) == 1:
        none = f"the only rollout of {what} could not be judged:\n{tally}"
    if any(mixing.RETURNED_NONE in reason for reason in reasons):
        raise RewardError(f"{none}\n{mixing.FORGOTTEN}\nto count such rollouts as 0: --on-invalid-reward zero")
    raise RunError(none)


# --- filters ----------------------------------------------------------------------------------------------------------


class NamedFilter(NamedTuple):
    """A named group filter and its settings. It returns True to keep the group, or False or a reason to drop it."""

    name: str
    function: object
    settings: dict[str, object]


SeeRewards = Callable[[Group, int], list[float | None]]
"""Computes the rewards [G] that the advantage will get, from a group and a step."""


def filter_group(group: Group, filters: Sequence[NamedFilter], *, step: int, see: SeeRewards | None = None) -> Group:
    """Return the group, with `dropped` set by the first filter that drops it, or if no reward could judge any of its
    rollouts.

    `see` None: filters get the group's own rewards.
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

    available = LazyValues(
        rewards=lambda: rewards,
        scores=lambda: group.rewards,
        parts=lambda: [episode.score.parts for episode in group.episodes],
        samples=samples,  # made on first use, because samples copy every token
        trajectories=lambda: [episode.trajectory for episode in group.episodes],
        step=lambda: step,
    )
    for name, function, settings in filters:
        try:
            reason = drop_reason(name, call_with(function, available, settings))
        except RolloutsError:
            raise
        except Exception as error:  # a filter may raise anything
            raise RunError(f"the filter {name} raised {words_of(error)}") from error
        if reason is not None:
            return group._replace(dropped=reason)
    return group


def drop_reason(name: str, returned: Any) -> str | None:
    """Why the filter drops the group, from its return value; None to keep it. Raises RunError for a value that is
    neither bool nor text.
    """
    if isinstance(returned, str):
        return printable(returned) or name
    try:
        with authors_code():
            return None if returned else name
    except Exception as error:  # an array of several numbers has no truth value
        raise RunError(f"the filter {name} returned {shown(returned)}, which is no bool: {words_of(error)}") from error


# --- rewards of a whole group: `def f(tasks, trajectories) -> [one number a rollout]` ---------------------------------

GroupScorer = Callable[[Sequence[Sequence[Episode]]], Awaitable[list[list[Episode]]]]
"""Returns the episodes of these groups, with the group rewards mixed into their scores."""


def group_scorer(
    terms: Sequence[RewardTerm], on_invalid: InvalidPolicy, *, timeout_seconds: float
) -> GroupScorer | None:
    """A scorer for the group rewards among `terms`; None if there are none.

    The rewards do not see rollouts with an infrastructure failure, whose score stays None. Each role of a group with
    roles is a group for them. A reward that names `groups` is called once for all groups, and has the deadlines of all
    of them together. The scorer raises RewardError for an invalid reward, and for any failed reward under the policy
    `raise`.
    """
    own = [term for term in terms if term.is_group]
    if not own:
        return None

    async def score_units(units: Sequence[Sequence[Episode]]) -> list[list[Episode]]:
        played = [[episode for episode in unit if not episode.status.is_infrastructure] for unit in units]
        asked = [unit for unit in played if unit]
        columns = [iter(await _ask_groups(term, asked, timeout_seconds)) for term in own]
        scored: list[list[Episode]] = []
        for unit, known in zip(units, played, strict=True):
            rows = zip(*(next(column) for column in columns), strict=True) if known else ()
            scores = iter([mixing.mix(row, on_invalid, base=e.score) for e, row in zip(known, rows, strict=True)])
            scored.append([e if e.status.is_infrastructure else e._replace(score=next(scores)) for e in unit])
        return scored

    async def score(groups: Sequence[Sequence[Episode]]) -> list[list[Episode]]:
        split = [_role_units(episodes) for episodes in groups]
        scored = iter(await score_units([list(unit.values()) for units in split for unit in units]))
        return [
            _with_units(episodes, [(unit, next(scored)) for unit in units])
            for episodes, units in zip(groups, split, strict=True)
        ]

    return score


def _role_units(episodes: Sequence[Episode]) -> list[dict[int, Episode]]:
    """What the rewards see as one group: the episodes by their place; with roles, those of one role."""
    roles = dict.fromkeys(result.role for episode in episodes for result in episode.roles)
    if not roles:
        return [dict(enumerate(episodes))]
    split = [(place, own) for place, whole in enumerate(episodes) for own in whole.by_role]
    return [{place: own for place, own in split if own.role == role} for role in roles]


def _with_units(
    episodes: Sequence[Episode], scored: Sequence[tuple[dict[int, Episode], list[Episode]]]
) -> list[Episode]:
    """The episodes of a group with the scores of its units."""
    if not any(episode.roles for episode in episodes):
        return scored[0][1]
    scores: list[dict[str, Score]] = [{} for _ in episodes]
    for unit, judged in scored:
        for place, own in zip(unit, judged, strict=True):
            scores[place][own.role] = own.score
    return [e.with_scores(own) if e.roles else e for e, own in zip(episodes, scores, strict=True)]


async def _ask_groups(term: RewardTerm, groups: Sequence[Sequence[Episode]], seconds: float) -> list[list[Verdict]]:
    """One verdict for each rollout of each group."""
    if "groups" not in term.requests:
        return [await _ask_group(term, episodes, seconds) for episodes in groups]
    if not groups:
        return []
    trajectories = [[episode.trajectory for episode in episodes] for episodes in groups]

    def read(returned: Any) -> list[list[Verdict]]:
        values = _one_each(term.alias, returned, len(groups), "group", "a list of one list")
        return [_read_group(term, episodes, value) for episodes, value in zip(groups, values, strict=True)]

    found = await _ask(term, [trajectories], seconds * len(groups), read)
    return [[found] * len(episodes) for episodes in groups] if isinstance(found, Verdict) else found


async def _ask_group(term: RewardTerm, episodes: Sequence[Episode], seconds: float) -> list[Verdict]:
    """One verdict for each rollout of a group."""
    available = {"tasks": [e.task for e in episodes], "trajectories": [e.trajectory for e in episodes]}
    arguments = [available[name] for name in term.requests]
    found = await _ask(term, arguments, seconds, functools.partial(_read_group, term, episodes))
    return [found] * len(episodes) if isinstance(found, Verdict) else found


def _read_group(term: RewardTerm, episodes: Sequence[Episode], returned: Any) -> list[Verdict]:
    values = _one_each(term.alias, returned, len(episodes))
    verdicts = [mixing.read_verdict(term.alias, term.weight, value) for value in values]
    counts = [episode.trajectory.turns for episode in episodes]
    checked = map(mixing.check_turns, verdicts, counts)
    return [mixing.with_reason(verdict, term.function) for verdict in checked]


async def _ask(term: RewardTerm, arguments: Sequence[Any], seconds: float, read: Callable[[Any], Any]) -> Any:
    """What the reward returned, as `read` reads it. If it raises or takes too long: the verdict of each rollout."""
    assert term.function is not None, f"group reward {term.alias} has no function"
    function = bind(term.function, term.settings)
    try:
        return await calls.call(function, *arguments, timeout_seconds=seconds, convert=read)
    except trio.TooSlowError:
        why = f"it took longer than {seconds:g} seconds"
    except RewardError as error:
        raise RewardError(with_place(error, term.function)) from error
    except RolloutsError:
        raise
    except Exception as error:  # a reward may raise anything; the policy decides what happens
        why = report(error, f"the group reward {term.alias}")
    return Verdict(term.alias, term.weight, None, {}, why, term.alias)


def _one_each(
    alias: str, returned: Any, count: int, of: str = "rollout", expected: str = "a list of one number (or None)"
) -> list[Any]:
    """The values of a group reward, one for each rollout or each group. None means that no rollout was judged."""
    if returned is None:
        return [None] * count
    try:
        with authors_code():
            values = None if why_no_list(returned) else list(returned)
    except Exception as error:  # a generator runs its code here
        raise RewardError(f"the group reward {alias!r} raised {words_of(error)}") from error
    if values is None or len(values) != count:
        given = f"the group reward {alias!r} returned {shown(returned)} for {count} {of}s"
        raise RewardError(f"{given}; expected {expected} for each")
    return values


class JudgesGroups(Protocol):
    """What happens to the finished groups of a step."""

    async def judge(self, groups: Sequence[Group], step: int) -> list[Group]:
        """The groups with their final rewards, and with `dropped` set if one is not trained."""


class GroupRules(NamedTuple):
    """Implements JudgesGroups: rewards of whole groups, then filters.

    Attributes:
        filters: group filters, applied in order
        see_rewards: computes the rewards that filters get, from a group and a step; None: the group's own
        score_groups: adds group rewards; None if there are none
    """

    filters: Sequence[NamedFilter] = ()
    see_rewards: SeeRewards | None = None
    score_groups: GroupScorer | None = None

    async def judge(self, groups: Sequence[Group], step: int) -> list[Group]:
        """The groups with their group rewards, and with `dropped` set if a filter drops them."""
        if self.score_groups is not None:
            scored = await self.score_groups([group.episodes for group in groups])
            groups = [group._replace(episodes=tuple(own)) for group, own in zip(groups, scored, strict=True)]
        return [self.filtered(group, step) for group in groups]

    def filtered(self, group: Group, step: int) -> Group:
        """The group, with `dropped` set if a filter drops it."""
        return filter_group(group, self.filters, step=step, see=self.see_rewards)


NO_RULES = GroupRules()


# --- an unfinished group ----------------------------------------------------------------------------------------------


_NO_TASK = Task("")  # replaces the task in a checkpoint; the buffer yields the task again


@dataclass
class LiveGroup:
    """An unfinished group.

    Attributes:
        size: how many jobs it has
        step: the step in which the task was drawn
        position: the task's place in the data buffer
        is_reported: whether the task sampler has seen the rewards
        outcomes: the results of finished jobs, by rollout
        judged: the group of each role, or the only one, with rewards and filters applied; empty until then
    """

    number: int
    task: Task
    size: int
    step: int
    position: dict[str, Any]
    outcomes: dict[int, Any] = field(default_factory=dict)
    suspended: dict[int, SuspendedEpisode] = field(default_factory=dict)
    judged: tuple[Group, ...] = ()
    is_reported: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether all jobs of the group are finished."""
        return len(self.outcomes) == self.size

    @property
    def is_kept(self) -> bool:
        """Whether the group is judged, and at least one role of it is trained."""
        return any(group.dropped is None for group in self.judged)

    @property
    def spread(self) -> float:
        """The standard deviation of the rewards; of several roles, the largest one."""
        rewards = [[reward for reward in group.rewards if reward is not None] for group in self.judged]
        return max((statistics.pstdev(known) for known in rewards if known), default=0.0)

    @property
    def jobs(self) -> list[Job]:
        """The unfinished jobs."""
        left = (index for index in range(self.size) if index not in self.outcomes)
        return [Job(self.task, (self.number, index), self.suspended.get(index)) for index in left]


def drop_all_but_best(groups: Sequence[LiveGroup], count: int) -> None:
    """Drop the kept groups beyond `count`: those whose rewards differ least, and of equal ones the last."""
    kept = sorted((group for group in groups if group.is_kept), key=lambda group: (-group.spread, group.number))
    for group in kept[count:]:
        group.judged = tuple(each._replace(dropped=each.dropped or "not_best") for each in group.judged)


def group_state(group: LiveGroup, suspended: Mapping[tuple[int, ...], SuspendedEpisode]) -> dict[str, Any]:
    """The group as plain data. `suspended` are episodes that can be restored, by (group, rollout)."""
    over = {
        index: with_task(episode, _NO_TASK)
        for index, episode in group.outcomes.items()
        if isinstance(episode, Episode) and all(each.task == episode.task for each in episode.trajectories)
    }
    waiting = {order[1]: each for order, each in suspended.items() if order[0] == group.number}
    return {
        "number": group.number,
        "step": group.step,
        "position": group.position,
        "reported": group.is_reported,
        "episodes": _plain(over),
        "held": _plain({**group.suspended, **waiting}),
    }


def restore_groups(states: list[dict[str, Any]], data_buffer: DataBuffer, size: int) -> list[LiveGroup]:
    """Restore the groups of a checkpoint, with their tasks. The buffer's own state does not change."""
    states = sorted(states, key=lambda each: each["number"])
    tasks = data_buffer.tasks_at([(state["position"], state["step"]) for state in states])
    groups = []
    for task, state in zip(tasks, states, strict=True):
        group = LiveGroup(state["number"], task, size, state["step"], state["position"])
        group.is_reported = state.get("reported", False)
        episodes = {index: msgspec.convert(episode, Episode) for index, episode in state["episodes"]}
        group.outcomes = {index: with_task(each, task) for index, each in episodes.items() if index < size}
        group.suspended = {index: msgspec.convert(held, SuspendedEpisode) for index, held in state["held"]}
        groups.append(group)
    return groups


def _plain(values: Mapping[int, Any]) -> list[list[Any]]:
    """Pairs of number and plain data. A value that cannot be encoded is left out; its episode is played again."""
    pairs = []
    for index, value in values.items():
        try:
            pairs.append([index, msgspec.json.decode(msgspec.json.encode(value))])
        except (TypeError, ValueError, RecursionError):  # an environment's own object in a message or a metric
            continue
    return pairs


def with_task(episode: Episode, task: Task) -> Episode:
    """The episode with another task."""
    trajectories = [msgspec.structs.replace(each, task=task) for each in episode.trajectories]
    return episode._replace(task=task, trajectories=trajectories)
