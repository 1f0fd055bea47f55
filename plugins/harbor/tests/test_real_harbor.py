"""The format of the real package: its fields, its paths, and that it reads a task as this package does.

`ROLLOUTS_HARBOR` is the Python of a virtual environment with harbor, which `make test-adapters` makes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rollouts_harbor.folders import Config, read_folder

sys.path.insert(0, str(Path(__file__).parent))
from made import make_task

pytestmark = pytest.mark.adapters
WRITTEN_FOR = "0.25.0"
FIELDS = {
    "": "agent artifacts environment metadata multi_step_reward_strategy schema_version solution source steps task "
    "verifier",
    "verifier": "allowed_hosts collect env environment environment_mode network_mode timeout_sec user",
    "agent": "allowed_hosts network_mode timeout_sec user",
    "environment": "allow_internet allowed_hosts build_timeout_sec cpus docker_image env gpu_types gpus healthcheck "
    "mcp_servers memory_mb network_mode os skills_dir storage_mb tpu workdir",
}
"""The fields that this package knows, by table. It serves no task that needs one which it does not understand."""

UPSTREAM = """
import json, sys
from importlib.metadata import version
from pathlib import Path
from harbor.models.task.config import TaskConfig
from harbor.models.task.task import Task
from harbor.models.trial.paths import EnvironmentPaths

of = TaskConfig.model_fields
tables = {"": TaskConfig} | {name: of[name].annotation for name in ("verifier", "agent", "environment")}
fields = {name: sorted(model.model_fields) for name, model in tables.items()}
paths, names = EnvironmentPaths(), ("tests_dir", "solution_dir", "reward_text_path", "reward_json_path")
places = {name: str(getattr(paths, name)) for name in names}
task = Task(Path(sys.argv[1]))
read = json.loads(task.config.model_dump_json())
print(json.dumps([version("harbor"), fields, places, task.instruction, read]))
"""


@pytest.fixture(scope="module")
def upstream(tmp_path_factory):
    """Its version, the fields by table, the paths, and the instruction and the settings of a task; and the task."""
    python = os.environ.get("ROLLOUTS_HARBOR", "")
    if not python:
        pytest.skip("set ROLLOUTS_HARBOR to the Python of a virtual environment with harbor")
    folder = make_task(tmp_path_factory.mktemp("tasks") / "a")
    done = subprocess.run([python, "-c", UPSTREAM, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"the names of harbor have changed: {done.stderr.strip().splitlines()[-1]}"
    return [*json.loads(done.stdout), folder]


def test_the_format_is_the_one_that_this_package_was_written_for(upstream):
    version, fields, places, *_ = upstream
    now = f"harbor {version} differs from {WRITTEN_FOR}, for which this package was written: "
    for table, names in FIELDS.items():
        changed = sorted(set(fields[table]) ^ set(names.split()))
        assert not changed, f"{now}the fields {', '.join(changed)} of the table [{table}]"
    assert places == {
        "tests_dir": "/tests",
        "solution_dir": "/solution",
        "reward_text_path": "/logs/verifier/reward.txt",
        "reward_json_path": "/logs/verifier/reward.json",
    }, now + "the paths in the container"


def test_it_reads_a_task_as_harbor_does(upstream):
    *_, instruction, settings, folder = upstream
    ours = read_folder(folder, "image")
    assert ours.instruction == instruction
    for name in Config.__struct_fields__:
        table = msgspec.to_builtins(getattr(ours.config, name))
        theirs = settings[name] if name != "steps" else settings["steps"] or []
        if isinstance(table, dict):
            theirs = {key: theirs[key] for key in table}
        assert table == theirs, f"[{name}]"
