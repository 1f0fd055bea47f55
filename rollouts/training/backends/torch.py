"""The single-process training backend: one model, one AdamW, one thread that does all torch work in order.

`forward_backward` accumulates the gradients of sum(u * loss) and the batch's share of D; `optim_step` divides once,
clips by the global norm, and steps. The model runs in evaluation mode also while training: dropout would make the
ratio of a policy to itself differ from 1. The models beside it (reference, teacher, critic) have rooms of their own.
Left out: several ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from rollouts.errors import ConfigError, TrainingError
from rollouts.training.algorithms.algorithm import Algorithm, active_terms, function_label, setting_of
from rollouts.training.algorithms.evaluate import evaluate, importance_weights
from rollouts.training.algorithms.logprobs import logprobs_and_entropy, logprobs_with_alternatives, token_logprobs
from rollouts.training.algorithms.needs import available_names, check_needs, needs, requests
from rollouts.training.backends import checkpoint, lora
from rollouts.training.backends.companions import Critic, Teacher, load_critic, load_teacher
from rollouts.training.backends.float32_head import use_float32_head
from rollouts.training.backends.futures import TorchThread, TrainFuture
from rollouts.training.backends.optimizer import (
    TorchSettings,
    check_settings,
    check_trained_weights,
    make_adamw,
)
from rollouts.training.backends.reference import ReferencePolicy
from rollouts.training.backends.streams import make_streams, targets_of, temperatures_of, unit_weights
from rollouts.training.backends.sums import Microbatch, Sums
from rollouts.training.backends.transformer import (
    ModelPaths,
    Selection,
    inspect_model,
    prefers_packing,
    run_packed,
    run_rows,
)
from rollouts.training.batching import BUCKET_SAVING_MIN, MICROBATCH_SAVING_MIN, Keep, plan_layout, split_microbatches
from rollouts.training.models import load_hf_model, prepare_gradient_checkpointing, resolve_model_name
from rollouts.training.types import Companions, ForwardOutput, Row, StepResult, TrainBatch

__all__ = ["TorchBackend", "TorchSettings", "create_torch_backend"]

# On a GPU a pass through a small model is mostly launches, as long as those of some thousand tokens.
_GPU_BUCKET_SAVING_MIN = 4096
# One step that is not finite may be a batch's bad luck and is skipped; so many in a row are weights that diverged.
_NOT_FINITE_MAX = 3


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
        betas: of AdamW
        eps: of AdamW
        weight_decay: of AdamW
        max_grad_norm: gradients are clipped to this global norm, the critic's by themselves
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
    beside = companions or Companions()
    for algorithm in algorithms.values():
        check_needs(algorithm, available_names(critic=bool(beside.critic), teacher=bool(beside.teacher), pairs=True))
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
        layout=layout,
    )
    check_settings(settings)  # before any weights are read
    check_trained_weights(lora_rank, lora_alpha, dtype, beside.critic)
    causal = load_hf_model(model, dtype=dtype, device=device, attention=attention)
    if fp32_head:
        use_float32_head(causal)
    adapter = None
    if lora_rank:
        adapter = lora.add_lora(causal, rank=lora_rank, alpha=lora_alpha, targets=lora_targets, seed=seed)
    return TorchBackend(
        causal,
        algorithms,
        settings,
        adapter=adapter,
        source=resolve_model_name(model),
        companions=beside,
        dtype=dtype,
        device=device,
    )


class _Scored(NamedTuple):
    """What one run of rows gives for T selected tokens. `tokens` is (run, run with padding)."""

    logprobs: Tensor
    entropy: Tensor
    features: Tensor
    selection: Selection
    tokens: tuple[int, int]
    extra: dict[str, Tensor]


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
        companions: Companions | None = None,
        dtype: str = "float32",
        device: str = "auto",
    ) -> None:
        check_settings(settings)
        self.model = causal.eval()
        self.version = 0
        self.thread = TorchThread("rollouts-torch")
        self._adapter = adapter
        self._algorithms = dict(algorithms)
        self._settings = settings
        self._source = source
        self._denominator = 0.0
        self._skipped = 0
        self._not_finite = 0  # steps in a row that were skipped for it
        on_cpu = next(causal.parameters()).device.type == "cpu"
        self._bucket_saving_min = BUCKET_SAVING_MIN if on_cpu else _GPU_BUCKET_SAVING_MIN
        self._microbatch_saving_min = MICROBATCH_SAVING_MIN if on_cpu else _GPU_BUCKET_SAVING_MIN
        share = settings.share_prefix and not settings.gradient_checkpointing and settings.layout != "packed"
        self._paths: ModelPaths = inspect_model(causal, share_prefix=share)
        self._packed = _decide_packing(causal, self._paths, settings)
        # Where rows are not packed, nobody asked for it, or `_decide_packing` has refused.
        self.notes = tuple(note for note in self._paths.notes if "pack" not in note)
        self._parameters = [parameter for parameter in causal.parameters() if parameter.requires_grad]
        self._reference: ReferencePolicy | None = None
        self._critic: Critic | None = None
        self._teacher: Teacher | None = None
        self._add_companions(companions or Companions(), dtype, device)
        self._optimizer = make_adamw(self._parameter_sets(), settings)
        if settings.gradient_checkpointing:
            prepare_gradient_checkpointing(causal)

    def _add_companions(self, wanted: Companions, dtype: str, device: str) -> None:
        paths, saving = self._paths, self._bucket_saving_min
        if wanted.reference is not None:
            adapters = self._adapter is not None
            self._reference = ReferencePolicy(self._parameters, wanted.reference, adapters=adapters)
        if wanted.critic:
            self._critic = load_critic(wanted.critic, paths, dtype=dtype, device=device, saving=saving)
        if wanted.teacher:
            top_k = wanted.teacher_top_k
            self._teacher = load_teacher(wanted.teacher, paths, dtype=dtype, device=device, top_k=top_k, saving=saving)
        self._critic_lr = wanted.critic_lr

    def _parameter_sets(self) -> list[tuple[list[nn.Parameter], float]]:
        """What is clipped together, and its learning rate: the policy, and the critic if there is one."""
        sets = [(self._parameters, self._settings.lr)]
        if self._critic is not None:
            sets.append(([p for p in self._critic.parameters() if p.requires_grad], self._critic_lr))
        return sets

    @property
    def shares_prefix(self) -> bool:
        """Whether prompts that rows share are run once."""
        return self._paths.share_prefix and not self._packed

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

    def _forward(self, batch: TrainBatch, needs: tuple[str, ...], only_live: bool) -> ForwardOutput:
        self._check_forward(needs)
        number_of = {id(row): number for number, row in enumerate(batch.rows)}
        found = {name: [[0.0] * len(row.tokens) for row in batch.rows] for name in needs}
        own = tuple(name for name in needs if name != "ref_logprobs")
        for rows in self._split(batch, "", only_live):
            wanted = [[t for t in range(1, len(row.tokens)) if row.loss_mask[t] > 0 or not only_live] for row in rows]
            if not any(wanted):
                continue
            results = []
            if own:
                with torch.inference_mode():
                    results.append(self._ask(rows, wanted, batch.temperature, own))
            if "ref_logprobs" in needs:
                assert self._reference is not None, "it was checked above"
                with self._reference.in_place(), torch.inference_mode():
                    tensors, selection = self._ask(rows, wanted, batch.temperature, ("logprobs",))
                    results.append(({"ref_logprobs": tensors["logprobs"]}, selection))
            for tensors, selection in results:
                values = {name: iter(tensor.tolist()) for name, tensor in tensors.items()}
                for place, positions in zip(selection.rows, selection.positions, strict=True):
                    number = number_of[id(rows[place])]
                    for name, stream in values.items():
                        for position in positions:
                            found[name][number][position] = next(stream)
        return ForwardOutput(**found)

    def _check_forward(self, needs: tuple[str, ...]) -> None:
        have = {"logprobs": True, "entropy": True}
        have |= {"ref_logprobs": self._reference is not None, "teacher_logprobs": self._teacher is not None}
        have["values"] = self._critic is not None
        missing = sorted(name for name in needs if not have.get(name, False))
        if missing:
            able = ", ".join(name for name, is_there in have.items() if is_there)
            raise TrainingError(f"this backend was asked for {', '.join(missing)}; it can give {able}")

    def _ask(
        self, rows: list[Row], wanted: Sequence[Sequence[int]], temperature: float, needs: tuple[str, ...]
    ) -> tuple[dict[str, Tensor], Selection]:
        """Each of `needs` [T] by the policy, the critic or the teacher."""
        features, selection, _ = self._run(rows, wanted)
        targets = targets_of(rows, selection, features.device)
        divisor = temperatures_of(rows, selection, temperature, features.device)
        tensors: dict[str, Tensor] = {}
        if {"logprobs", "entropy"} & set(needs):
            head, size = self._paths.head, self._paths.vocabulary_size
            both = logprobs_and_entropy(head, features, targets, vocabulary_size=size, temperature=divisor)
            tensors = {"logprobs": both[0], "entropy": both[1]}
        if self._critic is not None and "values" in needs:
            tensors["values"] = self._critic.values(rows, wanted, selection, features)
        if self._teacher is not None and "teacher_logprobs" in needs:
            tensors["teacher_logprobs"] = self._teacher.logprobs(rows, wanted, selection, targets, divisor)
        return {name: tensors[name] for name in needs}, selection

    def _split(self, batch: TrainBatch, keep: Keep, only_live: bool) -> list[list[Row]]:
        return split_microbatches(
            batch,
            self._settings.tokens_per_microbatch,
            share_prefix=self.shares_prefix,
            keep=keep,
            only_live=only_live,
            packed=self._packed,
            saving_min=self._microbatch_saving_min,
        )

    def _run(self, rows: list[Row], wanted: Sequence[Sequence[int]]) -> tuple[Tensor, Selection, tuple[int, int]]:
        """Features [T, F], which tokens they predict, and (tokens, tokens with padding) that were run."""
        if self._packed:
            features, selection = run_packed(self._paths, rows, [list(range(len(rows)))], wanted)
            real = sum(len(row.tokens) for row in rows)
            return features, selection, (real, real)
        layout = plan_layout(rows, share_prefix=self.shares_prefix, bucket_saving_min=self._bucket_saving_min)
        features, selection = run_rows(self._paths, rows, layout, wanted)
        lengths = [len(row.tokens) for row in rows]
        real = sum(map(len, layout.prefixes)) + sum(lengths) - sum(layout.starts)
        return features, selection, (real, layout.padded_tokens(lengths))

    def _score(
        self,
        rows: list[Row],
        wanted: Sequence[Sequence[int]],
        temperature: float,
        requested: frozenset[str] = frozenset(),
    ) -> _Scored:
        """Run the rows; `extra` holds what `requested` names beyond logprobs and entropy: logits, or the teacher's
        likeliest tokens.
        """
        features, selection, tokens = self._run(rows, wanted)
        device = features.device
        targets = targets_of(rows, selection, device)
        divisor = temperatures_of(rows, selection, temperature, device)
        extra: dict[str, Tensor] = {}
        if requested & {"topk_logprobs", "teacher_topk_ids", "teacher_topk_logprobs"}:
            assert self._teacher is not None, "check_needs saw to it"
            ids, theirs = self._teacher.top(rows, wanted, selection, divisor)
            extra = {"teacher_topk_ids": ids, "teacher_topk_logprobs": theirs}
        if "logits" in requested:
            logits = self._paths.head(features)
            logits = logits if logits.dtype == torch.float64 else logits.float()
            logits = logits / (divisor[:, None] if isinstance(divisor, Tensor) else divisor)
            extra["logits"] = logits
            logprobs, entropy = token_logprobs(logits, targets)
            if "topk_logprobs" in requested:
                extra["topk_logprobs"] = torch.log_softmax(logits, -1).gather(-1, extra["teacher_topk_ids"])
        else:
            head, size = self._paths.head, self._paths.vocabulary_size
            if "topk_logprobs" in requested:
                logprobs, entropy, extra["topk_logprobs"] = logprobs_with_alternatives(
                    head, features, targets, extra["teacher_topk_ids"], vocabulary_size=size, temperature=divisor
                )
            else:
                logprobs, entropy = logprobs_and_entropy(
                    head, features, targets, vocabulary_size=size, temperature=divisor
                )
        return _Scored(logprobs, entropy, features, selection, tokens, extra)

    def _forward_backward(self, batch: TrainBatch) -> dict[str, float]:
        if batch.algorithm not in self._algorithms:
            raise TrainingError(
                f"the batch names the algorithm {batch.algorithm!r}; this backend was given: "
                f"{', '.join(sorted(self._algorithms))}"
            )
        algorithm = self._algorithms[batch.algorithm]
        requested = needs(algorithm)
        sums = Sums()
        try:
            with self._training_mode():
                parts = self._split(batch, _keep(requested), True)
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
        scored = self._score(rows, wanted, batch.temperature, requested)
        device = scored.logprobs.device
        tensors = make_streams(rows, scored.selection, batch.rewards, device) | scored.extra
        if "old_logprobs" not in tensors:
            is_sampler = batch.anchor == "sampler"
            tensors["old_logprobs"] = tensors["rollout_logprobs"] if is_sampler else scored.logprobs.detach()
        tensors["logprobs"] = scored.logprobs
        tensors["entropy"] = scored.entropy if "entropy" in requested else scored.entropy.detach()
        if "values" in requested and self._critic is not None:
            tensors["values"] = self._critic.values(rows, wanted, scored.selection, scored.features)
        available: dict[str, Any] = {**tensors, "step": batch.step}
        if "rewards" in requested:
            available["rewards"] = torch.tensor(batch.rewards, device=device)
        mask = tensors["mask"]
        # The importance weight is counted once: in the ratio against the sampler, or here.
        weights = importance_weights(algorithm, available, mask) if batch.anchor == "current" else None
        evaluation = evaluate(
            algorithm, available, mask, unit=batch.unit, kl_coefficient=batch.kl_coefficient, weights=weights
        )
        objective = (evaluation.values * unit_weights(tensors, batch.unit)).sum()
        learning = bool(objective.requires_grad)  # a loss may be constant in some microbatches
        if learning:
            objective.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            seen = {name: tensor.detach() for name, tensor in tensors.items()}
            if weights is not None:
                seen["importance"] = weights
            sums.add(Microbatch(seen, objective, evaluation, _clip_bounds(algorithm), scored.tokens))
        return learning

    def _optim_step(self) -> StepResult:
        denominator, self._denominator = self._denominator, 0.0
        settings = self._settings
        warm = min(1.0, (self.version + 1) / max(1, settings.warmup_steps))
        gradients = [[p.grad for p in chosen if p.grad is not None] for chosen, _ in self._parameter_sets()]
        able = denominator > 0
        norms = [float(nn.utils.get_total_norm(each)) / denominator if each and able else 0.0 for each in gradients]
        metrics = {"optim/lr": settings.lr * warm, "optim/grad_norm": norms[0]}
        if len(norms) > 1:
            metrics["optim/critic_grad_norm"] = norms[1]
        finite = all(map(math.isfinite, norms))
        if not any(gradients) or not able or not finite:
            self._skipped += 1
            self._forget_gradients()
            self._not_finite += not finite  # with D = 0 the norms are 0.0
            if self._not_finite >= _NOT_FINITE_MAX:
                raise TrainingError(
                    f"the weights or gradients were not finite in {self._not_finite} steps in a row, so training has "
                    f"diverged; try a smaller --lr than {settings.lr:g}"
                )
            return StepResult(metrics | {"optim/skipped": 1.0}, self.version)
        with torch.no_grad():
            for norm, each in zip(norms, gradients, strict=True):
                scale = min(1.0, settings.max_grad_norm / (norm + 1e-6)) / denominator
                for gradient in each:
                    gradient.mul_(scale)
        for group, (_, lr) in zip(self._optimizer.param_groups, self._parameter_sets(), strict=True):
            group["lr"] = lr * warm
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.version += 1
        self._not_finite = 0
        if self._reference is not None:
            self._reference.follow(self.version)
        return StepResult(metrics | {"optim/skipped": 0.0}, self.version)

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
        if self._critic is not None:
            state["critic"] = {name: value.cpu() for name, value in self._critic.state_dict().items()}
        if self._reference is not None:
            state["reference"] = self._reference.state_dict()
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
        self._load_companions(path, state)
        self._optimizer.load_state_dict(state["optimizer"])
        self._forget_gradients()
        self.version = int(state["version"])
        self._skipped = int(state["skipped"])
        self._not_finite = 0

    def _load_companions(self, path: str, state: dict[str, Any]) -> None:
        if (self._critic is not None) != ("critic" in state):
            has = "has no critic" if self._critic is not None else "has a critic"
            raise ConfigError(f"the checkpoint {path} {has}; give the --critic of the run that wrote it")
        if self._critic is not None:
            try:
                self._critic.load_state_dict(state["critic"])
            except RuntimeError as error:  # torch has no error of its own for names and shapes that differ
                raise ConfigError(
                    f"the critic of the checkpoint {path} is another one; give the --critic of the run that wrote it"
                ) from error
        if self._reference is not None and "reference" in state:
            self._reference.load_state_dict(state["reference"])

    @property
    def _kind(self) -> str:
        return "full" if self._adapter is None else "adapter"

    def _fingerprint(self) -> str:
        return checkpoint.model_fingerprint(self.model.state_dict())


def _decide_packing(causal: Any, paths: ModelPaths, settings: TorchSettings) -> bool:
    """Whether rows run packed. Raises ConfigError where that was asked for and this model cannot."""
    if settings.layout == "packed" and not paths.packs:
        reasons = "; ".join(note for note in paths.notes if "pack" in note)
        raise ConfigError(f"--training.layout packed: {reasons or 'this model cannot'}; type --training.layout buckets")
    return settings.layout == "packed" or (settings.layout == "auto" and paths.packs and prefers_packing(causal))


def _keep(requested: frozenset[str]) -> Keep:
    """What a loss must see whole: the largest of what it names."""
    names: tuple[Keep, ...] = ("group", "pair", "rollout")
    return next((name for name in names if f"{name}_index" in requested), "")


def _clip_bounds(algorithm: Algorithm) -> tuple[float, float] | None:
    """How far the ratio of one token may go, where a term clips it by itself."""
    for term in active_terms(algorithm):
        names = requests(term.function)
        if "old_logprobs" in names and "rollout_index" not in names:
            low, high = setting_of(algorithm, "clip_low"), setting_of(algorithm, "clip_high")
            return None if low is None or high is None else (float(low), float(high))
    return None


def _without_gradient(algorithm: Algorithm) -> str:
    labels = " + ".join(function_label(term.function) for term in active_terms(algorithm))
    return (
        f"the loss {labels} returned values that carry no gradient, so nothing can be learned; compute them from "
        "`logprobs` or `entropy`, without .detach(), torch.no_grad() or a conversion to whole numbers"
    )
