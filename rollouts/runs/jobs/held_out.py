"""An evaluation of a training run: the held-out tasks, sampled and greedy, kept as trajectories and shown to loggers.

Not here: when a run evaluates (`train`), and how results are computed (`rollouts.evaluate`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from rollouts.evaluate import Evaluation, check_passes, evaluate
from rollouts.inference.base import InferenceBackend
from rollouts.runs.folder import EVALUATED, episode_records
from rollouts.runs.sample_rows import EVAL_SAMPLES, held_out_rollouts
from rollouts.runs.session import Player, Session
from rollouts.runs.times import evaluation_times
from rollouts.training.rollout_gen.failures import Failures
from rollouts.training.rollout_gen.groups import GroupScorer
from rollouts.training.rollout_gen.pool import Job
from rollouts.types import Episode, Task

EVALUATION_TEMPERATURES = (1.0, 0.0)  # sampled, greedy


async def play_held_out(
    session: Session,
    player: Player,
    held_out: Sequence[Task],
    inference: InferenceBackend,
    score_groups: GroupScorer | None,
    failures: Failures,
    when: str,
    done: int,
) -> dict[str, Any]:
    """The results of an evaluation after `done` steps, in the form of summary.json. Its episodes are written, even if
    it fails.
    """
    reports, total = [], len(held_out) * len(EVALUATION_TEMPERATURES)
    ended: dict[tuple[float, tuple[int, ...]], Episode] = {}  # by (minus the temperature, order)
    session.observer.evaluating(when, 0, total)

    def on_end(job: Job, episode: Episode, *, temperature: float) -> None:
        ended[-temperature, job.order] = episode
        session.observer.evaluating(when, len(ended), total)

    def keep() -> None:
        played = sorted(ended.items(), key=lambda each: each[0])
        records = ({"temperature": -t} | line for (t, _), each in played for line in episode_records(each))
        session.folder.write_trajectories(f"{EVALUATED}{done:06d}", records)
        session.folder.write_times(f"{EVALUATED}{done:06d}", evaluation_times([each for _, each in played]))

    try:
        for temperature in EVALUATION_TEMPERATURES:
            report, episodes = await evaluate(
                held_out,
                play=player.at(temperature, player.settings.seed + 1),
                inference=inference,
                score_groups=score_groups,
                concurrency=player.settings.concurrency,
                failures=failures.beside(),
                on_end=functools.partial(on_end, temperature=temperature),
            )
            reports.append(report)
            ended |= {(-temperature, each.order): each for each in episodes}
    except Exception:
        keep()  # the episodes show why the evaluation failed
        raise
    keep()
    session.loggers.log_samples(EVAL_SAMPLES, held_out_rollouts(ended), max(done - 1, 0))
    for words in check_passes(reports, list(ended.values()), when):
        session.observer.note(words)
    return Evaluation(*reports).as_dict()
