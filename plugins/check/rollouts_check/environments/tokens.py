"""Checks of tokens: exact masks under the chat templates of four families of models.

The tokenizer is that of the model `tiny`, with the control tokens of each family. This needs the extra `[train]`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rollouts.agent.episode import EpisodeOptions, run_episode
from rollouts.agent.model import EpisodeLimits
from rollouts.author_code import shown
from rollouts.env.authoring import ToolMethod
from rollouts.env.schema import schema_of
from rollouts.runs.rehearsal import CONTEXT_TOKENS, ScriptedEngine
from rollouts.types import Episode, Message, Task
from rollouts_check.environments.agents import copied, in_trio, script_for, tools_for
from rollouts_check.environments.subject import Subject
from rollouts_check.report import FailedError, UntestedError

if TYPE_CHECKING:
    from rollouts.chat.format import ChatFormat

TEMPLATES = Path(__file__).parents[1] / "templates"
CONTROL_TOKENS: Mapping[str, tuple[str, ...]] = {
    "llama3": ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>"),
    "mistral": tuple(
        "</s> <s> [INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] "
        "[SYSTEM_PROMPT] [/SYSTEM_PROMPT]".split()
    ),
    "qwen_coder": (),
}
"""The templates besides that of `tiny`, which has the form of Qwen. The first token ends a turn."""


def masks(subject: Subject) -> str:
    """The trained tokens are exactly the model's, under four chat templates."""
    formats = chat_formats()
    if not formats:
        raise UntestedError("tokens need transformers", "type: pip install 'rollouts-rl[train]'")
    task = subject.tasks[0]
    script = script_for(subject, task)
    for family, chat in formats.items():
        episode, sampled = in_trio(_play, subject, task, script, chat, tools_for(subject))
        tried = f"play an episode with the chat template of {family}"
        if episode.status.is_infrastructure:
            change = "use the roles system (first), user, assistant and tool, and text in each message"
            raise FailedError(tried, f"it ended as {episode.status.value}: {episode.trajectory.error}", change)
        live: list[int] = []
        for trajectory in episode.trajectories:
            for segment in trajectory.segments:
                segment.check()
                live += [token for token, mask in zip(segment.tokens, segment.loss_mask, strict=True) if mask > 0]
        if live != sampled:
            texts = [shown(chat.tokenizer.decode(ids)) for ids in (sampled, live)]
            seen = f"the model wrote {texts[0]}, and the trained tokens are {texts[1]}"
            raise FailedError(tried, seen, "in `rollout`, pass the messages of earlier turns on unchanged")
    return ", ".join(formats)


@functools.cache
def chat_formats() -> dict[str, ChatFormat]:
    """The chat formats by family; empty without transformers."""
    if find_spec("transformers") is None or find_spec("jinja2") is None:
        return {}
    from rollouts.chat.format import load_chat_format
    from rollouts.models.loading import load_tokenizer

    found = {"qwen": load_chat_format(load_tokenizer("tiny"))}
    for family, tokens in CONTROL_TOKENS.items():
        tokenizer = load_tokenizer("tiny")
        if tokens:
            tokenizer.add_special_tokens({"additional_special_tokens": list(tokens), "eos_token": tokens[0]})
        tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
        found[family] = load_chat_format(tokenizer)
    return found


async def _play(
    subject: Subject, task: Task, script: list[Message], chat: ChatFormat, tools: list[ToolMethod]
) -> tuple[Episode, list[int]]:
    from rollouts.inference.base import GenerateRequest, Generation

    sampled: list[int] = []

    class Engine(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> Generation:
            generation = await super().generate(request)
            sampled.extend(generation.tokens)
            return generation

    schemas = [schema_of(tool) for tool in tools]
    engine = Engine(script, schemas, chat)
    limits = EpisodeLimits(max_tokens=CONTEXT_TOKENS, max_turns=len(script), episode_seconds=60)
    episode = await run_episode(
        copied(task),
        make_env=subject.environment.make,
        chat=chat,
        inference=engine,
        limits=limits,
        rewards=(),
        session="check",
        order=(0, 0),
        seed=subject.seed,
        options=EpisodeOptions((), subject.environment.sandboxes, subject.environment.shared),
    )
    return episode, sampled
