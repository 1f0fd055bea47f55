"""The display of a running command or program: a live view in a terminal or a notebook, plain lines elsewhere.

A training run also shows a few sampled conversations, and at its end a table of the scores before and after. An
evaluation shows a table of its numbers. Not here: what the live view looks like, and how it is drawn (`panel`).
"""

from __future__ import annotations

import contextlib
import math
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollouts.config.settings import Settings
from rollouts.errors import ConfigError, counted
from rollouts.inference.base import EngineState
from rollouts.loggers.console import STEP_CHARACTERS_MAX, step_words
from rollouts.runs.observer import GENERATING, STEP_PHASES
from rollouts.runs.panel import Draw, NotebookScreen, Panel, TerminalScreen, curve_words, is_terminal, panel_lines
from rollouts.runs.sample_rows import message_words
from rollouts.runs.streams import silent_when_closed
from rollouts.terminal_text import number, visible
from rollouts.types import Episode, Trajectory

if TYPE_CHECKING:
    from rollouts.plugins.manager import PluginFault
    from rollouts.training.rollout_gen.groups import Group

CONVERSATIONS = 3  # how many are shown during a run: one at the first step, the others at equal distances
LINES, EVALUATION_LINES = 24, 10  # the number of plain lines of a whole run, if the output is not a terminal
SECONDS_BETWEEN = 10.0  # between the plain lines of an evaluation of a training run, and before one of another wait
CHARACTERS_MAX = 400  # how much of one message is shown
TOOL_COUNTS = (("tool calls", "tool_calls"), ("tool failures", "tool_failures"))  # rows of the tables


Display = Literal["auto", "live", "lines", "none"]
"""What a run shows: `auto` is the live view in a terminal or a notebook, and plain lines elsewhere."""


@contextlib.contextmanager
def shown_progress(stream: Literal["stdout", "stderr"], display: Display = "auto") -> Iterator[Progress | None]:
    """The display on a stream of this process; None if it shows nothing. It shows nothing more if the stream is
    closed. In a notebook, the stream is standard output. Raises ConfigError for a live view without a terminal.
    """
    if display == "none":
        yield None
        return
    is_notebook = Console().is_jupyter
    stream = "stdout" if is_notebook else stream
    with silent_when_closed(stream):
        # Rich's own output in a notebook is one display for each line, and would flood the cell.
        console = Console(file=getattr(sys, stream), highlight=False, soft_wrap=True, force_jupyter=False)
        is_live = is_notebook or _can_move(console)
        if display == "live" and not is_live:
            what = {"stdout": "standard output", "stderr": "standard error"}[stream]
            raise ConfigError(f"--display live: {what} is no terminal that can redraw lines\ntype: --display lines")
        make_screen = NotebookScreen if is_notebook else partial(TerminalScreen, console)
        progress = Progress(console, make_screen if is_live and display != "lines" else None)
        try:
            yield progress
        finally:
            progress.close()


def _can_move(console: Console) -> bool:
    """Whether the console is a terminal that can redraw lines. FORCE_COLOR makes no pipe one."""
    return console.is_terminal and console.is_interactive and not console.is_dumb_terminal and is_terminal(console.file)


class Progress:
    """An observer (`rollouts.runs.observer`) that prints to standard output, or to another console. With a screen, it
    has a live view in place of the lines of steps.
    """

    def __init__(
        self,
        console: Console | None = None,
        make_screen: Callable[[Draw], TerminalScreen | NotebookScreen] | None = None,
    ) -> None:
        self._console = console or Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._panel = Panel()
        self._screen = make_screen(self._drawn) if make_screen is not None else None
        self._look: Callable[[], Sequence[EngineState]] = tuple
        self._waiting: threading.Timer | None = None
        self._shown_faults: set[str] = set()
        self._total = 0
        self._first: int | None = None  # the first step of this process
        self._started = self._said = time.perf_counter()
        self._folder = Path()

    def _drawn(self, width: int, height: int) -> list[Text]:
        """The live view. Another thread calls this, and an error here must not end a run."""
        try:
            return panel_lines(self._panel, width, height)
        except Exception as error:
            return [Text(f"this view cannot be drawn: {type(error).__name__}")]

    def begin(self, title: str, total: int, folder: Path, notes: Sequence[str]) -> None:
        """Print the title, the folder and the notes."""
        self._total, self._folder = total, folder
        self._first, self._started = None, time.perf_counter()  # a run may have a second phase
        self._panel = Panel(title, total)
        self._say(title)
        self._say(f"writing to {folder}")
        for note in notes:
            self.note(note)

    def phase(self, name: str, done: int = 0, total: int = 0) -> None:
        """Show it in the live view. Elsewhere, print a line if something before the first step takes long."""
        self._panel.begin_phase(name, done, total)
        self._panel.engines = self._look()
        if self._screen is not None:
            self._screen.start()
        elif done == 0:
            self._wait_no_more()
            if name not in STEP_PHASES:
                self._waiting = threading.Timer(SECONDS_BETWEEN, self._say, [f"{name} ..."])
                self._waiting.daemon = True
                self._waiting.start()

    def engines(self, look: Callable[[], Sequence[EngineState]]) -> None:
        """Show them in the live view."""
        self._look = look

    def rollout(self, episode: Episode) -> None:
        """Show it in the live view."""
        self._panel.newest, self._panel.engines = episode, self._look()
        if self._panel.phase == GENERATING:
            self._panel.phase_done += 1

    def evaluation(self, when: str, evaluation: dict[str, Any]) -> None:
        """Print one line. The table follows at the end."""
        sampled, greedy = (number(evaluation[name]) for name in ("reward_mean", "greedy_mean"))
        self._say(f"held-out, {when}: sampled {sampled}, greedy {greedy} ({_tasks(evaluation, 'task')})")
        if when == "before":
            self._started = time.perf_counter()
            self._panel.began = self._panel.clock()

    def evaluating(self, when: str, done: int, total: int) -> None:
        """Show it in the live view, or print a line every `SECONDS_BETWEEN`."""
        if self._screen is not None:
            self.phase(f"held-out, {when}", done, total)
        elif done == 0:
            self._wait_no_more()
            self._said = time.perf_counter()
        elif done < total and time.perf_counter() - self._said >= SECONDS_BETWEEN:
            self._said = time.perf_counter()
            self._say(f"held-out, {when}: {done}/{total}")

    def step(self, step: int, metrics: dict[str, float], groups: Sequence[Group]) -> None:
        """Print the numbers of the step, and for some steps a conversation."""
        done = step + 1
        self._first = step if self._first is None else self._first
        self._panel.end_step(done, metrics)
        if self._screen is not None:
            self._screen.start()
        elif step == self._first or done == self._total or done % max(1, self._total // LINES) == 0:
            words = step_words(metrics, characters_max=math.inf if done == self._total else STEP_CHARACTERS_MAX)
            left = int((time.perf_counter() - self._started) / (done - self._first) * (self._total - done))
            self._say(f"step {done}/{self._total}  {words}  {left // 60}:{left % 60:02d} left")
        if groups and step % max(1, self._total // CONVERSATIONS) == 0:
            self._converse(done, groups)

    def episode(self, done: int, reward_mean: float | None) -> None:
        """Show the progress of an evaluation."""
        words = f"reward {number(reward_mean)}{'' if done == self._total else ' so far, the quickest episodes first'}"
        if self._screen is not None:
            self._panel.end_episode(done, words)
            self._screen.start()
        elif done == self._total or done % max(1, self._total // EVALUATION_LINES) == 0:
            self._say(f"{done}/{self._total}  {words}")

    def note(self, words: str) -> None:
        """Print one line."""
        self._say(f"note: {words}")

    def faults(self, faults: Sequence[PluginFault]) -> None:
        """Print each fault once."""
        for fault in faults:
            if str(fault) not in self._shown_faults:
                self._shown_faults.add(str(fault))
                self._say(f"plugin fault: {fault}")

    def close(self) -> None:
        """Remove the live view. Lines can still be printed."""
        self._wait_no_more()
        if self._screen is not None:
            self._screen.stop()

    def _wait_no_more(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def end(self, summary: dict[str, Any]) -> None:
        """Print warnings, and the tables of the results."""
        self.close()
        if self._screen is not None and len(self._panel.values) > 1:
            self._say(curve_words(self._panel))
        for words in summary.get("warnings", ()):
            self._say(f"warning: {words}")
        if "evaluation" in summary:
            self._end_training(summary)
        elif "rescored" in summary:
            rewards = " -> ".join(number(summary.get(name)) for name in ("reward_mean_before", "reward_mean"))
            self._say(f"reward {rewards} ({counted(summary.get('rollouts', 0), 'rollout')}) · {self._folder}")
            if summary["status"] == "done":
                self._say(f"to train on them, type: rollouts run --from {shlex.quote(str(self._folder))}")
        elif summary.get("episodes"):
            self._console.print(_evaluation_table(summary))
            self._say(f"{summary['wall_seconds']:.0f} s · {self._folder}")

    def finished(self, words: str) -> None:
        """Print the words."""
        self.close()
        self._say(words)

    def _say(self, text: str) -> None:
        self._console.print(visible(text), markup=False)

    def _converse(self, done: int, groups: Sequence[Group]) -> None:
        for group in groups:
            if group.number != groups[0].number:
                break
            episode, whose = group.episodes[0], f"{group.role}, " if group.role else ""
            result = f"{whose}reward {number(episode.score.value)}, {episode.status.value}"
            self._say(f"--- a rollout of step {done} ({result})")
            for line in conversation_lines(episode.trajectory):
                self._say(f"    {line}")
            for problem in filter(None, (episode.trajectory.error, episode.score.why)):
                self._say(f"    ({problem})")

    def _end_training(self, summary: dict[str, Any]) -> None:
        """Print the scores before and after, if the run is done."""
        if summary["status"] != "done":
            return
        whole = Path(summary.get("whole", self._folder))
        folder = shlex.quote(str(whole))
        if "stopped" in summary:
            self._say(f"stopped before step {summary['steps'] + 1} of {self._total}: {summary['stopped']['why']}")
            if summary["stopped"]["by"] == "max_hours":
                self._say(f"to continue, type: rollouts resume {folder}")
        before, after = summary["evaluation"]["before"], summary["evaluation"]["after"]
        if before and after:
            first = [summary["before_sft"]] if summary.get("before_sft") else []
            self._console.print(_comparison_table(*first, before, after))
            self._say_if_noise(before, after, summary.get("eval_tasks", 0), " in RL" if first else "")
        for name, count in summary.get("zero_parts", {}).items():
            self._say(f"the reward part `{name}` was 0 in all {counted(count, 'rollout')}")
        first = summary.get("resumed_from", 0)
        steps = counted(summary["steps"] - first, "more step" if first else "step")
        self._say(
            f"{steps} in {summary['wall_seconds']:.0f} s ({summary['cpu_seconds']:.0f} s of CPU) · {self._folder}"
        )
        if best := summary.get("best"):
            self._say(f"the best checkpoint, with {best['metric']} {best['value']:.3g}: {best['checkpoint']}")
        if summary.get("checkpoint"):
            models = shlex.quote(f"models/{whole.name}")
            self._say(f"next: rollouts chat {folder}, rollouts eval {folder}, rollouts export {folder} {models}")

    def _say_if_noise(self, before: dict[str, Any], after: dict[str, Any], asked: int, phase: str) -> None:
        """Print that the change is within the noise, if it is. `asked` is --eval-tasks; `phase` says in which phase of
        a run of mode sft+rl.
        """
        from rollouts.evaluate import is_within_noise

        if is_within_noise(before, after):
            tasks = after["tasks"]
            more = f"more held-out tasks measure it better: --eval-tasks {max(Settings.eval_tasks, 4 * tasks)}"
            if tasks < asked:
                more = "this environment holds out no more; give each split its own tasks, and more"
            noise = f"is smaller than the noise of {counted(tasks, 'task')}"
            self._say(f"the change of the sampled reward{phase} {noise}; {more}")


Rows = list[tuple[str, list[str]]]
"""A label, and a cell for each column."""


def _comparison_table(*evaluations: dict[str, Any]) -> Table:
    """The evaluations before and after, or before, after the supervised phase and after reinforcement."""
    after = evaluations[-1]
    both = [("reward, sampled", "reward"), ("reward, greedy", "greedy")]
    rows: Rows = []
    for (label, name), parts in zip(both, ("parts", "greedy_parts"), strict=True):
        rows.append((label, [_with_error(each, name) for each in evaluations]))
        rows += _named_rows(evaluations, parts, _parents_first(after.get(parts, {}), after), _part_label(after))
    rows += _named_rows(evaluations, "metrics", after.get("metrics", {}), "{}, sampled".format)
    several = [_several(each) for each in evaluations]
    for alias in several[-1]:
        own = [each.get(alias, {}) for each in several]
        rows += [(f"{alias}: {label}", [_with_error(each, name) for each in own]) for label, name in both]
    for label, name in TOOL_COUNTS:
        counts = [each.get(name) for each in evaluations]  # an older run has none
        if any(counts):
            rows.append((f"{label}, sampled", ["–" if count is None else str(count) for count in counts]))
    columns = ["before", "after"] if len(evaluations) == 2 else ["before", "after SFT", "after RL"]
    return _table(f"held-out tasks ({_tasks(after)})", columns, rows)


def _named_rows(
    columns: Sequence[Mapping[str, Any]], kind: str, names: Iterable[str], label: Callable[[str], str]
) -> Rows:
    """A row for each of these numbers of a kind. An older run has none."""
    return [(label(name), [number(each.get(kind, {}).get(name)) for each in columns]) for name in names]


def _several(numbers: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The numbers of each environment and of each role."""
    found: dict[str, dict[str, Any]] = dict(numbers.get("roles", {}))
    for alias, own in numbers.get("environments", {}).items():
        found |= {alias: own} | {f"{alias}/{role}": each for role, each in own.get("roles", {}).items()}
    return found


def _parents_first(parts: Iterable[str], numbers: dict[str, Any]) -> list[str]:
    """The rewards that are added up, then the parts of a `Score`, which are only logged."""
    weights = numbers.get("weights", {})
    return sorted(parts, key=lambda part: bool(weights) and part not in weights)


def _part_label(numbers: dict[str, Any]) -> Callable[[str], str]:
    """The label of a part of the reward, with its weight if it is not 1. A part of a `Score` is indented more."""
    weights = numbers.get("weights", {})

    def label(part: str) -> str:
        indent = "    " if weights and part not in weights else "  "
        weight = weights.get(part, 1)
        return f"{indent}{part}" if weight == 1 else f"{indent}{part} × {weight:g}"

    return label


def _evaluation_table(summary: dict[str, Any]) -> Table:
    """The numbers of all tasks together. If there are several environments or roles, also the numbers of each."""
    several = _several(summary)
    columns = [summary, *several.values()]
    rows: Rows = [("reward", [_with_error(each) for each in columns])]
    if "reduce" in summary:
        rows.append((f"reward, {reduced_words(summary)}", [_with_error(each, "reduced") for each in columns]))
    rows += _named_rows(columns, "pass@k", _names(columns, "pass@k"), "pass@{}".format)
    # With one sample, pass^k is pass@k; and a single part is the reward itself.
    rows += _named_rows(columns, "pass^k", (k for k in _names(columns, "pass^k") if k != "1"), "pass^{}".format)
    if len(parts := _names(columns, "parts")) > 1:
        rows += _named_rows(columns, "parts", _parents_first(parts, summary), _part_label(summary))
    rows += _named_rows(columns, "metrics", _names(columns, "metrics"), str)
    counts = (("truncated", "truncated"), *TOOL_COUNTS)
    rows += [(label, [str(each[name]) for each in columns]) for label, name in counts if summary[name]]
    rows += [(f"failed: {s}", [str(each["failed"].get(s, 0)) for each in columns]) for s in summary["failed"]]
    rows.append(("turns", [number(each["turns_mean"]) for each in columns]))
    rows += [(label, [value, *[""] * len(several)]) for label, value in _spent_rows(summary)]
    title = f"{counted(summary['tasks'], 'held-out task')}, {counted(summary['episodes'], 'episode')}"
    unjudged = summary["episodes"] - summary["judged"]
    title += f", {unjudged} of them not judged" if unjudged else ""
    return _table(title, ["all", *several] if several else [], rows)


def _names(columns: Sequence[Mapping[str, Any]], kind: str) -> dict[str, None]:
    return dict.fromkeys(name for each in columns for name in each[kind])


def _spent_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The tokens of an API, and what they cost."""
    tokens, spent = summary["tokens"], summary.get("spent")
    if "prompt_tokens" in tokens:
        yield "tokens in", str(tokens["prompt_tokens"])
        yield "tokens out", str(tokens.get("completion_tokens", 0))
    if spent is not None:
        if spent["dollars"] is not None:
            yield "dollars spent", f"{spent['dollars']:.4f}"
        if spent["cache_hits"]:
            yield "replies from the cache", f"{spent['cache_hits']} of {spent['cache_hits'] + spent['requests']}"


def reduced_words(summary: Mapping[str, Any]) -> str:
    """How the samples of a task became one number.

    >>> reduced_words({"reduce": "best", "samples_per_prompt": 8})
    'best of 8'
    """
    return f"{summary['reduce']} of {summary.get('samples_per_prompt', 1)}"


def _table(title: str, columns: Sequence[str], rows: Rows) -> Table:
    """A table of labels and numbers. Without `columns`, it has one column of numbers and no header."""
    table = Table(title=title, title_justify="left", show_header=bool(columns))
    table.add_column("")
    for name in columns or [""]:
        table.add_column(name, justify="right")
    for label, values in rows:
        table.add_row(Text(visible(label)), *values)
    return table


def conversation_lines(trajectory: Trajectory) -> list[str]:
    """A conversation as lines `role: text`. Long messages are cut."""
    lines = []
    for message in trajectory.messages:
        flat = message_words(message).replace("\n", "⏎ ")
        cut = "" if len(flat) <= CHARACTERS_MAX else f"… ({len(flat)} characters)"
        lines.append(f"{message.role}: {flat[:CHARACTERS_MAX]}{cut}")
    return lines


def _tasks(evaluation: dict[str, Any], word: str = "") -> str:
    """The number of tasks. If some tasks have no reward, also the number of tasks with one."""
    tasks, judged = evaluation["tasks"], evaluation["judged"]
    shown = counted(tasks, word) if word else str(tasks)
    return shown if judged == tasks else f"{shown}, only {judged} could be judged"


def _with_error(numbers: dict[str, Any], name: str = "reward") -> str:
    """A mean, with its standard error if there is one: an older run has none."""
    error = numbers.get(f"{name}_stderr")
    return number(numbers.get(f"{name}_mean")) + (f" ± {error:.3f}" if error is not None else "")
