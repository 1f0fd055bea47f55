"""The examples in docstrings give what they say."""

from __future__ import annotations

import doctest

import pytest

from rollouts.doors import HOMES, open_module

MODULES = sorted(
    ".".join(path.relative_to(home).with_suffix("").parts)
    for package, home in HOMES.items()
    for path in (home / package).rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    result = doctest.testmod(open_module(name))
    assert result.attempted and not result.failed
