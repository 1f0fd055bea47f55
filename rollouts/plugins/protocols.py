"""Typed Protocols, one a kind, for editors and type checkers. Nothing checks them at run time.

A component takes the inputs that it names, in its own order, so a Protocol cannot fix its parameters:
`(*args, **kwargs)` stands for "any that the vocabulary of its kind has" (`rollouts.plugins.VOCABULARY`), and what is
checked is the result.

    from rollouts.plugins.protocols import Reward

    def brevity(trajectory: Trajectory, *, target_tokens: int = 200) -> float: ...
    checked: Reward = brevity

Inference and training backends are described in `rollouts.inference.base` and `rollouts.training.types`.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from rollouts.types import Score, Task

__all__ = ["Advantage", "Environment", "Filter", "GroupReward", "Loss", "Metric", "Reward"]


class Environment(Protocol):
    """One object per episode, built from its settings. Only `tasks` must be there.

    Tools and rewards are decorated methods. `tasks` may be endless. It yields the same tasks for the same `split` and
    state of `rng`.
    """

    def tasks(self, split: Literal["train", "eval"], rng: random.Random) -> Iterable[Task]: ...


class Reward(Protocol):
    """Judges one episode. May name `task` `trajectory` `env`. None: it could not judge (never the same as 0)."""

    def __call__(self, *args: Any, **kwargs: Any) -> float | Score | Awaitable[float | Score | None] | None: ...


class GroupReward(Protocol):
    """Judges the G episodes of one prompt together. May name `tasks` `trajectories`. Returns G judgements."""

    def __call__(
        self, *args: Any, **kwargs: Any
    ) -> Sequence[float | Score | None] | Awaitable[Sequence[float | Score | None]]: ...


class Metric(Protocol):
    """A number that is logged and never trained on. May name `task` `trajectory` `env`."""

    def __call__(self, *args: Any, **kwargs: Any) -> float | Awaitable[float]: ...


class Filter(Protocol):
    """Whether a group is kept; a text drops it and says why. May name `rewards` `samples` `trajectories` `step`."""

    def __call__(self, *args: Any, **kwargs: Any) -> bool | str: ...


class Advantage(Protocol):
    """Of a group: [G] from `rewards` (and `lengths`, `turn_rewards`). Naming `batch`, of the whole batch: [T]."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...


class Loss(Protocol):
    """Unreduced values [T] (or one per rollout or pair), and optionally metrics to log."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Mapping[str, Any]]: ...
