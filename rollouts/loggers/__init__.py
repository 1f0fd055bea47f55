"""Loggers: where a run's metrics go.

Rooms: `base` (MetricsLogger, the Protocol; helpers for writing a logger), `jsonl` (JSONLLogger, the default).
TensorBoard, W&B and Trackio are packages of their own under `plugins/`. Left out: what is logged, and when (the loops).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollouts.loggers.base import MetricsLogger, import_library, plain_settings
    from rollouts.loggers.jsonl import JSONLLogger

__all__ = ["JSONLLogger", "MetricsLogger", "import_library", "plain_settings"]

_HOMES = {
    "JSONLLogger": "jsonl",
    "MetricsLogger": "base",
    "import_library": "base",
    "plain_settings": "base",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
