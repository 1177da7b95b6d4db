"""Conversations laid end to end: what one micro-batch trains on. N tokens, A streams, H the target's width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pack:
    """Several documents (one conversation each) in one row of tokens; they never see one another.

    ids [N] int64; positions [N] int64, restarting at 0; document [N] int64, the document's number; mask [N] bool
    (m_j: the assistant wrote token j); bounds: each document's [start, end); streams [N, A·H] and last [N, H] in the
    target's dtype; top [N] int64: the target's argmax at each position, −1 where it lies outside the draft vocabulary;
    lse [N]: log Σ exp of the target's logits over its whole vocabulary, at least float32 (both are read only where a
    teacher stands, see `runs`). draws: per document the name of its dice (seed, epoch and conversation: the same name
    gives the same noise wherever and whenever it is packed); empty where nothing random may happen (evaluation).
    """

    ids: Tensor
    positions: Tensor
    document: Tensor
    mask: Tensor
    bounds: tuple[tuple[int, int], ...]
    streams: Tensor
    last: Tensor
    top: Tensor
    lse: Tensor
    draws: tuple[str, ...] = ()

    def runs(self) -> Tensor:
        """[N]: how many tokens of one answer span follow row i directly.

        Row i trains depth k iff runs[i] ≥ k + 2: all of x_{i+1} … x_{i+2+k} belong to one answer span.

            tokens      u0  u1  a2  a3  a4  u5        a: the assistant wrote it
            runs         0   3   2   1   0   0
            depth 0 at       ✓   ✓                    row 1: sees a2, predicts a3, which an engine would draft
            depth 1 at       ✓                        row 1: sees a3, predicts a4
        """
        return answer_runs(self.mask, self.bounds)


def answer_runs(mask: Tensor, bounds: Sequence[tuple[int, int]]) -> Tensor:
    """mask [N] bool → [N] int64: the length of the unbroken masked run that begins at i+1, within i's document."""
    out = torch.zeros(mask.shape[0], dtype=torch.int64)
    flags = mask.tolist()
    for start, end in bounds:
        run = 0
        for i in range(end - 1, start - 1, -1):
            out[i] = run
            run = run + 1 if flags[i] else 0
    return out.to(mask.device)


def layout(lengths: Sequence[int]) -> tuple[Tensor, Tensor, tuple[tuple[int, int], ...]]:
    """Document lengths → (positions [N], document [N], bounds)."""
    starts = [0]
    for n in lengths:
        starts.append(starts[-1] + n)
    positions = torch.cat([torch.arange(n) for n in lengths])
    document = torch.cat([torch.full((n,), d) for d, n in enumerate(lengths)])
    return positions, document, tuple(zip(starts[:-1], starts[1:], strict=True))
