"""Training: evaluate, train, evaluate, save; between steps also evaluations and checkpoints, as set.

The checkpoint of a step is written after its trajectories and metrics, and only refers to files that are on the disk.
If the process is killed in between, a resume removes the trajectories and metrics after its checkpoint. Not here: the
parts of a session that all runs share (`session`), and the checkpoint from which a run resumes (`resume`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from rollouts.chat.format import ChatFormat
from rollouts.errors import CheckpointError, RolloutsError, cause_of, counted
from rollouts.evaluate import evaluation_metrics
from rollouts.inference.base import InferenceBackend
from rollouts.loggers.jsonl import JSONLLogger
from rollouts.runs.folder import MakeFolder
from rollouts.runs.held_objects import again_command
from rollouts.runs.jobs import evaluating, learning, sources
from rollouts.runs.jobs.evaluating import make_training
from rollouts.runs.jobs.saving import Occasion, Saving, profiled_steps, write_step, write_times
from rollouts.runs.jobs.stopping import FinishedStep, Stopping, call_on_step, summary_of
from rollouts.runs.manifest import MANIFEST, changed_code, code_files, keep_code, make_manifest
from rollouts.runs.observer import GENERATING, SAVING, SYNCING, TRAINING, Observer
from rollouts.runs.opponents import entered, make_opponents
from rollouts.runs.plan import Plan, title
from rollouts.runs.resume import REVISION, Resumed, RunState, logged_steps, restore, take_back
from rollouts.runs.sample_rows import SAMPLES, step_rollouts
from rollouts.runs.session import (
    Interrupts,
    Player,
    Session,
    Watching,
    chat_notes,
    load_chat,
    second_interrupt_at_once,
)
from rollouts.runs.times import Start
from rollouts.runs.workers import death_metrics, open_folder
from rollouts.training.algorithms.algorithm import stage_at
from rollouts.training.batches import RankServer, TrainingBackend
from rollouts.training.loops.rl import LoopState, StepReport, train_rl
from rollouts.training.loops.rl_batch import RLSettings
from rollouts.training.rollout_gen.groups import Group, group_scorer
from rollouts.training.rollout_gen.manager import AsyncRolloutManager
from rollouts.training.rollout_gen.pool import FailurePolicy, Failures
from rollouts.training.rollout_gen.steps import environment_metrics
from rollouts.training.weights.store import best_checkpoint, write_metric
from rollouts.training.weights.sync import WeightSyncManager
from rollouts.types import Sample, Task

if TYPE_CHECKING:
    from rollouts.training.rollout_gen.saved import SavedGroups

SAVE_SECONDS = 1800.0
PREPARING = "preparing rows of data"


def train(
    plan: Plan,
    held_out: Sequence[Task],
    make_folder: MakeFolder,
    observer: Observer,
    started: Start,
    *,
    resumes: bool = False,
    checkpoint: Path | None = None,
    also_held_out: Sequence[Task] = (),
    on_begin: Callable[[], None] = lambda: None,
    hours_from: Start | None = None,
    advice: str = learning.ADVICE,
) -> dict[str, Any]:
    """Run the plan to its end; returns the content of summary.json. On a rank above 0 it serves rank 0, and returns {}.

    `started` is the start of the run; `--max-hours` count from `hours_from`, if that was earlier. A run that `resumes`
    continues from `checkpoint`, or from the last one in the folder (with `--resume auto`: the last undamaged one).
    Tasks in `also_held_out` are neither demonstrated nor evaluated. `on_begin` is called after all checks, before the
    folder changes. `advice` is what to do if the model cannot call tools.

    Raises:
        UserError: before anything is written; also later, if only playing an environment shows its mistake.
        RunError, KeyboardInterrupt: the run failed, or Ctrl-C was pressed; the folder says how far it came.
    """
    settings, environments = plan.settings, plan.environments
    run_title, tasks = title(plan), sources.task_source(plan, held_out)
    chat = load_chat(settings, environments, tool_parser=plan.tool_parser)
    of_tasks = sources.task_notes(plan, tasks, held_out, also_held_out, chat.tokenizer)
    data = sources.training_data(plan, [*held_out, *also_held_out], chat, lambda rows: observer.phase(PREPARING, rows))
    with Session(observer, started, plan.manager) as session:
        backend = make_training(plan, observer.phase)
        if isinstance(backend, RankServer):
            backend.serve()
            return {}
        session.resources.callback(backend.close)
        folder = open_folder(session, environments, make_folder)
        loggers, code = plan.chosen["logger"], code_files(plan.references, plan.resolved.source)
        manifest = make_manifest(settings.seed, plan.references, code, folder) | tasks.as_manifest
        engines = evaluating.make_engines(plan, backend, folder.path)
        session.backends = [(plan.one("training"), backend), (plan.one("inference"), engines[0])]
        own, resumed, first = [each for each in loggers if each.component is JSONLLogger], None, 0
        if resumes:
            resumed = restore(backend, folder, settings, plan.flat, logged_steps(folder.path, own), checkpoint)
            resumed = resumed._replace(notes=(*resumed.notes, *changed_code(folder.path, code, folder.shown)))
            first = resumed.state.step
            if resumed.state.data:
                tasks.buffer.load_state_dict(resumed.state.data)
        else:  # from here on the run can be resumed, also if the process is killed while a logger waits for a server
            folder.write_config(plan.config)
            folder.write_json(MANIFEST, manifest)
        # First the other loggers, which may fail: the run's own loggers remove lines of the folder's files.
        others = [each for each in loggers if each not in own]
        session.loggers.open(others, folder.path, plan.plain, first, may_fail=resumes)
        on_begin()
        if resumed is not None:
            resumed = take_back(backend, folder, resumed, manifest)
            folder.write_config(plan.config)
        keep_code(folder, code)
        session.loggers.open(loggers, folder.path, plan.plain, first)
        if resumed is not None:
            folder.forget_steps(first)
        before = resumed.state.patience if resumed is not None else {}
        stopping = Stopping(settings, (hours_from or started).wall, observer.note, data.patience, before)
        job = Training(plan, session, chat, backend, *engines, held_out, tasks, data, resumed, stopping, advice)
        notes = [*plan.notes, *chat_notes(chat), *backend.notes, *data.notes, *of_tasks]
        notes += resumed.notes if resumed else ()
        session.begin(job, run_title, settings.steps, notes, plan.plain)
        job.play()
    return job.summary


@dataclasses.dataclass(eq=False)
class Training:
    """One run from its first step, or from its checkpoint, to its end. It trains on `tasks` (mode rl) or on `data`
    (mode sft), and fills `summary` on the way.

    Its state is the content of the next checkpoint: the evaluations, the last step's metrics, and how long the last
    save took.
    """

    plan: Plan
    session: Session
    chat: ChatFormat
    backend: TrainingBackend
    inference: InferenceBackend
    pinned: InferenceBackend | None
    held_out: Sequence[Task]
    tasks: sources.TaskSource
    data: evaluating.ChatData
    resumed: Resumed | None
    stopping: Stopping
    advice: str

    def __post_init__(self) -> None:
        settings, resumed = self.plan.settings, self.resumed
        self._settings, self._folder = settings, self.session.folder
        self._start = resumed.state if resumed is not None else RunState(0, settings.mode, {})
        self._resumes = resumed is not None and resumed.checkpoint is not None
        self._evaluations: dict[str, dict[str, Any] | None] = {"before": None, "after": None}
        self._opponents = make_opponents(self.plan.opponents, settings, self.plan.environments, str(self._folder.path))
        self._player = Player(settings, self.plan.environments, self.plan.rewards, self.chat, self._opponents)
        self._metrics: dict[str, float] = {}
        self._loop: dict[str, Any] = {}  # the states of buffer, manager and loop, if there are any
        self._save_seconds: float | None = None
        self._interrupts = Interrupts()
        self._logged = self._saved = self._start.step  # steps
        self._logged_version = self.backend.version
        self._evaluated: tuple[int, dict[str, Any]] | None = None  # the last one, and after how many steps
        self._stop = self.stopping.met_before(self._start.stopped)
        self._saving = Saving(
            self._folder,
            settings,
            bytes_each=self.backend.checkpoint_bytes,
            by_clock=resumed.checkpoint if resumed is not None and resumed.is_own and self._start.by_clock else None,
            evaluates=bool(settings.eval_every and self.held_out),
            warn=self.session.observer.note,
        )
        self._learning = learning.LearningCheck(self.session.observer.note)
        self._parts = learning.PartCounts()
        engine, noted = self.plan.one("inference").name, len(self.backend.notes)
        self._watching = Watching(self.session.observer, engine, self.inference, noted)
        self._syncing = WeightSyncManager(
            [self.inference],
            temperature=settings.temperature,
            on_send=lambda: self.session.observer.phase(SYNCING),
        )
        self._failures = Failures(FailurePolicy(settings.retries, settings.max_failures))
        self._score_groups = group_scorer(
            self.plan.rewards, settings.on_invalid_reward, timeout_seconds=settings.reward_seconds
        )
        own = evaluating.HeldOutTasks(self.held_out, self.session, self._player, self._score_groups, self._failures)
        self._play_held_out, self._pinned, self._late = own.play, None, dict[str, float]()
        if self.pinned is not None:
            self._pinned = evaluating.PinnedEvaluations(
                self.pinned,
                lambda done, engine: own.play(f"step {done}", done, engine, shows=False),
                temperature=settings.temperature,
            )
        self._profiled = profiled_steps(self._start.step, settings.steps, settings.profile)
        self.summary: dict[str, Any] = {"status": "done", "steps": self._start.step, "evaluation": self._evaluations}
        self.summary["eval_tasks"] = settings.eval_tasks
        self._held_out_loss = evaluating.HeldOutLoss(self.backend, self.data.held_out, self.session.observer.note)
        if self.data.held_out:
            self.summary["held_out_loss"] = self._held_out_loss.by_step
        if resumed is not None:
            self.summary["resumed_from"] = self._start.step

    def play(self) -> None:
        """Run to the end under trio. After Ctrl-C the last finished step is saved."""
        try:
            trio.run(self.run, signal.getsignal(signal.SIGINT), restrict_keyboard_interrupt_to_checkpoints=True)
        except BaseException as error:
            if isinstance(cause_of(error), KeyboardInterrupt):
                self.session.ignore_interrupts()
                self.save_interrupted()
            raise

    async def run(self, interrupt_handler: Any) -> None:
        """Evaluate, train, evaluate, save. `interrupt_handler` is the handler of SIGINT outside of trio."""
        self._saving.begin(self._start.step)
        with second_interrupt_at_once(interrupt_handler) as self._interrupts:
            if not self.inference.capabilities.in_process:
                self.session.observer.phase("starting the engine")
            background = self._pinned.entered() if self._pinned is not None else contextlib.nullcontext()
            async with self.inference, entered(self._opponents), background:
                self.session.observer.engines(self._watching.engines)
                await self._syncing.sync(self.backend)
                if self._resumes:
                    self._evaluations["before"] = self._start.evaluation.get("before")
                else:
                    self.session.loggers.add_to_next(await self._evaluate("before", 0))
                if lost := await evaluating.resume_evaluation(
                    self._pinned, self.backend, self._start, self._folder.path
                ):
                    self.session.observer.note(lost)
                await self._profile_before(self._start.step)
                if self._stop is None:
                    await self._steps()
                if self._pinned is not None:
                    await self._pinned.wait()
                    self._take_pinned()
                await self._finish()

    async def _steps(self) -> None:
        """Train, from where the run begins to its end."""
        self._show_step(self._start.step)
        if self._settings.mode == "sft":
            await self._supervised()
        else:
            async with self._groups() as manager:
                await self._reinforcement(manager)

    def save_interrupted(self) -> None:
        """After Ctrl-C: save the last logged step if it is not saved yet. Blocks, and ignores another Ctrl-C.

        Nothing is saved if a later step may have changed the weights (after a second Ctrl-C). Errors are reported.
        """
        done, path = self._logged, self._folder.checkpoint_path(self._logged)
        if done == self._saved or self.backend.version != self._logged_version or len(self._interrupts.times) > 1:
            return
        self.session.observer.note(f"interrupted: saving step {done}")
        state = self._state(done, {"before": self._evaluations["before"]}, "clock")
        try:
            self._folder.sync()
            self.backend.save(str(path), state).wait(SAVE_SECONDS)
            self._saved = done
            self._saving.saved(path, "clock", self._pending_checkpoint())
        except (RolloutsError, TimeoutError) as error:
            self.session.observer.note(f"warning: the checkpoint was not written: {error}")
        else:
            self.summary["checkpoint"] = self._folder.relative(path)

    def finish(self, failure: BaseException | None) -> None:
        """Write into the summary why the last steps of the run taught the model nothing, and which rules to stop had no
        effect, if so.
        """
        if warnings := [*self._learning.at_the_end(), *self.stopping.at_the_end()]:
            self.summary["warnings"] = warnings
        if zero := self._parts.always_zero():
            self.summary["zero_parts"] = zero
        self.summary |= summary_of(self._stop)

    def message(self, failure: BaseException) -> str:
        """How far the run came, and how to resume it."""
        where = f"{self.summary['steps']} of {counted(self._settings.steps, 'step')}"
        again = f"go on with: {again_command(self.plan.resolved, self._folder.shown)}"
        if isinstance(failure, KeyboardInterrupt):
            return f"interrupted after {where}; {self._saving.unsaved(self._saved, self.summary['steps'])}{again}"
        kept = f"{self._folder.shown} keeps what was done"
        return f"{failure}\nthe run failed after {where}; {kept}; correct the cause, then {again}"

    async def _finish(self) -> None:
        """Do the last evaluation and checkpoint, unless an earlier process did."""
        steps = self.summary["steps"]
        path = self._folder.checkpoint_path(steps)
        if self._resumes and self._start.step == steps and "after" in self._start.evaluation:
            self._evaluations["after"] = self._start.evaluation["after"]
        else:
            await self._serve_newest()
            self._metrics |= await self._evaluate("after", steps)
            await self._save(path, steps, self._evaluations, "steps")
        self.summary["checkpoint"] = self._folder.relative(path)
        best = best_checkpoint(self._folder.checkpoints)
        if best is not None and (self._settings.keep_best or self._settings.keep_checkpoints):
            self.summary["best"] = {**best._asdict(), "checkpoint": self._folder.relative(best.checkpoint)}
        # Last: a logger that fails loses no step. A resumed run logs it again, since a kill may come before it.
        last = {name: value for name, value in self._metrics.items() if name == "eval/loss"}
        last |= evaluation_metrics(after) if (after := self._evaluations["after"]) else {}
        if steps and last:
            self.session.loggers.log(last, steps - 1)

    def _groups(self) -> AsyncRolloutManager | SavedGroups:
        """The source of the groups, in its state of the checkpoint."""
        return sources.group_source(
            self.plan,
            self.tasks,
            self._start.rollouts,
            play=self._player.at(
                self._settings.temperature, self._settings.seed, self._watching.begin, self._watching.end
            ),
            inference=self.inference,
            score_groups=self._score_groups,
            failures=self._failures,
        )

    def _reinforcement(self, manager: AsyncRolloutManager | SavedGroups) -> Awaitable[Any]:
        """The loop of mode rl, as an awaitable."""
        plan, settings = self.plan, self._settings
        kept = self._start.loop
        loop = LoopState(
            self._start.step, kept.get("kl_coefficients", {}), kept.get("start_versions", kept.get("begun_with", ()))
        )

        def state(loop: LoopState) -> dict[str, Any]:
            own = {"kl_coefficients": dict(loop.kl_coefficients), "start_versions": list(loop.start_versions)}
            return {"data": self.tasks.buffer.state_dict(), "rollouts": manager.state_dict(), "loop": own}

        async def on_step(report: StepReport) -> dict[str, float]:
            write_step(self._folder, report, tokens=settings.record == "tokens")
            own = environment_metrics(report.groups, self.tasks.buffer.epochs)
            own |= death_metrics(plan.environments, self.summary) | self.tasks.buffer.sampler_metrics
            self._parts.see(report.groups)
            algorithm = stage_at(plan.schedule, report.step).algorithm
            of_step = (report.groups, report.advantages, report.metrics, algorithm, settings)
            self._learning.see(learning.findings(*of_step, self.advice))
            return own | await self._between(report.step, report.metrics | own, report.groups)

        async def on_logged(report: StepReport) -> None:
            self.session.loggers.log_samples(SAMPLES, step_rollouts(report), report.step)
            self._loop = state(report.state)
            write_times(self._folder, report)
            if settings.keep_trajectories != "all":
                self._folder.remove_steps(report.step + 1 - settings.keep_trajectories)
            await self._after(report.step, report.metrics)

        self._loop = state(loop)
        # Groups that are carried over or prefetched have earlier weights, so the trainer's own tokens are weighed too.
        is_synchronous = settings.over_sampling == settings.sync_every == 1 and settings.staleness == 0
        samples = settings.samples
        is_current = samples and self.inference.capabilities.in_process and is_synchronous
        config = RLSettings(
            settings.steps,
            settings.sync_every if samples else max(1, settings.steps),  # evaluations get the newest weights themselves
            temperature=settings.temperature,
            response_tokens_max=settings.max_tokens,
            minibatches=settings.minibatches,
            staleness=settings.staleness,
            record=settings.record == "tokens",
            samples=samples,
        )
        return train_rl(
            self.backend,
            self.tasks.buffer,
            manager,
            [self.inference],
            config,
            self.session.loggers,
            algorithm=plan.algorithm,
            schedule=[stage.inside() for stage in plan.schedule] if is_current else plan.schedule,
            on_samples=self._begin_training,
            on_step=on_step,
            on_logged=on_logged,
            should_stop=lambda: self._stop is not None,
            syncing=self._syncing,
            start=loop,
        )

    def _begin_training(self, samples: list[Sample], step: int) -> None:
        """Called with a step's samples before they are trained. From here on, Ctrl-C waits until the step is logged and
        saved, so that its checkpoint is complete; the rest of a step is short.
        """
        self.session.call_hooks("rollouts_samples", samples=samples, step=step)
        self.session.observer.phase(TRAINING)
        self._interrupts.is_held = True

    def _supervised(self) -> Awaitable[Any]:
        """The loop of mode sft, as an awaitable."""

        from rollouts.training.loops.sft import SFTSettings, train_sft

        async def on_step(step: int, metrics: dict[str, float]) -> dict[str, float]:
            # An engine with its own weights only needs them in evaluations, which send them.
            synced = {} if self.inference.capabilities.owns_weights else await self._syncing.sync(self.backend)
            self._learning.see({learning.NOTHING: learning.why_nothing_demonstrated(metrics)})
            return synced | await self._between(step, metrics | synced, [])

        settings, schedule = self._settings, self.plan.schedule
        self._interrupts.is_held = self._start.step < settings.steps  # a step of this mode is training alone
        return train_sft(
            self.backend,
            self.data.samples,
            SFTSettings(settings.steps, settings.prompts_per_step, schedule[0].algorithm.aggregation),
            self.session.loggers,
            schedule=schedule,
            on_step=on_step,
            on_logged=self._after,
            should_stop=lambda: self._stop is not None,
            first_step=self._start.step,
        )

    async def _between(self, step: int, metrics: dict[str, float], groups: Sequence[Group]) -> dict[str, float]:
        """Called after a step (0-based), before it is logged: evaluates if it is time, then calls `on_step`, the
        observer and the hooks.
        """
        settings, done = self._settings, step + 1
        self.summary["steps"] = done
        if step in self._profiled[-1:]:
            await self.backend.stop_profile(str(self._folder.path / "profile"))
        extra: dict[str, float] = {}
        if self._save_seconds is not None:
            extra["time/save"], self._save_seconds = self._save_seconds, None
        self._take_pinned()
        self._watching.notes(self.backend)
        # The end of the run always evaluates.
        if settings.eval_every and done % settings.eval_every == 0 and done < settings.steps:
            extra |= await self._serve_newest() if self._pinned is None else {}
            extra |= await self._evaluate_between(done)
        extra |= await call_on_step(self.plan.on_step, FinishedStep(step, metrics | extra, groups))
        self.session.observer.step(step, metrics | extra, groups)
        self.session.call_hooks("rollouts_step_end", metrics=metrics | extra, step=step)
        return extra

    async def _evaluate_between(self, done: int) -> dict[str, float]:
        """Evaluate after a step that is not logged yet. Ctrl-C ends the evaluation; the step is still logged."""
        self._interrupts.is_held, has_asked = False, self._interrupts.is_asked
        try:
            if has_asked:
                return {}
            if self._pinned is not None:
                return await self._evaluate_pinned(self._pinned, done)
            return await self._evaluate(f"step {done}", done)
        except BaseException as error:
            if not isinstance(cause_of(error), KeyboardInterrupt):
                raise
            self._interrupts.is_asked = True
            self.session.observer.note(f"interrupted: the evaluation after step {done} is left out")
            return {}
        finally:
            self._interrupts.is_held = True

    async def _evaluate_pinned(self, pinned: evaluating.PinnedEvaluations, done: int) -> dict[str, float]:
        """Begin an evaluation that plays while training goes on, after the one before. Returns metrics of this step."""
        waited = await pinned.wait()
        self._take_pinned()
        loss = await self._held_out_loss.measure(done, self._settings.prompts_per_step)
        if not self.held_out or not self.plan.rewards:
            return loss
        return {**loss, "time/eval_wait": waited, **await pinned.start(self.backend, done)}

    def _take_pinned(self) -> None:
        """Log the results of an evaluation that has ended under its step, and rank its checkpoint by them."""
        if self._pinned is None or (found := self._pinned.take()) is None:
            return
        self._evaluated = found
        metrics = evaluation_metrics(found.evaluation)
        self._late |= metrics
        self.session.observer.evaluation(f"step {found.done}", found.evaluation)
        self.session.loggers.add(metrics, found.done - 1)
        path, ranked = self._folder.checkpoint_path(found.done), self._saving.ranking.value(metrics)
        if ranked is not None and path.exists():
            write_metric(path, ranked)

    async def _after(self, step: int, metrics: dict[str, float]) -> None:
        """Called after a step (0-based) is logged: saves if it is time. Raises a KeyboardInterrupt that was held."""
        done = step + 1
        self._logged, self._logged_version = done, self.backend.version
        self._metrics = dict(metrics)
        if done < self._settings.steps:
            self._stop = self.stopping.reason(done, self._late | metrics)
            self._late = {}
        self._saving.watch(done)
        occasion = "" if self._stop is not None else self._saving.occasion(done)  # the end of the run always saves
        if occasion:
            began = time.perf_counter()
            path = self._folder.checkpoint_path(done)
            if await self._save(path, done, {"before": self._evaluations["before"]}, occasion):
                self._save_seconds = time.perf_counter() - began
        if self._interrupts.is_asked:
            raise KeyboardInterrupt
        self._interrupts.is_held = self._settings.mode == "sft" and done < self._settings.steps and self._stop is None
        await self._profile_before(done)
        if self._stop is None:
            self._show_step(done)

    def _show_step(self, done: int) -> None:
        """Show the observer what the step after `done` steps begins with."""
        settings = self._settings
        if done < settings.steps:
            rollouts = settings.prompts_per_step * settings.samples_per_prompt
            self.session.observer.phase(*((GENERATING, 0, rollouts) if settings.samples else (TRAINING,)))

    async def _serve_newest(self) -> dict[str, float]:
        """Send the newest weights to the engine before an evaluation, even if `sync_every` did not. Returns `sync/`
        metrics.
        """
        is_served = self._syncing.version == self.backend.version
        return {} if is_served else await self._syncing.sync(self.backend)

    async def _evaluate(self, when: str, done: int) -> dict[str, float]:
        """Evaluate the held-out tasks after `done` steps, once per temperature, and keep the episodes in
        `trajectories/eval_*.jsonl`. Returns the `eval/` metrics; empty if there are no held-out tasks.
        """
        loss = await self._held_out_loss.measure(done, self._settings.prompts_per_step)
        if not self.held_out or not self.plan.rewards:
            return loss
        if when == "after" and done and self._evaluated is not None and self._evaluated[0] == done:
            evaluation = self._evaluated[1]  # these weights were evaluated just before the run stopped
        else:
            evaluation = await self._play_held_out(when, done, self.inference)
            self._evaluated = done, evaluation
        if when in self._evaluations:
            self._evaluations[when] = evaluation
        self.session.observer.evaluation(when, evaluation)
        return loss | evaluation_metrics(evaluation)

    async def _save(self, path: Path, done: int, evaluations: Mapping[str, Any], occasion: Occasion) -> bool:
        """Write a checkpoint that transformers loads, tokenizer and template included, with everything that a resume
        needs; then remove older checkpoints, as the settings say. Returns False if a checkpoint by the clock was not
        written because the disk has no room.

        The files to which it refers are flushed to the disk first, so that a crash of the machine loses none of them.
        """
        self.session.observer.phase(SAVING)
        state = self._state(done, evaluations, occasion)
        await trio.to_thread.run_sync(self._folder.sync)
        try:
            with trio.fail_after(SAVE_SECONDS):
                await self.backend.save(str(path), state)
        except trio.TooSlowError as error:
            words = f"the checkpoint {path} was not written in {SAVE_SECONDS:g} s; check the disk"
            raise CheckpointError(words) from error
        except CheckpointError as error:
            if occasion != "clock" or not error.is_full:
                raise
            self._saving.failed_by_clock(error)
            return False
        await trio.to_thread.run_sync(self._saving.saved, path, occasion, self._pending_checkpoint())
        self._saved = done
        return True

    def _state(self, done: int, evaluations: Mapping[str, Any], occasion: Occasion) -> dict[str, Any]:
        """The run's own state in a checkpoint after `done` steps."""
        state = RunState(
            done,
            self._settings.mode,
            self._folder.move.flat(self.plan.flat),
            **self._loop,
            evaluation=dict(evaluations),
            metric=self._saving.metric(self._metrics),
            by_clock=occasion == "clock",
            stopped=None if self._stop is None else self._stop._asdict(),
            patience=self.stopping.state,
            evaluating=self._pinned.pending if self._pinned is not None else 0,
            revision=REVISION,
        )
        state_dict: dict[str, Any] = msgspec.to_builtins(state)
        return state_dict

    def _pending_checkpoint(self) -> Path | None:
        """The checkpoint whose weights are being evaluated."""
        pending = self._pinned.pending if self._pinned is not None else 0
        return self._folder.checkpoint_path(pending) if pending else None

    async def _profile_before(self, step: int) -> None:
        """Start the profiler if the next step is the first one to profile."""
        if step in self._profiled[:1]:
            await self.backend.start_profile()
