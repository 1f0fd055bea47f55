"""Metrics as JSON lines: `{"step": 3, "reward/mean": 0.5, ...}`, one object a step, in a file of the run folder.

A line is handed to the operating system as soon as it is logged, so that a run that dies keeps what it wrote and can be
followed with `tail -f`. A run that is resumed continues its file: the lines of steps that it takes again, and a last
line that a kill cut short, are removed first, in one rename.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollouts.disk import write_whole
from rollouts.errors import OutputError


class JSONLLogger:
    """Append every step's metrics to `folder/file`, whose lines before `first_step` are kept. NaN and infinities, which
    JSON does not have, are written as null.

    Args:
        file: the file's name in the run folder

    Raises:
        OutputError: the file cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     logger = JSONLLogger(folder, 0)
    ...     logger.log({"reward/mean": 0.5, "policy/loss": float("nan")}, step=0)
    ...     logger.close()
    ...     print((Path(folder) / "metrics.jsonl").read_text(), end="")
    {"step": 0, "reward/mean": 0.5, "policy/loss": null}
    """

    def __init__(self, folder: str | Path, first_step: int, *, file: str = "metrics.jsonl") -> None:
        self.path = Path(folder) / file
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            kept = b"".join(line for step, _, line in read_lines(self.path) if step < first_step)
            if self.path.exists() and kept != self.path.read_bytes():
                write_whole(self.path, kept)
            self._last: dict[str, Any] = json.loads(kept[kept.rfind(b"\n", 0, -1) + 1 :] or b"{}")
            self._stream = self.path.open("ab")
        except OSError as error:
            raise OutputError(f"cannot write metrics to {self.path}: {error}; type `--out FOLDER`") from error

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Write one line and flush it. Further metrics of the last step are added to its line. Raises TypeError, naming
        the metric, if a value is not a number.
        """
        assert "step" not in metrics, "`step` is the line's own key, no metric may have that name"
        line = {"step": int(step)} | {name: _number(name, value) for name, value in metrics.items()}
        if self._last.get("step") == line["step"]:
            line = self._last | line
            whole = self.path.read_bytes()
            self._stream.close()
            write_whole(self.path, whole[: whole.rfind(b"\n", 0, -1) + 1] + _encoded(line))
            self._stream = self.path.open("ab")
        else:
            self._stream.write(_encoded(line))
            self._stream.flush()
        self._last = line

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        self._stream.close()


def _encoded(line: dict[str, Any]) -> bytes:
    return json.dumps(line, allow_nan=False).encode() + b"\n"


def _number(name: str, value: Any) -> float | int | None:
    """An int stays one; whatever else says it is a number (numpy's, a tensor of one element) becomes a float."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"metric {name!r} must be a number, got {value!r} ({type(value).__name__})")
    number = float(value)
    return number if math.isfinite(number) else None


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any], bytes]]:
    """Step, metrics and text of each line of a metrics file; what a kill or a crash left of a line is passed over.
    Nothing where there is no such file. Raises OSError.
    """
    if not path.exists():
        return
    with path.open("rb") as stream:
        for line in stream:
            try:
                metrics = json.loads(line)
                step = metrics["step"]
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            if isinstance(step, int) and line.endswith(b"\n"):
                yield step, metrics, line
