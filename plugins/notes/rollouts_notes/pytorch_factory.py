"""A backend for your own torch objects, and functions to make them. For a loop that you write by hand.

    model = load_hf_model("tiny", device="cpu")
    optimizer = create_adamw_optimizer(model, lr=1e-3)
    backend = PyTorchTrainingBackend(model, optimizer, create_cross_entropy_loss(), "checkpoints")
    metrics = await backend.forward_backward(collate_batch(samples, 4, step)).result()

`create_pytorch_backend` makes the backend of `rollouts run` in one line, for `run_sft_training` and `run_rl_training`.
`PyTorchTrainingBackend` is simpler: it has no microbatches, shared prompts, losses by name, LoRA or several ranks.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from rollouts.errors import ConfigError, TrainingError
from rollouts.models.futures import TorchThread, on_thread
from rollouts.plugins.signature import call_with, keywords_of
from rollouts.training.algorithms.algorithm import Algorithm, as_algorithm
from rollouts.training.algorithms.recipes import built_in
from rollouts.training.backends.optimizer import (
    MakeOptimizer,
    TrainerSettings,
    check_settings,
    lr_factor,
    make_optimizer,
)
from rollouts.training.batches import AuxiliaryModels, ForwardOutput, Row, TrainBatch, live_count
from rollouts.training.weights.files import ModelFiles
from rollouts.types import Sample
from rollouts_notes.losses import label_logprobs
from rollouts_notes.pytorch_checkpoint import load_objects, other_parameters, replace_weights, save_objects
from rollouts_notes.supervised import prepare_sft_batch

if TYPE_CHECKING:
    from rollouts.training.backends.torch import TorchBackend

_OLD = "old_log_probs"


def create_adamw_optimizer(
    model: nn.Module, lr: float, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.0
) -> torch.optim.AdamW:
    """AdamW over the model's trainable parameters, as the backends make it. Raises ConfigError."""
    settings = TrainerSettings(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    check_settings(settings)
    optimizer = make_optimizer([([p for p in model.parameters() if p.requires_grad], lr)], settings)
    assert isinstance(optimizer, torch.optim.AdamW), type(optimizer)
    return optimizer


def create_warmup_cosine_scheduler(
    optimizer: torch.optim.Optimizer, warmup_steps: int, num_steps: int, min_ratio: float = 0.0
) -> LambdaLR:
    """A torch scheduler with `lr_factor`: warm-up for `warmup_steps`, then half a cosine down to `min_ratio` of the
    learning rate at step `num_steps`. Call its `step()` after each optimizer step. Raises ConfigError.
    """
    settings = TrainerSettings(
        lr=1.0, warmup_steps=warmup_steps, lr_schedule="cosine", lr_final=min_ratio, steps=num_steps
    )
    check_settings(settings)
    return LambdaLR(optimizer, lambda done: lr_factor(settings, done))


def create_cross_entropy_loss() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A function of `logits` [B, L, V], `labels` [B, L] and `loss_mask` [B, L]. It returns the mean cross-entropy of
    the next token, weighed by the mask, as a scalar; 0 if nothing is live.

    Labels are the token ids, as `prepare_sft_batch` returns them; this function shifts them. Logits at t predict the
    label at t + 1, which counts by its own mask. Nothing predicts the first label.

    >>> logits = torch.zeros(1, 3, 8)
    >>> round(create_cross_entropy_loss()(logits, torch.tensor([[1, 2, 3]]), torch.tensor([[0, 0, 1]])).exp().item())
    8
    """
    return _cross_entropy


def _cross_entropy(logits: Tensor, labels: Tensor, loss_mask: Tensor) -> Tensor:
    weights = loss_mask[:, 1:].to(torch.float32)
    live = weights > 0  # select instead of multiplying by 0, because other values may not be finite
    values = nn.functional.cross_entropy(logits[:, :-1][live].float(), labels[:, 1:][live], reduction="none")
    total = weights.sum()
    return values @ weights[live] / torch.where(total > 0, total, torch.ones_like(total))


def create_pytorch_backend(
    model: str,
    lr: float,
    num_steps: int,
    algorithm: str | Algorithm | Callable[..., Any] = "sft",
    *,
    seed: int = 0,
    lora_rank: int = 0,
    tokens_per_microbatch: int = 16384,
    auxiliary_models: AuxiliaryModels | None = None,
    make_optimizer: MakeOptimizer | None = None,
    **settings: Any,
) -> TorchBackend:
    """Make the backend of `rollouts run` in one line. `create_torch_backend` takes the other `settings`.
    `make_optimizer` is a function of parameter groups and a learning rate that returns a torch optimizer.

    `algorithm` is the name of a built-in one (`sft`, `grpo`, ...), an Algorithm, or a loss function. Its name in
    batches is "main". Raises ModelError, ConfigError, SignatureError.
    """
    from rollouts.training.backends.torch import create_torch_backend

    chosen = built_in(algorithm) if isinstance(algorithm, str) else as_algorithm(algorithm)
    return create_torch_backend(
        model,
        seed,
        num_steps,
        lr,
        lora_rank,
        tokens_per_microbatch,
        {"main": chosen},
        auxiliary_models,
        make_optimizer,
        **keywords_of(create_torch_backend, settings),
    )


def is_sharded(model: nn.Module) -> bool:
    """Whether a part of the model is sharded: by `fully_shard` (FSDP2), or wrapped in FullyShardedDataParallel."""
    classes = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    return not classes.isdisjoint({"FSDPModule", "FullyShardedDataParallel"})


class PyTorchTrainingBackend:
    """A backend for a model, an optimizer and a loss function. Returns futures; one thread works in the order of calls.

    `loss_fn` gets the inputs that its parameters name: `logits` [B, L, V] and the batch's tensors (`labels`,
    `loss_mask`, `advantages` or any other). It returns a scalar, the mean over the batch; or two scalars, a sum and its
    denominator. `mean_over` says what a mean is over: "tokens", the sum of the mask from position 1 on, because nothing
    predicts the first token; or "rows", those with a trained token. None: "tokens" for a function that has a parameter
    `loss_mask` and none `advantages`, else "rows". So several batches before one `optim_step` have the same gradient as
    one batch of all their rows.

    `optim_step` divides the gradients once by the sum of the denominators, clips them if there is a `max_grad_norm`,
    and also steps the `scheduler`. If the denominators add up to 0, it changes no weight. `weight_version` is the
    number of optimizer steps.

    `run_sft_training` and `run_rl_training` of `rollouts.training` take this backend. It has what they need of a
    TrainingBackend, and what engines need that get its weights. Raises ConfigError for a sharded model.
    """

    world_size = 1
    notes: tuple[str, ...] = ()
    checkpoint_bytes: int | None = None
    can_profile = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[..., Tensor],
        checkpoint_dir: str | Path = "checkpoints",
        *,
        scheduler: LambdaLR | None = None,
        max_grad_norm: float | None = None,
        mean_over: Literal["tokens", "rows"] | None = None,
    ) -> None:
        if mean_over not in (None, "tokens", "rows"):
            raise ConfigError(f'mean_over is {mean_over!r}; expected "tokens", "rows" or None')
        if is_sharded(model):
            raise ConfigError(
                "this model is sharded (FSDP), and a PyTorchTrainingBackend trains in one process; use "
                "rollouts.training.create_fsdp_backend"
            )
        self.model: Any = model
        self.optimizer = optimizer
        self.weight_version = 0
        self.thread = TorchThread("rollouts-pytorch")
        # A module's __call__ takes anything, so use the parameters of its forward.
        self._loss_fn = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
        self._folder = Path(checkpoint_dir).absolute()
        self.scheduler = scheduler
        self._max_grad_norm = math.inf if max_grad_norm is None else max_grad_norm
        self._denominator = 0.0
        named = inspect.signature(self._loss_fn).parameters
        self._over_tokens = mean_over == "tokens" or (
            mean_over is None and "loss_mask" in named and "advantages" not in named
        )

    @property
    def version(self) -> int:
        """The same as `weight_version`."""
        return self.weight_version

    @property
    def device(self) -> str:
        """The device of the model."""
        return str(next(self.model.parameters()).device)

    @property
    def compute_dtype(self) -> str:
        """The dtype of the model's weights."""
        return str(next(self.model.parameters()).dtype).removeprefix("torch.")

    @property
    def model_files(self) -> ModelFiles | None:
        """How servers get the weights; None for a model that is not one of transformers."""
        return ModelFiles(self.model) if hasattr(self.model, "save_pretrained") else None

    @on_thread
    def forward_backward(self, batch: Mapping[str, Any] | TrainBatch) -> dict[str, float]:
        """Accumulate the gradients of a batch. `input_ids` [B, L] go to the model, with `attention_mask` and
        `position_ids` if there are any. Returns the batch's mean `loss`, and the `grad_norm` of the mean over all
        batches since the last step. Raises TrainingError, SignatureError.

        A TrainBatch, as the loops make it, is converted: see `prepare_sft_batch`. The loss function may also name
        `advantages` [B], the mean of each row's trained tokens, and `old_log_probs` [B, L], the sampler's. Where they
        are unknown, they are those of this model. Rows without a trained token are left out. The logits are divided by
        the batch's sampling temperature.
        """
        temperature = 1.0
        if isinstance(batch, TrainBatch):
            rows = [row for row in batch.rows if live_count(row)] or batch.rows
            temperature = batch.temperature
            batch = _tensors_of(rows)
        if "input_ids" not in batch:
            raise TrainingError(f"the batch has {', '.join(sorted(batch)) or 'nothing'}; it needs input_ids [B, L]")
        device = next(self.model.parameters()).device
        tensors = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        beside = {name: tensors[name] for name in ("attention_mask", "position_ids") if name in tensors}
        output = self.model(tensors["input_ids"], **beside)
        logits = getattr(output, "logits", output)
        tensors["logits"] = logits if temperature == 1.0 else logits / temperature
        parameters = inspect.signature(self._loss_fn).parameters
        if _OLD in parameters and _OLD in tensors:
            own, _ = label_logprobs(tensors["logits"].detach(), tensors["labels"])
            tensors[_OLD] = torch.where(tensors[_OLD].isnan(), own, tensors[_OLD])
        optional = {name: each.default for name, each in parameters.items() if each.default is not each.empty}
        returned = call_with(self._loss_fn, optional | tensors)
        total, denominator = _sum_and_denominator(returned, self._weight_of(tensors))
        value = total.item() / (denominator or 1.0)
        if not math.isfinite(value):
            raise TrainingError(f"the loss of the batch is {value}; no gradient was added")
        torch.autograd.backward(total)
        self._denominator += denominator
        norm = float(nn.utils.get_total_norm(self._gradients()))
        return {"loss": value, "grad_norm": norm / self._denominator if self._denominator else 0.0}

    @on_thread
    def optim_step(self) -> dict[str, float]:
        """Divide the accumulated gradients by the sum of the denominators, step, and reset them. Returns `lr`; also
        `optim/skipped` 1.0 if the denominators add up to 0.
        """
        lr = float(self.optimizer.param_groups[0]["lr"])
        if not self._denominator:
            self._forget_gradients()
            return {"lr": lr, "optim/skipped": 1.0}
        for gradient in self._gradients():
            gradient.div_(self._denominator)
        if self._max_grad_norm < math.inf:
            nn.utils.clip_grad_norm_(self._parameters(), self._max_grad_norm)
        self.optimizer.step()
        self._forget_gradients()
        if self.scheduler is not None:
            self.scheduler.step()
        self.weight_version += 1
        return {"lr": lr}

    @on_thread
    def forward(
        self, batch: TrainBatch, needs: tuple[str, ...] = ("logprobs",), *, only_live: bool = False
    ) -> ForwardOutput:
        """Compute `logprobs` and `entropy` of every row, without gradient. Raises TrainingError for other needs."""
        if other := set(needs) - {"logprobs", "entropy"}:
            raise TrainingError(
                f"a PyTorchTrainingBackend has no {', '.join(sorted(other))}; use create_pytorch_backend"
            )
        device = next(self.model.parameters()).device
        with torch.no_grad():
            tensors = {name: each.to(device) for name, each in _tensors_of(batch.rows).items()}
            output = self.model(tensors["input_ids"])
            logits = getattr(output, "logits", output) / batch.temperature
            found = label_logprobs(logits, tensors["labels"])
        live = tensors["loss_mask"] > 0 if only_live else torch.ones_like(tensors["loss_mask"])
        logprobs, entropy = (
            [row[: len(of.tokens)].tolist() for row, of in zip(each * live, batch.rows, strict=True)] for each in found
        )
        return ForwardOutput(logprobs, entropy if "entropy" in needs else None)

    @on_thread
    def get_weights(self, kind: str = "full") -> dict[str, Any]:
        """A CPU copy of the weights by name. Raises TrainingError for any kind but "full"."""
        if kind != "full":
            raise TrainingError(f"a PyTorchTrainingBackend has no {kind} weights; create_pytorch_backend knows LoRA")
        return {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}

    @on_thread
    def load_weights(self, weights: dict[str, Any]) -> None:
        """Replace all weights by name. Raises TrainingError if names or shapes differ."""
        replace_weights(self.model, weights)

    async def save_checkpoint(self, step: int, metrics: Mapping[str, float] | None = None) -> Path:
        """Write `checkpoint_dir`/step_000010, completely or not at all, and return its path. Contains the weights (in
        the format of transformers, if the model is one of theirs), optimizer, scheduler and `metrics`. Raises
        CheckpointError.
        """
        return await self.thread.submit(self._save, step, dict(metrics or {}))

    async def load_checkpoint(self, path: str | Path) -> dict[str, float]:
        """Read what `save_checkpoint` wrote. Returns its metrics. Raises ConfigError, ModelError."""
        return await self.thread.submit(self._load, Path(path))

    def close(self) -> None:
        """Finish submitted work, then stop the thread."""
        self.thread.close()

    def _weight_of(self, tensors: Mapping[str, Any]) -> float:
        """What a batch's mean is over: its trained tokens, or its rows with a trained token."""
        mask = tensors.get("loss_mask")
        if not isinstance(mask, Tensor):
            return float(len(tensors["input_ids"]))
        return float(mask[:, 1:].sum() if self._over_tokens else (mask[:, 1:] > 0).any(1).sum())

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters() if parameter.grad is not None]

    def _parameters(self) -> list[Any]:
        return [*self.model.parameters(), *other_parameters(self.model, self.optimizer)]

    def _forget_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._denominator = 0.0

    def _save(self, step: int, metrics: dict[str, float]) -> Path:
        path = self._folder / f"step_{step:06d}"
        state = {"step": step, "weight_version": self.weight_version, "metrics": metrics}
        save_objects(
            path, self.model, self.optimizer, scheduler=self.scheduler, version=self.weight_version, state=state
        )
        return path

    def _load(self, path: Path) -> dict[str, float]:
        run = load_objects(path, self.model, self.optimizer, scheduler=self.scheduler, expects="metrics")
        self._forget_gradients()
        self.weight_version = int(run["weight_version"])
        metrics: dict[str, float] = run["metrics"]
        return metrics


def _tensors_of(rows: Sequence[Row]) -> dict[str, Tensor]:
    """The rows as padded tensors. `old_log_probs` are NaN where they are unknown. Raises TrainingError."""
    if not any(row.tokens for row in rows):
        raise TrainingError("no sample of the batch has tokens; give each its `tokens` and `loss_mask`")
    tensors = prepare_sft_batch([Sample(tokens=row.tokens, loss_mask=row.loss_mask) for row in rows])
    old = torch.full(tensors["loss_mask"].shape, math.nan)
    advantages = torch.zeros(len(rows))
    for place, row in enumerate(rows):
        known = row.old_logprobs or row.rollout_logprobs
        if known is not None:
            old[place, : len(known)] = torch.tensor(known)
        live = [each for each, weight in zip(row.advantages, row.loss_mask, strict=True) if weight > 0]
        advantages[place] = sum(live) / max(len(live), 1)
    return {**tensors, "advantages": advantages, _OLD: old}


def _sum_and_denominator(returned: Any, weight: float) -> tuple[Tensor, float]:
    """A loss as a sum and its part of D. A mean is multiplied by its weight. Raises TrainingError."""
    pair = returned if isinstance(returned, tuple) and len(returned) == 2 else None
    total = returned if pair is None else pair[0]
    if not isinstance(total, Tensor) or total.numel() != 1:
        shown = f"shape {list(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        raise TrainingError(f"the loss function returned {shown}; expected a mean, or (sum, denominator)")
    if pair is not None:
        denominator = float(pair[1])
        if not 0 <= denominator < math.inf:
            raise TrainingError(f"the loss function returned the denominator {denominator}; expected 0 or more")
        return total, denominator
    return total * weight, weight
