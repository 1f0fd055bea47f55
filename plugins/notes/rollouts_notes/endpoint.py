"""`Endpoint`: which model plays, and where: in this process, or behind a server's address.

`EndpointPlayer` plays episodes of an environment against it, as `rollouts run` does.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rollouts.agent.episode import run_episode
from rollouts.agent.model import EpisodeLimits
from rollouts.chat.format import load_chat_format
from rollouts.env.checks import check_environment
from rollouts.env.mixing import env_term
from rollouts.errors import UnknownComponentError
from rollouts.inference.suspend import SuspendableEngine
from rollouts.models.loading import load_tokenizer
from rollouts.plugins.index import find_component
from rollouts.plugins.loading import load_component
from rollouts.plugins.signature import call_with
from rollouts.types import Episode


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

    def player(self, environment: Any) -> EndpointPlayer:
        """What plays episodes of the environment here. Raises EnvironmentDefinitionError."""
        return EndpointPlayer(self, environment)

    def connect(self, training: Any = None, concurrency: int = 256) -> tuple[Any, Any]:
        """The engine, not entered, and its chat format (None for an engine that takes messages).

        `training` is the backend whose weights it serves; None: its own. Raises ConfigError, ModelError,
        UnknownComponentError.
        """
        own = {"model": self.model, "seed": self.seed, "temperature": self.temperature, "training": training}
        usual = {"concurrency": concurrency, "folder": "", "lora_rank": 0, "lora_roles": (), "pinned": False}
        address = {"url": self.api_base} if self.api_base else {}
        make = load_component(find_component("inference", self.provider))
        engine = call_with(make, own | usual, address | self.settings)
        chats = engine.capabilities.chats
        return engine, None if chats else load_chat_format(load_tokenizer(self.model))


class EndpointPlayer:
    """Plays episodes of an environment, given as an object or a class, against an endpoint.

    Raises EnvironmentDefinitionError for an object that is no environment.
    """

    def __init__(self, endpoint: Endpoint, environment: Any) -> None:
        check_environment(environment)
        self.endpoint, self._environment, self._chat = endpoint, environment, None

    def tasks(self, epoch: int) -> Iterator[Any]:
        """The training tasks of an epoch."""
        yield from self._new_environment().tasks("train", random.Random(f"{self.endpoint.seed}/train/{epoch}"))

    def connect(self, training: Any, concurrency: int) -> Any:
        """The engine of the endpoint, not entered. Raises like `Endpoint.connect`."""
        engine, self._chat = self.endpoint.connect(training, concurrency)
        return engine

    async def play(self, job: Any, session: str, inference: SuspendableEngine) -> Episode:
        """Play one episode."""
        return await run_episode(
            job.task,
            make_env=self._new_environment,
            chat=self._chat,
            inference=inference,
            limits=self.endpoint.limits,
            rewards=[env_term()],
            session=session,
            order=job.order,
            seed=self.endpoint.seed,
        )

    def _new_environment(self) -> Any:
        given = self._environment
        return given() if inspect.isclass(given) else copy.deepcopy(given)


def load_calculator() -> type[Any]:
    """The class of the environment `calculator`. Raises UnknownComponentError if its package is not installed."""
    try:
        ref = find_component("environments", "calculator")
    except UnknownComponentError as error:
        raise UnknownComponentError(
            "CalculatorEnvironment is in a package of its own\ntype: pip install rollouts-calculator"
        ) from error
    found: type[Any] = load_component(ref)
    return found
