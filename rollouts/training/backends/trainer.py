"""One rank's model, optimizer and all torch work on them, synchronous; a single process is the only rank.

`forward_backward` accumulates the gradients of sum(u * loss), and D, which is the whole batch's on every rank;
`optim_step` divides once, clips by the global norm, and steps. The model runs in evaluation mode also while training:
dropout would make the ratio of a policy to itself differ from 1. The models beside it (reference, teacher, critic) have
rooms of their own. Rows without an advantage are run forward only, where that changes nothing (`flat`). Every rank
calls the same methods in the same order, with its own shard of a batch. Left out: futures and ranks (`torch`, `ranks`).
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from rollouts.errors import ConfigError, TrainingError
from rollouts.training.algorithms.algorithm import Algorithm, active_terms, needs, requests, setting_of
from rollouts.training.algorithms.evaluate import evaluate, importance_weights
from rollouts.training.backends import forward, lora, optimizer, sharding
from rollouts.training.backends.auxiliary import Critic, Networks, ReferencePolicy, Teacher
from rollouts.training.backends.batch_shards import BatchShard
from rollouts.training.backends.forward import Models, Scored
from rollouts.training.backends.metric_sums import MetricSums, Microbatch, Reading
from rollouts.training.backends.optimizer import TrainerSettings
from rollouts.training.backends.profiling import Profile, peak_gib
from rollouts.training.backends.sharding import Sharding
from rollouts.training.backends.transformer import ModelPaths, inspect_model, prefers_packing
from rollouts.training.batching import BUCKET_SAVING_MIN, MICROBATCH_SAVING_MIN, Keep, split_microbatches
from rollouts.training.estimates import MOMENTS, ModelSize, model_size_of, peak_flops, train_flops
from rollouts.training.models import prepare_gradient_checkpointing
from rollouts.training.types import AuxiliaryModels, Row, StepResult, TrainBatch
from rollouts.training.weights import checkpoint, files, store

# On a GPU a pass through a small model is mostly launches, as long as those of some thousand tokens.
_GPU_BUCKET_SAVING_MIN = 4096
# One step that is not finite may be a batch's bad luck and is skipped; so many in a row are weights that diverged.
_NOT_FINITE_MAX = 3
# An empty microbatch runs a row of two tokens.
_EMPTY_PASS = ([Row([0, 0], [0.0] * 2, [0.0] * 2, [0.0] * 2, [0.0] * 2, 0, 0)], [[1]])


class _Work(NamedTuple):
    """What the microbatches of a batch shard have in common."""

    batch: TrainBatch
    algorithm: Algorithm
    requested: frozenset[str]


class Trainer:
    """`networks` hold everything that is trained, `causal` is the policy (adapters injected; sharded, if this trainer
    shards); `version` counts optimizer steps that changed the weights. `notes` say in words which fast paths this model
    cannot take.
    """

    def __init__(
        self,
        causal: Any,
        algorithms: Mapping[str, Algorithm],
        settings: TrainerSettings,
        *,
        adapter: Any = None,
        source: str | None = None,
        auxiliary_models: AuxiliaryModels | None = None,
        shards: Sharding | None = None,
        rank: int = 0,
    ) -> None:
        """`source` is where the tokenizer is found, if anywhere. With `shards`, all ranks get rank 0's weights."""
        optimizer.check_settings(settings)
        wanted = auxiliary_models or AuxiliaryModels()
        self.version = 0
        self.rank = rank
        self.algorithms = dict(algorithms)
        self.adapter = adapter
        self.kind: Literal["full", "adapter"] = "full" if adapter is None else "adapter"  # what a checkpoint holds
        self.is_sharded = shards is not None
        # It is read at every save, whatever the working directory is then.
        self._source = str(Path(source).absolute()) if source is not None and Path(source).is_dir() else source
        self._settings = settings
        self._shards = shards
        self._denominator = 0.0
        self._skipped = 0
        self._not_finite = 0  # steps in a row that were skipped for it
        self._never_flat: set[str] = set()  # algorithms that were seen to train rows without an advantage
        self._profile = Profile()
        kind = causal.get_input_embeddings().weight.device.type if shards is None else shards.mesh.device_type
        self._files_group = None if shards is None else shards.files_group
        self._progressed: Callable[[], object] = (lambda: None) if shards is None else shards.progressed
        self._microbatch_saving_min = MICROBATCH_SAVING_MIN if kind == "cpu" else _GPU_BUCKET_SAVING_MIN
        saving = BUCKET_SAVING_MIN if kind == "cpu" else _GPU_BUCKET_SAVING_MIN
        saving = saving if shards is None else sys.maxsize  # ranks meet in each pass, so they run one a microbatch
        apart = settings.gradient_checkpointing or settings.layout == "packed" or shards is not None
        share_prompts = settings.share_prefix and not apart
        self.causal = causal.eval()
        critic, how = None, {"share_prefix": share_prompts, "bucket_saving_min": saving}
        if wanted.critic:
            # It is trained, so of a sharded one the masters are loaded; its shards go to their device.
            dtype, device = (settings.dtype, settings.device) if shards is None else ("float32", "cpu")
            critic = Critic.load(wanted.critic, causal, dtype=dtype, device=device, **how)
        self.networks = Networks(causal, critic)
        # A hash of the names and shapes that weights have in files; sharding changes none of them.
        self.fingerprint = checkpoint.model_fingerprint(causal.state_dict())
        self.size = model_size_of(causal)
        if shards is not None:
            self._shard(shards)
        self.device: torch.device = causal.get_input_embeddings().weight.device
        computes = (shards and shards.compute_dtype) or causal.dtype
        self.compute_dtype = str(computes).removeprefix("torch.")
        self._parameters = [p for p in causal.parameters() if p.requires_grad]
        # What is clipped together, and its learning rate: the policy, and the critic if there is one.
        self._sets = [(self._parameters, settings.lr)]
        if critic is not None:
            self._sets.append(([p for p in critic.parameters() if p.requires_grad], wanted.critic_lr))
        self._names = {p: name for name, p in self.networks.named_parameters() if p.requires_grad}
        self._models = self._inspect(wanted, critic, **how)
        self.shares_prefix = self._models.paths.share_prefix  # whether prompts that rows share are run once
        # That rows are not packed is no news: it was not asked for, or `_inspect` has refused.
        self.notes = tuple(note for note in self._models.paths.notes if "pack" not in note)
        rule, adapters = wanted.reference, adapter is not None
        self._reference = None if rule is None else ReferencePolicy(self._parameters, rule, adapters=adapters)
        self._optimizer = optimizer.make_optimizer(self._sets, settings)
        if settings.gradient_checkpointing:
            prepare_gradient_checkpointing(causal)

    def _shard(self, shards: Sharding) -> None:
        """Part the networks among the ranks, with rank 0's weights."""
        whole = dict(self.causal.state_dict()) if self.rank == 0 else {}
        shards.meet("loaded")
        sharding.shard_networks(self.networks, shards)
        sharding.load_whole(self.causal.state_dict(), whole, alone=False)

    @functools.cached_property
    def model_files(self) -> files.ModelFiles:
        """What lies beside the weights in a folder that others load."""
        config = None if self.adapter is None else self.adapter.peft_config[lora.ADAPTER]
        return files.ModelFiles(self.causal, config, self._source)

    def _inspect(self, wanted: AuxiliaryModels, critic: Critic | None, **how: Any) -> Models:
        """Find out how the policy is run, and load the teacher. Raises ConfigError, ModelError."""
        paths: ModelPaths = self._run_networks(functools.partial(inspect_model, self.causal, **how))
        if critic is not None:
            self._run_networks(critic.check, wanted.critic, paths)
        settings, teacher = self._settings, None
        if wanted.teacher:
            top_k, dtype, device = wanted.teacher_top_k, settings.dtype, settings.device
            teacher = Teacher(wanted.teacher, paths, dtype=dtype, device=device, top_k=top_k)
        if settings.layout == "packed" and not paths.packs:
            reasons = "; ".join(note for note in paths.notes if "pack" in note)
            raise ConfigError(
                f"--training.layout packed: {reasons or 'this model cannot'}; type --training.layout buckets"
            )
        packed = settings.layout == "packed" or (
            settings.layout == "auto" and paths.packs and prefers_packing(self.causal)
        )
        return Models(paths._replace(share_prefix=paths.share_prefix and not packed, packed=packed), critic, teacher)

    def split(self, batch: TrainBatch, keep: Keep, only_live: bool, *, trained: bool = False) -> list[list[Row]]:
        """The rows in microbatches; if they are `trained`, those without an advantage may have some of their own."""
        return split_microbatches(
            batch,
            self._settings.tokens_per_microbatch,
            share_prefix=self.shares_prefix,
            keep=keep,
            only_live=only_live,
            packed=self._models.paths.packed,
            saving_min=self._microbatch_saving_min,
            flat_apart=trained and self._tries_flat(batch.algorithm),
        )

    def _tries_flat(self, name: str) -> bool:
        """Whether rows without an advantage may be run forward only: never over ranks, which meet in every backward."""
        return self._shards is None and name not in self._never_flat and forward.may_be_flat(self.algorithms[name])

    def check_forward(self, needs: Sequence[str]) -> None:
        """Raises TrainingError for what this trainer was not given."""
        have = {
            "logprobs": True,
            "entropy": True,
            "ref_logprobs": self._reference is not None,
            "teacher_logprobs": self._models.teacher is not None,
            "values": self._models.critic is not None,
        }
        missing = sorted(name for name in needs if not have.get(name, False))
        if missing:
            able = ", ".join(name for name, is_there in have.items() if is_there)
            raise TrainingError(f"this backend was asked for {', '.join(missing)}; it can give {able}")

    def forward(self, shard: BatchShard, needs: Sequence[str], only_live: bool) -> dict[str, list[list[float]]]:
        """Each of `needs` for every row of the shard [L], 0.0 where nothing was asked for."""
        rows, temperature = shard.batch.rows, shard.batch.temperature
        found = {name: [[0.0] * len(row.tokens) for row in rows] for name in needs}
        own = tuple(name for name in needs if name != "ref_logprobs")
        ask = functools.partial(self._run_networks, self._models.ask, inference=True)
        for part in shard.parts:
            chosen, wanted = _EMPTY_PASS
            if part:
                chosen = [rows[number] for number in part]
                wanted = [
                    [t for t in range(1, len(row.tokens)) if row.loss_mask[t] > 0 or not only_live] for row in chosen
                ]
            if not any(wanted):
                continue
            self._progressed()
            results = [ask((chosen, wanted), temperature, own)] if own else []
            if "ref_logprobs" in needs:
                assert self._reference is not None, "check_forward saw to it"
                with self._reference.in_place():
                    tensors, selection = ask((chosen, wanted), temperature, ("logprobs",))
                results.append(({"ref_logprobs": tensors["logprobs"]}, selection))
            for tensors, selection in results if part else ():
                places = [(part[place], position) for place, position in selection.tokens()]
                for name, tensor in tensors.items():
                    for (number, position), value in zip(places, tensor.tolist(), strict=True):
                        found[name][number][position] = value
        return found

    def forward_backward(self, shard: BatchShard) -> Reading:
        """Accumulate gradients and D; gives what was measured."""
        algorithm = self.algorithms[shard.batch.algorithm]
        work = _Work(shard.batch, algorithm, needs(algorithm))
        sums = MetricSums()
        learned: list[bool] = []  # of each microbatch with rows that had a backward: whether it had a gradient
        flat: list[int] = []
        try:
            # transformers checkpoints activations in training mode only; all dropout was set to 0 before.
            self.causal.train(self._settings.gradient_checkpointing)
            for number, rows in enumerate(shard.microbatches()):
                if self._pass_flat(rows, work, sums):
                    flat.append(number)
                    continue
                learned += self._microbatch(rows, work, sums)
            if flat and not any(learned):  # no gradient is not a gradient of 0, which still moves momenta
                self.networks(self._touch, work.requested).backward()
            reading = sums.read()
        except BaseException:
            self.forget_gradients()
            raise
        finally:
            self.causal.eval()
        reading.learned = any(learned) or bool(flat) if learned or flat else None
        reading.forward_only = flat
        self._denominator += shard.batch.denominator
        return reading

    def forget_gradients(self) -> None:
        """Drop what was accumulated."""
        self._optimizer.zero_grad(set_to_none=True)
        self._denominator = 0.0

    def optim_step(self) -> StepResult:
        """Divide by D once, clip, step. D = 0 or a non-finite gradient skips the step: counted, version unchanged.

        Raises TrainingError at the third step in a row that was skipped for what is not finite.
        """
        denominator, self._denominator = self._denominator, 0.0
        settings = self._settings
        factor = optimizer.lr_factor(settings, self.version)
        gradients = [[p.grad for p in chosen if p.grad is not None] for chosen, _ in self._sets]
        able = denominator > 0
        norms = [_norm(each) / denominator if each and able else 0.0 for each in gradients]
        metrics = {"optim/lr": settings.lr * factor, "optim/grad_norm": norms[0]}
        if len(norms) > 1:
            metrics["optim/critic_grad_norm"] = norms[1]
        finite = all(map(math.isfinite, norms))
        if not any(gradients) or not able or not finite:
            self._skipped += 1
            self.forget_gradients()
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
        for group, (_, lr) in zip(self._optimizer.param_groups, self._sets, strict=True):
            group["lr"] = lr * factor
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.version += 1
        self._not_finite = 0
        if self._reference is not None:
            self._reference.follow(self.version)
        return StepResult(metrics | {"optim/skipped": 0.0}, self.version)

    def get_weights(self, kind: Literal["full", "adapter"]) -> dict[str, Tensor]:
        """CPU copies by name on rank 0, nothing on the others."""
        whole = functools.partial(sharding.whole_tensors, keep=self.rank == 0)
        if kind == "full":
            return lora.merged_weights(self.causal, whole)
        assert self.adapter is not None, "the backend has looked"
        return lora.read_adapter_weights(self.adapter, whole)

    def check_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Raises TrainingError for names or shapes that are not those of what is trained."""
        own = self._loadable()
        wrong = sorted(set(own) ^ set(weights))
        wrong += sorted(name for name in set(own) & set(weights) if own[name].shape != weights[name].shape)
        if wrong:
            what = "model" if self.adapter is None else "adapter"
            raise TrainingError(f"these are not this {what}'s weights: {len(wrong)} of them differ, first {wrong[0]}")

    def load_weights(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """Replace what is trained; ranks above 0 are given nothing and get their shards of rank 0's."""
        self._reshard()
        sharding.load_whole(self._loadable(), dict(weights or {}), alone=self._shards is None)

    def _loadable(self) -> dict[str, Tensor]:
        return self.causal.state_dict() if self.adapter is None else lora.adapter_parameters(self.adapter)

    def save(self, path: str) -> dict[str, Any]:
        """Write this rank's shard of the trainer's tensors into `path`, rank 0 also the weights; gives its random
        state.
        """
        folder = Path(path)
        checkpoint.write_tensors(folder, self._tensors(), group=self._files_group, alone=self._shards is None)
        weights = self.get_weights(self.kind)
        if self.rank == 0:
            files.write_weights(folder, self.kind, weights, self.model_files)
        return checkpoint.random_state()

    def checkpoint_bytes(self) -> int:
        """About what a checkpoint of all ranks takes on the disk: weights, a critic's, a reference's, and moments."""
        policy = self.causal.parameters() if self.adapter is None else lora.adapter_parameters(self.adapter).values()
        critic = [parameter for parameter in self._names if all(parameter is not own for own in self._parameters)]
        reference = self._parameters if self._reference is not None and self._reference.follows else []
        moments = MOMENTS[self._settings.optimizer]
        return sum(
            count * parameter.numel() * parameter.element_size()
            for count, parameters in ((1, policy), (1, critic), (1, reference), (moments, self._names))
            for parameter in parameters
        )

    def state(self) -> dict[str, Any]:
        """The counters."""
        return {"version": self.version, "skipped": self._skipped, "not_finite": self._not_finite}

    def check_checkpoint(self, path: str) -> None:
        """Raises ConfigError or ModelError for a folder that is damaged or not of this trainer."""
        store.check_folder(path, kind=self.kind, fingerprint=self.fingerprint)
        saved = checkpoint.saved_keys(path)
        has_critic = any(key.startswith("critic") for key in saved)
        if (self._models.critic is not None) != has_critic:
            has = "has no critic" if self._models.critic is not None else "has a critic"
            raise ConfigError(f"the checkpoint {path} {has}; give the --critic of the run that wrote it")
        checkpoint.check_tensors(path, self._loadable_tensors(saved))

    def _loadable_tensors(self, saved: set[str]) -> dict[str, Any]:
        """The trainer's own tensors that a checkpoint with these is read into."""
        tensors = self._tensors()
        if not any(key.startswith("reference") for key in saved):
            tensors.pop("reference", None)  # the run that wrote it had another rule, or none
        return tensors

    def read_weights(self, path: str) -> dict[str, Tensor]:
        """The weights of a checkpoint, as rank 0 loads them. Raises ConfigError, ModelError, TrainingError."""
        weights = files.read_weights(path, kind=self.kind, dtype=self.causal.dtype)
        self.check_weights(weights)
        return weights

    def load(self, path: str, weights: Mapping[str, Tensor] | None = None) -> None:
        """Restore what `save` wrote, whatever number of ranks wrote it; `weights` are those of `read_weights`."""
        self.load_weights(weights)
        tensors = self._loadable_tensors(checkpoint.saved_keys(path))
        checkpoint.read_tensors(path, tensors, group=self._files_group, alone=self._shards is None)
        self.forget_gradients()
        state = store.read_state(path)["backend"]
        self.version = int(state["version"])
        self._skipped = int(state["skipped"])
        self._not_finite = int(state["not_finite"])
        if self.rank < len(state["random"]):
            checkpoint.set_random_state(state["random"][self.rank])

    def start_profile(self) -> None:
        """Begin to record what this thread runs. Raises TrainingError."""
        self._profile.start(self.device)

    def stop_profile(self, folder: str) -> None:
        """Write what was recorded into `folder`. Raises OutputError."""
        self._profile.finish(Path(folder), self.rank)

    def close(self) -> None:
        """Drop a profile that was not finished."""
        self._profile.discard()

    # --- the parts --------------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the weights, and what it is read into: this rank's shards."""
        tensors: dict[str, Any] = {"optimizer": optimizer.optimizer_tensors(self._optimizer, self._names)}
        if self._models.critic is not None:
            tensors["critic"] = dict(self._models.critic.state_dict())
        if self._reference is not None and self._reference.follows:
            names = [self._names[parameter] for parameter in self._parameters]
            tensors["reference"] = dict(zip(names, self._reference.tensors, strict=True))
        return tensors

    def _reshard(self) -> None:
        if self._shards is not None:
            sharding.reshard(self.networks)

    def _run_networks(self, function: Callable[..., Any], *args: Any, inference: bool = False) -> Any:
        """Call it where the networks can be run, without gradient. `inference` is for what no gradient meets later, and
        not for a sharded model, which keeps buffers.
        """
        with torch.inference_mode() if inference and self._shards is None else torch.no_grad():
            found = self.networks(function, *args)
        self._reshard()
        return found

    def _microbatch(self, part: list[Row], work: _Work, sums: MetricSums) -> list[bool]:
        """Add up one microbatch; whether any term's values carried a gradient, nothing where it was empty."""
        self._progressed()
        if not part:
            self.networks(self._touch, work.requested).backward()
            return []
        measured, nothing = self.networks(self._measure, part, work)
        learned = bool(measured.objective.requires_grad)  # a loss may be constant in some microbatches
        if self._shards is not None:
            (measured.objective + nothing).backward()  # ranks meet in the backward of every part of the model
        elif learned:
            measured.objective.backward()
        with torch.no_grad():
            sums.add(measured)
        return [learned]

    def _pass_flat(self, part: list[Row], work: _Work, sums: MetricSums) -> bool:
        """Add up a microbatch without an advantage, if its gradient is 0: then it needs no backward."""
        if not forward.is_flat(part) or not self._tries_flat(work.batch.algorithm):
            return False
        self._progressed()
        scored, ends = forward.cut_off(self._run_networks(self._score, part, work))
        measured = self._evaluate(part, work, scored)
        size = forward.gradient_size(measured.objective, ends)
        if size != 0.0:
            self._never_flat |= {work.batch.algorithm} if math.isfinite(size) else set()
            return False
        with torch.no_grad():
            sums.add(measured)
        return True

    def _touch(self, requested: frozenset[str]) -> Tensor:
        """A 0 that depends on all that is trained: an empty microbatch, in which a rank only meets the others."""
        return _nothing(self._models.score(_EMPTY_PASS, 1.0, requested - {"logits"}))

    def _measure(self, rows: list[Row], work: _Work) -> tuple[Microbatch, Tensor]:
        """What there is to measure, and a 0 that depends on every output of the networks."""
        scored = self._score(rows, work)
        nothing = _nothing(scored)
        return self._evaluate(rows, work, scored), nothing

    def _score(self, rows: list[Row], work: _Work) -> Scored:
        """What the policy gives at live tokens, and the critic's values if they are asked for."""
        wanted = [[t for t, weight in enumerate(row.loss_mask) if weight > 0] for row in rows]
        return self._models.score((rows, wanted), work.batch.temperature, work.requested)

    def _evaluate(self, rows: list[Row], work: _Work, scored: Scored) -> Microbatch:
        """The sum of u * loss, and what else there is to measure, of what the networks gave."""
        batch, algorithm, requested = work
        device = scored.logprobs.device
        tensors = forward.make_streams(rows, scored.selection, batch.rewards, device) | scored.extra
        sampled = tensors.pop("sampled") > 0
        anchored = torch.ones_like(sampled) if "old_logprobs" in tensors else sampled
        policy = tensors.get("old_logprobs", scored.logprobs.detach())
        tensors["rollout_logprobs"] = torch.where(sampled, tensors["rollout_logprobs"], policy)
        if "old_logprobs" not in tensors:
            tensors["old_logprobs"] = tensors["rollout_logprobs"] if batch.anchor == "sampler" else policy
        tensors["logprobs"] = scored.logprobs
        tensors["entropy"] = scored.entropy if "entropy" in requested else scored.entropy.detach()
        if scored.values is not None:
            tensors["values"] = scored.values
        available: dict[str, Any] = {**tensors, "step": batch.step}
        if "rewards" in requested:
            available["rewards"] = torch.tensor(batch.rewards, device=device)
        mask = tensors["mask"]
        # The importance weight is counted once: in the ratio against the sampler, or here.
        weights = importance_weights(algorithm, available, mask) if batch.anchor == "current" else None
        evaluation = evaluate(
            algorithm, available, mask, unit=batch.unit, kl_coefficient=batch.kl_coefficient, weights=weights
        )
        objective = (evaluation.values * forward.unit_weights(tensors, batch.unit)).sum()
        seen = {name: tensor.detach() for name, tensor in tensors.items()}
        seen |= {"sampled": sampled, "anchored": anchored}
        if weights is not None:
            seen["importance"] = weights.detach()
        return Microbatch(seen, objective, evaluation, _clip_bounds(algorithm), scored.tokens)


def training_speed(
    trainer: Trainer, shards: Sequence[BatchShard], readings: Sequence[Reading], seconds: float
) -> dict[str, float]:
    """`perf/tflops` a rank, `perf/mfu` where the device's peak is known, and this rank's `perf/peak_gib`."""
    found = {"perf/peak_gib": peak_gib(trainer.device)}
    trained: list[Row] = []
    forward_only: list[Row] = []
    for shard, reading in zip(shards, readings, strict=True):
        for number, part in enumerate(shard.microbatches()):
            (forward_only if number in reading.forward_only else trained).extend(part)
    # Of the three passes of full training, two are the backward's.
    flops = (
        _flops(trainer.size, trained, lora=trainer.adapter is not None)
        + _flops(trainer.size, forward_only, lora=False) / 3
    )
    if not flops:
        return found
    rate = flops / max(seconds, 1e-9) / len(shards)
    found["perf/tflops"] = rate / 1e12
    peak = None
    if trainer.device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(trainer.device), trainer.compute_dtype)
    return found if peak is None else found | {"perf/mfu": rate / peak}


def _flops(size: ModelSize, rows: Sequence[Row], *, lora: bool) -> float:
    lengths = [len(row.tokens) for row in rows]
    tokens = sum(lengths)
    if not tokens:
        return 0.0
    scored = sum(weight > 0 for row in rows for weight in row.loss_mask)
    return train_flops(size, tokens, sum(length**2 for length in lengths) / tokens, lora=lora, scored=scored)


def _norm(gradients: list[Tensor]) -> float:
    return float(sharding.whole_tensor(nn.utils.get_total_norm(gradients)))


def _nothing(scored: Scored) -> Tensor:
    nothing = scored.logprobs.sum() * 0.0
    return nothing if scored.values is None else nothing + scored.values.sum() * 0.0


def _clip_bounds(algorithm: Algorithm) -> tuple[float, float] | None:
    """How far the ratio of one token may go, where a term clips it by itself."""
    for term in active_terms(algorithm):
        names = requests(term.function)
        if "old_logprobs" in names and "rollout_index" not in names:
            low, high = setting_of(algorithm, "clip_low"), setting_of(algorithm, "clip_high")
            return None if low is None or high is None else (float(low), float(high))
    return None
