from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import count_steps

from rollouts.errors import SignatureError
from rollouts.training.rollout_gen.groups import Group, NamedFilter, filter_group
from rollouts.training.samples import episode_samples
from rollouts.types import Episode, Message, Sample, Score, Segment, Status, Task, Trajectory

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


streams = st.lists(
    st.tuples(
        st.sampled_from([0.0, 1.0, 0.5, 1, -1.0, math.nan]),
        st.sampled_from([0.0, -0.0, -0.5, -1e308, 0.5, 1e-300, math.nan, math.inf, -math.inf, 0]),
        st.sampled_from([-1, 0, 7]),
    ),
    max_size=5,
)


def is_right(weight: float, logprob: float, version: int | None) -> bool:
    """Invariant 2, for one token."""
    if weight > 0:
        return math.isfinite(logprob) and logprob <= 0
    return version != -1 or logprob == 0.0


@settings(derandomize=True)
@given(streams, st.booleans())
def test_a_sample_is_checked_as_token_by_token(tokens: list[tuple[float, float, int]], with_versions: bool) -> None:
    versions = [version for *_, version in tokens] if with_versions else None
    sample = Sample(
        tokens=[0] * len(tokens),
        loss_mask=[weight for weight, *_ in tokens],
        rollout_log_probs=[logprob for _, logprob, _ in tokens],
        policy_versions=versions,
    )
    wrong = [n for n, (w, lp, v) in enumerate(tokens) if not is_right(w, lp, v if with_versions else None)]
    if not wrong:
        return sample.check()
    with pytest.raises(AssertionError, match=f"token {wrong[0]}"):
        sample.check()


def test_checking_a_sample_takes_no_step_of_python_for_each_token() -> None:
    def by_hand(sample: Sample) -> None:
        for weight, logprob, version in zip(
            sample.loss_mask, sample.rollout_log_probs or (), sample.policy_versions or (), strict=True
        ):
            if weight > 0:
                assert math.isfinite(logprob) and logprob <= 0
            elif version == -1:
                assert logprob == 0.0

    short, long = (episode_samples(episode(segment(*([0] * 6 + [1]) * count)), 0, 0)[0] for count in (30, 300))
    assert count_steps(short.check) == count_steps(long.check)
    assert count_steps(lambda: by_hand(long)) > 9 * count_steps(lambda: by_hand(short))


def test_samples_are_made_for_filters_only_where_one_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Sample] = []
    check = Sample.check
    monkeypatch.setattr(Sample, "check", lambda sample: (made.append(sample), check(sample))[1])
    group = Group(0, TASK, (episode(segment(0, 1)), episode(segment(0, 1), score=Score(0.0))))
    seen: list[int] = []
    by_rewards = NamedFilter("r", lambda rewards, step: max(rewards) > step, {})
    by_samples = NamedFilter("s", lambda samples, trajectories: seen.append(len(samples)) or len(trajectories) == 2, {})
    assert filter_group(group, [by_rewards], step=0).dropped is None
    assert made == []
    assert filter_group(group, [by_rewards, by_samples, by_samples], step=0).dropped is None
    assert len(made) == 2 and seen == [2, 2]
    with pytest.raises(SignatureError, match="this run has: parts, rewards, samples, scores, step, trajectories"):
        filter_group(group, [NamedFilter("x", lambda loss: True, {})], step=0)


@pytest.mark.parametrize(
    ("logprobs", "versions"),
    [
        ([0.0, 0.5], [-1, 0]),
        ([0.0, float("nan")], [-1, 0]),
        ([-0.1, -0.5], [-1, 0]),
        ([0.0, -0.5], [3, 0]),
        ([0.0], [-1]),
    ],
)
def test_a_segment_holds_the_invariant_of_samples(logprobs, versions):
    segment = Segment([5, 6], [0.0, 1.0], [0.0, -0.5], [-1, 0])
    segment.check()
    segment.logprobs, segment.versions = logprobs, versions
    with pytest.raises(AssertionError):
        segment.check()
