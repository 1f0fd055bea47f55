"""Rewards of rollouts, and helpers around the primitives: prompts, files of rollouts, and models for tests.

    reward_fn = create_weighted_reward({"right": (create_exact_match_reward(), 1.0), "short": (length_reward, 0.1)})
    train, held_out = split_prompts(load_prompts("questions.jsonl"), 0.1)

A *reward function* takes a Rollout and returns a number, a list of numbers (a vector reward), or None if it cannot
judge. None is never 0: such a rollout has no reward, and nothing is trained on it.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import math
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
from rollouts.errors import ConfigError, OutputError, RewardError, UnknownComponentError
from rollouts.plugins.index import find_component
from rollouts.plugins.loading import load_component
from rollouts.training.algorithms.advantages import group_norm
from rollouts.training.algorithms.algorithm import function_label
from rollouts.training.algorithms.calls import check_per_rollout
from rollouts.training.algorithms.losses import check_setting
from rollouts.types import Message, Status, Task, ToolCall, Trajectory
from rollouts_notes.primitives.generation import Generator, call_given, schemas_of
from rollouts_notes.primitives.types import Conversation, Generation, GenerationConfig, Rollout

T = TypeVar("T")
RewardFn = Callable[[Rollout], Any]
RewardFns = RewardFn | Sequence[RewardFn] | Mapping[str, RewardFn]
Rewards = Sequence[float | None]
Aggregator = Callable[[list[float]], float]
Answers = Mapping[str, Any]


# --- rewards ----------------------------------------------------------------------------------------------------------


def compute_scalar_reward(rollout: Rollout, reward_fn: RewardFn) -> float | None:
    """The reward of one rollout; None if the function cannot judge it.

    Raises RewardError, which names the function, if it raises or returns anything but a finite number or None.

    >>> from rollouts.primitives import Generation
    >>> compute_scalar_reward(Rollout("2 + 3", Generation("5")), lambda rollout: len(rollout.generation.text))
    1.0
    """
    return _number(_judged(reward_fn, rollout), reward_fn)


def compute_vector_reward(rollout: Rollout, reward_fns: RewardFns) -> list[float | None]:
    """Several rewards of one rollout: of several functions (a list or a dict), or of one that returns a list.

    Raises RewardError like `compute_scalar_reward`, and ConfigError if there is no function.

    >>> from rollouts.primitives import Generation
    >>> compute_vector_reward(Rollout("2 + 3", Generation("5")), [lambda r: r.generation.text == "5", lambda r: -0.1])
    [1.0, -0.1]
    """
    if callable(reward_fns):
        found = _judged(reward_fns, rollout)
        if not _is_vector(found):
            raise RewardError(f"{_whose(reward_fns)} returned {shown(found)}; expected a list of numbers")
        return [_number(each, reward_fns) for each in found]
    if isinstance(reward_fns, str) or not isinstance(reward_fns, Sequence | Mapping):
        raise ConfigError(f"the reward function is {shown(reward_fns)}; expected a function of a Rollout, or several")
    functions = list(reward_fns.values() if isinstance(reward_fns, Mapping) else reward_fns)
    if not functions:
        raise ConfigError("there are no reward functions; give at least one")
    return [compute_scalar_reward(rollout, each) for each in functions]


def aggregate_vector_rewards(
    rewards: Rewards, *, weights: Sequence[float] | None = None, aggregator: Aggregator | None = None
) -> float | None:
    """One number of a vector reward: the weighted sum (weights of 1 by default), or what `aggregator` returns.

    None if one of the rewards is None. Raises ConfigError for a wrong number of weights, and RewardError if the
    aggregator does not return a finite number.

    >>> aggregate_vector_rewards([1.0, 0.5], weights=[1.0, -0.2])
    0.9
    >>> aggregate_vector_rewards([1.0, 0.5], aggregator=min)
    0.5
    """
    weights = [1.0] * len(rewards) if weights is None else weights
    if len(weights) != len(rewards):
        raise ConfigError(f"{len(weights)} weights for {len(rewards)} rewards; give one weight for each")
    weighted = [weight * reward for weight, reward in zip(weights, rewards, strict=True) if reward is not None]
    if len(weighted) < len(rewards):
        return None
    if aggregator is None:
        return math.fsum(weighted)
    return _number(call_given("aggregator(rewards)", aggregator, weighted, error=RewardError), aggregator)


def compute_batch_rewards(
    rollouts: Sequence[Rollout],
    reward_fn: RewardFns,
    *,
    weights: Sequence[float] | None = None,
    aggregator: Aggregator | None = None,
) -> list[Rollout]:
    """The rollouts [N] with their rewards. A vector reward is aggregated, and kept in `metadata["reward_vector"]`.

    Raises RewardError and ConfigError like the functions above.

    >>> from rollouts.primitives import Generation
    >>> rollouts = [Rollout("2 + 3", Generation(text)) for text in ("5", "It is 5.")]
    >>> [each.rewards for each in compute_batch_rewards(rollouts, lambda r: 1 / len(r.generation.text))]
    [1.0, 0.125]

    Args:
        reward_fn: one function, or a list or dict of functions
    """
    rewarded = []
    for rollout in rollouts:
        found: Any = _judged(reward_fn, rollout) if callable(reward_fn) else compute_vector_reward(rollout, reward_fn)
        if _is_vector(found):
            vector = [_number(each, reward_fn) for each in found]
            found = aggregate_vector_rewards(vector, weights=weights, aggregator=aggregator)
            rollout = rollout._replace(metadata={**rollout.metadata, "reward_vector": vector})
        rewarded.append(rollout._replace(rewards=_number(found, reward_fn)))
    return rewarded


def normalize_rewards(
    rewards: Rewards, *, normalizer: Callable[[list[float]], Sequence[float]] | None = None
) -> list[float | None]:
    """The rewards [N] normalized: (R - mean) / (std + 1e-4), ddof 1 (the engine's `group_norm`), or by `normalizer`.

    None stays None, and is not passed to the normalizer. All are 0 if there is no spread. Raises TrainingError if the
    normalizer does not return one finite number per reward.

    >>> [round(each, 2) for each in normalize_rewards([1.0, 0.0, 0.0])]
    [1.15, -0.58, -0.58]
    >>> normalize_rewards([3.0, None, 1.0], normalizer=lambda rewards: [each / max(rewards) for each in rewards])[0]
    1.0
    """
    known = [float(each) for each in rewards if each is not None]
    function = normalizer or group_norm
    returned = call_given("normalizer(rewards)", function, known, error=RewardError) if known else []
    values = iter(check_per_rollout("normalizer", function, returned, len(known)))
    return [None if each is None else next(values) for each in rewards]


def apply_reward_shaping(rollout: Rollout, *, shaping_fn: Callable[[float, Rollout], float]) -> Rollout:
    """The rollout with the reward `shaping_fn(reward, rollout)`. A rollout without a reward is returned unchanged.

    Each number of a vector reward is shaped. Raises RewardError if the function does not return a finite number.

    >>> from rollouts.primitives import Generation
    >>> rollout = Rollout("2 + 3", Generation("It is 5."), rewards=1.0)
    >>> apply_reward_shaping(rollout, shaping_fn=lambda reward, rollout: reward - len(rollout.generation.text) / 80)[2]
    0.9
    """

    def shape(reward: float | None) -> float | None:
        if reward is None:
            return None
        form = "shaping_fn(reward, rollout)"
        return _number(call_given(form, shaping_fn, reward, rollout, error=RewardError), shaping_fn)

    rewards = rollout.rewards
    return rollout._replace(rewards=[*map(shape, rewards)] if isinstance(rewards, Sequence) else shape(rewards))


def reward_of(rollout: Rollout) -> float | None:
    """The reward as one number: the sum of a vector; None if nothing judged the rollout. Raises RewardError.

    >>> reward_of(Rollout("Hi", Generation("Hello"), rewards=[1.0, 0.5]))
    1.5
    """
    rewards: Any = rollout.rewards
    if isinstance(rewards, int | float):
        return float(rewards)
    vector = rewards if _is_vector(rewards) else [rewards]
    return aggregate_vector_rewards([_number(each, "the rollout") for each in vector])


def _judged(reward_fn: RewardFn, rollout: Rollout) -> Any:
    return call_given("reward_fn(rollout)", reward_fn, rollout, error=RewardError)


def _is_vector(found: Any) -> bool:
    """Whether a reward is a vector: a list, a tuple, or an array with an axis."""
    return isinstance(found, list | tuple) or len(getattr(found, "shape", ())) == 1


def _number(found: Any, function: Any) -> float | None:
    """The number, which may be a bool or an array of one. Raises RewardError for anything else, NaN and infinities."""
    if found is None:
        return None
    try:
        value = math.nan if isinstance(found, str | bytes) else float(found)
    except (TypeError, ValueError, RuntimeError):
        value = math.nan
    if not math.isfinite(value):
        verb = "has the reward" if isinstance(function, str) else "returned"
        raise RewardError(f"{_whose(function)} {verb} {shown(found)}; expected a finite number, or None")
    return value


def _whose(function: Any) -> str:
    if isinstance(function, str):
        return function
    return f"the function {function_label(function)}" if callable(function) else "a reward function"


# --- reward models ----------------------------------------------------------------------------------------------------


def load_reward_model(name: str, *, model_loader: Callable[[str], Any] | None = None) -> Any:
    """Load a reward model with `model_loader(name)`; None: with the one of the package rollouts-reward-model.

    Raises ConfigError without a loader and without the package, and what the loader raises.

    >>> load_reward_model("a/judge", model_loader=lambda name: f"the model {name}")
    'the model a/judge'
    """
    return (model_loader or _of_package("load_reward_model", "model_loader=my_loader"))(name)


def compute_reward_model_score(
    reward_model: Any, rollout: Rollout, *, scorer: Callable[[Any, Rollout], float] | None = None
) -> float | None:
    """The score `scorer(reward_model, rollout)`; None: with the scorer of the package rollouts-reward-model.

    Raises ConfigError without a scorer and without the package, and RewardError if the scorer does not return a finite
    number or None.

    >>> from rollouts.primitives import Generation
    >>> judge = {"5": 1.0}
    >>> compute_reward_model_score(judge, Rollout("2 + 3", Generation("5")), scorer=lambda m, r: m[r.generation.text])
    1.0
    """
    scorer = scorer or _of_package("compute_reward_model_score", "scorer=my_scorer")
    score = call_given("scorer(reward_model, rollout)", scorer, reward_model, rollout, error=RewardError)
    return _number(score, scorer)


def _of_package(name: str, argument: str) -> Callable[..., Any]:
    """The function of the package that has the reward `reward_model`. Raises ConfigError."""
    try:
        component = load_component(find_component("rewards", "reward_model"))
    except UnknownComponentError as error:
        own = f"type: pip install rollouts-reward-model\nor give your own: {name}(..., {argument})"
        what = f"{name}: reward models are in a package of their own, which is not installed"
        raise ConfigError(f"{what}\n{own}") from error
    found: Callable[..., Any] = getattr(importlib.import_module(component.__module__), name)
    return found


# --- reward functions -------------------------------------------------------------------------------------------------


def length_reward(rollout: Rollout, *, target_tokens: int = 100) -> float:
    """1.0 for a reply of at most `target_tokens` sampled ids K, and target_tokens / K for a longer one.

    >>> length_reward(Rollout("2 + 3", Generation("5", [9] * 40)), target_tokens=10)
    0.25
    """
    check_setting("target_tokens", target_tokens, target_tokens >= 1, "a number of 1 or more", "target_tokens=100")
    return min(1.0, target_tokens / max(1, len(rollout.generation.tokens)))


def weighted_sum(values: Rewards, weights: Sequence[float] | None = None) -> float | None:
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
        return float(found[-1][1 if compiled.groups else 0] == _answer(rollout, answers))

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


def _answer(rollout: Rollout, answers: Answers | None) -> str:
    prompt = rollout.prompt if isinstance(rollout.prompt, str) else rollout.prompt[-1].text
    found = rollout.metadata.get("answer") if answers is None else answers.get(prompt)
    if found is None:
        where = 'metadata["answer"]' if answers is None else "answers"
        raise ConfigError(f"the rollout of {shown(prompt)} has no answer in {where}; give one for each prompt")
    return str(found).strip()


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
    return Rollout(
        task.prompt,
        Generation(trajectory.last_text, [token for token, _ in live], [logprob for _, logprob in live], finish),
        conversation=Conversation(trajectory.messages, trajectory.tools),
        tool_calls=[call for message in trajectory.messages for call in message.tool_calls],
        metadata={"answer": task.answer, **task.info},
    )


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
    parts: tuple[list[T], list[T]] = ([], [])
    for key, prompt in zip(keys, prompts, strict=True):
        parts[key in held_out].append(prompt)
    return parts


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
    lines = []
    for rollout in rollouts:
        row = rollout._asdict() | {"generation": rollout.generation._asdict()}
        row["turns"] = [turn._asdict() for turn in rollout.turns]
        if rollout.conversation is not None:
            messages, tools = rollout.conversation
            row["conversation"] = {"messages": messages, "tools": schemas_of(tools)}
        lines.append(encode(row) + b"\n")
    try:
        write_whole(Path(path), b"".join(lines))
    except OSError as error:
        why = error.strerror or error
        raise OutputError(f"{path} cannot be written: {why}; give a file in an existing folder") from error


def load_rollouts(path: str | Path) -> list[Rollout]:
    """Read what `save_rollouts` wrote. Its sequences are lists. Raises ConfigError, with the line, for a file that is
    missing or malformed.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
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


def _rollout(row: dict[str, Any]) -> Rollout:
    if not isinstance(row["prompt"], str):
        row["prompt"] = msgspec.convert(row["prompt"], list[Message])
    row["generation"] = Generation(**row["generation"])
    row["turns"] = [Generation(**turn) for turn in row["turns"]]
    row["tool_calls"] = msgspec.convert(row["tool_calls"], list[ToolCall])
    if (given := row["conversation"]) is not None:
        row["conversation"] = Conversation(msgspec.convert(given["messages"], list[Message]), given["tools"])
    return Rollout(**row)


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
    count = sum(len(turn.tokens) for turn in rollout.all_turns)
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
