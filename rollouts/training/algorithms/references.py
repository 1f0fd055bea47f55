"""How the reference policy follows the policy: a rule, called once at version 0 and after every optimizer step.

The reference is a copy of every trained tensor, equal to the policy at version 0. A rule changes it in place and
returns nothing; `policy` is only read, `version` counts the optimizer steps. Left out: where the copy is kept, and how
it takes the policy's place while it scores (backends/reference.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.training.algorithms.losses import check_setting

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["adapter_off", "ema", "every_n", "frozen"]


def frozen() -> None:
    """The reference stays the policy that the run began with."""


def adapter_off(adapters: list[Tensor]) -> None:
    """The reference is the base model, whatever the adapters began with: they are zeros in it (LoRA only)."""
    import torch

    if adapters:
        torch._foreach_zero_(adapters)


def every_n(reference: list[Tensor], policy: list[Tensor], version: int, *, steps: int = 100) -> None:
    """The reference becomes the policy at every version that `steps` divides, and stays so in between.

    Args:
        steps: optimizer steps from one copy to the next
    """
    import torch

    check_setting("steps", steps, steps >= 1, "a number of 1 or more", "--reference.steps 100")
    if version % steps == 0 and reference:
        with torch.no_grad():
            torch._foreach_copy_(reference, policy)


def ema(reference: list[Tensor], policy: list[Tensor], version: int, *, decay: float = 0.99) -> None:
    """The reference is a moving average of the policy: reference <- decay reference + (1 - decay) policy.

    After k steps it is decay^k policy_0 + (1 - decay) sum_i decay^(k-i) policy_i.

    Args:
        decay: how much of the average is kept at a step; 1 never moves
    """
    import torch

    check_setting("decay", decay, 0 <= decay <= 1, "a number from 0 to 1", "--reference.decay 0.99")
    if version == 0 or not reference:  # the reference is the policy
        return
    with torch.no_grad():
        # The policy's tensors may be of another precision, which `lerp` does not take.
        torch._foreach_lerp_(reference, [new.to(old) for new, old in zip(policy, reference, strict=True)], 1 - decay)
