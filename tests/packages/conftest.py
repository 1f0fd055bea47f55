"""Strangers' packages, built and installed for real: by pip, offline, from sources outside any repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import forks
import pytest

SOURCES = Path(__file__).parent / "sources"
PACKAGES = ("acme_env", "acme_rewards", "acme_loss", "acme_filter")


@pytest.fixture(scope="session")
def pip_install(tmp_path_factory) -> Callable[..., Path]:
    """pip_install(*packages) -> the folder they were installed to; the sources are copied first, so nothing is
    written into the repository.
    """
    pytest.importorskip("hatchling")

    def install(*packages: str) -> Path:
        work = tmp_path_factory.mktemp("strangers")
        copies = [str(shutil.copytree(SOURCES / name, work / "sources" / name)) for name in packages]
        target = work / "site"
        offline = ["--no-index", "--no-deps", "--no-build-isolation", "--no-compile", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "install", "-q", *offline, "--target", str(target), *copies]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=work)
        assert done.returncode == 0, done.stdout + done.stderr
        return target

    return install


@pytest.fixture(scope="session")
def acme(pip_install) -> Path:
    """The four packages."""
    return pip_install(*PACKAGES)


@pytest.fixture
def rollouts(tmp_path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """rollouts(*arguments, path=[folders]) runs the command in a folder of its own, with the folders on PYTHONPATH."""

    def run(*arguments: str, path: tuple[Path, ...] = (), timeout: float = 180) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "200",
        }
        command = [sys.executable, "-m", "rollouts", *arguments]
        return forks.run(command, timeout=timeout, cwd=tmp_path, env=environment)

    return run
