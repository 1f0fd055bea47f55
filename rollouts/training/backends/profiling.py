"""A profile of some steps: where a backend's time and memory went, as files in the run's folder.

Whoever does the torch work calls `start` and `finish` in the thread that does it; what other threads run is not seen
(the backward's own threads are). One profile at a time in a process: torch keeps one, and lets a second one end it
unasked. Left out: which steps (`rollouts.training.loops`), and what the numbers mean (docs/memory-and-speed.md).

    profile = Profile()
    profile.start(torch.device("cpu"))
    ...
    profile.finish(run_folder / "profile", rank=0)       # trace_rank0.json.gz and so on
"""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rollouts.errors import OutputError, TrainingError

__all__ = ["Profile", "peak_gib"]

OPERATORS_MAX = 40
# Allocations and frees that the snapshot of a GPU's memory looks back on.
_HISTORY_ENTRIES_MAX = 200_000

_lock = threading.Lock()
_current: Profile | None = None


class Profile:
    """Starts and finishes any number of times, once at a time."""

    def __init__(self) -> None:
        self._profiler: Any = None
        self._thread: threading.Thread | None = None
        self._device = torch.device("cpu")

    @property
    def running(self) -> bool:
        """Whether it was started and neither finished nor discarded."""
        return self._profiler is not None

    def start(self, device: torch.device | str) -> None:
        """Record what this thread runs, on the CPU and on `device`.

        Raises TrainingError where a profile runs already; one whose thread has ended, as after a run that failed, is
        discarded.
        """
        from torch.profiler import ProfilerActivity, profile

        self._take()
        self._thread, self._device = threading.current_thread(), torch.device(device)
        activities = [ProfilerActivity.CPU]
        if self._on_gpu and torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        try:
            if self._on_gpu:
                torch.cuda.memory._record_memory_history(max_entries=_HISTORY_ENTRIES_MAX, stacks="python")
            self._profiler = profile(activities=activities, profile_memory=True, with_stack=False)
            self._profiler.start()
        except BaseException:
            self.discard()
            raise

    def finish(self, folder: Path, rank: int) -> list[Path]:
        """Stop, and write into `folder`, names ending in the rank: a trace (Chrome, Perfetto), a table of the operators
        that took most time, and what is known of memory. Gives the files.

        Raises TrainingError where nothing was started, OutputError where they cannot be written; it has stopped then
        too.
        """
        if self._profiler is None:
            raise TrainingError("there is no profile to finish: none was started")
        assert self._thread is threading.current_thread(), f"started in {self._thread}"
        try:
            if self._on_gpu and torch.cuda.is_available():
                torch.cuda.synchronize(self._device)  # what was launched belongs to it
            profiler = self._profiler
            profiler.stop()
            with _refusals(folder):
                folder.mkdir(parents=True, exist_ok=True)
                return [
                    _write_trace(profiler, folder / f"trace_rank{rank}.json.gz"),
                    _write_operators(profiler, folder / f"operators_rank{rank}.txt", on_gpu=self._on_gpu),
                    self._write_memory(profiler, folder, rank),
                ]
        finally:
            self._release()

    def discard(self) -> None:
        """Stop and keep nothing; harmless where nothing runs. For whoever ends before `finish`."""
        if _current is self:
            self._stop()

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def _take(self) -> None:
        global _current
        with _lock:
            other = _current
            if other is not None and _alive(other._thread):
                raise TrainingError("a profile is running in this process already; finish it before the next one")
            _current = self
        if other is not None:
            other._stop()

    def _stop(self) -> None:
        try:
            if self._profiler is not None:
                self._profiler.stop()
        finally:
            self._release()

    def _release(self) -> None:
        global _current
        self._profiler = self._thread = None
        try:
            if self._on_gpu:
                torch.cuda.memory._record_memory_history(enabled=None)
        finally:
            with _lock:
                if _current is self:
                    _current = None

    def _write_memory(self, profiler: Any, folder: Path, rank: int) -> Path:
        if self._on_gpu:
            path = folder / f"memory_rank{rank}.pickle"
            torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]  # it has no annotations
            return path
        path = folder / f"memory_rank{rank}.json"
        found = {
            "peak_rss_bytes": _peak_rss(),
            "rss_bytes": _rss(),
            "operators": _allocating(profiler),
        }
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return path


def peak_gib(device: torch.device | str) -> float:
    """GiB of the device's memory that tensors of this process have held at most; on a CPU, the process's largest
    resident size since it began.
    """
    place = torch.device(device)
    most = torch.cuda.max_memory_allocated(place) if place.type == "cuda" else _peak_rss()
    return most / 2**30


def _write_trace(profiler: Any, path: Path) -> Path:
    """torch only logs a trace that it cannot write, so it is looked at before it is packed."""
    plain = path.with_suffix("")
    plain.unlink(missing_ok=True)
    try:
        profiler.export_chrome_trace(str(plain))
        if not plain.is_file() or plain.stat().st_size == 0:
            raise OSError(f"torch could not write {plain.name}")
        try:
            with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=6) as packed:
                shutil.copyfileobj(source, packed)
        except OSError:
            path.unlink(missing_ok=True)  # half a trace is none
            raise
    finally:
        plain.unlink(missing_ok=True)
    return path


def _write_operators(profiler: Any, path: Path, *, on_gpu: bool) -> Path:
    by = "self_cuda_time_total" if on_gpu and torch.cuda.is_available() else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=by, row_limit=OPERATORS_MAX)
    path.write_text(table, encoding="utf-8")
    return path


def _allocating(profiler: Any) -> list[dict[str, Any]]:
    """The operators that leave most memory allocated, by themselves; what they free again is not counted."""
    events = [each for each in profiler.key_averages() if each.self_cpu_memory_usage > 0]
    events.sort(key=lambda each: (-each.self_cpu_memory_usage, each.key))
    return [
        {"name": each.key, "calls": int(each.count), "bytes": int(each.self_cpu_memory_usage)}
        for each in events[:OPERATORS_MAX]
    ]


@contextlib.contextmanager
def _refusals(folder: Path) -> Iterator[None]:
    """Raises OutputError for what the disk refuses."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"the profile cannot be written to {folder}: {error.strerror or error}; make room there, give another "
            "--out, or leave --profile out"
        ) from error


def _alive(thread: threading.Thread | None) -> bool:
    return thread is not None and thread.is_alive()


def _peak_rss() -> int:
    """Bytes."""
    import resource  # there is none on Windows, where nothing else here fails

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # there bytes, elsewhere KiB


def _rss() -> int | None:
    """Bytes; None where the system does not tell it in a file."""
    import resource

    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return None
    return int(pages) * resource.getpagesize()
