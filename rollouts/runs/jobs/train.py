"""Training: one run from its first step, or from its checkpoint, to its end.

What happens, in this order:

    train            draws tasks and data, loads the model into the backend, opens the folder, restores the checkpoint
                     of a resumed run, and opens the loggers
    Training.run     starts the engines, gives them the weights, and evaluates ("before")
    _reinforcement   mode rl: samples groups and trains on them, step by step (`training.loops.rl`)
    _supervised      mode sft: trains on rows, step by step (`training.loops.sft`)
    _between         after a step, before it is logged: evaluates if it is time, calls `on_step` and the hooks
    _after           after a step is logged: decides whether the run ends here, and saves if it is time
    _finish          evaluates ("after"), and writes the last checkpoint

The checkpoint of a step is written after its trajectories and metrics, and only refers to files that are on the disk.
If the process is killed in between, a resume removes the trajectories and metrics after its checkpoint. Not here: the
parts of a session that all runs share (`session`), and the checkpoint from which a run resumes (`resume`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from rollouts.errors import ConfigError, cause_of, counted
from rollouts.evaluate import evaluation_metrics
from rollouts.inference.base import InferenceBackend
from rollouts.loggers.jsonl import JSONLLogger
from rollouts.runs.components import make_component
from rollouts.runs.folder import MakeFolder
from rollouts.runs.held_objects import again_command
from rollouts.runs.jobs import learning, sources
from rollouts.runs.jobs.evaluating import Evaluator, HeldOutLoss, HeldOutTasks
from rollouts.runs.jobs.saving import Occasion, Saver, profiled_steps, write_step, write_times
from rollouts.runs.jobs.stopping import FinishedStep, Stopping, call_on_step, summary_of
from rollouts.runs.manifest import MANIFEST, changed_code, code_files, keep_code, make_manifest
from rollouts.runs.observer import GENERATING, SAVING, SYNCING, TRAINING, Observer
from rollouts.runs.opponents import entered, make_opponents
from rollouts.runs.plan import Plan, config_text, title
from rollouts.runs.resume import REVISION, Resumed, RunState, logged_steps, restore, take_back
from rollouts.runs.sample_rows import SAMPLES, step_rollouts
from rollouts.runs.session import (
    Interrupts,
    Player,
    Session,
    Watching,
    chat_notes,
    load_chat,
    make_inference,
    second_interrupt_at_once,
)
from rollouts.runs.times import Start
from rollouts.runs.workers import death_metrics, open_folder
from rollouts.training.algorithms.algorithm import stage_at
from rollouts.training.algorithms.corrections import applied_stages, samples_current_weights
from rollouts.training.batches import RankServer, TrainingBackend
from rollouts.training.loops.rl import Callbacks, LoopState, StepReport, train_rl
from rollouts.training.loops.rl_batch import RLSettings
from rollouts.training.rollout_gen.groups import Group, group_scorer
from rollouts.training.rollout_gen.manager import GroupManager
from rollouts.training.rollout_gen.pool import FailurePolicy, Failures
from rollouts.training.rollout_gen.steps import environment_metrics
from rollouts.training.weights.store import best_checkpoint
from rollouts.training.weights.sync import WeightSyncManager
from rollouts.types import Sample, Task

if TYPE_CHECKING:
    from rollouts.training.rollout_gen.saved import SavedGroups

PREPARING = "preparing rows of data"


def train(
    plan: Plan,
    make_folder: MakeFolder,
    observer: Observer,
    started: Start,
    *,
    resumes: bool = False,
    checkpoint: Path | None = None,
    also_held_out: Sequence[Task] = (),
    on_begin: Callable[[], None] = lambda: None,
    hours_from: Start | None = None,
) -> dict[str, Any]:
    """Run the plan to its end; returns the content of summary.json. On a rank above 0 it serves rank 0, and returns {}.

    `started` is the start of the run; `--max-hours` count from `hours_from`, if that was earlier. A run that `resumes`
    continues from `checkpoint`, or from the last one in the folder (with `--resume auto`: the last undamaged one).
    Tasks in `also_held_out` are neither demonstrated nor evaluated. `on_begin` is called after all checks, before the
    folder changes.

    Raises:
        UserError: before anything is written; also later, if only playing an environment shows its mistake.
        RunError, KeyboardInterrupt: the run failed, or Ctrl-C was pressed; the folder says how far it came.
    """
    settings, held_out = plan.settings, plan.eval_tasks()  # drawn before any training task
    chat = load_chat(settings, plan.environments, tool_parser=plan.tool_parser)
    data = sources.run_data(plan, held_out, also_held_out, chat, lambda rows: observer.phase(PREPARING, rows))
    with Session(observer, started, plan.manager) as session:
        backend = make_training(plan, observer.phase)
        if isinstance(backend, RankServer):
            backend.serve()
            return {}
        session.resources.callback(backend.close)
        folder = open_folder(session, plan.environments, make_folder)
        loggers, code = plan.chosen["logger"], code_files(plan.references, plan.resolved.source)
        manifest = make_manifest(settings.seed, plan.references, code, folder) | data.as_manifest
        engines = make_engines(plan, backend, folder.path)
        session.backends = [(plan.one("training"), backend), (plan.one("inference"), engines[0])]
        own, resumed, first = [each for each in loggers if each.component is JSONLLogger], None, 0
        if resumes:
            resumed = restore(backend, folder, settings, plan.flat, logged_steps(folder.path, own), checkpoint)
            resumed = resumed._replace(notes=(*resumed.notes, *changed_code(folder.path, code, folder.shown)))
            first = resumed.state.step
            if resumed.state.data:
                data.buffer.load_state_dict(resumed.state.data)
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
        opponents = make_opponents(plan.opponents, settings, plan.environments, str(folder.path))
        player = Player(settings, plan.environments, plan.rewards, chat, opponents)
        job = Training(plan, session, player, backend, engines, data, resumed, stopping)
        notes = [*plan.notes, *chat_notes(chat), *backend.notes, *data.notes, *(resumed.notes if resumed else ())]
        session.begin(job, title(plan), settings.steps, notes, plan.plain)
        job.start()
    return job.summary


def make_training(plan: Plan, watch: Callable[[str], None] = lambda name: None) -> TrainingBackend | RankServer:
    """The training backend with its model loaded; on a rank above 0 of a distributed backend, the RankServer. `watch`
    is called with the name of this phase.

    Raises UserError, also if a launcher started several processes and the backend supports only one.
    """
    settings, chosen = plan.settings, plan.one("training")
    watch(f"loading {Path(settings.model).name}")
    available = plan.training_arguments() | {"config": config_text(plan.resolved, with_secrets=True)}
    backend: TrainingBackend | RankServer = make_component("training backend", chosen, available)
    if isinstance(backend, RankServer):
        return backend
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched != "1" and backend.world_size == 1:
        backend.close()
        raise ConfigError(
            f"a launcher started {launched} processes (WORLD_SIZE), but --training {chosen.name} trains in one; type "
            "--training fsdp, or start it without a launcher"
        )
    if settings.profile and not backend.can_profile:
        backend.close()
        raise ConfigError(
            f"--profile {settings.profile}: the training backend {chosen.name} cannot be profiled; leave --profile "
            "out, or choose another one, such as --training torch"
        )
    return backend


def make_engines(plan: Plan, backend: TrainingBackend, folder: Path) -> list[InferenceBackend]:
    """The run's engine, and that of `--eval-inference` if there is one, not entered. Raises UserError."""
    spec = plan.engine._replace(training=backend, folder=str(folder))
    engines = [make_inference(plan.one("inference"), spec, plan.environments, must_train=plan.settings.samples)]
    for chosen in plan.chosen["eval_inference"]:
        spec = spec._replace(folder=str(folder / "eval_inference"), pinned=True)
        pinned = make_inference(chosen, spec, plan.environments, must_train=True)
        if not pinned.capabilities.owns_weights:
            raise ConfigError(
                f"--eval-inference {chosen.name}: it shares the weights of the trainer, which change while it "
                "evaluates; an engine that names `pinned` in its factory can make a copy (docs/inference.md)"
            )
        engines.append(pinned)
    return engines


class Training:
    """The loop of one run. It trains on groups (mode rl) or on rows of `data` (mode sft), and fills `summary`.

    Its state is the content of the next checkpoint: that of the loop, and the last step with its metrics.
    """

    def __init__(
        self,
        plan: Plan,
        session: Session,
        player: Player,
        backend: TrainingBackend,
        engines: Sequence[InferenceBackend],
        data: sources.RunData,
        resumed: Resumed | None,
        stopping: Stopping,
    ) -> None:
        settings, note, self.inference = plan.settings, session.observer.note, engines[0]
        self.plan, self.session, self.backend, self.data, self.stopping = plan, session, backend, data, stopping
        self._start = resumed.state if resumed is not None else RunState(0, settings.mode, {})
        self._resumes = resumed is not None and resumed.checkpoint is not None
        self._interrupts = Interrupts()
        self._loop: dict[str, Any] = {}  # the states of buffer, manager and loop, if there are any
        self._metrics: dict[str, float] = {}
        self._logged, self._logged_version = self._start.step, backend.version  # after the last logged step
        self._save_seconds: float | None = None
        self._stop = stopping.met_before(self._start.stopped)
        self._profiled = profiled_steps(self._start.step, settings.steps, settings.profile)
        self._syncing = WeightSyncManager(
            [self.inference], temperature=settings.temperature, on_send=lambda: session.observer.phase(SYNCING)
        )
        self._watching = Watching(session.observer, plan.one("inference").name, self.inference, len(backend.notes))
        failures = Failures(FailurePolicy(settings.retries, settings.max_failures))
        scorer = group_scorer(plan.rewards, settings.on_invalid_reward, timeout_seconds=settings.reward_seconds)
        held_out = HeldOutTasks(data.held_out, session, player, scorer, failures)
        loss = HeldOutLoss(backend, data.held_out_samples, note)
        self.evaluator = Evaluator(held_out, loss, backend, engines)
        replaced = resumed.checkpoint if resumed is not None and resumed.is_own and self._start.by_clock else None
        evaluates = bool(settings.eval_every and data.held_out)
        self.saver = Saver(session.folder, settings, backend, self._start.step, replaced, evaluates, note)
        self._learning, self._parts = learning.LearningCheck(note), learning.PartCounts()
        self.summary: dict[str, Any] = {
            "status": "done",
            "steps": self._start.step,
            "evaluation": self.evaluator.results,
            "eval_tasks": settings.eval_tasks,
            **({"held_out_loss": loss.by_step} if data.held_out_samples else {}),
            **({"resumed_from": self._start.step} if resumed is not None else {}),
        }

    def start(self) -> None:
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
        observer, player = self.session.observer, self.evaluator.own.player
        self.saver.begin(self._start.step)
        with second_interrupt_at_once(interrupt_handler) as self._interrupts:
            if not self.inference.capabilities.in_process:
                observer.phase("starting the engine")
            async with self.inference, entered(player.opponents), self.evaluator.entered():
                observer.engines(self._watching.engines)
                await self._syncing.sync(self.backend)
                if self._resumes:
                    await self.evaluator.resume(self._start)
                else:
                    self.session.loggers.add_to_next(await self.evaluator.evaluate("before", 0))
                await self._profile_before(self._start.step)
                if self._stop is None:
                    self._show_step(self._start.step)
                    await (self._supervised() if self.plan.settings.mode == "sft" else self._reinforcement())
                await self.evaluator.wait()
                self.evaluator.take()
                await self._finish()

    async def _reinforcement(self) -> None:
        """The steps of mode rl: groups are sampled, or read from earlier runs, and trained on."""
        plan, settings, kept, own = self.plan, self.plan.settings, self._start.loop, self.evaluator.own
        begun = kept.get("start_versions", kept.get("begun_with", ()))
        start = LoopState(self._start.step, kept.get("kl_coefficients", {}), begun)
        play = own.player.at(settings.temperature, settings.seed, self._watching.begin, self._watching.end)
        is_own_policy = self.inference.capabilities.in_process and samples_current_weights(settings)
        config = RLSettings(
            settings.steps,
            # Without sampling no engine needs the weights of a step: evaluations sync before they begin.
            settings.sync_every if settings.samples else max(1, settings.steps),
            temperature=settings.temperature,
            response_tokens_max=settings.max_tokens,
            minibatches=settings.minibatches,
            staleness=settings.staleness,
            record=settings.record == "tokens",
            samples=settings.samples,
        )
        async with sources.group_source(
            plan,
            self.data,
            self._start.rollouts,
            play=play,
            inference=self.inference,
            score_groups=own.score_groups,
            failures=own.failures,
        ) as manager:
            self._loop = self._loop_state(start, manager)

            async def on_logged(report: StepReport) -> None:
                self.session.loggers.log_samples(SAMPLES, step_rollouts(report), report.step)
                self._loop = self._loop_state(report.state, manager)
                write_times(self.session.folder, report)
                if settings.keep_trajectories != "all":
                    self.session.folder.remove_steps(report.step + 1 - settings.keep_trajectories)
                await self._after(report.step, report.metrics)

            await train_rl(
                self.backend,
                manager,
                config,
                stages=applied_stages(plan.schedule, is_own_policy=is_own_policy),
                syncing=self._syncing,
                metrics_logger=self.session.loggers,
                callbacks=Callbacks(self._begin_training, self._on_step, on_logged, lambda: self._stop is not None),
                start=start,
            )

    def _loop_state(self, loop: LoopState, manager: GroupManager | SavedGroups) -> dict[str, Any]:
        own = {"kl_coefficients": dict(loop.kl_coefficients), "start_versions": list(loop.start_versions)}
        return {"data": self.data.buffer.state_dict(), "rollouts": manager.state_dict(), "loop": own}

    def _begin_training(self, samples: list[Sample], step: int) -> None:
        """Called with a step's samples before they are trained. From here on, Ctrl-C waits until the step is logged and
        saved, so that its checkpoint is complete; the rest of a step is short.
        """
        self.session.call_hooks("rollouts_samples", samples=samples, step=step)
        self.session.observer.phase(TRAINING)
        self._interrupts.is_held = True

    async def _on_step(self, report: StepReport) -> dict[str, float]:
        """Called after a step of mode rl, before it is logged. Returns more metrics."""
        plan = self.plan
        write_step(self.session.folder, report, tokens=plan.settings.record == "tokens")
        own = environment_metrics(report.groups, self.data.buffer.epochs)
        own |= death_metrics(plan.environments, self.summary) | self.data.buffer.sampler_metrics
        self._parts.see(report.groups)
        algorithm = stage_at(plan.schedule, report.step).algorithm
        of_step = report.groups, report.advantages, report.metrics, algorithm, plan.settings
        self._learning.see(learning.findings(*of_step))
        return own | await self._between(report.step, report.metrics | own, report.groups)

    async def _supervised(self) -> None:
        """The steps of mode sft."""
        from rollouts.training.loops.sft import SFTSettings, train_sft

        async def on_step(step: int, metrics: dict[str, float]) -> dict[str, float]:
            # An engine with its own weights only needs them in evaluations, which send them.
            synced = {} if self.inference.capabilities.owns_weights else await self._syncing.sync(self.backend)
            self._learning.see({learning.NOTHING: learning.why_nothing_demonstrated(metrics)})
            return synced | await self._between(step, metrics | synced, [])

        settings, schedule = self.plan.settings, self.plan.schedule
        self._interrupts.is_held = self._start.step < settings.steps  # a step of this mode is training alone
        await train_sft(
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
        settings, done = self.plan.settings, step + 1
        self.summary["steps"] = done
        if step in self._profiled[-1:]:
            await self.backend.stop_profile(str(self.session.folder.path / "profile"))
        extra: dict[str, float] = {}
        if self._save_seconds is not None:
            extra["time/save"], self._save_seconds = self._save_seconds, None
        self.evaluator.take()
        self._watching.notes(self.backend)
        # The end of the run always evaluates.
        if settings.eval_every and done % settings.eval_every == 0 and done < settings.steps:
            extra |= {} if self.evaluator.is_beside else await self._serve_newest()
            extra |= await self._evaluate_between(done)
        extra |= await call_on_step(self.plan.on_step, FinishedStep(step, metrics | extra, groups))
        self.session.observer.step(step, metrics | extra, groups)
        self.session.call_hooks("rollouts_step_end", metrics=metrics | extra, step=step)
        return extra

    async def _evaluate_between(self, done: int) -> dict[str, float]:
        """Evaluate after a step that is not logged yet. Ctrl-C ends the evaluation; the step is still logged."""
        self._interrupts.is_held, has_asked = False, self._interrupts.is_asked
        try:
            return {} if has_asked else await self.evaluator.between(done)
        except BaseException as error:
            if not isinstance(cause_of(error), KeyboardInterrupt):
                raise
            self._interrupts.is_asked = True
            self.session.observer.note(f"interrupted: the evaluation after step {done} is left out")
            return {}
        finally:
            self._interrupts.is_held = True

    async def _after(self, step: int, metrics: dict[str, float]) -> None:
        """Called after a step (0-based) is logged: saves if it is time. Raises a KeyboardInterrupt that was held."""
        settings, done = self.plan.settings, step + 1
        self._logged, self._logged_version, self._metrics = done, self.backend.version, dict(metrics)
        if done < settings.steps:
            self._stop = self.stopping.reason(done, self.evaluator.late | metrics)
            self.evaluator.late = {}
        self.saver.watch(done)
        occasion = "" if self._stop is not None else self.saver.occasion(done)  # the end of the run always saves
        if occasion:
            began = time.perf_counter()
            if await self._save(done, occasion):
                self._save_seconds = time.perf_counter() - began
        if self._interrupts.is_asked:
            raise KeyboardInterrupt
        self._interrupts.is_held = settings.mode == "sft" and done < settings.steps and self._stop is None
        await self._profile_before(done)
        if self._stop is None:
            self._show_step(done)

    def _show_step(self, done: int) -> None:
        """Show the observer what the step after `done` steps begins with."""
        settings = self.plan.settings
        if done < settings.steps:
            rollouts = settings.prompts_per_step * settings.samples_per_prompt
            self.session.observer.phase(*((GENERATING, 0, rollouts) if settings.samples else (TRAINING,)))

    async def _profile_before(self, step: int) -> None:
        """Start the profiler if the next step is the first one to profile."""
        if step in self._profiled[:1]:
            await self.backend.start_profile()

    async def _serve_newest(self) -> dict[str, float]:
        """Send the newest weights to the engine before an evaluation, even if `sync_every` did not. Returns `sync/`
        metrics.
        """
        is_served = self._syncing.version == self.backend.version
        return {} if is_served else await self._syncing.sync(self.backend)

    async def _finish(self) -> None:
        """Do the last evaluation and checkpoint, unless an earlier process did."""
        settings, steps, folder = self.plan.settings, self.summary["steps"], self.session.folder
        if self._resumes and self._start.step == steps and "after" in self._start.evaluation:
            self.evaluator.results["after"] = self._start.evaluation["after"]
        else:
            await self._serve_newest()
            self._metrics |= await self.evaluator.evaluate("after", steps)
            await self._save(steps, "steps", is_last=True)
        self.summary["checkpoint"] = folder.relative(folder.checkpoint_path(steps))
        best = best_checkpoint(folder.checkpoints)
        if best is not None and (settings.keep_best or settings.keep_checkpoints):
            self.summary["best"] = {**best._asdict(), "checkpoint": folder.relative(best.checkpoint)}
        # Last: a logger that fails loses no step. A resumed run logs it again, since a kill may come before it.
        last = {name: value for name, value in self._metrics.items() if name == "eval/loss"}
        last |= evaluation_metrics(after) if (after := self.evaluator.results["after"]) else {}
        if steps and last:
            self.session.loggers.log(last, steps - 1)

    async def _save(self, done: int, occasion: Occasion, *, is_last: bool = False) -> bool:
        self.session.observer.phase(SAVING)
        state = self._state(done, occasion, is_last=is_last)
        return await self.saver.save(done, state, occasion, self.evaluator.pending)

    def save_interrupted(self) -> None:
        """After Ctrl-C: save the last logged step if it is not saved yet. Blocks, and ignores another Ctrl-C.

        Nothing is saved if a later step may have changed the weights (after a second Ctrl-C). Errors are reported.
        """
        done, is_same = self._logged, self.backend.version == self._logged_version
        if done == self.saver.saved or not is_same or len(self._interrupts.times) > 1:
            return
        if self.saver.save_now(done, self._state(done, "clock"), self.evaluator.pending):
            self.summary["checkpoint"] = self.session.folder.relative(self.session.folder.checkpoint_path(done))

    def _state(self, done: int, occasion: Occasion, *, is_last: bool = False) -> dict[str, Any]:
        """The run's own state in a checkpoint after `done` steps."""
        results = self.evaluator.results
        state = RunState(
            done,
            self.plan.settings.mode,
            self.session.folder.move.flat(self.plan.flat),
            **self._loop,
            evaluation=dict(results) if is_last else {"before": results["before"]},
            metric=self.saver.metric(self._metrics),
            by_clock=occasion == "clock",
            stopped=None if self._stop is None else self._stop._asdict(),
            patience=self.stopping.state,
            evaluating=self.evaluator.pending,
            revision=REVISION,
        )
        state_dict: dict[str, Any] = msgspec.to_builtins(state)
        return state_dict

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
        folder = self.session.folder.shown
        where = f"{self.summary['steps']} of {counted(self.plan.settings.steps, 'step')}"
        again = f"go on with: {again_command(self.plan.resolved, folder)}"
        if isinstance(failure, KeyboardInterrupt):
            return f"interrupted after {where}; {self.saver.unsaved(self.summary['steps'])}{again}"
        kept = f"{folder} keeps what was done"
        return f"{failure}\nthe run failed after {where}; {kept}; correct the cause, then {again}"
