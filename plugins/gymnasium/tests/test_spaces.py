from __future__ import annotations

import json
import string

import msgspec
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Graph, MultiBinary, MultiDiscrete, OneOf, Sequence, Text, Tuple
from gymnasium.utils.env_checker import data_equivalence
from rollouts_gymnasium import spaces

SPACES = {
    "discrete": Discrete(4),
    "from-minus-one": Discrete(3, start=-1),
    "many-choices": Discrete(500),
    "multi-discrete": MultiDiscrete([3, 5]),
    "multi-discrete-2d": MultiDiscrete([[2, 3], [4, 5]], start=[[1, 0], [0, 0]]),
    "multi-binary": MultiBinary(3),
    "multi-binary-2d": MultiBinary((2, 3)),
    "box": Box(-1.0, 1.0, (3,)),
    "box-one": Box(-2.0, 2.0, (1,)),
    "box-scalar": Box(0.0, 0.1, ()),
    "box-2d": Box(-1.0, 1.0, (2, 2), dtype=np.float64),
    "box-unlimited": Box(-np.inf, np.inf, (2,)),
    "box-limits": Box(np.array([0.0, -3.0]), np.array([1.0, 3.0]), dtype=np.float64),
    "box-whole": Box(0, 255, (2,), dtype=np.uint8),
    "text": Text(8, charset=string.ascii_letters + " "),
    "tuple": Tuple((Discrete(2), Box(-1.0, 1.0, (2,)))),
    "dict": Dict({"move": Discrete(3), "to": MultiDiscrete([3, 5]), "say": Text(5)}),
    "nested": Dict({"a": Tuple((Dict({"b": Discrete(2)}), MultiBinary(2)))}),
}
NAMED = {"discrete": ("left", "down", "right", "Up"), "from-minus-one": ("a", "b", "c")}
WRONG = ["", "fly", "[]", "[1, 2, 3, 4, 5, 6, 7, 8, 9, 1]", "{}", "1e999", "-7", "null", "true", '{"move": 9}', "[[["]


@pytest.mark.parametrize("name", SPACES)
def test_what_is_written_is_read_again(name):
    space, names = SPACES[name], NAMED.get(name, ())
    space.seed(0)
    for _ in range(50):
        value = space.sample()
        for way in (spaces.write(space, value, names), spaces.plain(space, value)):
            again = spaces.read(space, way, names)
            assert space.contains(again) and data_equivalence(again, value)
        assert data_equivalence(spaces.read(space, json.loads(json.dumps(spaces.plain(space, value)))), value)


@pytest.mark.parametrize("name", SPACES)
def test_the_type_of_an_action_takes_every_action(name):
    space, names = SPACES[name], NAMED.get(name, ())
    space.seed(1)
    hint = spaces.hint(space, names)
    assert msgspec.json.schema(hint)
    for _ in range(50):
        value = space.sample()
        data = spaces.write(space, value, names) if names else spaces.plain(space, value)
        assert data_equivalence(spaces.read(space, msgspec.convert(data, hint), names), value)


@pytest.mark.parametrize("name", [name for name in SPACES if name != "text"])
@pytest.mark.parametrize("given", WRONG)
def test_a_wrong_action_says_what_is_legal(name, given):
    space, names = SPACES[name], NAMED.get(name, ())
    with pytest.raises(ValueError, match="is no legal action") as caught:
        spaces.read(space, given, names)
    assert str(caught.value).endswith(f"Write {spaces.legal(space, names)}.")
    assert len(str(caught.value)) < 500


def test_a_text_that_is_no_text_of_the_space():
    with pytest.raises(ValueError, match="a text of 1 to 8 characters"):
        spaces.read(SPACES["text"], "much longer than that")


def test_how_lenient_reading_is():
    lake, names = SPACES["discrete"], NAMED["discrete"]
    for text in ("down", " Down. ", "`down`", "1", "[1]", "I think that I should go\ndown"):
        assert spaces.read(lake, text, names) == 1
    for text in ("go down", "down or up", "1.5", "4", "down\nbecause"):
        with pytest.raises(ValueError, match="legal"):
            spaces.read(lake, text, names)
    assert spaces.read(SPACES["box-one"], "0.5").tolist() == [0.5]
    assert spaces.read(SPACES["box-scalar"], "0.1") == np.float32(0.1)
    assert spaces.read(SPACES["multi-discrete"], "2, 4").tolist() == [2, 4]
    with pytest.raises(ValueError, match="from -1 to 1"):
        spaces.read(SPACES["box"], "[0, 0, 1.5]")
    with pytest.raises(ValueError, match="from 0 to 255"):
        spaces.read(SPACES["box-whole"], "[0, 256]")


def test_the_words_for_what_is_legal():
    words = {name: spaces.legal(space, NAMED.get(name, ())) for name, space in SPACES.items()}
    assert words["discrete"] == "one of: left, down, right, Up"
    assert words["many-choices"] == "a whole number from 0 to 499"
    assert words["multi-discrete"] == "a JSON list of 2 whole numbers, within [0, 2], [0, 4]"
    assert words["multi-binary-2d"] == "a JSON list of 2, each a JSON list of 3 numbers, each 0 or 1"
    assert words["box-one"] == "a JSON list of 1 number, from -2 to 2"
    assert words["box-unlimited"] == "a JSON list of 2 numbers"
    assert words["tuple"] == "a JSON list of (a whole number from 0 to 1); (a JSON list of 2 numbers, from -1 to 1)"
    assert words["dict"].startswith('a JSON object with the keys "move" (a whole number from 0 to 2); ')


def test_observations_as_text():
    assert spaces.show(SPACES["box"], np.array([0.123456, -1.0, np.float32(1 / 3)])) == "[0.1235, -1.0, 0.3333]"
    assert spaces.show(SPACES["tuple"], (1, np.array([np.inf, np.nan]))) == '[1, ["inf", "nan"]]'
    both = {"move": 1, "to": np.array([2, 4]), "say": "hello\nyou"}
    assert spaces.show(SPACES["dict"], both) == "move: 1\nsay: hello\nyou\nto: [2, 4]"


def test_spaces_without_codec():
    assert not any(map(spaces.without_codec, SPACES.values()))
    image = Box(0, 255, (64, 64, 3), dtype=np.uint8)
    assert spaces.without_codec(image) == "Box(64, 64, 3) has 12288 numbers; at most 1000 are shown as text"
    for space in (Graph(Discrete(2), None), Sequence(Discrete(2)), OneOf([Discrete(2)])):
        assert spaces.without_codec(Dict({"a": Tuple((space,))})).startswith(f"{type(space).__name__} is not one of")
