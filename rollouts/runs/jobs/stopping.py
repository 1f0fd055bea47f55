"""After each step: calls the functions of the program that started the run, and ends the run before its last step if a
rule of `--stop-when` is true, or after `--max-hours`.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from rollouts.author_code import authors_code, shown, unwrapped
from rollouts.config.objects import label_of
from rollouts.config.settings import Settings
from rollouts.config.stopping import StopRule, read_rule
from rollouts.env import calls
from rollouts.errors import RolloutsError, RunError, counted, suggestion, words_of
from rollouts.training.rollout_gen.groups import Group


class Stop(NamedTuple):
    """Why a run ended early, as summary.json has it: the setting that ended it, its value, and a sentence."""

    by: Literal["stop_when", "max_hours", "patience"]
    rule: str
    why: str


@dataclass
class Stopping:
    """The rules of one run. `started` is `time.perf_counter()` at the start of the command: the hours include loading
    the model and the first evaluation. `warn` gets a note for each rule whose metric is not logged. With `patience`,
    the run ends after so many evaluations without a lower `eval/loss`. `evaluated` is the `state` of a checkpoint, so
    that a resumed run continues to count.
    """

    settings: Settings
    started: float
    warn: Callable[[str], None]
    patience: int = 0
    evaluated: Mapping[str, float] = field(default_factory=dict)
    _unseen: list[StopRule] = field(init=False)
    _absent: dict[StopRule, str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._rules = [read_rule(text) for text in self.settings.stop_when]
        self._unseen = list(self._rules)
        self._lowest, self._since = self.evaluated.get("lowest", math.inf), int(self.evaluated.get("since", 0))

    @property
    def state(self) -> dict[str, float]:
        """What a resumed run needs to continue to count: the lowest held-out loss, and the evaluations since then."""
        return {} if math.isinf(self._lowest) else {"lowest": self._lowest, "since": self._since}

    def reason(self, done: int, metrics: Mapping[str, float]) -> Stop | None:
        """Why the run ends now, after `done` steps, the last one with these metrics. None if it continues."""
        self._note_unseen(metrics)
        self._absent = {rule: hint for rule, hint in self._absent.items() if rule.metric not in metrics}
        hours = self.settings.max_hours
        for rule in self._rules:
            if rule.holds(metrics):
                was = f"{rule.metric} was {metrics[rule.metric]:g} after {counted(done, 'step')}"
                return Stop("stop_when", str(rule), f"--stop-when '{rule}': {was}")
        if self.patience and "eval/loss" in metrics:
            loss = metrics["eval/loss"]
            self._since = 0 if loss < self._lowest else self._since + 1
            self._lowest = min(loss, self._lowest)
            if self._since >= self.patience:
                why = f"{counted(self._since, 'evaluation')} without a held-out loss below {self._lowest:.4f}"
                return Stop("patience", str(self.patience), f"--data.patience {self.patience}: {why}")
        if hours is not None and time.perf_counter() - self.started >= hours * 3600:
            return Stop(
                "max_hours", f"{hours:g}", f"--max-hours {hours:g}: they were over after {counted(done, 'step')}"
            )
        return None

    def met_before(self, stopped: Mapping[str, str] | None) -> Stop | None:
        """The rule that ended the run before it was resumed, if the run still has it. Hours begin anew."""
        if stopped is None or stopped["rule"] not in map(str, self._rules):
            return None
        return Stop("stop_when", stopped["rule"], stopped["why"])

    def _note_unseen(self, metrics: Mapping[str, float]) -> None:
        """Note each rule whose metric the first step does not have; for `eval/`, the first step with an evaluation.
        Some metrics appear later, so this is no error.
        """
        evaluates = any(name.startswith("eval/") for name in metrics)
        judged = [rule for rule in self._unseen if evaluates or not rule.metric.startswith("eval/")]
        for rule in judged:
            self._unseen.remove(rule)
            if rule.metric not in metrics:
                hint = suggestion(rule.metric, metrics) or f"there are {', '.join(sorted(metrics))}"
                self._absent[rule] = hint
                self.warn(f"--stop-when '{rule}': no metric {rule.metric} has been logged so far; {hint}")

    def at_the_end(self) -> list[str]:
        """One sentence for each rule that was noted and whose metric no later step had either."""
        return [
            f"--stop-when '{rule}' had no effect: no step logged a metric {rule.metric}; {hint}"
            for rule, hint in self._absent.items()
        ]


def summary_of(stop: Stop | None) -> dict[str, Any]:
    """The entries of summary.json about the early end."""
    return {} if stop is None else {"stopped": stop._asdict()}


class FinishedStep(NamedTuple):
    """What a function of `on_step` gets.

    `step` counts from 0. `metrics` are those that will be logged, the `eval/` metrics of an evaluation after this step
    included. `groups` are the step's rollouts, one group for each prompt: `group.task`, `group.rewards`, and in
    `group.episodes` each rollout with its `trajectory`, `score` and `status`. Mode sft has no groups.
    """

    step: int
    metrics: Mapping[str, float]
    groups: Sequence[Group] = ()


async def call_on_step(functions: Sequence[Callable[..., Any]], finished: FinishedStep) -> dict[str, float]:
    """Call each function, in order. Returns the metrics that they returned.

    A plain function runs in the program's main thread, and the run waits for it. Raises RunError, with the author's
    line, if a function raises or returns anything but a dict of numbers or None.
    """
    found: dict[str, float] = {}
    for function in functions:
        label = f"on_step: {label_of(function)}"
        try:
            numbers = _numbers(label, await _called(function, finished))
        except RolloutsError:
            raise
        except Exception as error:  # the function may raise anything
            raise RunError(f"{label} raised {words_of(error)} after step {finished.step}") from error
        taken = [name for name in numbers if name in finished.metrics or name in found]
        if taken:
            raise RunError(
                f"{label} returned the metric {taken[0]!r}, which the step has already; give it another name"
            )
        found |= numbers
    return found


async def _called(function: Callable[..., Any], finished: FinishedStep) -> Any:
    inner = unwrapped(function)
    if inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None)):  # noqa: B004
        return await calls.call(function, finished)
    with authors_code():
        returned = function(finished)
    return await calls.call(lambda: returned) if inspect.iscoroutine(returned) else returned


def _numbers(label: str, returned: Any) -> dict[str, float]:
    """The metrics that a function returned. Raises RunError."""
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        raise RunError(f"{label} returned {shown(returned)}; expected a dict of metrics, or None")
    numbers: dict[str, float] = {}
    for name, value in returned.items():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError) as error:
            raise RunError(f"{label} returned {shown(value)} as {shown(name)}; expected a number") from error
    return numbers
