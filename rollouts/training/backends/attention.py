"""Attention over a forest of rows, as an attention function of transformers.

A model runs a whole forest as one sequence [1, M]. Its attention layers call `attend`, which gets the forest as the
keyword argument `forest` of the model's `forward`, and no mask. There are four ways, and `plan_attention` chooses:

- *blocks*: branches of similar length run together, over the keys of their ancestors. It needs gathered copies of
  the keys, and works on every device, in every dtype
- *dense* (CUDA, one row): causal attention without a mask, with cuDNN's or the flash kernel
- *varlen* (CUDA, rows without a shared run): torch's attention over sequences of varying length
- *flex* (CUDA, with branches): torch's FlexAttention; its block mask comes from the rule `j <= i < ends[j]`

Sliding windows compare the positions of nodes, never their numbers. Not here: attention with a cache.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from rollouts.training.forest import Branch, Forest, ancestors

NAME = "rollouts_forest"
Way = Literal["blocks", "dense", "varlen", "flex"]

# A further block must save this many products of a query with a key, per head.
_BLOCK_SAVING_MIN = 8192
_FLEX_BLOCK = 128
# Arguments that change attention, beside those of `attend`. A model that uses one runs its rows in another way.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "cache")


class Block(NamedTuple):
    """Branches that run together, padded to W queries and K keys.

    `queries` [n * W] and `keys` [n * K] are node numbers; the keys of a branch are its ancestors and itself, so the
    index of a key is its position. `positions` [n, W] are those of the queries. `is_causal`: no branch has ancestors.
    """

    queries: Tensor
    keys: Tensor
    positions: Tensor
    is_causal: bool


class AttentionPlan:
    """How the layers of a model attend in one forest of M nodes. Not a tuple or a dataclass, because FSDP copies those.

    Attributes:
        way: see the top of this module
        kernel: of the ways "varlen" and "flex"
        blocks: of the way "blocks"
        places: [M] where each node is in the concatenated outputs of the blocks
        masks: for the ways "blocks" and "flex", by window; made once, and used by every layer
        bounds: of the way "varlen": where its sequences begin, and the end of the last one
        longest: of the way "varlen": the most tokens of a sequence
        windows: the sliding windows that layers asked for; None is a layer without one
        dtype: that of the queries
    """

    def __init__(self, way: Way) -> None:
        self.way = way
        self.kernel: Callable[..., Any] | None = {"varlen": _varlen, "flex": _flex}.get(way, lambda: None)()
        self.blocks: list[Block] = []
        self.places: Tensor | None = None
        self.masks: dict[Any, Any] = {}
        self.bounds: Tensor | None = None
        self.longest = 0
        self.windows: set[int | None] = set()
        self.dtype = torch.float32


def plan_attention(
    forest: Forest,
    device: torch.device,
    dtype: torch.dtype,
    *,
    windows: Sequence[int | None] = (),
    way: Way | None = None,
) -> AttentionPlan:
    """Plan the attention of a forest. `dtype` is that of queries and keys, `windows` are the sliding windows of the
    model's layers; None chooses the fastest `way`.
    """
    plan = AttentionPlan(way or _fastest(forest, device, dtype, min((each for each in windows if each), default=0)))
    if plan.way == "flex":
        from rollouts.training.backends.layers import configure_compiler

        configure_compiler()
        plan.masks = {window: _block_mask(forest, device, window) for window in windows or (None,)}
    elif plan.way == "varlen":
        starts = [branch.start for branch in forest.branches]
        # Shapes and numbers take few values, because each new one is another compilation.
        bounds = [*starts, *[len(forest.tokens)] * (_power_of_two(len(starts)) + 1 - len(starts))]
        plan.bounds = torch.tensor(bounds, dtype=torch.int32, device=device)
        plan.longest = _power_of_two(max(branch.stop - branch.start for branch in forest.branches))
    elif plan.way == "blocks":
        places = np.zeros(len(forest.tokens), dtype=np.int64)
        offset = 0
        for numbers in _similar(forest.branches):
            block = _make_block(forest.branches, numbers, device)
            plan.blocks.append(block)
            for number in numbers:
                branch = forest.branches[number]
                places[branch.start : branch.stop] = np.arange(branch.stop - branch.start) + offset
                offset += block.positions.shape[1]
        plan.places = torch.from_numpy(places).to(device)
    return plan


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    *,
    forest: AttentionPlan,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls. `query` is [1, H, M, D]; `key` and `value` have fewer heads if queries are
    grouped. Returns [1, M, H, D]. Raises NotImplementedError for a kind of attention that it does not have.
    """
    strange = [name for name in _UNSUPPORTED if others.get(name) is not None]
    if strange or attention_mask is not None or dropout:
        raise NotImplementedError(f"its attention needs {', '.join(strange) or 'a mask, or dropout'}")
    if forest.way == "blocks":
        return _attend_blocks(query, key, value, forest, sliding_window, scaling), None
    is_grouped = query.shape[1] != key.shape[1]
    if forest.way == "dense":
        found = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=is_grouped)
    elif forest.way == "flex":
        mask = forest.masks[sliding_window]
        assert forest.kernel is not None, "the plan has chosen it"
        found = forest.kernel(query, key, value, block_mask=mask, scale=scaling, enable_gqa=is_grouped)
    else:
        return _attend_varlen(query, key, value, forest, sliding_window, scaling), None
    return found.transpose(1, 2), None


@contextlib.contextmanager
def attending(networks: torch.nn.Module) -> Iterator[None]:
    """Inside the block, the models of `networks` attend over forests. Backward passes that compute activations again
    must be inside it too.
    """
    from transformers import AttentionInterface

    # Registered without a function that makes masks, so that transformers makes none.
    AttentionInterface.register(NAME, attend)
    configs = list({id(each.config): each.config for each in networks.modules() if hasattr(each, "config")}.values())
    with _lock:
        for config in configs:
            users, before = _users.get(id(config), (0, getattr(config, _SETTING, None)))
            _users[id(config)] = users + 1, before
            setattr(config, _SETTING, NAME)
    # On a GPU, cuDNN's kernel is the fastest for one long row, and torch would try it last.
    fastest = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    try:
        with sdpa_kernel(fastest, set_priority=True) if torch.cuda.is_available() else contextlib.nullcontext():
            yield
    finally:
        with _lock:
            for config in configs:
                users, before = _users.pop(id(config))
                if users > 1:  # another block, perhaps of another thread
                    _users[id(config)] = users - 1, before
                else:
                    setattr(config, _SETTING, before)


_lock = threading.Lock()
_users: dict[int, tuple[int, Any]] = {}  # of a configuration: how many blocks use it, and its own implementation
_SETTING = "_attn_implementation_internal"  # the public setter changes the configurations of all parts


def _fastest(forest: Forest, device: torch.device, dtype: torch.dtype, window: int) -> Way:
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return "blocks"
    if any(branch.parent >= 0 for branch in forest.branches):
        return "flex"
    if len(forest.branches) == 1 and not 0 < window < len(forest.tokens):
        return "dense"
    return "varlen" if _varlen() is not None else "flex"


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


# --- blocks -----------------------------------------------------------------------------------------------------------


def _similar(branches: Sequence[Branch]) -> list[list[int]]:
    """The numbers of the branches of each block, longest first. A block has only branches with ancestors, or none."""

    def products(number: int) -> int:
        width = branches[number].stop - branches[number].start
        return width * (branches[number].depth + width)

    blocks: list[list[int]] = []
    for is_root in (True, False):
        chosen = [number for number, each in enumerate(branches) if (each.parent < 0) == is_root]
        chosen.sort(key=lambda number: (-products(number), number))
        most = 0
        for place, number in enumerate(chosen):
            if not place or (most - products(number)) * (len(chosen) - place) >= _BLOCK_SAVING_MIN:
                blocks.append([])
                most = products(number)
            blocks[-1].append(number)
    return blocks


def _make_block(branches: Sequence[Branch], numbers: Sequence[int], device: torch.device) -> Block:
    chosen = [branches[number] for number in numbers]
    width = max(branch.stop - branch.start for branch in chosen)
    length = max(branch.depth + branch.stop - branch.start for branch in chosen)
    queries = np.zeros((len(chosen), width), dtype=np.int64)
    positions = np.zeros((len(chosen), width), dtype=np.int64)  # padding sees the first key, so that its row has one
    keys = np.zeros((len(chosen), length), dtype=np.int64)
    for place, branch in enumerate(chosen):
        size = branch.stop - branch.start
        queries[place, :size] = np.arange(branch.start, branch.stop)
        positions[place, :size] = np.arange(size) + branch.depth
        for each in ancestors(branches, numbers[place]):
            keys[place, each.depth : each.depth + each.stop - each.start] = np.arange(each.start, each.stop)
    of_queries, of_keys, at = (torch.from_numpy(array).to(device) for array in (queries, keys, positions))
    return Block(of_queries.reshape(-1), of_keys.reshape(-1), at, all(branch.parent < 0 for branch in chosen))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_blocks(
    query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, window: int | None, scaling: float | None
) -> Tensor:
    plan.windows.add(window)
    plan.dtype = query.dtype
    queries, keys, values = (tensor.transpose(1, 2).squeeze(0) for tensor in (query, key, value))  # [M, heads, D]
    heads, size = queries.shape[1:]
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    outputs = []
    for number, block in enumerate(plan.blocks):
        count, width = block.positions.shape
        length = len(block.keys) // count
        chosen = queries.index_select(0, block.queries).view(count, width, kv_heads, group, size)
        own_keys, own_values = (
            tensor.index_select(0, block.keys).view(count, length, kv_heads, tensor.shape[-1]).transpose(1, 2)
            for tensor in (keys, values)
        )
        if block.is_causal and window is None:
            found = scaled_dot_product_attention(
                chosen.flatten(2, 3).transpose(1, 2),
                own_keys,
                own_values,
                is_causal=True,
                scale=scaling,
                enable_gqa=group > 1,
            )
            outputs.append(found.transpose(1, 2).reshape(count * width, heads, -1))
            continue
        # The queries of a group of heads become one longer list of queries, so no key is copied for each head.
        mask = plan.masks.get((number, window))
        if mask is None:
            mask = plan.masks[number, window] = _mask(block, length, group, window, query.dtype)
        packed = chosen.permute(0, 2, 3, 1, 4).reshape(count, kv_heads, group * width, size)
        found = scaled_dot_product_attention(packed, own_keys, own_values, attn_mask=mask, scale=scaling)
        found = found.view(count, kv_heads, group, width, -1).permute(0, 3, 1, 2, 4)
        outputs.append(found.reshape(count * width, heads, -1))
    assert plan.places is not None, "the plan of blocks"
    return torch.cat(outputs).index_select(0, plan.places).unsqueeze(0)


def _mask(block: Block, length: int, group: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Added to the scores [n, 1, group * W, K]."""
    here = block.positions[:, :, None]
    there = torch.arange(length, device=here.device)
    visible = there <= here
    if window is not None:
        visible &= here - there < window
    mask = torch.zeros(visible.shape, dtype=dtype, device=here.device)
    mask.masked_fill_(~visible, torch.finfo(dtype).min)
    return mask[:, None].expand(-1, group, -1, -1).flatten(1, 2).unsqueeze(1)


# --- CUDA -------------------------------------------------------------------------------------------------------------


@functools.cache
def _varlen() -> Callable[..., Any] | None:
    try:
        found: Callable[..., Any] = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):  # older than torch 2.10
        return None
    return found if "window_size" in inspect.signature(found).parameters else None


@functools.cache
def _flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    return compiled


def _attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, window: int | None, scaling: float | None
) -> Tensor:
    assert plan.kernel is not None, "the plan has chosen it"
    group = query.shape[1] // key.shape[1]
    if group > 1:  # torch 2.11 has no grouped queries here
        key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    tensors = (tensor.transpose(1, 2).squeeze(0) for tensor in (query, key, value))
    sizes = (plan.bounds, plan.bounds, plan.longest, plan.longest)
    # A window of w tokens looks back at w - 1 of them; -1 is as far as the row reaches.
    found: Tensor = plan.kernel(*tensors, *sizes, scale=scaling, window_size=((window or 0) - 1, 0))
    return found.unsqueeze(0)


def _block_mask(forest: Forest, device: torch.device, window: int | None) -> Any:
    """The blocks of nodes that see others, from the branches. torch would compute them from all pairs of nodes."""
    from torch.nn.attention.flex_attention import BlockMask

    count, size = len(forest.tokens), _FLEX_BLOCK
    blocks = -(-count // size)
    seen = np.zeros((blocks, blocks), dtype=bool)
    for branch in forest.branches:
        seen[
            branch.start // size : (branch.end - 1) // size + 1, branch.start // size : (branch.stop - 1) // size + 1
        ] = 1
    below = np.tri(blocks, dtype=bool)
    starts = np.arange(blocks) * size
    positions = np.array(forest.positions)
    if window is not None:
        first = np.minimum.reduceat(positions, starts)[:, None]
        seen &= first - np.maximum.reduceat(positions, starts) < window
    # A block without a hidden pair is not masked in the kernel.
    ends = np.minimum.reduceat(np.array(forest.ends()), starts)
    whole = np.tri(blocks, k=-1, dtype=bool) & (ends >= starts[:, None] + size) & (window is None)
    counts, columns = zip(*(_listed(mask, device) for mask in (seen & below & ~whole, whole)), strict=True)
    rule = visibility(forest, device, window)
    return BlockMask.from_kv_blocks(
        *(counts[0], columns[0], counts[1], columns[1]), BLOCK_SIZE=size, mask_mod=rule, seq_lengths=(count, count)
    )


def _listed(mask: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each row of a mask, how many columns are true, and the columns, the true ones first."""
    order = np.argsort(~mask, axis=1, kind="stable").astype(np.int32)
    count = mask.sum(1, dtype=np.int32)
    return torch.from_numpy(count)[None, None].to(device), torch.from_numpy(order)[None, None].to(device)


def visibility(forest: Forest, device: torch.device, window: int | None) -> Callable[..., Tensor]:
    """The rule of a forest, as FlexAttention asks for it: whether node i sees node j."""
    ends, positions = torch.tensor([forest.ends(), forest.positions], device=device)

    def is_visible(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen: Tensor = (j <= i) & (i < ends[j])
        return seen if window is None else seen & (positions[i] - positions[j] < window)

    return is_visible
