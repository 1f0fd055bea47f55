"""The worker's side: the `model` of an environment's own `rollout(task, model)`.

The conversation is in the run, with its tokens, limits and engine. Each method asks the run, and each answer carries
what the model then says of itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from rollouts.env.authoring import no_role
from rollouts.env.results import answers_of
from rollouts.env.workers.protocol import ClientAnswer, ClientAsked, ModelAnswer, ModelAsked, ModelState
from rollouts.gateway.exchange import Answered, APIError, Asked
from rollouts.types import Message, Trajectory

if TYPE_CHECKING:
    from rollouts.gateway.endpoint import Endpoint


AskRun = Callable[[str, Any, Any], Awaitable[Any]]
"""Asks the run: a method, its arguments and the type of its result. It raises an exception that ends the episode if the
run's function failed.
"""


class RemoteModel:
    """The model as `rollouts.agent.model.ChatModel` shows it to an environment. `states` are by role; "" is the model
    of none.
    """

    def __init__(self, ask: AskRun, states: Mapping[str, ModelState], role: str = "") -> None:
        self._ask_run, self._state, self._role = ask, states[role], role
        self._trajectories: dict[int, Trajectory] = {}
        self._roles = {} if role else {name: RemoteModel(ask, states, name) for name in states if name}

    @property
    def roles(self) -> Mapping[str, RemoteModel]:
        """The model of each role; empty in an environment without roles."""
        return self._roles

    def role(self, name: str) -> RemoteModel:
        """The model as this role. Raises EnvironmentDefinitionError if the environment has no such role."""
        if name not in self._roles:
            raise no_role(name, self._roles)
        return self._roles[name]

    @property
    def messages(self) -> list[Message]:
        """The messages of the last conversation. Before the first turn: the role's system prompt, if there is one."""
        return list(self._state.messages if self.trajectory is None else self.trajectory.messages)

    @property
    def trajectory(self) -> Trajectory | None:
        """The conversation with the last reply; None before the first turn."""
        return None if self._state.place is None else self._trajectories[self._state.place]

    @property
    def trajectories(self) -> list[Trajectory]:
        """All conversations so far, in the order of their start."""
        own = [self._trajectories[place] for place in sorted(self._trajectories)]
        return [*own, *(each for model in self._roles.values() for each in model.trajectories)]

    @property
    def tokens_left(self) -> int:
        """The number of tokens that may still be sampled in this episode."""
        return self._state.tokens_left

    @property
    def turns_left(self) -> int:
        """The number of replies that are left in this episode."""
        return self._state.turns_left

    async def chat(
        self, messages: str | Sequence[Message | Mapping[str, Any]], tools: Sequence[dict[str, Any]] | None = None
    ) -> Message:
        """The model's reply."""
        given = [messages] if isinstance(messages, str) else messages
        (reply,) = await self._ask("chat", given, None if tools is None else list(tools))
        return reply

    async def say(self, messages: str | Message | Mapping[str, Any] | Sequence[str | Message | Any]) -> Message:
        """Add messages to the last conversation, or begin one, and return the reply. Tool calls are run."""
        given = [messages] if isinstance(messages, str | Message | Mapping) else messages
        (reply,) = await self._ask("say", given)
        return reply

    async def call_tools(self, reply: Message) -> list[Message]:
        """Run the calls of a reply in order. Returns the messages that answer them."""
        return await self._ask("call_tools", [reply])

    def answers(self, reply: Message, texts: Sequence[str]) -> list[Message]:
        """The messages that answer the calls of a reply with these texts, for a loop that runs its tools itself."""
        return answers_of(reply, texts, self._state.answer_as)

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[Endpoint]:
        """Serve this model, on the host of the worker, to a program that speaks the API of OpenAI or Anthropic."""
        from rollouts.gateway.endpoint import open_endpoint

        await self._ask("release", [])
        async with open_endpoint(self._answer) as endpoint:
            yield endpoint

    async def _answer(self, asked: Asked) -> Answered:
        answer: ClientAnswer = await self._ask_run("answer", ClientAsked(self._role, asked), ClientAnswer)
        self._take(answer.state)
        if answer.answered is not None:
            return answer.answered
        assert answer.refused is not None, "a client gets an answer or an error"
        refused = answer.refused
        raise APIError(refused.status, refused.words, parameter=refused.parameter, code=refused.code)

    @property
    def infos(self) -> list[tuple[str, int, dict[str, Any]]]:
        """The `info` of each conversation that has one, with the role and the index of the conversation."""
        own = [(self._role, place, each.info) for place, each in self._trajectories.items() if each.info]
        return [*own, *(info for model in self._roles.values() for info in model.infos)]

    def place_of(self, trajectory: Any) -> tuple[str, int] | None:
        """The role and the index of one of the model's conversations; None for any other object."""
        models = (self, *self._roles.values())
        known = ((model._role, place, each) for model in models for place, each in model._trajectories.items())
        return next(((role, place) for role, place, each in known if each is trajectory), None)

    async def _ask(self, method: str, given: Sequence[Any], tools: list[dict[str, Any]] | None = None) -> list[Message]:
        texts = [Message("user", each) if isinstance(each, str) else each for each in given]
        read = [each if isinstance(each, Message) else msgspec.convert(each, Message) for each in texts]
        asked = ModelAsked(self._role, read, tools)
        answer: ModelAnswer = await self._ask_run(method, asked, ModelAnswer)
        self._take(answer.state)
        return answer.messages

    def _take(self, state: ModelState) -> None:
        """Update the object of the last conversation, which the environment may hold already. Its `info` is kept."""
        self._state = state
        if state.place is not None and (new := state.trajectory) is not None:
            known = self._trajectories.setdefault(state.place, new)
            for name in new.__struct_fields__:
                if name != "info":
                    setattr(known, name, getattr(new, name))
