"""Tasks in order, under the module name of the first notes."""

from __future__ import annotations

from rollouts.training.datasets.buffer import DataBuffer as DataBuffer
