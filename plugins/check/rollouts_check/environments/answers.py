"""Does the environment show an answer: in the prompt, in the schema of a tool, in a tool's result?

An answer counts as shown if a program could find it in every task in the same way: it is the whole text, it is behind
the same words, it is behind a word of the prompt, as in a table, or it has the same keys in a result that is JSON. An
answer that is written in another case counts only if the reward accepts it as it is written. A list or a mapping counts
as shown if all of it is; the values that are the same in all tasks do not matter. A prompt may also hide an answer in a
code (`indirect.CODES`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from rollouts.author_code import place_of_function, shown
from rollouts.env.authoring import ToolMethod
from rollouts.env.schema import schema_of
from rollouts.env.tools import run_tool
from rollouts.errors import counted
from rollouts.types import Message, Task, ToolCall
from rollouts_check.environments.agents import TURNS, done, in_trio, play, ready, says, tools_for
from rollouts_check.environments.call_tricks import calling, calls_of
from rollouts_check.environments.forger import text_arguments
from rollouts_check.environments.indirect import CODES, MANY, look_for_numbers, look_in_replies, shown_by_number
from rollouts_check.environments.rewards import SLACK, judged
from rollouts_check.environments.subject import Subject
from rollouts_check.environments.tools import example_arguments
from rollouts_check.report import FailedError, Passed, SkippedError

CONTEXT = 5  # characters before an answer by which a forger could find it
DISTINCT = 4  # shorter answers may be in a schema by chance
CONFIRMED = 15  # other tasks in which a tool must show the answer too
TABLES_MAX = 10  # tables of a database that are read
SEPARATED = re.compile(r"(?<=\d)[,_](?=\d{3}\b)")  # as in 342,258
TELLING = re.compile(r"answer|solution|secret|expected|target|result|correct|hint|debug|gold|label|truth")
"""Words before an answer that is given away."""

DECODES = re.compile(
    r"\b(de(cod|crypt|cipher)|revers(e|ing)\b|backward|right to left|convert|translat|spell|letters|unscrambl|mirror|"
    r"join|concat|in digits|which word)"
)
"""Words of a prompt whose task is to read a code."""

WORDS_BEFORE = 25  # characters in which such a word is looked for
LISTINGS = ("select name from sqlite_master", "select table_name from information_schema.tables")
"""How databases list their tables."""

UNREAD = ("type", "required")
"""The keys of a schema whose values say nothing of a task."""

NAMED = "the name"
HINTS = ("", "answer", "help", "*")
NUMBERS = (0, 1, 2, 3, 10)
CHOICES_MAX = 8  # values that are tried of one argument


def answer_hidden(subject: Subject) -> str | Passed:
    """The answer is not at a fixed place or in a code in the prompt, in a schema, in a result for any arguments, or in
    `reply`.
    """
    known = [each.task for each in subject.expert] or subject.tasks
    count = len(set(filter(None, map(_answer, known))))
    if not count:
        raise SkippedError("no task has an answer")
    others = [task for task in _distinct(subject.drawn) if task not in known][:CONFIRMED]
    if len({_answer(task) for task in others} - {""}) < 2:
        others = []
    notes = [*_look_in_prompts(subject, known, others), *_look_for_codes(subject), *look_for_numbers(subject)]
    look_in_replies(subject)
    _look_in_schemas(subject, known, others)
    if count < 2:
        return Passed(f"{counted(len(known), 'task')} with one answer: only schemas were read", tuple(notes))
    for tool in tools_for(subject):
        notes += _look_in_results(subject, tool, known, others)
    return Passed(counted(len(known), "task"), tuple(notes))


def _look_in_prompts(subject: Subject, known: Sequence[Task], others: Sequence[Task]) -> list[str]:
    """Notes on prompts that show the answers, as the task. Raises FailedError if it is probably not the task."""
    prompts, answers = [_prompt(task) for task in known], [_answer(task) for task in known]
    words = _gives_away(subject, prompts, answers)
    if not words or (others and not _gives_away(None, list(map(_prompt, others)), list(map(_answer, others)))):
        return []
    seen = f"each prompt has the answer {words}{_at_tasks(subject)}"
    if _is_at_changing_lines(prompts, answers):
        return [f"{seen}, in changing lines; leave it out, unless the task is to find it"]
    if _is_alone(prompts, answers) or not (
        _is_announced(prompts, answers) or _earn(subject, [[each] for each in answers])
    ):
        return [f"{seen}; leave it out, unless it is what to do"]
    raise FailedError("look for the answers in the prompts", seen, "leave the answer out of the prompt")


def _look_for_codes(subject: Subject) -> list[str]:
    """A note if each prompt has its answer in a code, and the task is to read it. Raises FailedError if it is not.

    Answers that a prompt also shows as they are do not count, nor codes that the prompts of other answers have too.
    """
    tasks = [task for task in _distinct(subject.drawn) if isinstance(task.answer, str | int | float) and _answer(task)]
    pairs = [(_prompt(task), _answer(task)) for task in tasks]
    pairs = [(prompt, answer) for prompt, answer in pairs if not any(_places(answer.lower(), prompt.lower()))]
    if len(pairs) < max(MANY, len(tasks) / 2) or len({answer for _, answer in pairs}) < 2:
        return []
    for code in CODES:
        coded = []
        for prompt, answer in pairs:
            text, hidden = code.decoded(prompt).lower(), code.encoded(answer.lower())
            if not hidden or not any(_places(hidden, text)):
                break
            coded.append((text, hidden))
        if len(coded) < len(pairs) or _is_everywhere(coded) or (code.is_placed and not _common_place(coded)):
            continue
        texts, answers = [text for text, _ in coded], [hidden for _, hidden in coded]
        seen = f"each prompt has the answer {code.words}, such as {shown(pairs[0][0])} for {pairs[0][1]!r}"
        if _is_alone(texts, answers) or all(DECODES.search(prompt.lower()) for prompt, _ in pairs):
            return [f"{seen}{_at_tasks(subject)}; leave it out, unless the task is to read it"]
        raise FailedError("look for codes of the answers in the prompts", f"{seen}{_at_tasks(subject)}", "leave it out")
    return []


def _is_everywhere(pairs: Sequence[tuple[str, str]]) -> bool:
    """Whether most texts have the answers of other texts too, as in a list of all choices."""
    answers = {answer for _, answer in pairs}
    found = sum(any(_places(other, text)) for text, own in pairs for other in answers - {own})
    return 2 * found > len(pairs) * (len(answers) - 1)


def _look_in_results(
    subject: Subject, tool: ToolMethod, known: Sequence[Task], others: Sequence[Task]
) -> Iterator[str]:
    """Notes on calls that show the answer and are the expert's, or cost the reward. Raises FailedError for others."""
    enough = next(count for count in range(len(known) + 1) if len(set(map(_answer, known[:count])) - {""}) > 1)
    few = known[:enough]  # they rule out most calls
    for words, arguments in _unknowing(subject, tool):
        found = ""
        for tasks in (few, known, *([others] if others else [])):
            results = _results_of(subject, tool, tasks, arguments)
            found = _shown_by(subject if tasks is not others else None, tasks, results)
            if not found:
                break
        if not found:
            continue
        tried = f"call the tool {tool.name} with {words} in every task"
        seen = f"the result has the answer {found}, such as {shown(results[0])} ({place_of_function(tool.function)})"
        if _is_experts_way(subject, tool, arguments):
            yield f"{tried}: {seen}, as the expert does; this is the task, or gives it away"
        elif judged(subject) and not _earn(subject, _after_call(subject, tool, arguments)):
            yield f"{tried}: {seen}; an expert earns less after it, so it may be a hint"
        else:
            raise FailedError(tried, seen, "do not give the model an answer that it did not work for")


def _after_call(subject: Subject, tool: ToolMethod, arguments: Callable[[Task], dict[str, Any]]) -> list[list[Any]]:
    """What each expert says, after this call."""
    return [[calling(ToolCall(tool.name, arguments(each.task))), *each.replies] for each, _ in judged(subject)]


def _is_experts_way(subject: Subject, tool: ToolMethod, arguments: Callable[[Task], dict[str, Any]]) -> bool:
    """Whether the expert makes this call in every task."""
    made = [
        any(call.arguments == arguments(each.task) for call in calls_of(each, tool.name)) for each in subject.expert
    ]
    return bool(made) and all(made)


def _is_alone(texts: Sequence[str], answers: Sequence[str]) -> bool:
    """Whether nothing but the answers differs between the texts, as in a task to copy or to reach what the prompt says.
    Not if the words before say that it is an answer.
    """
    pairs = [(text.lower(), answer.lower()) for text, answer in zip(texts, answers, strict=True) if answer]
    rest = {re.sub(rf"(?<!\w){re.escape(answer)}(?!\w)", "", text) for text, answer in pairs}
    return len(rest) == 1 and not _is_announced(texts, answers)


def _is_announced(texts: Sequence[str], answers: Sequence[str]) -> bool:
    """Whether the words before each answer say that it is one."""
    pairs = [(text.lower(), answer.lower()) for text, answer in zip(texts, answers, strict=True) if answer]
    return all(TELLING.search(text.partition(answer)[0][-WORDS_BEFORE:]) for text, answer in pairs)


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


def _answer(task: Task) -> str:
    return _written(task.answer)


def _prompt(task: Task) -> str:
    return "\n".join(message.text for message in task.messages)


def _distinct(tasks: Sequence[Task]) -> list[Task]:
    return list({task.key: task for task in tasks}.values())


def _places(answer: str, text: str) -> Iterator[re.Match[str]]:
    pattern = re.escape(answer)
    if answer.startswith(("[", "{")):  # spaces and quotes are free
        pattern = pattern.replace('"', "[\"']").replace(",", r",\s*").replace(":", r":\s*")
    return re.finditer(rf"(?<!\w){pattern}(?!\w)", text)


def _gives_away(subject: Subject | None, texts: Sequence[str], answers: Sequence[str]) -> str:
    """How each text shows its answer: it is the answer, or has the answer behind the same words. Empty if it does not.

    Texts without an answer do not count. An answer in another case counts if it earns the reward; None: it counts.
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
    scripts = [[next(written) if answer else ""] for answer in answers]
    return words if subject is None or _earn(subject, scripts) else ""


def _shown_by(subject: Subject | None, tasks: Sequence[Task], texts: Sequence[str]) -> str:
    """How results of a tool show the answers of these tasks: each as a whole, or each of the values in it. Empty if
    they do not. None: see `_gives_away`.
    """
    answers = [task.answer for task in tasks]
    written = [_written(answer) for answer in answers]
    if found := _gives_away(subject, texts, written) or _at_one_key(texts, written) or _at_an_end(texts, written):
        return found
    leaves = [_leaves(answer) for answer in answers]
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
            {path for path, value in _values(msgspec.json.decode(text)) if _written(value) == answer}
            for text, answer in pairs
        ]
    except msgspec.DecodeError:
        return ""
    paths = sorted(set.intersection(*found))
    return f"at {paths[0]}" if paths else ""


def _at_an_end(texts: Sequence[str], written: Sequence[str]) -> str:
    """Whether all texts begin or all end with their answer. Texts without an answer do not count."""
    pairs = [(text.strip(" .!\n"), answer) for text, answer in zip(texts, written, strict=True) if answer]
    if len({answer for _, answer in pairs}) < 2:
        return ""
    places = [[found.span() for found in _places(answer, text)] for text, answer in pairs]
    if all(found and found[0][0] == 0 for found in places):
        return "at its start"
    is_last = all(found and found[-1][1] == len(text) for found, (text, _) in zip(places, pairs, strict=True))
    return "at its end" if is_last else ""


def _values(value: Any, path: str = "", unread: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """Each value in a list or a mapping, with its keys: `[0].total`. Not those of the keys `unread`, unless they are
    mappings.
    """
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        if key in unread and not isinstance(each, dict):
            continue
        name = f"{path}[{key}]" if isinstance(value, list) else f"{path}.{key}".lstrip(".")
        if path.endswith(".enum") and len(value) == 1:
            name = path  # no choice
        yield name, each
        yield from _values(each, name, unread)


def _leaves(value: Any, unread: Collection[str] = ()) -> dict[str, str]:
    """The texts and numbers in a list or a mapping, as texts."""
    found = _values(value, unread=unread)
    return {path: str(each) for path, each in found if type(each) in (str, int, float)}


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


def _earn(subject: Subject, scripts: Sequence[Sequence[Message | str]]) -> bool:
    """Whether agents that say this in the tasks of the demonstrations earn what the expert earns. False without one."""
    known = judged(subject)

    async def earned() -> bool:
        for (each, wanted), script in zip(known, scripts, strict=False):
            played = await play(subject, each.task, says(*script), turns=len(script) if len(script) > 1 else TURNS)
            if played.reward is None or played.reward < wanted - SLACK:
                return False
        return True

    return bool(known) and in_trio(earned)


# --- schemas ----------------------------------------------------------------------------------------------------------


def _look_in_schemas(subject: Subject, known: Sequence[Task], others: Sequence[Task]) -> None:
    """Raise FailedError if the schemas of the tools show the answers."""
    schemas = in_trio(_texts_of_schemas, subject, known)
    for tool, path in sorted(set.intersection(*map(set, schemas))):
        texts = [each[tool, path] for each in schemas]
        if not (found := _in_schema(subject, known, texts, path)):
            continue
        more = [each.get((tool, path), "") for each in in_trio(_texts_of_schemas, subject, others)]
        if others and not _in_schema(None, others, more, path):
            continue
        place = next((place_of_function(each.function) for each in tools_for(subject) if each.name == tool), None)
        at = f" ({place})" if place else ""
        seen = f"{path} has the answer {found}, such as {shown(texts[0])}{at}"
        raise FailedError(f"read the schema of the tool {tool}", seen, "leave the answer out of the schema")


def _in_schema(subject: Subject | None, tasks: Sequence[Task], texts: Sequence[str], path: str) -> str:
    """How the texts at one place of a tool's schemas show the answers of the tasks. Empty if they do not."""
    answers, prompts = [_answer(task) for task in tasks], [_prompt(task) for task in tasks]
    found = _gives_away(subject, texts, answers) or _in_a_table(texts, answers, prompts)
    return found or _only_answer(texts, answers, prompts, path)


async def _texts_of_schemas(subject: Subject, tasks: Sequence[Task]) -> list[dict[tuple[str, str], str]]:
    """For each task, what a model reads in the schemas of its tools, by tool and path. Names have the place of their
    tool or their argument as path.
    """
    found = []
    for task in tasks:
        run = await ready(subject, task)
        try:
            schemas = [schema_of(tool)["function"] for tool in run.own_tools]
        finally:
            await done(run)
        names = {(f"number {place}", NAMED): each["name"] for place, each in enumerate(schemas, start=1)}
        for each in schemas:
            arguments = enumerate(each["parameters"]["properties"], start=1)
            names |= {(each["name"], f"{NAMED} of argument {place}"): name for place, name in arguments}
            names |= {(each["name"], path): text for path, text in _leaves(each, UNREAD).items()}
        found.append(names)
    return found


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
    if len(set(answers)) != 1 or len(answer) < DISTINCT or ".enum[" in path or path.startswith(NAMED):
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
    for value in HINTS if texts else ():
        yield f"{value!r}", _always({**usual, **dict.fromkeys(texts, value)})
    function = schema_of(tool)["function"]
    for name, parameter in function["parameters"]["properties"].items():
        for value in itertools.islice(_choices(parameter, function.get("description", "")), CHOICES_MAX):
            yield f"{name}={value!r}", _always({**usual, name: value})
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


def _choices(parameter: Mapping[str, Any], description: str) -> Iterator[Any]:
    """What an argument may be: each of its choices, small numbers, the bounds, and the words that are quoted."""
    for schema in (parameter, *parameter.get("anyOf", ())):
        yield from schema.get("enum", ())
        yield from (schema[key] for key in ("const", "minimum", "maximum") if key in schema)
        kind = schema.get("type")
        yield from (True, False) if kind == "boolean" else NUMBERS if kind in ("integer", "number") else ()
        if kind == "string":
            yield from re.findall(r"[\"'`](\w+)[\"'`]", f"{schema.get('description', '')} {description}")


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
