"""Profiles some steps: where a backend's time and memory go, as files in the run's folder.

Call `start` and `finish` in the thread that does the torch work. Other threads are not recorded, except those of the
backward pass. Only one profile runs in a process at a time, because a second profile would silently end the first. Not
here: which steps (`rollouts.training.loops`), and how to read a profile (docs/memory-and-speed.md).

    profile = Profile()
    profile.start(torch.device("cpu"))
    ...
    profile.finish(run_folder / "profile", rank=0)       # trace_rank0.json.gz and so on
"""

from __future__ import annotations

import gzip
import json
import resource
import shutil
import threading
from pathlib import Path
from typing import Any

import torch

from rollouts.errors import OutputError, TrainingError
from rollouts.training.backends.metric_sums import peak_gib as peak_gib
from rollouts.training.backends.metric_sums import peak_resident_bytes

OPERATORS_MAX = 40
# A snapshot of a GPU's memory contains this many allocations and frees.
_HISTORY_ENTRIES_MAX = 200_000

_lock = threading.RLock()
_current: Profile | None = None


class Profile:
    """Starts and finishes any number of times, but not twice at once."""

    def __init__(self) -> None:
        self._profiler: Any = None
        self._thread: threading.Thread | None = None
        self._device = torch.device("cpu")

    def start(self, device: torch.device | str) -> None:
        """Record what this thread runs, on the CPU and on `device`.

        Raises TrainingError if a profile is already running. A running profile is discarded if its thread has ended, as
        after a failed run.
        """
        from torch.profiler import ProfilerActivity, profile

        global _current
        with _lock:
            other = _current
            if other is not None and other._thread is not None and other._thread.is_alive():
                raise TrainingError("a profile is running in this process already; finish it before the next one")
            if other is not None:
                other.discard()
            _current, self._thread, self._device = self, threading.current_thread(), torch.device(device)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._has_gpu else [])]
        try:
            if self._on_gpu:
                torch.cuda.memory._record_memory_history(max_entries=_HISTORY_ENTRIES_MAX, stacks="python")
            self._profiler = profile(activities=activities, profile_memory=True, with_stack=False)
            self._profiler.start()
        except BaseException:
            self.discard()
            raise

    def finish(self, folder: Path, rank: int) -> list[Path]:
        """Stop, and write files into `folder`: a trace (Chrome, Perfetto), a table of the operators that took the most
        time, and a memory record. File names end with the rank. Returns the files.

        Raises TrainingError if nothing was started, and OutputError if a file cannot be written. After an error, the
        profile has stopped too.
        """
        if self._profiler is None:
            raise TrainingError("there is no profile to finish: none was started")
        assert self._thread is threading.current_thread(), f"started in {self._thread}"
        try:
            if self._has_gpu:
                torch.cuda.synchronize(self._device)  # so that the profile has all launched kernels
            self._profiler.stop()
            folder.mkdir(parents=True, exist_ok=True)
            return self._write_files(folder, rank)
        except OSError as error:
            what = f"the profile cannot be written to {folder}: {error.strerror or error}"
            raise OutputError(f"{what}; make room there, give another --out, or leave --profile out") from error
        finally:
            self._release()

    def discard(self) -> None:
        """Stop, and write nothing. Does nothing if no profile is running. For a run that ends before `finish`."""
        if _current is not self:
            return
        try:
            if self._profiler is not None:
                self._profiler.stop()
        finally:
            self._release()

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    @property
    def _has_gpu(self) -> bool:
        return self._on_gpu and torch.cuda.is_available()

    def _write_files(self, folder: Path, rank: int) -> list[Path]:
        averages = self._profiler.key_averages()
        trace = folder / f"trace_rank{rank}.json.gz"
        _write_trace(self._profiler, trace)
        operators = folder / f"operators_rank{rank}.txt"
        by = "self_cuda_time_total" if self._has_gpu else "self_cpu_time_total"
        operators.write_text(averages.table(sort_by=by, row_limit=OPERATORS_MAX), encoding="utf-8")
        memory = folder / f"memory_rank{rank}.{'pickle' if self._on_gpu else 'json'}"
        if self._on_gpu:
            torch.cuda.memory._dump_snapshot(str(memory))  # type: ignore[no-untyped-call]  # it has no annotations
        else:
            found = {"peak_rss_bytes": peak_resident_bytes(), "rss_bytes": _rss(), "operators": _allocating(averages)}
            memory.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return [trace, operators, memory]

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


def _write_trace(profiler: Any, path: Path) -> None:
    """Compress a trace. Checks first that it exists, because torch only logs a failed write."""
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
            path.unlink(missing_ok=True)  # an incomplete trace is useless
            raise
    finally:
        plain.unlink(missing_ok=True)


def _allocating(averages: Any) -> list[dict[str, Any]]:
    """The operators that allocated the most memory and did not free it themselves."""
    found = [(int(each.self_cpu_memory_usage), each.key, int(each.count)) for each in averages]
    found = sorted((each for each in found if each[0] > 0), key=lambda each: (-each[0], each[1]))
    return [{"name": name, "calls": calls, "bytes": size} for size, name, calls in found[:OPERATORS_MAX]]


def _rss() -> int | None:
    """In bytes; None if the system has no file with it."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return None
    return int(pages) * resource.getpagesize()
