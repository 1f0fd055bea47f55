"""Generation alone: the embedded engine compared with transformers' `model.generate`, for replies of 8 to 128 tokens.

    OMP_NUM_THREADS=1 python benchmarks/generation.py [--layers 8 --hidden 768] [--profile]

Both sample the same prompts at temperature 1, each row up to its own length. A stopping criterion ends the rows of
`generate` one by one, as an end-of-turn token would. Our engine also returns logprobs; `generate` does not. The figures
are medians of CPU seconds. The two take turns in one run, so that a noisy machine affects both. `--profile` shows the
parts of a decode step.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, StoppingCriteria, StoppingCriteriaList

from rollouts.inference.embedded.decode import Decoder, sample, uniforms
from rollouts.inference.embedded.decode_slots import DecodeRow, Network

Workload = list[tuple[list[int], int]]  # prompt, length of the reply


class RowLengths(StoppingCriteria):
    """Ends row i after `lengths[i]` new tokens."""

    def __init__(self, prompt_length: int, lengths: list[int]) -> None:
        self.ends = torch.tensor(lengths) + prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        return input_ids.shape[1] >= self.ends


def make_model(options: argparse.Namespace) -> Any:
    """A Qwen3 with random weights."""
    torch.manual_seed(0)
    heads = options.hidden // 32
    config = Qwen3Config(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


def make_workload(options: argparse.Namespace, shared: bool) -> Workload:
    """Prompts of 24 to 64 tokens: one for each group, or one for each row."""
    chance = random.Random(1)
    rows: Workload = []
    for _ in range(options.groups):
        prompt = [chance.randrange(options.vocabulary) for _ in range(chance.randrange(24, 65))]
        for _ in range(options.members):
            if not shared:
                prompt = [chance.randrange(options.vocabulary) for _ in range(chance.randrange(24, 65))]
            rows.append((prompt, chance.randrange(8, 129)))
    return rows


def run_ours(engine: Decoder, work: Workload) -> int:
    """Tokens sampled."""
    rows = [
        DecodeRow(prompt, length, frozenset(), 1.0, uniforms(seed), None) for seed, (prompt, length) in enumerate(work)
    ]
    engine.run(rows, 0, lambda done: None)
    return sum(len(row.sampled) for row in rows)


def run_generate(model: Any, work: Workload) -> int:
    """Tokens sampled, without padding."""
    longest = max(len(prompt) for prompt, _ in work)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in work])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in work])
    lengths = [length for _, length in work]
    model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=max(lengths),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        pad_token_id=0,
        eos_token_id=options_eos(model),
        stopping_criteria=StoppingCriteriaList([RowLengths(longest, lengths)]),
    )
    return sum(lengths)


def options_eos(model: Any) -> int:
    """An id that is never sampled. `generate` needs an end-of-sequence id to pad rows that ended."""
    return int(model.config.vocab_size)


def cpu_seconds(function: Callable[[], Any]) -> float:
    """CPU seconds of one call, in all threads."""
    start = time.process_time()
    function()
    return time.process_time() - start


def compare(model: Any, work: Workload, repeats: int, label: str) -> float:
    """Print both and return the median ratio."""
    engine = Decoder(model, rows_max=256, cache_bytes=1 << 32, prefill_tokens_max=1 << 14)
    sides: list[Callable[[], Any]] = [lambda: run_ours(engine, work), lambda: run_generate(model, work)]
    tokens = run_ours(engine, work)
    assert run_generate(model, work) == tokens
    pairs = [tuple(cpu_seconds(side) for side in sides) for _ in range(repeats)]
    ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(theirs / ours for ours, theirs in pairs)
    print(
        f"{label:<32} {len(work)} rows, {tokens} tokens   ours {ours:.3f} s ({tokens / ours:,.0f} tok/s)   "
        f"generate {theirs:.3f} s ({tokens / theirs:,.0f} tok/s)   ratio {ratio:.2f}"
    )
    return ratio


def profile(model: Any, work: Workload) -> None:
    """The time of the parts of a decode step: forward pass, sampling, and the rest (inputs, masks, bookkeeping)."""
    import rollouts.inference.embedded.decode as decode_module

    spent = {"forward": 0.0, "sampling": 0.0}
    engine = Decoder(model, rows_max=256, cache_bytes=1 << 32, prefill_tokens_max=1 << 14)
    run_ours(engine, work)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            result = function(*args, **kwargs)
            spent[name] += time.process_time() - start
            return result

        return call

    forward, passes = Network.forward, engine.statistics.passes
    Network.forward = timed("forward", forward)  # type: ignore[method-assign]
    decode_module.sample = timed("sampling", sample)
    try:
        total = cpu_seconds(lambda: run_ours(engine, work))
    finally:
        Network.forward, decode_module.sample = forward, sample  # type: ignore[method-assign]
    passes = engine.statistics.passes - passes
    spent["rest"] = total - sum(spent.values())
    parts = ", ".join(f"{name} {1e6 * part / passes:.0f} us ({part / total:.0%})" for name, part in spent.items())
    print(f"one of {passes} passes: {1e6 * total / passes:.0f} us: {parts}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = make_model(options)
    print(
        f"Qwen3, {options.layers} layers x {options.hidden}, {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M"
    )
    compare(model, make_workload(options, shared=True), options.repeats, "groups share prompts")
    compare(model, make_workload(options, shared=False), options.repeats, "each row its own prompt")
    if options.profile:
        profile(model, make_workload(options, shared=True))


if __name__ == "__main__":
    main()
