"""Loggers: where a run's metrics go.

Rooms: `base` (MetricsLogger, the Protocol; helpers for writing a logger), `jsonl` (JSONLLogger, the default).
TensorBoard, W&B and Trackio are packages of their own under `plugins/`. Left out: what is logged, and when (the loops).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face

if TYPE_CHECKING:
    from rollouts.loggers.base import MetricsLogger as MetricsLogger
    from rollouts.loggers.base import import_library as import_library
    from rollouts.loggers.base import plain_settings as plain_settings
    from rollouts.loggers.jsonl import JSONLLogger as JSONLLogger

__getattr__, __dir__ = lazy_face(__name__)
