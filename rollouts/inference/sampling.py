"""Random numbers that belong to one request, and the step from logits to ids and logprobs.

Each request has its own stream, keyed by its seed and nothing else, and spends one number per token. Sampling inverts
the cumulative distribution at that number, so neither the size of a batch nor the order of its rows can touch
anyone's draw. Left out: top-p, top-k, min-p (the trainer would have to replay them, see numerics.md).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["UniformStream", "sample"]

BLOCK = 64  # numbers drawn at a time; part of what a seed means


class UniformStream:
    """Uniform float32 numbers in [0, 1 - 2**-24], decided by the seed alone.

    >>> UniformStream(7).draw() == UniformStream(7).draw()
    True

    With an `offset` the first so many numbers are spent already:

    >>> first, second = UniformStream(7), UniformStream(7, offset=1)
    >>> [first.draw(), first.draw()][1] == second.draw()
    True
    """

    def __init__(self, seed: int, offset: int = 0) -> None:
        assert offset >= 0, offset
        self._generator = np.random.Generator(np.random.Philox(key=seed % 2**128))
        self._block: list[float] = []
        for _ in range(offset // BLOCK):
            self._generator.random(BLOCK, dtype=np.float32)
        for _ in range(offset % BLOCK):
            self.draw()

    def draw(self) -> float:
        """The next number; the generator is asked for a block at a time."""
        if not self._block:
            self._block = self._generator.random(BLOCK, dtype=np.float32).tolist()
            self._block.reverse()
        return self._block.pop()


def sample(logits: Tensor, uniforms: list[float], temperatures: list[float]) -> tuple[list[int], list[float]]:
    """One id and its logprob for each row.

    `logits` is [n, V] in any float type; `uniforms` [n] in [0, 1); `temperatures` [n], where 0 means the likeliest
    id, with its logprob at temperature 1. Logprobs are natural logarithms, computed in float32, never above 0. An id
    of probability 0 is never drawn. A row whose logits are not finite gets a NaN logprob.
    """
    assert logits.shape[0] == len(uniforms) == len(temperatures), (logits.shape, len(uniforms), len(temperatures))
    scores = logits.float()
    if any(t not in (0.0, 1.0) for t in temperatures):
        divisors = torch.tensor([t or 1.0 for t in temperatures], device=logits.device)
        scores = scores / divisors.unsqueeze(1)
    logprobs = torch.log_softmax(scores, dim=-1)
    ids = _invert(logprobs, torch.tensor(uniforms, device=logits.device))
    if 0.0 in temperatures:
        greedy = torch.tensor([t == 0.0 for t in temperatures], device=logits.device)
        ids = torch.where(greedy, logprobs.argmax(dim=-1), ids)
    chosen = logprobs.gather(1, ids.unsqueeze(1)).squeeze(1)
    # Both answers in one transfer: on an accelerator each one waits for the device.
    packed = torch.stack((ids.int(), chosen.view(torch.int32))).cpu().numpy()
    drawn, values = packed[0].tolist(), packed[1].view(np.float32).tolist()
    for row, value in enumerate(values):
        if value == -np.inf:
            drawn[row], values[row] = _draw_exactly(logprobs[row], uniforms[row])
    return drawn, values


def _invert(logprobs: Tensor, uniforms: Tensor) -> Tensor:
    """The first id whose cumulative probability exceeds the number [n]; `right` steps over ids of probability 0."""
    cumulative = logprobs.exp().cumsum(dim=-1)
    thresholds = uniforms.unsqueeze(1) * cumulative[:, -1:]  # always below the total, as a number is at most 1 - 2**-24
    ids = torch.searchsorted(cumulative, thresholds, right=True).squeeze(1)
    return ids.clamp_max_(logprobs.shape[1] - 1)  # only a NaN row needs it


def _draw_exactly(logprobs: Tensor, uniform: float) -> tuple[int, float]:
    """The same draw in float64 on the host: a parallel sum on an accelerator need not be monotone to the last bit."""
    probabilities = logprobs.double().exp().cpu().numpy()
    cumulative = np.cumsum(probabilities)
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return index, float(logprobs[index])
