"""The training loops: `rl` (its batches come from `rl_batch`) and `sft`.

The names here are those of the package `rollouts_notes`, which call these loops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face

if TYPE_CHECKING:
    from rollouts_notes.loops import run_rl_training as run_rl_training
    from rollouts_notes.loops import run_sft_training as run_sft_training

__getattr__, __dir__ = lazy_face(__name__)
