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
from rollouts_check.components.common import Function, Subject
from rollouts_check.report import Attempt, SkippedError, trying
from rollouts_check.runner import once

if TYPE_CHECKING:
    from torch import Tensor

NEAR = 1e-9  # differences of rounding in float64
SMALL, FAR = 1e-4, 3.0


def trial(subject: Subject, function: Function) -> list[Any]:
    """The values of one function on usual tokens."""
    called = Called(subject, function)
    return [called.values(called.usual()).detach()]


def values(subject: Subject) -> str:
    """It returns one finite value for each token, rollout or pair, not reduced, and valid metrics."""
    reported: list[str] = []
    for called in _each(subject):
        change = "return one value for each token; the trainer masks, weighs and adds them up"
        with trying("call it on the tokens of four rollouts", called.function, change=change) as attempt:
            found, names = called.evaluated(called.usual().with_gradient())
        reported += names
        faulty = ~found.isfinite()
        if subject.kind == "corrections":
            faulty, change = faulty | (found < 0), "return a weight of 0 or more for each token"
        seen = f"{int(faulty.sum())} of {found.numel()} values are not valid: {shown(found.tolist())}"
        attempt.require(not bool(faulty.any()), seen, change)
    return f"reports {', '.join(reported)}" if reported else ""


def gradient(subject: Subject) -> str:
    """Its gradient is that of its values: equal to finite differences in float64, detached values kept as they are."""
    checked = 0
    for called in _each(subject):
        if subject.kind == "kl" and is_reward_placed(called.function):
            raise SkippedError("it does not name `logprobs`: it is subtracted from the rewards, without a gradient")
        tokens = called.usual()
        _require_gradient(called, tokens)
        for name in called.differentiable:
            checked += 1
            _compare(called, tokens.with_gradient(), name)
    return f"{checked} inputs" if checked > 1 else ""


def _require_gradient(called: Called, tokens: Tokens) -> None:
    """Raise FailedError if no input gets a gradient: as usual, near the sampler, or far from the reference."""
    import torch

    close = tokens.inputs["logprobs"] + SMALL * torch.linspace(-1, 1, len(tokens.rows), dtype=torch.float64)
    near = {f"{name}_logprobs": close for name in ("old", "rollout")}
    apart = {"ref_logprobs": tokens.inputs["logprobs"] + FAR * torch.linspace(-1, 1, len(tokens.rows)).sign()}
    for values in ({}, near, apart):
        each = tokens.changed(**values).with_gradient()
        if any(bool((found != 0).any()) for _, found in called.gradients(each, called.values(each).sum())):
            return
    names = " and ".join(called.differentiable) or "an input with a gradient, such as logprobs"
    change = f"compute the values from {names}, and do not detach them"
    raise called.attempt("compute the gradient of the sum of the values", change).failed("no input gets a gradient")


def _compare(called: Called, tokens: Tokens, name: str) -> None:
    import torch

    random = called.subject.random("directions")
    count = called.values(tokens).numel()
    weights = torch.tensor([random.uniform(0.5, 1.5) for _ in range(count)], dtype=torch.float64)

    def total(streams: dict[str, Tensor]) -> Tensor:
        found = called.values(tokens.changed(**streams))
        return (found.where(_live_values(tokens, found), 0.0) * weights).sum()

    if (differing := finite_differences(total, tokens.streams, name)) is None:
        return
    ours, numeric = (each.flatten() for each in differing)
    place = int((ours - numeric).abs().nan_to_num(nan=torch.inf).argmax())
    change = "correct the backward pass: of a torch.autograd.Function, or of an operation in place"
    attempt = called.attempt(f"compare the gradient of {name} with finite differences", change)
    raise attempt.failed(f"at position {place} it is {float(ours[place]):.6g}, expected {float(numeric[place]):.6g}")


def masked(subject: Subject) -> None:
    """Masked positions have no effect: they get no gradient, and what is there changes no other value.

    Advice: leave masked positions out of sums and means: name `mask`, and write x.where(mask > 0, 0.0)
    """
    for called in _each(subject):
        attempt = called.attempt("change the inputs at masked positions, and compute their gradients")
        tokens = called.usual()
        first, other = called.values(tokens), called.values(beside_mask(tokens, subject.random("mask")))
        kept = _live_values(tokens, first)
        attempt.require(_near(first[kept], other[kept]), "other values changed")
        leaves = tokens.with_gradient()
        for name, found in called.gradients(leaves, called.values(leaves)[kept].sum()):
            attempt.require(not bool((found[~tokens.live] != 0).any()), f"{name} has a gradient there")


def _live_values(tokens: Tokens, found: Tensor) -> Tensor:
    """Which values are those of live tokens; all, if they are those of rollouts or pairs."""
    import torch

    return tokens.live if found.shape == tokens.live.shape else torch.ones_like(found, dtype=torch.bool)


def rows(subject: Subject) -> None:
    """Values do not depend on how a batch is split into microbatches, nor on the order of its rows.

    Advice: compute the values of a row from this row alone; to get whole rollouts or groups, name rollout_index
    """
    for called in _each(subject):
        tokens = called.usual()
        own = units(tokens, called.names)
        whole = called.by_unit(tokens, own)
        alone = [called.by_unit(tokens.take(unit), [unit])[0] for unit in own]
        turned = called.by_unit(tokens.take([row for unit in reversed(own) for row in unit]), own)
        for tried, found in (("a part of the rows", alone), ("the rows in another order", turned)):
            for number, (one, other) in enumerate(zip(whole, found, strict=True)):
                texts = [shown(each.tolist(), 60) for each in (one, other)]
                seen = f"the values of part {number} were {texts[0]} in the whole batch, and are {texts[1]}"
                called.attempt(f"call it on {tried}").require(_near(one, other), seen)


def finite(subject: Subject) -> None:
    """Values and gradients are finite at extremes: policies far apart, certain tokens, advantages of 0.

    Advice: limit a difference of logprobs before exp(), such as (new - old).clamp(-20, 20).exp();
    torch.where does not stop a gradient that is infinite
    """
    for called in _each(subject):
        attempt = called.attempt("call it with logprobs from 0 to -100, and advantages from -1 to 5, in float32")
        tokens = extreme_tokens().with_gradient()
        if "pair_index" in called.names:
            tokens = tokens.changed(advantages=1.0 - 2.0 * (tokens.inputs["rollout_index"] % 2))
        found = called.values(tokens)
        for what, each in (("the value", found), *called.gradients(tokens, found.sum())):
            if not bool(each.isfinite().all()):
                raise attempt.failed(_where(called, tokens, each, what))


def _where(called: Called, tokens: Tokens, found: Tensor, what: str) -> str:
    """The first value or gradient that is not finite, and the inputs of its token."""
    place = int((~found.reshape(found.shape[0], -1).isfinite().all(1)).nonzero()[0])
    streams = tokens.streams if found.shape[0] == len(tokens.rows) else {}
    names = [name for name in called.names if name in streams and streams[name].dim() == 1]
    given = ", ".join(f"{name} {float(streams[name][place].detach()):g}" for name in names)
    return f"{what} is {shown(found[place].detach().tolist())}" + (f" where {given}" if given else "")


def equal(subject: Subject) -> None:
    """Equal policies cost nothing: the value is 0 where the policy is the reference.

    Advice: subtract the two logprobs
    """
    for called in _each(subject):
        tokens = called.usual()
        names = [name for name in tokens.inputs if name.endswith("_logprobs") and "topk" not in name]
        found = called.values(tokens.changed(**dict.fromkeys(names, tokens.inputs["logprobs"])))
        attempt = called.attempt("call it with a reference that equals the policy")
        attempt.require(_near(found, found * 0), f"the values are {shown(found.tolist())}")


def agreement(subject: Subject) -> None:
    """Tokens on which trainer and sampler agree have one weight above 0, so that on-policy batches are trained.

    Advice: compute the weight from old_logprobs - rollout_logprobs, which is 0 here
    """
    for called in _each(subject):
        tokens = called.usual()
        found = called.values(tokens.changed(rollout_logprobs=tokens.inputs["old_logprobs"]))[tokens.live]
        is_one = bool((found > 0).all()) and _near(found, found[:1].expand_as(found))
        attempt = called.attempt("call it with equal logprobs of trainer and sampler")
        attempt.require(is_one, f"the weights are {shown(found.tolist())}")


# --- calls ------------------------------------------------------------------------------------------------------------


class Called(NamedTuple):
    """A function of a component, called as in a training step."""

    subject: Subject
    function: Function

    @property
    def names(self) -> tuple[str, ...]:
        """The inputs that it names."""
        return requests(self.function, self.subject.kind)

    @property
    def differentiable(self) -> list[str]:
        """Those of them that carry a gradient."""
        return [name for name in WITH_GRADIENT if name in self.names]

    def attempt(self, tried: str, change: str = "") -> Attempt:
        """What a check tries. Its failures have the line of the function."""
        return Attempt(tried, self.function, change=change)

    def usual(self) -> Tokens:
        """Usual tokens for it."""
        return usual_tokens(self.subject.random("tokens"), in_pairs="pair_index" in self.names)

    def returned(self, tokens: Tokens) -> Any:
        """What it returns, without its metrics."""
        returned = call_author(self.subject.word, self.function, tokens.inputs)
        return returned[0] if isinstance(returned, tuple) and returned else returned

    def values(self, tokens: Tokens) -> Tensor:
        """Its values. Raises TrainingError if their shape is wrong."""
        found: Tensor = self.returned(tokens)
        unit = _unit(self.subject)
        count = len(tokens.rows) if unit == "token" else len(tokens.inputs[f"{unit}_index"].unique())
        check_loss_values(self.subject.word, found, self.function, unit, count)
        return found

    def evaluated(self, tokens: Tokens) -> tuple[Tensor, list[str]]:
        """The values as a training step computes them, 0 where they are masked, and the names of reported metrics."""
        bare = Algorithm(group_norm, "token_mean", ())
        if self.subject.kind == "corrections":
            bare = bare._replace(correction=self.function)
            weights = importance_weights(bare, tokens.inputs, tokens.inputs["mask"])
            assert weights is not None, "there is a correction"
            return weights.where(tokens.live, 0.0), []
        found = self.values(tokens)
        if self.subject.kind == "kl":
            return found.where(tokens.live, 0.0), []
        algorithm, unit = bare._replace(terms=(Term(self.function),)), _unit(self.subject)
        evaluation = evaluate_objective(algorithm, tokens.inputs, tokens.inputs["mask"], unit=unit)
        return evaluation.values, list(evaluation.metrics)

    def gradients(self, tokens: Tokens, total: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The gradient of a number by each input that gets one, with its name."""
        import torch

        for name in self.differentiable if total.requires_grad else ():
            (found,) = torch.autograd.grad(total, tokens.inputs[name], allow_unused=True, retain_graph=True)
            if found is not None:
                yield f"the gradient of {name}", found

    def by_unit(self, tokens: Tokens, own: list[list[int]]) -> list[Tensor]:
        """The values of each unit of rows. Values of rollouts or pairs are in the order of their numbers."""
        found, unit, places = self.values(tokens), _unit(self.subject), list(enumerate(tokens.rows))
        if unit == "token":
            return [found[[place for row in sorted(rows) for place, each in places if each == row]] for rows in own]
        numbers, index = tokens.inputs[f"{unit}_index"].unique(return_inverse=True)
        assert len(numbers) == len(found), "`values` checked it"
        return [found[sorted({int(index[place]) for place, row in places if row in rows})] for rows in own]


def _each(subject: Subject) -> list[Called]:
    return [Called(subject, function) for function in subject.functions]


@once
def _unit(subject: Subject) -> Unit:
    """What the function returns one value for. A bare loss may return one for each rollout: the user then chooses the
    aggregation `per_rollout`.
    """
    if not isinstance(subject.component, Algorithm):
        return "token"
    called = Called(subject, subject.function)
    if not isinstance(subject.registered, Algorithm) and "rollout_index" in called.names:
        tokens = called.usual()
        if getattr(called.returned(tokens), "shape", None) == tokens.inputs["rollout_index"].unique().shape:
            return "rollout"
    return cast("Unit", unit_of(subject.component))


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
    count = len(rows)
    weights = [0.0 if place == 0 or rows[place - 1] != row else 1.0 for place, row in enumerate(rows)]
    weights[2] = weights[count - 2] = 0.0  # text of a tool
    weights = [weight / 2 if rollout == 2 else weight for weight, rollout in zip(weights, rollouts, strict=True)]
    mask = torch.tensor(weights, dtype=torch.float64)

    def drawn(low: float, high: float, *shape: int) -> Tensor:
        found = torch.empty(shape or (count,), dtype=torch.float64)
        return found.apply_(lambda _: random.uniform(low, high))

    of_rollouts = (1.0, -1.0, 1.0, -1.0) if in_pairs else (1.3, -0.7, 0.4, -1.6)
    advantages = torch.tensor([of_rollouts[rollout] for rollout in rollouts], dtype=torch.float64)
    logprobs, topk = drawn(-3.0, -0.2), drawn(-2.5, -0.7, count, ALTERNATIVES)
    inputs = _inputs(
        logprobs,
        rollouts,
        mask,
        **{f"{name}_logprobs": logprobs + drawn(-0.3, 0.3) for name in ("old", "rollout", "ref", "teacher")},
        advantages=advantages.where(mask > 0, 0.0),
        returns=drawn(-1.0, 1.0),
        old_values=drawn(-1.0, 1.0),
        values=drawn(-1.0, 1.0),
        entropy=drawn(0.1, 2.0),
        topk_logprobs=topk,
        teacher_topk_logprobs=topk + drawn(-0.3, 0.3, count, ALTERNATIVES),
        logits=drawn(-2.0, 2.0, count, VOCABULARY_SIZE),
        token_rewards=drawn(-0.2, 0.2),
        # One more rollout has no token here, and was not judged.
        rewards=torch.tensor([1.0, 0.0, 0.5, -1.0, float("nan")], dtype=torch.float64),
        turn_rewards=[[0.75, 0.25], [0.5, -0.5], [0.5], [-1.0], []],
        step=3,
    )
    inputs["segments"] = torch.tensor([int(row == 2) for row in rows])
    inputs["turn_index"] = torch.tensor([int(row == 2 or (row == 0 and place > 2)) for place, row in enumerate(rows)])
    return Tokens(inputs, rows)


def extreme_tokens() -> Tokens:
    """Policies that are far apart, certain tokens, and advantages of 0: float32, as in a run. No position is masked."""
    import torch

    logprobs = (0.0, -1e-7, -1.0, -30.0, -100.0)
    cases = [(new, old, sign) for new in logprobs for old in logprobs for sign in (0.0, 1.0, -1.0, 5.0)]
    count = len(cases)
    rows = (torch.arange(count) // 5).tolist()
    new, old, signs = (torch.tensor(column) for column in zip(*cases, strict=True))
    large = torch.tensor([0.0, 1e3, -1e3, 1.0])[torch.arange(count) % 4]
    rewards = [1.0, -1e6, 0.0, 1e-8] * 5
    inputs = _inputs(
        new,
        rows,
        torch.ones(count),
        **dict.fromkeys(("old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs"), old),
        advantages=signs,
        returns=large,
        old_values=-large,
        values=large.flip(0),
        entropy=torch.tensor([0.0, 1e-8, 1.0, 12.0])[torch.arange(count) % 4],
        topk_logprobs=new.unsqueeze(1).repeat(1, ALTERNATIVES),
        teacher_topk_logprobs=old.unsqueeze(1).repeat(1, ALTERNATIVES),
        logits=torch.linspace(-100.0, 100.0, count * VOCABULARY_SIZE).reshape(count, VOCABULARY_SIZE),
        token_rewards=signs,
        rewards=torch.tensor([*rewards, float("nan")]),
        turn_rewards=[*([reward] for reward in rewards), []],
        step=0,
    )
    return Tokens(inputs, rows)


def _inputs(logprobs: Tensor, rollouts: list[int], mask: Tensor, **others: Any) -> dict[str, Any]:
    """The inputs [T] of rollouts, of which two share a prompt. All have one segment and one turn."""
    import torch

    index = torch.tensor(rollouts)
    return {
        "logprobs": logprobs,
        "mask": mask,
        "rollout_index": index,
        "group_index": index // 2,
        "pair_index": index // 2,
        "segments": index * 0,
        "turn_index": index * 0,
        "teacher_topk_ids": torch.arange(ALTERNATIVES).repeat(len(rollouts), 1),
        **others,
    }


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
    flat = leaves[name].detach().flatten()

    def end(place: int, move: float) -> float:
        moved = flat.clone()
        moved[place] += move
        mode.repeat()
        with mode:
            return float(call({**leaves, name: moved.reshape(gradient.shape).requires_grad_()}).detach())

    for step, tolerance in zip(STEPS, TOLERANCES, strict=True):
        slopes = [(end(place, step) - end(place, -step)) / (2 * step) for place in range(len(flat))]
        other = torch.tensor(slopes, dtype=gradient.dtype).reshape(gradient.shape)
        if torch.allclose(gradient, other, rtol=tolerance, atol=tolerance):
            return None
    return gradient, other


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
