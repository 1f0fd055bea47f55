"""Checks of tools: what the model is shown of them, arguments that no author expects, and exact token masks.

The tokenizer is that of the model `tiny`, with the control tokens of each family. This needs the extra `[train]`.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rollouts.author_code import shown
from rollouts.env import calls
from rollouts.env.authoring import ToolMethod
from rollouts.env.schema import read_arguments, schema_of
from rollouts.env.tools import run_tool
from rollouts.errors import counted
from rollouts.runs.rehearsal import ScriptedEngine, example_of
from rollouts.types import Message, ToolCall
from rollouts_check.environments.agents import in_trio, play_each, progressed, ready, says, script_for, tools_for
from rollouts_check.environments.subject import Subject
from rollouts_check.environments.traces import Leftovers, own_temporary_folder, writes_outside
from rollouts_check.report import Attempt, Passed, SkippedError, UntestedError, trying

if TYPE_CHECKING:
    from rollouts.chat.format import ChatFormat

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


def tool_schemas(subject: Subject) -> str:
    """The schemas of the tools are valid for OpenAI's API, and chat formats can show them and read calls of them.

    Advice: correct the signature
    """
    schemas = _schemas(subject)
    for tool, schema in schemas:
        fault = _fault_of_schema(schema["function"])
        Attempt(f"read the schema of {tool.name}", tool.function).require(not fault, fault)
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
            is_same = found == wanted or _loosely(found) == _loosely(wanted)  # after conversion: XML has text only
            tried, change = f"write a call in the format of {family}", "use simpler names and types for the arguments"
            seen = f"the call {tool.name}({shown(arguments)}) was read as {shown(read.tool_calls or read.text)}"
            Attempt(tried, change=change).require(is_same, seen)
    families = f"; formats of {', '.join(formats)}" if formats else "; chat formats need the extra [train]"
    return counted(len(schemas), "tool") + families


def tool_arguments(subject: Subject) -> Passed:
    """Strange arguments do no harm: no hang, no crash, no file outside, no process that is left.

    Advice: write only into a folder that `setup` makes, and refuse a path that leaves it (ValueError)
    """
    schemas = _schemas(subject)
    count, notes = 0, dict[str, str]()
    with own_temporary_folder(subject.scratch / "arguments") as folder:
        for tool, _ in schemas:
            outside = subject.scratch / "outside"
            outside.mkdir(exist_ok=True)
            strange = list(strange_arguments(subject, tool, outside))
            count += len(strange)
            with writes_outside(folder) as written:
                left = in_trio(_call_each, subject, tool, strange, folder, notes)
            tried = f"call the tool {tool.name}, also with paths outside of its folder"
            Attempt(tried).require(not written, f"it wrote {'; '.join(written[:3])}")
            change = "end threads and processes in the tool, or in `close`"
            left.require_none(Attempt(f"call the tool {tool.name}", tool.function, change=change), without="file")
    return Passed(f"{counted(len(schemas), 'tool')}, {counted(count, 'call')}", tuple(notes.values()))


def tool_results(subject: Subject) -> str:
    """Tools return text, or data that JSON can hold.

    Advice: return text, or numbers, lists and dicts: the model reads the `str` of any other object
    """
    schemas = _schemas(subject)
    known = [call for each in subject.expert for reply in each.replies for call in reply.tool_calls]
    for tool, schema in schemas:
        if tool.isolate is not None:
            continue
        arguments = next((call.arguments for call in known if call.name == tool.name), example_arguments(schema))
        returned = in_trio(_raw_result, subject, tool, arguments)
        try:
            msgspec.json.encode(None if isinstance(returned, str) else returned)
        except (TypeError, ValueError, RecursionError):
            attempt = Attempt(f"call the tool {tool.name}", tool.function)
            raise attempt.failed(f"it returned {shown(returned)} ({type(returned).__name__})") from None
    return counted(len(schemas), "tool")


def strange_arguments(subject: Subject, tool: ToolMethod, outside: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Arguments for a tool, each with words: missing, extra, of wrong types, huge, nested, negative, and texts that
    look like paths and like code. `outside` is a folder that the tool must not write to.
    """
    schema = schema_of(tool)
    known = [call for each in subject.expert for reply in each.replies for call in reply.tool_calls]
    usual = next((dict(call.arguments) for call in known if call.name == tool.name), example_arguments(schema))
    yield "no argument", {}
    yield "an unknown argument", {**usual, "rollouts_unknown": 1}
    for name in schema["function"]["parameters"]["properties"]:
        for words, value in _values(outside).items():
            yield f"{name}: {words}", {**usual, name: value}


def _values(outside: Path) -> dict[str, Any]:
    file = str(outside / "written.txt")
    nested: Any = []
    for _ in range(60):
        nested = [nested]
    return (
        {"none": None, "true": True, "a list": ["a", 1], "an empty list": [], "a table": {"a": {"b": [1]}}}
        | {"nested": nested, "zero": 0, "a negative number": -1, "a large number": 10**30, "a low number": -(10**9)}
        | {"a fraction": 0.5, "a large float": 1e308, "a number as text": "1", "a negative text": "-1"}
        | {"empty text": "", "spaces": " \n\t", "long text": "x" * 100_000, "words": "a b c " * 500}
        | {"unicode": "é \u202e \u0000 ﷽", "half a character": "\ud800", "signs": "'\"\\`;|&<>()[]{}%$#*?"}
        | {"a path outside": file, "a path upwards": os.path.join(*[".."] * 24) + file, "a folder": str(outside)}
        | {"a pattern": "(a+)+$", "a format": "%s%n {0.__class__}", "code": "1/0", "a name": "self"}
    )


async def _call_each(
    subject: Subject, tool: ToolMethod, strange: Sequence[tuple[str, Any]], folder: Path, notes: dict[str, str]
) -> Leftovers:
    """Call the tool of one environment with all arguments. Returns what there was before the calls, and adds a note for
    each kind of exception that is probably an accident. Raises FailedError for the first call that does harm.
    """
    async with ready(subject) as run:
        before = Leftovers(folder)
        own = next(each for each in run.own_tools if each.name == tool.name)
        for words, arguments in strange:
            call = ToolCall(tool.name, arguments, "call")
            tried, change = f"call the tool {tool.name} with {words}: {shown(arguments)}", "check the arguments first"
            with trying(tried, own.function, change=change) as attempt:
                outcome = await run_tool({own.name: own}, call, characters_max=RESULT_MAX, seconds_max=TOOL_SECONDS)
            progressed()
            if tool.isolate is None:
                change = (
                    'check the arguments first; or use @tool(isolate="process"), or async, so that it can be stopped'
                )
                attempt.require(outcome.failure != "timeout", "it had not ended at its deadline", change)
                attempt.require(outcome.failure != "crashed", outcome.text)
            size = len(outcome.text)
            attempt.require(size <= RESULT_MAX + 100, f"the result has {size} characters", "return a shorter text")
            name = outcome.text.removeprefix("Error: ").partition(":")[0].strip()
            if outcome.failure == "exception" and tool.isolate is None and name in ACCIDENTS:
                why = f"the tool {tool.name} raised {outcome.error or outcome.text} for {words}"
                advice = "to refuse a call, raise a ValueError that says what to write instead"
                notes.setdefault(f"{tool.name} {name}", f"{why}; {advice}")
        return before


async def _raw_result(subject: Subject, tool: ToolMethod, arguments: dict[str, Any]) -> Any:
    async with ready(subject) as run:
        own = next(each for each in run.own_tools if each.name == tool.name)
        valid = read_arguments(own, arguments)
        if isinstance(valid, str):
            return ""
        try:
            return await calls.call(functools.partial(own.function, **valid), timeout_seconds=own.timeout_seconds)
        except (calls.CallTimeoutError, Exception):  # `tool_arguments` judges failures
            return ""


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
    parameters = function["parameters"]
    names = [function["name"], *parameters["properties"]]
    if wrong := next((name for name in names if not NAME.fullmatch(name)), None):
        return f"the name {wrong!r} may only have letters, digits, _ and -, and at most 64 of them"
    for path, schema in _inside(parameters, "parameters"):
        kinds, required = schema.get("type", []), schema.get("required", ())
        if wrong := sorted({kinds} - TYPES if isinstance(kinds, str) else set(kinds) - TYPES):
            return f"{path} has the type {wrong[0]!r}, which JSON schema does not have"
        if lacking := set(required) - set(schema.get("properties", required)):
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


# --- token masks ------------------------------------------------------------------------------------------------------


TEMPLATES = Path(__file__).parents[1] / "templates"
CONTROL_TOKENS: Mapping[str, tuple[str, ...]] = {
    "llama3": ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>"),
    "mistral": tuple(
        "</s> <s> [INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] "
        "[SYSTEM_PROMPT] [/SYSTEM_PROMPT]".split()
    ),
    "qwen_coder": (),
}
"""The templates besides that of `tiny`, which has the form of Qwen. The first token ends a turn."""


def masks(subject: Subject) -> str:
    """The trained tokens are exactly the model's, under four chat templates.

    Advice: in `rollout`, pass the messages of earlier turns on unchanged
    """
    from rollouts.inference.base import GenerateRequest, Generation

    formats = chat_formats()
    if not formats:
        raise UntestedError("tokens need transformers", "type: pip install 'rollouts-rl[train]'")
    task = subject.tasks[0]
    script, schemas = script_for(subject, task), [schema_of(tool) for tool in tools_for(subject)]
    sampled: list[int] = []

    class Engine(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> Generation:
            generation = await super().generate(request)
            sampled.extend(generation.tokens)
            return generation

    for family, chat in formats.items():
        sampled.clear()
        engine, options = Engine(script, schemas, chat), {"turns": len(script), "rewards": (), "chat": chat}
        (played,) = play_each(subject, [task], [says("")], engine=engine, **options)
        attempt, status = Attempt(f"play an episode with the chat template of {family}"), played.episode.status
        change = "use the roles system (first), user, assistant and tool, and text in each message"
        attempt.require(not status.is_infrastructure, f"it ended as {status.value}: {played.trajectory.error}", change)
        live: list[int] = []
        for segment in (segment for each in played.episode.trajectories for segment in each.segments):
            segment.check()
            live += [token for token, mask in zip(segment.tokens, segment.loss_mask, strict=True) if mask > 0]
        wrote, trained = (shown(chat.tokenizer.decode(ids)) for ids in (sampled, live))
        attempt.require(live == sampled, f"the model wrote {wrote}, and the trained tokens are {trained}")
    return ", ".join(formats)


@functools.cache
def chat_formats() -> dict[str, ChatFormat]:
    """The chat formats by family; empty without transformers."""
    if find_spec("transformers") is None or find_spec("jinja2") is None:
        return {}
    from rollouts.chat.format import load_chat_format
    from rollouts.models.loading import load_tokenizer

    found = {"qwen": load_chat_format(load_tokenizer("tiny"))}
    for family, tokens in CONTROL_TOKENS.items():
        tokenizer = load_tokenizer("tiny")
        if tokens:
            tokenizer.add_special_tokens({"additional_special_tokens": list(tokens), "eos_token": tokens[0]})
        tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
        found[family] = load_chat_format(tokenizer)
    return found
