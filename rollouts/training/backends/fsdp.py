"""The sharded training backend: FSDP2 over the ranks of a launcher, or over processes that rank 0 starts here.

Each rank holds a share of every weight, gradient and moment (Zhao et al. 2023; torch's `fully_shard`). Weights stay
float32 and are computed with in `dtype`. One process is a crew too: that is how all weights of a model are trained in
bfloat16 on one GPU. Left out: tensor, context and pipeline parallelism; weights that do not fit the memory of rank 0's
machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from rollouts.errors import ConfigError
from rollouts.plugins.checks import checked_by
from rollouts.training.algorithms.algorithm import Algorithm
from rollouts.training.backends import lora, sharding
from rollouts.training.backends.float32_head import use_float32_head
from rollouts.training.backends.meeting import place_of_this_process, secret_of
from rollouts.training.backends.optimizer import check_sharded, make_settings
from rollouts.training.backends.ranks import (
    Gathering,
    Team,
    Worker,
    gather_ranks,
    ignore_interrupts,
    tell_failure,
)
from rollouts.training.backends.sharding import Sharding
from rollouts.training.backends.torch import TorchBackend, check_torch
from rollouts.training.backends.trainer import Trainer
from rollouts.training.models import build_hf_model, load_hf_model, resolve_device, resolve_model_name
from rollouts.training.types import Companions

__all__ = ["create_fsdp_backend"]


def check_fsdp(values: Mapping[str, Any]) -> None:
    """What can be refused of an fsdp backend without starting a rank. Raises ConfigError, SignatureError."""
    check_torch({**values, "dtype": "float32", "share_prefix": False})  # trained weights are float32 whatever it is
    check_sharded(make_settings({**values, "share_prefix": False}))
    for flag in ("stall_seconds", "start_seconds"):
        if not values[flag] >= 1:
            raise ConfigError(f"--training.{flag.replace('_', '-')} {values[flag]:g}: expected 1 or more")
    if values["dtype"] not in ("float32", "bfloat16"):
        raise ConfigError(
            f"--training.dtype {values['dtype']}: expected float32 or bfloat16; float16 needs a scaled loss"
        )
    processes = values["processes"]
    if processes < 0:
        raise ConfigError(f"--training.processes {processes}: expected 1 or more, or 0 for one a GPU")
    place = place_of_this_process()
    if place is not None:
        secret_of(place)
    if place is not None or processes:
        _check_replicas(values["replicas"], place.world_size if place is not None else processes)


@checked_by(check_fsdp)
def create_fsdp_backend(
    model: str,
    seed: int,
    steps: int,
    lr: float,
    lora_rank: int,
    tokens_per_microbatch: int,
    algorithms: dict[str, Algorithm],
    companions: Companions | None,
    config: str,
    *,
    processes: int = 0,
    replicas: int = 1,
    dtype: str = "float32",
    device: str = "auto",
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_grad_norm: float = 1.0,
    optimizer: Literal["adamw", "adafactor", "sgd"] = "adamw",
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant",
    lr_final: float = 0.0,
    warmup_steps: int = 5,
    lora_alpha: float | None = None,
    lora_targets: str = "all-linear",
    gradient_checkpointing: bool = False,
    layout: Literal["auto", "buckets", "packed"] = "auto",
    attention: str = "auto",
    fp32_head: bool = False,
    stall_seconds: float = 45.0,
    start_seconds: float = 600.0,
) -> TorchBackend | Worker:
    """Rank 0's backend; on the ranks above it what serves rank 0. Raises UserError, RankError.

    Args:
        processes: ranks on this machine; 0: one a GPU. Under torchrun the launcher decides
        replicas: so many groups of ranks hold the same shares (HSDP); the number of ranks must divide by it
        dtype: what layers compute in, float32 or bfloat16; trained weights and sums of gradients are float32
        device: auto, cpu or cuda
        betas: of AdamW; the first is the momentum of SGD
        eps: of AdamW
        weight_decay: of the optimizer; SGD adds it to the gradient, the others shrink weights by it
        max_grad_norm: gradients are clipped to this global norm, the critic's by themselves
        optimizer: adamw, adafactor or sgd
        lr_schedule: after the warm-up: constant, or linear or half a cosine to the end of the run
        lr_final: the share of the learning rate at the end of linear and cosine
        warmup_steps: optimizer steps to reach the learning rate (never more than the run has)
        lora_alpha: scale of the adapters; none is twice the rank
        lora_targets: "all-linear", or names of layers with commas between them
        gradient_checkpointing: compute activations again in the backward; saves memory
        layout: a microbatch's rows padded to the longest, or packed into one sequence; auto packs where the attention
            skips what its mask hides (flash_attention_2, flex_attention)
        attention: auto, sdpa, eager, flash_attention_2 or flex_attention, as transformers has them
        fp32_head: keep embedding, last norm and head in float32 where layers compute in bfloat16
        stall_seconds: how long a rank may keep the others waiting before the run ends
        start_seconds: how long ranks may take to start
    """
    values = dict(locals())  # all of the above by name
    check_fsdp(values)
    settings = make_settings(values)
    kind = resolve_device(device).partition(":")[0]
    world_size = _world_size(processes, kind)
    _check_replicas(replicas, world_size)

    def make_trainer(gathering: Gathering, place: str) -> Trainer:
        rank = gathering.place.rank
        # Adapters are float32 always; the base that they are added to is only read.
        stored = dtype if lora_rank else "float32"
        # Rank 0 reads the weights and gives every rank its shares; on a GPU the model never is whole.
        if rank == 0:
            causal = load_hf_model(model, dtype=stored, device="cpu", attention=attention)
        else:
            causal = build_hf_model(model, dtype=stored, attention=attention)
        fp32 = fp32_head and dtype == "bfloat16"
        if fp32 and lora_rank:
            use_float32_head(causal)
        adapter = None
        if lora_rank:
            adapter = lora.add_lora(causal, rank=lora_rank, alpha=lora_alpha, targets=lora_targets, seed=seed)
        mesh = sharding.make_mesh(place, world_size, replicas)
        return Trainer(
            causal,
            algorithms,
            settings,
            adapter=adapter,
            source=resolve_model_name(model),
            companions=companions,
            dtype=dtype,
            device=place,
            shards=Sharding(mesh, _compute_dtype(dtype), fp32, gathering),
            rank=rank,
        )

    agreement = f"{model}, seed {seed}, {lora_rank=}, {dtype=}, {replicas=}, {settings}, {sorted(algorithms.items())}"
    times = (stall_seconds, start_seconds)
    return _gather_and_make(
        make_trainer, processes=world_size, kind=kind, config=config, agreement=agreement, times=times
    )


def _gather_and_make(
    make_trainer: Any, *, processes: int, kind: str, config: str, agreement: str, times: tuple[float, float]
) -> TorchBackend | Worker:
    """Meet the other ranks, and make this one's trainer. Whatever fails ends the other ranks too."""
    stall, start = times
    on_gpus = kind != "cpu"
    gathering = gather_ranks(processes, config, stall_seconds=stall, start_seconds=start, on_gpus=on_gpus)
    rank = gathering.place.rank
    if rank > 0:
        ignore_interrupts()
    try:
        gathering.join("cpu:gloo,cuda:nccl" if on_gpus else "gloo", _without_addresses(agreement))
        gathering.beating.doing.command = "loading the model"
        with gathering.failures():
            trainer: Trainer = make_trainer(gathering, _place(kind, gathering))
        gathering.meet("ready")
    except BaseException as error:
        if rank > 0:
            tell_failure(gathering, error)
        else:
            gathering.kill()
        raise
    if rank > 0:
        return Worker(trainer, gathering)
    backend = TorchBackend(Team(trainer, gathering))
    gathering.call_on_verdict(backend.thread.abandon)
    return backend


def _world_size(processes: int, kind: str) -> int:
    """How many ranks there will be. Raises ConfigError where that cannot be."""
    import torch

    place = place_of_this_process()
    if place is not None:
        if processes and place.launched and processes != place.world_size:
            raise ConfigError(
                f"--training.processes {processes}, but the launcher started {place.world_size} ranks; leave the "
                "setting out under a launcher"
            )
        return place.world_size
    gpus = torch.cuda.device_count() if kind == "cuda" else 0
    if kind == "cuda" and processes > gpus:
        raise ConfigError(
            f"--training.processes {processes}: there are {gpus} GPUs here; give at most that, or --training.device cpu"
        )
    return processes or max(1, gpus)


def _place(kind: str, gathering: Gathering) -> str:
    """The device of this rank, made the current one."""
    import torch

    if kind != "cuda":
        return kind
    index = gathering.place.local_rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return f"cuda:{index}"


def _without_addresses(text: str) -> str:
    """Functions print where they lie in memory, which differs from process to process."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _compute_dtype(dtype: str) -> Any:
    import torch

    return torch.bfloat16 if dtype == "bfloat16" else None


def _check_replicas(replicas: int, world_size: int) -> None:
    if replicas < 1 or world_size % replicas:
        raise ConfigError(
            f"--training.replicas {replicas}: {world_size} ranks cannot be parted in {replicas} equal groups; give a "
            f"number that divides {world_size}"
        )
