"""Values of gymnasium's spaces as text and as JSON data, and back.

Discrete, MultiDiscrete, MultiBinary, Box, Tuple, Dict and Text have a codec; for any other space, `without_codec` says
which part of the space has none. `names` are names of the values of a Discrete action space, in their order.

    show(space, value)            an observation as text
    write(space, value, names)    an action as text, as `read` reads it
    read(space, text, names)      an action from the text or the JSON data of a model; ValueError says what is legal
    legal(space, names)           which actions are legal, in words
    hint(space, names)            the type of an action, from which a tool's JSON schema is made
"""

from __future__ import annotations

import json
import math
import string
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Text, Tuple

NUMBERS_MAX = 1000  # a Box with more numbers, such as an image, has no codec
CHOICES_MAX = 64  # a Discrete space with more values is described by its limits
CHARACTERS_MAX = 80  # of a wrong action that an error quotes
TEXT_MAX = 1_000_000  # characters of a text of any characters
SAMPLED_MAX = 20  # characters of a random one


class AnyText(Text):
    """Texts of any characters. Samples are short and have ASCII characters only."""

    def __init__(self, max_length: int = TEXT_MAX, *, seed: int | None = None) -> None:
        super().__init__(max_length, min_length=0, charset=string.printable, seed=seed)

    def contains(self, x: Any) -> bool:
        """Whether `x` is a text that is not too long."""
        return isinstance(x, str) and len(x) <= self.max_length

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """A random text; see `gymnasium.spaces.Text`."""
        if mask is not None or probability is not None:
            return super().sample(mask, probability)
        count = int(self.np_random.integers(min(self.max_length, SAMPLED_MAX) + 1))
        return "".join(self.np_random.choice(list(self.character_list), size=count))

    def __repr__(self) -> str:
        return f"AnyText({self.max_length})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnyText) and self.max_length == other.max_length

    __hash__ = None  # type: ignore[assignment]  # as the other spaces


def without_codec(space: Space[Any]) -> str:
    """Which space has no codec, and why; empty if `space` and all its parts have one."""
    match space:
        case Box() if math.prod(space.shape) > NUMBERS_MAX:
            return f"Box{space.shape} has {math.prod(space.shape)} numbers; at most {NUMBERS_MAX} are shown as text"
        case Discrete() | MultiDiscrete() | MultiBinary() | Box() | Text():
            return ""
        case Tuple():
            return next(filter(None, map(without_codec, space.spaces)), "")
        case Dict():
            return next(filter(None, map(without_codec, space.spaces.values())), "")
    return f"{type(space).__name__} is not one of Discrete, MultiDiscrete, MultiBinary, Box, Tuple, Dict, Text"


# --- values to text ---------------------------------------------------------------------------------------------------


def plain(space: Space[Any], value: Any, digits: int = 17) -> Any:
    """A value of the space as JSON data. Numbers have `digits` significant digits."""
    match space:
        case Discrete():
            return int(value)
        case Text():
            return str(value)
        case Tuple():
            return [plain(inner, each, digits) for inner, each in zip(space.spaces, value, strict=True)]
        case Dict():
            return {name: plain(inner, value[name], digits) for name, inner in space.spaces.items()}
    return _rounded(np.asarray(value).tolist(), digits)


def show(space: Space[Any], value: Any, digits: int = 4) -> str:
    """A value of the space as text: a text as it is, a line for each key of a dict, and else JSON."""
    if isinstance(space, Text):
        return str(value)
    if isinstance(space, Dict):
        return "\n".join(f"{name}: {show(inner, value[name], digits)}" for name, inner in space.spaces.items())
    return json.dumps(plain(space, value, digits))


def write(space: Space[Any], value: Any, names: Sequence[str] = ()) -> str:
    """An action as text. `read` returns it again."""
    if isinstance(space, Text):
        return str(value)
    data = plain(space, value)
    return names[data - int(space.start)] if names and isinstance(space, Discrete) else json.dumps(data)


def _rounded(data: Any, digits: int) -> Any:
    if isinstance(data, list):
        return [_rounded(each, digits) for each in data]
    if not isinstance(data, float):
        return int(data)
    if not math.isfinite(data):
        return str(data)
    return float(f"{data:.{digits}g}")


# --- text to values ---------------------------------------------------------------------------------------------------


def read(space: Space[Any], given: Any, names: Sequence[str] = ()) -> Any:
    """The action that a text, or the JSON data of a tool call, means. A text is an action as a whole, or in its last
    line. Raises ValueError, which names what was given and what is legal.
    """
    is_text, candidates = isinstance(space, Text), [given]
    if isinstance(given, str) and not is_text:
        candidates = [given.strip(), *given.strip().splitlines()[-1:]]
    for candidate in candidates:
        try:
            return _value(space, candidate if is_text else _parsed(candidate, names), names)
        except (ValueError, TypeError, OverflowError):
            continue
    shown = given if isinstance(given, str) else json.dumps(given, default=str)
    shown = shown if len(shown) <= CHARACTERS_MAX else f"{shown[:CHARACTERS_MAX]}..."
    raise ValueError(f"{shown!r} is no legal action. Write {legal(space, names)}.")


def _parsed(text: Any, names: Sequence[str]) -> Any:
    """The JSON data in a text; the text itself if it is a name."""
    if not isinstance(text, str):
        return text
    word = text.strip("\"'`*. ").lower()
    if word in (name.lower() for name in names):
        return word
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(f"[{text}]")  # numbers without brackets


def _value(space: Space[Any], data: Any, names: Sequence[str] = ()) -> Any:
    """The value of the space that JSON data mean. Raises ValueError, TypeError or OverflowError."""
    match space:
        case Discrete():
            known = [name.lower() for name in names]
            if isinstance(data, str) and data.lower() in known:
                data = known.index(data.lower()) + int(space.start)
            if isinstance(data, list) and len(data) == 1:
                (data,) = data
            value: Any = np.int64(_whole(data))
        case Text():
            value = data
        case Tuple():
            value = tuple(_value(inner, each) for inner, each in zip(space.spaces, list(data), strict=True))
        case Dict():
            if not isinstance(data, dict) or set(data) != set(space.spaces):
                raise ValueError("other keys")
            value = {name: _value(inner, data[name]) for name, inner in space.spaces.items()}
        case Box() if np.issubdtype(space.dtype, np.floating):
            value = np.vectorize(_real, otypes=[space.dtype])(np.array(data, dtype=object))
            value = value.reshape(space.shape) if value.size == math.prod(space.shape) == 1 else value
        case _:
            whole = np.vectorize(_whole, otypes=[np.int64])(np.array(data, dtype=object))
            value = whole.astype(space.dtype)
            if not np.array_equal(value, whole):
                raise ValueError("too large")
            value = value.reshape(space.shape) if value.size == math.prod(space.shape or ()) == 1 else value
    if not space.contains(value):
        raise ValueError("outside the space")
    return value


def _whole(data: Any) -> int:
    if isinstance(data, str | bool) or int(data) != data:
        raise ValueError("no whole number")
    return int(data)


def _real(data: Any) -> float:
    if isinstance(data, str | bool):
        raise ValueError("no number")
    return float(data)


# --- what is legal ----------------------------------------------------------------------------------------------------


def legal(space: Space[Any], names: Sequence[str] = ()) -> str:
    """The legal actions in words, such as `one of: left, right`."""
    match space:
        case AnyText():
            return "a text"
        case Discrete() if names:
            return f"one of: {', '.join(names)}"
        case Discrete():
            return f"a whole number from {int(space.start)} to {int(space.start + space.n) - 1}"
        case MultiBinary():
            return f"{_listed(space.shape)}, each 0 or 1"
        case MultiDiscrete():
            first, last = space.start.flatten(), (space.start + space.nvec).flatten() - 1
            return f"{_listed(space.shape, 'whole number')}, {_limits(first, last)}"
        case Box():
            kind = "number" if np.issubdtype(space.dtype, np.floating) else "whole number"
            limits = _limits(space.low.flatten(), space.high.flatten())
            return f"{_listed(space.shape, kind)}, {limits}".rstrip(", ")
        case Tuple():
            return "a JSON list of " + "; ".join(f"({legal(inner)})" for inner in space.spaces)
        case Dict():
            keys = "; ".join(f"{json.dumps(name)} ({legal(inner)})" for name, inner in space.spaces.items())
            return f"a JSON object with the keys {keys}"
    assert isinstance(space, Text), f"{space} has no codec"
    few = f", of the characters {space.characters}" if len(space.characters) < CHOICES_MAX else ""
    return f"a text of {space.min_length} to {space.max_length} characters{few}"


def _listed(shape: Sequence[int], kind: str = "number") -> str:
    if not shape:
        return f"a {kind}"
    words = f"a JSON list of {shape[-1]} {kind}{'' if shape[-1] == 1 else 's'}"
    for count in reversed(shape[:-1]):
        words = f"a JSON list of {count}, each {words}"
    return words


def _limits(low: Any, high: Any) -> str:
    """The limits of each number in words; empty if there are none."""
    limits = list(dict.fromkeys(zip(low.tolist(), high.tolist(), strict=True)))
    if len(limits) == 1:
        return "" if limits[0] == (-math.inf, math.inf) else f"from {limits[0][0]:g} to {limits[0][1]:g}"
    return "within " + ", ".join(f"[{first:g}, {last:g}]" for first, last in zip(low, high, strict=True))


def hint(space: Space[Any], names: Sequence[str] = (), label: str = "Action") -> Any:
    """The type of an action as JSON data. Limits that a type cannot hold are in the words of `legal`. Types of dicts
    are named after `label` and the place of the dict, because msgspec tells types apart by their names.
    """
    match space:
        case Discrete() if names:
            return Literal[tuple(names)]
        case Discrete() if space.n <= CHOICES_MAX:
            return Literal[tuple(range(int(space.start), int(space.start + space.n)))]
        case Discrete():
            return Annotated[int, msgspec.Meta(ge=int(space.start), le=int(space.start + space.n) - 1)]
        case AnyText():
            return str
        case Text():
            return Annotated[str, msgspec.Meta(min_length=space.min_length, max_length=space.max_length)]
        case Tuple():
            return tuple[tuple(hint(inner, (), f"{label}_{place}") for place, inner in enumerate(space.spaces))]  # type: ignore[misc]
        case Dict():
            return TypedDict(label, {name: hint(each, (), f"{label}_{name}") for name, each in space.spaces.items()})
        case MultiBinary():
            found: Any = Literal[0, 1]
        case MultiDiscrete():
            found = _number(int, space.start, space.start + space.nvec - 1)
        case _:
            is_float = np.issubdtype(space.dtype, np.floating)
            found = _number(float if is_float else int, space.low, space.high)
    for count in reversed(space.shape or ()):
        found = Annotated[list[found], msgspec.Meta(min_length=count, max_length=count)]
    return found


def _number(kind: type, low: Any, high: Any) -> Any:
    """The type of a number, with the limits that all numbers of the space have in common."""
    both = (("ge", low.min().item()), ("le", high.max().item()))
    limits = {name: kind(float(f"{each:.6g}")) for name, each in both if math.isfinite(each)}  # 0.1, not 0.100000001
    return Annotated[kind, msgspec.Meta(**limits)] if limits else kind
