"""The shapes that travel: Message, ToolCall, Task, Segment, Trajectory, Score, Status, Episode, Sample.

Everything here is plain data (standard library and msgspec only), so that an environment author needs no torch and a
trajectory can be written to a file, sent to another process and read back unchanged. What is left out: behavior.
Legend of axes used everywhere: L tokens of one row, T tokens of a batch, N rollouts, G rollouts of one prompt.
"""

from __future__ import annotations

import enum
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from rollouts.encoding import encode


class Status(enum.StrEnum):
    """How a rollout ended. Only `COMPLETED` and `TRUNCATED` rollouts were played out by the policy."""

    PENDING = "pending"
    COMPLETED = "completed"  # it came to its end, or used all of its turns
    TRUNCATED = "truncated"  # cut off by the limit on tokens or by the context
    ABORTED = "aborted"  # stopped from outside; its partial tokens are kept
    ENVIRONMENT_ERROR = "environment_error"  # setup, reply or close raised
    INFERENCE_ERROR = "inference_error"  # the engine failed or refused
    TIMEOUT = "timeout"  # the episode's deadline passed

    @property
    def is_infrastructure(self) -> bool:
        """True for failures that say nothing about the policy: never scored, never trained."""
        return self in (Status.ABORTED, Status.ENVIRONMENT_ERROR, Status.INFERENCE_ERROR, Status.TIMEOUT)


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call that the model asked for.

    `arguments` is a dict; where the model wrote something that cannot be read as a call, `error` says why in words
    that are sent back to the model, and `arguments` is empty.
    """

    name: str
    arguments: dict[str, Any] = {}
    id: str = ""
    error: str | None = None


class Message(msgspec.Struct, omit_defaults=True):
    """One message of a conversation. `content` is text or a list of parts (`{"type": "text", "text": ...}`)."""

    role: str
    content: str | list[dict[str, Any]] = ""
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None

    @property
    def text(self) -> str:
        """The text of the content; parts that are not text are left out."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.get("text", "") for part in self.content if part.get("type") == "text")


class Task(msgspec.Struct, omit_defaults=True):
    """One thing to do: a prompt (text, or messages), the answer if there is one, and anything else in `info`.

    `env` is the alias of the environment that it is played in, where a run has several; the run writes it.
    """

    prompt: str | list[Message]
    answer: Any = None
    info: dict[str, Any] = {}
    id: str | None = None
    env: str = ""

    @property
    def messages(self) -> list[Message]:
        """The prompt as a new list of messages."""
        if isinstance(self.prompt, str):
            return [Message("user", self.prompt)]
        return list(self.prompt)

    @property
    def key(self) -> str:
        """What identifies this task: its id, else its prompt."""
        if self.id is not None:
            return f"id:{self.id}"
        if isinstance(self.prompt, str):
            return f"prompt:{self.prompt}"
        return "prompt:" + encode(self.prompt).decode()


class Segment(msgspec.Struct):
    """A stretch of tokens that the engine really saw, in order: prompt and environment ids (mask 0) and sampled ids
    (mask 1).

    A conversation whose template never rewrites history is one segment. All four lists have the same length L; where
    the mask is 0 the logprob is 0.0 and the version -1.
    """

    tokens: list[int]
    loss_mask: list[float]
    logprobs: list[float]
    versions: list[int]

    def __post_init__(self) -> None:
        lengths = (len(self.tokens), len(self.loss_mask), len(self.logprobs), len(self.versions))
        assert len(set(lengths)) == 1, f"a segment's streams must be aligned, got lengths {lengths}"

    @property
    def sampled_count(self) -> int:
        """How many tokens of this segment were sampled."""
        return sum(1 for weight in self.loss_mask if weight > 0)

    def check(self) -> None:
        """Assert invariant 2 of the design, as `Sample.check`; and what was not sampled is of no version."""
        row = Sample(tokens=self.tokens, loss_mask=self.loss_mask)
        row.rollout_log_probs, row.policy_versions = self.logprobs, self.versions
        row.check()
        unsampled = set(itertools.compress(self.versions, map(operator.le, self.loss_mask, itertools.repeat(0.0))))
        assert unsampled <= {-1}, f"tokens that were not sampled are of versions {sorted(unsampled)}"


class Trajectory(msgspec.Struct):
    """What one agent did in one episode: the messages people read, and the exact tokens that are trained on.

    `metrics` counts what happened (`turns`, `tool_calls`, `tool_failures`, ...; `turn_limit` is 1 where all turns were
    used). `error` says why an episode failed or was cut short.
    """

    task: Task
    messages: list[Message]
    segments: list[Segment] = []
    status: Status = Status.PENDING
    metrics: dict[str, float] = {}
    tools: list[dict[str, Any]] = []
    error: str | None = None

    @property
    def last_text(self) -> str:
        """The text of the last assistant message; empty where there is none."""
        return next((m.text for m in reversed(self.messages) if m.role == "assistant"), "")

    @property
    def turns(self) -> int:
        """How many times the model spoke."""
        prompt_turns = sum(1 for m in self.task.messages if m.role == "assistant")
        return sum(1 for m in self.messages if m.role == "assistant") - prompt_turns

    @property
    def sampled_count(self) -> int:
        """How many tokens were sampled, over all segments."""
        return sum(segment.sampled_count for segment in self.segments)


class Score(msgspec.Struct, frozen=True):
    """A reward with its parts and, optionally, why in words. `value` is None where it could not judge.

    `weights` are those of the parts that were added up to `value`; the others are only logged.
    """

    value: float | None
    parts: dict[str, float | None] = {}
    why: str = ""
    weights: dict[str, float] = {}


class Episode(NamedTuple):
    """What came of one task: `order` is (group, rollout); `judged` the position of the trajectory that rewards saw.

    There is always at least one trajectory. `metrics` are the sums of the trajectories' counts, `latency_seconds`,
    `reward_failures` and `metric_failures` where there were any, and the environment's own @metric values, each under
    `metric/<name>`. `may_retry`: it failed of something that may well go right when the episode is played again.
    """

    order: tuple[int, int]
    task: Task
    trajectories: list[Trajectory]
    score: Score
    metrics: dict[str, float]
    judged: int = -1
    may_retry: bool = False

    @property
    def trajectory(self) -> Trajectory:
        """The trajectory that was judged."""
        return self.trajectories[self.judged]

    @property
    def status(self) -> Status:
        """How the episode ended."""
        return self.trajectory.status


@dataclass
class Sample:
    """One row of training: the universal currency between rollouts and trainer.

    `tokens`, `loss_mask`, `rollout_log_probs` and `policy_versions` have one length L. The last two may be absent:
    without logprobs the anchor of a ratio is the policy that is trained; logprobs without versions are those of the
    weights that were served. `reward` is None where no reward could judge: such a row is out of the baseline and not
    trained. Rows of one rollout share `rollout_index`; rollouts of one prompt share `group_index`. `prompt_length` is
    the number of leading tokens that every rollout of the group shares (0 where that is unknown).
    """

    prompt: str | list[Any] = ""
    response: str = ""
    tokens: list[int] = field(default_factory=list)
    loss_mask: list[float] = field(default_factory=list)
    reward: float | None = 0.0
    group_index: int | None = None
    rollout_log_probs: list[float] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    status: Status = Status.PENDING
    policy_versions: list[int] | None = None
    rollout_index: int | None = None
    prompt_length: int = 0
    parts: dict[str, float | None] = field(default_factory=dict)

    def check(self) -> None:
        """Assert invariant 2 of the design: aligned streams, finite logprobs <= 0 on live tokens, nothing elsewhere."""
        length = len(self.tokens)
        assert len(self.loss_mask) == length, f"{length} tokens but {len(self.loss_mask)} mask entries"
        if self.rollout_log_probs is None:
            return
        assert len(self.rollout_log_probs) == length, f"{length} tokens but {len(self.rollout_log_probs)} logprobs"
        versions = self.policy_versions
        assert versions is None or len(versions) == length, f"{length} tokens but {len(versions)} versions"
        if are_whole_streams(self.loss_mask, self.rollout_log_probs, versions):
            return
        for index, (weight, logprob) in enumerate(zip(self.loss_mask, self.rollout_log_probs, strict=True)):
            if weight > 0:
                assert math.isfinite(logprob) and logprob <= 0, f"token {index}: sampled logprob {logprob}"
            elif versions is not None and versions[index] == -1:
                assert logprob == 0.0, f"token {index} was not sampled but has logprob {logprob}"


def are_whole_streams(mask: Sequence[float], logprobs: Sequence[float], versions: Sequence[int] | None) -> bool:
    """Whether the streams of a sample or segment are surely right, found without a step of Python for each token."""
    live = list(map(operator.gt, mask, itertools.repeat(0.0)))
    sampled = list(itertools.compress(logprobs, live))
    if sampled and not (max(sampled) <= 0 and math.isfinite(sum(sampled))):
        return False
    if versions is None or len(logprobs) - list(logprobs).count(0.0) == len(sampled) - sampled.count(0.0):
        return True  # whatever is not 0 was sampled
    return not any(itertools.compress(logprobs, map(operator.eq, versions, itertools.repeat(-1))))
