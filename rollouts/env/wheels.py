"""Wheels of packages that are installed here, made from their files.

A virtual environment for a worker needs the rollouts that runs, which may be a source folder that was installed with
`pip install -e`, and which no package index may have. Its wheel is made from the package's files and the metadata of
its installation. The same is done for the packages that rollouts depends on, if no index is used.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from rollouts.doors import HOMES
from rollouts.errors import PluginError
from rollouts.plugins.index import normalize

BASE = "rollouts-rl"
METADATA = ("METADATA", "WHEEL", "entry_points.txt", "top_level.txt")  # what a wheel keeps of an installation


def base_wheel(folder: Path) -> Path:
    """Write the wheel of the rollouts that runs. Raises PluginError if rollouts is not installed."""
    try:
        base = distribution(BASE)
    except PackageNotFoundError:
        raise PluginError(
            "rollouts itself is not installed, so it cannot be copied into a virtual environment\n"
            "type, in its folder: pip install -e ."
        ) from None
    code = dict[str, Path]()
    for package, home in HOMES.items():
        code |= {file.relative_to(home).as_posix(): file for file in (home / package).rglob("*") if _is_code(file)}
    return _write_wheel(base, code, folder)


def dependency_wheels(folder: Path) -> None:
    """Write wheels of the packages that the base of rollouts depends on, if they are installed here."""
    waiting, seen = list(_requirements(distribution(BASE))), set[str]()
    while waiting:
        name = normalize(waiting.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:  # a requirement of another system, such as colorama; the resolver says what lacks
            continue
        waiting += _requirements(found)
        _write_wheel(found, _recorded(found), folder)


def _requirements(package: Distribution) -> Iterator[str]:
    """The names of the packages that it requires without an extra."""
    for line in package.requires or ():
        requirement, _, marker = line.partition(";")
        if not re.search(r"\bextra\b", marker):
            yield re.split(r"[^A-Za-z0-9._-]", requirement.strip())[0]


def _recorded(package: Distribution) -> dict[str, Path]:
    """The files that its installation wrote, without metadata and scripts, which an installer writes."""
    files = {}
    for path in package.files or ():
        parts = path.parts
        if ".." not in parts and not path.is_absolute() and not parts[0].endswith(".dist-info"):
            if _is_code(file := Path(str(path.locate()))):
                files[path.as_posix()] = file
    return files


def _is_code(file: Path) -> bool:
    return file.is_file() and "__pycache__" not in file.parts and file.suffix != ".pyc"


def _write_wheel(package: Distribution, files: dict[str, Path], folder: Path) -> Path:
    name, version = normalize(package.metadata["Name"]).replace("-", "_"), package.version
    tags = re.findall(r"^Tag: *(\S+)-(\S+)-(\S+)", package.read_text("WHEEL") or "", re.MULTILINE)
    tag = "-".join(".".join(sorted(set(each))) for each in zip(*tags, strict=True)) or "py3-none-any"
    contents = {inside: file.read_bytes() for inside, file in sorted(files.items())}
    info = f"{name}-{version}.dist-info"
    for each in METADATA:
        if (text := package.read_text(each)) is not None:
            contents[f"{info}/{each}"] = text.encode()
    record = "".join(f"{inside},sha256={_digest(data)},{len(data)}\n" for inside, data in contents.items())
    contents[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    path = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as wheel:
        for inside, data in contents.items():
            wheel.writestr(inside, data)
    return path


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
