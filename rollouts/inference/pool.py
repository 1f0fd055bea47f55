"""EnginePool: several model servers as one engine.

An episode stays on its server, and episodes of one prompt begin on the same one, as long as that is not much busier
than the others; else the one with the fewest episodes is asked. A request whose server dies is asked again, whole, of
another: it is answered exactly once, by whichever server lived, or raises InferenceError. New weights go to all of
them; one that comes back is given the last ones before it serves (`members`). While no server serves, requests wait,
up to `give_up_seconds`.

    async with EnginePool([Slot("a", make, url="http://127.0.0.1:8000"), Slot("b", make, process=process)]) as pool:
        reply = await pool.generate(request)

Left out: what a server is told (`remote`), where servers come from (`serving`).
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, NamedTuple, Self, TypeVar

import msgspec
import trio

from rollouts.errors import InferenceError
from rollouts.inference.base import (
    CanAbort,
    CanCheck,
    GenerateRequest,
    Generation,
    Health,
    InferenceBackend,
    WeightUpdate,
)
from rollouts.inference.http.failures import HTTPFailure
from rollouts.inference.members import Member, MemberStatistics, Patience, Slot

__all__ = ["EnginePool", "EnginePoolStatistics", "Patience", "Slot"]

T = TypeVar("T")

STRIKES_MAX = 3  # failures of one request while its servers live
DEATHS_MAX = 5  # servers that may die under one request: it may be what kills them
ABORT_SECONDS = 5.0  # from when an engine has been told to give a reply back, until it does
HOMES_MAX = 4096  # prompts whose server is remembered
NOTHING = Generation([], [], "abort", [])


class EnginePoolStatistics(NamedTuple):
    """What each server is and did; how many requests were carried to another server, and were given up."""

    members: tuple[MemberStatistics, ...]
    moved: int
    failed: int


class EnginePool:
    """Implements InferenceBackend, CanAbort, CanCheck and ManyEngines over servers.

    `prepare` is called before any server is started, `finish` when all have ended, and `told` what happens to servers,
    in words. Entering it raises UserError where a server cannot be used; leaving it ends those that were started here,
    also where it is cancelled.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        *,
        patience: Patience = Patience(),  # noqa: B008 - a NamedTuple cannot be changed
        prepare: Callable[[], Awaitable[None]] | None = None,
        finish: Callable[[], Awaitable[None]] | None = None,
        told: Callable[[str], None] | None = None,
    ) -> None:
        assert slots and len({slot.name for slot in slots}) == len(slots), [slot.name for slot in slots]
        self._slots = tuple(slots)
        self._patience, self._prepare, self._finish, self._told = patience, prepare, finish, told
        self._latest: WeightUpdate | None = None
        self._members = tuple(
            Member(slot, patience, latest=lambda: self._latest, begun=self._begun, changed=self._on_change)
            for slot in slots
        )
        engine = self._members[0].engine
        self.trainable = engine.trainable
        self.in_process = engine.in_process
        self.owns_weights = engine.owns_weights
        self.weights_kind: Literal["full", "adapter"] = engine.weights_kind
        self.context_tokens_max = engine.context_tokens_max
        for name in ("tolerance", "weights_as", "weights_folder", "vocabulary_size"):
            if hasattr(engine, name):
                setattr(self, name, getattr(engine, name))
        self._sessions: dict[str, _Session] = {}
        self._homes: dict[int, Member] = {}  # of each prompt, the last used last
        self._turns: dict[str, _Turn] = {}
        self._numbers = itertools.count()
        self._change = trio.Event()
        self._idle_since: float | None = None  # nobody serves since then
        self._moved = self._failed = 0
        self._nursery: trio.Nursery | None = None
        self._manager: AbstractAsyncContextManager[trio.Nursery] | None = None

    def __repr__(self) -> str:
        return f"a pool of {', '.join(map(repr, self._members))}"

    @property
    def members(self) -> tuple[InferenceBackend, ...]:
        """Those that serve now; each stays the same object over its restarts."""
        return tuple(member for member in self._members if member.is_serving)

    @property
    def version(self) -> int:
        """Of the last weights that it was given."""
        return 0 if self._latest is None else self._latest.version

    def statistics(self) -> EnginePoolStatistics:
        """What it did, and does now."""
        return EnginePoolStatistics(tuple(each.statistics() for each in self._members), self._moved, self._failed)

    # --- coming and going ---------------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Ask the servers that are there already who they are. Raises UserError of the first that cannot be used."""
        for slot in self._slots:
            engine = slot.make(slot.url) if slot.url else None
            if isinstance(engine, CanCheck):
                await engine.check()

    async def __aenter__(self) -> Self:
        errors: list[BaseException] = []

        async def start(member: Member) -> None:
            try:
                await member.start()
            except Exception as error:
                errors.append(error)
                nursery.cancel_scope.cancel()  # the others need not be waited for

        try:
            if self._prepare is not None:
                await self._prepare()
            async with trio.open_nursery() as nursery:
                for member in self._members:
                    nursery.start_soon(start, member)
            if errors:
                raise errors[0]
            limits = [member.engine.context_tokens_max for member in self._members]
            self.context_tokens_max = min(limits)
            self._manager = trio.open_nursery()
            self._nursery = await self._manager.__aenter__()
        except BaseException:
            await self._end()
            raise
        for member in self._members:
            self._nursery.start_soon(member.keep, self._nursery)
        return self

    async def __aexit__(self, *exc: Any) -> None:
        assert self._manager is not None and self._nursery is not None, "the pool was entered"
        # The nursery is shielded while it ends, and not told what happened: what is raised stays as it is.
        self._nursery.cancel_scope.shield = True
        self._nursery.cancel_scope.cancel()
        try:
            await self._manager.__aexit__(None, None, None)
        finally:
            self._nursery = None
            await self._end()

    async def _end(self) -> None:
        with trio.CancelScope(shield=True):  # each has a bound of its own
            async with trio.open_nursery() as nursery:
                for member in self._members:
                    nursery.start_soon(member.end)
            if self._finish is not None:
                await self._finish()

    # --- episodes -----------------------------------------------------------------------------------------------------

    def open_session(self, order: tuple[int, ...]) -> str:
        """A name for the episode; its server is chosen when it first speaks."""
        session = f"{'-'.join(map(str, order))}-{next(self._numbers)}"
        self._sessions[session] = _Session(tuple(order))
        return session

    def close_session(self, session: str) -> None:
        """The episode is over. Closing twice is harmless."""
        found = self._sessions.pop(session, None)
        if found is not None:
            self._unseat(found)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn, wherever a server lives. Raises InferenceError: what a server refuses, what failed too
        often, or nobody served for `give_up_seconds`, with what became of each.
        """
        turn = _Turn()
        key = request.session or f"request-{next(self._numbers)}"
        session = self._sessions.get(key) or _Session(tuple(request.order))
        self._turns[key] = turn

        async def ask(member: Member) -> Generation:
            inner = self._seat(session, key, member) if request.session is not None else None
            turn.asked = (member, inner)
            reply = await member.engine.generate(msgspec.structs.replace(request, session=inner))
            if reply.finish == "abort" and not turn.is_aborted:
                raise InferenceError(f"{member!r} gave up a reply by itself")
            return reply

        try:
            with turn.scope:
                return await self._served(ask, session, turn)
            return NOTHING
        finally:
            turn.over.set()
            if self._turns.get(key) is turn:
                del self._turns[key]
            if self._sessions.get(key) is not session:  # it was closed meanwhile, or never opened
                self._unseat(session)

    async def score(self, tokens: list[int], temperature: float = 1.0) -> list[float]:
        """Logprob of each token [L] given those before it, by whichever server; the first is 0.0. Raises as
        `generate`.
        """
        return await self._served(lambda member: member.engine.score(tokens, temperature), _Session(()), _Turn())

    async def abort(self, session: str) -> None:
        """Give back what the session waits for, as far as it came (see `CanAbort`). What a server has that cannot be
        asked for it is lost.
        """
        turn = self._turns.get(session)
        if turn is None:
            return
        turn.is_aborted = True
        if turn.asked is not None:
            member, inner = turn.asked
            if not isinstance(member.engine, CanAbort):
                return  # it is left to finish
            if inner is not None and member.is_serving:
                try:
                    await member.engine.abort(inner)
                    with trio.move_on_after(ABORT_SECONDS):
                        await turn.over.wait()
                except InferenceError:
                    await member.verify()
        turn.scope.cancel()  # it waits for a server, or the server does not answer

    async def _served(self, ask: Callable[[Member], Awaitable[T]], session: _Session, turn: _Turn) -> T:
        """Ask one server after another until one answers."""
        strikes = deaths = 0
        avoided: list[Member] = []
        while True:
            member = await self._someone(session, avoided)
            life = member.life
            error = await self._asked(ask, member, turn)
            if not isinstance(error, InferenceError):
                return error
            turn.asked = None
            self._moved += 1
            if turn.is_aborted:
                turn.scope.cancel()
                await trio.lowlevel.checkpoint()
            is_busy = isinstance(error, HTTPFailure) and error.kind == "busy"
            if (member.life == life and member.is_serving) and (is_busy or await member.verify()):
                strikes += 1
                avoided = [*avoided, member]
                if strikes >= STRIKES_MAX:
                    self._failed += 1
                    raise error
            else:
                deaths += 1
                if deaths >= DEATHS_MAX:
                    self._failed += 1
                    raise InferenceError(
                        f"{deaths} servers died while they worked on one request, the last one: {member.reason}"
                    ) from error

    async def _asked(self, ask: Callable[[Member], Awaitable[T]], member: Member, turn: _Turn) -> T | InferenceError:
        """What the server answered, or why the request is to be carried elsewhere. Raises what would fail there too."""
        scope = trio.CancelScope()
        member.scopes.add(scope)
        try:
            with scope:
                answer = await ask(member)
                member.answered += 1
                return answer
            return InferenceError(f"{member!r} is down: {member.reason}")
        except InferenceError as error:
            if error.is_transient:
                return error
            is_lost = isinstance(error, HTTPFailure) and error.status == 404  # an adapter, of a server that is another
            if not member.is_serving or (is_lost and not await member.verify()):
                return error  # what it said last need not be so elsewhere
            self._failed += 1
            raise
        finally:
            member.scopes.discard(scope)

    # --- who is asked -------------------------------------------------------------------------------------------------

    async def _someone(self, session: _Session, avoided: Sequence[Member] = ()) -> Member:
        """The server for this episode; waits until there is one. Raises InferenceError, with what became of each."""
        while not (serving := [member for member in self._members if member.is_serving]):
            change = self._change
            since = trio.current_time() if self._idle_since is None else self._idle_since
            if all(member.state == "lost" for member in self._members):
                raise self._nobody("no server is left")
            with trio.move_on_at(since + self._patience.give_up_seconds):
                await change.wait()
                continue
            raise self._nobody(f"no server has served for {self._patience.give_up_seconds:g} seconds")
        found = self._chosen(session, [member for member in serving if member not in avoided] or serving)
        if session.order:
            self._homes.pop(session.order[0], None)
            self._homes[session.order[0]] = found
            if len(self._homes) > HOMES_MAX:
                del self._homes[next(iter(self._homes))]
        return found

    def _chosen(self, session: _Session, usable: Sequence[Member]) -> Member:
        seat = session.member
        if seat is not None and seat in usable and session.life == seat.life:
            return seat
        least = min(usable, key=lambda member: member.load)
        home = self._homes.get(session.order[0]) if session.order else None
        # A prompt that is in a server's cache is worth a longer queue, up to half of what each of them has anyway.
        slack = max(1, len(self._sessions) // (2 * len(usable)))
        is_near = home is not None and home in usable and home.load <= least.load + slack
        return home if home is not None and is_near else least

    def _seat(self, session: _Session, key: str, member: Member) -> str:
        """The server's own name for the episode, which is at home there from now on."""
        if session.member is not member or session.life != member.life:
            self._unseat(session)
            session.member, session.life = member, member.life
            session.inner = member.engine.open_session(session.order)
            member.sessions.add(key)
            session.key = key
        return session.inner

    def _unseat(self, session: _Session) -> None:
        member, session.member = session.member, None
        if member is not None and session.life == member.life:
            member.sessions.discard(session.key)
            member.engine.close_session(session.inner)

    def _nobody(self, what: str) -> InferenceError:
        self._failed += 1
        each = "\n".join(f"  {member!r}, {member.state}: {member.reason}" for member in self._members)
        return InferenceError(f"{what}:\n{each}")

    # --- weights and health -------------------------------------------------------------------------------------------

    async def update_weights(self, update: WeightUpdate) -> None:
        """Every server serves these weights, or none: one that is down takes them before it serves again. Raises
        InferenceError: a server that lives did not take them, or there is none.
        """
        self._begun(update)
        errors: list[Exception] = []

        async def send(member: Member) -> None:
            try:
                await member.update_weights(update)
            except InferenceError as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            for member in self._members:
                nursery.start_soon(send, member)
        if errors:
            raise errors[0]
        await self._someone(_Session(()))

    async def health(self) -> Health:
        """Whether any server generates."""
        serving = [member for member in self._members if member.is_serving]
        fine = [member for member in serving if await member.verify()]
        words = "; ".join(f"{each!r}: {each.reason}" for each in self._members if each not in fine)
        return Health(bool(fine), self.version, words)

    def _begun(self, update: WeightUpdate) -> None:
        self._latest = update

    def _on_change(self, words: str) -> None:
        if any(member.is_serving for member in self._members):
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = trio.current_time()
        self._change.set()
        self._change = trio.Event()
        if self._told is not None:
            self._told(words)


class _Session:
    """An episode: its place in the run, and the server where it is at home, by that one's name for it."""

    def __init__(self, order: tuple[int, ...]) -> None:
        self.order = order
        self.member: Member | None = None
        self.life = 0
        self.inner = self.key = ""


class _Turn:
    """A request on its way: who works on it, and whether it is to come back as it is."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.over = trio.Event()
        self.is_aborted = False
        self.asked: tuple[Member, str | None] | None = None
