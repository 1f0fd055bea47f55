"""Settings of a backend and their checks, the learning rate of each step, the optimizer, and masters of half-precision
weights. Its state in a checkpoint
is tensors by name, and plain data: numbers of each parameter, and those of each parameter group that the optimizer
changes. Not here: the core's own optimizers (`optimizers`), and the optimizer steps (`trainer`).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from rollouts.author_code import authors_code, unwrapped
from rollouts.errors import ConfigError, RolloutsError, words_of
from rollouts.plugins.checks import check_bounds, one_of
from rollouts.training.backends import optimizers

OptimizerName = Literal["adamw", "adafactor", "sgd"]
ScheduleName = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class TorchSettings:
    """How a backend computes and optimizes.

    Args:
        dtype: dtype of computations: float32, float64, bfloat16 (trained weights have float32 masters), or with LoRA
            float16; auto: bfloat16 on a GPU, else float32
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
        gradient_checkpointing: compute activations again in the backward pass; saves memory
        layout: auto: the rows of a microbatch are a forest, without padding (earlier: packed); padded: rows are padded
            to the longest (earlier: buckets)
        share_prefix: tokens that several rows begin with run once
        attention: of the engine in this process: auto, sdpa, eager, flash_attention_2 or flex_attention, as in
            transformers
        fp32_head: compute the logits of a half-precision model in float32
        compile: layers: compile the layers with torch.compile; off; auto: layers on a GPU
        memory_budget: of compiled layers: the fraction of activations that is stored and not computed again
    """

    dtype: str = "auto"
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
    layout: Literal["auto", "padded", "packed", "buckets"] = "auto"
    share_prefix: bool = True
    attention: str = "auto"
    fp32_head: bool = False
    compile: Literal["auto", "layers", "off"] = "auto"
    memory_budget: float = 1.0

    def of_run(self, *, lr: float, steps: int, tokens_per_microbatch: int) -> TrainerSettings:
        """Add the settings of the run. The warm-up is never longer than the run."""
        own = vars(self) | {"warmup_steps": min(self.warmup_steps, max(1, steps))}
        return TrainerSettings(**own, lr=lr, steps=steps, tokens_per_microbatch=tokens_per_microbatch)


@dataclass(frozen=True, kw_only=True)
class TrainerSettings(TorchSettings):
    """The backend's settings, and those of the run.

    Attributes:
        lr: learning rate
        steps: planned optimizer steps. The schedules linear and cosine end there; 0: unknown
    """

    lr: float
    steps: int = 0
    tokens_per_microbatch: int = 16384


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
        ("--training.memory-budget", settings.memory_budget, 0 < settings.memory_budget <= 1, "above 0, up to 1"),
        one_of("--training.compile", settings.compile, ("auto", "layers", "off")),
        one_of("--training.optimizer", settings.optimizer, get_args(OptimizerName)),
        one_of("--training.lr-schedule", settings.lr_schedule, get_args(ScheduleName)),
    )
    if settings.lr_schedule != "constant" and settings.steps == 0:
        what = f"--training.lr-schedule {settings.lr_schedule}: it falls until the last optimizer step"
        hint = "give --steps, or type --training.lr-schedule constant"
        raise ConfigError(f"{what}, and the number of steps is not known; {hint}")
    if settings.lr_schedule == "constant" and settings.lr_final:
        what = f"--training.lr-final {settings.lr_final}: a constant learning rate has no final value"
        raise ConfigError(f"{what}; type --training.lr-schedule cosine or linear, or leave --training.lr-final out")


def check_trained_weights(lora_rank: int, lora_alpha: float | None, dtype: str, critic: str = "") -> None:
    """Refuse to train weights in float16, which overflows without a scaled loss. Raises ConfigError."""
    is_alpha = lora_alpha is None or 0 < lora_alpha < math.inf
    check_bounds(
        ("--lora-rank", lora_rank, lora_rank >= 0, "1 or more, or 0 to train all weights"),
        ("--training.lora-alpha", lora_alpha, is_alpha, "a number above 0"),
    )
    if dtype == "float16" and (not lora_rank or critic not in ("", "head")):
        what = "all weights" if not lora_rank else f"--critic {critic}: all of its weights"
        raise ConfigError(
            f"--training.dtype float16: {what} would be trained in float16, which overflows without a scaled loss; "
            "type --training.dtype bfloat16"
        )


def check_sharded(settings: TorchSettings, make: MakeOptimizer | None = None) -> None:
    """Refuse optimizers that cannot step sharded weights (DTensors), on any number of ranks. Raises ConfigError."""
    if settings.optimizer == "adafactor" or unwrapped(make) is optimizers.adafactor:
        flag = "--training.optimizer" if make is None else "--optimizer"
        what = f"{flag} adafactor: torch's Adafactor cannot step sharded weights (it takes norms of rows in place"
        raise ConfigError(f"{what}, which DTensor refuses); type {flag} adamw or sgd, or --training torch")


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


# --- half-precision weights -------------------------------------------------------------------------------------------


class Masters:
    """Float32 masters of parameters that compute in `dtype`. None: there are none, and nothing here does anything.

    A weight in bfloat16 has 8 bits, so most steps of an optimizer would round to nothing. Each trained weight gets a
    master in float32 (Micikevicius et al. 2017, arXiv:1710.03740). Gradients accumulate in the master, and after a step
    the weight is overwritten in place, so it keeps its address. Checkpoints, exports, optimizers and references see the
    masters.
    """

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


# --- the state in a checkpoint ----------------------------------------------------------------------------------------


MakeOptimizer = Callable[[list[dict[str, Any]], float], torch.optim.Optimizer]
"""A function of the parameter groups (`params` and `lr` of each) and the learning rate."""

_CORE = (torch.optim.AdamW, torch.optim.Adafactor, torch.optim.SGD)  # their state is known before the first step
_PLAIN = (bool, int, float, str, type(None))


def check_optimizer(make_optimizer: MakeOptimizer, label: str) -> None:
    """Make the optimizer for two small parameters, and take a step. Raises ConfigError if this fails, if a gradient of
    0 makes a parameter NaN, or if a checkpoint could not hold its state.
    """
    parameters = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))]
    try:
        with authors_code():
            made = make_optimizer([{"params": parameters, "lr": 1e-3}], 1e-3)
    except RolloutsError:
        raise
    except Exception as error:
        raise ConfigError(f"{label} cannot be made: {words_of(error)}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(f"{label} returned {type(made).__name__}\nreturn a torch.optim.Optimizer")
    stepped = {id(parameter) for group in made.param_groups for parameter in group["params"]}
    if stepped != set(map(id, parameters)):
        raise ConfigError(f"{label} leaves out some of the parameters\ngive torch's optimizer all of `params`")
    for parameter, gradient in zip(parameters, (0.5, 0.0), strict=True):
        parameter.grad = torch.full_like(parameter, gradient)
    try:
        with authors_code():
            made.step()
    except Exception as error:
        raise ConfigError(f"{label}: a step failed: {words_of(error)}") from error
    if not all(bool(parameter.isfinite().all()) for parameter in parameters):
        what = f"{label}: a step with a gradient of 0, which is usual, makes weights NaN or infinite"
        raise ConfigError(f"{what}\nif its eps is 0, type --optimizer.eps 1e-8")
    values = [(key, each) for state in made.state.values() for key, each in state.items()]
    values += [(key, each) for group in made.param_groups for key, each in group.items() if isinstance(each, Tensor)]
    for key, value in values:
        if not isinstance(value, (Tensor, *_PLAIN)) or (key in made.param_groups[0] and isinstance(value, Tensor)):
            raise ConfigError(
                f"{label} keeps {key!r}, a {type(value).__name__}, which a checkpoint cannot hold\n"
                "keep tensors and numbers in the state of each parameter, and numbers in a parameter group"
            )


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], saved: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The state tensors of an optimizer, by name; not copies. The state of a DTensor parameter is a DTensor.

    The names are "<name of the parameter>.<key>", for example "causal.lm_head.weight.exp_avg". Keys of the core's own
    optimizers: `step` (no dimensions, whole on every rank) with `exp_avg` and `exp_avg_sq` (adamw), or with `row_var`
    and `col_var` or `variance` (adafactor); `momentum_buffer` (sgd with momentum). For these, a parameter that was
    never stepped has the state with which its first step begins, so the names are always the same. For any other
    optimizer, it has the tensors of `saved`, those of a checkpoint as meta tensors by the same names. Write into the
    tensors to load a state.
    """
    known: dict[str, dict[str, Tensor]] = {}
    for name, tensor in (saved or {}).items():
        known.setdefault(name.rpartition(".")[0], {})[name.rpartition(".")[2]] = tensor
    found: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state, name = optimizer.state[parameter], names[parameter]
            if not state and type(optimizer) in _CORE:
                state.update(_fresh_state(optimizer, group, parameter))
            elif not state:
                state.update({key: _empty(group, parameter, each) for key, each in known.get(name, {}).items()})
            found |= {f"{name}.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
    return found


def plain_optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], made: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """The rest of the state as plain data: the class of the optimizer, numbers of parameters, and what the optimizer
    has changed in its parameter groups since it was `made` (see `group_values`).
    """
    values = {
        name: {key: value for key, value in optimizer.state[parameter].items() if isinstance(value, _PLAIN)}
        for parameter, name in names.items()
        if parameter in optimizer.state
    }
    changed = [
        {key: value for key, value in now.items() if key != "lr" and (key not in before or before[key] != value)}
        for before, now in zip(made, group_values(optimizer), strict=True)
    ]
    return {
        "class": type(optimizer).__qualname__,
        "values": {name: each for name, each in values.items() if each},
        "groups": changed if any(changed) else [],
    }


def load_plain_state(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], saved: Mapping[str, Any]
) -> None:
    """Restore `plain_optimizer_state`."""
    for parameter, name in names.items():
        optimizer.state[parameter].update(saved["values"].get(name, {}))
    for group, changed in zip(optimizer.param_groups, saved["groups"], strict=False):
        group.update(changed)


def group_values(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The numbers and texts of each parameter group."""
    groups = optimizer.param_groups
    return [{key: value for key, value in group.items() if isinstance(value, _PLAIN)} for group in groups]


def check_class(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], path: str) -> None:
    """Raise ConfigError if the checkpoint has the state of another optimizer. Older checkpoints do not say whose state
    they have.
    """
    own = type(optimizer).__qualname__
    if saved and saved["class"] != own:
        what = f"the checkpoint {path} has the state of the optimizer {saved['class']}, and this run uses {own}"
        raise ConfigError(f"{what}; give the --optimizer or --training.optimizer of the run that wrote it")


def _empty(group: dict[str, Any], parameter: nn.Parameter, saved: Tensor) -> Tensor:
    """A tensor to load a state into. One of the parameter's shape is sharded as the parameter is. One without
    dimensions counts steps, on the CPU except for kernels that count on the device.
    """
    if saved.shape == parameter.shape:
        return _zeros_like(parameter).to(saved.dtype)
    counts = not saved.dim() and not (group.get("fused") or group.get("capturable"))
    return torch.zeros(saved.shape, dtype=saved.dtype, device="cpu" if counts else parameter.device)


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
