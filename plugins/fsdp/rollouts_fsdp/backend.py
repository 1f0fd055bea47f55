"""The sharded training backend: FSDP2 over the ranks of a launcher, or over processes that rank 0 starts.

Each rank holds a shard of every weight, gradient and moment (Zhao et al. 2023; torch's `fully_shard`). Weights are
float32; computations are in `dtype`. It also works with one process, to train all weights of a model in bfloat16 on one
GPU. Not here: tensor, context and pipeline parallelism; models that do not fit the memory of rank 0's machine.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rollouts.errors import ConfigError, ModelError
from rollouts.models import loading
from rollouts.models.estimates import estimated_as
from rollouts.plugins.checks import check_bounds, checked_by
from rollouts.training.algorithms.algorithm import Algorithm
from rollouts.training.backends.auxiliary import Networks
from rollouts.training.backends.layers import repeated_layers
from rollouts.training.backends.optimizer import MakeOptimizer, TorchSettings, check_sharded
from rollouts.training.backends.sharding import Sharding
from rollouts.training.backends.torch import TorchBackend, check_torch, put_in
from rollouts.training.backends.trainer import Trainer
from rollouts.training.batches import AuxiliaryModels
from rollouts_fsdp.ranks import DistributedExecutor, RankGroup, RankWorker, gather_ranks
from rollouts_fsdp.rendezvous import place_of_this_process, secret_of


def check_fsdp(values: Mapping[str, Any]) -> None:
    """Check settings without starting a rank. Raises ConfigError, SignatureError."""
    settings: TorchSettings = values["settings"]
    # Trained weights are float32; `dtype` is that of computations.
    check_torch({**values, "settings": dataclasses.replace(settings, dtype="float32")})
    check_sharded(settings, values["make_optimizer"])
    stall, start = values["stall_seconds"], values["start_seconds"]
    processes, dtype = values["processes"], loading.resolve_dtype(settings.dtype, settings.device)
    dtypes = "float32 or bfloat16; float16 needs a scaled loss"
    check_bounds(
        ("--training.stall-seconds", f"{stall:g}", stall >= 1, "1 or more"),
        ("--training.start-seconds", f"{start:g}", start >= 1, "1 or more"),
        ("--training.dtype", dtype, dtype in ("float32", "bfloat16"), dtypes),
        ("--training.processes", processes, processes >= 0, "1 or more, or 0 for one per GPU"),
    )
    place = place_of_this_process()
    if place is not None:
        secret_of(place)
    if place is not None or processes:
        _check_replicas(values["replicas"], place.world_size if place is not None else processes)


class FSDPTrainingBackend(TorchBackend):
    """A TorchBackend whose weights are sharded over ranks. `create_fsdp_backend` makes it."""


@estimated_as("sharded")
@checked_by(check_fsdp)
def create_fsdp_backend(
    model: str,
    seed: int,
    steps: int,
    lr: float,
    lora_rank: int,
    tokens_per_microbatch: int,
    algorithms: dict[str, Algorithm],
    auxiliary_models: AuxiliaryModels | None,
    config: str,
    make_optimizer: MakeOptimizer | None = None,
    *,
    processes: int = 0,
    replicas: int = 1,
    settings: TorchSettings = TorchSettings(),
    stall_seconds: float = 45.0,
    start_seconds: float = 600.0,
) -> TorchBackend | RankWorker:
    """Train a model that is sharded over several ranks (FSDP2). Raises UserError, RankError.

    Args:
        processes: ranks on this machine; 0: one per GPU. Under torchrun, the launcher sets the number
        replicas: number of groups of ranks with the same shards (HSDP); must divide the number of ranks
        dtype: dtype of computations, float32 or bfloat16 (auto: bfloat16 on GPUs); trained weights and sums of
            gradients are float32
        device: auto, cpu or cuda
        gradient_checkpointing: compute activations again in the backward pass; saves memory
        fp32_head: keep embedding, last norm and head in float32 if layers compute in bfloat16
        stall_seconds: the run ends if one rank keeps the others waiting this long
        start_seconds: how long ranks may take to start
    """
    check_fsdp(locals())
    settings = dataclasses.replace(settings, dtype=loading.resolve_dtype(settings.dtype, settings.device))
    kind = loading.resolve_device(settings.device).partition(":")[0]
    world_size = _world_size(processes, kind)
    _check_replicas(replicas, world_size)
    chosen = settings.of_run(lr=lr, steps=steps, tokens_per_microbatch=tokens_per_microbatch)
    agreed = f"{model}, seed {seed}, {lora_rank=}, {replicas=}, {chosen}, {sorted(algorithms.items())}"
    on_gpus = kind != "cpu"
    _find_commits(model, auxiliary_models or AuxiliaryModels())
    group = gather_ranks(world_size, config, stall_seconds=stall_seconds, start_seconds=start_seconds, on_gpus=on_gpus)
    with group.starting("cpu:gloo,cuda:nccl" if on_gpus else "gloo", _without_addresses(agreed)):
        place = _device(kind, group.place.local_rank)
        causal, adapter = _load(model, lora_rank, settings, seed, is_first=group.place.rank == 0)
        trainer = Trainer(
            causal,
            algorithms,
            dataclasses.replace(chosen, device=place),
            adapter=adapter,
            source=loading.resolve_model_name(model),
            auxiliary_models=auxiliary_models,
            shards=_sharding(group, settings, kind, replicas),
            rank=group.place.rank,
            make_optimizer=make_optimizer,
        )
    if group.place.rank > 0:
        return RankWorker(trainer, group)
    backend = FSDPTrainingBackend(DistributedExecutor(trainer, group))
    assert group.detector is not None, "this is rank 0"
    group.detector.on_fault = backend.thread.abandon
    return backend


def _sharding(group: RankGroup, settings: TorchSettings, kind: str, replicas: int) -> Sharding:
    """How the trainer of this rank shards its networks. `kind` is that of the device."""
    dtype = torch.bfloat16 if settings.dtype == "bfloat16" else None
    mesh = make_mesh(kind, group.place.world_size, replicas)
    fp32_head = settings.fp32_head and dtype is not None
    shard = functools.partial(shard_networks, mesh=mesh, compute_dtype=dtype, fp32_head=fp32_head)
    return Sharding(shard, reshard, kind, dtype, group.files_group, group.meet, group.heartbeat.progressed)


def make_mesh(kind: str, world_size: int, replicas: int) -> Any:
    """A mesh of ranks that shard; with `replicas`, several such groups with the same shards (HSDP)."""
    from torch.distributed.device_mesh import init_device_mesh

    assert world_size % replicas == 0, f"{world_size} ranks in {replicas} replicas"
    shape = {"shard": world_size} if replicas == 1 else {"replicate": replicas, "shard": world_size // replicas}
    return init_device_mesh(kind, tuple(shape.values()), mesh_dim_names=tuple(shape))


def shard_networks(networks: Networks, *, mesh: Any, compute_dtype: torch.dtype | None, fp32_head: bool) -> None:
    """Shard in place. Repeated layers are sharded one by one. The rest (embedding, norm, head) is sharded together with
    the outermost module. A critic's value layer is sharded by itself, because it stays float32. Gradients are added up
    over ranks, in float32; the engine divides once by D.

    Raises ModelError if a model's repeated layers cannot be found.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    layers = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    outside = MixedPrecisionPolicy(reduce_dtype=torch.float32) if fp32_head else layers
    for block in _layers(networks):
        fully_shard(block, mesh=mesh, mp_policy=layers)
    if networks.critic is not None:
        fully_shard(networks.critic.get_submodule("linear"), mesh=mesh, mp_policy=MixedPrecisionPolicy())
    fully_shard(networks, mesh=mesh, mp_policy=outside)
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


def _find_commits(model: str, beside: AuxiliaryModels) -> None:
    """Note which commits of models of a hub are loaded. Rank 0 sends them to the other ranks, before those load any."""
    names = {model, beside.teacher, beside.critic} - {"", "head"}
    for whole in (loading.adapters_beneath(name)[0] for name in names):
        if not Path(whole).is_dir():
            loading.load_config(whole)


def _without_addresses(text: str) -> str:
    """The text of functions without their addresses, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _load(model: str, lora_rank: int, settings: TorchSettings, seed: int, *, is_first: bool) -> tuple[Any, Any]:
    """The causal LM, and its adapter, if any. Only rank 0 reads the weights, and sends the other ranks their shards. On
    a GPU, the model is never whole.
    """
    # Adapters are always float32. The base model is only read.
    dtype = settings.dtype if lora_rank else "float32"
    if is_first:
        causal = loading.load_hf_model(model, dtype=dtype, device="cpu", attention=settings.attention)
    else:
        causal = loading.build_hf_model(model, dtype=dtype, attention=settings.attention)
    # With float32 weights the head needs no conversion; `Sharding` sets the dtype of computations.
    settings = dataclasses.replace(settings, fp32_head=settings.fp32_head and dtype == "bfloat16")
    return causal, put_in(causal, settings, lora_rank, seed)


def _world_size(processes: int, kind: str) -> int:
    """The number of ranks. Raises ConfigError if `processes` is not the launcher's number, or is above the number of
    GPUs.
    """
    place = place_of_this_process()
    if place is not None:
        if processes and place.launched and processes != place.world_size:
            what = f"--training.processes {processes}, but the launcher started {place.world_size} ranks"
            raise ConfigError(f"{what}; leave the setting out under a launcher")
        return place.world_size
    gpus = torch.cuda.device_count() if kind == "cuda" else 0
    if kind == "cuda" and processes > gpus:
        raise ConfigError(
            f"--training.processes {processes}: GPUs here: {gpus}; give at most that, or --training.device cpu"
        )
    return processes or max(1, gpus)


def _device(kind: str, local_rank: int) -> str:
    """This rank's device, which becomes the current one."""
    if kind != "cuda":
        return kind
    index = local_rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return f"cuda:{index}"


def _check_replicas(replicas: int, world_size: int) -> None:
    if replicas < 1 or world_size % replicas:
        what = f"--training.replicas {replicas}: {world_size} ranks cannot be split into {replicas} equal groups"
        raise ConfigError(f"{what}; give a number that divides {world_size}")
