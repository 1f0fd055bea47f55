"""The training backend of a plan, on each rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from rollouts.errors import ConfigError
from rollouts.runs.components import make_component
from rollouts.runs.plan import Plan
from rollouts.training.batches import RankServer, TrainingBackend


def make_training(plan: Plan, watch: Callable[[str], None] = lambda name: None) -> TrainingBackend | RankServer:
    """The training backend with its model loaded; on a rank above 0 of a distributed backend, the RankServer. `watch`
    is called with the name of this phase.

    Raises UserError, also if a launcher started several processes and the backend supports only one.
    """
    settings, chosen = plan.settings, plan.one("training")
    watch(f"loading {Path(settings.model).name}")
    available = plan.training_arguments() | {"config": plan.config_of_ranks}
    backend: TrainingBackend | RankServer = make_component("training backend", chosen, available)
    if isinstance(backend, RankServer):
        return backend
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched != "1" and backend.world_size == 1:
        backend.close()
        raise ConfigError(
            f"a launcher started {launched} processes (WORLD_SIZE), but --training {chosen.name} trains in one; type "
            "--training fsdp, or start it without a launcher"
        )
    if settings.profile and not backend.can_profile:
        backend.close()
        raise ConfigError(
            f"--profile {settings.profile}: the training backend {chosen.name} cannot be profiled; leave --profile "
            "out, or choose another one, such as --training torch"
        )
    return backend
