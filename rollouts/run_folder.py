"""A run is a folder that explains itself: config.toml, manifest.json, trajectories/, checkpoints/, summary.json.

(`metrics.jsonl` is the logger `jsonl`'s.) Files are written whole or not at all. One process at a time writes to a
folder: it holds a lock, which the system frees when the process ends, however it ends. Left out: what is in a
checkpoint (training.backends), and which one a run goes on from (compose.resume).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollouts.encoding import encode, encode_indented
from rollouts.errors import ConfigError, OutputError
from rollouts.types import Trajectory

__all__ = ["RunFolder", "check_out", "default_out", "holds_run", "trajectory_record"]

CONFIG = "config.toml"
LOCK = ".lock"
PARTS = ("trajectories", "checkpoints")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # a file system that has none


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
    if path.exists() and (not path.is_dir() or not _is_blank(path)):
        raise OutputError(f"the output folder {out} exists already and is kept as it is; type --out with another name")
    parent = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(
            f"the output folder {out} cannot be made: {parent} cannot be written; type --out with another"
        )
    return path


def holds_run(path: Path) -> bool:
    """Whether a run was begun in this folder."""
    return (path / CONFIG).is_file()


class RunFolder:
    """Writes one run's files. Raises OutputError where the disk refuses, or another process writes to the folder.

    `RunFolder(path)` makes the folder of a new run, `RunFolder.reopen(path)` goes on in one that is there.
    """

    def __init__(self, path: Path) -> None:
        self.path = check_out(str(path))
        self._is_new = True
        self._made = [each for each in (self.path, *self.path.absolute().parents) if not each.exists()]
        self._lock = self._open()
        if holds_run(self.path):  # a process that was faster has written it and ended meanwhile
            self.close()
            check_out(str(path))

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """The folder of a run that is there already. Raises ConfigError where there is none."""
        if not holds_run(path):
            raise ConfigError(f"{path} holds no run: it has no {CONFIG}; give the folder that a run has written")
        folder = cls.__new__(cls)
        folder.path, folder._is_new, folder._made = path, False, []
        folder._lock = folder._open()
        return folder

    def _open(self) -> int | None:
        """Make what is missing and take the lock."""
        try:
            for name in PARTS:
                (self.path / name).mkdir(parents=True, exist_ok=True)
            return _take_lock(self.path)
        except OSError as error:
            raise OutputError(f"the output folder {self.path} cannot be made: {error.strerror or error}") from error

    def close(self) -> None:
        """Let other processes write to the folder. Closing twice is harmless."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def discard(self) -> None:
        """Remove everything that was written, and the folders that were made for it: the run never began. What was
        there before, because the folder was reopened, stays.
        """
        if self._is_new:
            for entry in self.path.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            for made in self._made:
                with contextlib.suppress(OSError):  # another run has written beside it meanwhile
                    made.rmdir()
        self.close()

    def forget_end(self) -> None:
        """Remove what says that the run has ended."""
        try:
            (self.path / "summary.json").unlink(missing_ok=True)
        except OSError as error:
            raise OutputError(f"{self.path} cannot be written: {error.strerror or error}") from error

    def forget_steps(self, first: int) -> None:
        """Remove what tells of steps from `first` on (0-based), of the end, and what a kill has left half written: a
        run that goes on from there writes them again.
        """
        self.forget_end()
        try:
            for path in (self.path / "trajectories").iterdir():
                step = re.fullmatch(r"step_(\d+)\.jsonl", path.name)
                if path.suffix == ".partial" or (step is not None and int(step[1]) >= first):
                    path.unlink()
        except OSError as error:
            raise OutputError(f"{self.path} cannot be written: {error.strerror or error}") from error

    def write_text(self, name: str, text: str) -> None:
        """Write a file whole: to a temporary name first, then renamed."""
        self._write(self.path / name, text.encode())

    def write_json(self, name: str, value: Any) -> None:
        """Write `value` as indented JSON, whole; what JSON cannot hold is replaced, as `rollouts.encoding` says."""
        self.write_text(name, encode_indented(value))

    def read_json(self, name: str) -> dict[str, Any]:
        """What `write_json` wrote; empty where there is no such file, or it cannot be read."""
        try:
            return msgspec.json.decode((self.path / name).read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.DecodeError):
            return {}

    def write_trajectories(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Write records as JSON lines into `trajectories/<name>.jsonl`, whole, encoded as `write_json` does."""
        lines = b"".join(encode(record) + b"\n" for record in records)
        self._write(self.path / "trajectories" / f"{name}.jsonl", lines)

    def _write(self, target: Path, data: bytes) -> None:
        temporary = target.with_name(_partial(target.name))
        try:
            temporary.write_bytes(data)
            os.replace(temporary, target)
        except OSError as error:
            raise OutputError(f"{target} cannot be written: {error.strerror or error}") from error

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are."""
        return self.path / "checkpoints"

    def checkpoint_path(self, step: int) -> Path:
        """Where the checkpoint after `step` steps goes."""
        return self.checkpoints / f"step_{step:06d}"


def _partial(name: str) -> str:
    """The name of a file that is not whole yet."""
    return f".{name}.partial"


def _is_blank(path: Path) -> bool:
    """Whether the folder is empty, or holds no more than what a run has made that was killed as it began."""
    return all(
        not any(entry.iterdir()) if entry.name in PARTS and entry.is_dir() else entry.name in (LOCK, _partial(CONFIG))
        for entry in path.iterdir()
    )


def _take_lock(path: Path) -> int | None:
    """Lock the folder for this process; returns the file descriptor that holds the lock, None where there are no locks.

    The file stays behind: to remove it would let two processes hold locks on two files of its name.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(lock, 200, 0).decode(errors="replace").strip()
        os.close(lock)
        if error.errno in _NO_LOCKS:
            return None
        if not isinstance(error, BlockingIOError):
            raise
        raise OutputError(
            f"{path} is being written to by another process{holder and f' ({holder})'}; wait until it ends, or end it"
        ) from error
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return lock


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
