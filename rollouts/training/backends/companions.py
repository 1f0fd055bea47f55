"""The models beside the policy: a teacher that is only asked, and a critic that is trained with the policy.

Both score the same rows as the policy does; what they give is put into the order of the policy's selection. Left out:
when they are asked, and their optimizer (`torch`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rollouts.errors import ConfigError, ModelError
from rollouts.training.algorithms.logprobs import logprobs_and_entropy, topk_logprobs
from rollouts.training.backends.transformer import ModelPaths, Selection, inspect_model, run_rows
from rollouts.training.batching import plan_layout
from rollouts.training.models import load_hf_model
from rollouts.training.types import Row

__all__ = ["Critic", "Teacher", "check_critic", "load_critic", "load_teacher"]


class _Scorer:
    """A model's features of the tokens that a selection names, in its order."""

    def __init__(self, causal: Any, *, bucket_saving_min: int, share_prefix: bool = True) -> None:
        self.causal = causal
        self._bucket_saving_min = bucket_saving_min
        self._share_prefix = share_prefix

    @functools.cached_property
    def paths(self) -> ModelPaths:
        """How this model is run; found out at the first use."""
        return inspect_model(self.causal, share_prefix=self._share_prefix)

    def features(self, rows: Sequence[Row], wanted: Sequence[Sequence[int]], like: Selection) -> Tensor:
        """[T, F], row by row and position by position as in `like`."""
        share = self.paths.share_prefix
        layout = plan_layout(rows, share_prefix=share, bucket_saving_min=self._bucket_saving_min)
        features, own = run_rows(self.paths, rows, layout, wanted)
        if own == like:
            return features
        place: dict[tuple[int, int], int] = {}
        for row, positions in zip(own.rows, own.positions, strict=True):
            for position in positions:
                place[row, position] = len(place)
        order = [place[row, t] for row, positions in zip(like.rows, like.positions, strict=True) for t in positions]
        return features.index_select(0, torch.tensor(order, device=features.device))


class Teacher:
    """A second model in this process: its logprobs of what the policy sampled, or of its own likeliest tokens."""

    def __init__(self, causal: Any, *, top_k: int, bucket_saving_min: int) -> None:
        for parameter in causal.parameters():
            parameter.requires_grad_(False)
        self._scorer = _Scorer(causal, bucket_saving_min=bucket_saving_min)
        self._top_k = min(top_k, self._scorer.paths.vocabulary_size)

    @torch.no_grad()
    def logprobs(
        self,
        rows: Sequence[Row],
        wanted: Sequence[Sequence[int]],
        like: Selection,
        targets: Tensor,
        temperature: float | Tensor,
    ) -> Tensor:
        """Logprobs [T] of `targets` [T]."""
        paths = self._scorer.paths
        features = self._scorer.features(rows, wanted, like)
        found, _ = logprobs_and_entropy(
            paths.head, features, targets, vocabulary_size=paths.vocabulary_size, temperature=temperature
        )
        return found

    @torch.no_grad()
    def top(
        self, rows: Sequence[Row], wanted: Sequence[Sequence[int]], like: Selection, temperature: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        """The K likeliest ids [T, K] and their logprobs [T, K]."""
        paths = self._scorer.paths
        features = self._scorer.features(rows, wanted, like)
        return topk_logprobs(
            paths.head, features, self._top_k, vocabulary_size=paths.vocabulary_size, temperature=temperature
        )


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

    def values(self, rows: Sequence[Row], wanted: Sequence[Sequence[int]], like: Selection, features: Tensor) -> Tensor:
        """Values [T] fp32 of the states in which the tokens were chosen; `features` [T, F] are the policy's."""
        if self.scorer is not None:
            features = self.scorer.features(rows, wanted, like)
        values: Tensor = self.linear(features.float()).squeeze(-1)
        return values


def load_teacher(name: str, policy: ModelPaths, *, dtype: str, device: str, top_k: int, saving: int) -> Teacher:
    """Raises ModelError where it cannot be loaded, or does not speak the policy's tokens."""
    causal = load_hf_model(name, dtype=dtype, device=device)
    teacher = Teacher(causal, top_k=top_k, bucket_saving_min=saving)
    found = teacher._scorer.paths.vocabulary_size
    if found != policy.vocabulary_size:
        raise ModelError(
            f"--teacher {name} knows {found} tokens and the policy {policy.vocabulary_size}; a teacher needs the "
            "tokenizer of the policy"
        )
    return teacher


def load_critic(name: str, policy: Any, *, dtype: str, device: str, saving: int, share_prefix: bool = True) -> Critic:
    """`head`: on the trunk of the causal LM `policy`; else the model of this name, trained whole.

    Raises ModelError, ConfigError. Whether it can work is checked by `check_critic`, once it can be run.
    """
    if name == "head":
        return Critic(policy)
    scorer = _Scorer(
        load_hf_model(name, dtype=dtype, device=device), bucket_saving_min=saving, share_prefix=share_prefix
    )
    head = scorer.causal.get_output_embeddings()
    tied = head.weight is scorer.causal.get_input_embeddings().weight
    if not tied:
        for parameter in head.parameters():  # the logits of a critic are never asked for
            parameter.requires_grad_(False)
    return Critic(policy, scorer=scorer)


def check_critic(critic: Critic, name: str, policy: ModelPaths) -> None:
    """Raises ConfigError where the model does not show hidden states."""
    paths = policy if critic.scorer is None else critic.scorer.paths
    with torch.no_grad():
        ids = torch.zeros(1, 2, dtype=torch.long, device=paths.causal.get_input_embeddings().weight.device)
        features, _ = paths.body(input_ids=ids, use_cache=False)
    if features.shape[-1] != critic.linear.in_features:
        what = "--critic head: the model" if critic.scorer is None else f"--critic {name}: it"
        raise ConfigError(f"{what} does not show the hidden states that a value head needs; type --critic with another")
