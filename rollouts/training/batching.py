"""Turn samples into batch rows, and rows into microbatches. Pure functions on lists; no torch.

`make_batch` sets u and D for the whole batch (see algorithms/aggregation.py) before anything is split, so a split never
changes a result. A `Layout` describes how one microbatch runs: shared prompts run once, and the rest of each row runs
in a bucket of rows of similar length. In packed mode, the rows of a microbatch form one sequence.
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
from rollouts.training.samples import first_live
from rollouts.types import Sample

Keep = Literal["", "rollout", "pair", "group"]

# Each extra bucket costs one pass through the model, so it must save at least this many padded tokens. This number was
# measured on a CPU, where the cost of a pass depends on its tokens. On a GPU it depends on kernel launches.
BUCKET_SAVING_MIN = 128
# The same for an extra microbatch of rows without a shared prompt, on a CPU. Compared with 128, a 58 M model took an
# eighth less time, and a 0.36 M model took the same time.
MICROBATCH_SAVING_MIN = 32
# A shorter shared prompt is not worth a pass of its own.
PREFIX_LENGTH_MIN = 8


class Layout(NamedTuple):
    """How the rows of one microbatch run.

    `prefixes` are prompts as token ids; each runs once. `prefix_of_row` [R] is the index of the prefix that a row
    continues, or -1. `starts` [R] is the first position that runs as part of the row itself. `buckets` are lists of row
    numbers, each padded to one length. Either all rows of a bucket continue a prefix, or all start at 0.
    """

    prefixes: list[list[int]]
    prefix_of_row: list[int]
    starts: list[int]
    buckets: list[list[int]]

    def padded_tokens(self, lengths: Sequence[int]) -> int:
        """How many tokens run for rows of these lengths, padding included."""
        rests = (len(bucket) * max(lengths[row] - self.starts[row] for row in bucket) for bucket in self.buckets)
        return len(self.prefixes) * max(map(len, self.prefixes), default=0) + sum(rests)


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
    prefixes = _prefix_lengths(samples, masks, groups)
    for (rollout, sample), mask, group, prefix in zip(numbered, masks, groups, prefixes, strict=True):
        rows.append(
            Row(
                tokens=list(sample.tokens),
                loss_mask=mask,
                weights=[],
                advantages=_spread(advantages[rollout], sample, mask),
                rollout_logprobs=None if sample.rollout_log_probs is None else list(sample.rollout_log_probs),
                rollout_index=rollout,
                group_index=group,
                prefix_length=prefix,
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
    share_prefix: bool = True,
    keep: Keep = "",
    together_max: int = 0,
    only_live: bool = True,
    packed: bool = False,
    saving_min: int = MICROBATCH_SAVING_MIN,
    flat_apart: bool = False,
) -> list[list[Row]]:
    """Split the rows into microbatches of at most `tokens_max` tokens.

    Rows that share a prompt stay together if they fit. A single row above the limit runs alone. Raises TrainingError if
    rows that must stay together because of `keep` do not fit.

    Args:
        tokens_max: includes padding
        share_prefix: run a shared prompt once
        keep: rows of one rollout, pair or group stay in one microbatch, because the loss needs them together
        together_max: such rows may take so many tokens, if that is more than `tokens_max`
        only_live: leave out rows without a trained token
        packed: the rows of a microbatch form one sequence, without padding and shared prompts
        saving_min: how many padded tokens an extra microbatch must save, if no rows stay together
        flat_apart: separate rows without an advantage, if that saves the work of `saving_min` tokens
    """
    share_prefix = share_prefix and not packed
    sets: dict[Hashable, list[Row]] = {}
    for number, row in enumerate(batch.rows):
        if not only_live or any(row.loss_mask):
            shares = share_prefix and row.prefix_length > PREFIX_LENGTH_MIN
            key = getattr(row, f"{keep}_index") if keep else _prefix_key(row) if shares else number
            sets.setdefault(key, []).append(row)
    together, apart = list(sets.values()), []
    if flat_apart:
        learning = [members for members in together if any(any(row.advantages) for row in members)]
        flat = [members for members in together if not any(any(row.advantages) for row in members)]
        if sum(map(_token_count, flat)) * 2 / 3 >= saving_min:  # the backward pass is two thirds of the work
            together, apart = learning, flat
    microbatches: list[list[Row]] = []
    for chosen in (together, apart):
        units = [
            unit for members in chosen for unit in _units(members, tokens_max, together_max, share_prefix, keep, packed)
        ]
        if packed:
            bins = pack_rows([_token_count(unit) for unit in units], tokens_max)
            microbatches += [[row for number in numbers for row in units[number]] for numbers in bins]
            continue
        units.sort(key=lambda unit: max(len(row.tokens) for row in unit))
        if all(len(unit) == 1 for unit in units):
            cuts = _cuts([len(row.tokens) for (row,) in units], tokens_max, saving_min)
            microbatches += [[row for (row,) in units[start:stop]] for start, stop in cuts]
        else:
            microbatches += _fill(units, tokens_max, share_prefix)
    return microbatches


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


def microbatch_tokens(rows: Sequence[Row], *, share_prefix: bool, packed: bool) -> int:
    """The tokens of one microbatch of these rows, with padding; a shared prompt counts once."""
    lengths = [len(row.tokens) for row in rows]
    return sum(lengths) if packed else plan_layout(rows, share_prefix=share_prefix).padded_tokens(lengths)


def _units(
    members: list[Row], tokens_max: int, together_max: int, share_prefix: bool, keep: Keep, packed: bool
) -> list[list[Row]]:
    """Split rows that belong together into as few parts as fit, shortest first. A single row always fits."""
    members.sort(key=lambda row: len(row.tokens))
    cost = microbatch_tokens(members, share_prefix=share_prefix, packed=packed)
    most = max(tokens_max, together_max if keep else 0)
    if cost <= most or len(members) == 1:
        return [members]
    if keep:
        number, count = getattr(members[0], f"{keep}_index"), len(members)
        what = f"the loss names {keep}_index, so the {count} rows of {keep} {number} must be run together"
        sizes = f"they take {cost} tokens but tokens_per_microbatch is {most}"
        raise TrainingError(f"{what}; {sizes}. Give --tokens-per-microbatch {cost}")
    rows = [[row] for row in members]
    return rows if packed else _fill(rows, tokens_max, share_prefix)


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


def plan_layout(
    rows: Sequence[Row], *, share_prefix: bool = True, bucket_saving_min: int = BUCKET_SAVING_MIN
) -> Layout:
    """Plan how to run these rows. A prompt is shared if at least two rows have it and it is long enough.

    A row starts at the last token of its prompt, not after it, because that token predicts the first sampled one. An
    extra bucket is opened if it saves at least `bucket_saving_min` padded tokens.
    """
    prefixes: list[list[int]] = []
    prefix_of_row = [-1] * len(rows)
    starts = [0] * len(rows)
    sharing: dict[tuple[int, ...], list[int]] = {}
    for number, row in enumerate(rows):
        if share_prefix and row.prefix_length > PREFIX_LENGTH_MIN:
            sharing.setdefault(_prefix_key(row), []).append(number)
    for (_, *prefix, _), members in sharing.items():
        if len(members) > 1:
            for number in members:
                prefix_of_row[number], starts[number] = len(prefixes), len(prefix)
            prefixes.append(prefix)
    buckets: list[list[int]] = []
    for continues in (True, False):
        chosen = [number for number in range(len(rows)) if (prefix_of_row[number] >= 0) == continues]
        rests = {number: len(rows[number].tokens) - starts[number] for number in chosen}
        widest = math.inf
        # Longest first. Open a new bucket if padding to the current length would cost more than another pass.
        for place, number in enumerate(sorted(chosen, key=rests.__getitem__, reverse=True)):
            if (widest - rests[number]) * (len(chosen) - place) >= bucket_saving_min:
                buckets.append([])
                widest = rests[number]
            buckets[-1].append(number)
    return Layout(prefixes, prefix_of_row, starts, buckets)


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


def _prefix_lengths(samples: Sequence[Sample], masks: Sequence[Sequence[float]], groups: Sequence[int]) -> list[int]:
    """For each row, the number of leading tokens that it shares with rows of its group with the same `prompt_length`.

    The tokens are compared, because an environment may change the prompt in one of its episodes. The prefix ends before
    the first trained token.
    """
    sets: dict[tuple[int, int], list[int]] = {}
    for number, (sample, group) in enumerate(zip(samples, groups, strict=True)):
        sets.setdefault((group, sample.prompt_length), []).append(number)
    lengths: dict[int, int] = {}
    for members in sets.values():
        tokens = [samples[number].tokens for number in members]
        ends = zip(min(tokens), max(tokens), strict=False)  # all members share what these two share
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], ends))
        unsampled = min(first_live(masks[number]) for number in members)
        lengths.update(dict.fromkeys(members, min(shared, unsampled)))
    return [lengths[number] for number in range(len(samples))]


def _prefix_key(row: Row) -> tuple[int, ...]:
    return (row.group_index, *row.tokens[: row.prefix_length])


def _token_count(rows: Sequence[Row]) -> int:
    return sum(len(row.tokens) for row in rows)


def _cuts(lengths: list[int], tokens_max: int, saving_min: int) -> list[tuple[int, int]]:
    """Cut ascending lengths into slices of at most `tokens_max` padded tokens, or of one row.

    The cuts have the lowest cost: all padding tokens, plus `saving_min` for each slice.
    """
    least = [0]  # [i] the lowest cost of the first i rows
    begins: list[int] = []  # [i] where the last slice of the first i + 1 rows begins
    for stop, length in enumerate(lengths, 1):
        earliest = min(stop - 1, max(0, stop - tokens_max // max(1, length)))
        cost, begin = min((least[start] + (stop - start) * length, start) for start in range(earliest, stop))
        least.append(cost + saving_min)
        begins.append(begin)
    cuts: list[tuple[int, int]] = []
    stop = len(lengths)
    while stop:
        cuts.append((begins[stop - 1], stop))
        stop = begins[stop - 1]
    return cuts[::-1]


def _fill(units: list[list[Row]], tokens_max: int, share_prefix: bool) -> list[list[Row]]:
    """Put units (lists of rows that stay together) into microbatches in order. Open another microbatch if the next unit
    does not fit.

    The size of a microbatch is estimated from above, as prefixes x longest prefix + rows x longest rest, so that one
    pass over the units is enough.
    """
    filled: list[list[Row]] = []
    prefixes = prefix_longest = rest_longest = 0
    for unit in units:
        layout = plan_layout(unit, share_prefix=share_prefix)
        count, prefix = len(layout.prefixes), max(map(len, layout.prefixes), default=0)
        rest = max(len(row.tokens) - start for row, start in zip(unit, layout.starts, strict=True))
        if filled:
            both = prefixes + count, max(prefix_longest, prefix), max(rest_longest, rest)
            if both[0] * both[1] + (len(filled[-1]) + len(unit)) * both[2] <= tokens_max:
                filled[-1].extend(unit)
                prefixes, prefix_longest, rest_longest = both
                continue
        filled.append(list(unit))
        prefixes, prefix_longest, rest_longest = count, prefix, rest
    return filled
