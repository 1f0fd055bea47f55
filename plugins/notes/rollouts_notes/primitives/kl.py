"""The KL to a reference model: per token, per reply, per batch; and how the reference follows the policy.

The estimators are the engine's (`rollouts.training.algorithms.kl`). They take logprobs of tokens that the policy
sampled, and average to the KL. A *KL function* `kl_fn(logprobs, ref_logprobs)` takes two tensors [K] and returns one
value per token [K], or one number. A custom one is used instead of the estimator.

Legend: K sampled tokens of a reply; p the policy's probability of a token, q the reference's.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rollouts.errors import ConfigError
from rollouts.training.algorithms import kl as engine
from rollouts.training.algorithms.algorithm import function_label
from rollouts.training.algorithms.losses import check_setting
from rollouts_notes.primitives.calls import call_given
from rollouts_notes.primitives.generation import extract_logprobs
from rollouts_notes.primitives.types import Generation, Rollout

if TYPE_CHECKING:
    from torch import Tensor

KLFn = Callable[[Any, Any], Any]
UpdateFn = Callable[..., Any]
LogprobsLike = Sequence[float] | Any
"""[K]: a tensor or a list."""


def compute_forward_kl(
    logprobs: LogprobsLike, ref_logprobs: LogprobsLike, *, kl_fn: KLFn | None = None, mask: LogprobsLike | None = None
) -> Tensor:
    """KL(reference || policy), in nats per token: the mean of (q/p) log(q/p) - q/p + 1 over the tokens. A scalar tensor
    with gradient.

    Raises ConfigError if the shapes differ, or if `kl_fn` returns another shape.

    >>> round(float(compute_forward_kl([-1.0, -2.0], [-1.1, -1.5])), 4)
    0.0902
    >>> compute_forward_kl([-1.0], [-2.0], kl_fn=lambda logprobs, ref_logprobs: logprobs - ref_logprobs)
    tensor(1.)

    Args:
        mask: [K], the weight of each token in the mean; None: all count
    """
    return _mean(kl_fn or _forward, logprobs, ref_logprobs, mask)


def compute_reverse_kl(
    logprobs: LogprobsLike, ref_logprobs: LogprobsLike, *, kl_fn: KLFn | None = None, mask: LogprobsLike | None = None
) -> Tensor:
    """KL(policy || reference), in nats per token: the mean of q/p - 1 - log(q/p) over the tokens. A scalar tensor with
    the gradient of the reverse KL. Arguments and errors are those of `compute_forward_kl`.

    >>> round(float(compute_reverse_kl([-1.0, -2.0], [-1.1, -1.5])), 4)
    0.0768
    """
    return _mean(kl_fn or _reverse, logprobs, ref_logprobs, mask)


def compute_per_token_kl(logprobs: LogprobsLike, ref_logprobs: LogprobsLike, *, kl_fn: KLFn | None = None) -> Tensor:
    """The KL of each token [K], never negative: q/p - 1 - log(q/p), or what `kl_fn` returns. Raises ConfigError.

    >>> [round(each, 3) for each in compute_per_token_kl([-1.0, -2.0], [-1.1, -1.5]).tolist()]
    [0.005, 0.149]
    """
    policy, reference = _tensors(logprobs, ref_logprobs)
    values = _values(kl_fn or _reverse, policy, reference)
    if values.dim() == 0:
        label = function_label(kl_fn)
        raise ConfigError(f"the kl_fn {label} returned one number; expected one per token, shape {list(policy.shape)}")
    return values


def compute_batch_kl(rollouts: Sequence[Rollout], *, kl_fn: KLFn | None = None) -> list[float | None]:
    """The reverse KL of each rollout [N], in nats per token; None without `ref_logprobs` or the sampler's logprobs.

    >>> rollout = Rollout("2 + 3", Generation("5", [9], [-1.0]), ref_logprobs=[-1.1])
    >>> [None if each is None else round(each, 4) for each in compute_batch_kl([rollout, rollout._replace(
    ...     ref_logprobs=None)])]
    [0.0048, None]
    """
    found: list[float | None] = []
    for rollout in rollouts:
        sampled = [turn.logprobs for turn in rollout.turns or (rollout.generation,)]
        known = [each for each in sampled if each is not None]
        if rollout.ref_logprobs is None or len(known) < len(sampled):
            found.append(None)
            continue
        logprobs = list(itertools.chain.from_iterable(known))
        found.append(float(compute_reverse_kl(logprobs, rollout.ref_logprobs, kl_fn=kl_fn).detach()))
    return found


# --- KL functions -----------------------------------------------------------------------------------------------------


def create_truncated_kl(threshold: float = 1.0, *, kl_fn: KLFn | None = None) -> KLFn:
    """A KL function that cuts the value of each token to `threshold` nats: min(kl, threshold) [K].

    A cut token has no gradient. Raises ConfigError for a threshold of 0 or less.

    >>> compute_per_token_kl([-1.0, -1.0], [-1.0, -9.0], kl_fn=create_truncated_kl(threshold=2.0)).tolist()
    [0.0, 2.0]

    Args:
        kl_fn: the KL per token that is cut; None: the reverse KL
    """
    check_setting("threshold", threshold, threshold > 0, "a number above 0", "create_truncated_kl(threshold=1.0)")

    def truncated_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        return compute_per_token_kl(logprobs, ref_logprobs, kl_fn=kl_fn).clamp(max=threshold)

    return truncated_kl


def create_adaptive_kl(confidence_threshold: float = 0.1, *, kl_fn: KLFn | None = None) -> KLFn:
    """A KL function that weighs each token by the policy's confidence: min(1, p / confidence_threshold) kl [K].

    A token to which the policy gives at least `confidence_threshold` counts in full. A less likely token counts in
    proportion, so exploring costs less. The weight has no gradient. Raises ConfigError for a threshold outside of (0,
    1].

    >>> import math
    >>> per_token = compute_per_token_kl([math.log(0.5), math.log(0.05)], [math.log(0.25), math.log(0.025)])
    >>> adaptive = create_adaptive_kl(confidence_threshold=0.1)
    >>> weighed = adaptive([math.log(0.5), math.log(0.05)], [math.log(0.25), math.log(0.025)])
    >>> [round(each, 3) for each in (weighed / per_token).tolist()]
    [1.0, 0.5]

    Args:
        kl_fn: the KL per token that is weighed; None: the reverse KL
    """
    is_valid = 0 < confidence_threshold <= 1
    example = "create_adaptive_kl(confidence_threshold=0.1)"
    check_setting("confidence_threshold", confidence_threshold, is_valid, "a probability above 0", example)

    def adaptive_kl(logprobs: LogprobsLike, ref_logprobs: LogprobsLike) -> Tensor:
        policy, reference = _tensors(logprobs, ref_logprobs)
        confidence = (policy.detach().exp() / confidence_threshold).clamp(max=1.0)
        return confidence * compute_per_token_kl(policy, reference, kl_fn=kl_fn)

    return adaptive_kl


def _forward(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    return engine.forward_kl_loss(logprobs, logprobs.detach(), ref_logprobs)


def _reverse(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    return engine.rk3_loss(logprobs, logprobs.detach(), ref_logprobs)


def _mean(kl_fn: KLFn, logprobs: LogprobsLike, ref_logprobs: LogprobsLike, mask: LogprobsLike | None) -> Tensor:
    import torch

    policy, reference = _tensors(logprobs, ref_logprobs)
    values = _values(kl_fn, policy, reference)
    if values.dim() == 0:
        return values
    weights = torch.ones_like(values) if mask is None else _floats(mask).to(values)
    if weights.shape != values.shape:
        raise ConfigError(f"the mask has shape {list(weights.shape)}, but the logprobs {list(values.shape)}")
    return (values.where(weights > 0, 0.0) * weights).sum() / weights.sum().clamp(min=1e-12)


def _values(kl_fn: KLFn, policy: Tensor, reference: Tensor) -> Tensor:
    """The result of a KL function: [K], or a scalar."""
    import torch

    returned = call_given("kl_fn(logprobs, ref_logprobs)", kl_fn, policy, reference)
    try:
        values = torch.as_tensor(returned)
    except (TypeError, ValueError, RuntimeError) as error:
        given = type(returned).__name__
        raise ConfigError(f"the kl_fn {function_label(kl_fn)} returned {given}; expected numbers") from error
    if values.dim() and values.shape != policy.shape:
        expected = f"one value per token, shape {list(policy.shape)}, or one number"
        raise ConfigError(f"the kl_fn {function_label(kl_fn)} returned shape {list(values.shape)}; expected {expected}")
    return values


def _tensors(logprobs: LogprobsLike, ref_logprobs: LogprobsLike) -> tuple[Tensor, Tensor]:
    policy, reference = _floats(logprobs), _floats(ref_logprobs)
    if policy.shape != reference.shape or policy.dim() != 1:
        expected = "expected two lists or tensors of one length, with one logprob per sampled token"
        raise ConfigError(f"shapes {list(policy.shape)} and {list(reference.shape)} of logprobs; {expected}")
    return policy, reference.to(policy)


def _floats(values: LogprobsLike) -> Tensor:
    import torch

    return values if isinstance(values, torch.Tensor) else torch.tensor(list(values), dtype=torch.float32)


# --- the reference ----------------------------------------------------------------------------------------------------


def create_reference_model(model: Any, *, ref_model_fn: Callable[[Any], Any] | None = None) -> Any:
    """The reference: a frozen copy of the model in evaluation mode, or the result of `ref_model_fn(model)`.

    A function may return any other model with the same tokenizer: `lambda model: load_model("another")`.

    >>> from rollouts.primitives import load_model
    >>> reference = create_reference_model(load_model("tiny"))
    >>> reference.training, any(parameter.requires_grad for parameter in reference.parameters())
    (False, False)
    """
    if ref_model_fn is not None:
        return call_given("ref_model_fn(model)", ref_model_fn, model)
    return copy.deepcopy(model).requires_grad_(False).eval()


def update_reference_model(
    ref_model: Any, model: Any, *, update_fn: UpdateFn | None = None, iteration: int | None = None
) -> Any:
    """The reference after an iteration: the result of `update_fn(ref_model, model)`. Without a function it stays.

    Raises ConfigError if the function returns None.

    >>> update_reference_model("reference", "policy", update_fn=lambda ref, policy: policy)
    'policy'

    Args:
        iteration: the number of finished iterations, passed to an `update_fn` with a parameter of this name
    """
    if update_fn is None:
        return ref_model
    function = update_fn
    if callable(update_fn) and "iteration" in inspect.signature(update_fn).parameters:
        function = functools.partial(update_fn, iteration=iteration)
    updated = call_given("update_fn(ref_model, model)", function, ref_model, model)
    if updated is None:
        label = function_label(update_fn)
        raise ConfigError(f"the update_fn {label} returned None; return the reference model, also if it is unchanged")
    return updated


def create_ema_updater(decay: float = 0.999) -> UpdateFn:
    """An update function: reference <- decay reference + (1 - decay) policy, in place. Returns the reference.

    Raises ConfigError for a decay outside of [0, 1], and if the two models have other parameters.

    >>> import torch
    >>> policy, reference = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    >>> policy.weight.data[0], reference.weight.data[0] = 1.0, 0.0
    >>> create_ema_updater(decay=0.75)(reference, policy).weight.tolist()
    [[0.25]]
    """
    check_setting("decay", decay, 0 <= decay <= 1, "a number from 0 to 1", "create_ema_updater(decay=0.999)")

    def ema_update(ref_model: Any, model: Any) -> Any:
        engine.ema(*_parameters(ref_model, model), version=1, decay=decay)
        return ref_model

    return ema_update


def create_periodic_updater(update_every: int = 10) -> UpdateFn:
    """An update function: the reference becomes the policy after every `update_every` iterations, in place. Returns the
    reference.

    If you call it without `iteration`, it counts its own calls. Raises ConfigError for `update_every` below 1, and if
    the two models have other parameters.

    >>> import torch
    >>> policy, reference = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    >>> update = create_periodic_updater(update_every=2)
    >>> [update(reference, policy).weight.equal(policy.weight) for call in range(2)]
    [False, True]
    """
    is_valid = update_every >= 1
    check_setting("update_every", update_every, is_valid, "a number of 1 or more", "create_periodic_updater(10)")
    calls = itertools.count(1)

    def periodic_update(ref_model: Any, model: Any, iteration: int | None = None) -> Any:
        number = next(calls) if iteration is None else iteration
        if number % update_every == 0:
            engine.every_n(*_parameters(ref_model, model), version=number, steps=update_every)
        return ref_model

    return periodic_update


def _parameters(ref_model: Any, model: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters of both models. Raises ConfigError if their shapes differ."""
    reference, policy = list(ref_model.parameters()), [each.detach() for each in model.parameters()]
    if [each.shape for each in reference] != [each.shape for each in policy]:
        sizes = [math.fsum(each.numel() for each in parameters) for parameters in (reference, policy)]
        raise ConfigError(
            f"the reference has {sizes[0]:g} parameters and the policy {sizes[1]:g}, in other shapes, so the reference "
            "cannot follow; use `lambda ref, policy: ref`, or a copy of the policy (create_reference_model)"
        )
    return reference, policy


def get_reference_logprobs(
    ref_model: Any,
    generation: Generation,
    *,
    temperature: float | None = None,
    logprob_extractor: Callable[[Any, Generation], Any] | None = None,
) -> Tensor:
    """The reference's logprobs of a reply's sampled ids [K], without gradient.

    The temperature is that of the reply, so that both are comparable. Raises TrainingError for another one, and
    ConfigError if the extractor does not return K numbers.

    >>> get_reference_logprobs(None, Generation("5", [9]), logprob_extractor=lambda ref_model, generation: [-1.0])
    tensor([-1.])

    Args:
        logprob_extractor: `logprob_extractor(ref_model, generation)` returns [K]; None: `compute_logprobs`
    """
    return extract_logprobs(ref_model, generation, temperature, logprob_extractor)
