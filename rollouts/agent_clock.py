"""EpisodeClock: the deadlines of one episode, which stand still while the episode does.

An episode that is carried over to the next step waits while the model is trained; that time is nobody's fault. Whoever
carries it over calls `pause` and `resume`. What is left out: deadlines of an author's single calls (`rollouts.env`),
which run in threads that nobody can hold up.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import trio

__all__ = ["EpisodeClock"]


class EpisodeClock:
    """Seconds of one episode, pauses left out; to be used within trio. `begin` starts it, and starts it anew."""

    def __init__(self) -> None:
        self._begun: float | None = None
        self._paused_at: float | None = None
        self._paused_seconds = 0.0
        self._scopes: dict[trio.CancelScope, float] = {}  # each open deadline, as `elapsed` counts

    @property
    def elapsed(self) -> float:
        """Seconds since `begin`, pauses left out; 0.0 before."""
        if self._begun is None:
            return 0.0
        now = trio.current_time() if self._paused_at is None else self._paused_at
        return now - self._begun - self._paused_seconds

    @property
    def is_paused(self) -> bool:
        """Whether it stands still."""
        return self._paused_at is not None

    def begin(self) -> None:
        """Count from now."""
        assert not self._scopes, "a clock begins before its deadlines do"
        self._begun = trio.current_time()
        self._paused_at = self._begun if self.is_paused else None
        self._paused_seconds = 0.0

    def pause(self) -> None:
        """Stand still: no deadline passes until `resume`. Pausing twice is harmless."""
        if self._paused_at is None:
            self._paused_at = trio.current_time()
            for scope in self._scopes:
                scope.deadline = math.inf

    def resume(self) -> None:
        """Go on; every deadline has as much time left as it had. Harmless where it was not paused."""
        if self._paused_at is None:
            return
        if self._begun is not None:
            self._paused_seconds += trio.current_time() - self._paused_at
        self._paused_at = None
        for scope, due in self._scopes.items():
            scope.deadline = self._time_at(due)

    @contextlib.contextmanager
    def move_on_after(self, seconds: float) -> Iterator[trio.CancelScope]:
        """As `trio.move_on_after`, in this clock's seconds. Infinite: the scope is not entered, which costs time."""
        if seconds == math.inf:
            yield trio.CancelScope()
            return
        due = self.elapsed + seconds
        with trio.CancelScope(deadline=math.inf if self.is_paused else self._time_at(due)) as scope:
            self._scopes[scope] = due
            try:
                yield scope
            finally:
                del self._scopes[scope]

    def _time_at(self, elapsed: float) -> float:
        """The moment of trio's clock at which this one, unless it is paused, will have counted so far."""
        return trio.current_time() - self.elapsed + elapsed
