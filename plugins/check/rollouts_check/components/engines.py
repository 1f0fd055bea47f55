"""Checks of inference backends: the members of the Protocol, one clear error for an engine that is not there, and the
replies of an engine that is. An engine behind an address is asked only if it answers.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio

from rollouts.author_code import message_of, shown
from rollouts.errors import InferenceError, RolloutsError, UserError, counted
from rollouts.inference.base import GenerateRequest, Generation, Health, check_engine
from rollouts.inference.chatting import ChatReply, ChatRequest, is_evaluation_only
from rollouts.plugins.checks import run_check
from rollouts.plugins.signature import call_with
from rollouts.types import Message
from rollouts_check.components.common import Subject
from rollouts_check.environments.agents import in_trio
from rollouts_check.report import FailedError, SkippedError
from rollouts_check.runner import once

T = TypeVar("T")
MODEL = "tiny"
TOKENS = [5, 6, 7, 8]
MAX_TOKENS = 6
ORDER = (0, 0)
REPLY_SECONDS = 60.0
NEAR = 1e-3  # nats


def protocol(subject: Subject) -> str:
    """The engine has every field and method of the Protocol and of its capabilities. Making it starts nothing.

    Advice: add what is missing to the class: rollouts.inference.base.InferenceBackend
    """
    engine = _engine(subject)
    try:
        check_engine(engine, subject.found.label)
    except RolloutsError as error:
        raise FailedError("make the engine, and read its fields and methods", message_of(error)) from error
    return ", ".join(name for name, value in engine.capabilities._asdict().items() if value is True)


def absent(subject: Subject) -> str:
    """An engine that cannot be reached, or a setting that cannot be used, is one clear error."""
    if reason := _why_absent(subject):
        return reason
    raise SkippedError("the engine is there")


def replies(subject: Subject) -> str:
    """It replies: ids with finite logprobs of 0 or less, or a message; at most `max_tokens`; one seed, one reply.

    Advice: return a ChatReply with Message("assistant", text)
    """

    async def three(engine: Any) -> list[Any]:
        if engine.capabilities.chats:
            requests = [ChatRequest([Message("user", "Say hello.")], [], MAX_TOKENS, seed) for seed in (1, 1, 2)]
            return [await engine.chat(each) for each in requests]
        return [await _generate(engine, seed) for seed in (1, 1, 2)]

    found = _ask(subject, three)
    if isinstance(found[0], ChatReply):
        attempt = subject.attempt("ask for a reply")
        for each in found:
            is_message = isinstance(each, ChatReply) and isinstance(each.message, Message)
            attempt.require(is_message and each.message.role == "assistant", f"it returned {shown(each)}")
        return shown(found[0].message.text, 40)
    for each in found:
        _check_generation(subject, each)
    first, second, _ = found
    attempt = subject.attempt("ask twice with the same seed", "sample from a generator that `request.seed` seeds")
    attempt.require(first.tokens == second.tokens, f"the ids were {first.tokens}, then {second.tokens}")
    return f"{counted(len(first.tokens), 'token')}, {first.finish}"


def scores(subject: Subject) -> str:
    """`score` gives the logprobs with which it sampled: one for each id, the first one 0.

    Advice: score at the sampling temperature, with the same weights
    """
    capabilities = _engine(subject).capabilities
    if not capabilities.trainable:
        raise SkippedError("it returns no token ids")

    async def reply_and_scores(engine: Any) -> tuple[Generation, list[float]]:
        generation = await _generate(engine, 1)
        return generation, await engine.score([*TOKENS, *generation.tokens])

    generation, scored = _ask(subject, reply_and_scores)
    wanted = len(TOKENS) + len(generation.tokens)
    attempt = subject.attempt("score a sampled reply")
    change = "return one logprob for each id, and 0.0 for the first"
    attempt.require(len(scored) == wanted and not scored[0], f"it returned {shown(scored)} for {wanted} ids", change)
    apart = max(abs(a - b) for a, b in zip(scored[len(TOKENS) :], generation.logprobs, strict=True))
    attempt.require(apart <= max(capabilities.tolerance, NEAR), f"the logprobs differ by {apart:.3g} nats")
    return f"within {apart:.1g} nats"


def sessions(subject: Subject) -> None:
    """Sessions have different names, may be closed twice, and `health` says that the engine works.

    Advice: return a different text for each session
    """

    async def two(engine: Any) -> tuple[list[Any], Any]:
        names = [engine.open_session((0, number)) for number in range(2)]
        for name in [*names, *names]:
            engine.close_session(name)
        return names, await engine.health()

    names, health = _ask(subject, two)
    attempt = subject.attempt("open two sessions, and ask for its health")
    is_named = len(set(names)) == 2 and all(isinstance(name, str) for name in names)
    attempt.require(is_named, f"the names are {shown(names)}")
    is_well = isinstance(health, Health) and health.ok
    attempt.require(is_well, f"the health is {shown(health)}", "return Health(True, version)")


def _check_generation(subject: Subject, found: Any) -> None:
    change = "return a Generation of at most max_tokens ids, each with a finite logprob of 0 or less"
    attempt = subject.attempt(f"ask for {MAX_TOKENS} tokens", change)
    attempt.require(isinstance(found, Generation), f"it returned {shown(found)}")
    size, logprobs = len(found.tokens), found.logprobs
    is_valid = len(logprobs) == size and all(math.isfinite(each) and each <= 0 for each in logprobs)
    attempt.require(1 <= size <= MAX_TOKENS and is_valid, f"{counted(size, 'id')} with the logprobs {shown(logprobs)}")
    change = "return spans that cover every token: VersionSpan(version, 0, len(tokens))"
    attempt.require(len(found.versions) == size, f"the spans have {len(found.versions)} of {size} tokens", change)
    largest, limit = max(found.tokens), _engine(subject).vocabulary_size
    attempt.require(not limit or largest < limit, f"the id {largest} of {limit}", "return ids below vocabulary_size")


# --- calls ------------------------------------------------------------------------------------------------------------


async def _generate(engine: Any, seed: int) -> Any:
    session = engine.open_session(ORDER)
    try:
        return await engine.generate(GenerateRequest(TOKENS, MAX_TOKENS, (), seed, 1.0, (*ORDER, 0), session))
    finally:
        engine.close_session(session)


def _ask(subject: Subject, question: Callable[[Any], Awaitable[T]]) -> T:
    """The answer of a running engine. Raises SkippedError if there is none."""
    if reason := _why_absent(subject):
        raise subject.skipped(f"it needs an engine that runs: {reason}")

    async def ask() -> T:
        with trio.fail_after(REPLY_SECONDS):
            async with _new_engine(subject) as engine:
                return await question(engine)

    with subject.trying("start the engine and ask it", "give each request a deadline") as attempt:
        try:
            return in_trio(ask)
        except trio.TooSlowError:
            raise attempt.failed(f"it took longer than {REPLY_SECONDS:g} seconds") from None


@once
def _why_absent(subject: Subject) -> str:
    """Why the engine cannot be asked: the message of its ConfigError or InferenceError; "" if it can be. Raises
    FailedError for any other error.
    """
    engine = _engine(subject)

    async def reach() -> None:
        with trio.fail_after(REPLY_SECONDS):
            if engine.capabilities.checks:
                await engine.check()
            elif not engine.capabilities.in_process and engine.capabilities.is_pool:
                raise InferenceError("its servers start with a run", is_transient=False)

    try:
        with subject.trying("call `check`", "raise ConfigError, with what was given and what to type"):
            in_trio(reach)
    except FailedError as error:
        if not isinstance(error.__cause__, UserError | InferenceError):
            raise
        return " ".join(message_of(error.__cause__).split())
    return ""


@once
def _engine(subject: Subject) -> Any:
    """One engine, not entered. Raises SkippedError if a setting is missing, such as an address."""
    return _new_engine(subject)


def _new_engine(subject: Subject) -> Any:
    inputs = {
        "model": "any" if is_evaluation_only(subject.component) else MODEL,
        "training": None,
        "seed": subject.seed,
        "temperature": 1.0,
        "folder": str(subject.scratch / "run"),
        "concurrency": 2,
        "lora_rank": 0,
        "lora_roles": (),
        "pinned": False,
    }
    with subject.making("make the engine"):
        run_check(subject.component, inputs, subject.settings)
        return call_with(subject.component, inputs, subject.settings)
