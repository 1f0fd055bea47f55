"""Checks of loggers: steps of an invented run, in a temporary folder."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollouts.author_code import shown
from rollouts.config.resolving import resolve
from rollouts.errors import counted
from rollouts.loggers.base import MetricsLogger, SampleSettings
from rollouts.plugins.signature import call_with
from rollouts_check.components.common import Subject
from rollouts_check.environments.traces import Leftovers
from rollouts_check.report import Attempt, SkippedError, trying

RESUMED_AT = 18  # the step at which a run is resumed
LOG_SECONDS = 1.0  # a run waits for each call
STEP = {"reward/mean": 0.5, "policy/loss": -0.25, "optim/lr": 1e-6, "time/step_seconds": 1.5}
STRANGE: dict[str, dict[str, float]] = {
    "a NaN": {"reward/mean": math.nan},
    "infinities": {"policy/kl": math.inf, "policy/loss": -math.inf},
    "a whole number": {"perf/tokens": 12},
    "a new metric": {"eval/reward_mean": 0.75},
    "a long name of many parts": {"reward/parts/" + "/".join(["very", "long"] * 20): 1.0},
    "unicode in a name": {"reward/größe 🚀": 1.0},
    "very large and very small numbers": {"policy/a": 1e308, "policy/b": 5e-324},
    "no metric": {},
}

_ROW: dict[str, str | float | None] = {"group": 0, "rollout": 1, "conversation": "user: 2 + 2?", "reward": 0.5}
ROWS: dict[str, dict[str, str | float | None]] = {
    "a rollout": {**_ROW, "part/correct": 1.0, "advantage": -0.5, "status": "completed", "why": "", "tokens": 12},
    "a rollout that was not judged": {**_ROW, "reward": None, "status": "timeout", "why": "too slow"},
    "markup and control characters": {**_ROW, "conversation": "user: <script>[bold]**x** | `\x1b[31m\x00 \u202e"},
    "a long conversation": {**_ROW, "conversation": "word " * 4000},
    "a part with a strange name": {**_ROW, "part/größe 🚀 | a=b": 1e308},
}


def opens(subject: Subject) -> None:
    """It opens in the folder of a run, and has the methods `log` and `close`."""
    with _opened(subject, "opens") as logger:
        lacking = [name for name in ("log", "close") if not callable(getattr(logger, name, None))]
        attempt = subject.attempt("make the logger", "write `def log(self, metrics, step)` and `def close(self)`")
        is_one = not lacking and isinstance(logger, MetricsLogger)
        attempt.require(is_one, f"it made {shown(logger)}, which has no {' and no '.join(lacking)}")
        with subject.trying("close it without a step"):
            logger.close()


def logs(subject: Subject) -> None:
    """It logs steps in their order, the last step twice, and is closed."""
    with _opened(subject, "logs") as logger, subject.trying("log three steps, the last one twice, and close"):
        for step in (0, 1, 2):
            logger.log(dict(STEP), step)
        logger.log({"eval/reward_mean": 0.5}, 2)
        logger.close()


def any_metric(subject: Subject) -> str:
    """It accepts every metric: NaN, infinities, new and long names, no metric at all.

    Advice: accept any number, also NaN, and any text as its name
    """
    with _opened(subject, "any_metric") as logger:
        for step, (words, metrics) in enumerate(STRANGE.items()):
            with subject.trying(f"log {words}: {shown(metrics, 60)}"):
                logger.log({**STEP, **metrics} if metrics else {}, step)
        with subject.trying("close it"):
            logger.close()
    return counted(len(STRANGE), "step")


def metrics_unchanged(subject: Subject) -> None:
    """It does not change the metrics, which other loggers get too.

    Advice: change a copy: dict(metrics)
    """
    with _opened(subject, "metrics_unchanged") as logger:
        metrics = dict(STEP)
        logger.log(metrics, 0)
        logger.close()
    attempt = Attempt("compare the metrics before and after `log`", type(logger).log)
    attempt.require(metrics == STEP, f"they were {shown(STEP)}, then {shown(metrics)}")


def samples(subject: Subject) -> str:
    """If it takes rollouts (`log_samples`), it says how many (`sample_settings`), and accepts every row.

    Advice: have `log_samples(self, name, rows, step)`, and a `SampleSettings` in `self.sample_settings`
    """
    with _opened(subject, "samples") as logger:
        has = [name for name in ("log_samples", "sample_settings") if hasattr(logger, name)]
        if not has:
            raise SkippedError("it takes metrics alone")
        attempt, settings = subject.attempt("read its attributes"), getattr(logger, "sample_settings", None)
        is_whole = len(has) == 2 and isinstance(settings, SampleSettings)
        attempt.require(is_whole, f"it has {' and '.join(has)}; `sample_settings` is {shown(settings)}")
        for step, (words, row) in enumerate(ROWS.items()):
            for name in ("samples", "eval_samples"):
                rows = [dict(row), dict.fromkeys(row), dict(row)]
                change = "accept any text, any number, and None in each column"
                tried = f"log {words}: {shown(row, 60)}"
                with trying(tried, type(logger).log_samples, change=change) as attempt:
                    logger.log_samples(name, rows, step)
                attempt.require(rows == [row, dict.fromkeys(row), row], "it changed the rows", "change a copy")
            logger.log(dict(STEP), step)
        with subject.trying("close it"):
            logger.close()
    return counted(2 * len(ROWS), "table")


def quick(subject: Subject) -> str:
    """`log` returns soon: its calls would pile up.

    Advice: collect the metrics, and send them in a thread that `close` ends
    """
    slowest = 0.0
    with _opened(subject, "quick") as logger:
        for step in range(3):
            begun = time.perf_counter()
            logger.log(dict(STEP), step)
            slowest = max(slowest, time.perf_counter() - begun)
        logger.close()
    Attempt("log a step", type(logger).log).require(slowest <= LOG_SECONDS, f"it took {slowest:.1f} seconds")
    return f"{slowest * 1000:.1f} ms"


def closes(subject: Subject) -> None:
    """`close` may be called twice, and leaves no thread and no process.

    Advice: let a second call do nothing
    """
    before = Leftovers(subject.scratch / "none")
    with _opened(subject, "closes") as logger:
        logger.log(dict(STEP), 0)
        logger.close()
        with subject.trying("close it twice"):
            logger.close()
    before.require_none(Attempt("close it", type(logger).close, change="end threads and processes in `close`"))


def resumed(subject: Subject) -> None:
    """A resumed run opens it again in the same folder, and logs its steps from there on. Earlier steps remain.

    Advice: keep the steps before first_step: open a file to append, not to write it anew
    """

    def log(logger: Any, first: int, last: int) -> int:
        for step in range(first, last + 1):
            logger.log(dict(STEP), step)
        logger.close()
        files = [file for file in (subject.scratch / "resumed").rglob("*") if file.is_file() and not file.is_symlink()]
        return sum(file.stat().st_size for file in files)

    with _opened(subject, "resumed") as logger:
        before = log(logger, 0, RESUMED_AT + 1)
    with subject.trying(f"open it again in the same folder at step {RESUMED_AT}, and log three steps") as attempt:
        with _opened(subject, "resumed", first_step=RESUMED_AT) as again:
            after = log(again, RESUMED_AT, RESUMED_AT + 2)
    attempt.require(after * 2 >= before, f"its files had {counted(before, 'byte')}, and have {after} afterwards")


@contextlib.contextmanager
def _opened(subject: Subject, name: str, first_step: int = 0) -> Iterator[Any]:
    """A new logger in a folder of this name. It is closed if the check fails. Raises SkippedError if the logger needs
    what is not here, such as a library or an account.
    """
    folder: Path = subject.scratch / name / "run"
    folder.mkdir(parents=True, exist_ok=True)
    inputs = {"folder": str(folder), "settings": resolve({}).settings, "first_step": first_step}
    with subject.making("make the logger"):
        logger: Any = call_with(subject.component, inputs, subject.settings)
    try:
        yield logger
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is reported
            logger.close()
        raise
