"""Checks of the package: what its import costs, and whether its wheel works in a virtual environment of its own.

No network is needed. Without a package index, the dependencies are those of the running environment.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollouts.author_code import CORE, INSTALLED
from rollouts.check.environments.subject import Subject
from rollouts.check.environments.traces import draw_in, run_child
from rollouts.check.report import FailedError, SkippedError
from rollouts.env.wheels import base_wheel
from rollouts.plugins.index import normalize
from rollouts.scaffold.packages import example_description

FORBIDDEN = ("torch", "transformers", "tensorflow", "jax", "vllm", "sglang")
IMPORT_SECONDS = 3.0
COMMAND_SECONDS = 600.0
LEFT_OUT = {".git", ".venv", "venv", "node_modules", "build", "dist", ".tox", "runs"}
"""Folders beside pyproject.toml that no build needs."""
NO_NETWORK = re.compile(
    r"connection (broken|refused|error)|name resolution|NewConnectionError|failed to establish|Max retries|ProxyError|"
    r"ConnectTimeout|network is unreachable|getaddrinfo|no-index|Looking in links",
    re.IGNORECASE,
)
"""What pip writes if it finds no package index."""


def imports(subject: Subject) -> str:
    """The import is fast, loads no torch, and opens no connection."""
    if not subject.is_importable:
        raise SkippedError("the class has no name that another process can import")
    seconds = IMPORT_SECONDS
    for _ in range(2):  # the first import may compile
        found = _imported(subject)
        seconds = min(seconds, found["seconds"])
        if found["seconds"] < IMPORT_SECONDS:
            break
    tried = "import the environment in a process of its own"
    for what, change in (
        ("modules", "import it inside the function that needs it: an environment may run where it is not installed"),
        ("sockets", "connect in `setup`, not when the module is imported"),
    ):
        for name, place in found[what].items():
            did = f"it imports {name}" if what == "modules" else f"it uses a socket ({name})"
            raise FailedError(tried, did + (f" ({place})" if place else ""), change)
    if found["seconds"] >= IMPORT_SECONDS:
        seen = f"it took {found['seconds']:.1f} seconds, twice"
        change = f"let it take less than {IMPORT_SECONDS:g} s: load data and models in `setup`, or where they are used"
        raise FailedError(tried, seen, change)
    return f"{seconds:.2f} s"


def wheel(subject: Subject) -> str:
    """The package builds, installs into a new virtual environment, and gives tasks there."""
    folder = subject.found.folder
    if folder is None:
        raise SkippedError("the source of the package is not here; to check it: rollouts check FOLDER")
    base = Path(CORE).parent
    if folder == base:
        raise SkippedError("it is a part of rollouts")
    if find_spec("pip") is None:
        raise SkippedError("there is no pip in this environment")
    work = subject.scratch / "wheel"
    own = _build(folder, work / "own")
    (work / "base").mkdir()
    wheels = [own, base_wheel(work / "base")]
    venv.create(work / "env", with_pip=False, symlinks=os.name != "nt")
    python = next(iter(sorted((work / "env").glob("*/python*"))))
    remark = _install(python, wheels, subject)
    name = _qualified(folder, subject.label)
    found = draw_in(subject, str(python), name, 3)
    if str(work.resolve()) not in str(Path(found["file"]).resolve()):
        seen = f"its module is {found['file']}, not a file of the wheel"
        raise FailedError("import the environment from its wheel", seen, "add the module to the wheel's packages")
    stale = "; `description` in pyproject.toml is still that of the example: replace it" if _is_example(folder) else ""
    return f"{own.name}; {remark}{stale}"


def _imported(subject: Subject) -> dict[str, Any]:
    answer = subject.scratch / "imported.json"
    request = {"name": subject.found.name, "forbidden": FORBIDDEN, "answer": str(answer)}
    run_child([sys.executable], request, {}, sys.path)
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


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


def _install(python: Path, wheels: list[Path], subject: Subject) -> str:
    """Install the wheels, with dependencies if there is an index. Returns where the dependencies are from."""
    extras, (own, base) = _extras(subject), wheels
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


def _extras(subject: Subject) -> list[str]:
    """The extras that the environment's entry point names: `module:attr [extra]`."""
    assert subject.found.folder is not None, "only a folder is built"
    about = tomllib.loads((subject.found.folder / "pyproject.toml").read_text(encoding="utf-8"))
    points = about.get("project", {}).get("entry-points", {}).get("rollouts.environments", {})
    found = re.search(r"\[(.*)\]", str(points.get(subject.label, "")))
    return [extra.strip() for extra in found[1].split(",")] if found else []


def _is_example(folder: Path) -> bool:
    """Whether the package still has the description that `rollouts new` wrote."""
    about = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    return bool(about["project"].get("description") == example_description("environments"))


def _qualified(folder: Path, name: str) -> str:
    about = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    distribution = about["project"]["name"]
    owner, _, rest = name.partition("/")
    return f"{distribution}/{rest if normalize(owner) == normalize(distribution) else name}"


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)


def _end(done: subprocess.CompletedProcess[str]) -> str:
    """The last lines of a failed command."""
    lines = [line for line in (done.stdout + done.stderr).strip().splitlines() if line.strip()]
    return "\n".join(lines[-5:]) or f"exit code {done.returncode}"
