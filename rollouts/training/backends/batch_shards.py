"""Each rank's shard of a batch, and their outputs as one. Pure.

Rows are shared out so that ranks have about as many tokens, and as many microbatches.

Ranks meet in every layer of every microbatch, so all of them run the same number; one that has fewer runs empty ones. A
microbatch of several ranks is one pass through the model: buckets and shared prompts, whose number differs from rank to
rank, are for a single process.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import msgspec

from rollouts.training.batching import Keep
from rollouts.training.types import ForwardOutput, Row, TrainBatch


class BatchShard(msgspec.Struct):
    """One rank's part of a batch.

    `batch` has this rank's rows, and D of the whole; `places` are the rows' places in the whole batch; `parts` are
    microbatches as numbers of rows in `batch`, empty ones among them.
    """

    batch: TrainBatch
    places: list[int]
    parts: list[list[int]]

    def microbatches(self) -> list[list[Row]]:
        """The rows of each part."""
        return [[self.batch.rows[number] for number in part] for part in self.parts]


def shard_batch(
    batch: TrainBatch, count: int, split: Callable[[TrainBatch], list[list[Row]]], *, keep: Keep = ""
) -> list[BatchShard]:
    """The batch for `count` ranks. `split` makes microbatches of a rank's rows; `keep` names what stays on one rank.

    Sets of rows go, longest first, to the rank that has the fewest tokens so far.
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
    """What the ranks found for their rows, in the order of the whole batch."""
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
        # A row in no pair is kept with nothing.
        sets.setdefault(("single", place) if index < 0 and keep == "pair" else index, []).append(place)
    tokens = {key: sum(len(rows[place].tokens) for place in members) for key, members in sets.items()}
    ranks: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for key in sorted(sets, key=lambda key: (-tokens[key], sets[key][0])):
        rank = loads.index(min(loads))
        ranks[rank] += sets[key]
        loads[rank] += tokens[key]
    return [[rows[place] for place in sorted(members)] for members in ranks]
