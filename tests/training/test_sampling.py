"""Task samplers: the order without one, pools by outcome, state in checkpoints, reports, and samplers that go wrong."""

from __future__ import annotations

import functools
import itertools
import json
import random

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from rollouts_notes.manager import AsyncRolloutManager
from rollouts_notes.rows import RolloutConfig

from rollouts.cli import main
from rollouts.errors import ConfigError, RunError, SignatureError
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.datasets.mixing import MixedBuffer, Source
from rollouts.training.datasets.samplers import Difficulty, Uniform
from rollouts.types import Sample


def endless(epoch):
    return (f"{epoch}/{number}" for number in itertools.count())


def mixture(sampler, seed=1):
    few, more = [f"few {n}" for n in range(4)], lambda epoch: iter([f"{epoch} more {n}" for n in range(6)])
    parts = [Source("few", few, 2, frozenset({"prompt:few 3"}), sampler), Source("more", more, 1, sampler=sampler)]
    return MixedBuffer(parts, seed=seed)


def single(sampler, seed=1):
    return DataBuffer([f"{n}" for n in range(5)], seed=seed, exclude=frozenset({"prompt:4"}), sampler=sampler)


def earned(task):
    """A third of all tasks earns all, a third nothing, and a third some of both."""
    return [[1.0, 1.0], [0.0, 0.0, None], [0.0, 1.0]][int(task.prompt[-1]) % 3]


def play(buffer, count, first=0):
    """Draw tasks, and report each one."""
    drawn = []
    for step in range(first, first + count):
        task, place = buffer.draw(step)
        buffer.finished(place, task, earned(task), step)
        drawn.append(task.prompt)
    return drawn


@pytest.mark.parametrize("make", [single, mixture, lambda sampler: DataBuffer(endless, sampler=sampler)])
def test_uniform_is_the_order_without_a_sampler(make):
    assert play(make(Uniform), 40) == play(make(None), 40)


@pytest.mark.parametrize("make", [single, mixture])
def test_difficulty_begins_in_the_order_without_a_sampler(make):
    """A list that is sorted by difficulty is shuffled first."""
    assert play(make(functools.partial(Difficulty, after=99, revisit=0.0)), 4) == play(make(None), 4)


SAMPLERS = [Uniform, functools.partial(Difficulty, after=1, revisit=0.3)]


@given(
    make=st.sampled_from([single, mixture]),
    sampler=st.sampled_from(SAMPLERS),
    seed=st.integers(0, 9),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_any_way_of_saving_and_loading_gives_the_same_tasks(make, sampler, seed, cuts):
    unbroken = play(make(sampler, seed), sum(cuts))
    drawn, state = [], None
    for count in cuts:
        buffer = make(sampler, seed)
        if state is not None:
            buffer.load_state_dict(json.loads(state))
        drawn += play(buffer, count, len(drawn))
        state = json.dumps(buffer.state_dict())
    assert drawn == unbroken


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("make", [single, mixture])
def test_a_place_is_that_of_its_task(make, sampler):
    buffer, places = make(sampler), []
    for step in range(12):
        task, place = buffer.draw(step)
        buffer.finished(place, task, earned(task), step)
        places.append((task.prompt, (json.loads(json.dumps(place)), step)))
    random.Random(0).shuffle(places)
    before = buffer.state_dict()
    assert [task.prompt for task in buffer.tasks_at([place for _, place in places])] == [text for text, _ in places]
    assert buffer.state_dict() == before
    without = make(None)
    assert [task.prompt for task in without.tasks_at([place for _, place in places])] == [text for text, _ in places]


def test_tasks_are_retired_and_return():
    tasks = ["a", "b", "c"]
    own, rng = Difficulty(tasks, after=2, revisit=0.0), random.Random(0)
    outcomes = {"a": [1.0], "b": [0.0, None], "c": [0.0, 1.0]}
    for step in range(2):
        assert own.metrics()["normal"] == 3, "one group is not two in a row"
        for task, rewards in outcomes.items():
            own.finished(task, rewards, step)
    assert own.metrics() == {"normal": 1, "easy": 1, "hard": 1, "unseen": 0}
    assert {own.choose(2, rng) for _ in range(9)} == {"c"}
    own.finished("a", [None], 2)
    assert own.metrics()["easy"] == 1, "nothing is known of this group"
    own.finished("a", [1.0, 0.0], 2)
    own.finished("b", [1.0], 2)
    assert own.metrics()["normal"] == 3
    for task in tasks * 2:
        own.finished(task, [1.0], 3)
    assert sorted(own.choose(4, rng) for _ in tasks) == tasks, "only easy ones are left"


def test_thresholds_have_an_order():
    with pytest.raises(ConfigError, match=r"--sampler\.hard-at 0: it must be less than --sampler\.easy-at 0"):
        single(functools.partial(Difficulty, easy_at=0.0))


def test_some_draws_look_at_retired_tasks():
    own, rng = Difficulty([str(n) for n in range(10)], after=1, revisit=0.25), random.Random(3)
    for n in range(5):
        own.finished(str(n), [1.0], 0)
    retired = sum(int(own.choose(1, rng)) < 5 for _ in range(2000))
    assert 0.2 < retired / 2000 < 0.3


# --- reports of the manager -------------------------------------------------------------------------------------------


class Counting(Uniform):
    """Keeps every report in its state."""

    def __init__(self):
        self.seen = []

    def finished(self, task, rewards, step):
        self.seen.append([task, rewards])

    def state(self):
        return self.seen

    def restore(self, state):
        self.seen = state


def counting(buffer):
    return buffer.state_dict()["sampler"]["state"]


async def rows(prompts):
    """The rollouts of one task; every third task takes longer than a step."""
    await trio.sleep(5 if int(prompts[0]) % 3 == 0 else 1)
    found = [Sample(tokens=[1], loss_mask=[1.0], rollout_log_probs=[-1.0], reward=float(n)) for n in range(2)]
    return found[: len(prompts)]


@pytest.mark.parametrize("ahead", [{"over_sampling_factor": 2.0}, {"staleness": 2}, {"refill": True}])
def test_every_group_is_reported_once_also_after_a_resume(ahead, autojump_clock):
    """Dropped, carried and prefetched groups too."""
    config = RolloutConfig(2, 2, generate_fn=rows, filter_fn=lambda samples: samples[0].tokens == [1], **ahead)

    def manager():
        buffer = DataBuffer([str(n) for n in range(100)], seed=2, sampler=Counting)
        return buffer, AsyncRolloutManager(buffer, config)

    async def main():
        buffer, own = manager()
        async with own:
            steps = [await own.generate_batch() for _ in range(3)]
            await trio.sleep(20)
            async with own.pause():
                state = json.loads(json.dumps([buffer.state_dict(), own.state_dict()]))
        buffer, own = manager()
        buffer.load_state_dict(state[0])
        own.load_state_dict(state[1])
        async with own:
            steps += [await own.generate_batch(wanted=6 - n) for n in range(3, 6)]
        return steps, counting(buffer)

    steps, seen = trio.run(main, clock=autojump_clock)
    trained = [group.task.key for step in steps for group in step.groups]
    reported = [task for task, _ in seen]
    assert len(set(reported)) == len(reported) and set(trained) == set(reported)
    assert all(rewards == [0.0, 1.0] for _, rewards in seen)


@pytest.fixture
def autojump_clock():
    return trio.testing.MockClock(autojump_threshold=0)


# --- samplers that go wrong -------------------------------------------------------------------------------------------


def broken(**methods):
    """Uniform with other methods."""
    return type("Broken", (Uniform,), {name: lambda self, *given, _f=f: _f(*given) for name, f in methods.items()})


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ({"choose": lambda step, rng: "prompt:7"}, "returned 'prompt:7', which is none of 4 tasks"),
        ({"choose": lambda step, rng: 3}, r"returned 3 \(int\); expected the key of a task, or None"),
        ({"choose": lambda step, rng: {}["x"]}, "`choose` of the sampler Broken raised KeyError: 'x'"),
        ({"finished": lambda task, rewards, step: 1 / 0}, "`finished` of the sampler Broken raised ZeroDivisionError"),
        ({"metrics": lambda: [1]}, r"returned \[1\]; expected a dict from names to numbers"),
        ({"state": object}, "which JSON cannot hold"),
        ({"restore": lambda state: state["pools"]}, "`restore` of the sampler Broken raised KeyError"),
    ],
)
def test_a_sampler_that_goes_wrong_is_named(methods, words):
    buffer = single(broken(**methods))
    with pytest.raises(RunError, match=words):
        play(buffer, 2)
        _ = buffer.sampler_metrics
        buffer.load_state_dict(buffer.state_dict())


def test_a_sampler_needs_all_methods():
    with pytest.raises(SignatureError, match="the sampler Half has no method choose"):
        single(type("Half", (), dict.fromkeys(("finished", "metrics", "state", "restore"), len)))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("difficlty", "did you mean: difficulty?"),
        ("difficulty --sampler.after 0", "--sampler.after"),
        ("difficulty --sampler.revisit 2", "--sampler.revisit"),
        ("uniform --sampler.after 2", "after"),
    ],
)
def test_settings_that_cannot_work(flags, words, capsys):
    assert main(["run", "--env", "calculator", "--dry-run", "--sampler", *flags.split()]) == 2
    assert words in capsys.readouterr().err
