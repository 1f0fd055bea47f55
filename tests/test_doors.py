"""The packages beside `rollouts`: each way to install the distribution has them. test_main_job.py trains without."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import zipfile

import pytest
import rollouts.primitives.types
import rollouts_check
import rollouts_notes.primitives.types
import rollouts_servers.spending

import rollouts.check
import rollouts.spending
from rollouts.cli.app import COMMANDS
from rollouts.doors import HOMES
from rollouts.env.installing import base_wheel

ROOT = HOMES["rollouts"]
BUILD = "import sys; from hatchling import build; print(getattr(build, sys.argv[1])(sys.argv[2]))"
START = """
import json, sys
first, left_out, argv = map(json.loads, sys.argv[1:])
sys.path[:] = [first, *(folder for folder in sys.path if folder not in left_out)]
"""
COMMAND = "from rollouts.cli import main\nsys.exit(main(argv))"
LOAD = """
from rollouts.plugins import find_component, load_component
load_component(find_component("rewards", "rollouts_notes.primitives.utilities:length_reward"))
"""
OUTSIDE = [name for name, (place, _) in COMMANDS.items() if not place.startswith("rollouts.")]


def command(first, *argv):
    """A command of the `rollouts` in this folder, in a new interpreter without the folders of this clone."""
    return python(first, COMMAND, *argv)


def python(first, code, *argv):
    """The code, likewise."""
    given = [str(first), list(map(str, HOMES.values())), list(map(str, argv))]
    words = [sys.executable, "-c", START + code, *map(json.dumps, given)]
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT.parent, timeout=300)


def built(hook, folder):
    pytest.importorskip("hatchling")
    done = subprocess.run([sys.executable, "-c", BUILD, hook, folder], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


def makes_a_package_and_checks(first, folder):
    made = command(first, "new", "reward", "brief", "--dest", folder)
    assert made.returncode == 0, made.stderr
    file = folder / "brief" / "rollouts_brief" / "__init__.py"
    checked = command(first, "check", f"{file}:brief", "--only", "definition")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "keeps the contract" in checked.stdout


@pytest.mark.slow
def test_a_wheel_has_all_packages(tmp_path):
    """So do a git URL and an sdist, of which pip makes the wheel."""
    wheel = zipfile.ZipFile(built("build_wheel", tmp_path))
    assert {name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" not in name} == set(HOMES)
    for package, home in HOMES.items():
        files = (file for file in (home / package).rglob("*") if file.is_file() and "__pycache__" not in file.parts)
        assert {file.relative_to(home).as_posix() for file in files} <= set(wheel.namelist())
    wheel.extractall(tmp_path / "site")
    makes_a_package_and_checks(tmp_path / "site", tmp_path)


def test_an_editable_install_knows_all_folders(tmp_path):
    wheel = zipfile.ZipFile(built("build_editable", tmp_path))
    (pth,) = (name for name in wheel.namelist() if name.endswith(".pth"))
    assert wheel.read(pth).decode().split() == list(map(str, HOMES.values()))


@pytest.mark.slow
def test_an_editable_install_of_before_finds_what_is_new(tmp_path):
    """Its path has only the folder of the clone, and its metadata name the plugin of pytest as before."""
    makes_a_package_and_checks(ROOT, tmp_path)
    assert command(ROOT, "view", "--help").returncode == 0
    assert python(ROOT, "from rollouts.training.rl_loop import run_rl_training").returncode == 0
    assert python(ROOT, "from rollouts.training.backends.fsdp import create_fsdp_backend").returncode == 0
    done = python(ROOT, LOAD)  # as a run loads the setting that it saved
    assert done.returncode == 0, done.stderr


def test_a_module_is_the_same_by_its_earlier_name():
    """Also a submodule: a second copy would have classes of its own."""
    plugin = importlib.import_module("rollouts.check.pytest_plugin")
    assert plugin is importlib.import_module("rollouts_check.pytest_plugin")
    assert rollouts.check is rollouts_check and rollouts.primitives is rollouts_notes.primitives
    assert rollouts.primitives.types is rollouts_notes.primitives.types is sys.modules["rollouts.primitives.types"]
    assert importlib.import_module("rollouts.training.rl_losses") is importlib.import_module(
        "rollouts_notes.pytorch_factory"
    )
    for name in ("", ".options", ".vllm"):
        servers = importlib.import_module(f"rollouts.inference.servers{name}")
        assert servers is importlib.import_module(f"rollouts_servers{name}")
    for name, new in (("fsdp", "backend"), ("ranks", "ranks"), ("rendezvous", "rendezvous")):
        sharded = importlib.import_module(f"rollouts.training.backends.{name}")
        assert sharded is importlib.import_module(f"rollouts_fsdp.{new}")
    assert rollouts.spending is rollouts_servers.spending
    with pytest.raises(ModuleNotFoundError, match=r"rollouts\.primitives\.no_such_module"):
        importlib.import_module("rollouts.primitives.no_such_module")


def test_the_wheel_for_a_worker_has_all_packages(tmp_path):
    names = zipfile.ZipFile(base_wheel(tmp_path)).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == set(HOMES)


@pytest.fixture
def core(tmp_path):
    """A folder that has the core alone."""
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "rollouts").symlink_to(ROOT / "rollouts", target_is_directory=True)
    return tmp_path / "core"


@pytest.mark.parametrize("name", [OUTSIDE[0], *(pytest.param(each, marks=pytest.mark.nightly) for each in OUTSIDE[1:])])
def test_a_command_of_a_missing_package_says_what_to_install(name, core):
    done = command(core, name, "--help")
    package = COMMANDS[name][0].partition(".")[0]
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: `rollouts {name}`: the package {package} of rollouts-rl is missing\n")
    assert "type: pip install --force-reinstall rollouts-rl" in done.stderr


@pytest.mark.parametrize(
    ("words", "package"),
    [
        (("eval", "--inference", "vllm"), "rollouts_servers"),
        (("eval", "--inference", "openai"), "rollouts_servers"),
        (("run", "--training", "fsdp"), "rollouts_fsdp"),
    ],
)
def test_a_component_of_a_missing_package_says_what_to_install(words, package, core):
    done = command(core, *words, "--env", "calculator")
    assert (done.returncode, done.stdout) == (2, "")
    missing = f"the package {package} of rollouts-rl is missing type: pip install --force-reinstall rollouts-rl"
    assert missing in done.stderr


@pytest.mark.parametrize(
    ("line", "package"),
    [
        ("import rollouts.primitives", "rollouts_notes"),
        pytest.param("from rollouts.training import run_rl_training", "rollouts_notes", marks=pytest.mark.nightly),
        pytest.param("import rollouts.training.rl_losses", "rollouts_notes", marks=pytest.mark.nightly),
        ("from rollouts.training.types import RLTrainingConfig", "rollouts_notes"),
        ("from rollouts.inference.servers.vllm import VLLM", "rollouts_servers"),
        pytest.param(
            "from rollouts.providers import create_vllm_inference", "rollouts_servers", marks=pytest.mark.nightly
        ),
        ("from rollouts.spending import SpendingStore", "rollouts_servers"),
        ("from rollouts.training import FSDPTrainingBackend", "rollouts_fsdp"),
        ("from rollouts.training.backends import ranks", "rollouts_fsdp"),
    ],
)
def test_a_name_of_a_missing_package_says_what_to_install(line, package, core):
    done = python(core, f"from rollouts.training.types import Sample, TrainBatch\n{line}")
    assert done.returncode == 1
    assert f"MissingPackageError: the package {package} of rollouts-rl is missing\n" in done.stderr
    assert "type: pip install --force-reinstall rollouts-rl" in done.stderr
