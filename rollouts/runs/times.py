"""When everything in a step happened: `trajectories/.step_000000.times`, from which `rollouts view` draws a timeline.

The file is a JSON object. Times are seconds from `zero`, which is a Unix time: the beginning of the step, or of the
first episode of an evaluation. Nothing in a run depends on it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from rollouts.disk import read_regular
from rollouts.errors import ConfigError
from rollouts.types import Episode


class Start(NamedTuple):
    """The moment when a run or a phase began, in seconds of the wall clock and of this process's CPU time."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Start:
        """This moment."""
        return cls(time.perf_counter(), time.process_time())

    def seconds(self) -> dict[str, float]:
        """The seconds since then, under the keys of summary.json."""
        now = Start.now()
        return {"wall_seconds": now.wall - self.wall, "cpu_seconds": now.cpu - self.cpu}


FORMAT, VERSION = "rollouts-times", 1
FINISH = "finish"  # the phase in which a step is written, logged and perhaps evaluated


class EpisodeSpan(NamedTuple):
    """One episode: the line of its first trajectory, its order, and when it and each reply of its models was."""

    line: int
    group: int
    rollout: int
    began: float
    ended: float
    replies: list[tuple[float, float]]


class StepTimes(msgspec.Struct):
    """The times of a step. `phases` are (name, begin, end); an evaluation has none."""

    zero: float
    phases: list[tuple[str, float, float]] = []
    episodes: list[EpisodeSpan] = []
    format: str = FORMAT
    version: int = VERSION


def times_of(file: Path) -> Path:
    """The file beside a file of trajectories. Its name is hidden, so that `step_*` only finds trajectories."""
    return file.with_name(f".{file.stem}.times")


def step_times(phases: Sequence[tuple[str, float, float]], episodes: Iterable[Episode]) -> StepTimes:
    """The times of a step that ends now. `phases` are in the seconds of `time.perf_counter`; `episodes` are in the
    order of their lines.
    """
    shift, now = time.time() - time.perf_counter(), time.perf_counter()
    last = phases[-1][2] if phases else now
    zero = (phases[0][1] if phases else now) + shift
    shown = [
        (name, _rounded(begin + shift - zero), _rounded(end + shift - zero))
        for name, begin, end in (*phases, (FINISH, last, now))
    ]
    return StepTimes(zero, shown, list(_spans(zero, episodes)))


def evaluation_times(episodes: Sequence[Episode]) -> StepTimes:
    """The times of an evaluation. `episodes` are in the order of their lines."""
    zero = min((each.times.began for each in episodes if each.times is not None), default=0.0)
    return StepTimes(zero, [], list(_spans(zero, episodes)))


def read_times(file: Path) -> StepTimes:
    """Read a file of times. Raises ConfigError."""
    try:
        found = msgspec.json.decode(read_regular(file), type=StepTimes)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is damaged: {error}") from error
    if (found.format, found.version) != (FORMAT, VERSION):
        raise ConfigError(f"{file} has the format {found.format} {found.version}; expected {FORMAT} {VERSION}")
    return found


def _spans(zero: float, episodes: Iterable[Episode]) -> Iterator[EpisodeSpan]:
    line = 0
    for episode in episodes:
        line += len(episode.others)
        if (times := episode.times) is not None:
            replies = [(_rounded(begin - zero), _rounded(end - zero)) for begin, end in times.replies]
            began, ended = _rounded(times.began - zero), _rounded(times.ended - zero)
            yield EpisodeSpan(line, episode.order[0], episode.order[1], began, ended, replies)
        line += len(episode.trajectories)


def _rounded(seconds: float) -> float:
    return round(seconds, 4)
