"""Names what was chosen and has no effect, with what would give it one. These are notes: the run is as it was asked.

`_OF_RUN` and `_OF_STAGE` have a rule for every key that names components: it says why nothing uses such a component,
or "". A key without a rule fails in every run, so that a new key gets one. The rules follow what is requested: terms
request names, and an advantage, a mixer or a critic is used only if a request leads to it. Not here: what is refused,
because the run cannot be what was asked (`algorithms`, `training.algorithms.checks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rollouts.config.convert import unflagged
from rollouts.config.settings import AUTO, OWN, Settings
from rollouts.env.authoring import rewards_of
from rollouts.env.mixing import RewardTerm
from rollouts.errors import UserError
from rollouts.models.estimates import how_estimated
from rollouts.runs.algorithms import asked_names, from_step
from rollouts.runs.components import Chosen, takes_rows
from rollouts.runs.earlier_run import run_of
from rollouts.runs.environments import Environment
from rollouts.training.algorithms import checks
from rollouts.training.algorithms.algorithm import (
    Algorithm,
    Stage,
    active_terms,
    function_label,
    is_batch_advantage,
    needs,
    requests,
)
from rollouts.training.algorithms.checks import CRITIC_NAMES, TEACHER_NAMES
from rollouts.training.rollout_gen.groups import NamedFilter

TOP_K_NAMES = TEACHER_NAMES - {"teacher_logprobs"}


class Whole(NamedTuple):
    """A composed run, or an evaluation, which has no stages. `chosen` are the components of the first stage, and
    `later` those of the others.
    """

    settings: Settings
    chosen: Mapping[str, list[Chosen]]
    stages: Sequence[Stage]
    later: Sequence[Mapping[str, list[Chosen]]]
    environments: Sequence[Environment]
    rewards: Sequence[RewardTerm]
    filters: Sequence[NamedFilter]

    @property
    def parts(self) -> Sequence[Mapping[str, list[Chosen]]]:
        """The components of each stage."""
        return (self.chosen, *self.later) if self.stages else ()

    @property
    def evaluates(self) -> bool:
        """Whether held-out tasks are played."""
        return self.settings.eval_tasks > 0 and bool(self.environments)

    @property
    def plays(self) -> bool:
        """Whether any episode is played."""
        return self.settings.samples or self.evaluates

    @property
    def asked(self) -> frozenset[str]:
        """The inputs that the algorithms of all stages need."""
        return frozenset(name for stage in self.stages for name in asked_names(stage.algorithm))


def unused(run: Whole, used_elsewhere: Sequence[str] = ()) -> list[str]:
    """A note for each component and setting that was given and has no effect. `used_elsewhere` are keys whose
    components another phase of the run uses.
    """
    notes = [
        f"{_flag(key, each)} is not used: {why}"
        for key, several in run.chosen.items()
        for each in several
        if key not in used_elsewhere
        and key not in _OF_STAGE
        and _is_named(key, each)
        and (why := _OF_RUN[key](run, each))
    ]
    for number, (stage, parts) in enumerate(zip(run.stages, run.parts, strict=True)):
        place = f"{from_step(stage.step)}: " if stage.step else ""
        notes += [
            f"{place}{_flag(key, each)} is not used: {why}"
            for key in _OF_STAGE
            for each in parts[key]
            if _is_named(key, each) and (why := _OF_STAGE[key](run, stage.algorithm, each))
        ]
        if number and not _differs(parts, run.parts[number - 1]):
            notes.append(f"{place}it changes nothing; write other settings, or leave it out")
    return [*notes, *_unused_settings(run), *_dropping_all(run)]


def _flag(key: str, component: Chosen) -> str:
    return f"--{key.replace('_', '-')} {component.name}"


def _is_named(key: str, component: Chosen) -> bool:
    """Whether the user chose it: it is neither a default nor a part of the algorithm."""
    is_default = component.name in ("", OWN, AUTO, getattr(Settings, key))
    return component.component is not None and not is_default


def _differs(one: Mapping[str, list[Chosen]], other: Mapping[str, list[Chosen]]) -> bool:
    return any(
        [(each.name, each.alias, each.settings) for each in one[key]]
        != [(each.name, each.alias, each.settings) for each in other[key]]
        for key in _OF_STAGE
    )


# --- components of the whole run ------------------------------------------------------------------------------------

_EVALUATE = "type --eval-tasks 64 to evaluate"


def _always(*_: Any) -> str:
    return ""


def _if_played(run: Whole, component: Chosen) -> str:
    if run.plays or run.settings.from_run:
        return ""
    return f"no episode is played; {_EVALUATE if run.environments else 'name an --env'}"


def _env(run: Whole, component: Chosen) -> str:
    if not run.plays and takes_rows(run.settings.mode, run.chosen):
        return f"the conversations are those of --data, and nothing is evaluated; {_EVALUATE}"
    share = next(env.share for env in run.environments if env.alias == component.alias)
    return "" if share else f"its weight is 0 in all steps; type --env {component.alias}={component.name}:1"


def _tool(run: Whole, component: Chosen) -> str:
    is_shown = run.settings.mode == "sft" and not takes_rows(run.settings.mode, run.chosen)  # in demonstrations
    return "" if is_shown else _if_played(run, component)


def _tool_parser(run: Whole, component: Chosen) -> str:
    if run.settings.mode == "sft" or any(_calls_tools(env) for env in run.environments):
        return ""
    return "no environment has a tool; type --tool NAME to add one" if run.environments else ""


def _calls_tools(env: Environment) -> bool:
    """Whether the model may be offered tools: the environment's own, or those of a loop of its own."""
    return bool(env.all_tools()) or env.chooses_tools or hasattr(env.make_checked(), "rollout")


def _sandbox(run: Whole, component: Chosen) -> str:
    if any(env.sandboxes is not None for env in run.environments):
        return ""
    return "no environment asks for one with `def setup(self, task, sandbox)`"


def _reward(run: Whole, component: Chosen) -> str:
    if not run.settings.from_run:
        return _if_played(run, component)
    folder = run.settings.from_run[0]
    try:
        theirs = run_of(folder)
    except UserError:  # reading its trajectories reports it
        return ""
    if theirs is None or component.name in {each.name for each in theirs.components["reward"]}:
        return ""
    evaluations = ", and only evaluations ask it" if run.evaluates else ""
    again = f"to judge again: rollouts rescore {folder} --reward ..."
    return f"--from trains on the rewards that were saved{evaluations}; {again}"


def _sampler(run: Whole, component: Chosen) -> str:
    if run.settings.samples:
        return ""
    what = "saved groups are visited in turn" if run.settings.from_run else "demonstrations are visited in turn"
    return f"it chooses tasks to sample, and {what}; leave it out"


def _reference(run: Whole, component: Chosen) -> str:
    return "" if "ref_logprobs" in run.asked else "nothing names `ref_logprobs`; --kl rk3_loss would"


def _filter(run: Whole, component: Chosen) -> str:
    if run.settings.samples_per_prompt > 1 or not run.settings.samples:
        return ""
    found = next(each for each in run.filters if each.function is component.component)
    kept = checks.decisions_on_groups_of_one(found.function, found.settings)
    return "it keeps every group of one rollout; type --samples-per-prompt 8" if kept == {True} else ""


def _eval_inference(run: Whole, component: Chosen) -> str:
    lacks = "--eval-every 10" if not run.settings.eval_every else "" if run.evaluates else "--eval-tasks 64"
    return f"it is for evaluations between steps; type {lacks}" if lacks else ""


_OF_RUN: Mapping[str, Callable[[Whole, Chosen], str]] = {
    "env": _env,
    "tool": _tool,
    "tool_parser": _tool_parser,
    "sandbox": _sandbox,
    "reward": _reward,
    "data": _always,  # refused if no environment takes rows
    "sampler": _sampler,
    "reference": _reference,
    "filter": _filter,
    "inference": _if_played,
    "training": _always,
    "optimizer": _always,
    "logger": _always,
    "eval_inference": _eval_inference,
}

# --- components of one stage ----------------------------------------------------------------------------------------


def _uses_advantages(algorithm: Algorithm) -> bool:
    return algorithm.pairs is None and bool({"advantages", "returns"} & needs(algorithm))


def _reads_rewards(run: Whole, algorithm: Algorithm) -> bool:
    """Whether the rewards decide on anything after they are mixed and shaped."""
    if run.filters or algorithm.select or algorithm.pairs or "rewards" in needs(algorithm):
        return True
    return _uses_advantages(algorithm) and bool(
        {"rewards", "turn_rewards"} & set(requests(algorithm.advantage, "advantages"))
    )


def _advantage(run: Whole, algorithm: Algorithm, component: Chosen) -> str:
    if algorithm.pairs is not None:
        return "pairs are compared"
    names = " + ".join(function_label(term.function) for term in active_terms(algorithm))
    return "" if _uses_advantages(algorithm) else f"the loss {names} names neither `advantages` nor `returns`"


def _kl(run: Whole, algorithm: Algorithm, component: Chosen) -> str:
    # A later stage may turn an earlier one's off.
    is_used = any(stage.algorithm.kl is not None for stage in run.stages)
    return "" if is_used else "its coefficient is 0; type --kl.coef 0.01"


def _correction(run: Whole, algorithm: Algorithm, component: Chosen) -> str:
    if not checks.is_weighed(algorithm):
        return f"{run.parts[0]['loss'][0].name} has no value a token that it would weigh"
    settings, (inference,) = run.settings, run.chosen["inference"]
    is_current = settings.over_sampling == settings.sync_every == 1 and settings.staleness == 0
    is_own = settings.samples and is_current and how_estimated(inference.component) == "embedded"
    if is_own and checks.keeps_own_tokens(algorithm.correction):
        return f"{inference.name} samples with the weights that are trained, so every token has the weight 1"
    return ""


def _mix(run: Whole, algorithm: Algorithm, component: Chosen) -> str:
    if not _reads_rewards(run, algorithm):
        return "nothing that is trained depends on the rewards"
    weights = [
        [own.weight * term.weight for own in rewards_of(env.chosen.component)]
        if term.function is None
        else [term.weight]
        for env in run.environments
        for term in run.rewards
    ]
    one = len(run.rewards) == 1 and all(len(own) == 1 for own in weights)
    if not one or not all(checks.keeps_one_reward(algorithm.mix, weight) for (weight,) in weights):
        return ""
    return "there is one reward, which it leaves as it is; add another --reward, or leave it out"


def _shaping(run: Whole, algorithm: Algorithm, component: Chosen) -> str:
    return "" if _reads_rewards(run, algorithm) else "nothing that is trained depends on the rewards"


def _select(run: Whole, algorithm: Algorithm, component: Chosen) -> str:
    size = run.settings.samples_per_prompt
    if run.settings.samples and checks.selects_all(algorithm.select, size):
        return f"it keeps all rollouts of a group of {size}; type a larger --samples-per-prompt"
    return ""


_OF_STAGE: Mapping[str, Callable[[Whole, Algorithm, Chosen], str]] = {
    "loss": _always,
    "advantage": _advantage,
    "aggregation": _always,
    "kl": _kl,
    "correction": _correction,
    "mix": _mix,
    "shaping": _shaping,
    "select": _select,
    "pairs": _always,  # refused if the loss compares no pairs
}

# --- settings -------------------------------------------------------------------------------------------------------


def _unused_settings(run: Whole) -> Iterator[str]:
    """Notes about settings without the component that they belong to."""
    settings, asked = run.settings, run.asked
    if len(run.environments) == 1 and (run.environments[0].curriculum or run.environments[0].weight != 1.0):
        yield f"--env {run.environments[0].name}: its weight is not used, because it is the only environment"
    if settings.mode == "eval":
        return
    if settings.eval_tasks and not run.environments:
        yield f"--eval-tasks {settings.eval_tasks} is not used: conversations alone have no tasks; name an --env"
    of_teacher = "`teacher_logprobs` or `teacher_topk_logprobs`; --loss opd or --loss opd_topk"
    beside = (
        ("critic", settings.critic, CRITIC_NAMES, "`values`, `old_values` or `returns`; --loss ppo"),
        ("teacher", settings.teacher, TEACHER_NAMES, of_teacher),
    )
    for flag, given, names, who in beside:
        if given and not asked & names:
            yield f"--{flag} {given} is not used, and not loaded: nothing names {who} would"
    if settings.critic not in ("", "head") and asked & CRITIC_NAMES and not _uses_critic(run):
        yield f"--critic {settings.critic} is trained, and nothing uses its values; type --advantage gae"
    if settings.critic_lr is not None and not settings.critic:
        yield f"--critic-lr {settings.critic_lr:g} is not used: there is no critic"
    if settings.teacher_top_k != Settings.teacher_top_k and not asked & TOP_K_NAMES:
        given = f"--teacher-top-k {settings.teacher_top_k}"
        yield f"{given} is not used: nothing names `topk_logprobs`; --loss opd_topk would"
    if settings.refill and not run.filters:
        yield f"--refill {settings.refill} is not used: there is no filter; type --filter nonzero_std"
    of_lora = {"lora_alpha": (None, "none"), "lora_targets": ("all-linear",)} if not settings.lora_rank else {}
    of_backend = unflagged(run.chosen["training"][0].settings)
    for name, defaults in of_lora.items():
        if of_backend.get(name, defaults[0]) not in defaults:
            yield f"--training.{name.replace('_', '-')} is not used: every weight is trained; type --lora-rank 16"


def _dropping_all(run: Whole) -> Iterator[str]:
    """A warning for each filter that drops every group, because groups have one rollout."""
    for each in run.filters if run.settings.samples and run.settings.samples_per_prompt == 1 else ():
        if checks.decisions_on_groups_of_one(each.function, each.settings) == {False}:
            yield (
                f"warning: the filter {each.name} drops every group of one rollout, so nothing is trained; type "
                "--samples-per-prompt 8, or --filter none"
            )


def _uses_critic(run: Whole) -> bool:
    """Whether the policy depends on what the critic predicts: by an advantage, or by a term of the policy."""
    for stage in run.stages:
        algorithm = stage.algorithm
        of_advantage = requests(algorithm.advantage, "advantages")
        if _uses_advantages(algorithm) and is_batch_advantage(algorithm.advantage) and "values" in of_advantage:
            return True
        names = [set(requests(term.function)) for term in active_terms(algorithm)]
        if any({"values", "old_values"} & each and {"logprobs", "advantages"} & each for each in names):
            return True
    return False
