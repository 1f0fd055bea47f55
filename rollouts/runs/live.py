"""Where the live view of a run is drawn: below the lines of a terminal, or in one output of a notebook.

A thread draws it twice a second, or once a second in a notebook. `draw` returns the lines for a width and a
height. Not here: what it looks like (`panel`).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

    Draw = Callable[[int, int], list[Text]]

REFRESHES_PER_SECOND = 2
NOTEBOOK_SECONDS = 1.0
NOTEBOOK_WIDTH, NOTEBOOK_HEIGHT = 100, 100
_PAGE = '<pre style="white-space:pre;overflow-x:auto;line-height:normal;margin:0">{code}</pre>'


class Screen(Protocol):
    """Draws a panel from `start` to `stop`. Both may be called again, and a second `stop` does nothing."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


class TerminalScreen:
    """Draws the panel at the bottom of a terminal. Other output scrolls above it."""

    def __init__(self, console: Console, draw: Draw) -> None:
        self._console, self._draw = console, draw
        self._live: Any = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._draw(options.max_width, console.height)

    def start(self) -> None:
        """Begin to draw. What is printed to standard output or standard error appears above the panel, if that stream
        is the terminal too.
        """
        from rich.live import Live

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
        from rich.console import Console

        console = Console(record=True, file=open(os.devnull, "w"), force_jupyter=False, width=NOTEBOOK_WIDTH)
        with console.file:
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
