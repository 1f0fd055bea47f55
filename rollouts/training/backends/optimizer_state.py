"""The state of an optimizer in a checkpoint: tensors by name, and plain data. Also the check of an optimizer that a
user chose, before a model loads.

A state has tensors and numbers of each parameter, and the numbers of each parameter group that the optimizer changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rollouts.author_code import authors_code
from rollouts.errors import ConfigError, RolloutsError, words_of

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
        raise ConfigError(
            f"{label}: a step with a gradient of 0, which is usual, makes weights NaN or infinite\n"
            "if its eps is 0, type --optimizer.eps 1e-8"
        )
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


def plain_state(
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
    """Restore `plain_state`."""
    for parameter, name in names.items():
        optimizer.state[parameter].update(saved["values"].get(name, {}))
    for group, changed in zip(optimizer.param_groups, saved["groups"], strict=False):
        group.update(changed)


def group_values(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The numbers and texts of each parameter group."""
    return [
        {key: value for key, value in group.items() if isinstance(value, _PLAIN)} for group in optimizer.param_groups
    ]


def check_class(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], path: str) -> None:
    """Raise ConfigError if the checkpoint has the state of another optimizer. Older checkpoints do not say whose state
    they have.
    """
    own = type(optimizer).__qualname__
    if saved and saved["class"] != own:
        raise ConfigError(
            f"the checkpoint {path} has the state of the optimizer {saved['class']}, and this run uses {own}; give the "
            "--optimizer or --training.optimizer of the run that wrote it"
        )


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
