"""Loggers, which record the metrics of a run.

- `base.py`: the Protocol `MetricsLogger`, and helpers for your own logger
- `jsonl.py`: `JSONLLogger`, the default

The loggers for TensorBoard, W&B and Trackio are separate packages in `plugins/`.
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
