"""Train in one run with two packages that require versions of `mcp` which exclude each other.

    python scripts/clashing_packages.py
    python scripts/clashing_packages.py --keep    # leave the folders, and print where they are

`rollouts new environment` makes both packages. Each then requires its version of mcp, imports a module that only this
version has, and says its version as a metric. `rollouts env install` installs each in a virtual environment of its own,
and one run with `--worker venv` trains one step in both.

Needs pip and a package index; without an index it says so and does nothing. The exit code is 1 if a step fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from stopwatch import StepError, Stopwatch, expect, run

PACKAGES = {"one": ("mcp<2", "mcp.server.fastmcp", "1"), "two": ("mcp==2.0.0", "mcp.client.client", "2")}
"""The name of each package: what it requires, a module that only this version has, and the first number of it."""

METRIC = '''
    @metric
    def mcp_version(self) -> float:
        """The first number of the version of mcp."""
        return float(version("mcp").partition(".")[0])
'''


def main(argv: Sequence[str] | None = None) -> int:
    """Take all steps, and print how long each took. Returns the exit code."""
    return in_a_folder(take_steps, [requirement for requirement, _, _ in PACKAGES.values()], __doc__, argv)


def in_a_folder(
    steps: Callable[[Path, Stopwatch], None], requirements: Iterable[str], about: str, argv: Sequence[str] | None
) -> int:
    """Take steps in a folder that is then removed, unless a requirement cannot be downloaded. Returns the exit code."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="leave the folders, and print where they are")
    arguments = parser.parse_args(argv)
    folder, watch = Path(tempfile.mkdtemp(prefix="rollouts-")).resolve(), Stopwatch()
    os.environ["ROLLOUTS_ENVS"] = str(folder / "envs")
    with contextlib.ExitStack() as stack:
        if arguments.keep:
            print(folder, file=sys.stderr)
        else:
            stack.callback(shutil.rmtree, folder)
        for requirement in requirements:
            if missing := unreachable(requirement, folder):
                print(f"skipped: {requirement} cannot be downloaded: {missing}")
                return 0
        try:
            steps(folder, watch)
        except StepError as error:
            print(f"{watch.table()}\nFAILED: {error}")
            return 1
    print(watch.table())
    return 0


def unreachable(requirement: str, folder: Path) -> str:
    """Why pip cannot download it; "" if it can."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--retries", "1"]
    done = subprocess.run([*pip, requirement, "-d", "wheels"], cwd=folder, capture_output=True, text=True)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def take_steps(folder: Path, watch: Stopwatch) -> None:
    """Every step. Raises StepError."""
    rollouts = [sys.executable, "-m", "rollouts"]
    for word, (requirement, module, _) in PACKAGES.items():
        name = f"mcp_{word}"
        with watch.step(f"rollouts new environment {name}"):
            run([*rollouts, "new", "environment", name], folder)
            change(folder / name, requirement, module)
        with watch.step(f"rollouts env install ./{name}"):
            run([*rollouts, "env", "install", f"./{name}"], folder)
    with watch.step("rollouts run, both"):
        names = [word for each in PACKAGES for word in ("--env", f"{each}=mcp_{each}")]
        size = "--steps 1 --prompts-per-step 4 --samples-per-prompt 2 --eval-tasks 2 --max-tokens 32".split()
        run([*rollouts, "run", *names, "--worker", "venv", "--loss", "grpo", *size, "--out", "run"], folder)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    seen: dict[str, float] = {}
    for word, (_, _, first) in PACKAGES.items():
        lock = (folder / "run" / "workers" / f"{word}.lock").read_text()
        found = re.search(r"^mcp==(.*)$", lock, re.MULTILINE)
        expect(found is not None and found[1].startswith(f"{first}."), f"the lock of {word} has another mcp:\n{lock}")
        values = [value for line in lines for key, value in line.items() if re.search(rf"\b{word}/.*mcp_version$", key)]
        expect(bool(values) and set(values) == {float(first)}, f"{word} has seen other versions of mcp: {values}")
        seen[word] = values[0]
        print(f"{word}: {found[0] if found else ''}, its metric mcp_version is {values[0]:g}")
    trained = [line["step"] for line in lines if "loss/total" in line or "reward/mean" in line]
    expect(len(trained) >= 1, f"no step was trained: {lines}")


def change(package: Path, requirement: str, module: str) -> None:
    """Let a new package require this version of mcp, import this module, and say the version."""
    project, code = package / "pyproject.toml", next(package.glob("rollouts_*/__init__.py"))
    text = re.sub(r"^dependencies = \[", f'dependencies = ["{requirement}", ', project.read_text(), flags=re.MULTILINE)
    expect(requirement in text, f"{project} has no dependencies")
    project.write_text(text)
    text = code.read_text()
    imports = f"from importlib.metadata import version\n\nimport {module}  # noqa: F401\n"
    text = (
        text.replace("\nfrom rollouts import ", f"\n{imports}from rollouts import metric, ", 1).rstrip() + "\n" + METRIC
    )
    code.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
