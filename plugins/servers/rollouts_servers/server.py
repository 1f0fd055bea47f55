"""Server: one model server, from its start to its end.

    async with Server(VLLM(), "http://127.0.0.1:8000", ServerSetup(vocabulary_size=469)) as server:
        reply = await server.generate(request)

The class checks ids before it sends them, because an invalid id crashes some servers. Requests wait while weights
change. An abort returns unfinished replies. Each token of a reply has the version of the weights that sampled it. The
server is always in one state:

    starting   it has not served yet
    ready      requests are sent
    paused     new requests wait until those in flight end, before weights are loaded or while a request scores alone
    loading    requests wait while it loads new weights
    faulty     an update failed, so its weights are unknown: requests fail until an update succeeds
    down       it died, or serves wrong weights; a pool restarts it
    lost       too many restarts failed

A pool supervises its servers (`supervise`). It monitors each server and restarts the servers that it started itself. A
restarted server receives the last weights, which are probed before it serves again. Elsewhere: the HTTP calls of each
kind of server (`vllm`, `sglang`), the choice of a server (`server_pool`), its process (`process`), and the proof of a
weight sync (`training.weights.sync`).
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple, Self

import trio

from rollouts.errors import ConfigError, InferenceError, RolloutsError
from rollouts.inference.base import EngineState, GenerateRequest, Generation, Health, WeightUpdate, check_tokens
from rollouts_servers.checks import (
    ServerSetup,
    check_update,
    fault_of_probe,
    handshake,
    has_answered,
    spans_of,
)
from rollouts_servers.dialect import Dialect, GroupPlace, RequestTarget, ServerInfo
from rollouts_servers.http import HTTPClient, HTTPFailure, acquire
from rollouts_servers.process import ServerProcess, end_of

ABORT_AGAIN_SECONDS = 0.2  # repeat an abort, since the server may not have read the request yet
ABORT_SECONDS = 10.0  # after this time without a reply, an aborted request is cancelled
BACK_SECONDS_MAX = 30.0
DYING_SECONDS = 2.0  # a server that does not answer gets this long to end, because its exit explains more
UNLOAD_SECONDS = 5.0  # how long unloading adapters may take when the server is left
NOWHERE = "http://127.0.0.1:1"  # the URL of a server that has no port yet
# A health check generates a token, because a server with a dead engine may report that it is healthy.
HEALTH_REQUEST = GenerateRequest([0], 1, (), 0, temperature=0.0)


class ServerStatistics(NamedTuple):
    """A server's state, and counts since its first start. `reason` says why the server was last not ready."""

    name: str
    state: str
    version: int
    sessions: int
    in_flight: int
    answered: int
    deaths: int
    restarts: int
    reason: str


class Server:
    """Implements InferenceBackend, CanAbort, CanCheck and HasStates for the server at `url`, or for one that `process`
    starts.

    `changed` is called with a sentence when the server starts or stops serving. `sessions` are the episodes that a pool
    assigned to this server.
    """

    def __init__(
        self, dialect: Dialect, url: str, setup: ServerSetup, *, process: ServerProcess | None = None, name: str = ""
    ) -> None:
        assert setup.vocabulary_size > 0 and setup.connections_max > 0, setup
        self.dialect, self.setup, self.process = dialect, setup, process
        self.capabilities = setup.capabilities_with(dialect)
        self.vocabulary_size, self.context_tokens_max = setup.vocabulary_size, setup.context_tokens_max
        self.info: ServerInfo | None = None
        self.state = "starting"
        self.reason = "it was not started"
        self.changed: Callable[[str], None] = lambda words: None
        self.latest: WeightUpdate | None = None  # the weights that the server must serve
        self.incarnation = 0  # how many times the server has started to serve
        self.answered = 0
        self.sessions: set[str] = set()
        self._name = name
        self._loaded: WeightUpdate | None = None  # the last update of this incarnation
        self._requests: dict[str, _ActiveRequest] = {}  # all active requests, by session or by another unique name
        self._numbers = itertools.count()
        self._limiter = trio.CapacityLimiter(setup.connections_max)
        self._changing, self._verifying = trio.Lock(), trio.Lock()
        self._state_changed, self._request_ended = trio.Event(), trio.Event()
        self._deaths = self._restarts = self._tries = 0
        self._open(url or NOWHERE)

    def __repr__(self) -> str:
        shown = f"{self.dialect.software} at {self.url}"
        return f"{self._name} ({shown})" if self.process is not None else shown

    @property
    def is_serving(self) -> bool:
        """Whether requests may be sent."""
        return self.state not in ("starting", "down", "lost")

    @property
    def in_flight(self) -> int:
        """The number of requests that the server processes or that wait for it, without health checks and updates."""
        return sum(not each.is_internal for each in self._requests.values())

    def statistics(self) -> ServerStatistics:
        """The server's current statistics."""
        counts = len(self.sessions), self.in_flight, self.answered, self._deaths, self._restarts
        return ServerStatistics(self._name or self.url, self.state, self.version, *counts, self.reason)

    def states(self) -> list[EngineState]:
        """The server's state, for the live view."""
        state = "" if self.state == "ready" else self.state
        return [EngineState(self._name or self.url, self.version, self.in_flight, state)]

    def _set_state(self, state: str, reason: str = "") -> None:
        """Enter a state. Requests that cannot succeed any more are cancelled."""
        self.state, self.reason = state, reason or self.reason
        for each in self._requests.values():
            if not self.is_serving or (state == "faulty" and each.is_sent):
                each.scope.cancel()
        self._state_changed.set()
        self._state_changed = trio.Event()

    # --- connecting ---------------------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Identify the server. Raises ConfigError if the server cannot be used with the run's settings."""
        async with HTTPClient(self.url, api_key=self.setup.api_key) as client:
            await handshake(self.dialect, client, self.setup, repr(self))

    async def __aenter__(self) -> Self:
        await self._connect(self.url)
        self.incarnation += 1
        self._set_state("ready")
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._disconnect()

    def _open(self, url: str) -> None:
        """Reset the state of an earlier incarnation. Connections open with the first requests."""
        setup, key = self.setup, self.setup.api_key
        seconds, most = setup.request_seconds, setup.connections_max
        self._client = HTTPClient(
            url, api_key=key, timeout_seconds=seconds, connections_max=most, retries=setup.retries, seed=setup.seed
        )
        # Separate connections, so that an abort does not wait for the replies that it aborts.
        self._control = HTTPClient(url, api_key=key, timeout_seconds=setup.load_seconds, retries=setup.retries)
        self.url, self.version = self._client.url, 0
        self._versions: list[int] = []  # the loaded versions, in order
        # The names of the current and the previous adapter; "": none, so the base model answers.
        self._adapter, self._adapter_before = "", ""
        self._group: tuple[GroupPlace, Callable[[], None]] | None = None
        # Separates the caches of this run from those of other clients with the same version numbers.
        self._salt = secrets.token_hex(4)

    async def _connect(self, url: str) -> None:
        """Connect, and check that the server fits and generates. Raises ConfigError."""
        await self._disconnect()
        self._open(url)
        try:
            self.info = await handshake(self.dialect, self._control, self.setup, repr(self))
        except BaseException:
            await self._disconnect()
            raise
        limits = (self.info.context_tokens_max, self.setup.context_tokens_max)
        self.context_tokens_max = min(limits) if all(limits) else max(limits)

    async def _disconnect(self) -> None:
        """Unload this run's adapters, because a server has room for a few only. Then close the clients."""
        names = [name for name in (self._adapter_before, self._adapter) if name]
        self._adapter_before = self._adapter = ""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + UNLOAD_SECONDS):
            for name in names:
                try:
                    await self.dialect.unload_adapter(self._control, name)
                except InferenceError:
                    continue  # the server may be down
        for client in (self._client, self._control):
            await client.aclose()

    # --- requests -----------------------------------------------------------------------------------------------------

    def open_session(self, order: tuple[int, ...]) -> str:
        """A name for the episode. The server forms its batches itself."""
        return f"{'-'.join(map(str, order))}-{next(self._numbers)}"

    def close_session(self, session: str) -> None:
        """Forget the episode."""
        self.sessions.discard(session)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn. Raises InferenceError (HTTPFailure if the request failed). Cancellation closes the request's
        connection, which stops the server's work on it.
        """
        check_tokens(request.tokens, request.max_tokens, self.vocabulary_size, self.context_tokens_max, repr(self))
        sampled = None
        with self._registered(request.session or f"request-{next(self._numbers)}") as active:
            async with self._sending(active):
                sampled = await self.dialect.generate(self._client, request, active.target)
        if sampled is None:  # aborted before it was sent, or without a reply
            return Generation([], [], "abort", [])
        spans = spans_of(sampled, active.version, active.loads, self._versions, repr(self))
        self.answered += 1
        return Generation(sampled.tokens, sampled.logprobs, sampled.finish, spans)

    async def score(self, tokens: list[int], temperature: float = 1.0) -> list[float]:
        """The logprob of each token [L] given the tokens before it; the first is 0.0.

        Raises InferenceError, also for a temperature other than 1: servers report a prompt's logprobs at 1 only.
        """
        if temperature != 1.0:
            words = f"{self.dialect.software} scores at temperature 1 only, got {temperature:g}"
            raise InferenceError(words, is_transient=False)
        scores = await self._score(tokens)
        self.answered += 1
        return scores

    async def _score(self, tokens: list[int], *, is_internal: bool = False) -> list[float]:
        check_tokens(tokens, 1, self.vocabulary_size, self.context_tokens_max, repr(self))
        with self._registered(f"score-{next(self._numbers)}", is_internal=is_internal) as active:
            async with self._sending_alone(active) if self.capabilities.scores_alone else self._sending(active):
                return await self.dialect.score(self._client, tokens, active.target)
        raise AssertionError("nothing aborts a score but a failure, which is raised")

    async def health(self) -> Health:
        """Whether the server can generate. Waits while weights are loaded."""
        try:
            with self._registered(f"health-{next(self._numbers)}", is_internal=True) as active:
                async with self._sending(active):
                    await self.dialect.generate(self._client, HEALTH_REQUEST, active.target)
        except InferenceError as error:
            return Health(False, self.version, str(error))
        return Health(True, self.version)

    async def abort(self, session: str) -> None:
        """End the session's request early (see `CanAbort`)."""
        active = self._requests.get(session)
        if active is None:
            return
        with trio.move_on_after(ABORT_SECONDS):
            try:
                while active.is_sent and not active.is_over.is_set():
                    await self.dialect.abort(self._control, [active.target.name])
                    with trio.move_on_after(ABORT_AGAIN_SECONDS):
                        await active.is_over.wait()
            except InferenceError:
                pass  # the abort failed, so the request is cancelled below
        active.scope.cancel()  # harmless if the request is over
        await active.is_over.wait()

    @contextmanager
    def _registered(self, name: str, *, is_internal: bool = False) -> Iterator[_ActiveRequest]:
        """Register a request during this block. An abort ends the block early, without an exception. Raises
        InferenceError if the server is down or goes down, or if its weights become unknown.
        """
        assert name not in self._requests, f"session {name} already waits for a reply"
        self._check_serving(self.incarnation)
        active = _ActiveRequest(self._target(name), self.incarnation, is_internal)
        self._requests[name] = active
        try:
            with active.scope:
                yield active
        finally:
            del self._requests[name]
            active.is_over.set()
            self._request_ended.set()
        if active.scope.cancelled_caught:
            self._check_serving(active.incarnation)
            if self.state == "faulty":
                raise InferenceError(self.reason, is_transient=False)

    def _step(self, state: str, incarnation: int) -> None:
        """Enter the next state. Raises HTTPFailure if the server has gone down or restarted since `incarnation`."""
        self._check_serving(incarnation)
        self._set_state(state)

    def _check_serving(self, incarnation: int) -> None:
        if incarnation != self.incarnation or not self.is_serving:
            raise HTTPFailure("reset", f"{self!r} is down: {self.reason}", retryable=True)

    def _target(self, name: str) -> RequestTarget:
        """The target of a request with the current weights. Its name is unique, also among processes: a server refuses
        the name of a running request, and an abort ends all requests of a name.
        """
        name = f"{name}-{self._salt}-{next(self._numbers)}"
        return RequestTarget(name, self._adapter or self.setup.model, f"{self._salt}-{self.version}")

    @asynccontextmanager
    async def _sending(self, active: _ActiveRequest) -> AsyncIterator[None]:
        """Take a connection, wait until requests may be sent, and mark the request as sent."""
        await acquire(self._limiter)
        try:
            await self._wait_until_ready(active)
            self._send(active)
            yield
        finally:
            self._limiter.release()

    @asynccontextmanager
    async def _sending_alone(self, active: _ActiveRequest) -> AsyncIterator[None]:
        """Like `_sending`, with no other request in flight. It ignores the limit of connections."""
        await self._wait_until_ready(active)
        self._set_state("paused")
        try:
            await self._wait_for_requests(lambda other: True)
            self._send(active)
            yield
        finally:
            if self.state == "paused":
                self._set_state("ready")

    async def _wait_until_ready(self, active: _ActiveRequest) -> None:
        """Wait until requests may be sent. Raises InferenceError if the server is down or its weights are unknown."""
        while self.state in ("paused", "loading"):
            await self._state_changed.wait()
        self._check_serving(active.incarnation)
        if self.state == "faulty":
            raise InferenceError(self.reason, is_transient=False)

    def _send(self, active: _ActiveRequest) -> None:
        """Mark a request as sent, with the current weights."""
        active.is_sent, active.version, active.loads = True, self.version, len(self._versions)
        active.target = self._target("")._replace(name=active.target.name)

    async def _wait_for_requests(self, is_in_the_way: Callable[[_ActiveRequest], bool]) -> None:
        while any(each.is_sent and is_in_the_way(each) for each in self._requests.values()):
            self._request_ended = trio.Event()
            await self._request_ended.wait()

    # --- weights ------------------------------------------------------------------------------------------------------

    async def update_weights(self, update: WeightUpdate) -> None:
        """Load new weights. New requests wait, and `version` changes only after the server has loaded the weights.

        Requests in flight end first, unless the dialect keeps them. Requests that are kept continue with their adapter,
        or with the new full weights; their spans record the versions. A server that is down loads the weights when it
        restarts. Raises InferenceError. If loading fails or is cancelled, the weights are unknown, and requests fail
        until an update succeeds.
        """
        self.latest = update
        async with self._changing:  # a restart may be loading earlier weights
            if self._loaded is update:
                return
            with self._registered("update", is_internal=True) as active:
                await self._check_update(update)
                while self.state == "paused":  # a request scores alone
                    await self._state_changed.wait()
                before = self.state
                try:
                    self._step("paused", active.incarnation)
                    await self._drain(update)
                    self._step("loading", active.incarnation)
                    await self._load(update)
                    self._step("ready", active.incarnation)
                except InferenceError as error:
                    if self.state == "loading":
                        self._set_state("faulty", str(error))
                    raise
                finally:
                    if self.state == "paused":
                        self._set_state(before)
                    if self.state == "loading":
                        self._set_state(
                            "faulty", f"the update was cancelled while {self!r} loaded version {update.version}"
                        )

    async def _check_update(self, update: WeightUpdate) -> None:
        kind = self.capabilities.weights_kind
        if self._group is None or not update.kind == "full" == kind or not update.manifest:
            await check_update(update, kind, repr(self))

    async def _drain(self, update: WeightUpdate) -> None:
        """Wait for the requests that the update would break. Raises InferenceError."""
        with trio.move_on_after(self.setup.request_seconds) as waiting:
            if not self.dialect.keeps_requests:
                await self._wait_for_requests(lambda active: True)
            old = self._adapter_before if update.kind == "adapter" else ""
            await self._wait_for_requests(lambda active: bool(old) and active.target.model == old)
        if waiting.cancelled_caught:
            after = f"after {self.setup.request_seconds:g} seconds, so version {update.version} was not loaded"
            raise InferenceError(f"{self!r} has not finished its requests {after}")

    async def _load(self, update: WeightUpdate) -> None:
        """Make the server load the weights. Raises InferenceError."""
        self._loaded = None
        try:
            if update.kind == "adapter":
                keeps = self.dialect.keeps_requests
                old = self._adapter_before if keeps else self._adapter
                adapter = await self.dialect.load_adapter(self._control, update, old=old)
                self._adapter_before, self._adapter = self._adapter if keeps else "", adapter
            elif update.path is not None:
                await self.dialect.load_full(self._control, update)
            else:
                assert self.setup.groups is not None and self._group is not None, f"{self!r} is not in a group"
                place, receiving = self._group
                await self.setup.groups.receive(
                    self._control, update.manifest, update.version, name=place.name, receiving=receiving
                )
        except InferenceError as error:
            words = f"{self!r} did not load version {update.version}: {error}"
            raise InferenceError(words, is_transient=error.is_transient) from error
        self.version, self._loaded = update.version, update
        self._versions += [update.version] if update.kind == "full" else []

    async def group_ranks(self) -> int:
        """The server's number of ranks in a group (see `TakesGroup`). Raises ConfigError, HTTPFailure."""
        assert self.setup.groups is not None, f"{self!r} takes folders"
        return await self.setup.groups.ranks(self._control)

    async def join_group(self, place: GroupPlace, rank: int, receiving: Callable[[], None]) -> None:
        """Join as `rank` and the ranks after it (see `TakesGroup`). Raises InferenceError."""
        assert self.setup.groups is not None, f"{self!r} takes folders"
        await self.setup.groups.join(self._control, place, rank=rank)
        self._group = place, receiving

    async def leave_group(self) -> None:
        """Leave the group. Does nothing outside of a group. Raises HTTPFailure."""
        if self.setup.groups is not None and self._group is not None:
            place, self._group = self._group[0], None
            await self.setup.groups.leave(self._control, name=place.name)

    # --- supervision, in a pool ---------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start for the first time. Raises UserError if the server does not start, or does not generate."""
        try:
            await self._connect_and_load()
        except InferenceError as error:
            raise ConfigError(f"{self!r} cannot be used: {error}") from error

    async def end(self) -> None:
        """Stop serving. Ends the process if this run started it."""
        self._set_state("lost" if self.state == "lost" else "down")
        await self._disconnect()
        if self.process is not None:
            await self.process.end()

    async def supervise(self, nursery: trio.Nursery) -> None:
        """Monitor the server and restart it if it fails, until the nursery is cancelled."""
        nursery.start_soon(self._watch)
        if self.process is not None:
            nursery.start_soon(self._watch_process, self.process)
        while self.state != "lost":
            while self.state != "down":
                await self._state_changed.wait()
            await self._restart()

    def mark_down(self, why: str, incarnation: int) -> None:
        """Enter the state `down`, and cancel the server's requests. Does nothing if it is down or has restarted."""
        if self.is_serving and incarnation == self.incarnation:
            self._deaths += 1
            self.sessions.clear()
            self._set_state("down", why)
            self.changed(f"{self!r} is down: {why}")

    async def recover(self, failure: InferenceError, incarnation: int) -> InferenceError | None:
        """Handle a failed update. Returns the failure if the server still runs without the new weights, else None. A
        server that this run started is restarted once, and loads the weights again. Any other loads them when it is
        back.
        """
        if self.process is None:
            if has_answered(failure) and self.is_serving and incarnation == self.incarnation:
                return InferenceError(str(failure), is_transient=False)
            self.mark_down(str(failure), incarnation)
            return None
        tries = self._tries
        self.mark_down(str(failure), incarnation)
        while self.state == "down" and self._tries == tries:
            await self._state_changed.wait()
        again = f"it was restarted, and failed again: {self.reason}"
        return None if self.is_serving else InferenceError(f"{failure}; {again}", is_transient=False)

    async def verify(self) -> bool:
        """Check that the server generates with the right weights; if not, mark it as down."""
        async with self._verifying:
            if not self.is_serving:
                return False
            incarnation = self.incarnation
            fault = await self._fault_of_health() or await self._fault_of_weights()
            if fault and self.process is not None:
                with trio.move_on_after(DYING_SECONDS):  # the end of the process explains more
                    fault = await end_of(self.process)
            if fault:
                self.mark_down(fault, incarnation)
            return self.is_serving

    async def _fault_of_health(self) -> str:
        """Why the server does not generate; "" if it does."""
        answered = self.answered
        with trio.move_on_after(self.setup.health_seconds):
            health = await self.health()
            return "" if health.ok else health.detail or "it does not generate"
        if self.answered > answered or self.state == "loading":
            return ""  # the server is slow or loads weights, but it runs
        return f"it did not generate in {self.setup.health_seconds:g} seconds"

    async def _fault_of_weights(self) -> str:
        """Why the server's weights are wrong; "" if they are right, or if they cannot be checked now."""
        update = self._loaded
        if update is None or update.probe is None or self._changing.locked() or self.capabilities.scores_alone:
            return ""  # scoring alone would stop all other requests every few seconds
        fault = ""
        with trio.move_on_after(self.setup.health_seconds):
            try:
                theirs = await self._score(list(update.probe.tokens), is_internal=True)
                fault = fault_of_probe(update.probe, theirs, update.version)
            except InferenceError as error:
                fault = f"it does not score: {error}"
        return fault if self._loaded is update and not self._changing.locked() else ""

    async def _watch(self) -> None:
        while True:
            await self._wait_until_serving()
            await trio.sleep(self.setup.watch_seconds)
            await self.verify()

    async def _watch_process(self, process: ServerProcess) -> None:
        while True:
            await self._wait_until_serving()
            incarnation = self.incarnation
            self.mark_down(await end_of(process), incarnation)

    async def _wait_until_serving(self) -> None:
        while not self.is_serving:
            await self._state_changed.wait()

    async def _restart(self) -> None:
        """Restart the server until it serves, or until too many restarts failed."""
        for failures in itertools.count(1):
            try:
                await self._connect_and_load()
                return
            except (RolloutsError, OSError) as error:
                self.reason = str(error)
            self._tries += 1
            if self.process is not None and failures >= self.setup.restarts_max:
                self._set_state("lost")
                self.changed(f"{self!r} is lost after {failures} failed starts: {self.reason}")
                return
            self._set_state("down")
            await trio.sleep(min(self.setup.back_seconds * 2.0 ** (failures - 1), BACK_SECONDS_MAX))

    async def _connect_and_load(self) -> None:
        """Start or reach the server, and load the last weights. Raises RolloutsError."""
        await self._disconnect()
        if self.process is not None:
            self._restarts += self.incarnation > 0
            await self.process.start(self._connect)
        else:
            await self._connect(self.url)
        async with self._changing:
            try:
                self._loaded = None
                while self._loaded is not self.latest:
                    await self._restore_weights(self.latest)
            except BaseException:
                await self._disconnect()
                raise
            # There is no trio checkpoint since the loop compared the weights, so no other task ran.
            self.incarnation += 1
            self._set_state("ready")
        with_version = f", with version {self.version}" if self._loaded else ""
        self.changed(f"{self!r} serves{' again' if self.incarnation > 1 else ''}{with_version}")

    async def _restore_weights(self, update: WeightUpdate | None) -> None:
        """Load and probe the weights before other requests are sent. Raises InferenceError."""
        assert update is not None, "an update never becomes None again"
        await self._check_update(update)
        await self._load(update)
        if update.probe is not None:
            scoring = self.dialect.score(self._client, list(update.probe.tokens), self._target("probe"))
            with trio.move_on_after(self.setup.health_seconds):
                if fault := fault_of_probe(update.probe, await scoring, update.version):
                    raise InferenceError(fault)
                return
            raise InferenceError(f"it did not score a test sequence in {self.setup.health_seconds:g} seconds")


class _ActiveRequest:
    """One request: its target, the server's incarnation, and a scope that cancels it. Once it `is_sent`, `version` is
    the version of the weights that answer it, and `loads` the number of weight loads before it.
    """

    __slots__ = ("incarnation", "is_internal", "is_over", "is_sent", "loads", "scope", "target", "version")

    def __init__(self, target: RequestTarget, incarnation: int, is_internal: bool) -> None:
        self.target, self.incarnation, self.is_internal = target, incarnation, is_internal
        self.scope, self.is_over = trio.CancelScope(), trio.Event()
        self.is_sent = False
        self.version = self.loads = 0
