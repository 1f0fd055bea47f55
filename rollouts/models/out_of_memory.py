"""Out of memory: recognizes such errors of torch, frees what a failed pass held, and says what to type.

Not here: running a batch again in smaller microbatches (`torch`).
"""

from __future__ import annotations

import gc
import re
from collections.abc import Sequence
from typing import Any

from rollouts.errors import first_line

_WORDS = ("out of memory", "can't allocate memory", "alloc_failed")  # of the GPU's allocators, the CPU's, and cuBLAS


def memory_cause(error: BaseException | None) -> str:
    """What the allocator said, if a device or the machine had too little memory, or if that is the cause of this error
    of an author's code; empty for another error.

    >>> memory_cause(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."))
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
    """
    import torch

    while error is not None:
        is_runtime_error = isinstance(error, RuntimeError) and any(each in str(error).lower() for each in _WORDS)
        if is_runtime_error or isinstance(error, torch.OutOfMemoryError | MemoryError):
            # Without torch's line of C++, and its advice on its own variables.
            words = re.sub(r"^\[enforce fail[^]]*\](?: err == 0)?[ .]*", "", first_line(error))
            return words.partition(" Of the allocated memory")[0].removesuffix(".")
        error = error.__cause__
    return ""


def free_memory(device: Any) -> None:
    """Give the memory of a failed pass back to the device. Call it when the error is handled, because the traceback of
    an error holds the tensors of its functions.
    """
    import torch

    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def training_words(
    name: str, lengths: Sequence[int], tokens: int, smaller: int, device: Any, why: str, *, checkpoints: bool
) -> str:
    """The message for a command of the trainer, which was at a microbatch with rows of these `lengths`. `smaller` is
    the number of tokens to advise; if it is not smaller, the rows must stay together. `checkpoints`: activations are
    checkpointed already.
    """
    if name not in ("forward", "forward_backward"):
        more = "--lora-rank 16, --training.optimizer adafactor, or --training fsdp on more GPUs"
        return f"out of memory on {device} in {name}: {why}\ntype {more}"
    longest, is_one = max(lengths, default=0), len(lengths) < 2
    size = (
        f"one row of {longest} tokens"
        if is_one
        else f"{len(lengths)} rows and {tokens} tokens, at most {longest} a row"
    )
    less = f"--tokens-per-microbatch {smaller}"
    if is_one or smaller >= tokens:
        less = f"a smaller --max-tokens{'' if is_one else ' or --samples-per-prompt'}"
    flags = [less, *([] if checkpoints else ["--training.gradient-checkpointing true"]), "--lora-rank 16"]
    return (
        f"out of memory on {device} in a microbatch of {size}: {why}\n"
        f"type {', '.join(flags)} or a smaller --inference.cache-gib; `--dry-run` estimates the memory"
    )
