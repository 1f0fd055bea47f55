"""The component that is checked, before it is imported; and the folder of its package, with the wheel that it builds.

No network is needed. Without a package index, the dependencies of a wheel are those of the running environment.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from rollouts.author_code import INSTALLED
from rollouts.config.names import HELD, normalize
from rollouts.env.installing import BASE, base_wheel
from rollouts_check.report import FailedError, SkippedError
from rollouts_check.scaffold.packages import example_description

COMMAND_SECONDS = 600.0
LEFT_OUT = {".git", ".venv", "venv", "node_modules", "build", "dist", ".tox", "runs"}
"""Folders beside pyproject.toml that no build needs."""
NO_NETWORK = re.compile(
    r"connection (broken|refused|error)|name resolution|NewConnectionError|failed to establish|Max retries|ProxyError|"
    r"ConnectTimeout|network is unreachable|getaddrinfo|no-index|Looking in links",
    re.IGNORECASE,
)
"""What pip writes if it finds no package index."""


class Package:
    """The folder of a package. Its wheel is built, and installed into a new virtual environment, at most once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._installed: Installed | None = None
        self._was_tried = False

    def installed(self) -> Installed:
        """The installed wheel. If it cannot be built or installed, raises FailedError the first time, and SkippedError
        later; also if it cannot be tried here.
        """
        if find_spec("pip") is None:
            raise SkippedError("there is no pip in this environment")
        if self._installed is None:
            if self._was_tried:
                raise SkippedError("the wheel of this package could not be installed, as another check says")
            self._was_tried = True
            self._installed = self._install()
        return self._installed

    @property
    def is_core(self) -> bool:
        """Whether this is the package of rollouts itself."""
        return normalize(self._about()["project"]["name"]) == BASE

    def qualified(self, name: str) -> str:
        """The name of a component in full: `distribution/name`."""
        distribution = self._about()["project"]["name"]
        owner, _, rest = name.partition("/")
        return f"{distribution}/{rest if normalize(owner) == normalize(distribution) else name}"

    def stale(self, kind: str) -> str:
        """A remark if the package still has the description that `rollouts new` wrote for this kind; else empty."""
        is_example = self._about()["project"].get("description") == example_description(kind)
        return "; `description` in pyproject.toml is still that of the example: replace it" if is_example else ""

    def entry_points(self) -> dict[str, dict[str, str]]:
        """The entry points of the package by group and name."""
        found: dict[str, dict[str, str]] = self._about().get("project", {}).get("entry-points", {})
        return found

    def _about(self) -> dict[str, Any]:
        return tomllib.loads((self.folder / "pyproject.toml").read_text(encoding="utf-8"))

    def _install(self) -> Installed:
        work = Path(tempfile.mkdtemp(prefix="rollouts-wheel-")).resolve()
        weakref.finalize(self, shutil.rmtree, work, ignore_errors=True)
        own = _build(self.folder, work / "own")
        (work / "base").mkdir()
        wheels = [own, base_wheel(work / "base")]
        venv.create(work / "env", with_pip=False, symlinks=os.name != "nt")
        python = next(iter(sorted((work / "env").glob("*/python*"))))
        return Installed(python, work, f"{own.name}; {_install(python, wheels, self._extras())}")

    def _extras(self) -> list[str]:
        """The extras that entry points name: `module:attr [extra]`."""
        values = [value for points in self.entry_points().values() for value in points.values()]
        found = [re.search(r"\[(.*)\]", str(value)) for value in values]
        return list(dict.fromkeys(extra.strip() for each in found if each for extra in each[1].split(",")))


class Installed(NamedTuple):
    """A virtual environment with the wheel of a package: its Python, a folder around it, and how it was made."""

    python: Path
    folder: Path
    remark: str

    def check_module(self, file: str) -> None:
        """Raise FailedError if a module of the component, this file, is not one of the virtual environment."""
        if str(self.folder) not in str(Path(file).resolve()):
            seen = f"its module is {file}, not a file of the wheel"
            raise FailedError("import the component from its wheel", seen, "add the module to the wheel's packages")


class Found(NamedTuple):
    """A component before it is imported: its name for the report, the name that finds it, and the folder of its package
    if there is one. `path` is added to `sys.path`. Components of one folder share its `package`.
    """

    label: str
    name: str
    folder: Path | None = None
    path: tuple[str, ...] = ()
    kind: str = "environments"
    package: Package | None = None

    @property
    def is_importable(self) -> bool:
        """Whether another process can find the component by its name."""
        return HELD.fullmatch(self.name) is None

    def use_path(self) -> None:
        """Let this process import the modules of the package."""
        for folder in reversed(self.path):
            if folder not in sys.path:
                sys.path.insert(0, folder)

    def its_package(self) -> Package:
        """The package. Raises SkippedError if its source is not here."""
        if self.folder is None:
            raise SkippedError("the source of the package is not here; to check it: rollouts check FOLDER")
        package = self.package or Package(self.folder)
        if package.is_core:  # also where a copy of rollouts on PYTHONPATH runs
            raise SkippedError("it is a part of rollouts")
        return package


def _build(folder: Path, work: Path) -> Path:
    """Build the wheel of a copy of the folder. Raises FailedError, or SkippedError if only the network is missing."""

    def left_out(inside: str, names: list[str]) -> set[str]:
        return {name for name in names if name == "__pycache__" or (Path(inside) == folder and name in LEFT_OUT)}

    copy = shutil.copytree(folder, work / "source", ignore=left_out, symlinks=True)
    about = tomllib.loads((copy / "pyproject.toml").read_text(encoding="utf-8"))
    backend = str(about.get("build-system", {}).get("build-backend", "setuptools.build_meta")).partition(".")[0]
    isolation = ["--no-build-isolation"] if find_spec(backend) is not None else []
    done = _pip("wheel", "--no-deps", *isolation, "--wheel-dir", str(work / "wheels"), str(copy))
    built = sorted((work / "wheels").glob("*.whl")) if (work / "wheels").is_dir() else []
    if built:
        return built[-1]
    if not isolation and NO_NETWORK.search(done.stdout + done.stderr):
        raise SkippedError(f"{backend} is not installed, and there is no package index to get it from")
    raise FailedError(f"build the wheel of {folder}", _end(done), "correct pyproject.toml")


def _install(python: Path, wheels: list[Path], extras: list[str]) -> str:
    """Install the wheels, with dependencies if there is an index. Returns where the dependencies are from."""
    own, base = wheels
    if not os.environ.get("PIP_NO_INDEX"):
        given = [f"{own}[{','.join(extras)}]" if extras else str(own), str(base)]
        done = _pip("--python", str(python), "install", "--retries", "0", "--timeout", "10", *given)
        if done.returncode == 0:
            return "dependencies from the index" + (f", with [{','.join(extras)}]" if extras else "")
        if not NO_NETWORK.search(done.stdout + done.stderr):
            raise FailedError("install the wheel into a new virtual environment", _end(done), "correct `dependencies`")
    done = _pip("--python", str(python), "install", "--no-deps", "--no-index", str(own), str(base))
    if done.returncode != 0:
        raise FailedError("install the wheel into a new virtual environment", _end(done), "correct pyproject.toml")
    (site,) = (python.parent.parent / "lib").glob("python*/site-packages")
    paths = [path for path in sys.path if any(part in f"{path}/" for part in INSTALLED)]
    (site / "rollouts_check.pth").write_text("\n".join(paths) + "\n")
    return "no index: dependencies of this environment"


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    own = without_own_path() if arguments[0] == "--python" else None
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)


def without_own_path() -> dict[str, str]:
    """The environment variables without PYTHONPATH, because a copy of the package there would hide the wheel."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _end(done: subprocess.CompletedProcess[str]) -> str:
    """The last lines of a failed command."""
    lines = [line for line in (done.stdout + done.stderr).strip().splitlines() if line.strip()]
    return "\n".join(lines[-5:]) or f"exit code {done.returncode}"
