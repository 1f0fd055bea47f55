"""Mixing: right shares in every part of the stream, an order by seed and position, and invalid weights."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.errors import ConfigError, EnvironmentDefinitionError
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.datasets.mixing import MixedBuffer, Source, mean_shares, pick, piecewise, share_out, shares_at

WEIGHTS = st.lists(st.floats(0, 10), min_size=1, max_size=4).filter(lambda weights: math.fsum(weights) > 0.01)


def endless(epoch):
    number = 0
    while True:
        yield f"{epoch}/{number}"
        number += 1


def sources(weights):
    """Of each kind: a sequence, an endless source, one that ends."""
    kinds = [[f"s{n}" for n in range(5)], endless, lambda epoch: iter([f"f{epoch}", "f"])]
    return [Source(f"source {n}", kinds[n % 3], weight) for n, weight in enumerate(weights)]


def texts(tasks):
    return [task.prompt for task in tasks]


def names_of(buffer, count):
    """Which source each of the next tasks comes from."""
    names = []
    for _ in range(count):
        before = buffer.drawn
        buffer.get_prompts(1)
        names += [name for name, drawn in buffer.drawn.items() if drawn > before[name]]
    return names


def growing(step):
    return step / 7


@given(weights=WEIGHTS, seed=st.integers(0, 2**40), cuts=st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_any_way_of_saving_and_loading_gives_the_same_tasks(weights, seed, cuts):
    mixed = [*weights[:-1], growing] if len(weights) > 1 and weights[0] > 0 else weights
    unbroken = texts(MixedBuffer(sources(mixed), seed=seed, tasks_per_step=4).get_prompts(sum(cuts)))
    state, drawn = None, []
    for count in cuts:
        buffer = MixedBuffer(sources(mixed), seed=seed, tasks_per_step=4)
        if state is not None:
            buffer.load_state_dict(json.loads(state))
        drawn += texts(buffer.get_prompts(count))
        state = json.dumps(buffer.state_dict())
    assert drawn == unbroken


@given(weights=WEIGHTS, seed=st.integers(0, 2**40), start=st.integers(0, 2**50), length=st.integers(1, 400))
def test_every_stretch_has_its_shares(weights, seed, start, length):
    """Wherever it begins: within a few tasks of each source, and independent throws would be off by their root."""
    shares = shares_at({str(n): weight for n, weight in enumerate(weights)}, 0)
    drawn = [pick(shares, seed, start + number) for number in range(length)]
    for index, share in enumerate(shares):
        assert abs(drawn.count(index) - length * share) <= 5
        assert share > 0 or index not in drawn


def test_a_long_stretch_has_the_shares_nearly_exactly():
    buffer = MixedBuffer(sources([2, 1, 1]), seed=3)
    buffer.get_prompts(2000)
    assert sum(buffer.drawn.values()) == 2000
    assert [abs(drawn - wanted) <= 3 for drawn, wanted in zip(buffer.drawn.values(), (1000, 500, 500), strict=True)]


def test_steps_of_eight_are_alike():
    names = names_of(MixedBuffer(sources([1, 1]), seed=1), 400)
    counts = {names[at : at + 8].count("source 0") for at in range(0, 400, 8)}
    assert counts <= {3, 4, 5}


def test_seeds_differ_and_repeat():
    first, again, other = (names_of(MixedBuffer(sources([1, 1]), seed=seed), 40) for seed in (1, 1, 2))
    assert first == again != other


def test_each_source_has_its_own_epochs():
    buffer = MixedBuffer([Source("short", ["a", "b"], 1), Source("long", [str(n) for n in range(100)], 1)], seed=5)
    drawn = texts(buffer.get_prompts(40))
    assert buffer.epochs["short"] >= 9 and buffer.epochs["long"] == 0 == buffer.epoch_id
    assert buffer.sample_offset == 40
    of_long = [text for text in drawn if text.isdigit()]
    assert len(set(of_long)) == len(of_long), "nothing twice within an epoch"


def test_one_source_is_a_data_buffer():
    prompts = [str(n) for n in range(20)]
    mixed = MixedBuffer([Source("only", prompts)], shuffle=False)
    assert texts(mixed.get_prompts(30)) == texts(DataBuffer(prompts, shuffle=False).get_prompts(30))
    assert mixed.epoch_id == 1


def test_what_is_excluded_is_of_its_source_only():
    buffer = MixedBuffer([Source("a", ["x", "y"], exclude=frozenset({"prompt:x"})), Source("b", ["x"])])
    buffer.get_prompts(20)
    assert buffer.epochs["b"] == buffer.drawn["b"] - 1
    assert buffer.drawn["a"] >= 9


# --- curricula ------------------------------------------------------------------------------------------------------


def test_a_curriculum_goes_by_the_step():
    def build():
        return MixedBuffer(
            [
                Source("easy", endless, lambda step: 1 - step / 10),
                Source("hard", endless, piecewise([(0, 0), (10, 1)])),
            ],
            seed=2,
            tasks_per_step=10,
        )

    names = names_of(build(), 110)
    hard = [names[at : at + 10].count("hard") for at in range(0, 110, 10)]
    assert hard[0] == 0 and hard[10] == 10
    assert all(abs(count - step) <= 2 for step, count in enumerate(hard)), hard
    given = build()
    given.get_prompts(30, step=10)
    assert given.drawn == {"easy": 0, "hard": 30}, "a given step counts, not the number of tasks"


def test_points_are_joined_by_lines():
    weight = piecewise([(10, 2.0), (20, 0.0), (30, 1.0)])
    assert [weight(step) for step in (0, 10, 15, 20, 25, 30, 99)] == [2.0, 2.0, 1.0, 0.0, 0.5, 1.0, 1.0]


def test_mean_shares_are_over_the_steps_of_the_run():
    assert mean_shares({"a": 1, "b": 3}, 10) == [0.25, 0.75]
    assert mean_shares({"a": 1, "b": lambda step: step % 2}, 10) == [0.75, 0.25]
    assert mean_shares({"a": 1, "b": lambda step: step}, 0) == [1.0, 0.0]


@given(count=st.integers(0, 50), weights=WEIGHTS)
def test_sharing_out_loses_nothing(count, weights):
    shares = shares_at({str(n): weight for n, weight in enumerate(weights)}, 0)
    given = share_out(count, shares)
    wanted = sum(share > 0 for share in shares)
    assert sum(given) == count
    assert all(
        number >= (count >= wanted) if share > 0 else number == 0 for number, share in zip(given, shares, strict=True)
    )


# --- mistakes -------------------------------------------------------------------------------------------------------


def broken(step):
    raise KeyError("level")


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([0, 0.0], "the weights of source 0 and source 1 are all 0 at step 0"),
        ([-1, 2], "the weight of source 0 at step 0 is -1; expected a number of 0 or more"),
        ([1, float("nan")], "the weight of source 1 at step 0 is nan"),
        ([float("inf"), 1], "the weight of source 0 at step 0 is inf"),
        ([True, 1], "is True"),
        ([1, lambda step: None], "the weight of source 1 at step 0 is None"),
        ([1, broken], "its curriculum raised KeyError: 'level'"),
    ],
)
def test_weights_that_make_no_mixture(weights, words):
    with pytest.raises(ConfigError) as caught:
        MixedBuffer(sources(weights))
    assert words in str(caught.value)


def test_a_curriculum_that_goes_wrong_later_says_at_which_step():
    with pytest.raises(ConfigError, match="at step 3 is -1"):
        mean_shares({"a": 1, "b": lambda step: 2 - step}, 10)
    buffer = MixedBuffer([Source("a", endless, 1), Source("b", endless, lambda step: 2 - step)], tasks_per_step=1)
    with pytest.raises(ConfigError, match="at step 3 is -1"):
        buffer.get_prompts(10)


def test_names_are_different_and_there_is_one():
    for parts in ([], [Source("a", ["x"]), Source("a", ["y"])]):
        with pytest.raises(ConfigError, match="a mixture needs sources with different names"):
            MixedBuffer(parts)


def test_another_seed_or_other_sources_are_refused():
    buffer = MixedBuffer(sources([1, 1]), seed=1)
    buffer.get_prompts(3)
    state = buffer.state_dict()
    with pytest.raises(ConfigError, match="the seed was 1 and is 2 now"):
        MixedBuffer(sources([1, 1]), seed=2).load_state_dict(state)
    with pytest.raises(ConfigError, match="came from source 0 and source 1, and now they come from source 0"):
        MixedBuffer(sources([1]), seed=1).load_state_dict(state)
    with pytest.raises(ConfigError, match="and now they come from one source"):
        DataBuffer(["x"], seed=1).load_state_dict(state)
    with pytest.raises(ConfigError, match="came from one source, and now they come from source 0 and source 1"):
        MixedBuffer(sources([1, 1]), seed=1).load_state_dict(DataBuffer(["x"], seed=1).state_dict())


def test_other_weights_go_on_from_there():
    buffer = MixedBuffer(sources([1, 1]), seed=1)
    buffer.get_prompts(10)
    again = MixedBuffer(sources([0, 1]), seed=1)
    again.load_state_dict(buffer.state_dict())
    assert set(names_of(again, 10)) == {"source 1"}


def test_a_source_without_tasks_is_named():
    with pytest.raises(EnvironmentDefinitionError, match=r"^empty: the environment has no training task"):
        MixedBuffer([Source("empty", [])]).get_prompts(1)
