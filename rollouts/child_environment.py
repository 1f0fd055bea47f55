"""The environment variables that child processes receive.

Isolated tools and launched servers may run code that a model or a stranger controls, and the variables of this process
may be secrets. So these child processes only receive the variables listed here and those that `--pass-env` names. A
hostile program of the same user still finds the others in /proc/<pid>/environ; only a sandbox stops it. The ranks of a
run are this program itself, and receive all variables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextvars import ContextVar
from fnmatch import fnmatchcase

ALLOWED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TMPDIR", "TMP", "TEMP", "TZ", "LANG", "LANGUAGE", "LC_*"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_*", "XDG_*", "ROLLOUTS_*", "COVERAGE_*"),
    *("LD_*", "DYLD_*", "LIBRARY_PATH", "CPATH", "C_INCLUDE_PATH", "CC", "CXX", "PKG_CONFIG_PATH"),
    *("CUDA_*", "NVIDIA_*", "HIP_*", "ROCR_*", "ROCM_*", "HSA_*", "NCCL_*", "RCCL_*", "GLOO_*", "UCX_*", "FI_*"),
    *("OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "TORCH*", "PYTORCH_*", "TRITON_*"),
    *("HF_*", "HUGGINGFACE_*", "TRANSFORMERS_*", "TOKENIZERS_*"),
    *("SSL_CERT_*", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
)
"""Names and patterns of allowed variables. A pattern does not allow the name of a secret, such as HF_TOKEN."""

FOR_SERVERS = (
    *("HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN"),
    *("VLLM_*", "SGLANG_*", "SGL_*", "FLASHINFER_*", "RAY_*"),
)
"""More variables for model servers: their own settings, and the tokens that download gated models."""

_passed_on: ContextVar[tuple[str, ...]] = ContextVar("rollouts-passed-on", default=())


def pass_on(names: str) -> None:
    """Allow more variables in this context, given as names or patterns separated by commas."""
    _passed_on.set(tuple(name for name in re.split(r"[,\s]+", names) if name))


def child_environment(more: Iterable[str] = ()) -> dict[str, str]:
    """The variables for a child process. `more` are additional names and patterns for this process."""
    named = (*more, *_passed_on.get())
    return {
        name: value
        for name, value in os.environ.items()
        if _matches(name, named) or (_matches(name, ALLOWED) and not names_secret(name))
    }


def passed_on() -> dict[str, str]:
    """The variables that `--pass-env` names, for a child process on another host."""
    return {name: value for name, value in os.environ.items() if _matches(name, _passed_on.get())}


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def names_secret(name: str) -> bool:
    """Whether the last word of a variable's name suggests a secret. Only `--pass-env` passes such a variable on.

    >>> [names_secret(name) for name in ("api_key", "HF_TOKEN", "client-secret", "x.password")]
    [True, True, True, True]
    >>> [names_secret(name) for name in ("api_key_env", "max_tokens", "monkey", "keys", "token")]
    [False, False, False, False, False]
    """
    words = re.split(r"[^a-z0-9]+", name.lower())
    return words[-1] in ("key", "secret", "password") or (words[-1] == "token" and len(words) > 1)
