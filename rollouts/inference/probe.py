"""Find out, by trying it, how a model may be decoded.

The fast way (`lanes.py`) hands a model a cache, masks and positions of our own. A model takes it only if its own
cache is plain full attention in every layer and the logits it then gives, padded and continued, are those of a plain
forward pass. Anything else takes the slower way; the reason is kept and shown by `health`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from rollouts.inference.decode import Network, Row, SessionCaches
from rollouts.inference.kv_cache import KVShape, SlotCache
from rollouts.inference.lanes import SlotLanes
from rollouts.inference.sampling import UniformStream

__all__ = ["Verdict", "probe"]

LENGTHS = (7, 4, 7)  # short contexts: two equal ones, and one that must be padded


class Verdict(NamedTuple):
    """`shape` is set where the fast way works, else `reason` says why not; `padded`: left padding does no harm."""

    shape: KVShape | None
    padded: bool
    reason: str


def probe(network: Network) -> Verdict:
    """Try the model; call it in the torch thread, in eval mode without gradients. A handful of short forward passes."""
    model = network.model
    attention = getattr(model.config, "_attn_implementation", None)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    contexts = [[(7 * row + 3 * i + 1) % vocabulary for i in range(n)] for row, n in enumerate(LENGTHS)]
    _, cache = network.forward(torch.tensor([contexts[0]], device=network.device))
    layers = list(getattr(cache, "layers", []))
    padded = bool(layers) and all(isinstance(layer, DynamicLayer) for layer in layers) and not _has_state(model, layers)
    shape, reason = _shape(model, layers)
    if shape is None:
        return Verdict(None, padded, reason)
    if attention not in ("sdpa", "eager"):
        return Verdict(None, padded, f"its attention is {attention}, which takes no mask of ours")
    reason = _try(network, shape, contexts)
    return Verdict(None if reason else shape, padded, reason)


def _has_state(model: Any, layers: list[Any]) -> bool:
    linear = any("Linear" in base.__name__ for layer in layers for base in type(layer).__mro__)
    return linear or bool(getattr(model, "_is_stateful", False))


def _shape(model: Any, layers: list[Any]) -> tuple[KVShape | None, str]:
    """The shape that all layers share, or None and why there is none."""
    config = model.config.get_text_config(decoder=True)
    kinds = sorted(set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"})
    if kinds:
        return None, f"it has layers of type {', '.join(kinds)}"
    if getattr(model, "_is_stateful", False) or not layers:
        return None, "it keeps a state of its own instead of keys and values"
    odd = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if odd:
        return None, f"its cache has layers of type {', '.join(odd)}"
    if any(layer.keys is None or layer.keys.ndim != 4 for layer in layers):
        return None, "some of its layers keep no keys"
    shapes = {
        KVShape(len(layers), k.shape[1], k.shape[3], v.shape[3], k.dtype, k.device)
        for k, v in ((layer.keys, layer.values) for layer in layers)
    }
    if len(shapes) > 1:
        return None, "its layers differ in shape or device"
    return shapes.pop(), ""


def _try(network: Network, shape: KVShape, contexts: list[list[int]]) -> str:
    """Prefill padded, continue two tokens, step once, all in slots; compare with plain passes. Empty if they agree."""
    cache = SlotCache(shape, len(contexts), max(map(len, contexts)) + 4)
    lanes = SlotLanes(
        network,
        cache,
        SessionCaches(0),
        0,
        slots=len(contexts),
        columns_max=cache.columns,
        prefill_tokens_max=1 << 20,
    )
    rows = [Row(context, 9, frozenset(), 1.0, UniformStream(0)) for context in contexts]
    try:
        rows, first = lanes.admit(rows, 0)
        longer = [[*row.tokens, 1, 2] for row in rows]
        second = lanes.prefill(0, [(tokens, len(row.tokens)) for tokens, row in zip(longer, rows, strict=True)])
        for row, tokens in zip(rows, longer, strict=True):
            row.tokens, row.sampled = tokens, [3]
        third = lanes.step(rows)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        return f"it does not take a cache of ours ({type(error).__name__}: {error})"
    for index, row in enumerate(rows):
        for logits, tokens in ((first, row.tokens[:-2]), (second, row.tokens), (third, [*row.tokens, 3])):
            plain, _ = network.forward(torch.tensor([tokens], device=network.device))
            if not _agree(logits[index], plain[0]):
                gap = (logits[index].float() - plain[0].float()).abs().max().item()
                return f"its logits with a cache of ours differ by {gap:.3g} from those of a plain pass"
    return ""


def _agree(ours: Tensor, plain: Tensor) -> bool:
    tolerance = 1e-3 if plain.dtype in (torch.float32, torch.float64) else 5e-2
    difference = (ours.float() - plain.float()).abs().max()
    return bool(difference <= tolerance * (1 + plain.float().abs().max()))
