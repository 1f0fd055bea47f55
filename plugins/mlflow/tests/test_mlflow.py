"""Against the real mlflow in a local folder; its own process keeps its import out of the other tests."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from rollouts_mlflow import MLflowLogger

from rollouts.errors import UserError

RUN = """
import json, os, sys
from pathlib import Path
from rollouts.loggers import MetricsLogger, SampleLogger
from rollouts_mlflow import MLflowLogger
folder, settings = sys.argv[1], {"env": {"name": "calculator", "digits": 2}, "reward": ("env:1",), "note": "x" * 9000}
for first, last in ((0, 2), (1, 4)):  # the second time the same folder is continued, a step of it again
    logger = MLflowLogger(folder, settings | {"lr": first}, first)
    assert isinstance(logger, MetricsLogger) and isinstance(logger, SampleLogger)
    for step in range(first, last):
        logger.log({"reward/mean": step / 8, "policy/loss": float("nan"), "odd=name": 1.0}, step=step)
        logger.log_samples("samples", [{"conversation": f"user: {step}", "reward": None}], step)
    logger.log({"eval/reward_mean": 0.5}, step=last - 1)
    logger.add({"eval/greedy_mean": 0.25}, step=last - 2)  # of an evaluation that ended later
    logger.close()
from mlflow import MlflowClient
client = MlflowClient()
(experiment,) = [each for each in client.search_experiments() if each.name == os.environ["MLFLOW_EXPERIMENT_NAME"]]
(run,) = client.search_runs([experiment.experiment_id])
history = {name: [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]
           for name in ("reward/mean", "eval/reward_mean", "eval/greedy_mean", "odd_name")}
tables = {table["path"]: json.loads((Path(run.info.artifact_uri[7:]) / table["path"]).read_text())
          for table in json.loads(run.data.tags["mlflow.loggedArtifacts"])}
found = {"tables": tables, "name": run.info.run_name, "status": run.info.status, "params": run.data.params}
from rollouts.errors import ConfigError
try:
    MLflowLogger(sys.argv[2], {}, 0, tracking_uri=sys.argv[3])
except ConfigError as error:
    found["refused"] = str(error)
print(json.dumps({**found, **history}))
"""


def python(code, *arguments, **environment):
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        **environment,
    }
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_is_written_and_continued(tmp_path):
    """And a server that does not answer is one error."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = f"http://127.0.0.1:{listener.getsockname()[1]}"
    own = {"MLFLOW_TRACKING_URI": f"file://{tmp_path}/store", "MLFLOW_ALLOW_FILE_STORE": "true"}
    own |= {"MLFLOW_EXPERIMENT_NAME": "sums", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    said = python(RUN, str(tmp_path / "run-7"), str(tmp_path / "other"), silent, **own)
    found = json.loads(said.splitlines()[-1])
    assert (found["name"], found["status"]) == ("run-7", "FINISHED")
    assert found["reward/mean"] == [[step, step / 8] for step in range(4)]
    assert found["eval/reward_mean"] == [[1, 0.5], [3, 0.5]] and len(found["odd_name"]) == 4
    assert list(found["tables"]) == [f"samples/step_{step:06d}.json" for step in range(4)]
    assert found["tables"]["samples/step_000003.json"] == {
        "columns": ["conversation", "reward"],
        "data": [["user: 3", None]],
    }
    assert found["eval/greedy_mean"] == [[0, 0.25], [2, 0.25]]
    params = found["params"]
    assert (params["env.digits"], params["lr"], len(params["note"])) == ("2", "0", 6000)
    assert "MLflow did not start a run in the experiment 'sums'" in found["refused"]
    assert "--logger.mlflow.tracking-uri" in found["refused"]
    assert not (tmp_path / "other" / "mlflow_run_id.txt").exists()


BY_VARIABLES = """
import json, os, sys, time
from mlflow import MlflowClient
client = MlflowClient()
os.environ["MLFLOW_EXPERIMENT_ID"] = client.create_experiment("by its id")
from rollouts_mlflow import MLflowLogger
logger = MLflowLogger(sys.argv[1], {}, 0)
while not client.get_run(logger._id).data.metrics.get("system/cpu_utilization_percentage"):
    time.sleep(0.1)
logger.close()
first = client.get_run(logger._id)
os.environ["MLFLOW_RUN_ID"] = client.create_run(os.environ["MLFLOW_EXPERIMENT_ID"]).info.run_id
again = MLflowLogger(sys.argv[1], {}, 0)
again.log({"reward/mean": 0.5}, step=0)
again.close()
assert (again._id, client.get_run(again._id).data.metrics["reward/mean"]) == (os.environ["MLFLOW_RUN_ID"], 0.5)
print(json.dumps([client.get_experiment(first.info.experiment_id).name, first.data.tags["team"], again._id]))
"""


@pytest.mark.nightly
def test_the_library_takes_its_variables(tmp_path):
    """The experiment by its id, tags of the run, the load of the machine, and a run that someone else began."""
    variables = {"TRACKING_URI": f"file://{tmp_path}/store", "ALLOW_FILE_STORE": "true",
                 "RUN_CONTEXT": '{"team": "sums"}', "ENABLE_SYSTEM_METRICS_LOGGING": "true",
                 "SYSTEM_METRICS_SAMPLING_INTERVAL": "0.1"}  # fmt: skip
    given = {f"MLFLOW_{name}": value for name, value in variables.items()}
    *found, last = json.loads(python(BY_VARIABLES, str(tmp_path / "run-7"), **given).splitlines()[-1])
    assert found == ["by its id", "sums"]
    assert (tmp_path / "run-7" / "mlflow_run_id.txt").read_text() == f"{last}\n", "a resumed run continues it"


def test_a_missing_library_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UserError, match=r"`pip install mlflow-skinny`"):
        MLflowLogger(tmp_path, {}, 0)


def test_importing_the_plugin_imports_no_library():
    python("import sys, rollouts_mlflow; assert 'mlflow' not in sys.modules")


def test_the_entry_point_names_the_class():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["rollouts.loggers"] == {"mlflow": "rollouts_mlflow:MLflowLogger"}
