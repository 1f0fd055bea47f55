"""A session: one run in its folder, from the opened folder to summary.json.

Training and evaluation have different jobs. Here are the parts that both use: the session itself, loggers, the chat
format, and how an episode is played. If an error is found before a job begins, no new folder remains. After any later
error, the folder says how far the run came.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Protocol, Self, cast

import trio

from rollouts.agent.episode import NO_OPPONENTS, Opponent, run_episode
from rollouts.agent.model import EpisodeLimits
from rollouts.author_code import authors_code, passed_through
from rollouts.chat.format import ChatFormat, load_chat_format
from rollouts.chat.tool_parsers import ToolParser
from rollouts.config.settings import Settings
from rollouts.env.mixing import RewardTerm
from rollouts.error_log import ERRORS, ErrorLog, fault_of, report
from rollouts.errors import (
    BrokenPluginError,
    ConfigError,
    ModelError,
    RolloutsError,
    RunError,
    cause_of,
    counted,
    in_lines,
    leaves_of,
    words_of,
)
from rollouts.inference.base import CanCheck, InferenceBackend, check_engine
from rollouts.inference.chatting import CanChat
from rollouts.inference.suspend import SuspendableEngine
from rollouts.loggers.background import BackgroundLogger
from rollouts.loggers.base import AddsToSteps, MetricsLogger, SampleLogger, SampleSettings
from rollouts.plugins.index import KIND_WORDS
from rollouts.plugins.manager import PluginFault, PluginManager
from rollouts.runs.clock import Start
from rollouts.runs.components import Chosen, make_component
from rollouts.runs.environments import Environment
from rollouts.runs.folder import PARTS, SUMMARY, MakeFolder, RunFolder
from rollouts.runs.observer import Observer
from rollouts.runs.sample_rows import SAMPLES, Judged, sample_rows
from rollouts.training.models import BUNDLED, load_tokenizer
from rollouts.training.rollout_gen.pool import Job as EpisodeJob
from rollouts.training.rollout_gen.pool import Play
from rollouts.types import Episode

STUCK_SECONDS = 2.0
"""A run that has not ended this long after the first Ctrl-C ends at the next one, even within trio."""

LOGGERS_SECONDS, LOGGERS_SECONDS_INTERRUPTED = 60.0, 5.0
"""How long the end of a run waits for loggers that have not recorded everything yet; and after Ctrl-C."""


class Job(Protocol):
    """What a session runs. It fills `summary`, which becomes summary.json."""

    summary: dict[str, Any]

    def finish(self, failure: BaseException | None) -> None:
        """Complete the summary, and write the job's other files. `failure` is the exception that ended the job early,
        or None. May raise another exception.
        """
        ...

    def message(self, failure: BaseException) -> str:
        """The message of the session's error: how far the job came, and what to type."""
        ...


class Session:
    """A context manager around one run. It owns the folder, the loggers and the `resources` that end with it.

    An error before `begin` discards a new folder and is raised unchanged. After `begin`, any end of the block ends the
    job, closes the loggers, writes summary.json, and calls the hook `rollouts_run_end`. If the job failed, it then
    raises one error that says how far the job came. After a Ctrl-C, it ignores another Ctrl-C until everything is
    closed.
    """

    def __init__(self, observer: Observer, started: Start, manager: PluginManager | None = None) -> None:
        self.observer = observer
        self.loggers = Loggers(observer.note)
        self.job: Job | None = None
        self.backends: list[tuple[Chosen, object]] = []  # an unknown error that passed through one is its own
        self._started, self._manager = started, manager
        self._folder: RunFolder | None = None
        self._errors: ErrorLog | None = None
        self._interrupts = contextlib.ExitStack()
        self.resources = contextlib.ExitStack()
        self.resources.push(self._interrupts)  # the first to enter, so the last to leave

    def __enter__(self) -> Self:
        return self

    @property
    def folder(self) -> RunFolder:
        """The run's folder. Call `open` first."""
        assert self._folder is not None, "open the folder first"
        return self._folder

    def open(self, make_folder: MakeFolder, parts: Sequence[str] = PARTS) -> RunFolder:
        """Make or reopen the run's folder, locked for this process."""
        self._folder = make_folder(parts)
        self.resources.callback(self._folder.close)
        return self._folder

    def begin(self, job: Job, title: str, total: int, notes: Sequence[str], settings: Mapping[str, Any]) -> None:
        """Announce the job to the observer and the hooks. From here on, the folder is kept."""
        self.job = job
        log = ErrorLog(self.folder.path / ERRORS, self.observer.note, self.folder.shown / ERRORS)
        self._errors = self.resources.enter_context(log)
        self.observer.begin(title, total, self.folder.shown, notes)
        self.call_hooks("rollouts_run_start", settings=settings, folder=str(self.folder.path))
        freeze_loaded()

    def ignore_interrupts(self) -> None:
        """Ignore Ctrl-C until everything is closed."""
        self._interrupts.enter_context(without_interrupts())

    def call_hooks(self, event: str, **values: Any) -> None:
        """Call the hooks of an event. Hooks that fail are reported, and do not stop the run."""
        if self._manager is not None:
            self.observer.faults(self._manager.call_event(event, **values))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.resources:
            if self.job is not None:
                failure = self._end(self.job, error and cause_of(error))
            else:
                failure = error
                self.loggers.close(LOGGERS_SECONDS_INTERRUPTED)
                if self._folder is not None:
                    self._folder.discard()
        if failure is not None and failure is not error:
            raise failure from failure.__cause__

    def _end(self, job: Job, failure: BaseException | None) -> BaseException | None:
        """End the job. Returns the error to raise: the first one that occurred, or None."""
        failure = failure and self._named_failure(failure)
        if isinstance(failure, KeyboardInterrupt):
            self.ignore_interrupts()
        summary = job.summary
        summary |= self._started.seconds()
        try:
            job.finish(failure)
        except BaseException as late:  # of another package's logger, or Ctrl-C: the summary must still be written
            failure = failure or late
        self.loggers.close(LOGGERS_SECONDS if failure is None else LOGGERS_SECONDS_INTERRUPTED)
        if self.loggers.faults:
            summary["faults"] = [str(fault) for fault in self.loggers.faults]
        if self.loggers.lost:
            summary["lost_by_loggers"] = self.loggers.lost
        self.observer.faults(self.loggers.faults)
        try:
            self.write_summary(failure)
        except RolloutsError as late:
            failure = failure or late
        self.call_hooks("rollouts_run_end", summary=summary)
        self.observer.end(summary)
        if isinstance(failure, KeyboardInterrupt):
            return KeyboardInterrupt(job.message(failure))
        where = self._recorded(failure) if failure is not None else ""
        if isinstance(failure, RolloutsError):
            failure.args = (in_lines(job.message(failure), where),)
        elif failure is not None and where:
            failure.add_note(where)
        return failure

    def _named_failure(self, failure: BaseException) -> BaseException:
        """The failure; of one that came out of a plugin's backend, a RunError that names the backend."""
        unknown = [each for each in leaves_of(failure) if not isinstance(each, RolloutsError)]
        for chosen, backend in self.backends:
            if isinstance(failure, Exception) and any(passed_through(each, backend) for each in unknown):
                word = KIND_WORDS[chosen.ref.kind] if chosen.ref is not None else "backend"
                named = RunError(f"the {word} {chosen.name} failed: {words_of(failure)}")
                named.__cause__ = failure
                return named
        return failure

    def _recorded(self, failure: BaseException) -> str:
        """Write the traceback of the exception that ended the run, if an author's code or a bug raised it. Returns a
        line that says where the errors of the run are; "" if there are none.
        """
        if self._errors is None:  # of mode sft+rl: each phase has recorded its own
            return ""
        chain: BaseException | None = failure
        while isinstance(chain, RolloutsError):
            chain = chain.__cause__
        if chain is not None:
            self._errors.record(fault_of(failure), "the run", is_noted=False)
        return f"tracebacks: {self._errors.shown}" if self._errors.has_errors else ""

    def write_summary(self, failure: BaseException | None) -> None:
        """Write summary.json. Its status depends on `failure`, the exception that ended the job."""
        assert self.job is not None, "begin first"
        summary = self.job.summary
        summary["status"] = status_of(failure)
        if summary["status"] == "failed":
            summary["error"] = f"{type(failure).__name__}: {failure}"
        self.folder.write_json(SUMMARY, summary)


def status_of(failure: BaseException | None) -> str:
    """The status in summary.json of a run that ended with this exception (None: it is done)."""
    if failure is None:
        return "done"
    return "interrupted" if isinstance(failure, KeyboardInterrupt) else "failed"


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
                thread = BackgroundLogger(make, each.alias)
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
            is_closed = thread.wait(min(left, STUCK_SECONDS))
            if not is_closed and left > STUCK_SECONDS:
                self._note(f"waiting for the logger {name}, at most {left:.0f} s")
                is_closed = thread.wait(left - STUCK_SECONDS)
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
    return _checked(make_component("logger", chosen, available), chosen.alias)


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


def _checked(logger: MetricsLogger, name: str) -> MetricsLogger:
    """The logger. Raises BrokenPluginError if it has the members of a SampleLogger, but no settings of samples."""
    if isinstance(logger, SampleLogger) and not isinstance(logger.sample_settings, SampleSettings):
        raise BrokenPluginError(
            f"the logger {name} has `log_samples`, so its `sample_settings` must be rollouts.loggers.SampleSettings; "
            f"it is a {type(logger.sample_settings).__name__}"
        )
    return logger


def model_words(model: str) -> str:
    """The end of a run's title. For a model that comes with rollouts: that it is a toy, and how to choose another."""
    return f" · {model} is the package's toy model: give another with --model" if model in BUNDLED else ""


def load_chat(
    settings: Settings,
    environments: Sequence[Environment],
    tokenizer: Any = None,
    tool_parser: ToolParser | None = None,
) -> ChatFormat:
    """The model's chat format; `tokenizer` None: load it. `tool_parser` None: the template decides how calls are read.
    Raises ModelError if the template cannot show what the environment needs, and ConfigError for a parser that fails.
    """
    chat = load_chat_format(tokenizer or load_tokenizer(settings.model), settings.template, tool_parser)
    with_tools = [env.name for env in environments if env.all_tools() or env.chooses_tools]
    if with_tools and not chat.report.tools and not chat.report.calls_as_text:
        raise ModelError(
            f"the environment {with_tools[0]} has tools, but the chat template of {settings.model} cannot show them "
            f"({'; '.join(chat.report.refusals) or 'it ignores them'}); choose a model whose template takes tools, "
            "such as --model tiny or a Qwen"
        )
    if settings.system and not chat.report.system:
        raise ModelError(f"--system: the chat template of {settings.model} refuses system messages")
    return chat


def chat_notes(chat: ChatFormat) -> list[str]:
    """What is unusual about the chat template."""
    report = chat.report
    return [] if report.append_only and not report.refusals else report.words()


def make_inference(
    chosen: Chosen, available: Mapping[str, Any], environments: Sequence[Environment], *, must_train: bool
) -> InferenceBackend:
    """The engine, not entered. It is checked if it has a `check`. Raises UserError if it cannot be used; with
    `must_train`, also if its replies cannot be trained on.
    """
    engine = check_engine(make_component("inference backend", chosen, available), chosen.name)
    if must_train and not engine.capabilities.trainable:
        raise ConfigError(
            f"--inference {chosen.name}: it returns no token ids with logprobs, so it is good for evaluation only; "
            "type --inference hf to train"
        )
    if engine.capabilities.checks and engine.capabilities.chats:
        tools = [schema for env in environments for schema in env.schemas()]
        trio.run(cast(CanChat, engine).check, tools, available["temperature"])
    elif engine.capabilities.checks:
        trio.run(cast(CanCheck, engine).check)
    return engine


def episode_limits(settings: Settings, temperature: float) -> EpisodeLimits:
    """The limits of an episode, and of a conversation, at this temperature."""
    return EpisodeLimits(
        settings.max_tokens,
        settings.max_turns,
        temperature,
        episode_seconds=settings.episode_seconds,
        cleanup_seconds=settings.cleanup_seconds,
        reward_seconds=settings.reward_seconds,
        setup_seconds=settings.setup_seconds,
        turn_seconds=settings.turn_seconds or math.inf,
        tool_seconds=settings.tool_seconds or math.inf,
    )


class Player(NamedTuple):
    """How the episodes of a run are played. `chat` is None for an engine that takes messages. `opponents` are the
    models of roles that are not trained.
    """

    settings: Settings
    environments: Sequence[Environment]
    rewards: Sequence[RewardTerm]
    chat: ChatFormat | None
    opponents: Mapping[str, Opponent] = NO_OPPONENTS

    def at(
        self,
        temperature: float,
        seed: int,
        on_begin: Callable[[], None] = lambda: None,
        on_end: Callable[[Episode], None] | None = None,
    ) -> Play:
        """A function that plays one episode at this temperature. Random numbers depend on `seed` and the episode's
        order. `on_begin` and `on_end` are called for each episode.
        """
        settings = self.settings
        environments = {env.alias: env for env in self.environments}
        limits = episode_limits(settings, temperature)

        def play(job: EpisodeJob, session: str, inference: SuspendableEngine) -> Coroutine[Any, Any, Episode]:
            environment = environments[job.task.env]
            on_begin()
            return run_episode(
                job.task,
                make_env=environment.make_env,
                chat=self.chat,
                inference=inference,
                limits=limits,
                rewards=self.rewards,
                session=session,
                order=job.order,
                seed=seed,
                on_invalid_reward=settings.on_invalid_reward,
                tools=environment.tools,
                sandboxes=environment.sandboxes,
                shared=environment.shared,
                opponents=self.opponents,
                on_end=on_end,
            )

        return play


def freeze_loaded() -> None:
    """Exclude loaded objects from garbage collection. Imported packages have hundreds of thousands of them, and a full
    collection visits each, which takes a fifth of the time of a turn. They stay excluded after a run, so that the
    process ends a second earlier. If the process continues, call `gc.unfreeze()`.
    """
    gc.unfreeze()  # objects of an earlier run, which can be collected now
    gc.collect()
    gc.freeze()


@dataclass
class Interrupts:
    """Ctrl-C within `trio.run`. While `is_held`, the first Ctrl-C only sets `is_asked`; the current work checks it and
    ends the run soon. `times` are the times of every Ctrl-C, in seconds of `time.monotonic`.
    """

    is_held: bool = False
    is_asked: bool = False
    times: list[float] = field(default_factory=list)

    @property
    def is_stuck(self) -> bool:
        """Whether a third Ctrl-C came, and the first one is older than STUCK_SECONDS."""
        return len(self.times) > 2 and self.times[-1] - self.times[0] > STUCK_SECONDS


@contextlib.contextmanager
def second_interrupt_at_once(before: Any) -> Iterator[Interrupts]:
    """Within `trio.run`: the first Ctrl-C is raised at a checkpoint, so that it does not interrupt the exit of a
    context manager, or it is held. A later one is raised at once, because a function that blocks has no checkpoints.
    It is raised at a checkpoint if it interrupts trio itself, because an exception there would leave trio's tasks
    without an end. If the run is stuck, it is raised even there. `before` is the outer handler.
    """
    found, owner, interrupts = signal.getsignal(signal.SIGINT), os.getpid(), Interrupts()
    if found is before:  # trio has installed no handler, for example outside of the main thread
        yield interrupts
        return
    trios = found if callable(found) else signal.default_int_handler

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.times.append(time.monotonic())
        is_first = len(interrupts.times) == 1
        if os.getpid() != owner:  # a forked child does not run trio
            signal.default_int_handler(number, frame)
        elif is_first and interrupts.is_held:
            interrupts.is_asked = True
        elif is_first or (trio.lowlevel.currently_ki_protected() and not interrupts.is_stuck):
            trios(number, frame)
        else:
            signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupts
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, trios)  # until `trio.run` has ended


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C and the signals that act like it, so that an interrupted run can end properly. Does nothing outside
    the main thread, because only that thread can have handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
