"""All checks of environments, in their order."""

from __future__ import annotations

from rollouts_check.environments import forger, tasks
from rollouts_check.environments.answers import answer_hidden
from rollouts_check.environments.definition import definition, settings
from rollouts_check.environments.lifecycle import cancelled, close, deadlines, interleaved, restore
from rollouts_check.environments.package import imports, wheel
from rollouts_check.environments.processes import other_process, process_state
from rollouts_check.environments.rewards import echo, episode, event_loop, no_op, oracle, repeatable, rewards
from rollouts_check.environments.through_worker import worker_data, worker_episodes, worker_lives, worker_tasks
from rollouts_check.environments.tokens import masks
from rollouts_check.environments.tools import tool_arguments, tool_results, tool_schemas
from rollouts_check.runner import Check

_DRAWN = ("definition", "tasks", "demonstrations")
_PLAYED = (*_DRAWN, "episode", "process-state")
_IN_WORKER = (*_DRAWN, "episode")
_JUDGED = (*_PLAYED, "rewards", "repeatable", "oracle", "no-op")
"""What a trick needs: if doing nothing earns the reward, so does every trick."""

CHECKS: tuple[Check, ...] = (
    Check(imports),
    Check(wheel, ("imports",)),
    Check(definition),
    Check(settings, ("definition",)),
    Check(tasks.tasks, ("definition",)),
    Check(tasks.demonstrations, ("definition", "tasks")),
    Check(tasks.same_seed, ("definition", "tasks", "random-state")),
    Check(tasks.task_ids, ("definition", "tasks", "same-seed")),
    Check(tasks.seeds_differ, ("definition", "tasks", "same-seed")),
    Check(tasks.random_state, _PLAYED),
    Check(tasks.plain_data, _DRAWN),
    Check(tool_schemas, _PLAYED),
    Check(tool_results, _PLAYED),
    Check(tool_arguments, _PLAYED),
    Check(episode, _DRAWN),
    Check(process_state, (*_DRAWN, "episode")),
    Check(event_loop, (*_DRAWN, "episode")),
    Check(rewards, _PLAYED),
    Check(repeatable, (*_PLAYED, "rewards", "random-state", "tool-results")),
    Check(other_process, (*_PLAYED, "same-seed", "rewards", "repeatable", "cancelled")),
    Check(oracle, (*_PLAYED, "rewards", "repeatable")),
    Check(no_op, (*_PLAYED, "rewards", "repeatable", "oracle")),
    Check(echo, _JUDGED),
    Check(answer_hidden, _JUDGED),
    Check(forger.forged_lists, (*_JUDGED, "echo")),
    Check(forger.forged_verdicts, (*_JUDGED, "forged-lists", "forged-values", "forged-calls")),
    Check(forger.forged_values, (*_JUDGED, "forged-lists")),
    Check(forger.forged_numbers, (*_JUDGED, "forged-lists", "forged-verdicts")),
    Check(forger.forged_calls, _JUDGED),
    Check(forger.forged_code, _PLAYED),
    Check(forger.forged_files, _JUDGED),
    Check(interleaved, (*_PLAYED, "tool-arguments", "rewards", "repeatable")),
    Check(cancelled, (*_PLAYED, "tool-arguments")),
    Check(deadlines, _PLAYED),
    Check(close, _PLAYED),
    Check(restore, (*_PLAYED, "rewards", "repeatable", "tool-results")),
    Check(masks, _PLAYED),
)
"""The checks, each with the checks that it needs."""

IN_WORKER: tuple[Check, ...] = (
    Check(definition),
    Check(tasks.tasks, ("definition",)),
    Check(tasks.demonstrations, ("definition", "tasks")),
    Check(worker_tasks, _DRAWN),
    Check(worker_data, _DRAWN),
    Check(episode, _DRAWN),
    Check(worker_episodes, (*_IN_WORKER, "worker-tasks")),
    Check(rewards, _IN_WORKER),
    Check(repeatable, (*_IN_WORKER, "rewards")),
    Check(oracle, (*_IN_WORKER, "rewards", "repeatable")),
    Check(interleaved, (*_IN_WORKER, "repeatable")),
    Check(cancelled, _IN_WORKER),
    Check(deadlines, _IN_WORKER),
    Check(restore, (*_IN_WORKER, "repeatable")),
    Check(worker_lives, _IN_WORKER),
)
"""The checks of an environment that runs in a worker."""
