"""What is shown while a command runs: lines, or a bar where the output is a terminal. Left out: what they say."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from rollouts.plugins.manager import PluginFault

__all__ = ["Terminal", "number_words"]


class Terminal:
    """Standard output, or another console: it keeps the bar, if there is one, and which faults were told."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console

        self.console = console or Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._told: set[str] = set()

    def say(self, text: str) -> None:
        """A line as it is."""
        self.console.print(text, markup=False)

    def tell_faults(self, faults: Sequence[PluginFault]) -> None:
        """Each fault once."""
        for fault in faults:
            if str(fault) not in self._told:
                self._told.add(str(fault))
                self.say(f"plugin fault: {fault}")

    def advance(self, done: int, total: int, words: str) -> None:
        """Move the bar, which is made here."""
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        if self._bar is None:
            columns = (
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
            )
            self._bar = Bar(*columns, console=self.console)
            self._task = self._bar.add_task("", total=total)
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, completed=done, description=words)

    def stop(self) -> None:
        """No bar any more."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def number_words(value: float | None) -> str:
    """Three digits; a dash where there is no number."""
    return "–" if value is None else f"{value:.3f}"
