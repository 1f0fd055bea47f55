"""Turn samples into batch rows, and rows into microbatches. Pure functions on lists; no torch.

`make_batch` sets u and D for the whole batch (see algorithms/aggregation.py) before anything is split, so a split never
changes a result. A microbatch is a forest of rows (`forest`): what several of its rows begin with counts once.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from rollouts.errors import TrainingError
from rollouts.training.algorithms.aggregation import Masks, aggregate
from rollouts.training.batches import Row, TrainBatch, Unit
from rollouts.training.forest import count_nodes, in_tree_order
from rollouts.types import Sample

Keep = Literal["", "rollout", "pair", "group"]

# Flat rows get microbatches of their own if that saves the work of so many tokens. On a GPU, a pass through a small
# model mostly costs kernel launches, as much as some thousand tokens.
PASS_SAVING_MIN = 32
PASS_SAVING_MIN_GPU = 4096


def make_batch(
    samples: Sequence[Sample],
    advantages: Sequence[float | Sequence[float]],
    *,
    aggregation: str | Callable[..., Any],
    step: int,
    temperature: float = 1.0,
    max_tokens: int | None = None,
    algorithm: str = "main",
    rewards: Sequence[float | None] | None = None,
    trained: Sequence[bool] | None = None,
    pairs: Sequence[tuple[int, int]] | None = None,
) -> TrainBatch:
    """Make one batch of all samples.

    Raises ConfigError if the aggregation cannot be used. Asserts that the fields of each sample have one length.

    Args:
        advantages: [N], indexed by `rollout_index` (0..N-1): a number, or one for each turn of the rollout. A sample
            without a `rollout_index` is a rollout of its own; its index is its position in the list
        max_tokens: L_max of the aggregation dr_grpo
        rewards: [N], the shaped rewards, if they differ from the samples' rewards; a sample without a reward is not
            trained
        trained: [N], False for rollouts that are not trained; None trains all
        pairs: (chosen, rejected) rollouts. The batch then has the rows of the pairs, with advantages +1 and -1. The
            rows of a rollout in two pairs appear twice
    """
    numbered = [(number if s.rollout_index is None else s.rollout_index, s) for number, s in enumerate(samples)]
    for rollout, _ in numbered:
        assert 0 <= rollout < len(advantages), f"rollout_index {rollout} but {len(advantages)} advantages"
    # A sample without a group is a group of its own. Negative numbers cannot clash with given ones.
    groups = [-1 - rollout if s.group_index is None else s.group_index for rollout, s in numbered]
    masks = [_live_mask(s, trained is None or trained[rollout]) for rollout, s in numbered]
    if rewards is None:
        given = {rollout: s.reward for rollout, s in numbered if s.reward is not None}
        rewards = [given.get(rollout) for rollout in range(len(advantages))]
    known = [math.nan if reward is None else float(reward) for reward in rewards]
    rows: list[Row] = []
    segments: Counter[int] = Counter()
    for (rollout, sample), mask, group in zip(numbered, masks, groups, strict=True):
        rows.append(
            Row(
                tokens=list(sample.tokens),
                loss_mask=mask,
                weights=[],
                advantages=_spread(advantages[rollout], sample, mask),
                rollout_logprobs=None if sample.rollout_log_probs is None else list(sample.rollout_log_probs),
                rollout_index=rollout,
                group_index=group,
                segment=segments[rollout],
                role=str(sample.metadata.get("role", "")),
                turns=list(sample.turns),
            )
        )
        segments[rollout] += 1
    if pairs is not None:
        rows = _pair_rows(rows, pairs)
    denominator, unit = weigh_rows(rows, aggregation, max_tokens)
    return TrainBatch(rows, denominator, known, step, algorithm, temperature, unit)


def _spread(given: float | Sequence[float], sample: Sample, mask: Sequence[float]) -> list[float]:
    """The advantage of each token [L]; 0 where it is not live. With a number for each turn, a token gets its turn's."""
    if not isinstance(given, Sequence):
        assert math.isfinite(given), f"rollout {sample.rollout_index} has advantage {given}"
        return [given if weight > 0 else 0.0 for weight in mask]
    assert len(given) and all(map(math.isfinite, given)), f"rollout {sample.rollout_index} has advantages {given}"
    last = len(given) - 1
    of_token = turn_of_tokens(sample.turns, len(mask))
    return [float(given[min(turn, last)]) if weight > 0 else 0.0 for turn, weight in zip(of_token, mask, strict=True)]


def turn_of_tokens(turns: Sequence[tuple[int, int]], length: int) -> list[int]:
    """The turn of each token of a row [L], from (turn, first token) of each reply. Tokens before the first reply count
    as part of it; without any, all are of turn 0.

    >>> turn_of_tokens([(1, 2), (2, 4)], 5)
    [1, 1, 1, 1, 2]
    """
    if not turns:
        return [0] * length
    starts = [start for _, start in turns]
    assert starts == sorted(starts), f"the turns of a row begin at {starts}; expected ascending positions"
    ends = [*starts[1:], length]
    found = [turn for (turn, start), end in zip(turns, ends, strict=True) for _ in range(start, end)]
    return [turns[0][0]] * starts[0] + found


def weigh_rows(
    rows: Sequence[Row], aggregation: str | Callable[..., Any], max_tokens: int | None = None
) -> tuple[float, Unit]:
    """Set `weights` (u) of the rows as one batch. Returns D, and the unit of which a loss returns one value each."""
    names = ("loss_mask", "rollout_index", "group_index", "pair_index")
    columns = ([getattr(row, name) for row in rows] for name in names)
    given = aggregate(aggregation, Masks._make([*columns, max_tokens]))
    for row, weights in zip(rows, given.weights, strict=True):
        row.weights = weights
    return given.denominator, given.unit


def part_batch(
    batch: TrainBatch, parts: int, aggregation: str | Callable[..., Any], max_tokens: int | None = None
) -> list[TrainBatch]:
    """Split the batch into at most `parts` batches, one for each optimizer step.

    Groups stay whole. Each part gets its own u and D; all other fields stay as they are.
    """
    assert parts >= 1, f"a batch cannot be split into {parts}"
    if parts == 1 or not batch.rows:
        return [batch]
    groups: dict[int, list[Row]] = {}
    for row in batch.rows:
        groups.setdefault(row.group_index, []).append(row)
    members = list(groups.values())
    count = min(parts, len(members))
    bounds = [place * len(members) // count for place in range(count + 1)]
    parted = []
    for start, end in itertools.pairwise(bounds):
        rows = [row for group in members[start:end] for row in group]
        denominator, unit = weigh_rows(rows, aggregation, max_tokens)
        parted.append(msgspec.structs.replace(batch, rows=rows, denominator=denominator, unit=unit))
    return parted


def split_microbatches(
    batch: TrainBatch,
    tokens_max: int,
    *,
    share: bool = True,
    padded: bool = False,
    keep: Keep = "",
    together_max: int = 0,
    only_live: bool = True,
    flat_saving_min: float = math.inf,
) -> list[list[Row]]:
    """Split the rows into microbatches of at most `tokens_max` tokens, as `microbatch_tokens` counts them.

    Rows that begin alike stay together if they fit. If they do not, the tree is cut at its branches, and each part runs
    the trunk. A single row above the limit runs alone. Raises TrainingError if rows that must stay together because of
    `keep` do not fit.

    Args:
        share: tokens that rows begin with count once
        padded: rows are padded to the longest of their microbatch
        keep: rows of one rollout, pair or group stay in one microbatch, because the loss needs them together
        together_max: such rows may take so many tokens, if that is more than `tokens_max`
        only_live: leave out rows without a trained token
        flat_saving_min: separate rows without an advantage, if that saves the work of so many tokens
    """
    rows = [row for row in batch.rows if not only_live or any(row.loss_mask)]
    sets: dict[Hashable, list[Row]] = {}
    for row in rows:
        sets.setdefault(getattr(row, f"{keep or 'group'}_index"), []).append(row)
    flat = [row for members in sets.values() if not any(any(row.advantages) for row in members) for row in members]
    if sum(len(row.tokens) for row in flat) * 2 / 3 < flat_saving_min:  # the backward pass is two thirds of the work
        flat = []
    apart = set(map(id, flat))
    microbatches: list[list[Row]] = []
    for chosen in ([row for row in rows if id(row) not in apart], flat):
        sizes = _Sizes(tokens_max, max(tokens_max, together_max if keep else 0), share, padded)
        microbatches += (_fill_padded if padded else _fill)(_sets(chosen, keep, sizes), sizes)
    return microbatches


class _Set(NamedTuple):
    """Rows that run in one microbatch. `tokens`: how many tokens they take alone. `shared`: how many of these the set
    before has too.
    """

    rows: list[Row]
    tokens: int
    shared: int


class _Sizes(NamedTuple):
    tokens_max: int
    set_max: int
    share: bool
    padded: bool


def _sets(rows: Sequence[Row], keep: Keep, sizes: _Sizes) -> list[_Set]:
    """Sets of rows, those that begin alike next to another; shorter rows first if they are padded."""
    if sizes.share and not sizes.padded:
        order, shared = in_tree_order([row.tokens for row in rows])
    else:
        order, shared = sorted(range(len(rows)), key=lambda number: len(rows[number].tokens)), [0] * len(rows)
    members: dict[Hashable, list[Row]] = {}
    first: dict[Hashable, int] = {}
    before: Hashable = None  # the set of the row before
    for place, number in enumerate(order):
        row = rows[number]
        key = getattr(row, f"{keep}_index") if keep else place
        if key not in members:
            members[key] = []
            first[key] = shared[place] if before is not None and before == next(reversed(first), None) else 0
        members[key].append(row)
        before = key
    sets = []
    for key, chosen in members.items():
        tokens = microbatch_tokens(chosen, share=sizes.share, padded=sizes.padded) if keep else len(chosen[0].tokens)
        if tokens > sizes.set_max and len(chosen) > 1:
            what = f"the loss names {keep}_index, so the {len(chosen)} rows of {keep} {key} must be run together"
            limit = f"they take {tokens} tokens but tokens_per_microbatch is {sizes.set_max}"
            raise TrainingError(f"{what}; {limit}. Give --tokens-per-microbatch {tokens}")
        sets.append(_Set(chosen, tokens, first[key]))
    return sets


def _fill(sets: Sequence[_Set], sizes: _Sizes) -> list[list[Row]]:
    """Put sets into microbatches: first whole trees, or as much of a tree as fits; then these parts into bins."""
    parts: list[list[_Set]] = []
    tokens = 0  # of the last part, at least: a short shared run below a fork is not shared
    for each in sets:
        more = tokens + each.tokens - each.shared
        if each.shared and more <= sizes.tokens_max:
            parts[-1].append(each)
            tokens = more
        else:
            parts.append([each])
            tokens = each.tokens
    found: list[list[Row]] = []
    counts: list[int] = []
    waiting = parts[::-1]
    while waiting:
        part, rest = waiting.pop(), list[_Set]()
        while (count := _count(part, sizes)) > sizes.tokens_max and len(part) > 1:
            above = count - sizes.tokens_max
            while above > 0 and len(part) > 1:
                rest.append(part.pop())
                above -= rest[-1].tokens - rest[-1].shared
        found.append([row for each in part for row in each.rows])
        counts.append(count)
        waiting += [rest[::-1]] if rest else []
    return [[row for number in chosen for row in found[number]] for chosen in pack_rows(counts, sizes.tokens_max)]


def _count(sets: Sequence[_Set], sizes: _Sizes) -> int:
    return microbatch_tokens([row for each in sets for row in each.rows], share=sizes.share)


def _fill_padded(sets: Sequence[_Set], sizes: _Sizes) -> list[list[Row]]:
    """Put sets into microbatches in order. Open another one if the next set does not fit."""
    filled: list[list[Row]] = []
    for each in sets:
        if filled and microbatch_tokens([*filled[-1], *each.rows], padded=True) <= sizes.tokens_max:
            filled[-1] += each.rows
        else:
            filled.append(list(each.rows))
    return filled


def split_by_role(
    batch: TrainBatch, roles: Sequence[str], split: Callable[[TrainBatch], list[list[Row]]]
) -> list[list[Row]]:
    """Split the rows of each role by `split`, so that no microbatch has two roles. Raises TrainingError for a row of
    another role.
    """
    strange = {row.role for row in batch.rows}.difference(roles)
    if strange:
        what = f"a sample is of the role {min(strange)!r}, and there are adapters of {', '.join(roles)}"
        raise TrainingError(f'{what}; write the role of each sample into its metadata, as {{"role": "{roles[0]}"}}')
    of_role = [[row for row in batch.rows if row.role == role] for role in roles]
    return [part for rows in of_role for part in split(msgspec.structs.replace(batch, rows=rows))]


def microbatch_tokens(rows: Sequence[Row], *, share: bool = True, padded: bool = False) -> int:
    """The tokens that run for these rows in one microbatch: the nodes of their forest, or rows with padding."""
    if padded:
        return len(rows) * max(len(row.tokens) for row in rows)
    return count_nodes([row.tokens for row in rows], share=share)


def pack_rows(lengths: Sequence[int], tokens_max: int) -> list[list[int]]:
    """Put rows into bins of at most `tokens_max` tokens. Returns the row numbers of each bin. A longer row gets a bin
    of its own.

    First-fit decreasing: take the longest row first, and put it into the first bin with enough room. This needs at most
    11/9 of the smallest possible number of bins, plus one (Johnson 1973). Rows of equal length are taken by number, so
    the same lengths always give the same bins. The rows of a bin are sorted by number.
    """
    assert tokens_max >= 1, f"bins of {tokens_max} tokens hold nothing"
    bins: list[list[int]] = []
    rooms: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        assert lengths[row] >= 0, f"row {row} has {lengths[row]} tokens"
        place = next((place for place, room in enumerate(rooms) if lengths[row] <= room), len(bins))
        if place == len(bins):
            bins.append([])
            rooms.append(tokens_max)
        bins[place].append(row)
        rooms[place] -= lengths[row]
    return [sorted(chosen) for chosen in bins]


def _live_mask(sample: Sample, trained: bool) -> list[float]:
    """The mask of a sample; all 0 if the sample has no reward or its rollout is not trained."""
    sample.check()
    mask = sample.loss_mask
    assert not len(mask) or (min(mask) >= 0 and sum(mask) < math.inf), f"mask {mask}"
    if sample.reward is None or not trained or not sample.tokens:
        return [0.0] * len(sample.tokens)
    return [0.0, *map(float, mask[1:])]  # no token precedes the first one, so nothing predicts it


def _pair_rows(rows: Sequence[Row], pairs: Sequence[tuple[int, int]]) -> list[Row]:
    """The rows of both rollouts of each pair, with the pair's number and advantages of +1 and -1."""
    rows_of: dict[int, list[Row]] = {}
    for row in rows:
        rows_of.setdefault(row.rollout_index, []).append(row)
    paired = []
    for number, pair in enumerate(pairs):
        for rollout, sign in zip(pair, (1.0, -1.0), strict=True):
            for row in rows_of.get(rollout, ()):
                advantages = [sign if weight > 0 else 0.0 for weight in row.loss_mask]
                paired.append(msgspec.structs.replace(row, pair_index=number, advantages=advantages))
    return paired
