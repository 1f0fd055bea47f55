"""The data types of rollouts: Message, ToolCall, Task, Role, Segment, Trajectory, Score, Status, Episode, Sample.

They are plain data and need only the standard library and msgspec. So you can write an environment without torch, and
a trajectory can be written to a file, sent to another process and read back unchanged.

The axes, here and in all other modules: L tokens of one row, T tokens of a batch, N rollouts, G rollouts of one prompt.
"""

from __future__ import annotations

import enum
import itertools
import math
import operator
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from rollouts.encoding import encode
from rollouts.errors import TrainingError

if TYPE_CHECKING:
    from torch import Tensor


class Status(enum.StrEnum):
    """How a rollout ended."""

    PENDING = "pending"
    COMPLETED = "completed"  # the episode ended, or the model used all its turns
    TRUNCATED = "truncated"  # the token limit or the context length cut the rollout off
    ABORTED = "aborted"  # the run stopped it; its tokens so far are kept
    ENVIRONMENT_ERROR = "environment_error"  # setup, reply or close raised
    INFERENCE_ERROR = "inference_error"  # the engine failed or refused
    TIMEOUT = "timeout"  # the episode's deadline passed

    @property
    def is_infrastructure(self) -> bool:
        """True if the policy did not cause this ending. The rollout is then neither scored nor trained."""
        return self in (Status.ABORTED, Status.ENVIRONMENT_ERROR, Status.INFERENCE_ERROR, Status.TIMEOUT)


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tool call of the model.

    If the model's text cannot be parsed as a call, `arguments` is empty, and `error` is an explanation for the model.
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
        """The text of the content, without parts that are not text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.get("text", "") for part in self.content if part.get("type") == "text")


class Task(msgspec.Struct, omit_defaults=True):
    """One task of an environment: a prompt (text or messages), an optional answer, and anything else in `info`.

    In a run with several environments, the run sets `env` to the alias of the task's environment.
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
        """The text that identifies this task: made from its id, else from its prompt."""
        if self.id is not None:
            return f"id:{self.id}"
        if isinstance(self.prompt, str):
            return f"prompt:{self.prompt}"
        return "prompt:" + encode(self.prompt).decode()


class Role(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of several agents of an environment: its name, and the system prompt of its conversation.

    Which model plays a role is a setting of the run: the trained one, or that of `--role.NAME.model`. `model` is
    reserved; it must be empty.
    """

    name: str
    system: str = ""
    model: str = ""


class Segment(msgspec.Struct):
    """One sequence of tokens as the engine saw it: prompt and environment tokens (mask 0) and sampled tokens (mask 1).

    A conversation is one segment, unless its chat template rewrites earlier messages. The first four lists have the
    same length L. A token with mask 0 has logprob 0.0 and version -1. `turns` has (turn, first token) of each reply
    that was sampled here; the turns of a trajectory count from 0. It is empty if that is unknown.
    """

    tokens: list[int]
    loss_mask: list[float]
    logprobs: list[float]
    versions: list[int]
    turns: list[tuple[int, int]] = []

    def __post_init__(self) -> None:
        lengths = (len(self.tokens), len(self.loss_mask), len(self.logprobs), len(self.versions))
        assert len(set(lengths)) == 1, f"a segment's streams must be aligned, got lengths {lengths}"

    @property
    def sampled_count(self) -> int:
        """The number of sampled tokens in this segment."""
        return sum(1 for weight in self.loss_mask if weight > 0)

    def check(self) -> None:
        """Assert what `Sample.check` asserts, and that tokens that were not sampled have version -1."""
        row = Sample(tokens=self.tokens, loss_mask=self.loss_mask)
        row.rollout_log_probs, row.policy_versions = self.logprobs, self.versions
        row.check()
        unsampled = set(itertools.compress(self.versions, map(operator.le, self.loss_mask, itertools.repeat(0.0))))
        assert unsampled <= {-1}, f"tokens that were not sampled are of versions {sorted(unsampled)}"


COUNTS = ("turns", "tool_calls", "tool_failures")
"""The counts in the metrics of every Trajectory."""


class Trajectory(msgspec.Struct):
    """What one agent did in one episode: its messages, and the exact tokens to train on.

    `metrics` always has the counts `turns`, `tool_calls` (failed ones too) and `tool_failures`. It has other
    counts only if they are not 0, such as `turn_limit`, which is 1 if the model used all its turns. Without `metrics`,
    the three counts are those of the messages after the task's prompt; a tool message that begins with `Error:` is a
    failure. `error` says why the episode failed or was cut short. For each tool that raised, took too long or crashed,
    `tool_errors` has the first error with the author's line. `role` is the name of the agent's role; empty in an
    environment without roles. `info` is what an environment's own `rollout` keeps with the trajectory, as data that
    JSON can represent. It is not trained on.
    """

    task: Task
    messages: list[Message]
    segments: list[Segment] = []
    status: Status = Status.PENDING
    metrics: dict[str, float] = {}
    tools: list[dict[str, Any]] = []
    error: str | None = None
    tool_errors: dict[str, str] = {}
    role: str = ""
    info: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if not self.metrics:  # made by hand; an engine counts while it plays
            own = self.messages if self.role else self.messages[len(self.task.messages) :]
            replies = [message for message in own if message.role == "assistant"]
            calls = sum(len(message.tool_calls) for message in replies)
            failures = sum(message.role == "tool" and message.text.startswith("Error:") for message in own)
            self.metrics = dict(zip(COUNTS, map(float, (len(replies), calls, failures)), strict=True))

    @property
    def last_text(self) -> str:
        """The text of the last assistant message; empty if there is none."""
        return next((m.text for m in reversed(self.messages) if m.role == "assistant"), "")

    @property
    def turns(self) -> int:
        """The number of the model's messages. Assistant messages in the prompt do not count."""
        if self.role:  # the conversation of a role does not begin with the task's prompt
            return int(self.metrics.get("turns", 0))
        prompt_turns = sum(1 for m in self.task.messages if m.role == "assistant")
        return sum(1 for m in self.messages if m.role == "assistant") - prompt_turns

    @property
    def turn_messages(self) -> list[Turn]:
        """The turns of the model, in order: each with its message and the answers to it."""
        places = [place for place, message in enumerate(self.messages) if message.role == "assistant"]
        places = places[len(places) - max(self.turns, 0) :]
        ends = [*places[1:], len(self.messages)]
        return [
            Turn(index, self.messages[place], tuple(self.messages[place + 1 : end]))
            for index, (place, end) in enumerate(zip(places, ends, strict=False))
        ]

    @property
    def sampled_count(self) -> int:
        """The number of sampled tokens in all segments."""
        return sum(segment.sampled_count for segment in self.segments)


class Turn(msgspec.Struct, frozen=True):
    """One turn of the model: its number from 0, its message, and the messages that answered it, up to the next turn."""

    index: int
    message: Message
    answers: tuple[Message, ...] = ()


class Score(msgspec.Struct, frozen=True):
    """The value of a reward, its parts, and optionally the reason as text. `value` None: the reward could not judge.

    `weights` are the weights of the parts that were added up to `value`. Other parts are only logged. `turns` has the
    reward of each turn of the model, for advantages that name `turn_rewards`. If a reward gives `turns` and no value,
    the value is their sum.
    """

    value: float | None
    parts: dict[str, float | None] = {}
    why: str = ""
    weights: dict[str, float] = {}
    turns: list[float] = []


class RoleResult(NamedTuple):
    """The result of one role in an episode: its score, its metrics, and the index of its judged trajectory."""

    role: str
    score: Score
    metrics: dict[str, float]
    judged: int


class EpisodeTimes(NamedTuple):
    """When an episode began and ended, and each reply of its models as (begin, end): seconds of Unix time. A reply that
    was interrupted has several parts.
    """

    began: float
    ended: float
    replies: list[tuple[float, float]]


class Episode(NamedTuple):
    """The result of one episode: at least one trajectory, and its score.

    `order` is (group, rollout). `judged` is the index of the trajectory that the rewards judged. `metrics` holds the
    summed counts of the trajectories, `latency_seconds`, `reward_failures` and `metric_failures` if there were any, and
    the values of the environment's @metric methods as `metric/<name>`. `may_retry` is True if the episode failed for a
    reason that may not occur again.

    In an environment with roles, `roles` has the result of each role, and the score's value is the mean of theirs.
    `by_role` turns such an episode into one episode for each role, whose `role` is the role's name. Roles that other
    models played have no result: their trajectories are the `others` of the first episode of `by_role`. `times` is None
    if they were not measured, as in episodes that were read from a file.
    """

    order: tuple[int, int]
    task: Task
    trajectories: list[Trajectory]
    score: Score
    metrics: dict[str, float]
    judged: int = -1
    may_retry: bool = False
    role: str = ""
    roles: tuple[RoleResult, ...] = ()
    others: tuple[Trajectory, ...] = ()
    times: EpisodeTimes | None = None

    @property
    def by_role(self) -> list[Episode]:
        """One episode for each role, with its own trajectories, score and metrics; without roles the episode itself."""
        if not self.roles:
            return [self]
        shared = {name: count for name, count in self.metrics.items() if name.startswith("retried")}
        own = []
        for role, score, metrics, judged in self.roles:
            chosen = self.trajectories[judged]
            trajectories = [each for each in self.trajectories if each.role == role]
            place = next(index for index, each in enumerate(trajectories) if each is chosen)
            episode = Episode(self.order, self.task, trajectories, score, metrics | shared, place, role=role)
            own.append(episode._replace(times=self.times))
        known = {each.role for each in own}
        own[0] = own[0]._replace(others=tuple(each for each in self.trajectories if each.role not in known))
        return own

    def with_scores(self, scores: Mapping[str, Score]) -> Episode:
        """The episode with other scores of its roles."""
        roles = tuple(result._replace(score=scores[result.role]) for result in self.roles)
        return self._replace(roles=roles, score=mean_score(roles))

    @property
    def trajectory(self) -> Trajectory:
        """The trajectory that was judged."""
        return self.trajectories[self.judged]

    @property
    def status(self) -> Status:
        """How the episode ended."""
        return self.trajectory.status


def mean_score(roles: Sequence[RoleResult]) -> Score:
    """The score of an episode with these roles: the mean of those that were judged, without parts."""
    values = [result.score.value for result in roles if result.score.value is not None]
    why = "; ".join(f"{result.role}: {result.score.why}" for result in roles if result.score.why)
    return Score(statistics.fmean(values) if values else None, {}, why)


IGNORED = -100
"""A label of this value is not trained, as in transformers."""


@dataclass(init=False)
class Sample:
    """One row of training data. Rollouts produce samples, and the trainer consumes them.

    `tokens`, `loss_mask`, `rollout_log_probs` and `policy_versions` have the same length L. The last two may be None.
    Without `rollout_log_probs`, the ratio of a loss compares the policy with itself. Without `policy_versions`, all
    tokens count as sampled with the weights that the engine serves.

    A `reward` of None means that no reward could judge the rollout: the row is not trained and not part of the
    baseline. Rows of one rollout share `rollout_index`; rollouts of one prompt share `group_index`. `prompt_length` is
    the number of leading tokens that all rollouts of the group share (0 if unknown). `turns` has (turn, first token) of
    each reply, for advantages with a number for each turn of the rollout; without it, all tokens are of the first turn.
    `advantages` is the sample's advantage, or that of each token, for `compute_grpo_loss`.

    A sample may be made of tensors [L]: `input_ids`, and optionally `labels` and `loss_mask`. Labels are the token ids,
    not shifted; a label of -100 means a mask of 0; without a mask, all other tokens are trained. Such a sample has a
    tensor as `loss_mask`. Raises TrainingError if labels differ from the token ids, or if the lengths differ.

    >>> Sample(input_ids=[5, 6, 7], labels=[-100, 6, 7]).loss_mask
    tensor([0., 1., 1.])
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
    turns: list[tuple[int, int]] = field(default_factory=list)
    advantages: Any = None

    def __init__(
        self,
        prompt: str | list[Any] = "",
        response: str = "",
        tokens: list[int] | None = None,
        loss_mask: Any = None,
        reward: float | None = 0.0,
        group_index: int | None = None,
        rollout_log_probs: Any = None,
        metadata: dict[str, Any] | None = None,
        status: Status = Status.PENDING,
        policy_versions: list[int] | None = None,
        rollout_index: int | None = None,
        prompt_length: int = 0,
        parts: dict[str, float | None] | None = None,
        turns: list[tuple[int, int]] | None = None,
        advantages: Any = None,
        *,
        input_ids: Any = None,
        labels: Any = None,
    ) -> None:
        if input_ids is not None:
            tokens, loss_mask = _of_tensors(input_ids, labels, loss_mask)
        self.prompt, self.response, self.reward, self.status = prompt, response, reward, status
        self.tokens = [] if tokens is None else tokens
        self.loss_mask = [] if loss_mask is None else loss_mask
        self.rollout_log_probs, self.policy_versions = rollout_log_probs, policy_versions
        self.group_index, self.rollout_index, self.prompt_length = group_index, rollout_index, prompt_length
        self.metadata = {} if metadata is None else metadata
        self.parts = {} if parts is None else parts
        self.turns = [] if turns is None else turns
        self.advantages = advantages

    @property
    def input_ids(self) -> Tensor:
        """The tokens [L] int64."""
        import torch

        return torch.tensor(self.tokens, dtype=torch.int64)

    @property
    def labels(self) -> Tensor:
        """The same as `input_ids`: a loss of this package shifts them itself."""
        return self.input_ids

    def check(self) -> None:
        """Assert that the lists have one length, that sampled tokens have finite logprobs <= 0, and other tokens 0."""
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


def _of_tensors(input_ids: Any, labels: Any, loss_mask: Any) -> tuple[list[int], Any]:
    """The tokens [L] and the mask [L] as a tensor. Raises TrainingError."""
    import torch

    ids = torch.as_tensor(input_ids)
    targets = ids if labels is None else torch.as_tensor(labels)
    mask = torch.ones(ids.shape) if loss_mask is None else torch.as_tensor(loss_mask, dtype=torch.float32)
    if ids.dim() != 1 or not ids.shape == targets.shape == mask.shape:
        shapes = f"input_ids {list(ids.shape)}, labels {list(targets.shape)}, loss_mask {list(mask.shape)}"
        raise TrainingError(f"a sample has one number for each token, all [L]; got {shapes}")
    mask = mask * (targets != IGNORED)
    wrong = ((targets != ids) & (mask > 0)).nonzero()
    if len(wrong):
        at = int(wrong[0])
        differ = f"label {at} is {int(targets[at])} and input_ids {at} is {int(ids[at])}"
        raise TrainingError(f"{differ}; labels are the token ids, not shifted, or {IGNORED} where nothing is trained")
    return ids.tolist(), mask


def are_whole_streams(mask: Sequence[float], logprobs: Sequence[float], versions: Sequence[int] | None) -> bool:
    """A fast check of a sample's or segment's lists, without a Python loop over tokens. True: the lists are valid.
    False: unknown.
    """
    sampled = list(itertools.compress(logprobs, mask))
    if mask.count(1.0) != len(sampled):  # not all of the others are 0
        sampled = list(itertools.compress(logprobs, map(operator.gt, mask, itertools.repeat(0.0))))
    highest = max(sampled, default=-1.0)
    if not (highest <= 0 and math.isfinite(sum(sampled))):
        return False
    zeros = sampled.count(0.0) if highest == 0 else 0
    if versions is None or len(logprobs) - logprobs.count(0.0) == len(sampled) - zeros:
        return True  # every token with a logprob other than 0 was sampled
    return not any(itertools.compress(logprobs, map(operator.eq, versions, itertools.repeat(-1))))
