"""From played groups to a batch that can be trained on: pure functions, in the order in which the loop calls them.

    prepare_rl_batch     mix and shape rewards, choose rollouts or pairs, advantages of groups, rows
    complete_batch       asks the backend for what the loss needs (reference, teacher, values) and stamps it
    estimate_advantages  token rewards, and advantages of the whole batch

Left out: when this happens (rl_loop), and the mathematics (algorithms).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rollouts.training.algorithms.advantages import group_advantages
from rollouts.training.algorithms.algorithm import KL, Algorithm
from rollouts.training.algorithms.group_calls import (
    batch_advantages,
    call_author,
    mixed_rewards,
    paired,
    selected,
    shaped_rewards,
)
from rollouts.training.algorithms.needs import forward_needs, is_batch_advantage, is_reward_placed, requests
from rollouts.training.algorithms.token_advantages import rewards_to_go
from rollouts.training.batching import make_batch
from rollouts.training.loops.staleness import drop_stale
from rollouts.training.rollout_gen.groups import Group, group_samples
from rollouts.training.types import ForwardOutput, TrainBatch, TrainingBackend
from rollouts.types import Sample, Status

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "PreparedBatch",
    "RLTrainingConfig",
    "advantage_rewards",
    "complete_batch",
    "estimate_advantages",
    "prepare_rl_batch",
    "rollout_advantages",
]


@dataclass(frozen=True)
class RLTrainingConfig:
    """How many steps, how often the engines get the weights, and the temperature that the rollouts were sampled at.

    `minibatches` optimizer steps are made of each batch. `response_tokens_max` is L_max of the aggregation dr_grpo
    and of overlong shaping. With a `staleness` above 0 that many steps are sampled ahead of the one that is trained on,
    and tokens that are older still are not trained on.
    """

    num_steps: int
    sync_every: int = 1
    temperature: float = 1.0
    response_tokens_max: int | None = None
    minibatches: int = 1
    staleness: int = 0

    def __post_init__(self) -> None:
        assert self.num_steps >= 0, f"num_steps must be >= 0, got {self.num_steps}"
        assert self.sync_every > 0, f"sync_every must be > 0, got {self.sync_every}"
        assert self.temperature > 0, f"temperature must be > 0, got {self.temperature}"
        assert self.minibatches > 0, f"minibatches must be > 0, got {self.minibatches}"
        assert self.staleness >= 0, f"staleness must be >= 0, got {self.staleness}"

    @property
    def lag_max(self) -> int | None:
        """How many steps old the weights may be that sampled a token which is trained on. None: no matter how old, for
        then nothing is sampled ahead, and what is carried over is meant to be trained on.
        """
        return self.staleness + self.sync_every - 1 if self.staleness else None


class PreparedBatch(NamedTuple):
    """What a step trains on: the samples of the kept groups, their advantages [N] by `rollout_index` (those of the
    whole batch are estimated later), the batch, and metrics of how old its tokens are.
    """

    samples: list[Sample]
    advantages: list[float]
    batch: TrainBatch
    metrics: dict[str, float]


def prepare_rl_batch(
    groups: Sequence[Group],
    algorithm: Algorithm,
    config: RLTrainingConfig,
    step: int,
    *,
    name: str = "main",
    begun_with: Sequence[int] = (),
) -> PreparedBatch:
    """Samples, advantages and the batch of these groups; `name` is the algorithm's with the backend. `begun_with` are
    the versions of the policy with which the last steps began, this one last.

    Raises TrainingError, naming the function, where a part of the algorithm is at fault.
    """
    fresh = drop_stale(group_samples(groups), begun_with, config.lag_max)
    samples = fresh.samples
    rewards: list[float | None] = []
    advantages: list[float] = []
    trained: list[bool] = []
    pairs: list[tuple[int, int]] = []
    of_groups = algorithm.pairs is None and not is_batch_advantage(algorithm.advantage)
    for group in groups:
        first = len(rewards)
        lengths = group.lengths
        own = advantage_rewards(group, algorithm, step, max_tokens=config.response_tokens_max)
        eligible = [
            reward is not None and episode.status is Status.COMPLETED and length > 0 and index not in fresh.emptied
            for index, (reward, episode, length) in enumerate(zip(own, group.episodes, lengths, strict=True), first)
        ]
        if of_groups:
            advantages += group_advantages(algorithm.advantage, own, lengths=lengths)
        if algorithm.select is not None:
            trained += selected(algorithm.select, own, eligible, lengths=lengths, step=step)
        if algorithm.pairs is not None:
            # One side with tokens left out would be compared by a part of its logprob.
            whole = [fit and index not in fresh.cut for index, fit in enumerate(eligible, first)]
            found = paired(algorithm.pairs, own, whole, lengths=lengths, step=step)
            pairs += [(first + chosen, first + rejected) for chosen, rejected in found]
        rewards += own
    advantages = advantages or [0.0] * len(rewards)
    batch = make_batch(
        samples,
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
    # A correction weighs what another engine sampled against the policy as it was: the ratio then starts at 1. It has
    # a weight a token; a loss of one value a rollout keeps the sampler as its anchor, and its ratio corrects.
    corrected = algorithm.correction is not None and batch.unit == "token"
    batch.anchor = "current" if corrected else "sampler"
    return PreparedBatch(samples, advantages, batch, fresh.metrics)


async def complete_batch(
    backend: TrainingBackend, batch: TrainBatch, algorithm: Algorithm, *, minibatches: int = 1
) -> None:
    """Stamp on the rows what the loss needs before it can be computed, then the advantages of the whole batch.

    One forward pass, over live tokens, for each model that is needed; none where nothing is. The anchor is asked for
    too where it is the policy as it is now and has to be known later, or for advantages: with several optimizer steps,
    or a KL in the rewards, and an engine outside or rows whose sampler's logprobs are not known.
    """
    names = forward_needs(algorithm)
    unknown = any(row.rollout_logprobs is None and any(row.loss_mask) for row in batch.rows)
    if (minibatches > 1 and (batch.anchor == "current" or unknown)) or (unknown and _estimates_tokens(algorithm)):
        names = (*names, "logprobs")
    if names and any(any(row.loss_mask) for row in batch.rows):
        output = await backend.forward(batch, names, only_live=True)
        _stamp(batch, output)
    estimate_advantages(batch, algorithm)


def estimate_advantages(batch: TrainBatch, algorithm: Algorithm) -> None:
    """Stamp the advantages of single tokens: the batch's own estimator, and a KL that is placed in the reward."""
    if not _estimates_tokens(algorithm) or not any(any(row.loss_mask) for row in batch.rows):
        return
    kl = algorithm.kl
    penalised = _is_penalised(algorithm)
    whole = _is_whole(algorithm)
    available = _tensors(batch)
    count = len(available["mask"])
    if penalised:
        assert kl is not None, "penalised says so"
        available["token_rewards"] = _penalty(kl, available, batch.kl_coefficient)
    asked = requests(algorithm.advantage, "advantages") if whole else ()
    advantages, returns = available["advantages"], None
    if whole:
        advantages, returns = batch_advantages(algorithm.advantage, available, count)
    if penalised and "token_rewards" not in asked:
        to_go = rewards_to_go(available["token_rewards"], available["mask"], available["rollout_index"])
        advantages = advantages + to_go
    start = 0
    for row in batch.rows:
        end = start + len(row.tokens)
        row.advantages = advantages[start:end].tolist()
        if returns is not None:
            row.returns = returns[start:end].tolist()
        start = end


def _is_penalised(algorithm: Algorithm) -> bool:
    return algorithm.kl is not None and is_reward_placed(algorithm.kl.function)


def _is_whole(algorithm: Algorithm) -> bool:
    return algorithm.pairs is None and is_batch_advantage(algorithm.advantage)


def _estimates_tokens(algorithm: Algorithm) -> bool:
    """Whether tokens of a rollout may have different advantages."""
    return _is_penalised(algorithm) or _is_whole(algorithm)


def rollout_advantages(batch: TrainBatch, count: int) -> list[float]:
    """The mean advantage of each rollout's [N] trained tokens; 0.0 where it has none."""
    values: list[list[float]] = [[] for _ in range(count)]
    for row in batch.rows:
        values[row.rollout_index] += [a for a, live in zip(row.advantages, row.loss_mask, strict=True) if live > 0]
    return [statistics.fmean(each) if each else 0.0 for each in values]


def advantage_rewards(
    group: Group, algorithm: Algorithm, step: int, *, max_tokens: int | None = None
) -> list[float | None]:
    """The group's rewards [G] as filters, selectors and the advantage see them: mixed, then shaped. Raises
    TrainingError, naming the function that is at fault.
    """
    rewards = list(group.rewards)
    lengths = group.lengths
    if algorithm.mix is not None:
        scores = [episode.score for episode in group.episodes]
        weights = next((score.weights for score in scores if score.value is not None), {})
        parts = [score.parts if score.value is not None else None for score in scores]
        rewards = mixed_rewards(algorithm.mix, parts, weights, step=step)
    truncated = [episode.status is Status.TRUNCATED for episode in group.episodes]
    for function in algorithm.shaping:
        rewards = shaped_rewards(
            function,
            rewards,
            lengths=lengths,
            truncated=truncated,
            max_tokens=max_tokens,
            step=step,
        )
    return rewards


def _stamp(batch: TrainBatch, output: ForwardOutput) -> None:
    """What the models gave, on the rows. The anchor of a row whose sampler is the anchor stays the sampler."""
    rows = batch.rows
    anchors = output.logprobs
    if anchors is not None and batch.anchor == "sampler":
        anchors = [row.rollout_logprobs or anchor for row, anchor in zip(rows, anchors, strict=True)]
    fields = {
        "old_logprobs": anchors,
        "ref_logprobs": output.ref_logprobs,
        "teacher_logprobs": output.teacher_logprobs,
        "old_values": output.values,
    }
    for name, streams in fields.items():
        if streams is not None:
            for row, stream in zip(rows, streams, strict=True):
                setattr(row, name, stream)


def _tensors(batch: TrainBatch) -> dict[str, Any]:
    """What an advantage of the whole batch may name: all positions of all rows, one after another [T]."""
    import torch

    def joined(name: str, fallback: str = "") -> Tensor:
        values: list[float] = []
        for row in rows:
            stream = getattr(row, name)
            if stream is None and fallback:
                stream = getattr(row, fallback)
            assert stream is not None or not any(row.loss_mask), f"a live row has no {name}; complete_batch asks for it"
            values += [0.0] * len(row.tokens) if stream is None else stream
        return torch.tensor(values, dtype=torch.float64)

    rows = batch.rows
    available: dict[str, Any] = {
        "batch": None,
        "rewards": torch.tensor(batch.rewards, dtype=torch.float64),
        "mask": joined("loss_mask"),
        "advantages": joined("advantages"),
        "rollout_logprobs": joined("rollout_logprobs", "old_logprobs"),
        "old_logprobs": joined("old_logprobs", "rollout_logprobs"),
        "rollout_index": torch.tensor([row.rollout_index for row in rows for _ in row.tokens]),
        "group_index": torch.tensor([row.group_index for row in rows for _ in row.tokens]),
        "step": batch.step,
    }
    available["token_rewards"] = torch.zeros_like(available["mask"])
    given = {"ref_logprobs": "ref_logprobs", "teacher_logprobs": "teacher_logprobs", "values": "old_values"}
    for name, field in given.items():
        if getattr(rows[0], field) is not None:
            available[name] = joined(field)
    return available


def _penalty(kl: KL, available: dict[str, Any], coefficient: float | None) -> Tensor:
    """-coefficient * KL [T] at live tokens."""
    import torch

    values = call_author("KL estimator", kl.function, available)
    if kl.threshold is not None:
        values = values.clamp(max=kl.threshold)
    penalty = -(kl.coefficient if coefficient is None else coefficient) * values
    return torch.where(available["mask"] > 0, penalty, torch.zeros_like(penalty))
