"""Loggers: where a run's metrics go.

Rooms: `base` (MetricsLogger, the Protocol; helpers for writing a logger), `jsonl` (JSONLLogger, the default).
TensorBoard, W&B and Trackio are packages of their own under `plugins/`. Left out: what is logged, and when (the loops).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face

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

__getattr__, __dir__ = lazy_face(__name__, _HOMES)
