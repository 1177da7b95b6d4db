"""The target's distribution at the teacher positions. P positions, H the target's width, V and Vd vocabularies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_train.device.shapes import pad_rows


@dataclass(frozen=True)
class Teacher:
    """The target's head, whole (`head`: last [P, H] → logits [P, V]) and cut to the draft vocabulary.

    draft_ids [Vd] int64: the target ids of the draft vocabulary, ascending; draft_rows [Vd, H]: their rows of the head.
    """

    head: Callable[[Tensor], Tensor]
    draft_ids: Tensor
    draft_rows: Tensor

    def draft_logits(self, last: Tensor) -> Tensor:
        """last [P, H] → the target's logits on the draft vocabulary [P, Vd], in float32 or wider."""
        return _wide(F.linear(pad_rows(last), self.draft_rows))[: last.shape[0]]

    def columns(self, tops: Tensor) -> Tensor:
        """Target ids [P] → their columns in the draft vocabulary; −1 stays −1."""
        return torch.where(tops >= 0, torch.searchsorted(self.draft_ids, tops.clamp(min=0)), -1)

    @torch.no_grad()
    def whole(self, last: Tensor) -> tuple[Tensor, Tensor]:
        """last [P, H] → what needs the full vocabulary, by slices of rows: (top [P] int64, lse [P]).

        top: the target's argmax, −1 where it lies outside the draft vocabulary (a token of the draft vocabulary that
        ties with one outside counts as the argmax). lse: log Σ_v exp(logit), in float32 or wider.
        """
        tops, sums = [last.new_empty(0, dtype=torch.int64)], [_wide(last.new_empty(0))]
        for part in pad_rows(last).split(CHUNK):
            logits = self.head(part)
            best, place = _wide(logits[:, self.draft_ids]).max(-1)
            tops.append(torch.where(best >= _wide(logits.amax(-1)), self.draft_ids[place], -1))
            sums.append(_wide(logits).logsumexp(-1))
        return torch.cat(tops)[: last.shape[0]], torch.cat(sums)[: last.shape[0]]


CHUNK = 256  # rows whose full logits are held at once


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
