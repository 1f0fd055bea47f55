"""Futures, and the thread that runs all torch work of a backend in the order of submission.

Every call of a training backend returns a `TrainFuture` at once (as in Tinker): submit, continue, await later.
`TorchThread` is a first-in-first-out worker. Optimizer steps, forward passes and HF generation share it, so they never
overlap. If the task that awaits a future is cancelled, the job continues, and its result is discarded.

Also here: errors of torch that mean that memory is too small, recognized and explained.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import gc
import queue
import re
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import trio

from rollouts.errors import first_line

T = TypeVar("T")
P = ParamSpec("P")


class TrainFuture(Generic[T]):
    """The result of submitted work. Under trio: `await future` or `await future.result()`. In plain code:
    `future.wait()`.
    """

    def __init__(self) -> None:
        self._future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def set_result(self, value: T) -> None:
        """Set the result. Called once, from any thread. A future that has failed stays failed."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self._future.set_result(value)

    def set_exception(self, error: BaseException) -> None:
        """Set an error, which awaiting the future raises. A future that is done does not change."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self._future.set_exception(error)

    def done(self) -> bool:
        """Whether there is a result or an error."""
        return self._future.done()

    def wait(self, timeout_seconds: float | None = None) -> T:
        """Block the calling thread until done. Never call it in a trio task. Raises TimeoutError after
        `timeout_seconds`.
        """
        return self._future.result(timeout_seconds)

    async def result(self) -> T:
        """Wait under trio, without blocking other tasks."""
        if not self._future.done():
            finished = trio.Event()
            token = trio.lowlevel.current_trio_token()

            def wake(_: object) -> None:
                try:
                    token.run_sync_soon(finished.set)
                except trio.RunFinishedError:
                    return  # the waiting task has ended

            self._future.add_done_callback(wake)
            await finished.wait()
        return self._future.result()

    def __await__(self) -> Generator[Any, Any, T]:
        return self.result().__await__()


class ImmediateTrainFuture(TrainFuture[T]):
    """A future that is already done, for synchronous work."""

    def __init__(self, value: T) -> None:
        super().__init__()
        self.set_result(value)


_Job = tuple[TrainFuture[Any], Callable[[], Any]]


class TorchThread:
    """A daemon thread that runs submitted functions in order. Errors go to the future, never to the thread."""

    def __init__(self, name: str = "rollouts-torch", pending_max: int = 1024) -> None:
        self._jobs: queue.Queue[_Job | None] = queue.Queue(pending_max)
        self._current: TrainFuture[Any] | None = None
        self._abandoned: BaseException | None = None
        self._closed = False
        self._lock = threading.Lock()  # so that every job is either failed by `abandon` or refused
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[P, T], *args: P.args, **settings: P.kwargs) -> TrainFuture[T]:
        """Queue `function(*args, **settings)`; returns at once. Raises queue.Full if `pending_max` jobs are waiting."""
        future: TrainFuture[T] = TrainFuture()
        with self._lock:
            if self._abandoned is None:
                self._jobs.put_nowait((future, functools.partial(function, *args, **settings)))
                return future
        future.set_exception(self._abandoned)
        return future

    def abandon(self, error: BaseException) -> None:
        """Fail the running job, all waiting ones and all later ones. Call it from any thread; the torch thread may be
        stuck.
        """
        with self._lock:
            self._abandoned = error
        current = self._current
        if current is not None:
            current.set_exception(error)
        with contextlib.suppress(queue.Empty):
            while (job := self._jobs.get_nowait()) is not None:
                job[0].set_exception(error)
        self._jobs.put_nowait(None)

    def close(self, timeout_seconds: float = 30.0, *, last: Callable[[], None] | None = None) -> None:
        """Finish submitted work, call `last` in the thread, and end the thread. A second call does nothing.

        After `abandon`, it does not wait, and calls `last` in the calling thread.
        """
        if self._abandoned is not None:
            if last is not None:
                last()
            return
        if self._closed:
            return
        self._closed = True
        if last is not None:
            self.submit(last)
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function = job
            self._current = future
            try:
                value = function()
            except BaseException as error:  # the future raises it
                future.set_exception(error)
            else:
                future.set_result(value)
            self._current = None
            del job, future, function


# --- out of memory ----------------------------------------------------------------------------------------------------


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
    size, less = f"one row of {longest} tokens", "a smaller --max-tokens"
    if not is_one:
        size = f"{len(lengths)} rows and {tokens} tokens, at most {longest} a row"
        less = f"--tokens-per-microbatch {smaller}" if smaller < tokens else f"{less} or --samples-per-prompt"
    flags = [less, *([] if checkpoints else ["--training.gradient-checkpointing true"]), "--lora-rank 16"]
    hint = f"type {', '.join(flags)} or a smaller --inference.cache-gib; `--dry-run` estimates the memory"
    return f"out of memory on {device} in a microbatch of {size}: {why}\n{hint}"
