"""Read the inputs and the settings of a component from its signature.

The positional parameters of a component are its inputs: it receives those that it names, from the vocabulary of its
kind. Its keyword-only parameters are its settings. For an environment and for a class of tools, all parameters of the
constructor are settings.
If the default of a keyword-only parameter is a dataclass instance, each field of it is a setting.

`rollouts.config` converts the values of settings. `rollouts.env.schema` reads the parameters of tools.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any, NamedTuple, Optional

from rollouts.author_code import authors_code, place_of, place_of_parameter, shown, unwrapped
from rollouts.config.convert import convert_value, default_fault, default_text, describe_type, toml_value
from rollouts.config.files import NOWHERE, Source, refused, unknown_key
from rollouts.config.flags import flag_name
from rollouts.config.hints import hint_scopes, resolve_hint, setting_docs
from rollouts.config.settings import REQUIRED, Setting, is_secret, setting_infos, without_secrets
from rollouts.errors import (
    BrokenPluginError,
    ConfigError,
    RolloutsError,
    SignatureError,
    in_lines,
    named,
    suggestion,
    words_of,
)
from rollouts.plugins.index import a_kind
from rollouts.plugins.vocabulary import VOCABULARY, mixing_fault, quoted

SIGNED_KINDS = frozenset(VOCABULARY) | {"environments", "tools"}
"""The kinds for which `check_signature` has rules. For other kinds it refuses only an unreadable signature."""

_CLASS_KINDS = frozenset(
    {"environments", "tools", "inference", "training", "loggers", "optimizers", "sandboxes", "workers", "datasets"}
    | {"commands", "samplers"}
)
_CALLED_DIRECTLY = frozenset(VOCABULARY) - _CLASS_KINDS - {"rewards", "metrics"}  # the trainer never awaits
_NOTHING: Mapping[str, Any] = {}
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Signature(NamedTuple):
    """The inputs that a component names, in its own order, and its settings."""

    requests: tuple[str, ...]
    settings: tuple[Setting, ...]


def read_signature(component: Any, kind: str) -> Signature:
    """The inputs and settings of a component. The rules of its kind are not checked.

    `component` is a function, a `functools.partial`, a bound method, a callable object, a class (its constructor), or
    an object with `terms`, each with a `function`. For terms, the result is the union of their signatures, and each
    term with a name adds a setting `<name>_coef`. Each type hint is resolved by itself. A parameter without a usable
    hint has the type of its default.

    Raises SignatureError if the signature cannot be read.

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
    # all parameters of an environment, and of a class of tools, are settings
    has_inputs = kind != "environments" and not (kind == "tools" and inspect.isclass(component))
    requests = tuple(each.name for each in parameters if has_inputs and each.kind in _POSITIONAL)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    chosen = [each for each in parameters if each.name not in requests and each.kind not in variadic]
    docs = setting_docs(component) if chosen else {}
    records = _records(component, chosen) if has_inputs else {}
    settings: list[Setting] = []
    for parameter in chosen:
        if parameter.name in records:
            settings += _field_settings(records[parameter.name], docs)
        else:
            settings.append(_setting(parameter, component, docs, _default_of(parameter, component)))
    return Signature(requests, tuple(settings))


def check_signature(component: Any, kind: str, label: str) -> Signature:
    """The signature of a component, checked against the rules of its kind. `label` names the component in errors
    (`reward acme_rewards/brevity`).

    Raises SignatureError for: a name outside the vocabulary, inputs that cannot be named together, two settings or
    inputs with one name, `*args`, `**kwargs`, a positional parameter with a default, a class instead of a function, an
    async function that would not be awaited, an unreadable signature, and an object that cannot be called.
    """
    terms = _terms_of(component)
    if terms is not None:
        for term in terms:
            check_signature(term.function, kind, f"{label}, term {_label_of(term.function)}")
        return read_signature(component, kind)
    fault = next(filter(None, _faults(component, kind, label)), "")
    if not fault:
        signature = read_signature(component, kind)
        fault = mixing_fault(kind, signature.requests) or _clash(signature)
    if fault:
        raise SignatureError(f"{label}: {fault}")
    return signature


def _faults(component: Any, kind: str, label: str) -> Iterator[str]:
    """One message for each rule of the kind: why the component breaks it, or an empty text."""
    name = _label_of(component)
    if inspect.isclass(component) and kind not in _CLASS_KINDS:
        yield (
            f"{name} is a class, but {a_kind(kind)} must be a function\n"
            f"name a function, or an object with __call__ (such as `{name.lower()} = {name}()`)"
        )
    if kind in _CALLED_DIRECTLY and _is_async(component):
        yield f"{name} is async, but {a_kind(kind)} is called and never awaited\nwrite `def`, not `async def`"
    faults = [_parameter_fault(parameter, kind) for parameter in _parameters(component, label)]
    if any(faults) and kind == "optimizers" and inspect.isclass(component):
        short = name.lower()
        yield (
            f"the parameters of this class are not those of an optimizer: `params`, `lr`, and settings after a `*`"
            f"\ngive a function in its place: optimizer={short}\ndef {short}(params, lr, *, weight_decay=0.0):\n"
            f"    return {name}(params, lr=lr, weight_decay=weight_decay)"
        )
    yield from faults


def keywords_of(component: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as keyword arguments of the component. Settings that are fields of a dataclass are put into an
    instance of it. Raises ConfigError if the dataclass refuses them.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Retries:
    ...     count: int = 3
    ...     wait_seconds: float = 1.0
    >>> def judge(trajectory, *, strict: bool = True, retries: Retries = Retries()) -> float: ...
    >>> [setting.name for setting in read_signature(judge, "rewards").settings]
    ['strict', 'count', 'wait_seconds']
    >>> keywords_of(judge, {"count": 5, "strict": False})
    {'strict': False, 'retries': Retries(count=5, wait_seconds=1.0)}
    """
    keywords = dict(settings)
    for parameter, default in _inputs_of(component).records.items() if settings else ():
        own = {name: keywords.pop(name) for name in _fields(default) if name in keywords}
        if own:
            try:
                with authors_code():
                    keywords[parameter] = dataclasses.replace(default, **own)
            except RolloutsError:
                raise
            except Exception as error:  # the dataclass refuses the values
                given = ", ".join(f"{name} {shown(value)}" for name, value in without_secrets(own).items())
                raise ConfigError(f"{_label_of(component)} does not take {given}: {named(error)}") from error
    return keywords


def bind(component: Callable[..., Any], settings: Mapping[str, Any]) -> Callable[..., Any]:
    """The component with its settings bound, as a `functools.partial`."""
    return functools.partial(component, **keywords_of(component, settings)) if settings else component


def call_with(component: Any, available: Mapping[str, Any], settings: Mapping[str, Any] = _NOTHING) -> Any:
    """Call the component with the inputs that it names, taken from `available`, and with its settings.

    The signature of a function is read once, so this may be called for every sample. Do not use it for environments:
    all their parameters are settings (`Environment(**settings)`).

    Raises SignatureError if `available` lacks an input, and whatever the component raises, as an Exception
    (`rollouts.author_code`).

    >>> call_with(lambda rewards: max(rewards), {"rewards": [0.0, 1.0], "step": 3})
    1.0
    """
    requests = _inputs_of(component).requests
    try:
        arguments = [available[name] for name in requests]
    except KeyError as exc:
        missing = [name for name in requests if name not in available]
        if not missing:  # `available` computed a value, which raised a KeyError
            raise
        raise SignatureError(
            f"{_label_of(component)} names {', '.join(map(repr, missing))}, which this run does not have\n"
            f"this run has: {', '.join(sorted(available))}"
        ) from exc
    with authors_code():
        return component(*arguments, **(keywords_of(component, settings) if settings else _NOTHING))


class _Inputs(NamedTuple):
    """The names of a callable's positional parameters, and its parameters whose default is a dataclass instance."""

    requests: tuple[str, ...]
    records: dict[str, Any]


_CACHE: dict[tuple[int, str], tuple[weakref.ref[Any], _Inputs]] = {}


def _inputs_of(component: Any) -> _Inputs:
    """The inputs of a callable, cached by the identity of the function or class that defines them."""
    if isinstance(component, MethodType):
        anchor, how = component.__func__, "bound"
    elif isinstance(type(component).__call__, FunctionType) and not isinstance(component, type | functools.partial):
        anchor, how = type(component), "instance"
    else:
        anchor, how = component, "itself"
    key = (id(anchor), how)
    entry = _CACHE.get(key)
    if entry is not None and entry[0]() is anchor:
        return entry[1]
    parameters = _parameters(component, _label_of(component))
    requests = tuple(parameter.name for parameter in parameters if parameter.kind in _POSITIONAL)
    inputs = _Inputs(requests, _records(component, parameters))
    with contextlib.suppress(TypeError):  # without weak references, read it each time
        # The callback runs before the id can be given to another object, so an entry never outlives its anchor.
        _CACHE[key] = (weakref.ref(anchor, lambda _: _CACHE.pop(key, None)), inputs)
    return inputs


def _parameters(component: Any, label: str) -> list[inspect.Parameter]:
    if not callable(component):
        again = "name a function, a class or an object with __call__"
        raise SignatureError(f"{label}: an object of {type(component).__name__} cannot be called\n{again}")
    how: dict[str, Any] = {}
    if sys.version_info >= (3, 14):  # annotations are lazy there: a name under TYPE_CHECKING must not be evaluated
        import annotationlib

        how["annotation_format"] = annotationlib.Format.FORWARDREF
    try:
        return list(inspect.signature(component, **how).parameters.values())
    except (ValueError, TypeError) as exc:
        why = f"{_label_of(component)} has no readable signature ({exc})\nwrap it in a function that names its inputs"
        raise SignatureError(f"{label}: {why}") from exc


def _records(component: Any, parameters: Iterable[inspect.Parameter]) -> dict[str, Any]:
    """The keyword-only parameters whose default is a dataclass instance, with that instance."""
    return {
        each.name: default
        for each in parameters
        if each.kind is inspect.Parameter.KEYWORD_ONLY
        and dataclasses.is_dataclass(default := _default_of(each, component))
        and not inspect.isclass(default)
    }


def _fields(record: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(record) if field.init]


def _field_settings(record: Any, docs: Mapping[str, str]) -> Iterator[Setting]:
    """A setting for each field of a dataclass instance. The field's value is the default of the setting. Its
    description is that of the component, else that of the dataclass.
    """
    made = type(record)
    parameters = {each.name: each for each in _parameters(made, _label_of(made))}
    docs = {**setting_docs(made), **docs}
    for name in _fields(record):
        yield _setting(parameters[name], made, docs, getattr(record, name))


def _clash(signature: Signature) -> str:
    """The error if two settings or inputs have one name because of a dataclass; empty if not."""
    names = Counter((*signature.requests, *(setting.name for setting in signature.settings)))
    taken = quoted([name for name, count in names.items() if count > 1])
    clash = f"a field of a dataclass is a setting, and {taken} is already an input or a setting\nrename the field"
    return clash if taken else ""


def _default_of(parameter: inspect.Parameter, component: Any) -> Any:
    """The default of a parameter, or REQUIRED. A default factory of a dataclass field is called."""
    field = getattr(component, "__dataclass_fields__", {}).get(parameter.name) if inspect.isclass(component) else None
    if field is not None and callable(field.default_factory):
        return field.default_factory()
    return REQUIRED if parameter.default is inspect.Parameter.empty else parameter.default


def _setting(parameter: inspect.Parameter, component: Any, docs: Mapping[str, str], default: Any) -> Setting:
    name = parameter.name
    fallback = Any if default is REQUIRED or default is None else type(default)
    hint = resolve_hint(parameter.annotation, hint_scopes(component, name), fallback)
    if default is None and hint is not Any:
        hint = Optional[hint]  # noqa: UP045 - a hint may not support `|`
    return Setting(name, hint, default, docs.get(name, ""))


def _parameter_fault(parameter: inspect.Parameter, kind: str) -> str:
    """Why a parameter breaks the rules of its kind; empty if it does not."""
    name = parameter.name
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return f"it takes *{name}, which names no inputs\nname each input, then write `*`, then the settings"
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return f"it takes **{name}, which would accept a misspelled setting\nname each setting after a `*`"
    vocabulary = VOCABULARY.get(kind)
    if kind == "environments" and parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
        return f"{name!r} is positional-only, but settings are passed by name\nremove the `/`"
    if kind == "environments" or vocabulary is None:
        return ""
    if parameter.kind in _POSITIONAL:
        # Python callers of the factory may leave it out.
        is_absent = kind in ("training", "inference", "loggers") and parameter.default is None
        if parameter.default is not inspect.Parameter.empty and not is_absent:
            why = "is positional and has a default, but inputs have no default and settings are keyword-only"
            return f"{name!r} {why}\nfor a setting, write `*, {name}=...`; for an input, remove the default"
        if name not in vocabulary:
            return in_lines(
                f"it names {name!r}, but {a_kind(kind)} has no such input",
                suggestion(name, vocabulary),
                f"{a_kind(kind)} may name:",
                *(f"  {known}: {meaning}" for known, meaning in vocabulary.items()),
                f"for a setting, write it after a `*`: `*, {name}=...`",
            )
    elif name in vocabulary and parameter.default is inspect.Parameter.empty:
        return f"{name!r} is an input, but here it is keyword-only, like a setting\nput it before the `*`"
    return ""


def _terms_of(component: Any) -> list[Any] | None:
    """The terms of an `Algorithm`, else None. It is recognized by its attributes, since this package must not import
    it.
    """
    terms = getattr(component, "terms", None)
    if callable(component) or not isinstance(terms, Iterable):
        return None
    found = list(terms)
    return found if found and all(callable(getattr(term, "function", None)) for term in found) else None


def _union(terms: Iterable[Any], kind: str) -> Signature:
    """The inputs and settings of all terms, each name once."""
    requests: dict[str, None] = {}
    settings: dict[str, Setting] = {}
    for term in terms:
        part = read_signature(term.function, kind)
        requests |= dict.fromkeys(part.requests)
        for setting in part.settings:
            settings.setdefault(setting.name, setting)
        if name := getattr(term, "name", ""):
            about = f"the coefficient of the {name} term"
            settings.setdefault(f"{name}_coef", Setting(f"{name}_coef", float, term.coefficient, about))
    return Signature(tuple(requests), tuple(settings.values()))


def _is_async(component: Any) -> bool:
    """Whether a call returns a coroutine or an async generator."""
    inner = unwrapped(component)
    return any(
        inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
        for function in (inner, getattr(type(inner), "__call__", None))  # noqa: B004 - the function is wanted
    )


def _label_of(component: Any) -> str:
    inner = unwrapped(component)
    return str(getattr(inner, "__qualname__", None) or f"an object of {type(inner).__qualname__}")


def make(word: str, name: str, component: Any, available: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    """Call the factory of a component: a `word`, such as "sandbox", and its `name`. Raises BrokenPluginError, with the
    line, if an author's code raises an exception.
    """
    try:
        return call_with(component, available, settings)
    except RolloutsError:
        raise
    except Exception as error:
        if place_of(error) is None:  # a bug in rollouts
            raise
        raise BrokenPluginError(f"the {word} {name} cannot be made: {words_of(error)}") from error


# --- settings ---------------------------------------------------------------------------------------------------------


Path = tuple[str, ...]


def convert_settings(
    signature: Signature, given: Mapping[str, Any], label: str, source: Source = NOWHERE, path: Path = ()
) -> dict[str, Any]:
    """Convert the given settings of a component by its signature. Defaults are not added.

    `label` names the component in errors ("environment calculator"). `path` is the path of its settings: ("env",) or
    ("reward", alias). Raises ConfigError for an unknown setting, a wrong type, and a missing setting without default.
    """
    known = {setting.name: setting for setting in signature.settings}
    for key in (key for key in given if key not in known):
        from rollouts.config.foreign import misplaced_hint

        hint = misplaced_hint(key, [info.name for info in setting_infos()])
        listing = ", ".join(
            f"{name} ({describe_type(each.type)}; {default_text(each)})" for name, each in known.items()
        )
        problem = in_lines(f"{label} has no setting {key!r}", hint)
        raise unknown_key((*path, key), given[key], source, problem, known, f"its settings: {listing or 'none'}")
    missing = [name for name, setting in known.items() if setting.is_required and name not in given]
    if missing:
        needs = ", ".join(f"`{name}` ({describe_type(known[name].type)})" for name in missing)
        again = " ".join(f"{flag_name((*path, name))} VALUE" for name in missing)
        file = f", or write it under [{'.'.join(path)}] in the file" if path else ""
        raise ConfigError(f"{label} needs {needs}\ntype: {again}{file}")
    return {key: convert_value(value, known[key].type, (*path, key), source) for key, value in given.items()}


def complete_settings(signature: Signature, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with all defaults added, in the order of the signature, for the settings file of a run.

    Defaults that TOML cannot represent, and defaults of secrets, are not added. A setting without a value gets its
    default again.
    """
    complete: dict[str, Any] = {}
    for setting in signature.settings:
        if setting.name in settings:
            complete[setting.name] = settings[setting.name]
        elif not setting.is_required and not is_secret(setting.name):
            with contextlib.suppress(TypeError):
                toml_value(setting.default)
                complete[setting.name] = setting.default
    return complete


def converted(signature: Signature, given: Mapping[str, Any], label: str, source: Source, path: Path) -> dict[str, Any]:
    """All settings of a component, as Python values. Raises ConfigError, which says where a wrong one was given."""
    return complete_settings(signature, convert_settings(signature, given, label, source, path))


def check_defaults(found: Any, signature: Signature, label: str) -> None:
    """Raise SignatureError for a default that does not fit its hint: the run's own config.toml would hold it."""
    for setting in signature.settings:
        if fault := default_fault(setting):
            owner, place = getattr(unwrapped(found), "__qualname__", label), place_of_parameter(found, setting.name)
            again = "give it a default that fits its hint, or another hint"
            raise SignatureError(f"{owner}.{setting.name}: {fault}{f' ({place})' if place else ''}\n{again}")


def refuse_without_hint(
    found: Any, signature: Signature, given: Mapping[str, Any], label: str, source: Source, path: Path
) -> None:
    """Refuse a setting that a dataclass writes without a type hint: `mood = "kind"` is no field."""
    known = {setting.name for setting in signature.settings}
    for name in given if dataclasses.is_dataclass(found) else ():
        if name not in known and not callable(vars(found).get(name, callable)):
            why = f"in the dataclass, {name} has no type hint, so it is no setting\nwrite `{name}: TYPE = ...`"
            raise refused((*path, name), given[name], source, f"{label} has no setting {name!r}: {why}")
