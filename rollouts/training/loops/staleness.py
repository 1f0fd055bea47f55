"""How old the weights were that sampled what a step trains on: measured in training steps, and bounded.

A token of lag 0 was sampled by the weights that the step begins with, one of lag 2 by those of two steps before. Pure
functions over the versions with which the steps began. Left out: who samples ahead (`rollout_gen.ahead`), and the
weight that older tokens get (`algorithms.corrections`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from rollouts.types import Sample

__all__ = ["Fresh", "drop_stale", "lag_of"]


class Fresh(NamedTuple):
    """The samples without what is too old, and the `staleness/` metrics: mean and largest lag of the live tokens that
    are left, and how many were dropped. `cut` are the rollouts that some were dropped of, `emptied` those of which
    nothing live is left, by `rollout_index`.
    """

    samples: list[Sample]
    metrics: dict[str, float]
    cut: frozenset[int | None] = frozenset()
    emptied: frozenset[int | None] = frozenset()


def lag_of(version: int, begun_with: Sequence[int]) -> int:
    """How many steps ago a version was last the newest. `begun_with` are the versions of the last steps' beginnings,
    the present one last; a version before all of them has the lag of one step more.

    >>> [lag_of(version, [3, 4, 6]) for version in (6, 5, 4, 3, 2)]
    [0, 1, 1, 2, 3]
    """
    return max(0, len(begun_with) - bisect_right(begun_with, version))


def drop_stale(samples: Sequence[Sample], begun_with: Sequence[int], lag_max: int | None) -> Fresh:
    """Mask the live tokens whose lag is above `lag_max` (None: no bound), in copies; rewards stay in their group's
    baseline. Tokens whose version nobody knows (-1) have no lag.
    """
    fresh, lags, dropped, cut = [], list[int](), 0, set[int | None]()
    for sample in samples:
        versions = sample.policy_versions or [-1] * len(sample.tokens)
        known = {version: lag_of(version, begun_with) for version in set(versions) if version >= 0}
        live = [
            known[version] if mask > 0 and version in known else None
            for version, mask in zip(versions, sample.loss_mask, strict=True)
        ]
        stale = [] if lag_max is None else [at for at, lag in enumerate(live) if lag is not None and lag > lag_max]
        if stale:
            mask = list(sample.loss_mask)
            for at in stale:
                mask[at] = 0.0
            sample, dropped = replace(sample, loss_mask=mask), dropped + len(stale)
            cut.add(sample.rollout_index)
        lags += [lag for lag in live if lag is not None and (lag_max is None or lag <= lag_max)]
        fresh.append(sample)
    metrics = {
        "staleness/mean": sum(lags) / len(lags) if lags else 0.0,
        "staleness/max": float(max(lags, default=0)),
        "staleness/dropped": float(dropped),
    }
    live_ones = {sample.rollout_index for sample in fresh if any(sample.loss_mask)}
    return Fresh(fresh, metrics, frozenset(cut), frozenset(cut - live_ones))
