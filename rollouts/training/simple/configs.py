"""The settings of the training functions of this room, as frozen dataclasses."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from rollouts.errors import ConfigError
from rollouts.training.loops import rl_batch, sft


@dataclass(frozen=True)
class SFTTrainingConfig(sft.SFTTrainingConfig):
    """The settings of `run_sft_training`. Every number of steps must be 0 or more.

    Args:
        num_steps: optimizer steps
        batch_size: samples of a step
        aggregation: how token losses become one number; a PyTorchTrainingBackend does not use it
        log_every: print a line every so many steps; 0: print nothing
        checkpoint_every: save the backend every so many steps; 0: never
        learning_rate: replaces the learning rate of a PyTorchTrainingBackend
        checkpoint_dir: where a backend without a `checkpoint_dir` of its own saves
    """

    log_every: int = 0
    checkpoint_every: int = 0
    learning_rate: float | None = None
    checkpoint_dir: str = "checkpoints"

    def __post_init__(self) -> None:
        check_numbers(self)
        super().__post_init__()


@dataclass(frozen=True)
class RLTrainingConfig(rl_batch.RLTrainingConfig):
    """The settings of `run_rl_training`; `rollouts.training.loops.rl_batch.RLTrainingConfig` describes the first six.

    Args:
        baseline: the advantage of a rollout is its reward minus this. None: the advantage of the backend's algorithm;
            0.0 for a PyTorchTrainingBackend, which has none
        batch_size: rollouts of an optimizer step, in whole groups. None: all rollouts of a step. For training on
            samples without a manager: the samples of a step
        log_every: print a line every so many steps; 0: print nothing
        checkpoint_every: save the backend every so many steps; 0: never
        learning_rate: replaces the learning rate of a PyTorchTrainingBackend
        checkpoint_dir: where a backend without a `checkpoint_dir` of its own saves
    """

    baseline: float | None = None
    batch_size: int | None = None
    log_every: int = 0
    checkpoint_every: int = 0
    learning_rate: float | None = None
    checkpoint_dir: str = "checkpoints"

    def __post_init__(self) -> None:
        check_numbers(self)
        super().__post_init__()


def check_numbers(config: Any) -> None:
    """Raise ConfigError for a number that is out of its range."""
    leasts = {"num_steps": 0, "batch_size": 1, "log_every": 0, "checkpoint_every": 0}
    leasts |= {"sync_every": 1, "minibatches": 1, "staleness": 0}
    for name, least in leasts.items():
        value = getattr(config, name, None)
        if value is not None and value < least:
            raise ConfigError(f"{type(config).__name__}: {name} is {value}; expected {least} or more")
    if config.learning_rate is not None and config.learning_rate < 0:
        raise ConfigError(f"{type(config).__name__}: learning_rate is {config.learning_rate}; expected 0 or more")


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
