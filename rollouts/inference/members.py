"""Member: one server of a pool over its whole life, over every time that it dies and comes back.

It is *serving*, *down*, or *lost*. Down it goes when its process ends, when a request to it fails and it does not
generate when asked, and when it is found with other weights than the last ones. It is watched then, started again if it
was started here, and given the last weights, which are probed, before it serves again; after `restarts_max` starts in
vain it is lost. A server's engine object lives as long as the server does: one that comes back gets a new one.

Left out: who is asked what (`pool`), and how a process is started (`launching`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import trio

from rollouts.errors import ConfigError, InferenceError, RolloutsError
from rollouts.inference.base import (
    GenerateRequest,
    Generation,
    Health,
    InferenceBackend,
    Probe,
    WeightUpdate,
)
from rollouts.inference.http.failures import HTTPFailure
from rollouts.training.weight_probe import furthest_apart

__all__ = ["Member", "MemberStatistics", "Patience", "Process", "Slot"]

T = TypeVar("T")

BACK_SECONDS_MAX = 30.0
DYING_SECONDS = 2.0  # a server that does not answer any more may be about to end
NOWHERE = "http://127.0.0.1:1"  # until a server that is started here has a port


class Process(Protocol):
    """A server's process, as `launching.ServerProcess`."""

    url: str

    async def start(self, smoke: Callable[[str], Awaitable[None]]) -> None:
        """Start it, also again; it has generated then. Raises UserError."""
        ...

    async def wait(self) -> str:
        """Until it has ended; says how."""
        ...

    async def end(self) -> None:
        """Nothing of it is left."""
        ...

    def last_lines(self) -> str:
        """What it said last."""
        ...


class Slot(NamedTuple):
    """A server that a pool is to have: the one at `url`, or one that `process` starts. `make` gives the engine for a
    URL, not yet entered.
    """

    name: str
    make: Callable[[str], InferenceBackend]
    url: str = ""
    process: Process | None = None


class Patience(NamedTuple):
    """How long a pool waits: for a server to show that it generates (`health_seconds`), between two such questions
    (`watch_seconds`), until it looks after one that is down (`back_seconds`, doubling), and for any server to serve
    before it gives up (`give_up_seconds`). `restarts_max` starts in vain, and a server is lost.
    """

    health_seconds: float = 120.0
    watch_seconds: float = 5.0
    back_seconds: float = 0.5
    give_up_seconds: float = 600.0
    restarts_max: int = 3


class MemberStatistics(NamedTuple):
    """One server now, and counts since the pool was entered. `reason` says why it is not serving, or last was not."""

    name: str
    state: Literal["down", "serving", "lost"]
    version: int
    sessions: int
    in_flight: int
    answered: int
    deaths: int
    restarts: int
    reason: str


class Member:
    """Implements InferenceBackend and CanAbort by its engine of the moment. `latest` gives the weights that it must
    have; `begun` is told when somebody gives it others; `changed` that it serves, or does not any more.
    """

    def __init__(
        self,
        slot: Slot,
        patience: Patience,
        *,
        latest: Callable[[], WeightUpdate | None],
        begun: Callable[[WeightUpdate], None],
        changed: Callable[[str], None],
    ) -> None:
        self.name = slot.name
        self.engine = slot.make(slot.url or NOWHERE)
        self.state: Literal["down", "serving", "lost"] = "down"
        self.reason = "it was not started"
        self.life = 0  # how often it has begun to serve
        self.answered = 0
        self.sessions: set[str] = set()
        self.scopes: set[trio.CancelScope] = set()  # of the requests that it works on
        self._asides: set[trio.CancelScope] = set()  # of what else is asked of it
        self._slot, self._process, self._patience = slot, slot.process, patience
        self._latest, self._begun, self._changed = latest, begun, changed
        self._draining: set[trio.CancelScope] = set()  # those that must end before it can load
        self._is_entered = False
        self._loading = trio.Lock()
        self._loaded: WeightUpdate | None = None
        self._up, self._downed, self._tried = trio.Event(), trio.Event(), trio.Event()
        self._asked: trio.Event | None = None  # somebody sees whether it generates
        self._deaths = self._restarts = 0

    def __getattr__(self, name: str) -> Any:
        if name == "engine":
            raise AttributeError(name)
        return getattr(self.engine, name)

    def __repr__(self) -> str:
        return repr(self.engine) if self._process is None else f"{self.name} ({self.engine!r})"

    @property
    def is_serving(self) -> bool:
        """It may be asked."""
        return self.state == "serving"

    @property
    def is_owner_of_process(self) -> bool:
        """Its server was started here."""
        return self._process is not None

    @property
    def load(self) -> int:
        """Episodes that are at home here, or requests, whichever are more."""
        return max(len(self.sessions), len(self.scopes))

    def statistics(self) -> MemberStatistics:
        """A snapshot."""
        return MemberStatistics(
            self.name,
            self.state,
            getattr(self.engine, "version", 0),
            len(self.sessions),
            len(self.scopes),
            self.answered,
            self._deaths,
            self._restarts,
            self.reason,
        )

    # --- its engine, as an InferenceBackend ---------------------------------------------------------------------------

    async def __aenter__(self) -> Member:
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self.end()

    def open_session(self, order: tuple[int, ...]) -> str:
        """As the engine does."""
        return self.engine.open_session(order)

    def close_session(self, session: str) -> None:
        """As the engine does."""
        self.engine.close_session(session)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample here, and nowhere else. Raises InferenceError."""
        return await self._unless_down(self.engine.generate(request))

    async def score(self, tokens: list[int], temperature: float = 1.0) -> list[float]:
        """Score here, and nowhere else. Raises InferenceError."""
        return await self._unless_down(self.engine.score(tokens, temperature))

    async def health(self) -> Health:
        """Whether this one generates."""
        return Health(await self.verify(), getattr(self.engine, "version", 0), self.reason)

    async def update_weights(self, update: WeightUpdate) -> None:
        """Serve other weights; one that is down takes them when it comes back. One that fails is started again and
        given them again, once, if it was started here. Raises InferenceError, naming it.
        """
        self._begun(update)
        async with self._loading:  # one that comes back may be about to take up earlier ones
            if not self.is_serving or self._loaded is update:
                return
            life, self._draining = self.life, set(self.scopes)
            try:
                await self._unless_down(self.engine.update_weights(update))
                self._loaded = update
                return
            except InferenceError as error:
                failure = error
        why = f"it did not take the weights of version {update.version}: {failure}"
        if self._process is None:
            if self.life == life and self.is_serving:
                dead = await self._asked_health()
                if not dead:
                    raise InferenceError(f"{self!r}: {why}", is_transient=False) from failure
                self.mark_down(f"{why}; {dead}", life)
            return  # it is given them if it comes back
        self.mark_down(why, life)
        if self.state == "down":
            await self._tried.wait()
        if not self.is_serving:
            again = f"it was started again, and failed again: {self.reason}"
            raise InferenceError(f"{self!r}: {why}; {again}", is_transient=False) from failure

    async def _unless_down(self, asked: Awaitable[T]) -> T:
        """The answer, unless the server goes down meanwhile. Raises InferenceError then too."""
        scope = trio.CancelScope()
        self._asides.add(scope)
        try:
            with scope:
                return await asked
        finally:
            self._asides.discard(scope)
        raise HTTPFailure("reset", f"{self!r} is down: {self.reason}", retryable=True)

    # --- its life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """The first time. Raises UserError, also where it is there and does not generate."""
        try:
            await self._renew()
        except InferenceError as error:
            raise ConfigError(f"{self!r} cannot be used: {error}") from error

    async def end(self) -> None:
        """It serves no more. Its process, if it was started here, is gone."""
        self.state = "lost" if self.state == "lost" else "down"
        for scope in (*self.scopes, *self._asides):
            scope.cancel()
        await self._leave()
        if self._process is not None:
            await self._process.end()

    async def keep(self, nursery: trio.Nursery) -> None:
        """Watch it, and bring it back, until the nursery is cancelled."""
        nursery.start_soon(self._watch)
        if self._process is not None:
            nursery.start_soon(self._watch_process, self._process)
        while self.state != "lost":
            await self._downed.wait()
            await self._bring_back()

    def mark_down(self, why: str, life: int) -> None:
        """It does not serve: requests to it are given up. Nothing happens where that is known, or was in an earlier
        life.
        """
        if not self.is_serving or life != self.life:
            return
        self.state, self.reason = "down", why
        self._deaths += 1
        self._up = trio.Event()
        self._tried = trio.Event()
        self._downed.set()
        for scope in (*self.scopes, *self._asides):
            scope.cancel()
        self.sessions.clear()
        self._changed(f"{self!r} is down: {why}")

    async def verify(self) -> bool:
        """See whether it generates, with the right weights; it is marked down if not. Many who ask at once are told by
        one question.
        """
        while self._asked is not None:
            await self._asked.wait()
            if not self.is_serving:
                return False
        if not self.is_serving:
            return False
        self._asked, life = trio.Event(), self.life
        try:
            fault = await self._asked_health() or await self._asked_weights()
        finally:
            self._asked.set()
            self._asked = None
        if fault and self._process is not None:
            with trio.move_on_after(DYING_SECONDS):  # a process that has ended says more
                fault = await _end_of(self._process)
        if fault:
            self.mark_down(fault, life)
        return self.is_serving

    async def _asked_health(self) -> str:
        """Why it does not generate; empty where it does."""
        answered = self.answered
        with trio.move_on_after(self._patience.health_seconds):
            try:
                health = await self._unless_down(self.engine.health())
            except InferenceError as error:
                return str(error)
            return "" if health.ok else health.detail or "it does not generate"
        if self.answered > answered or (self._loading.locked() and not self._draining & self.scopes):
            return ""  # it is slow, or loads, and is alive
        return f"it did not generate in {self._patience.health_seconds:g} seconds"

    async def _asked_weights(self) -> str:
        """Why it serves other weights than the last ones; empty where it does not, or that cannot be told now."""
        update = self._loaded
        if update is None or update.probe is None or self._loading.locked():
            return ""
        if getattr(self.engine, "scores_alone", False):
            return ""  # it would have to be silent first, every few seconds
        with trio.move_on_after(self._patience.health_seconds):
            try:
                fault = await self._probed(update.probe, update.version)
            except InferenceError as error:
                fault = f"it does not score: {error}"
            return fault if self._loaded is update and not self._loading.locked() else ""
        return ""

    async def _probed(self, probe: Probe, version: int) -> str:
        theirs = await self._unless_down(self.engine.score(list(probe.tokens), 1.0))
        worst = furthest_apart(probe.logprobs, theirs, probe.tolerance)
        return (
            ""
            if worst.agrees
            else f"it does not serve the weights of version {version}: {worst.words('a test sequence')}"
        )

    async def _watch(self) -> None:
        while True:
            await self._up.wait()
            await trio.sleep(self._patience.watch_seconds)
            await self.verify()

    async def _watch_process(self, process: Process) -> None:
        while True:
            await self._up.wait()
            life = self.life
            self.mark_down(await _end_of(process), life)

    async def _bring_back(self) -> None:
        """Until it serves, or is lost."""
        failures = 0
        while True:
            try:
                await self._renew()
                return
            except (RolloutsError, OSError) as error:
                self.reason = str(error)
            failures += 1
            is_lost = self._process is not None and failures >= self._patience.restarts_max
            if is_lost:
                self.state = "lost"
                self._changed(f"{self!r} is lost after {failures} starts: {self.reason}")
            self._tried.set()
            self._tried = trio.Event()
            if is_lost:
                return
            await trio.sleep(min(self._patience.back_seconds * 2.0 ** (failures - 1), BACK_SECONDS_MAX))

    async def _renew(self) -> None:
        """A new engine for a server that generates, and has the last weights. Raises RolloutsError."""
        await self._leave()
        if self._process is not None:
            self._restarts += self.life > 0
            await self._process.start(self._enter)
        else:
            await self._enter(self._slot.url)
        async with self._loading:
            try:
                await self._load_latest()
            except BaseException:
                await self._leave()
                raise
            # From the last look at the weights to here nothing else runs.
            self.state = "serving"
            self.life += 1
            self._downed = trio.Event()
            self._up.set()
            self._tried.set()
        with_version = f", with version {self._loaded.version}" if self._loaded else ""
        self._changed(f"{self!r} serves{' again' if self.life > 1 else ''}{with_version}")

    async def _load_latest(self) -> None:
        self._loaded = None
        while (update := self._latest()) is not self._loaded:
            assert update is not None, "weights that were there are never taken back"
            await self.engine.update_weights(update)
            self._loaded = update
            if update.probe is not None:
                fault = await self._in_time(self._probed(update.probe, update.version), "score a test sequence")
                if fault:
                    raise InferenceError(fault)

    async def _enter(self, url: str) -> None:
        """Greet the server, and have it generate. Raises UserError, InferenceError."""
        await self._leave()
        engine = self._slot.make(url)
        await engine.__aenter__()
        self.engine, self._is_entered = engine, True
        health = await self._in_time(engine.health(), "generate")
        if not health.ok:
            raise InferenceError(health.detail or "it does not generate")

    async def _in_time(self, asked: Awaitable[T], what: str) -> T:
        """Raises InferenceError where it takes longer than `health_seconds`."""
        with trio.move_on_after(self._patience.health_seconds):
            return await asked
        raise InferenceError(f"it did not {what} in {self._patience.health_seconds:g} seconds")

    async def _leave(self) -> None:
        if self._is_entered:
            self._is_entered = False
            with trio.CancelScope(shield=True, deadline=trio.current_time() + BACK_SECONDS_MAX):
                await self.engine.__aexit__(None, None, None)


async def _end_of(process: Process) -> str:
    """Waits until it has ended, and says why."""
    how = await process.wait()
    words = process.last_lines()
    return f"its process ended ({how})" + (f"; its log ends with\n{words}" if words else "")
