"""A typed Protocol for each kind of component, for editors and type checkers. The Protocols are not checked at run
time.

A component names its inputs in any order, so a Protocol cannot list its parameters. `(*args, **kwargs)` means: any
inputs from the vocabulary of the kind (`rollouts.plugins.VOCABULARY`). Type checkers check the result.

    from rollouts.plugins.protocols import Reward

    def brevity(trajectory: Trajectory, *, target_tokens: int = 200) -> float: ...
    checked: Reward = brevity

Inference and training backends are described in `rollouts.inference.base` and `rollouts.training.batches`, sandboxes in
`rollouts.sandboxes.base`, and workers in `rollouts.env.workers.channel`.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer as TorchOptimizer

    from rollouts.types import Score, Task, ToolCall


class Environment(Protocol):
    """An environment. Each episode has its own object, built from the settings. Only `tasks` is required.

    Tools and rewards are decorated methods. `tasks` may be endless. With the same `split` and the same state of `rng`,
    `tasks` must yield the same tasks.
    """

    def tasks(self, split: Literal["train", "eval"], rng: random.Random) -> Iterable[Task]: ...


class Reward(Protocol):
    """Judges one episode, or one turn of it. May name `task` `trajectory` `env` `turn`. Returns None, not 0, if it
    cannot judge.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> float | Score | Awaitable[float | Score | None] | None: ...


class GroupReward(Protocol):
    """Judges the G episodes of one prompt together. May name `tasks` `trajectories`. Returns a list of G judgments. One
    that names `groups` judges several groups in one call, and returns a list of such lists.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Sequence[Any] | Awaitable[Sequence[Any]]: ...


class Metric(Protocol):
    """Returns a number to log, which does not affect training. May name `task` `trajectory` `env`."""

    def __call__(self, *args: Any, **kwargs: Any) -> float | Awaitable[float]: ...


class Filter(Protocol):
    """Returns True to keep a group, and False or a reason (a text) to drop it. May name `rewards` `scores` `parts`
    `samples` `trajectories` `step`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> bool | str: ...


class Curriculum(Protocol):
    """Returns the weight of an environment at a step, 0 or more. May name `step`. Called for every step of a run."""

    def __call__(self, *args: Any, **kwargs: Any) -> float: ...


class Advantage(Protocol):
    """Returns the advantages [G] of one group. A function that names `batch` returns the advantages of the whole batch:
    [T], or (advantages [T], returns [T]) for a critic that learns the returns.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]: ...


class Loss(Protocol):
    """Returns unreduced values [T], or one for each rollout or pair, and optionally metrics to log."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Mapping[str, Any]]: ...


class KLEstimator(Protocol):
    """Returns one KL value for each token [T], computed with `ref_logprobs`. The values of a function that names
    `logprobs` are a term of the loss; other values are subtracted from the rewards of tokens.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...


class Reference(Protocol):
    """Changes `reference` in place. Called at version 0 and after every optimizer step. May name `reference` `policy`
    `adapters` `version`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> None: ...


class Correction(Protocol):
    """Returns weights [T], without gradient, for tokens that another engine sampled."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...


class Weights(Protocol):
    """The result of an aggregation, such as `rollouts.training.algorithms.TokenWeights`."""

    @property
    def weights(self) -> list[list[float]]: ...

    @property
    def denominator(self) -> float: ...


class Aggregation(Protocol):
    """Returns the weight of each token and the batch's part of the denominator. May name `masks` `rollout_index`
    `group_index` `pair_index` `max_tokens`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Weights: ...


class Mixer(Protocol):
    """Returns rewards [J] from the parts of a group's rewards [J, P]. May name `parts` `weights` `step`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...


class Shaping(Protocol):
    """Returns a group's rewards [J], changed. May name `rewards` `lengths` `truncated` `max_tokens` `step`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...


class Selector(Protocol):
    """Returns [J] bool: which rollouts of a group to train on. May name `rewards` `lengths` `step`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | Sequence[bool]: ...


class Optimizer(Protocol):
    """Returns an optimizer of torch over all parameters of `params`. May name `params` `lr`."""

    def __call__(self, *args: Any, **kwargs: Any) -> TorchOptimizer: ...


class ToolParser(Protocol):
    """Returns the tool calls in a reply, and the remaining text. May name `text` `tools`. A malformed call has `error`.
    With an attribute `write`, a function of calls that returns text, it also shows calls that the model did not write.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Sequence[ToolCall], str]: ...


class Pairing(Protocol):
    """Returns pairs (chosen, rejected) of positions in `rewards` [J]. May name `rewards` `lengths` `step`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Sequence[tuple[int, int]]: ...


class TaskSampler(Protocol):
    """Decides which task of an environment is next. The class or function that makes it may name `tasks`; each
    environment of a run has a sampler of its own. Tasks are referred to by their keys (`Task.key`).
    """

    def choose(self, step: int, rng: random.Random) -> str | None:
        """The next task, or None for the next one in the environment's order. Every call has a new `rng`, which depends
        on the run's seed and on the number of calls before. Draw from nothing else.
        """
        ...

    def finished(self, task: str, rewards: Sequence[float | None], step: int) -> None:
        """Called with the rewards [G] of a finished group before filters drop it; None for a rollout that could not be
        judged. If the environment has roles, all rewards of one role come before those of the next.
        """
        ...

    def metrics(self) -> Mapping[str, float]:
        """Numbers to log at each step, such as the sizes of pools."""
        ...

    def state(self) -> Any:
        """What `restore` needs, as data that JSON can hold. It is part of every checkpoint."""
        ...

    def restore(self, state: Any) -> None:
        """Continue from a state. Some tasks may be gone since, and others new."""
        ...
