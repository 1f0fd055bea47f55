"""The names a component may ask for, by kind, and which of them go together.

Axes: L tokens of one row, T tokens of a batch, N rollouts, G rollouts of one prompt, K alternatives of one token.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["VOCABULARY", "mixing_fault"]

_BATCH_INDEX = {
    "mask": "[T] weight of each token; 0: not trained",
    "rollout_index": "[T] position 0..N-1 of the token's rollout",
    "group_index": "[T] the prompt the token's rollout belongs to",
}

VOCABULARY: dict[str, dict[str, str]] = {
    "rewards": {
        "task": "the Task that was set",
        "trajectory": "what the agent did: messages, status, metrics",
        "env": "the environment object of the episode",
        "tasks": "a whole group's Tasks [G]; the reward then returns a list of G",
        "trajectories": "a whole group's Trajectories [G]; the reward then returns a list of G",
    },
    "metrics": {
        "task": "the Task that was set",
        "trajectory": "what the agent did: messages, status, metrics",
        "env": "the environment object of the episode",
    },
    "filters": {
        "rewards": "the group's rewards [G], floats or None",
        "samples": "the group's Samples",
        "trajectories": "the group's Trajectories [G]",
        "step": "the step that is being filled, from 0",
    },
    "advantages": {
        "rewards": "[G] a group's rewards; with `batch` [N] all of them",
        "lengths": "[G] sampled tokens of each rollout",
        "turn_rewards": "G lists, the reward of each turn",
        "batch": "ask for it to be called once for the whole batch, not for each group",
        "values": "[T] the value head's predictions (with `batch`)",
        "ref_logprobs": "[T] logprobs under the reference model (with `batch`)",
        "teacher_logprobs": "[T] logprobs under the teacher (with `batch`)",
        "rollout_logprobs": "[T] logprobs of the sampler (with `batch`)",
        **{name: f"{meaning} (with `batch`)" for name, meaning in _BATCH_INDEX.items()},
    },
    "losses": {
        "logprobs": "[T] fp32, with gradient",
        "old_logprobs": "[T] detached; the anchor of the ratio",
        "rollout_logprobs": "[T] detached; those of the sampler",
        "ref_logprobs": "[T] detached; loads a reference model",
        "teacher_logprobs": "[T] detached; needs a teacher",
        "advantages": "[T] detached",
        "returns": "[T] detached",
        "old_values": "[T] detached",
        "entropy": "[T] with gradient",
        "values": "[T] with gradient; needs a value head",
        "topk_logprobs": "[T, K] with gradient",
        "teacher_topk_ids": "[T, K] the teacher's likeliest ids",
        "teacher_topk_logprobs": "[T, K] detached; needs a teacher",
        "logits": "[T, vocabulary] with gradient; takes much memory",
        **_BATCH_INDEX,
        "pair_index": "[T] the preference pair the token belongs to; -1: none",
        "rewards": "[N]",
        "step": "the optimizer step, from 0",
    },
    "training": {
        "model": "the model's name or path",
        "seed": "the run's seed",
        "steps": "how many optimizer steps the run plans",
        "lr": "learning rate",
        "lora_rank": "0: full weights",
        "tokens_per_microbatch": "at most this many tokens run forward at once",
        "algorithms": "dict: name -> Algorithm",
    },
    "inference": {
        "model": "the model's name or path",
        "training": "the training backend, or None",
        "seed": "the run's seed",
    },
    "loggers": {
        "folder": "the run's folder",
        "settings": "the run's resolved settings",
    },
}
"""Kind -> name -> what it is. `metrics` are the `@metric` methods of an environment."""

_GROUP_REWARD = ("tasks", "trajectories")
_GROUP_ADVANTAGE = ("lengths", "turn_rewards")


def mixing_fault(kind: str, requests: Sequence[str]) -> str:
    """Why the requested names do not go together; empty where they do.

    >>> mixing_fault("rewards", ["trajectory", "env"])
    ''
    """
    if kind == "rewards":
        group = [name for name in requests if name in _GROUP_REWARD]
        single = [name for name in requests if name not in _GROUP_REWARD]
        if group and single:
            return (
                f"it asks for {_quoted(single)} of one episode and for {_quoted(group)} of a whole group\n"
                f"a reward names some of task, trajectory, env; or, for a whole group, of tasks, trajectories"
            )
    if kind == "advantages":
        batch_only = [name for name in requests if name not in ("rewards", "batch", *_GROUP_ADVANTAGE)]
        group_only = [name for name in requests if name in _GROUP_ADVANTAGE]
        if "batch" in requests and group_only:
            return (
                f"it asks for 'batch' and for {_quoted(group_only)}, which only a group has\n"
                f"without `batch` it is called for each group, with rewards, lengths, turn_rewards"
            )
        if "batch" not in requests and batch_only:
            return (
                f"it asks for {_quoted(batch_only)}, which is there only over the whole batch\n"
                f"name `batch` too; it is then called once, with rewards [N] and tokens [T]"
            )
    return ""


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)
