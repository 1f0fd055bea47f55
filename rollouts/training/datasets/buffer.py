"""DataBuffer: yields the next task.

Its only state is its position: `epoch_id`, and `sample_offset` (tasks taken in this epoch, skipped ones included). A
sequence is shuffled again in each epoch, by the seed. Any other source is a function of the epoch; it is read forward,
and read again up to the position on resume. Not here: several sources, and curricula (`mixing`).
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from rollouts.author_code import authors_code, message_of, printable, shown
from rollouts.errors import ConfigError, EnvironmentDefinitionError, counted, named
from rollouts.types import Message, Task

HELD_OUT_PART = 5  # if tasks are finite and ignore the split, at most a fifth of them is held out
SKIPPED_MAX = 10_000  # after this many excluded tasks in a row, a source counts as empty
SHUFFLE_WINDOW = 1000  # how many values of an iterator are in memory while it is shuffled
_END = object()  # not None: a source that yields None has an error, and is not at its end


def as_task(value: Any) -> Task:
    """Make a Task of a Task, a prompt, or a mapping with the key `prompt`. Its keys `answer`, `id` and `info` are
    optional; all other keys are added to `info`.

    Messages may be written as mappings (`{"role": "user", "content": "..."}`). Raises EnvironmentDefinitionError.

    >>> as_task({"prompt": [{"role": "user", "content": "2 + 2?"}], "answer": 4, "level": 1}).info
    {'level': 1}
    """
    try:
        with authors_code():
            task = _read_task(value)
        if task is not None:
            return task
        reason = ""
    except Exception as error:  # an author's object may raise anything
        reason = f" ({message_of(error) if isinstance(error, msgspec.ValidationError) else named(error)})"
    wanted = "rollouts.Task objects, prompts (text, or a list of messages), or mappings with `prompt`"
    given = f"{shown(value)} ({type(value).__name__}){reason}"
    raise EnvironmentDefinitionError(f"tasks() gave {given}; it must give {wanted}")


def _read_task(value: Any) -> Task | None:
    if isinstance(value, Task):
        prompt, identity = _as_prompt(value.prompt), _as_id(value.id)
        if prompt is value.prompt and identity is value.id:
            return value
        return msgspec.structs.replace(value, prompt=prompt, id=identity)
    if isinstance(value, Mapping) and "prompt" in value:
        rest = {key: value[key] for key in value if key not in ("prompt", "answer", "id", "info")}
        info = {**msgspec.convert(value.get("info") or {}, dict[str, Any]), **rest}
        return Task(_as_prompt(value["prompt"]), value.get("answer"), info, _as_id(value.get("id")))
    return Task(_as_prompt(value)) if isinstance(value, str | list) else None


def _as_id(identity: Any) -> str | None:
    return None if identity is None else printable(identity if isinstance(identity, str) else str(identity))


def _as_prompt(prompt: Any) -> str | list[Message]:
    """Return a prompt unchanged, or convert its messages. Raises msgspec.ValidationError."""
    return printable(prompt) if isinstance(prompt, str) else _as_messages(prompt)


def _as_messages(given: Any) -> list[Message]:
    is_converted = isinstance(given, list) and all(isinstance(message, Message) for message in given)
    return given if is_converted else msgspec.convert(given, list[Message])


def draw_tasks(source: Iterable[Any], count: int) -> list[Task]:
    """The first `count` tasks with different keys; fewer if the source ends or repeats itself."""
    assert count >= 0, count
    drawn: dict[str, Task] = {}
    repeated = 0
    for value in source if count else ():
        task = as_task(value)
        repeated = repeated + 1 if task.key in drawn else 0
        drawn.setdefault(task.key, task)
        if len(drawn) >= count or repeated >= SKIPPED_MAX:
            break
    return list(drawn.values())


def as_conversation(value: Any, label: str) -> list[Message]:
    """The messages of a demonstration, which needs a reply of the assistant.

    Raises EnvironmentDefinitionError; its message begins with `label`.
    """
    expected = "a list of Message with at least one of the role 'assistant'"
    try:
        messages = _as_messages(value)
    except (msgspec.ValidationError, UnicodeError) as error:  # half of a surrogate pair is no text
        raise EnvironmentDefinitionError(f"{label} gave {shown(value)} ({error}); expected {expected}") from error
    if all(message.role != "assistant" for message in messages):
        raise EnvironmentDefinitionError(f"{label} gave {shown(value)}, which teaches no reply; expected {expected}")
    return messages


def shuffled(values: Iterable[Any], rng: random.Random, window: int = SHUFFLE_WINDOW) -> Iterator[Any]:
    """Shuffle an iterable, which may be endless. At most `window` values are in memory.

    Up to `window` values are shuffled evenly. In a longer iterable, a value moves forward by at most `window` places;
    there is no limit on how late it may come.

    >>> list(shuffled("abcdef", random.Random(0), window=3))
    ['b', 'd', 'a', 'f', 'c', 'e']
    """
    source = iter(values)
    held = list(itertools.islice(source, window))
    for value in source:
        place = rng.randrange(len(held))
        yield held[place]
        held[place] = value
    rng.shuffle(held)
    yield from held


@dataclasses.dataclass(eq=False, repr=False)
class DataBuffer:
    """Yields tasks, epoch after epoch.

    Args:
        prompts: a sequence of tasks or prompts; or a function of the epoch (0, 1, …) that returns an iterable of them.
        seed: determines the order in which a sequence is visited.
        shuffle: False visits a sequence in its own order.
        exclude: keys (`Task.key`) of tasks that are never returned: the held-out tasks.

    >>> buffer = DataBuffer(["a", "b", "c"], shuffle=False)
    >>> [task.prompt for task in buffer.get_prompts(4)], buffer.epoch_id
    (['a', 'b', 'c', 'a'], 1)
    """

    prompts: Sequence[Any] | Callable[[int], Iterable[Any]]
    _: dataclasses.KW_ONLY
    seed: int = 0
    shuffle: bool = True
    exclude: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.epoch_id = self.sample_offset = 0
        self._iterator: Iterator[Any] | None = None

    @property
    def epochs(self) -> dict[str, int]:
        """The number of complete epochs of each source; empty if there is only one."""
        return {}

    def get_prompts(self, count: int, *, step: int | None = None) -> list[Task]:
        """The next `count` tasks. This buffer ignores `step`; a mixture may depend on it.

        Raises:
            EnvironmentDefinitionError: all tasks of an epoch are excluded.
        """
        assert count > 0, count
        return [self._next_task() for _ in range(count)]

    def state_dict(self) -> dict[str, Any]:
        """The buffer's position."""
        return {"epoch_id": self.epoch_id, "sample_offset": self.sample_offset, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position. The source must be the same as when it was saved.

        Raises ConfigError for another seed, because with another order some tasks would come twice and some never, and
        for a state of several sources.
        """
        self._check_seed(state)
        if "epoch_id" not in state:
            came = f"the tasks came from {' and '.join(state['sources'])}, and now they come from one source"
            raise ConfigError(f"{came}; name the same ones again, or begin a new run")
        self.epoch_id, self.sample_offset, self._iterator = state["epoch_id"], state["sample_offset"], None

    def _check_seed(self, state: dict[str, Any]) -> None:
        if state["seed"] != self.seed:
            anew = f"the seed was {state['seed']} and is {self.seed} now, which would order the tasks anew"
            raise ConfigError(f"{anew}; give seed {state['seed']} again, or begin a new run")

    def _open(self) -> Iterator[Any]:
        """The tasks of the current epoch, from `sample_offset` on."""
        if callable(self.prompts):
            return itertools.islice(iter(self.prompts(self.epoch_id)), self.sample_offset, None)
        order = list(range(len(self.prompts)))
        if self.shuffle:
            random.Random(f"{self.seed}/{self.epoch_id}").shuffle(order)
        sequence = self.prompts
        return (sequence[index] for index in order[self.sample_offset :])

    def _next_task(self) -> Task:
        skipped = ends = 0
        seen: set[str] = set()
        while skipped < SKIPPED_MAX and ends < 3:
            if self._iterator is None:
                self._iterator = self._open()
            value = next(self._iterator, _END)
            if value is _END:
                ends += 1
                self.epoch_id, self.sample_offset, self._iterator = self.epoch_id + 1, 0, None
                continue
            self.sample_offset += 1
            task = as_task(value)
            if task.key not in self.exclude:
                return task
            skipped += 1
            seen.add(task.key)
        given = "gave nothing; yield tasks for the split 'train' too"
        if skipped:
            fewer = 0 if len(seen) == 1 else max(1, len(seen) // HELD_OUT_PART)
            given = (
                f"gave only held-out tasks: {skipped} in a row, with {counted(len(seen), 'different task')}\n"
                f"yield more different tasks, or hold out fewer: --eval-tasks {fewer}; or let tasks(split, rng) look "
                "at `split`, and yield other tasks for 'train' than for 'eval'"
            )
        raise EnvironmentDefinitionError(f"the environment has no training task: tasks('train', rng) {given}")
