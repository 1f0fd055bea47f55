"""What does the client cost? Many rollouts against a mock model server in another process, compared with bare loops.

    OMP_NUM_THREADS=1 python benchmarks/rollout_client.py                          # every side, at 128 and 512
    OMP_NUM_THREADS=1 python benchmarks/rollout_client.py --sides rollouts --profile
    OMP_NUM_THREADS=1 python benchmarks/rollout_client.py --sides rollouts --memory
    ... --peer-python OTHER_VENV/bin/python                # a Python with aiohttp, msgspec and tokenizers

The server answers after 50 ms with ids and logprobs, in vLLM's token-in-token-out format: three tool calls, then an
answer. So a rollout has four turns. Each side runs `--rollouts` rollouts, at most `--concurrency` at a time, in a new
process on its own core (the server has the other cores), after a warm-up on other tasks that opens the connections. CPU
time includes all threads of the client's process. Memory is its peak, including its imports.

The sides: `rollouts` is the whole path of a run (run_episodes, run_episode, ChatModel, the chat format of tiny, an
environment with a plain tool and a reward, Server). `rollouts async` is the same with trio-async methods, which need no
worker threads. The other sides are bare loops without chat, tool and reward: they hold ids, send them, and decode ids
and logprobs with msgspec. `engine` uses our Server (its checks, its dialect, its support for aborts), `client` our
HTTPClient, `httpx shared` one httpx client under trio, `httpx each` one httpx client for each worker, and `aiohttp`
runs under asyncio. Generation itself, and peers that need their own installation, are left out.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import importlib.util
import json
import os
import pstats
import random
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SERVER = ROOT / "tests" / "servers" / "mock_engine.py"
TURNS = 4
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 34}}\n</tool_call><|im_end|>'
ANSWER = "The sum is 46.<|im_end|>"
GENERATE = "/inference/v1/generate"
Post = Callable[[bytes], Awaitable[bytes]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sides in turn, each in its own process, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=list(SIDES))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--rollouts", type=int, default=512)
    parser.add_argument("--steps", type=int, default=1, help="how many times; the time is of all, results are dropped")
    parser.add_argument("--repeats", type=int, default=1, help="processes a side; the table shows the median")
    parser.add_argument("--profile", action="store_true", help="where the CPU goes, by room (it costs time itself)")
    parser.add_argument("--freeze", action="store_true", help="gc.freeze() after the warm-up: what is imported stays")
    parser.add_argument("--memory", action="store_true", help="memory with more rollouts instead of the table")
    parser.add_argument("--peer-python", default=sys.executable, help="the Python that has aiohttp")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)  # a side, in this process
    arguments = parser.parse_args(argv)
    if arguments.one:
        print(json.dumps(_run_one(json.loads(arguments.one))))
        return 0
    if arguments.memory:
        return _show_memory(arguments)
    print(f"{'side':15} {'at':>4} {'rollouts/s':>11} {'CPU ms/turn':>12} {'peak MiB':>9} {'server, of a core':>18}")
    for side in arguments.sides:
        for concurrency in arguments.concurrency:
            found = [_in_process(side, concurrency, arguments) for _ in range(arguments.repeats)]
            kept = sorted((each for each in found if "skipped" not in each), key=lambda each: each["cpu_ms"])
            if not kept:
                print(f"{side:15} {concurrency:4} skipped: {found[0]['skipped']}", flush=True)
                continue
            row = kept[len(kept) // 2]
            rates = f"{row['rate']:11.0f} {row['cpu_ms']:12.3f} {row['peak_mib']:9.0f} {row['server_share']:18.0%}"
            print(f"{side:15} {concurrency:4} {rates}", flush=True)
            if arguments.profile:
                _show_profile(row["profile"])
    return 0


def _in_process(side: str, concurrency: int, arguments: argparse.Namespace, **changed: Any) -> dict[str, Any]:
    """Run one side in a new process. Returns its output, or why it was skipped."""
    given = {"side": side, "concurrency": concurrency, "rollouts": arguments.rollouts, "steps": arguments.steps}
    given |= {"profile": arguments.profile, "freeze": arguments.freeze, **changed}
    python = arguments.peer_python if side in PEERS else sys.executable
    command = [python, str(Path(__file__).resolve()), "--one", json.dumps(given)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    if done.returncode != 0:
        reasons = [line.strip(" |+-") for line in done.stderr.splitlines() if line.strip(" |+-")]
        return {"skipped": (reasons or ["no reason given"])[-1]}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def _show_memory(arguments: argparse.Namespace) -> int:
    """Peak and final memory of one step, of four steps whose results are dropped, and of a step four times as large."""
    print(f"{'':28} {'peak MiB':>9} {'after the steps':>16}")
    n = arguments.rollouts
    for words, rollouts, steps in (
        ("one step", n, 1),
        ("four steps", n, 4),
        ("sixteen steps", n, 16),
        ("one", 4 * n, 1),
    ):
        row = _in_process(arguments.sides[0], arguments.concurrency[0], arguments, rollouts=rollouts, steps=steps)
        left = " ".join(f"{each:.0f}" for each in row["memory_mib"])
        print(f"{words + f' of {rollouts} rollouts':28} {row['peak_mib']:9.1f}   {left}", flush=True)
    return 0


def _show_profile(rooms: dict[str, float]) -> None:
    whole = sum(rooms.values())
    for room, seconds in sorted(rooms.items(), key=lambda each: -each[1])[:14]:
        print(f"    {room:44} {seconds / whole:5.0%}")


# --- one side, in its own process ------------------------------------------------------------------------------------


def _run_one(given: dict[str, Any]) -> dict[str, Any]:
    """Warm up, play, measure."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    specification = importlib.util.spec_from_file_location("mock_engine", SERVER)
    assert specification is not None and specification.loader is not None, SERVER
    mock = importlib.util.module_from_spec(specification)
    sys.modules["mock_engine"] = mock
    specification.loader.exec_module(mock)
    call, answer = _ids()
    with mock.started(call=call, answer=answer, calls=TURNS - 1) as server:
        if len(cores) > 1:
            os.sched_setaffinity(server.process.pid, cores[:-1])
            os.sched_setaffinity(0, cores[-1:])
        profile = cProfile.Profile() if given["profile"] else None
        marks: list[tuple[float, float, float]] = []
        memory: list[float] = []

        def mark() -> None:
            """Called before the first measured step and after each."""
            gc.collect()
            if given["freeze"] and not marks:
                gc.freeze()
            marks.append((time.perf_counter(), time.process_time(), server.statistics()["cpu_seconds"]))
            memory.append(_memory_mib())
            if profile is not None and len(marks) == 1:
                profile.enable()

        SIDES[given["side"]](server.url, given["concurrency"], given["rollouts"], given["steps"], mark)
        if profile is not None:
            profile.disable()
        answered = server.statistics()["answered"]
    (begun, cpu, other), (ended, cpu_end, other_end) = marks[0], marks[-1]
    count = given["rollouts"] * given["steps"]
    assert answered >= count * TURNS, f"{answered} answers for {count} rollouts"
    return {
        "rate": count / (ended - begun),
        "cpu_ms": (cpu_end - cpu) / count / TURNS * 1e3,
        "server_share": (other_end - other) / (ended - begun),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "memory_mib": memory[1:],
        "profile": _by_room(profile) if profile is not None else {},
    }


def _ids() -> tuple[list[int], list[int]]:
    """The token ids of a call and of an answer, so that a peer needs no transformers."""
    path = ROOT / "rollouts" / "tiny" / "tokenizer.json"
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return list(range(20, 36)), list(range(40, 46))
    tokenizer = Tokenizer.from_file(str(path))
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in (CALL, ANSWER)]  # type: ignore[return-value]


def _memory_mib() -> float:
    status = Path("/proc/self/status")
    if not status.exists():
        return float("nan")
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def _by_room(profile: cProfile.Profile) -> dict[str, float]:
    """Seconds by package or by our module. C functions count for their caller."""
    rooms: Counter[str] = Counter()
    stats: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    for (path, _, name), (_, _, own, _, callers) in stats.items():
        if "poll' of 'select.epoll" in name:
            rooms["(waiting for the server)"] += own
        elif path == "~":
            for (caller_path, _, _), (_, _, part, _) in callers.items():
                rooms[_room(caller_path)] += part
        else:
            rooms[_room(path)] += own
    return dict(rooms)


def _room(path: str) -> str:
    parts = Path(path).with_suffix("").parts
    if "site-packages" in parts:
        return parts[parts.index("site-packages") + 1]
    if "rollouts" in parts:
        return ".".join(parts[len(parts) - parts[::-1].index("rollouts") - 1 :])
    return "the benchmark" if Path(path) == Path(__file__) else "the standard library"


# --- ours ------------------------------------------------------------------------------------------------------------


def _rollouts(
    url: str, concurrency: int, count: int, steps: int, mark: Callable[[], None], make_env: Any = None
) -> None:
    import trio
    from rollouts_servers.checks import ServerSetup
    from rollouts_servers.server import Server
    from rollouts_servers.vllm import VLLM

    from rollouts.agent.episode import run_episode
    from rollouts.agent.model import EpisodeLimits
    from rollouts.chat.format import load_chat_format
    from rollouts.env.mixing import env_term
    from rollouts.inference.base import InferenceBackend
    from rollouts.models.loading import load_tokenizer
    from rollouts.training.rollout_gen.pool import Job, run_episodes
    from rollouts.types import Episode

    chat = load_chat_format(load_tokenizer("tiny"))
    limits = EpisodeLimits(max_tokens=1_000)
    make = make_env or _environments()[0]
    numbers = random.Random(0)

    async def play(job: Job, session: str, inference: InferenceBackend) -> Episode:
        return await run_episode(
            job.task, make_env=make, chat=chat, inference=inference, limits=limits, rewards=[env_term()],
            session=session, order=job.order, seed=0,
        )  # fmt: skip

    async def step(engine: Server, first: int, size: int) -> None:
        tasks = [_task(numbers) for _ in range(-(-size // 8))]
        jobs = [Job(tasks[i // 8], (first + i // 8, i % 8)) for i in range(size)]
        for episode in await run_episodes(jobs, play, engine, concurrency=concurrency):
            assert episode.score.value == 1.0 and episode.trajectory.turns == TURNS, episode
            segment = episode.trajectory.segments[0]
            assert len(episode.trajectory.segments) == 1 and segment.sampled_count > TURNS, segment

    async def run() -> None:
        engine = Server(VLLM(), url, ServerSetup(vocabulary_size=469, takes_weights=False, connections_max=concurrency))
        async with engine:
            await step(engine, 1_000_000, concurrency)
            mark()
            for number in range(steps):
                await step(engine, number * count, count)
                mark()

    trio.run(run)


def _rollouts_async(url: str, concurrency: int, count: int, steps: int, mark: Callable[[], None]) -> None:
    _rollouts(url, concurrency, count, steps, mark, _environments()[1])


def _task(numbers: random.Random) -> Any:
    from rollouts.types import Task

    return Task(f"What is {numbers.randrange(1_000_000)} + {numbers.randrange(1_000_000)}?", answer=46)


def _environments() -> tuple[type, type]:
    """An environment with one tool and one reward, as plain methods and as trio-async methods."""
    import trio

    from rollouts.env import reward, tool
    from rollouts.types import Task, Trajectory

    @dataclass
    class Plain:
        """Sums."""

        digits: int = 2

        @tool(timeout_seconds=5)
        def add(self, a: int, b: int) -> int:
            """Add two numbers.

            Args:
                a: one of them
                b: the other
            """
            return a + b

        @reward
        def correct(self, task: Task, trajectory: Trajectory) -> float:
            """1 if the answer is in the last message."""
            return float(str(task.answer) in trajectory.last_text)

    @dataclass
    class Async:
        """The same sums."""

        digits: int = 2

        @tool(timeout_seconds=5)
        async def add(self, a: int, b: int) -> int:
            """Add two numbers.

            Args:
                a: one of them
                b: the other
            """
            await trio.lowlevel.checkpoint()
            return a + b

        @reward
        async def correct(self, task: Task, trajectory: Trajectory) -> float:
            """1 if the answer is in the last message."""
            await trio.lowlevel.checkpoint()
            return float(str(task.answer) in trajectory.last_text)

    return Plain, Async


# --- bare loops ------------------------------------------------------------------------------------------------------


def _bodies(index: int, tool_ids: list[int]) -> Iterator[bytes]:
    """The requests of one rollout. Send the answer to each request to get the next one."""
    import msgspec

    tokens = list(range(50, 130))
    for turn in range(TURNS):
        sampling = {"max_tokens": 900, "temperature": 1.0, "seed": index * 8 + turn, "logprobs": 0}
        body = {"request_id": f"{index}-{turn}", "model": "policy", "token_ids": tokens, "sampling_params": sampling}
        received = yield msgspec.json.encode({**body, "return_token_ids": True, "output_mode": "tokens"})
        choice = _decoder().decode(received).choices[0]
        assert choice.token_ids and len(choice.logprobs.content) == len(choice.token_ids)
        logprobs = [entry.logprob for entry in choice.logprobs.content]
        assert len(logprobs) == len(choice.token_ids)
        tokens = tokens + choice.token_ids + tool_ids


_decoders: list[Any] = []


def _decoder() -> Any:
    import msgspec

    if not _decoders:
        entry = msgspec.defstruct("Entry", [("token_id", int), ("logprob", float)])
        logprobs = msgspec.defstruct("Logprobs", [("content", list[entry])])
        choice = msgspec.defstruct("Choice", [("token_ids", list[int]), ("logprobs", logprobs)])
        _decoders.append(msgspec.json.Decoder(msgspec.defstruct("Reply", [("choices", list[choice])])))
    return _decoders[0]


async def _bare(worker: int, workers: int, count: int, post: Post) -> None:
    """One worker's rollouts, one after another."""
    for index in range(worker, count, workers):
        bodies = _bodies(index, list(range(130, 145)))
        body: bytes | None = next(bodies)
        while body is not None:
            try:
                body = bodies.send(await post(body))  # type: ignore[attr-defined]
            except StopIteration:
                body = None


async def _bare_on_trio(workers: int, count: int, posts: Sequence[Post]) -> None:
    import trio

    async with trio.open_nursery() as nursery:
        for worker in range(workers):
            nursery.start_soon(_bare, worker, workers, count, posts[worker % len(posts)])


def _engine(url: str, concurrency: int, count: int, steps: int, mark: Callable[[], None]) -> None:
    import trio
    from rollouts_servers.checks import ServerSetup
    from rollouts_servers.server import Server
    from rollouts_servers.vllm import VLLM

    from rollouts.inference.base import GenerateRequest

    async def work(engine: Server, worker: int, workers: int, size: int) -> None:
        """Like `_bare`, with requests instead of bodies."""
        for index in range(worker, size, workers):
            tokens = list(range(50, 130))
            session = engine.open_session((index, 0))
            for turn in range(TURNS):
                request = GenerateRequest(tokens, 900, (), index * 8 + turn, order=(index, 0, turn), session=session)
                generation = await engine.generate(request)
                assert generation.tokens and len(generation.logprobs) == len(generation.tokens), generation
                tokens = tokens + generation.tokens + list(range(130, 145))
            engine.close_session(session)

    async def step(engine: Server, size: int) -> None:
        async with trio.open_nursery() as nursery:
            for worker in range(concurrency):
                nursery.start_soon(work, engine, worker, concurrency, size)

    async def run() -> None:
        engine = Server(VLLM(), url, ServerSetup(vocabulary_size=469, takes_weights=False, connections_max=concurrency))
        async with engine:
            await step(engine, concurrency)
            mark()
            for _ in range(steps):
                await step(engine, count)
                mark()

    trio.run(run)


def _client(url: str, concurrency: int, count: int, steps: int, mark: Callable[[], None]) -> None:
    import trio
    from rollouts_servers.http import HTTPClient

    async def run() -> None:
        async with HTTPClient(url, connections_max=concurrency) as client:

            async def post(body: bytes) -> bytes:
                return await client.post(GENERATE, body, bytes, timeout_seconds=60)

            await _bare_on_trio(concurrency, concurrency, [post])
            mark()
            for _ in range(steps):
                await _bare_on_trio(concurrency, count, [post])
                mark()

    trio.run(run)


def _httpx(url: str, concurrency: int, count: int, steps: int, mark: Callable[[], None], clients: int) -> None:
    import contextlib

    import httpx
    import trio

    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)

    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            posts = []
            for _ in range(clients):
                client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, limits=limits, timeout=600))

                async def post(body: bytes, client: httpx.AsyncClient = client) -> bytes:
                    reply = await client.post(GENERATE, content=body, headers={"content-type": "application/json"})
                    return reply.raise_for_status().content

                posts.append(post)
            await _bare_on_trio(concurrency, concurrency, posts)
            mark()
            for _ in range(steps):
                await _bare_on_trio(concurrency, count, posts)
                mark()

    trio.run(run)


def _httpx_shared(url: str, concurrency: int, count: int, steps: int, mark: Callable[[], None]) -> None:
    _httpx(url, concurrency, count, steps, mark, 1)


def _httpx_each(url: str, concurrency: int, count: int, steps: int, mark: Callable[[], None]) -> None:
    _httpx(url, concurrency, count, steps, mark, concurrency)


def _aiohttp(url: str, concurrency: int, count: int, steps: int, mark: Callable[[], None]) -> None:
    import asyncio

    import aiohttp

    async def run() -> None:
        async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=concurrency)) as session:

            async def post(body: bytes) -> bytes:
                async with session.post(GENERATE, data=body, headers={"content-type": "application/json"}) as reply:
                    reply.raise_for_status()
                    return await reply.read()

            async def step(size: int) -> None:
                await asyncio.gather(*(_bare(worker, concurrency, size, post) for worker in range(concurrency)))

            await step(concurrency)
            mark()
            for _ in range(steps):
                await step(count)
                mark()

    asyncio.run(run())


PEERS = ("aiohttp",)
SIDES: dict[str, Callable[..., None]] = {
    "rollouts": _rollouts,
    "rollouts async": _rollouts_async,
    "engine": _engine,
    "client": _client,
    "httpx shared": _httpx_shared,
    "httpx each": _httpx_each,
    "aiohttp": _aiohttp,
}


if __name__ == "__main__":
    sys.exit(main())
