"""ChatModel: a conversation with the policy that keeps every token exactly as it was sampled.

The standard loop of `episode` and an environment's own `rollout(task, model)` both use this class. So both make the
same records: messages for people, and segments (tokens, masks, logprobs, versions) for training. Environments and
rewards are in `episode`, deadlines in `rollouts.inference.suspend`, and templates in `rollouts.chat`.

Without a chat format, the engine takes messages (`CanChat`), and the token ids are unknown. In this case trajectories
have no segments, and their metrics have the engine's token counts (`prompt_tokens`, `completion_tokens`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import trio

from rollouts.agent.records import (
    NO_WISHES,
    EpisodeOver,
    OpenTrajectory,
    SavedConversations,
    SentReply,
    ServedTurns,
    TakenTurn,
    TurnRequest,
    Wishes,
    append,
    check_generation,
    check_sampled,
    generate_with,
    readable_message,
    stopped,
    turn_seed,
)
from rollouts.author_code import shown
from rollouts.encoding import plain_json
from rollouts.env.authoring import ToolMethod, no_role
from rollouts.env.checks import check_text
from rollouts.env.results import AnswerAs, answers_of
from rollouts.env.tools import run_tool
from rollouts.errors import EnvironmentDefinitionError, InferenceError, ModelError, leaves_of
from rollouts.inference.base import GenerateRequest, Generation
from rollouts.inference.chatting import CanChat, ChatReply, ChatRequest
from rollouts.inference.suspend import SuspendableEngine
from rollouts.types import COUNTS, Message, Role, Segment, Status, Task, Trajectory

if TYPE_CHECKING:
    from rollouts.chat.format import ChatFormat
    from rollouts.gateway.endpoint import Endpoint
    from rollouts.gateway.exchange import Answered, Asked, ClientReply

NO_ROLE = Role("")  # of the only agent of an environment without roles


class EpisodeLimits(NamedTuple):
    """The limits of one episode, in sampled tokens over all turns, turns, seconds and characters.

    `turn_seconds` limits one reply of the model. `tool_seconds` limits each tool call, in addition to the tool's own
    deadline.
    """

    max_tokens: int = 256
    max_turns: int = 8
    temperature: float = 1.0
    episode_seconds: float = 600.0
    cleanup_seconds: float = 10.0
    reward_seconds: float = 30.0
    setup_seconds: float = 300.0
    turn_seconds: float = math.inf
    tool_seconds: float = math.inf
    tool_output_characters_max: int = 16_000


@dataclass(eq=False)
class Turns:
    """What the roles of an episode share: one of them waits for a reply at a time. Requests of clients hold `lock`, so
    that they are answered in the order of their arrival. `failure` is a bug in rollouts or in the environment's
    `rollout`. It ends the run, even if the environment's loop catches it.
    """

    lock: trio.Lock = field(default_factory=trio.Lock)
    is_waiting: bool = False
    failure: Exception | None = None


@dataclass(eq=False, repr=False)
class ChatModel:
    """The policy in one episode, or in one role of an episode.

    `await model.chat(messages)` samples one reply. If the messages begin with an earlier conversation (compared by
    equality), they continue it; else they start a new one. `await model.say(text)` continues the last conversation and
    runs the tools that the model calls. Request one turn at a time: trio orders concurrent requests at random, so the
    seed would not determine the result.

    In an environment with roles, `model.role(name)` is the model of one role, with its own conversations, tools and
    limits. The roles take turns.
    """

    _engine: SuspendableEngine
    _task: Task
    _chat: ChatFormat | None
    _limits: EpisodeLimits
    _seed: int
    _tools: Mapping[str, ToolMethod]
    _schemas: list[dict[str, Any]]
    _role: Role = NO_ROLE
    _turns: Turns = field(default_factory=Turns)
    _roles: Mapping[str, ChatModel] = field(default_factory=dict)
    _state: SavedConversations = field(default_factory=SavedConversations)
    _served: ServedTurns = field(default_factory=ServedTurns)

    @property
    def failure(self) -> Exception | None:
        """The first bug in rollouts itself, of any role."""
        return self._turns.failure

    @property
    def roles(self) -> Mapping[str, ChatModel]:
        """The model of each role; empty in an environment without roles."""
        return self._roles

    def role(self, name: str) -> ChatModel:
        """The model as this role. Raises EnvironmentDefinitionError if the environment has no such role."""
        if name not in self._roles:
            self._turns.failure = error = no_role(name, self._roles)
            raise error
        return self._roles[name]

    @property
    def messages(self) -> list[Message]:
        """The messages of the last conversation. Before the first turn: the role's system prompt, if there is one."""
        if self.trajectory is not None:
            return list(self.trajectory.messages)
        return [Message("system", self._role.system)] if self._role.system else []

    @property
    def last_messages(self) -> list[Message]:
        """The messages of the last turn. A restored conversation continues from them."""
        return self._state.last_messages

    @property
    def trajectories(self) -> list[Trajectory]:
        """All conversations so far, in the order of their start; those of each role together."""
        own = [conversation.trajectory for conversation in self._state.conversations]
        return [*own, *(each for model in self._roles.values() for each in model.trajectories)]

    @property
    def trajectory(self) -> Trajectory | None:
        """The conversation with the last reply; None before the first turn."""
        current = self._state.current
        return None if current is None else self._state.conversations[current].trajectory

    @property
    def tokens_left(self) -> int:
        """The number of tokens that may still be sampled in this episode, by this role."""
        return max(self._limits.max_tokens - self._state.sampled_count, 0)

    @property
    def turns_left(self) -> int:
        """The number of replies that are left in this episode, for this role."""
        return max(self._limits.max_turns - self._state.turns, 0)

    async def chat(
        self, messages: str | Sequence[Message | Mapping[str, Any]], tools: Sequence[dict[str, Any]] | None = None
    ) -> Message:
        """The model's reply. `tools` are OpenAI function schemas; None: the environment's tools, []: no tools.

        A reply that reaches the token budget or the context limit is returned incomplete. After such a reply, the
        conversation is TRUNCATED and cannot continue. If the call is cancelled, nothing of the turn is recorded.

        Raises:
            EpisodeOver: no turns, tokens or context are left, or the engine was aborted or too slow. Do not catch this
                exception.
            InferenceError: the engine failed.
            ModelError: the chat template refuses this conversation.
            EnvironmentDefinitionError: another trio task is waiting for a reply, or the environment has roles and this
                is the model of none.
        """
        if self._roles:
            raise self._mistake(f"the environment has roles: write model.role({next(iter(self._roles))!r}).chat(...)")
        schemas = self._schemas if tools is None else plain_json(list(tools))
        given = self._copied(messages)
        conversation = self._longest(given) or self._begun(given)
        try:
            reply = (await self._take_turn(conversation, given, schemas)).message
        except EpisodeOver as over:
            if over.ends_conversation:
                self._stop(conversation, given, over.status, over.reason)
            raise
        return msgspec.structs.replace(reply, tool_calls=list(reply.tool_calls))

    async def _take_turn(
        self,
        conversation: OpenTrajectory,
        given: list[Message],
        schemas: list[dict[str, Any]],
        wishes: Wishes = NO_WISHES,
    ) -> TakenTurn:
        """Request one reply to `given`, which extends the conversation, and record it. Raises what `chat` raises."""
        if self._turns.is_waiting:
            raise self._mistake(
                "model.chat is already waiting for a reply: call it one at a time, not from several trio tasks at once "
                "(their order is random, so one seed would not give one result)"
            )
        self._turns.is_waiting, self._state.last_messages = True, given
        try:
            await trio.lowlevel.checkpoint()  # so that concurrent calls are always detected
            if self._chat is not None:
                check_text(given, f"the task {shown(self._task.id or self._task.key)}")
            self._refuse(conversation, given, schemas)
            turn = self._prepare(conversation, given, schemas, wishes)
            generate: Callable[[Any], Awaitable[Generation | ChatReply]] = self._engine.generate
            if self._chat is None:
                generate = cast(CanChat, self._engine.backend).chat
            with self._engine.clock.move_on_after(self._limits.turn_seconds) as deadline:
                answer = await generate_with(generate, turn.request, self._engine.backend)
            if deadline.cancelled_caught:
                late = f"the model took longer than {self._limits.turn_seconds:g} seconds for one turn"
                raise self._stop(conversation, given, Status.TIMEOUT, late)
            return self._record(conversation, turn, answer)
        except Exception as error:  # any other error is a bug in rollouts
            if not all(isinstance(leaf, EpisodeOver | InferenceError | ModelError) for leaf in leaves_of(error)):
                self._turns.failure = self.failure or error
            raise
        finally:
            self._turns.is_waiting = False

    async def say(self, messages: str | Message | Mapping[str, Any] | Sequence[str | Message | Any]) -> Message:
        """Add messages to the last conversation, or begin one, and return the reply. Text is a user message.

        If the reply calls tools, they are run, and the model replies again, until a reply has no call or is cut off. A
        role's conversation begins with its system prompt. Raises what `chat` and `call_tools` raise.
        """
        given = [messages] if isinstance(messages, str | Message | Mapping) else messages
        conversation = [*self.messages, *(Message("user", each) if isinstance(each, str) else each for each in given)]
        while True:
            reply = await self.chat(conversation)
            trajectory = self.trajectory
            assert trajectory is not None, "a model that replied has a trajectory"
            if not reply.tool_calls or trajectory.status is Status.TRUNCATED:
                return reply
            conversation = [*trajectory.messages, *await self.call_tools(reply)]

    async def call_tools(self, reply: Message) -> list[Message]:
        """Run the calls of a reply in order. Returns the messages that answer them.

        The answer to a failed call is an error message for the model. Raises AbandonedCallsError and
        EnvironmentDefinitionError (see `run_tool`).
        """
        texts = []
        for tool_call in reply.tool_calls:
            text, failure, error = await run_tool(
                self._tools,
                tool_call,
                characters_max=self._limits.tool_output_characters_max,
                seconds_max=self._limits.tool_seconds,
            )
            texts.append(text)
            self._count("tool_calls")
            if failure is not None:
                self._count("tool_failures")
                self._count(f"tool_failure/{failure}")
                if failure in ("exception", "timeout", "crashed") and self.trajectory is not None:
                    self.trajectory.tool_errors.setdefault(tool_call.name, error or text.removeprefix("Error: "))
        return self.answers(reply, texts)

    def answers(self, reply: Message, texts: Sequence[str]) -> list[Message]:
        """The messages that answer the calls of a reply with these texts, for a loop that runs its tools itself."""
        return answers_of(reply, texts, self.answer_as)

    @property
    def answer_as(self) -> AnswerAs:
        """The role of the messages that answer calls."""
        if self._chat is None or self._chat.report.tool_after_text:
            return "tool"
        return "user" if self._chat.report.calls_as_text else "user if unread"

    # --- a client's turns -------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[Endpoint]:
        """Serve this model to a program that speaks the API of OpenAI or Anthropic, while the block runs.

        Each request becomes one turn of this episode, recorded like `chat`. If the model fails, the block is cancelled,
        and the failure is raised at its end. Raises what `chat` raises, but EpisodeOver only if the engine was aborted
        or too slow: for other limits, the program gets an error with status 400.
        """
        from rollouts.gateway.endpoint import open_endpoint

        self.release()
        async with open_endpoint(self.answer) as endpoint:
            yield endpoint

    def release(self) -> None:
        """From now on, the requests of other episodes do not wait for this one: a program plays it at its own pace."""
        self._engine.release()

    async def answer(self, asked: Asked) -> Answered:
        """The replies to a client's request. Requests wait for each other, in the order of their arrival.

        The request's temperature, its seed and other settings of sampling do not apply: the run decides how its policy
        is sampled. Raises APIError for a mistake of the client and for a limit of the episode, and what `chat` raises.
        """
        from rollouts.agent.served import prefix_keys
        from rollouts.gateway.exchange import Answered, mistake_in

        if self._roles:
            raise self._mistake(f"the environment has roles: write model.role({next(iter(self._roles))!r}).serve()")
        if self.turns_left < asked.count > 1:
            words = f"n is {asked.count}, but this episode has {self.turns_left} turns left (--max-turns)"
            raise mistake_in("n", words)
        if asked.logprobs and self._chat is None:
            raise mistake_in("logprobs", "logprobs is not supported: the model is behind an API without them")
        async with self._turns.lock:
            keys = prefix_keys(asked.messages)
            if asked.count == 0:
                return Answered([], self._prompt_tokens(asked, keys))
            taken = [await self._answer_once(asked, keys) for _ in range(asked.count)]
        return Answered([reply for reply, _ in taken], taken[0][1])

    async def _answer_once(self, asked: Asked, keys: Sequence[bytes]) -> tuple[ClientReply, int]:
        """One reply, and the number of tokens before it."""
        from rollouts.agent.served import next_key, refusals
        from rollouts.gateway.exchange import seen_reply

        served = self._served
        with refusals(served):
            conversation, messages = self._continued(asked, keys)
            turn = await self._take_turn(conversation, messages, asked.tools, Wishes(asked.max_tokens, asked.stop))
        served.refusal = None
        trajectory = conversation.trajectory
        reply = seen_reply(
            turn.message,
            asked.stop,
            is_cut=turn.is_cut,
            tokens=turn.reply_tokens,
            new_call=f"call_{self._state.conversations.index(conversation)}_{conversation.turns}_",
        )
        # The recorded calls get the ids that the client was sent, so that results find them.
        ids = iter(reply.message.tool_calls)
        calls = [call if call.error is not None else next(ids, call) for call in turn.message.tool_calls]
        trajectory.messages[-1] = msgspec.structs.replace(turn.message, tool_calls=calls)
        self._count("tool_calls", float(len(calls)))
        if unread := sum(1.0 for call in calls if call.error is not None):
            self._count("tool_failures", unread)
            self._count("tool_failure/malformed", unread)
        if asked.logprobs and self._chat is not None and turn.tokens is not None:
            pairs = zip(turn.tokens, turn.logprobs, strict=True)
            reply.logprobs = [(self._chat.decode([token]), logprob) for token, logprob in pairs]
        segments = trajectory.segments
        served.replies[next_key(keys[-1], reply.message)] = SentReply(
            conversation,
            len(trajectory.messages) - 1,
            asked.tools,
            list(turn.tokens or ()),
            len(segments) - 1,
            len(segments[-1].tokens) if segments else 0,
        )
        return reply, turn.prompt_tokens

    def _continued(self, asked: Asked, keys: Sequence[bytes]) -> tuple[OpenTrajectory, list[Message]]:
        """The conversation that a request continues, and its messages with those of the request."""
        from rollouts.agent.served import as_recorded

        replies, given = self._served.replies, asked.messages
        place = next((place for place in range(len(keys), 0, -1) if keys[place - 1] in replies), 0)
        if place == 0:
            messages = as_recorded(given, self.answer_as)
            return self._begun(messages), messages
        found = replies[keys[place - 1]]
        messages = [*found.messages, *as_recorded(given[place:], self.answer_as, found.messages[-1])]
        return found.conversation if found.is_last else found.branch(), messages

    def _prompt_tokens(self, asked: Asked, keys: Sequence[bytes]) -> int:
        """The number of tokens of a conversation as a request would send it. Nothing is sampled or recorded."""
        from rollouts.agent.served import refusals
        from rollouts.gateway.exchange import mistake_in

        if self._chat is None:
            raise mistake_in("messages", "the tokens of this model cannot be counted: it is behind an API")
        with refusals(ServedTurns()):  # counting tokens is no request for a reply
            conversation, messages = self._continued(asked, keys)
            if self.turns_left == 0:
                raise EpisodeOver(Status.COMPLETED, f"all {self._limits.max_turns} turns are used")
            self._refuse(conversation, messages, asked.tools)
            request = self._prepare(conversation, messages, asked.tools, NO_WISHES).request
        assert isinstance(request, GenerateRequest)
        return len(request.tokens)

    @property
    def refusal(self) -> EpisodeOver | None:
        """The limit of the episode for which a client's last request got no reply, if there is one."""
        models = (self, *self._roles.values())
        return next((model._served.refusal for model in models if model._served.refusal is not None), None)

    # --- one turn ---------------------------------------------------------------------------------------------------

    def _mistake(self, words: str) -> EnvironmentDefinitionError:
        """An error of the environment's `rollout`. It ends the run, even if `rollout` catches it."""
        self._turns.failure = error = EnvironmentDefinitionError(words)
        return error

    def _begun(self, messages: list[Message]) -> OpenTrajectory:
        """A new conversation."""
        counts = dict.fromkeys(COUNTS, 0.0)
        return OpenTrajectory(Trajectory(self._task, messages, metrics=counts, role=self._role.name))

    def _copied(self, messages: str | Sequence[Message | Mapping[str, Any]]) -> list[Message]:
        """Copies of the messages, because the caller may change them later. Recorded messages are not copied again."""
        given: list[Any] = [Message("user", messages)] if isinstance(messages, str) else list(messages)
        found = self._longest(given)
        known = found.trajectory.messages if found else []
        new = [m if isinstance(m, Message) else msgspec.convert(m, Message) for m in given[len(known) :]]
        return [*known, *map(readable_message, new)]

    def _longest(self, messages: list[Message]) -> OpenTrajectory | None:
        """The longest conversation that these messages extend."""
        found = [each for each in self._state.conversations if each.extends_to(messages)]
        return max(found, key=lambda each: len(each.trajectory.messages), default=None)

    def _refuse(self, conversation: OpenTrajectory, messages: list[Message], schemas: Sequence[dict[str, Any]]) -> None:
        """Raise EpisodeOver if this conversation, or the episode, may not continue."""
        trajectory, limits = conversation.trajectory, self._limits
        if conversation.sampled is None:
            raise EpisodeOver(trajectory.status, trajectory.error or "this conversation is over")
        if self.turns_left == 0:  # a normal end: the samples are trained
            reason = "its only turn is used" if limits.max_turns == 1 else f"all {limits.max_turns} turns are used"
            if not any("turn_limit" in each.metrics for each in self.trajectories):
                self._count("turn_limit")
            # A new conversation would be empty, and rewards would judge it.
            raise EpisodeOver(Status.COMPLETED, reason, ends_conversation=conversation in self._state.conversations)
        if self.tokens_left == 0:
            reason = f"all {limits.max_tokens} tokens are used"
            raise EpisodeOver(Status.TRUNCATED, reason, ends_conversation=True)
        if self._chat is None:
            return
        context = self._engine.backend.context_tokens_max  # checked before encoding, which takes time
        new = messages[len(trajectory.messages) if trajectory.segments else 0 :]
        if self._chat.tokens_at_least(new, schemas) > context:
            reason = f"the conversation has more than {context} tokens, and the model's context holds {context}"
            raise EpisodeOver(Status.TRUNCATED, reason, ends_conversation=True, is_context=True)

    def _prepare(
        self, conversation: OpenTrajectory, messages: list[Message], schemas: list[dict[str, Any]], wishes: Wishes
    ) -> TurnRequest:
        """The turn to request. Raises EpisodeOver if the context has no room for a reply."""
        chat, segments = self._chat, conversation.trajectory.segments
        place = [*self._state.conversations, conversation].index(conversation)
        group, rollout = self._engine.order
        seed = turn_seed(self._seed, group, rollout, place, conversation.turns, self._role.name)
        if chat is None:
            limit = min(self.tokens_left, wishes.max_tokens or self.tokens_left)
            request = ChatRequest(messages, schemas, limit, seed, self._limits.temperature, self._role.name)
            return TurnRequest(messages, schemas, request, may_continue=limit < self.tokens_left, stop=wishes.stop)
        context: list[int] | None = None
        if segments and schemas == conversation.trajectory.tools:
            recorded = conversation.trajectory.messages
            assert conversation.sampled is not None, "a finished conversation was refused"
            context = chat.extend(recorded[:-1], recorded[-1], messages[len(recorded) :], schemas, conversation.sampled)
            if context is not None:
                check_sampled(conversation, messages, schemas, context, chat, self._engine.order)
        is_new_segment = context is None
        if context is None:  # a first turn, or the template changed the history
            context = chat.encode_prompt(messages, schemas)
        tokens = context if is_new_segment else segments[-1].tokens + context
        most = self._engine.backend.context_tokens_max
        if len(tokens) >= most:
            reason = f"the conversation has {len(tokens)} tokens, the model's context holds {most}"
            raise EpisodeOver(Status.TRUNCATED, reason, ends_conversation=True, is_context=True)
        room = min(self.tokens_left, most - len(tokens))
        limit = min(room, wishes.max_tokens or room)
        asked = GenerateRequest(
            tokens=tokens,
            max_tokens=limit,
            stop_ids=chat.stop_ids,
            seed=seed,
            temperature=self._limits.temperature,
            order=(group, rollout, self._state.turns),
            session=self._engine.session,
            role=self._role.name,
        )
        return TurnRequest(messages, schemas, asked, context, is_new_segment, limit < room, wishes.stop)

    def _record(self, conversation: OpenTrajectory, turn: TurnRequest, answer: Generation | ChatReply) -> TakenTurn:
        """Record the reply. Raises EpisodeOver if there is no reply or it was aborted, and InferenceError if the
        engine's result breaks the invariants.
        """
        trajectory, cut = conversation.trajectory, "the reply was cut off"
        if isinstance(answer, ChatReply):
            if answer.finish == "context":
                raise EpisodeOver(Status.TRUNCATED, answer.detail, ends_conversation=True, is_context=True)
            self._keep(conversation)
            # If the engine reports no count, only the number of turns limits the episode.
            sampled_count = answer.completion_tokens or 0
            taken = TakenTurn(answer.message, answer.finish == "length", answer.prompt_tokens or 0, sampled_count)
            self._state.sampled_count += sampled_count
            for name in ("prompt_tokens", "completion_tokens"):
                if (count := getattr(answer, name)) is not None:
                    self._count(name, float(count))
        else:
            check_generation(answer, turn.request.max_tokens)
            assert self._chat is not None, "ids come from a chat format"
            if turn.stop:
                answer = stopped(answer, turn.stop, self._chat.decode)
            self._keep(conversation)
            if turn.is_new_segment:
                if trajectory.segments and not trajectory.segments[-1].sampled_count:
                    trajectory.segments.pop()  # a branch whose history the template rewrites
                elif trajectory.segments:
                    trajectory.segments[-1].check()
                trajectory.segments.append(Segment([], [], [], []))
            shown_only = len(turn.context)
            append(trajectory.segments[-1], turn.context, 0.0, [0.0] * shown_only, [-1] * shown_only)
            logprobs = [min(logprob, 0.0) for logprob in answer.logprobs]
            reply = readable_message(self._chat.parse(answer.tokens, turn.schemas, trajectory.segments[-1].tokens))
            append(trajectory.segments[-1], answer.tokens, 1.0, logprobs, answer.versions)
            conversation.sampled = list(answer.tokens)
            self._state.sampled_count += len(answer.tokens)
            cut = f"{cut} after {len(answer.tokens)} tokens"
            before, length = len(trajectory.segments[-1].tokens) - len(answer.tokens), len(answer.tokens)
            taken = TakenTurn(reply, answer.finish == "length", before, length, answer.tokens, logprobs)
        trajectory.messages = [*turn.messages, taken.message]
        trajectory.tools = turn.schemas
        self._state.turns += 1
        self._count("turns")
        conversation.end_turn(taken.reply_tokens)
        if answer.finish == "abort":
            raise self._stop(conversation, turn.messages, Status.ABORTED, "the reply was aborted")
        if answer.finish == "length" and not turn.may_continue:
            self._stop(conversation, [], Status.TRUNCATED, cut)
        return taken

    def _keep(self, conversation: OpenTrajectory) -> None:
        if conversation not in self._state.conversations:
            self._state.conversations.append(conversation)
        self._state.current = self._state.conversations.index(conversation)

    def _stop(self, conversation: OpenTrajectory, messages: list[Message], status: Status, reason: str) -> EpisodeOver:
        """End the conversation. `messages`, which have no reply, are recorded for people and rewards."""
        self._keep(conversation)
        trajectory = conversation.trajectory
        trajectory.status, trajectory.error = status, reason
        if len(messages) > len(trajectory.messages):
            trajectory.messages = messages
        conversation.sampled = None
        return EpisodeOver(status, reason)

    def _count(self, name: str, amount: float = 1.0) -> None:
        if (trajectory := self.trajectory) is not None:
            trajectory.metrics[name] = trajectory.metrics.get(name, 0.0) + amount

    def renew_limits(self) -> None:
        """Reset the used turns and tokens, for the next message of a person. The conversation stays."""
        self._state.sampled_count = self._state.turns = 0

    # --- between turns ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """All conversations as plain data, between two turns; None if JSON cannot represent them, for example because
        of an object in a message.
        """
        conversations = [each.with_task(Task("")) for each in self._state.conversations]
        try:
            state = msgspec.json.encode(msgspec.structs.replace(self._state, conversations=conversations))
            decoded: dict[str, Any] = msgspec.json.decode(state)
        except (TypeError, ValueError, RecursionError):
            return None
        return decoded

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`. Call it before the first turn."""
        assert not self._state.conversations, "the model has replied already"
        self._state = msgspec.convert(dict(state), SavedConversations)
        self._state.conversations = [each.with_task(self._task) for each in self._state.conversations]
        for messages in (self._state.last_messages, *(each.messages for each in self.trajectories)):
            messages[:] = map(readable_message, messages)

    def close(self, status: Status, error: str | None = None) -> None:
        """End the episode: set this status for every conversation without a status, and check every segment. If one
        role was cut off, the conversations of the others are complete.
        """
        for model in self._roles.values():
            is_cut = any(each.status is Status.TRUNCATED for each in model.trajectories)
            is_others = status is Status.TRUNCATED and not is_cut
            model.close(*(Status.COMPLETED, None) if is_others else (status, error))
        for trajectory in [] if self._roles else self.trajectories:
            if trajectory.status is Status.PENDING or status.is_infrastructure:
                trajectory.status, trajectory.error = status, error
            for segment in trajectory.segments:
                segment.check()
