"""Write metrics to TensorBoard event files in the run folder. tensorboardX is imported when a run starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollouts.loggers import import_library, plain_settings

__all__ = ["TensorBoardLogger"]


class TensorBoardLogger:
    """Write every metric as a scalar, and the run's settings as text, to `folder/subfolder`. A run that resumes at
    `first_step` hides its earlier values from that step on.

    Args:
        subfolder: the folder of the event files, inside the run folder
        flush_seconds: seconds between writes to the disk

    Raises:
        UserError: tensorboardX is not installed.
    """

    def __init__(
        self,
        folder: str | Path,
        settings: Any,
        first_step: int,
        *,
        subfolder: str = "tensorboard",
        flush_seconds: int = 10,
    ) -> None:
        library = import_library("tensorboardX", logger="tensorboard", install="tensorboardX")
        self._writer = library.SummaryWriter(
            str(Path(folder) / subfolder),
            flush_secs=flush_seconds,
            purge_step=first_step,
            filename_suffix=f".{first_step:06d}",  # tensorboardX names files by the second; two runs could share one
        )
        text = json.dumps(plain_settings(settings), indent=2, ensure_ascii=False)
        self._writer.add_text("settings", "\n".join("    " + line for line in text.splitlines()))

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Write one scalar for each metric. TensorBoard shows NaN values."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)

    def close(self) -> None:
        """Write the values that are still in memory, and close the file."""
        self._writer.close()
