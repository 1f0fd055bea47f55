"""The training backend: returns futures, and runs all torch work in one thread, in order. A step of a loop:

1. `forward` (if the loss needs it): logprobs of a reference or a teacher, and values, without gradient
2. `forward_backward`: splits the batch into microbatches for each rank, adds up gradients and the denominator D, and
   reads the metrics from the device once
3. `optim_step`: divides by D, clips, steps, and increases the version of the weights

An executor runs commands, in this process or on all ranks (`ranks`). A command is a method of `Trainer` (`COMMANDS`).
Other ranks get its name and plain data, never a function. If a microbatch needs too much memory, the batch runs once
more in smaller ones. Left out: tensor, context and pipeline parallelism, dropout, a scaler for float16. Not here:
what a rank does (`trainer`), and how ranks start (`fsdp`).
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import torch

from rollouts.errors import OutOfMemoryError, TrainingError, first_line
from rollouts.models import lora
from rollouts.models.estimates import ModelSize, estimated_as, peak_flops, train_flops
from rollouts.models.futures import TorchThread, TrainFuture, free_memory, memory_cause, training_words
from rollouts.models.loading import is_stored_as, load_hf_model, resolve_dtype, resolve_model_name
from rollouts.plugins.checks import checked_by
from rollouts.training.algorithms.algorithm import Algorithm, active_terms, function_label, needs
from rollouts.training.algorithms.checks import available_names, check_needs
from rollouts.training.backends import optimizer
from rollouts.training.backends.metric_sums import Reading, batch_metrics, join_records, peak_gib, sum_work
from rollouts.training.backends.optimizer import MakeOptimizer, TorchSettings
from rollouts.training.backends.sharding import BatchShard, gather_outputs, shard_batch
from rollouts.training.backends.trainer import Trainer
from rollouts.training.backends.transformer import Work, use_float32_head
from rollouts.training.batches import AuxiliaryModels, ForwardOutput, Row, StepResult, TrainBatch
from rollouts.training.batching import Keep
from rollouts.training.weights import store


def check_torch(values: Mapping[str, Any]) -> None:
    """Check settings without loading the model. Raises ConfigError, SignatureError."""
    auxiliary_models: AuxiliaryModels = values["auxiliary_models"] or AuxiliaryModels()
    settings: TorchSettings = values["settings"]
    for algorithm in values["algorithms"].values():
        critic, teacher = bool(auxiliary_models.critic), bool(auxiliary_models.teacher)
        check_needs(algorithm, available_names(critic=critic, teacher=teacher, pairs=True))
    names = ("lr", "steps", "tokens_per_microbatch")
    optimizer.check_settings(settings.of_run(**{name: values[name] for name in names}))
    optimizer.check_chosen(settings, values["make_optimizer"])
    optimizer.check_trained_weights(values["lora_rank"], settings.lora_alpha, settings.dtype, auxiliary_models.critic)


@estimated_as("whole")
@checked_by(check_torch)
def create_torch_backend(
    model: str,
    seed: int,
    steps: int,
    lr: float,
    lora_rank: int,
    tokens_per_microbatch: int,
    algorithms: dict[str, Algorithm],
    auxiliary_models: AuxiliaryModels | None,
    make_optimizer: MakeOptimizer | None = None,
    lora_roles: tuple[str, ...] | None = None,
    *,
    settings: TorchSettings = TorchSettings(),
) -> TorchBackend:
    """Train in this process, on one device. Loads the model. Raises ModelError, ConfigError, SignatureError."""
    check_torch(locals())
    settings = dataclasses.replace(settings, dtype=resolve_dtype(settings.dtype, settings.device))
    chosen = settings.of_run(lr=lr, steps=steps, tokens_per_microbatch=tokens_per_microbatch)
    causal = load_hf_model(model, dtype=settings.dtype, device=settings.device, attention=settings.attention)
    adapter = put_in(causal, settings, lora_rank, seed, lora_roles or ())
    trainer = Trainer(
        causal,
        algorithms,
        chosen,
        adapter=adapter,
        source=resolve_model_name(model),
        auxiliary_models=auxiliary_models,
        make_optimizer=make_optimizer,
    )
    if settings.dtype == "bfloat16" and not lora_rank and not is_stored_as(model, torch.bfloat16):
        trainer.load_weights(load_hf_model(model, device="cpu").state_dict())  # masters begin with what is stored
    return TorchBackend(Executor(trainer))


def put_in(causal: Any, settings: TorchSettings, lora_rank: int, seed: int, roles: Sequence[str] = ()) -> Any:
    """Convert the causal LM's head to float32 and inject adapters, as the settings say. Returns the PeftModel, or
    None.
    """
    if settings.fp32_head:
        use_float32_head(causal)
    if not lora_rank:
        return None
    alpha, targets = settings.lora_alpha, settings.lora_targets
    return lora.add_lora(causal, rank=lora_rank, alpha=alpha, targets=targets, seed=seed, roles=roles)


# --- executors --------------------------------------------------------------------------------------------------------


P = ParamSpec("P")
T = TypeVar("T")
Command = Callable[Concatenate[Trainer, P], T]
ShardCommand = Callable[Concatenate[Trainer, BatchShard, P], T]

COMMANDS: dict[str, Callable[..., Any]] = {
    method.__name__: method
    for method in (
        *(Trainer.forward, Trainer.forward_backward, Trainer.forget_gradients, Trainer.optim_step),
        *(Trainer.get_weights, Trainer.load_weights, Trainer.save, Trainer.load),
        *(Trainer.start_profile, Trainer.stop_profile, Trainer.close),
    )
}
"""The methods of a trainer that a backend calls on every rank, by name."""


def run_on_trainer(trainer: Trainer, command: Command[P, T], *args: P.args, **settings: P.kwargs) -> T:
    """Call a method of the trainer. Raises what it raises; OutOfMemoryError if the device has too little memory, with
    `can_halve` if the trainer is as it was before.
    """
    name = command.__name__
    can_halve = not trainer.is_sharded and (name == "forward" or not trainer.has_gradients)
    try:
        return command(trainer, *args, **settings)
    except Exception as error:
        why = memory_cause(error)
        if not why:
            raise
    free_memory(trainer.device)
    rows, checkpoints = trainer.microbatch, trainer.settings.gradient_checkpointing
    tokens = trainer.microbatch_tokens(rows)
    shard = args[0] if args else None
    smaller = _smaller(trainer, shard.batch, tokens) if isinstance(shard, BatchShard) else 0
    lengths = [len(row.tokens) for row in rows]
    words = training_words(name, lengths, tokens, smaller, trainer.device, why, checkpoints=checkpoints)
    raise OutOfMemoryError(words, tokens=tokens, can_halve=can_halve and len(rows) > 1)


def _kept_together(algorithm: Algorithm) -> Keep:
    """The largest unit that the loss names: it needs the rows of each one together."""
    names: tuple[Keep, ...] = ("group", "pair", "rollout")
    return next((name for name in names if f"{name}_index" in needs(algorithm)), "")


def _smaller(trainer: Trainer, batch: TrainBatch, tokens: int) -> int:
    """Half of these tokens, or as many as the batch's loss needs in one microbatch: the number to advise."""
    keep = _kept_together(trainer.algorithms[batch.algorithm]) if batch.algorithm in trainer.algorithms else ""
    together: dict[tuple[str, int], list[Row]] = {}
    for row in batch.rows if keep else ():
        if any(row.loss_mask):
            key = (row.role if trainer.roles else "", getattr(row, f"{keep}_index"))
            together.setdefault(key, []).append(row)
    needed = [trainer.microbatch_tokens(rows) for rows in together.values() if len(rows) > 1]
    return max(1, tokens // 2, *needed)


class Executor:
    """Runs commands on all ranks of a backend, from rank 0. This class has rank 0 only; `rollouts_fsdp` has the others.
    Other ranks get arguments by name. A call raises what rank 0 raises, or RankError.
    """

    size = 1

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def call(self, command: Command[P, T], *args: P.args, **settings: P.kwargs) -> T:
        """Run the command on every rank. Returns the result of rank 0."""
        return run_on_trainer(self.trainer, command, *args, **settings)

    def call_all(self, command: Command[P, T], *args: P.args, **settings: P.kwargs) -> list[T]:
        """Run the command on every rank. Returns all results, rank 0 first."""
        return self.run(command, (), *args, **settings)

    def call_each(
        self, command: ShardCommand[P, T], shards: Sequence[BatchShard], *args: P.args, **settings: P.kwargs
    ) -> list[T]:
        """Like `call_all`, with a shard of a batch for each rank."""
        return self.run(command, shards, *args, **settings)

    def run(self, command: Callable[..., T], shards: Sequence[BatchShard], **settings: Any) -> list[T]:
        """Run the command on every rank, each with its shard, if there are any."""
        return [run_on_trainer(self.trainer, command, *shards, **settings)]

    def close(self) -> None:
        """Stop the other ranks. Called once, when no command is running."""
        self.trainer.close()


class TorchBackend:
    """Implements `TrainingBackend`. `model` includes the adapters; it is None if the weights are sharded. `lr` is the
    learning rate after the warm-up.
    """

    can_profile = True

    def __init__(self, executor: Executor) -> None:
        trainer = executor.trainer
        self.thread = TorchThread("rollouts-torch")
        self.world_size = executor.size
        self.device = str(trainer.device)
        self.compute_dtype = trainer.compute_dtype
        self.notes = trainer.notes
        self.checkpoint_bytes: int | None = trainer.checkpoint_bytes()
        self.model = None if trainer.is_sharded else trainer.causal
        self.model_files = trainer.model_files
        self.lr = trainer.lr
        self._executor = executor
        self._trainer = trainer
        self._has_warned = False  # that a compilation failed

    @property
    def version(self) -> int:
        """The number of optimizer steps that changed the weights."""
        return self._trainer.version

    @property
    def algorithms(self) -> Mapping[str, Algorithm]:
        """The algorithms that a batch may name."""
        return self._trainer.algorithms

    def forward(
        self, batch: TrainBatch, needs: tuple[str, ...] = ("logprobs",), *, only_live: bool = False
    ) -> TrainFuture[ForwardOutput]:
        """Compute the fields of ForwardOutput in `needs`, for every token of every row [L] or for live ones only.

        No gradient. Raises TrainingError if this backend has no reference, teacher or critic and `needs` names one.
        """
        return self.thread.submit(self._forward, batch, needs, only_live)

    def _forward(self, batch: TrainBatch, needs: tuple[str, ...], only_live: bool) -> ForwardOutput:
        self._trainer.check_forward(needs)
        shard = functools.partial(self._shard, batch, "", only_live=only_live, trained=False)
        shards, outputs = self._run_shards(Trainer.forward, shard, needs=needs, only_live=only_live)
        return gather_outputs(batch, shards, outputs)

    def forward_backward(self, batch: TrainBatch) -> TrainFuture[dict[str, float]]:
        """Accumulate gradients and D. Returns `policy/`, `mismatch/` and `perf/` metrics. Sets `recorded` of a batch
        that asks for a `record`. Raises TrainingError.
        """
        return self.thread.submit(self._forward_backward, batch)

    def _forward_backward(self, batch: TrainBatch) -> dict[str, float]:
        trainer = self._trainer
        algorithm = trainer.algorithms.get(batch.algorithm)
        if algorithm is None:
            what = f"the batch names the algorithm {batch.algorithm!r}"
            raise TrainingError(f"{what}; this backend has: {', '.join(sorted(trainer.algorithms))}")
        keep = _kept_together(algorithm)
        start = time.perf_counter()
        shard = functools.partial(self._shard, batch, keep, only_live=True, trained=True)
        shards, readings = self._run_shards(Trainer.forward_backward, shard)
        seconds = time.perf_counter() - start
        learned = [reading.learned for reading in readings if reading.learned is not None]
        try:
            if learned and not any(learned):
                labels = " + ".join(function_label(term.function) for term in active_terms(algorithm))
                what = f"the loss {labels} returned values that carry no gradient, so nothing can be learned"
                without = "without .detach(), torch.no_grad() or a conversion to whole numbers"
                raise TrainingError(f"{what}; compute them from `logprobs` or `entropy`, {without}")
            metrics = batch_metrics(readings, batch.denominator)
        except TrainingError:
            self._executor.call(Trainer.forget_gradients)
            raise
        if batch.record:
            places, records = [shard.places for shard in shards], [reading.recorded for reading in readings]
            batch.recorded = join_records(batch.rows, places, records)
        metrics |= trainer.compilation_metrics()
        if metrics.get("perf/compilation_failed") and not self._has_warned:
            self._has_warned = True
            self.notes += (f"warning: layers are not compiled: {trainer.compilation_failure}",)
        return metrics | training_speed(trainer, readings, seconds)

    def optim_step(self) -> TrainFuture[StepResult]:
        """Divide by D, clip, step. If D is 0 or a gradient is not finite, skip the step and keep the version.

        Raises TrainingError when the third step in a row is skipped because of non-finite gradients.
        """
        return self.thread.submit(self._executor.call, Trainer.optim_step)

    def get_weights(self, kind: Literal["full", "adapter"] = "full") -> TrainFuture[dict[str, Any]]:
        """A CPU copy by name. `full` has the adapters merged in. `adapter` raises TrainingError without LoRA."""
        return self.thread.submit(self._get_weights, kind)

    def _get_weights(self, kind: Literal["full", "adapter"]) -> dict[str, Any]:
        if kind == "adapter" and self._trainer.adapter is None:
            raise TrainingError('this run trains all weights, so there is no adapter; ask for kind "full"')
        if kind == "full" and self._trainer.roles:
            raise TrainingError('each role has an adapter, so there are no merged weights; ask for kind "adapter"')
        return self._executor.call(Trainer.get_weights, kind=kind)

    def load_weights(self, weights: dict[str, Any]) -> TrainFuture[None]:
        """Replace the trained weights: all, or with LoRA the adapter's. Raises TrainingError if names do not fit."""
        return self.thread.submit(self._load_weights, weights)

    def _load_weights(self, weights: dict[str, Any]) -> None:
        self._trainer.check_weights(weights)
        self._executor.call(Trainer.load_weights, weights=weights)

    def save(self, path: str, state: Mapping[str, Any] | None = None) -> TrainFuture[None]:
        """Write a checkpoint folder: weights in the format of transformers or peft, the trainer's state, and `state`.

        `state` is copied now. The folder appears with one rename; if it fails, an older checkpoint stays. Raises
        CheckpointError.
        """
        return self.thread.submit(self._save, path, dict(state or {}))

    def _save(self, path: str, state: dict[str, Any]) -> None:
        trainer = self._trainer
        with store.new_checkpoint(path) as folder:
            random_states = self._executor.call_all(Trainer.save, path=str(folder))
            store.finish_checkpoint(
                folder,
                kind=trainer.kind,
                fingerprint=trainer.fingerprint,
                version=trainer.version,
                world_size=self.world_size,
                state={"backend": trainer.state() | {"random": random_states}, "run": state},
            )

    def load(self, path: str) -> TrainFuture[dict[str, Any]]:
        """Restore what `save` wrote, on any number of ranks. On the same number, the next step is bit-equal.

        Returns the `state` that was saved. Raises ConfigError, ModelError.
        """
        return self.thread.submit(self._load, path)

    def _load(self, path: str) -> dict[str, Any]:
        # First check and read everything on rank 0: after an error, the other ranks would wait.
        self._trainer.check_checkpoint(path)
        weights = self._trainer.read_weights(path)
        self._executor.call(Trainer.load, path=path, weights=weights)
        state: dict[str, Any] = store.read_state(path)["run"]
        return state

    def start_profile(self) -> TrainFuture[None]:
        """Start to profile the thread, on every rank."""
        return self.thread.submit(self._executor.call, Trainer.start_profile)

    def stop_profile(self, folder: str) -> TrainFuture[None]:
        """Write the profile into `folder`. Raises OutputError."""
        return self.thread.submit(self._executor.call, Trainer.stop_profile, folder=folder)

    def close(self) -> None:
        """Finish submitted work, then stop the thread and the other ranks."""
        self.thread.close(last=self._executor.close)

    def _run_shards(
        self,
        command: ShardCommand[P, T],
        make_shards: Callable[[], list[BatchShard]],
        *args: P.args,
        **settings: P.kwargs,
    ) -> tuple[list[BatchShard], list[T]]:
        """Run a command on the shards of a batch. Returns them and their results.

        If a microbatch does not fit into memory, the whole batch runs once more, in microbatches of at most half its
        size, which later batches of this command get too. Raises OutOfMemoryError.
        """
        shards, trainer, name = make_shards(), self._trainer, command.__name__
        try:
            return shards, self._executor.call_each(command, shards, *args, **settings)
        except OutOfMemoryError as error:
            if not error.can_halve:
                raise
            before, failed, tokens = trainer.lower_limits, set(map(id, trainer.microbatch)), max(1, error.tokens // 2)
            trainer.lower_limits = {**before, name: tokens}
            shards = make_shards()
            if any(failed <= set(map(id, rows)) for shard in shards for rows in shard.microbatches()):
                trainer.lower_limits = before  # its rows must stay together
                raise
            words, smaller = first_line(error), _smaller(trainer, shards[0].batch, error.tokens)
            type_this = f"; to begin with less, type --tokens-per-microbatch {smaller}" * (smaller < error.tokens)
        self.notes += (
            f"warning: {words}; the batch runs again, and from now on microbatches of {name} have at most {tokens} "
            f"tokens, unless their rows must stay together{type_this}",
        )
        return shards, self._executor.call_each(command, shards, *args, **settings)

    def _shard(self, batch: TrainBatch, keep: Keep, *, only_live: bool, trained: bool) -> list[BatchShard]:
        split = functools.partial(self._trainer.split, keep=keep, only_live=only_live, trained=trained)
        return shard_batch(batch, self.world_size, split, keep=keep)


def training_speed(trainer: Trainer, readings: Sequence[Reading], seconds: float) -> dict[str, float]:
    """`perf/tflops` per rank, `perf/mfu` if the device's peak is known, and this rank's `perf/peak_gib`. On a GPU, also
    `perf/host_frac`: the fraction of the time after which the device had all of its work.
    """
    found = {"perf/peak_gib": peak_gib(trainer.device)}
    if trainer.device.type == "cuda":
        found["perf/host_frac"] = readings[0].submitted
    flops = _flops(trainer.size, sum_work([each.work for each in readings]), lora=trainer.adapter is not None)
    # Full training has the cost of three forward passes; two of them are the backward pass.
    flops += _flops(trainer.size, sum_work([each.forward_work for each in readings]), lora=False) / 3
    if not flops:
        return found
    rate = flops / max(seconds, 1e-9) / len(readings)
    found["perf/tflops"] = rate / 1e12
    peak = None
    if trainer.device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(trainer.device), trainer.compute_dtype)
    return found if peak is None else found | {"perf/mfu": rate / peak}


def _flops(size: ModelSize, work: Work, *, lora: bool) -> float:
    return train_flops(size, work.tokens, work.products, lora=lora, scored=work.scored)
