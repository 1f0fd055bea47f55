"""The names a component may ask for, by kind, and which of them go together.

Axes: L tokens of one row, T tokens of a batch, N rollouts, G rollouts of one prompt, K alternatives of one token.
"""

from __future__ import annotations

from collections.abc import Sequence

_BATCH_INDEX = {
    "mask": "[T] weight of each token; 0: not trained",
    "rollout_index": "[T] position 0..N-1 of the token's rollout",
    "group_index": "[T] the prompt the token's rollout belongs to",
}

_LOSS = {
    "logprobs": "[T] fp32, with gradient",
    "old_logprobs": "[T] detached; the anchor of the ratio",
    "rollout_logprobs": "[T] detached; those of the sampler",
    "ref_logprobs": "[T] detached; loads a reference policy",
    "teacher_logprobs": "[T] detached; needs a teacher",
    "advantages": "[T] detached; with pairs +1 on what was chosen and -1 on what was rejected",
    "returns": "[T] detached; the critic's targets",
    "old_values": "[T] detached; the critic's predictions before the step; needs a critic",
    "entropy": "[T] with gradient",
    "values": "[T] with gradient; needs a critic",
    "topk_logprobs": "[T, K] with gradient, of `teacher_topk_ids`; needs a teacher",
    "teacher_topk_ids": "[T, K] the teacher's likeliest ids; needs a teacher",
    "teacher_topk_logprobs": "[T, K] detached; needs a teacher",
    "logits": "[T, vocabulary] fp32 with gradient, divided by the temperature; takes much memory",
    **_BATCH_INDEX,
    "segments": "[T] which segment of its rollout the token is in, from 0",
    "pair_index": "[T] the preference pair the token belongs to; -1: none; needs a pair selector",
    "rewards": "[N] shaped; NaN where a rollout was not judged",
    "step": "the optimizer step, from 0",
}

_EPISODE = {
    "task": "the Task that was set",
    "trajectory": "what the agent did: messages, status, metrics",
    "env": "the environment object of the episode",
}

_STEP = {"step": "the step, from 0"}

_TRAINABLE = {
    "rewards": "[J] of the group's rollouts that may be trained on (judged, not truncated), float64",
    "lengths": "[J] sampled tokens of each",
    **_STEP,
}

VOCABULARY: dict[str, dict[str, str]] = {
    "rewards": {
        **_EPISODE,
        "tasks": "a whole group's Tasks [G]; the reward then returns a list of G",
        "trajectories": "a whole group's Trajectories [G]; the reward then returns a list of G",
    },
    "metrics": _EPISODE,
    "curricula": {"step": "the training step, from 0"},
    "filters": {
        "rewards": "the group's rewards [G] as the advantage sees them (mixed and shaped), floats or None",
        "scores": "the weighted sums of the rewards [G], before mixing and shaping, floats or None",
        "parts": "what each reward said of each rollout: G dicts by name",
        "samples": "the group's Samples",
        "trajectories": "the group's Trajectories [G]",
        "step": "the step that is being filled, from 0",
    },
    "advantages": {
        "rewards": "[G] a group's rewards, shaped; with `batch` [N] all of them",
        "lengths": "[G] sampled tokens of each rollout",
        "turn_rewards": "G lists, the reward of each turn",
        "batch": "ask for it to be called once for the whole batch, not for each group",
        "values": "[T] the critic's predictions (with `batch`)",
        "token_rewards": "[T] what single tokens are given, such as the KL penalty of k1_reward (with `batch`)",
        "ref_logprobs": "[T] logprobs under the reference policy (with `batch`)",
        "teacher_logprobs": "[T] logprobs under the teacher (with `batch`)",
        "rollout_logprobs": "[T] logprobs of the sampler (with `batch`)",
        **{name: f"{meaning} (with `batch`)" for name, meaning in _BATCH_INDEX.items()},
    },
    "losses": _LOSS,
    "kl": {
        name: _LOSS[name] for name in ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "mask", "step")
    },
    "references": {
        "reference": "list of tensors, changed in place: the reference's copy of every trained tensor",
        "policy": "list of tensors, only read: what is trained, in the same order",
        "adapters": "the same as `reference`, but only there with LoRA: a rule that needs adapters names it",
        "version": "optimizer steps so far; 0 when the run begins",
    },
    "corrections": {
        "old_logprobs": "[T] the trainer's logprobs before the step",
        "rollout_logprobs": "[T] those of the sampler",
        **_BATCH_INDEX,
        "step": "the optimizer step, from 0",
    },
    "aggregations": {
        "masks": "R lists [L]: the weight of each token of each row; 0: not trained",
        "rollout_index": "[R] the rollout of each row",
        "group_index": "[R] the prompt of each row",
        "pair_index": "[R] the pair of each row; -1: none",
        "max_tokens": "the longest reply that is allowed, in tokens, or None",
    },
    "mixers": {
        "parts": "[J, P] what each of P rewards said of each of the group's J judged rollouts, float64",
        "weights": "[P] the weights of the rewards",
        **_STEP,
    },
    "shapings": {
        "rewards": "[J] of the group's judged rollouts, float64",
        "lengths": "[J] sampled tokens of each",
        "truncated": "[J] bool: it was cut off by the limit on tokens or by the context",
        "max_tokens": "the longest reply that is allowed, in tokens, or None",
        **_STEP,
    },
    "selectors": _TRAINABLE,
    "pairings": _TRAINABLE,
    "training": {
        "model": "the model's name or path",
        "seed": "the run's seed",
        "steps": "how many optimizer steps the run plans",
        "lr": "learning rate",
        "lora_rank": "0: full weights",
        "tokens_per_microbatch": "at most this many tokens run forward at once",
        "algorithms": "dict: name -> Algorithm",
        "auxiliary_models": "an AuxiliaryModels: reference policy, critic and teacher; None: the run has none of them",
        "companions": "the older name of auxiliary_models",
        "config": "the run's resolved settings as TOML: from them another rank composes the same run",
    },
    "inference": {
        "model": "the model's name or path",
        "training": "the training backend; None: nothing is trained",
        "seed": "the run's seed",
        "temperature": "what the run samples at",
        "folder": "the run's folder, for logs; it may not be there yet",
        "concurrency": "how many episodes play at once",
        "lora_rank": "0: full weights",
    },
    "loggers": {
        "folder": "the run's folder",
        "settings": "the run's resolved settings",
        "first_step": "the step, from 0, that this process begins with: above 0 where a run is resumed",
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
                f"it asks for {quoted(single)} of one episode and for {quoted(group)} of a whole group\n"
                f"a reward names some of task, trajectory, env; or, for a whole group, of tasks, trajectories"
            )
    if kind == "advantages":
        batch_only = [name for name in requests if name not in ("rewards", "batch", *_GROUP_ADVANTAGE)]
        group_only = [name for name in requests if name in _GROUP_ADVANTAGE]
        if "batch" in requests and group_only:
            return (
                f"it asks for 'batch' and for {quoted(group_only)}, which only a group has\n"
                f"without `batch` it is called for each group, with rewards, lengths, turn_rewards"
            )
        if "batch" not in requests and batch_only:
            return (
                f"it asks for {quoted(batch_only)}, which is there only over the whole batch\n"
                f"name `batch` too; it is then called once, with rewards [N] and tokens [T]"
            )
    return ""


def quoted(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)
