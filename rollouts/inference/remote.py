"""RemoteEngine: one model server behind HTTP as an InferenceBackend, whatever it speaks.

What every server needs stands here: ids are checked before they are sent (one of them kills some servers), requests
wait while weights change, replies under way are given back when asked for, and each token has the version of the
weights that sampled it. How a request, an adapter or new weights are told to a server is its `Dialect` (`vllm`,
`sglang`). Left out: several servers (`pool`), starting one (`launching`), and whether weights have arrived
(`training.weight_sync`).
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import msgspec
import trio

from rollouts.errors import ConfigError, InferenceError
from rollouts.inference.base import GenerateRequest, Generation, Health, VersionSpan, WeightUpdate
from rollouts.inference.dialect import Dialect, Sampled, ServerInfo, Work
from rollouts.inference.groups import GroupCalls, GroupPlace
from rollouts.inference.http.client import HTTPClient, Retries, take_turn
from rollouts.inference.http.failures import UNREADABLE, HTTPFailure

__all__ = ["RemoteEngine"]

ABORT_AGAIN_SECONDS = 0.2  # a server may be told to stop what it has not read yet
ABORT_SECONDS = 10.0  # then the connection is closed
GREET_SECONDS = 60.0  # a server's first generation may take long
HEALTH_SECONDS = 60.0
UNLOAD_SECONDS = 5.0  # nobody waits longer for a server that is left
CONTROL_CONNECTIONS = 8

T = TypeVar("T")


class RemoteEngine:
    """Implements InferenceBackend, CanAbort and CanCheck for one server.

    `vocabulary_size` bounds the ids that are sent. `temperature` is what the run samples at: a server whose logprobs
    are of temperature 1 is refused where that is another one. `tokenizer` is a text and its ids: a server with another
    tokenizer is refused. `lora_rank` above 0: it is given adapters. `connections_max` requests are in flight at most;
    the rest wait their turn. `tolerance` above 0 is how far, in nats a token, its logprobs may be from the trainer's.
    `load_seconds` is how long it may take to load new weights. `takes_weights` False: only what it serves is used, so
    it need not load any. With `groups` full weights come over torch.distributed instead of in a folder.
    """

    trainable = True
    in_process = False
    owns_weights = True

    def __init__(
        self,
        dialect: Dialect,
        url: str,
        *,
        vocabulary_size: int,
        model: str = "",
        lora_rank: int = 0,
        temperature: float = 1.0,
        tokenizer: tuple[str, list[int]] | None = None,
        context_tokens_max: int = 0,
        weights_folder: str = "",
        takes_weights: bool = True,
        tolerance: float = 0.0,
        groups: GroupCalls | None = None,
        api_key: str = "",
        connections_max: int = 256,
        request_seconds: float = 600.0,
        load_seconds: float = 600.0,
        retries: Retries = Retries(),  # noqa: B008 - a NamedTuple cannot be changed
        seed: int = 0,
    ) -> None:
        assert vocabulary_size > 0 and connections_max > 0, (vocabulary_size, connections_max)
        self.dialect = dialect
        self.model = model
        self.vocabulary_size = vocabulary_size
        self.context_tokens_max = context_tokens_max
        self.weights_kind: Literal["full", "adapter"] = "adapter" if lora_rank else "full"
        self.weights_as: Literal["folder", "group"] = "folder" if groups is None else "group"
        self.weights_folder = weights_folder
        self.tolerance = tolerance
        self._groups = groups
        self._group: tuple[GroupPlace, Callable[[], None]] | None = None
        self.version = 0
        self.info: ServerInfo | None = None
        self._client = HTTPClient(url, api_key=api_key, connections_max=connections_max, retries=retries, seed=seed)
        # Apart from those that wait for a reply: to abort one must not wait for it.
        self._control = HTTPClient(url, api_key=api_key, connections_max=CONTROL_CONNECTIONS, retries=retries)
        self.url = self._client.url
        self._api_key, self._takes_weights = api_key, takes_weights
        self._lora_rank, self._temperature, self._tokenizer = lora_rank, temperature, tokenizer
        self._request_seconds, self.load_seconds = request_seconds, load_seconds
        self._context_limit = context_tokens_max
        # Adapters by name; empty: there is none, and the base model answers.
        self._adapter, self._adapter_before = "", ""
        self._loaded: list[int] = []  # the versions that were loaded, in this order
        # A server has other clients, and its caches may hold what another run computed under the same version.
        self._salt = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._asked: dict[str, _Asked] = {}
        self._turns = trio.CapacityLimiter(connections_max)
        self._open = trio.Event()  # new requests may be sent, or fail
        self._open.set()
        self._failure = ""  # why it serves nothing more
        self._one_ended = trio.Event()

    def __repr__(self) -> str:
        return f"{self.dialect.software} at {self.url}"

    # --- coming and going ---------------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Ask the server who it is. Raises ConfigError where it cannot be used as it is set up."""
        async with HTTPClient(self.url, api_key=self._api_key, connections_max=1) as client:
            await self._greet(client)

    async def __aenter__(self) -> Self:
        await self._greet(self._client)
        return self

    async def __aexit__(self, *exc: Any) -> None:
        try:
            await self._unload_adapters()
        finally:
            self._client.close()
            self._control.close()

    async def _unload_adapters(self) -> None:
        """Those that were loaded here, which nobody would ever ask for again: a server has room for a few."""
        names = [name for name in (self._adapter_before, self._adapter) if name]
        self._adapter_before = self._adapter = ""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + UNLOAD_SECONDS):
            for name in names:
                try:
                    await self.dialect.unload_adapter(self._control, name, timeout_seconds=UNLOAD_SECONDS)
                except InferenceError:
                    continue  # a server that is left need not be well: it may have ended, which is told elsewhere

    async def _greet(self, client: HTTPClient) -> None:
        try:
            with trio.fail_after(GREET_SECONDS):
                info = await self.dialect.greet(client)
                await self._check_tokenizer(client)
        except trio.TooSlowError:
            raise ConfigError(
                f"{self!r} did not say who it is in {GREET_SECONDS:g} seconds; is it loaded, and is this its URL?"
            ) from None
        except HTTPFailure as failure:
            if failure.status in (401, 403):
                raise ConfigError(self._words_of_key()) from None  # nothing that a server may have repeated
            raise ConfigError(f"{self!r} cannot be used: {failure}; see whether it runs, and its URL") from failure
        self._check(info)
        self.info = info
        own = info.context_tokens_max
        self.context_tokens_max = min(own, self._context_limit) if self._context_limit else own

    def _words_of_key(self) -> str:
        given = "refuses the API key that it was given" if self._api_key else "asks for an API key, and there is none"
        return f"{self!r} {given}: put it into the environment variable that --inference.api-key-env names"

    def _check(self, info: ServerInfo) -> None:
        if self.model and self.model not in info.models:
            raise ConfigError(
                f"{self!r} serves {', '.join(info.models) or 'no model'}, not {self.model!r}; "
                f"give --inference.served-model {info.models[0] if info.models else 'NAME'}"
            )
        # An evaluation reads no logprobs.
        if info.logprobs == "raw" and self._temperature != 1.0 and self._takes_weights:
            raise ConfigError(
                f"{self!r} gives logprobs of temperature 1 whatever is sampled at, and this run samples at "
                f"{self._temperature:g}: start it with {self.dialect.logprobs_flags}, or type --temperature 1"
            )
        if not self._takes_weights:
            return
        flags = self.dialect.adapter_flags.format(rank=self._lora_rank)
        if self._lora_rank and not info.loads_adapters:
            raise ConfigError(f"{self!r} loads no adapters: start it with {flags}, or type --lora-rank 0")
        if self._lora_rank and 0 < info.lora_rank_max < self._lora_rank:
            raise ConfigError(
                f"{self!r} takes adapters of rank {info.lora_rank_max} at most, and this run's have "
                f"{self._lora_rank}: start it with {flags}, or type --lora-rank {info.lora_rank_max}"
            )
        if not self._lora_rank and not info.loads_weights:
            raise ConfigError(
                f"{self!r} cannot be given new weights: start it with {self.dialect.weights_flags}, or train an "
                "adapter (--lora-rank 8)"
            )

    async def _check_tokenizer(self, client: HTTPClient) -> None:
        if self._tokenizer is None:
            return
        text, ids = self._tokenizer
        theirs = await self.dialect.tokenize(client, text)
        if theirs is not None and theirs != ids:
            raise ConfigError(
                f"{self!r} has another tokenizer than --model: {text!r} is {theirs[:12]} there and {ids[:12]} here; "
                "see whether it serves the model that is trained"
            )

    # --- episodes -----------------------------------------------------------------------------------------------------

    def open_session(self, order: tuple[int, ...]) -> str:
        """A name for the episode; a server forms its batches by itself."""
        return f"{'-'.join(map(str, order))}-{next(self._numbers)}"

    def close_session(self, session: str) -> None:
        """Nothing is kept for a session."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn. Raises InferenceError (HTTPFailure where the request failed). Cancellation closes the
        request's connection, and the server stops.
        """
        self._check_tokens(request.tokens, request.max_tokens)
        session = request.session or f"request-{next(self._numbers)}"

        async def send(work: Work) -> Sampled:
            return await self.dialect.generate(self._client, request, work, timeout_seconds=self._request_seconds)

        asked, sampled = await self._ask(session, send)
        if sampled is None:  # aborted before it was sent, or where nothing came back
            return Generation([], [], "abort", [])
        return Generation(sampled.tokens, sampled.logprobs, sampled.finish, self._spans(asked, sampled))

    async def _ask(
        self, session: str, send: Callable[[Work], Awaitable[T]], *, alone: bool = False
    ) -> tuple[_Asked, T | None]:
        """Send in its turn what may be aborted under this name; None: it was given up. `alone`: within `_others_out`,
        where those that wait may have all turns.
        """
        assert session not in self._asked, f"session {session} waits for a reply already"
        # A name of its own for each request: servers refuse one that is still running, as a lost one may be, and an
        # abort takes all of its name, also those of another process that counts as this one does.
        asked = self._asked[session] = _Asked(f"{session}-{self._salt}-{next(self._numbers)}")
        answer = None
        try:
            with asked.scope:
                if alone:
                    answer = await send(self._begun(asked))
                else:
                    answer = await self._in_turn(asked, send)
        finally:
            del self._asked[session]
            asked.is_over.set()
            self._one_ended.set()
        if answer is None and self._failure:
            raise InferenceError(self._failure, is_transient=False)
        return asked, answer

    async def _in_turn(self, asked: _Asked, send: Callable[[Work], Awaitable[T]]) -> T:
        """Wait for a turn, and until requests may be sent."""
        await take_turn(self._turns)
        try:
            await self._opened()
            return await send(self._begun(asked))
        finally:
            self._turns.release()

    async def _opened(self) -> None:
        while not self._open.is_set():
            await self._open.wait()

    def _begun(self, asked: _Asked) -> Work:
        """From here on it is under way, with the weights that are served now."""
        if self._failure:
            raise InferenceError(self._failure, is_transient=False)
        asked.is_sent, asked.loads, asked.model = True, len(self._loaded), self._adapter or self.model
        asked.version = self.version
        return Work(asked.name, asked.model, f"{self._salt}-{self.version}")

    def _spans(self, asked: _Asked, sampled: Sampled) -> list[VersionSpan]:
        """Which weights sampled what. Raises HTTPFailure where none that were loaded here did."""
        if not sampled.tokens:
            return []
        known = {str(version) for version in self._loaded}
        strange = [name for name, _, _ in sampled.spans if name not in known]
        if asked.loads and strange:  # it would pass for what it was given
            raise HTTPFailure(
                "server",
                f"{self!r} answered with weights that it calls {strange[0]!r}, and was given version {asked.version}: "
                "has it been started again?",
                retryable=True,
            )
        if len(sampled.spans) < 2 and len(self._loaded) == asked.loads:
            return [VersionSpan(asked.version, 0, len(sampled.tokens))]
        since = {str(version): version for version in self._loaded[asked.loads :]}
        spans = sampled.spans or (("", 0, len(sampled.tokens)),)
        return [VersionSpan(since.get(name, asked.version), start, end) for name, start, end in spans]

    async def abort(self, session: str) -> None:
        """Give back what the session waits for, as far as it came (see `CanAbort`)."""
        asked = self._asked.get(session)
        if asked is None:
            return
        with trio.move_on_after(ABORT_SECONDS):
            try:
                while asked.is_sent and not asked.is_over.is_set():
                    await self.dialect.abort(self._control, [asked.name])
                    with trio.move_on_after(ABORT_AGAIN_SECONDS):
                        await asked.is_over.wait()
            except InferenceError:
                pass  # it cannot be asked: the reply is given up, below
        asked.scope.cancel()  # harmless where it is over
        await asked.is_over.wait()

    async def score(self, tokens: list[int], temperature: float = 1.0) -> list[float]:
        """Logprob of each token [L] given those before it; the first is 0.0. Raises InferenceError."""
        self._check_tokens(tokens, 1)

        async def send(work: Work) -> list[float]:
            return await self.dialect.score(
                self._client, tokens, work, temperature=temperature, timeout_seconds=self._request_seconds
            )

        name = f"score-{next(self._numbers)}"
        if self.scores_alone:
            async with self._others_out():
                _, scores = await self._ask(name, send, alone=True)
        else:
            _, scores = await self._ask(name, send)
        assert scores is not None, "nobody aborts it but a failed update, which raises"
        return scores

    @property
    def scores_alone(self) -> bool:
        """Whether other requests wait while it scores: then it is for the time in which weights change."""
        return self.weights_kind == "adapter" and self.dialect.scores_adapters_alone

    @asynccontextmanager
    async def _others_out(self) -> AsyncIterator[None]:
        """New requests wait; what is under way ends first."""
        await self._opened()
        self._open = trio.Event()
        try:
            await self._until_none(lambda asked: True)
            yield
        finally:
            self._open.set()

    def _check_tokens(self, tokens: Sequence[int], max_tokens: int) -> None:
        assert tokens and max_tokens >= 1, (len(tokens), max_tokens)
        lowest, highest = min(tokens), max(tokens)
        if lowest < 0 or highest >= self.vocabulary_size:
            raise InferenceError(
                f"token id {lowest if lowest < 0 else highest} is outside the vocabulary of {self.vocabulary_size}; "
                "is this the model's own tokenizer?",
                is_transient=False,
            )
        if self.context_tokens_max and len(tokens) + max_tokens > self.context_tokens_max:
            raise InferenceError(
                f"a context of {len(tokens)} tokens and a reply of up to {max_tokens} do not fit into the "
                f"{self.context_tokens_max} of {self!r}",
                is_transient=False,
            )

    # --- weights ------------------------------------------------------------------------------------------------------

    async def update_weights(self, update: WeightUpdate) -> None:
        """Serve other weights: new requests wait, and only when the server has loaded is `version` the new one. What is
        under way ends first, unless the dialect keeps it: then it goes on, with its own adapter, or with the new
        weights from then on (its spans say so).

        Raises InferenceError, also where it is cancelled while the server loads: what the server holds is unknown then,
        and every request fails with the reason until an update succeeds.
        """
        await self._check_update(update)
        await self._opened()  # somebody may score alone
        self._open = trio.Event()
        try:
            with trio.move_on_after(self._request_seconds) as waiting:
                await self._until_none(lambda asked: not self.dialect.keeps_requests)
                before = self._adapter_before if update.kind == "adapter" else ""
                await self._until_none(lambda asked: bool(before) and asked.model == before)
            if waiting.cancelled_caught:
                raise InferenceError(
                    f"{self!r} has not ended what was under way after {self._request_seconds:g} seconds, so version "
                    f"{update.version} was not loaded"
                )
            await self._load(update)
        finally:
            self._open.set()

    async def _load(self, update: WeightUpdate) -> None:
        loaded = False
        try:
            if update.kind == "adapter":
                keeps = self.dialect.keeps_requests
                old = self._adapter_before if keeps else self._adapter
                adapter = await self.dialect.load_adapter(
                    self._control, update, old=old, timeout_seconds=self.load_seconds
                )
                self._adapter_before, self._adapter = self._adapter if keeps else "", adapter
            elif update.path is None:
                await self._receive(update)
                self._loaded.append(update.version)
            else:
                await self.dialect.load_full(self._control, update, timeout_seconds=self.load_seconds)
                self._loaded.append(update.version)
            loaded = True
        except InferenceError as error:
            self._failure = f"{self!r} did not load version {update.version}: {error}"
            raise InferenceError(self._failure, is_transient=error.is_transient) from error
        finally:
            if loaded:
                self.version, self._failure = update.version, ""
            else:
                self._failure = self._failure or f"{self!r} was left while it loaded version {update.version}"
                for asked in self._asked.values():  # what it would give now is of unknown weights
                    if asked.is_sent:
                        asked.scope.cancel()

    async def group_ranks(self) -> int:
        """How many ranks of a group it is (see `TakesGroup`). Raises ConfigError, HTTPFailure."""
        assert self._groups is not None, f"{self!r} takes folders"
        return await self._groups.ranks(self._control)

    async def join_group(self, place: GroupPlace, rank: int, receiving: Callable[[], None]) -> None:
        """Join as `rank` and those after it (see `TakesGroup`). Raises InferenceError."""
        assert self._groups is not None, f"{self!r} takes folders"
        await self._groups.join(self._control, rank=rank, **place._asdict())
        self._group = place, receiving

    async def leave_group(self) -> None:
        """Leave it; harmless where it is in none. Raises HTTPFailure."""
        if self._groups is not None and self._group is not None:
            place, self._group = self._group[0], None
            await self._groups.leave(self._control, name=place.name)

    async def _receive(self, update: WeightUpdate) -> None:
        assert self._groups is not None and self._group is not None, f"{self!r} is in no group"
        place, receiving = self._group
        await self._groups.receive(
            self._control,
            update.manifest,
            update.version,
            name=place.name,
            timeout_seconds=self.load_seconds,
            task_status=_Receiving(receiving),
        )

    async def _until_none(self, is_in_the_way: Callable[[_Asked], bool]) -> None:
        while any(asked.is_sent and is_in_the_way(asked) for asked in self._asked.values()):
            self._one_ended = trio.Event()
            await self._one_ended.wait()

    async def _check_update(self, update: WeightUpdate) -> None:
        """Refuse what no server should be asked to load: some die of a file that is cut short."""
        if self._group is not None and update.kind == "full" == self.weights_kind and update.manifest:
            return
        if update.kind != self.weights_kind or update.path is None:
            raise InferenceError(
                f"{self!r} takes {self.weights_kind} weights in a folder; the update {update.version} brings "
                f"{update.kind} ones{' without one' if update.path is None else ''}",
                is_transient=False,
            )
        fault = await trio.to_thread.run_sync(_fault_of_folder, Path(update.path))
        if fault:
            raise InferenceError(
                f"{self!r} was not asked to load version {update.version}: {fault}", is_transient=False
            )

    async def health(self) -> Health:
        """Whether it can generate: one token, since a dead engine may still say that it is well. While weights are
        loaded it waits.
        """
        request = GenerateRequest([0], 1, (), 0, temperature=0.0)

        async def send(work: Work) -> Sampled:
            return await self.dialect.generate(self._client, request, work, timeout_seconds=HEALTH_SECONDS)

        try:
            await self._ask(f"health-{next(self._numbers)}", send)
        except InferenceError as error:
            return Health(False, self.version, str(error))
        return Health(True, self.version)


class _Asked:
    """A request: its name with the server, and how to give up waiting for it. Once it `is_sent`: the version and the
    model that answer it, and how often weights had been loaded before.
    """

    __slots__ = ("is_over", "is_sent", "loads", "model", "name", "scope", "version")

    def __init__(self, name: str) -> None:
        self.name = name
        self.scope = trio.CancelScope()
        self.is_over = trio.Event()
        self.is_sent = False
        self.version = self.loads = 0
        self.model = ""


def _fault_of_folder(folder: Path) -> str:
    """Why a server cannot load what is in this folder, as far as the files' headers tell; empty: it can."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return f"there is no .safetensors file in {folder}"
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        return f"there is neither config.json nor adapter_config.json in {folder}"
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > size - 8:
                return f"{path} is cut short, or is no safetensors file"
            try:
                header = msgspec.json.decode(file.read(length), type=dict[str, dict[str, Any]])
                ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            except (*UNREADABLE, LookupError, TypeError):
                return f"{path} is no safetensors file"
        if size != 8 + length + max(ends, default=0):
            return f"{path} has {size} bytes, and its header says {8 + length + max(ends, default=0)}"
    return ""


class _Receiving:
    """What `trio.TaskStatus` is to a nursery, for one who only wants to be told."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def started(self, value: object = None) -> None:
        """It is about to receive."""
        self._tell()
