"""The metrics of a step by environment, where a run has several. What they are of all together stands in `groups`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollouts.training.rollout_gen.groups import Group, reward_metrics

__all__ = ["environment_metrics"]


def environment_metrics(groups: Sequence[Group], epochs: Mapping[str, int]) -> dict[str, float]:
    """`env/<alias>/...` for every environment that had a group in this step; nothing where there is only one.

    `reward` (the mean), `reward_part/<name>`, `metric/<name>`, `share` (of the step's groups), `kept_frac`,
    `infra_fail_frac` and `epoch`.
    """
    metrics: dict[str, float] = {}
    for alias in sorted({group.task.env for group in groups} - {""}):
        own = [group for group in groups if group.task.env == alias]
        episodes = [episode for group in own for episode in group.episodes]
        rewards = reward_metrics(episodes)
        values = {
            "share": len(own) / len(groups),
            "kept_frac": sum(group.dropped is None for group in own) / len(own),
            "infra_fail_frac": sum(episode.status.is_infrastructure for episode in episodes) / len(episodes),
            "epoch": float(epochs.get(alias, 0)),
        }
        if "reward/mean" in rewards:
            values["reward"] = rewards["reward/mean"]
        values |= {name: value for name, value in rewards.items() if not name.startswith("reward/")}
        metrics |= {f"env/{alias}/{name}": value for name, value in values.items()}
    return metrics
