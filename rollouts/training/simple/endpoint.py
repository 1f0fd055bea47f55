"""`Endpoint`: which model plays, and where: in this process, or behind a server's address."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollouts.agent.model import EpisodeLimits
from rollouts.chat.format import load_chat_format
from rollouts.models.loading import load_tokenizer
from rollouts.plugins.index import find_component
from rollouts.plugins.loading import load_component
from rollouts.plugins.signature import call_with


@dataclass(frozen=True)
class Endpoint:
    """A model that plays episodes.

    Args:
        provider: an inference backend by name: hf (this process), sglang, vllm, openai (evaluation only), or a plugin's
        model: a path, a name on the hub, or `tiny`
        api_base: the address of a running server, such as http://127.0.0.1:30000; empty: the provider's default
        max_tokens: sampled tokens of an episode
        max_turns: the model's turns in an episode
        temperature: the sampling temperature
        seed: the seed of tasks and of sampling
        settings: other settings of the inference backend, as `--inference.NAME` has them

    >>> Endpoint(provider="sglang", api_base="http://127.0.0.1:30000").model
    'tiny'
    """

    provider: str = "hf"
    model: str = "tiny"
    api_base: str = ""
    max_tokens: int = 256
    max_turns: int = 8
    temperature: float = 1.0
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def limits(self) -> EpisodeLimits:
        """The limits of an episode."""
        return EpisodeLimits(self.max_tokens, self.max_turns, self.temperature)

    def connect(self, training: Any = None, concurrency: int = 256) -> tuple[Any, Any]:
        """The engine, not entered, and its chat format (None for an engine that takes messages).

        `training` is the backend whose weights it serves; None: its own. Raises ConfigError, ModelError,
        UnknownComponentError.
        """
        available = {
            "model": self.model,
            "training": training,
            "seed": self.seed,
            "temperature": self.temperature,
            "folder": "",
            "concurrency": concurrency,
            "lora_rank": 0,
            "lora_roles": (),
            "pinned": False,
        }
        address = {"url": self.api_base} if self.api_base else {}
        make = load_component(find_component("inference", self.provider))
        engine = call_with(make, available, address | self.settings)
        chats = engine.capabilities.chats
        return engine, None if chats else load_chat_format(load_tokenizer(self.model))
