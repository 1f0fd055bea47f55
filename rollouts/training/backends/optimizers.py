"""The core's own optimizers: `adamw`, `adafactor` and `sgd`.

An optimizer is a function of `params`, a list of parameter groups, and `lr`, whose keyword-only parameters are its
settings. It returns a `torch.optim.Optimizer`. Parameters may be DTensors, but not for adafactor. Each group gets the
fastest kernel that works for it; the result is the same up to rounding.
"""

from __future__ import annotations

from typing import Any

import torch

_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


def adamw(
    params: list[dict[str, Any]],
    lr: float,
    *,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2017, arXiv:1711.05101).

    Args:
        betas: how slowly the means of gradients and of their squares change
        eps: is added to the root of the mean square
        weight_decay: shrinks the weights by this times the learning rate
    """
    groups = [group | _kernel(group["params"], may_fuse=True) for group in params]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def sgd(
    params: list[dict[str, Any]], lr: float, *, momentum: float = 0.9, weight_decay: float = 0.0
) -> torch.optim.SGD:
    """Gradient descent with momentum.

    Args:
        momentum: the share of the last step that the next one repeats
        weight_decay: adds this times the weights to the gradient
    """
    groups = [group | _kernel(group["params"], may_fuse=False) for group in params]
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, weight_decay=weight_decay)


def adafactor(params: list[dict[str, Any]], lr: float, *, weight_decay: float = 0.0) -> torch.optim.Adafactor:
    """Adafactor (Shazeer & Stern 2018, arXiv:1804.04235), which stores a row and a column of each matrix.

    Args:
        weight_decay: shrinks the weights by this times the learning rate
    """
    return torch.optim.Adafactor(params, lr=lr, weight_decay=weight_decay)


def _kernel(parameters: list[torch.nn.Parameter], *, may_fuse: bool) -> dict[str, bool]:
    """The kernel option of a parameter group. AdamW is fused (one kernel for all parameters) if torch 2.13 supports
    this for the parameters; DTensor runs the kernel on the shards. In other cases torch chooses.

    SGD has a fused kernel too, but DTensor does not support it. The fused kernel of SGD is not used, so that steps are
    the same with and without shards. A list with both DTensors and plain tensors only works with the loop over single
    tensors.
    """
    if len({hasattr(parameter, "full_tensor") for parameter in parameters}) > 1:
        return {"foreach": False}
    fused = all(p.device.type in _FUSED_DEVICES and p.is_floating_point() for p in parameters)
    return {"fused": True} if may_fuse and fused else {}
