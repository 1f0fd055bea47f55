"""Log metrics to Weights & Biases. The library is imported when a run starts."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rollouts.errors import ConfigError
from rollouts.loggers import Row, SampleSettings, import_library, plain_settings

__all__ = ["WandbLogger"]


class WandbLogger:
    """Log every step to one W&B run, and some rollouts as tables. A resumed run continues the W&B run whose id is in
    `wandb_run_id.txt` in its folder. W&B cannot replace a step, so steps that it already has are not sent again.

    W&B's own variables, such as WANDB_DIR and WANDB_TAGS, apply where no setting is given. WANDB_RUN_ID names one W&B
    run, so do not use it with several runs, such as those of --seeds or the phases of mode sft+rl.

    Args:
        project: the W&B project (default: WANDB_PROJECT, else rollouts)
        run_name: the name of the W&B run (default: WANDB_NAME, else the name of the run folder)
        entity: the W&B user or team (default: WANDB_ENTITY, else your W&B default)
        group: a name shared by runs that W&B shows together (default: WANDB_RUN_GROUP)
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
        samples: SampleSettings = SampleSettings(),
    ) -> None:
        self.sample_settings = samples
        project = project or os.environ.get("WANDB_PROJECT") or "rollouts"
        mode_there = mode or os.environ.get("WANDB_MODE") or "online"  # WANDB_MODE has more values than `mode`
        wandb = self._wandb = import_library("wandb", logger="wandb", install="wandb")
        folder = Path(folder).resolve()
        # An argument of `init` replaces a variable, so an argument is given only where there is no variable.
        others = {"silent": ("WANDB_SILENT", True), "console": ("WANDB_CONSOLE", "off")}
        try:
            self._run = wandb.init(
                project=project,
                name=run_name or os.environ.get("WANDB_NAME") or folder.name,
                entity=entity or None,
                group=group or None,
                mode=mode,
                dir=None if os.environ.get("WANDB_DIR") else str(folder),
                id=_run_id(folder),
                # Offline, `wandb sync` needs only the id.
                resume="allow" if mode_there == "online" and not os.environ.get("WANDB_RESUME") else None,
                config=plain_settings(settings),
                settings=wandb.Settings(**{name: v for name, (key, v) in others.items() if not os.environ.get(key)}),
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

    def log_samples(self, name: str, rows: Sequence[Row], step: int) -> None:
        """A table in the same row of W&B's history."""
        if step >= self._next_step:
            table = self._wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
            self._run.log({name: table}, step=step)

    def close(self) -> None:
        """Upload the metrics that are not sent yet (offline: write them), and finish the run."""
        self._run.finish()


def _run_id(folder: Path) -> str:
    """The id of the W&B run for this folder: WANDB_RUN_ID, else that of the folder. A new folder gets a new id, even at
    the path of an earlier run.
    """
    path = folder / "wandb_run_id.txt"
    given = os.environ.get("WANDB_RUN_ID")
    if given or not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((given or uuid.uuid4().hex[:16]) + "\n")
    return path.read_text().strip()
