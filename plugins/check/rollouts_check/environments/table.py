"""All checks of environments, in their order."""

from __future__ import annotations

from rollouts_check.environments import answers, definition, forger, lifecycle, processes, rewards, tools
from rollouts_check.runner import Check

_DRAWN = ("definition", "tasks", "demonstrations")
_PLAYED = (*_DRAWN, "episode", "process-state")
_IN_WORKER = (*_DRAWN, "episode")
_JUDGED = (*_PLAYED, "rewards", "repeatable", "oracle", "no-op")
"""What a trick needs: if doing nothing earns the reward, so does every trick."""

CHECKS: tuple[Check, ...] = (
    Check(definition.imports),
    Check(definition.wheel, ("imports",)),
    Check(definition.definition),
    Check(definition.settings, ("definition",)),
    Check(definition.tasks, ("definition",)),
    Check(definition.demonstrations, ("definition", "tasks")),
    Check(definition.same_seed, ("definition", "tasks", "random-state")),
    Check(definition.task_ids, ("definition", "tasks", "same-seed")),
    Check(definition.seeds_differ, ("definition", "tasks", "same-seed")),
    Check(definition.random_state, _PLAYED),
    Check(definition.plain_data, _DRAWN),
    Check(tools.tool_schemas, _PLAYED),
    Check(tools.tool_results, _PLAYED),
    Check(tools.tool_arguments, _PLAYED),
    Check(rewards.episode, _DRAWN),
    Check(processes.process_state, (*_DRAWN, "episode")),
    Check(rewards.event_loop, (*_DRAWN, "episode")),
    Check(rewards.rewards, _PLAYED),
    Check(rewards.repeatable, (*_PLAYED, "rewards", "random-state", "tool-results")),
    Check(processes.other_process, (*_PLAYED, "same-seed", "rewards", "repeatable", "cancelled")),
    Check(rewards.oracle, (*_PLAYED, "rewards", "repeatable")),
    Check(rewards.no_op, (*_PLAYED, "rewards", "repeatable", "oracle")),
    Check(rewards.echo, _JUDGED),
    Check(answers.answer_hidden, _JUDGED),
    Check(forger.forged_lists, (*_JUDGED, "echo")),
    Check(forger.forged_verdicts, (*_JUDGED, "forged-lists", "forged-values", "forged-calls")),
    Check(forger.forged_values, (*_JUDGED, "forged-lists")),
    Check(forger.forged_numbers, (*_JUDGED, "forged-lists", "forged-verdicts")),
    Check(forger.forged_calls, _JUDGED),
    Check(forger.forged_code, _PLAYED),
    Check(forger.forged_files, _JUDGED),
    Check(lifecycle.interleaved, (*_PLAYED, "tool-arguments", "rewards", "repeatable")),
    Check(lifecycle.cancelled, (*_PLAYED, "tool-arguments")),
    Check(lifecycle.deadlines, _PLAYED),
    Check(lifecycle.close, _PLAYED),
    Check(lifecycle.restore, (*_PLAYED, "rewards", "repeatable", "tool-results")),
    Check(tools.masks, _PLAYED),
)
"""The checks, each with the checks that it needs."""

IN_WORKER: tuple[Check, ...] = (
    Check(definition.definition),
    Check(definition.tasks, ("definition",)),
    Check(definition.demonstrations, ("definition", "tasks")),
    Check(processes.worker_tasks, _DRAWN),
    Check(processes.worker_data, _DRAWN),
    Check(rewards.episode, _DRAWN),
    Check(processes.worker_episodes, (*_IN_WORKER, "worker-tasks")),
    Check(rewards.rewards, _IN_WORKER),
    Check(rewards.repeatable, (*_IN_WORKER, "rewards")),
    Check(rewards.oracle, (*_IN_WORKER, "rewards", "repeatable")),
    Check(lifecycle.interleaved, (*_IN_WORKER, "repeatable")),
    Check(lifecycle.cancelled, _IN_WORKER),
    Check(lifecycle.deadlines, _IN_WORKER),
    Check(lifecycle.restore, (*_IN_WORKER, "repeatable")),
    Check(processes.worker_lives, _IN_WORKER),
)
"""The checks of an environment that runs in a worker."""
