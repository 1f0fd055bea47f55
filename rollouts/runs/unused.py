"""Names what was chosen and has no effect, with what would give it one. These are notes: the run is as it was asked.

The tables have a rule for every key that names components: it says why nothing uses such a component, or "". A key
without a rule fails in every run, so that a new key gets one. Not here: what is refused, because the run cannot be
what was asked (`algorithms`, `training.algorithms.checks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rollouts.config.convert import unflagged
from rollouts.config.settings import AUTO, OWN, Settings
from rollouts.runs.algorithms import asked_names, from_step
from rollouts.runs.components import Chosen, takes_rows
from rollouts.runs.environments import PlannedEnvironment
from rollouts.training.algorithms import checks
from rollouts.training.algorithms.algorithm import Algorithm, Stage, active_terms, function_label, needs, requests
from rollouts.training.algorithms.checks import CRITIC_NAMES, TEACHER_NAMES
from rollouts.training.rollout_gen.groups import Filter


class Whole(NamedTuple):
    """A composed run, or an evaluation, which has no stages. `parts` are the components of each stage."""

    settings: Settings
    chosen: Mapping[str, list[Chosen]]
    stages: Sequence[Stage]
    parts: Sequence[Mapping[str, list[Chosen]]]
    environments: Sequence[PlannedEnvironment]
    filters: Sequence[Filter]

    @property
    def evaluates(self) -> bool:
        """Whether held-out tasks are played."""
        return self.settings.eval_tasks > 0 and bool(self.environments)

    @property
    def plays(self) -> bool:
        """Whether any episode is played."""
        return self.settings.samples or self.evaluates

    @property
    def learns_of_rows(self) -> bool:
        """Whether conversations that `--data` names are trained on."""
        return takes_rows(self.settings.mode, self.chosen)

    @property
    def asked(self) -> frozenset[str]:
        """The inputs that the algorithms of all stages need."""
        return frozenset(name for stage in self.stages for name in asked_names(stage.algorithm))


def unused(run: Whole, used_elsewhere: Sequence[str] = ()) -> list[str]:
    """A note for each component and setting that was given and has no effect. `used_elsewhere` are keys whose
    components another phase of the run uses.
    """
    notes = [
        f"--{key.replace('_', '-')} {each.name} is not used: {why}"
        for key, several in run.chosen.items()
        if key not in used_elsewhere and key not in _OF_STAGE
        for each in several
        if _is_named(key, each) and (why := _OF_RUN[key](run, each))
    ]
    before: Mapping[str, list[Chosen]] = {}
    for stage, parts in zip(run.stages, run.parts, strict=True):
        place = f"{from_step(stage.step)}: " if stage.step else ""
        notes += [
            f"{place}--{key} {each.name} is not used: {why}"
            for key, rule in _OF_STAGE.items()
            for each in parts[key]
            if _is_named(key, each) and (why := rule(run, stage.algorithm))
        ]
        if before and all(_same(parts[key], before[key]) for key in _OF_STAGE):
            notes.append(f"{place}it changes nothing; write other settings, or leave it out")
        before = parts
    return [*notes, *_unused_settings(run)]


def _is_named(key: str, component: Chosen) -> bool:
    """Whether the user chose it: it is neither a default nor a part of the algorithm."""
    is_default = component.name in ("", OWN, AUTO, getattr(Settings, key))
    return component.component is not None and not is_default


def _same(ours: Sequence[Chosen], theirs: Sequence[Chosen]) -> bool:
    return [(e.name, e.alias, e.settings) for e in ours] == [(e.name, e.alias, e.settings) for e in theirs]


# --- components of the whole run ------------------------------------------------------------------------------------


def _if_played(run: Whole, component: Chosen) -> str:
    how = "type --eval-tasks 64 to evaluate" if run.environments else "name an --env"
    return "" if run.plays or run.settings.from_run else f"no episode is played; {how}"


def _env(run: Whole, component: Chosen) -> str:
    if not run.plays and run.learns_of_rows:
        return "the conversations are those of --data, and nothing is evaluated; type --eval-tasks 64 to evaluate"
    share = next(env.share for env in run.environments if env.alias == component.alias)
    return "" if share else f"its weight is 0 in all steps; type --env {component.alias}={component.name}:1"


def _tool(run: Whole, component: Chosen) -> str:
    is_demonstrated = run.settings.mode == "sft" and not run.learns_of_rows
    return "" if is_demonstrated else _if_played(run, component)


def _tool_parser(run: Whole, component: Chosen) -> str:
    offers = any(e.all_tools() or e.chooses_tools or hasattr(e.make_checked(), "rollout") for e in run.environments)
    is_used = run.settings.mode == "sft" or offers or not run.environments
    return "" if is_used else "no environment has a tool; type --tool NAME to add one"


def _sandbox(run: Whole, component: Chosen) -> str:
    is_used = any(env.sandboxes is not None for env in run.environments)
    return "" if is_used else "no environment asks for one with `def setup(self, task, sandbox)`"


def _reward(run: Whole, component: Chosen) -> str:
    if not run.settings.from_run:
        return _if_played(run, component)
    again = f"to judge again: rollouts rescore {run.settings.from_run[0]} --reward ..."
    evaluates = ", and only evaluations ask it" if run.evaluates else ""
    return f"--from trains on the rewards that were saved{evaluates}; {again}"


def _sampler(run: Whole, component: Chosen) -> str:
    return "" if run.settings.samples else "it chooses tasks to sample, and this run samples none; leave it out"


def _reference(run: Whole, component: Chosen) -> str:
    return "" if "ref_logprobs" in run.asked else "nothing names `ref_logprobs`; --kl rk3_loss would"


def _eval_inference(run: Whole, component: Chosen) -> str:
    lacks = "--eval-every 10" if not run.settings.eval_every else "" if run.evaluates else "--eval-tasks 64"
    return f"it is for evaluations between steps; type {lacks}" if lacks else ""


def _always(*_: object) -> str:
    return ""


_OF_RUN: Mapping[str, Callable[[Whole, Chosen], str]] = {
    "env": _env,
    "tool": _tool,
    "tool_parser": _tool_parser,
    "sandbox": _sandbox,
    "reward": _reward,
    "sampler": _sampler,
    "reference": _reference,
    "inference": _if_played,
    "eval_inference": _eval_inference,
    **dict.fromkeys(("data", "filter", "training", "optimizer", "logger"), _always),
}

# --- components of one stage ----------------------------------------------------------------------------------------


def _uses_advantages(algorithm: Algorithm) -> bool:
    return algorithm.pairs is None and bool({"advantages", "returns"} & needs(algorithm))


def _if_rewarded(run: Whole, algorithm: Algorithm) -> str:
    """Whether the rewards decide on anything after they are mixed and shaped."""
    of_advantage = {"rewards", "turn_rewards"} & set(requests(algorithm.advantage, "advantages"))
    reads = run.filters or algorithm.select or algorithm.pairs or "rewards" in needs(algorithm)
    is_used = reads or (_uses_advantages(algorithm) and of_advantage)
    return "" if is_used else "nothing that is trained depends on the rewards"


def _advantage(run: Whole, algorithm: Algorithm) -> str:
    if algorithm.pairs is not None:
        return "pairs are compared"
    names = " + ".join(function_label(term.function) for term in active_terms(algorithm))
    return "" if _uses_advantages(algorithm) else f"the loss {names} names neither `advantages` nor `returns`"


def _kl(run: Whole, algorithm: Algorithm) -> str:
    is_used = any(stage.algorithm.kl is not None for stage in run.stages)  # a later stage may turn it off
    return "" if is_used else "its coefficient is 0; type --kl.coef 0.01"


def _correction(run: Whole, algorithm: Algorithm) -> str:
    return "" if checks.is_weighed(algorithm) else "the loss has no value a token that it would weigh"


_OF_STAGE: Mapping[str, Callable[[Whole, Algorithm], str]] = {
    "advantage": _advantage,
    "kl": _kl,
    "correction": _correction,
    "mix": _if_rewarded,
    "shaping": _if_rewarded,
    **dict.fromkeys(("loss", "aggregation", "select", "pairs"), _always),  # pairs: refused if the loss compares none
}

# --- settings -------------------------------------------------------------------------------------------------------


def _unused_settings(run: Whole) -> Iterator[str]:
    """Notes about settings without the component that they belong to."""
    settings, asked, critic = run.settings, run.asked, run.settings.critic
    if len(run.environments) == 1 and (run.environments[0].curriculum or run.environments[0].weight != 1.0):
        yield f"--env {run.environments[0].name}: its weight is not used, because it is the only environment"
    if settings.mode == "eval":
        return
    of_backend = unflagged(run.chosen["training"][0].settings)
    has_lora, alpha = bool(settings.lora_rank), of_backend.get("lora_alpha")
    lacks_lora = "every weight is trained; type --lora-rank 16"
    of_critic = "nothing names `values`, `old_values` or `returns`; --loss ppo would"
    of_teacher = "nothing names `teacher_logprobs` or `teacher_topk_logprobs`; --loss opd or --loss opd_topk would"
    of_filter = "there is no filter; type --filter nonzero_std"
    top_k = settings.teacher_top_k if settings.teacher_top_k != Settings.teacher_top_k else 0
    has_k = asked & (TEACHER_NAMES - {"teacher_logprobs"})
    has_tasks, targets = bool(run.environments), of_backend.get("lora_targets", "all-linear")
    table = (  # what was typed, whether it was, whether it is used, and why it is not
        ("eval-tasks", settings.eval_tasks, has_tasks, "conversations alone have no tasks; name an --env"),
        ("critic", critic, asked & CRITIC_NAMES, of_critic),
        ("teacher", settings.teacher, asked & TEACHER_NAMES, of_teacher),
        ("critic-lr", settings.critic_lr, critic, "there is no critic"),
        ("teacher-top-k", top_k, has_k, "nothing names `topk_logprobs`; --loss opd_topk would"),
        ("refill", settings.refill, run.filters, of_filter),
        ("training.lora-alpha", alpha not in (None, "none"), has_lora, lacks_lora),
        ("training.lora-targets", targets != "all-linear", has_lora, lacks_lora),
    )
    for flag, was_typed, is_used, why in table:
        if was_typed and not is_used:
            value = f" {was_typed}" if not isinstance(was_typed, bool) else ""
            yield f"--{flag}{value} is not used: {why}"
    if critic not in ("", "head") and asked & CRITIC_NAMES and not any(_uses_values(s.algorithm) for s in run.stages):
        yield f"--critic {critic} is trained, and nothing uses its values; type --advantage gae"


def _uses_values(algorithm: Algorithm) -> bool:
    """Whether the policy depends on what the critic predicts: by an advantage, or by a term of the policy."""
    readers = [set(requests(term.function)) for term in active_terms(algorithm)]
    readers = [names for names in readers if {"logprobs", "advantages"} & names]
    readers += [set(requests(algorithm.advantage, "advantages"))] if _uses_advantages(algorithm) else []
    return any({"values", "old_values"} & names for names in readers)
