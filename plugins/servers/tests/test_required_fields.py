"""Every field and method of InferenceBackend is required of every engine, a stranger's too."""

from __future__ import annotations

from pathlib import Path

import pytest
from rollouts_servers.checks import ServerSetup
from rollouts_servers.openai import OpenAIInference, OpenAIOptions
from rollouts_servers.server import Server
from rollouts_servers.server_pool import ServerPool
from rollouts_servers.vllm import VLLM

from rollouts.errors import ConfigError
from rollouts.inference.base import METHOD_OF, Capabilities, InferenceBackend, check_engine, members_of


async def nothing(self, *_):
    return None


REQUIRED = {
    "capabilities": Capabilities(),
    "context_tokens_max": 100,
    "vocabulary_size": 0,
    "version": 0,
    "__aenter__": nothing,
    "__aexit__": nothing,
    "open_session": lambda self, order: "session",
    "close_session": lambda self, session: None,
    "generate": nothing,
    "score": nothing,
    "update_weights": nothing,
    "health": nothing,
}


def engine_of(**changed):
    members = {name: value for name, value in (REQUIRED | changed).items() if value is not ...}
    return type("Strange", (), members)()


def test_what_is_required_is_enough():
    engine = engine_of()
    assert check_engine(engine, "strange") is engine and members_of(engine) == (engine,)


@pytest.mark.parametrize("name", REQUIRED)
def test_each_one_is_required_and_named(name):
    with pytest.raises(ConfigError, match=rf"--inference strange: Strange has no {name}; .* docs/inference\.md"):
        check_engine(engine_of(**{name: ...}), "strange")


@pytest.mark.parametrize(("flag", "method"), METHOD_OF.items())
def test_what_it_says_that_it_can_it_has(flag, method):
    able = Capabilities(**{flag: True})
    with pytest.raises(ConfigError, match=rf"has no {method} \(its capabilities have {flag}=True\)"):
        check_engine(engine_of(capabilities=able), "strange")
    assert check_engine(engine_of(**{"capabilities": able, method: nothing}), "strange").capabilities is able


@pytest.mark.parametrize(("flag", "method"), METHOD_OF.items())
def test_what_it_can_it_says(flag, method):
    with pytest.raises(ConfigError, match=rf"has the method {method}, .* Capabilities\({flag}=True\)"):
        check_engine(engine_of(**{method: nothing}), "strange")


def test_capabilities_are_not_a_dict():
    with pytest.raises(ConfigError, match=r"Strange\.capabilities is dict, expected a .*Capabilities"):
        check_engine(engine_of(capabilities={"trainable": True}), "strange")


def test_the_engines_of_the_core_have_everything():
    url = "http://127.0.0.1:1"
    server = Server(VLLM(), url, ServerSetup(vocabulary_size=9))
    for engine in (OpenAIInference("m", OpenAIOptions(url=url)), server, ServerPool([server])):
        assert check_engine(engine, "own") is engine


def test_the_page_for_authors_lists_every_field():
    page = (Path(__file__).parents[3] / "docs" / "inference.md").read_text()
    fields = [*InferenceBackend.__annotations__, *Capabilities._fields]
    assert [name for name in fields if f"| `{name}` |" not in page] == []
