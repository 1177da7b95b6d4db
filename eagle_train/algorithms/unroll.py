"""Attention of the unroll, in its plainest form: masked SDPA, document by document. The reference.

A row at depth k sees the depth-0 keys of rows ≤ i of its own document, and its own keys of depths 1…k. Nothing else.
R rows, Q query heads, G key/value heads, D head size. The masks are T×T(k+1) per document: simple, and right for
short conversations; its cost at depth k grows with k.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_train.device.shapes import pad_rows


class UnrollMemory:
    """The keys and values of one pack's unroll. `attend` is what `step` is given at every depth."""

    def __init__(self, bounds: Sequence[tuple[int, int]], num_layers: int) -> None:
        self.bounds = bounds
        self.base: list[tuple[Tensor, Tensor] | None] = [None] * num_layers
        self.own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(num_layers)]
        self.rows: Tensor | None = None

    def descend(self, place: Tensor | None, rows: Tensor) -> None:
        """Go one depth down with rows `rows` [R], their places in the pack, in ascending order (repeats allowed).

        `place` [R]: where each stood among the rows of the depth before; None on the way from depth 0.
        """
        if place is not None:
            self.own = [[(k[place], v[place]) for k, v in layer] for layer in self.own]
        self.rows = rows

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [R, Q, D], k and v [R, G, D] → [R, Q, D]; the new keys are kept."""
        if self.rows is None:
            self.base[layer] = (k, v)
            return torch.cat([self._causal(q[a:b], k[a:b], v[a:b]) for a, b in self.bounds])
        self.own[layer].append((k, v))
        return torch.cat([self._deep(layer, q, a, b) for a, b in self.bounds])

    @staticmethod
    def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, causal=True)

    def _deep(self, layer: int, q: Tensor, start: int, end: int) -> Tensor:
        """The rows of one document: its depth-0 keys up to each row, and a diagonal for each deeper depth."""
        assert self.rows is not None
        first, stop = torch.searchsorted(self.rows, torch.tensor([start, end], device=self.rows.device)).tolist()
        if first == stop:
            return q[:0]
        rows, base = self.rows[first:stop] - start, self.base[layer]
        assert base is not None, f"depth 0 of layer {layer} was not run"
        own = [(k[first:stop], v[first:stop]) for k, v in self.own[layer]]
        seen = rows[:, None] >= torch.arange(end - start, device=rows.device)
        eye = torch.eye(stop - first, dtype=torch.bool, device=rows.device)
        keys = torch.cat([base[0][start:end], *(k for k, _ in own)])
        values = torch.cat([base[1][start:end], *(v for _, v in own)])
        return sdpa(q[first:stop], keys, values, mask=torch.cat([seen, *([eye] * len(own))], dim=1))


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """q [R, Q, D], k and v [S, G, D], mask [R, S] bool (True: seen), or the causal square → [R, Q, D].

    Rows and keys are padded to sizes that repeat; no real row sees a padded key.
    """
    rows, keys, groups = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    q, k, v = pad_rows(q), pad_rows(k), pad_rows(v)
    if mask is not None:
        mask = F.pad(F.pad(mask, (0, k.shape[0] - keys)), (0, 0, 0, q.shape[0] - rows), value=True)
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], attn_mask=mask, is_causal=causal
    )
    return out[0].transpose(0, 1)[:rows]
