"""Typed Protocols, one a kind, for editors and type checkers. Nothing checks them at run time.

A component takes the inputs that it names, in its own order, so a Protocol cannot fix its parameters:
`(*args, **kwargs)` means "any that the vocabulary of its kind has" (`rollouts.plugins.VOCABULARY`), and what is
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
    """Judges the G episodes of one prompt together. May name `tasks` `trajectories`. Returns G judgments."""

    def __call__(
        self, *args: Any, **kwargs: Any
    ) -> Sequence[float | Score | None] | Awaitable[Sequence[float | Score | None]]: ...


class Metric(Protocol):
    """A number that is logged and never trained on. May name `task` `trajectory` `env`."""

    def __call__(self, *args: Any, **kwargs: Any) -> float | Awaitable[float]: ...


class Filter(Protocol):
    """Whether a group is kept; a text drops it and says why. May name `rewards` `scores` `parts` `samples`
    `trajectories` `step`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> bool | str: ...


class Curriculum(Protocol):
    """The weight of an environment among several, 0 or more. May name `step`; it is asked for every step of a run."""

    def __call__(self, *args: Any, **kwargs: Any) -> float: ...


class Advantage(Protocol):
    """Of a group: [G] from `rewards` (and `lengths`, `turn_rewards`). Naming `batch`, of the whole batch: [T], or
    (advantages [T], returns [T]) where a critic learns the returns.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]: ...


class Loss(Protocol):
    """Unreduced values [T] (or one per rollout or pair), and optionally metrics to log."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Mapping[str, Any]]: ...


class KLEstimator(Protocol):
    """One value a token [T] against `ref_logprobs`. Naming `logprobs` makes it a term of the loss; without, it is taken
    off the rewards of tokens.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...


class Reference(Protocol):
    """Changes `reference` in place, once at version 0 and after every optimizer step. May name `reference` `policy`
    `adapters` `version`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> None: ...


class Correction(Protocol):
    """Weights [T], without gradient, of what another engine sampled."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...


class Weights(Protocol):
    """What an aggregation returns, as `rollouts.training.algorithms.TokenWeights` is."""

    @property
    def weights(self) -> list[list[float]]: ...

    @property
    def denominator(self) -> float: ...


class Aggregation(Protocol):
    """u of every token and the batch's share of D. May name `masks` `rollout_index` `group_index` `pair_index`
    `max_tokens`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Weights: ...


class Mixer(Protocol):
    """The parts of a group's rewards [J, P] as rewards [J]. May name `parts` `weights` `step`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...


class Shaping(Protocol):
    """A group's rewards [J] from its rewards [J]. May name `rewards` `lengths` `truncated` `max_tokens` `step`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...


class Selector(Protocol):
    """Which of a group's rollouts are trained on [J] bool. May name `rewards` `lengths` `step`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | Sequence[bool]: ...


class Pairing(Protocol):
    """Pairs (chosen, rejected) of positions in `rewards` [J]. May name `rewards` `lengths` `step`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Sequence[tuple[int, int]]: ...
