"""ChatModel: a conversation with the policy that keeps every token exactly as it was sampled.

The standard loop of `rollouts.agent` and an environment's own `rollout(task, model)` both speak through it, so that
both are recorded alike: messages for people, segments (tokens, masks, logprobs, versions) for training. What is left
out: environments, rewards, deadlines (`rollouts.agent`) and templates (`rollouts.chat`).

Without a chat format the engine is one that is spoken to in messages (`CanChat`): the conversation is played and
recorded alike, but for its tokens, which nobody knows. Such trajectories have no segments, and the engine's own counts
(`prompt_tokens`, `completion_tokens`) among their metrics.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import trio

from rollouts.agent_clock import EpisodeClock
from rollouts.agent_tools import run_tool
from rollouts.author_code import printable, shown
from rollouts.encoding import DEPTH_MAX, plain
from rollouts.env.authoring import ToolMethod
from rollouts.errors import NAME_CHARACTERS_MAX, EnvironmentDefinitionError, InferenceError, ModelError, leaves_of
from rollouts.inference.base import GenerateRequest, Generation, InferenceBackend
from rollouts.inference.chatting import CanChat, ChatReply, ChatRequest
from rollouts.types import Message, Segment, Status, Task, ToolCall, Trajectory, are_whole_streams

if TYPE_CHECKING:
    from rollouts.chat.format import ChatFormat

__all__ = ["ChatModel", "EpisodeLimits", "EpisodeOver", "plain_state", "turn_seed"]

LOGPROB_SLACK = 1e-3  # rounding may leave a probability a hair above 1; more than this is an engine's mistake


class EpisodeLimits(NamedTuple):
    """Bounds of one episode: tokens are sampled ones, over all turns; the rest is seconds, turns and characters.

    `turn_seconds` bounds one reply of the model, `tool_seconds` the deadline of every tool; infinite: nothing besides
    the episode's, or the tool's own.
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


class EpisodeOver(Exception):
    """The model will not speak again in this episode (or in this conversation): `status` and `reason` say why."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class _Conversation:
    """One Trajectory while it is being made. `sampled` is the last reply as ids; None: it cannot go on."""

    def __init__(self, trajectory: Trajectory) -> None:
        self.trajectory = trajectory
        self.sampled: list[int] | None = []
        self.turns = 0

    def extends_to(self, messages: Sequence[Message]) -> bool:
        """Whether `messages` are this conversation and something more."""
        recorded = self.trajectory.messages
        return len(messages) > len(recorded) and list(messages[: len(recorded)]) == recorded


class _Turn(NamedTuple):
    """What the model is about to be shown: `context` are the ids that come new, in a segment of their own or after
    the last.
    """

    messages: list[Message]
    schemas: list[dict[str, Any]]
    context: list[int]
    is_new_segment: bool


class _ConversationState(msgspec.Struct):
    trajectory: Trajectory
    sampled: list[int] | None
    turns: int


class _ModelState(msgspec.Struct):
    conversations: list[_ConversationState]
    current: int | None
    asked: list[Message]
    sampled_count: int
    turns: int


class ChatModel:
    """The policy, as an episode speaks to it.

    `await model.chat(messages)` samples one reply. Messages that extend an earlier conversation (the model's replies
    returned as they were, by equality) continue it; others open a new one. One turn is asked for at a time: of several
    trio tasks that ask at once trio decides the order by chance, and a seed would not be one result.

    `asked` are the messages of the last turn, where it goes on when the conversation is restored.
    `failure` is the first error of the core itself, which ends the run whatever an environment's loop makes of it.
    """

    def __init__(
        self,
        *,
        task: Task,
        chat: ChatFormat | None,
        inference: InferenceBackend,
        limits: EpisodeLimits,
        session: str,
        order: tuple[int, int],
        seed: int,
        tools: Mapping[str, ToolMethod],
        schemas: Sequence[dict[str, Any]],
        clock: EpisodeClock | None = None,
    ) -> None:
        self._task = task
        self._clock = clock or EpisodeClock()
        self._chat = chat
        self._inference = inference
        self._limits = limits
        self._session = session
        self._order = order
        self._seed = seed
        self._tools = tools
        self._schemas = list(schemas)
        self._conversations: list[_Conversation] = []
        self._current: _Conversation | None = None
        self.failure: Exception | None = None
        self._is_speaking = False
        self.asked: list[Message] = []  # what the model was asked last
        self._sampled_count = 0
        self._turns = 0

    @property
    def trajectories(self) -> list[Trajectory]:
        """All conversations so far, in the order in which they began."""
        return [conversation.trajectory for conversation in self._conversations]

    @property
    def trajectory(self) -> Trajectory | None:
        """The conversation that spoke last; None before the first turn."""
        return self._current.trajectory if self._current else None

    @property
    def tokens_left(self) -> int:
        """How many tokens may still be sampled in this episode."""
        return max(self._limits.max_tokens - self._sampled_count, 0)

    @property
    def turns_left(self) -> int:
        """How many times the model may still speak in this episode."""
        return max(self._limits.max_turns - self._turns, 0)

    async def chat(
        self,
        messages: str | Sequence[Message | Mapping[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> Message:
        """The model's reply. `tools` are OpenAI function schemas; None: the environment's own tools, []: none.

        A reply cut off by the token budget or the context is returned as far as it came; its conversation is then
        TRUNCATED and cannot go on. Cancellation records nothing of the turn.

        Raises:
            EpisodeOver: no turns, tokens or context left, the engine was told to stop, or took too long. Let it pass.
            InferenceError: the engine failed.
            ModelError: the chat template refuses this conversation.
            EnvironmentDefinitionError: another trio task still waits for its reply.
        """
        schemas = self._schemas if tools is None else plain(list(tools))
        said = self._copied(messages)
        if self._is_speaking:
            self.failure = EnvironmentDefinitionError(
                "model.chat is already waiting for a reply: ask one after another, not from several trio tasks at once "
                "(their order is chance, so that one seed would not be one result)"
            )
            raise self.failure
        self._is_speaking = True
        self.asked = said
        try:
            await trio.lowlevel.checkpoint()  # tasks that ask at once meet here, however fast the engine is
            return await self._speak(said, schemas)
        except Exception as error:  # whatever is not foreseen is a mistake of the core, also where an author catches it
            if not all(isinstance(leaf, EpisodeOver | InferenceError | ModelError) for leaf in leaves_of(error)):
                self.failure = self.failure or error
            raise
        finally:
            self._is_speaking = False

    async def _speak(self, messages: list[Message], schemas: list[dict[str, Any]]) -> Message:
        conversation = self._find(messages)
        self._refuse_more(conversation, messages)
        if self._chat is None:
            return await self._speak_in_messages(conversation, messages, schemas)
        trajectory = conversation.trajectory
        self._refuse_what_cannot_fit(self._chat, conversation, messages)
        turn = self._prepare(self._chat, conversation, messages, schemas)
        tokens = turn.context if turn.is_new_segment else trajectory.segments[-1].tokens + turn.context
        room = self._room(conversation, turn.messages, len(tokens))
        with self._clock.move_on_after(self._limits.turn_seconds) as deadline:
            generation = await self._generate(self._chat, conversation, tokens, room)
        if deadline.cancelled_caught:
            raise self._late(conversation, turn.messages)
        reply = self._record(self._chat, conversation, turn, generation)
        if generation.finish == "abort":
            raise self._stop(conversation, turn.messages, Status.ABORTED, "the engine was told to stop")
        if generation.finish == "length":
            self._stop(
                conversation, [], Status.TRUNCATED, f"the reply was cut off after {len(generation.tokens)} tokens"
            )
        return msgspec.structs.replace(reply, tool_calls=list(reply.tool_calls))

    async def _speak_in_messages(
        self, conversation: _Conversation, messages: list[Message], schemas: list[dict[str, Any]]
    ) -> Message:
        """One turn of an engine that takes messages."""
        seed = self._turn_seed(conversation)
        request = ChatRequest(messages, schemas, self.tokens_left, seed, self._limits.temperature)
        with self._clock.move_on_after(self._limits.turn_seconds) as deadline:
            answer = await cast(CanChat, self._inference).chat(request)
        if deadline.cancelled_caught:
            raise self._late(conversation, messages)
        if answer.finish == "context":
            raise self._stop(conversation, messages, Status.TRUNCATED, answer.detail)
        self._keep(conversation)
        self._record_message(conversation, messages, schemas, answer.message)
        self._count_tokens(answer)
        if answer.finish == "length":
            self._stop(conversation, [], Status.TRUNCATED, "the reply was cut off")
        return msgspec.structs.replace(answer.message, tool_calls=list(answer.message.tool_calls))

    def _count_tokens(self, answer: ChatReply) -> None:
        """The engine's own counts; where it does not say what was sampled, only the turns bound the episode."""
        self._sampled_count += answer.completion_tokens or 0
        for name in ("prompt_tokens", "completion_tokens"):
            count = getattr(answer, name)
            if count is not None:
                self._count(name, float(count))

    async def call_tools(self, reply: Message) -> list[Message]:
        """Carry out the calls of a reply, one after another, and count them; the messages that answer it.

        Errors become messages. Raises AbandonedCallsError and EnvironmentDefinitionError (see `run_tool`).
        """
        outcomes = []
        for tool_call in reply.tool_calls:
            outcome = await run_tool(
                self._tools,
                tool_call,
                characters_max=self._limits.tool_output_characters_max,
                seconds_max=self._limits.tool_seconds,
            )
            outcomes.append(outcome)
            self._count("tool_calls")
            if outcome.failure is not None:
                self._count("tool_failures")
                self._count(f"tool_failure/{outcome.failure}")
        shows_calls = self._chat is None or self._chat.report.tool_after_text
        if reply.tool_calls and not shows_calls and all(c.error for c in reply.tool_calls):
            # In the conversation as the template shows it there is no call that a tool message could answer.
            return [Message("user", "\n".join(outcome.text for outcome in outcomes))]
        return [
            Message(
                "tool",
                outcome.text,
                tool_call_id=tool_call.id or None,
                name=tool_call.name[:NAME_CHARACTERS_MAX] or None,
            )
            for tool_call, outcome in zip(reply.tool_calls, outcomes, strict=True)
        ]

    # --- one turn ---------------------------------------------------------------------------------------------------

    def _copied(self, messages: str | Sequence[Message | Mapping[str, Any]]) -> list[Message]:
        """The messages of a turn, apart from their author's; those that are on record are taken from there."""
        if isinstance(messages, str):
            return _as_messages(messages)
        given = list(messages)
        recorded = [c.trajectory.messages for c in self._conversations if c.extends_to(given)]  # type: ignore[arg-type]
        known = max(recorded, key=len, default=[])
        return [*known, *_as_messages(given[len(known) :])]

    def _find(self, messages: list[Message]) -> _Conversation:
        """The longest conversation that these messages extend, or a new one (kept once the model has spoken in it)."""
        found = [c for c in self._conversations if c.extends_to(messages)]
        if found:
            return max(found, key=lambda c: len(c.trajectory.messages))
        return _Conversation(Trajectory(self._task, messages))

    def _refuse_more(self, conversation: _Conversation, messages: list[Message]) -> None:
        """Raise EpisodeOver where this conversation, or the episode, may not go on."""
        trajectory = conversation.trajectory
        if conversation.sampled is None:
            raise EpisodeOver(trajectory.status, trajectory.error or "this conversation is over")
        if self.turns_left == 0:
            raise self._out_of_turns(conversation, messages)
        if self.tokens_left == 0:
            raise self._stop(conversation, messages, Status.TRUNCATED, f"all {self._limits.max_tokens} tokens are used")

    def _refuse_what_cannot_fit(self, chat: ChatFormat, conversation: _Conversation, messages: list[Message]) -> None:
        """Raise EpisodeOver where the new messages have more characters than the whole context can: to find that out
        by encoding ten megabytes takes half a minute, in which no other episode moves. White space may be taken away.
        """
        context = self._inference.context_tokens_max
        new = [message.text for message in messages[len(conversation.trajectory.messages) :]]
        if not conversation.trajectory.segments:
            new = [message.text for message in messages]
        room = context * chat.characters_per_token_max
        if sum(map(len, new)) > room and sum(len(part) for text in new for part in text.split()) > room:
            reason = f"the conversation has more than {context} tokens, and the model's context holds {context}"
            raise self._stop(conversation, messages, Status.TRUNCATED, reason)

    def _prepare(
        self, chat: ChatFormat, conversation: _Conversation, messages: list[Message], schemas: list[dict[str, Any]]
    ) -> _Turn:
        """The ids to show."""
        trajectory, sampled = conversation.trajectory, conversation.sampled
        assert sampled is not None, "a conversation that is over was refused"
        if trajectory.segments and schemas == trajectory.tools:
            recorded = trajectory.messages
            new = messages[len(recorded) :]
            suffix = chat.extend(recorded[:-1], recorded[-1], new, schemas, sampled)
            if suffix is not None:
                return _Turn(messages, schemas, suffix, False)
        # A first turn, or history reads differently now: what was sampled before is context of a new segment.
        return _Turn(messages, schemas, chat.encode_prompt(messages, schemas), True)

    def _room(self, conversation: _Conversation, messages: list[Message], length: int) -> int:
        """How many tokens this turn may have, after `length` of context. Raises EpisodeOver where there are none."""
        context = self._inference.context_tokens_max
        if length >= context:
            reason = f"the conversation has {length} tokens, the model's context holds {context}"
            raise self._stop(conversation, messages, Status.TRUNCATED, reason)
        return min(self.tokens_left, context - length)

    def _turn_seed(self, conversation: _Conversation) -> int:
        known = conversation in self._conversations
        index = self._conversations.index(conversation) if known else len(self._conversations)
        return turn_seed(self._seed, *self._order, index, conversation.turns)

    async def _generate(
        self, chat: ChatFormat, conversation: _Conversation, tokens: list[int], room: int
    ) -> Generation:
        request = GenerateRequest(
            tokens=tokens,
            max_tokens=room,
            stop_ids=chat.stop_ids,
            seed=self._turn_seed(conversation),
            temperature=self._limits.temperature,
            order=(*self._order, self._turns),
            session=self._session,
        )
        generation = await self._inference.generate(request)
        _check_generation(generation, room)
        return generation

    def _record(self, chat: ChatFormat, conversation: _Conversation, turn: _Turn, generation: Generation) -> Message:
        self._keep(conversation)
        trajectory = conversation.trajectory
        if turn.is_new_segment:
            if trajectory.segments:
                _check_closed(trajectory.segments[-1])
            trajectory.segments.append(Segment([], [], [], []))
        segment = trajectory.segments[-1]
        _append(segment, turn.context, 0.0, [0.0] * len(turn.context), [-1] * len(turn.context))
        logprobs = [min(logprob, 0.0) for logprob in generation.logprobs]
        _append(segment, generation.tokens, 1.0, logprobs, generation.versions)
        reply = _readable(chat.parse(generation.tokens, turn.schemas))
        conversation.sampled = list(generation.tokens)
        self._sampled_count += len(generation.tokens)
        self._record_message(conversation, turn.messages, turn.schemas, reply)
        return reply

    def _record_message(
        self, conversation: _Conversation, messages: list[Message], schemas: list[dict[str, Any]], reply: Message
    ) -> None:
        """What people read, and the counts."""
        trajectory = conversation.trajectory
        trajectory.messages = [*messages, reply]
        trajectory.tools = schemas
        conversation.turns += 1
        self._turns += 1
        self._count("turns")

    def _keep(self, conversation: _Conversation) -> None:
        self._current = conversation
        if conversation not in self._conversations:
            self._conversations.append(conversation)

    def _stop(self, conversation: _Conversation, messages: list[Message], status: Status, reason: str) -> EpisodeOver:
        """End the conversation; `messages` that the model will not see any more are kept for people and rewards."""
        self._keep(conversation)
        trajectory = conversation.trajectory
        trajectory.status, trajectory.error = status, reason
        if len(messages) > len(trajectory.messages):
            trajectory.messages = messages
        conversation.sampled = None
        return EpisodeOver(status, reason)

    def _out_of_turns(self, conversation: _Conversation, messages: list[Message]) -> EpisodeOver:
        """A normal end, for it was the policy that used up the turns: what it sampled is trained on.

        A conversation in which the model has not spoken is not kept: rewards would judge it in place of one that was.
        """
        reason = f"all {self._limits.max_turns} turns are used"
        if not any("turn_limit" in trajectory.metrics for trajectory in self.trajectories):
            self._count("turn_limit")
        if conversation not in self._conversations:
            return EpisodeOver(Status.COMPLETED, reason)
        return self._stop(conversation, messages, Status.COMPLETED, reason)

    def _late(self, conversation: _Conversation, messages: list[Message]) -> EpisodeOver:
        reason = f"the model took longer than {self._limits.turn_seconds:g} seconds for one turn"
        return self._stop(conversation, messages, Status.TIMEOUT, reason)

    def state_dict(self) -> dict[str, Any] | None:
        """All conversations as plain data, as they are between two turns; None where JSON would not give back the same,
        because of an object in a message, say.
        """
        state = _ModelState(
            [_ConversationState(c.trajectory, c.sampled, c.turns) for c in self._conversations],
            None if self._current is None else self._conversations.index(self._current),
            self.asked,
            self._sampled_count,
            self._turns,
        )
        try:
            decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(_with_tasks(state, Task(""))))
        except (TypeError, ValueError, RecursionError):
            return None
        return decoded

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; before the first turn."""
        assert not self._conversations, "the model has spoken already"
        restored = _with_tasks(msgspec.convert(dict(state), _ModelState), self._task)
        for each in restored.conversations:
            conversation = _Conversation(each.trajectory)
            conversation.sampled, conversation.turns = each.sampled, each.turns
            self._conversations.append(conversation)
        self._current = None if restored.current is None else self._conversations[restored.current]
        self.asked = restored.asked
        self._sampled_count, self._turns = restored.sampled_count, restored.turns

    def close(self, status: Status, error: str | None = None) -> None:
        """The episode is over: conversations without a status get this one, and every segment is checked."""
        for trajectory in self.trajectories:
            if trajectory.status is Status.PENDING or status.is_infrastructure:
                trajectory.status, trajectory.error = status, error
            for segment in trajectory.segments:
                _check_closed(segment)

    def _count(self, name: str, amount: float = 1.0) -> None:
        if self._current is not None:
            metrics = self._current.trajectory.metrics
            metrics[name] = metrics.get(name, 0.0) + amount


def plain_state(name: str, state: Any) -> Any:
    """What an environment's `state()` gave, as JSON has it. Raises EnvironmentDefinitionError where JSON cannot."""
    try:
        return msgspec.json.decode(msgspec.json.encode(state))
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentDefinitionError(
            f"{name}.state() returned what cannot be written to a checkpoint ({error}); it returns plain data: "
            "numbers, text, lists, dicts"
        ) from error


def _with_tasks(state: _ModelState, task: Task) -> _ModelState:
    """The same with this task in every trajectory: a checkpoint knows the task from elsewhere."""
    conversations = [
        msgspec.structs.replace(each, trajectory=msgspec.structs.replace(each.trajectory, task=task))
        for each in state.conversations
    ]
    return msgspec.structs.replace(state, conversations=conversations)


def turn_seed(seed: int, group: int, rollout: int, trajectory: int, turn: int) -> int:
    """The seed of one turn, 0 <= it < 2**63; the same on every machine and in every process.

    >>> turn_seed(0, 1, 2, 0, 0) == turn_seed(0, 1, 2, 0, 0) != turn_seed(0, 1, 2, 0, 1)
    True
    """
    words = f"{seed}/{group}/{rollout}/{trajectory}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "big") >> 1


def _as_messages(messages: str | Sequence[Message | Mapping[str, Any]]) -> list[Message]:
    if isinstance(messages, str):
        return [Message("user", messages)]
    # Copies: a message that its author changes later must not change what was recorded.
    return [_copy(m) if isinstance(m, Message) else msgspec.convert(m, Message) for m in messages]


def _copy(message: Message) -> Message:
    """A copy whose text a tokenizer can read. Raises ModelError where it is made of what no template can read: a struct
    does not check its fields.
    """
    content, calls = message.content, message.tool_calls
    has_parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    if not isinstance(message.role, str) or not (has_parts or isinstance(content, str)):
        raise ModelError(
            f"a message's role is text and its content is text or a list of parts, got {shown(message.role)} and "
            f"{type(content).__name__}"
        )
    if not isinstance(calls, list) or not all(isinstance(each, ToolCall) for each in calls):
        raise ModelError(f"a message's tool_calls are a list of ToolCall, got {shown(calls)}")
    return _readable(message)


def _readable(message: Message) -> Message:
    """A copy without lone surrogates, which neither a tokenizer nor a file takes: they are written as their escapes."""
    content = message.content
    return Message(
        printable(message.role),
        printable(content) if isinstance(content, str) else [_readable_value(part) for part in content],
        [_readable_call(each) for each in message.tool_calls],
        _readable_text(message.tool_call_id),
        _readable_text(message.name),
        _readable_text(message.reasoning),
    )


def _readable_text(text: Any) -> str | None:
    return None if text is None else printable(text) if isinstance(text, str) else shown(text)


def _readable_value(value: Any, around: tuple[int, ...] = ()) -> Any:
    """The same with readable text, at any depth. Objects stay as they are, such as the image of a part. `around` are
    the identities of what this value is inside of.
    """
    if isinstance(value, str):
        return printable(value)
    if not isinstance(value, dict | list | tuple):
        return value
    if id(value) in around or len(around) >= DEPTH_MAX:
        return plain(value)
    around = (*around, id(value))
    if isinstance(value, dict):
        return {_readable_value(key): _readable_value(each, around) for key, each in value.items()}
    return [_readable_value(each, around) for each in value]


def _readable_call(call: ToolCall) -> ToolCall:
    try:
        msgspec.json.encode(call)
    except (TypeError, ValueError, RecursionError):
        arguments = plain(call.arguments) if isinstance(call.arguments, dict) else {}
        return ToolCall(
            _readable_text(call.name) or "", arguments, _readable_text(call.id) or "", _readable_text(call.error)
        )
    return call


def _append(segment: Segment, tokens: list[int], weight: float, logprobs: list[float], versions: list[int]) -> None:
    segment.tokens.extend(tokens)
    segment.loss_mask.extend([weight] * len(tokens))
    segment.logprobs.extend(logprobs)
    segment.versions.extend(versions)


def _check_generation(generation: Generation, room: int) -> None:
    """Refuse what would break the invariants: an engine may be anybody's."""
    tokens, logprobs, versions = generation.tokens, generation.logprobs, generation.versions
    if not len(tokens) == len(logprobs) == len(versions):
        raise InferenceError(
            f"the engine returned {len(tokens)} tokens, {len(logprobs)} logprobs and versions of {len(versions)}"
        )
    if len(tokens) > room:
        raise InferenceError(f"the engine returned {len(tokens)} tokens, but was asked for at most {room}")
    if not len(logprobs) or (max(logprobs) <= LOGPROB_SLACK and math.isfinite(sum(logprobs))):
        return  # found without a step of Python for each token
    for index, logprob in enumerate(logprobs):
        if not math.isfinite(logprob) or logprob > LOGPROB_SLACK:
            raise InferenceError(f"the engine returned the logprob {logprob} for token {index} of {len(tokens)}")


def _check_closed(segment: Segment) -> None:
    """Invariant 2 of design.md."""
    streams = (segment.loss_mask, segment.logprobs, segment.versions)
    lengths = (len(segment.tokens), *(len(stream) for stream in streams))
    assert len(set(lengths)) == 1, f"a segment's streams must be aligned, got lengths {lengths}"
    unsampled = set(itertools.compress(segment.versions, map(operator.le, segment.loss_mask, itertools.repeat(0.0))))
    if unsampled <= {-1} and are_whole_streams(*streams):
        return
    for index, (weight, logprob, version) in enumerate(zip(*streams, strict=True)):
        if weight > 0:
            assert math.isfinite(logprob) and logprob <= 0, f"token {index} was sampled with logprob {logprob}"
        else:
            assert logprob == 0.0 and version == -1, f"token {index} was not sampled: {logprob}, version {version}"
