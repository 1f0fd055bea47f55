"""Checks of tasks and demonstrations."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rollouts.author_code import place_of_function, shown
from rollouts.encoding import encode
from rollouts.errors import counted
from rollouts.types import Message, Task
from rollouts_check.environments.agents import play_each, says, script_for
from rollouts_check.environments.subject import DRAWN, Subject
from rollouts_check.environments.surroundings import changes, kept_by_author
from rollouts_check.environments.traces import draw_in_child, first_difference, random_calls, random_sources
from rollouts_check.report import FailedError, Passed, SkippedError

IDS_MAX = 1000  # tasks whose ids are compared
IDS_SECONDS = 10.0  # how long tasks are drawn to compare their ids
ENDLESS = 20_000  # an iterator with more tasks counts as endless
ENDLESS_SECONDS = 5.0
DEMONSTRATIONS = 10  # demonstrations that are compared
DRAWN_FROM_RNG = (
    "draw only from `rng`; do not use the global `random`, the time, ids of objects, or the order of a set (sort it "
    "first)"
)
LEFT_BY_TASKS = "drawing left something that later draws see: change no list of the class or the module; copy it first"


def tasks(subject: Subject) -> str:
    """`tasks` gives tasks for training. Each has a prompt that a model can read, and its own data."""
    if not subject.drawn:
        seen = f"tasks('train', rng) gave nothing{_at(subject)}"
        raise FailedError("read the training tasks", seen, "yield at least one Task for the split 'train'")
    evaluated = subject.draw(DRAWN, "eval")
    for split, found in (("training", subject.drawn), ("evaluation", evaluated)):
        for task in found:
            if not any(message.text.strip() for message in task.messages):
                seen = f"a task has an empty prompt: {shown(task)}{_at(subject)}"
                raise FailedError(f"read the {split} tasks", seen, "give each task a prompt")
    _require_own_data(subject)
    return f"{_number(subject.drawn)} for training, {_number(evaluated)} for evaluation"


def _require_own_data(subject: Subject) -> None:
    """Raise FailedError if a task changes when later ones are drawn: they have one list or mapping in common."""
    drawn = [(task, encode(task)) for task in itertools.islice(subject.environment.draw("train", subject.rng()), DRAWN)]
    for number, (task, before) in enumerate(drawn, start=1):
        if difference := first_difference(before, encode(task)):
            seen = f"task {number} changed when later ones were drawn: {difference}{_at(subject)}"
            raise FailedError("read the training tasks", seen, "make new lists and mappings for each task")


def demonstrations(subject: Subject) -> str:
    """Demonstrations belong to tasks of the environment, so that they can be replayed."""
    return f"{counted(len(subject.demonstrations), 'demonstration')} of known tasks"


def same_seed(subject: Subject) -> str:
    """The same seed gives the same tasks: again, in another object, and in processes with another hash seed or date."""
    wanted = [encode(task) for task in subject.drawn]  # no episode changes these: each plays a copy
    for split in ("train", "eval"):
        first = wanted if split == "train" else [encode(task) for task in subject.draw(DRAWN, split)]
        before = kept_by_author(subject)
        again = [encode(task) for task in subject.draw(DRAWN, split)]
        left = changes(before, kept_by_author(subject))
        tried = "draw the tasks twice with the same seed" + (f", for the split {split!r}" if split != "train" else "")
        _compare(subject, first, again, tried, left)
    one, other = ([encode(each) for each in _demonstrations(subject)] for _ in range(2))
    _compare(subject, one, other, "read the demonstrations twice with the same seed", what="demonstration")
    if not subject.is_importable:
        return f"{counted(len(wanted), 'task')}; not in another process, because the class has no importable name"
    for hash_seed, is_late in (("1", False), ("2", True)):
        other = draw_in_child(subject, DRAWN, hash_seed, is_late=is_late)
        tried = f"draw the tasks in another process, with PYTHONHASHSEED={hash_seed}"
        _compare(subject, wanted, other, tried + (" and at another date" if is_late else ""))
    return f"{counted(len(wanted), 'task')}, in 3 processes"


def _demonstrations(subject: Subject) -> list[list[Message]]:
    """The first demonstrations; none if there are none."""
    if not subject.expert:
        return []
    return list(itertools.islice(subject.environment.draw_demonstrations("train", subject.rng()), DEMONSTRATIONS))


def task_ids(subject: Subject) -> Passed:
    """Two different tasks never have the same id, and evaluation tasks are not training tasks with other ids."""
    known: dict[str, Task] = {}
    prompts: dict[bytes, Task] = {}
    notes: list[str] = []
    splits = {split: subject.draw(IDS_MAX, split, seconds=IDS_SECONDS) for split in ("train", "eval")}
    for task in [*splits["train"], *splits["eval"]]:
        if task.id is None:
            other = prompts.setdefault(encode(task.messages), task)
            if encode(other) != encode(task) and not notes:
                why = f"two tasks without ids have the prompt {shown(task.key)} and differ{_at(subject)}"
                notes.append(f"{why}; a run takes them for one task: give them ids")
            continue
        first = known.setdefault(task.id, task)
        if encode(first) != encode(task):
            seen = f"the id {task.id!r} belongs to {shown(first)} and to {shown(task)}{_at(subject)}"
            change = "make the id from everything that distinguishes the task, or leave it out"
            raise FailedError(f"compare the ids of the first {IDS_MAX} tasks of each split", seen, change)
    if note := _renamed(subject, splits["train"], splits["eval"]):
        notes.append(note)
    if not known and not notes:
        raise SkippedError("the tasks have no ids")
    return Passed(counted(len(known), "different id"), tuple(notes))


def _renamed(subject: Subject, train: Sequence[Task], held_out: Sequence[Task]) -> str:
    """A note if some evaluation tasks are training tasks with another id. Raises FailedError if half of them are. Tasks
    that differ in nothing but their ids are different: the id may be what they are made from.
    """
    trained: dict[bytes, dict[str, Task]] = {}
    for task in train:
        trained.setdefault(encode((task.messages, task.answer)), {})[task.key] = task
    if 2 * len(trained) < len({task.key for task in train}):
        return ""
    evaluated = {task.key: task for task in held_out}
    same = [(trained.get(encode((task.messages, task.answer)), {}), task) for task in evaluated.values()]
    found = [(next(iter(others.values())), task) for others, task in same if others and task.key not in others]
    if not found:
        return ""
    (one, other), count = found[0], f"{len(found)} of {counted(len(evaluated), 'evaluation task')}"
    seen = f"{count} are training tasks with another id, such as {one.key!r} and {other.key!r}{_at(subject)}"
    if 2 * len(found) < len(evaluated):
        return f"{seen}; give equal tasks equal ids"
    change = "evaluate on tasks that are not trained, or give equal tasks equal ids"
    raise FailedError(f"compare the first {IDS_MAX} tasks of each split", seen, change)


def seeds_differ(subject: Subject) -> str:
    """Endless tasks depend on the seed."""
    drawn = [[encode(task) for task in subject.draw(DRAWN, purpose=f"seed {number}")] for number in range(3)]
    if drawn[0] != drawn[1] or drawn[0] != drawn[2]:
        return "3 seeds"
    if len(set(drawn[0])) < len(drawn[0]) or not _is_endless(subject.environment.draw("train", subject.rng())):
        raise SkippedError("the tasks are the same for each seed, and they end or repeat themselves")
    seen = f"the first {counted(len(drawn[0]), 'task')} are the same for 3 seeds, and the tasks do not end"
    change = "draw the tasks from the argument `rng`, or return a list"
    raise FailedError("draw tasks with 3 seeds", seen + _at(subject), change)


def random_state(subject: Subject) -> str:
    """The global random generators are not used: not by tasks, not by an episode, not by rewards."""
    with random_calls() as calls:
        subject.draw(DRAWN)
        first = subject.tasks[:1]
        replies = [script_for(subject, task) for task in first]
        play_each(subject, first, [says(*script) for script in replies], turns=max(map(len, replies)))
    if calls:
        change = (
            "use the argument `rng` of `tasks`; in an episode, make a generator of your own from the task: "
            "self.rng = random.Random(task.key)"
        )
        raise FailedError("draw tasks and play an episode", "; ".join(calls[:3]), change)
    return "random, numpy" if "numpy" in sys.modules else "random"


def plain_data(subject: Subject) -> str:
    """Tasks are plain JSON data: text, numbers, booleans, None, lists, and dicts with text keys."""
    for task in [*subject.drawn, *subject.draw(DRAWN, "eval")]:
        fields: list[tuple[str, Any]] = [("answer", task.answer), ("info", task.info)]
        fields += [("prompt", [message.content for message in task.messages])]
        for name, value in fields:
            if fault := not_plain(value, f"task.{name}"):
                change = "write lists for tuples, and text for other objects: task.answer of a worker is read from JSON"
                raise FailedError("read the tasks", fault + _at(subject), change)
    for demonstration in subject.expert:
        arguments = [call.arguments for reply in demonstration.replies for call in reply.tool_calls]
        if fault := not_plain(arguments, "the arguments of a demonstration's calls"):
            raise FailedError("read the demonstrations", fault, "write the arguments as a model does: in plain JSON")
    return counted(len(subject.drawn), "task")


def not_plain(value: Any, place: str) -> str:
    """What in a value JSON changes or cannot hold, with its place; empty for plain data."""
    return next(_not_plain(value, place, 0), "")


def _not_plain(value: Any, place: str, depth: int) -> Iterator[str]:
    if value is None or type(value) in (bool, int, str):
        return
    if type(value) is float:
        if not math.isfinite(value):
            yield f"{place} is {value}, which JSON does not have"
    elif type(value) is list and depth < 100:
        for number, each in enumerate(value):
            yield from _not_plain(each, f"{place}[{number}]", depth + 1)
    elif type(value) is dict and depth < 100:
        for key, each in value.items():
            if type(key) is not str:
                yield f"{place} has the key {shown(key)} ({type(key).__name__}), which becomes text"
            yield from _not_plain(each, f"{place}[{key!r}]", depth + 1)
    else:
        yield f"{place} is {shown(value)} ({type(value).__name__})"


def _compare(
    subject: Subject,
    wanted: list[bytes],
    other: list[bytes],
    tried: str,
    left: Sequence[str] = (),
    *,
    what: str = "task",
) -> None:
    """Raise FailedError for the first difference. `left` is what drawing left behind."""
    for number, (first, second) in enumerate(itertools.zip_longest(wanted, other), start=1):
        if first != second:
            sources = [f"; {each}" for each in left[:2] or random_sources(subject)]
            place = place_of_function(getattr(subject.component, f"{what}s", None))
            at = f" ({place})" if place else ""
            seen = f"{what} {number} differs: {first_difference(first, second)}{at}{''.join(sources)}"
            raise FailedError(tried, seen, LEFT_BY_TASKS if left else DRAWN_FROM_RNG)


def _is_endless(given: Iterator[Task]) -> bool:
    begun = time.monotonic()
    for count, _ in enumerate(given):
        if count >= ENDLESS or time.monotonic() - begun > ENDLESS_SECONDS:
            return True
    return False


def _number(found: list[Task]) -> str:
    return f"{DRAWN} or more" if len(found) >= DRAWN else str(len(found) or "none")


def _at(subject: Subject) -> str:
    place = place_of_function(getattr(subject.component, "tasks", None))
    return f" ({place})" if place else ""
