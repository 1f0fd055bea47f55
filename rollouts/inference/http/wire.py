"""What is said to vLLM's `POST /inference/v1/generate`, and what it answers: shapes only.

Fields that nobody reads are left out of the replies: msgspec skips them, which is most of what makes decoding cheap.
Left out: how it travels (`client.py`) and what it means to the agent loop (`engine.py`).
"""

from __future__ import annotations

import msgspec

__all__ = ["Choice", "GenerateBody", "GenerateReply", "Logprobs", "PromptLogprob", "SamplingParams", "TokenLogprob"]


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one request is sampled. `logprobs` 0: those of the sampled ids alone. Unknown keys are ignored by vLLM."""

    max_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class GenerateBody(msgspec.Struct, frozen=True):
    """One request: ids [L] in."""

    request_id: str
    model: str
    token_ids: list[int]
    sampling_params: SamplingParams
    return_token_ids: bool = True
    output_mode: str = "tokens"


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """One sampled id with its logprob."""

    token_id: int
    logprob: float


class Logprobs(msgspec.Struct, frozen=True):
    """Those of a choice [K]."""

    content: list[TokenLogprob]


class Choice(msgspec.Struct, frozen=True):
    """One answer: ids [K] out, and why it ended."""

    token_ids: list[int]
    finish_reason: str
    logprobs: Logprobs | None = None


class PromptLogprob(msgspec.Struct, frozen=True, gc=False):
    """The logprob of one prompt token."""

    logprob: float


class GenerateReply(msgspec.Struct, frozen=True):
    """The answers to one request; the prompt's logprobs [L] by id where they were asked for (the first is None)."""

    choices: list[Choice]
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
