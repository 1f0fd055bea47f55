"""Logprobs and entropy for a large vocabulary: peak memory and CPU seconds, compared with log_softmax + gather +
entropy.

    OMP_NUM_THREADS=1 python benchmarks/logprobs.py [--tokens 8192 --vocabulary 151936 --hidden 1024] [--json out.json]

Both sides compute the logprobs and the entropy of a linear head in fp32 with random weights, forward and backward.

Memory: each measurement has its own process. It allocates weights and hidden states, runs a small case to start the
libraries, and reads the largest resident set so far (`ru_maxrss`) before and after the computation. The extra memory is
the difference without the gradients of weights and hidden states. glibc maps blocks of this size one by one and returns
them when they are freed, so the small blocks that it keeps hardly count. The naive figure is for one chunk of tokens,
the chunked figure for all tokens: ratio = chunked, all tokens / naive, one chunk.

Time: medians of CPU seconds, in turn in one process, for `--time-tokens` tokens. The naive side needs about 5 times
tokens x vocabulary x 4 bytes, so it must fit into memory. The chunked side computes four matrix products, and the naive
side three. Much of the naive side's time is the kernel's, which provides new pages; an allocator that keeps pages would
save it. So the seconds without the kernel's are printed too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from rollouts.training.algorithms.logprobs import CHUNK_ELEMENTS_MAX, logprobs_and_entropy

Scorer = Callable[[nn.Linear, Tensor, Tensor], tuple[Tensor, Tensor]]


def naive(head: nn.Linear, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The naive side."""
    logp = torch.log_softmax(head(hidden), -1)
    return logp.gather(-1, targets[:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)


def chunked(head: nn.Linear, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The chunked side: ours."""
    return logprobs_and_entropy(head, hidden, targets, vocabulary_size=head.out_features)


SCORERS: dict[str, Scorer] = {"naive": naive, "chunked": chunked}


def make(tokens: int, vocabulary: int, width: int) -> tuple[nn.Linear, Tensor, Tensor]:
    """A head, hidden states and targets."""
    torch.manual_seed(0)
    head = nn.Linear(width, vocabulary, bias=False)
    hidden = torch.randn(tokens, width).requires_grad_()
    return head, hidden, torch.randint(vocabulary, (tokens,))


def run(scorer: Scorer, head: nn.Linear, hidden: Tensor, targets: Tensor) -> None:
    """Forward and backward."""
    head.weight.grad = hidden.grad = None
    logprobs, entropy = scorer(head, hidden, targets)
    (logprobs.sum() + 0.01 * entropy.sum()).backward()


def peak_bytes() -> int:
    """The largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure_memory(which: str, tokens: int, vocabulary: int, width: int) -> int:
    """Extra bytes in this process."""
    torch.set_num_threads(1)
    run(SCORERS[which], *make(8, 512, width))
    head, hidden, targets = make(tokens, vocabulary, width)
    before = peak_bytes()
    run(SCORERS[which], head, hidden, targets)
    return peak_bytes() - before - 4 * (head.weight.numel() + hidden.numel())


def memory_apart(which: str, tokens: int, vocabulary: int, width: int) -> int:
    """`measure_memory` in a fresh process."""
    command = [sys.executable, __file__, "--measure", which, "--tokens", str(tokens)]
    command += ["--vocabulary", str(vocabulary), "--hidden", str(width)]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    return int(done.stdout)


def measure_time(tokens: int, vocabulary: int, width: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Median CPU seconds of both sides, in turn: all seconds, and those without the kernel's."""
    problem = make(tokens, vocabulary, width)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in SCORERS}
    for _ in range(rounds):
        for name, scorer in SCORERS.items():
            before = os.times()
            run(scorer, *problem)
            after = os.times()
            user = after.user - before.user
            seconds[name].append((user + after.system - before.system, user))
    return {
        name: (statistics.median(both for both, _ in found), statistics.median(user for _, user in found))
        for name, found in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--time-tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("memory", "time"))
    parser.add_argument("--json", default="", help="write the figures to this file")
    parser.add_argument("--measure", choices=sorted(SCORERS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = (options.vocabulary, options.hidden)
    if options.measure:
        print(measure_memory(options.measure, options.tokens, *size))
        return
    torch.set_num_threads(1)
    print(f"vocabulary {size[0]}, hidden {size[1]}, torch {torch.__version__}")
    figures: dict[str, float] = {}
    if options.only != "time":
        chunk = max(1, CHUNK_ELEMENTS_MAX // options.vocabulary)
        one, whole = memory_apart("naive", chunk, *size), memory_apart("chunked", options.tokens, *size)
        figures |= {"naive_chunk_mib": one / 2**20, "chunked_mib": whole / 2**20, "memory_ratio": whole / one}
        print(f"naive, one chunk of {chunk} tokens: {one / 2**20:.0f} MiB beyond weights, states and their gradients")
        print(f"chunked, all {options.tokens} tokens: {whole / 2**20:.0f} MiB, ratio {whole / one:.2f}")
    if options.only != "memory":
        found = measure_time(options.time_tokens, *size, options.rounds)
        for place, (kind, words) in enumerate((("cpu", "CPU s"), ("user", "CPU s without the kernel's"))):
            ours, theirs = found["chunked"][place], found["naive"][place]
            figures |= {f"naive_{kind}_seconds": theirs, f"chunked_{kind}_seconds": ours}
            figures[f"{kind}_ratio"] = ours / theirs
            print(f"{options.time_tokens} tokens: naive {theirs:.2f}, chunked {ours:.2f} {words}, {ours / theirs:.2f}")
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
