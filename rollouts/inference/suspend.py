"""Suspend an episode in the middle of a reply, and resume it later.

A `SuspendableEngine` wraps the engine for one episode. While the `TurnGate` is closed, the episode waits, and its clock
pauses. The tokens of an unfinished reply are kept. When the gate gives the episode a turn, the same reply continues:
the kept tokens become context, the token budget shrinks by their number, and the random numbers continue after them.
The episode receives one reply, in which every token has the version of the weights that sampled it. Not here: when the
gate opens (`training.rollout_gen.pool`).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import msgspec
import trio

from rollouts.inference.base import GenerateRequest, Generation, InferenceBackend, VersionSpan, WaitsForSessions

EMPTY = Generation([], [], "abort", [])


class SuspendedEpisode(msgspec.Struct):
    """An episode that waits in the middle of a reply, as plain data.

    `env` is the result of the environment's `state()`, and `model` that of `ChatModel.state_dict()`. `partial` is the
    unfinished reply. `seed` and `context_length` (in tokens) identify its request.
    """

    env: Any
    model: dict[str, Any]
    seed: int
    context_length: int
    partial: Generation


class TurnGate(Protocol):
    """Lets episodes generate or wait. Every method but `wait` is synchronous."""

    @property
    def is_closed(self) -> bool:
        """Whether all episodes must wait before their next request."""
        ...

    async def wait(self, engine: SuspendableEngine) -> None:
        """Wait for a turn. Afterwards `engine.has_turn` is true, and `engine.session` is a new open session."""
        ...

    def leave(self, engine: SuspendableEngine) -> None:
        """Note that the episode sends no more requests. Called once, before its session is closed."""
        ...


class EpisodeClock:
    """The deadlines of one episode, in seconds that exclude pauses. Use it within trio.

    `begin` starts or restarts the clock. It does not apply to the deadlines of single calls of an author's code
    (`rollouts.env`): their threads cannot pause. `began_at` and `replies` are in seconds of Unix time, pauses included;
    nothing is decided by them.
    """

    def __init__(self) -> None:
        self._zero: float | None = None  # time of trio's clock at 0 seconds; None: not begun
        self._paused_at: float | None = None  # time of trio's clock at the pause; None: not paused
        self._scopes: dict[trio.CancelScope, float] = {}  # each open deadline, in `elapsed` seconds
        self.began_at = 0.0
        self.replies: list[tuple[float, float]] = []  # when requests to the model began and ended

    @property
    def elapsed(self) -> float:
        """Seconds since `begin`, without pauses; 0.0 before `begin`."""
        if self._zero is None:
            return 0.0
        return (trio.current_time() if self._paused_at is None else self._paused_at) - self._zero

    @property
    def is_paused(self) -> bool:
        """Whether the clock is paused."""
        return self._paused_at is not None

    def begin(self) -> None:
        """Start to count from 0."""
        assert not self._scopes, "a clock begins before its deadlines do"
        self._zero = trio.current_time()
        self._paused_at = self._zero if self.is_paused else None
        self.began_at, self.replies = time.time(), []

    def pause(self) -> None:
        """Stop the clock, so that no deadline expires until `resume`. It is safe to pause twice."""
        if self._paused_at is None:
            self._paused_at = trio.current_time()
            for scope in self._scopes:
                scope.deadline = math.inf

    def resume(self) -> None:
        """Continue; every deadline has as much time left as before the pause. Does nothing if the clock runs."""
        if self._paused_at is None:
            return
        if self._zero is not None:
            self._zero += trio.current_time() - self._paused_at
        self._paused_at = None
        for scope, due in self._scopes.items():
            scope.deadline = trio.current_time() - self.elapsed + due

    @contextlib.contextmanager
    def move_on_after(self, seconds: float) -> Iterator[trio.CancelScope]:
        """Like `trio.move_on_after`, in seconds of this clock. Infinite seconds enter no scope, which saves time."""
        if seconds == math.inf:
            yield trio.CancelScope()
            return
        with trio.CancelScope(deadline=math.inf if self.is_paused else trio.current_time() + seconds) as scope:
            self._scopes[scope] = self.elapsed + seconds
            try:
                yield scope
            finally:
                del self._scopes[scope]


@dataclass(eq=False, repr=False)
class SuspendableEngine:
    """The shared engine (`backend`) for one episode, which can be suspended between tokens.

    `order` is (group, rollout). `session` is the backend's name for the episode, valid while `has_turn`. `clock` pauses
    while the episode waits at the gate. Without a `gate` the episode never waits. `resume_from` is the state that an
    earlier process saved. When the episode starts to wait, `snapshot` returns the states of environment and
    conversation, and `suspended` holds them for a checkpoint. `snapshot` returns None if the environment cannot be
    restored.
    """

    backend: InferenceBackend
    gate: TurnGate | None
    order: tuple[int, ...]
    session: str
    resume_from: SuspendedEpisode | None = None
    clock: EpisodeClock = field(default_factory=EpisodeClock)
    snapshot: Callable[[], Awaitable[tuple[Any, dict[str, Any]] | None]] | None = None
    has_turn: bool = True
    is_finished: bool = False
    suspended: SuspendedEpisode | None = None
    waits: tuple[GenerateRequest, Generation] | None = None  # while it waits: its request, and the reply so far
    is_aborting: bool = False  # set by the gate: an aborted reply will be continued later
    idle: trio.Event = field(default_factory=trio.Event)  # set while no request is in flight
    is_released: bool = False  # the requests of other episodes do not wait for this one
    _request_scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    def __post_init__(self) -> None:
        self.idle.set()

    def close_session(self, session: str) -> None:
        """End the episode: close its current session, which may differ from `session`. It is safe to call this
        twice.
        """
        if not self.is_finished:
            self.is_finished = True
            if self.gate is not None:
                self.gate.leave(self)
        self.backend.close_session(self.session)

    def release(self) -> None:
        """From now on, the requests of other episodes do not wait for this one: a program plays it at its own pace."""
        self.is_released = True
        if self.backend.capabilities.waits_for_sessions:
            cast(WaitsForSessions, self.backend).release_session(self.session)

    async def generate(self, request: GenerateRequest) -> Generation:
        """One whole reply, over any number of interruptions. Raises InferenceError."""
        reply = self._earlier_part(request)
        self.idle = trio.Event()
        try:
            while True:
                # A loop, because the gate may close again before this task runs.
                while self.gate is not None and (self.gate.is_closed or not self.has_turn):
                    await self._suspend(self.gate, request, reply)
                self.is_aborting = False
                offset = len(reply.tokens)
                rest = request
                if offset or request.session != self.session:
                    rest = msgspec.structs.replace(
                        request,
                        tokens=request.tokens + reply.tokens,
                        max_tokens=request.max_tokens - offset,
                        session=self.session,
                        offset=request.offset + offset,
                    )
                more, began = EMPTY, time.time()
                with trio.CancelScope() as self._request_scope:
                    more = await self.backend.generate(rest)
                self.clock.replies.append((began, time.time()))
                reply = join_generations(reply, more)
                if reply.finish != "abort" or not self.is_aborting:
                    return reply
        finally:
            self.idle.set()

    def cancel_request(self) -> None:
        """Cancel the request in flight, for an engine that does not answer an abort."""
        self._request_scope.cancel()

    def _earlier_part(self, request: GenerateRequest) -> Generation:
        """The part of this reply that an earlier process sampled."""
        saved = self.resume_from
        self.resume_from = None
        if saved is None or (saved.seed, saved.context_length) != (request.seed, len(request.tokens)):
            return EMPTY
        return saved.partial if len(saved.partial.tokens) < request.max_tokens else EMPTY

    async def _suspend(self, gate: TurnGate, request: GenerateRequest, reply: Generation) -> None:
        """Wait at the gate with the clock paused."""
        self.backend.close_session(self.session)
        self.clock.pause()
        self.waits = (request, reply)
        try:
            if self.snapshot is not None and (states := await self.snapshot()) is not None:
                self.suspended = SuspendedEpisode(*states, request.seed, len(request.tokens), reply)
            self.idle.set()
            await gate.wait(self)
            if self.is_released:
                self.release()
            self.idle = trio.Event()
        finally:
            self.suspended = self.waits = None
            self.clock.resume()


def join_generations(first: Generation, second: Generation) -> Generation:
    """Concatenate two parts of one reply. Adjacent spans of the same version become one span.

    >>> parts = [Generation([n], [-1.0], "abort", [VersionSpan(v, 0, 1)]) for n, v in ((5, 1), (6, 1), (7, 2))]
    >>> join_generations(join_generations(parts[0], parts[1]), parts[2]).spans
    [VersionSpan(version=1, start=0, end=2), VersionSpan(version=2, start=2, end=3)]
    """
    if not first.tokens:
        return second
    offset = len(first.tokens)
    spans = list(first.spans)
    for span in second.spans:
        start, end = span.start + offset, span.end + offset
        if spans and (spans[-1].version, spans[-1].end) == (span.version, start):
            start = spans.pop().start
        spans.append(VersionSpan(span.version, start, end))
    return Generation(first.tokens + second.tokens, first.logprobs + second.logprobs, second.finish, spans)
