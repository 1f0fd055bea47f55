"""Episodes in which a person, a script or chance takes the model's place.

The episode is that of a run: the same tools, limits, rewards and metrics. Its engine takes messages, and a function
gives its replies, so nothing here needs torch or a tokenizer. Not here: the terminal (`rollouts.cli.play`), and the
script's messages (`rollouts.runs.rehearsal`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import trio

from rollouts.child_environment import pass_on
from rollouts.config.files import NOWHERE
from rollouts.config.flags import Tree
from rollouts.config.merging import merge
from rollouts.config.resolving import resolve
from rollouts.errors import ConfigError
from rollouts.inference.chatting import ChatReply, ChatRequest, evaluation_only
from rollouts.inference.suspend import SuspendableEngine
from rollouts.models.loading import remote_code
from rollouts.runs.plan import Plan, make_plan
from rollouts.runs.rehearsal import DEMONSTRATIONS_MAX, ScriptedEngine, first_tasks, script_of, with_tasks
from rollouts.runs.session import Player
from rollouts.runs.workers import worker_pools
from rollouts.training.rollout_gen.groups import group_scorer
from rollouts.training.rollout_gen.pool import Job
from rollouts.types import Episode, Message, Task, ToolCall

Reply = Callable[[ChatRequest], ChatReply]
"""Gives the reply of one turn. It may wait for a person: the episode does nothing else meanwhile."""

CALL_PROBABILITY = 0.7  # how often the random agent calls a tool, if there is one
_ENGINE = f"{__name__}:create_player"
_WORDS_MAX = 6


class PlayEngine(ScriptedEngine):
    """An engine whose replies a function gives."""

    def __init__(self, reply: Reply) -> None:
        super().__init__([])
        self._reply = reply

    async def chat(self, request: ChatRequest) -> ChatReply:
        """The function's reply."""
        return self._reply(request)


@evaluation_only
def create_player(model: str) -> NoReturn:
    """The engine of the plan, which is never made: `play_episode` makes one for each episode."""
    raise AssertionError(f"the plan of an episode without a model makes no engine, not for {model}")


class Game(NamedTuple):
    """A task to play, and the replies of a demonstration of it; none: the task has no demonstration."""

    task: Task
    replies: tuple[Message, ...] = ()


@contextlib.contextmanager
def play_plan(given: Tree) -> Iterator[Plan]:
    """The plan of episodes without a model, from the given settings, of which `env` is one. Raises UserError."""
    resolved = resolve(merge(given, {"mode": "eval", "inference": _ENGINE}), NOWHERE)
    pass_on(resolved.settings.pass_env)
    with worker_pools(), remote_code(resolved.settings.trust_remote_code):
        yield make_plan(resolved)


def games_of(plan: Plan, first: int | None, count: int, *, demonstrated: bool) -> list[Game]:
    """`count` held-out tasks from number `first` on. Raises ConfigError if there are too few.

    `demonstrated`: with their demonstrations. If `first` is None, tasks that have a demonstration are chosen, if there
    are any: not only held-out ones, because few of those may have one.
    """
    (env,) = plan.environments
    held_out = plan.eval_tasks()
    replies: dict[str, tuple[Message, ...]] = {}
    games: list[Game] = []
    if demonstrated and hasattr(env.make_checked(), "demonstrations"):
        for same, _, rest in itertools.islice(with_tasks(env, first_tasks(env, held_out)), DEMONSTRATIONS_MAX * 10):
            if len(same) == 1 and same[0].key not in replies:
                replies[same[0].key] = tuple(message for message in rest if message.role == "assistant")
                games.append(Game(same[0], replies[same[0].key]))
            if first is None and len(games) == count:
                break
    if first is None and games:
        return games[:count]
    first = first or 0
    chosen = held_out[first : first + count] if first >= 0 else []
    if not chosen:
        raise ConfigError(
            f"--task {first}: there are {len(held_out)} held-out tasks; give a number from 0 to {len(held_out) - 1}"
        )
    return [Game(task, replies.get(task.key, ())) for task in chosen]


def play_episode(plan: Plan, task: Task, number: int, reply: Reply, *, for_person: bool = False) -> Episode:
    """Play one episode, and judge it. `number` is the episode's place, for its random numbers.

    `for_person`: the episode has no deadline. Raises what `run_episode` raises. KeyboardInterrupt in `reply` ends the
    episode; the environment's `close` runs before it is raised again.
    """
    settings = plan.settings
    if for_person:
        settings = dataclasses.replace(settings, episode_seconds=math.inf)
    play = Player(settings, plan.environments, plan.rewards, None).at(settings.temperature, settings.seed)
    score = group_scorer(plan.rewards, settings.on_invalid_reward, timeout_seconds=settings.reward_seconds)
    engine, job = PlayEngine(reply), Job(task, (number, 0))

    async def run() -> Episode:
        session = engine.open_session(job.order)
        episode = await play(job, session, SuspendableEngine(engine, None, job.order, session))
        return episode if score is None else (await score([[episode]]))[0][0]

    return trio.run(run)


# --- agents -----------------------------------------------------------------------------------------------------------


def scripted(replies: Sequence[Message] = ()) -> Reply:
    """Gives the replies of a demonstration, and repeats the last one. Without them: a call of each tool, then a
    text.
    """

    def reply(request: ChatRequest) -> ChatReply:
        script = replies or script_of(request.tools)
        said = sum(message.role == "assistant" for message in request.messages)
        return ChatReply(script[min(said, len(script) - 1)], "stop")

    return reply


def at_random(request: ChatRequest) -> ChatReply:
    """A call of a random tool with random arguments that fit its schema, or a text of words of the conversation. The
    seed of the turn decides.
    """
    rng = random.Random(request.seed)
    words = [word for message in request.messages for word in message.text.split()] or ["1"]
    if request.tools and rng.random() < CALL_PROBABILITY:
        function = rng.choice(request.tools)["function"]
        arguments = random_value(function["parameters"], rng, words)
        call = ToolCall(function["name"], arguments, f"call_{len(request.messages)}")
        return ChatReply(Message("assistant", "", [call]), "stop")
    text = " ".join(rng.choices(words, k=rng.randint(1, _WORDS_MAX)))
    return ChatReply(Message("assistant", rng.choice([text, str(rng.randint(0, 99))])), "stop")


def random_value(schema: Mapping[str, Any], rng: random.Random, words: Sequence[str] = ("1",)) -> Any:
    """A random value that fits a JSON schema. Texts are chosen from `words`.

    >>> random_value({"enum": ["red"]}, random.Random(0)), random_value({"type": "integer"}, random.Random(0))
    ('red', 49)
    """
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return rng.choice(schema["enum"])
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return random_value(rng.choice(options), rng, words)
    kind = schema.get("type")
    if isinstance(kind, list):
        return random_value({**schema, "type": rng.choice(kind)}, rng, words)
    low, high = schema.get("minimum", 0), schema.get("maximum", max(99, schema.get("minimum", 0)))
    if kind == "object":
        known, required = schema.get("properties", {}), schema.get("required", ())
        chosen = [name for name in known if name in required or rng.random() < 0.5]
        return {name: random_value(known[name], rng, words) for name in chosen}
    if kind == "array":
        count = max(schema.get("minItems", 0), min(rng.randint(0, 2), schema.get("maxItems", 2)))
        places = schema.get("prefixItems")
        items = places if places else [schema.get("items", {})] * count
        return [random_value(item if isinstance(item, Mapping) else {}, rng, words) for item in items]
    if kind == "integer":
        return rng.randint(math.ceil(low), math.floor(high))
    if kind == "number":
        return round(rng.uniform(low, high), 2)
    return {"boolean": rng.random() < 0.5, "null": None}.get(str(kind), rng.choice(words))
