"""A chat-completions API as an engine: episodes are played in messages, against a server in another process."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from rollouts_servers import openai
from rollouts_servers.http import Retries
from rollouts_servers.openai import OPENAI_URL, OpenAIInference, OpenAIOptions, create_openai_inference

from rollouts import Message, Task, reward, tool
from rollouts.agent.episode import run_episode
from rollouts.agent.model import EpisodeLimits
from rollouts.env.mixing import env_term
from rollouts.errors import ConfigError, InferenceError
from rollouts.inference.chatting import ChatRequest, is_evaluation_only
from rollouts.plugins.checks import run_check
from rollouts.runs.folder import episode_records
from rollouts.types import Episode, Score, Status

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "servers"))
from mock_engine import started

ATTEMPTS = 3
FAST = {"delay_seconds": 0.0}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "RETRIES", Retries(first_seconds=0.01, longest_seconds=0.02))


class Sums:
    def tasks(self, split: str, rng: Any) -> list[Task]:
        return [Task("what is 12 + 34?", answer=46)]

    @tool
    def add(self, a: int, b: int) -> str:
        """Add."""
        return str(a + b)

    @reward
    def correct(self, task: Task, trajectory: Any) -> float:
        return float(str(task.answer) in trajectory.last_text)


def play(url: str, env: Any = Sums, seed: int = 0, own: dict[str, Any] | None = None, **limits: Any) -> Episode:
    """One episode of `env` with the model behind this URL."""

    async def run() -> Episode:
        async with OpenAIInference("m1", OpenAIOptions(url=f"{url}/v1", attempts=ATTEMPTS, **own or {})) as engine:
            return await run_episode(
                Task("what is 12 + 34?", answer=46),
                make_env=env,
                chat=None,
                inference=engine,
                limits=EpisodeLimits(**limits),
                rewards=[env_term(1.0, "env")],
                session=engine.open_session((0, 0)),
                order=(0, 0),
                seed=seed,
            )

    return trio.run(run)


def reply(**message: Any) -> str:
    return completion({"role": "assistant", **message})


def completion(message: dict[str, Any], finish: str = "stop", **more: Any) -> str:
    return json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": finish}], **more})


def called(arguments: str, **more: Any) -> str:
    function = {"name": "add", "arguments": arguments}
    return reply(content=None, tool_calls=[{"type": "function", "function": function, **more}])


# --- an episode -------------------------------------------------------------------------------------------------------


def test_an_episode_is_played_in_messages():
    with started(**FAST) as server:
        episode = play(server.url, max_tokens=200, temperature=0.7)
        asked = server.chats()
    assert episode.status is Status.COMPLETED and episode.score.value == 1.0
    trajectory = episode.trajectory
    roles = [message.role for message in trajectory.messages]
    assert roles == ["user", *["assistant", "tool"] * 3, "assistant"] and trajectory.last_text == "The sum is 46."
    assert trajectory.tools[0]["function"]["name"] == "add"
    counts = {"turns": 4.0, "tool_calls": 3.0, "tool_failures": 0.0, "prompt_tokens": 400.0, "completion_tokens": 54.0}
    assert trajectory.metrics == counts
    # No token id is made up; the record of it is written and read as any other.
    assert trajectory.segments == [] and trajectory.sampled_count == 0
    (record,) = episode_records(Episode((0, 0), trajectory.task, [trajectory], Score(1.0), {}))
    assert msgspec.json.decode(msgspec.json.encode(record))["segments"] == []
    assert [each["max_tokens"] for each in asked] == [200, 184, 168, 152]  # what the server says it sampled is spent
    assert {each["temperature"] for each in asked} == {0.7} and {each["model"] for each in asked} == {"m1"}
    assert len({each["seed"] for each in asked}) == 4 and all(0 <= each["seed"] < 2**31 for each in asked)
    last = asked[-1]["messages"]
    assert last[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a":12,"b":34}'}
    assert last[2] == {"role": "tool", "content": "46", "tool_call_id": last[1]["tool_calls"][0]["id"]}


def test_one_seed_asks_the_same():
    with started(**FAST) as server:
        for seed in (0, 0, 1):
            play(server.url, seed=seed)
        asked = [each["seed"] for each in server.chats()]
    assert asked[:4] == asked[4:8] != asked[8:]


def test_what_the_user_adds_and_leaves_out():
    own = {"stop": ("\n\n",), "body": {"top_p": 0.5, "temperature": 0.3}, "leave_out": ("seed",)}
    with started(calls=0, **FAST) as server:
        play(server.url, own=own)
        (asked,) = server.chats()
    assert (asked["stop"], asked["top_p"], asked["temperature"]) == (["\n\n"], 0.5, 0.3) and "seed" not in asked


def test_turns_and_tokens_end_it():
    with started(**FAST) as server:
        episode = play(server.url, max_turns=2)
        assert (episode.status, episode.trajectory.turns) == (Status.COMPLETED, 2)
        episode = play(server.url, max_tokens=32)
        assert (episode.status, episode.trajectory.turns) == (Status.TRUNCATED, 2)
        assert "32 tokens are used" in (episode.trajectory.error or "")


def test_a_reply_that_is_cut_off():
    with started(chat_body=completion({"content": "It is 4"}, "length"), **FAST) as server:
        episode = play(server.url)
    assert episode.status is Status.TRUNCATED and episode.trajectory.last_text == "It is 4"
    assert episode.score.value == 0.0  # as everywhere: judged as far as it came
    assert not {"prompt_tokens", "completion_tokens"} & set(episode.trajectory.metrics)  # the server reported none


@pytest.mark.parametrize("field", ["reasoning", pytest.param("reasoning_content", marks=pytest.mark.nightly)])
def test_reasoning_is_kept_apart(field):
    with started(chat_body=reply(content="46", **{field: "twelve, then"}), **FAST) as server:
        episode = play(server.url)
    assert episode.trajectory.messages[-1] == Message("assistant", "46", reasoning="twelve, then")


@pytest.mark.parametrize(
    "content",
    [
        {"content": [{"type": "text", "text": "4"}, {"type": "output_text", "text": "6"}]},
        pytest.param(
            {
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "so"}]},
                    {"type": "text", "text": "46"},
                ]
            },
            marks=pytest.mark.nightly,
        ),
        {"content": None, "refusal": "46"},
    ],
)
def test_a_reply_in_parts_is_its_text(content):
    with started(chat_body=reply(**content), **FAST) as server:
        episode = play(server.url)
    said = episode.trajectory.messages[-1]
    assert (said.content, said.reasoning) == ("46", "so" if "thinking" in str(content) else None)


@pytest.mark.parametrize(
    ("arguments", "failure"),
    [
        ("{a: 1}", "malformed"),
        ('{"a": "x"}', "bad_arguments"),
        pytest.param("[1]", "malformed", marks=pytest.mark.nightly),
        pytest.param('{"a": NaN}', "malformed", marks=pytest.mark.nightly),
    ],
)
def test_calls_that_cannot_be_read_are_shown_to_the_model(arguments, failure):
    with started(chat_body=called(arguments), **FAST) as server:
        episode = play(server.url, max_turns=2)
        asked = server.chats()
    assert episode.trajectory.metrics[f"tool_failure/{failure}"] == 2.0
    answer = asked[1]["messages"][-1]
    assert answer["role"] == "tool" and answer["content"].startswith("Error: ")
    (shown,) = asked[1]["messages"][1]["tool_calls"]
    assert answer["tool_call_id"] == shown["id"] == "call_0"  # a server that names no call is given names
    json.loads(shown["function"]["arguments"])  # servers read them again when they show them to the model


def test_own_loops_speak_to_it_too():
    class Team(Sums):
        async def rollout(self, task: Task, model: Any) -> None:
            first = await model.chat([Message("system", "plan"), *task.messages], tools=[])
            await model.chat([{"role": "user", "content": first.text}])

    with started(calls=0, **FAST) as server:
        episode = play(server.url, Team)
        asked = server.chats()
    assert len(episode.trajectories) == 2 and episode.metrics["turns"] == 2.0
    assert ["tools" in each for each in asked] == [False, True]


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("<html>", "not JSON"),
        ("{}", "a reply with 0 choices, expected 1"),
        ('{"error": {"message": "no credits"}}', "no credits"),
        ('{"choices": [{}]}', "does not have the expected fields"),
        pytest.param('{"choices": null}', "a reply with 0 choices, expected 1", marks=pytest.mark.nightly),
        pytest.param("[]", "does not have the expected fields", marks=pytest.mark.nightly),
        pytest.param("[{}]", "does not have the expected fields", marks=pytest.mark.nightly),
        pytest.param(
            '{"choices": [{"message": {"content": 7}}]}',
            "does not have the expected fields",
            marks=pytest.mark.nightly,
        ),
        (completion({"content": ""}, "error"), "ended its reply with an error"),
        (reply(content=[{"type": "image_url", "image_url": {}}]), "cannot be read: a part of type 'image_url' is not"),
    ],
)
def test_garbage_becomes_a_typed_failure(body, words):
    with started(chat_body=body, **FAST) as server:
        episode = play(server.url)
    assert episode.status is Status.INFERENCE_ERROR and episode.score.value is None
    assert words in (episode.trajectory.error or "")


def test_a_bad_request_is_not_asked_again():
    with started(chat_status=400, chat_body='{"error": {"message": "no such parameter"}}', **FAST) as server:
        episode = play(server.url)
        assert len(server.chats()) == 1
    assert episode.status is Status.INFERENCE_ERROR and not episode.may_retry


def test_failures_of_the_moment_are_asked_again():
    with started(faults={"429": 0.2, "500": 0.2, "close": 0.1}, retry_after_seconds=0.0, **FAST) as server:
        own = {"connections": 2}
        episodes = [play(server.url, seed=seed, own=own) for seed in range(4)]
        assert server.statistics()["faults"]
    assert {episode.status for episode in episodes} <= {Status.COMPLETED, Status.INFERENCE_ERROR}
    assert sum(episode.score.value == 1.0 for episode in episodes) >= 2


def test_a_conversation_that_grows_too_long_is_truncated_and_one_that_begins_so_is_a_failure():
    body = '{"error": {"message": "This model\'s maximum context length is 64 tokens"}}'
    with started(chat_status=400, chat_body=body, **FAST) as server:

        async def ask(messages: list[Message]) -> Any:
            async with OpenAIInference("m", OpenAIOptions(url=f"{server.url}/v1", attempts=ATTEMPTS)) as engine:
                return await engine.chat(ChatRequest(messages, [], 8, 0))

        spoken = [Message("user", "a"), Message("assistant", "b"), Message("user", "c")]
        assert trio.run(ask, spoken).finish == "context"
        with pytest.raises(InferenceError, match="maximum context length") as caught:
            trio.run(ask, spoken[:1])
        assert not caught.value.is_transient

    class Late(OpenAIInference):
        async def chat(self, request: ChatRequest) -> Any:
            if any(message.role == "assistant" for message in request.messages):
                return msgspec.structs.replace(await super().chat(request), finish="context", detail="too long")
            return await super().chat(request)

    with started(**FAST) as server:

        async def run() -> Episode:
            async with Late("m", OpenAIOptions(url=f"{server.url}/v1", attempts=ATTEMPTS)) as engine:
                assert engine.capabilities.chats
                return await run_episode(
                    Task("x", answer=46), make_env=Sums, chat=None, inference=engine, limits=EpisodeLimits(),
                    rewards=[env_term(1.0, "env")], session="s", order=(0, 0), seed=0,
                )  # fmt: skip

        episode = trio.run(run)
    assert (episode.status, episode.trajectory.error) == (Status.TRUNCATED, "too long")
    assert episode.trajectory.turns == 1 and episode.trajectory.messages[-1].role == "tool"


def test_a_turn_that_takes_too_long():
    with started(delay_seconds=5.0) as server:
        episode = play(server.url, turn_seconds=0.1)
    assert episode.status is Status.TIMEOUT and "one turn" in (episode.trajectory.error or "")


def test_it_has_no_tokens():
    engine = OpenAIInference("m", OpenAIOptions(url="http://127.0.0.1:9/v1"))
    assert not engine.capabilities.trainable and not engine.capabilities.in_process
    assert engine.context_tokens_max > 10**6
    for ask in (lambda: engine.score([1]), lambda: engine.update_weights(None), lambda: engine.generate(None)):
        with pytest.raises(InferenceError, match="no token ids"):
            trio.run(ask)


# --- before it is asked -----------------------------------------------------------------------------------------------


def refused(url: str, key: str = "", name: str = "", tools: Any = ()) -> str:
    engine = OpenAIInference("m1", OpenAIOptions(url=url, attempts=ATTEMPTS), api_key=key, key_name=name)
    with pytest.raises(ConfigError) as caught:
        trio.run(engine.check, tools)
    assert not key or key not in str(caught.value)
    return str(caught.value)


def test_a_server_that_is_none():
    assert "--inference.url" in refused("http://127.0.0.1:9/v1")
    with started(**FAST) as server:
        assert "it usually ends in /v1" in refused(server.url)
    with started(faults={"garbage": 1.0}, **FAST) as server:
        assert "no chat-completions API" in refused(f"{server.url}/v1")
    words = '{"error": {"message": "\\"auto\\" tool choice requires --enable-auto-tool-choice"}}'
    with started(chat_status=400, chat_body=words, **FAST) as server:
        assert "--tool-call-parser" in refused(f"{server.url}/v1", tools=[{"type": "function"}])


def test_api_keys(monkeypatch):
    with started(api_key="sk-right", **FAST) as server:
        url = f"{server.url}/v1"
        assert "--inference.api-key-env" in refused(url)
        assert "variable MY_KEY is refused" in refused(url, "sk-wrong", "MY_KEY")
        monkeypatch.setenv("MY_KEY", "sk-right\n")
        options = OpenAIOptions(url=f"{url}/chat/completions", api_key_env="MY_KEY")
        engine = create_openai_inference("m1", None, 0, "", options=options)
        trio.run(engine.check)


def test_a_newer_name_for_the_limit():
    words = '{"error": {"message": "Unsupported parameter: max_tokens. Use max_completion_tokens instead."}}'
    with started(chat_status=400, chat_body=words, **FAST) as server:
        refused(f"{server.url}/v1")
        first, second = server.chats()
    assert first["max_tokens"] == second["max_completion_tokens"] and "max_tokens" not in second


def make(**values: Any) -> None:
    """The check of a plan, with the factory's own defaults."""
    given = {
        "model": "m",
        "training": None,
        "seed": 0,
        "folder": "",
        **{k: v for k, v in values.items() if k in ("model", "training")},
    }
    run_check(create_openai_inference, given, {k: v for k, v in values.items() if k not in given})


def test_what_a_plan_refuses(monkeypatch):
    assert is_evaluation_only(create_openai_inference) and not is_evaluation_only(make)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="OPENAI_API_KEY is empty"):
        make()
    with pytest.raises(ConfigError, match="NOPE is empty"):
        make(url="http://127.0.0.1:9/v1", api_key_env="NOPE")
    make(url="http://127.0.0.1:9/v1")  # elsewhere none is needed
    with pytest.raises(ConfigError, match="the server's URL is 'ftp://x'"):
        make(url="ftp://x")
    with pytest.raises(ConfigError, match=r"--inference\.served-model tiny"):
        make(url="http://127.0.0.1:9/v1", model="tiny")
    make(url="http://127.0.0.1:9/v1", model="tiny", served_model="tiny")
    with pytest.raises(ConfigError, match="the run sets this key"):
        make(url="http://127.0.0.1:9/v1", body={"n": 4})
    with pytest.raises(ConfigError, match="--inference hf to train"):
        make(url="http://127.0.0.1:9/v1", training=object())


def test_openai_s_key_goes_to_openai_only(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-openai")
    assert create_openai_inference("m", None, 0, "")._api_key == "sk-openai"
    assert create_openai_inference("m", None, 0, "").url == OPENAI_URL
    with started(**FAST) as server:
        assert create_openai_inference("m", None, 0, "", options=OpenAIOptions(url=f"{server.url}/v1"))._api_key == ""


@pytest.mark.parametrize("wrong", [{"connections": 0}, {"attempts": 0}, {"request_seconds": math.nan}])
def test_bounds(wrong):
    with pytest.raises(ConfigError, match="expected"):
        OpenAIOptions(url="http://127.0.0.1:9/v1", **wrong)
