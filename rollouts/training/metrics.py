"""Loggers of metrics, under the module name of the first notes."""

from __future__ import annotations

from rollouts.loggers.base import MetricsLogger as MetricsLogger
from rollouts.training.simple.metrics import JSONLLogger as JSONLLogger
