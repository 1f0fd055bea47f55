"""The course of a run under trio: evaluate, train, evaluate, save; between the steps what the settings ask for.

What is saved after a step tells of nothing that is not written yet: trajectories and metrics come first, then the
checkpoint. A kill between the two is met by taking them back on resume. Left out: how the parts came about (`parts`),
and what a run that ended leaves behind (`launch`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import trio

from rollouts.compose.parts import Parts
from rollouts.compose.resume import REVISION, Resumed, RunState, flat_settings
from rollouts.compose.saving import Occasion, Saving
from rollouts.errors import CheckpointError
from rollouts.evaluate import Evaluation, evaluate
from rollouts.run_folder import trajectory_record
from rollouts.training.algorithms.schedule import stage_at
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.loops.rl_batch import advantage_rewards
from rollouts.training.loops.rl_loop import LoopState, RLTrainingConfig, StepReport, run_rl_training
from rollouts.training.loops.sft_loop import SFTTrainingConfig, run_sft_training
from rollouts.training.rollout_gen.by_environment import environment_metrics
from rollouts.training.rollout_gen.failures import FailurePolicy, Failures
from rollouts.training.rollout_gen.groups import Group
from rollouts.training.rollout_gen.manager import AsyncRolloutManager, RolloutConfig
from rollouts.training.weight_sync import WeightSyncManager
from rollouts.types import Sample

__all__ = ["Course", "Data", "step_records"]

SAVE_SECONDS = 1800.0
EVALUATION_TEMPERATURES = (1.0, 0.0)  # sampled, greedy


class Data(NamedTuple):
    """What the run trains on: tasks (mode rl) or rows of demonstrations (mode sft)."""

    buffer: DataBuffer
    samples: list[Sample]


class Course:
    """One run from its beginning, or from where it is resumed, to its end; `summary` is filled as it goes. The backend
    and the buffer stand there already.

    Its state is what the next checkpoint needs: what was evaluated, the last step's metrics, and how long the last
    save took.
    """

    def __init__(self, parts: Parts, data: Data, resumed: Resumed | None) -> None:
        self._parts = parts
        self._data = data
        self._resumed = resumed
        self._start = resumed.state if resumed is not None else RunState(0, parts.plan.settings.mode, {})
        self._evaluations: dict[str, dict[str, Any] | None] = {"before": None, "after": None}
        self._metrics: dict[str, float] = {}
        self._loop: dict[str, Any] = {}  # the states of buffer, manager and loop, where there are any
        self._save_seconds: float | None = None
        self._saving = Saving(
            parts.folder,
            parts.plan.settings,
            bytes_each=getattr(parts.backend, "checkpoint_bytes", None),
            by_clock=resumed.checkpoint if resumed is not None and resumed.is_own and self._start.by_clock else None,
            warn=parts.watcher.note,
        )
        self._syncing = WeightSyncManager([parts.inference], temperature=parts.plan.settings.temperature)
        self._failures = Failures(FailurePolicy(parts.plan.settings.retries, parts.plan.settings.max_failures))
        self._profiled = _profiled_steps(self._start.step, parts.plan.settings.steps, parts.plan.settings.profile)
        self.summary: dict[str, Any] = {"status": "done", "steps": self._start.step, "evaluation": self._evaluations}
        if resumed is not None:
            self.summary["resumed_from"] = self._start.step

    async def run(self) -> None:
        """Evaluate, train, evaluate, save."""
        parts, settings = self._parts, self._parts.plan.settings
        self._saving.begin(self._start.step)
        async with parts.inference:
            await self._syncing.sync(parts.backend)
            if self._resumed is not None and self._resumed.checkpoint is not None:
                self._evaluations["before"] = self._start.evaluation.get("before")
            else:
                self._evaluations["before"] = _as_dict(await self._evaluate("before"))
            await self._profile_before(self._start.step)
            if settings.mode == "sft":
                await self._train_sft()
            else:
                await self._train_rl()
            await self._finish()

    async def _finish(self) -> None:
        """The last evaluation and checkpoint, where the run that is resumed has not come to them."""
        parts, steps = self._parts, self._parts.plan.settings.steps
        saved = None if self._resumed is None else self._resumed.checkpoint
        if saved is not None and self._start.step == steps and "after" in self._start.evaluation:
            self._evaluations["after"] = self._start.evaluation["after"]
            path = parts.folder.checkpoint_path(steps)
        else:
            await self._serve_newest()
            evaluation = await self._evaluate("after")
            self._evaluations["after"] = _as_dict(evaluation)
            self._metrics |= evaluation.as_metrics() if evaluation else {}
            path = parts.folder.checkpoint_path(steps)
            await self._save(path, steps, self._evaluations, "steps")
        self.summary["checkpoint"] = str(path.relative_to(parts.folder.path))

    async def _train_rl(self) -> None:
        parts, plan, settings = self._parts, self._parts.plan, self._parts.plan.settings
        buffer = self._data.buffer
        manager = AsyncRolloutManager(
            buffer,
            RolloutConfig(
                settings.prompts_per_step,
                settings.samples_per_prompt,
                settings.over_sampling,
                concurrency=settings.concurrency,
                refill=settings.refill > 0,
                refills_max=max(1, settings.refill),
                staleness=settings.staleness,
            ),
            play=parts.play(settings.temperature, settings.seed),
            inference=parts.inference,
            filters=plan.filters,
            see_rewards=lambda group, step: advantage_rewards(
                group, stage_at(plan.schedule, step).algorithm, step, max_tokens=settings.max_tokens
            ),
            score_group=parts.score_group,
            failures=self._failures,
        )
        if self._start.rollouts:
            manager.load_state_dict(self._start.rollouts)
        kept = self._start.loop
        loop = LoopState(self._start.step, kept.get("kl_coefficients", {}), kept.get("begun_with", ()))

        def state(loop: LoopState) -> dict[str, Any]:
            own = {"kl_coefficients": dict(loop.kl_coefficients), "begun_with": list(loop.begun_with)}
            return {"data": buffer.state_dict(), "rollouts": manager.state_dict(), "loop": own}

        async def on_step(report: StepReport) -> dict[str, float]:
            parts.folder.write_trajectories(f"step_{report.step:06d}", step_records(report))
            own = environment_metrics(report.groups, buffer.epochs)
            return own | await self._between(report.step, report.metrics | own, report.groups)

        async def on_logged(report: StepReport) -> None:
            self._loop = state(report.state)
            await self._after(report.step, report.metrics)

        self._loop = state(loop)
        # What is carried over or sampled ahead is of earlier weights: then the trainer's own tokens are weighed too.
        is_synchronous = settings.over_sampling == settings.sync_every == 1 and settings.staleness == 0
        is_current = getattr(parts.inference, "in_process", False) and is_synchronous
        config = RLTrainingConfig(
            settings.steps,
            settings.sync_every,
            temperature=settings.temperature,
            response_tokens_max=settings.max_tokens,
            minibatches=settings.minibatches,
            staleness=settings.staleness,
        )
        async with manager:
            await run_rl_training(
                parts.backend,
                buffer,
                manager,
                [parts.inference],
                config,
                parts.logger,
                algorithm=plan.algorithm,
                schedule=[stage.inside() for stage in plan.schedule] if is_current else plan.schedule,
                on_samples=lambda samples, step: parts.call_hooks("rollouts_samples", samples=samples, step=step),
                on_step=on_step,
                on_logged=on_logged,
                syncing=self._syncing,
                start=loop,
            )

    async def _train_sft(self) -> None:
        parts, plan, settings = self._parts, self._parts.plan, self._parts.plan.settings

        async def on_step(step: int, metrics: dict[str, float]) -> dict[str, float]:
            # Weights are sent where they are used: in evaluations.
            owns = getattr(parts.inference, "owns_weights", False)
            synced = {} if owns else await self._syncing.sync(parts.backend)
            return synced | await self._between(step, metrics | synced, [])

        config = SFTTrainingConfig(settings.steps, settings.prompts_per_step, plan.algorithm.aggregation)
        await run_sft_training(
            parts.backend,
            self._data.samples,
            config,
            parts.logger,
            schedule=plan.schedule,
            on_step=on_step,
            on_logged=self._after,
            first_step=self._start.step,
        )

    async def _between(self, step: int, metrics: dict[str, float], groups: Sequence[Group]) -> dict[str, float]:
        """What is done after a step (0-based) and logged with it: an evaluation; and whoever watches is told."""
        parts, settings, done = self._parts, self._parts.plan.settings, step + 1
        self.summary["steps"] = done
        await self._profile_after(step)
        extra: dict[str, float] = {}
        if self._save_seconds is not None:
            extra["time/save"], self._save_seconds = self._save_seconds, None
        # The run's end evaluates anyway.
        if settings.eval_every and done % settings.eval_every == 0 and done < settings.steps:
            extra |= await self._serve_newest()
            evaluation = await self._evaluate(f"step {done}")
            extra |= evaluation.as_metrics() if evaluation else {}
        parts.watcher.step(step, metrics | extra, groups)
        parts.call_hooks("rollouts_step_end", metrics=metrics | extra, step=step)
        return extra

    async def _after(self, step: int, metrics: dict[str, float]) -> None:
        """What is done once a step (0-based) is logged: a checkpoint."""
        done = step + 1
        self._metrics = dict(metrics)
        self._saving.watch()
        occasion = self._saving.occasion(done)
        if occasion:
            began = time.perf_counter()
            path = self._parts.folder.checkpoint_path(done)
            if await self._save(path, done, {"before": self._evaluations["before"]}, occasion):
                self._save_seconds = time.perf_counter() - began
        await self._profile_before(done)

    async def _serve_newest(self) -> dict[str, float]:
        """An evaluation is of the newest weights, also where `sync_every` has not sent them; gives `sync/` metrics."""
        backend = self._parts.backend
        return {} if self._syncing.version == backend.version else await self._syncing.sync(backend)

    async def _evaluate(self, when: str) -> Evaluation | None:
        """Both passes over the held-out tasks; None where there are none."""
        parts, settings = self._parts, self._parts.plan.settings
        if not parts.held_out or not parts.plan.rewards:
            return None
        reports = []
        for temperature in EVALUATION_TEMPERATURES:
            report = await evaluate(
                parts.held_out,
                play=parts.play(temperature, settings.seed + 1),
                inference=parts.inference,
                score_group=parts.score_group,
                concurrency=settings.concurrency,
                failures=self._failures.beside(),
            )
            reports.append(report)
        evaluation = Evaluation(*reports)
        parts.watcher.evaluation(when, evaluation.as_dict())
        return evaluation

    async def _save(self, path: Path, done: int, evaluations: Mapping[str, Any], occasion: Occasion) -> bool:
        """Write a checkpoint that transformers loads, tokenizer and template included, with all that is needed to go
        on; then older ones go, as the settings say. One by the clock that does not fit on the disk is left out: False.

        What it tells of is on the disk before it is: a crash of the machine loses none of that.
        """
        parts, plan = self._parts, self._parts.plan
        state = RunState(
            done,
            plan.settings.mode,
            flat_settings(plan),
            **self._loop,
            evaluation=dict(evaluations),
            metric=_metric(parts, self._metrics),
            by_clock=occasion == "clock",
            revision=REVISION,
        )
        await trio.to_thread.run_sync(parts.folder.sync)
        try:
            with trio.fail_after(SAVE_SECONDS):
                await parts.backend.save(str(path), msgspec.to_builtins(state))
        except trio.TooSlowError as error:
            raise CheckpointError(
                f"the checkpoint {path} was not written in {SAVE_SECONDS:g} s; see whether the disk answers"
            ) from error
        except CheckpointError as error:
            if occasion != "clock" or not error.is_full:
                raise
            self._saving.failed_by_clock(error)
            return False
        await trio.to_thread.run_sync(self._saving.saved, path, occasion)
        return True

    async def _profile_before(self, step: int) -> None:
        """Start the profiler where the first profiled step comes next."""
        if step in self._profiled[:1]:
            await self._parts.backend.start_profile()  # type: ignore[attr-defined]  # `make_training` saw to it

    async def _profile_after(self, step: int) -> None:
        if step in self._profiled[-1:]:
            folder = str(self._parts.folder.path / "profile")
            await self._parts.backend.stop_profile(folder)  # type: ignore[attr-defined]


def _profiled_steps(first: int, steps: int, count: int) -> range:
    """The steps (0-based) to profile of those that this process takes: the first one warms up, unless it is the only
    one.

    >>> _profiled_steps(0, 10, 2), _profiled_steps(4, 5, 2), _profiled_steps(5, 5, 2)
    (range(1, 3), range(4, 5), range(5, 5))
    """
    begin = first + 1 if steps - first > 1 else first
    return range(begin, min(begin + count, steps))


def _as_dict(evaluation: Evaluation | None) -> dict[str, Any] | None:
    return evaluation and evaluation.as_dict()


def _metric(parts: Parts, metrics: Mapping[str, float]) -> dict[str, Any] | None:
    """By what the best checkpoint of the run is known; None where this step has it not."""
    settings = parts.plan.settings
    if settings.mode == "sft":
        name = "policy/loss"
    else:
        name = "eval/reward_mean" if settings.eval_every and parts.held_out else "reward/mean"
    value = metrics.get(name)
    if value is None or not math.isfinite(value):
        return None
    return {"name": name, "value": value, "higher_is_better": settings.mode != "sft"}


def step_records(report: StepReport) -> list[dict[str, Any]]:
    """The lines of `trajectories/step_*.jsonl`."""
    records = []
    advantages = iter(report.advantages)
    for group in report.groups:
        for episode in group.episodes:
            advantage = next(advantages) if group.dropped is None else None
            for trajectory in episode.trajectories:
                records.append(
                    trajectory_record(
                        trajectory,
                        order=episode.order,
                        reward=episode.score.value,
                        parts=episode.score.parts,
                        why=episode.score.why,
                        advantage=advantage,
                        dropped=group.dropped,
                    )
                )
    return records
