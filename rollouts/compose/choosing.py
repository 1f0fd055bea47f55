"""Names become functions here: a component found, imported, checked, and told its settings.

A component that was not named may be the algorithm's own (`OWN_KEYS`, and the word `algorithm` of `shaping` and
`filter`): its settings are then read from that one. Left out: what is made of what was chosen (`algorithms`, `plan`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rollouts.config import AUTO, OWN, Component, Source, complete_settings, convert_settings, where
from rollouts.config.settings import COMPONENT_KINDS, MULTIPLE, OWN_KEYS
from rollouts.errors import ConfigError, SignatureError
from rollouts.plugins.index import KIND_WORDS, ComponentRef
from rollouts.plugins.manager import PluginManager
from rollouts.plugins.signature import Setting, Signature, check_signature, read_signature
from rollouts.training.algorithms.aggregation import aggregation_function
from rollouts.training.algorithms.algorithm import KL, Algorithm, algorithm_settings, as_algorithm, bind
from rollouts.training.algorithms.corrections import truncated
from rollouts.training.algorithms.kl import KL_SETTINGS, check_kl

__all__ = ["Chosen", "bind_each", "choose_all", "choose_each", "completed", "curriculum", "own_functions", "signed"]

Path = tuple[str, ...]

_SAID = ("alias", "weight")

_EXAMPLES = {
    "kl": "rk3_loss",
    "mix": "lexicographic",
    "select": "reward_at_least",
    "pairs": "best_worst",
    "shaping": "overlong",
    "filter": "nonzero_std",
}


class Chosen(NamedTuple):
    """A component, found and told its settings. `ref` is None for what has no entry point: the environment's own
    rewards, and an algorithm's own parts (of `shaping` and `filter` a tuple of functions).
    """

    name: str
    component: Any
    settings: dict[str, Any]
    ref: ComponentRef | None
    alias: str = ""


def choose_all(
    manager: PluginManager,
    components: Mapping[str, list[Component]],
    source: Source,
    places: Mapping[str, Path] | None = None,
) -> dict[str, list[Chosen]]:
    """Every component of these keys (the loss is one of them), found and told its settings.

    `places` says where each key stands in its file. Raises UserError of one kind or another, with what to type.
    """
    (named,) = components["loss"]
    loss = _choose_named(manager, "loss", named, source, _place("loss", named, places))
    chosen = {"loss": [loss]}
    for key in components:
        if key != "loss":
            chosen[key] = [
                _choose(manager, key, each, loss, source, _place(key, each, places)) for each in components[key]
            ]
    return {key: chosen[key] for key in components}


def choose_each(
    manager: PluginManager, components: Mapping[str, list[Component]], source: Source
) -> dict[str, list[Chosen]]:
    """Every component of keys that no algorithm has a part in: env, reward, inference, logger. Raises UserError."""
    return {
        key: [_choose_plain(manager, key, each, source, _place(key, each, None)) for each in components[key]]
        for key in components
    }


def completed(
    components: Mapping[str, list[Component]], chosen: Mapping[str, list[Chosen]]
) -> dict[str, list[Component]]:
    """The components with every setting filled in, so that writing them down repeats the run."""
    return {
        key: [each._replace(settings=found.settings) for each, found in zip(components[key], chosen[key], strict=True)]
        for key in components
    }


def signed(found: Any, kind: str, label: str) -> tuple[Any, Signature]:
    """The component as it is used (a loss as an Algorithm), what it asks for, and all that it can be told.

    Raises SignatureError.
    """
    if kind == "losses":
        try:
            algorithm = as_algorithm(found)
        except SignatureError as error:
            raise SignatureError(f"{label}: {error}") from error
        return algorithm, Signature(check_signature(found, kind, label).requests, algorithm_settings(algorithm))
    signature = check_signature(found, kind, label)
    if kind == "kl":
        taken = {setting.name for setting in KL_SETTINGS} & {setting.name for setting in signature.settings}
        if taken:
            raise SignatureError(
                f"{label}: its settings {', '.join(sorted(taken))} have the names of settings that every KL term has\n"
                "give them other names"
            )
        signature = signature._replace(settings=(*KL_SETTINGS, *signature.settings))
    return found, signature


def own_functions(algorithm: Algorithm, key: str) -> tuple[Any, ...]:
    """The algorithm's own part for a key: one function or none, for `shaping` and `filter` any number."""
    if key == "aggregation":
        return (aggregation_function(algorithm.aggregation),)
    if key in ("shaping", "filter"):
        return algorithm.shaping if key == "shaping" else algorithm.filters
    part = getattr(algorithm, key)
    return () if part is None else (part.function if isinstance(part, KL) else part,)


def bind_each(functions: Iterable[Any], settings: Mapping[str, Any]) -> tuple[Any, ...]:
    """Each function with those of the settings bound that it has."""
    bound = []
    for function in functions:
        own = {setting.name for setting in read_signature(function, "").settings}
        bound.append(bind(function, {name: value for name, value in settings.items() if name in own}))
    return tuple(bound)


def _choose(manager: PluginManager, key: str, component: Component, loss: Chosen, source: Source, path: Path) -> Chosen:
    """One component with its settings converted and completed."""
    if key == "correction" and component.name == AUTO:
        # An algorithm that brings a correction wants it; else it is the usual one, where another engine samples.
        own = loss.component.correction or truncated
        return _told(AUTO, own, check_signature(own, "corrections", "--correction auto"), component, source, path)
    if key in OWN_KEYS and not component.name:
        return _choose_own(key, component, loss, source, path)
    if key in ("shaping", "filter") and component.name == OWN:
        return _choose_own(key, component, loss, source, path)
    return _choose_plain(manager, key, component, source, path)


def _choose_plain(manager: PluginManager, key: str, component: Component, source: Source, path: Path) -> Chosen:
    """A component that has to do with nothing but its name."""
    if key == "reward" and component.name == "env":
        convert_settings(Signature((), ()), component.settings, "the environment's own rewards", source, path)
        return Chosen("env", None, {}, None, component.alias)
    return _choose_named(manager, key, component, source, path)


def _choose_named(manager: PluginManager, key: str, component: Component, source: Source, path: Path) -> Chosen:
    kind = COMPONENT_KINDS[key]
    if key == "kl":
        check_kl(component.name)
    ref = manager.find(kind, component.name)
    label = f"{KIND_WORDS[kind]} {component.name}"
    found, signature = signed(manager.load(ref), kind, label)
    told = _told(label, found, signature, component, source, path)._replace(name=component.name, ref=ref)
    if key == "env" and component.alias:  # the table of one of several says these itself
        told = told._replace(settings={name: told.settings[name] for name in told.settings if name not in _SAID})
    return told


def curriculum(manager: PluginManager, component: Component, source: Source) -> Chosen:
    """The curriculum that an environment's weight names, told its settings. Raises UserError."""
    assert isinstance(component.weight, dict), f"the weight of {component.alias} is {component.weight}"
    path = ("env", component.alias, "weight")
    settings = {name: value for name, value in component.weight.items() if name != "name"}
    named = Component(component.weight["name"], settings, 1.0, component.alias)
    ref = manager.find("curricula", named.name)
    label = f"the curriculum {named.name}"
    found, signature = signed(manager.load(ref), "curricula", label)
    if not callable(found) or signature.requests != ("step",):
        raise SignatureError(
            f"{label}: write `def {ref.name}(step) -> float`; it takes {signature.requests or 'nothing'}"
        )
    return _told(label, found, signature, named, source, path)._replace(ref=ref)


def _choose_own(key: str, component: Component, loss: Chosen, source: Source, path: Path) -> Chosen:
    """The algorithm's own part, told what was given for it. Raises ConfigError where it has none and is told
    something.
    """
    functions = own_functions(loss.component, key)
    kind = COMPONENT_KINDS[key]
    if not functions:
        if component.settings:
            first, value = next(iter(component.settings.items()))
            raise ConfigError(
                f"{where((*path, first), value, source)}: the loss {loss.name} has no {KIND_WORDS[kind]} of its own, "
                f"and none is chosen that could have this setting\ntype: --{key} {_EXAMPLES[key]}; "
                f"`rollouts plugins list --kind {kind}` shows what is installed"
            )
        return Chosen(component.name, (), {}, None, component.alias)
    label = f"the {KIND_WORDS[kind]} of {loss.name}"
    settings: dict[str, Setting] = {}
    for function in functions:
        for setting in signed(function, kind, label)[1].settings:
            settings.setdefault(setting.name, setting)
    if key == "kl":  # its own numbers are in the algorithm, not in the function's signature
        kl = loss.component.kl
        own = dict(zip((setting.name for setting in KL_SETTINGS), kl[1:], strict=True))
        settings = {
            name: setting._replace(default=own.get(name, setting.default)) for name, setting in settings.items()
        }
    part = functions if key in MULTIPLE else functions[0]
    told = _told(label, part, Signature((), tuple(settings.values())), component, source, path)
    return told._replace(name=component.name)


def _told(label: str, found: Any, signature: Signature, component: Component, source: Source, path: Path) -> Chosen:
    converted = convert_settings(signature, component.settings, label, source, path)
    return Chosen(component.name, found, complete_settings(signature, converted), None, component.alias)


def _place(key: str, component: Component, places: Mapping[str, Path] | None) -> Path:
    place = (places or {}).get(key, (key,))
    return (*place, component.alias) if component.alias else place
