"""What does it cost to prepare conversations for supervised training, in one process and with a cache?

    OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false python benchmarks/prepare_conversations.py
    OMP_NUM_THREADS=1 python benchmarks/prepare_conversations.py --rows 200000 --processes 8
    OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false python benchmarks/prepare_conversations.py --check --rows 100000

First, conversations of four turns with a tool call and about 370 tokens: how many per CPU second the tokenizer alone
encodes of the rendered text (one at a time, and in batches without offsets), the chat template and tokenizer of
transformers prepare with its own masks (as TRL's SFTTrainer does), and rollouts prepares in one process; and from rows
to files, rollouts and TRL (if it is installed). Every figure is the best of several passes over a few conversations,
taken in turns, because other programs on the machine slow passes down.
Then, from trajectories: samples per CPU second beside a plain
concatenation of lists. Then a file of a million short conversations (`--rows`), whose preparation is killed half-way
and continues: seconds, the peak of the process's memory above what it had before, the peak of a process that tokenizes,
and the size of the index in memory.
With `--check`: the share of the check of masks in the whole preparation of a file of 51 shapes of messages, with 40 and
100 words in a message. The check's CPU time is taken within the preparation, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rollouts.chat import ChatFormat, load_chat_format
from rollouts.chat.masks import encode_rows
from rollouts.data.conversations import read_conversation
from rollouts.data.source import open_rows
from rollouts.models.loading import load_tokenizer
from rollouts.training.datasets.chat_rows import ChatOptions, Planned, plan_rows
from rollouts.training.datasets.prepared import Preparer, prepare
from rollouts.training.samples import episode_samples
from rollouts.types import Episode, Score, Segment, Status, Task, Trajectory

ALONE = "the tokenizer alone"
WORDS = "the answer of this sum is easy to find with a calculator so I use it and then I say what it gave me ".split()


def conversation(number: int) -> dict[str, Any]:
    text = " ".join(WORDS[(number + n) % len(WORDS)] for n in range(40))
    call = {"name": "calculator", "arguments": {"expression": f"{number} + 1"}}
    return {
        "messages": [
            {"role": "user", "content": f"What is {number} + 1? {text}"},
            {"role": "assistant", "content": text, "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "content": str(number + 1)},
            {"role": "assistant", "content": f"It is {number + 1}. {text}"},
        ]
    }


def short(number: int) -> dict[str, Any]:
    """Two turns, about 40 tokens."""
    text = f"What is {number} + 1?"
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": f"It is {number + 1}."}]}


def per_cpu_second(count: int, functions: Mapping[str, Callable[[], Any]], passes: int) -> dict[str, float]:
    """How many per second of CPU, of functions that each do `count`: the best of several passes."""
    best = dict.fromkeys(functions, 0.0)
    for _ in range(passes):
        for name, function in functions.items():
            start = time.process_time()
            function()
            best[name] = max(best[name], count / (time.process_time() - start))
    return best


def from_text(count: int, model: str) -> None:
    tokenizer = load_tokenizer(model)
    chat = load_chat_format(tokenizer)
    rows = [conversation(number) for number in range(count)]
    read = [read_conversation(row) for row in rows]
    texts = [chat.render(each.messages, [], False) for each in read]
    backend = tokenizer.backend_tokenizer

    def ours() -> Any:
        planned = [plan_rows(read_conversation(row), chat) for row in rows]
        return planned, encode_rows([text for each in planned for text in each.texts], chat)

    def checked() -> None:
        planned, rows = ours()
        encoded = iter(rows)
        for each in planned:
            each.check([next(encoded) for _ in each.texts], chat)

    figures: dict[str, Callable[[], Any]] = {
        ALONE: lambda: [chat.encode(text) for text in texts],
        "the tokenizer alone, in batches": lambda: [
            each.ids for each in backend.encode_batch_fast(texts, add_special_tokens=False)
        ],
        "transformers, template alone": lambda: [
            tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in rows
        ],
        "transformers, template and tokens": lambda: [tokenizer.apply_chat_template(row["messages"]) for row in rows],
        "rollouts, template alone": lambda: [plan_rows(each, chat) for each in read],
        "rollouts, rows with masks": ours,
        "rollouts, masks checked": checked,
    }
    if "{% generation" in str(tokenizer.chat_template) or "{%- generation" in str(tokenizer.chat_template):
        figures["transformers with masks (TRL)"] = lambda: [
            tokenizer.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
            for row in rows
        ]
    results = per_cpu_second(count, figures, 10) | whole_files(list(map(conversation, range(1000))), chat)
    for name, result in results.items():
        share = result / results[ALONE]
        print(f"{name:<36} {result:9.0f} conversations per CPU second  {share:6.2f} of the tokenizer alone")


def whole_files(rows: list[dict[str, Any]], chat: ChatFormat) -> dict[str, float]:
    """Rows per CPU second from rows to prepared files: of `prepare`, and of TRL's SFTTrainer if it is installed."""

    def ours() -> None:
        with tempfile.TemporaryDirectory() as folder:
            preparer = Preparer(chat.tokenizer, {}, ChatOptions(), chat)
            prepare([("", row) for row in rows], preparer, processes=1, folder=Path(folder))

    figures = {"rollouts, whole preparation": ours}
    try:
        import datasets
        from trl import SFTTrainer
    except ImportError:
        return per_cpu_second(len(rows), figures, 5)
    datasets.disable_caching()
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_list([{"messages": row["messages"]} for row in rows])
    trainer = SimpleNamespace(chat_template=None, completion_only_loss=False, _tokenizer=chat.tokenizer)
    settings = SimpleNamespace(
        dataset_num_proc=None,
        dataset_text_field="text",
        assistant_only_loss=True,
        max_length=None,
        shuffle_dataset=False,
    )
    figures["TRL, whole preparation"] = lambda: SFTTrainer._prepare_dataset(
        trainer, data, chat.tokenizer, settings, False, None, "train"
    )
    return per_cpu_second(len(rows), figures, 5)


def from_trajectories(count: int) -> None:
    length = 400
    segments = [
        Segment(
            list(range(length)),
            [0.0] * 200 + [1.0] * 200,
            [0.0] * 200 + [-0.5] * 200,
            [-1] * 200 + [3] * 200,
            [(turn, 200)],
        )
        for turn in range(2)
    ]
    task = Task("a")
    trajectory = Trajectory(task, task.messages, segments, Status.COMPLETED, {"turns": 2.0})
    episode = Episode((0, 0), task, [trajectory], Score(1.0), {})
    streams = ("tokens", "loss_mask", "logprobs", "versions")

    def plain() -> Any:
        return [[value for segment in segments for value in getattr(segment, name)] for name in streams]

    def repeated(function: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(count):
                function()

        return run

    figures = {"live": repeated(lambda: episode_samples(episode, 0, 0)), "joined": repeated(plain)}
    live, joined = per_cpu_second(count, figures, 10).values()
    print(f"samples of a trajectory {live:9.0f} per CPU second, plain concatenation {joined:9.0f}: {live / joined:.2f}")


def shaped(number: int, words: int) -> dict[str, Any]:
    """A conversation of one to six messages: with or without a system message, thoughts, and calls of four forms."""
    rng = random.Random(number)
    has_system, form, of_call, thinks = number % 2, number // 2 % 4, number // 8 % 4, number // 32 % 2

    def said(role: str, **more: Any) -> dict[str, Any]:
        return {"role": role, "content": " ".join(rng.choices(WORDS, k=words)), **more}

    def reply() -> dict[str, Any]:
        return said("assistant", reasoning_content=said("")["content"]) if thinks else said("assistant")

    def called(count: int) -> list[dict[str, Any]]:
        text, a, b = said("")["content"], rng.randrange(99), rng.random()
        arguments = ({"text": text}, {"a": a, "b": a}, {"text": text, "tags": ["x"], "exact": True}, {"b": b})[of_call]
        calls = [
            {"id": f"call{n:05d}", "function": {"name": "calculator", "arguments": arguments}} for n in range(count)
        ]
        return [said("assistant", tool_calls=calls), *(said("tool", tool_call_id=call["id"]) for call in calls)]

    turns = ([], [reply(), said("user")], called(1), called(2))[form]
    return {"messages": [*[said("system")][:has_system], said("user"), *turns, reply()]}


def share_of_check(count: int, model: str) -> None:
    check, seconds = Planned.check, 0.0

    def timed(*given: Any) -> list[str]:
        nonlocal seconds
        start = time.thread_time()
        found = check(*given)
        seconds += time.thread_time() - start
        return found

    for words in (40, 100):
        chat, seconds = load_chat_format(load_tokenizer(model)), 0.0
        with tempfile.TemporaryDirectory() as folder:
            file, Planned.check = Path(folder) / "chat.jsonl", timed  # type: ignore[method-assign]
            with file.open("w") as out:
                out.writelines(json.dumps(shaped(number, words)) + "\n" for number in range(count))
            start = time.process_time()
            prepare(
                open_rows(str(file)),
                Preparer(chat.tokenizer, {}, ChatOptions(), chat),
                processes=1,
                folder=Path(folder),
            )
            whole = time.process_time() - start
        print(
            f"{words} words: the check takes {seconds / count * 1e6:.0f} of {whole / count * 1e6:.0f} microseconds "
            f"a row ({seconds / (whole - seconds):.1%} of the rest); {len(chat.shapes)} shapes",
            flush=True,
        )


def prepare_file(file: str, cache: str, processes: int) -> None:
    chat = load_chat_format(load_tokenizer("tiny"))
    preparer = Preparer(chat.tokenizer, {}, ChatOptions(), chat)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    before, start = pages * resource.getpagesize() / 2**20, time.perf_counter()
    found = prepare(open_rows(file), preparer, processes=processes, folder=Path(cache))
    seconds = time.perf_counter() - start
    own, worker = (resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    index = (found.file_of, found.starts, found.ends, found.first_rows, found.positions)
    size = sum(map(sys.getsizeof, index)) / len(found)
    print(
        f"prepared {len(found)} conversations in {seconds:.1f} s; {own - before:.0f} MiB above the start ({before:.0f} "
        f"MiB), at most {worker:.0f} MiB in another process; {size:.0f} bytes of index for each row",
        flush=True,
    )


def killed_and_resumed(count: int, processes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file, cache = Path(folder) / "chat.jsonl", Path(folder) / "cache"
        with file.open("w") as out:
            out.writelines(json.dumps(short(number)) + "\n" for number in range(count))
        command = [sys.executable, __file__, "--file", str(file), "--cache", str(cache), "--processes", str(processes)]
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        pieces = -(-count // 2048)
        while child.poll() is None and len(list(cache.glob("*/*.safetensors"))) < pieces // 2:
            time.sleep(0.2)
        child.send_signal(signal.SIGKILL)
        child.wait()
        time.sleep(1)
        print(
            f"killed with {len(list(cache.glob('*/[!.]*.safetensors')))} of {pieces} pieces written; then:", flush=True
        )
        for _ in range(2):
            subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--file", default="")
    parser.add_argument("--cache", default="")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    if given.check:
        share_of_check(given.rows, given.model)
        return
    if given.file:
        prepare_file(given.file, given.cache, given.processes)
        return
    from_text(min(given.rows, 200), given.model)
    from_trajectories(200)
    killed_and_resumed(given.rows, given.processes)


if __name__ == "__main__":
    main()
