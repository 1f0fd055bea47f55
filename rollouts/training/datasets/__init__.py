"""Where training data comes from: `buffer` (DataBuffer: which task comes next), `mixing` (MixedBuffer: from which of
several sources), `sft` (supervised rows as padded tensors).
"""

from rollouts.training.datasets.buffer import DataBuffer, as_task, draw_tasks
from rollouts.training.datasets.mixing import MixedBuffer, Source

__all__ = ["DataBuffer", "MixedBuffer", "Source", "as_task", "draw_tasks"]
