"""From the name of a component to its function: finds, imports and checks it, and reads its settings.

A component that was not named may be the algorithm's own (`OF_LOSS`): its settings are then those of the algorithm's
function. Not here: what is composed of components (`algorithms`, `plan`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from rollouts.author_code import with_place
from rollouts.config.files import Source, where
from rollouts.config.flags import flag_name
from rollouts.config.merging import Component
from rollouts.config.names import HELD
from rollouts.config.resolving import Resolved
from rollouts.config.settings import AUTO, COMPONENT_KINDS, MULTIPLE, OWN, OWN_KEYS, Setting, Settings
from rollouts.env.authoring import tools_of
from rollouts.env.schema import check_tool
from rollouts.env.toolsets import AddedTool, Toolset, check_toolset, is_toolset
from rollouts.errors import ConfigError, MissingExtraError, SignatureError, UnknownComponentError, said_of
from rollouts.inference.chatting import is_evaluation_only
from rollouts.plugins.index import KIND_WORDS, ComponentRef
from rollouts.plugins.manager import PluginManager
from rollouts.plugins.signature import (
    Signature,
    bind,
    check_defaults,
    check_signature,
    converted,
    keywords_of,
    make,
    read_signature,
    refuse_without_hint,
)
from rollouts.training.algorithms.aggregation import aggregation_function
from rollouts.training.algorithms.algorithm import (
    KL,
    KL_SETTINGS,
    Algorithm,
    algorithm_settings,
    as_algorithm,
    bind_own,
)
from rollouts.training.algorithms.corrections import truncated

if TYPE_CHECKING:
    from rollouts.chat.tool_parsers import ChosenParser
    from rollouts.plugins.protocols import TaskSampler

Path = tuple[str, ...]

_EXAMPLES = {
    "kl": "rk3_loss",
    "mix": "lexicographic",
    "select": "reward_at_least",
    "pairs": "best_worst",
    "shaping": "overlong",
    "filter": "nonzero_std",
}


_WITHOUT_COMPONENT = {
    ("reward", "env"): "the environment's own rewards",
    **{("tool_parser", name): f"--tool-parser {AUTO}" for name in ("", AUTO)},
}
"""The names that mean no component, and what they mean in errors."""

OF_LOSS = {**dict.fromkeys(OWN_KEYS, ""), "shaping": OWN, "filter": OWN, "correction": AUTO}
"""The name, by key, that means the algorithm's own part."""


class RemoteEnvironments(Protocol):
    """Which environments run in workers, and the classes in their place; see `rollouts.runs.workers`."""

    def has(self, component: Component) -> bool:
        """Whether this environment runs in workers."""
        ...

    def is_elsewhere(self, component: Component) -> bool:
        """Whether this Python may lack the environment."""
        ...

    def load(self, component: Component, ref: ComponentRef | None) -> Any:
        """The class that behaves as the environment. `ref` is None if it is elsewhere."""
        ...

    def settings(self, component: Component, source: Source, path: Path) -> dict[str, Any]:
        """All settings of the environment, checked."""
        ...


class Chosen(NamedTuple):
    """A component with its settings.

    `ref` is None if no entry point names the component: the rewards of an environment, and the parts of an algorithm.
    An algorithm's parts of `shaping` and `filter` are tuples of functions. With `is_absent`, an extra that the
    component needs is not installed; its settings are not converted, and `component` does nothing.
    """

    name: str
    component: Any
    settings: dict[str, Any]
    ref: ComponentRef | None
    alias: str = ""
    is_absent: bool = False


def choose(
    manager: PluginManager,
    components: Mapping[str, list[Component]],
    source: Source,
    places: Mapping[str, Path] | None = None,
    workers: RemoteEnvironments | None = None,
    *,
    may_be_absent: bool = False,
) -> dict[str, list[Chosen]]:
    """Every component of these keys, with its settings. If `components` has keys of the algorithm, it must have `loss`
    too.

    `places` has the path of each key in its settings file, and `workers` says which environments run in workers. With
    `may_be_absent`, a training backend or an optimizer whose extra is not installed is no error. Raises a UserError
    that says what to type.
    """
    chosen: dict[str, list[Chosen]] = {}
    for key in sorted(components, key=lambda key: key != "loss"):  # the loss first: others may be its own
        (loss,), place, chosen[key] = chosen.get("loss", (None,)), (places or {}).get(key, (key,)), []
        for each in components[key]:
            path = (*place, each.alias) if each.alias else place
            try:
                chosen[key].append(_choose(manager, key, each, loss, source, path, workers))
            except MissingExtraError:
                if not may_be_absent or key not in ("training", "optimizer"):
                    raise
                absent = Chosen(each.name, _absent, dict(each.settings), _find(manager, key, each), each.alias, True)
                chosen[key].append(absent)
    return {key: chosen[key] for key in components}


def _absent(model: Any, auxiliary_models: Any, make_optimizer: Any) -> None:
    """Replaces a component that is not installed. It takes what any training backend may take."""


def added_tools(chosen: Sequence[Chosen]) -> tuple[AddedTool, ...]:
    """The tools that a run adds to those of its environments. Raises EnvironmentDefinitionError for one without a
    schema, and for a mistake in a class of tools.
    """
    if not chosen:
        return ()
    from rollouts.env.task_tools import added_tool

    tools: list[AddedTool] = []
    for each in chosen:
        if is_toolset(each.component):
            check_toolset(toolset := Toolset(each.alias, each.component, each.settings))
            tools.append(toolset)
        else:
            check_tool(tool := added_tool(each.alias, each.component, each.settings))
            tools.append(tool)
    return tuple(tools)


def check_tool_names(chosen: Sequence[Chosen], env: Any, name: str) -> None:
    """Raise ConfigError if the environment object, whose component is `name`, has a tool with the name of an added
    one.
    """
    own = {tool.name for tool in tools_of(env)}
    for each in chosen:
        if is_toolset(each.component):
            if same := own & {tool.name for tool in tools_of(each.component)}:
                raise ConfigError(f"--tool {each.name}: the environment {name} has a tool named {min(same)!r} too")
        elif each.alias in own:
            raise ConfigError(
                f"--tool {each.name}: the environment {name} has a tool named {each.alias!r} too\n"
                f"give the added one another name: --tool other_{each.alias}={each.name}"
            )


def chosen_optimizer(chosen: Mapping[str, list[Chosen]]) -> Any:
    """The function that makes the optimizer that a run chose, with its settings; None if it chose none. Raises
    ConfigError, also if the optimizer does not work, or if the training backend takes none.
    """
    (training,) = chosen["training"]
    for each in chosen["optimizer"]:
        if "make_optimizer" not in read_signature(training.component, "training").requests:
            raise ConfigError(
                f"--optimizer {each.name}: the training backend {training.name} chooses its optimizer itself, because "
                "it does not name `make_optimizer`\nleave --optimizer out, or type: --training torch"
            )
        make = bind(each.component, each.settings)
        if not (training.is_absent or each.is_absent):
            from rollouts.training.backends.optimizer import check_optimizer

            check_optimizer(make, f"the optimizer {each.name}")
        return make
    return None


def check_pinned(chosen: Sequence[Chosen], settings: Settings) -> None:
    """Raise ConfigError if the engine of `--eval-inference` cannot get the weights of the run."""
    for engine in chosen:
        what = f"--eval-inference {engine.name}"
        if is_evaluation_only(engine.component):
            raise ConfigError(
                f"{what}: a chat API has its own weights, and not those of the run; type --eval-inference hf, vllm or "
                "sglang"
            )
        if settings.role:
            raise ConfigError(
                f"{what}: other models play roles of the environment, and training would share them with the "
                "evaluation; leave it out"
            )


def chosen_sampler(chosen: Mapping[str, list[Chosen]]) -> Callable[..., TaskSampler]:
    """What makes the task sampler of each environment, with its settings."""
    (found,) = chosen["sampler"]
    return bind(found.component, found.settings)


def takes_rows(mode: str, chosen: Mapping[str, Sequence[Chosen]]) -> bool:
    """Whether a run trains on conversations that `--data` names. An environment with demonstrations of its own, to
    which the run gives `--data`, makes them of it.
    """
    if mode != "sft" or not chosen.get("data"):
        return False
    from rollouts.env.prompts import Prompts

    return not any(
        "data" in each.settings and not (isinstance(each.component, type) and issubclass(each.component, Prompts))
        for each in chosen["env"]
    )


def make_component(word: str, chosen: Chosen, available: Mapping[str, Any]) -> Any:
    """Call the component's factory; see `rollouts.plugins.signature.make`."""
    return make(word, chosen.name, chosen.component, available, chosen.settings)


def _choose(
    manager: PluginManager,
    key: str,
    component: Component,
    loss: Chosen | None,
    source: Source,
    path: Path,
    workers: RemoteEnvironments | None = None,
) -> Chosen:
    """One component with its settings converted and completed."""
    name = component.name
    if key == "env" and workers is not None and workers.has(component):
        ref = None if workers.is_elsewhere(component) else _find(manager, key, component)
        remote = workers.load(component, ref)
        settings = _own_settings(workers.settings(component, source, path), component)
        return Chosen(name, remote, settings, remote.description.ref, component.alias)
    found, signature, ref, label = read_component(manager, key, component, loss, source, path)
    refuse_without_hint(found, signature, component.settings, label, source, path)
    settings = converted(signature, component.settings, label, source, path)
    if key == "env":
        settings = _own_settings(settings, component)
    if callable(found) and key != "env":
        keywords_of(found, settings)  # raises if a dataclass refuses its settings
    return Chosen(name, found, settings, ref, component.alias)


class ReadComponent(NamedTuple):
    """A component as the run uses it, its signature, and its name in errors. `ref` is None without an entry point."""

    component: Any
    signature: Signature
    ref: ComponentRef | None
    label: str


def read_component(
    manager: PluginManager, key: str, component: Component, loss: Chosen | None, source: Source, path: Path
) -> ReadComponent:
    """Import a component and read its signature. Its settings are not converted. `loss` is the run's loss, whose own
    parts may be meant; None for the loss itself. Raises UserError.
    """
    kind, name = COMPONENT_KINDS[key], component.name
    if label := _WITHOUT_COMPONENT.get((key, name)):
        return ReadComponent(None, Signature((), ()), None, label)
    if loss is not None and name == OF_LOSS.get(key):
        label = f"the {KIND_WORDS[kind]} of {loss.name}"
        return ReadComponent(*_own_part(key, component, loss, label, source, path), None, label)
    if key == "kl":
        from rollouts.training.algorithms.kl import check_kl

        check_kl(name)
    label = f"{KIND_WORDS[kind]} {name}"
    ref = _find(manager, key, component)
    with _with_line(ref, manager.load(ref)):
        return ReadComponent(*signed(manager.load(ref), kind, label), ref, label)


def _own_settings(settings: dict[str, Any], component: Component) -> dict[str, Any]:
    """The settings of an environment. One of several has `alias` and `weight` in its own table."""
    return {name: value for name, value in settings.items() if not component.alias or name not in ("alias", "weight")}


@contextlib.contextmanager
def _with_line(ref: ComponentRef, component: Any) -> Iterator[None]:
    """Put the line of an object in memory below a SignatureError of the block, which says only its name."""
    try:
        yield
    except SignatureError as error:
        if not HELD.fullmatch(ref.value):
            raise
        raise SignatureError(with_place(error, component)) from error


def _find(manager: PluginManager, key: str, component: Component) -> ComponentRef:
    if key == "data":
        from rollouts.data.source import find_loader

        return find_loader(manager, component.name)[0]
    kind, alias = COMPONENT_KINDS[key], component.alias
    try:
        return manager.find(kind, component.name)
    except UnknownComponentError as error:
        if alias not in {ref.name for ref in manager.list(kind)}:
            raise
        flag = flag_name((key, alias, "name"))
        hint = (
            f"`{flag}` chooses another {KIND_WORDS[kind]}; for the settings of {alias}: rollouts plugins show {alias}"
        )
        raise UnknownComponentError(f"{error}\n{hint}") from error


def parser_of(chosen: Chosen) -> ChosenParser | None:
    """The chosen tool parser; None: the chat template decides how calls are read."""
    if chosen.component is None:
        return None
    from rollouts.chat.tool_parsers import ChosenParser

    return ChosenParser(chosen.name, chosen.component, chosen.settings)


def curriculum(manager: PluginManager, component: Component, source: Source) -> Chosen:
    """The curriculum of an environment whose weight is the name of one, with its settings. Raises UserError."""
    assert isinstance(component.weight, dict), f"the weight of {component.alias} is {component.weight}"
    name = component.weight["name"]
    given = {key: value for key, value in component.weight.items() if key != "name"}
    ref = manager.find("curricula", name)
    label = f"the curriculum {name}"
    found, signature = signed(manager.load(ref), "curricula", label)
    if not callable(found) or signature.requests != ("step",):
        raise SignatureError(
            f"{label}: write `def {ref.name}(step) -> float`; it takes {signature.requests or 'nothing'}"
        )
    settings = converted(signature, given, label, source, ("env", component.alias, "weight"))
    return Chosen(name, found, settings, ref, component.alias)


def completed(
    components: Mapping[str, list[Component]], chosen: Mapping[str, list[Chosen]]
) -> dict[str, list[Component]]:
    """The chosen components with every setting filled in, so that a config file of them repeats the run."""
    return {
        key: [each._replace(settings=found.settings) for each, found in zip(components[key], parts, strict=True)]
        for key, parts in chosen.items()
    }


def signed(found: Any, kind: str, label: str) -> tuple[Any, Signature]:
    """The component as the run uses it (a loss as an Algorithm), and its signature with all settings.

    Raises SignatureError, also for a default that does not fit its hint: the run's own config.toml would hold it.
    """
    if kind == "losses":
        with said_of(label):
            algorithm = as_algorithm(found)
        signature = Signature(check_signature(found, kind, label).requests, algorithm_settings(algorithm))
        check_defaults(found, signature, label)
        return algorithm, signature
    if kind == "datasets":
        from rollouts.data.source import loader_signature

        signature = loader_signature(found, label)
    else:
        signature = check_signature(found, kind, label)
    check_defaults(found, signature, label)
    if kind == "kl":
        taken = {setting.name for setting in KL_SETTINGS} & {setting.name for setting in signature.settings}
        if taken:
            raise SignatureError(
                f"{label}: its settings {', '.join(sorted(taken))} have the names of settings that every KL term has\n"
                "give them other names"
            )
        signature = signature._replace(settings=(*KL_SETTINGS, *signature.settings))
    return found, signature


def bind_each(functions: Iterable[Any], settings: Mapping[str, Any]) -> tuple[Any, ...]:
    """Each function with the settings that it has, bound."""
    return tuple(bind_own(function, "", settings) for function in functions)


def _own_part(
    key: str, component: Component, loss: Chosen, label: str, source: Source, path: Path
) -> tuple[Any, Signature]:
    """The algorithm's own part for a key, and its settings. Raises ConfigError if it has no such part and settings are
    given for it.
    """
    functions = _own_functions(loss.component, key)
    kind = COMPONENT_KINDS[key]
    if not functions:
        if component.settings:
            first, value = next(iter(component.settings.items()))
            raise ConfigError(
                f"{where((*path, first), value, source)}: the loss {loss.name} has no {KIND_WORDS[kind]} of its own, "
                f"and none is chosen that could have this setting\ntype: --{key} {_EXAMPLES[key]}; "
                f"`rollouts plugins list --kind {kind}` shows what is installed"
            )
        return (), Signature((), ())
    settings: dict[str, Setting] = {}
    for function in functions:
        for setting in signed(function, kind, label)[1].settings:
            settings.setdefault(setting.name, setting)
    if key == "kl":  # the numbers of a KL are in the algorithm, not in the function's signature
        for setting, own in zip(KL_SETTINGS, loss.component.kl[1:], strict=True):
            settings[setting.name] = setting._replace(default=own)
    return functions if key in MULTIPLE else functions[0], Signature((), tuple(settings.values()))


def _own_functions(algorithm: Algorithm, key: str) -> tuple[Any, ...]:
    """The algorithm's own part for a key: at most one function, or for `shaping` and `filter` any number."""
    if key == "aggregation":
        return (aggregation_function(algorithm.aggregation),)
    if key in ("shaping", "filter"):
        return algorithm.shaping if key == "shaping" else algorithm.filters
    if key == "correction":  # without its own, the default one, which applies if another engine samples
        return (algorithm.correction or truncated,)
    part = getattr(algorithm, key)
    return () if part is None else (part.function if isinstance(part, KL) else part,)


def with_data(resolved: Resolved, manager: PluginManager, workers: RemoteEnvironments | None = None) -> Resolved:
    """The configuration with `--data` as the setting `data` of each environment that has this setting: its name, or a
    table of its name and the settings that were given. Raises UserError.
    """
    chosen = resolved.components["data"]
    if not chosen:
        return resolved
    from rollouts.data.source import OF_SFT, RowSettings

    (component,), defaults = chosen, vars(RowSettings())
    found = _choose(manager, "data", component, None, resolved.source, ("data",))
    settings = {name: found.settings[name] for name in component.settings}
    of_sft = [name for name in OF_SFT if settings.pop(name, defaults[name]) != defaults[name]]
    if of_sft and resolved.settings.mode != "sft":
        raise ConfigError(
            f"--data.{of_sft[0].replace('_', '-')}: this setting is for conversations to learn from\n"
            "type: rollouts sft --data ..., or in mode sft+rl --sft.data ..."
        )
    data = {"name": component.name, **settings} if settings else component.name
    given = []
    for env in resolved.components["env"]:
        label = f"environment {env.name}"
        if workers is not None and workers.has(env):
            ref = None if workers.is_elsewhere(env) else manager.find("environments", env.name)
            takes = "data" in workers.load(env, ref).description.settings
        else:
            ref = manager.find("environments", env.name)
            known = check_signature(manager.load(ref), "environments", label).settings
            takes = any(setting.name == "data" for setting in known)
        given.append(env._replace(settings={"data": data} | env.settings) if takes else env)
    if resolved.settings.mode != "sft" and not any("data" in env.settings for env in given):
        names = " and ".join(env.name for env in given)
        raise ConfigError(
            f"--data {component.name}: the environment {names} has no setting `data`; `--env prompts` reads rows"
        )
    return resolved._replace(components=resolved.components | {"env": given})
