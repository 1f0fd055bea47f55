"""Runs rows of token ids through a causal language model. Returns features at chosen positions, for the head.

The rows of a microbatch form a forest (`rollouts.training.forest`): what several rows begin with runs once, and no
token is padding. The head runs once for each prediction: a node, and a token that follows it. Then the results are
gathered, row by row, and the backward pass of the gather adds up. A model's own logits are compared once with those of
its forest (`inspect_model`). A model that cannot run a forest runs padded rows: right padding needs no mask, because
causal attention never sees later tokens.

`use_float32_head` makes the head of a half-precision model compute in float32. Logits in bfloat16 have 8 bits. Two
engines that round differently then disagree by percents about a token's probability, and the ratio of a policy to
itself is not 1. Not here: attention over a forest (`attention`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rollouts.errors import ConfigError
from rollouts.training.algorithms.logprobs import logprobs_and_entropy
from rollouts.training.backends.attention import AttentionPlan, Way, attending, plan_attention
from rollouts.training.forest import Forest, budget_for, make_forest


class ModelPaths(NamedTuple):
    """How to run one model.

    Attributes:
        body: `body(**inputs)` returns features [R, C, F]
        head: `head(features [t, F])` returns logits [t, vocabulary_size]
        runs_forests: whether it can run a forest; else it runs padded rows
        way: how it attends; None: the fastest way of this device
        dtype: of the queries of its layers
        windows: the sliding windows of its layers; None is a layer without one
        budgets: ascending numbers of nodes; a forest is padded to one of them, so that few shapes are compiled
        notes: which optimizations cannot be used, and why
    """

    causal: Any
    body: Callable[..., Tensor]
    head: Callable[[Tensor], Tensor]
    vocabulary_size: int
    runs_forests: bool = False
    way: Way | None = None
    dtype: torch.dtype = torch.float32
    windows: tuple[int | None, ...] = (None,)
    budgets: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    def logprobs_and_entropy(self, features: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Logprobs and entropy of `targets` [U], each [U]. The logits are computed in chunks."""
        size = self.vocabulary_size
        return logprobs_and_entropy(self.head, features, targets, vocabulary_size=size, temperature=temperature)

    def attending(self) -> contextlib.AbstractContextManager[None]:
        """The model runs forests inside this block only."""
        return attending(self.causal) if self.runs_forests else contextlib.nullcontext()


class Work(NamedTuple):
    """What a pass through a model computes: tokens, the same with padding, tokens whose logits are computed, and
    products of a query with a key, per head and layer (causal: a token has as many as its position, plus one).
    """

    tokens: int = 0
    padded: int = 0
    scored: int = 0
    products: int = 0


class RowInputs(NamedTuple):
    """Rows, and the T of their tokens to compute: row by row, by ascending positions. They need U predictions.

    Attributes:
        rows: ids of each row
        wanted: of each row, the positions [t] of the tokens, each >= 1
        forest: of the rows
        nodes: [U] the nodes that predict
        targets: [U] the ids that are predicted
        places: [U] the row and the position of a token of each prediction
        gather: [T] the prediction of each token; None if U = T and the order is that of the tokens
    """

    rows: Sequence[Sequence[int]]
    wanted: Sequence[np.ndarray]
    forest: Forest
    nodes: np.ndarray
    targets: np.ndarray
    places: tuple[np.ndarray, np.ndarray]
    gather: np.ndarray | None

    def of_tokens(self, predicted: Tensor) -> Tensor:
        """The values [T, ...] of the tokens, from those of the predictions [U, ...]."""
        if self.gather is None:
            return predicted
        return predicted.index_select(0, torch.from_numpy(self.gather).to(predicted.device))


def make_inputs(rows: Sequence[Sequence[int]], wanted: Sequence[np.ndarray], *, share: bool = True) -> RowInputs:
    """Put the rows into a forest, and list the predictions of the `wanted` tokens. `share`: shared tokens run once."""
    forest = make_forest(rows, share=share)
    row_of = np.repeat(np.arange(len(rows)), [len(positions) for positions in wanted])
    positions = np.concatenate(wanted)
    assert len(positions), "no position was requested"
    pairs = list(zip(forest.paths, rows, wanted, strict=True))
    nodes = np.concatenate([np.asarray(path, dtype=np.int64)[chosen - 1] for path, _, chosen in pairs])
    targets = np.concatenate([np.asarray(row, dtype=np.int64)[chosen] for _, row, chosen in pairs])
    _, first, gather = np.unique(nodes << 32 | targets, return_index=True, return_inverse=True)
    if len(first) == len(nodes):
        return RowInputs(rows, wanted, forest, nodes, targets, (row_of, positions), None)
    places = row_of[first], positions[first]
    return RowInputs(rows, wanted, forest, nodes[first], targets[first], places, gather)


def inspect_model(causal: Any, budgets: tuple[int, ...] = ()) -> ModelPaths:
    """Find the fastest way to run this model whose logits differ from the model's own by at most 1e-4 (fp32). Forests
    are padded to one of the `budgets`.
    """
    inputs = make_inputs(*_probe_rows(int(causal.get_input_embeddings().weight.shape[0])))
    notes: list[str] = []
    with torch.no_grad():
        own = causal(input_ids=_padded(inputs.rows, _device_of(causal)), use_cache=False).logits
        dtype = _hidden_dtype(causal)
        full = ModelPaths(
            causal, _body(causal, "logits"), lambda logits: logits, own.shape[-1], dtype=dtype, budgets=budgets
        )
        expected = _probe_logits(full, inputs)
        paths, reason = _separate_head(full), "it does not show its output embeddings"
        if paths is not None:
            reason = _disagreement(paths, inputs, expected)
        if paths is None or reason:
            paths = full
            notes.append(f"the logits of all tokens are computed, because {reason}")
        forests, reason = _with_forests(paths, inputs, expected)
        notes += [f"rows are padded, and shared prompts run more than once, because {reason}"] if reason else []
    return forests._replace(notes=tuple(notes))


def run_features(paths: ModelPaths, inputs: RowInputs) -> tuple[Tensor, Work]:
    """The features [U, F] of the predictions, and what was computed. Call it inside `paths.attending()`."""
    device = _device_of(paths.causal)
    if not paths.runs_forests:
        ids = _padded(inputs.rows, device)
        features, (rows, positions) = paths.body(input_ids=ids, use_cache=False), inputs.places
        index = rows * ids.shape[1] + positions - 1
        lengths = list(map(len, inputs.rows))
        work = Work(sum(lengths), ids.numel(), len(index), sum(n * (n + 1) // 2 for n in lengths))
    else:
        count = len(inputs.forest.tokens)
        forest = inputs.forest.padded(budget_for(count, paths.budgets))
        plan = plan_attention(forest, device, paths.dtype, windows=paths.windows, way=paths.way)
        features = _run(paths, forest, plan)
        index = inputs.nodes
        work = Work(count, len(forest.tokens), len(index), sum(inputs.forest.positions) + count)
    flat = features.reshape(-1, features.shape[-1])
    return flat.index_select(0, torch.from_numpy(index).to(device)), work


def _run(paths: ModelPaths, forest: Forest, plan: AttentionPlan) -> Tensor:
    """The features [1, M, F] of a forest."""
    device = _device_of(paths.causal)
    both = torch.from_numpy(np.array([forest.tokens, forest.positions], dtype=np.int64)).to(device)
    tokens, positions = both[:1], both[1:]
    return paths.body(input_ids=tokens, position_ids=positions, use_cache=False, forest=plan)


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


def _padded(tokens: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Token ids [R, C], padded on the right with 0."""
    ids = np.zeros((len(tokens), max(len(row) for row in tokens)), dtype=np.int64)
    for place, row in enumerate(tokens):
        ids[place, : len(row)] = row
    return torch.from_numpy(ids).to(device)


def _separate_head(full: ModelPaths) -> ModelPaths | None:
    """The paths with body and head apart, with the logit scaling of the configuration, for known families."""
    causal = full.causal
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
    size = embeddings.weight.shape[0]
    body = _body(base, "last_hidden_state")
    return full._replace(body=body, head=embeddings if is_plain else head, vocabulary_size=size)


def _body(module: Any, features: str) -> Callable[..., Tensor]:
    def body(**inputs: Any) -> Tensor:
        tensor: Tensor = getattr(module(**inputs), features)
        return tensor

    return body


def _with_forests(paths: ModelPaths, inputs: RowInputs, expected: Tensor) -> tuple[ModelPaths, str]:
    """The model's paths with forests, and ""; or without them, and why it cannot run them."""
    if reason := _why_not(paths.causal):
        return paths, reason
    try:
        plan = _planned(paths, inputs.forest)
    except Exception as error:  # see _disagreement
        return paths, f"it raises {type(error).__name__}: {error}"
    if not plan.windows:
        return paths, "its attention is its own, and not one that transformers can replace"
    windows = tuple(sorted(plan.windows, key=lambda window: window or 0))
    config = paths.causal.config.get_text_config(decoder=True)
    layers = getattr(config, "layer_types", None) or ("sliding_attention",)
    if getattr(config, "sliding_window", None) and "sliding_attention" in layers and windows == (None,):
        return paths, "its layers do not say that their attention has a window"
    apart, alone = (make_inputs(inputs.rows[:n], inputs.wanted[:n], share=False) for n in (len(inputs.rows), 1))
    probes = [(inputs, expected), (apart, expected), (alone, expected[: len(inputs.wanted[0])])]
    ways: tuple[Way | None, ...] = (None, "blocks") if _device_of(paths.causal).type == "cuda" else (None,)
    for way in ways:
        forests = paths._replace(runs_forests=True, way=way, windows=windows, dtype=plan.dtype)
        found = [_disagreement(forests, *probe) for probe in probes]
        if not any(found):
            return forests, ""
    return paths, next(filter(None, found))


def _planned(paths: ModelPaths, forest: Forest) -> AttentionPlan:
    """Run a forest, so that the plan knows what the layers of the model ask for: windows and dtype."""
    plan = plan_attention(forest, _device_of(paths.causal), paths.dtype, way="blocks")
    with attending(paths.causal):
        _run(paths, forest, plan)
    return plan


def _why_not(causal: Any) -> str:
    """Why the model's configuration rules out forests; empty if it does not. Layers of other kinds, such as recurrent
    ones, may carry state from one row to the next, and positions may depend on the whole input.
    """
    config = causal.config.get_text_config(decoder=True)
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if others:
        return f"it has layers of kind {', '.join(others)}"
    if getattr(config, "attention_chunk_size", None):
        return "its attention is in chunks"
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in ("dynamic", "longrope"):
        return "its positions depend on the length of the whole input"
    return ""


def _disagreement(paths: ModelPaths, inputs: RowInputs, expected: Tensor) -> str:
    """Describe the difference between this way of running and the model's own logits. Empty if there is none."""
    try:
        found = _probe_logits(paths, inputs)
    except Exception as error:  # a model's own code may raise anything; a note then says why this way is not used
        return f"it raises {type(error).__name__}: {error}"
    exact = expected.dtype in (torch.float32, torch.float64) and paths.dtype == expected.dtype
    largest = float(expected.abs().max())
    tolerance = (1e-4 if exact else 5e-2) * max(1.0, largest)
    difference = float((found - expected).abs().max())
    return "" if difference <= tolerance else f"its logits would be {difference:.2g} away from the model's own"


def _probe_logits(paths: ModelPaths, inputs: RowInputs) -> Tensor:
    """Logits [T, V] of the test rows."""
    with paths.attending():
        features, _ = run_features(paths, inputs)
    return inputs.of_tokens(paths.head(features))


def _probe_rows(vocabulary_size: int) -> tuple[list[list[int]], list[np.ndarray]]:
    """Rows and their wanted positions: two groups with prompts of 17 and 16 tokens, and a reply that itself forks."""
    generator = np.random.default_rng(0)

    def draw(count: int) -> list[int]:
        drawn: list[int] = generator.integers(vocabulary_size, size=count).tolist()
        return drawn

    rows: list[list[int]] = []
    for length in (17, 16):
        prompt = draw(length)
        turn = prompt + draw(16)
        rows += [prompt + draw(3), turn + draw(2), turn + draw(5)]
    return rows, [np.arange(12, len(row)) for row in rows]


def _hidden_dtype(causal: Any) -> torch.dtype:
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
