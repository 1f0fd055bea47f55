"""How much Python some work runs: it grows as its cost does, and is the same on a busy machine as on an idle one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_steps(work: Callable[[], Any]) -> int:
    """The lines of Python that run in this thread while `work` does, each as often as it runs.

    What a function written in C does inside is not seen, such as `sum` of a list.
    """
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(earlier)
    return count
