"""What a `ChatModel` keeps of its conversations, and how a generation is checked and recorded."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from rollouts.author_code import printable, shown
from rollouts.bounds import bounded_call
from rollouts.chat.shown import SHAPES_MAX, check_extension, shapes
from rollouts.doors import HOMES
from rollouts.encoding import DEPTH_MAX, plain_json
from rollouts.error_log import report
from rollouts.errors import InferenceError, ModelError, RolloutsError, leaves_of
from rollouts.inference.base import GenerateRequest, Generation, VersionSpan
from rollouts.inference.chatting import ChatRequest
from rollouts.types import COUNTS, Message, Segment, Status, Task, ToolCall, Trajectory

if TYPE_CHECKING:
    from rollouts.chat.format import ChatFormat

WATCHED_EPISODES = 8
LOGPROB_SLACK = 1e-3  # rounding may make a logprob slightly positive; a larger value is an engine's error


class EpisodeOver(Exception):
    """The episode, or this conversation, has ended. `status` and `reason` say why.

    `ends_conversation`: a request that `chat` has refused for this reason ends its conversation. `is_context`: the
    conversation is too long for the model.
    """

    def __init__(
        self, status: Status, reason: str, *, ends_conversation: bool = False, is_context: bool = False
    ) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.ends_conversation = ends_conversation
        self.is_context = is_context


class Wishes(NamedTuple):
    """What a client wants of one reply: at most `max_tokens` tokens, and an end at the first of the texts `stop`."""

    max_tokens: int | None = None
    stop: Sequence[str] = ()


NO_WISHES = Wishes()


class OpenTrajectory(msgspec.Struct, eq=False):
    """A trajectory in progress. `sampled` are the ids of the last reply; None: the conversation cannot continue."""

    trajectory: Trajectory
    sampled: list[int] | None = []
    turns: int = 0

    def extends_to(self, messages: Sequence[Message]) -> bool:
        """Whether `messages` are this conversation with new messages at its end."""
        recorded = self.trajectory.messages
        return len(messages) > len(recorded) and list(messages[: len(recorded)]) == recorded

    def end_turn(self, reply_tokens: int) -> None:
        """Count a recorded turn, and note where its `reply_tokens` begin."""
        self.turns += 1
        if self.trajectory.segments and reply_tokens:
            segment = self.trajectory.segments[-1]
            segment.turns.append((self.trajectory.turns - 1, len(segment.tokens) - reply_tokens))

    def with_task(self, task: Task) -> OpenTrajectory:
        """A copy with this task. (A checkpoint stores the task separately.)"""
        return msgspec.structs.replace(self, trajectory=msgspec.structs.replace(self.trajectory, task=task))


class SavedConversations(msgspec.Struct):
    """The conversations so far, as a checkpoint stores them. `current`: the index of the conversation with the last
    reply.
    """

    conversations: list[OpenTrajectory] = []
    current: int | None = None
    last_messages: list[Message] = msgspec.field(default_factory=list, name="asked")  # its name in checkpoints
    sampled_count: int = 0
    turns: int = 0


class TurnRequest(NamedTuple):
    """One turn to request. `context` are the new ids before the reply, which continue the last segment or start a new
    one; empty if the engine takes messages. `may_continue`: a limit of the client, not of the episode, cuts the reply.
    """

    messages: list[Message]
    schemas: list[dict[str, Any]]
    request: GenerateRequest | ChatRequest
    context: Sequence[int] = ()
    is_new_segment: bool = False
    may_continue: bool = False
    stop: Sequence[str] = ()


class TakenTurn(NamedTuple):
    """A recorded reply. `tokens` and `logprobs` are those of the reply [K]; None if the engine takes messages."""

    message: Message
    is_cut: bool
    prompt_tokens: int
    reply_tokens: int
    tokens: Sequence[int] | None = None
    logprobs: Sequence[float] = ()


def turn_seed(seed: int, group: int, rollout: int, trajectory: int, turn: int, role: str = "") -> int:
    """The seed of one turn, 0 <= seed < 2**63. It is the same on every machine and in every process. The turns of a
    role do not depend on how many turns the other roles had before.

    >>> turn_seed(0, 1, 2, 0, 0) == turn_seed(0, 1, 2, 0, 0) != turn_seed(0, 1, 2, 0, 1)
    True
    """
    words = "/".join(map(str, (seed, group, rollout, *([role] if role else []), trajectory, turn))).encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "big") >> 1


async def generate_with(generate: Callable[[Any], Awaitable[Any]], request: Any, engine: Any) -> Any:
    """The engine's result. If an engine of another package raises an unexpected exception, it becomes an
    InferenceError.
    """
    try:
        return await generate(request)
    except Exception as error:
        name, package = type(engine).__qualname__, type(engine).__module__.partition(".")[0]
        if package in HOMES or all(isinstance(leaf, RolloutsError) for leaf in leaves_of(error)):
            raise
        raise InferenceError(f"the inference backend {name} raised {report(error, f'the engine {name}')}") from error


def append(segment: Segment, tokens: Sequence[int], weight: float, logprobs: list[float], versions: list[int]) -> None:
    segment.tokens.extend(tokens)
    segment.loss_mask.extend([weight] * len(tokens))
    segment.logprobs.extend(logprobs)
    segment.versions.extend(versions)


def check_generation(generation: Generation, room: int) -> None:
    """Raise InferenceError for a result that breaks the invariants. Any package can provide an engine."""
    tokens, logprobs, versions = generation.tokens, generation.logprobs, generation.versions
    if not len(tokens) == len(logprobs) == len(versions):
        raise InferenceError(
            f"the engine returned {len(tokens)} tokens, {len(logprobs)} logprobs and {len(versions)} versions"
        )
    if len(tokens) > room:
        raise InferenceError(f"the engine returned {len(tokens)} tokens, but the limit was {room}")
    # The usual case needs no Python loop over the tokens.
    if len(logprobs) and not (max(logprobs) <= LOGPROB_SLACK and math.isfinite(sum(logprobs))):
        for index, logprob in enumerate(logprobs):
            if not math.isfinite(logprob) or logprob > LOGPROB_SLACK:
                raise InferenceError(f"the engine returned the logprob {logprob} for token {index} of {len(tokens)}")


def check_sampled(
    conversation: OpenTrajectory,
    messages: list[Message],
    schemas: list[dict[str, Any]],
    context: Sequence[int],
    chat: ChatFormat,
    order: tuple[int, ...],
) -> None:
    """Check that the last reply and `context` end the prompt of the next turn: in the first episodes of a run, and once
    for each shape of message. `order` is that of the episode. Raises ModelError, so such a turn is never trained.
    """
    if len(chat.watched) < WATCHED_EPISODES:
        chat.watched.add(order)
    new = set(shapes(messages[-4:], schemas, chat)) - chat.sampled_shapes
    if order not in chat.watched and (not new or len(chat.sampled_shapes) >= SHAPES_MAX):
        return
    chat.sampled_shapes |= new
    recorded = conversation.trajectory.messages
    before, more = recorded[:-1], messages[len(recorded) - 1 :]
    check_extension(before, more, schemas, conversation.sampled or [], context, chat)


def stopped(generation: Generation, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> Generation:
    """The generation up to the token that completes the first of the texts `stops`."""
    length = _cut_at_stop(generation.tokens, stops, decode)
    if length == len(generation.tokens):
        return generation
    spans = [VersionSpan(each.version, each.start, min(each.end, length)) for each in generation.spans]
    kept = [span for span in spans if span.start < span.end]
    return Generation(generation.tokens[:length], generation.logprobs[:length], "stop", kept)


def _cut_at_stop(tokens: Sequence[int], stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> int:
    """The number of tokens up to the one that completes the first stop text; all of them if there is none."""
    if not any(stop and stop in decode(tokens) for stop in stops):
        return len(tokens)
    low, high = 1, len(tokens)
    while low < high:  # a longer text keeps the stop text, so the search can halve
        middle = (low + high) // 2
        text = decode(tokens[:middle])
        low, high = (low, middle) if any(stop and stop in text for stop in stops) else (middle + 1, high)
    return low


# --- messages that can be encoded -------------------------------------------------------------------------------------


def readable_message(message: Message) -> Message:
    """A copy with lone surrogates written as escapes, because tokenizers and files do not accept them.

    Raises ModelError if a field has a type that templates cannot read, since the struct does not check its fields.
    """
    content, calls = message.content, message.tool_calls
    has_parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    if not isinstance(message.role, str) or not (has_parts or isinstance(content, str)):
        raise ModelError(
            f"a message's role must be text, and its content text or a list of parts; got {shown(message.role)} and "
            f"{type(content).__name__}"
        )
    if not isinstance(calls, list) or not all(isinstance(each, ToolCall) for each in calls):
        raise ModelError(f"a message's tool_calls must be a list of ToolCall, got {shown(calls)}")
    return Message(
        printable(message.role),
        printable(content) if isinstance(content, str) else [_readable_value(part) for part in content],
        [_readable_call(each) for each in calls],
        *(_readable_text(each) for each in (message.tool_call_id, message.name, message.reasoning)),
    )


def _readable_text(text: Any) -> str | None:
    return None if text is None else printable(text) if isinstance(text, str) else shown(text)


def _readable_value(value: Any, around: tuple[int, ...] = ()) -> Any:
    """A copy with readable text at any depth. Other objects, such as an image, are not copied. `around` are the
    identities of the values that contain this one, to find cycles.
    """
    if isinstance(value, str):
        return printable(value)
    if not isinstance(value, dict | list | tuple):
        return value
    if id(value) in around or len(around) >= DEPTH_MAX:
        return plain_json(value)
    around = (*around, id(value))
    if isinstance(value, dict):
        return {_readable_value(key): _readable_value(each, around) for key, each in value.items()}
    return [_readable_value(each, around) for each in value]


def _readable_call(call: ToolCall) -> ToolCall:
    call = bounded_call(call)
    try:
        msgspec.json.encode(call)
    except (TypeError, ValueError, RecursionError):
        name, number, error = map(_readable_text, (call.name, call.id, call.error))
        return ToolCall(
            name or "", plain_json(call.arguments) if isinstance(call.arguments, dict) else {}, number or "", error
        )
    return call


# --- what clients were sent -------------------------------------------------------------------------------------------


class SentReply(NamedTuple):
    """A reply that a client got: the conversation in which it is message `place`, the tools that were offered, and the
    ids of the reply. The context and the reply are the first `length` tokens of segment `segment`.
    """

    conversation: OpenTrajectory
    place: int
    schemas: list[dict[str, Any]]
    sampled: list[int]
    segment: int
    length: int

    @property
    def is_last(self) -> bool:
        """Whether the conversation ends with this reply."""
        return len(self.conversation.trajectory.messages) == self.place + 1

    @property
    def messages(self) -> list[Message]:
        """The recorded conversation up to this reply."""
        return self.conversation.trajectory.messages[: self.place + 1]

    def branch(self) -> OpenTrajectory:
        """A new conversation that begins with the tokens up to this reply. None of them is trained again."""
        old = self.conversation.trajectory
        counts = dict.fromkeys(COUNTS, 0.0)
        new = Trajectory(old.task, self.messages, metrics=counts, tools=self.schemas, role=old.role)
        if old.segments:
            tokens = old.segments[self.segment].tokens[: self.length]
            zeros = [0.0] * len(tokens)
            new.segments.append(Segment(tokens, zeros, list(zeros), [-1] * len(tokens)))
        return OpenTrajectory(new, list(self.sampled))


@dataclass(eq=False)
class ServedTurns:
    """What a model keeps to answer clients. `refusal` is the limit of the episode for which the last request got no
    reply.
    """

    replies: dict[bytes, SentReply] = field(default_factory=dict)  # by `prefix_keys`
    refusal: EpisodeOver | None = None
