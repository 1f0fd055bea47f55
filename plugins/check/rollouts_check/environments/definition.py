"""Checks of the package, of the class and its settings, and of tasks and demonstrations."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rollouts.author_code import message_of, place_of_parameter, shown
from rollouts.config.files import load_as_written
from rollouts.config.render import to_toml
from rollouts.config.resolving import resolve
from rollouts.config.settings import is_secret
from rollouts.encoding import encode
from rollouts.env.authoring import metrics_of, rewards_of, tools_of
from rollouts.env.checks import check_environment
from rollouts.errors import ConfigError, EnvironmentDefinitionError, counted
from rollouts.plugins.manager import PluginManager
from rollouts.runs.components import choose, completed
from rollouts.types import Task
from rollouts_check.environments import agents, traces
from rollouts_check.environments.subject import DRAWN, Subject
from rollouts_check.packages import Found
from rollouts_check.report import Attempt, FailedError, Passed, SkippedError


def definition(subject: Subject) -> str:
    """The methods, marks and signatures of the class are those that a run accepts. The constructor leaves nothing.

    Advice: open it in `setup`, and end it in `close`: `close` runs for objects of an episode only
    """
    subject.kept["process"] = traces.state_of_process()
    env = subject.environment.make_checked()
    with traces.own_temporary_folder(subject.scratch / "constructor") as folder:
        left = traces.Leftovers(folder)
        for _ in range(2):
            subject.environment.make_checked()
        gc.collect()
        left.require_none(subject.attempt("make two objects that play no episode", "__post_init__", "__init__"))
    try:
        check_environment(env)
    except EnvironmentDefinitionError as error:
        raise FailedError("read the class", message_of(error), "correct this method") from error
    numbers = (("tool", tools_of(env)), ("reward", rewards_of(env)), ("metric", metrics_of(env)))
    return ", ".join(counted(len(found), word) for word, found in numbers)


def at_setting(component: Any, name: str) -> str:
    """The line of a setting, in parentheses; empty if it is unknown."""
    place = place_of_parameter(component, name)
    return f" ({place})" if place else ""


def settings(subject: Subject) -> str:
    """The settings can be written to a settings file and read back, and give an equal environment.

    Advice: give every setting a default that TOML can hold: text, numbers, lists, tables with text keys
    """
    chosen, own = subject.environment.chosen, subject.resolved.components["env"]
    whole = {"env": completed({"env": own}, {"env": [chosen]})["env"], "reward": []}
    tried = "write the settings to a TOML file, as a run does, and read them back"
    file = subject.scratch / "settings.toml"
    try:
        text = to_toml(resolve({}).without_secrets()._replace(components={**resolve({}).components, **whole}))
        file.write_text(text[text.index("[env]") :].partition("\n[")[0], encoding="utf-8")
        tree, source = load_as_written(file)
        read = resolve(tree, source.with_objects(subject.resolved.source.objects))
        manager = PluginManager(read.source.objects.components)
        (again,) = choose(manager, {"env": read.components["env"]}, read.source)["env"]
    except ConfigError as error:
        raise FailedError(tried, message_of(error)) from error
    for name, value in chosen.settings.items():
        back = again.settings.get(name)
        if not is_secret(name) and (type(back) is not type(value) or back != value):
            seen = f"{name} was {shown(value)} and is {shown(back)} afterwards{at_setting(subject.component, name)}"
            raise FailedError(tried, seen, f"give the setting {name} a type hint and a default that TOML can hold")
    if dataclasses.is_dataclass(subject.component):
        one, other = (subject.environment._replace(chosen=each).make_checked() for each in (chosen, again))
        change = "do not compare by what is no setting: field(init=False, compare=False) for state of an episode"
        differ = f"two objects with these settings differ: {shown(one)} and {shown(other)}"
        subject.attempt(tried, change=change).require(one == other, differ)
    return counted(len(chosen.settings), "setting")


# --- the package ------------------------------------------------------------------------------------------------------


FORBIDDEN = ("torch", "transformers", "tensorflow", "jax", "vllm", "sglang")
IMPORT_SECONDS = 3.0


def imports(subject: Subject) -> str:
    """The import is fast, loads no torch, opens no connection, starts nothing, and leaves signals and the working
    directory alone.

    Advice: import it inside the function that needs it: an environment may run where it is not installed
    """
    return check_import(subject.found)


def check_import(found: Found, *, first: Sequence[str] = ()) -> str:
    """Import the component in a process of its own, and judge how long it takes, and what it imports and opens. The
    modules `first` are imported before, and allowed.
    """
    if not found.is_importable:
        raise SkippedError("it has no name that another process can import")
    forbidden = () if "torch" in first else FORBIDDEN
    for _ in range(2):  # the first import may compile
        seen = import_in([sys.executable], found.kind, found.name, sys.path, first=first, forbidden=forbidden)
        if seen["seconds"] < IMPORT_SECONDS:
            break
    attempt = Attempt("import it in a process of its own")
    for name, place in seen["modules"].items():
        raise attempt.failed(f"it imports {name}" + (f" ({place})" if place else ""))
    for did, place in seen["effects"].items():
        change = "do it where it is used, not when the module is imported"
        raise attempt.failed(did + (f" ({place})" if place else ""), change)
    words = f"let it take less than {IMPORT_SECONDS:g} s: load data and models where they are used"
    attempt.require(seen["seconds"] < IMPORT_SECONDS, f"it took {seen['seconds']:.1f} seconds, twice", words)
    return f"{seen['seconds']:.2f} s"


def import_in(
    python: list[str], kind: str, name: str, path: list[str] | None = None, **modules: Sequence[str]
) -> dict[str, Any]:
    """What a Python saw of the import of a component: see `child`. `path` is its `sys.path`; None: its own. `modules`
    are imported `first`, and `forbidden`.
    """
    request = {"kind": kind, "name": name, "first": (), "forbidden": (), **modules}
    found: dict[str, Any] = traces.ask_child(python, "import", request, {}, path)
    return found


def wheel(subject: Subject) -> str:
    """The package builds, installs into a new virtual environment, and gives tasks there."""
    package = subject.found.its_package()
    installed = package.installed()
    name = package.qualified(subject.found.label)
    drawn = traces.ask_child_of(subject, "draw", python=installed.python, name=name, hash_seed="0", count=3)
    installed.check_module(drawn["file"])
    return f"{installed.remark}{package.stale('environments')}"


# --- tasks and demonstrations -----------------------------------------------------------------------------------------


IDS_MAX = 1000  # tasks whose ids are compared
IDS_SECONDS = 10.0  # how long tasks are drawn to compare their ids
ENDLESS = 20_000  # an iterator with more tasks counts as endless
ENDLESS_SECONDS = 5.0
DEMONSTRATIONS = 10  # demonstrations that are compared
DRAWN_FROM_RNG = "draw only from `rng`: not from the global `random`, the time, ids of objects, or the order of a set"
LEFT_BY_TASKS = "drawing left something that later draws see: change no list of the class or the module; copy it first"


def tasks(subject: Subject) -> str:
    """`tasks` gives tasks for training. Each has a prompt that a model can read, and its own data.

    Advice: make new lists and mappings for each task
    """
    attempt = subject.attempt("read the tasks", "tasks")
    attempt.require(subject.drawn, "tasks('train', rng) gave nothing", "yield at least one Task for 'train'")
    evaluated = subject.draw(DRAWN, "eval")
    for task in [*subject.drawn, *evaluated]:
        has_prompt = any(message.text.strip() for message in task.messages)
        attempt.require(has_prompt, f"a task has an empty prompt: {shown(task)}", "give each task a prompt")
    drawn = [(task, encode(task)) for task in itertools.islice(subject.environment.draw("train", subject.rng()), DRAWN)]
    for number, (task, before) in enumerate(drawn, start=1):
        difference = traces.first_difference(before, encode(task))  # two tasks have a list or a mapping in common
        attempt.require(not difference, f"task {number} changed when later ones were drawn: {difference}")
    counts = [f"{DRAWN} or more" if len(each) >= DRAWN else len(each) or "none" for each in (subject.drawn, evaluated)]
    return f"{counts[0]} for training, {counts[1]} for evaluation"


def demonstrations(subject: Subject) -> str:
    """Demonstrations belong to tasks of the environment, so that they can be replayed."""
    return f"{counted(len(subject.demonstrations), 'demonstration')} of known tasks"


def same_seed(subject: Subject) -> str:
    """The same seed gives the same tasks: again, in another object, and in processes with another hash seed or date."""
    wanted = [encode(task) for task in subject.drawn]  # no episode changes these: each plays a copy
    for split in ("train", "eval"):
        first = wanted if split == "train" else [encode(task) for task in subject.draw(DRAWN, split)]
        before = traces.kept_by_author(subject)
        again = [encode(task) for task in subject.draw(DRAWN, split)]
        left = traces.changes(before, traces.kept_by_author(subject))
        _compare(subject, first, again, f"draw the tasks of the split {split!r} twice with the same seed", left)
    if subject.expert:
        draws = (subject.environment.draw_demonstrations("train", subject.rng()) for _ in range(2))
        one, other = ([encode(each) for each in itertools.islice(draw, DEMONSTRATIONS)] for draw in draws)
        _compare(subject, one, other, "read the demonstrations twice with the same seed", what="demonstration")
    if not subject.found.is_importable:
        return f"{counted(len(wanted), 'task')}; not in another process, because the class has no importable name"
    for hash_seed, is_late in (("1", False), ("2", True)):
        found = traces.ask_child_of(subject, "draw", hash_seed=hash_seed, count=DRAWN, is_late=is_late)["tasks"]
        tried = f"draw the tasks in a process with PYTHONHASHSEED={hash_seed}{' at another date' if is_late else ''}"
        _compare(subject, wanted, [each.encode() for each in found], tried)
    return f"{counted(len(wanted), 'task')}, in 3 processes"


def task_ids(subject: Subject) -> Passed:
    """Two different tasks never have the same id, and evaluation tasks are not training tasks with other ids.

    Advice: make the id from everything that distinguishes the task, or leave it out
    """
    known: dict[str, Task] = {}
    prompts: dict[bytes, Task] = {}
    notes: list[str] = []
    splits = {split: subject.draw(IDS_MAX, split, seconds=IDS_SECONDS) for split in ("train", "eval")}
    attempt = subject.attempt(f"compare the first {IDS_MAX} tasks of each split", "tasks")
    for task in [*splits["train"], *splits["eval"]]:
        other = prompts.setdefault(encode(task.messages), task) if task.id is None else known.setdefault(task.id, task)
        if encode(other) == encode(task):
            continue
        attempt.require(task.id is None, f"the id {task.id!r} belongs to {shown(other)} and to {shown(task)}")
        if not notes:
            why = f"two tasks without ids have the prompt {shown(task.key)} and differ{subject.at('tasks')}"
            notes.append(f"{why}; a run takes them for one task: give them ids")
    if note := _renamed(subject, splits["train"], splits["eval"]):
        notes.append(note)
    if not known and not notes:
        raise SkippedError("the tasks have no ids")
    return Passed(counted(len(known), "different id"), notes)


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
    seen = f"{count} are training tasks with another id, such as {one.key!r} and {other.key!r}{subject.at('tasks')}"
    if 2 * len(found) < len(evaluated):
        return f"{seen}; give equal tasks equal ids"
    change = "evaluate on tasks that are not trained, or give equal tasks equal ids"
    raise FailedError(f"compare the first {IDS_MAX} tasks of each split", seen, change)


def seeds_differ(subject: Subject) -> str:
    """Endless tasks depend on the seed.

    Advice: draw from the argument `rng`, or return a list
    """
    drawn = [[encode(task) for task in subject.draw(DRAWN, purpose=f"seed {number}")] for number in range(3)]
    if drawn[0] != drawn[1] or drawn[0] != drawn[2]:
        return "3 seeds"
    begun = time.monotonic()
    tasks = enumerate(subject.environment.draw("train", subject.rng()))
    is_endless = any(count >= ENDLESS or time.monotonic() - begun > ENDLESS_SECONDS for count, _ in tasks)
    if len(set(drawn[0])) < len(drawn[0]) or not is_endless:
        raise SkippedError("the tasks are the same for each seed, and they end or repeat themselves")
    attempt = subject.attempt("draw tasks with 3 seeds", "tasks")
    raise attempt.failed(f"the first {counted(len(drawn[0]), 'task')} are the same, and the tasks do not end")


def random_state(subject: Subject) -> str:
    """The global random generators are not used: not by tasks, not by an episode, not by rewards.

    Advice: use the argument `rng` of `tasks`; in an episode, make a generator: random.Random(task.key)
    """
    with traces.random_calls() as calls:
        subject.draw(DRAWN)
        first = subject.tasks[:1]
        replies = [agents.script_for(subject, task) for task in first]
        agents.play_each(subject, first, [agents.says(*script) for script in replies], turns=max(map(len, replies)))
    if calls:
        raise FailedError("draw tasks and play an episode", "; ".join(calls[:3]))
    return "random, numpy" if "numpy" in sys.modules else "random"


def plain_data(subject: Subject) -> str:
    """Tasks are plain JSON data: text, numbers, booleans, None, lists, and dicts with text keys.

    Advice: write lists for tuples, and text for other objects: task.answer of a worker is read from JSON
    """
    for task in [*subject.drawn, *subject.draw(DRAWN, "eval")]:
        prompt = [message.content for message in task.messages]
        attempt = subject.attempt("read the tasks", "tasks")
        for name, value in (("answer", task.answer), ("info", task.info), ("prompt", prompt)):
            attempt.require(not (fault := next(_not_plain(value, f"task.{name}"), "")), fault)
    for demonstration in subject.expert:
        arguments = [call.arguments for reply in demonstration.replies for call in reply.tool_calls]
        for fault in _not_plain(arguments, "the arguments of a demonstration's calls"):
            raise FailedError("read the demonstrations", fault, "write the arguments as a model does: in plain JSON")
    return counted(len(subject.drawn), "task")


def _not_plain(value: Any, place: str, depth: int = 0) -> Iterator[str]:
    """What in a value JSON changes or cannot hold, with its place; nothing for plain data."""
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
    subject: Subject, wanted: list[bytes], other: list[bytes], tried: str, left: Sequence[str] = (), what: str = "task"
) -> None:
    """Raise FailedError for the first difference. `left` is what drawing left behind."""
    for number, (first, second) in enumerate(itertools.zip_longest(wanted, other), start=1):
        if first != second:
            causes = [f"; {each}" for each in left[:2] or traces.random_sources(subject)]
            found = f"{traces.first_difference(first, second)}{subject.at(f'{what}s')}{''.join(causes)}"
            raise FailedError(tried, f"{what} {number} differs: {found}", LEFT_BY_TASKS if left else DRAWN_FROM_RNG)
