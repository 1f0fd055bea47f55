"""From samples to batch rows, from rows to microbatches: pure functions on lists, no torch.

A batch is stamped whole (u and D, see algorithms/aggregation.py) before it is split, so no split changes a result. A
layout says how one microbatch is run: prompts that rows share are run once, and what remains of the rows runs in
buckets of similar length; packed, the rows of a microbatch are one sequence.
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
from rollouts.training.samples import first_live
from rollouts.training.types import Row, TrainBatch, Unit
from rollouts.types import Sample

Keep = Literal["", "rollout", "pair", "group"]

# A further bucket costs a pass through the model; it has to save at least this many padded tokens. This is a CPU's
# number: there the tokens cost, on a GPU the launches.
BUCKET_SAVING_MIN = 128
# A further microbatch of rows that share nothing has to save this many on a CPU: a model of 58 M then took an eighth
# less time than with 128, and one of 0.36 M as much.
MICROBATCH_SAVING_MIN = 32
# A shared prompt shorter than this is not worth a pass of its own.
PREFIX_LENGTH_MIN = 8


class Layout(NamedTuple):
    """How the rows of a microbatch are run.

    `prefixes` are token ids run once each; `prefix_of_row` [R] is the prefix that a row continues (-1: none) and
    `starts` [R] the first position that the row runs itself. `buckets` are row numbers that are padded to one length;
    the rows of a bucket either all continue a prefix or all start at 0.
    """

    prefixes: list[list[int]]
    prefix_of_row: list[int]
    starts: list[int]
    buckets: list[list[int]]

    def padded_tokens(self, lengths: Sequence[int]) -> int:
        """Tokens that go through the model, padding included, for rows of these lengths."""
        rests = (len(bucket) * max(lengths[row] - self.starts[row] for row in bucket) for bucket in self.buckets)
        return len(self.prefixes) * max(map(len, self.prefixes), default=0) + sum(rests)


def make_batch(
    samples: Sequence[Sample],
    advantages: Sequence[float],
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
    """One batch of all samples.

    `advantages` [N] has one number a rollout, at its `rollout_index` (0..N-1; a sample without one is a rollout of its
    own, at its place in the list). A sample whose reward is None is not live, nor are those of rollouts that `trained`
    [N] leaves out. `rewards` [N] are the shaped ones, where they differ from the samples'. With `pairs` (chosen,
    rejected) the rows are those of the pairs, each with the advantage +1 or -1; a rollout in two pairs has its rows
    twice. `max_tokens` is for the aggregation dr_grpo.
    Raises ConfigError for an aggregation that cannot be used. Asserts that every stream is aligned.
    """
    numbered = [(number if s.rollout_index is None else s.rollout_index, s) for number, s in enumerate(samples)]
    for rollout, _ in numbered:
        assert 0 <= rollout < len(advantages), f"rollout_index {rollout} but {len(advantages)} advantages"
    # A sample without a group is one of its own; negative numbers cannot meet given ones.
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
        advantage = float(advantages[rollout])
        assert math.isfinite(advantage), f"rollout {rollout} has advantage {advantage}"
        rows.append(
            Row(
                tokens=list(sample.tokens),
                loss_mask=mask,
                weights=[],
                advantages=[advantage if weight > 0 else 0.0 for weight in mask],
                rollout_logprobs=None if sample.rollout_log_probs is None else list(sample.rollout_log_probs),
                rollout_index=rollout,
                group_index=group,
                prefix_length=prefix,
                segment=segments[rollout],
            )
        )
        segments[rollout] += 1
    if pairs is not None:
        rows = _pair_rows(rows, pairs)
    denominator, unit = weigh_rows(rows, aggregation, max_tokens)
    return TrainBatch(rows, denominator, known, step, algorithm, temperature, unit)


def weigh_rows(
    rows: Sequence[Row], aggregation: str | Callable[..., Any], max_tokens: int | None = None
) -> tuple[float, Unit]:
    """Stamp u on the rows (`weights`), as a batch of their own; gives D, and what a loss returns one value for."""
    names = ("loss_mask", "rollout_index", "group_index", "pair_index")
    columns = ([getattr(row, name) for row in rows] for name in names)
    given = aggregate(aggregation, Masks._make([*columns, max_tokens]))
    for row, weights in zip(rows, given.weights, strict=True):
        row.weights = weights
    return given.denominator, given.unit


def part_batch(
    batch: TrainBatch, parts: int, aggregation: str | Callable[..., Any], max_tokens: int | None = None
) -> list[TrainBatch]:
    """The batch in at most `parts` batches of whole groups, each weighed as a batch of its own: for as many optimizer
    steps. Everything else that was stamped stays as it is.
    """
    assert parts >= 1, f"a batch cannot be parted in {parts}"
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
    only_live: bool = True,
    packed: bool = False,
    saving_min: int = MICROBATCH_SAVING_MIN,
    flat_apart: bool = False,
) -> list[list[Row]]:
    """The rows in microbatches of at most `tokens_max` tokens each: padded ones, rows of similar length together; or
    `packed`, when there is no padding and no prompt is shared.

    Rows that share a prompt stay together where they fit. `keep` names what a loss must see whole: rows of one
    rollout, pair or group are then never parted; where several such rows do not fit, that is an error (TrainingError).
    A single row longer than the bound runs alone, for it cannot be parted. With `only_live`, rows with nothing live are
    left out. Rows that share nothing are cut where that leaves the least padding, another microbatch counting as
    `saving_min` padded tokens. With `flat_apart`, rows that stay together and have no advantage get microbatches of
    their own, where so many tokens are theirs that a pass without backward pays for another microbatch.
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
        if sum(map(_token_count, flat)) * 2 / 3 >= saving_min:  # the backward is two thirds of the work
            together, apart = learning, flat
    microbatches: list[list[Row]] = []
    for chosen in (together, apart):
        units = [unit for members in chosen for unit in _units(members, tokens_max, share_prefix, keep, packed)]
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


def _units(members: list[Row], tokens_max: int, share_prefix: bool, keep: Keep, packed: bool) -> list[list[Row]]:
    """Rows that belong together, shortest first, in as few parts as fit; in one, whatever its size, of one row."""
    members.sort(key=lambda row: len(row.tokens))
    lengths = [len(row.tokens) for row in members]
    cost = sum(lengths) if packed else plan_layout(members, share_prefix=share_prefix).padded_tokens(lengths)
    if cost <= tokens_max or len(members) == 1:
        return [members]
    if keep:
        raise TrainingError(
            f"the loss names {keep}_index, so the {len(members)} rows of {keep} {getattr(members[0], f'{keep}_index')} "
            f"must be run together; they take {cost} tokens but tokens_per_microbatch is {tokens_max}. Give "
            f"--tokens-per-microbatch {cost}"
        )
    rows = [[row] for row in members]
    return rows if packed else _fill(rows, tokens_max, share_prefix)


def pack_rows(lengths: Sequence[int], tokens_max: int) -> list[list[int]]:
    """Bins of row numbers, each of at most `tokens_max` tokens; a row longer than that has a bin of its own.

    First-fit decreasing: the longest row first, each into the first bin that has room; at most 11/9 of the fewest
    possible bins, and one more (Johnson 1973). Equal lengths go in the order of their numbers, so the same lengths
    always give the same bins. The rows of a bin are in the order of their numbers.
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
    """How to run these rows. A prompt is shared where two rows or more have it and it is long enough to pay.

    A row starts at the last token of its prompt, not after it, so that it predicts its first sampled token itself.
    Another bucket is opened where it saves at least `bucket_saving_min` padded tokens.
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
        # Longest first; cut where going on with the longer padding would cost more than another pass.
        for place, number in enumerate(sorted(chosen, key=rests.__getitem__, reverse=True)):
            if (widest - rests[number]) * (len(chosen) - place) >= bucket_saving_min:
                buckets.append([])
                widest = rests[number]
            buckets[-1].append(number)
    return Layout(prefixes, prefix_of_row, starts, buckets)


def _live_mask(sample: Sample, trained: bool) -> list[float]:
    """What of a sample is trained: nothing where it was not judged, or its rollout is left out."""
    sample.check()
    mask = sample.loss_mask
    assert not len(mask) or (min(mask) >= 0 and sum(mask) < math.inf), f"mask {mask}"
    if sample.reward is None or not trained or not sample.tokens:
        return [0.0] * len(sample.tokens)
    return [0.0, *map(float, mask[1:])]  # nothing comes before the first token, so nothing predicts it


def _pair_rows(rows: Sequence[Row], pairs: Sequence[tuple[int, int]]) -> list[Row]:
    """The rows of each pair's two rollouts, with the pair's number and the side's sign as advantage."""
    rows_of: dict[int, list[Row]] = {}
    for row in rows:
        rows_of.setdefault(row.rollout_index, []).append(row)
    return [
        msgspec.structs.replace(
            row, pair_index=number, advantages=[sign if weight > 0 else 0.0 for weight in row.loss_mask]
        )
        for number, pair in enumerate(pairs)
        for rollout, sign in zip(pair, (1.0, -1.0), strict=True)
        for row in rows_of.get(rollout, ())
    ]


def _prefix_lengths(samples: Sequence[Sample], masks: Sequence[Sequence[float]], groups: Sequence[int]) -> list[int]:
    """Per row, how many leading tokens it shares with the rows of its group that claim the same prompt length.

    Compared, not believed: an environment may change a prompt in one of its episodes. It ends before the first live
    token.
    """
    sets: dict[tuple[int, int], list[int]] = {}
    for number, (sample, group) in enumerate(zip(samples, groups, strict=True)):
        sets.setdefault((group, sample.prompt_length), []).append(number)
    lengths: dict[int, int] = {}
    for members in sets.values():
        tokens = [samples[number].tokens for number in members]
        ends = zip(min(tokens), max(tokens), strict=False)  # these differ first where any two of them do
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], ends))
        unsampled = min(first_live(masks[number]) for number in members)
        lengths.update(dict.fromkeys(members, min(shared, unsampled)))
    return [lengths[number] for number in range(len(samples))]


def _prefix_key(row: Row) -> tuple[int, ...]:
    return (row.group_index, *row.tokens[: row.prefix_length])


def _token_count(rows: Sequence[Row]) -> int:
    return sum(len(row.tokens) for row in rows)


def _cuts(lengths: list[int], tokens_max: int, saving_min: int) -> list[tuple[int, int]]:
    """Slices of ascending lengths, each at most `tokens_max` with padding or one row: as little padding as can be,
    where every slice counts as `saving_min` more.
    """
    least = [0]  # of the rows before each place
    begins: list[int] = []  # where the last slice of those up to and with each place begins
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
    """Put units into microbatches in order, opening another one where the next unit does not fit.

    What a microbatch takes is bounded from above as prefixes x longest prefix + rows x longest rest, so that one pass
    does.
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
