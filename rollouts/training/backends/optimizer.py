"""Settings of a backend and their checks, the learning rate of each step, the optimizer, and its state as tensors by
name. Not here: the optimizer steps (`trainer`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from rollouts.errors import ConfigError
from rollouts.plugins.checks import check_bounds, one_of

OptimizerName = Literal["adamw", "adafactor", "sgd"]
ScheduleName = Literal["constant", "linear", "cosine"]

_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


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


def check_sharded(settings: TorchSettings) -> None:
    """Refuse optimizers that cannot step sharded weights (DTensors), on any number of ranks. Raises ConfigError."""
    if settings.optimizer == "adafactor":
        raise ConfigError(
            "--training.optimizer adafactor: torch's Adafactor cannot step sharded weights (it takes norms of rows in "
            "place, which DTensor refuses); type --training.optimizer adamw or sgd, or --training torch"
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


def make_optimizer(sets: list[tuple[list[nn.Parameter], float]], settings: TrainerSettings) -> torch.optim.Optimizer:
    """The optimizer over sets of parameters, each with a learning rate. Each set is one parameter group.

    Parameters may be DTensors, but not for adafactor (`check_sharded`). `_kernel` chooses a kernel for each set; the
    result is the same up to rounding.
    """
    name = settings.optimizer
    groups: list[dict[str, Any]] = [{"params": chosen, "lr": lr} | _kernel(chosen, name) for chosen, lr in sets]
    if name == "adafactor":
        return torch.optim.Adafactor(groups, lr=settings.lr, weight_decay=settings.weight_decay)
    if name == "sgd":
        momentum, decay = settings.betas[0], settings.weight_decay
        return torch.optim.SGD(groups, lr=settings.lr, momentum=momentum, weight_decay=decay)
    assert name == "adamw", name
    return torch.optim.AdamW(
        groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
    )


def _kernel(parameters: list[nn.Parameter], optimizer: OptimizerName) -> dict[str, bool]:
    """The kernel option of a parameter group. AdamW is fused (one kernel for all parameters) if torch 2.13 supports
    this for the parameters; DTensor runs the kernel on the shards. In other cases torch chooses.

    SGD has a fused kernel too, but DTensor does not support it. The fused kernel of SGD is not used, so that steps are
    the same with and without shards. A list with both DTensors and plain tensors only works with the loop over single
    tensors.
    """
    if optimizer == "adafactor":
        return {}
    if len({hasattr(parameter, "full_tensor") for parameter in parameters}) > 1:
        return {"foreach": False}
    fused = all(p.device.type in _FUSED_DEVICES and p.is_floating_point() for p in parameters)
    return {"fused": True} if optimizer == "adamw" and fused else {}


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, Tensor]:
    """The state tensors of an optimizer of `make_optimizer`, by name; not copies. The state of a DTensor parameter is a
    DTensor.

    The names are "<name of the parameter>.<key>", for example "causal.lm_head.weight.exp_avg". Keys: `step` (no
    dimensions, whole on every rank) with `exp_avg` and `exp_avg_sq` (adamw), or with `row_var` and `col_var` or
    `variance` (adafactor); `momentum_buffer` (sgd with momentum). A parameter that was never stepped has the state
    with which its first step begins, so the names are always the same. Write into these tensors to load a state.
    """
    found: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not state:
                state.update(_fresh_state(optimizer, group, parameter))
            found |= {f"{names[parameter]}.{key}": value for key, value in state.items()}
    return found


def _fresh_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter) -> dict[str, Tensor]:
    """The state with which the first step begins. The first step of sgd uses the gradient as its momentum; zeros have
    the same result: momentum * 0 + gradient.
    """
    if isinstance(optimizer, torch.optim.SGD):
        return {"momentum_buffer": _zeros_like(parameter)} if group["momentum"] else {}
    # A fused kernel counts steps on the device. Other kernels count on the CPU, which needs no wait.
    step = torch.zeros((), dtype=torch.float32, device=parameter.device if group.get("fused") else "cpu")
    if isinstance(optimizer, torch.optim.AdamW):
        return {"step": step, "exp_avg": _zeros_like(parameter), "exp_avg_sq": _zeros_like(parameter)}
    assert isinstance(optimizer, torch.optim.Adafactor), type(optimizer)
    if parameter.dim() < 2:
        return {"step": step, "variance": _zeros_like(parameter)}
    *before, rows, columns = parameter.shape
    of_rows, of_columns = (*before, rows, 1), (*before, 1, columns)
    return {"step": step, "row_var": parameter.new_zeros(of_rows), "col_var": parameter.new_zeros(of_columns)}


def _zeros_like(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False)
