"""Metrics to Trackio, on this machine or a hub space. The library is imported when a run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollouts.loggers import import_library, plain_settings

__all__ = ["TrackioLogger"]


class TrackioLogger:
    """Log every step to one Trackio run, which is the same one again when the run folder is continued. Trackio takes no
    step back: those that it has already are not sent again.

    Args:
        project: the Trackio project
        name: the run's name; the run folder's where it is empty
        group: runs to show together
        space_id: a hub space to log to; this machine only where it is empty
        system_metrics: also log the load of CPU and GPU

    Raises:
        UserError: trackio is not installed.
    """

    def __init__(
        self,
        folder: str | Path,
        settings: Any,
        first_step: int,
        *,
        project: str = "rollouts",
        name: str = "",
        group: str = "",
        space_id: str = "",
        system_metrics: bool = False,
    ) -> None:
        trackio = import_library("trackio", logger="trackio", install="rollouts-trackio")
        self._run = trackio.init(
            project=project,
            name=name or Path(folder).resolve().name,
            group=group or None,
            space_id=space_id or None,
            config=plain_settings(settings),
            resume="allow",
            embed=False,
            auto_log_gpu=system_metrics,
            auto_log_cpu=system_metrics,
        )
        # What Trackio would number the next row as, if it were not told: one more than the last row that it has.
        self._next_step = max(first_step, getattr(self._run, "_next_step", 0))

    def log(self, metrics: dict[str, float], step: int) -> None:
        """One row of the run's history."""
        if step >= self._next_step:
            self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Send what is pending and finish the run."""
        self._run.finish()
