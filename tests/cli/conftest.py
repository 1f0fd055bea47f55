"""A distribution made by hand, as pip would install it, and a run that only records what it was given."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from rollouts.config.resolving import Resolved

ROOT = Path(__file__).parents[2]

ENTRY_POINTS = """\
[rollouts.environments]
acme_env = acme_parts:AcmeEnv
twice = acme_parts:AcmeEnv
[rollouts.rewards]
brevity = acme_parts:brevity
twice = acme_parts:brevity
broken = acme_broken:broken
[rollouts.losses]
acme_loss = acme_parts:loss
[rollouts.commands]
acme = acme_parts:command
"""

PARTS = '''\
"""Made for a test."""
from dataclasses import dataclass

import click


@dataclass
class AcmeEnv:
    """An environment of Acme.

    Args:
        digits: How many digits.
    """

    digits: int = 2
    operators: tuple[str, ...] = ("+", "*")


def brevity(trajectory, *, target_tokens: int = 200, scale) -> float:
    """Shorter is better."""
    return 0.0


def loss(logprobs, advantages, *, clip_low: float = 0.2):
    """Three lines of mathematics."""
    return -logprobs * advantages


@click.command()
@click.pass_obj
def command(dotted):
    click.echo(f"acme says {sorted(dotted)}")
    return 7
'''


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """Install the distribution `Acme_Parts` 1.2 for this test; returns its folder."""
    folder = tmp_path / "site"
    info = folder / "acme_parts-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Acme_Parts\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "acme_parts.py").write_text(PARTS)
    (folder / "acme_broken.py").write_text("import a_module_that_is_missing\n")
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in ("acme_parts", "acme_broken"):
        sys.modules.pop(name, None)


@pytest.fixture
def composed(monkeypatch):
    """Replace the run; returns the list of (resolved, dry_run) that it was called with."""
    calls: list[tuple[Resolved, bool]] = []

    def run(resolved, observer):
        calls.append((resolved, False))

    def dry_run(resolved):
        calls.append((resolved, True))

    for name, function in (("rollouts.runs", run), ("rollouts.runs.dry_run", dry_run)):
        module = types.ModuleType(name)
        setattr(module, function.__name__, function)
        module.__path__ = [str(ROOT / "rollouts" / "runs")]  # its other modules are the real ones
        monkeypatch.setitem(sys.modules, name, module)
    return calls
