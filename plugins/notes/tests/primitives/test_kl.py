"""Primitives of the KL: exact on known distributions, and every replaceable part is called as documented."""

from __future__ import annotations

import functools

import pytest
import torch

from rollouts.errors import ConfigError, TrainingError
from rollouts.primitives import (
    Generation,
    Rollout,
    compute_batch_kl,
    compute_forward_kl,
    compute_per_token_kl,
    compute_reverse_kl,
    create_adaptive_kl,
    create_ema_updater,
    create_periodic_updater,
    create_reference_model,
    create_truncated_kl,
    generate,
    get_reference_logprobs,
    load_model,
    load_tokenizer,
    update_reference_model,
)

POLICY = torch.tensor([0.7, 0.2, 0.08, 0.02], dtype=torch.float64)
REFERENCE = torch.tensor([0.2, 0.3, 0.4, 0.1], dtype=torch.float64)


def test_the_estimators_average_to_the_divergences_of_two_known_distributions():
    """Each outcome counts with the policy's probability, as if it had been sampled that often."""
    given = POLICY.log(), REFERENCE.log()
    forward = (REFERENCE * (REFERENCE / POLICY).log()).sum()
    reverse = (POLICY * (POLICY / REFERENCE).log()).sum()
    assert abs(forward - reverse) > 0.01
    assert compute_forward_kl(*given, mask=POLICY).item() == pytest.approx(forward.item())
    assert compute_reverse_kl(*given, mask=POLICY).item() == pytest.approx(reverse.item())
    assert (compute_per_token_kl(*given) * POLICY).sum().item() == pytest.approx(reverse.item())
    assert compute_reverse_kl(POLICY.log(), POLICY.log()).item() == 0.0


@pytest.mark.parametrize("forward", [True, False])
def test_the_gradients_are_those_of_the_divergences(forward):
    logits = POLICY.log().clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    compute = compute_forward_kl if forward else compute_reverse_kl
    (found,) = torch.autograd.grad(compute(logprobs, REFERENCE.log(), mask=POLICY), logits)
    p = logits.softmax(-1)
    exact = (REFERENCE * (REFERENCE.log() - p.log())).sum() if forward else (p * (p.log() - REFERENCE.log())).sum()
    (expected,) = torch.autograd.grad(exact, logits)
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-9)


def test_values_per_token_and_lists():
    ratio = torch.tensor([-0.1, 0.5]).exp()
    expected = ratio - 1 - ratio.log()
    assert compute_per_token_kl([-1.0, -2.0], [-1.1, -1.5]).tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert float(compute_reverse_kl([-1.0, -2.0], [-1.1, -1.5], mask=[0.0, 1.0])) == pytest.approx(float(expected[1]))
    assert float(compute_reverse_kl([], [])) == 0.0


def test_kl_functions_get_both_logprobs():
    seen = []
    found = compute_forward_kl([-1.0], [-2.0], kl_fn=lambda *given: seen.append(given) or 0.25)
    assert float(found) == 0.25 and [each.tolist() for each in seen[0]] == [[-1.0], [-2.0]]
    difference = lambda logprobs, ref_logprobs: logprobs - ref_logprobs  # noqa: E731 - as the note writes it
    assert float(compute_reverse_kl([-1.0, -2.0], [-2.0, -2.5], kl_fn=difference)) == 0.75
    assert compute_per_token_kl([-1.0, -2.0], [-2.0, -2.5], kl_fn=difference).tolist() == [1.0, 0.5]


def test_truncated_and_adaptive():
    given = torch.tensor([-0.1, -4.0]), torch.tensor([-3.0, -1.0])
    plain = compute_per_token_kl(*given)
    assert create_truncated_kl(threshold=2.0)(*given).tolist() == plain.clamp(max=2.0).tolist() and plain.max() > 2
    assert float(compute_reverse_kl(*given, kl_fn=create_truncated_kl(0.5))) == pytest.approx(0.5)
    weights = torch.tensor([1.0, float(given[0][1].exp()) / 0.1])
    adaptive = create_adaptive_kl(confidence_threshold=0.1)
    assert adaptive(*given).tolist() == pytest.approx((weights * plain).tolist())
    both = create_truncated_kl(0.5, kl_fn=adaptive)
    assert both(*given).tolist() == pytest.approx((weights * plain).clamp(max=0.5).tolist())


def test_a_batch_has_one_number_per_rollout():
    turns = (Generation("a", [3, 4], [-1.0, -2.0]), Generation("b", [5], [-0.5]))
    rollout = Rollout("2", turns[-1], ref_logprobs=[-1.1, -1.5, -0.5], turns=turns)
    (found,) = compute_batch_kl([rollout])
    assert found == pytest.approx(float(compute_reverse_kl([-1.0, -2.0, -0.5], [-1.1, -1.5, -0.5])))
    unknown = rollout._replace(turns=(Generation("a", [3, 4]), turns[1]))
    assert compute_batch_kl([unknown, rollout._replace(ref_logprobs=None)]) == [None, None]
    assert compute_batch_kl([rollout], kl_fn=lambda *given: 7) == [7.0]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: compute_forward_kl([-1.0], [-1.0, -2.0]), r"shapes \[1\] and \[2\] of logprobs"),
        (lambda: compute_reverse_kl([-1.0], [-1.0], mask=[1.0, 1.0]), r"the mask has shape \[2\]"),
        (lambda: compute_reverse_kl([-1.0], [-1.0], kl_fn=lambda a, b: torch.ones(3)), r"returned shape \[3\]"),
        (lambda: compute_reverse_kl([-1.0], [-1.0], kl_fn=lambda a, b: None), "returned NoneType; expected numbers"),
        (lambda: compute_per_token_kl([-1.0], [-1.0], kl_fn=lambda a, b: 1.0), "returned one number"),
        (lambda: create_truncated_kl(0), r"create_truncated_kl\(threshold=1.0\)"),
        (lambda: create_adaptive_kl(2), r"create_adaptive_kl\(confidence_threshold=0.1\)"),
        (lambda: create_ema_updater(1.5), r"create_ema_updater\(decay=0.999\)"),
        (lambda: create_periodic_updater(0), r"create_periodic_updater\(10\)"),
        (lambda: update_reference_model(1, 2, update_fn=lambda ref, policy: None), "return the reference model"),
        (lambda: update_reference_model(1, 2, update_fn=3), r"cannot be called as update_fn\(ref_model, model\)"),
    ],
)
def test_what_is_wrong(call, words):
    with pytest.raises(ConfigError, match=words):
        call()


# --- the reference ----------------------------------------------------------------------------------------------------


def weights_of(model):
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def moved(model):
    with torch.no_grad():
        for each in model.parameters():
            each += 1.0
    return model


def test_a_reference_is_a_frozen_copy_or_any_other_model():
    model = torch.nn.Linear(2, 2).train()
    reference = create_reference_model(model)
    start = weights_of(reference)
    moved(model)
    assert torch.equal(weights_of(reference), start) and model.training and not reference.training
    assert not any(each.requires_grad for each in reference.parameters()) and model.weight.requires_grad
    assert create_reference_model(model, ref_model_fn=lambda given: (given, "another")) == (model, "another")


def test_updates():
    model = torch.nn.Linear(2, 2)
    reference = create_reference_model(model)
    start = weights_of(model)
    moved(model)
    assert update_reference_model(reference, model) is reference and torch.equal(weights_of(reference), start)
    assert update_reference_model(reference, model, update_fn=create_ema_updater(decay=0.75)) is reference
    assert weights_of(reference).tolist() == pytest.approx((0.75 * start + 0.25 * (start + 1)).tolist())
    assert not reference.weight.requires_grad and model.weight.requires_grad


def test_a_periodic_update_counts_iterations_or_its_own_calls():
    model = torch.nn.Linear(2, 2)
    reference, update = create_reference_model(model), create_periodic_updater(update_every=3)
    moved(model)
    equal = functools.partial(torch.equal, weights_of(model))
    assert [equal(weights_of(update(reference, model))) for _ in range(3)] == [False, False, True]
    resumed, update = create_reference_model(torch.nn.Linear(2, 2)), create_periodic_updater(update_every=3)
    assert not equal(weights_of(update_reference_model(resumed, model, update_fn=update, iteration=5)))
    assert equal(weights_of(update_reference_model(resumed, model, update_fn=update, iteration=6)))


def test_a_reference_of_another_shape_cannot_follow():
    with pytest.raises(ConfigError, match="the reference has 6 parameters and the policy 2, in other shapes"):
        create_ema_updater()(torch.nn.Linear(2, 2), torch.nn.Linear(1, 1))


def test_logprobs_of_the_reference():
    model, tokenizer = load_model("tiny"), load_tokenizer("tiny")
    reply = generate(model, tokenizer, "What is 2 + 3?")
    found = get_reference_logprobs(create_reference_model(model), reply)
    assert found.tolist() == pytest.approx(reply.logprobs, abs=1e-4) and not found.requires_grad
    warm = get_reference_logprobs(model, reply._replace(temperature=2.0))
    assert not torch.allclose(warm, found, atol=1e-2)
    with pytest.raises(TrainingError, match="used at another one: 1 and 2; leave `temperature` out"):
        get_reference_logprobs(model, reply, temperature=2.0)
    seen = []
    own = get_reference_logprobs(model, reply, logprob_extractor=lambda *given: seen.append(given) or reply.logprobs)
    assert own.tolist() == pytest.approx(reply.logprobs) and seen == [(model, reply)]
