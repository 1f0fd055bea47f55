"""What a training run draws: training tasks, groups of earlier runs, or rows (`chat_data`); and its held-out tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rollouts.chat.format import ChatFormat
from rollouts.inference.base import InferenceBackend
from rollouts.runs.components import chosen_sampler, takes_rows
from rollouts.runs.environments import HeldOutPrompts, demonstrations, few_held_out_notes, task_buffer
from rollouts.runs.plan import Plan
from rollouts.training.algorithms.algorithm import Algorithm, stage_at
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.loops.rl_batch import advantage_rewards, why_untrained
from rollouts.training.rollout_gen.groups import Group, GroupRules, GroupScorer
from rollouts.training.rollout_gen.manager import GroupManager
from rollouts.training.rollout_gen.pool import Failures, Play
from rollouts.training.rollout_gen.steps import StepSettings
from rollouts.types import Sample, Task

if TYPE_CHECKING:
    from rollouts.runs.saved import SavedRuns
    from rollouts.training.rollout_gen.saved import SavedGroups


class RunData(NamedTuple):
    """The data of a training run. `buffer` has training tasks, or with `--from` the positions of the `saved` groups.
    It is empty in mode sft, which trains on `samples`, and computes only the loss of `held_out_samples`. The run ends
    after `patience` evaluations without a lower loss (0: it does not).
    """

    held_out: Sequence[Task]
    buffer: DataBuffer
    notes: Sequence[str]
    saved: SavedRuns | None = None
    samples: Sequence[Sample] = ()
    held_out_samples: Sequence[Sample] = ()
    patience: int = 0

    @property
    def as_manifest(self) -> dict[str, Any]:
        """Which saved groups are read, for a manifest."""
        return {} if self.saved is None else self.saved.as_manifest


def run_data(
    plan: Plan, held_out: Sequence[Task], also_held_out: Sequence[Task], chat: ChatFormat, watch: Callable[[int], None]
) -> RunData:
    """The data of a run without held-out tasks. `watch` is called with the number of rows that were read so far. Raises
    UserError.
    """
    settings, notes = plan.settings, few_held_out_notes(plan.environments, held_out, plan.settings)
    if settings.from_run:
        from rollouts.runs.saved import open_runs
        from rollouts.training.rollout_gen.saved import positions_buffer

        saved = open_runs(settings, held_out)
        notes = [*saved.notes(settings, chat.tokenizer), *notes]
        return RunData(held_out, positions_buffer(len(saved.places), settings.seed), notes, saved)
    if settings.mode == "rl":
        return RunData(held_out, _tasks(plan, held_out), notes)
    from rollouts.runs.jobs.chat_data import training_rows

    rows = training_rows(plan, [*held_out, *also_held_out], chat, watch)
    shared = HeldOutPrompts([*held_out, *also_held_out]).shared
    words = "held-out tasks have the same prompt as another task, so their demonstrations cannot be recognized"
    notes += [f"{shared} {words}: demonstrations('train', rng) must not return any"] if shared else []
    notes = [*rows.notes, *notes]
    return RunData(held_out, DataBuffer([]), notes, None, rows.samples, rows.held_out, rows.patience)


def check_data(plan: Plan, held_out: Sequence[Task]) -> None:
    """Raise UserError if a run without these tasks has nothing to train on. Rows of `--data` are not read."""
    settings = plan.settings
    if settings.from_run:
        from rollouts.runs.saved import open_runs

        open_runs(settings, held_out)
    elif settings.mode == "rl":
        _tasks(plan, held_out)
    elif settings.mode == "sft" and not takes_rows(settings.mode, plan.chosen):
        next(demonstrations(plan.environments, held_out, settings.prompts_per_step))


def _tasks(plan: Plan, held_out: Sequence[Task]) -> DataBuffer:
    sampler = chosen_sampler(plan.chosen)
    return task_buffer(plan.environments, held_out, plan.settings.prompts_per_step, sampler)


def group_source(
    plan: Plan,
    data: RunData,
    state: Mapping[str, Any],
    *,
    play: Play,
    inference: InferenceBackend,
    score_groups: GroupScorer | None,
    failures: Failures,
) -> GroupManager | SavedGroups:
    """The source of a run's groups, in its `state` of the checkpoint; empty for a run that begins."""
    settings, saved = plan.settings, data.saved

    def algorithm(step: int) -> Algorithm:
        return stage_at(plan.schedule, step).algorithm

    def see_rewards(group: Group, step: int) -> list[float | None]:
        return advantage_rewards(group, algorithm(step), step, max_tokens=settings.max_tokens)

    source: GroupManager | SavedGroups
    rules = GroupRules(plan.filters, see_rewards, score_groups)
    if saved is not None:
        from rollouts.training.rollout_gen.saved import SavedGroups

        source = SavedGroups(
            data.buffer,
            len(saved.places),
            saved.group,
            StepSettings(settings.prompts_per_step),
            why_untrained=lambda g, step: why_untrained(g, algorithm(step), step, max_tokens=settings.max_tokens),
            rules=rules,
        )
    else:
        config = StepSettings(
            settings.prompts_per_step,
            settings.samples_per_prompt,
            settings.over_sampling,
            concurrency=settings.concurrency,
            refill=settings.refill > 0,
            refills_max=max(1, settings.refill),
            staleness=settings.staleness,
        )
        source = GroupManager(data.buffer, config, play, inference, rules, failures)
    if state:
        source.load_state_dict(dict(state))
    return source
