"""Primitives: reinforcement learning of language models as plain functions on plain models.

types       the NamedTuples that the functions take and return
generation  load a model and sample replies, also from vLLM and SGLang; read and run tool calls
utilities   rewards of a rollout; reward functions, prompts, files of rollouts, helpers for tests
rollouts    rollouts with rewards and KL; logprobs, batches as tensors, the reference model
training    advantages and losses; steps, iterations, whole trainings

Each function is synchronous, returns its result, and takes its replaceable parts as keyword arguments. They call the
engine's own functions. Names are imported on first use. Import them from `rollouts.primitives`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face, moved_modules

if TYPE_CHECKING:
    from rollouts.types import Message as Message
    from rollouts.types import ToolCall as ToolCall
    from rollouts_notes.primitives.generation import apply_chat_template as apply_chat_template
    from rollouts_notes.primitives.generation import batch_generate as batch_generate
    from rollouts_notes.primitives.generation import encode_prompt as encode_prompt
    from rollouts_notes.primitives.generation import execute_functions as execute_functions
    from rollouts_notes.primitives.generation import execute_tools as execute_tools
    from rollouts_notes.primitives.generation import extract_tool_calls as extract_tool_calls
    from rollouts_notes.primitives.generation import generate as generate
    from rollouts_notes.primitives.generation import generate_conversation_turn as generate_conversation_turn
    from rollouts_notes.primitives.generation import load_model as load_model
    from rollouts_notes.primitives.generation import load_tokenizer as load_tokenizer
    from rollouts_notes.primitives.generation import parse_functions as parse_functions
    from rollouts_notes.primitives.generation import parse_tools as parse_tools
    from rollouts_notes.primitives.generation import parse_xml_tools as parse_xml_tools
    from rollouts_notes.primitives.generation import read_turn as read_turn
    from rollouts_notes.primitives.generation import sglang_generator as sglang_generator
    from rollouts_notes.primitives.generation import turn_prompt as turn_prompt
    from rollouts_notes.primitives.generation import vllm_generator as vllm_generator
    from rollouts_notes.primitives.rollouts import compute_batch_kl as compute_batch_kl
    from rollouts_notes.primitives.rollouts import compute_forward_kl as compute_forward_kl
    from rollouts_notes.primitives.rollouts import compute_logprobs as compute_logprobs
    from rollouts_notes.primitives.rollouts import compute_per_token_kl as compute_per_token_kl
    from rollouts_notes.primitives.rollouts import compute_reverse_kl as compute_reverse_kl
    from rollouts_notes.primitives.rollouts import create_adaptive_kl as create_adaptive_kl
    from rollouts_notes.primitives.rollouts import create_batch as create_batch
    from rollouts_notes.primitives.rollouts import create_batch_rollouts as create_batch_rollouts
    from rollouts_notes.primitives.rollouts import create_ema_updater as create_ema_updater
    from rollouts_notes.primitives.rollouts import create_multiturn_rollout as create_multiturn_rollout
    from rollouts_notes.primitives.rollouts import create_periodic_updater as create_periodic_updater
    from rollouts_notes.primitives.rollouts import create_reference_model as create_reference_model
    from rollouts_notes.primitives.rollouts import create_rollout as create_rollout
    from rollouts_notes.primitives.rollouts import create_truncated_kl as create_truncated_kl
    from rollouts_notes.primitives.rollouts import execute_and_track_tools as execute_and_track_tools
    from rollouts_notes.primitives.rollouts import generate_with_logprobs as generate_with_logprobs
    from rollouts_notes.primitives.rollouts import get_reference_logprobs as get_reference_logprobs
    from rollouts_notes.primitives.rollouts import track_tool_calls as track_tool_calls
    from rollouts_notes.primitives.rollouts import update_reference_model as update_reference_model
    from rollouts_notes.primitives.training import AlgorithmConfig as AlgorithmConfig
    from rollouts_notes.primitives.training import PPOAdvantages as PPOAdvantages
    from rollouts_notes.primitives.training import compute_dapo_loss as compute_dapo_loss
    from rollouts_notes.primitives.training import compute_dapo_pairs as compute_dapo_pairs
    from rollouts_notes.primitives.training import compute_grpo_advantages as compute_grpo_advantages
    from rollouts_notes.primitives.training import compute_grpo_loss as compute_grpo_loss
    from rollouts_notes.primitives.training import compute_loss_by_algorithm as compute_loss_by_algorithm
    from rollouts_notes.primitives.training import compute_ppo_advantages as compute_ppo_advantages
    from rollouts_notes.primitives.training import compute_ppo_loss as compute_ppo_loss
    from rollouts_notes.primitives.training import create_algorithm_config as create_algorithm_config
    from rollouts_notes.primitives.training import load_checkpoint as load_checkpoint
    from rollouts_notes.primitives.training import log_to_console as log_to_console
    from rollouts_notes.primitives.training import log_to_wandb as log_to_wandb
    from rollouts_notes.primitives.training import quick_start_training as quick_start_training
    from rollouts_notes.primitives.training import save_checkpoint as save_checkpoint
    from rollouts_notes.primitives.training import train as train
    from rollouts_notes.primitives.training import training_iteration as training_iteration
    from rollouts_notes.primitives.training import training_step as training_step
    from rollouts_notes.primitives.types import Batch as Batch
    from rollouts_notes.primitives.types import Conversation as Conversation
    from rollouts_notes.primitives.types import Generation as Generation
    from rollouts_notes.primitives.types import GenerationConfig as GenerationConfig
    from rollouts_notes.primitives.types import ModelConfig as ModelConfig
    from rollouts_notes.primitives.types import Rollout as Rollout
    from rollouts_notes.primitives.types import TrainingState as TrainingState
    from rollouts_notes.primitives.types import TrainingStats as TrainingStats
    from rollouts_notes.primitives.types import Turn as Turn
    from rollouts_notes.primitives.utilities import aggregate_vector_rewards as aggregate_vector_rewards
    from rollouts_notes.primitives.utilities import apply_reward_shaping as apply_reward_shaping
    from rollouts_notes.primitives.utilities import as_component as as_component
    from rollouts_notes.primitives.utilities import compute_batch_rewards as compute_batch_rewards
    from rollouts_notes.primitives.utilities import compute_reward_model_score as compute_reward_model_score
    from rollouts_notes.primitives.utilities import compute_scalar_reward as compute_scalar_reward
    from rollouts_notes.primitives.utilities import compute_vector_reward as compute_vector_reward
    from rollouts_notes.primitives.utilities import create_exact_match_reward as create_exact_match_reward
    from rollouts_notes.primitives.utilities import create_prompt_loader as create_prompt_loader
    from rollouts_notes.primitives.utilities import create_regex_reward as create_regex_reward
    from rollouts_notes.primitives.utilities import create_scripted_generator as create_scripted_generator
    from rollouts_notes.primitives.utilities import create_weighted_reward as create_weighted_reward
    from rollouts_notes.primitives.utilities import format_rollout as format_rollout
    from rollouts_notes.primitives.utilities import length_reward as length_reward
    from rollouts_notes.primitives.utilities import load_prompts as load_prompts
    from rollouts_notes.primitives.utilities import load_reward_model as load_reward_model
    from rollouts_notes.primitives.utilities import load_rollouts as load_rollouts
    from rollouts_notes.primitives.utilities import normalize_rewards as normalize_rewards
    from rollouts_notes.primitives.utilities import rollout_of as rollout_of
    from rollouts_notes.primitives.utilities import save_rollouts as save_rollouts
    from rollouts_notes.primitives.utilities import split_prompts as split_prompts
    from rollouts_notes.primitives.utilities import weighted_sum as weighted_sum

__getattr__, __dir__ = lazy_face(__name__)

_HOMES = {"algorithms": "training", "batches": "rollouts utilities", "kl": "rollouts", "rewards": "utilities"}
_HOMES |= dict.fromkeys(("calls", "servers", "tools"), "generation")
moved_modules(
    {f"{__name__}.{name}": " ".join(f"{__name__}.{home}" for home in homes.split()) for name, homes in _HOMES.items()}
)
