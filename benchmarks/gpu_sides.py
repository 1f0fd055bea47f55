"""The two sides of the training parts of `benchmarks/gpu.py`: ours, and how it is measured beside the limit."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_limit import Limit
from gpu_rows import Sizes, Work, save_model
from rollouts_fsdp.backend import create_fsdp_backend
from torch._dynamo.utils import counters
from transformers import Qwen3ForCausalLM

from rollouts.training.algorithms.recipes import GRPO, SFT
from rollouts.training.backends.optimizer import TorchSettings
from rollouts.training.backends.torch import create_torch_backend
from rollouts.training.batching import make_batch

__all__ = ["LEARNING_RATE", "SETTINGS", "Bench", "Figures", "Ours", "Variant", "compare_all", "free", "synchronize"]

LEARNING_RATE = 1e-6
SETTINGS = {field.name: field.default for field in dataclasses.fields(TorchSettings)}

Figures = dict[str, Any]


class LeftOutError(Exception):
    """This version, or this machine, cannot measure it; the message says why."""


class Bench(NamedTuple):
    """What a part needs: the options, the sizes of the work, the device, a folder, and where figures go."""

    options: argparse.Namespace
    sizes: Sizes
    device: str
    folder: Path
    add: Callable[..., None]
    deadline: float

    @property
    def on_gpu(self) -> bool:
        """Whether there is one."""
        return self.device != "cpu"

    @property
    def compiles(self) -> bool:
        """Whether layers are compiled."""
        chosen: str = self.options.compile
        return self.on_gpu if chosen == "auto" else chosen == "layers"

    def model(self, shape: str = "0.6b") -> str:
        """The folder of a random model; of a dry run, always the tiny one."""
        name = shape if self.options.scale == "full" else "dry"
        return save_model(name, self.sizes.vocabulary, self.folder / name)


# --- clocks -----------------------------------------------------------------------------------------------------------


def synchronize() -> None:
    """Wait until the device has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


READS = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__")


class HostClock:
    """The seconds for which the host waits, where it reads a value from the device (READS)."""

    waited = 0.0

    def _waiting(self, read: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(read)
        def call(tensor: torch.Tensor, *args: Any, **settings: Any) -> Any:
            if tensor.is_cuda:
                start = time.perf_counter()
                torch.cuda.current_stream().synchronize()
                self.waited += time.perf_counter() - start
            return read(tensor, *args, **settings)

        return call

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A block in which reads are watched, in all threads."""
        defined = {name: read for name, read in vars(torch.Tensor).items() if name in READS}
        for name in READS:
            setattr(torch.Tensor, name, self._waiting(getattr(torch.Tensor, name)))
        try:
            yield
        finally:
            for name in READS:
                delattr(torch.Tensor, name)
            for name, read in defined.items():
                setattr(torch.Tensor, name, read)

    def share(self, step: Callable[[], Any]) -> float:
        """The part of a step in which the host did not wait."""
        synchronize()
        with self.watching():
            start = time.perf_counter()
            step()
            submitted = time.perf_counter()
            synchronize()
            total = time.perf_counter() - start
        return (submitted - start - self.waited) / total


def allocated() -> int:
    """Bytes on the device."""
    gc.collect()
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


# --- our side ---------------------------------------------------------------------------------------------------------


class Variant(NamedTuple):
    """How both sides train: a backend of ours, the rank of adapters (0: all weights), checkpointing."""

    backend: str
    rank: int
    checkpoints: bool

    @property
    def name(self) -> str:
        """For the table and for `--only`."""
        weights = f"lora {self.rank}" if self.rank else "all weights"
        return f"{self.backend}, {weights}, {'checkpointing' if self.checkpoints else 'no checkpointing'}"


def settings_for(bench: Bench, variant: Variant) -> TorchSettings:
    """Settings of this variant, without those that this version does not have. Raises LeftOutError."""
    wanted: Figures = {"gradient_checkpointing": variant.checkpoints, "compile": bench.options.compile}
    if bench.on_gpu and SETTINGS["dtype"] != "auto":
        if variant.backend == "torch" and not variant.rank:
            raise LeftOutError("in this version --training torch trains all weights in float32 only")
        wanted["dtype"] = "bfloat16"
    if bench.on_gpu and variant.backend == "fsdp":
        wanted["dtype"] = "bfloat16"
    return TorchSettings(**{name: value for name, value in wanted.items() if name in SETTINGS})


class Ours:
    """rollouts: the steps of a training loop, from samples to new weights."""

    def __init__(self, bench: Bench, model: str, work: Work, variant: Variant) -> None:
        self.work, self.count = work, 0
        self.algorithm = SFT if work.advantages is None else GRPO
        settings = settings_for(bench, variant)
        arguments = (model, 0, 1000, LEARNING_RATE, variant.rank, bench.sizes.per_pass, {"main": self.algorithm}, None)
        if variant.backend == "fsdp":
            self.backend: Any = create_fsdp_backend(*arguments, "{}", processes=1, settings=settings)
        else:
            self.backend = create_torch_backend(*arguments, settings=settings)
        for note in self.backend.notes:
            print(f"  note: {note}")

    def step(self) -> Figures:
        """One optimizer step over all rows."""
        samples, advantages = self.work.samples, self.work.advantages or [0.0] * len(self.work.samples)
        batch = make_batch(samples, advantages, aggregation=self.algorithm.aggregation, step=self.count)
        futures = self.backend.forward_backward(batch), self.backend.optim_step()
        metrics, result = (future.wait() for future in futures)
        self.count += 1
        logged = {name: metrics[name] for name in ("perf/mfu", "perf/host_frac") if name in metrics}
        return {"loss": metrics["policy/loss"], "norm": result.metrics["optim/grad_norm"], **logged}

    def close(self) -> None:
        """End the backend."""
        self.backend.close()


# --- two sides in turn ------------------------------------------------------------------------------------------------


class Measured:
    """A side, and what was measured of it. `bytes` is the memory between its steps."""

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self.before = allocated()
        self.name, self.side = name, make()
        self.first: Figures = {}
        self.last: Figures = {}
        self.seconds: list[float] = []
        self.peak = self.compiled = self.bytes = 0
        self.first_seconds = 0.0

    def warm_up(self, steps: int) -> None:
        """Take the first steps, which compile."""
        start = time.perf_counter()
        self.first = self.side.step()
        self.first_seconds = time.perf_counter() - start
        for _ in range(steps - 1):
            self.side.step()
        self.bytes = allocated() - self.before

    def block(self, steps: int) -> None:
        """Take some steps."""
        held, graphs = allocated(), counters["stats"]["unique_graphs"]
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.last = self.side.step()
        synchronize()
        self.seconds.append((time.perf_counter() - start) / steps)
        most = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        self.peak = max(self.peak, most - held + self.bytes)
        self.compiled += counters["stats"]["unique_graphs"] - graphs

    def figures(self, tokens: int) -> Figures:
        """The row of a table."""
        seconds = statistics.median(self.seconds)
        return {
            "side": self.name,
            "tokens_per_second": tokens / seconds,
            "seconds": seconds,
            "peak_gib": self.peak / 2**30,
            "host_share": HostClock().share(self.side.step),
            "compiled": self.compiled,
            "first_seconds": self.first_seconds,
            **self.last,
            **{name: self.first[name] for name in ("loss", "norm")},
        }


def check_sides(bench: Bench, ours: Figures, limit: Figures, variant: Variant, work: Work) -> None:
    """Both sides must do the same work: their first losses agree, and with all weights the norms of their gradients."""
    bound = 0.05 if bench.on_gpu else 1e-3
    names = ["loss"] if work.advantages is None else []
    names += [] if variant.rank else ["norm"]
    for name in names:
        one, other = ours[name], limit[name]
        assert abs(one - other) <= bound * abs(other), f"the first {name} is {one:.5g}, and {other:.5g} of the limit"


def compare(bench: Bench, model: str, work: Work, variant: Variant) -> None:
    """Measure ours and the limit in turn, and add both to the table."""
    options, label = bench.options, {"work": work.name, "variant": variant.name}
    sides: list[Measured] = []

    def make_limit() -> Limit:
        dtype = torch.bfloat16 if bench.on_gpu else torch.float32
        causal = Qwen3ForCausalLM.from_pretrained(model, dtype=dtype).to(bench.device)
        return Limit(
            causal,
            work.samples,
            work.advantages,
            rank=variant.rank,
            tokens=bench.sizes.per_pass,
            lr=LEARNING_RATE,
            checkpoints=variant.checkpoints,
            compiled=bench.compiles,
        )

    try:
        for name, make in (("ours", lambda: Ours(bench, model, work, variant)), ("limit", make_limit)):
            sides.append(Measured(name, make))
            sides[-1].warm_up(options.warmup)
        for _ in range(options.blocks):
            for side in sides:
                side.block(options.steps)
        ours_figures, limit_figures = (side.figures(work.tokens) for side in sides)
        ratio = ours_figures["tokens_per_second"] / limit_figures["tokens_per_second"]
        bench.add(**label, **ours_figures, of_limit=ratio)
        bench.add(**label, **limit_figures)
        check_sides(bench, ours_figures, limit_figures, variant, work)
    finally:
        for side in sides:
            side.side.close()
        sides.clear()
        free()


def free() -> None:
    """Give memory back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compare_all(bench: Bench, model: str, pairs: list[tuple[Work, Variant]]) -> None:
    """Compare each work and variant, until the time of the part is over. Raises RuntimeError if one of them failed."""
    errors: list[str] = []  # texts, because an exception would hold the memory of the device
    for work, variant in pairs:
        label = {"work": work.name, "variant": variant.name}
        if bench.options.only not in f"{work.name} {variant.name}":
            continue
        if time.monotonic() > bench.deadline:
            bench.add(**label, note="left out: no time")
            continue
        try:
            compare(bench, model, work, variant)
        except LeftOutError as why:
            bench.add(**label, note=f"left out: {why}")
        except Exception as error:
            traceback.print_exc()
            errors.append(f"{work.name}, {variant.name}: {type(error).__name__}: {str(error)[:200]}")
            bench.add(**label, note=errors[-1])
        free()
    if errors:
        raise RuntimeError("; ".join(errors))
