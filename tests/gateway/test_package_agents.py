"""Real packages, unchanged: an agent of each plays episodes, and every token is what the engine sampled.

The packages openai and anthropic are part of the normal run. For the others: make test-clients.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
from typing import Any, NamedTuple

import pytest
import trio
from agent_fakes import FakeEngine, Quiz, check_exact, play
from chat.tokenizers_for_tests import by_bytes, chat_for, make_tokenizer
from gateway import package_agents as agents

from rollouts.agent.episode import run_episode
from rollouts.agent.model import EpisodeLimits
from rollouts.chat import load_chat_format
from rollouts.env.mixing import env_term
from rollouts.inference.base import GenerateRequest, Generation, VersionSpan
from rollouts.inference.embedded.hf import HFInference
from rollouts.models.loading import load_hf_model, load_tokenizer
from rollouts.types import Episode, Status, Task

pytestmark = pytest.mark.filterwarnings("ignore")  # what other packages warn about is theirs


class Case(NamedTuple):
    """An agent, what the model says to it, and the package that it needs."""

    agent: Any
    says: Any = agents.calls_and_answer
    package: str = "openai"
    rewrites: bool = False  # it rewrites the replies in its history, so each request begins a conversation


class ByteEngine(FakeEngine):
    """Says each byte of its script as a token of its own, which no tokenizer would do."""

    def __init__(self, *script: str) -> None:
        super().__init__(*script)
        self.tokenizer = make_tokenizer("qwen2_5")

    async def generate(self, request: GenerateRequest) -> Generation:
        if self.script and isinstance(said := self.script[0], str):
            tokens = [*by_bytes(self.tokenizer, said), *chat_for("qwen2_5").stop_ids[:1]]
            logprobs = [-((request.seed >> n % 40) % 7) / 3 for n in range(len(tokens))]
            self.script[0] = Generation(tokens, logprobs, "stop", [VersionSpan(len(self.turns), 0, len(tokens))])
        return await super().generate(request)


def served(case: Case, number: int, engine: FakeEngine, chat: Any, **changed: Any) -> tuple[Episode, list[str]]:
    """An episode that the agent plays, and what it returned."""
    returned: list[str] = []

    class Own(Quiz):
        async def rollout(self, task: Any, model: Any) -> None:
            async with model.serve() as endpoint:
                returned.append(await run(case.agent, endpoint, task.prompt))

    limits = {"max_tokens": 100_000, "max_turns": 20, **changed}
    return play(Own, engine, chat, Task(f"What is {number} * 37?", id=str(number)), **limits), returned


async def run(agent: Any, endpoint: Any, prompt: str) -> str:
    """An agent that is a plain function, or one of asyncio, runs in a thread; one of openai and anthropic runs here."""
    if not inspect.iscoroutinefunction(agent):
        return await trio.to_thread.run_sync(agent, endpoint, prompt)
    if not agent.__name__.startswith(("openai_agents", "pydantic_ai", "langgraph")):
        return await agent(endpoint, prompt)
    return await trio.to_thread.run_sync(asyncio.run, agent(endpoint, prompt))


def plays(case: Case, episodes: int) -> None:
    """Every episode is exact, and a conversation that only grows is one segment."""
    if importlib.util.find_spec(case.package) is None:
        pytest.skip(f"{case.package} is not installed; to run this test: make test-clients")
    for number in range(1, episodes + 1):
        replies, answer = case.says(number)
        engine = ByteEngine(*replies)
        episode, returned = served(case, number, engine, chat_for("qwen2_5"))
        assert episode.status is Status.COMPLETED, episode.trajectories[0].error
        assert returned == [answer] and len(engine.turns) == len(replies)
        check_exact(episode, engine)  # tokens, masks, logprobs and versions
        assert len(episode.trajectories) == (len(replies) if case.rewrites else 1)
        assert all(len(trajectory.segments) == 1 for trajectory in episode.trajectories)


LIGHT = [
    Case(agents.openai_chat),
    Case(agents.openai_chat_stream),
    Case(agents.openai_responses),
    Case(agents.openai_responses_stream),
    Case(agents.anthropic_messages, package="anthropic"),
    Case(agents.anthropic_messages_stream, package="anthropic"),
    Case(agents.anthropic_tool_runner, package="anthropic"),
]
HEAVY = [
    Case(agents.openai_agents, package="agents"),
    Case(agents.openai_agents_stream, package="agents"),
    Case(agents.pydantic_ai, package="pydantic_ai"),
    Case(agents.pydantic_ai_output, agents.calls_and_result, "pydantic_ai"),
    Case(agents.langgraph, package="langgraph"),
    Case(agents.smolagents, agents.calls_and_final, "smolagents", rewrites=True),
    Case(agents.smolagents_code, agents.code_and_final, "smolagents", rewrites=True),
    Case(agents.mini_swe_agent, agents.commands, "minisweagent"),
]


USUAL = (agents.openai_chat, agents.openai_responses_stream, agents.anthropic_tool_runner)


def name_of(case: Case) -> str:
    return case.agent.__name__


@pytest.mark.parametrize(
    "case",
    [pytest.param(each, marks=() if each.agent in USUAL else pytest.mark.nightly) for each in LIGHT],
    ids=name_of,
)
def test_clients_of_openai_and_anthropic_play(case: Case) -> None:
    plays(case, 3)


async def agent_of_both(endpoint: Any, prompt: str) -> str:
    """One conversation with each package."""
    await agents.openai_chat(endpoint, prompt)
    return await agents.anthropic_messages_stream(endpoint, prompt)


def test_logprobs_of_real_clients_are_the_recomputed_ones() -> None:
    pytest.importorskip("openai", reason="openai is not installed: pip install -r requirements-test.txt")
    pytest.importorskip("anthropic", reason="anthropic is not installed: pip install -r requirements-test.txt")
    chat = load_chat_format(load_tokenizer("tiny"))

    async def episode(engine: HFInference, number: int) -> Episode:
        class Own(Quiz):
            async def rollout(self, task: Any, model: Any) -> None:
                async with model.serve() as endpoint:
                    await agent_of_both(endpoint, task.prompt)

        limits = EpisodeLimits(max_turns=6)
        task = Task(f"What is {number} * 37?")
        about: Any = {"limits": limits, "rewards": [env_term()], "order": (number, 0), "seed": 3, "session": "s"}
        return await run_episode(task, make_env=Own, chat=chat, inference=engine, **about)

    async def main() -> None:
        async with HFInference(load_hf_model("tiny")) as engine:
            episodes = [await episode(engine, number) for number in range(10, 16)]
            trajectories = [each for episode in episodes for each in episode.trajectories]
            assert {each.status for each in trajectories} == {Status.COMPLETED}
            assert len(trajectories) == 12 and max(each.turns for each in trajectories) > 1
            for segment in (segment for each in trajectories for segment in each.segments):
                scores = await engine.score(segment.tokens)
                sampled = [place for place, weight in enumerate(segment.loss_mask) if weight]
                assert [segment.logprobs[place] for place in sampled] == pytest.approx(
                    [scores[place] for place in sampled], abs=1e-4
                )

    trio.run(main)


def test_real_clients_get_errors_that_they_know_and_lose_nothing() -> None:
    openai = pytest.importorskip("openai", reason="openai is not installed: pip install -r requirements-test.txt")
    anthropic = pytest.importorskip(
        "anthropic", reason="anthropic is not installed: pip install -r requirements-test.txt"
    )

    async def agent(endpoint: Any, prompt: str) -> str:
        messages: Any = [{"role": "user", "content": prompt}]
        asked: Any = {"model": "any", "messages": messages}
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key="of-another-episode") as client:
            with pytest.raises(openai.AuthenticationError, match="belongs to no episode"):
                await client.chat.completions.create(**asked)
        schema: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key) as client:
            with pytest.raises(openai.BadRequestError, match="offer a tool with this schema"):
                await client.chat.completions.create(**asked, response_format=schema)
            with pytest.raises(openai.BadRequestError, match="offer a tool with this schema"):
                await client.responses.create(
                    input="x", text={"format": {"type": "json_schema", "name": "n", "schema": {}}}
                )
            with pytest.raises(openai.BadRequestError, match="the body cannot be read"):
                await client.post("/chat/completions", content=b"\xff garbage", cast_to=object)
            stream = await client.chat.completions.create(**asked, stream=True)
            await stream.close()  # it disconnects, and asks again
            again = await client.chat.completions.create(**asked)
        async with anthropic.AsyncAnthropic(base_url=endpoint.url, api_key=endpoint.key) as client:
            with pytest.raises(anthropic.BadRequestError, match="offer a tool with this schema"):
                form: Any = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
                await client.messages.create(**asked, max_tokens=9, output_config=form)
            count = await client.messages.count_tokens(**asked)
            answer = await client.messages.create(**asked, max_tokens=99)
            assert answer.usage.input_tokens == count.input_tokens
        return str(again.choices[0].message.content)

    engine = ByteEngine("one", "two", "three")
    episode, returned = served(Case(agent), 7, engine, chat_for("qwen2_5"))
    assert episode.status is Status.COMPLETED, episode.trajectories[0].error
    check_exact(episode, engine)
    assert returned == ["two"] and [each.last_text for each in episode.trajectories] == ["one", "two", "three"]


def test_a_real_client_that_times_out_asks_again_and_is_trained_once() -> None:
    openai = pytest.importorskip("openai", reason="openai is not installed: pip install -r requirements-test.txt")
    engine = ByteEngine("one")
    engine.blocks = True

    async def unblock() -> None:
        await engine.blocked.wait()
        engine.blocks = False

    async def agent(endpoint: Any, prompt: str) -> str:
        messages: Any = [{"role": "user", "content": prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key, timeout=1.0) as client:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(unblock)
                completion = await client.chat.completions.create(model="any", messages=messages)
        return str(completion.choices[0].message.content)

    episode, returned = served(Case(agent), 7, engine, chat_for("qwen2_5"))
    assert returned == ["one"] and [each.last_text for each in episode.trajectories] == ["one"]
    assert len(engine.turns) == 1
    check_exact(episode, engine)


@pytest.mark.adapters
@pytest.mark.parametrize("case", LIGHT + HEAVY, ids=name_of)
def test_fifty_episodes_of_each_package_are_exact(case: Case) -> None:
    plays(case, 50)
