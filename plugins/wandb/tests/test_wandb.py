"""Against the real wandb, offline; its own process keeps its threads, signal handlers and warnings out of the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
from rollouts_wandb import WandbLogger

from rollouts.config.flags import take_dotted_flags
from rollouts.config.merging import merge
from rollouts.config.resolving import resolve
from rollouts.errors import ConfigError, UserError
from rollouts.plugins import read_signature
from rollouts.plugins.signature import convert_settings

RUN = """
import sys
from rollouts.loggers import MetricsLogger, SampleLogger
from rollouts_wandb import WandbLogger
logger = WandbLogger(sys.argv[1], {"env": {"digits": 2}}, 0, project="p", mode="offline")
assert isinstance(logger, MetricsLogger) and isinstance(logger, SampleLogger)
rows = [{"conversation": "user: <b>2 + 2?", "reward": 1.0}, {"conversation": "user: 3?", "reward": None}]
logger.log_samples("eval_samples", rows, step=3)
logger.log({"reward/mean": 0.625, "policy/loss": float("nan")}, step=3)
logger.log_samples("samples", rows, step=3)
logger.close()
"""

BY_VARIABLES = """
import json, sys
from rollouts_wandb import WandbLogger
logger = WandbLogger(sys.argv[1], {}, 0)
logger.log({"reward/mean": 0.5}, step=0)
logger.close()
run = logger._run
print(json.dumps([run.project, run.id, run.name, run.entity, run.group, run.notes, run.job_type, run.tags]))
"""


def python(code, *arguments, **environment):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_offline_run_is_in_the_run_folder(tmp_path):
    folder = tmp_path / "run-7"
    folder.mkdir()
    python(RUN, str(folder), WANDB_API_KEY="", HOME=str(tmp_path))
    (record,) = folder.glob("wandb/offline-run-*/*.wandb")
    content = record.read_bytes()  # protobuf records; the values in them are JSON text
    assert b"run-7" in content and b"digits" in content
    assert b"reward/mean" in content and b"0.625" in content

    files = {file.name.split("samples")[0]: file for file in folder.rglob("*.table.json")}
    tables = {f"{before}samples": json.loads(file.read_text()) for before, file in files.items()}
    assert set(tables) == {"samples", "eval_samples"}
    assert tables["samples"]["columns"] == ["conversation", "reward"]
    assert tables["samples"]["data"] == [["user: <b>2 + 2?", 1.0], ["user: 3?", None]]


def test_the_real_library_takes_its_variables(tmp_path):
    """As its run has them, and in the file that `wandb sync` sends."""
    (tmp_path / "elsewhere").mkdir()
    given = {"PROJECT": "theirs", "RUN_ID": "r1", "NAME": "mine", "ENTITY": "team", "RUN_GROUP": "g", "NOTES": "n",
             "JOB_TYPE": "sweep", "TAGS": "a,b", "MODE": "offline", "DIR": str(tmp_path / "elsewhere")}  # fmt: skip
    variables = {f"WANDB_{name}": value for name, value in given.items()}
    said = python(BY_VARIABLES, str(tmp_path / "run-7"), **variables, HOME=str(tmp_path))
    found = json.loads(said.splitlines()[-1])
    assert found == ["theirs", "r1", "mine", "team", "g", "n", "sweep", ["a", "b"]]
    (record,) = (tmp_path / "elsewhere").rglob("*.wandb")
    assert all(word in record.read_bytes() for word in (b"theirs", b"mine", b"team", b"sweep"))
    assert (tmp_path / "run-7" / "wandb_run_id.txt").read_text() == "r1\n", "a resumed run continues it"


class FakeError(Exception):
    pass


@pytest.fixture
def fake(monkeypatch):
    """A wandb that records its calls."""
    for name in ("MODE", "PROJECT", "NAME", "DIR", "RUN_ID", "RESUME", "SILENT", "CONSOLE"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    module = types.ModuleType("wandb")
    module.Error, module.Settings, module.calls = FakeError, dict, []
    run = types.SimpleNamespace(
        log=lambda metrics, step: module.calls.append((metrics, step)),
        finish=lambda: module.calls.append("finish"),
        step=0,
    )
    module.run = run
    module.init = lambda **settings: module.calls.append(settings) or run
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_the_same_folder_continues_the_same_run(fake, tmp_path):
    for folder in ("a", "a", "b"):
        logger = WandbLogger(tmp_path / folder, {"seed": 0}, 0)
        logger.log({"x": 1.0}, step=0)
        logger.close()
    first, second, third = (call for call in fake.calls if isinstance(call, dict))
    assert first["id"] == second["id"] != third["id"]
    assert first["resume"] == "allow" and first["name"] == "a" and first["config"] == {"seed": 0}
    assert fake.calls[1:3] == [({"x": 1.0}, 0), "finish"]


def test_wandbs_own_variables_hold_where_no_setting_is_given(fake, tmp_path, monkeypatch):
    for name, value in {"MODE": "offline", "PROJECT": "theirs", "NAME": "mine"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    WandbLogger(tmp_path, {}, 0)
    (call,) = fake.calls
    assert call["mode"] is None, "wandb reads WANDB_MODE"
    assert call["resume"] is None, "an offline run cannot be resumed"
    assert (call["project"], call["name"]) == ("theirs", "mine")
    WandbLogger(tmp_path, {}, 0, mode="online", project="ours", run_name="other")
    assert [fake.calls[1][key] for key in ("mode", "resume", "project", "name")] == ["online", "allow", "ours", "other"]


def test_wandbs_folder_id_and_output_are_its_own_where_a_variable_is_set(fake, tmp_path, monkeypatch):
    WandbLogger(tmp_path / "run", {}, 0)
    (call,) = fake.calls
    assert (call["dir"], call["resume"]) == (str(tmp_path / "run"), "allow")
    assert call["settings"] == {"silent": True, "console": "off"}
    for name, value in {"DIR": "/x", "RUN_ID": "r1", "RESUME": "must", "SILENT": "false", "CONSOLE": "wrap"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    WandbLogger(tmp_path / "run", {}, 0)
    assert [fake.calls[1][key] for key in ("dir", "id", "resume", "settings")] == [None, "r1", None, {}]
    monkeypatch.delenv("WANDB_RUN_ID")
    WandbLogger(tmp_path / "run", {}, 0)
    assert fake.calls[2]["id"] == "r1"


def test_a_flag_sets_the_name_of_the_run(fake, tmp_path):
    _, flags = take_dotted_flags(["--logger.wandb.run-name", "mine"])
    (_, chosen) = resolve(merge({"logger": ["wandb"]}, flags)).components["logger"]
    settings = convert_settings(read_signature(WandbLogger, "loggers"), chosen.settings, "logger wandb")
    WandbLogger(tmp_path, {}, 0, **settings)
    assert fake.calls[0]["name"] == "mine"


def test_the_error_without_a_login_says_what_to_type(fake, tmp_path):
    def refuse(**settings):
        raise FakeError("no API key")

    fake.init = refuse
    with pytest.raises(ConfigError, match=r"no API key; type `wandb login`.*mode offline"):
        WandbLogger(tmp_path, {}, 0)


def test_steps_that_are_there_already_are_not_sent_again(fake, tmp_path):
    fake.run.step = 3  # as W&B says of a run that it resumed
    logger = WandbLogger(tmp_path / "run", {}, 2)
    for step in range(2, 5):
        logger.log({"x": 1.0}, step=step)
    assert [call[1] for call in fake.calls if isinstance(call, tuple)] == [3, 4]


def test_a_new_folder_at_the_same_place_is_a_new_run(fake, tmp_path):
    for _ in range(2):
        WandbLogger(tmp_path / "run", {}, 0)
        (tmp_path / "run" / "wandb_run_id.txt").unlink()
    assert len({call["id"] for call in fake.calls}) == 2


def test_a_missing_library_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"`pip install wandb`"):
        WandbLogger(tmp_path, {}, 0)


def test_importing_the_plugin_imports_no_library():
    python("import sys, rollouts_wandb; assert 'wandb' not in sys.modules")


def test_the_entry_point_names_the_class():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["rollouts.loggers"] == {"wandb": "rollouts_wandb:WandbLogger"}
