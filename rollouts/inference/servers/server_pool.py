"""ServerPool: several model servers as one engine. It only routes; each server keeps itself (`server`).

An episode stays on its server, and episodes of one prompt begin on the same one, as long as that is not much busier
than the others; else the one with the fewest episodes is asked. A request whose server dies is asked again, whole, of
another: it is answered exactly once, by whichever server lived, or raises InferenceError. New weights go to all of
them. While no server serves, requests wait, up to `give_up_seconds`.

    servers = [Server(VLLM(), "http://127.0.0.1:8000", setup), Server(VLLM(), "", setup, process=process)]
    async with ServerPool(servers) as pool:
        reply = await pool.generate(request)

Left out: what a server is asked (`server`), where servers come from (`options`).
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import msgspec
import trio

from rollouts.errors import InferenceError
from rollouts.inference.base import GenerateRequest, Generation, Health, InferenceBackend, WeightUpdate
from rollouts.inference.servers.http import HTTPFailure
from rollouts.inference.servers.server import Server, ServerStatistics

REQUEST_FAILURES_MAX = 3  # failures of one request while its servers live
SERVER_FAILURES_MAX = 5  # servers that may die under one request: it may be what kills them
PROMPTS_MAX = 4096  # prompts whose server is remembered


class ServerPoolStatistics(NamedTuple):
    """What each server is and did; how many requests were carried to another server, and were given up."""

    servers: tuple[ServerStatistics, ...]
    rerouted: int
    failed: int


class ServerPool:
    """Implements InferenceBackend, CanAbort, CanCheck and EnginePool over servers.

    `prepare` is called before any server is started, `finish` when all have ended, and `changed` with what happens to
    servers, in words. Entering it raises UserError where a server cannot be used; leaving it ends those that were
    started here, also where it is cancelled.
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
        self.version = 0  # of the last weights that it was given
        self._orders: dict[str, tuple[int, ...]] = {}  # of the open sessions
        self._prompt_servers: dict[int, Server] = {}  # of each prompt, the last used last
        self._routed: dict[str, _RoutedRequest] = {}
        self._numbers = itertools.count()
        self._change = trio.Event()
        self._idle_since: float | None = None  # no server serves since then
        self._rerouted = self._failed = 0
        for server in self.servers:
            server.changed = self._on_change

    def __repr__(self) -> str:
        return f"a pool of {', '.join(map(repr, self.servers))}"

    @property
    def members(self) -> tuple[InferenceBackend, ...]:
        """Those that serve now; each stays the same object over its restarts."""
        return tuple(server for server in self.servers if server.is_serving)

    def statistics(self) -> ServerPoolStatistics:
        """What it did, and does now."""
        return ServerPoolStatistics(tuple(each.statistics() for each in self.servers), self._rerouted, self._failed)

    # --- coming and going ---------------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Ask the servers that are there already who they are. Raises UserError of the first that cannot be used."""
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
                nursery.cancel_scope.cancel()  # the others need not be waited for

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
        # The nursery is shielded while it ends, and does not see what happened: what is raised stays as it is.
        self._nursery.cancel_scope.shield = True
        self._nursery.cancel_scope.cancel()
        try:
            await self._manager.__aexit__(None, None, None)
        finally:
            await self._end()

    async def _end(self) -> None:
        with trio.CancelScope(shield=True):  # each has a bound of its own
            async with trio.open_nursery() as nursery:
                for server in self.servers:
                    nursery.start_soon(server.end)
            if self._finish is not None:
                await self._finish()

    # --- episodes -----------------------------------------------------------------------------------------------------

    def open_session(self, order: tuple[int, ...]) -> str:
        """A name for the episode; its server is chosen when it first speaks."""
        session = f"{'-'.join(map(str, order))}-{next(self._numbers)}"
        self._orders[session] = tuple(order)
        return session

    def close_session(self, session: str) -> None:
        """The episode is over. Closing twice is harmless."""
        self._orders.pop(session, None)
        for server in self.servers:
            server.close_session(session)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn, wherever a server lives. Raises InferenceError: what a server refuses, what failed too
        often, or no server served for `give_up_seconds`, with the reason of each.
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
                        raise InferenceError(f"{server!r} gave up a reply by itself")
                    except InferenceError as error:
                        await self._reroute(routed, server, error)
            return Generation([], [], "abort", [])
        finally:
            if self._routed.get(session) is routed:
                del self._routed[session]
            if session not in self._orders:  # it was closed meanwhile, or never opened
                self.close_session(session)

    async def score(self, tokens: list[int], temperature: float = 1.0) -> list[float]:
        """Logprob of each token [L] given those before it, by whichever server; the first is 0.0. Raises as
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
        """Give back what the session waits for, as far as it came (see `CanAbort`). What a server has that cannot be
        asked for it is lost.
        """
        routed = self._routed.get(session)
        if routed is not None:
            routed.is_aborted = True
            if routed.server is not None:
                await routed.server.abort(session)
            routed.scope.cancel()  # it waits for a server; harmless where it is over

    async def _choose_server(self, routed: _RoutedRequest) -> Server:
        """The server for this request; waits until there is one. Raises InferenceError, with the reason of each."""
        while not (serving := [server for server in self.servers if server.is_serving]):
            change = self._change
            since = trio.current_time() if self._idle_since is None else self._idle_since
            if all(server.state == "lost" for server in self.servers):
                raise self._no_server("no server is left")
            with trio.move_on_at(since + self._give_up_seconds):
                await change.wait()
                continue
            raise self._no_server(f"no server has served for {self._give_up_seconds:g} seconds")
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
        """The server with the fewest episodes or requests, or the one that has the prompt, if that is not much busier:
        up to half of what each of them has anyway.
        """
        loads = {server: max(len(server.sessions), server.in_flight) for server in usable}
        least = min(usable, key=lambda server: loads[server])
        preferred = self._prompt_servers.get(order[0]) if order else None
        slack = max(1, len(self._orders) // (2 * len(usable)))
        return preferred if preferred in loads and loads[preferred] <= loads[least] + slack else least

    async def _reroute(self, routed: _RoutedRequest, server: Server, error: InferenceError) -> None:
        """A request that failed is for another server. Raises the error where it would fail there too, or has failed
        too often.
        """
        routed.server = None
        if not error.is_transient and server.is_serving:
            # 404: an adapter that is gone, where a server has been started again; what it said need not be so elsewhere
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
                f"{routed.server_failures} servers died while they worked on one request, the last one: {server.reason}"
            ) from error

    def _no_server(self, what: str) -> InferenceError:
        self._failed += 1
        each = "\n".join(f"  {server!r}, {server.state}: {server.reason}" for server in self.servers)
        return InferenceError(f"{what}:\n{each}")

    # --- weights and health -------------------------------------------------------------------------------------------

    async def update_weights(self, update: WeightUpdate) -> None:
        """Every server serves these weights, or none: one that is down takes them before it serves again. Raises
        InferenceError: a server that lives did not take them, or there is none.
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
                server.latest = update  # from here on, also for one that is about to come back
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
    """A request on its way: the server that works on it, in which of its lives, and whether it is to come back as it
    is.
    """

    session: str = ""
    order: tuple[int, ...] = ()
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    is_aborted: bool = False
    server: Server | None = None
    incarnation: int = 0
    avoided: list[Server] = field(default_factory=list)
    server_failures: int = 0
