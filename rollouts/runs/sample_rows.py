"""A few rollouts of a step or an evaluation, as the rows of a table for loggers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollouts.loggers.base import Row, SampleSettings
from rollouts.training.loops.rl import StepReport
from rollouts.types import Episode, Message, Trajectory

SAMPLES, EVAL_SAMPLES = "samples", "eval_samples"
"""The tables of rollouts that are trained on, and of evaluations."""


class Judged(NamedTuple):
    """A rollout, as far as a run has come with it. `advantage` is None if it is not trained on; `dropped` is the reason
    of a filter. `temperature` is that of an evaluation.
    """

    episode: Episode
    advantage: float | None = None
    dropped: str | None = None
    temperature: float | None = None


def step_rollouts(report: StepReport) -> list[Judged]:
    """The rollouts of a step, in the order of their groups; of roles, each by itself."""
    advantages = iter(report.advantages)
    return [
        Judged(episode, next(advantages) if group.dropped is None else None, group.dropped)
        for group in report.groups
        for episode in group.episodes
    ]


def held_out_rollouts(ended: Mapping[tuple[float, tuple[int, ...]], Episode]) -> list[Judged]:
    """The rollouts of an evaluation, by minus their temperature and their order; of roles, each by itself."""
    return [
        Judged(own, temperature=-temperature)
        for (temperature, _), episode in sorted(ended.items(), key=lambda each: each[0])
        for own in episode.by_role
    ]


def sample_rows(rollouts: Sequence[Judged], settings: SampleSettings) -> list[Row]:
    """At most `settings.samples` rollouts, evenly spread from the lowest reward to the highest. Rollouts that could not
    be judged come first.
    """
    ordered = sorted(rollouts, key=lambda each: (each.episode.score.value is not None, each.episode.score.value or 0.0))
    count = min(settings.samples, len(ordered))
    chosen = [ordered[round(place * (len(ordered) - 1) / max(count - 1, 1))] for place in range(count)]
    parts = dict.fromkeys(name for each in chosen for name in each.episode.score.parts)
    has = {
        "task": any(each.episode.task.id for each in chosen),
        "role": any(each.episode.role for each in chosen),
        "env": any(each.episode.task.env for each in chosen),
        "temperature": any(each.temperature is not None for each in chosen),
        "advantage": any(each.temperature is None for each in chosen),
        "dropped": any(each.dropped for each in chosen),
    }
    return [_row(each, parts, has, settings.sample_characters) for each in chosen]


def _row(each: Judged, parts: Mapping[str, Any], has: Mapping[str, bool], characters: int) -> Row:
    episode, trajectory = each.episode, each.episode.trajectory
    optional: dict[str, str | float | None] = {
        "role": episode.role,
        "env": episode.task.env,
        "temperature": each.temperature,
        "advantage": each.advantage,
        "dropped": each.dropped or "",
    }
    return {
        "group": episode.order[0],
        "rollout": episode.order[1],
        **({"task": episode.task.id or ""} if has["task"] else {}),
        "conversation": conversation_text(trajectory, characters),
        "reward": episode.score.value,
        **{f"part/{name}": episode.score.parts.get(name) for name in parts},
        **{name: value for name, value in optional.items() if has[name]},
        "status": trajectory.status.value,
        "why": episode.score.why or trajectory.error or "",
        "turns": trajectory.turns,
        "tokens": sum(played.sampled_count for played in episode.trajectories),
    }


def conversation_text(trajectory: Trajectory, characters_max: int) -> str:
    """A conversation as paragraphs `role: text`. The middle of a long one is left out: its beginning has the task, and
    its end the answer.
    """
    text = "\n\n".join(f"{message.role}: {message_words(message)}" for message in trajectory.messages)
    if len(text) <= characters_max:
        return text
    left_out = f"\n… ({len(text) - characters_max} characters) …\n"
    head = characters_max // 2
    return text[:head] + left_out + text[len(text) - (characters_max - head) :]


def message_words(message: Message) -> str:
    """The text of a message, and its calls."""
    calls = (
        "[unreadable call]"
        if call.error
        else f"[{call.name}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())})]"
        for call in message.tool_calls
    )
    return " ".join(filter(None, (message.text.strip(), *calls)))
