"""Odd requests: each gets an answer, 200 or an error of the client that names the field, and no episode fails."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import trio
from agent_fakes import FakeEngine, Quiz, play
from gateway.clients import TOOL

from rollouts.bounds import DEPTH_MAX, MESSAGES_MAX, STOPS_MAX, TOOLS_MAX
from rollouts.chat.format import ChatFormat, load_chat_format
from rollouts.gateway.chat_completions import CHAT_COMPLETIONS
from rollouts.gateway.exchange import APIError
from rollouts.inference.base import Generation, VersionSpan
from rollouts.models.loading import load_tokenizer
from rollouts.types import Status

CALL = {"id": "c1", "type": "function", "function": {"name": "double", "arguments": '{"n": 1}'}}
PARTS = [{"type": "text", "text": "a"}]
CHAT = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": PARTS, "name": "u"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r"},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ],
    "tools": [TOOL],
    "model": "m",
    "tool_choice": "auto",
    "temperature": 1.0,
    "max_tokens": 5,
    "n": 1,
    "seed": 3,
    "stop": ["x"],
    "stream": False,
    "stream_options": {"include_usage": True},
    "logprobs": False,
    "top_logprobs": 0,
    "response_format": {"type": "text"},
    "logit_bias": {},
    "modalities": ["text"],
    "metadata": {"a": 1},
}
MESSAGES = {
    "max_tokens": 5,
    "system": PARTS,
    "messages": [
        {"role": "user", "content": PARTS},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "r"},
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "c1", "name": "double", "input": {"n": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": PARTS}]},
    ],
    "tools": [{"name": "double", "description": "d", "input_schema": {"type": "object"}, "type": "custom"}],
    "tool_choice": {"type": "auto"},
    "stop_sequences": ["x"],
    "output_config": {"effort": "low"},
    "mcp_servers": [],
    "metadata": {"a": 1},
}
RESPONSES = {
    "instructions": "s",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c1", "name": "double", "arguments": '{"n": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
    ],
    "tools": [{"type": "function", "name": "double", "description": "d", "parameters": {"type": "object"}}],
    "tool_choice": "auto",
    "max_output_tokens": 5,
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "metadata": {"a": 1},
    "store": True,
}
BODIES = {"/v1/chat/completions": CHAT, "/v1/messages": MESSAGES, "/v1/responses": RESPONSES}
HOLE = "@@odd@@"


DEEP = '{"a":' * 500 + "1" + "}" * 500
ODD = [
    *("null", "true", "0", "-1", "1.5", "1e999", "NaN", "9" * 30, "9" * 5000, '""', '"x"', '"\\ud800"', '"\\u0000"'),
    *("[]", "[[]]", "[null]", "{}", '{"x": null}', '[{"type": "text", "text": 5}]', '{"type": "text", "text": "a"}'),
    *("[" * (DEPTH_MAX + 1) + "]" * (DEPTH_MAX + 1), "[" * 5000 + "]" * 5000, DEEP, json.dumps(DEEP)),
]


def paths_of(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*before, key)
        if isinstance(inner, dict | list):
            yield from paths_of(inner, (*before, key))


def with_hole(body: dict[str, Any], path: tuple[Any, ...]) -> str:
    changed = json.loads(json.dumps(body))
    inner: Any = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = HOLE
    return json.dumps(changed)


class Tiny(FakeEngine):
    """Says yes in the ids of the tiny model."""

    def __init__(self, chat: ChatFormat, context: int = 2048) -> None:
        super().__init__(context=context)
        self.ids = [*chat.encode("yes"), chat.stop_ids[0]]

    async def generate(self, request: Any) -> Generation:
        await trio.lowlevel.checkpoint()
        ids = self.ids[: request.max_tokens]
        finish = "stop" if ids == self.ids else "length"
        return Generation(ids, [-1.0] * len(ids), finish, [VersionSpan(0, 0, len(ids))])


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return load_chat_format(load_tokenizer("tiny"))


def ask(chat: ChatFormat, requests: Any) -> list[Any]:
    """What `requests(post)` returns, in an episode that must not fail."""
    found: list[Any] = []

    class Own(Quiz):
        async def rollout(self, task: Any, model: Any) -> None:
            async with model.serve() as endpoint, httpx.AsyncClient(trust_env=False, timeout=60) as http:

                async def post(path: str, body: Any, **headers: Any) -> httpx.Response:
                    content = json.dumps(body) if isinstance(body, dict) else body
                    known = {"authorization": f"Bearer {endpoint.key}"}
                    given = {name.replace("_", "-"): value for name, value in headers.items()}
                    return await http.post(endpoint.url + path, content=content, headers=known | given)

                found.append(await requests(post))
                assert (await post("/v1/chat/completions", CHAT)).status_code == 200

    episode = play(Own, Tiny(chat), chat, max_turns=100_000, max_tokens=10_000_000)
    assert episode.status is Status.COMPLETED, episode.trajectories[0].error
    return found[0]


def fault_of(response: httpx.Response, field: str) -> str:
    """What is wrong with the answer to a request with an odd value in this field."""
    is_named = field in response.text or "context_length_exceeded" in response.text
    is_answer = response.status_code == 200 or (400 <= response.status_code < 500 and is_named)
    return "" if is_answer and len(response.content) < 100_000 else f"{response.status_code} {response.text[:300]}"


@pytest.mark.parametrize("stride", [25, pytest.param(1, marks=pytest.mark.nightly)], ids=["some", "all"])
@pytest.mark.parametrize("path", BODIES)
def test_every_odd_value_at_every_place_of_a_request_gets_an_answer(chat: ChatFormat, path: str, stride: int) -> None:
    async def requests(post: Any) -> tuple[int, list[Any]]:
        count, faults = 0, []
        assert (await post(path, BODIES[path])).status_code == 200
        for number, place in enumerate(paths_of(BODIES[path])):
            whole = with_hole(BODIES[path], place)
            for odd in ODD[number % stride :: stride]:
                body = whole.replace(json.dumps(HOLE), odd)
                if fault := fault_of(await post(path, body), str(place[0])):
                    faults.append((place, odd[:60], fault))
                count += 1
        return count, faults

    count, faults = ask(chat, requests)
    assert count > 1000 / stride and faults == []


def test_odd_bodies_and_headers_get_an_answer(chat: ChatFormat) -> None:
    async def requests(post: Any) -> None:
        for path in BODIES:
            for body in (*ODD, "", "{", "\xff", b"\xff\xfe", '{"messages"', "[" * 100_000, '{"a":' * 5000):
                assert (await post(path, body)).status_code in (400, 200), body[:50]
        for count in ("\xb2", "-1", "", "9" * 5000, "1e3", "x"):
            response = await post("/v1/chat/completions", CHAT, x_stainless_retry_count=count.encode("latin-1"))
            assert response.status_code == 400 and "x-stainless-retry-count" in response.text
        for name in ("content-type", "accept", "user-agent", "cookie", "x-forwarded-for", "content-encoding"):
            assert (await post("/v1/messages", MESSAGES, **{name: b"\xff"})).status_code == 200
        for name in ("authorization", "x-api-key"):
            assert (await post("/v1/messages", MESSAGES, **{name: b"\xff"})).status_code == 401

    ask(chat, requests)


TOO_MUCH = {
    "8 MB of newlines": ({"messages": [{"role": "user", "content": "\n" * 8_000_000}]}, "messages"),
    "8 MB of words": ({"messages": [{"role": "user", "content": "word " * 1_600_000}]}, "messages"),
    "thinking": (
        {"messages": [{"role": "assistant", "reasoning_content": "a" * 8_000_000}, *CHAT["messages"]]},
        "messages",
    ),
    "empty messages": ({"messages": [{"role": "user", "content": ""}] * 50_000}, "messages"),
    "fewer empty messages": ({"messages": [{"role": "user", "content": ""}] * MESSAGES_MAX}, "messages"),
    "calls": ({"messages": [{"role": "assistant", "tool_calls": [CALL] * (MESSAGES_MAX + 1)}]}, "messages"),
    "a long description": (
        CHAT | {"tools": [{"type": "function", "function": {"name": "f", "description": "d" * 10_000_000}}]},
        "messages",
    ),
    "tools": (CHAT | {"tools": [TOOL] * 5_000}, "tools"),
    "some tools": (CHAT | {"tools": [TOOL] * TOOLS_MAX}, "messages"),
    "stop texts": (CHAT | {"stop": ["x"] * (STOPS_MAX + 1)}, "stop"),
}


@pytest.mark.parametrize("what", TOO_MUCH)
def test_what_is_too_much_is_refused_before_it_is_rendered(chat: ChatFormat, what: str, monkeypatch: Any) -> None:
    body, field = TOO_MUCH[what]
    rendered: list[int] = []
    original = chat.tokenizer.apply_chat_template

    def render(messages: Any, **more: Any) -> Any:
        rendered.append(len(messages) + len(more.get("tools") or ()))
        return original(messages, **more)

    monkeypatch.setattr(chat.tokenizer, "apply_chat_template", render)

    async def requests(post: Any) -> httpx.Response:
        return await post("/v1/chat/completions", body)

    response = ask(chat, requests)
    assert response.status_code == 400 and response.json()["error"]["param"] == field
    assert sum(rendered) < 50, "only the valid request at the end was rendered"


def test_the_key_is_checked_before_the_body_is_sent(chat: ChatFormat) -> None:
    found = []

    class Own(Quiz):
        async def rollout(self, task: Any, model: Any) -> None:
            async with model.serve() as endpoint:
                async with await trio.open_tcp_stream("127.0.0.1", endpoint.port) as stream:
                    await stream.send_all(b"POST /v1/messages HTTP/1.1\r\nHost: h\r\nContent-Length: 9999\r\n\r\n")
                    found.append(await stream.receive_some())

    play(Own, Tiny(chat), chat)
    assert found[0].startswith(b"HTTP/1.1 401")


def test_bodies_of_refused_requests_are_not_kept(chat: ChatFormat) -> None:
    async def requests(post: Any) -> int:
        tracemalloc.start()
        try:
            for number in range(20):
                odd = {"messages": [], "user": f"{number}" + "x" * 2_000_000}
                assert (await post("/v1/chat/completions", odd)).status_code == 400
            gc.collect()
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    assert ask(chat, requests) < 10_000_000


@pytest.mark.parametrize("said", [b'\\"', b"\\\\", b'", "', b"x"])
def test_a_body_that_ends_in_a_string_is_read_once(said: bytes) -> None:
    """A megabyte, of which a search that begins anew at every quotation mark would take hours."""
    with pytest.raises(APIError) as caught:
        CHAT_COMPLETIONS.read(b'{"messages": [{"role": "user", "content": "' + said * (1_000_000 // len(said)))
    assert caught.value.parameter == "messages"
