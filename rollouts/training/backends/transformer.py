"""Rows of token ids through a causal language model: features at chosen positions, and the head that makes logits of
them.

Four things make this fast where a padded batch through `model(...)` is slow: the head runs on chosen positions only; a
prompt that several rows share goes through once and the rows continue its keys and values, with gradients; rows are
padded to similar ones; or, packed, several rows are one sequence without padding, in which positions begin again and no
row sees another (`run_packed`). Each is checked once against the model's own logits (`inspect_model`) and left where it
does not agree. Right padding needs no mask: what comes later is not seen under causal attention. Left out: packing rows
that share a prompt; packing under a mask where layers see a window only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollouts.training.batching import Layout, plan_layout
from rollouts.training.types import Row

__all__ = ["ModelPaths", "Selection", "inspect_model", "prefers_packing", "run_packed", "run_rows"]

# These find packed rows by their positions and skip what no row sees; the others get a mask and compute all of it.
_SKIPPING = ("flash_attention_2", "flex_attention")
_MASKING = ("sdpa", "eager")

_Way = Literal["plain", "shared", "packed"]


class ModelPaths(NamedTuple):
    """How to run one model.

    `body(**inputs)` gives features [R, C, F] and a cache; `head(features [t, F])` gives logits [t, vocabulary_size].
    `share_prefix` says whether shared prompts may run once, `packs` whether rows may be packed; `notes` says in words
    what could not be used, and why.
    """

    causal: Any
    body: Callable[..., tuple[Tensor, Any]]
    head: Callable[[Tensor], Tensor]
    vocabulary_size: int
    share_prefix: bool
    packs: bool = False
    notes: tuple[str, ...] = ()


class Selection(NamedTuple):
    """Which token each of the T selected features predicts: `rows` [P] numbers and, for each, `positions` in that
    row.
    """

    rows: list[int]
    positions: list[Sequence[int]]


def inspect_model(causal: Any, *, share_prefix: bool = True) -> ModelPaths:
    """Find the fastest way to run this model that agrees with its own logits to 1e-4 (fp32)."""
    paths = _separate_head(causal)
    rows = _probe_rows(_embedding_count(causal))
    notes: list[str] = []
    with torch.no_grad():
        own = causal(input_ids=_padded([row.tokens for row in rows], _device(causal)), use_cache=False).logits
        full = _full_logits(causal, own.shape[-1])
        expected = _probe(full, rows, "plain")
        if paths is None:
            paths, reason = full, "it does not show its output embeddings"
        else:
            paths, reason = _first_that_agrees(paths, full, rows, expected)
        if reason:
            notes.append(f"the whole logits are computed, for {reason}")
        if share_prefix:
            reason = _why_not_shared(causal) or _disagreement(paths, rows, expected, "shared")
            if reason:
                notes.append(f"shared prompts are not run once, for {reason}")
            paths = paths._replace(share_prefix=not reason)
        reason = _why_not_packed(causal) or _disagreement(paths, rows, expected, "packed")
        if reason:
            notes.append(f"rows are not packed, for {reason}")
        paths = paths._replace(packs=not reason)
    return paths._replace(notes=tuple(notes))


def prefers_packing(causal: Any) -> bool:
    """Whether packing is faster than buckets of similar length: only where attention skips what its mask hides."""
    return _attention(causal) in _SKIPPING


def run_rows(
    paths: ModelPaths, rows: Sequence[Row], layout: Layout, wanted: Sequence[Sequence[int]]
) -> tuple[Tensor, Selection]:
    """Features [T, F] that predict the tokens at `wanted` positions (each >= 1) of every row, and which they are."""
    device = _device(paths.causal)
    cache = None
    pieces: list[Tensor] = []
    selection = Selection([], [])
    if layout.prefixes:
        features, cache = paths.body(input_ids=_padded(layout.prefixes, device), use_cache=True)
        earlier = [[t for t in wanted[row] if t <= layout.starts[row]] for row in range(len(rows))]
        if any(earlier):
            offsets = [layout.prefix_of_row[row] * features.shape[1] - 1 for row in range(len(rows))]
            pieces.append(_select(features, offsets, earlier, selection, list(range(len(rows)))))
    for bucket in layout.buckets:
        rests = [rows[row].tokens[layout.starts[row] :] for row in bucket]
        inputs: dict[str, Any] = {"input_ids": _padded(rests, device), "use_cache": False}
        if layout.prefix_of_row[bucket[0]] >= 0:
            inputs |= _continue(paths.causal, rows, layout, bucket, cache, inputs["input_ids"].shape[1])
        features, _ = paths.body(**inputs)
        width = features.shape[1]
        later = [[t for t in wanted[row] if t > layout.starts[row]] for row in bucket]
        offsets = [place * width - 1 - layout.starts[row] for place, row in enumerate(bucket)]
        if any(later):
            pieces.append(_select(features, offsets, later, selection, bucket))
    assert pieces, "no position was asked for"
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)), selection


def run_packed(
    paths: ModelPaths, rows: Sequence[Row], bins: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]
) -> tuple[Tensor, Selection]:
    """As `run_rows`, each bin of row numbers (algorithms/packing.py) run as one sequence [1, sum of lengths]."""
    pieces: list[Tensor] = []
    selection = Selection([], [])
    for chosen in bins:
        positions = [list(wanted[row]) for row in chosen]
        if not any(positions):
            continue
        features, _ = paths.body(**_pack(paths.causal, [rows[row].tokens for row in chosen]))
        ends = np.cumsum([len(rows[row].tokens) for row in chosen]).tolist()
        offsets = [start - 1 for start in (0, *ends[:-1])]
        pieces.append(_select(features, offsets, positions, selection, list(chosen)))
    assert pieces, "no position was asked for"
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)), selection


def _pack(causal: Any, tokens: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Inputs [1, L] of rows one after another: positions that begin again at 0, and a mask [1, 1, L, L] under which
    each row sees itself only. Where attention skips, transformers reads the rows' bounds from the positions.
    """
    device = _device(causal)
    lengths = [len(row) for row in tokens]
    inputs: dict[str, Any] = {
        "input_ids": torch.tensor([[token for row in tokens for token in row]], device=device),
        "position_ids": torch.tensor([[t for length in lengths for t in range(length)]], device=device),
        "use_cache": False,
    }
    if _attention(causal) not in _SKIPPING:
        row_of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
        visible = (row_of[:, None] == row_of).tril_()
        dtype = _hidden_dtype(causal)
        mask = torch.zeros(1, 1, *visible.shape, dtype=dtype, device=device)
        inputs["attention_mask"] = mask.masked_fill_(~visible, torch.finfo(dtype).min)
    return inputs


def _select(
    features: Tensor, offsets: list[int], positions: list[list[int]], selection: Selection, numbers: list[int]
) -> Tensor:
    """The features [t, F] at offset + position; notes down in `selection` which tokens those are."""
    index = [offset + t for offset, chosen in zip(offsets, positions, strict=True) for t in chosen]
    for number, chosen in zip(numbers, positions, strict=True):
        if chosen:
            selection.rows.append(number)
            selection.positions.append(chosen)
    return features.reshape(-1, features.shape[-1]).index_select(0, torch.tensor(index, device=features.device))


def _continue(
    causal: Any, rows: Sequence[Row], layout: Layout, bucket: list[int], cache: Any, width: int
) -> dict[str, Any]:
    """Inputs that let the rows of a bucket continue their prefixes: cache, positions [R, C], mask [R, 1, C, P + C]."""
    device = _device(causal)
    prefix_width = max(len(prefix) for prefix in layout.prefixes)
    prefix_of_row = torch.tensor([layout.prefix_of_row[row] for row in bucket], device=device)
    starts = np.array([layout.starts[row] for row in bucket])
    lengths = np.array([len(rows[row].tokens) for row in bucket])
    # Padding repeats the row's last position: a table of positions may end there.
    positions = np.minimum(starts[:, None] + np.arange(width), lengths[:, None] - 1)
    visible = np.zeros((len(bucket), 1, width, prefix_width + width), dtype=bool)
    visible[..., :prefix_width] = (np.arange(prefix_width) < starts[:, None])[:, None, None]
    visible[..., prefix_width:] = np.tri(width, dtype=bool)
    dtype = _hidden_dtype(causal)
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(torch.from_numpy(~visible), torch.finfo(dtype).min)
    branch = copy.copy(cache)
    branch.layers = [copy.copy(layer) for layer in cache.layers]
    branch.reorder_cache(prefix_of_row)
    return {
        "attention_mask": mask.to(device),
        "position_ids": torch.from_numpy(positions).to(device),
        "past_key_values": branch,
        "use_cache": True,
    }


def _padded(tokens: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Token ids [R, C], padded on the right with 0."""
    ids = np.zeros((len(tokens), max(len(row) for row in tokens)), dtype=np.int64)
    for place, row in enumerate(tokens):
        ids[place, : len(row)] = row
    return torch.from_numpy(ids).to(device)


def _separate_head(causal: Any) -> ModelPaths | None:
    """Body and head apart, with the logit scalings that configurations of the known families ask for."""
    base, embeddings = causal.base_model, causal.get_output_embeddings()
    if embeddings is None or base is causal:
        return None
    config = causal.config.get_text_config(decoder=True)
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)

    def body(**inputs: Any) -> tuple[Tensor, Any]:
        output = base(**inputs)
        return output.last_hidden_state, getattr(output, "past_key_values", None)  # a recurrent model has none

    size = embeddings.weight.shape[0]
    if scale == 1.0 and not cap:
        return ModelPaths(causal, body, embeddings, size, share_prefix=False)  # a plain layer has a path of its own

    def head(features: Tensor) -> Tensor:
        logits: Tensor = embeddings(features)
        if scale != 1.0:
            logits = logits * scale
        return torch.tanh(logits / cap) * cap if cap else logits

    return ModelPaths(causal, body, head, size, share_prefix=False)


def _full_logits(causal: Any, vocabulary_size: int) -> ModelPaths:
    def body(**inputs: Any) -> tuple[Tensor, Any]:
        output = causal(**inputs)
        return output.logits, getattr(output, "past_key_values", None)

    return ModelPaths(causal, body, lambda logits: logits, vocabulary_size, share_prefix=False)


def _why_not_shared(causal: Any) -> str:
    """What in the configuration makes continuing a cache with padded rows wrong; empty where nothing does."""
    attention = _attention(causal)
    if attention not in _MASKING:
        return f"the attention implementation {attention} takes no mask per token"
    return _what_breaks_masks(causal) or _what_needs_the_length(causal)


def _why_not_packed(causal: Any) -> str:
    """What in the configuration makes packed rows wrong; empty where nothing does."""
    attention = _attention(causal)
    if attention in _SKIPPING:
        return _layers_beside(causal, {"full_attention", "sliding_attention"}) or _what_needs_the_length(causal)
    if attention not in _MASKING:
        return f"nobody has tried it with the attention implementation {attention}"
    return _what_breaks_masks(causal) or _what_needs_the_length(causal)


def _what_breaks_masks(causal: Any) -> str:
    """A mask that is given whole is taken by all layers as it is, also by those that see a window only."""
    config = causal.config.get_text_config(decoder=True)
    if getattr(config, "layer_types", None):
        return _layers_beside(causal, {"full_attention"})
    if getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None):
        return "its attention sees a window only"
    return ""


def _layers_beside(causal: Any, known: set[str]) -> str:
    """Kinds of layers, such as recurrent ones, that carry one row into the next."""
    config = causal.config.get_text_config(decoder=True)
    others = sorted(set(getattr(config, "layer_types", None) or ()) - known)
    return f"it has layers of kind {', '.join(others)}" if others else ""


def _what_needs_the_length(causal: Any) -> str:
    config = causal.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in ("dynamic", "longrope"):
        return "its positions depend on the length of the whole input"
    return ""


def _first_that_agrees(
    paths: ModelPaths, full: ModelPaths, rows: list[Row], expected: Tensor
) -> tuple[ModelPaths, str]:
    reason = _disagreement(paths, rows, expected, "plain")
    return (full, reason) if reason else (paths, "")


def _disagreement(paths: ModelPaths, rows: list[Row], expected: Tensor, way: _Way) -> str:
    """In words, how far this way of running is from the model's own logits; empty where it agrees."""
    try:
        found = _probe(paths, rows, way)
    except Exception as error:  # whatever a model's own code raises: it cannot be run this way, and the note says why
        return f"it raises {type(error).__name__}: {error}"
    exact = expected.dtype in (torch.float32, torch.float64) and _hidden_dtype(paths.causal) == expected.dtype
    largest = float(expected.abs().max())
    tolerance = (1e-4 if exact else 5e-2) * max(1.0, largest)
    difference = float((found - expected).abs().max())
    return "" if difference <= tolerance else f"its logits would be {difference:.2g} away from the model's own"


def _probe(paths: ModelPaths, rows: list[Row], way: _Way) -> Tensor:
    """Logits [T, V] at the live positions of the probe rows, in the order of the rows."""
    wanted = [[t for t, weight in enumerate(row.loss_mask) if weight > 0] for row in rows]
    if way == "packed":
        features, selection = run_packed(paths, rows, [range(len(rows))], wanted)
    else:
        features, selection = run_rows(paths, rows, plan_layout(rows, share_prefix=way == "shared"), wanted)
    pieces = torch.split(paths.head(features), [len(positions) for positions in selection.positions])
    parts = dict(zip(selection.rows, pieces, strict=True))
    return torch.cat([parts[number] for number in range(len(rows))])


def _probe_rows(vocabulary_size: int) -> list[Row]:
    """Two groups of two rows with prompts of 13 and 10 tokens and replies of 3 to 6."""
    generator = np.random.default_rng(0)
    rows: list[Row] = []
    for group, prompt_length in enumerate((13, 10)):
        prompt = generator.integers(vocabulary_size, size=prompt_length).tolist()
        for reply_length in (3 + group, 6 - group):
            tokens = prompt + generator.integers(vocabulary_size, size=reply_length).tolist()
            mask = [0.0] * prompt_length + [1.0] * reply_length
            rows.append(Row(tokens, mask, mask, mask, [0.0] * len(mask), len(rows), group, prompt_length))
    return rows


def _attention(causal: Any) -> str | None:
    attention: str | None = getattr(causal.config, "_attn_implementation", None)
    return attention


def _hidden_dtype(causal: Any) -> torch.dtype:
    """What the layers compute in; the embedding's weight may be a float32 head's too."""
    with torch.no_grad():
        embedded = causal.get_input_embeddings()(torch.zeros(1, dtype=torch.long, device=_device(causal)))
    dtype: torch.dtype = embedded.dtype
    return dtype


def _embedding_count(causal: Any) -> int:
    return int(causal.get_input_embeddings().weight.shape[0])


def _device(causal: Any) -> torch.device:
    device: torch.device = causal.get_input_embeddings().weight.device
    return device
