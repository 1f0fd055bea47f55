"""The embedded engine: generation in this process, with the trainer's own parameters.

    async with create_hf_inference("path/to/model", None, 0) as engine:
        session = engine.open_session((0, 0))
        reply = await engine.generate(GenerateRequest(tokens, max_tokens=64, stop_ids=(2,), seed=7, session=session))
        engine.close_session(session)

In this order:

1. Requests wait until every open session waits, and form a batch (`scheduler.py`, in trio's thread).
2. The batch is prefilled: equal prompts once, and of a later turn only the new tokens (`decode_slots.py`, `cache.py`).
3. All rows sample one token a step; finished rows leave, and queued rows join (`decode.py`, in the torch thread).
4. Each reply is answered at once. The session keeps the keys and values for its next turn.

The weights are always current, at no cost. (With a sharded trainer, rank 0 keeps a copy, which is updated after every
step.) Generation and training share one thread, so an optimizer step never overlaps a decode step. A seed determines
the result: neither trio's task order nor the batch size changes a random number. Left out: top-p and similar methods,
stop texts, several devices, and paged attention: a batch has one padded buffer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import queue
from typing import TYPE_CHECKING, Any

import trio

from rollouts.errors import ConfigError, InferenceError, named
from rollouts.inference.base import (
    Capabilities,
    GenerateRequest,
    Generation,
    Health,
    VersionSpan,
    WeightUpdate,
    check_tokens,
)
from rollouts.inference.embedded.scheduler import BatchScheduler, InferenceStatistics, PendingRequest
from rollouts.models.estimates import estimated_as
from rollouts.models.futures import TorchThread
from rollouts.plugins.checks import check_bounds

if TYPE_CHECKING:
    from rollouts.inference.embedded.decode_slots import DecodeRow

CLOSE_SECONDS = 30.0


@dataclasses.dataclass(eq=False, repr=False)
class HFInference:
    """Implements InferenceBackend over a transformers causal LM.

    With a training backend it uses the backend's `thread`, `model` and `version`. With a sharded backend, `model` is a
    copy, and every update writes new weights into it. A `pinned` engine has no backend, but such a copy. Without a
    backend the engine has its own thread, which ends when you leave the context manager. `adapter` is the PeftModel
    around this copy if updates bring only the adapter.
    `roles` are those with an adapter of their own in the model: each request then names its role. If `generate` is
    cancelled, its row leaves the batch at the next step.
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
    roles: tuple[str, ...] = ()
    pinned: bool = False

    def __post_init__(self) -> None:
        from rollouts.inference.embedded.decode import Decoder

        shares, model = self.training is not None, self.model
        self.capabilities = Capabilities(
            waits_for_sessions=True,
            in_process=shares or self.pinned,
            owns_weights=self.pinned or (shares and self.training.model is not model),
            weights_kind="full" if self.adapter is None else "adapter",
            aborts=True,
        )
        self._served = 0  # the version of the engine's own weights
        self._thread: TorchThread = self.training.thread if shares else TorchThread("rollouts-hf")
        size = int(self.cache_gib * 2**30)
        self._decoder = Decoder(
            model, rows_max=self.rows_max, cache_bytes=size, prefill_tokens_max=self.prefill_tokens_max
        )
        self._scheduler = BatchScheduler(self._start_batch)
        own = context_tokens_max(model)
        self.context_tokens_max: int = min(own, self.context_tokens or own)
        self.vocabulary_size: int = model.get_input_embeddings().weight.shape[0]

    @property
    def version(self) -> int:
        """The policy version of the parameters; 0 without training."""
        shared = self.training is not None and not self.capabilities.owns_weights
        return int(self.training.version) if shared else self._served

    def statistics(self) -> InferenceStatistics:
        """Counts so far."""
        return dataclasses.replace(self._decoder.statistics, open_sessions=len(self._scheduler.sessions))

    async def __aenter__(self) -> HFInference:
        await self._thread.submit(lambda: self._decoder.cache_support)
        return self

    async def __aexit__(self, *exc: Any) -> None:
        if self.training is None:
            with trio.move_on_after(CLOSE_SECONDS, shield=True):
                await trio.to_thread.run_sync(self._thread.close, abandon_on_cancel=True)

    def open_session(self, order: tuple[int, ...]) -> str:
        """Announce an episode. No batch starts until this session waits in `generate` or is closed."""
        session = self._scheduler.open(order)
        self._decoder.sessions.open(session)
        return session

    def release_session(self, session: str) -> None:
        """From now on, no batch waits for this session (see `WaitsForSessions`)."""
        self._scheduler.release(session)

    def close_session(self, session: str) -> None:
        """End the session: free its cache, and start batches without it. It is safe to close a session twice."""
        self._decoder.sessions.close(session)
        self._scheduler.close(session)
        if not self._scheduler.sessions:
            # Frees the memory for the trainer. If the queue is full, the next batch replaces the buffer.
            with contextlib.suppress(queue.Full):
                self._thread.submit(self._decoder.release_buffer)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn, in a batch with the other waiting requests.

        Raises InferenceError if an id is outside the vocabulary, the context is too long, the role has no adapter, the
        model fails, or the wait for other episodes exceeds `wait_seconds`.
        """
        assert request.max_tokens >= 1, f"max_tokens must be at least 1, got {request.max_tokens}"
        assert request.temperature >= 0, f"temperature must be at least 0, got {request.temperature}"
        self._check(request.tokens, request.max_tokens, role=request.role)
        pending = PendingRequest(request)
        pending.wait_scope.deadline = trio.current_time() + self.wait_seconds
        try:
            if not self._scheduler.add(pending):
                await trio.lowlevel.checkpoint()
                if pending.row is None:
                    self._scheduler.start_sessionless()
            with pending.wait_scope:
                await pending.done.wait()
            if pending.answer is None:
                missing = self._scheduler.missing()
                raise InferenceError(
                    f"waited {self.wait_seconds:g} s for {len(missing)} other episodes ({', '.join(missing[:5])}): "
                    "each open session must request a reply or close. Give tools shorter timeouts, or raise "
                    "--inference.wait-seconds"
                )
        finally:
            self._scheduler.remove(pending)
        if isinstance(pending.answer, InferenceError):
            raise pending.answer
        return pending.answer

    async def abort(self, session: str) -> None:
        """End the session's request early (see `CanAbort`)."""
        self._scheduler.abort(session)

    async def score(self, tokens: list[int], temperature: float = 1.0, role: str = "") -> list[float]:
        """The logprob of each token [L] given the tokens before it; the first is 0.0. `role` is like that of a request.
        Raises InferenceError.
        """
        assert temperature >= 0, f"{temperature=}"
        self._check(tokens, role=role)
        try:
            return await self._thread.submit(self._decoder.score, list(tokens), temperature, role if self.roles else "")
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            failure = self._failure(error, f"the model failed to score {len(tokens)} tokens")
        raise failure

    async def update_weights(self, update: WeightUpdate) -> None:
        """Load new weights. If the engine shares the trainer's parameters, only the version is checked.

        Raises InferenceError if the update lacks the weights, or if its kind, names, shapes or version do not match.
        """
        await trio.lowlevel.checkpoint()
        if self.capabilities.owns_weights:
            await self._thread.submit(self._load, update)
            return
        shares = "but the hf engine shares the trainer's parameters"
        if update.path is not None:
            raise InferenceError(f"the update brings the path {update.path}, {shares}; leave out the path")
        if update.version != self.version:
            raise InferenceError(f"the update has version {update.version}, {shares} of version {self.version}")

    def _load(self, update: WeightUpdate) -> None:
        """Runs in the torch thread, so no batch is active."""
        import torch

        from rollouts.models.lora import adapter_parameters

        if update.weights is None:
            raise InferenceError(f"the hf engine has its own weights, but the update {update.version} brings none")
        kind = self.capabilities.weights_kind
        if update.kind != kind:
            raise InferenceError(f"the hf engine takes {kind} weights, but the update has {update.kind} weights")
        own = self.model.state_dict() if self.adapter is None else adapter_parameters(self.adapter)
        given = update.weights
        wrong = sorted(set(own) ^ set(given))
        wrong += sorted(name for name in set(own) & set(given) if own[name].shape != given[name].shape)
        if wrong:
            raise InferenceError(
                f"weights {update.version} do not match this engine's model: {len(wrong)} names or shapes differ, "
                f"first {wrong[0]}"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(given[name])
        self._served = update.version

    async def health(self) -> Health:
        """Whether a forward pass works, and how the model is decoded."""
        try:
            cache_support = await self._thread.submit(lambda: self._decoder.cache_support)
            await self.score([0, 0], role=next(iter(self.roles), ""))
        except Exception as error:
            return Health(False, self.version, f"{type(error).__name__}: {error}")
        is_slow = cache_support.shape is None
        way = f"whole contexts: {cache_support.reason}" if is_slow else "with session caches"
        return Health(True, self.version, f"decoding {way}")

    def _start_batch(self, pending_requests: list[PendingRequest]) -> None:
        """Called by the scheduler: decode these requests in the torch thread."""
        from rollouts.inference.embedded.decode import uniforms
        from rollouts.inference.embedded.decode_slots import DecodeRow

        for pending in pending_requests:
            request = pending.request
            tokens, stop_ids = list(request.tokens), frozenset(request.stop_ids)
            numbers = uniforms(request.seed, request.offset)
            role = request.role if self.roles else ""
            pending.row = DecodeRow(
                tokens, request.max_tokens, stop_ids, request.temperature, numbers, request.session, role, pending
            )
            pending.wait_scope.deadline = math.inf  # no deadline once the request runs
        try:
            self._thread.submit(
                self._run_batch, [pending.row for pending in pending_requests], trio.lowlevel.current_trio_token()
            )
        except queue.Full:
            error = InferenceError("the torch thread has too much work queued; is it stuck in a training step?")
            for pending in pending_requests:
                pending.resolve(error)

    def _run_batch(self, rows: list[DecodeRow], token: trio.lowlevel.TrioToken) -> None:
        """Runs in the torch thread. Every row's pending request is resolved, also after an error."""
        version = self.version

        def post(done: list[DecodeRow], failure: InferenceError | None = None) -> None:
            answers = [(row.pending, failure or _generation(row, version)) for row in done]

            def resolve() -> None:
                for pending, answer in answers:
                    pending.resolve(answer)

            with contextlib.suppress(trio.RunFinishedError):  # trio has ended, so no task waits
                token.run_sync_soon(resolve)

        gone = [row for row in rows if row.abandoned]
        if gone:
            post(gone)
        try:
            self._decoder.run([row for row in rows if row not in gone], version, post)
        except InferenceError as error:
            post(rows, error)
        except Exception as error:
            post(rows, self._failure(error, "generation failed"))

    def _failure(self, error: Exception, words: str) -> InferenceError:
        """The error for a failure of the model. If memory is too small, it says what to type, and holds no tensors."""
        from rollouts.models.futures import memory_cause

        failure = InferenceError(f"{words}: {named(error)}")
        failure.__cause__ = error
        if not (why := memory_cause(error)):
            return failure
        flags = "--inference.cache-gib, --inference.rows-max, --inference.prefill-tokens-max or --max-tokens"
        return InferenceError(f"{words}: {type(error).__name__}: {why}\ntype a smaller {flags}")

    def _check(self, tokens: list[int], reply: int = 0, *, role: str) -> None:
        """Raise InferenceError for ids outside the vocabulary, for a role without an adapter, and if context and reply
        exceed the limit.
        """
        if self.roles and role not in self.roles:
            asked = f"the role {role} has no adapter" if role else "each role has an adapter, and a request names none"
            raise InferenceError(f"{asked}; there are adapters of {', '.join(self.roles)}", is_transient=False)
        check_tokens(tokens, reply, self.vocabulary_size, self.context_tokens_max, "the hf engine")


@estimated_as("embedded")
def create_hf_inference(
    model: str,
    training: Any,
    seed: int,
    lora_roles: tuple[str, ...] | None = None,
    pinned: bool | None = None,
    *,
    rows_max: int = 256,
    cache_gib: float = 4.0,
    prefill_tokens_max: int = 16384,
    context_tokens: int = 0,
    wait_seconds: float = 1800.0,
    dtype: str = "auto",
    device: str = "auto",
) -> HFInference:
    """The embedded engine. It uses the trainer's model, or loads `model` if there is no trainer or a sharded one. A
    `pinned` engine has a copy of the trainer's model, to which updates bring the weights, and a thread of its own.

    `seed` is not used, because every request has its own seed. `lora_roles` are the roles with an adapter of their own
    in the checkpoint `model`; a trainer says which ones its model has. Raises ModelError if the model cannot be loaded,
    and ConfigError if a setting is out of bounds, or if `dtype` or `device` is given although there is a trainer.

    Args:
        rows_max: rows that decode at the same time; the other rows of a batch wait
        cache_gib: memory for keys and values in GiB: once for decoding rows, and once for sessions between turns
        prefill_tokens_max: context tokens of one forward pass
        context_tokens: limit for prompt and reply together, in tokens; 0: the model's own limit
        wait_seconds: how long a request waits for the other episodes before it fails
        dtype: dtype of the weights, without a trainer; auto is float32
        device: device of the weights, without a trainer; auto is a GPU if there is one
    """
    check_bounds(
        ("--inference.rows-max", rows_max, rows_max >= 1, "1 or more"),
        ("--inference.cache-gib", cache_gib, 0 < cache_gib < math.inf, "a number above 0"),
        ("--inference.prefill-tokens-max", prefill_tokens_max, prefill_tokens_max >= 1, "1 or more"),
        ("--inference.context-tokens", context_tokens, context_tokens >= 0, "0 (the model's own limit) or more"),
        ("--inference.wait-seconds", wait_seconds, wait_seconds > 0, "a number above 0"),
    )
    from rollouts.models.folders import role_adapters
    from rollouts.models.loading import base_of, load_hf_model
    from rollouts.models.lora import load_role_adapters

    adapter, roles = None, tuple(lora_roles or ())
    if training is None:
        folders = role_adapters(model) if roles else {}
        base = base_of(next(iter(folders.values()))) if folders else model
        network = load_hf_model(base, dtype="float32" if dtype == "auto" else dtype, device=device)
        if folders:
            load_role_adapters(network, folders)
    else:
        _refuse(dtype=dtype, device=device)
        network, roles = training.model, training.model_files.roles if training.model_files else ()
        if pinned and roles:
            raise ConfigError("--eval-inference hf: it serves one adapter at a time; leave out --lora-per-role or this")
        if pinned or network is None:  # sharded: rank 0 samples with its own copy
            network, adapter = _copy(model, training)
    return HFInference(
        network,
        None if pinned else training,
        rows_max=rows_max,
        cache_gib=cache_gib,
        prefill_tokens_max=prefill_tokens_max,
        context_tokens=context_tokens,
        wait_seconds=wait_seconds,
        adapter=adapter,
        roles=roles,
        pinned=bool(pinned) and training is not None,
    )


def _refuse(**given: str) -> None:
    """Raise ConfigError for a setting that the trainer decides."""
    for name, value in given.items():
        if value != "auto":
            raise ConfigError(
                f"--inference.{name} {value}: this engine shares the trainer's parameters; "
                f"type --training.{name} {value}"
            )


def _copy(model: str, training: Any) -> tuple[Any, Any]:
    """A model like the trainer's, to which updates bring the weights; with LoRA, also the PeftModel around it."""
    from rollouts.models.loading import load_hf_model
    from rollouts.models.lora import wrap_in_adapter

    network, adapter_config = load_hf_model(model, dtype=training.compute_dtype, device=training.device), None
    if training.model_files is not None:
        adapter_config = training.model_files.adapter_config
    return network, None if adapter_config is None else wrap_in_adapter(network, adapter_config)


def _generation(row: DecodeRow, version: int) -> Generation:
    spans = [VersionSpan(version, 0, len(row.sampled))] if row.sampled else []
    return Generation(row.sampled, row.logprobs, row.finish or "abort", spans)


def context_tokens_max(model: Any) -> int:
    """The model's longest context in tokens; 2**20 for a model without a limit."""
    config = model.config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
    return next((int(v) for v in (getattr(config, name, None) for name in names) if v), 2**20)
