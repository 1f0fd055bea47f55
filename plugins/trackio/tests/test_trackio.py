"""Against the real trackio in a local folder; its own process keeps its threads out of the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
from rollouts_trackio import TrackioLogger

from rollouts.config.flags import take_dotted_flags
from rollouts.config.merging import merge
from rollouts.config.resolving import resolve
from rollouts.errors import UserError
from rollouts.plugins import read_signature
from rollouts.plugins.signature import convert_settings

RUN = """
import sys
from rollouts.loggers import MetricsLogger, SampleLogger
from rollouts_trackio import TrackioLogger
for first, last in ((0, 2), (1, 4)):  # the second time the same folder is continued, a step of it again
    logger = TrackioLogger(sys.argv[1], {"env": {"digits": 2}}, first, project="p")
    assert isinstance(logger, MetricsLogger) and isinstance(logger, SampleLogger)
    for step in range(first, last):
        logger.log({"reward/mean": step / 8, "policy/loss": float("nan")}, step=step)
        logger.log_samples("samples", [{"conversation": f"user: {step}", "reward": None, "tokens": 3}], step)
    logger.close()
import trackio
(run,) = trackio.Api().runs("p")
print("found", run.name, run.config["env"])
from trackio.sqlite_storage import SQLiteStorage
tables = [(row["step"], row["samples"]["_value"]) for row in SQLiteStorage.get_logs("p", run.name) if "samples" in row]
print("tables", tables)
"""
READ = "import sys; sys.argv[0] = 'trackio'; from trackio.cli import main; main()"


def python(code, *arguments, **environment):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_local_run_is_written_and_continued(tmp_path):
    kept = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path)}
    said = python(RUN, str(tmp_path / "run-7"), **kept)
    assert "found run-7 {'digits': 2}" in said
    tables = [(step, [{"conversation": f"user: {step}", "reward": None, "tokens": 3}]) for step in range(4)]
    assert f"tables {tables}" in said
    asked = ["get", "metric", "--project", "p", "--run", "run-7", "--metric", "reward/mean", "--json"]
    values = json.loads(python(READ, *asked, **kept))["values"]
    assert [(value["step"], value["value"]) for value in values] == [(step, step / 8) for step in range(4)]


def test_the_real_library_takes_its_variables(tmp_path):
    """A server of one's own, without the token that it needs: one error that names both."""
    code = (
        "import sys\nfrom rollouts_trackio import TrackioLogger\nfrom rollouts.errors import ConfigError\n"
        "try:\n    TrackioLogger(sys.argv[1], {}, 0)\nexcept ConfigError as error:\n    print(error)"
    )
    given = {"TRACKIO_SERVER_URL": "http://127.0.0.1:1", "TRACKIO_DIR": str(tmp_path), "HOME": str(tmp_path)}
    said = python(code, str(tmp_path / "run-7"), **given)
    assert "Trackio did not start a run in project 'rollouts'" in said
    assert "TRACKIO_WRITE_TOKEN" in said and "unset TRACKIO_SPACE_ID and TRACKIO_SERVER_URL" in said


def test_settings_reach_the_library(tmp_path, monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda metrics, step: calls.append((metrics, step)), finish=lambda: calls.append("finish")
    )
    fake = types.SimpleNamespace(init=lambda **settings: calls.append(settings) or run)
    monkeypatch.setitem(sys.modules, "trackio", fake)
    logger = TrackioLogger(tmp_path / "run-7", {"reward": ("env:1",)}, 0, project="p", space_id="me/space")
    logger.log({"x": 1.0}, step=2)
    logger.close()
    settings, *rest = calls
    assert (settings["name"], settings["space_id"], settings["group"]) == ("run-7", "me/space", None)
    assert settings["config"] == {"reward": ["env:1"]} and settings["resume"] == "allow"
    assert rest == [({"x": 1.0}, 2), "finish"]


def test_a_flag_sets_the_name_of_the_run(tmp_path, monkeypatch):
    _, flags = take_dotted_flags(["--logger.trackio.run-name", "mine"])
    (_, chosen) = resolve(merge({"logger": ["trackio"]}, flags)).components["logger"]
    settings = convert_settings(read_signature(TrackioLogger, "loggers"), chosen.settings, "logger trackio")
    calls = []
    fake = types.SimpleNamespace(init=lambda **given: calls.append(given))
    monkeypatch.setitem(sys.modules, "trackio", fake)
    TrackioLogger(tmp_path, {}, 0, **settings)
    assert calls[0]["name"] == "mine"


def test_a_missing_library_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UserError, match=r"`pip install trackio`"):
        TrackioLogger(tmp_path, {}, 0)


def test_importing_the_plugin_imports_no_library():
    python("import sys, rollouts_trackio; assert 'trackio' not in sys.modules")


def test_the_entry_point_names_the_class():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["rollouts.loggers"] == {"trackio": "rollouts_trackio:TrackioLogger"}
