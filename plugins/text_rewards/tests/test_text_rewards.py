"""Each reward gives 1 to what it asks for and less to what only looks like it; hostile replies do not stop a run."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
import time
import tomllib
from pathlib import Path

import forks
import pytest
import trio

pytest.importorskip("math_verify", reason="math-verify is not installed; type pip install math-verify==0.9.0")
pytest.importorskip("rapidfuzz", reason="rapidfuzz is not installed; type pip install rapidfuzz==3.14.6")
pytest.importorskip("jsonschema", reason="jsonschema is not installed; type pip install jsonschema==4.26.0")

from rollouts_text_rewards import json_replies, processes
from rollouts_text_rewards.answers import exact_match
from rollouts_text_rewards.formats import check_names, check_regex, pattern, tags
from rollouts_text_rewards.json_replies import check_schema, json_schema
from rollouts_text_rewards.math_answers import math_equal
from rollouts_text_rewards.shape import check_bounds, length, repetition
from rollouts_text_rewards.similarity import novelty, similar

from rollouts import Message, Task, Trajectory
from rollouts.check import check_component
from rollouts.cli import main
from rollouts.env.threads import run_in_thread
from rollouts.errors import ConfigError

FOLDER = Path(__file__).parents[1]
PAGE = (FOLDER.parents[1] / "docs" / "text-rewards.md").read_text(encoding="utf-8")
NAMES = list(tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]["entry-points"]["rollouts.rewards"])
REWARDS = [exact_match, json_schema, length, math_equal, novelty, pattern, repetition, similar, tags]


def said(text: str, answer=None, **info) -> Trajectory:
    task = Task("What is it?", answer=answer, info=info)
    return Trajectory(task, [*task.messages, Message("assistant", text)])


def scored(reward, *episodes: Trajectory, **settings):
    """The values of the episodes, judged one after another in one trio run."""
    return judged(reward, *((each, settings) for each in episodes))


def judged(reward, *episodes: tuple[Trajectory, dict]):
    """The values of episodes with their settings. All are judged in one trio run, so they share a process."""

    async def every():
        found = []
        for each, settings in episodes:
            available = {"task": each.task, "trajectory": each}
            names = [
                name for name, parameter in inspect.signature(reward).parameters.items() if parameter.kind.value < 3
            ]
            returned = reward(*(available[name] for name in names), **settings)
            found.append(await returned if inspect.isawaitable(returned) else returned)
        return found

    return [getattr(each, "value", each) for each in trio.run(every)]


# --- mathematics ------------------------------------------------------------------------------------------------------

EQUAL = [
    ("84", "It is 84."),
    ("84", r"\boxed{84}"),
    ("1/2", r"So $\frac{1}{2}$."),
    (r"\frac{1}{2}", "0.5"),
    ("x^2 + 2x + 1", r"$(x+1)^2$"),
    ("1000", "1,000"),
    (84, "84.0"),
    ([7, 8], "I say 8"),
    (r"\{1, 2\}", r"$\{2, 1\}$"),
]
UNEQUAL = [
    ("84", "It is 85."),
    ("84", ""),
    ("84", "I do not know."),
    ("1/2", "1/3"),
    ("x^2", "$x^3$"),
    ("84", "84 or rather 12"),
    ("84", r"\boxed{84, 85, 86}"),
]


BOXED = {"84": 0.0, r"First \boxed{12}, then \boxed{84}.": 1.0, r"\boxed{12} or 84": 0.0}  # the answer is 84


@pytest.mark.filterwarnings("ignore")
def test_mathematics():
    """It is equal in another form, and nothing else is. The answer may have to be boxed, and must be readable."""
    plain = [(said(reply, answer), {}) for answer, reply in EQUAL + UNEQUAL]
    boxed = [(said(reply, "84"), {"boxed": True}) for reply in BOXED]
    unreadable = [(episode, {}) for episode in (said("84"), said("84", ""), said("84", []))]
    values = judged(math_equal, *plain, *boxed, *unreadable)
    assert values[: len(plain)] == [1.0] * len(EQUAL) + [0.0] * len(UNEQUAL)
    assert values[len(plain) :] == [*BOXED.values(), None, None, None]


HOSTILE = ["10**10**10**10", "9!!!!!!", r"$\int_0^1 x^{x^{x^{x}}} dx$", r"$9^{9^{9^{9}}}$", "(" * 3000, "$" * 4000]
HOSTILE += [r"\boxed{" * 500, r"$\sum_{n=1}^{10^{99}} n^{n}$", "__import__('os').system('touch evil')", "\ud800", "\0"]


@pytest.mark.nightly
def test_hostile_mathematics_takes_no_more_than_its_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scored(math_equal, said("1", "1"))  # the imports
    values = scored(math_equal, *(said(text, "84") for text in HOSTILE), seconds=0.5)
    assert 1.0 not in values
    assert not list(tmp_path.iterdir())
    after = scored(math_equal, said("10**10**10**10", "84"), said("84", "84"), seconds=5.0)
    assert after[1] == 1.0, "the next reply is judged"


CHECKS = """\
import os
import signal

from rollouts_text_rewards import processes


def forever(text: str):
    while True:
        pass


def killed(text: str):
    os.kill(os.getpid(), signal.SIGKILL)


def hungry(text: str):
    with processes.limited_memory():
        return {"found": len(bytearray(2**40))}


def len_of(text: str):
    return {"found": len(text)}
"""


def test_a_check_that_hangs_dies_or_takes_all_memory_is_no_verdict(tmp_path, monkeypatch):
    (tmp_path / "ill_checks.py").write_text(CHECKS)
    monkeypatch.syspath_prepend(tmp_path)
    checks = importlib.import_module("ill_checks")

    async def outcomes():
        found = []
        for check, seconds in (
            (checks.forever, 0.2),
            (checks.killed, 20.0),
            (checks.hungry, 20.0),
            (checks.len_of, 20.0),
        ):
            found.append(await processes.stopped_at(seconds, check, text="four"))
        return found

    hung, died, hungered, alive = trio.run(outcomes)
    assert hung.why == "it took longer than 0.2 seconds" and "crashed" in died.why and "MemoryError" in hungered.why
    assert alive == (4, "")


@pytest.mark.nightly
def test_math_works_beside_threads():
    """math-verify's own timeouts need the main thread; here it runs while threads are busy, and many at a time."""

    async def many():
        found = []

        async def one(number: int) -> None:
            await run_in_thread(lambda: time.sleep(0.01))
            found.append((await math_equal(Task("", answer="7"), said(f"{number}", "7"))).value)

        async with trio.open_nursery() as nursery:
            for number in (6, 7):
                nursery.start_soon(one, number)
        return found

    assert sorted(trio.run(many)) == [0.0, 1.0]


# --- answers ----------------------------------------------------------------------------------------------------------


def test_exact_match():
    right = said(" the\nCITY  of Ａ ", "The city of A"), said("b", ["a", "B"])
    wrong = said("The city of A, I think", "The city of A"), said("", "a"), said("a b", ["a", "b"])
    assert scored(exact_match, *right, *wrong) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert scored(exact_match, said("84"), said("84", [])) == [None, None]
    assert scored(exact_match, said("<answer>1</answer> <answer> 84 </answer>", 84), where="tags") == [1.0]
    assert scored(exact_match, said("<answer>84", 84), said("84", 84), where="tags") == [0.0, 0.0]
    assert scored(exact_match, said("so\n84 \n\n", 84), said("", 84), where="last_line") == [1.0, 0.0]
    assert scored(exact_match, said("yes", "Yes"), case=True) == [0.0]
    assert scored(exact_match, said("yes!", "Yes."), punctuation=False) == [1.0]


def test_similarity():
    episodes = said("Ada Lovelace", "ada lovelace"), said("Ada Lovelase", "Ada Lovelace"), said("x", "Ada")
    same, near, far = scored(similar, *episodes)
    assert same == 1.0 > near > 0.8 and far == 0.0
    assert scored(similar, said("Lovelace, Ada", "Ada Lovelace"), measure="words", at_least=0.99) == [0.0]
    assert scored(similar, said("Lovelace Ada", "Ada Lovelace"), measure="words") == [1.0]
    assert scored(similar, said("Ada", ["Bob", "Ada"]), said("Ada"), said("", "Ada")) == [1.0, None, 0.0]
    long = said("x" * 200_000, "y" * 200_000)
    assert scored(similar, long) == [0.0]


def test_novelty_compares_the_replies_of_a_group():
    same = novelty([said("one two three"), said("three two one"), said("quite another reply")])
    assert same[0] == same[1] < same[2] <= 1.0
    assert novelty([said("alone")]) == [1.0] and novelty([said(""), said("")]) == [0.0, 0.0]


# --- JSON and format --------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0}}, "required": ["age"]}


def test_json_that_satisfies_a_schema(tmp_path):
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    right = [said('{"age": 3}'), said(' {"age": 0} '), said('```json\n{"age": 3}\n```'), said('```\n{"age": 3}```')]
    wrong = [said(text) for text in ('{"age": -1}', '{"age": "3"}', "{}", "[]", "Sure: {}", '{"age": 3} ok', "", "NaN")]
    wrong += [said("[" * 100_000), said('{"age": NaN}')]
    values = judged(
        json_schema,
        *((each, {"schema": SCHEMA}) for each in (*right, *wrong)),
        *((each, {"schema": SCHEMA, "only_json": 0.25}) for each in wrong[:8]),
        (right[2], {"schema": SCHEMA, "fence": False}),
        (right[0], {"schema_file": str(file)}),
        *((said("3", **info), {}) for info in ({"schema": {"type": "integer"}}, {"schema": 7}, {})),
    )
    assert values[:14] == [1.0] * 4 + [0.0] * 10
    assert values[14:22] == [0.25] * 4 + [0.0] * 4
    assert values[22:] == [0.0, 1.0, 1.0, None, None]


def test_hostile_schemas():
    """A pattern that takes for ever, a schema that is elsewhere, and one that refers to itself."""
    slow = {"schema": {"type": "string", "pattern": "^(a+)+$"}, "seconds": 0.3}
    values = judged(
        json_schema,
        (said(f'"{"a" * 40}b"'), slow),
        (said('"aa"'), slow),
        (said("1"), {"schema": {"$ref": "http://127.0.0.1:9/schema"}}),
        (said("1"), {"schema": {"$ref": "#"}}),
    )
    assert values == [None, 1.0, None, 0.0]


def test_a_pattern():
    right, wrong = [said(" Answer: 12\n"), said("Answer: 3")], [said("The Answer: 3"), said("Answer: x"), said("")]
    number, slow = {"regex": r"Answer: \d+"}, {"regex": "(a+)+", "seconds": 0.3}
    episodes = [(each, number) for each in (*right, *wrong)]
    episodes += [(wrong[0], {**number, "match": "anywhere"}), (said("a" * 40 + "b"), slow), (said("aa"), slow)]
    assert judged(pattern, *episodes) == [1.0, 1.0, 0.0, 0.0, 0.0, 1.0, None, 1.0]


def test_tags():
    right = [said("<think>a\nb</think>\n<answer>c</answer>"), said("<think></think><answer></answer>")]
    texts = ["", "<think>a</think>", "<answer>c</answer><think>a</think>", "hm <think>a</think><answer>c</answer>"]
    texts += ["<think>a<answer>c</answer></think>", "<think>a</think><answer>b</answer><answer>c</answer>"]
    texts += ["<think>a</think></think><answer>b</answer>", "<Think>a</Think><answer>b</answer>"]
    assert scored(tags, *right, *map(said, texts)) == [1.0] * 2 + [0.0] * len(texts)
    assert scored(tags, said(texts[3]), said(texts[5]), nothing_else=False) == [1.0, 0.0]
    assert scored(tags, said("<a>x</a>"), said("x"), names=("a",)) == [1.0, 0.0]


# --- shape ------------------------------------------------------------------------------------------------------------


def test_length():
    settings = {"least": 2, "most": 4, "margin": 4}
    found = scored(length, *(said("a " * count) for count in (0, 1, 2, 4, 5, 7, 8, 99)), **settings)
    assert found == [0.5, 0.75, 1.0, 1.0, 0.75, 0.25, 0.0, 0.0]
    assert scored(length, said("abcd"), unit="characters", most=3, margin=2) == [0.5]
    assert scored(length, said("abcd"), unit="tokens", least=1, margin=1) == [0.0]


def test_repetition():
    assert scored(repetition, said(""), said("a b"), said("a b c d"), said("no " * 100)) == [0.0, 0.0, 0.0, 1 - 1 / 98]
    assert scored(repetition, said("to be or to be"), words=2) == [0.25]


# --- settings, names and docs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "values", "message"),
    [
        (check_regex, {"regex": ""}, "needs a regular expression"),
        (check_regex, {"regex": "("}, r"missing \)"),
        (check_names, {"names": ()}, "expected different names"),
        (check_names, {"names": ("a", "a")}, "expected different names"),
        (check_names, {"names": ("<a>",)}, "a name without brackets"),
        (check_bounds, {"least": 3, "most": 2}, "least is 3, more than most, which is 2"),
        (check_schema, {"schema": {"type": "whole"}, "schema_file": ""}, r"at \$.type: 'whole' is not valid"),
        (check_schema, {"schema": {}, "schema_file": "x"}, "leave one of them out"),
        (check_schema, {"schema": None, "schema_file": "/no/such"}, "No such file"),
    ],
)
def test_wrong_settings_are_refused(check, values, message):
    with pytest.raises(ConfigError, match=message):
        check(values)


def test_a_wrong_setting_is_one_error_before_the_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--env", "calculator", "--reward", "pattern", "--reward.pattern.regex", "(", "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith("error: --reward.pattern.regex '(': missing )")


def test_without_a_library_one_line_says_how_to_install_it():
    """Nothing is installed or removed: the library is hidden from a process."""
    code = "import sys; sys.modules['rapidfuzz'] = None; from rollouts.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "run", "--env", "calculator", "--reward", "similar", "--dry-run"]
    done = forks.run(command, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "rapidfuzz" in done.stderr and "rollouts-text-rewards[similarity]" in done.stderr


def test_every_reward_and_setting_is_on_the_page():
    assert sorted(NAMES) == sorted(each.__name__ for each in REWARDS)
    for reward in REWARDS:
        section = PAGE.partition(f"\n## {reward.__name__}\n")[2].partition("\n## ")[0]
        rows = re.findall(r"^\| `(\w+)` \|\s*(.*?)\s*\|", section, re.MULTILINE)
        own = {n: p.default for n, p in inspect.signature(reward).parameters.items() if p.kind is p.KEYWORD_ONLY}
        assert [name for name, _ in rows] == list(own), reward.__name__
        for name, written in rows:
            default = own[name]
            if isinstance(default, bool) or default in (None, ""):
                assert written == {True: "`true`", False: "`false`", None: "", "": ""}[default], name
            elif isinstance(default, int | float):
                assert float(written) == default, name


def test_upstream_has_what_this_package_uses():
    """If this fails, a library has changed since math-verify 0.9.0, rapidfuzz 3.14.6 or jsonschema 4.26.0."""
    import math_verify
    import rapidfuzz
    from jsonschema import Draft202012Validator

    parse, verify = inspect.signature(math_verify.parse), inspect.signature(math_verify.verify)
    assert {"pred", "parsing_timeout", "raise_on_error"} <= set(parse.parameters)
    assert {"gold", "target", "timeout_seconds"} <= set(verify.parameters)
    assert rapidfuzz.fuzz.ratio("a", "b") == 0.0 and rapidfuzz.fuzz.ratio("a", "a") == 100.0
    error = next(Draft202012Validator({"type": "integer"}).iter_errors("x"))
    assert error.json_path == "$" and "integer" in error.message
    assert json_replies.Registry() is not None


SETTINGS = {"pattern": {"regex": ".*"}, "json_schema": {"schema": {"type": "string"}}}


@pytest.mark.parametrize(
    "reward",
    [
        pytest.param(each, id=each.__name__, marks=() if each in (exact_match, novelty) else pytest.mark.nightly)
        for each in REWARDS
    ],
)
def test_keeps_the_contract(reward):
    check_component(reward, "reward", **SETTINGS.get(reward.__name__, {}))
