"""TokenEngine: an engine behind HTTP that speaks vLLM's token-in-token-out shape, and nothing of its own besides.

It is what the servers' own backends are built on, and enough for tests and benchmarks against a mock server. Left out,
because each server has a way of its own: sending weights, launching, pausing, aborting, converting logprobs (they are
taken as they come: vLLM's are of temperature 1 unless it was started otherwise).
"""

from __future__ import annotations

import itertools
from typing import Any, Literal, Self

from rollouts.errors import InferenceError
from rollouts.inference.base import GenerateRequest, Generation, Health, VersionSpan, WeightUpdate
from rollouts.inference.http.client import HTTPClient, Retries
from rollouts.inference.http.failures import HTTPFailure
from rollouts.inference.http.wire import Choice, GenerateBody, GenerateReply, SamplingParams

__all__ = ["TokenEngine", "read_choice"]

GENERATE, HEALTH = "/inference/v1/generate", "/health"
FINISHES: dict[str, Literal["stop", "length", "abort"]] = {"stop": "stop", "length": "length", "abort": "abort"}


class TokenEngine:
    """One server as an InferenceBackend. `connections_max` requests are in flight at most; the rest wait their turn."""

    trainable = True
    in_process = False
    owns_weights = True
    weights_kind: Literal["full", "adapter"] = "full"

    def __init__(
        self,
        url: str,
        *,
        model: str = "policy",
        context_tokens_max: int = 32_768,
        api_key: str = "",
        connections_max: int = 256,
        request_seconds: float = 600.0,
        retries: Retries = Retries(),  # noqa: B008 - a NamedTuple cannot be changed
        seed: int = 0,
    ) -> None:
        self.client = HTTPClient(url, api_key=api_key, connections_max=connections_max, retries=retries, seed=seed)
        self.model = model
        self.context_tokens_max = context_tokens_max
        self.request_seconds = request_seconds
        self.version = 0
        self._numbers = itertools.count()

    async def __aenter__(self) -> Self:
        await self.client.__aenter__()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        self.client.close()

    def open_session(self, order: tuple[int, ...]) -> str:
        """A name for the episode; a server forms its batches by itself."""
        return f"{'-'.join(map(str, order))}-{next(self._numbers)}"

    def close_session(self, session: str) -> None:
        """Nothing is kept for a session."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn. Raises InferenceError (HTTPFailure where the request failed)."""
        version = self.version
        reply = await self._ask(
            request.tokens,
            SamplingParams(request.max_tokens, request.temperature, request.stop_ids, _seed(request), logprobs=0),
            request.session or "request",
        )
        tokens, logprobs, finish = read_choice(reply)
        return Generation(tokens, logprobs, finish, [VersionSpan(version, 0, len(tokens))])

    async def score(self, tokens: list[int], temperature: float = 1.0) -> list[float]:
        """Logprob of each token [L] given those before it, of temperature 1. Raises InferenceError."""
        if temperature != 1.0:
            raise InferenceError(f"{self.client.url} scores at temperature 1 only, asked for {temperature:g}")
        reply = await self._ask(tokens, SamplingParams(1, 1.0, (), prompt_logprobs=0), "score")
        found = reply.prompt_logprobs
        if found is None or len(found) != len(tokens):
            raise InferenceError(
                f"{self.client.url} was asked for the logprobs of {len(tokens)} prompt tokens and returned "
                f"{'none' if found is None else len(found)}"
            )
        scores = [0.0]
        for token, entry in zip(tokens[1:], found[1:], strict=True):
            if entry is None or str(token) not in entry:
                raise InferenceError(f"{self.client.url} returned no logprob for token {token} of a prompt")
            scores.append(entry[str(token)].logprob)
        return scores

    async def update_weights(self, update: WeightUpdate) -> None:
        """Take note of the version. Raises InferenceError where weights are to be sent: servers differ in how."""
        if update.path is not None or update.weights is not None:
            raise InferenceError(
                f"weights of version {update.version} cannot be sent to {self.client.url} by this engine"
            )
        self.version = update.version

    async def health(self) -> Health:
        """Whether the server answers. It may still be unable to generate."""
        try:
            await self.client.get(HEALTH, bytes, timeout_seconds=10.0, attempts_max=1)
        except HTTPFailure as failure:
            return Health(False, self.version, str(failure))
        return Health(True, self.version)

    async def _ask(self, tokens: list[int], sampling: SamplingParams, name: str) -> GenerateReply:
        # A name of its own for each request: servers refuse one that is still running, as a lost one may be.
        body = GenerateBody(f"{name}-{next(self._numbers)}", self.model, tokens, sampling)
        return await self.client.post(GENERATE, body, GenerateReply, timeout_seconds=self.request_seconds)


def _seed(request: GenerateRequest) -> int:
    """No server can skip the random numbers that are spent: a reply that goes on gets others, not the first ones again.

    Within what vLLM takes, 0 <= it < 2**63.
    """
    return (request.seed + request.offset * 0x9E3779B97F4A7C15) % 2**63


def read_choice(reply: GenerateReply) -> tuple[list[int], list[float], Literal["stop", "length", "abort"]]:
    """The ids [K] of the only choice, their logprobs [K], and why it ended. Raises InferenceError."""
    if len(reply.choices) != 1:
        raise InferenceError(f"the server was asked for one answer and returned {len(reply.choices)}")
    choice: Choice = reply.choices[0]
    content = choice.logprobs.content if choice.logprobs is not None else []
    if [entry.token_id for entry in content] != choice.token_ids:
        raise InferenceError(
            f"the server returned {len(choice.token_ids)} token ids and logprobs of {len(content)}, or of other tokens"
        )
    finish = FINISHES.get(choice.finish_reason)
    if finish is None:
        raise InferenceError(
            f"the server ended an answer with {choice.finish_reason!r}, expected {', '.join(FINISHES)}"
        )
    return choice.token_ids, [entry.logprob for entry in content], finish
