"""From samples to batch rows, from rows to microbatches: pure functions on lists, no torch.

A batch is stamped whole (u and D, see algorithms/aggregation.py) before it is split, so no split changes a result. A
layout says how one microbatch is run: prompts that rows share are run once, and what remains of the rows runs in
buckets of similar length; packed, the rows of a microbatch are one sequence (algorithms/packing.py).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from rollouts.errors import TrainingError
from rollouts.training.algorithms.aggregation import Masks, aggregate
from rollouts.training.algorithms.packing import pack_rows
from rollouts.training.types import Row, TrainBatch, Unit
from rollouts.types import Sample

__all__ = [
    "BUCKET_SAVING_MIN",
    "MICROBATCH_SAVING_MIN",
    "Keep",
    "Layout",
    "make_batch",
    "part_batch",
    "plan_layout",
    "split_batch",
    "split_microbatches",
    "weigh_rows",
]

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
        total = len(self.prefixes) * max((len(prefix) for prefix in self.prefixes), default=0)
        for bucket in self.buckets:
            total += len(bucket) * max(lengths[row] - self.starts[row] for row in bucket)
        return total


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
    rollouts = [number if s.rollout_index is None else s.rollout_index for number, s in enumerate(samples)]
    # A sample without a group is one of its own; negative numbers cannot meet given ones.
    groups = [
        -1 - rollout if s.group_index is None else s.group_index for rollout, s in zip(rollouts, samples, strict=True)
    ]
    masks = _live_masks(samples, rollouts, len(advantages), trained)
    if rewards is None:
        rewards = _rewards(samples, rollouts, len(advantages))
    known = [math.nan if reward is None else float(reward) for reward in rewards]
    prefixes = _prefix_lengths(samples, masks, groups)
    rows: list[Row] = []
    segments: Counter[int] = Counter()
    for number, (sample, mask) in enumerate(zip(samples, masks, strict=True)):
        rollout = rollouts[number]
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
                group_index=groups[number],
                prefix_length=prefixes[number],
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
    given = aggregate(
        aggregation,
        Masks(
            [row.loss_mask for row in rows],
            [row.rollout_index for row in rows],
            [row.group_index for row in rows],
            [row.pair_index for row in rows],
            max_tokens,
        ),
    )
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


def split_batch(batch: TrainBatch, parts: int) -> list[TrainBatch]:
    """The batch in `parts` batches for as many `forward_backward` calls before one `optim_step`.

    u was stamped for the whole, so only the sum of the shares of D matters; they are shared out by live tokens.
    """
    assert parts >= 1, f"a batch cannot be split in {parts}"
    size = math.ceil(len(batch.rows) / parts)
    chunks = [batch.rows[start : start + size] for start in range(0, len(batch.rows), max(1, size))]
    live = [sum(weight > 0 for row in chunk for weight in row.loss_mask) for chunk in chunks]
    total = sum(live)
    shares = [batch.denominator * count / total if total else 0.0 for count in live]
    return [
        msgspec.structs.replace(batch, rows=chunk, denominator=share)
        for chunk, share in zip(chunks, shares, strict=True)
    ]


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
    rows = [row for row in batch.rows if any(row.loss_mask) or not only_live]
    sets: dict[Hashable, list[Row]] = {}
    for number, row in enumerate(rows):
        sets.setdefault(_set_key(row, number, share_prefix, keep), []).append(row)
    fill = functools.partial(
        _microbatches, tokens_max=tokens_max, share_prefix=share_prefix, keep=keep, packed=packed, saving_min=saving_min
    )
    flat = [members for members in sets.values() if not any(any(row.advantages) for row in members)]
    # The backward is two thirds of the work.
    if not flat_apart or sum(map(_token_count, flat)) * 2 / 3 < saving_min:
        return fill(list(sets.values()))
    kept = {id(members) for members in flat}
    return fill([members for members in sets.values() if id(members) not in kept]) + fill(flat)


def _microbatches(
    sets: Sequence[list[Row]], *, tokens_max: int, share_prefix: bool, keep: Keep, packed: bool, saving_min: int
) -> list[list[Row]]:
    """Microbatches of sets of rows that stay together where they fit, or have to."""
    units: list[list[Row]] = []
    for members in sets:
        members.sort(key=lambda row: len(row.tokens))
        cost = _token_count(members) if packed else _cost(members, share_prefix)
        if cost <= tokens_max or len(members) == 1:
            units.append(members)
        elif keep:
            raise TrainingError(
                f"the loss names {keep}_index, so the {len(members)} rows of {keep} {_index(members[0], keep)} must "
                f"be run together; they take {cost} tokens but tokens_per_microbatch is {tokens_max}. "
                f"Give --tokens-per-microbatch {cost}"
            )
        elif packed:
            units.extend([row] for row in members)
        else:
            units.extend(_fill([[row] for row in members], tokens_max, share_prefix))
    if packed:
        bins = pack_rows([_token_count(unit) for unit in units], tokens_max)
        return [[row for number in chosen for row in units[number]] for chosen in bins]
    units.sort(key=lambda unit: max(len(row.tokens) for row in unit))
    if all(len(unit) == 1 for unit in units):
        cuts = _cuts([len(row.tokens) for (row,) in units], tokens_max, saving_min)
        return [[row for (row,) in units[start:stop]] for start, stop in cuts]
    return _fill(units, tokens_max, share_prefix)


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
    if share_prefix:
        sharing: dict[Hashable, list[int]] = {}
        for number, row in enumerate(rows):
            if row.prefix_length > PREFIX_LENGTH_MIN:
                sharing.setdefault(_prefix_key(row), []).append(number)
        for members in sharing.values():
            if len(members) < 2:
                continue
            start = rows[members[0]].prefix_length - 1
            for number in members:
                prefix_of_row[number], starts[number] = len(prefixes), start
            prefixes.append(rows[members[0]].tokens[:start])
    buckets: list[list[int]] = []
    for continues in (True, False):
        chosen = [number for number in range(len(rows)) if (prefix_of_row[number] >= 0) == continues]
        chosen.sort(key=lambda number: len(rows[number].tokens) - starts[number], reverse=True)
        lengths = [len(rows[number].tokens) - starts[number] for number in chosen]
        buckets.extend(_buckets(chosen, lengths, bucket_saving_min))
    return Layout(prefixes, prefix_of_row, starts, buckets)


def _buckets(numbers: list[int], lengths: list[int], saving_min: int) -> list[list[int]]:
    """Cut rows, longest first, where going on with the longer padding would cost more than another pass."""
    buckets: list[list[int]] = []
    widest = 0
    for place, (number, length) in enumerate(zip(numbers, lengths, strict=True)):
        if not buckets or (widest - length) * (len(numbers) - place) >= saving_min:
            buckets.append([])
            widest = length
        buckets[-1].append(number)
    return buckets


def _live_masks(
    samples: Sequence[Sample], rollouts: Sequence[int], count: int, trained: Sequence[bool] | None
) -> list[list[float]]:
    """What of each sample is trained: nothing where it was not judged, or its rollout is left out."""
    masks: list[list[float]] = []
    for sample, rollout in zip(samples, rollouts, strict=True):
        sample.check()
        assert 0 <= rollout < count, f"rollout_index {rollout} but {count} advantages"
        mask = sample.loss_mask
        assert not len(mask) or (min(mask) >= 0 and sum(mask) < math.inf), f"mask {mask}"
        if sample.reward is None or (trained is not None and not trained[rollout]):
            masks.append([0.0] * len(sample.tokens))
        else:
            # Nothing comes before the first token, so nothing predicts it.
            masks.append([0.0, *map(float, mask[1:])] if sample.tokens else [])
    return masks


def _rewards(samples: Sequence[Sample], rollouts: Sequence[int], count: int) -> list[float | None]:
    rewards: list[float | None] = [None] * count
    for sample, rollout in zip(samples, rollouts, strict=True):
        if sample.reward is not None:
            rewards[rollout] = sample.reward
    return rewards


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
    lengths = [0] * len(samples)
    for members in sets.values():
        # The smallest and the largest list differ first where any two of them do.
        smallest = min(samples[number].tokens for number in members)
        largest = max(samples[number].tokens for number in members)
        shared = len(smallest)
        for place, (one, other) in enumerate(zip(smallest, largest, strict=False)):
            if one != other:
                shared = place
                break
        for number in members:
            first_live = next((place for place, weight in enumerate(masks[number]) if weight > 0), len(masks[number]))
            shared = min(shared, first_live)
        for number in members:
            lengths[number] = shared
    return lengths


def _prefix_key(row: Row) -> Hashable:
    return (row.group_index, *row.tokens[: row.prefix_length])


def _set_key(row: Row, number: int, share_prefix: bool, keep: Keep) -> Hashable:
    if keep:
        return _index(row, keep)
    return _prefix_key(row) if share_prefix and row.prefix_length > PREFIX_LENGTH_MIN else number


def _index(row: Row, keep: Keep) -> int:
    return {"rollout": row.rollout_index, "pair": row.pair_index}.get(keep, row.group_index)


def _token_count(rows: Sequence[Row]) -> int:
    return sum(len(row.tokens) for row in rows)


def _cost(rows: Sequence[Row], share_prefix: bool) -> int:
    return plan_layout(rows, share_prefix=share_prefix).padded_tokens([len(row.tokens) for row in rows])


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
        prefix = max((len(tokens) for tokens in layout.prefixes), default=0)
        rest = max(len(row.tokens) - start for row, start in zip(unit, layout.starts, strict=True))
        together = (prefixes + len(layout.prefixes)) * max(prefix_longest, prefix)
        if filled:
            together += (len(filled[-1]) + len(unit)) * max(rest_longest, rest)
        if filled and together <= tokens_max:
            filled[-1].extend(unit)
            prefixes, prefix_longest = prefixes + len(layout.prefixes), max(prefix_longest, prefix)
            rest_longest = max(rest_longest, rest)
        else:
            filled.append(list(unit))
            prefixes, prefix_longest, rest_longest = len(layout.prefixes), prefix, rest
    return filled
