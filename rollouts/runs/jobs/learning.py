"""Whether the steps of a run can teach the model anything, and the reason if they cannot.

`why_nothing` and `failing_calls` look at one step and keep nothing. `LearningCheck` counts the steps
in a row in which the same thing is wrong: it warns once after `STEPS_MAX` of them. At the end of the run, it says what
was wrong in the last steps.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollouts.config.settings import Settings
from rollouts.training.algorithms.advantages import SPREAD_MIN
from rollouts.training.algorithms.algorithm import Algorithm, function_label, needs, requests
from rollouts.training.algorithms.checks import ONE_SAMPLE, compares_groups
from rollouts.training.rollout_gen.groups import Group
from rollouts.types import Episode, Status, ToolCall, Trajectory

STEPS_MAX = 8
"""After so many steps in a row in which nothing is learned, the user gets a note."""

NOTHING = "nothing"
"""The topic of `LearningCheck` for the step as a whole. All other topics are names of tools, and `CALLS`."""

CALLS = "all tool calls"
"""The topic of `LearningCheck` for tool calls that no tool answered."""

ERROR = "Error: "
"""How the answer to a failed call begins."""

UNKNOWN = "tool_failure/unknown_tool"
"""The metric of a trajectory that counts its calls of tools that do not exist."""

ADVICE = (
    "train on demonstrations first, or longer (--mode sft+rl --sft.steps 300), or give --model "
    "a model that can call tools"
)
"""What to do if the model cannot call tools."""


@dataclass
class LearningCheck:
    """Counts, for each topic, the steps in a row in which something was wrong. `warn` gets one note for each topic."""

    warn: Callable[[str], None]
    _steps: int = 0
    _streaks: dict[str, int] = field(default_factory=dict)
    _words: dict[str, str] = field(default_factory=dict)
    _has_warned: set[str] = field(default_factory=set)

    def see(self, found: Mapping[str, str]) -> None:
        """Add one step: for each topic what was wrong with it, "" if nothing was. A topic that is not in `found`, such
        as a tool that was not called, keeps its count.
        """
        self._steps += 1
        for topic, words in found.items():
            self._streaks[topic] = self._streaks.get(topic, 0) + 1 if words else 0
            self._words[topic] = words
        for topic in self._lasting(STEPS_MAX):
            if topic not in self._has_warned:
                self._has_warned.add(topic)
                self.warn(self._sentence(topic))

    def at_the_end(self) -> list[str]:
        """One sentence for each topic that was wrong in the last steps, for at least `STEPS_MAX` steps or since the
        first step.
        """
        least = max(1, min(STEPS_MAX, self._steps))
        return [self._sentence(topic) for topic in self._lasting(least)]

    def _lasting(self, least: int) -> list[str]:
        """The topics that were wrong in at least so many steps in a row."""
        return [topic for topic, streak in self._streaks.items() if streak >= least]

    def _sentence(self, topic: str) -> str:
        count, words = self._streaks[topic], self._words[topic]
        if topic != NOTHING:
            return words
        steps = "the last step" if count == 1 else f"the last {count} steps"
        return f"nothing was learned in {steps}: {words}"


def findings(
    groups: Sequence[Group],
    advantages: Sequence[float],
    metrics: Mapping[str, float],
    algorithm: Algorithm,
    settings: Settings,
) -> dict[str, str]:
    """What is wrong with one step of mode rl, by topic, for `LearningCheck.see`. `advantages` [N] are the mean
    advantages of the kept groups' rollouts.
    """
    return {NOTHING: why_nothing(groups, advantages, metrics, algorithm, settings), **failing_calls(groups)}


def why_nothing_demonstrated(metrics: Mapping[str, float]) -> str:
    """Why a step of mode sft taught nothing; empty if it taught something.

    >>> why_nothing_demonstrated({"optim/lr": 0.0, "optim/grad_norm": 1.0})
    'the learning rate is 0'
    """
    if metrics.get("optim/lr") == 0:
        return "the learning rate is 0"
    if metrics.get("optim/skipped") == 1 and metrics.get("optim/grad_norm") == 0:
        return "no token of the demonstrations is trained on: the loss mask is 0 everywhere"
    return "the gradient is 0" if metrics.get("optim/grad_norm") == 0 else ""


def why_nothing(
    groups: Sequence[Group],
    advantages: Sequence[float],
    metrics: Mapping[str, float],
    algorithm: Algorithm,
    settings: Settings,
) -> str:
    """Why a step of mode rl taught nothing; empty if it taught something. Arguments are those of `findings`."""
    if metrics.get("optim/lr") == 0:
        return "the learning rate is 0"
    uses_advantages = algorithm.pairs is None and "advantages" in needs(algorithm)
    has_advantage = any(abs(advantage) > SPREAD_MIN for advantage in advantages)
    if has_advantage if uses_advantages else metrics.get("optim/grad_norm", 1.0) != 0:
        return ""
    of_rewards = uses_advantages and "rewards" in requests(algorithm.advantage, "advantages")
    flat = why_flat(groups) if of_rewards or algorithm.pairs is not None else ""
    dropped = Counter(group.dropped for group in groups if group.dropped is not None)
    filtered = f"{flat and f'{flat}, and '}the filters dropped every group ({', '.join(dropped)})"
    kept = [each for group in groups if group.dropped is None for each in group.episodes]
    played = [each for each in kept if not each.status.is_infrastructure]
    truncated = bool(played) and all(episode.status is Status.TRUNCATED for episode in played)
    is_skipped = metrics.get("optim/skipped") == 1
    reasons = (
        (len(groups) == dropped.total(), filtered),
        (truncated, _why_truncated(played, settings) if truncated else ""),
        (settings.samples_per_prompt == 1 and compares_groups(algorithm), ONE_SAMPLE),
        (bool(flat), flat),
        (
            is_skipped and bool(metrics.get("staleness/dropped")),
            f"all tokens are older than --staleness {settings.staleness} allows: raise it",
        ),
        (is_skipped and algorithm.select is not None, f"--select {_label(algorithm.select)} chose no rollout"),
        (algorithm.pairs is not None, f"--pairs {_label(algorithm.pairs)} found nothing to compare"),
        (uses_advantages, f"all advantages of {_label(algorithm.advantage)} are 0 for the tokens that are trained on"),
    )
    return next((words for holds, words in reasons if holds), "the gradient is 0")


def _label(function: Callable[..., Any] | None) -> str:
    return "" if function is None else function_label(function)


def why_flat(groups: Iterable[Group]) -> str:
    """Which reward is flat, and its value: all rollouts of each group have this value. Empty if the rewards of a group
    differ, or if there are none.
    """
    judged = [[each for each in group.episodes if each.score.value is not None] for group in groups]
    values = [[each.score.value or 0.0 for each in episodes] for episodes in judged if episodes]
    if not values or any(_spread(own) > SPREAD_MIN for own in values):
        return ""
    together = [value for own in values for value in own]
    episodes = [episode for own in judged for episode in own]
    if _spread(together) > SPREAD_MIN:
        low, high = min(together), max(together)
        return (
            f"the reward is flat in each group: the rollouts of one prompt all have the same reward (prompts differ, "
            f"from {low:.3f} to {high:.3f})"
        )
    whys = Counter(episode.score.why.splitlines()[0] for episode in episodes if episode.score.why)
    why = f" ({whys.most_common(1)[0][0]})" if whys else ""
    scores = [episode.score.parts for episode in episodes]
    parts = {name: _range([each.get(name) for each in scores]) for name in dict.fromkeys(itertools.chain(*scores))}
    if len(parts) == 1:
        ((name, value),) = parts.items()
        return f"the reward `{name}` is flat: it is {value} in every rollout{why}"
    of_parts = "; ".join(f"`{name}` is {value}" for name, value in parts.items())
    return f"the reward is flat: it is {together[0]:.3f} in every rollout{of_parts and f' ({of_parts})'}{why}"


def _range(values: Iterable[float | None]) -> str:
    """The values of a part of the reward: one number, a range, or "not judged"."""
    judged = [value for value in values if value is not None]
    if not judged:
        return "not judged"
    low, high = min(judged), max(judged)
    return f"from {low:.3f} to {high:.3f}" if high - low > SPREAD_MIN else f"{judged[0]:.3f}"


def _why_truncated(played: Sequence[Episode], settings: Settings) -> str:
    sampled = [sum(trajectory.sampled_count for trajectory in episode.trajectories) for episode in played]
    if any(count >= settings.max_tokens for count in sampled):
        return f"all replies were cut off at --max-tokens {settings.max_tokens}: raise it"
    reasons = Counter(episode.trajectory.error or "cut off" for episode in played)
    return f"all replies were cut off: {reasons.most_common(1)[0][0]}"


def failing_calls(groups: Iterable[Group]) -> dict[str, str]:
    """For each tool that was called: why it failed in every call, with the first error; empty if a call went well. The
    topic CALLS has the calls that no tool answered, because they were malformed or of an unknown tool. Trajectories
    of a saved run do not say which tools there were; their counts say if a tool was unknown.
    """
    found: dict[str, str] = {}
    for trajectory in (each for group in groups for episode in group.episodes for each in episode.trajectories):
        known = {schema["function"]["name"] for schema in trajectory.tools}
        may_be_unknown = known or UNKNOWN in trajectory.metrics
        for call, text in _answers(trajectory):
            first_error = next(iter(text.removeprefix(ERROR).splitlines()), "")
            is_error = text.startswith(ERROR)
            if call.error or (is_error and may_be_unknown and call.name not in known):
                words = f"no tool ran, for every call was malformed or of an unknown tool: {first_error!r}; {ADVICE}"
                found.setdefault(CALLS, words)
            elif not is_error or not known:
                found[call.name] = ""
            elif call.name in trajectory.tool_errors:
                words = f"the tool `{call.name}` failed in every call: {trajectory.tool_errors[call.name]}"
                found.setdefault(call.name, words)
            else:
                words = f"the tool `{call.name}` got wrong arguments in every call: {first_error}; {ADVICE}"
                found.setdefault(call.name, words)
    if found.keys() - {CALLS}:  # a tool was called, and says more
        found |= {CALLS: ""} if CALLS in found else {}
    return found


def _answers(trajectory: Trajectory) -> Iterator[tuple[ToolCall, str]]:
    """Each tool call with the text that answers it. Some templates answer all calls of a reply in one user message. A
    program that plays an episode sees a call that cannot be read as text, and does not answer it.
    """
    waiting: list[ToolCall] = []
    for message in trajectory.messages:
        if message.role == "assistant":
            waiting = list(message.tool_calls)
        elif message.role == "tool":
            yield from [(waiting.pop(0), message.text)] if waiting else []
        else:
            yield from ((call, call.error or message.text) for call in waiting)
            waiting = []


@dataclass
class PartCounts:
    """Counts the judged rollouts of each part of the reward until one is not 0. Penalties do not count."""

    _counts: Counter[str] = field(default_factory=Counter)
    _other: set[str] = field(default_factory=set)

    def see(self, groups: Iterable[Group]) -> None:
        """Add the rollouts of one step."""
        for score in (episode.score for group in groups for episode in group.episodes):
            for name, value in score.parts.items():
                if value is not None and score.weights.get(name, 1.0) > 0:
                    self._counts[name] += 1
                    if value != 0:
                        self._other.add(name)

    def always_zero(self) -> dict[str, int]:
        """The parts that were 0 in every rollout, with the number of rollouts."""
        return {name: count for name, count in self._counts.items() if name not in self._other}


def _spread(values: Sequence[float]) -> float:
    return max(values) - min(values)
