"""A tool's JSON schema, read from its type hints and docstring, and the conversion of the model's arguments.

The types are those of msgspec: str, int, float, bool, None, Literal, enums, list, tuple, set, dict, TypedDict,
dataclasses, Struct, dates, unions of them, Any. A schema contains no references, so chat templates can print it
unchanged. Not here: calling the tool (`rollouts.env.tools`) and reading calls out of a reply (`rollouts.chat`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from rollouts.author_code import authors_code, message_of, printable, shown, with_place
from rollouts.chat.tool_call_formats import converted_argument, hint_of_schema
from rollouts.config.hints import argument_docs
from rollouts.encoding import plain_json
from rollouts.env.authoring import ToolMethod
from rollouts.errors import EnvironmentDefinitionError, near_misses

SECTION = re.compile(
    r"(?:Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?|Attributes|References|See Also):\s*$"
)


class _Parameter(NamedTuple):
    name: str
    hint: Any
    schema: dict[str, Any]
    required: bool


def tool_schema(fn: Callable[..., Any], name: str | None = None) -> dict[str, Any]:
    """The OpenAI function schema of a tool, without `self`. Each call returns a new dict.

    The description is the docstring above its first section. The descriptions of the parameters come from its `Args:`
    section (Google style). An `Optional` is written as its type with `"nullable": true`, as transformers does.
    Raises EnvironmentDefinitionError, which names tool and parameter, if a hint is missing, unreadable or has no
    schema, and for `*args`, `**kwargs` and positional-only parameters.

    >>> def add(a: int, b: int = 0) -> int:
    ...     "Add two numbers."
    >>> tool_schema(add)["function"]["parameters"]["required"]
    ['a']
    """
    if (remote := getattr(fn, "remote_schema", None)) is not None:  # its code runs in another process
        copied: dict[str, Any] = copy.deepcopy(remote)
        return copied
    label = name or str(getattr(fn, "__name__", type(fn).__name__))
    parameters = _parameters_of(fn, label)
    return {
        "type": "function",
        "function": {
            "name": label,
            "description": _description(inspect.getdoc(fn) or ""),
            "parameters": {
                "type": "object",
                "properties": msgspec.to_builtins({p.name: p.schema for p in parameters}),  # a copy
                "required": [p.name for p in parameters if p.required],
            },
        },
    }


def validate_arguments(
    fn: Callable[..., Any], arguments: Mapping[str, Any], name: str | None = None
) -> dict[str, Any] | str:
    """The arguments converted to the tool's types, ready for `fn(**arguments)`. If the arguments do not fit the types:
    the reason, as text for the model.

    Numbers, booleans, lists and objects may be written as text. A float without a fraction may be an int.

    >>> def add(a: int, b: int = 0) -> int: ...
    >>> validate_arguments(add, {"a": "3"})
    {'a': 3}
    >>> validate_arguments(add, {"a": "x"})
    "argument 'a' of add must be integer: Expected `int`, got `str`"
    """
    label = name or str(getattr(fn, "__name__", type(fn).__name__))
    return _validated({p.name: p for p in _parameters_of(fn, label)}, arguments, label)


def schema_of(tool: ToolMethod) -> dict[str, Any]:
    """The OpenAI function schema of a tool: its own, or else read from its function. Each call returns a new dict."""
    if tool.parameters is None:
        return tool_schema(tool.function, tool.name)
    about = {"name": tool.name, "description": printable(tool.description), "parameters": tool.parameters}
    return {"type": "function", "function": msgspec.to_builtins(about)}  # a copy


def check_tool(tool: ToolMethod) -> None:
    """Raise EnvironmentDefinitionError, with the line of the function, if the tool has no schema."""
    try:
        schema_of(tool)
    except EnvironmentDefinitionError as error:
        raise EnvironmentDefinitionError(with_place(error, tool.function)) from error


def read_arguments(tool: ToolMethod, arguments: Mapping[str, Any]) -> dict[str, Any] | str:
    """The model's arguments, ready for `tool.function(**arguments)`, or the reason why they do not fit; see
    `validate_arguments`. Of a tool's own schema, unknown and missing arguments and simple types are checked.
    """
    if tool.parameters is None:
        return validate_arguments(tool.function, arguments, tool.name)
    known = _parameters_of_schema(msgspec.json.encode(tool.parameters))
    takes_more = tool.parameters.get("additionalProperties") or tool.parameters.get("patternProperties")
    others = {key: each for key, each in arguments.items() if key not in known} if takes_more else {}
    found = _validated(known, {key: each for key, each in arguments.items() if key not in others}, tool.name)
    return found if isinstance(found, str) else {**found, **others}


def _validated(parameters: Mapping[str, _Parameter], arguments: Mapping[str, Any], label: str) -> dict[str, Any] | str:
    for given in arguments:
        if given not in parameters:
            near = near_misses(given, parameters)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            return f"{label} has no argument {shown(given)}{hint} Its arguments are: {_usage(parameters)}"
    missing = [p for p in parameters.values() if p.required and p.name not in arguments]
    if missing:
        listed = ", ".join(f"{p.name!r} ({_type_words(p.schema)})" for p in missing)
        return f"{label} needs the argument{'s' if len(missing) > 1 else ''} {listed}"
    converted: dict[str, Any] = {}
    for given, value in arguments.items():
        parameter = parameters[given]
        try:
            with authors_code():
                converted[given] = converted_argument(value, parameter.hint)
        except Exception as error:  # ValidationError, or an error of a dataclass's __post_init__
            return f"argument {given!r} of {label} must be {_type_words(parameter.schema)}: {message_of(error)}"
    return converted


# --- reading a function ---------------------------------------------------------------------------------------------


def _parameters_of(fn: Callable[..., Any], label: str) -> tuple[_Parameter, ...]:
    plain = getattr(fn, "__func__", fn)
    owner = getattr(fn, "__self__", None)
    namespace: Any = owner if owner is None or inspect.isclass(owner) else type(owner)
    return _read_parameters(plain, namespace, plain is not fn, label)


@functools.lru_cache(maxsize=1024)
def _read_parameters(plain: Callable[..., Any], owner: Any, bound: bool, label: str) -> tuple[_Parameter, ...]:
    parameters = list(inspect.signature(plain).parameters.values())
    if parameters and (bound or parameters[0].name == "self"):
        parameters = parameters[1:]
    described = argument_docs(inspect.getdoc(plain))
    return tuple(_read_parameter(plain, owner, p, label, described.get(p.name, "")) for p in parameters)


def _read_parameter(
    plain: Callable[..., Any], owner: type[Any] | None, parameter: inspect.Parameter, label: str, description: str
) -> _Parameter:
    where = f"tool {label!r}, parameter {parameter.name!r}"
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        kind = parameter.kind.description
        raise _refused(where, f" is {kind}, and a model passes arguments by name; write one such as `expression: str`")
    if parameter.annotation is parameter.empty:
        raise _refused(where, f" has no type hint; write one, such as `{parameter.name}: str`")
    hint = _resolve(parameter.annotation, plain, owner, where)
    try:
        (schema,), components = msgspec.json.schema_components([hint], ref_template="{name}")
    except TypeError as error:
        shown = hint.__name__ if isinstance(hint, type) else repr(hint)
        reason = str(error).strip().splitlines()[-1].replace(repr(hint), shown)
        use = "str, int, float, bool, Literal, an enum, list, dict or a dataclass"
        raise _refused(where, f": the type {shown} cannot be described to a model ({reason}); use {use}") from error
    schema = plain_json(_inline(schema, components, ()))
    if description:
        schema["description"] = printable(description)
    if parameter.default is not parameter.empty and parameter.default is not None:
        schema.pop("default", None)  # the default of the hint, which may differ from the tool's
        with (
            contextlib.suppress(Exception),
            authors_code(),
        ):  # a default that JSON cannot represent is not shown to the model
            schema["default"] = plain_json(msgspec.to_builtins(parameter.default))
    return _Parameter(parameter.name, hint, schema, parameter.default is parameter.empty)


def _resolve(annotation: Any, plain: Callable[..., Any], owner: type[Any] | None, where: str) -> Any:
    """A hint, evaluated separately, so that an unreadable hint does not affect the others."""
    if not isinstance(annotation, str):
        return annotation
    namespace = getattr(inspect.unwrap(plain), "__globals__", {})
    try:
        return eval(annotation, dict(namespace), dict(vars(owner)) if owner else None)
    except Exception as error:  # a hint is an expression, which may raise anything
        why = f": its type hint {annotation!r} cannot be read ({type(error).__name__}: {error})"
        raise _refused(where, f"{why}; import the type at the top of the module, not under TYPE_CHECKING") from error


def _refused(where: str, why: str) -> EnvironmentDefinitionError:
    return EnvironmentDefinitionError(f"{where}{why}")


# --- a tool's own schema ---------------------------------------------------------------------------------------------


def plain_parameters(parameters: Any, label: str) -> dict[str, Any]:
    """A copy of a JSON schema of a tool's arguments, with the keys that every schema here has: `type`, `properties` and
    `required`. Raises EnvironmentDefinitionError, which begins with `label`, if it is no JSON schema of an object.
    """
    example = '{"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}'
    try:
        schema = msgspec.json.decode(msgspec.json.encode(dict(parameters)))
    except (TypeError, ValueError, RecursionError) as error:
        given = f"its parameters are {shown(parameters)}, which is no JSON schema ({message_of(error)})"
        raise _refused(label, f": {given}; write one such as {example}") from error
    schema = {"type": "object", "properties": {}, "required": [], **schema}
    properties, required = schema["properties"], schema["required"]
    if schema["type"] != "object":
        raise _refused(label, f": its parameters have the type {shown(schema['type'])}, expected 'object'")
    if not isinstance(properties, dict) or not all(isinstance(each, dict | bool) for each in properties.values()):
        raise _refused(label, f": `properties` is {shown(properties)}; write parameters such as {example}")
    schema["properties"] = {name: each if isinstance(each, dict) else {} for name, each in properties.items()}
    unknown = required if not isinstance(required, list) else [name for name in required if name not in properties]
    if unknown:
        raise _refused(label, f": `required` has {shown(unknown)}, expected a list of names of `properties`")
    plain: dict[str, Any] = plain_json(schema)
    return plain


@functools.lru_cache(maxsize=1024)
def _parameters_of_schema(encoded: bytes) -> dict[str, _Parameter]:
    """The parameters of an encoded `plain_parameters`, by name."""
    schema = msgspec.json.decode(encoded)
    return {
        name: _Parameter(name, hint_of_schema(each), each, name in schema["required"])
        for name, each in schema["properties"].items()
    }


# --- schemas --------------------------------------------------------------------------------------------------------


def _inline(schema: Mapping[str, Any], components: Mapping[str, Any], seen: tuple[str, ...]) -> dict[str, Any]:
    """The schema without references, titles and null alternatives. A type that contains itself becomes an object."""
    if "$ref" in schema:
        name = schema["$ref"]
        if name in seen:
            return {"type": "object"}
        extra = {key: value for key, value in schema.items() if key != "$ref"}
        return {**_inline(components[name], components, (*seen, name)), **extra}
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            result[key] = {name: _inline(inner, components, seen) for name, inner in value.items()}
        elif key == "anyOf":
            result.update(_inline_union(value, components, seen))
        elif isinstance(value, Mapping) and key in ("items", "additionalProperties"):
            result[key] = _inline(value, components, seen)
        elif key == "prefixItems":
            result[key] = [_inline(inner, components, seen) for inner in value]
        elif key != "title":
            result[key] = value
    if "enum" in result and all(isinstance(choice, str) for choice in result["enum"]):
        result = {"type": "string", **result}
    return result


def _inline_union(
    alternatives: list[Mapping[str, Any]], components: Mapping[str, Any], seen: tuple[str, ...]
) -> dict[str, Any]:
    kinds = [_inline(inner, components, seen) for inner in alternatives if inner != {"type": "null"}]
    union = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    return union if len(kinds) == len(alternatives) else {**union, "nullable": True}


def _type_words(schema: Mapping[str, Any]) -> str:
    """Describe the type of a schema, for an error that the model reads."""
    if "enum" in schema:
        words = "one of " + ", ".join(str(choice) for choice in schema["enum"])
    elif "anyOf" in schema:
        words = " or ".join(_type_words(inner) for inner in schema["anyOf"])
    elif schema.get("type") == "array" and isinstance(schema.get("items"), Mapping):
        words = f"array of {_type_words(schema['items'])}"
    elif isinstance(schema.get("type"), list):
        words = " or ".join(map(str, schema["type"]))
    else:
        words = str(schema.get("type", "any JSON value"))
    return words + (" or null" if schema.get("nullable") else "")


def _usage(parameters: Mapping[str, _Parameter]) -> str:
    listed = (f"{p.name} ({_type_words(p.schema)}{'' if p.required else ', optional'})" for p in parameters.values())
    return ", ".join(listed) or "none"


# --- docstrings -----------------------------------------------------------------------------------------------------


def _description(doc: str) -> str:
    """The docstring above its first section. Lines are joined, paragraphs are kept."""
    lines = itertools.takewhile(lambda line: not SECTION.fullmatch(line), printable(doc).splitlines())
    paragraphs = "\n".join(lines).strip().split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs).strip()


def tool_label(schema: Mapping[str, Any]) -> str:
    """A tool and its parameters as text: their types, or the values that they may have; optional ones in brackets.

    >>> properties = {"thing": {"enum": ["tea", "cake"], "type": "string"}, "count": {"type": "integer"}}
    >>> parameters = {"properties": properties, "required": ["thing"]}
    >>> tool_label({"function": {"name": "price", "parameters": parameters}})
    'price(thing: tea|cake, [count: integer])'
    """
    function = schema["function"]
    parameters = function.get("parameters", {})
    required = parameters.get("required", ())
    words = []
    for name, each in parameters.get("properties", {}).items():
        word = f"{name}: {'|'.join(map(str, each['enum'])) if each.get('enum') else each.get('type', 'any')}"
        words.append(word if name in required else f"[{word}]")
    return f"{function['name']}({', '.join(words)})"
