"""Does the environment show an answer: in the prompt, in the schema of a tool, in a tool's result?

An answer counts as shown if a program could find it in every task in the same way: it is the whole text, it is behind
the same words, it is behind a word of the prompt, as in a table, or it has the same keys in a result that is JSON. An
answer that is written in another case counts only if the reward accepts it as it is written. A list or a mapping counts
as shown if all of it is; the values that are the same in all tasks do not matter.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from rollouts.author_code import place_of_function, shown
from rollouts.check.environments.agents import done, in_trio, play, ready, says, tools_for
from rollouts.check.environments.call_tricks import calls_of
from rollouts.check.environments.forger import text_arguments
from rollouts.check.environments.indirect import look_for_numbers, look_in_replies, shown_by_number
from rollouts.check.environments.rewards import SLACK, judged
from rollouts.check.environments.subject import Subject
from rollouts.check.environments.tools import example_arguments
from rollouts.check.report import FailedError, Passed, SkippedError
from rollouts.env.authoring import ToolMethod
from rollouts.env.schema import schema_of
from rollouts.env.tools import run_tool
from rollouts.errors import counted
from rollouts.types import Task, ToolCall

CONTEXT = 5  # characters before an answer by which a forger could find it
DISTINCT = 4  # shorter answers may be in a schema by chance
CONFIRMED = 15  # other tasks in which a tool must show the answer too
TABLES_MAX = 10  # tables of a database that are read
SEPARATED = re.compile(r"(?<=\d)[,_](?=\d{3}\b)")  # as in 342,258
TELLING = re.compile(r"answer|solution|secret|expected|target|result|correct|hint|debug|gold|label|truth")
"""Words before an answer that is given away."""

WORDS_BEFORE = 25  # characters in which such a word is looked for
LISTINGS = ("select name from sqlite_master", "select table_name from information_schema.tables")
"""How databases list their tables."""

READ = ("default", "const", "description", "title", "enum", "examples")
"""The keys of a schema whose values a model reads."""


def answer_hidden(subject: Subject) -> str | Passed:
    """The answer is not at a fixed place in the prompt, in a schema, in a result for any arguments, or in `reply`."""
    known = [each.task for each in subject.expert] or subject.tasks
    answers = [_written(task.answer) for task in known]
    count = len(set(filter(None, answers)))
    if not count:
        raise SkippedError("no task has an answer")
    prompts = ["\n".join(message.text for message in task.messages) for task in known]
    notes = []
    if words := _gives_away(subject, prompts, answers):
        seen = f"each prompt has the answer {words}{_at_tasks(subject)}"
        if _is_at_changing_lines(prompts, answers):
            notes.append(f"{seen}, in changing lines; leave it out, unless the task is to find it")
        elif _is_the_task(subject, prompts, answers):
            notes.append(f"{seen}; leave it out, unless it is what to do")
        else:
            raise FailedError("look for the answers in the prompts", seen, "leave the answer out of the prompt")
    notes += look_for_numbers(subject)
    look_in_replies(subject)
    _look_in_schemas(subject, known, answers, prompts)
    if count < 2:
        return Passed(f"{counted(len(known), 'task')} with one answer: only schemas were read", tuple(notes))
    others = [task for task in _distinct(subject.drawn) if task not in known][:CONFIRMED]
    for tool in tools_for(subject):
        for words, arguments in _unknowing(subject, tool):
            results = _results_of(subject, tool, known, arguments)
            found = _shown_by(subject, known, results)
            if found and (not others or _shown_by(subject, others, _results_of(subject, tool, others, arguments))):
                place = place_of_function(tool.function)
                seen = f"the result has the answer {found}, such as {shown(results[0])} ({place})"
                tried = f"call the tool {tool.name} with {words} in every task"
                if not _is_experts_way(subject, tool, arguments):
                    raise FailedError(tried, seen, "do not give the model an answer that it did not work for")
                notes.append(f"{tried}: {seen}, as the expert does; this is the task, or gives it away")
    return Passed(counted(len(known), "task"), tuple(notes))


def _is_experts_way(subject: Subject, tool: ToolMethod, arguments: Callable[[Task], dict[str, Any]]) -> bool:
    """Whether the expert makes this call in every task."""
    made = [
        any(call.arguments == arguments(each.task) for call in calls_of(each, tool.name)) for each in subject.expert
    ]
    return bool(made) and all(made)


def _is_the_task(subject: Subject, prompts: Sequence[str], answers: Sequence[str]) -> bool:
    """Whether the task seems to be to copy or to reach what the prompt says: nothing else differs between the prompts,
    or it does not earn the reward as a reply. Not if the words before it say that it is an answer.
    """
    pairs = [(prompt.lower(), answer.lower()) for prompt, answer in zip(prompts, answers, strict=True) if answer]
    rest = {re.sub(rf"(?<!\w){re.escape(answer)}(?!\w)", "", prompt) for prompt, answer in pairs}
    before = [prompt.partition(answer)[0][-WORDS_BEFORE:] for prompt, answer in pairs]
    if all(TELLING.search(each) for each in before):
        return False
    return len(rest) == 1 or not _earn(subject, answers)


def _is_at_changing_lines(texts: Sequence[str], answers: Sequence[str]) -> bool:
    """Whether the answers are at no fixed line, neither from the first line nor from the last one, as in a text in
    which the model has to find something.
    """
    pairs = [(text.splitlines(), answer) for text, answer in zip(texts, answers, strict=True) if answer]
    places = [{number for number, line in enumerate(lines) if any(_places(answer, line))} for lines, answer in pairs]
    counts = [len(lines) for lines, _ in pairs]
    behind = [{count - each for each in own} for own, count in zip(places, counts, strict=True)]
    return not set.intersection(*places) and not set.intersection(*behind)


def _written(answer: Any) -> str:
    """An answer as it may be written in a text: a list or a mapping as JSON. Empty for other values."""
    if isinstance(answer, list | dict):
        return msgspec.json.encode(answer, enc_hook=str).decode() if answer else ""
    return str(answer).strip() if isinstance(answer, str | int | float) else ""


def _distinct(tasks: Sequence[Task]) -> list[Task]:
    return list({task.key: task for task in tasks}.values())


def _places(answer: str, text: str) -> Iterator[re.Match[str]]:
    pattern = re.escape(answer)
    if answer.startswith(("[", "{")):  # spaces and quotes are free
        pattern = pattern.replace('"', "[\"']").replace(",", r",\s*").replace(":", r":\s*")
    return re.finditer(rf"(?<!\w){pattern}(?!\w)", text)


def _gives_away(subject: Subject, texts: Sequence[str], answers: Sequence[str]) -> str:
    """How each text shows its answer: it is the answer, or has the answer behind the same words. Empty if it does not.

    Texts without an answer do not count.
    """
    pairs = [(text.strip(), answer) for text, answer in zip(texts, answers, strict=True) if answer]
    if len({answer for _, answer in pairs}) < 2:
        return ""
    if exact := _common_place(pairs):
        return exact[0]
    loose = _common_place([(text.lower(), answer.lower()) for text, answer in pairs])
    if not loose:
        return ""
    words, starts = loose
    written = iter([text[start : start + len(answer)] for start, (text, answer) in zip(starts, pairs, strict=True)])
    return words if _earn(subject, [next(written) if answer else "" for answer in answers]) else ""


def _shown_by(subject: Subject, tasks: Sequence[Task], texts: Sequence[str]) -> str:
    """How results of a tool show the answers of these tasks: each as a whole, or each of the values in it. Empty if
    they do not.
    """
    answers = [task.answer for task in tasks]
    written = [_written(answer) for answer in answers]
    if found := _gives_away(subject, texts, written) or _at_one_key(texts, written):
        return found
    leaves = [dict(_leaves(answer, "", True)) if isinstance(answer, list | dict) else {} for answer in answers]
    shared = set.intersection(*map(set, leaves))
    columns = [[each[path] for each in leaves] for path in sorted(shared)]
    places = [_gives_away(subject, texts, column) for column in columns if len(set(column)) > 1]
    return " and ".join(places[:3]) if places and all(places) else shown_by_number(tasks, texts)


def _at_one_key(texts: Sequence[str], written: Sequence[str]) -> str:
    """Whether all texts are JSON and have their answer at the same keys. Texts without an answer do not count."""
    pairs = [(text, answer) for text, answer in zip(texts, written, strict=True) if answer]
    if len({answer for _, answer in pairs}) < 2:
        return ""
    try:
        found = [
            {path for path, value in _values(msgspec.json.decode(text), "") if _written(value) == answer}
            for text, answer in pairs
        ]
    except msgspec.DecodeError:
        return ""
    paths = sorted(set.intersection(*found))
    return f"at {paths[0]}" if paths else ""


def _values(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Each value in a list or a mapping, with its keys: `[0].total`."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        name = f"{path}[{key}]" if isinstance(value, list) else f"{path}.{key}"
        yield name, each
        yield from _values(each, name)


def _common_place(pairs: Sequence[tuple[str, str]]) -> tuple[str, list[int]] | None:
    """Words for a place at which each text has its answer, and where the answer begins in each; None without one."""
    if all(text == answer for text, answer in pairs):
        return "and nothing else", [0] * len(pairs)
    contexts = [
        {text[max(0, found.start() - CONTEXT) : found.start()]: found.start() for found in _places(answer, text)}
        for text, answer in pairs
    ]
    for context in sorted(set.intersection(*map(set, contexts))):
        is_rare = all(text.count(context) == 1 for text, _ in pairs)
        if is_rare and any(letter.isalpha() for letter in context):
            return f"behind {context!r}", [each[context] for each in contexts]
    return None


def _earn(subject: Subject, replies: Sequence[str]) -> bool:
    """Whether these replies to the tasks of the demonstrations earn what the expert earns. False without an expert."""
    known = judged(subject)
    if not known:
        return False

    async def earned() -> bool:
        for (each, wanted), reply in zip(known, replies, strict=False):
            played = await play(subject, each.task, says(reply))
            if played.reward is None or played.reward < wanted - SLACK:
                return False
        return True

    return in_trio(earned)


# --- schemas ----------------------------------------------------------------------------------------------------------


def _look_in_schemas(subject: Subject, tasks: Sequence[Task], answers: Sequence[str], prompts: Sequence[str]) -> None:
    """Raise FailedError if the schemas of the tools show the answers."""
    schemas = in_trio(_texts_of_schemas, subject, tasks)
    for tool, path in sorted(set.intersection(*map(set, schemas))):
        texts = [each[tool, path] for each in schemas]
        found = _gives_away(subject, texts, answers) or _in_a_table(texts, answers, prompts)
        found = found or _only_answer(texts, answers, prompts, path)
        if found:
            place = next((place_of_function(each.function) for each in tools_for(subject) if each.name == tool), None)
            at = f" ({place})" if place else ""
            seen = f"{path} has the answer {found}, such as {shown(texts[0])}{at}"
            raise FailedError(f"read the schema of the tool {tool}", seen, "leave the answer out of the schema")


async def _texts_of_schemas(subject: Subject, tasks: Sequence[Task]) -> list[dict[tuple[str, str], str]]:
    """For each task, what a model reads in the schemas of its tools, by tool and path."""
    found = []
    for task in tasks:
        run = await ready(subject, task)
        try:
            schemas = [schema_of(tool)["function"] for tool in run.own_tools]
        finally:
            await done(run)
        found.append({(each["name"], path): text for each in schemas for path, text in _leaves(each, "", False)})
    return found


def _leaves(value: Any, path: str, is_read: bool) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(each, f"{path}.{key}" if path else str(key), is_read or key in READ)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _leaves(each, f"{path}[{number}]", is_read)
    elif is_read and not isinstance(value, bool) and isinstance(value, str | int | float):
        yield path, str(value)


def _in_a_table(texts: Sequence[str], answers: Sequence[str], prompts: Sequence[str]) -> str:
    """Whether each text has its answer behind a word of its own prompt: {'France': 'Paris', 'Italy': 'Rome'}."""
    words = [set(re.findall(r"\w+", prompt)) for prompt in prompts]
    everywhere = set.intersection(*words)
    triples = [each for each in zip(texts, answers, words, strict=True) if each[1]]
    if len({answer for _, answer, _ in triples}) < 2:
        return ""
    for text, answer, own in triples:
        before = {found[1] for found in re.finditer(rf"(\w+)\W{{1,6}}{re.escape(answer)}(?!\w)", text)}
        if not before & (own - everywhere - {answer}):
            return ""
    return "behind words of the prompt"


def _only_answer(texts: Sequence[str], answers: Sequence[str], prompts: Sequence[str], path: str) -> str:
    """Whether all tasks have one answer, which each text has and no prompt has. One of several choices is no answer."""
    answer = answers[0]
    if len(set(answers)) != 1 or len(answer) < DISTINCT or ".enum[" in path:
        return ""
    is_shown = all(any(_places(answer, text)) for text in texts)
    is_known = any(any(_places(answer, prompt)) for prompt in prompts)
    return "of every task" if is_shown and not is_known else ""


# --- results ----------------------------------------------------------------------------------------------------------


def _unknowing(subject: Subject, tool: ToolMethod) -> Iterator[tuple[str, Callable[[Task], dict[str, Any]]]]:
    """Arguments that do not depend on the task, each with its words."""
    usual = example_arguments(schema_of(tool))
    yield "invented arguments", _always(usual)
    texts = [name for owner, name, _ in text_arguments(subject) if owner.name == tool.name]
    for value in ("", "answer", "help", "*"):
        if texts:
            yield f"{value!r}", _always({**usual, **dict.fromkeys(texts, value)})
    calls = [
        (each.task, call.arguments)
        for each in subject.expert
        for reply in each.replies
        for call in reply.tool_calls
        if call.name == tool.name
    ]

    def of_another(task: Task) -> dict[str, Any]:
        own = [arguments for other, arguments in calls if other == task]
        return next((arguments for other, arguments in calls if other != task and arguments not in own), usual)

    if calls:
        yield "the arguments of another task", of_another
    if texts and re.search(r"\bsql\b|\bselect\b", str(schema_of(tool)), re.IGNORECASE):
        for statement in _statements(subject, tool, usual, texts[0]):
            yield repr(statement), _always({**usual, texts[0]: statement})


def _statements(subject: Subject, tool: ToolMethod, usual: Mapping[str, Any], name: str) -> list[str]:
    """Statements that read the tables which a database lists."""
    found = dict[str, None]()
    for listing in LISTINGS:
        (text,) = _results_of(subject, tool, subject.tasks[:1], _always({**usual, name: listing}))
        if not text.startswith("Error:"):
            found |= dict.fromkeys(re.findall(r"[A-Za-z_]\w*", text))
    return [f"select * from {table}" for table in itertools.islice(found, TABLES_MAX)]


def _results_of(
    subject: Subject, tool: ToolMethod, tasks: Sequence[Task], arguments: Callable[[Task], dict[str, Any]]
) -> list[str]:
    return [SEPARATED.sub("", text) for text in in_trio(_results, subject, tool, tasks, arguments)]


def _always(arguments: dict[str, Any]) -> Callable[[Task], dict[str, Any]]:
    return lambda task: arguments


async def _results(
    subject: Subject, tool: ToolMethod, tasks: Sequence[Task], arguments: Callable[[Task], dict[str, Any]]
) -> list[str]:
    """The tool's result in each task."""
    texts = []
    for task in tasks:
        run = await ready(subject, task)
        try:
            own = {each.name: each for each in run.own_tools}
            texts.append((await run_tool(own, ToolCall(tool.name, arguments(task), "call"), seconds_max=10)).text)
        finally:
            await done(run)
    return texts


def _at_tasks(subject: Subject) -> str:
    place = place_of_function(getattr(subject.component, "tasks", None))
    return f" ({place})" if place else ""
