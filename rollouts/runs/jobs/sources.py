"""Where a training run of mode rl gets its groups: the manager that samples them, or the files of earlier runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollouts.config.settings import Settings
from rollouts.inference.base import InferenceBackend
from rollouts.runs.components import chosen_sampler
from rollouts.runs.environments import task_buffer
from rollouts.runs.plan import Plan
from rollouts.runs.saved import SavedRuns, open_runs
from rollouts.training.algorithms.algorithm import stage_at
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.loops.rl_batch import advantage_rewards, why_untrained
from rollouts.training.rollout_gen.groups import Group, GroupScorer
from rollouts.training.rollout_gen.manager import AsyncRolloutManager
from rollouts.training.rollout_gen.pool import Failures, Play
from rollouts.training.rollout_gen.saved import SavedGroups, positions_buffer
from rollouts.training.rollout_gen.steps import RolloutConfig
from rollouts.types import Task


class TaskSource(NamedTuple):
    """What a run draws: training tasks, or with `--from` the positions of the `saved` groups."""

    buffer: DataBuffer
    saved: SavedRuns | None = None

    @property
    def as_manifest(self) -> dict[str, Any]:
        """Which saved groups are read, for a manifest."""
        return {} if self.saved is None else self.saved.as_manifest

    def notes(self, settings: Settings, tokenizer: Any) -> list[str]:
        """Notes about saved groups. Raises ConfigError for token ids of another tokenizer."""
        return [] if self.saved is None else self.saved.notes(settings, tokenizer)


def task_source(plan: Plan, held_out: Sequence[Task]) -> TaskSource:
    """The tasks of a run without held-out tasks; none in mode sft. Raises UserError."""
    settings = plan.settings
    if settings.from_run:
        saved = open_runs(settings, held_out)
        return TaskSource(positions_buffer(len(saved.places), settings.seed), saved)
    if settings.mode == "rl":
        return TaskSource(
            task_buffer(plan.environments, held_out, settings.prompts_per_step, chosen_sampler(plan.chosen))
        )
    return TaskSource(DataBuffer([]))


def group_source(
    plan: Plan,
    tasks: TaskSource,
    state: Mapping[str, Any],
    *,
    play: Play,
    inference: InferenceBackend,
    score_groups: GroupScorer | None,
    failures: Failures,
) -> AsyncRolloutManager | SavedGroups:
    """The source of a run's groups, in its `state` of the checkpoint; empty for a run that begins."""
    settings, (buffer, saved) = plan.settings, tasks

    def see_rewards(group: Group, step: int) -> list[float | None]:
        return advantage_rewards(group, stage_at(plan.schedule, step).algorithm, step, max_tokens=settings.max_tokens)

    source: AsyncRolloutManager | SavedGroups
    if saved is not None:
        source = SavedGroups(
            buffer,
            len(saved.places),
            saved.group,
            RolloutConfig(settings.prompts_per_step),
            why_untrained=lambda group, step: why_untrained(
                group, stage_at(plan.schedule, step).algorithm, step, max_tokens=settings.max_tokens
            ),
            filters=plan.filters,
            see_rewards=see_rewards,
        )
    else:
        source = AsyncRolloutManager(
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
            play=play,
            inference=inference,
            filters=plan.filters,
            see_rewards=see_rewards,
            score_groups=score_groups,
            failures=failures,
        )
    if state:
        source.load_state_dict(dict(state))
    return source
