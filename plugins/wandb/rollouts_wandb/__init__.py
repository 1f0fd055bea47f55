"""Metrics to Weights & Biases. The library is imported when a run starts."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

from rollouts.errors import ConfigError
from rollouts.loggers import import_library, plain_settings

__all__ = ["WandbLogger"]


class WandbLogger:
    """Log every step to one W&B run, which is the same one again when the run folder is continued.

    Args:
        project: the W&B project
        name: the run's name; the run folder's where it is empty
        entity: user or team; your default one where it is empty
        group: runs to show together
        mode: online, offline (files in the run folder) or disabled

    Raises:
        UserError: wandb is not installed, or a run cannot be started (nobody is logged in, say).
    """

    def __init__(
        self,
        folder: str | Path,
        settings: Any,
        *,
        project: str = "rollouts",
        name: str = "",
        entity: str = "",
        group: str = "",
        mode: Literal["online", "offline", "disabled"] = "online",
    ) -> None:
        wandb = import_library("wandb", logger="wandb", install="rollouts-wandb")
        folder = Path(folder).resolve()
        try:
            self._run = wandb.init(
                project=project,
                name=name or folder.name,
                entity=entity or None,
                group=group or None,
                mode=mode,
                dir=str(folder),
                id=hashlib.sha256(f"{folder}".encode()).hexdigest()[:16],
                resume="allow" if mode == "online" else None,  # offline, the same id is enough for `wandb sync`
                config=plain_settings(settings),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"W&B did not start a run in project {project!r}: {error}; type `wandb login`, "
                "or use `--logger.wandb.mode offline`"
            ) from error

    def log(self, metrics: dict[str, float], step: int) -> None:
        """One row of W&B's history."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Upload (or, offline, write) what is pending and finish the run."""
        self._run.finish()
