"""A check in another process, which is stopped at a deadline.

A regular expression, a schema or an expression that a model wrote may take for ever, or all memory. A thread that does
so cannot be stopped, and may hold the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rollouts.env.calls import CallTimeoutError
from rollouts.env.processes import call_isolated

MEMORY_BYTES = 4 * 2**30  # of address space


class Outcome(NamedTuple):
    """What a check returned; `why` is not empty if it did not return."""

    value: Any = None
    why: str = ""


async def stopped_at(seconds: float, check: Callable[..., Any], **arguments: Any) -> Outcome:
    """Call a function of a module in another process. It takes JSON data, and returns `{"found": value}`."""
    try:
        outcome = await call_isolated(check, arguments, label=check.__name__, timeout_seconds=seconds)
    except CallTimeoutError:
        return Outcome(why=f"it took longer than {seconds:g} seconds")
    if outcome.failure is not None:
        return Outcome(why=outcome.text.removeprefix("Error: "))
    return Outcome(json.loads(outcome.text)["found"])


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Within the block, allocations beyond MEMORY_BYTES raise MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    least = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (least, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
