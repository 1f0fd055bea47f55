"""Log metrics to Trackio, on this machine or in a Hugging Face Space. The library is imported when a run starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollouts.errors import ConfigError, first_line
from rollouts.loggers import Row, SampleSettings, import_library, plain_settings

__all__ = ["TrackioLogger"]


class TrackioLogger:
    """Log every step to one Trackio run, and some rollouts as tables. A resumed run continues its Trackio run. Trackio
    cannot replace a step: steps that it already has are not sent again.

    Trackio's own variables, such as TRACKIO_DIR, apply where no setting is given.

    Args:
        project: the Trackio project
        run_name: the name of the Trackio run (default: the name of the run folder)
        group: a name shared by runs that Trackio shows together
        space_id: a Hugging Face Space to log to (default: TRACKIO_SPACE_ID, else this machine only)
        server_url: your own Trackio server to log to (default: TRACKIO_SERVER_URL); it needs TRACKIO_WRITE_TOKEN
        system_metrics: also log the load of CPU and GPU

    Raises:
        UserError: trackio is not installed.
        ConfigError: Trackio cannot start a run, for example because a server does not answer.
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
        server_url: str = "",
        system_metrics: bool = False,
        samples: SampleSettings = SampleSettings(),
    ) -> None:
        self.sample_settings = samples
        trackio = self._trackio = import_library("trackio", logger="trackio", install="trackio")
        try:
            self._run = trackio.init(
                project=project,
                name=run_name or Path(folder).resolve().name,
                group=group or None,
                space_id=space_id or None,
                server_url=server_url or None,
                config=plain_settings(settings),
                resume="allow",
                embed=False,
                auto_log_gpu=system_metrics,
                auto_log_cpu=system_metrics,
            )
        except Exception as error:  # it raises errors of several libraries
            raise ConfigError(
                f"Trackio did not start a run in project {project!r}: {first_line(error)}\n"
                "to log to this machine, unset TRACKIO_SPACE_ID and TRACKIO_SERVER_URL, and leave "
                "--logger.trackio.space-id and --logger.trackio.server-url out"
            ) from error
        # Trackio's next step is one more than the last step that it has.
        self._next_step = max(first_step, getattr(self._run, "_next_step", 0))

    def log(self, metrics: dict[str, float], step: int) -> None:
        """One row of the run's history."""
        if step >= self._next_step:
            self._run.log(dict(metrics), step=step)

    def log_samples(self, name: str, rows: Sequence[Row], step: int) -> None:
        """A table in the run's history."""
        if step >= self._next_step:
            self._run.log({name: self._trackio.Table(data=[dict(row) for row in rows])}, step=step)

    def close(self) -> None:
        """Send the metrics that are not sent yet, and finish the run."""
        self._run.finish()
