"""One preallocated buffer of keys and values for all rows that are decoded together.

A slot is a row of the buffer. Token p of a row always lies in column p. So one number gives a token's position, its
column, and the columns that it may see (those up to its own). Rows of different lengths share a batch without alignment
and without gaps, because columns after a row's last token are never visible. Places to write are computed once per
forward pass, and nothing is concatenated. `SlotCache` is a transformers `Cache`: any model that accepts a
`DynamicCache` of full-attention layers accepts it. Between turns, a session keeps a compact copy of its row
(`SessionCaches`). Sliding windows and linear attention are not supported; `decode_slots.PlainSlots` decodes such
models.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

COLUMN_STEP = 16  # the visible width grows in steps: fewer new views, and kernels prefer multiples


def whole_columns(columns: int) -> int:
    """The number of columns that a buffer allocates for `columns`.

    >>> whole_columns(17)
    32
    """
    return -(-columns // COLUMN_STEP) * COLUMN_STEP


class KVShape(NamedTuple):
    """The cache of one token: `layers` x `heads` keys of `key_dim` numbers, and values of `value_dim` numbers."""

    layers: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Bytes per token."""
        return self.layers * self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class SlotCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """Keys [layers, slots + 1, heads, columns, key_dim], and values in the same layout.

    Padding is written to the last slot. Call `point` before each forward pass; in the pass, the model's layers call
    `update`.
    """

    def __init__(self, shape: KVShape, slots: int, columns: int) -> None:
        super().__init__(layers=[])
        self.shape, self.slots = shape, slots
        self._allocate(columns)
        # Additive, because attention would convert a boolean mask in every layer.
        self._shown = torch.zeros((), dtype=shape.dtype, device=shape.device)
        self._hidden = torch.full((), torch.finfo(shape.dtype).min, dtype=shape.dtype, device=shape.device)

    def _allocate(self, columns: int) -> None:
        shape = self.shape
        self.columns = whole_columns(columns)
        lead = (shape.layers, self.slots + 1, shape.heads, self.columns)
        # Zeros, not empty: a hidden value is multiplied by an exact 0, and 0 * NaN is NaN.
        self.keys = torch.zeros(*lead, shape.key_dim, dtype=shape.dtype, device=shape.device)
        self.values = torch.zeros(*lead, shape.value_dim, dtype=shape.dtype, device=shape.device)
        self._flat = [
            (k.view(-1, shape.key_dim), v.view(-1, shape.value_dim))
            for k, v in zip(self.keys, self.values, strict=True)
        ]
        slot, head = (torch.arange(n, device=shape.device) for n in lead[1:3])
        self._bases = (slot.unsqueeze(1) * shape.heads + head) * self.columns  # [slots + 1, heads]
        self._column_ids = torch.arange(self.columns, device=shape.device)
        self._window: tuple[int, int, int] = (0, 0, 0)
        self._views: list[tuple[Tensor, Tensor]] = []

    def reserve(self, columns: int, columns_max: int) -> None:
        """Make room for positions below `columns`, and keep the stored tokens. The buffer grows by more than it needs
        now, up to `columns_max`.
        """
        if columns <= self.columns:
            return
        keys, values, width = self.keys, self.values, self.columns
        self._allocate(max(columns, min(width + width // 2, columns_max)))
        self.keys[..., :width, :] = keys
        self.values[..., :width, :] = values

    def point(self, start: int, positions: Tensor, real: Tensor | None, width: int) -> Tensor:
        """Prepare the next forward pass for slots [start, start + n). Returns its mask to add [n, 1, S, W], W >= width.

        `positions` [n, S] are the columns of the tokens. `real` [n, S] is False for padding (None: no padding).
        """
        count = positions.shape[0]
        width = min(whole_columns(width), self.columns)
        self._aim(start, positions, real, width)
        visible = self.visible(positions, width).view(count, 1, -1, width)
        return torch.where(visible, self._shown, self._hidden)

    def point_causal(self, start: int, positions: Tensor) -> None:
        """Prepare a forward pass over whole contexts of one length. It needs no mask, so the fastest kernels apply."""
        self._aim(start, positions, None, positions.shape[1])

    def _aim(self, start: int, positions: Tensor, real: Tensor | None, width: int) -> None:
        stop = start + positions.shape[0]
        assert stop <= self.slots and width <= self.columns, (
            f"slots to {stop} of {self.slots}, {width=} {self.columns=}"
        )
        places = self._bases[start:stop].unsqueeze(2) + positions.unsqueeze(1)  # [n, heads, S]
        if real is not None:
            places = torch.where(real.unsqueeze(1), places, self._bases[self.slots].unsqueeze(1))
        self._places = places.view(-1)
        if self._window != (start, stop, width):
            self._window = (start, stop, width)
            self._views = [
                (k[start:stop, :, :width], v[start:stop, :, :width])
                for k, v in zip(self.keys, self.values, strict=True)
            ]

    def visible(self, positions: Tensor, width: int) -> Tensor:
        """The columns that each token may see, as booleans [n, S, width]."""
        return self._column_ids[:width] <= positions.unsqueeze(-1)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Called by the model's attention: store new keys and values [n, heads, S, dim]; return the keys and values of
        the window.
        """
        keys, values = self._flat[layer_idx]
        keys.index_copy_(0, self._places, key_states.reshape(-1, keys.shape[1]))
        values.index_copy_(0, self._places, value_states.reshape(-1, values.shape[1]))
        return self._views[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always 0, because positions are given explicitly."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Used only in a pass without a mask, which attends to its own tokens alone."""
        return query_length, 0

    def copy_slots(self, sources: list[int], targets: list[int], width: int) -> None:
        """Copy the first `width` columns of slots. All sources are read before any target is written."""
        for store in (self.keys, self.values):
            if len(sources) == 1:  # the usual case; several times cheaper than indexing with lists
                store[:, targets[0], :, :width] = store[:, sources[0], :, :width]
            else:
                store[:, targets, :, :width] = store[:, sources, :, :width]

    def read(self, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """A compact copy of one row's first `length` tokens: keys and values [layers, heads, length, dim]."""
        return self.keys[:, slot, :, :length].clone(), self.values[:, slot, :, :length].clone()

    def write(self, slot: int, length: int, keys: Tensor, values: Tensor) -> None:
        """Restore the first `length` tokens of a copy from `read`."""
        self.keys[:, slot, :, :length] = keys[:, :, :length]
        self.values[:, slot, :, :length] = values[:, :, :length]


class SavedCache(NamedTuple):
    """A session's keys and values [layers, heads, K, dim] for `tokens` [K], computed by policy `version`, with the
    adapter of `role` if each role has one.
    """

    version: int
    tokens: list[int]
    keys: Tensor
    values: Tensor
    role: str = ""

    @property
    def bytes(self) -> int:
        """The memory of the keys and values, in bytes."""
        return int(self.keys.nbytes + self.values.nbytes)


class SessionCaches:
    """The caches that open sessions keep between turns, up to `bytes_max` in total.

    Trio's thread opens and closes sessions, and the torch thread stores and reads caches, so a lock protects them. A
    cache is dropped when its session closes or when the weights change.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._lock = threading.Lock()
        self._live: dict[str, SavedCache | None] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return sum(1 for saved in self._live.values() if saved is not None)

    def open(self, session: str) -> None:
        """Allow the session to store a cache."""
        with self._lock:
            self._live.setdefault(session, None)

    def close(self, session: str) -> None:
        """Drop the session's cache. Does nothing if the session is not open."""
        with self._lock:
            self._forget(session)
            self._live.pop(session, None)

    def has_room(self, session: str, size: int) -> bool:
        """Whether the session is open and `size` more bytes fit."""
        with self._lock:
            return session in self._live and self._bytes + size <= self.bytes_max

    def store(self, session: str, saved: SavedCache) -> None:
        """Keep the cache, unless the session has closed."""
        with self._lock:
            if session in self._live:
                self._forget(session)
                self._live[session] = saved
                self._bytes += saved.bytes

    def take(self, session: str, version: int, role: str = "") -> SavedCache | None:
        """Remove and return the session's cache; None if the session has no cache, or if other weights computed it."""
        with self._lock:
            saved = self._live.get(session)
            self._forget(session)
        return saved if saved is not None and (saved.version, saved.role) == (version, role) else None

    def _forget(self, session: str) -> None:
        saved = self._live.get(session)
        if saved is not None:
            self._live[session] = None
            self._bytes -= saved.bytes
