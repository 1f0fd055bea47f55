"""The engine as one episode sees it, where the episode may be stopped in the middle of a reply and resumed later.

A `Seat` stands between an episode and its engine. While its gate is shut, a reply that is under way is kept as far as
it came, and the episode waits; its clock waits too. Once the gate opens for it, the same reply continues: what was
sampled is context now, the rest of the token budget is asked for, and the random numbers continue where they stopped.
To the episode it is one reply; each of its tokens has the version of the weights that sampled it. Left out: when the
gate opens, and for which episode (`training.rollout_gen.pool`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import trio

from rollouts.inference.base import GenerateRequest, Generation, InferenceBackend, VersionSpan

NOTHING = Generation([], [], "abort", [])


class HeldEpisode(msgspec.Struct):
    """An episode that waits in the middle of a reply, as plain data.

    `env` is what the environment's `state()` gave and `model` what the conversation's `state_dict()` gave; `partial`
    is the reply as far as it came, to the context of `context_length` tokens and with the turn's `seed`.
    """

    env: Any
    model: dict[str, Any]
    seed: int
    context_length: int
    partial: Generation


class Gate(Protocol):
    """What lets a seat's episode speak. Every method but `wait` is synchronous."""

    @property
    def is_shut(self) -> bool:
        """No episode may ask for a reply now."""
        ...

    async def wait(self, seat: Seat) -> None:
        """Until the episode may speak: it has a turn then, and a new open session in `seat.session`."""
        ...

    def leave(self, seat: Seat) -> None:
        """The episode will not speak again; called once, before its session is closed."""
        ...


class EpisodeClock:
    """The deadlines of one episode, in its own seconds, without pauses; to be used within trio. `begin` starts it, and
    starts it anew. The deadlines of an author's single calls (`rollouts.env`) are not here: their threads cannot pause.
    """

    def __init__(self) -> None:
        self._zero: float | None = None  # by trio's clock; None: it has not begun
        self._paused_at: float | None = None  # likewise
        self._scopes: dict[trio.CancelScope, float] = {}  # each open deadline, as `elapsed` counts

    @property
    def elapsed(self) -> float:
        """Seconds since `begin`, pauses left out; 0.0 before."""
        if self._zero is None:
            return 0.0
        return (trio.current_time() if self._paused_at is None else self._paused_at) - self._zero

    @property
    def is_paused(self) -> bool:
        """Whether it is paused."""
        return self._paused_at is not None

    def begin(self) -> None:
        """Count from now."""
        assert not self._scopes, "a clock begins before its deadlines do"
        self._zero = trio.current_time()
        self._paused_at = self._zero if self.is_paused else None

    def pause(self) -> None:
        """No deadline passes until `resume`. Pausing twice is harmless."""
        if self._paused_at is None:
            self._paused_at = trio.current_time()
            for scope in self._scopes:
                scope.deadline = math.inf

    def resume(self) -> None:
        """Count again; every deadline has as much time left as it had. Harmless where it was not paused."""
        if self._paused_at is None:
            return
        if self._zero is not None:
            self._zero += trio.current_time() - self._paused_at
        self._paused_at = None
        for scope, due in self._scopes.items():
            scope.deadline = trio.current_time() - self.elapsed + due

    @contextlib.contextmanager
    def move_on_after(self, seconds: float) -> Iterator[trio.CancelScope]:
        """As `trio.move_on_after`, in this clock's seconds. Infinite: the scope is not entered, which costs time."""
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
class Seat:
    """One episode's place at the `engine` that it shares with the others.

    `order` is (group, rollout). `may_speak` says that it has a turn, and `session` is the engine's name for it then.
    `clock` is paused while the episode waits at the gate; without a gate it never does. `resumed` is what an earlier
    process left of the episode. Each time that it comes to the gate, `snapshot` is asked for the states of environment
    and conversation, which a checkpoint keeps (`held`); None: the environment cannot be restored.
    """

    engine: InferenceBackend
    gate: Gate | None
    order: tuple[int, ...]
    session: str
    resumed: HeldEpisode | None = None
    clock: EpisodeClock = field(default_factory=EpisodeClock)
    snapshot: Callable[[], Awaitable[tuple[Any, dict[str, Any]] | None]] | None = None
    may_speak: bool = True
    has_left: bool = False
    held: HeldEpisode | None = None
    is_stopping: bool = False  # the gate asked for the reply back
    silent: trio.Event = field(default_factory=trio.Event)  # set: it waits at the gate, or does something else
    _asking: trio.CancelScope = field(default_factory=trio.CancelScope)

    def __post_init__(self) -> None:
        self.silent.set()

    def close_session(self, session: str) -> None:
        """The episode is over, whatever name it has for its session. Closing twice is harmless."""
        if not self.has_left:
            self.has_left = True
            if self.gate is not None:
                self.gate.leave(self)
        self.engine.close_session(self.session)

    async def generate(self, request: GenerateRequest) -> Generation:
        """One whole reply, however often it is stopped on the way. Raises InferenceError."""
        said = self._earlier_part(request)
        self.silent = trio.Event()
        try:
            while True:
                while self.gate is not None and (self.gate.is_shut or not self.may_speak):
                    await self._park(self.gate, request, said)  # it may be shut again before this task has run
                self.is_stopping = False
                offset = len(said.tokens)
                rest = request
                if offset or request.session != self.session:
                    rest = msgspec.structs.replace(
                        request,
                        tokens=request.tokens + said.tokens,
                        max_tokens=request.max_tokens - offset,
                        session=self.session,
                        offset=request.offset + offset,
                    )
                more = NOTHING
                with trio.CancelScope() as self._asking:
                    more = await self.engine.generate(rest)
                said = join_generations(said, more)
                if said.finish != "abort" or not self.is_stopping:
                    return said
        finally:
            self.silent.set()

    def cut(self) -> None:
        """Give up the request that is under way: the engine was asked to stop, and does not answer."""
        self._asking.cancel()

    def _earlier_part(self, request: GenerateRequest) -> Generation:
        """The part of this reply that an earlier process sampled."""
        held, self.resumed = self.resumed, None
        if held is None or (held.seed, held.context_length) != (request.seed, len(request.tokens)):
            return NOTHING
        return held.partial if len(held.partial.tokens) < request.max_tokens else NOTHING

    async def _park(self, gate: Gate, request: GenerateRequest, said: Generation) -> None:
        """Wait at the gate; deadlines wait too."""
        self.engine.close_session(self.session)
        self.clock.pause()
        try:
            if self.snapshot is not None and (states := await self.snapshot()) is not None:
                self.held = HeldEpisode(*states, request.seed, len(request.tokens), said)
            self.silent.set()
            await gate.wait(self)
            self.silent = trio.Event()
        finally:
            self.held = None
            self.clock.resume()


def join_generations(first: Generation, second: Generation) -> Generation:
    """A reply and what followed it, as one: spans of one version that touch become one span.

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
