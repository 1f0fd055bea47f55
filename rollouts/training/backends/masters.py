"""Half-precision weights with float32 masters: layers compute in bfloat16, and the optimizer steps float32 weights.

A weight in bfloat16 has 8 bits, so most steps of an optimizer would round to nothing. Each trained weight gets a master
in float32 (Micikevicius et al. 2017, arXiv:1710.03740). Gradients accumulate in the master, and after a step the
weight is overwritten in place, so it keeps its address. Checkpoints, exports, optimizers and references see the
masters. Without half-precision weights there are no masters, and everything here does nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn


class Masters:
    """The masters of some parameters, which compute in `dtype`."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self._master: dict[nn.Parameter, nn.Parameter] = {}

    def take(self, parameters: Iterable[nn.Parameter], *, convert: bool = False) -> None:
        """Give the trained parameters in half precision masters. `convert`: convert the trained ones in float32 first,
        in place. Otherwise these stay as they are: a float32 head, and what transformers keeps in float32.
        """
        for parameter in parameters if self.dtype is not None else ():
            if parameter.requires_grad and (parameter.dtype == self.dtype or convert):
                self._master[parameter] = nn.Parameter(parameter.data.float())
                parameter.register_post_accumulate_grad_hook(self._accumulate)  # type: ignore[no-untyped-call]
                parameter.data = parameter.data.to(self.dtype)

    def of(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """The master of each parameter; the parameter itself if it has none."""
        return [self._master.get(parameter, parameter) for parameter in parameters]

    @torch.no_grad()
    def write(self) -> None:
        """Overwrite the parameters with their masters, in place."""
        if self._master:
            torch._foreach_copy_([each.data for each in self._master], [each.data for each in self._master.values()])

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside the block, the parameters are the masters: whatever reads or loads weights sees float32."""
        halves = {parameter: parameter.data for parameter in self._master}
        for parameter, master in self._master.items():
            parameter.data = master.data
        try:
            yield
        finally:
            for parameter, half in halves.items():
                parameter.data = half
            self.write()

    def _accumulate(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None, "torch calls it after a gradient"
        master, gradient = self._master[parameter], parameter.grad
        parameter.grad = None
        if master.grad is None:
            master.grad = gradient.to(master.dtype)
        else:
            master.grad.add_(gradient)
