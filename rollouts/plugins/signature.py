"""What a component receives and what its settings are, both read from its signature.

A component receives what it names: each positional parameter is requested by name out of the vocabulary of its kind.
Its settings are its keyword-only parameters (for an environment: all that its constructor takes); no config class.
What is left out: converting a setting's value (`rollouts.config`) and what a tool's parameters mean to a model
(`rollouts.env.schema`).
"""

from __future__ import annotations

import enum
import functools
import inspect
import weakref
from collections.abc import Iterable, Mapping
from types import FunctionType, MethodType
from typing import Any, Final, NamedTuple

from rollouts.author_code import authors_code
from rollouts.errors import SignatureError, near_misses
from rollouts.plugins.hints import hint_scopes, resolve_hint, setting_docs
from rollouts.plugins.index import KIND_WORDS
from rollouts.plugins.vocabulary import VOCABULARY, mixing_fault

__all__ = [
    "REQUIRED",
    "SIGNED_KINDS",
    "VOCABULARY",
    "Required",
    "Setting",
    "Signature",
    "call_with",
    "check_signature",
    "read_signature",
]


class Required(enum.Enum):
    """The type of REQUIRED."""

    REQUIRED = "required"

    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Final = Required.REQUIRED
"""The `default` of a setting that has none."""

SIGNED_KINDS = frozenset(VOCABULARY) | {"environments"}
"""The kinds whose signatures `check_signature` has rules for; of the others it refuses only what cannot be read."""

_CLASS_KINDS = frozenset({"environments", "inference", "training", "loggers", "datasets", "tools", "commands"})
_CALLED_DIRECTLY = frozenset(  # the trainer awaits nothing
    {
        "advantages",
        "aggregations",
        "corrections",
        "curricula",
        "filters",
        "kl",
        "losses",
        "mixers",
        "pairings",
        "references",
        "selectors",
        "shapings",
    }
)
_NOTHING: Mapping[str, Any] = {}
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Setting(NamedTuple):
    """One setting of a component: its type (Any where nothing says), its default or REQUIRED, and a line about it."""

    name: str
    type: Any
    default: Any
    doc: str


class Signature(NamedTuple):
    """The names a component requests, in the order in which it takes them, and its settings."""

    requests: tuple[str, ...]
    settings: tuple[Setting, ...]


def read_signature(component: Any, kind: str) -> Signature:
    """What the component requests and its settings, without judging them.

    `component` is a function, a `functools.partial`, a bound method (without its self), a callable object, a class (its
    constructor), or a composition: an object with `terms`, each with a `function` (the union of them; a term that has
    a name has a setting `<name>_coef`). Of an environment all parameters are settings. Each type hint is resolved by
    itself; without a usable hint the type is the default's.
    Raises SignatureError where there is no signature to read.

    >>> def brevity(trajectory, *, target_tokens: int = 200) -> float: ...
    >>> read_signature(brevity, "rewards").requests
    ('trajectory',)
    >>> read_signature(brevity, "rewards").settings[0][:3]
    ('target_tokens', <class 'int'>, 200)
    """
    terms = _terms_of(component)
    if terms is not None:
        return _union(terms, kind)
    parameters = _parameters(component, _label_of(component))
    requests = tuple(parameter.name for parameter in parameters if _is_request(parameter, kind))
    chosen = [
        parameter
        for parameter in parameters
        if parameter.name not in requests
        and parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    docs = setting_docs(component) if chosen else {}
    return Signature(requests, tuple(_setting(parameter, component, docs) for parameter in chosen))


def check_signature(component: Any, kind: str, label: str) -> Signature:
    """The signature, where it follows the rules of its kind; `label` says whose it is (`reward acme_rewards/brevity`).

    Raises SignatureError, with a message for each: a name that is not in the vocabulary, names that do not go together,
    `*args`, `**kwargs`, a positional parameter with a default, a class where a function belongs, an async function
    where nobody awaits it, a callable without a readable signature, something that cannot be called.
    """
    terms = _terms_of(component)
    if terms is not None:
        for term in terms:
            check_signature(term.function, kind, f"{label}, term {_label_of(term.function)}")
        return read_signature(component, kind)
    if inspect.isclass(component) and kind not in _CLASS_KINDS:
        raise SignatureError(
            f"{label}: {component.__qualname__} is a class; {_a(kind)} is called for each of its inputs\n"
            f"name a function, or an object with __call__ (such as `{component.__qualname__.lower()} = "
            f"{component.__qualname__}()`)"
        )
    if kind in _CALLED_DIRECTLY and _is_async(component):
        raise SignatureError(
            f"{label}: {_label_of(component)} is async, but {_a(kind)} is called and never awaited (a coroutine would "
            f"be taken for its result)\nwrite it with `def`"
        )
    for parameter in _parameters(component, label):
        fault = _parameter_fault(parameter, kind)
        if fault:
            raise SignatureError(f"{label}: {fault}")
    signature = read_signature(component, kind)
    fault = mixing_fault(kind, signature.requests)
    if fault:
        raise SignatureError(f"{label}: {fault}")
    return signature


def call_with(component: Any, available: Mapping[str, Any], settings: Mapping[str, Any] = _NOTHING) -> Any:
    """Call the component with what it names out of `available` (by position) and its settings (by keyword).

    The requested names are read once a function, so this may be called for every sample. An environment is not called
    this way: all its parameters are settings (`Environment(**settings)`). Raises SignatureError where a name is not
    available.

    What the component raises comes out as an Exception, whatever it is (`rollouts.author_code`).

    >>> call_with(lambda rewards: max(rewards), {"rewards": [0.0, 1.0], "step": 3})
    1.0
    """
    requests = _requests(component)
    try:
        arguments = [available[name] for name in requests]
    except KeyError as exc:
        missing = [name for name in requests if name not in available]
        if not missing:  # a KeyError of something that `available` computes
            raise
        raise SignatureError(
            f"{_label_of(component)} asks for {', '.join(map(repr, missing))}, which this run cannot give\n"
            f"it can give: {', '.join(sorted(available))}"
        ) from exc
    with authors_code():
        return component(*arguments, **settings)


_CACHE: dict[tuple[int, str], tuple[weakref.ref[Any], tuple[str, ...]]] = {}


def _requests(component: Any) -> tuple[str, ...]:
    """The positional names of a callable, cached by identity of the function (or class) that defines them."""
    if isinstance(component, MethodType):
        anchor, how = component.__func__, "bound"
    elif isinstance(component, FunctionType | type | functools.partial):
        anchor, how = component, "itself"
    elif isinstance(type(component).__call__, FunctionType):
        anchor, how = type(component), "instance"
    else:
        anchor, how = component, "itself"
    key = (id(anchor), how)
    entry = _CACHE.get(key)
    if entry is not None and entry[0]() is anchor:
        return entry[1]
    parameters = _parameters(component, _label_of(component))
    requests = tuple(parameter.name for parameter in parameters if parameter.kind in _POSITIONAL)
    try:
        # The callback runs before the id can be given to another object, so an entry never outlives its anchor.
        _CACHE[key] = (weakref.ref(anchor, lambda _: _CACHE.pop(key, None)), requests)
    except TypeError:  # no weak reference to this one: read again each time, rather than keep it alive
        return requests
    return requests


def _parameters(component: Any, label: str) -> list[inspect.Parameter]:
    if not callable(component):
        raise SignatureError(
            f"{label}: {type(component).__name__} cannot be called\nname a function, a class or an object with __call__"
        )
    try:
        return list(_raw_signature(component).parameters.values())
    except (ValueError, TypeError) as exc:
        raise SignatureError(
            f"{label}: {_label_of(component)} has no readable signature ({exc})\n"
            f"wrap it in a function whose parameters are what it needs"
        ) from exc


def _raw_signature(component: Any) -> inspect.Signature:
    import sys

    if sys.version_info >= (3, 14):  # annotations are lazy there: a name under TYPE_CHECKING must not be evaluated
        import annotationlib

        return inspect.signature(component, annotation_format=annotationlib.Format.FORWARDREF)
    return inspect.signature(component)


def _is_request(parameter: inspect.Parameter, kind: str) -> bool:
    return kind != "environments" and parameter.kind in _POSITIONAL


def _setting(parameter: inspect.Parameter, component: Any, docs: Mapping[str, str]) -> Setting:
    name, default = parameter.name, parameter.default
    if default is inspect.Parameter.empty:
        default = REQUIRED
    field = getattr(component, "__dataclass_fields__", {}).get(name) if inspect.isclass(component) else None
    if field is not None and callable(field.default_factory):
        default = field.default_factory()
    fallback = Any if default is REQUIRED or default is None else type(default)
    hint = resolve_hint(parameter.annotation, hint_scopes(component, name), fallback)
    if default is None and hint is not Any:
        hint = hint | None if isinstance(hint, type) else _optional(hint)
    return Setting(name, hint, default, docs.get(name, ""))


def _optional(hint: Any) -> Any:
    from typing import Optional, get_args

    return hint if type(None) in get_args(hint) else Optional[hint]  # noqa: UP045 - a hint may not support `|`


def _parameter_fault(parameter: inspect.Parameter, kind: str) -> str:
    """Why a parameter breaks the rules of its kind; empty where it does not."""
    name = parameter.name
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return f"it takes *{name}, which does not say what it needs\nname each input, then `*`, then the settings"
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return f"it takes **{name}, so a misspelt setting could not be refused\nname each setting, after a `*`"
    vocabulary = VOCABULARY.get(kind)
    if kind == "environments":
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            return f"{name!r} is positional-only; settings are given by name: remove the `/`"
        return ""
    if vocabulary is None:
        return ""
    if parameter.kind in _POSITIONAL:
        if parameter.default is not inspect.Parameter.empty:
            return (
                f"{name!r} is positional and has a default, so it is neither an input nor a setting\n"
                f"settings are keyword-only: write `*, {name}=...`; inputs have no default"
            )
        if name not in vocabulary:
            return _unknown_name(name, kind, vocabulary)
    elif name in vocabulary and parameter.default is inspect.Parameter.empty:
        return f"{name!r} is keyword-only, so it reads as a setting\nto receive it as an input, put it before the `*`"
    return ""


def _unknown_name(name: str, kind: str, vocabulary: Mapping[str, str]) -> str:
    near = near_misses(name, vocabulary)
    lines = [f"it asks for {name!r}, which {_a(kind)} is not given"]
    if near:
        lines.append(f"did you mean: {', '.join(near)}?")
    lines.append(f"{_a(kind)} may name:")
    lines += [f"  {known}: {meaning}" for known, meaning in vocabulary.items()]
    lines.append(f"if it is a setting, make it keyword-only: `*, {name}=...`")
    return "\n".join(lines)


def _terms_of(component: Any) -> list[Any] | None:
    """The terms of a composition (an `Algorithm`), known by its shape: floor 0 must not import its class."""
    terms = getattr(component, "terms", None)
    if callable(component) or not isinstance(terms, Iterable):
        return None
    found = list(terms)
    return found if found and all(callable(getattr(term, "function", None)) for term in found) else None


def _union(terms: Iterable[Any], kind: str) -> Signature:
    """What the terms of a composition request and can be told, each name once."""
    requests: dict[str, None] = {}
    settings: dict[str, Setting] = {}
    for term in terms:
        part = read_signature(term.function, kind)
        requests |= dict.fromkeys(part.requests)
        for setting in part.settings:
            settings.setdefault(setting.name, setting)
        name = getattr(term, "name", "")
        if name:
            about = f"how much the {name} term counts"
            settings.setdefault(f"{name}_coef", Setting(f"{name}_coef", float, term.coefficient, about))
    return Signature(tuple(requests), tuple(settings.values()))


def _is_async(component: Any) -> bool:
    """Whether calling it gives a coroutine or an async generator: a function, or an object whose `__call__` does."""
    while isinstance(component, functools.partial):
        component = component.func
    return any(
        inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
        for function in (component, getattr(type(component), "__call__", None))  # noqa: B004 - the function is wanted
    )


def _label_of(component: Any) -> str:
    if isinstance(component, functools.partial):
        return _label_of(component.func)
    name = getattr(component, "__qualname__", None)
    return str(name) if name else f"an object of {type(component).__qualname__}"


def _a(kind: str) -> str:
    word = KIND_WORDS.get(kind, kind.removesuffix("s"))
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"
