"""A logger for your own program."""

from __future__ import annotations

from pathlib import Path

from rollouts.loggers import jsonl


class JSONLLogger(jsonl.JSONLLogger):
    """Append the metrics of each step to `folder/metrics.jsonl`. Lines of steps before `first_step` are kept; the
    default keeps none. Raises OutputError.
    """

    def __init__(self, folder: str | Path, first_step: int = 0, *, file: str = "metrics.jsonl") -> None:
        super().__init__(folder, first_step, file=file)
