"""OpenAI's chat completions on an engine: conversations in, replies out, and every mistake an error in their form."""

from __future__ import annotations

import json

import pytest
import trio
from agent_fakes import END, FakeChat, FakeEngine

from rollouts.agent.single_turns import ServedModel
from rollouts.errors import InferenceError
from rollouts.gateway.http_server import HTTPRequest
from rollouts.runs.serve import handler

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "double", "parameters": {"type": "object"}}}


class Chat(FakeChat):
    def decode(self, tokens):
        return "".join("<end>" if token == END else chr(token) for token in tokens)


class Engine(FakeEngine):
    """Opens sessions too; `waits` blocks every reply."""

    opened = 0

    def open_session(self, order):
        self.opened += 1
        return f"s{self.opened}"


def ask(engine, body, *, path="/v1/chat/completions", method="POST", **model):
    handle = handler(ServedModel("mine", engine, Chat(), **model))
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = trio.run(handle, HTTPRequest(method, path, data))
    return response.status, response.body if response.content_type != "application/json" else json.loads(response.body)


def test_tokens_are_counted_without_sampling():
    engine = Engine("hello")
    asked = {"model": "mine", "messages": [USER], "system": "Be brief."}
    status, counted = ask(engine, asked, path="/v1/messages/count_tokens")
    assert status == 200 and not engine.turns and not engine.opened
    _, answer = ask(engine, {**asked, "max_tokens": 9}, path="/v1/messages")
    assert counted == {"input_tokens": answer["usage"]["input_tokens"]}
    status, answer = ask(engine, asked, path="/v1/messages")
    assert status == 400 and "missing required field `max_tokens`" in answer["error"]["message"]


def test_a_conversation_is_answered():
    engine = Engine("hello")
    asked = {
        "model": "mine",
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "double "}, {"type": "text", "text": "4"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "double", "arguments": '{"n": 4}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "8"},
        ],
        "tools": [TOOL],
        "temperature": 0.5,
        "seed": 7,
        "max_completion_tokens": 20,
        "user": "ada",
    }
    status, answer = ask(engine, asked)
    assert status == 200
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "hello"},
        "finish_reason": "stop",
        "logprobs": None,
    }
    ((request, generation),) = engine.turns
    assert (request.temperature, request.seed, request.max_tokens, request.stop_ids) == (0.5, 7, 20, (END,))
    text = "".join(chr(t) if t < 2**20 - 100 else "|" for t in request.tokens[1:] if t < 1_000_000)
    assert text == 'Be brief.double 4[double {"n": 4}]8'
    assert answer["usage"] == {
        "prompt_tokens": len(request.tokens),
        "completion_tokens": len(generation.tokens),
        "total_tokens": len(request.tokens) + len(generation.tokens),
    }
    assert answer["object"] == "chat.completion" and answer["model"] == "mine"
    assert engine.closed == ["s1"]


def test_calls_of_tools():
    status, answer = ask(Engine('[double {"n": 4}]'), {"messages": [USER], "tools": [TOOL]})
    choice = answer["choices"][0]
    assert (status, choice["finish_reason"], choice["message"]["content"]) == (200, "tool_calls", None)
    (call,) = choice["message"]["tool_calls"]
    assert call == {"id": "call_0", "type": "function", "function": {"name": "double", "arguments": '{"n":4}'}}
    status, answer = ask(Engine("[double n=4]"), {"messages": [USER], "tools": [TOOL]})
    assert answer["choices"][0]["finish_reason"] == "stop"  # it cannot be read as a call


def test_no_tools_are_shown_where_none_may_be_called():
    engine = Engine("x", "x")
    ask(engine, {"messages": [USER], "tools": [TOOL], "tool_choice": "none"})
    ask(engine, {"messages": [USER], "tools": [TOOL]})
    assert [request.tokens[0] for request, _ in engine.turns] == [0, 1]  # as many as the chat format was given


def test_limits_and_stop_texts():
    engine = Engine("abcdef", "abcdef", "abcdef")
    _, answer = ask(engine, {"messages": [USER]}, max_tokens=3)
    assert (answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]) == ("abc", "length")
    _, answer = ask(engine, {"messages": [USER], "stop": ["e", "cd"]})
    assert (answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]) == ("ab", "stop")
    ask(Engine("x", context=20), {"messages": [USER], "max_tokens": 1000})  # as many as have room


def test_several_choices_and_logprobs():
    engine = Engine("one", "two")
    _, answer = ask(engine, {"messages": [USER], "n": 2, "logprobs": True, "seed": 3})
    assert sorted(choice["message"]["content"] for choice in answer["choices"]) == ["one", "two"]
    assert sorted(request.seed for request, _ in engine.turns) == [3, 4]
    assert sorted(engine.closed) == ["s1", "s2"]
    content = answer["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in content][-1] == "<end>"
    assert all(each["logprob"] <= 0 for each in content)
    unseeded = [ask(engine, {"messages": [USER]}) for _ in range(2)]
    assert len(unseeded) == 2 and engine.turns[-1][0].seed != engine.turns[-2][0].seed


def test_a_stream_is_the_whole_reply_as_events():
    body = {"messages": [USER], "tools": [TOOL], "stream": True, "stream_options": {"include_usage": True}}
    status, data = ask(Engine('[double {"n": 4}]'), body)
    *events, done, end = data.decode().split("\n\n")
    assert (status, done, end) == (200, "data: [DONE]", "")
    first, last, usage = [json.loads(event.removeprefix("data: ")) for event in events]
    assert first["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
    assert first["object"] == "chat.completion.chunk"
    assert last["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls"}
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] > 0


def test_models_and_health():
    status, answer = ask(Engine(), b"", path="/v1/models", method="GET")
    assert (status, [model["id"] for model in answer["data"]]) == (200, ["mine"])
    assert ask(Engine(), b"", path="/health", method="GET") == (200, {"status": "ok"})


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "cannot be read"),
        (b"\xff", 400, "cannot be read"),
        (b"[" * 100_000, 400, "cannot be read"),
        ({}, 400, "missing required field `messages`"),
        ({"messages": []}, 400, "messages is empty"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "wizard"),
        ({"messages": [USER], "temprature": 1}, 400, "unknown field `temprature`"),
        ({"messages": [USER], "model": "yours"}, 404, "there is 'mine'"),
        ({"messages": [USER], "temperature": -1}, 400, "temperature is -1"),
        ({"messages": [USER], "max_tokens": 0}, 400, "max_tokens is 0"),
        ({"messages": [USER], "n": 65}, 400, "n is 65"),
        ({"messages": [USER], "top_p": 0.9}, 400, "top_p is not supported here"),
        ({"messages": [USER], "response_format": {"type": "json_object"}}, 400, "response_format is not supported"),
        ({"messages": [USER], "tool_choice": "required"}, 400, "tool_choice is not supported"),
        ({"messages": [USER], "tools": [{"name": "x"}]}, 400, "a tool is"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "reads text only"),
        ({"messages": [{"role": "user", "content": "forbidden"}]}, 400, "the chat template of this model refuses it"),
        ({"messages": [{"role": "user", "content": "x" * 400}]}, 400, "context length is 300"),
        ({"messages": [{"role": "user", "content": "x" * 296}]}, 400, "the conversation has 300 tokens"),
    ],
)
def test_mistakes_are_errors_in_openais_form(body, status, words):
    engine = Engine(context=300)
    found, answer = ask(engine, body)
    assert found == status
    assert words in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"
    assert engine.opened == 0


def test_other_paths_and_methods():
    assert ask(Engine(), b"", path="/v1/completions")[0] == 404
    assert ask(Engine(), b"", method="GET")[0] == 405


def test_an_engine_that_fails_or_hangs(capsys):
    engine = Engine(InferenceError("it burns"))
    status, answer = ask(engine, {"messages": [USER], "n": 2})
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "it burns" in answer["error"]["message"]
    assert sorted(engine.closed) == ["s1", "s2"]
    engine = Engine()
    engine.blocks = True
    assert ask(engine, {"messages": [USER]}, request_seconds=0.05)[0] == 504
    assert engine.closed == ["s1"]
    assert ask(Engine(KeyError("a bug")), {"messages": [USER]})[0] == 500
    assert "a bug" in capsys.readouterr().err
