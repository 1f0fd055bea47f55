"""Answers that are shown indirectly: in a code, as a number that differs by a constant, or in a reply."""

from __future__ import annotations

import base64
import codecs
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from rollouts.author_code import place_of_function, shown
from rollouts.types import Task
from rollouts_check.environments.agents import in_trio, play, says
from rollouts_check.environments.rewards import SLACK, judged
from rollouts_check.environments.subject import Subject
from rollouts_check.report import FailedError

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
    for size, word in ((1000, "thousand"), (100, "hundred")):
        if number >= size:
            rest = f" {_in_words(str(number % size))}" if number % size else ""
            return f"{_in_words(str(number // size))} {word}{rest}"
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


def look_for_numbers(subject: Subject) -> list[str]:
    """Notes on prompts in which each answer is a number plus a constant, a constant less it, or a multiple of it.

    Raises FailedError if the number is one of several that vary: then it is probably not the question.
    """
    tasks = [each for each in {task.key: task for task in subject.drawn}.values() if number_of(each.answer) is not None]
    prompts = ["\n".join(message.text for message in task.messages) for task in tasks]
    found = relation(prompts, [number_of(task.answer) or 0.0 for task in tasks])
    if found is None:
        return []
    words, is_sum = found
    place = place_of_function(getattr(subject.component, "tasks", None))
    seen = f"each answer is {words} of the prompt, such as {shown(prompts[0])}" + (f" ({place})" if place else "")
    varying = sum(len(set(column)) > 1 for column in zip(*map(_numbers, prompts), strict=False))
    if is_sum and varying > 2:
        raise FailedError("look for the answers in the prompts", seen, "leave the answer out of the prompt")
    return [f"{seen}; this is the task, or gives it away"]


def relation(texts: Sequence[str], answers: Sequence[float], many: int = MANY) -> tuple[str, bool] | None:
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


def number_of(answer: Any) -> float | None:
    """An answer as a number; None if it is none."""
    if isinstance(answer, bool) or not isinstance(answer, int | float | str) or len(str(answer)) > DIGITS_MAX:
        return None
    try:
        return float(answer)
    except ValueError:
        return None


def shown_by_number(tasks: Sequence[Task], texts: Sequence[str]) -> str:
    """How the results of a tool show the answers by a constant difference, sum or ratio. Empty if they do not."""
    answers = [number_of(task.answer) for task in tasks]
    known = [each for each in answers if each is not None]
    found = relation(texts, known, min(MANY, max(2, len(tasks)))) if len(known) == len(tasks) else None
    return f"as {found[0]}" if found else ""


def look_in_replies(subject: Subject) -> None:
    """Raise FailedError if the environment answers a wrong reply with the task's answer, and then pays for it."""
    if not subject.has("reply"):
        return
    pairs = judged(subject)
    answers = [str(each.task.answer) if isinstance(each.task.answer, str | int | float) else "" for each, _ in pairs]

    async def given_away() -> list[str]:
        texts = []
        for (each, wanted), answer in zip(pairs, answers, strict=True):
            agent = says(WRONG_REPLY, answer)
            played = await play(subject, each.task, agent, turns=2)
            said = played.trajectory.messages[len(each.task.messages) + 1 :]
            text = said[0].text if said and said[0].role == "user" else ""
            is_shown = re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE) if answer else None
            if is_shown is None or played.reward is None or played.reward < wanted - SLACK:
                return []
            texts.append(text)
        return texts

    if len(set(answers)) > 1 and (texts := in_trio(given_away)):
        place = place_of_function(getattr(subject.component, "reply", None))
        seen = f"`reply` shows the answer, such as {shown(texts[0])}, and the next reply earns the reward ({place})"
        tried = f"reply with {WRONG_REPLY!r}, then with the answer, in every task"
        raise FailedError(tried, seen, "end the episode there, or pay less for an answer that was shown")
