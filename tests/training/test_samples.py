from __future__ import annotations

import pytest

from rollouts.agent import Episode
from rollouts.training.samples import episode_samples
from rollouts.types import Message, Score, Segment, Status, Task, Trajectory

TASK = Task("q", answer=3, id="t")


def segment(*pattern: int) -> Segment:
    """1 is a sampled token, 0 context."""
    return Segment(
        list(range(len(pattern))),
        [float(p) for p in pattern],
        [-0.5 if p else 0.0 for p in pattern],
        [2 if p else -1 for p in pattern],
    )


def episode(*segments: Segment, status: Status = Status.COMPLETED, score: Score | None = None) -> Episode:
    messages = [*TASK.messages, Message("assistant", "a"), Message("user", "more"), Message("assistant", "3")]
    trajectory = Trajectory(
        TASK, messages, list(segments), status, {"turns": 2.0}, error="why" if status != "completed" else None
    )
    return Episode((0, 1), TASK, [trajectory], score or Score(0.5, {"right": 0.5}), {"latency_seconds": 1.5})


def test_one_sample_a_segment() -> None:
    first, second = episode_samples(episode(segment(0, 0, 1, 0, 1), segment(0, 1, 1)), 4, 9)
    assert (first.tokens, first.loss_mask) == ([0, 1, 2, 3, 4], [0.0, 0.0, 1.0, 0.0, 1.0])
    assert first.rollout_log_probs == [0.0, 0.0, -0.5, 0.0, -0.5] and first.policy_versions == [-1, -1, 2, -1, 2]
    assert (first.prompt_length, second.prompt_length) == (2, 0)
    for position, sample in enumerate((first, second)):
        assert (sample.group_index, sample.rollout_index, sample.reward) == (4, 9, 0.5)
        assert (sample.prompt, sample.response, sample.parts) == ("q", "3", {"right": 0.5})
        assert sample.status is Status.COMPLETED
        assert sample.metadata["segment"] == position and sample.metadata["turns"] == 2
        assert sample.metadata["task_id"] == "t" and sample.metadata["answer"] == 3
        assert sample.metadata["status"] == "completed" and sample.metadata["latency_seconds"] == 1.5


def test_truncated_samples_keep_their_reward_and_train_nothing() -> None:
    (sample,) = episode_samples(episode(segment(0, 0, 1), status=Status.TRUNCATED), 0, 0)
    assert sample.reward == 0.5 and sample.loss_mask == [0.0] * 3 and sample.prompt_length == 2
    assert sample.rollout_log_probs == [0.0, 0.0, -0.5], "what was sampled stays on record"
    assert sample.metadata["error"] == "why"


@pytest.mark.parametrize("status", [s for s in Status if s.is_infrastructure])
def test_failures_of_the_infrastructure_are_neither_scored_nor_trained(status: Status) -> None:
    (sample,) = episode_samples(episode(segment(0, 1), status=status), 0, 0)
    assert sample.reward is None and sample.loss_mask == [0.0, 0.0] and sample.status is status
    assert episode_samples(episode(status=status), 0, 0) == []


def test_what_could_not_be_judged_is_not_trained() -> None:
    (sample,) = episode_samples(episode(segment(0, 1), score=Score(None, {"right": None})), 0, 0)
    assert sample.reward is None and sample.loss_mask == [0.0, 0.0] and sample.parts == {"right": None}


def test_a_truncated_conversation_beside_a_completed_one() -> None:
    played = episode(segment(0, 1))
    other = Trajectory(TASK, TASK.messages, [segment(0, 0, 1)], Status.TRUNCATED)
    both = played._replace(trajectories=[other, *played.trajectories])
    first, second = episode_samples(both, 0, 0)
    assert (first.loss_mask, second.loss_mask) == ([0.0] * 3, [0.0, 1.0])
    assert [s.metadata["trajectory"] for s in (first, second)] == [0, 1]
    assert (first.prompt_length, second.prompt_length) == (2, 0)


def test_samples_share_no_list_with_the_episode() -> None:
    played = episode(segment(0, 1))
    (sample,) = episode_samples(played, 0, 0)
    sample.tokens.append(9)
    sample.loss_mask.append(1.0)
    assert played.trajectory.segments[0].tokens == [0, 1]


def test_misaligned_streams_are_caught() -> None:
    broken = segment(0, 1)
    broken.logprobs[1] = 0.25
    with pytest.raises(AssertionError, match="sampled logprob"):
        episode_samples(episode(broken), 0, 0)
