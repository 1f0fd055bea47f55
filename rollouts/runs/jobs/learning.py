"""Whether the steps of a run can teach the model anything, and the reason if they cannot.

`why_nothing`, `broken_tools` and `failed_calls` look at one step and keep nothing. `LearningCheck` counts the steps
in a row in which the same thing is wrong: it warns once after `STEPS_MAX` of them. At the end of the run, it says what
was wrong in the last steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollouts.config.settings import Settings
from rollouts.models.loading import BUNDLED
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
"""The topic of `LearningCheck` for the tool calls of all tools together."""

ERROR = "Error: "
"""How the answer to a failed call begins."""

ADVICE = "train on demonstrations first (--mode sft+rl), or give --model a model that can call tools"
"""What to do if the model cannot call tools. `advice_after_sft` is for a run that begins with demonstrations."""

LOW, HIGH = 0.1, 0.98
"""Shares of the largest reward. A mean reward outside of them leaves reinforcement little to learn from."""


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
        """The topics that were wrong in at least so many steps in a row. A tool says more than all calls together."""
        topics = [topic for topic, streak in self._streaks.items() if streak >= least]
        return [topic for topic in topics if topic != CALLS or set(topics) <= {NOTHING, CALLS}]

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
    advice: str = ADVICE,
) -> dict[str, str]:
    """What is wrong with one step of mode rl, by topic, for `LearningCheck.see`. `advantages` [N] are the mean
    advantages of the kept groups' rollouts. `advice` is what to do if the model cannot call tools.
    """
    return {
        NOTHING: why_nothing(groups, advantages, metrics, algorithm, settings),
        **broken_tools(groups, advice),
        **failed_calls(groups, advice),
    }


def advice_after_sft(sft: Settings) -> str:
    """What to do if the model cannot call tools after a supervised phase with these settings."""
    return f"train longer on demonstrations first ({_longer(sft)}), or give --model a model that can call tools"


def note_after_sft(evaluation: Mapping[str, Any], sft: Settings) -> str:
    """What to do if the supervised phase has left a reward that reinforcement learns little from; else empty.
    `evaluation` has the form of summary.json, and `sft` are the settings of the phase. The largest reward is taken to
    be the sum of the weights above 0.
    """
    mean, largest = evaluation.get("reward_mean"), sum(w for w in evaluation.get("weights", {}).values() if w > 0)
    if mean is None or not largest:
        return ""
    after = f"after the supervised phase the sampled reward is {mean:.3f}"
    if abs(mean) < LOW * largest:
        return f"{after}, and reinforcement needs about {LOW * largest:g} to learn from; train longer: {_longer(sft)}"
    if HIGH * largest <= mean <= largest:
        return f"{after}, so nothing is left to learn; give harder tasks, or fewer supervised steps (--sft.steps)"
    return ""


def _longer(sft: Settings) -> str:
    """Flags for a longer supervised phase."""
    steps = f"--sft.steps {max(300, 2 * sft.steps)}"
    if sft.model not in BUNDLED or sft.lora_rank:
        return steps
    return f"{steps} --sft.lr 1e-3 --sft.prompts-per-step {max(32, sft.prompts_per_step)}"


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
    if len(groups) == dropped.total():
        filtered = f"the filters dropped every group ({', '.join(dropped)})"
        return f"{flat}, and {filtered}" if flat else filtered
    kept = [group for group in groups if group.dropped is None]
    played = [each for group in kept for each in group.episodes if not each.status.is_infrastructure]
    if played and all(episode.status is Status.TRUNCATED for episode in played):
        return _why_truncated(played, settings)
    if compares_groups(algorithm) and settings.samples_per_prompt == 1:
        return ONE_SAMPLE
    if flat:
        return flat
    if metrics.get("staleness/dropped") and metrics.get("optim/skipped") == 1:
        return f"all tokens are older than --staleness {settings.staleness} allows: raise it"
    if algorithm.select is not None and metrics.get("optim/skipped") == 1:
        return f"--select {function_label(algorithm.select)} chose no rollout"
    if algorithm.pairs is not None:
        return f"--pairs {function_label(algorithm.pairs)} found nothing to compare"
    if uses_advantages:
        return f"all advantages of {function_label(algorithm.advantage)} are 0 for the tokens that are trained on"
    return "the gradient is 0"


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
    parts = _flat_parts(episodes)
    if len(parts) == 1:
        return f"the reward `{parts[0][0]}` is flat: it is {parts[0][1]} in every rollout{why}"
    of_parts = "; ".join(f"`{name}` is {value}" for name, value in parts)
    return f"the reward is flat: it is {together[0]:.3f} in every rollout{of_parts and f' ({of_parts})'}{why}"


def _flat_parts(episodes: Sequence[Episode]) -> list[tuple[str, str]]:
    """Each part of the reward as (name, text): the text is its value, its range, or "not judged"."""
    parts = []
    for name in dict.fromkeys(name for episode in episodes for name in episode.score.parts):
        values = [value for episode in episodes if (value := episode.score.parts.get(name)) is not None]
        if not values:
            parts.append((name, "not judged"))
        elif _spread(values) > SPREAD_MIN:
            parts.append((name, f"from {min(values):.3f} to {max(values):.3f}"))
        else:
            parts.append((name, f"{values[0]:.3f}"))
    return parts


def _why_truncated(played: Sequence[Episode], settings: Settings) -> str:
    sampled = [sum(trajectory.sampled_count for trajectory in episode.trajectories) for episode in played]
    if any(count >= settings.max_tokens for count in sampled):
        return f"all replies were cut off at --max-tokens {settings.max_tokens}: raise it"
    reasons = Counter(episode.trajectory.error or "cut off" for episode in played)
    return f"all replies were cut off: {reasons.most_common(1)[0][0]}"


def broken_tools(groups: Iterable[Group], advice: str = ADVICE) -> dict[str, str]:
    """For each tool that was called: why it failed in every call, with the first error; empty if a call went well.
    Calls that were malformed or of an unknown tool do not count: no tool ran.
    """
    errors: dict[str, str] = {}
    found: dict[str, str] = {}
    for trajectory in _trajectories(groups):
        errors = trajectory.tool_errors | errors  # the first error of each tool
        known = {schema["function"]["name"] for schema in trajectory.tools}
        for call, text in _answers(trajectory):
            if call.name in known and call.error is None and found.get(call.name) != "":
                found.setdefault(call.name, _first_error(text))
                if not text.startswith(ERROR):
                    found[call.name] = ""
    for name, words in found.items():
        if words and name in errors:
            found[name] = f"the tool `{name}` failed in every call: {errors[name]}"
        elif words:
            found[name] = f"the tool `{name}` got wrong arguments in every call: {words}; {advice}"
    return found


def failed_calls(groups: Sequence[Group], advice: str = ADVICE) -> dict[str, str]:
    """Why every tool call of the step failed, with the first error; empty if a call went well. Nothing if there was no
    call.
    """
    trajectories = _trajectories(groups)
    calls, failed, malformed, unknown = (
        sum(each.metrics.get(name, 0.0) for each in trajectories)
        for name in ("tool_calls", "tool_failures", "tool_failure/malformed", "tool_failure/unknown_tool")
    )
    if not calls or failed < calls:
        return {CALLS: ""} if calls else {}
    answered = (answer for each in trajectories for answer in _answers(each) if answer[1].startswith(ERROR))
    # A program that plays an episode sees a call that cannot be read as text, and does not answer it.
    made = (call for each in trajectories for message in each.messages for call in message.tool_calls)
    unread = ((call, call.error) for call in made if call.error)
    call, text = next(answered, None) or next(unread, (None, ""))
    first = f"the first error{f' of `{call.name}`' if call and call.name else ''} is {_first_error(text)!r}"
    if malformed + unknown < calls:
        return {CALLS: f"every tool call failed: {first}"}
    kind = "was malformed" if malformed == calls else "was malformed or of an unknown tool"
    return {CALLS: f"every tool call {kind}, so no tool ran: {first}; {advice}"}


def _trajectories(groups: Iterable[Group]) -> list[Trajectory]:
    return [each for group in groups for episode in group.episodes for each in episode.trajectories]


def _answers(trajectory: Trajectory) -> Iterator[tuple[ToolCall, str]]:
    """Each tool call with the text that answers it. Some templates answer all calls of a reply in one user message."""
    waiting: list[ToolCall] = []
    for message in trajectory.messages:
        if message.role == "assistant":
            waiting = list(message.tool_calls)
        elif message.role == "tool":
            yield from [(waiting.pop(0), message.text)] if waiting else []
        else:
            yield from ((call, message.text) for call in waiting)
            waiting = []


def _first_error(text: str) -> str:
    """The first line of the answer to a failed call."""
    return next(iter(text.removeprefix(ERROR).splitlines()), "")


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
