"""Log metrics to Weights & Biases. The library is imported when a run starts."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any, Literal

from rollouts.errors import ConfigError
from rollouts.loggers import import_library, plain_settings

__all__ = ["WandbLogger"]


class WandbLogger:
    """Log every step to one W&B run. A resumed run continues the W&B run whose id is in `wandb_run_id.txt` in its
    folder. W&B cannot replace a step, so steps that it already has are not sent again.

    Args:
        project: the W&B project (default: WANDB_PROJECT, else rollouts)
        run_name: the name of the W&B run (default: WANDB_NAME, else the name of the run folder)
        entity: the W&B user or team (default: your W&B default)
        group: a name shared by runs that W&B shows together
        mode: online, offline (writes files in the run folder) or disabled (default: WANDB_MODE, else online)

    Raises:
        UserError: wandb is not installed.
        ConfigError: W&B cannot start a run, for example because you are not logged in.
    """

    def __init__(
        self,
        folder: str | Path,
        settings: Any,
        first_step: int,
        *,
        project: str = "",
        run_name: str = "",
        entity: str = "",
        group: str = "",
        mode: Literal["online", "offline", "disabled"] | None = None,
    ) -> None:
        project = project or os.environ.get("WANDB_PROJECT") or "rollouts"
        mode_there = mode or os.environ.get("WANDB_MODE") or "online"  # WANDB_MODE has more values than `mode`
        wandb = import_library("wandb", logger="wandb", install="wandb")
        folder = Path(folder).resolve()
        try:
            self._run = wandb.init(
                project=project,
                name=run_name or os.environ.get("WANDB_NAME") or folder.name,
                entity=entity or None,
                group=group or None,
                mode=mode,
                dir=str(folder),
                id=_run_id(folder),
                resume="allow" if mode_there == "online" else None,  # offline, `wandb sync` needs only the id
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
        """Upload the metrics that are not sent yet (offline: write them), and finish the run."""
        self._run.finish()


def _run_id(folder: Path) -> str:
    """The id of the W&B run for this folder. A new folder gets a new id, even at the path of an earlier run."""
    path = folder / "wandb_run_id.txt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:16] + "\n")
    return path.read_text().strip()
