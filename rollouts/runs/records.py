"""One trajectory of a run, with the values of its tokens, for notebooks and viewers: read without the rest of its file.

found = read_record("runs/first", step=3, line=17)
found.line.messages, found.tokens[0]["entropy"]
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any, NamedTuple

from rollouts.errors import ConfigError
from rollouts.runs.folder import EVALUATED, PHASES, STEP, TOKENS, holds_run
from rollouts.runs.saved import SavedLine, read_line
from rollouts.runs.times import open_lines
from rollouts.runs.token_files import read_table


class Record(NamedTuple):
    """A trajectory, and by the number of its segment the channels of its trained tokens (see docs/records.md). `tokens`
    is empty if the run did not record tokens, or trained none of this trajectory.
    """

    line: SavedLine
    tokens: dict[int, dict[str, array[Any]]]


def steps_of(run: str | Path, *, evaluations: bool = False) -> list[int]:
    """The steps, from 0, whose trajectories a run has; with `evaluations`, after how many steps it kept evaluations.

    Raises ConfigError if there is no run.
    """
    prefix = EVALUATED if evaluations else STEP
    names = (_folder(run) / "trajectories").glob(f"{prefix}*.jsonl")
    return sorted(int(name.stem.removeprefix(prefix)) for name in names if name.stem.removeprefix(prefix).isdigit())


def count_lines(run: str | Path, step: int, *, evaluation: bool = False) -> int:
    """The number of trajectories that a step or an evaluation kept. Raises ConfigError as `read_record`."""
    return open_lines(_file(run, step, evaluation)).total


def read_record(run: str | Path, step: int, line: int, *, evaluation: bool = False) -> Record:
    """A trajectory of a step, or with `evaluation` of the evaluation after `step` steps. `line` counts from 0.

    Raises ConfigError if there is no such run, step or line, or if a file is damaged.
    """
    file = _file(run, step, evaluation)
    found = read_line(open_lines(file).read(line), file, line + 1)
    tokens = file.with_suffix(TOKENS)
    return Record(found, read_table(tokens).of_line(line) if tokens.exists() else {})


def _folder(run: str | Path) -> Path:
    """The folder of a run; of mode sft+rl, that of its reinforcement."""
    folder = Path(run).expanduser()
    for each in (folder / PHASES[0], folder):
        if holds_run(each):
            return each
    raise ConfigError(f"{run} holds no run: give the folder that a run has written")


def _file(run: str | Path, step: int, evaluation: bool) -> Path:
    file = _folder(run) / "trajectories" / f"{EVALUATED if evaluation else STEP}{step:06d}.jsonl"
    if not file.exists():
        there = steps_of(run, evaluations=evaluation)
        have = f"it has those from {there[0]} to {there[-1]}" if there else "it has none"
        what = "an evaluation after" if evaluation else "step"
        raise ConfigError(f"{run} has no trajectories of {what} {step}; {have}")
    return file
