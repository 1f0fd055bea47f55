"""`rollouts env install | list | remove`, with real virtual environments, offline."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from comparing import logged
from made_wheels import clashing_wheels, write_wheel

import rollouts
from rollouts.cli import main
from rollouts.config.resolving import resolve
from rollouts.env.installing import all_installed, find_installed
from rollouts.errors import PluginError, UnknownComponentError
from rollouts.runs.plan import make_plan
from rollouts.runs.workers import worker_pools

ROOT = Path(__file__).parents[2]
SHORT = {"prompts_per_step": 2, "samples_per_prompt": 2, "eval_tasks": 2, "steps": 1, "max_tokens": 32}
NO_INDEX, OLD = "--no-index", "guess_old-0.3-py3-none-any.whl"


@pytest.fixture(scope="module")
def links(tmp_path_factory) -> Path:
    """A folder with wheels."""
    folder = tmp_path_factory.mktemp("links")
    clashing_wheels(folder)
    write_wheel(folder, "no_env", "1", "")
    return folder


@pytest.fixture(scope="module")
def installed(links, tmp_path_factory) -> Path:
    """A folder with an installation of one wheel."""
    folder = tmp_path_factory.mktemp("envs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLOUTS_ENVS", str(folder))
        patch.setenv("PYTHONPATH", str(links))  # what it shows is not installed
        more = ["--with", str(links / "no_env-1-py3-none-any.whl")]
        assert main(["env", "install", str(links / OLD), NO_INDEX, "--find-links", str(links), *more]) == 0
    return folder


@pytest.fixture
def envs(installed, monkeypatch) -> Path:
    monkeypatch.setenv("ROLLOUTS_ENVS", str(installed))
    return installed


@pytest.fixture
def empty(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("ROLLOUTS_ENVS", str(tmp_path / "envs"))
    return tmp_path / "envs"


def test_what_is_installed_is_listed_and_locked(envs, capsys):
    assert main(["env", "list"]) == 0
    (line,) = capsys.readouterr().out.splitlines()[2:]
    found = find_installed("guess_old/guess-old")
    assert line.split()[:6] == ["guess-old", "guess_old", "0.3", found.install.python, "0.1.0", "1"]
    locked = found.lock.read_text().splitlines()
    assert {"clash==1", "rollouts-rl==0.1.0", "no_env==1"} <= {each.partition("  # ")[0] for each in locked}
    assert not any(each.startswith("torch") for each in locked)


def test_a_worker_in_a_virtual_environment_has_no_torch(envs, links, monkeypatch):
    """The same question, asked in the process of the run, in a worker of its Python, and in a virtual environment."""
    import torch

    def torch_in(env: str, worker: str) -> list[bool]:
        (found,) = make_plan(resolve({"env": env, "worker": worker, "eval_tasks": 0})).environments
        info = next(found.draw("train", random.Random(0))).info
        assert (info["executable"] == sys.executable) == (worker != "venv")
        return info["torch is imported, can be imported"]

    for wheel in (links / OLD, links / "clash-1-py3-none-any.whl"):
        monkeypatch.syspath_prepend(wheel)
    with worker_pools():
        assert torch.__name__ in sys.modules
        assert torch_in("guess_old:Guess", "inline") == [True, True]
        assert torch_in("guess_old:Guess", "process") == [False, True]
        assert torch_in("guess-old", "venv") == [False, False]


@pytest.mark.slow
def test_environments_that_clash_train_in_one_run(envs, links, empty, tmp_path, monkeypatch):
    """Neither is installed in the Python of the run."""
    monkeypatch.chdir(tmp_path)
    empty.mkdir()
    (empty / "guess-old").symlink_to(envs / "guess-old")
    assert main(["env", "install", "guess-new", NO_INDEX, "--find-links", str(links)]) == 0
    for name, version in (("guess-old", "1"), ("guess_new/guess-new", "2")):
        found = find_installed(name)
        code = "import clash, importlib.util as u, rollouts; print(clash.VERSION, u.find_spec('torch'))"
        code += "; print(rollouts.__file__)"
        done = subprocess.run([found.python, "-I", "-c", code], capture_output=True, text=True, check=True)
        seen, torch, own = done.stdout.split()
        assert (seen, torch) == (version, "None") and Path(own).resolve().is_relative_to(found.venv.resolve())
    envs_given = {"old": {"name": "guess-old"}, "new": {"name": "guess-new", "digits": 2}}
    rollouts.run(env=envs_given, worker="venv", loss="grpo", out="run", **SHORT)
    (last,) = (line for line in logged("run") if "reward/mean" in line)
    assert {value for key, value in last.items() if key.endswith("clash_version")} == {1.0, 1.5, 2.0}
    for word, version in (("old", "1"), ("new", "2")):
        assert f"clash=={version}\n" in Path(f"run/workers/{word}.lock").read_text()


@pytest.mark.nightly
def test_the_numbers_are_those_of_a_run_without_worker(envs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("hatchling")
    assert main(["env", "install", str(ROOT / "environments" / "calculator"), NO_INDEX]) == 0
    try:
        for worker in ("inline", "venv"):
            rollouts.run(env="calculator", worker=worker, loss="grpo", out=worker, **SHORT)
    finally:
        assert main(["env", "remove", "calculator"]) == 0
    assert logged("venv") == logged("inline")


def test_a_run_names_the_line_to_type(empty, capsys):
    assert main(["run", "--env", "calculator", "--loss", "grpo", "--worker", "venv"]) == 2
    error = capsys.readouterr().err
    assert "type: rollouts env install" in error and "environments/calculator" in error


def test_what_is_not_installed_names_the_line_to_type(envs):
    with pytest.raises(UnknownComponentError, match=r"type: rollouts env install .*environments/calculator"):
        find_installed("calculator")
    with pytest.raises(UnknownComponentError, match="did you mean: guess-old"):
        find_installed("guess-olds")


HOOKS = '''\
import rollouts
from rollouts import hookimpl


class Plain:
    """A task of another package."""

    def tasks(self, split, rng):
        import no_env

        return [rollouts.Task(f"Say {n}.", info={"from": no_env.__name__}) for n in range(4)]

    @rollouts.reward
    def short(self, trajectory):
        return 1.0


@hookimpl
def rollouts_find_component(kind, name):
    return Plain if (kind, name) == ("environments", "pack/no-env") else None


@hookimpl
def rollouts_list_components(kind):
    return ["pack/no-env"] if kind == "environments" else None
'''


@pytest.mark.nightly
def test_another_package_may_make_environments_of_it(links, empty, tmp_path, monkeypatch, capsys):
    """A hook of the package beside it lists and finds their names."""
    plain = str(links / "no_env-1-py3-none-any.whl")
    assert main(["env", "install", plain, NO_INDEX]) == 2
    assert "add that one: --with PACKAGE" in capsys.readouterr().err
    pack = write_wheel(tmp_path, "pack", "1", HOOKS, ["rollouts-rl"], "[rollouts]\npack = pack\n")
    assert main(["env", "install", plain, NO_INDEX, "--with", str(pack)]) == 0
    assert "rollouts run --env pack/no-env --loss grpo --worker venv" in capsys.readouterr().out
    assert find_installed("pack/no-env").install.package == "no_env"
    with worker_pools():
        (found,) = make_plan(resolve({"env": "pack/no-env", "worker": "venv", "eval_tasks": 0})).environments
        assert next(found.draw("train", random.Random(0))).info == {"from": "no_env"}
    assert main(["env", "install", str(pack), NO_INDEX, "--with", plain]) == 0
    with pytest.raises(
        PluginError, match=r"2 virtual environments have .*; remove all but one:\n  rollouts env remove"
    ):
        find_installed("pack/no-env")


def test_a_failed_installation_leaves_the_earlier_one(links, envs, capsys, tmp_path):
    before = all_installed()
    kept = tmp_path / "kept.lock"
    kept.write_text(find_installed("guess-old").lock.read_text().replace("clash==1", "clash==2"))
    given = ["env", "install", "guess-old", NO_INDEX, "--find-links", str(links), "--lock", str(kept)]
    assert main(given) == 2
    error = capsys.readouterr().err
    assert "guess-old cannot be installed" in error and "Traceback" not in error
    assert "clash==2" in error  # the lock was read
    assert all_installed() == before
    assert [path.name for path in (envs / "guess-old").glob("venv-*")] == [before[0].venv.name]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        pytest.param("no-such-package", "No matching distribution found for no-such", marks=pytest.mark.nightly),
        pytest.param("no-env", "no_env 1 has no environment", marks=pytest.mark.nightly),
        ("calculator", "calculator is the name of an environment"),
        ("./nowhere.whl", "there is no wheel './nowhere.whl'"),
        ("./nowhere", "there is no folder './nowhere'"),
        ("not a requirement", "is not a requirement, a wheel or a folder"),
        (".", "has no pyproject.toml with a [project] name"),
    ],
)
def test_what_cannot_be_installed(given, said, links, empty, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["env", "install", given, NO_INDEX, "--find-links", str(links)]) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error
    assert all_installed() == [] and list(empty.glob("*/*")) == []


def test_an_interpreter_that_does_not_exist(empty, capsys):
    assert main(["env", "install", "guess-old", NO_INDEX, "--python", "python9.9"]) == 2
    assert "python9.9" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)])
def test_a_killed_installation_leaves_nothing_half(how, links, empty, capsys):
    command = [sys.executable, "-m", "rollouts", "env", "install", "guess-old", NO_INDEX, "--find-links", str(links)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stderr is not None
    while not process.stderr.readline().startswith(b"installing"):
        pass
    os.kill(process.pid, how)
    process.communicate()
    assert process.returncode in (-signal.SIGKILL, 130)
    assert all_installed() == []
    if how == signal.SIGINT:
        assert list(empty.glob("*/*")) == []
    else:  # the next command removes what is left
        while _runs(empty):
            time.sleep(0.05)
        assert main(["env", "install", str(links / "guess_old-0.3-py3-none-any.whl"), NO_INDEX]) == 2
        assert list(empty.glob("*/*")) == []
    capsys.readouterr()


def _runs(folder: Path) -> bool:
    """Whether a process still installs something there."""
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    return any(str(folder).encode() in line for line in lines)


def test_remove(envs, empty, capsys):
    assert main(["env", "list"]) == 0
    assert "no environment is installed" in capsys.readouterr().out
    shutil.copytree(envs / "guess-old", empty / "guess-old", symlinks=True)
    assert main(["env", "remove", "guess-old"]) == 0
    assert "removed guess_old 0.3" in capsys.readouterr().out
    assert all_installed() == [] and list(empty.glob("*/")) == []
    assert main(["env", "remove", "guess-old"]) == 2
    assert "type: rollouts env list" in capsys.readouterr().err
