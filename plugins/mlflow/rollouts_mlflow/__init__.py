"""Log metrics and settings to MLflow. The library is imported when a run starts."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollouts.errors import ConfigError, first_line
from rollouts.loggers import Row, SampleSettings, import_library, plain_settings

__all__ = ["MLflowLogger"]

EXPERIMENT, RUN_ID = "rollouts", "mlflow_run_id.txt"
NEXT_STEP = "rollouts.next_step"  # a tag of the MLflow run
TABLES = "mlflow.loggedArtifacts"  # a tag of MLflow: its page shows the tables that are named there
NAME_CHARACTERS, VALUE_CHARACTERS = 250, 6000  # MLflow's limits
METRICS_MAX, PARAMETERS_MAX = 1000, 100  # in one request
TABLES_MAX = 50  # in the tag, which MLflow limits; earlier tables are only among the artifacts


class MLflowLogger:
    """Log every step to one MLflow run, and some rollouts as tables. A resumed run continues the MLflow run whose id is
    in `mlflow_run_id.txt` in its folder. MLflow cannot replace a step, so steps that it already has are not sent again.

    MLflow's own variables, such as MLFLOW_TRACKING_TOKEN, apply where no setting is given. MLFLOW_RUN_ID names one
    MLflow run, so do not use it with several runs, such as those of --seeds or the phases of mode sft+rl.

    Args:
        experiment: the MLflow experiment (default: MLFLOW_EXPERIMENT_NAME or MLFLOW_EXPERIMENT_ID, else rollouts)
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
        samples: SampleSettings = SampleSettings(),
    ) -> None:
        self.sample_settings = samples
        mlflow = import_library("mlflow", logger="mlflow", install="mlflow-skinny")
        self._entities = import_library("mlflow.entities", logger="mlflow", install="mlflow-skinny")
        contexts = import_library("mlflow.tracking.context.registry", logger="mlflow", install="mlflow-skinny")
        experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "")
        folder = Path(folder).resolve()
        try:
            self._client = mlflow.MlflowClient(tracking_uri=tracking_uri or None)
            tags = contexts.resolve_tags()  # the user, the program, and those of MLFLOW_RUN_CONTEXT
            self._id, is_new = self._begin(folder, experiment, run_name or folder.name, tags)
            if is_new:
                self._log_settings(plain_settings(settings))
            tags = self._client.get_run(self._id).data.tags
            known, self._tables = int(tags.get(NEXT_STEP, 0)), json.loads(tags.get(TABLES, "[]"))
        except (mlflow.MlflowException, OSError) as error:
            raise ConfigError(
                f"MLflow did not start a run in the experiment {experiment or EXPERIMENT!r}: {first_line(error)}\n"
                "give a server that runs: --logger.mlflow.tracking-uri http://127.0.0.1:5000; a local store needs the "
                "whole library, so type: pip install mlflow"
            ) from error
        self._next_step = max(first_step, known)
        self._monitor = self._monitored(tracking_uri)

    def _begin(self, folder: Path, experiment: str, name: str, tags: dict[str, str]) -> tuple[str, bool]:
        """The id of the MLflow run, and whether it is new. The run folder keeps the id."""
        path, client = folder / RUN_ID, self._client
        given = os.environ.get("MLFLOW_RUN_ID")
        if given or path.exists():
            found = client.get_run(given or path.read_text().strip()).info.run_id
            client.update_run(found, status="RUNNING")
        else:
            in_experiment = self._experiment_id(experiment)
            found = client.create_run(in_experiment, run_name=name, tags=tags).info.run_id
        is_new = not given and not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found + "\n")
        return found, is_new

    def _monitored(self, tracking_uri: str) -> Any:
        """What logs the load of the machine, if MLflow's variable asks for it; else None."""
        variables = import_library("mlflow.environment_variables", logger="mlflow", install="mlflow-skinny")
        if not variables.MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING.get():
            return None
        import_library("psutil", logger="mlflow", install="psutil")
        module = "mlflow.system_metrics.system_metrics_monitor"
        metrics = import_library(module, logger="mlflow", install="mlflow-skinny")
        monitor = metrics.SystemMetricsMonitor(self._id, resume_logging=True, tracking_uri=tracking_uri or None)
        monitor.start()
        return monitor

    def _experiment_id(self, experiment: str) -> str:
        by_id = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if by_id and not experiment:
            return self._client.get_experiment(by_id).experiment_id
        experiment = experiment or EXPERIMENT
        known = self._client.get_experiment_by_name(experiment)
        return known.experiment_id if known else self._client.create_experiment(experiment)

    def _log_settings(self, settings: Mapping[str, Any]) -> None:
        values = [self._entities.Param(_named(name), str(value)[:VALUE_CHARACTERS]) for name, value in _flat(settings)]
        for at in range(0, len(values), PARAMETERS_MAX):
            self._client.log_batch(self._id, params=values[at : at + PARAMETERS_MAX])

    def log(self, metrics: dict[str, float], step: int) -> None:
        """The metrics of one step."""
        if step < self._next_step:
            return
        self._send(metrics, step, [self._entities.RunTag(NEXT_STEP, str(step + 1))])

    def add(self, metrics: dict[str, float], step: int) -> None:
        """Metrics of an earlier step."""
        self._send(metrics, step, [])

    def _send(self, metrics: Mapping[str, float], step: int, tags: list[Any]) -> None:
        now = int(time.time() * 1000)
        values = [self._entities.Metric(_named(name), float(value), now, step) for name, value in metrics.items()]
        for at in range(0, max(len(values), 1), METRICS_MAX):
            self._client.log_batch(self._id, metrics=values[at : at + METRICS_MAX], tags=tags)

    def log_samples(self, name: str, rows: Sequence[Row], step: int) -> None:
        """A table among the artifacts, in the form of `log_table`, which needs pandas."""
        if step < self._next_step:
            return
        file = f"{name}/step_{step:06d}.json"
        table = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}
        self._client.log_dict(self._id, table, file)
        self._tables = [*self._tables, {"path": file, "type": "table"}][-TABLES_MAX:]
        self._client.set_tag(self._id, TABLES, json.dumps(self._tables))

    def close(self) -> None:
        """Mark the MLflow run as finished."""
        if self._monitor is not None:
            self._monitor.finish()
            self._monitor = None
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
