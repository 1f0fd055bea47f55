"""Derivatives by finite differences that agree with autograd also where a function detaches a value.

A policy gradient multiplies by a weight that it detaches, so its value changes in a way that its gradient must not
have. `Frozen` records every result without a gradient that was computed from inputs with one, and repeats these
results in later calls. Finite differences of such calls are the gradient that was meant.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

STEPS = (1e-6, 1e-3)  # the second one for functions that compute in float32
TOLERANCES = (1e-5, 1e-2)


def finite_differences(
    call: Callable[[dict[str, Tensor]], Tensor], inputs: Mapping[str, Tensor], name: str
) -> tuple[Tensor, Tensor] | None:
    """The gradient of the number `call(inputs)` by the input of this name, and the same by finite differences; None if
    they agree.
    """
    import torch

    mode = _mode()
    leaves = {each: value.detach().clone().requires_grad_(value.requires_grad) for each, value in inputs.items()}
    with mode:
        total = call(leaves)
    found = torch.autograd.grad(total, leaves[name], allow_unused=True)[0] if total.requires_grad else None
    gradient = torch.zeros_like(leaves[name]) if found is None else found
    other = gradient
    for step, tolerance in zip(STEPS, TOLERANCES, strict=True):
        other = _differences(call, leaves, name, step, mode)
        if torch.allclose(gradient, other, rtol=tolerance, atol=tolerance):
            return None
    return gradient, other


def _differences(
    call: Callable[[dict[str, Tensor]], Tensor], leaves: dict[str, Tensor], name: str, step: float, mode: Any
) -> Tensor:
    import torch

    flat = leaves[name].detach().flatten()
    found = torch.zeros_like(flat)
    for place in range(len(flat)):
        ends = []
        for sign in (1, -1):
            moved = flat.clone()
            moved[place] += sign * step
            changed = {**leaves, name: moved.reshape(leaves[name].shape).requires_grad_()}
            mode.repeat()
            with mode:
                ends.append(float(call(changed).detach()))
        found[place] = (ends[0] - ends[1]) / (2 * step)
    return found.reshape(leaves[name].shape)


def _mode() -> Any:
    import torch
    from torch.overrides import TorchFunctionMode

    class Frozen(TorchFunctionMode):
        """Records the detached results of the first call, and repeats them in later ones."""

        def __init__(self) -> None:
            super().__init__()
            self._kept: list[tuple[Any, Any]] = []
            self._place: int | None = None

        def repeat(self) -> None:
            """From now on, repeat the results from the first one on."""
            self._place = 0

        def __torch_function__(
            self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            given = [*args, *(kwargs or {}).values()]
            depends = any(isinstance(each, torch.Tensor) and each.requires_grad for each in _flat(given))
            if not depends or any(isinstance(each, torch.Tensor) and each.requires_grad for each in _flat([result])):
                return result
            if _is_in_autograd_function():
                return result
            if self._place is None:
                copy = result.clone() if isinstance(result, torch.Tensor) else result
                self._kept.append((func, copy))
                return result
            place, self._place = self._place, self._place + 1
            is_same = place < len(self._kept) and self._kept[place][0] == func
            return self._kept[place][1] if is_same else result

    return Frozen()


def _flat(values: Sequence[Any]) -> list[Any]:
    """The values, and those inside their lists and tuples."""
    found: list[Any] = []
    for value in values:
        found += _flat(value) if isinstance(value, list | tuple) else [value]
    return found


def _is_in_autograd_function() -> bool:
    """Whether a `torch.autograd.Function` runs: its gradient is its own."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "apply" and code.co_filename.endswith("torch/autograd/function.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
