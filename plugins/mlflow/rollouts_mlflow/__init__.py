"""Log metrics and settings to MLflow. The library is imported when a run starts."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollouts.errors import ConfigError, first_line
from rollouts.loggers import import_library, plain_settings

__all__ = ["MLflowLogger"]

RUN_ID = "mlflow_run_id.txt"
NEXT_STEP = "rollouts.next_step"  # a tag of the MLflow run
NAME_CHARACTERS, VALUE_CHARACTERS = 250, 6000  # MLflow's limits
METRICS_MAX, PARAMETERS_MAX = 1000, 100  # in one request


class MLflowLogger:
    """Log every step to one MLflow run. A resumed run continues the MLflow run whose id is in `mlflow_run_id.txt` in
    its folder. MLflow cannot replace a step, so steps that it already has are not sent again.

    Args:
        experiment: the MLflow experiment (default: MLFLOW_EXPERIMENT_NAME, else rollouts)
        run_name: the name of the MLflow run (default: the name of the run folder)
        tracking_uri: the server, or a local store (default: MLFLOW_TRACKING_URI, else MLflow's own)

    Raises:
        UserError: mlflow is not installed.
        ConfigError: MLflow cannot start a run, for example because its server does not answer.
    """

    def __init__(
        self,
        folder: str | Path,
        settings: Any,
        first_step: int,
        *,
        experiment: str = "",
        run_name: str = "",
        tracking_uri: str = "",
    ) -> None:
        mlflow = import_library("mlflow", logger="mlflow", install="mlflow-skinny")
        self._entities = import_library("mlflow.entities", logger="mlflow", install="mlflow-skinny")
        experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "rollouts"
        folder = Path(folder).resolve()
        try:
            self._client = mlflow.MlflowClient(tracking_uri=tracking_uri or None)
            self._id, is_new = self._begin(folder, experiment, run_name or folder.name)
            if is_new:
                self._log_settings(plain_settings(settings))
            known = int(self._client.get_run(self._id).data.tags.get(NEXT_STEP, 0))
        except (mlflow.MlflowException, OSError) as error:
            raise ConfigError(
                f"MLflow did not start a run in the experiment {experiment!r}: {first_line(error)}\n"
                "give a server that runs: --logger.mlflow.tracking-uri http://127.0.0.1:5000; a local store needs the "
                "whole library, so type: pip install mlflow"
            ) from error
        self._next_step = max(first_step, known)

    def _begin(self, folder: Path, experiment: str, name: str) -> tuple[str, bool]:
        """The id of the MLflow run, and whether it is new."""
        path, client = folder / RUN_ID, self._client
        if given := os.environ.get("MLFLOW_RUN_ID"):
            return client.get_run(given).info.run_id, False
        if path.exists():
            found = path.read_text().strip()
            client.update_run(found, status="RUNNING")
            return found, False
        known = client.get_experiment_by_name(experiment)
        in_experiment = known.experiment_id if known else client.create_experiment(experiment)
        run = client.create_run(in_experiment, run_name=name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(run.info.run_id + "\n")
        return run.info.run_id, True

    def _log_settings(self, settings: Mapping[str, Any]) -> None:
        values = [self._entities.Param(_named(name), str(value)[:VALUE_CHARACTERS]) for name, value in _flat(settings)]
        for at in range(0, len(values), PARAMETERS_MAX):
            self._client.log_batch(self._id, params=values[at : at + PARAMETERS_MAX])

    def log(self, metrics: dict[str, float], step: int) -> None:
        """The metrics of one step."""
        if step < self._next_step:
            return
        now = int(time.time() * 1000)
        values = [self._entities.Metric(_named(name), float(value), now, step) for name, value in metrics.items()]
        tags = [self._entities.RunTag(NEXT_STEP, str(step + 1))]
        for at in range(0, max(len(values), 1), METRICS_MAX):
            self._client.log_batch(self._id, metrics=values[at : at + METRICS_MAX], tags=tags)

    def close(self) -> None:
        """Mark the MLflow run as finished."""
        self._client.set_terminated(self._id)


def _named(name: str) -> str:
    """A name of MLflow: letters, digits and `_ - . : /` and spaces.

    >>> _named("reward/part/a=b")
    'reward/part/a_b'
    """
    return re.sub(r"[^\w\-.:/ ]", "_", name)[:NAME_CHARACTERS]


def _flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of nested tables, by dotted names."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value
