"""Runs rows of token ids through a causal language model. Returns features at chosen positions, for the head.

Four optimizations make this faster than a padded batch through `model(...)`. The head runs at chosen positions only. A
prompt that several rows share runs once, and the rows continue its keys and values, with gradients. Rows are padded to
rows of similar length. Or several rows are packed into one sequence without padding; positions restart, and no row sees
another (`run_packed`). Each optimization is compared once with the model's own logits (`inspect_model`), and not used
if they differ. Right padding needs no mask, because causal attention never sees later tokens.

`use_float32_head` makes the head of a half-precision model compute in float32. Logits in bfloat16 have 8 bits. Two
engines that round differently then disagree by percents about a token's probability, and the ratio of a policy to
itself is not 1. Not here: packing rows with shared prompts; packing with a mask for layers with a window.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rollouts.errors import ConfigError
from rollouts.training.algorithms.logprobs import logprobs_and_entropy
from rollouts.training.batches import Row
from rollouts.training.batching import Layout, plan_layout

# These implementations find packed rows by their positions, and skip masked tokens. Others get a mask, and compute
# masked tokens too.
_SKIPPING = ("flash_attention_2", "flex_attention")
_MASKING = ("sdpa", "eager")

_Way = Literal["plain", "shared", "packed"]


class ModelPaths(NamedTuple):
    """How to run one model.

    Attributes:
        body: `body(**inputs)` returns features [R, C, F] and a cache
        head: `head(features [t, F])` returns logits [t, vocabulary_size]
        share_prefix: whether shared prompts run once
        packs: whether rows may be packed
        packed: run rows packed into one sequence, else padded in buckets
        bucket_saving_min: an extra bucket must save this many padded tokens
        notes: which optimizations cannot be used, and why
    """

    causal: Any
    body: Callable[..., tuple[Tensor, Any]]
    head: Callable[[Tensor], Tensor]
    vocabulary_size: int
    share_prefix: bool
    packs: bool = False
    notes: tuple[str, ...] = ()
    packed: bool = False
    bucket_saving_min: int = 0

    def logprobs_and_entropy(self, features: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Logprobs and entropy of `targets` [T], each [T]. The logits are computed in chunks."""
        size = self.vocabulary_size
        return logprobs_and_entropy(self.head, features, targets, vocabulary_size=size, temperature=temperature)


class Selection(NamedTuple):
    """The tokens that T features predict: `rows` [P] are row numbers, with the `positions` in each."""

    rows: list[int]
    positions: list[Sequence[int]]

    def tokens(self) -> list[tuple[int, int]]:
        """(row, position) of each token."""
        return [(row, t) for row, positions in zip(self.rows, self.positions, strict=True) for t in positions]


class _Picked:
    """Features of chosen positions, collected in pieces, and the tokens that they predict."""

    def __init__(self) -> None:
        self._pieces: list[Tensor] = []
        self._selection = Selection([], [])

    def take(self, features: Tensor, offsets: list[int], positions: list[list[int]], numbers: Sequence[int]) -> None:
        """Add the features at offset + position of the rows with these numbers."""
        index = [offset + t for offset, chosen in zip(offsets, positions, strict=True) for t in chosen]
        if not index:
            return
        for number, chosen in zip(numbers, positions, strict=True):
            if chosen:
                self._selection.rows.append(number)
                self._selection.positions.append(chosen)
        flat = features.reshape(-1, features.shape[-1])
        self._pieces.append(flat.index_select(0, torch.tensor(index, device=features.device)))

    def whole(self) -> tuple[Tensor, Selection]:
        """All features [T, F]."""
        assert self._pieces, "no position was requested"
        return (self._pieces[0] if len(self._pieces) == 1 else torch.cat(self._pieces)), self._selection


def inspect_model(causal: Any, *, share_prefix: bool = True, bucket_saving_min: int = 0) -> ModelPaths:
    """Find the fastest way to run this model whose logits differ from the model's own by at most 1e-4 (fp32)."""
    rows = _probe_rows(int(causal.get_input_embeddings().weight.shape[0]))
    notes: list[str] = []
    with torch.no_grad():
        own = causal(input_ids=_padded([row.tokens for row in rows], _device_of(causal)), use_cache=False).logits
        full = ModelPaths(causal, _body(causal, "logits"), lambda logits: logits, own.shape[-1], share_prefix=False)
        expected = _probe_logits(full, rows, "plain")
        paths, reason = _separate_head(causal), "it does not show its output embeddings"
        if paths is not None:
            reason = _disagreement(paths, rows, expected, "plain")
        if paths is None or reason:
            paths = full
            notes.append(f"the logits of all tokens are computed, because {reason}")
        if share_prefix:
            reason = _why_not(causal, "shared") or _disagreement(paths, rows, expected, "shared")
            notes += [f"shared prompts run more than once, because {reason}"] if reason else []
            paths = paths._replace(share_prefix=not reason)
        reason = _why_not(causal, "packed") or _disagreement(paths, rows, expected, "packed")
        notes += [f"rows are not packed, because {reason}"] if reason else []
    return paths._replace(packs=not reason, notes=tuple(notes), bucket_saving_min=bucket_saving_min)


def prefers_packing(causal: Any) -> bool:
    """Whether packing is faster than buckets of similar length: only if the attention skips masked tokens."""
    return _attention(causal) in _SKIPPING


def run_features(
    paths: ModelPaths, rows: Sequence[Row], wanted: Sequence[Sequence[int]]
) -> tuple[Tensor, Selection, tuple[int, int]]:
    """Run rows, packed or in buckets. Returns the features [T, F] that predict the tokens at the `wanted` positions
    (each >= 1) of every row, the selection, and (tokens of the rows that were run, the same with padding).
    """
    lengths = [len(row.tokens) for row in rows]
    if paths.packed:
        return *run_packed(paths, rows, [list(range(len(rows)))], wanted), (sum(lengths), sum(lengths))
    layout = plan_layout(rows, share_prefix=paths.share_prefix, bucket_saving_min=paths.bucket_saving_min)
    real = sum(map(len, layout.prefixes)) + sum(lengths) - sum(layout.starts)
    return *run_rows(paths, rows, layout, wanted), (real, layout.padded_tokens(lengths))


def run_rows(
    paths: ModelPaths, rows: Sequence[Row], layout: Layout, wanted: Sequence[Sequence[int]]
) -> tuple[Tensor, Selection]:
    """Compute the features of the `wanted` positions (see `run_features`), with rows padded as the layout says."""
    device = _device_of(paths.causal)
    cache = None
    picked = _Picked()
    if layout.prefixes:
        features, cache = paths.body(input_ids=_padded(layout.prefixes, device), use_cache=True)
        earlier = [[t for t in wanted[row] if t <= layout.starts[row]] for row in range(len(rows))]
        offsets = [layout.prefix_of_row[row] * features.shape[1] - 1 for row in range(len(rows))]
        picked.take(features, offsets, earlier, range(len(rows)))
    for bucket in layout.buckets:
        rests = [rows[row].tokens[layout.starts[row] :] for row in bucket]
        inputs: dict[str, Any] = {"input_ids": _padded(rests, device), "use_cache": False}
        if layout.prefix_of_row[bucket[0]] >= 0:
            inputs |= _continue(paths.causal, rows, layout, bucket, cache, inputs["input_ids"].shape[1])
        features, _ = paths.body(**inputs)
        later = [[t for t in wanted[row] if t > layout.starts[row]] for row in bucket]
        offsets = [place * features.shape[1] - 1 - layout.starts[row] for place, row in enumerate(bucket)]
        picked.take(features, offsets, later, bucket)
    return picked.whole()


def run_packed(
    paths: ModelPaths, rows: Sequence[Row], bins: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]
) -> tuple[Tensor, Selection]:
    """Like `run_rows`, with each bin of rows (`pack_rows`) as one sequence [1, sum of lengths]."""
    picked = _Picked()
    for chosen in bins:
        positions = [list(wanted[row]) for row in chosen]
        if any(positions):
            features, _ = paths.body(**_packed_inputs(paths.causal, [rows[row].tokens for row in chosen]))
            ends = np.cumsum([len(rows[row].tokens) for row in chosen]).tolist()
            picked.take(features, [start - 1 for start in (0, *ends[:-1])], positions, chosen)
    return picked.whole()


def use_float32_head(causal: Any) -> None:
    """Make the output head of this causal LM compute in float32, in place. Adapters may be injected before or after.

    Does nothing if the head is already in float32. Raises ConfigError if the model does not return its head.
    """
    outer = causal.get_output_embeddings()
    if outer is None:
        what = f"the float32 head: {type(causal).__name__} does not show its output embeddings"
        raise ConfigError(f"{what}; leave the setting out, or load the whole model with --training.dtype float32")
    head, embedding = _base_layer(outer), _base_layer(causal.get_input_embeddings())
    assert isinstance(head.weight, Tensor), f"the head {head} has no weight"
    dtype = head.weight.dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return
    tied = head.weight is embedding.weight
    for parameter in head.parameters(recurse=False):
        parameter.data = parameter.data.float()  # keeps the Parameter, so tied weights stay tied
    head.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(), *inputs[1:]))
    if tied:
        embedding.register_forward_hook(lambda _, inputs, output: output.to(dtype))


def _packed_inputs(causal: Any, tokens: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Inputs [1, L] of concatenated rows: positions that restart at 0, and a mask [1, 1, L, L] under which each row
    sees itself only. If the attention skips masked tokens, transformers finds the rows by their positions.
    """
    device = _device_of(causal)
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


def _continue(
    causal: Any, rows: Sequence[Row], layout: Layout, bucket: list[int], cache: Any, width: int
) -> dict[str, Any]:
    """Inputs with which rows of a bucket continue their prefixes: cache, positions [R, C], mask [R, 1, C, P + C]."""
    device = _device_of(causal)
    prefix_width = max(len(prefix) for prefix in layout.prefixes)
    prefix_of_row = torch.tensor([layout.prefix_of_row[row] for row in bucket], device=device)
    starts = np.array([layout.starts[row] for row in bucket])
    lengths = np.array([len(rows[row].tokens) for row in bucket])
    # Padding repeats the row's last position, because a table of positions may end there.
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
    """Body and head of a model, with the logit scaling of its configuration, for known families."""
    base, embeddings = causal.base_model, causal.get_output_embeddings()
    if embeddings is None or base is causal:
        return None
    config = causal.config.get_text_config(decoder=True)
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)

    def head(features: Tensor) -> Tensor:
        logits: Tensor = embeddings(features)
        if scale != 1.0:
            logits = logits * scale
        return torch.tanh(logits / cap) * cap if cap else logits

    is_plain = scale == 1.0 and not cap  # a plain layer has a faster path
    body, size = _body(base, "last_hidden_state"), embeddings.weight.shape[0]
    return ModelPaths(causal, body, embeddings if is_plain else head, size, share_prefix=False)


def _body(module: Any, features: str) -> Callable[..., tuple[Tensor, Any]]:
    def body(**inputs: Any) -> tuple[Tensor, Any]:
        output = module(**inputs)
        return getattr(output, features), getattr(output, "past_key_values", None)  # None for a recurrent model

    return body


def _why_not(causal: Any, way: _Way) -> str:
    """Why the model's configuration rules out packed rows (`packed`), or shared prompts with padded rows (`shared`).
    Empty if it does not.

    All layers use a given mask unchanged, also layers with a window. Other layers, such as recurrent ones, may carry
    state from one row to the next, and positions may depend on other rows.
    """
    attention, config = _attention(causal), causal.config.get_text_config(decoder=True)
    skips = way == "packed" and attention in _SKIPPING
    if not skips and attention not in _MASKING:
        takes_none = f"the attention implementation {attention} takes no mask per token"
        return takes_none if way == "shared" else f"the attention implementation {attention} is untested with it"
    layers = set(getattr(config, "layer_types", None) or ())
    has_window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    if has_window and not layers and not skips:
        return "its attention has a window"
    others = sorted(layers - {"full_attention"} - ({"sliding_attention"} if skips else set()))
    if others:
        return f"it has layers of kind {', '.join(others)}"
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in ("dynamic", "longrope"):
        return "its positions depend on the length of the whole input"
    return ""


def _disagreement(paths: ModelPaths, rows: list[Row], expected: Tensor, way: _Way) -> str:
    """Describe the difference between this way of running and the model's own logits. Empty if there is none."""
    try:
        found = _probe_logits(paths, rows, way)
    except Exception as error:  # a model's own code may raise anything; a note then says why this way is not used
        return f"it raises {type(error).__name__}: {error}"
    exact = expected.dtype in (torch.float32, torch.float64) and _hidden_dtype(paths.causal) == expected.dtype
    largest = float(expected.abs().max())
    tolerance = (1e-4 if exact else 5e-2) * max(1.0, largest)
    difference = float((found - expected).abs().max())
    return "" if difference <= tolerance else f"its logits would be {difference:.2g} away from the model's own"


def _probe_logits(paths: ModelPaths, rows: list[Row], way: _Way) -> Tensor:
    """Logits [T, V] at the live positions of the test rows, in the order of the rows."""
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
    """The dtype of the layers; the embedding may be float32 because of the head."""
    with torch.no_grad():
        embedded = causal.get_input_embeddings()(torch.zeros(1, dtype=torch.long, device=_device_of(causal)))
    dtype: torch.dtype = embedded.dtype
    return dtype


def _device_of(causal: Any) -> torch.device:
    device: torch.device = causal.get_input_embeddings().weight.device
    return device


def _base_layer(module: Any) -> nn.Module:
    """The model's own layer inside a LoRA layer. This layer stays when adapters are merged or removed."""
    layer: nn.Module = module.get_base_layer() if hasattr(module, "get_base_layer") else module
    return layer
