"""Checks of tools and tool parsers. A tool is offered by an invented environment, so the checks of an environment's
tools serve for it.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

from rollouts.author_code import shown
from rollouts.chat.tool_parsers import ChosenParser
from rollouts.env.authoring import TOOL_MARK, ToolMethod
from rollouts.env.schema import check_tool, schema_of
from rollouts.env.task_tools import added_tool
from rollouts.env.toolsets import Toolset, check_toolset, is_toolset
from rollouts.errors import counted
from rollouts.types import Task, ToolCall
from rollouts_check.components.common import Function, Subject, alias_of
from rollouts_check.environments import rewards
from rollouts_check.environments import subject as environments
from rollouts_check.environments import tools as checks
from rollouts_check.environments.agents import parameters_of, tools_for
from rollouts_check.packages import Found
from rollouts_check.report import Passed, SkippedError, trying
from rollouts_check.runner import once

READ_SECONDS = 2.0  # how long reading one reply may take
LONG = 100_000


# --- tools ------------------------------------------------------------------------------------------------------------


def tool_definition(subject: Subject) -> str:
    """It has a schema: each argument of the model has a name and a type, and the docstring says what it does.

    Advice: correct the signatures
    """
    with trying("read the schemas of its tools", subject.component) as attempt:
        if is_several := is_toolset(subject.component):
            check_toolset(Toolset(subject.found.label, subject.component, subject.settings))
            tools = tools_for(_environment(subject))
        else:
            tools = [_tool(subject)]
            check_tool(tools[0])
    for tool in tools:
        is_described = bool(str(schema_of(tool)["function"].get("description", "")).strip())
        attempt.require(is_described, f"{tool.name} has no description", "write a docstring: the model reads it")
    if is_several:
        return f"tools: {', '.join(tool.name for tool in tools) or 'none'}"
    return f"arguments: {', '.join(parameters_of(tools[0])) or 'none'}"


def tool_schemas(subject: Subject) -> str:
    """The schema is valid for OpenAI's API, and chat formats can show it and read calls of it."""
    return checks.tool_schemas(_environment(subject))


def tool_results(subject: Subject) -> str:
    """It returns text, or data that JSON can hold."""
    return checks.tool_results(_environment(subject))


def tool_arguments(subject: Subject) -> str | Passed:
    """Strange arguments do no harm: no hang, no crash, no file outside, no process that is left."""
    return checks.tool_arguments(_environment(subject))


def event_loop(subject: Subject) -> str:
    """If it is async, it does not block the event loop: no `time.sleep`, no program, no request."""
    return rewards.event_loop(_environment(subject))


def _tool(subject: Subject) -> ToolMethod:
    """The tool, with the name that a run gives it: its alias."""
    return added_tool(alias_of(subject.found.label), subject.component, subject.settings)


@once
def _environment(subject: Subject) -> environments.Subject:
    """An environment that has the tool."""
    bases: tuple[type, ...] = ()
    settings: dict[str, Any] = {}
    own: dict[str, Any] = {}
    if is_toolset(subject.component):  # a class of tools has the methods of an environment, except `tasks`
        bases, settings = (subject.component,), subject.settings
    else:
        tool = _tool(subject)
        offered: Any = subject.component if tool.isolate else tool.function
        vars(offered)[TOOL_MARK] = (tool.name, tool.timeout_seconds, tool.isolate, tool.role)
        own = {"tools": lambda self, task: [offered]}
    tasks = {"tasks": lambda self, split, rng: [Task("Use the tools.")], "__doc__": "Offers the tools."}
    toolbox = type(getattr(subject.component, "__name__", "Toolbox"), bases, {**own, **tasks})
    found, given = Found(subject.found.label, "<Toolbox>"), {"env": {"name": toolbox, **settings}}
    return environments.make_subject(found, given, subject.scratch, seed=subject.seed)


# --- tool parsers -----------------------------------------------------------------------------------------------------

_PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "Search.", "parameters": _PARAMETERS}}
    for name in ("search", "look_up")
]
PLAIN = ("A text without calls.", "", "I think that 2 < 3 and 5 > 4.", "Unicode: é 👩‍🚀 \u202e")
CALLS: dict[str, list[ToolCall]] = {
    "one call": [ToolCall("search", {"query": "stars"})],
    "two calls": [ToolCall("search", {"query": "stars"}), ToolCall("look_up", {"query": "moon"})],
}
HOSTILE = {
    "an opened tag": "<tool_call>",
    "a call that is cut off": '<tool_call>{"name": "search", "arguments": {"query": "sta',
    "nested brackets": "[" * 2_000 + "{" * 2_000,
    "many tags": "<tool_call>" * 2_000,
    "many opened calls": '[TOOL_CALLS][{"name": "search"' * 500,
    "a call with a list": '{"name": ["search"], "arguments": [1]}',
    "a call with numbers": '{"name": 1, "parameters": {"query": NaN}}',
    "a long text": "word " * (LONG // 5),
    "a long line": "CALL " + "(" * 20_000,
    "half a character": "\ud800 {",
    "a zero byte": "a\0b <function=search>",
    "signs": "[[]] {} () ** ``` <answer> $$ %s {0} \\",
}


def parser_trial(subject: Subject, function: Function) -> Any:
    """What it reads in some replies."""
    parser = ChosenParser(subject.found.label, function, {})
    written = [] if parser.write is None else [parser.write(calls) for calls in CALLS.values()]
    return [parser.calls(text, TOOLS) for text in (*PLAIN, *written)]


def plain_text(subject: Subject) -> str:
    """It returns (calls, text). In a text without calls it finds none, and returns the text.

    Advice: return (calls, text): a list of ToolCall, and the text without the calls, and nothing else removed
    """
    for text in PLAIN:
        with subject.trying(f"read {shown(text, 60)}") as attempt:
            calls, rest = _parser(subject).calls(text, TOOLS)
        attempt.require(not calls, f"it read {shown(calls)}", "read only what your format marks as a call")
        attempt.require(rest.split() == text.split(), f"the remaining text is {shown(rest, 80)}")
    return counted(len(PLAIN), "text")


def round_trip(subject: Subject) -> None:
    """It reads the calls that its own `write` returns."""
    parser, change = _parser(subject), "let `write` return what the parser reads"
    if parser.write is None:
        raise SkippedError("it has no `write`, which demonstrations with calls need")
    with trying("write a call and read it", change=change):
        parser.check()
    for words, calls in CALLS.items():
        with subject.trying(f"write {words} and read them", change) as attempt:
            text = parser.write(calls)
            read, _ = parser.calls(text, TOOLS)
        is_same = [(each.name, each.arguments) for each in read] == [(each.name, each.arguments) for each in calls]
        attempt.require(is_same, f"it wrote {shown(text, 80)}, and read {shown(read, 120)}")


def any_text(subject: Subject) -> str:
    """No reply makes it raise, however malformed; every beginning of a call is a reply too.

    Advice: return the call with `error`, ToolCall(name, error=...), and let the model read what is wrong
    """
    texts = dict(HOSTILE)
    if (write := _parser(subject).write) is not None:
        whole = write(CALLS["two calls"])
        texts |= {f"the first {count} characters of a call": whole[:count] for count in range(len(whole))}
    for words, text in texts.items():
        with subject.trying(f"read {words}: {shown(text, 40)}") as attempt:
            calls, _ = _parser(subject).calls(text, TOOLS)
        change = "return calls whose names are text, and whose arguments are a dict that JSON can hold"
        for call in calls:
            is_call = isinstance(call.name, str) and _is_json(call.arguments)
            attempt.require(is_call, f"it read {shown(call)}", change)
    return counted(len(texts), "text")


def quick(subject: Subject) -> str:
    """Reading takes little time, also of a long or malformed reply.

    Advice: search with a pattern that does not try all ways to split the text, such as (.*)*
    """
    slowest, texts = 0.0, [("a text of many words", "word " * LONG), *HOSTILE.items()]
    for words, text in texts:
        begun = time.perf_counter()
        with contextlib.suppress(Exception):  # `any_text` reports it
            _parser(subject).calls(text, TOOLS)
        slowest = max(slowest, seconds := time.perf_counter() - begun)
        seen = f"it took {seconds:.1f} seconds for {len(text):,} characters"
        subject.attempt(f"read {words}").require(seconds <= READ_SECONDS, seen)
    return f"{slowest * 1000:.0f} ms"


def _is_json(arguments: Any) -> bool:
    try:
        json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return isinstance(arguments, dict)


def _parser(subject: Subject) -> ChosenParser:
    return ChosenParser(subject.found.label, subject.component, subject.settings)
