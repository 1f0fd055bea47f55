"""A plan becomes a run: the model is loaded, the stateful parts are built, the loop runs, the folder is written.

Every mistake of the user's that can be seen is raised before the folder is made; whatever happens after that, the
folder says how far the run came. Left out: how the parts are built (`parts`).
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import trio

from rollouts.agent import EpisodeLimits
from rollouts.chat.format import ChatFormat
from rollouts.chat.masks import tokenize_supervised
from rollouts.compose.manifest import make_manifest
from rollouts.compose.parts import Parts, load_chat, make_inference, make_loggers, make_training, plain_plan
from rollouts.compose.plan import Plan
from rollouts.compose.watch import Watcher
from rollouts.config import Resolved, to_toml
from rollouts.env.authoring import tools_of
from rollouts.env.schema import tool_schema
from rollouts.errors import OutputError, RolloutsError, UserError
from rollouts.evaluate import Evaluation, evaluate
from rollouts.run_folder import RunFolder, check_out, default_out, trajectory_record
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.loops.rl_loop import RLTrainingConfig, StepReport, run_rl_training, sync_weights
from rollouts.training.loops.sft_loop import SFTTrainingConfig, run_sft_training
from rollouts.training.rollout_gen.group_rewards import group_scorer
from rollouts.training.rollout_gen.manager import AsyncRolloutManager, RolloutConfig
from rollouts.types import Sample, Task

__all__ = ["launch"]

SAVE_SECONDS = 1800.0
EVALUATION_TEMPERATURES = (1.0, 0.0)  # sampled, greedy


class _Data(NamedTuple):
    """What the run trains on: tasks (mode rl) or rows of demonstrations (mode sft)."""

    buffer: DataBuffer
    samples: list[Sample]


def launch(plan: Plan, watcher: Watcher, started: float) -> dict[str, Any]:
    """Run the plan to its end; returns what summary.json holds. `started` is `time.perf_counter()` at the start.

    Raises:
        UserError: before anything is written, or where an environment shows its mistake only when it is played.
        RunError: the run failed; the folder says how far it came.
        KeyboardInterrupt: likewise.
    """
    settings = plan.settings
    out = check_out(settings.out or default_out(plan.one("env").name, plan.one("loss").name))
    held_out = plan.eval_tasks()
    buffer = _buffer(plan, held_out)
    chat = load_chat(plan)
    data = _Data(buffer, demonstration_samples(plan, chat) if settings.mode == "sft" else [])
    scorer = group_scorer(plan.rewards, settings.on_invalid_reward, timeout_seconds=EpisodeLimits().reward_seconds)
    backend = make_training(plan)
    try:
        inference = make_inference(plan, backend)
        folder = RunFolder(out)
        try:
            folder.write_text("config.toml", to_toml(_repeatable(plan)))
            folder.write_json("manifest.json", make_manifest(plan))
            logger = make_loggers(plan, folder)
        except (UserError, KeyboardInterrupt):
            folder.discard()
            raise
        parts = Parts(plan, chat, backend, inference, folder, logger, watcher, held_out, scorer)
        return _run_and_summarise(parts, data, started)
    finally:
        backend.close()


def _buffer(plan: Plan, held_out: list[Task]) -> DataBuffer:
    """The training tasks. Raises EnvironmentDefinitionError where there is none, before a model loads."""
    source = plan.training_source() if plan.settings.mode == "rl" else []
    exclude = frozenset(task.key for task in held_out)
    if plan.settings.mode == "rl":
        DataBuffer(source, seed=plan.settings.seed, exclude=exclude).get_prompts(1)
    return DataBuffer(source, seed=plan.settings.seed, exclude=exclude)


def demonstration_samples(plan: Plan, chat: ChatFormat) -> list[Sample]:
    """Rows of the environment's expert conversations, as many as the run can use, the assistant's tokens live."""
    count = max(1, plan.settings.steps * plan.settings.prompts_per_step)
    tools = [tool_schema(tool.function, tool.name) for tool in tools_of(plan.make_env())]
    samples = []
    for number, messages in enumerate(itertools.islice(plan.demonstrations(), count)):
        for row in tokenize_supervised(messages, tools, chat):
            prompt = list(messages)
            samples.append(Sample(prompt, tokens=row.tokens, loss_mask=row.loss_mask, rollout_index=number))
    return samples


def _run_and_summarise(parts: Parts, data: _Data, started: float) -> dict[str, Any]:
    """Run under trio; whatever happens, close the loggers, write the summary, and only then raise."""
    summary: dict[str, Any] = {"status": "done", "steps": 0, "evaluation": {"before": None, "after": None}}
    failure: BaseException | None = None
    try:
        parts.watcher.begin(parts.plan, parts.folder.path, _notes(parts))
        _call_hooks(parts, "rollouts_run_start", settings=plain_plan(parts.plan), folder=str(parts.folder.path))
        trio.run(_main, parts, data, summary)
    except BaseException as error:  # raised again below
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
    _call_hooks(parts, "rollouts_run_end", summary=summary)
    parts.watcher.end(summary)
    if failure is not None:
        raise failure
    return summary


def _notes(parts: Parts) -> list[str]:
    """What is unusual about this run, in words: its template, its backend, its held-out tasks."""
    report = parts.chat.report
    notes = list(parts.plan.notes)
    notes += [] if report.append_only and not report.refusals else report.words()
    notes += getattr(parts.backend, "notes", [])
    asked, drawn = parts.plan.settings.eval_tasks, len(parts.held_out)
    if drawn < asked:
        notes.append(f"the environment gave {drawn} different held-out tasks, --eval-tasks asked for {asked}")
    return notes


def _told(error: BaseException, parts: Parts, summary: dict[str, Any]) -> BaseException:
    """The error to raise: one, not a group of one, which says how far the run came. The summary is told too."""
    cause = _cause(error)
    where = f"{summary['steps']} of {parts.plan.settings.steps} steps"
    if isinstance(cause, KeyboardInterrupt):
        summary["status"] = "interrupted"
        return KeyboardInterrupt(f"interrupted after {where}; {parts.folder.path} keeps them")
    summary["status"] = "failed"
    summary["error"] = f"{type(cause).__name__}: {cause}"
    if isinstance(cause, RolloutsError):
        cause.args = (f"{cause}\nthe run failed after {where}; {parts.folder.path} keeps what was done",)
    return cause


def _cause(error: BaseException) -> BaseException:
    """Ctrl-C wherever it is in a group; else the first of its errors, if all are known ones or there is one only."""
    leaves = list(_leaves(error))
    for leaf in leaves:
        if isinstance(leaf, KeyboardInterrupt):
            return leaf
    if len(leaves) == 1 or all(isinstance(leaf, RolloutsError) for leaf in leaves):
        return leaves[0]
    return error


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _call_hooks(parts: Parts, event: str, **values: Any) -> None:
    """Hooks that fail are told, and stop nothing."""
    parts.watcher.faults(parts.plan.manager.call_event(event, **values))


async def _main(parts: Parts, data: _Data, summary: dict[str, Any]) -> None:
    """Evaluate, train, evaluate, save."""
    settings = parts.plan.settings
    async with parts.inference:
        summary["evaluation"]["before"] = _as_dict(await _evaluate(parts, "before"))
        if settings.mode == "rl":
            await _train_rl(parts, data.buffer, summary)
        elif settings.steps:
            await _train_sft(parts, data.samples, summary)
        summary["evaluation"]["after"] = _as_dict(await _evaluate(parts, "after"))
        summary["checkpoint"] = await _save(parts, settings.steps)


async def _train_rl(parts: Parts, buffer: DataBuffer, summary: dict[str, Any]) -> None:
    plan, settings = parts.plan, parts.plan.settings
    manager = AsyncRolloutManager(
        buffer,
        RolloutConfig(settings.prompts_per_step, settings.samples_per_prompt),
        play=parts.play(settings.temperature, settings.seed),
        inference=parts.inference,
        filters=plan.filters,
        score_group=parts.score_group,
    )

    async def on_step(report: StepReport) -> dict[str, float]:
        parts.folder.write_trajectories(f"step_{report.step:06d}", _step_records(report))
        summary["steps"] = report.step + 1
        extra = await _between_steps(parts, report.step + 1)
        parts.watcher.step(report.step, report.metrics | extra, report.groups)
        _call_hooks(parts, "rollouts_step_end", metrics=report.metrics | extra, step=report.step)
        return extra

    is_inside = getattr(parts.inference, "in_process", False)
    await run_rl_training(
        parts.backend,
        buffer,
        manager,
        [parts.inference],
        RLTrainingConfig(
            settings.steps,
            temperature=settings.temperature,
            response_tokens_max=settings.max_tokens,
            minibatches=settings.minibatches,
        ),
        parts.logger,
        algorithm=plan.algorithm,
        schedule=[stage.inside() for stage in plan.schedule] if is_inside else plan.schedule,
        on_samples=lambda samples, step: _call_hooks(parts, "rollouts_samples", samples=samples, step=step),
        on_step=on_step,
    )


async def _train_sft(parts: Parts, samples: list[Sample], summary: dict[str, Any]) -> None:
    plan, settings = parts.plan, parts.plan.settings

    async def on_step(step: int, metrics: dict[str, float]) -> dict[str, float]:
        summary["steps"] = step + 1
        synced = await sync_weights([parts.inference], parts.backend.version)
        extra = synced | await _between_steps(parts, step + 1)
        parts.watcher.step(step, metrics | extra, [])
        _call_hooks(parts, "rollouts_step_end", metrics=metrics | extra, step=step)
        return extra

    config = SFTTrainingConfig(settings.steps, settings.prompts_per_step, plan.algorithm.aggregation)
    await run_sft_training(parts.backend, samples, config, parts.logger, schedule=plan.schedule, on_step=on_step)


async def _between_steps(parts: Parts, done: int) -> dict[str, float]:
    """What happens after `done` steps by the settings: an evaluation, a checkpoint."""
    settings = parts.plan.settings
    extra: dict[str, float] = {}
    if done == settings.steps:
        return extra  # the run's end evaluates and saves anyway
    if settings.eval_every and done % settings.eval_every == 0:
        evaluation = await _evaluate(parts, f"step {done}")
        extra |= evaluation.as_metrics() if evaluation else {}
    if settings.checkpoint_every and done % settings.checkpoint_every == 0:
        start = time.perf_counter()
        await _save(parts, done)
        extra["time/save"] = time.perf_counter() - start
    return extra


async def _evaluate(parts: Parts, when: str) -> Evaluation | None:
    """Both passes over the held-out tasks; None where there are none."""
    if not parts.held_out or not parts.plan.rewards:
        return None
    reports = []
    for temperature in EVALUATION_TEMPERATURES:
        play = parts.play(temperature, parts.plan.settings.seed + 1)
        reports.append(
            await evaluate(parts.held_out, play=play, inference=parts.inference, score_group=parts.score_group)
        )
    evaluation = Evaluation(*reports)
    parts.watcher.evaluation(when, evaluation.as_dict())
    return evaluation


def _as_dict(evaluation: Evaluation | None) -> dict[str, object] | None:
    return evaluation and evaluation.as_dict()


async def _save(parts: Parts, step: int) -> str:
    """A checkpoint that transformers loads, tokenizer and template included."""
    path = parts.folder.checkpoint_path(step)
    with trio.fail_after(SAVE_SECONDS):
        await parts.backend.save(str(path))
    return str(path.relative_to(parts.folder.path))


def _step_records(report: StepReport) -> list[dict[str, Any]]:
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


def _repeatable(plan: Plan) -> Resolved:
    """What config.toml holds: everything but the folder, so that running it again writes to a new one."""
    return plan.resolved._replace(settings=dataclasses.replace(plan.resolved.settings, out=""))
