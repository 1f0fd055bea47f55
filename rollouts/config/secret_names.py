"""Which names of components' settings are those of secrets."""

from __future__ import annotations

import re

__all__ = ["is_secret"]

_KEYS = ("access", "account", "api", "auth", "encryption", "master", "private", "secret", "signing", "ssh")
"""The words that make a `key` a secret: `api_key`. Others do not: `prompt_key`, `sort_key`, `public_key`."""

_TOKENS = ("bos", "cls", "eos", "mask", "pad", "sep", "stop", "unk")
"""The words that make a `token` one of a tokenizer: `pad_token`."""


def is_secret(name: str) -> bool:
    """Whether the name of a component's setting says that its value is a secret.

    These do: a name whose last word is `secret`, `password`, `passphrase` or `apikey`; `key` alone, or after a word of
    `_KEYS`; and `token` after any word but one of `_TOKENS`.

    >>> [is_secret(name) for name in ("key", "openai_api_key", "x-api-key", "client-secret", "password", "hf_token")]
    [True, True, True, True, True, True]
    >>> [is_secret(name) for name in ("prompt_key", "api_key_env", "monkey", "keys", "max_tokens", "pad_token")]
    [False, False, False, False, False, False]
    """
    *before, last = re.split(r"[^a-z0-9]+", name.lower())
    if last == "key":
        return not before or before[-1] in _KEYS
    if last == "token":
        return bool(before) and before[-1] not in _TOKENS
    return last in ("secret", "password", "passphrase", "apikey")
