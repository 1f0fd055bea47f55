"""What a forger can imitate: the words, the calls and the files of an expert's episode."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rollouts.env.mixing import RewardTerm
from rollouts.types import Message, ToolCall
from rollouts_check.environments.agents import play_each, says
from rollouts_check.environments.rewards import judged_demonstrations
from rollouts_check.environments.subject import Demonstration, Subject

FILE_MAX = 100_000  # bytes of a file that is read


def text_of(answer: Any) -> str:
    """An answer that may be written in a text; empty for others."""
    return str(answer).strip().lower() if isinstance(answer, str | int | float) else ""


def word(text: str) -> str:
    """A pattern for the text, in small letters, as a whole word."""
    return rf"(?<!\w){re.escape(text.lower())}(?!\w)"


def phrased(each: Demonstration, answer: str) -> str:
    """The expert's last message with another answer. If the expert does not write its own answer once, and in a
    sentence, the answer alone.
    """
    own, text = text_of(each.task.answer), each.replies[-1].text.strip()
    places = list(re.finditer(word(own), text, re.IGNORECASE)) if own else []
    if len(places) != 1:
        return answer
    place = places[0]
    written = answer.upper() if place[0].isupper() else answer
    return text[: place.start()] + written + text[place.end() :]


def submissions(each: Demonstration) -> Iterator[tuple[ToolCall, str]]:
    """The expert's calls with the task's answer, each with the argument that is the answer."""
    own = text_of(each.task.answer)
    for call in (call for reply in each.replies for call in reply.tool_calls):
        yield from ((call, name) for name, value in call.arguments.items() if own and text_of(value) == own)


def said_to_expert(messages: Sequence[Message]) -> list[str]:
    """What tools and the environment said after the first message of the expert."""
    first = next((place for place, message in enumerate(messages) if message.role == "assistant"), len(messages))
    return [each.text for each in messages[first:] if each.role != "assistant" and each.text.strip()]


def left_by_experts(subject: Subject, folder: Path) -> list[dict[str, str]]:
    """The files at the end of each expert's episode, by name, without those that the expert wrote itself."""
    found: list[dict[str, str]] = []
    files: dict[str, str] = {}

    def record(env: Any) -> float:
        files.update(_file_texts(env, folder))
        return 0.0

    term = RewardTerm("rollouts_files", record, 0.0, {}, ("env",))
    for each in judged_demonstrations(subject):
        files.clear()
        play_each(subject, [each.task], [says(*each.replies)], turns=len(each.replies), rewards=(term,))
        written = [value for reply in each.replies for call in reply.tool_calls for value in call.arguments.values()]
        found.append({name: text for name, text in files.items() if text not in written})
    return found


def file_names(env: Any, folder: Path) -> list[str]:
    """The names of the files in temporary folders, and in folders that the environment knows."""
    return list(_files(env, folder))


def _file_texts(env: Any, folder: Path) -> dict[str, str]:
    found = {name: file for name, file in _files(env, folder).items() if file.stat().st_size <= FILE_MAX}
    return {name: file.read_text(encoding="utf-8", errors="replace") for name, file in found.items()}


def _files(env: Any, folder: Path) -> dict[str, Path]:
    values = [value for value in getattr(env, "__dict__", {}).values() if isinstance(value, str | Path)]
    known = [Path(value) for value in values if isinstance(value, Path) or os.sep in value]
    folders = [each for each in (*known, *folder.iterdir()) if each.is_dir()]
    files = [(str(file.relative_to(each)), file) for each in folders for file in sorted(each.rglob("*"))]
    return dict([(name, file) for name, file in files if file.is_file()][:20])
