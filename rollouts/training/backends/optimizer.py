"""How the weights are optimised: settings, what of them is refused, and AdamW. Left out: the steps (`torch`)."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import nn

from rollouts.errors import ConfigError

__all__ = ["TorchSettings", "check_settings", "check_trained_weights", "make_adamw"]


class TorchSettings(NamedTuple):
    """How to optimise (see `create_torch_backend`). `warmup_steps` optimizer steps lead linearly to `lr`, then it is
    constant.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup_steps: int = 5
    tokens_per_microbatch: int = 16384
    share_prefix: bool = True
    gradient_checkpointing: bool = False
    layout: Literal["auto", "buckets", "packed"] = "auto"


def check_settings(settings: TorchSettings) -> None:
    """Refuse what torch would refuse later with a traceback, or what would train nothing. Raises ConfigError."""
    above = "a number above 0"
    whole = "a whole number, 0 or more"
    checks = (
        ("--lr", settings.lr, 0 < settings.lr < math.inf, above),
        ("--training.betas", settings.betas, all(0 <= b < 1 for b in settings.betas), "two numbers in [0, 1)"),
        ("--training.eps", settings.eps, 0 < settings.eps < math.inf, above),
        ("--training.weight-decay", settings.weight_decay, 0 <= settings.weight_decay < math.inf, "0 or more"),
        ("--training.max-grad-norm", settings.max_grad_norm, 0 < settings.max_grad_norm < math.inf, above),
        ("--training.warmup-steps", settings.warmup_steps, settings.warmup_steps >= 0, whole),
        ("--tokens-per-microbatch", settings.tokens_per_microbatch, settings.tokens_per_microbatch >= 1, "1 or more"),
    )
    for flag, value, holds, expected in checks:
        if not holds:
            words = list(value) if isinstance(value, tuple) else value
            raise ConfigError(f"{flag} {words}: expected {expected}")


def check_trained_weights(lora_rank: int, lora_alpha: float | None, dtype: str, critic: str = "") -> None:
    """Gradients and AdamW's moments have the dtype of what is trained: in half precision most steps round to nothing,
    and float16 overflows. Raises ConfigError.
    """
    if lora_rank < 0:
        raise ConfigError(f"--lora-rank {lora_rank}: expected 1 or more, or 0 to train all weights")
    if lora_alpha is not None and not 0 < lora_alpha < math.inf:
        raise ConfigError(f"--training.lora-alpha {lora_alpha}: expected a number above 0")
    if not lora_rank and dtype in ("bfloat16", "float16"):
        raise ConfigError(
            f"--training.dtype {dtype}: all weights would be trained in {dtype}, where small steps round to nothing "
            "and training stalls or diverges; type --lora-rank 16, whose adapters are float32, or "
            "--training.dtype float32"
        )
    if critic not in ("", "head") and dtype in ("bfloat16", "float16"):
        raise ConfigError(
            f"--critic {critic}: all of its weights would be trained in {dtype}, where small steps round to nothing; "
            "type --critic head, or --training.dtype float32"
        )


def make_adamw(sets: list[tuple[list[nn.Parameter], float]], settings: TorchSettings) -> torch.optim.AdamW:
    """AdamW over sets of parameters with a learning rate each, fused where torch has the fused kernel for all."""
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for chosen, _ in sets for p in chosen)
    return torch.optim.AdamW(
        [{"params": chosen, "lr": lr} for chosen, lr in sets],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=fused,
    )
