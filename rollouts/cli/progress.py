"""Progress that a person likes to watch: a line that moves where there is a terminal, plain lines where there is none.

Once in a while one sampled conversation is shown, and at the end a table of before and after.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollouts.types import Message, Trajectory

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from rollouts.compose.plan import Plan
    from rollouts.plugins.manager import PluginFault
    from rollouts.training.rollout_gen.groups import Group

__all__ = ["Progress"]

CONVERSATIONS = 3  # shown during a run: at the first step, and evenly after it
LINES = 24  # plain lines of a whole run, where the output is no terminal
CHARACTERS_MAX = 400  # of one message


class Progress:
    """Implements `rollouts.compose.watch.Watcher` on standard output."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console

        self._console = console or Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._steps = 0
        self._first: int | None = None  # the step that this process began with
        self._started = time.perf_counter()
        self._before: dict[str, Any] | None = None
        self._told: set[str] = set()
        self._folder = Path()

    def begin(self, plan: Plan, folder: Path, notes: Sequence[str]) -> None:
        """Say what runs and where it is written."""
        settings = plan.settings
        self._steps, self._folder = settings.steps, folder
        self._first, self._before, self._started = None, None, time.perf_counter()  # a run may have a second phase
        size = f"{settings.prompts_per_step} prompts"
        if settings.mode == "rl":
            size += f" × {settings.samples_per_prompt} rollouts"
        lora = f", LoRA rank {settings.lora_rank}" if settings.lora_rank else ""
        self._say(
            f"{plan.env_name} · {plan.one('loss').name} · {settings.model}{lora} · "
            f"{settings.steps} steps of {size} · lr {plan.lr:g} · seed {settings.seed}"
        )
        self._say(f"writing to {folder}")
        for note in notes:
            self._say(f"note: {note}")

    def evaluation(self, when: str, evaluation: dict[str, Any]) -> None:
        """One line; the table comes at the end."""
        sampled, greedy = (_number(evaluation[name]) for name in ("reward_mean", "greedy_mean"))
        self._say(f"held-out, {when}: sampled {sampled}, greedy {greedy} ({_tasks(evaluation, ' tasks')})")
        if when == "before":
            self._before = evaluation
            self._started = time.perf_counter()

    def step(self, step: int, metrics: dict[str, float], groups: Sequence[Group]) -> None:
        """The step's numbers; now and then a conversation."""
        done = step + 1
        self._first = step if self._first is None else self._first
        words = self._words(metrics)
        if self._console.is_terminal:
            self._advance(done, words)
        elif step == self._first or done == self._steps or done % max(1, self._steps // LINES) == 0:
            self._say(f"step {done}/{self._steps}  {words}  {self._left(done)}")
        if groups and step % max(1, self._steps // CONVERSATIONS) == 0:
            self._converse(done, groups)

    def faults(self, faults: Sequence[PluginFault]) -> None:
        """Each fault once."""
        for fault in faults:
            if str(fault) not in self._told:
                self._told.add(str(fault))
                self._say(f"plugin fault: {fault}")

    def end(self, summary: dict[str, Any]) -> None:
        """The closing table, where the run was finished."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if summary["status"] != "done":
            return
        before, after = summary["evaluation"]["before"], summary["evaluation"]["after"]
        if before and after:
            self._table(before, after)
        first = summary.get("resumed_from", 0)
        more = "more " if first else ""
        self._say(
            f"{summary['steps'] - first} {more}steps in {summary['wall_seconds']:.0f} s "
            f"({summary['cpu_seconds']:.0f} s of CPU) · {self._folder}"
        )

    def _words(self, metrics: dict[str, float]) -> str:
        shown = [
            ("reward", "reward/mean", "{:.3f}"),
            ("loss", "policy/loss", "{:+.4f}"),
            ("entropy", "policy/entropy", "{:.3f}"),
            ("gen tok/s", "perf/gen_tok_s", "{:.0f}"),
            ("train tok/s", "perf/train_tok_s", "{:.0f}"),
        ]
        return "  ".join(f"{word} {form.format(metrics[name])}" for word, name, form in shown if name in metrics)

    def _left(self, done: int) -> str:
        here = done - (self._first or 0)
        seconds = (time.perf_counter() - self._started) / here * (self._steps - done)
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d} left"

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
            self._task = self._bar.add_task("", total=self._steps)
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, completed=done, description=words)

    def _converse(self, done: int, groups: Sequence[Group]) -> None:
        episode = groups[0].episodes[0]
        reward = _number(episode.score.value)
        self._say(f"--- a rollout of step {done} (reward {reward}, {episode.status.value})")
        for line in conversation_lines(episode.trajectory):
            self._say(f"    {line}")
        for problem in filter(None, (episode.trajectory.error, episode.score.why)):
            self._say(f"    ({problem})")

    def _table(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        from rich.table import Table

        table = Table(title=f"held-out tasks ({_tasks(after)})", title_justify="left")
        for name in ("", "before", "after"):
            table.add_column(name, justify="left" if not name else "right")
        rows = [("reward, sampled", "reward_mean"), ("reward, greedy", "greedy_mean")]
        for label, name in rows:
            table.add_row(label, _number(before[name]), _number(after[name]))
        for part in after["parts"]:
            table.add_row(f"  {part}", _number(before["parts"].get(part)), _number(after["parts"][part]))
        for alias, own in after.get("environments", {}).items():
            earlier = before.get("environments", {}).get(alias, {})
            for label, name in rows:
                table.add_row(f"{alias}: {label}", _number(earlier.get(name)), _number(own[name]))
        self._console.print(table)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False)


def conversation_lines(trajectory: Trajectory) -> list[str]:
    """A conversation as lines `role: text`, long messages cut."""
    return [f"{message.role}: {_cut(_words_of(message))}" for message in trajectory.messages]


def _words_of(message: Message) -> str:
    called = [
        f"[{call.name}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())})]" for call in message.tool_calls
    ]
    return " ".join(part for part in (message.text.strip(), *called) if part)


def _cut(text: str) -> str:
    flat = text.replace("\n", "⏎ ")
    return flat if len(flat) <= CHARACTERS_MAX else f"{flat[:CHARACTERS_MAX]}… ({len(flat)} characters)"


def _tasks(evaluation: dict[str, Any], word: str = "") -> str:
    """How many tasks; and how many of them could be judged, where that is fewer: the means are over those."""
    tasks, judged = evaluation["tasks"], evaluation["judged"]
    return f"{tasks}{word}" if judged == tasks else f"{tasks}{word}, only {judged} could be judged"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
