"""Starts batches of requests. This is the trio side of the embedded engine; it does not import torch.

A batch starts when every open session either waits in `generate` or has closed. It contains all waiting requests. Each
method that changes a session or a request then looks whether a batch is ready (`_start_ready`); nothing else starts
one. When a batch starts and how it is sorted depends on the episodes alone, never on the order in which trio runs
tasks. A request without an open session does not wait for the others: it starts at the next scheduling point.

No batch waits for a released session, whose episode is played by a program with a pace of its own. If all open sessions
are released, their waiting requests start when no other batch runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import trio

from rollouts.errors import InferenceError
from rollouts.inference.base import GenerateRequest, Generation


@dataclass
class InferenceStatistics:
    """Counts since the engine was created, and the number of sessions that are open now.

    `prefilled` counts the context tokens that were computed, `reused` those from sessions' caches, `sampled` the
    sampled tokens.
    """

    batches: int = 0
    passes: int = 0
    prefilled: int = 0
    reused: int = 0
    sampled: int = 0
    open_sessions: int = 0


@dataclass(eq=False, repr=False)
class PendingRequest:
    """One request, and the task that waits for it.

    `row` is what the torch thread decodes; it is set when the batch starts. `wait_scope` limits the wait until the
    batch starts. `done` is set together with the answer: a generation, or the error to raise.
    """

    request: GenerateRequest
    row: Any = None
    wait_scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    done: trio.Event = field(default_factory=trio.Event)
    answer: Generation | InferenceError | None = None

    def resolve(self, answer: Generation | InferenceError) -> None:
        """Wake the waiting task. Called in trio's thread. Only the first answer counts."""
        if not self.done.is_set():
            self.answer = answer
            self.done.set()

    def abandon(self) -> None:
        """Remove the row from its batch at the next step."""
        if self.row is not None:
            self.row.abandoned = True


class BatchScheduler:
    """Tracks the open `sessions` and the waiting requests. Every method is synchronous and runs in trio's thread.

    `start` is called with the requests of a batch, in order.
    """

    def __init__(self, start: Callable[[list[PendingRequest]], None]) -> None:
        self.sessions: set[str] = set()
        self._start = start
        self._released: set[str] = set()
        self._waiting: dict[str, list[PendingRequest]] = {}  # by open session
        self._sessionless: list[PendingRequest] = []  # requests without an open session
        self._running: set[PendingRequest] = set()  # until their waiting tasks continue
        self._opened_count = 0

    def open(self, order: tuple[int, ...]) -> str:
        """A new session's name."""
        self._opened_count += 1
        session = f"{'.'.join(map(str, order)) or 'session'}#{self._opened_count}"
        self.sessions.add(session)
        return session

    def release(self, session: str) -> None:
        """From now on, no batch waits for this session."""
        if session in self.sessions:
            self._released.add(session)
        self._start_ready()

    def close(self, session: str) -> None:
        """Forget the session. Its waiting requests get an InferenceError. It is safe to close a session twice."""
        self.sessions.discard(session)
        self._released.discard(session)
        for pending in self._waiting.pop(session, []):
            pending.resolve(InferenceError(f"session {session} was closed while it waited for a reply"))
        self._start_ready()

    def add(self, pending: PendingRequest) -> bool:
        """Queue a request. Returns whether it belongs to an open session, and so waits for the other sessions. If not,
        call `start_sessionless` at the next scheduling point.
        """
        session = pending.request.session
        if session is None or session not in self.sessions:
            self._sessionless.append(pending)
            return False
        self._waiting.setdefault(session, []).append(pending)
        self._start_ready()
        return True

    def remove(self, pending: PendingRequest) -> None:
        """Remove a request that was answered or cancelled. Its session has no waiting request any more."""
        pending.abandon()
        self._running.discard(pending)
        if pending in self._sessionless:
            self._sessionless.remove(pending)
        session = pending.request.session or ""
        if pending in self._waiting.get(session, []):
            self._waiting[session].remove(pending)
            if not self._waiting[session]:
                del self._waiting[session]
        self._start_ready()

    def abort(self, session: str) -> None:
        """End the session's requests. Decoding rows leave at the next step; requests that wait return no tokens."""
        for pending in self._waiting.pop(session, []):
            pending.resolve(Generation([], [], "abort", []))
        for pending in self._running:
            if pending.request.session == session:
                pending.abandon()

    def start_sessionless(self) -> None:
        """Start all waiting requests without an open session."""
        requests, self._sessionless = self._sessionless, []
        self._begin(requests)

    def missing(self) -> list[str]:
        """The open sessions without a waiting request. The batch waits for them."""
        return sorted(self.sessions - self._waiting.keys() - self._released)

    def _start_ready(self) -> None:
        """Start all waiting requests, unless an open session may still send one. A released session is not waited for,
        but if all are released, their requests wait for the running batch.
        """
        if len(self._waiting) < len(self.sessions):
            if self.missing() or (self._running and len(self._released) == len(self.sessions)):
                return
        requests = [pending for waiting in self._waiting.values() for pending in waiting]
        self._waiting.clear()
        self._begin(requests)

    def _begin(self, requests: list[PendingRequest]) -> None:
        if requests:
            self._running.update(requests)
            # By (group, rollout, turn); requests without an order are sorted by seed and tokens.
            self._start(sorted(requests, key=lambda each: (each.request.order, each.request.seed, each.request.tokens)))
