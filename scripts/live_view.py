"""Draw the live view of a run into `docs/pictures/live.svg`: a real run of the toy model, caught in the middle.

python scripts/live_view.py
"""

from __future__ import annotations

import io
import re
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from rollouts.config.resolving import resolve
from rollouts.runs import run
from rollouts.runs.observer import GENERATING
from rollouts.runs.progress import Progress

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "live.svg"
STEPS, CAUGHT, WIDTH, HEIGHT = 60, 45, 92, 40


class Caught:
    """An observer that keeps the view when most rollouts of a step are generated."""

    def __init__(self) -> None:
        self.lines: list[Any] = []
        self._draw: Any = None
        self._progress = Progress(Console(file=io.StringIO()), self._screen)

    def _screen(self, draw: Any) -> Any:
        self._draw = draw
        return self

    def start(self) -> None:
        """Nothing is drawn until it is caught."""

    stop = start

    def __getattr__(self, name: str) -> Any:
        return getattr(self._progress, name)

    def rollout(self, episode: Any) -> None:
        """Catch the view when 40 rollouts of a step have ended."""
        self._progress.rollout(episode)
        panel = self._progress._panel
        if panel.done == CAUGHT and panel.phase == GENERATING and panel.phase_done == 40:
            self.lines = self._draw(WIDTH, HEIGHT)


def svg(lines: list[Any]) -> str:
    """The lines as a picture. Its font is that of the reader: nothing is loaded."""
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    for line in lines:
        console.print(line)
    drawn = console.export_svg(title="rollouts run --env calculator", unique_id="live")
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL).replace("Fira Code, ", "")


if __name__ == "__main__":
    caught = Caught()
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "first")
        run(resolve({"env": "calculator", "steps": STEPS, "eval_tasks": 0, "out": out}), caught)  # type: ignore[arg-type]
    PICTURE.write_text(svg(caught.lines))
    print("\n".join(line.plain for line in caught.lines))
