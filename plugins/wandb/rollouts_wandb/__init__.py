"""Metrics to Weights & Biases. The library is imported when a run starts."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any, Literal

from rollouts.errors import ConfigError
from rollouts.loggers import import_library, plain_settings

__all__ = ["WandbLogger"]


class WandbLogger:
    """Log every step to one W&B run, which is the same one again when the run folder is continued: its id stands in
    `wandb_run_id.txt`. W&B takes no step back: those that it has already are not sent again.

    Args:
        project: the W&B project; that of WANDB_PROJECT where it is empty, else rollouts
        name: the run's name; that of WANDB_NAME where it is empty, else the run folder's
        entity: user or team; your default one where it is empty
        group: runs to show together
        mode: online, offline (files in the run folder) or disabled; that of WANDB_MODE where it is none, else online

    Raises:
        UserError: wandb is not installed, or a run cannot be started (nobody is logged in, say).
    """

    def __init__(
        self,
        folder: str | Path,
        settings: Any,
        first_step: int,
        *,
        project: str = "",
        name: str = "",
        entity: str = "",
        group: str = "",
        mode: Literal["online", "offline", "disabled"] | None = None,
    ) -> None:
        project = project or os.environ.get("WANDB_PROJECT") or "rollouts"
        mode_there = mode or os.environ.get("WANDB_MODE") or "online"  # W&B reads more words there than we have modes
        wandb = import_library("wandb", logger="wandb", install="rollouts-wandb")
        folder = Path(folder).resolve()
        try:
            self._run = wandb.init(
                project=project,
                name=name or os.environ.get("WANDB_NAME") or folder.name,
                entity=entity or None,
                group=group or None,
                mode=mode,
                dir=str(folder),
                id=_run_id(folder),
                resume="allow" if mode_there == "online" else None,  # offline, the same id is enough for `wandb sync`
                config=plain_settings(settings),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"W&B did not start a run in project {project!r}: {error}; type `wandb login`, "
                "or use `--logger.wandb.mode offline`"
            ) from error
        self._next_step = max(first_step, int(self._run.step))

    def log(self, metrics: dict[str, float], step: int) -> None:
        """One row of W&B's history."""
        if step >= self._next_step:
            self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Upload (or, offline, write) what is pending and finish the run."""
        self._run.finish()


def _run_id(folder: Path) -> str:
    """The id that W&B knows this run folder by; a new folder gets a new one, whatever stood at its place before."""
    path = folder / "wandb_run_id.txt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:16] + "\n")
    return path.read_text().strip()
