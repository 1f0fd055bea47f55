"""Turn finished groups of rollouts into a batch for training. Functions in the order in which the loop calls them.

    prepare_rl_batch     mask stale tokens, mix and shape rewards, select rollouts or pairs, compute advantages
    complete_batch       compute what the loss needs (logprobs of reference and teacher, values), store it in rows
    estimate_advantages  rewards per token, and advantages of the whole batch

The lag of a token is the age of the weights that sampled it, in steps. Lag 0: the weights at the beginning of this
step. Lag 2: the weights of two steps before (`lag_of`). Not here: the loop (rl), the mathematics (algorithms).
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from rollouts.training.algorithms import calls
from rollouts.training.algorithms.algorithm import (
    KL,
    Algorithm,
    forward_needs,
    function_label,
    is_batch_advantage,
    is_reward_placed,
    requests,
)
from rollouts.training.algorithms.corrections import anchor_of, needs_policy_pass, stored_anchors
from rollouts.training.algorithms.token_advantages import rewards_to_go
from rollouts.training.batches import ForwardOutput, TrainBatch, TrainingBackend
from rollouts.training.batching import make_batch, turn_of_tokens
from rollouts.training.rollout_gen.groups import Group, group_samples
from rollouts.types import Sample, Status

if TYPE_CHECKING:
    from torch import Tensor

_STAMPS = {"ref_logprobs": "ref_logprobs", "teacher_logprobs": "teacher_logprobs", "values": "old_values"}
"""The results of a forward pass: their names in ForwardOutput and in an author's function -> the field of Row."""


@dataclass(frozen=True)
class RLSettings:
    """Settings of the loop.

    Args:
        num_steps: steps of the whole run
        sync_every: engines with a copy of the weights get new ones after this many steps
        temperature: the sampling temperature
        response_tokens_max: L_max of the aggregation dr_grpo and of overlong shaping
        minibatches: optimizer steps for each batch
        staleness: how many steps sampling may be ahead of training. Tokens from older weights are not trained
        record: keep the values of each trained token in `StepReport.batches`
        samples: False if the groups were saved before: the age of their tokens and the speed of sampling are unknown
    """

    num_steps: int
    sync_every: int = 1
    temperature: float = 1.0
    response_tokens_max: int | None = None
    minibatches: int = 1
    staleness: int = 0
    record: bool = False
    samples: bool = True

    def __post_init__(self) -> None:
        for name in ("sync_every", "temperature", "minibatches"):
            assert getattr(self, name) > 0, f"{name} must be > 0, got {getattr(self, name)}"
        for name in ("num_steps", "staleness"):
            assert getattr(self, name) >= 0, f"{name} must be >= 0, got {getattr(self, name)}"

    @property
    def lag_max(self) -> int | None:
        """The largest lag of a token that is trained. None (`staleness` 0): no limit, because nothing is prefetched and
        carried-over rollouts are always trained.
        """
        return self.staleness + self.sync_every - 1 if self.staleness else None


class PreparedBatch(NamedTuple):
    """The input of one training step: the samples of the kept groups, and the batch.

    `advantages` [N] are indexed by `rollout_index`: a number, or one for each turn; 0 if they are estimated over the
    whole batch later. `metrics` describe the age of the tokens.
    """

    samples: list[Sample]
    advantages: list[float | list[float]]
    batch: TrainBatch
    metrics: dict[str, float]


def prepare_rl_batch(
    groups: Sequence[Group],
    algorithm: Algorithm,
    config: RLSettings,
    step: int,
    *,
    name: str = "main",
    start_versions: Sequence[int] = (),
) -> PreparedBatch:
    """Make samples, advantages and the batch of these groups.

    Raises TrainingError if a function of the algorithm fails; the message names the function.

    Args:
        name: the algorithm's name in the backend
        start_versions: the policy's versions at the beginning of recent steps, the current step last
    """
    fresh = drop_stale(group_samples(groups), start_versions, config.lag_max)
    rewards: list[float | None] = []
    advantages: list[float | list[float]] = []
    trained: list[bool] = []
    pairs: list[tuple[int, int]] = []
    by_turn: list[list[float]] = []
    of_groups = algorithm.pairs is None and not is_batch_advantage(algorithm.advantage)
    for group in groups:
        first = len(rewards)
        lengths = group.lengths
        own = advantage_rewards(group, algorithm, step, max_tokens=config.response_tokens_max)
        eligible = [fit and index not in fresh.emptied for index, fit in enumerate(_selectable(group, own), first)]
        turns = group.turn_rewards(own)
        by_turn += turns
        if of_groups:
            advantages += calls.group_advantages(algorithm.advantage, own, lengths=lengths, turn_rewards=turns)
        if algorithm.select is not None:
            trained += calls.selected(algorithm.select, own, eligible, lengths=lengths, step=step)
        if algorithm.pairs is not None:
            # A pair compares whole replies, so a reply with masked stale tokens belongs to no pair.
            whole = [fit and index not in fresh.cut for index, fit in enumerate(eligible, first)]
            found = calls.paired(algorithm.pairs, own, whole, lengths=lengths, step=step)
            pairs += [(first + chosen, first + rejected) for chosen, rejected in found]
        rewards += own
    advantages = advantages or [0.0] * len(rewards)
    batch = make_batch(
        fresh.samples,
        advantages,
        aggregation=algorithm.aggregation,
        step=step,
        temperature=config.temperature,
        max_tokens=config.response_tokens_max,
        algorithm=name,
        rewards=rewards,
        trained=trained if algorithm.select is not None else None,
        pairs=pairs if algorithm.pairs is not None else None,
    )
    if is_batch_advantage(algorithm.advantage):
        batch.turn_rewards = by_turn
    batch.anchor = anchor_of(algorithm, batch.unit)
    return PreparedBatch(fresh.samples, advantages, batch, fresh.metrics if config.samples else {})


def _selectable(group: Group, rewards: Sequence[float | None]) -> list[bool]:
    """Which rollouts [G] a selector may take: those that were judged, not truncated and not empty. Their masks are from
    `samples`.
    """
    return [
        reward is not None and episode.status is Status.COMPLETED and length > 0
        for reward, episode, length in zip(rewards, group.episodes, group.lengths, strict=True)
    ]


def why_untrained(group: Group, algorithm: Algorithm, step: int, *, max_tokens: int | None = None) -> str | None:
    """Why no rollout of the group is trained on in this step: the name of the selector or pair selector that leaves
    nothing, or that no rollout is complete. None: at least one rollout is.
    """
    rewards, lengths = advantage_rewards(group, algorithm, step, max_tokens=max_tokens), group.lengths
    fit = _selectable(group, rewards)
    if not any(fit):
        return "no_complete_rollout"
    select, pairs = algorithm.select, algorithm.pairs
    if select is not None and not any(calls.selected(select, rewards, fit, lengths=lengths, step=step)):
        return f"select_{function_label(select)}"
    if pairs is not None and not calls.paired(pairs, rewards, fit, lengths=lengths, step=step):
        return f"pairs_{function_label(pairs)}"
    return None


class Fresh(NamedTuple):
    """Samples without stale tokens.

    `metrics` (`staleness/...`) are the mean and the largest lag of the remaining live tokens, and the number of masked
    ones. `cut` are the rollouts (`rollout_index`) with masked tokens; `emptied` are those without any live token left.
    """

    samples: list[Sample]
    metrics: dict[str, float]
    cut: frozenset[int | None] = frozenset()
    emptied: frozenset[int | None] = frozenset()


def lag_of(version: int, start_versions: Sequence[int]) -> int:
    """The lag of a version: how many steps ago it was last the newest one.

    `start_versions` are the policy's versions at the beginning of recent steps, the current step last. An older version
    counts as one step older than the first of them.

    >>> [lag_of(version, [3, 4, 6]) for version in (6, 5, 4, 3, 2)]
    [0, 1, 1, 2, 3]
    """
    return max(0, len(start_versions) - bisect_right(start_versions, version))


def drop_stale(samples: Sequence[Sample], start_versions: Sequence[int], lag_max: int | None) -> Fresh:
    """Mask live tokens with a lag above `lag_max` (None: no limit), in copies of the samples.

    Rewards stay in the baseline of their group. Tokens of an unknown version (-1) have no lag.
    """
    fresh, lags, dropped, cut = [], list[int](), 0, set[int | None]()
    for sample in samples:
        versions = sample.policy_versions or [-1] * len(sample.tokens)
        known = {version: lag_of(version, start_versions) for version in set(versions) if version >= 0}
        live = [
            known.get(version) if mask > 0 else None for version, mask in zip(versions, sample.loss_mask, strict=True)
        ]
        stale = [at for at, lag in enumerate(live) if lag_max is not None and lag is not None and lag > lag_max]
        if stale:
            mask = list(sample.loss_mask)
            for at in stale:
                mask[at], live[at] = 0.0, None
            sample, dropped = replace(sample, loss_mask=mask), dropped + len(stale)
            cut.add(sample.rollout_index)
        lags += [lag for lag in live if lag is not None]
        fresh.append(sample)
    metrics = {
        "staleness/mean": sum(lags) / len(lags) if lags else 0.0,
        "staleness/max": float(max(lags, default=0)),
        "staleness/dropped": float(dropped),
    }
    live_ones = {sample.rollout_index for sample in fresh if any(sample.loss_mask)}
    return Fresh(fresh, metrics, frozenset(cut), frozenset(cut - live_ones))


def advantage_rewards(
    group: Group, algorithm: Algorithm, step: int, *, max_tokens: int | None = None
) -> list[float | None]:
    """The group's rewards [G], mixed and then shaped: the input of filters, selectors and the advantage.

    Raises TrainingError if a function fails; the message names it.
    """
    rewards = group.rewards
    if algorithm.mix is not None:
        scores = [episode.score for episode in group.episodes]
        weights = next((score.weights for score in scores if score.value is not None), {})
        parts = [score.parts if score.value is not None else None for score in scores]
        rewards = calls.mixed_rewards(algorithm.mix, parts, weights, step=step)
    truncated = [episode.status is Status.TRUNCATED for episode in group.episodes]
    for shape in algorithm.shaping:
        rewards = calls.shaped_rewards(
            shape, rewards, lengths=group.lengths, truncated=truncated, max_tokens=max_tokens, step=step
        )
    return rewards


async def complete_batch(
    backend: TrainingBackend, batch: TrainBatch, algorithm: Algorithm, *, minibatches: int = 1
) -> None:
    """Compute what the loss needs, store it in the rows, then estimate the advantages of the whole batch.

    Runs one forward pass over live tokens for each model that is needed.
    """
    names = forward_needs(algorithm)
    if needs_policy_pass(batch, minibatches=minibatches, by_token=any(_by_token(algorithm))):
        names = (*names, "logprobs")
    if names and any(any(row.loss_mask) for row in batch.rows):
        _stamp(batch, await backend.forward(batch, names, only_live=True))
    estimate_advantages(batch, algorithm)


def _by_token(algorithm: Algorithm) -> tuple[KL | None, bool]:
    """The two parts that make advantages differ between tokens of one rollout: a KL in the reward (or None), and
    whether the advantage is computed for the whole batch.
    """
    kl = algorithm.kl
    penalty = kl if kl is not None and is_reward_placed(kl.function) else None
    return penalty, algorithm.pairs is None and is_batch_advantage(algorithm.advantage)


def _stamp(batch: TrainBatch, output: ForwardOutput) -> None:
    """Store a forward pass in the rows."""
    found = {field: getattr(output, name) for name, field in _STAMPS.items()}
    if output.logprobs is not None:
        found["old_logprobs"] = stored_anchors(batch, output.logprobs)
    for field, streams in found.items():
        if streams is not None:
            for row, stream in zip(batch.rows, streams, strict=True):
                setattr(row, field, stream)


def estimate_advantages(batch: TrainBatch, algorithm: Algorithm) -> None:
    """Set advantages per token, from the estimator of the whole batch and from a KL in the reward."""
    penalty, is_whole = _by_token(algorithm)
    if not (penalty or is_whole) or not any(any(row.loss_mask) for row in batch.rows):
        return
    available = _tensors(batch)
    if penalty is not None:
        available["token_rewards"] = _penalties(penalty, available, batch.kl_coefficient)
    advantages, returns = available["advantages"], None
    if is_whole:
        advantages, returns = calls.batch_advantages(algorithm.advantage, available, len(available["mask"]))
    if penalty is not None and not (is_whole and "token_rewards" in requests(algorithm.advantage, "advantages")):
        names = ("token_rewards", "mask", "rollout_index", "turn_index")
        to_go = rewards_to_go(*(available[name] for name in names))
        advantages = advantages + to_go
    start = 0
    for row in batch.rows:
        end = start + len(row.tokens)
        row.advantages = advantages[start:end].tolist()
        row.returns = None if returns is None else returns[start:end].tolist()
        start = end


def _tensors(batch: TrainBatch) -> dict[str, Any]:
    """The inputs of an advantage of the whole batch: all positions of all rows, concatenated [T]."""
    import torch

    rows = batch.rows

    def joined(name: str, fallback: str = "") -> Tensor:
        values: list[float] = []
        for row in rows:
            stream = getattr(row, name)
            if stream is None and fallback:
                stream = getattr(row, fallback)
            assert stream is not None or not any(row.loss_mask), f"a live row has no {name}; complete_batch sets it"
            values += [0.0] * len(row.tokens) if stream is None else stream
        return torch.tensor(values, dtype=torch.float64)

    available: dict[str, Any] = {
        "batch": None,
        "rewards": torch.tensor(batch.rewards, dtype=torch.float64),
        "turn_rewards": batch.turn_rewards or [[] if math.isnan(reward) else [reward] for reward in batch.rewards],
        "mask": joined("loss_mask"),
        "advantages": joined("advantages"),
        "rollout_logprobs": joined("rollout_logprobs", "old_logprobs"),
        "old_logprobs": joined("old_logprobs", "rollout_logprobs"),
        "rollout_index": torch.tensor([row.rollout_index for row in rows for _ in row.tokens]),
        "group_index": torch.tensor([row.group_index for row in rows for _ in row.tokens]),
        "turn_index": torch.tensor([turn for row in rows for turn in turn_of_tokens(row.turns, len(row.tokens))]),
        "step": batch.step,
    }
    available["token_rewards"] = torch.zeros_like(available["mask"])
    return available | {name: joined(field) for name, field in _STAMPS.items() if getattr(rows[0], field) is not None}


def _penalties(kl: KL, available: dict[str, Any], coefficient: float | None) -> Tensor:
    """-coefficient * KL [T] at live tokens, 0 elsewhere."""
    import torch

    values = calls.call_author("KL estimator", kl.function, available)
    if kl.threshold is not None:
        values = values.clamp(max=kl.threshold)
    penalty = -(kl.coefficient if coefficient is None else coefficient) * values
    return torch.where(available["mask"] > 0, penalty, torch.zeros_like(penalty))


def rollout_advantages(batch: TrainBatch, count: int) -> list[float]:
    """The mean advantage of the trained tokens of each rollout [N]; 0.0 for a rollout without any."""
    values: list[list[float]] = [[] for _ in range(count)]
    for row in batch.rows:
        values[row.rollout_index] += [a for a, live in zip(row.advantages, row.loss_mask, strict=True) if live > 0]
    return [statistics.fmean(each) if each else 0.0 for each in values]
