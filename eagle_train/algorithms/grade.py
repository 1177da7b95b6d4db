"""Loss and figures of an unroll: the step that all algorithms share.

A row at depth k costs

    features · smooth_l1(output of row i at depth k, last_{i+1+k})  +  the terms of `losses.Loss` on its logits

times the depth's weight, over the depth-0 rows of its conversation. smooth_l1 is the mean over the width of x²/2 where
|x| < 1 and |x| − 1/2 beyond, x the difference (EAGLE, arXiv 2401.15077, equation of L_reg, and its released code).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_train.algorithms.fused import Job, fused_loss
from eagle_train.algorithms.interface import DepthResult, Results
from eagle_train.algorithms.losses import Loss
from eagle_train.algorithms.teacher import Teacher
from eagle_train.algorithms.unroll import DepthRows
from eagle_train.config.schema import SMOOTH_L1, AlgorithmConfig, loss_terms
from eagle_train.data.pack import Pack
from eagle_train.draft.head import DraftHead


@dataclass(frozen=True)
class Terms:
    """What counts how much: one weight per depth, the loss on logits, the weight of smooth_l1 on features.

    by_token: each trained token weighs the same, instead of each conversation.
    """

    weights: tuple[float, ...]
    loss: Loss = Loss()
    features: float = 0.0
    by_token: bool = False

    def __post_init__(self) -> None:
        assert self.weights and all(w >= 0 for w in self.weights), self.weights

    @classmethod
    def of(cls, settings: AlgorithmConfig) -> Terms:
        """From the settings."""
        terms = dict(loss_terms(settings.loss))
        features = terms.pop(SMOOTH_L1, 0.0)
        return cls(settings.weights, Loss(tuple(terms.items()), settings.top_k), features, settings.mean == "token")

    def share(self, taught_rows: int) -> int:
        """What a conversation with so many depth-0 rows adds to the divisor."""
        return taught_rows if self.by_token else int(taught_rows > 0)


def grade(
    head: DraftHead, pack: Pack, teacher: Teacher, depths: Sequence[DepthRows], terms: Terms, *, detailed: bool
) -> Results | None:
    """The unroll's `depths` → loss and figures; None where there are none.

    Each row weighs 1 / (its conversation's depth-0 rows), or 1 with `by_token`, times its depth's weight. The sum of
    the losses, divided by the sum of `share` over the whole optimizer window and all ranks, is the loss: so packing,
    padding, accumulation and ranks change nothing.
    """
    if not depths:
        return None
    count = torch.bincount(pack.document[depths[0].rows], minlength=len(pack.bounds))[pack.document]
    if terms.by_token:
        count = torch.ones_like(count)
    count = count.to(_wide(head.dtype))
    job = Job(
        pack=pack,
        teacher=teacher,
        loss=terms.loss,
        places=[d.rows + 1 + d.depth for d in depths],
        weights=[terms.weights[d.depth] / count[d.rows] for d in depths],
        detailed=detailed,
    )
    outputs = [head.output(d.hidden) for d in depths]
    loss = fused_loss(job, head.output_weight, outputs)
    sums = job.losses
    if terms.features:
        apart = [terms.features * _smooth_l1(job, k, x) for k, x in enumerate(outputs)]
        loss = loss + torch.stack(apart).sum()
        sums = [a + b.detach() for a, b in zip(sums, apart, strict=True)]
    return Results(loss, [_result(d, job, k, sums[k]) for k, d in enumerate(depths)])


def _smooth_l1(job: Job, k: int, output: Tensor) -> Tensor:
    """The weighted sum over depth k's rows, in at least float32."""
    wide = _wide(output.dtype)
    rows = F.smooth_l1_loss(output.to(wide), job.pack.last[job.places[k]].to(wide), reduction="none").mean(-1)
    return (rows * job.weights[k]).sum()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _result(depth: DepthRows, job: Job, k: int, loss: Tensor) -> DepthResult:
    figures = job.figures[k]
    empty = depth.hidden.new_empty(0)
    return DepthResult(
        depth=depth.depth,
        loss=loss,
        rows=depth.rows,
        correct=torch.cat([empty, *figures.correct]),
        accept=torch.cat([empty, *figures.accept]),
        alpha=torch.cat([empty, *figures.alpha]),
        outside=int((job.pack.top[job.places[k]] < 0).sum()),
    )
