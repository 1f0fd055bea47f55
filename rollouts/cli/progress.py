"""Progress that a person likes to watch: a line that moves where there is a terminal, plain lines where there is none.

Once in a while one sampled conversation is shown, and at the end a table of before and after.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollouts.cli.terminal import Terminal, number_words
from rollouts.types import Message, Trajectory

if TYPE_CHECKING:
    from rich.console import Console

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
        self._terminal = Terminal(console)
        self._steps = 0
        self._first: int | None = None  # the step that this process began with
        self._started = time.perf_counter()
        self._before: dict[str, Any] | None = None
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
        self._terminal.say(
            f"{plan.env_name} · {plan.one('loss').name} · {settings.model}{lora} · "
            f"{settings.steps} steps of {size} · lr {plan.lr:g} · seed {settings.seed}"
        )
        self._terminal.say(f"writing to {folder}")
        for note in notes:
            self.note(note)

    def evaluation(self, when: str, evaluation: dict[str, Any]) -> None:
        """One line; the table comes at the end."""
        sampled, greedy = (number_words(evaluation[name]) for name in ("reward_mean", "greedy_mean"))
        self._terminal.say(f"held-out, {when}: sampled {sampled}, greedy {greedy} ({_tasks(evaluation, ' tasks')})")
        if when == "before":
            self._before = evaluation
            self._started = time.perf_counter()

    def step(self, step: int, metrics: dict[str, float], groups: Sequence[Group]) -> None:
        """The step's numbers; now and then a conversation."""
        done = step + 1
        self._first = step if self._first is None else self._first
        words = self._words(metrics)
        if self._terminal.console.is_terminal:
            self._terminal.advance(done, self._steps, words)
        elif step == self._first or done == self._steps or done % max(1, self._steps // LINES) == 0:
            self._terminal.say(f"step {done}/{self._steps}  {words}  {self._left(done)}")
        if groups and step % max(1, self._steps // CONVERSATIONS) == 0:
            self._converse(done, groups)

    def note(self, words: str) -> None:
        """One line."""
        self._terminal.say(f"note: {words}")

    def faults(self, faults: Sequence[PluginFault]) -> None:
        """Each fault once."""
        self._terminal.tell_faults(faults)

    def end(self, summary: dict[str, Any]) -> None:
        """The closing table, where the run was finished."""
        self._terminal.stop()
        if summary["status"] != "done":
            return
        before, after = summary["evaluation"]["before"], summary["evaluation"]["after"]
        if before and after:
            self._table(before, after)
        first = summary.get("resumed_from", 0)
        more = "more " if first else ""
        self._terminal.say(
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

    def _converse(self, done: int, groups: Sequence[Group]) -> None:
        episode = groups[0].episodes[0]
        reward = number_words(episode.score.value)
        self._terminal.say(f"--- a rollout of step {done} (reward {reward}, {episode.status.value})")
        for line in conversation_lines(episode.trajectory):
            self._terminal.say(f"    {line}")
        for problem in filter(None, (episode.trajectory.error, episode.score.why)):
            self._terminal.say(f"    ({problem})")

    def _table(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        from rich.table import Table

        table = Table(title=f"held-out tasks ({_tasks(after)})", title_justify="left")
        for name in ("", "before", "after"):
            table.add_column(name, justify="left" if not name else "right")
        rows = [("reward, sampled", "reward_mean"), ("reward, greedy", "greedy_mean")]
        for label, name in rows:
            table.add_row(label, number_words(before[name]), number_words(after[name]))
        for part in after["parts"]:
            table.add_row(f"  {part}", number_words(before["parts"].get(part)), number_words(after["parts"][part]))
        for alias, own in after.get("environments", {}).items():
            earlier = before.get("environments", {}).get(alias, {})
            for label, name in rows:
                table.add_row(f"{alias}: {label}", number_words(earlier.get(name)), number_words(own[name]))
        self._terminal.console.print(table)


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
