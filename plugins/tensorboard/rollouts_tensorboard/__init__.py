"""Write metrics to TensorBoard event files in the run folder. tensorboardX is imported when a run starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollouts.loggers import Row, SampleSettings, import_library, plain_settings

__all__ = ["TensorBoardLogger"]


class TensorBoardLogger:
    """Write every metric as a scalar, and the run's settings and some rollouts as text, to `folder/subfolder`. A run
    that resumes at `first_step` hides its earlier values from that step on.

    Args:
        subfolder: the folder of the event files: a name inside the run folder, or an absolute path
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
        samples: SampleSettings = SampleSettings(),
    ) -> None:
        self.sample_settings = samples
        library = import_library("tensorboardX", logger="tensorboard", install="tensorboardX")
        self._writer = library.SummaryWriter(
            str(Path(folder) / subfolder),
            flush_secs=flush_seconds,
            purge_step=first_step,
            filename_suffix=f".{first_step:06d}",  # tensorboardX names files by the second; two runs could share one
        )
        self._writer.add_text("settings", _code(json.dumps(plain_settings(settings), indent=2, ensure_ascii=False)))

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Write one scalar for each metric. TensorBoard shows NaN values."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)

    def add(self, metrics: dict[str, float], step: int) -> None:
        """Write scalars of an earlier step."""
        self.log(metrics, step)

    def log_samples(self, name: str, rows: Sequence[Row], step: int) -> None:
        """Write each row as a text: the conversation, and a list of the other columns."""
        for place, row in enumerate(rows):
            columns = {key: value for key, value in row.items() if key != "conversation" and value not in (None, "")}
            text = "\n".join(f"{key}: {value}" for key, value in columns.items())
            self._writer.add_text(f"{name}/{place}", _code(f"{text}\n\n{row['conversation']}"), step)

    def close(self) -> None:
        """Write the values that are still in memory, and close the file."""
        self._writer.close()


def _code(text: str) -> str:
    """Text that TensorBoard shows as it is: indented, it is a block of code in Markdown."""
    return "\n".join("    " + line for line in text.splitlines())
