"""The live view of a run: its curve, what it does now, and the newest rollout.

`Panel` is what is known of the run, and `panel_lines` draws it. A thread does so twice a second below the lines of a
terminal, or once a second in one output of a notebook.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from rollouts.errors import counted
from rollouts.inference.base import EngineState
from rollouts.loggers.console import SHOWN, step_words
from rollouts.runs.sample_rows import message_words
from rollouts.terminal_text import curve, visible
from rollouts.types import Episode

Draw = Callable[[int, int], list[Text]]
"""Gives the lines of the view for a width and a height."""

REFRESHES_PER_SECOND = 2
NOTEBOOK_SECONDS = 1.0
NOTEBOOK_WIDTH, NOTEBOOK_HEIGHT = 100, 100
_PAGE = '<pre style="white-space:pre;overflow-x:auto;line-height:normal;margin:0">{code}</pre>'

WIDTH_MAX = 110  # columns: a wider panel is hard to read, and breaks when the terminal is made narrower
CURVE_WIDTH, BAR_WIDTH = 40, 24
MESSAGES = 4  # of the newest rollout
HEIGHT_OF_ROLLOUT = 18  # rows of a terminal that has room for a rollout
ENGINES = 3  # how many servers are shown
CURVES = ("reward/mean", "policy/loss")  # the first of them that a run has is the curve
_NUMBERS = tuple(each for each in SHOWN if each[1] != CURVES[0])


@dataclass
class Panel:
    """What is known of the run. The run's thread changes it, and another thread draws it."""

    title: str = ""
    total: int = 0  # steps, or episodes of an evaluation
    done: int = 0
    first: int = 0  # steps of earlier processes
    is_evaluation: bool = False
    phase: str = ""
    phase_done: int = 0
    phase_total: int = 0
    curve_name: str = ""
    values: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    newest: Episode | None = None
    engines: Sequence[EngineState] = ()
    words: str = ""  # in place of the metrics
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.began = self.phase_began = self.clock()

    def begin_phase(self, name: str, done: int, total: int) -> None:
        """The run does this now, and has done so much of it."""
        if name != self.phase or done < self.phase_done:
            self.phase_began = self.clock()
        self.phase, self.phase_done, self.phase_total = name, done, total

    def end_step(self, done: int, metrics: Mapping[str, float]) -> None:
        """A step is done."""
        if not self.metrics:
            self.first = done - 1
        self.done, self.metrics = done, dict(metrics)
        self.curve_name = self.curve_name or next((name for name in CURVES if name in metrics), "")
        if self.curve_name in metrics:
            self.values.append(metrics[self.curve_name])

    def end_episode(self, done: int, words: str) -> None:
        """An episode of an evaluation is done."""
        self.first = self.first if self.is_evaluation else done - 1
        self.is_evaluation, self.done, self.words = True, done, words

    @property
    def seconds_left(self) -> float | None:
        """The time for the other steps, as for those so far; None before the first one."""
        done = self.done - self.first
        return (self.clock() - self.began) / done * (self.total - self.done) if done > 0 else None


def panel_lines(panel: Panel, width: int, height: int = 100) -> list[Text]:
    """The panel, in lines that are less than `width` columns wide, for a terminal with `height` rows."""
    width = max(min(width, WIDTH_MAX) - 1, 10)
    title = f"── {_flat(panel.title)} " if panel.title else ""
    rows = [Text(title + "─" * max(width - len(title), 0), "dim")]
    if panel.total:
        rows.append(_progress_row(panel, width))
    if panel.phase:
        rows.append(_phase_row(panel, width))
    if panel.values:
        rows.append(_curve_row(panel, width))
    if height < 8:
        rows = rows[1:3]
    else:
        if words := panel.words or step_words(panel.metrics, _NUMBERS, characters_max=WIDTH_MAX):
            rows.append(Text(_flat(words)))
        rows += [Text(words, "dim") for words in _engine_words(panel.engines)]
        if panel.newest is not None and height >= HEIGHT_OF_ROLLOUT:
            rows += _rollout_rows(panel.newest)
    for row in rows:
        row.no_wrap = True
        row.truncate(width, overflow="ellipsis")
    return rows


def _progress_row(panel: Panel, width: int) -> Text:
    word = "episode" if panel.is_evaluation else "step"
    row = Text.assemble((f"{word} {panel.done}/{panel.total} ", "bold"))
    left = panel.seconds_left
    words = "" if left is None else f" {clock_words(left)} left" if panel.done < panel.total else " done"
    _append_bar(row, panel.done / panel.total, min(BAR_WIDTH, width - len(row) - len(words)))
    return row.append(words)


def _phase_row(panel: Panel, width: int) -> Text:
    row = Text.assemble((_flat(panel.phase), "cyan"), f" {clock_words(panel.clock() - panel.phase_began)}")
    if panel.phase_total:
        done = min(panel.phase_done, panel.phase_total)  # retries and over-sampling add to what was planned
        words = f"  {done}/{panel.phase_total} "
        row.append(words)
        _append_bar(row, done / panel.phase_total, min(BAR_WIDTH, width - len(row)))
    elif panel.phase_done:
        row.append(f"  {panel.phase_done}")
    return row


def _curve_row(panel: Panel, width: int) -> Text:
    finite = [value for value in panel.values if math.isfinite(value)] or [math.nan]
    name = "reward" if panel.curve_name == CURVES[0] else "loss"
    row = Text.assemble((f"{name} {panel.values[-1]:.3f} ", "bold"))
    words = f" {min(finite):.3f} to {max(finite):.3f}"
    room = width - len(row) - len(words)
    row.append(curve(panel.values, max(min(CURVE_WIDTH, room), 4)), "green")
    return row.append(words) if room >= 4 else row


def curve_words(panel: Panel) -> str:
    """The curve of a run that is over."""
    return f"{_curve_row(panel, WIDTH_MAX).plain} over {counted(len(panel.values), 'step')}"


def _append_bar(row: Text, share: float, width: int) -> None:
    if width >= 4:
        full = round(min(max(share, 0.0), 1.0) * width)
        row.append("━" * full, "green").append("━" * (width - full), "bright_black")


def _engine_words(engines: Sequence[EngineState]) -> list[str]:
    shown = [
        _flat(f"{each.name}: {each.state or f'version {each.version}'}, {each.in_flight} in flight")
        for each in engines[:ENGINES]
    ]
    if more := engines[ENGINES:]:
        shown.append(f"{len(more)} more engines: {sum(each.in_flight for each in more)} in flight")
    return shown


def _rollout_rows(episode: Episode) -> list[Text]:
    reward = "not judged" if episode.score.value is None else f"reward {episode.score.value:.3f}"
    role = f", {_flat(episode.role)}" if episode.role else ""
    rows = [Text(f"the newest rollout{role}: {reward}, {episode.trajectory.status.value}", "italic")]
    messages = episode.trajectory.messages
    chosen = [*messages[:1], *messages[max(1, len(messages) - MESSAGES + 1) :]]
    lines = (f"  {message.role}: {_flat(message_words(message)[: WIDTH_MAX * 2])}" for message in chosen)
    return rows + [Text(line, "dim") for line in lines]


def _flat(text: str) -> str:
    """The text in one line, with nothing that a terminal obeys."""
    return visible(text.replace("\t", " ").replace("\r\n", "\n").replace("\n", "⏎ "))


def clock_words(seconds: float) -> str:
    """Seconds as minutes, or hours and minutes.

    >>> clock_words(83.9), clock_words(3725)
    ('1:23', '1:02:05')
    """
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


# --- where it is drawn ------------------------------------------------------------------------------------------------


class TerminalScreen:
    """Draws the panel at the bottom of a terminal. Other output scrolls above it."""

    def __init__(self, console: Console, draw: Draw) -> None:
        self._console, self._draw = console, draw
        self._live: Live | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._draw(options.max_width, console.height)

    def start(self) -> None:
        """Begin to draw. What is printed to standard output or standard error appears above the panel, if that stream
        is the terminal too.
        """
        if self._live is None:
            self._live = Live(
                self,
                console=self._console,
                refresh_per_second=REFRESHES_PER_SECOND,
                transient=True,
                redirect_stdout=is_terminal(sys.stdout),
                redirect_stderr=is_terminal(sys.stderr),
            )
            self._live.start()

    def stop(self) -> None:
        """Remove the panel, and show the cursor again."""
        if self._live is not None:
            live, self._live = self._live, None
            try:
                live.stop()
            finally:
                self._console.show_cursor()


class NotebookScreen:
    """Draws the panel into one output of a cell. It needs no widgets. `display` shows HTML and returns a function that
    replaces it.
    """

    def __init__(self, draw: Draw, display: Callable[[str], Callable[[str], None]] | None = None) -> None:
        self._draw, self._display = draw, display or _display
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._replace: Callable[[str], None] | None = None

    def start(self) -> None:
        """Begin to draw, in the output of an earlier start if there is one."""
        if self._thread is None:
            if self._replace is None:
                self._replace = self._display(self._drawn())
            self._over.clear()
            self._thread = threading.Thread(target=self._redraw, args=(self._replace,), name="live view", daemon=True)
            self._thread.start()

    def _redraw(self, replace: Callable[[str], None]) -> None:
        last = ""
        while not self._over.wait(NOTEBOOK_SECONDS):
            drawn = self._drawn()
            if drawn != last:
                replace(drawn)
            last = drawn

    def _drawn(self) -> str:
        """The panel as HTML, with its text escaped."""
        console = Console(record=True, file=io.StringIO(), force_jupyter=False, width=NOTEBOOK_WIDTH)
        for line in self._draw(NOTEBOOK_WIDTH, NOTEBOOK_HEIGHT):
            console.print(line)
        return console.export_html(inline_styles=True, code_format=_PAGE)

    def stop(self) -> None:
        """Draw the panel once more, and leave it as it is."""
        if self._thread is not None:
            thread, self._thread = self._thread, None
            self._over.set()
            thread.join()
            if self._replace is not None:
                self._replace(self._drawn())


def _display(html: str) -> Callable[[str], None]:
    """Show HTML in the notebook, and return a function that replaces it there."""
    ipython: Any = importlib.import_module("IPython.display")  # the notebook has it
    handle = ipython.display(ipython.HTML(html), display_id=True)

    def replace(changed: str) -> None:
        handle.update(ipython.HTML(changed))

    return replace


def is_terminal(stream: Any) -> bool:
    """Whether the stream is a terminal. False for None and for a closed stream."""
    with contextlib.suppress(AttributeError, ValueError):  # None, or closed
        return bool(stream.isatty())
    return False
