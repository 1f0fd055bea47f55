"""Components as researchers write them: hints that only a type checker can resolve."""

from __future__ import annotations

import random
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from nowhere import Tensor, Thing

Mode = Literal["sum", "mean"]


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    mode: Mode = "mean",
    thing: Thing | None = None,
    names: list[str] = [],  # noqa: B006
    bare=3,
) -> Tensor:
    """Clipped surrogate.

    Args:
        clip_low: how far the ratio may fall
            below one.
        clip_high (float): how far it may rise: None means clip_low.

    Returns:
        Tensor: [T]
    """


@dataclass
class Base:
    """A base whose hints are written in this module."""

    mode: Mode = "sum"  # how tasks combine
    kind: ClassVar[str] = "x"


@dataclass
class Calculator(Base):
    """Arithmetic.

    Args:
        operators: which of + - * /
    """

    digits: int = 2  # --env.digits
    operators: tuple[str, ...] = ("+",)  # not this line: the docstring's
    seen: list[int] = field(default_factory=list)  # noqa: RUF100
    hidden: int = field(default=0, init=False)
    start: InitVar[int] = 5
    rng: random.Random | None = None
    needed: Thing = field(kw_only=True)


class Plain:
    """No dataclass."""

    def __init__(self, digits: int = 2, *, name: str, limit=None): ...
