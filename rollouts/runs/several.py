"""Several runs of one command, one after another: one for each seed, or an evaluation of each model.

Each run has its own process and folder, PARENT/seed_N or PARENT/MODEL, and is the same as a single run. So a run that
fails does not affect the others. PARENT/seeds.json has the command, how each run ended, and the table of the results;
PARENT/models.json has the command and the models. If the same command is typed again, or PARENT is resumed, unfinished
runs continue, with the settings in their own folders. Not here: a single run (`rollouts.runs`), and how results are
shown (`rollouts.cli.several`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from rollouts.config.files import NOWHERE
from rollouts.config.flags import Tree
from rollouts.config.objects import held_names
from rollouts.config.resolving import Resolved
from rollouts.config.secrets import command_without_secrets
from rollouts.disk import read_regular, write_whole
from rollouts.encoding import encode_indented
from rollouts.errors import ConfigError, OutputError, RunError
from rollouts.loggers.jsonl import read_lines
from rollouts.models import revisions
from rollouts.runs.comparing import interval_of
from rollouts.runs.folder import CONFIG, SUMMARY, check_out, holds_run, numbered, read_config, read_json
from rollouts.runs.manifest import known_revisions
from rollouts.runs.resume import finished, read_run, resume_command
from rollouts.supervisor import PR_SET_PDEATHSIG

SEEDS, MODELS = "seeds.json", "models.json"
SEEDS_MAX = 1000
INTERVAL = "95 % t-interval of the mean over the seeds"

MISTAKE = 2
INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP)
"""Exit codes of a command."""


class Several(NamedTuple):
    """The runs of one command.

    `command` is "run", "sft" or "eval" and its arguments, without seeds, models and folder. `runs` has the seed or the
    model of each run, by the name of its folder. `display` is that of each run. `resolved` are the settings of a
    command that was typed, with any seed; None if the runs are resumed, with the settings `given` in place of theirs:
    as flags and as a tree.
    """

    parent: Path
    command: list[str]
    runs: dict[str, str]
    display: str = "auto"
    resolved: Resolved | None = None
    given: tuple[list[str], Tree] = ([], {})

    @property
    def are_models(self) -> bool:
        """Whether these are evaluations of models, and not runs of seeds."""
        return self.command[0] == "eval"

    @property
    def file(self) -> Path:
        """The file with the command, by which the runs are resumed."""
        return self.parent / (MODELS if self.are_models else SEEDS)

    def label(self, name: str) -> str:
        """The run in a message."""
        return self.runs[name] if self.are_models else f"seed {self.runs[name]}"

    def is_finished(self, name: str) -> bool:
        """Whether this run is finished. Raises ConfigError for settings that cannot be read."""
        folder = self.parent / name
        if not holds_run(folder) or self.are_models:
            return finished(folder, 0) is not None
        settings = (self.resolved or read_run(folder, self.given[1], allow_left_out=True)).settings
        return finished(folder, settings.steps, settings.stop_when) is not None

    def arguments(self, name: str) -> list[str]:
        """The command line that begins this run, or resumes it."""
        folder, shown = self.parent / name, [] if self.display == "auto" else [f"--display={self.display}"]
        if self.are_models and holds_run(folder):
            return ["resume", str(folder), *shown]
        if self.are_models:
            return [*self.command, f"--model={self.runs[name]}", f"--out={folder}", *shown]
        begin = self.command
        if self.resolved is None:
            # The settings in a folder are complete, and hold wherever the folder is. Objects of a Python file are not
            # among them; only the command gives these again.
            complete = [each for each in map(self.parent.joinpath, (name, *self.runs)) if _is_complete(each)]
            if folder in complete:
                return ["resume", str(folder), *self.given[0], *shown]
            begin = ["run", str(complete[0] / CONFIG), *self.given[0]] if complete else begin
        return [*begin, f"--seed={self.runs[name]}", f"--out={folder}", "--resume=auto", *shown]


def _is_complete(folder: Path) -> bool:
    return holds_run(folder) and not held_names(read_config(folder)[0])


def runs_of_seeds(seeds: Sequence[int]) -> dict[str, str]:
    """The seeds by the names of their folders."""
    return {f"seed_{seed}": str(seed) for seed in seeds}


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


def runs_of_models(models: Sequence[str]) -> dict[str, str]:
    """The models by the names of their folders. Raises ConfigError if a model is given twice.

    >>> runs_of_models(["runs/first", "Qwen/Qwen3-0.6B", "other/first"])
    {'first': 'runs/first', 'Qwen3-0.6B': 'Qwen/Qwen3-0.6B', 'first-2': 'other/first'}
    """
    from rollouts.runs.jobs.evaluate import model_name  # imports engines

    found: dict[str, str] = {}
    for model in models:
        if model in found.values():
            raise ConfigError(f"--model {model} is given twice; leave one out")
        wanted = re.sub(r"[^\w.-]+", "-", model_name(model)).strip("-.") or "model"
        found[next(name for name in numbered(wanted) if name not in found)] = model
    return found


class _Record(msgspec.Struct):
    """What seeds.json or models.json says of the command."""

    command: list[str]
    seeds: list[int] = []
    models: dict[str, str] = {}


def _read_record(file: Path) -> _Record:
    try:
        record = msgspec.json.decode(read_regular(file), type=_Record)
        if record.command and (record.seeds or record.models):
            return record
        raise msgspec.ValidationError("it names no runs")
    except (OSError, msgspec.DecodeError) as error:
        again = f"rollouts resume {shlex.quote(str(file.parent))}/NAME"
        raise ConfigError(f"{file} cannot be read: {error}\nto continue its runs one by one, type: {again}") from error


def holds_runs(folder: Path) -> bool:
    """Whether the folder has several runs of one command."""
    return any((folder / file).is_file() for file in (SEEDS, MODELS))


def read_several(parent: Path) -> Several:
    """The runs of an earlier command, from their folder. Raises ConfigError."""
    record = _read_record(next(parent / file for file in (SEEDS, MODELS) if (parent / file).is_file()))
    return Several(parent, record.command, record.models or runs_of_seeds(record.seeds))


def check_several(runs: Several) -> None:
    """Raise ConfigError or OutputError for settings that cannot be run several times, and for a folder of another
    command.
    """
    assert runs.resolved is not None, "these are the runs of a command that was typed"
    if not runs.are_models and runs.resolved.settings.mode == "eval":
        raise ConfigError("--seeds repeats a training run, and mode eval trains nothing; leave it out")
    if not runs.are_models and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("--seeds starts each run itself, so no launcher can start it; type --seed N for each job")
    if not runs.file.exists():
        check_out(str(runs.parent))
        return
    before = _read_record(runs.file)
    if before.command != command_without_secrets(runs.command) or (runs.are_models and before.models != runs.runs):
        raise OutputError(
            f"{runs.parent} has the runs of another command: rollouts {shlex.join(before.command)}\n"
            f"type --out with another name, or continue with: {resume_command(runs.parent)}"
        )


def run_several(runs: Several, say: Callable[[str], None]) -> None:
    """Run or resume each of the runs in its own process. `say` is called with a line before each run.

    Ctrl-C ends the current run as usual, and no more runs begin. After a failed run, the next one still runs. A run
    that is refused ends all if its settings are those of the others too: with seeds, and at the first model.

    Raises RunError after the last run if any have failed, KeyboardInterrupt, and ConfigError if a run was refused.
    """
    made = [each for each in (runs.parent, *runs.parent.parents) if not each.exists()]
    failed, again = list[str](), resume_command(runs.parent)
    _write(runs)
    for number, name in enumerate(runs.runs, start=1):
        is_finished, label = runs.is_finished(name), runs.label(name)
        end = " is finished" if is_finished else ""
        say(f"--- {label} ({number} of {len(runs.runs)}): {runs.parent / name}{end}")
        code = 0 if is_finished else run_child(runs.arguments(name), {revisions.VARIABLE: json.dumps(_commits(runs))})
        if code == MISTAKE and (not runs.are_models or (number == 1 and not (runs.parent / name).exists())):
            if not any(each.is_dir() for each in runs.parent.iterdir()):  # no run has begun
                runs.file.unlink()
                again = "the same command again"
                for each in made:
                    with contextlib.suppress(OSError):
                        each.rmdir()
            names, begun = list(runs.runs), number - 1
            ended = {"finished": [each for each in names[:begun] if each not in failed], "failed": failed}
            ended["not started"] = names[number:]
            others = "; ".join(f"{how}: {', '.join(runs.runs[each] for each in of)}" for how, of in ended.items() if of)
            what = f"{label} was refused, and its error is above ({others})"
            raise ConfigError(f"{what}\ncorrect the cause, then type: {again}")
        _write(runs)
        if code in INTERRUPTED:
            raise KeyboardInterrupt(f"interrupted in {label}; continue with: {again}")
        if code:
            failed.append(name)
    if failed:
        labels = ", ".join(map(runs.label, failed))
        raise RunError(f"these did not end as they should: {labels}; try them again with: {again}")


def _commits(runs: Several) -> dict[str, str]:
    """The commits of the hub that the runs of the other seeds use; the first run chooses. Models choose their own."""
    found = revisions.given()
    for name in () if runs.are_models else reversed(runs.runs):
        found |= known_revisions(runs.parent / name, NOWHERE)
    return found


def run_child(arguments: Sequence[str], variables: Mapping[str, str] = MappingProxyType({})) -> int:
    """Run `rollouts ARGUMENTS` in a process, with more environment `variables`. Returns the exit code; 128 + n if
    signal n ended it. Ctrl-C ends it as usual.

    The child has its own process group, so that it gets Ctrl-C only from this process, once.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", "rollouts", *arguments],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **variables},
        process_group=0,
        preexec_fn=_end_with_parent,
    )
    interrupted = False
    while True:
        try:
            code = child.wait()
            break
        except KeyboardInterrupt:
            interrupted = True
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGINT)
    if interrupted:
        return 128 + signal.SIGINT
    return code if code >= 0 else 128 - code


def _end_with_parent() -> None:
    """In the child: end when the parent is killed, so that the same command can be typed again at once."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


# --- the results ----------------------------------------------------------------------------------------------------


def _write(runs: Several) -> None:
    """Write the command, and with seeds the results of the runs so far."""
    written: dict[str, Any] = {"command": command_without_secrets(runs.command)}
    if runs.are_models:
        written["models"] = runs.runs
    else:
        summaries = {name: read_json(runs.parent / name / SUMMARY) for name in runs.runs}
        results = {runs.runs[name]: final_numbers(runs.parent / name, each) for name, each in summaries.items()}
        written |= {
            "seeds": [int(seed) for seed in runs.runs.values()],
            "runs": {
                runs.runs[name]: {"folder": name} | {key: summary.get(key) for key in ("status", "steps")}
                for name, summary in summaries.items()
            },
            "interval": INTERVAL,
            "metrics": table_of(results),
        }
    try:
        runs.parent.mkdir(parents=True, exist_ok=True)
        write_whole(runs.file, encode_indented(written).encode())
    except OSError as error:
        raise OutputError(f"{runs.file} cannot be written: {error.strerror or error}; type another --out") from error


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


def table_of(results: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    """For each number: its `values` by seed (None where a run lacks it), their mean, and the 95 % t-interval."""
    table = {}
    for name in dict.fromkeys(name for numbers in results.values() for name in numbers):
        values = {seed: numbers.get(name) for seed, numbers in results.items()}
        table[name] = {"values": values, **interval_of([v for v in values.values() if v is not None])}
    return table
