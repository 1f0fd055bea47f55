"""Checks of functions of tokens: losses, KL estimators and off-policy corrections.

They are called on invented tokens through the code that a training step uses. A loss may be an Algorithm: then each of
its terms is checked; `parts` checks its other functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollouts.author_code import shown
from rollouts.training.algorithms.advantages import group_norm
from rollouts.training.algorithms.algorithm import Algorithm, Term, is_reward_placed, requests
from rollouts.training.algorithms.calls import call_author
from rollouts.training.algorithms.checks import unit_of
from rollouts.training.algorithms.objective import check_loss_values, evaluate_objective, importance_weights
from rollouts.training.batches import Unit
from rollouts_check.components.stop_gradient import finite_differences
from rollouts_check.components.subject import Function, Subject, at, trying
from rollouts_check.components.token_inputs import (
    WITH_GRADIENT,
    Tokens,
    beside_mask,
    extreme_tokens,
    units,
    usual_tokens,
)
from rollouts_check.report import FailedError, SkippedError

if TYPE_CHECKING:
    from torch import Tensor

NEAR = 1e-9  # differences of rounding in float64
SMALL, FAR = 1e-4, 3.0


def trial(subject: Subject, function: Function) -> list[Any]:
    """The values of one function on usual tokens."""
    return [_call(subject, function, _usual(subject, function)).detach()]


def values(subject: Subject) -> str:
    """It returns one finite value for each token, rollout or pair, not reduced, and valid metrics."""
    reported: list[str] = []
    for function in subject.functions:
        tokens = _usual(subject, function).with_gradient()
        change = "return one value for each token; the engine masks, weighs and adds them up"
        with trying("call it on the tokens of four rollouts", change, function):
            found, names = _evaluated(subject, function, tokens)
            reported += names
        faulty = int((~found.isfinite()).sum())
        if subject.kind == "corrections":
            faulty += int((found < 0).sum())
            change = "return a weight of 0 or more for each token"
        if faulty:
            seen = f"{faulty} of {found.numel()} values are not valid: {shown(found.tolist())}{at(function)}"
            raise FailedError("call it on the tokens of four rollouts", seen, change)
    return f"reports {', '.join(reported)}" if reported else ""


def gradient(subject: Subject) -> str:
    """Its gradient is that of its values: equal to finite differences in float64, detached values kept as they are."""
    checked = 0
    for function in subject.functions:
        if subject.kind == "kl" and is_reward_placed(function):
            raise SkippedError("it does not name `logprobs`: it is subtracted from the rewards, without a gradient")
        tokens = _usual(subject, function)
        _require_gradient(subject, function, tokens)
        for name in _differentiable(subject, function):
            checked += 1
            _compare(subject, function, tokens.with_gradient(), name)
    return f"{checked} inputs" if checked > 1 else ""


def _require_gradient(subject: Subject, function: Function, tokens: Tokens) -> None:
    """Raise FailedError if no input gets a gradient: as usual, near the sampler, or far from the reference."""
    import torch

    close = tokens.inputs["logprobs"] + SMALL * torch.linspace(-1, 1, len(tokens.rows), dtype=torch.float64)
    near = {f"{name}_logprobs": close for name in ("old", "rollout")}
    apart = {"ref_logprobs": tokens.inputs["logprobs"] + FAR * torch.linspace(-1, 1, len(tokens.rows)).sign()}
    for values in ({}, near, apart):
        each = tokens.changed(**values).with_gradient()
        total = _call(subject, function, each).sum()
        if not total.requires_grad:
            break
        for name in _differentiable(subject, function):
            (found,) = torch.autograd.grad(total, each.inputs[name], allow_unused=True, retain_graph=True)
            if found is not None and bool((found != 0).any()):
                return
    names = " and ".join(_differentiable(subject, function)) or "an input with a gradient, such as logprobs"
    raise FailedError(
        "compute the gradient of the sum of the values",
        f"no input gets a gradient{at(function)}",
        f"compute the values from {names}, and do not detach them",
    )


def _compare(subject: Subject, function: Function, tokens: Tokens, name: str) -> None:
    import torch

    shape = _call(subject, function, tokens).shape
    random = subject.random("directions")
    weights = torch.tensor([random.uniform(0.5, 1.5) for _ in range(shape.numel())], dtype=torch.float64)

    def total(streams: dict[str, Tensor]) -> Tensor:
        found = _call(subject, function, tokens.changed(**streams))
        live = tokens.live if found.shape == tokens.live.shape else torch.ones_like(found, dtype=torch.bool)
        return (found.where(live, 0.0) * weights).sum()

    differing = finite_differences(total, tokens.streams, name)
    if differing is None:
        return
    ours, numeric = (each.flatten() for each in differing)
    place = int((ours - numeric).abs().nan_to_num(nan=torch.inf).argmax())
    raise FailedError(
        f"compare the gradient of {name} with finite differences",
        f"at position {place} it is {float(ours[place]):.6g}, and finite differences give {float(numeric[place]):.6g}"
        f"{at(function)}",
        "correct the backward pass: of a torch.autograd.Function, or of an operation in place",
    )


def masked(subject: Subject) -> str:
    """Masked positions have no effect: they get no gradient, and what is there changes no other value."""
    import torch

    for function in subject.functions:
        tokens = _usual(subject, function)
        live = tokens.live
        first = _call(subject, function, tokens)
        other = _call(subject, function, beside_mask(tokens, subject.random("mask")))
        kept = live if first.shape == live.shape else torch.ones_like(first, dtype=torch.bool)
        change = "leave masked positions out of sums and means: name `mask`, and write x.where(mask > 0, 0.0)"
        if not _near(first[kept], other[kept]):
            tried = "change the inputs at masked positions"
            raise FailedError(tried, f"values of other tokens changed{at(function)}", change)
        leaves = tokens.with_gradient()
        total = _call(subject, function, leaves)[kept].sum()
        for name in _differentiable(subject, function) if total.requires_grad else ():
            (found,) = torch.autograd.grad(total, leaves.inputs[name], allow_unused=True, retain_graph=True)
            if found is not None and bool((found[~live] != 0).any()):
                tried = f"compute the gradient of {name}"
                raise FailedError(tried, f"masked positions get a gradient{at(function)}", change)
    return ""


def rows(subject: Subject) -> str:
    """Values do not depend on how a batch is split into microbatches, nor on the order of its rows."""
    for function in subject.functions:
        tokens = _usual(subject, function)
        own = units(tokens, _names(subject, function))
        whole = _by_unit(subject, function, tokens, own)
        alone = [_by_unit(subject, function, tokens.take(unit), [unit])[0] for unit in own]
        turned = _by_unit(subject, function, tokens.take([row for unit in reversed(own) for row in unit]), own)
        for tried, found in (
            ("call it on a part of the rows", alone),
            ("call it on the rows in another order", turned),
        ):
            for number, (one, other) in enumerate(zip(whole, found, strict=True)):
                if not _near(one, other):
                    seen = (
                        f"the values of part {number} were {shown(one.tolist(), 60)} in the whole batch, and are "
                        f"{shown(other.tolist(), 60)}{at(function)}"
                    )
                    change = (
                        "compute the values of a row from this row alone; a function that names rollout_index or "
                        "group_index gets whole rollouts or groups"
                    )
                    raise FailedError(tried, seen, change)
    return ""


def _by_unit(subject: Subject, function: Function, tokens: Tokens, own: list[list[int]]) -> list[Tensor]:
    """The values of each unit of rows. Values of rollouts or pairs are in the order of their numbers."""
    import torch

    found = _call(subject, function, tokens)
    unit = _unit(subject)
    if unit == "token":
        places = [[place for place, row in enumerate(tokens.rows) if row in rows] for rows in own]
        return [found[sorted(each, key=lambda place: (tokens.rows[place], place))] for each in places]
    index = tokens.inputs[f"{unit}_index"]
    numbers = index.unique().tolist()
    values = []
    for rows in own:
        theirs = {int(index[place]) for place, row in enumerate(tokens.rows) if row in rows}
        values.append(torch.stack([found[numbers.index(number)] for number in sorted(theirs)]))
    return values


def finite(subject: Subject) -> str:
    """Values and gradients are finite at extremes: policies far apart, certain tokens, advantages of 0."""
    import torch

    for function in subject.functions:
        tokens = extreme_tokens().with_gradient()
        if "pair_index" in _names(subject, function):
            tokens = tokens.changed(advantages=_pair_signs(tokens))
        tried = "call it with logprobs from 0 to -100, and advantages from -1 to 5, in float32"
        change = "limit a difference of logprobs before exp(), such as (new - old).clamp(-20, 20).exp()"
        found = _call(subject, function, tokens)
        if not bool(found.isfinite().all()):
            raise FailedError(tried, _where(tokens, found, "the value", subject, function), change)
        for name in _differentiable(subject, function) if found.requires_grad else ():
            (ours,) = torch.autograd.grad(found.sum(), tokens.inputs[name], allow_unused=True, retain_graph=True)
            if ours is not None and not bool(ours.isfinite().all()):
                seen = _where(tokens, ours, f"the gradient of {name}", subject, function)
                raise FailedError(tried, seen, f"{change}; torch.where does not stop a gradient that is infinite")
    return ""


def _pair_signs(tokens: Tokens) -> Tensor:
    signs: Tensor = 1.0 - 2.0 * (tokens.inputs["rollout_index"] % 2)
    return signs


def _where(tokens: Tokens, found: Tensor, what: str, subject: Subject, function: Function) -> str:
    """The first value that is not finite, and the inputs of its token."""
    place = int((~found.reshape(found.shape[0], -1).isfinite().all(1)).nonzero()[0])
    value = found[place].detach().tolist()
    if found.shape[0] != len(tokens.rows):
        return f"{what} is {value}{at(function)}"
    names = [name for name in _names(subject, function) if name in tokens.streams and tokens.inputs[name].dim() == 1]
    given = ", ".join(f"{name} {float(tokens.inputs[name][place].detach()):g}" for name in names)
    return f"{what} is {shown(value)} where {given}{at(function)}"


def equal(subject: Subject) -> str:
    """Equal policies cost nothing: the value is 0 where the policy is the reference."""
    for function in subject.functions:
        tokens = _usual(subject, function)
        same = {name: tokens.inputs["logprobs"] for name in tokens.inputs if name.endswith("_logprobs")}
        same = {name: value for name, value in same.items() if not name.startswith(("topk", "teacher_topk"))}
        found = _call(subject, function, tokens.changed(**same))
        if not _near(found, found * 0):
            seen = f"the values are {shown(found.tolist())}{at(function)}"
            raise FailedError("call it with a reference that equals the policy", seen, "subtract the two logprobs")
    return ""


def agreement(subject: Subject) -> str:
    """Tokens on which trainer and sampler agree have one weight above 0, so that on-policy batches are trained."""
    for function in subject.functions:
        tokens = _usual(subject, function)
        found = _call(subject, function, tokens.changed(rollout_logprobs=tokens.inputs["old_logprobs"]))[tokens.live]
        if not bool((found > 0).all()) or not _near(found, found[:1].expand_as(found)):
            seen = f"the weights are {shown(found.tolist())}{at(function)}"
            change = "compute the weight from old_logprobs - rollout_logprobs, which is 0 here"
            raise FailedError("call it with equal logprobs of trainer and sampler", seen, change)
    return ""


# --- calls ------------------------------------------------------------------------------------------------------------


def _names(subject: Subject, function: Function) -> tuple[str, ...]:
    return requests(function, subject.kind)


def _differentiable(subject: Subject, function: Function) -> list[str]:
    return [name for name in WITH_GRADIENT if name in _names(subject, function)]


def _usual(subject: Subject, function: Function) -> Tokens:
    return usual_tokens(subject.random("tokens"), in_pairs="pair_index" in _names(subject, function))


def _unit(subject: Subject) -> Unit:
    """What the function returns one value for. A bare loss may return one for each rollout: the user then chooses the
    aggregation `per_rollout`.
    """
    if not isinstance(subject.component, Algorithm):
        return "token"
    if "unit" not in subject.kept:
        subject.kept["unit"] = unit_of(subject.component)
        if not isinstance(subject.registered, Algorithm) and "rollout_index" in _names(subject, subject.function):
            tokens = _usual(subject, subject.function)
            returned = call_author(subject.word, subject.function, tokens.inputs)
            found = returned[0] if isinstance(returned, tuple) and returned else returned
            if getattr(found, "shape", None) == tokens.inputs["rollout_index"].unique().shape:
                subject.kept["unit"] = "rollout"
    unit: Unit = subject.kept["unit"]
    return unit


def _call(subject: Subject, function: Function, tokens: Tokens) -> Tensor:
    """The values of the function. Raises TrainingError if their shape is wrong."""
    returned = call_author(subject.word, function, tokens.inputs)
    found = returned[0] if isinstance(returned, tuple) and returned else returned
    unit = _unit(subject)
    count = len(tokens.rows) if unit == "token" else len(tokens.inputs[f"{unit}_index"].unique())
    check_loss_values(subject.word, found, function, unit, count)
    checked: Tensor = found
    return checked


def _evaluated(subject: Subject, function: Function, tokens: Tokens) -> tuple[Tensor, list[str]]:
    """The values as a training step computes them, 0 where they are masked, and the names of reported metrics."""
    bare = Algorithm(group_norm, "token_mean", ())
    if subject.kind == "corrections":
        weights = importance_weights(bare._replace(correction=function), tokens.inputs, tokens.inputs["mask"])
        assert weights is not None, "there is a correction"
        return weights.where(tokens.live, 0.0), []
    found = _call(subject, function, tokens)
    if subject.kind == "kl":
        return found.where(tokens.live, 0.0), []
    evaluation = evaluate_objective(
        bare._replace(terms=(Term(function),)), tokens.inputs, tokens.inputs["mask"], unit=_unit(subject)
    )
    return evaluation.values, list(evaluation.metrics)


def _near(one: Tensor, other: Tensor) -> bool:
    import torch

    return torch.allclose(one.detach().double(), other.detach().double(), rtol=1e-6, atol=NEAR, equal_nan=True)
