"""From samples to batch rows, from rows to microbatches: pure functions on lists, no torch.

A batch is stamped whole (u and D, see algorithms/aggregation.py) before it is split, so no split changes a result. A
layout says how one microbatch is run: prompts that rows share are run once, and what remains of the rows runs in
buckets of similar length. Left out here: packing several rows into one.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple

from rollouts.errors import TrainingError
from rollouts.training.algorithms.aggregation import Masks, aggregate
from rollouts.training.types import Row, TrainBatch
from rollouts.types import Sample

__all__ = ["BUCKET_SAVING_MIN", "Layout", "make_batch", "plan_layout", "split_batch", "split_microbatches"]

Keep = Literal["", "rollout", "group"]

# A further bucket costs a pass through the model; it has to save at least this many padded tokens. This is a CPU's
# number: there the tokens cost, on a GPU the launches.
BUCKET_SAVING_MIN = 128
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
    aggregation: str,
    step: int,
    temperature: float = 1.0,
    l_max: int | None = None,
    algorithm: str = "main",
) -> TrainBatch:
    """One batch of all samples.

    `advantages` [N] has one number a rollout, at its `rollout_index` (0..N-1; a sample without one is a rollout of its
    own, at its place in the list). A sample whose reward is None is not live. `l_max` (tokens) is for the aggregation
    dr_grpo. Raises ConfigError for an aggregation that cannot be used. Asserts that every stream is aligned.
    """
    rollouts = [number if s.rollout_index is None else s.rollout_index for number, s in enumerate(samples)]
    # A sample without a group is one of its own; negative numbers cannot meet given ones.
    groups = [
        -1 - rollout if s.group_index is None else s.group_index for rollout, s in zip(rollouts, samples, strict=True)
    ]
    masks: list[list[float]] = []
    rewards = [math.nan] * len(advantages)
    for sample, rollout in zip(samples, rollouts, strict=True):
        sample.check()
        assert 0 <= rollout < len(advantages), f"rollout_index {rollout} but {len(advantages)} advantages"
        assert all(0 <= weight < math.inf for weight in sample.loss_mask), f"mask {sample.loss_mask}"
        if sample.reward is None:
            masks.append([0.0] * len(sample.tokens))
            continue
        # Nothing comes before the first token, so nothing predicts it.
        masks.append([0.0, *map(float, sample.loss_mask[1:])] if sample.tokens else [])
        rewards[rollout] = sample.reward
    weights, denominator = aggregate(aggregation, Masks(masks, rollouts, groups, l_max))
    prefixes = _prefix_lengths(samples, masks, groups)
    rows = []
    for number, (sample, mask) in enumerate(zip(samples, masks, strict=True)):
        advantage = float(advantages[rollouts[number]])
        assert math.isfinite(advantage), f"rollout {rollouts[number]} has advantage {advantage}"
        rows.append(
            Row(
                tokens=list(sample.tokens),
                loss_mask=mask,
                weights=weights[number],
                advantages=[advantage if weight > 0 else 0.0 for weight in mask],
                rollout_logprobs=list(sample.rollout_log_probs or [0.0] * len(mask)),
                rollout_index=rollouts[number],
                group_index=groups[number],
                prefix_length=prefixes[number],
            )
        )
    return TrainBatch(rows, denominator, rewards, step, algorithm, temperature)


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
        TrainBatch(chunk, share, batch.rewards, batch.step, batch.algorithm, batch.temperature)
        for chunk, share in zip(chunks, shares, strict=True)
    ]


def split_microbatches(
    batch: TrainBatch, tokens_max: int, *, share_prefix: bool = True, keep: Keep = "", only_live: bool = True
) -> list[list[Row]]:
    """The rows in microbatches of at most `tokens_max` padded tokens each, rows of similar length together.

    Rows that share a prompt stay together where they fit. `keep` names what a loss must see whole: rows of one rollout
    or one group are then never parted; where several such rows do not fit, that is an error (TrainingError). A single
    row longer than the bound runs alone, for it cannot be parted. With `only_live`, rows with nothing live are left
    out.
    """
    rows = [row for row in batch.rows if any(row.loss_mask) or not only_live]
    sets: dict[Hashable, list[Row]] = {}
    for number, row in enumerate(rows):
        sets.setdefault(_set_key(row, number, share_prefix, keep), []).append(row)
    units: list[list[Row]] = []
    for members in sets.values():
        members.sort(key=lambda row: len(row.tokens))
        if _cost(members, share_prefix) <= tokens_max or len(members) == 1:
            units.append(members)
        elif keep:
            raise TrainingError(
                f"the loss names {keep}_index, so the {len(members)} rows of {keep} {_index(members[0], keep)} must "
                f"be run together; they take {_cost(members, share_prefix)} tokens but tokens_per_microbatch is "
                f"{tokens_max}. Give --tokens-per-microbatch {_cost(members, share_prefix)}"
            )
        else:
            units.extend(_fill([[row] for row in members], tokens_max, share_prefix))
    units.sort(key=lambda unit: max(len(row.tokens) for row in unit))
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
    return row.rollout_index if keep == "rollout" else row.group_index


def _cost(rows: Sequence[Row], share_prefix: bool) -> int:
    return plan_layout(rows, share_prefix=share_prefix).padded_tokens([len(row.tokens) for row in rows])


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
