"""The reference policy: a second set of the trained tensors, which takes the policy's place while it scores.

Only what is trained is kept twice: all weights, or with LoRA the adapters. A rule (algorithms/references.py) says how
the copy follows the policy. The exchange is of storage, not of values, so it costs nothing; all torch work of a backend
runs on one thread, so nobody else sees the policy meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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

    def state_dict(self) -> list[Tensor]:
        """The copy, for a checkpoint."""
        return [tensor.cpu() for tensor in self._tensors]

    def load_state_dict(self, tensors: Sequence[Tensor]) -> None:
        """Take up the copy of a checkpoint. Raises ConfigError where it does not fit."""
        shapes = [tuple(tensor.shape) for tensor in self._tensors]
        if [tuple(tensor.shape) for tensor in tensors] != shapes:
            raise ConfigError("the checkpoint's reference policy is of another model; give the run's own settings")
        with torch.no_grad():
            for own, given in zip(self._tensors, tensors, strict=True):
                own.copy_(given)

    def _exchange(self) -> None:
        for number, parameter in enumerate(self._parameters):
            parameter.data, self._tensors[number] = self._tensors[number], parameter.data


def _positional(rule: Callable[..., Any]) -> tuple[str, ...]:
    from rollouts.training.algorithms.needs import requests

    return requests(rule, "references")
