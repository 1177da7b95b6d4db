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

    @torch.no_grad()
    def tops(self, last: Tensor) -> Tensor:
        """last [P, H] → the target's argmax [P] int64, or −1 where it lies outside the draft vocabulary.

        A token of the draft vocabulary that ties with one outside counts as the argmax.
        """
        out = [last.new_empty(0, dtype=torch.int64)]
        for part in pad_rows(last).split(CHUNK):
            logits = self.head(part)
            best, place = _wide(logits[:, self.draft_ids]).max(-1)
            out.append(torch.where(best >= _wide(logits.amax(-1)), self.draft_ids[place], -1))
        return torch.cat(out)[: last.shape[0]]

    @torch.no_grad()
    def log_sum_exp(self, last: Tensor) -> Tensor:
        """last [P, H] → log Σ_v exp(logit) over the full vocabulary [P], in float32 or wider."""
        parts = [_wide(self.head(part)).logsumexp(-1) for part in pad_rows(last).split(CHUNK)]
        return torch.cat(parts)[: last.shape[0]]


CHUNK = 256  # rows whose full logits are held at once


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
