"""How the weights are optimized: the settings and what of them is refused, the learning rate of each step, the
optimizer, and its state as tensors by name. Left out: the steps themselves (`trainer`).
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
        dtype: of the weights: float32 or float64; bfloat16 and float16 only with LoRA, whose adapters are float32
        device: auto, cpu, cuda, cuda:1
        betas: of AdamW; the first is the momentum of SGD
        eps: of AdamW
        weight_decay: of the optimizer; SGD adds it to the gradient, the others shrink weights by it
        max_grad_norm: gradients are clipped to this global norm, the critic's by themselves
        optimizer: adamw, adafactor or sgd
        lr_schedule: after the warm-up: constant, or linear or half a cosine to the end of the run
        lr_final: the share of the learning rate at the end of linear and cosine
        warmup_steps: optimizer steps to reach the learning rate (never more than the run has)
        lora_alpha: scale of the adapters; none is twice the rank
        lora_targets: "all-linear", or names of layers with commas between them
        gradient_checkpointing: compute activations again in the backward; saves memory, and shares no prompts
        layout: rows padded in buckets of similar length, or packed into one sequence; auto packs where the attention
            skips what its mask hides (flash_attention_2, flex_attention)
        attention: auto, sdpa, eager, flash_attention_2 or flex_attention, as transformers has them
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
        """With what the run decides. The warm-up is never longer than the run."""
        own = vars(self) | {"warmup_steps": min(self.warmup_steps, max(1, steps))}
        return TrainerSettings(
            **own, lr=lr, steps=steps, tokens_per_microbatch=tokens_per_microbatch, share_prefix=share_prefix
        )


@dataclass(frozen=True, kw_only=True)
class TrainerSettings(TorchSettings):
    """With `lr` and what else a run decides. `steps` is the number of optimizer steps that are planned, by which linear
    and cosine reach the share `lr_final` of `lr`; 0: unknown. With `share_prefix` a prompt that rows share is run once.
    """

    lr: float
    steps: int = 0
    tokens_per_microbatch: int = 16384
    share_prefix: bool = True


def check_settings(settings: TrainerSettings) -> None:
    """Refuse what torch would refuse later with a traceback, or what would train nothing. Raises ConfigError."""
    above, whole = "a number above 0", "a whole number, 0 or more"
    check_bounds(
        ("--lr", settings.lr, 0 < settings.lr < math.inf, above),
        ("--training.betas", settings.betas, all(0 <= b < 1 for b in settings.betas), "two numbers in [0, 1)"),
        ("--training.eps", settings.eps, 0 < settings.eps < math.inf, above),
        ("--training.weight-decay", settings.weight_decay, 0 <= settings.weight_decay < math.inf, "0 or more"),
        ("--training.max-grad-norm", settings.max_grad_norm, 0 < settings.max_grad_norm < math.inf, above),
        ("--training.warmup-steps", settings.warmup_steps, settings.warmup_steps >= 0, whole),
        ("--tokens-per-microbatch", settings.tokens_per_microbatch, settings.tokens_per_microbatch >= 1, "1 or more"),
        ("--training.lr-final", settings.lr_final, 0 <= settings.lr_final <= 1, "a share of --lr, from 0 to 1"),
        ("--steps", settings.steps, settings.steps >= 0, whole),
        one_of("--training.optimizer", settings.optimizer, get_args(OptimizerName)),
        one_of("--training.lr-schedule", settings.lr_schedule, get_args(ScheduleName)),
    )
    if settings.lr_schedule != "constant" and settings.steps == 0:
        raise ConfigError(
            f"--training.lr-schedule {settings.lr_schedule}: it falls until the last optimizer step, and how many "
            "there will be is not known; give --steps, or type --training.lr-schedule constant"
        )
    if settings.lr_schedule == "constant" and settings.lr_final:
        raise ConfigError(
            f"--training.lr-final {settings.lr_final}: a constant learning rate has no other end; type "
            "--training.lr-schedule cosine or linear, or leave --training.lr-final out"
        )


def check_trained_weights(lora_rank: int, lora_alpha: float | None, dtype: str, critic: str = "") -> None:
    """Gradients and the optimizer's moments have the dtype of what is trained: in half precision most steps round to
    nothing, and float16 overflows. Raises ConfigError.
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
    """Refuse what cannot step weights that are DTensors, whether on one rank or on many. Raises ConfigError."""
    if settings.optimizer == "adafactor":
        raise ConfigError(
            "--training.optimizer adafactor: torch's Adafactor cannot step sharded weights (it takes norms of rows in "
            "place, which DTensor refuses); type --training.optimizer adamw or sgd, or --training torch"
        )


def lr_factor(settings: TrainerSettings, version: int) -> float:
    """What the learning rate is multiplied by in the next step, when `version` steps are done.

    With w = `warmup_steps`, N = `steps`, e = `lr_final` and p = min(1, (version - w) / (N - w)):

        version < w   (version + 1) / w, so that the first step counts too and step w is the first whole one
        constant      1
        linear        e + (1 - e) (1 - p)
        cosine        e + (1 - e) (1 + cos(pi p)) / 2     Loshchilov & Hutter 2016 (arXiv:1608.03983), eq. 5, one cycle

    From step N on it is e: a run that goes on longer stays there. After the warm-up these are the schedules of
    transformers (`get_cosine_schedule_with_warmup` and its kin), whose warm-up is one step behind: its first step is
    at 0.

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
    """The optimizer over sets of parameters with a learning rate each; one parameter group a set, in their order.

    Parameters may be DTensors, but not for adafactor (`check_sharded`). Whatever kernel torch takes, the result is the
    same up to rounding; which one is decided for each set (`_kernel`).
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
    """Options of a parameter group: AdamW fused (one kernel for everything) where torch 2.13 has it, which DTensor
    passes on to the shares; else what torch chooses.

    SGD has a fused kernel that DTensor knows nothing of, so it is left out: sharded or not, a step is the same. Where
    DTensors and plain tensors are in one list, only the loop over single tensors works.
    """
    if optimizer == "adafactor":
        return {}
    if len({hasattr(parameter, "full_tensor") for parameter in parameters}) > 1:
        return {"foreach": False}
    fused = all(p.device.type in _FUSED_DEVICES and p.is_floating_point() for p in parameters)
    return {"fused": True} if optimizer == "adamw" and fused else {}


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, Tensor]:
    """The state of an optimizer of `make_optimizer`: its own tensors (no copies), by name, DTensors where the parameter
    is one.

    The names are "<name of the parameter>.<key>", as in "causal.lm_head.weight.exp_avg": `step` (no dimensions, whole
    on every rank) with `exp_avg` and `exp_avg_sq` (adamw), or with `row_var` and `col_var` or `variance` (adafactor);
    `momentum_buffer` (sgd with momentum). A parameter that was never stepped gets the zeros that its first step would
    begin with, so the names are always the same. Whatever is written into these tensors is loaded.
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
    """What the optimizer's first step would begin with. For sgd, whose first step takes the gradient as its momentum,
    zeros are the same: momentum * 0 + gradient.
    """
    if isinstance(optimizer, torch.optim.SGD):
        return {"momentum_buffer": _zeros_like(parameter)} if group["momentum"] else {}
    # A fused kernel counts on the device; the others spare themselves the wait for it.
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
