"""The inputs that a component of each kind may name, and which inputs exclude each other.

Axes: L tokens of one row, T tokens of a batch, R rows, N rollouts, G rollouts of one prompt, J judged rollouts of one
prompt, K alternatives of one token.
"""

from __future__ import annotations

from collections.abc import Sequence

_BATCH_INDEX = {
    "mask": "[T] the weight of each token; 0: not trained on",
    "rollout_index": "[T] the rollout of each token, 0 to N-1",
    "group_index": "[T] the prompt of each token, as a number",
}

_LOSS = {
    "logprobs": "[T] log-probabilities under the policy, fp32, with gradient",
    "old_logprobs": "[T] detached; under the policy before this step: the denominator of the ratio",
    "rollout_logprobs": "[T] detached; as the engine sampled them",
    "ref_logprobs": "[T] detached; under the reference policy, which this loads",
    "teacher_logprobs": "[T] detached; under the teacher; needs a teacher",
    "advantages": "[T] detached; for pairs: +1 for the chosen rollout, -1 for the rejected one",
    "returns": "[T] detached; the targets of the critic",
    "old_values": "[T] detached; the critic's predictions before this step; needs a critic",
    "entropy": "[T] the entropy of the policy at each token, with gradient",
    "values": "[T] the critic's predictions, with gradient; needs a critic",
    "topk_logprobs": "[T, K] log-probabilities of `teacher_topk_ids` under the policy, with gradient; needs a teacher",
    "teacher_topk_ids": "[T, K] the K likeliest token ids under the teacher; needs a teacher",
    "teacher_topk_logprobs": "[T, K] detached; the teacher's log-probabilities of `teacher_topk_ids`; needs a teacher",
    "logits": "[T, vocabulary] fp32, with gradient, divided by the temperature; uses much memory",
    **_BATCH_INDEX,
    "segments": "[T] the segment of the rollout that each token is in, from 0",
    "pair_index": "[T] the pair of each token; -1: no pair; needs a pair selector",
    "rewards": "[N] rewards after shaping; NaN if no reward could judge the rollout",
    "step": "the optimizer step, from 0",
}

_EPISODE = {
    "task": "the Task of the episode",
    "trajectory": "the Trajectory of the episode: messages, status, metrics",
    "env": "the environment object of the episode",
}

_STEP = {"step": "the step, from 0"}

_TRAINABLE = {
    "rewards": "[J] float64: rewards of the group's judged rollouts that were not truncated",
    "lengths": "[J] sampled tokens of each rollout",
    **_STEP,
}

VOCABULARY: dict[str, dict[str, str]] = {
    "rewards": {
        **_EPISODE,
        "turn": "one Turn of the model: index, message, answers; the reward is then called once for each turn",
        "tasks": "the Tasks [G] of a whole group; the reward then returns a list of G judgments",
        "trajectories": "the Trajectories [G] of a whole group; the reward then returns a list of G judgments",
        "groups": "lists of Trajectories [G], one for each group that waits; the reward then returns as many lists",
    },
    "metrics": _EPISODE,
    "curricula": {"step": "the training step, from 0"},
    "samplers": {
        "tasks": "the keys [N] (`Task.key`) of the training tasks in their first order; of an iterator the first 10,000"
    },
    "filters": {
        "rewards": "the rewards [G] of the group after mixing and shaping, floats or None",
        "scores": "the weighted sums [G] of the rewards before mixing and shaping, floats or None",
        "parts": "G dicts, one for each rollout: the value of each reward by its name",
        "samples": "the Samples of the group",
        "trajectories": "the Trajectories [G] of the group",
        "step": "the step that the group is for, from 0",
    },
    "advantages": {
        "rewards": "[G] the rewards of the group after shaping; with `batch`: [N] of the whole batch",
        "lengths": "[G] sampled tokens of each rollout",
        "turn_rewards": "G lists: the reward of each turn; they add up to the reward; with `batch`: N lists",
        "batch": "None; naming it means one call for the whole batch, not one for each group",
        "turn_index": "[T] the turn of each token, from 0 (with `batch`)",
        "values": "[T] the critic's predictions (with `batch`)",
        "token_rewards": "[T] rewards of single tokens, such as the KL penalty of k1_reward (with `batch`)",
        "ref_logprobs": "[T] log-probabilities under the reference policy (with `batch`)",
        "teacher_logprobs": "[T] log-probabilities under the teacher (with `batch`)",
        "rollout_logprobs": "[T] log-probabilities as the engine sampled them (with `batch`)",
        **{name: f"{meaning} (with `batch`)" for name, meaning in _BATCH_INDEX.items()},
    },
    "losses": _LOSS,
    "kl": {
        name: _LOSS[name] for name in ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "mask", "step")
    },
    "references": {
        "reference": "list of tensors, which the rule changes in place: the reference's copy of every trained tensor",
        "policy": "list of the trained tensors, read-only, in the same order",
        "adapters": "the same list as `reference`; a rule that names it needs LoRA",
        "version": "the number of optimizer steps so far; 0 when the run begins",
    },
    "corrections": {
        "old_logprobs": "[T] log-probabilities under the trainer's policy before this step",
        "rollout_logprobs": "[T] log-probabilities as the engine sampled them",
        **_BATCH_INDEX,
        "step": "the optimizer step, from 0",
    },
    "aggregations": {
        "masks": "R lists [L]: the weight of each token of each row; 0: not trained on",
        "rollout_index": "[R] the rollout of each row",
        "group_index": "[R] the prompt of each row",
        "pair_index": "[R] the pair of each row; -1: no pair",
        "max_tokens": "the most tokens that the model may sample in an episode, or None",
    },
    "mixers": {
        "parts": "[J, P] float64: P rewards for each of the group's J judged rollouts",
        "weights": "[P] the weights of the rewards",
        **_STEP,
    },
    "shapings": {
        "rewards": "[J] float64: rewards of the group's judged rollouts",
        "lengths": "[J] sampled tokens of each rollout",
        "truncated": "[J] bool: the token limit or the context length cut the rollout off",
        "max_tokens": "the most tokens that the model may sample in an episode, or None",
        **_STEP,
    },
    "selectors": _TRAINABLE,
    "pairings": _TRAINABLE,
    "training": {
        "model": "the name or path of the model",
        "seed": "the run's seed",
        "steps": "the planned number of optimizer steps",
        "lr": "the learning rate",
        "lora_rank": "the rank of LoRA adapters; 0: all weights are trained",
        "lora_roles": "the names of the roles with a LoRA adapter of their own; empty: there is one policy",
        "tokens_per_microbatch": "the most tokens in one forward pass",
        "algorithms": "a dict from name to Algorithm",
        "auxiliary_models": "an AuxiliaryModels: reference policy, critic and teacher; None: the run has none",
        "companions": "the older name of auxiliary_models",
        "make_optimizer": "a function of `params` and `lr` that returns the chosen optimizer; None: none is chosen",
        "config": "the run's resolved settings as TOML, from which another rank builds the same run",
    },
    "tool_parsers": {
        "text": "the text of a reply, without its thinking and without the token that ends the turn",
        "tools": "list of the offered tools, each the JSON schema of a function",
    },
    "optimizers": {
        "params": "list of parameter groups, each a dict with `params` (a list of parameters) and `lr`",
        "lr": "the learning rate; each step multiplies that of each group by the schedule's factor",
    },
    "sandboxes": {"concurrency": "the number of episodes that run at the same time, each with at most one sandbox"},
    "workers": {
        "environment": "the name of the environment, which the workers find by this name where they run",
        "count": "the number of workers",
        "options": "the limits of a worker's process, as `rollouts.env.workers.process.Options`",
    },
    "inference": {
        "model": "the name or path of the model",
        "training": "the training backend; None: nothing is trained",
        "seed": "the run's seed",
        "temperature": "the sampling temperature of the run",
        "folder": "the run's folder, for logs; it may not exist yet",
        "concurrency": "the number of episodes that run at the same time",
        "lora_rank": "the rank of LoRA adapters; 0: all weights are trained",
        "lora_roles": "the names of the roles with a LoRA adapter of their own; empty: there is one policy",
        "pinned": "whether training goes on while the engine serves weights of one step, so it needs its own copy",
    },
    "datasets": {
        "source": "what `--data` names, as text, without the name of the loader; may be empty",
        "streaming": "whether the rows are read while the run goes on",
    },
    "loggers": {
        "folder": "the run's folder",
        "settings": "the run's resolved settings",
        "first_step": "the first step of this process, from 0; above 0 in a resumed run",
    },
}
"""The inputs by kind and name, each with its meaning. `metrics` are the `@metric` methods of an environment."""

GROUP_REWARD = ("tasks", "trajectories", "groups")
"""A reward that names one of these is a reward of whole groups."""

_GROUP_ADVANTAGE = ("lengths",)


def mixing_fault(kind: str, requests: Sequence[str]) -> str:
    """Why these inputs cannot be named together; empty if they can.

    >>> mixing_fault("rewards", ["trajectory", "env"])
    ''
    """
    if kind == "rewards":
        group = [name for name in requests if name in GROUP_REWARD]
        single = [name for name in requests if name not in GROUP_REWARD]
        if group and single:
            return (
                f"it names {quoted(single)} of one episode and {quoted(group)} of a whole group\n"
                f"name some of task, trajectory, env, turn; or, for a whole group, some of tasks, trajectories"
            )
        if "groups" in group and len(group) > 1:
            others = quoted([name for name in group if name != "groups"])
            return (
                f"it names {others} of one group and 'groups' of several\nname groups alone: a Trajectory has its task"
            )
    if kind == "advantages":
        both = ("rewards", "turn_rewards", "batch")
        batch_only = [name for name in requests if name not in (*both, *_GROUP_ADVANTAGE)]
        group_only = [name for name in requests if name in _GROUP_ADVANTAGE]
        if "batch" in requests and group_only:
            return (
                f"it names 'batch' and {quoted(group_only)}, but only a group has {quoted(group_only)}\n"
                f"without `batch` it is called for each group, and may name rewards, lengths, turn_rewards"
            )
        if "batch" not in requests and batch_only:
            return (
                f"it names {quoted(batch_only)}, but not 'batch', and only the whole batch has {quoted(batch_only)}\n"
                f"name `batch` too; it is then called once, with rewards [N] and token inputs [T]"
            )
    return ""


def quoted(names: Sequence[str]) -> str:
    """The names in quotes, separated by commas."""
    return ", ".join(repr(name) for name in names)
