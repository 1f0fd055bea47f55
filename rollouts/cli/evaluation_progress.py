"""What `rollouts eval` shows: how far it is, and a short table at the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollouts.cli.terminal import Terminal, number_words

if TYPE_CHECKING:
    from rich.console import Console

    from rollouts.compose.evaluation_plan import EvaluationPlan
    from rollouts.plugins.manager import PluginFault

__all__ = ["EvaluationProgress"]

LINES = 10  # plain lines of a whole evaluation, where the output is no terminal


class EvaluationProgress:
    """Implements `rollouts.compose.evaluation.EvaluationWatcher` on standard output."""

    def __init__(self, console: Console | None = None) -> None:
        self._terminal = Terminal(console)
        self._episodes = 0
        self._folder = Path()

    def begin(self, plan: EvaluationPlan, folder: Path, episodes: int, notes: Sequence[str]) -> None:
        """Say what is played and where it is written."""
        settings = plan.settings
        self._episodes, self._folder = episodes, folder
        samples = settings.samples_per_prompt
        size = f"{episodes // samples} tasks" + (f" × {samples}" if samples > 1 else "")
        self._terminal.say(
            f"{plan.env_name} · {settings.model} · {plan.one('inference').name} · {size} · temperature "
            f"{settings.temperature:g} · seed {settings.seed}"
        )
        self._terminal.say(f"writing to {folder}")
        for note in notes:
            self._terminal.say(f"note: {note}")

    def episode(self, done: int, reward_mean: float | None) -> None:
        """How far it is."""
        words = f"reward {number_words(reward_mean)}"
        if self._terminal.console.is_terminal:
            self._terminal.advance(done, self._episodes, words)
        elif done == self._episodes or done % max(1, self._episodes // LINES) == 0:
            self._terminal.say(f"{done}/{self._episodes}  {words}")

    def faults(self, faults: Sequence[PluginFault]) -> None:
        """Each fault once."""
        self._terminal.tell_faults(faults)

    def end(self, summary: dict[str, Any]) -> None:
        """The table: all together, then each environment where there are several."""
        self._terminal.stop()
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
        self._terminal.console.print(table)
        self._terminal.say(f"{summary['wall_seconds']:.0f} s · {self._folder}")


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
        rows += [(shown.format(n), [number_words(each[kind].get(n)) for each in columns]) for n in names if not single]
    counts = [
        ("truncated", "truncated"),
        ("tool calls", "tool_calls"),
        ("tool failures", "tool_failures"),
    ]
    rows += [(label, [str(each[name]) for each in columns]) for label, name in counts if columns[0][name]]
    for status in columns[0]["failed"]:
        rows.append((f"failed: {status}", [str(each["failed"].get(status, 0)) for each in columns]))
    rows.append(("turns", [number_words(each["turns_mean"]) for each in columns]))
    return rows


def _with_error(numbers: dict[str, Any]) -> str:
    error = numbers["reward_stderr"]
    return number_words(numbers["reward_mean"]) + (f" ± {error:.3f}" if error is not None else "")
