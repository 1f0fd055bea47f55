"""Several ranks: how they meet, the executor on rank 0, and the workers on the other ranks.

Workers wait for commands on a store, not inside a collective, so rank 0 may sample, evaluate or call engines for any
time. If a rank dies, hangs or fails, the run ends with one error that names it (heartbeats.py). The ranks are the
processes of a launcher (torchrun, or another that sets its variables). Without a launcher, rank 0 starts them on its
own machine.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, get_type_hints

import msgspec
from torch import distributed

from rollouts.author_code import innermost_place
from rollouts.errors import ConfigError, RankError, RolloutsError, words_of
from rollouts.models import revisions
from rollouts.training.backends.sharding import BatchShard
from rollouts.training.backends.torch import COMMANDS, Command, Executor, run_on_trainer
from rollouts.training.backends.trainer import Trainer
from rollouts_fsdp import rendezvous
from rollouts_fsdp.heartbeats import FailureDetector, Heartbeat, RankFailure
from rollouts_fsdp.rendezvous import SECRET, RankChannel, RankPlace

_WAIT_SECONDS = 30.0  # a worker waits this long for a command, then waits again
_CLOSE_SECONDS = 15.0
FILES_SECONDS = 1800.0
_LEAVE_SECONDS = 5.0
P = ParamSpec("P")
T = TypeVar("T")


class RankCommand(msgspec.Struct):
    """A command for a rank above 0: the name of a method of `Trainer`, and its arguments."""

    name: str
    settings: dict[str, Any]
    shard: BatchShard | None = None


@dataclass(eq=False)
class RankGroup:
    """All ranks of a run, as one of them sees them: its own `place`, and the `processes` that it started."""

    place: RankPlace
    channel: RankChannel
    processes: Mapping[int, subprocess.Popen[bytes]]
    stall_seconds: float
    start_seconds: float
    on_gpus: bool
    files_group: Any = None  # a process group for collectives that wait for a disk

    def __post_init__(self) -> None:
        place, start = self.place, self.start_seconds
        silence = None if place.rank == 0 else _end_this_rank
        self.heartbeat = Heartbeat(self.channel.clone(), place.rank, start, silence)
        self.detector: FailureDetector | None = None
        if place.rank == 0:
            channel, own = self.channel.clone(), self.heartbeat.status
            stall = self.stall_seconds if self.on_gpus else None
            self.detector = FailureDetector(channel, place.world_size, self.processes, own, start, stall)

    @contextlib.contextmanager
    def starting(self, backend: str, agreement: str) -> Iterator[None]:
        """Join the other ranks; make this rank's trainer inside the block; then wait for the other ranks' trainers. An
        error on one rank ends all ranks.
        """
        rank = self.place.rank
        if rank > 0:
            ignore_interrupts()
        try:
            self.join(backend, agreement)
            self.heartbeat.status.command = "loading the model"
            with self.failures():
                yield
            self.meet("ready")
        except BaseException as error:
            if rank > 0:
                report_failure(self.channel, rank, error, self.heartbeat.status.words())
            self.kill()
            raise

    def join(self, backend: str, agreement: str) -> None:
        """Wait for all ranks, use rank 0's commits of models of a hub, then make the process group. `agreement`
        describes the run that this rank composed.

        Raises RankError if a rank does not join in time, and ConfigError if a rank composed something else than rank 0.
        """
        rank = self.place.rank
        if rank == 0:
            self.channel.post("revisions", json.dumps(revisions.known()).encode())
        self.meet("composed", agreement)
        first = (self.channel.read("composed/0") or b"").decode()
        if first != agreement:
            what = f"rank {rank} has other settings than rank 0; start all ranks with the same command"
            raise ConfigError(f"{what}\n  rank 0: {first}\n  rank {rank}: {agreement}")
        revisions.adopt(json.loads(self.channel.read("revisions") or b"{}"))
        # On GPUs the failure detector must be first, because torch ends the process without a message there.
        seconds = self.stall_seconds * (1 if backend == "gloo" else 4)
        with self.failures():
            store, timeout = self.channel.group_store(), datetime.timedelta(seconds=seconds)
            size = self.place.world_size
            distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
            # For reading and writing files, where one rank may be much slower than the others.
            self.files_group = distributed.new_group(backend="gloo", timeout=datetime.timedelta(seconds=FILES_SECONDS))

    def meet(self, name: str, word: str = "") -> None:
        """Wait on the store until all ranks are here. A collective would time out, because ranks may take long.

        Raises RankError if a rank does not arrive in time.
        """
        self.channel.post(f"{name}/{self.place.rank}", word.encode() or b"1")
        deadline = time.monotonic() + self.start_seconds
        for rank in range(self.place.world_size):
            while not self.channel.is_there(f"{name}/{rank}"):
                self.check()
                if time.monotonic() > deadline:
                    what = f"rank {rank} was not {name} within {self.start_seconds:g} s"
                    raise RankError(f"{what}; read the output of that rank, or raise --training.start-seconds")
                time.sleep(0.05)
            if self.channel.read(f"{name}/{rank}") is None:
                raise ConfigError(
                    f"messages of rank {rank} are not signed with this run's secret; give all ranks the same {SECRET}"
                )

    def check(self) -> None:
        """Raise the detected fault, if there is one."""
        if self.detector is not None and self.detector.fault is not None:
            raise self.detector.fault

    @contextlib.contextmanager
    def failures(self) -> Iterator[None]:
        """If an error inside the block is another rank's fault, raise a RankError that names that rank."""
        try:
            yield
        except RuntimeError as error:
            if self.detector is None or not _is_collective(error):
                raise
            raise self.detector.why(error) from error

    def end(self) -> None:
        """Stop the threads and leave the process group. Rank 0 also ends the other ranks, and waits for those that it
        started.
        """
        if self.detector is not None:
            self.detector.end()
            with contextlib.suppress(Exception):  # the store may be gone with its launcher
                self.channel.post("over", b"1")
        self.heartbeat.end()
        # This rank must not wait for a launcher's rank that is still running.
        thread = threading.Thread(target=_leave_group, name="rollouts-leave", daemon=True)
        thread.start()
        thread.join(_LEAVE_SECONDS)
        for process in self.processes.values():
            try:
                process.wait(_CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def kill(self) -> None:
        """Like `end`, but kill the ranks that rank 0 started."""
        for process in self.processes.values():
            process.kill()
        self.end()


def gather_ranks(
    processes: int, config: str, *, stall_seconds: float, start_seconds: float, on_gpus: bool
) -> RankGroup:
    """Meet the ranks of a launcher, or start `processes` - 1 ranks here, which compose the run from `config`."""
    place = rendezvous.place_of_this_process()
    started: dict[int, subprocess.Popen[bytes]] = {}
    if place is not None:
        channel = rendezvous.join_ranks(place)
    else:
        place = RankPlace(0, processes, 0, False)
        channel, variables = rendezvous.open_here(processes)
        started = _start_others(processes, config, variables)
    return RankGroup(place, channel, started, stall_seconds, start_seconds, on_gpus)


def _start_others(processes: int, config: str, variables: Mapping[str, str]) -> dict[int, subprocess.Popen[bytes]]:
    shared = {
        **variables,
        "WORLD_SIZE": str(processes),
        "ROLLOUTS_STARTED_BY_RANK_0": str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(each or os.getcwd() for each in sys.path),  # ranks import what this one imports
        revisions.VARIABLE: json.dumps(revisions.known()),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),  # rank 0 reports errors
    }
    if "OMP_NUM_THREADS" not in os.environ:
        shared["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // processes))
    started: dict[int, subprocess.Popen[bytes]] = {}
    output = sys.__stderr__.fileno() if sys.__stderr__ is not None else subprocess.DEVNULL
    for rank in range(1, processes):
        environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with tempfile.TemporaryFile() as settings:  # not through the store, which other users can read
            settings.write(config.encode())
            settings.seek(0)
            command = [sys.executable, "-m", "rollouts_fsdp.rank"]
            started[rank] = subprocess.Popen(command, env=environment, stdin=settings, stdout=output)
    return started


class DistributedExecutor(Executor):
    """Rank 0's executor for several ranks. `weights` go to rank 0's trainer only."""

    def __init__(self, trainer: Trainer, group: RankGroup) -> None:
        super().__init__(trainer)
        self.size = group.place.world_size
        self._group = group
        self._number = 0
        self._is_broken = False

    def call(self, command: Command[P, T], *args: P.args, **settings: P.kwargs) -> T:
        """Run the command on every rank. Returns the result of rank 0."""
        return self.call_all(command, *args, **settings)[0]

    def run(self, command: Callable[..., T], shards: Sequence[BatchShard], **settings: Any) -> list[T]:
        """Send the command, run it here too, and collect the answers. After an error the ranks are out of step, and
        the executor is unusable.
        """
        name = command.__name__
        self._group.check()
        assert not self._is_broken, f"{name} after a command that failed"
        self._is_broken = True
        self._number += 1
        status = self._group.heartbeat.status
        status.begin(name, self._number)
        self._group.heartbeat.works_in_this_thread()
        sent = {key: value for key, value in settings.items() if key != "weights"}
        with self._group.failures():
            for rank in range(1, self.size):
                message = msgspec.msgpack.encode(RankCommand(name, sent, shards[rank] if shards else None))
                self._group.channel.send(f"command/{self._number}/{rank}", message)
            results = [run_on_trainer(self.trainer, command, *shards[:1], **settings)]
            results += [self._answer(rank, command) for rank in range(1, self.size)]
        status.done = True
        self._is_broken = False
        return results

    def close(self) -> None:
        """End the other ranks. Kills ranks that do not answer."""
        if not self._is_broken:
            with contextlib.suppress(RankError):
                self.call_all(Trainer.close)
                self._group.end()
                return
        self.trainer.close()
        self._group.kill()

    def _answer(self, rank: int, command: Callable[..., T]) -> T:
        group, key = self._group, f"answer/{self._number}/{rank}"
        deadline, pause = time.monotonic() + group.stall_seconds, 0.0002
        while not group.channel.is_there(key):
            group.check()
            if time.monotonic() > deadline:
                assert group.detector is not None, "this is rank 0"
                raise group.detector.late(rank, group.stall_seconds)
            time.sleep(pause)
            pause = min(pause * 1.5, 0.01)
        data = group.channel.receive(key, group.stall_seconds)
        answer: T = msgspec.msgpack.decode(data, type=get_type_hints(command)["return"])
        return answer


@dataclass(eq=False)
class RankWorker:
    """A rank above 0: runs commands on its trainer until rank 0 ends it."""

    trainer: Trainer
    group: RankGroup

    def serve(self) -> None:
        """Run commands. Returns when the run is over. A command that fails ends this process."""
        try:
            self._serve()
        finally:
            self.group.end()

    def _serve(self) -> None:
        channel, heartbeat, rank = self.group.channel, self.group.heartbeat, self.group.place.rank
        heartbeat.works_in_this_thread()
        number, name = 0, ""
        while name != "close":
            number += 1
            command = self._next(f"command/{number}/{rank}")
            name = command.name
            heartbeat.status.begin(name, number)
            try:
                shards = [] if command.shard is None else [command.shard]
                value = run_on_trainer(self.trainer, COMMANDS[name], *shards, **command.settings)
            except BaseException as error:
                report_failure(channel, rank, error, heartbeat.status.words())
                raise
            if name == "close":
                heartbeat.end()  # rank 0 may end as soon as it has the answer
            channel.send(f"answer/{number}/{rank}", msgspec.msgpack.encode(value))
            heartbeat.status.done = True

    def _next(self, key: str) -> RankCommand:
        while True:
            try:
                return msgspec.msgpack.decode(self.group.channel.receive(key, _WAIT_SECONDS), type=RankCommand)
            except Exception as error:
                if not rendezvous.is_timeout(error):
                    raise


def report_failure(channel: RankChannel, rank: int, error: BaseException, activity: str) -> None:
    """Report to rank 0 why this rank ends: its command, and the error. The first report is kept."""
    known = isinstance(error, RolloutsError)
    symptom = isinstance(error, RuntimeError) and not known and _is_collective(error)
    words = str(error) if known else words_of(error, innermost_place)
    failure = RankFailure(f"{activity}: {words}", symptom=symptom, known=known)
    with contextlib.suppress(Exception):  # if rank 0 is gone, that is the cause
        if channel.read(f"failed/{rank}") is None:
            channel.post(f"failed/{rank}", msgspec.msgpack.encode(failure))


def ignore_interrupts() -> None:
    """Ignore signals. Ctrl-C, a closed terminal and often SIGTERM reach all processes, but only rank 0 ends the run."""
    with contextlib.suppress(ValueError):  # only the main thread can set handlers
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)


def _leave_group() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _is_collective(error: RuntimeError) -> bool:
    """Whether torch's communication raised the error."""
    words = str(error).lower()
    named = ("gloo", "nccl", "connection", "timed out", "timeout", "peer", "socket", "store", "broken pipe")
    return type(error).__name__.startswith("Dist") or any(word in words for word in named)


def _end_this_rank() -> None:
    """End this process: rank 0 is gone, and the main thread may be stuck in a collective."""
    sys.stderr.write(f"rank {os.environ.get('RANK')}: rank 0 is gone, so this rank ends\n")
    sys.stderr.flush()
    os._exit(1)
