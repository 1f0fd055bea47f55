"""A plan in words, without loading weights: what `--dry-run` prints."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rollouts.compose.memory import memory_lines
from rollouts.compose.resume import run_to_resume
from rollouts.config import OWN, to_toml
from rollouts.config.secrets import resolved_without_secrets, without_secrets
from rollouts.config.settings import COMPONENT_KINDS
from rollouts.env.authoring import tools_of
from rollouts.run_folder import check_out
from rollouts.training.algorithms.algorithm import KL, Algorithm, active_terms, function_label, unwrapped
from rollouts.training.algorithms.needs import is_reward_placed
from rollouts.training.datasets.mixing import shares_at
from rollouts.types import Task

if TYPE_CHECKING:
    from rollouts.compose.evaluation_plan import EvaluationPlan
    from rollouts.compose.plan import Chosen, Plan

__all__ = ["describe", "describe_evaluation", "objective_words"]


def describe(plan: Plan) -> str:
    """Settings, components with their distributions, what the loss needs, and an estimate of memory.

    Draws the first tasks and reads the model's configuration; raises the first UserError that a run would meet there.
    """
    if plan.settings.out and run_to_resume(plan.resolved) is None:
        check_out(plan.settings.out)
    held_out = plan.eval_tasks()
    if plan.settings.mode == "rl":
        plan.task_buffer(held_out)
    else:
        next(plan.demonstrations(held_out))
    lines = [
        to_toml(resolved_without_secrets(plan.resolved)).rstrip(),
        "",
        "# Composed",
        *_environment_lines(plan),
        *(
            _component_line(key, each)
            for key in COMPONENT_KINDS
            for each in plan.chosen[key]
            if key != "env" and each.component != ()
        ),
        *_scheduled_lines(plan),
        *_tool_lines(plan),
        f"held-out tasks: {len(held_out)}{_counted_words(plan, held_out)}",
        *(_stage_line(plan, number) for number in range(len(plan.schedule))),
        f"the loss needs: {', '.join(plan.needs)}",
        *_companion_lines(plan),
        f"learning rate: {plan.lr:g}",
        *memory_lines(plan),
        *(f"note: {note}" for note in plan.notes),
        "nothing was loaded or written",
    ]
    return "\n".join(lines)


def describe_evaluation(plan: EvaluationPlan) -> str:
    """The same of an evaluation: settings, components, tasks. Raises the first UserError that it would meet there."""
    if plan.settings.out:
        check_out(plan.settings.out)
    tasks = plan.eval_tasks()
    samples = plan.settings.samples_per_prompt
    lines = [
        to_toml(resolved_without_secrets(plan.resolved)).rstrip(),
        "",
        "# Composed",
        *(_component_line(key, each) for key, chosen in plan.chosen.items() for each in chosen),
        *_tool_lines(plan),
        f"held-out tasks: {len(tasks)}{_counted_words(plan, tasks)}, each played "
        f"{'once' if samples == 1 else f'{samples} times'}",
        "the engine takes messages: no tokenizer, no chat template" if plan.is_chat else "the engine takes token ids",
        *(f"note: {note}" for note in plan.notes),
        "nothing was loaded, asked or written",
    ]
    return "\n".join(lines)


def _tool_lines(plan: Plan | EvaluationPlan) -> Iterator[str]:
    """The tools that the model has, in each environment."""
    for env in plan.environments:
        names = ", ".join(tool.name for tool in tools_of(env.make())) or "none"
        yield f"tools{env.alias and f' of {env.alias}'}: {names}"


def _environment_lines(plan: Plan) -> Iterator[str]:
    """The environment; of several how they are mixed, at the first step and at the last where that changes."""
    weights = {env.alias: env.weight for env in plan.environments}
    ends = (shares_at(weights, step) for step in (0, max(0, plan.settings.steps - 1)))
    for env, chosen, first, last in zip(plan.environments, plan.chosen["env"], *ends, strict=True):
        line = _component_line("env", chosen)
        if env.alias:
            line = f"env {env.alias}{line.removeprefix('env')}, share {first:.3g}"
            line += "" if first == last else f" to {last:.3g}, of the whole run {env.share:.3g}"
            line += "" if env.curriculum is None else f" ({_component_line('curriculum', env.curriculum)})"
        yield line


def _counted_words(plan: Plan | EvaluationPlan, tasks: Sequence[Task]) -> str:
    """How many of the tasks each of several environments has."""
    if not plan.environments[0].alias:
        return ""
    counts = Counter(task.env for task in tasks)
    return f" ({', '.join(f'{env.alias} {counts[env.alias]}' for env in plan.environments)})"


def _component_line(key: str, chosen: Chosen) -> str:
    if chosen.ref is None:
        return f"{key}: {'the algorithm’s own' if chosen.name in ('', OWN) else chosen.name}"
    origin = f"{chosen.ref.distribution} {chosen.ref.version}".strip() or chosen.ref.value
    return f"{key}: {chosen.name} ({origin})"


def _scheduled_lines(plan: Plan) -> Iterator[str]:
    """The components that only later stages bring."""
    known = {each.ref for several in plan.chosen.values() for each in several}
    for stage, chosen in zip(plan.schedule[1:], plan.stages_chosen[1:], strict=True):
        for key, several in chosen.items():
            for each in several:
                if each.ref is not None and each.ref not in known:
                    yield f"from step {stage.step}: {_component_line(key, each)}"


def _stage_line(plan: Plan, number: int) -> str:
    stage = plan.schedule[number]
    begin = f"objective from step {stage.step}" if number else "objective"
    return f"{begin}: {objective_words(stage.algorithm, correction_auto=stage.correction_auto)}"


def objective_words(algorithm: Algorithm, *, correction_auto: bool = False) -> str:
    """What is trained, in one line: terms with their coefficients, then each part that is used.

    >>> from rollouts.training.algorithms.recipes import GRPO
    >>> objective_words(GRPO)
    'ppo_clip; advantage group_norm; aggregation token_mean'
    """
    terms = [f"{_times(term.coefficient)}{_call_words(term.function)}" for term in active_terms(algorithm)]
    kl, notes = algorithm.kl, []
    if kl is not None:
        off = is_reward_placed(kl.function)
        words = f"{_times(kl.coefficient)}{_call_words(kl.function)}"
        notes.append(f"KL {words} {'off the advantages' if off else 'in the loss'}{_kl_words(kl)}")
    compared = algorithm.pairs is not None
    if not compared:
        notes.append(f"advantage {_call_words(algorithm.advantage)}")
    notes.append(f"aggregation {_call_words(algorithm.aggregation)}")
    named = {"mix": algorithm.mix, "select": algorithm.select, "pairs": algorithm.pairs}
    notes += [f"{key} {_call_words(function)}" for key, function in named.items() if function is not None]
    if algorithm.shaping:
        notes.append(f"shaping {', '.join(map(_call_words, algorithm.shaping))}")
    if algorithm.correction is not None:
        where = " where another engine samples" if correction_auto else ""
        notes.append(f"correction {_call_words(algorithm.correction)}{where}")
    return "; ".join([" + ".join(terms), *notes])


def _times(coefficient: float) -> str:
    return "" if coefficient == 1 else f"{coefficient:g} * "


def _kl_words(kl: KL) -> str:
    cut = f", cut at {kl.threshold:g}" if kl.threshold is not None else ""
    return cut + (f", steered to {kl.target:g} nats a token" if kl.target is not None else "")


def _call_words(function: Any) -> str:
    """A function with what was bound to it, where that is not its own default: `ema(decay=0.9)`."""
    defaults = getattr(unwrapped(function), "__kwdefaults__", None) or {}
    bound: dict[str, Any] = {}
    inner = function
    while isinstance(inner, functools.partial):
        bound = without_secrets(inner.keywords) | bound
        inner = inner.func
    told = [f"{name}={value}" for name, value in bound.items() if name not in defaults or defaults[name] != value]
    return function_label(function) + (f"({', '.join(told)})" if told else "")


def _companion_lines(plan: Plan) -> Iterator[str]:
    """The models beside the policy."""
    beside = plan.companions
    if beside is None:
        return
    if beside.reference is not None:
        yield f"reference: {_call_words(beside.reference)}"
    if beside.critic:
        yield f"critic: {beside.critic}, learning rate {beside.critic_lr:g}"
    if beside.teacher:
        yield f"teacher: {beside.teacher}, {beside.teacher_top_k} likeliest tokens where a loss asks for them"
