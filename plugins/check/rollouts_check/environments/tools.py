"""Checks of tools: what the model is shown of them, and arguments that no author expects."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollouts.author_code import message_of, place_of_function, shown
from rollouts.env import calls
from rollouts.env.authoring import ToolMethod
from rollouts.env.results import ToolOutcome
from rollouts.env.schema import read_arguments, schema_of
from rollouts.env.tools import run_tool
from rollouts.errors import RolloutsError, counted
from rollouts.runs.rehearsal import example_of
from rollouts.types import Message, ToolCall
from rollouts_check.environments.agents import done, in_trio, progressed, ready, tools_for
from rollouts_check.environments.subject import Subject
from rollouts_check.environments.tokens import chat_formats
from rollouts_check.environments.traces import Leftovers, own_temporary_folder, writes_outside
from rollouts_check.report import FailedError, Passed, SkippedError

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # OpenAI's rule
TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
TOOL_SECONDS = 10.0  # a deadline for one call with strange arguments, if the tool's own is later
RESULT_MAX = 16_000
ACCIDENTS = (
    *("ArithmeticError", "AssertionError", "AttributeError", "BufferError", "EOFError", "ImportError", "IndexError"),
    *("KeyError", "LookupError", "MemoryError", "ModuleNotFoundError", "NameError", "NotImplementedError"),
    *("OverflowError", "RecursionError", "SyntaxError", "SystemError", "TypeError", "UnboundLocalError"),
    *("FloatingPointError", "ZeroDivisionError"),
)
"""Exceptions that a tool usually raises by accident. The contract allows them, so they are notes."""


class Strange(NamedTuple):
    """Arguments that no author expects, and what they are."""

    words: str
    arguments: dict[str, Any]


def tool_schemas(subject: Subject) -> str:
    """The schemas of the tools are valid for OpenAI's API, and chat formats can show them and read calls of them."""
    schemas = _schemas(subject)
    for tool, schema in schemas:
        fault = _fault_of_schema(schema["function"])
        if fault:
            place = place_of_function(tool.function)
            raise FailedError(f"read the schema of the tool {tool.name}", f"{fault} ({place})", "correct the signature")
    formats = chat_formats()
    for family, chat in formats.items():
        for tool, schema in schemas:
            prompt = chat.render([Message("user", "?")], [schema], True)
            if tool.name not in prompt:
                continue  # the template shows no tools
            arguments = example_arguments(schema)
            call = Message("assistant", "", [ToolCall(tool.name, arguments, "call00001")])
            text = chat.render([Message("user", "?"), call], [schema], False)
            read = chat.parse(chat.tokenizer.encode(text[len(prompt) :], add_special_tokens=False), [schema])
            wanted = [(tool.name, read_arguments(tool, arguments))]
            found = [(each.name, read_arguments(tool, each.arguments)) for each in read.tool_calls]
            if found != wanted and _loosely(found) != _loosely(wanted):  # after conversion: XML has text only
                seen = f"the call {tool.name}({shown(arguments)}) was read as {shown(read.tool_calls or read.text)}"
                change = "use simpler names and types for the arguments"
                raise FailedError(f"write a call in the format of {family} and read it back", seen, change)
    families = f"; formats of {', '.join(formats)}" if formats else "; chat formats need the extra [train]"
    return counted(len(schemas), "tool") + families


def tool_arguments(subject: Subject) -> Passed:
    """Strange arguments do no harm: no hang, no crash, no file outside, no process that is left."""
    schemas = _schemas(subject)
    count, notes = 0, dict[str, str]()
    with own_temporary_folder(subject.scratch / "arguments") as folder:
        for tool, schema in schemas:
            outside = subject.scratch / "outside"
            outside.mkdir(exist_ok=True)
            strange = list(strange_arguments(subject, tool, schema["function"], outside))
            count += len(strange)
            with writes_outside(folder) as written:
                left = in_trio(_call_each, subject, tool, strange, folder, notes)
            place = place_of_function(tool.function)
            if written:
                raise FailedError(
                    f"call the tool {tool.name}, also with paths outside of its folder",
                    f"it wrote {'; '.join(written[:3])}",
                    "write only into a folder that `setup` makes for the episode; refuse a path that leaves it with a "
                    "ValueError",
                )
            if lines := [line for line in left.found() if "file" not in line]:
                change = "end threads and processes in the tool, or in `close`"
                raise FailedError(f"call the tool {tool.name}", f"it left {'; '.join(lines)} ({place})", change)
    return Passed(f"{counted(len(schemas), 'tool')}, {counted(count, 'call')}", tuple(notes.values()))


def tool_results(subject: Subject) -> str:
    """Tools return text, or data that JSON can hold."""
    schemas = _schemas(subject)
    known = [call for each in subject.expert for reply in each.replies for call in reply.tool_calls]
    for tool, schema in schemas:
        if tool.isolate is not None:
            continue
        arguments = next((call.arguments for call in known if call.name == tool.name), example_arguments(schema))
        returned = in_trio(_raw_result, subject, tool, arguments)
        if isinstance(returned, str | None):
            continue
        try:
            msgspec.json.encode(returned)
        except (TypeError, ValueError, RecursionError):
            seen = f"it returned {shown(returned)} ({type(returned).__name__}) ({place_of_function(tool.function)})"
            change = "return text, or numbers, lists and dicts: the model reads the `str` of any other object"
            raise FailedError(f"call the tool {tool.name}", seen, change) from None
    return counted(len(schemas), "tool")


def strange_arguments(
    subject: Subject, tool: ToolMethod, function: Mapping[str, Any], outside: Path
) -> Iterator[Strange]:
    """Arguments for a tool: missing, extra, of wrong types, huge, nested, negative, and texts that look like paths and
    like code. `outside` is a folder that the tool must not write to.
    """
    schema = {"function": function}
    usual = example_arguments(schema)
    known = [call for each in subject.expert for reply in each.replies for call in reply.tool_calls]
    usual = next((dict(call.arguments) for call in known if call.name == tool.name), usual)
    yield Strange("no argument", {})
    yield Strange("an unknown argument", {**usual, "rollouts_unknown": 1})
    for name in function["parameters"]["properties"]:
        for words, value in _values(outside):
            yield Strange(f"{name}: {words}", {**usual, name: value})


def _values(outside: Path) -> Iterator[tuple[str, Any]]:
    file = outside / "written.txt"
    climb = os.path.join(*[".."] * 24)
    nested: Any = []
    for _ in range(60):
        nested = [nested]
    signs = "'\"\\`;|&<>()[]{}%$#*?"
    yield from {
        "none": None,
        "true": True,
        "a list": ["a", 1],
        "an empty list": [],
        "a table": {"a": {"b": [1]}},
        "nested": nested,
    }.items()
    yield from {"zero": 0, "a negative number": -1, "a large number": 10**30, "a low number": -(10**9)}.items()
    yield from {"a fraction": 0.5, "a large float": 1e308, "a number as text": "1", "a negative text": "-1"}.items()
    yield from {"empty text": "", "spaces": " \n\t", "long text": "x" * 100_000, "words": "a b c " * 500}.items()
    yield from {"unicode": "é \u202e \u0000 ﷽", "half a character": "\ud800", "signs": signs}.items()
    yield from {"a path outside": str(file), "a path upwards": climb + str(file), "a folder": str(outside)}.items()
    yield from {"a pattern": "(a+)+$", "a format": "%s%n {0.__class__}", "code": "1/0", "a name": "self"}.items()


async def _call_each(
    subject: Subject, tool: ToolMethod, strange: Sequence[Strange], folder: Path, notes: dict[str, str]
) -> Leftovers:
    """Call the tool of one environment with all arguments. Returns what there was before the calls, and adds a note for
    each kind of exception that is probably an accident. Raises FailedError for the first call that does harm.
    """
    run = await ready(subject)
    before = Leftovers(folder)
    own = next(each for each in run.own_tools if each.name == tool.name)
    try:
        for each in strange:
            call = ToolCall(tool.name, each.arguments, "call")
            try:
                outcome = await run_tool({own.name: own}, call, characters_max=RESULT_MAX, seconds_max=TOOL_SECONDS)
            except RolloutsError as error:
                tried = f"call the tool {tool.name} with {each.words}: {shown(each.arguments)}"
                raise FailedError(tried, message_of(error), "check the arguments first") from error
            progressed()
            _judge(own, each, outcome)
            name = outcome.text.removeprefix("Error: ").partition(":")[0].strip()
            if outcome.failure == "exception" and tool.isolate is None and name in ACCIDENTS:
                why = f"the tool {tool.name} raised {outcome.error or outcome.text} for {each.words}"
                advice = "to refuse a call, raise a ValueError that says what to write instead"
                notes.setdefault(f"{tool.name} {name}", f"{why}; {advice}")
        return before
    finally:
        await done(run)


def _judge(tool: ToolMethod, strange: Strange, outcome: ToolOutcome) -> None:
    place = place_of_function(tool.function)
    given = shown(strange.arguments)
    tried = f"call the tool {tool.name} with {strange.words}: {given}"
    if outcome.failure == "timeout" and tool.isolate is None:
        change = (
            'check the arguments first; or let the tool run in its own process, @tool(isolate="process"), or make it '
            "async, so that it can be stopped"
        )
        raise FailedError(tried, f"it had not ended at its deadline ({place})", change)
    if outcome.failure == "crashed" and tool.isolate is None:
        raise FailedError(tried, f"{outcome.text} ({place})", "check the arguments first")
    if not isinstance(outcome.text, str) or len(outcome.text) > RESULT_MAX + 100:
        raise FailedError(tried, f"the result has {len(outcome.text)} characters ({place})", "return a shorter text")


async def _raw_result(subject: Subject, tool: ToolMethod, arguments: dict[str, Any]) -> Any:
    run = await ready(subject)
    own = next(each for each in run.own_tools if each.name == tool.name)
    try:
        valid = read_arguments(own, arguments)
        if isinstance(valid, str):
            return ""
        try:
            return await calls.call(functools.partial(own.function, **valid), timeout_seconds=own.timeout_seconds)
        except (calls.CallTimeoutError, Exception):  # `tool_arguments` judges failures
            return ""
    finally:
        await done(run)


def example_arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that fit a tool's schema."""
    parameters = schema["function"]["parameters"]
    return {name: example_of(parameters["properties"][name]) for name in parameters["required"]}


def _schemas(subject: Subject) -> list[tuple[ToolMethod, dict[str, Any]]]:
    found = [(tool, schema_of(tool)) for tool in tools_for(subject)]
    if not found:
        raise SkippedError("the environment has no tools")
    return found


def _loosely(calls: Sequence[tuple[str, Any]]) -> list[Any]:
    """Calls in which each argument that is JSON as text is replaced by its value: a tool may take both."""

    def read(value: Any) -> Any:
        try:
            return msgspec.json.decode(value) if isinstance(value, str) else value
        except ValueError:
            return value

    return [
        (name, {key: read(each) for key, each in given.items()} if isinstance(given, dict) else given)
        for name, given in calls
    ]


def _fault_of_schema(function: Mapping[str, Any]) -> str:
    """What OpenAI's API would refuse; empty if it accepts the schema."""
    if not NAME.fullmatch(function["name"]):
        return f"the name {function['name']!r} may only have letters, digits, _ and -, and at most 64 of them"
    parameters = function["parameters"]
    for name in parameters["properties"]:
        if not NAME.fullmatch(name):
            return f"the argument {name!r} may only have letters, digits, _ and -, and at most 64 of them"
    for path, schema in _inside(parameters, "parameters"):
        kinds = schema.get("type", [])
        for kind in [kinds] if isinstance(kinds, str) else kinds:
            if kind not in TYPES:
                return f"{path} has the type {kind!r}, which JSON schema does not have"
        lacking = set(schema.get("required", ())) - set(schema.get("properties", schema.get("required", ())))
        if lacking:
            return f"{path} requires {sorted(lacking)}, which it does not describe"
    return ""


def _inside(schema: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(schema, Mapping):
        yield path, schema
        for name, inner in schema.get("properties", {}).items():
            yield from _inside(inner, f"{path}.{name}")
        for key in ("items", "additionalProperties"):
            yield from _inside(schema.get(key), f"{path}.{key}")
        for inner in [*schema.get("anyOf", ()), *schema.get("prefixItems", ())]:
            yield from _inside(inner, path)
