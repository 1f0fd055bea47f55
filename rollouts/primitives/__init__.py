"""Primitives: reinforcement learning of language models as plain functions on plain models.

types                    the NamedTuples that the functions take and return
generation               load a model, sample replies, run tools
rewards  kl              rewards of a rollout; the KL to a reference model
rollouts  algorithms     rollouts with rewards and KL; advantages and losses
training                 steps, iterations, whole trainings
utilities                reward functions, prompts, files of rollouts, helpers for tests

Each function is synchronous, returns its result, and takes its replaceable parts as keyword arguments. They call the
engine's own functions. Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face

if TYPE_CHECKING:
    from rollouts.primitives.types import Batch as Batch
    from rollouts.primitives.types import Conversation as Conversation
    from rollouts.primitives.types import Generation as Generation
    from rollouts.primitives.types import GenerationConfig as GenerationConfig
    from rollouts.primitives.types import ModelConfig as ModelConfig
    from rollouts.primitives.types import Rollout as Rollout
    from rollouts.primitives.types import TrainingState as TrainingState
    from rollouts.primitives.types import TrainingStats as TrainingStats
    from rollouts.types import Message as Message
    from rollouts.types import ToolCall as ToolCall

__getattr__, __dir__ = lazy_face(__name__)
