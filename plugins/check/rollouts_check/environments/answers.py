"""Does the environment show an answer: in the prompt, in the schema of a tool, in a tool's result?

An answer counts as shown if a program could find it in every task in the same way: it is the whole text, it is behind
the same words, it is behind a word of the prompt, as in a table, or it has the same keys in a result that is JSON. An
answer that is written in another case counts only if the reward accepts it as it is written. A list or a mapping counts
as shown if all of it is; the values that are the same in all tasks do not matter. A prompt may also hide an answer in a
code (`indirect.CODES`).
"""

from __future__ import annotations

import base64
import codecs
import contextlib
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from rollouts.author_code import shown
from rollouts.env.authoring import ToolMethod
from rollouts.env.schema import schema_of
from rollouts.errors import counted
from rollouts.types import Message, Task, ToolCall
from rollouts_check.environments.agents import TURNS, call_tool, in_trio, parameters_of, play, ready, says, tools_for
from rollouts_check.environments.forger import calling, calls_of, text_arguments, word
from rollouts_check.environments.rewards import SLACK, judged
from rollouts_check.environments.subject import Subject
from rollouts_check.environments.tools import example_arguments
from rollouts_check.report import FailedError, Passed, SkippedError, at

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

IN_PROMPTS, LEAVE_OUT = "look for the answers in the prompts", "leave the answer out"
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
    notes = [*_look_in_prompts(subject, known, others), *_look_for_codes(subject), *_look_for_numbers(subject)]
    _look_in_replies(subject)
    _look_in_schemas(subject, known, others)
    if count < 2:
        return Passed(f"{counted(len(known), 'task')} with one answer: only schemas were read", notes)
    for tool in tools_for(subject):
        notes += _look_in_results(subject, tool, known, others)
    return Passed(counted(len(known), "task"), notes)


def _look_in_prompts(subject: Subject, known: Sequence[Task], others: Sequence[Task]) -> list[str]:
    """Notes on prompts that show the answers, as the task. Raises FailedError if it is probably not the task."""
    prompts, answers = [_prompt(task) for task in known], [_answer(task) for task in known]
    words = _gives_away(subject, prompts, answers)
    if not words or (others and not _gives_away(None, list(map(_prompt, others)), list(map(_answer, others)))):
        return []
    seen = f"each prompt has the answer {words}{subject.at('tasks')}"
    pairs = _lowered(prompts, answers)
    if _is_at_changing_lines(prompts, answers):
        return [f"{seen}, in changing lines; leave it out, unless the task is to find it"]
    if _is_alone(pairs) or not (_is_announced(pairs) or _earn(subject, [[each] for each in answers])):
        return [f"{seen}; leave it out, unless it is what to do"]
    raise FailedError(IN_PROMPTS, seen, LEAVE_OUT)


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
        coded = [(code.decoded(prompt).lower(), code.encoded(answer.lower())) for prompt, answer in pairs]
        is_shown = all(hidden and any(_places(hidden, text)) for text, hidden in coded)
        if not is_shown or _is_everywhere(coded) or (code.is_placed and not _common_place(coded)):
            continue
        prompt, answer = pairs[0]
        seen = f"each prompt has the answer {code.words}, such as {shown(prompt)} for {answer!r}{subject.at('tasks')}"
        if _is_alone(coded) or all(DECODES.search(prompt.lower()) for prompt, _ in pairs):
            return [f"{seen}; leave it out, unless the task is to read it"]
        raise FailedError("look for codes of the answers in the prompts", seen, LEAVE_OUT)
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
        if not _shown_by(subject, few, _results_of(subject, tool, few, arguments)):
            continue
        results = _results_of(subject, tool, known, arguments)
        found = _shown_by(subject, known, results)
        if not found or (others and not _shown_by(None, others, _results_of(subject, tool, others, arguments))):
            continue
        tried = f"call the tool {tool.name} with {words} in every task"
        seen = f"the result has the answer {found}, such as {shown(results[0])}{at(tool.function)}"
        experts = [[call.arguments for call in calls_of(each, tool.name)] for each in subject.expert]
        if experts and all(arguments(each.task) in made for each, made in zip(subject.expert, experts, strict=True)):
            yield f"{tried}: {seen}, as the expert does; this is the task, or gives it away"
            continue
        scripts = [[calling(ToolCall(tool.name, arguments(each.task))), *each.replies] for each, _ in judged(subject)]
        if not scripts or _earn(subject, scripts):
            raise FailedError(tried, seen, "do not give the model an answer that it did not work for")
        yield f"{tried}: {seen}; an expert earns less after it, so it may be a hint"


def _lowered(texts: Sequence[str], answers: Sequence[str]) -> list[tuple[str, str]]:
    """The texts that have an answer, with it, in small letters."""
    return [(text.lower(), answer.lower()) for text, answer in zip(texts, answers, strict=True) if answer]


def _is_alone(pairs: Sequence[tuple[str, str]]) -> bool:
    """Whether nothing but the answers differs between the texts, as in a task to copy or to reach what the prompt says.
    Not if the words before say that it is an answer.
    """
    rest = {re.sub(rf"(?<!\w){re.escape(answer)}(?!\w)", "", text) for text, answer in pairs}
    return len(rest) == 1 and not _is_announced(pairs)


def _is_announced(pairs: Sequence[tuple[str, str]]) -> bool:
    """Whether the words before each answer say that it is one."""
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
    if found := _gives_away(subject, texts, written):
        return found
    pairs = [(text, answer) for text, answer in zip(texts, written, strict=True) if answer]
    if len({answer for _, answer in pairs}) > 1 and (found := _at_one_key(pairs) or _at_an_end(pairs)):
        return found
    leaves = [_leaves(answer) for answer in answers]
    shared = set.intersection(*map(set, leaves))
    columns = [[each[path] for each in leaves] for path in sorted(shared)]
    places = [_gives_away(subject, texts, column) for column in columns if len(set(column)) > 1]
    if places and all(places):
        return " and ".join(places[:3])
    numbers = [number for answer in answers if (number := _number_of(answer)) is not None]
    followed = _relation(texts, numbers, min(MANY, max(2, len(tasks)))) if len(numbers) == len(tasks) else None
    return f"as {followed[0]}" if followed else ""


def _at_one_key(pairs: Sequence[tuple[str, str]]) -> str:
    """Whether all texts are JSON and have their answer at the same keys."""
    found: list[set[str]] = []
    with contextlib.suppress(msgspec.DecodeError):
        for text, answer in pairs:
            found.append({path for path, value in _values(msgspec.json.decode(text)) if _written(value) == answer})
    paths = sorted(set.intersection(*found)) if len(found) == len(pairs) else []
    return f"at {paths[0]}" if paths else ""


def _at_an_end(pairs: Sequence[tuple[str, str]]) -> str:
    """Whether all texts begin or all end with their answer."""
    pairs = [(text.strip(" .!\n"), answer) for text, answer in pairs]
    if all(any(found.start() == 0 for found in _places(answer, text)) for text, answer in pairs):
        return "at its start"
    is_last = all(any(found.end() == len(text) for found in _places(answer, text)) for text, answer in pairs)
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
    return {path: str(each) for path, each in _values(value, unread=unread) if type(each) in (str, int, float)}


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
        place = at(*(each.function for each in tools_for(subject) if each.name == tool))
        seen = f"{path} has the answer {found}, such as {shown(texts[0])}{place}"
        raise FailedError(f"read the schema of the tool {tool}", seen, LEAVE_OUT)


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
        async with ready(subject, task) as run:
            schemas = [schema_of(tool)["function"] for tool in run.own_tools]
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

    def with_values(**values: Any) -> Callable[[Task], dict[str, Any]]:
        return lambda task: {**usual, **values}

    yield "invented arguments", with_values()
    texts = [name for owner, name, _ in text_arguments(subject) if owner.name == tool.name]
    for value in HINTS if texts else ():
        yield f"{value!r}", with_values(**dict.fromkeys(texts, value))
    description = schema_of(tool)["function"].get("description", "")
    for name, kinds in parameters_of(tool).items():
        for value in itertools.islice(_choices(kinds, description), CHOICES_MAX):
            yield f"{name}={value!r}", with_values(**{name: value})
    calls = [(each.task, call.arguments) for each in subject.expert for call in calls_of(each, tool.name)]

    def of_another(task: Task) -> dict[str, Any]:
        own = [arguments for other, arguments in calls if other == task]
        return next((arguments for other, arguments in calls if other != task and arguments not in own), usual)

    if calls:
        yield "the arguments of another task", of_another
    if texts and re.search(r"\bsql\b|\bselect\b", str(schema_of(tool)), re.IGNORECASE):
        tables = dict[str, None]()
        for listing in LISTINGS:  # how databases list their tables
            (text,) = _results_of(subject, tool, subject.tasks[:1], with_values(**{texts[0]: listing}))
            if not text.startswith("Error:"):
                tables |= dict.fromkeys(re.findall(r"[A-Za-z_]\w*", text))
        for table in itertools.islice(tables, TABLES_MAX):
            statement = f"select * from {table}"
            yield repr(statement), with_values(**{texts[0]: statement})


def _choices(kinds: Sequence[Mapping[str, Any]], description: str) -> Iterator[Any]:
    """What an argument may be: each of its choices, small numbers, the bounds, and the words that are quoted."""
    for schema in kinds:
        yield from schema.get("enum", ())
        yield from (schema[key] for key in ("const", "minimum", "maximum") if key in schema)
        kind = schema.get("type")
        yield from (True, False) if kind == "boolean" else NUMBERS if kind in ("integer", "number") else ()
        if kind == "string":
            yield from re.findall(r"[\"'`](\w+)[\"'`]", f"{schema.get('description', '')} {description}")


def _results_of(
    subject: Subject, tool: ToolMethod, tasks: Sequence[Task], arguments: Callable[[Task], dict[str, Any]]
) -> list[str]:
    """The tool's result in each task, without separators of thousands."""

    async def results() -> list[str]:
        found = []
        for task in tasks:
            async with ready(subject, task) as run:
                found.append(await call_tool(run, tool.name, arguments(task)))
        return found

    return [SEPARATED.sub("", text) for text in in_trio(results)]


# --- codes and numbers ------------------------------------------------------------------------------------------------


NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w]|\.\d)")
MANY = 5  # different numbers that do not follow one rule by chance
PLACES_MAX = 6  # numbers from the start and from the end of a text
DIGITS_MAX = 15  # longer numbers are not exact
WRONG_REPLY = "?"
SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


class Code(NamedTuple):
    """A way to hide an answer in a text: `decoded` reads the text, or `encoded` writes the answer. If `is_placed`, an
    honest text may have it, so it counts only at a fixed place.
    """

    words: str
    decoded: Callable[[str], str] = str
    encoded: Callable[[str], str] = str
    is_placed: bool = False


def _decoder(pattern: str, decode: Callable[[str], str]) -> Callable[[str], str]:
    """Reads each part of a text that the pattern matches. A part that means nothing stays as it is."""

    def meaning(found: re.Match[str]) -> str:
        try:
            read = decode(found[0])
        except ValueError:
            return found[0]
        return read if read.strip().isprintable() else found[0]

    return lambda text: re.sub(rf"(?<!\w){pattern}(?!\w)", meaning, text)


def _letters(unit: str, separators: str, base: int) -> Callable[[str], str]:
    """Reads numbers, each of which is the code of a letter."""

    def decode(part: str) -> str:
        return "".join(chr(int(number, base)) for number in re.findall(unit, part))

    return _decoder(f"{unit}(?:{separators}{unit})*", decode)


def _from_base64(part: str) -> str:
    plain = part.rstrip("=").translate({ord("-"): "+", ord("_"): "/"})
    return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True).decode()


def _in_words(answer: str) -> str:
    """A number below a million in words; empty for another answer."""
    if not answer.isdecimal() or len(answer) > 6:
        return ""
    number = int(answer)
    for size, unit in ((1000, "thousand"), (100, "hundred")):
        if number >= size:
            rest = f" {_in_words(str(number % size))}" if number % size else ""
            return f"{_in_words(str(number // size))} {unit}{rest}"
    if number < len(SMALL):
        return SMALL[number]
    return TENS[number // 10] + (f" {SMALL[number % 10]}" if number % 10 else "")


_SPELLED = r"[^\W_]([ .,;_*|/-]{1,3})[^\W_](?:\1[^\W_])+"

CODES = (
    Code("in base64", _decoder(r"[\w+/-]{2,}={0,2}", _from_base64)),
    Code("in hexadecimal", _letters(r"(?:0x)?[\da-fA-F]{2}", "[ :,-]?", 16)),
    Code("as the codes of its letters", _letters(r"\d{2,3}", "[ ,;:-]+", 10)),
    Code("letter by letter", _decoder(_SPELLED, lambda part: re.sub(r"[\W_]", "", part))),
    Code("in reverse", encoded=lambda answer: answer[::-1]),
    Code("in rot13", encoded=lambda answer: codecs.encode(answer, "rot13")),
    Code("in words", lambda text: re.sub(r"[\s-]+(?:and\s+)?", " ", text.lower()), _in_words, is_placed=True),
)
"""The codes in which an answer is looked for."""


def _look_for_numbers(subject: Subject) -> list[str]:
    """Notes on prompts in which each answer is a number plus a constant, a constant less it, or a multiple of it.

    Raises FailedError if the number is one of several that vary: then it is probably not the question.
    """
    tasks = _distinct(subject.drawn)
    numbers = [(_prompt(task), number) for task in tasks if (number := _number_of(task.answer)) is not None]
    prompts = [prompt for prompt, _ in numbers]
    found = _relation(prompts, [number for _, number in numbers])
    if found is None:
        return []
    words, is_sum = found
    seen = f"each answer is {words} of the prompt, such as {shown(prompts[0])}{subject.at('tasks')}"
    varying = sum(len(set(column)) > 1 for column in zip(*map(_numbers, prompts), strict=False))
    if is_sum and varying > 2:
        raise FailedError(IN_PROMPTS, seen, LEAVE_OUT)
    return [f"{seen}; this is the task, or gives it away"]


def _relation(texts: Sequence[str], answers: Sequence[float], many: int = MANY) -> tuple[str, bool] | None:
    """How each answer follows from the number at one place of its text, by a constant that the texts do not have; and
    whether it is a difference or a sum. None if it does not, or if there are fewer than `many` different answers.
    """
    numbers = [_numbers(text) for text in texts]
    if len(set(answers)) < many:
        return None
    fewest = min(PLACES_MAX, *map(len, numbers))
    for place in (*range(fewest), *range(-1, -fewest - 1, -1)):
        column = [each[place] for each in numbers]
        where = f"number {place + 1}" if place >= 0 else f"number {-place} from the end"
        for words, constant, is_sum in _constants(column, answers) if len(set(column)) >= many else ():
            if constant not in (0.0, 1.0, -1.0) and not all(abs(constant) in each for each in numbers):
                return words.format(where, constant), is_sum
    return None


def _constants(column: Sequence[float], answers: Sequence[float]) -> Iterator[tuple[str, float, bool]]:
    pairs = list(zip(column, answers, strict=True))
    differences = {round(answer - each, 6) for each, answer in pairs}
    sums = {round(answer + each, 6) for each, answer in pairs}
    ratios = {round(answer / each, 6) if each else None for each, answer in pairs}
    if len(differences) == 1:
        yield "the {} plus {:g}", differences.pop(), True
    if len(sums) == 1:
        yield "{1:g} less the {0}", sums.pop(), True
    if len(ratios) == 1 and (ratio := ratios.pop()) is not None:
        yield "the {} times {:g}", ratio, False


def _numbers(text: str) -> list[float]:
    return [float(each) for each in NUMBER.findall(text) if len(each) <= DIGITS_MAX]


def _number_of(answer: Any) -> float | None:
    """An answer as a number; None if it is none."""
    if isinstance(answer, bool) or not isinstance(answer, int | float | str) or len(str(answer)) > DIGITS_MAX:
        return None
    try:
        return float(answer)
    except ValueError:
        return None


def _look_in_replies(subject: Subject) -> None:
    """Raise FailedError if the environment answers a wrong reply with the task's answer, and then pays for it."""
    if not subject.has("reply"):
        return
    pairs = judged(subject)
    answers = [str(each.task.answer) if isinstance(each.task.answer, str | int | float) else "" for each, _ in pairs]

    async def given_away() -> str:
        """What `reply` says in the last task; empty if the answer is not given away in every task."""
        text = ""
        for (each, wanted), answer in zip(pairs, answers, strict=True):
            played = await play(subject, each.task, says(WRONG_REPLY, answer), turns=2)
            said = played.trajectory.messages[len(each.task.messages) + 1 :]
            text = said[0].text if said and said[0].role == "user" else ""
            is_shown = answer and re.search(word(answer), text, re.IGNORECASE)
            if not is_shown or played.reward is None or played.reward < wanted - SLACK:
                return ""
        return text

    text = in_trio(given_away) if len(set(answers)) > 1 else ""
    tried = f"reply with {WRONG_REPLY!r}, then with the answer, in every task"
    attempt = subject.attempt(tried, "reply", change="end the episode there, or pay less for an answer that was shown")
    attempt.require(not text, f"`reply` shows the answer, such as {shown(text)}, and the next reply earns the reward")
