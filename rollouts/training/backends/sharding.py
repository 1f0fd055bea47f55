"""FSDP2: every rank holds a shard of each weight. A layer's weights are put together while it runs.

Repeated layers are sharded one by one. The rest (embedding, norm, head) is sharded together with the outermost module.
A critic's value layer is sharded by itself, because it stays float32. Gradients are added up over ranks, in float32;
the engine divides once by D. Not here: how ranks meet (ranks.py).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from rollouts.errors import ModelError
from rollouts.training.backends.auxiliary import Networks
from rollouts.training.backends.layers import repeated_layers
from rollouts.training.batches import ForwardOutput, Row, TrainBatch
from rollouts.training.batching import Keep
from rollouts.training.forest import count_nodes


class Sharding(NamedTuple):
    """How to shard.

    Attributes:
        mesh: the ranks
        compute_dtype: the dtype of the layers' computations; None: that of the weights
        fp32_head: whether the head computes in float32
        files_group: a process group for collectives that wait for a disk
        meet: waits on the store until all ranks are here
        progressed: counts a microbatch
    """

    mesh: Any
    compute_dtype: torch.dtype | None
    fp32_head: bool
    files_group: Any
    meet: Callable[[str], None]
    progressed: Callable[[], None]


def make_mesh(device: str, world_size: int, replicas: int) -> Any:
    """A mesh of ranks that shard; with `replicas`, several such groups with the same shards (HSDP)."""
    from torch.distributed.device_mesh import init_device_mesh

    kind = torch.device(device).type
    assert world_size % replicas == 0, f"{world_size} ranks in {replicas} replicas"
    shape = {"shard": world_size} if replicas == 1 else {"replicate": replicas, "shard": world_size // replicas}
    return init_device_mesh(kind, tuple(shape.values()), mesh_dim_names=tuple(shape))


def shard_networks(networks: Networks, sharding: Sharding) -> None:
    """Shard in place. Raises ModelError if a model's repeated layers cannot be found."""
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    layers = MixedPrecisionPolicy(param_dtype=sharding.compute_dtype, reduce_dtype=torch.float32)
    outside = MixedPrecisionPolicy(reduce_dtype=torch.float32) if sharding.fp32_head else layers
    for block in _layers(networks):
        fully_shard(block, mesh=sharding.mesh, mp_policy=layers)
    if networks.critic is not None:
        fully_shard(networks.critic.get_submodule("linear"), mesh=sharding.mesh, mp_policy=MixedPrecisionPolicy())
    fully_shard(networks, mesh=sharding.mesh, mp_policy=outside)
    for module in networks.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo cannot average or scale while it adds up.
            module.set_force_sum_reduction_for_comms(True)


def reshard(networks: Networks) -> None:
    """Free the whole weights that a forward pass without backward pass keeps, so that the next pass reads new ones."""
    from torch.distributed.fsdp import FSDPModule

    for module in networks.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


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


def _layers(networks: Networks) -> list[nn.Module]:
    """The transformer blocks of the policy, and of a critic with a trunk of its own."""
    trunk = getattr(networks.critic, "trunk", None)
    found: list[nn.Module] = []
    for causal in filter(None, (networks.causal, trunk)):
        blocks = repeated_layers(causal)
        if not blocks:
            raise ModelError(f"{type(causal).__name__} has no repeated layers to shard; type --training torch")
        found += blocks
    return found


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
