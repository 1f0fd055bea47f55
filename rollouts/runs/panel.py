"""The live view of a run as lines of text: its curve, what it does now, and the newest rollout.

`Panel` is what is known of the run, and `panel_lines` draws it. Not here: when it is drawn, and where (`live`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollouts.errors import counted
from rollouts.loggers.console import SHOWN, step_words
from rollouts.runs.observer import EngineState
from rollouts.runs.sample_rows import message_words
from rollouts.terminal_text import curve, visible
from rollouts.types import Episode, Message

if TYPE_CHECKING:
    from rich.text import Text

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
    from rich.text import Text

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
    from rich.text import Text

    word = "episode" if panel.is_evaluation else "step"
    row = Text.assemble((f"{word} {panel.done}/{panel.total} ", "bold"))
    left = panel.seconds_left
    words = "" if left is None else f" {clock_words(left)} left" if panel.done < panel.total else " done"
    _append_bar(row, panel.done / panel.total, min(BAR_WIDTH, width - len(row) - len(words)))
    return row.append(words)


def _phase_row(panel: Panel, width: int) -> Text:
    from rich.text import Text

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
    from rich.text import Text

    finite = [value for value in panel.values if math.isfinite(value)] or [math.nan]
    name = "reward" if panel.curve_name == CURVES[0] else "loss"
    row = Text.assemble((f"{name} {panel.values[-1]:.3f} ", "bold"))
    words = f" {min(finite):.3f} to {max(finite):.3f}"
    room = width - len(row) - len(words)
    row.append(curve(panel.values, max(min(CURVE_WIDTH, room), 4)), "green")
    return row.append(words) if room >= 4 else row


def curve_words(panel: Panel) -> str:
    """The curve of a run that is over."""
    of = counted(len(panel.values), "step")
    return _curve_row(panel, WIDTH_MAX).plain + f" over {of}"


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
    from rich.text import Text

    reward = "not judged" if episode.score.value is None else f"reward {episode.score.value:.3f}"
    role = f", {_flat(episode.role)}" if episode.role else ""
    rows = [Text(f"the newest rollout{role}: {reward}, {episode.trajectory.status.value}", "italic")]
    messages = episode.trajectory.messages
    chosen = [*messages[:1], *messages[max(1, len(messages) - MESSAGES + 1) :]]
    return rows + [Text(f"  {_message_line(message)}", "dim") for message in chosen]


def _message_line(message: Message) -> str:
    return f"{message.role}: {_flat(message_words(message)[: WIDTH_MAX * 2])}"


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
