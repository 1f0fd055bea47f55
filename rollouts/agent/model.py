"""ChatModel: a conversation with the policy that keeps every token exactly as it was sampled.

The standard loop of `episode` and an environment's own `rollout(task, model)` both speak through it, so that both are
recorded alike: messages for people, segments (tokens, masks, logprobs, versions) for training. What is left out:
environments and rewards (`episode`), deadlines (`rollouts.inference.suspend`) and templates (`rollouts.chat`).

Without a chat format the engine is one that is spoken to in messages (`CanChat`): the conversation is played and
recorded alike, but for its tokens, which nobody knows. Such trajectories have no segments, and the engine's own counts
(`prompt_tokens`, `completion_tokens`) among their metrics.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import trio

from rollouts.agent.tools import run_tool
from rollouts.author_code import printable, shown
from rollouts.encoding import DEPTH_MAX, plain
from rollouts.env.authoring import ToolMethod
from rollouts.env.checks import check_text
from rollouts.error_log import report
from rollouts.errors import (
    NAME_CHARACTERS_MAX,
    EnvironmentDefinitionError,
    InferenceError,
    ModelError,
    RolloutsError,
    leaves_of,
)
from rollouts.inference.base import GenerateRequest, Generation
from rollouts.inference.chatting import CanChat, ChatReply, ChatRequest
from rollouts.inference.suspend import SuspendableEngine
from rollouts.types import Message, Segment, Status, Task, ToolCall, Trajectory

if TYPE_CHECKING:
    from rollouts.chat.format import ChatFormat

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


class _Conversation(msgspec.Struct, eq=False):
    """One Trajectory while it is being made. `sampled` is the last reply as ids; None: it cannot continue."""

    trajectory: Trajectory
    sampled: list[int] | None = []
    turns: int = 0

    def extends_to(self, messages: Sequence[Message]) -> bool:
        """Whether `messages` are this conversation and something more."""
        recorded = self.trajectory.messages
        return len(messages) > len(recorded) and list(messages[: len(recorded)]) == recorded

    def with_task(self, task: Task) -> _Conversation:
        """A copy with this task: a checkpoint knows the task from elsewhere."""
        return msgspec.structs.replace(self, trajectory=msgspec.structs.replace(self.trajectory, task=task))


class _ModelState(msgspec.Struct):
    """What the model has said so far; `current` is the place of the conversation that spoke last."""

    conversations: list[_Conversation] = []
    current: int | None = None
    asked: list[Message] = []
    sampled_count: int = 0
    turns: int = 0


class _Turn(NamedTuple):
    """What the model is asked. `context` are the ids that come new, in a segment of their own or after the last; none
    where the engine takes messages.
    """

    messages: list[Message]
    schemas: list[dict[str, Any]]
    request: GenerateRequest | ChatRequest
    context: Sequence[int] = ()
    is_new_segment: bool = False


@dataclass(eq=False, repr=False)
class ChatModel:
    """The policy, as an episode speaks to it.

    `await model.chat(messages)` samples one reply. Messages that extend an earlier conversation (the model's replies
    returned as they were, by equality) continue it; others open a new one. One turn is asked for at a time: of several
    trio tasks that ask at once trio decides the order by chance, and a seed would not be one result.

    `failure` is the first error of the core itself, which ends the run whatever an environment's loop makes of it.
    """

    _engine: SuspendableEngine
    _task: Task
    _chat: ChatFormat | None
    _limits: EpisodeLimits
    _seed: int
    _tools: Mapping[str, ToolMethod]
    _schemas: list[dict[str, Any]]
    failure: Exception | None = None
    _is_waiting: bool = False
    _state: _ModelState = field(default_factory=_ModelState)

    @property
    def asked(self) -> list[Message]:
        """The messages of the last turn, from which the conversation continues when it is restored."""
        return self._state.asked

    @property
    def trajectories(self) -> list[Trajectory]:
        """All conversations so far, in the order in which they began."""
        return [conversation.trajectory for conversation in self._state.conversations]

    @property
    def trajectory(self) -> Trajectory | None:
        """The conversation that spoke last; None before the first turn."""
        current = self._state.current
        return None if current is None else self._state.conversations[current].trajectory

    @property
    def tokens_left(self) -> int:
        """How many tokens may still be sampled in this episode."""
        return max(self._limits.max_tokens - self._state.sampled_count, 0)

    @property
    def turns_left(self) -> int:
        """How many times the model may still speak in this episode."""
        return max(self._limits.max_turns - self._state.turns, 0)

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
        if self._is_waiting:
            self.failure = EnvironmentDefinitionError(
                "model.chat is already waiting for a reply: ask one after another, not from several trio tasks at once "
                "(their order is chance, so that one seed would not be one result)"
            )
            raise self.failure
        self._is_waiting, self._state.asked = True, said
        try:
            await trio.lowlevel.checkpoint()  # tasks that ask at once meet here, however fast the engine is
            if self._chat is not None:
                check_text(said, f"the task {shown(self._task.id or self._task.key)}")
            conversation = self._longest(said) or _Conversation(Trajectory(self._task, said))
            self._refuse(conversation, said)
            turn = self._prepare(conversation, said, schemas)
            ask: Callable[[Any], Awaitable[Generation | ChatReply]] = self._engine.generate
            if self._chat is None:
                ask = cast(CanChat, self._engine.backend).chat
            with self._engine.clock.move_on_after(self._limits.turn_seconds) as deadline:
                answer = await _asked(ask, turn.request, self._engine.backend)
            if deadline.cancelled_caught:
                late = f"the model took longer than {self._limits.turn_seconds:g} seconds for one turn"
                raise self._stop(conversation, said, Status.TIMEOUT, late)
            reply = self._record(conversation, turn, answer)
            return msgspec.structs.replace(reply, tool_calls=list(reply.tool_calls))
        except Exception as error:  # whatever is not foreseen is a mistake of the core, also where an author catches it
            if not all(isinstance(leaf, EpisodeOver | InferenceError | ModelError) for leaf in leaves_of(error)):
                self.failure = self.failure or error
            raise
        finally:
            self._is_waiting = False

    async def call_tools(self, reply: Message) -> list[Message]:
        """Carry out the calls of a reply, one after another, and count them; the messages that answer it.

        Errors become messages. Raises AbandonedCallsError and EnvironmentDefinitionError (see `run_tool`).
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
        shows_calls = self._chat is None or self._chat.report.tool_after_text
        if reply.tool_calls and not shows_calls and all(c.error for c in reply.tool_calls):
            # In the conversation as the template shows it there is no call that a tool message could answer.
            return [Message("user", "\n".join(texts))]
        return [
            Message("tool", text, tool_call_id=call.id or None, name=call.name[:NAME_CHARACTERS_MAX] or None)
            for call, text in zip(reply.tool_calls, texts, strict=True)
        ]

    # --- one turn ---------------------------------------------------------------------------------------------------

    def _copied(self, messages: str | Sequence[Message | Mapping[str, Any]]) -> list[Message]:
        """The messages of a turn, apart from their author's, who may change them later; those that are on record are
        taken from there.
        """
        given: list[Any] = [Message("user", messages)] if isinstance(messages, str) else list(messages)
        found = self._longest(given)
        known = found.trajectory.messages if found else []
        new = [m if isinstance(m, Message) else msgspec.convert(m, Message) for m in given[len(known) :]]
        return [*known, *map(_readable, new)]

    def _longest(self, messages: list[Message]) -> _Conversation | None:
        """The longest conversation that these messages extend."""
        found = [each for each in self._state.conversations if each.extends_to(messages)]
        return max(found, key=lambda each: len(each.trajectory.messages), default=None)

    def _refuse(self, conversation: _Conversation, messages: list[Message]) -> None:
        """Raise EpisodeOver where this conversation, or the episode, may not continue."""
        trajectory, limits = conversation.trajectory, self._limits
        if conversation.sampled is None:
            raise EpisodeOver(trajectory.status, trajectory.error or "this conversation is over")
        if self.turns_left == 0:  # a normal end, for it was the policy that used them up: what it sampled is trained on
            reason = f"all {limits.max_turns} turns are used"
            if not any("turn_limit" in each.metrics for each in self.trajectories):
                self._count("turn_limit")
            if conversation not in self._state.conversations:  # rewards would judge it in place of one that began
                raise EpisodeOver(Status.COMPLETED, reason)
            raise self._stop(conversation, messages, Status.COMPLETED, reason)
        if self.tokens_left == 0:
            raise self._stop(conversation, messages, Status.TRUNCATED, f"all {limits.max_tokens} tokens are used")
        if self._chat is None:
            return
        # To find out by encoding that ten megabytes do not fit takes half a minute, in which no other episode moves.
        context = self._engine.backend.context_tokens_max
        begun = len(trajectory.messages) if trajectory.segments else 0
        new = [message.text for message in messages[begun:]]
        room = context * self._chat.characters_per_token_max
        # White space may be taken away.
        if sum(map(len, new)) > room and sum(len(part) for text in new for part in text.split()) > room:
            reason = f"the conversation has more than {context} tokens, and the model's context holds {context}"
            raise self._stop(conversation, messages, Status.TRUNCATED, reason)

    def _prepare(self, conversation: _Conversation, messages: list[Message], schemas: list[dict[str, Any]]) -> _Turn:
        """What to ask. Raises EpisodeOver where the context has no room for a reply."""
        chat, segments = self._chat, conversation.trajectory.segments
        place = [*self._state.conversations, conversation].index(conversation)
        group, rollout = self._engine.order
        seed = turn_seed(self._seed, group, rollout, place, conversation.turns)
        if chat is None:
            request = ChatRequest(messages, schemas, self.tokens_left, seed, self._limits.temperature)
            return _Turn(messages, schemas, request)
        context: list[int] | None = None
        if segments and schemas == conversation.trajectory.tools:
            recorded = conversation.trajectory.messages
            assert conversation.sampled is not None, "a conversation that is over was refused"
            new = messages[len(recorded) :]
            context = chat.extend(recorded[:-1], recorded[-1], new, schemas, conversation.sampled)
        is_new_segment = context is None
        if context is None:  # a first turn, or history reads differently now: what was sampled before is context
            context = chat.encode_prompt(messages, schemas)
        tokens = context if is_new_segment else segments[-1].tokens + context
        most = self._engine.backend.context_tokens_max
        if len(tokens) >= most:
            reason = f"the conversation has {len(tokens)} tokens, the model's context holds {most}"
            raise self._stop(conversation, messages, Status.TRUNCATED, reason)
        asked = GenerateRequest(
            tokens=tokens,
            max_tokens=min(self.tokens_left, most - len(tokens)),
            stop_ids=chat.stop_ids,
            seed=seed,
            temperature=self._limits.temperature,
            order=(group, rollout, self._state.turns),
            session=self._engine.session,
        )
        return _Turn(messages, schemas, asked, context, is_new_segment)

    def _record(self, conversation: _Conversation, turn: _Turn, answer: Generation | ChatReply) -> Message:
        """Keep what was said, for people and for training. Raises EpisodeOver where no reply was made, or it was given
        up; InferenceError where what the engine returned breaks the invariants.
        """
        trajectory, cut = conversation.trajectory, "the reply was cut off"
        if isinstance(answer, ChatReply):
            if answer.finish == "context":
                raise self._stop(conversation, turn.messages, Status.TRUNCATED, answer.detail)
            self._keep(conversation)
            reply = answer.message
            self._state.sampled_count += answer.completion_tokens or 0  # else only the turns bound the episode
            for name in ("prompt_tokens", "completion_tokens"):
                if (count := getattr(answer, name)) is not None:
                    self._count(name, float(count))
        else:
            _check_generation(answer, turn.request.max_tokens)
            self._keep(conversation)
            if turn.is_new_segment:
                if trajectory.segments:
                    trajectory.segments[-1].check()
                trajectory.segments.append(Segment([], [], [], []))
            shown_only = len(turn.context)
            _append(trajectory.segments[-1], turn.context, 0.0, [0.0] * shown_only, [-1] * shown_only)
            logprobs = [min(logprob, 0.0) for logprob in answer.logprobs]
            _append(trajectory.segments[-1], answer.tokens, 1.0, logprobs, answer.versions)
            assert self._chat is not None, "ids come from a chat format"
            reply = _readable(self._chat.parse(answer.tokens, turn.schemas))
            conversation.sampled = list(answer.tokens)
            self._state.sampled_count += len(answer.tokens)
            cut = f"{cut} after {len(answer.tokens)} tokens"
        trajectory.messages = [*turn.messages, reply]
        trajectory.tools = turn.schemas
        conversation.turns += 1
        self._state.turns += 1
        self._count("turns")
        if answer.finish == "abort":
            raise self._stop(conversation, turn.messages, Status.ABORTED, "the engine was told to stop")
        if answer.finish == "length":
            self._stop(conversation, [], Status.TRUNCATED, cut)
        return reply

    def _keep(self, conversation: _Conversation) -> None:
        if conversation not in self._state.conversations:
            self._state.conversations.append(conversation)
        self._state.current = self._state.conversations.index(conversation)

    def _stop(self, conversation: _Conversation, messages: list[Message], status: Status, reason: str) -> EpisodeOver:
        """End the conversation; `messages` that the model will not see any more are kept for people and rewards."""
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
        """Allow all turns and tokens of the episode again, for the next message of a person. The conversation stays."""
        self._state.sampled_count = self._state.turns = 0

    # --- between turns ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """All conversations as plain data, as they are between two turns; None where JSON would not give back the same,
        because of an object in a message, say.
        """
        conversations = [each.with_task(Task("")) for each in self._state.conversations]
        try:
            state = msgspec.json.encode(msgspec.structs.replace(self._state, conversations=conversations))
            decoded: dict[str, Any] = msgspec.json.decode(state)
        except (TypeError, ValueError, RecursionError):
            return None
        return decoded

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; before the first turn."""
        assert not self._state.conversations, "the model has spoken already"
        self._state = msgspec.convert(dict(state), _ModelState)
        self._state.conversations = [each.with_task(self._task) for each in self._state.conversations]

    def close(self, status: Status, error: str | None = None) -> None:
        """The episode is over: conversations without a status get this one, and every segment is checked."""
        for trajectory in self.trajectories:
            if trajectory.status is Status.PENDING or status.is_infrastructure:
                trajectory.status, trajectory.error = status, error
            for segment in trajectory.segments:
                segment.check()


def plain_state(name: str, state: Any) -> Any:
    """What an environment's `state()` gave, as JSON has it. Raises EnvironmentDefinitionError where JSON cannot."""
    try:
        return msgspec.json.decode(msgspec.json.encode(state))
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentDefinitionError(
            f"{name}.state() returned what cannot be written to a checkpoint ({error}); it returns plain data: "
            "numbers, text, lists, dicts"
        ) from error


def turn_seed(seed: int, group: int, rollout: int, trajectory: int, turn: int) -> int:
    """The seed of one turn, 0 <= it < 2**63; the same on every machine and in every process.

    >>> turn_seed(0, 1, 2, 0, 0) == turn_seed(0, 1, 2, 0, 0) != turn_seed(0, 1, 2, 0, 1)
    True
    """
    words = f"{seed}/{group}/{rollout}/{trajectory}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "big") >> 1


def _readable(message: Message) -> Message:
    """A copy without lone surrogates, which neither a tokenizer nor a file takes: they are written as their escapes.

    Raises ModelError where it is made of what no template can read: a struct does not check its fields.
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
    return Message(
        printable(message.role),
        printable(content) if isinstance(content, str) else [_readable_value(part) for part in content],
        [_readable_call(each) for each in calls],
        *(_readable_text(each) for each in (message.tool_call_id, message.name, message.reasoning)),
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
        name, number, error = map(_readable_text, (call.name, call.id, call.error))
        return ToolCall(
            name or "", plain(call.arguments) if isinstance(call.arguments, dict) else {}, number or "", error
        )
    return call


async def _asked(ask: Callable[[Any], Awaitable[Any]], request: Any, engine: Any) -> Any:
    """The engine's answer. What an engine raises that is not the core's becomes an InferenceError."""
    try:
        return await ask(request)
    except Exception as error:
        name = type(engine).__qualname__
        is_ours = type(engine).__module__.startswith("rollouts.")
        if is_ours or all(isinstance(leaf, RolloutsError) for leaf in leaves_of(error)):
            raise
        raise InferenceError(f"the inference backend {name} raised {report(error, f'the engine {name}')}") from error


def _append(segment: Segment, tokens: Sequence[int], weight: float, logprobs: list[float], versions: list[int]) -> None:
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
    # Found without a step of Python for each token.
    if len(logprobs) and not (max(logprobs) <= LOGPROB_SLACK and math.isfinite(sum(logprobs))):
        for index, logprob in enumerate(logprobs):
            if not math.isfinite(logprob) or logprob > LOGPROB_SLACK:
                raise InferenceError(f"the engine returned the logprob {logprob} for token {index} of {len(tokens)}")
