"""Checks of functions of tokens: losses, KL estimators and off-policy corrections.

They are called on invented tokens through the code that a training step uses. A loss may be an Algorithm: then each of
its terms is checked; `parts` checks its other functions. An invented batch has two prompts with two rollouts each; one
rollout has two segments, and some positions are masked. Legend as in `rollouts.plugins.vocabulary`.

A policy gradient multiplies by a weight that it detaches, so its value changes in a way that its gradient must not
have. Finite differences therefore keep detached values as they are: `Frozen` records every result without a gradient
that was computed from inputs with one, and repeats these results in later calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from rollouts.author_code import shown
from rollouts.training.algorithms.advantages import group_norm
from rollouts.training.algorithms.algorithm import Algorithm, Term, is_reward_placed, requests
from rollouts.training.algorithms.calls import call_author
from rollouts.training.algorithms.checks import unit_of
from rollouts.training.algorithms.corrections import importance_weights
from rollouts.training.algorithms.objective import check_loss_values, evaluate_objective
from rollouts.training.batches import Unit
from rollouts_check.components.common import Function, Subject, trying
from rollouts_check.report import FailedError, SkippedError, at
from rollouts_check.runner import once

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
    tried = "call it on the tokens of four rollouts"
    for function in subject.functions:
        tokens = _usual(subject, function).with_gradient()
        change = "return one value for each token; the engine masks, weighs and adds them up"
        with trying(tried, change, function):
            found, names = _evaluated(subject, function, tokens)
            reported += names
        faulty = int((~found.isfinite()).sum())
        if subject.kind == "corrections":
            faulty += int((found < 0).sum())
            change = "return a weight of 0 or more for each token"
        if faulty:
            seen = f"{faulty} of {found.numel()} values are not valid: {shown(found.tolist())}{at(function)}"
            raise FailedError(tried, seen, change)
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
        gradients = _gradients(subject, function, each, _call(subject, function, each).sum())
        if any(bool((found != 0).any()) for _, found in gradients):
            return
    names = " and ".join(_differentiable(subject, function)) or "an input with a gradient, such as logprobs"
    tried, seen = "compute the gradient of the sum of the values", f"no input gets a gradient{at(function)}"
    raise FailedError(tried, seen, f"compute the values from {names}, and do not detach them")


def _gradients(subject: Subject, function: Function, tokens: Tokens, total: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The gradient of a number by each input that gets one, by name."""
    import torch

    for name in _differentiable(subject, function) if total.requires_grad else ():
        (found,) = torch.autograd.grad(total, tokens.inputs[name], allow_unused=True, retain_graph=True)
        if found is not None:
            yield name, found


def _compare(subject: Subject, function: Function, tokens: Tokens, name: str) -> None:
    import torch

    shape = _call(subject, function, tokens).shape
    random = subject.random("directions")
    weights = torch.tensor([random.uniform(0.5, 1.5) for _ in range(shape.numel())], dtype=torch.float64)

    def total(streams: dict[str, Tensor]) -> Tensor:
        found = _call(subject, function, tokens.changed(**streams))
        return (found.where(_live_values(tokens, found), 0.0) * weights).sum()

    if (differing := finite_differences(total, tokens.streams, name)) is None:
        return
    ours, numeric = (each.flatten() for each in differing)
    place = int((ours - numeric).abs().nan_to_num(nan=torch.inf).argmax())
    values = f"it is {float(ours[place]):.6g}, and finite differences give {float(numeric[place]):.6g}"
    tried, seen = f"compare the gradient of {name} with finite differences", f"at position {place} {values}"
    change = "correct the backward pass: of a torch.autograd.Function, or of an operation in place"
    raise FailedError(tried, f"{seen}{at(function)}", change)


def masked(subject: Subject) -> None:
    """Masked positions have no effect: they get no gradient, and what is there changes no other value."""
    change = "leave masked positions out of sums and means: name `mask`, and write x.where(mask > 0, 0.0)"
    for function in subject.functions:
        tokens = _usual(subject, function)
        live = tokens.live
        first = _call(subject, function, tokens)
        other = _call(subject, function, beside_mask(tokens, subject.random("mask")))
        kept = _live_values(tokens, first)
        if not _near(first[kept], other[kept]):
            raise FailedError("change the inputs at masked positions", f"other values changed{at(function)}", change)
        leaves = tokens.with_gradient()
        for name, found in _gradients(subject, function, leaves, _call(subject, function, leaves)[kept].sum()):
            if bool((found[~live] != 0).any()):
                raise FailedError(f"compute the gradient of {name}", f"masked positions have one{at(function)}", change)


def _live_values(tokens: Tokens, found: Tensor) -> Tensor:
    """Which values are those of live tokens; all, if they are those of rollouts or pairs."""
    import torch

    return tokens.live if found.shape == tokens.live.shape else torch.ones_like(found, dtype=torch.bool)


def rows(subject: Subject) -> None:
    """Values do not depend on how a batch is split into microbatches, nor on the order of its rows."""
    change = "compute the values of a row from this row alone; to get whole rollouts or groups, name rollout_index"
    for function in subject.functions:
        tokens = _usual(subject, function)
        own = units(tokens, _names(subject, function))
        whole = _by_unit(subject, function, tokens, own)
        alone = [_by_unit(subject, function, tokens.take(unit), [unit])[0] for unit in own]
        turned = _by_unit(subject, function, tokens.take([row for unit in reversed(own) for row in unit]), own)
        for tried, found in (("a part of the rows", alone), ("the rows in another order", turned)):
            for number, (one, other) in enumerate(zip(whole, found, strict=True)):
                if not _near(one, other):
                    texts = [shown(each.tolist(), 60) for each in (one, other)]
                    seen = f"the values of part {number} were {texts[0]} in the whole batch, and are {texts[1]}"
                    raise FailedError(f"call it on {tried}", f"{seen}{at(function)}", change)


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


def finite(subject: Subject) -> None:
    """Values and gradients are finite at extremes: policies far apart, certain tokens, advantages of 0."""
    tried = "call it with logprobs from 0 to -100, and advantages from -1 to 5, in float32"
    change = "limit a difference of logprobs before exp(), such as (new - old).clamp(-20, 20).exp()"
    for function in subject.functions:
        tokens = extreme_tokens().with_gradient()
        if "pair_index" in _names(subject, function):
            tokens = tokens.changed(advantages=1.0 - 2.0 * (tokens.inputs["rollout_index"] % 2))
        found = _call(subject, function, tokens)
        if not bool(found.isfinite().all()):
            raise FailedError(tried, _where(tokens, found, "the value", subject, function), change)
        for name, ours in _gradients(subject, function, tokens, found.sum()):
            if not bool(ours.isfinite().all()):
                seen = _where(tokens, ours, f"the gradient of {name}", subject, function)
                raise FailedError(tried, seen, f"{change}; torch.where does not stop a gradient that is infinite")


def _where(tokens: Tokens, found: Tensor, what: str, subject: Subject, function: Function) -> str:
    """The first value that is not finite, and the inputs of its token."""
    place = int((~found.reshape(found.shape[0], -1).isfinite().all(1)).nonzero()[0])
    value = found[place].detach().tolist()
    if found.shape[0] != len(tokens.rows):
        return f"{what} is {value}{at(function)}"
    names = [name for name in _names(subject, function) if name in tokens.streams and tokens.inputs[name].dim() == 1]
    given = ", ".join(f"{name} {float(tokens.inputs[name][place].detach()):g}" for name in names)
    return f"{what} is {shown(value)} where {given}{at(function)}"


def equal(subject: Subject) -> None:
    """Equal policies cost nothing: the value is 0 where the policy is the reference."""
    for function in subject.functions:
        tokens = _usual(subject, function)
        names = [name for name in tokens.inputs if name.endswith("_logprobs") and "topk" not in name]
        found = _call(subject, function, tokens.changed(**dict.fromkeys(names, tokens.inputs["logprobs"])))
        if not _near(found, found * 0):
            seen = f"the values are {shown(found.tolist())}{at(function)}"
            raise FailedError("call it with a reference that equals the policy", seen, "subtract the two logprobs")


def agreement(subject: Subject) -> None:
    """Tokens on which trainer and sampler agree have one weight above 0, so that on-policy batches are trained."""
    for function in subject.functions:
        tokens = _usual(subject, function)
        found = _call(subject, function, tokens.changed(rollout_logprobs=tokens.inputs["old_logprobs"]))[tokens.live]
        if not bool((found > 0).all()) or not _near(found, found[:1].expand_as(found)):
            seen = f"the weights are {shown(found.tolist())}{at(function)}"
            change = "compute the weight from old_logprobs - rollout_logprobs, which is 0 here"
            raise FailedError("call it with equal logprobs of trainer and sampler", seen, change)


# --- calls ------------------------------------------------------------------------------------------------------------


def _names(subject: Subject, function: Function) -> tuple[str, ...]:
    return requests(function, subject.kind)


def _differentiable(subject: Subject, function: Function) -> list[str]:
    return [name for name in WITH_GRADIENT if name in _names(subject, function)]


def _usual(subject: Subject, function: Function) -> Tokens:
    return usual_tokens(subject.random("tokens"), in_pairs="pair_index" in _names(subject, function))


@once
def _unit(subject: Subject) -> Unit:
    """What the function returns one value for. A bare loss may return one for each rollout: the user then chooses the
    aggregation `per_rollout`.
    """
    if not isinstance(subject.component, Algorithm):
        return "token"
    if not isinstance(subject.registered, Algorithm) and "rollout_index" in _names(subject, subject.function):
        tokens = _usual(subject, subject.function)
        found = _returned(subject, subject.function, tokens)
        if getattr(found, "shape", None) == tokens.inputs["rollout_index"].unique().shape:
            return "rollout"
    return cast("Unit", unit_of(subject.component))


def _returned(subject: Subject, function: Function, tokens: Tokens) -> Any:
    """What the function returns, without its metrics."""
    returned = call_author(subject.word, function, tokens.inputs)
    return returned[0] if isinstance(returned, tuple) and returned else returned


def _call(subject: Subject, function: Function, tokens: Tokens) -> Tensor:
    """The values of the function. Raises TrainingError if their shape is wrong."""
    found: Tensor = _returned(subject, function, tokens)
    unit = _unit(subject)
    count = len(tokens.rows) if unit == "token" else len(tokens.inputs[f"{unit}_index"].unique())
    check_loss_values(subject.word, found, function, unit, count)
    return found


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
    algorithm = bare._replace(terms=(Term(function),))
    evaluation = evaluate_objective(algorithm, tokens.inputs, tokens.inputs["mask"], unit=_unit(subject))
    return evaluation.values, list(evaluation.metrics)


def _near(one: Tensor, other: Tensor) -> bool:
    import torch

    return torch.allclose(one.detach().double(), other.detach().double(), rtol=1e-6, atol=NEAR, equal_nan=True)


# --- invented tokens --------------------------------------------------------------------------------------------------


WITH_GRADIENT = ("logprobs", "entropy", "values", "topk_logprobs", "logits")
"""The inputs that carry a gradient."""

WHOLE = ("rewards", "turn_rewards", "step")
"""The inputs that every microbatch of a batch has in whole."""

LENGTHS = ((0, 5), (1, 4), (1, 3), (2, 4), (3, 6))
"""The rollout and the length of each row."""

ALTERNATIVES, VOCABULARY_SIZE = 3, 7


class Tokens(NamedTuple):
    """The inputs by name, and the row of each token [T]."""

    inputs: dict[str, Any]
    rows: list[int]

    @property
    def live(self) -> Tensor:
        """The positions [T] that are trained: bool."""
        mask: Tensor = self.inputs["mask"] > 0
        return mask

    @property
    def streams(self) -> dict[str, Tensor]:
        """The inputs with one entry for each token."""
        return {name: value for name, value in self.inputs.items() if name not in WHOLE}

    def take(self, rows: Sequence[int]) -> Tokens:
        """The tokens of these rows, in this order."""
        places = [place for row in rows for place, each in enumerate(self.rows) if each == row]
        chosen = {name: stream.detach()[places] for name, stream in self.streams.items()}
        return Tokens({**self.inputs, **chosen}, [self.rows[place] for place in places])

    def changed(self, **values: Any) -> Tokens:
        """The tokens with other values."""
        return self._replace(inputs={**self.inputs, **values})

    def with_gradient(self) -> Tokens:
        """Copies of all inputs; those of `WITH_GRADIENT` require a gradient."""
        copies = {name: value.detach().clone() for name, value in self.streams.items()}
        for name in WITH_GRADIENT:
            copies[name].requires_grad_()
        return self.changed(**copies)


def usual_tokens(random: Random, *, in_pairs: bool = False) -> Tokens:
    """Random values as in a run, float64. `in_pairs`: the advantages are those of pairs, 1 and -1."""
    import torch

    rows = [row for row, (_, length) in enumerate(LENGTHS) for _ in range(length)]
    rollouts = [LENGTHS[row][0] for row in rows]
    segments = [int(row == 2) for row in rows]
    turns = [int(row == 2 or (row == 0 and place > 2)) for place, row in enumerate(rows)]
    count = len(rows)
    weights = [0.0 if place == 0 or rows[place - 1] != row else 1.0 for place, row in enumerate(rows)]
    weights[2] = weights[count - 2] = 0.0  # text of a tool
    weights = [weight / 2 if rollout == 2 else weight for weight, rollout in zip(weights, rollouts, strict=True)]
    mask = torch.tensor(weights, dtype=torch.float64)

    def drawn(low: float, high: float, *shape: int) -> Tensor:
        size = len(torch.empty(shape or (count,)).flatten())
        numbers = [random.uniform(low, high) for _ in range(size)]
        return torch.tensor(numbers, dtype=torch.float64).reshape(shape or (count,))

    logprobs = drawn(-3.0, -0.2)
    of_rollouts = (1.0, -1.0, 1.0, -1.0) if in_pairs else (1.3, -0.7, 0.4, -1.6)
    advantages = torch.tensor([of_rollouts[rollout] for rollout in rollouts], dtype=torch.float64)
    topk = drawn(-2.5, -0.7, count, ALTERNATIVES)
    inputs = {
        "logprobs": logprobs,
        **{f"{name}_logprobs": logprobs + drawn(-0.3, 0.3) for name in ("old", "rollout", "ref", "teacher")},
        "advantages": advantages.where(mask > 0, 0.0),
        "returns": drawn(-1.0, 1.0),
        "old_values": drawn(-1.0, 1.0),
        "values": drawn(-1.0, 1.0),
        "entropy": drawn(0.1, 2.0),
        "topk_logprobs": topk,
        "teacher_topk_ids": torch.arange(ALTERNATIVES).repeat(count, 1),
        "teacher_topk_logprobs": topk + drawn(-0.3, 0.3, count, ALTERNATIVES),
        "logits": drawn(-2.0, 2.0, count, VOCABULARY_SIZE),
        "token_rewards": drawn(-0.2, 0.2),
        "mask": mask,
        "rollout_index": torch.tensor(rollouts),
        "group_index": torch.tensor(rollouts) // 2,
        "pair_index": torch.tensor(rollouts) // 2,
        "segments": torch.tensor(segments),
        "turn_index": torch.tensor(turns),
        # One more rollout has no token here, and was not judged.
        "rewards": torch.tensor([1.0, 0.0, 0.5, -1.0, float("nan")], dtype=torch.float64),
        "turn_rewards": [[0.75, 0.25], [0.5, -0.5], [0.5], [-1.0], []],
        "step": 3,
    }
    return Tokens(inputs, rows)


def extreme_tokens() -> Tokens:
    """Policies that are far apart, certain tokens, and advantages of 0: float32, as in a run. No position is masked."""
    import torch

    logprobs = (0.0, -1e-7, -1.0, -30.0, -100.0)
    cases = [(new, old, sign) for new in logprobs for old in logprobs for sign in (0.0, 1.0, -1.0, 5.0)]
    count = len(cases)
    rollouts = torch.arange(count) // 5
    new, old, signs = (torch.tensor(column) for column in zip(*cases, strict=True))
    large = torch.tensor([0.0, 1e3, -1e3, 1.0])[torch.arange(count) % 4]
    rewards = [1.0, -1e6, 0.0, 1e-8] * 5
    wide = new.unsqueeze(1).repeat(1, ALTERNATIVES)
    inputs = {
        "logprobs": new,
        **dict.fromkeys(("old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs"), old),
        "advantages": signs,
        "returns": large,
        "old_values": -large,
        "values": large.flip(0),
        "entropy": torch.tensor([0.0, 1e-8, 1.0, 12.0])[torch.arange(count) % 4],
        "topk_logprobs": wide,
        "teacher_topk_ids": torch.arange(ALTERNATIVES).repeat(count, 1),
        "teacher_topk_logprobs": old.unsqueeze(1).repeat(1, ALTERNATIVES),
        "logits": torch.linspace(-100.0, 100.0, count * VOCABULARY_SIZE).reshape(count, VOCABULARY_SIZE),
        "token_rewards": signs,
        "mask": torch.ones(count),
        "rollout_index": rollouts,
        "group_index": rollouts // 2,
        "pair_index": rollouts // 2,
        "segments": torch.zeros(count, dtype=torch.int64),
        "turn_index": torch.zeros(count, dtype=torch.int64),
        "rewards": torch.tensor([*rewards, float("nan")]),
        "turn_rewards": [*([reward] for reward in rewards), []],
        "step": 0,
    }
    return Tokens(inputs, (torch.arange(count) // 5).tolist())


def beside_mask(tokens: Tokens, random: Random) -> Tokens:
    """The tokens with other values at masked positions. Advantages stay 0 there."""
    import torch

    live, values = tokens.live, dict[str, Any]()
    for name, stream in tokens.streams.items():
        if not stream.is_floating_point() or name in ("mask", "advantages"):
            continue
        other = torch.full_like(stream, random.uniform(-9.0, -4.0))
        here = live.reshape(-1, *[1] * (stream.dim() - 1))
        values[name] = torch.where(here, stream, other)
    return tokens.changed(**values)


def units(tokens: Tokens, requests: Mapping[str, Any] | Sequence[str]) -> list[list[int]]:
    """The rows that stay together in a microbatch, for a function with these inputs: those of a group, a pair, or a
    rollout that it names, else each row alone.
    """
    name = next((name for name in ("group_index", "pair_index", "rollout_index") if name in requests), None)
    together: dict[int, list[int]] = {}
    for row in dict.fromkeys(tokens.rows):
        place = tokens.rows.index(row)
        together.setdefault(row if name is None else int(tokens.inputs[name][place]), []).append(row)
    return list(together.values())


# --- derivatives by finite differences --------------------------------------------------------------------------------


STEPS = (1e-6, 1e-3)  # the second one for functions that compute in float32
TOLERANCES = (1e-5, 1e-2)


def finite_differences(
    call: Callable[[dict[str, Tensor]], Tensor], inputs: Mapping[str, Tensor], name: str
) -> tuple[Tensor, Tensor] | None:
    """The gradient of the number `call(inputs)` by the input of this name, and the same by finite differences; None if
    they agree.
    """
    import torch

    mode = _mode()
    leaves = {each: value.detach().clone().requires_grad_(value.requires_grad) for each, value in inputs.items()}
    with mode:
        total = call(leaves)
    found = torch.autograd.grad(total, leaves[name], allow_unused=True)[0] if total.requires_grad else None
    gradient = torch.zeros_like(leaves[name]) if found is None else found
    other = gradient
    for step, tolerance in zip(STEPS, TOLERANCES, strict=True):
        other = _differences(call, leaves, name, step, mode)
        if torch.allclose(gradient, other, rtol=tolerance, atol=tolerance):
            return None
    return gradient, other


def _differences(
    call: Callable[[dict[str, Tensor]], Tensor], leaves: dict[str, Tensor], name: str, step: float, mode: Any
) -> Tensor:
    import torch

    flat = leaves[name].detach().flatten()
    found = torch.zeros_like(flat)
    for place in range(len(flat)):
        ends = []
        for sign in (1, -1):
            moved = flat.clone()
            moved[place] += sign * step
            changed = {**leaves, name: moved.reshape(leaves[name].shape).requires_grad_()}
            mode.repeat()
            with mode:
                ends.append(float(call(changed).detach()))
        found[place] = (ends[0] - ends[1]) / (2 * step)
    return found.reshape(leaves[name].shape)


def _mode() -> Any:
    import torch
    from torch.overrides import TorchFunctionMode

    def has_gradient(values: Sequence[Any]) -> bool:
        """Whether a tensor in these values, or in their lists and tuples, requires a gradient."""
        return any(
            has_gradient(each) if isinstance(each, list | tuple) else getattr(each, "requires_grad", False)
            for each in values
        )

    class Frozen(TorchFunctionMode):
        """Records the detached results of the first call, and repeats them in later ones."""

        def __init__(self) -> None:
            super().__init__()
            self._kept: list[tuple[Any, Any]] = []
            self._place: int | None = None

        def repeat(self) -> None:
            """From now on, repeat the results from the first one on."""
            self._place = 0

        def __torch_function__(
            self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            is_detached = has_gradient([*args, *(kwargs or {}).values()]) and not has_gradient([result])
            if not is_detached or _is_in_autograd_function():
                return result
            if self._place is None:
                self._kept.append((func, result.clone() if isinstance(result, torch.Tensor) else result))
                return result
            place, self._place = self._place, self._place + 1
            is_same = place < len(self._kept) and self._kept[place][0] == func
            return self._kept[place][1] if is_same else result

    return Frozen()


def _is_in_autograd_function() -> bool:
    """Whether a `torch.autograd.Function` runs: its gradient is its own."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "apply" and code.co_filename.endswith("torch/autograd/function.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
