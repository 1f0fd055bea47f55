"""What trainer and executor know of ranks: how weights are sharded, whole tensors, and each rank's rows of a batch.

Not here: the backend that shards, and how ranks meet (the package `rollouts_fsdp`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from rollouts.training.backends.auxiliary import Networks
from rollouts.training.batches import ForwardOutput, Row, TrainBatch
from rollouts.training.batching import Keep
from rollouts.training.forest import count_nodes


class Sharding(NamedTuple):
    """How a trainer shards its networks over ranks.

    Attributes:
        shard: shards in place. Raises ModelError
        reshard: frees whole weights that a forward pass without backward pass keeps, so that the next pass reads new
            ones
        device_type: where the shards are, such as cuda
        compute_dtype: the dtype of the layers' computations; None: that of the weights
        files_group: a process group for collectives that wait for a disk
        meet: waits on the store until all ranks are here
        progressed: counts a microbatch
    """

    shard: Callable[[Networks], None]
    reshard: Callable[[Networks], None]
    device_type: str
    compute_dtype: torch.dtype | None
    files_group: Any
    meet: Callable[[str], None]
    progressed: Callable[[], None]


def whole_tensor(tensor: Tensor) -> Tensor:
    """A sharded tensor, put together from all ranks' shards; all ranks must call this. Other tensors are unchanged."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def whole_tensors(named: Iterable[tuple[str, Tensor]], *, keep: bool) -> dict[str, Tensor]:
    """CPU copies by name. All ranks must call this; ranks without `keep` get an empty dict."""
    found: dict[str, Tensor] = {}
    for name, tensor in named:
        with torch.no_grad():
            full = whole_tensor(tensor.detach())
        if keep:
            found[name] = full.clone() if full.device.type == "cpu" else full.cpu()
    return found


def load_whole(own: dict[str, Tensor], given: dict[str, Tensor], *, alone: bool) -> None:
    """Write rank 0's whole tensors `given` into each rank's shards `own`. All ranks call this; `given` is empty on
    ranks above 0.

    `alone`: there is only one process.
    """
    from torch import distributed
    from torch.distributed.tensor import DTensor, distribute_tensor

    for name, tensor in own.items():
        with torch.no_grad():
            if not isinstance(tensor, DTensor):
                if given:
                    tensor.copy_(given[name])
                if not alone:
                    distributed.broadcast(tensor, 0)
                continue
            full = given[name] if given else torch.empty(tensor.shape, dtype=tensor.dtype)
            full = full.to(device=tensor.device, dtype=tensor.dtype).contiguous()
            shards = distribute_tensor(full, tensor.device_mesh, tensor.placements)
            tensor.to_local().copy_(shards.to_local())


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
    """The rows of each rank. The rows of a group begin alike, so they stay together, unless they are more than a rank's
    share.
    """
    if count == 1:
        return [list(rows)]
    sets: dict[Hashable, list[int]] = {}
    for place, row in enumerate(rows):
        index = getattr(row, f"{keep or 'group'}_index")
        # A row without a pair forms a set of its own.
        sets.setdefault(("single", place) if index < 0 and keep == "pair" else index, []).append(place)
    if not keep:
        share = sum(len(row.tokens) for row in rows) / count
        large = [key for key, places in sets.items() if sum(len(rows[place].tokens) for place in places) > share]
        sets |= {("single", place): [place] for key in large for place in sets.pop(key)}
    tokens = {key: count_nodes([rows[place].tokens for place in places]) for key, places in sets.items()}
    ranks: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for key in sorted(sets, key=lambda key: (-tokens[key], sets[key][0])):
        rank = loads.index(min(loads))
        ranks[rank] += sets[key]
        loads[rank] += tokens[key]
    return [[rows[place] for place in sorted(members)] for members in ranks]
