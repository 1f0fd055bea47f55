"""Failed episodes: which ones are retried, and how many are allowed in a run.

    failures = Failures(FailurePolicy(retries=1, max_failures=0.5))
    kept = failures.settle(outcome, job.order)  # None: play the same job again; RunError: too many failures

A failure is an infrastructure failure (`Status`), which says nothing about the policy. An aborted episode is not a
failure. An episode is retried if a second attempt may succeed: the engine failed, or the environment could not be made
or set up. A timeout is not retried, because it would probably time out again. Not here: the queue of jobs (`pool`), and
a step without any judged rollout (`groups.check_judged`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from rollouts.errors import RunError
from rollouts.types import Episode, Sample, Status

WINDOW = 200  # if the limit is a fraction, it is a fraction of this many recent episodes
REASONS_MAX = 1000  # how many different reasons are counted; a message may contain addresses and numbers
REASON_CHARACTERS = 300
REASONS_SHOWN = 3


class FailurePolicy(NamedTuple):
    """Settings for failed episodes.

    Args:
        retries: how often one episode is retried
        max_failures: stop the run after this many failed episodes (int), or when more than this fraction of the last
            `WINDOW` episodes failed (0 < float < 1). None: no limit
        pause_seconds: wait before the retry after an engine failure; doubles each time
    """

    retries: int = 1
    max_failures: int | float | None = None
    pause_seconds: float = 1.0


def is_failure(status: Status) -> bool:
    """Whether this status is an infrastructure failure other than an aborted episode."""
    return status.is_infrastructure and status is not Status.ABORTED


class FailureBudget:
    """Counts failed episodes and their reasons, and ends the run if there are too many. A process needs only one."""

    def __init__(self, max_failures: int | float | None = None) -> None:
        self.settled = 0
        self.by_status: Counter[str] = Counter()
        self._max = max_failures
        self._reasons: Counter[str] = Counter()
        self._last: deque[bool] = deque(maxlen=WINDOW)

    def add(self, status: Status, error: str | None) -> None:
        """Count a rollout that will not be retried. Raises RunError if there are too many failures."""
        failed = is_failure(status)
        self.settled += 1
        self._last.append(failed)
        if not failed:
            return
        self.by_status[status.value] += 1
        lines = (error or "").splitlines() or ["no reason given"]
        reason = f"{status.value}: {lines[0][:REASON_CHARACTERS]}"
        self._reasons[reason if reason in self._reasons or len(self._reasons) < REASONS_MAX else "other reasons"] += 1
        total, of_last, limit = self.by_status.total(), sum(self._last), self._max
        if isinstance(limit, int) and total >= limit:
            share, allowed = f"{total} of {self.settled}", f"{limit}"
        elif isinstance(limit, float) and of_last > limit * WINDOW:
            share, allowed = f"{of_last} of the last {len(self._last)}", f"{limit:g} of the last {WINDOW}"
        else:
            return
        statuses = ", ".join(f"{status} {count}" for status, count in self.by_status.most_common())
        commonest = self._reasons.most_common(REASONS_SHOWN)
        words = f"{share} rollouts failed, and --max-failures is {allowed}".replace(" 1 rollouts", " 1 rollout")
        lines = [words, f"by status: {statuses}"]
        lines += [f"  {count} x {reason}" for reason, count in commonest]
        rest = total - sum(count for _, count in commonest)
        raise RunError("\n".join([*lines, f"  {rest} x other reasons"] if rest else lines))


class Failures:
    """For each failed episode of one pool: retry it, or keep and count it.

    `retried` is the number of retries so far. Several objects may share a `budget` (`beside`).
    """

    def __init__(self, policy: FailurePolicy | None = None, budget: FailureBudget | None = None) -> None:
        self.policy = policy or FailurePolicy()
        self.budget = budget or FailureBudget(self.policy.max_failures)
        self._attempts: dict[tuple[int, ...], list[Status]] = {}  # earlier failures of each unfinished episode
        self.retried = 0

    def beside(self) -> Failures:
        """A new object for other episodes (of an evaluation), which may have the same orders. It shares the budget."""
        return Failures(self.policy, self.budget)

    def settle(self, outcome: Episode | Sequence[Sample], order: tuple[int, ...]) -> Any:
        """Choose whether to keep the result of a job. Returns the result to keep, or None to play the job again.

        `outcome` is an episode, or the samples of a `generate_fn`, which are retried only if all of them failed. A
        retry has the same order and seed. The kept result has the number of retries in its metrics or metadata, as
        `retried` and `retried/<status>`. Raises RunError if there are too many failures.
        """
        if isinstance(outcome, Episode):
            results, may_retry = [(outcome.status, outcome.trajectory.error)], outcome.may_retry
        else:
            results = [(sample.status, sample.metadata.get("error")) for sample in outcome]
            may_retry = all(status is not Status.TIMEOUT for status, _ in results)
        earlier = self._attempts.setdefault(order, [])
        if may_retry and all(is_failure(status) for status, _ in results) and len(earlier) < self.policy.retries:
            earlier.append(results[0][0])
            self.retried += 1
            return None
        del self._attempts[order]
        for status, error in results:
            self.budget.add(status, error)
        if not earlier:
            return outcome
        counts = {"retried": float(len(earlier))}
        counts |= {f"retried/{status.value}": float(count) for status, count in Counter(earlier).items()}
        if not isinstance(outcome, Episode):
            return [replace(sample, metadata=sample.metadata | counts) for sample in outcome]
        trajectory = msgspec.structs.replace(outcome.trajectory, metrics=outcome.trajectory.metrics | counts)
        trajectories = [trajectory if each is outcome.trajectory else each for each in outcome.trajectories]
        return outcome._replace(trajectories=trajectories, metrics=outcome.metrics | counts)

    def pause_before(self, order: tuple[int, ...]) -> float:
        """Seconds to wait before this episode is played. A server that failed needs time to recover."""
        earlier = self._attempts.get(order)
        if not earlier or earlier[-1] is not Status.INFERENCE_ERROR:
            return 0.0
        return self.policy.pause_seconds * 2.0 ** (len(earlier) - 1)
