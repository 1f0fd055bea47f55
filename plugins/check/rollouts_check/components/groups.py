"""Checks of functions of one group: advantages, mixers, shapings, selectors and pairings; and of advantages of a batch.

A `Case` is a group of rollouts. Each kind has an adapter that calls the function on a case as a run does, and returns
one result for each rollout (a pairing: a set of pairs). So one table of checks serves all of these kinds.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rollouts.author_code import shown
from rollouts.errors import counted
from rollouts.training.algorithms import calls
from rollouts.training.algorithms.algorithm import is_batch_advantage
from rollouts_check.components.common import Function, Subject
from rollouts_check.components.tokens import Tokens, beside_mask, usual_tokens
from rollouts_check.report import Attempt, SkippedError, trying

if TYPE_CHECKING:
    from torch import Tensor

MAX_TOKENS = 32
SLACK = 1e-6
NAN = "leave NaN out of means: rewards[~rewards.isnan()]"


class Case(NamedTuple):
    """The rollouts of a group: the rewards, the sampled tokens, and whether the token limit cut them off."""

    words: str
    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    truncated: tuple[bool, ...]

    def permuted(self, order: Sequence[int]) -> Case:
        """The same rollouts in another order."""
        columns = (tuple(column[place] for place in order) for column in self[1:])
        return Case(self.words, *columns)  # type: ignore[arg-type]


def case(words: str, rewards: Sequence[float], lengths: Sequence[int] = (), truncated: Sequence[int] = ()) -> Case:
    """A case with 8 tokens a rollout, and none cut off, unless they are given."""
    count = len(rewards)
    cut = tuple(place in truncated for place in range(count))
    return Case(words, tuple(rewards), tuple(lengths or [8] * count), cut)


REWARDS = (0.2, 1.0, -0.07, 0.71, -0.53, 0.46)  # all differences are different, so that a choice has no ties
USUAL = case("six rollouts", REWARDS, (9, 4, 12, 7, 32, 5), truncated=(4,))
PAIR = case("two rollouts", (0.0, 1.0), (4, 9))
BINARY = case("rewards of 0 and 1", (1.0, 0.0, 0.0, 1.0, 0.0))
SINGLE = case("one rollout", (1.0,))
EQUAL = tuple(case(f"equal rewards of {value:g}", (value,) * 4) for value in (0.0, 1.0, 0.3))
EXTREMES = (
    case("rewards of 1e6 and -1e6", (1e6, -1e6, 1e6, 0.0)),
    case("rewards that differ by rounding", (0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2)),
    case("very small rewards", (1e-12, 0.0, 2e-12)),
    case("32 rollouts", [place % 7 / 7 for place in range(32)], [place + 1 for place in range(32)]),
    case("rollouts without tokens", (0.0, 1.0, 0.5), (0, 0, 3)),
)


def trial(subject: Subject, function: Function) -> Any:
    """The results for usual groups."""
    return [_results(subject, function, each) for each in (USUAL, PAIR)]


def values(subject: Subject) -> str:
    """It returns one finite number for each rollout (an advantage, also one for each turn); a selector one bool for
    each, a pairing pairs of positions.
    """
    return _try_each(subject, (USUAL, PAIR, BINARY))


def one_rollout(subject: Subject) -> str:
    """It accepts a group with one rollout."""
    return _try_each(subject, (SINGLE,))


def equal_rewards(subject: Subject) -> str:
    """It accepts a group whose rewards are equal: a deviation of 0 is no divisor."""
    return _try_each(subject, EQUAL)


def finite(subject: Subject) -> str:
    """It accepts extremes: large, small and nearly equal rewards, many rollouts, rollouts without tokens."""
    return _try_each(subject, EXTREMES)


def order(subject: Subject) -> None:
    """The order of the rollouts has no effect: in another order they get the same results.

    Advice: compute the result of a rollout from its reward and the group, not from its position
    """
    first = _results(subject, subject.function, USUAL)
    for places in ((5, 4, 3, 2, 1, 0), (2, 0, 5, 1, 4, 3)):
        again = _results(subject, subject.function, USUAL.permuted(places))
        wanted = _permuted(first, places)
        attempt = subject.attempt(f"call it on {USUAL.words} in the order {list(places)}")
        attempt.require(_same(again, wanted), f"the results were {shown(wanted)}, then {shown(again)}")


def better(subject: Subject) -> None:
    """A better rollout is not treated worse: a higher reward with equal lengths gives no lower result.

    Advice: correct the sign: what is better must be reinforced
    """
    function = subject.function
    if _is_batch(subject):
        raise SkippedError("it names `batch`: the results of tokens are not compared")
    same = case("equal lengths", REWARDS)
    found = _results(subject, function, same)
    if subject.kind == "pairings":
        pairs = [(same.rewards[chosen], same.rewards[rejected]) for chosen, rejected in sorted(found)]
        worse = [f"the chosen reward {one:g} is below the rejected {two:g}" for one, two in pairs if one < two]
    else:
        means = [statistics.fmean(each) if isinstance(each, list) else each for each in found]
        both = sorted(zip(same.rewards, means, strict=True))
        worse = [
            f"the reward {one:g} gives {shown(ours)}, and the higher one {two:g} gives {shown(theirs)}"
            for (one, ours), (two, theirs) in itertools.pairwise(both)
            if theirs < ours - SLACK
        ]
    Attempt("compare rollouts that differ in their rewards only", function).require(not worse, next(iter(worse), ""))


def masked(subject: Subject) -> None:
    """An advantage of the whole batch does not depend on masked positions, nor on rollouts that were not judged.

    Advice: leave masked positions out: name `mask`, and write x.where(mask > 0, 0.0)
    """
    import torch

    if not _is_batch(subject):
        raise SkippedError("it sees rewards, and no tokens")
    function, tokens = subject.function, usual_tokens(subject.random("tokens"))
    with trying("call it on a batch in which a rollout was not judged: its reward is NaN", function, change=NAN):
        first = _of_tokens(function, tokens)
    other = _of_tokens(function, beside_mask(tokens, subject.random("mask")))
    is_same = all(torch.allclose(one, two, atol=SLACK) for one, two in zip(first, other, strict=True))
    subject.attempt("change the inputs at masked positions").require(is_same, "the advantages of other tokens changed")
    rewards = torch.tensor([1.0, float("nan"), 0.5, -1.0, float("nan")], dtype=torch.float64)
    mask = tokens.inputs["mask"].where(tokens.inputs["rollout_index"] != 1, 0.0)
    turns = [[] if number in (1, 4) else own for number, own in enumerate(tokens.inputs["turn_rewards"])]
    with trying("call it with a rollout whose reward is NaN and whose tokens are masked", function, change=NAN):
        _of_tokens(function, tokens.changed(rewards=rewards, turn_rewards=turns, mask=mask))


# --- calls ------------------------------------------------------------------------------------------------------------


def _try_each(subject: Subject, cases: Sequence[Case]) -> str:
    """Call the function on each case. Raises FailedError for a result that a run refuses."""
    change = {
        "selectors": "return one bool for each reward that it received, such as `rewards >= 1.0`",
        "pairings": "return a list of (chosen, rejected): two different positions in `rewards`",
    }.get(subject.kind, "return a tensor with one finite number for each reward that it received")
    for each in cases:
        with trying(f"call it on {each.words}", subject.function, change=change):
            _results(subject, subject.function, each)
    return counted(len(cases), "group")


def _is_batch(subject: Subject) -> bool:
    return subject.kind == "advantages" and is_batch_advantage(subject.function)


def _results(subject: Subject, function: Function, group: Case) -> Any:
    """What the function returns for this group: a list with one value for each rollout; a pairing: a set of pairs."""
    _, rewards, lengths, truncated = group
    match subject.kind:
        case "advantages" if _is_batch(subject):
            return _of_batch(subject, function, group)
        case "advantages":
            return calls.group_advantages(function, rewards, lengths=lengths, turn_rewards=_turn_rewards(group))
        case "mixers":  # two rewards of 0 or more: of two rollouts, the better one is better in both, or equal
            above = [reward - min(rewards) for reward in rewards]
            parts = [{"first": each, "second": min(each, 0.5)} for each in above]
            return calls.mixed_rewards(function, parts, {"first": 1.0, "second": 0.5}, step=3)
        case "shapings":
            more: dict[str, Any] = {"lengths": lengths, "truncated": truncated, "max_tokens": MAX_TOKENS, "step": 3}
            return calls.shaped_rewards(function, rewards, **more)
        case "selectors":
            return calls.selected(function, rewards, [True] * len(rewards), lengths=lengths, step=3)
        case _:
            return set(calls.paired(function, rewards, [True] * len(rewards), lengths=lengths, step=3))


def _turn_rewards(group: Case) -> list[list[float]]:
    """One, two or three turns for each rollout, which share its reward."""
    counts = [1 + length % 3 for length in group.lengths]
    return [[reward / count] * count for reward, count in zip(group.rewards, counts, strict=True)]


def _of_batch(subject: Subject, function: Function, group: Case) -> list[list[float]]:
    """The advantages of the tokens of each rollout, in a batch that has this group alone."""
    import torch

    usual, by_turn = usual_tokens(subject.random("tokens")), _turn_rewards(group)
    tokens = [(number, place) for number, length in enumerate(group.lengths) for place in range(length)]
    if not tokens:
        return [[] for _ in group.rewards]
    places = [place % len(usual.rows) for _, place in tokens]
    turns = [place * len(by_turn[number]) // group.lengths[number] for number, place in tokens]
    rollouts = torch.tensor([number for number, _ in tokens])
    streams = {name: stream[places] for name, stream in usual.streams.items()}
    streams |= {"rollout_index": rollouts, "group_index": rollouts * 0, "mask": torch.ones(len(tokens)).double()}
    whole = {"rewards": torch.tensor(group.rewards, dtype=torch.float64), "turn_rewards": by_turn, "step": 3}
    found, _ = calls.batch_advantages(function, {**streams, "turn_index": torch.tensor(turns), **whole}, len(tokens))
    return [found[rollouts == number].tolist() for number in range(len(group.rewards))]


def _of_tokens(function: Function, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Advantages and the critic's targets [T]; 0 where they are masked."""
    found, returns = calls.batch_advantages(function, tokens.inputs, len(tokens.rows))
    return found, found * 0 if returns is None else returns


def _permuted(found: Any, places: Sequence[int]) -> Any:
    """The results for the rollouts in another order."""
    if isinstance(found, set):
        where = {place: number for number, place in enumerate(places)}
        return {(where[chosen], where[rejected]) for chosen, rejected in found}
    return [found[place] for place in places]


def _same(one: Any, other: Any) -> bool:
    """Whether two results are equal, up to rounding."""
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other) if isinstance(one, set) else abs(one - other) <= SLACK * max(1.0, abs(one))
