"""Log metrics to Trackio, on this machine or in a Hugging Face Space. The library is imported when a run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollouts.loggers import import_library, plain_settings

__all__ = ["TrackioLogger"]


class TrackioLogger:
    """Log every step to one Trackio run. A resumed run continues its Trackio run. Trackio cannot replace a step: steps
    that it already has are not sent again.

    Args:
        project: the Trackio project
        run_name: the name of the Trackio run (default: the name of the run folder)
        group: a name shared by runs that Trackio shows together
        space_id: a Hugging Face Space to log to (default: this machine only)
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
        run_name: str = "",
        group: str = "",
        space_id: str = "",
        system_metrics: bool = False,
    ) -> None:
        trackio = import_library("trackio", logger="trackio", install="trackio")
        self._run = trackio.init(
            project=project,
            name=run_name or Path(folder).resolve().name,
            group=group or None,
            space_id=space_id or None,
            config=plain_settings(settings),
            resume="allow",
            embed=False,
            auto_log_gpu=system_metrics,
            auto_log_cpu=system_metrics,
        )
        # Trackio's next step is one more than the last step that it has.
        self._next_step = max(first_step, getattr(self._run, "_next_step", 0))

    def log(self, metrics: dict[str, float], step: int) -> None:
        """One row of the run's history."""
        if step >= self._next_step:
            self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Send the metrics that are not sent yet, and finish the run."""
        self._run.finish()
