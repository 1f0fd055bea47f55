"""Primitives: reinforcement learning of language models as plain functions on plain models.

types                    the NamedTuples that the functions take and return
generation tools servers load a model and sample replies; read and run tool calls; replies from vLLM and SGLang
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
    from rollouts.primitives.generation import apply_chat_template as apply_chat_template
    from rollouts.primitives.generation import batch_generate as batch_generate
    from rollouts.primitives.generation import compute_logprobs as compute_logprobs
    from rollouts.primitives.generation import encode_prompt as encode_prompt
    from rollouts.primitives.generation import generate as generate
    from rollouts.primitives.generation import generate_conversation_turn as generate_conversation_turn
    from rollouts.primitives.generation import generate_with_logprobs as generate_with_logprobs
    from rollouts.primitives.generation import load_model as load_model
    from rollouts.primitives.generation import load_tokenizer as load_tokenizer
    from rollouts.primitives.servers import sglang_generator as sglang_generator
    from rollouts.primitives.servers import vllm_generator as vllm_generator
    from rollouts.primitives.tools import execute_functions as execute_functions
    from rollouts.primitives.tools import execute_tools as execute_tools
    from rollouts.primitives.tools import extract_tool_calls as extract_tool_calls
    from rollouts.primitives.tools import parse_functions as parse_functions
    from rollouts.primitives.tools import parse_tools as parse_tools
    from rollouts.primitives.tools import parse_xml_tools as parse_xml_tools
    from rollouts.primitives.types import Batch as Batch
    from rollouts.primitives.types import Conversation as Conversation
    from rollouts.primitives.types import Generation as Generation
    from rollouts.primitives.types import GenerationConfig as GenerationConfig
    from rollouts.primitives.types import ModelConfig as ModelConfig
    from rollouts.primitives.types import Rollout as Rollout
    from rollouts.primitives.types import TrainingState as TrainingState
    from rollouts.primitives.types import TrainingStats as TrainingStats
    from rollouts.primitives.types import Turn as Turn
    from rollouts.types import Message as Message
    from rollouts.types import ToolCall as ToolCall

__getattr__, __dir__ = lazy_face(__name__)
