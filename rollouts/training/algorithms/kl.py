"""The KL to a reference policy, one value per token; and the rules that update the reference.

Legend: T tokens sampled from mu (`old_logprobs`, the anchor); pi the policy (`logprobs` [T], with gradient); ref
`ref_logprobs`; r = pi / mu. Choose an estimator by the expectation of its *gradient*, not of its value:

    k1_reward        reverse KL(pi || ref) of the whole rollout, subtracted from the rewards of tokens; on-policy
    k2_loss          reverse, as a loss; also off-policy
    rk3_loss         reverse, as a loss; the gradient of k2_loss, and the KL as its value (recommended)
    forward_kl_loss  forward KL(ref || pi), as a loss; also off-policy
    k3_loss          as a loss it has the gradient of the *forward* KL, on-policy only: allowed with a warning

A KL in the loss is a KL per token: it ignores the states to which a token leads. k1_reward includes them: its sum over
later tokens (`rewards_to_go`, or what the advantage makes of `token_rewards`) is the KL of whole rollouts.

k1 as a loss has an expected gradient of zero, so it is refused. The estimators of Schulman 2020 (k1, k2, k3) estimate
the value; Tang and Munos 2025 derive their gradients.

The reference is a copy of every trained tensor. It equals the policy at version 0. A rule (`frozen`, `ema`) is called
at version 0 and after every optimizer step. It changes the copy in place and returns nothing. It must not change
`policy`; `version` counts optimizer steps. Not here: where the copy is kept and how it is used
(backends/auxiliary.py), and the cut at a threshold (objective.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rollouts.author_code import unwrapped
from rollouts.errors import ConfigError
from rollouts.plugins.signature import bind
from rollouts.training.algorithms.algorithm import KL, KL_SETTINGS, function_label, refuse_unknown, signature_of
from rollouts.training.algorithms.losses import check_setting, log_ratio

if TYPE_CHECKING:
    from torch import Tensor

STEER_MAX = 0.2  # the largest relative error that counts (Ziegler et al. 2019)


def k1_reward(old_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Reverse KL as a penalty in the rewards: log(mu / ref) [T]. On-policy it has the gradient of the reverse KL of
    whole rollouts (Ziegler et al. 2019).

    Its expectation is the KL; a single value may be negative. With several optimizer steps per batch, it is the KL of
    the policy that sampled.
    """
    return log_ratio(old_logprobs, ref_logprobs)


def k2_loss(logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Reverse KL by its gradient: stopgrad(r) log(pi / ref)^2 / 2 [T], on-policy (r = 1) and off-policy.

    The expectation of its value is not the KL (Schulman 2020; Tang and Munos 2025).
    """
    weight = log_ratio(logprobs, old_logprobs).exp().detach()
    return weight * log_ratio(logprobs, ref_logprobs) ** 2 / 2


def rk3_loss(logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Reverse KL by value and gradient: r (ref/pi - 1 - log(ref/pi)) [T], r with gradient; never negative. Recommended.

    This is k3 of Schulman 2020, multiplied by an importance ratio with gradient. At every token its gradient is that of
    `k2_loss`, r log(pi / ref) grad log pi, and its value estimates the KL.
    """
    return log_ratio(logprobs, old_logprobs).exp() * k3_loss(logprobs, ref_logprobs)


def k3_loss(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The KL term of GRPO as published: ref/pi - 1 - log(ref/pi) [T] (Shao et al. 2024, eq. 4); biased as a reverse KL.

    Its value estimates KL(pi || ref), but its expected gradient is that of KL(ref || pi).
    """
    apart = log_ratio(ref_logprobs, logprobs)
    return apart.expm1() - apart  # expm1 is exact if the policies are close


def forward_kl_loss(logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Forward KL by value and gradient: r (q log q - q + 1) [T] with q = ref/pi, r with gradient; never negative.

    The expectation over mu is sum_a ref log(ref/pi), whatever mu is; its gradient at a token is (r - ref/mu) grad log
    pi, which on-policy is k3_loss's.
    """
    apart = log_ratio(ref_logprobs, logprobs)
    ratio = log_ratio(logprobs, old_logprobs).exp()
    return ratio * (apart.exp() * apart - apart.expm1())


def check_kl(name: str) -> None:
    """Raise ConfigError for k1 as a loss, with the reason and an alternative."""
    if name.rpartition("/")[2] in ("k1", "k1_loss"):
        what = f"--kl {name}: log(pi / ref) as a loss has an expected gradient of zero, so it would only add noise"
        raise ConfigError(f"{what}; type --kl k1_reward (the same number as a reward), or --kl rk3_loss (recommended)")


def warning_of(function: Callable[..., Any]) -> str:
    """A warning about this estimator; empty if there is none."""
    if unwrapped(function) is not k3_loss:
        return ""
    what = "its value estimates KL(policy || reference), but its gradient is that of KL(reference || policy)"
    hint = "type --kl rk3_loss for the first, --kl forward_kl_loss for the second"
    return f"--kl k3_loss: {what}, and only for on-policy samples; {hint}"


def steer_coefficient(coefficient: float, kl: float, target: float, horizon: float) -> float:
    """The coefficient for the next step, after a step with this `kl` (Ziegler et al. 2019, section 2.2).

    coefficient * (1 + clip(kl / target - 1, -0.2, 0.2) / horizon). A `kl` of NaN does not change it.

    >>> steer_coefficient(0.01, kl=1.0, target=0.1, horizon=10)
    0.0102
    """
    if math.isnan(kl):  # a skipped step measured nothing
        return coefficient
    error = min(max(kl / target - 1, -STEER_MAX), STEER_MAX)
    return coefficient * (1 + error / horizon)


def make_kl(function: Callable[..., Any], settings: Mapping[str, Any]) -> KL:
    """Make a KL term. It takes coef, threshold, target and horizon; all other settings go to the estimator.

    Raises ConfigError for an unknown setting, and for a value out of range.
    """
    own = {setting.name: settings.get(setting.name, setting.default) for setting in KL_SETTINGS}
    rest = {name: value for name, value in settings.items() if name not in own}
    known = [*own, *(setting.name for setting in signature_of(function, "kl").settings)]
    refuse_unknown(f"the KL estimator {function_label(function)}", rest, known)
    coefficient, threshold, target, horizon = (own[setting.name] for setting in KL_SETTINGS)
    positive = "a number above 0, or none"
    check_setting("coef", coefficient, 0 <= coefficient < math.inf, "a number of 0 or more", "--kl.coef 0.01")
    check_setting("threshold", threshold, threshold is None or threshold > 0, positive, "--kl.threshold 10")
    check_setting("target", target, target is None or 0 < target < math.inf, positive, "--kl.target 0.1")
    check_setting("horizon", horizon, 1 <= horizon < math.inf, "a number of 1 or more", "--kl.horizon 10")
    return KL(bind(function, rest), coefficient, threshold, target, horizon)


# --- the rules of the reference -------------------------------------------------------------------------------------


def frozen() -> None:
    """The reference is the policy at the beginning of the run, and never changes."""


def adapter_off(adapters: list[Tensor]) -> None:
    """The reference is the base model without adapters (LoRA only). Its adapters are zeros."""
    import torch

    if adapters:
        torch._foreach_zero_(adapters)


def every_n(reference: list[Tensor], policy: list[Tensor], version: int, *, steps: int = 100) -> None:
    """The reference becomes the policy after every `steps` optimizer steps.

    Args:
        steps: optimizer steps between two copies
    """
    import torch

    check_setting("steps", steps, steps >= 1, "a number of 1 or more", "--reference.steps 100")
    if version % steps == 0 and reference:
        with torch.no_grad():
            torch._foreach_copy_(reference, policy)


def ema(reference: list[Tensor], policy: list[Tensor], version: int, *, decay: float = 0.99) -> None:
    """The reference is a moving average of the policy: reference <- decay reference + (1 - decay) policy.

    After k steps it is decay^k policy_0 + (1 - decay) sum_i decay^(k-i) policy_i.

    Args:
        decay: the part of the average that a step keeps; with 1 the reference never changes
    """
    import torch

    check_setting("decay", decay, 0 <= decay <= 1, "a number from 0 to 1", "--reference.decay 0.99")
    if version == 0 or not reference:  # the reference equals the policy
        return
    with torch.no_grad():
        # The policy's tensors may have another precision, which `lerp` does not accept.
        torch._foreach_lerp_(reference, [new.to(old) for new, old in zip(policy, reference, strict=True)], 1 - decay)
