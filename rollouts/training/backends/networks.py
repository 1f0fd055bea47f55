"""Everything that is trained, as one module: the policy, and the critic if there is one.

Whatever runs them runs inside `Networks.__call__`: there a sharded model has its outermost weights whole, also where
they are used without calling their module (the chunked head). In one process it is a plain call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

__all__ = ["Networks"]

T = TypeVar("T")


class Networks(nn.Module):
    """`causal` is the causal LM, adapters injected; `critic` may be None. Names of parameters begin with either."""

    def __init__(self, causal: nn.Module, critic: nn.Module | None = None) -> None:
        super().__init__()
        self.causal = causal
        self.critic = critic

    def forward(self, function: Callable[..., T], *args: Any) -> T:
        """Call `function(*args)`, which may run the networks."""
        return function(*args)
