"""What a step writes beside `metrics.jsonl`: trajectories, the values of tokens, and when everything happened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollouts.runs.folder import STEP, RunFolder, episode_records
from rollouts.runs.sample_rows import step_rollouts
from rollouts.runs.times import step_times
from rollouts.runs.token_files import token_table
from rollouts.training.loops.rl import StepReport
from rollouts.training.loops.rl_batch import lag_of


def write_step(folder: RunFolder, report: StepReport, *, tokens: bool) -> None:
    """Write the trajectories of a step and, with `tokens`, the values of its tokens. Raises OutputError."""
    folder.write_trajectories(_name(report), step_records(report))
    if tokens:
        folder.write_tokens(_name(report), token_table(report.groups, report.batches))


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
