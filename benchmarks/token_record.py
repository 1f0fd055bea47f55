"""What `--record tokens` costs: CPU seconds of the training part of a step with and without it, and bytes a token.

    OMP_NUM_THREADS=1 python benchmarks/token_record.py
    OMP_NUM_THREADS=1 python benchmarks/token_record.py --steps 30 --models tiny
    OMP_NUM_THREADS=1 python benchmarks/token_record.py --steps 3 --prompts 1 --models 58M    # for a slow machine

Rollouts are random tokens. A step here is `forward_backward`, `optim_step` and the trajectories' file; with recording,
also the file of the tokens. A run's step also samples, so the share of a run's step is smaller.

`share` is the seconds inside the functions that record (`RECORDERS`, and the file), as a part of a step without them:
the median over steps. It has little noise, but misses what recording costs elsewhere, such as caches. `ratio` is that
of the median steps with and without recording, which take turns; a busy machine moves it by more than recording does.
CPU seconds are those of all threads of the process; with OMP_NUM_THREADS=1 a recorder's are those of its thread.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from random_model import save_random_qwen3

from rollouts.runs.folder import RunFolder
from rollouts.runs.jobs.saving import step_records
from rollouts.runs.token_files import encode_table, token_table
from rollouts.training.algorithms.recipes import GRPO
from rollouts.training.backends import torch as torch_backend
from rollouts.training.backends.metric_sums import TokenRecord
from rollouts.training.backends.optimizer import TorchSettings
from rollouts.training.backends.torch import TorchBackend, create_torch_backend
from rollouts.training.batching import make_batch
from rollouts.training.loops.rl import LoopState, StepReport
from rollouts.training.rollout_gen.groups import Group, group_samples
from rollouts.types import Episode, Score, Segment, Status, Task, Trajectory


def make_groups(prompts: int, members: int, reply: int, vocabulary: int) -> list[Group]:
    """Groups of random tokens: prompts of 64, replies of about `reply`."""
    generator, task, groups = random.Random(0), Task("random"), []
    for number in range(prompts):
        prompt, episodes = [generator.randrange(vocabulary) for _ in range(64)], []
        for member in range(members):
            length = generator.randint(reply // 2, reply * 3 // 2)
            tokens = prompt + [generator.randrange(vocabulary) for _ in range(length)]
            segment = Segment(
                tokens, [0.0] * 64 + [1.0] * length, [0.0] * 64 + [-3.0] * length, [-1] * 64 + [0] * length
            )
            own = [Trajectory(task, task.messages, [segment], Status.COMPLETED)]
            episodes.append(Episode((number, member), task, own, Score(member % 2, {}, ""), {}))
        groups.append(Group(number, task, tuple(episodes)))
    return groups


RECORDERS = ((TokenRecord, "__init__"), (TokenRecord, "add"), (TokenRecord, "read"), (torch_backend, "join_records"))


class Recording:
    """The seconds of CPU inside the functions that record. Enter it to measure them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._threads = set[int]()  # that are inside one of the functions

    def __enter__(self) -> Recording:
        for owner, name in RECORDERS:
            setattr(owner, name, self.timed(getattr(owner, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name in RECORDERS:
            setattr(owner, name, getattr(owner, name).__wrapped__)

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its seconds counted."""

        @functools.wraps(function)
        def inner(*given: Any, **more: Any) -> Any:
            thread = threading.get_ident()
            if thread in self._threads:
                return function(*given, **more)
            self._threads.add(thread)
            began = time.thread_time()
            try:
                return function(*given, **more)
            finally:
                self.seconds += time.thread_time() - began
                self._threads.discard(thread)

        return inner


def take_step(
    backend: TorchBackend, groups: list[Group], folder: RunFolder, step: int, recording: Recording | None
) -> float:
    """Train on the groups and write the files; record if `recording` is given. Returns the seconds of CPU."""
    samples = group_samples(groups)
    advantages = [math.sin(3.0 * n + 1) for n in range(1 + max(s.rollout_index or 0 for s in samples))]
    batch = make_batch(samples, advantages, aggregation=GRPO.aggregation, step=step)
    batch.record = recording is not None
    began = time.process_time()
    backend.forward_backward(batch).wait()
    backend.optim_step().wait()
    folder.write_trajectories(f"step_{step:06d}", step_records(StepReport(step, {}, groups, advantages, LoopState())))
    if recording is not None:
        write = recording.timed(
            lambda: folder.write_tokens(f"step_{step:06d}", encode_table(token_table(groups, [batch])))
        )
        write()
    return time.process_time() - began


def measure(name: str, steps: int, prompts: int, reply: int, place: Path) -> dict[str, object]:
    """The figures of one model."""
    model = save_random_qwen3(place / name, tiny_shape=name == "tiny")
    backend = create_torch_backend(model, 0, steps, 1e-6, 0, 16384, {"main": GRPO}, None, settings=TorchSettings())
    groups = make_groups(prompts, 8, reply, 100)
    folder = RunFolder(place / f"run-{name}")
    seconds: dict[bool, list[float]] = {True: [], False: []}
    inside: list[float] = []
    for step in range(2 * steps + 2):
        with Recording() as recording:
            taken = take_step(backend, groups, folder, step, recording if step % 2 == 0 else None)
        if step >= 2:  # the first steps warm up
            seconds[step % 2 == 0].append(taken)
            inside += [recording.seconds] * (step % 2 == 0)
    backend.close()
    folder.close()
    tokens = sum(sum(group.lengths) for group in groups)
    files = {end: (folder.path / f"trajectories/step_000000.{end}").stat().st_size for end in ("jsonl", "tokens")}
    with_it, without = statistics.median(seconds[True]), statistics.median(seconds[False])
    return {
        "model": name,
        "tokens": tokens,
        "seconds_without": round(without, 4),
        "seconds_with": round(with_it, 4),
        "ratio": round(with_it / without, 4),
        "seconds_inside": round(statistics.median(inside), 5),
        "share": round(statistics.median(inside) / without, 5),
        "bytes_per_token": round(files["tokens"] / tokens, 1),
        "bytes_per_token_jsonl": round(files["jsonl"] / tokens, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10, help="steps of each way")
    parser.add_argument("--prompts", type=int, default=4, help="groups of 8 rollouts in a step")
    parser.add_argument("--reply", type=int, default=48, help="mean tokens of a reply")
    parser.add_argument("--models", nargs="+", choices=("tiny", "58M"), default=["tiny", "58M"])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        for name in given.models:
            print(json.dumps(measure(name, given.steps, given.prompts, given.reply, Path(place))))


if __name__ == "__main__":
    main()
