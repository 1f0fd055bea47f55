"""A backend's commands: data and names, never functions, so that any rank can carry them out.

`Crew` is whoever carries them out together; `Alone` is the crew of a single process. That of several ranks stands in
`ranks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec
from torch import Tensor

from rollouts.training.backends.shares import Share
from rollouts.training.backends.trainer import Trainer

__all__ = ["Alone", "Command", "Crew", "execute"]


class Command(msgspec.Struct, kw_only=True):
    """What every rank does next; a `share` is its own part of a batch."""

    name: Literal[
        "forward",
        "forward_backward",
        "forget_gradients",
        "optim_step",
        "get_weights",
        "load_weights",
        "save",
        "load",
        "start_profile",
        "stop_profile",
        "close",
    ]
    share: Share | None = None
    needs: tuple[str, ...] = ()
    only_live: bool = False
    kind: Literal["full", "adapter"] = "full"
    path: str = ""


class Crew(Protocol):
    """All ranks of a backend, seen from rank 0."""

    size: int
    trainer: Trainer  # rank 0's own

    def call(
        self,
        command: Command,
        shares: Sequence[Share] | None = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> list[Any]:
        """Have every rank carry it out, each with its share; gives what each returned, rank 0 first.

        `weights` are for load_weights and load, and given to rank 0 only. Raises what rank 0 raises, or RankError.
        """
        ...

    def close(self) -> None:
        """The ranks end. Called once, when no command is under way."""
        ...


class Alone:
    """The crew of a single process."""

    size = 1

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def call(
        self,
        command: Command,
        shares: Sequence[Share] | None = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> list[Any]:
        """Carry it out here."""
        if shares is not None:
            command = msgspec.structs.replace(command, share=shares[0])
        return [execute(self.trainer, command, weights)]

    def close(self) -> None:
        """Nobody else has to be told."""


def execute(trainer: Trainer, command: Command, weights: Mapping[str, Tensor] | None = None) -> Any:
    """Carry out one command on this rank. Raises what the trainer raises."""
    match command.name:
        case "forward":
            assert command.share is not None, command.name
            return trainer.forward(command.share, command.needs, command.only_live)
        case "forward_backward":
            assert command.share is not None, command.name
            return trainer.forward_backward(command.share)
        case "forget_gradients":
            return trainer.forget_gradients()
        case "optim_step":
            return trainer.optim_step()
        case "get_weights":
            return trainer.get_weights(command.kind)
        case "load_weights":
            return trainer.load_weights(weights or {})
        case "save":
            return trainer.save(command.path)
        case "load":
            return trainer.load(command.path, weights or {})
        case "start_profile":
            return trainer.start_profile()
        case "stop_profile":
            return trainer.stop_profile(command.path)
        case "close":
            return None
