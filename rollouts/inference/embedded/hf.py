"""The embedded engine: generation in this process, by the trainer's own parameters.

Its weights are always current, at no cost (of a sharded trainer rank 0 keeps a copy, which is brought up to date after
every step), and since generation and training run in one thread, an optimizer step never
overlaps a decode step. Requests are gathered in waves (`scheduler.py`) and decoded in batches that rows leave as they
finish (`decode.py`). One seed gives one result: neither trio's task order nor a batch's size decides any
random number. Left out: top-p and the like, stop strings, several devices.

    async with create_hf_inference("path/to/model", None, 0) as engine:
        session = engine.open_session((0, 0))
        reply = await engine.generate(GenerateRequest(tokens, max_tokens=64, stop_ids=(2,), seed=7, session=session))
        engine.close_session(session)
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import queue
from typing import TYPE_CHECKING, Any

import trio

from rollouts.errors import ConfigError, InferenceError, named
from rollouts.inference.base import Capabilities, GenerateRequest, Generation, Health, VersionSpan, WeightUpdate
from rollouts.inference.embedded.scheduler import BatchScheduler, InferenceStatistics, PendingRequest
from rollouts.plugins.checks import check_bounds
from rollouts.training.backends.futures import TorchThread
from rollouts.training.estimates import estimated_as

if TYPE_CHECKING:
    from rollouts.inference.embedded.decode_slots import Row

CLOSE_SECONDS = 30.0


@dataclasses.dataclass(eq=False, repr=False)
class HFInference:
    """Implements InferenceBackend over a transformers causal LM.

    With a training backend it uses that one's `thread`, and its `model` and `version` where these are whole; of a
    sharded trainer it is given a copy, which every update brings up to date. Without one it is given a model and has a
    thread of its own, which leaving the context manager ends. `adapter` is the PeftModel around a model of its own
    whose adapter alone is brought up to date. A cancelled `generate` leaves nothing behind: its row leaves the batch at
    the next step.
    """

    model: Any
    training: Any = None
    _: dataclasses.KW_ONLY
    rows_max: int = 256
    cache_gib: float = 4.0
    prefill_tokens_max: int = 16384
    context_tokens: int = 0
    wait_seconds: float = 1800.0
    adapter: Any = None

    def __post_init__(self) -> None:
        from rollouts.inference.embedded.decode import Decoder

        shares, model = self.training is not None, self.model
        self.capabilities = Capabilities(
            in_process=shares,
            owns_weights=shares and self.training.model is not model,
            weights_kind="full" if self.adapter is None else "adapter",
            aborts=True,
        )
        self._served = 0  # the version of weights of its own
        self._thread: TorchThread = self.training.thread if shares else TorchThread("rollouts-hf")
        size = int(self.cache_gib * 2**30)
        self._decoder = Decoder(
            model, rows_max=self.rows_max, cache_bytes=size, prefill_tokens_max=self.prefill_tokens_max
        )
        self._scheduler = BatchScheduler()
        own = _context_tokens_max(model)
        self.context_tokens_max: int = min(own, self.context_tokens or own)
        self.vocabulary_size: int = model.get_input_embeddings().weight.shape[0]

    @property
    def version(self) -> int:
        """The policy version that the parameters are; 0 without training."""
        shared = self.training is not None and not self.capabilities.owns_weights
        return int(self.training.version) if shared else self._served

    def statistics(self) -> InferenceStatistics:
        """What was done so far."""
        return dataclasses.replace(self._decoder.statistics, open_sessions=len(self._scheduler.sessions))

    async def __aenter__(self) -> HFInference:
        await self._thread.submit(lambda: self._decoder.cache_support)
        return self

    async def __aexit__(self, *exc: Any) -> None:
        if self.training is None:
            with trio.move_on_after(CLOSE_SECONDS, shield=True):
                await trio.to_thread.run_sync(self._thread.close, abandon_on_cancel=True)

    def open_session(self, order: tuple[int, ...]) -> str:
        """Announce an episode; no wave forms until it waits in `generate` or is closed."""
        session = self._scheduler.open(order)
        self._decoder.sessions.open(session)
        return session

    def close_session(self, session: str) -> None:
        """The episode is over: its cache goes, and the others need not wait for it. Closing twice is harmless."""
        self._scheduler.close(session)
        self._decoder.sessions.close(session)
        if self._scheduler.sessions:
            self._launch(self._scheduler.take_batch())
        else:
            # Its memory goes back before the trainer wants it. If not, the next wave replaces the buffer anyway.
            with contextlib.suppress(queue.Full):
                self._thread.submit(self._decoder.release_buffer)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn, in a wave with the others that wait.

        Raises InferenceError: an id outside the vocabulary, a context too long, a failure in the model, or other
        episodes that kept this one waiting for more than `wait_seconds`.
        """
        assert request.max_tokens >= 1, f"max_tokens must be at least 1, got {request.max_tokens}"
        assert request.tokens, "a request needs at least one token of context"
        assert request.temperature >= 0, f"temperature must be at least 0, got {request.temperature}"
        self._check(request.tokens, request.max_tokens)
        pending = PendingRequest(request)
        pending.wait_scope.deadline = trio.current_time() + self.wait_seconds
        try:
            if self._scheduler.add(pending):
                self._launch(self._scheduler.take_batch())
            else:
                await trio.lowlevel.checkpoint()
                if pending.row is None:
                    self._launch(self._scheduler.take_sessionless())
            with pending.wait_scope:
                await pending.done.wait()
            if pending.answer is None:
                missing = self._scheduler.missing()
                raise InferenceError(
                    f"waited {self.wait_seconds:g} s for {len(missing)} other episodes ({', '.join(missing[:5])}): "
                    "each open session must ask for a reply or close. Give tools shorter timeouts, or raise "
                    "--inference.wait-seconds"
                )
        finally:
            self._scheduler.remove(pending)
        if isinstance(pending.answer, InferenceError):
            raise pending.answer
        return pending.answer

    async def abort(self, session: str) -> None:
        """Give back what the session waits for, as far as it came (see `CanAbort`)."""
        self._scheduler.abort(session)

    async def score(self, tokens: list[int], temperature: float = 1.0) -> list[float]:
        """Logprob of each token [L] given those before it; the first is 0.0. Raises InferenceError."""
        assert tokens, "score needs at least one token"
        assert temperature >= 0, f"{temperature=}"
        self._check(tokens)
        try:
            return await self._thread.submit(self._decoder.score, list(tokens), temperature)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise InferenceError(f"the model failed to score {len(tokens)} tokens: {error}") from error

    async def update_weights(self, update: WeightUpdate) -> None:
        """Take up weights; where the parameters are the trainer's there is nothing to move.

        Raises InferenceError where the update does not bring what is needed, or says something else than is true.
        """
        await trio.lowlevel.checkpoint()
        if self.capabilities.owns_weights:
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
        kind = self.capabilities.weights_kind
        if update.kind != kind:
            raise InferenceError(f"the hf engine takes {kind} weights, and the update is {update.kind}")
        own = self.model.state_dict() if self.adapter is None else adapter_parameters(self.adapter)
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
            cache_support = await self._thread.submit(lambda: self._decoder.cache_support)
            await self.score([0, 0])
        except Exception as error:
            return Health(False, self.version, f"{type(error).__name__}: {error}")
        detail = (
            f"decoding whole contexts: {cache_support.reason}"
            if cache_support.shape is None
            else "decoding with session caches"
        )
        return Health(True, self.version, detail)

    def _launch(self, pending_requests: list[PendingRequest]) -> None:
        if not pending_requests:
            return
        from rollouts.inference.embedded.decode import uniforms
        from rollouts.inference.embedded.decode_slots import Row

        for pending in pending_requests:
            asked = pending.request
            tokens, stop_ids = list(asked.tokens), frozenset(asked.stop_ids)
            numbers = uniforms(asked.seed, asked.offset)
            pending.row = Row(tokens, asked.max_tokens, stop_ids, asked.temperature, numbers, asked.session, pending)
            pending.wait_scope.deadline = math.inf  # once it runs, it takes as long as it takes
        try:
            self._thread.submit(
                self._run_batch, [pending.row for pending in pending_requests], trio.lowlevel.current_trio_token()
            )
        except queue.Full:
            error = InferenceError("the torch thread has too much work queued; is it stuck in a training step?")
            for pending in pending_requests:
                pending.resolve(error)

    def _run_batch(self, rows: list[Row], token: trio.lowlevel.TrioToken) -> None:
        """In the torch thread. Every row's pending is resolved, whatever happens."""
        version = self.version

        def post(done: list[Row], failure: InferenceError | None = None) -> None:
            answers = [(row.pending, failure or _generation(row, version)) for row in done]

            def resolve() -> None:
                for pending, answer in answers:
                    pending.resolve(answer)

            with contextlib.suppress(trio.RunFinishedError):  # then no task waits any more
                token.run_sync_soon(resolve)

        gone = [row for row in rows if row.abandoned]
        if gone:
            post(gone)
        try:
            self._decoder.run([row for row in rows if row not in gone], version, post)
        except InferenceError as error:
            post(rows, error)
        except Exception as error:
            failure = InferenceError(f"generation failed: {named(error)}")
            failure.__cause__ = error
            post(rows, failure)

    def _check(self, tokens: list[int], reply: int = 0) -> None:
        """Refuse ids outside the vocabulary, and a context that has no room for so many tokens and such a reply."""
        lowest, highest = min(tokens), max(tokens)
        if lowest < 0 or highest >= self.vocabulary_size:
            wrong = lowest if lowest < 0 else highest
            raise InferenceError(
                f"token id {wrong} is outside the vocabulary: ids run from 0 to {self.vocabulary_size - 1}. "
                "Is this the model's own tokenizer?"
            )
        needed = len(tokens) + reply
        if needed > self.context_tokens_max:
            what = f"a context of {len(tokens)} tokens and a reply of up to {reply} make {needed}"
            raise InferenceError(
                f"{what if reply else f'{needed} tokens to score'}, but the context holds {self.context_tokens_max}"
            )


@estimated_as("embedded")
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
    check_bounds(
        ("--inference.rows-max", rows_max, rows_max >= 1, "1 or more"),
        ("--inference.cache-gib", cache_gib, 0 < cache_gib < math.inf, "a number above 0"),
        ("--inference.prefill-tokens-max", prefill_tokens_max, prefill_tokens_max >= 1, "1 or more"),
        ("--inference.context-tokens", context_tokens, context_tokens >= 0, "0 (the model's own limit) or more"),
        ("--inference.wait-seconds", wait_seconds, wait_seconds > 0, "a number above 0"),
    )
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
            if training.model_files.adapter_config is not None:
                adapter = wrap_in_adapter(network, training.model_files.adapter_config)
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


def _context_tokens_max(model: Any) -> int:
    """The longest context that the model was made for; models without such a limit get 2**20 tokens."""
    config = model.config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
    return next((int(v) for v in (getattr(config, name, None) for name in names) if v), 2**20)
