"""The folder of a run, with everything to understand and repeat it: config.toml, manifest.json, trajectories/,
checkpoints/, summary.json.

(The logger `jsonl` writes `metrics.jsonl`.) A file is written completely or not at all. Only one process at a time
writes to a folder: it holds a lock, which the system frees when the process ends for any reason. A forked child does
not hold the lock. Not here: the content of a checkpoint (training.backends), and the checkpoint from which a run
resumes (`resume`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import shlex
import shutil
import socket
import stat
import time
import tomllib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rollouts.config.files import Source, load_file
from rollouts.config.flags import Tree
from rollouts.config.names import names_module
from rollouts.config.paths import CONFIG as CONFIG
from rollouts.config.paths import Move, file_base
from rollouts.config.render import to_toml
from rollouts.config.resolving import moved, resolve
from rollouts.disk import open_regular, partial_name, read_regular, sync_file, sync_folder, write_whole
from rollouts.encoding import encode, encode_indented
from rollouts.errors import ConfigError, OutputError
from rollouts.runs.times import StepTimes, times_of, write_index
from rollouts.training.rollout_gen.steps import JUDGING
from rollouts.types import Episode, Score

SUMMARY = "summary.json"
METRICS = "metrics.jsonl"  # of the logger `jsonl`
LOCK = ".lock"
PHASES = ("rl", "sft")  # the folders of a run of mode sft+rl, the last one first
PARTS = ("trajectories", "checkpoints")
REMOVED = "removed.json"  # in trajectories/: the number of first steps whose trajectories were removed on purpose
REMOVED_BY = "--keep-trajectories or `rollouts runs clean`"
STEP, EVALUATED = "step_", "eval_"  # the prefixes of file names in trajectories/; steps count from 0
OTHERS = "another model played this role"  # the reason of a line that no reward judges and no run trains
TOKENS = ".tokens"  # the ending of a file with the values of tokens (`token_files`)
_STEP_FILE = re.compile(rf"\.?{STEP}(\d+)\.(?:jsonl|tokens|times|index)")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # the errors of a file system without locks


def default_out(env: str, loss: str) -> str:
    """`runs/<time>-<env>-<loss>`; characters that a folder's name cannot have are removed."""
    names = [name.partition(":")[2 if names_module(name) else 0] for name in (env, loss)]
    words = (re.sub(r"[^\w.-]+", "-", Path(name).stem).strip("-.") for name in names)
    return str(Path("runs") / "-".join((time.strftime("%Y%m%d-%H%M%S"), *words)))


def check_out(out: str, home: Path | None = None) -> Path:
    """The folder that a run may be written to, as an absolute path. A relative path begins at `home` (None: the working
    directory). Nothing is created.

    Raises:
        OutputError: the path exists and is not an empty folder, or its nearest existing parent cannot be written.
    """
    path = (home or Path()).absolute() / out
    if path.exists() and (not path.is_dir() or not _is_blank(path)):
        resume = f"\nto continue the run in it: rollouts resume {shlex.quote(out)}" if holds_run(path) else ""
        raise OutputError(
            f"the output folder {out} exists already and is not overwritten; type --out with another name{resume}"
        )
    parent = next(each for each in (path, *path.parents) if each.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(
            f"the output folder {out} cannot be made: {parent} cannot be written; type --out with another"
        )
    return path


def holds_run(path: Path) -> bool:
    """Whether a run has begun in this folder."""
    return (path / CONFIG).is_file()


def run_name(folder: Path) -> str:
    """The name of the run in a folder. A phase of mode sft+rl has the name of the whole run."""
    folder = folder.absolute()
    return (folder.parent if folder.name in PHASES and holds_run(folder.parent) else folder).name


def writer_of(folder: Path) -> str:
    """The process that writes to a run's folder, as the lock names it; "" if there is none."""
    with contextlib.suppress(OSError), open_regular(folder / LOCK) as lock:  # no such file, or no locks
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return lock.read(200).decode(errors="replace").strip() or "another process"
    return ""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file; empty if the file does not exist or cannot be read."""
    try:
        return msgspec.json.decode(read_regular(path), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return {}


def removed_steps(folder: Path) -> int:
    """How many of a run's first steps have lost their trajectories on purpose."""
    count = read_json(folder / "trajectories" / REMOVED).get("steps")
    return count if isinstance(count, int) else 0


def note_removed(folder: Path, count: int) -> None:
    """Write down that the trajectories of a run's first `count` steps are missing on purpose."""
    write_whole(folder / "trajectories" / REMOVED, encode_indented({"steps": count}).encode(), synced=False)


def step_of_file(path: Path) -> int | None:
    """The step of a file in trajectories/; None if it is not one of a training step."""
    name = _STEP_FILE.fullmatch(path.name)
    return None if name is None else int(name[1])


def phases_of(folder: Path) -> list[Path]:
    """The folders that hold the steps of a run: its own, or those of its phases in the order in which they ran."""
    return [folder / name for name in reversed(PHASES) if holds_run(folder / name)] or [folder]


def read_config(folder: Path, home: Path | None = None) -> tuple[Tree, Source]:
    """The settings in a run's config.toml; `home` is that of `load_file`. Raises ConfigError, with what to type, if the
    file is missing, unreadable or empty.
    """
    try:
        tree, source = load_file(folder / CONFIG, home)
        if not tree:
            raise ConfigError(f"{folder / CONFIG} is empty")
    except ConfigError as error:
        raise ConfigError(
            f"{error}\ncorrect the file, or, if a crash has cut it off, write it again: rollouts config SETTINGS "
            f"> {shlex.quote(str(folder / CONFIG))} ({folder / 'manifest.json'} has the command that began the run)"
        ) from error
    return tree, source


def numbered(name: str) -> Iterator[str]:
    """The name, and then `name`-2, `name`-3 and so on without end."""
    return itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))


class RunFolder:
    """Writes one run's files. Raises OutputError if the disk refuses, or if another process writes to the folder.

    `RunFolder(path)` makes the folder of a new run, `RunFolder.new(path)` chooses another name if that name is taken,
    `RunFolder.reopen(path)` opens an existing folder. `parts` are the folders inside it.

    A relative path begins at `home` (None: the working directory). `path` is absolute, so a change of the working
    directory has no effect. `shown` is the path for messages.
    """

    def __init__(
        self, path: Path, home: Path | None = None, parts: Sequence[str] = PARTS, *, reopens: bool = False
    ) -> None:
        self.home = (home or Path()).absolute()
        self.path = self.home / path
        is_below = self.path.is_relative_to(self.home) and self.path != self.home
        self.shown = self.path.relative_to(self.home) if is_below else self.path
        self._is_new = not reopens
        self._made: list[Path] = []  # the folders to remove if the run is refused before it begins
        self._synced: dict[str, tuple[int, int]] = {}
        self._lock: int | None = None
        if self._is_new:
            check_out(str(self.shown), self.home)
            self._made = [each for each in (self.path, *self.path.parents) if not each.exists()]
        elif not holds_run(self.path):
            raise ConfigError(f"{path} holds no run: it has no {CONFIG}; give the folder that a run has written")
        self._open(parts)
        if self._is_new and holds_run(self.path):  # another process has written a run here and ended meanwhile
            self.close()
            check_out(str(self.shown), self.home)

    @classmethod
    def new(cls, path: Path, home: Path | None = None, parts: Sequence[str] = PARTS) -> RunFolder:
        """The folder of a new run at `path`, or if that name is taken, at `path`-2, `path`-3 and so on. Several
        processes at the same time get different folders.
        """
        wanted = (home or Path()).absolute() / path
        made = [each for each in wanted.parents if not each.exists()]
        for free in map(wanted.with_name, numbered(wanted.name)):
            try:
                free.parent.mkdir(parents=True, exist_ok=True)
                free.mkdir()
                break
            except FileExistsError:
                continue
            except OSError as error:
                raise _cannot_make(path, error) from error
        folder = cls(free, home, parts)
        folder._made = [free, *made]
        return folder

    @classmethod
    def reopen(cls, path: Path, home: Path | None = None, parts: Sequence[str] = PARTS) -> RunFolder:
        """The folder of an existing run. Raises ConfigError if there is no run."""
        return cls(path, home, parts, reopens=True)

    def _open(self, parts: Sequence[str]) -> None:
        """Make the missing folders, flush their names to the disk, and take the lock."""
        try:
            for part in (self.path, *(self.path / name for name in parts)):
                part.mkdir(parents=True, exist_ok=True)
            self._lock = _take_lock(self.path, self.shown)
            _open_here.add(self)
            for made in (self.path, *(each.parent for each in self._made)):
                sync_folder(made)
        except OSError as error:
            self.close()
            raise _cannot_make(self.shown, error) from error

    def in_words(self, text: str) -> str:
        """The text with the paths below `home` as the user would type them."""
        beginning = re.escape(str(self.home / "_")[:-1])
        return re.sub(rf"(?<![\w./\\-]){beginning}", "", text)  # where a path begins, not inside one

    def close(self) -> None:
        """Release the lock, so that other processes can write to the folder. It is safe to close twice."""
        _open_here.discard(self)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def discard(self) -> None:
        """Remove everything that was written, and the folders that were made for it, because the run did not begin.
        Files of an earlier run in a reopened folder stay.
        """
        if self._is_new:
            for entry in self.path.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            for made in self._made:
                with contextlib.suppress(OSError):  # another run has written to the parent folder meanwhile
                    made.rmdir()
        self.close()

    def forget_end(self) -> None:
        """Remove the file that says that the run has ended."""
        self.remove(SUMMARY)
        with _refused(self.path):
            sync_folder(self.path)

    def forget_steps(self, first: int) -> None:
        """Remove the files that a run which resumes after `first` steps writes again: the trajectories of later steps
        and evaluations, incomplete files that a killed process left, and summary.json.
        """
        self.forget_end()
        with _refused(self.path):
            for path in (self.path / "trajectories").iterdir():
                name = re.fullmatch(rf"\.?({STEP}|{EVALUATED})(\d+)\.(jsonl|tokens|times|index)", path.name)
                done = int(name[2]) + (name[1] == STEP) if name is not None else 0
                if path.suffix == ".partial" or done > first:
                    path.unlink()
        if removed_steps(self.path) > first:
            with _refused(self.path / "trajectories"):
                note_removed(self.path, first)

    def remove_steps(self, count: int) -> None:
        """Remove the trajectories of the first `count` steps, with the files beside them, and write down that they
        are missing on purpose. Evaluations stay.
        """
        with _refused(self.path / "trajectories", "removed"):
            steps = {path: step_of_file(path) for path in (self.path / "trajectories").iterdir()}
            old = [path for path, step in steps.items() if step is not None and step < count]
            if old:
                note_removed(self.path, count)  # first: after a kill in between, no step is missing without a reason
            for path in old:
                path.unlink(missing_ok=True)

    def write_config(self, text: str) -> None:
        """Write config.toml. A file with the same settings stays unchanged, with its comments. The paths in `text`
        begin at `home`; those in the file, where the run was begun. Raises ConfigError if the file cannot be read.
        """
        now = tomllib.loads(text)
        if holds_run(self.path) and read_config(self.path, self.home)[0] == now:
            return
        if not os.path.samefile(self.move.home, self.home):
            text = to_toml(moved(resolve(now, allow_left_out=True), self.move))
        self.write_text(CONFIG, text)

    @property
    def move(self) -> Move:
        """Changes the paths of settings, which begin at `home`, to those of the run's files, which begin where the run
        was begun.
        """
        home = str(self.home)
        return Move(home, file_base(self.path / CONFIG, home) if holds_run(self.path) else home)

    def write_text(self, name: str, text: str) -> None:
        """Write a file under a temporary name, then rename it."""
        self.write_bytes(name, text.encode())

    def write_bytes(self, name: str, data: bytes) -> None:
        """Like `write_text`, for bytes. Makes the folders in the name."""
        with _refused(self.path / name):
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path / name, data)

    def append(self, name: str, data: bytes) -> None:
        """Add to the end of a file. If the process is killed, the file ends with a part of `data` at worst."""
        with _refused(self.path / name), open(self.path / name, "ab") as file:
            file.write(data)

    def write_json(self, name: str, value: Any) -> None:
        """Write `value` as indented JSON. Values that JSON cannot represent are replaced (see `rollouts.encoding`)."""
        self.write_text(name, encode_indented(value))

    def write_trajectories(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Write records as JSON lines into `trajectories/<name>.jsonl`, encoded as in `write_json`, and their
        index. `sync` flushes them to the disk.
        """
        lines = [encode(record) + b"\n" for record in records]
        written = self._write_beside(f"{name}.jsonl", b"".join(lines))
        write_index(written, map(len, lines))

    def write_tokens(self, name: str, table: bytes) -> None:
        """Write the values of tokens into `trajectories/<name>.tokens`. `sync` flushes them to the disk."""
        self._write_beside(f"{name}{TOKENS}", table)

    def write_times(self, name: str, times: StepTimes) -> None:
        """Write when everything happened beside `trajectories/<name>.jsonl`. `sync` flushes it to the disk."""
        self._write_beside(times_of(Path(name)).name, encode(times))

    def _write_beside(self, name: str, data: bytes) -> Path:
        target = self.path / "trajectories" / name
        with _refused(target):
            write_whole(target, data, synced=False)
        return target

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with _refused(self.path / name, "removed"):
            (self.path / name).unlink(missing_ok=True)

    def sync(self) -> None:
        """Flush to the disk all files that changed since the last call, except checkpoints and the weights of servers.
        Call it before a checkpoint is written, so that after a crash of the machine all files to which the checkpoint
        refers are complete. Files that are removed meanwhile, or that cannot be read, are skipped.
        """
        with _refused(self.path, "brought to the disk"):
            for place, _, names in os.walk(self.path, topdown=False):  # inner folders first
                if Path(place).relative_to(self.path).parts[:1] in (("checkpoints",), ("weights",)):
                    continue
                stamps = {path: stamp for name in names if (stamp := _stamp(path := os.path.join(place, name)))}
                changed = [path for path, stamp in stamps.items() if self._synced.get(path) != stamp]
                for path in changed:
                    with contextlib.suppress(FileNotFoundError, PermissionError):
                        sync_file(Path(path))
                if changed:
                    with contextlib.suppress(FileNotFoundError):
                        sync_folder(Path(place))
                self._synced |= stamps

    def relative(self, path: Path) -> str:
        """A path inside this folder, relative to it, as the run's files store it: checkpoints/step_000010."""
        return path.relative_to(self.path).as_posix()

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    def checkpoint_path(self, step: int) -> Path:
        """The path of the checkpoint after `step` steps."""
        return self.checkpoints / f"step_{step:06d}"


MakeFolder = Callable[[Sequence[str]], RunFolder]
"""Makes a run's folder, with these parts, and locks it."""


def choose_folder(out: str, default: str, home: Path, resume: Path | None = None) -> MakeFolder:
    """A function that makes the run's folder: it reopens the folder `resume`; without one, it makes the new folder
    `out`; without that too, `default` or a free name like it. Relative paths begin at `home`. Raises OutputError if a
    new run cannot write there. Nothing is created yet.
    """
    if resume is not None:
        return partial(RunFolder.reopen, resume, home)
    path = Path(out or default)
    if out or not (home / path).exists():
        check_out(str(path), home)
    return partial(RunFolder if out else RunFolder.new, path, home)


_open_here: weakref.WeakSet[RunFolder] = weakref.WeakSet()
"""The folders that this process has locked."""


def _release_in_child() -> None:
    """Release the lock in a forked child, which would hold it after the end of this process."""
    for folder in list(_open_here):
        folder.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)


@contextlib.contextmanager
def _refused(path: Path, what: str = "written") -> Iterator[None]:
    """Turn an OSError of the block into an OutputError."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path} cannot be {what}: {error.strerror or error}") from error


def _cannot_make(path: Path, error: OSError) -> OutputError:
    return OutputError(f"the output folder {path} cannot be made: {error.strerror or error}; type --out with another")


def _stamp(path: str) -> tuple[int, int] | None:
    """When a plain file was changed, and its size. None for a link, a special file, and one that is removed."""
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(path)
        return (found.st_mtime_ns, found.st_size) if stat.S_ISREG(found.st_mode) else None
    return None


def _is_blank(path: Path) -> bool:
    """Whether the folder is empty, or only has what a run makes before it begins, and which was then killed."""
    return all(
        not any(entry.iterdir())
        if entry.name in PARTS and entry.is_dir()
        else entry.name in (LOCK, partial_name(CONFIG))
        for entry in path.iterdir()
    )


def _take_lock(path: Path, shown: Path) -> int | None:
    """Lock the folder for this process. Returns the file descriptor that holds the lock, or None if the file system
    supports no locks.

    The lock file is never removed: with a new file of the same name, two processes could both hold a lock.
    """
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


def episode_records(
    episode: Episode, *, advantage: float | None = None, dropped: str | None = None
) -> Iterator[dict[str, Any]]:
    """The lines of one episode in `trajectories/`, one per trajectory: its messages, tokens and rewards. The line of
    the judged trajectory also has the environment's metrics. With roles, each line has its role and the role's reward.
    """
    if episode.roles:
        for own in episode.by_role:
            yield from episode_records(own, advantage=advantage, dropped=dropped)
        return
    unjudged = Score(None, {}, OTHERS)
    for other in episode.others:
        played = Episode(episode.order, episode.task, [other], unjudged, {}, role=other.role)
        yield from episode_records(played, dropped=dropped)
    judged = {name: value for name, value in episode.metrics.items() if name in JUDGING or name.startswith("metric/")}
    for trajectory in episode.trajectories:
        yield {
            "group": episode.order[0],
            "rollout": episode.order[1],
            **({"role": episode.role} if episode.role else {}),
            "task": trajectory.task,
            "status": trajectory.status.value,
            "error": trajectory.error,
            "reward": episode.score.value,
            "parts": episode.score.parts,
            "weights": episode.score.weights,
            **({"turns": episode.score.turns} if episode.score.turns else {}),
            "why": episode.score.why,
            **({"judged": trajectory is episode.trajectory} if len(episode.trajectories) > 1 else {}),
            "advantage": advantage,
            "dropped": dropped,
            "metrics": trajectory.metrics | (judged if trajectory is episode.trajectory else {}),
            **({"info": trajectory.info} if trajectory.info else {}),
            "messages": trajectory.messages,
            "segments": [
                {
                    "tokens": segment.tokens,
                    "loss_mask": [int(weight) if weight in (0.0, 1.0) else weight for weight in segment.loss_mask],
                    "logprobs": [round(logprob, 6) for logprob in segment.logprobs],
                    "versions": segment.versions,
                    "turns": segment.turns,
                }
                for segment in trajectory.segments
            ],
        }
