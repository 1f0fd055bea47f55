"""A test without the mark `slow` may use two seconds of CPU, with its processes. One that uses twice as much fails: the
CPU of one test varies that much. Tests marked `slow` are a stage of their own: `make test-slow`.

CPU is counted, and not time, since machines are busy. Not counted are fixtures that several tests share, the first
imports of a large package, and what `excluded` surrounds. `make nightly` has no budget.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forks
import hash_seeds
import pytest

__all__ = ["excluded"]

SECONDS_MAX = 2.0
TOLERANCE = 2.0
LOOP_SECONDS = 0.02  # what `_slowness` does, on an idle core of 2026
MODULES = 100  # a test that imports so many is the first to use a large package
_BEGAN = pytest.StashKey[tuple[float, int]]()
_excluded = 0.0


def _cpu_seconds() -> float:
    """Of this process, its ended children, and the ended forks of its servers."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = time.process_time() + ended.ru_utime + ended.ru_stime
    return own + sum(map(_of_forks, [*forks.servers(), *hash_seeds.servers()]))


def _of_forks(server: int) -> float:
    stat = Path(f"/proc/{server}/stat")
    if not stat.exists():
        return 0.0
    user, system = stat.read_text().rpartition(")")[2].split()[13:15]
    return (int(user) + int(system)) / 100


def _slowness() -> float:
    """How much more CPU than on an idle core a loop takes here and now: other processes share caches and cores."""
    began = time.process_time()
    for number in range(400_000):
        number * number % 7
    return max(1.0, (time.process_time() - began) / LOOP_SECONDS)


@contextmanager
def excluded() -> Iterator[None]:
    """What happens meanwhile counts for no test."""
    global _excluded
    began = _cpu_seconds()
    try:
        yield
    finally:
        _excluded += _cpu_seconds() - began


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
    if fixturedef.scope == "function":
        return (yield)
    with excluded():
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    item.stash[_BEGAN] = _cpu_seconds() - _excluded, len(sys.modules)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    yield
    began, modules = item.stash[_BEGAN]
    used = _cpu_seconds() - _excluded - began
    is_free = item.get_closest_marker("slow") or "not nightly" not in item.config.getoption("markexpr")
    if is_free or used <= TOLERANCE * SECONDS_MAX or len(sys.modules) > modules + MODULES:
        return
    if (used := used / _slowness()) > TOLERANCE * SECONDS_MAX:
        pytest.fail(
            f"the test used {used:.1f} seconds of CPU, and may use {SECONDS_MAX:g}: make it faster, mark it slow, or "
            "leave cases to nightly",
            pytrace=False,
        )
