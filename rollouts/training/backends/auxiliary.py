"""The models beside the policy: a critic that is trained with it, a teacher and a reference that are only asked.

Critic and teacher score the same rows as the policy does; what they give is put into the order of the policy's
selection. The reference is a second set of the trained tensors, which takes the policy's place while it scores. Left
out: when they are asked, and the critic's optimizer (`trainer`).
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
from rollouts.training.algorithms.algorithm import function_label, requests
from rollouts.training.algorithms.calls import call_author
from rollouts.training.algorithms.logprobs import topk_logprobs
from rollouts.training.backends.transformer import ModelPaths, Selection, inspect_model, run
from rollouts.training.models import load_hf_model
from rollouts.training.types import Row

T = TypeVar("T")

Asked = tuple[Sequence[Row], Sequence[Sequence[int]]]
"""Rows, and of each the positions whose tokens are asked for."""


class _Scorer:
    """A model's features of the tokens that a selection names, in its order. It is run as `how` says."""

    def __init__(self, causal: Any, **how: Any) -> None:
        self.causal = causal
        self._how = how

    @functools.cached_property
    def paths(self) -> ModelPaths:
        """How this model is run; found out at the first use."""
        return inspect_model(self.causal, **self._how)

    def features(self, asked: Asked, like: Selection) -> Tensor:
        """[T, F], row by row and position by position as in `like`."""
        features, own, _ = run(self.paths, *asked)
        if own == like:
            return features
        place = {token: number for number, token in enumerate(own.tokens())}
        order = [place[token] for token in like.tokens()]
        return features.index_select(0, torch.tensor(order, device=features.device))


class Teacher(_Scorer):
    """A second model in this process: its logprobs of what the policy sampled, or of its own likeliest tokens."""

    def __init__(self, name: str, policy: ModelPaths, *, dtype: str, device: str, top_k: int) -> None:
        """Raises ModelError where it cannot be loaded, or does not speak the policy's tokens."""
        causal = load_hf_model(name, dtype=dtype, device=device)
        super().__init__(causal.requires_grad_(False), bucket_saving_min=policy.bucket_saving_min)
        found = self.paths.vocabulary_size
        if found != policy.vocabulary_size:
            raise ModelError(
                f"--teacher {name} knows {found} tokens and the policy {policy.vocabulary_size}; a teacher needs the "
                "tokenizer of the policy"
            )
        self._top_k = min(top_k, found)

    @torch.no_grad()
    def logprobs(self, asked: Asked, like: Selection, targets: Tensor, temperature: float | Tensor) -> Tensor:
        """Logprobs [T] of `targets` [T]."""
        return self.paths.logprobs_and_entropy(self.features(asked, like), targets, temperature)[0]

    @torch.no_grad()
    def top(self, asked: Asked, like: Selection, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
        """The K likeliest ids [T, K] and their logprobs [T, K]."""
        features, paths = self.features(asked, like), self.paths
        size = paths.vocabulary_size
        return topk_logprobs(paths.head, features, self._top_k, vocabulary_size=size, temperature=temperature)


class Critic(nn.Module):
    """Values of states: a linear layer on the policy's trunk, or on that of a model of its own.

    The layer begins at 0, so that the first advantages are those of no critic. It is fp32.
    """

    def __init__(self, causal: Any, *, scorer: _Scorer | None = None) -> None:
        super().__init__()
        own = causal if scorer is None else scorer.causal
        place = causal.get_input_embeddings().weight.device
        self.linear = nn.Linear(int(own.get_output_embeddings().in_features), 1, device=place)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.trunk = None if scorer is None else scorer.causal
        self.scorer = scorer

    def values(self, asked: Asked, like: Selection, features: Tensor) -> Tensor:
        """Values [T] fp32 of the states in which the tokens were chosen; `features` [T, F] are the policy's."""
        if self.scorer is not None:
            features = self.scorer.features(asked, like)
        values: Tensor = self.linear(features.float()).squeeze(-1)
        return values

    @classmethod
    def load(cls, name: str, policy: Any, *, dtype: str, device: str, **how: Any) -> Critic:
        """`head`: on the trunk of the causal LM `policy`; else the model of this name, trained whole and run as `how`
        says.

        Raises ModelError, ConfigError. Whether it can work is for `check`, once it can be run.
        """
        if name == "head":
            return cls(policy)
        causal = load_hf_model(name, dtype=dtype, device=device)
        head = causal.get_output_embeddings()
        if head.weight is not causal.get_input_embeddings().weight:
            head.requires_grad_(False)  # the logits of a critic are never asked for
        return cls(policy, scorer=_Scorer(causal, **how))

    @torch.no_grad()
    def check(self, name: str, policy: ModelPaths) -> None:
        """Raises ConfigError where the model does not show hidden states."""
        paths = policy if self.scorer is None else self.scorer.paths
        ids = torch.zeros(1, 2, dtype=torch.long, device=paths.causal.get_input_embeddings().weight.device)
        features, _ = paths.body(input_ids=ids, use_cache=False)
        if features.shape[-1] != self.linear.in_features:
            what = "--critic head: the model" if self.scorer is None else f"--critic {name}: it"
            raise ConfigError(
                f"{what} does not show the hidden states that a value head needs; type --critic with another"
            )


class Networks(nn.Module):
    """Everything that is trained, as one module: the policy `causal` (adapters injected), and `critic` if there is one.

    Names of parameters begin with either. Whatever runs them runs inside `Networks.__call__`: there a sharded model has
    its outermost weights whole, also where they are used without calling their module (the chunked head).
    """

    def __init__(self, causal: nn.Module, critic: Critic | None = None) -> None:
        super().__init__()
        self.causal = causal
        self.critic = critic

    def forward(self, function: Callable[..., T], *args: Any) -> T:
        """Call `function(*args)`, which may run the networks."""
        return function(*args)


class ReferencePolicy:
    """A copy of `parameters`, changed by `rule` once now and after every optimizer step.

    Only what is trained is kept twice: all weights, or with LoRA the adapters. The exchange is of storage, not of
    values, so it costs nothing; all torch work of a backend runs on one thread, so nothing else sees the policy
    meanwhile. Of a sharded model each rank exchanges its shards' values.

    Raises ConfigError where the rule needs adapters and there are none; TrainingError, naming it, for what it raises.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], rule: Callable[..., Any], *, adapters: bool) -> None:
        self._parameters = list(parameters)
        # In the order of the parameters: a checkpoint is written from them, and read into them.
        self.tensors = [parameter.detach().clone() for parameter in parameters]
        self._rule = rule
        self._adapters = adapters
        if not adapters and "adapters" in requests(rule, "references"):
            raise ConfigError(
                f"--reference {function_label(rule)} needs adapters, and this run trains all weights; type --lora-rank "
                "16, or --reference frozen"
            )
        self.follow(0)

    def follow(self, version: int) -> None:
        """Let the rule change the copy; `version` counts the policy's optimizer steps."""
        available: dict[str, Any] = {
            "reference": self.tensors,
            "policy": [parameter.detach() for parameter in self._parameters],
            "version": version,
        }
        if self._adapters:
            available["adapters"] = self.tensors
        with torch.no_grad():
            call_author("reference", self._rule, available)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The model is the reference policy inside."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @property
    def follows(self) -> bool:
        """Whether the rule may move the copy. One whose rule names nothing is made again from the model that the run
        began with, so no checkpoint has to keep it.
        """
        return bool(requests(self._rule, "references"))

    def _exchange(self) -> None:
        for number, parameter in enumerate(self._parameters):
            other = self.tensors[number]
            if isinstance(other, DTensor):  # a shard's storage is the sharded model's own, so the values change
                mine, other = cast(DTensor, parameter.detach()).to_local(), other.to_local()
                kept = mine.clone()
                mine.copy_(other)
                other.copy_(kept)
            else:
                parameter.data, self.tensors[number] = self.tensors[number], parameter.data
