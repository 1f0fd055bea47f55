"""Generators for `generator=`: replies from a running vLLM or SGLang server.

    generate(model, tokenizer, prompt, config, generator=vllm_generator)
    batch_generate(model, tokenizer, prompts, config, workers=32,
                   generator=functools.partial(vllm_generator, url="http://gpu7:8000"))

Token ids are sent and received, and the server's tokenizer is checked. The server samples with its own weights: a
change of your model does not reach it. To train with servers, use `rollouts run --inference vllm`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from rollouts_notes.primitives.generation import Prompt, encode_prompt, sample_replies
from rollouts_notes.primitives.types import Generation, GenerationConfig

if TYPE_CHECKING:
    from rollouts.inference.servers.dialect import Dialect


def vllm_generator(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    config: GenerationConfig,
    *,
    url: str = "http://127.0.0.1:8000",
    served_model: str = "",
    api_key_env: str = "VLLM_API_KEY",
    dialect: Dialect | None = None,
) -> Generation:
    """Sample one reply from the vLLM server at `url`. `model` is not used, unless it is a URL: then it replaces `url`.

    Raises ConfigError if the server does not fit (another tokenizer, an old version), and InferenceError if it fails.

    Args:
        served_model: the server's name for the model; empty: its first model
        api_key_env: the environment variable with the API key, if the server requires one
        dialect: how the server speaks; None: as vLLM does
    """
    from rollouts.inference.servers.checks import ServerSetup
    from rollouts.inference.servers.options import PROBE_TEXT
    from rollouts.inference.servers.server import Server
    from rollouts.inference.servers.vllm import VLLM

    setup = ServerSetup(
        vocabulary_size=len(tokenizer),
        model=served_model,
        temperature=config.temperature,
        tokenizer=(PROBE_TEXT, tokenizer.encode(PROBE_TEXT, add_special_tokens=False)),
        takes_weights=False,
        api_key=os.environ.get(api_key_env, ""),
    )
    address = model if isinstance(model, str) and "://" in model else url
    engine = Server(dialect or VLLM(), address, setup)
    return sample_replies(engine, tokenizer, [encode_prompt(tokenizer, prompt)], [config])[0]


def sglang_generator(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    config: GenerationConfig,
    *,
    url: str = "http://127.0.0.1:30000",
    api_key_env: str = "SGLANG_API_KEY",
    **options: Any,
) -> Generation:
    """Sample one reply from the SGLang server at `url`. Everything else is as in `vllm_generator`."""
    from rollouts.inference.servers.sglang import SGLang

    own = {"url": url, "api_key_env": api_key_env, "dialect": SGLang(), **options}
    return vllm_generator(model, tokenizer, prompt, config, **own)
