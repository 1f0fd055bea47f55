"""What is said to SGLang's servers and what they answer (`sglang`, `sglang_group`): shapes, one request, and a pause.

Fields that nobody reads are left out of the replies: msgspec skips them. Left out: what it all means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import trio

from rollouts.errors import ConfigError, InferenceError
from rollouts.inference.dialect import Work
from rollouts.inference.http.client import HTTPClient
from rollouts.inference.http.failures import HTTPFailure

__all__ = [
    "ADAPTER_PREFIX",
    "Ask",
    "Finish",
    "Logprob",
    "Paused",
    "Reply",
    "Sampling",
    "ServedInfo",
    "ask",
    "body_of",
    "read_logprobs",
    "rid_of",
    "server_info",
]

ADAPTER_PREFIX = "rollouts-v"
GREET_SECONDS, CONTROL_SECONDS = 30.0, 60.0

# What a 400 says that another server can do, or this one with its weights given again.
_RETRYABLE_WORDS = ("Duplicate request ID", "never been loaded", "Failed to implicitly load LoRA")

Logprob = tuple[float | None, int, Any]
"""Its value, the id, and the text or null."""


class Sampling(msgspec.Struct, frozen=True):
    """How one request is sampled. All that shapes the distribution is said, since a server may have defaults of its
    own (--preferred-sampling-params); an unknown key is a 400.
    """

    max_new_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    sampling_seed: int | None = None
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    no_stop_trim: bool = True
    skip_special_tokens: bool = False


class Ask(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request: ids [L] in. `extra_key` sets caches apart."""

    rid: str
    input_ids: list[int]
    sampling_params: Sampling
    lora_path: str | None = None
    extra_key: str | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0


class Finish(msgspec.Struct, frozen=True):
    """Why a reply ended. A status stands here where nobody asked for the abort."""

    type: str
    message: str = ""
    status_code: int | None = None


class Span(msgspec.Struct, frozen=True, gc=False):
    """Tokens [start, end) are of the weights of this name."""

    version: str
    start: int = 0
    end: int = 0


class Meta(msgspec.Struct, frozen=True):
    """What comes with the ids."""

    finish_reason: Finish
    weight_version: str = ""  # when the request came in
    weight_versions: list[Span] = []
    output_token_logprobs: list[Logprob] = []
    input_token_logprobs: list[Logprob] = []
    output_top_logprobs: list[list[Logprob] | None] = []


class Reply(msgspec.Struct, frozen=True):
    """The answer to one request: ids [K] out."""

    output_ids: list[int]
    meta_info: Meta


class ServedInfo(msgspec.Struct, frozen=True):
    """What a server was started with; /model_info has what it was told since (its name is the path of the last
    reload then).
    """

    version: str
    served_model_name: str
    max_req_input_len: int | None = None
    enable_lora: bool | None = False
    max_lora_rank: int | None = None
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1


def rid_of(name: str) -> str:
    """An abort takes all names that begin as the one that it was given: none of ours begins as another one."""
    return f"{name}."


def body_of(work: Work, tokens: list[int], sampling: Sampling, logprob_start_len: int = -1) -> Ask:
    """A request as it is sent."""
    is_adapter = work.model.startswith(ADAPTER_PREFIX)
    return Ask(
        rid_of(work.name),
        tokens,
        sampling,
        lora_path=work.model if is_adapter else None,  # the base model's name would be an unknown adapter's
        extra_key=work.salt or None,
        return_logprob=True,
        logprob_start_len=logprob_start_len,
    )


async def ask(client: HTTPClient, body: Ask, timeout_seconds: float) -> Reply:
    """Raises HTTPFailure; retryable also where the server no longer has the weights that are to answer."""
    try:
        reply = await client.post("/generate", body, Reply, timeout_seconds=timeout_seconds)
    except HTTPFailure as failure:
        if failure.status == 400 and any(words in str(failure) for words in _RETRYABLE_WORDS):
            raise HTTPFailure("server", str(failure), retryable=True, status=400) from failure
        raise
    _check_weights(client.url, body, reply.meta_info)
    return reply


def _check_weights(url: str, body: Ask, meta: Meta) -> None:
    """Raises HTTPFailure where older weights answered than those the request was sent to."""
    expected = (body.extra_key or "").rpartition("-")[2]  # `RemoteEngine` ends a salt with its version
    # Version 0 is what a server may have been started with; an adapter's version is in its name.
    if body.lora_path is not None or not expected.isdecimal() or expected == "0":
        return
    served = {span.version for span in meta.weight_versions} or {meta.weight_version}
    # Later ones came while the request was under way.
    if any(not name.isdecimal() or int(name) < int(expected) for name in served):
        raise HTTPFailure(
            "server",
            f"{url} answered with the weights {', '.join(sorted(served))!r}, and was given version {expected}: has it "
            "been started again?",
            retryable=True,
        )


def read_logprobs(found: Sequence[Logprob], ids: Sequence[int], url: str) -> list[float]:
    """The logprobs [K] of these ids [K]. Raises InferenceError where they are of others, or are no numbers."""
    if [entry[1] for entry in found] != list(ids):
        raise InferenceError(f"{url} gave {len(ids)} token ids and logprobs of {len(found)}, or of other tokens")
    logprobs = []
    for value, token, _ in found:
        if value is None or not math.isfinite(value):
            raise InferenceError(f"{url} gave no finite logprob for token {token}: {value}")
        logprobs.append(min(value, 0.0))  # rounding may put a sure token above 0
    return logprobs


async def server_info(client: HTTPClient) -> ServedInfo:
    """What it says of itself. Its answer holds its API key: it is never shown. Raises ConfigError, HTTPFailure."""
    for path in ("/server_info", "/get_server_info"):
        try:
            return await client.get(path, ServedInfo, timeout_seconds=GREET_SECONDS)
        except HTTPFailure as failure:
            if failure.status != 404 and failure.kind != "garbage":
                raise
    raise ConfigError(
        f"what answers at {client.url} is no SGLang server; give --inference.url the address of one, without a path"
    )


class Paused:
    """A server that computes nothing meanwhile. Replies under way wait: their keys and values are computed anew, with
    the weights that are served then, when it goes on; which it does whatever has happened.
    """

    def __init__(self, client: HTTPClient, timeout_seconds: float) -> None:
        self._client, self._seconds = client, timeout_seconds

    async def __aenter__(self) -> None:
        try:
            await self._client.post("/pause_generation", {"mode": "retract"}, bytes, timeout_seconds=self._seconds)
        except BaseException:  # it may have heard it
            await self._go_on(is_told=False)
            raise

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        await self._go_on(is_told=kind is None)

    async def _go_on(self, *, is_told: bool) -> None:
        with trio.CancelScope(shield=True):
            try:
                await self._client.post("/continue_generation", {}, bytes, timeout_seconds=CONTROL_SECONDS)
            except HTTPFailure:
                if is_told:  # else what went wrong before says more
                    raise
