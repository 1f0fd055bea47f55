"""Supervised training on rows of very different lengths: tokens per CPU second, compared with bare loops and with the
SFTTrainer of trl 1.16.

    OMP_NUM_THREADS=1 python benchmarks/sft.py --model tiny
    OMP_NUM_THREADS=1 python benchmarks/sft.py --model 58m --blocks 2
    OMP_NUM_THREADS=1 python benchmarks/sft.py --model 58m --blocks 2 --lora-rank 8
    OMP_NUM_THREADS=1 python benchmarks/sft.py --model tiny --vocabulary 32000 --trained-share 0.4

A block is one epoch over the same rows (random ids, log-normal lengths between 32 and 1,024), so every side trains on
the same tokens. The sides take turns, in another order for each block, and the first block is warm-up. All tokens are
trained on; with `--trained-share`, only the last part of each row, like a reply after a prompt. The figures count all
tokens of the rows, trained on or not, without padding, per CPU second of all threads (`time.process_time`). The sides:

- ours, padded: `train_sft` with the torch backend, rows as a forest, or padded to the longest;
- bare sorted: a torch loop that sorts the epoch by length and fills each pass with rows of nearly equal length;
- bare blocks: a torch loop over all tokens end to end, cut into full blocks without padding and without regard to rows.
  The length of a block is the one at which attention costs as much as in the rows;
- trl: SFTTrainer plain, grouped (batches of similar length), packed (best-fit decreasing, one pack of 1,024 per pass)
and
  single (one row per pass, gradients accumulated over the batch).

The bare loops run the transformers model, `cross_entropy` over whole logits, and fused AdamW. They compute no metrics,
clip no gradients and choose their rows freely, so they are a bound and not a trainer. Each runs with several sizes of
pass (in tokens), and the fastest counts. All sides use fp32, no dropout, no gradient checkpointing, no logs, and the
same number of tokens per optimizer step.

Needs trl and datasets (requirements-test.txt).
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import trio
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from random_model import save_random_qwen3
from torch.nn import functional
from transformers import AutoTokenizer, Qwen3ForCausalLM, TrainerCallback
from trl import SFTConfig, SFTTrainer

from rollouts.training.algorithms.recipes import SFT
from rollouts.training.backends.optimizer import TorchSettings
from rollouts.training.backends.torch import create_torch_backend
from rollouts.training.loops.sft import SFTSettings, train_sft
from rollouts.types import Sample

LEARNING_RATE = 1e-6
LENGTH_MIN, LENGTH_MEDIAN, LENGTH_MAX, LENGTH_SPREAD = 32, 160, 1024, 0.9
GROUPS = {"ours": ("ours", "padded"), "bare": ("bare",), "trl": ("trl",)}

IGNORED = -100  # the label of a token that is not trained


class Row(NamedTuple):
    """A row: its token ids, and its labels, with IGNORED for tokens that are not trained on."""

    ids: list[int]
    labels: list[int]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def trained(self) -> int:
        """The number of tokens that are trained on."""
        return sum(label != IGNORED for label in self.labels)


Rows = list[Row]


def make_rows(count: int, vocabulary_size: int, trained_share: float) -> Rows:
    """Rows of random ids with log-normal lengths. The last `trained_share` of each is trained on."""
    generator = random.Random(0)
    rows: Rows = []
    for _ in range(count):
        length = round(generator.lognormvariate(math.log(LENGTH_MEDIAN), LENGTH_SPREAD))
        length = min(max(length, LENGTH_MIN), LENGTH_MAX)
        ids = [generator.randrange(vocabulary_size) for _ in range(length)]
        first = round(length * (1 - trained_share))
        rows.append(Row(ids, [IGNORED] * first + ids[first:]))
    return rows


def load(model: str, lora_rank: int) -> Any:
    """The model for a bare loop or for TRL: all weights, or adapters like ours."""
    causal = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32)
    if not lora_rank:
        return causal
    config = LoraConfig(
        r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    return get_peft_model(causal, config)


class Ours:
    """rollouts: `train_sft` over the torch backend."""

    def __init__(self, model: str, rows: Rows, options: argparse.Namespace, layout: str) -> None:
        masks = [[float(label != IGNORED) for label in row.labels] for row in rows]
        self.samples = [
            Sample(tokens=row.ids, loss_mask=mask, reward=0.0) for row, mask in zip(rows, masks, strict=True)
        ]
        self.config = SFTSettings(len(rows) // options.batch, options.batch)
        self.tokens = sum(map(len, rows))
        self.backend = create_torch_backend(
            model,
            0,
            1000,
            LEARNING_RATE,
            options.lora_rank,
            options.tokens_per_microbatch,
            {"main": SFT},
            None,
            settings=TorchSettings(layout=layout),  # type: ignore[arg-type]
        )
        self.history: list[dict[str, float]] = []

    def block(self) -> float:
        """Train one epoch; CPU seconds."""
        start = time.process_time()
        self.history = trio.run(train_sft, self.backend, self.samples, self.config)
        return time.process_time() - start

    def loss(self) -> float:
        """Mean loss of the last epoch."""
        return statistics.fmean(metrics["policy/loss"] for metrics in self.history)


class Bare:
    """A torch loop without a trainer. `passes` are lists of rows, which are padded to one length. The optimizer takes a
    step after `step_tokens` trained tokens.
    """

    def __init__(self, causal: Any, optimizer: torch.optim.Optimizer, passes: list[Rows], step_tokens: float) -> None:
        self.causal, self.optimizer, self.passes, self.step_tokens = causal, optimizer, passes, step_tokens
        self.tokens = sum(len(row) for rows in passes for row in rows)
        self.losses: list[float] = []

    def block(self) -> float:
        """Train one epoch; CPU seconds."""
        start = time.process_time()
        seen, self.losses = 0, []
        for number, rows in enumerate(self.passes, 1):
            width = max(map(len, rows))
            ids = torch.tensor([row.ids + [0] * (width - len(row)) for row in rows])
            labels = torch.tensor([row.labels + [IGNORED] * (width - len(row)) for row in rows])
            logits = self.causal(input_ids=ids, use_cache=False).logits
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
            count = sum(row.trained for row in rows)
            (loss / self.step_tokens).backward()  # type: ignore[no-untyped-call]
            self.losses.append(loss.item() / max(count, 1))
            seen += count
            if seen >= self.step_tokens or number == len(self.passes):
                self.optimizer.step()
                self.optimizer.zero_grad()
                seen = 0
        return time.process_time() - start

    def loss(self) -> float:
        """Mean loss of the last epoch, over passes."""
        return statistics.fmean(self.losses)


def sorted_passes(rows: Rows, tokens: int) -> list[Rows]:
    """Rows sorted by length, in passes of at most `tokens` padded tokens. The passes are shuffled."""
    passes: list[Rows] = []
    for row in sorted(rows, key=len):
        if passes and (len(passes[-1]) + 1) * len(row) <= tokens:
            passes[-1].append(row)
        else:
            passes.append([row])
    random.Random(0).shuffle(passes)
    return passes


def block_passes(rows: Rows, tokens: int) -> list[Rows]:
    """All tokens end to end, in blocks of one length and passes of about `tokens` tokens. The rest is left out.

    With this length, a token attends to as many tokens on average as in its row. Shorter blocks would cost less.
    """
    ids = [token for row in rows for token in row.ids]
    labels = [label for row in rows for label in row.labels]
    length = round(sum(len(row) ** 2 for row in rows) / len(ids))
    starts = range(0, len(ids) - length + 1, length)
    blocks = [Row(ids[start : start + length], labels[start : start + length]) for start in starts]
    size = max(1, round(tokens / length))
    return [blocks[start : start + size] for start in range(0, len(blocks), size)]


class Clock(TrainerCallback):
    """Measures CPU seconds from the first step of TRL to the end of the last."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """The first step begins."""
        self.start = time.process_time()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """The epoch ended."""
        self.seconds = time.process_time() - self.start


class Trl:
    """SFTTrainer. A block is one `train()` of one epoch. The time before its first step does not count."""

    def __init__(self, model: str, rows: Rows, options: argparse.Namespace, way: str, folder: str) -> None:
        self.tokens = sum(map(len, rows))
        steps = len(rows) // options.batch
        singly = way in ("packed", "single")
        packs = max(1, round(self.tokens / LENGTH_MAX / steps))
        config = SFTConfig(
            output_dir=folder,
            num_train_epochs=1,
            learning_rate=LEARNING_RATE,
            per_device_train_batch_size=1 if singly else options.batch,
            gradient_accumulation_steps={"packed": packs, "single": options.batch}.get(way, 1),
            train_sampling_strategy="sequential" if way == "grouped" else "random",
            packing=way == "packed",
            max_length=LENGTH_MAX,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            logging_strategy="no",
            save_strategy="no",
            eval_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=0,
        )
        # With so few rows, "group_by_length" groups nothing. Sorted rows are the best that it could do.
        ordered = sorted(rows, key=len, reverse=True) if way == "grouped" else rows
        self.clock = Clock()
        self.trainer = SFTTrainer(
            load(model, options.lora_rank),
            args=config,
            train_dataset=Dataset.from_list([{"input_ids": row.ids, "labels": row.labels} for row in ordered]),
            processing_class=AutoTokenizer.from_pretrained(model),
            callbacks=[self.clock],
        )
        held = sum(map(len, self.trainer.train_dataset["input_ids"]))
        assert held == self.tokens, f"TRL was given {self.tokens} tokens and holds {held}"
        self.found = 0.0

    def block(self) -> float:
        """Train one epoch; CPU seconds."""
        self.found = self.trainer.train().training_loss
        return self.clock.seconds

    def loss(self) -> float:
        """Mean loss of the last epoch, over steps."""
        return self.found


def make_sides(model: str, rows: Rows, options: argparse.Namespace, folder: str) -> dict[str, Callable[[], Any]]:
    """The function that makes each side, by name."""
    step_tokens = sum(row.trained for row in rows) / (len(rows) // options.batch)
    sides: dict[str, Callable[[], Any]] = {
        "ours": functools.partial(Ours, model, rows, options, "auto"),
        "padded": functools.partial(Ours, model, rows, options, "padded"),
    }

    @functools.cache
    def bare() -> tuple[Any, torch.optim.Optimizer]:
        causal = load(model, options.lora_rank)
        trained = [parameter for parameter in causal.parameters() if parameter.requires_grad]
        return causal, torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)

    for tokens in options.bare_tokens:
        for name, cut in (("sorted", sorted_passes), ("blocks", block_passes)):
            passes = cut(rows, tokens)
            sides[f"bare {name} {tokens}"] = lambda passes=passes: Bare(*bare(), passes, step_tokens)  # type: ignore[misc]
    for way in ("plain", "grouped", "packed", "single"):
        sides[f"trl {way}"] = functools.partial(Trl, model, rows, options, way, folder)
    return {name: make for name, make in sides.items() if name.startswith(tuple(options.sides))}


def measure(sides: dict[str, Any], blocks: int) -> dict[str, list[float]]:
    """Tokens per CPU second of every block after the first."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(blocks + 1):
        names = list(sides)
        random.Random(number).shuffle(names)
        for name in names:
            speed = sides[name].tokens / sides[name].block()
            print(f"block {number}: {name} {speed:,.0f}", flush=True)
            if number:
                found[name].append(speed)
    return found


def report(sides: dict[str, Any], found: dict[str, list[float]]) -> dict[str, Any]:
    """Print medians and ratios, and return them as plain data."""
    medians = {name: statistics.median(speeds) for name, speeds in found.items()}
    for name, speed in medians.items():
        spread = f"{min(found[name]):,.0f} to {max(found[name]):,.0f}"
        print(f"{name:>18}: {speed:8,.0f} tokens per CPU second ({spread}), loss {sides[name].loss():.3f}")
    best = {
        group: max((name for name in medians if name.startswith(starts)), key=medians.__getitem__, default="")
        for group, starts in GROUPS.items()
    }
    figures: dict[str, Any] = {"tokens_per_cpu_second": medians, "blocks": found, "best": best, "ratios": {}}
    for other in ("bare", "trl"):
        if best["ours"] and best[other]:
            ratio = medians[best["ours"]] / medians[best[other]]
            figures["ratios"][other] = ratio
            print(f"{best['ours']} / {best[other]}: {ratio:.2f}")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="Supervised training beside bare loops and TRL's SFTTrainer")
    parser.add_argument("--model", choices=("tiny", "58m"), default="tiny")
    parser.add_argument("--vocabulary", type=int, default=0, help="words of the tied head; 0: the tokenizer's 469")
    parser.add_argument("--trained-share", type=float, default=1.0, help="of each row's tokens, the last ones")
    parser.add_argument("--lora-rank", type=int, default=0, help="of adapters on every side; 0 trains all weights")
    parser.add_argument("--steps", type=int, default=0, help="optimizer steps a block (default: tiny 4, 58m 1)")
    parser.add_argument("--batch", type=int, default=0, help="rows a step (default: tiny 32, 58m 16)")
    parser.add_argument("--blocks", type=int, default=5, help="blocks measured, after the warm-up")
    parser.add_argument("--tokens-per-microbatch", type=int, default=2048, help="of ours")
    parser.add_argument("--bare-tokens", type=int, nargs="+", default=[1024, 2048], help="of a pass of a bare loop")
    parser.add_argument("--sides", nargs="+", default=["ours", "padded", "bare", "trl"], help="how their names begin")
    parser.add_argument("--json", default="", help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="trl|transformers|peft|torch")
    tiny = options.model == "tiny"
    steps, options.batch = options.steps or (4 if tiny else 1), options.batch or (32 if tiny else 16)
    with tempfile.TemporaryDirectory() as folder:
        model = save_random_qwen3(Path(folder), tiny_shape=tiny, vocabulary=options.vocabulary)
        vocabulary = options.vocabulary or len(AutoTokenizer.from_pretrained(model))
        rows = make_rows(steps * options.batch, vocabulary, options.trained_share)
        tokens = sum(map(len, rows))
        trained = sum(row.trained for row in rows)
        print(
            f"{options.model}, {vocabulary:,} words: {steps} steps of {options.batch} rows a block, {tokens:,} tokens"
        )
        print(f"{trained:,} of the tokens are trained")
        sides = {name: make() for name, make in make_sides(model, rows, options, folder).items()}
        figures = report(sides, measure(sides, options.blocks))
        for side in sides.values():
            if isinstance(side, Ours):
                side.backend.close()
    if options.json:
        shared = {
            "model": options.model,
            "vocabulary": vocabulary,
            "trained_share": options.trained_share,
            "lora_rank": options.lora_rank,
            "torch": torch.__version__,
            "tokens": tokens,
        }
        Path(options.json).write_text(json.dumps(shared | figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
