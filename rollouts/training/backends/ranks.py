"""Several ranks as one crew. Rank 0 runs the program and gives commands; the others carry them out and answer.

The others wait for a command on a store, not inside a collective, so that rank 0 may sample, evaluate or talk to
engines for as long as it likes. A rank that dies, hangs or fails ends the run with one error that names it
(heartbeats.py). Ranks are the processes of a launcher (torchrun, or what sets its variables) where there is one; else
rank 0 starts them on its own machine.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from rollouts.errors import ConfigError, RankError, RolloutsError, words_of
from rollouts.training.backends.crew import Command, execute
from rollouts.training.backends.heartbeats import Beating, Failure, Watch
from rollouts.training.backends.meeting import SECRET, Place, join_ranks, open_here, place_of_this_process
from rollouts.training.backends.messages import Channel, is_timeout
from rollouts.training.backends.shares import Share
from rollouts.training.backends.sums import Reading
from rollouts.training.backends.trainer import Trainer
from rollouts.training.types import StepResult

__all__ = [
    "Gathering",
    "Team",
    "Worker",
    "gather_ranks",
    "ignore_interrupts",
    "tell_failure",
]

_WAIT_SECONDS = 30.0  # how long one wait for a command lasts before it begins again
_CLOSE_SECONDS = 15.0
FILES_SECONDS = 1800.0
_LEAVE_SECONDS = 5.0


class _Meeting(NamedTuple):
    """This rank's way to the others, and the processes that it started."""

    place: Place
    channel: Channel
    processes: dict[int, subprocess.Popen[bytes]]


class Gathering:
    """Ranks that have met, before their trainers are made. `place` is this process's."""

    def __init__(self, meeting: _Meeting, *, stall_seconds: float, start_seconds: float, on_gpus: bool) -> None:
        self.place = meeting.place
        self.stall_seconds = stall_seconds
        self.start_seconds = start_seconds
        self._meeting = meeting
        self.channel = meeting.channel
        self._on_verdict: Callable[[RankError], None] = lambda error: None
        is_first = meeting.place.rank == 0
        self.beating = Beating(
            meeting.channel.clone(),
            meeting.place.rank,
            start_seconds=start_seconds,
            on_silence=None if is_first else _end_this_rank,
        )
        self.files_group: Any = None
        self.watch: Watch | None = None
        if is_first:
            self.watch = Watch(
                meeting.channel.clone(),
                meeting.place.world_size,
                meeting.processes,
                self.beating.doing,
                lambda error: self._on_verdict(error),
                start_seconds=start_seconds,
                stall_seconds=stall_seconds if on_gpus else None,
            )

    def call_on_verdict(self, function: Callable[[RankError], None]) -> None:
        """Whom to tell of a rank's fault, from the judge's thread."""
        self._on_verdict = function

    def join(self, backend: str, agreement: str) -> None:
        """Wait for all ranks to be composed, then make the process group. `agreement` says in words what was composed.

        Raises RankError where a rank does not come, ConfigError where one composed something else than rank 0.
        """
        from torch import distributed

        place = self.place
        self.meet("composed", agreement)
        first = (self.channel.read("composed/0") or b"").decode()
        if first != agreement:
            raise ConfigError(
                f"rank {place.rank} composed another run than rank 0; start all ranks with the same command\n"
                f"  rank 0: {first}\n  rank {place.rank}: {agreement}"
            )
        with self.failures():
            distributed.init_process_group(
                backend,
                store=self.channel.group_store(),
                rank=place.rank,
                world_size=place.world_size,
                # On GPUs the judge comes first: there torch ends the process without a word.
                timeout=datetime.timedelta(seconds=self.stall_seconds * (1 if backend == "gloo" else 4)),
            )
            # Where ranks read and write files, one may be much slower than the others.
            self.files_group = distributed.new_group(backend="gloo", timeout=datetime.timedelta(seconds=FILES_SECONDS))

    def meet(self, name: str, word: str = "") -> None:
        """Wait on the store, not in a collective, until all ranks are here: what they did alone may take long.

        Raises RankError where one does not come.
        """
        self.channel.post(f"{name}/{self.place.rank}", word.encode() or b"1")
        deadline = time.monotonic() + self.start_seconds
        for rank in range(self.place.world_size):
            while not self.channel.is_there(f"{name}/{rank}"):
                self.check()
                if time.monotonic() > deadline:
                    raise RankError(
                        f"rank {rank} was not {name} within {self.start_seconds:g} s; look at what it wrote, or give "
                        "it more time with --training.start-seconds"
                    )
                time.sleep(0.05)
            if self.channel.read(f"{name}/{rank}") is None:
                raise ConfigError(
                    f"what rank {rank} says is not signed with the secret of this run; give all ranks the same {SECRET}"
                )

    def check(self) -> None:
        """Raises the verdict, if there is one."""
        if self.watch is not None and self.watch.verdict is not None:
            raise self.watch.verdict

    @contextlib.contextmanager
    def failures(self) -> Iterator[None]:
        """What fails inside on rank 0 may be another rank's fault: then a RankError says whose."""
        try:
            yield
        except RankError:
            raise
        except RuntimeError as error:
            if self.watch is None or not _is_collective(error):
                raise
            raise self.watch.judge(error) from error

    def end(self) -> None:
        """Rank 0: no more judging; what it started is waited for, and the ranks of a launcher told that it is over."""
        if self.watch is not None:
            self.watch.end()
        with contextlib.suppress(Exception):  # the store may be gone with its launcher
            self.channel.post("over", b"1")
        self.beating.end()
        for process in self._meeting.processes.values():
            try:
                process.wait(_CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def kill(self) -> None:
        """Rank 0: end the others at once, and give up the process group, so that this process may begin another."""
        for process in self._meeting.processes.values():
            process.kill()
        self.end()
        # Nobody is left to wait for; but where a launcher's ranks still run, this must not wait either.
        thread = threading.Thread(target=_leave_group, name="rollouts-leave", daemon=True)
        thread.start()
        thread.join(_LEAVE_SECONDS)


def gather_ranks(
    processes: int, config: str, *, stall_seconds: float, start_seconds: float, on_gpus: bool
) -> Gathering:
    """Meet the ranks of a launcher, or start `processes` - 1 others here, which compose the run from `config`."""
    place = place_of_this_process()
    gather = functools.partial(Gathering, stall_seconds=stall_seconds, start_seconds=start_seconds, on_gpus=on_gpus)
    if place is None:
        return gather(_start_others(processes, config))
    return gather(_Meeting(place, join_ranks(place), {}))


def _start_others(processes: int, config: str) -> _Meeting:
    channel, variables = open_here(processes)
    shared = variables | {
        "WORLD_SIZE": str(processes),
        "ROLLOUTS_STARTED_BY_RANK_0": str(os.getpid()),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),  # rank 0 tells what goes wrong
    }
    if "OMP_NUM_THREADS" not in os.environ:
        shared["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // processes))
    started: dict[int, subprocess.Popen[bytes]] = {}
    for rank in range(1, processes):
        environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with tempfile.TemporaryFile() as settings:  # not through the store, which other users can reach
            settings.write(config.encode())
            settings.seek(0)
            started[rank] = subprocess.Popen(
                [sys.executable, "-m", "rollouts.compose.rank"],
                env=environment,
                stdin=settings,
                stdout=sys.__stderr__.fileno() if sys.__stderr__ is not None else subprocess.DEVNULL,
            )
    return _Meeting(Place(0, processes, 0, False), channel, started)


class Team:
    """Implements `Crew` on rank 0."""

    def __init__(self, trainer: Trainer, gathering: Gathering) -> None:
        self.trainer = trainer
        self.size = gathering.place.world_size
        self._gathering = gathering
        self._number = 0
        self._is_broken = False

    def call(
        self,
        command: Command,
        shares: Sequence[Share] | None = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> list[Any]:
        """Send it, do it here, and collect the answers. After an error the ranks are out of step, and the crew is
        over.
        """
        self._gathering.check()
        assert not self._is_broken, f"{command.name} after a command that failed"
        self._is_broken = True
        self._number += 1
        doing = self._gathering.beating.doing
        doing.command, doing.number, doing.done = command.name, self._number, False
        self._gathering.beating.works_in_this_thread()
        with self._gathering.failures():
            for rank in range(1, self.size):
                message = msgspec.structs.replace(command, share=shares[rank]) if shares is not None else command
                self._gathering.channel.send(f"command/{self._number}/{rank}", msgspec.msgpack.encode(message))
            own = msgspec.structs.replace(command, share=shares[0]) if shares is not None else command
            results = [execute(self.trainer, own, weights)]
            results += [self._answer(rank, command) for rank in range(1, self.size)]
        doing.done = True
        self._is_broken = False
        return results

    def close(self) -> None:
        """Tell the others to end; those that cannot hear it are ended."""
        if self._is_broken:
            self._gathering.kill()
            return
        try:
            self.call(Command(name="close"))
        except RankError:
            self._gathering.kill()
            return
        self._gathering.end()
        _leave_group()

    def _answer(self, rank: int, command: Command) -> Any:
        key = f"answer/{self._number}/{rank}"
        seconds = self._gathering.stall_seconds
        deadline, pause = time.monotonic() + seconds, 0.0002
        while not self._gathering.channel.is_there(key):
            self._gathering.check()
            if time.monotonic() > deadline:
                assert self._gathering.watch is not None, "this is rank 0"
                raise self._gathering.watch.late(rank, seconds)
            time.sleep(pause)
            pause = min(pause * 1.5, 0.01)
        return _decoded(self._gathering.channel.receive(key, seconds), command)


class Worker:
    """A rank above 0: its trainer, and the commands that it serves until it is told to end."""

    def __init__(self, trainer: Trainer, gathering: Gathering) -> None:
        self._trainer = trainer
        self._gathering = gathering

    def serve(self) -> None:
        """Carry out commands. Returns when the run is over; a command that fails ends this process."""
        channel, beating = self._gathering.channel, self._gathering.beating
        rank = self._gathering.place.rank
        beating.works_in_this_thread()
        number = 0
        while True:
            number += 1
            command = _next_command(channel, f"command/{number}/{rank}")
            doing = beating.doing
            doing.command, doing.number, doing.done = command.name, number, False
            try:
                value = execute(self._trainer, command)
            except BaseException as error:
                tell_failure(self._gathering, error)
                raise
            encoded = msgspec.msgpack.encode(value if command.name in _ANSWERED else None)
            if command.name == "close":
                beating.end()
            channel.send(f"answer/{number}/{rank}", encoded)
            if command.name == "close":
                return
            doing.done = True


_ANSWERED: dict[str, Any] = {
    "forward": dict[str, list[list[float]]],
    "forward_backward": Reading,
    "save": dict[str, Any],
    "optim_step": StepResult,
}


def tell_failure(gathering: Gathering, error: BaseException) -> None:
    """Let rank 0 know why this rank ends."""
    known = isinstance(error, RolloutsError)
    symptom = isinstance(error, RuntimeError) and not known and _is_collective(error)
    told = str(error) if known else words_of(error)
    failure = Failure(f"{gathering.beating.doing.words()}: {told}", symptom=symptom, known=known)
    with contextlib.suppress(Exception):  # rank 0 may be gone, which is then the reason
        gathering.channel.post(f"failed/{gathering.place.rank}", msgspec.msgpack.encode(failure))


def ignore_interrupts() -> None:
    """Ctrl-C and a closed terminal reach all processes, and so may SIGTERM; rank 0 decides what it means for them."""
    with contextlib.suppress(ValueError):  # only the main thread can set handlers
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)


def _leave_group() -> None:
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()


def _decoded(data: bytes, command: Command) -> Any:
    kind = _ANSWERED.get(command.name)
    return msgspec.msgpack.decode(data, type=kind) if kind is not None else None


def _next_command(channel: Channel, key: str) -> Command:
    while True:
        try:
            return msgspec.msgpack.decode(channel.receive(key, _WAIT_SECONDS), type=Command)
        except Exception as error:
            if not is_timeout(error):
                raise


def _is_collective(error: RuntimeError) -> bool:
    """Whether torch's communication raised it."""
    words = str(error).lower()
    named = ("gloo", "nccl", "connection", "timed out", "timeout", "peer", "socket", "store", "broken pipe")
    return type(error).__name__.startswith("Dist") or any(word in words for word in named)


def _end_this_rank() -> None:
    """Rank 0 is gone: nothing here can be of use to anybody, and the main thread may be stuck in a collective."""
    sys.stderr.write(f"rank {os.environ.get('RANK')}: rank 0 is gone, so this rank ends\n")
    sys.stderr.flush()
    os._exit(1)
