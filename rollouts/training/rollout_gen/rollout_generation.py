"""Samples that a function of one's own makes: from prompts to a batch, in pure functions; and back into groups.

    batches = generate_rollout_batches(buffer, RolloutConfig(batch_size=4, generate_fn=my_fn))

`generate_fn(prompts)` gives one Sample a prompt; `reward_fn(sample)` its reward, or None where it cannot judge;
`filter_fn(samples)` sees the samples of one prompt and gives True to keep them, False or a reason to drop them. Each
may be a plain function or a coroutine function. Left out: several groups side by side (`manager`).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import trio

from rollouts.agent import Episode
from rollouts.author_code import authors_code, printable, shown
from rollouts.env.mixing import mix, read_verdict
from rollouts.errors import ConfigError, RolloutsError, RunError, named, words_of
from rollouts.types import Message, Sample, Score, Segment, Status, Task, Trajectory

if TYPE_CHECKING:
    from rollouts.training.datasets.buffer import DataBuffer
    from rollouts.training.rollout_gen.manager import RolloutConfig

__all__ = [
    "RolloutBatch",
    "RolloutManager",
    "apply_sample_transforms",
    "bare_prompt",
    "build_batch_metadata",
    "check_samples",
    "compute_response_lengths",
    "convert_to_batch",
    "extract_sample_fields",
    "filter_verdict",
    "generate_rollout_batches",
    "name_of",
    "sample_episode",
    "score_of",
    "stamp_version",
    "unjudged",
]


@dataclass
class RolloutBatch:
    """Rows of training: `tokens` and `loss_masks` [row][L], `rewards` [row] (NaN: not judged), `response_lengths` [row]
    (trained tokens), and what is known besides.
    """

    tokens: list[list[int]]
    loss_masks: list[list[float]]
    rewards: list[float]
    response_lengths: list[int]
    metadata: dict[str, Any] = field(default_factory=dict)


def generate_rollout_batches(
    data_buffer: DataBuffer, config: RolloutConfig, **rollout_kwargs: Any
) -> Iterator[RolloutBatch]:
    """Batches without end; `rollout_kwargs` are given to `config.generate_fn`.

    Each is made of the next `batch_size` prompts, less what the filter drops. Outside of trio's loop only.

    Raises ConfigError where the configuration asks for what only AsyncRolloutManager does.
    """
    generate_fn = config.generate_fn
    if generate_fn is None:
        raise ConfigError("generate_rollout_batches needs a generate_fn: RolloutConfig(..., generate_fn=my_function)")
    if config.over_sampling_factor > 1 or config.refill:
        raise ConfigError(
            "over_sampling_factor and refill need AsyncRolloutManager: batches of a generator know no more"
        )
    return _batches(data_buffer, config, functools.partial(generate_fn, **rollout_kwargs))


def _batches(data_buffer: DataBuffer, config: RolloutConfig, generate: Callable[..., Any]) -> Iterator[RolloutBatch]:
    size, step = config.n_samples_per_prompt, 0
    while True:
        tasks = data_buffer.get_prompts(config.batch_size, step=step)
        samples = check_samples(_now(generate, [bare_prompt(t) for t in tasks for _ in range(size)]), len(tasks) * size)
        numbered = [_grouped(sample, index // size) for index, sample in enumerate(samples)]
        yield convert_to_batch(apply_sample_transforms(numbered, config), epoch_id=data_buffer.epoch_id, step_id=step)
        step += 1


def apply_sample_transforms(samples: Sequence[Sample], config: RolloutConfig) -> list[Sample]:
    """The samples with their rewards (`reward_fn`), less the groups that `filter_fn` drops.

    Samples of one `group_index` are a group; one that has none is a group by itself.
    """
    rewarded = list(samples)
    if config.reward_fn is not None:
        rewarded = [dataclasses.replace(each, reward=_reward_now(config.reward_fn, each)) for each in rewarded]
    if config.filter_fn is None:
        return rewarded
    groups: dict[object, list[Sample]] = {}
    for position, sample in enumerate(rewarded):
        alone = ("alone", position)
        groups.setdefault(alone if sample.group_index is None else sample.group_index, []).append(sample)
    name = name_of(config.filter_fn)
    kept = [group for group in groups.values() if filter_verdict(name, _now(config.filter_fn, group)) is None]
    return [sample for group in kept for sample in group]


def convert_to_batch(samples: Sequence[Sample], epoch_id: int, step_id: int) -> RolloutBatch:
    """The samples as one batch, a row each."""
    tokens, loss_masks, rewards = extract_sample_fields(samples)
    metadata = build_batch_metadata(samples, epoch_id, step_id)
    return RolloutBatch(tokens, loss_masks, rewards, compute_response_lengths(loss_masks), metadata)


def extract_sample_fields(samples: Sequence[Sample]) -> tuple[list[list[int]], list[list[float]], list[float]]:
    """Tokens, loss masks and rewards (NaN: not judged), a row a sample.

    >>> extract_sample_fields([Sample(tokens=[1, 2], loss_mask=[0.0, 1.0], reward=0.5)])
    ([[1, 2]], [[0.0, 1.0]], [0.5])
    """
    rewards = [math.nan if sample.reward is None else float(sample.reward) for sample in samples]
    return [list(sample.tokens) for sample in samples], [list(sample.loss_mask) for sample in samples], rewards


def compute_response_lengths(loss_masks: Sequence[Sequence[float]]) -> list[int]:
    """How many tokens of each row are trained.

    >>> compute_response_lengths([[0.0, 1.0, 1.0], [0.0]])
    [2, 0]
    """
    return [sum(1 for weight in mask if weight > 0) for mask in loss_masks]


def build_batch_metadata(samples: Sequence[Sample], epoch_id: int, step_id: int) -> dict[str, Any]:
    """`epoch_id`, `step_id`, `num_samples`; and by row `group_indices`, `statuses`, and each key of the samples' own
    metadata (None where a sample has it not).

    >>> build_batch_metadata([Sample(group_index=3, metadata={"correct": True})], 0, 7)["correct"]
    [True]
    """
    keys = dict.fromkeys(key for sample in samples for key in sample.metadata)
    own = {key: [sample.metadata.get(key) for sample in samples] for key in keys}
    return own | {
        "epoch_id": epoch_id,
        "step_id": step_id,
        "num_samples": len(samples),
        "group_indices": [sample.group_index for sample in samples],
        "statuses": [sample.status.value for sample in samples],
    }


class RolloutManager:
    """Deprecated: `generate_rollout_batches` as an object that can be iterated over."""

    def __init__(self, data_buffer: DataBuffer, config: RolloutConfig, **rollout_kwargs: Any) -> None:
        warnings.warn(
            "RolloutManager is deprecated and will be removed in a future version. Use generate_rollout_batches() "
            "instead. For async rollout generation, use AsyncRolloutManager.",
            DeprecationWarning,
            stacklevel=2,
        )
        self.data_buffer = data_buffer
        self.config = config
        self.step_id = 0
        self._batches = generate_rollout_batches(data_buffer, config, **rollout_kwargs)

    def __iter__(self) -> RolloutManager:
        return self

    def __next__(self) -> RolloutBatch:
        batch = next(self._batches)
        batch.metadata["step_id"] = self.step_id
        self.step_id += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where it stands: its data buffer, and how many batches there were."""
        return {"data_buffer": self.data_buffer.state_dict(), "step_id": self.step_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.data_buffer.load_state_dict(state["data_buffer"])
        self.step_id = state["step_id"]


# --- one function's samples as one group's episodes, for the manager -------------------------------------------------


def bare_prompt(task: Task) -> Any:
    """What `generate_fn` is given: the prompt alone where the task is nothing else, as it was put into the buffer."""
    return task.prompt if task == Task(task.prompt) else task


def check_samples(returned: Any, count: int) -> list[Sample]:
    """What `generate_fn` returned, checked. Raises RunError."""
    samples = list(returned) if isinstance(returned, Sequence) else None
    if samples is None or len(samples) != count or not all(isinstance(sample, Sample) for sample in samples):
        shown = (
            type(returned).__name__
            if samples is None
            else f"{len(samples)} of {[type(s).__name__ for s in samples[:3]]}"
        )
        raise RunError(
            f"generate_fn returned {shown} for {count} prompts; it has to return a list of one Sample for each"
        )
    for sample in samples:
        try:
            sample.check()
        except AssertionError as error:
            raise RunError(f"generate_fn returned a Sample that is not whole: {error}") from error
    return samples


def sample_episode(sample: Sample, task: Task, order: tuple[int, int]) -> Episode:
    """A sample as the episode that it stands for. One that does not say how it ended was completed."""
    status = Status.COMPLETED if sample.status is Status.PENDING else sample.status
    logprobs, versions = sample.rollout_log_probs, sample.policy_versions
    segments = []
    if logprobs is not None:
        known = list(versions) if versions is not None else [-1] * len(sample.tokens)
        segments = [Segment(list(sample.tokens), list(sample.loss_mask), list(logprobs), known)]
    messages = [*task.messages, Message("assistant", sample.response)]
    trajectory = Trajectory(task, messages, segments, status, {"turns": 1.0})
    score = Score(None if status.is_infrastructure else sample.reward, dict(sample.parts))
    return Episode(order, task, [trajectory], score, {"turns": 1.0})


def stamp_version(samples: Sequence[Sample], version: int | None) -> list[Sample]:
    """The samples, those with logprobs and without versions as sampled by this version; None: nobody knows it."""
    return [
        dataclasses.replace(s, policy_versions=[version if weight > 0 else -1 for weight in s.loss_mask])
        if version is not None and s.rollout_log_probs is not None and s.policy_versions is None
        else s
        for s in samples
    ]


def score_of(returned: Any) -> Score:
    """What `reward_fn` returned, as a score. Raises RewardError for what is no reward."""
    return mix([read_verdict("reward_fn", 1.0, returned)])


def unjudged(error: Exception) -> Score:
    """The score of a sample on which `reward_fn` raised: it could not judge. Raises what ends the run."""
    if isinstance(error, RolloutsError):
        raise error
    return Score(None, {"reward_fn": None}, f"reward_fn could not judge: {words_of(error)}")


def filter_verdict(name: str, returned: Any) -> str | None:
    """Why the filter drops the group; None: it is kept."""
    if isinstance(returned, str):
        return printable(returned) or name
    try:
        with authors_code():
            return None if returned else name
    except Exception as error:  # an array of several numbers is neither true nor false
        raise RunError(f"the filter {name} returned {shown(returned)}, which is no bool: {named(error)}") from error


def name_of(function: Any) -> str:
    """A function's name, for people."""
    return getattr(function, "__name__", None) or type(function).__name__


def _grouped(sample: Sample, group: int) -> Sample:
    return sample if sample.group_index is not None else dataclasses.replace(sample, group_index=group)


def _reward_now(reward_fn: Callable[..., Any], sample: Sample) -> float | None:
    try:
        returned = _now(reward_fn, sample)
    except Exception as error:  # the author's code may raise anything
        return unjudged(error).value
    return score_of(returned).value


def _now(function: Callable[..., Any], *args: Any) -> Any:
    """Call it, in a loop of its own where it is a coroutine function."""
    with authors_code():
        if inspect.iscoroutinefunction(function.func if isinstance(function, functools.partial) else function):
            return trio.run(functools.partial(function, *args))
        return function(*args)
