"""The packages and folders of the project's description."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

from first_notes import rows
from first_notes.rows import Table

ROWS = Table()
ROOT = Path(__file__).parents[2]


def imported_by_rollouts(package: str) -> bool:
    texts = (path.read_text() for path in (ROOT / "rollouts").rglob("*.py"))
    return any(f"import {package}" in text or f"from {package}" in text for text in texts)


def depends(package: str) -> bool:
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*about["dependencies"], *(line for extra in about["optional-dependencies"].values() for line in extra)]
    return any(line.startswith(package) for line in lines)


@ROWS("torch", "transformers", "peft", "trio", "pluggy", "httpx")
def _() -> None:
    for package in ("torch", "transformers", "peft", "trio", "pluggy", "httpx"):
        assert depends(package) and imported_by_rollouts(package), package
        assert importlib.metadata.version(package)


@ROWS("datasets")
def _() -> None:
    from rollouts.training import load_dataset

    assert depends("datasets") and imported_by_rollouts("datasets")
    assert len(load_dataset(rows.parquet_file({"prompt": "2 + 2?"}, 3))) == 3


@ROWS("gymnasium", needs="rollouts-gymnasium")
def _() -> None:
    small = ("--eval-tasks", "2", "--max-tokens", "24", "--max-turns", "2")
    printed = rows.command("eval", "--env", "gym/FrozenLake-v1", *small, "--out", str(rows.new_folder() / "run"))
    assert "reward" in printed


@ROWS("pytest", "rollouts/ tests/ docs/ pyproject.toml")
def _() -> None:
    assert all((ROOT / name).exists() for name in ("rollouts", "tests", "docs", "pyproject.toml"))
    assert "pytest" in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]


@ROWS("pluggy entry points: environments, rewards, filters, losses, inference")
def _() -> None:
    from rollouts.plugins.index import installed_components

    for kind in ("environments", "rewards", "filters", "losses", "inference"):
        assert installed_components(kind), kind


@ROWS("`rollouts run --env calculator --loss grpo`")
def _() -> None:
    assert any("reward/mean" in line for line in rows.metrics_of(rows.both_phases() / "rl"))


@ROWS("mixing third-party reward plugins")
def _() -> None:
    path = rows.new_folder() / "mine.py"
    path.write_text("def short(trajectory) -> float:\n    return float(len(trajectory.last_text) < 9)\n")
    rewards = ("--reward", "env:1", "--reward", f"{path}:short:-0.1")
    assert "short" in rows.command("run", "--env", "calculator", *rewards, "--steps", "1", "--dry-run")


@ROWS("LoRA or full FSDP")
def _() -> None:
    assert (rows.sharded_run() / "summary.json").is_file()
    assert "lora" in rows.command("run", "--env", "calculator", "--lora-rank", "4", "--steps", "1", "--dry-run").lower()


@ROWS("publishing environments as pip packages")
def _() -> None:
    assert "calculator" in rows.command("plugins", "list", "--kind", "environments")
    assert '[project.entry-points."rollouts.' in (ROOT / "docs" / "plugins.md").read_text()
    assert "rollouts.environments" in (ROOT / "environments" / "calculator" / "pyproject.toml").read_text()


@ROWS("plugins/", "environments/")
def _() -> None:
    """Each folder is a package of its own; the one that the core brings plays."""
    for place in ("plugins", "environments"):
        projects = list((ROOT / place).glob("*/pyproject.toml"))
        names = [tomllib.loads(path.read_text())["project"]["name"] for path in projects]
        assert len(names) >= 9 and all(name.startswith("rollouts-") for name in names)
    assert rows.metrics_of(rows.both_phases() / "rl")


@ROWS("entry-point kinds `datasets`, `tools`")
def _() -> None:
    from rollouts.plugins import KINDS

    assert {"datasets", "tools"} <= set(KINDS)
    path = rows.new_folder() / "mine.py"
    path.write_text('def search(query: str) -> str:\n    """Search."""\n    return query\n')
    tool = ("--tool", f"{path}:search")
    assert "search" in rows.command("run", "--env", "calculator", *tool, "--steps", "1", "--dry-run")
