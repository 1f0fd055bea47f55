"""The reference policy: a second set of the trained tensors, which takes the policy's place while it scores.

Only what is trained is kept twice: all weights, or with LoRA the adapters. A rule (algorithms/references.py) says how
the copy follows the policy. The exchange is of storage, not of values, so it costs nothing; all torch work of a backend
runs on one thread, so nobody else sees the policy meanwhile. Of a sharded model each rank exchanges its shards' values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rollouts.errors import ConfigError, RolloutsError, TrainingError, words_of
from rollouts.plugins.signature import call_with
from rollouts.training.algorithms.algorithm import function_label

__all__ = ["ReferencePolicy"]


class ReferencePolicy:
    """A copy of `parameters`, changed by `rule` once now and after every optimizer step.

    Raises ConfigError where the rule needs adapters and there are none; TrainingError, naming it, for what it raises.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], rule: Callable[..., Any], *, adapters: bool) -> None:
        self._parameters = list(parameters)
        self._tensors = [parameter.detach().clone() for parameter in parameters]
        self._rule = rule
        self._adapters = adapters
        if not adapters and "adapters" in _positional(rule):
            raise ConfigError(
                f"--reference {function_label(rule)} needs adapters, and this run trains all weights; type --lora-rank "
                "16, or --reference frozen"
            )
        self.follow(0)

    def follow(self, version: int) -> None:
        """Let the rule change the copy; `version` counts the policy's optimizer steps."""
        available: dict[str, Any] = {
            "reference": self._tensors,
            "policy": [parameter.detach() for parameter in self._parameters],
            "version": version,
        }
        if self._adapters:
            available["adapters"] = self._tensors
        try:
            with torch.no_grad():
                call_with(self._rule, available)
        except RolloutsError:
            raise
        except Exception as error:  # the author's code may raise anything
            raise TrainingError(f"the reference {function_label(self._rule)} raised {words_of(error)}") from error

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
        return bool(_positional(self._rule))

    def tensors(self) -> list[Tensor]:
        """The copy itself, in the order of the parameters: a checkpoint is written from it, and read into it."""
        return self._tensors

    def _exchange(self) -> None:
        for number, parameter in enumerate(self._parameters):
            other = self._tensors[number]
            if isinstance(other, DTensor):  # a shard's storage is the sharded model's own, so the values change
                mine, other = cast(DTensor, parameter.detach()).to_local(), other.to_local()
                kept = mine.clone()
                mine.copy_(other)
                other.copy_(kept)
            else:
                parameter.data, self._tensors[number] = self._tensors[number], parameter.data


def _positional(rule: Callable[..., Any]) -> tuple[str, ...]:
    from rollouts.training.algorithms.needs import requests

    return requests(rule, "references")
