"""One command with several seeds: a run for each, one after another, and the spread of their results.

Each run has its own process and folder, PARENT/seed_N. So a run that fails does not affect the others, and each has the
results of a single run with `--seed N`. PARENT/seeds.json has the command, how each run ended, and the table. If the
same command is typed again, or PARENT is resumed, unfinished runs continue. Not here: a single run (`rollouts.runs`),
and how the table is shown (`rollouts.cli.seeds`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollouts.config.resolving import Resolved
from rollouts.config.secrets import command_without_secrets
from rollouts.disk import write_whole
from rollouts.encoding import encode_indented
from rollouts.errors import ConfigError, OutputError, RunError
from rollouts.loggers.jsonl import read_lines
from rollouts.models import revisions
from rollouts.runs.children import INTERRUPTED, MISTAKE, run_command, shown_flags
from rollouts.runs.folder import SUMMARY, check_out, read_json
from rollouts.runs.manifest import known_revisions
from rollouts.runs.resume import finished

SEEDS = "seeds.json"
SEEDS_MAX = 1000
INTERVAL = "95 % t-interval of the mean over the seeds"


def read_seeds(text: str) -> list[int]:
    """The seeds in a list of numbers and ranges, each once, in this order. Raises ConfigError.

    >>> read_seeds("0-2,7")
    [0, 1, 2, 7]
    """
    found: dict[int, None] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,18})\s*(?:-\s*(\d{1,18})\s*)?", part, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last - first >= SEEDS_MAX:
            raise ConfigError(
                f"--seeds {text}: expected numbers and ranges of at most {SEEDS_MAX}, such as 0-4 or 0,3,7"
            )
        found |= dict.fromkeys(range(first, last + 1))
    if len(found) == 1:
        (only,) = found
        several = f"0-{only - 1}" if 1 < only <= SEEDS_MAX else "0-4"
        raise ConfigError(
            f"--seeds {text}: this is one seed; type --seed {only}, or --seeds {several} for several, from 0 on"
        )
    return list(found)


class Interval(NamedTuple):
    """The mean of `n` values, and its 95 % t-interval (None for one value)."""

    n: int
    mean: float
    low: float | None
    high: float | None


def interval_of(values: Sequence[float]) -> Interval:
    """The mean and its interval: mean ± t(n - 1) s / sqrt(n), with the sample's deviation s (ddof 1).

    >>> [round(value, 3) for value in interval_of([1.0, 2.0, 3.0])]
    [3, 2.0, -0.484, 4.484]
    """
    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return Interval(n, mean, None, None)
    half = t_quantile(n - 1) * statistics.stdev(values) / math.sqrt(n)
    return Interval(n, mean, mean - half, mean + half)


def t_quantile(degrees: int, share: float = 0.95) -> float:
    """The t of Student's distribution with |T| <= t in this share of cases (Abramowitz and Stegun 26.7.3, 26.7.4).

    >>> [round(t_quantile(degrees), 3) for degrees in (1, 2, 4, 9, 30)]
    [12.706, 4.303, 2.776, 2.262, 2.042]
    """

    def probability(t: float) -> float:
        angle, odd = math.atan(t / math.sqrt(degrees)), degrees % 2
        sine, cosine = math.sin(angle), math.cos(angle)
        term = total = 1.0 if degrees > 1 else 0.0
        for k in range(2 + odd, degrees - 1, 2):
            term *= (k - 1) / k * cosine**2
            total += term
        return 2 / math.pi * (angle + sine * cosine * total) if odd else sine * total

    low, high = 0.0, 1e3
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if probability(middle) < share else (low, middle)
    return high


# --- the runs -------------------------------------------------------------------------------------------------------


class SeedRuns(NamedTuple):
    """The runs of one command: `command` is "run" or "sft" and its arguments, without seeds and folder. `resolved` are
    its settings, with any seed. `display` is that of each run.
    """

    parent: Path
    command: list[str]
    seeds: list[int]
    resolved: Resolved
    display: str = "auto"

    def folder(self, seed: int) -> Path:
        """The folder of the run with this seed."""
        return self.parent / f"seed_{seed}"

    def arguments(self, seed: int) -> list[str]:
        """The command line of the run with this seed."""
        own = [f"--seed={seed}", f"--out={self.folder(seed)}", "--resume=auto"]
        return [*self.command, *own, *shown_flags(self.display)]

    def is_finished(self, seed: int) -> bool:
        """Whether the run with this seed is finished."""
        settings = self.resolved.settings
        return finished(self.folder(seed), settings.steps, settings.stop_when) is not None


def check_seeds(runs: SeedRuns) -> None:
    """Raise ConfigError or OutputError for settings that cannot be run with several seeds, and for a folder of another
    command.
    """
    mode, parent = runs.resolved.settings.mode, runs.parent
    if mode == "eval":
        raise ConfigError("--seeds repeats a training run, and mode eval trains nothing; leave it out")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("--seeds starts each run itself, so no launcher can start it; type --seed N for each job")
    before = read_json(parent / SEEDS).get("command")
    if before is None:
        check_out(str(parent))
    elif before != command_without_secrets(runs.command):
        raise OutputError(
            f"{parent} has the seeds of another command: rollouts {shlex.join(before)}\n"
            f"type --out with another name, or continue with: rollouts resume {shlex.quote(str(parent))}"
        )


def read_parent(parent: Path) -> tuple[list[str], list[int]]:
    """The command and the seeds of an earlier call, from its folder. Raises ConfigError."""
    written = read_json(parent / SEEDS)
    command, seeds = written.get("command"), written.get("seeds")
    if not isinstance(command, list) or not isinstance(seeds, list):
        raise ConfigError(
            f"{parent / SEEDS} cannot be read; to continue these runs, type the whole command that started them"
        )
    return command, seeds


def run_seeds(runs: SeedRuns, say: Callable[[str], None]) -> dict[str, Any]:
    """Run or resume each seed in its own process. Returns the content of seeds.json. `say` is called with a line before
    each run.

    Ctrl-C ends the current run as usual, and no more runs begin. After a failed run, the next one still runs.

    Raises RunError after the last run if any have failed, KeyboardInterrupt, and ConfigError if a run refuses its
    settings, which are the same for all of them.
    """
    made = [each for each in (runs.parent, *runs.parent.parents) if not each.exists()]
    runs.parent.mkdir(parents=True, exist_ok=True)
    _write(runs)
    failed, again = list[str](), f"rollouts resume {shlex.quote(str(runs.parent))}"
    for place, seed in enumerate(runs.seeds, start=1):
        is_finished = runs.is_finished(seed)
        end = " is finished" if is_finished else ""
        say(f"--- seed {seed} ({place} of {len(runs.seeds)}): {runs.folder(seed)}{end}")
        code = 0 if is_finished else run_command(runs.arguments(seed), {revisions.VARIABLE: json.dumps(_commits(runs))})
        if code in INTERRUPTED:
            _write(runs)
            raise KeyboardInterrupt(f"interrupted in seed {seed}; continue all seeds with: {again}")
        if code == MISTAKE:
            _discard(runs, made)
            raise ConfigError(_refused(runs, seed, failed))
        if code:
            failed.append(str(seed))
        written = _write(runs)
    if failed:
        raise RunError(f"the runs of these seeds failed: {', '.join(failed)}; try them again with: {again}")
    return written


def _commits(runs: SeedRuns) -> dict[str, str]:
    """The commits of the hub that the runs before use; the first run chooses."""
    found: dict[str, str] = {}
    for seed in reversed(runs.seeds):
        found |= known_revisions(runs.folder(seed), runs.resolved.source)
    return found


def _refused(runs: SeedRuns, seed: int, failed: Sequence[str]) -> str:
    """The message after this seed was refused: how every other seed ended, and what to type."""
    place = runs.seeds.index(seed)
    before = [str(each) for each in runs.seeds[:place] if str(each) not in failed]
    ends = {"finished": before, "failed": failed, "not started": [str(each) for each in runs.seeds[place + 1 :]]}
    others = "; ".join(f"{word}: {', '.join(seeds)}" for word, seeds in ends.items() if seeds)
    is_kept = (runs.parent / SEEDS).exists()
    again = f"rollouts resume {shlex.quote(str(runs.parent))}" if is_kept else "the same command again"
    return f"seed {seed} was refused, and its error is above ({others})\ncorrect the cause, then type: {again}"


def _discard(runs: SeedRuns, made: Sequence[Path]) -> None:
    """Remove the files of these runs, if no run has begun."""
    if not any(each.is_dir() for each in runs.parent.iterdir()):
        (runs.parent / SEEDS).unlink()
        for each in made:
            with contextlib.suppress(OSError):
                each.rmdir()


# --- the results ----------------------------------------------------------------------------------------------------


def _write(runs: SeedRuns) -> dict[str, Any]:
    """Write seeds.json: the command, and the results of the runs so far."""
    summaries = {seed: read_json(runs.folder(seed) / SUMMARY) for seed in runs.seeds}
    results = {seed: final_numbers(runs.folder(seed), summary) for seed, summary in summaries.items()}
    written = {
        "command": command_without_secrets(runs.command),
        "seeds": runs.seeds,
        "runs": {
            str(seed): {"folder": runs.folder(seed).name} | {key: summary.get(key) for key in ("status", "steps")}
            for seed, summary in summaries.items()
        },
        "interval": INTERVAL,
        "metrics": table_of(results),
    }
    try:
        write_whole(runs.parent / SEEDS, encode_indented(written).encode())
    except OSError as error:
        raise OutputError(f"{runs.parent / SEEDS} cannot be written: {error.strerror or error}") from error
    return written


def final_numbers(folder: Path, summary: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a run that is done: its evaluations as `before/...` and `after/...`, and the metrics of its last
    step. Empty if it is not done.
    """
    if summary.get("status") != "done":
        return {}
    found: dict[str, Any] = {"steps": summary.get("steps"), "wall_seconds": summary.get("wall_seconds")}
    for when, evaluation in (summary.get("evaluation") or {}).items():
        for name, value in (evaluation or {}).items():
            if name == "weights":  # a setting, no result
                continue
            inner = value if isinstance(value, dict) else {"": value}
            found |= {f"{when}/{name}{part and '/'}{part}": number for part, number in inner.items()}
    part = folder / "rl" if (folder / "rl").is_dir() else folder  # mode sft+rl
    lines = [line for _, line, _ in read_lines(part / "metrics.jsonl")]
    found |= {name: value for name, value in (lines[-1] if lines else {}).items() if name != "step"}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def table_of(results: Mapping[int, Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    """For each number: its `values` by seed (None where a run lacks it), their mean, and the 95 % t-interval."""
    table = {}
    for name in dict.fromkeys(name for numbers in results.values() for name in numbers):
        values = {str(seed): numbers.get(name) for seed, numbers in results.items()}
        table[name] = {"values": values, **interval_of([v for v in values.values() if v is not None])._asdict()}
    return table
