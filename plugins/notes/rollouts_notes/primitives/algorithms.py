"""Advantages and losses of a batch: GRPO, PPO, and "dapo", a preference loss on pairs.

    config = create_algorithm_config("grpo", {"kl_coef": 0.2})
    loss = compute_loss_by_algorithm(batch, config)                       # all of it, or step by step:
    loss = compute_grpo_loss(batch, compute_grpo_advantages(batch), kl_coef=0.2)

Here "dapo" is DPO (Rafailov et al. 2023): pairs of a better and a worse rollout, and `beta`. It is not the DAPO of Yu
et al. 2025, which is GRPO with a higher upper clip: `create_algorithm_config("grpo", {"clip_high": 0.28})`. The flag
`--loss dapo` of a run means that one, and `--loss dpo` means this one. The other
algorithms of `rollouts.training.algorithms.recipes` work too, by their names in lower case.

The numbers are those of the engine, because its functions compute them. A function that you pass receives the inputs
that its parameters name (docs/losses.md, docs/advantages.md): a loss returns one value per sampled id [T], without a
mean. The engine masks, weighs and divides.

Legend: N rollouts, T sampled ids, G rollouts of one prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rollouts.author_code import shown
from rollouts.errors import ConfigError, TrainingError
from rollouts.training.algorithms import calls
from rollouts.training.algorithms.aggregation import Masks, aggregate, aggregation_function
from rollouts.training.algorithms.algorithm import (
    KL,
    Algorithm,
    Term,
    algorithm_settings,
    bind_algorithm,
    bind_own,
    function_label,
    is_batch_advantage,
    needs,
    refuse_unknown,
    signature_of,
)
from rollouts.training.algorithms.kl import rk3_loss
from rollouts.training.algorithms.objective import evaluate_objective
from rollouts.training.algorithms.recipes import DPO, GRPO, built_in
from rollouts.training.backends.forward import unit_weights
from rollouts_notes.primitives.batches import group_numbers, ids_at
from rollouts_notes.primitives.calls import call_given
from rollouts_notes.primitives.types import Batch

if TYPE_CHECKING:
    from torch import Tensor

Pairs = list[tuple[int, int]]


class AlgorithmConfig(NamedTuple):
    """An algorithm with its settings, from `create_algorithm_config`. `value_fn` is the value function of PPO."""

    name: str
    algorithm: Algorithm
    value_fn: Callable[[Batch], Tensor] | None = None


class PPOAdvantages(NamedTuple):
    """The advantages [T] of PPO, the targets `returns` [T] of the value function, and its `values` [T], all without
    gradient.
    """

    advantages: Tensor
    returns: Tensor
    values: Tensor


# --- configurations ---------------------------------------------------------------------------------------------------


def create_algorithm_config(
    name: str | Algorithm,
    settings: Mapping[str, Any] | None = None,
    *,
    advantage_fn: Callable[..., Any] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    kl_fn: Callable[..., Any] | None = None,
    pair_selector: Callable[..., Any] | None = None,
    value_fn: Callable[[Batch], Tensor] | None = None,
) -> AlgorithmConfig:
    """An algorithm with settings. `name` is "grpo", "ppo", "dapo", any algorithm of the engine in lower case, or an
    Algorithm. "dapo" is DPO on pairs here, as `--loss dpo`; `--loss dapo` is the algorithm of Yu et al. 2025.

    `settings` are those of its loss, advantage and aggregation, such as `clip_high`, `beta` or `lam`; and `kl_coef`,
    the weight of a KL to the reference model. Raises ConfigError for an unknown name or setting.

    >>> config = create_algorithm_config("grpo", {"kl_coef": 0.2, "clip_high": 0.28})
    >>> config.name, config.algorithm.kl.coefficient
    ('grpo', 0.2)
    >>> create_algorithm_config("grpo", {"klcoef": 0.2})
    Traceback (most recent call last):
        ...
    rollouts.errors.ConfigError: the algorithm grpo has no setting 'klcoef'; did you mean 'kl_coef'? (settings: \
clip_high, clip_low, dual_clip, entropy_coef, eps, kl_coef)

    Args:
        advantage_fn: replaces the advantage, such as `lambda rewards: rewards - rewards.mean()` of a group [G]
        loss_fn: replaces the policy's loss
        kl_fn: `kl_fn(logprobs, ref_logprobs)` returns the KL of each id [T], or one number
        pair_selector: `pair_selector(rewards)` returns pairs (chosen, rejected) of positions in a group [G]
        value_fn: `value_fn(batch)` returns values [T], with gradient if the optimizer has its parameters
    """
    algorithm, label = _recipe(name)
    if settings is not None and not isinstance(settings, Mapping):
        raise ConfigError(f'the settings are {shown(settings)}; expected a dict, such as {{"kl_coef": 0.2}}')
    given = dict(settings or {})
    kl_coefficient = given.pop("kl_coef", 0.0 if algorithm.kl is None else algorithm.kl.coefficient)
    if loss_fn is not None:
        algorithm = algorithm._replace(terms=(Term(loss_fn), *algorithm.terms[1:]))
    algorithm = algorithm._replace(
        advantage=advantage_fn or algorithm.advantage, pairs=pair_selector or algorithm.pairs
    )
    algorithm = _with_settings(algorithm, label, given)
    if not isinstance(kl_coefficient, int | float) or not 0 <= kl_coefficient < float("inf"):
        raise ConfigError(f"kl_coef is {shown(kl_coefficient)}; expected a number of 0 or more, such as 0.05")
    kl = KL(rk3_loss if kl_fn is None else _estimator(kl_fn), kl_coefficient) if kl_coefficient else None
    if value_fn is None:  # nothing to fit: PPO without a value function
        algorithm = algorithm._replace(terms=tuple(term for term in algorithm.terms if term.name != "value"))
    return AlgorithmConfig(label, algorithm._replace(kl=kl), value_fn)


def _recipe(name: str | Algorithm) -> tuple[Algorithm, str]:
    if isinstance(name, Algorithm):
        algorithm, label = name, function_label(name.terms[0].function)
    else:
        algorithm, label = DPO if name == "dapo" else built_in(name), name
    missing = [field for field in ("mix", "shaping", "filters") if getattr(algorithm, field)]
    if missing:
        what = f"the algorithm {label} has {' and '.join(missing)}, which a batch of primitives does not apply"
        raise ConfigError(f"{what}; apply them to your rollouts, and give Algorithm._replace({missing[0]}=...)")
    return algorithm, label


_KINDS = {"advantage": "advantages", "pairs": "pairings", "select": "selectors", "aggregation": "aggregations"}


def _with_settings(algorithm: Algorithm, label: str, given: Mapping[str, Any]) -> Algorithm:
    """Bind settings to the functions that have them. Raises ConfigError for a setting that none has."""
    of_loss = {setting.name for setting in algorithm_settings(algorithm)}
    known = {"kl_coef", *of_loss}
    bound: dict[str, Any] = {}
    for field, kind in _KINDS.items():
        function = getattr(algorithm, field)
        function = aggregation_function(function) if field == "aggregation" else function
        if function is not None:
            own = {setting.name for setting in signature_of(function, kind).settings}
            bound |= {field: bind_own(function, kind, given)} if own & set(given) else {}
            known |= own
    refuse_unknown(f"the algorithm {label}", given, sorted(known))
    algorithm = algorithm._replace(**bound)
    return bind_algorithm(algorithm, {key: value for key, value in given.items() if key in of_loss})


def _estimator(kl_fn: Callable[..., Any]) -> Callable[[Tensor, Tensor], Tensor]:
    def estimator(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        import torch

        values: Any = call_given("kl_fn(logprobs, ref_logprobs)", kl_fn, logprobs, ref_logprobs)
        try:
            return torch.as_tensor(values, device=logprobs.device).expand(logprobs.shape)
        except (TypeError, ValueError, RuntimeError) as error:
            expected = f"one number, or one per sampled id [{len(logprobs)}]"
            raise calls.wrong_result("kl_fn", kl_fn, shown(values), expected) from error

    estimator.__name__ = function_label(kl_fn)
    return estimator


# --- GRPO -------------------------------------------------------------------------------------------------------------


def compute_grpo_advantages(batch: Batch, *, advantage_fn: Callable[..., Any] | None = None) -> Tensor:
    """The advantage of each rollout [N]: its reward compared with those of its group, (R - mean) / (std + 1e-4).

    A rollout without a reward gets 0. Raises TrainingError if `advantage_fn` does not return one finite number for each
    rollout.

    >>> from rollouts.primitives import Generation, Rollout, create_batch
    >>> reply = Generation("4", tokens=[7, 2], logprobs=[-0.5, -0.25], prompt_tokens=[1, 3])
    >>> batch = create_batch(None, [Rollout("2 + 2", reply, rewards=reward) for reward in (1.0, 0.0, 0.0, 1.0)])
    >>> [round(advantage, 2) for advantage in compute_grpo_advantages(batch).tolist()]
    [0.87, -0.87, -0.87, 0.87]
    >>> compute_grpo_advantages(batch, advantage_fn=lambda rewards: rewards - 0.5).tolist()
    [0.5, -0.5, -0.5, 0.5]

    Args:
        advantage_fn: of the judged rewards of one group [G]; it may also name `lengths` [G]
    """
    import torch

    advantages = torch.zeros(len(batch.rollouts))
    for group in _groups(batch):
        found = calls.group_advantages(advantage_fn or GRPO.advantage, group.rewards, lengths=group.lengths)
        advantages[group.members] = torch.tensor(found)
    return advantages.to(batch.mask.device)


def compute_grpo_loss(
    batch: Batch,
    advantages: Tensor | Sequence[float],
    *,
    loss_fn: Callable[..., Any] | None = None,
    kl_fn: Callable[..., Any] | None = None,
    **settings: float,
) -> Tensor:
    """The clipped surrogate of GRPO, as the mean over the trained ids, with gradient. `advantages` are [N] or [T].

    `settings` are `clip_low` (0.2), `clip_high` (0.2), `entropy_coef` (0), `kl_coef` (0) and those of `loss_fn`. A
    `kl_coef` above 0 needs rollouts with a reference. Raises ConfigError for unknown settings and TrainingError for
    wrong shapes.

    >>> from rollouts.primitives import Generation, Rollout, create_batch
    >>> import torch
    >>> reply = Generation("4", tokens=[7, 2], logprobs=[-0.5, -0.25], prompt_tokens=[1, 3])
    >>> batch = create_batch(None, [Rollout("2 + 2", reply, rewards=reward) for reward in (1.0, 0.0)])
    >>> batch = batch._replace(logprobs=torch.tensor([-0.4, -0.2, -0.4, -0.2], requires_grad=True))
    >>> loss = compute_grpo_loss(batch, [1.0, -1.0])
    >>> abs(round(loss.item(), 4)), loss.requires_grad
    (0.0, True)
    >>> compute_grpo_loss(batch, [1.0, 0.0], loss_fn=lambda logprobs, advantages: -logprobs * advantages).item()
    0.15000000596046448

    Args:
        loss_fn: replaces the surrogate, such as `lambda logprobs, advantages: -logprobs * advantages` [T]
        kl_fn: `kl_fn(logprobs, ref_logprobs)` returns the KL of each id [T], or one number
    """
    return _mean_loss(batch, create_algorithm_config("grpo", settings, loss_fn=loss_fn, kl_fn=kl_fn), advantages)


# --- pairs ------------------------------------------------------------------------------------------------------------


def compute_dapo_pairs(batch: Batch, *, pair_selector: Callable[..., Any] | None = None) -> Pairs:
    """Pairs (chosen, rejected) of rollouts, as numbers 0 to N - 1: the best of each group against the worst.

    A group with equal rewards makes no pair. A rollout that is not trained is in no pair. Raises TrainingError if
    `pair_selector` returns anything but pairs of positions.

    >>> from rollouts.primitives import Generation, Rollout, create_batch
    >>> reply = Generation("4", tokens=[7, 2], logprobs=[-0.5, -0.25], prompt_tokens=[1, 3])
    >>> batch = create_batch(None, [Rollout("2 + 2", reply, rewards=reward) for reward in (0.5, 0.0, 1.0)])
    >>> compute_dapo_pairs(batch)
    [(2, 1)]

    Args:
        pair_selector: of the judged rewards of one group [G], such as `lambda rewards: [(0, 1)]`
    """
    function, pairs = pair_selector or DPO.pairs, []
    assert function is not None, "DPO has pairs"
    for group in _groups(batch):
        found = calls.paired(function, group.rewards, group.eligible, lengths=group.lengths)
        pairs += [(group.members[chosen], group.members[rejected]) for chosen, rejected in found]
    return pairs


def compute_dapo_loss(
    batch: Batch, pairs: Pairs, *, beta: float = 0.1, loss_fn: Callable[..., Any] | None = None
) -> Tensor:
    """The loss of DPO, -log sigmoid(beta (D_chosen - D_rejected)), as the mean over the pairs, with gradient.

    D is the sum of log(policy / reference) over a rollout's sampled ids. No pairs give 0. Raises TrainingError if the
    rollouts have no reference.

    >>> from rollouts.primitives import Generation, Rollout, create_batch
    >>> import torch
    >>> reply = Generation("4", tokens=[7, 2], logprobs=[-0.5, -0.25], prompt_tokens=[1, 3])
    >>> rollouts = [Rollout("2 + 2", reply, rewards, ref_logprobs=[-0.5, -0.25]) for rewards in (1.0, 0.0)]
    >>> batch = create_batch(None, rollouts)._replace(logprobs=torch.tensor([-0.5, -0.25, -0.5, -0.25]))
    >>> round(compute_dapo_loss(batch, [(0, 1)]).item(), 4)  # the policy is the reference: log 2
    0.6931

    Args:
        beta: a larger beta keeps the policy closer to the reference
        loss_fn: replaces the loss of a pair; it names `pair_index`, and returns one value per pair
    """
    settings = {"beta": beta} if loss_fn is None else {}
    return _mean_loss(batch, create_algorithm_config("dapo", settings, loss_fn=loss_fn), list(pairs))


# --- PPO --------------------------------------------------------------------------------------------------------------


def compute_ppo_advantages(
    batch: Batch, *, value_fn: Callable[[Batch], Tensor] | None = None, **settings: Any
) -> PPOAdvantages:
    """Generalized advantage estimation over the sampled ids, with the reward at the last one.

    `settings` are `gamma` (1), `lam` (0.95) and `whiten` (True). Without `value_fn` all values are 0. Raises
    ConfigError for unknown settings, and TrainingError if the values are not [T].

    >>> from rollouts.primitives import Generation, Rollout, create_batch
    >>> reply = Generation("4", tokens=[7, 2], logprobs=[-0.5, -0.25], prompt_tokens=[1, 3])
    >>> batch = create_batch(None, [Rollout("2 + 2", reply, rewards=1.0)])
    >>> compute_ppo_advantages(batch, lam=0.5, whiten=False).advantages.tolist()
    [0.5, 1.0]

    Args:
        value_fn: `value_fn(batch)` returns the value [T] of the state before each id
    """
    return _whole_batch(batch, create_algorithm_config("ppo", settings, value_fn=value_fn))


def compute_ppo_loss(
    batch: Batch,
    advantages: PPOAdvantages | Tensor | Sequence[float],
    *,
    loss_fn: Callable[..., Any] | None = None,
    value_fn: Callable[[Batch], Tensor] | None = None,
    kl_fn: Callable[..., Any] | None = None,
    **settings: float,
) -> Tensor:
    """The clipped surrogate of PPO, and the error of the value function if there is a `value_fn`: with gradient.

    `settings` are `clip_low`, `clip_high`, `value_coef` (0.5), `value_clip` (0.2), `entropy_coef` (0), `kl_coef` (0).
    Raises ConfigError for unknown settings, and TrainingError for wrong shapes.

    >>> from rollouts.primitives import Generation, Rollout, create_batch
    >>> import torch
    >>> reply = Generation("4", tokens=[7, 2], logprobs=[-0.5, -0.25], prompt_tokens=[1, 3])
    >>> batch = create_batch(None, [Rollout("2 + 2", reply, rewards=1.0)])
    >>> batch = batch._replace(logprobs=batch.old_logprobs.clone().requires_grad_())
    >>> compute_ppo_loss(batch, compute_ppo_advantages(batch, lam=0.5, whiten=False)).item()
    -0.75

    Args:
        loss_fn: replaces the surrogate
        value_fn: the value function, with gradient; its parameters belong into the optimizer
        kl_fn: `kl_fn(logprobs, ref_logprobs)` returns the KL of each id [T], or one number
    """
    config = create_algorithm_config("ppo", settings, loss_fn=loss_fn, kl_fn=kl_fn, value_fn=value_fn)
    return _mean_loss(batch, config, advantages)


# --- any algorithm ----------------------------------------------------------------------------------------------------


def compute_loss_by_algorithm(batch: Batch, algorithm_config: AlgorithmConfig) -> Tensor:
    """The loss of a batch by this algorithm, with gradient: pairs or advantages first, then the loss.

    Raises TrainingError if the batch lacks what the algorithm needs, or if one of its functions fails.

    >>> from rollouts.primitives import Generation, Rollout, create_batch
    >>> reply = Generation("4", tokens=[7, 2], logprobs=[-0.5, -0.25], prompt_tokens=[1, 3])
    >>> batch = create_batch(None, [Rollout("2 + 2", reply, rewards=reward) for reward in (1.0, 0.0)])
    >>> batch = batch._replace(logprobs=batch.old_logprobs.clone().requires_grad_())
    >>> compute_loss_by_algorithm(batch, create_algorithm_config("rloo")).item()
    0.0
    """
    check_config(algorithm_config)
    batch = select_trained(batch, algorithm_config)
    return _mean_loss(batch, algorithm_config, compute_targets(batch, algorithm_config))


def check_config(config: Any) -> None:
    """Raise ConfigError for anything but an AlgorithmConfig."""
    if not isinstance(config, AlgorithmConfig):
        raise ConfigError(f'the algorithm_config is {shown(config)}; expected create_algorithm_config("grpo")')


def select_trained(batch: Batch, config: AlgorithmConfig) -> Batch:
    """The batch with a mask of 0 at rollouts that the algorithm's selector does not choose."""
    import torch

    function = config.algorithm.select
    if function is None:
        return batch
    kept = torch.zeros(len(batch.rollouts), device=batch.mask.device)
    for group in _groups(batch):
        chosen = calls.selected(function, group.rewards, group.eligible, lengths=group.lengths)
        kept[group.members] = torch.tensor(chosen, dtype=kept.dtype, device=kept.device)
    return batch._replace(mask=batch.mask * kept[batch.rollout_index])


def compute_targets(batch: Batch, config: AlgorithmConfig) -> Tensor | PPOAdvantages | Pairs:
    """What the algorithm's loss compares: pairs, or advantages [N], or those of the whole batch. Needs no logprobs."""
    algorithm = config.algorithm
    if algorithm.pairs is not None:
        return compute_dapo_pairs(batch, pair_selector=algorithm.pairs)
    if is_batch_advantage(algorithm.advantage):
        return _whole_batch(batch, config)
    return compute_grpo_advantages(batch, advantage_fn=algorithm.advantage)


def loss_sum(
    batch: Batch, config: AlgorithmConfig, targets: PPOAdvantages | Tensor | Sequence[Any]
) -> tuple[Tensor, float]:
    """The weighted sum of the losses, with gradient, and its denominator. Both can be added up over parts of a batch
    that have whole groups.
    """
    import torch

    if batch.logprobs is None:
        raise TrainingError("the batch has no logprobs of the policy; make it with create_batch(model, rollouts)")
    available: dict[str, Any] = {}
    if config.algorithm.pairs is not None:
        batch, available["advantages"], available["pair_index"] = _paired(batch, targets)
    elif isinstance(targets, PPOAdvantages):
        available |= targets._asdict()
        available["old_values"] = available.pop("values")
    else:
        available["advantages"] = _of_tokens(batch, targets)
    if config.value_fn is not None:
        available["values"] = _values(batch, config.value_fn)
    available |= {"rollout_logprobs": batch.old_logprobs, "step": 0}
    for name in ("logprobs", "old_logprobs", "ref_logprobs", "entropy", "mask", "rollout_index", "group_index"):
        if getattr(batch, name) is not None:
            available[name] = getattr(batch, name)
    available["rewards"] = batch.rewards
    _check_available(config, available)
    pair_index = available.get("pair_index", torch.full_like(batch.rollout_index, -1))
    rows = torch.stack((batch.rollout_index, pair_index))
    numbers, counts = torch.unique_consecutive(rows, dim=1, return_counts=True)
    places = torch.cat((torch.zeros_like(counts[:1]), counts.cumsum(0)[:-1]))
    masks = [each.tolist() for each in torch.split(batch.mask, counts.tolist())]
    groups = batch.group_index[places].tolist()
    given = aggregate(config.algorithm.aggregation, Masks(masks, numbers[0].tolist(), groups, numbers[1].tolist()))
    weights = torch.tensor([weight for row in given.weights for weight in row], device=batch.mask.device)
    found = evaluate_objective(config.algorithm, available, batch.mask, unit=given.unit)
    for label, is_nan in found.nan.items():
        if bool(is_nan):
            raise TrainingError(f"the loss {label} is NaN at a trained id; see its inputs in the batch")
    return (found.values * unit_weights(available | {"weights": weights}, given.unit)).sum(), given.denominator


def _mean_loss(batch: Batch, config: AlgorithmConfig, targets: PPOAdvantages | Tensor | Sequence[Any]) -> Tensor:
    total, denominator = loss_sum(batch, config, targets)
    return total / (denominator or 1.0)


def _whole_batch(batch: Batch, config: AlgorithmConfig) -> PPOAdvantages:
    """The advantages of an estimator that sees the whole batch, such as GAE."""
    import torch

    with torch.no_grad():
        values = torch.zeros_like(batch.mask) if config.value_fn is None else _values(batch, config.value_fn)
    available = {name: getattr(batch, name) for name in ("mask", "rollout_index", "group_index", "rewards")}
    available |= {"values": values, "token_rewards": torch.zeros_like(values), "rollout_logprobs": batch.old_logprobs}
    available["turn_index"] = torch.zeros_like(batch.rollout_index)
    available["turn_rewards"] = [[] if math.isnan(reward) else [reward] for reward in batch.rewards.tolist()]
    advantages, returns = calls.batch_advantages(config.algorithm.advantage, available, len(batch.mask))
    return PPOAdvantages(advantages, torch.zeros_like(values) if returns is None else returns, values)


def _values(batch: Batch, value_fn: Callable[[Batch], Tensor]) -> Tensor:
    import torch

    values: Any = call_given("value_fn(batch)", value_fn, batch)
    if not isinstance(values, torch.Tensor) or values.shape != batch.mask.shape:
        given = f"shape {list(values.shape)}" if isinstance(values, torch.Tensor) else type(values).__name__
        raise calls.wrong_result("value_fn", value_fn, given, f"[{len(batch.mask)}], one value per sampled id")
    return values.float()


def _paired(batch: Batch, pairs: Any) -> tuple[Batch, Tensor, Tensor]:
    """The ids of the pairs' rollouts, +1 or -1 for each [T], and the pair of each [T]. A rollout in two pairs is there
    twice.
    """
    import torch

    found: list[tuple[Tensor, float, int]] = []
    known = set(range(len(batch.rollouts)))
    for number, pair in enumerate(pairs):
        if not isinstance(pair, Sequence) or len(pair) != 2 or len(known.intersection(pair)) != 2:
            expected = f"(chosen, rejected), two different rollouts from 0 to {len(known) - 1}"
            raise TrainingError(f"pair {number} is {shown(pair)}; expected {expected}")
        for rollout, sign in zip(pair, (1.0, -1.0), strict=True):
            found.append(((batch.rollout_index == rollout).nonzero().squeeze(1), sign, number))
    places = torch.cat([place for place, _, _ in found]) if found else torch.zeros_like(batch.rollout_index[:0])
    signs = torch.cat([torch.full_like(batch.mask[place], sign) for place, sign, _ in found] or [batch.mask[:0]])
    numbers = torch.cat([torch.full_like(place, number) for place, _, number in found] or [places])
    chosen = ids_at(batch, places)
    return chosen, signs * (chosen.mask > 0), numbers


def _of_tokens(batch: Batch, advantages: Any) -> Tensor:
    """Advantages [N] or [T] as [T]. If N is T, they count as [N]."""
    import torch

    values = torch.as_tensor(advantages, dtype=torch.float32, device=batch.mask.device)
    if values.shape == (len(batch.rollouts),):
        return values[batch.rollout_index]
    if values.shape != batch.mask.shape:
        expected = f"[{len(batch.rollouts)}], one per rollout, or [{len(batch.mask)}], one per sampled id"
        raise TrainingError(f"the advantages have shape {list(values.shape)}; expected {expected}")
    return values


_SOURCES = {
    "ref_logprobs": "make the rollouts with ref_model=create_reference_model(model)",
    "values": "give a value_fn",
    "old_values": "give a value_fn, and the result of compute_ppo_advantages",
    "returns": "give the result of compute_ppo_advantages",
    "entropy": "make the batch with create_batch(model, rollouts)",
}


def _check_available(config: AlgorithmConfig, available: Mapping[str, Any]) -> None:
    for name in sorted(needs(config.algorithm) - set(available)):
        hint = _SOURCES.get(name, f"a loss may name here: {', '.join(sorted(available))}")
        raise TrainingError(f"the algorithm {config.name} needs {name}, which this batch does not have; {hint}")


class _Group(NamedTuple):
    """The rollouts of a group: their numbers, rewards, numbers of sampled ids, and whether they are trained."""

    members: list[int]
    rewards: list[float | None]
    lengths: list[int]
    eligible: list[bool]


def _groups(batch: Batch) -> list[_Group]:
    import torch

    rewards = [None if reward != reward else reward for reward in batch.rewards.tolist()]
    lengths = torch.bincount(batch.rollout_index, minlength=len(batch.rollouts)).tolist()
    live = {int(number) for number in batch.rollout_index[batch.mask > 0].tolist()}
    groups: dict[int, _Group] = {}
    for rollout, number in enumerate(group_numbers(batch.rollouts)):
        group = groups.setdefault(number, _Group([], [], [], []))
        values = (rollout, rewards[rollout], lengths[rollout], rollout in live)
        for column, value in zip(group, values, strict=True):
            column.append(value)  # type: ignore[attr-defined]
    return list(groups.values())
