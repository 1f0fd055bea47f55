"""Server: one model server, whatever it speaks, from its start to its end.

    async with Server(VLLM(), "http://127.0.0.1:8000", ServerSetup(vocabulary_size=469)) as server:
        reply = await server.generate(request)

It checks ids before they are sent (one of them kills some servers), has requests wait while weights change, gives back
replies under way when asked for, and says which weights sampled each token. It is always in one state:

    starting   it has not served yet
    ready      requests are sent
    paused     requests wait: those under way end first, before weights are loaded or while it scores alone
    loading    requests wait while it loads new weights
    faulty     an update failed, so its weights are unknown: requests fail until one succeeds
    down       it died, or serves other weights than the last ones; a pool brings it back
    lost       it was started in vain too often

A pool supervises its servers (`supervise`). It monitors each server and restarts those that it started itself. A
restarted server receives the last weights, and they are probed, before it serves again. Elsewhere: the HTTP calls of
each kind of server (`vllm`, `sglang`), the choice of a server (`server_pool`), its process (`process`), and the proof
of a weight sync (`training.weights.sync`).
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple, Self

import trio

from rollouts.errors import ConfigError, InferenceError, RolloutsError
from rollouts.inference.base import GenerateRequest, Generation, Health, WeightUpdate
from rollouts.inference.servers.checks import (
    ServerSetup,
    check_tokens,
    check_update,
    fault_of_probe,
    handshake,
    has_answered,
    spans_of,
)
from rollouts.inference.servers.dialect import Dialect, GroupPlace, RequestTarget, ServerInfo
from rollouts.inference.servers.http import HTTPClient, HTTPFailure, PlainClient, acquire
from rollouts.inference.servers.process import ServerProcess, end_of

CONTROL_CONNECTIONS = 8  # beside those that wait for replies: more cost httpx milliseconds a request
ABORT_AGAIN_SECONDS = 0.2  # a server may be asked to stop what it has not read yet
ABORT_SECONDS = 10.0  # then the connection is closed
BACK_SECONDS_MAX = 30.0
DYING_SECONDS = 2.0  # a server that does not answer any more may be about to end
UNLOAD_SECONDS = 5.0  # a server that is left is not waited for longer
NOWHERE = "http://127.0.0.1:1"  # until a server that is started here has a port
ALIVE = GenerateRequest([0], 1, (), 0, temperature=0.0)  # one token: a dead engine may still say that it is well


class ServerStatistics(NamedTuple):
    """One server now, and counts since it was first started. `reason` says why it is not ready, or last was not."""

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
    """Implements InferenceBackend, CanAbort and CanCheck for the server at `url`, or the one that `process` starts.

    `changed` is called with what happens to it, in words. `sessions` are the episodes that a pool has given it.
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
        self.latest: WeightUpdate | None = None  # the weights that it must have
        self.incarnation = 0  # how often it has begun to serve
        self.answered = 0
        self.sessions: set[str] = set()
        self._name = name
        self._loaded: WeightUpdate | None = None  # the last of this incarnation
        self._requests: dict[str, _ActiveRequest] = {}  # all that is asked of it, by session or another name of ours
        self._numbers = itertools.count()
        self._limiter = trio.CapacityLimiter(setup.connections_max)
        self._changing, self._verifying = trio.Lock(), trio.Lock()
        self._state_changed, self._request_ended = trio.Event(), trio.Event()  # the state changed; a request is over
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
        """Requests that it works on, or that wait for it, without those by which it is watched."""
        return sum(not each.is_internal for each in self._requests.values())

    def statistics(self) -> ServerStatistics:
        """A snapshot."""
        counts = len(self.sessions), self.in_flight, self.answered, self._deaths, self._restarts
        return ServerStatistics(self._name or self.url, self.state, self.version, *counts, self.reason)

    def _set_state(self, state: str, reason: str = "") -> None:
        """What is under way is given up where nothing of it could be used any more."""
        self.state, self.reason = state, reason or self.reason
        for each in self._requests.values():
            if not self.is_serving or (state == "faulty" and each.is_sent):
                each.scope.cancel()
        self._state_changed.set()
        self._state_changed = trio.Event()

    # --- coming and going ---------------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Ask the server who it is. Raises ConfigError where it cannot be used as it is set up."""
        async with PlainClient(self.url, api_key=self.setup.api_key) as client:
            await handshake(self.dialect, client, self.setup, repr(self))

    async def __aenter__(self) -> Self:
        await self._connect(self.url)
        self.incarnation += 1
        self._set_state("ready")
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._disconnect()

    def _open(self, url: str) -> None:
        """Forget what another incarnation has left; connections are made when something is asked."""
        setup, key = self.setup, self.setup.api_key
        seconds, most = setup.request_seconds, setup.connections_max
        self._client = HTTPClient(
            url, api_key=key, timeout_seconds=seconds, connections_max=most, retries=setup.retries, seed=setup.seed
        )
        # Apart from those that wait for a reply: to abort one must not wait for it.
        self._control = PlainClient(url, api_key=key, connections_max=CONTROL_CONNECTIONS, retries=setup.retries)
        self._loader = PlainClient(url, api_key=key, timeout_seconds=setup.load_seconds, retries=setup.retries)
        self.url, self.version = self._client.url, 0
        self._versions: list[int] = []  # those that were loaded, in this order
        # Adapters by name; empty: there is none, and the base model answers.
        self._adapter, self._adapter_before = "", ""
        self._group: tuple[GroupPlace, Callable[[], None]] | None = None
        # A server has other clients, and its caches may hold what another run computed under the same version.
        self._salt = secrets.token_hex(4)

    async def _connect(self, url: str) -> None:
        """See who is there, and that it generates. Raises ConfigError."""
        await self._disconnect()
        self._open(url)
        self.info = await handshake(self.dialect, self._control, self.setup, repr(self))
        limits = (self.info.context_tokens_max, self.setup.context_tokens_max)
        self.context_tokens_max = min(limits) if all(limits) else max(limits)

    async def _disconnect(self) -> None:
        """Unload the adapters that were loaded here: a server has room for a few, and these are never named again."""
        names = [name for name in (self._adapter_before, self._adapter) if name]
        self._adapter_before = self._adapter = ""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + UNLOAD_SECONDS):
            for name in names:
                try:
                    await self.dialect.unload_adapter(self._control, name)
                except InferenceError:
                    continue  # a server that is left need not be well
        for client in (self._client, self._control, self._loader):
            await client.aclose()

    # --- requests -----------------------------------------------------------------------------------------------------

    def open_session(self, order: tuple[int, ...]) -> str:
        """A name for the episode; a server forms its batches by itself."""
        return f"{'-'.join(map(str, order))}-{next(self._numbers)}"

    def close_session(self, session: str) -> None:
        """Nothing is kept for a session."""
        self.sessions.discard(session)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn. Raises InferenceError (HTTPFailure where the request failed). Cancellation closes the
        request's connection, and the server stops.
        """
        check_tokens(request.tokens, request.max_tokens, self.vocabulary_size, self.context_tokens_max, repr(self))
        sampled = None
        with self._registered(request.session or f"request-{next(self._numbers)}") as active:
            async with self._sending(active):
                sampled = await self.dialect.generate(self._client, request, active.target)
        if sampled is None:  # aborted before it was sent, or where nothing came back
            return Generation([], [], "abort", [])
        spans = spans_of(sampled, active.version, active.loads, self._versions, repr(self))
        self.answered += 1
        return Generation(sampled.tokens, sampled.logprobs, sampled.finish, spans)

    async def score(self, tokens: list[int], temperature: float = 1.0) -> list[float]:
        """Logprob of each token [L] given those before it; the first is 0.0. Raises InferenceError, for another
        temperature than 1 too: servers give a prompt's logprobs at no other.
        """
        if temperature != 1.0:
            words = f"{self.dialect.software} scores at temperature 1 only, asked for {temperature:g}"
            raise InferenceError(words, is_transient=False)
        scores = await self._score(tokens)
        self.answered += 1
        return scores

    async def _score(self, tokens: list[int], *, is_internal: bool = False) -> list[float]:
        check_tokens(tokens, 1, self.vocabulary_size, self.context_tokens_max, repr(self))
        with self._registered(f"score-{next(self._numbers)}", is_internal=is_internal) as active:
            async with self._sending_alone(active) if self.capabilities.scores_alone else self._sending(active):
                return await self.dialect.score(self._client, tokens, active.target)
        raise AssertionError("only a failure aborts a score, and that is raised")

    async def health(self) -> Health:
        """Whether it can generate. While weights are loaded it waits."""
        try:
            with self._registered(f"health-{next(self._numbers)}", is_internal=True) as active:
                async with self._sending(active):
                    await self.dialect.generate(self._client, ALIVE, active.target)
        except InferenceError as error:
            return Health(False, self.version, str(error))
        return Health(True, self.version)

    async def abort(self, session: str) -> None:
        """Give back what the session waits for, as far as it came (see `CanAbort`)."""
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
                pass  # it cannot be asked: the reply is given up, below
        active.scope.cancel()  # harmless where it is over
        await active.is_over.wait()

    @contextmanager
    def _registered(self, name: str, *, is_internal: bool = False) -> Iterator[_ActiveRequest]:
        """Within this block a request is active. Where it is aborted, the block ends early, and nothing is raised.
        Raises InferenceError where the server is down, or goes down meanwhile, and where its weights become unknown.
        """
        assert name not in self._requests, f"session {name} waits for a reply already"
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
        """Enter the next state. Raises HTTPFailure if this incarnation is over, which a task may notice late."""
        self._check_serving(incarnation)
        self._set_state(state)

    def _check_serving(self, incarnation: int) -> None:
        if incarnation != self.incarnation or not self.is_serving:
            raise HTTPFailure("reset", f"{self!r} is down: {self.reason}", retryable=True)

    def _target(self, name: str) -> RequestTarget:
        """How the server knows a request, with the weights that are served now. Each has a name of its own: servers
        refuse one that is still running, as a lost one may be, and an abort takes all of its name, also those of
        another process that counts as this one does.
        """
        name = f"{name}-{self._salt}-{next(self._numbers)}"
        return RequestTarget(name, self._adapter or self.setup.model, f"{self._salt}-{self.version}")

    @asynccontextmanager
    async def _sending(self, active: _ActiveRequest) -> AsyncIterator[None]:
        """Within this block it is under way: with a connection, while requests may be sent."""
        await acquire(self._limiter)
        try:
            await self._wait_until_ready(active)
            self._send(active)
            yield
        finally:
            self._limiter.release()

    @asynccontextmanager
    async def _sending_alone(self, active: _ActiveRequest) -> AsyncIterator[None]:
        """Within this block it is under way, and nothing else is. It needs no turn: those that wait may have all."""
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
        """Until requests may be sent. Raises InferenceError where they would fail."""
        while self.state in ("paused", "loading"):
            await self._state_changed.wait()
        self._check_serving(active.incarnation)
        if self.state == "faulty":
            raise InferenceError(self.reason, is_transient=False)

    def _send(self, active: _ActiveRequest) -> None:
        """From here on it is under way, with the weights that are served now."""
        active.is_sent, active.version, active.loads = True, self.version, len(self._versions)
        active.target = self._target("")._replace(name=active.target.name)

    async def _wait_for_requests(self, is_in_the_way: Callable[[_ActiveRequest], bool]) -> None:
        while any(each.is_sent and is_in_the_way(each) for each in self._requests.values()):
            self._request_ended = trio.Event()
            await self._request_ended.wait()

    # --- weights ------------------------------------------------------------------------------------------------------

    async def update_weights(self, update: WeightUpdate) -> None:
        """Serve other weights: new requests wait, and only when the server has loaded is `version` the new one. What is
        under way ends first, unless the dialect keeps it: then it goes on, with its own adapter, or with the new
        weights from then on (its spans say so). A server that is down takes them when it comes back.

        Raises InferenceError, also where it is cancelled while the server loads: what the server holds is unknown then,
        and every request fails with the reason until an update succeeds.
        """
        self.latest = update
        async with self._changing:  # one that comes back may be about to take up earlier ones
            if self._loaded is update:
                return
            with self._registered("update", is_internal=True) as active:
                await self._check_update(update)
                while self.state == "paused":  # something scores alone
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
                        self._set_state("faulty", f"{self!r} was left while it loaded version {update.version}")

    async def _check_update(self, update: WeightUpdate) -> None:
        kind = self.capabilities.weights_kind
        if self._group is None or not update.kind == "full" == kind or not update.manifest:
            await check_update(update, kind, repr(self))

    async def _drain(self, update: WeightUpdate) -> None:
        """Until nothing is under way that could not go on."""
        with trio.move_on_after(self.setup.request_seconds) as waiting:
            if not self.dialect.keeps_requests:
                await self._wait_for_requests(lambda active: True)
            old = self._adapter_before if update.kind == "adapter" else ""
            await self._wait_for_requests(lambda active: bool(old) and active.target.model == old)
        if waiting.cancelled_caught:
            after = f"after {self.setup.request_seconds:g} seconds, so version {update.version} was not loaded"
            raise InferenceError(f"{self!r} has not ended what was under way {after}")

    async def _load(self, update: WeightUpdate) -> None:
        """Have it load them. Raises InferenceError."""
        self._loaded = None
        try:
            if update.kind == "adapter":
                keeps = self.dialect.keeps_requests
                old = self._adapter_before if keeps else self._adapter
                adapter = await self.dialect.load_adapter(self._loader, update, old=old)
                self._adapter_before, self._adapter = self._adapter if keeps else "", adapter
            elif update.path is not None:
                await self.dialect.load_full(self._loader, update)
            else:
                assert self.setup.groups is not None and self._group is not None, f"{self!r} is in no group"
                place, receiving = self._group
                await self.setup.groups.receive(
                    self._loader, update.manifest, update.version, name=place.name, receiving=receiving
                )
        except InferenceError as error:
            words = f"{self!r} did not load version {update.version}: {error}"
            raise InferenceError(words, is_transient=error.is_transient) from error
        self.version, self._loaded = update.version, update
        self._versions += [update.version] if update.kind == "full" else []

    async def group_ranks(self) -> int:
        """How many ranks of a group it is (see `TakesGroup`). Raises ConfigError, HTTPFailure."""
        assert self.setup.groups is not None, f"{self!r} takes folders"
        return await self.setup.groups.ranks(self._control)

    async def join_group(self, place: GroupPlace, rank: int, receiving: Callable[[], None]) -> None:
        """Join as `rank` and those after it (see `TakesGroup`). Raises InferenceError."""
        assert self.setup.groups is not None, f"{self!r} takes folders"
        await self.setup.groups.join(self._control, place, rank=rank)
        self._group = place, receiving

    async def leave_group(self) -> None:
        """Leave it; harmless where it is in none. Raises HTTPFailure."""
        if self.setup.groups is not None and self._group is not None:
            place, self._group = self._group[0], None
            await self.setup.groups.leave(self._control, name=place.name)

    # --- supervision, in a pool ---------------------------------------------------------------------------------------

    async def start(self) -> None:
        """The first time. Raises UserError, also where it is there and does not generate."""
        try:
            await self._connect_and_load()
        except InferenceError as error:
            raise ConfigError(f"{self!r} cannot be used: {error}") from error

    async def end(self) -> None:
        """It serves no more. Its process, if it was started here, is gone."""
        self._set_state("lost" if self.state == "lost" else "down")
        await self._disconnect()
        if self.process is not None:
            await self.process.end()

    async def supervise(self, nursery: trio.Nursery) -> None:
        """Watch it, and bring it back, until the nursery is cancelled."""
        nursery.start_soon(self._watch)
        if self.process is not None:
            nursery.start_soon(self._watch_process, self.process)
        while self.state != "lost":
            while self.state != "down":
                await self._state_changed.wait()
            await self._restart()

    def mark_down(self, why: str, incarnation: int) -> None:
        """It does not serve: requests to it are given up. Nothing happens where that is known, or was in an earlier
        incarnation.
        """
        if self.is_serving and incarnation == self.incarnation:
            self._deaths += 1
            self.sessions.clear()
            self._set_state("down", why)
            self.changed(f"{self!r} is down: {why}")

    async def recover(self, failure: InferenceError, incarnation: int) -> InferenceError | None:
        """After an update that failed: one that was started here is started again, and given the weights again, once.
        One that is dead takes them when it comes back. Gives the failure of one that lives without the weights.
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
        again = f"it was started again, and failed again: {self.reason}"
        return None if self.is_serving else InferenceError(f"{failure}; {again}", is_transient=False)

    async def verify(self) -> bool:
        """See whether it generates, with the right weights; it is marked down if not."""
        async with self._verifying:
            if not self.is_serving:
                return False
            incarnation = self.incarnation
            fault = await self._fault_of_health() or await self._fault_of_weights()
            if fault and self.process is not None:
                with trio.move_on_after(DYING_SECONDS):  # a process that has ended says more
                    fault = await end_of(self.process)
            if fault:
                self.mark_down(fault, incarnation)
            return self.is_serving

    async def _fault_of_health(self) -> str:
        """Why it does not generate; empty where it does."""
        answered = self.answered
        with trio.move_on_after(self.setup.health_seconds):
            health = await self.health()
            return "" if health.ok else health.detail or "it does not generate"
        if self.answered > answered or self.state == "loading":
            return ""  # it is slow, or loads, and is alive
        return f"it did not generate in {self.setup.health_seconds:g} seconds"

    async def _fault_of_weights(self) -> str:
        """Why it serves other weights than the last ones; empty where it does not, or that cannot be seen now."""
        update = self._loaded
        if update is None or update.probe is None or self._changing.locked() or self.capabilities.scores_alone:
            return ""  # one that scores alone would have to be silent first, every few seconds
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
        """Until it serves, or is lost."""
        for failures in itertools.count(1):
            try:
                await self._connect_and_load()
                return
            except (RolloutsError, OSError) as error:
                self.reason = str(error)
            self._tries += 1
            if self.process is not None and failures >= self.setup.restarts_max:
                self._set_state("lost")
                self.changed(f"{self!r} is lost after {failures} starts: {self.reason}")
                return
            self._set_state("down")
            await trio.sleep(min(self.setup.back_seconds * 2.0 ** (failures - 1), BACK_SECONDS_MAX))

    async def _connect_and_load(self) -> None:
        """Connect to a server that generates, and give it the last weights. Raises RolloutsError."""
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
            # From the last look at the weights to here nothing else runs.
            self.incarnation += 1
            self._set_state("ready")
        with_version = f", with version {self.version}" if self._loaded else ""
        self.changed(f"{self!r} serves{' again' if self.incarnation > 1 else ''}{with_version}")

    async def _restore_weights(self, update: WeightUpdate | None) -> None:
        """Load these weights, before anything else is asked, and probe them. Raises InferenceError."""
        assert update is not None, "weights that were there are never taken back"
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
