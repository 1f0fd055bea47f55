"""The single-process training backend: one model, one AdamW, one thread that does all torch work in order.

`forward_backward` accumulates the gradients of sum(u * loss) and the batch's share of D; `optim_step` divides once,
clips by the global norm, and steps. The model runs in evaluation mode also while training: dropout would make the
ratio of a policy to itself differ from 1. Left out: several ranks, reference models, critics.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from rollouts.errors import ConfigError, TrainingError
from rollouts.training.algorithms.algorithm import (
    AVAILABLE,
    Algorithm,
    check_needs,
    evaluate,
    function_label,
    needs,
    setting_of,
)
from rollouts.training.algorithms.logprobs import logprobs_and_entropy
from rollouts.training.backends import checkpoint, lora
from rollouts.training.backends.futures import TorchThread, TrainFuture
from rollouts.training.backends.sums import Sums
from rollouts.training.backends.transformer import ModelPaths, Selection, inspect_model, run_rows
from rollouts.training.batching import BUCKET_SAVING_MIN, Keep, plan_layout, split_microbatches
from rollouts.training.models import load_hf_model, resolve_model_name
from rollouts.training.types import ForwardOutput, Row, StepResult, TrainBatch

__all__ = ["TorchBackend", "TorchSettings", "create_torch_backend"]

# On a GPU a pass through a small model is mostly launches, as long as those of some thousand tokens.
_GPU_BUCKET_SAVING_MIN = 4096
# One step that is not finite may be a batch's bad luck and is skipped; so many in a row are weights that diverged.
_NOT_FINITE_MAX = 3


class TorchSettings(NamedTuple):
    """How to optimise (see `create_torch_backend`). `warmup_steps` optimizer steps lead linearly to `lr`, then it is
    constant.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup_steps: int = 5
    tokens_per_microbatch: int = 16384
    share_prefix: bool = True
    gradient_checkpointing: bool = False


def create_torch_backend(
    model: str,
    seed: int,
    steps: int,
    lr: float,
    lora_rank: int,
    tokens_per_microbatch: int,
    algorithms: dict[str, Algorithm],
    *,
    dtype: str = "float32",
    device: str = "auto",
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_grad_norm: float = 1.0,
    warmup_steps: int = 5,
    lora_alpha: float | None = None,
    lora_targets: str = "all-linear",
    share_prefix: bool = True,
    gradient_checkpointing: bool = False,
) -> TorchBackend:
    """Load a model and make it trainable. Raises ModelError, ConfigError, SignatureError.

    Args:
        dtype: of the weights: float32 or float64; bfloat16 and float16 only with LoRA, whose adapters are float32
        device: auto, cpu, cuda, cuda:1
        betas: of AdamW
        eps: of AdamW
        weight_decay: of AdamW
        max_grad_norm: gradients are clipped to this global norm
        warmup_steps: optimizer steps to reach the learning rate (never more than the run has)
        lora_alpha: scale of the adapters; none is twice the rank
        lora_targets: "all-linear", or names of layers with commas between them
        share_prefix: run a prompt that rows share once
        gradient_checkpointing: compute activations again in the backward; saves memory, and shares no prompts
    """
    for algorithm in algorithms.values():
        check_needs(algorithm, AVAILABLE)
    settings = TorchSettings(
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
        warmup_steps=min(warmup_steps, max(1, steps)),
        tokens_per_microbatch=tokens_per_microbatch,
        share_prefix=share_prefix,
        gradient_checkpointing=gradient_checkpointing,
    )
    _check_settings(settings)  # before any weights are read
    _check_trained_weights(lora_rank, lora_alpha, dtype)
    causal = load_hf_model(model, dtype=dtype, device=device)
    adapter = None
    if lora_rank:
        adapter = lora.add_lora(causal, rank=lora_rank, alpha=lora_alpha, targets=lora_targets, seed=seed)
    return TorchBackend(causal, algorithms, settings, adapter=adapter, source=resolve_model_name(model))


class TorchBackend:
    """Implements `TrainingBackend`.

    `model` is the causal LM (adapters, if any, injected); an in-process engine may generate with it on `thread`.
    `version` counts optimizer steps that changed the weights. `notes` says in words which fast paths this model cannot
    take.
    """

    def __init__(
        self,
        causal: Any,
        algorithms: dict[str, Algorithm],
        settings: TorchSettings,
        *,
        adapter: Any = None,
        source: str | None = None,
    ) -> None:
        _check_settings(settings)
        self.model = causal.eval()
        self.version = 0
        self.thread = TorchThread("rollouts-torch")
        self._adapter = adapter
        self._algorithms = dict(algorithms)
        self._settings = settings
        self._source = source
        self._parameters = [parameter for parameter in causal.parameters() if parameter.requires_grad]
        self._optimizer = _adamw(self._parameters, settings)
        self._denominator = 0.0
        self._skipped = 0
        self._not_finite = 0  # steps in a row that were skipped for it
        on_cpu = next(causal.parameters()).device.type == "cpu"
        self._bucket_saving_min = BUCKET_SAVING_MIN if on_cpu else _GPU_BUCKET_SAVING_MIN
        share = settings.share_prefix and not settings.gradient_checkpointing
        self._paths: ModelPaths = inspect_model(causal, share_prefix=share)
        self.notes = self._paths.notes
        if settings.gradient_checkpointing:
            _prepare_gradient_checkpointing(causal)

    @property
    def shares_prefix(self) -> bool:
        """Whether prompts that rows share are run once."""
        return self._paths.share_prefix

    def forward(self, batch: TrainBatch, needs: tuple[str, ...] = ("logprobs",)) -> TrainFuture[ForwardOutput]:
        """Logprobs, and entropy where needed, of every token of every row [L], without gradient."""
        return self.thread.submit(self._forward, batch, needs)

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

    def save(self, path: str) -> TrainFuture[None]:
        """Write a checkpoint folder in one rename: weights as transformers or peft load them, and the trainer's
        state.
        """
        return self.thread.submit(self._save, path)

    def load(self, path: str) -> TrainFuture[None]:
        """Restore what `save` wrote; the next step is then bit-equal. Raises ConfigError, ModelError."""
        return self.thread.submit(self._load, path)

    def close(self) -> None:
        """Finish what was submitted and end the thread."""
        self.thread.close()

    # Everything below runs on the thread.

    def _forward(self, batch: TrainBatch, needs: tuple[str, ...]) -> ForwardOutput:
        unknown = sorted(set(needs) - {"logprobs", "entropy"})
        if unknown:
            raise TrainingError(f"this backend was asked for {', '.join(unknown)}; it can give logprobs and entropy")
        number_of = {id(row): number for number, row in enumerate(batch.rows)}
        logprobs = [[0.0] * len(row.tokens) for row in batch.rows]
        entropy = [[0.0] * len(row.tokens) for row in batch.rows]
        share = self.shares_prefix
        bound = self._settings.tokens_per_microbatch
        rows_of_parts = split_microbatches(batch, bound, share_prefix=share, only_live=False)
        with torch.inference_mode():
            for rows in rows_of_parts:
                wanted = [range(1, len(row.tokens)) for row in rows]
                if not any(wanted):
                    continue
                found, uncertainty, selection, _ = self._score(rows, wanted, batch.temperature)
                both = iter(zip(found.tolist(), uncertainty.tolist(), strict=True))
                for place, positions in zip(selection.rows, selection.positions, strict=True):
                    number = number_of[id(rows[place])]
                    for position in positions:
                        logprobs[number][position], entropy[number][position] = next(both)
        return ForwardOutput(logprobs, entropy if "entropy" in needs else None)

    def _score(
        self, rows: list[Row], wanted: Any, temperature: float
    ) -> tuple[Tensor, Tensor, Selection, tuple[int, int]]:
        """Logprobs [T], entropy [T], which tokens they are, and (tokens, tokens with padding) that were run."""
        layout = plan_layout(rows, share_prefix=self.shares_prefix, bucket_saving_min=self._bucket_saving_min)
        features, selection = run_rows(self._paths, rows, layout, wanted)
        targets = [
            rows[row].tokens[t] for row, chosen in zip(selection.rows, selection.positions, strict=True) for t in chosen
        ]
        logprobs, entropy = logprobs_and_entropy(
            self._paths.head,
            features,
            torch.tensor(targets, device=features.device),
            vocabulary_size=self._paths.vocabulary_size,
            temperature=temperature,
        )
        lengths = [len(row.tokens) for row in rows]
        real = sum(map(len, layout.prefixes)) + sum(lengths) - sum(layout.starts)
        return logprobs, entropy, selection, (real, layout.padded_tokens(lengths))

    def _forward_backward(self, batch: TrainBatch) -> dict[str, float]:
        if batch.algorithm not in self._algorithms:
            raise TrainingError(
                f"the batch names the algorithm {batch.algorithm!r}; this backend was given: "
                f"{', '.join(sorted(self._algorithms))}"
            )
        algorithm = self._algorithms[batch.algorithm]
        requested = needs(algorithm)
        keep: Keep = "group" if "group_index" in requested else "rollout" if "rollout_index" in requested else ""
        bound = self._settings.tokens_per_microbatch
        parts = split_microbatches(batch, bound, share_prefix=self.shares_prefix, keep=keep)
        sums = Sums()
        try:
            with self._training_mode():
                learning = [self._microbatch(rows, batch, algorithm, requested, sums) for rows in parts]
            if learning and not any(learning):
                raise TrainingError(_without_gradient(algorithm))
            metrics = sums.metrics(batch.denominator)
        except BaseException:
            self._forget_gradients()
            raise
        self._denominator += batch.denominator
        return metrics

    def _microbatch(
        self, rows: list[Row], batch: TrainBatch, algorithm: Algorithm, requested: frozenset[str], sums: Sums
    ) -> bool:
        """Add up one microbatch; False where no term's values carried a gradient."""
        wanted = [[t for t, weight in enumerate(row.loss_mask) if weight > 0] for row in rows]
        logprobs, entropy, selection, tokens = self._score(rows, wanted, batch.temperature)
        streams = _streams(rows, selection, logprobs.device)
        mask = streams["mask"]
        available: dict[str, Any] = streams | {
            "logprobs": logprobs,
            "entropy": entropy if "entropy" in requested else entropy.detach(),
            "step": batch.step,
        }
        if "rewards" in requested:
            available["rewards"] = torch.tensor(batch.rewards, device=logprobs.device)
        evaluation = evaluate(algorithm, available, mask)
        objective = (evaluation.values * streams["weights"]).sum()
        learning = bool(objective.requires_grad)  # a loss may be constant in some microbatches
        if learning:
            objective.backward()  # type: ignore[no-untyped-call]
        clip = (setting_of(algorithm, "clip_low"), setting_of(algorithm, "clip_high"))
        with torch.no_grad():
            sums.add(objective, logprobs, entropy, streams, evaluation, clip, tokens)
        return learning

    def _optim_step(self) -> StepResult:
        denominator, self._denominator = self._denominator, 0.0
        settings = self._settings
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        lr = settings.lr * min(1.0, (self.version + 1) / max(1, settings.warmup_steps))
        norm = 0.0
        if gradients and denominator > 0:
            norm = float(nn.utils.get_total_norm(gradients)) / denominator
        if not gradients or denominator <= 0 or not math.isfinite(norm):
            self._skipped += 1
            self._forget_gradients()
            self._not_finite += not math.isfinite(norm)  # with D = 0 the norm is 0.0
            if self._not_finite >= _NOT_FINITE_MAX:
                raise TrainingError(
                    f"the weights or gradients were not finite in {self._not_finite} steps in a row, so training has "
                    f"diverged; try a smaller --lr than {settings.lr:g}"
                )
            return StepResult({"optim/lr": lr, "optim/grad_norm": norm, "optim/skipped": 1.0}, self.version)
        scale = min(1.0, settings.max_grad_norm / (norm + 1e-6)) / denominator
        with torch.no_grad():
            for gradient in gradients:
                gradient.mul_(scale)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.version += 1
        self._not_finite = 0
        return StepResult({"optim/lr": lr, "optim/grad_norm": norm, "optim/skipped": 0.0}, self.version)

    def _forget_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._denominator = 0.0

    @contextlib.contextmanager
    def _training_mode(self) -> Iterator[None]:
        """transformers checkpoints activations in training mode only; all dropout was set to 0 before."""
        if not self._settings.gradient_checkpointing:
            yield
            return
        self.model.train()
        try:
            yield
        finally:
            self.model.eval()

    def _get_weights(self, kind: Literal["full", "adapter"]) -> dict[str, Any]:
        if kind == "full":
            return lora.merged_weights(self.model)
        if self._adapter is None:
            raise TrainingError('this run trains all weights, so there is no adapter; ask for kind "full"')
        return lora.read_adapter_weights(self._adapter)

    def _load_weights(self, weights: dict[str, Any]) -> None:
        if self._adapter is not None:
            lora.load_adapter_weights(self._adapter, weights)
            return
        own = self.model.state_dict()
        wrong = sorted(set(own) ^ set(weights))
        wrong += sorted(name for name in set(own) & set(weights) if own[name].shape != weights[name].shape)
        if wrong:
            raise TrainingError(f"these are not this model's weights: {len(wrong)} of them differ, first {wrong[0]}")
        self.model.load_state_dict(weights)

    def _save(self, path: str) -> None:
        state = {
            "version": self.version,
            "skipped": self._skipped,
            "optimizer": self._optimizer.state_dict(),
        }
        checkpoint.write_checkpoint(
            path,
            model=self.model if self._adapter is None else lora.AdapterFolder(self._adapter),
            kind=self._kind,
            trainer_state=state,
            fingerprint=self._fingerprint(),
            source=self._source,
        )

    def _load(self, path: str) -> None:
        checkpoint.check_folder(path, kind=self._kind, fingerprint=self._fingerprint())
        state = checkpoint.read_trainer_state(path)
        weights = checkpoint.read_weights(path, kind=self._kind, dtype=self.model.dtype)
        self._load_weights(weights)
        self._optimizer.load_state_dict(state["optimizer"])
        self._forget_gradients()
        self.version = int(state["version"])
        self._skipped = int(state["skipped"])
        self._not_finite = 0

    @property
    def _kind(self) -> str:
        return "full" if self._adapter is None else "adapter"

    def _fingerprint(self) -> str:
        return checkpoint.model_fingerprint(self.model.state_dict())


def _streams(rows: list[Row], selection: Selection, device: torch.device) -> dict[str, Tensor]:
    """What is stamped on the selected tokens, [T] each and in their order. The anchor is what sampled, unless given."""
    chosen = [(rows[row], positions) for row, positions in zip(selection.rows, selection.positions, strict=True)]
    floats = {
        "mask": [row.loss_mask[t] for row, positions in chosen for t in positions],
        "weights": [row.weights[t] for row, positions in chosen for t in positions],
        "advantages": [row.advantages[t] for row, positions in chosen for t in positions],
        "rollout_logprobs": [row.rollout_logprobs[t] for row, positions in chosen for t in positions],
        "old_logprobs": [
            (row.rollout_logprobs if row.old_logprobs is None else row.old_logprobs)[t]
            for row, positions in chosen
            for t in positions
        ],
    }
    indices = {
        "rollout_index": [row.rollout_index for row, positions in chosen for _ in positions],
        "group_index": [row.group_index for row, positions in chosen for _ in positions],
    }
    table = torch.tensor(list(floats.values()), dtype=torch.float32, device=device)
    numbers = torch.tensor(list(indices.values()), dtype=torch.int64, device=device)
    return dict(zip(floats, table, strict=True)) | dict(zip(indices, numbers, strict=True))


def _without_gradient(algorithm: Algorithm) -> str:
    labels = " + ".join(function_label(term.function) for term in algorithm.terms)
    return (
        f"the loss {labels} returned values that carry no gradient, so nothing can be learned; compute them from "
        "`logprobs` or `entropy`, without .detach(), torch.no_grad() or a conversion to whole numbers"
    )


def _check_settings(settings: TorchSettings) -> None:
    """Refuse what torch would refuse later with a traceback, or what would train nothing. Raises ConfigError."""
    above = "a number above 0"
    whole = "a whole number, 0 or more"
    checks = (
        ("--lr", settings.lr, 0 < settings.lr < math.inf, above),
        ("--training.betas", settings.betas, all(0 <= b < 1 for b in settings.betas), "two numbers in [0, 1)"),
        ("--training.eps", settings.eps, 0 < settings.eps < math.inf, above),
        ("--training.weight-decay", settings.weight_decay, 0 <= settings.weight_decay < math.inf, "0 or more"),
        ("--training.max-grad-norm", settings.max_grad_norm, 0 < settings.max_grad_norm < math.inf, above),
        ("--training.warmup-steps", settings.warmup_steps, settings.warmup_steps >= 0, whole),
        ("--tokens-per-microbatch", settings.tokens_per_microbatch, settings.tokens_per_microbatch >= 1, "1 or more"),
    )
    for flag, value, holds, expected in checks:
        if not holds:
            words = list(value) if isinstance(value, tuple) else value
            raise ConfigError(f"{flag} {words}: expected {expected}")


def _check_trained_weights(lora_rank: int, lora_alpha: float | None, dtype: str) -> None:
    """Gradients and AdamW's moments have the dtype of what is trained: in half precision most steps round to nothing,
    and float16 overflows. Raises ConfigError.
    """
    if lora_rank < 0:
        raise ConfigError(f"--lora-rank {lora_rank}: expected 1 or more, or 0 to train all weights")
    if lora_alpha is not None and not 0 < lora_alpha < math.inf:
        raise ConfigError(f"--training.lora-alpha {lora_alpha}: expected a number above 0")
    if not lora_rank and dtype in ("bfloat16", "float16"):
        raise ConfigError(
            f"--training.dtype {dtype}: all weights would be trained in {dtype}, where small steps round to nothing "
            "and training stalls or diverges; type --lora-rank 16, whose adapters are float32, or "
            "--training.dtype float32"
        )


def _adamw(parameters: list[nn.Parameter], settings: TorchSettings) -> torch.optim.AdamW:
    """AdamW, fused where every weight lives on a device for which torch has the fused kernel."""
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)
    return torch.optim.AdamW(
        parameters,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=fused,
    )


def _prepare_gradient_checkpointing(causal: Any) -> None:
    """Turn it on, and every dropout off, for it works in training mode only."""
    for module in causal.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    if hasattr(causal, "activation_checkpointing_enable"):  # the newer name; the older one warns where both are there
        causal.activation_checkpointing_enable({"use_reentrant": False})
    else:
        causal.gradient_checkpointing_enable({"use_reentrant": False})
