"""The trajectories that a run saved, read back as groups: the inverse of `folder.episode_records`.

`open_saved` checks every line once and remembers where each group is in its file, so a run of any size takes little
memory; `SavedRun.group` reads one group. Not here: what is trained on (`training.rollout_gen.saved`).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollouts.config.files import load_file
from rollouts.config.flags import Tree
from rollouts.config.resolving import saved_folder
from rollouts.config.settings import Settings
from rollouts.disk import open_regular, read_regular
from rollouts.errors import ConfigError, UserError, counted, first_line, in_lines
from rollouts.models.loading import load_tokenizer
from rollouts.runs.environments import held_out_keys
from rollouts.runs.folder import CONFIG, OTHERS, REMOVED_BY, STEP, read_json, removed_steps, step_of_file
from rollouts.runs.manifest import MANIFEST
from rollouts.training.rollout_gen.groups import Group
from rollouts.training.rollout_gen.steps import JUDGING
from rollouts.types import Episode, Message, Score, Segment, Status, Task, Trajectory
from rollouts.version import __version__


class SavedLine(msgspec.Struct):
    """One line of `trajectories/step_*.jsonl`: a trajectory, and the reward of its episode. Lines of earlier versions
    have no `weights`, `turns` and `judged`.
    """

    group: int
    rollout: int
    task: Task
    status: Status
    reward: float | None
    parts: dict[str, float | None]
    why: str
    messages: list[Message]
    segments: list[Segment]
    metrics: dict[str, float]
    error: str | None = None
    role: str = ""
    weights: dict[str, float] = {}
    turns: list[float] = []
    judged: bool | None = None
    info: dict[str, Any] = {}

    @property
    def is_of_other(self) -> bool:
        """Whether a model that is not trained played this role."""
        return self.why == OTHERS

    @property
    def judging(self) -> dict[str, float]:
        """What the episode's rewards and metrics counted, which is in the line of the judged trajectory."""
        return {name: value for name, value in self.metrics.items() if name in JUDGING or name.startswith("metric/")}

    def trajectory(self) -> Trajectory:
        """The trajectory of this line."""
        own = {name: value for name, value in self.metrics.items() if name not in self.judging}
        return Trajectory(
            self.task, self.messages, self.segments, self.status, own, [], self.error, {}, self.role, self.info
        )


_DECODER = msgspec.json.Decoder(SavedLine)


class GroupBytes(NamedTuple):
    """Where a group is: its file, its first byte, the byte after its last one, and the number of its first line."""

    file: Path
    start: int
    end: int
    row: int


class SavedRun(NamedTuple):
    """The groups that a run saved. `task_keys` [groups] identify their tasks; `sha256` is that of all files in order.

    `tokens_max` is the largest token id. The trajectories of the first `removed` steps are missing on purpose.
    """

    folder: Path
    places: list[GroupBytes]
    task_keys: list[tuple[str, str]]
    rollouts: int
    tokens_max: int
    sha256: str
    removed: int = 0

    @property
    def notes(self) -> list[str]:
        """A note if the run has removed the trajectories of earlier steps."""
        if not self.removed:
            return []
        kept = f"{self.folder} has the trajectories of {counted(len(self.files), 'step')}"
        return [f"{kept}; those of the {counted(self.removed, 'step')} before were removed by {REMOVED_BY}"]

    @property
    def files(self) -> list[Path]:
        """The files, in the order of steps."""
        return list(dict.fromkeys(place.file for place in self.places))

    @property
    def as_manifest(self) -> dict[str, Any]:
        """What was read, for a manifest."""
        counts = {"files": len(self.files), "groups": len(self.places), "rollouts": self.rollouts}
        return {"run": str(self.folder), **counts, "sha256": self.sha256}

    def group(self, index: int) -> Group:
        """Read one group. Raises ConfigError if its file has changed since."""
        place = self.places[index]
        try:
            with open_regular(place.file) as file:
                file.seek(place.start)
                rows = file.read(place.end - place.start).splitlines()
        except OSError as error:
            raise ConfigError(f"{place.file} cannot be read: {error.strerror or error}") from error
        return as_group([read_line(raw, place.file, row) for row, raw in enumerate(rows, place.row)])


def open_saved(run: str) -> SavedRun:
    """Check the trajectories of the run in this folder. Raises ConfigError if there is no run, if it saved none, and
    for the first line that cannot be read.
    """
    folder = saved_folder(run)
    files = sorted((folder / "trajectories").glob(f"{STEP}*.jsonl"))
    noted = removed_steps(folder)
    removed = noted - sum((step_of_file(file) or 0) < noted for file in files)  # a kill may have left some of them
    places, keys, rollouts, tokens_max, digest = list[GroupBytes](), list[tuple[str, str]](), 0, -1, hashlib.sha256()
    for file in files:
        for place, lines in _groups_in(file, digest):
            own = [line for line in lines if not line.is_of_other]
            places.append(place)
            keys.append((own[0].task.env, own[0].task.key))
            rollouts += len({line.rollout for line in own})
            tokens = [max(segment.tokens, default=-1) for line in own for segment in line.segments]
            tokens_max = max(tokens_max, *tokens) if tokens else tokens_max
    if not places:
        lost = f"; those of {counted(removed, 'step')} were removed by {REMOVED_BY}" if removed else ""
        raise ConfigError(
            f"{run} has no trajectories of training steps (trajectories/{STEP}*.jsonl){lost}: give a run of mode rl "
            "that has finished a step"
        )
    return SavedRun(folder, places, keys, rollouts, tokens_max, digest.hexdigest(), removed)


class SavedRuns(NamedTuple):
    """The groups of several runs without held-out tasks: `places` are (run, group). `held_out` groups were left out."""

    runs: tuple[SavedRun, ...]
    places: list[tuple[int, int]]
    held_out: int

    def group(self, position: int) -> Group:
        """Read the group at a position. Raises ConfigError if its file has changed since."""
        run, index = self.places[position]
        return self.runs[run].group(index)

    @property
    def as_manifest(self) -> dict[str, Any]:
        """What was read, for a manifest."""
        return {"from": [run.as_manifest for run in self.runs]}

    def notes(self, settings: Settings, tokenizer: Any) -> list[str]:
        """How much a run with these settings reads of it. Raises ConfigError for token ids of another tokenizer."""
        epochs = settings.steps * settings.prompts_per_step / len(self.places)
        many = f"{counted(len(self.places), 'saved group')}; {counted(settings.steps, 'step')}"
        notes = [f"{many} of {settings.prompts_per_step} visit each {epochs:.1f} times, if none is passed over"]
        if self.held_out:
            notes.append(f"{counted(self.held_out, 'saved group')} of held-out tasks are left out")
        notes += [note for run in self.runs for note in run.notes]
        return [*notes, *_check_tokenizer(self, settings.model, tokenizer)]


def open_runs(settings: Settings, held_out: Sequence[Task]) -> SavedRuns:
    """Check the trajectories of the runs `--from`. Raises ConfigError for what cannot be read, if only held-out tasks
    are left, and for a run that sampled at another temperature.
    """
    runs = tuple(open_saved(run) for run in settings.from_run)
    for run in runs:
        sampled_at = _settings_of(run).get("temperature", Settings.temperature)
        if sampled_at != settings.temperature:
            raise ConfigError(
                f"--from {run.folder} was sampled at temperature {sampled_at}, and this run has "
                f"{settings.temperature:g}, which its logprobs do not fit\n"
                "leave --temperature out, or train on runs of one temperature"
            )
    aliases = {alias for run in runs for alias, _ in run.task_keys}
    keys = {alias: held_out_keys(held_out, alias) for alias in aliases}
    everything = [(number, index) for number, run in enumerate(runs) for index in range(len(run.places))]
    tasks = {(number, index): runs[number].task_keys[index] for number, index in everything}
    places = [place for place, (alias, key) in tasks.items() if key not in keys[alias]]
    if not places:
        raise ConfigError("--from: every saved group is of a held-out task; hold out fewer: --eval-tasks 0")
    return SavedRuns(runs, places, len(everything) - len(places))


def _check_tokenizer(saved: SavedRuns, model: str, tokenizer: Any) -> list[str]:
    """Raise ConfigError if the saved token ids are not those of the model's tokenizer. Returns a note for each run
    whose own tokenizer cannot be loaded.
    """
    notes, own = [], tokenizer.get_vocab()
    for run in saved.runs:
        theirs = str(_settings_of(run).get("model", Settings.model))
        advice = f"--from {run.folder}: its token ids are of {theirs}, and {model} has another tokenizer"
        if run.tokens_max >= len(tokenizer):
            raise ConfigError(f"{advice}; leave --model out, or give a model of the same family")
        if theirs == model:
            continue
        try:
            known = load_tokenizer(theirs).get_vocab()
        except UserError as error:
            notes.append(f"--from {run.folder}: that its tokenizer is the model's is not checked: {first_line(error)}")
            continue
        if known != own:
            raise ConfigError(f"{advice}; leave --model out, or give a model of the same family")
    return notes


def _settings_of(run: SavedRun) -> Tree:
    return load_file(run.folder / CONFIG)[0]


def groups_of_file(file: Path) -> list[Group]:
    """All groups of one file, in order. Raises ConfigError for a line that cannot be read."""
    return [as_group(lines) for _, lines in _groups_in(file, hashlib.sha256())]


def as_group(lines: Sequence[SavedLine]) -> Group:
    """The group of these lines. The trajectories of other models' roles are the `others` of their episode."""
    episodes: dict[int, list[SavedLine]] = {}
    for line in lines:
        episodes.setdefault(line.rollout, []).append(line)
    found = tuple(_as_episode(each) for each in episodes.values())
    return Group(found[0].order[0], found[0].task, found, role=found[0].role)


def _as_episode(lines: Sequence[SavedLine]) -> Episode:
    own = [line for line in lines if not line.is_of_other]
    judged = next((place for place, line in enumerate(own) if line.judged), len(own) - 1)
    chosen, trajectories = own[judged], [line.trajectory() for line in own]
    metrics = dict(chosen.judging)
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + value
    return Episode(
        (chosen.group, chosen.rollout),
        chosen.task,
        trajectories,
        Score(chosen.reward, chosen.parts, chosen.why, chosen.weights, chosen.turns),
        metrics,
        judged,
        role=chosen.role,
        others=tuple(line.trajectory() for line in lines if line.is_of_other),
    )


def _groups_in(file: Path, digest: Any) -> Iterator[tuple[GroupBytes, list[SavedLine]]]:
    """The lines of each group. The roles of a prompt are groups of their own. A line of another model's role belongs to
    the episode whose lines follow.
    """
    content = _content(file)
    digest.update(content)
    rows = content.splitlines(keepends=True)
    lines = [read_line(raw, file, row) for row, raw in enumerate(rows, start=1)]
    ends = list(itertools.accumulate(map(len, rows)))
    keys: list[tuple[int, str]] = []
    for row, line in reversed(list(enumerate(lines, start=1))):
        if line.is_of_other and not keys:
            raise ConfigError(f"{file}, line {row}: the lines of this episode's other roles are missing")
        keys.append(keys[-1] if line.is_of_other else (line.group, line.role))
    keys.reverse()
    seen: set[tuple[int, str]] = set()
    first = 0
    for key, same in itertools.groupby(keys):
        end = first + len(list(same))
        if key in seen:
            raise ConfigError(f"{file}, line {first + 1}: group {key[0]} again; the lines of a group follow each other")
        seen.add(key)
        yield GroupBytes(file, ends[first] - len(rows[first]), ends[end - 1], first + 1), lines[first:end]
        first = end


def _content(file: Path) -> bytes:
    try:
        return read_regular(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error


def read_line(raw: bytes, file: Path, row: int) -> SavedLine:
    """One line, checked. Raises ConfigError with its file and number."""
    try:
        line = _DECODER.decode(raw)
        for segment in line.segments:
            segment.check()
    except (msgspec.DecodeError, UnicodeDecodeError, AssertionError) as error:  # `check` asserts
        raise ConfigError(in_lines(f"{file}, line {row}: {error}", _version_hint(file))) from error
    return line


def _version_hint(file: Path) -> str:
    """Which version of rollouts wrote the file, if it was another one."""
    written = read_json(file.parents[1] / MANIFEST).get("rollouts")
    if written in (None, __version__):
        return "the line is damaged: remove its group from the file, or restore the file"
    return f"rollouts {written} wrote this run, and this is rollouts {__version__}"
