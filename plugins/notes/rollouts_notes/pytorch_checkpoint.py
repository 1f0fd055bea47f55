"""Checkpoints of your own torch objects: a model, its optimizer, a scheduler, and other modules.

The folder is complete or not there (`rollouts.training.weights.store`). A model of transformers is written in its own
format, so that the folder can be loaded as a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rollouts.errors import ConfigError, TrainingError
from rollouts.models.loading import no_progress_bars
from rollouts.training.weights.checkpoint import model_fingerprint
from rollouts.training.weights.store import check_folder, finish_checkpoint, new_checkpoint, read_state

_STATE = "trainer.pt"
_WEIGHTS = "model.pt"


def save_objects(
    path: Path,
    model: Any,
    optimizer: Any,
    *,
    scheduler: Any = None,
    tokenizer: Any = None,
    modules: Mapping[str, Any] | None = None,
    version: int,
    state: dict[str, Any],
) -> None:
    """Write a checkpoint folder, also with the optimizer's parameters outside of the model. `modules` are other modules
    by name, `state` is plain data. Raises CheckpointError.
    """
    with new_checkpoint(path) as folder:
        if hasattr(model, "save_pretrained"):
            with no_progress_bars():
                model.save_pretrained(str(folder))
        else:
            torch.save(model.state_dict(), folder / _WEIGHTS)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
        of_scheduler = None if scheduler is None else scheduler.state_dict()
        torch.save({"optimizer": optimizer.state_dict(), "scheduler": of_scheduler}, folder / _STATE)
        for name, module in _all_modules(modules, model, optimizer).items():
            torch.save(module.state_dict(), folder / f"{name}.pt")
        finish_checkpoint(
            folder,
            kind="full",
            fingerprint=model_fingerprint(model.state_dict()),
            version=version,
            world_size=1,
            state=state,
        )


def load_objects(
    path: Path,
    model: Any,
    optimizer: Any,
    *,
    scheduler: Any = None,
    modules: Mapping[str, Any] | None = None,
    expects: str,
) -> dict[str, Any]:
    """Read what `save_objects` wrote into these objects, and return its `state`, which must have the key `expects`.

    Everything is read and checked before anything changes. Raises ConfigError, ModelError, TrainingError.
    """
    check_folder(str(path), kind="full", fingerprint=model_fingerprint(model.state_dict()))
    run = read_state(path)
    if not (path / _STATE).is_file() or expects not in run:
        raise ConfigError(f"the checkpoint {path} was written by another backend; load it with that backend")
    if hasattr(model, "from_pretrained"):
        with no_progress_bars():
            weights = type(model).from_pretrained(str(path)).state_dict()
    else:
        weights = torch.load(path / _WEIGHTS, map_location="cpu", weights_only=True)
    states = torch.load(path / _STATE, map_location="cpu", weights_only=True)
    loaded = {}
    modules = _all_modules(modules, model, optimizer)
    for name in modules:
        if not (path / f"{name}.pt").is_file():
            raise ConfigError(f"the checkpoint {path} has no {name}; load it without one")
        loaded[name] = torch.load(path / f"{name}.pt", map_location="cpu", weights_only=True)
    replace_weights(model, weights)
    for name, module in modules.items():
        replace_weights(module, loaded[name])
    optimizer.load_state_dict(states["optimizer"])
    optimizer.zero_grad(set_to_none=True)
    if scheduler is not None and states["scheduler"] is not None:
        scheduler.load_state_dict(states["scheduler"])
    return run


def other_parameters(model: Any, optimizer: Any) -> list[Any]:
    """The optimizer's parameters outside of the model, such as those of a loss or a value function."""
    of_model = {id(parameter) for parameter in model.parameters()}
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [parameter for parameter in trained if id(parameter) not in of_model]


def _all_modules(modules: Mapping[str, Any] | None, model: Any, optimizer: Any) -> dict[str, Any]:
    others = other_parameters(model, optimizer)
    return {**(modules or {}), **({"other_parameters": torch.nn.ParameterList(others)} if others else {})}


def replace_weights(model: Any, weights: Mapping[str, Any]) -> None:
    """Replace all weights of a module by name. Raises TrainingError if names or shapes differ."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:  # torch's error for other names or shapes
        raise TrainingError(f"these are not this model's weights: {error}") from error
