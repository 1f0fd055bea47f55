"""When a batch forms. The trio side of the embedded engine; no torch here.

A wave is everything that waits at the moment when every open session waits in `generate` (or has closed). That
moment, and the wave's order, follow from what the episodes did, never from the order in which trio runs their tasks.
A request without an open session needs nobody: it runs at the next scheduling point with the others that wait then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import trio

from rollouts.errors import InferenceError
from rollouts.inference.base import GenerateRequest, Generation


@dataclass
class InferenceStatistics:
    """Counts since the engine was made: waves and forward passes, tokens prefilled, reused from sessions' caches, and
    sampled; and how many sessions are open now.
    """

    batches: int = 0
    passes: int = 0
    prefilled: int = 0
    reused: int = 0
    sampled: int = 0
    open_sessions: int = 0


@dataclass(eq=False, repr=False)
class PendingRequest:
    """One request and its waiter.

    `row` is what the torch thread decodes; it is set when the batch starts. `wait_scope` bounds the wait until then.
    `done` is set together with the answer: a generation, or the error to raise.
    """

    request: GenerateRequest
    row: Any = None
    wait_scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    done: trio.Event = field(default_factory=trio.Event)
    answer: Generation | InferenceError | None = None

    def resolve(self, answer: Generation | InferenceError) -> None:
        """Wake the waiter. Called in trio's thread; what comes after the first is dropped."""
        if not self.done.is_set():
            self.answer = answer
            self.done.set()

    def abandon(self) -> None:
        """No waiter is left: the row leaves its batch at the next step."""
        if self.row is not None:
            self.row.abandoned = True


class BatchScheduler:
    """Which `sessions` are open and which requests wait. Every method is synchronous and runs in trio's thread."""

    def __init__(self) -> None:
        self.sessions: set[str] = set()
        self._waiting: dict[str, list[PendingRequest]] = {}  # by open session
        self._sessionless: list[PendingRequest] = []  # of no open session
        self._running: set[PendingRequest] = set()  # until their waiters have gone on
        self._opened_count = 0

    def open(self, order: tuple[int, ...]) -> str:
        """A new session's name."""
        self._opened_count += 1
        session = f"{'.'.join(map(str, order)) or 'session'}#{self._opened_count}"
        self.sessions.add(session)
        return session

    def close(self, session: str) -> None:
        """Forget the session; requests of it that still wait get an InferenceError. Closing twice is harmless."""
        self.sessions.discard(session)
        for pending in self._waiting.pop(session, []):
            pending.resolve(InferenceError(f"session {session} was closed while it waited for a reply"))

    def add(self, pending: PendingRequest) -> bool:
        """Queue it; True if it belongs to an open session, and so waits for the others."""
        session = pending.request.session
        if session is not None and session in self.sessions:
            self._waiting.setdefault(session, []).append(pending)
            return True
        self._sessionless.append(pending)
        return False

    def remove(self, pending: PendingRequest) -> None:
        """Its waiter has its answer, or was cancelled: then the session, while it stays open, does not wait."""
        pending.abandon()
        self._running.discard(pending)
        if pending in self._sessionless:
            self._sessionless.remove(pending)
        session = pending.request.session or ""
        if pending in self._waiting.get(session, []):
            self._waiting[session].remove(pending)
            if not self._waiting[session]:
                del self._waiting[session]

    def abort(self, session: str) -> None:
        """Give back what the session waits for: rows that decode leave at the next step, others have no tokens."""
        for pending in self._waiting.pop(session, []):
            pending.resolve(Generation([], [], "abort", []))
        for pending in self._running:
            if pending.request.session == session:
                pending.abandon()

    def take_batch(self) -> list[PendingRequest]:
        """All that wait, in order, if every open session does; else none."""
        if len(self._waiting) < len(self.sessions):
            return []
        requests = [pending for waiting in self._waiting.values() for pending in waiting]
        self._waiting.clear()
        return self._take(requests)

    def take_sessionless(self) -> list[PendingRequest]:
        """All that wait without a session, in order."""
        requests, self._sessionless = self._sessionless, []
        return self._take(requests)

    def missing(self) -> list[str]:
        """The open sessions that do not wait: those that hold up the wave."""
        return sorted(self.sessions - self._waiting.keys())

    def _take(self, requests: list[PendingRequest]) -> list[PendingRequest]:
        self._running.update(requests)
        # (group, rollout, turn), then what tells requests without an order apart.
        return sorted(requests, key=lambda each: (each.request.order, each.request.seed, each.request.tokens))
