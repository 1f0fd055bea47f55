"""Reward models: `--reward reward_model --reward.reward_model.model FOLDER`.

A sequence-classification model of transformers scores conversations. `load_reward_model` loads one,
`compute_reward_model_score` scores one conversation, and the reward `reward_model` scores the rollouts of all groups
that wait, in batches. Not here: language models that grade by a rubric (rollouts-judge).

    loading    the model, its label, its tokenizer and its limits
    scoring    conversations to ids, batches, scores
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import trio
from msgspec import Meta

from rollouts import Score, Trajectory
from rollouts.models.loading import resolve_device
from rollouts.plugins.checks import checked_by
from rollouts_reward_model.loading import DTYPES, RewardModel, check_model, load_reward_model
from rollouts_reward_model.scoring import Scored, compute_reward_model_score, score_conversations

__all__ = ["RewardModel", "compute_reward_model_score", "load_reward_model", "reward_model"]

Dtype = Literal["float32", "bfloat16", "float16"]


def _check(values: Mapping[str, Any]) -> None:
    """Raise ConfigError or ModelError for a model that cannot score. Only its configuration is read."""
    assert values["dtype"] in DTYPES
    resolve_device(values["device"])
    check_model(values["model"], values["label"], values["max_tokens"])


@checked_by(_check)
async def reward_model(
    groups: list[list[Trajectory]],
    *,
    model: str,
    label: str = "",
    probability: bool = False,
    per: Literal["rollout", "turn"] = "rollout",
    device: str = "auto",
    dtype: Dtype = "float32",
    tokens_per_batch: Annotated[int, Meta(ge=1)] = 2048,
    max_tokens: Annotated[int, Meta(ge=1)] | None = None,
) -> list[list[Score]]:
    """The score of a reward model: a sequence-classification model of transformers; None if it cannot be shown.

    All conversations of all groups that wait are scored together, without the schemas of tools. `parts` has `cut`: 1 if
    a conversation was longer than the model reads, so that its beginning was left out. If the run is cancelled, at most
    one more forward pass begins.

    Args:
        model: a folder, or a name on the hub
        label: which label is the score, if the model has several: its name or its number
        probability: the label's probability, not its logit
        per: turn: each turn earns what it added to the score of the conversation up to it
        device: where the model runs: auto, cpu, cuda or cuda:1
        dtype: of the weights: float32, bfloat16 or float16
        tokens_per_batch: the most tokens in one forward pass, with padding; a longer conversation has one of its own
        max_tokens: the most tokens of a conversation; none: as many as the model has positions
    """

    def score() -> list[list[Score]]:
        loaded = load_reward_model(model, label=label, probability=probability, device=device, dtype=dtype)
        prefixes = [[_prefixes(each, per) for each in group] for group in groups]
        asked = [
            each.messages[:end]
            for group, own in zip(groups, prefixes, strict=True)
            for each, ends in zip(group, own, strict=True)
            for end in ends
        ]
        found = score_conversations(
            loaded,
            asked,
            tokens_per_batch=tokens_per_batch,
            max_tokens=max_tokens,
            between=trio.from_thread.check_cancelled,
        )
        scored = iter(found)
        return [[_score([next(scored) for _ in ends], per) for ends in own] for own in prefixes]

    return await trio.to_thread.run_sync(score, abandon_on_cancel=True)


def _prefixes(trajectory: Trajectory, per: str) -> list[int]:
    """How many messages of the conversation to score: all, or those up to the end of each turn."""
    if per == "rollout":
        return [len(trajectory.messages)] if trajectory.turns else []
    ends = [place for place, message in enumerate(trajectory.messages, 1) if message.role == "assistant"]
    return ends[len(ends) - max(trajectory.turns, 0) :]


def _score(scored: Sequence[Scored], per: str) -> Score:
    """One rollout's score. By turn, each turn has the difference to the score before it, and they add up to the last
    one.
    """
    if not scored:
        return Score(None, {}, "the model had no turn")
    refused = next((each.why for each in scored if each.value is None), None)
    if refused is not None:
        return Score(None, {}, refused)
    values = [each.value or 0.0 for each in scored]
    cut = scored[-1].cut
    why = f"the first {cut} tokens were left out" if cut else ""
    parts: dict[str, float | None] = {"cut": float(cut > 0)}
    if per == "rollout":
        return Score(values[-1], parts, why)
    turns = [now - before for before, now in zip([0.0, *values], values, strict=False)]
    return Score(values[-1], parts, why, turns=turns)
