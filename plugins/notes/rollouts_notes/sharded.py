"""`create_fsdp_backend`: the sharded backend of `rollouts run --training fsdp` in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from rollouts.config.files import NOWHERE
from rollouts.config.objects import take_objects
from rollouts.config.resolving import resolve
from rollouts.runs.jobs.evaluating import make_training
from rollouts.runs.plan import make_plan
from rollouts.training.algorithms.algorithm import Algorithm
from rollouts.training.batches import RankServer

if TYPE_CHECKING:
    from rollouts.training.backends.fsdp import FSDPTrainingBackend


def create_fsdp_backend(
    model: str,
    lr: float,
    num_steps: int,
    algorithm: str | Algorithm | Callable[..., Any] = "sft",
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
        algorithm: the name of a loss or an algorithm, as `--loss` takes it; an Algorithm; or a loss function.
            Ranks that rank 0 starts import a function by its name; only torchrun's ranks can have an Algorithm
        settings: the settings of `--training fsdp`, such as `dtype` or `gradient_checkpointing`
    """
    tree, objects = take_objects(
        {
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
    )
    resolved = resolve(tree, NOWHERE.with_objects(objects))
    backend = make_training(make_plan(resolved, needs_environment=False))
    if isinstance(backend, RankServer):
        backend.serve()
        raise SystemExit(0)
    return cast("FSDPTrainingBackend", backend)
