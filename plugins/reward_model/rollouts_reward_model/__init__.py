"""Reward models: `--reward reward_model --reward.reward_model.model FOLDER`.

A sequence-classification model of transformers scores conversations. `load_reward_model` loads one,
`compute_reward_model_score` scores one conversation, and the reward `reward_model` scores the rollouts of a group in
batches. Not here: language models that grade by a rubric (rollouts-judge).

    loading    the model, its label, its tokenizer and its limits
    scoring    conversations to ids, batches, scores
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from rollouts import Score, Trajectory
from rollouts.plugins.checks import checked_by
from rollouts.training.models import resolve_device
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
def reward_model(
    trajectories: list[Trajectory],
    *,
    model: str,
    label: str = "",
    probability: bool = False,
    per: Literal["rollout", "turn"] = "rollout",
    device: str = "auto",
    dtype: Dtype = "float32",
    batch_size: Annotated[int, Meta(ge=1)] = 16,
    max_tokens: Annotated[int, Meta(ge=1)] | None = None,
) -> list[Score]:
    """The score of a reward model: a sequence-classification model of transformers; None if it cannot be shown.

    All conversations of the group are scored together, without the schemas of tools. `parts` has `cut`: 1 if a
    conversation was longer than the model reads, so that its beginning was left out.

    Args:
        model: a folder, or a name on the hub
        label: which label is the score, if the model has several: its name or its number
        probability: the label's probability, not its logit
        per: turn: each turn earns what it added to the score of the conversation up to it
        device: where the model runs: auto, cpu, cuda or cuda:1
        dtype: of the weights: float32, bfloat16 or float16
        batch_size: the number of conversations in one forward pass
        max_tokens: the most tokens of a conversation; none: as many as the model has positions
    """
    loaded = load_reward_model(model, label=label, probability=probability, device=device, dtype=dtype)
    prefixes = [_prefixes(each, per) for each in trajectories]
    asked = [each.messages[:end] for each, ends in zip(trajectories, prefixes, strict=True) for end in ends]
    scored = iter(score_conversations(loaded, asked, batch_size=batch_size, max_tokens=max_tokens))
    return [_score([next(scored) for _ in ends], per) for ends in prefixes]


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
