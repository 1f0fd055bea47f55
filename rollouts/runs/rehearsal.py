"""The trial of `--dry-run`, without the run's model: scripted episodes, and one small training step.

A script replaces the model in the episode: it calls each of the environment's tools with arguments made from its
schema, then replies with text. (`rollouts check` replays demonstrations.)
Episode, tools, rewards, metrics and filters run as in a real run. So does the training step, which trains the toy model
of the package on invented tokens. Not here: everything that needs the run's model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import trio

from rollouts.agent.episode import EpisodeOptions, tools_of_task
from rollouts.author_code import shown
from rollouts.chat.format import ChatFormat
from rollouts.chat.masks import tokenize_supervised
from rollouts.config.settings import Settings
from rollouts.data.source import require_file
from rollouts.encoding import encode
from rollouts.env.authoring import roles_of
from rollouts.env.mixing import FORGOTTEN, RETURNED_NONE
from rollouts.env.schema import schema_of
from rollouts.errors import ConfigError, EnvironmentDefinitionError, ModelError, RunError, counted, said_of
from rollouts.inference.base import Capabilities, GenerateRequest, Generation, Health, VersionSpan, WeightUpdate
from rollouts.inference.chatting import ChatReply, ChatRequest
from rollouts.models.loading import adapters_beneath, load_tokenizer
from rollouts.runs.components import takes_rows
from rollouts.runs.environments import PlannedEnvironment
from rollouts.runs.inspecting import tried_rows
from rollouts.runs.jobs.chat_data import demonstration_samples
from rollouts.runs.plan import Plan
from rollouts.runs.session import Player, episode_limits, load_chat
from rollouts.runs.workers import sandbox_lines
from rollouts.training.algorithms.algorithm import Algorithm, Stage, active_terms, function_label
from rollouts.training.rollout_gen.groups import Group, filter_group, group_scorer, role_groups
from rollouts.training.rollout_gen.pool import Job, run_episodes
from rollouts.types import Episode, Message, Score, Segment, Status, Task, ToolCall, Trajectory

CONTEXT_TOKENS = 1_000_000
PROMPT_CHARACTERS = 160  # how much of the end of the rendered prompt is shown
CONVERSATIONS_MAX = 100  # whose tokens are made
DEMONSTRATIONS_MAX, TASKS_MAX = 100, 1000  # read to find a demonstration of a known task
MESSAGES_MAX = 12  # shown messages, besides a call of each tool and its answer
REPLY = "This is a scripted reply."
TOY = "tiny"
_LOGPROB = -6.0  # the logprob of each scripted or invented token, similar to the toy model's
_EXAMPLES: Mapping[str, Any] = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}


def rehearse(plan: Plan, held_out: Sequence[Task], *, without_model: bool = False) -> tuple[list[str], str]:
    """Try the plan. Returns lines, and how many conversations of the data were tried ("" if all). `without_model`:
    torch or transformers is not installed, so episodes use messages only, and no training step is tried. Raises
    UserError, with file and line, if a component fails.
    """
    settings = plan.settings
    chat, missing = (None, "") if without_model else _chat_of(plan)
    plan = plan._replace(filters=()) if without_model else plan  # a filter may see rewards as tensors
    lines, tried, scores = [missing] if missing else [], "", list[Score]()
    lines += sandbox_lines(plan.one("sandbox").name, plan.environments)
    for env in plan.environments if settings.mode != "sft" or (held_out and plan.rewards) else ():
        if task := _a_task(env, held_out):
            with _users_mistake(env.alias):
                groups = trio.run(_play, plan, env, task, chat)
            scores.append(groups[0].episodes[0].score)
            lines += [line for group in groups for line in _episode_lines(plan, env, group, chat)]
    if settings.mode == "sft" and chat is not None:
        words, tried = _tried_conversations(plan, held_out, chat)
        lines.append(words)
    elif settings.mode == "sft" and settings.data not in ("", *plan.resolved.source.objects.rows):
        require_file(settings.data)  # without the model's tokenizer, no conversation is read
    if settings.mode != "eval" and not without_model:
        with _users_mistake():
            lines += trio.run(_train, plan, next(iter(scores), Score(1.0)))
    return lines, tried


@contextlib.contextmanager
def _users_mistake(place: str = "") -> Iterator[None]:
    """Turn a RunError of the block into a UserError: in a dry run, only the user's components can fail."""
    with said_of(place):
        try:
            yield
        except RunError as error:
            raise ConfigError(str(error)) from error


def _chat_of(plan: Plan) -> tuple[ChatFormat | None, str]:
    """The model's chat format, or the reason why the episode uses messages only. Makes no requests to the hub. Raises
    ModelError.
    """
    if plan.is_chat:
        return None, ""
    whole, _ = adapters_beneath(plan.settings.model)
    try:
        tokenizer = load_tokenizer(plan.settings.model, local_files_only=True)
    except ModelError as error:
        if Path(whole).is_dir() or "--trust-remote-code" in str(error):
            raise
        return None, f"prompt: not shown, because the tokenizer of {whole} is not on this machine"
    return load_chat(plan.settings, plan.environments, tokenizer, plan.tool_parser), ""


def _a_task(env: PlannedEnvironment, held_out: Sequence[Task]) -> Task | None:
    """A held-out task of the environment, else a training task; None for an environment that is never played."""
    tasks = [task for task in held_out if task.env == env.alias]
    if tasks or env.share == 0:
        return tasks[0] if tasks else None
    source = env.training_source()
    return next(iter(source(0) if callable(source) else source), None)


# --- the episode ------------------------------------------------------------------------------------------------------


def script_of(schemas: Sequence[dict[str, Any]]) -> list[Message]:
    """The messages of the scripted model: a call of each tool, then a text."""
    calls = []
    for number, schema in enumerate(schemas, start=1):
        function = schema["function"]
        known = function["parameters"]["properties"]
        arguments = {name: example_of(known[name]) for name in function["parameters"]["required"]}
        calls.append(Message("assistant", "", [ToolCall(function["name"], arguments, f"call_{number}")]))
    return [*calls, Message("assistant", REPLY)]


def example_of(schema: Mapping[str, Any]) -> Any:
    """A value that fits a JSON schema.

    >>> example_of({"type": "string", "enum": ["red", "blue"]}), example_of({"type": "array"}), example_of({})
    ('red', [], '1')
    """
    for key in ("enum", "examples"):
        if schema.get(key):
            return schema[key][0]
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return example_of(options[0])
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object" and schema.get("properties"):
        return {name: example_of(schema["properties"][name]) for name in schema.get("required", ())}
    if kind in ("integer", "number"):
        for bound, beyond in (("minimum", 0), ("exclusiveMinimum", 1), ("maximum", 0), ("exclusiveMaximum", -1)):
            if bound in schema:
                return schema[bound] + beyond
    return _EXAMPLES.get(str(kind), "1")


class ScriptedEngine:
    """An engine that returns the messages of a script in order, and then repeats the last one. `chat` None: it takes
    messages. Without a script, it calls each tool of the request, then replies with text.
    """

    capabilities = Capabilities(in_process=True, chats=True, checks=True)
    context_tokens_max = CONTEXT_TOKENS
    vocabulary_size = version = 0

    def __init__(
        self, script: Sequence[Message] = (), schemas: Sequence[dict[str, Any]] = (), chat: ChatFormat | None = None
    ) -> None:
        self._script = script
        self._ids = [] if chat is None else [_ids_of(message, schemas, chat) for message in self._script]
        self.more_tokens = sum(map(len, self._ids[1:-1]))  # of the calls after the first one

    async def __aenter__(self) -> ScriptedEngine:
        return self

    async def __aexit__(self, *exc: Any) -> None:
        return None

    def open_session(self, order: tuple[int, ...]) -> str:
        """Nothing is kept."""
        return str(order)

    def close_session(self, session: str) -> None:
        """Nothing is kept."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """The script's next message as ids."""
        ids = self._ids[min(request.order[-1], len(self._ids) - 1)]
        tokens = ids[: request.max_tokens]
        spans = [VersionSpan(0, 0, len(tokens))]
        return Generation(tokens, [_LOGPROB] * len(tokens), "stop" if len(tokens) == len(ids) else "length", spans)

    async def chat(self, request: ChatRequest) -> ChatReply:
        """The script's next message."""
        said = sum(message.role == "assistant" for message in request.messages)
        script = self._script or script_of(request.tools)
        return ChatReply(script[min(said, len(script) - 1)], "stop", 0, 1)

    async def check(self, tools: Sequence[dict[str, Any]] = (), temperature: float = 1.0) -> None:
        """Do nothing: this engine can always be used."""

    async def score(self, tokens: list[int], temperature: float = 1.0) -> list[float]:
        """The logprobs that `generate` returns."""
        return [0.0, *[_LOGPROB] * (len(tokens) - 1)]

    async def update_weights(self, update: WeightUpdate) -> None:
        """Do nothing: this engine has no weights."""

    async def health(self) -> Health:
        """Report that the engine works."""
        return Health(True, 0)


def _ids_of(message: Message, schemas: Sequence[dict[str, Any]], chat: ChatFormat) -> list[int]:
    """The ids of a message, as if the model had sampled it."""
    row = tokenize_supervised([Message("user", "?"), message], schemas, chat)[-1]
    return [token for token, weight in zip(row.tokens, row.loss_mask, strict=True) if weight > 0]


async def _play(plan: Plan, env: PlannedEnvironment, task: Task, chat: ChatFormat | None) -> list[Group]:
    """Two scripted rollouts of the task as a group of each role, so that group rewards can compare them."""
    settings = plan.settings
    schemas = await _schemas_of(env, task, settings)
    if roles_of(env.make_checked()):  # each role calls its own tools, which only an engine with messages knows
        chat, engine = None, ScriptedEngine()
    else:
        script = script_of(schemas if chat is None or chat.can_write_calls else [])
        engine = ScriptedEngine(script, schemas, chat)
    # The run's limits are for one call and a text here. Each further call gets a turn and tokens of its own.
    limits = dataclasses.replace(
        settings,
        max_turns=settings.max_turns + max(0, len(schemas) - 1),
        max_tokens=settings.max_tokens + engine.more_tokens,
    )
    player = Player(limits, plan.environments, plan.rewards, chat)
    jobs = [Job(task, (0, rollout)) for rollout in range(min(2, settings.samples_per_prompt))]
    play = player.at(settings.temperature, settings.seed)
    episodes: Sequence[Episode] = await run_episodes(jobs, play, engine, concurrency=settings.concurrency)
    score = group_scorer(plan.rewards, settings.on_invalid_reward, timeout_seconds=settings.reward_seconds)
    if score is not None:
        (episodes,) = await score([episodes])
    groups = role_groups(Group(0, task, tuple(episodes)))
    for group in groups:
        _check_played(env, group.episodes[0])
    return groups


async def _schemas_of(env: PlannedEnvironment, task: Task, settings: Settings) -> list[dict[str, Any]]:
    """The schemas of the tools that the model has in this task. If the environment fails, those of the marked tools:
    the episode then fails too, and is reported.
    """
    if env.chooses_tools:
        limits = episode_limits(settings, settings.temperature)
        with contextlib.suppress(RunError):
            options = EpisodeOptions(env.tools, env.sandboxes, env.shared)
            tools = await tools_of_task(task, env.make, ScriptedEngine([]), limits, options)
            return [schema_of(tool) for tool in tools]
    return env.schemas()


def _check_played(env: PlannedEnvironment, episode: Episode) -> None:
    """Raise an error if the environment failed or a reward raised. A reward may return None (it cannot judge)."""
    begin = f"{env.alias or env.name}: a test episode with scripted replies"
    if episode.status.is_infrastructure:
        raise EnvironmentDefinitionError(f"{begin} failed as {episode.status.value}: {episode.trajectory.error}")
    for why in episode.score.why.split("; "):
        if " could not judge: " in why and f": {RETURNED_NONE}" not in why:
            raise ConfigError(f"{begin.replace(': a', ': in a')}, the reward {why}")


def _episode_lines(plan: Plan, env: PlannedEnvironment, group: Group, chat: ChatFormat | None) -> Iterator[str]:
    """The messages, calls and rewards of a scripted episode, as lines."""
    episode = group.episodes[0]
    trajectory = episode.trajectory
    of = (f" of {env.alias}" if env.alias else "") + (f", the {group.role}" if group.role else "")
    yield f"a scripted episode{of}: {counted(len(trajectory.messages), 'message')}, {trajectory.status.value}"
    first = trajectory.task.messages
    if group.role:
        first = list(itertools.takewhile(lambda message: message.role != "assistant", trajectory.messages))
    if chat is not None and len(first) < len(trajectory.messages):
        prompt = chat.render(first, trajectory.tools, True)
        count = len(chat.encode_prompt(first, trajectory.tools))
        yield f"  prompt: {count} tokens, the end is {shown(prompt[-PROMPT_CHARACTERS:])}"
    yield from _message_lines(trajectory)
    if chat is not None and trajectory.tools and not chat.can_write_calls:
        yield "  no tool was called, because the tool parser has no `write`"
    if "turn_limit" in trajectory.metrics and hasattr(env.make(), "reply"):
        yield f"  note: `reply` never ended the episode; it ended at --max-turns {plan.settings.max_turns}"
    if failures := _failures(episode):
        yield f"  a tool failed ({failures}); its arguments are invented, so check whether it may fail"
    yield from (f"    {name}: {error}" for name, error in trajectory.tool_errors.items())
    yield from _score_lines(episode)
    if plan.filters:
        yield f"  filters: {_filter_words(plan, group)}"


def _failures(episode: Episode) -> str:
    """The kinds of failed tool calls in the episode."""
    return ", ".join(name.partition("/")[2] for name in episode.metrics if name.startswith("tool_failure/"))


def _score_lines(episode: Episode) -> Iterator[str]:
    """The rewards and metrics of the episode."""
    score = episode.score
    why = f"; {score.why}" if score.why else ""
    yield f"  reward: {_number(score.value)} ({_numbers(score.parts)}){why}"
    if RETURNED_NONE in why:
        yield f"  {FORGOTTEN}"
    metrics = _numbers({name[7:]: value for name, value in episode.metrics.items() if name.startswith("metric/")})
    failed = f"{episode.metrics['metric_failures']:g} failed" if "metric_failures" in episode.metrics else ""
    if words := ", ".join(filter(None, (metrics, failed))):
        yield f"  metrics: {words}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def _numbers(values: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in values.items())


def _message_lines(trajectory: Trajectory) -> Iterator[str]:
    """The first messages of a conversation and their calls, each cut to one line, and how many there are more."""
    first = len(trajectory.tools) * 2 + MESSAGES_MAX  # a call of each tool and its answer, and others
    for message in trajectory.messages[:first]:
        if message.text or not message.tool_calls:
            yield f"  {'answer' if message.role == 'tool' else message.role}: {shown(message.text)}"
        for call in message.tool_calls:
            arguments = ", ".join(f"{key}={value!r}" for key, value in call.arguments.items())
            why = f", which was not read back: {shown(call.error)}" if call.error else ""
            yield f"  call: {call.name}({arguments}){why}"
    if (more := len(trajectory.messages) - first) > 0:
        yield f"  and {counted(more, 'more message')}"


def _filter_words(plan: Plan, group: Group) -> str:
    """Describe whether the filters keep the scripted group. Raises ConfigError if a filter fails."""
    from rollouts.training.loops.rl_batch import advantage_rewards

    def see(group: Group, step: int) -> list[float | None]:
        return advantage_rewards(group, plan.algorithm, step, max_tokens=plan.settings.max_tokens)

    with _users_mistake():
        dropped = filter_group(group, plan.filters, step=0, see=see).dropped
    return f"drop this group ({dropped}); its rollouts are alike" if dropped else "keep this group"


def _tried_conversations(plan: Plan, held_out: Sequence[Task], chat: ChatFormat) -> tuple[str, str]:
    """Describe the first demonstrations or conversations, and say how many they are if there are more. Raises
    ModelError if the template cannot show one.
    """
    limited = f"the first {CONVERSATIONS_MAX} conversations"
    if takes_rows(plan.settings.mode, plan.chosen):
        words, are_all = tried_rows(plan, chat, CONVERSATIONS_MAX)
        return words, "" if are_all else limited
    total = max(1, plan.settings.steps * plan.settings.prompts_per_step)
    count = min(total, CONVERSATIONS_MAX)
    settings = dataclasses.replace(plan.settings, steps=1, prompts_per_step=count)
    samples = demonstration_samples(plan.environments, held_out, settings, chat)
    live = sum(weight > 0 for sample in samples for weight in sample.loss_mask)
    tokens = sum(len(sample.tokens) for sample in samples)
    of = f"the first {count} of {total} demonstrations" if total > count else counted(count, "demonstration")
    return f"{of}: {counted(tokens, 'token')}, {live} of them trained", limited if total > count else ""


# --- demonstrations ---


def with_tasks(
    env: PlannedEnvironment, tasks: Sequence[Task]
) -> Iterator[tuple[list[Task], list[Message], list[Message]]]:
    """Each demonstration of the environment as the different tasks with its prompt, the prompt, and the messages after
    it. Raises EnvironmentDefinitionError if there is no demonstration.
    """
    by_prompt: dict[bytes, dict[bytes, Task]] = {}
    for task in tasks:
        by_prompt.setdefault(encode(task.messages), {}).setdefault(encode([task.answer, task.info]), task)
    for messages in env.demonstrations():
        count = next((place for place, message in enumerate(messages) if message.role == "assistant"), len(messages))
        yield list(by_prompt.get(encode(messages[:count]), {}).values()), messages[:count], messages[count:]


def first_tasks(env: PlannedEnvironment, held_out: Sequence[Task]) -> list[Task]:
    """The held-out tasks of the environment, and its first training tasks."""
    source = env.training_source()
    drawn = itertools.islice(source(0) if callable(source) else source, TASKS_MAX)
    return [*(task for task in held_out if task.env == env.alias), *drawn]


# --- the training step ------------------------------------------------------------------------------------------------


async def _train(plan: Plan, score: Score) -> list[str]:
    """One training step of every stage, on invented rollouts whose rewards have the parts of `score`."""
    backend = _toy_backend(plan)
    try:
        lines = []
        for stage in plan.schedule:
            with _users_mistake(f"[[schedule]], from step {stage.step}" if stage.step else ""):
                unit = await _step(plan, stage, score, backend)
            begin = f"a small training step, from step {stage.step}" if stage.step else "a small training step"
            lines.append(f"{begin}: {_step_words(stage.algorithm, unit)}")
        return lines
    finally:
        backend.close()


def _toy_backend(plan: Plan) -> Any:
    """The torch backend with the toy model in place of every model of the run."""
    from rollouts.training.backends.torch import create_torch_backend

    wanted = plan.auxiliary_models
    if wanted is not None:
        critic = wanted.critic if wanted.critic in ("", "head") else TOY
        wanted = wanted._replace(critic=critic, teacher=TOY if wanted.teacher else "")
    rank = min(plan.settings.lora_rank, 2)
    return create_torch_backend(TOY, 0, 1, plan.lr, rank, 4096, plan.algorithms, wanted)  # invented, without roles


async def _step(plan: Plan, stage: Stage, score: Score, backend: Any) -> str:
    """One step as in the training loops. Returns the unit of the loss's values; "" if nothing is trained."""
    from rollouts.training.batching import make_batch, part_batch
    from rollouts.training.loops.rl_batch import RLSettings, complete_batch, prepare_rl_batch
    from rollouts.training.rollout_gen.groups import group_samples

    settings, algorithm = plan.settings, stage.algorithm
    is_rl = settings.mode == "rl"
    groups = [invented_group(number, settings.samples_per_prompt if is_rl else 2, score) for number in range(2)]
    config = RLSettings(
        1,
        temperature=settings.temperature,
        response_tokens_max=settings.max_tokens,
        minibatches=min(2, settings.minibatches),
    )
    if is_rl:
        batch = prepare_rl_batch(groups, algorithm, config, stage.step, name=stage.name).batch
        await complete_batch(backend, batch, algorithm, minibatches=config.minibatches)
    else:
        samples = group_samples(groups)
        of_each = [0.0] * len(samples)
        batch = make_batch(samples, of_each, aggregation=algorithm.aggregation, step=stage.step, algorithm=stage.name)
    if not any(any(row.loss_mask) for row in batch.rows):
        return ""
    for part in part_batch(batch, config.minibatches, algorithm.aggregation, settings.max_tokens):
        await backend.forward_backward(part)
        await backend.optim_step()
    return batch.unit


def invented_group(number: int, size: int, score: Score) -> Group:
    """Up to four short rollouts with the rewards 1, 0, 1 and 0, whose parts are named as those of `score`."""
    task = Task("?", id=str(number))
    episodes = []
    for rollout in range(min(size, 4)):
        value = float(rollout % 2 == 0)
        live = 2 + rollout % 2
        segment = Segment(
            [5, 6, *range(7, 7 + live)],
            [0.0, 0.0] + [1.0] * live,
            [0.0, 0.0] + [_LOGPROB] * live,
            [-1, -1] + [0] * live,
        )
        messages = [*task.messages, Message("assistant", REPLY)]
        trajectory = Trajectory(task, messages, segments=[segment], status=Status.COMPLETED)
        own = Score(value, dict.fromkeys(score.parts, value), "", score.weights)
        episodes.append(Episode((number, rollout), task, [trajectory], own, {}))
    return Group(number, task, tuple(episodes))


def _step_words(algorithm: Algorithm, unit: str) -> str:
    if not unit:
        chooser = algorithm.select or algorithm.pairs
        label = function_label(chooser) if chooser is not None else "the algorithm"
        return f"{label} trains on none of the rewards 1 and 0, so the loss was not called"
    loss = " + ".join(function_label(term.function) for term in active_terms(algorithm))
    takes = function_label(algorithm.aggregation)
    return f"every function was called; {loss} gives one value per {unit}, as {takes} takes"
