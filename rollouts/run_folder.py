"""A run is a folder that explains itself: config.toml, manifest.json, trajectories/, checkpoints/, summary.json.

(`metrics.jsonl` is the logger `jsonl`'s.) Files are written whole or not at all. One process at a time writes to a
folder: it holds a lock, which the system frees when the process ends, however it ends. A forked child does not hold it.
Left out: what is in a checkpoint (training.backends), and which one a run goes on from (compose.resume).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import socket
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollouts.disk import partial_name, sync_file, sync_folder, write_whole
from rollouts.encoding import encode, encode_indented
from rollouts.errors import ConfigError, OutputError
from rollouts.types import Trajectory

__all__ = [
    "RunFolder",
    "check_out",
    "default_out",
    "holds_run",
    "make_new",
    "shown_path",
    "trajectory_record",
]

CONFIG = "config.toml"
LOCK = ".lock"
PARTS = ("trajectories", "checkpoints")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # a file system that has none


def default_out(env: str, loss: str) -> str:
    """`runs/<time>-<env>-<loss>`; names of files and packs lose what a folder's name cannot hold."""
    words = (re.sub(r"[^\w.-]+", "-", Path(name.partition(":")[0]).stem).strip("-.") for name in (env, loss))
    return str(Path("runs") / "-".join((time.strftime("%Y%m%d-%H%M%S"), *words)))


def check_out(out: str, home: Path | None = None) -> Path:
    """The folder that a run may be written to, absolute; what is relative begins at `home` (None: the working
    directory). Nothing is created.

    Raises:
        OutputError: it exists and is not an empty folder, or its nearest existing parent cannot be written.
    """
    path = (home or Path()).absolute() / out
    if path.exists() and (not path.is_dir() or not _is_blank(path)):
        raise OutputError(f"the output folder {out} exists already and is kept as it is; type --out with another name")
    parent = next(each for each in (path, *path.parents) if each.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(
            f"the output folder {out} cannot be made: {parent} cannot be written; type --out with another"
        )
    return path


def shown_path(path: Path, home: Path) -> Path:
    """The path as it is typed in `home`: relative where it is below."""
    return path.relative_to(home) if path.is_relative_to(home) and path != home else path


def holds_run(path: Path) -> bool:
    """Whether a run was begun in this folder."""
    return (path / CONFIG).is_file()


class RunFolder:
    """Writes one run's files. Raises OutputError where the disk refuses, or another process writes to the folder.

    `RunFolder(path)` makes the folder of a new run, `RunFolder.new(path)` makes it under another name where that one is
    taken, `RunFolder.reopen(path)` goes on in one that is there.

    A relative path begins at `home` (None: the working directory). `path` is absolute, so that nothing depends on the
    working directory of the moment; `shown` is the same for messages.
    """

    def __init__(self, path: Path, home: Path | None = None) -> None:
        self._place(path, home)
        check_out(str(self.shown), self.home)
        self._is_new = True
        self._made = [each for each in (self.path, *self.path.parents) if not each.exists()]
        self._open()
        if holds_run(self.path):  # a process that was faster has written it and ended meanwhile
            self.close()
            check_out(str(self.shown), self.home)

    @classmethod
    def new(cls, path: Path, home: Path | None = None) -> RunFolder:
        """The folder of a new run at `path`, or where that name is taken at `path`-2, `path`-3 and so on."""
        path, made = make_new(path, home)
        folder = cls(path, home)
        folder._made = made
        return folder

    def _place(self, path: Path, home: Path | None) -> None:
        self.home = (home or Path()).absolute()
        self.path = self.home / path
        self.shown = shown_path(self.path, self.home)

    @classmethod
    def reopen(cls, path: Path, home: Path | None = None) -> RunFolder:
        """The folder of a run that is there already. Raises ConfigError where there is none."""
        folder = cls.__new__(cls)
        folder._place(path, home)
        folder._is_new, folder._made = False, []
        if not holds_run(folder.path):
            raise ConfigError(f"{path} holds no run: it has no {CONFIG}; give the folder that a run has written")
        folder._open()
        return folder

    def _open(self) -> None:
        """Make what is missing, bring its names to the disk, and take the lock."""
        self._synced: dict[str, tuple[int, int]] = {}
        self._lock: int | None = None
        try:
            for name in PARTS:
                (self.path / name).mkdir(parents=True, exist_ok=True)
            self._lock = _take_lock(self.path, self.shown)
            _open_here.add(self)
            for made in (self.path, *(each.parent for each in self._made)):
                sync_folder(made)
        except OSError as error:
            self.close()
            raise _cannot_make(self.shown, error) from error

    def in_words(self, text: str) -> str:
        """The text with the paths below `home` as the user would type them."""
        return _in_words(text, self.home)

    def close(self) -> None:
        """Let other processes write to the folder. Closing twice is harmless."""
        _open_here.discard(self)
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
            sync_folder(self.path)
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
        """Write records as JSON lines into `trajectories/<name>.jsonl`, whole, encoded as `write_json` does; `sync`
        brings them to the disk.
        """
        lines = b"".join(encode(record) + b"\n" for record in records)
        self._write(self.path / "trajectories" / f"{name}.jsonl", lines, synced=False)

    def _write(self, target: Path, data: bytes, *, synced: bool = True) -> None:
        try:
            write_whole(target, data, synced=synced)
        except OSError as error:
            raise OutputError(f"{target} cannot be written: {error.strerror or error}") from error

    def sync(self) -> None:
        """Bring to the disk all that has changed since the last call, but for checkpoints and the weights of servers.
        To be called before a checkpoint is written: after a crash of the machine nothing is missing of what the
        checkpoint tells of. Files that others remove meanwhile, or that cannot be read here, are passed over.
        """
        try:
            for folder, files in _below(self.path, without=("checkpoints", "weights")):
                changed = {file.path: _stamp(file) for file in files}
                changed = {path: stamp for path, stamp in changed.items() if self._synced.get(path) != stamp}
                for path in changed:
                    with contextlib.suppress(FileNotFoundError, PermissionError):
                        sync_file(Path(path))
                if changed:
                    with contextlib.suppress(FileNotFoundError):
                        sync_folder(folder)
                self._synced |= changed
        except OSError as error:
            raise OutputError(f"{self.path} cannot be brought to the disk: {error.strerror or error}") from error

    def relative(self, path: Path) -> str:
        """The path of something in this folder, as its files have it: checkpoints/step_000010."""
        return path.relative_to(self.path).as_posix()

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are."""
        return self.path / "checkpoints"

    def checkpoint_path(self, step: int) -> Path:
        """Where the checkpoint after `step` steps goes."""
        return self.checkpoints / f"step_{step:06d}"


def make_new(path: Path, home: Path | None = None) -> tuple[Path, list[Path]]:
    """An empty folder at `path`, or where that is taken at `path`-2, `path`-3 and so on; with all folders that were
    made for it, the innermost first. Of several processes each gets another one. Raises OutputError.
    """
    wanted = (home or Path()).absolute() / path
    made = [each for each in wanted.parents if not each.exists()]
    for number in itertools.count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise _cannot_make(path, error) from error
        return folder, [folder, *made]
    raise AssertionError("the numbers do not end")


def _in_words(text: str, home: Path) -> str:
    return re.sub(rf"(?<![\w./\\-]){re.escape(str(home / '_')[:-1])}", "", text)  # where a path begins, not inside one


_open_here: weakref.WeakSet[RunFolder] = weakref.WeakSet()
"""The folders that this process has locked."""


def _release_in_child() -> None:
    """A child that was forked shares the lock, and would hold it when this process is dead."""
    for folder in list(_open_here):
        folder.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)


def _cannot_make(path: Path, error: OSError) -> OutputError:
    return OutputError(f"the output folder {path} cannot be made: {error.strerror or error}")


def _below(top: Path, *, without: tuple[str, ...]) -> Iterator[tuple[Path, list[os.DirEntry[str]]]]:
    """Each folder below `top` with its plain files, but those named `without` in `top`; inner folders come first."""
    inner, files = [], []
    with os.scandir(top) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                inner.append(entry)
            elif entry.is_file(follow_symlinks=False):
                files.append(entry)
    for entry in inner:
        if entry.name not in without:
            with contextlib.suppress(FileNotFoundError, PermissionError):
                yield from _below(Path(entry.path), without=())
    yield top, files


def _stamp(file: os.DirEntry[str]) -> tuple[int, int]:
    try:
        stat = file.stat(follow_symlinks=False)
    except FileNotFoundError:
        return (0, 0)
    return (stat.st_mtime_ns, stat.st_size)


def _is_blank(path: Path) -> bool:
    """Whether the folder is empty, or holds no more than what a run has made that was killed as it began."""
    return all(
        not any(entry.iterdir())
        if entry.name in PARTS and entry.is_dir()
        else entry.name in (LOCK, partial_name(CONFIG))
        for entry in path.iterdir()
    )


def _take_lock(path: Path, shown: Path) -> int | None:
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
            f"{shown} is being written to by another process{holder and f' ({holder})'}; wait until it ends, or end it"
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
