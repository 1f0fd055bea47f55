"""An evaluation: make and check the engine, play every held-out task, write the results. No training backend is made.

The folder has every finished episode, also if the process is killed, and the evaluation can be resumed. Not here:
how results are computed (`rollouts.evaluate`), and the parts of a session that all runs share (`session`).
"""

from __future__ import annotations

import math
import os
import shlex
import signal
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import trio

from rollouts.disk import read_regular
from rollouts.encoding import encode
from rollouts.errors import BudgetSpentError, ConfigError, counted
from rollouts.evaluate import numbers_of
from rollouts.inference.base import CanMeter, InferenceBackend
from rollouts.reducers import Reducer
from rollouts.runs.environments import chosen_tasks, few_held_out_notes
from rollouts.runs.folder import CONFIG, choose_folder, default_out, episode_records, run_name
from rollouts.runs.manifest import (
    MANIFEST,
    code_files,
    keep_code,
    make_manifest,
    resumed_manifest,
    update_manifest,
    with_revisions,
)
from rollouts.runs.observer import PLAYING, Observer
from rollouts.runs.opponents import entered, make_opponents
from rollouts.runs.plan import Plan
from rollouts.runs.resume import resume_command
from rollouts.runs.sample_rows import EVAL_SAMPLES, Judged
from rollouts.runs.session import (
    Player,
    Session,
    Watching,
    load_chat,
    make_inference,
    model_words,
    second_interrupt_at_once,
    status_of,
)
from rollouts.runs.times import Start, evaluation_times
from rollouts.runs.workers import death_metrics, open_folder
from rollouts.training.rollout_gen.groups import check_judged, group_scorer, with_task
from rollouts.training.rollout_gen.pool import FailurePolicy, Failures, Job, run_episodes
from rollouts.types import Episode, Score, Task

TRAJECTORIES = "eval"  # trajectories/eval.jsonl
PLAYED = "trajectories/eval.played"


def run_evaluation(
    plan: Plan, observer: Observer, started: Start, home: Path, resume: Path | None = None
) -> dict[str, Any]:
    """Play the evaluation to its end. Returns the content of summary.json. `started` is the start of the run.
    Relative paths begin at `home`. `resume` is the folder of an unfinished evaluation with these settings.

    Raises:
        UserError: before anything is written; also later, if only playing an environment shows its mistake. RunError:
            no episode could be judged, or too many failed; the folder keeps the finished episodes.
        KeyboardInterrupt: after Ctrl-C; the folder keeps the finished episodes.
    """
    settings = plan.settings
    default = default_out(plan.env_name, f"{model_name(settings.model)}-eval")
    make_folder = choose_folder(settings.out, default, home, resume)
    tasks = plan.eval_tasks()
    chosen = chosen_tasks(settings.tasks, tasks)
    chat = None if plan.is_chat else load_chat(settings, plan.environments, tool_parser=plan.tool_parser)
    with Session(observer, started, plan.manager) as session:
        folder = open_folder(session, plan.environments, make_folder, parts=("trajectories",))
        played, notes = read_played(folder.path, tasks)
        observer.phase(f"loading {Path(settings.model).name}")
        spec = plan.engine._replace(folder=str(folder.path))
        inference = make_inference(plan.one("inference"), spec, plan.environments, must_train=False)
        files = code_files(plan.references, plan.resolved.source)
        manifest = make_manifest(settings.seed, plan.references, files, folder)
        if resume is None:
            folder.write_text(CONFIG, plan.config)
            folder.write_json(MANIFEST, manifest)
        else:
            folder.forget_end()
            notes += update_manifest(folder, lambda before: resumed_manifest(before, manifest, len(played), None))
            notes.append(
                f"going on after {len(played)} of {counted(len(chosen) * settings.samples_per_prompt, 'episode')}"
            )
        keep_code(folder, files)
        opponents = make_opponents(plan.opponents, settings, plan.environments, str(folder.path))
        player = Player(settings, plan.environments, plan.rewards, chat, opponents)
        session.backends = [(plan.one("inference"), inference)]
        job = EvaluationJob(plan, session, tasks, chosen, player, inference, played)
        session.begin(job, job.title, job.total, [*notes, *job.notes], plan.plain)
        trio.run(job.run, signal.getsignal(signal.SIGINT), restrict_keyboard_interrupt_to_checkpoints=True)
    return job.summary


def model_name(model: str) -> str:
    """The name of a model in a folder's name; of a checkpoint, the run's folder and the step."""
    path = Path(model)
    return f"{run_name(path.parents[1])}-{path.name}" if path.parent.name == "checkpoints" else path.name


class EvaluationJob:
    """The episodes of an evaluation, while they are played; `summary` is filled at the end."""

    def __init__(
        self,
        plan: Plan,
        session: Session,
        tasks: Sequence[Task],
        chosen: Sequence[int],
        player: Player,
        inference: InferenceBackend,
        played: Mapping[tuple[int, int], Episode],
    ) -> None:
        settings = plan.settings
        samples = settings.samples_per_prompt
        self._plan, self._session, self._player, self._inference = plan, session, player, inference
        self._watching = Watching(session.observer, plan.one("inference").name, inference, noted=0)
        orders = [(index, sample) for index in chosen for sample in range(samples)]
        self._jobs = [Job(tasks[order[0]], order) for order in orders if order not in played]
        self.total = len(orders)
        size = counted(len(chosen), "task") + (f" of {len(tasks)}" if len(chosen) < len(tasks) else "")
        size += f" × {samples}" if samples > 1 else ""
        self.title = (
            f"{plan.env_name} · {settings.model} · {plan.one('inference').name} · {size} · temperature "
            f"{settings.temperature:g} · seed {settings.seed}{model_words(settings.model)}"
        )
        self.notes = [*plan.notes, *few_held_out_notes(plan.environments, tasks, settings)]
        if settings.reduce != "mean" and samples == 1:
            self.notes.append(
                f"--reduce {settings.reduce} changes nothing with one sample of a task; type --samples-per-prompt 8"
            )
        self._scorer = group_scorer(plan.rewards, settings.on_invalid_reward, timeout_seconds=settings.reward_seconds)
        self._episodes = dict(played)  # the finished episodes, by (task, sample)
        self._rewards = [each.score.value for each in played.values() if each.score.value is not None]
        self.summary: dict[str, Any] = {
            "status": "done",
            "model": settings.model,
            **_server_of(plan.one("inference").settings),
            "temperature": settings.temperature,
            "samples_per_prompt": samples,
            "episodes_asked": self.total,
        }

    async def run(self, interrupt_handler: Any) -> None:
        """Play every episode. `interrupt_handler` is the handler of SIGINT outside of trio. Raises RunError if no
        episode could be judged.
        """
        settings = self._plan.settings
        with second_interrupt_at_once(interrupt_handler):
            failures = Failures(FailurePolicy(settings.retries, settings.max_failures))
            if not self._inference.capabilities.in_process:
                self._session.observer.phase("starting the engine")
            async with self._inference, entered(self._player.opponents):
                self._session.observer.engines(self._watching.engines)
                self._session.observer.phase(PLAYING)
                # The seed of a run's own evaluations: a checkpoint that is evaluated again has the same results.
                await run_episodes(
                    self._jobs,
                    self._player.at(settings.temperature, settings.seed + 1, self._watching.begin, self._watching.end),
                    self._inference,
                    concurrency=settings.concurrency,
                    failures=failures,
                    on_end=self._keep,
                )
            if self._scorer is not None:
                for group in await self._scorer(_by_task(list(self._episodes.values()))):
                    for episode in group:
                        self._episodes[episode.order] = episode
                self._scorer = None  # all group rewards have run
            check_judged(list(self._episodes.values()), "the evaluation")

    def finish(self, failure: BaseException | None) -> None:
        """Compute the results, and write trajectories and metrics."""
        episodes = [self._episodes[order] for order in sorted(self._episodes)]
        if self._scorer is not None:  # episodes without their group rewards are not judged
            unasked = Score(None, {}, f"{status_of(failure)} before the rewards of whole groups were asked")
            asked = [e if e.status.is_infrastructure else e._replace(score=unasked) for e in episodes]
            episodes = [e.with_scores({each.role: e.score for each in e.roles}) if e.roles else e for e in asked]
        settings = self._plan.settings
        self.summary |= numbers_of(_by_task(episodes), Reducer(settings.reduce, settings.answer_pattern))
        if self._inference.capabilities.meters and (spent := cast(CanMeter, self._inference).spending()) is not None:
            self.summary["spent"] = spent._asdict()
        death_metrics(self._plan.environments, self.summary)
        session = self._session
        session.folder.write_trajectories(TRAJECTORIES, (line for each in episodes for line in episode_records(each)))
        session.folder.write_times(TRAJECTORIES, evaluation_times(episodes))
        for note in update_manifest(session.folder, with_revisions):
            session.observer.note(note)
        session.write_summary(failure)  # before a logger is made: it may wait for a server, and be killed there
        if failure is None and not self.summary["failed"]:
            session.folder.remove(PLAYED)  # after the summary: a kill in between loses nothing
        session.loggers.open(self._plan.chosen["logger"], session.folder.path, self._plan.plain, 0, may_fail=True)
        temperature = self._plan.settings.temperature
        rollouts = [Judged(own, temperature=temperature) for each in episodes for own in each.by_role]
        session.loggers.log_samples(EVAL_SAMPLES, rollouts, 0)
        session.loggers.log(_metrics(self.summary), 0)

    def message(self, failure: BaseException) -> str:
        """How many episodes are done, and what to type to play the others."""
        path = self._session.folder.shown
        where = f"{len(self._episodes)} of {counted(self.total, 'episode')} are done, {path} keeps them"
        more = failure.flags if isinstance(failure, BudgetSpentError) else ""
        again = f"to go on, type: {resume_command(path, more=more)}"
        if isinstance(failure, KeyboardInterrupt):
            return f"interrupted: {where}; {again}"
        return f"{failure}\n{where}; {again}"

    def _keep(self, job: Job, episode: Episode) -> None:
        self._episodes[job.order] = episode
        self._session.folder.append(PLAYED, encode(episode) + b"\n")
        if episode.score.value is not None:
            self._rewards.append(episode.score.value)
        reward_mean = statistics.fmean(self._rewards) if self._rewards else None
        self._session.observer.episode(len(self._episodes), reward_mean)


def _server_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """The URL of the evaluated servers and their name of the model, if they were running already."""
    given = {"url": settings.get("url"), "served_model": settings.get("served_model")}
    if not given["url"]:
        return {}
    return {key: value if isinstance(value, str) else ",".join(value) for key, value in given.items() if value}


def _by_task(episodes: Sequence[Episode]) -> list[list[Episode]]:
    """The episodes of each task, in order."""
    groups: dict[int, list[Episode]] = {}
    for episode in sorted(episodes, key=lambda each: each.order):
        groups.setdefault(episode.order[0], []).append(episode)
    return list(groups.values())


def _metrics(summary: dict[str, Any]) -> dict[str, float]:
    """The results in the summary as metrics `eval/...` for loggers."""
    flat: dict[str, Any] = {name: value for name, value in summary.items() if not isinstance(value, dict)}
    for sign in "@^":
        flat |= {f"pass{sign}{k}": value for k, value in summary[f"pass{sign}k"].items()}
    flat |= {f"reward_part/{name}": value for name, value in summary["parts"].items()}
    flat |= {f"metric/{name}": value for name, value in summary["metrics"].items()}
    for alias, own in summary.get("environments", {}).items():
        flat[f"{alias}/reward_mean"] = own["reward_mean"]
        flat |= {f"{alias}/role/{role}/reward_mean": n["reward_mean"] for role, n in own.get("roles", {}).items()}
    flat |= {f"role/{role}/reward_mean": own["reward_mean"] for role, own in summary.get("roles", {}).items()}
    numbers = {name: value for name, value in flat.items() if isinstance(value, int | float)}
    return {f"eval/{name}": float(value) for name, value in numbers.items() if math.isfinite(value)}


# --- the episodes, kept as they end ---
# PLAYED has a line of JSON for each finished episode, in the order in which they ended, without the rewards of whole
# groups. A resumed evaluation reads it and plays the rest. It is removed when no episode is left to play.


def read_played(folder: Path, tasks: Sequence[Task]) -> tuple[dict[tuple[int, int], Episode], list[str]]:
    """The episodes that an evaluation of these tasks has finished, by (task, sample), and notes for the user.

    Episodes that failed because of the infrastructure are left out, and so are lines that cannot be read, such as the
    last line of a killed process: they are played again. Raises ConfigError if the tasks are others now.
    """
    path = folder / PLAYED
    if not path.exists():
        return {}, []
    content = read_regular(path)
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))  # the next line begins on its own
    found, damaged = dict[tuple[int, int], Episode](), 0
    for row, line in enumerate(whole.splitlines(), start=1):
        try:
            episode = msgspec.json.decode(line, type=Episode)
        except (msgspec.DecodeError, UnicodeDecodeError):
            damaged += 1
            continue
        index = episode.order[0]
        if index >= len(tasks) or tasks[index].key != episode.task.key:
            again = shlex.quote(str(folder / CONFIG))
            raise ConfigError(
                f"{path}, line {row}: task {index} of this evaluation is another one now: the environment, its data or "
                f"its package has changed\nto begin a new evaluation, type: rollouts eval {again}"
            )
        found[episode.order] = with_task(episode, tasks[index])
    failed = {order for order, episode in found.items() if episode.status.is_infrastructure}
    notes = [f"warning: {counted(damaged, 'line')} of {PLAYED} cannot be read"] if damaged else []
    if failed:
        notes.append(f"{counted(len(failed), 'failed episode')} are played again")
    return {order: episode for order, episode in found.items() if order not in failed}, notes
