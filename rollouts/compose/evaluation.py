"""An evaluation from its plan to its end: the engine is made and asked, every held-out task is played, numbers are
written. Nothing is trained, and no trainer is made.

Every mistake that can be seen is raised before the folder is made; whatever happens after that, the folder holds every
episode that was over: also after Ctrl-C, and where too many have failed. Left out: what the numbers are
(`rollouts.evaluate`).
"""

from __future__ import annotations

import contextlib
import math
import shlex
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import trio

from rollouts.agent import Episode
from rollouts.child_environment import pass_on
from rollouts.compose.evaluation_plan import EvaluationPlan
from rollouts.compose.launch import freeze_loaded, run_interruptible, without_interrupts
from rollouts.compose.manifest import make_manifest
from rollouts.compose.parts import how_to_play, load_chat, make_loggers, plain_plan, repeatable
from rollouts.env.authoring import tools_of
from rollouts.env.schema import tool_schema
from rollouts.errors import RolloutsError, cause_of
from rollouts.evaluate import numbers_of
from rollouts.inference.base import CanCheck, InferenceBackend
from rollouts.inference.chatting import CanChat
from rollouts.plugins.manager import PluginFault
from rollouts.plugins.signature import call_with
from rollouts.run_folder import RunFolder, check_out, default_out, trajectory_record
from rollouts.training.rollout_gen.failures import FailurePolicy, Failures
from rollouts.training.rollout_gen.group_rewards import GroupScorer, group_scorer
from rollouts.training.rollout_gen.groups import check_judged
from rollouts.training.rollout_gen.pool import EpisodePool, Job, Play
from rollouts.types import Score, Task

__all__ = ["EvaluationSilence", "EvaluationWatcher", "launch_evaluation"]

TRAJECTORIES = "eval"  # trajectories/eval.jsonl


class EvaluationWatcher(Protocol):
    """Told what happens, in the run's own thread; it may not raise, and should not take long."""

    def begin(self, plan: EvaluationPlan, folder: Path, episodes: int, notes: Sequence[str]) -> None:
        """The engine is there; so many episodes will be played."""
        ...

    def episode(self, done: int, reward_mean: float | None) -> None:
        """One more is over; the mean is of those that are judged so far."""
        ...

    def faults(self, faults: Sequence[PluginFault]) -> None:
        """Hooks that failed; the evaluation goes on."""
        ...

    def end(self, summary: dict[str, Any]) -> None:
        """It is over, one way or another; `summary` is what summary.json holds."""
        ...


class EvaluationSilence:
    """The watcher that says nothing: for the Python interface and for tests."""

    def begin(self, plan: EvaluationPlan, folder: Path, episodes: int, notes: Sequence[str]) -> None:
        """Nothing."""

    def episode(self, done: int, reward_mean: float | None) -> None:
        """Nothing."""

    def faults(self, faults: Sequence[PluginFault]) -> None:
        """Nothing."""

    def end(self, summary: dict[str, Any]) -> None:
        """Nothing."""


def launch_evaluation(
    plan: EvaluationPlan, watcher: EvaluationWatcher, started: float, home: Path | None = None
) -> dict[str, Any]:
    """Play the evaluation to its end; returns what summary.json holds. `started` is `time.perf_counter()` then.
    Relative paths begin at `home` (None: the working directory).

    Raises:
        UserError: before anything is written, or where an environment shows its mistake only when it is played.
        RunError: not one episode could be judged, or too many failed; the folder keeps what was done.
        KeyboardInterrupt: likewise.
    """
    settings = plan.settings
    pass_on(settings.pass_env)
    home = home or Path.cwd()
    out = Path(settings.out or default_out(plan.env_name, "eval"))
    if settings.out or not (home / out).exists():  # a name that nobody chose may be taken
        check_out(str(out), home)
    tasks = plan.eval_tasks()
    chat = None if plan.is_chat else load_chat(plan)
    with contextlib.ExitStack() as ending:
        folder = RunFolder(out, home) if settings.out else RunFolder.new(out, home)
        ending.callback(folder.close)
        try:
            inference = _make_inference(plan, folder.path)
            trio.run(_check, plan, inference)
            folder.write_text("config.toml", repeatable(plan))
            folder.write_json("manifest.json", make_manifest(plan))
        except BaseException:
            folder.discard()
            raise
        with contextlib.suppress(OSError):
            folder.checkpoints.rmdir()  # there will be none
        # One more than a run's own evaluations have: a checkpoint that is evaluated again gives the same numbers.
        play = how_to_play(plan, chat, settings.temperature, settings.seed + 1)
        return _Course(plan, tasks, play, inference, folder, watcher).run(started, ending)


def _make_inference(plan: EvaluationPlan, out: Path) -> InferenceBackend:
    """The engine, without a trainer. Raises UserError."""
    chosen = plan.one("inference")
    available = plan.inference_arguments(str(out))
    inference: InferenceBackend = call_with(chosen.component, available, chosen.settings)
    return inference


def _server_of(plan: EvaluationPlan) -> dict[str, str]:
    """Which servers spoke, and by what name of theirs, where they were there already: nothing was sent to them."""
    settings = plan.one("inference").settings
    given = {"url": settings.get("url"), "served_model": settings.get("served_model")}
    if not given["url"]:
        return {}
    return {key: value if isinstance(value, str) else ",".join(value) for key, value in given.items() if value}


async def _check(plan: EvaluationPlan, inference: InferenceBackend) -> None:
    """Ask the engine before anything is written, where it can be asked. Raises UserError."""
    if isinstance(inference, CanChat):
        tools = [tool_schema(tool.function, tool.name) for env in plan.environments for tool in tools_of(env.make())]
        await inference.check(tools, plan.settings.temperature)
    elif isinstance(inference, CanCheck):
        await inference.check()
    else:
        await trio.lowlevel.checkpoint()


class _Course:
    """The episodes of an evaluation, while they are played; `episodes` are those that are over, by (task, sample)."""

    def __init__(
        self,
        plan: EvaluationPlan,
        tasks: Sequence[Task],
        play: Play,
        inference: InferenceBackend,
        folder: RunFolder,
        watcher: EvaluationWatcher,
    ) -> None:
        settings = plan.settings
        self._plan, self._play, self._inference = plan, play, inference
        self._folder, self._watcher = folder, watcher
        samples = settings.samples_per_prompt
        self._jobs = [Job(task, (index, sample)) for index, task in enumerate(tasks) for sample in range(samples)]
        self._asked = settings.eval_tasks
        self._failures = Failures(FailurePolicy(settings.retries, settings.max_failures))
        self._scorer = group_scorer(plan.rewards, settings.on_invalid_reward, timeout_seconds=settings.reward_seconds)
        self._episodes: dict[tuple[int, int], Episode] = {}
        self._rewards: list[float] = []

    def run(self, started: float, ending: contextlib.ExitStack) -> dict[str, Any]:
        """Play, write, tell; whatever happens, what is over is written before it is raised."""
        failure = self._attempt(ending)
        episodes = self._over(failure)
        if failure is None:
            failure = _unjudged(episodes)
        summary: dict[str, Any] = {
            "status": _status(failure),
            "model": self._plan.settings.model,
            **_server_of(self._plan),
            "temperature": self._plan.settings.temperature,
            "samples_per_prompt": self._plan.settings.samples_per_prompt,
            "episodes_asked": len(self._jobs),
            **numbers_of(_by_task(episodes)),
            "wall_seconds": time.perf_counter() - started,
            "cpu_seconds": time.process_time(),
        }
        if summary["status"] == "failed":
            summary["error"] = f"{type(failure).__name__}: {failure}"
        refused = self._write(episodes, summary)
        failure = failure or refused  # the first error is the one to tell
        self._call_hooks("rollouts_run_end", summary=summary)
        self._watcher.end(summary)
        if failure is not None:
            raise self._told(failure, len(episodes))
        return summary

    def _attempt(self, ending: contextlib.ExitStack) -> BaseException | None:
        """Play everything; what ended it early. Once it is interrupted it is not interrupted again, until `ending`."""
        plan, folder = self._plan, self._folder
        try:
            self._watcher.begin(plan, folder.shown, len(self._jobs), self._notes())
            self._call_hooks("rollouts_run_start", settings=plain_plan(plan), folder=str(folder.path))
            freeze_loaded()
            run_interruptible(self._play_all)
        except BaseException as error:  # raised again by the caller
            cause = cause_of(error)
            if isinstance(cause, KeyboardInterrupt):
                ending.enter_context(without_interrupts())
            return cause
        return None

    async def _play_all(self) -> None:
        settings = self._plan.settings
        async with self._inference:
            async with EpisodePool(
                self._play,
                self._inference,
                concurrency=settings.concurrency,
                on_end=self._keep,
                failures=self._failures,
            ) as pool:
                pool.open()
                pool.add(self._jobs)
                await pool.finished()
        if self._scorer is not None:
            await self._score(self._scorer)

    def _keep(self, job: Job, episode: Episode) -> None:
        self._episodes[job.order] = episode
        if episode.score.value is not None:
            self._rewards.append(episode.score.value)
        self._watcher.episode(len(self._episodes), statistics.fmean(self._rewards) if self._rewards else None)

    async def _score(self, scorer: GroupScorer) -> None:
        """Ask the rewards of whole groups, a task at a time."""
        for group in _by_task(list(self._episodes.values())):
            for episode in await scorer(group):
                self._episodes[episode.order] = episode
        self._scorer = None  # all are asked

    def _over(self, failure: BaseException | None) -> list[Episode]:
        """The episodes that are over, in their order; what only a part of its rewards have judged is not judged."""
        episodes = [self._episodes[order] for order in sorted(self._episodes)]
        if failure is None or self._scorer is None:
            return episodes
        unasked = Score(None, {}, f"{_status(failure)} before the rewards of whole groups were asked")
        return [each if each.status.is_infrastructure else each._replace(score=unasked) for each in episodes]

    def _write(self, episodes: Sequence[Episode], summary: dict[str, Any]) -> RolloutsError | None:
        """Trajectories, metrics, summary; the first error of the disk or of a logger."""
        try:
            self._folder.write_trajectories(TRAJECTORIES, (line for each in episodes for line in _records(each)))
            self._folder.write_json("summary.json", summary)
            logger = make_loggers(self._plan, self._folder, 0)
            try:
                logger.log(_metrics(summary), 0)
            finally:
                logger.close()
                self._watcher.faults(logger.faults)
        except RolloutsError as error:
            return error
        return None

    def _call_hooks(self, event: str, **values: Any) -> None:
        self._watcher.faults(self._plan.manager.call_event(event, **values))

    def _notes(self) -> list[str]:
        drawn = len({job.order[0] for job in self._jobs})
        if drawn == self._asked:
            return list(self._plan.notes)
        few = f"there are {drawn} different held-out tasks, --eval-tasks asked for {self._asked}"
        return [*self._plan.notes, few]

    def _told(self, failure: BaseException, done: int) -> BaseException:
        """The error to raise, which says how far the evaluation came."""
        path = self._folder.shown
        where = f"{done} of {len(self._jobs)} episodes are done, {path} keeps them"
        again = f"to begin again: rollouts eval {shlex.quote(str(path / 'config.toml'))}"
        if isinstance(failure, KeyboardInterrupt):
            return KeyboardInterrupt(f"interrupted: {where}; {again}")
        if isinstance(failure, RolloutsError):
            failure.args = (f"{failure}\n{where}; {again}",)
        return failure


def _status(failure: BaseException | None) -> str:
    if failure is None:
        return "done"
    return "interrupted" if isinstance(failure, KeyboardInterrupt) else "failed"


def _unjudged(episodes: Sequence[Episode]) -> RolloutsError | None:
    """The error that it is where nothing could be judged."""
    try:
        check_judged(episodes, "the evaluation")
    except RolloutsError as error:
        return error
    return None


def _by_task(episodes: Sequence[Episode]) -> list[list[Episode]]:
    """The episodes of each task, in order."""
    groups: dict[int, list[Episode]] = {}
    for episode in sorted(episodes, key=lambda each: each.order):
        groups.setdefault(episode.order[0], []).append(episode)
    return list(groups.values())


def _records(episode: Episode) -> Iterator[dict[str, Any]]:
    """The lines of trajectories/eval.jsonl."""
    score = episode.score
    for trajectory in episode.trajectories:
        yield trajectory_record(
            trajectory,
            order=episode.order,
            reward=score.value,
            parts=score.parts,
            why=score.why,
            advantage=None,
            dropped=None,
        )


def _metrics(summary: dict[str, Any]) -> dict[str, float]:
    """The numbers of the summary for loggers, under `eval/`."""
    flat: dict[str, Any] = {name: value for name, value in summary.items() if not isinstance(value, dict)}
    flat |= {f"pass@{k}": value for k, value in summary["pass@k"].items()}
    flat |= {f"reward_part/{name}": value for name, value in summary["parts"].items()}
    flat |= {f"metric/{name}": value for name, value in summary["metrics"].items()}
    for alias, own in summary.get("environments", {}).items():
        flat[f"{alias}/reward_mean"] = own["reward_mean"]
    numbers = {name: value for name, value in flat.items() if isinstance(value, int | float)}
    return {f"eval/{name}": float(value) for name, value in numbers.items() if math.isfinite(value)}
