"""The embedded engine: generation in this process, by the trainer's own parameters.

Its weights are always current, at no cost (of a sharded trainer rank 0 keeps a copy, which is brought up to date after
every step), and since generation and training run in one thread, an optimizer step never
overlaps a decode step. Requests are gathered in waves (`waves.py`) and decoded in batches that rows leave as they
finish (`decode.py`, `lanes.py`). One seed gives one result: neither trio's task order nor a batch's size decides any
random number. Left out: top-p and the like, stop strings, several devices.

    async with create_hf_inference("path/to/model", None, 0) as engine:
        session = engine.open_session((0, 0))
        reply = await engine.generate(GenerateRequest(tokens, max_tokens=64, stop_ids=(2,), seed=7, session=session))
        engine.close_session(session)
"""

from __future__ import annotations

import math
import queue
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import trio

from rollouts.errors import ConfigError, InferenceError
from rollouts.inference.base import GenerateRequest, Generation, Health, VersionSpan, WeightUpdate
from rollouts.inference.waves import Ticket, WaveBook
from rollouts.training.backends.futures import TorchThread

if TYPE_CHECKING:
    from rollouts.inference.decode import Row

__all__ = ["HFInference", "InferenceStatistics", "create_hf_inference"]

CLOSE_SECONDS = 30.0


class InferenceStatistics(NamedTuple):
    """A snapshot of counts: waves, forward passes, tokens prefilled, reused from sessions' caches, and sampled."""

    waves: int
    passes: int
    prefilled: int
    reused: int
    sampled: int
    open_sessions: int


class HFInference:
    """Implements InferenceBackend over a transformers causal LM.

    With a training backend it uses that one's `thread`, and its `model` and `version` where these are whole; of a
    sharded trainer it is given a copy, which every update brings up to date. Without one it is given a model and has a
    thread of its own, which leaving the context manager ends. A cancelled `generate` leaves nothing behind: its row
    leaves the batch at the next step.
    """

    trainable = True

    def __init__(
        self,
        model: Any,
        training: Any = None,
        *,
        rows_max: int = 256,
        cache_gib: float = 4.0,
        prefill_tokens_max: int = 16384,
        context_tokens: int = 0,
        wait_seconds: float = 1800.0,
        adapter: Any = None,
    ) -> None:
        """`adapter` is the PeftModel around a model of its own whose adapter alone is brought up to date."""
        from rollouts.inference.engine import HFEngine

        assert rows_max >= 1 and cache_gib > 0 and prefill_tokens_max >= 1 and wait_seconds > 0, (
            f"{rows_max=} {cache_gib=} {prefill_tokens_max=} {wait_seconds=}"
        )
        self.model = model
        self.in_process = training is not None
        self.owns_weights = training is not None and training.model is not model
        self.weights_kind: Literal["full", "adapter"] = "full" if adapter is None else "adapter"
        self._adapter = adapter
        self._training = training
        self._served = 0  # the version of weights of its own
        self._thread: TorchThread = TorchThread("rollouts-hf") if training is None else training.thread
        self._engine = HFEngine(
            model, rows_max=rows_max, cache_bytes=int(cache_gib * 2**30), prefill_tokens_max=prefill_tokens_max
        )
        self._book = WaveBook()
        self._wait_seconds = wait_seconds
        own = _context_tokens_max(model)
        self.context_tokens_max: int = min(own, context_tokens) if context_tokens else own
        self._vocabulary_size: int = model.get_input_embeddings().weight.shape[0]

    @property
    def version(self) -> int:
        """The policy version that the parameters are; 0 without training."""
        shared = self._training is not None and not self.owns_weights
        return int(self._training.version) if shared else self._served

    def statistics(self) -> InferenceStatistics:
        """What was done so far."""
        counts = self._engine.statistics
        return InferenceStatistics(
            counts.waves, counts.passes, counts.prefilled, counts.reused, counts.sampled, self._book.open_sessions
        )

    async def __aenter__(self) -> HFInference:
        await self._thread.submit(lambda: self._engine.verdict)
        return self

    async def __aexit__(self, *exc: Any) -> None:
        if self._training is None:
            with trio.move_on_after(CLOSE_SECONDS, shield=True):
                await trio.to_thread.run_sync(self._thread.close, abandon_on_cancel=True)

    def open_session(self, order: tuple[int, ...]) -> str:
        """Announce an episode; no wave forms until it waits in `generate` or is closed."""
        session = self._book.open(tuple(order))
        self._engine.sessions.open(session)
        return session

    def close_session(self, session: str) -> None:
        """The episode is over: its cache goes, and the others need not wait for it. Closing twice is harmless."""
        self._book.close(session)
        self._engine.sessions.close(session)
        if self._book.open_sessions:
            self._launch(self._book.take_wave())
        else:
            self._rest()

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn, in a wave with the others that wait.

        Raises InferenceError: an id outside the vocabulary, a context too long, a failure in the model, or other
        episodes that kept this one waiting for more than `wait_seconds`.
        """
        self._check(request)
        ticket = Ticket(request)
        try:
            if self._book.add(ticket):
                self._launch(self._book.take_wave())
            else:
                await trio.lowlevel.checkpoint()
                if not ticket.launched:
                    self._launch(self._book.take_loose())
            return await self._wait(ticket)
        except BaseException:
            self._book.remove(ticket)
            raise
        finally:
            self._book.done(ticket)

    async def abort(self, session: str) -> None:
        """Give back what the session waits for, as far as it came (see `CanAbort`)."""
        self._book.abort(session)

    async def score(self, tokens: list[int], temperature: float = 1.0) -> list[float]:
        """Logprob of each token [L] given those before it; the first is 0.0. Raises InferenceError."""
        assert tokens, "score needs at least one token"
        assert temperature >= 0, f"{temperature=}"
        self._check_ids(tokens)
        if len(tokens) > self.context_tokens_max:
            raise InferenceError(f"{len(tokens)} tokens to score, but the context holds {self.context_tokens_max}")
        try:
            return await self._thread.submit(self._engine.score, list(tokens), temperature)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise InferenceError(f"the model failed to score {len(tokens)} tokens: {error}") from error

    async def update_weights(self, update: WeightUpdate) -> None:
        """Take up weights; where the parameters are the trainer's there is nothing to move.

        Raises InferenceError where the update does not bring what is needed, or says something else than is true.
        """
        await trio.lowlevel.checkpoint()
        if self.owns_weights:
            await self._thread.submit(self._load, update)
            return
        if update.path is not None:
            raise InferenceError(
                f"the hf engine shares the trainer's parameters and loads none, but was given {update.path}. "
                "Use an engine with weights of its own, or leave the path out"
            )
        if update.version != self.version:
            raise InferenceError(
                f"the hf engine was told to serve weights {update.version}, but its own are version {self.version}"
            )

    def _load(self, update: WeightUpdate) -> None:
        """In the torch thread, so that no wave is under way."""
        import torch

        from rollouts.training.backends.lora import adapter_parameters

        if update.weights is None:
            raise InferenceError(f"the hf engine has weights of its own, but the update {update.version} brings none")
        if update.kind != self.weights_kind:
            raise InferenceError(f"the hf engine takes {self.weights_kind} weights, and the update is {update.kind}")
        own = self.model.state_dict() if self._adapter is None else adapter_parameters(self._adapter)
        given = update.weights
        wrong = sorted(set(own) ^ set(given))
        wrong += sorted(name for name in set(own) & set(given) if own[name].shape != given[name].shape)
        if wrong:
            raise InferenceError(
                f"weights {update.version} are not this engine's model: {len(wrong)} names or shapes differ, "
                f"first {wrong[0]}"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(given[name])
        self._served = update.version

    async def health(self) -> Health:
        """Whether a pass through the model works, and which way it is decoded."""
        try:
            verdict = await self._thread.submit(lambda: self._engine.verdict)
            await self.score([0, 0])
        except Exception as error:
            return Health(False, self.version, f"{type(error).__name__}: {error}")
        detail = (
            f"decoding whole contexts: {verdict.reason}" if verdict.shape is None else "decoding with session caches"
        )
        return Health(True, self.version, detail)

    async def _wait(self, ticket: Ticket) -> Generation:
        # The deadline is for the wave to form; once it runs, it takes as long as it takes.
        with trio.move_on_after(self._wait_seconds) as scope:
            ticket.on_launch(lambda: setattr(scope, "deadline", float("inf")))
            return await ticket.wait()
        missing = self._book.missing()
        raise InferenceError(
            f"waited {self._wait_seconds:g} s for {len(missing)} other episodes ({', '.join(missing[:5])}): each "
            "open session must ask for a reply or close. Give tools shorter timeouts, or raise --inference.wait-seconds"
        )

    def _launch(self, tickets: list[Ticket]) -> None:
        if not tickets:
            return
        from rollouts.inference.decode import Row
        from rollouts.inference.sampling import UniformStream

        for ticket in tickets:
            request = ticket.request
            ticket.launch(
                Row(
                    list(request.tokens),
                    request.max_tokens,
                    frozenset(request.stop_ids),
                    request.temperature,
                    UniformStream(request.seed, request.offset),
                    request.session,
                    ticket,
                )
            )
        try:
            self._thread.submit(self._run_wave, [ticket.row for ticket in tickets], trio.lowlevel.current_trio_token())
        except queue.Full:
            error = InferenceError("the torch thread has too much work queued; is it stuck in a training step?")
            for ticket in tickets:
                ticket.resolve(None, error)

    def _rest(self) -> None:
        """All sessions are closed: the buffer's memory goes back before the trainer wants it."""
        try:
            self._thread.submit(self._engine.rest)
        except queue.Full:
            return  # it only frees memory early; the next wave replaces the buffer anyway

    def _run_wave(self, rows: list[Row], token: trio.lowlevel.TrioToken) -> None:
        """In the torch thread. Every row's ticket is resolved, whatever happens."""
        version = self.version

        def deliver(done: list[Row]) -> None:
            results = [(row.label, _generation(row, version)) for row in done]
            _post(token, lambda: [ticket.resolve(result) for ticket, result in results])

        gone = [row for row in rows if row.abandoned]
        if gone:
            deliver(gone)
        try:
            self._engine.run([row for row in rows if row not in gone], version, deliver)
        except InferenceError as error:
            failure: InferenceError | None = error
        except Exception as error:
            failure = InferenceError(f"generation failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        else:
            failure = None
        if failure is not None:
            _post(token, lambda: [row.label.resolve(None, failure) for row in rows])

    def _check(self, request: GenerateRequest) -> None:
        assert request.max_tokens >= 1, f"max_tokens must be at least 1, got {request.max_tokens}"
        assert request.tokens, "a request needs at least one token of context"
        assert request.temperature >= 0, f"temperature must be at least 0, got {request.temperature}"
        self._check_ids(request.tokens)
        needed = len(request.tokens) + request.max_tokens
        if needed > self.context_tokens_max:
            raise InferenceError(
                f"a context of {len(request.tokens)} tokens and a reply of up to {request.max_tokens} make {needed}, "
                f"but the context holds {self.context_tokens_max}"
            )

    def _check_ids(self, tokens: list[int]) -> None:
        lowest, highest = min(tokens), max(tokens)
        if lowest < 0 or highest >= self._vocabulary_size:
            wrong = lowest if lowest < 0 else highest
            raise InferenceError(
                f"token id {wrong} is outside the vocabulary: ids run from 0 to {self._vocabulary_size - 1}. "
                "Is this the model's own tokenizer?"
            )


def create_hf_inference(
    model: str,
    training: Any,
    seed: int,
    *,
    rows_max: int = 256,
    cache_gib: float = 4.0,
    prefill_tokens_max: int = 16384,
    context_tokens: int = 0,
    wait_seconds: float = 1800.0,
    dtype: str = "auto",
    device: str = "auto",
) -> HFInference:
    """The embedded engine: the trainer's own model if there is a trainer with a whole one, else `model`, loaded here.

    `seed` decides nothing: every request carries its own. Raises ModelError where the model cannot be loaded, and
    ConfigError for a setting out of its bounds, or a dtype or device beside a trainer's.

    Args:
        rows_max: rows decoded at once; more wait their turn within the wave
        cache_gib: memory for keys and values in GiB: for the rows being decoded, and as much again for waiting sessions
        prefill_tokens_max: tokens of context in one forward pass
        context_tokens: prompt and reply together must fit in so many tokens; 0 is the model's own limit
        wait_seconds: how long a request waits for the other episodes before it fails
        dtype: of the weights, where there is no trainer to share them with; auto is float32
        device: of the weights, where there is no trainer to share them with; auto is a GPU if there is one
    """
    bounds = (
        ("rows-max", rows_max, rows_max >= 1, "1 or more"),
        ("cache-gib", cache_gib, 0 < cache_gib < math.inf, "a number above 0"),
        ("prefill-tokens-max", prefill_tokens_max, prefill_tokens_max >= 1, "1 or more"),
        ("context-tokens", context_tokens, context_tokens >= 0, "0 (the model's own limit) or more"),
        ("wait-seconds", wait_seconds, wait_seconds > 0, "a number above 0"),
    )
    for flag, given, holds, expected in bounds:
        if not holds:
            raise ConfigError(f"--inference.{flag} {given}: expected {expected}")
    from rollouts.training.backends.lora import wrap_in_adapter
    from rollouts.training.models import load_hf_model

    adapter = None
    if training is None:
        network = load_hf_model(model, dtype="float32" if dtype == "auto" else dtype, device=device)
    else:
        for name, value in (("dtype", dtype), ("device", device)):
            if value != "auto":
                raise ConfigError(
                    f"--inference.{name} {value}: this engine shares the trainer's parameters; "
                    f"type --training.{name} {value}"
                )
        network = training.model
        if network is None:  # sharded: rank 0 samples with a copy
            network = load_hf_model(model, dtype=training.compute_dtype, device=training.device)
            if training.adapter_config is not None:
                adapter = wrap_in_adapter(network, training.adapter_config)
    return HFInference(
        network,
        training,
        rows_max=rows_max,
        cache_gib=cache_gib,
        prefill_tokens_max=prefill_tokens_max,
        context_tokens=context_tokens,
        wait_seconds=wait_seconds,
        adapter=adapter,
    )


def _generation(row: Row, version: int) -> Generation:
    spans = [VersionSpan(version, 0, len(row.sampled))] if row.sampled else []
    return Generation(row.sampled, row.logprobs, row.finish or "abort", spans)


def _post(token: trio.lowlevel.TrioToken, function: Any) -> None:
    try:
        token.run_sync_soon(function)
    except trio.RunFinishedError:
        return  # nobody waits any more


def _context_tokens_max(model: Any) -> int:
    """The longest context that the model was made for; models without such a limit get 2**20 tokens."""
    config = model.config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
    return next((int(v) for v in (getattr(config, name, None) for name in names) if v), 2**20)
