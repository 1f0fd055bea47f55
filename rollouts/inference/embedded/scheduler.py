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

    waves: int = 0
    passes: int = 0
    prefilled: int = 0
    reused: int = 0
    sampled: int = 0
    open_sessions: int = 0


@dataclass(eq=False, repr=False)
class Ticket:
    """One request and its waiter.

    `row` is what the torch thread decodes, once its wave is launched; `patience` bounds the time until then. `done` is
    set with the answer: a generation, or the error to raise.
    """

    request: GenerateRequest
    row: Any = None
    patience: trio.CancelScope = field(default_factory=trio.CancelScope)
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


class Scheduler:
    """Which `sessions` are open and which requests wait. Every method is synchronous and runs in trio's thread."""

    def __init__(self) -> None:
        self.sessions: set[str] = set()
        self._waiting: dict[str, list[Ticket]] = {}  # by open session
        self._loose: list[Ticket] = []  # of no open session
        self._launched: set[Ticket] = set()  # until their waiters have gone on
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
        for ticket in self._waiting.pop(session, []):
            ticket.resolve(InferenceError(f"session {session} was closed while it waited for a reply"))

    def add(self, ticket: Ticket) -> bool:
        """Queue it; True if it belongs to an open session, and so waits for the others."""
        session = ticket.request.session
        if session is not None and session in self.sessions:
            self._waiting.setdefault(session, []).append(ticket)
            return True
        self._loose.append(ticket)
        return False

    def remove(self, ticket: Ticket) -> None:
        """Its waiter has its answer, or was cancelled: then the session, while it stays open, does not wait."""
        ticket.abandon()
        self._launched.discard(ticket)
        if ticket in self._loose:
            self._loose.remove(ticket)
        session = ticket.request.session or ""
        if ticket in self._waiting.get(session, []):
            self._waiting[session].remove(ticket)
            if not self._waiting[session]:
                del self._waiting[session]

    def abort(self, session: str) -> None:
        """Give back what the session waits for: rows that decode leave at the next step, others have no tokens."""
        for ticket in self._waiting.pop(session, []):
            ticket.resolve(Generation([], [], "abort", []))
        for ticket in self._launched:
            if ticket.request.session == session:
                ticket.abandon()

    def take_wave(self) -> list[Ticket]:
        """All that wait, in order, if every open session does; else none."""
        if len(self._waiting) < len(self.sessions):
            return []
        tickets = [ticket for waiting in self._waiting.values() for ticket in waiting]
        self._waiting.clear()
        return self._take(tickets)

    def take_loose(self) -> list[Ticket]:
        """All that wait without a session, in order."""
        tickets, self._loose = self._loose, []
        return self._take(tickets)

    def missing(self) -> list[str]:
        """The open sessions that do not wait: those that hold up the wave."""
        return sorted(self.sessions - self._waiting.keys())

    def _take(self, tickets: list[Ticket]) -> list[Ticket]:
        self._launched.update(tickets)
        # (group, rollout, turn), then what tells requests without an order apart.
        return sorted(tickets, key=lambda each: (each.request.order, each.request.seed, each.request.tokens))
