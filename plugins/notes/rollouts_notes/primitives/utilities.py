"""Helpers around the primitives: reward functions from parts, prompts, files of rollouts, and models for tests.

    reward_fn = create_weighted_reward({"right": (create_exact_match_reward(), 1.0), "short": (length_reward, 0.1)})
    train, held_out = split_prompts(load_prompts("questions.jsonl"), 0.1)

A *reward function* takes a Rollout and returns a number, or None if it cannot judge.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rollouts.author_code import shown
from rollouts.disk import write_whole
from rollouts.encoding import encode
from rollouts.env.prompts import read_tasks, split_tasks
from rollouts.errors import ConfigError, OutputError
from rollouts.training.algorithms.losses import check_setting
from rollouts.types import Message, Status, Task, ToolCall, Trajectory
from rollouts_notes.primitives.generation import Generator, schemas_of
from rollouts_notes.primitives.rewards import RewardFn, aggregate_vector_rewards, compute_scalar_reward
from rollouts_notes.primitives.types import Conversation, Generation, GenerationConfig, Rollout

T = TypeVar("T")
Answers = Mapping[str, Any]


# --- rewards ----------------------------------------------------------------------------------------------------------


def length_reward(rollout: Rollout, *, target_tokens: int = 100) -> float:
    """1.0 for a reply of at most `target_tokens` sampled ids K, and target_tokens / K for a longer one.

    >>> length_reward(Rollout("2 + 3", Generation("5", [9] * 40)), target_tokens=10)
    0.25
    """
    check_setting("target_tokens", target_tokens, target_tokens >= 1, "a number of 1 or more", "target_tokens=100")
    return min(1.0, target_tokens / max(1, len(rollout.generation.tokens)))


def weighted_sum(values: Sequence[float | None], weights: Sequence[float] | None = None) -> float | None:
    """The sum of weight * value, with weights of 1 by default; None if a value is None. Raises ConfigError.

    >>> weighted_sum([1.0, 0.5], [1.0, -0.2])
    0.9
    """
    return aggregate_vector_rewards(values, weights=weights)


def create_exact_match_reward(answers: Answers | None = None) -> RewardFn:
    """A reward function: 1.0 if the reply is the answer, without spaces around it, else 0.0.

    The answer is `metadata["answer"]` of the rollout, or `answers[prompt]`. A rollout without an answer raises
    ConfigError.

    >>> create_exact_match_reward({"2 + 3": 5})(Rollout("2 + 3", Generation(" 5 ")))
    1.0
    """

    def exact_match(rollout: Rollout) -> float:
        return float(rollout.generation.text.strip() == _answer(rollout, answers))

    return exact_match


def create_regex_reward(pattern: str, answers: Answers | None = None, *, compares: bool = True) -> RewardFn:
    r"""A reward function: 1.0 if the last match of `pattern` in the reply is the answer, else 0.0.

    A group in the pattern is what is compared. Answers are those of `create_exact_match_reward`. Raises ConfigError for
    an invalid pattern.

    >>> create_regex_reward(r"-?\d+", {"2 + 3": 5})(Rollout("2 + 3", Generation("2 + 3 = 5.")))
    1.0

    Args:
        compares: False: any match gives 1.0, and no answer is needed
    """
    try:
        compiled = re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ConfigError(f"{shown(pattern)} is no regular expression: {error}") from error

    def regex_match(rollout: Rollout) -> float:
        found = list(compiled.finditer(rollout.generation.text))
        if not compares or not found:
            return float(bool(found))
        return float((found[-1][1] if compiled.groups else found[-1][0]) == _answer(rollout, answers))

    return regex_match


def create_weighted_reward(parts: Mapping[str, tuple[RewardFn, float]]) -> RewardFn:
    """A reward function: the weighted sum of several, given as `{"name": (function, weight)}`; None if one is None.

    >>> reward_fn = create_weighted_reward({"text": (lambda r: 1.0, 2.0), "short": (length_reward, -0.5)})
    >>> reward_fn(Rollout("2 + 3", Generation("5", [9])))
    1.5
    """
    if not isinstance(parts, Mapping) or not parts:
        raise ConfigError(f'the parts are {shown(parts)}; expected a dict such as {{"short": (length_reward, 0.1)}}')

    def weighted_reward(rollout: Rollout) -> float | None:
        values = [compute_scalar_reward(rollout, function) for function, _ in parts.values()]
        return weighted_sum(values, [weight for _, weight in parts.values()])

    return weighted_reward


def as_component(reward_fn: RewardFn) -> Callable[[Task, Trajectory], Any]:
    """The reward function as a component of a run: `rollouts.run(reward=as_component(f), ...)`.

    It gets the episode as a Rollout, with the task's answer and info in `metadata`.
    """

    @functools.wraps(reward_fn, assigned=("__name__", "__qualname__", "__doc__", "__module__"))
    def reward(task: Task, trajectory: Trajectory) -> Any:
        return reward_fn(rollout_of(task, trajectory))

    del reward.__wrapped__  # a run reads this function's own parameters
    return reward


def rollout_of(task: Task, trajectory: Trajectory) -> Rollout:
    """An episode of the engine as a Rollout, whose generation has the text of the last reply and all sampled ids.

    >>> messages = [Message("user", "2 + 3"), Message("assistant", "5")]
    >>> rollout_of(Task("2 + 3", answer=5), Trajectory(Task("2 + 3"), messages)).metadata
    {'answer': 5}
    """
    live = [
        (token, logprob)
        for segment in trajectory.segments
        for token, logprob, weight in zip(segment.tokens, segment.logprobs, segment.loss_mask, strict=True)
        if weight > 0
    ]
    finish = "length" if trajectory.status is Status.TRUNCATED else "stop"
    tokens, logprobs = [token for token, _ in live], [logprob for _, logprob in live]
    return Rollout(
        task.prompt,
        Generation(trajectory.last_text, tokens, logprobs, finish),
        conversation=Conversation(trajectory.messages, trajectory.tools),
        tool_calls=[call for message in trajectory.messages for call in message.tool_calls],
        metadata={"answer": task.answer, **task.info},
    )


def _answer(rollout: Rollout, answers: Answers | None) -> str:
    prompt = rollout.prompt if isinstance(rollout.prompt, str) else rollout.prompt[-1].text
    known: Mapping[str, Any] = rollout.metadata if answers is None else answers
    key = "answer" if answers is None else prompt
    if known.get(key) is None:
        where = 'metadata["answer"]' if answers is None else "answers"
        raise ConfigError(f"the rollout of {shown(prompt)} has no answer in {where}; give one for each prompt")
    return str(known[key]).strip()


# --- prompts ----------------------------------------------------------------------------------------------------------


def load_prompts(path: str | Path) -> list[Task]:
    """The prompts of a .jsonl or .json file, as Tasks with `prompt`, `answer` and `info`. Raises ConfigError, with the
    line.
    """
    return read_tasks(Path(path))


def split_prompts(prompts: Sequence[T], fraction: float = 0.1) -> tuple[list[T], list[T]]:
    """(prompts to train on, held-out prompts). Which ones are held out depends on their content only, so a longer list
    keeps them, and equal prompts are never in both. Raises ConfigError for a fraction outside of [0, 1).

    >>> train, held_out = split_prompts([f"{a} + {b}" for a in range(9) for b in range(9)], 0.2)
    >>> len(train) + len(held_out), 5 < len(held_out) < 30
    (81, True)
    """
    is_valid = 0 <= fraction < 1
    check_setting("fraction", fraction, is_valid, "a number from 0 to below 1", "split_prompts(prompts, 0.1)")
    keys = [each.key if isinstance(each, Task) else Task(each).key for each in prompts]  # type: ignore[arg-type]
    held_out = {task.id for task in split_tasks([Task("", id=key) for key in keys], fraction)[0]}
    pairs = list(zip(keys, prompts, strict=True))
    return [each for key, each in pairs if key not in held_out], [each for key, each in pairs if key in held_out]


def create_prompt_loader(prompts: Sequence[T], batch_size: int, *, seed: int = 0) -> Callable[[int], list[T]]:
    """A function from the iteration to its prompts. Each pass over the prompts has another order, by the seed.

    The result depends on the iteration alone, so a resumed training gets the prompts that it would have had.

    >>> load = create_prompt_loader(["a", "b", "c", "d"], 2)
    >>> sorted(load(0) + load(1)), load(1) == load(1)
    (['a', 'b', 'c', 'd'], True)
    """
    check_setting("batch_size", batch_size, batch_size >= 1, "a number of 1 or more", "batch_size=8")
    if not prompts:
        raise ConfigError("there are no prompts; give at least one")

    def load(iteration: int) -> list[T]:
        places = range(iteration * batch_size, (iteration + 1) * batch_size)
        return [order(place // len(prompts))[place % len(prompts)] for place in places]

    @functools.lru_cache(maxsize=2)
    def order(passed: int) -> list[T]:
        return random.Random(f"{seed}/{passed}").sample(prompts, len(prompts))

    return load


# --- files ------------------------------------------------------------------------------------------------------------


def save_rollouts(path: str | Path, rollouts: Sequence[Rollout]) -> None:
    """Write rollouts to a .jsonl file, one object per line; an existing file is replaced as a whole.

    Functions among a conversation's tools are written as their schemas. Values that JSON cannot hold are written as
    text. Raises OutputError if the file cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_rollouts(f"{folder}/rollouts.jsonl", [Rollout("2 + 3", Generation("5"), rewards=1.0)])
    ...     load_rollouts(f"{folder}/rollouts.jsonl")[0].generation.text
    '5'
    """
    lines = b"".join(encode(_row(each)) + b"\n" for each in rollouts)
    try:
        write_whole(Path(path), lines)
    except OSError as error:
        why = error.strerror or error
        raise OutputError(f"{path} cannot be written: {why}; give a file in an existing folder") from error


def load_rollouts(path: str | Path) -> list[Rollout]:
    """Read what `save_rollouts` wrote. Its sequences are lists. Raises ConfigError, with the line, for a file that is
    missing or malformed.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    rollouts = []
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                rollouts.append(_rollout(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError, msgspec.ValidationError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{path}, line {number}: no rollout of save_rollouts ({what})") from error
    return rollouts


def _row(rollout: Rollout) -> dict[str, Any]:
    row = rollout._asdict() | {"generation": rollout.generation._asdict()}
    row["turns"] = [turn._asdict() for turn in rollout.turns]
    if rollout.conversation is not None:
        messages, tools = rollout.conversation
        row["conversation"] = {"messages": messages, "tools": schemas_of(tools)}
    return row


def _rollout(row: dict[str, Any]) -> Rollout:
    read = dict(row)
    if not isinstance(read["prompt"], str):
        read["prompt"] = msgspec.convert(read["prompt"], list[Message])
    read["generation"] = Generation(**read["generation"])
    read["turns"] = [Generation(**turn) for turn in read["turns"]]
    read["tool_calls"] = msgspec.convert(read["tool_calls"], list[ToolCall])
    if read["conversation"] is not None:
        given = read["conversation"]
        read["conversation"] = Conversation(msgspec.convert(given["messages"], list[Message]), given["tools"])
    return Rollout(**read)


def format_rollout(rollout: Rollout) -> str:
    """The rollout as lines for people: its messages, its reward, its KL and its length.

    >>> print(format_rollout(Rollout("2 + 3", Generation("5", [9]), rewards=1.0, kl_divergence=0.0123)))
    prompt: 2 + 3
    reply: 5
    reward 1, KL 0.0123, 1 token, stop
    """
    prompt = [("prompt", rollout.prompt)] if isinstance(rollout.prompt, str) else []
    messages = rollout.conversation.messages if rollout.conversation else () if prompt else rollout.prompt
    said = [(each.role, _said(each)) for each in messages if isinstance(each, Message)]
    parts = said if rollout.conversation else [*prompt, *said, ("reply", rollout.generation.text)]
    rewards = rollout.rewards if isinstance(rollout.rewards, Sequence) else [rollout.rewards]
    values = " ".join("none" if each is None else f"{each:g}" for each in rewards)
    kl = "" if rollout.kl_divergence is None else f", KL {rollout.kl_divergence:.3g}"
    count = sum(len(turn.tokens) for turn in rollout.turns or (rollout.generation,))
    end = f"{count} token{'s' * (count != 1)}, {rollout.generation.finish_reason}"
    return "\n".join([*(f"{role}: {text}" for role, text in parts), f"reward {values}{kl}, {end}"])


def _said(message: Message) -> str:
    calls = (f"{call.name}({json.dumps(call.arguments)})" for call in message.tool_calls)
    return " ".join(filter(None, (message.text, *calls)))


# --- tests ------------------------------------------------------------------------------------------------------------


def create_scripted_generator(replies: Sequence[Generation | str]) -> Generator:
    """A generator for tests that returns these replies, one per call, in order. It needs no model.

    It raises ConfigError if it is called more often.

    >>> generator = create_scripted_generator(["5", "7"])
    >>> [generator(None, None, prompt, GenerationConfig()) for prompt in ("2 + 3", "3 + 4")]
    ['5', '7']
    """
    numbers = itertools.count()

    def scripted(model: Any, tokenizer: Any, prompt: Any, config: GenerationConfig) -> Generation | str:
        number = next(numbers)
        if number >= len(replies):
            raise ConfigError(f"the script has {len(replies)} replies, and reply {number + 1} was requested; add one")
        return replies[number]

    return scripted
