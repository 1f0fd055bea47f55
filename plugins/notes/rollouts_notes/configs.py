"""The settings of the training functions of this room, as frozen dataclasses: the fields of the first notes first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollouts.errors import ConfigError


@dataclass(frozen=True)
class SFTTrainingConfig:
    """The settings of `run_sft_training`. Every number of steps must be 0 or more.

    Args:
        num_steps: optimizer steps
        batch_size: samples of a step
        log_every: print a line every so many steps; 0: print nothing
        checkpoint_every: save the backend every so many steps; 0: never
        aggregation: how token losses become one number; a PyTorchTrainingBackend does not use it
        learning_rate: replaces the learning rate of a PyTorchTrainingBackend
        checkpoint_dir: where a backend without a `checkpoint_dir` of its own saves
    """

    num_steps: int
    batch_size: int
    log_every: int = 0
    checkpoint_every: int = 0
    aggregation: str | Callable[..., Any] = "token_mean"
    learning_rate: float | None = None
    checkpoint_dir: str = "checkpoints"

    def __post_init__(self) -> None:
        _check_numbers(self)


@dataclass(frozen=True)
class RLTrainingConfig:
    """The settings of `run_rl_training`.

    Args:
        num_steps: steps of the whole training
        sync_every: the engines get new weights after this many steps
        baseline: the advantage of a rollout is its reward minus this. None: the advantage of the backend's algorithm;
            0.0 for a PyTorchTrainingBackend, which has none
        log_every: print a line every so many steps; 0: print nothing
        checkpoint_every: save the backend every so many steps; 0: never
        batch_size: rollouts of an optimizer step, in whole groups. None: all rollouts of a step. For training on
            samples without a manager: the samples of a step
        temperature: the sampling temperature of the rollouts. None: the endpoint's, or 1 without one
        response_tokens_max: L_max of the aggregation dr_grpo and of overlong shaping
        minibatches: optimizer steps for each batch
        staleness: how many steps sampling may be ahead of training; the manager has the same
        learning_rate: replaces the learning rate of a PyTorchTrainingBackend
        checkpoint_dir: where a backend without a `checkpoint_dir` of its own saves
    """

    num_steps: int
    sync_every: int = 1
    baseline: float | None = None
    log_every: int = 0
    checkpoint_every: int = 0
    batch_size: int | None = None
    temperature: float | None = None
    response_tokens_max: int | None = None
    minibatches: int = 1
    staleness: int = 0
    learning_rate: float | None = None
    checkpoint_dir: str = "checkpoints"

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.temperature is not None and not 0 < self.temperature < math.inf:
            raise ConfigError(f"RLTrainingConfig: temperature is {self.temperature}; expected a number above 0")


def _check_numbers(config: Any) -> None:
    """Raise ConfigError for a number that is out of its range."""
    leasts = {"num_steps": 0, "batch_size": 1, "log_every": 0, "checkpoint_every": 0, "learning_rate": 0}
    leasts |= {"sync_every": 1, "minibatches": 1, "staleness": 0}
    for name, least in leasts.items():
        value = getattr(config, name, None)
        if value is not None and value < least:
            raise ConfigError(f"{type(config).__name__}: {name} is {value}; expected {least} or more")


def as_config(kind: type[Any], given: Any) -> Any:
    """`given` as a config of `kind`: its own fields, with the defaults of the others. Raises ConfigError for anything
    without these fields.
    """
    if isinstance(given, kind):
        return given
    names = [field.name for field in dataclasses.fields(kind) if hasattr(given, field.name)]
    if "num_steps" not in names:
        raise ConfigError(f"config is {given!r}; expected config={kind.__name__}(num_steps=...)")
    return kind(**{name: getattr(given, name) for name in names})
