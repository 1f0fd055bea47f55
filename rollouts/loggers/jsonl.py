"""Write metrics as JSON lines to a file in the run folder: one object `{"step": 3, "reward/mean": 0.5, ...}` per step.

Each line is flushed at once: you can follow the file with `tail -f`, and a killed run keeps its lines. A resumed run
first removes an incomplete last line and the lines of the steps that it repeats. It writes a new file and renames it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from rollouts.disk import open_regular, read_regular, write_whole
from rollouts.errors import OutputError


class JSONLLogger:
    """Append the metrics of each step to `folder/file`. Existing lines of steps before `first_step` are kept; None
    keeps none. NaN and infinities become null, because JSON does not have them.

    Args:
        file: the name of the file in the run folder; none: write nothing

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

    in_step = True

    def __init__(
        self, folder: str | Path, first_step: int | None = None, *, file: str | None = "metrics.jsonl"
    ) -> None:
        self.path = Path(folder) / (file or "")
        self._stream: IO[bytes] | None = None
        if file is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            kept = b"".join(line for step, _, line in read_lines(self.path) if step < (first_step or 0))
            if self.path.exists() and kept != read_regular(self.path):
                write_whole(self.path, kept)
            self._last: dict[str, Any] = json.loads(kept[kept.rfind(b"\n", 0, -1) + 1 :] or b"{}")
            self._stream = self.path.open("ab")
        except OSError as error:
            raise OutputError(f"cannot write metrics to {self.path}: {error}; type `--out FOLDER`") from error

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Write one line and flush it. If the last line has the same step, the metrics are added to it. Raises
        TypeError for a value that is not a number.
        """
        if self._stream is None:
            return
        assert "step" not in metrics, "`step` is a key of the line, so no metric may have this name"
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

    def add(self, metrics: dict[str, float], step: int) -> None:
        """Add metrics to the line of an earlier step. The file is written anew and renamed. Raises TypeError for a
        value that is not a number.
        """
        if self._stream is None:
            return
        new = {name: _number(name, value) for name, value in metrics.items()}
        if self._last.get("step") == step:
            self._last |= new
        lines = [(line | new if at == step else line) for at, line, _ in read_lines(self.path)]
        self._stream.close()
        write_whole(self.path, b"".join(map(_encoded, lines)))
        self._stream = self.path.open("ab")

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._stream is not None:
            self._stream.close()


def _encoded(line: dict[str, Any]) -> bytes:
    return json.dumps(line, allow_nan=False).encode() + b"\n"


def _number(name: str, value: Any) -> float | int | None:
    """The value as an int or a float; None for NaN and infinities. Converts NumPy numbers and one-element tensors."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"metric {name!r} must be a number, got {value!r} ({type(value).__name__})")
    number = float(value)
    return number if math.isfinite(number) else None


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any], bytes]]:
    """The step, metrics and text of each line of a metrics file, without incomplete lines. Yields nothing if there is
    no such file. Raises OSError.
    """
    if not path.exists():
        return
    with open_regular(path) as stream:
        for line in stream:
            try:
                metrics = json.loads(line)
                step = metrics["step"]
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            if isinstance(step, int) and line.endswith(b"\n"):
                yield step, metrics, line
