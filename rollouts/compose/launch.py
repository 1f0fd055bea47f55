"""A plan becomes a run: the model is loaded, the stateful parts are built, the run takes its course, and ends.

Every mistake of the user's that can be seen is raised before the folder is made or changed; whatever happens after
that, the folder says how far the run came. Left out: how the parts are built (`parts`), what happens under trio
(`course`), and which checkpoint a run goes on from (`resume`).
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import trio

from rollouts.chat.format import ChatFormat
from rollouts.chat.masks import SupervisedRow, tokenize_supervised
from rollouts.child_environment import pass_on
from rollouts.compose.course import Course, Data
from rollouts.compose.demonstrations import HeldOutPrompts
from rollouts.compose.manifest import make_manifest, manifest_to_change, resumed_manifest, unreadable_words
from rollouts.compose.parts import (
    Loggers,
    Parts,
    load_chat,
    make_inference,
    make_loggers,
    make_training,
    plain_plan,
    repeatable,
)
from rollouts.compose.plan import Plan
from rollouts.compose.resume import (
    Resumed,
    find_checkpoint,
    restore,
    resume_command,
    set_aside,
    write_config,
)
from rollouts.compose.watch import Watcher
from rollouts.env.authoring import tools_of
from rollouts.env.schema import tool_schema
from rollouts.errors import OutputError, RolloutsError, cause_of
from rollouts.run_folder import RunFolder, check_out, default_out
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.rollout_gen.group_rewards import group_scorer
from rollouts.training.types import RankServer, TrainingBackend
from rollouts.types import Sample, Task

__all__ = ["demonstration_samples", "freeze_loaded", "launch", "run_interruptible", "without_interrupts"]


def launch(
    plan: Plan,
    watcher: Watcher,
    started: float,
    *,
    resume: Path | None = None,
    checkpoint: str = "",
    home: Path | None = None,
    also_held_out: Sequence[Task] = (),
) -> dict[str, Any]:
    """Run the plan to its end; returns what summary.json holds. `started` is `time.perf_counter()` at the start.

    `resume` is the folder of an earlier run to go on with, from its last checkpoint, or from the one named
    `checkpoint`; where the plan's own setting `resume` is `auto`, from the last one that is whole. Relative paths begin
    at `home` (None: the working directory). What `also_held_out` asks is not demonstrated either, though this run does
    not evaluate it. On a rank above 0 of a distributed backend this serves rank 0, and gives {}.

    Raises:
        UserError: before anything is written, or where an environment shows its mistake only when it is played.
        RunError: the run failed; the folder says how far it came.
        KeyboardInterrupt: likewise.
    """
    settings = plan.settings
    pass_on(settings.pass_env)
    home = home or Path.cwd()
    named = resume or (Path(settings.out) if settings.out else None)
    out = named or Path(default_out(plan.env_name, plan.one("loss").name))
    if resume is None and (named or not (home / out).exists()):  # a name that nobody chose may be taken
        check_out(str(out), home)
    chosen = find_checkpoint(out, checkpoint, home) if checkpoint else None
    held_out = plan.eval_tasks()
    buffer = plan.task_buffer(held_out) if settings.mode == "rl" else DataBuffer([])
    chat = load_chat(plan)
    samples = demonstration_samples(plan, chat, [*held_out, *also_held_out]) if settings.mode == "sft" else []
    data = Data(buffer, samples)
    scorer = group_scorer(plan.rewards, settings.on_invalid_reward, timeout_seconds=settings.reward_seconds)
    backend = make_training(plan)
    if isinstance(backend, RankServer):
        backend.serve()
        return {}
    ending = contextlib.ExitStack()  # left last
    try:
        with _opened(out, home, is_named=named is not None, is_there=resume is not None) as folder:
            with _discarded(folder):
                inference = make_inference(plan, backend, str(folder.path))
            resumed = None
            if resume is not None:
                resumed = restore(backend, folder, plan, chosen, auto=settings.resume == "auto")
                if resumed.state.data:
                    buffer.load_state_dict(resumed.state.data)
                resumed = _take_back(plan, folder, backend, resumed)
            with _discarded(folder):
                logger = _begin(plan, folder, resumed)
            parts = Parts(plan, chat, backend, inference, folder, logger, watcher, held_out, scorer)
            notes = _notes(parts, also_held_out)
            return _run_and_summarise(parts, data, resumed, notes, started, ending)
    finally:
        with ending:
            backend.close()


@contextlib.contextmanager
def _opened(out: Path, home: Path, *, is_named: bool, is_there: bool) -> Iterator[RunFolder]:
    """The run's folder, locked for this process: one that is there, a new one, or a new one under a name that is
    free.
    """
    make = RunFolder.reopen if is_there else RunFolder if is_named else RunFolder.new
    with contextlib.closing(make(out, home)) as folder:
        yield folder


@contextlib.contextmanager
def _discarded(folder: RunFolder) -> Iterator[None]:
    """A new folder goes away again where the run is refused before it begins."""
    try:
        yield
    except BaseException:
        folder.discard()
        raise


def _take_back(plan: Plan, folder: RunFolder, backend: TrainingBackend, resumed: Resumed) -> Resumed:
    """Make the checkpoint that the run goes on from its last one. Gives what to tell besides.

    This comes before anything that the steps after it have left goes away, and after the summary: whoever goes on after
    a kill in between finds a run that has not ended, and a checkpoint no later than what it tells of.
    """
    step, path = resumed.state.step, resumed.checkpoint
    folder.forget_end()
    moved = set_aside(folder, step + 1 if resumed.is_own else step)
    if path is not None and not resumed.is_own:  # from here on the run has it too
        folder.sync()
        backend.save(str(folder.checkpoint_path(step)), msgspec.to_builtins(resumed.state)).wait()
    shown = None if path is None else folder.in_words(str(path))
    before = manifest_to_change(folder)
    if before is None:
        resumed = resumed._replace(notes=(*resumed.notes, unreadable_words(folder)))
    else:
        manifest = resumed_manifest(before, plan, step, shown)
        manifest["checkpoint"] = None if path is None else folder.relative(folder.checkpoint_path(step))
        if path is not None and not resumed.is_own:
            manifest["resumed"][-1]["from"] = str(path)
        folder.write_json("manifest.json", manifest)
    if not moved:
        return resumed
    names = ", ".join(sorted(each.name for each in moved))
    return resumed._replace(notes=(*resumed.notes, f"set aside in {folder.shown / 'checkpoints'}: {names}"))


def _begin(plan: Plan, folder: RunFolder, resumed: Resumed | None) -> Loggers:
    """Write what says what the run is, and make its loggers; what a resumed run does again is taken back."""
    write_config(folder, repeatable(plan))
    if resumed is None:
        folder.write_json("manifest.json", make_manifest(plan))
        return make_loggers(plan, folder, 0)
    logger = make_loggers(plan, folder, resumed.state.step)
    try:
        folder.forget_steps(resumed.state.step)
    except BaseException:
        logger.close()
        raise
    return logger


def demonstration_samples(plan: Plan, chat: ChatFormat, held_out: Sequence[Task]) -> list[Sample]:
    """Rows of the environments' expert conversations, in the order in which the run trains on them, as many as it can
    use; the assistant's tokens are live. None is of a task that is held out.
    """
    count = max(1, plan.settings.steps * plan.settings.prompts_per_step)
    tools = {
        env.alias: [tool_schema(tool.function, tool.name) for tool in tools_of(env.make_checked())]
        for env in plan.environments
    }
    known: dict[tuple[str, int], list[SupervisedRow]] = {}
    samples: list[Sample] = []
    for place, (env, number, messages) in enumerate(itertools.islice(plan.demonstrations(held_out), count)):
        key = env.alias, number
        if key not in known:
            known[key] = tokenize_supervised(messages, tools[env.alias], chat)
        samples += [Sample(messages, tokens=r.tokens, loss_mask=r.loss_mask, rollout_index=place) for r in known[key]]
    return samples


def _run_and_summarise(
    parts: Parts,
    data: Data,
    resumed: Resumed | None,
    notes: Sequence[str],
    started: float,
    ending: contextlib.ExitStack,
) -> dict[str, Any]:
    """Run under trio; whatever happens, close the loggers, write the summary, and only then raise. Once it is
    interrupted it is not interrupted again, until `ending` is left.
    """
    course = Course(parts, data, resumed)
    summary = course.summary
    failure: BaseException | None = None
    try:
        parts.watcher.begin(parts.plan, parts.folder.shown, [*notes, *(resumed.notes if resumed else ())])
        parts.call_hooks("rollouts_run_start", settings=plain_plan(parts.plan), folder=str(parts.folder.path))
        freeze_loaded()
        run_interruptible(course.run)
    except BaseException as error:  # raised again below
        if isinstance(cause_of(error), KeyboardInterrupt):
            ending.enter_context(without_interrupts())
        failure = _told(error, parts, summary)
    summary["wall_seconds"] = time.perf_counter() - started
    summary["cpu_seconds"] = time.process_time()
    parts.logger.close()
    if parts.logger.faults:
        summary["faults"] = [str(fault) for fault in parts.logger.faults]
    parts.watcher.faults(parts.logger.faults)
    try:
        parts.folder.write_json("summary.json", summary)
    except OutputError as error:
        failure = failure or error  # the first error is the one to tell
    parts.call_hooks("rollouts_run_end", summary=summary)
    parts.watcher.end(summary)
    if failure is not None:
        raise failure
    return summary


def freeze_loaded() -> None:
    """Exclude loaded objects from garbage collection: hundreds of thousands, of imported packages, which each full
    collection would walk through, a fifth of what a turn costs. They stay excluded at the end of a run, so that the
    process ends a second sooner. If you go on in the same process, call `gc.unfreeze()`.
    """
    gc.unfreeze()  # those of an earlier run, which can be collected now
    gc.collect()
    gc.freeze()


def run_interruptible(function: Callable[[], Awaitable[None]]) -> None:
    """`trio.run`, where Ctrl-C comes at a checkpoint, and tears no context manager in the middle of its exit. A second
    one comes at once: a function that blocks has no checkpoints.
    """
    before, owner = signal.getsignal(signal.SIGINT), os.getpid()

    async def main() -> None:
        found = signal.getsignal(signal.SIGINT)
        trios = found if callable(found) else signal.default_int_handler

        def interrupt(number: int, frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if os.getpid() == owner:
                trios(number, frame)
            else:  # a child that was forked has no trio
                signal.default_int_handler(number, frame)

        if found is before:  # trio has installed none: not the main thread, or not its business
            await function()
            return
        signal.signal(signal.SIGINT, interrupt)
        try:
            await function()
        finally:
            if signal.getsignal(signal.SIGINT) is interrupt:
                signal.signal(signal.SIGINT, trios)

    trio.run(main, restrict_keyboard_interrupt_to_checkpoints=True)


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Ctrl-C, and the signals that act as it does, do nothing in here: what was interrupted already ends in order. Only
    the main thread can see to it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


def _notes(parts: Parts, also_held_out: Sequence[Task]) -> list[str]:
    """What is unusual about this run, in words: its template, its backend, its held-out tasks."""
    report = parts.chat.report
    notes = list(parts.plan.notes)
    notes += [] if report.append_only and not report.refusals else report.words()
    notes += getattr(parts.backend, "notes", [])
    asked, drawn = parts.plan.settings.eval_tasks, len(parts.held_out)
    if drawn < asked:
        gave = "environment gave" if len(parts.plan.environments) == 1 else "environments gave"
        notes.append(f"the {gave} {drawn} different held-out tasks, --eval-tasks asked for {asked}")
    shared = HeldOutPrompts([*parts.held_out, *also_held_out]).shared if parts.plan.settings.mode == "sft" else 0
    if shared:
        notes.append(
            f"{shared} held-out tasks have the prompt of another one, so that their demonstrations cannot be told "
            "apart: see that demonstrations('train', rng) gives none of them"
        )
    return notes


def _told(error: BaseException, parts: Parts, summary: dict[str, Any]) -> BaseException:
    """The error to raise: one, not a group of one, which says how far the run came. The summary is told too."""
    cause = cause_of(error)
    where = f"{summary['steps']} of {parts.plan.settings.steps} steps"
    again = f"go on with: {resume_command(parts.folder.shown)}"
    if isinstance(cause, KeyboardInterrupt):
        summary["status"] = "interrupted"
        return KeyboardInterrupt(f"interrupted after {where}; {again}")
    summary["status"] = "failed"
    summary["error"] = f"{type(cause).__name__}: {cause}"
    if isinstance(cause, RolloutsError):
        cause.args = (f"{cause}\nthe run failed after {where}; {parts.folder.shown} keeps what was done; {again}",)
    return cause
