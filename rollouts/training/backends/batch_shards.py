"""Splits a batch into shards, one for each rank, and joins the ranks' outputs. Pure functions.

Ranks get about the same number of tokens, and exactly the same number of microbatches: the ranks wait for each other in
every layer of every microbatch. A rank with fewer microbatches runs empty ones. With several ranks, a microbatch is one
pass through the model. Buckets and shared prompts would give ranks different numbers of passes, so only a single
process uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import msgspec

from rollouts.training.batches import ForwardOutput, Row, TrainBatch
from rollouts.training.batching import Keep


class BatchShard(msgspec.Struct):
    """One rank's rows of a batch.

    Attributes:
        batch: this rank's rows, and D of the whole batch
        places: the rows' indices in the whole batch
        parts: microbatches, as lists of row numbers in `batch`; some may be empty
    """

    batch: TrainBatch
    places: list[int]
    parts: list[list[int]]

    def microbatches(self) -> list[list[Row]]:
        """The rows of each microbatch."""
        return [[self.batch.rows[number] for number in part] for part in self.parts]


def shard_batch(
    batch: TrainBatch, count: int, split: Callable[[TrainBatch], list[list[Row]]], *, keep: Keep = ""
) -> list[BatchShard]:
    """Split the batch for `count` ranks.

    Sets of rows go to ranks one by one, the longest first, to the rank with the fewest tokens so far.

    Args:
        split: makes microbatches of a rank's rows
        keep: rows of one rollout, pair or group go to one rank
    """
    assert count >= 1, f"{count} ranks"
    place_of = {id(row): place for place, row in enumerate(batch.rows)}
    shards = []
    for rows in _shard_rows(batch.rows, count, keep):
        part = msgspec.structs.replace(batch, rows=rows)
        number_of = {id(row): number for number, row in enumerate(rows)}
        parts = [[number_of[id(row)] for row in microbatch] for microbatch in split(part)]
        shards.append(BatchShard(part, [place_of[id(row)] for row in rows], parts))
    most = max(len(shard.parts) for shard in shards)
    for shard in shards:
        shard.parts += [[] for _ in range(most - len(shard.parts))]
    return shards


def gather_outputs(
    batch: TrainBatch, shards: Sequence[BatchShard], outputs: Sequence[dict[str, list[list[float]]]]
) -> ForwardOutput:
    """Join the ranks' outputs, in the order of the whole batch."""
    found: dict[str, list[list[float]]] = {name: [[] for _ in batch.rows] for name in outputs[0]}
    for shard, output in zip(shards, outputs, strict=True):
        for name, streams in output.items():
            for place, stream in zip(shard.places, streams, strict=True):
                found[name][place] = stream
    return ForwardOutput(**found)


def _shard_rows(rows: Sequence[Row], count: int, keep: Keep) -> list[list[Row]]:
    if count == 1:
        return [list(rows)]
    sets: dict[Hashable, list[int]] = {}
    for place, row in enumerate(rows):
        index = getattr(row, f"{keep}_index") if keep else place
        # A row without a pair forms a set of its own.
        sets.setdefault(("single", place) if index < 0 and keep == "pair" else index, []).append(place)
    tokens = {key: sum(len(rows[place].tokens) for place in members) for key, members in sets.items()}
    ranks: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for key in sorted(sets, key=lambda key: (-tokens[key], sets[key][0])):
        rank = loads.index(min(loads))
        ranks[rank] += sets[key]
        loads[rank] += tokens[key]
    return [[rows[place] for place in sorted(members)] for members in ranks]
