"""Tiny packages with an environment, as wheels: made for tests."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

GUESS = '''\
"""An environment that was made for a test."""

import importlib.util
import sys

import clash
import rollouts


class Guess:
    """Guess a number."""

    def __init__(self, digits: int = 1) -> None:
        self.digits = digits

    def tasks(self, split, rng):
        while True:
            number = rng.randrange(10**self.digits)
            torch = ["torch" in sys.modules, importlib.util.find_spec("torch") is not None]
            info = {"executable": sys.executable, "torch is imported, can be imported": torch}
            yield rollouts.Task(f"Say {number}.", answer=str(number), info=info, id=f"n{number}")

    @rollouts.reward
    def says(self, task, trajectory) -> float:
        return float(task.answer in trajectory.last_text)

    @rollouts.metric
    def clash_version(self) -> float:
        return float(clash.VERSION)
'''


def write_wheel(
    folder: Path, name: str, version: str, code: str, requires: Sequence[str] = (), entry_points: str = ""
) -> Path:
    """A wheel with the module `name`, as a build backend would make it."""
    info, path = f"{name}-{version}.dist-info", folder / f"{name}-{version}-py3-none-any.whl"
    metadata = [
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}",
        *(f"Requires-Dist: {each}" for each in requires),
    ]
    files = {
        f"{name}.py": code,
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": entry_points,
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)
    return path


def clashing_wheels(folder: Path) -> tuple[Path, Path]:
    """The wheels of `guess-old` and `guess-new`, which require versions of `clash` that exclude each other."""
    folder.mkdir(parents=True, exist_ok=True)
    for version in ("1", "2"):
        write_wheel(folder, "clash", version, f"VERSION = {version}\n")
    old, new = (
        write_wheel(
            folder,
            f"guess_{word}",
            "0.3",
            GUESS,
            ["rollouts-rl", f"clash=={version}"],
            f"[rollouts.environments]\nguess-{word} = guess_{word}:Guess\n[rollouts.contract]\nversion = 1\n",
        )
        for word, version in (("old", 1), ("new", 2))
    )
    return old, new
