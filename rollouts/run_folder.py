"""A run is a folder that explains itself: config.toml, manifest.json, trajectories/, checkpoints/, summary.json.

(`metrics.jsonl` is the logger `jsonl`'s.) Files are written whole or not at all, but for the trajectories of a step,
which are lines. Left out: reading a run back.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollouts.errors import OutputError
from rollouts.types import Trajectory

__all__ = ["RunFolder", "check_out", "default_out", "trajectory_record"]


def default_out(env: str, loss: str) -> str:
    """`runs/<time>-<env>-<loss>`; names of files and packs lose what a folder's name cannot hold."""
    words = (re.sub(r"[^\w.-]+", "-", Path(name.partition(":")[0]).stem).strip("-.") for name in (env, loss))
    return str(Path("runs") / "-".join((time.strftime("%Y%m%d-%H%M%S"), *words)))


def check_out(out: str) -> Path:
    """The folder that a run may be written to. Nothing is created.

    Raises:
        OutputError: it exists and is not an empty folder, or its nearest existing parent cannot be written.
    """
    path = Path(out)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise OutputError(f"the output folder {out} exists already and is kept as it is; type --out with another name")
    parent = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(
            f"the output folder {out} cannot be made: {parent} cannot be written; type --out with another"
        )
    return path


class RunFolder:
    """Writes one run's files. Raises OutputError where the disk refuses."""

    def __init__(self, path: Path) -> None:
        self.path = check_out(str(path))
        self._made = [each for each in (self.path, *self.path.absolute().parents) if not each.exists()]
        try:
            (self.path / "trajectories").mkdir(parents=True, exist_ok=True)
            (self.path / "checkpoints").mkdir(exist_ok=True)
        except OSError as error:
            raise OutputError(f"the output folder {path} cannot be made: {error.strerror or error}") from error

    def discard(self) -> None:
        """Remove everything that was written, and the folders that were made for it: the run never began."""
        for entry in self.path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        for made in self._made:
            with contextlib.suppress(OSError):  # another run has written beside it meanwhile
                made.rmdir()

    def write_text(self, name: str, text: str) -> None:
        """Write a file whole: to a temporary name first, then renamed."""
        target = self.path / name
        temporary = target.with_name(f".{target.name}.partial")
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, target)
        except OSError as error:
            raise OutputError(f"{target} cannot be written: {error.strerror or error}") from error

    def write_json(self, name: str, value: Any) -> None:
        """Write `value` as indented JSON, whole. NaN becomes null."""
        self.write_text(name, msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2).decode() + "\n")

    def write_trajectories(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Write records as JSON lines into `trajectories/<name>.jsonl`."""
        lines = b"".join(msgspec.json.encode(record, enc_hook=str) + b"\n" for record in records)
        target = self.path / "trajectories" / f"{name}.jsonl"
        try:
            target.write_bytes(lines)
        except OSError as error:
            raise OutputError(f"{target} cannot be written: {error.strerror or error}") from error

    def checkpoint_path(self, step: int) -> Path:
        """Where the checkpoint after `step` steps goes."""
        return self.path / "checkpoints" / f"step_{step:06d}"


def trajectory_record(
    trajectory: Trajectory,
    *,
    order: Sequence[int],
    reward: float | None,
    parts: Mapping[str, float | None],
    why: str,
    advantage: float | None,
    dropped: str | None,
) -> dict[str, Any]:
    """One line of `trajectories/`: everything that was said and sampled, and what it was worth."""
    return {
        "group": order[0],
        "rollout": order[1],
        "task": trajectory.task,
        "status": trajectory.status.value,
        "error": trajectory.error,
        "reward": reward,
        "parts": parts,
        "why": why,
        "advantage": advantage,
        "dropped": dropped,
        "metrics": trajectory.metrics,
        "messages": trajectory.messages,
        "segments": [
            {
                "tokens": segment.tokens,
                "loss_mask": [int(weight) if weight in (0.0, 1.0) else weight for weight in segment.loss_mask],
                "logprobs": [round(logprob, 6) for logprob in segment.logprobs],
                "versions": segment.versions,
            }
            for segment in trajectory.segments
        ],
    }
