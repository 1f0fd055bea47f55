"""Settings of a backend and their checks, the learning rate of each step, and the optimizer. Not here: the core's own
optimizers (`optimizers`), their state in a checkpoint (`optimizer_state`), and the optimizer steps (`trainer`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from rollouts.author_code import unwrapped
from rollouts.errors import ConfigError
from rollouts.plugins.checks import check_bounds, one_of
from rollouts.training.backends import optimizers
from rollouts.training.backends.optimizer_state import MakeOptimizer

OptimizerName = Literal["adamw", "adafactor", "sgd"]
ScheduleName = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class TorchSettings:
    """How a backend computes and optimizes.

    Args:
        dtype: dtype of the weights: float32 or float64; bfloat16 and float16 only with LoRA, whose adapters are float32
        device: auto, cpu, cuda, cuda:1
        betas: of AdamW; the first is the momentum of SGD
        eps: of AdamW
        weight_decay: SGD adds it to the gradient, other optimizers shrink the weights by it
        max_grad_norm: largest global norm of the gradients; the critic's are clipped separately
        optimizer: adamw, adafactor or sgd
        lr_schedule: after the warm-up: constant, linear, or half a cosine until the end of the run
        lr_final: fraction of the learning rate at the end of linear and cosine
        warmup_steps: optimizer steps until the full learning rate; at most the steps of the run
        lora_alpha: scale of the adapters; none: twice the rank
        lora_targets: "all-linear", or names of layers, separated by commas
        gradient_checkpointing: compute activations again in the backward pass; saves memory, but shares no prompts
        layout: buckets: rows of similar length, padded; packed: rows in one sequence; auto: packed if the attention
            skips masked tokens (flash_attention_2, flex_attention)
        attention: auto, sdpa, eager, flash_attention_2 or flex_attention, as in transformers
        fp32_head: compute the logits of a half-precision model in float32
    """

    dtype: str = "float32"
    device: str = "auto"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    optimizer: OptimizerName = "adamw"
    lr_schedule: ScheduleName = "constant"
    lr_final: float = 0.0
    warmup_steps: int = 5
    lora_alpha: float | None = None
    lora_targets: str = "all-linear"
    gradient_checkpointing: bool = False
    layout: Literal["auto", "buckets", "packed"] = "auto"
    attention: str = "auto"
    fp32_head: bool = False

    def of_run(self, *, lr: float, steps: int, tokens_per_microbatch: int, share_prefix: bool) -> TrainerSettings:
        """Add the settings of the run. The warm-up is never longer than the run."""
        own = vars(self) | {"warmup_steps": min(self.warmup_steps, max(1, steps))}
        return TrainerSettings(
            **own, lr=lr, steps=steps, tokens_per_microbatch=tokens_per_microbatch, share_prefix=share_prefix
        )


@dataclass(frozen=True, kw_only=True)
class TrainerSettings(TorchSettings):
    """The backend's settings, and those of the run.

    Attributes:
        lr: learning rate
        steps: planned optimizer steps. The schedules linear and cosine end there; 0: unknown
        share_prefix: run a shared prompt once
    """

    lr: float
    steps: int = 0
    tokens_per_microbatch: int = 16384
    share_prefix: bool = True


def check_settings(settings: TrainerSettings) -> None:
    """Refuse settings with which torch would fail later, or nothing would be trained. Raises ConfigError."""
    above, whole = "a number above 0", "a whole number, 0 or more"
    check_bounds(
        ("--lr", settings.lr, 0 < settings.lr < math.inf, above),
        ("--training.betas", settings.betas, all(0 <= b < 1 for b in settings.betas), "two numbers in [0, 1)"),
        ("--training.eps", settings.eps, 0 < settings.eps < math.inf, above),
        ("--training.weight-decay", settings.weight_decay, 0 <= settings.weight_decay < math.inf, "0 or more"),
        ("--training.max-grad-norm", settings.max_grad_norm, 0 < settings.max_grad_norm < math.inf, above),
        ("--training.warmup-steps", settings.warmup_steps, settings.warmup_steps >= 0, whole),
        ("--tokens-per-microbatch", settings.tokens_per_microbatch, settings.tokens_per_microbatch >= 1, "1 or more"),
        ("--training.lr-final", settings.lr_final, 0 <= settings.lr_final <= 1, "a fraction of --lr, from 0 to 1"),
        ("--steps", settings.steps, settings.steps >= 0, whole),
        one_of("--training.optimizer", settings.optimizer, get_args(OptimizerName)),
        one_of("--training.lr-schedule", settings.lr_schedule, get_args(ScheduleName)),
    )
    if settings.lr_schedule != "constant" and settings.steps == 0:
        raise ConfigError(
            f"--training.lr-schedule {settings.lr_schedule}: it falls until the last optimizer step, and the number of "
            "steps is not known; give --steps, or type --training.lr-schedule constant"
        )
    if settings.lr_schedule == "constant" and settings.lr_final:
        raise ConfigError(
            f"--training.lr-final {settings.lr_final}: a constant learning rate has no final value; type "
            "--training.lr-schedule cosine or linear, or leave --training.lr-final out"
        )


def check_trained_weights(lora_rank: int, lora_alpha: float | None, dtype: str, critic: str = "") -> None:
    """Refuse to train half-precision weights. Gradients and moments have the dtype of the weights: in bfloat16 most
    steps round to nothing, and float16 overflows. Raises ConfigError.
    """
    is_alpha = lora_alpha is None or 0 < lora_alpha < math.inf
    check_bounds(
        ("--lora-rank", lora_rank, lora_rank >= 0, "1 or more, or 0 to train all weights"),
        ("--training.lora-alpha", lora_alpha, is_alpha, "a number above 0"),
    )
    if not lora_rank and dtype in ("bfloat16", "float16"):
        raise ConfigError(
            f"--training.dtype {dtype}: all weights would be trained in {dtype}, where small steps round to nothing "
            "and training stalls or diverges; type --training fsdp, which computes in bfloat16 and keeps float32 "
            "weights to add the steps to (with one process too), or --lora-rank 16, whose adapters are float32, or "
            "--training.dtype float32"
        )
    if critic not in ("", "head") and dtype in ("bfloat16", "float16"):
        raise ConfigError(
            f"--critic {critic}: all of its weights would be trained in {dtype}, where small steps round to nothing; "
            "type --critic head, or --training.dtype float32"
        )


def check_sharded(settings: TorchSettings, make: MakeOptimizer | None = None) -> None:
    """Refuse optimizers that cannot step sharded weights (DTensors), on any number of ranks. Raises ConfigError."""
    if settings.optimizer == "adafactor" or unwrapped(make) is optimizers.adafactor:
        flag = "--training.optimizer" if make is None else "--optimizer"
        raise ConfigError(
            f"{flag} adafactor: torch's Adafactor cannot step sharded weights (it takes norms of rows in "
            f"place, which DTensor refuses); type {flag} adamw or sgd, or --training torch"
        )


def check_chosen(settings: TorchSettings, make: MakeOptimizer | None) -> None:
    """Refuse settings of the backend's own optimizer if another one is chosen. Raises ConfigError."""
    for name in ("optimizer", "betas", "eps", "weight_decay") if make is not None else ():
        given = getattr(settings, name)
        if given != getattr(TorchSettings, name):
            flag = name.replace("_", "-")
            instead = "" if name == "optimizer" else f"; type --optimizer.{flag}, if the chosen one has this setting"
            raise ConfigError(
                f"--training.{flag} {list(given) if isinstance(given, tuple) else given}: --optimizer chooses another "
                f"optimizer, with settings of its own{instead or '; leave one out'}"
            )


def lr_factor(settings: TrainerSettings, version: int) -> float:
    """The factor of the learning rate in the next step, after `version` steps.

    With w = `warmup_steps`, N = `steps`, e = `lr_final` and p = min(1, (version - w) / (N - w)):

        version < w   (version + 1) / w: the first step is not 0, and step w is the first full one
        constant      1
        linear        e + (1 - e) (1 - p)
        cosine        e + (1 - e) (1 + cos(pi p)) / 2     Loshchilov & Hutter 2016 (arXiv:1608.03983), eq. 5, one cycle

    From step N on it is e. After the warm-up these are the schedules of transformers (for example
    `get_cosine_schedule_with_warmup`), whose warm-up is one step later: its first step has a rate of 0.

    >>> settings = TrainerSettings(lr=1e-3, warmup_steps=2, lr_schedule="linear", lr_final=0.1, steps=11)
    >>> [round(lr_factor(settings, version), 2) for version in (0, 1, 2, 3, 10, 11, 99)]
    [0.5, 1.0, 1.0, 0.9, 0.2, 0.1, 0.1]
    """
    warmup, steps = settings.warmup_steps, settings.steps
    if version < warmup:
        return (version + 1) / warmup
    if settings.lr_schedule == "constant":
        return 1.0
    progress = (version - warmup) / (steps - warmup) if version < steps else 1.0
    falling = 1.0 - progress if settings.lr_schedule == "linear" else (1.0 + math.cos(math.pi * progress)) / 2
    return settings.lr_final + (1.0 - settings.lr_final) * falling


def make_optimizer(
    sets: list[tuple[list[nn.Parameter], float]], settings: TrainerSettings, make: MakeOptimizer | None = None
) -> torch.optim.Optimizer:
    """The optimizer over sets of parameters, each with a learning rate. Each set is one parameter group. `make` makes
    it; None: the optimizer that the settings name.

    Parameters may be DTensors, but not for adafactor (`check_sharded`).
    """
    groups: list[dict[str, Any]] = [{"params": chosen, "lr": lr} for chosen, lr in sets]
    return (make or _named(settings))(groups, settings.lr)


def _named(settings: TorchSettings) -> MakeOptimizer:
    """The core's optimizer that these settings name, with their values."""
    name, decay = settings.optimizer, settings.weight_decay
    if name == "adafactor":
        return functools.partial(optimizers.adafactor, weight_decay=decay)
    if name == "sgd":
        return functools.partial(optimizers.sgd, momentum=settings.betas[0], weight_decay=decay)
    assert name == "adamw", name
    return functools.partial(optimizers.adamw, betas=settings.betas, eps=settings.eps, weight_decay=decay)
