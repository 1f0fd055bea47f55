"""What every fake of a training backend has, so that nothing in `rollouts` asks whether a field is there."""

from __future__ import annotations

from typing import Any


class BackendFields:
    """The fields of a TrainingBackend in one process on a CPU, which shows no model."""

    version = 0
    world_size = 1
    device = "cpu"
    compute_dtype = "float32"
    notes: tuple[str, ...] = ()
    checkpoint_bytes: int | None = None
    can_profile = False
    model: Any = None
    thread: Any = None
    model_files: Any = None
