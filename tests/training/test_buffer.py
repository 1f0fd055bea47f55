"""DataBuffer: each task once per epoch, in an order that the seed determines; its position can be restored."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.env.methods import as_task
from rollouts.errors import ConfigError, EnvironmentDefinitionError
from rollouts.training.datasets.buffer import DataBuffer, draw_tasks
from rollouts.types import Message, Task


def texts(tasks):
    return [task.prompt for task in tasks]


def endless(epoch):
    return (f"{epoch}/{number}" for number in itertools.count())


def finite(epoch):
    return (f"{epoch}/{number}" for number in range(5))


SOURCES = {"sequence": [str(number) for number in range(7)], "endless": endless, "finite": finite}


@given(size=st.integers(1, 12), seed=st.integers(0, 100), epochs=st.integers(1, 3))
def test_each_task_once_an_epoch(size, seed, epochs):
    source = [str(number) for number in range(size)]
    buffer = DataBuffer(source, seed=seed)
    drawn = texts(buffer.get_prompts(size * epochs))
    for start in range(0, len(drawn), size):
        assert sorted(drawn[start : start + size]) == sorted(source)
    assert drawn == texts(DataBuffer(source, seed=seed).get_prompts(size * epochs))


def test_seeds_and_epochs_differ():
    source = [str(number) for number in range(50)]
    buffer = DataBuffer(source, seed=1)
    first, second = texts(buffer.get_prompts(50)), texts(buffer.get_prompts(50))
    assert len({tuple(order) for order in (source, first, second, texts(DataBuffer(source).get_prompts(50)))}) == 4


def test_without_shuffling_a_sequence_keeps_its_order():
    assert texts(DataBuffer(["c", "a", "b"], shuffle=False).get_prompts(4)) == ["c", "a", "b", "c"]


@given(
    source=st.sampled_from(sorted(SOURCES)),
    before=st.integers(1, 20),
    after=st.integers(1, 20),
    excluded=st.sets(st.integers(0, 3)),
)
def test_fast_forward(source, before, after, excluded):
    """A new buffer that is told where the old one stood continues as the old one does."""
    exclude = frozenset(f"prompt:{number}" for number in excluded) | {f"prompt:0/{number}" for number in excluded}
    old, new = (DataBuffer(SOURCES[source], seed=3, exclude=exclude) for _ in range(2))
    old.get_prompts(before)
    new.load_state_dict(old.state_dict())
    assert texts(new.get_prompts(after)) == texts(old.get_prompts(after))
    assert new.state_dict() == old.state_dict()


def test_the_state_of_another_seed_is_refused():
    with pytest.raises(ConfigError, match=r"the seed was 0 and is 1 now.*give seed 0 again"):
        DataBuffer(["a"], seed=1).load_state_dict(DataBuffer(["a"], seed=0).state_dict())


@given(excluded=st.sets(st.integers(0, 6), max_size=6), source=st.sampled_from(["sequence", "finite"]))
def test_excluded_tasks_are_never_handed_out(excluded, source):
    exclude = frozenset(f"prompt:{number}" for number in excluded) | {f"prompt:0/{number}" for number in excluded}
    drawn = DataBuffer(SOURCES[source], exclude=exclude).get_prompts(12)
    assert not {task.key for task in drawn} & exclude


def test_a_task_is_excluded_by_its_id():
    source = [Task("one", id="a"), Task("two", id="b")]
    assert texts(DataBuffer(source, exclude=frozenset({"id:a"})).get_prompts(2)) == ["two", "two"]


@pytest.mark.parametrize(
    ("source", "exclude", "words"),
    [
        ([], frozenset(), "gave nothing; yield tasks for the split 'train'"),
        (lambda epoch: iter(()), frozenset(), "gave nothing"),
        (["a", "b"], frozenset({"prompt:a", "prompt:b"}), "6 in a row, with 2 different tasks\n.*: --eval-tasks 1; or"),
        (lambda epoch: itertools.repeat("a"), frozenset({"prompt:a"}), "10000 in a row, with 1 .*\n.*--eval-tasks 0;"),
    ],
)
def test_a_source_without_training_tasks(source, exclude, words):
    with pytest.raises(EnvironmentDefinitionError, match=words):
        DataBuffer(source, exclude=exclude).get_prompts(1)


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        {"question": "x"},
        {"prompt": 3},
        {"prompt": "x", "info": 3},
        Task(3),
        Task([{"content": "x"}]),
        [{"role": "user", "content": 3}],
        [Message("user", "x"), None],
    ],
)
def test_what_is_no_task_is_refused(value):
    """None too: it is a mistake of the source, not its end."""
    with pytest.raises(EnvironmentDefinitionError, match="must give"):
        DataBuffer(lambda epoch: iter(["a", value])).get_prompts(2)


def test_as_task():
    task = Task("a")
    assert as_task(task) is task
    assert as_task("a") == task
    assert as_task([Message("user", "a")]).messages == task.messages


DICTS = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "x"}]}]
MESSAGES = [Message("system", "s"), Message("user", [{"type": "text", "text": "x"}])]


def test_messages_may_be_written_as_mappings():
    author = Task(DICTS, answer=1, id=None)
    source = [author, DICTS, {"prompt": DICTS}, [MESSAGES[0], DICTS[1]], Task(tuple(MESSAGES)), Task(MESSAGES)]
    drawn = DataBuffer(source, shuffle=False).get_prompts(len(source))
    assert [task.messages for task in drawn] == [MESSAGES] * len(source)
    assert {task.key for task in drawn} == {Task(MESSAGES).key}
    assert drawn[0].answer == 1 and author.prompt is DICTS, "what the author made is left as it is"
    assert [task.messages for task in draw_tasks(source, 5)] == [MESSAGES]


def test_mappings_are_tasks():
    row = {"prompt": "a", "answer": 2, "id": 7, "info": {"level": 1}, "topic": "sums"}
    assert as_task(row) == Task("a", 2, {"level": 1, "topic": "sums"}, "7")
    assert as_task({"prompt": "a"}) == as_task({"prompt": "a", "info": None}) == Task("a")


def test_draw_tasks_draws_different_ones():
    assert texts(draw_tasks(["a", "b", "a", "c"], 3)) == ["a", "b", "c"]
    assert texts(draw_tasks(itertools.repeat("a"), 3)) == ["a"]
    assert draw_tasks(iter(["a"]), 0) == []
    assert texts(draw_tasks(iter("ab"), 5)) == ["a", "b"]


def test_draw_tasks_reads_no_further_than_it_must():
    source = iter("abcd")
    draw_tasks(source, 2)
    assert list(source) == ["c", "d"]


@pytest.mark.parametrize("prompts", [{"a": Task("a")}, "What is 2+2?", {"a", "b"}, 3])
def test_what_is_no_list_of_prompts(prompts):
    with pytest.raises(ConfigError, match=f"the prompts are a {type(prompts).__name__}, .*expected a list of tasks"):
        DataBuffer(prompts)
