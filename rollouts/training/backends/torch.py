"""The training backend: futures around a trainer, in one thread that does all torch work in order.

In a single process its trainer is the only one. Over several ranks (`ranks`) every call is shared out, done by all, and
put together here, on rank 0. What a rank does stands in `trainer`. Left out: how ranks start (`fsdp`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal

from rollouts.errors import TrainingError
from rollouts.plugins.checks import checked_by
from rollouts.training.algorithms.algorithm import Algorithm, active_terms, function_label
from rollouts.training.algorithms.needs import available_names, check_needs, needs
from rollouts.training.backends import checkpoint, lora
from rollouts.training.backends.crew import Alone, Command, Crew
from rollouts.training.backends.float32_head import use_float32_head
from rollouts.training.backends.futures import TorchThread, TrainFuture
from rollouts.training.backends.optimizer import (
    TorchSettings,
    check_settings,
    check_trained_weights,
    make_settings,
)
from rollouts.training.backends.shares import Share, gather_outputs, share_batch
from rollouts.training.backends.sums import Reading, metrics_of
from rollouts.training.backends.trainer import Trainer, keep_of
from rollouts.training.batching import Keep
from rollouts.training.models import load_hf_model, resolve_model_name
from rollouts.training.types import Companions, ForwardOutput, Row, StepResult, TrainBatch
from rollouts.training.weight_files import ModelFiles

__all__ = ["TorchBackend", "TorchSettings", "check_algorithms", "create_torch_backend"]


def check_torch(values: Mapping[str, Any]) -> None:
    """What can be refused of a torch backend without loading its model. Raises ConfigError, SignatureError."""
    companions: Companions | None = values["companions"]
    check_algorithms(values["algorithms"], companions)
    check_settings(make_settings(values))
    critic = companions.critic if companions else ""
    check_trained_weights(values["lora_rank"], values["lora_alpha"], values["dtype"], critic)


@checked_by(check_torch)
def create_torch_backend(
    model: str,
    seed: int,
    steps: int,
    lr: float,
    lora_rank: int,
    tokens_per_microbatch: int,
    algorithms: dict[str, Algorithm],
    companions: Companions | None,
    *,
    dtype: str = "float32",
    device: str = "auto",
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_grad_norm: float = 1.0,
    optimizer: Literal["adamw", "adafactor", "sgd"] = "adamw",
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant",
    lr_final: float = 0.0,
    warmup_steps: int = 5,
    lora_alpha: float | None = None,
    lora_targets: str = "all-linear",
    share_prefix: bool = True,
    gradient_checkpointing: bool = False,
    layout: Literal["auto", "buckets", "packed"] = "auto",
    attention: str = "auto",
    fp32_head: bool = False,
) -> TorchBackend:
    """Load a model and make it trainable. Raises ModelError, ConfigError, SignatureError.

    Args:
        dtype: of the weights: float32 or float64; bfloat16 and float16 only with LoRA, whose adapters are float32
        device: auto, cpu, cuda, cuda:1
        betas: of AdamW; the first is the momentum of SGD
        eps: of AdamW
        weight_decay: of the optimizer; SGD adds it to the gradient, the others shrink weights by it
        max_grad_norm: gradients are clipped to this global norm, the critic's by themselves
        optimizer: adamw, adafactor or sgd
        lr_schedule: after the warm-up: constant, or linear or half a cosine to the end of the run
        lr_final: the share of the learning rate at the end of linear and cosine
        warmup_steps: optimizer steps to reach the learning rate (never more than the run has)
        lora_alpha: scale of the adapters; none is twice the rank
        lora_targets: "all-linear", or names of layers with commas between them
        share_prefix: run a prompt that rows share once
        gradient_checkpointing: compute activations again in the backward; saves memory, and shares no prompts
        layout: rows padded in buckets of similar length, or packed into one sequence; auto packs where the attention
            skips what its mask hides (flash_attention_2, flex_attention)
        attention: auto, sdpa, eager, flash_attention_2 or flex_attention, as transformers has them
        fp32_head: compute the logits of a half-precision model in float32
    """
    values = dict(locals())  # all of the above by name
    check_torch(values)
    settings = make_settings(values)
    causal = load_hf_model(model, dtype=dtype, device=device, attention=attention)
    if fp32_head:
        use_float32_head(causal)
    adapter = None
    if lora_rank:
        adapter = lora.add_lora(causal, rank=lora_rank, alpha=lora_alpha, targets=lora_targets, seed=seed)
    trainer = Trainer(
        causal,
        algorithms,
        settings,
        adapter=adapter,
        source=resolve_model_name(model),
        companions=companions,
        dtype=dtype,
        device=device,
    )
    return TorchBackend(Alone(trainer))


def check_algorithms(algorithms: Mapping[str, Algorithm], companions: Companions | None) -> None:
    """Raises SignatureError where a loss names what these companions cannot give."""
    beside = companions or Companions()
    for algorithm in algorithms.values():
        check_needs(algorithm, available_names(critic=bool(beside.critic), teacher=bool(beside.teacher), pairs=True))


class TorchBackend:
    """Implements `TrainingBackend`.

    `model` is the causal LM (adapters, if any, injected); an in-process engine may generate with it on `thread`. It is
    None where the weights are sharded. `version` counts optimizer steps that changed the weights. `notes` says in words
    which fast paths this model cannot take. `world_size` is the number of ranks.
    """

    def __init__(self, crew: Crew, thread: TorchThread | None = None) -> None:
        self.thread = thread or TorchThread("rollouts-torch")
        self.world_size = crew.size
        self.notes = crew.trainer.notes
        self._crew = crew
        self._trainer = crew.trainer

    @property
    def model(self) -> Any:
        """The causal LM, or None where it is sharded."""
        return None if self._trainer.is_sharded else self._trainer.causal

    @property
    def compute_dtype(self) -> str:
        """What the layers compute in: a copy of the model computes the same in it."""
        return self._trainer.compute_dtype

    @property
    def adapter_config(self) -> Any:
        """peft's configuration of the adapter that is trained; None where all weights are."""
        return None if self._trainer.adapter is None else self._trainer.adapter.peft_config[lora.ADAPTER]

    @property
    def model_files(self) -> ModelFiles:
        """What stands beside the weights in a folder that servers load (see `WritesFiles`)."""
        return ModelFiles(self._trainer.causal, self.adapter_config, self._trainer.source)

    @property
    def device(self) -> str:
        """Where rank 0 computes."""
        return str(self._trainer.device)

    @property
    def version(self) -> int:
        """How many optimizer steps have changed the weights."""
        return self._trainer.version

    @property
    def checkpoint_bytes(self) -> int:
        """About what a checkpoint takes on the disk."""
        return self._trainer.checkpoint_bytes()

    @property
    def shares_prefix(self) -> bool:
        """Whether prompts that rows share are run once."""
        return self._trainer.shares_prefix

    def forward(
        self, batch: TrainBatch, needs: tuple[str, ...] = ("logprobs",), *, only_live: bool = False
    ) -> TrainFuture[ForwardOutput]:
        """What `needs` names (fields of ForwardOutput) of every token of every row [L], or of live ones only; without
        gradient. Raises TrainingError for what this backend was not given: a reference, a teacher, a critic.
        """
        return self.thread.submit(self._forward, batch, needs, only_live)

    def forward_backward(self, batch: TrainBatch) -> TrainFuture[dict[str, float]]:
        """Accumulate gradients and D; gives `policy/`, `mismatch/` and `perf/` metrics. Raises TrainingError."""
        return self.thread.submit(self._forward_backward, batch)

    def optim_step(self) -> TrainFuture[StepResult]:
        """Divide by D once, clip, step. D = 0 or a non-finite gradient skips the step: counted, version unchanged.

        Raises TrainingError at the third step in a row that was skipped for what is not finite.
        """
        return self.thread.submit(self._optim_step)

    def get_weights(self, kind: Literal["full", "adapter"] = "full") -> TrainFuture[dict[str, Any]]:
        """A CPU copy by name. `full` has the adapters merged in; `adapter` raises TrainingError without LoRA."""
        return self.thread.submit(self._get_weights, kind)

    def load_weights(self, weights: dict[str, Any]) -> TrainFuture[None]:
        """Replace what is trained: all weights, or with LoRA the adapter's. Raises TrainingError for names that do
        not fit.
        """
        return self.thread.submit(self._load_weights, weights)

    def save(self, path: str, state: Mapping[str, Any] | None = None) -> TrainFuture[None]:
        """Write a checkpoint folder in one rename: weights as transformers or peft load them, the trainer's state, and
        `state`. Raises CheckpointError; a checkpoint that was there stays.
        """
        return self.thread.submit(self._save, path, dict(state or {}))

    def load(self, path: str) -> TrainFuture[dict[str, Any]]:
        """Restore what `save` wrote, on whatever number of ranks; the next step is then bit-equal on the same number.

        Gives the `state` that was saved. Raises ConfigError, ModelError.
        """
        return self.thread.submit(self._load, path)

    def start_profile(self) -> TrainFuture[None]:
        """Begin to profile what the thread does, on every rank."""
        return self.thread.submit(self._call, Command(name="start_profile"))

    def stop_profile(self, folder: str) -> TrainFuture[None]:
        """Write what was profiled into `folder`. Raises OutputError."""
        return self.thread.submit(self._call, Command(name="stop_profile", path=folder))

    def close(self) -> None:
        """Finish what was submitted, and end the thread and the other ranks."""
        self.thread.close(last=self._end)

    # Everything below runs on the thread.

    def _end(self) -> None:
        self._trainer.close()
        self._crew.close()

    def _call(self, command: Command) -> None:
        self._crew.call(command)

    def _forward(self, batch: TrainBatch, needs: tuple[str, ...], only_live: bool) -> ForwardOutput:
        self._trainer.check_forward(needs)
        shares = self._share(batch, "", only_live, trained=False)
        outputs = self._crew.call(Command(name="forward", needs=needs, only_live=only_live), shares)
        return gather_outputs(batch, shares, outputs)

    def _share(self, batch: TrainBatch, keep: Keep, only_live: bool, *, trained: bool) -> list[Share]:
        def split(part: TrainBatch) -> list[list[Row]]:
            return self._trainer.split(part, keep, only_live, trained=trained)

        return share_batch(batch, self._crew.size, split, keep=keep)

    def _forward_backward(self, batch: TrainBatch) -> dict[str, float]:
        algorithms = self._trainer.algorithms
        if batch.algorithm not in algorithms:
            raise TrainingError(
                f"the batch names the algorithm {batch.algorithm!r}; this backend was given: "
                f"{', '.join(sorted(algorithms))}"
            )
        algorithm = algorithms[batch.algorithm]
        shares = self._share(batch, keep_of(needs(algorithm)), True, trained=True)
        start = time.perf_counter()
        readings: list[Reading] = self._crew.call(Command(name="forward_backward"), shares)
        seconds = time.perf_counter() - start
        told = [reading.learned for reading in readings if reading.learned is not None]
        try:
            if told and not any(told):
                raise TrainingError(_without_gradient(algorithm))
            metrics = metrics_of(readings, batch.denominator)
        except TrainingError:
            self._crew.call(Command(name="forget_gradients"))
            raise
        return metrics | self._trainer.speed(shares, readings, seconds)

    def _optim_step(self) -> StepResult:
        result: StepResult = self._crew.call(Command(name="optim_step"))[0]
        return result

    def _get_weights(self, kind: Literal["full", "adapter"]) -> dict[str, Any]:
        if kind == "adapter" and self._trainer.adapter is None:
            raise TrainingError('this run trains all weights, so there is no adapter; ask for kind "full"')
        weights: dict[str, Any] = self._crew.call(Command(name="get_weights", kind=kind))[0]
        return weights

    def _load_weights(self, weights: dict[str, Any]) -> None:
        self._trainer.check_weights(weights)
        self._crew.call(Command(name="load_weights"), weights=weights)

    def _save(self, path: str, state: dict[str, Any]) -> None:
        folder = checkpoint.begin_checkpoint(path)
        try:
            random_states = self._crew.call(Command(name="save", path=str(folder)))
            checkpoint.finish_checkpoint(
                folder,
                path,
                kind=self._trainer.kind,
                fingerprint=self._trainer.fingerprint,
                version=self.version,
                world_size=self._crew.size,
                state={"backend": self._trainer.state() | {"random": random_states}, "run": state},
            )
        except BaseException:
            checkpoint.abandon_checkpoint(folder)
            raise

    def _load(self, path: str) -> dict[str, Any]:
        # Whatever can be refused is refused, and read, before the other ranks are asked: they would wait for it.
        self._trainer.check_checkpoint(path)
        weights = self._trainer.read_weights(path)
        self._crew.call(Command(name="load", path=path), weights=weights)
        state: dict[str, Any] = checkpoint.read_state(path)["run"]
        return state


def _without_gradient(algorithm: Algorithm) -> str:
    labels = " + ".join(function_label(term.function) for term in active_terms(algorithm))
    return (
        f"the loss {labels} returned values that carry no gradient, so nothing can be learned; compute them from "
        "`logprobs` or `entropy`, without .detach(), torch.no_grad() or a conversion to whole numbers"
    )
