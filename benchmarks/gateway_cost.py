"""What does a request of an agent's own client cost the run, beside the same turn through `model.chat`?

    OMP_NUM_THREADS=1 python benchmarks/gateway_cost.py
    OMP_NUM_THREADS=1 python benchmarks/gateway_cost.py --episodes 32 --turns 16

Many episodes play at the same time. Chat format and tokenizer are those of the embedded model, and the engine is a
script. The clients are processes of their own that speak plain HTTP, so their CPU time is not counted. The figures are
CPU milliseconds of this process in all threads for one turn: through `model.chat`, and through each API of the gateway.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import trio

from rollouts import Task, reward
from rollouts.agent.episode import run_episode
from rollouts.agent.model import EpisodeLimits
from rollouts.chat import load_chat_format
from rollouts.env.mixing import env_term
from rollouts.inference.base import Capabilities, GenerateRequest, Generation, VersionSpan
from rollouts.models.loading import load_tokenizer
from rollouts.types import Message, Status

PATHS = {
    "chat completions": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}

CLIENT = """
import asyncio, json, sys

async def play(line):
    try:
        await converse(line)
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")

async def converse(line):
    host, port, key, path, turns = line.split()
    reader, writer = await asyncio.open_connection(host, int(port))
    items = []
    for turn in range(int(turns)):
        items.append({"role": "user", "content": f"question {turn}"})
        key_of = {"/v1/responses": "input"}.get(path, "messages")
        more = {"max_tokens": 64} if path == "/v1/messages" else {}
        body = json.dumps({"model": "any", key_of: items, **more}).encode()
        lines = [f"POST {path} HTTP/1.1", "host: x", f"authorization: Bearer {key}", f"content-length: {len(body)}"]
        writer.write("\\r\\n".join([*lines, "", ""]).encode() + body)
        head = await reader.readuntil(b"\\r\\n\\r\\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = int(head.lower().split(b"content-length:")[1].split(b"\\r\\n")[0])
        answer = json.loads(await reader.readexactly(length))
        if path == "/v1/responses":
            items += answer["output"]
        elif path == "/v1/messages":
            items.append({"role": "assistant", "content": answer["content"]})
        else:
            items.append(answer["choices"][0]["message"])
    writer.close()
    print(key, flush=True)

async def main():
    loop = asyncio.get_running_loop()
    stdin = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    tasks = []
    while line := await stdin.readline():
        tasks.append(asyncio.create_task(play(line.decode())))
    await asyncio.gather(*tasks)

asyncio.run(main())
"""


class Engine:
    """An engine that always replies with the same text."""

    capabilities = Capabilities()
    vocabulary_size = version = 0
    context_tokens_max = 1_000_000

    def __init__(self, chat: Any) -> None:
        self._said = [*chat.encode("the answer is 42, as always"), chat.stop_ids[0]]

    def close_session(self, session: str) -> None:
        """Nothing is kept."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """The same reply."""
        await trio.lowlevel.checkpoint()
        size = len(self._said)
        return Generation(self._said, [-0.1] * size, "stop", [VersionSpan(0, 0, size)])


class Clients:
    """The process of the clients."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._done: dict[str, trio.Event] = {}

    async def watch(self) -> None:
        """Note which agents are done."""
        assert self._process.stdout is not None
        rest = b""
        async with trio.lowlevel.FdStream(os.dup(self._process.stdout.fileno())) as stream:
            while data := await stream.receive_some():
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._done[line.decode()].set()

    async def play(self, endpoint: Any, path: str, turns: int) -> None:
        """Let one agent play."""
        event = self._done[endpoint.key] = trio.Event()
        host, port = endpoint.url.removeprefix("http://").split(":")
        assert self._process.stdin is not None
        self._process.stdin.write(f"{host} {port} {endpoint.key} {path} {turns}\n".encode())
        self._process.stdin.flush()
        await event.wait()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def environment(turns: int, path: str, clients: Clients | None) -> type:
    """The environment of one measurement. `clients` None: through `model.chat`."""

    class Talk:
        async def rollout(self, task: Task, model: Any) -> None:
            if clients is not None:
                async with model.serve() as endpoint:
                    await clients.play(endpoint, path, turns)
                return
            messages: list[Message] = []
            for turn in range(turns):
                await model.chat([*messages, Message("user", f"question {turn}")], [])
                messages = model.messages

        @reward
        def done(self) -> float:
            return 1.0

    return Talk


async def cost(chat: Any, episodes: int, turns: int, path: str) -> float:
    """CPU milliseconds of one turn."""
    clients = Clients() if path else None
    make_env, engine = environment(turns, path, clients), Engine(chat)
    limits = EpisodeLimits(max_tokens=1_000_000, max_turns=turns)

    async def play(number: int) -> None:
        episode = await run_episode(
            Task("talk"),
            make_env=make_env,
            chat=chat,
            inference=engine,  # type: ignore[arg-type]
            limits=limits,
            rewards=[env_term()],
            session=str(number),
            order=(number, 0),
            seed=0,
        )
        assert episode.status is Status.COMPLETED, episode.trajectory.error
        assert len(episode.trajectory.segments) == 1 and episode.trajectory.turns == turns

    async with trio.open_nursery() as nursery:
        if clients is not None:
            nursery.start_soon(clients.watch)
        began = time.process_time()
        async with trio.open_nursery() as players:
            for number in range(episodes):
                players.start_soon(play, number)
        spent = time.process_time() - began
        nursery.cancel_scope.cancel()
    if clients is not None:
        clients.close()
    return 1000 * spent / (episodes * turns)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure each path in turn, several times, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=128, help="episodes at the same time")
    parser.add_argument("--turns", type=int, default=8, help="turns of each episode")
    parser.add_argument("--repeats", type=int, default=5, help="how often each path is measured")
    given = parser.parse_args(argv)
    chat = load_chat_format(load_tokenizer("tiny"))
    paths = {"model.chat": "", **PATHS}
    found: dict[str, list[float]] = {name: [] for name in paths}
    for _ in range(given.repeats):
        for name, path in paths.items():
            found[name].append(trio.run(cost, chat, given.episodes, given.turns, path))
    direct = statistics.median(found["model.chat"])
    print(f"{given.episodes} episodes at the same time, {given.turns} turns each; CPU milliseconds of one turn")
    for name, values in found.items():
        middle = statistics.median(values)
        print(f"{name:20}{middle:8.3f}   {middle - direct:+8.3f} beside model.chat")


if __name__ == "__main__":
    main()
