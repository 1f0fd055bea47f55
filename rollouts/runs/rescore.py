"""Judge the saved trajectories of a run again: the same tokens with other rewards, in a new folder. No model is loaded.

An environment's own rewards are not asked again, because its state at the end of an episode is not saved: `env` means
what they gave then. A reward that names `env` is refused for the same reason.
"""

from __future__ import annotations

import os
import signal
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import trio

from rollouts.agent.judging import run_reward
from rollouts.child_environment import pass_on
from rollouts.config.files import load_file
from rollouts.config.flags import Tree
from rollouts.config.merging import merge
from rollouts.config.resolving import Resolved, resolve
from rollouts.env.mixing import RewardTerm, Verdict, mix
from rollouts.errors import ConfigError, counted
from rollouts.models.loading import remote_code
from rollouts.plugins.checks import run_check
from rollouts.runs.components import choose, completed
from rollouts.runs.folder import CONFIG, choose_folder, default_out, episode_records, run_name
from rollouts.runs.held_objects import manager_for
from rollouts.runs.manifest import MANIFEST, code_files, keep_code, make_manifest, naming_copies
from rollouts.runs.observer import JUDGING, NullObserver, Observer
from rollouts.runs.plan import config_text, reward_terms
from rollouts.runs.saved import SavedRun, groups_of_file, open_saved
from rollouts.runs.session import Session, second_interrupt_at_once
from rollouts.runs.times import Start
from rollouts.training.rollout_gen.groups import check_judged, group_scorer
from rollouts.training.rollout_gen.steps import reward_metrics
from rollouts.types import Episode, Score

UNJUDGED = "it could not judge in the run"
RESCORED = "rescored"
"""The key in manifest.json of a folder with rescored trajectories: what was read."""


def rescore(run: str, given: Tree, observer: Observer | None = None) -> dict[str, Any]:
    """Judge the trajectories of training steps in the folder `run` again. Returns the content of summary.json.

    `given` are the settings that differ from the run's: `reward`, `on_invalid_reward`, `reward_seconds`, `concurrency`,
    `out`. Raises ConfigError for what cannot be judged, and RewardError as in a run.
    """
    started, observer, home = Start.now(), observer or NullObserver(), Path.cwd()
    saved = open_saved(run)
    tree, source = load_file(saved.folder / CONFIG)
    before = resolve({key: value for key, value in tree.items() if key != "from_run"}, source, allow_left_out=True)
    tree = {key: value for key, value in tree.items() if key not in ("from_run", "out")}
    resolved = resolve(merge(tree, given), source, allow_left_out=True)
    settings = resolved.settings
    manager = manager_for(resolved, ("reward",))
    with naming_copies(saved.folder):
        chosen = choose(manager, {"reward": resolved.components["reward"]}, source)
    terms = reward_terms(resolved.components["reward"], chosen["reward"])
    _check_terms(terms)
    for each in chosen["reward"]:
        if each.component is not None:
            run_check(each.component, {}, each.settings)
    resolved = resolved._replace(components=resolved.components | completed(resolved.components, chosen))
    make_folder = choose_folder(settings.out, default_out(run_name(saved.folder), RESCORED), home)
    references = [each.ref for each in chosen["reward"] if each.ref is not None]
    pass_on(settings.pass_env)
    with remote_code(settings.trust_remote_code), Session(observer, started, manager) as session:
        folder = session.open(make_folder, parts=("trajectories",))
        job = _Rescoring(session, saved, resolved, terms, Kept.of(before))
        folder.write_text(CONFIG, config_text(resolved))
        files = code_files(references, source)
        manifest = make_manifest(settings.seed, references, files, folder) | {RESCORED: saved.as_manifest}
        folder.write_json(MANIFEST, manifest)
        keep_code(folder, files)
        title = f"{os.path.relpath(saved.folder)} · {counted(saved.rollouts, 'rollout')}, judged again"
        session.begin(job, title, len(saved.files), saved.notes, {})
        observer.phase(JUDGING)
        trio.run(job.run, signal.getsignal(signal.SIGINT), restrict_keyboard_interrupt_to_checkpoints=True)
    return job.summary


def _check_terms(terms: Sequence[RewardTerm]) -> None:
    """Raise ConfigError if no reward can be asked, or if one needs the environment."""
    for term in terms:
        if "env" in term.requests:
            raise ConfigError(
                f"--reward {term.alias}: it names `env`, and the environment's state at the end of an episode is not "
                "saved; write a reward that names `task` and `trajectory`"
            )
    if all(term.function is None for term in terms):
        raise ConfigError(
            "the environment's own rewards are not asked again, and no other reward is chosen\ntype: --reward NAME "
            "(`rollouts plugins list --kind rewards` shows what is installed); with --reward env:1 too, what the "
            "environment's rewards gave is added"
        )


class Kept(NamedTuple):
    """How to tell the environment's own rewards among the saved parts: the weight of `env` in the run (None: the run
    did not ask them), and the aliases of the run's other rewards.
    """

    weight: float | None
    others: frozenset[str]

    @classmethod
    def of(cls, before: Resolved) -> Kept:
        """That of the run with these settings."""
        rewards = before.components["reward"]
        own = [each.weight for each in rewards if each.name == "env" and isinstance(each.weight, float)]
        others = {each.alias for each in rewards if each.name != "env"}
        return cls(sum(own) if own else None if rewards else 1.0, frozenset(others))

    def verdicts(self, term: RewardTerm, score: Score) -> list[Verdict]:
        """What the environment's own rewards gave, with the weight of `term`. Raises ConfigError if it is not known."""
        if not self.weight:
            raise ConfigError(
                f"--reward {term.alias}: the run did not use the environment's own rewards, and they are not asked "
                "again; leave it out"
            )
        own = {name: weight for name, weight in score.weights.items() if name not in self.others}
        if not own or score.turns:
            lacks = (
                "what each turn earned" if own else "the weights of the rewards, which earlier versions did not save"
            )
            raise ConfigError(f"--reward {term.alias}: the trajectories lack {lacks}; leave it out")
        factor = term.weight / self.weight
        return [
            Verdict(name, weight * factor, value, {}, UNJUDGED if value is None else "", term.alias)
            for name, weight in own.items()
            for value in [score.parts[name]]
        ]


class _Rescoring:
    """The job: file after file, each rollout and then each group."""

    def __init__(
        self, session: Session, saved: SavedRun, resolved: Resolved, terms: Sequence[RewardTerm], kept: Kept
    ) -> None:
        self._session, self._saved, self._terms, self._kept = session, saved, terms, kept
        self._settings = settings = resolved.settings
        self._scorer = group_scorer(terms, settings.on_invalid_reward, timeout_seconds=settings.reward_seconds)
        self._done = 0
        self._before: list[float] = []
        self.summary: dict[str, Any] = {"status": "done", "steps": 0, RESCORED: str(saved.folder)}

    async def run(self, interrupt_handler: Any) -> None:
        """Judge every trajectory. `interrupt_handler` is the handler of SIGINT outside of trio."""
        episodes: list[Episode] = []
        with second_interrupt_at_once(interrupt_handler):
            for file in self._saved.files:
                groups = groups_of_file(file)
                self._before += [reward for group in groups for reward in group.rewards if reward is not None]
                judged = await self._judge([group.episodes for group in groups])
                records = (line for episode in judged for line in episode_records(episode))
                self._session.folder.write_trajectories(file.stem, records)
                episodes += [_without_tokens(episode) for episode in judged]
                self.summary["steps"] += 1
                self._session.observer.step(self.summary["steps"] - 1, reward_metrics(judged), [])
        self._numbers(episodes)
        check_judged(episodes, "the run")

    async def _judge(self, groups: Sequence[Sequence[Episode]]) -> list[Episode]:
        """The episodes of these groups with their new scores, as a run computes them."""
        judged = [list(episodes) for episodes in groups]
        limit = trio.CapacityLimiter(self._settings.concurrency)

        async def one(group: list[Episode], place: int) -> None:
            async with limit:
                group[place] = await self._rejudged(group[place])

        for group in judged:
            async with trio.open_nursery() as nursery:
                for place in range(len(group)):
                    nursery.start_soon(one, group, place)
            self._done += len(group)
        if self._scorer is not None:
            judged = await self._scorer(judged)
        return [episode for group in judged for episode in group]

    async def _rejudged(self, episode: Episode) -> Episode:
        """The episode with its new score, without the rewards of whole groups."""
        if episode.status.is_infrastructure:
            return episode
        trajectory, settings = episode.trajectory, self._settings
        available = {"task": trajectory.task, "trajectory": trajectory}
        verdicts: list[Verdict] = []
        for term in self._terms:
            if term.function is None:
                verdicts += self._kept.verdicts(term, episode.score)
            elif not term.is_group:
                verdict = await run_reward(term, available, settings.reward_seconds)
                verdicts.append(verdict._replace(alias=term.alias))
        metrics = {name: value for name, value in episode.metrics.items() if name != "reward_failures"}
        if failures := sum(verdict.value is None for verdict in verdicts):
            metrics["reward_failures"] = float(failures)
        if episode.role and not verdicts and self._scorer is None:
            return episode._replace(score=Score(None, {}, episode.score.why), metrics=metrics)
        return episode._replace(score=mix(verdicts, settings.on_invalid_reward), metrics=metrics)

    def _numbers(self, episodes: Sequence[Episode]) -> None:
        """Write the means of all rollouts into the summary."""
        metrics, rewards = reward_metrics(episodes), [episode.score.value for episode in episodes]
        parts = {name.removeprefix("reward_part/"): value for name, value in metrics.items() if "part/" in name}
        self.summary |= {
            "rollouts": len(episodes),
            "judged": len(rewards) - rewards.count(None),
            "reward_mean": metrics.get("reward/mean"),
            "reward_mean_before": statistics.fmean(self._before) if self._before else None,
            "parts": parts,
        }

    def finish(self, failure: BaseException | None) -> None:
        """Nothing is left to write."""

    def message(self, failure: BaseException) -> str:
        """How far the job came."""
        done = f"{self._done} of {counted(self._saved.rollouts, 'rollout')} were judged again"
        return f"interrupted: {done}" if isinstance(failure, KeyboardInterrupt) else f"{failure}\n{done}"


def _without_tokens(episode: Episode) -> Episode:
    """The episode without its messages and tokens, of which a run may have more than fit into memory."""
    own = [msgspec.structs.replace(each, messages=[], segments=[], info={}) for each in episode.trajectories]
    return episode._replace(trajectories=own, others=())
