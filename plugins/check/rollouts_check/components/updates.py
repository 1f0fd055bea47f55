"""Checks of what changes tensors in place: rules of the reference policy, and optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollouts.errors import UserError, counted
from rollouts.plugins.signature import call_with
from rollouts_check.components.common import Function, Subject, snapshot
from rollouts_check.report import FailedError

if TYPE_CHECKING:
    from torch import Tensor, nn

VERSIONS = (0, 1, 2, 100, 10_000)
LR = 1e-2


# --- references -------------------------------------------------------------------------------------------------------


def reference_trial(subject: Subject, function: Function) -> Any:
    """The reference after some steps."""
    reference, policy = _tensors(1), _tensors(2)
    for version in VERSIONS:
        _apply(function, reference, policy, version)
    return reference


def updates(subject: Subject) -> str:
    """It changes the reference in place, keeps it finite, and returns nothing.

    Advice: write into `reference`, and return nothing
    """
    reference, policy = _tensors(1), _tensors(2)
    shapes = [(each.shape, each.dtype) for each in reference]
    moved = 0
    for version in VERSIONS:
        before = snapshot(reference)
        with subject.trying(f"call it at version {version}") as attempt:
            returned = _apply(subject.function, reference, policy, version)
        moved += snapshot(reference) != before
        attempt.require(returned is None, f"it returned {type(returned).__name__}")
        is_same = [(each.shape, each.dtype) for each in reference] == shapes
        attempt.require(is_same, "a tensor of the reference has another shape or dtype")
        is_finite = all(bool(each.isfinite().all()) for each in reference)
        attempt.require(is_finite, "a value of the reference is not finite", "correct the rule")
    return f"changes the reference at {moved} of {counted(len(VERSIONS), 'version')}"


def policy_unchanged(subject: Subject) -> None:
    """It does not change the policy.

    Advice: change `reference` only
    """
    policy = _tensors(2)
    before = snapshot(policy)
    for version in VERSIONS:
        _apply(subject.function, _tensors(1), policy, version)
        subject.attempt(f"call it at version {version}").require(snapshot(policy) == before, "the policy changed")


def precisions(subject: Subject) -> None:
    """It works if policy and reference have different precisions, and if this process has no tensor."""
    import torch

    for ours, theirs in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        reference, policy = [each.to(ours) for each in _tensors(1)], [each.to(theirs) for each in _tensors(2)]
        tried, change = f"call it with a reference of {ours} and a policy of {theirs}", "convert: new.to(old.dtype)"
        with subject.trying(tried, change) as attempt:
            for version in VERSIONS:
                _apply(subject.function, reference, policy, version)
        is_same = all(each.dtype == ours for each in reference)
        attempt.require(is_same, "the reference has another precision afterwards")
    with subject.trying("call it with empty lists: another rank has all tensors", "return if `reference` is empty"):
        _apply(subject.function, [], [], 1)


def _apply(function: Function, reference: list[Tensor], policy: list[Tensor], version: int) -> Any:
    import torch

    inputs = {"reference": reference, "policy": policy, "adapters": reference, "version": version}
    with torch.no_grad():
        return call_with(function, inputs)


def _tensors(seed: int) -> list[Tensor]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((2, 3), (3,))]


# --- optimizers -------------------------------------------------------------------------------------------------------


def optimizer_trial(subject: Subject, function: Function) -> Any:
    """The parameters after three steps."""
    parameters = _parameters()
    _step(_made(function, parameters), parameters, 3)
    return [each.detach() for each in parameters]


def steps(subject: Subject) -> None:
    """It is a torch optimizer of all parameters, takes a step, and has a state that a checkpoint can hold."""
    from rollouts.training.backends.optimizer import check_optimizer

    try:
        check_optimizer(subject.function, f"the optimizer {subject.found.label}")
    except UserError as error:
        first, _, change = str(error).partition("\n")
        raise FailedError("make it for two parameters, and take a step", first, change or "correct it") from error


def descends(subject: Subject) -> str:
    """Steps go against the gradient: the square of the parameters falls.

    Advice: correct the sign or the size of a step
    """
    parameters = _parameters()
    optimizer = _made(subject.function, parameters)
    before = _squares(parameters)
    for _ in range(20):
        for each in parameters:
            each.grad = 2 * each.detach()
        optimizer.step()
    after = _squares(parameters)
    attempt = subject.attempt("minimize the sum of the squares")
    attempt.require(after < before, f"it was {before:g}, and is {after:g} after 20 steps")
    return f"{before:.3g} to {after:.3g} in 20 steps with lr {LR:g}"


def learning_rates(subject: Subject) -> None:
    """Each group has its own rate, and a rate of 0 changes nothing: the trainer sets the rates before each step.

    Advice: give torch the groups as they are: each has `params` and `lr`
    """
    parameters = _parameters()
    given = [{"params": [each], "lr": LR * (number + 1)} for number, each in enumerate(parameters)]
    optimizer = subject.function(given, LR)
    rates = {id(each): group["lr"] for group in optimizer.param_groups for each in group["params"]}
    attempt = subject.attempt("make it with two groups of different rates")
    for number, each in enumerate(parameters, start=1):
        rate, seen = LR * number, rates.get(id(each), -1.0)
        attempt.require(abs(seen - rate) <= 1e-12, f"a group with the rate {rate:g} got {seen:g}")
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = snapshot([each.detach() for each in parameters])
    _step(optimizer, parameters, 1)
    attempt = subject.attempt("take a step with the rate 0", 'multiply every change by group["lr"], weight decay too')
    attempt.require(snapshot([each.detach() for each in parameters]) == before, "parameters changed")


def gradients(subject: Subject) -> None:
    """Parameters without a gradient stay as they are, and a gradient of 0 keeps all parameters finite.

    Advice: skip it: if parameter.grad is None
    """
    parameters = _parameters()
    optimizer = _made(subject.function, parameters)
    before = snapshot(parameters[1].detach())
    parameters[0].grad = parameters[0].detach() * 0
    with subject.trying("take a step where one gradient is None and the other one is 0") as attempt:
        optimizer.step()
    attempt.require(snapshot(parameters[1].detach()) == before, "the parameter without a gradient changed")
    is_finite = bool(parameters[0].isfinite().all())
    attempt.require(is_finite, "the other one is not finite", "add a small number to the divisor")


def restored(subject: Subject) -> str:
    """A resumed run continues with the same steps: the state is saved and loaded as in a checkpoint.

    Advice: keep all state in `self.state[parameter]` or in the groups: tensors and numbers
    """
    import torch

    from rollouts.training.backends import optimizer as states

    one, other = _parameters(), _parameters()
    first, second = _made(subject.function, one), _made(subject.function, other)
    made = states.group_values(first)
    _step(first, one, 3)
    names, others = ({each: f"p{number}" for number, each in enumerate(own)} for own in (one, other))
    saved = {key: value.clone() for key, value in states.optimizer_tensors(first, names).items()}
    plain = states.plain_optimizer_state(first, names, made)
    with torch.no_grad():
        for ours, theirs in zip(one, other, strict=True):
            theirs.copy_(ours)
    for key, tensor in states.optimizer_tensors(second, others, saved).items():
        tensor.copy_(saved[key])
    states.load_plain_state(second, others, plain)
    for optimizer, parameters in ((first, one), (second, other)):
        _step(optimizer, parameters, 3)
    attempt = subject.attempt("save its state after three steps, and load it into a new one")
    first_values, second_values = (snapshot([each.detach() for each in own]) for own in (one, other))
    attempt.require(first_values == second_values, "the parameters differ after three more steps")
    return counted(len(saved), "tensor")


def _parameters() -> list[nn.Parameter]:
    from torch import nn

    return [nn.Parameter(each) for each in _tensors(3)]


def _made(function: Function, parameters: list[nn.Parameter]) -> Any:
    return function([{"params": parameters, "lr": LR}], LR)


def _step(optimizer: Any, parameters: list[nn.Parameter], count: int) -> None:
    """Take some steps with gradients that depend on the parameters alone."""
    for _ in range(count):
        for each in parameters:
            each.grad = each.detach().sin()
        optimizer.step()


def _squares(parameters: list[nn.Parameter]) -> float:
    return sum(float((each.detach() ** 2).sum()) for each in parameters)
