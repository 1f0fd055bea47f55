"""Makes an Algorithm of components for each stage of the schedule, and checks it.

It also finds out which models the stages need beside the policy: a reference, a critic, a teacher. Everything is
checked before a model loads. Not here: finding components and their settings (`components`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rollouts.config.resolving import Resolved
from rollouts.config.schedule import scheduled_parts, scheduled_table
from rollouts.config.settings import AUTO, OWN, Settings
from rollouts.errors import ConfigError, SignatureError, counted, said_of
from rollouts.plugins.manager import PluginManager
from rollouts.plugins.signature import bind, check_signature
from rollouts.runs.components import Chosen, bind_each, choose, completed
from rollouts.training.algorithms import checks
from rollouts.training.algorithms.aggregation import aggregation_function
from rollouts.training.algorithms.algorithm import (
    Algorithm,
    Stage,
    active_terms,
    bind_algorithm,
    function_label,
    is_batch_advantage,
    needs,
    requests,
    stage_name,
)
from rollouts.training.algorithms.checks import CRITIC_NAMES, ONE_SAMPLE, TEACHER_NAMES, compares_groups
from rollouts.training.batches import AuxiliaryModels

# Inputs that demonstrations do not have: nothing was sampled, and no model is run before the loss.
_NOT_IN_SFT = CRITIC_NAMES.union(
    "advantages old_logprobs pair_index ref_logprobs rewards rollout_logprobs teacher_logprobs".split()
)
_ROLLOUTS_ONLY = ("advantage", "kl", "reference", "correction", "mix", "shaping", "select", "pairs", "filter")


class Composed(NamedTuple):
    """The algorithms of a run by stage, and the models beside its policy (None: no such models).

    `stages_chosen` are the components of each stage after the first. `schedule` is the setting `schedule`, completed
    with every setting of its components. `notes` are warnings for the user before the run.
    """

    stages: tuple[Stage, ...]
    stages_chosen: tuple[dict[str, list[Chosen]], ...]
    schedule: tuple[dict[str, Any], ...]
    auxiliary_models: AuxiliaryModels | None
    notes: tuple[str, ...]


def compose(
    manager: PluginManager,
    resolved: Resolved,
    chosen: Mapping[str, list[Chosen]],
    critic_lr: float,
    *,
    has_torch: bool = True,
) -> Composed:
    """The algorithm of each stage; `chosen` are the run's own components. Without torch, no function is called. Raises
    UserError.
    """
    settings = resolved.settings
    planned = scheduled_parts(resolved.components, settings.schedule, resolved.source)[1:]
    later = tuple(choose(manager, each.components, resolved.source, each.places) for each in planned)
    composed: list[Stage] = []
    notes: list[str] = []
    for step, parts in ((0, chosen), *((each.step, parts) for each, parts in zip(planned, later, strict=True))):
        with said_of(from_step(step)):
            _check_mode(parts, settings)
            algorithm = _compose(parts, settings)
            _check(algorithm, parts, settings)
        notes += _notes_of(algorithm, {"filter": chosen["filter"], **parts}, settings, step)
        auto = algorithm.correction is not None and _is_auto(parts)
        composed.append(Stage(step, stage_name(step), algorithm, auto))
    if settings.minibatches > settings.prompts_per_step:
        raise ConfigError(
            f"--minibatches {settings.minibatches}: a batch is divided by prompts, and --prompts-per-step is "
            f"{settings.prompts_per_step}; type --minibatches {settings.prompts_per_step} or less"
        )
    asked = frozenset(name for stage in composed for name in asked_names(stage.algorithm))
    if settings.critic and asked & CRITIC_NAMES:
        _check_critic([stage.algorithm for stage in composed], settings)
    reference = _reference(chosen, settings, asked)
    for stage in composed if has_torch else ():
        with said_of(from_step(stage.step)):
            checks.probe_settings(stage.algorithm, reference, settings.max_tokens)
    critic, teacher = settings.critic if asked & CRITIC_NAMES else "", settings.teacher if asked & TEACHER_NAMES else ""
    auxiliary_models = None
    if reference is not None or critic or teacher:
        auxiliary_models = AuxiliaryModels(reference, critic, critic_lr, teacher, settings.teacher_top_k)
    _check_backend(chosen, auxiliary_models)
    tables = tuple(
        scheduled_table(each.step, each.given, completed(each.components, parts))
        for each, parts in zip(planned, later, strict=True)
    )
    return Composed(tuple(composed), later, tables, auxiliary_models, tuple(dict.fromkeys(notes)))


def asked_names(algorithm: Algorithm) -> frozenset[str]:
    """The inputs that the algorithm needs from a run: those of its loss, and of an advantage of the whole batch."""
    names = needs(algorithm)
    if algorithm.pairs is None and is_batch_advantage(algorithm.advantage):
        names |= set(requests(algorithm.advantage, "advantages"))
    return names


def from_step(step: int) -> str:
    """The name of a later stage in errors and notes."""
    return f"[[schedule]], from step {step}" if step else ""


def _compose(parts: Mapping[str, list[Chosen]], settings: Settings) -> Algorithm:
    """The algorithm with the named parts in place of its own, and all settings bound."""
    (loss,) = parts["loss"]
    algorithm = bind_algorithm(loss.component, loss.settings)
    for key in ("advantage", "aggregation", "mix", "select", "pairs"):
        for each in parts[key]:
            replaced: dict[str, Any] = {key: bind(each.component, each.settings)}
            algorithm = algorithm._replace(**replaced)
    for each in parts["kl"]:
        from rollouts.training.algorithms.kl import make_kl

        algorithm = algorithm._replace(kl=make_kl(each.component, each.settings))
    if algorithm.kl is not None and algorithm.kl.coefficient == 0:  # like any term, it is not computed at 0
        algorithm = algorithm._replace(kl=None)
    shaping: list[Any] = []
    for each in parts["shaping"]:
        is_own = isinstance(each.component, tuple)
        shaping += bind_each(each.component, each.settings) if is_own else [bind(each.component, each.settings)]
    algorithm = algorithm._replace(shaping=tuple(shaping), correction=None)
    for each in parts["correction"]:  # with `auto`, it is `truncated`, unless nothing can be weighed
        if settings.mode == "rl" and (checks.is_weighed(algorithm) or not _is_auto(parts)):
            algorithm = algorithm._replace(correction=bind(each.component, each.settings))
    return algorithm


def _uses_rewards(algorithm: Algorithm) -> bool:
    """Whether what is trained depends on the rewards, or on a teacher in their place."""
    given = {"advantages", "returns", "rewards"} | TEACHER_NAMES
    return bool(algorithm.select or algorithm.pairs or given & needs(algorithm))


def _is_auto(parts: Mapping[str, list[Chosen]]) -> bool:
    """Whether the run chooses the correction, because neither the user nor the algorithm named one."""
    (loss,) = parts["loss"]
    return loss.component.correction is None and [each.name for each in parts["correction"]] == [AUTO]


def _check(algorithm: Algorithm, parts: Mapping[str, list[Chosen]], settings: Settings) -> None:
    """Check that the parts fit together and that the run has their inputs. Raises ConfigError, SignatureError."""
    (loss,) = parts["loss"]
    is_rl = settings.mode == "rl"
    beside = {"critic": bool(settings.critic), "teacher": bool(settings.teacher), "reference": is_rl}
    available = checks.available_names(pairs=algorithm.pairs is not None, **beside)
    if not is_rl:
        _check_demonstrations(algorithm, loss.name)
    wanted = asked_names(algorithm) & CRITIC_NAMES
    if wanted and not settings.critic:
        raise SignatureError(
            f"--loss {loss.name}: {_who_asks(algorithm, wanted)}, but this run has no critic; type --critic head (or a "
            "model's name or folder), or --loss grpo, whose baseline is the group's mean"
        )
    checks.check_needs(algorithm, available)
    if is_rl:
        checks.check_advantage(algorithm.advantage, available)
    checks.check_composition(algorithm, settings.samples_per_prompt if is_rl else None)


def _check_critic(algorithms: Sequence[Algorithm], settings: Settings) -> None:
    """Raise ConfigError if no stage trains the critic that a part of the run asks for: its values would stay 0."""
    if any("values" in needs(algorithm) for algorithm in algorithms):
        return
    who = next(filter(None, (_who_asks(algorithm, CRITIC_NAMES) for algorithm in algorithms)))
    terms = [term for algorithm in algorithms for term in algorithm.terms if "values" in requests(term.function)]
    again = f"--loss.{terms[0].name.replace('_', '-')}-coef 0.5" if terms and terms[0].name else "--loss ppo"
    raise ConfigError(
        f"--critic {settings.critic}: {who}, but no term of the loss names `values`, so nothing would train the "
        f"critic, and its values would stay 0\ntype {again}, or an advantage without a critic: --advantage group_norm"
    )


def _who_asks(algorithm: Algorithm, wanted: Iterable[str]) -> str:
    """Describe which parts of the algorithm need which of the `wanted` inputs."""
    asking = [(function_label(term.function), requests(term.function)) for term in active_terms(algorithm)]
    asking.append((function_label(algorithm.advantage), requests(algorithm.advantage, "advantages")))
    found = [(label, [f"`{name}`" for name in names if name in set(wanted)]) for label, names in asking]
    return " and ".join(f"{label} names {', '.join(names)}" for label, names in found if names)


def _check_mode(parts: Mapping[str, list[Chosen]], settings: Settings) -> None:
    """Raise ConfigError if mode sft is given components that are only for rollouts."""
    if settings.mode == "rl":
        return
    chosen = [(key, each) for key in _ROLLOUTS_ONLY for each in parts.get(key, ())]
    given = [
        f"--{key} {each.name or '(its settings)'}"
        for key, each in chosen
        if each.name not in ("", OWN, AUTO) or (each.settings and not each.name)
    ]
    given += [f"--critic {settings.critic}"] if settings.critic else []
    given += [f"--minibatches {settings.minibatches}"] if settings.minibatches > 1 else []
    if given:
        words = "this is a setting for rollouts, and mode sft has none; leave it out, or type --mode rl"
        raise ConfigError(f"{given[0]}: {words}")


def _check_demonstrations(algorithm: Algorithm, loss: str) -> None:
    """Raise ConfigError if the algorithm needs inputs that demonstrations do not have."""
    own = {
        "a KL term": algorithm.kl and algorithm.kl.function,
        "a selector": algorithm.select,
        "a pair selector": algorithm.pairs,
        "a mixer": algorithm.mix,
        "a shaping": next(iter(algorithm.shaping), None),
    }
    brings = [f"{what} ({function_label(function)})" for what, function in own.items() if function is not None]
    found = (("asks for", sorted(_NOT_IN_SFT & needs(algorithm))), ("brings", brings))
    words = [f"{verb} {', '.join(names)}" for verb, names in found if names]
    if words:
        raise ConfigError(
            f"--loss {loss} {' and '.join(words)}, which demonstrations do not have; type --loss sft, or --mode rl"
        )
    function = aggregation_function(algorithm.aggregation)
    bound = getattr(algorithm.aggregation, "keywords", {})
    if "max_tokens" in requests(function, "aggregations") and bound.get("length") is None:
        raise ConfigError(
            f"--aggregation {function_label(function)} divides by the length of a rollout, and mode sft has none; type "
            "--aggregation.length with a number of tokens, or --aggregation token_mean"
        )


def _reference(
    chosen: Mapping[str, list[Chosen]], settings: Settings, asked: frozenset[str]
) -> Callable[..., Any] | None:
    """The rule of the reference policy, or None if no part needs a reference. Raises ConfigError."""
    for each in chosen["reference"]:
        if "adapters" in requests(each.component, "references") and not settings.lora_rank:
            raise ConfigError(
                f"--reference {each.name}: it needs adapters, and this run trains all weights; type --lora-rank 16, "
                "or --reference frozen"
            )
    if "ref_logprobs" not in asked:
        return None
    for each in chosen["reference"]:
        return bind(each.component, each.settings)
    from rollouts.training.algorithms.kl import adapter_off, frozen

    return adapter_off if settings.lora_rank else frozen


def _check_backend(chosen: Mapping[str, list[Chosen]], wanted: AuxiliaryModels | None) -> None:
    """Raise ConfigError if the run needs a model beside the policy and the training backend does not support one."""
    (training,) = chosen["training"]
    if wanted is None or {"auxiliary_models", "companions"} & {
        *check_signature(training.component, "training", "").requests
    }:
        return
    reference = wanted.reference and function_label(wanted.reference)
    models = {"reference policy": reference, "critic": wanted.critic, "teacher": wanted.teacher}
    needed = ", ".join(f"a {what} ({name})" for what, name in models.items() if name)
    raise ConfigError(
        f"--training {training.name} cannot load {needed}, which this run needs: its function has no "
        "parameter `auxiliary_models`; type --training torch, or leave out --kl, --critic and --teacher"
    )


def _notes_of(algorithm: Algorithm, parts: Mapping[str, list[Chosen]], settings: Settings, step: int) -> list[str]:
    """Warnings about one stage, before the run."""
    notes = []
    place = f"{from_step(step)}: " if step else ""
    if algorithm.kl is not None:
        from rollouts.training.algorithms.kl import warning_of

        notes += [words for words in (warning_of(algorithm.kl.function),) if words]
    if settings.steps and step >= settings.steps:
        notes.append(f"[[schedule]]: step {step} is never reached; the run has {counted(settings.steps, 'step')}")
    (loss,) = parts["loss"]
    if step and loss.component.filters:
        names = " ".join(f"--filter {function_label(each)}" for each in loss.component.filters)
        notes.append(f"{place}the filters of {loss.name} are not used, for filters do not change; type {names}")
    if settings.mode == "rl" and settings.samples_per_prompt == 1 and compares_groups(algorithm):
        notes.append(f"warning: {place}{ONE_SAMPLE}, or --advantage baseline, which compares nothing")
    if settings.mode == "rl" and not any(each.component for each in parts["filter"]) and not _uses_rewards(algorithm):
        notes.append(
            f"warning: {place}{loss.name} does not use the rewards: it trains on every rollout alike; type --select "
            "reward_at_least to train on the good ones, or --mode sft to train on demonstrations"
        )
    return notes
