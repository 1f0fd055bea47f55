"""The reinforcement learning loop, under the module name of the first notes."""

from __future__ import annotations

from rollouts.training.loops.rl import BEGINNING as BEGINNING
from rollouts.training.loops.rl import LoopState as LoopState
from rollouts.training.loops.rl import OnLogged as OnLogged
from rollouts.training.loops.rl import OnStep as OnStep
from rollouts.training.loops.rl import StepReport as StepReport
from rollouts.training.simple.batches import compute_advantages as compute_advantages
from rollouts.training.simple.batches import compute_reward as compute_reward
from rollouts.training.simple.batches import prepare_grpo_batch as prepare_grpo_batch
from rollouts.training.simple.rl import run_rl_training as run_rl_training
