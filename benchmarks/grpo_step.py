"""Seconds per GRPO step: rollouts compared with TRL's GRPOTrainer, in one process and one run.

    OMP_NUM_THREADS=1 python benchmarks/grpo_step.py --model tiny
    OMP_NUM_THREADS=1 python benchmarks/grpo_step.py --model 60m --steps 6 --json figures.json

Both sides take the same steps: 8 calculator tasks x 8 rollouts with one tool, sampled at temperature 1 up to the same
number of tokens, one optimizer step per batch, no KL, fp32, full weights, one thread; no logs, evaluation or
checkpoints. TRL generates with transformers and runs its tool loop. Our side is the real loop (`train_rl`) with
the embedded engine and the torch backend. A block of our steps follows each block of TRL's, so that a busy machine
affects both; the first block is warm-up. CPU seconds include all threads of the process. The learning rate is so small
that both sides sample alike to the end: compare the printed tokens per reply.

`60m` is a Qwen3 of 8 layers x 768 with random weights and the tokenizer of tiny. It calls no tools, so each episode is
one reply of full length. Both sides train on replies that were cut off; a real run of rollouts would leave them out.

Needs trl and datasets (requirements-test.txt) and the calculator environment.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import trio
from datasets import Dataset
from random_model import save_random_qwen3
from rollouts_calculator import Calculator
from rollouts_calculator import evaluate as evaluate_expression
from rollouts_notes.manager import AsyncRolloutManager
from rollouts_notes.rows import RolloutConfig
from transformers import AutoTokenizer, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

from rollouts.agent.episode import run_episode
from rollouts.agent.model import EpisodeLimits
from rollouts.chat.format import load_chat_format
from rollouts.env.mixing import env_term
from rollouts.inference.base import InferenceBackend
from rollouts.inference.embedded.hf import HFInference, create_hf_inference
from rollouts.models.loading import TINY_PATH
from rollouts.training.algorithms.algorithm import Stage
from rollouts.training.algorithms.recipes import GRPO
from rollouts.training.backends.torch import create_torch_backend
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.loops.rl import Callbacks, StepReport, train_rl
from rollouts.training.loops.rl_batch import RLSettings
from rollouts.training.rollout_gen.pool import Job
from rollouts.training.weights.sync import WeightSyncManager
from rollouts.types import Episode, Status, Task

PROMPTS, MEMBERS = 8, 8
LEARNING_RATE = 1e-7
TOKENS = 16384


class Step(NamedTuple):
    """One step: CPU seconds of all threads, wall seconds, tokens sampled per rollout."""

    cpu: float
    wall: float
    tokens: float


class Clock:
    """A clock of CPU and wall seconds."""

    def __init__(self) -> None:
        self.read()

    def read(self) -> tuple[float, float]:
        """Seconds since the last read."""
        now = (time.process_time(), time.perf_counter())
        before, self._last = getattr(self, "_last", now), now
        return now[0] - before[0], now[1] - before[1]


class Ours:
    """rollouts: the parts of a run, and blocks of its steps."""

    def __init__(self, model: str, tasks: list[Task], steps: int, max_tokens: int) -> None:
        self.backend = create_torch_backend(model, 0, steps, LEARNING_RATE, 0, TOKENS, {"main": GRPO}, None)
        self.inference: HFInference = create_hf_inference(model, self.backend, 0)
        self.buffer = DataBuffer(tasks, shuffle=False)
        chat = load_chat_format(AutoTokenizer.from_pretrained(model))
        play = functools.partial(
            play_to_the_end,
            make_env=Calculator,
            chat=chat,
            limits=EpisodeLimits(max_tokens=max_tokens),
            rewards=[env_term()],
            seed=0,
        )
        self.manager = AsyncRolloutManager(
            self.buffer, RolloutConfig(PROMPTS, MEMBERS), play=play, inference=self.inference
        )
        self.parts: dict[str, float] = {}
        self._time_thread()

    def _time_thread(self) -> None:
        """Add up the CPU seconds of the torch thread's jobs by the job's name."""
        submit = self.backend.thread.submit

        def timed(function: Callable[..., Any], *args: Any) -> Any:
            def job(*given: Any) -> Any:
                start = time.thread_time()
                try:
                    return function(*given)
                finally:
                    name = function.__name__.strip("_")
                    self.parts[name] = self.parts.get(name, 0.0) + time.thread_time() - start

            return submit(job, *args)

        self.backend.thread.submit = timed  # type: ignore[method-assign,assignment]

    def block(self, count: int) -> list[Step]:
        """Take `count` steps."""
        steps: list[Step] = []
        clock = Clock()

        async def on_step(report: StepReport) -> dict[str, float]:
            cpu, wall = clock.read()
            steps.append(Step(cpu, wall, report.metrics["rollout/tokens"]))
            clock.read()
            return {}

        async def run() -> None:
            async with self.inference:
                clock.read()
                await train_rl(
                    self.backend,
                    self.manager,
                    RLSettings(count),
                    stages=[Stage(0, "main", GRPO)],
                    syncing=WeightSyncManager([self.inference]),
                    callbacks=Callbacks(on_step=on_step),
                )

        trio.run(run)
        return steps


async def play_to_the_end(job: Job, session: str, inference: InferenceBackend, **arguments: Any) -> Episode:
    """An episode whose reply is trained on even if it was cut off, as in TRL."""
    episode = await run_episode(job.task, session=session, inference=inference, order=job.order, **arguments)
    for trajectory in episode.trajectories:
        if trajectory.status is Status.TRUNCATED:
            trajectory.status = Status.COMPLETED
    return episode


class Alternate(TrainerCallback):
    """Measures the steps of TRL. After each block of them, `ours` takes a block of steps."""

    def __init__(self, ours: Ours, block: int) -> None:
        self.ours, self.size = ours, block
        self.mine: list[Step] = []
        self.theirs: list[Step] = []
        self.clock = Clock()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """The first step begins."""
        self.clock.read()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A step of TRL ended. After a block, take our steps."""
        cpu, wall = self.clock.read()
        self.theirs.append(Step(cpu, wall, self.trainer._metrics["train"]["completions/mean_length"][-1]))
        if len(self.theirs) % self.size == 0:
            if len(self.mine) == self.size:  # the end of the warm-up
                self.ours.parts.clear()
            self.mine += self.ours.block(self.size)
        self.clock.read()

    def watch(self, trainer: GRPOTrainer) -> None:
        """Register with the trainer."""
        self.trainer = trainer
        trainer.add_callback(self)


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: numbers with + - * / // % ** and parentheses, such as 12 * (3 + 4)
    """
    return evaluate_expression(expression)


def correct(prompts: Any, completions: list[list[dict[str, Any]]], answer: list[int], **_: Any) -> list[float]:
    """The reward of the calculator environment, in TRL's form."""
    found = [re.findall(r"-?\d+", str(messages[-1].get("content") or ""))[-1:] for messages in completions]
    return [float(numbers == [str(wanted)]) for numbers, wanted in zip(found, answer, strict=True)]


def make_trainer(model: str, tasks: list[Task], steps: int, max_tokens: int, folder: str) -> GRPOTrainer:
    """TRL's trainer, set to do the same work."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = (
        qwen3_template  # TRL recognizes a tool format only by the text of its template; the format is the same
    )
    rows = [{"prompt": [{"role": "user", "content": task.prompt}], "answer": task.answer} for task in tasks]
    config = GRPOConfig(
        output_dir=folder,
        max_steps=steps,
        learning_rate=LEARNING_RATE,
        per_device_train_batch_size=PROMPTS * MEMBERS,
        num_generations=MEMBERS,
        steps_per_generation=1,
        gradient_accumulation_steps=1,
        max_completion_length=max_tokens,
        temperature=1.0,
        beta=0.0,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        use_vllm=False,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    return GRPOTrainer(
        Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=correct,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        tools=[calculator],
    )


def report(name: str, alternate: Alternate, warmup: int, parts: dict[str, float]) -> dict[str, Any]:
    """Print medians and ratios, and return them as plain data."""
    mine, theirs = alternate.mine[warmup:], alternate.theirs[warmup:]
    figures: dict[str, Any] = {"model": name, "torch": torch.__version__, "steps": len(mine)}
    for label, steps in (("rollouts", mine), ("trl", theirs)):
        found = {
            "cpu_seconds": statistics.median(step.cpu for step in steps),
            "wall_seconds": statistics.median(step.wall for step in steps),
            "tokens_per_reply": statistics.fmean(step.tokens for step in steps),
        }
        figures[label] = found
        print(
            f"{label:>9}: {found['cpu_seconds']:.3f} CPU s, {found['wall_seconds']:.3f} s a step, "
            f"{found['tokens_per_reply']:.1f} tokens sampled per rollout"
        )
    for kind in ("cpu", "wall"):
        key = f"{kind}_seconds"
        figures[f"ratio_{kind}"] = figures["trl"][key] / figures["rollouts"][key]
    print(f"TRL / rollouts: {figures['ratio_cpu']:.2f} in CPU seconds, {figures['ratio_wall']:.2f} in wall seconds")
    total = statistics.fmean(step.cpu for step in mine)
    shares = {name: parts.get(job, 0.0) / len(mine) for name, job in JOBS.items()}
    shares["episodes, batching and the rest"] = total - sum(shares.values())
    figures["profile_cpu_seconds"] = shares
    print(
        "our step: " + ", ".join(f"{part} {seconds:.3f} s ({seconds / total:.0%})" for part, seconds in shares.items())
    )
    return figures


JOBS = {"generate": "run_batch", "forward and backward": "forward_backward", "optimizer": "optim_step"}


@contextlib.contextmanager
def model_folder(name: str) -> Iterator[str]:
    """The path of the named model."""
    if name == "tiny":
        yield str(TINY_PATH)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield save_random_qwen3(Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=("tiny", "60m"), default="tiny")
    parser.add_argument("--steps", type=int, default=0, help="steps measured on each side (default: tiny 40, 60m 6)")
    parser.add_argument("--max-tokens", type=int, default=0, help="of a reply (default: tiny 256, 60m 32)")
    parser.add_argument("--json", default="", help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tiny = options.model == "tiny"
    steps, block = options.steps or (40 if tiny else 6), 4 if tiny else 1
    steps = -(-steps // block) * block
    max_tokens = options.max_tokens or (256 if tiny else 32)
    source = Calculator().tasks("train", random.Random(0))
    tasks = [next(source) for _ in range(PROMPTS * (steps + block))]
    with model_folder(options.model) as model, tempfile.TemporaryDirectory() as folder:
        ours = Ours(model, tasks, steps + block, max_tokens)
        alternate = Alternate(ours, block)
        trainer = make_trainer(model, tasks, steps + block, max_tokens, folder)
        alternate.watch(trainer)
        size = sum(parameter.numel() for parameter in trainer.model.parameters())
        print(f"{options.model}, {size / 1e6:.2f} M parameters: {steps} steps of {PROMPTS} x {MEMBERS} a side")
        trainer.train()
        ours.backend.close()
    figures = report(options.model, alternate, block, ours.parts)
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
