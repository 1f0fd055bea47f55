"""ServerPool: several model servers as one engine. It routes requests; each `Server` supervises itself.

An episode stays on its server. Episodes of one prompt start on the same server. If this server is much busier than the
others, they start on the server with the fewest episodes. If a server dies, its requests are sent again, from their
start, to another server. Each request gets exactly one reply, or raises InferenceError. New weights go to all servers.
While no server is available, requests wait up to `give_up_seconds`.

    servers = [Server(VLLM(), "http://127.0.0.1:8000", setup), Server(VLLM(), "", setup, process=process)]
    async with ServerPool(servers) as pool:
        reply = await pool.generate(request)

`options` creates the servers.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import msgspec
import trio

from rollouts.errors import InferenceError
from rollouts.inference.base import EngineState, GenerateRequest, Generation, Health, InferenceBackend, WeightUpdate
from rollouts_servers.http import HTTPFailure
from rollouts_servers.server import Server, ServerStatistics

REQUEST_FAILURES_MAX = 3  # after this many failures on servers that stay up, a request fails
SERVER_FAILURES_MAX = 5  # after this many servers died during a request, it fails, because it may be the cause
PROMPTS_MAX = 4096  # the number of prompts whose server is remembered


class ServerPoolStatistics(NamedTuple):
    """Statistics of each server, and the numbers of requests that were rerouted to another server or failed."""

    servers: tuple[ServerStatistics, ...]
    rerouted: int
    failed: int


class ServerPool:
    """Implements InferenceBackend, CanAbort, CanCheck, HasStates and EnginePool over servers.

    `prepare` is called before servers start, and `finish` after all have ended. `changed` is called with a sentence
    when a server starts or stops serving. Entering the pool raises UserError if a server cannot be used. Leaving the
    pool ends the servers that it started, also on cancellation.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        give_up_seconds: float = 600.0,
        prepare: Callable[[], Awaitable[None]] | None = None,
        finish: Callable[[], Awaitable[None]] | None = None,
        changed: Callable[[str], None] = lambda words: None,
    ) -> None:
        assert servers, "a pool has a server"
        self.servers = tuple(servers)
        self._give_up_seconds, self._prepare, self._finish, self._changed = give_up_seconds, prepare, finish, changed
        first = self.servers[0]
        self.capabilities = first.capabilities._replace(is_pool=True)
        self.context_tokens_max, self.vocabulary_size = first.context_tokens_max, first.vocabulary_size
        self.version = 0  # of the last update
        self._orders: dict[str, tuple[int, ...]] = {}  # of the open sessions
        self._prompt_servers: dict[int, Server] = {}  # by prompt, in order of use
        self._routed: dict[str, _RoutedRequest] = {}
        self._numbers = itertools.count()
        self._change = trio.Event()
        self._idle_since: float | None = None  # the time since which no server is available
        self._rerouted = self._failed = 0
        for server in self.servers:
            server.changed = self._on_change

    def __repr__(self) -> str:
        return f"a pool of {', '.join(map(repr, self.servers))}"

    @property
    def members(self) -> tuple[InferenceBackend, ...]:
        """The servers that can serve requests now. A server stays the same object when it restarts."""
        return tuple(server for server in self.servers if server.is_serving)

    def statistics(self) -> ServerPoolStatistics:
        """The current statistics of the pool and of each server."""
        return ServerPoolStatistics(tuple(each.statistics() for each in self.servers), self._rerouted, self._failed)

    def states(self) -> list[EngineState]:
        """The state of each server now."""
        return [state for server in self.servers for state in server.states()]

    # --- starting and ending ------------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Check the servers that already run. Raises the UserError of the first one that cannot be used."""
        for server in self.servers:
            if server.process is None:
                await server.check()

    async def __aenter__(self) -> Self:
        errors: list[Exception] = []

        async def start(server: Server) -> None:
            try:
                await server.start()
            except Exception as error:
                errors.append(error)
                nursery.cancel_scope.cancel()  # do not wait for the others

        try:
            if self._prepare is not None:
                await self._prepare()
            async with trio.open_nursery() as nursery:
                for server in self.servers:
                    nursery.start_soon(start, server)
            if errors:
                raise errors[0]
            self.context_tokens_max = min(server.context_tokens_max for server in self.servers)
            self._manager = trio.open_nursery()
            self._nursery = await self._manager.__aenter__()
        except BaseException:
            await self._end()
            raise
        for server in self.servers:
            self._nursery.start_soon(server.supervise, self._nursery)
        return self

    async def __aexit__(self, *exc: object) -> None:
        # The nursery is shielded and does not receive the exception, so the exception is not wrapped in a group.
        self._nursery.cancel_scope.shield = True
        self._nursery.cancel_scope.cancel()
        try:
            await self._manager.__aexit__(None, None, None)
        finally:
            await self._end()

    async def _end(self) -> None:
        with trio.CancelScope(shield=True):  # each server has its own deadline
            async with trio.open_nursery() as nursery:
                for server in self.servers:
                    nursery.start_soon(server.end)
            if self._finish is not None:
                await self._finish()

    # --- episodes -----------------------------------------------------------------------------------------------------

    def open_session(self, order: tuple[int, ...]) -> str:
        """A name for the episode. Its server is chosen at its first request."""
        session = f"{'-'.join(map(str, order))}-{next(self._numbers)}"
        self._orders[session] = tuple(order)
        return session

    def close_session(self, session: str) -> None:
        """Forget the episode. It is safe to close a session twice."""
        self._orders.pop(session, None)
        for server in self.servers:
            server.close_session(session)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn on any server.

        Raises InferenceError if a server refuses the request, if the request failed too often, or if no server was
        available for `give_up_seconds` (with each server's reason).
        """
        session = request.session or f"request-{next(self._numbers)}"
        routed = self._routed[session] = _RoutedRequest(session, self._orders.get(session) or tuple(request.order))
        request = msgspec.structs.replace(request, session=session)
        try:
            with routed.scope:
                while True:
                    server = await self._choose_server(routed)
                    try:
                        reply = await server.generate(request)
                        if reply.finish != "abort" or routed.is_aborted:
                            return reply
                        raise InferenceError(f"{server!r} aborted a reply without a request to abort")
                    except InferenceError as error:
                        await self._reroute(routed, server, error)
            return Generation([], [], "abort", [])
        finally:
            if self._routed.get(session) is routed:
                del self._routed[session]
            if session not in self._orders:  # the session was closed during the request, or never opened
                self.close_session(session)

    async def score(self, tokens: list[int], temperature: float = 1.0) -> list[float]:
        """The logprob of each token [L] given the tokens before it, from any server; the first is 0.0. Raises like
        `generate`.
        """
        routed = _RoutedRequest()
        while True:
            server = await self._choose_server(routed)
            try:
                return await server.score(tokens, temperature)
            except InferenceError as error:
                await self._reroute(routed, server, error)

    async def abort(self, session: str) -> None:
        """End the session's request early (see `CanAbort`). If the server cannot be reached, the tokens of the reply
        are lost.
        """
        routed = self._routed.get(session)
        if routed is not None:
            routed.is_aborted = True
            if routed.server is not None:
                await routed.server.abort(session)
            routed.scope.cancel()  # the request may wait for a server; no effect if it is over

    async def _choose_server(self, routed: _RoutedRequest) -> Server:
        """Choose a server; waits until one is available. Raises InferenceError, with each server's reason."""
        while not (serving := [server for server in self.servers if server.is_serving]):
            change = self._change
            since = trio.current_time() if self._idle_since is None else self._idle_since
            if all(server.state == "lost" for server in self.servers):
                raise self._no_server("no server is left")
            with trio.move_on_at(since + self._give_up_seconds):
                await change.wait()
                continue
            raise self._no_server(f"no server was available for {self._give_up_seconds:g} seconds")
        usable = [server for server in serving if server not in routed.avoided] or serving
        found = next((server for server in usable if routed.session in server.sessions), None)
        found = found or self._least_busy(usable, routed.order)
        if routed.session in self._orders and routed.session not in found.sessions:
            for server in self.servers:
                server.close_session(routed.session)
            found.sessions.add(routed.session)
        if routed.order:
            self._prompt_servers.pop(routed.order[0], None)
            self._prompt_servers[routed.order[0]] = found
            if len(self._prompt_servers) > PROMPTS_MAX:
                del self._prompt_servers[next(iter(self._prompt_servers))]
        routed.server, routed.incarnation = found, found.incarnation
        return found

    def _least_busy(self, usable: Sequence[Server], order: tuple[int, ...]) -> Server:
        """The server that has the prompt; if it is much busier than the others, the one with the fewest episodes or
        requests.

        "Much busier" means: more than half the average number of episodes above the minimum.
        """
        loads = {server: max(len(server.sessions), server.in_flight) for server in usable}
        least = min(usable, key=lambda server: loads[server])
        preferred = self._prompt_servers.get(order[0]) if order else None
        slack = max(1, len(self._orders) // (2 * len(usable)))
        return preferred if preferred in loads and loads[preferred] <= loads[least] + slack else least

    async def _reroute(self, routed: _RoutedRequest, server: Server, error: InferenceError) -> None:
        """Prepare a failed request for another server. Raises the error if another server would fail too, or if the
        request failed too often.
        """
        routed.server = None
        if not error.is_transient and server.is_serving:
            # 404: a restarted server lost its adapters; another server may still have this one.
            is_lost = isinstance(error, HTTPFailure) and error.status == 404
            if not is_lost or await server.verify():
                self._failed += 1
                raise error
        self._rerouted += 1
        if routed.is_aborted:
            routed.scope.cancel()
            await trio.lowlevel.checkpoint()
        is_busy = isinstance(error, HTTPFailure) and error.kind == "busy"
        if server.is_serving and server.incarnation == routed.incarnation and (is_busy or await server.verify()):
            routed.avoided.append(server)
        else:
            routed.server_failures += 1
        if len(routed.avoided) >= REQUEST_FAILURES_MAX:
            self._failed += 1
            raise error
        if routed.server_failures >= SERVER_FAILURES_MAX:
            self._failed += 1
            raise InferenceError(
                f"{routed.server_failures} servers died during one request; the last one: {server.reason}"
            ) from error

    def _no_server(self, what: str) -> InferenceError:
        self._failed += 1
        each = "\n".join(f"  {server!r}, {server.state}: {server.reason}" for server in self.servers)
        return InferenceError(f"{what}:\n{each}")

    # --- weights and health -------------------------------------------------------------------------------------------

    async def update_weights(self, update: WeightUpdate) -> None:
        """Load weights on every server. A server that is down loads them before it serves again. Raises InferenceError
        if a running server did not load them, or if no server is available.
        """
        self.version = update.version
        errors: list[InferenceError] = []

        async def send(server: Server) -> None:
            was_serving, incarnation = server.is_serving, server.incarnation
            try:
                await server.update_weights(update)
            except InferenceError as error:
                failure = await server.recover(error, incarnation) if was_serving else None
                errors.extend([failure] if failure is not None else [])

        async with trio.open_nursery() as nursery:
            for server in self.servers:
                server.latest = update  # also used by a server that restarts now
                nursery.start_soon(send, server)
        if errors:
            raise errors[0]
        await self._choose_server(_RoutedRequest())

    async def health(self) -> Health:
        """Whether any server generates."""
        fine = [server for server in self.servers if server.is_serving and await server.verify()]
        words = "; ".join(f"{each!r}: {each.reason}" for each in self.servers if each not in fine)
        return Health(bool(fine), self.version, words)

    def _on_change(self, words: str) -> None:
        if self.members:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = trio.current_time()
        self._change.set()
        self._change = trio.Event()
        self._changed(words)


@dataclass(eq=False)
class _RoutedRequest:
    """A request in the pool: its server with the server's incarnation, and whether the request was aborted."""

    session: str = ""
    order: tuple[int, ...] = ()
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    is_aborted: bool = False
    server: Server | None = None
    incarnation: int = 0
    avoided: list[Server] = field(default_factory=list)
    server_failures: int = 0
