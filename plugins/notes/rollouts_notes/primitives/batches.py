"""Rollouts as tensors: one position for each sampled id, in the order of the rollouts.

Prompts and tool results are context: they are run, and have no position here. What is scored is what was sampled; no
text is encoded again. Not here: advantages and losses (`algorithms`).

Legend: N rollouts, T sampled ids of all of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rollouts.author_code import shown
from rollouts.errors import ConfigError, TrainingError
from rollouts.training.batching import BUCKET_SAVING_MIN, make_batch
from rollouts.types import Sample, Status
from rollouts_notes.primitives.rewards import aggregate_vector_rewards, as_number, is_vector
from rollouts_notes.primitives.types import Batch, Generation, Rollout

if TYPE_CHECKING:
    from torch import Tensor


def turns_of(rollout: Rollout) -> Sequence[Generation]:
    """All replies of a rollout, in order."""
    return rollout.turns or (rollout.generation,)


def was_cut_off(rollout: Rollout) -> bool:
    """Whether the last reply reached `max_tokens`."""
    return rollout.generation.finish_reason == "length"


def reward_of(rollout: Rollout) -> float | None:
    """The reward as one number: the sum of a vector; None if nothing judged the rollout. Raises RewardError.

    >>> reward_of(Rollout("Hi", Generation("Hello"), rewards=[1.0, 0.5]))
    1.5
    """
    rewards = rollout.rewards
    if rewards is None or isinstance(rewards, int | float):
        return None if rewards is None else float(rewards)
    vector: Any = rewards if is_vector(rewards) else [rewards]
    return aggregate_vector_rewards([as_number(each, "the rollout") for each in vector])


def group_numbers(rollouts: Sequence[Rollout]) -> list[int]:
    """The group [N] of each rollout, numbered from 0 in the order of their first rollouts.

    >>> reply = Generation("Hello")
    >>> group_numbers([Rollout("Hi", reply), Rollout("Hello", reply), Rollout("Hi", reply)])
    [0, 1, 0]
    """
    numbers: dict[Any, int] = {}
    keys = [repr(each.prompt) if each.group_index is None else each.group_index for each in rollouts]
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def rollout_samples(rollouts: Sequence[Rollout]) -> list[Sample]:
    """The engine's samples of rollouts, one for each segment: `tokens`, and a `loss_mask` with 1.0 at sampled ids.

    A turn continues the segment of the turn before it if its prompt begins with that segment. Otherwise, a new segment
    starts. Raises TrainingError if a rollout has no sampled ids.
    """
    samples: list[Sample] = []
    for number, (rollout, group) in enumerate(zip(rollouts, group_numbers(rollouts), strict=True)):
        status = Status.TRUNCATED if was_cut_off(rollout) else Status.COMPLETED
        reward, first = reward_of(rollout), len(samples)
        for place, turn in enumerate(turns_of(rollout)):
            prompt = list(turn.prompt_tokens)
            if not turn.tokens or not prompt:
                raise TrainingError(
                    f"turn {place} of rollout {number} has {len(prompt)} prompt ids and {len(turn.tokens)} sampled "
                    "ids, so it cannot be trained; return Generation(text, tokens, logprobs, prompt_tokens=...) from "
                    "the generator"
                )
            if samples[first:] and samples[-1].tokens == prompt[: len(samples[-1].tokens)]:
                sample = samples[-1]
                prompt = prompt[len(sample.tokens) :]
            else:
                sample = Sample(rollout_log_probs=[], reward=reward, group_index=group, rollout_index=number)
                sample.status, sample.prompt_length = status, 0 if samples[first:] else len(prompt)
                samples.append(sample)
            known = [math.nan] * len(turn.tokens) if turn.logprobs is None else [min(p, 0.0) for p in turn.logprobs]
            if len(known) != len(turn.tokens):
                raise TrainingError(
                    f"turn {place} of rollout {number} has {len(turn.tokens)} ids and {len(known)} logprobs; the "
                    "generator must return one logprob for each id, or None"
                )
            sample.tokens += [*prompt, *turn.tokens]
            sample.loss_mask += [0.0] * len(prompt) + [1.0] * len(turn.tokens)
            assert sample.rollout_log_probs is not None
            sample.rollout_log_probs += [0.0] * len(prompt) + known
    return samples


def temperature_of(replies: Iterable[Generation], given: float | None) -> float:
    """The sampling temperature of replies, `given` or known; 1 for a greedy or an unknown one.

    Raises TrainingError if two differ: logprobs of different temperatures cannot be compared.

    >>> temperature_of([Generation("4", temperature=0.5), Generation("5")], None)
    0.5
    """
    of_replies = [reply.temperature for reply in replies]
    known = {each or 1.0 for each in (*of_replies, given) if each is not None}
    if len(known) > 1:
        listed = " and ".join(f"{each:g}" for each in sorted(known))
        raise TrainingError(
            f"replies were sampled at one temperature and are used at another one: {listed}; leave `temperature` out, "
            "and train replies of different temperatures in calls of their own"
        )
    return known.pop() if known else 1.0


def create_batch(
    model: Any, rollouts: Sequence[Rollout], *, temperature: float | None = None, train_truncated: bool = False
) -> Batch:
    """Rollouts as tensors, with the policy's logprobs of all sampled ids, which have a gradient.

    They are those of the sampling `temperature`; None: that of the rollouts. `model` None leaves out logprobs and
    entropy, which advantages do not need. A rollout without a reward is not
    trained; one whose last reply was cut off is only trained if `train_truncated`. Raises TrainingError for no
    rollouts, for a rollout without ids, and if a rollout has ids and logprobs of different lengths or another
    temperature.

    >>> reply = Generation("4", tokens=[7, 2], logprobs=[-0.5, -0.25], prompt_tokens=[1, 3])
    >>> batch = create_batch(None, [Rollout("2 + 2", reply, rewards=1.0), Rollout("2 + 2", reply, rewards=0.0)])
    >>> batch.old_logprobs.tolist(), batch.rollout_index.tolist(), batch.rewards.tolist()
    ([-0.5, -0.25, -0.5, -0.25], [0, 0, 1, 1], [1.0, 0.0])
    """
    import torch

    if not rollouts:
        raise TrainingError("there are no rollouts to train; give one or more")
    if not all(isinstance(each, Rollout) for each in rollouts):
        raise ConfigError(f"expected a list of rollouts, got {shown(rollouts)}; create_batch_rollouts returns one")
    samples = rollout_samples(rollouts)
    places = [(sample, at) for sample in samples for at, weight in enumerate(sample.loss_mask) if weight > 0]
    rewards = [math.nan if (reward := reward_of(rollout)) is None else reward for rollout in rollouts]
    trained = [
        not math.isnan(reward) and (train_truncated or not was_cut_off(rollout))
        for reward, rollout in zip(rewards, rollouts, strict=True)
    ]
    references = [each.ref_logprobs for each in rollouts]
    known = [p for each in references for p in each or ()]
    numbers: dict[str, Any] = {
        "old_logprobs": [(sample.rollout_log_probs or [])[at] for sample, at in places],
        "mask": [float(trained[sample.rollout_index or 0]) for sample, _ in places],
        "rollout_index": [sample.rollout_index for sample, _ in places],
        "group_index": [sample.group_index for sample, _ in places],
        "tokens": [sample.tokens[at] for sample, at in places],
    }
    tensors: dict[str, Any] = {name: torch.tensor(values) for name, values in numbers.items()}
    tensors["ref_logprobs"] = None if None in references else torch.tensor(known)
    batch = Batch(list(rollouts), None, rewards=torch.tensor(rewards, dtype=torch.float64), **tensors)
    if None not in references and len(known) != len(places):
        raise TrainingError(
            f"the rollouts have {len(places)} sampled ids and {len(known)} ref_logprobs; a reference gives one for each"
        )
    if model is None:
        return batch
    replies = [turn for rollout in rollouts for turn in turns_of(rollout)]
    logprobs, entropy = score_samples(model, samples, temperature_of(replies, temperature))
    batch = to_device(batch, logprobs.device)
    old = torch.where(batch.old_logprobs.isnan(), logprobs.detach(), batch.old_logprobs)
    return batch._replace(logprobs=logprobs, entropy=entropy, old_logprobs=old)


def to_device(batch: Batch, device: Any) -> Batch:
    """The batch with its tensors on this device, with float32 rewards on one without float64 (mps)."""
    import torch

    if torch.device(device).type == "mps":
        batch = batch._replace(rewards=batch.rewards.float())
    return Batch._make(each.to(device) if isinstance(each, torch.Tensor) else each for each in batch)


def sampled_logprobs(model: Any, rollouts: Sequence[Rollout]) -> list[list[float]]:
    """The model's logprobs of the sampled ids of each rollout, all turns in order, without gradient."""
    import torch

    samples = rollout_samples(rollouts)
    with torch.no_grad():
        replies = [turn for rollout in rollouts for turn in turns_of(rollout)]
        logprobs, _ = score_samples(model, samples, temperature_of(replies, None))
    counts = [sum(len(turn.tokens) for turn in turns_of(rollout)) for rollout in rollouts]
    return [each.tolist() for each in torch.split(logprobs, counts)]


def ids_at(batch: Batch, chosen: Tensor) -> Batch:
    """The batch with the ids at the positions `chosen` only. Rollouts and rewards stay."""
    fields = ("logprobs", "old_logprobs", "mask", "rollout_index", "group_index", "ref_logprobs", "tokens", "entropy")
    values = {name: getattr(batch, name) for name in fields}
    return batch._replace(**{name: value[chosen] for name, value in values.items() if value is not None})


def score_samples(model: Any, samples: Sequence[Sample], temperature: float) -> tuple[Tensor, Tensor]:
    """Logprobs and entropy [T] of the sampled ids, in the order of the samples, as the engine's backends compute them.

    Shared prompts run once. The model runs in evaluation mode, without dropout.
    """
    import torch

    from rollouts.training.backends.forward import Models
    from rollouts.training.backends.transformer import inspect_model

    plain = [dataclasses.replace(each, reward=0.0, rollout_log_probs=None) for each in samples]
    count = 1 + max(sample.rollout_index or 0 for sample in samples)
    rows = make_batch(plain, [0.0] * count, aggregation="token_mean", step=0).rows
    wanted = [[at for at, weight in enumerate(row.loss_mask) if weight > 0] for row in rows]
    was_training = model.training
    model.eval()
    try:
        paths = inspect_model(model, bucket_saving_min=BUCKET_SAVING_MIN)
        scored = Models(paths, None, None).score((rows, wanted), temperature, frozenset())
    finally:
        model.train(was_training)
    found = scored.selection.tokens()
    order = torch.tensor(sorted(range(len(found)), key=found.__getitem__), device=scored.logprobs.device)
    return scored.logprobs[order], scored.entropy[order]
