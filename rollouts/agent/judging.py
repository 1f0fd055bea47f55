"""The rewards and metrics of one trajectory."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from rollouts.author_code import with_place
from rollouts.env import calls
from rollouts.env.authoring import JudgeMethod, metrics_of, of_role, rewards_of
from rollouts.env.checks import requests_of
from rollouts.env.methods import finite_metric
from rollouts.env.mixing import InvalidPolicy, RewardTerm, Verdict, ask, mix, with_reason
from rollouts.error_log import report
from rollouts.errors import EnvironmentDefinitionError, RewardError, WorkerError, WorkersLostError
from rollouts.types import Score, Trajectory


async def judge(
    env: Any, trajectory: Trajectory, terms: Sequence[RewardTerm], seconds: float, on_invalid: InvalidPolicy
) -> tuple[Score, dict[str, float]]:
    """The score from all rewards but those of whole groups, and the environment's metrics: those of the trajectory's
    role. A role that no reward judges is not trained.
    """
    role = trajectory.role
    available = {"task": trajectory.task, "trajectory": trajectory, "env": env}
    verdicts: list[Verdict] = []
    for term in terms:
        if term.is_group:
            continue
        own = [] if term.function is not None else of_role(rewards_of(env), role)
        asked = [RewardTerm(o.name, o.function, term.weight * o.weight, {}, requests_of(o.function)) for o in own]
        for each in asked if term.function is None else [term]:
            verdict = await run_reward(each, available, seconds)
            verdicts.append(verdict._replace(alias=term.alias))
    values = {metric.name: await _measure(metric, available, seconds) for metric in of_role(metrics_of(env), role)}
    metrics = {f"metric/{name}": value for name, value in values.items() if value is not None}
    if failures := len(values) - len(metrics):
        metrics["metric_failures"] = float(failures)
    if failures := sum(1 for verdict in verdicts if verdict.value is None):
        metrics["reward_failures"] = float(failures)
    if role and not verdicts and not any(term.is_group for term in terms):
        return Score(None, {}, f"no reward judges the role {role}"), metrics
    return mix(verdicts, on_invalid), metrics


async def run_reward(term: RewardTerm, available: Mapping[str, Any], seconds: float) -> Verdict:
    """The verdict of one reward. A reward that raises or takes too long could not judge."""
    assert term.function is not None, "the caller replaces env by the environment's own rewards"
    try:
        verdict = await ask(
            term.function,
            term.requests,
            available,
            name=term.alias,
            weight=term.weight,
            settings=term.settings,
            seconds=seconds,
        )
    except calls.CallTimeoutError:
        return Verdict(term.alias, term.weight, None, {}, f"it took longer than {seconds:g} seconds")
    except (EnvironmentDefinitionError, WorkerError, WorkersLostError):
        raise
    except RewardError as error:  # the reward returned something that is not a reward, or raised this itself
        raise RewardError(with_place(error, term.function)) from error
    except Exception as error:  # an author's code may raise anything
        return Verdict(term.alias, term.weight, None, {}, report(error, f"the reward {term.alias}"))
    return with_reason(verdict, term.function)


async def _measure(metric: JudgeMethod, available: Mapping[str, Any], seconds: float) -> float | None:
    """A metric's value. None if the metric raised, took too long or returned no finite number. Such a failure is
    reported, and the caller counts it; the rollout is not affected.
    """
    arguments = [available[request] for request in requests_of(metric.function)]
    read = functools.partial(finite_metric, metric)
    try:
        value: float = await calls.call(metric.function, *arguments, timeout_seconds=seconds, convert=read)
    except (EnvironmentDefinitionError, WorkerError, WorkersLostError):
        raise
    except calls.CallTimeoutError:
        report(TimeoutError(f"it took longer than {seconds:g} seconds"), f"the metric {metric.name}")
    except Exception as error:  # an author's code may raise anything
        report(error, f"the metric {metric.name}")
    else:
        return value
    return None
