"""What does a turn cost outside the model, and does it cost more in a long conversation?

    OMP_NUM_THREADS=1 python benchmarks/turn_cost.py
    PYTHONPATH=/path/to/another/checkout python benchmarks/turn_cost.py        # measure another version

The engine is a script. Chat format and tokenizer are those of the embedded model. No torch code runs. A turn is a reply
with a tool call, the call itself, its result of about a hundred tokens, and the ids of the next prompt. The figures are
CPU time of the process in all threads, the best of several: milliseconds per turn after 1, 8 and 64 turns, microseconds
of samples and batches per trained token, and samples per CPU second from the task to the batch.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import trio

import rollouts
from rollouts import Task, reward, tool
from rollouts.agent.episode import run_episode
from rollouts.agent.model import EpisodeLimits
from rollouts.chat import load_chat_format, tokenize_supervised
from rollouts.env.mixing import env_term
from rollouts.inference.base import Capabilities, Generation, VersionSpan
from rollouts.models.loading import load_tokenizer
from rollouts.training.batching import make_batch
from rollouts.training.samples import episode_samples
from rollouts.types import Episode, Message, Status, ToolCall

CONTEXTS = (1, 8, 64)
ANSWER = " ".join(f"line {number}: the value is {number * 37 % 101}." for number in range(5))


_numbers = itertools.count()


def fresh_prompt() -> str:
    """A new prompt each time, because the rendering of a prompt is cached."""
    return f"{next(_numbers)}. Look everything up, then say that you are done."


class Library:
    """An environment whose tool returns a long text."""

    @tool
    def look_up(self, number: int) -> str:
        """Look a number up."""
        return f"{number}: {ANSWER}"

    @reward
    def right(self, task: Task, trajectory: Any) -> float:
        """Whether the episode reached its end."""
        return float(trajectory.last_text == "done")


class Engine:
    """An engine that calls the tool for some turns, then ends. It records the CPU time of each request."""

    capabilities = Capabilities()
    vocabulary_size = version = 0
    context_tokens_max = 1_000_000

    def __init__(self, chat: Any, turns: int) -> None:
        stop = chat.stop_ids[0]
        calls = [
            f'<tool_call>\n{{"name": "look_up", "arguments": {{"number": {number}}}}}\n</tool_call>'
            for number in range(turns)
        ]
        self._said = [[*chat.encode(text), stop] for text in [*calls, "done"]]
        self.times: list[float] = []
        self.context = 0

    def open_session(self, order: tuple[int, ...]) -> str:
        """A session's name."""
        return ".".join(map(str, order))

    def close_session(self, session: str) -> None:
        """Nothing to close."""

    async def generate(self, request: Any) -> Generation:
        """The next line of the script."""
        self.times.append(time.process_time())
        self.context = len(request.tokens)
        tokens = self._said[request.order[-1]]
        return Generation(tokens, [-0.5] * len(tokens), "stop", [VersionSpan(0, 0, len(tokens))])


async def play(chat: Any, engine: Engine, order: tuple[int, int]) -> Episode:
    """One episode of the script."""
    return await run_episode(
        Task(fresh_prompt()),
        make_env=Library,
        chat=chat,
        inference=engine,  # type: ignore[arg-type]
        limits=EpisodeLimits(max_tokens=1_000_000, max_turns=1_000),
        rewards=[env_term()],
        session="s",
        order=order,
        seed=0,
    )


def turn_costs(chat: Any, repeats: int) -> tuple[dict[int, float], int]:
    """Seconds per turn by the turns before it, and the number of tokens of the longest conversation."""
    best = dict.fromkeys(CONTEXTS, float("inf"))
    tokens = 0
    for _ in range(repeats):
        engine = Engine(chat, max(CONTEXTS) + 1)
        episode = trio.run(play, chat, engine, (0, 0))
        assert episode.status is Status.COMPLETED and len(episode.trajectory.segments) == 1, episode.trajectory.error
        for context in CONTEXTS:
            best[context] = min(best[context], engine.times[context + 1] - engine.times[context])
        tokens = engine.context
    return best, tokens


def least(work: Callable[[], Any], repeats: int) -> float:
    """The CPU seconds of the fastest of several calls."""
    times = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def batch_of(episodes: Sequence[Episode]) -> tuple[Any, int]:
    """A batch of a step, and the number of its trained tokens."""
    samples = [sample for number, each in enumerate(episodes) for sample in episode_samples(each, number // 8, number)]
    batch = make_batch(samples, [1.0] * len(episodes), aggregation="token_mean", step=0)
    return batch, sum(1 for row in batch.rows for weight in row.loss_mask if weight > 0)


def conversation(turns: int) -> list[Message]:
    """A supervised conversation with a given number of calls."""
    messages = [Message("user", fresh_prompt())]
    for number in range(turns):
        call = ToolCall("look_up", {"number": number}, f"c{number:08d}")
        messages += [Message("assistant", "", [call]), Message("tool", f"{number}: {ANSWER}", tool_call_id=call.id)]
    return [*messages, Message("assistant", "done")]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="how often each thing is measured")
    repeats = parser.parse_args(argv).repeats
    chat = load_chat_format(load_tokenizer("tiny"))
    print(f"rollouts of {rollouts.__file__}")
    costs, tokens = turn_costs(chat, repeats)
    for context, seconds in costs.items():
        print(f"a turn with {context:2d} turns of context: {1e3 * seconds:6.2f} ms")
    print(f"({tokens} tokens in the last)")
    for context in CONTEXTS:
        said = iter([conversation(context) for _ in range(repeats)])
        seconds = least(lambda said=said: tokenize_supervised(next(said), [], chat), repeats)  # type: ignore[misc]
        print(f"supervised, {context:2d} turns: {1e3 * seconds / context:6.2f} ms a turn")
    long = [trio.run(play, chat, Engine(chat, 64), (0, 0)) for _ in range(8)]
    _, trained = batch_of(long)
    seconds = least(lambda: batch_of(long), repeats)
    print(f"samples and batch: {1e6 * seconds / trained:6.2f} us a trained token ({trained} of {8 * tokens})")
    for turns in CONTEXTS:
        engine = Engine(chat, turns)
        seconds = least(lambda engine=engine: batch_of([trio.run(play, chat, engine, (0, 0))]), repeats)  # type: ignore[misc]
        print(f"live samples of {turns:2d} turns: {1 / seconds:8.1f} a CPU second")
    return 0


if __name__ == "__main__":
    sys.exit(main())
