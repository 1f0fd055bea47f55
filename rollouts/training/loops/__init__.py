"""The training loops: `rl` (its batches come from `rl_batch`) and `sft`.

The names here, and in `rl_loop` and `sft_loop`, are those of `rollouts.training.simple`, which call these loops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face

if TYPE_CHECKING:
    from rollouts.training.simple.rl import run_rl_training as run_rl_training
    from rollouts.training.simple.sft import run_sft_training as run_sft_training

__getattr__, __dir__ = lazy_face(__name__)
