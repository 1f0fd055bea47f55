from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.env.schema import tool_schema, validate_arguments
from rollouts.errors import EnvironmentDefinitionError

if TYPE_CHECKING:
    from decimal import Decimal


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.0
    title: str = ""
    parent: Point | None = None


class Env:
    def paint(
        self,
        where: Point,
        color: Color,
        mode: Literal["fill", "line"] = "fill",
        tags: list[str] | None = None,
        widths: dict[str, int] = {"a": 1},  # noqa: B006
        size: int | str = 3,
        anything: Any = None,
    ) -> str:
        """Paint a point.

        It goes on
        for two lines.

        Args:
            where (Point): the place,
                said in two lines
            color: which: red or blue
            unknown: not a parameter

        Returns:
            nothing: really
        """
        return f"{where} {color} {mode} {tags} {widths} {size} {anything}"

    def bare(self) -> None: ...


def properties(fn: Any) -> dict[str, Any]:
    return tool_schema(fn)["function"]["parameters"]["properties"]


def test_a_schema_from_hints_and_docstring() -> None:
    schema = tool_schema(Env().paint)
    assert schema["type"] == "function"
    function = schema["function"]
    assert (function["name"], function["description"]) == ("paint", "Paint a point.\n\nIt goes on for two lines.")
    assert function["parameters"]["required"] == ["where", "color"]
    assert function["parameters"]["properties"] == {
        "where": {
            "type": "object",
            "properties": {
                "x": {"type": "integer"},
                "y": {"type": "number", "default": 0.0},
                "title": {"type": "string", "default": ""},
                "parent": {"type": "object", "nullable": True, "default": None},
            },
            "required": ["x"],
            "description": "the place, said in two lines",
        },
        "color": {"type": "string", "enum": ["blue", "red"], "description": "which: red or blue"},
        "mode": {"type": "string", "enum": ["fill", "line"], "default": "fill"},
        "tags": {"type": "array", "items": {"type": "string"}, "nullable": True},
        "widths": {"type": "object", "additionalProperties": {"type": "integer"}, "default": {"a": 1}},
        "size": {"anyOf": [{"type": "integer"}, {"type": "string"}], "default": 3},
        "anything": {},
    }


def test_class_and_object_give_one_schema_and_never_the_same_dict() -> None:
    assert tool_schema(Env.paint) == tool_schema(Env().paint)
    first = properties(Env().paint)
    first["mode"]["enum"].append("changed")
    assert properties(Env().paint)["mode"]["enum"] == ["fill", "line"]


def test_a_tool_of_nothing() -> None:
    schema = tool_schema(Env().bare, "other")["function"]
    assert schema == {
        "name": "other",
        "description": "",
        "parameters": {"type": "object", "properties": {}, "required": []},
    }
    assert validate_arguments(Env().bare, {}) == {}
    assert validate_arguments(Env().bare, {"x": 1}) == "bare has no argument 'x'. Its arguments are: none"


def untyped(x):
    return x


def star(*words: str) -> None: ...


def stars(**words: str) -> None: ...


def positional(x: int, /) -> None: ...


def unread(x: int, y: Decimal) -> None: ...


def strange(x: Color | Point | complex) -> None: ...


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (untyped, "tool 'untyped', parameter 'x' has no type hint"),
        (star, "parameter 'words' is variadic positional, and a model passes arguments by name"),
        (stars, "parameter 'words' is variadic keyword"),
        (positional, "parameter 'x' is positional-only"),
        (unread, "parameter 'y': its type hint 'Decimal' cannot be read"),
        (strange, "parameter 'x': the type .* cannot be described to a model"),
    ],
)
def test_what_cannot_be_described_is_refused_by_name(fn: Any, words: str) -> None:
    with pytest.raises(EnvironmentDefinitionError, match=words):
        tool_schema(fn)


def test_a_default_of_the_hint_does_not_stand_for_one_that_json_cannot_write() -> None:
    hint = Annotated[int, msgspec.Meta(extra_json_schema={"default": 7})]

    def search(limit: Any = ..., most: Any = 9) -> None: ...

    search.__annotations__ = {"limit": hint, "most": hint}
    described = tool_schema(search)["function"]["parameters"]["properties"]
    assert described == {"limit": {"type": "integer"}, "most": {"type": "integer", "default": 9}}


def test_arguments_are_converted() -> None:
    env = Env()
    given_arguments = {"where": {"x": "3", "y": 2}, "color": "red", "tags": ["a"], "size": "big"}
    converted = validate_arguments(env.paint, given_arguments)
    assert converted == {"where": Point(3, 2.0), "color": Color.RED, "tags": ["a"], "size": "big"}
    assert env.paint(**converted).startswith("Point(x=3")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "paint needs the arguments 'where' (object), 'color' (one of blue, red)"),
        ({"where": {"x": 1}}, "paint needs the argument 'color' (one of blue, red)"),
        (
            {"where": {"x": 1}, "color": "green"},
            "argument 'color' of paint must be one of blue, red: Invalid enum value",
        ),
        (
            {"where": {"x": "a"}, "color": "red"},
            "argument 'where' of paint must be object: Expected `int`, got `str` - at",
        ),
        ({"where": {"x": 1}, "color": "red", "tags": 3}, "must be array of string or null: Expected `array | null`"),
        ({"where": {"x": 1}, "colors": "red"}, "paint has no argument 'colors'; did you mean 'color'?"),
    ],
)
def test_wrong_arguments_are_named_with_their_type(arguments: dict[str, Any], words: str) -> None:
    message = validate_arguments(Env().paint, arguments)
    assert isinstance(message, str) and words in message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["where", "color", "mode", "tags", "widths", "size", "x"]), JSON))
def test_no_arguments_raise(arguments: dict[str, Any]) -> None:
    assert isinstance(validate_arguments(Env().paint, arguments), dict | str)


@pytest.mark.parametrize(
    ("hint", "text", "expected"),
    [
        (list[int], "[1, 2]", [1, 2]),
        (list[float], " [0.5]", [0.5]),
        (dict[str, int], '{"a": 1}', {"a": 1}),
        (list[int] | None, "[1]", [1]),
        (str, "[1]", "[1]"),
        (list[str], '["a"]', ["a"]),
    ],
)
def test_a_list_or_an_object_may_be_written_as_text(hint, text, expected):
    def act(value): ...

    act.__annotations__ = {"value": hint}
    assert validate_arguments(act, {"value": text}) == {"value": expected}


@pytest.mark.parametrize("text", ["[1, 'a']", "[", "[1", '{"a": 1}', "1, 2", "x"])
def test_a_text_that_is_no_list_is_refused(text):
    def act(value: list[int]): ...

    assert "argument 'value' of act must be array of integer" in validate_arguments(act, {"value": text})
