"""Settings files and the lines of their settings."""

from __future__ import annotations

import json
import os

import pytest

import rollouts
from rollouts.cli import main
from rollouts.config.files import Source, check_tree, load_file, where
from rollouts.config.flags import Flag
from rollouts.errors import ConfigError

TREE = {"steps": 3, "env": {"name": "calculator", "digits": 2}, "reward": {"short": {"name": "a/b", "weight": -0.1}}}

TOML = """\
# a comment
steps = 3

[env]
name = "calculator"
digits = 2

[reward.short]
name = "a/b"
weight = -0.1
"""


def written(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", TOML),
        ("a.json", json.dumps(TREE)),
        ("a.py", f"config = {TREE!r}"),
        ("b.py", "import math\n_n = 2\n" + "".join(f"{key} = {value!r}\n" for key, value in TREE.items())),
    ],
)
def test_every_format_gives_the_same_tree(tmp_path, name, text):
    tree, source = load_file(written(tmp_path, name, text))
    assert tree == TREE
    assert source.path.endswith(name)
    assert source.text == text


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("steps",), 2),
        (("env",), 4),
        (("env", "digits"), 6),
        (("reward", "short", "weight"), 10),
        (("reward", "short", "missing"), 8),
        (("nothing",), None),
    ],
)
def test_the_line_of_a_setting_in_toml(path, line):
    assert Source("a.toml", TOML).line_of(path) == line


def test_the_line_of_a_value_over_several_lines_is_its_first():
    text = 'a = 1\nreward = [\n  "env:1",\n  "b",\n]\n\n\nlast = """\nx\n"""\n'
    assert Source("a.toml", text).line_of(("reward",)) == 2
    assert Source("a.toml", text).line_of(("last",)) == 8


def test_a_separator_within_a_text_ends_no_line_of_toml():
    assert Source("x.toml", 'system = "a\u2028b"\n\n[loss]\nclip = 1\n').line_of(("loss", "clip")) == 4


def test_the_line_of_a_setting_in_json():
    text = json.dumps({"list": [{"digits": 1}], "s": 'a"b: {', **TREE}, indent=1)
    lines = text.splitlines()
    for path, needle in [
        (("steps",), '"steps"'),
        (("env", "digits"), ' "digits": 2'),
        (("reward", "short", "weight"), '"weight"'),
    ]:
        line = Source("a.json", text).line_of(path)
        assert line is not None
        assert needle in lines[line - 1]
    assert Source("a.json", text).line_of(("nothing",)) is None
    assert Source("a.json", text).line_of(("s", "x")) == Source("a.json", text).line_of(("s",))


def test_the_line_of_a_setting_in_python():
    text = "steps = 3\nenv = {\n  'name': 'x',\n  'digits': 2,\n}\n"
    assert Source("a.py", text).line_of(("env", "digits")) == 4
    assert Source("a.py", text).line_of(("steps",)) == 1
    assert Source("a.py", "config = {\n 'a': {\n  'b': 1}}").line_of(("a", "b")) == 3


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("a.toml", "[[s]]\na = 1\n\n[[s]]\na = 2\n[s.b]\nc = 3\n", [1, 2, 4, 5, 7]),
        ("a.json", '{"s":\n [{\n"a": 1},\n {\n"a": 2, "b": {\n"c": 3}}]}', [2, 3, 4, 5, 6]),
        ("a.py", "s = [\n {\n'a': 1},\n {\n'a': 2, 'b': {\n'c': 3}}]", [2, 3, 4, 5, 6]),
        ("a.py", "config = {'s': [\n {\n'a': 1},\n {\n'a': 2, 'b': {\n'c': 3}}]}", [2, 3, 4, 5, 6]),
    ],
)
def test_the_line_of_what_stands_in_an_array(name, text, lines):
    paths = [("s[0]",), ("s[0]", "a"), ("s[1]",), ("s[1]", "a"), ("s[1]", "b", "c")]
    assert [Source(name, text).line_of(path) for path in paths] == lines
    assert Source(name, text).line_of(("s[2]",)) is None and Source(name, text).line_of(("s[7]",)) is None
    assert Source(name, text).line_of(("s[1]", "b", "d")) == Source(name, text).line_of(("s[1]", "b"))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "a.toml",
            "steps = 3\nenv = calculator\n",
            r'a\.toml, line 2: not TOML.*\nput text in quotes: env = "calculator"',
        ),
        ("a.toml", "steps = 3\nsteps = 4\n", r"a\.toml, line 2: not TOML"),
        ("a.toml", "steps = [3\n", r"a\.toml, line \d: not TOML"),
        ("a.json", '{"a": 1,\n}', r"a\.json, line \d: not JSON"),
        ("a.json", '{"a": 1, "a": 2}', r"'a' is in one table twice"),
        ("a.json", "[1]", r"expected a table of settings, got list"),
        ("a.py", "x = 1\ny = (", r"a\.py, line 2: not Python"),
        (
            "a.py",
            "x = 1\ny = 1 / 0\n",
            r"a\.py: the settings file raised ZeroDivisionError: .*a\.py, line 2: y = 1 / 0\)",
        ),
        ("a.py", "config = 3", r"expected a table of settings, got int"),
        ("a.yaml", "a: 1", r"a settings file ends in \.toml, \.json, \.py"),
    ],
)
def test_an_unreadable_file_is_told_with_its_line(tmp_path, name, text, words):
    with pytest.raises(ConfigError, match=words):
        load_file(written(tmp_path, name, text))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a = 1\nb = '\xe9'\n", r"a\.toml, line 2: byte 6 is not text in UTF-8\n.*iconv -f WINDOWS-1252 -t UTF-8 "),
        ("a = 1\n".encode("utf-16"), r"a\.toml, line 1: byte 1 is not text in UTF-8\n.*iconv -f UTF-16 -t UTF-8 "),
    ],
)
def test_a_file_that_is_no_text_is_told(tmp_path, content, words):
    path = tmp_path / "a.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        load_file(path)


def test_a_setting_whose_bytes_are_no_text_is_told():
    with pytest.raises(ConfigError, match=r"system: .*bytes are not text in UTF-8; .*type: iconv "):
        check_tree({"system": os.fsdecode(b"caf\xe9")})


HUGE = "9" * 5_000


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", f"seed = 1\nsteps = {HUGE}", "a.toml, line 2: expected a whole number of 300 digits"),
        ("a.json", f'{{"seed": 1,\n"steps": {HUGE}}}', "a.json, line 2: expected a whole number of 300 digits"),
        ("a.py", f"steps = {HUGE}", "a.py, line 1"),
        ("b.py", "seed = 1\nsteps = 10**5000", "b.py, line 2: steps: expected a whole number of 300 digits"),
        ("c.toml", "steps = " + "[" * 5_000 + "]" * 5_000, "c.toml: its values are nested too deep"),
        ("d.toml", "env." + "a." * 500 + "a = 1", "d.toml, line 1: env.a.a....: nested more than 50 levels deep"),
        ("c.json", '{"steps": ' + "[" * 5_000 + "]" * 5_000 + "}", "c.json: its values are nested too deep"),
        ("c.py", "steps = " + "-" * 5_000 + "1", "c.py: the settings file raised RecursionError: "),
        ("d.py", "env = {}\nenv['a'] = [env]", "d.py, line 1: env.a[0].a[0]....: nested more than 50 levels deep"),
        ("e.json", '{"seed": 1,\n"model": "a\\ud800"}', r"e.json, line 2: model: expected text; got 'a\ud800'"),
        ("e.py", "env = {'name': 'x', '\\udcff': 1}", "e.py, line 1: env: expected text"),
        ("f.py", "import sys\nsys.exit(0)", "f.py, line 2: sys.exit(0))"),
        ("g.py", "def again():\n    again()\nagain()", "g.py, line 2: again())"),
        ("h.py", "class E(Exception):\n    def __str__(self): 1 / 0\nraise E", "h.py, line 3: raise E)"),
        ("i.py", "raise GeneratorExit", "i.py, line 1: raise GeneratorExit)"),
    ],
)
def test_a_file_that_no_run_can_have_is_one_clear_error(tmp_path, name, text, words):
    with pytest.raises(ConfigError) as caught:
        load_file(written(tmp_path, name, text))
    assert words in str(caught.value) and len(str(caught.value)) < 500
    str(caught.value).encode()


@pytest.mark.parametrize(
    ("name", "text"), [("a.toml", TOML), ("a.json", json.dumps(TREE)), ("a.py", f"config={TREE!r}")]
)
def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert load_file(path)[0] == TREE


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--steps", HUGE], "--steps: expected a whole number; got"),
        (["--steps", f"{2**63}"], "--steps: must be less than 2**63"),
        (["--env.digits", "[" * 5_000], "--env.digits: expected a whole number; got"),
        (["--model", "a\udcff"], "--model: expected text; got 'a\\udcff'"),
    ],
)
def test_a_flag_that_no_run_can_have_is_one_clear_error(capsys, argv, words):
    assert main(["run", "--env", "calculator", "--dry-run", *argv]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error) < 600


def test_settings_of_a_program_that_contain_themselves_are_one_clear_error():
    env = {"name": "calculator"}
    env["digits"] = env
    with pytest.raises(ConfigError, match=r"env.digits.digits.*: nested more than 50 levels deep"):
        rollouts.run(env=env)


def test_a_missing_file_names_near_misses(tmp_path):
    written(tmp_path, "calculator_tiny.toml", "")
    with pytest.raises(ConfigError, match=r"no such settings file\ndid you mean: .*calculator_tiny\.toml\?"):
        load_file(tmp_path / "calculator_tinny.toml")
    with pytest.raises(ConfigError, match=r"--env calculator"):
        load_file("calculator")
    with pytest.raises(ConfigError, match="is a folder"):
        load_file(tmp_path)


def test_where_names_the_flag_or_the_file_and_line():
    source = Source("a.toml", TOML)
    assert where(("env", "digits"), 2, source) == "a.toml, line 6: env.digits"
    assert where(("env", "digits"), Flag("2", 2), source) == "--env.digits"
    assert where(("reward", "a_b"), {"x_y": Flag("2", 2)}, source) == "--reward.a-b.x-y"
    assert where(("x",), 1, source) == "a.toml: x"
    assert where(("x",), 1, Source()) == "x"


def test_where_something_stood_is_not_what_it_says():
    assert Source("a", "b") == Source("c", "d")
