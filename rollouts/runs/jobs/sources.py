"""Where a training run gets its groups or its data: the manager that samples groups, the files of earlier runs, or rows
and demonstrations (`chat_data`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rollouts.chat.format import ChatFormat
from rollouts.config.settings import Settings
from rollouts.inference.base import InferenceBackend
from rollouts.runs.components import chosen_sampler
from rollouts.runs.environments import HeldOutPrompts, few_held_out_notes, task_buffer
from rollouts.runs.jobs.evaluating import ChatData
from rollouts.runs.plan import Plan
from rollouts.training.algorithms.algorithm import stage_at
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.loops.rl_batch import advantage_rewards, why_untrained
from rollouts.training.rollout_gen.groups import Group, GroupScorer
from rollouts.training.rollout_gen.manager import AsyncRolloutManager
from rollouts.training.rollout_gen.pool import Failures, Play
from rollouts.training.rollout_gen.steps import RolloutConfig
from rollouts.types import Task

if TYPE_CHECKING:
    from rollouts.runs.saved import SavedRuns
    from rollouts.training.rollout_gen.saved import SavedGroups


def training_data(
    plan: Plan, held_out: Sequence[Task], chat: ChatFormat, watch: Callable[[int], None] = lambda count: None
) -> ChatData:
    """The data of a run of mode sft (`chat_data`); empty in mode rl."""
    if plan.settings.mode != "sft":
        return ChatData([], [], [])
    from rollouts.runs.jobs import chat_data

    return chat_data.training_data(plan, held_out, chat, watch)


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
        from rollouts.runs.saved import open_runs
        from rollouts.training.rollout_gen.saved import positions_buffer

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
        from rollouts.training.rollout_gen.saved import SavedGroups

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


def task_notes(
    plan: Plan, tasks: TaskSource, held_out: Sequence[Task], also_held_out: Sequence[Task], tokenizer: Any
) -> list[str]:
    """Notes about anything unusual in the tasks of a run. Raises like `TaskSource.notes`."""
    settings = plan.settings
    notes = few_held_out_notes(plan.environments, held_out, settings) + tasks.notes(settings, tokenizer)
    shared = HeldOutPrompts([*held_out, *also_held_out]).shared if settings.mode == "sft" else 0
    words = "held-out tasks have the same prompt as another task, so their demonstrations cannot be recognized"
    return notes + ([f"{shared} {words}: demonstrations('train', rng) must not return any"] if shared else [])
