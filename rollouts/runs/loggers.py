"""The loggers of a run as one, and what happens if a logger fails or hangs. Not here: the thread of one logger
(`rollouts.loggers.background`).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollouts.author_code import authors_code
from rollouts.error_log import report
from rollouts.errors import BrokenPluginError, RolloutsError, RunError, counted, words_of
from rollouts.loggers.base import AddsToSteps, MetricsLogger, SampleLogger, SampleSettings
from rollouts.plugins.manager import PluginFault
from rollouts.runs.components import Chosen, make_component
from rollouts.runs.sample_rows import SAMPLES, Judged, sample_rows

if TYPE_CHECKING:
    from rollouts.loggers.background import BackgroundLogger

LOGGERS_SECONDS, LOGGERS_SECONDS_INTERRUPTED = 60.0, 5.0
"""How long the end of a run waits for loggers that have not recorded everything yet; and after Ctrl-C."""

MADE_SECONDS = 120.0
"""How long a run that may go on without a logger waits until it is made. `wandb.init` itself gives up after 90 s."""

SAID_SECONDS = 2.0
"""After this time, the end of a run says which logger it waits for."""


class Loggers:
    """Several loggers as one MetricsLogger.

    A logger with `in_step` is called at once; if it fails, the run fails with an error that names it. All others are
    called in threads of their own (`rollouts.loggers.background`): if one fails, `note` gets one line, and the run goes
    on. `lost` has the number of calls that each of them did not record; after `close` it is complete.
    """

    def __init__(self, note: Callable[[str], None] = lambda words: None) -> None:
        self.faults: list[PluginFault] = []
        self.lost: dict[str, int] = {}
        self._note = note
        self._noted: set[str] = set()
        self._loggers: dict[str, MetricsLogger] = {}
        self._threads: dict[str, BackgroundLogger] = {}
        self._next: dict[str, float] = {}
        self._late: dict[str, float] = {}

    def open(
        self,
        chosen: Sequence[Chosen],
        folder: Path,
        settings: Mapping[str, Any],
        first_step: int,
        *,
        may_fail: bool = False,
    ) -> None:
        """Make the loggers of the run that do not exist yet. Raises UserError; with `may_fail`, only for loggers with
        `in_step`, and the run goes on without the others.
        """
        available = {"folder": str(folder), "settings": settings, "first_step": first_step}
        for each in chosen:
            make = partial(_make_logger, each, available)
            if each.alias in self._loggers or each.alias in self._noted:
                continue
            if getattr(each.component, "in_step", False):
                self._loggers[each.alias] = make()
                continue
            try:
                from rollouts.loggers.background import BackgroundLogger

                thread = BackgroundLogger(make, each.alias, MADE_SECONDS if may_fail else None)
            except Exception as error:
                if not may_fail:
                    raise
                words = report(error, f"the logger {each.alias}", is_noted=False)
                self._noted.add(each.alias)
                self._note(f"warning: the logger {each.alias} cannot be made, so the run goes on without it: {words}")
                self.faults.append(PluginFault(f"logger {each.alias}", "", f"it cannot be made: {words}"))
            else:
                self._threads[each.alias], self._loggers[each.alias] = thread, thread.logger
        # Loggers log in the order of the settings, even if some were made earlier.
        self._loggers = {each.alias: self._loggers[each.alias] for each in chosen if each.alias in self._loggers}

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Log with each logger; each gets its own copy. Raises RunError, which names the logger, if one with `in_step`
        fails.
        """
        metrics, self._next = self._next | metrics, {}
        late, self._late = self._late, {}
        clashes = bool(late.keys() & metrics.keys())  # this step has an evaluation of its own
        for name, logger in self._loggers.items():
            own = dict(metrics)
            if late and not isinstance(logger, AddsToSteps):
                if clashes:
                    self._call(name, logger.log, dict(late), step)
                own = {"eval/step": float(step), **own} if clashes else late | own
            self._call(name, logger.log, own, step)

    def add(self, metrics: Mapping[str, float], step: int) -> None:
        """Add metrics to an earlier step. A logger that cannot do this gets them with the next step, and `eval/step`.
        Raises as `log` does.
        """
        for name, logger in self._loggers.items():
            if isinstance(logger, AddsToSteps):
                self._call(name, logger.add, dict(metrics), step)
        self._late = {**metrics, "eval/step": float(step)}

    def log_samples(self, table: str, rollouts: Sequence[Judged], step: int) -> None:
        """Send rows of some rollouts to each logger that takes them, if it is time: those of training, the table
        "samples", only every few steps. Raises as `log` does.
        """
        for name, logger in self._loggers.items():
            if isinstance(logger, SampleLogger):
                settings = logger.sample_settings
                is_due = table != SAMPLES or step % settings.samples_every == 0
                if is_due and (rows := sample_rows(rollouts, settings)):
                    self._call(name, logger.log_samples, table, rows, step)

    def add_to_next(self, metrics: Mapping[str, float]) -> None:
        """Log these metrics together with those of the next call, which replace metrics of the same name."""
        self._next |= metrics

    def close(self, seconds_max: float = LOGGERS_SECONDS) -> None:
        """Close every logger, even if another one fails. Waits at most `seconds_max` for those in threads; a Ctrl-C
        ends the wait. `faults` names the loggers that failed.
        """
        for thread in self._threads.values():
            thread.end()
        deadline = time.monotonic() + seconds_max
        while self._loggers:
            name = next(iter(self._loggers))
            logger = self._loggers.pop(name)
            if name in self._threads:
                deadline = self._end(name, self._threads[name], deadline)
                continue
            try:
                with authors_code():
                    logger.close()
            except Exception as error:  # a failure here must not hide another error
                words = report(error, f"the logger {name}", is_noted=False)
                self.faults.append(PluginFault(f"logger {name}", "", f"close failed: {words}"))

    def _end(self, name: str, thread: BackgroundLogger, deadline: float) -> float:
        """Wait for a logger in a thread until the deadline, and record what it lost. Returns the deadline, which is
        over after a Ctrl-C.
        """
        is_closed, left = False, max(0.0, deadline - time.monotonic())
        try:
            is_closed = thread.wait(min(left, SAID_SECONDS))
            if not is_closed and left > SAID_SECONDS:
                self._note(f"waiting for the logger {name}, at most {left:.0f} s")
                is_closed = thread.wait(left - SAID_SECONDS)
        except KeyboardInterrupt:  # all else is done
            deadline = -math.inf
        if not is_closed:
            thread.abandon()
        if thread.lost:
            self.lost[name] = thread.lost
        if thread.lost or not is_closed or thread.close_failed:
            of = f"lost {thread.lost} of its {counted(thread.calls, 'call')}: " if thread.lost else ""
            what = "close failed: " if thread.close_failed else "" if is_closed else "it did not end in time"
            words = "" if thread.error is None else report(thread.error, f"the logger {name}", is_noted=False)
            self.faults.append(PluginFault(f"logger {name}", "", f"{of}{what}{words}"))
        return deadline

    def _call(self, name: str, function: Callable[..., None], *arguments: Any) -> None:
        """Call a method of a logger: at once, or in its thread."""
        thread = self._threads.get(name)
        if thread is None:
            with _named_errors(name):
                function(*arguments)
            return
        thread.call(function, *arguments)
        if thread.error is not None and name not in self._noted:
            self._noted.add(name)
            words = report(thread.error, f"the logger {name}", is_noted=False)
            self._note(f"warning: the logger {name} failed: {words}; the run goes on and tries it again")


def _make_logger(chosen: Chosen, available: Mapping[str, Any]) -> MetricsLogger:
    """The logger. Raises BrokenPluginError if it has the members of a SampleLogger, but no settings of samples."""
    logger: MetricsLogger = make_component("logger", chosen, available)
    if isinstance(logger, SampleLogger) and not isinstance(logger.sample_settings, SampleSettings):
        raise BrokenPluginError(
            f"the logger {chosen.alias} has `log_samples`, so its `sample_settings` must be "
            f"rollouts.loggers.SampleSettings; it is a {type(logger.sample_settings).__name__}"
        )
    return logger


@contextlib.contextmanager
def _named_errors(name: str) -> Iterator[None]:
    """Any error of a package's logger becomes a RunError that names the logger."""
    try:
        with authors_code():
            yield
    except RolloutsError:
        raise
    except Exception as error:
        raise RunError(f"the logger {name} failed: {words_of(error)}") from error
