"""Where training data comes from: `buffer` (DataBuffer: which task comes next)."""

from rollouts.training.datasets.buffer import DataBuffer, as_task, draw_tasks

__all__ = ["DataBuffer", "as_task", "draw_tasks"]
