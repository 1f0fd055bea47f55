"""Rows through the models that a trainer has: the policy, the critic on it or beside it, the teacher.

Left out: which rows when, losses and gradients (`trainer`); one model by itself (`transformer`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rollouts.training.algorithms.logprobs import logprobs_and_entropy, logprobs_with_alternatives, token_logprobs
from rollouts.training.backends.companions import Critic, Teacher
from rollouts.training.backends.streams import targets_of, temperatures_of
from rollouts.training.backends.transformer import ModelPaths, Selection, run_packed, run_rows
from rollouts.training.batching import plan_layout
from rollouts.training.types import Row

__all__ = ["Models", "Scored"]


class Scored(NamedTuple):
    """What one run of rows gives for T selected tokens. `tokens` is (run, run with padding)."""

    logprobs: Tensor
    entropy: Tensor
    features: Tensor
    selection: Selection
    tokens: tuple[int, int]
    extra: dict[str, Tensor]


@dataclass
class Models:
    """The policy by its `paths`, and what is beside it. Rows run `packed`, or padded in buckets, of which another one
    has to save `bucket_saving_min` padded tokens.
    """

    paths: ModelPaths
    critic: Critic | None
    teacher: Teacher | None
    packed: bool
    bucket_saving_min: int

    @property
    def shares_prefix(self) -> bool:
        """Whether prompts that rows share are run once."""
        return self.paths.share_prefix and not self.packed

    def ask(
        self, rows: list[Row], wanted: Sequence[Sequence[int]], temperature: float, needs: tuple[str, ...]
    ) -> tuple[dict[str, Tensor], Selection]:
        """Each of `needs` [T] by the policy, the critic or the teacher."""
        features, selection, _ = self._run(rows, wanted)
        targets = targets_of(rows, selection, features.device)
        divisor = temperatures_of(rows, selection, temperature, features.device)
        tensors: dict[str, Tensor] = {}
        if {"logprobs", "entropy"} & set(needs):
            head, size = self.paths.head, self.paths.vocabulary_size
            both = logprobs_and_entropy(head, features, targets, vocabulary_size=size, temperature=divisor)
            tensors = {"logprobs": both[0], "entropy": both[1]}
        if self.critic is not None and "values" in needs:
            tensors["values"] = self.critic.values(rows, wanted, selection, features)
        if self.teacher is not None and "teacher_logprobs" in needs:
            tensors["teacher_logprobs"] = self.teacher.logprobs(rows, wanted, selection, targets, divisor)
        return {name: tensors[name] for name in needs}, selection

    def _run(self, rows: list[Row], wanted: Sequence[Sequence[int]]) -> tuple[Tensor, Selection, tuple[int, int]]:
        """Features [T, F], which tokens they predict, and (tokens, tokens with padding) that were run."""
        if self.packed:
            features, selection = run_packed(self.paths, rows, [list(range(len(rows)))], wanted)
            real = sum(len(row.tokens) for row in rows)
            return features, selection, (real, real)
        layout = plan_layout(rows, share_prefix=self.shares_prefix, bucket_saving_min=self.bucket_saving_min)
        features, selection = run_rows(self.paths, rows, layout, wanted)
        lengths = [len(row.tokens) for row in rows]
        real = sum(map(len, layout.prefixes)) + sum(lengths) - sum(layout.starts)
        return features, selection, (real, layout.padded_tokens(lengths))

    def score(
        self,
        rows: list[Row],
        wanted: Sequence[Sequence[int]],
        temperature: float,
        requested: frozenset[str] = frozenset(),
    ) -> Scored:
        """Run the rows; `extra` holds what `requested` names beyond logprobs and entropy: logits, or the teacher's
        likeliest tokens.
        """
        features, selection, tokens = self._run(rows, wanted)
        device = features.device
        targets = targets_of(rows, selection, device)
        divisor = temperatures_of(rows, selection, temperature, device)
        extra: dict[str, Tensor] = {}
        if requested & {"topk_logprobs", "teacher_topk_ids", "teacher_topk_logprobs"}:
            assert self.teacher is not None, "check_needs saw to it"
            ids, theirs = self.teacher.top(rows, wanted, selection, divisor)
            extra = {"teacher_topk_ids": ids, "teacher_topk_logprobs": theirs}
        if "logits" in requested:
            logits = self.paths.head(features)
            logits = logits if logits.dtype == torch.float64 else logits.float()
            logits = logits / (divisor[:, None] if isinstance(divisor, Tensor) else divisor)
            extra["logits"] = logits
            logprobs, entropy = token_logprobs(logits, targets)
            if "topk_logprobs" in requested:
                extra["topk_logprobs"] = torch.log_softmax(logits, -1).gather(-1, extra["teacher_topk_ids"])
        else:
            head, size = self.paths.head, self.paths.vocabulary_size
            if "topk_logprobs" in requested:
                logprobs, entropy, extra["topk_logprobs"] = logprobs_with_alternatives(
                    head, features, targets, extra["teacher_topk_ids"], vocabulary_size=size, temperature=divisor
                )
            else:
                logprobs, entropy = logprobs_and_entropy(
                    head, features, targets, vocabulary_size=size, temperature=divisor
                )
        return Scored(logprobs, entropy, features, selection, tokens, extra)
