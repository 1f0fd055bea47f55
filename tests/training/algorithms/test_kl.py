"""Numerics 8: the expectation of every estimator's gradient, enumerated on a small softmax, against the KL's own."""

from __future__ import annotations

import functools
import inspect
import math

import numpy as np
import pytest
import torch

from rollouts.errors import ConfigError
from rollouts.plugins.signature import check_signature, read_signature
from rollouts.training.algorithms import kl, losses
from rollouts.training.algorithms.algorithm import KL, Algorithm, Term, is_reward_placed
from rollouts.training.algorithms.objective import evaluate_objective

ACTIONS = 5
partial = functools.partial


def logits(seed):
    return torch.randn(ACTIONS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


THETA, REF, MU = logits(0), logits(1), logits(2)


def call(function, given):
    return function(*(given[name] for name in check_signature(function, "kl", "kl").requests))


def expected(function, theta=THETA, mu=None, ref=REF):
    """The expectation over the actions of mu (None: the policy itself) of a loss: (its value, its gradient [5]).

    All actions are one batch of T = 5 tokens, each weighed with its probability.
    """
    leaf = theta.clone().requires_grad_()
    logprobs = leaf.log_softmax(-1)
    sampler = (theta if mu is None else mu).log_softmax(-1)
    given = {"logprobs": logprobs, "old_logprobs": sampler, "ref_logprobs": ref.log_softmax(-1)}
    total = (sampler.exp() * call(function, given)).sum()
    total.backward()
    return total.item(), leaf.grad


def numpy_kl(theta, ref, direction):
    """The KL of two softmaxes and its gradient by the closed form, with no autograd: (value, [5])."""
    p, q = (np.exp(x) / np.exp(x).sum() for x in (theta.numpy(), ref.numpy()))
    if direction == "forward":  # KL(ref || policy)
        return sum(b * math.log(b / a) for a, b in zip(p, q, strict=True)), p - q
    value = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))  # KL(policy || ref)
    return value, np.array([a * (math.log(a / b) - value) for a, b in zip(p, q, strict=True)])


def assert_gradient(function, direction, mu=None, theta=THETA):
    np.testing.assert_allclose(
        expected(function, theta, mu)[1].numpy(), numpy_kl(theta, REF, direction)[1], rtol=1e-9, atol=1e-13
    )


def k1_as_reward(logprobs, old_logprobs, ref_logprobs, *, sign=1.0):
    """The estimator where it belongs: taken off the advantages of REINFORCE (here of rewards 0)."""
    return losses.reinforce(logprobs, -sign * kl.k1_reward(old_logprobs, ref_logprobs))


def k1_loss(logprobs, ref_logprobs):
    return losses.log_ratio(logprobs, ref_logprobs)


def k2_without_ratio(logprobs, ref_logprobs):
    return losses.log_ratio(logprobs, ref_logprobs) ** 2 / 2


def k2_with_live_ratio(logprobs, old_logprobs, ref_logprobs):
    return (logprobs - old_logprobs).exp() * (logprobs - ref_logprobs) ** 2 / 2


def rk3_with_stopped_ratio(logprobs, old_logprobs, ref_logprobs):
    return (logprobs - old_logprobs).exp().detach() * kl.k3_loss(logprobs, ref_logprobs)


def wrong_sign(function):
    def negative(*arguments):
        return -function(*arguments)

    negative.__signature__ = inspect.signature(function)
    return negative


def test_the_closed_form_is_the_gradient():
    """The measure itself: the closed forms against autograd of the enumerated sum, on another seed too."""
    for theta in (THETA, logits(7)):
        for direction in ("reverse", "forward"):
            leaf = theta.clone().requires_grad_()
            p, q = leaf.log_softmax(-1), REF.log_softmax(-1)
            true = (p.exp() * (p - q)).sum() if direction == "reverse" else (q.exp() * (q - p)).sum()
            true.backward()
            value, gradient = numpy_kl(theta, REF, direction)
            assert true.item() == pytest.approx(value)
            np.testing.assert_allclose(leaf.grad.numpy(), gradient, rtol=1e-9, atol=1e-13)
    with pytest.raises(AssertionError):  # the two directions can be told apart
        np.testing.assert_allclose(numpy_kl(THETA, REF, "reverse")[1], numpy_kl(THETA, REF, "forward")[1], rtol=0.1)


@pytest.mark.parametrize("estimator", [kl.k2_loss, kl.rk3_loss, k1_as_reward])
@pytest.mark.parametrize("seed", [0, 7])
def test_on_policy_the_gradient_is_the_reverse_kls(estimator, seed):
    assert_gradient(estimator, "reverse", theta=logits(seed))
    for wrong in (wrong_sign(estimator), rk3_with_stopped_ratio, k2_with_live_ratio, k1_loss):
        with pytest.raises(AssertionError):
            assert_gradient(wrong, "reverse", theta=logits(seed))


@pytest.mark.parametrize("estimator", [kl.k2_loss, kl.rk3_loss])
def test_off_policy_the_gradient_is_the_reverse_kls(estimator):
    assert_gradient(estimator, "reverse", mu=MU)
    for wrong in (wrong_sign(estimator), rk3_with_stopped_ratio, k2_with_live_ratio, k2_without_ratio, k1_as_reward):
        with pytest.raises(AssertionError):
            assert_gradient(wrong, "reverse", mu=MU)


def test_k3_as_a_loss_has_the_gradient_of_the_forward_kl():
    with pytest.raises(AssertionError):
        assert_gradient(kl.k3_loss, "reverse")
    assert_gradient(kl.k3_loss, "forward")
    with pytest.raises(AssertionError):  # and only on-policy
        assert_gradient(kl.k3_loss, "forward", mu=MU)


@pytest.mark.parametrize("mu", [None, MU])
def test_forward_kl_loss_has_the_gradient_of_the_forward_kl(mu):
    assert_gradient(kl.forward_kl_loss, "forward", mu=mu)
    for wrong in (wrong_sign(kl.forward_kl_loss), kl.rk3_loss, kl.k2_loss):
        with pytest.raises(AssertionError):
            assert_gradient(wrong, "forward", mu=mu)


def test_on_policy_forward_kl_loss_and_k3_loss_pull_alike_at_every_token():
    def pull(function):
        leaf = THETA.log_softmax(-1).clone().requires_grad_()
        given = {"logprobs": leaf, "old_logprobs": leaf.detach(), "ref_logprobs": REF.log_softmax(-1)}
        call(function, given).sum().backward()
        return leaf.grad

    torch.testing.assert_close(pull(kl.forward_kl_loss), pull(kl.k3_loss))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(pull(kl.forward_kl_loss), pull(kl.rk3_loss))


def test_rk3_loss_pulls_as_k2_loss_does_at_every_token():
    """So neither gradient has less noise: what rk3_loss has beside it is a value that is the KL."""

    def pull(function):
        leaf = THETA.log_softmax(-1).clone().requires_grad_()
        given = {"logprobs": leaf, "old_logprobs": MU.log_softmax(-1), "ref_logprobs": REF.log_softmax(-1)}
        call(function, given).sum().backward()
        return leaf.grad

    torch.testing.assert_close(pull(kl.rk3_loss), pull(kl.k2_loss))


def test_k1_as_a_loss_teaches_nothing_and_is_refused():
    torch.testing.assert_close(expected(k1_loss)[1], torch.zeros(ACTIONS, dtype=torch.float64))
    assert expected(kl.k2_loss)[1].abs().max() > 0.01, "control: a true estimator does"
    for name in ("k1", "k1_loss", "rollouts/k1"):
        with pytest.raises(ConfigError, match=rf"--kl {name}: .* gradient of zero.*--kl k1_reward .*--kl rk3_loss"):
            kl.check_kl(name)
    for name in ("k1_reward", "k2_loss", "rk3_loss", "k3_loss", "forward_kl_loss", "./mine.py:k1_like", "none"):
        kl.check_kl(name)


def test_expected_values():
    """The expectation of the value is the KL, but for k2's."""

    def check(function, direction, mu=None):
        assert expected(function, mu=mu)[0] == pytest.approx(numpy_kl(THETA, REF, direction)[0])

    def k1(old_logprobs, ref_logprobs, logprobs):  # logprobs: for a graph to run backward through
        return kl.k1_reward(old_logprobs, ref_logprobs) + 0 * logprobs

    check(k1, "reverse")
    check(kl.k3_loss, "reverse")
    for mu in (None, MU):
        check(kl.rk3_loss, "reverse", mu)
        check(kl.forward_kl_loss, "forward", mu)
    for function, direction in ((kl.k2_loss, "reverse"), (kl.k3_loss, "forward"), (kl.forward_kl_loss, "reverse")):
        with pytest.raises(AssertionError):
            check(function, direction)


# --- Each token -------------------------------------------------------------------------------------------------------


def numpy_value(name, new, old, ref):
    r, q = math.exp(new) / math.exp(old), math.exp(ref) / math.exp(new)
    return {
        "k1_reward": math.log(math.exp(old) / math.exp(ref)),
        "k2_loss": r * math.log(q) ** 2 / 2,
        "k3_loss": q - 1 - math.log(q),
        "rk3_loss": r * (q - 1 - math.log(q)),
        "forward_kl_loss": r * (q * math.log(q) - q + 1),
    }[name]


ESTIMATORS = ("forward_kl_loss", "k1_reward", "k2_loss", "k3_loss", "rk3_loss")


def random_streams(count=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    new = -3 * torch.rand(count, generator=generator, dtype=torch.float64)
    old, ref = (new + 0.5 * torch.randn(count, generator=generator, dtype=torch.float64) for _ in range(2))
    return {"logprobs": new, "old_logprobs": old, "ref_logprobs": ref}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_values_equal_numpy(name):
    given = random_streams()
    function = getattr(kl, name)
    columns = zip(*(tensor.tolist() for tensor in given.values()), strict=True)
    wanted = np.array([numpy_value(name, *token) for token in columns])

    def check(streams):
        np.testing.assert_allclose(call(function, streams).numpy(), wanted, rtol=1e-10, atol=1e-13)

    check(given)
    with pytest.raises(AssertionError):  # swapped policies
        check({**given, "logprobs": given["ref_logprobs"], "ref_logprobs": given["old_logprobs"]})
    if name not in ("k1_reward",):
        assert (wanted >= 0).all(), "never negative"


@pytest.mark.parametrize("name", ["forward_kl_loss", "k3_loss", "rk3_loss"])
def test_gradients_equal_finite_differences(name):
    given, function = random_streams(), getattr(kl, name)

    def check(function):
        assert torch.autograd.gradcheck(
            lambda tensor: call(function, {**given, "logprobs": tensor}),
            (given["logprobs"].clone().requires_grad_(),),
            raise_exception=False,
        )

    check(function)
    with pytest.raises(AssertionError):  # control: its ratio is stopped, so the derivative is not the value's
        check(rk3_with_stopped_ratio)


def test_k2_has_the_closed_form_gradient():
    given = random_streams()
    new, old, ref = given.values()
    wanted = torch.tensor(
        [math.exp(n - o) * (n - f) for n, o, f in zip(new.tolist(), old.tolist(), ref.tolist(), strict=True)],
        dtype=torch.float64,
    )

    def check(function):
        leaf = new.clone().requires_grad_()
        call(function, {**given, "logprobs": leaf}).sum().backward()
        torch.testing.assert_close(leaf.grad, wanted)

    check(kl.k2_loss)
    for wrong in (k2_with_live_ratio, k2_without_ratio):
        with pytest.raises(AssertionError):
            check(wrong)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_equal_policies_have_no_kl(name):
    new = random_streams()["logprobs"].float()
    leaf = new.clone().requires_grad_()
    values = call(getattr(kl, name), {"logprobs": leaf, "old_logprobs": new, "ref_logprobs": new.clone()})
    assert (values == 0).all()
    if values.requires_grad:
        values.sum().backward()
        assert (leaf.grad == 0).all()
    far = call(getattr(kl, name), {"logprobs": new, "old_logprobs": new, "ref_logprobs": new - 0.1})
    assert (far != 0).all(), "control"


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("ref", [-1e4, 1e4, -math.inf, math.inf])
def test_log_ratios_are_clamped(name, ref):
    leaf = torch.tensor([-1.0], requires_grad=True)
    values = call(
        getattr(kl, name), {"logprobs": leaf, "old_logprobs": leaf.detach() - 0.5, "ref_logprobs": torch.tensor([ref])}
    )
    assert values.isfinite().all()
    if values.requires_grad:
        values.sum().backward()
        assert leaf.grad.isfinite().all()
    if name == "k1_reward":
        assert values.item() == (20.0 if ref < 0 else -20.0)


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - {"k1_reward"}))
def test_nan_at_masked_positions_changes_nothing(name):
    given = random_streams()
    mask = (torch.arange(40) % 3 > 0).double()
    algorithm = Algorithm(
        None, "token_mean", (Term(losses.cross_entropy),), kl=kl.make_kl(getattr(kl, name), {"coef": 0.5})
    )

    def run(where):
        leaf = given["logprobs"].clone().requires_grad_()
        spoilt = {name: tensor.masked_fill(where, math.nan) for name, tensor in given.items() if name != "logprobs"}
        found = evaluate_objective(algorithm, {**spoilt, "logprobs": leaf}, mask)
        found.values.sum().backward()
        return torch.stack([found.values.detach(), leaf.grad])[:, mask > 0]

    clean = run(mask > 1)
    torch.testing.assert_close(run(mask == 0), clean)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(run(torch.arange(40) == 1), clean)


# --- What it counts ---------------------------------------------------------------------------------------------------


def test_placement_is_read_from_the_signature():
    assert is_reward_placed(kl.k1_reward)
    assert not any(is_reward_placed(getattr(kl, name)) for name in ESTIMATORS if name != "k1_reward")


def test_only_k3_loss_has_a_warning():
    assert "--kl rk3_loss" in kl.warning_of(kl.k3_loss)
    assert kl.warning_of(partial(kl.k3_loss)) == kl.warning_of(kl.k3_loss)
    for function in (kl.k1_reward, kl.k2_loss, kl.rk3_loss, kl.forward_kl_loss, k1_as_reward):
        assert kl.warning_of(function) == ""


def test_steering_follows_ziegler():
    def check(steer):
        assert steer(0.01, 0.1, 0.1, 10) == pytest.approx(0.01)  # on target
        assert steer(0.01, 0.11, 0.1, 10) == pytest.approx(0.01 * 1.01)  # 10 % above
        assert steer(0.01, 0.095, 0.1, 10) == pytest.approx(0.01 * 0.995)  # 5 % below
        assert steer(0.01, 5.0, 0.1, 10) == pytest.approx(0.01 * 1.02)  # no further than 20 %
        assert steer(0.01, math.inf, 0.1, 10) == pytest.approx(0.01 * 1.02)
        assert steer(0.01, 0.0, 0.1, 10) == pytest.approx(0.01 * 0.98)
        assert steer(0.01, -3.0, 0.1, 4) == pytest.approx(0.01 * 0.95)
        assert steer(0.01, math.nan, 0.1, 10) == 0.01  # nothing measured
        assert steer(0.0, 5.0, 0.1, 10) == 0.0

    check(kl.steer_coefficient)
    for wrong in (
        lambda coefficient, value, target, horizon: coefficient,
        lambda coefficient, value, target, horizon: coefficient * (1 + (value / target - 1) / horizon),  # no bound
        lambda coefficient, *rest: 2 * coefficient - kl.steer_coefficient(coefficient, *rest),  # the other way
    ):
        with pytest.raises(AssertionError):
            check(wrong)


def test_steering_reaches_the_target():
    """A policy whose KL falls with the coefficient: kl = 0.001 / coefficient."""

    def run(steer):
        coefficient = 0.001
        for _ in range(300):
            coefficient = steer(coefficient, 0.001 / coefficient, 0.05, 3)
        return 0.001 / coefficient

    assert run(kl.steer_coefficient) == pytest.approx(0.05, rel=0.01)
    assert run(lambda coefficient, *_: coefficient) == pytest.approx(1.0), "control: unsteered it stays"


def scaled(logprobs, ref_logprobs, *, scale: float = 1.0):
    return scale * (logprobs - ref_logprobs) ** 2


def test_make_kl_splits_the_settings():
    made = kl.make_kl(kl.rk3_loss, {})
    assert made == KL(kl.rk3_loss), "the defaults are those of KL"
    made = kl.make_kl(scaled, {"coef": 0.05, "scale": 3.0, "threshold": 10.0, "target": 0.1, "horizon": 20})
    assert made[1:] == (0.05, 10.0, 0.1, 20)
    one = torch.ones(1)
    assert made.function(one, 0 * one).item() == 3.0
    assert kl.make_kl(partial(scaled, scale=2.0), {"coef": 0.0}).function(one, 0 * one).item() == 2.0
    with pytest.raises(ConfigError, match="rk3_loss has no setting 'treshold'; did you mean 'threshold'"):
        kl.make_kl(kl.rk3_loss, {"treshold": 1.0})


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("coef", [-0.01, math.nan, math.inf]),
        ("threshold", [0.0, -1.0, math.nan]),
        ("target", [0.0, -0.1, math.nan, math.inf]),
        ("horizon", [0, -1, math.nan]),
    ],
)
def test_settings_outside_their_domain_are_refused(setting, values):
    for value in values:
        with pytest.raises(ConfigError, match=rf"the setting {setting} is .*; type --kl\.{setting}"):
            kl.make_kl(kl.rk3_loss, {setting: value})
    kl.make_kl(kl.rk3_loss, {setting: 1})


def test_the_settings_are_described():
    assert [setting.name for setting in kl.KL_SETTINGS] == ["coef", "threshold", "target", "horizon"]
    assert all(setting.doc for setting in kl.KL_SETTINGS)
    for name in ESTIMATORS:
        assert not {setting.name for setting in read_signature(getattr(kl, name), "kl").settings} & {"coef", "target"}
