"""When a batch forms. The trio side of the embedded engine; no torch here.

A wave is everything that waits at the moment when every open session waits in `generate` (or has closed). That
moment, and the wave's order, follow from what the episodes did, never from the order in which trio runs their tasks.
A request without an open session needs nobody: it runs at the next scheduling point with the others that wait then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio

from rollouts.errors import InferenceError
from rollouts.inference.base import GenerateRequest, Generation

__all__ = ["Ticket", "WaveBook"]


class Ticket:
    """One request and whoever waits for it. `row` is what the torch thread decodes, once that has begun."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.launched = False
        self.row: Any = None
        self._launch_callback: Callable[[], None] | None = None
        self._done = trio.Event()
        self._result: Generation | None = None
        self._error: Exception | None = None

    @property
    def sort_key(self) -> tuple[tuple[int, ...], int, list[int]]:
        """The order within a wave: (group, rollout, turn), then what tells requests without an order apart."""
        return self.request.order, self.request.seed, self.request.tokens

    def launch(self, row: Any) -> None:
        """From now on the torch thread has it, as `row`."""
        self.row = row
        if self._launch_callback is not None:
            self._launch_callback()

    def on_launch(self, callback: Callable[[], None]) -> None:
        """Call back when the wave begins; at once if it has."""
        self._launch_callback = callback
        if self.row is not None:
            callback()

    def resolve(self, result: Generation | None, error: Exception | None = None) -> None:
        """Wake the waiter. Called in trio's thread; what comes after the first is dropped."""
        if not self._done.is_set():
            self._result, self._error = result, error
            self._done.set()

    def abandon(self) -> None:
        """Nobody waits any more: the row leaves its batch at the next step."""
        if self.row is not None:
            self.row.abandoned = True

    async def wait(self) -> Generation:
        """The result. Raises InferenceError."""
        await self._done.wait()
        if self._error is not None:
            raise self._error
        assert self._result is not None, "a resolved ticket has a result or an error"
        return self._result


class WaveBook:
    """Which sessions are open and who waits. Every method is synchronous and runs in trio's thread."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[int, ...]] = {}
        self._waiting: dict[str, list[Ticket]] = {}
        self._loose: list[Ticket] = []
        self._launched: dict[str, list[Ticket]] = {}  # of sessions, until their waiters are done with them
        self._opened_count = 0

    @property
    def open_sessions(self) -> int:
        """How many sessions are open."""
        return len(self._open)

    def open(self, order: tuple[int, ...]) -> str:
        """A new session's name."""
        self._opened_count += 1
        session = f"{'.'.join(map(str, order)) or 'session'}#{self._opened_count}"
        self._open[session] = order
        return session

    def close(self, session: str) -> None:
        """Forget the session; requests of it that still wait get an InferenceError. Closing twice is harmless."""
        self._open.pop(session, None)
        for ticket in self._waiting.pop(session, []):
            ticket.resolve(None, InferenceError(f"session {session} was closed while it waited for a reply"))

    def add(self, ticket: Ticket) -> bool:
        """Queue it; True if it belongs to an open session, and so waits for the others."""
        session = ticket.request.session
        if session is not None and session in self._open:
            self._waiting.setdefault(session, []).append(ticket)
            return True
        self._loose.append(ticket)
        return False

    def remove(self, ticket: Ticket) -> None:
        """Its waiter was cancelled. The session, while it stays open, counts as one that does not wait."""
        ticket.abandon()
        session = ticket.request.session
        if ticket in self._loose:
            self._loose.remove(ticket)
        if session is not None:
            _drop(self._waiting, session, ticket)

    def done(self, ticket: Ticket) -> None:
        """Its waiter goes on, whatever came of it: nobody will abort it any more."""
        session = ticket.request.session
        if session is not None:
            _drop(self._launched, session, ticket)

    def abort(self, session: str) -> None:
        """Give back what the session waits for: rows that decode leave at the next step, others have no tokens."""
        for ticket in self._waiting.pop(session, []):
            ticket.resolve(Generation([], [], "abort", []))
        for ticket in self._launched.get(session, []):
            ticket.abandon()

    def take_wave(self) -> list[Ticket]:
        """Everyone who waits, in order, if every open session does; else nobody."""
        if not self._waiting or len(self._waiting) < len(self._open):
            return []
        tickets = [ticket for waiting in self._waiting.values() for ticket in waiting]
        self._waiting.clear()
        return self._launch(tickets)

    def take_loose(self) -> list[Ticket]:
        """Everyone who waits without a session, in order."""
        tickets, self._loose = self._loose, []
        return self._launch(tickets)

    def missing(self) -> list[str]:
        """The open sessions that do not wait: those that hold up the wave."""
        return sorted(session for session in self._open if session not in self._waiting)

    def _launch(self, tickets: list[Ticket]) -> list[Ticket]:
        for ticket in tickets:
            ticket.launched = True
            if ticket.request.session is not None:
                self._launched.setdefault(ticket.request.session, []).append(ticket)
        return sorted(tickets, key=lambda ticket: ticket.sort_key)


def _drop(tickets: dict[str, list[Ticket]], session: str, ticket: Ticket) -> None:
    """Take a ticket out of its session's, if it is there."""
    if ticket in tickets.get(session, []):
        tickets[session].remove(ticket)
        if not tickets[session]:
            del tickets[session]
