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

import trio

from rollouts.config.settings import Settings
from rollouts.config.stopping import Ranking, read_ranking
from rollouts.errors import CheckpointError, RolloutsError, suggestion
from rollouts.models.folders import complete_checkpoints
from rollouts.runs.folder import STEP, TOKENS, RunFolder, episode_records
from rollouts.runs.manifest import update_manifest, with_revisions
from rollouts.runs.sample_rows import step_rollouts
from rollouts.runs.times import step_times
from rollouts.training.batches import TrainingBackend
from rollouts.training.loops.rl import StepReport
from rollouts.training.loops.rl_batch import lag_of
from rollouts.training.weights.store import prune_checkpoints, remove_checkpoint

Occasion = Literal["", "steps", "clock"]
SAVE_SECONDS = 1800.0


@dataclass
class Saver:
    """Saves the checkpoints of one run. `bytes_each` is the size of a checkpoint, None while it is unknown. `by_clock`
    is the last checkpoint if the next one replaces it. `saved` steps are in a checkpoint. `evaluates`: the run also
    evaluates between steps. `warn` gets notes for the user.
    """

    folder: RunFolder
    settings: Settings
    backend: TrainingBackend
    saved: int
    by_clock: Path | None
    evaluates: bool
    warn: Callable[[str], None]
    _saved_at: float = field(default_factory=time.monotonic)
    _full: set[str] = field(default_factory=set)  # what the disk has no room for, after the warning
    _steps: int = 0
    _step_bytes: int = 0

    def __post_init__(self) -> None:
        self.bytes_each = self.backend.checkpoint_bytes

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

    async def save(self, done: int, state: dict[str, Any], occasion: Occasion, pending: int) -> bool:
        """Write a checkpoint that transformers loads, tokenizer and template included, with everything that a resume
        needs; then remove older checkpoints, as the settings say. The weights after `pending` steps are being
        evaluated. Returns False if a checkpoint by the clock was not written because the disk has no room.

        The files to which it refers are flushed to the disk first, so that a crash of the machine loses none of them.
        """
        path = self.folder.checkpoint_path(done)
        await trio.to_thread.run_sync(self.folder.sync)
        try:
            with trio.fail_after(SAVE_SECONDS):
                await self.backend.save(str(path), state)
        except trio.TooSlowError as error:
            words = f"the checkpoint {path} was not written in {SAVE_SECONDS:g} s; check the disk"
            raise CheckpointError(words) from error
        except CheckpointError as error:
            if occasion != "clock" or not error.is_full:
                raise
            self._saved_at = time.monotonic()  # tries again after the next `checkpoint_seconds`
            self.warn(f"warning: {error}; the run goes on, and tries again")
            return False
        await trio.to_thread.run_sync(self._record, done, occasion, pending)
        return True

    def save_now(self, done: int, state: dict[str, Any], pending: int) -> bool:
        """Like `save`, after Ctrl-C: it blocks, reports errors, and returns whether it was written."""
        self.warn(f"interrupted: saving step {done}")
        try:
            self.folder.sync()
            self.backend.save(str(self.folder.checkpoint_path(done)), state).wait(SAVE_SECONDS)
            self._record(done, "clock", pending)
        except (RolloutsError, TimeoutError) as error:
            self.warn(f"warning: the checkpoint was not written: {error}")
            return False
        return True

    def _record(self, done: int, occasion: Occasion, pending: int) -> None:
        """Record a written checkpoint in the run's manifest, then remove checkpoints that are not kept. The one whose
        weights are being evaluated may become the best. Raises OutputError, CheckpointError.
        """
        folder, keep, path = self.folder, self.settings.keep_checkpoints, self.folder.checkpoint_path(done)
        self.saved = done
        now = {"checkpoint": folder.relative(path)}
        for note in update_manifest(folder, lambda before: with_revisions(before) | now):
            self.warn(note)
        if keep:
            prune_checkpoints(folder.checkpoints, keep, folder.checkpoint_path(pending) if pending else None)
        elif self.by_clock is not None and self.by_clock != path and self.by_clock.exists():
            remove_checkpoint(self.by_clock)
        self.by_clock = path if occasion == "clock" else None
        self.bytes_each = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        self._saved_at = time.monotonic()

    def begin(self, first: int) -> None:
        """Warn if the disk has no room for the checkpoints that a run which begins after `first` steps will keep."""
        settings = self.settings
        count = settings.keep_checkpoints + 2 if settings.checkpoint_seconds else 1
        if settings.checkpoint_every:
            several = -(-(settings.steps - first) // settings.checkpoint_every)
            count = min(several, settings.keep_checkpoints + 2) if settings.keep_checkpoints else several
        what = "the checkpoint takes" if count == 1 else f"{count} checkpoints take"
        advice = "make room, or keep fewer (--keep-checkpoints)"
        self._warn_if_full("checkpoint", count * (self.bytes_each or 0), what, advice)

    def watch(self, done: int) -> None:
        """Call this after each step, when `done` are done. It warns once if the next checkpoint would not fit any more,
        and once if it and the trajectories of the steps that are left, as large as those so far, would not.
        """
        settings = self.settings
        files = [self.folder.path / "trajectories" / f"{STEP}{done - 1:06d}{end}" for end in (".jsonl", TOKENS)]
        self._step_bytes += sum(file.stat().st_size for file in files if file.exists())
        self._steps += 1
        kept = settings.steps if settings.keep_trajectories == "all" else settings.keep_trajectories
        left = max(0, min(kept, settings.steps) - done)  # a later step replaces an earlier one
        need = left * self._step_bytes / self._steps
        what, advice = (
            f"the trajectories of the {left} steps to come take",
            "resume the run with --keep-trajectories 10",
        )
        if need:
            self._warn_if_full("trajectories", need, what, f"make room, or {advice}", beside=self.bytes_each or 0)
        what, advice = "the next checkpoint takes", "make room before it is written"
        self._warn_if_full("checkpoint", self.bytes_each or 0, what, advice)

    def _warn_if_full(self, topic: str, need: float, what: str, advice: str, *, beside: int = 0) -> None:
        """Warn, once until there is room again, if the disk lacks the bytes that are needed."""
        free = self._free()
        if need + beside <= free:
            self._full.discard(topic)
        elif topic not in self._full:
            self._full.add(topic)
            disk = f"the disk of {self.folder.shown} has {size_words(free)} free"
            self.warn(f"warning: {what} about {size_words(need)}, and {disk}; {advice}")

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

    def metric(self, metrics: Mapping[str, float]) -> dict[str, Any] | None:
        """The metric of a step that ranks its checkpoint; None if the step does not have it, or not yet."""
        ranking = ranking_of(self.settings, evaluates=self.evaluates)
        is_due = "eval/" not in ranking.metric or any(name.startswith("eval/") for name in metrics)
        if self.settings.keep_best and is_due and ranking.metric not in metrics:
            hint = suggestion(ranking.metric, metrics) or f"it has: {', '.join(sorted(metrics))}"
            self.warn(f"warning: --keep-best {ranking.metric}: this step has no such metric; {hint}")
        return ranking.value(metrics)

    def unsaved(self, steps: int) -> str:
        """The beginning of a message if of `steps` steps only the first ones are in a checkpoint; "" if all are."""
        if self.saved >= steps:
            return ""
        path = self.folder.checkpoint_path(self.saved)
        last = f" ({self.folder.relative(path)})" if path.exists() else ""
        lost = f"the steps since the last checkpoint{last} are not saved; "
        return lost if self.saved else "no checkpoint was written, so these steps are not saved; "


def ranking_of(settings: Settings, *, evaluates: bool) -> Ranking:
    """What makes a checkpoint the best. `evaluates`: the run also evaluates between steps."""
    if settings.keep_best:
        return read_ranking(settings.keep_best)
    is_supervised = settings.mode == "sft"
    name = "policy/loss" if is_supervised else "eval/reward_mean" if evaluates else "reward/mean"
    return Ranking(name, not is_supervised)


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
