from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.errors import BrokenPluginError, UserError
from rollouts.loggers import MetricsLogger, import_library, plain_settings


class Component(NamedTuple):
    name: str
    settings: dict[str, object]


CALCULATOR = Component("calculator", {"digits": 2})


def test_settings_become_plain_whatever_holds_them():
    import dataclasses

    @dataclasses.dataclass
    class Settings:
        reward: tuple[str, ...] = ("env:1",)
        out: Path = Path("runs/x")
        env: Component = CALCULATOR

    plain = plain_settings(Settings())
    assert plain == {"reward": ["env:1"], "out": "runs/x", "env": {"name": "calculator", "settings": {"digits": 2}}}
    json.dumps(plain)


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)
    )
)
def test_plain_settings_stay_as_they_are(value):
    assert plain_settings({"value": value}) == {"value": value}


def test_a_missing_library_says_what_to_type():
    with pytest.raises(UserError, match=r"'acme'.*'no_such_library'.*`pip install rollouts-acme`") as caught:
        import_library("no_such_library", logger="acme", install="rollouts-acme")
    assert not isinstance(caught.value, BrokenPluginError)


@pytest.mark.parametrize("body", ["import no_such_dependency", "raise RuntimeError('old glibc')"])
def test_a_broken_library_is_not_called_missing(tmp_path, monkeypatch, body):
    (tmp_path / "broken_tracker.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BrokenPluginError, match=r"installed but does not import.*(no_such_dependency|old glibc)"):
        import_library("broken_tracker", logger="acme", install="rollouts-acme")
    assert "broken_tracker" not in sys.modules


def test_the_protocol_tells_loggers_from_others():
    class Half:
        def log(self, metrics, step): ...

    assert not isinstance(Half(), MetricsLogger)
    assert not isinstance(msgspec.Struct, MetricsLogger)
