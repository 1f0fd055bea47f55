"""The NamedTuples that the primitives take and return. A change makes a new one: `config._replace(seed=1)`.

`ModelConfig`, `Conversation`, `Generation` and `Turn` are the shapes that the first notes give: tuples of plain values
that you make yourself. The core has classes of these names inside: a section of a settings file, a talk with a person,
an engine's answer without text, a turn of a trajectory.

Legend: P ids of a prompt, K sampled ids of one reply, T sampled ids of a batch, N rollouts. `Message` and `ToolCall`
are those of `rollouts`. Models, tokenizers and optimizers are plain objects of transformers and torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rollouts.types import Message, ToolCall

if TYPE_CHECKING:
    from torch import Tensor


class ModelConfig(NamedTuple):
    """Which model to load: `tiny`, a folder, or a name on the Hugging Face hub.

    `dtype` is bfloat16, float16, float32 or float64. `device` is a torch device; auto is a GPU if there is one.
    """

    name: str
    dtype: str = "float32"
    device: str = "auto"
    trust_remote_code: bool = False


class GenerationConfig(NamedTuple):
    """How to sample.

    The same seed gives the same reply. `temperature` 0 is greedy. A reply ends after an id that ends a turn, after one
    of the texts in `stop`, or after `max_tokens` ids. `max_turns` limits the replies of one conversation.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    max_turns: int = 8


class Conversation(NamedTuple):
    """Messages, and the tools that the model may call: functions with type hints and a docstring, or OpenAI schemas.

    >>> conversation = Conversation([Message("user", "What is 2 + 3?")])
    >>> conversation.messages[-1].content
    'What is 2 + 3?'
    """

    messages: Sequence[Message]
    tools: Sequence[Callable[..., Any] | dict[str, Any]] = ()


class Generation(NamedTuple):
    """One sampled reply.

    Attributes:
        text: the reply without the ids that end a turn; a stop text is included
        tokens: the sampled ids [K], with the id that ended the turn
        logprobs: [K], natural logarithm, at the sampling temperature (at 1 if the temperature is 0); None: unknown
        finish_reason: "stop", or "length" if the reply reached `max_tokens`
        prompt_tokens: the ids [P] that the model received
        temperature: the sampling temperature, at which the reply is trained and compared; None: unknown, counts as 1
    """

    text: str
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] | None = None
    finish_reason: str = "stop"
    prompt_tokens: Sequence[int] = ()
    temperature: float | None = None


class Turn(NamedTuple):
    """One reply of the model in a conversation: the conversation that ends with it, the reply, and its tool calls."""

    conversation: Conversation
    generation: Generation
    tool_calls: Sequence[ToolCall] = ()


class Rollout(NamedTuple):
    """A prompt, the model's reply, and what is known about it.

    Attributes:
        prompt: the text or the messages of the prompt
        generation: the reply; of a conversation, the last one
        rewards: one number, one number per reward, or None if nothing judged the rollout
        kl_divergence: the mean KL to the reference in nats per token; None without a reference
        ref_logprobs: the reference's logprobs of the sampled ids, all turns in order; None without a reference
        conversation: the whole conversation, with all replies and tool results; None if there is none
        tool_calls: the tool calls of all turns, in order
        metadata: anything else, such as the right answer
        turns: all replies of a conversation, in order; empty: `generation` alone
        group_index: rollouts with the same number are compared; None: rollouts with equal prompts are. The functions
            here leave it None
    """

    prompt: str | Sequence[Message]
    generation: Generation
    rewards: float | Sequence[float | None] | None = None
    kl_divergence: float | None = None
    ref_logprobs: Sequence[float] | None = None
    conversation: Conversation | None = None
    tool_calls: Sequence[ToolCall] = ()
    metadata: Mapping[str, Any] = {}
    turns: Sequence[Generation] = ()
    group_index: int | None = None

    @property
    def all_turns(self) -> Sequence[Generation]:
        """All replies, in order."""
        return self.turns or (self.generation,)

    @property
    def is_cut_off(self) -> bool:
        """Whether the last reply reached `max_tokens`."""
        return self.generation.finish_reason == "length"


class Batch(NamedTuple):
    """The sampled ids of rollouts as tensors, for advantages and losses. `create_batch` makes it.

    Attributes:
        rollouts: the N rollouts
        logprobs: [T], the policy's logprobs of all sampled ids, with gradient; None without a model
        old_logprobs: [T], those of the sampler; where it gave none, the policy's without gradient (NaN without a model)
        mask: [T], 1.0 where an id is trained, 0.0 in rollouts that nothing judged or that were cut off
        rollout_index: [T], the rollout of each id, 0 to N - 1
        group_index: [T], the group of each id: rollouts of one prompt
        rewards: [N]; NaN where nothing judged a rollout
        ref_logprobs: [T], those of the reference; None if a rollout has none
        tokens: [T], the ids
        entropy: [T], of the policy, with gradient; None without a model
    """

    rollouts: Sequence[Rollout]
    logprobs: Tensor | None
    old_logprobs: Tensor
    mask: Tensor
    rollout_index: Tensor
    group_index: Tensor
    rewards: Tensor
    ref_logprobs: Tensor | None = None
    tokens: Tensor | None = None
    entropy: Tensor | None = None


class TrainingState(NamedTuple):
    """What training changes: the model with its optimizer, and the number of finished iterations.

    `ref_model` is the reference of the KL; None trains without one.
    """

    model: Any
    tokenizer: Any
    optimizer: Any
    ref_model: Any = None
    iteration: int = 0


class TrainingStats(NamedTuple):
    """The numbers of one iteration. `mean_reward` and `kl` are NaN if no rollout has them."""

    iteration: int
    loss: float
    mean_reward: float = float("nan")
    kl: float = float("nan")
    grad_norm: float = float("nan")
    metrics: Mapping[str, float] = {}
