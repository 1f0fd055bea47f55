"""Print a line of metrics for each step: to the log of a cluster, a notebook, or another program.

`step_words` makes the numbers of a line. The lines that a run prints by itself have the same numbers.
"""

from __future__ import annotations

import datetime
import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rollouts.errors import ConfigError, suggestion
from rollouts.loggers.base import plain_settings
from rollouts.terminal_text import visible

SHOWN = (
    ("reward", "reward/mean", "{:.3f}"),
    ("loss", "policy/loss", "{:+.4f}"),
    ("entropy", "policy/entropy", "{:.3f}"),
    ("gen tok/s", "perf/gen_tok_s", "{:.0f}"),
    ("train tok/s", "perf/train_tok_s", "{:.0f}"),
)
"""The metrics of a line: the word, the metric, and the form of its value."""

HELD_OUT = (
    ("held-out", "eval/reward_mean", "{:.3f}"),
    ("held-out, greedy", "eval/greedy_mean", "{:.3f}"),
    ("held-out loss", "eval/loss", "{:.4f}"),
)
"""The same for an evaluation."""

STEP_CHARACTERS_MAX = 110  # the numbers of a line with metrics of the environment


class ConsoleLogger:
    """Print a line for each step to standard output, also where it is no terminal.

    Args:
        metrics: which metrics, by names or patterns separated by commas, such as `reward/*,eval/*`; empty: those of the
            run's own lines, and evaluations
        every: steps between lines; the first step, the last one and evaluations always have one
        time: begin each line with the date and time

    >>> logger = ConsoleLogger({"steps": 4}, metrics="reward/*")
    >>> logger.log({"reward/mean": 0.5, "reward/std": 0.25, "policy/loss": 0.1}, step=0)
    step 1/4  reward/mean 0.5  reward/std 0.25
    """

    in_step = True  # its lines and those of the run keep their order

    def __init__(self, settings: Any, *, metrics: str = "", every: int = 1, time: bool = False) -> None:
        if every < 1:
            raise ConfigError(f"--logger.console.every {every}: expected 1 or more; for no lines, type --logger none")
        self._patterns = [each.strip() for each in metrics.split(",") if each.strip()]
        self._every, self._has_time = every, time
        self._total = plain_settings(settings).get("steps")
        self._unused, self._seen = set(self._patterns), dict[str, None]()
        self._is_first, self._is_open = True, True

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Print the line of a step, if it is time. If standard output cannot be written, print nothing more."""
        self._seen |= dict.fromkeys(metrics)
        is_evaluation = any(name.startswith("eval/") for name in metrics)
        is_due = self._is_first or is_evaluation or (step + 1) % self._every == 0 or step + 1 == self._total
        self._is_first = False
        words = self._chosen(metrics) if self._patterns else step_words(metrics, (*SHOWN, *HELD_OUT))
        if is_due and words:
            total = f"/{self._total}" if isinstance(self._total, int) else ""
            self._print(f"step {step + 1}{total}  {words}")

    def add(self, metrics: dict[str, float], step: int) -> None:
        """Print a line of an earlier step: of an evaluation that ended while later steps were trained."""
        self.log(metrics, step)

    def _chosen(self, metrics: Mapping[str, float]) -> str:
        """The metrics that fit a pattern, in the order of the patterns."""
        found: dict[str, float] = {}
        for pattern in self._patterns:
            fitting = {name: value for name, value in metrics.items() if fnmatch.fnmatchcase(name, pattern)}
            if fitting:
                self._unused.discard(pattern)
            found |= fitting
        return "  ".join(f"{visible(name)} {_number(value)}" for name, value in found.items())

    def close(self) -> None:
        """Name the patterns that no metric has fit. A second call does nothing."""
        for pattern in sorted(self._unused if self._seen else ()):
            known = suggestion(pattern, self._seen) or f"there are {visible(', '.join(sorted(self._seen)))}"
            self._print(f"--logger.console.metrics: no metric fits {pattern}; {known}")
        self._is_open = False

    def _print(self, line: str) -> None:
        if not self._is_open:
            return
        now = datetime.datetime.now().astimezone().isoformat(" ", "seconds") + "  " if self._has_time else ""
        try:
            print(f"{now}{line}", flush=True)  # a log is read while the run goes on
        except (OSError, ValueError):  # it is closed, or its disk is full: no reason to end a run
            self._is_open = False


def step_words(
    metrics: Mapping[str, float],
    shown: Sequence[tuple[str, str, str]] = SHOWN,
    characters_max: float = STEP_CHARACTERS_MAX,
) -> str:
    """The numbers of a line: those of `shown`, then those of roles and of the environment while there is room.

    >>> step_words({"policy/loss": -0.25, "reward/mean": 0.5, "metric/used_tool": 1.0})
    'reward 0.500  loss -0.2500  used_tool 1.000'
    """
    words = "  ".join(f"{word} {form.format(metrics[name])}" for word, name, form in shown if name in metrics)
    for name, value in metrics.items():
        of_role = name.startswith("role/") and name.endswith("/reward")
        if of_role or name.startswith("metric/"):
            more = f"  {visible(name[5:-7] if of_role else name.removeprefix('metric/'))} {value:.3f}"
            words += more if len(words + more) <= characters_max else ""
    return words


def _number(value: float) -> str:
    """Four digits, or all digits before the point."""
    return f"{value:.0f}" if math.isfinite(value) and abs(value) >= 1000 else f"{value:.4g}"
