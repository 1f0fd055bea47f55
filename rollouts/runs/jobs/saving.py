"""When a run saves, whether the disk has room for it, and which earlier checkpoints are removed; the files of a step.

A run saves every `checkpoint_every` steps; without that setting, by the clock: after every `checkpoint_seconds`. It
also saves at its end, and after Ctrl-C. A checkpoint by the clock or after Ctrl-C is only for resuming: the next
checkpoint replaces it. A checkpoint by the clock is skipped if it would leave too little disk space for the checkpoint
at the end. Not here: the content of a checkpoint (`train`).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rollouts.config.settings import Settings
from rollouts.config.stopping import Ranking, read_ranking
from rollouts.errors import suggestion
from rollouts.models.folders import complete_checkpoints
from rollouts.runs.folder import STEP, TOKENS, RunFolder, episode_records
from rollouts.runs.manifest import update_manifest, with_revisions
from rollouts.runs.sample_rows import step_rollouts
from rollouts.runs.times import step_times
from rollouts.training.loops.rl import StepReport
from rollouts.training.loops.rl_batch import lag_of
from rollouts.training.weights.store import prune_checkpoints, remove_checkpoint

Occasion = Literal["", "steps", "clock"]


@dataclass
class Saving:
    """Saves the checkpoints of one run. `bytes_each` is the size of a checkpoint, None while it is unknown. `by_clock`
    is the last checkpoint if the next one replaces it. `evaluates`: the run also evaluates between steps. `warn` gets
    notes for the user.
    """

    folder: RunFolder
    settings: Settings
    bytes_each: int | None
    by_clock: Path | None
    evaluates: bool
    warn: Callable[[str], None]
    _saved_at: float = field(default_factory=time.monotonic)
    _has_warned: bool = False
    _has_warned_of_steps: bool = False
    _steps: int = 0
    _step_bytes: int = 0

    def occasion(self, done: int) -> Occasion:
        """Whether to save after `done` steps, and by which rule. The end of the run always saves."""
        settings = self.settings
        if done >= settings.steps:
            return ""
        if settings.checkpoint_every:
            return "steps" if done % settings.checkpoint_every == 0 else ""
        if not 0 < settings.checkpoint_seconds <= time.monotonic() - self._saved_at:
            return ""
        return "clock" if self._has_room_by_clock() else ""

    def begin(self, first: int) -> None:
        """Warn if the disk has no room for the checkpoints that a run which begins after `first` steps will keep."""
        settings, each = self.settings, self.bytes_each
        if each is None:
            return
        count = settings.keep_checkpoints + 2 if settings.checkpoint_seconds else 1
        if settings.checkpoint_every:
            several = -(-(settings.steps - first) // settings.checkpoint_every)
            count = min(several, settings.keep_checkpoints + 2) if settings.keep_checkpoints else several
        if count * each > self._free():
            what = "the checkpoint takes" if count == 1 else f"{count} checkpoints take"
            self._has_warned = True
            self.warn(
                f"warning: {what} about {size_words(count * each)}, and the disk of {self.folder.shown} has "
                f"{size_words(self._free())} free; make room, or keep fewer (--keep-checkpoints)"
            )

    def watch(self, done: int) -> None:
        """Call this after each step, when `done` are done. It warns once if the next checkpoint would not fit any more,
        and once if the trajectories of the steps that are left would not.
        """
        self._watch_trajectories(done)
        lacks = self.bytes_each is not None and self._free() < self.bytes_each
        if lacks and not self._has_warned:
            self.warn(
                f"warning: the next checkpoint takes about {size_words(self.bytes_each or 0)}, and the disk of "
                f"{self.folder.shown} has {size_words(self._free())} free; make room before it is written"
            )
        self._has_warned = lacks

    def _watch_trajectories(self, done: int) -> None:
        """Warn if the trajectories of the steps that are left, as large as those of this process so far, and the last
        checkpoint need more room than there is.
        """
        settings = self.settings
        files = [self.folder.path / "trajectories" / f"{STEP}{done - 1:06d}{end}" for end in (".jsonl", TOKENS)]
        self._step_bytes += sum(file.stat().st_size for file in files if file.exists())
        self._steps += 1
        kept = (
            settings.steps if settings.keep_trajectories == "all" else min(settings.steps, settings.keep_trajectories)
        )
        left = kept - min(done, kept)  # a later step replaces an earlier one
        need = left * self._step_bytes / self._steps
        lacks = need > 0 and need + (self.bytes_each or 0) > self._free()
        if lacks and not self._has_warned_of_steps:
            self.warn(
                f"warning: the trajectories of the {left} steps to come take about {size_words(need)}, and the disk of "
                f"{self.folder.shown} has {size_words(self._free())} free; make room, or resume the run with "
                "--keep-trajectories 10"
            )
        self._has_warned_of_steps = lacks

    def saved(self, path: Path, occasion: Occasion, pending: Path | None = None) -> None:
        """Record a written checkpoint in the run's manifest, then remove checkpoints that are not kept. The weights of
        a `pending` one are being evaluated, so it may become the best. Raises OutputError, CheckpointError.
        """
        folder, keep = self.folder, self.settings.keep_checkpoints
        now = {"checkpoint": folder.relative(path)}
        for note in update_manifest(folder, lambda before: with_revisions(before) | now):
            self.warn(note)
        if keep:
            prune_checkpoints(folder.checkpoints, keep, pending)
        elif self.by_clock is not None and self.by_clock != path and self.by_clock.exists():
            remove_checkpoint(self.by_clock)
        self.by_clock = path if occasion == "clock" else None
        self.bytes_each = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        self._saved_at = time.monotonic()

    @property
    def ranking(self) -> Ranking:
        """What makes a checkpoint the best."""
        if self.settings.keep_best:
            return read_ranking(self.settings.keep_best)
        is_supervised = self.settings.mode == "sft"
        name = "policy/loss" if is_supervised else "eval/reward_mean" if self.evaluates else "reward/mean"
        return Ranking(name, not is_supervised)

    def metric(self, metrics: Mapping[str, float]) -> dict[str, Any] | None:
        """The metric of a step that ranks its checkpoint; None if the step does not have it, or not yet."""
        ranking = self.ranking
        is_due = "eval/" not in ranking.metric or any(name.startswith("eval/") for name in metrics)
        if self.settings.keep_best and is_due and ranking.metric not in metrics:
            hint = suggestion(ranking.metric, metrics) or f"it has: {', '.join(sorted(metrics))}"
            self.warn(f"warning: --keep-best {ranking.metric}: this step has no such metric; {hint}")
        return ranking.value(metrics)

    def unsaved(self, saved: int, steps: int) -> str:
        """The beginning of a message: of `steps` steps, only the first `saved` are in a checkpoint. "" if all are."""
        if saved >= steps:
            return ""
        path = self.folder.checkpoint_path(saved)
        last = f" ({self.folder.relative(path)})" if path.exists() else ""
        lost = f"the steps since the last checkpoint{last} are not saved; "
        return lost if saved else "no checkpoint was written, so these steps are not saved; "

    def failed_by_clock(self, error: Exception) -> None:
        """Handle a checkpoint by the clock that did not fit: warn, and wait for the next `checkpoint_seconds`."""
        self._saved_at = time.monotonic()
        self.warn(f"warning: {error}; the run goes on, and tries again")

    def _has_room_by_clock(self) -> bool:
        """Whether the disk has room for a checkpoint now and for the last one. If not, the next attempt is after
        `checkpoint_seconds`.
        """
        if self.bytes_each is None:
            return True
        free, keep = self._free(), self.settings.keep_checkpoints
        replaces = len(complete_checkpoints(self.folder.checkpoints)) > keep if keep else self.by_clock is not None
        if free >= self.bytes_each and free + (self.bytes_each if replaces else 0) >= 2 * self.bytes_each:
            return True
        self._saved_at = time.monotonic()
        self.warn(
            f"warning: no checkpoint was written: each takes about {size_words(self.bytes_each)}, the disk of "
            f"{self.folder.shown} has {size_words(free)} free, and the last one needs room too; a run that dies now "
            "goes on from an earlier one"
        )
        return False

    def _free(self) -> int:
        return shutil.disk_usage(self.folder.path).free


def size_words(count: float) -> str:
    """A number of bytes, readable.

    >>> size_words(3 * 2**30), size_words(1_000_000)
    ('3.0 GiB', '1.0 MiB')
    """
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 / 10 else f"{count / 2**20:.1f} MiB"


def profiled_steps(first: int, steps: int, count: int) -> range:
    """The steps (0-based) to profile. The first step of the process is not profiled, because it warms up, unless it is
    the only one.

    >>> profiled_steps(0, 10, 2), profiled_steps(4, 5, 2), profiled_steps(5, 5, 2)
    (range(1, 3), range(4, 5), range(5, 5))
    """
    begin = first + 1 if steps - first > 1 else first
    return range(begin, min(begin + count, steps))


def write_step(folder: RunFolder, report: StepReport, *, tokens: bool) -> None:
    """Write the trajectories of a step and, with `tokens`, the values of its tokens. Raises OutputError."""
    folder.write_trajectories(_name(report), step_records(report))
    if tokens:
        from rollouts.runs.token_files import encode_table, token_table

        folder.write_tokens(_name(report), encode_table(token_table(report.groups, report.batches)))


def write_times(folder: RunFolder, report: StepReport) -> None:
    """Write when the phases and episodes of a step were, which ends now. Raises OutputError."""
    episodes = [episode for group in report.groups for episode in group.episodes]
    folder.write_times(_name(report), step_times(report.phases, episodes))


def step_records(report: StepReport) -> list[dict[str, Any]]:
    """The lines of `trajectories/step_*.jsonl`, each with the age of its oldest token (`staleness`, in steps)."""
    return [
        record | _age(record, report.state.start_versions)
        for each in step_rollouts(report)
        for record in episode_records(each.episode, advantage=each.advantage, dropped=each.dropped)
    ]


def _age(record: Mapping[str, Any], start_versions: Sequence[int]) -> dict[str, int]:
    known = [version for segment in record["segments"] for version in segment["versions"] if version >= 0]
    return {"staleness": lag_of(min(known), start_versions)} if known else {}


def _name(report: StepReport) -> str:
    return f"{STEP}{report.step:06d}"
