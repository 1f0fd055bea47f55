"""The engine as one episode sees it, where the episode may be stopped in the middle of a reply and go on later.

A `Seat` stands between an episode and its engine. While its gate is shut, a reply that is under way is kept as far as
it came, the episode waits, and once the gate lets it in again the same reply goes on: what was sampled is context now,
the rest of the token budget is asked for, and the random numbers go on where they stopped. To the episode it is one
reply; each of its tokens has the version of the weights that sampled it. Left out: when the gate opens, and for whom
(`training.rollout_gen.pool`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec
import trio

from rollouts.inference.base import GenerateRequest, Generation, InferenceBackend, VersionSpan

__all__ = ["Gate", "HeldEpisode", "Pausable", "Seat", "attend", "held_episode", "join_generations", "remember"]

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


Snapshot = Callable[[], Awaitable[tuple[Any, dict[str, Any]] | None]]
"""The states of environment and conversation; None where the environment cannot be restored."""


class Pausable(Protocol):
    """A clock with the deadlines of an episode."""

    def pause(self) -> None:
        """Stand still."""
        ...

    def resume(self) -> None:
        """Go on."""
        ...


class Gate(Protocol):
    """What lets a seat's episode speak. Every method but `wait` is synchronous."""

    @property
    def is_shut(self) -> bool:
        """Nobody may ask for a reply now."""
        ...

    async def wait(self, seat: Seat) -> None:
        """Until the episode may go on: it has a turn then, and a new open session in `seat.session`."""
        ...

    def leave(self, seat: Seat) -> None:
        """The episode will not speak again; called once, before its session is closed."""
        ...


class Seat:
    """Implements InferenceBackend for one episode, over the engine that it shares with the others.

    `order` is (group, rollout). `may_speak` says that it has a turn, and `session` is the engine's name for it then:
    the episode keeps the name that it was given first.
    """

    def __init__(
        self,
        inference: InferenceBackend,
        gate: Gate,
        order: tuple[int, ...],
        session: str,
        resumed: HeldEpisode | None = None,
    ) -> None:
        self.order = order
        self.session = session
        self.resumed = resumed
        self.may_speak = True
        self.has_left = False
        self.held: HeldEpisode | None = None
        self.is_stopping = False  # the gate asked for the reply back
        self.silent = trio.Event()  # no reply is under way: it waits at the gate, or does something else
        self.silent.set()
        self._inference = inference
        self._gate = gate
        self._clock: Pausable | None = None
        self._snapshot: Snapshot | None = None
        self._asking: trio.CancelScope | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inference, name)

    def close_session(self, session: str) -> None:
        """The episode is over, whatever name it has for its session."""
        if not self.has_left:
            self.has_left = True
            self._gate.leave(self)
        self._inference.close_session(self.session)

    async def generate(self, request: GenerateRequest) -> Generation:
        """One whole reply, however often it is stopped on the way. Raises InferenceError."""
        said = self._taken_up(request)
        self.silent = trio.Event()
        try:
            while True:
                while self._gate.is_shut or not self.may_speak:  # it may be shut again before this task has run
                    await self._park(request, said)
                self.is_stopping = False
                said = join_generations(said, await self._ask(request, len(said.tokens), said.tokens))
                if said.finish != "abort" or not self.is_stopping:
                    return said
        finally:
            self.silent.set()

    def cut(self) -> None:
        """Give up the request that is under way: the engine was told to stop, and does not answer."""
        if self._asking is not None:
            self._asking.cancel()

    def attend(self, clock: Pausable) -> None:
        """The episode's clock stands still while it waits at the gate."""
        self._clock = clock

    def remember(self, snapshot: Snapshot) -> None:
        """Ask this, each time that the episode comes to the gate, for what a checkpoint keeps of it."""
        self._snapshot = snapshot

    def _taken_up(self, request: GenerateRequest) -> Generation:
        """The part of this reply that an earlier process sampled."""
        held, self.resumed = self.resumed, None
        if held is None or (held.seed, held.context_length) != (request.seed, len(request.tokens)):
            return NOTHING
        return held.partial if len(held.partial.tokens) < request.max_tokens else NOTHING

    async def _ask(self, request: GenerateRequest, offset: int, tokens: list[int]) -> Generation:
        if offset or request.session != self.session:
            request = msgspec.structs.replace(
                request,
                tokens=request.tokens + tokens,
                max_tokens=request.max_tokens - offset,
                session=self.session,
                offset=request.offset + offset,
            )
        with trio.CancelScope() as self._asking:
            return await self._inference.generate(request)
        return NOTHING

    async def _park(self, request: GenerateRequest, said: Generation) -> None:
        """Wait at the gate; deadlines wait too."""
        self._inference.close_session(self.session)
        if self._clock is not None:
            self._clock.pause()
        try:
            if self._snapshot is not None and (states := await self._snapshot()) is not None:
                self.held = HeldEpisode(*states, request.seed, len(request.tokens), said)
            self.silent.set()
            await self._gate.wait(self)
            self.silent = trio.Event()
        finally:
            self.held = None
            if self._clock is not None:
                self._clock.resume()


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


# --- what the agent loop asks of an engine that may be a Seat --------------------------------------------------------


def attend(inference: Any, clock: Pausable) -> None:
    """The episode's clock stands still while the episode waits at the gate."""
    if isinstance(inference, Seat):
        inference.attend(clock)


def remember(inference: Any, snapshot: Snapshot) -> None:
    """What a checkpoint keeps of the episode, each time that it waits at the gate."""
    if isinstance(inference, Seat):
        inference.remember(snapshot)


def held_episode(inference: Any) -> HeldEpisode | None:
    """What an earlier process left of this episode; None: it begins with its first turn."""
    return inference.resumed if isinstance(inference, Seat) else None
