"""A session: one run in its folder, from the opened folder to summary.json.

Training and evaluation have different jobs. Here are the parts that both use: the session itself, loggers, the chat
format, what an observer sees, and how an episode is played. If an error is found before a job begins, no new folder
remains. After any later error, the folder says how far the run came.
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
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, cast

import trio

from rollouts.agent.episode import NO_OPPONENTS, EpisodeOptions, Opponent, run_episode
from rollouts.agent.model import EpisodeLimits
from rollouts.author_code import passed_through
from rollouts.chat.format import ChatFormat, load_chat_format
from rollouts.config.settings import Settings
from rollouts.env.mixing import RewardTerm
from rollouts.error_log import ERRORS, ErrorLog, fault_of
from rollouts.errors import ConfigError, ModelError, RolloutsError, RunError, cause_of, in_lines, leaves_of, words_of
from rollouts.inference.base import CanCheck, EngineState, HasStates, InferenceBackend, check_engine
from rollouts.inference.chatting import CanChat
from rollouts.inference.suspend import SuspendableEngine
from rollouts.models.loading import BUNDLED, load_tokenizer
from rollouts.plugins.index import KIND_WORDS
from rollouts.plugins.manager import PluginManager
from rollouts.runs.components import Chosen, make_component
from rollouts.runs.environments import PlannedEnvironment
from rollouts.runs.folder import PARTS, SUMMARY, MakeFolder, RunFolder
from rollouts.runs.loggers import LOGGERS_SECONDS, LOGGERS_SECONDS_INTERRUPTED, Loggers
from rollouts.runs.observer import Observer
from rollouts.runs.times import Start
from rollouts.training.batches import TrainingBackend
from rollouts.training.rollout_gen.pool import Job as EpisodeJob
from rollouts.training.rollout_gen.pool import Play
from rollouts.types import Episode

if TYPE_CHECKING:
    from rollouts.chat.tool_parsers import ChosenParser

STUCK_SECONDS = 2.0
"""A run that has not ended this long after the first Ctrl-C ends at the next one, even within trio."""


class SessionJob(Protocol):
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
        self.job: SessionJob | None = None
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

    def begin(self, job: SessionJob, title: str, total: int, notes: Sequence[str], settings: Mapping[str, Any]) -> None:
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

    def _end(self, job: SessionJob, failure: BaseException | None) -> BaseException | None:
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


def model_words(model: str) -> str:
    """The end of a run's title. For a model that comes with rollouts: that it is a toy, and how to choose another."""
    return f" · {model} is the package's toy model: give another with --model" if model in BUNDLED else ""


def load_chat(
    settings: Settings,
    environments: Sequence[PlannedEnvironment],
    tokenizer: Any = None,
    tool_parser: ChosenParser | None = None,
) -> ChatFormat:
    """The model's chat format; `tokenizer` None: load it. `tool_parser` None: the template decides how calls are read.
    Raises ModelError if the template cannot show what the environment needs, and ConfigError for a parser that fails.
    """
    chat = load_chat_format(tokenizer or load_tokenizer(settings.model), settings.template, tool_parser)
    _check_tools(chat, environments, settings)
    if settings.system and not chat.report.system:
        raise ModelError(f"--system: the chat template of {settings.model} refuses system messages")
    return chat


def _check_tools(chat: ChatFormat, environments: Sequence[PlannedEnvironment], settings: Settings) -> None:
    """Raise ModelError if an environment has tools, and the chat template cannot show their calls, or calls cannot be
    read out of the replies of this run.
    """
    with_tools = [env.name for env in environments if env.all_tools() or env.chooses_tools]
    report, has_replies = chat.report, settings.mode != "sft" or settings.eval_tasks > 0
    if not with_tools or report.calls_as_text or (report.tools and (report.reads_calls or not has_replies)):
        return
    fails = "cannot be used with them" if report.tools else "cannot show them"
    also = ", or type --tool-parser with a parser of your own" if report.tools else ""
    raise ModelError(
        f"the environment {with_tools[0]} has tools, but the chat template of {settings.model} {fails} "
        f"({'; '.join(report.refusals) or 'it ignores them'}); choose a model whose template takes tools, such as "
        f"--model tiny or a Qwen{also}"
    )


def chat_notes(chat: ChatFormat) -> list[str]:
    """What is unusual about the chat template."""
    report = chat.report
    is_usual = report.append_only and report.reads_thoughts and not report.refusals
    return [] if is_usual else report.words()


class EngineSpec(NamedTuple):
    """What the factory of an engine may name, by these names. `training` is None if there is no training backend.
    `pinned`: for an engine of `--eval-inference`.
    """

    model: str
    seed: int
    temperature: float
    concurrency: int
    lora_rank: int = 0
    lora_roles: Sequence[str] = ()
    training: TrainingBackend | None = None
    folder: str = ""
    pinned: bool = False


def make_inference(
    chosen: Chosen, spec: EngineSpec, environments: Sequence[PlannedEnvironment], *, must_train: bool
) -> InferenceBackend:
    """The engine, not entered. It is checked if it has a `check`. Raises UserError if it cannot be used; with
    `must_train`, also if its replies cannot be trained on.
    """
    engine = check_engine(make_component("inference backend", chosen, spec._asdict()), chosen.name)
    if must_train and not engine.capabilities.trainable:
        raise ConfigError(
            f"--inference {chosen.name}: it returns no token ids with logprobs, so it is good for evaluation only; "
            "type --inference hf to train"
        )
    if engine.capabilities.checks and engine.capabilities.chats:
        tools = [schema for env in environments for schema in env.schemas()]
        trio.run(cast(CanChat, engine).check, tools, spec.temperature)
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
    environments: Sequence[PlannedEnvironment]
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
        limits, policy = episode_limits(settings, temperature), settings.on_invalid_reward

        def play(job: EpisodeJob, session: str, inference: SuspendableEngine) -> Coroutine[Any, Any, Episode]:
            env = environments[job.task.env]
            on_begin()
            options = EpisodeOptions(env.tools, env.sandboxes, env.shared, self.opponents, policy, on_end)
            return run_episode(
                job.task,
                make_env=env.make_env,
                chat=self.chat,
                inference=inference,
                limits=limits,
                rewards=self.rewards,
                session=session,
                order=job.order,
                seed=seed,
                options=options,
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


@dataclass
class Watching:
    """Counts the episodes that play. `name` is that of the engine. `noted` notes of the training backend are shown."""

    observer: Observer
    name: str
    inference: InferenceBackend
    noted: int
    playing: int = 0

    def begin(self) -> None:
        """An episode begins."""
        self.playing += 1

    def end(self, episode: Episode) -> None:
        """An episode ended; it may be tried again."""
        self.playing -= 1
        self.observer.rollout(episode)

    def notes(self, backend: TrainingBackend) -> None:
        """Show the notes that the backend has added since the last call."""
        for note in backend.notes[self.noted :]:
            self.observer.note(note)
        self.noted = len(backend.notes)

    def engines(self) -> Sequence[EngineState]:
        """The engines now: each server with its requests; another engine with the episodes that play."""
        engine = self.inference
        if engine.capabilities.has_states:
            return cast(HasStates, engine).states()
        return [EngineState(self.name, engine.version, self.playing)]
