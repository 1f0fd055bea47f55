"""The part `kernels` of `benchmarks/gpu.py`: attention over forests, compared with dense attention, and its speed.

The nodes of a forest are in depth-first order, and `end[j]` is one past the last descendant of j. Node j is visible to
node i if `j <= i < end[j]`. This one rule describes causality, rows that are packed, and prompts that are shared.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch._dynamo
from gpu_limit import dense, varlen
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

__all__ = ["check_kernels", "time_kernels"]

Attention = Callable[..., Tensor]
FLOOR = {torch.float32: 1e-4, torch.bfloat16: 1e-2}


def random_ends(count: int, generator: random.Random) -> list[int]:
    """`end` of a random forest. A node continues the last one, or branches off one of its ancestors, or is a root."""
    ends = [count] * count
    branch: list[int] = []  # the ancestors of the next node
    for node in range(count):
        if generator.random() < 0.05:
            common = generator.randrange(len(branch) + 1)
            for left in branch[common:]:
                ends[left] = node
            branch = branch[:common]
        branch.append(node)
    return ends


def rows_ends(lengths: Sequence[int]) -> list[int]:
    """`end` of rows without branches."""
    ends: list[int] = []
    for length in lengths:
        ends += [len(ends) + length] * length
    return ends


def group_ends(groups: int, prompt: int, replies: Sequence[int]) -> list[int]:
    """`end` of groups with one prompt each, from which replies of these lengths branch off."""
    ends: list[int] = []
    for _ in range(groups):
        ends += [len(ends) + prompt + sum(replies)] * prompt
        for reply in replies:
            ends += [len(ends) + reply] * reply
    return ends


def dense_mask(end: Tensor) -> Tensor:
    """The rule of visibility as [query, key]."""
    positions = torch.arange(len(end), device=end.device)
    return (positions <= positions[:, None]) & (positions[:, None] < end)


def flex(end: Tensor, *, compiled: bool) -> Attention:
    """FlexAttention of a forest over [T, heads, size], with the mask that comes from `end`."""

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key])

    make, attention = (_compiled_mask(), _compiled_flex()) if compiled else (create_block_mask, flex_attention)
    mask = make(visible, None, None, len(end), len(end), device=end.device)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        return attention(*batch, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)  # type: ignore[no-any-return]

    return call


@functools.cache
def _compiled_flex() -> Any:
    torch._dynamo.config.recompile_limit = 64  # a kernel for each size and dtype; beyond the limit it would not compile
    return torch.compile(flex_attention, dynamic=False)


@functools.cache
def _compiled_mask() -> Any:
    return torch.compile(create_block_mask, dynamic=False)


class Heads(NamedTuple):
    """The heads of queries and of keys, and the size of each."""

    queries: int
    keys: int
    size: int


def make_inputs(count: int, heads: Heads, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Random queries, keys, values, and an outer gradient: [T, heads, size]."""
    torch.manual_seed(count)
    numbers = (heads.queries, heads.keys, heads.keys, heads.queries)
    return [torch.randn(count, number, heads.size).to(device, dtype) for number in numbers]


def results(attention: Attention, inputs: Sequence[Tensor], gradients: bool) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values."""
    *tensors, outer = inputs
    if not gradients:
        with torch.no_grad():
            return [attention(*tensors)]
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output = attention(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, outer)]


def error(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest relative difference of the tensors, by norm."""
    pairs = zip(actual, expected, strict=False)  # without gradients, only the outputs
    return max(float((one.float() - other).norm() / other.norm()) for one, other in pairs)


def furthest(name: str, dtype: torch.dtype, device: str, forests: int) -> tuple[float, float]:
    """The largest difference from dense attention in float32, over random forests or rows: of the kernel, and of dense
    attention in this dtype.
    """
    on_gpu, generator = device != "cpu", random.Random(0)
    heads, count = (Heads(4, 2, 64), 512) if on_gpu else (Heads(4, 2, 16), 160)
    far = yardstick = 0.0
    for number in range(forests):
        size = count if number % 2 else count - 77  # not a multiple of a block
        lengths = [size // 3, size // 2, size - size // 3 - size // 2]
        end = torch.tensor(random_ends(size, generator) if name == "flex" else rows_ends(lengths), device=device)
        inputs = make_inputs(size, heads, device, dtype)
        plain = functools.partial(dense, mask=dense_mask(end))
        expected = results(plain, [tensor.float() for tensor in inputs], True)
        attention = flex(end, compiled=on_gpu) if name == "flex" else packed(lengths, device)
        far = max(far, error(results(attention, inputs, on_gpu), expected))
        yardstick = max(yardstick, error(results(plain, inputs, True), expected))
    return far, yardstick


def check_kernels(device: str, add: Callable[..., None], forests: int) -> None:
    """Compare the kernels with dense attention in float32. Raises AssertionError if one of them fails, or is further
    away than dense attention in its dtype, by more than a factor of two.
    """
    what = "forward" if device == "cpu" else "forward and gradients"  # FlexAttention has no gradients on a CPU
    cases = [("flex", torch.float32), ("flex", torch.bfloat16), ("varlen", torch.bfloat16)]
    failed = []
    for name, dtype in cases:
        case = f"{name}, {str(dtype).removeprefix('torch.')}"
        if name == "varlen" and device == "cpu":
            add(case=case, note="runs on CUDA only")
            continue
        try:
            far, yardstick = furthest(name, dtype, device, forests)
        except RuntimeError as wrong:
            add(case=case, note=str(wrong)[:300])
            failed.append(f"{case} failed")
            continue
        bound = max(2 * yardstick, FLOOR[dtype])
        add(case=case, what=what, difference=far, dense_difference=yardstick, bound=bound)
        failed += [f"{case}: {far:.1e} > {bound:.1e}"] if not far <= bound else []
    assert not failed, f"kernels differ from dense attention: {'; '.join(failed)}"


def packed(lengths: Sequence[int], device: str) -> Attention:
    """Varlen attention of rows end to end."""
    ends = torch.tensor([sum(lengths[:number]) for number in range(len(lengths) + 1)], dtype=torch.int32, device=device)
    return functools.partial(varlen, cu_seqlens=ends, longest=max(lengths))


def padded(rows: int) -> Attention:
    """Dense causal attention over a batch of rows that are padded to one length."""

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (tensor.view(rows, -1, *tensor.shape[1:]).transpose(1, 2) for tensor in (query, key, value))
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return output.transpose(1, 2).flatten(0, 1)

    return call


def preferring(backends: Sequence[SDPBackend], attention: Attention) -> Attention:
    """The attention with only these backends of torch."""

    def call(*inputs: Tensor) -> Tensor:
        with sdpa_kernel(list(backends)):
            return attention(*inputs)

    return call


def milliseconds(call: Callable[[], Any], device: str, repeats: int) -> float:
    """One call, after three that do not count."""
    for _ in range(3):
        call()
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if device != "cpu":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / repeats


def cases(device: str) -> list[tuple[str, str, int, Callable[[], Attention]]]:
    """Work, kernel, tokens with padding, and what makes the attention."""
    on_gpu = device != "cpu"
    long = 16384 if on_gpu else 192
    rows = [long // 48, long // 24, long // 12, long // 24] * 5
    rows += [long - sum(rows)] if long > sum(rows) else []
    groups, prompt, replies = (4, 696, [200, 250, 300, 350, 400, 500, 600, 800]) if on_gpu else (2, 12, [5, 8])
    unrolled = [prompt + reply for _ in range(groups) for reply in replies]
    shared = group_ends(groups, prompt, replies)
    tensor = functools.partial(torch.tensor, device=device)
    causal = functools.partial(dense, mask=None)
    one, many, trees = f"one row of {long:,}", f"{len(rows)} rows, {long:,}", f"{groups} x {len(replies)} replies"
    all_cases: list[tuple[str, str, int, Callable[[], Attention]]] = [
        (one, "dense, torch's choice", long, lambda: causal),
        (one, "flex", long, lambda: flex(tensor(rows_ends([long])), compiled=on_gpu)),
        (many, "dense, padded", len(rows) * max(rows), lambda: padded(len(rows))),
        (many, "flex", sum(rows), lambda: flex(tensor(rows_ends(rows)), compiled=on_gpu)),
        (trees, "flex, prompts shared", len(shared), lambda: flex(tensor(shared), compiled=on_gpu)),
        (
            trees,
            "dense mask, prompts shared",
            len(shared),
            lambda: functools.partial(dense, mask=dense_mask(tensor(shared))),
        ),
    ]
    if on_gpu:
        cudnn, flash = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
        all_cases += [
            (one, "dense, cuDNN", long, lambda: preferring([cudnn], causal)),
            (one, "dense, flash", long, lambda: preferring([flash], causal)),
            (one, "varlen", long, lambda: packed([long], device)),
            (many, "varlen", sum(rows), lambda: packed(rows, device)),
            (trees, "varlen, prompts repeated", sum(unrolled), lambda: packed(unrolled, device)),
        ]
    return sorted(all_cases, key=lambda case: (one, many, trees).index(case[0]))


def time_kernels(device: str, add: Callable[..., None]) -> None:
    """Milliseconds of a call, forward, and forward with gradients, with the heads of Qwen3-0.6B."""
    on_gpu = device != "cpu"
    heads = Heads(16, 8, 128) if on_gpu else Heads(4, 2, 16)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    for work, kernel, count, make in cases(device):
        try:
            start = time.perf_counter()
            attention = make()
            *tensors, outer = make_inputs(count, heads, device, dtype)
            can = on_gpu or not kernel.startswith("flex")
            leaves = [tensor.requires_grad_(can) for tensor in tensors]

            def both(attention: Attention = attention, leaves: list[Tensor] = leaves, outer: Tensor = outer) -> None:
                torch.autograd.grad(attention(*leaves), leaves, outer)

            (both if can else functools.partial(attention, *leaves))()
            first = time.perf_counter() - start
            with torch.no_grad():
                forward = milliseconds(functools.partial(attention, *leaves), device, 10)
            whole = milliseconds(both, device, 10) if can else None
            add(work=work, kernel=kernel, tokens=count, forward_ms=forward, both_ms=whole, first_seconds=first)
        except RuntimeError as wrong:  # a backend that this GPU or this build lacks
            add(work=work, kernel=kernel, tokens=count, note=str(wrong).splitlines()[0][:120])
