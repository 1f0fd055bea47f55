"""Conversations of a client that has its own copy of the messages: which one a request continues, and with which ids.

A client sends the whole conversation each time, and its copy of a reply may differ from the recorded one: without the
thinking, with trimmed white space, with the keys of a call in another order. So each reply is found by what the client
was sent (`prefix_keys`). A request that continues the last reply extends the conversation. One that continues an
earlier reply starts a branch: a conversation of its own, whose first ids are those of the earlier one, unmasked, so
that each sampled token is trained once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence

import msgspec

from rollouts.agent.records import EpisodeOver, ServedTurns, readable_message
from rollouts.env.results import AnswerAs, answers_of
from rollouts.errors import ModelError
from rollouts.gateway.exchange import mistake_in
from rollouts.types import Message


def prefix_keys(messages: Sequence[Message]) -> list[bytes]:
    """A key of each prefix of a conversation [len(messages)]. It does not depend on thinking, on the ids of calls, or
    on white space around a text.
    """
    keys, before = list[bytes](), b""
    for message in messages:
        before = next_key(before, message)
        keys.append(before)
    return keys


def next_key(before: bytes, message: Message) -> bytes:
    """The key of a prefix with one more message."""
    calls = [(call.name, json.dumps(call.arguments, sort_keys=True)) for call in message.tool_calls]
    meaning = msgspec.json.encode((message.role, message.text.strip(), calls))
    return hashlib.blake2b(before + meaning, digest_size=16).digest()


def as_recorded(messages: Sequence[Message], answer_as: AnswerAs, reply: Message | None = None) -> list[Message]:
    """Messages of a client as the conversation keeps them: results of tools get the name of their call and the role
    that the template reads. `reply` is the recorded message before them.

    Raises APIError for a call without a result, and for a result without a call.
    """
    recorded: list[Message] = []
    last, place = reply, 0
    while place < len(messages):
        message = messages[place]
        if last is not None and last.tool_calls:
            results = []
            while place < len(messages) and messages[place].role == "tool":
                results.append(messages[place])
                place += 1
            recorded += _answers(last, results, answer_as)
            last = None
        elif message.role == "tool":
            words = f"the result of the call {message.tool_call_id!r} follows no reply with that call"
            raise mistake_in("messages", words)
        else:
            recorded.append(readable_message(message))
            last = recorded[-1] if message.role == "assistant" else None
            place += 1
    if last is not None:
        raise mistake_in("messages", "the last message is the model's: a reply cannot be continued")
    return recorded


def _answers(reply: Message, results: Sequence[Message], answer_as: AnswerAs) -> list[Message]:
    """The results of a reply's calls, in the order of the calls. A call that could not be read answers itself."""
    texts = {result.tool_call_id: result.text for result in results}
    for call in reply.tool_calls:
        if call.error is None and call.id not in texts:
            raise mistake_in("messages", f"the call {call.id!r} of {call.name} has no result")
    for number in texts.keys() - {call.id for call in reply.tool_calls}:
        raise mistake_in("messages", f"the result of the call {number!r} follows no reply with that call")
    if not results:  # the client saw no call
        return []
    given = [texts[call.id] if call.error is None else f"Error: {call.error}" for call in reply.tool_calls]
    return [readable_message(each) for each in answers_of(reply, given, answer_as)]


@contextlib.contextmanager
def refusals(served: ServedTurns) -> Iterator[None]:
    """Raise APIError for a mistake of the client in the block, and for a limit of the episode, which `served` keeps."""
    try:
        yield
    except ModelError as error:
        raise mistake_in("messages", str(error)) from error
    except EpisodeOver as over:
        if over.status.is_infrastructure:
            raise
        served.refusal = over
        code = "context_length_exceeded" if over.is_context else "episode_over"
        raise mistake_in("messages", over.reason, code=code) from over
