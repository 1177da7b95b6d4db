"""Preallocated key/value memory for the target and for the draft; going back is moving a length, nothing is copied.

G key/value heads, D head size, C capacity in tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class _Slots(CacheLayerMixin):
    """One layer of the target's cache, as `transformers` asks for it: keys and values [1, G, C, D], `length` in use."""

    is_sliding = False
    is_croppable = True

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = key_states.new_empty(*key_states.shape[:2], self.capacity, key_states.shape[3])
        self.values = value_states.new_empty(*value_states.shape[:2], self.capacity, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        end = self.length + key_states.shape[2]
        assert end <= self.capacity, f"cache of {self.capacity} tokens asked to hold {end}"
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity

    def get_max_cache_shape(self) -> int:
        """The same, as transformers called it before 5.24."""
        return self.capacity


class TargetCache:
    """The target's memory for one request. `cache` is what the model is given."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        self._slots = [_Slots(capacity) for _ in range(num_layers)]
        self.cache = Cache(layers=list(self._slots))

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._slots[0].length

    def rewind(self, length: int) -> None:
        """Forget everything from position `length` on."""
        assert length <= self.length, f"cannot rewind {self.length} tokens to {length}"
        for slot in self._slots:
            slot.length = length

    def snapshot(self) -> list[tuple[Tensor, Tensor]]:
        """Per layer, the keys and values in use [1, G, length, D] (views)."""
        out = []
        for slot in self._slots:
            assert slot.keys is not None and slot.values is not None
            out.append((slot.keys[:, :, : slot.length], slot.values[:, :, : slot.length]))
        return out


class DraftCache:
    """The draft's memory for one request: row i of the alignment lies in slot i, a drafted depth k in slot i+k.

    A chain's own keys take the slots that the next verification overwrites with true ones, so what a drafted step sees
    is exactly what the unroll lets it see.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keys k and v [R, G, D] for slots length … length+R−1; each row sees every slot up to its own.

        q [R, Q, D], or the last ones of them alone → like q.
        """
        rows, end = q.shape[0], self.length + k.shape[0]
        assert end <= self.capacity, f"draft cache of {self.capacity} rows asked to hold {end}"
        keys, values = self._keys[layer], self._values[layer]
        if keys is None or values is None:
            keys = k.new_empty(self.capacity, *k.shape[1:])
            values = v.new_empty(self.capacity, *v.shape[1:])
            self._keys[layer], self._values[layer] = keys, values
        keys[self.length : end], values[self.length : end] = k, v
        groups = q.shape[1] // k.shape[1]
        seen = torch.ones(rows, end, dtype=torch.bool, device=q.device).tril(end - rows) if rows > 1 else None
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys[:end].repeat_interleave(groups, dim=1).transpose(0, 1)[None],
            values[:end].repeat_interleave(groups, dim=1).transpose(0, 1)[None],
            attn_mask=seen,
        )
        return out[0].transpose(0, 1)

    def advance(self, rows: int) -> None:
        """Count the rows just written as held (all layers have been run)."""
        self.length += rows

    def rewind(self, length: int) -> None:
        """Forget the rows from `length` on."""
        assert length <= self.length, f"cannot rewind {self.length} rows to {length}"
        self.length = length
