"""A plan becomes a run: the model is loaded, the stateful parts are built, the loop runs, the folder is written."""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import trio

from rollouts.agent import Episode, EpisodeLimits, run_episode
from rollouts.chat.format import ChatFormat, load_chat_format
from rollouts.chat.masks import tokenize_supervised
from rollouts.compose.manifest import make_manifest
from rollouts.compose.plan import Plan
from rollouts.compose.watch import Watcher
from rollouts.config import to_toml
from rollouts.config.settings import COMPONENT_KINDS
from rollouts.env import calls
from rollouts.env.authoring import tools_of
from rollouts.env.mixing import RewardTerm, mix, read_verdict
from rollouts.env.schema import tool_schema
from rollouts.errors import EnvironmentDefinitionError, InferenceError, ModelError, RunError
from rollouts.evaluate import Evaluation, evaluate
from rollouts.inference.base import InferenceBackend
from rollouts.loggers.base import MetricsLogger
from rollouts.plugins.signature import call_with
from rollouts.run_folder import RunFolder, check_out, default_out, trajectory_record
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.loops.rl_loop import RLTrainingConfig, StepReport, run_rl_training, sync_weights
from rollouts.training.loops.sft_loop import SFTTrainingConfig, run_sft_training
from rollouts.training.rollout_gen.episodes import Job, Play
from rollouts.training.rollout_gen.manager import AsyncRolloutManager, GroupScorer, RolloutConfig
from rollouts.training.types import TrainingBackend
from rollouts.types import Sample, Task

__all__ = ["launch"]

SAVE_SECONDS = 1800.0


class _Parts(NamedTuple):
    """The stateful parts of a run, and the functions that play and score episodes with them."""

    plan: Plan
    chat: ChatFormat
    backend: TrainingBackend
    inference: InferenceBackend
    folder: RunFolder
    logger: MetricsLogger
    watcher: Watcher
    held_out: list[Task]
    score_group: GroupScorer | None

    def play(self, temperature: float, seed: int) -> Play:
        """How one episode is played at this temperature; `seed` and the episode's order decide its random numbers."""
        settings = self.plan.settings
        limits = EpisodeLimits(settings.max_tokens, settings.max_turns, temperature)

        async def play(job: Job, session: str) -> Episode:
            return await run_episode(
                job.task,
                make_env=self.plan.make_env,
                chat=self.chat,
                inference=self.inference,
                limits=limits,
                rewards=self.plan.rewards,
                session=session,
                order=job.order,
                seed=seed,
                on_invalid_reward=settings.on_invalid_reward,
            )

        return play


def launch(plan: Plan, watcher: Watcher, started: float) -> dict[str, Any]:
    """Run the plan to its end; returns what summary.json holds. `started` is `time.perf_counter()` at the start.

    Raises:
        UserError: before anything is written.
        RunError: the run failed; the folder says how far it came.
        KeyboardInterrupt: likewise.
    """
    settings = plan.settings
    (env,), (loss,) = plan.chosen["env"], plan.chosen["loss"]
    out = check_out(settings.out or default_out(env.name, loss.name))
    held_out = plan.eval_tasks()
    source = plan.training_source() if settings.mode == "rl" else []
    exclude = frozenset(task.key for task in held_out)
    buffer = DataBuffer(source, seed=settings.seed, exclude=exclude)
    if settings.mode == "rl":
        DataBuffer(source, seed=settings.seed, exclude=exclude).get_prompts(1)  # a mistake shows before a model loads
    chat = _load_chat(plan)
    backend = _make_training(plan)
    try:
        inference = _make_inference(plan, backend)
        folder = RunFolder(out)
        folder.write_text("config.toml", to_toml(_repeatable(plan)))
        folder.write_json("manifest.json", make_manifest(plan))
        logger = _make_loggers(plan, folder)
        parts = _Parts(plan, chat, backend, inference, folder, logger, watcher, held_out, _group_scorer(plan))
        template_notes = [] if chat.report.append_only and not chat.report.refusals else chat.report.words()
        watcher.begin(plan, folder.path, [*template_notes, *getattr(backend, "notes", [])])
        return _run_and_summarise(parts, buffer, started)
    finally:
        backend.close()


def _run_and_summarise(parts: _Parts, buffer: DataBuffer, started: float) -> dict[str, Any]:
    """Run under trio; whatever happens, write the summary and close the loggers."""
    progress: dict[str, Any] = {"status": "failed", "steps": 0, "evaluation": {"before": None, "after": None}}
    parts.watcher.faults(
        parts.plan.manager.call_event("rollouts_run_start", settings=_plain(parts.plan), folder=str(parts.folder.path))
    )
    try:
        trio.run(_main, parts, buffer, progress)
        progress["status"] = "done"
    except (KeyboardInterrupt, BaseExceptionGroup) as error:
        if not _is_interrupt(error):
            progress["error"] = str(error)
            raise
        progress["status"] = "interrupted"
        raise KeyboardInterrupt(
            f"interrupted after {progress['steps']} of {parts.plan.settings.steps} steps; "
            f"{parts.folder.path} keeps them"
        ) from None
    except Exception as error:
        progress["error"] = f"{type(error).__name__}: {error}"
        if isinstance(error, RunError):
            error.args = (
                f"{error}\nthe run failed at step {progress['steps']}; {parts.folder.path} keeps what was done",
            )
        raise
    finally:
        progress["wall_seconds"] = time.perf_counter() - started
        progress["cpu_seconds"] = time.process_time()
        parts.logger.close()
        parts.folder.write_json("summary.json", progress)
        parts.watcher.faults(parts.plan.manager.call_event("rollouts_run_end", summary=progress))
        parts.watcher.end(progress)
    return progress


async def _main(parts: _Parts, buffer: DataBuffer, progress: dict[str, Any]) -> None:
    """Evaluate, train, evaluate, save."""
    settings = parts.plan.settings
    async with parts.inference:
        progress["evaluation"]["before"] = await _evaluate(parts, "before", 0)
        steps = _train_rl if settings.mode == "rl" else _train_sft
        await steps(parts, buffer, progress)
        progress["evaluation"]["after"] = await _evaluate(parts, "after", settings.steps)
        progress["checkpoint"] = await _save(parts, settings.steps)


async def _train_rl(parts: _Parts, buffer: DataBuffer, progress: dict[str, Any]) -> None:
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
        progress["steps"] = report.step + 1
        extra = await _between_steps(parts, report.step + 1)
        parts.watcher.step(report.step, report.metrics | extra, report.groups)
        parts.watcher.faults(
            plan.manager.call_event("rollouts_step_end", metrics=report.metrics | extra, step=report.step)
        )
        return extra

    def on_samples(samples: list[Sample], step: int) -> None:
        parts.watcher.faults(plan.manager.call_event("rollouts_samples", samples=samples, step=step))

    await run_rl_training(
        parts.backend,
        buffer,
        manager,
        [parts.inference],
        RLTrainingConfig(settings.steps, temperature=settings.temperature, response_tokens_max=settings.max_tokens),
        parts.logger,
        algorithm=plan.algorithm,
        on_samples=on_samples,
        on_step=on_step,
    )


async def _train_sft(parts: _Parts, buffer: DataBuffer, progress: dict[str, Any]) -> None:
    plan, settings = parts.plan, parts.plan.settings
    samples = demonstration_samples(plan, parts.chat, settings.steps * settings.prompts_per_step)
    if not samples and settings.steps:
        raise EnvironmentDefinitionError(f"the environment {plan.one('env').name} gave no demonstrations to train on")

    async def on_step(step: int, metrics: dict[str, float]) -> dict[str, float]:
        progress["steps"] = step + 1
        synced = await sync_weights([parts.inference], parts.backend.version)
        extra = synced | await _between_steps(parts, step + 1)
        parts.watcher.step(step, metrics | extra, [])
        parts.watcher.faults(plan.manager.call_event("rollouts_step_end", metrics=metrics | extra, step=step))
        return extra

    config = SFTTrainingConfig(settings.steps, settings.prompts_per_step, plan.algorithm.aggregation)
    if settings.steps:
        await run_sft_training(parts.backend, samples, config, parts.logger, on_step=on_step)


def demonstration_samples(plan: Plan, chat: ChatFormat, count: int) -> list[Sample]:
    """Rows of at most `count` expert conversations of the environment, the assistant's tokens live."""
    tools = [tool_schema(tool.function, tool.name) for tool in tools_of(plan.make_env())]
    samples = []
    for messages in itertools.islice(plan.demonstrations(), count):
        for row in tokenize_supervised(messages, tools, chat):
            samples.append(Sample(prompt=list(messages), tokens=row.tokens, loss_mask=row.loss_mask))
    return samples


async def _between_steps(parts: _Parts, done: int) -> dict[str, float]:
    """What happens after `done` steps by the settings: an evaluation, a checkpoint."""
    settings = parts.plan.settings
    extra: dict[str, float] = {}
    if done == settings.steps:
        return extra  # the run's end evaluates and saves anyway
    if settings.eval_every and done % settings.eval_every == 0:
        evaluation = await _evaluate(parts, f"step {done}", done)
        for name in ("reward_mean", "greedy_mean"):
            if evaluation is not None and evaluation[name] is not None:
                extra[f"eval/{name}"] = evaluation[name]
    if settings.checkpoint_every and done % settings.checkpoint_every == 0:
        start = time.perf_counter()
        await _save(parts, done)
        extra["time/save"] = time.perf_counter() - start
    return extra


async def _evaluate(parts: _Parts, when: str, step: int) -> dict[str, Any] | None:
    """Both passes over the held-out tasks; None where there are none."""
    if not parts.held_out or not parts.plan.rewards:
        return None
    reports = []
    for temperature in (1.0, 0.0):
        play = parts.play(temperature, parts.plan.settings.seed + 1)
        reports.append(
            await evaluate(parts.held_out, play=play, inference=parts.inference, score_group=parts.score_group)
        )
    evaluation = Evaluation(*reports).as_dict()
    parts.watcher.evaluation(when, evaluation)
    return evaluation


async def _save(parts: _Parts, step: int) -> str:
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


# --- building the parts ---------------------------------------------------------------------------------------------


def _load_chat(plan: Plan) -> ChatFormat:
    """The model's chat format; refuses an environment with tools where the template cannot show them."""
    from rollouts.training.models import load_tokenizer

    chat = load_chat_format(load_tokenizer(plan.settings.model), plan.settings.template)
    if tools_of(plan.make_env()) and not chat.report.tools:
        raise ModelError(
            f"the environment {plan.one('env').name} has tools, but the chat template of {plan.settings.model} cannot "
            f"show them ({'; '.join(chat.report.refusals) or 'it ignores them'}); choose a model whose template takes "
            "tools, such as --model tiny or a Qwen"
        )
    if plan.settings.system and not chat.report.system:
        raise ModelError(f"--system: the chat template of {plan.settings.model} refuses system messages")
    return chat


def _make_training(plan: Plan) -> TrainingBackend:
    settings = plan.settings
    available = {
        "model": settings.model,
        "seed": settings.seed,
        "steps": settings.steps,
        "lr": plan.lr,
        "lora_rank": settings.lora_rank,
        "tokens_per_microbatch": settings.tokens_per_microbatch,
        "algorithms": {"main": plan.algorithm},
    }
    chosen = plan.one("training")
    backend: TrainingBackend = call_with(chosen.component, available, chosen.settings)
    return backend


def _make_inference(plan: Plan, backend: TrainingBackend) -> InferenceBackend:
    chosen = plan.one("inference")
    available = {"model": plan.settings.model, "training": backend, "seed": plan.settings.seed}
    inference: InferenceBackend = call_with(chosen.component, available, chosen.settings)
    if not inference.trainable and plan.settings.mode == "rl":
        raise InferenceError(
            f"the inference backend {chosen.name} returns no token ids, so it is good for evaluation only"
        )
    return inference


def _make_loggers(plan: Plan, folder: RunFolder) -> MetricsLogger:
    available = {"folder": str(folder.path), "settings": _plain(plan)}
    return _Loggers([call_with(each.component, available, each.settings) for each in plan.chosen["logger"]])


class _Loggers:
    """Several loggers as one."""

    def __init__(self, loggers: Sequence[MetricsLogger]) -> None:
        self._loggers = loggers

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Tell each of them."""
        for logger in self._loggers:
            logger.log(dict(metrics), step)

    def close(self) -> None:
        """Close each of them."""
        for logger in self._loggers:
            logger.close()


def _group_scorer(plan: Plan) -> GroupScorer | None:
    """Mixes the rewards that see a whole group into its episodes' scores; None where the run has none."""
    terms = [term for term in plan.rewards if term.is_group]
    if not terms:
        return None

    async def score(episodes: Sequence[Episode]) -> list[Episode]:
        played = [episode for episode in episodes if not episode.status.is_infrastructure]
        if not played:
            return list(episodes)
        columns = [await _judge_group(term, played, plan.settings.on_invalid_reward) for term in terms]
        scores = iter(
            mix([column[i] for column in columns], plan.settings.on_invalid_reward, base=episode.score)
            for i, episode in enumerate(played)
        )
        return [e if e.status.is_infrastructure else e._replace(score=next(scores)) for e in episodes]

    return score


async def _judge_group(term: RewardTerm, episodes: Sequence[Episode], policy: str) -> list[Any]:
    """One verdict a rollout. A reward that raises could not judge any of them; a wrong count is its mistake."""
    assert term.function is not None, f"group reward {term.alias} has no function"
    available = {
        "tasks": [episode.task for episode in episodes],
        "trajectories": [episode.trajectory for episode in episodes],
    }
    function = _with_settings(term.function, term.settings)
    failure = ""
    returned: Any = None
    try:
        returned = await calls.call(
            function,
            *(available[name] for name in term.requests),
            timeout_seconds=EpisodeLimits().reward_seconds,
        )
    except trio.TooSlowError:
        failure = f"it took longer than {EpisodeLimits().reward_seconds:g} s"
    except Exception as error:  # the author's code may raise anything; it is told by the policy
        failure = f"{type(error).__name__}: {error}"
    if failure:
        verdict = read_verdict(term.alias, term.weight, None)._replace(why=failure)
        return [verdict] * len(episodes)
    return [read_verdict(term.alias, term.weight, value) for value in _one_each(term.alias, returned, len(episodes))]


def _one_each(alias: str, returned: Any, count: int) -> list[Any]:
    from rollouts.errors import RewardError

    values = [None] * count if returned is None else list(returned) if hasattr(returned, "__iter__") else None
    if values is None or len(values) != count:
        raise RewardError(
            f"the group reward {alias!r} returned {returned!r} for {count} rollouts; it has to return a list with one "
            "number (or None) for each"
        )
    return values


def _with_settings(function: Callable[..., Any], settings: Any) -> Callable[..., Any | Awaitable[Any]]:
    import functools

    return functools.partial(function, **settings) if settings else function


def _repeatable(plan: Plan) -> Any:
    """What config.toml holds: everything but the folder, so that running it again writes to a new one."""
    import dataclasses

    return plan.resolved._replace(settings=dataclasses.replace(plan.resolved.settings, out=""))


def _plain(plan: Plan) -> dict[str, Any]:
    """The resolved settings as plain data: for loggers and hooks."""
    from rollouts.loggers.base import plain_settings

    settings = plain_settings(plan.settings)
    for key in COMPONENT_KINDS:
        for each in plan.chosen[key]:
            if each.settings:
                name = key if key not in ("reward", "filter", "logger") else f"{key}.{each.alias}"
                settings[f"{name}.settings"] = plain_settings(each.settings)
    settings["lr"] = plan.lr
    return settings


def _is_interrupt(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_is_interrupt(inner) for inner in error.exceptions)
    return isinstance(error, KeyboardInterrupt)
