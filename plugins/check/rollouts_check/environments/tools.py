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

from rollouts.author_code import message_of, shown
from rollouts.env import calls
from rollouts.env.authoring import ToolMethod
from rollouts.env.results import ToolOutcome
from rollouts.env.schema import read_arguments, schema_of
from rollouts.env.tools import run_tool
from rollouts.errors import RolloutsError, counted
from rollouts.runs.rehearsal import ScriptedEngine, example_of
from rollouts.types import Message, ToolCall
from rollouts_check.environments.agents import in_trio, play_each, progressed, ready, says, script_for, tools_for
from rollouts_check.environments.subject import Subject
from rollouts_check.environments.traces import Leftovers, own_temporary_folder, writes_outside
from rollouts_check.report import FailedError, Passed, SkippedError, UntestedError, at

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
    """The schemas of the tools are valid for OpenAI's API, and chat formats can show them and read calls of them."""
    schemas = _schemas(subject)
    for tool, schema in schemas:
        if fault := _fault_of_schema(schema["function"]):
            raise FailedError(f"read the schema of {tool.name}", f"{fault}{at(tool.function)}", "correct the signature")
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
        for tool, _ in schemas:
            outside = subject.scratch / "outside"
            outside.mkdir(exist_ok=True)
            strange = list(strange_arguments(subject, tool, outside))
            count += len(strange)
            with writes_outside(folder) as written:
                left = in_trio(_call_each, subject, tool, strange, folder, notes)
            if written:
                tried = f"call the tool {tool.name}, also with paths outside of its folder"
                change = "write only into a folder that `setup` makes, and refuse a path that leaves it (ValueError)"
                raise FailedError(tried, f"it wrote {'; '.join(written[:3])}", change)
            if lines := [line for line in left.found() if "file" not in line]:
                change = "end threads and processes in the tool, or in `close`"
                seen = f"it left {'; '.join(lines)}{at(tool.function)}"
                raise FailedError(f"call the tool {tool.name}", seen, change)
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
            seen = f"it returned {shown(returned)} ({type(returned).__name__}){at(tool.function)}"
            change = "return text, or numbers, lists and dicts: the model reads the `str` of any other object"
            raise FailedError(f"call the tool {tool.name}", seen, change) from None
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
    subject: Subject,
    tool: ToolMethod,
    strange: Sequence[tuple[str, dict[str, Any]]],
    folder: Path,
    notes: dict[str, str],
) -> Leftovers:
    """Call the tool of one environment with all arguments. Returns what there was before the calls, and adds a note for
    each kind of exception that is probably an accident. Raises FailedError for the first call that does harm.
    """
    async with ready(subject) as run:
        before = Leftovers(folder)
        own = next(each for each in run.own_tools if each.name == tool.name)
        for words, arguments in strange:
            call = ToolCall(tool.name, arguments, "call")
            try:
                outcome = await run_tool({own.name: own}, call, characters_max=RESULT_MAX, seconds_max=TOOL_SECONDS)
            except RolloutsError as error:
                tried = f"call the tool {tool.name} with {words}: {shown(arguments)}"
                raise FailedError(tried, message_of(error), "check the arguments first") from error
            progressed()
            _judge(own, f"call the tool {tool.name} with {words}: {shown(arguments)}", outcome)
            name = outcome.text.removeprefix("Error: ").partition(":")[0].strip()
            if outcome.failure == "exception" and tool.isolate is None and name in ACCIDENTS:
                why = f"the tool {tool.name} raised {outcome.error or outcome.text} for {words}"
                advice = "to refuse a call, raise a ValueError that says what to write instead"
                notes.setdefault(f"{tool.name} {name}", f"{why}; {advice}")
        return before


def _judge(tool: ToolMethod, tried: str, outcome: ToolOutcome) -> None:
    place = at(tool.function)
    if outcome.failure == "timeout" and tool.isolate is None:
        change = 'check the arguments first; or use @tool(isolate="process"), or async, so that it can be stopped'
        raise FailedError(tried, f"it had not ended at its deadline{place}", change)
    if outcome.failure == "crashed" and tool.isolate is None:
        raise FailedError(tried, f"{outcome.text}{place}", "check the arguments first")
    if not isinstance(outcome.text, str) or len(outcome.text) > RESULT_MAX + 100:
        raise FailedError(tried, f"the result has {len(outcome.text)} characters{place}", "return a shorter text")


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
    """The trained tokens are exactly the model's, under four chat templates."""
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
        tried = f"play an episode with the chat template of {family}"
        if played.episode.status.is_infrastructure:
            seen = f"it ended as {played.episode.status.value}: {played.trajectory.error}"
            change = "use the roles system (first), user, assistant and tool, and text in each message"
            raise FailedError(tried, seen, change)
        live: list[int] = []
        for segment in (segment for each in played.episode.trajectories for segment in each.segments):
            segment.check()
            live += [token for token, mask in zip(segment.tokens, segment.loss_mask, strict=True) if mask > 0]
        if live != sampled:
            texts = [shown(chat.tokenizer.decode(ids)) for ids in (sampled, live)]
            seen = f"the model wrote {texts[0]}, and the trained tokens are {texts[1]}"
            raise FailedError(tried, seen, "in `rollout`, pass the messages of earlier turns on unchanged")
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
