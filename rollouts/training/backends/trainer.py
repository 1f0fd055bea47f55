"""One rank's model, optimizer and all torch work on them, synchronous; a single process is the only rank.

`forward_backward` accumulates the gradients of sum(u * loss), and D, which is the whole batch's on every rank;
`optim_step` divides once, clips by the global norm, and steps. The model runs in evaluation mode also while training:
dropout would make the ratio of a policy to itself differ from 1. The models beside it (reference, teacher, critic) have
rooms of their own. Rows without an advantage are run forward only, where that changes nothing (`flat`). Every rank
calls the same methods in the same order, with its own share of a batch. Left out: futures and ranks (`torch`, `ranks`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rollouts.errors import ConfigError, TrainingError
from rollouts.training.algorithms.algorithm import Algorithm, active_terms, setting_of
from rollouts.training.algorithms.evaluate import evaluate, importance_weights
from rollouts.training.algorithms.needs import needs, requests
from rollouts.training.backends import checkpoint, lora, sharding
from rollouts.training.backends.companions import Critic, check_critic, load_critic, load_teacher
from rollouts.training.backends.flat import cut_off, gradient_size, is_flat, may_be_flat
from rollouts.training.backends.networks import Networks
from rollouts.training.backends.optimizer import (
    TorchSettings,
    check_settings,
    lr_factor,
    make_optimizer,
    optimizer_tensors,
)
from rollouts.training.backends.passes import Models, Scored
from rollouts.training.backends.profiling import Profile
from rollouts.training.backends.reference import ReferencePolicy
from rollouts.training.backends.sharding import Sharding
from rollouts.training.backends.shares import Share
from rollouts.training.backends.speed import training_speed
from rollouts.training.backends.streams import make_streams, unit_weights
from rollouts.training.backends.sums import Microbatch, Reading, Sums
from rollouts.training.backends.transformer import (
    ModelPaths,
    inspect_model,
    prefers_packing,
)
from rollouts.training.batching import BUCKET_SAVING_MIN, MICROBATCH_SAVING_MIN, Keep, split_microbatches
from rollouts.training.estimates import MOMENTS, model_size_of
from rollouts.training.models import prepare_gradient_checkpointing
from rollouts.training.types import Companions, Row, StepResult, TrainBatch

__all__ = ["Trainer", "keep_of"]

# On a GPU a pass through a small model is mostly launches, as long as those of some thousand tokens.
_GPU_BUCKET_SAVING_MIN = 4096
# One step that is not finite may be a batch's bad luck and is skipped; so many in a row are weights that diverged.
_NOT_FINITE_MAX = 3
# An empty microbatch runs a row of two tokens.
_EMPTY_PASS = ([Row([0, 0], [0.0] * 2, [0.0] * 2, [0.0] * 2, [0.0] * 2, 0, 0)], [[1]])


class Trainer:
    """`networks` hold everything that is trained; `version` counts optimizer steps that changed the weights. `notes`
    say in words which fast paths this model cannot take. `source` is where the tokenizer is found, if anywhere.
    """

    def __init__(
        self,
        causal: Any,
        algorithms: Mapping[str, Algorithm],
        settings: TorchSettings,
        *,
        adapter: Any = None,
        source: str | None = None,
        companions: Companions | None = None,
        dtype: str = "float32",
        device: str = "auto",
        shards: Sharding | None = None,
        rank: int = 0,
    ) -> None:
        """With `shards`, rank 0's weights are those of all ranks."""
        check_settings(settings)
        wanted = companions or Companions()
        self.version = 0
        self.rank = rank
        self.algorithms = dict(algorithms)
        self.adapter = adapter
        self._settings = settings
        # It is read again at every save, whatever the working directory is then.
        self.source = str(Path(source).absolute()) if source is not None and Path(source).is_dir() else source
        self._shards = shards
        self._denominator = 0.0
        self._skipped = 0
        self._not_finite = 0  # steps in a row that were skipped for it
        self._never_flat: set[str] = set()  # algorithms that were seen to train rows without an advantage
        kind = causal.get_input_embeddings().weight.device.type if shards is None else shards.mesh.device_type
        self._on_cpu = kind == "cpu"
        self.networks = Networks(causal.eval(), self._load_critic(causal, wanted.critic, dtype, device))
        # The names that weights have in files; sharding changes no name and no shape.
        self._fingerprint = checkpoint.model_fingerprint(causal.state_dict())
        self._size = model_size_of(causal)
        self._profile = Profile()
        if shards is not None:
            whole = dict(causal.state_dict()) if rank == 0 else {}
            shards.ranks.meet("loaded")
            sharding.shard_networks(self.networks, shards)
            sharding.load_whole(causal.state_dict(), whole, alone=False)
            del whole
        self.device: torch.device = causal.get_input_embeddings().weight.device
        self._parameters = [parameter for parameter in causal.parameters() if parameter.requires_grad]
        self._names = {p: name for name, p in self.networks.named_parameters() if p.requires_grad}
        self._critic_lr = wanted.critic_lr
        self._models = self._inspect(wanted, dtype, device)
        # Where rows are not packed, nobody asked for it, or `_decide_packing` has refused.
        self.notes = tuple(note for note in self._models.paths.notes if "pack" not in note)
        self._reference: ReferencePolicy | None = None
        if wanted.reference is not None:
            self._reference = ReferencePolicy(self._parameters, wanted.reference, adapters=adapter is not None)
        self._optimizer = make_optimizer(self._parameter_sets(), settings)
        if settings.gradient_checkpointing:
            prepare_gradient_checkpointing(causal)

    def _load_critic(self, causal: Any, name: str, dtype: str, device: str) -> Critic | None:
        if not name:
            return None
        if self._shards is not None:
            dtype, device = "float32", "cpu"  # it is trained, so masters; its shares go to their device
        share, saving = self._may_share_prefix, self._bucket_saving_min
        return load_critic(name, causal, dtype=dtype, device=device, saving=saving, share_prefix=share)

    def _inspect(self, wanted: Companions, dtype: str, device: str) -> Models:
        """Find out how the policy is run, and load the teacher. Raises ConfigError, ModelError."""
        inspect = functools.partial(inspect_model, self.causal, share_prefix=self._may_share_prefix)
        paths: ModelPaths = self._run_networks(inspect)
        if self._critic is not None:
            self._run_networks(check_critic, self._critic, wanted.critic, paths)
        teacher, saving = None, self._bucket_saving_min
        if wanted.teacher:
            top_k = wanted.teacher_top_k
            teacher = load_teacher(wanted.teacher, paths, dtype=dtype, device=device, top_k=top_k, saving=saving)
        return Models(paths, self._critic, teacher, _decide_packing(self.causal, paths, self._settings), saving)

    @property
    def causal(self) -> Any:
        """The causal LM, adapters injected; sharded, if this trainer shards."""
        return self.networks.causal

    @property
    def compute_dtype(self) -> str:
        """What the layers compute in."""
        computes = self._shards.compute_dtype if self._shards is not None else None
        return str(computes or self._weights_dtype).removeprefix("torch.")

    @property
    def is_sharded(self) -> bool:
        """Whether this rank holds a share of each weight only."""
        return self._shards is not None

    @property
    def shares_prefix(self) -> bool:
        """Whether prompts that rows share are run once."""
        return self._models.shares_prefix

    def split(self, batch: TrainBatch, keep: Keep, only_live: bool, *, trained: bool = False) -> list[list[Row]]:
        """The rows in microbatches; if they are `trained`, those without an advantage may have some of their own."""
        return split_microbatches(
            batch,
            self._settings.tokens_per_microbatch,
            share_prefix=self.shares_prefix,
            keep=keep,
            only_live=only_live,
            packed=self._models.packed,
            saving_min=MICROBATCH_SAVING_MIN if self._on_cpu else _GPU_BUCKET_SAVING_MIN,
            flat_apart=trained and self._tries_flat(batch.algorithm),
        )

    def _tries_flat(self, name: str) -> bool:
        """Whether rows without an advantage may be run forward only: never over ranks, which meet in every backward."""
        return self._shards is None and name not in self._never_flat and may_be_flat(self.algorithms[name])

    def check_forward(self, needs: Sequence[str]) -> None:
        """Raises TrainingError for what this trainer was not given."""
        have = {"logprobs": True, "entropy": True}
        have |= {"ref_logprobs": self._reference is not None, "teacher_logprobs": self._models.teacher is not None}
        have["values"] = self._critic is not None
        missing = sorted(name for name in needs if not have.get(name, False))
        if missing:
            able = ", ".join(name for name, is_there in have.items() if is_there)
            raise TrainingError(f"this backend was asked for {', '.join(missing)}; it can give {able}")

    def forward(self, share: Share, needs: Sequence[str], only_live: bool) -> dict[str, list[list[float]]]:
        """Each of `needs` for every row of the share [L], 0.0 where nothing was asked for."""
        rows = share.batch.rows
        number_of = {id(row): number for number, row in enumerate(rows)}
        found = {name: [[0.0] * len(row.tokens) for row in rows] for name in needs}
        own = tuple(name for name in needs if name != "ref_logprobs")
        for part in share.microbatches():
            chosen, wanted = _EMPTY_PASS
            if part:
                chosen = part
                wanted = [
                    [t for t in range(1, len(row.tokens)) if row.loss_mask[t] > 0 or not only_live] for row in part
                ]
            if not any(wanted):
                continue
            self._get_on()
            results = []
            temperature = share.batch.temperature
            if own:
                results.append(self._run_networks(self._models.ask, chosen, wanted, temperature, own, inference=True))
            if "ref_logprobs" in needs:
                assert self._reference is not None, "check_forward saw to it"
                with self._reference.in_place():
                    asked = ("logprobs",)
                    tensors, selection = self._run_networks(
                        self._models.ask, chosen, wanted, temperature, asked, inference=True
                    )
                results.append(({"ref_logprobs": tensors["logprobs"]}, selection))
            for tensors, selection in results if part else ():
                values = {name: iter(tensor.tolist()) for name, tensor in tensors.items()}
                for place, positions in zip(selection.rows, selection.positions, strict=True):
                    number = number_of[id(chosen[place])]
                    for name, stream in values.items():
                        for position in positions:
                            found[name][number][position] = next(stream)
        return found

    def forward_backward(self, share: Share) -> Reading:
        """Accumulate gradients and D; gives what was measured."""
        batch = share.batch
        algorithm = self.algorithms[batch.algorithm]
        requested = needs(algorithm)
        sums = Sums()
        told: list[bool] = []
        flat: list[int] = []
        try:
            with self._training_mode():
                for number, rows in enumerate(share.microbatches()):
                    if self._pass_flat(rows, batch, algorithm, requested, sums):
                        flat.append(number)
                        continue
                    learned = self._microbatch(rows, batch, algorithm, requested, sums)
                    told += [] if learned is None else [learned]
                if flat and not any(told):  # no gradient is not a gradient of 0: an optimizer goes on with the latter
                    self.networks(self._touch, requested).backward()
            reading = sums.read()
        except BaseException:
            self.forget_gradients()
            raise
        reading.learned = any(told) or bool(flat) if told or flat else None
        reading.forward_only = flat
        self._denominator += batch.denominator
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
        factor = lr_factor(settings, self.version)
        gradients = [[p.grad for p in chosen if p.grad is not None] for chosen, _ in self._parameter_sets()]
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
        for group, (_, lr) in zip(self._optimizer.param_groups, self._parameter_sets(), strict=True):
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
        assert self.adapter is not None, "whoever asked for it has looked"
        return lora.read_adapter_weights(self.adapter, whole)

    def check_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Raises TrainingError for names or shapes that are not those of what is trained."""
        own = self._loadable()
        wrong = sorted(set(own) ^ set(weights))
        wrong += sorted(name for name in set(own) & set(weights) if own[name].shape != weights[name].shape)
        if wrong:
            what = "model" if self.adapter is None else "adapter"
            raise TrainingError(f"these are not this {what}'s weights: {len(wrong)} of them differ, first {wrong[0]}")

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace what is trained; ranks above 0 are given nothing and get their shares of rank 0's."""
        self._settle()
        sharding.load_whole(self._loadable(), dict(weights), alone=self._shards is None)

    def _loadable(self) -> dict[str, Tensor]:
        return self.causal.state_dict() if self.adapter is None else lora.adapter_parameters(self.adapter)

    def save(self, folder: str) -> dict[str, Any]:
        """Write this rank's share of the trainer's tensors into `folder`, rank 0 also the weights; gives its random
        state.
        """
        checkpoint.write_tensors(Path(folder), self._tensors(), group=self._files_group, alone=self._shards is None)
        weights = self.get_weights("full" if self.adapter is None else "adapter")
        if self.rank == 0:
            checkpoint.write_weights(
                Path(folder), weights, causal=self.causal, adapter=self.adapter, source=self.source
            )
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
        checkpoint.check_folder(path, kind=self.kind, fingerprint=self._fingerprint)
        saved = checkpoint.saved_keys(path)
        has_critic = any(key.startswith("critic") for key in saved)
        if (self._critic is not None) != has_critic:
            has = "has no critic" if self._critic is not None else "has a critic"
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
        weights = checkpoint.read_weights(path, kind=self.kind, dtype=self._weights_dtype)
        self.check_weights(weights)
        return weights

    def load(self, path: str, weights: Mapping[str, Tensor]) -> None:
        """Restore what `save` wrote, whatever number of ranks wrote it; `weights` are those of `read_weights`."""
        self.load_weights(weights)
        tensors = self._loadable_tensors(checkpoint.saved_keys(path))
        checkpoint.read_tensors(path, tensors, group=self._files_group, alone=self._shards is None)
        self.forget_gradients()
        state = checkpoint.read_state(path)["backend"]
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
        """Drop a profile that nobody finished."""
        self._profile.discard()

    def speed(self, shares: Sequence[Share], readings: Sequence[Reading], seconds: float) -> dict[str, float]:
        """The `perf/` metrics of a `forward_backward` of these shares."""
        lora = self.adapter is not None
        return training_speed(
            self._size, shares, readings, seconds, device=self.device, dtype=self.compute_dtype, lora=lora
        )

    @property
    def kind(self) -> Literal["full", "adapter"]:
        """What a checkpoint of this trainer holds."""
        return "full" if self.adapter is None else "adapter"

    @property
    def fingerprint(self) -> str:
        """A hash of the names and shapes of the weights."""
        return self._fingerprint

    # --- the parts --------------------------------------------------------------------------------------------------

    @property
    def _critic(self) -> Critic | None:
        critic = self.networks.critic
        assert critic is None or isinstance(critic, Critic), critic
        return critic

    @property
    def _weights_dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.causal.dtype
        return dtype

    @property
    def _may_share_prefix(self) -> bool:
        settings = self._settings
        apart = settings.gradient_checkpointing or settings.layout == "packed" or self._shards is not None
        return settings.share_prefix and not apart

    @property
    def _bucket_saving_min(self) -> int:
        """How many padded tokens another pass has to save. Ranks run one pass a microbatch: they meet in each."""
        if self._shards is not None:
            return sys.maxsize
        return BUCKET_SAVING_MIN if self._on_cpu else _GPU_BUCKET_SAVING_MIN

    def _parameter_sets(self) -> list[tuple[list[nn.Parameter], float]]:
        """What is clipped together, and its learning rate: the policy, and the critic if there is one."""
        sets = [(self._parameters, self._settings.lr)]
        if self._critic is not None:
            sets.append(([p for p in self._critic.parameters() if p.requires_grad], self._critic_lr))
        return sets

    def _tensors(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the weights, and what it is read into: this rank's shares."""
        tensors: dict[str, Any] = {"optimizer": optimizer_tensors(self._optimizer, self._names)}
        if self._critic is not None:
            tensors["critic"] = dict(self._critic.state_dict())
        if self._reference is not None and self._reference.follows:
            names = [self._names[parameter] for parameter in self._parameters]
            tensors["reference"] = dict(zip(names, self._reference.tensors(), strict=True))
        return tensors

    @property
    def _files_group(self) -> Any:
        return None if self._shards is None else self._shards.ranks.files_group

    def _get_on(self) -> None:
        if self._shards is not None:
            self._shards.ranks.beating.progressed()

    def _settle(self) -> None:
        if self._shards is not None:
            sharding.reshard(self.networks)

    def _run_networks(self, function: Callable[..., Any], *args: Any, inference: bool = False) -> Any:
        """Call it where the networks can be run, without gradient. `inference` is for what no gradient meets later, and
        not for a sharded model, which keeps buffers.
        """
        with torch.inference_mode() if inference and self._shards is None else torch.no_grad():
            found = self.networks(function, *args)
        self._settle()
        return found

    def _microbatch(
        self, part: list[Row], batch: TrainBatch, algorithm: Algorithm, requested: frozenset[str], sums: Sums
    ) -> bool | None:
        """Add up one microbatch; False where no term's values carried a gradient, None where it was empty."""
        self._get_on()
        if not part:
            self.networks(self._touch, requested).backward()
            return None
        objective, nothing, measured = self.networks(self._objective, part, batch, algorithm, requested)
        learned = bool(objective.requires_grad)  # a loss may be constant in some microbatches
        if self._shards is not None:
            (objective + nothing).backward()  # ranks meet in the backward of every part of the model
        elif learned:
            objective.backward()
        with torch.no_grad():
            sums.add(measured)
        return learned

    def _pass_flat(
        self, part: list[Row], batch: TrainBatch, algorithm: Algorithm, requested: frozenset[str], sums: Sums
    ) -> bool:
        """Add up a microbatch without an advantage, if its gradient is 0: then it needs no backward."""
        if not is_flat(part) or not self._tries_flat(batch.algorithm):
            return False
        self._get_on()
        scored, values, ends = cut_off(*self._run_networks(self._score, part, batch, requested))
        objective, measured = self._evaluate(part, batch, algorithm, requested, scored, values)
        size = gradient_size(objective, ends)
        if size != 0.0:
            self._never_flat |= {batch.algorithm} if math.isfinite(size) else set()
            return False
        with torch.no_grad():
            sums.add(measured)
        return True

    def _touch(self, requested: frozenset[str]) -> Tensor:
        """A 0 that depends on all that is trained: an empty microbatch, in which a rank only meets the others."""
        rows, wanted = _EMPTY_PASS
        scored = self._models.score(rows, wanted, 1.0, requested - {"logits"})
        return self._nothing(scored, rows, wanted, requested)

    def _nothing(
        self, scored: Scored, rows: list[Row], wanted: Sequence[Sequence[int]], requested: frozenset[str]
    ) -> Tensor:
        nothing = scored.logprobs.sum() * 0.0
        if "values" in requested and self._critic is not None:
            nothing = nothing + self._critic.values(rows, wanted, scored.selection, scored.features).sum() * 0.0
        return nothing

    def _objective(
        self,
        rows: list[Row],
        batch: TrainBatch,
        algorithm: Algorithm,
        requested: frozenset[str],
    ) -> tuple[Tensor, Tensor, Microbatch]:
        """The sum of u * loss, a 0 that depends on every output of the networks, and what there is to measure."""
        scored, values = self._score(rows, batch, requested)
        nothing = scored.logprobs.sum() * 0.0
        if values is not None:
            nothing = nothing + values.sum() * 0.0
        objective, measured = self._evaluate(rows, batch, algorithm, requested, scored, values)
        return objective, nothing, measured

    def _score(self, rows: list[Row], batch: TrainBatch, requested: frozenset[str]) -> tuple[Scored, Tensor | None]:
        """What the policy gives at live tokens, and the critic's values if they are asked for."""
        wanted = [[t for t, weight in enumerate(row.loss_mask) if weight > 0] for row in rows]
        scored = self._models.score(rows, wanted, batch.temperature, requested)
        values = None
        if "values" in requested and self._critic is not None:
            values = self._critic.values(rows, wanted, scored.selection, scored.features)
        return scored, values

    def _evaluate(
        self,
        rows: list[Row],
        batch: TrainBatch,
        algorithm: Algorithm,
        requested: frozenset[str],
        scored: Scored,
        values: Tensor | None,
    ) -> tuple[Tensor, Microbatch]:
        """The sum of u * loss, and what there is to measure, of what the networks gave."""
        device = scored.logprobs.device
        tensors = make_streams(rows, scored.selection, batch.rewards, device) | scored.extra
        sampled = tensors.pop("sampled") > 0
        anchored = torch.ones_like(sampled) if "old_logprobs" in tensors else sampled
        policy = tensors.get("old_logprobs", scored.logprobs.detach())
        tensors["rollout_logprobs"] = torch.where(sampled, tensors["rollout_logprobs"], policy)
        if "old_logprobs" not in tensors:
            tensors["old_logprobs"] = tensors["rollout_logprobs"] if batch.anchor == "sampler" else policy
        tensors["logprobs"] = scored.logprobs
        tensors["entropy"] = scored.entropy if "entropy" in requested else scored.entropy.detach()
        if values is not None:
            tensors["values"] = values
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
        seen = {name: tensor.detach() for name, tensor in tensors.items()}
        seen |= {"sampled": sampled, "anchored": anchored}
        if weights is not None:
            seen["importance"] = weights.detach()
        return objective, Microbatch(seen, objective, evaluation, _clip_bounds(algorithm), scored.tokens)

    @contextlib.contextmanager
    def _training_mode(self) -> Iterator[None]:
        """transformers checkpoints activations in training mode only; all dropout was set to 0 before."""
        if not self._settings.gradient_checkpointing:
            yield
            return
        self.causal.train()
        try:
            yield
        finally:
            self.causal.eval()


def _norm(gradients: list[Tensor]) -> float:
    return float(sharding.whole_tensor(nn.utils.get_total_norm(gradients)))


def _decide_packing(causal: Any, paths: ModelPaths, settings: TorchSettings) -> bool:
    """Whether rows run packed. Raises ConfigError where that was asked for and this model cannot."""
    if settings.layout == "packed" and not paths.packs:
        reasons = "; ".join(note for note in paths.notes if "pack" in note)
        raise ConfigError(f"--training.layout packed: {reasons or 'this model cannot'}; type --training.layout buckets")
    return settings.layout == "packed" or (settings.layout == "auto" and paths.packs and prefers_packing(causal))


def keep_of(requested: frozenset[str]) -> Keep:
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
