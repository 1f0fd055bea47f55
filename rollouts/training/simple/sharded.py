"""`create_fsdp_backend`: the sharded backend of `rollouts run --training fsdp` in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from rollouts.config.resolving import resolve
from rollouts.runs.jobs.backend import make_training
from rollouts.runs.plan import make_plan
from rollouts.training.batches import RankServer

if TYPE_CHECKING:
    from rollouts.training.backends.fsdp import FSDPTrainingBackend


def create_fsdp_backend(
    model: str,
    lr: float,
    num_steps: int,
    algorithm: str = "sft",
    *,
    seed: int = 0,
    lora_rank: int = 0,
    tokens_per_microbatch: int = 16384,
    processes: int = 0,
    **settings: Any,
) -> FSDPTrainingBackend:
    """Make the sharded backend, with the arguments of `create_pytorch_backend`.

    Without a launcher, it starts `processes` ranks on this machine; 0: one per GPU. Under torchrun, every rank calls
    this function; on ranks above 0 the call serves rank 0, and then ends the process with SystemExit.

    Raises ConfigError, ModelError, RankError.

    Args:
        algorithm: the name of a loss or an algorithm, as `--loss` takes it
        settings: the settings of `--training fsdp`, such as `dtype` or `gradient_checkpointing`
    """
    tree = {
        "mode": "sft" if algorithm == "sft" else "rl",
        "model": model,
        "loss": algorithm,
        "lr": lr,
        "steps": num_steps,
        "seed": seed,
        "lora_rank": lora_rank,
        "tokens_per_microbatch": tokens_per_microbatch,
        "training": {"name": "fsdp", "processes": processes, **settings},
    }
    backend = make_training(make_plan(resolve(tree), needs_environment=False))
    if isinstance(backend, RankServer):
        backend.serve()
        raise SystemExit(0)
    return cast("FSDPTrainingBackend", backend)
