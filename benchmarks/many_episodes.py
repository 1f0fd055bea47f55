"""How many episodes can run at once? An asynchronous environment that mostly sleeps, and an engine that answers at
once.

    OMP_NUM_THREADS=1 python benchmarks/many_episodes.py                       # 10,000 at once
    OMP_NUM_THREADS=1 python benchmarks/many_episodes.py --episodes 2000 --seconds 1
    OMP_NUM_THREADS=1 python benchmarks/many_episodes.py --tools               # the cost of a call with
    isolate="process"

Each episode has a setup that sleeps, two turns with a sleeping tool between them, a reward, and a close that sleeps.
The engine gives its first answer when all episodes wait for one, so all of them run at the same time. Chat format and
tokenizer are those of the embedded model; no model runs. The script prints the wall seconds, and for each episode the
CPU milliseconds and the growth of memory. The figures for tools are medians of single calls.
"""

from __future__ import annotations

import argparse
import functools
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import trio

from rollouts import Task, reward, tool
from rollouts.agent.episode import run_episode
from rollouts.agent.model import EpisodeLimits
from rollouts.chat.format import load_chat_format
from rollouts.env.authoring import tools_of
from rollouts.env.mixing import env_term
from rollouts.env.tools import run_tool
from rollouts.inference.base import Capabilities, Generation, VersionSpan
from rollouts.models.loading import load_tokenizer
from rollouts.training.rollout_gen.pool import Job, run_episodes
from rollouts.types import Message, Status, ToolCall

CALLS = 2000


class Sleeper:
    """An environment whose methods sleep for `seconds`, without threads."""

    seconds = 0.1

    async def setup(self, task: Task) -> None:
        await trio.sleep(self.seconds)

    @tool
    async def wait(self, times: int) -> str:
        """Wait a while."""
        await trio.sleep(self.seconds * times)
        return "waited"

    @reward
    async def right(self, task: Task, trajectory: Any) -> float:
        return float(trajectory.last_text.strip() == "done")

    async def close(self) -> None:
        await trio.sleep(self.seconds)


class Engine:
    """An engine that calls the tool, then ends. Its first answers wait until `count` requests wait."""

    capabilities = Capabilities()
    vocabulary_size = version = 0
    context_tokens_max = 4096

    def __init__(self, call: list[int], done: list[int], count: int) -> None:
        self._answers = (call, done)
        self._missing = count
        self._all_here = trio.Event()

    def open_session(self, order: tuple[int, ...]) -> str:
        return ".".join(map(str, order))

    def close_session(self, session: str) -> None:
        return None

    async def generate(self, request: Any) -> Generation:
        turn = request.order[-1]
        if turn == 0:
            self._missing -= 1
            if self._missing == 0:
                self._all_here.set()
            await self._all_here.wait()
        tokens = self._answers[min(turn, 1)]
        await trio.lowlevel.checkpoint()
        return Generation(tokens, [-0.5] * len(tokens), "stop", [VersionSpan(0, 0, len(tokens))])


class Tools:
    """The same tool on a worker thread and in its own process."""

    @tool
    def in_thread(self, n: int) -> int:
        return 2 * n

    @staticmethod
    @tool(isolate="process")
    def in_process(n: int) -> int:
        return 2 * n


def main(argv: Sequence[str] | None = None) -> int:
    """Run the episodes and print the figures. Returns 1 if an episode ended wrongly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=10_000, help="alive at once")
    parser.add_argument("--seconds", type=float, default=0.1, help="how long everything sleeps")
    parser.add_argument("--tools", action="store_true", help="what a call of a tool costs, in a thread and a process")
    arguments = parser.parse_args(argv)
    if arguments.tools:
        trio.run(_time_tools)
        return 0
    Sleeper.seconds = arguments.seconds
    return trio.run(_play, arguments.episodes)


async def _play(count: int) -> int:
    tokenizer = load_tokenizer("tiny")
    chat = load_chat_format(tokenizer)
    task = Task("Wait, then say that you are done.")
    schema = {"type": "function", "function": {"name": "wait", "parameters": {"type": "object", "properties": {}}}}
    said = [Message("assistant", tool_calls=[ToolCall("wait", {"times": 1})]), Message("assistant", "done")]
    answers = [_answer(chat, tokenizer, message, schema) for message in said]
    engine = Engine(answers[0], answers[1], count)

    async def play(job: Job, session: str, inference: Any) -> Any:
        return await run_episode(
            job.task,
            make_env=Sleeper,
            chat=chat,
            inference=inference,
            limits=EpisodeLimits(),
            rewards=[env_term()],
            session=session,
            order=job.order,
            seed=0,
        )

    before, began, cpu = _peak_bytes(), time.perf_counter(), time.process_time()
    jobs = [Job(task, (number // 8, number % 8)) for number in range(count)]
    episodes = await run_episodes(jobs, play, engine, concurrency=count)  # type: ignore[arg-type]
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    grown = _peak_bytes() - before
    fine = sum(each.status is Status.COMPLETED and each.score.value == 1.0 for each in episodes)
    print(
        f"{count} episodes alive at once: {seconds:.1f} s, {1e3 * cpu / count:.2f} ms of CPU and "
        f"{grown / count / 1024:.1f} KiB an episode ({grown / 2**20:.0f} MiB); {fine} ended as they should"
    )
    return 0 if fine == count else 1


def _answer(chat: Any, tokenizer: Any, message: Message, schema: dict[str, Any]) -> list[int]:
    """The token ids of this text as a reply of the model."""
    prompt = [Message("user", "x")]
    head = chat.render(prompt, [schema], True)
    whole = chat.render([*prompt, message], [schema], False)
    assert whole.startswith(head), "the template of the embedded model only appends"
    return list(tokenizer.encode(whole[len(head) :].rstrip("\n"), add_special_tokens=False))


async def _time_tools() -> None:
    tools = {each.name: each for each in tools_of(Tools())}
    for name in tools:
        first, *rest = [
            await _seconds_of(functools.partial(run_tool, tools, ToolCall(name, {"n": 1}))) for _ in range(CALLS)
        ]
        print(f"{name}: first call {1e3 * first:.1f} ms, then {1e6 * statistics.median(rest):.0f} us a call")


async def _seconds_of(call: Any) -> float:
    began = time.perf_counter()
    outcome = await call()
    assert outcome.failure is None, outcome
    return time.perf_counter() - began


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    sys.exit(main())
