"""Metrics of training: a logger that writes a file, and one of your own that prints.

    python examples/training_with_metrics.py               # ten seconds on a laptop's CPU, offline
    python examples/training_with_metrics.py --steps 5

A logger has two methods, `log` and `close`. A training loop takes one logger; `Several` passes the metrics on to
several:

    step   0  policy/loss 6.78  optim/lr 0.0002  perf/train_tok_s 3.5e+03
    step  20  policy/loss 0.901  optim/lr 0.001  perf/train_tok_s 1.82e+04
    step  40  policy/loss 0.115  optim/lr 0.001  perf/train_tok_s 1.53e+04
    done
    wrote 60 lines to /tmp/.../metrics.jsonl
"""

from __future__ import annotations

import argparse
import tempfile

import trio

from rollouts import Message, Sample
from rollouts.chat import load_chat_format, tokenize_supervised
from rollouts.loggers import JSONLLogger, MetricsLogger
from rollouts.models.loading import load_tokenizer
from rollouts.training import SFTTrainingConfig, create_pytorch_backend, run_sft_training


class Printer:
    """Prints some metrics of every few steps."""

    def __init__(self, *names: str, every: int = 20) -> None:
        self.names, self.every = names, every

    def log(self, metrics: dict[str, float], step: int) -> None:
        if step % self.every == 0:
            print(f"step {step:3}", *(f"{name} {metrics[name]:.3g}" for name in self.names), sep="  ")

    def close(self) -> None:
        print("done")


class Several:
    """Passes every call on to several loggers."""

    def __init__(self, *loggers: MetricsLogger) -> None:
        self.loggers = loggers

    def log(self, metrics: dict[str, float], step: int) -> None:
        for logger in self.loggers:
            logger.log(metrics, step)

    def close(self) -> None:
        for logger in self.loggers:
            logger.close()


def conversations() -> list[Sample]:
    chat = load_chat_format(load_tokenizer("tiny"))
    asked = [[Message("user", f"What is {n} + 1?"), Message("assistant", str(n + 1))] for n in range(64)]
    rows = [row for messages in asked for row in tokenize_supervised(messages, [], chat)]
    return [Sample(tokens=row.tokens, loss_mask=row.loss_mask) for row in rows]


async def main(steps: int = 60, out: str = "") -> list[dict[str, float]]:
    out = out or tempfile.mkdtemp()
    logger = Several(JSONLLogger(out, 0), Printer("policy/loss", "optim/lr", "perf/train_tok_s"))
    backend = create_pytorch_backend("tiny", lr=1e-3, num_steps=steps, algorithm="sft")
    history = await run_sft_training(backend, conversations(), SFTTrainingConfig(steps, batch_size=16), logger)
    backend.close()
    logger.close()
    print(f"wrote {len(history)} lines to {out}/metrics.jsonl")
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    trio.run(main, parser.parse_args().steps)
