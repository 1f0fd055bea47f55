"""Turn episodes into samples, one for each segment. The masks say which tokens are trained.

No torch. Not here: rewards of whole groups and filters (`rollout_gen.groups`), advantages and rows (`batching`).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

from rollouts.types import Episode, Message, Sample, Status, Trajectory


def episode_samples(episode: Episode, group_index: int, rollout_index: int) -> list[Sample]:
    """One Sample for each segment of each trajectory, in order. Each has the reward and the parts of the episode.

    The masks are 0 in truncated trajectories, after infrastructure failures, and if no reward could judge the rollout.
    A truncated trajectory keeps its reward for the group's baseline; in the other two cases the reward is None. An
    episode that failed before the model replied has no samples. `prompt_length` is known for the first segment only,
    and 0 for later ones.
    """
    samples = [
        _sample(episode, trajectory, number, position, rollout_index)
        for number, trajectory in enumerate(episode.trajectories)
        for position in range(len(trajectory.segments))
    ]
    turns = [each for trajectory in episode.trajectories for each in judged_turns(trajectory, episode.trajectory)]
    for sample, own in zip(samples, turns, strict=True):
        sample.turns = own
    for sample in samples:
        sample.group_index = group_index
        sample.check()
    return samples


def _sample(episode: Episode, trajectory: Trajectory, number: int, position: int, rollout_index: int) -> Sample:
    segment = trajectory.segments[position]
    status = episode.status if episode.status.is_infrastructure else trajectory.status
    reward = None if status.is_infrastructure else episode.score.value
    is_live = status is Status.COMPLETED and reward is not None
    return Sample(
        prompt=trajectory.task.prompt,
        response=trajectory.last_text,
        tokens=list(segment.tokens),
        loss_mask=list(segment.loss_mask) if is_live else [0.0] * len(segment.tokens),
        reward=reward,
        rollout_log_probs=list(segment.logprobs),
        metadata={
            "task_id": trajectory.task.id,
            "answer": trajectory.task.answer,
            "status": status.value,
            "error": trajectory.error,
            "why": episode.score.why,
            "turns": trajectory.turns,
            "trajectory": number,
            "segment": position,
            "latency_seconds": episode.metrics.get("latency_seconds", 0.0),
            **({"role": trajectory.role} if trajectory.role else {}),
        },
        status=status,
        policy_versions=list(segment.versions),
        rollout_index=rollout_index,
        prompt_length=first_live(segment.loss_mask) if (number, position) == (0, 0) else 0,
        parts=dict(episode.score.parts),
    )


def judged_turns(trajectory: Trajectory, judged: Trajectory) -> list[list[tuple[int, int]]]:
    """(turn, first token) of each reply in each segment. The turns are those of the judged trajectory.

    A reply of another conversation of the episode belongs to the turn at which the two conversations part: of a
    conversation of its own, that is the first turn, because everything the judged one earned may follow from it.
    """
    turns = [list(segment.turns) for segment in trajectory.segments]
    if not any(turns):
        turns = _turns_of_masks(trajectory)
    if trajectory is judged:
        return turns
    both = zip(trajectory.messages, judged.messages, strict=False)
    common = [ours for ours, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both)]
    shared = 0 if judged.role else _replies(common) - _replies(judged.task.messages)
    return [[(min(turn, max(shared, 0)), start) for turn, start in own] for own in turns]


def _turns_of_masks(trajectory: Trajectory) -> list[list[tuple[int, int]]]:
    """The turns of a trajectory that does not say where they begin: each run of live tokens is one. The first replies
    of a conversation may be those of another one, so that the last run is the last turn.
    """
    starts = [_starts(segment.loss_mask) for segment in trajectory.segments]
    number = itertools.count(max(0, trajectory.turns - sum(map(len, starts))))
    return [[(next(number), start) for start in own] for own in starts]


def _starts(mask: Sequence[float]) -> list[int]:
    """Where runs of live tokens begin."""
    live = bytes(map(operator.gt, mask, itertools.repeat(0.0)))
    starts, place = [], live.find(1)
    while place >= 0:
        starts.append(place)
        end = live.find(0, place)
        place = live.find(1, end) if end >= 0 else -1
    return starts


def _replies(messages: Sequence[Message]) -> int:
    return sum(1 for message in messages if message.role == "assistant")


def first_live(mask: Sequence[float]) -> int:
    """The number of tokens before the first trained one; all of them if none is trained."""
    return next(itertools.compress(itertools.count(), map(operator.gt, mask, itertools.repeat(0.0))), len(mask))
