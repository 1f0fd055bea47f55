"""The rows of `benchmarks/gpu.py`: random ids with the lengths of real work, and models with random weights. Speed and
memory depend on neither.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from rollouts.models.loading import TINY_PATH
from rollouts.types import Sample

__all__ = [
    "SHAPES",
    "Sizes",
    "Work",
    "group_work",
    "long_work",
    "middle_work",
    "save_model",
    "sizes_of",
    "supervised_work",
    "turn_work",
]

SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "dry": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
}
"""Qwen3-0.6B, Qwen3-4B, and a model for a dry run."""


class Sizes(NamedTuple):
    """The sizes of the work, in tokens where nothing else is said."""

    vocabulary: int
    rows: int
    median: int
    longest: int
    long: int
    groups: int
    members: int
    prompt: int
    reply: int
    turns: int
    turn_prompt: int
    thinking: int
    answer: int
    per_pass: int
    generated_rows: int
    generated_prompt: int
    generated: int


def sizes_of(scale: str) -> Sizes:
    """Full sizes, or those of a dry run."""
    if scale == "full":
        return Sizes(151936, 76, 700, 4096, 16384, 8, 8, 600, 400, 6, 200, 100, 50, 16384, 64, 128, 256)
    return Sizes(256, 8, 24, 60, 96, 2, 3, 20, 10, 3, 24, 10, 6, 128, 4, 8, 8)


class Work(NamedTuple):
    """Rows of one optimizer step. `advantages` has a number for each rollout; None: supervised rows."""

    name: str
    samples: list[Sample]
    advantages: list[float] | None

    @property
    def tokens(self) -> int:
        """Tokens of all rows; a shared prompt counts in each row."""
        return sum(len(sample.tokens) for sample in self.samples)


def save_model(shape: str, vocabulary: int, folder: Path) -> str:
    """Write a model of this shape to `folder`, with the tokenizer of tiny, if it is not there yet. Its path."""
    if (folder / "config.json").exists():
        return str(folder)
    is_real = shape != "dry"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(TINY_PATH)
    config = Qwen3Config(
        vocab_size=vocabulary,
        num_key_value_heads=8 if is_real else 2,
        head_dim=128 if is_real else 16,
        max_position_embeddings=40960,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,  # the weights of this token would be 0, and untrained
        **SHAPES[shape],
    )
    torch.manual_seed(0)
    with torch.device(device):
        causal = Qwen3ForCausalLM(config)
    causal.to(torch.bfloat16 if is_real else torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def _ids(generator: random.Random, count: int, vocabulary: int) -> list[int]:
    return [generator.randrange(vocabulary) for _ in range(count)]


def _quantiles(count: int, median: float, spread: float, longest: int) -> list[int]:
    """Log-normal lengths without chance: the same for each seed, and of a known sum."""
    steps = (NormalDist().inv_cdf((number + 0.5) / count) for number in range(count))
    return [min(longest, max(2, round(median * math.exp(spread * step)))) for step in steps]


def _supervised(name: str, lengths: Sequence[int], vocabulary: int) -> Work:
    generator = random.Random(0)
    rows = [_ids(generator, length, vocabulary) for length in lengths]
    generator.shuffle(rows)
    return Work(name, [Sample(tokens=row, loss_mask=[1.0] * len(row)) for row in rows], None)


def supervised_work(sizes: Sizes) -> Work:
    """Rows of very different lengths; all tokens are trained."""
    lengths = _quantiles(sizes.rows, sizes.median, 0.64, sizes.longest)
    return _supervised(f"{sizes.rows} rows, median {sizes.median}", [*lengths[:-1], sizes.longest], sizes.vocabulary)


def middle_work(sizes: Sizes) -> Work:
    """Half as many rows, of 1,000 to 2,000 tokens at full size; all tokens are trained."""
    count, median = max(4, sizes.rows // 2), 2 * sizes.median
    lengths = _quantiles(count, median, 0.16, sizes.longest)
    return _supervised(f"{count} rows, median {median}", lengths, sizes.vocabulary)


def long_work(sizes: Sizes) -> Work:
    """Two long rows."""
    return _supervised(f"2 rows of {sizes.long:,}", [sizes.long] * 2, sizes.vocabulary)


def _sampled(context: list[int], reply: list[int], rollout: int, group: int, prompt: int, sizes: Sizes) -> Sample:
    """A row whose last tokens were sampled. The model is random, so all tokens are about equally probable."""
    before = len(context)
    return Sample(
        tokens=context + reply,
        loss_mask=[0.0] * before + [1.0] * len(reply),
        rollout_log_probs=[0.0] * before + [-math.log(sizes.vocabulary)] * len(reply),
        policy_versions=[-1] * before + [0] * len(reply),
        group_index=group,
        rollout_index=rollout,
        prompt_length=prompt,
    )


def group_work(sizes: Sizes) -> Work:
    """Groups of rollouts, whose members share a prompt."""
    generator = random.Random(0)
    samples: list[Sample] = []
    lengths = _quantiles(sizes.groups * sizes.members, sizes.reply, 0.5, 3 * sizes.reply)
    generator.shuffle(lengths)
    for group in range(sizes.groups):
        prompt = _ids(generator, sizes.prompt, sizes.vocabulary)
        for _ in range(sizes.members):
            reply = _ids(generator, lengths[len(samples)], sizes.vocabulary)
            samples.append(_sampled(prompt, reply, len(samples), group, sizes.prompt, sizes))
    name = f"{sizes.groups} x {sizes.members}, prompt {sizes.prompt}, reply {sizes.reply}"
    return Work(name, samples, [(-1.0) ** number for number in range(len(samples))])


def turn_work(sizes: Sizes) -> Work:
    """Rollouts of several turns, with a row for each turn: a later turn does not see the thinking of an earlier one."""
    generator = random.Random(0)
    samples: list[Sample] = []
    groups, count = 2, sizes.vocabulary
    for group in range(groups):
        prompt = _ids(generator, sizes.turn_prompt, count)
        for member in range(sizes.members):
            context = prompt
            for _ in range(sizes.turns):
                thinking, answer = _ids(generator, sizes.thinking, count), _ids(generator, sizes.answer, count)
                rollout = group * sizes.members + member
                samples.append(_sampled(context, thinking + answer, rollout, group, sizes.turn_prompt, sizes))
                context = context + answer
    name = f"{groups} x {sizes.members} x {sizes.turns} turns, rewritten history"
    return Work(name, samples, [(-1.0) ** number for number in range(groups * sizes.members)])
