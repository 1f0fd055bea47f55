"""Loggers, which record the metrics of a run.

- `base.py`: the Protocols `MetricsLogger` and `SampleLogger`, and helpers for your own logger
- `jsonl.py`: `JSONLLogger`, the default
- `console.py`: `ConsoleLogger`, lines on standard output

The loggers for TensorBoard, W&B, Trackio and MLflow are separate packages in `plugins/`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face

if TYPE_CHECKING:
    from rollouts.loggers.base import MetricsLogger as MetricsLogger
    from rollouts.loggers.base import Row as Row
    from rollouts.loggers.base import SampleLogger as SampleLogger
    from rollouts.loggers.base import SampleSettings as SampleSettings
    from rollouts.loggers.base import import_library as import_library
    from rollouts.loggers.base import plain_settings as plain_settings
    from rollouts.loggers.console import ConsoleLogger as ConsoleLogger
    from rollouts.loggers.jsonl import JSONLLogger as JSONLLogger

__getattr__, __dir__ = lazy_face(__name__)
