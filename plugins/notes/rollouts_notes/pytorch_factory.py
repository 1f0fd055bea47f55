"""A backend for your own torch objects, functions to make them, and losses over logits. For a loop that you write by
hand.

    model = load_hf_model("tiny", device="cpu")
    optimizer = create_adamw_optimizer(model, lr=1e-3)
    backend = PyTorchTrainingBackend(model, optimizer, create_cross_entropy_loss(), "checkpoints")
    metrics = await backend.forward_backward(collate_batch(samples, 4, step)).result()

`create_pytorch_backend` and `create_fsdp_backend` make the backends of `rollouts run` in one line, for
`run_sft_training` and `run_rl_training`. `PyTorchTrainingBackend` is simpler: it has no microbatches, shared prompts,
losses by name, LoRA or several ranks.

Losses take logits [B, L, V] and labels [B, L]. Labels are the token ids. These functions shift them: the logits at t
score the label at t + 1. `rollouts run` has its own losses, over the logprobs of trained tokens
(`rollouts.training.algorithms.losses`).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from rollouts.errors import ConfigError, TrainingError
from rollouts.models.futures import TorchThread, TrainFuture
from rollouts.models.loading import no_progress_bars
from rollouts.plugins.signature import call_with, keywords_of
from rollouts.training.algorithms.algorithm import Algorithm, as_algorithm
from rollouts.training.algorithms.logprobs import token_logprobs
from rollouts.training.algorithms.losses import ppo_clip
from rollouts.training.algorithms.recipes import built_in
from rollouts.training.backends import optimizer as optimizers
from rollouts.training.batches import AuxiliaryModels, ForwardOutput, RankServer, Row, TrainBatch, live_count
from rollouts.training.weights import checkpoint, store
from rollouts.training.weights.files import ModelFiles
from rollouts.types import Sample
from rollouts_notes.supervised import compute_advantages, prepare_sft_batch

if TYPE_CHECKING:
    from rollouts_fsdp.backend import FSDPTrainingBackend

    from rollouts.training.backends.torch import TorchBackend

LossFn = str | Algorithm | Callable[..., Any]
_OLD = "old_log_probs"
_STATE, _WEIGHTS = "trainer.pt", "model.pt"


def create_adamw_optimizer(
    model: nn.Module, lr: float, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.0
) -> torch.optim.AdamW:
    """AdamW over the model's trainable parameters, as the backends make it. Raises ConfigError."""
    settings = optimizers.TrainerSettings(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    optimizers.check_settings(settings)
    made = optimizers.make_optimizer([([p for p in model.parameters() if p.requires_grad], lr)], settings)
    assert isinstance(made, torch.optim.AdamW), type(made)
    return made


def create_warmup_cosine_scheduler(
    optimizer: torch.optim.Optimizer, warmup_steps: int, num_steps: int, min_ratio: float = 0.0
) -> LambdaLR:
    """A torch scheduler with `lr_factor`: warm-up for `warmup_steps`, then half a cosine down to `min_ratio` of the
    learning rate at step `num_steps`. Call its `step()` after each optimizer step. Raises ConfigError.
    """
    settings = optimizers.TrainerSettings(
        lr=1.0, warmup_steps=warmup_steps, lr_schedule="cosine", lr_final=min_ratio, steps=num_steps
    )
    optimizers.check_settings(settings)
    return LambdaLR(optimizer, lambda done: optimizers.lr_factor(settings, done))


def create_pytorch_backend(
    model: str,
    lr: float,
    num_steps: int,
    algorithm: LossFn = "sft",
    *,
    seed: int = 0,
    lora_rank: int = 0,
    tokens_per_microbatch: int = 16384,
    auxiliary_models: AuxiliaryModels | None = None,
    make_optimizer: optimizers.MakeOptimizer | None = None,
    **settings: Any,
) -> TorchBackend:
    """Make the backend of `rollouts run` in one line. `create_torch_backend` takes the other `settings`.
    `make_optimizer` is a function of parameter groups and a learning rate that returns a torch optimizer.

    `algorithm` is the name of a built-in one (`sft`, `grpo`, ...), an Algorithm, or a loss function. Its name in
    batches is "main". Raises ModelError, ConfigError, SignatureError.
    """
    from rollouts.training.backends.torch import create_torch_backend

    chosen = built_in(algorithm) if isinstance(algorithm, str) else as_algorithm(algorithm)
    given = (model, seed, num_steps, lr, lora_rank, tokens_per_microbatch, {"main": chosen}, auxiliary_models)
    return create_torch_backend(*given, make_optimizer, **keywords_of(create_torch_backend, settings))


def create_fsdp_backend(
    model: str,
    lr: float,
    num_steps: int,
    algorithm: LossFn = "sft",
    *,
    seed: int = 0,
    lora_rank: int = 0,
    tokens_per_microbatch: int = 16384,
    processes: int = 0,
    **settings: Any,
) -> FSDPTrainingBackend:
    """Make the sharded backend of `rollouts run --training fsdp`, with the arguments of `create_pytorch_backend`. (The
    engine's function of this name is the component `fsdp`, with the parameters that a run gives to it.)

    Without a launcher, it starts `processes` ranks on this machine; 0: one per GPU. Under torchrun, every rank calls
    this function; on ranks above 0 the call serves rank 0, and then ends the process with SystemExit.

    Raises ConfigError, ModelError, RankError.

    Args:
        algorithm: the name of a loss or an algorithm, as `--loss` takes it; an Algorithm; or a loss function.
            Ranks that rank 0 starts import a function by its name; only torchrun's ranks can have an Algorithm
        settings: the settings of `--training fsdp`, such as `dtype` or `gradient_checkpointing`
    """
    from rollouts.config.files import NOWHERE
    from rollouts.config.objects import take_objects
    from rollouts.config.resolving import resolve
    from rollouts.runs.jobs.train import make_training
    from rollouts.runs.plan import make_plan

    given = {"model": model, "loss": algorithm, "lr": lr, "steps": num_steps, "seed": seed, "lora_rank": lora_rank}
    training = {"name": "fsdp", "processes": processes, **settings}
    given |= {"mode": "sft" if algorithm == "sft" else "rl", "tokens_per_microbatch": tokens_per_microbatch}
    tree, objects = take_objects({**given, "training": training})
    plan = make_plan(resolve(tree, NOWHERE.with_objects(objects)), needs_environment=False)
    backend = make_training(plan)
    if isinstance(backend, RankServer):
        backend.serve()
        raise SystemExit(0)
    return cast("FSDPTrainingBackend", backend)


def is_sharded(model: nn.Module) -> bool:
    """Whether a part of the model is sharded: by `fully_shard` (FSDP2), or wrapped in FullyShardedDataParallel."""
    classes = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    return not classes.isdisjoint({"FSDPModule", "FullyShardedDataParallel"})


# --- losses -----------------------------------------------------------------------------------------------------------


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


def grpo_loss(logits: Tensor, labels: Tensor, loss_mask: Tensor, advantages: Tensor) -> Tensor:
    """The simplified policy gradient: the mean of -A * (the mean logprob of the row's trained tokens).

    Rows without a trained token do not count. `logits` [B, L, V], `labels` [B, L], `loss_mask` [B, L], `advantages`
    [B]. Returns a scalar.

    >>> logits, ids = torch.zeros(1, 3, 8), torch.tensor([[1, 2, 3]])
    >>> round(grpo_loss(logits, ids, torch.tensor([[0, 1, 1]]), torch.tensor([2.0])).item() / 2, 4)  # log(8)
    2.0794
    """
    return -_mean_by_row(label_logprobs(logits, labels)[0] * advantages[:, None], loss_mask)


def ppo_loss(
    logits: Tensor,
    labels: Tensor,
    loss_mask: Tensor,
    advantages: Tensor,
    old_log_probs: Tensor,
    clip_range: float = 0.2,
) -> Tensor:
    """PPO's clipped objective. `old_log_probs` [B, L] belong to the labels; other arguments are those of `grpo_loss`.

    Where the ratio is 1, the gradient is that of `grpo_loss`.
    """
    logprobs, _ = label_logprobs(logits, labels)
    values = ppo_clip(logprobs, old_log_probs, advantages[:, None], clip_low=clip_range, clip_high=clip_range)
    return _mean_by_row(values, loss_mask)


def compute_grpo_loss(samples: Sequence[Sample], config: Any = None) -> Tensor:
    """The value of `grpo_loss` for samples with `rollout_log_probs`; it needs no model. (The first notes have two
    functions of this name. That of `rollouts.primitives` takes a batch with a model's logprobs.)

    The advantage of a sample is its `advantages`, or its reward minus `config.baseline`. The gradient reaches
    `rollout_log_probs` that are a tensor with a gradient. Raises TrainingError if a sample has no logprobs or no
    reward.
    """
    if not samples:
        raise TrainingError("there are no samples; give one or more")
    terms = []
    for number, sample in enumerate(samples):
        if sample.rollout_log_probs is None or sample.reward is None:
            raise TrainingError(f"sample {number} needs rollout_log_probs [L] and a reward")
        given = getattr(sample, "advantages", None)
        if given is None:
            (given,) = compute_advantages([sample.reward], getattr(config, "baseline", None) or 0.0)
        values = torch.as_tensor(sample.rollout_log_probs) * torch.as_tensor(given)
        terms.append(-_mean_by_row(values[None], torch.as_tensor(sample.loss_mask)[None]))
    trained = sum(any(weight > 0 for weight in sample.loss_mask[1:]) for sample in samples)
    return torch.stack(terms).sum() / max(trained, 1)


def label_logprobs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logprobs [B, L] of `labels` [B, L], which are not shifted, and the entropy [B, L] of their predictions, from
    `logits` [B, L, V]. Both are 0.0 at position 0.
    """
    rows, length = labels.shape
    found = token_logprobs(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
    logprobs, entropy = (nn.functional.pad(each.view(rows, length - 1), (1, 0)) for each in found)
    return logprobs, entropy


def _mean_by_row(values: Tensor, loss_mask: Tensor) -> Tensor:
    """The mean over the rows with a trained token of each row's mean over these, from position 1 on; 0 without one."""
    weights = loss_mask.to(values.dtype).clone()
    weights[:, 0] = 0.0
    totals = weights.sum(1)
    return ((values * weights).sum(1) / totals.clamp(min=1e-9)).sum() / (totals > 0).sum().clamp(min=1)


# --- checkpoints ------------------------------------------------------------------------------------------------------


class TorchObjects(NamedTuple):
    """A model and its optimizer, and what else a checkpoint has: `modules` are other modules by name.

    The folder is complete or not there (`rollouts.training.weights.store`). A model of transformers is written in its
    own format, so that the folder can be loaded as a model.
    """

    model: Any
    optimizer: Any
    scheduler: Any = None
    tokenizer: Any = None
    modules: Mapping[str, Any] = {}

    def save(self, path: Path, version: int, state: dict[str, Any]) -> None:
        """Write a checkpoint folder, also with the optimizer's parameters outside of the model. `state` is plain data.
        Raises CheckpointError.
        """
        with store.new_checkpoint(path) as folder, no_progress_bars():
            if hasattr(self.model, "save_pretrained"):
                self.model.save_pretrained(str(folder))
            else:
                torch.save(self.model.state_dict(), folder / _WEIGHTS)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(str(folder))
            states = {"optimizer": self.optimizer.state_dict(), "scheduler": None}
            if self.scheduler is not None:
                states["scheduler"] = self.scheduler.state_dict()
            torch.save(states, folder / _STATE)
            for name, module in self._all_modules().items():
                torch.save(module.state_dict(), folder / f"{name}.pt")
            fingerprint = checkpoint.model_fingerprint(self.model.state_dict())
            store.finish_checkpoint(
                folder, kind="full", fingerprint=fingerprint, version=version, world_size=1, state=state
            )

    def load(self, path: Path, expects: str) -> dict[str, Any]:
        """Read what `save` wrote into these objects, and return its `state`, which must have the key `expects`.

        Everything is read and checked before anything changes. Raises ConfigError, ModelError, TrainingError.
        """
        store.check_folder(path, kind="full", fingerprint=checkpoint.model_fingerprint(self.model.state_dict()))
        run = store.read_state(path)
        if not (path / _STATE).is_file() or expects not in run:
            raise ConfigError(f"the checkpoint {path} was written by another backend; load it with that backend")
        if hasattr(self.model, "from_pretrained"):
            with no_progress_bars():
                weights = type(self.model).from_pretrained(str(path)).state_dict()
        else:
            weights = _read(path / _WEIGHTS)
        states, loaded = _read(path / _STATE), [(self.model, weights)]
        for name, module in self._all_modules().items():
            if not (path / f"{name}.pt").is_file():
                raise ConfigError(f"the checkpoint {path} has no {name}; load it without one")
            loaded.append((module, _read(path / f"{name}.pt")))
        for module, weights in loaded:
            _replace_weights(module, weights)
        self.optimizer.load_state_dict(states["optimizer"])
        self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None and states["scheduler"] is not None:
            self.scheduler.load_state_dict(states["scheduler"])
        return run

    def other_parameters(self) -> list[Any]:
        """The optimizer's parameters outside of the model, such as those of a loss or a value function."""
        of_model = {id(parameter) for parameter in self.model.parameters()}
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return [parameter for parameter in trained if id(parameter) not in of_model]

    def _all_modules(self) -> dict[str, Any]:
        others = self.other_parameters()
        return {**self.modules, **({"other_parameters": nn.ParameterList(others)} if others else {})}


def _read(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _replace_weights(module: Any, weights: Mapping[str, Any]) -> None:
    """Replace all weights of a module by name. Raises TrainingError if names or shapes differ."""
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:  # torch's error for other names or shapes
        raise TrainingError(f"these are not this model's weights: {error}") from error


# --- the backend ------------------------------------------------------------------------------------------------------


P = ParamSpec("P")
T = TypeVar("T")


def _on_thread(
    method: Callable[Concatenate[PyTorchTrainingBackend, P], T],
) -> Callable[Concatenate[PyTorchTrainingBackend, P], TrainFuture[T]]:
    """Decorator: the method runs on the backend's thread, and a call returns a future at once."""

    @functools.wraps(method)
    def submit(self: PyTorchTrainingBackend, /, *args: P.args, **settings: P.kwargs) -> TrainFuture[T]:
        return self.thread.submit(method, self, *args, **settings)

    return submit


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
            what = "this model is sharded (FSDP), and a PyTorchTrainingBackend trains in one process"
            raise ConfigError(f"{what}; use rollouts.training.create_fsdp_backend")
        self.model: Any = model
        self.optimizer, self.scheduler = optimizer, scheduler
        self.weight_version = 0
        self.thread = TorchThread("rollouts-pytorch")
        # A module's __call__ takes anything, so use the parameters of its forward.
        self._loss_fn = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
        self._folder = Path(checkpoint_dir).absolute()
        self._max_grad_norm, self._denominator = max_grad_norm, 0.0
        named = inspect.signature(self._loss_fn).parameters
        usual = "tokens" if "loss_mask" in named and "advantages" not in named else "rows"
        self._over_tokens = (mean_over or usual) == "tokens"

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

    @_on_thread
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
            temperature, batch = batch.temperature, _tensors_of(rows)
        if "input_ids" not in batch:
            raise TrainingError(f"the batch has {', '.join(sorted(batch)) or 'nothing'}; it needs input_ids [B, L]")
        tensors = self._with_logits(batch, temperature)
        parameters = inspect.signature(self._loss_fn).parameters
        if _OLD in parameters and _OLD in tensors:
            own, _ = label_logprobs(tensors["logits"].detach(), tensors["labels"])
            tensors[_OLD] = torch.where(tensors[_OLD].isnan(), own, tensors[_OLD])
        optional = {name: each.default for name, each in parameters.items() if each.default is not each.empty}
        total, denominator = self._sum_and_denominator(call_with(self._loss_fn, optional | tensors), tensors)
        value = total.item() / (denominator or 1.0)
        if not math.isfinite(value):
            raise TrainingError(f"the loss of the batch is {value}; no gradient was added")
        torch.autograd.backward(total)
        self._denominator += denominator
        norm = float(nn.utils.get_total_norm(self._gradients()))
        return {"loss": value, "grad_norm": norm / self._denominator if self._denominator else 0.0}

    @_on_thread
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
        if self._max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters(), self._max_grad_norm)
        self.optimizer.step()
        self._forget_gradients()
        if self.scheduler is not None:
            self.scheduler.step()
        self.weight_version += 1
        return {"lr": lr}

    @_on_thread
    def forward(
        self, batch: TrainBatch, needs: tuple[str, ...] = ("logprobs",), *, only_live: bool = False
    ) -> ForwardOutput:
        """Compute `logprobs` and `entropy` of every row, without gradient. Raises TrainingError for other needs."""
        if other := sorted(set(needs) - {"logprobs", "entropy"}):
            raise TrainingError(f"a PyTorchTrainingBackend has no {', '.join(other)}; use create_pytorch_backend")
        with torch.no_grad():
            tensors = self._with_logits(_tensors_of(batch.rows), batch.temperature)
            found = label_logprobs(tensors["logits"], tensors["labels"])
        live = tensors["loss_mask"] > 0 if only_live else torch.ones_like(tensors["loss_mask"])
        logprobs, entropy = (
            [row[: len(of.tokens)].tolist() for row, of in zip(each * live, batch.rows, strict=True)] for each in found
        )
        return ForwardOutput(logprobs, entropy if "entropy" in needs else None)

    @_on_thread
    def get_weights(self, kind: str = "full") -> dict[str, Any]:
        """A CPU copy of the weights by name. Raises TrainingError for any kind but "full"."""
        if kind != "full":
            raise TrainingError(f"a PyTorchTrainingBackend has no {kind} weights; create_pytorch_backend knows LoRA")
        return {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}

    @_on_thread
    def load_weights(self, weights: dict[str, Any]) -> None:
        """Replace all weights by name. Raises TrainingError if names or shapes differ."""
        _replace_weights(self.model, weights)

    async def save_checkpoint(self, step: int, metrics: Mapping[str, float] | None = None) -> Path:
        """Write `checkpoint_dir`/step_000010, completely or not at all, and return its path. Contains the weights (in
        the format of transformers, if the model is one of theirs), optimizer, scheduler and `metrics`. Raises
        CheckpointError.
        """
        path = self._folder / f"step_{step:06d}"

        def save() -> None:
            version = self.weight_version
            state = {"step": step, "weight_version": version, "metrics": dict(metrics or {})}
            self._objects().save(path, version, state)

        await self.thread.submit(save)
        return path

    async def load_checkpoint(self, path: str | Path) -> dict[str, float]:
        """Read what `save_checkpoint` wrote. Returns its metrics. Raises ConfigError, ModelError."""
        run = await self.thread.submit(self._objects().load, Path(path), "metrics")
        self._denominator, self.weight_version = 0.0, int(run["weight_version"])
        metrics: dict[str, float] = run["metrics"]
        return metrics

    def close(self) -> None:
        """Finish submitted work, then stop the thread."""
        self.thread.close()

    def _with_logits(self, batch: Mapping[str, Any], temperature: float) -> dict[str, Any]:
        """The batch on the model's device, and its `logits` at this temperature."""
        device = next(self.model.parameters()).device
        tensors = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        beside = {name: tensors[name] for name in ("attention_mask", "position_ids") if name in tensors}
        output = self.model(tensors["input_ids"], **beside)
        logits = getattr(output, "logits", output)
        tensors["logits"] = logits if temperature == 1.0 else logits / temperature
        return tensors

    def _sum_and_denominator(self, returned: Any, tensors: Mapping[str, Any]) -> tuple[Tensor, float]:
        """A loss as a sum and its part of D. A mean is multiplied by what it is over: the batch's trained tokens, or
        its rows with a trained token. Raises TrainingError.
        """
        is_pair = isinstance(returned, tuple) and len(returned) == 2
        total = returned[0] if is_pair else returned
        if not isinstance(total, Tensor) or total.numel() != 1:
            shown = f"shape {list(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
            raise TrainingError(f"the loss function returned {shown}; expected a mean, or (sum, denominator)")
        if is_pair:
            denominator = float(returned[1])
            if not 0 <= denominator < math.inf:
                raise TrainingError(f"the loss function returned the denominator {denominator}; expected 0 or more")
            return total, denominator
        mask = tensors.get("loss_mask")
        weight = float(len(tensors["input_ids"]))
        if isinstance(mask, Tensor):
            weight = float(mask[:, 1:].sum() if self._over_tokens else (mask[:, 1:] > 0).any(1).sum())
        return total * weight, weight

    def _objects(self) -> TorchObjects:
        return TorchObjects(self.model, self.optimizer, self.scheduler)

    def _parameters(self) -> list[Any]:
        return [*self.model.parameters(), *self._objects().other_parameters()]

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters() if parameter.grad is not None]

    def _forget_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._denominator = 0.0


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
