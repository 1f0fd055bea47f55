"""The models beside the policy: a critic, which is trained; a teacher and a reference, which are not.

Critic and teacher score the same rows as the policy. The reference is a copy of the trained tensors, which replaces
them while the reference scores. Not here: when these models run, and the critic's optimizer (`trainer`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rollouts.errors import ConfigError, ModelError
from rollouts.models.loading import load_hf_model, one_at_a_time
from rollouts.training.algorithms.algorithm import function_label, requests
from rollouts.training.algorithms.calls import call_author
from rollouts.training.algorithms.logprobs import topk_logprobs
from rollouts.training.backends.transformer import ModelPaths, RowInputs, inspect_model, run_features

T = TypeVar("T")


class _Scorer:
    """Computes a model's features."""

    def __init__(self, causal: Any, budgets: tuple[int, ...]) -> None:
        self.causal = causal
        self._budgets = budgets

    @functools.cached_property
    def paths(self) -> ModelPaths:
        """How to run this model. It is inspected on first use."""
        return inspect_model(self.causal, self._budgets)

    def features(self, inputs: RowInputs) -> Tensor:
        """Features [U, F] of the predictions."""
        with self.paths.attending():
            return run_features(self.paths, inputs)[0]


class Teacher(_Scorer):
    """A second model in this process. Computes logprobs of the policy's tokens, or of its own most likely ones."""

    def __init__(self, name: str, policy: ModelPaths, *, dtype: str, device: str, top_k: int) -> None:
        """Raise ModelError if the model cannot be loaded, or has another vocabulary than the policy."""
        causal = load_hf_model(name, dtype=dtype, device=device)
        super().__init__(causal.requires_grad_(False), policy.budgets)
        found = self.paths.vocabulary_size
        if found != policy.vocabulary_size:
            what = f"--teacher {name} has {found} tokens and the policy {policy.vocabulary_size}"
            raise ModelError(f"{what}; a teacher needs the tokenizer of the policy")
        self._top_k = min(top_k, found)

    @torch.no_grad()
    def logprobs(self, inputs: RowInputs, targets: Tensor, temperature: float) -> Tensor:
        """Logprobs [U] of `targets` [U]."""
        return self.paths.logprobs_and_entropy(self.features(inputs), targets, temperature)[0]

    @torch.no_grad()
    def top(self, inputs: RowInputs, temperature: float) -> tuple[Tensor, Tensor]:
        """The K most likely ids [U, K] and their logprobs [U, K]."""
        features, paths = self.features(inputs), self.paths
        size = paths.vocabulary_size
        return topk_logprobs(paths.head, features, self._top_k, vocabulary_size=size, temperature=temperature)


class Critic(nn.Module):
    """Values of states: a linear layer on the policy's trunk, or on the trunk of another model.

    The layer is fp32, and begins with zeros, so the critic does not change the first advantages.
    """

    def __init__(self, causal: Any, *, scorer: _Scorer | None = None) -> None:
        super().__init__()
        own = causal if scorer is None else scorer.causal
        place = causal.get_input_embeddings().weight.device
        with one_at_a_time():
            self.linear = nn.Linear(int(own.get_output_embeddings().in_features), 1, device=place)
            nn.init.zeros_(self.linear.weight)
            nn.init.zeros_(self.linear.bias)
        self.trunk = None if scorer is None else scorer.causal
        self.scorer = scorer

    def values(self, inputs: RowInputs, features: Tensor) -> Tensor:
        """Values [U] fp32 of the states before the tokens. `features` [U, F] are the policy's."""
        if self.scorer is not None:
            features = self.scorer.features(inputs)
        values: Tensor = self.linear(features.float()).squeeze(-1)
        return values

    @classmethod
    def load(cls, name: str, policy: Any, *, dtype: str, device: str, budgets: tuple[int, ...] = ()) -> Critic:
        """Make a critic. With the `name` "head", its trunk is that of the causal LM `policy`; else the trunk is the
        model of this name, whose weights are all trained. `budgets` are those of `inspect_model`.

        Raises ModelError, ConfigError. Call `check` once the model can run.
        """
        if name == "head":
            return cls(policy)
        causal = load_hf_model(name, dtype=dtype, device=device)
        head = causal.get_output_embeddings()
        if head.weight is not causal.get_input_embeddings().weight:
            head.requires_grad_(False)  # a critic's logits are never computed
        return cls(policy, scorer=_Scorer(causal, budgets))

    @torch.no_grad()
    def check(self, name: str, policy: ModelPaths) -> None:
        """Raise ConfigError if the model does not return hidden states."""
        paths = policy if self.scorer is None else self.scorer.paths
        ids = torch.zeros(1, 2, dtype=torch.long, device=paths.causal.get_input_embeddings().weight.device)
        features = paths.body(input_ids=ids, use_cache=False)
        if features.shape[-1] != self.linear.in_features:
            what = "--critic head: the model" if self.scorer is None else f"--critic {name}: it"
            raise ConfigError(
                f"{what} does not return the hidden states that a value head needs; type --critic with another"
            )


class Networks(nn.Module):
    """Everything that is trained, as one module: the policy `causal`, with its adapters, and the `critic`, if any.

    Parameter names begin with `causal` or `critic`. Run the networks inside `Networks.__call__` only: there the
    outermost weights of a sharded model are whole. The chunked head uses these weights directly.
    """

    def __init__(self, causal: nn.Module, critic: Critic | None = None) -> None:
        super().__init__()
        self.causal = causal
        self.critic = critic

    def forward(self, function: Callable[..., T], *args: Any) -> T:
        """Call `function(*args)`, which may run the networks."""
        return function(*args)


class ReferencePolicy:
    """A copy of `parameters`. The `rule` changes the copy when it is made, and after every optimizer step.

    Only trained tensors are copied: all weights, or with LoRA the adapters. While the reference scores, the copy and
    the trained tensors exchange their storage, which costs nothing. This is safe, because all torch work of a backend
    runs in one thread. With a sharded model, each rank exchanges the values of its shards.

    Raises ConfigError if the rule needs adapters and there are none, and TrainingError if the rule raises.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], rule: Callable[..., Any], *, adapters: bool) -> None:
        self._parameters = list(parameters)
        # In the order of the parameters, because a checkpoint stores them by the parameters' names.
        self.tensors = [parameter.detach().clone() for parameter in parameters]
        self._rule = rule
        self._adapters = adapters
        if not adapters and "adapters" in requests(rule, "references"):
            what = f"--reference {function_label(rule)} needs adapters, and this run trains all weights"
            raise ConfigError(f"{what}; type --lora-rank 16, or --reference frozen")
        self.follow(0)

    def follow(self, version: int) -> None:
        """Apply the rule. `version` is the number of optimizer steps of the policy."""
        policy = [parameter.detach() for parameter in self._parameters]
        available: dict[str, Any] = {"reference": self.tensors, "policy": policy, "version": version}
        if self._adapters:
            available["adapters"] = self.tensors
        with torch.no_grad():
            call_author("reference", self._rule, available)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside the block, the model is the reference policy."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @property
    def follows(self) -> bool:
        """Whether the rule may change the copy. If not, the copy equals the run's first model, and no checkpoint stores
        it.
        """
        return bool(requests(self._rule, "references"))

    def _exchange(self) -> None:
        for number, parameter in enumerate(self._parameters):
            other = self.tensors[number]
            if isinstance(other, DTensor):  # the storage belongs to the sharded model, so exchange values
                mine, other = cast(DTensor, parameter.detach()).to_local(), other.to_local()
                kept = mine.clone()
                mine.copy_(other)
                other.copy_(kept)
            else:
                parameter.data, self.tensors[number] = self.tensors[number], parameter.data
