"""One rank's model and optimizer, and all torch work on them, synchronously. A single process is the only rank.

`forward_backward` accumulates the gradients of sum(u * loss), and D; on every rank, D is that of the whole batch.
`optim_step` divides by D once, clips by the global norm, and steps. The model is in evaluation mode also in training,
because dropout would make the ratio of a policy to itself differ from 1. Rows without an advantage skip the backward
pass if their gradient is 0 (*flat* rows, see `forward`). Every rank calls the same methods in the same order, with its
own shard of a batch. Not here: futures and ranks (`torch`, `rollouts_fsdp`), auxiliary models (`auxiliary`).
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from rollouts.author_code import place_of
from rollouts.errors import ConfigError, TrainingError, words_of
from rollouts.models import lora
from rollouts.models.estimates import model_size_of, moments_of
from rollouts.training import batching
from rollouts.training.algorithms.algorithm import Algorithm, active_terms, needs, requests, setting_of
from rollouts.training.algorithms.corrections import importance_weights, resolve_logprobs
from rollouts.training.algorithms.objective import evaluate_objective
from rollouts.training.backends import forward, optimizer, sharding
from rollouts.training.backends.auxiliary import Critic, Networks, ReferencePolicy, Teacher
from rollouts.training.backends.forward import Models, RowFields, Scored
from rollouts.training.backends.metric_sums import MetricSums, Microbatch, Reading, TokenRecord
from rollouts.training.backends.optimizer import MakeOptimizer, Masters, TrainerSettings
from rollouts.training.backends.sharding import BatchShard, Sharding
from rollouts.training.backends.transformer import ModelPaths, RowInputs, inspect_model
from rollouts.training.batches import AuxiliaryModels, Row, StepResult, TrainBatch
from rollouts.training.batching import Keep, microbatch_tokens
from rollouts.training.forest import node_budgets
from rollouts.training.weights import checkpoint, files, store

if TYPE_CHECKING:
    from rollouts.training.backends.layers import Compilations
    from rollouts.training.backends.profiling import Profile

# A single step with a non-finite gradient is skipped. This many in a row mean that training has diverged.
_NOT_FINITE_MAX = 3
# An empty microbatch runs this row of two tokens, of which it computes one.
_EMPTY_ROW = Row([0, 0], [0.0, 1.0], [0.0] * 2, [0.0] * 2, [0.0] * 2, 0, 0)


class Trainer:
    """The model of one rank, with its optimizer.

    Attributes:
        networks: everything that is trained
        causal: the policy, with its adapters; sharded if this trainer shards
        roles: the roles with an adapter of their own; empty: there is one policy
        version: the number of optimizer steps that changed the weights
        tokens_max: the largest number of tokens of a microbatch
        lower_limits: smaller numbers of tokens by command, after it ran out of memory. Rows that must stay together may
            still have `tokens_max`
        microbatch: the rows that run now, or ran last
        notes: which optimizations this model cannot use, for the user
    """

    microbatch: Sequence[Row] = ()
    lower_limits: Mapping[str, int] = MappingProxyType({})

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
        make_optimizer: MakeOptimizer | None = None,
    ) -> None:
        """`source` has the tokenizer. With `shards`, all ranks get rank 0's weights."""
        optimizer.check_settings(settings)
        wanted = auxiliary_models or AuxiliaryModels()
        self.version = 0
        self.rank = rank
        self.algorithms = dict(algorithms)
        self.adapter = adapter
        self.roles = lora.adapter_roles(adapter)
        self.kind: Literal["full", "adapter"] = "full" if adapter is None else "adapter"  # the content of checkpoints
        self.is_sharded = shards is not None
        # Absolute, because every save reads it, and the working directory may have changed.
        self._source = str(Path(source).absolute()) if source is not None and Path(source).is_dir() else source
        self.settings, self.lr, self.tokens_max = settings, settings.lr, settings.tokens_per_microbatch
        self._shards = shards
        self._denominator, self._skipped = 0.0, 0
        self._not_finite = 0  # steps in a row that were skipped because of a non-finite gradient
        self._never_flat: set[str] = set()  # algorithms that had a gradient at rows without an advantage
        self._profile: Profile | None = None
        kind = causal.get_input_embeddings().weight.device.type if shards is None else shards.device_type
        self._files_group = None if shards is None else shards.files_group
        self._progressed: Callable[[], object] = (lambda: None) if shards is None else shards.progressed
        self._flat_saving_min = batching.PASS_SAVING_MIN if kind == "cpu" else batching.PASS_SAVING_MIN_GPU
        self.causal = causal.eval()
        compiles = settings.compile == "layers" or (settings.compile == "auto" and kind == "cuda")
        self._compilations: Compilations | None = None
        if compiles:
            from rollouts.training.backends.layers import Compilations

            self._compilations = Compilations(memory_budget=settings.memory_budget)
        budgets = node_budgets(self.tokens_max) if compiles or kind == "cuda" else ()  # FlexAttention is compiled too
        critic = self._load_critic(wanted.critic, budgets) if wanted.critic else None
        self.networks = Networks(causal, critic)
        self._masters = Masters(torch.bfloat16 if settings.dtype == "bfloat16" and shards is None else None)
        self._prepare_layers()
        # A hash of the names and shapes of weights in files. Sharding changes none of them.
        self.fingerprint = checkpoint.model_fingerprint(causal.state_dict())
        self.size = model_size_of(causal)
        if shards is not None:
            self._shard(shards)
        self.device: torch.device = causal.get_input_embeddings().weight.device
        computes = (shards and shards.compute_dtype) or self._masters.dtype or causal.dtype
        self.compute_dtype = str(computes).removeprefix("torch.")
        self._parameters = self._masters.of(p for p in causal.parameters() if p.requires_grad)
        self._sets = self._trained_sets(wanted.critic_lr)
        named = {name: p for name, p in self.networks.named_parameters() if p.requires_grad}
        self._names = dict(zip(self._masters.of(named.values()), named, strict=True))
        self._models = self._inspect(wanted, critic, budgets)
        if self._compilations is not None:
            self._compilations.is_on = True
        self.notes = self._models.paths.notes
        rule, adapters = wanted.reference, adapter is not None
        self._reference = None if rule is None else ReferencePolicy(self._parameters, rule, adapters=adapters)
        self._optimizer = optimizer.make_optimizer(self._sets, settings, make_optimizer)
        self._made = optimizer.group_values(self._optimizer)

    def _trained_sets(self, critic_lr: float) -> list[tuple[list[nn.Parameter], float]]:
        """Sets that are clipped together, with learning rates: the policy or the adapter of each role; the critic."""
        of_roles = [self._masters.of(each) for each in lora.trained_sets(self.adapter)]
        sets = [(each, self.lr) for each in of_roles or [self._parameters]]
        critic = self.networks.critic
        if critic is not None:
            sets.append((self._masters.of(p for p in critic.parameters() if p.requires_grad), critic_lr))
        return sets

    def _load_critic(self, name: str, budgets: tuple[int, ...]) -> Critic:
        """A sharded critic is loaded in float32 on the CPU, and its shards move to their device."""
        settings = self.settings
        dtype, device = (settings.dtype, settings.device) if self._shards is None else ("float32", "cpu")
        return Critic.load(name, self.causal, dtype=dtype, device=device, budgets=budgets)

    def _prepare_layers(self) -> None:
        """Give trained weights masters, and wrap the layers of the trained models."""
        trunk = None if self.networks.critic is None else self.networks.critic.trunk
        for model in filter(None, (self.causal, trunk)):
            self._masters.take(model.parameters(), convert=model is self.causal and self.adapter is not None)
            if self.settings.gradient_checkpointing or self._compilations is not None:
                from rollouts.training.backends.layers import wrap_layers

                wrap_layers(model, checkpoints=self.settings.gradient_checkpointing, compilations=self._compilations)

    def _shard(self, shards: Sharding) -> None:
        """Shard the networks over the ranks, with rank 0's weights."""
        whole = dict(self.causal.state_dict()) if self.rank == 0 else {}
        shards.meet("loaded")
        shards.shard(self.networks)
        sharding.load_whole(self.causal.state_dict(), whole, alone=False)

    @functools.cached_property
    def model_files(self) -> files.ModelFiles:
        """The files beside the weights in a folder for other programs."""
        config = None if self.adapter is None else next(iter(self.adapter.peft_config.values()))
        return files.ModelFiles(self.causal, config, self._source, self.roles)

    def _inspect(self, wanted: AuxiliaryModels, critic: Critic | None, budgets: tuple[int, ...]) -> Models:
        """Find out how to run the policy, and load the teacher. Raises ConfigError, ModelError."""
        paths: ModelPaths = self._run_networks(inspect_model, self.causal, budgets)
        if critic is not None:
            self._run_networks(critic.check, wanted.critic, paths)
        settings, teacher = self.settings, None
        if settings.layout in ("padded", "buckets"):
            paths = paths._replace(runs_forests=False)
        if wanted.teacher:
            top_k, dtype, device = wanted.teacher_top_k, settings.dtype, settings.device
            teacher = Teacher(wanted.teacher, paths, dtype=dtype, device=device, top_k=top_k)
        return Models(paths, critic, teacher, settings.share_prefix)

    @property
    def compilation_failure(self) -> str:
        """Why layers are not compiled although they shall be; empty if they are."""
        return self._compilations.failure if self._compilations is not None else ""

    def compilation_metrics(self) -> dict[str, float]:
        """`perf/compilations`: how many were made since the last call. Empty if layers are not to be compiled."""
        if self._compilations is None:
            return {}
        failed = float(bool(self.compilation_failure))
        return {"perf/compilations": float(self._compilations.new()), "perf/compilation_failed": failed}

    @property
    def shares_prefix(self) -> bool:
        """Whether tokens that several rows begin with run once."""
        return self._models.share and self._models.paths.runs_forests

    def split(self, batch: TrainBatch, keep: Keep, only_live: bool, *, trained: bool = False) -> list[list[Row]]:
        """Split the rows into microbatches. If `trained`, flat rows may get microbatches of their own."""
        split = functools.partial(
            batching.split_microbatches,
            tokens_max=self.lower_limits.get("forward_backward" if trained else "forward", self.tokens_max),
            together_max=self.tokens_max,
            share=self.shares_prefix,
            padded=not self._models.paths.runs_forests,
            keep=keep,
            only_live=only_live,
            flat_saving_min=self._flat_saving_min if trained and self._tries_flat(batch.algorithm) else math.inf,
        )
        return batching.split_by_role(batch, self.roles, split) if self.roles else split(batch)

    def _tries_flat(self, name: str) -> bool:
        """Whether flat rows may skip the backward pass. Never with several ranks, which wait for each other in every
        backward pass.
        """
        return self._shards is None and name not in self._never_flat and forward.may_be_flat(self.algorithms[name])

    def check_forward(self, needs: Sequence[str]) -> None:
        """Raise TrainingError for outputs that need a model which this trainer does not have."""
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
            raise TrainingError(f"this backend cannot compute {', '.join(missing)}; it can compute {able}")

    def forward(self, shard: BatchShard, needs: Sequence[str], only_live: bool) -> dict[str, list[list[float]]]:
        """Compute each of `needs` for every row of the shard [L]; 0.0 at other positions."""
        rows = shard.batch.rows
        with self._models.attending():
            predicted = [
                self._predict([rows[number] for number in part], needs, shard.batch.temperature, only_live)
                for part in shard.parts
            ]
        streams = {name: [np.zeros(len(row.tokens)) for row in rows] for name in needs}
        for part, (inputs, tensors) in zip(shard.parts, predicted, strict=True):
            if part and inputs is not None:
                ends = np.cumsum([len(positions) for positions in inputs.wanted])[:-1]
                for name, tensor in tensors.items():
                    pieces = np.split(tensor.cpu().numpy(), ends)
                    for number, positions, values in zip(part, inputs.wanted, pieces, strict=True):
                        streams[name][number][positions] = values
        return {name: [stream.tolist() for stream in own] for name, own in streams.items()}

    def _predict(
        self, rows: list[Row], needs: Sequence[str], temperature: float, only_live: bool
    ) -> tuple[RowInputs | None, dict[str, Tensor]]:
        """Each of `needs` [T] for a microbatch. A sharded model runs for an empty one too, because ranks meet in it."""
        rows = rows or [_EMPTY_ROW]
        inputs = self._models.inputs(rows, only_live=only_live)
        if inputs is None:
            return None, {}
        self._begin(rows)
        self._use_adapter(self._adapter_of(rows))
        predict = functools.partial(self._run_networks, self._models.predict, inputs, temperature)
        own = tuple(name for name in needs if name != "ref_logprobs")
        tensors: dict[str, Tensor] = predict(own) if own else {}
        if "ref_logprobs" in needs:
            assert self._reference is not None, "check_forward has refused it"
            try:
                with self._reference.in_place():
                    self._masters.write()
                    tensors["ref_logprobs"] = predict(("logprobs",))["logprobs"]
            finally:
                self._masters.write()
        return inputs, tensors

    def forward_backward(self, shard: BatchShard) -> Reading:
        """Accumulate gradients and D. Returns the sums of metrics."""
        batch = shard.batch
        self._fields = RowFields(batch.rows, batch.rewards, self.device)
        sums = MetricSums(TokenRecord(batch.rows) if batch.record else None)
        start = time.perf_counter()
        try:
            with self._models.attending():
                learned, flat = self._run_microbatches(shard, sums)
            submitted = time.perf_counter()
            reading = sums.read()
        except BaseException:
            self.forget_gradients()
            raise
        reading.learned = any(learned) or flat if learned or flat else None
        reading.submitted = (submitted - start) / max(time.perf_counter() - start, 1e-9)
        self._denominator += batch.denominator
        return reading

    def _run_microbatches(self, shard: BatchShard, sums: MetricSums) -> tuple[list[bool], bool]:
        """Accumulate. Returns, for each microbatch with a backward pass and rows, whether it had a gradient; and
        whether one had no backward pass.
        """
        learned: list[bool] = []
        flat = False
        still, moved = set[str](), set[str]()  # the adapters of flat rows, and of rows with a gradient
        for rows in shard.microbatches():
            if self._forward_only(rows, shard.batch, sums):
                flat = True
                still.add(self._adapter_of(rows))
                continue
            learned += self._microbatch(rows, shard.batch, sums)
            moved |= {self._adapter_of(rows)} if rows and learned[-1] else set()
        # Momentum moves a weight whose gradient is 0, and leaves one whose gradient is None. An ordinary pass over such
        # rows gives 0, so these roles get zeros too.
        for role in sorted(still - moved):
            self._use_adapter(role)
            self.networks(self._zero_objective, shard.batch).backward()
        return learned, flat

    def microbatch_tokens(self, rows: Sequence[Row]) -> int:
        """How many tokens of `tokens_max` these rows take in one microbatch."""
        return microbatch_tokens(rows, share=self.shares_prefix, padded=not self._models.paths.runs_forests)

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients, or a part of D, that no optimizer step has used."""
        return self._denominator > 0 or any(parameter.grad is not None for parameter in self._names)

    def forget_gradients(self) -> None:
        """Discard accumulated gradients and D."""
        self._optimizer.zero_grad(set_to_none=True)
        self._denominator = 0.0

    def optim_step(self) -> StepResult:
        """Divide by D, clip, step. If D is 0 or a gradient is not finite, skip the step and keep the version.

        Raises TrainingError when the third step in a row is skipped because of non-finite gradients.
        """
        denominator, self._denominator = self._denominator, 0.0
        settings = self.settings
        factor = optimizer.lr_factor(settings, self.version)
        gradients = [[p.grad for p in chosen if p.grad is not None] for chosen, _ in self._sets]
        has_tokens = denominator > 0
        totals = [sharding.whole_tensor(nn.utils.get_total_norm(each)) if each else 0.0 for each in gradients]
        norms = [float(total) / denominator if has_tokens else 0.0 for total in totals]
        policies = len(self.roles) or 1
        metrics = {"optim/lr": settings.lr * factor, "optim/grad_norm": math.hypot(*norms[:policies])}
        if len(norms) > policies:
            metrics["optim/critic_grad_norm"] = norms[policies]
        finite = all(map(math.isfinite, norms))
        if not any(gradients) or not has_tokens or not finite:
            self._skipped += 1
            self.forget_gradients()
            self._not_finite += not finite  # with D = 0 the norms are 0.0, which is finite
            if self._not_finite >= _NOT_FINITE_MAX:
                what = f"the weights or gradients were not finite in {self._not_finite} steps in a row"
                raise TrainingError(f"{what}, so training has diverged; try a smaller --lr than {settings.lr:g}")
            return StepResult(metrics | {"optim/skipped": 1.0}, self.version)
        with torch.no_grad():
            for norm, each in zip(norms, gradients, strict=True):
                scale = min(1.0, settings.max_grad_norm / (norm + 1e-6)) / denominator
                if each:
                    torch._foreach_mul_(each, scale)
        for group, made in zip(self._optimizer.param_groups, self._made, strict=True):
            group["lr"] = made["lr"] * factor
        try:
            self._optimizer.step()
        except Exception as error:
            if place_of(error) is None:  # a bug in rollouts, or in torch
                raise
            raise TrainingError(f"the step of the optimizer failed: {words_of(error)}") from error
        self._optimizer.zero_grad(set_to_none=True)
        self._masters.write()
        self.version += 1
        self._not_finite = 0
        if self._reference is not None:
            self._reference.follow(self.version)
        return StepResult(metrics | {"optim/skipped": 0.0}, self.version)

    def get_weights(self, kind: Literal["full", "adapter"]) -> dict[str, Tensor]:
        """CPU copies by name on rank 0; empty on other ranks."""
        whole = functools.partial(sharding.whole_tensors, keep=self.rank == 0)
        with self._masters.in_place():
            if kind == "full":
                return lora.merged_weights(self.causal, whole)
            assert self.adapter is not None, "the backend has checked it"
            return lora.read_adapter_weights(self.adapter, whole)

    def check_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Raise TrainingError if names or shapes are not those of the trained weights."""
        own = self._loadable()
        wrong = sorted(set(own) ^ set(weights))
        wrong += sorted(name for name in set(own) & set(weights) if own[name].shape != weights[name].shape)
        if wrong:
            what = "model" if self.adapter is None else "adapter"
            raise TrainingError(f"these are not this {what}'s weights: {len(wrong)} of them differ, first {wrong[0]}")

    def load_weights(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """Replace the trained weights. Ranks above 0 pass None, and get their shards of rank 0's weights."""
        self._reshard()
        with self._masters.in_place():
            sharding.load_whole(self._loadable(), dict(weights or {}), alone=self._shards is None)

    def _loadable(self) -> dict[str, Tensor]:
        return self.causal.state_dict() if self.adapter is None else lora.adapter_parameters(self.adapter)

    def save(self, path: str) -> dict[str, Any]:
        """Write this rank's shards into `path`; rank 0 also writes the weights. Returns the random state."""
        folder = Path(path)
        with self._masters.in_place():
            checkpoint.write_tensors(folder, self._tensors(), group=self._files_group, alone=self._shards is None)
        weights = self.get_weights(self.kind)
        if self.rank == 0:
            with self._masters.in_place():  # config.json gets the dtype of the model
                files.write_weights(folder, self.kind, weights, self.model_files)
        return checkpoint.generator_states()

    def checkpoint_bytes(self) -> int:
        """The approximate size on disk of a checkpoint of all ranks: weights, critic, reference, and moments."""
        whole = self._masters.of(self.causal.parameters())
        policy = whole if self.adapter is None else self._parameters
        critic = [parameter for parameter in self._names if all(parameter is not own for own in self._parameters)]
        reference = self._parameters if self._reference is not None and self._reference.follows else []
        moments = moments_of(type(self._optimizer).__name__.lower())
        return sum(
            count * parameter.numel() * parameter.element_size()
            for count, parameters in ((1, policy), (1, critic), (1, reference), (moments, self._names))
            for parameter in parameters
        )

    def state(self) -> dict[str, Any]:
        """The counters, for a checkpoint."""
        counters = {"version": self.version, "skipped": self._skipped, "not_finite": self._not_finite}
        return counters | {"optimizer": optimizer.plain_optimizer_state(self._optimizer, self._names, self._made)}

    def check_checkpoint(self, path: str) -> None:
        """Raise ConfigError or ModelError if the checkpoint is damaged, or not of this trainer."""
        store.check_folder(path, kind=self.kind, fingerprint=self.fingerprint)
        optimizer.check_class(self._optimizer, store.read_state(path)["backend"].get("optimizer"), path)
        saved = checkpoint.saved_tensors(path)
        has_critic = any(key.startswith("critic") for key in saved)
        if (self._models.critic is not None) != has_critic:
            has = "has no critic" if self._models.critic is not None else "has a critic"
            raise ConfigError(f"the checkpoint {path} {has}; give the --critic of the run that wrote it")
        with self._masters.in_place():
            checkpoint.check_tensors(path, self._loadable_tensors(saved))

    def _loadable_tensors(self, saved: Mapping[str, Tensor]) -> dict[str, Any]:
        """The trainer's own tensors, as a checkpoint with these tensors is read into them."""
        tensors = self._tensors(saved)
        if not any(key.startswith("reference") for key in saved):
            tensors.pop("reference", None)  # the run that wrote it had no reference, or a fixed one
        return tensors

    def read_weights(self, path: str) -> dict[str, Tensor]:
        """Read the weights of a checkpoint for rank 0. Raises ConfigError, ModelError, TrainingError."""
        with self._masters.in_place():
            weights = files.read_weights(path, kind=self.kind, dtype=self.causal.dtype)
        self.check_weights(weights)
        return weights

    def load(self, path: str, weights: Mapping[str, Tensor] | None = None) -> None:
        """Restore what `save` wrote, with any number of ranks. `weights` come from `read_weights`."""
        self.load_weights(weights)
        with self._masters.in_place():
            tensors = self._loadable_tensors(checkpoint.saved_tensors(path))
            checkpoint.read_trainer_tensors(path, tensors, group=self._files_group, alone=self._shards is None)
        self.forget_gradients()
        state = store.read_state(path)["backend"]
        self.version = int(state["version"])
        self._skipped = int(state["skipped"])
        if plain := state.get("optimizer"):  # an older checkpoint has no such state
            optimizer.load_plain_state(self._optimizer, self._names, plain)
        self._not_finite = int(state["not_finite"])
        if self.rank < len(state["random"]):
            checkpoint.set_random_state(state["random"][self.rank])

    def start_profile(self) -> None:
        """Start to profile this thread. Raises TrainingError."""
        from rollouts.training.backends.profiling import Profile

        self._profile = self._profile or Profile()
        self._profile.start(self.device)

    def stop_profile(self, folder: str) -> None:
        """Write the profile into `folder`. Raises OutputError."""
        assert self._profile is not None, "start_profile comes first"
        self._profile.finish(Path(folder), self.rank)

    def close(self) -> None:
        """Discard an unfinished profile."""
        if self._profile is not None:
            self._profile.discard()

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _tensors(self, saved: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
        """This rank's tensors in a checkpoint, beside the weights. A checkpoint with the `saved` tensors is also read
        into them. Call it with the masters in place.
        """
        own = {name.removeprefix("optimizer."): each for name, each in (saved or {}).items()}
        tensors: dict[str, Any] = {"optimizer": optimizer.optimizer_tensors(self._optimizer, self._names, own)}
        if self._models.critic is not None:
            tensors["critic"] = dict(self._models.critic.state_dict())
        if self._reference is not None and self._reference.follows:
            names = [self._names[parameter] for parameter in self._parameters]
            tensors["reference"] = dict(zip(names, self._reference.tensors, strict=True))
        return tensors

    def _begin(self, rows: Sequence[Row]) -> None:
        self.microbatch = rows
        self._progressed()

    def _adapter_of(self, rows: Sequence[Row]) -> str:
        """The role whose adapter these rows need; empty if there is one policy."""
        return rows[0].role if self.roles else ""

    def _use_adapter(self, role: str) -> None:
        if self.roles:
            lora.use_adapter(self.causal, role)

    def _reshard(self) -> None:
        if self._shards is not None:
            self._shards.reshard(self.networks)

    def _run_networks(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that runs the networks, without gradient. Not in torch's inference mode, whose tensors would
        make compiled layers compile again.
        """
        with torch.no_grad():
            found = self.networks(function, *args)
        self._reshard()
        return found

    def _microbatch(self, part: list[Row], batch: TrainBatch, sums: MetricSums) -> list[bool]:
        """Run one microbatch and accumulate. Returns whether the objective had a gradient; [] if the part is empty."""
        self._begin(part)
        if not part:
            self.networks(self._zero_objective, batch).backward()
            return []
        measured, zero = self.networks(self._measure, part, batch)
        learned = bool(measured.objective.requires_grad)  # a loss may be constant in some microbatches
        if self._shards is not None:
            (measured.objective + zero).backward()  # ranks wait for each other in the backward pass of every module
        elif learned:
            measured.objective.backward()
        with torch.no_grad():
            sums.add(measured)
        return [learned]

    def _forward_only(self, part: list[Row], batch: TrainBatch, sums: MetricSums) -> bool:
        """Run a microbatch of flat rows forward only. Returns False, and adds nothing, if it has a gradient."""
        if not forward.is_flat(part) or not self._tries_flat(batch.algorithm):
            return False
        self._begin(part)
        scored, ends = forward.cut_off(self._run_networks(self._score, part, batch))
        measured = self._evaluate(part, batch, scored)
        size = forward.gradient_size(measured.objective, ends)
        if size != 0.0:
            self._never_flat |= {batch.algorithm} if math.isfinite(size) else set()
            return False
        with torch.no_grad():
            sums.add(measured, is_forward=True)
        return True

    def _zero_objective(self, batch: TrainBatch) -> Tensor:
        """A 0 that depends on all trained weights. A rank with an empty microbatch needs it for its backward pass, in
        which ranks wait for each other.
        """
        requested = needs(self.algorithms[batch.algorithm]) - {"logits"}
        inputs = self._models.inputs([_EMPTY_ROW])
        assert inputs is not None, "the row has a live token"
        return _zero_of(self._models.score(inputs, 1.0, requested))

    def _measure(self, rows: list[Row], batch: TrainBatch) -> tuple[Microbatch, Tensor]:
        """The measurements of a microbatch, and a 0 that depends on every output of the networks."""
        scored = self._score(rows, batch)
        zero = _zero_of(scored)
        return self._evaluate(rows, batch, scored), zero

    def _score(self, rows: list[Row], batch: TrainBatch) -> Scored:
        """Run the networks for the live tokens of the rows."""
        self._use_adapter(self._adapter_of(rows))
        inputs = self._models.inputs(rows)
        assert inputs is not None, "only rows with live tokens are trained"
        return self._models.score(inputs, batch.temperature, needs(self.algorithms[batch.algorithm]))

    def _evaluate(self, rows: list[Row], batch: TrainBatch, scored: Scored) -> Microbatch:
        """Compute sum(u * loss) and the inputs of metrics from the networks' outputs."""
        algorithm = self.algorithms[batch.algorithm]
        requested = needs(algorithm)
        tensors = self._fields.of_rows(rows) | scored.extra
        is_known = tensors.pop("is_known") > 0
        stored, sampler = tensors.get("old_logprobs"), tensors["rollout_logprobs"]
        resolved = resolve_logprobs(scored.logprobs, stored, sampler, is_known, batch.anchor)
        tensors |= {"old_logprobs": resolved.old_logprobs, "rollout_logprobs": resolved.rollout_logprobs}
        tensors["logprobs"] = scored.logprobs
        tensors["entropy"] = scored.entropy if "entropy" in requested else scored.entropy.detach()
        if scored.values is not None:
            tensors["values"] = scored.values
        available: dict[str, Any] = {**tensors, "step": batch.step}
        if "rewards" in requested:
            available["rewards"] = torch.tensor(batch.rewards, device=scored.logprobs.device)
        mask = tensors["mask"]
        importance = importance_weights(algorithm, available, mask, batch.anchor)
        evaluation = evaluate_objective(
            algorithm, available, mask, unit=batch.unit, kl_coefficient=batch.kl_coefficient, weights=importance
        )
        objective = (evaluation.values * forward.unit_weights(tensors, batch.unit)).sum()
        seen = {name: tensor.detach() for name, tensor in tensors.items()}
        seen |= {"sampled": is_known, "anchored": resolved.is_anchored}
        if importance is not None:
            seen["importance"] = importance.detach()
        return Microbatch(seen, objective, evaluation, _clip_bounds(algorithm), scored.work, rows)


def _zero_of(scored: Scored) -> Tensor:
    """A 0 that depends on every output of the networks."""
    zero = scored.logprobs.sum() * 0.0
    return zero if scored.values is None else zero + scored.values.sum() * 0.0


def _clip_bounds(algorithm: Algorithm) -> tuple[float, float] | None:
    """The clip range of one token's ratio, if a term clips it; else None."""
    for term in active_terms(algorithm):
        names = requests(term.function)
        if "old_logprobs" in names and "rollout_index" not in names:
            low, high = setting_of(algorithm, "clip_low"), setting_of(algorithm, "clip_high")
            return None if low is None or high is None else (float(low), float(high))
    return None
