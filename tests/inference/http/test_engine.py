"""TokenEngine against the mock server: what comes back is what is recorded, and what cannot be used is refused."""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from rollouts.agent import EpisodeLimits, run_episode
from rollouts.chat.format import load_chat_format
from rollouts.env import reward, tool
from rollouts.env.mixing import env_term
from rollouts.errors import InferenceError
from rollouts.inference.base import GenerateRequest, WeightUpdate
from rollouts.inference.http import HTTPFailure, Retries, TokenEngine
from rollouts.inference.http.engine import read_choice
from rollouts.inference.http.wire import Choice, GenerateReply, Logprobs, TokenLogprob
from rollouts.training.models import load_tokenizer
from rollouts.training.rollout_gen.episodes import Job, run_episodes
from rollouts.types import Status, Task

SERVER = Path(__file__).parents[2] / "servers" / "mock_engine.py"
REQUEST = GenerateRequest([5, 6, 7], 50, (2,), seed=2**63 - 1, session="0-0-1")
ONCE = Retries(attempts_max=1)


def load_mock() -> Any:
    specification = importlib.util.spec_from_file_location("mock_engine", SERVER)
    module = importlib.util.module_from_spec(specification)
    sys.modules["mock_engine"] = module
    specification.loader.exec_module(module)
    return module


started = load_mock().started


def use(url: str, function: Any, **settings: Any) -> Any:
    async def run() -> Any:
        async with TokenEngine(url, **settings) as engine:
            return await function(engine)

    return trio.run(run)


class Adding:
    """One tool, one reward."""

    @tool(timeout_seconds=5)
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @reward
    def right(self, task: Task, trajectory: Any) -> float:
        return float(str(task.answer) in trajectory.last_text)


def test_the_whole_path_records_what_the_server_sent():
    tokenizer = load_tokenizer("tiny")
    chat = load_chat_format(tokenizer)
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    call = encode('<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 34}}\n</tool_call><|im_end|>')
    answer = encode("The sum is 46.<|im_end|>")

    async def play(job: Job, session: str, inference: Any) -> Any:
        return await run_episode(
            job.task, make_env=Adding, chat=chat, inference=inference, limits=EpisodeLimits(max_tokens=500),
            rewards=[env_term()], session=session, order=job.order, seed=0,
        )  # fmt: skip

    jobs = [Job(Task(f"What is 12 + 34, number {i}?", answer=46), (i // 4, i % 4)) for i in range(24)]
    with started(call=call, answer=answer, delay_seconds=0.002) as server:
        episodes = use(server.url, lambda engine: run_episodes(jobs, play, engine, concurrency=8), connections_max=4)
        found = server.statistics()
    assert (found["requests"], found["answered"], found["in_flight_max"]) == (96, 96, 4)
    for episode in episodes:
        assert (episode.status, episode.score.value, episode.trajectory.turns) == (Status.COMPLETED, 1.0, 4)
        (segment,) = episode.trajectory.segments
        live = [place for place, weight in enumerate(segment.loss_mask) if weight > 0]
        assert [segment.tokens[place] for place in live] == [*call, *call, *call, *answer]
        sent = [-0.5 - place / 64 for said in (call, call, call, answer) for place in range(len(said))]
        assert [segment.logprobs[place] for place in live] == sent
        assert {segment.versions[place] for place in live} == {0}


def test_versions_are_the_clients():
    async def run(engine: TokenEngine) -> None:
        await engine.update_weights(WeightUpdate(7))
        assert set((await engine.generate(REQUEST)).versions) == {7}
        with pytest.raises(InferenceError, match="weights of version 8 cannot be sent"):
            await engine.update_weights(WeightUpdate(8, path="somewhere"))
        assert (await engine.health()).version == 7 and (await engine.health()).ok

    with started(delay_seconds=0) as server:
        use(server.url, run)


def test_scores():
    async def run(engine: TokenEngine) -> None:
        assert await engine.score([4, 5, 6]) == [0.0, -0.25, -0.25]
        assert await engine.score([4]) == [0.0]
        with pytest.raises(InferenceError, match="temperature 1 only"):
            await engine.score([4, 5], 0.7)

    with started(delay_seconds=0) as server:
        use(server.url, run)


def test_a_server_that_is_not_there():
    with started() as server:
        pass

    async def run(engine: TokenEngine) -> None:
        health = await engine.health()
        assert not health.ok and "Connection refused" in health.detail
        with pytest.raises(HTTPFailure, match="Connection refused"):
            await engine.generate(REQUEST)

    use(server.url, run, retries=ONCE)


def test_a_request_that_is_asked_again_keeps_its_name_and_others_have_their_own():
    """Names are for the server's logs and for aborts; two requests of one session never share one."""
    sent = []

    async def run(engine: TokenEngine) -> None:
        ask = engine.client.post

        async def listen(path: str, body: Any, *rest: Any, **more: Any) -> Any:
            sent.append(body)
            return await ask(path, body, *rest, **more)

        engine.client.post = listen
        for _ in range(2):
            await engine.generate(REQUEST)
        assert engine.open_session((1, 2)) != engine.open_session((1, 2))

    with started(delay_seconds=0) as server:
        use(server.url, run, model="mine")
    assert len({body.request_id for body in sent}) == 2 and all("0-0-1" in body.request_id for body in sent)
    assert (sent[0].model, sent[0].token_ids, sent[0].sampling_params.seed) == ("mine", [5, 6, 7], 2**63 - 1)
    assert (sent[0].sampling_params.max_tokens, sent[0].sampling_params.stop_token_ids) == (50, (2,))


def test_a_reply_that_goes_on_gets_other_random_numbers():
    sent = []

    async def run(engine: TokenEngine) -> None:
        async def listen(path: str, body: Any, *rest: Any, **more: Any) -> GenerateReply:
            sent.append(body.sampling_params.seed)
            return GenerateReply([choice([1], [1])])

        engine.client.post = listen
        for offset in (0, 1, 2, 0):
            await engine.generate(msgspec.structs.replace(REQUEST, offset=offset))

    use("http://127.0.0.1:9", run)
    assert sent[0] == sent[3] == REQUEST.seed and len(set(sent)) == 3 and all(0 <= seed < 2**63 for seed in sent)


def choice(ids: list[int], scored: list[int] | None = None, finish: str = "stop") -> Choice:
    logprobs = None if scored is None else Logprobs([TokenLogprob(token, -1.0) for token in scored])
    return Choice(ids, finish, logprobs)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ([], "asked for one answer and returned 0"),
        ([choice([1], [1])] * 2, "returned 2"),
        ([choice([1, 2])], "2 token ids and logprobs of 0"),
        ([choice([1, 2], [1, 3])], "of other tokens"),
        ([choice([1], [1], "tired")], "ended an answer with 'tired', expected stop, length, abort"),
    ],
)
def test_what_cannot_be_used_is_refused(choices, words):
    with pytest.raises(InferenceError, match=words):
        read_choice(GenerateReply(choices))


def test_what_can_be_used():
    assert read_choice(GenerateReply([choice([1, 2], [1, 2], "length")])) == ([1, 2], [-1.0, -1.0], "length")
    assert read_choice(GenerateReply([choice([], None, "abort")])) == ([], [], "abort")


def test_the_mock_server_ends_with_its_parent_even_where_that_is_killed():
    code = (
        f"import sys; sys.path.insert(0, {str(SERVER.parent)!r}); import mock_engine, time\n"
        "with mock_engine.started() as server:\n    print(server.process.pid, flush=True)\n    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        child = int(parent.stdout.readline())
        assert _is_running(child)
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
        end = time.monotonic() + 10
        while _is_running(child) and time.monotonic() < end:
            time.sleep(0.02)
        assert not _is_running(child)
    finally:
        parent.kill()
        parent.wait(10)
        parent.stdout.close()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"
