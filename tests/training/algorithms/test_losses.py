"""Numerics 7, 9, 10 and 22 (DPO): every shipped loss against an independent numpy formula, gradcheck, closed-form
gradients, clip boundaries, and TRL. Every assertion is also shown to fail for a wrong formula.
"""

from __future__ import annotations

import functools
import inspect
import math
import random
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rollouts.errors import ConfigError
from rollouts.plugins.signature import check_signature
from rollouts.training.algorithms import kl, losses
from rollouts.training.algorithms.aggregation import Masks, aggregate
from rollouts.training.algorithms.algorithm import Algorithm, Term
from rollouts.training.algorithms.objective import evaluate_objective

T = 40
K = 6


def streams(seed: int = 0) -> dict[str, torch.Tensor]:
    """Random float64 streams [T]: 7 rollouts, mixed up in the order of tokens, some positions masked."""
    generator = np.random.default_rng(seed)
    logprobs = -3 * generator.random(T)
    rollouts = generator.permutation(np.arange(T) % 7)
    mask = np.where(generator.random(T) < 0.25, 0.0, generator.choice([0.5, 1.0], T))
    pairs = generator.permutation(np.array([11, 3, 8, -1])[np.arange(T) % 4])
    student = generator.standard_normal((T, 2 * K))
    teacher = generator.standard_normal((T, 2 * K))
    arrays = {
        "logprobs": logprobs,
        "old_logprobs": logprobs + 0.5 * generator.standard_normal(T),
        "ref_logprobs": logprobs + 0.3 * generator.standard_normal(T),
        "advantages": generator.standard_normal(T),
        "entropy": generator.random(T),
        "values": generator.standard_normal(T),
        "old_values": generator.standard_normal(T),
        "returns": generator.standard_normal(T),
        "mask": mask,
        "rollout_index": rollouts,
        "pair_index": pairs,
        "topk_logprobs": (student - np.log(np.exp(student).sum(-1, keepdims=True)))[:, :K],
        "teacher_topk_logprobs": (teacher - np.log(np.exp(teacher).sum(-1, keepdims=True)))[:, :K],
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def call(function, given, **settings):
    """The function with what it names."""
    names = check_signature(getattr(function, "func", function), "losses", "loss").requests
    return function(*(given[name] for name in names), **settings)


def gradient(function, given, variable="logprobs", **settings):
    """What the sum of the function's values pulls at `variable`."""
    leaf = given[variable].clone().requires_grad_()
    call(function, {**given, variable: leaf}, **settings).sum().backward()
    return leaf.grad


# --- Every loss against a formula in numpy, one token after the other ------------------------------------------------


def by_token(formula):
    def reference(given):
        arrays = {name: tensor.tolist() for name, tensor in given.items()}
        return np.array([formula({name: array[t] for name, array in arrays.items()}) for t in range(T)])

    return reference


def numpy_ppo(ratio, advantage, low, high, dual=None):
    if advantage >= 0:
        value = advantage * min(ratio, 1 + high)
    else:
        value = advantage * (max(ratio, 1 - low) if dual is None else min(max(ratio, 1 - low), dual))
    return -value


def ratio_of(token):
    return math.exp(token["logprobs"]) / math.exp(token["old_logprobs"])


def rollout_ratios(given):
    sums, weights = defaultdict(float), defaultdict(float)
    columns = (given[name].tolist() for name in ("logprobs", "old_logprobs", "mask", "rollout_index"))
    for new, old, weight, rollout in zip(*columns, strict=True):
        sums[rollout] += weight * (new - old)
        weights[rollout] += weight
    return [math.exp(sums[rollout] / weights[rollout]) for rollout in given["rollout_index"].tolist()]


def numpy_gspo(given, low=3e-4, high=4e-4):
    live = (given["mask"] > 0).tolist()
    each = zip(rollout_ratios(given), given["advantages"].tolist(), live, strict=True)
    return np.array([numpy_ppo(ratio, advantage, low, high) if here else 0.0 for ratio, advantage, here in each])


def numpy_dpo(given, beta):
    signs = given["advantages"].tolist()
    result = []
    for pair in sorted(set(given["pair_index"].tolist()) - {-1}):
        delta = {1: 0.0, -1: 0.0}
        for t, sign in enumerate(signs):
            if given["pair_index"][t] == pair and sign:
                delta[int(sign)] += given["logprobs"][t].item() - given["ref_logprobs"][t].item()
        result.append(math.log(1 + math.exp(-beta * (delta[1] - delta[-1]))))
    return np.array(result)


def numpy_value(token, clip):
    value, before, target = token["values"], token["old_values"], token["returns"]
    near = before + math.copysign(min(abs(value - before), clip), value - before)
    return max((value - target) ** 2, (near - target) ** 2) / 2


def numpy_distill(token):
    pairs = zip(token["topk_logprobs"], token["teacher_topk_logprobs"], strict=True)
    return sum(math.exp(t) * (t - s) - math.exp(t) + math.exp(s) for s, t in pairs)


def numpy_cispo(token, cap, floor=0.0):
    return -min(max(ratio_of(token), floor), cap) * token["advantages"] * token["logprobs"]


partial = functools.partial
# name: ours, the reference, what it is differentiated by, a wrong formula that the same comparison has to catch
FORMULAS = {
    "reinforce": (
        losses.reinforce,
        by_token(lambda token: -token["advantages"] * token["logprobs"]),
        "logprobs",
        lambda logprobs, advantages: advantages * logprobs,
    ),
    "importance": (
        losses.importance,
        by_token(lambda token: -ratio_of(token) * token["advantages"]),
        "logprobs",
        lambda logprobs, old_logprobs, advantages: -(old_logprobs - logprobs).exp() * advantages,
    ),
    "ppo_clip": (
        losses.ppo_clip,
        by_token(lambda token: numpy_ppo(ratio_of(token), token["advantages"], 0.2, 0.2)),
        "logprobs",
        losses.importance,
    ),
    "ppo_clip_higher": (
        partial(losses.ppo_clip, clip_low=0.1, clip_high=0.28),
        by_token(lambda token: numpy_ppo(ratio_of(token), token["advantages"], 0.1, 0.28)),
        "logprobs",
        partial(losses.ppo_clip, clip_low=0.28, clip_high=0.1),
    ),
    "dual_clip": (
        partial(losses.ppo_clip, dual_clip=1.5),
        by_token(lambda token: numpy_ppo(ratio_of(token), token["advantages"], 0.2, 0.2, 1.5)),
        "logprobs",
        losses.ppo_clip,
    ),
    "gspo": (losses.gspo, numpy_gspo, None, losses.ppo_clip),
    "gspo_wide": (
        partial(losses.gspo, clip_low=0.1, clip_high=0.2),
        lambda given: numpy_gspo(given, 0.1, 0.2),
        None,
        losses.gspo,
    ),
    "cispo": (
        losses.cispo,
        by_token(lambda token: numpy_cispo(token, 5.0)),
        None,
        lambda logprobs, old_logprobs, advantages: -(logprobs - old_logprobs).exp() * advantages,
    ),
    "cispo_narrow": (
        partial(losses.cispo, clip_low=0.2, clip_high=0.3),
        by_token(lambda token: numpy_cispo(token, 1.3, 0.8)),
        None,
        losses.cispo,
    ),
    "cross_entropy": (
        losses.cross_entropy,
        by_token(lambda token: -token["logprobs"]),
        "logprobs",
        lambda logprobs: logprobs,
    ),
    "entropy_bonus": (
        losses.entropy_bonus,
        by_token(lambda token: -token["entropy"]),
        "entropy",
        lambda entropy: entropy,
    ),
    "value_loss": (
        losses.value_loss,
        by_token(lambda token: numpy_value(token, 0.2)),
        "values",
        lambda values, returns: (values - returns) ** 2 / 2,
    ),
    "value_wide": (
        partial(losses.value_loss, value_clip=math.inf),
        by_token(lambda token: (token["values"] - token["returns"]) ** 2 / 2),
        "values",
        losses.value_loss,
    ),
    "dpo": (losses.dpo, partial(numpy_dpo, beta=0.1), "logprobs", partial(losses.dpo, beta=0.3)),
    "dpo_sharp": (
        partial(losses.dpo, beta=0.7),
        partial(numpy_dpo, beta=0.7),
        "logprobs",
        lambda logprobs, ref_logprobs, advantages, pair_index: losses.dpo(
            logprobs, ref_logprobs, -advantages, pair_index, beta=0.7
        ),
    ),
    "distill_topk": (
        losses.distill_topk,
        by_token(numpy_distill),
        "topk_logprobs",
        lambda topk_logprobs, teacher_topk_logprobs: losses.distill_topk(teacher_topk_logprobs, topk_logprobs),
    ),
}


def given_for(name):
    given = streams()
    if name.startswith("dpo"):
        given["advantages"] = given["advantages"].sign() * (given["mask"] > 0)
    return given


@pytest.mark.parametrize("name", FORMULAS)
def test_values_equal_numpy(name):
    ours, reference, _, wrong = FORMULAS[name]
    given = given_for(name)
    expected = reference(given)

    def check(function):
        np.testing.assert_allclose(call(function, given).numpy(), expected, rtol=1e-11, atol=1e-13)

    check(ours)
    with pytest.raises(AssertionError):
        check(wrong)


@pytest.mark.parametrize("name", [name for name, row in FORMULAS.items() if row[2]])
def test_gradients_equal_finite_differences(name):
    ours, _, variable, _ = FORMULAS[name]
    given = given_for(name)

    def check(function):
        leaf = given[variable].clone().requires_grad_()
        assert torch.autograd.gradcheck(
            lambda tensor: call(function, {**given, variable: tensor}), (leaf,), raise_exception=False
        )

    check(ours)
    with pytest.raises(AssertionError):  # control: the gradient of something else under the same value

        def wrong(*arguments):
            values = ours(*arguments)
            return values + (values**2 - (values**2).detach())

        wrong.__signature__ = inspect.signature(getattr(ours, "func", ours))
        check(wrong)


# --- Losses with a stopgrad: the gradient is not the value's derivative -----------------------------------------------


def closed_form(name, given):
    live = (given["mask"] > 0).tolist()
    advantages, result = given["advantages"].tolist(), []
    ratios = rollout_ratios(given)
    for t, advantage in enumerate(advantages):
        if name == "gspo":
            clipped = not live[t] or (ratios[t] > 1.2 if advantage > 0 else ratios[t] < 0.9)
            result.append(0.0 if clipped else -ratios[t] * advantage)
        else:
            ratio = math.exp(given["logprobs"][t].item() - given["old_logprobs"][t].item())
            result.append(-min(max(ratio, 0.8), 1.3) * advantage)
    return torch.tensor(result, dtype=torch.float64)


def gspo_without_stopgrad(logprobs, old_logprobs, advantages, rollout_index, mask):
    mean = losses.mean_by_rollout(logprobs - old_logprobs, mask, rollout_index)
    ratio = (mean + logprobs - logprobs.detach()).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.2) * advantages) * (mask > 0)


def cispo_without_stopgrad(logprobs, old_logprobs, advantages):
    return -(logprobs - old_logprobs).exp().clamp(0.8, 1.3) * advantages * logprobs


@pytest.mark.parametrize(
    ("name", "ours", "wrong"),
    [
        ("gspo", partial(losses.gspo, clip_low=0.1, clip_high=0.2), gspo_without_stopgrad),
        ("cispo", partial(losses.cispo, clip_low=0.2, clip_high=0.3), cispo_without_stopgrad),
    ],
)
def test_stopgrad_losses_have_the_closed_form_gradient(name, ours, wrong):
    given = streams(3)
    expected = closed_form(name, given)
    assert 0 < (expected == 0).sum() < T or name == "cispo"  # some are clipped, not all
    torch.testing.assert_close(gradient(ours, given), expected)
    torch.testing.assert_close(call(wrong, given), call(ours, given))  # the control has the same value ...
    with pytest.raises(AssertionError):  # ... and another gradient
        torch.testing.assert_close(gradient(wrong, given), expected)


# --- Clipping ---------------------------------------------------------------------------------------------------------


def one_token(ratio, advantage):
    ones = torch.ones(1, dtype=torch.float64)
    return {
        "logprobs": ones * math.log(ratio) - 2,
        "old_logprobs": ones * 0 - 2,
        "advantages": ones * advantage,
        "mask": ones,
        "rollout_index": torch.tensor([5]),
    }


BOUNDED = {"ppo_clip": losses.ppo_clip, "gspo": partial(losses.gspo, clip_low=0.2, clip_high=0.2)}


@pytest.mark.parametrize("loss", BOUNDED.values(), ids=BOUNDED.keys())
def test_clip_boundaries_and_signs(loss):
    def check(function):
        for advantage in (2.0, -2.0):
            for ratio in (0.1, 0.5, 0.799, 0.801, 1.0, 1.199, 1.201, 3.0):
                clipped = ratio > 1.2 if advantage > 0 else ratio < 0.8
                value = -advantage * ((1.2 if advantage > 0 else 0.8) if clipped else ratio)
                given = one_token(ratio, advantage)
                assert call(function, given).item() == pytest.approx(value)
                assert gradient(function, given).item() == pytest.approx(0.0 if clipped else -ratio * advantage)

    check(loss)
    for wrong in (
        losses.importance,  # no clip
        partial(losses.ppo_clip, clip_high=0.28),
        lambda logprobs, old_logprobs, advantages: (  # clipped on both sides: loses the pessimism
            -(logprobs - old_logprobs).exp().clamp(0.8, 1.2) * advantages
        ),
    ):
        with pytest.raises(AssertionError):
            check(wrong)


def test_dual_clip_bounds_only_negative_advantages():
    def check(function):
        for ratio, advantage, value, slope in (
            (2.9, -1.0, 2.9, 2.9),
            (3.1, -1.0, 3.0, 0.0),
            (100.0, -2.0, 6.0, 0.0),
            (100.0, 1.0, -1.2, 0.0),
            (0.5, -1.0, 0.8, 0.0),
            (1.0, -1.0, 1.0, 1.0),
            (1.0, 1.0, -1.0, -1.0),
        ):
            given = one_token(ratio, advantage)
            assert call(function, given).item() == pytest.approx(value)
            assert gradient(function, given).item() == pytest.approx(slope)

    check(partial(losses.ppo_clip, dual_clip=3.0))
    for wrong in (losses.ppo_clip, partial(losses.ppo_clip, dual_clip=2.0)):
        with pytest.raises(AssertionError):
            check(wrong)


def test_value_clip_stops_the_gradient_outside():
    def check(function):
        one = torch.ones(1, dtype=torch.float64)
        for value, target, loss, slope in (
            (0.1, 1.0, 0.405, -0.9),  # near the old value 0: the plain error
            (0.5, 1.0, 0.32, 0.0),  # moved too far towards the target: no further pull
            (-0.5, 1.0, 1.125, -1.5),  # moved away from it: the larger error counts
            (0.2, 0.2, 0.0, 0.0),
        ):
            given = {"values": value * one, "old_values": 0 * one, "returns": target * one}
            assert call(function, given).item() == pytest.approx(loss)
            assert gradient(function, given, "values").item() == pytest.approx(slope)

    check(losses.value_loss)
    with pytest.raises(AssertionError):
        check(partial(losses.value_loss, value_clip=1.0))
    with pytest.raises(AssertionError):  # the smaller error instead of the larger
        check(
            lambda values, old_values, returns: (
                torch.minimum(
                    (values - returns) ** 2,
                    (values.clamp(old_values - 0.2, old_values + 0.2) - returns) ** 2,
                )
                / 2
            )
        )


def test_log_ratio_is_clamped():
    new = torch.tensor([-1.0, -90.0, 0.0, math.inf, -math.inf], dtype=torch.float64, requires_grad=True)
    anchor = torch.tensor([-2.0, 0.0, -90.0, 0.0, 0.0], dtype=torch.float64)
    found = losses.log_ratio(new, anchor)
    assert found.tolist() == [1.0, -20.0, 20.0, 20.0, -20.0]
    found.exp().sum().backward()
    assert new.grad.tolist() == [pytest.approx(math.e), 0.0, 0.0, 0.0, 0.0]
    assert call(losses.importance, one_token(1e30, 1.0)).item() == pytest.approx(-math.exp(20))


# --- The first step ---------------------------------------------------------------------------------------------------

RATIO_LOSSES = {
    "importance": losses.importance,
    "ppo_clip": losses.ppo_clip,
    "dual_clip": partial(losses.ppo_clip, dual_clip=3.0),
    "gspo": losses.gspo,
    "cispo": losses.cispo,
}


@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_first_step_is_reinforce(name):
    given = streams(4)
    first = {**given, "old_logprobs": given["logprobs"].clone()}
    expected = gradient(losses.reinforce, first) * (given["mask"] > 0)

    def check(batch):
        assert torch.equal(gradient(RATIO_LOSSES[name], batch) * (given["mask"] > 0), expected)

    check(first)
    with pytest.raises(AssertionError):  # another anchor gives another gradient
        check({**first, "old_logprobs": given["logprobs"] + 0.1})
    with pytest.raises(AssertionError):  # so does the other sign
        check({**first, "advantages": -given["advantages"]})


def clip_fraction(batch, low, high):
    """The share of tokens that the clip takes the gradient from, where REINFORCE has one."""
    slope = gradient(partial(losses.ppo_clip, clip_low=low, clip_high=high), batch)
    return (slope == 0).double().mean().item()


def test_first_step_clips_nothing():
    given = streams(5)
    first = {**given, "old_logprobs": given["logprobs"].clone()}
    assert clip_fraction(first, 0.2, 0.2) == 0
    assert clip_fraction(first, 0.0, 0.0) == 0, "not even with bounds of 0"
    assert (gradient(losses.gspo, first)[given["mask"] > 0] != 0).all()
    assert clip_fraction(given, 0.2, 0.2) > 0.1, "control: with another anchor it does"


def test_gspo_is_ppo_at_length_one():
    given = {**streams(6), "rollout_index": torch.randperm(T), "mask": torch.ones(T, dtype=torch.float64)}
    sequence = partial(losses.gspo, clip_low=0.2, clip_high=0.28)
    token = partial(losses.ppo_clip, clip_low=0.2, clip_high=0.28)

    def check(batch):
        torch.testing.assert_close(call(sequence, batch), call(token, batch))
        torch.testing.assert_close(gradient(sequence, batch), gradient(token, batch))

    check(given)
    with pytest.raises(AssertionError):
        check({**given, "rollout_index": torch.arange(T) // 2})


# --- Masked positions, pairs, distillation ----------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["reinforce", "importance", "ppo_clip", "dual_clip", "gspo", "cispo", "cross_entropy"])
def test_masked_positions_change_nothing(name, value):
    ours = FORMULAS[name][0]
    clean = streams(7)
    masked = clean["mask"] == 0
    clean["advantages"] = clean["advantages"].masked_fill(masked, 0.0)

    def run(batch):
        leaf = batch["logprobs"].clone().requires_grad_()
        found = evaluate_objective(
            Algorithm(None, "token_mean", (Term(ours),)), {**batch, "logprobs": leaf}, batch["mask"]
        )
        found.values.sum().backward()
        assert not any(flag.item() for flag in found.nan.values())
        return found.values.detach(), leaf.grad

    def spoilt(where):
        names = ("logprobs", "old_logprobs", "ref_logprobs")
        return clean | {name: clean[name].masked_fill(where, value) for name in names}

    def check(where):
        for found, wanted in zip(run(spoilt(where)), run(clean), strict=True):
            assert torch.equal(found[~masked], wanted[~masked])
            # A detached weight that is NaN there would still spoil the gradient of that very position.
            assert name == "cispo" or found.isfinite().all()

    check(masked)
    with pytest.raises(AssertionError):  # control: at one live position it does change something
        check(masked | (torch.arange(T) == torch.nonzero(~masked)[0]))


def test_mean_by_rollout():
    values = torch.tensor([1.0, 2.0, 6.0, math.nan, 5.0, 7.0], dtype=torch.float64)
    mask = torch.tensor([1.0, 0.5, 1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    found = losses.mean_by_rollout(values, mask, torch.tensor([9, 2, 9, 2, 4, 2]))
    torch.testing.assert_close(found, torch.tensor([3.5, 8 / 1.5, 3.5, 8 / 1.5, 0.0, 8 / 1.5], dtype=torch.float64))
    assert losses.mean_by_rollout(values, mask * 0 + 1, torch.tensor([9, 2, 9, 2, 4, 2])).isnan().any(), (
        "live NaN stays"
    )


def test_dpo_with_policy_as_reference_is_log_2():
    given = given_for("dpo")
    same = {**given, "ref_logprobs": given["logprobs"].clone()}

    def check(batch):
        torch.testing.assert_close(call(losses.dpo, batch), torch.full((3,), math.log(2), dtype=torch.float64))
        pull = -0.1 / 2 * given["advantages"] * (given["pair_index"] >= 0)
        torch.testing.assert_close(gradient(losses.dpo, batch), pull)

    check(same)
    with pytest.raises(AssertionError):
        check(given)


def test_dpo_gives_pairs_in_the_order_of_their_numbers():
    given = given_for("dpo")
    whole = call(losses.dpo, given)
    assert whole.shape == (3,) and len({round(value, 9) for value in whole.tolist()}) == 3
    for place, pair in enumerate([3, 8, 11]):  # a microbatch may hold any of them
        alone = given["pair_index"] == pair
        assert call(losses.dpo, {name: tensor[alone] for name, tensor in given.items()}).item() == pytest.approx(
            whole[place].item()
        )
    spoilt = {**given, "logprobs": given["logprobs"].masked_fill(given["advantages"] == 0, math.nan)}
    assert torch.equal(call(losses.dpo, spoilt), whole)
    assert gradient(losses.dpo, spoilt).isfinite().all()
    empty = {name: tensor[:0] for name, tensor in given.items()}
    assert call(losses.dpo, empty).shape == (0,)


def truncated_kl(topk_logprobs, teacher_topk_logprobs):
    return (teacher_topk_logprobs.exp() * (teacher_topk_logprobs - topk_logprobs)).sum(-1)


def test_an_equal_teacher_gives_no_distillation_gradient():
    logits = torch.randn(5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def check(function, count):
        leaf = logits.clone().requires_grad_()
        values = function(leaf.log_softmax(-1)[:, :count], logits.log_softmax(-1)[:, :count])
        values.sum().backward()
        torch.testing.assert_close(values.detach(), torch.zeros(5, dtype=torch.float64))
        torch.testing.assert_close(leaf.grad, torch.zeros_like(logits))

    check(losses.distill_topk, 4)
    check(truncated_kl, 12)
    with pytest.raises(AssertionError):  # control: cut to K tokens, the plain sum pulls even at an equal student
        check(truncated_kl, 4)


def test_distillation_over_the_whole_vocabulary_is_the_kl():
    student, teacher = torch.randn(2, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = torch.nn.functional.kl_div(
        student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    torch.testing.assert_close(losses.distill_topk(student.log_softmax(-1), teacher.log_softmax(-1)), expected)
    cut = losses.distill_topk(student.log_softmax(-1)[:, :4], teacher.log_softmax(-1)[:, :4])
    assert (cut >= 0).all() and not torch.allclose(cut, expected)
    impossible = torch.full((1, 1), -math.inf, dtype=torch.float64)  # the teacher never says it: only p_S is left
    assert losses.distill_topk(impossible + 0, impossible).tolist() == [0.0]


# --- Settings ---------------------------------------------------------------------------------------------------------

REFUSED = [
    (losses.ppo_clip, "clip_low", [-0.1, 1.1, math.nan]),
    (losses.ppo_clip, "clip_high", [-0.1, math.nan]),
    (losses.ppo_clip, "dual_clip", [1.0, 0.0, -3.0, math.nan]),
    (losses.gspo, "clip_low", [-0.1, 1.1]),
    (losses.gspo, "clip_high", [-0.1]),
    (losses.cispo, "clip_low", [-0.1, 1.1]),
    (losses.cispo, "clip_high", [-0.1]),
    (losses.value_loss, "value_clip", [0.0, -1.0, math.nan]),
    (losses.dpo, "beta", [0.0, -0.1, math.inf, math.nan]),
]


@pytest.mark.parametrize(("loss", "setting", "values"), REFUSED)
def test_settings_outside_their_domain_are_refused(loss, setting, values):
    given = given_for("dpo")
    for value in values:
        with pytest.raises(
            ConfigError, match=rf"the setting {setting} is .*; type --loss\.{setting.replace('_', '-')}"
        ):
            call(loss, given, **{setting: value})
    call(loss, given)  # control: the defaults are not


def test_settings_are_keyword_only_and_documented():
    given = streams()
    bound = functools.partial(losses.ppo_clip, clip_high=0.28)
    torch.testing.assert_close(call(bound, given), call(losses.ppo_clip, given, clip_high=0.28))
    with pytest.raises(TypeError):
        losses.ppo_clip(given["logprobs"], given["old_logprobs"], given["advantages"], 0.1)
    helpers = {"check_setting", "log_ratio", "mean_by_rollout"}
    functions = dict(inspect.getmembers(losses, inspect.isfunction))
    own = {name for name, each in functions.items() if each.__module__ == losses.__name__ and name[0] != "_"}
    assert len(own - helpers) > 5
    for name in sorted(own - helpers):
        signature = check_signature(functions[name], "losses", name)
        assert signature.requests and all(setting.doc for setting in signature.settings), name
    dual = {setting.name: setting for setting in check_signature(losses.ppo_clip, "losses", "ppo").settings}[
        "dual_clip"
    ]
    assert dual.type == float | None and dual.default is None


# --- TRL --------------------------------------------------------------------------------------------------------------

# What TRL calls a loss: its name, the level of its ratio, further settings; ours, its aggregation.
TRL = {
    "grpo": ("grpo", "token", {}, losses.ppo_clip, "rollout_mean"),
    "bnpo": ("bnpo", "token", {}, losses.ppo_clip, "token_mean"),
    "dapo": ("dapo", "token", {"epsilon_high": 0.28}, partial(losses.ppo_clip, clip_high=0.28), "token_mean"),
    "dr_grpo": ("dr_grpo", "token", {}, losses.ppo_clip, "dr_grpo"),
    "gspo": (
        "grpo",
        "sequence",
        {"epsilon_low": 0.1, "epsilon_high": 0.2},
        partial(losses.gspo, clip_low=0.1, clip_high=0.2),
        "rollout_mean",
    ),
    "cispo": ("cispo", "token", {"epsilon_high": 1.5}, partial(losses.cispo, clip_high=0.5), "token_mean"),
    "cispo_default": ("cispo", "token", {"epsilon_high": 5.0}, losses.cispo, "token_mean"),
}
WRONG_SETTING = {
    "gspo": {"clip_low": 0.2, "clip_high": 0.1},
    "cispo": {"clip_high": 1.0},
    "cispo_default": {"clip_low": 0.0},
}


class Stub(SimpleNamespace):
    """What a trainer asks for; anything that was not given is a switch that is off."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return False


ACCELERATOR = SimpleNamespace(
    num_processes=1,
    device="cpu",
    gather=lambda value: value,
    gather_for_metrics=lambda value: value,
    reduce=lambda value, reduction: value,
)


def trl_grpo(loss_type, level, settings, grid, longest):
    """TRL's own `_compute_loss`, with the model's forward pass replaced by the given logprobs [B, C]."""
    GRPOTrainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer

    logprobs, mask = grid["logprobs"], grid["mask"]
    trainer = Stub(
        **{
            "loss_type": loss_type,
            "beta": 0.0,
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            "importance_sampling_level": level,
            "top_entropy_quantile": 1.0,
            "off_policy_mask_threshold": None,
            "max_completion_length": longest,
            "current_gradient_accumulation_steps": 1,
            "args": SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
            "model": SimpleNamespace(training=True),
            "accelerator": ACCELERATOR,
            "_get_per_token_logps_and_entropies": lambda *args, **kwargs: (logprobs, torch.zeros_like(logprobs), None),
            "_metrics": {"train": defaultdict(list)},
            **settings,
        }
    )
    inputs = {
        "prompt_ids": torch.zeros(mask.shape[0], 2, dtype=torch.long),
        "prompt_mask": torch.ones(mask.shape[0], 2, dtype=torch.long),
        "completion_ids": torch.zeros(mask.shape, dtype=torch.long),
        "completion_mask": mask.long(),
        "advantages": grid["advantages"],
        "old_per_token_logps": grid["old_logprobs"],
        "ref_per_token_logps": grid["ref_logprobs"],
        "num_items_in_batch": mask.sum(),
    }
    return GRPOTrainer._compute_loss(trainer, None, inputs)


def trl_dpo(grid, beta):
    """TRL's own DPO loss; the first half of the rows are chosen, the second half rejected."""
    DPOTrainer = pytest.importorskip("trl.trainer.dpo_trainer").DPOTrainer

    rows, columns = grid["mask"].shape

    def model(**_):
        scored = grid["logprobs"] * grid["mask"]
        nothing = torch.zeros_like(scored)
        return SimpleNamespace(log_probs=scored, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())

    model.training = True
    reference = (grid["ref_logprobs"] * grid["mask"]).sum(1)
    trainer = Stub(
        model=model,
        accelerator=ACCELERATOR,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        beta=beta,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {
        "input_ids": torch.zeros(rows, columns + 1, dtype=torch.long),
        "attention_mask": torch.ones(rows, columns + 1, dtype=torch.long),
        "completion_mask": torch.cat([torch.zeros(rows, 1, dtype=torch.long), grid["mask"].long()], 1),
        "ref_chosen_logps": reference[: rows // 2],
        "ref_rejected_logps": reference[rows // 2 :],
    }
    return DPOTrainer._compute_loss(trainer, model, inputs, False)


def make_grid(rows=6, columns=9):
    generator = torch.Generator().manual_seed(1)
    lengths = [9, 4, 7, 1, 5, 8]
    logprobs = -3 * torch.rand(rows, columns, generator=generator, dtype=torch.float64)
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs + 0.4 * torch.randn(rows, columns, generator=generator, dtype=torch.float64),
        "ref_logprobs": logprobs + 0.4 * torch.randn(rows, columns, generator=generator, dtype=torch.float64),
        "advantages": torch.randn(rows, generator=generator, dtype=torch.float64),
        "mask": torch.tensor([[1.0] * size + [0.0] * (columns - size) for size in lengths], dtype=torch.float64),
    }


def flat(grid):
    """The grid as streams [T], one row after the other."""
    rows, columns = grid["mask"].shape
    spread = grid["advantages"][:, None].expand(rows, columns)
    tokens = {name: tensor.reshape(-1) for name, tensor in {**grid, "advantages": spread}.items()}
    return tokens | {"rollout_index": torch.arange(rows).repeat_interleave(columns)}


@pytest.mark.parametrize("name", TRL)
def test_policy_losses_equal_trl(name):
    loss_type, level, settings, ours, aggregation = TRL[name]
    grid, longest = make_grid(), 16
    rows = grid["mask"].shape[0]
    theirs = grid["logprobs"].clone().requires_grad_()
    expected = trl_grpo(loss_type, level, settings, {**grid, "logprobs": theirs}, longest)
    expected.backward()

    def check(function, aggregation):
        weights, denominator, *_ = aggregate(
            aggregation, Masks(grid["mask"].tolist(), list(range(rows)), [0, 0, 0, 1, 1, 1], max_tokens=longest)
        )
        leaf = grid["logprobs"].clone().requires_grad_()
        values = call(function, flat({**grid, "logprobs": leaf}))
        found = (values * torch.tensor(weights, dtype=torch.float64).reshape(-1)).sum() / denominator
        found.backward()
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(leaf.grad, theirs.grad)

    check(ours, aggregation)
    with pytest.raises(AssertionError):
        check(ours, "group_mean")
    with pytest.raises(AssertionError):
        check(partial(ours, **WRONG_SETTING.get(name, {"clip_low": 0.1})), aggregation)


@pytest.mark.parametrize("corrected", [False, True])
def test_kl_terms_equal_trl(corrected):
    """TRL's KL term is k3_loss; with its bias correction rk3_loss."""
    grid = make_grid()
    rows = grid["mask"].shape[0]
    theirs = grid["logprobs"].clone().requires_grad_()
    arguments = SimpleNamespace(delta=None, use_bias_correction_kl=corrected, steps_per_generation=1)
    expected = trl_grpo("bnpo", "token", {"beta": 0.3, "args": arguments}, {**grid, "logprobs": theirs}, 16)
    expected.backward()

    def check(function):
        leaf = grid["logprobs"].clone().requires_grad_()
        weights, denominator, *_ = aggregate("token_mean", Masks(grid["mask"].tolist(), [*range(rows)], [0] * rows))
        algorithm = Algorithm(None, "token_mean", (Term(losses.ppo_clip),), kl=kl.make_kl(function, {"coef": 0.3}))
        tokens = flat({**grid, "logprobs": leaf})
        values = evaluate_objective(algorithm, tokens, tokens["mask"]).values
        found = (values * torch.tensor(weights, dtype=torch.float64).reshape(-1)).sum() / denominator
        found.backward()
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(leaf.grad, theirs.grad)

    check(kl.rk3_loss if corrected else kl.k3_loss)
    for wrong in (kl.k3_loss if corrected else kl.rk3_loss, kl.forward_kl_loss):
        with pytest.raises(AssertionError):
            check(wrong)


@pytest.mark.parametrize("beta", [0.1, 0.9])
def test_dpo_equals_trl(beta):
    grid = make_grid()
    theirs = grid["logprobs"].clone().requires_grad_()
    expected = trl_dpo({**grid, "logprobs": theirs}, beta)
    expected.backward()
    columns = grid["mask"].shape[1]
    signs = torch.tensor([1.0] * 3 + [-1.0] * 3, dtype=torch.float64)[:, None] * grid["mask"]
    pairs = torch.tensor([4, 1, 7, 4, 1, 7]).repeat_interleave(columns)

    def check(beta, signs):
        leaf = grid["logprobs"].clone().requires_grad_()
        tokens = flat({**grid, "logprobs": leaf}) | {"advantages": signs.reshape(-1), "pair_index": pairs}
        found = call(losses.dpo, tokens, beta=beta).mean()
        found.backward()
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(leaf.grad, theirs.grad)

    check(beta, signs)
    with pytest.raises(AssertionError):
        check(beta, -signs)
    with pytest.raises(AssertionError):
        check(beta * 1.1, signs)


@pytest.mark.parametrize("nll_coef", [0.0, 0.7])
def test_dpo_with_likelihood_of_the_chosen_rollout(nll_coef):
    """Against a loop in plain Python. The two rollouts of a pair have other lengths, and one pair nothing chosen."""
    pairs = {4: (5, 3), 1: (2, 6), 9: (0, 2)}  # tokens of the chosen rollout and of the rejected one
    rng, rows, expected = random.Random(0), [], []
    for pair, lengths in pairs.items():
        chosen, rejected = ([(rng.uniform(-3, 0), rng.uniform(-3, 0)) for _ in range(length)] for length in lengths)
        rows += [(*token, 1.0, pair) for token in chosen] + [(-9.0, -1.0, 0.0, pair)]  # the last one is not trained
        rows += [(*token, -1.0, pair) for token in rejected] + [(-9.0, -1.0, 1.0, -1)]  # and this one has no pair
        difference = sum(new - ref for new, ref in chosen) - sum(new - ref for new, ref in rejected)
        mean = -sum(new for new, _ in chosen) / max(1, len(chosen))
        expected.append((pair, math.log1p(math.exp(-0.3 * difference)) + nll_coef * mean))
    logprobs, ref_logprobs, advantages, numbers = (torch.tensor(column) for column in zip(*rows, strict=True))
    found = losses.dpo(logprobs, ref_logprobs, advantages, numbers, beta=0.3, nll_coef=nll_coef)
    torch.testing.assert_close(found, torch.tensor([value for _, value in sorted(expected)]))
    with pytest.raises(ConfigError, match="nll_coef"):
        losses.dpo(logprobs, ref_logprobs, advantages, numbers, nll_coef=-1.0)
