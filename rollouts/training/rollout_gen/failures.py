"""What becomes of failed episodes: which are played again, how many a run may have, and the numbers that name them.

    failures = Failures(FailurePolicy(retries=1, max_failures=0.5))
    outcome = await failures.patient(play)(job, session, inference)
    kept = failures.settle(outcome, job.order)  # None: play the same job again; RunError: the budget is spent

A failure here is one of the infrastructure (`Status`): it says nothing about the policy. What was stopped on purpose
(ABORTED) is none. Played again is what may well go right another time: an engine that failed for the moment, an
environment that could not be built or set up. A deadline that passed is not: it would mostly pass again, at its full
price. Left out: putting jobs in a queue (`pool`), and a step in which nothing could be judged (`groups.check_judged`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import trio

from rollouts.agent import Episode
from rollouts.errors import RunError
from rollouts.types import Sample, Status

__all__ = ["WINDOW", "FailureBudget", "FailurePolicy", "FailureStatistics", "Failures", "failure_metrics", "is_failure"]

WINDOW = 200  # the episodes that a share is of: the last ones
REASONS_MAX = 1000  # reasons that are told apart; words may hold addresses and numbers
REASON_CHARACTERS = 300
TOLD = 3


class FailurePolicy(NamedTuple):
    """`retries`: how often one episode is played again. `max_failures`: the run stops at so many failed episodes
    (int), or when more than this share of the last `WINDOW` failed (0 < float < 1); None: never for that reason.
    `pause_seconds`: before an episode that the engine failed is played again, twice as long each time.
    """

    retries: int = 1
    max_failures: int | float | None = None
    pause_seconds: float = 1.0


class FailureStatistics(NamedTuple):
    """Episodes that were settled, those of them that failed (by status), and how often one was played again."""

    settled: int
    failed: dict[str, int]
    retried: int


def is_failure(status: Status) -> bool:
    """Whether the infrastructure failed it, and not on purpose."""
    return status.is_infrastructure and status is not Status.ABORTED


def failure_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """`rollout/fail/<status>`: the share of these episodes that ended so, for each status that one did."""
    counts = Counter(episode.status.value for episode in episodes if episode.status.is_infrastructure)
    return {f"rollout/fail/{status}": count / len(episodes) for status, count in sorted(counts.items())}


class FailureBudget:
    """How many episodes have failed, why, and whether that is too many. Kept for one run of the program."""

    def __init__(self, max_failures: int | float | None = None) -> None:
        self.settled = 0
        self.by_status: Counter[str] = Counter()
        self._max = max_failures
        self._reasons: Counter[str] = Counter()
        self._last: deque[bool] = deque(maxlen=WINDOW)

    def add(self, status: Status, error: str | None) -> None:
        """Count a rollout as it is in the end, and why it failed. Raises RunError where the budget is spent."""
        failed = is_failure(status)
        self.settled += 1
        self._last.append(failed)
        if not failed:
            return
        self.by_status[status.value] += 1
        lines = (error or "").splitlines() or ["no reason given"]
        reason = f"{status.value}: {lines[0][:REASON_CHARACTERS]}"
        self._reasons[reason if reason in self._reasons or len(self._reasons) < REASONS_MAX else "other reasons"] += 1
        if self._is_spent():
            raise RunError(self._words())

    def _is_spent(self) -> bool:
        if self._max is None:
            return False
        if isinstance(self._max, int):
            return self.by_status.total() >= self._max
        return sum(self._last) > self._max * WINDOW

    def _words(self) -> str:
        failed = self.by_status.total()
        if isinstance(self._max, int):
            head = f"{failed} of {self.settled} rollouts failed, and --max-failures is {self._max}"
        else:
            head = (
                f"{sum(self._last)} of the last {len(self._last)} rollouts failed, and --max-failures is {self._max:g} "
                f"of the last {WINDOW}"
            )
        statuses = ", ".join(f"{status} {count}" for status, count in self.by_status.most_common())
        told = self._reasons.most_common(TOLD)
        tally = "\n".join(f"  {count} x {reason}" for reason, count in told)
        rest = failed - sum(count for _, count in told)
        return f"{head}\nby status: {statuses}\n{tally}" + (f"\n  {rest} x other reasons" if rest else "")


class Failures:
    """What becomes of each episode of one pool: played again, or kept and counted.

    Its state is how often each unfinished episode was played, and the budget, which several may share (`beside`).
    """

    def __init__(self, policy: FailurePolicy | None = None, budget: FailureBudget | None = None) -> None:
        self.policy = policy or FailurePolicy()
        self.budget = budget or FailureBudget(self.policy.max_failures)
        self._attempts: dict[tuple[int, ...], list[Status]] = {}  # of those that are to be played again
        self._retried = 0

    def beside(self) -> Failures:
        """For other episodes whose orders may be the same (an evaluation's), on the same budget."""
        return Failures(self.policy, self.budget)

    @property
    def statistics(self) -> FailureStatistics:
        """A frozen count of what happened so far; the budget's numbers are of all that share it."""
        return FailureStatistics(self.budget.settled, dict(self.budget.by_status), self._retried)

    def settle(self, outcome: Episode | Sequence[Sample], order: tuple[int, ...]) -> Any:
        """What to keep: the episode, or the samples of a `generate_fn`; None where the job of this `order` is to be
        played again, with the same order and seed: an episode that may be, or samples of which all have failed.

        An episode that was played again says so in its trajectory's metrics: `retried`, and `retried/<status>` for each
        time; a sample in its metadata. Raises RunError where too many have failed.
        """
        statuses = [outcome.status] if isinstance(outcome, Episode) else [sample.status for sample in outcome]
        may_retry = outcome.may_retry if isinstance(outcome, Episode) else Status.TIMEOUT not in statuses
        earlier = self._attempts.setdefault(order, [])
        if may_retry and all(map(is_failure, statuses)) and len(earlier) < self.policy.retries:
            earlier.append(statuses[0])
            self._retried += 1
            return None
        del self._attempts[order]
        if isinstance(outcome, Episode):
            kept = _stamped(outcome, earlier) if earlier else outcome
            self.budget.add(kept.status, kept.trajectory.error)
            return kept
        for sample in outcome:
            self.budget.add(sample.status, sample.metadata.get("error"))
        counts = _counts(earlier) if earlier else {}
        return [replace(sample, metadata=sample.metadata | counts) for sample in outcome] if counts else outcome

    def pause_before(self, order: tuple[int, ...]) -> float:
        """Seconds to wait before this episode is played: an engine that is away needs time to come back."""
        earlier = self._attempts.get(order)
        if not earlier or earlier[-1] is not Status.INFERENCE_ERROR:
            return 0.0
        return self.policy.pause_seconds * 2.0 ** (len(earlier) - 1)

    def patient(self, play: Callable[[Any, str, Any], Awaitable[Any]]) -> Callable[[Any, str, Any], Awaitable[Any]]:
        """The same `Play`, which waits first where `pause_before` says so. An engine in this process is not waited for:
        it cannot be away, and all others would wait too.
        """

        async def play_later(job: Any, session: str, inference: Any) -> Any:
            seconds = 0.0 if getattr(inference, "in_process", False) else self.pause_before(job.order)
            if seconds:
                await trio.sleep(seconds)
            return await play(job, session, inference)

        return play_later


def _counts(earlier: Sequence[Status]) -> dict[str, float]:
    return {"retried": float(len(earlier))} | {f"retried/{s.value}": float(n) for s, n in Counter(earlier).items()}


def _stamped(episode: Episode, earlier: Sequence[Status]) -> Episode:
    counts = _counts(earlier)
    trajectory = msgspec.structs.replace(episode.trajectory, metrics=episode.trajectory.metrics | counts)
    trajectories = [trajectory if each is episode.trajectory else each for each in episode.trajectories]
    return episode._replace(trajectories=trajectories, metrics=episode.metrics | counts)
