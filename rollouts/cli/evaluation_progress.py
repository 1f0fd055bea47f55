"""What `rollouts eval` shows: how far it is, and a short table at the end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from rollouts.compose.evaluation_plan import EvaluationPlan
    from rollouts.plugins.manager import PluginFault

__all__ = ["EvaluationProgress"]

LINES = 10  # plain lines of a whole evaluation, where the output is no terminal


class EvaluationProgress:
    """Implements `rollouts.compose.evaluation.EvaluationWatcher` on standard output."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console

        self._console = console or Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._episodes = 0
        self._folder = Path()
        self._told: set[str] = set()

    def begin(self, plan: EvaluationPlan, folder: Path, episodes: int, notes: Sequence[str]) -> None:
        """Say what is played and where it is written."""
        settings = plan.settings
        self._episodes, self._folder = episodes, folder
        samples = settings.samples_per_prompt
        size = f"{episodes // samples} tasks" + (f" × {samples}" if samples > 1 else "")
        self._say(
            f"{plan.env_name} · {settings.model} · {plan.one('inference').name} · {size} · temperature "
            f"{settings.temperature:g} · seed {settings.seed}"
        )
        self._say(f"writing to {folder}")
        for note in notes:
            self._say(f"note: {note}")

    def episode(self, done: int, reward_mean: float | None) -> None:
        """How far it is."""
        words = f"reward {_number(reward_mean)}"
        if self._console.is_terminal:
            self._advance(done, words)
        elif done == self._episodes or done % max(1, self._episodes // LINES) == 0:
            self._say(f"{done}/{self._episodes}  {words}")

    def faults(self, faults: Sequence[PluginFault]) -> None:
        """Each fault once."""
        for fault in faults:
            if str(fault) not in self._told:
                self._told.add(str(fault))
                self._say(f"plugin fault: {fault}")

    def end(self, summary: dict[str, Any]) -> None:
        """The table: all together, then each environment where there are several."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if not summary["episodes"]:
            return
        from rich.table import Table

        several = summary.get("environments", {})
        table = Table(title=_title(summary), title_justify="left", show_header=bool(several))
        table.add_column("")
        for name in ("all", *several) if several else ("",):
            table.add_column(name, justify="right")
        columns = [summary, *several.values()]
        for label, values in _rows(columns):
            table.add_row(label, *values)
        self._console.print(table)
        self._say(f"{summary['wall_seconds']:.0f} s · {self._folder}")

    def _advance(self, done: int, words: str) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        if self._bar is None:
            columns = (
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
            )
            self._bar = Bar(*columns, console=self._console)
            self._task = self._bar.add_task("", total=self._episodes)
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, completed=done, description=words)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False)


def _title(summary: dict[str, Any]) -> str:
    title = f"{summary['tasks']} held-out tasks, {summary['episodes']} episodes"
    left = summary["episodes"] - summary["judged"]
    return title + (f", {left} of them not judged" if left else "")


def _rows(columns: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """The lines of the table: a label, and a value for each column."""
    rows = [("reward", [_with_error(each) for each in columns])]
    for kind, shown in (("pass@k", "pass@{}"), ("parts", "  {}"), ("metrics", "{}")):
        names = dict.fromkeys(name for each in columns for name in each[kind])
        single = kind == "parts" and len(names) == 1  # it is the reward
        rows += [(shown.format(n), [_number(each[kind].get(n)) for each in columns]) for n in names if not single]
    counts = [
        ("truncated", "truncated"),
        ("tool calls", "tool_calls"),
        ("tool failures", "tool_failures"),
    ]
    rows += [(label, [str(each[name]) for each in columns]) for label, name in counts if columns[0][name]]
    for status in columns[0]["failed"]:
        rows.append((f"failed: {status}", [str(each["failed"].get(status, 0)) for each in columns]))
    rows.append(("turns", [_number(each["turns_mean"]) for each in columns]))
    return rows


def _with_error(numbers: dict[str, Any]) -> str:
    error = numbers["reward_stderr"]
    return _number(numbers["reward_mean"]) + (f" ± {error:.3f}" if error is not None else "")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
