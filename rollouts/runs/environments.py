"""The environments of a run: their tasks and demonstrations, and in which shares they are mixed.

A single environment has no alias, and its random numbers depend on the run's seed only. Each of several environments
has its own random numbers, and its tasks have its alias (`Task.env`). An exception of an author's code becomes an
EnvironmentDefinitionError that names the environment; if a module is missing, it says what to install. Held-out tasks
are neither trained on nor demonstrated. The order of tasks depends on the seed and not on the number of steps, so a
resumed run continues in the same order. Not here: how episodes are played, and how a conversation becomes tokens
(`chat.masks`).
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec

from rollouts.author_code import authors_code, shown
from rollouts.config.files import Source
from rollouts.config.merging import Component
from rollouts.config.settings import Settings
from rollouts.env.authoring import ToolMethod, WorkerEnvironment, of_role, roles_of, tools_of
from rollouts.env.checks import check_source, check_text
from rollouts.env.methods import as_conversation, as_task, inputs_of, with_inputs
from rollouts.env.schema import schema_of
from rollouts.env.shared import SharedValue, shared_value
from rollouts.env.threads import AuthorThread
from rollouts.env.toolsets import AddedTool, Toolset, known_tools
from rollouts.errors import (
    ConfigError,
    EnvironmentDefinitionError,
    RolloutsError,
    counted,
    in_lines,
    said_of,
    suggestion,
    words_of,
)
from rollouts.plugins.loading import install_hint
from rollouts.plugins.manager import PluginManager
from rollouts.plugins.signature import bind
from rollouts.runs.components import Chosen, curriculum
from rollouts.training.datasets import mixing
from rollouts.training.datasets.buffer import HELD_OUT_PART, SKIPPED_MAX, DataBuffer, draw_tasks, shuffled
from rollouts.types import Message, Task

if TYPE_CHECKING:
    from rollouts.env.workers.proxy import RemoteEnvironment, RemoteSandboxes
    from rollouts.plugins.protocols import TaskSampler
    from rollouts.sandboxes.base import Sandboxes


class PlannedEnvironment(NamedTuple):
    """One environment of a run. `share` is its mean share over the run's steps; `curriculum` is the component of its
    weight, if the weight is a curriculum. `text_only`: the model reads no images, so a task with an image is an error.
    `trains`: the tasks are or were also used for training, so not all of them are held out; runs of earlier versions
    held them out. `tools` are those that the run adds to the environment's own; `sandboxes` opens a sandbox for an
    episode, and is None if the environment does not ask for one.
    """

    chosen: Chosen
    weight: mixing.Weight
    curriculum: Chosen | None
    share: float
    seed: int
    system: str
    tasks_seconds: float = math.inf
    text_only: bool = True
    trains: bool = True
    tools: tuple[AddedTool, ...] = ()
    sandboxes: Sandboxes | RemoteSandboxes | None = None

    @property
    def alias(self) -> str:
        """The environment's name in this run; empty if it is the only one."""
        return self.chosen.alias

    @property
    def name(self) -> str:
        """The component's name."""
        return self.chosen.name

    def make(self) -> Any:
        """A new environment object. Its list settings are copies, so objects do not share them."""
        return self.chosen.component(**copy.deepcopy(dict(self.chosen.settings)))

    @property
    def remote(self) -> type[RemoteEnvironment] | None:
        """The class in place of the environment's, in this process, if it runs in workers."""
        component = self.chosen.component
        is_remote = inspect.isclass(component) and issubclass(component, WorkerEnvironment)
        return cast("type[RemoteEnvironment]", component) if is_remote else None

    @property
    def make_env(self) -> Callable[[], Any]:
        """The function that makes the environment object of an episode."""
        if self.remote is None:
            return self.make
        maker: Any = self.remote.maker(self.chosen.settings)
        return maker  # type: ignore[no-any-return]  # `rollouts.env.calls` calls it in place of a function

    def make_checked(self) -> Any:
        """Like `make`, but an exception of the constructor becomes an EnvironmentDefinitionError."""
        with self._authors_code(f"building the environment {self.name}"):
            return self.make()

    def shared(self) -> SharedValue:
        """The value of the environment's `shared`, which all its objects in this process use."""
        return shared_value(self.chosen.component, self.chosen.settings, self.make)

    @property
    def chooses_tools(self) -> bool:
        """Whether each episode has its own tools, which `tools(task)` of the environment or of a class of tools
        returns.
        """
        opened = [each.component for each in self.tools if isinstance(each, Toolset)]
        return any(hasattr(each, "tools") for each in (self.make_checked(), *opened))

    def all_tools(self) -> list[ToolMethod]:
        """The marked tools of the environment, and those that the run adds and that are known before an episode."""
        return [*tools_of(self.make_checked()), *known_tools(self.tools)]

    def schemas(self) -> list[dict[str, Any]]:
        """The schemas of `all_tools`."""
        return [schema_of(tool) for tool in self.all_tools()]

    def schemas_of_demonstrations(self) -> Callable[[Sequence[Message]], list[dict[str, Any]]]:
        """A function that returns the schemas of the tools of a demonstration: in an environment with roles, those of
        the role whose system prompt begins the conversation. It raises EnvironmentDefinitionError for no such role.
        """
        made = self.make_checked()
        tools, roles = [*tools_of(made), *known_tools(self.tools)], roles_of(made)
        all_schemas = [schema_of(tool) for tool in tools]
        own = {role.name: [schema_of(tool) for tool in of_role(tools, role.name)] for role in roles}

        def schemas(messages: Sequence[Message]) -> list[dict[str, Any]]:
            system = messages[0].text if messages and messages[0].role == "system" else ""
            meant = [own[role.name] for role in roles if role.system == system] or list(own.values()) or [all_schemas]
            if any(each != meant[0] for each in meant):
                raise EnvironmentDefinitionError(
                    f"{self.name}.demonstrations('train', rng): the system message {shown(system)} does not say whose "
                    f"conversation this is, and the roles {', '.join(own)} have different tools; give each role its "
                    "own `system`, and begin each of its demonstrations with Message('system', that text)"
                )
            return meant[0]

        return schemas

    def held_out(self, count: int) -> list[Task]:
        """The first `count` different tasks of the split "eval"; fewer if there are not enough. If tasks are finite and
        ignore the split, at most a fifth of them.
        """
        if count == 0:
            return []
        if shared := self.tasks_of_both(count):
            count = min(count, max(1, shared // HELD_OUT_PART)) if shared > 1 else 0
        return [self._ours(task) for task in draw_tasks(self._tasks("eval", self._rng("eval")), count)]

    def tasks_of_both(self, count: int) -> int:
        """The number of tasks if they are finite, the same in both splits, and too few to hold out `count`; else 0.

        A list is finite. An iterator is known to be finite if it ends before `count` tasks.
        """
        if not self.trains or count == 0:
            return 0
        source = self._tasks("eval", self._rng("eval"))
        is_list = isinstance(source, Sequence)
        known = {task.key for task in draw_tasks(source, count * HELD_OUT_PART if is_list else count)}
        if len(known) >= count * (HELD_OUT_PART if is_list else 1):
            return 0
        trained = draw_tasks(self._tasks("train", self._rng("train/0")), len(known) + 1)
        return len(known) if trained and known.issuperset(task.key for task in trained) else 0

    def training_source(self) -> Sequence[Task] | Callable[[int], Iterator[Task]]:
        """The training tasks: a sequence to shuffle, or a function of the epoch that reads them in their order."""
        first = self._tasks("train", self._rng("train/0"), whole=True)
        if isinstance(first, Sequence):
            return [self._ours(as_task(task)) for task in first]
        return lambda epoch: (self._ours(as_task(task)) for task in self._tasks("train", self._rng(f"train/{epoch}")))

    def require_demonstrations(self, env: Any) -> None:
        """Raise EnvironmentDefinitionError if the environment object has no method `demonstrations`."""
        if not hasattr(env, "demonstrations"):
            raise EnvironmentDefinitionError(
                f"the environment {self.name} has no demonstrations; write `def demonstrations(self, split, "
                "rng)` that yields lists of Message, or train it with `rollouts run`"
            )

    def demonstrations(self) -> Iterator[list[Message]]:
        """Expert conversations for supervised training, each once: a sequence in an order that depends on the seed, an
        iterator in the order of `shuffled`. Raises EnvironmentDefinitionError if there are none.
        """
        env = self.make_checked()
        label = f"{self.name}.demonstrations('train', rng)"
        self.require_demonstrations(env)
        conversation = None
        thread = AuthorThread()
        rng = self._rng("demonstrations")
        given = self._in_time(thread, lambda: self._begun(env, "demonstrations", label, "train", rng), label)
        for conversation in self._in_order(given, thread, label):
            messages = as_conversation(conversation, label)
            check_text(messages, f"a demonstration of {label}")
            yield [*self._system_messages(), *messages]
        if conversation is None:
            raise EnvironmentDefinitionError(
                f"the environment {self.name} has no demonstration: demonstrations('train', rng) gave "
                "nothing; it has to yield lists of Message"
            )

    def draw(self, split: str, rng: Random) -> Iterator[Task]:
        """The tasks that `tasks(split, rng)` gives, in their order."""
        return (self._ours(as_task(task)) for task in self._tasks(split, rng))

    def draw_demonstrations(self, split: str, rng: Random) -> Iterator[list[Message]]:
        """The conversations that `demonstrations(split, rng)` gives, in their order."""
        env = self.make_checked()
        label = f"{self.name}.demonstrations({split!r}, rng)"
        thread = AuthorThread()
        given = self._in_time(thread, lambda: self._begun(env, "demonstrations", label, split, rng), label)
        return (as_conversation(messages, label) for messages in self._guarded(given, thread, label))

    def demonstration_order(self, count: int, epoch: int) -> list[int]:
        """The order of `count` demonstrations in an epoch: a function of the seed and the epoch alone."""
        order = list(range(count))
        self._rng(f"demonstrations/{epoch}").shuffle(order)
        return order

    def _rng(self, purpose: str) -> Random:
        return Random("/".join(filter(None, (str(self.seed), self.alias, purpose))))

    def _in_order(self, given: Any, thread: AuthorThread, label: str) -> Iterator[Any]:
        """The demonstrations that the author's code gave, in the order of the first epoch."""
        if not isinstance(given, Sequence):
            return shuffled(self._guarded(given, thread, label), self._rng("demonstrations/0"))
        order = self.demonstration_order(self._in_time(thread, lambda: len(given), label), 0)
        return self._guarded((given[index] for index in order), thread, label)

    def _tasks(self, split: str, rng: Random, *, whole: bool = False) -> Iterable[Any]:
        """The result of the environment's `tasks`. With `whole`, a sequence is read to its end."""
        label = f"{self.name}.tasks({split!r}, rng)"
        thread = AuthorThread()
        tasks = self._in_time(thread, lambda: self._begun(self.make(), "tasks", label, split, rng), label)
        if isinstance(tasks, list | tuple):
            return tasks
        if whole and isinstance(tasks, Sequence):
            drawn: list[Any] = self._in_time(thread, lambda: list(tasks), label)
            return drawn
        return self._guarded(tasks, thread, label)

    def _begun(self, env: Any, name: str, label: str, *arguments: Any) -> Any:
        """The result of `tasks` or `demonstrations`, checked. The method gets `shared` if it names it."""
        method = getattr(env, name)
        inputs = {each: self.shared().get_now() for each in inputs_of(method, name)}
        function, *rest = with_inputs(method, arguments, inputs)
        given = function(*rest)
        check_source(given, label, "Task" if name == "tasks" else "lists of Message")
        return given

    def _system_messages(self) -> list[Message]:
        return [Message("system", self.system)] if self.system else []

    def _ours(self, task: Task) -> Task:
        """The task with the run's system prompt before it, and this environment's alias; its key does not change."""
        if self.text_only and not isinstance(task.prompt, str):
            check_text(task.prompt, f"the task {shown(task.id or task.key)} of the environment {self.name}")
        if self.system:
            prompt = [*self._system_messages(), *task.messages]
            return Task(prompt, task.answer, task.info, task.id or task.key, self.alias)
        return task if task.env == self.alias else msgspec.structs.replace(task, env=self.alias)

    @contextlib.contextmanager
    def _authors_code(self, label: str) -> Iterator[None]:
        """Turn an exception of the environment's own code into an EnvironmentDefinitionError that names the
        environment.
        """
        try:
            with authors_code():
                yield
        except RolloutsError:
            raise
        except Exception as error:  # the author's code may raise anything
            install = install_hint(error, self.chosen.ref) if self.chosen.ref else ""
            words = in_lines(f"{label} raised {words_of(error)}", install, _setup_hint(error))
            raise EnvironmentDefinitionError(words) from error

    def _in_time(self, thread: AuthorThread, function: Callable[[], Any], label: str) -> Any:
        """Call the environment's own code, with a deadline of `tasks_seconds`. Returns its result."""
        with self._authors_code(label):
            try:
                return thread.call(function, self.tasks_seconds)
            except TimeoutError as error:
                if not thread.is_late:
                    raise
                raise EnvironmentDefinitionError(
                    f"{label} gave nothing for {self.tasks_seconds:g} seconds, the deadline of --tasks-seconds; raise "
                    "--tasks-seconds, or load the environment's data faster"
                ) from error

    def _guarded(self, values: Iterable[Any], thread: AuthorThread, label: str) -> Iterator[Any]:
        """The same values, one at a time; the author's code runs at each step."""
        iterator = self._in_time(thread, lambda: iter(values), label)
        end = object()
        while True:
            value = self._in_time(thread, lambda: next(iterator, end), label)
            if value is end:
                return
            yield value


def plan_environments(
    manager: PluginManager,
    components: Sequence[Component],
    chosen: Sequence[Chosen],
    settings: Settings,
    source: Source,
) -> tuple[PlannedEnvironment, ...]:
    """The environments of a run with their weights. Raises UserError if a curriculum does not exist or cannot be used,
    or if at any step of the run a weight is negative or all weights are 0.
    """
    environments: list[PlannedEnvironment] = []
    for component, found in zip(components, chosen, strict=True):
        given, rule = component.weight, None
        weight: mixing.Weight
        if isinstance(given, dict):
            rule = curriculum(manager, component, source)
            weight = bind(rule.component, rule.settings)
        else:
            weight = mixing.piecewise(given) if isinstance(given, list) else given
        environments.append(
            PlannedEnvironment(
                found,
                weight,
                rule,
                0.0,
                settings.seed,
                settings.system,
                settings.tasks_seconds,
                trains=settings.mode != "eval",
            )
        )
    if not environments:
        return ()
    shares = mixing.mean_shares({env.alias: env.weight for env in environments}, settings.steps)
    return tuple(env._replace(share=share) for env, share in zip(environments, shares, strict=True))


def _setup_hint(error: Exception) -> str:
    """What to type if `tasks` or `demonstrations` reads an attribute that `setup` sets. Empty for another error."""
    owner = getattr(error, "obj", None) if isinstance(error, AttributeError) else None
    if not callable(getattr(owner, "setup", None)):
        return ""
    return (
        "`setup` does not run before `tasks` and `demonstrations`: write what they need as `shared(self)`, and name "
        "`shared` among their parameters"
    )


def held_out_tasks(environments: Sequence[PlannedEnvironment], count: int) -> list[Task]:
    """`count` held-out tasks in total, split over the environments by their mean shares over the run."""
    counts = mixing.share_out(count, [env.share for env in environments])
    return [task for env, own in zip(environments, counts, strict=True) for task in env.held_out(own)]


def chosen_tasks(text: str, tasks: Sequence[Task]) -> list[int]:
    """The numbers of the tasks that `--tasks` chooses, in their order: numbers from 0, ranges with both ends, and ids,
    separated by commas. An id may look like a number or a range. An empty text chooses all. Raises ConfigError.

    >>> chosen_tasks("5-6, 0", [Task(str(n)) for n in range(9)]), chosen_tasks("b,1", [Task("A", id="b"), Task("C")])
    ([0, 5, 6], [0, 1])
    """
    if not text.strip():
        return list(range(len(tasks)))
    places: dict[str, list[int]] = {}
    for index, task in enumerate(tasks):
        places.setdefault(task.id or "", []).append(index)
    found = set[int]()
    for word in filter(None, map(str.strip, text.split(","))):
        number = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", word)
        if word in places:
            found.update(places[word])
        elif number is None:
            near = suggestion(word, places) or "give numbers from 0, ranges such as 0-9, and ids of tasks"
            raise ConfigError(f"--tasks {word}: no held-out task has this id\n{near}")
        else:
            first, last = int(number[1]), int(number[2] or number[1])
            if not first <= last < len(tasks):
                raise ConfigError(
                    f"--tasks {word}: there are {counted(len(tasks), 'held-out task')}, from 0 to {len(tasks) - 1}; "
                    "--eval-tasks holds out more"
                )
            found.update(range(first, last + 1))
    if not found:
        raise ConfigError(f"--tasks {text!r} names no task; give numbers from 0, ranges such as 0-9, and ids of tasks")
    return sorted(found)


def few_held_out_notes(
    environments: Sequence[PlannedEnvironment], held_out: Sequence[Task], settings: Settings
) -> list[str]:
    """Notes if there are fewer held-out tasks than `--eval-tasks`: for each environment whose tasks are the same in
    both splits; else one, but not of the default number, for few people rely on it.
    """
    count, notes = settings.eval_tasks, []
    if not environments or len(held_out) >= count:
        return []
    counts = mixing.share_out(count, [env.share for env in environments])
    for env, own in zip(environments, counts, strict=True):
        number, name = env.tasks_of_both(own), env.alias or env.name
        if number == 1:
            notes.append(f"{name} has one task, so none is held out, and nothing is evaluated")
        elif number:
            notes.append(
                f"{name} has {number} tasks, the same for training and evaluation, so at most a fifth of them is held "
                f"out: {max(1, number // HELD_OUT_PART)}; to choose them, let tasks(split, rng) look at `split`"
            )
    if not notes and count != Settings.eval_tasks:
        there = (
            "is one different held-out task" if len(held_out) == 1 else f"are {len(held_out)} different held-out tasks"
        )
        notes.append(f"there {there}, --eval-tasks asked for {count}")
    return notes


def task_identity(task: Task) -> str:
    """The task's key. A key that is made of the prompt does not depend on the run's system prompt."""
    return task.key.removeprefix("id:") if task.key.startswith("id:prompt:") else task.key


def held_out_keys(held_out: Sequence[Task], alias: str) -> frozenset[str]:
    """The keys of tasks that the environment with this alias must not train on: a held-out prompt of any environment,
    and a held-out id of its own.
    """
    return frozenset(
        task.key for task in held_out if task.env == alias or task.key.startswith(("prompt:", "id:prompt:"))
    )


def task_buffer(
    environments: Sequence[PlannedEnvironment],
    held_out: Sequence[Task],
    tasks_per_step: int,
    sampler: Callable[..., TaskSampler] | None = None,
) -> DataBuffer:
    """The buffer of training tasks, of one environment or a mixture, without held-out tasks. A held-out prompt is
    removed from all environments, a held-out id only from its own environment. `sampler` makes the task sampler of each
    environment.

    Raises EnvironmentDefinitionError if an environment with a share above 0 has no training task.
    """
    parts = []
    for env in environments:
        if env.share == 0:
            parts.append(mixing.Source(env.alias, (), 0.0))
            continue
        exclude = held_out_keys(held_out, env.alias)
        prompts = env.training_source()
        with said_of(env.alias):
            DataBuffer(prompts, seed=env.seed, exclude=exclude).get_prompts(1)
        parts.append(mixing.Source(env.alias, prompts, env.weight, exclude, sampler))
    first = parts[0]
    if not first.name:
        return DataBuffer(first.prompts, seed=environments[0].seed, exclude=first.exclude, sampler=sampler)
    return mixing.MixedBuffer(parts, seed=environments[0].seed, tasks_per_step=tasks_per_step)


class Demonstration(NamedTuple):
    """An expert conversation, and the environment whose tools it uses; `number` identifies the conversation within the
    environment, and is the same in every epoch.
    """

    env: PlannedEnvironment
    number: int
    messages: list[Message]


def demonstrations(
    environments: Sequence[PlannedEnvironment], held_out: Sequence[Task], per_step: int
) -> Iterator[Demonstration]:
    """Expert conversations without end, mixed by the environments' weights at the step that trains on it.

    The conversations of one environment are shuffled anew in each epoch. Conversations that answer a held-out task are
    left out. Raises EnvironmentDefinitionError if an environment has no others.
    """
    prompts = HeldOutPrompts(held_out)
    streams = [_without_end(env, prompts) for env in environments]
    if len(environments) == 1:
        yield from streams[0]
    weights = {env.alias: env.weight for env in environments}
    for number in itertools.count():
        shares = mixing.shares_at(weights, number // per_step)
        yield next(streams[mixing.pick(shares, environments[0].seed, number)])


def _without_end(env: PlannedEnvironment, prompts: HeldOutPrompts) -> Iterator[Demonstration]:
    """The demonstrations of one environment, epoch after epoch."""
    known: list[Demonstration] = []
    skipped = 0
    for messages in env.demonstrations():
        if prompts.asks(messages):
            skipped += 1
            if skipped == SKIPPED_MAX:
                break
            continue
        skipped = 0
        known.append(Demonstration(env, len(known), messages))
        yield known[-1]
    if not known:
        raise EnvironmentDefinitionError(
            f"the last {skipped} demonstrations of the environment {env.name} all belong to held-out tasks; yield more "
            "demonstrations, lower --eval-tasks, or let tasks('eval', rng) yield other tasks"
        )
    for epoch in itertools.count(1):
        yield from (known[index] for index in env.demonstration_order(len(known), epoch))


class HeldOutPrompts:
    """The prompts of held-out tasks, to recognize demonstrations that answer them.

    Text is compared without leading and trailing white space. A system message is compared only if several held-out
    tasks of one environment have otherwise equal prompts, because a demonstration may have another system message or
    none. `shared` counts the tasks whose whole prompt is also that of another task of their environment: such a prompt
    does not tell which task a demonstration answers.

    >>> prompts = HeldOutPrompts([Task("2 + 2?"), Task("Play.", id="a"), Task("Play.", id="b")])
    >>> prompts.asks([Message("system", "Be brief."), Message("user", "2 + 2?"), Message("assistant", "4")])
    True
    >>> prompts.asks([Message("user", "Play."), Message("assistant", "e4")]), prompts.shared
    (False, 2)
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        # One id may mean another prompt in each of two phases, and one task may have another system message in each.
        known = [(task.env, task_identity(task), *_keys(task.messages)) for task in tasks]
        whole = Counter((env, whole) for env, _, whole in {(env, task, whole) for env, task, whole, _ in known})
        rest = Counter((env, rest) for env, _, rest in {(env, task, rest) for env, task, _, rest in known})
        self.shared = sum(count for count in whole.values() if count > 1)
        self._whole = {key for (_, key), count in whole.items() if count == 1}
        self._rest = {key for (_, key), count in rest.items() if count == 1 and key != b"[]"}

    def asks(self, messages: Sequence[Message]) -> bool:
        """Whether the conversation answers one of these prompts, with any turn of the assistant."""
        for place, message in enumerate(messages):
            if message.role == "assistant":
                whole, rest = _keys(messages[:place])
                if whole in self._whole or rest in self._rest:
                    return True
        return False


def _keys(messages: Sequence[Message]) -> tuple[bytes, bytes]:
    """Two keys of a prompt: of all its messages, and of all but its system messages."""
    said = [
        (
            message.role,
            message.text.strip(),
            [part for part in message.content if isinstance(part, dict) and part.get("type") != "text"],
        )
        for message in messages
    ]
    return msgspec.json.encode(said), msgspec.json.encode([each for each in said if each[0] != "system"])
