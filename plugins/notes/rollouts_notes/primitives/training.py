"""Algorithms and training: advantages, pairs and losses of a batch; one step, one iteration, a whole training.

    config = create_algorithm_config("grpo", {"kl_coef": 0.2})
    loss = compute_loss_by_algorithm(batch, config)                       # all of it, or step by step:
    loss = compute_grpo_loss(batch, compute_grpo_advantages(batch), kl_coef=0.2)

    state = TrainingState(model, tokenizer, create_adamw_optimizer(model, lr=3e-4))
    state, stats = training_step(state, rollouts, config)                            # rollouts that you have
    state, stats = training_iteration(state, prompts, gen_config, config, reward)    # samples them first
    state = train(state, prompt_loader, 100, gen_config, config, reward)             # many iterations

Here "dapo" is DPO (Rafailov et al. 2023): pairs of a better and a worse rollout, and `beta`. It is not the DAPO of Yu
et al. 2025, which is GRPO with a higher upper clip: `create_algorithm_config("grpo", {"clip_high": 0.28})`. The flag
`--loss dapo` of a run means that one, and `--loss dpo` means this one. The other algorithms of
`rollouts.training.algorithms.recipes` work too, by their names in lower case.

The numbers are those of the engine, because its functions compute them. A function that you pass receives the inputs
that its parameters name (docs/losses.md, docs/advantages.md): a loss returns one value per sampled id [T], without a
mean. The engine masks, weighs and divides.

A state goes in, and the next state comes out. The model and the optimizer inside are changed in place, because copies
of them would not fit into memory. The rest is new. Everything random depends on seeds and on `state.iteration`, so a
training that continues from a checkpoint gives the numbers that it would have given.

Legend: N rollouts, T sampled ids, G rollouts of one prompt.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rollouts.agent.records import turn_seed
from rollouts.author_code import shown
from rollouts.errors import ConfigError, TrainingError
from rollouts.models.loading import bundled
from rollouts.plugins import find_component, load_component
from rollouts.training.algorithms import algorithm as engine
from rollouts.training.algorithms import calls
from rollouts.training.algorithms.aggregation import Masks, aggregate, aggregation_function
from rollouts.training.algorithms.kl import rk3_loss
from rollouts.training.algorithms.objective import evaluate_objective
from rollouts.training.algorithms.recipes import DPO, GRPO, built_in
from rollouts.types import Task
from rollouts_notes.primitives.generation import Prompt, call_given, load_model, load_tokenizer
from rollouts_notes.primitives.rollouts import (
    KLFn,
    UpdateFn,
    create_batch,
    create_batch_rollouts,
    create_reference_model,
    group_numbers,
    ids_at,
    to_device,
    update_reference_model,
)
from rollouts_notes.primitives.types import Batch, GenerationConfig, Rollout, TrainingState, TrainingStats
from rollouts_notes.primitives.utilities import RewardFns, create_prompt_loader, reward_of

if TYPE_CHECKING:
    from torch import Tensor

    from rollouts_notes.pytorch_factory import TorchObjects

PromptLoader = Callable[[int], Sequence[Prompt]]
OptimizerStepFn = Callable[[Any, Any], "Mapping[str, float] | None"]
GRAD_NORM_MAX = 1.0
_CHECKPOINTS = "checkpoints"
Pairs = list[tuple[int, int]]
ValueFn = Callable[[Batch], "Tensor"]
Function = Callable[..., Any]
_KINDS = {"advantage": "advantages", "pairs": "pairings", "select": "selectors", "aggregation": "aggregations"}


class AlgorithmConfig(NamedTuple):
    """An algorithm with its settings, from `create_algorithm_config`. `value_fn` is the value function of PPO."""

    name: str
    algorithm: engine.Algorithm
    value_fn: ValueFn | None = None


class PPOAdvantages(NamedTuple):
    """The advantages [T] of PPO, the targets `returns` [T] of the value function, and its `values` [T], all without
    gradient.
    """

    advantages: Tensor
    returns: Tensor
    values: Tensor


Targets = PPOAdvantages | Sequence[Any] | Any
"""What a loss compares: pairs, advantages [N] or [T], or PPOAdvantages."""


# --- configurations ---------------------------------------------------------------------------------------------------


def create_algorithm_config(
    name: str | engine.Algorithm,
    settings: Mapping[str, Any] | None = None,
    *,
    advantage_fn: Function | None = None,
    loss_fn: Function | None = None,
    kl_fn: KLFn | None = None,
    pair_selector: Function | None = None,
    value_fn: ValueFn | None = None,
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
    if isinstance(name, engine.Algorithm):
        algorithm, name = name, engine.function_label(name.terms[0].function)
    else:
        algorithm = DPO if name == "dapo" else built_in(name)
    missing = [field for field in ("mix", "shaping", "filters") if getattr(algorithm, field)]
    if missing:
        what = f"the algorithm {name} has {' and '.join(missing)}, which a batch of primitives does not apply"
        raise ConfigError(f"{what}; apply them to your rollouts, and give Algorithm._replace({missing[0]}=...)")
    if settings is not None and not isinstance(settings, Mapping):
        raise ConfigError(f'the settings are {shown(settings)}; expected a dict, such as {{"kl_coef": 0.2}}')
    given = dict(settings or {})
    coefficient = given.pop("kl_coef", 0.0 if algorithm.kl is None else algorithm.kl.coefficient)
    if loss_fn is not None:
        algorithm = algorithm._replace(terms=(engine.Term(loss_fn), *algorithm.terms[1:]))
    algorithm = algorithm._replace(
        advantage=advantage_fn or algorithm.advantage, pairs=pair_selector or algorithm.pairs
    )
    algorithm = _with_settings(algorithm, name, given)
    if not isinstance(coefficient, int | float) or not 0 <= coefficient < math.inf:
        raise ConfigError(f"kl_coef is {shown(coefficient)}; expected a number of 0 or more, such as 0.05")
    kl = engine.KL(rk3_loss if kl_fn is None else _estimator(kl_fn), coefficient) if coefficient else None
    if value_fn is None:  # nothing to fit: PPO without a value function
        algorithm = algorithm._replace(terms=tuple(term for term in algorithm.terms if term.name != "value"))
    return AlgorithmConfig(name, algorithm._replace(kl=kl), value_fn)


def _with_settings(algorithm: engine.Algorithm, label: str, given: Mapping[str, Any]) -> engine.Algorithm:
    """Bind settings to the functions that have them. Raises ConfigError for a setting that none has."""
    of_loss = {setting.name for setting in engine.algorithm_settings(algorithm)}
    known = {"kl_coef", *of_loss}
    bound: dict[str, Any] = {}
    for field, kind in _KINDS.items():
        function = getattr(algorithm, field)
        function = aggregation_function(function) if field == "aggregation" else function
        own = set() if function is None else {each.name for each in engine.signature_of(function, kind).settings}
        known |= own
        if own & set(given):
            bound[field] = engine.bind_own(function, kind, given)
    engine.refuse_unknown(f"the algorithm {label}", given, sorted(known))
    return engine.bind_algorithm(algorithm._replace(**bound), {key: given[key] for key in given if key in of_loss})


def _estimator(kl_fn: KLFn) -> Callable[[Tensor, Tensor], Tensor]:
    def estimator(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        import torch

        values: Any = call_given("kl_fn(logprobs, ref_logprobs)", kl_fn, logprobs, ref_logprobs)
        try:
            return torch.as_tensor(values, device=logprobs.device).expand(logprobs.shape)
        except (TypeError, ValueError, RuntimeError) as error:
            expected = f"one number, or one per sampled id [{len(logprobs)}]"
            raise calls.wrong_result("kl_fn", kl_fn, shown(values), expected) from error

    estimator.__name__ = engine.function_label(kl_fn)
    return estimator


# --- advantages, pairs, losses ----------------------------------------------------------------------------------------


def compute_grpo_advantages(batch: Batch, *, advantage_fn: Function | None = None) -> Tensor:
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
    batch: Batch, advantages: Targets, *, loss_fn: Function | None = None, kl_fn: KLFn | None = None, **settings: float
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


def compute_dapo_pairs(batch: Batch, *, pair_selector: Function | None = None) -> Pairs:
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


def compute_dapo_loss(batch: Batch, pairs: Pairs, *, beta: float = 0.1, loss_fn: Function | None = None) -> Tensor:
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


def compute_ppo_advantages(batch: Batch, *, value_fn: ValueFn | None = None, **settings: Any) -> PPOAdvantages:
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
    advantages: Targets,
    *,
    loss_fn: Function | None = None,
    value_fn: ValueFn | None = None,
    kl_fn: KLFn | None = None,
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
    batch, targets = _prepare_targets(batch, algorithm_config)
    return _mean_loss(batch, algorithm_config, targets)


def _prepare_targets(batch: Batch, config: Any) -> tuple[Batch, Targets]:
    """The batch with a mask of 0 at rollouts that the algorithm's selector does not choose, and what the algorithm's
    loss compares: pairs, or advantages [N], or those of the whole batch. Needs no logprobs. Raises ConfigError for
    anything but an AlgorithmConfig.
    """
    import torch

    _check_config(config)
    algorithm = config.algorithm
    if algorithm.select is not None:
        kept = torch.zeros(len(batch.rollouts), device=batch.mask.device)
        for group in _groups(batch):
            chosen = calls.selected(algorithm.select, group.rewards, group.eligible, lengths=group.lengths)
            kept[group.members] = torch.tensor(chosen, dtype=kept.dtype, device=kept.device)
        batch = batch._replace(mask=batch.mask * kept[batch.rollout_index])
    if algorithm.pairs is not None:
        return batch, compute_dapo_pairs(batch, pair_selector=algorithm.pairs)
    if engine.is_batch_advantage(algorithm.advantage):
        return batch, _whole_batch(batch, config)
    return batch, compute_grpo_advantages(batch, advantage_fn=algorithm.advantage)


def _check_config(config: Any) -> None:
    """Raise ConfigError for anything but an AlgorithmConfig."""
    if not isinstance(config, AlgorithmConfig):
        raise ConfigError(f'the algorithm_config is {shown(config)}; expected create_algorithm_config("grpo")')


def _loss_sum(batch: Batch, config: AlgorithmConfig, targets: Targets) -> tuple[Tensor, float]:
    """The weighted sum of the losses, with gradient, and its denominator. Both can be added up over parts of a batch
    that have whole groups.
    """
    import torch

    from rollouts.training.backends.forward import unit_weights

    if batch.logprobs is None:
        raise TrainingError("the batch has no logprobs of the policy; make it with create_batch(model, rollouts)")
    available: dict[str, Any] = {}
    if config.algorithm.pairs is not None:
        batch, available["advantages"], available["pair_index"] = _paired(batch, targets)
    elif isinstance(targets, PPOAdvantages):
        available = dict(zip(("advantages", "returns", "old_values"), targets, strict=True))
    else:
        available["advantages"] = _of_tokens(batch, targets)
    if config.value_fn is not None:
        available["values"] = _values(batch, config.value_fn)
    fields = {name: value for name, value in batch._asdict().items() if value is not None}
    del fields["rollouts"], fields["tokens"]
    available |= {**fields, "rollout_logprobs": batch.old_logprobs, "step": 0}
    for name in sorted(engine.needs(config.algorithm) - set(available)):
        hint = _SOURCES.get(name, f"a loss may name here: {', '.join(sorted(available))}")
        raise TrainingError(f"the algorithm {config.name} needs {name}, which this batch does not have; {hint}")
    pair_index = available.get("pair_index", torch.full_like(batch.rollout_index, -1))
    rows = torch.stack((batch.rollout_index, batch.group_index, pair_index))
    numbers, counts = torch.unique_consecutive(rows, dim=1, return_counts=True)
    masks = [each.tolist() for each in torch.split(batch.mask, counts.tolist())]
    weighed = aggregate(config.algorithm.aggregation, Masks(masks, *numbers.tolist()))
    available["weights"] = torch.tensor([u for row in weighed.weights for u in row], device=batch.mask.device)
    found = evaluate_objective(config.algorithm, available, batch.mask, unit=weighed.unit)
    for label, is_nan in found.nan.items():
        if bool(is_nan):
            raise TrainingError(f"the loss {label} is NaN at a trained id; see its inputs in the batch")
    return (found.values * unit_weights(available, weighed.unit)).sum(), weighed.denominator


_SOURCES = {
    "ref_logprobs": "make the rollouts with ref_model=create_reference_model(model)",
    "values": "give a value_fn",
    "old_values": "give a value_fn, and the result of compute_ppo_advantages",
    "returns": "give the result of compute_ppo_advantages",
    "entropy": "make the batch with create_batch(model, rollouts)",
}


def _mean_loss(batch: Batch, config: AlgorithmConfig, targets: Targets) -> Tensor:
    total, denominator = _loss_sum(batch, config, targets)
    return total / (denominator or 1.0)


def _whole_batch(batch: Batch, config: AlgorithmConfig) -> PPOAdvantages:
    """The advantages of an estimator that sees the whole batch, such as GAE."""
    import torch

    zeros = torch.zeros_like(batch.mask)
    with torch.no_grad():
        values = zeros if config.value_fn is None else _values(batch, config.value_fn)
    available = {name: getattr(batch, name) for name in ("mask", "rollout_index", "group_index", "rewards")}
    available |= {"values": values, "token_rewards": zeros, "rollout_logprobs": batch.old_logprobs}
    available["turn_index"] = torch.zeros_like(batch.rollout_index)
    available["turn_rewards"] = [[] if math.isnan(reward) else [reward] for reward in batch.rewards.tolist()]
    advantages, returns = calls.batch_advantages(config.algorithm.advantage, available, len(batch.mask))
    return PPOAdvantages(advantages, zeros if returns is None else returns, values)


def _values(batch: Batch, value_fn: ValueFn) -> Tensor:
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

    known = set(range(len(batch.rollouts)))
    places, signs, numbers = [batch.rollout_index[:0]], [batch.mask[:0]], [batch.rollout_index[:0]]
    for number, pair in enumerate(pairs):
        if not isinstance(pair, Sequence) or len(pair) != 2 or len(known.intersection(pair)) != 2:
            expected = f"(chosen, rejected), two different rollouts from 0 to {len(known) - 1}"
            raise TrainingError(f"pair {number} is {shown(pair)}; expected {expected}")
        for rollout, sign in zip(pair, (1.0, -1.0), strict=True):
            places.append((batch.rollout_index == rollout).nonzero().squeeze(1))
            signs.append(torch.full_like(batch.mask[places[-1]], sign))
            numbers.append(torch.full_like(places[-1], number))
    chosen = ids_at(batch, torch.cat(places))
    return chosen, torch.cat(signs) * (chosen.mask > 0), torch.cat(numbers)


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


class _Group(NamedTuple):
    """The rollouts of a group: their numbers, rewards, numbers of sampled ids, and whether they are trained."""

    members: list[int]
    rewards: list[float | None]
    lengths: list[int]
    eligible: list[bool]


def _groups(batch: Batch) -> list[_Group]:
    import torch

    rewards = [None if math.isnan(reward) else reward for reward in batch.rewards.tolist()]
    lengths = torch.bincount(batch.rollout_index, minlength=len(batch.rollouts)).tolist()
    live = set(batch.rollout_index[batch.mask > 0].tolist())
    members: dict[int, list[int]] = {}
    for rollout, number in enumerate(group_numbers(batch.rollouts)):
        members.setdefault(number, []).append(rollout)
    return [
        _Group(some, [rewards[i] for i in some], [lengths[i] for i in some], [i in live for i in some])
        for some in members.values()
    ]


# --- steps ------------------------------------------------------------------------------------------------------------


def training_step(
    state: TrainingState,
    rollouts: Sequence[Rollout],
    algorithm_config: AlgorithmConfig,
    *,
    temperature: float | None = None,
    train_truncated: bool = False,
    tokens_per_microbatch: int = 16384,
    optimizer_step_fn: OptimizerStepFn | None = None,
) -> tuple[TrainingState, TrainingStats]:
    """One optimizer step on these rollouts. Returns the next state, and the numbers of the step.

    The gradient is that of `compute_loss_by_algorithm` over all rollouts, whatever the size of a microbatch. If nothing
    can be trained, the weights do not change, and the metric `optim/skipped` is 1. Raises TrainingError if the loss or
    the gradient is not finite; the weights are then unchanged.

    >>> from rollouts.primitives import create_batch_rollouts
    >>> from rollouts.training import create_adamw_optimizer
    >>> model, tokenizer = load_model("tiny"), load_tokenizer("tiny")
    >>> state = TrainingState(model, tokenizer, create_adamw_optimizer(model, lr=3e-4))
    >>> rollouts = create_batch_rollouts(
    ...     model, tokenizer, ["2 + 3 ="], GenerationConfig(max_tokens=4), samples_per_prompt=2,
    ...     reward_fn=lambda rollout: rollout.generation.logprobs[0],
    ... )
    >>> state, stats = training_step(state, rollouts, create_algorithm_config("grpo"), train_truncated=True)
    >>> state.iteration, stats.grad_norm > 0
    (1, True)

    Args:
        temperature: the sampling temperature; None: that of the rollouts. Raises TrainingError for another one
        train_truncated: also train replies that were cut off at `max_tokens`
        tokens_per_microbatch: how many tokens run at the same time; groups of rollouts stay together
        optimizer_step_fn: `optimizer_step_fn(model, optimizer)` replaces clipping the gradient's norm to 1 and
            `optimizer.step()`; it may return metrics
    """
    import torch

    _check_config(algorithm_config)
    whole = create_batch(None, rollouts, train_truncated=train_truncated)
    whole = to_device(whole, state.model.get_input_embeddings().weight.device)
    whole, targets = _prepare_targets(whole, algorithm_config)
    total = denominator = 0.0
    state.optimizer.zero_grad(set_to_none=True)
    try:
        for numbers in _microbatches(whole, tokens_per_microbatch):
            places = torch.isin(whole.rollout_index, torch.tensor(numbers, device=whole.rollout_index.device))
            scored = create_batch(state.model, [rollouts[number] for number in numbers], temperature=temperature)
            part = ids_at(whole, places)._replace(
                logprobs=scored.logprobs, entropy=scored.entropy, old_logprobs=scored.old_logprobs
            )
            loss, share = _loss_sum(part, algorithm_config, _part_of(targets, places, numbers))
            total, denominator = total + float(loss.detach()), denominator + share
            if share and not loss.requires_grad:
                what = f"the loss of {algorithm_config.name} has no gradient, so nothing can be learned"
                advice = "compute it from `logprobs` or `entropy`, without .detach() and torch.no_grad()"
                raise TrainingError(f"{what}; {advice}, and train a model whose parameters require a gradient")
            if share:
                torch.autograd.backward(loss)
        grad_norm, metrics = _step(state, denominator, optimizer_step_fn)
    finally:
        state.optimizer.zero_grad(set_to_none=True)
    stats = _statistics(state.iteration, rollouts, total / (denominator or 1.0), grad_norm, metrics)
    return state._replace(iteration=state.iteration + 1), stats


def training_iteration(
    state: TrainingState,
    prompts: Sequence[Prompt],
    gen_config: GenerationConfig,
    algorithm_config: AlgorithmConfig,
    reward_fn: RewardFns,
    *,
    samples_per_prompt: int = 8,
    **options: Any,
) -> tuple[TrainingState, TrainingStats]:
    """Sample rollouts of these prompts, reward them, and take one optimizer step. Returns the next state and numbers.

    The samples depend on `gen_config.seed` and `state.iteration`. The KL to `state.ref_model` is measured if there is
    one. Raises like `create_batch_rollouts` and `training_step`.

    >>> from rollouts.training import create_adamw_optimizer
    >>> model = load_model("tiny")
    >>> state = TrainingState(model, load_tokenizer("tiny"), create_adamw_optimizer(model, lr=3e-4))
    >>> state, stats = training_iteration(
    ...     state, [Task("What is 2 + 3?")], GenerationConfig(max_tokens=4), create_algorithm_config("grpo"),
    ...     lambda rollout: len(rollout.generation.tokens), samples_per_prompt=2,
    ... )
    >>> state.iteration, stats.metrics["rollouts/count"], 1 <= stats.mean_reward <= 4
    (1, 2.0, True)

    Args:
        options: `train_truncated`, `tokens_per_microbatch` and `optimizer_step_fn` of `training_step`; and other
            arguments of `create_batch_rollouts`, such as `tools`, `tool_executor`, `stop_condition` and `generator`
    """
    names = ("train_truncated", "tokens_per_microbatch", "optimizer_step_fn")
    of_step = {name: options.pop(name) for name in names if name in options}
    sampled = gen_config._replace(seed=turn_seed(gen_config.seed, state.iteration, 0, 0, 0))
    options |= {"samples_per_prompt": samples_per_prompt, "ref_model": state.ref_model, "reward_fn": reward_fn}
    rollouts = create_batch_rollouts(state.model, state.tokenizer, prompts, sampled, **options)
    return training_step(state, rollouts, algorithm_config, **of_step)


def train(
    initial_state: TrainingState,
    prompt_loader: PromptLoader | Sequence[Prompt],
    num_iterations: int,
    gen_config: GenerationConfig,
    algorithm_config: AlgorithmConfig | Callable[[int], AlgorithmConfig],
    reward_fn: RewardFns,
    ref_model_update_fn: UpdateFn | None = None,
    checkpoint_fn: Callable[[TrainingState], Any] | None = None,
    eval_fn: Callable[[TrainingState], float | Mapping[str, float]] | None = None,
    logger: Callable[[TrainingStats], Any] | None = None,
    **options: Any,
) -> TrainingState:
    """Train until `num_iterations` iterations are done. Returns the last state.

    A state from a checkpoint continues where it was. Each iteration trains, updates the reference, evaluates, logs and
    writes a checkpoint, in this order. Raises ConfigError for arguments that cannot be used, and what the functions
    raise.

    >>> from rollouts.training import create_adamw_optimizer
    >>> model = load_model("tiny")
    >>> state = train(
    ...     TrainingState(model, load_tokenizer("tiny"), create_adamw_optimizer(model, lr=3e-4)),
    ...     [Task("What is 2 + 3?")], 2, GenerationConfig(max_tokens=4),
    ...     lambda iteration: create_algorithm_config("grpo" if iteration == 0 else "rloo"),
    ...     lambda rollout: len(rollout.generation.tokens), samples_per_prompt=2,
    ... )
    >>> state.iteration
    2

    Args:
        prompt_loader: `prompt_loader(iteration)` returns the prompts of an iteration (`create_prompt_loader`); a list
            is used in each iteration
        algorithm_config: an algorithm, or a function from the iteration to an algorithm
        ref_model_update_fn: `update(ref_model, model)` returns the reference after each iteration
        checkpoint_fn: `checkpoint_fn(state)`, such as `save_checkpoint`, every `checkpoint_every` iterations and at
            the end
        eval_fn: `eval_fn(state)` returns a number, logged as `eval/score`, or a dict of numbers; every `eval_every`
            iterations and at the end
        logger: `logger(stats)` after each iteration, such as `log_to_console`
        options: `checkpoint_every` (10) and `eval_every` (10); and other arguments of `training_iteration`, such as
            `samples_per_prompt`, `optimizer_step_fn` and `tools`
    """
    every = {"checkpoint_every": options.pop("checkpoint_every", 10), "eval_every": options.pop("eval_every", 10)}
    for name, value in {"num_iterations": num_iterations, **every}.items():
        least = int(name in every)
        if not isinstance(value, int) or value < least:
            raise ConfigError(f"{name} is {shown(value)}; expected a whole number of {least} or more")
    state = initial_state
    for iteration in range(state.iteration, num_iterations):
        config = _of_iteration("algorithm_config(iteration)", algorithm_config, iteration)
        _check_config(config)
        if "ref_logprobs" in engine.needs(config.algorithm) and state.ref_model is None:
            what = f"the algorithm {config.name} compares with a reference in iteration {iteration}, and there is none"
            raise ConfigError(f"{what}; give TrainingState(..., ref_model=create_reference_model(model))")
        prompts = _of_iteration("prompt_loader(iteration)", prompt_loader, iteration)
        state, stats = training_iteration(state, prompts, gen_config, config, reward_fn, **options)
        done, is_last = iteration + 1, iteration + 1 == num_iterations
        if ref_model_update_fn is not None and state.ref_model is not None:
            reference = update_reference_model(
                state.ref_model, state.model, update_fn=ref_model_update_fn, iteration=done
            )
            state = state._replace(ref_model=reference)
        if eval_fn is not None and (done % every["eval_every"] == 0 or is_last):
            stats = stats._replace(metrics={**stats.metrics, **_evaluated(eval_fn, state)})
        if logger is not None:
            call_given("logger(stats)", logger, stats)
        if checkpoint_fn is not None and (done % every["checkpoint_every"] == 0 or is_last):
            call_given("checkpoint_fn(state)", checkpoint_fn, state)
    return state


def quick_start_training(
    model_name: str,
    prompts: Sequence[Prompt],
    reward_fn: RewardFns,
    num_iterations: int = 100,
    *,
    algorithm: str = "grpo",
    settings: Mapping[str, Any] | None = None,
    lr: float | None = None,
    prompts_per_iteration: int = 8,
    gen_config: GenerationConfig | None = None,
    logger: Callable[[TrainingStats], Any] | None = None,
    **train_options: Any,
) -> TrainingState:
    """Load a model, and train it on these prompts with usual settings. Returns the last state.

    A text is a message of the user, if the tokenizer has a chat template. Replies have at most 256 ids. Prints a line
    for each iteration. Raises ConfigError, ModelError, and what the reward function raises.

    >>> state = quick_start_training(
    ...     "tiny", ["What is 2 + 3?"], lambda rollout: "5" in rollout.generation.text, num_iterations=1,
    ...     gen_config=GenerationConfig(max_tokens=4), samples_per_prompt=2, logger=lambda stats: None,
    ... )
    >>> state.iteration
    1

    Args:
        algorithm: `create_algorithm_config(algorithm, settings)`; "dapo" is DPO on pairs
        lr: None: the learning rate of `rollouts run` for this model
        prompts_per_iteration: the prompts of an iteration, each with `samples_per_prompt` (8) rollouts
        logger: `logger(stats)`; None: `log_to_console`
        train_options: other arguments of `train`, such as `samples_per_prompt`, `tools` and `checkpoint_fn`
    """
    from rollouts.runs.plan import LR_RL
    from rollouts_notes.pytorch_factory import create_adamw_optimizer

    config = create_algorithm_config(algorithm, settings)
    if isinstance(prompts, str) or not prompts:
        raise ConfigError(f"prompts is {shown(prompts)}; expected a list of prompts")
    model, tokenizer, known = load_model(model_name), load_tokenizer(model_name), bundled(model_name)
    if lr is None:
        lr = LR_RL if known is None else known.lr
    if getattr(tokenizer, "chat_template", None):
        prompts = [Task(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    reference = create_reference_model(model) if "ref_logprobs" in engine.needs(config.algorithm) else None
    state = TrainingState(model, tokenizer, create_adamw_optimizer(model, lr), reference)
    loader = create_prompt_loader(prompts, min(prompts_per_iteration, len(prompts)))
    train_options |= {"logger": logger or log_to_console}
    return train(state, loader, num_iterations, gen_config or GenerationConfig(), config, reward_fn, **train_options)


def _of_iteration(form: str, given: Any, iteration: int) -> Any:
    """What a function of the iteration returns; anything else is the same in each iteration."""
    return call_given(form, given, iteration) if callable(given) else given


def _evaluated(eval_fn: Callable[[TrainingState], Any], state: TrainingState) -> dict[str, float]:
    found = call_given("eval_fn(state)", eval_fn, state)
    scores = found if isinstance(found, Mapping) else {"score": found}
    try:
        return {f"eval/{name}": float(value) for name, value in scores.items()}
    except (TypeError, ValueError) as error:
        raise ConfigError(f"eval_fn returned {shown(found)}; expected a number, or a dict of numbers") from error


def _microbatches(batch: Batch, tokens_max: int) -> Iterator[list[int]]:
    """The numbers of rollouts that run at the same time: groups with at most `tokens_max` tokens, or one group."""
    filled: list[int] = []
    tokens = 0
    for members, *_ in _groups(batch):
        lasts = [batch.rollouts[number].all_turns[-1] for number in members]
        cost = sum(len(last.prompt_tokens) + len(last.tokens) for last in lasts)
        if filled and tokens + cost > tokens_max:
            yield sorted(filled)
            filled, tokens = [], 0
        filled += members
        tokens += cost
    yield sorted(filled)


def _part_of(targets: Any, places: Any, numbers: Sequence[int]) -> Any:
    """The targets of a part of the batch."""
    if isinstance(targets, PPOAdvantages):
        return PPOAdvantages(*(each[places] for each in targets))
    return [pair for pair in targets if pair[0] in numbers] if isinstance(targets, list) else targets


def _step(
    state: TrainingState, denominator: float, optimizer_step_fn: OptimizerStepFn | None
) -> tuple[float, dict[str, float]]:
    """Divide the gradient, and step. Returns its norm before clipping, and metrics."""
    import torch

    parameters = [parameter for group in state.optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients or not denominator:
        return 0.0, {"optim/skipped": 1.0}
    torch._foreach_div_(gradients, denominator)
    norm = float(torch.nn.utils.get_total_norm(gradients))
    if not math.isfinite(norm):
        raise TrainingError(f"the gradient's norm is {norm}; the weights are unchanged. Try a smaller learning rate")
    metrics = {"optim/skipped": 0.0, "optim/lr": float(state.optimizer.param_groups[0]["lr"])}
    if optimizer_step_fn is None:
        torch._foreach_mul_(gradients, min(1.0, GRAD_NORM_MAX / (norm + 1e-6)))
        state.optimizer.step()
        return norm, metrics
    form = "optimizer_step_fn(model, optimizer)"
    reported: Any = call_given(form, optimizer_step_fn, state.model, state.optimizer)
    if reported is not None and not isinstance(reported, Mapping):
        raise ConfigError(f"the optimizer_step_fn returned {shown(reported)}; expected a dict of metrics, or None")
    return norm, metrics | dict(reported or {})


def _statistics(
    iteration: int, rollouts: Sequence[Rollout], loss: float, grad_norm: float, metrics: dict[str, float]
) -> TrainingStats:
    rewards = [reward for rollout in rollouts if (reward := reward_of(rollout)) is not None]
    divergences = [rollout.kl_divergence for rollout in rollouts if rollout.kl_divergence is not None]
    sampled = [sum(len(turn.tokens) for turn in rollout.all_turns) for rollout in rollouts]
    mean_reward, kl = (statistics.fmean(values) if values else math.nan for values in (rewards, divergences))
    of_rollouts = {
        "rollouts/count": float(len(rollouts)),
        "rollouts/tokens": statistics.fmean(sampled),
        "rollouts/truncated": statistics.fmean(rollout.is_cut_off for rollout in rollouts),
        "rollouts/tool_calls": statistics.fmean(len(rollout.tool_calls) for rollout in rollouts),
        "rollouts/reward_std": statistics.pstdev(rewards) if rewards else math.nan,
    }
    return TrainingStats(iteration, loss, mean_reward, kl, grad_norm, of_rollouts | metrics)


# --- logs -------------------------------------------------------------------------------------------------------------


def log_to_console(stats: TrainingStats) -> None:
    """Print the numbers of an iteration in one line, and say so if nothing was trained.

    >>> log_to_console(TrainingStats(3, loss=0.0125, mean_reward=0.5, grad_norm=1.25, metrics={"eval/score": 0.75}))
    iteration 3  reward 0.500  loss +0.0125  grad_norm 1.25  eval/score 0.750
    """
    words = [f"iteration {stats.iteration}", f"reward {stats.mean_reward:.3f}", f"loss {stats.loss:+.4f}"]
    words += [] if math.isnan(stats.kl) else [f"kl {stats.kl:.4f}"]
    words += [] if math.isnan(stats.grad_norm) else [f"grad_norm {stats.grad_norm:.2f}"]
    words += [f"{name} {value:.3f}" for name, value in stats.metrics.items() if name.startswith("eval/")]
    if stats.metrics.get("optim/skipped"):
        cut_off = stats.metrics.get("rollouts/truncated", 0.0)
        words.append(f"nothing was trained: {cut_off:.0%} of the replies were cut off (max_tokens, train_truncated)")
    print("  ".join(words))


def log_to_wandb(
    stats: TrainingStats, *, folder: str | Path | None = None, project: str = "", run_name: str = ""
) -> None:
    """Log the numbers of an iteration to Weights & Biases, with the package rollouts-wandb.

    All calls of a process with the same arguments go to one W&B run; bind arguments with `functools.partial`. Raises
    UserError without the package, with the line to install it, and if W&B cannot start a run.

    >>> logger = functools.partial(log_to_wandb, project="mine")  # for train(..., logger=logger)

    Args:
        folder: where W&B writes its files, and the id with which a later process continues the run; None: a new one
        project: None: WANDB_PROJECT, else rollouts
        run_name: None: WANDB_NAME, else the name of the folder
    """
    values = {name: getattr(stats, name) for name in ("loss", "mean_reward", "kl", "grad_norm")}
    own = {f"train/{name}": value for name, value in values.items() if not math.isnan(value)}
    _wandb(None if folder is None else str(folder), project, run_name).log(own | dict(stats.metrics), stats.iteration)


@functools.lru_cache(maxsize=8)
def _wandb(folder: str | None, project: str, run_name: str) -> Any:
    """The logger of a W&B run."""
    where = Path("wandb") / time.strftime("primitives-%Y%m%d-%H%M%S") if folder is None else Path(folder)
    create = load_component(find_component("loggers", "wandb"))
    where.mkdir(parents=True, exist_ok=True)
    return create(where, {}, 0, project=project, run_name=run_name)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def save_checkpoint(state: TrainingState, folder: str | Path = _CHECKPOINTS) -> Path:
    """Write `folder`/step_000010 (the number of finished iterations), complete or not at all. Returns its path.

    The folder has the weights and the tokenizer in the format of transformers, so you can load it as a model. It also
    has the optimizer with its parameters outside of the model (a value function), the reference, and the number of
    iterations. Raises CheckpointError.

    >>> import tempfile, torch
    >>> module = torch.nn.Linear(1, 1)  # in place of a language model
    >>> state = TrainingState(module, None, torch.optim.SGD(module.parameters(), lr=0.1), iteration=10)
    >>> save_checkpoint(state, tempfile.mkdtemp()).name
    'step_000010'
    """
    path = Path(folder) / f"step_{state.iteration:06d}"
    _objects(state).save(path, state.iteration, {"iteration": state.iteration})
    return path


def load_checkpoint(state: TrainingState, path: str | Path = _CHECKPOINTS) -> TrainingState:
    """Read a checkpoint of `save_checkpoint` into the model, the optimizer and the reference of `state`.

    `path` is one checkpoint, or a folder of them, of which the last one is read. Give a state with the same model and a
    new optimizer; with a reference if the training had one. The next iteration gives the same numbers as without the
    break. Raises ConfigError if there is no such checkpoint, and ModelError or TrainingError for another model.

    >>> import tempfile, torch
    >>> module, folder = torch.nn.Linear(1, 1), tempfile.mkdtemp()
    >>> state = TrainingState(module, None, torch.optim.SGD(module.parameters(), lr=0.1))
    >>> path = save_checkpoint(state._replace(iteration=10), folder)
    >>> load_checkpoint(state, folder).iteration
    10
    """
    from rollouts.training.weights.store import newest_checkpoint

    found = newest_checkpoint(Path(path)) or Path(path)
    return state._replace(iteration=int(_objects(state).load(found, "iteration")["iteration"]))


def _objects(state: TrainingState) -> TorchObjects:
    from rollouts_notes.pytorch_factory import TorchObjects

    modules = {} if state.ref_model is None else {"reference": state.ref_model}
    return TorchObjects(state.model, state.optimizer, tokenizer=state.tokenizer, modules=modules)
