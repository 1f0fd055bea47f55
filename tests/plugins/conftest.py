"""Distributions that were never installed: a `dist-info` folder and modules in a folder on sys.path."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def make_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """make_distribution(name, {group: {name: value}}, {module: source}, version=..., requires=[...]) -> its folder."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    count = 0

    def make(name, groups, modules=None, *, version="1.0", requires=(), raw=None) -> Path:
        nonlocal count
        count += 1
        folder = tmp_path / f"site{count}"
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        (info / "METADATA").write_text("\n".join(lines + [f"Requires-Dist: {line}" for line in requires]) + "\n")
        text = "".join(
            f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in points.items())
            for group, points in groups.items()
        )
        (info / "entry_points.txt").write_text(text if raw is None else raw)
        for module, source in (modules or {}).items():
            (folder / f"{module}.py").write_text(textwrap.dedent(source))
        monkeypatch.syspath_prepend(folder)
        return folder

    yield make
    for module in set(sys.modules) - before:
        if getattr(sys.modules[module], "__file__", None) and str(tmp_path) in str(sys.modules[module].__file__):
            del sys.modules[module]
